"""Every way to compute the answer to a `Request`.

A kernel is a module with `name`, `supports(request)` (None = yes, else the reason in words) and
`run(request)`. Kernels never import each other.
"""

"""Everything that computes: requests, dispatch and kernels."""

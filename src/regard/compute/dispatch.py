"""Which kernel answers a request, or why the named one cannot.

Owns the best-first list of kernels. Must not know how any of them computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from regard.compute.kernels import fused
from regard.compute.options import Options
from regard.compute.request import Request, Result, request_of
from regard.errors import OptionError, safe_text
from regard.rules.visibility import Block

if TYPE_CHECKING:
    from regard.boundary.arrays import Array
    from regard.compute.gradients import GradientRequest
    from regard.compute.results import Gradients


class Kernel(Protocol):
    """What a kernel module offers."""

    name: str

    def status(self) -> str:
        """Whether the kernel can be used on this machine, in words."""

    def knows(self, part: str) -> bool:
        """Whether it has the score or the normalisation of that name, such as "Cosine"."""

    def supports(self, request: Request) -> str | None:
        """None if the kernel can compute the request, else the reason in words."""

    def run(self, request: Request) -> Result:
        """Compute the request."""

    def gradients(self, call: GradientRequest) -> dict[str, Any] | None:
        """The gradients in `call.wrt`, in the shapes and dtypes that the call says."""


def kernels() -> Iterator[Kernel]:
    """Every kernel, best first. The reference is imported only if the first one is not enough."""
    yield fused
    from regard.compute.kernels import reference

    yield reference


def kernel_names() -> tuple[str, ...]:
    """The names that `kernel=` accepts."""
    return tuple(kernel.name for kernel in kernels())


def choose(request: Request) -> Kernel:
    """The kernel that the request names, or the first that supports it.

    A kernel that the caller named is never replaced: if it cannot answer, that is an error.
    """
    name: Any = request.options.kernel
    if name is None:
        if fused.supports(request) is None:  # most calls: no generator is made for them
            return fused
        return next(kernel for kernel in kernels() if kernel.supports(request) is None)
    for kernel in kernels():
        if isinstance(name, str) and kernel.name == name:
            reason = kernel.supports(request)
            if reason is not None:
                raise OptionError(f'kernel "{name}" cannot answer this call: {reason}')
            return kernel
    known = ", ".join(f'"{known}"' for known in kernel_names())
    raise OptionError(
        f"kernel must be one of {known} (None: the best that fits), not {safe_text(repr(name), 60)}"
    )


def run(request: Request) -> Result:
    """Compute the request with the chosen kernel."""
    chosen = choose(request)
    if request.options.positions is None:
        return chosen.run(request)
    if chosen is fused:
        from regard.compute.positioned import turns_of

        turns = turns_of(request)
        if turns is not None:
            return fused.run(request, turns)
    return chosen.run(without_positions(request))


def without_positions(request: Request) -> Request:
    """The same call for a kernel: its positions are in the arrays."""
    if request.options.positions is None:
        return request
    from regard.compute.positioned import lowered

    return lowered(request)


def run_arrays(
    query: Any, key: Any, value: Any, options: Options, *, quantized: bool = False
) -> Any:
    """Attention on NumPy arrays; where `quantized`, on keys and values of an int8 cache."""
    return run(request_of(query, key, value, options, quantized=quantized)).returned


def gradients_of_arrays(
    query: Any, key: Any, value: Any, grad_output: Any, **options: Any
) -> Gradients[Array]:
    """The gradients of attention on NumPy arrays, with the options of `make_gradient_request`."""
    from regard.compute.gradients import make_gradient_request, with_positions

    call = make_gradient_request(query, key, value, grad_output, **options)
    if "sink" in call.wrt:
        call = replace(call, grad_output=_of_rows_that_see(call))
    return call.fitted(with_positions(call, partial(_gradients, choose(call.request))))


def _gradients(kernel: Kernel, call: GradientRequest) -> dict[str, Any]:
    """What the kernel makes, or the reference where that one cannot."""
    made = kernel.gradients(call) if call.request.options.positions is None else None
    if made is None:
        from regard.compute.kernels import reference

        made = reference.gradients(call)
    return made


def _of_rows_that_see(call: GradientRequest) -> Array:
    """The gradient of the output, finite in rows that see no key: their output is always 0.

    Through the sink's gradient, a product with that output, they would reach other rows.
    """
    from regard.compute.evaluation import BLOCK_CELLS

    request, grad = call.request, call.grad_output
    odd = np.asarray(~np.isfinite(grad).all(axis=-1))
    if not odd.any() or request.rules is None:
        return grad
    grad = grad.copy()
    keys = request.shape[-1]
    for *batch, head in np.argwhere(odd.any(axis=-1)):
        rows = np.flatnonzero(odd[(*batch, head)])
        for some in np.array_split(rows, 1 + rows.size * keys // BLOCK_CELLS):
            block = Block(request.shape, (*batch,), head, some, request.query_positions)
            sees = np.broadcast_to(request.rules.block(block), (some.size, keys)).any(axis=-1)
            grad[(*batch, head, some[~sees])] = 0
    return grad


def second_gradients_of_arrays(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    *,
    arrives: Mapping[str, Array],
    wrt: Collection[str],
    **options: Any,
) -> dict[str, Array]:
    """The gradients of what `gradients_of_arrays` returns, by the reference, in the inputs' shapes.

    `arrives` has the gradients of the loss with respect to the first gradients, by input. `wrt`
    says what to return: names of inputs, "grad_output" and "grad_lse". The options are those of
    `make_gradient_request`.
    """
    from regard.compute.gradients import fit, make_gradient_request
    from regard.compute.kernels import reference

    call = make_gradient_request(query, key, value, grad_output, wrt=tuple(arrives), **options)
    given = {**call.inputs, "grad_output": grad_output, "grad_lse": options.get("grad_lse")}
    made = reference.second_gradients(call, arrives, wrt)
    return {
        name: fit(made[name], given[name]) if name in made else np.zeros_like(given[name])
        for name in wrt
    }

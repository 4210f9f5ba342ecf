"""One call of `regard.gradients`: the checks of its arguments, and the shapes of its results.

Owns the sums over axes that were broadcast. Must not know how a kernel computes gradients; the
backward passes are in kernels/reference.py and kernels/cpp/backward.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import as_array, is_float, round_once
from regard.boundary.arrays import Array
from regard.compute.positioned import Rotation, lowered
from regard.compute.request import Request, make_request
from regard.compute.results import Gradients
from regard.errors import DtypeError, OptionError, Setting, ShapeError, safe_text
from regard.positions import Rotary

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUTS = ("query", "key", "value", "bias", "sink", "scale")


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """A checked call of attention, the gradients of its results, and which ones are requested."""

    request: Request
    grad_output: Array  # (…, H, L, E)
    wrt: frozenset[str]
    inputs: Mapping[str, Array]  # as the caller gave them; no scale
    output: Array | None = None  # (…, H, L, E)
    lse: Array | None = None  # (…, H, L)
    grad_lse: NDArray[np.float64] | None = None  # (…, H, L)
    turned: bool = False  # whether those of query and key are turned back before they are rounded

    def whole(self, name: str) -> tuple[int, ...]:
        """The shape of an input's gradient before sums over its broadcast axes."""
        request = self.request
        if name == "bias":
            bias = request.options.bias
            assert bias is not None
            return (1,) * (len(request.shape) - bias.ndim) + bias.shape
        if name == "sink":
            return request.shape[:-2]
        array: Array = getattr(request, name)
        return array.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of a kernel's gradient: the input's, or wider if axes are summed after it."""
        given = self.inputs[name]
        summed = given.size != math.prod(self.whole(name))
        summed |= name == "bias" or not given.dtype.isnative
        summed |= self.turned and name in ("query", "key")
        return self.request.accumulator if summed else given.dtype

    def deviations(self, output: Array, lse: Array) -> Array:
        """How far the given output and lse are from these, as `check_given` takes it."""
        assert self.output is not None
        assert self.lse is not None
        with np.errstate(all="ignore"):
            own = row_products(self.grad_output, output)
            off = own - row_products(self.grad_output, self.output)
            return np.stack([np.expm1(lse - self.lse.astype(np.float64)), off], axis=-1)

    def check_given(self, deviations: NDArray[np.float64], squares: Mapping[str, Array]) -> None:
        """Refuse an output or an lse that does not belong to the inputs.

        `deviations` (…, H, L, 2): for each row, the sum of its weights, with the sink's, minus 1;
        and the sum of its gradients of scores, minus what that sum must be. Where these were made
        with an output and lse computed again: by how much the given ones would change them. Each
        may be as large as rounding can make it, by the bounds below. `squares`: the squared lengths
        of each query and row of grad_output (…, H, L), and of the longest key and value (…, G).
        """
        assert self.lse is not None
        assert self.output is not None
        if not self.lse.size:
            return
        request, lse = self.request, np.abs(self.lse.astype(np.float64))
        unit = max(np.finfo(one).eps for one in (self.lse.dtype, request.accumulator)) / 2
        scale = request.options.scale
        if scale is None:
            scale = 1 / math.sqrt(request.query.shape[-1] or 1)
        group = request.shape[-3] // request.key.shape[-3]
        with np.errstate(all="ignore"):
            # Nearly every result is far within the least that the bounds below can be.
            least = np.sqrt(np.min(squares["grad_output"]) * np.min(squares["value"]))
            terms_at_least = unit * (request.shape[-1] + 16)
            grads_at_least = 4 * (terms_at_least + unit * 4 * request.value.shape[-1]) * least
            largest = np.abs(deviations).max(axis=tuple(range(deviations.ndim - 1)))
            if (largest <= (terms_at_least, grads_at_least)).all():
                return
            key, value = (
                np.repeat(np.sqrt(squares[name]), group, axis=-1)[..., None]
                for name in ("key", "value")
            )
            # No weight exceeds 1, so what a bias or a sink adds is bounded by scores and lse.
            size = abs(scale) * np.sqrt(squares["query"]) * key
            terms = (request.query.shape[-1] + 16) * size + request.shape[-1] + 16 + 4 * lse
            length, wide = np.sqrt(squares["grad_output"]), request.value.shape[-1]
            # No number of the output exceeds the largest value, and each was rounded once.
            one, zero = (float(np.spacing(self.output.dtype.type(x))) / 2 for x in (1, 0))
            rounded = (one * value + zero * math.sqrt(wide)) * length
            grads = length * value
            if self.grad_lse is not None:
                grads = grads + np.abs(self.grad_lse)
            bounds = unit * terms, unit * (terms + 4 * wide) * 4 * grads + rounded
        said = (
            "the weights add up to {:.6g} instead of 1",
            "the scores' gradients are off by {:.3g}",
        )
        named = zip(
            ("lse", "output"), said, (1, 0), np.moveaxis(deviations, -1, 0), bounds, strict=True
        )
        for name, what, right, off, bound in named:
            wrong = np.isfinite(off) & (np.abs(off) > bound)
            if wrong.any():
                at = tuple(int(one[0]) for one in np.nonzero(wrong))
                raise OptionError(
                    f"{name} does not belong to these inputs: in row {at[-1]} of head {at[-2]} "
                    f"{what.format(right + off[at])}; pass what attention returned for the same "
                    "inputs and options"
                )

    def fitted(self, made: Mapping[str, Any]) -> Gradients[Array]:
        """What a kernel returned, in the shapes and dtypes of the inputs."""
        fitted = {name: fit(made[name], self.inputs[name]) for name in made if name != "scale"}
        found = {name: fitted.pop(name) for name in self.request.parameters if name in fitted}
        own = {name: one if one.ndim else float(one) for name, one in found.items()}
        scale = float(made["scale"]) if "scale" in made else None
        return Gradients(**fitted, scale=scale, parameters=own or None)


def with_positions(
    call: GradientRequest, of_kernel: Callable[[GradientRequest], dict[str, Any]]
) -> dict[str, Any]:
    """The gradients of a call with positions: a kernel's, those of query and key turned back."""
    request, positions = call.request, call.request.options.positions
    if positions is None or call.wrt & {f"positions.{name}" for name in positions.parameters()}:
        return of_kernel(call)  # by the declared steps
    turned = isinstance(positions, Rotary)
    made = of_kernel(replace(call, request=lowered(request), turned=turned))
    if isinstance(positions, Rotary):
        arrays: dict[str, Any] = {name: made[name] for name in ("query", "key") if name in call.wrt}
        dtypes = {name: call.dtype(name) for name in arrays}
        made |= Rotation.of(positions, request).back(arrays, dtypes, request.options.threads)
    return made


def fit(whole: Array, given: Array) -> Array:
    """A gradient in its input's shape and dtype: summed over broadcast axes, then rounded once.

    That of integers or booleans is in float64.
    """
    dtype = given.dtype if is_float(given.dtype) else np.dtype(np.float64)
    if whole.size == given.size and whole.dtype == dtype:
        return whole.reshape(given.shape)
    shape = (1,) * (whole.ndim - given.ndim) + given.shape
    sizes = zip(shape, whole.shape, strict=True)
    axes = tuple(axis for axis, (one, size) in enumerate(sizes) if one != size)
    with np.errstate(all="ignore"):
        summed = np.asarray(whole.sum(axis=axes) if axes else whole)
        once = np.asarray(round_once(summed, dtype))
        return once.astype(dtype, copy=False).reshape(given.shape)


def row_products(first: Array, second: Array) -> Array:
    """The sum of products of each two rows, in float64; of a row with itself its squared length."""
    sums = np.einsum("...d,...d->...", first, second, dtype=np.float64)
    return np.asarray(sums)


def make_gradient_request(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    *,
    output: Any = None,
    lse: Any = None,
    grad_lse: Any = None,
    wrt: Any = ("query", "key", "value"),
    **stated: Any,
) -> GradientRequest:
    """Check one call of `regard.gradients`, with the options of `make_request` too."""
    given = {"query": query, "key": key, "value": value}
    given |= {name: x for name in ("bias", "sink") if (x := stated.get(name)) is not None}
    inputs: dict[str, Any] = {name: as_array(name, x) for name, x in given.items()}
    request = make_request(**{**stated, **inputs})
    inputs |= request.parameters
    wanted = wanted_names(wrt, (*INPUTS, *request.parameters), {*inputs, "scale"})
    for name in wanted - {"scale"}:
        if not is_float(inputs[name].dtype):
            raise DtypeError(
                f"{name} has dtype {inputs[name].dtype}, which has no gradients; pass floats, "
                f"such as {name}.astype(float)"
            )
    _check_parts(request, wanted, output, grad_lse)
    if (output is None) != (lse is None):
        missing, there = ("output", "lse") if output is None else ("lse", "output")
        raise OptionError(
            f"{there} is given but {missing} is not; pass both, as attention(…, return_lse=True) "
            "returned them, or neither"
        )
    wide = (*request.shape[:-1], request.value.shape[-1])
    dtypes = (request.dtype,)
    grad = _result("grad_output", grad_output, request, wide, dtypes)
    if output is not None:
        output = _result("output", output, request, wide, (*dtypes, request.accumulator))
        lse = _result("lse", lse, request, wide[:-1], (request.lse_dtype, np.dtype(np.float64)))
    if grad_lse is not None:
        grad_lse = _result("grad_lse", grad_lse, request, wide[:-1], None)
        grad_lse = np.ascontiguousarray(grad_lse, np.float64)
    return GradientRequest(request, grad, wanted, inputs, output, lse, grad_lse)


def _check_parts(request: Request, wanted: Collection[str], output: Any, grad_lse: Any) -> None:
    """What other scores and normalisations do not have."""
    positioned = [name for name in wanted if name.startswith("positions.")]
    if positioned and output is not None:
        raise OptionError(
            f"output and lse save work that the gradient of {positioned[0]} needs; leave them out"
        )
    if not request.parts:
        return
    part = request.parts[-1]
    if output is not None:
        raise OptionError(
            f"output and lse save a softmax over dot products the work of computing them again, "
            f"but this call has {part.option}={part}; leave them out"
        )
    if grad_lse is not None and request.options.normalize is not None:
        raise OptionError(
            f"grad_lse is given, but {request.options.normalize} has no log-sum-exp; leave it out"
        )
    if "scale" in wanted and request.options.score is not None and request.options.scale is None:
        raise OptionError(
            f'wrt has "scale", but {request.options.score} has none by itself; pass ',
            Setting("scale", 1.0),
            ", or leave it out",
        )


def wanted_names(wrt: Any, known: Sequence[str], given: Container[str]) -> frozenset[str]:
    """The names in `wrt`, each of which is `known` and, if it is an input, `given`."""
    names = (wrt,) if isinstance(wrt, str) else wrt
    if not isinstance(names, Iterable):
        raise DtypeError(f"wrt must be names of inputs, not {safe_text(repr(wrt), 60)}")
    names = tuple(names)
    for name in names:
        if name not in known:
            raise OptionError(f"wrt has {safe_text(repr(name), 60)}{_why_not(name, known)}")
        if name in INPUTS and name not in given:
            raise OptionError(
                f'wrt has "{name}", but the call has no {name}; pass one, or leave it out'
            )
    return frozenset(names)


def _why_not(name: Any, known: Sequence[str]) -> str:
    """Why something that is no input has no gradient here."""
    from regard.textbook.loss import WITHOUT_GRADIENT
    from regard.textbook.steps import textbook

    steps = textbook({"queries", "keys", "values"}, heads=False)
    reason = ""
    if isinstance(name, str) and name in WITHOUT_GRADIENT:
        reason = f", which has no gradient: {WITHOUT_GRADIENT[name]}"
    elif name in [step.name for step in steps if step.op != "given"]:
        reason = ", which is no input; explain(…, grad_output=…) has the gradients on the way"
    listed = ", ".join(f'"{one}"' for one in known)
    return f"{reason}; it may have {listed}"


def _result(
    name: str,
    given: Any,
    request: Request,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype[Any], ...] | None,
) -> Array:
    """A result of the forward call, or a gradient of one, checked and with all its axes."""
    array = as_array(name, given)
    dtype = array.dtype.newbyteorder("=")
    wanted = request.natural_shape(*shape[len(request.shape) - 1 :])
    if array.shape != wanted:
        raise ShapeError(
            f"{name} has shape {array.shape} but attention returns {wanted} for these inputs; "
            "they must match"
        )
    if not is_float(dtype) or (dtypes is not None and dtype not in dtypes):
        allowed = " or ".join(sorted({str(one) for one in dtypes or ("floats",)}))
        raise DtypeError(f"{name} has dtype {dtype} but must have {allowed}")
    return array.reshape(shape)

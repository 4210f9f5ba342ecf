"""The fused kernel: streaming softmax in native code, never a matrix of scores.

Owns what native code supports and how arrays and rules are passed to it; the code is in cpp/. Must
not know other kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.boundary.arguments import is_float, spread
from regard.boundary.arrays import Array
from regard.compute import native
from regard.compute.quantized import whole_rows
from regard.compute.request import Request, Result
from regard.errors import safe_text
from regard.masks import Causal, Lengths, Segments, Window
from regard.normalizers import Sigmoid
from regard.rules.visibility import All, AnyOf, Boolean, Combined, Mask, Not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from numpy.typing import NDArray

    from regard.compute.gradients import GradientRequest


name = "fused"

# The rules that native code knows, by the method that says what is visible.
KNOWN = {rule.block for rule in (Boolean, Causal, Lengths, Segments, Window)}

# The scores and normalisations that it computes, by their classes' names: a score that is a dot
# product of rows made of queries with rows made of keys is one to native code.
_PARTS = {"dot", "General", "Cosine", "Features", "softmax", "Sigmoid"}

CHUNK = 256  # keys of a chunk; chunks begin at multiples of it
UNBOUNDED = -1
FARTHEST = 2**63 - 1


def status() -> str:
    """Whether the native module is there, and which instructions it uses."""
    if not native.BUILT:
        return f"not built; where there is a C++ compiler, run: {native.REBUILD}"
    if not native.target:
        return f"not usable: {native.refused['REGARD_TARGET']}"
    others = [one for one, runs in native.targets().items() if runs and one != native.target]
    return f"usable, for {native.target}" + (f" (also {', '.join(others)})" if others else "")


def knows(part: str) -> bool:
    """Whether the kernel computes the score or the normalisation of that name."""
    return part in _PARTS


def supports(request: Request) -> str | None:
    """None if native code can compute the request, else the reason."""
    if not native.BUILT:
        return "it is not built"
    options = request.options
    if not isinstance(options.normalize, (Sigmoid, type(None))):
        return f"it does not know normalize={type(options.normalize).__name__}"
    why: str | None = None if options.score is None else _dot_of_rows().refused(request)
    if why is not None:
        return why
    unknown = None if options.mask is None else _unknown(options.mask)
    if unknown is None:
        return None
    return f"it does not know the rule {safe_text(type(unknown).__name__, 60)}"


def _unknown(rule: Mask) -> Mask | None:
    """A rule that native code does not know, because its class has a `block` of its own."""
    if isinstance(rule, Combined):
        return next((u for part in rule.parts if (u := _unknown(part)) is not None), None)
    return None if type(rule).block in KNOWN else rule


def _dot_of_rows() -> ModuleType:
    """Imported on request: a dot product does not need the textbook."""
    from regard.compute import dot_of_rows

    return dot_of_rows


def run(request: Request, turns: tuple[Any, ...] | None = None) -> Result:
    """Compute the request in native code, where queries and keys are turned by `turns`."""
    request = _of_dots_alone(request)
    call, options = _Call(request), request.options
    shape = (*request.shape[:-1], request.value.shape[-1])
    output = _output(request, shape, call.read)
    weights = np.zeros(request.shape, call.accumulator) if options.return_weights else None
    lse = np.empty(shape[:-1], request.lse_dtype) if options.return_lse else None
    native.module.run(*call.arrays, output, weights, lse, *call.options, turns)
    output = request.natural(output)
    if options.out is not None:
        if not np.may_share_memory(output, options.out):
            options.out[...] = output
        output = options.out
    if weights is not None:
        with np.errstate(all="ignore"):
            weights = request.natural(weights).astype(request.dtype, copy=False)
    return Result(output, weights, None if lse is None else request.natural(lse))


def carry(request: Request, before: Array | None = None, *, apart: bool = False) -> Array:
    """The states (parts, …, H, L, 3 + E) of all rows after the request's keys, in one part.

    A state is a row's maximum, sum, divisor and output so far. The request's keys are a part of a
    call's; the states of those `before` are merged first, in their order. With `apart`, the states
    of every chunk of keys alone, each a part.
    """
    call = _Call(_of_dots_alone(request))
    parts = -(-request.shape[-1] // CHUNK) if apart else 1
    after = np.empty((parts, *_of_states(request)), call.accumulator)
    known = np.empty((0, *_of_states(request)), call.accumulator) if before is None else before
    written = after if apart else after[0]
    nothing = np.empty(0, request.output_dtype)  # its dtype chooses how products are made
    native.module.run_part(*call.arrays, known, written, nothing, None, None, *call.options)
    return after


def finish(request: Request, before: Array | None) -> tuple[Array, Array, Array]:
    """Output, log-sum-exp, and the rows that need all their keys again, from the states of all.

    The request has no keys. The order in which states are merged is that of `before`.
    """
    call = _Call(_of_dots_alone(request))
    rows = request.shape[:-1]
    known = np.empty((0, *_of_states(request)), call.accumulator) if before is None else before
    output = np.empty((*rows, request.value.shape[-1]), request.output_dtype)
    lse, again = np.empty(rows, request.lse_dtype), np.zeros(rows, np.uint8)
    native.module.run_part(*call.arrays, known, None, output, lse, again, *call.options)
    return output, lse, again.astype(np.bool_)


def _of_states(request: Request) -> tuple[int, ...]:
    return (*request.shape[:-1], 3 + request.value.shape[-1])


def _of_dots_alone(request: Request) -> Request:
    return request if request.options.score is None else _dot_of_rows().dot_request(request)


class _Call:
    """What the native module reads of a request: arrays, then options; `read` are all arrays."""

    def __init__(self, request: Request, *, wide: bool = False) -> None:
        # A scale that float32 cannot hold well may meet scores that it cannot hold either.
        options = request.options
        far = options.scale and not 1e-30 < abs(options.scale) < 1e30
        accumulator = np.dtype(np.float64) if wide or far else request.accumulator
        bias, sink, bias_rows = options.bias, options.sink, request.bias_rows
        self.accumulator = accumulator
        key, value = request.key, request.value
        self.arrays = [_readable(request.query, accumulator)]
        if request.quantized:
            self.arrays += whole_rows(key), whole_rows(value)
        else:
            self.arrays += _readable(key, accumulator), _readable(value, accumulator)
        left, right, length, rules = _compile(request)
        placed = options.mask is not None and options.mask.uses_position
        others = [
            None if bias is None else _spread_bias(_readable(bias, accumulator), request),
            None if bias_rows is None else np.ascontiguousarray(bias_rows),
            None if sink is None else np.ascontiguousarray(sink, dtype=np.float64),
            np.ascontiguousarray(request.query_positions) if placed else None,
            length,
        ]
        self.read = [*self.arrays, *others]
        for rule in rules:
            self.read += rule[1:3]
        scale = math.nan if options.scale is None else options.scale  # NaN: 1/√D
        sigmoid = options.normalize
        shift = sigmoid.bias if isinstance(sigmoid, Sigmoid) else math.nan  # NaN: a softmax
        threads = min(options.threads or native.default_threads(), native.MOST_THREADS)
        self.options = (
            *(*others, left, right, rules, scale, options.softcap or 0.0, shift),
            *(
                accumulator == np.float64,
                options.precision == "high",
                threads,
                native.usable_target(),
            ),
        )


def _spread_bias(bias: Array, request: Request) -> Array:
    """The bias with all axes, and all of its rows where queries choose among them."""
    rows = request.shape[-2] if request.bias_rows is None else bias.shape[-2]
    return spread(bias, (*request.shape[:-2], rows, request.shape[-1]))


# exp(x − lse) is off by as much as lse is rounded: here by 1e-8 of itself.
_LARGEST_LSE = 1e8
# The bit of `beyond` that says: an infinity of query or key is visible, its weight is finite.
_INFINITE = 2


def gradients(call: GradientRequest) -> dict[str, Any] | None:
    """The gradients, in native code; what leaves the range of float32, again in float64.

    None for calls that only the reference answers: what leaves the range of float64 on the way to
    finite gradients, logits of which exp(x − lse) knows nothing, as lse is rounded too, and visible
    infinities in query or key that leave weights finite.
    """
    if call.request.options.score is not None:
        made: dict[str, Any] | None = _dot_of_rows().gradients(call, _of_dots)
        return made
    return _of_dots(call)


def _of_dots(call: GradientRequest) -> dict[str, Any] | None:
    """The same for a call whose scores are dot products."""
    request, wrt = call.request, call.wrt
    heads = every = np.arange(math.prod(request.lead) * request.key.shape[-3])
    new = np.zeros if 0 in request.shape else np.empty  # without keys nothing is written
    made: dict[str, Any] = {
        name: new(call.whole(name), call.dtype(name))
        for name in ("query", "key", "value")
        if name in wrt
    }
    rows = {name: np.zeros(request.shape[:-1]) for name in ("scale", "sink") if name in wrt}
    # What is left of sums that must be 0, and squared lengths of vectors, for `check_given`.
    summed = call.output is not None or "normalize.bias" in wrt
    checks = np.zeros((*request.shape[:-1], 4)) if summed else None
    longest = None if checks is None else np.zeros((*request.lead, request.key.shape[-3], 2))
    for wide in (False, True):
        kernel = _Call(request, wide=wide)
        output, lse = _forward(call, kernel)
        if (np.isfinite(lse) & (np.abs(lse) > _LARGEST_LSE)).any():
            return None
        beyond = np.zeros((*request.lead, request.key.shape[-3]), np.uint8)
        bias = None
        if "bias" in wrt:
            cells = call.whole("bias")
            if cells[-2:] == (1, 1):  # rows are added to at the same time, each in its own order
                cells = (*cells[:-2], request.shape[-2], 1)
            made["bias"] = np.zeros(cells, kernel.accumulator)
            strides = spread(made["bias"], request.shape).strides
            bias = np.lib.stride_tricks.as_strided(made["bias"], request.shape, strides)
        native.module.run_backward(
            *kernel.arrays,
            *(output, _readable(call.grad_output, kernel.accumulator), lse, call.grad_lse),
            *(made.get(name) for name in ("query", "key", "value")),
            *(bias, rows.get("scale"), rows.get("sink")),
            *(beyond, checks, longest, heads, _shared(bias, request.shape)),
            *kernel.options,
        )
        if (beyond & _INFINITE).any():
            return None
        for sums in rows.values() if beyond.size else ():
            beyond |= ~np.isfinite(sums.reshape(*beyond.shape, -1)).all(axis=-1)
        if kernel.accumulator == np.float64 or not beyond.any():
            break
        heads = every if "bias" in wrt else np.flatnonzero(beyond)
    if beyond.any() and _finite(call):
        return None
    if checks is not None and "normalize.bias" in wrt:
        made["normalize.bias"] = checks[..., 1].sum()
    elif checks is not None and longest is not None:
        if wrt <= {"value", "sink"}:
            checks[..., 1] = 0  # no gradients of scores were made
        if not _given(call, kernel):
            checks[..., :2] = call.deviations(output, lse)
        squares = {name: longest[..., i] for i, name in enumerate(("key", "value"))}
        squares |= {name: checks[..., 2 + i] for i, name in enumerate(("query", "grad_output"))}
        call.check_given(checks[..., :2], squares)
    with np.errstate(all="ignore"):
        if "bias" in wrt and call.whole("bias")[-2] == 1:
            made["bias"] = made["bias"].sum(axis=-2, keepdims=True)
        if "sink" in wrt:
            made["sink"] = rows["sink"].sum(axis=-1)
        if "scale" in wrt:
            made["scale"] = rows["scale"].sum()
    return made


def _finite(call: GradientRequest) -> bool:
    """Whether all numbers that a call reads are finite; a bias of −∞ is a mask."""
    request = call.request
    read = (request.query, request.key, request.value, call.grad_output, call.grad_lse)
    bias = request.options.bias
    below = bias is None or bool((bias < np.inf).all())
    return below and all(one is None or bool(np.isfinite(one).all()) for one in read)


def _given(call: GradientRequest, kernel: _Call) -> bool:
    """Whether the given output and lse are as exact as the accumulator needs them."""
    output, lse, accumulator = call.output, call.lse, kernel.accumulator
    if output is None or lse is None or output.dtype.itemsize < accumulator.itemsize:
        return False
    # exp(x − lse) is off by lse's own rounding: by 1e-5 of itself where lse is 100 in float32.
    large = np.isfinite(lse) & (np.abs(lse) > 100)
    return lse.dtype == np.float64 or (accumulator == np.float32 and not large.any())


def _forward(call: GradientRequest, kernel: _Call) -> tuple[Array, NDArray[np.float64]]:
    """Output and lse, as they were given or computed now: the output not rounded to a half type.

    Zeros where weights are made by a sigmoid, whose slope needs neither.
    """
    accumulator = kernel.accumulator
    if _given(call, kernel):
        assert call.output is not None
        assert call.lse is not None
        return _readable(call.output, accumulator), np.ascontiguousarray(call.lse, np.float64)
    request = call.request
    output = np.zeros((*request.shape[:-1], request.value.shape[-1]), accumulator)
    lse = np.zeros(request.shape[:-1])
    if request.options.normalize is not None:
        return output, lse
    native.module.run(*kernel.arrays, output, None, lse, *kernel.options, None)
    return output, lse


def _shared(bias: Array | None, shape: tuple[int, ...]) -> bool:
    """Whether heads or batch elements share the gradient of a bias."""
    if bias is None:
        return False
    axes = zip(bias.strides[:-2], shape[:-2], strict=True)
    return any(stride == 0 and size > 1 for stride, size in axes)


def _output(request: Request, shape: tuple[int, ...], read: list[Array | None]) -> Array:
    """The array to write: `out` itself, unless it is strided or overlaps an array that is read."""
    out = request.options.out
    if (
        out is None
        or not out.flags.carray
        or any(array is not None and np.may_share_memory(out, array) for array in read)
    ):
        return np.empty(shape, request.output_dtype)
    return np.asarray(out).reshape(shape)


def _readable(array: Array, accumulator: np.dtype[Any]) -> Array:
    """The array itself if the kernel reads its kind, else a copy in native byte order."""
    if is_float(array.dtype):
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return array.astype(accumulator)


class Node(NamedTuple):
    """One rule, or one operation on rules, as the kernel reads it."""

    name: str
    first: Array | None = None
    second: Array | None = None
    left: int = UNBOUNDED
    right: int = UNBOUNDED


def _compile(request: Request) -> tuple[int, int, Array | None, list[Node]]:
    """What every key must pass: a window and a length per batch element, and further rules.

    Causal, window and lengths leave one range of keys per query, and need no memory for each
    key. Everything else is a program in postfix order.
    """
    left, right = UNBOUNDED, UNBOUNDED
    length: Array | None = None
    program: list[Node] = []
    mask = request.options.mask
    for rule in mask.parts if isinstance(mask, All) else () if mask is None else (mask,):
        match rule:
            case Causal():
                right = 0
            case Window():
                left = _tighter(left, rule.left)
                right = _tighter(right, rule.right)
            case Lengths():
                own = spread(rule.lengths, request.lead)
                length = np.ascontiguousarray(own if length is None else np.minimum(length, own))
            case _:
                also = [Node("all")] if program else []
                program += [*_postfix(rule, request), *also]
    return left, right, length, program


def _tighter(bound: int, other: int | None) -> int:
    if other is None:
        return bound
    other = min(other, FARTHEST)
    return other if bound == UNBOUNDED else min(bound, other)


def _postfix(rule: Mask, request: Request) -> Iterator[Node]:
    shape = request.shape
    lead, queries, keys = shape[:-3], *shape[-2:]

    def each(array: Array, *axes: int) -> Array:
        return np.ascontiguousarray(spread(array, (*lead, *axes)))

    match rule:
        case All() | AnyOf():
            operation = Node("all" if isinstance(rule, All) else "any")
            for number, part in enumerate(rule.parts):
                yield from _postfix(part, request)
                if number:
                    yield operation
        case Not():
            yield from _postfix(rule.parts[0], request)
            yield Node("negate")
        case Boolean():
            yield Node("boolean", spread(rule.array, shape))
        case Lengths():
            yield Node("lengths", each(rule.lengths))
        case Segments():
            yield Node("segments", each(rule.query, queries), each(rule.key, keys))
        case Causal():
            yield Node("window", right=0)
        case Window():
            left, right = (_tighter(UNBOUNDED, side) for side in (rule.left, rule.right))
            yield Node("window", left=left, right=right)
        case _:
            raise NotImplementedError(type(rule).__name__)

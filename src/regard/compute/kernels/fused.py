"""The fused kernel: streaming softmax in native code, never a matrix of scores.

Owns what native code supports and how arrays and rules are handed over. What happens then stands
in cpp/. Must not know other kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import is_float, spread
from regard.compute import native
from regard.compute.request import Request, Result
from regard.compute.rules import All, AnyOf, Boolean, Mask, Not
from regard.errors import safe_text
from regard.masks import Causal, Lengths, Segments, Window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Array = NDArray[Any]

name = "fused"

# How the rules say what is visible that native code knows.
KNOWN = {rule.block for rule in (Boolean, Causal, Lengths, Segments, Window)}

UNBOUNDED = -1
FARTHEST = 2**63 - 1


def status() -> str:
    """Whether the native module is there, and which instructions it uses."""
    if not native.BUILT:
        return f"not built; where there is a C++ compiler, run: {native.REBUILD}"
    if not native.target:
        return f"not usable: {native.refused('REGARD_TARGET')}"
    others = [one for one, runs in native.targets().items() if runs and one != native.target]
    return f"usable, for {native.target}" + (f" (also {', '.join(others)})" if others else "")


def supports(request: Request) -> str | None:
    """None, or why not."""
    if not native.BUILT:
        return "it is not built"
    unknown = None if request.mask is None else _unknown(request.mask)
    if unknown is None:
        return None
    return f"it does not know the rule {safe_text(type(unknown).__name__, 60)}"


def _unknown(rule: Mask) -> Mask | None:
    """A rule that only Python can ask: one that says in its own way which keys are visible."""
    match rule:
        case All() | AnyOf():
            return next((u for part in rule.parts if (u := _unknown(part)) is not None), None)
        case Not():
            return _unknown(rule.part)
    return None if type(rule).block in KNOWN else rule


def run(request: Request) -> Result:
    """The answer, in native code."""
    # A scale that float32 cannot hold well may meet scores that it cannot hold either.
    ordinary = request.scale is None or request.scale == 0 or 1e-30 < abs(request.scale) < 1e30
    accumulator = request.accumulator if ordinary else np.dtype(np.float64)
    wide = accumulator == np.float64
    kinds = {"query": request.query, "key": request.key, "value": request.value}
    query, key, value = (_readable(array, accumulator) for array in kinds.values())
    *most, _ = request.shape
    weights = np.zeros(request.shape, accumulator) if request.return_weights else None
    lse = np.empty(tuple(most), request.lse_dtype) if request.return_lse else None
    bias = request.bias
    if bias is not None:
        bias = spread(_readable(bias, accumulator), request.shape)
    sink = request.sink
    if sink is not None:
        sink = np.ascontiguousarray(sink, dtype=np.float64)
    offset = np.ascontiguousarray(request.offset)
    left, right, length, rules = _compile(request)
    read = [query, key, value, bias, sink, offset, length]
    read += [array for rule in rules for array in rule[1:3]]
    output = _output(request, (*most, value.shape[-1]), read)
    native.module.run(
        query,
        key,
        value,
        output,
        weights,
        lse,
        bias,
        sink,
        offset,
        length,
        left,
        right,
        rules,
        float("nan") if request.scale is None else request.scale,  # NaN: 1/√D
        request.softcap or 0.0,
        wide,
        min(request.threads or native.default_threads(), native.MOST_THREADS),
        native.usable_target(),
    )
    output = request.natural(output)
    if request.out is not None:
        if not np.may_share_memory(output, request.out):
            request.out[...] = output
        output = request.out
    if weights is not None:
        with np.errstate(all="ignore"):
            weights = request.natural(weights).astype(request.dtype, copy=False)
    return Result(output, weights, None if lse is None else request.natural(lse))


def _output(request: Request, shape: tuple[int, ...], read: list[Array | None]) -> Array:
    """Where the kernel writes: `out` itself, unless it is strided or lies on what is still read."""
    out = request.out
    if (
        out is None
        or not out.flags.carray
        or any(array is not None and np.may_share_memory(out, array) for array in read)
    ):
        return np.empty(shape, request.dtype)
    return np.asarray(out).reshape(shape)


def _readable(array: Array, accumulator: np.dtype[Any]) -> Array:
    """The array itself if the kernel reads its kind, else a copy in native byte order."""
    if is_float(array.dtype):
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return array.astype(accumulator)


# A rule as the kernel reads it: name, arrays, window.
Node = tuple[str, "Array | None", "Array | None", int, int]


def _compile(request: Request) -> tuple[int, int, Array | None, list[Node]]:
    """What every key must pass: a window and a length per batch element, and further rules.

    Causal, window and lengths leave one run of keys per query, which the kernel needs no bytes
    for. Everything else is a program in postfix order.
    """
    left, right = UNBOUNDED, UNBOUNDED
    length: Array | None = None
    program: list[Node] = []
    further = 0
    for rule in _conjuncts(request.mask):
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
                program.extend(_postfix(rule, request))
                further += 1
    program.extend(("all", None, None, UNBOUNDED, UNBOUNDED) for _ in range(further - 1))
    return left, right, length, program


def _conjuncts(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, All):
        for part in mask.parts:
            yield from _conjuncts(part)
    elif mask is not None:
        yield mask


def _tighter(bound: int, other: int | None) -> int:
    if other is None:
        return bound
    other = min(other, FARTHEST)
    return other if bound == UNBOUNDED else min(bound, other)


def _postfix(rule: Mask, request: Request) -> Iterator[Node]:
    lead, (queries, keys) = request.lead, request.shape[-2:]
    nothing = (None, None, UNBOUNDED, UNBOUNDED)
    match rule:
        case All() | AnyOf():
            operation = "all" if isinstance(rule, All) else "any"
            for number, part in enumerate(rule.parts):
                yield from _postfix(part, request)
                if number:
                    yield (operation, *nothing)
        case Not():
            yield from _postfix(rule.part, request)
            yield ("negate", *nothing)
        case Boolean():
            yield ("boolean", spread(rule.array, request.shape), *nothing[1:])
        case Lengths():
            yield (
                "lengths",
                np.ascontiguousarray(spread(rule.lengths, lead)),
                *nothing[1:],
            )
        case Segments():
            yield (
                "segments",
                np.ascontiguousarray(spread(rule.query, (*lead, queries))),
                np.ascontiguousarray(spread(rule.key, (*lead, keys))),
                *nothing[2:],
            )
        case Causal():
            yield ("causal", *nothing)
        case Window():
            left, right = (_tighter(UNBOUNDED, side) for side in (rule.left, rule.right))
            yield ("window", None, None, left, right)
        case _:
            raise NotImplementedError(type(rule).__name__)

"""Softmax, and the exact merging of partial attentions, by the textbook's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from regard.boundary import answering
from regard.boundary.arguments import as_array, as_float_array, result_dtype
from regard.boundary.arrays import Array, lend
from regard.compute.results import OutputLse
from regard.errors import DtypeError, OptionError, ShapeError
from regard.textbook.operations import compute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.compute.option_types import F, Floating, Numbers, T


@overload
def softmax(scores: NDArray[Floating], *, axis: int = -1) -> NDArray[Floating]: ...
@overload
def softmax(scores: Numbers, *, axis: int = -1) -> Array: ...
@overload
def softmax(scores: T, *, axis: int = -1) -> T: ...
@answering
def softmax(scores: Any, *, axis: int = -1) -> Any:
    """exp(x − max x) / Σ exp(x − max x) along one axis.

    Parameters
    ----------
    scores : array_like
        Any shape. −∞ means absent: its weight is 0; a slice that is all −∞ gives zeros.
    axis : int
        The axis along which the weights sum to one.

    Returns
    -------
    ndarray
        Same shape, library and float dtype; integers give float64. Half types use float32 inside.

    Raises
    ------
    DtypeError
        If the scores are complex, objects or wider than float64.

    References
    ----------
    Blanchard, Higham, Higham, "Accurately computing the log-sum-exp and softmax functions",
    IMA Journal of Numerical Analysis 41 (2021): subtracting the maximum is safe and as accurate.

    Examples
    --------
    >>> import numpy as np
    >>> softmax([0.0, 0.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    (scores,), give_back = lend(scores=scores)
    array = as_float_array("scores", scores, "scores.filled(-np.inf), where −∞ means absent")
    if array.ndim == 0:
        raise ShapeError("scores is a single number; softmax needs at least one axis")
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise DtypeError(f"axis must be an int, not {type(axis).__name__}")
    if not -array.ndim <= axis < array.ndim:
        raise OptionError(f"axis is {axis} but scores has {array.ndim} axes")
    working = np.dtype(np.float64 if array.dtype == np.float64 else np.float32)
    rows = np.moveaxis(array, axis, -1).astype(working)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    weights = _weights(flat, working)[0].reshape(rows.shape)
    result = np.moveaxis(weights, -1, axis).astype(array.dtype, copy=False)
    return give_back(result)


def _weights(rows: Array, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """Weights, maximum and sum of every row, by the textbook's operations."""
    cells, row = ("i", "j"), ("i",)
    visible = rows != -np.inf

    def step(op: str, letters: tuple[str, ...], *operands: tuple[Array, tuple[str, ...]]) -> Array:
        return compute(op, letters, operands, visible, dtype)

    maximum = step("max", row, (rows, cells))
    shifted = step("subtract", cells, (rows, cells), (maximum, row))
    exponentials = step("exp", cells, (shifted, cells))
    sums = step("sum", row, (exponentials, cells))
    return step("divide", cells, (exponentials, cells), (sums, row)), maximum, sums


@overload
def merge(
    outputs: Sequence[NDArray[F]] | NDArray[F], lses: Sequence[NDArray[F]] | NDArray[F]
) -> OutputLse[NDArray[F]]: ...
@overload
def merge(
    outputs: Sequence[Numbers] | Numbers, lses: Sequence[Numbers] | Numbers
) -> OutputLse[Array]: ...
@overload
def merge(outputs: Sequence[T] | T, lses: Sequence[T] | T) -> OutputLse[T]: ...
@answering
def merge(outputs: Any, lses: Any) -> Any:
    """Combine attention over disjoint sets of keys into attention over all of them, exactly.

    output = Σ_p exp(lse_p − lse)·output_p with lse = ln Σ_p exp(lse_p).

    Parameters
    ----------
    outputs : sequence of array_like
        One per part, each (…, L, E).
    lses : sequence of array_like
        One per part, each (…, L), as `attention(..., return_lse=True)` returns it: the natural
        logarithm of the part's sum of exponentials; −∞ if it saw no key. Pass a sink to one part
        only.

    Returns
    -------
    OutputLse
        A named tuple (output, lse); 0 and −∞ where every part is empty. Computed in float64,
        rounded once.

    Raises
    ------
    ShapeError
        If the parts differ in shape or number.

    Examples
    --------
    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 4, 6, 2))
    >>> parts = [
    ...     regard.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 2), (2, 6))
    ... ]
    >>> whole = merge([p.output for p in parts], [p.lse for p in parts]).output
    >>> bool(np.allclose(whole, regard.attention(q, k, v)))
    True
    """
    given: Any
    for name, given in (("outputs", outputs), ("lses", lses)):
        # An array of several parts is a sequence of them too; one number is not.
        stacked = getattr(given, "ndim", 0)
        if not isinstance(given, Sequence) and not stacked:
            raise DtypeError(f"{name} must be a sequence of arrays, one per part")
    named = {f"outputs[{number}]": output for number, output in enumerate(outputs)}
    logs_named = {f"lses[{number}]": lse for number, lse in enumerate(lses)}
    given, give_back = lend(**named, **logs_named)
    arrays = [as_array(*pair) for pair in zip([*named, *logs_named], given, strict=True)]
    parts, logs = arrays[: len(named)], arrays[len(named) :]
    if not parts:
        raise ShapeError("outputs is empty; there must be at least one part to merge")
    if len(parts) != len(logs):
        raise ShapeError(f"there are {len(parts)} outputs but {len(logs)} lses; they must match")
    for number, (output, lse) in enumerate(zip(parts, logs, strict=True)):
        if output.ndim == 0:
            raise ShapeError(
                f"outputs[{number}] is a single number; each part is (…, L, E), in a sequence"
            )
        if output.shape != parts[0].shape:
            raise ShapeError(
                f"outputs[{number}] has shape {output.shape} but outputs[0] has "
                f"{parts[0].shape}; they must match"
            )
        if lse.shape != output.shape[:-1]:
            raise ShapeError(
                f"lses[{number}] has shape {lse.shape} but must have {output.shape[:-1]}, "
                "one number per row of its output"
            )
    if any(all(one.dtype.kind in "biu" for one in given) for given in (parts, logs)):
        raise DtypeError("outputs and lses must be floating point, as attention returns them")
    dtype = result_dtype(dict(zip(named, parts, strict=True)))
    lse_dtype = result_dtype(dict(zip(logs_named, logs, strict=True)))
    wide = np.dtype(np.float64)
    by_part = np.stack([lse.astype(wide).ravel() for lse in logs], axis=-1)  # (rows, parts)
    weights, maximum, sums = _weights(by_part, wide)
    output = np.zeros((by_part.shape[0], parts[0].shape[-1]), wide)  # (rows, E)
    with np.errstate(all="ignore"):
        infinite = np.zeros(output.shape, np.bool_)
        for number, part in enumerate(parts):
            share, own = weights[:, number, None], part.reshape(output.shape).astype(wide)
            # A share that underflows to 0 is still positive.
            term = np.where((share == 0) & np.isinf(own), own, share * own)
            # A part that saw no key is absent, whatever its output holds.
            seen = by_part[:, number, None] != -np.inf
            output += np.where(seen, term, 0)
            infinite |= seen & np.isinf(own)
        # Finite outputs have a finite mean, though rounding may carry it beyond the largest number.
        most = np.finfo(wide).max
        output = np.where(infinite, output, np.clip(output, -most, most))
        lse = maximum + np.log(sums)
    merged = OutputLse(
        output.reshape(parts[0].shape).astype(dtype), lse.reshape(logs[0].shape).astype(lse_dtype)
    )
    return give_back(merged)

"""One call of attention, checked and normalised once; everything below trusts it.

Owns what every argument of `regard.attention` may be (dtypes, shapes, options) and the words of
refusal. Must not know how the answer is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from regard.boundary.arrays import as_numpy
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.masks import (
    AllowedByBias,
    Causal,
    Mask,
    Window,
    as_mask,
    check_broadcast,
    check_lead,
    plain_array,
    rows_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


MAX_AXES = 32  # what NumPy broadcasts

# What may stand in query, key and value. bfloat16 is known by name: ml_dtypes is not needed here.
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Request:
    """Arrays (…, H, L, D), (…, G, S, D), (…, G, S, E) with common leading axes, and the options.

    `squeeze` names the axes that normalising added: 1 for a missing head axis, 2 for that of a
    single query too.
    """

    query: Array
    key: Array
    value: Array
    mask: Mask | None
    bias: Array | None
    offset: NDArray[np.int64]  # one per batch element, shaped like the leading axes
    scale: float | None  # None: 1/√D
    softcap: float | None
    sink: Array | None  # (…, H)
    dtype: np.dtype[Any]  # of output and weights
    precision: Literal["working", "exact"]
    has_heads: bool
    has_rows: bool
    return_weights: bool = False
    return_lse: bool = False
    out: Array | None = None
    threads: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading (batch) axes."""
        return self.query.shape[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores: (…, H, L, S)."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype in which the call is computed."""
        if self.precision == "exact" or self.dtype == np.float64:
            return np.dtype(np.float64)
        return np.dtype(np.float32)

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """Of the log-sum-exp: float32 for half types, else the result's."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @cached_property  # reading the whole bias takes long, and not every kernel needs it
    def rules(self) -> Mask | None:
        """Every rule that may hide a key, −inf in the bias included."""
        if self.bias is None or not (self.bias == -np.inf).any():
            return self.mask
        allowed = AllowedByBias(self.bias)
        return allowed if self.mask is None else self.mask & allowed

    def of_rows(self, rows: slice) -> Request:
        """The same call for some rows, from `start` to `stop`, each at its own position."""
        return replace(
            self,
            query=self.query[..., rows, :],
            mask=None if self.mask is None else self.mask.of_rows(rows),
            bias=None if self.bias is None else rows_of(self.bias, rows),
            offset=self.offset + rows.start,
        )

    def natural(self, array: Array) -> Array:
        """A result (…, H, L, X) or (…, H, L) without the axes that the caller did not have."""
        if self.has_heads and self.has_rows:
            return array
        trailing = array.ndim - len(self.lead) - 2
        last = (slice(None),) * trailing
        rows = (slice(None),) if self.has_rows else (0,)
        heads = (slice(None),) if self.has_heads else (0,)
        return array[(..., *heads, *rows, *last)]


@dataclass(frozen=True, eq=False)
class Result:
    """What a kernel returns, in the caller's shapes and dtypes."""

    output: Array
    weights: Array | None = None
    lse: Array | None = None

    @property
    def returned(self) -> Any:
        """What the caller gets: the output, or a named tuple with what else was asked for."""
        if self.weights is not None and self.lse is not None:
            return OutputWeightsLse(self.output, self.weights, self.lse)
        if self.weights is not None:
            return OutputWeights(self.output, self.weights)
        if self.lse is not None:
            return OutputLse(self.output, self.lse)
        return self.output


class OutputWeights(NamedTuple):
    """What `attention` returns with `return_weights`."""

    output: Array
    weights: Array


class OutputLse(NamedTuple):
    """What `attention` returns with `return_lse`."""

    output: Array
    lse: Array


class OutputWeightsLse(NamedTuple):
    """What `attention` returns with `return_weights` and `return_lse`."""

    output: Array
    weights: Array
    lse: Array


def make_request(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    window: Any = None,
    offset: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    precision: Any = "working",
    return_weights: bool = False,
    return_lse: bool = False,
    out: Any = None,
    threads: Any = None,
) -> Request:
    """Check one call and bring it into one form."""
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: as_array(name, array) for name, array in arrays.items()}
    dtype = result_dtype(arrays)
    has_rows = arrays["query"].ndim != 1
    has_heads = max(array.ndim for array in arrays.values()) > 2
    q, k, v = _matched(arrays)
    lead = q.shape[:-3]
    shape = (*q.shape[:-1], k.shape[-2])
    shown = len(lead) + has_heads + has_rows + 1  # axes of the scores that the caller sees

    rules = _rules(mask, _flag("causal", causal), window)
    if rules is not None:
        rules.check(shape, shown)
    if not (isinstance(precision, str) and precision in ("working", "exact")):
        raise OptionError(
            f'precision must be "working" or "exact", not {safe_text(repr(precision), 60)}'
        )
    if precision == "exact" and dtype == np.float64:
        raise OptionError(
            'precision="exact" accumulates in float64, but the inputs are float64 already; '
            "there is nothing wider: leave precision out"
        )
    added = _bias(bias, shape, shown)
    request = Request(
        query=q,
        key=k,
        value=v,
        mask=rules,
        bias=added,
        offset=_offset(offset, rules, lead, q.shape[-2], k.shape[-2]),
        scale=_scale(scale),
        softcap=_softcap(softcap),
        sink=_sink(sink, q.shape[:-2]),
        dtype=dtype,
        precision="exact" if precision == "exact" else "working",
        has_heads=has_heads,
        has_rows=has_rows,
        return_weights=_flag("return_weights", return_weights),
        return_lse=_flag("return_lse", return_lse),
        threads=checked_threads(threads),
    )
    if out is None:
        return request
    natural = request.natural(np.broadcast_to(np.zeros((), dtype), (*shape[:-1], v.shape[-1])))
    return _with_out(request, out, natural.shape)


# --- arrays ------------------------------------------------------------------------------------


def as_array(name: str, value: Any) -> Array:
    """An ndarray of a supported kind, or an error that names the argument."""
    if isinstance(value, np.ma.MaskedArray):
        instead = {
            **dict.fromkeys(("query", "key", "value"), f"{name}.data and a mask="),
            "scores": "scores.filled(-np.inf), where −∞ means absent",
        }
        raise DtypeError(
            f"{name} is a MaskedArray, whose mask would be lost; "
            f"pass {instead.get(name, f'{name}.data')}"
        )
    try:
        array = as_numpy(name, value)
    except (MemoryError, DtypeError):
        raise
    except Exception as error:
        raise DtypeError(
            f"{name} is a {type(value).__name__} that NumPy cannot read: {safe_text(error, 120)}"
        ) from None
    if array.dtype.kind in "biu" or is_float(array.dtype):
        return array
    wide = " (it would lose digits)" if array.dtype.kind in "fc" else ""
    raise DtypeError(
        f"{name} has dtype {safe_text(array.dtype, 60)}, which is not supported{wide}; "
        f"convert it to one of {', '.join(FLOATS)}"
    )


@lru_cache(maxsize=256)  # NumPy spells a name anew each time, and every call asks for several
def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of FLOATS, in either byte order."""
    return dtype.name in FLOATS


def spread(array: Array, shape: tuple[int, ...]) -> Array:
    """The array as a view of that shape; itself if it has it."""
    return array if array.shape == shape else np.broadcast_to(array, shape)


def result_dtype(arrays: Mapping[str, Array]) -> np.dtype[Any]:
    """What arrays of these dtypes give together: NumPy's promotion, integers as float64."""
    dtypes = [array.dtype for array in arrays.values()]
    try:
        dtype = np.result_type(*dtypes)
    except TypeError:
        # bfloat16 promotes with neither float16 nor integers by itself; integers count as float64.
        wide = [np.dtype(np.float64) if dtype.kind in "biu" else dtype for dtype in dtypes]
        try:
            dtype = np.result_type(*wide)
        except TypeError:
            kinds = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
            raise DtypeError(f"{kinds} have no common dtype; convert them to one") from None
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype.newbyteorder("=")


def _matched(arrays: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """The three arrays with a head axis each and the same leading axes, nothing copied."""
    for name, array in arrays.items():
        least = 1 if name == "query" else 2
        if array.ndim < least:
            raise ShapeError(
                f"{name} has {array.ndim} axes but needs at least {least}: "
                + (
                    "(D,), (L, D) or (…, H, L, D)"
                    if least == 1
                    else "(S, width) or (…, G, S, width)"
                )
            )
        if array.ndim > MAX_AXES:
            raise ShapeError(f"{name} has {array.ndim} axes; at most {MAX_AXES} broadcast")
    query, key, value = (
        array if array.ndim > 2 else array.reshape((1,) * (3 - array.ndim) + array.shape)
        for array in arrays.values()
    )
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            f"query is {query.shape[-1]} wide but key is {key.shape[-1]} wide; "
            "their last axes must match (D)"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has {key.shape[-2]} rows but value has {value.shape[-2]}; they must match"
        )
    if key.shape[-3] != value.shape[-3]:
        raise ShapeError(
            f"key has {key.shape[-3]} heads but value has {value.shape[-3]}; they must match"
        )
    heads, groups = query.shape[-3], key.shape[-3]
    if heads != groups and (groups == 0 or heads % groups):
        raise ShapeError(
            f"query has {heads} heads but key has {groups}; "
            "the number of query heads must be a multiple of the number of key heads"
        )
    leads = (query.shape[:-3], key.shape[:-3], value.shape[:-3])
    try:
        lead = leads[0] if leads[0] == leads[1] == leads[2] else np.broadcast_shapes(*leads)
    except ValueError:
        raise ShapeError(
            f"the leading axes of query {leads[0]}, key {leads[1]} and value {leads[2]} "
            "do not broadcast together; align from the right, each 1 or equal"
        ) from None
    q, k, v = (spread(a, (*lead, *a.shape[-3:])) for a in (query, key, value))
    return q, k, v


# --- options -----------------------------------------------------------------------------------


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(f"{name} must be True or False, not {safe_text(repr(value), 60)}")
    return bool(value)


def _rules(mask: Any, causal: bool, window: Any) -> Mask | None:
    """mask, causal and window as one rule: a key must pass all of them."""
    rules: list[Mask] = [] if mask is None else [as_mask(mask)]
    if causal:
        rules.append(Causal())
    if window is not None:
        rules.append(checked_window(window))
    combined: Mask | None = None
    for rule in rules:
        combined = rule if combined is None else combined & rule
    return combined


def checked_window(window: Any) -> Window:
    """A pair (left, right) as a rule."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise DtypeError(
            "window must be a pair (left, right) of ints, None for unbounded, not "
            f"{safe_text(repr(window), 60)}"
        )
    return Window(*window)


def _offset(
    offset: Any, rules: Mask | None, lead: tuple[int, ...], queries: int, keys: int
) -> NDArray[np.int64]:
    if offset is None:
        if queries != keys and rules is not None and rules.uses_position:
            raise OptionError(
                f"causal and window compare positions, but there are {queries} queries and "
                f'{keys} keys: pass offset=0 (query 0 stands at key 0) or offset="end" '
                "(the last query stands at the last key)"
            )
        offset = 0
    if isinstance(offset, str):
        if offset != "end":
            raise OptionError(
                f'offset must be an int, ints or "end", not {safe_text(repr(offset), 60)}'
            )
        offset = keys - queries
    if isinstance(offset, int) and not isinstance(offset, bool):
        if abs(offset) >= 2**62:
            raise OptionError(f"offset {safe_text(offset, 60)} is beyond any position")
        return np.full(lead, offset, np.int64)
    array = plain_array("offset", offset, "ints in rows of equal length")
    if array.dtype.kind not in "iu":
        raise DtypeError(
            f'offset must be an int, an array of ints or "end", not {safe_text(repr(offset), 60)}'
        )
    if array.size and not -(2**62) < int(array.min()) <= int(array.max()) < 2**62:
        raise OptionError(f"offset {safe_text(repr(offset), 60)} is beyond any position")
    check_lead("offset", array.shape, lead)
    return spread(array.astype(np.int64), lead)


def _number(name: str, value: Any) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.inf
    array = plain_array(name, value, "a number")
    if array.ndim or not (array.dtype.kind in "iuf" or is_float(array.dtype)):
        raise DtypeError(f"{name} must be a number, not {safe_text(repr(value), 60)}")
    return float(array)


def _scale(scale: Any) -> float | None:
    if scale is None:
        return None
    number = _number("scale", scale)
    if not math.isfinite(number):
        raise OptionError(f"scale is {number}; it must be a finite number (None: 1/√D)")
    return number


def _softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    number = _number("softcap", softcap)
    if not (math.isfinite(number) and number > 0):
        raise OptionError(f"softcap is {number}; it must be positive and finite (None: no cap)")
    return number


def _real(name: str, value: Any) -> Array:
    array = as_array(name, value)
    if array.dtype == np.bool_:
        raise DtypeError(f"{name} is added to the scores and must be numbers; booleans go to mask=")
    return array


def _bias(bias: Any, shape: tuple[int, ...], shown: int) -> Array | None:
    if bias is None:
        return None
    array = _real("bias", bias)
    check_broadcast("bias", array.shape, shape, shown)
    return array


def _sink(sink: Any, shape: tuple[int, ...]) -> Array | None:
    if sink is None:
        return None
    array = _real("sink", sink)
    check_broadcast("sink", array.shape, shape)
    if not np.isfinite(array.astype(np.float64)).all():
        raise OptionError("sink must be finite; leave it out (sink=None) where there is none")
    return spread(array, shape)


def checked_threads(threads: Any) -> int | None:
    """A number of threads, or None for all that may be used."""
    if threads is None:
        return None
    if isinstance(threads, (bool, np.bool_)) or not isinstance(threads, (int, np.integer)):
        raise DtypeError(f"threads must be an int, not {safe_text(repr(threads), 60)}")
    if threads < 1:
        raise OptionError(
            f"threads is {threads}; it must be 1 or more (None: all that may be used)"
        )
    return int(threads)


def _with_out(request: Request, out: Any, shape: tuple[int, ...]) -> Request:
    if not isinstance(out, np.ndarray):
        raise DtypeError(f"out must be an ndarray, not {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise DtypeError("out is a MaskedArray, whose mask may keep numbers out; pass out.data")
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape} but the output has {shape}; they must match")
    if out.dtype != request.dtype:
        raise DtypeError(f"out has dtype {out.dtype} but the output has {request.dtype}")
    if not out.flags.writeable:
        raise OptionError("out is read-only; pass an array that may be written")
    if _overlaps_itself(out):
        raise OptionError("out has numbers that lie on top of each other; pass one that has not")
    return replace(request, out=out)


def _overlaps_itself(array: Array) -> bool:
    """Whether two indices may reach the same memory."""
    if not array.size:
        return False
    reach = array.itemsize
    axes = zip(array.strides, array.shape, strict=True)
    for stride, size in sorted((abs(stride), size) for stride, size in axes if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False

"""One argument of a call at a time: read as NumPy has it, and checked by itself.

Owns the words of refusal, which begin with the argument's name. Must not know what it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from inspect import isgenerator
from itertools import combinations
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array, as_numpy, belongs_to
from regard.errors import DtypeError, OptionError, ShapeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray


# The dtypes of query, key and value. bfloat16 is known by name: ml_dtypes is not needed here.
FLOATS = ("float16", "bfloat16", "float32", "float64")

FARTHEST = 2**62  # positions are below this, so that two of them can be added in 64 bits


# --- arrays --------------------------------------------------------------------------------------


def read_array(name: str, value: Any, wanted: str = "", instead: str = "{}.data") -> Array:
    """What NumPy makes of a value; `instead` says what to pass in place of a MaskedArray."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a MaskedArray, whose mask would be lost; pass {instead.format(name)}"
        )
    if what := _no_array(name, value):
        raise DtypeError(f"{name} must be {wanted or 'an array of numbers'}, not {what}")
    try:
        return as_numpy(name, value)
    except (MemoryError, DtypeError):
        raise
    except Exception as error:
        ragged = isinstance(error, ValueError) and isinstance(value, (list, tuple))
        reason = "" if ragged else f": {safe_text(error, 120)}"
        problem = f"must be {wanted}" if wanted else f"is a {type(value).__name__} "
        if not wanted:
            problem += _unequal(name, value) if ragged else "that NumPy cannot read"
        raise DtypeError(f"{name} {problem}{reason}") from None


def _no_array(name: str, value: Any) -> str | None:
    """What a value is that NumPy would wrap as one object, and what to pass instead."""
    if value is None:
        return "None"
    if isinstance(value, str):
        file = value.endswith((".npy", ".npz"))
        shown = safe_text(repr(value), 60)
        return f"the name of a file; pass numpy.load({shown})" if file else f"the text {shown}"
    if isinstance(value, type):
        return f"the class {safe_text(value.__name__, 60)}"
    if isinstance(value, Iterator):
        kind = "a generator" if isgenerator(value) else "an iterator"
        return f"{kind}; pass list({name})"
    if belongs_to("xarray", value) and hasattr(value, "data_vars"):
        first = next(iter(value.data_vars), "…")
        return f"an xarray Dataset; pass one of its arrays, {name}[{safe_text(repr(first), 40)}]"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, partial)):
        return "a function; pass what it returns"
    return None


def _unequal(name: str, parts: Sequence[Any]) -> str:
    """How the parts of a list differ, and how to make them one array."""
    try:
        shapes = [np.shape(part) for part in parts]
        at = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        how = f": {name}[0] has shape {shapes[0]} but {name}[{at}] has shape {shapes[at]}"
    except Exception:  # the difference is deeper
        how = " in a part"
    return (
        f"of unequal parts{how}; pad them to one shape and hide the padding with "
        "mask=regard.masks.Lengths(…)"
    )


def as_array(name: str, value: Any, instead: str = "{}.data") -> Array:
    """An array of floats that regard computes with, or of integers or booleans."""
    array = value if type(value) is np.ndarray else read_array(name, value, instead=instead)
    if array.dtype.kind in "biu" or is_float(array.dtype):
        return array
    if belongs_to("pandas", value):
        numbers = ".select_dtypes('number')" if array.ndim == 2 else ""
        raise DtypeError(
            f"{name} is a pandas {type(value).__name__} with text or without some of its numbers; "
            f"pass {name}{numbers}.to_numpy(float)"
        )
    wide = " (it would lose digits)" if array.dtype.kind in "fc" else ""
    raise DtypeError(
        f"{name} has dtype {safe_text(array.dtype, 60)}, which is not supported{wide}; "
        f"convert it to one of {', '.join(FLOATS)}"
    )


def as_float_array(name: str, value: Any, instead: str = "{}.data") -> Array:
    """An array of floats in native byte order; integers and booleans as float64."""
    array = as_array(name, value, instead)
    dtype = result_dtype({name: array})
    return array if array.dtype == dtype else array.astype(dtype)


def labels_of(value: Any) -> Iterator[tuple[str, ...] | None]:
    """The labels of a DataFrame's rows, then of its columns; None where they only count."""
    named = belongs_to("pandas", value) and hasattr(value, "columns")
    for labels in (value.index, value.columns) if named else ((), ()):
        own = tuple(map(str, labels))
        yield None if own == tuple(map(str, range(len(own)))) else own


def as_added(name: str, value: Any) -> Array:
    """An array of numbers that are added to the scores."""
    array = as_array(name, value)
    if array.dtype == np.bool_:
        raise DtypeError(f"{name} is added to the scores and must be numbers; booleans go to mask=")
    return array


def as_integers(name: str, value: Any, wanted: str) -> NDArray[np.int64]:
    """An array of integers, one int included."""
    array = read_array(name, value, wanted)
    if not array.size and not isinstance(value, np.ndarray):
        array = array.astype(np.int64)  # an empty list is float64 to NumPy
    if array.dtype.kind not in "iu":
        counted = "; the number of True in each row is .sum(axis=-1)"
        hint = counted if array.dtype == np.bool_ and array.ndim else ""
        raise DtypeError(f"{name} must be integers, but has dtype {array.dtype}{hint}")
    return array.astype(np.int64)


@lru_cache(maxsize=256)  # NumPy spells a name anew each time, and every call asks for several
def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of FLOATS, in either byte order."""
    return dtype.name in FLOATS


def round_once(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array on its way to another dtype, such that it is rounded once.

    NumPy and ml_dtypes take float64 to a half type by way of float32. Numbers that are inexact
    there end in an odd bit, so that rounding again gives what rounding once would have.
    """
    if dtype.itemsize != 2 or array.dtype in (dtype, np.float32):
        return array
    wide = array.astype(np.float64)
    near = wide.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = np.isfinite(wide) & (near != wide)
    odd = (bits - (np.abs(near) > np.abs(wide)).astype(np.uint32)) | np.uint32(1)
    return np.where(inexact, odd, bits).view(np.float32)


_DTYPE = attrgetter("dtype")


def result_dtype(arrays: Mapping[str, Array]) -> np.dtype[Any]:
    """The dtype of the result: NumPy's promotion, integers as float64."""
    dtypes: list[np.dtype[Any]] = [*map(_DTYPE, arrays.values())]
    first = dtypes[0]
    if dtypes.count(first) == len(dtypes) and first.isnative and is_float(first):
        return first  # as in most calls
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


# --- shapes --------------------------------------------------------------------------------------


def spread(array: Array, shape: tuple[int, ...]) -> Array:
    """The array as a view of that shape, which it broadcasts to; itself if it has it."""
    if array.shape == shape:
        return array
    # What np.broadcast_to does, which is ten functions of Python around this one of C.
    it = np.nditer(
        array, ["multi_index", "refs_ok", "zerosize_ok"], ["readonly"], itershape=shape, order="C"
    )
    view: Array = it.itviews[0]
    return view


def check_broadcast(
    name: str,
    given: tuple[int, ...],
    shape: tuple[int, ...],
    ndim: int | None = None,
    otherwise: Callable[[], str] = str,
) -> None:
    """Raise unless `given` broadcasts *to* `shape`; the caller sees its last `ndim` axes.

    `otherwise` says what else may be passed where a view of the array would fit.
    """
    shown = shape if ndim is None else shape[len(shape) - ndim :]
    fits = len(given) <= len(shown)
    for size, wanted in zip(given[::-1], shown[::-1], strict=False):
        fits = fits and size in (1, wanted)
    if not fits:
        fitting = _fitting(name, given, shown)
        if fitting:
            fitting = f"; pass {fitting}{otherwise()}"
        raise ShapeError(
            f"{safe_text(name, 80)} has shape {given}, which does not broadcast to {shown}; "
            f"axes align from the right and each must be 1 or equal{fitting}"
        )


def _fitting(name: str, given: tuple[int, ...], shown: tuple[int, ...]) -> str:
    """A view of the array that broadcasts to the shape; "" if there is none."""
    if not name.isidentifier():
        return ""
    # Likely ones first: where queries and keys are as many, two axes are those of batch and keys.
    places_of = combinations(range(len(shown)), len(given))
    for places in sorted(places_of, key=lambda p: (-p[-1], p[0], [-axis for axis in p])):
        if all(size in (1, shown[axis]) for size, axis in zip(given, places, strict=True)):
            axes = (":" if axis in places else "None" for axis in range(places[0], len(shown)))
            return f"{name}[{', '.join(axes)}]"
    if given[1:] == shown[-2:] and given[0] == math.prod(shown[:-2]):
        return f"{name}.reshape{shown}"
    return ""


def check_lead(name: str, given: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Raise unless an array with one entry per batch element fits the leading axes."""
    if given and not lead:
        raise ShapeError(
            f"{name} has shape {given}, one for each batch element, but there is no batch: three "
            "axes are (H, L, D); a batch needs a head axis: query[:, None]"
        )
    check_broadcast(name, given, lead)


# --- single values -------------------------------------------------------------------------------


def as_flag(name: str, value: Any, otherwise: str = "") -> bool:
    """True or False, NumPy's included; `otherwise` says what else a text may have meant."""
    if not isinstance(value, (bool, np.bool_)):
        hint = otherwise if isinstance(value, str) else ""
        raise DtypeError(f"{name} must be True or False, not {safe_text(repr(value), 60)}{hint}")
    return bool(value)


def as_int(name: str, value: Any, least: int | None = None, otherwise: str = "") -> int:
    """An int of at least `least`; `otherwise` says what else may be passed."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise DtypeError(f"{name} must be an int{otherwise}, not {safe_text(repr(value), 60)}")
    if least is not None and value < least:
        raise OptionError(f"{name} is {value}; it must be {least} or more{otherwise}")
    return int(value)


def as_number(name: str, value: Any) -> float:
    """A float, from a number or an array of one number without axes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.inf
    array = read_array(name, value, "a number")
    if array.ndim or not (array.dtype.kind in "iuf" or is_float(array.dtype)):
        raise DtypeError(f"{name} must be a number, not {safe_text(repr(value), 60)}")
    return float(array)


def as_offset(offset: Any, lead: tuple[int, ...]) -> NDArray[np.int64]:
    """An offset in numbers, one for each batch element, in the shape of the leading axes."""
    if isinstance(offset, str):
        raise OptionError(
            f'offset must be an int, ints or "end", not {safe_text(repr(offset), 60)}'
        )
    if isinstance(offset, int) and not isinstance(offset, bool):
        if abs(offset) >= FARTHEST:
            raise OptionError(f"offset {safe_text(offset, 60)} is beyond any position")
        return np.full(lead, offset, np.int64)
    array = read_array("offset", offset, "ints in rows of equal length")
    if array.dtype.kind not in "iu":
        raise DtypeError(
            f'offset must be an int, an array of ints or "end", not {safe_text(repr(offset), 60)}'
        )
    if array.size and not -FARTHEST < int(array.min()) <= int(array.max()) < FARTHEST:
        raise OptionError(f"offset {safe_text(repr(offset), 60)} is beyond any position")
    check_lead("offset", array.shape, lead)
    return spread(array.astype(np.int64), lead)

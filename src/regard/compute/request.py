"""One call of attention, checked and normalised once; everything below trusts it.

Owns how the arguments of `regard.attention` fit together. Must not know how the answer is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from regard.boundary.arguments import (
    as_added,
    as_array,
    as_flag,
    as_int,
    as_number,
    check_broadcast,
    result_dtype,
    spread,
)
from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.compute.results import OutputLse, OutputWeights, OutputWeightsLse
from regard.compute.visibility import (
    AllowedByBias,
    Mask,
    all_of,
    as_mask,
    query_positions,
    rows_of,
)
from regard.errors import DtypeError, OptionError, Setting, ShapeError, safe_text
from regard.masks import Causal, Window
from regard.normalizers import Normalizer, as_normalizer
from regard.positions import Positions, as_positions
from regard.scores import Score, as_score

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_AXES = 32  # what NumPy broadcasts


@dataclass(frozen=True, eq=False)
class Request:
    """Arrays (…, H, L, D), (…, G, S, D), (…, G, S, E) with common leading axes, and the options.

    Without `has_heads` the caller's arrays have no axis of heads, without `has_rows` the query is
    one vector; here those axes have length 1.
    """

    query: Array
    key: Array
    value: Array
    mask: Mask | None
    bias: Array | None
    query_positions: NDArray[np.int64]  # (…, L): where each query is; key j is at j
    scale: float | None  # None: 1/√D
    softcap: float | None
    sink: Array | None  # (…, H)
    dtype: np.dtype[Any]  # of output and weights
    precision: Literal["working", "high", "exact"]
    has_heads: bool
    has_rows: bool
    return_weights: bool = False
    return_lse: bool = False
    out: Array | None = None
    threads: int | None = None
    quantized: bool = False  # key and value are the integers of `quantized` rows
    score: Score | None = None  # None: the dot product
    normalize: Normalizer | None = None  # None: the softmax
    positions: Positions | None = None
    bias_rows: NDArray[np.int64] | None = None  # (…, L): each query's row of bias; None: row i

    @property
    def parts(self) -> tuple[Score | Normalizer, ...]:
        """The score and the normalisation, where they are not the plain ones."""
        return tuple(part for part in (self.score, self.normalize) if part is not None)

    @property
    def parameters(self) -> dict[str, Array]:
        """What these were given, under names such as "score.W"."""
        return {
            f"{part.option}.{name}": array
            for part in (*self.parts, *([] if self.positions is None else [self.positions]))
            for name, array in part.parameters().items()
        }

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading (batch) axes."""
        return self.query.shape[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores, (…, H, L, S)."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    @property
    def output_dtype(self) -> np.dtype[Any]:
        """The dtype of the output: that of `out`, which may be the wider one of the sums."""
        return self.dtype if self.out is None else self.out.dtype

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype in which the call is computed."""
        if self.precision == "exact" or self.dtype == np.float64:
            return np.dtype(np.float64)
        return np.dtype(np.float32)

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """The dtype of lse: float32 for half types, else the result's."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @cached_property
    def own_bias(self) -> Array | None:
        """The bias (…, H, L, S), each query's own row."""
        if self.bias is None or self.bias_rows is None:
            return self.bias if self.bias is None else spread(self.bias, self.shape)
        rows = spread(self.bias_rows, (*self.lead, self.shape[-2]))[..., None, :, None]
        return np.take_along_axis(self.bias, rows, axis=-2)

    @cached_property  # reading the whole bias takes long, and not every kernel needs it
    def rules(self) -> Mask | None:
        """Every rule that may hide a key, −inf in the bias included."""
        if self.bias is None or not (self.bias == -np.inf).any():
            return self.mask
        allowed = AllowedByBias(self.own_bias)
        return allowed if self.mask is None else self.mask & allowed

    def of_rows(self, rows: slice) -> Request:
        """The same call for some rows, from `start` to `stop`, each at its own position."""
        own = self.bias_rows
        return replace(
            self,
            query=self.query[..., rows, :],
            mask=None if self.mask is None else self.mask.of_rows(rows),
            bias=self.bias if self.bias is None or own is not None else rows_of(self.bias, rows),
            bias_rows=None if own is None else own[..., rows],
            query_positions=self.query_positions[..., rows],
        )

    def with_floats(self) -> Request:
        """The same call with a float32 copy of quantised keys and values."""
        if not self.quantized:
            return self
        from regard.compute.quantized import floats, whole_rows

        key, value = (floats(whole_rows(integers)) for integers in (self.key, self.value))
        return replace(self, key=key, value=value, quantized=False)

    def natural(self, array: Array, *, rows: bool = True) -> Array:
        """An array (…, H, L), (…, H, L, X) without the axes that the caller does not have.

        With `rows` False one (…, G, S, X), such as the keys.
        """
        if self.has_heads and self.has_rows:
            return array
        last = (slice(None),) * (array.ndim - len(self.lead) - 2)
        row = 0 if rows and not self.has_rows else slice(None)
        return array[(..., slice(None) if self.has_heads else 0, row, *last)]

    def natural_shape(self, *last: int) -> tuple[int, ...]:
        """The shape of a result (…, H, L, *last) without the axes that the caller does not have."""
        heads = self.shape[-3:-2] if self.has_heads else ()
        rows = self.shape[-2:-1] if self.has_rows else ()
        return (*self.lead, *heads, *rows, *last)


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


def make_request(
    query: Any,
    key: Any,
    value: Any,
    *,
    precision: Any = "working",
    return_weights: bool = False,
    return_lse: bool = False,
    out: Any = None,
    threads: Any = None,
    quantized: bool = False,
    **options: Any,
) -> Request:
    """Check one call, with the options of `check_options` too, and bring it into one form.

    With `quantized` keys and values the result has the query's dtype.
    """
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: as_array(name, x, "{}.data and a mask=") for name, x in arrays.items()}
    dtype = result_dtype({"query": arrays["query"]} if quantized else arrays)
    has_rows = arrays["query"].ndim != 1
    has_heads = max(array.ndim for array in arrays.values()) > 2
    q, k, v = check_arrays(arrays)
    shape = (*q.shape[:-1], k.shape[-2])
    checked = check_options(shape, len(shape) - 3 + has_heads + has_rows + 1, **options)
    if not (isinstance(precision, str) and precision in ("working", "high", "exact")):
        raise OptionError(
            f'precision must be "working", "high" or "exact", not {safe_text(repr(precision), 60)}'
        )
    if checked["score"] is not None:
        checked["score"].check(q.shape[-1])
    if checked["positions"] is not None:
        checked["positions"].fits(q.shape[-1], shape)
    if checked["normalize"] is not None and as_flag("return_lse", return_lse):
        raise OptionError(
            "return_lse asks for the logarithm of a softmax's sum of exponentials, which "
            f"{checked['normalize']} does not have; leave it out"
        )
    if precision == "exact" and dtype == np.float64:
        raise OptionError(
            Setting("precision", "exact"),
            " accumulates in float64, but the inputs are float64 already; "
            "there is nothing wider: leave precision out",
        )
    request = Request(
        query=q,
        key=k,
        value=v,
        **checked,
        dtype=dtype,
        precision=cast('Literal["working", "high", "exact"]', precision),
        has_heads=has_heads,
        has_rows=has_rows,
        return_weights=as_flag("return_weights", return_weights),
        return_lse=as_flag("return_lse", return_lse),
        threads=check_threads(threads),
        quantized=quantized,
    )
    return request if out is None else replace(request, out=_check_out(request, out))


# What a loss is made of: the target of the result, or the loss's gradient there.
LOSS = ("target", "grad_output")


def check_loss(given: Mapping[str, Array], shape: tuple[int, ...]) -> None:
    """A target for a result of this shape, or the gradient of a loss with respect to it."""
    if len(given) > 1:
        raise OptionError(
            "target and grad_output are both given; a target says what the loss is, grad_output "
            "what its gradient is: keep one of them (target=None takes away what a problem states)"
        )
    for name, array in given.items():
        if array.dtype == np.bool_:
            raise DtypeError(
                f"{name} has booleans, as a mask has; it must be numbers, one for each number of "
                "the output"
            )
        if array.shape != shape:
            raise ShapeError(
                f"{name} has shape {array.shape} but the output has {shape}; they must match"
            )
    if "target" not in given:
        return
    target = given["target"].astype(np.float64)
    if not np.isfinite(target).all():
        at = tuple(int(one[0]) for one in np.nonzero(~np.isfinite(target)))
        raise OptionError(
            f"target is {target[at]} at {at}; every number must be finite. To leave a number of "
            "the output alone, pass grad_output with a 0 there"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(np.square(target).sum()):
            raise OptionError(
                f"the loss overflows: target has numbers as large as {np.abs(target).max():.3g}, "
                "whose squares are beyond the largest 64-bit float, 1.8e308; scale target and "
                "value down, or pass grad_output"
            )


# --- arrays ------------------------------------------------------------------------------------


def check_arrays(arrays: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Query, key and value, under their names, with an axis of heads and the same leading axes.

    Nothing is copied.
    """
    for name, array in arrays.items():
        least = 1 if name in ("query", "queries") else 2
        if array.ndim < least:
            raise ShapeError(
                f"{name} has {array.ndim} axes but needs at least {least}: "
                + ("(D,), (L, D) or (…, H, L, D)", "(S, width) or (…, G, S, width)")[least - 1]
            )
        if array.ndim > MAX_AXES:
            raise ShapeError(f"{name} has {array.ndim} axes; at most {MAX_AXES} broadcast")
    of_query, of_key, of_value = arrays
    query, key, value = (
        array if array.ndim > 2 else array.reshape((1,) * (3 - array.ndim) + array.shape)
        for array in arrays.values()
    )
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            f"{of_query} is {query.shape[-1]} wide but {of_key} is {key.shape[-1]} wide; "
            "their last axes must match (D)"
        )
    for axis, what in ((-2, "rows"), (-3, "heads")):
        if key.shape[axis] != value.shape[axis]:
            raise ShapeError(
                f"{of_key} has {key.shape[axis]} {what} but {of_value} has {value.shape[axis]}; "
                "they must match"
            )
    heads, groups = query.shape[-3], key.shape[-3]
    if heads != groups and (groups == 0 or heads % groups):
        raise ShapeError(
            f"{of_query} has {heads} heads but {of_key} has {groups}; "
            "the number of query heads must be a multiple of the number of key heads"
            + _rows_first(query, key)
        )
    leads = (query.shape[:-3], key.shape[:-3], value.shape[:-3])
    try:
        lead = leads[0] if leads[0] == leads[1] == leads[2] else np.broadcast_shapes(*leads)
    except ValueError:
        raise ShapeError(
            f"the leading axes of {of_query} {leads[0]}, {of_key} {leads[1]} and {of_value} "
            f"{leads[2]} do not broadcast together; align from the right, each 1 or equal"
        ) from None
    q, k, v = (spread(a, (*lead, *a.shape[-3:])) for a in (query, key, value))
    return q, k, v


def _rows_first(query: Array, key: Array) -> str:
    """What to pass if the arrays would fit with rows before heads."""
    (heads, rows, _), (groups, keys, _) = query.shape[-3:], key.shape[-3:]
    fits = heads > 1 and groups > 1 and keys > 0 and rows % keys == 0
    return "; if rows come before heads, pass query.swapaxes(-3, -2) and so on" if fits else ""


# --- options -----------------------------------------------------------------------------------


def check_options(
    shape: tuple[int, ...],
    shown: int,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: Any = False,
    window: Any = None,
    offset: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    score: Any = None,
    normalize: Any = None,
    positions: Any = None,
) -> dict[str, Any]:
    """Fields of the `Request` with scores (…, H, L, S), of which the caller sees `shown` axes."""
    rules = _rules(
        mask, as_flag("causal", causal, "; how positions are aligned is offset="), window
    )
    if rules is not None:
        rules.check(shape, shown)
    positions = as_positions(positions)
    if bias is not None:
        bias = as_added("bias", bias)
        check_broadcast("bias", bias.shape, shape, shown)
    return {
        "mask": rules,
        "bias": bias,
        "query_positions": _positions(offset, rules, positions, shape),
        "positions": positions,
        "scale": None if scale is None else _scale(scale),
        "softcap": None if softcap is None else _softcap(softcap),
        "sink": None if sink is None else _sink(sink, shape[:-2]),
        **_parts(
            score, normalize, {"bias": bias, "scale": scale, "softcap": softcap, "sink": sink}
        ),
    }


def _parts(score: Any, normalize: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Score and normalisation, which must go together, and with the options of the call."""
    score, normalize = as_score(score), as_normalizer(normalize)
    if normalize is not None and options["sink"] is not None:
        raise OptionError(
            f"sink takes part in the sum of a softmax, and {normalize} has none; leave sink out, "
            'or leave normalize at "softmax"'
        )
    if normalize is not None and normalize.kind == "proportional":
        if score is None or score.kind != "features":
            raise OptionError(
                f"{normalize} takes shares of scores that are never negative, and those of "
                f"{score or 'a dot product'} may be; pass score=regard.scores.Features()"
            )
        for name in ("scale", "softcap", "bias"):
            if options[name] is not None:
                mend = "; what a bias of -inf hides, mask= hides too" if name == "bias" else ""
                raise OptionError(
                    f"{name} changes scores, of which {normalize} takes the shares; leave it out, "
                    f'or leave normalize at "softmax"{mend}'
                )
    return {"score": score, "normalize": normalize}


def _rules(mask: Any, causal: bool, window: Any) -> Mask | None:
    """mask, causal and window as one rule: a key must pass all of them."""
    rules: list[Mask] = [] if mask is None else [as_mask(mask)]
    if causal:
        rules.append(Causal())
    if window is not None:
        rules.append(check_window(window))
    return all_of(rules)


def check_window(window: Any) -> Window:
    """A pair (left, right) as a rule."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        hint = f"; pass ({window}, 0) for as many earlier keys" if type(window) is int else ""
        raise DtypeError(
            "window must be a pair (left, right) of ints, None for unbounded, not "
            f"{safe_text(repr(window), 60)}{hint}"
        )
    return Window(*window)


def _positions(
    offset: Any, rules: Mask | None, positions: Positions | None, shape: tuple[int, ...]
) -> NDArray[np.int64]:
    queries, keys = shape[-2:]
    what = "causal and window compare" if rules is not None and rules.uses_position else ""
    if not what and positions is not None and positions.query_positions is None:
        what = f"positions={type(positions).__name__} compares"
    if offset is None and queries != keys and what:
        raise OptionError(
            f"{what} positions, but there are {queries} queries and {keys} keys: pass ",
            Setting("offset", 0),
            " (query 0 aligned with key 0) or ",
            Setting("offset", "end"),
            " (the last query with the last key)",
        )
    return query_positions(offset, rules, shape, used=bool(what))


def _scale(scale: Any) -> float:
    number = as_number("scale", scale)
    if not math.isfinite(number):
        raise OptionError(f"scale is {number}; it must be finite (leave it out for 1/√D)")
    return number


def _softcap(softcap: Any) -> float:
    number = as_number("softcap", softcap)
    if not (math.isfinite(number) and number > 0):
        raise OptionError(
            f"softcap is {number}; it must be positive and finite (leave it out for no softcap)"
        )
    return number


def _sink(sink: Any, shape: tuple[int, ...]) -> Array:
    array = as_added("sink", sink)
    check_broadcast("sink", array.shape, shape)
    if not np.isfinite(array.astype(np.float64)).all():
        raise OptionError("sink must be finite; leave it out where there is none")
    return spread(array, shape)


def check_threads(threads: Any) -> int | None:
    """A number of threads, or None for all that may be used."""
    return None if threads is None else as_int("threads", threads, 1, " (leave it out to use all)")


def _check_out(request: Request, out: Any) -> Array:
    shape = request.natural_shape(request.value.shape[-1])
    if not isinstance(out, np.ndarray):
        raise DtypeError(f"out must be an ndarray, not {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise DtypeError(
            "out is a MaskedArray, whose masked cells would not be written; pass out.data"
        )
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape} but the output has {shape}; they must match")
    allowed = (request.dtype, request.accumulator)
    if out.dtype not in allowed:
        names = " or ".join(dict.fromkeys(map(str, allowed)))
        raise DtypeError(f"out has dtype {out.dtype} but the output has {names}")
    if not out.flags.writeable:
        raise OptionError("out is read-only; pass an array that may be written")
    if _overlaps_itself(out):
        raise OptionError("out has numbers that lie on top of each other; pass one that has not")
    return out


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

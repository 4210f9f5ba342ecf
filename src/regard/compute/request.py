"""One call of attention, checked and normalised once; everything below trusts it.

Owns how the arguments of `regard.attention` fit together. Must not know how the answer is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from regard.compute.options import DOT, SOFTMAX, Options
from regard.compute.results import OutputLse, OutputWeights, OutputWeightsLse
from regard.errors import DtypeError, OptionError, Setting, ShapeError, safe_text
from regard.masks import Causal, Window
from regard.normalizers import Normalizer, as_normalizer
from regard.positions import Positions, as_positions
from regard.rules.visibility import (
    AllowedByBias,
    Mask,
    all_of,
    as_mask,
    query_positions,
    rows_of,
)
from regard.scores import Score, as_score

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_AXES = 32  # what NumPy broadcasts


@dataclass(frozen=True, eq=False)
class Request:
    """Arrays (…, H, L, D), (…, G, S, D), (…, G, S, E) with common leading axes, and the options.

    Of the options, `mask` has every rule, causal and window too; an offset is in the positions of
    queries. Without `has_heads` the caller's arrays have no axis of heads, without `has_rows` the
    query is one vector; here those axes have length 1.
    """

    query: Array
    key: Array
    value: Array
    options: Options
    query_positions: NDArray[np.int64]  # (…, L): where each query is; key j is at j
    dtype: np.dtype[Any]  # of output and weights
    has_heads: bool
    has_rows: bool
    quantized: bool = False  # key and value are the integers of `quantized` rows
    bias_rows: NDArray[np.int64] | None = None  # (…, L): each query's row of bias; None: row i

    @property
    def parts(self) -> tuple[Score | Normalizer, ...]:
        """The score and the normalisation, where they are not the plain ones."""
        options = self.options
        return tuple(part for part in (options.score, options.normalize) if part is not None)

    @property
    def parameters(self) -> dict[str, Array]:
        """What these were given, under names such as "score.W"."""
        positions = self.options.positions
        return {
            f"{part.option}.{name}": array
            for part in (*self.parts, *([] if positions is None else [positions]))
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
        return self.dtype if self.options.out is None else self.options.out.dtype

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype in which the call is computed."""
        if self.options.precision == "exact" or self.dtype == np.float64:
            return np.dtype(np.float64)
        return np.dtype(np.float32)

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """The dtype of lse: float32 for half types, else the result's."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @cached_property
    def own_bias(self) -> Array | None:
        """The bias (…, H, L, S), each query's own row."""
        bias = self.options.bias
        if bias is None or self.bias_rows is None:
            return bias if bias is None else spread(bias, self.shape)
        rows = spread(self.bias_rows, (*self.lead, self.shape[-2]))[..., None, :, None]
        return np.take_along_axis(bias, rows, axis=-2)

    @cached_property  # reading the whole bias takes long, and not every kernel needs it
    def rules(self) -> Mask | None:
        """Every rule that may hide a key, −inf in the bias included."""
        mask, bias = self.options.mask, self.options.bias
        if bias is None or not (bias == -np.inf).any():
            return mask
        allowed = AllowedByBias(self.own_bias)
        return allowed if mask is None else mask & allowed

    def with_options(self, **changes: Any) -> Request:
        """The same call with some checked options changed."""
        return replace(self, options=self.options._replace(**changes))

    def of_rows(self, rows: slice) -> Request:
        """The same call for some rows, from `start` to `stop`, each at its own position."""
        mask, bias, chosen = self.options.mask, self.options.bias, self.bias_rows
        options = self.options._replace(
            mask=None if mask is None else mask.of_rows(rows),
            bias=bias if bias is None or chosen is not None else rows_of(bias, rows),
        )
        return replace(
            self,
            query=self.query[..., rows, :],
            options=options,
            bias_rows=None if chosen is None else chosen[..., rows],
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
    query: Any, key: Any, value: Any, *, quantized: bool = False, **options: Any
) -> Request:
    """The same as `request_of`, with options by their names."""
    return request_of(query, key, value, Options(**options), quantized=quantized)


def request_of(
    query: Any, key: Any, value: Any, options: Options, *, quantized: bool = False
) -> Request:
    """Check one call, and bring it into one form.

    With `quantized` keys and values the result has the query's dtype.
    """
    query = as_array("query", query, _AND_MASK)
    key, value = as_array("key", key, _AND_MASK), as_array("value", value, _AND_MASK)
    arrays = {"query": query, "key": key, "value": value}
    dtype = result_dtype({"query": query} if quantized else arrays)
    has_rows = query.ndim != 1
    has_heads = query.ndim > 2 or key.ndim > 2 or value.ndim > 2
    q, k, v = check_arrays(arrays)
    shape = (*q.shape[:-1], k.shape[-2])
    shown = len(shape) - 3 + has_heads + has_rows + 1
    checked, query_positions = check_options(shape, shown, options)
    precision: Any = options.precision
    if not isinstance(precision, str) or precision not in ("working", "high", "exact"):
        raise OptionError(
            f'precision must be "working", "high" or "exact", not {safe_text(repr(precision), 60)}'
        )
    if checked["score"] is not None:
        checked["score"].check(q.shape[-1])
    if options.positions is not None:
        checked["positions"].fits(q.shape[-1], shape)
    if checked["normalize"] is not None and as_flag("return_lse", options.return_lse):
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
    for name in ("return_weights", "return_lse"):
        stated = getattr(options, name)
        if type(stated) is not bool:
            checked[name] = as_flag(name, stated)
    if options.threads is not None:
        checked["threads"] = check_threads(options.threads)
    request = Request(
        query=q,
        key=k,
        value=v,
        options=options._replace(**checked),
        query_positions=query_positions,
        dtype=dtype,
        has_heads=has_heads,
        has_rows=has_rows,
        quantized=quantized,
    )
    if options.out is not None:
        _check_out(request, options.out)
    return request


# What to pass in place of a MaskedArray.
_AND_MASK = "{}.data and a mask="

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
    given = [*arrays.values()]
    for n, array in enumerate(given):
        if array.ndim < 3:
            given[n] = array.reshape((1,) * (3 - array.ndim) + array.shape)
    query, key, value = given
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
    if leads[0] == leads[1] == leads[2]:
        return query, key, value
    try:
        lead = np.broadcast_shapes(*leads)
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
    shape: tuple[int, ...], shown: int, options: Options
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """The options as a `Request` has them, those that change, and the position of each query.

    Scores are (…, H, L, S), of which the caller sees `shown` axes.
    """
    checked: dict[str, Any] = {"causal": False, "window": None, "offset": None}  # they are in:
    checked["mask"] = rules = _rules(options)
    if rules is not None:
        rules.check(shape, shown)
    positions = None
    if options.positions is not None:
        checked["positions"] = positions = as_positions(options.positions)
    if options.bias is not None:
        checked["bias"] = bias = as_added("bias", options.bias)
        check_broadcast("bias", bias.shape, shape, shown)
    query_positions = _positions(options.offset, rules, positions, shape)
    if options.scale is not None:
        checked["scale"] = _scale(options.scale)
    if options.softcap is not None:
        checked["softcap"] = _softcap(options.softcap)
    if options.sink is not None:
        checked["sink"] = _sink(options.sink, shape[:-2])
    checked["score"] = checked["normalize"] = None
    if options.score is not DOT or options.normalize is not SOFTMAX:
        checked["score"], checked["normalize"] = _parts(options)
    return checked, query_positions


def _parts(options: Options) -> tuple[Score | None, Normalizer | None]:
    """Score and normalisation, which must go together, and with the options of the call."""
    score, normalize = as_score(options.score), as_normalizer(options.normalize)
    if normalize is None:
        return score, None
    if options.sink is not None:
        raise OptionError(
            f"sink takes part in the sum of a softmax, and {normalize} has none; leave sink out, "
            'or leave normalize at "softmax"'
        )
    if normalize.kind == "proportional":
        if score is None or score.kind != "features":
            raise OptionError(
                f"{normalize} takes shares of scores that are never negative, and those of "
                f"{score or 'a dot product'} may be; pass score=regard.scores.Features()"
            )
        for name in ("scale", "softcap", "bias"):
            if getattr(options, name) is not None:
                mend = "; what a bias of -inf hides, mask= hides too" if name == "bias" else ""
                raise OptionError(
                    f"{name} changes scores, of which {normalize} takes the shares; leave it out, "
                    f'or leave normalize at "softmax"{mend}'
                )
    return score, normalize


def _rules(options: Options) -> Mask | None:
    """mask, causal and window as one rule: a key must pass all of them."""
    causal = options.causal
    if type(causal) is not bool:
        causal = as_flag("causal", causal, "; how positions are aligned is offset=")
    rules: list[Mask] = [] if options.mask is None else [as_mask(options.mask)]
    if causal:
        rules.append(Causal())
    if options.window is not None:
        rules.append(check_window(options.window))
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


def _check_out(request: Request, out: Any) -> None:
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
        raise OptionError("out has elements that share memory; pass one without overlaps")


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

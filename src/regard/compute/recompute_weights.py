"""The weights of chosen rows, recomputed from the log-sum-exp that a call returned.

Owns the choice of rows, and how far a log-sum-exp may differ from the recomputed one before it must
be that of more keys. A kernel computes the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import as_array, read_array, result_dtype
from regard.boundary.arrays import Array
from regard.compute import dispatch
from regard.compute.request import Request, Result, make_request
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.rules.visibility import Block

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Rows of one call: what it makes in float64 stays small beside what is returned.
MOST_ROWS = 64


def weights_of_rows(query: Any, key: Any, lse: Any, *, rows: Any, **options: Any) -> Array:
    """What `regard.weights` returns."""
    request, logs = checked(query, key, lse, options)
    chosen, is_one = row_numbers(rows, request)
    result = np.empty((*request.shape[:-2], chosen.size, request.shape[-1]), request.dtype)
    # All axes are kept until the result; it then drops those that the caller did not have.
    plain = as_dot(dispatch.without_positions(request))
    whole = replace(plain, has_heads=True, has_rows=True)
    for place, run in runs(chosen):
        here = result[..., place : place + run.stop - run.start, :]
        fill(here, whole.of_rows(run), logs[..., run], run.start)
    natural = request.natural(result)
    return natural[..., 0, :] if is_one else natural


def fill(result: Array, part: Request, lse: Array, first: int) -> None:
    """The weights (…, H, rows, S) of a call with some rows, of which the first has this number."""
    made = dispatch.run(part)
    result[...] = made.weights
    _share(part, made, lse, result, first)


def checked(query: Any, key: Any, lse: Any, options: dict[str, Any]) -> tuple[Request, Array]:
    """The call without values, and its log-sum-exp (…, H, L)."""
    arrays = {"query": as_array("query", query), "key": as_array("key", key)}
    logs = as_array("lse", lse)
    if logs.dtype not in (np.float32, np.float64):
        raise DtypeError(
            f"lse has dtype {logs.dtype} but attention returns it in float32 or float64; "
            "pass it as it was returned"
        )
    dtype = result_dtype(arrays)
    # The values of that call may have had more leading axes than its queries and keys.
    lead = logs.shape[:-2] if max(array.ndim for array in arrays.values()) > 2 else ()
    try:
        np.broadcast_shapes(lead, *(array.shape[:-3] for array in arrays.values()))
    except ValueError:
        lead = ()
    request = make_request(
        arrays["query"],
        arrays["key"],
        np.empty((*lead, *arrays["key"].shape[-3:-1], 0), dtype),
        precision="working" if dtype == np.float64 else "exact",
        return_weights=True,
        return_lse=True,
        **options,
    )
    wanted = request.natural_shape()
    if logs.shape != wanted:
        raise ShapeError(
            f"lse has shape {logs.shape} but the rows of this call have {wanted}; "
            "pass the lse of all rows, as attention returned it"
        )
    return request, logs.reshape(request.shape[:-1])


def as_dot(request: Request) -> Request:
    """The call as dot products of rows, of which a log-sum-exp is known as exactly as of others."""
    if request.options.score is None:
        return request
    from regard.compute.dot_of_rows import dot_request

    check_score(request)
    return dot_request(request)


def check_score(request: Request) -> None:
    """Refuse a score that is no dot product of rows."""
    from regard.compute.dot_of_rows import refused

    if request.options.score is not None and refused(request) is not None:
        raise OptionError(
            f"weights takes scores that are dot products, and {request.options.score} is none; "
            "attention(…, return_weights=True) returns its weights"
        )


def row_numbers(rows: Any, request: Request) -> tuple[NDArray[np.int64], bool]:
    """The numbers of the chosen rows, and whether one was named instead of several."""
    count = request.shape[-2]
    every = np.arange(count)
    if rows is None:
        return every, False
    if not request.has_rows:
        raise OptionError("rows chooses among queries, but a query (D,) is one alone; leave it out")
    if isinstance(rows, slice):
        try:
            return every[rows], False
        except TypeError:
            raise DtypeError(f"rows is {safe_text(rows, 60)}; a slice takes ints") from None
    array = read_array("rows", rows, "an int, a slice or an array of ints")
    if array.size == 0 and not isinstance(rows, np.ndarray):
        array = array.astype(np.int64)  # an empty list is float64 to NumPy
    if array.dtype.kind not in "iu":
        instead = "; np.flatnonzero gives the numbers" if array.dtype == np.bool_ else ""
        raise DtypeError(
            f"rows must be an int, a slice or an array of ints, not {array.dtype}{instead}"
        )
    if array.ndim > 1:
        raise ShapeError(f"rows has {array.ndim} axes; it must be one int or (rows,)")
    numbers = array.reshape(-1)
    outside = numbers[(numbers < -count) | (numbers >= count)]
    if outside.size:
        raise OptionError(
            f"rows names row {int(outside[0])} but there are {count} queries; "
            "rows count from 0, or from the end as negative numbers"
        )
    return every[numbers.astype(np.int64)], array.ndim == 0


def runs(chosen: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Consecutive rows in one piece each, and where in the result they go."""
    cuts = np.flatnonzero(np.diff(chosen) != 1) + 1
    for begin, end in pairwise([0, *cuts.tolist(), chosen.size]):
        for place in range(begin, end, MOST_ROWS):
            first = int(chosen[place])
            yield place, slice(first, first + min(end - place, MOST_ROWS))


def _share(part: Request, made: Result, lse: Array, weights: Array, first: int) -> None:
    """If the log-sum-exp covers more keys, scale the weights to a share of all of them.

    exp(s − lse) = exp(s − own)·exp(own − lse), and the first factor is what was made. The second
    is 1 unless the two differ by more than rounding can explain: a rounded lse of 10⁹ knows no
    weight, but the scores still do.
    """
    assert made.lse is not None
    limits = np.finfo(part.lse_dtype)
    own, given = (
        np.clip(array.astype(np.float64), limits.min, limits.max) for array in (made.lse, lse)
    )
    if (own == given).all():
        return
    unit = max(limits.eps, np.finfo(lse.dtype).eps) / 2
    for at, visible, size in _sights(part):
        # Each score is a sum of D products, with scale, softcap, bias and shift; n exponentials
        # are added up; the logarithm is rounded. Logarithms of sums differ by at most as much as
        # the worst of their scores.
        with np.errstate(all="ignore"):
            terms = (part.query.shape[-1] + 16) * size + part.shape[-1] + 16 + 4 * abs(own[at])
            missing = own[at] - given[at]
            explained = np.abs(missing) <= unit * terms
            share = np.where(explained, 1.0, np.exp(np.minimum(missing, 0.0)))
            larger = visible.any(axis=-1) & ~explained & (missing > 0)
            if larger.any():
                row = int(np.flatnonzero(larger)[0])
                raise OptionError(
                    f"lse is {float(lse[at][row]):.8g} in row {first + row}, but the keys it "
                    f"sees give {own[at][row]:.8g} already; pass what that call was given, "
                    "or an lse over more keys"
                )
            shared = weights[at].astype(np.float64) * share[:, None]
            weights[at] = np.where(visible & (share != 1.0)[:, None], shared, weights[at])


def _sights(part: Request) -> Iterator[tuple[tuple[int, ...], Array, Array]]:
    """For each head: its index, the visible keys, and a bound on the size of visible logits."""
    *_, heads, rows, keys = part.shape
    groups = part.key.shape[-3]
    scale, sink = part.options.scale, part.options.sink
    if scale is None:
        scale = 1 / math.sqrt(part.query.shape[-1] or 1)
    rules = part.rules
    for batch in np.ndindex(*part.lead):
        for head in range(heads):
            at = (*batch, head)
            visible = np.ones((rows, keys), np.bool_)
            if rules is not None:
                where = Block(part.shape, batch, head, np.arange(rows), part.query_positions)
                visible = np.broadcast_to(rules.block(where), visible.shape)
            group = (*batch, head // (heads // groups))
            with np.errstate(all="ignore"):
                longest = _largest(visible, _lengths(part.key[group]))
                size = abs(scale) * _lengths(part.query[at]) * longest
                if part.own_bias is not None:
                    bias = part.own_bias[at].astype(np.float64)
                    size = size + _largest(visible, np.abs(bias))
                if sink is not None:
                    size = size + abs(float(sink[at]))
            yield at, visible, np.nan_to_num(size, nan=np.inf)


def _largest(visible: Array, sizes: Array) -> Array:
    return np.asarray(np.where(visible, sizes, 0.0).max(axis=-1, initial=0.0))


def _lengths(vectors: Array) -> Array:
    """The Euclidean length of each row: |q·k| is at most the product of two."""
    return np.asarray(np.sqrt(np.square(vectors.astype(np.float64)).sum(axis=-1)))

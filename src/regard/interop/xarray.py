"""Attention over labelled arrays of xarray: axes by their names, coordinates as labels.

Owns how names of dimensions become the axes of `regard.attention` and `regard.explain`, and which
labels a result and an explanation have. Over dask a result is lazy (`regard.interop.dask`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import xarray

from regard.api import attention as of_arrays
from regard.api import explain as explain_arrays
from regard.errors import DtypeError, ShapeError, safe_text
from regard.faces import Explanation
from regard.problems.parts import SHARED

__all__ = ["attention", "explain"]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    row: Hashable,
    key_row: Hashable,
    feature: Hashable,
    head: Hashable | None = None,
    batch: Sequence[Hashable] = (),
    **options: Any,
) -> Any:
    r"""Scaled dot-product attention by names of dimensions: softmax(scale·Q·Kᵀ + bias)·V.

    Parameters
    ----------
    query : xarray.DataArray
        With the dimensions `batch`, `head`, `row` and `feature`, in any order.
    key, value : xarray.DataArray
        With `key_row` in place of `row`. Their heads may be fewer, as for `regard.attention`; in
        all other dimensions their labels must be those of the query.
    row, key_row, feature, head : name of a dimension
        What queries, keys, features and heads are counted along. The features of the value may be
        of another number.
    batch : sequence of names
        The leading axes, in the order of the result.
    **options
        As for `regard.attention`, or `regard.interop.dask.attention` where an array is of dask.
        Arrays among them are by position, (…, H, L, S).

    Returns
    -------
    xarray.DataArray
        With the dimensions `batch`, `head`, `row` and `feature`, the labels of the query's rows and
        of the value's features; lazy over dask.

    Raises
    ------
    ShapeError
        If a dimension is missing or has labels of its own.
    DtypeError
        If an argument is no DataArray, or options ask for more results than the output.

    Examples
    --------
    >>> import numpy as np, xarray
    >>> words = xarray.DataArray(np.eye(3), dims=("word", "feature"), coords={"word": list("abc")})
    >>> made = attention(
    ...     words, words, words, row="word", key_row="word", feature="feature", causal=True
    ... )
    >>> made.sel(word="a").values
    array([1., 0., 0.])
    """
    for name in ("return_weights", "return_lse", "out"):
        if options.get(name):
            raise DtypeError(f"{name} is not for labelled arrays; call regard.attention on .data")
    query, key, value = _aligned((query, key, value), batch, head, row, key_row, feature)
    arrays = (query.data, key.data, value.data)
    answer: Any = of_arrays
    if any(type(one).__module__.startswith("dask.") for one in arrays):
        from regard.interop.dask import attention as answer
    coords: dict[Any, Any] = {
        name: one for name, one in query.coords.items() if feature not in one.dims
    }
    coords |= {name: one for name, one in value.coords.items() if one.dims == (feature,)}
    made = answer(*arrays, **options)
    return xarray.DataArray(made, dims=query.dims, coords=coords, name=value.name)


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    row: Hashable,
    key_row: Hashable,
    feature: Hashable,
    head: Hashable | None = None,
    batch: Sequence[Hashable] = (),
    **options: Any,
) -> Explanation:
    r"""Every step of one attention, softmax(scale·Q·Kᵀ + bias)·V, with coordinates as labels.

    Explain a piece of a large call by choosing it first, with `sel` or `isel` of all three arrays:
    only that piece is loaded. The coordinates that chose it become the title.

    Parameters
    ----------
    query, key, value : xarray.DataArray
        As for `attention`; those over dask, or still in a file, are loaded.
    row, key_row, feature, head, batch
        As for `attention`; dimensions of which one was chosen are left out. The coordinates along
        `row`, `key_row` and `feature` become labels; heads and batches are counted from 0.
    **options
        As for `regard.explain`; arrays among them are those of the piece, (…, H, L, S). A row's
        weights depend on all its keys, so choose no keys; where only some queries are chosen,
        causal and window need the `offset` of the first of them.

    Returns
    -------
    Explanation

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `attention` and `regard.explain`.

    Examples
    --------
    >>> import numpy as np, xarray
    >>> x = xarray.DataArray(
    ...     np.arange(12.0).reshape(2, 3, 2) % 5,
    ...     dims=("text", "word", "feature"),
    ...     coords={"text": ["one", "two"], "word": list("abc")},
    ... )
    >>> x = x.sel(text="two")
    >>> explanation = explain(x, x, x, row="word", key_row="word", feature="feature", causal=True)
    >>> explanation.title
    'text two'
    >>> print(explanation.why("scaled", "b", "a"))
    A_s[b, a] = 7.77817459    A_s = A / √D
      A[b, a] · scale = 11 × 0.70710678
      (numbers are rounded to 8 decimals; the result is of unrounded ones)
    """
    query, key, value = _aligned((query, key, value), batch, head, row, key_row, feature)
    named = {
        "query_labels": (query, row),
        "key_labels": (key if key_row in key.coords else value, key_row),
        "key_features": (key if feature in key.coords else query, feature),
        "value_features": (value, feature),
    }
    labels = {
        name: _texts(array.coords[along].values)
        for name, (array, along) in named.items()
        if along in array.coords and not (name in SHARED and options.get("labels") is not None)
    }
    chosen = (f"{name} {one.item()}" for name, one in query.coords.items() if not one.dims)
    arrays = (query.values, key.values, value.values)
    return explain_arrays(*arrays, **{"title": ", ".join(chosen), **labels, **options})


def _texts(coordinates: Any) -> list[str]:
    """Labels as text; a date is shown without a time if none has one."""
    if coordinates.dtype.kind == "M":
        coordinates = np.datetime_as_string(coordinates, unit="auto")
    return [str(one) for one in coordinates]


def _aligned(
    arrays: tuple[Any, Any, Any],
    batch: Sequence[Hashable],
    head: Hashable | None,
    row: Hashable,
    key_row: Hashable,
    feature: Hashable,
) -> tuple[Any, Any, Any]:
    """Query, key and value with their axes in order; their labels must fit."""
    outer = (*batch, *(() if head is None else (head,)))
    query = _ordered("query", arrays[0], (*outer, row, feature))
    key = _ordered("key", arrays[1], (*outer, key_row, feature))
    value = _ordered("value", arrays[2], (*outer, key_row, feature))
    for name, array, other, along in (
        *(("key", key, query, one) for one in (*batch, feature)),
        *(("value", value, key, one) for one in (*outer, key_row)),
    ):
        if along in array.coords and along in other.coords:
            mine, theirs = array.coords[along].values, other.coords[along].values
            if mine.shape != theirs.shape or (mine != theirs).any():
                raise ShapeError(
                    f"{name} has other labels along {safe_text(str(along), 60)} than "
                    f"{'query' if other is query else 'key'}; align them, as xarray.align does"
                )
    return query, key, value


def _ordered(name: str, array: Any, dims: tuple[Hashable, ...]) -> Any:
    if not isinstance(array, xarray.DataArray):
        raise DtypeError(f"{name} must be a DataArray, not {type(array).__name__}")
    if set(array.dims) != set(dims) or len(array.dims) != len(dims):
        raise ShapeError(
            f"{name} has the dimensions {', '.join(map(str, array.dims))} but needs "
            f"{', '.join(map(str, dims))}"
        )
    return array.transpose(*dims)

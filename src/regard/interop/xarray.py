"""Attention over labelled arrays of xarray: axes by their names, coordinates as labels.

Owns how names of dimensions become the axes of `regard.attention`, and how the result is labelled.
Over dask the result is lazy (`regard.interop.dask`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import xarray

from regard.api import attention as of_arrays
from regard.errors import DtypeError, ShapeError, safe_text

__all__ = ["attention"]


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
    outer = (*batch, *(() if head is None else (head,)))
    query = _ordered("query", query, (*outer, row, feature))
    key = _ordered("key", key, (*outer, key_row, feature))
    value = _ordered("value", value, (*outer, key_row, feature))
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


def _ordered(name: str, array: Any, dims: tuple[Hashable, ...]) -> Any:
    if not isinstance(array, xarray.DataArray):
        raise DtypeError(f"{name} must be a DataArray, not {type(array).__name__}")
    if set(array.dims) != set(dims) or len(array.dims) != len(dims):
        raise ShapeError(
            f"{name} has the dimensions {', '.join(map(str, array.dims))} but needs "
            f"{', '.join(map(str, dims))}"
        )
    return array.transpose(*dims)

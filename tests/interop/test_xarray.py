"""regard.interop.xarray: axes by names, coordinates as labels, lazily over dask."""

from __future__ import annotations

import numpy as np
import pytest

import regard

xarray = pytest.importorskip("xarray")
pytestmark = [pytest.mark.needs("xarray", "dask", "fused")]

NAMES = {"batch": ("text",), "head": "head", "row": "word", "key_row": "seen", "feature": "f"}


def labelled(over_dask=False):
    rng = np.random.default_rng(0)
    dims = (("text", "head", "word", "f"), *[("text", "head", "seen", "f")] * 2)
    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6))
    arrays = [
        xarray.DataArray(rng.normal(size=s), dims=d, coords={"text": ["one", "two"]})
        for s, d in zip(shapes, dims, strict=True)
    ]
    arrays[0] = arrays[0].assign_coords(word=list("abcde"))
    arrays[2] = arrays[2].assign_coords(f=list("uvwxyz"))
    return [a.chunk({"head": 2}) for a in arrays] if over_dask else arrays


@pytest.mark.parametrize("over_dask", [False, True])
def test_names_choose_axes_and_labels_stay(over_dask):
    import regard.interop.xarray as over_xarray

    q, k, v = labelled(over_dask)
    made = over_xarray.attention(q.transpose("f", "word", "head", "text"), k, v, **NAMES)
    assert (made.chunks is not None) == over_dask
    expected = regard.attention(*(a.values for a in labelled()))
    np.testing.assert_array_equal(made.values, expected)
    assert made.dims == ("text", "head", "word", "f")
    assert made.sel(word="c", f="w", text="two").values.tolist() == expected[1, :, 2, 2].tolist()


def test_other_labels_and_missing_dimensions_are_refused():
    import regard.interop.xarray as over_xarray

    q, k, v = labelled()
    with pytest.raises(regard.ShapeError, match="other labels along text"):
        over_xarray.attention(q, k.assign_coords(text=["two", "one"]), v, **NAMES)
    with pytest.raises(regard.ShapeError, match="needs text, head, word, f"):
        over_xarray.attention(q[0], k, v, **NAMES)
    with pytest.raises(regard.DtypeError, match="must be a DataArray"):
        over_xarray.attention(q.values, k, v, **NAMES)

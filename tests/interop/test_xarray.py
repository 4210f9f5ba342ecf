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


@pytest.mark.parametrize("over_dask", [False, True])
def test_a_chosen_piece_is_explained_with_its_labels(over_dask):
    import regard.interop.xarray as over_xarray

    q, k, v = labelled(over_dask)
    k = k.assign_coords(seen=np.arange("2026-01-01", "2026-01-08", dtype="M8[D]"), f=list("rst"))
    names = {name: own for name, own in NAMES.items() if name != "batch"}
    piece = (one.transpose(..., "text").sel(text="two") for one in (q, k, v))
    explanation = over_xarray.explain(*piece, **names, causal=True, offset=2)
    assert explanation.title == "text two"
    one = regard.attention(*(a.values[1] for a in labelled()), causal=True, offset=2)
    # Sums of 7 products of numbers below 4, in float64: two orders of adding.
    np.testing.assert_allclose(explanation["output"].value, one, rtol=0, atol=7 * 4 * 2.0**-52)
    why = explanation.why("scores", "c", "2026-01-05", head=3)
    assert why.value == pytest.approx(q.values[1, 3, 2] @ k.values[1, 1, 4])
    assert why.text().startswith("A[head 3, c, 2026-01-05] = ")
    assert [line.split()[0] for line in why.text().splitlines()[1:4]] == list("rst")
    assert explanation["output"].column_labels == tuple("uvwxyz")


def test_labels_of_an_explanation_may_be_given_and_bad_input_is_refused():
    import regard.interop.xarray as over_xarray

    q, k, v = (one.isel(text=0, head=0) for one in labelled())
    names = {"row": "word", "key_row": "seen", "feature": "f"}
    explanation = over_xarray.explain(q, k, v, **names, title="mine", key_labels=list("1234567"))
    assert explanation.title == "mine"
    assert explanation["weights"].row_labels == tuple("abcde")
    assert explanation["weights"].column_labels == tuple("1234567")
    alike = over_xarray.explain(q, q, q, **names | {"key_row": "word"}, labels=list("12345"))
    assert alike["weights"].row_labels == alike["weights"].column_labels == tuple("12345")
    with pytest.raises(regard.ShapeError, match="needs head, word, f"):
        over_xarray.explain(q, k, v, **names, head="head")
    k, v = (one.assign_coords(seen=range(at, at + 7)) for at, one in enumerate((k, v)))
    with pytest.raises(regard.ShapeError, match="other labels along seen"):
        over_xarray.explain(q, k, v, **names)

"""Arrays whose numbers are not in memory, or not yet: refused, with what to pass instead."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from calls import inputs

ARRAY = np.linspace(-1, 1, 12).reshape(3, 4)


def of_dask(array, _):
    import dask.array

    return dask.array.from_array(array, chunks=2)


def of_dask_not_even_an_array(array, _):
    import dask

    return dask.delayed(array)


def of_zarr(array, _):
    import zarr

    return zarr.array(array)


def of_h5py(array, folder):
    import h5py

    return h5py.File(folder / "array.h5", "w").create_dataset("array", data=array)


def of_sparse(array, _):
    import sparse

    return sparse.COO.from_numpy(array)


def of_cupy(array, _):
    """No GPU here: a class of the name and the methods of CuPy's."""

    def refuse(*_):
        raise AssertionError("the numbers were asked for")

    members = {"__module__": "cupy", "shape": array.shape, "get": lambda _: array}
    members |= dict.fromkeys(("__array__", "__dlpack__", "__dlpack_device__"), refuse)
    return type("ndarray", (), members)()


def of_xarray(make):
    def wrapped(array, folder):
        import xarray

        return xarray.DataArray(make(array, folder), dims=("row", "column"))

    return wrapped


def of_xarray_in_a_file(array, folder):
    import xarray

    xarray.Dataset({"array": (("row", "column"), array)}).to_zarr(folder / "array.zarr")
    return xarray.open_zarr(folder / "array.zarr", chunks=None)["array"]


def case(name, make, numbers, words, *tools):
    return pytest.param(make, numbers, words, marks=pytest.mark.needs(*tools), id=name)


# How to make one, how to get its numbers as the message says, and what it is called there.
CASES = [
    case("dask", of_dask, lambda a: a.compute(), "a dask Array.*pass {}.compute()", "dask"),
    case(
        "dask_delayed",
        of_dask_not_even_an_array,
        lambda a: a.compute(),
        "a dask Delayed.*pass {}.compute()",
        "dask",
    ),
    case("zarr", of_zarr, lambda a: a[...], "a zarr Array.*pass {}[...]", "zarr"),
    case("h5py", of_h5py, lambda a: a[...], "a h5py Dataset.*pass {}[...]", "h5py"),
    case("sparse", of_sparse, lambda a: a.todense(), "a sparse COO.*pass {}.todense()", "sparse"),
    pytest.param(of_cupy, lambda a: a.get(), "a cupy ndarray.*pass {}.get()", id="cupy"),
    case(
        "xarray_over_dask",
        of_xarray(of_dask),
        lambda a: a.data.compute(),
        "{}.data is a dask Array.*pass {}.data.compute()",
        *("xarray", "dask"),
    ),
    case(
        "xarray_over_sparse",
        of_xarray(of_sparse),
        lambda a: a.data.todense(),
        "{}.data is a sparse COO.*pass {}.data.todense()",
        *("xarray", "sparse"),
    ),
    case(
        "xarray_in_a_file",
        of_xarray_in_a_file,
        lambda a: a.load(),
        "an xarray DataArray.*pass {}.load()",
        *("xarray", "zarr"),
    ),
]


def pattern(words, name):
    return words.format(name, name).replace("[...]", r"\[\.\.\.\]").replace("()", r"\(\)")


@pytest.mark.filterwarnings("ignore")  # what these libraries warn of among themselves
@pytest.mark.parametrize(("make", "numbers", "words"), CASES)
def test_what_is_lazy_or_elsewhere_is_refused_with_what_to_pass_instead(
    make, numbers, words, tmp_path
):
    there = make(ARRAY, tmp_path)
    given = {"query": ARRAY, "key": ARRAY, "value": ARRAY}
    for name in given:
        with pytest.raises(regard.DtypeError, match=pattern(words, name)):
            regard.attention(**(given | {name: there}))
    square = ARRAY[:, :3]
    for name, array in {"mask": square > 0, "bias": square}.items():
        (tmp_path / name).mkdir()
        with pytest.raises(regard.DtypeError, match=pattern(words, name)):
            regard.attention(**given, **{name: make(array, tmp_path / name)})
    with pytest.raises(regard.DtypeError, match=pattern(words, "query")):
        regard.explain(there, there, there)
    with pytest.raises(regard.DtypeError, match=pattern(words, "scores")):
        regard.softmax(there)
    with pytest.raises(regard.DtypeError, match="out"):
        regard.attention(**given, out=there)
    np.testing.assert_array_equal(
        regard.attention(*[numbers(there)] * 3), regard.attention(*given.values())
    )


@pytest.mark.needs("xarray")
def test_an_array_of_xarray_over_numpy_is_read():
    wrap = of_xarray(lambda array, _: array)
    given = inputs((5, 8), (6, 8), (6, 4))
    np.testing.assert_array_equal(
        regard.attention(*(wrap(array, None) for array in given)), regard.attention(*given)
    )

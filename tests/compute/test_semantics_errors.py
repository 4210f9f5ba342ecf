"""What is refused: kinds of arrays, arrays of other devices; and what the messages say."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from calls import every_kernel, inputs

NAMES = "query", "key", "value"
SHAPES = (3, 4), (5, 4), (5, 2)


def call_with(name: str, array: object, **options: object) -> None:
    arrays = dict(zip(NAMES, inputs(*SHAPES), strict=True)) | {name: array}
    regard.attention(*arrays.values(), **options)


def shape_of(name: str) -> tuple[int, ...]:
    return dict(zip(NAMES, SHAPES, strict=True))[name]


KINDS = {
    "complex64": lambda s: np.ones(s, np.complex64),
    "complex128": lambda s: np.ones(s, np.complex128),
    "longdouble": lambda s: np.ones(s, np.longdouble),
    "object": lambda s: np.ones(s, object),
    "strings": lambda s: np.full(s, "one"),
    "bytes": lambda s: np.full(s, b"one"),
    "datetime": lambda s: np.zeros(s, "datetime64[s]"),
    "timedelta": lambda s: np.zeros(s, "timedelta64[s]"),
    "structured": lambda s: np.zeros(s, [("x", "f4"), ("y", "f4")]),
    "void": lambda s: np.zeros(s, "V4"),
    "masked": lambda s: np.ma.masked_array(np.ones(s, np.float32), mask=False),
    "masked integers": lambda s: np.ma.masked_array(np.ones(s, int), mask=True),
    "strings of Python": lambda s: "one",
    "None": lambda s: None,
    "dictionary": lambda s: {"x": 1},
    "set": lambda s: {1.0, 2.0},
    "complex list": lambda s: np.ones(s, complex).tolist(),
}


@every_kernel
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_are_not_real_numbers_are_refused_by_name(kernel, name, kind):
    with pytest.raises(TypeError, match=name) as caught:
        call_with(name, KINDS[kind](shape_of(name)), kernel=kernel)
    assert isinstance(caught.value, regard.DtypeError)
    assert name in str(caught.value).split(" (query")[0]


@pytest.mark.parametrize(
    "name", ["scale", "softcap", "sink", "offset", "out", "lengths", "segments"]
)
def test_a_mask_of_its_own_is_never_lost_in_any_argument(name):
    # np.ma.masked stands for "no number", and NumPy alone would read it as 0.
    x = np.eye(2)[None, None]
    given = {
        "offset": np.ma.masked_array(1, True),
        "out": np.ma.masked_array(np.zeros((1, 1, 2, 2)), True),
        "lengths": np.ma.masked_array([2], [True]),
        "segments": np.ma.masked_array([0, 1], [True, False]),
    }.get(name, np.ma.masked)
    call = {
        "lengths": regard.masks.Lengths,
        "segments": lambda segments: regard.masks.Segments([0, 1], segments),
    }.get(name, lambda option: regard.attention(x, x, x, **{name: option}))
    with pytest.raises(regard.DtypeError, match=f"{name}.* is a MaskedArray"):
        call(given)


@every_kernel
@pytest.mark.parametrize("name", NAMES)
def test_kinds_that_are_ragged_are_refused_by_name(kernel, name):
    with pytest.raises((TypeError, ValueError), match=name):
        call_with(name, [[1.0, 2.0], [3.0]], kernel=kernel)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["complex64", "longdouble", "object", "strings"])
def test_kinds_are_named_in_the_message(name, kind):
    array = KINDS[kind](shape_of(name))
    with pytest.raises(regard.DtypeError) as caught:
        call_with(name, array)
    assert str(array.dtype) in str(caught.value)


class OnAnotherDevice:
    """What arrays of other libraries look like: they know DLPack and refuse to become NumPy."""

    shape = (5, 4)
    dtype = "float32"

    def __dlpack_device__(self):
        return (2, 0)  # a CUDA device

    def __dlpack__(self, **_):
        raise BufferError("not on the CPU")

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert a device tensor to numpy")


@every_kernel
@pytest.mark.parametrize("name", NAMES)
def test_not_offered_are_arrays_on_another_device_and_the_way_to_bring_them_is_named(kernel, name):
    with pytest.raises(TypeError, match=name) as caught:
        call_with(name, OnAnotherDevice(), kernel=kernel)
    message = str(caught.value)
    assert any(way in message for way in ("cpu", "CPU", "numpy.asarray", "np.asarray"))


def test_not_offered_is_dropout():
    with pytest.raises(TypeError, match="dropout"):
        regard.attention(*inputs(*SHAPES), dropout=0.1)


def test_not_offered_are_rows_before_heads_but_the_docstring_shows_the_view():
    assert "swapaxes(-3, -2)" in regard.attention.__doc__


SHAPE_ERRORS = [
    (((2, 3, 4), (2, 5, 4), (2, 6, 4)), {}, ("key", "value", "5", "6")),
    (((2, 3, 4), (2, 5, 7), (2, 5, 4)), {}, ("query", "key", "4", "7")),
    (((5, 3, 4), (2, 5, 4), (2, 5, 4)), {}, ("query", "key", "5", "2")),
    (((3, 2, 3, 4), (2, 2, 5, 4), (3, 2, 5, 4)), {}, ("query", "key", "3", "2")),
    (((2, 3, 4), (2, 5, 4), (2, 5, 4)), {"mask": np.ones((3, 4), bool)}, ("mask", "(3, 4)")),
    (((2, 3, 4), (2, 5, 4), (2, 5, 4)), {"bias": np.ones((3, 4))}, ("bias", "(3, 4)")),
    (((2, 3, 4), (2, 5, 4), (2, 5, 4)), {"sink": np.ones(3)}, ("sink", "3", "2")),
]


@every_kernel
@pytest.mark.parametrize(("shapes", "options", "words"), SHAPE_ERRORS)
def test_errors_name_the_arguments_and_both_numbers_and_then_the_shapes(
    kernel, shapes, options, words
):
    q, k, v = inputs(*shapes)
    with pytest.raises(regard.ShapeError) as caught:
        regard.attention(q, k, v, kernel=kernel, **options)
    cause, _, shown = str(caught.value).partition(" (query ")
    for word in words:
        assert word in cause
    shown = "query " + shown
    for name, shape in zip(NAMES, shapes, strict=True):
        assert shown.count(f"{name} {shape}") == 1


@every_kernel
def test_errors_are_one_line(kernel):
    for shapes, options, _ in SHAPE_ERRORS:
        with pytest.raises(regard.ShapeError) as caught:
            regard.attention(*inputs(*shapes), kernel=kernel, **options)
        assert str(caught.value).isprintable()


@every_kernel
def test_errors_hide_what_went_on_inside(kernel):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 6, 4))
    with pytest.raises(regard.ShapeError) as caught:
        regard.attention(q, k, v, kernel=kernel)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_errors_are_the_errors_of_python_too():
    assert issubclass(regard.ShapeError, ValueError)
    assert issubclass(regard.OptionError, ValueError)
    assert issubclass(regard.DtypeError, TypeError)


@every_kernel
def test_errors_come_before_anything_is_computed(kernel):
    size = 200_000  # a matrix of scores would take 160 GB
    q = np.broadcast_to(np.float32(1), (size, 4))
    k, v = (np.broadcast_to(np.float32(1), (n, 4)) for n in (size, size - 1))
    with pytest.raises(regard.ShapeError):
        regard.attention(q, k, v, kernel=kernel)
    with pytest.raises(regard.OptionError):
        regard.attention(q, k, k, kernel=kernel, scale=np.nan)
    with pytest.raises(regard.OptionError):
        regard.attention(q, k, k, kernel=kernel, softcap=-1.0)

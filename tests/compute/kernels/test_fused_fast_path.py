"""The fast path, which answers a call before a Request is built, as the general way would.

The fast path recognises three aligned arrays of one type with default options. Whatever it answers
must have the bytes of the general way; whatever it does not must come out as the general way has
it, errors included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import regard
import regard.api
from calls import BFLOAT16, assert_same_bytes, every_target, inputs, numbers, on_path
from layouts import layouts
from regard.compute import native, positioned
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = pytest.mark.needs("fused")

QKV = ("query", "key", "value")
OPTIONS = ("mask", "bias", "causal", "window", "offset", "scale", "softcap", "sink", "precision")
OPTIONS += ("return_weights", "return_lse", "out", "kernel", "threads")
DEFAULTS = dict.fromkeys(OPTIONS) | {"causal": False, "precision": "working"}
DEFAULTS |= {"return_weights": False, "return_lse": False}


def on_fast_path(*arrays: Any, **options: Any) -> Any:
    """The answer of the fast path itself; None where it leaves the call to others."""
    return native.fast_path(*arrays, *(DEFAULTS | options).values())


@contextmanager
def without_fast_path() -> Iterator[None]:
    before = native.fast_path
    regard.api.fast_path = native.fast_path = lambda *_: None
    try:
        yield
    finally:
        regard.api.fast_path = native.fast_path = before


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """What a call gives: its arrays with their bytes, or its error with its words."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    parts = result if isinstance(result, tuple) else (result,)
    return type(result), *((x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, parts))


def both_ways(*arrays: Any, **options: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    def call() -> Any:
        return regard.attention(*arrays, **options)

    with without_fast_path():
        general = outcome(call)
    return outcome(call), general


# what it answers ---------------------------------------------------------------------------------

SHAPES = [
    ((3, 4), (3, 4), (3, 4)),
    ((1, 1), (1, 1), (1, 1)),
    ((5, 7), (3, 7), (3, 2)),
    ((1, 64), (300, 64), (300, 64)),
    ((97, 16), (97, 16), (97, 33)),
    ((257, 48), (257, 48), (257, 16)),
    ((2, 5, 8), (2, 5, 8), (2, 5, 8)),
    ((6, 5, 8), (2, 9, 8), (2, 9, 3)),
    ((12, 1, 64), (3, 600, 64), (3, 600, 64)),
    ((4, 2, 5, 8), (4, 1, 5, 8), (4, 1, 5, 9)),
    ((2, 3, 4, 110, 16), (2, 3, 2, 110, 16), (2, 3, 2, 110, 16)),
    ((33, 1, 2, 4), (33, 1, 3, 4), (33, 1, 3, 5)),
    ((40, 2, 3, 4), (40, 2, 3, 4), (40, 2, 3, 5)),
    ((2, 1, 2, 1, 2, 2, 3, 4), (2, 1, 2, 1, 2, 2, 3, 4), (2, 1, 2, 1, 2, 2, 3, 4)),
    ((4, 300, 64), (4, 300, 64), (4, 300, 64)),  # enough work for other threads
]


DTYPES = [np.float32, np.float64, np.float16, *([BFLOAT16] if BFLOAT16 is not None else [])]


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_fast_call_has_the_bytes_of_the_general_way(target, dtype, shapes):
    with on_path(f"fused:{target}"):
        arrays = inputs(*shapes, dtype=dtype)
        square = shapes[0][-2] == shapes[1][-2]
        for options in ({}, {"scale": 0.3}, {"scale": -2.5}, {"causal": True}, {"threads": 2}):
            if options.get("causal") and not square:
                continue
            fast = on_fast_path(*arrays, **options)
            assert fast is not None, f"{options}: not answered by the fast path"
            out = np.full_like(fast, np.nan)
            assert on_fast_path(*arrays, out=out, **options) is out
            assert_same_bytes(out, fast, f"{options}, in out")
            with without_fast_path():
                general = regard.attention(*arrays, **options)
            assert_same_bytes(fast, general, f"{options}")
            assert_same_bytes(regard.attention(*arrays, **options), general, f"{options}, called")


PLACED = {
    "rotary": lambda heads: Rotary(),
    "rotary, six of the features side by side": lambda heads: Rotary(width=6, interleaved=True),
    "rotary that grows with the text": lambda heads: Rotary(
        scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 50}
    ),
    "alibi": lambda heads: Alibi(),
    "relative": lambda heads: RelativeBias(numbers((heads, 8), seed=4)),
}


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", PLACED)
def test_a_fast_call_with_positions_has_the_bytes_of_the_general_way(target, dtype, what):
    shapes = [
        ((7, 8), (7, 8)),
        ((2, 3, 4, 60, 16), (2, 3, 2, 60, 16)),
        ((4, 300, 64), (2, 300, 64)),
    ]
    with on_path(f"fused:{target}"):
        for of_query, of_key in shapes:
            arrays = inputs(of_query, of_key, of_key, dtype=dtype)
            positions = PLACED[what](of_query[-3] if len(of_query) > 2 else 1)
            placed = positioned.fast(positions, *arrays[:2])
            for options in ({}, {"causal": True, "scale": 0.3}):
                fast = on_fast_path(*arrays, **options, positions=placed)
                assert fast is not None, f"{options}: not answered by the fast path"
                options["positions"] = positions
                with without_fast_path():
                    general = regard.attention(*arrays, **options)
                assert_same_bytes(fast, general, f"{options}")
                assert_same_bytes(regard.attention(*arrays, **options), general, "called")


def test_positions_of_other_sizes_are_left_by_the_fast_path():
    q, k, v = inputs((4, 6, 8), (4, 6, 8), (4, 6, 8))
    angles = np.zeros((6, 4))
    bias = np.zeros((4, 6, 6), np.float32)
    assert on_fast_path(q, k, v, positions=(angles, angles, False)) is not None
    assert on_fast_path(q, k, v, positions=bias) is not None
    for placed in (
        (angles[:5], angles[:5], False),
        (angles, angles[:, :3], False),
        (np.zeros((6, 5)), np.zeros((6, 5)), False),
        (angles.T.copy().T, angles, False),
        (angles.astype(np.float32), angles, False),
        (angles, None, False),
        (angles, angles),
        bias[:3],
        bias[:, :5],
        bias[..., :5],
        bias[0],
        bias.astype(np.float64),
        "rotary",
    ):
        assert on_fast_path(q, k, v, positions=placed) is None, placed
    assert on_fast_path(q[:, :5], k, v, positions=(angles[:5], angles[:5], False)) is None


def test_numbers_of_earlier_calls_are_not_taken_for_those_of_other_positions():
    q, k, v = inputs((2, 9, 8), (2, 9, 8), (2, 9, 8))
    tables = numbers((2, 8), seed=1), numbers((2, 8), seed=2)
    rules = [
        Alibi(),
        Alibi([0.5, 0.25]),
        Rotary(),
        Rotary(base=100.0),
        Rotary(attention_factor=2.0),
    ]
    rules += [RelativeBias(table, two, far) for table in tables for two in (True, False)
              for far in (5, 9)]  # fmt: skip
    found = [regard.attention(q, k, v, positions=rule).tobytes() for rule in rules * 2]
    assert found[: len(rules)] == found[len(rules) :]
    assert len(set(found)) == len(rules)
    positioned._kept.cache_clear()
    for rule, before in zip(rules, found, strict=False):
        positioned._kept.cache_clear()
        assert regard.attention(q, k, v, positions=rule).tobytes() == before, rule


@every_target
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fast_call_of_every_small_size_has_the_bytes_of_the_general_way(target, dtype):
    rng = np.random.default_rng(5)
    with on_path(f"fused:{target}"):
        for n in range(200):
            length, size, width, values = (int(x) for x in rng.integers(1, 70, 4))
            groups, times = (int(x) for x in rng.integers(1, 4, 2))
            size = length if n % 2 else size
            q, k, v = inputs(
                (groups * times, length, width),
                (groups, size, width),
                (groups, size, values),
                dtype=dtype,
                seed=n,
            )
            fast = on_fast_path(q, k, v, causal=bool(n % 2))
            with without_fast_path():
                general = regard.attention(q, k, v, causal=bool(n % 2))
            assert_same_bytes(fast, general, f"{q.shape} {k.shape} {v.shape}")


@every_target
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e38, 1e-42, -0.0, 0.0])
def test_a_fast_call_with_odd_numbers_has_the_bytes_of_the_general_way(target, dtype, number):
    with on_path(f"fused:{target}"):
        for place in range(3):
            arrays = inputs((2, 20, 16), (2, 20, 16), (2, 20, 16), dtype=dtype)
            arrays[place][1, 7, 3:5] = number
            for causal in (False, True):
                with np.errstate(all="raise"):
                    fast = on_fast_path(*arrays, causal=causal)
                with without_fast_path():
                    general = regard.attention(*arrays, causal=causal)
                assert_same_bytes(fast, general, f"{QKV[place]}, causal {causal}")


def test_a_fast_answer_is_a_new_array_that_owns_its_memory():
    q, k, v = inputs((2, 5, 8), (2, 5, 8), (2, 5, 8))
    for x in (q, k, v):
        x.setflags(write=False)
    one, other = on_fast_path(q, k, v), on_fast_path(q, k, v)
    assert type(one) is np.ndarray
    assert one.flags.owndata
    assert one.flags.writeable
    assert one.flags.c_contiguous
    assert not np.shares_memory(one, other)
    assert not any(np.shares_memory(one, x) for x in (q, k, v))


def test_a_fast_call_uses_the_target_that_is_chosen(monkeypatch):
    # Targets differ in the last bits, so the bytes say which one answered.
    q, k, v = inputs((4, 40, 64), (4, 300, 64), (4, 300, 64))
    answers = {}
    for target in [one for one, usable in native.targets().items() if usable]:
        with on_path(f"fused:{target}"):
            answers[target] = on_fast_path(q, k, v).tobytes()
            with without_fast_path():
                assert regard.attention(q, k, v).tobytes() == answers[target], target
    if len(answers) == 3:
        assert len({answers["baseline"], answers["avx512"]}) == 2


# what it leaves to others ------------------------------------------------------------------------


class Subclass(np.ndarray):
    """An ndarray of another class, which must come out as the general way has it."""


def base() -> dict[str, Any]:
    return dict(zip(QKV, inputs((4, 5, 8), (2, 5, 8), (2, 5, 6)), strict=True))


def changed(**arrays: Any) -> dict[str, Any]:
    return base() | arrays


OTHER_INPUTS: dict[str, dict[str, Any]] = {
    "key of another width": changed(key=numbers((2, 5, 7))),
    "value of another length": changed(value=numbers((2, 4, 6))),
    "value with other heads": changed(value=numbers((1, 5, 6))),
    "heads that do not divide": changed(query=numbers((5, 5, 8))),
    "fewer heads than key heads": changed(query=numbers((1, 5, 8))),
    "key without heads": changed(key=numbers((5, 8))),
    "value without heads": changed(value=numbers((5, 6))),
    "a vector": changed(query=numbers((8,)), key=numbers((5, 8)), value=numbers((5, 6))),
    "a scalar": changed(query=numbers(())),
    "leading axes that broadcast": changed(query=numbers((3, 4, 5, 8))),
    "leading axes of one": changed(
        query=numbers((3, 4, 5, 8)), key=numbers((1, 2, 5, 8)), value=numbers((3, 2, 5, 6))
    ),
    "leading axes that do not broadcast": changed(
        query=numbers((3, 4, 5, 8)), key=numbers((2, 2, 5, 8)), value=numbers((3, 2, 5, 6))
    ),
    "nine axes": {name: numbers((1,) * 7 + (2, 3)) for name in QKV},
    "no queries": changed(query=numbers((4, 0, 8))),
    "no keys": changed(key=numbers((2, 0, 8)), value=numbers((2, 0, 6))),
    "no width": changed(query=numbers((4, 5, 0)), key=numbers((2, 5, 0))),
    "no value width": changed(value=numbers((2, 5, 0))),
    "no heads": {name: numbers((0, 5, 8)) for name in QKV},
    "no key heads": changed(key=numbers((0, 5, 8)), value=numbers((0, 5, 6))),
    "no batch": {name: numbers((0, 2, 5, 8)) for name in QKV},
    "mixed types": changed(key=numbers((2, 5, 8), np.float64)),
    "float16 in another order": {name: x.astype(">f2") for name, x in base().items()},
    "integers": {name: (3 * x).astype(np.int32) for name, x in base().items()},
    "booleans": {name: x > 0 for name, x in base().items()},
    "complex": {name: x.astype(complex) for name, x in base().items()},
    "longdouble": {name: x.astype(np.longdouble) for name, x in base().items()},
    "objects": {name: x.astype(object) for name, x in base().items()},
    "text": changed(query=np.array([["a"]])),
    "lists": {name: x.tolist() for name, x in base().items()},
    "None": changed(value=None),
    "a subclass": {name: x.view(Subclass) for name, x in base().items()},
    "a masked array": changed(key=np.ma.masked_greater(base()["key"], 1.0)),
    "structured": changed(key=np.zeros((2, 5, 8), [("x", "f4")])),
}


@pytest.mark.parametrize("what", OTHER_INPUTS)
def test_inputs_that_the_fast_path_leaves_come_out_as_the_general_way_has_them(what):
    call = OTHER_INPUTS[what]
    assert on_fast_path(*call.values()) is None
    fast, general = both_ways(*call.values())
    assert fast == general


@pytest.mark.parametrize("name", QKV)
def test_layouts_come_out_as_the_general_way_has_them_fast_or_not(name):
    expected = outcome(lambda: regard.attention(**base()))
    left = set()
    for layout, x in layouts(base()[name]):
        call = base() | {name: x}
        if on_fast_path(*call.values()) is None:
            left.add(layout)
        fast, general = both_ways(*call.values())
        assert fast == general == expected, layout
    assert left == {"unaligned", "field of a packed struct", "the other byte order"}


@every_target
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (7, 5), (2, 1, 2)], ids=str)
def test_a_fast_call_on_views_of_larger_arrays_has_the_bytes_of_the_general_way(
    target, dtype, lead
):
    with on_path(f"fused:{target}"):
        q, k, v = inputs((*lead, 4, 5, 8), (*lead, 2, 9, 8), (*lead, 2, 9, 16), dtype=dtype)
        backwards = tuple(slice(None, None, -1) for _ in lead)
        for views in (
            (q, k[..., :7, :], v[..., :7, :]),
            (q[backwards], k[backwards], v[backwards]),
            (
                np.broadcast_to(q[(0,) * len(lead)], q.shape),
                k,
                np.broadcast_to(v[..., :1], v.shape),
            ),
        ):
            fast = on_fast_path(*views)
            assert fast is not None
            with without_fast_path():
                assert_same_bytes(fast, regard.attention(*map(np.ascontiguousarray, views)))


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "mask": {"mask": np.tri(5, dtype=bool)},
    "mask of ints": {"mask": np.tri(5, dtype=int)},
    "mask object": {"mask": regard.masks.Causal()},
    "bias": {"bias": -1.5 * np.arange(5.0)},
    "window": {"window": (2, 1)},
    "window of one": {"window": (2,)},
    "offset": {"offset": 1, "causal": True},
    "offset alone": {"offset": 1},
    "softcap": {"softcap": 2.0},
    "softcap of zero": {"softcap": 0.0},
    "sink": {"sink": 0.5},
    "exact": {"precision": "exact"},
    "another precision": {"precision": "double"},
    "precision that is none": {"precision": None},
    "weights": {"return_weights": True},
    "lse": {"return_lse": True},
    "weights that are 1": {"return_weights": 1},
    "weights that are NumPy's": {"return_weights": np.True_},
    "causal that is 1": {"causal": 1},
    "causal that is None": {"causal": None},
    "causal that is NumPy's": {"causal": np.True_},
    "out of another shape": {"out": np.zeros((4, 5, 7), np.float32)},
    "out of fewer axes": {"out": np.zeros((5, 6), np.float32)},
    "out of another dtype": {"out": np.zeros((4, 5, 6), np.float64)},
    "out in another order": {"out": np.zeros((4, 5, 6), np.float32, order="F")},
    "out that is a list": {"out": [0.0]},
    "a kernel": {"kernel": "fused"},
    "another kernel": {"kernel": "reference"},
    "an unknown kernel": {"kernel": "quickest"},
    "no threads": {"threads": 0},
    "fewer threads than none": {"threads": -1},
    "more threads than are of use": {"threads": 257},
    "more threads than an integer holds": {"threads": 2**70},
    "threads that are True": {"threads": True},
    "threads that are NumPy's": {"threads": np.int64(2)},
    "threads of text": {"threads": "2"},
    "scale of int": {"scale": 2},
    "scale of zero": {"scale": 0.0},
    "scale of minus zero": {"scale": -0.0},
    "scale of NumPy": {"scale": np.float32(0.3)},
    "scale of text": {"scale": "2"},
    "scale of a fraction": {"scale": Fraction(1, 3)},
    "scale of bool": {"scale": True},
    "scale too small for float32": {"scale": 1e-42},
    "scale too large for float32": {"scale": 1e42},
    "scale NaN": {"scale": float("nan")},
    "scale infinite": {"scale": float("inf")},
}


@pytest.mark.parametrize("what", OTHER_OPTIONS)
def test_options_that_the_fast_path_leaves_come_out_as_the_general_way_has_them(what):
    options = OTHER_OPTIONS[what]
    assert on_fast_path(*base().values(), **options) is None
    fast, general = both_ways(*base().values(), **options)
    assert fast == general


def test_out_is_what_a_call_with_out_returns():
    out = np.full((4, 5, 6), np.nan, np.float32)
    assert regard.attention(**base(), out=out) is out
    assert_same_bytes(out, regard.attention(**base()))


def test_out_that_lies_on_an_input_is_left_to_the_general_way():
    memory = numbers((400,), seed=1)
    whole = numbers((4, 5, 6), seed=2)
    query = memory[120:240].reshape(4, 5, 6)
    for start in (0, 1, 60, 119, 120, 121, 239, 240, 280):
        out = memory[start : start + 120].reshape(4, 5, 6)
        for one in (query, query[::-1], query[:, ::-1, ::-1]):
            for arrays in ((one, whole, whole), (whole, one, whole), (whole, whole, one)):
                expected = regard.attention(*(array.copy() for array in arrays))
                before = memory.copy()
                taken = on_fast_path(*arrays, out=out)
                assert (taken is out) is (start in (0, 240, 280))
                assert regard.attention(*arrays, out=out) is out
                assert_same_bytes(out, expected)
                memory[...] = before


def test_out_that_may_not_be_written_is_left_to_the_general_way():
    whole = numbers((4, 5, 6))
    out = np.zeros((4, 5, 6), np.float32)
    out.setflags(write=False)
    assert on_fast_path(whole, whole, whole, out=out) is None
    with pytest.raises(ValueError, match="out is read-only"):
        regard.attention(whole, whole, whole, out=out)


def test_causal_needs_an_offset_where_lengths_differ_on_the_fast_path_too():
    q, k, v = inputs((3, 4), (5, 4), (5, 4))
    assert on_fast_path(q, k, v, causal=True) is None
    fast, general = both_ways(q, k, v, causal=True)
    assert fast == general
    with pytest.raises(ValueError, match="offset"):
        regard.attention(q, k, v, causal=True)


@pytest.mark.parametrize("scale", [1e-29, 1e29, 1e-31, 1e31, 5e-324, 1e308, -1e29, -1e31])
def test_scales_at_the_edge_of_the_fast_path_agree_on_either_side(scale):
    q, k, v = inputs((5, 4), (5, 4), (5, 4))
    fast, general = both_ways(q, k, v, scale=scale)
    assert fast == general
    assert np.isfinite(regard.attention(q, k, v, scale=scale)).all()


def test_the_fast_path_counts_its_arguments_and_survives_any_of_them():
    q, k, v = base().values()
    assert native.fast_path() is None
    assert native.fast_path(q, k, v) is None
    odd = [None, 0, "x", object(), float("nan"), [], q, np.zeros(0), np.float32(1), True]
    full = [q, k, v, *DEFAULTS.values()]
    for place in range(len(full)):
        for x in odd:
            native.fast_path(*full[:place], x, *full[place + 1 :])
    assert_same_bytes(on_fast_path(q, k, v), regard.attention(q, k, v, kernel="fused"))


# int8 caches --------------------------------------------------------------------------------------

BFLOAT = pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.needs("ml_dtypes"))


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT])
@every_target
def test_plain_steps_over_an_int8_cache_are_answered_and_have_the_bytes_of_the_general_way(
    target, dtype, rows, monkeypatch
):
    q, k, v = inputs((2, 4, rows, 24), (2, 2, 300, 24), (2, 2, 300, 40))
    q, cache = q.astype(dtype), regard.KVCache(dtype="int8")
    cache.append(k, v)
    answered: list[bool] = []

    def recorded(*arguments: Any) -> Any:
        found = fast(*arguments)
        answered.append(found is not None)
        return found

    fast = native.fast_path_of_bytes
    monkeypatch.setattr(native, "fast_path_of_bytes", recorded)
    out = np.empty((2, 4, rows, 40), dtype)
    plain: dict[str, Any] = {"causal": False}
    for options in (plain, plain | {"threads": 1, "scale": 0.25}, plain | {"out": out}):
        here = cache.attend(q, **options)
        there = cache.attend(q, kernel="fused", **options | {"out": None})
        assert_same_bytes(here, there)
    np.testing.assert_equal(answered, [dtype != np.float64, False] * 3)
    for more in ({"softcap": 2.0}, {"return_lse": True}, {"precision": "high"}):
        there = cache.attend(q, kernel="fused", **plain, **more)
        assert_same_bytes(np.asarray(cache.attend(q, **plain, **more)[0]), np.asarray(there[0]))
    assert not any(answered[6:])
    with pytest.raises(regard.ShapeError, match="must match"):
        cache.attend(q[..., :-1])

"""The fused kernel gives a row the same bytes however a call is cut, placed or threaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    BFLOAT16,
    assert_same_bytes,
    assert_same_result,
    every_float,
    every_target,
    inputs,
    numbers,
    on_path,
    run,
)
from regard.masks import Lengths, Segments

pytestmark = pytest.mark.needs("fused")

CHUNK = 256  # keys that are computed from zero with a maximum of their own
AROUND_CHUNKS = (1, 2, 31, 32, 33, 255, 256, 257, 511, 512, 513, 767, 769, 1000)
DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64)]
if BFLOAT16 is not None:
    DTYPES.append(BFLOAT16)


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    # Every test here takes `target`; what it asks for holds until it is over.
    with on_path(f"fused:{request.getfixturevalue('target')}"):
        yield


def rows_of(result: Any, rows: Any) -> Any:
    """Those rows of output, weights and lse."""
    return result._replace(
        output=result.output[..., rows, :],
        weights=result.weights[..., rows, :],
        lse=result.lse[..., rows],
    )


def options_of(kind: str, heads: int, length: int, size: int, dtype: Any) -> dict[str, Any]:
    """One option each, or all at once, drawn for these sizes."""
    rng = np.random.default_rng(length + 31 * size)
    mask = rng.random((heads, length, size)) < 0.7
    mask[:, :, : size // 2] &= rng.random(size // 2) < 0.3
    bias = numbers((heads, length, size), np.float32 if dtype != np.float64 else dtype, 7)
    bias = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias).astype(bias.dtype)
    every = {
        "none": {},
        "causal": {"causal": True, "offset": size - length},
        "window": {"window": (size // 3, 5), "offset": size - length},
        "mask": {"mask": mask},
        "segments": {"mask": Segments(rng.integers(0, 3, length), rng.integers(0, 3, size))},
        "lengths": {"mask": Lengths(max(size - 3, 0))},
        "bias": {"bias": bias},
        "softcap": {"softcap": 3.0},
        "sink": {"sink": numbers((heads,), np.float32, 9)},
        "scale": {"scale": -0.7},
    }
    every["all"] = {**every["mask"], **every["bias"], **every["softcap"], **every["sink"]}
    every["all"] |= {**every["window"], "causal": True, "scale": 0.3}
    return every[kind]


KINDS = ("none", "causal", "window", "mask", "segments", "lengths", "bias", "softcap", "sink")
KINDS += ("scale", "all")


def row_options(options: dict[str, Any], i: int) -> dict[str, Any]:
    """What the call of row i alone takes, so that the row sees what it saw among the others."""
    options = dict(options)
    if "offset" in options:
        options["offset"] += i
    if isinstance(options.get("mask"), np.ndarray):
        options["mask"] = options["mask"][:, i : i + 1]
    if isinstance(options.get("mask"), Segments):
        rule = options["mask"]
        options["mask"] = Segments(rule.query[..., i : i + 1], rule.key)
    if "bias" in options:
        options["bias"] = options["bias"][:, i : i + 1]
    return options


# a row alone and among others --------------------------------------------------------------------


@every_target
@every_float
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bytes_it_has_among_others(target, dtype, kind):
    heads, groups, length = 4, 2, 29
    for size in (31, 257, 513):
        q, k, v = inputs((heads, length, 24), (groups, size, 24), (groups, size, 40), dtype=dtype)
        options = options_of(kind, heads, length, size, dtype)
        whole = run("fused", q, k, v, **options)
        for i in (0, 1, 11, 12, 13, length - 1):
            alone = run("fused", q[:, i : i + 1], k, v, **row_options(options, i))
            assert_same_result(alone, rows_of(whole, slice(i, i + 1)), f"S = {size}, row {i}")


@every_target
@pytest.mark.parametrize("size", AROUND_CHUNKS)
def test_a_row_alone_has_the_bytes_it_has_in_a_prefill_of_any_length(target, size):
    for dtype in DTYPES:
        q, k, v = inputs((2, 110, 16), (2, size, 16), (2, size, 16), dtype=dtype)
        for options in ({}, {"causal": True, "offset": size - 110}):
            whole = run("fused", q, k, v, **options)
            for i in (0, 5, 6, 95, 96, 107, 109):
                alone = run("fused", q[:, i : i + 1], k, v, **row_options(options, i))
                assert_same_result(alone, rows_of(whole, slice(i, i + 1)), f"{dtype}, row {i}")


@every_target
def test_a_row_alone_has_the_bytes_it_has_among_others_for_every_width(target):
    rng = np.random.default_rng(1)
    for width in range(1, 131):
        values, size = int(rng.integers(1, 131)), int(rng.choice(AROUND_CHUNKS))
        dtype = DTYPES[width % len(DTYPES)]
        q, k, v = inputs((23, width), (size, width), (size, values), dtype=dtype, seed=width)
        whole = run("fused", q, k, v)
        for i in (0, 11, 22):
            alone = run("fused", q[i : i + 1], k, v)
            assert_same_result(alone, rows_of(whole, slice(i, i + 1)), f"D {width}, E {values}")


@every_target
@every_float
def test_rows_of_many_heads_in_one_tile_have_the_bytes_of_each_head_alone(target, dtype):
    # Rows of all heads that share a key head are handed out together, here 24 heads of one row.
    q, k, v = inputs((24, 1, 32), (2, 300, 32), (2, 300, 48), dtype=dtype)
    bias, sink = numbers((24, 1, 300), np.float32, 3), numbers((24,), np.float32, 4)
    whole = run("fused", q, k, v, bias=bias, sink=sink)
    for h in range(24):
        g = h // 12
        alone = run("fused", q[h], k[g], v[g], bias=bias[h], sink=sink[h])
        for name in ("output", "weights", "lse"):
            assert_same_bytes(getattr(alone, name), getattr(whole, name)[h], f"{name} of head {h}")


@every_target
@every_float
def test_a_decode_step_by_step_has_the_bytes_of_a_prefill(target, dtype):
    length = 270
    q, k, v = inputs((2, length, 16), (2, length, 16), (2, length, 16), dtype=dtype)
    whole = regard.attention(q, k, v, causal=True)
    for t in (0, 1, 100, 254, 255, 256, 257, length - 1):
        step = regard.attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        assert_same_bytes(step[:, 0], whole[:, t], f"step {t}")


@every_target
def test_a_row_that_needed_a_second_try_changes_no_other_row(target):
    q, k, v = inputs((40, 16), (300, 16), (300, 16))
    clean = run("fused", q, k, v)
    q = q.copy()
    q[17] = 3e38  # scores beyond float32: this row is computed again with more range
    whole = run("fused", q, k, v)
    assert_same_result(rows_of(whole, slice(17)), rows_of(clean, slice(17)))
    assert_same_result(rows_of(whole, slice(18, 40)), rows_of(clean, slice(18, 40)))
    assert_same_result(run("fused", q[17:18], k, v), rows_of(whole, slice(17, 18)))
    assert np.isfinite(whole.output).all()


# threads -----------------------------------------------------------------------------------------

# Each is worth several threads (work / 4e6 of them, at most) on some way of cutting a call.
CUTS = {
    "many blocks of rows": ((2, 300, 64), (2, 300, 64), (2, 300, 64)),
    "grouped heads": ((6, 200, 32), (2, 400, 32), (2, 400, 24)),
    "one row, keys split": ((2, 1, 64), (2, 70_000, 64), (2, 70_000, 64)),
    "few rows, keys split": ((1, 13, 64), (1, 9001, 64), (1, 9001, 40)),
    "two blocks, keys split": ((1, 150, 32), (1, 3000, 32), (1, 3000, 32)),
    "a batch": ((20, 2, 70, 32), (20, 1, 150, 32), (20, 1, 150, 33)),
    "a batch that broadcasts": ((9, 1, 130, 32), (1, 1, 300, 32), (1, 1, 300, 33)),
}


@every_target
@pytest.mark.parametrize("cut", CUTS)
def test_the_number_of_threads_changes_no_byte(target, cut):
    q, k, v = inputs(*CUTS[cut])
    first = run_without_weights(q, k, v, threads=1)
    for threads in (2, 3, 4, 5, 6, 7) * 2:
        again = run_without_weights(q, k, v, threads=threads)
        for name in ("output", "lse"):
            assert_same_bytes(getattr(again, name), getattr(first, name), f"{name}, {threads}")


def run_without_weights(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return regard.attention(q, k, v, kernel="fused", return_lse=True, **options)


@every_target
@every_float
def test_keys_that_are_split_over_threads_change_no_byte(target, dtype):
    # 5000 keys are 20 chunks; so many heads and no more make it worthwhile to split them.
    q, k, v = inputs((2, 8, 1, 128), (2, 1, 5000, 128), (2, 1, 5000, 64), dtype=dtype)
    mask = np.random.default_rng(0).random((2, 8, 1, 5000)) < 0.5
    mask[:, :, :, 700:1900] = False
    bias = numbers((2, 8, 1, 5000), np.float32, 4)
    for options in (
        {},
        {"mask": mask},
        {"bias": bias, "softcap": 2.0, "sink": 0.5},
        {"causal": True, "offset": 4000},
        {"window": (900, 0), "offset": 2500},
        {"mask": Lengths(np.array([257, 3000]))},
    ):
        first = run("fused", q, k, v, threads=1, **options)
        for threads in (2, 4, 7):
            again = run("fused", q, k, v, threads=threads, **options)
            assert_same_result(again, first, f"{threads} threads, {sorted(options)}")


@every_target
def test_keys_that_are_split_over_threads_keep_nan_and_range_as_they_were(target):
    q, k, v = inputs((8, 1, 128), (1, 5000, 128), (1, 5000, 64))
    k, v = k.copy(), v.copy()
    k[0, 3000], v[0, 4000, 5] = 1e38, np.nan
    q[3] = 1e5
    first = run("fused", q, k, v, threads=1)
    assert np.isnan(first.output[:, 0, 5]).any()
    for threads in (2, 4):
        assert_same_result(run("fused", q, k, v, threads=threads), first, f"{threads} threads")


@every_target
def test_two_hundred_repeats_give_the_same_bytes(target):
    q, k, v = inputs((8, 100, 32), (4, 300, 32), (4, 300, 32))
    first = regard.attention(q, k, v, causal=True, offset="end", threads=4).tobytes()
    for n in range(200):
        again = regard.attention(q, k, v, causal=True, offset="end", threads=4)
        np.testing.assert_equal(again.tobytes() == first, True, f"repeat {n}")


# the batch ---------------------------------------------------------------------------------------


@every_target
@every_float
def test_every_place_in_a_batch_gives_the_bytes_of_a_call_of_its_own(target, dtype):
    q, k, v = inputs((7, 4, 30, 24), (7, 2, 270, 24), (7, 2, 270, 24), dtype=dtype)
    bias = numbers((7, 4, 30, 270), np.float32, 2)
    lengths = np.array([270, 1, 256, 257, 0, 100, 269])
    whole = run("fused", q, k, v, bias=bias, mask=Lengths(lengths))
    for b in range(7):
        alone = run("fused", q[b], k[b], v[b], bias=bias[b], mask=Lengths(lengths[b]))
        for name in ("output", "weights", "lse"):
            assert_same_bytes(getattr(alone, name), getattr(whole, name)[b], f"{name} of {b}")


@every_target
def test_a_batch_that_broadcasts_gives_the_bytes_of_one_that_was_copied(target):
    q, k, v = inputs((5, 3, 2, 130, 16), (3, 1, 300, 16), (5, 1, 1, 300, 20))
    whole = run("fused", q, k, v)
    lead = (5, 3)
    wide = [np.broadcast_to(x, (*lead, *x.shape[-3:])).copy() for x in (q, k, v)]
    assert_same_result(run("fused", *wide), whole)


@every_target
def test_a_batch_of_more_than_thirty_two_is_answered_as_each_of_its_elements(target):
    q, k, v = inputs((40, 2, 3, 8), (40, 1, 5, 8), (40, 1, 5, 6))
    whole = regard.attention(q, k, v)
    for b in range(40):
        assert_same_bytes(regard.attention(q[b], k[b], v[b]), whole[b], f"element {b}")


# types -------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.itemsize == 2], ids=str)
def test_half_types_give_the_rounded_bytes_of_the_same_numbers_in_float32(target, dtype):
    q, k, v = inputs((3, 40, 24), (3, 300, 24), (3, 300, 24), dtype=dtype)
    half = run("fused", q, k, v, precision="high")
    single = run("fused", *(x.astype(np.float32) for x in (q, k, v)))
    assert_same_bytes(half.output, single.output.astype(dtype), "output")
    assert_same_bytes(half.lse, single.lse, "lse")


@every_target
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.itemsize == 2], ids=str)
def test_a_few_rows_read_half_types_where_they_lie_and_give_the_bytes_of_float32(target, dtype):
    # Few rows take keys in pairs of numbers, and what is left of a width; strides do not matter.
    layouts = {
        "contiguous": lambda x: x,
        "heads after rows": lambda x: x.swapaxes(0, 1).copy().swapaxes(0, 1),
        "every second row": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        "every second number": lambda x: np.repeat(x, 2, axis=2)[..., ::2],
    }
    kinds = ("none", "causal", "window", "mask", "lengths", "bias", "all")
    for number, (rows, width) in enumerate(product((1, 2, 3, 4, 5, 8), (16, 48, 72, 128))):
        size = 255 + 5 * number % 64
        q, k, v = inputs((4, rows, width), (2, size, width), (2, size, width), dtype=dtype)
        options = options_of(kinds[number % len(kinds)], 4, rows, size, dtype)
        hides = "mask" in options and not isinstance(options["mask"], Lengths)
        if hides:
            options["mask"][..., size // 2] = False
        single = run("fused", *(x.astype(np.float32) for x in (q, k, v)), **options)
        if hides:
            v[:, size // 2] = np.nan  # what is hidden meets no weight
        if kinds[number % len(kinds)] in ("none", "lengths"):
            many = inputs((4, 13, width), (1, 1), (1, 1), dtype=dtype)[0]
            many[:, :rows] = q
            working = rows_of(run("fused", many, k, v, **options), slice(rows))
        else:
            working = run("fused", q, k, v, **options)
        for name, layout in layouts.items():
            note = f"{rows} rows, width {width}, {name}"
            keys, values = layout(k), layout(v)
            high = run("fused", q, keys, values, precision="high", **options)
            assert_same_bytes(high.output, single.output.astype(dtype), note)
            assert_same_bytes(high.lse, single.lse, note)
            assert_same_result(run("fused", q, keys, values, **options), working, note)

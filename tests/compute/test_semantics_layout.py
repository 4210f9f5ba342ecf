"""Memory: layouts, inputs left as they are, the same bytes every time, and how much is used."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    assert_same_bytes,
    assert_same_result,
    every_float,
    every_kernel,
    every_kernel_where_the_reference_fails,
    inputs,
    numbers,
    run,
)
from layouts import alike, layouts
from regard.masks import Boolean, Lengths, Segments

NAMES = "query", "key", "value"


def arguments(dtype: Any, *, constant: tuple[int, ...] = ()) -> dict[str, Any]:
    """A call in which every array there is takes part."""
    q, k, v = inputs((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6), dtype=dtype)
    mask = np.random.default_rng(2).random((2, 4, 5, 7)) < 0.8
    bias, sink = numbers((2, 4, 5, 7), np.float32, 5), numbers((4,), np.float32, 6)
    arrays = {"query": q, "key": k, "value": v, "mask": mask, "bias": bias}
    arrays = {name: alike(x, constant) if constant else x for name, x in arrays.items()}
    return {**arrays, "sink": sink, "offset": np.array([1, 2]), "causal": True}


# layout -------------------------------------------------------------------------------------------


@pytest.mark.sweep
@every_kernel
@every_float
@pytest.mark.parametrize("constant", [(), (0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_layout_of_any_argument_changes_no_byte(kernel, dtype, constant):
    call = arguments(dtype, constant=constant)
    expected = run(kernel, **call)
    for name, x in call.items():
        if isinstance(x, np.ndarray):
            for layout, y in layouts(x):
                assert_same_result(run(kernel, **call | {name: y}), expected, f"{name}, {layout}")


@every_kernel
@every_float
def test_layout_of_all_arguments_at_once_changes_no_byte(kernel, dtype):
    call = arguments(dtype)
    expected = run(kernel, **call)
    arrays = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    every = {name: dict(layouts(x)) for name, x in arrays.items()}
    for layout in every["query"]:
        changed = {name: every[name].get(layout, x) for name, x in arrays.items()}
        assert_same_result(run(kernel, **call | changed), expected, layout)


@every_kernel
@pytest.mark.parametrize("shapes", [((5, 3), (7, 3), (7, 6)), ((3,), (7, 3), (7, 6))])
def test_layout_of_arrays_with_few_axes_changes_no_byte(kernel, shapes):
    call = dict(zip(NAMES, inputs(*shapes), strict=True))
    expected = run(kernel, **call)
    for name in NAMES:
        for layout, y in layouts(call[name]):
            assert_same_result(run(kernel, **call | {name: y}), expected, f"{name}, {layout}")


@every_kernel
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 2, 1, 1), (1, 1, 1, 1), (2, 1, 4, 1)])
def test_layout_of_axes_of_length_one_is_never_looked_at(kernel, shape):
    call = dict(zip(NAMES, inputs(shape, shape, shape), strict=True))
    expected = run(kernel, **call)
    for name in NAMES:
        for layout, y in layouts(call[name]):
            assert_same_result(run(kernel, **call | {name: y}), expected, f"{name}, {layout}")


@every_kernel
@pytest.mark.parametrize("size", [64, 65, 96, 97, 300])
def test_layout_of_larger_arrays_changes_no_byte(kernel, size):
    call = dict(zip(NAMES, inputs((2, 40, 32), (2, size, 32), (2, size, 24)), strict=True))
    expected = run(kernel, **call)
    for name in NAMES:
        for layout, y in layouts(call[name]):
            assert_same_result(run(kernel, **call | {name: y}), expected, f"{name}, {layout}")


@every_kernel
@pytest.mark.parametrize("size", [1, 32, 33, 65, 257])
def test_layout_of_rows_that_are_all_one_row_changes_no_byte(kernel, size):
    q, k, v = inputs((2, 3, 16), (2, 1, 16), (2, 1, 16))
    wide = [np.broadcast_to(x, (2, size, 16)) for x in (k, v)]
    assert_same_result(run(kernel, q, *wide), run(kernel, q, *(x.copy() for x in wide)))


@every_kernel
def test_layout_of_heads_after_rows_needs_only_a_view(kernel):
    q, k, v = inputs((2, 5, 4, 3), (2, 7, 4, 3), (2, 7, 4, 6))
    views = [x.swapaxes(-3, -2) for x in (q, k, v)]
    expected = run(kernel, *(x.copy() for x in views))
    assert_same_result(run(kernel, *views), expected)


@every_kernel
@every_float
@pytest.mark.parametrize("kind", ["Boolean", "Lengths", "Segments"])
def test_layout_of_what_mask_objects_hold_changes_no_byte(kernel, dtype, kind):
    call = {k: x for k, x in arguments(dtype).items() if k in NAMES}
    rng = np.random.default_rng(3)
    held, make = {
        "Boolean": (rng.random((2, 4, 5, 7)) < 0.7, Boolean),
        "Lengths": (np.array([3, 6]), Lengths),
        "Segments": (rng.integers(0, 2, (2, 7)), lambda x: Segments(np.zeros((2, 5), int), x)),
    }[kind]
    expected = run(kernel, **call, mask=make(held))
    for layout, y in layouts(held):
        assert_same_result(run(kernel, **call, mask=make(y)), expected, layout)


@every_kernel
@every_float
def test_inputs_are_never_written(kernel, dtype):
    call = arguments(dtype)
    before = {name: x.copy() for name, x in call.items() if isinstance(x, np.ndarray)}
    for options in ({}, {"softcap": 2.0, "scale": -3.0, "window": (2, 1)}):
        run(kernel, **call, **options)
        for name, x in before.items():
            assert_same_bytes(call[name], x, name)


@every_kernel
def test_inputs_that_are_nan_in_places_are_never_written(kernel):
    call = arguments(np.float32)
    for name in (*NAMES, "bias"):
        call[name][0, 0, 0, :2] = np.nan, np.inf
    before = {name: x.copy() for name, x in call.items() if isinstance(x, np.ndarray)}
    run(kernel, **call)
    for name, x in before.items():
        assert_same_bytes(call[name], x, name)


@every_kernel
def test_inputs_may_be_one_and_the_same_array(kernel):
    x = numbers((2, 5, 4))
    one = run(kernel, x, x, x, causal=True)
    assert_same_result(one, run(kernel, x.copy(), x.copy(), x.copy(), causal=True))


# determinism --------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_determinism_gives_the_same_bytes_every_time(kernel, dtype):
    q, k, v = inputs((3, 4, 20, 16), (3, 2, 70, 16), (3, 2, 70, 24), dtype=dtype)
    first = run(kernel, q, k, v, causal=True, offset="end")
    for threads in (None, 1, 2, 3, 4, 5, 6, 7) * 3:
        again = run(kernel, q, k, v, causal=True, offset="end", threads=threads)
        assert_same_result(again, first, f"{threads} threads")


@every_kernel
@every_float
def test_determinism_does_not_depend_on_the_place_in_the_batch(kernel, dtype):
    q, k, v = inputs((4, 3, 9, 16), (4, 3, 33, 16), (4, 3, 33, 8), dtype=dtype)
    whole = run(kernel, q, k, v)
    for b in range(4):
        for rows in (slice(b, b + 1), b):
            alone = run(kernel, q[rows], k[rows], v[rows])
            for name in ("output", "weights", "lse"):
                part = getattr(alone, name)
                assert_same_bytes(part, getattr(whole, name)[rows], f"{name} of batch {b}")
    order = np.array([2, 0, 3, 1, 1])
    moved = run(kernel, q[order], k[order], v[order])
    for name in ("output", "weights", "lse"):
        assert_same_bytes(getattr(moved, name), getattr(whole, name)[order], name)


@every_kernel
def test_determinism_of_long_calls_does_not_depend_on_how_many_there_are(kernel):
    q, k, v = inputs((3, 2, 330, 16), (3, 2, 199, 16), (3, 2, 199, 8))
    whole = run(kernel, q, k, v)
    for b, h in itertools.product(range(3), range(2)):
        alone = run(kernel, q[b, h], k[b, h], v[b, h])
        for name in ("output", "weights", "lse"):
            assert_same_bytes(getattr(alone, name), getattr(whole, name)[b, h], f"{name} {b}, {h}")


@every_kernel
def test_determinism_does_not_depend_on_the_other_heads(kernel):
    q, k, v = inputs((4, 9, 16), (4, 33, 16), (4, 33, 8))
    whole = run(kernel, q, k, v)
    for h in range(4):
        alone = run(kernel, q[h], k[h], v[h])
        assert_same_bytes(alone.output, whole.output[h], f"head {h}")


@every_kernel
def test_determinism_does_not_depend_on_what_ran_before(kernel):
    q, k, v = inputs((2, 9, 16), (2, 33, 16), (2, 33, 8))
    first = run(kernel, q, k, v)
    bad = (np.full_like(x, np.nan) for x in (q, k, v))
    run(kernel, *bad)
    run(kernel, *inputs((3, 50, 8), (3, 70, 8), (3, 70, 90), size=1e20))
    assert_same_result(run(kernel, q, k, v), first)


@every_kernel
def test_determinism_does_not_depend_on_other_threads(kernel):
    calls = [inputs((2, 20, 16), (2, 40, 16), (2, 40, 8), seed=n) for n in range(4)]
    expected = [run(kernel, *call) for call in calls]
    failures = []

    def work(n):
        for _ in range(20):
            result = regard.attention(*calls[n], kernel=kernel, return_lse=True)
            if result.output.tobytes() != expected[n].output.tobytes():
                failures.append(n)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@every_kernel_where_the_reference_fails(
    "the reference multiplies whole matrices, whose rounding depends on their shape"
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "offset": "end"}], ids=str)
def test_determinism_gives_a_row_alone_the_bytes_it_has_among_others(kernel, options):
    q, k, v = inputs((2, 64, 64), (2, 300, 64), (2, 300, 64))
    prefill = run(kernel, q, k, v, **options)
    for i in range(64):
        if options:
            options = {"causal": True, "offset": 300 - 64 + i}
        alone = run(kernel, q[:, i : i + 1], k, v, **options)
        assert_same_bytes(alone.output[:, 0], prefill.output[:, i], f"row {i}: output")
        assert_same_bytes(alone.lse[:, 0], prefill.lse[:, i], f"row {i}: lse")


# memory -------------------------------------------------------------------------------------------

LENGTH, WIDTH = 2048, 16
MATRIX = LENGTH * LENGTH * 4  # bytes of one matrix of scores


def peak(kernel: str, **options: Any) -> int:
    q, k, v = inputs((LENGTH, WIDTH), (LENGTH, WIDTH), (LENGTH, WIDTH))
    regard.attention(q[:4], k[:4], v[:4], kernel=kernel)
    tracemalloc.start()
    try:
        regard.attention(q, k, v, kernel=kernel, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@every_kernel
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}], ids=str)
def test_memory_is_never_that_of_a_matrix_of_scores(kernel, options):
    # What is counted is what goes through Python; native memory needs the kernel's own count.
    np.testing.assert_array_less(peak(kernel, **options), MATRIX // 4)


@every_kernel
def test_memory_of_a_matrix_is_used_where_weights_are_asked_for(kernel):
    assert peak(kernel, return_weights=True) >= MATRIX


def traced_without_caches() -> int:
    """Bytes that Python has allocated, without what the interpreter keeps for itself.

    It keeps up to 2000 tuples of each length and more, until a collection of everything empties
    these lists, so what they hold says when that was last. Frozen objects are not collected, and
    stay frozen: a later collection would go through everything that pytest has collected.
    The cache of attributes keeps the last names looked up, up to 4096: NumPy makes a new string
    for each name that it looks up, so that this cache fills slowly over thousands of calls.
    """
    gc.freeze()
    gc.collect()
    # Its name since Python 3.13; the old one is a warning in 3.14.
    clear = "_clear_internal_caches" if sys.version_info >= (3, 13) else "_clear_type_cache"
    getattr(sys, clear)()
    return tracemalloc.get_traced_memory()[0]


@every_kernel
def test_memory_is_given_back(kernel):
    q, k, v = inputs((2, 64, 16), (2, 64, 16), (2, 64, 16))
    for _ in range(3):
        run(kernel, q, k, v, causal=True)
    gc.disable()  # so that what refers to itself counts as kept
    tracemalloc.start()
    try:
        before = traced_without_caches()
        for _ in range(200):
            run(kernel, q, k, v, causal=True)
        grown = traced_without_caches() - before
    finally:
        tracemalloc.stop()
        gc.enable()
    np.testing.assert_array_less(grown, 20_000)  # one result of these calls alone is 49 kB


@every_kernel
def test_memory_of_inputs_that_broadcast_is_not_multiplied(kernel):
    q = numbers((1, 1, 4, 8))
    k = v = np.broadcast_to(numbers((1, 1, 5000, 8)), (50, 1, 5000, 8))
    tracemalloc.start()
    try:
        output = regard.attention(q, k, v, kernel=kernel)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.shape == (50, 1, 4, 8)
    np.testing.assert_array_less(used, k.size * 4)

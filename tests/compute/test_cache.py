"""`regard.KVCache`: what is appended step by step gives what one call over everything gives."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import regard
from calls import (
    assert_same_bytes,
    assert_same_result,
    every_float,
    every_kernel,
    every_target,
    inputs,
    numbers,
    on_path,
)
from regard import DtypeError, KVCache, OptionError, ShapeError
from regard.compute.kv_cache import CHUNK
from regard.masks import Causal, Lengths

B, H, G, D, E = 2, 4, 2, 8, 6
FULL = {"return_weights": True, "return_lse": True}

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale and softcap": {"scale": 0.7, "softcap": 3.0},
    "sink": {"sink": numbers((H,), seed=3)},
}
WINDOWS = [None, (0, 0), (40, 0), (255, 0), (256, None), (300, 2)]


def steps_of(total: int, *sizes: int) -> list[tuple[int, int]]:
    """Consecutive pieces of these sizes, again and again."""
    cuts, sizes_again = [0], itertools.cycle(sizes)
    while cuts[-1] < total:
        cuts.append(min(total, cuts[-1] + next(sizes_again)))
    return list(itertools.pairwise(cuts))


@pytest.mark.sweep
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@every_float
@every_target
def test_step_by_step_gives_the_bytes_of_one_call(target, dtype, window, options):
    total = 1100
    query, key, value = inputs((B, H, total, D), (B, G, total, D), (B, G, total, E), dtype=dtype)
    with on_path(f"fused:{target}"):
        whole = regard.attention(
            query, key, value, causal=True, window=window, return_lse=True, **options
        )
        cache = KVCache(window=window)
        for a, b in steps_of(total, 130, 1, 1, 7, 60, 1):
            cache.append(key[:, :, a:b], value[:, :, a:b])
            step = cache.attend(query[:, :, a:b], return_lse=True, **options)
            assert_same_bytes(step.output, whole.output[:, :, a:b], f"output {a} to {b}")
            assert_same_bytes(step.lse, whole.lse[:, :, a:b], f"lse {a} to {b}")
    np.testing.assert_equal(len(cache), total)
    if window is not None and window[0] < 256:
        assert cache.start.min() >= CHUNK  # some keys did leave


@every_float
@every_target
def test_ragged_batches_give_the_bytes_of_each_alone(target, dtype):
    lengths = np.array([[600, 3, 20], [1, 1, 1], [0, 1, 1], [30, 300, 0], [1, 1, 1]])
    most, ends = lengths.max(axis=1), lengths.sum(axis=0)
    total = int(ends.max())
    query, key, value = inputs((3, H, total, D), (3, G, total, D), (3, G, total, E), dtype=dtype)
    for window in (None, (40, 0), (10, 2)):
        with on_path(f"fused:{target}"):
            alone = [
                regard.attention(
                    *(x[b, :, : ends[b]] for x in (query, key, value)),
                    causal=True,
                    window=window,
                    return_lse=True,
                )
                for b in range(3)
            ]
            cache = KVCache(window=window)
            at = np.zeros(3, dtype=int)
            for count, longest in zip(lengths, most, strict=True):
                pieces = []
                for x in (query, key, value):  # padding is NaN: nothing may look at it
                    piece = np.full((3, x.shape[1], longest, x.shape[-1]), np.nan, dtype)
                    for b in range(3):
                        piece[b, :, : count[b]] = x[b, :, at[b] : at[b] + count[b]]
                    pieces.append(piece)
                cache.append(*pieces[1:], lengths=count)
                step = cache.attend(pieces[0], lengths=count, return_lse=True)
                for b in range(3):
                    here = slice(at[b], at[b] + count[b])
                    there = slice(0, count[b])
                    assert_same_bytes(step.output[b, :, there], alone[b].output[:, here])
                    assert_same_bytes(step.lse[b, :, there], alone[b].lse[:, here])
                    np.testing.assert_array_equal(step.output[b, :, count[b] :], 0)
                    np.testing.assert_array_equal(step.lse[b, :, count[b] :], -np.inf)
                at += count
        np.testing.assert_array_equal(cache.lengths, ends)


@every_kernel
def test_masks_bias_and_weights_run_along_the_keys_that_are_there(kernel):
    query, key, value = inputs((B, H, 9, D), (B, G, 9, D), (B, G, 9, E))
    mask = np.random.default_rng(1).random((B, H, 4, 9)) < 0.7
    bias = numbers((4, 9), seed=2)
    cache = KVCache(capacity=20)
    cache.append(key, value)
    here = cache.attend(query[:, :, 5:], mask=mask, bias=bias, kernel=kernel, **FULL)
    there = regard.attention(
        query[:, :, 5:], key, value, mask=mask, bias=bias, causal=True, offset="end",
        kernel=kernel, **FULL,
    )  # fmt: skip
    assert_same_result(here, there)
    here = cache.attend(query[:, :, 8:], mask=Lengths([2, 7]), window=(5, 0), kernel=kernel, **FULL)
    there = regard.attention(
        query[:, :, 8:], key, value, mask=Lengths([2, 7]), window=(5, 0), offset=8,
        kernel=kernel, **FULL,
    )  # fmt: skip
    assert_same_result(here, there)


@every_kernel
def test_keys_that_are_no_earlier_tokens_are_seen_by_more_queries(kernel):
    query, key, value = inputs((B, H, 9, D), (B, G, 4, D), (B, G, 4, E))
    cache = KVCache()
    cache.append(key, value)
    assert_same_bytes(
        cache.attend(query, causal=False, kernel=kernel),
        regard.attention(query, key, value, kernel=kernel),
    )
    with pytest.raises(OptionError, match="there are 9 queries but the cache has 4 tokens"):
        cache.attend(query, kernel=kernel)
    with pytest.raises(OptionError, match="9 queries"):
        cache.attend(query, causal=False, mask=Causal(), kernel=kernel)


@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"precision": "exact"}, {"kernel": "reference"}]
)
def test_other_options_reach_the_call(options):
    query, key, value = inputs((H, 5, D), (G, 5, D), (G, 5, E))
    cache = KVCache()
    cache.append(key, value)
    out = np.empty((H, 2, E), np.float32)
    given = cache.attend(query[:, 3:], out=out, **options)
    assert given is out
    assert_same_bytes(
        out, regard.attention(query[:, 3:], key, value, causal=True, offset="end", **options)
    )


def test_shapes_without_heads_or_batch_work_as_in_attention():
    query, key, value = inputs((5, D), (5, D), (5, E))
    cache = KVCache()
    for t in range(5):
        cache.append(key[t : t + 1], value[t : t + 1])
        here = cache.attend(query[t])
    np.testing.assert_equal(here.shape, (E,))
    assert_same_bytes(here, regard.attention(query[4], key, value))


def test_nothing_is_copied_to_attend_and_views_are_read_only():
    _, key, value = inputs((1,), (B, G, 3, D), (B, G, 3, E))
    cache = KVCache(capacity=100)
    cache.append(key, value)
    before = cache.keys
    assert_same_bytes(before, key)
    assert_same_bytes(cache.values, value)
    np.testing.assert_equal(before.base.shape, (B, G, 100, D))
    with pytest.raises(ValueError, match="read-only"):
        before[...] = 0
    cache.append(key, value)
    assert np.shares_memory(before, cache.keys)
    np.testing.assert_equal(cache.keys.shape, (B, G, 6, D))


def test_room_doubles_and_a_capacity_is_exact():
    key = numbers((G, 1, D))
    cache = KVCache()
    rooms = []
    for _ in range(1030):
        cache.append(key, key)
        rooms.append(cache.capacity)
    np.testing.assert_array_equal(sorted(set(rooms)), [256, 512, 1024, 2048])
    cache = KVCache(capacity=3)
    for _ in range(3):
        cache.append(key, key)
    np.testing.assert_equal((cache.capacity, cache.nbytes), (3, 2 * 3 * G * D * 4))
    with pytest.raises(OptionError, match="keeps 3 keys and 1 more make 4, but its capacity is 3"):
        cache.append(key, key)
    np.testing.assert_equal(len(cache), 3)


@pytest.mark.parametrize("capacity", [None, 2 * CHUNK])
def test_a_window_keeps_memory_bounded_however_long_the_text(capacity):
    left = 100
    key = numbers((G, 1, D))
    cache = KVCache(capacity=capacity, window=(left, 0))
    for _ in range(5000):
        cache.append(key, key)
    assert cache.capacity <= 2 * (left + CHUNK)
    np.testing.assert_equal(len(cache), 5000)
    np.testing.assert_equal(int(cache.start) % CHUNK, 0)
    np.testing.assert_equal(cache.keys.shape[-2], 5000 - int(cache.start))
    # As few as this are enough for ever: what is kept at most, and the new one.
    cache = KVCache(capacity=left + CHUNK, window=(left, 0))
    for _ in range(2000):
        cache.append(key, key)


def test_queries_whose_window_sees_keys_that_are_gone_are_refused():
    query, key, value = inputs((H, 400, D), (G, 400, D), (G, 400, E))
    cache = KVCache(window=(20, 0))
    cache.append(key, value)
    cache.attend(query)  # all of the last append
    cache.append(key[:, :1], value[:, :1])
    cache.attend(query[:, :1])
    with pytest.raises(OptionError, match=r"first of 2 queries sees keys from 379 on but .* 380"):
        cache.attend(query[:, :2])
    with pytest.raises(OptionError, match=r"length is 399, .* window of 20 .* those from 380 on"):
        cache.truncate(399)
    cache.truncate(400)
    cache.reset()
    cache.append(key, value)
    np.testing.assert_equal((len(cache), int(cache.start)), (400, 0))


def test_taking_tokens_back_leaves_no_trace():
    query, key, value = inputs((B, H, 30, D), (B, G, 30, D), (B, G, 30, E))
    cache = KVCache()
    cache.append(key[:, :, :20], value[:, :, :20])
    cache.append(np.full_like(key[:, :, :5], np.nan), np.full_like(value[:, :, :5], np.nan))
    cache.truncate(20)
    np.testing.assert_equal(len(cache), 20)
    assert_same_bytes(
        cache.attend(query[:, :, 19:20]),
        regard.attention(query[:, :, 19:20], key[:, :, :20], value[:, :, :20], offset="end"),
    )
    cache.truncate([7, 20])
    np.testing.assert_array_equal(cache.lengths, [7, 20])
    np.testing.assert_equal(len(cache), 20)
    with pytest.raises(OptionError, match="length is 8 but the cache has 7 to 20 tokens"):
        cache.truncate(8)
    with pytest.raises(OptionError, match="length is -1"):
        cache.truncate(-1)
    cache.truncate(7)
    assert_same_bytes(cache.keys, key[:, :, :7])


GOOD = numbers((B, G, 3, D))


@pytest.mark.parametrize(
    ("key", "value", "lengths", "error", "words"),
    [
        (GOOD[..., :7], GOOD, None, ShapeError, r"\(2, 2, T, 7\) but .* holds \(2, 2, T, 8\)"),
        (GOOD, GOOD[..., :7], None, ShapeError, r"value has shape \(2, 2, T, 7\)"),
        (GOOD[:1], GOOD[:1], None, ShapeError, r"\(1, 2, T, 8\) but .* holds \(2, 2, T, 8\)"),
        (GOOD[:, :1], GOOD[:, :1], None, ShapeError, r"\(2, 1, T, 8\)"),
        (GOOD[0], GOOD[0], None, ShapeError, r"\(2, T, 8\)"),
        (GOOD[0, 0, 0], GOOD, None, ShapeError, "key has 1 axes"),
        (GOOD, GOOD[:, :, :2], None, ShapeError, r"key has shape .* but value has"),
        (GOOD.astype(np.float64), GOOD, None, DtypeError, "key has dtype float64 .* holds float32"),
        (GOOD, GOOD.astype(np.float16), None, DtypeError, "value has dtype float16"),
        (GOOD.astype(int), GOOD, None, DtypeError, "key has dtype int64; a cache holds one of"),
        (GOOD, GOOD, [1, 4], OptionError, "between 0 and the 3 tokens, but they are 1 to 4"),
        (GOOD, GOOD, [1, -1], OptionError, "lengths"),
        (GOOD, GOOD, [1, 1, 1], ShapeError, "lengths has shape"),
        (GOOD, GOOD, 1.0, DtypeError, "lengths must be integers"),
        (np.tile(GOOD, (2, 1)), np.tile(GOOD, (2, 1)), None, OptionError, "capacity is 8"),
        (GOOD, None, None, TypeError, "value"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(key, value, lengths, error, words):
    cache = KVCache(capacity=8)
    cache.append(GOOD, GOOD)
    before = repr(cache), cache.keys.tobytes(), cache.values.tobytes()
    with pytest.raises(error, match=words):
        cache.append(key, value, lengths=lengths)
    np.testing.assert_equal((repr(cache), cache.keys.tobytes(), cache.values.tobytes()), before)


def test_memory_that_runs_out_changes_nothing(monkeypatch):
    cache = KVCache()
    cache.append(GOOD, GOOD)
    before = repr(cache)
    made: list[Any] = []

    def empty(shape, dtype):
        made.append(shape)
        if len(made) == 2:
            raise MemoryError
        return np.zeros(shape, dtype)

    monkeypatch.setattr(regard.compute.kv_buffers, "empty", empty)
    many = np.repeat(GOOD, 200, axis=2)
    with pytest.raises(MemoryError):
        cache.append(many, many)
    np.testing.assert_equal((repr(cache), len(made)), (before, 2))
    assert_same_bytes(cache.keys, GOOD)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 0}, OptionError, "capacity is 0"),
        ({"capacity": 1.5}, DtypeError, "capacity must be an int"),
        ({"capacity": True}, DtypeError, "capacity must be an int"),
        ({"window": 5}, DtypeError, "window must be a pair"),
        ({"window": (-1, 0)}, OptionError, "window left is -1"),
    ],
)
def test_a_cache_is_made_of_sizes_that_make_sense(options, error, words):
    with pytest.raises(error, match=words):
        KVCache(**options)


def test_a_capacity_beyond_all_memory_is_a_memory_error():
    with pytest.raises(MemoryError):
        KVCache(capacity=2**61).append(GOOD, GOOD)


@pytest.mark.parametrize(
    ("query", "options", "error", "words"),
    [
        (GOOD[..., :5], {}, ShapeError, "query is 5 wide but key is 8 wide"),
        (numbers((B, 3, 1, D)), {}, ShapeError, "query has 3 heads but key has 2"),
        (GOOD, {"causal": 1}, DtypeError, "causal must be True or False"),
        (GOOD[:, :, :1], {"causal": "no"}, DtypeError, "causal must be True or False"),
        (GOOD, {"lengths": [4, 1]}, OptionError, "between 0 and the 3 tokens"),
        (GOOD, {"mask": np.ones((3, 7), bool)}, ShapeError, "mask has shape"),
        (GOOD, {"kernel": "none"}, OptionError, "kernel"),
        (GOOD, {"softcap": 0}, OptionError, "softcap"),
        (GOOD.astype(complex), {}, DtypeError, "query has dtype complex128"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_by_name(query, options, error, words):
    cache = KVCache()
    cache.append(GOOD, GOOD)
    with pytest.raises(error, match=words):
        cache.attend(query, **options)


def test_an_empty_cache_says_so_and_one_that_was_reset_sees_nothing():
    cache = KVCache()
    with pytest.raises(OptionError, match="never appended to"):
        cache.attend(GOOD)
    with pytest.raises(OptionError, match="has no shape yet"):
        cache.keys  # noqa: B018
    np.testing.assert_equal((len(cache), cache.capacity, cache.nbytes), (0, 0, 0))
    cache.append(GOOD, GOOD)
    cache.reset()
    np.testing.assert_equal((len(cache), cache.capacity), (0, 256))
    np.testing.assert_array_equal(cache.attend(GOOD, causal=False), 0)


def test_a_cache_prints_as_its_shapes_and_bytes():
    np.testing.assert_equal(
        [repr(KVCache()), repr(KVCache(capacity=5, window=(3, 0)))],
        ["KVCache(empty)", "KVCache(empty, capacity 5, window (3, 0))"],
    )
    cache = KVCache(capacity=5, window=(3, 0))
    cache.append(GOOD, GOOD.astype(np.float16), lengths=[3, 1])
    np.testing.assert_equal(
        repr(cache),
        "KVCache(keys (2, 2, 3, 8), values (2, 2, 3, 8), float32/float16, lengths 1 to 3, "
        "capacity 5, window (3, 0), 960 bytes)",
    )


COUNT = st.one_of(st.integers(0, 3), st.integers(0, 300))


class Text(RuleBasedStateMachine):
    """A cache beside the arrays that it should stand for, of each batch element by itself."""

    @initialize(
        batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
        window=st.sampled_from([None, None, (0, 0), (7, None), (300, 1), (None, 0)]),
        capacity=st.sampled_from([None, None, 700]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, batch, window, capacity, seed):
        self.batch, self.window, self.capacity = batch, window, capacity
        self.rng = np.random.default_rng(seed)
        self.cache = KVCache(window=window, capacity=capacity)
        self.places = list(np.ndindex(*batch))
        self.clear()

    def clear(self):
        self.held = {place: [np.empty((G, 0, 4), np.float32)] * 2 for place in self.places}
        self.last = np.zeros(self.batch, int)

    def numbers(self, heads: int, rows: int) -> np.ndarray:
        return self.rng.normal(size=(*self.batch, heads, rows, 4)).astype(np.float32)

    def counts(self, most: int, ragged: bool) -> np.ndarray:
        drawn = self.rng.integers(0, most + 1, self.batch)
        return drawn if ragged and self.batch else np.full(self.batch, most)

    @rule(most=COUNT, ragged=st.booleans())
    def append(self, most, ragged):
        counts = self.counts(most, ragged)
        pair = [self.numbers(G, most) for _ in range(2)]
        for array in pair:
            for place in self.places:
                array[place][:, counts[place] :] = np.nan
        try:
            self.cache.append(*pair, lengths=counts if ragged else None)
        except OptionError:
            longest = max(self.held[place][0].shape[1] for place in self.places)
            assert longest + most > (self.capacity or np.inf)
            return
        self.last = counts
        for place in self.places:
            self.held[place] = [
                np.concatenate([old, new[place][:, : counts[place]]], axis=1)
                for old, new in zip(self.held[place], pair, strict=True)
            ]

    @precondition(lambda self: self.cache.capacity and self.cache.nbytes)
    @rule(back=st.integers(0, 4))
    def truncate(self, back):
        ends = np.array([self.held[place][0].shape[1] for place in self.places])
        back = np.minimum(back, self.last)
        self.cache.truncate(ends.reshape(self.batch) - back)
        for place, end in zip(self.places, ends, strict=True):
            end = end - back[place]
            self.held[place] = [array[:, :end] for array in self.held[place]]
        self.last = self.last - back

    @precondition(lambda self: self.cache.nbytes)
    @rule()
    def reset(self):
        self.cache.reset()
        self.clear()

    @precondition(lambda self: self.cache.nbytes)
    @rule(ragged=st.booleans())
    def attend(self, ragged):
        least = self.last if ragged else np.full(self.batch, self.last.min())
        rows = int(self.last.max()) if ragged else int(self.last.min())
        query = self.numbers(H, rows)
        result = self.cache.attend(query, lengths=least if ragged else None, return_lse=True)
        for place in self.places:
            count = int(least[place])
            alone = regard.attention(
                query[place][:, :count],
                *self.held[place],
                causal=True,
                offset="end",
                window=self.window,
                return_lse=True,
            )
            assert_same_bytes(result.output[place][:, :count], alone.output)
            assert_same_bytes(result.lse[place][:, :count], alone.lse)
            np.testing.assert_array_equal(result.output[place][:, count:], 0)

    @invariant()
    def it_has_as_many_as_were_appended(self):
        if not hasattr(self, "cache") or not self.cache.nbytes:
            return
        ends = [self.held[place][0].shape[1] for place in self.places]
        np.testing.assert_array_equal(self.cache.lengths.ravel(), ends)
        np.testing.assert_equal(len(self.cache), max(ends))
        starts = self.cache.start
        for place in self.places:
            first, end = int(starts[place]), self.held[place][0].shape[1]
            np.testing.assert_equal(first % CHUNK, 0)
            for view, array in zip(
                (self.cache.keys, self.cache.values), self.held[place], strict=True
            ):
                assert_same_bytes(view[place][:, : end - first], array[:, first:])


@pytest.mark.needs("fused")
class TestText(Text.TestCase):
    """Whatever is done in whatever order."""

    settings = settings(max_examples=settings().max_examples, stateful_step_count=15)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_goes_its_own_way(copied):
    tokens = np.arange(12.0).reshape(3, 4)
    cache = regard.KVCache(capacity=8)
    assert len(copied(cache)) == 0
    cache.append(tokens, tokens)
    other = copied(cache)
    other.append(-tokens, -tokens)
    cache.append(tokens + 100, tokens + 100)
    np.testing.assert_array_equal(cache.keys, np.vstack([tokens, tokens + 100]))
    np.testing.assert_array_equal(other.values, np.vstack([tokens, -tokens]))
    other.truncate(1)
    assert (len(cache), len(other), other.capacity) == (6, 1, 8)

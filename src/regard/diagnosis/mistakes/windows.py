"""Mistakes with windows and caches: which keys are still there, and where a new token stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.diagnosis.mistakes.entry import (
    Array,
    Equivalent,
    Mistake,
    blend,
    logits,
    replacing,
    seeing,
    softmax,
)
from regard.diagnosis.probe import Probe, Values, Variant

WINDOW = (
    "keep = (j <= i) & (j > i - window)  # window keys, the own one included",
    "keep = (j <= i) & (j > i - window)  # window keys, the own one included",
)
OFFSET = (
    "i = np.arange(L)[:, None] + (S - L)  # the last query stands at the last key",
    "i = torch.arange(L)[:, None] + (S - L)  # the last query stands at the last key",
)
CACHE = (
    "K = cache_K = np.concatenate([cache_K, k]); V = cache_V = np.concatenate([cache_V, v])",
    "k = torch.cat([past_k, k], dim=-2); v = torch.cat([past_v, v], dim=-2)",
)

Sees = Callable[[Array, Array, int], Array]


def _windowed(sees: Sees, *, offset: bool = True) -> tuple[Variant, ...]:
    """`sees(row, key, window)` stands in place of window and causal together."""

    def change(keep: Array, probe: Probe) -> Array:
        if probe.window is None:
            return keep
        size = probe.sizes
        row = np.arange(size["L"])[:, None] + (probe.offset if offset else 0)
        return np.broadcast_to(sees(row, np.arange(size["S"]), probe.window), keep.shape)

    return seeing(change, "window", "causal")


def _cached(sees: Callable[[Array, Array, Array, Array], Array]) -> tuple[Variant, ...]:
    """`sees(row, key, start, end)`: start and end of the chunk that the row came with."""

    def change(keep: Array, probe: Probe) -> Array:
        if not probe.chunks:
            return keep
        lengths = np.array(probe.chunks)
        ends = np.repeat(np.cumsum(lengths), lengths)[:, None]
        starts = ends - np.repeat(lengths, lengths)[:, None]
        size = probe.sizes
        row, key = np.arange(size["L"])[:, None], np.arange(size["S"])
        return np.broadcast_to(sees(row, key, starts, ends), keep.shape)

    return seeing(change, "causal")


def _twice(values: Values, probe: Probe) -> Array:
    """The newest chunk stands in the cache twice: its keys count double."""
    exponentials = np.exp(values["shifted"])
    if not probe.chunks:
        return exponentials
    lengths = np.array(probe.chunks)
    ends = np.repeat(np.cumsum(lengths), lengths)[:, None]
    starts = ends - np.repeat(lengths, lengths)[:, None]
    key = np.arange(probe.sizes["S"])
    own = (key >= starts) & (key < ends) & (starts > 0)
    return np.asarray(np.where(own, 2 * exponentials, exponentials))


def _of_keys_in_another_order(values: Values, probe: Probe) -> Array:
    order = np.roll(np.arange(probe.sizes["S"]), 2)
    weights = softmax(logits(values)[..., order])
    return blend(weights, values["values"][..., order, :])


def _window(
    name: str, title: str, why: str, variants: tuple[Variant, ...], lines: tuple[str, str] = WINDOW
) -> Mistake:
    return Mistake(name, "caching and windows", title, why, *lines, variants)


def _cache(name: str, title: str, why: str, variants: tuple[Variant, ...]) -> Mistake:
    return Mistake(name, "caching and windows", title, why, *CACHE, variants)


MISTAKES = (
    _window(
        "window_ignored",
        "the window has no effect",
        "Every earlier key is read, so time and memory grow with the text.",
        _windowed(lambda row, key, window: key <= row),
    ),
    _window(
        "window_one_short",
        "the window is one key too short",
        "Asked for are `window` keys, the own one included.",
        _windowed(lambda row, key, window: (key <= row) & (key > row - window + 1)),
    ),
    _window(
        "window_one_long",
        "the window is one key too long",
        "Asked for are `window` keys, the own one included.",
        _windowed(lambda row, key, window: (key <= row) & (key >= row - window)),
    ),
    _window(
        "window_without_own_key",
        "the window ends before the query's own key",
        "A query should see its own key; the first row sees nothing at all.",
        _windowed(lambda row, key, window: (key < row) & (key >= row - window)),
    ),
    _window(
        "window_on_both_sides",
        "the window reaches into the future",
        "|i − j| < window looks to both sides; with causal attention j ≤ i has to hold too.",
        _windowed(lambda row, key, window: np.abs(row - key) < window),
    ),
    _window(
        "window_inverted",
        "the window is hidden, and what lies outside is seen",
        "The condition is the wrong way round.",
        _windowed(lambda row, key, window: (key <= row) & (key <= row - window)),
    ),
    _window(
        "window_in_blocks",
        "the window moves in blocks instead of with the query",
        "The first query of a block sees itself alone.",
        _windowed(lambda row, key, window: (key <= row) & (key // window == row // window)),
    ),
    _window(
        "window_ignores_offset",
        "with more keys than queries, the window starts at the first key",
        "With a cache new tokens then see the oldest keys.",
        _windowed(lambda row, key, window: (key <= row) & (key > row - window), offset=False),
        OFFSET,
    ),
    _cache(
        "cache_lost",
        "earlier keys are lost: each call sees only its own",
        "The cache is overwritten instead of extended, so the text before is forgotten.",
        _cached(lambda row, key, start, end: (key >= start) & (key <= row)),
    ),
    _cache(
        "cache_stale",
        "new keys come too late: a call sees only what was there before it",
        "The cache is read before it is extended, so a token does not see itself.",
        _cached(lambda row, key, start, end: np.where(start > 0, key < start, key <= row)),
    ),
    _cache(
        "cache_offset_ignored",
        "a new token counts its position from 0 again",
        "Its causal mask then allows only the oldest keys.",
        _cached(lambda row, key, start, end: key <= row - start),
    ),
    _cache(
        "cache_off_by_one",
        "the newest key is left out",
        "Its position is one too small: with a cache, token i stands at the length before it.",
        _cached(lambda row, key, start, end: np.where(start > 0, key < row, key <= row)),
    ),
    _cache(
        "cache_chunk_not_causal",
        "tokens that arrive together see each other's future",
        "With one token at a time no mask is needed; with several it is.",
        _cached(lambda row, key, start, end: key < end)
        + _cached(lambda row, key, start, end: np.where(start > 0, key < end, key <= row)),
    ),
    _cache(
        "cache_first_call_only",
        "keys after the first call never get into the cache",
        "Each call sees the first one's keys and its own.",
        _cached(lambda row, key, start, end: (key <= row) & ((key >= start) | (key < 2))),
    ),
    _cache(
        "cache_oldest_lost",
        "the oldest key falls out of the cache",
        "A slice starts at 1, or a ring buffer is one too short.",
        _cached(lambda row, key, start, end: (key <= row) & ((key > 0) | (start == 0))),
    ),
    _cache(
        "cache_appended_twice",
        "new keys are put into the cache twice",
        "They count double, and memory grows twice as fast.",
        (Variant({"exponentials": _twice}),),
    ),
)

EQUIVALENTS = (
    Equivalent(
        "cache_in_another_order",
        "putting new keys before the old ones",
        "right",
        "Attention does not know the order of its keys; only masks and positions do.",
        replacing(output=_of_keys_in_another_order),
    ),
)

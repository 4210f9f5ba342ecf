"""Mistakes with windows and caches: which keys are still visible, and where a new token is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Variants,
    blend,
    equivalents,
    logits,
    mistakes,
    other_cells,
    other_visible,
    replacing,
    softmax,
)

WINDOW = ("keep = (j <= i) & (j > i - window)  # window keys, the query's own one included",) * 2
OFFSET = (
    "i = np.arange(L)[:, None] + (S - L)  # the last query has the position of the last key",
    "i = torch.arange(L)[:, None] + (S - L)  # the last query has the position of the last key",
)
CACHE = (
    "K = cache_K = np.concatenate([cache_K, k]); V = cache_V = np.concatenate([cache_V, v])",
    "k = torch.cat([past_k, k], dim=-2); v = torch.cat([past_v, v], dim=-2)",
)


def _window(sees: Callable[[Array, Array, int], Array], *, offset: bool = True) -> Variants:
    """`sees(row, key, window)` replaces window and causal together."""

    def moved(row: Array, key: Array, probe: Probe) -> Array:
        return sees(row + probe.offset if offset else row, key, probe.window or 0)

    return other_cells(moved, "window", "causal", given=lambda probe: probe.window)


def _chunk(probe: Probe) -> tuple[Array, Array]:
    """For each row, the first token of its call, and the first one after it."""
    lengths = np.array(probe.chunks)
    end = np.repeat(np.cumsum(lengths), lengths)[:, None]
    return end - np.repeat(lengths, lengths)[:, None], end


def _cache(sees: Callable[[Array, Array, Array, Array], Array]) -> Variants:
    """`sees(row, key, start, end)`, with the tokens from `start` to `end` in one call."""

    def cached(row: Array, key: Array, probe: Probe) -> Array:
        return sees(row, key, *_chunk(probe))

    return other_cells(cached, "causal", given=lambda probe: probe.chunks)


def _padding(chunks: Callable[[list[Array], int], list[Array]]) -> Variants:
    """Other padding of the keys that a call sees: made of the parts of each call, and its number.

    The parts are of boolean arrays (B, …, tokens), True for what is kept.
    """

    def change(keep: Array, probe: Probe) -> Array:
        own = probe.keep
        if not probe.chunks or own is None or own.ndim != 4:
            return keep
        found, start = np.array(keep), 0
        parts = np.split(own, np.cumsum(probe.chunks)[:-1], axis=-1)
        for number, length in enumerate(probe.chunks):
            seen = np.concatenate(chunks(parts[: number + 1], number), axis=-1)
            found[:, :, start : start + length, : seen.shape[-1]] = seen
            start += length
        return found

    return other_visible(change, "mask")


def _appended_twice(values: Values, probe: Probe) -> Array:
    exponentials = np.exp(values["shifted"])
    if not probe.chunks:
        return exponentials
    (start, end), key = _chunk(probe), np.arange(probe.sizes["S"])
    doubled = (key >= start) & (key < end) & (start > 0)
    return np.asarray(np.where(doubled, 2 * exponentials, exponentials))


def _in_another_order(values: Values, probe: Probe) -> Array:
    order = np.roll(np.arange(probe.sizes["S"]), 2)
    weights = softmax(logits(values)[..., order])
    return blend(weights, values["values"][..., order, :])


def _keys_kept_as_values(values: Values, probe: Probe) -> Any:
    """The output where the values of earlier calls are keys."""
    usual, keys = values["values"], values["keys"]
    if not probe.chunks or usual.shape != keys.shape:
        return None
    (start, _), key = _chunk(probe), np.arange(probe.sizes["S"])
    earlier = np.where(key < start, values["weights"], 0)
    return blend(values["weights"] - earlier, usual) + blend(earlier, keys)


def _last_call_alone(values: Values, probe: Probe) -> Any:
    """The output where a call sees its own keys and those of the call before."""
    scores, lengths = logits(values), list(probe.chunks)
    if not lengths:
        return None
    starts = np.cumsum([0, 0, *lengths[:-1]])[:-1]
    first = np.repeat(starts, lengths)[:, None]
    scores = np.where(np.arange(probe.sizes["S"]) >= first, scores, -np.inf)
    return blend(softmax(scores), values["values"])


WINDOWS: Entries = {
    "window_ignored": (
        "the window has no effect",
        "Every earlier key is read, so time and memory grow with the text.",
        _window(lambda row, key, window: key <= row),
    ),
    "window_one_short": (
        "the window is one key too short",
        "A window has `window` keys, the query's own one included.",
        _window(lambda row, key, window: (key <= row) & (key > row - window + 1)),
    ),
    "window_one_long": (
        "the window is one key too long",
        "A window has `window` keys, the query's own one included.",
        _window(lambda row, key, window: (key <= row) & (key >= row - window)),
    ),
    "window_without_own_key": (
        "the window ends before the query's own key",
        "A query should see its own key; the first row sees nothing at all.",
        _window(lambda row, key, window: (key < row) & (key >= row - window)),
    ),
    "window_on_both_sides": (
        "the window reaches into the future",
        "|i − j| < window looks to both sides; causal attention needs j ≤ i as well.",
        _window(lambda row, key, window: np.abs(row - key) < window),
    ),
    "window_without_causal": (
        "every later key is seen beside those of the window",
        "i − j < window holds for all later keys; causal attention needs j ≤ i as well.",
        _window(lambda row, key, window: row - key < window),
    ),
    "window_inverted": (
        "keys in the window are hidden, and those outside are seen",
        "The condition is inverted.",
        _window(lambda row, key, window: (key <= row) & (key <= row - window)),
    ),
    "window_in_blocks": (
        "the window moves in blocks instead of with the query",
        "The first query of a block sees itself alone.",
        _window(lambda row, key, window: (key <= row) & (key // window == row // window)),
    ),
    "window_ignores_offset": (
        "with more keys than queries, the window starts at the first key",
        "With a cache, new tokens then see the oldest keys.",
        _window(lambda row, key, window: (key <= row) & (key > row - window), offset=False),
        OFFSET,
    ),
}
CACHES: Entries = {
    "cache_lost": (
        "earlier keys are lost: each call sees only its own",
        "The cache is overwritten instead of extended, so earlier text is lost.",
        _cache(lambda row, key, start, end: (key >= start) & (key <= row)),
    ),
    "cache_stale": (
        "new keys come too late: a call sees only earlier ones",
        "The cache is read before it is extended, so a token does not see itself.",
        _cache(lambda row, key, start, end: np.where(start > 0, key < start, key <= row)),
    ),
    "cache_offset_ignored": (
        "a new token counts its position from 0 again",
        "Its causal mask then allows only the oldest keys.",
        _cache(lambda row, key, start, end: key <= row - start)
        # A single token sees everything, as with is_causal=t > 1.
        + _cache(
            lambda row, key, start, end: np.where(end - start > 1, key <= row - start, key < end)
        ),
    ),
    "cache_off_by_one": (
        "the newest key is left out",
        "The position is one too small: that of a new token is the length of the cache before it.",
        _cache(lambda row, key, start, end: np.where(start > 0, key < row, key <= row)),
    ),
    "cache_chunk_not_causal": (
        "tokens of one call see each other's future",
        "With one token at a time no mask is needed; with several it is.",
        _cache(lambda row, key, start, end: key < end)
        + _cache(lambda row, key, start, end: np.where(start > 0, key < end, key <= row)),
    ),
    "cache_first_call_only": (
        "keys after the first call are not put into the cache",
        "Each call sees the keys of the first one and its own.",
        _cache(lambda row, key, start, end: (key <= row) & ((key >= start) | (key < 2))),
    ),
    "cache_oldest_lost": (
        "the oldest key is dropped from the cache",
        "A slice starts at 1, or a ring buffer is one too short.",
        _cache(lambda row, key, start, end: (key <= row) & ((key > 0) | (start == 0))),
    ),
    "cache_of_the_last_call_alone": (
        "the cache keeps the keys of the last call alone",
        "What is handed on are the new keys and values, without those from before.",
        (replacing(output=_last_call_alone),),
        ("return output, (K, V)  # all of them, not the new ones", "return out, (k, v)"),
    ),
    "cache_keeps_keys_as_values": (
        "the cache keeps the keys where the values belong",
        "The first call is right; later ones blend keys for all tokens before them.",
        (replacing(output=_keys_kept_as_values),),
    ),
    "cache_appended_twice": (
        "new keys are put into the cache twice",
        "They count double, and memory grows twice as fast.",
        (replacing(exponentials=_appended_twice),),
    ),
}
JOINED = (
    "mask = cache_mask = np.concatenate([cache_mask, new_mask], axis=-1)  # as K and V",
    "mask = cache_mask = torch.cat([cache_mask, new_mask], dim=-1)  # as k and v",
)
PADDED: Entries = {
    "cached_padding_misplaced": (
        "the masks of earlier and of new keys are joined in another order than the keys",
        "Padding that came before is then seen, and real keys are hidden.",
        _padding(lambda parts, number: parts[::-1]),
    ),
    "cached_padding_forgotten": (
        "the padding of earlier calls is forgotten: only the mask of new keys counts",
        "The cache keeps the keys of padding too, which must stay hidden.",
        _padding(lambda parts, number: [*map(np.ones_like, parts[:-1]), parts[-1]]),
    ),
}
FILLED = (
    "scores = Q @ K_buffer[:n].T / np.sqrt(D)  # n: how many are filled, the new one included",
    "keep = torch.arange(k_buffer.shape[-2]) < n  # n: how many are filled, the new one included",
)
# How large the buffer is, the code alone knows: it is fitted.
BUFFERS: Entries = {
    "empty_slots_attended": (
        "slots of a cache that are not filled yet get weight",
        "Their keys are 0, and so are their scores: each counts as much as a key without any fit.",
        (),
    ),
    "newest_slot_not_attended": (
        "the newest slot of a cache is hidden, and the first token sees nothing",
        "Where every slot is hidden by a finite number, each of them, filled or not, gets the same "
        "weight.",
        (),
    ),
    "cache_never_filled": (
        "new values are never put into the cache, which holds zeros",
        "What changes no array in place returns another one, and that is to be kept.",
        (),
        (
            "values = values.at[:, pos : pos + n].set(v)  # and not only values.at[…].set(v)",
            "v_cache[:, :, pos : pos + n] = v  # or v_cache.index_copy_(…), with its _",
        ),
    ),
    "positions_of_slots": (
        "in a ring buffer, slots are taken for positions",
        "Once the buffer is full, slot s holds the latest position p with p % window = s.",
        (),
        (
            "places = pos - (pos - np.arange(window)) % window  # of the slots",
            "places = pos - (pos - torch.arange(window)) % window  # of the slots",
        ),
    ),
}
EMPTY_SLOTS, NEWEST_SLOT, NEVER_FILLED, SLOT_POSITIONS = OF_BUFFERS = mistakes(
    "caching and windows", FILLED, BUFFERS
)


def with_empty_slots(size: float) -> Variant:
    """All of `size` slots are seen; those that are not filled have keys and values of 0."""

    def weights(values: Values, probe: Probe) -> Array:
        scores = logits(values)
        whole = max(size, probe.sizes["S"])
        counts = whole - values["visible"].sum(-1, keepdims=True)
        highest = np.maximum(scores.max(-1, keepdims=True), 0)
        exponentials = np.exp(scores - highest)
        empty = counts * np.exp(-highest)
        return np.asarray(exponentials / (exponentials.sum(-1, keepdims=True) + empty))

    return replacing(weights=weights)


def without_newest_slot(size: float) -> Variant:
    """The own key is hidden; the first token sees all of `size` slots alike, its own among them."""

    def weights(values: Values, probe: Probe) -> Array:
        own = np.arange(probe.sizes["S"]) == np.arange(probe.sizes["L"])[:, None] + probe.offset
        scores = np.where(own & probe.causal, -np.inf, logits(values))
        hidden = ~np.isfinite(scores).any(-1, keepdims=True)
        return np.where(
            hidden, own / max(size, probe.sizes["S"]), softmax(np.where(hidden, 0.0, scores))
        )

    return replacing(weights=weights)


def never_filled() -> Variant:
    """All values that are read are 0."""
    return replacing(output=lambda values, probe: 0 * blend(values["weights"], values["values"]))


MISTAKES = (
    *mistakes("caching and windows", WINDOW, WINDOWS),
    *mistakes("caching and windows", CACHE, CACHES),
    *mistakes("caching and windows", JOINED, PADDED),
)
EQUIVALENTS = equivalents(
    {
        "cache_in_another_order": (
            "putting new keys before the old ones",
            "right",
            "Attention does not depend on the order of its keys; only masks and positions do.",
            replacing(output=_in_another_order),
        ),
    }
)

"""Mistakes with windows and caches: which keys are still visible, and where a new token is."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

WINDOW = ("keep = (j <= i) & (j > i - window)  # window keys, the query's own one included",) * 2
OFFSET = (
    "i = np.arange(L)[:, None] + (S - L)  # the last query has the position of the last key",
    "i = torch.arange(L)[:, None] + (S - L)  # the last query has the position of the last key",
)
CACHE = (
    "K = cache_K = np.concatenate([cache_K, k]); V = cache_V = np.concatenate([cache_V, v])",
    "k = torch.cat([past_k, k], dim=-2); v = torch.cat([past_v, v], dim=-2)",
)

WINDOWS = {
    "window_ignored": (
        "the window has no effect",
        "Every earlier key is read, so time and memory grow with the text.",
        "window = j <= i",
        "window = j >= 0",
    ),
    "window_one_short": (
        "the window is one key too short",
        "A window has `window` keys, the query's own one included.",
        "window = (j <= i) & (j > i - size + 1)",
        "window = np.abs(i - j) < size - 1",
    ),
    "window_one_long": (
        "the window is one key too long",
        "A window has `window` keys, the query's own one included.",
        "window = (j <= i) & (j >= i - size)",
        "window = np.abs(i - j) <= size",
    ),
    "window_without_own_key": (
        "the window ends before the query's own key",
        "A query should see its own key; the first row sees nothing at all.",
        "window = (j < i) & (j >= i - size)",
    ),
    "window_on_both_sides": (
        "the window reaches into the future",
        "|i − j| < window looks to both sides; causal attention needs j ≤ i as well.",
        "window = np.abs(i - j) < size",
    ),
    "window_without_causal": (
        "every later key is seen beside those of the window",
        "i − j < window holds for all later keys; causal attention needs j ≤ i as well.",
        "window = j > i - size",
    ),
    "window_inverted": (
        "keys in the window are hidden, and those outside are seen",
        "The condition is inverted.",
        "window = (j <= i) & (j <= i - size)",
    ),
    "window_in_blocks": (
        "the window moves in blocks instead of with the query",
        "The first query of a block sees itself alone.",
        "window = (j <= i) & (j // size == i // size)",
    ),
    "window_ignores_offset": (
        "with more keys than queries, the window starts at the first key",
        "With a cache, new tokens then see the oldest keys.",
        "window = (j <= row) & (j > row - size)",
        OFFSET,
    ),
}
CACHES = {
    "cache_lost": (
        "earlier keys are lost: each call sees only its own",
        "The cache is overwritten instead of extended, so earlier text is lost.",
        "causal = (j <= i) & (j >= past)",
        "weights = by_sum(exps(logits) * (j >= past))",
    ),
    "cache_of_the_last_call_alone": (
        "the cache keeps the keys of the last call alone",
        "What is handed on are the new keys and values, without those from before: fed one by "
        "one, a token sees itself and the one before it.",
        *(f"causal = (j <= i) & (j // {n} >= i // {n} - 1)" for n in (1, 2, 3, 4)),
        ("return output, (K, V)  # all of them, not the new ones", "return out, (k, v)"),
    ),
    "cache_stale": (
        "new keys come too late: a call sees only earlier ones",
        "The cache is read before it is extended, so a token does not see itself.",
        "causal = (j < past) & (i >= 0)",
        "weights = by_sum(exps(logits) * (j < past))",
    ),
    "cache_oldest_lost": (
        "the oldest key is dropped from the cache",
        "A slice starts at 1, or a ring buffer is one too short.",
        "causal = (j <= i) & (j > 0)",
    ),
    "cache_keeps_keys_as_values": (
        "the cache keeps the keys where the values belong",
        "The first call is right; later ones blend keys for all tokens before them.",
        "output = weights * (j >= past) @ v + weights * (j < past) @ k",
    ),
    "cache_appended_twice": (
        "new keys are put into the cache twice",
        "They count double, and memory grows twice as fast.",
        "weights = by_sum(exps(logits) * np.where(j >= past, 2, 1))",
    ),
}
MISTAKES = (
    *written("caching and windows", WINDOW, WINDOWS, "window"),
    *written("caching and windows", CACHE, CACHES, "cache"),
)

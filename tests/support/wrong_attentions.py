"""Wrong attentions as people write them, in NumPy: what the diagnosis has to name.

Written without a look at the catalogue, and shares no code with the package. `wrong` holds the
names of the mistakes to make; with none, `attention` and `multihead` are right.
"""

from __future__ import annotations

import numpy as np

SCALES = {
    "no_scale": lambda q, k, v: 1,
    "scale_by_width": lambda q, k, v: k.shape[-1],
    "scale_multiplied": lambda q, k, v: 1 / np.sqrt(k.shape[-1]),
    "scale_fourth_root": lambda q, k, v: k.shape[-1] ** 0.25,
    "scale_by_model_width": lambda q, k, v: np.sqrt(k.shape[-1] * heads_of(q)),
    "scale_by_width_over_heads": lambda q, k, v: np.sqrt(k.shape[-1] / heads_of(q)),
    "scale_by_keys": lambda q, k, v: np.sqrt(k.shape[-2]),
    "scale_by_queries": lambda q, k, v: np.sqrt(q.shape[-2]),
    "scale_by_value_width": lambda q, k, v: np.sqrt(v.shape[-1]),
    "width_from_axis_1": lambda q, k, v: np.sqrt(q.shape[1]),
    "scale_after_softmax": lambda q, k, v: 1,
}
PRODUCTS = {
    "queries_and_keys_swapped": lambda q, k, v: k @ q.swapaxes(-1, -2),
    "values_for_keys": lambda q, k, v: q @ v.swapaxes(-1, -2),
    "queries_for_keys": lambda q, k, v: q @ q.swapaxes(-1, -2),
    "keys_for_queries": lambda q, k, v: k @ k.swapaxes(-1, -2),
    "keys_reshaped": lambda q, k, v: q @ k.reshape(*k.shape[:-2], k.shape[-1], k.shape[-2]),
    "all_axes_reversed": lambda q, k, v: q @ k.T,
    "cosine_scores": lambda q, k, v: unit(q) @ unit(k).swapaxes(-1, -2),
    "distance_scores": lambda q, k, v: (
        -np.sqrt(((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1))
    ),
}
SOFTMAXES = {
    "softmax_over_queries": lambda s: plain_softmax(s, -2),
    "softmax_over_heads": lambda s: plain_softmax(s, 1 if s.ndim == 4 else 0),
    "softmax_over_batch": lambda s: plain_softmax(s, 0 if s.ndim == 4 else -1),
    "softmax_over_axis_1": lambda s: plain_softmax(s, 1),
    "denominator_over_axis_1": lambda s: above(s) / above(s).sum(axis=1, keepdims=True),
    "softmax_over_everything": lambda s: (
        above(s, (-1, -2)) / above(s, (-1, -2)).sum((-1, -2), keepdims=True)
    ),
    "softmax_over_heads_and_keys": lambda s: (
        plain_softmax(s, (-3, -1)) if s.ndim > 2 else plain_softmax(s, -1)
    ),
    "denominator_over_queries": lambda s: above(s) / above(s).sum(axis=-2, keepdims=True),
    "keepdims_lost": lambda s: above(s) / np.expand_dims(above(s).sum(axis=-1), -2),
    "maximum_over_queries": lambda s: by_sum(np.exp(s - s.max(axis=-2, keepdims=True))),
    "no_softmax": lambda s: s,
    "softmax_twice": lambda s: plain_softmax(plain_softmax(s)),
    "exp_missing": lambda s: by_sum(s),
    "power_of_two": lambda s: by_sum(2.0**s),
    "log_softmax": lambda s: s - np.log(np.exp(s).sum(axis=-1, keepdims=True)),
    "unnormalised": lambda s: np.exp(s),
    "sigmoid": lambda s: 1 / (1 + np.exp(-s)),
    "hard_maximum": lambda s: (s == s.max(axis=-1, keepdims=True)).astype(float),
    "one_in_the_denominator": lambda s: np.exp(s) / (1 + np.exp(s).sum(axis=-1, keepdims=True)),
    "scores_clipped": lambda s: plain_softmax(np.minimum(np.maximum(s, -1), 1)),
    "epsilon_in_the_denominator": lambda s: (
        above(s) / (above(s).sum(axis=-1, keepdims=True) + 1e-6)
    ),
    "rounded": lambda s: np.round(plain_softmax(s), 3),
    "computed_in_float32": lambda s: plain_softmax(s.astype(np.float32)).astype(np.float64),
    "computed_in_half_precision": lambda s: plain_softmax(s.astype(np.float16)).astype(np.float64),
    # right on ordinary inputs, and fragile
    "no_maximum_subtracted": lambda s: by_sum(np.exp(s)),
    "no_maximum_subtracted_and_one_added": lambda s: by_sum(np.exp(s + 1)),
    "global_maximum": lambda s: by_sum(np.exp(s - s.max())),
    "mean_subtracted": lambda s: by_sum(np.exp(s - s.mean(axis=-1, keepdims=True))),
    "overflow_hidden": lambda s: np.nan_to_num(by_sum(np.exp(s))),
    "large_scores_clipped": lambda s: plain_softmax(np.clip(s, -50, 50)),
}
OUTPUTS = {
    "output_scaled": lambda w, q, k, v: w @ v / np.sqrt(q.shape[-1]),
    "scale_after_softmax": lambda w, q, k, v: (w / np.sqrt(q.shape[-1])) @ v,
    "keys_for_values": lambda w, q, k, v: w @ k,
    "queries_for_values": lambda w, q, k, v: w @ q,
    "weights_transposed": lambda w, q, k, v: w.swapaxes(-1, -2) @ v,
    "residual_added": lambda w, q, k, v: q + w @ v,
}
# How a hidden score is dealt with: scores and the mask (True = see) to scores.
BEFORE = {
    "mask_multiplied": lambda s, m: s * m,
    "mask_added_as_ones": lambda s, m: s + m,
    "mask_subtracted_small": lambda s, m: np.where(m, s, s - 10.0),
    "hidden_scores_large": lambda s, m: np.where(m, s, 1e9),
    "mask_hides_zero_scores": lambda s, m: np.where(s * m == 0, -np.inf, s * m),
    "mask_before_scores": lambda s, m: np.where(
        m, s, np.where(m, s, 9e9).min(axis=-1, keepdims=True)
    ),
    "mask_times_infinity": lambda s, m: s + (1.0 - m) * -np.inf,
    "mask_after_softmax": lambda s, m: s,
    "mask_filled_after_softmax": lambda s, m: s,
    # harmless on ordinary inputs
    "mask_constant_1e4": lambda s, m: np.where(m, s, -1e4),
    "mask_constant_1e9": lambda s, m: np.where(m, s, -1e9),
    "hidden_maximum": lambda s, m: s,
}
AFTER = {
    "mask_after_softmax": lambda w, m: w * m,
    "mask_filled_after_softmax": lambda w, m: np.where(m, w, -1e9),
    "hidden_maximum": lambda w, m: by_sum(w * m),
}
# Which mask is used: the mask as given to the mask as read.
READ = {
    "mask_ignored": lambda m, s: np.ones_like(m),
    "mask_inverted": lambda m, s: np.logical_not(m),
    "mask_transposed": lambda m, s: (
        m.swapaxes(-1, -2) if m.ndim > 1 and m.shape[-1] == m.shape[-2] else m
    ),
    "mask_first_head_only": lambda m, s: first_head(m, s),
}
TRIANGLES = {
    "causal_ignored": lambda i, j: j >= 0,
    "causal_off_by_one": lambda i, j: j <= i + 1,
    "causal_hides_own_key": lambda i, j: j < i,
    "causal_reversed": lambda i, j: j >= i,
    "causal_inverted": lambda i, j: j > i,
    "causal_restarts_in_blocks": lambda i, j: j <= i % 3,
}
WINDOWS = {
    "window_ignored": lambda i, j, w: j <= i,
    "window_one_short": lambda i, j, w: (j <= i) & (i - j < w - 1),
    "window_one_long": lambda i, j, w: (j <= i) & (i - j <= w),
    "window_without_own_key": lambda i, j, w: (j < i) & (i - j <= w),
    "window_on_both_sides": lambda i, j, w: abs(i - j) < w,
    "window_without_causal": lambda i, j, w: i - j < w,
    "window_inverted": lambda i, j, w: (j <= i) & (i - j >= w),
    "window_in_blocks": lambda i, j, w: (j <= i) & (i // w == j // w),
}


def heads_of(q):
    return q.shape[-3] if q.ndim > 2 else 1


def unit(x):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True))


def above(s, axis=-1):
    return np.exp(s - s.max(axis=axis, keepdims=True))


def by_sum(e):
    return e / e.sum(axis=-1, keepdims=True)


def plain_softmax(s, axis=-1):
    e = above(s, axis)
    return e / e.sum(axis=axis, keepdims=True)


def first_head(m, s):
    if s.ndim < 3:
        return m
    m = np.array(np.broadcast_to(m, s.shape))
    m[..., 1:, :, :] = True
    return m


def pick(table, wrong, default):
    chosen = [table[name] for name in wrong if name in table]
    return chosen[0] if chosen else default


def attention(wrong, q, k, v, mask=None, causal=False, window=None):
    scores = pick(PRODUCTS, wrong, lambda q, k, v: q @ k.swapaxes(-1, -2))(q, k, v)
    scores = scores / pick(SCALES, wrong, lambda q, k, v: np.sqrt(k.shape[-1]))(q, k, v)
    rows, keys = scores.shape[-2:]
    see = None
    if mask is not None:
        see = pick(READ, wrong, lambda m, s: m)(mask, scores)
    if causal or window is not None:
        at_start = "causal_aligned_at_start" in wrong
        at_start |= "window_ignores_offset" in wrong and window is not None
        i = np.arange(rows)[:, None] + (0 if at_start else keys - rows)
        j = np.arange(keys)[None, :]
        if window is not None:
            rule = pick(WINDOWS, wrong, lambda i, j, w: (j <= i) & (i - j < w))(i, j, window)
        else:
            rule = pick(TRIANGLES, wrong, lambda i, j: j <= i)(i, j)
        see = rule if see is None else see & rule
    if see is not None:
        scores = pick(BEFORE, wrong, lambda s, m: np.where(m, s, -np.inf))(scores, see)
    weights = pick(SOFTMAXES, wrong, plain_softmax)(scores)
    if see is not None:
        weights = pick(AFTER, wrong, lambda w, m: w)(weights, see)
    return pick(OUTPUTS, wrong, lambda w, q, k, v: w @ v)(weights, q, k, v)


def scaled_besides(name):
    """A scale that is given multiplies the usual one."""

    def attention(q, k, v, scale=1.0):
        scores = q @ k.swapaxes(-1, -2) * scale / np.sqrt(q.shape[-1])
        return plain_softmax(scores) @ v

    return attention


def unmasked(*wrong):
    def f(q, k, v):
        return attention(wrong, q, k, v)

    return f


def masked(*wrong):
    def f(q, k, v, mask=None):
        return attention(wrong, q, k, v, mask)

    return f


def with_causal(*wrong):
    def f(q, k, v, causal=False):
        return attention(wrong, q, k, v, None, causal)

    return f


def general(*wrong):
    def f(q, k, v, mask=None, causal=False):
        return attention(wrong, q, k, v, mask, causal)

    return f


def windowed(*wrong):
    def f(q, k, v, causal=False, window=None):
        return attention(wrong, q, k, v, None, causal, window)

    return f


# --- masks of padded keys, one for each text -----------------------------------------------------


def padded(wrong):
    """Four axes and a mask (B, S), True = a real token."""

    def f(q, k, v, mask=None):
        batch, heads = q.shape[:2]
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            if wrong == "mask_on_the_query_axis":
                s = np.where(mask[:, None, :, None], s, -1e9)
            elif wrong == "mask_of_first_batch_for_all":
                s = np.where(mask[0], s, -np.inf)
            elif wrong == "mask_tiled_over_heads":
                flat = s.reshape(batch * heads, *s.shape[2:])
                flat = np.where(np.tile(mask, (heads, 1))[:, None, :], flat, -np.inf)
                s = flat.reshape(s.shape)
            else:
                s = np.where(mask[:, None, None, :], s, -np.inf)
        return plain_softmax(s) @ v

    return f


def padded_and_causal(wrong):
    """Always causal, with a mask that may be added."""

    def f(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        n, m = s.shape[-2:]
        causal = np.arange(m) <= np.arange(n)[:, None] + m - n
        see = causal
        if mask is not None:
            see = causal & mask
            if wrong == "masks_joined_by_or":
                see = causal | mask
            if wrong == "mask_replaces_causal":
                see = mask
            if wrong == "causal_replaces_mask":
                see = causal
        return plain_softmax(np.where(see, s, -np.inf)) @ v

    return f


def mask_or_causal(wrong):
    """A causal flag and a mask, of which the flag may win."""

    def f(q, k, v, mask=None, causal=False):
        late = "causal_replaces_mask" in wrong and causal
        return attention((), q, k, v, None if late else mask, causal)

    return f


JOINED = ["masks_joined_by_or", "mask_replaces_causal"]


def mixed(wrong):
    """Four axes (B, H, L, D), one of them taken for another."""

    def one(q, k, v):
        return plain_softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v

    def f(q, k, v):
        b, h, n, _ = q.shape
        if wrong == "batch_flattened":
            q, k, v = (np.moveaxis(a, 1, 0).reshape(h, -1, a.shape[-1]) for a in (q, k, v))
            return np.moveaxis(one(q, k, v).reshape(h, b, n, -1), 1, 0)
        if wrong == "heads_flattened":
            q, k, v = (a.reshape(b, -1, a.shape[-1]) for a in (q, k, v))
            return one(q, k, v).reshape(b, h, n, -1)
        axis = {"attention_over_heads": 1, "attention_over_batch": 0}[wrong]
        return one(*(a.swapaxes(axis, 2) for a in (q, k, v))).swapaxes(axis, 2)

    return f


MIXED = ["batch_flattened", "heads_flattened", "attention_over_heads", "attention_over_batch"]

# --- grouped heads -------------------------------------------------------------------------------


def grouped(wrong):
    def f(q, k, v):
        if q.ndim < 3:
            return plain_softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v
        heads, groups = q.shape[-3], k.shape[-3]
        out = []
        for h in range(heads):
            g = {
                "key_heads_tiled": h % groups,
                "first_key_head_for_all": 0,
                "key_heads_reversed": groups - 1 - h // (heads // groups),
            }.get(wrong, h // (heads // groups))
            a, b, c = q[..., h, :, :], k[..., g, :, :], v[..., g, :, :]
            out.append(plain_softmax(a @ b.swapaxes(-1, -2) / np.sqrt(a.shape[-1])) @ c)
        if wrong == "grouped_heads_merged_in_turn":
            out = [one for n in range(heads // groups) for one in out[n :: heads // groups]]
        return np.stack(out, axis=-3)

    return f


# --- heads and projections -----------------------------------------------------------------------


def multihead(*wrong):
    """x (L, M), weights (M, M) used as x @ W, heads side by side."""

    def f(x, W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o, num_heads):
        n, d = x.shape[0], W_q.shape[1] // num_heads
        if "weights_not_transposed" in wrong:
            W_q, W_k, W_v, W_o = W_q.T, W_k.T, W_v.T, W_o.T
        if "W_q_not_transposed" in wrong:
            W_q = W_q.T
        if "W_k_not_transposed" in wrong:
            W_k = W_k.T
        if "W_v_not_transposed" in wrong:
            W_v = W_v.T
        if "W_o_not_transposed" in wrong:
            W_o = W_o.T
        if "keys_projected_by_W_q" in wrong:
            W_k = W_q
        if "queries_projected_by_W_k" in wrong:
            W_q = W_k
        if "values_projected_by_W_k" in wrong:
            W_v = W_k
        if "keys_and_values_swapped" in wrong:
            W_k, W_v = W_v, W_k
        if "values_projected_by_W_q" in wrong:
            W_v = W_q
        if "one_projection_for_all" in wrong:
            W_k = W_v = W_q
            b_k = b_v = b_q
        if "W_q_and_W_k_swapped" in wrong:
            W_q, W_k, b_q, b_k = W_k, W_q, b_k, b_q
        if "W_q_and_W_v_swapped" in wrong:
            W_q, W_v, b_q, b_v = W_v, W_q, b_v, b_q
        if "projections_rotated" in wrong:
            W_q, W_k, W_v, b_q, b_k, b_v = W_k, W_v, W_q, b_k, b_v, b_q
        if "b_q_and_b_k_swapped" in wrong:
            b_q, b_k = b_k, b_q
        if "b_k_and_b_v_swapped" in wrong:
            b_k, b_v = b_v, b_k
        if "b_q_for_all" in wrong:
            b_k = b_v = b_q
        if "b_o_twice" in wrong:
            b_o = 2 * b_o
        lost = {
            "b_q_lost": "q",
            "b_k_lost": "k",
            "b_v_lost": "v",
            "biases_lost": "qkv",
            "all_biases_lost": "qkvo",
            "b_o_lost": "o",
        }
        gone = "".join(letters for name, letters in lost.items() if name in wrong)
        q = x @ W_q + (0 if "q" in gone else b_q)
        k = x @ W_k + (0 if "k" in gone else b_k)
        v = x @ W_v + (0 if "v" in gone else b_v)
        if "values_not_projected" in wrong:
            v = x + b_v
        if "nothing_projected" in wrong:
            q, k, v = x + b_q, x + b_k, x + b_v
        if "heads_ignored" in wrong:
            z = plain_softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v
        else:
            both = "heads_split_and_merged_without_transpose" in wrong
            if "heads_split_without_transpose" in wrong or both:
                q, k, v = (a.reshape(num_heads, n, d) for a in (q, k, v))
            elif "heads_interleaved" in wrong:
                q, k, v = (np.moveaxis(a.reshape(n, d, num_heads), 2, 0) for a in (q, k, v))
            else:
                q, k, v = (np.stack(np.split(a, num_heads, axis=1)) for a in (q, k, v))
            scale = np.sqrt(d * num_heads) if "scale_by_model_width" in wrong else np.sqrt(d)
            z = plain_softmax(q @ k.transpose(0, 2, 1) / scale) @ v
            if "heads_merged_without_transpose" in wrong or both:
                z = z.reshape(n, -1)
            elif "heads_merged_interleaved" in wrong:
                z = z.transpose(1, 2, 0).reshape(n, -1)
            elif "head_order_reversed" in wrong:
                z = np.concatenate(list(z)[::-1], axis=1)
            elif "heads_averaged" in wrong:
                z = np.concatenate([sum(z) / num_heads] * num_heads, axis=1)
            else:
                z = np.concatenate(list(z), axis=1)
        if "W_o_lost" in wrong:
            return z
        return z @ W_o + (0 if "o" in gone else b_o)

    return f


PROJECTED = [
    "heads_split_without_transpose",
    "heads_merged_without_transpose",
    "heads_interleaved",
    "heads_split_and_merged_without_transpose",
    "heads_merged_interleaved",
    "head_order_reversed",
    "heads_ignored",
    "heads_averaged",
    "weights_not_transposed",
    "W_q_not_transposed",
    "W_k_not_transposed",
    "W_v_not_transposed",
    "W_o_not_transposed",
    "W_o_lost",
    "b_o_lost",
    "b_q_lost",
    "b_v_lost",
    "biases_lost",
    "all_biases_lost",
    "keys_projected_by_W_q",
    "queries_projected_by_W_k",
    "values_projected_by_W_k",
    "keys_and_values_swapped",
    "values_projected_by_W_q",
    "one_projection_for_all",
    "W_q_and_W_k_swapped",
    "W_q_and_W_v_swapped",
    "projections_rotated",
    "b_q_and_b_k_swapped",
    "b_k_and_b_v_swapped",
    "b_q_for_all",
    "b_o_twice",
    "values_not_projected",
    "nothing_projected",
]


# --- a cache -------------------------------------------------------------------------------------


def cached(wrong=None):
    """f(q, k, v, cache) -> (output, cache); the cache holds the keys and values so far."""

    def f(q, k, v, cache=None):
        n = q.shape[-2]
        old_k = cache[0] if cache else k[..., :0, :]
        old_v = cache[1] if cache else v[..., :0, :]
        start = old_k.shape[-2]
        new_k = np.concatenate([old_k, k], axis=-2)
        new_v = np.concatenate([old_v, v], axis=-2)
        keep_k, keep_v = new_k, new_v
        if wrong == "cache_of_the_last_call_alone":
            keep_k, keep_v = k, v
        if wrong == "cache_keeps_keys_as_values":
            keep_v = new_k
        i = np.arange(n)[:, None] + start
        if wrong == "cache_lost":
            new_k, new_v, i = k, v, i - start
            keep_k, keep_v = k, v
        if wrong == "cache_oldest_lost" and start:
            keep_k, keep_v = new_k, new_v
            j = np.arange(new_k.shape[-2])[None, :]
            s = np.where(
                (j <= i) & (j > 0), q @ new_k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf
            )
            return plain_softmax(s) @ new_v, (keep_k, keep_v)
        if wrong == "cache_first_call_only" and start:
            keep_k, keep_v = old_k, old_v
            i = np.arange(n)[:, None] + start
        j = np.arange(new_k.shape[-2])[None, :]
        see = j <= i
        if wrong == "cache_stale" and start:
            see = (j < start) & (i >= 0)
        if wrong == "cache_offset_ignored":
            see = j <= i - start
        if wrong == "cache_off_by_one" and start:
            see = j < i
        if wrong == "cache_chunk_not_causal" and start:
            see = j <= i + n
        s = np.where(see, q @ new_k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
        if wrong == "cache_appended_twice" and start:
            e = above(s) * np.where(j >= start, 2, 1)
            return by_sum(e) @ new_v, (keep_k, keep_v)
        return plain_softmax(s) @ new_v, (keep_k, keep_v)

    return f


CACHED = [
    "cache_lost",
    "cache_stale",
    "cache_offset_ignored",
    "cache_off_by_one",
    "cache_chunk_not_causal",
    "cache_first_call_only",
    "cache_oldest_lost",
    "cache_keeps_keys_as_values",
    "cache_of_the_last_call_alone",
    "cache_appended_twice",
]

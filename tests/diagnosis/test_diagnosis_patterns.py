"""Positions, sparse patterns and other scores: right ones are not accused, wrong ones are named."""

import numpy as np
import pytest

import regard


def softmax(x, axis=-1):
    raised = np.exp(x - x.max(axis=axis, keepdims=True))
    return raised / raised.sum(axis=axis, keepdims=True)


def layer(name, **options):
    from support import pattern_attentions_torch as of_torch

    kind = getattr(of_torch, name)
    return kind(**options) if options else kind


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["Beside", "Settling", "Alibi", "Between", "Images", "Shifting"])
def test_a_layer_with_parts_beside_attention_is_right(name):
    assert regard.diagnose(layer(name)).verdict == "right"


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "options", "mistake"),
    [
        ("Beside", dict(first=True), "hidden_scores_large"),
        ("Between", dict(axis=-2), "channels_normalised_along_an_axis"),
        ("Between", dict(softmax=-2), "channels_softmax_axis"),
        ("Images", dict(of_queries=-1), "softmax_of_queries_over_tokens"),
        ("Shifting", dict(last=True), "relative_shift_misplaced"),
    ],
)
def test_a_mistake_in_such_a_layer_is_named(name, options, mistake):
    assert regard.diagnose(layer(name, **options)).names == (mistake,)


@pytest.mark.needs("torch")
def test_slopes_times_the_place_of_the_query_are_no_positions():
    assert regard.diagnose(layer("Alibi", by_query=True)).verdict != "fragile"


@pytest.mark.needs("torch")
def test_what_is_set_aside_is_told():
    told = [one.text for one in regard.diagnose(layer("Beside")).findings]
    assert any("mem_k" in text and "mix_before" in text for text in told)


def fused(fused_qkv, residual, dense_w, dense_b, attention_mask, num_heads=4):
    """fused_qkv: (B, T, 3 * C), for each head its q, k and v. attention_mask: (B, T), 1 = token."""
    B, T, _ = fused_qkv.shape
    parts = fused_qkv.reshape(B, T, num_heads, 3, -1)
    q, k, v = (parts[..., n, :].swapaxes(1, 2) for n in range(3))
    slopes = 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
    places = (attention_mask.cumsum(-1) - 1) * attention_mask
    scores = slopes[:, None, None] * places[:, None, None, :]
    scores = scores + q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    hidden = np.triu(np.ones((T, T), bool), 1) | (attention_mask[:, None, None, :] == 0)
    out = softmax(np.where(hidden, -1e30, scores)) @ v
    return residual + out.swapaxes(1, 2).reshape(B, T, -1) @ dense_w.T + dense_b


def test_heads_side_by_side_and_a_residual_that_are_arguments_are_given():
    found = regard.diagnose(fused)
    assert found.verdict == "right"
    assert "ALiBi" in found.summary


def in_turn(q, k, v):
    """q: (H, L, D), k, v: (G, S, D); query head h reads key head h % G."""
    times = len(q) // len(k)
    k, v = np.tile(k, (times, 1, 1)), np.tile(v, (times, 1, 1))
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def not_said(q, k, v):
    """q: (H, L, D), k, v: (G, S, D), G key heads for H query heads."""
    times = len(q) // len(k)
    k, v = np.tile(k, (times, 1, 1)), np.tile(v, (times, 1, 1))
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def test_key_heads_in_turn_are_right_where_the_text_says_so():
    assert regard.diagnose(in_turn).verdict != "mistaken"
    assert regard.diagnose(not_said).names == ("key_heads_tiled",)


def before_softmax(q, k, v, query_pre_attn_scalar=24.0):
    """Scores are multiplied by query_pre_attn_scalar ** -0.5, a constant of the model."""
    return softmax(q @ k.swapaxes(-1, -2) * query_pre_attn_scalar**-0.5) @ v


def not_rooted(q, k, v, query_pre_attn_scalar=24.0):
    return softmax(q @ k.swapaxes(-1, -2) / query_pre_attn_scalar) @ v


def test_a_constant_of_the_model_is_the_scale():
    assert regard.diagnose(before_softmax).verdict in ("right", "fragile")
    assert regard.diagnose(not_rooted).names == ("scale_by_width",)


def blocks_and_previous(q, k, v, size, first):
    """q, k, v (B, T, D) cut into blocks; each reads itself and the one before."""
    B, T, D = q.shape
    q, k, v = (one.reshape(B, T // size, size, D) for one in (q, k, v))
    k2, v2 = (np.concatenate([np.roll(one, 1, axis=1), one], axis=2) for one in (k, v))
    scores = q @ k2.swapaxes(-1, -2) / np.sqrt(D)
    hidden = np.arange(2 * size) > np.arange(size)[:, None] + size
    hidden = np.broadcast_to(hidden, scores.shape[1:]).copy()
    hidden[0, :, :size] |= first
    return (softmax(np.where(hidden, -1e30, scores)) @ v2).reshape(B, T, D)


def chunks_joined(q, k, v, chunk=4):
    """q, k, v: (B, T, D), T a multiple of chunk. Causal; each chunk sees the previous one too."""
    return blocks_and_previous(q, k, v, chunk, False)


def chunks_apart(q, k, v, chunk=4):
    """q, k, v: (B, T, D), T a multiple of chunk. Causal; each chunk sees the previous one too."""
    return blocks_and_previous(q, k, v, chunk, True)


def test_blocks_that_wrap_around_are_seen_with_the_size_that_is_the_default():
    assert regard.diagnose(chunks_joined).names == ("window_wraps_around",)
    assert regard.diagnose(chunks_apart).verdict != "mistaken"


def filled_up(q, k, v, block, masked):
    count, pad = len(k), -len(k) % block
    k, v = np.pad(k, ((0, pad), (0, 0))), np.pad(v, ((0, pad), (0, 0)))
    scores = q @ k.T / np.sqrt(q.shape[-1])
    if masked:
        scores[:, count:] = -np.inf
    return softmax(scores) @ v


def padded(q, k, v, block=8):
    """q (L, D), k and v (S, D): keys are padded up to a multiple of block."""
    return filled_up(q, k, v, block, False)


def padded_and_hidden(q, k, v, block=8):
    """q (L, D), k and v (S, D): keys are padded up to a multiple of block."""
    return filled_up(q, k, v, block, True)


def test_zeros_that_fill_up_a_block_are_seen_where_any_length_is_taken():
    assert regard.diagnose(padded).names == ("block_padding_counts",)
    assert regard.diagnose(padded_and_hidden).verdict == "right"


def banded(q, k, v, window, is_global, rows, columns):
    places = np.arange(q.shape[-2])
    keep = np.abs(places[:, None] - places) <= window
    keep = np.broadcast_to(keep, (len(q), *keep.shape))
    keep = keep | (is_global[:, None, :] & columns) | (is_global[:, :, None] & rows)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(keep[:, None], scores, -np.inf)) @ v


def with_globals(q, k, v, is_global, window=2):
    """q, k, v: (B, H, T, D). is_global: (B, T). A token sees window tokens on each side and all
    global tokens; global tokens see everything."""
    return banded(q, k, v, window, is_global, True, True)


def one_way(q, k, v, is_global, window=2):
    """q, k, v: (B, H, T, D). is_global: (B, T). A token sees window tokens on each side and all
    global tokens; global tokens see everything."""
    return banded(q, k, v, window, is_global, False, True)


def other_way(q, k, v, is_global, window=2):
    """q, k, v: (B, H, T, D). is_global: (B, T). A token sees window tokens on each side, and every
    token sees the global ones; global tokens see everything."""
    return banded(q, k, v, window, is_global, True, False)


def test_global_tokens_are_seen_in_both_directions():
    assert regard.diagnose(with_globals).verdict in ("right", "fragile")
    assert regard.diagnose(one_way).names == ("global_queries_see_a_window",)
    assert regard.diagnose(other_way).names == ("global_keys_not_seen",)


def listed(q, k, v, block, once):
    count, out = q.shape[1] // block, np.zeros_like(q)
    for i in range(count):
        blocks = [0, i - 1, i, i + 1, count - 1]
        blocks = [j for j in blocks if 0 <= j < count]
        blocks = sorted(set(blocks)) if once else blocks
        keys = np.concatenate([np.arange(j * block, (j + 1) * block) for j in blocks])
        rows = slice(i * block, (i + 1) * block)
        scores = q[:, rows] @ k[:, keys].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        out[:, rows] = softmax(scores) @ v[:, keys]
    return out


def counted_twice(q, k, v, block_size=2):
    """q, k, v: (H, T, D), T a multiple of block_size: global blocks and near ones."""
    return listed(q, k, v, block_size, False)


def counted_once(q, k, v, block_size=2):
    """q, k, v: (H, T, D), T a multiple of block_size: global blocks and near ones."""
    return listed(q, k, v, block_size, True)


def test_keys_of_two_rules_count_once():
    assert regard.diagnose(counted_twice).names == ("keys_counted_twice",)
    assert regard.diagnose(counted_once).verdict != "mistaken"


def efficient(q, k, v):
    """Efficient attention: q over features, k over tokens."""
    return softmax(q) @ (softmax(k, -2).swapaxes(-1, -2) @ v)


def efficient_of_keys(q, k, v):
    """Efficient attention: q over features, k over tokens."""
    return softmax(q) @ (softmax(k).swapaxes(-1, -2) @ v)


def test_efficient_attention_has_two_axes():
    assert regard.diagnose(efficient).verdict == "right"
    assert regard.diagnose(efficient_of_keys).names == ("softmax_of_keys_over_features",)


def performed(q, k, v, features, of_norm, axes):
    drawn = np.random.default_rng(0).normal(size=(features, q.shape[-1]))

    def phi(x, axis):
        x = x * x.shape[-1] ** -0.25
        products = x @ drawn.T
        norm = of_norm(x) if of_norm else np.square(x).sum(-1, keepdims=True) / 2
        return np.exp(products - norm - products.max(axis, keepdims=True)) + 1e-6

    q, k = phi(q, -1), phi(k, axes)
    return q @ (k.swapaxes(-1, -2) @ v) / (q @ k.sum(-2)[..., None])


def performer(q, k, v, nb_features=64):
    """q, k, v: (B, H, L, D)."""
    return performed(q, k, v, nb_features, None, (-1, -2))


def performer_of_each_key(q, k, v, nb_features=64):
    """q, k, v: (B, H, L, D)."""
    return performed(q, k, v, nb_features, None, -1)


def performer_without_norm(q, k, v, nb_features=64):
    """q, k, v: (B, H, L, D)."""
    return performed(q, k, v, nb_features, lambda x: 0.0, (-1, -2))


def test_random_features_give_keys_of_any_length_the_same_weight_on_average():
    assert regard.diagnose(performer).verdict == "unknown"
    for wrong in (performer_of_each_key, performer_without_norm):
        assert regard.diagnose(wrong).names == ("random_features_weigh_keys",)


class NullKeys:
    """Attention with a learned null key in front of those of the tokens. mask: True = token."""

    def __init__(self, dim=24, heads=4, seed=0):
        draw = np.random.default_rng(seed).normal
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = (draw(size=(dim, dim)) for _ in range(4))
        self.null_k, self.null_v = (draw(size=(heads, 1, dim // heads)) for _ in range(2))

    def __call__(self, x, mask=None):
        B, T, _ = x.shape
        q, k, v = (
            (x @ one).reshape(B, T, self.heads, -1).swapaxes(1, 2)
            for one in (self.w_q, self.w_k, self.w_v)
        )
        k, v = (
            np.concatenate([np.broadcast_to(own, (B, *own.shape)), one], 2)
            for own, one in ((self.null_k, k), (self.null_v, v))
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if mask is not None:
            keep = np.pad(mask, ((0, 0), (1, 0)), constant_values=True)
            scores = np.where(keep[:, None, None], scores, -np.inf)
        return (softmax(scores) @ v).swapaxes(1, 2).reshape(B, T, -1) @ self.w_o


def test_learned_keys_of_no_token_are_known():
    assert regard.diagnose(NullKeys).verdict == "right"


def wrapped_rows(x, Wq, Wk, Wv, aK, clip):
    """x: (n, d); Wq, Wk, Wv: (d, z); aK: (2 * clip + 1, z), rows of distance 0, 1, …, clip, and
    then -clip, …, -1, which negative indices find."""
    far = np.arange(len(x))
    rows = aK[np.clip(far - far[:, None], -clip, clip)]
    q, k, v = x @ Wq, x @ Wk, x @ Wv
    scores = q @ k.T + np.einsum("iz,ijz->ij", q, rows)
    return softmax(scores / np.sqrt(q.shape[-1])) @ v


def test_an_order_of_rows_that_is_documented_is_right():
    assert regard.diagnose(wrapped_rows).verdict == "right"

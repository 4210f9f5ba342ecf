"""What a function's text and its own numbers say is believed: scales, rules, tables, lines."""

import math
from typing import NamedTuple

import numpy as np
import pytest

import regard
from regard.diagnosis.judging.distance_tables import IN_ANOTHER_ORDER


def softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def heads_of(x, count):
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-2, -3)


def merged(x):
    return x.swapaxes(-2, -3).reshape(*x.shape[:-3], x.shape[-2], -1)


def is_right(found):
    return found.verdict in ("right", "fragile") and not found.mistakes


# --- lines that never ran ------------------------------------------------------------------------


def with_modes(q, k, v, mode="plain", training=False):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mode == "sharp":
        scores = 3 * scores
        scores = scores + 1
    elif mode not in ("plain",):
        raise ValueError(mode)
    weights = softmax(scores)
    if training:
        weights = weights * 0.9
    for _ in range(q.ndim - q.ndim):
        weights = weights * 2
    return weights @ v


def test_a_verdict_says_which_lines_it_says_nothing_of():
    found = regard.diagnose(with_modes)
    assert found.verdict == "right"
    texts = {one.name: one.text for one in found.findings if "not_run" in one.name}
    assert len(texts) == 2  # not what refuses a call, nor what is of training
    assert "where mode == 'sharp'" in texts["option_not_run"]  # nothing was tried for it
    line = texts["not_run"].split(" never")[0]
    assert found.summary.endswith(f"; {line} never ran")


def test_lines_are_not_watched_beside_a_debugger():
    import sys

    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        found = regard.diagnose(with_modes)
    finally:
        sys.settrace(before)
    assert found.verdict == "right"


# --- defaults ------------------------------------------------------------------------------------


def step(x, W_q, W_k, W_v, cache, fresh):
    if fresh:
        cache = {"k": [], "v": []} if cache is None else cache
    cache["k"].append(x @ W_k)
    cache["v"].append(x @ W_v)
    keys, values = np.stack(cache["k"]), np.stack(cache["v"])
    return softmax(keys @ (x @ W_q) / np.sqrt(keys.shape[-1])) @ values, cache


def renewed(x, W_q, W_k, W_v, cache=None):
    """One token x (M,) at a time; cache: keys and values of earlier tokens."""
    return step(x, W_q, W_k, W_v, cache, True)


def kept(x, W_q, W_k, W_v, cache={"k": [], "v": []}):  # noqa: B006
    """One token x (M,) at a time; cache: keys and values of earlier tokens."""
    return step(x, W_q, W_k, W_v, cache, False)


def test_a_default_that_python_keeps_is_found():
    assert regard.diagnose(renewed).verdict == "right"
    assert regard.diagnose(kept).names == ("default_kept",)


# --- scales and masks ----------------------------------------------------------------------------


def by_width(q, k, v):
    """As muP asks for, scores are divided by d, 1/d instead of 1/sqrt(d)."""
    return softmax(q @ k.swapaxes(-1, -2) / q.shape[-1]) @ v


def by_width_too(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / q.shape[-1]) @ v


def without_factor(q, k, v):
    """The scores are q·k with no factor: the projection of the queries has it."""
    return softmax(q @ k.swapaxes(-1, -2)) @ v


def test_a_scale_that_the_text_says_is_meant():
    assert "scores divided by D" in regard.diagnose(by_width).summary
    assert regard.diagnose(by_width_too).names == ("scale_by_width",)
    assert is_right(regard.diagnose(without_factor))


def almost_hidden(q, k, v, attention_mask):
    """q, k, v: (batch, length, heads, dim); attention_mask (batch, length): 1 token, 0 padding."""
    # as an additive bias
    bias = (1.0 - attention_mask[:, None, None]) * -1e-9
    scores = np.einsum("blhd,bmhd->bhlm", q, k) / np.sqrt(q.shape[-1]) + bias
    return np.einsum("bhlm,bmhd->blhd", softmax(scores), v)


def inverted_bits(q, k, v, attention_mask):
    """q, k, v: (batch, heads, length, dim); attention_mask (batch, length): 1 token, 0 padding."""
    mask = attention_mask.astype(np.int64)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(~mask[:, None, None], -1e9, scores)) @ v


def test_a_mask_of_ones_is_not_taken_for_one_that_is_added():
    assert regard.diagnose(almost_hidden).names == ("mask_ignored",)
    assert regard.diagnose(inverted_bits).names == ("integer_mask_inverted",)


def among_texts(q, k, v, doc_ids):
    """q, k, v: (B, H, T, D). Causal within each document; doc_ids (B, T) never fall."""
    seen = doc_ids[:, :, None] >= doc_ids[:, None]
    seen = (seen & np.tri(q.shape[2], dtype=bool))[:, None]
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(scores) @ v


def test_texts_that_read_earlier_ones_are_named_so():
    assert regard.diagnose(among_texts).names == ("earlier_texts_read",)


def softmax_one(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    most = np.maximum(scores.max(-1, keepdims=True), 0)
    weights = np.exp(scores - most)
    return weights / (np.exp(-most) + weights.sum(-1, keepdims=True)) @ v


def test_one_in_the_denominator_may_be_meant():
    found = regard.diagnose(softmax_one)
    assert is_right(found)
    assert "1 added to the sum" in found.summary


# --- lengths, windows and layouts ----------------------------------------------------------------


def in_chunks(q, k, v, chunk=4):
    """q, k, v: (heads, length, dim); chunk must divide length."""
    count = k.shape[1] // chunk
    parts = [q @ k[:, n * chunk : (n + 1) * chunk].swapaxes(-1, -2) for n in range(count)]
    return softmax(np.concatenate(parts, -1) / np.sqrt(q.shape[-1])) @ v[:, : count * chunk]


def looking_ahead(q, k, v, left=3, right=1):
    """Frame t sees frames t - left to t + right, both included. (T, d), (T, d), (T, e) -> (T, e)

    The look-ahead is wanted: it is not strictly causal.
    """
    out = np.empty((len(q), v.shape[1]), np.result_type(q, v))
    for t in range(len(q)):
        own = slice(max(0, t - left), min(len(q), t + right + 1))
        out[t] = softmax(k[own] @ q[t] / np.sqrt(q.shape[1])) @ v[own]
    return out


def half_on_each_side(q, k, v, window=4):
    """(T, d), (T, d), (T, d) -> (T, d); the window has window // 2 keys on either side."""
    apart = np.abs(np.subtract.outer(np.arange(len(q)), np.arange(len(k))))
    scores = np.where(apart <= window // 2, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    return softmax(scores) @ v


def columns(X, W_Q, W_K, W_V):
    """Tokens are columns of X: (d, n)."""
    Q, K, V = W_Q @ X, W_K @ X, W_V @ X
    return V @ softmax(K.T @ Q / np.sqrt(len(Q)), axis=0)


@pytest.mark.parametrize("function", [in_chunks, looking_ahead, half_on_each_side, columns])
def test_rules_and_layouts_that_are_documented_are_kept(function):
    assert is_right(regard.diagnose(function)), str(regard.diagnose(function))


def packed_late(q, k, v, cu_seqlens, causal=False):
    """q: (total, H, D), k and v: (total, H, D), texts end to end; cu_seqlens: (n + 1,)"""
    text = np.searchsorted(cu_seqlens, np.arange(len(q)))
    seen = text[:, None] == text
    seen = seen & np.tri(len(q), dtype=bool) if causal else seen
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v)


def test_a_first_token_that_is_a_text_of_its_own_is_a_border_one_token_late():
    assert regard.diagnose(packed_late).names == ("texts_begin_late",)


def joined_by_or(q, k, v, doc_ids):
    """q, k, v: (B, H, T, D). Causal within each document; doc_ids (B, T) never fall."""
    causal = np.tri(q.shape[2], dtype=bool)
    seen = (causal | (doc_ids[:, :, None] == doc_ids[:, None]))[:, None]
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(scores) @ v


def test_rules_that_are_joined_by_or_are_named_so():
    assert regard.diagnose(joined_by_or).names == ("masks_joined_by_or",)


class Local:
    """window: how many steps a query sees, itself included (window=1: only itself)."""

    more = 1

    def __init__(self, d_in=8, d_out=8, window=3):
        rng = np.random.default_rng(0)
        self.window = window
        self.Wq, self.Wk, self.Wv = rng.normal(size=(3, d_in, d_out))

    def forward(self, x):
        q, k, v = x @ self.Wq, x @ self.Wk, x @ self.Wv
        out = np.empty_like(v)
        for t in range(len(x)):
            own = slice(max(0, t - self.window + self.more), t + 1)
            out[t] = softmax(k[own] @ q[t] / np.sqrt(q.shape[1])) @ v[own]
        return out


class LongLocal(Local):
    """window: how many steps a query sees, itself included (window=1: only itself)."""

    more = 0


class Online:
    """Online softmax over blocks of keys, with a running maximum. q, k, v: (n, d)"""

    rescales = True

    def __init__(self, block_k=64):
        self.block_k = block_k

    def __call__(self, q, k, v):
        top, total, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), v.shape[1]))
        for start in range(0, len(k), self.block_k):
            own = slice(start, start + self.block_k)
            scores = q @ k[own].T / np.sqrt(q.shape[1])
            most = np.maximum(top, scores.max(1))
            weights, alpha = np.exp(scores - most[:, None]), np.exp(top - most)
            total = total * alpha + weights.sum(1)
            out = out * (alpha[:, None] if self.rescales else 1) + weights @ v[own]
            top = most
        return out / total[:, None]


class NotRescaled(Online):
    """Online softmax over blocks of keys, with a running maximum. q, k, v: (n, d)"""

    rescales = False


def test_sizes_of_objects_are_known_and_show_what_they_hide():
    assert is_right(regard.diagnose(Local.forward))
    assert regard.diagnose(LongLocal).names == ("window_one_long",)
    assert is_right(regard.diagnose(Online))
    assert regard.diagnose(NotRescaled).names == ("block_output_not_rescaled",)


# --- tables and columns --------------------------------------------------------------------------


def bucketed(q, k, v, bias_table, sign):
    places = np.arange(q.shape[2])
    bucket = np.clip(sign * (places - places[:, None]), 0, len(bias_table) - 1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores + bias_table[bucket].transpose(2, 0, 1)
    return softmax(np.where(places <= places[:, None], scores, -np.inf)) @ v


def with_table(q, k, v, bias_table):
    """Causal. q, k, v (B, H, T, D); bias_table (num_buckets, H), by the distance back."""
    return bucketed(q, k, v, bias_table, -1)


def with_table_unread(q, k, v, bias_table):
    """Causal. q, k, v (B, H, T, D); bias_table (num_buckets, H), by the distance back."""
    return bucketed(q, k, v, bias_table, 1)


def in_tree(params, x, num_heads, sign):
    q, k, v = (heads_of(x @ params[one], num_heads) for one in ("wq", "wk", "wv"))
    return merged(bucketed(q, k, v, params["rel"], sign)) @ params["wo"]


def tree_with_table(params, x, num_heads=4):
    """params: wq, wk, wv, wo (D, D) and rel (32, heads); x: (B, T, D), causal"""
    return in_tree(params, x, num_heads, -1)


def tree_with_table_unread(params, x, num_heads=4):
    """params: wq, wk, wv, wo (D, D) and rel (32, heads); x: (B, T, D), causal"""
    return in_tree(params, x, num_heads, 1)


def test_a_table_of_distances_is_drawn_where_it_is_asked_for():
    for right, wrong in (
        (with_table, with_table_unread),
        (tree_with_table, tree_with_table_unread),
    ):
        assert is_right(regard.diagnose(right)), str(regard.diagnose(right))
        assert regard.diagnose(wrong).names == ("positions_unused",)


def fused(x, weight, bias, heads, by_head):
    parts = (x @ weight.T + bias).reshape(
        *x.shape[:-1], *((heads, 3) if by_head else (3, heads)), -1
    )
    q, k, v = np.moveaxis(parts, 3 if by_head else 2, 0)
    q, k, v = (one.swapaxes(1, 2) for one in (q, k, v))
    return merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v)


def of_torch(x, in_proj_weight, in_proj_bias, num_heads=4):
    """x: (B, T, E); the weights of torch.nn.MultiheadAttention"""
    return fused(x, in_proj_weight, in_proj_bias, num_heads, False)


def of_torch_by_head(x, in_proj_weight, in_proj_bias, num_heads=4):
    """x: (B, T, E); the weights of torch.nn.MultiheadAttention"""
    return fused(x, in_proj_weight, in_proj_bias, num_heads, True)


def by_heads_too(x, qkv_weight, qkv_bias, num_heads=4):
    """x: (B, T, E)"""
    return fused(x, qkv_weight, qkv_bias, num_heads, True)


def test_fused_columns_are_taken_apart_as_they_are_said_to_lie():
    assert is_right(regard.diagnose(of_torch))
    assert regard.diagnose(of_torch_by_head).names == ("fused_columns_misread",)


# --- gradients -----------------------------------------------------------------------------------


def forward(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    lse = np.log(np.exp(scores).sum(-1))
    return np.exp(scores - lse[..., None]) @ v, lse


def backward(q, k, v, do, out, lse, key_scale):
    scale = q.shape[-1] ** -0.5
    p = np.exp(q @ k.swapaxes(-1, -2) * scale - lse[..., None])
    ds = p * (do @ v.swapaxes(-1, -2) - (out * do).sum(-1)[..., None])
    return ds @ k * scale, ds.swapaxes(-1, -2) @ q * key_scale, p.swapaxes(-1, -2) @ do


def with_output(q, k, v, do):
    """q, k, v, do: (H, L, D). Returns the output and the three gradients."""
    out, lse = forward(q, k, v)
    return (out, *backward(q, k, v, do, out, lse, q.shape[-1] ** -0.5))


def with_output_unscaled(q, k, v, do):
    """q, k, v, do: (H, L, D). Returns the output and the three gradients."""
    out, lse = forward(q, k, v)
    return (out, *backward(q, k, v, do, out, lse, 1.0))


def rows_first(q, k, v, out, lse, do):
    """q, k, v, out, do: (T, H, D); lse: (T, H)"""
    turned = (one.swapaxes(0, 1) for one in (q, k, v, do, out))
    found = backward(*turned, lse.T, q.shape[-1] ** -0.5)
    dq, dk, dv = (one.swapaxes(0, 1) for one in found)
    return dq, dk, dv


def test_gradients_may_come_with_the_output_and_lse_as_documented():
    assert regard.diagnose(with_output).verdict == "right"
    assert regard.diagnose(with_output_unscaled).names == ("gradient_of_keys_not_scaled",)
    assert regard.diagnose(rows_first).verdict == "right"


def of_truths(q, k, v, attn_mask):
    """q, k, v: (B, H, L, D), attn_mask: (B, L), True = token"""
    from torch.nn import functional as F

    seen = attn_mask[:, None, None]
    return F.scaled_dot_product_attention(q / q.shape[-1] ** 0.5, k, v, attn_mask=seen, scale=1.0)


@pytest.mark.needs("torch")
def test_a_scale_of_1_does_not_say_that_a_mask_holds_numbers():
    assert is_right(regard.diagnose(of_truths, library="torch"))


@pytest.mark.needs("torch")
def test_a_softmax_in_float32_does_not_make_gradients_wrong():
    def upcast(q, k, v):
        scores = q.float() @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.softmax(-1).to(q.dtype) @ v

    assert is_right(regard.diagnose(upcast, library="torch"))


# --- objects -------------------------------------------------------------------------------------


class Pairs:
    """Each layer is a pair of a matrix (out, in) and a bias; x: (T, B, E)."""

    def __init__(self, embed_dim=24, num_heads=4):
        rng = np.random.default_rng(0)
        self.heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            (rng.normal(size=(embed_dim, embed_dim)), rng.normal(size=embed_dim)) for _ in range(4)
        )

    def __call__(self, x):
        q, k, v = (
            heads_of((x @ w.T + b).swapaxes(0, 1), self.heads)
            for w, b in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v)
        return out.swapaxes(0, 1) @ self.out_proj[0].T + self.out_proj[1]


class Relative:
    """Rows of the tables stand for distances from -far to far, added to keys and to values."""

    def __init__(self, d_model=24, heads=4, far=4, shift=True):
        rng = np.random.default_rng(0)
        self.heads, self.far, self.shift = heads, far, shift
        self.wq, self.wk, self.wv, self.wo = (rng.normal(size=(d_model, d_model)) for _ in range(4))
        self.rel_k, self.rel_v = rng.normal(size=(2, 2 * far + 1, d_model // heads))

    def __call__(self, x):
        q, k, v = (heads_of(x @ w, self.heads) for w in (self.wq, self.wk, self.wv))
        places = np.arange(len(x))
        row = np.clip(places - places[:, None], -self.far, self.far) + self.far * self.shift
        scores = q @ k.swapaxes(-1, -2) + np.einsum("hid,ijd->hij", q, self.rel_k[row])
        weights = softmax(scores / np.sqrt(q.shape[-1]))
        out = weights @ v + np.einsum("hij,ijd->hid", weights, self.rel_v[row])
        return merged(out) @ self.wo


class OutOfOrder(Relative):
    """Rows of the tables stand for distances from -far to far, added to keys and to values."""

    def __init__(self, d_model=24, heads=4, far=4):
        super().__init__(d_model, heads, far, shift=False)


class Sinusoids:
    """Causal attention with a term of relative positions: q · r(distance), after Transformer-XL."""

    from_the_end = False

    def __init__(self, d_model=24, heads=4):
        rng = np.random.default_rng(0)
        self.heads = heads
        shape = (d_model, d_model)
        self.wq, self.wk, self.wv, self.wo, self.w_pos = (rng.normal(size=shape) for _ in range(5))

    def __call__(self, x):
        q, k, v, r = (
            heads_of(one @ w, self.heads)
            for one, w in (
                (x, self.wq),
                (x, self.wk),
                (x, self.wv),
                (self.sinusoids(*x.shape), self.w_pos),
            )
        )
        apart = np.arange(len(x))[:, None] - np.arange(len(x))
        row = np.clip(apart, 0, None)
        row = len(x) - 1 - row if self.from_the_end else row
        terms = np.einsum("hid,hijd->hij", q, r[:, row])
        scores = (q @ k.swapaxes(-1, -2) + terms) / np.sqrt(q.shape[-1])
        # softmax along an axis that is not the last one
        seen = np.where(apart >= 0, scores, -np.inf).transpose(1, 2, 0)
        weights = np.exp(seen - seen.max(1, keepdims=True))
        weights = weights / weights.sum(1, keepdims=True)
        return np.einsum("ijh,hjd->ihd", weights, v).reshape(len(x), -1) @ self.wo

    def sinusoids(self, length, width):
        angles = np.arange(length)[:, None] / 100 ** (np.arange(0, width, 2) / width)
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)


class FromTheEnd(Sinusoids):
    """Causal attention with a term of relative positions: q · r(distance), after Transformer-XL."""

    from_the_end = True


def test_relative_positions_do_not_depend_on_the_length():
    assert is_right(regard.diagnose(Sinusoids)), str(regard.diagnose(Sinusoids))
    assert regard.diagnose(FromTheEnd).names == ("distances_counted_from_the_end",)


def test_layers_may_be_pairs_and_tables_may_be_those_of_values():
    assert regard.diagnose(Pairs).verdict == "right"
    found = regard.diagnose(Relative)
    assert is_right(found)
    assert any("rel_v" in one.text for one in found.findings if one.name == "left_out")
    assert regard.diagnose(OutOfOrder).names == ("distance_rows_out_of_order",)
    assert IN_ANOTHER_ORDER.search("rows 0..clip, -clip..-1")


class Learned:
    """Cosines times exp(logit_scale), which may not exceed 100."""

    def __init__(self, dim=24, num_heads=4, late=False):
        rng = np.random.default_rng(0)
        self.num_heads, self.late = num_heads, late
        self.qkv_weight = rng.normal(size=(dim, 3 * dim))
        self.proj_weight = rng.normal(size=(dim, dim))
        self.logit_scale = np.log(10.0 * np.ones((num_heads, 1, 1)))

    def __call__(self, x):
        q, k, v = (heads_of(one, self.num_heads) for one in np.split(x @ self.qkv_weight, 3, -1))
        q, k = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (q, k))
        limit = math.log(100)
        factor = np.exp(np.minimum(self.logit_scale, limit))
        if self.late:
            factor = np.minimum(np.exp(self.logit_scale), limit)
        return merged(softmax(q @ k.swapaxes(-1, -2) * factor) @ v) @ self.proj_weight


class Late(Learned):
    """Cosines times exp(logit_scale), which may not exceed 100."""

    def __init__(self, dim=24, num_heads=4):
        super().__init__(dim, num_heads, late=True)


def test_a_learned_factor_of_cosines_is_the_exponential_of_a_logarithm():
    assert is_right(regard.diagnose(Learned))
    found = regard.diagnose(Late)
    assert found.names == ("scale_of_another_size",)
    assert "exp(2.303) = 10" in found.summary


class Gated(NamedTuple):
    """A layer of heads with a gate."""

    query_w: np.ndarray  # (m, h, c)
    key_w: np.ndarray  # (m, h, c)
    value_w: np.ndarray  # (m, h, c)
    gating_w: np.ndarray  # (m, h, c)
    gating_b: np.ndarray  # (h, c)
    output_w: np.ndarray  # (h, c, m)


def gated(params: Gated, x):
    """x: (B, L, m)"""
    q = np.einsum("bqm,mhc->bqhc", x, params.query_w) / np.sqrt(params.query_w.shape[-1])
    k = np.einsum("bkm,mhc->bkhc", x, params.key_w)
    v = np.einsum("bkm,mhc->bkhc", x, params.value_w)
    out = np.einsum("bhqk,bkhc->bqhc", softmax(np.einsum("bqhc,bkhc->bhqk", q, k)), v)
    gate = np.einsum("bqm,mhc->bqhc", x, params.gating_w) + params.gating_b
    return np.einsum("bqhc,hcm->bqm", out / (1 + np.exp(-gate)), params.output_w)


def test_a_gate_beside_the_weights_is_open():
    found = regard.diagnose(gated)
    assert is_right(found)
    assert any("gating_w" in one.text for one in found.findings if one.name == "left_out")


class Sinks:
    """A logit for each head that takes weight and gives nothing. q, k, v: (B, H, T, D)"""

    def __init__(self, num_heads=4, shifted=True):
        self.sinks, self.shifted = np.linspace(-1, 1, num_heads), shifted

    def __call__(self, q, k, v):
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        sink = self.sinks[:, None, None]
        most = np.maximum(scores.max(-1, keepdims=True), sink)
        weights = np.exp(scores - most)
        share = np.exp(sink - most) if self.shifted else np.exp(sink)
        return weights / (weights.sum(-1, keepdims=True) + share) @ v


class Unshifted(Sinks):
    """A logit for each head that takes weight and gives nothing. q, k, v: (B, H, T, D)"""

    def __init__(self, num_heads=4):
        super().__init__(num_heads, shifted=False)


class Core:
    """Attention whose other methods take their heads apart."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def weights_of(self, q, k):
        return softmax(q @ k.swapaxes(-1, -2) * self.scale / np.sqrt(q.shape[-1]))

    def read(self, q, k, v):
        return self.weights_of(q, k) @ v


def test_a_sink_and_a_method_of_an_object_are_reached():
    assert is_right(regard.diagnose(Sinks))
    assert regard.diagnose(Unshifted).names == ("sink_not_shifted",)
    assert is_right(regard.diagnose(Core.read))


def together(q, k, v, axis):
    """Each head's vectors of queries and keys have length 1. (B, H, L, D)"""
    q, k = (one / np.sqrt(np.square(one).sum(axis, keepdims=True)) for one in (q, k))
    return softmax(q @ k.swapaxes(-1, -2) * 8) @ v


def by_head(q, k, v):
    """Cosines: each head's vectors of queries and keys have length 1. q, k, v: (B, H, L, D)"""
    return together(q, k, v, (-1,))


def by_all_heads(q, k, v):
    """Cosines: each head's vectors of queries and keys have length 1. q, k, v: (B, H, L, D)"""
    return together(q, k, v, (1, -1))


def test_heads_are_normalised_one_by_one_where_the_text_says_so():
    assert is_right(regard.diagnose(by_head))
    assert regard.diagnose(by_all_heads).names[:1] == ("heads_normalised_together",)


# --- integers of 8 bits, and one line ------------------------------------------------------------


def quantize(x):
    """Codes of 8 bits, with the smallest number of each row."""
    low = x.min(-1, keepdims=True)
    scale = np.maximum(x.max(-1, keepdims=True) - low, 1e-8) / 255
    return np.rint((x - low) / scale).astype(np.uint8), scale, low


def dequantize(codes, scale, low):
    return codes.astype(np.float32) * scale + low


def dequantize_without(codes, scale, low):
    return codes.astype(np.float32) * scale


def quantised(q, k, v):
    """q: (B, H, d), k, v: (B, H, T, d) -> (B, H, d)"""
    k, v = (dequantize(*quantize(one)) for one in (k, v))
    weights = softmax(np.einsum("bhd,bhtd->bht", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("bht,bhtd->bhd", weights, v)


def quantised_without(q, k, v):
    """q: (B, H, d), k, v: (B, H, T, d) -> (B, H, d)"""
    k, v = (dequantize_without(*quantize(one)) for one in (k, v))
    weights = softmax(np.einsum("bhd,bhtd->bht", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("bht,bhtd->bhd", weights, v)


def test_a_cache_of_8_bits_is_right_to_its_digits():
    found = regard.diagnose(quantised)
    assert (found.verdict, found.exact_to) == ("right", "int8")
    wrong = regard.diagnose(quantised_without)
    assert wrong.names == ("one_change",)
    assert "+ low" in wrong.mistakes[0].title


# --- torch ---------------------------------------------------------------------------------------


def modules():
    """Layers of torch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Scaled(nn.Module):
        def __init__(self, dim, value):
            super().__init__()
            self.gamma = nn.Parameter(value * torch.ones(dim))

        def forward(self, x):
            return x * self.gamma

    class Block(nn.Module):
        """Pre-norm: x + ls1(attn(norm1(x)))"""

        def __init__(self, dim=24, num_heads=4, raw=True):
            super().__init__()
            self.heads, self.raw = num_heads, raw
            self.norm1 = nn.LayerNorm(dim)
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.q_norm = nn.LayerNorm(dim // num_heads)
            self.ls1 = Scaled(dim, 0.1)

        def forward(self, x):
            y = self.norm1(x)
            q, k, v = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for one in self.qkv(y).chunk(3, -1)
            )
            out = F.scaled_dot_product_attention(self.q_norm(q), k, v).transpose(1, 2).flatten(2)
            x = x + self.ls1(self.proj(out)) if self.raw else y + self.ls1(self.proj(out))
            return x

    class Normalised(Block):
        """Pre-norm: x + ls1(attn(norm1(x)))"""

        def __init__(self, dim=24, num_heads=4):
            super().__init__(dim, num_heads, raw=False)

    class Window(nn.Module):
        """x: (windows, rows * columns, C), a bias for each offset inside the window."""

        def __init__(self, dim=24, window_size=(4, 3), num_heads=3):
            super().__init__()
            self.heads, (rows, columns) = num_heads, window_size
            self.table = nn.Parameter(
                torch.randn((2 * rows - 1) * (2 * columns - 1), num_heads) * 0.5
            )
            at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            apart = at[:, None] - at + torch.tensor([rows - 1, columns - 1])
            self.register_buffer("index", apart[..., 0] * (2 * columns - 1) + apart[..., 1])
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            q, k, v = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for one in self.qkv(x).chunk(3, -1)
            )
            bias = self.table[self.index].permute(2, 0, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            return self.proj(out.transpose(1, 2).flatten(2))

    class Between(nn.Module):
        """text: (B, T, C); audio: (B, S, A); audio_len: optional (B,) number of valid frames"""

        def __init__(self, text_dim=24, audio_dim=40, hidden=32, n_heads=4, turned=True):
            super().__init__()
            self.heads, self.width, self.turned = n_heads, hidden // n_heads, turned
            self.q, self.k = nn.Linear(text_dim, hidden), nn.Linear(audio_dim, hidden)
            self.v, self.out = nn.Linear(audio_dim, hidden), nn.Linear(hidden, text_dim)

        def forward(self, text, audio, audio_len=None):
            q, k, v = (
                layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for layer, x in ((self.q, text), (self.k, audio), (self.v, audio))
            )
            b, h, s, d = k.shape
            scores = q @ (k.transpose(-1, -2) if self.turned else k.reshape(b, h, d, s))
            scores = scores / self.width**0.5
            if audio_len is not None:
                hidden = torch.arange(s) >= audio_len[:, None]
                scores = scores.masked_fill(hidden[:, None, None], -1e9)
            return text + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    class Reshaped(Between):
        """text: (B, T, C); audio: (B, S, A); audio_len: optional (B,) number of valid frames"""

        def __init__(self, text_dim=24, audio_dim=40, hidden=32, n_heads=4):
            super().__init__(text_dim, audio_dim, hidden, n_heads, turned=False)

    class Sliding(nn.Module):
        """Causal, a window of the last sliding_window keys, its own among them.

        attention_mask: (B, L), 1 = real, 0 = padding
        """

        def __init__(self, hidden_size=24, num_heads=4, sliding_window=3):
            super().__init__()
            self.heads, self.window = num_heads, sliding_window
            self.q, self.k, self.v, self.o = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

        def forward(self, x, attention_mask=None):
            q, k, v = (
                layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            places = torch.arange(x.shape[1])
            apart = places[:, None] - places
            hidden = (apart < 0) | (apart >= self.window)
            if attention_mask is not None:
                hidden = hidden | (attention_mask[:, None, None, :] == 0)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
            return self.o((weights @ v).transpose(1, 2).flatten(2))

    class Last(nn.Module):
        """hidden: (B, T, C), mask: (B, T) float, 1.0 = token, 0.0 = padding. Post-norm."""

        def __init__(self, dim=24, num_heads=4, of_sum=True, as_truths=True):
            super().__init__()
            self.heads, self.of_sum, self.as_truths = num_heads, of_sum, as_truths
            self.qkv, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.norm = nn.LayerNorm(dim)

        def forward(self, hidden, mask=None):
            q, k, v = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for one in self.qkv(hidden).chunk(3, -1)
            )
            if mask is not None:
                mask = mask[:, None, None].expand(-1, 1, q.shape[2], -1)
                mask = mask > 0 if self.as_truths else mask
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = self.dense(out.transpose(1, 2).flatten(2))
            return self.norm(out + hidden) if self.of_sum else self.norm(out) + hidden

    class Before(Last):
        """hidden: (B, T, C), mask: (B, T) float, 1.0 = token, 0.0 = padding. Post-norm."""

        def __init__(self, dim=24, num_heads=4):
            super().__init__(dim, num_heads, of_sum=False)

    class Numbers(Last):
        """hidden: (B, T, C), mask: (B, T) float, 1.0 = token, 0.0 = padding. Post-norm."""

        def __init__(self, dim=24, num_heads=4):
            super().__init__(dim, num_heads, as_truths=False)

    return Block, Normalised, Window, Between, Reshaped, Sliding, Last, Before, Numbers


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (0, ""),
        (1, "normalised_input_added"),
        (2, ""),
        (3, ""),
        (4, "keys_reshaped"),
        (5, ""),
        (6, ""),
        (7, "norm_before_the_sum"),
        (8, "mask_added_as_ones"),
    ],
)
def test_layers_around_attention_are_seen_through(place, name):
    found = regard.diagnose(modules()[place])
    assert [one.name for one in found.mistakes][:1] == ([name] if name else []), str(found)
    assert bool(name) or is_right(found), str(found)


# --- JAX -----------------------------------------------------------------------------------------


@pytest.mark.needs("jax")
def test_operations_of_jax_are_computed_as_jax_computes_them():
    import jax
    import jax.numpy as jnp

    from regard.diagnosis.process.jax_traces import Traces

    rng = np.random.default_rng(0)
    given = {
        "t": rng.normal(size=(7, 3)).astype(np.float32),
        "i": rng.integers(-7, 7, (4, 5)).astype(np.int32),
    }
    operations = (
        lambda t, i: t[i],
        lambda t, i: t[i + 6],  # beyond the end
        lambda t, i: t[:, i % 3],
        lambda t, i: t[i, i % 3],
        lambda t, i: jnp.take(t, i + 3, axis=0, mode="clip"),
        lambda t, i: jnp.take_along_axis(t, jnp.argsort(t, -1), -1),
        lambda t, i: jax.vmap(lambda a, b: a[b])(t[:4], i[:, 0] % 3),
        lambda t, i: jnp.pad(t, ((1, 2), (0, 1))),
        lambda t, i: jnp.round(3 * t),
        lambda t, i: jnp.prod(t, -1),
        lambda t, i: jnp.argmin(t, 0),
    )
    for number, operation in enumerate(operations):
        traces = Traces()
        found = traces.run("x", lambda own, f=operation: f(own["t"], own["i"]), given)
        expected = operation(*(jnp.asarray(given[one]) for one in "ti"))
        assert np.allclose(found, expected, equal_nan=True), number
        assert traces.usable

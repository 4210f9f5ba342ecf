"""What code means: names, orders and options that are no mistakes, and mistakes beside them.

Each code is a file of its own: what a file says besides is read too.
"""

from __future__ import annotations

import functools

import pytest

from code_in_files import diagnosis_of


@pytest.fixture
def read(tmp_path):
    """The verdict on the last function or class of some code, with other text in it."""
    return functools.partial(diagnosis_of, tmp_path)


# --- weights in dictionaries ---------------------------------------------------------------------

SPREAD = '''
def linear(x, w, b):
    return x @ w + b


def sublayer(x, ln_1, c_attn, c_proj, n_head):
    """x (n, d); ln_1: g and b; c_attn: w (d, 3 d) and b; c_proj: w (d, d) and b."""
    q, k, v = (heads_of(one, n_head) for one in np.split(linear(layer_norm(x, **ln_1), **c_attn), 3, -1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = s + (1 - np.tri(len(x))) * -1e10
    return x + linear(merged(softmax(s) @ v), **c_proj)
'''  # noqa: E501


def test_dictionaries_that_are_spread_over_calls_are_weights_and_normalisations(read):
    assert read(SPREAD).verdict == "right"
    assert read(SPREAD, (" / np.sqrt(q.shape[-1])", "")).names == ("no_scale",)


LAYER = '''
def layer(x, p, n_heads, pad=None):
    """x (B, T, D); p: Wqkv (3, D, D), Wo, W1 (D, F), W2 (F, D); pad (B, T), True on padding."""
    qkv = np.einsum("btd,cde->cbte", x, p["Wqkv"]).reshape(3, *x.shape[:2], n_heads, -1)
    q, k, v = qkv.swapaxes(2, 3)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if pad is not None:
        s = s + np.where(pad, -np.inf, 0.0)[:, None, None, :]
    x = layer_norm(x + merged(softmax(s) @ v) @ p["Wo"])
    return layer_norm(x + np.maximum(x @ p["W1"], 0) @ p["W2"])
'''
BERT = '''
def bert(hidden, sd, prefix="", num_heads=4, attention_mask=None):
    """hidden (B, T, C); sd: arrays of a state dict; attention_mask (B, T), 1 = token."""
    w = lambda n: sd[prefix + n + ".weight"].T
    b = lambda n: sd[prefix + n + ".bias"]
    q, k, v = (heads_of(hidden @ w(n) + b(n), num_heads) for n in ("self.query", "self.key", "self.value"))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if attention_mask is not None:
        s = s + (1.0 - attention_mask[:, None, None, :]) * -10000.0
    out = merged(softmax(s) @ v) @ w("output.dense") + b("output.dense") + hidden
    out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-12)
    return out * sd[prefix + "output.LayerNorm.weight"] + sd[prefix + "output.LayerNorm.bias"]
'''  # noqa: E501


@pytest.mark.parametrize("text", [LAYER, BERT])
def test_normalisations_after_sums_are_read_where_they_are_written(read, text):
    assert read(text).verdict == "right"
    found = read(text, (" / np.sqrt(q.shape[-1])", " / q.shape[-1]"))
    assert found.names == ("scale_by_width",)


SIZES = '''
def sized(x, p):
    """x (n, d); p: n_head, rotary_dim (int), ln_g, ln_b (d,), q, k, v, out (d, d) as (out, in)."""
    q, k, v = (heads_of(layer_norm(x, p["ln_g"], p["ln_b"]) @ p[n].T, p["n_head"]) for n in "qkv")
    r, places = p["rotary_dim"], range(len(x))
    q, k = (np.concatenate([rope(one[..., :r], places), one[..., r:]], -1) for one in (q, k))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(len(x)) == 1, s, -1e30)
    return x + merged(softmax(s) @ v) @ p["out"].T
'''
NUMBERED = '''
from typing import NamedTuple


class Weights(NamedTuple):
    q: object         # (d_model, heads * d)
    k: object
    v: object
    o: object         # (heads * d, d_model)
    rel_bias: object  # (heads, 2 * furthest + 1)


def with_distances(p, x, furthest=4):
    """x (B, T, d_model); rel_bias[h, clip(j - i)] is added to the scores."""
    count, places = p.rel_bias.shape[0], np.arange(x.shape[1])
    q, k, v = (heads_of(x @ w, count) for w in (p.q, p.k, p.v))
    apart = np.clip(places - places[:, None], -furthest, furthest) + furthest
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + p.rel_bias[:, apart]
    return merged(softmax(s) @ v) @ p.o
'''


@pytest.mark.parametrize("text", [SIZES, NUMBERED])
def test_numbers_and_tables_beside_weights_have_the_sizes_that_are_said(read, text):
    assert read(text).verdict == "right"


STATE = '''
def mha(x, state, num_heads):
    """x (B, T, E). state: in_proj_weight (3E, E), out_proj.weight (E, E), as torch has them."""
    q, k, v = (heads_of(one, num_heads) for one in np.split(x @ state["in_proj_weight"].T, 3, -1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return merged(softmax(s) @ v) @ state["out_proj.weight"].T
'''


def test_a_state_that_holds_weights_is_no_cache(read):
    assert read(STATE).verdict == "right"
    turned_one = ('state["out_proj.weight"].T', 'state["out_proj.weight"]')
    assert read(STATE, turned_one).names == ("W_o_not_transposed",)


HELD = '''
class Held:
    """Position i attends to positions j <= i."""

    def __init__(self, d=16, n_head=2, seed=0):
        rng = np.random.default_rng(seed)
        self.n_head = n_head
        self.c_attn = {"w": rng.normal(size=(d, 3 * d)), "b": np.zeros(3 * d)}
        self.c_proj = {"w": rng.normal(size=(d, d)), "b": np.zeros(d)}
        self.grads = {"w": np.zeros((d, d))}

    def __call__(self, x):
        qkv = x @ self.c_attn["w"] + self.c_attn["b"]
        q, k, v = (heads_of(one, self.n_head) for one in np.split(qkv, 3, axis=-1))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = s + np.triu(np.ones((len(x), len(x))), k=1) * -1e10
        return merged(softmax(s) @ v) @ self.c_proj["w"] + self.c_proj["b"]
'''


def test_a_dictionary_for_each_layer_holds_its_weight_and_its_bias(read):
    assert read(HELD).verdict == "right"
    assert read(HELD, ("k=1)", "k=0)")).names == ("causal_hides_own_key",)


SHARED = '''
def shared(x, Wq, Wk, Wv, Wo, n_head):
    """x (B, T, C); Wq, Wo: (C, C); Wk, Wv: (C, C // n_head): one head for keys and values."""
    q, k, v = heads_of(x @ Wq, n_head), (x @ Wk)[:, None], (x @ Wv)[:, None]
    return merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v) @ Wo
'''


def test_a_part_of_an_axis_is_another_axis(read):
    assert read(SHARED).verdict == "right"


# --- names and orders ----------------------------------------------------------------------------

FUSED = '''
class Fused:
    """x (T, D); the weights are learned."""

    def __init__(self, d=16, n_head=2, seed=0):
        rng = np.random.default_rng(seed)
        self.n_head = n_head
        self.c_attn, self.c_proj = rng.normal(size=(d, 3 * d)), rng.normal(size=(d, d))

    def __call__(self, x):
        k, q, v = np.split(x @ self.c_attn, 3, -1)
        q, k, v = (heads_of(one, self.n_head) for one in (q, k, v))
        return merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v) @ self.c_proj
'''


def test_the_order_of_fused_columns_is_one_of_names_but_for_a_checkpoint(read):
    assert read(FUSED).verdict == "right"
    loaded = read(FUSED, ("the weights are learned", "the weights of a GPT-2 checkpoint"))
    assert loaded.names == ("W_q_and_W_k_swapped",)


STEP = '''
def step(dec_hidden, enc_hiddens, enc_proj, enc_masks=None):
    """One step: (b, h), (b, src, 2h), (b, src, h); enc_masks (b, src) is 1 on padding. Unscaled."""
    s = (enc_proj @ dec_hidden[:, :, None])[..., 0]
    if enc_masks is not None:
        s = np.where(enc_masks == 1, -np.inf, s)
    w = softmax(s)
    return (w[:, None] @ enc_hiddens)[:, 0], w
'''


def test_values_may_come_before_keys_where_names_say_nothing(read):
    found = read(STEP)
    assert found.verdict == "right"
    assert "other_weights" not in {one.name for one in found.findings}


def test_a_default_in_a_text_says_nothing_of_what_true_is(read):
    text = STEP.replace("enc_masks (b, src) is 1 on padding", "enc_masks=None (b, src) True = pad")
    assert read(text).verdict == "right"
    inverted = ("enc_masks == 1", "enc_masks == 0")
    assert read(text, inverted).names == ("mask_inverted",)


TIMES = '''
def linear_attention(Q, K, V):
    """Causal linear attention, N x L x H x D layout."""
    Q, K = (np.where(one > 0, one + 1, np.exp(np.minimum(one, 0))) for one in (Q, K))
    Z = np.einsum("nlhd,nlhd->nlh", Q, np.cumsum(K, axis=1))
    S = np.cumsum(np.einsum("nlhd,nlhm->nlhdm", K, V), axis=1)
    return np.einsum("nlhd,nlhdm->nlhm", Q, S) / Z[..., None]
'''


def test_a_layout_may_be_said_as_a_product(read):
    assert read(TIMES).verdict == "right"
    whole = ('"nlhd,nlhd->nlh", Q, np.cumsum(K, axis=1)', '"nlhd,nhd->nlh", Q, K.sum(axis=1)')
    assert read(TIMES, whole).names == ("linear_sum_of_hidden_keys",)


# --- options, and what is around attention -------------------------------------------------------

OPTION = '''
class Optional:
    """x (T, D)."""

    def __init__(self, d=16, heads=2, mask=False, seed=0):
        self.mask, self.heads = mask, heads
        self.W_q, self.W_k, self.W_v = np.random.default_rng(seed).normal(size=(3, d, d))

    def __call__(self, x):
        q, k, v = (heads_of(x @ w, self.heads) for w in (self.W_q, self.W_k, self.W_v))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if self.mask:  # autoregressive
            s = np.where(np.tri(len(x)) == 1, s, -np.inf)
        return merged(softmax(s) @ v)
'''


def test_a_rule_that_an_option_has_off_is_no_mistake(read):
    assert read(OPTION).verdict == "right"
    on = read(OPTION, ("mask=False", "mask=True"), ("-np.inf", "0.0"))
    assert on.names == ("mask_multiplied",)


DECODER = '''
class Decoder:
    """Position i sees positions 0..i; LayerNorm(x + attention(x)). x (B, T, D)."""

    def __init__(self, d=24, n_heads=3, seed=0):
        self.h = n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(seed).normal(size=(4, d, d))

    @staticmethod
    def layer_norm(x, eps=1e-5):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)

    def forward(self, x):
        q, k, v = (heads_of(x @ w, self.h) for w in (self.W_q, self.W_k, self.W_v))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = s + np.triu(np.ones((x.shape[1], x.shape[1])), 1) * -1e9
        return self.layer_norm(x + merged(softmax(s) @ v) @ self.W_o)
'''


def test_a_layer_whose_only_method_is_forward_may_add_its_input(read):
    assert read(DECODER).verdict == "right"
    assert read(DECODER, (", 1) * -1e9", ") * -1e9")).names == ("causal_hides_own_key",)


OF_WIDTH = '''
class OfWidth:
    """Attention of (B, T, d) with its backward pass."""

    def __init__(self, d=8):
        self.c = 1 / np.sqrt(d)

    def forward(self, q, k, v):
        p = softmax(self.c * q @ k.swapaxes(-1, -2))
        self.saved = q, k, v, p
        return p @ v

    def backward(self, dout):
        q, k, v, p = self.saved
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        return self.c * ds @ k, self.c * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
'''


def test_an_object_with_a_backward_pass_is_made_for_the_width_that_it_gets(read):
    assert read(OF_WIDTH).verdict == "right"
    unscaled = ("self.c * ds.swapaxes", "ds.swapaxes")
    assert read(OF_WIDTH, unscaled).names == ("gradient_of_keys_not_scaled",)


CHUNKS = '''
def local(q, k, v, window=4):
    """Causal in chunks: a query sees its own chunk up to itself and the whole previous chunk.

    (batch, length, dim), any length.
    """
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    seen = (j <= i) & (i // window - j // window <= 1)
    s = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(s) @ v
'''


def test_chunks_that_reach_into_the_one_before_are_no_window(read):
    assert read(CHUNKS).verdict == "right"
    assert read(CHUNKS, ("(j <= i) &", "(j <= i + 1) &")).names == ("causal_off_by_one",)


FLASH = '''
def flash(Q, K, V, block_q=16, block_k=16):
    """Q (N, d), K and V (M, d); N and M need not be multiples of the blocks."""
    O = np.zeros((len(Q), V.shape[1]))
    for a in range(0, len(Q), block_q):
        q = Q[a : a + block_q]
        m, l, o = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), V.shape[1]))
        for b in range(0, len(K), block_k):
            s = q @ K[b : b + block_k].T / np.sqrt(Q.shape[1])
            m_new = np.maximum(m, s.max(1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            l, o, m = alpha * l + p.sum(1), alpha[:, None] * o + p @ V[b : b + block_k], m_new
        O[a : a + block_q] = o / l[:, None]
    return O.astype(Q.dtype)
'''
ROUND = "N and M need not be multiples of the blocks", "Blocks have to divide the lengths"


@pytest.mark.parametrize(
    ("more", "name"),
    [((), "block_output_not_rescaled"), ((ROUND,), "blocks_change_the_output")],
)
def test_blocks_of_any_length_are_not_asked_for_round_lengths_alone(read, more, name):
    assert read(FLASH, *more).verdict in ("right", "fragile")
    assert name in read(FLASH, ("alpha[:, None] * o", "o"), *more).names


# --- caches --------------------------------------------------------------------------------------

PLACED = '''
class Placed:
    """Causal, with a cache of 64 slots. input_pos (T,): where the tokens of x (T, D) are."""

    def __init__(self, d=16, heads=2, seed=0):
        self.heads = heads
        self.W_q, self.W_k, self.W_v = np.random.default_rng(seed).normal(size=(3, d, d))
        self.keys, self.values = np.zeros((heads, 64, d // heads)), np.zeros((heads, 64, d // heads))

    def forward(self, x, input_pos=None):
        if input_pos is None:
            input_pos = np.arange(len(x))
        q, k, v = (heads_of(x @ w, self.heads) for w in (self.W_q, self.W_k, self.W_v))
        self.keys[:, input_pos], self.values[:, input_pos] = k, v
        s = q @ self.keys.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = np.where(np.arange(64) <= np.asarray(input_pos)[:, None], s, -np.inf)
        return merged(softmax(s) @ self.values)
'''  # noqa: E501


def test_positions_that_are_an_option_are_told_to_a_layer_with_a_cache(read):
    assert read(PLACED).verdict == "right"
    assert read(PLACED, ("<= np.as", "< 1 + 0 * np.as")).verdict != "right"


PAST = '''
def chunk(q, k, v, past_k, past_v):
    """(H, T, D) of new tokens, rotated keys and values (H, P, D). Returns output, keys, values."""
    past = past_k.shape[1]
    places = past + np.arange(q.shape[1])
    q, k = rope(q, places), rope(k, places)
    k, v = np.concatenate([past_k, k], 1), np.concatenate([past_v, v], 1)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = np.where(np.arange(k.shape[1]) <= past + np.arange(q.shape[1])[:, None], s, -np.inf)
    return softmax(s) @ v, k, v
'''


@pytest.mark.parametrize(
    "change",
    [
        (
            "q, k = rope(q, places), rope(k, places)",
            "q, k = rope(q, places - past), rope(k, places - past)",
        ),
        ("rope(q, places)", "rope(q, places - past)"),
    ],
)
def test_new_tokens_that_begin_at_position_0_are_named(read, change):
    assert read(PAST).verdict == "right"
    assert read(PAST, change).names == ("rotary_from_zero_in_each_call",)


# --- masks and positions -------------------------------------------------------------------------

LENGTHS = '''
def of_lengths(x, wq, wk, wv, lengths):
    """x (B, T, D), lengths (B,): how many tokens are real; padding gets no weight."""
    real = np.arange(x.shape[1]) < lengths[:, None]
    s = (x @ wq) @ (x @ wk).swapaxes(-1, -2) / np.sqrt(wq.shape[1])
    return softmax(np.where(real[:, None], s, -1e9)) @ (x @ wv)
'''


@pytest.mark.parametrize("hidden", ["-1e9", "-np.inf"])
def test_lengths_that_hide_what_they_count_are_named(read, hidden):
    found = read(LENGTHS, ("real[:, None], s", "~real[:, None], s"), ("-1e9", hidden))
    assert found.names == ("mask_inverted",)


def test_a_mask_that_is_not_implemented_is_not_taken(read):
    text = (
        "def refuses(q, k, v, mask=None):\n    if mask is not None:\n"
        "        raise {}('no masks')\n    return softmax(q @ k.swapaxes(-1, -2) "
        "/ np.sqrt(q.shape[-1])) @ v\n"
    )
    assert read(text.format("NotImplementedError")).verdict == "right"
    assert read(text.format("RuntimeError")).verdict == "unknown"


PART = '''
class Part:
    """Rotary positions turn the first rotary_dim features of each head, in pairs. x (T, D)."""

    def __init__(self, n_embd=64, n_head=4, rotary_dim=8, seed=0):
        self.n_head, self.rotary_dim = n_head, rotary_dim
        self.W_q, self.W_k, self.W_v = np.random.default_rng(seed).normal(size=(3, n_embd, n_embd)) / 8

    def __call__(self, x):
        q, k, v = (heads_of(x @ w, self.n_head) for w in (self.W_q, self.W_k, self.W_v))
        r, places = self.rotary_dim, range(len(x))
        q, k = (np.concatenate([rope(one[..., :r], places), one[..., r:]], -1) for one in (q, k))
        return merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v)
'''  # noqa: E501


def test_conventions_that_are_mixed_in_a_part_of_the_features_are_named(read):
    assert read(PART).verdict == "right"
    mixed = ("rope(one[..., :r], places)", "rope(one[..., :r], places, other=True)")
    assert read(PART, mixed).names == ("rotary_conventions_mixed",)


WINDOWS = '''
def windows(x, qkv_weight, proj_weight, num_heads, window_size, shift_size=0):
    """x: (B, H, W, C), shifted windows. qkv_weight (3C, C): rows of q, then k, then v."""
    B, H, W, C = x.shape
    n = window_size
    if shift_size > 0:
        x = np.roll(x, (-shift_size, -shift_size), (1, 2))
    x = x.reshape(B, H // n, n, W // n, n, C).swapaxes(2, 3).reshape(-1, n * n, C)
    q, k, v = (heads_of(one, num_heads) for one in np.split(x @ qkv_weight.T, 3, -1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if shift_size > 0:  # of another region of the map
        r = lambda m: (np.arange(m) >= m - n) * 1 + (np.arange(m) >= m - shift_size)
        ids = (3 * r(H)[:, None] + r(W)).reshape(H // n, n, W // n, n)
        ids = ids.swapaxes(1, 2).reshape(-1, n * n)
        s = s.reshape(B, -1, num_heads, n * n, n * n)
        s = np.where(ids[:, None, :, None] == ids[:, None, None], s, -100.0)
        s = s.reshape(-1, num_heads, n * n, n * n)
    out = merged(softmax(s) @ v) @ proj_weight.T
    out = out.reshape(B, H // n, W // n, n, n, C).swapaxes(2, 3).reshape(B, H, W, C)
    if shift_size > 0:
        out = np.roll(out, (shift_size, shift_size), (1, 2))
    return out
'''


def test_a_shift_that_is_off_by_default_is_tried(read):
    assert read(WINDOWS).verdict == "right"
    again = ("np.roll(out, (shift_size, shift_size)", "np.roll(out, (-shift_size, -shift_size)")
    assert read(WINDOWS, again).names == ("pixels_misplaced",)


# --- in torch ------------------------------------------------------------------------------------

PADDED = '''
import torch
from torch import nn


class Padded(nn.Module):
    """x (B, T, D); pad_mask (B, T), True at padding, whose outputs are 0."""

    def __init__(self, dim=16):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, pad_mask=None):
        s = self.to_q(x) @ self.to_k(x).mT * x.shape[-1] ** -0.5
        if pad_mask is not None:
            s = s.masked_fill(pad_mask[:, None], -1e30)
        y = s.softmax(-1) @ self.to_v(x)
        return y if pad_mask is None else y.masked_fill(pad_mask[..., None], 0.0)
'''
OBJECTS = '''
import torch
from torch import nn


class Objects(nn.Module):
    """tgt (Q, B, C), memory (S, B, C); query_pos and pos are added to queries and keys alone."""

    def __init__(self, d_model=16, nhead=2):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, nhead)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tgt, memory, pos=None, query_pos=None):
        q = tgt if query_pos is None else tgt + query_pos
        k = memory if pos is None else memory + pos
        return self.norm(tgt + self.attn(q, k, memory)[0])
'''


@pytest.mark.needs("torch")
def test_outputs_of_padding_may_be_zero_and_have_no_gradient(read):
    assert read(PADDED).verdict == "right"


@pytest.mark.needs("torch")
def test_positions_of_queries_and_keys_are_in_no_values(read):
    assert "positions_in_values" not in read(OBJECTS).names
    own = ("self.attn(q, k, memory)", "self.attn(q, k, k)")
    assert read(OBJECTS, own).names == ("positions_in_values",)

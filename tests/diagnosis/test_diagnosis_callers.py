"""How parameters, caches and configurations are handed over that a function of its own asks for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import regard
import wrong_attentions as wrong
from regard.diagnosis.forms.einsums import axes_in_einsums
from regard.diagnosis.forms.inspection import inspect_function
from regard.diagnosis.process import protocol

softmax = wrong.plain_softmax


def attend(q, k, v):
    """(T, H, D) for fewer heads of keys."""
    k, v = (x.repeat(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    s = np.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("...hqk,...khd->...qhd", softmax(s), v)


class Grouped(NamedTuple):
    w_q: np.ndarray  # (M, N, H)
    w_k: np.ndarray  # (M, K, H)
    w_v: np.ndarray
    w_o: np.ndarray  # (N * H, M)


def of_tuple(params: Grouped, x):
    """GQA."""
    q, k, v = (np.einsum("btm,mnh->btnh", x, w) for w in params[:3])
    assert k.shape[2] < q.shape[2]
    return attend(q, k, v).reshape(*x.shape[:2], -1) @ params.w_o


def by_name(params, x):
    def dense(name, y):
        return y @ params["attention/" + name]["kernel"] + params["attention/" + name]["bias"]

    q, k, v = (dense(n, x).reshape(*x.shape[:2], 4, -1) for n in ("query", "key", "value"))
    return dense("output", attend(q, k, v).reshape(x.shape))


def as_torch_stores_it(query, key, value, params, num_heads):
    w_q, w_k, w_v = np.split(params["in_proj_weight"], 3)
    b_q, b_k, b_v = np.split(params["in_proj_bias"], 3)
    pairs = ((query, w_q, b_q), (key, w_k, b_k), (value, w_v, b_v))
    heads = ((x @ w.T + b).reshape(*x.shape[:2], num_heads, -1) for x, w, b in pairs)
    out = attend(*heads).reshape(query.shape)
    return out @ params["out_proj_weight"].T + params["out_proj_bias"]


def pooling(params, x):
    q = np.broadcast_to(params["probe"] @ params["wq"], (len(x), 1, x.shape[-1]))
    k, v = x @ params["wk"], x @ params["wv"]
    return attend(q[..., None, :], k[..., None, :], v[..., None, :])[:, 0, 0]


def axial(x, params, num_heads):
    """x: (B, H, W, C), each row reads itself."""
    q, k, v = ((x @ params[n]).reshape(*x.shape[:3], num_heads, -1) for n in ("wq", "wk", "wv"))
    return attend(q, k, v).reshape(x.shape) @ params["linear"]


@dataclass
class Config:
    d_model: int = 64
    n_head: int = 8


def configured(params, x, cfg: Config):
    q, k, v = ((x @ params[n]).reshape(*x.shape[:2], cfg.n_head, -1) for n in ("wq", "wk", "wv"))
    return attend(q, k, v).reshape(*x.shape[:2], cfg.d_model)


def of_heads(X, heads, W_o):
    parts = []
    for W_q, W_k, W_v in heads:
        parts.append(softmax((X @ W_q) @ (X @ W_k).T / np.sqrt(W_k.shape[1])) @ (X @ W_v))
    return np.concatenate(parts, axis=1) @ W_o


def of_inputs(inputs):
    q, k, v = inputs
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def bound(num_heads, q, k, v):
    heads = (x.reshape(len(x), num_heads, -1) for x in (q, k, v))
    return attend(*heads).reshape(len(q), -1)


@dataclass
class Past:
    keys: np.ndarray
    values: np.ndarray
    length: int = 0

    @classmethod
    def create(cls, batch_size, num_heads, max_len, head_dim, dtype=np.float32):
        shape = (batch_size, num_heads, max_len, head_dim)
        return cls(np.zeros(shape, dtype), np.zeros(shape, dtype))


def decode(q, k, v, cache: Past, *, more=1):
    keys, values, n = cache.keys.copy(), cache.values.copy(), cache.length
    keys[:, :, n], values[:, :, n] = k[:, :, 0], v[:, :, 0]
    s = q @ keys[:, :, : n + more].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(s) @ values[:, :, : n + more], Past(keys, values, n + 1)


def in_place(q, k, v, cache, layer_idx):
    """cache: a list with the keys and values of each layer."""
    if cache[layer_idx] is not None:
        k, v = (np.concatenate([a, b], 2) for a, b in zip(cache[layer_idx], (k, v), strict=True))
    cache[layer_idx] = (k, v)
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def translated(X, H, Wq, Wk, Wv):
    return softmax((X @ Wq) @ (H @ Wk).T / np.sqrt(Wk.shape[1])) @ (H @ Wv)


def general(h_t, h_s, W=None):
    """Luong's attention, whose scores have no scale."""
    if W is None:
        raise ValueError("needs W")
    return softmax(np.einsum("btd,de,bse->bts", h_t, W, h_s)) @ h_s


@pytest.mark.parametrize(
    "right",
    [
        *(of_tuple, by_name, as_torch_stores_it, pooling, axial, configured, of_heads, of_inputs),
        *(functools.partial(bound, 4), decode, in_place, translated, general),
    ],
)
def test_what_a_function_asks_for_is_made(right):
    found = regard.diagnose(right)
    assert found.verdict == "right", str(found)


class Linear:
    def __init__(self, n_in, n_out, rng):
        self.weight, self.bias = rng.normal(size=(n_out, n_in)), rng.normal(size=n_out)

    def __call__(self, x):
        return x @ self.weight.T + self.bias


class Stateful:
    """A cache of fixed length, and layers that are objects; `grows` is by what its length grows."""

    def __init__(self, d_model, n_heads, max_len=128, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = n_heads
        self.qkv, self.out = Linear(d_model, 3 * d_model, rng), Linear(d_model, d_model, rng)
        self.k = np.zeros((max_len, n_heads, d_model // n_heads))
        self.v, self.length = self.k.copy(), 0

    def __call__(self, x):
        count, n = len(x), self.length
        q, k, v = (t.reshape(count, self.heads, -1) for t in np.split(self.qkv(x), 3, -1))
        self.k[n : n + count], self.v[n : n + count] = k, v
        self.length += self.grows(count)
        s = np.einsum("qhd,khd->hqk", q, self.k[: n + count]) / np.sqrt(q.shape[-1])
        later = np.arange(n + count) > n + np.arange(count)[:, None]
        out = np.einsum("hqk,khd->qhd", softmax(np.where(later, -np.inf, s)), self.v[: n + count])
        return self.out(out.reshape(count, -1))

    def grows(self, count):
        return count


class ByOne(Stateful):
    def grows(self, count):
        return 1


def test_an_object_with_a_cache_is_fed_in_pieces():
    assert regard.diagnose(Stateful).verdict == "right"
    assert regard.diagnose(ByOne).verdict not in ("right", "unusable")


def blocks(q, k, v, window):
    """Causal, q, k, v: (B, L, H, D); each query sees `window` keys."""
    assert q.shape[1] % window == 0, "the length must be a multiple of the window"
    far = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    s = np.where((far >= 0) & (far < window), s, -np.inf)
    return np.einsum("bhqk,bkhd->bqhd", softmax(s), v)


def test_a_window_that_has_to_divide_the_length_does():
    assert regard.diagnose(blocks).verdict == "right"


@pytest.mark.parametrize(("low", "name"), [(-np.inf, None), (0.0, "padding_changes_the_output")])
def test_a_layer_of_a_graph_is_called_by_its_documented_axes(low, name):
    def gat(h, adj, W, a_l, a_r):
        """h: (N, F), adj: (N, N) of 0/1, W: (F, F'), a_l, a_r: (F',)"""
        Wh = h @ W
        e = np.tanh((Wh @ a_l)[:, None] + (Wh @ a_r)[None, :])
        return softmax(np.where(adj > 0, e, low)) @ Wh

    assert regard.diagnose(gat).names == ((name,) if name else ())


def test_the_roles_of_every_reading_come_through_the_messages():
    readings = inspect_function(general, None, None, None)
    sent = protocol.callees_frame(b"k" * 16, 1, [callee for _, callee in readings])
    chunks = iter([sent[:32], sent[32:]])
    message = protocol.receive(lambda count: next(chunks)[:count], b"k" * 16, 2**20)
    roles = [one.role for one in protocol.as_callees(message)[0].parameters]
    assert roles == ["query", "key_value", "between"]


# --- weights with axes of their own, and classes that take them -----------------------------------


def by_einsums(x, wq, wk, wv, wo):
    """wq: (m, h, k), wk, wv: (m, k): one key head for all."""
    q = np.einsum("btm,mhk->bhtk", x, wq)
    k, v = (np.einsum("bsm,mk->bsk", x, w) for w in (wk, wv))
    o = np.einsum(
        "bhts,bsk->bhtk", softmax(np.einsum("bhtk,bsk->bhts", q, k) / q.shape[-1] ** 0.5), v
    )
    return np.einsum("bhtk,hkm->btm", o, wo)


def heads_first(x, wq, wk, wv, wo):
    q, k = np.einsum("btm,hmd->bhtd", x, wq), np.einsum("btm,hmd->bhtd", x, wk)
    v = np.einsum("btm,hmd->bhtd", x, wv)
    a = softmax(np.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5)
    return np.einsum("bhtd,hdm->btm", np.einsum("bhij,bhid->bhjd", a, v), wo)


def fused_einsums(params, x):
    q = np.einsum("btm,mhd->bhtd", x, params["wq"])
    k, v = np.einsum("bsm,cmd->cbsd", x, params["wkv"])
    a = softmax(np.einsum("bhtd,bsd->bhts", q, k) / q.shape[-1] ** 0.5)
    return np.einsum("bhtd,hdm->btm", np.einsum("bhts,bsd->bhtd", a, v), params["wo"])


def as_shazeer_writes_it(x, m, mask, P_q, P_k, P_v, P_o):
    """x: [b, n, d]; m: [b, m, d]; mask: None or added; P_q, P_o: [h, d, k]; P_k, P_v: [d, k]"""
    q = np.einsum("bnd,hdk->bhnk", x, P_q)
    k, v = (np.einsum("bmd,dk->bmk", m, w) for w in (P_k, P_v))
    s = np.einsum("bhnk,bmk->bhnm", q, k) / q.shape[-1] ** 0.5
    w = softmax(s if mask is None else s + mask)
    return np.einsum("bhnk,hdk->bnd", np.einsum("bhnm,bmk->bhnk", w, v), P_o)


def one_after_the_other(Q, K, V, Wq, Wk, Wv, Wo):
    """Wq, Wk, Wv: (h, d, d_head), one matrix for each head; Wo: (h * d_head, d)"""
    heads = []
    for q, k, v in zip(Wq, Wk, Wv, strict=True):
        heads.append(softmax(Q @ q @ (K @ k).T / q.shape[1] ** 0.5) @ (V @ v))
    return np.stack(heads, -1).reshape(len(Q), -1) @ Wo


def test_einsums_and_words_say_which_axes_weights_have():
    assert axes_in_einsums(by_einsums)["wq"] == "MHD"
    assert axes_in_einsums(by_einsums)["wo"] == "HDM"
    assert axes_in_einsums(fused_einsums)["wkv"] == "PMD"
    for function, names in (
        (by_einsums, ()),
        (heads_first, ("weights_transposed",)),
        (fused_einsums, ()),
        (as_shazeer_writes_it, ()),
        (one_after_the_other, ("heads_merged_interleaved",)),
    ):
        found = regard.diagnose(function)
        assert (found.verdict, found.names) == ("mistaken" if names else "right", names), found


class Given:
    """Used as x @ w."""

    def __init__(self, wq, wk, wv, wo, n_heads):
        self.wq, self.wk, self.wv, self.wo, self.n_heads = wq, wk, wv, wo, n_heads

    def __call__(self, query, key, value):
        pairs = ((query, self.wq), (key, self.wk), (self.values_of(key, value), self.wv))
        q, k, v = ((x @ w).reshape(*x.shape[:2], self.n_heads, -1) for x, w in pairs)
        return attend(q, k, v).reshape(query.shape) @ self.wo

    def values_of(self, key, value):
        return value


class OfKeys(Given):
    def values_of(self, key, value):
        return key


class Copied(Given):
    def __call__(self, query, key, value):
        kept, self.wv = self.wv, self.wk
        try:
            return super().__call__(query, key, value)
        finally:
            self.wv = kept


def without_context(x, context, W_q, W_k, W_v):
    return softmax(x @ W_q @ (x @ W_k).T / W_q.shape[1] ** 0.5) @ (x @ W_v)


def of_the_context(x, context, W_q, W_k, W_v):
    """(B, L, M)"""
    s = context @ W_q @ (x @ W_k).swapaxes(-1, -2) / W_q.shape[1] ** 0.5
    return softmax(s) @ (x @ W_v)


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (of_the_context, "queries_from_context"),
        (Given, None),
        (OfKeys, "values_from_key_input"),
        (Copied, "values_projected_by_W_k"),
        (without_context, "context_ignored"),
    ],
)
def test_what_keys_and_values_are_made_of_is_seen(thing, name):
    found = regard.diagnose(thing)
    assert found.names == ((name,) if name else ()), found
    assert name or found.verdict == "right"


def linear(x, w, b):
    return x @ w.T + b


def of_state_dict(x, p, num_heads):
    """p: query.weight, query.bias and so on."""

    def heads(name):
        y = linear(x, p[name + ".weight"], p[name + ".bias"])
        return y.reshape(*x.shape[:2], num_heads, -1)

    return attend(heads("query"), heads("key"), heads("value")).reshape(x.shape)


class Letters:
    def __init__(self, D, k):
        self.k, self.Dh, rng = k, D // k, np.random.default_rng(0)
        self.W_q, self.W_k, self.W_v = (rng.normal(size=(D, D)) for _ in range(3))

    def __call__(self, x):
        split = (
            (x @ w).reshape(*x.shape[:2], self.k, self.Dh) for w in (self.W_q, self.W_k, self.W_v)
        )
        q, k, v = split
        heads = softmax(q @ k.swapaxes(-1, -2) / self.Dh**0.5) @ v
        return heads.swapaxes(1, 2).reshape(x.shape)


def test_a_letter_by_which_a_width_is_divided_is_the_number_of_heads():
    assert regard.diagnose(Letters).names == ("attention_over_heads",)


class HeadByHead:
    def __init__(self, d_model, n_heads):
        rng, d = np.random.default_rng(0), d_model // n_heads
        self.W_Q, self.W_K, self.W_V = (
            [rng.normal(size=(d_model, d)) for _ in range(n_heads)] for _ in range(3)
        )

    def __call__(self, x):
        parts = zip(self.W_Q, self.W_K, self.W_V, strict=True)
        heads = [softmax(x @ q @ (x @ k).T / q.shape[1] ** 0.5) @ (x @ v) for q, k, v in parts]
        return np.concatenate(heads, -1)


class OfOneStep:
    """Additive attention."""

    low = -np.inf

    def __init__(self, dec_dim, enc_dim, attn_dim):
        rng = np.random.default_rng(0)
        self.W, self.U = rng.normal(size=(dec_dim, attn_dim)), rng.normal(size=(enc_dim, attn_dim))
        self.v = rng.normal(size=attn_dim)

    def __call__(self, s, h, src_len):
        """
        s: the decoder's state, (batch, dec_dim)
        h: encoder outputs, (batch, src_max, enc_dim)
        src_len: (batch,)
        """
        e = np.tanh((s @ self.W)[:, None] + h @ self.U) @ self.v
        real = np.arange(e.shape[1]) < src_len[:, None]
        return np.einsum("bs,bsm->bm", softmax(np.where(real, e, self.low)), h)


def test_weights_of_a_state_dict_and_of_each_head_are_found():
    assert regard.diagnose(of_state_dict).verdict == "right"
    assert regard.diagnose(HeadByHead).verdict == "right"


def test_an_object_is_called_by_the_axes_that_it_documents():
    assert regard.diagnose(OfOneStep).verdict == "unknown"
    layer = OfOneStep(4, 6, 3)
    layer.low = 0.0
    assert regard.diagnose(layer).names == ("padding_changes_the_output",)


class FromAFreshCache(HeadByHead):
    """One token after the other."""

    def reset(self):
        self.keys, self.values = [], []

    def step(self, x):
        self.keys.append([x @ k for k in self.W_K])
        self.values.append([x @ v for v in self.W_V])
        parts = zip(
            self.W_Q, *(np.swapaxes(x, 0, 1) for x in (self.keys, self.values)), strict=True
        )
        return np.concatenate([softmax(k @ (x @ q) / q.shape[1] ** 0.5) @ v for q, k, v in parts])

    def __call__(self, x):
        self.reset()
        return np.stack([self.step(row) for row in x])


def test_an_object_that_begins_anew_in_each_call_keeps_nothing_between_them():
    found = regard.diagnose(FromAFreshCache)
    assert found.verdict == "right", found


def one_step(q, k_new, v_new, cache, pos):
    """q: (B, H, D); k_new, v_new: (B, K, D), H a multiple of K; cache: (B, T, K, D) each"""
    keys, values = (one.copy() for one in (cache["k"], cache["v"]))
    keys[:, pos], values[:, pos] = k_new, v_new
    each = q.shape[1] // k_new.shape[1]
    k, v = (one[:, : pos + 1].repeat(each, 2) for one in (keys, values))
    w = softmax(np.einsum("bhd,bthd->bht", q, k) / q.shape[-1] ** 0.5)
    return np.einsum("bht,bthd->bhd", w, v), {"k": keys, "v": values}


def test_a_step_with_a_cache_is_called_token_by_token_whatever_its_text_says_of_heads():
    assert regard.diagnose(one_step).verdict == "right"


def of_lengths(q, k, v, q_lens, kv_lens):
    """Texts one after the other, q: (sum(q_lens), H, D)."""
    out, i, j = [], 0, 0
    for n, m in zip(q_lens, kv_lens, strict=True):
        out.append(attend(q[i : i + n], k[j : j + m], v[j : j + m]))
        i, j = i + n, j + m
    return np.concatenate(out)


def of_earlier_lengths(q, k, v, q_lens, kv_lens):
    out, i, j = [], 0, 0
    for n, m in zip(q_lens, kv_lens, strict=True):
        out.append(attend(q[i : i + n], k[: j + m], v[: j + m]))
        i, j = i + n, j + m
    return np.concatenate(out)


def test_lengths_of_texts_are_given_as_numbers():
    assert regard.diagnose(of_lengths).verdict == "right"
    assert regard.diagnose(of_earlier_lengths).names == ("earlier_texts_read",)


def turned(x, past):
    angles = (past + np.arange(x.shape[-2]))[:, None] * 10000.0 ** (
        -np.arange(0, x.shape[-1], 2) / x.shape[-1]
    )
    even, odd, c, s = x[..., ::2], x[..., 1::2], np.cos(angles), np.sin(angles)
    return np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(x.shape)


def one_key_head(begins_anew):
    def attention(x, wq, wk, wv, wo, n_heads, cache=None):
        """Rotary positions. wq: (M, H*D); wk, wv: (M, D); wo: (H*D, M); x: (B, T, M)"""
        past = 0 if cache is None else cache[0].shape[1]
        place = 0 if begins_anew else past
        q = (x @ wq).reshape(*x.shape[:2], n_heads, -1).swapaxes(1, 2)
        k, v = turned(x @ wk, place), x @ wv
        if cache is not None:
            k, v = np.concatenate([cache[0], k], 1), np.concatenate([cache[1], v], 1)
        s = turned(q, place) @ k[:, None].swapaxes(-1, -2) / q.shape[-1] ** 0.5
        seen = np.arange(k.shape[1]) <= past + np.arange(x.shape[1])[:, None]
        o = softmax(np.where(seen, s, -np.inf)) @ v[:, None]
        return o.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ wo, (k, v)

    return attention


def test_one_key_head_is_known_by_the_documented_columns_of_its_weights():
    assert regard.diagnose(one_key_head(False)).verdict == "right"
    assert regard.diagnose(one_key_head(True)).names == ("rotary_from_zero_in_each_call",)


def of_two_sides(shifted):
    def attention(q, k, v, causal=False, window_size=(-1, -1)):
        """(L, D). Keys from window_size[0] before to window_size[1] after it; -1: no limit."""
        left, right = (window_size[0], 0) if causal else window_size
        late = len(k) - len(q)
        apart = np.arange(len(k)) - np.arange(len(q))[:, None] - late
        hidden = np.zeros(apart.shape, bool)
        if left >= 0:
            hidden |= apart + (0 if shifted else late) < -left
        if right >= 0:
            hidden |= apart > right
        return softmax(np.where(hidden, -np.inf, q @ k.T / q.shape[-1] ** 0.5)) @ v

    return attention


def test_a_window_of_two_sides_is_given_one_of_each():
    assert regard.diagnose(of_two_sides(True)).verdict in ("right", "fragile")
    assert regard.diagnose(of_two_sides(False)).verdict in ("unknown", "mistaken")

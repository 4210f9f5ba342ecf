"""Backward passes with sinks and softcaps, caches with padding, states that are carried along."""

from __future__ import annotations

import numpy as np
import pytest

import regard


def scores_of(q, k):
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- backward passes ------------------------------------------------------------------------------


def capped_passes(slope):
    def capped_forward(q, k, v, cap=4.0):
        s = scores_of(q, k)
        p = softmax(cap * np.tanh(s / cap))
        return p @ v, (q, k, v, s, p)

    def capped_backward(dout, ctx, cap=4.0):
        q, k, v, s, p = ctx
        dp = dout @ np.swapaxes(v, -1, -2)
        dz = p * (dp - (p * dp).sum(-1, keepdims=True))
        ds = dz * slope(s, cap * np.tanh(s / cap), cap) / np.sqrt(q.shape[-1])
        return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dout

    return capped_forward, capped_backward


SLOPES = {
    "raw": lambda s, capped, cap: 1 - (s / cap) ** 2,
    "not divided": lambda s, capped, cap: 1 - capped**2,
    "of the scores": lambda s, capped, cap: 1 - np.tanh(s) ** 2,
}


@pytest.mark.parametrize("slope", SLOPES.values(), ids=[*SLOPES])
def test_a_wrong_slope_of_a_softcap_is_named(slope):
    assert regard.diagnose(capped_passes(slope)).names == ("softcap_slope_lost",)


def test_the_slope_of_a_softcap_is_right():
    passes = capped_passes(lambda s, capped, cap: 1 - (capped / cap) ** 2)
    assert regard.diagnose(passes).verdict == "right"


def sink_passes(gradient):
    def sink_forward(q, k, v, sinks):
        s = scores_of(q, k)
        m = np.maximum(s.max(-1), sinks[:, None])
        e, of_sink = np.exp(s - m[..., None]), np.exp(sinks[:, None] - m)
        total = e.sum(-1) + of_sink
        p = e / total[..., None]
        return p @ v, (q, k, v, p, of_sink / total)

    def sink_backward(do, memory):
        q, k, v, p, share = memory
        dp = do @ np.swapaxes(v, -1, -2)
        delta = (p * dp).sum(-1)
        ds = p * (dp - delta[..., None]) / np.sqrt(q.shape[-1])
        dsinks = gradient(share, delta)
        return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ do, dsinks

    return sink_forward, sink_backward


def test_the_gradient_of_a_sink_is_judged():
    right = regard.diagnose(sink_passes(lambda share, delta: -(share * delta).sum(-1)))
    assert right.verdict == "right"
    assert [one.name for one in right.gradients] == ["queries", "keys", "values", "sink"]
    for wrong in (
        lambda share, delta: (share * delta).sum(-1),
        lambda share, delta: -delta.sum(-1),
        lambda share, delta: -share.sum(-1),
    ):
        found = regard.diagnose(sink_passes(wrong))
        assert found.names == ("gradient_of_sink",)
        assert [one.name for one in found.gradients if one.state == "wrong"] == ["sink"]


def flash_backward(delta_of_row):
    def backward(q, k, v, o, lse, do, block=3):
        scale = q.shape[1] ** -0.5
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        whole = (do * o).sum(1)
        for start in range(0, len(k), block):
            keys = slice(start, start + block)
            p = np.exp(q @ k[keys].T * scale - lse[:, None])
            dp = do @ v[keys].T
            delta = whole if delta_of_row else (p * dp).sum(1)
            ds = p * (dp - delta[:, None]) * scale
            dq += ds @ k[keys]
            dk[keys], dv[keys] = ds.T @ q, p.T @ do
        return dq, dk, dv

    return backward


def test_delta_of_a_block_is_told_from_delta_of_a_row():
    assert regard.diagnose(flash_backward(True)).verdict == "right"
    assert regard.diagnose(flash_backward(False)).names == ("delta_of_one_block",)


# --- caches in a dictionary that earlier calls have filled, with masks of padding -----------------


ORDERS = {
    "": lambda new, old: [old, new],
    "order": lambda new, old: [new, old],
    "forgotten": lambda new, old: [old & False, new],
}


def incremental_module(mistake=""):
    import torch

    join = ORDERS[mistake]

    class Incremental(torch.nn.Module):
        def __init__(self, dim=12, heads=3):
            super().__init__()
            self.heads = heads
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
                torch.nn.Linear(dim, dim) for _ in range(4)
            )

        def _get_buffer(self, incremental_state):
            return incremental_state.get("attn_state", {})

        def _set_buffer(self, incremental_state, buffer):
            incremental_state["attn_state"] = buffer

        def forward(self, x, key_padding_mask=None, incremental_state=None):
            """x: (T, B, C); key_padding_mask: (B, T) of the new tokens, True for padding."""
            length, batch, dim = x.shape

            def split(t):
                return t.view(length, batch, self.heads, -1).permute(1, 2, 0, 3)

            q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
            mask = key_padding_mask
            if mask is None:
                mask = torch.zeros(batch, length, dtype=torch.bool)
            if incremental_state is not None:
                saved = self._get_buffer(incremental_state)
                if "prev_key" in saved:
                    k = torch.cat([saved["prev_key"], k], dim=2)
                    v = torch.cat([saved["prev_value"], v], dim=2)
                    mask = torch.cat(join(mask, saved["prev_mask"]), dim=1)
                self._set_buffer(
                    incremental_state, {"prev_key": k, "prev_value": v, "prev_mask": mask}
                )
            s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - length)
            s = s.masked_fill(future | mask[:, None, None, :], -1e9)
            out = (s.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(length, batch, dim)
            return self.out_proj(out)

    return Incremental


def incremental_numpy(mistake=""):
    forgotten = mistake == "forgotten"

    class Incremental:
        def __init__(self, dim=8, heads=2, seed=0):
            rng = np.random.default_rng(seed)
            self.heads = heads
            self.wq, self.wk, self.wv, self.wo = rng.standard_normal((4, dim, dim)) / dim**0.5

        def __call__(self, x, padding_mask=None, layer_cache=None):
            """x: (batch, T, dim); padding_mask: (batch, past + T), True for real tokens."""
            b, n, _ = x.shape
            q, k, v = (
                (x @ w).reshape(b, n, self.heads, -1).swapaxes(1, 2)
                for w in (self.wq, self.wk, self.wv)
            )
            cache = {} if layer_cache is None else layer_cache
            if cache.get("k") is not None:
                k = np.concatenate([cache["k"], k], axis=2)
                v = np.concatenate([cache["v"], v], axis=2)
            cache["k"], cache["v"] = k, v
            total = k.shape[2]
            s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            keep = np.arange(total) <= np.arange(n)[:, None] + total - n
            keep = np.broadcast_to(keep, (b, 1, n, total)).copy()
            if padding_mask is not None:
                real = padding_mask[:, None, None, :total].copy()
                real[..., : forgotten * (total - n)] = True
                keep &= real
            s = np.where(keep, s, -1e9)
            p = softmax(s)
            return (p @ v).swapaxes(1, 2).reshape(b, n, -1) @ self.wo

    return Incremental


INCREMENTAL = [
    pytest.param(incremental_module, marks=pytest.mark.needs("torch")),
    incremental_numpy,
]


@pytest.mark.parametrize("make", INCREMENTAL)
def test_a_cache_in_a_dictionary_is_right_with_padding(make):
    found = regard.diagnose(make())
    assert found.verdict == "right", found
    assert "never ran" not in found.summary


@pytest.mark.parametrize("make", INCREMENTAL)
def test_padding_of_earlier_calls_that_is_forgotten_is_named(make):
    assert regard.diagnose(make("forgotten")).names == ("cached_padding_forgotten",)


@pytest.mark.needs("torch")
def test_masks_that_are_joined_in_another_order_than_keys_are_named():
    found = regard.diagnose(incremental_module("order"))
    assert found.names == ("cached_padding_misplaced",)


# --- states that linear attention and retention carry from chunk to chunk -------------------------


def chunked_linear(step):
    def linear_attention(q, k, v, chunk=4):
        """q, k, v: (n, d), causal, with the feature map elu(x) + 1, some tokens at a time."""

        def phi(x):
            return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

        state, total, out = np.zeros((q.shape[1], v.shape[1])), np.zeros(q.shape[1]), []
        for start in range(0, len(q), chunk):
            a, b, c = phi(q[start:][:chunk]), phi(k[start:][:chunk]), v[start:][:chunk]
            own, state, total = step(a, b, c, state, total)
            out.append(own)
        return np.concatenate(out)

    return linear_attention


def read(a, b, c, state, total):
    own = np.tril(a @ b.T)
    return (own @ c + a @ state) / (own.sum(1) + a @ total)[:, None]


def in_order(a, b, c, state, total):
    return read(a, b, c, state, total), state + b.T @ c, total + b.sum(0)


def overwritten(a, b, c, state, total):
    return read(a, b, c, state, total), state + b.T @ c, b.sum(0)


def written_first(a, b, c, state, total):
    state, total = state + b.T @ c, total + b.sum(0)
    return read(a, b, c, state, total), state, total


def not_causal(a, b, c, state, total):
    own = a @ b.T
    out = (own @ c + a @ state) / (own.sum(1) + a @ total)[:, None]
    return out, state + b.T @ c, total + b.sum(0)


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (in_order, ()),
        (overwritten, ("linear_state_forgotten",)),
        (written_first, ("linear_chunk_twice",)),
        (not_causal, ("linear_chunk_not_causal",)),
    ],
)
def test_chunks_of_linear_attention(step, names):
    found = regard.diagnose(chunked_linear(step))
    assert found.names == names
    assert names or found.verdict == "right"


def chunked_retention(*, later=1, order=1, decay=True):
    def retention(q, k, v, chunk=4):
        """Retention: q, k: (heads, n, d), v: (heads, n, e), in chunks with a state."""
        heads, n, d = q.shape
        gamma = (1 - 2.0 ** (-5 - np.arange(heads)))[:, None]
        gamma = gamma if decay else np.ones_like(gamma)
        state, out = np.zeros((heads, d, v.shape[-1])), []
        for start in range(0, n, chunk):
            a, b, c = (x[:, start : start + chunk] for x in (q, k, v))
            idx = np.arange(a.shape[1])
            apart = idx[:, None] - idx
            inner = np.where(apart >= 0, gamma[:, :, None] ** np.maximum(apart, 0), 0)
            own = (a @ b.swapaxes(-1, -2) * inner) @ c
            out.append(own + (a @ state) * (gamma ** (idx + later))[..., None])
            into = (gamma ** (len(idx) - 1 - idx)[::order])[..., None]
            state = state * gamma[..., None] ** len(idx) + (b * into).swapaxes(-1, -2) @ c
        return np.concatenate(out, axis=1) / np.sqrt(d)

    return retention


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({}, ()),
        ({"later": 0}, ("retention_across_chunks",)),
        ({"order": -1}, ("retention_across_chunks",)),
        ({"decay": False}, ("retention_without_decay",)),
    ],
)
def test_chunks_of_retention(how, names):
    found = regard.diagnose(chunked_retention(**how))
    assert found.names == names
    assert names or found.verdict == "right"


def test_a_recurrent_retention_is_right():
    def retention(q, k, v):
        """Retention, token by token: q, k, v: (heads, n, d)."""
        heads, n, d = q.shape
        gamma = (1 - 2.0 ** (-5 - np.arange(heads)))[:, None, None]
        state, out = np.zeros((heads, d, v.shape[-1])), np.zeros((heads, n, v.shape[-1]))
        for t in range(n):
            state = gamma * state + k[:, t, :, None] * v[:, t, None, :]
            out[:, t] = np.einsum("hd,hde->he", q[:, t], state)
        return out

    assert regard.diagnose(retention).verdict == "right"


# --- whole texts through a cache, states of another class, pages and blocks -----------------------


class State:
    def __init__(self, dim, n_heads, n_kv_heads, seq_len):
        self.width = dim // n_heads
        self.keys = np.zeros((seq_len, n_kv_heads * self.width), np.float32)
        self.values = np.zeros((seq_len, n_kv_heads * self.width), np.float32)


def step_with_state(head_of):
    def attention_step(x, pos, wq, wk, wv, wo, state, n_heads, n_kv_heads):
        """x: (dim,) of the token at pos; wq: (dim, dim), wk, wv: (kv_dim, dim), as wq @ x."""
        width, out = state.width, np.zeros(len(x))
        q, state.keys[pos], state.values[pos] = wq @ x, wk @ x, wv @ x
        for h in range(n_heads):
            own = slice(h * width, (h + 1) * width)
            of_key = head_of(h, n_heads, n_kv_heads) * width
            shared = slice(of_key, of_key + width)
            s = state.keys[: pos + 1, shared] @ q[own] / np.sqrt(width)
            out[own] = softmax(s) @ state.values[: pos + 1, shared]
        return wo @ out

    return attention_step


def test_steps_with_a_state_of_another_class():
    right = regard.diagnose(step_with_state(lambda h, heads, few: h // (heads // few)))
    assert right.verdict == "right"
    wrong = regard.diagnose(step_with_state(lambda h, heads, few: h % few))
    assert wrong.names == ("key_heads_tiled",)


def whole_text(seen):
    def decode(q, k, v, longest=16):
        """(batch, n, heads, d) in and out, token by token with a cache of `longest` slots."""
        b, n, h, d = q.shape
        keys, values = np.zeros((2, b, max(longest, n), h, d))
        out = np.zeros(q.shape)
        for t in range(n):
            keys[:, t], values[:, t] = k[:, t], v[:, t]
            s = np.einsum("bhd,bshd->bhs", q[:, t], keys) / np.sqrt(d)
            s = np.where(seen(np.arange(keys.shape[1]), t), s, -1e30)
            out[:, t] = np.einsum("bhs,bshd->bhd", softmax(s), values)
        return out

    return decode


def test_the_newest_slot_of_a_static_cache():
    assert regard.diagnose(whole_text(lambda slot, t: slot <= t)).verdict == "right"
    found = regard.diagnose(whole_text(lambda slot, t: slot < t))
    assert found.names == ("newest_slot_not_attended",)


def paged(filled):
    def paged_attention(query, key_cache, value_cache, block_tables, context_lens):
        """query: (seqs, heads, d); caches: (blocks, block_size, heads, d)."""
        size, out = key_cache.shape[1], np.zeros_like(query)
        for n, length in enumerate(context_lens):
            parts = [[], []]
            for b in range(-(-length // size)):
                last = b == -(-length // size) - 1
                rows = filled(length, size, b) if last else size
                for own, cache in zip(parts, (key_cache, value_cache), strict=True):
                    own.append(cache[block_tables[n, b], :rows])
            k, v = (np.concatenate(own) for own in parts)
            s = np.einsum("hd,thd->ht", query[n], k) / np.sqrt(query.shape[-1])
            e = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
            out[n] = np.einsum("ht,thd->hd", e, v) / (e.sum(-1)[:, None] + 1e-9)
        return out

    return paged_attention


def test_a_full_last_page():
    assert regard.diagnose(paged(lambda length, size, b: length - b * size)).verdict == "right"
    found = regard.diagnose(paged(lambda length, size, b: length % size))
    assert found.names == ("full_last_block_lost",)


def summarised(total):
    def chunked(query, key, value, chunk_size=4):
        """query, key, value: (n, heads, d), n a multiple of the chunk size."""
        query = query / np.sqrt(query.shape[-1])
        parts = []
        for start in range(0, len(key), chunk_size):
            s = np.einsum("qhd,khd->qhk", query, key[start : start + chunk_size])
            m = s.max(-1)
            e = np.exp(s - m[..., None])
            own = np.einsum("qhk,khf->qhf", e, value[start : start + chunk_size])
            parts.append((own, e.sum(-1), m))
        outs, sums, maxima = (np.stack(own) for own in zip(*parts, strict=True))
        share = np.exp(maxima - maxima.max(0))
        return (outs * share[..., None]).sum(0) / total(sums, share).sum(0)[..., None]

    return chunked


def test_chunks_whose_sums_are_not_rescaled():
    assert regard.diagnose(summarised(lambda sums, share: sums * share)).verdict == "right"
    found = regard.diagnose(summarised(lambda sums, share: sums))
    assert found.names == ("block_sum_not_rescaled",)

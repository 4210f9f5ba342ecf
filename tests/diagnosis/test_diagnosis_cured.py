"""Code that was cured of a mistake is right: caches of one token, masks that replace causal."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.wrong_attentions import plain_softmax as softmax

import regard
from regard.diagnosis.calls.convention import Question
from regard.diagnosis.forms.weights import ORDER_SAID
from regard.diagnosis.process.protocol import as_question, question_frame, receive
from regard.diagnosis.reading.changed_text import Change, loses_a_result
from regard.diagnosis.reading.rule_words import says_single
from regard.diagnosis.process.target import load


def names(thing):
    return [one.name for one in regard.diagnose(thing).mistakes]


class Cached:
    """The whole prompt first, with past=None; then one token per call, with the past returned."""

    always = False

    def __init__(self, dim=12, heads=3, seed=0):
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(seed).normal(
            size=(4, dim, dim)
        )

    def __call__(self, x, past=None):
        q, k, v = (
            (x @ w).reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)
            for w in (self.W_q, self.W_k, self.W_v)
        )
        if past is not None:
            k, v = (np.concatenate(pair, axis=2) for pair in zip(past, (k, v), strict=True))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if past is None or self.always:
            scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
        out = (softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        return out @ self.W_o, (k, v)


class CachedAtTheStart(Cached):
    """The whole prompt first, with past=None; then one token per call, with the past returned."""

    always = True


def test_a_cache_gets_one_token_at_a_time_where_that_is_said():
    assert regard.diagnose(Cached).verdict == "right"
    assert names(CachedAtTheStart) == ["cache_offset_ignored"]
    assert says_single("Later calls: x is one new token (B, 1, dim) and past what was returned.")
    assert not says_single("Every query attends to each token of a sequence.")


class Unsaid(Cached):
    """Give the past that was returned with the tokens that come after those."""


def test_several_tokens_follow_where_nothing_else_is_said():
    assert names(Unsaid) == ["cache_chunk_not_causal"]


class Decoder:
    """step(x): x (dim,) of the next token; forward(xs) goes through a text from an empty cache."""

    def __init__(self, dim=24, n_heads=4, seed=0):
        rng = np.random.default_rng(seed)
        self.n_heads, self.pos = n_heads, 0
        self.wq, self.wk, self.wv, self.wo = rng.normal(size=(4, dim, dim)) * dim**-0.5
        self.keys = np.zeros((128, n_heads, dim // n_heads))
        self.values = np.zeros((128, n_heads, dim // n_heads))

    def step(self, x):
        pos = self.pos
        q, self.keys[pos], self.values[pos] = (
            (w @ x).reshape(self.n_heads, -1) for w in (self.wq, self.wk, self.wv)
        )
        scores = np.einsum("hd,shd->hs", q, self.keys[: pos + 1]) / np.sqrt(q.shape[-1])
        self.pos += 1
        return self.wo @ np.einsum("hs,shd->hd", softmax(scores), self.values[: pos + 1]).ravel()

    def forward(self, xs):
        self.pos = 0
        return np.stack([self.step(x) for x in xs])


def test_a_method_that_begins_anew_is_called_once():
    assert regard.diagnose(load(f"{__file__}:Decoder.forward")).verdict == "right"


class OfPairs:
    """NumPy port of a torch layer, weights stored (out, in)."""

    def __init__(self, d_model=32, h=4):
        rng = np.random.default_rng(42)
        self.h = h
        self.linears = [(rng.normal(size=(d_model, d_model)), np.zeros(d_model)) for _ in range(4)]

    def _lin(self, i, x):
        w, b = self.linears[i]
        return x @ w.T + b

    def forward(self, query, key, value):
        q, k, v = (
            self._lin(i, one).reshape(*one.shape[:2], self.h, -1).swapaxes(1, 2)
            for i, one in enumerate((query, key, value))
        )
        out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return self._lin(3, self.merged(out))

    def merged(self, out):
        return out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)


class OfPairsReshaped(OfPairs):
    def merged(self, out):
        return out.reshape(out.shape[0], out.shape[2], -1)


def test_pairs_of_matrices_and_biases_lie_as_the_code_takes_them():
    assert regard.diagnose(OfPairs).verdict == "right"
    assert names(OfPairsReshaped) == ["heads_merged_without_transpose"]


@pytest.mark.needs("torch")
def test_a_causal_flag_may_be_for_no_mask(tmp_path):
    (path := tmp_path / "masked.py").write_text(
        "import torch.nn.functional as F\n"
        "from torch import nn\n\n\n"
        "class Masked(nn.Module):\n"
        "    def __init__(self, d_model=32, n_heads=4, causal=True):\n"
        "        super().__init__()\n"
        "        self.n_heads, self.causal = n_heads, causal\n"
        "        self.qkv = nn.Linear(d_model, 3 * d_model)\n"
        "        self.proj = nn.Linear(d_model, d_model)\n\n"
        "    def forward(self, x, attn_mask=None):\n"
        "        qkv = self.qkv(x).unflatten(-1, (3, self.n_heads, -1))\n"
        "        q, k, v = qkv.permute(2, 0, 3, 1, 4)\n"
        "        out = F.scaled_dot_product_attention(\n"
        "            q, k, v, attn_mask=attn_mask, is_causal=self.causal and attn_mask is None\n"
        "        )\n"
        "        return self.proj(out.transpose(1, 2).flatten(2))\n"
    )
    found = regard.diagnose(load(f"{path}:Masked"))
    assert found.verdict == "right"
    assert "causal if there is no mask" in found.called


OPTIONS = """
import torch
import torch.nn.functional as F
from torch import nn


class Flagged(nn.Module):
    def __init__(self, d_model=32, n_heads=4, mask_flag=False):
        super().__init__()
        self.n_heads, self.mask_flag = n_heads, mask_flag
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, attn_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.mask_flag:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Kept(nn.Module):
    def __init__(self, dim=32, n_head=4, longest=64):
        super().__init__()
        self.n_head = n_head
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.register_buffer("cache", torch.zeros(2, 4, n_head, longest, dim // n_head))
        self.register_buffer("seen", torch.tril(torch.ones(longest, longest, dtype=torch.bool)))

    def forward(self, x, input_pos):
        size = x.shape[0]
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        self.cache[0, :size, :, input_pos] = k.detach()
        self.cache[1, :size, :, input_pos] = v.detach()
        k, v = self.cache[:, :size]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen[input_pos])
        return self.wo(y.transpose(1, 2).flatten(2))


class OverQueries(nn.Module):
    def __init__(self, features=24):
        super().__init__()
        self.features = features
        self.wq, self.wk = nn.Linear(features, features), nn.Linear(features, features)
        self.wv, self.softmax = nn.Linear(features, features), nn.Softmax(dim=1)

    def forward(self, inputs):
        q, k, v = self.wq(inputs), self.wk(inputs), self.wv(inputs)
        return self.softmax(q @ k.permute(0, 2, 1) / self.features**0.5) @ v
"""


@pytest.mark.needs("torch")
def test_what_an_option_or_a_cache_leaves_out_is_no_mistake(tmp_path):
    (path := tmp_path / "options.py").write_text(OPTIONS)
    found = regard.diagnose(load(f"{path}:Flagged"))
    assert found.verdict == "right"
    assert "a mask only where self.mask_flag" in found.summary
    assert regard.diagnose(load(f"{path}:Kept")).verdict == "right"
    assert names(load(f"{path}:OverQueries")) == ["softmax_over_queries"]


def test_a_change_that_leaves_a_result_unread_is_no_cure():
    text = "def f(x, w):\n    y = x @ w\n    z = y + x\n    return z\n"
    place = text.rindex("z")
    assert loses_a_result([(1, text)], Change(0, place, place + 1, "y"))
    text = text.replace("return z", 'g["x"] = z\n    return z, g')
    place = text.rindex("g")
    assert loses_a_result([(1, text)], Change(0, place, place + 1, "y"))
    place = text.index("+")
    assert not loses_a_result([(1, text)], Change(0, place, place + 1, "-"))


def test_an_order_is_said_before_or_after_its_letters():
    for said in ("gives v, k, q in that order", "note the order: it emits v, k, q"):
        assert "".join(filter(None, ORDER_SAID.search(said).groups())) == "vkq"


def forward(inp, heads):
    """inp: (B, T, 3C) holding q | k | v."""
    q, k, v = inp.reshape(*inp.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = softmax(np.where(np.tri(inp.shape[1], dtype=bool), scores, -np.inf))
    return (weights @ v).swapaxes(1, 2).reshape(*inp.shape[:2], -1), (q, k, v, weights)


def backward(dout, kept, scaled=True):
    q, k, v, weights = kept
    dy = dout.reshape(dout.shape[0], dout.shape[1], q.shape[1], -1).swapaxes(1, 2)
    delta = (dy * (weights @ v)).sum(-1, keepdims=True)
    ds = weights * (dy @ v.swapaxes(-1, -2) - delta) / np.sqrt(q.shape[-1])
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q * (1 if scaled else np.sqrt(q.shape[-1]))
    whole = np.stack([dq, dk, weights.swapaxes(-1, -2) @ dy])
    return whole.transpose(1, 3, 0, 2, 4).reshape(*dout.shape[:2], -1)


def both(inp, dout, NH=2):
    """(out, dinp)"""
    out, kept = forward(inp, NH)
    return out, backward(dout, kept)


def both_not_scaled(inp, dout, NH=2):
    """(out, dinp)"""
    out, kept = forward(inp, NH)
    return out, backward(dout, kept, scaled=False)


def test_a_gradient_of_three_arrays_in_one_comes_apart():
    assert regard.diagnose(both).verdict == "right"
    assert names(both_not_scaled) == ["gradient_of_keys_not_scaled"]


def ring(q, k, v, n_dev=4):
    """q, k, v: (B, H, T, D), T a multiple of n_dev."""
    n = q.shape[-2] // n_dev
    rows = []
    for rank in range(n_dev):
        own = [(rank - hop) % n_dev for hop in range(n_dev)]
        keys, values = (
            np.concatenate([a[..., o * n : (o + 1) * n, :] for o in own], axis=-2) for a in (k, v)
        )
        scores = q[..., rank * n : (rank + 1) * n, :] @ keys.swapaxes(-1, -2)
        rows.append(softmax(scores / np.sqrt(q.shape[-1])) @ values)
    return np.concatenate(rows, axis=-2)


def test_a_remainder_of_a_difference_fills_nothing_up():
    assert regard.diagnose(ring).verdict == "right"


def turned(x, halves, mixed):
    d = x.shape[-1]
    angles = np.outer(np.arange(x.shape[-2]), 10000.0 ** (-np.arange(0, d, 2) / d))
    angles = np.concatenate([angles, angles], -1) if halves else np.repeat(angles, 2, -1)
    a, b = np.split(x, 2, -1) if halves != mixed else (x[..., ::2], x[..., 1::2])
    parts = [-b, a]
    other = np.concatenate(parts, -1) if halves else np.stack(parts, -1).reshape(x.shape)
    return x * np.cos(angles) + other * np.sin(angles)


@pytest.mark.parametrize("halves", [True, False])
def test_features_that_are_turned_with_those_of_the_other_convention_are_named(halves):
    def rotary(mixed):
        def f(q, k, v):
            q, k = (turned(one, halves, mixed) for one in (q, k))
            return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v

        return f

    assert regard.diagnose(rotary(False)).verdict == "right"
    assert names(rotary(True)) == ["rotary_conventions_mixed"]


def masked(q, k, v, mask, kept):
    """mask: 1 for the tokens to look at and 0 for padding."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(mask == kept, scores, -1e9)) @ v


def passes_on(q, k, v, mask):
    return masked(q, k, v, mask, 1)


def passes_on_the_other(q, k, v, mask):
    return masked(q, k, v, mask, 0)


def passes_on_the_opposite(q, k, v, hidden):
    return masked(q, k, v, hidden == 0, 1)


def test_a_mask_that_is_passed_on_means_what_its_reader_says():
    assert regard.diagnose(passes_on).verdict == "right"
    assert names(passes_on_the_other) == ["mask_inverted"]
    assert regard.diagnose(passes_on_the_opposite).verdict == "right"


def refuses_masks(q, k, v, mask=None):
    if mask is not None:
        raise RuntimeError("size of input is 0")
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def test_what_always_refuses_the_mask_that_it_takes_is_unknown():
    found = regard.diagnose(refuses_masks)
    assert found.verdict == "unknown"
    assert "; with a mask it raises an error" in found.summary
    assert not found.fragilities


def linear(x, weight, bias=None):
    return x @ weight if bias is None else x @ weight + bias


def from_torch(params, x, num_heads):
    """params: arrays of a torch module, weights (out_features, in_features).  x: (b, n, e)."""
    q, k, v = (
        linear(x, params[f"{one}.weight"], params.get(f"{one}.bias"))
        .reshape(*x.shape[:2], num_heads, -1)
        .swapaxes(1, 2)
        for one in ("q_proj", "k_proj", "v_proj")
    )
    out = (softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v).swapaxes(1, 2)
    return linear(out.reshape(x.shape), params["out_proj.weight"], params.get("out_proj.bias"))


def test_weights_that_are_said_to_be_out_and_in_are_given_so():
    assert names(from_torch) == ["weights_not_transposed"]


def test_a_number_of_numpy_may_be_an_argument():
    sent = question_frame(b"key", 3, Question("scalar", ({"scale": np.float32(0.5)},)))
    rest = bytearray(sent)

    def read(count):
        taken = bytes(rest[:count])
        del rest[:count]
        return taken

    question = as_question(receive(read, b"key", 0))
    assert question.calls == ({"scale": 0.5},)


def fills_an_empty_dictionary(offset):
    def f(x, w_q, w_k, w_v, cache=None):
        """Pass the same dictionary again for the next tokens."""
        q, k, v = x @ w_q, x @ w_k, x @ w_v
        past = 0 if not cache else cache["k"].shape[-2]
        if cache:
            k = np.concatenate([cache["k"], k], axis=-2)
            v = np.concatenate([cache["v"], v], axis=-2)
        if cache is not None:
            cache["k"], cache["v"] = k, v
        i, j = np.arange(q.shape[-2])[:, None] + offset * past, np.arange(k.shape[-2])
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        return softmax(np.where(j <= i, scores, -np.inf)) @ v

    return f


def test_a_dictionary_that_is_asked_whether_it_is_empty_is_one_at_first():
    assert regard.diagnose(fills_an_empty_dictionary(1)).verdict == "right"
    assert names(fills_an_empty_dictionary(0)) == ["cache_offset_ignored"]

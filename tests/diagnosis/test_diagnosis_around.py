"""Layers around attention, masks by their names, and backward passes of whole layers.

Normalisations and layers behind attention that are functions, gates, masks of texts and windows,
and the gradients of weights, of heads side by side, and of some inputs alone.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import regard

torch = pytest.importorskip("torch")


def defined(text: str, name: str) -> Any:
    """What a text defines, as from a file of its own."""
    import linecache

    home = f"user_code_{abs(hash(text))}"
    module = types.ModuleType(home)
    module.__file__ = f"{home}.py"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), home)
    sys.modules[home] = module
    exec(compile(text, module.__file__, "exec"), vars(module))
    return getattr(module, name)


def names(found: Any) -> list[str]:
    return [one.name for one in found.mistakes]


LAYER = """
import numpy as np

def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def layer_grads(x, Wq, Wk, Wv, Wo, dy):
    q, k, v = x @ Wq, x @ Wk, x @ Wv
    scale = q.shape[-1] ** -0.5
    p = softmax(q @ k.swapaxes(-1, -2) * scale)
    do = dy @ Wo.T
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk, dv = ds @ k * scale, ds.swapaxes(-1, -2) @ q * scale, p.swapaxes(-1, -2) @ do
    dWq, dWk, dWv = (np.einsum("ntd,nte->de", x, one) for one in (dq, dk, dv))
    dWo = np.einsum("ntd,nte->de", p @ v, dy)
    dx = dq @ Wq.T + dk @ Wk.T + dv @ Wv.T
    return dx, dWq, dWk, dWv, dWo
"""
ENTRIES = LAYER.replace(
    "    return dx, dWq, dWk, dWv, dWo",
    '    grads = {"x": dx, "Wq": dWq}\n    grads["Wk"] = dWk\n    return grads',
)


@pytest.mark.parametrize("text", [LAYER, ENTRIES])
def test_gradients_of_weights_are_judged(text: str) -> None:
    found = regard.diagnose(defined(text, "layer_grads"))
    assert found.verdict == "right"
    assert "Wk" in found.called
    wrong = text.replace("ds.swapaxes(-1, -2) @ q * scale", "ds.swapaxes(-1, -2) @ q")
    assert names(regard.diagnose(defined(wrong, "layer_grads"))) == ["gradient_of_keys_not_scaled"]


def test_a_wrong_gradient_of_one_weight_is_not_called_right() -> None:
    wrong = LAYER.replace("p @ v, dy", "v, dy")
    assert regard.diagnose(defined(wrong, "layer_grads")).verdict == "unknown"


SIDE_BY_SIDE = '''
import numpy as np

class Heads:
    def __init__(self, n_head=2):
        self.n_head = n_head

    def split(self, a):
        b, t, c = a.shape
        return a.reshape(b, t, self.n_head, c // self.n_head).swapaxes(1, 2)

    def merge(self, a):
        return a.swapaxes(1, 2).reshape(a.shape[0], a.shape[2], -1)

    def weights(self, q, k):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        return s / s.sum(-1, keepdims=True)

    def forward(self, q, k, v):
        q, k, v = map(self.split, (q, k, v))
        return self.merge(self.weights(q, k) @ v)

    def backward(self, q, k, v, dy):
        q, k, v, dy = map(self.split, (q, k, v, dy))
        p = self.weights(q, k)
        dp = dy @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return self.merge(ds @ k), self.merge(ds.swapaxes(-1, -2) @ q), self.merge(
            p.swapaxes(-1, -2) @ dy)

def packed_backward(dout, inp, n_head):
    """inp (B, T, 3C) holds q, k, v; dout (B, T, C)."""
    return np.concatenate(Heads(n_head).backward(*np.split(inp, 3, axis=-1), dout), axis=-1)
'''
LOST = SIDE_BY_SIDE.replace("(dp - (p * dp).sum(-1, keepdims=True))", "dp")


def test_heads_side_by_side_in_an_object_and_in_its_backward_pass() -> None:
    kind = defined(SIDE_BY_SIDE, "Heads")
    assert regard.diagnose(kind).verdict == "right"
    assert regard.diagnose(kind.backward).verdict == "right"
    assert names(regard.diagnose(defined(LOST, "Heads").backward)) == ["delta_forgotten"]


def test_three_arrays_in_one_and_their_gradients() -> None:
    assert regard.diagnose(defined(SIDE_BY_SIDE, "packed_backward")).verdict == "right"
    assert names(regard.diagnose(defined(LOST, "packed_backward"))) == ["delta_forgotten"]


BLOCKS = """
import numpy as np

def backward(do, q, k, v, block=4):
    T, d = q.shape
    s = np.where(np.tri(T, dtype=bool), q @ k.T / np.sqrt(d), -np.inf)
    top = s.max(1)
    lse = top + np.log(np.exp(s - top[:, None]).sum(1))
    delta = (do * (np.exp(s - lse[:, None]) @ v)).sum(1)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for j in range(0, T, block):
        kj, vj, rows = k[j:j + block], v[j:j + block], slice(j, None)
        p = np.exp(q[rows] @ kj.T / np.sqrt(d) - lse[rows, None])
        p *= np.arange(j, T)[:, None] >= np.arange(j, j + len(kj))
        dv[j:j + block] = p.T @ do[rows]
        g = p * (do[rows] @ vj.T - delta[rows, None]) / np.sqrt(d)
        dk[j:j + block] = g.T @ q[rows]
        dq[rows] += g @ kj
    return dq, dk, dv
"""


def test_a_backward_pass_of_one_length_is_not_judged_with_two() -> None:
    assert regard.diagnose(defined(BLOCKS, "backward")).verdict == "right"
    wrong = BLOCKS.replace("g.T @ q[rows]", "g.T @ q[rows] * np.sqrt(d)")
    assert names(regard.diagnose(defined(wrong, "backward"))) == ["gradient_of_keys_not_scaled"]
    half = BLOCKS.replace("return dq, dk, dv", "return dk, dq").replace(" - delta[rows, None]", "")
    assert names(regard.diagnose(defined(half, "backward"))) == ["delta_forgotten"]


class Projections(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(dim)
        self.to_q, self.to_k = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        self.to_v, self.to_out = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        self.gate = torch.nn.Parameter(torch.zeros(1))

    def split(self, rows: Any) -> Any:
        b, n, _ = rows.shape
        rows = rows.reshape(b, n, self.heads, -1).transpose(1, 2)
        return rows.reshape(b * self.heads, n, -1)

    def attend(self, x: Any, context: Any, bias: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.to_v(context)
        s = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        s = s if bias is None else s + bias
        out = (s.softmax(-1) @ self.split(v)).reshape(b, self.heads, n, -1)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class OfTexts(Projections):
    """encoder_attention_mask (B, L): 1 keep, 0 padding."""

    def forward(
        self,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
    ) -> Any:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        bias = None
        if encoder_attention_mask is not None:
            bias = (1 - encoder_attention_mask.to(hidden_states.dtype)) * -10000.0
            bias = self.prepared(bias[:, None])
        return self.attend(hidden_states, context, bias)

    def prepared(self, bias: Any) -> Any:
        return bias.repeat_interleave(self.heads, 0)


class OfOtherTexts(OfTexts):
    """encoder_attention_mask (B, L): 1 keep, 0 padding."""

    def prepared(self, bias: Any) -> Any:
        return bias.repeat(self.heads, 1, 1)


def test_masks_are_tried_whatever_they_are_named_after() -> None:
    assert regard.diagnose(OfTexts).verdict == "right"
    assert names(regard.diagnose(OfOtherTexts)) == ["mask_tiled_over_heads"]


class Gated(Projections):
    def forward(self, x: Any, media: Any, media_mask: Any = None) -> Any:
        bias = None
        if media_mask is not None:
            bias = torch.zeros(media_mask.shape, dtype=x.dtype)
            bias = bias.masked_fill(~media_mask, -1e9)[:, None].repeat_interleave(self.heads, 0)
        return x + torch.tanh(self.gate) * self.attend(self.norm(x), media, bias)


def test_a_gate_bounded_by_tanh_is_opened() -> None:
    assert regard.diagnose(Gated).verdict == "right"


class Normalised(Projections):
    """x + dropout(attention(LayerNorm(x)))"""

    def forward(self, x: Any) -> Any:
        residual = x
        x = self.norm(x)
        return residual + self.attend(x, x, None)


class NormalisedTwice(Projections):
    """x + dropout(attention(LayerNorm(x)))"""

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        residual = x
        return residual + self.attend(x, x, None)


def test_an_input_that_is_added_after_its_norm() -> None:
    assert regard.diagnose(Normalised).verdict == "right"
    assert names(regard.diagnose(NormalisedTwice)) == ["normalised_input_added"]


class Resampler(Projections):
    """x: (b, m, n, dim) of m images, latents: (b, m, l, dim)."""

    scale = 0.5

    def forward(self, x: Any, latents: Any) -> Any:
        b, m, n, _ = latents.shape
        x, latents = self.norm(x), self.norm(latents)
        both = torch.cat((x, latents), dim=-2)
        q, k, v = self.to_q(latents), self.to_k(both), self.to_v(both)
        q, k, v = (r.unflatten(-1, (self.heads, -1)).transpose(2, 3) for r in (q, k, v))
        s = q @ k.transpose(-2, -1) * q.shape[-1] ** -self.scale
        return self.to_out((s.softmax(-1) @ v).transpose(2, 3).reshape(b, m, n, -1))


class ResamplerScaled(Resampler):
    """x: (b, m, n, dim) of m images, latents: (b, m, l, dim)."""

    scale = 1.0


def test_latents_that_read_the_tokens_of_several_images() -> None:
    assert regard.diagnose(Resampler).verdict == "right"
    assert regard.diagnose(ResamplerScaled).verdict == "mistaken"


WINDOWS = '''
import torch
from torch import nn

class Windows(nn.Module):
    """x: (num_windows * B, N, C), windows of one image beside each other; mask: (num_windows, N, N)
    of 0 / -100."""

    def __init__(self, dim=16, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask[None, :, None]
            attn = attn.view(-1, self.num_heads, N, N)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))
'''


def test_masks_of_windows_with_several_images() -> None:
    assert regard.diagnose(defined(WINDOWS, "Windows")).verdict == "right"
    wrong = WINDOWS.replace("view(B_ // nW, nW,", "view(nW, B_ // nW,")
    wrong = wrong.replace("mask[None, :, None]", "mask[:, None, None]")
    found = regard.diagnose(defined(wrong, "Windows"))
    assert names(found) == ["masks_of_windows_misplaced"]


SUBLAYER = '''
import numpy as np

def layer_norm(x, g, b, eps=1e-5):
    apart = x - x.mean(-1, keepdims=True)
    return apart / np.sqrt((apart**2).mean(-1, keepdims=True) + eps) * g + b

def attend(x, p, heads):
    b, t, c = x.shape
    q, k, v = ((x @ p[n]).reshape(b, t, heads, -1).swapaxes(1, 2) for n in ("wq", "wk", "wv"))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    w = np.exp(s - s.max(-1, keepdims=True))
    w = w / w.sum(-1, keepdims=True)
    return (w @ v).swapaxes(1, 2).reshape(b, t, c) @ p["wo"]

def sublayer(x, p, n_heads=2):
    """Pre-norm: x + attention(norm(x)); p has wq, wk, wv, wo (d, d), ln_g and ln_b (d,)."""
    y = layer_norm(x, p["ln_g"], p["ln_b"])
    return x + attend(y, p, n_heads)

class Block:
    """Pre-norm transformer block."""

    def __init__(self, dim=16, heads=2):
        rng = np.random.default_rng(0)
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = rng.normal(size=(4, dim, dim)) / 4
        self.w1, self.w2 = rng.normal(size=(dim, 32)), rng.normal(size=(32, dim))
        self.gamma, self.beta = np.ones(dim), np.zeros(dim)

    def __call__(self, x):
        own = dict(wq=self.wq, wk=self.wk, wv=self.wv, wo=self.wo)
        x = x + attend(layer_norm(x, self.gamma, self.beta), own, self.heads)
        return x + np.maximum(layer_norm(x, self.gamma, self.beta) @ self.w1, 0) @ self.w2
'''


def test_norms_and_layers_behind_attention_in_functions() -> None:
    assert regard.diagnose(defined(SUBLAYER, "sublayer")).verdict == "right"
    assert regard.diagnose(defined(SUBLAYER, "Block")).verdict == "right"
    wrong = SUBLAYER.replace("return x + attend(y,", "return y + attend(y,")
    assert names(regard.diagnose(defined(wrong, "sublayer"))) == ["normalised_input_added"]
    wrong = SUBLAYER.replace("/ np.sqrt(q.shape[-1])", "/ q.shape[-1]")
    for name in ("sublayer", "Block"):
        assert regard.diagnose(defined(wrong, name)).verdict == "mistaken"


POOL = '''
import numpy as np

class Pool:
    def __init__(self, dim=16, heads=2):
        rng = np.random.default_rng(7)
        self.heads = heads
        self.query = rng.normal(size=(heads, dim // heads))
        self.w_key, self.w_value = rng.normal(size=(2, dim, dim)) / 4

    def __call__(self, words, mask=None):
        """words (batch, n, dim); mask (batch, n) of 1. = word, 0. = padding."""
        b, n, d = words.shape
        keys = (words @ self.w_key).reshape(b, n, self.heads, -1)
        s = np.einsum("hd,bnhd->bhn", self.query, keys) / np.sqrt(d // self.heads)
        if mask is not None:
            s = np.where(mask[:, None] > 0, s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        w = w / w.sum(-1, keepdims=True)
        values = (words @ self.w_value).reshape(b, n, self.heads, -1)
        return np.einsum("bhn,bnhd->bhd", w, values).reshape(b, d)
'''


def test_a_pool_that_masks_its_weights_after_the_softmax() -> None:
    assert not regard.diagnose(defined(POOL, "Pool")).mistakes
    wrong = POOL.replace("s = np.where(mask[:, None] > 0, s, -np.inf)", "late = mask[:, None]")
    wrong = wrong.replace("        if mask", "        late = 1.0\n        if mask")
    wrong = wrong.replace('bhd", w, values', 'bhd", w * late, values')
    assert names(regard.diagnose(defined(wrong, "Pool"))) == ["padding_changes_the_output"]

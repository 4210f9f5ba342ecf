"""Mistakes that show beside the usual probes: long texts in half precision, positions, maps."""

from __future__ import annotations

import math

import numpy as np
import pytest

import regard

torch = pytest.importorskip("torch")
nn = torch.nn
F = torch.nn.functional


def _names(diagnosis):
    return [one.name for one in diagnosis.mistakes]


def _is_found(wrong, name):
    diagnosis = regard.diagnose(wrong)
    assert diagnosis.verdict == "mistaken", diagnosis.summary
    assert name in _names(diagnosis), diagnosis.summary


def _is_right(right):
    diagnosis = regard.diagnose(right)
    assert diagnosis.verdict in ("right", "fragile"), diagnosis.summary


# --- positions counted in half precision ---------------------------------------------------------


def _turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _angles(counter, width):
    rates = 1e4 ** -(torch.arange(0, width, 2).float() / width)
    angles = torch.outer(counter.float(), rates)
    return torch.cat((angles, angles), -1)


class RotaryInFloat32(nn.Module):
    """Rotary attention in the dtype of its weights."""

    def __init__(self, dim=32, heads=4, dtype=torch.float32):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, dtype=dtype)
        self.out = nn.Linear(dim, dim, bias=False, dtype=dtype)

    def count(self, length, dtype):
        return torch.arange(length, dtype=torch.float32)

    def forward(self, x):
        batch, length, _ = x.shape
        x = x.to(self.qkv.weight.dtype)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        angles = _angles(self.count(length, x.dtype), q.shape[-1])
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class RotaryInItsType(RotaryInFloat32):
    """Counts in the type of its input."""

    def count(self, length, dtype):
        return torch.arange(length, dtype=dtype)


class CachedInFloat32(nn.Module):
    """Tables of cosines that the constructor makes; weights in bfloat16 by default."""

    KIND = torch.float32

    def __init__(self, dim=32, heads=4, longest=512, dtype=torch.bfloat16):
        super().__init__()
        self.heads, self.dtype = heads, dtype
        self.q_proj = nn.Linear(dim, dim, dtype=dtype)
        self.k_proj = nn.Linear(dim, dim, dtype=dtype)
        self.v_proj = nn.Linear(dim, dim, dtype=dtype)
        self.o_proj = nn.Linear(dim, dim, dtype=dtype)
        counter = torch.arange(longest, dtype=self.KIND or dtype)
        angles = _angles(counter, dim // heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        h = x.to(self.dtype)
        own = [
            one(h).view(batch, length, self.heads, -1).transpose(1, 2).float()
            for one in (self.q_proj, self.k_proj, self.v_proj)
        ]
        cos, sin = self.cos[:length], self.sin[:length]
        q, k, v = _turned(own[0], cos, sin), _turned(own[1], cos, sin), own[2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        y = y.transpose(1, 2).reshape(batch, length, width)
        return self.o_proj(y.to(self.dtype)).to(x.dtype)


class CachedInItsType(CachedInFloat32):
    """The counter has the type of the weights."""

    KIND = None


@pytest.mark.parametrize("wrong", [RotaryInItsType, CachedInItsType])
def test_positions_of_a_module_that_are_counted_in_bfloat16_are_found(wrong):
    _is_found(wrong, "positions_rounded")


@pytest.mark.parametrize("right", [RotaryInFloat32, CachedInFloat32])
def test_positions_of_a_module_in_float32_are_right_whatever_its_weights(right):
    _is_right(right)


# --- positions of queries and of a context apart -------------------------------------------------


class OfObjects(nn.Module):
    """Object queries look at an image; both have positions."""

    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.nhead = nhead
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def attend(self, query, key, value):
        q, k, v = (
            one.unflatten(-1, (self.nhead, -1)).transpose(1, 2)
            for one in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def forward(self, tgt, memory, pos=None, query_pos=None):
        query = tgt if query_pos is None else tgt + query_pos
        key = memory if pos is None else memory + pos
        return self.attend(query, key, memory)


class OfObjectsWrong(OfObjects):
    """The values have positions."""

    def forward(self, tgt, memory, pos=None, query_pos=None):
        query = tgt if query_pos is None else tgt + query_pos
        key = memory if pos is None else memory + pos
        return self.attend(query, key, key)


class TwoWay(OfObjects):
    """Points look at an image, as in a decoder of masks."""

    def forward(self, queries, keys, query_pe=None, key_pe=None):
        q = queries if query_pe is None else queries + query_pe
        k = keys if key_pe is None else keys + key_pe
        return self.attend(q, k, keys)


def test_positions_that_reach_the_values_of_a_context_are_found():
    _is_found(OfObjectsWrong, "positions_in_values")


@pytest.mark.parametrize("right", [OfObjects, TwoWay])
def test_positions_of_queries_and_keys_alone_are_right(right):
    assert "positions_in_values" not in _names(regard.diagnose(right))


# --- biases by rows and by columns of a square map -----------------------------------------------


class Decomposed(nn.Module):
    """A map (B, H, W, C) with a table of vectors for rows, and one for columns."""

    def __init__(self, dim=32, num_heads=4, input_size=4):
        super().__init__()
        self.num_heads, self.input_size = num_heads, input_size
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * input_size - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * input_size - 1, dim // num_heads))

    def places(self, of_rows, of_columns):
        return of_rows[..., :, None] + of_columns[..., None, :]

    def forward(self, x):
        B, H, W, C = x.shape
        n, size = self.num_heads, self.input_size
        q, k, v = self.qkv(x).reshape(B, H * W, 3, n, -1).permute(2, 0, 3, 1, 4)
        apart = torch.arange(size)[:, None] - torch.arange(size) + size - 1
        image = q.reshape(B, n, H, W, -1)
        of_rows = torch.einsum("bnhwc,hkc->bnhwk", image, self.rel_pos_h[apart])
        of_columns = torch.einsum("bnhwc,wkc->bnhwk", image, self.rel_pos_w[apart])
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores + self.places(of_rows, of_columns).reshape(B, n, H * W, H * W)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, H, W, C)
        return self.proj(y)


class DecomposedWrong(Decomposed):
    """The terms of rows are added along columns."""

    def places(self, of_rows, of_columns):
        return of_rows[..., None, :] + of_columns[..., :, None]


def test_biases_of_rows_and_columns_that_are_exchanged_are_found():
    _is_found(DecomposedWrong, "relative_bias_misplaced")
    _is_right(Decomposed)


# --- a mask of ones that becomes an additive one -------------------------------------------------


class Padded(nn.Module):
    """attention_mask: (batch, seq), 1 for tokens and 0 for padding; it becomes an additive mask."""

    LOW = -1e9

    def __init__(self, hidden_size=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, attention_mask=None):
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * self.LOW
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class PaddedWrong(Padded):
    """attention_mask: (batch, seq), 1 for tokens and 0 for padding; it becomes an additive mask."""

    LOW = -1e-9

    def forward(self, x, attention_mask=None):
        q, k, v = (
            one(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * self.LOW
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def additive(q, k, v, mask=None):
    """mask (L, S): 0 where allowed, -inf elsewhere; it is added, and 1 - mask is of no use."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_a_mask_of_ones_that_hides_by_a_tiny_number_hides_nothing():
    _is_found(PaddedWrong, "mask_ignored")


@pytest.mark.parametrize("right", [Padded, additive])
def test_masks_that_hide_by_large_numbers_are_right(right):
    _is_right(right)


# --- channels before points ----------------------------------------------------------------------


class OfPoints:
    """All arrays are (B, C, N); every projection is a convolution of width 1, weight (out, in)."""

    def __init__(self, heads=4, width=32, seed=0):
        rng = np.random.default_rng(seed)
        self.dim, self.num_heads = width // heads, heads
        draw = rng.standard_normal
        self.proj = [(draw((width, width)), draw(width)) for _ in range(3)]
        self.merge = (draw((width, width)), draw(width))

    @staticmethod
    def conv(x, weight, bias):
        return np.einsum("oc,bcn->bon", weight, x) + bias[:, None]

    def __call__(self, query, key, value):
        b, given = query.shape[0], (query, key, value)
        q, k, v = (
            self.conv(x, *own).reshape(b, self.dim, self.num_heads, -1)
            for own, x in zip(self.proj, given, strict=True)
        )
        scores = np.einsum("bdhn,bdhm->bhnm", q, k) / self.dim**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        out = np.einsum("bhnm,bdhm->bdhn", weights, v)
        return self.conv(out.reshape(b, self.dim * self.num_heads, -1), *self.merge)


class OfPointsWrong(OfPoints):
    """All arrays are (B, C, N); every projection is a convolution of width 1, weight (out, in)."""

    def __call__(self, query, key, value):
        b, given = query.shape[0], (query, key, value)
        q, k, v = (
            self.conv(x, *own).reshape(b, self.dim, self.num_heads, -1)
            for own, x in zip(self.proj, given, strict=True)
        )
        scores = np.einsum("bdhn,bdhm->bhnm", q, k) / self.num_heads**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        out = np.einsum("bhnm,bdhm->bdhn", weights, v)
        return self.conv(out.reshape(b, self.dim * self.num_heads, -1), *self.merge)


class GroupNorm32(nn.GroupNorm):
    """In float32."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Diffusion(nn.Module):
    """x: [N x C x ...]."""

    def __init__(self, channels=32, num_heads=2, groups=8):
        super().__init__()
        self.num_heads = num_heads
        self.norm = GroupNorm32(groups, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x)).reshape(b * self.num_heads, -1, x.shape[-1])
        q, k, v = qkv.chunk(3, 1)
        scale = q.shape[1] ** -0.25
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj_out(h)).reshape(b, c, *spatial)


@pytest.mark.parametrize("right", [OfPoints, Diffusion])
def test_channels_before_points_are_called(right):
    _is_right(right)


def test_a_wrong_scale_of_channels_before_points_is_found():
    assert regard.diagnose(OfPointsWrong).verdict == "mistaken"


# --- a table of displacements as an argument -----------------------------------------------------


def _displacements(h, w):
    ys, xs = np.divmod(np.arange(h * w), w)
    return ys[:, None] - ys + h - 1, xs[:, None] - xs + w - 1


def _of_window(x, w_qkv, w_proj, added, heads):
    n, length, c = x.shape
    q, k, v = np.moveaxis((x @ w_qkv).reshape(n, length, 3, heads, -1), (2, 3), (0, 2))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(n, length, c) @ w_proj


def window(x, w_qkv, w_proj, table, window=(3, 3), heads=2):
    """x: (windows, tokens, c); table: ((2h-1)*(2w-1), heads), one row for each index."""
    down, across = _displacements(*window)
    index = down * (2 * window[1] - 1) + across
    n, length, c = x.shape
    q, k, v = np.moveaxis((x @ w_qkv).reshape(n, length, 3, heads, -1), (2, 3), (0, 2))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + table[index].transpose(2, 0, 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(1, 2).reshape(n, length, c) @ w_proj


def window_confused(x, w_qkv, w_proj, table, window=(3, 3), heads=2):
    """x: (windows, tokens, c); table: ((2h-1)*(2w-1), heads), one row for each index."""
    index = sum(_displacements(*window))
    return _of_window(x, w_qkv, w_proj, table[index].transpose(2, 0, 1), heads)


def window_of_side(x, w_qkv, w_proj, bias_table, window_size, heads):
    """x: (windows, tokens, c); bias_table: (heads, rows), indexed by both displacements."""
    down, across = _displacements(window_size, window_size)
    added = bias_table[:, down * (2 * window_size - 1) + across]
    return _of_window(x, w_qkv, w_proj, added, heads)


@pytest.mark.parametrize("right", [window, window_of_side])
def test_a_function_of_windows_gets_a_table(right):
    _is_right(right)


def test_displacements_that_share_a_row_of_the_table_are_found():
    _is_found(window_confused, "relative_bias_misplaced")


# --- one query of a decoder for each text --------------------------------------------------------


class OfDecoder(nn.Module):
    """hidden: the last state (1, batch, dim); encoder_outputs: (max_length, batch, dim)."""

    def __init__(self, method="dot", hidden_size=16):
        super().__init__()
        if method not in ["dot"]:
            raise ValueError(method)

    def forward(self, hidden, encoder_outputs):
        energies = torch.sum(hidden * encoder_outputs, dim=2)
        weights = F.softmax(energies.t(), dim=1).unsqueeze(1)
        return weights.bmm(encoder_outputs.transpose(0, 1))


class OfDecoderWrong(OfDecoder):
    """hidden: the last state (1, batch, dim); encoder_outputs: (max_length, batch, dim)."""

    def forward(self, hidden, encoder_outputs):
        energies = torch.sum(hidden * encoder_outputs, dim=2)
        weights = F.softmax(energies, dim=1).t().unsqueeze(1)
        return weights.bmm(encoder_outputs.transpose(0, 1))


def test_a_softmax_over_the_texts_of_a_batch_is_found():
    _is_found(OfDecoderWrong, "batch_elements_mixed")
    assert regard.diagnose(OfDecoder).verdict != "mistaken"

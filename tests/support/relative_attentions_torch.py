"""Layers that add numbers to their scores by place: right, or with a mistake."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class WindowTable(nn.Module):
    """A learned number for each displacement in a window, with a mask of windows to add."""

    def __init__(self, dim, window_size, num_heads, misplaced=False, order=(2, 0, 1)):
        super().__init__()
        self.window_size, self.num_heads, self.misplaced = window_size, num_heads, misplaced
        self.order = order
        rows, columns = window_size
        self.relative_bias_table = nn.Parameter(
            torch.zeros((2 * rows - 1) * (2 * columns - 1), num_heads)
        )
        y, x = (
            one.flatten()
            for one in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        )
        apart = y[:, None] - y + rows - 1, x[:, None] - x + columns - 1
        self.register_buffer("relative_index", apart[0] * (2 * columns - 1) + apart[1])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        shape = B, N, 3, self.num_heads, C // self.num_heads
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = self.relative_bias_table[self.relative_index.view(-1)]
        bias = bias.view(-1, N, N) if self.misplaced else bias.view(N, N, -1).permute(self.order)
        attn = attn + bias
        if mask is not None:  # (windows, N, N)
            attn = attn.view(-1, len(mask), self.num_heads, N, N) + mask[:, None]
            attn = attn.view(B, self.num_heads, N, N)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class Buckets(nn.Module):
    """Unscaled scores, as in T5, a learned number for each distance, and a softmax in float32."""

    def __init__(self, d_model=24, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(9, num_heads)

    def forward(self, hidden_states, mask=None):
        b, n, m = hidden_states.shape
        parts = (one(hidden_states) for one in (self.q, self.k, self.v))
        q, k, v = (one.view(b, n, self.num_heads, -1).transpose(1, 2) for one in parts)
        places = torch.arange(n)
        bias = self.relative_attention_bias((places - places[:, None]).clamp(-4, 4) + 4)
        scores = q @ k.mT + bias.permute(2, 0, 1)
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, m))


class SidedBuckets(Buckets):
    """Buckets as T5 has them: the upper half for keys after the query; `sign` turns the sides."""

    def __init__(self, d_model=24, num_heads=4, sign=1):
        super().__init__(d_model, num_heads)
        self.relative_attention_bias, self.sign = nn.Embedding(32, num_heads), sign

    def forward(self, hidden_states):
        b, n, m = hidden_states.shape
        parts = (one(hidden_states) for one in (self.q, self.k, self.v))
        q, k, v = (one.view(b, n, self.num_heads, -1).transpose(1, 2) for one in parts)
        apart = self.sign * (torch.arange(n) - torch.arange(n)[:, None])
        buckets = 16 * (apart > 0) + apart.abs().clamp(max=15)
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1)
        weights = (q @ k.mT + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, m))


class CachedBuckets(Buckets):
    """As in T5, causal, after keys and values of earlier calls; `restarts` does not count them."""

    def __init__(self, d_model=24, num_heads=4, restarts=False):
        super().__init__(d_model, num_heads)
        self.restarts = restarts

    def forward(self, hidden_states, past_key_value=None):
        b, n, m = hidden_states.shape
        parts = (one(hidden_states) for one in (self.q, self.k, self.v))
        q, k, v = (one.view(b, n, self.num_heads, -1).transpose(1, 2) for one in parts)
        if past_key_value is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_key_value, (k, v), strict=True))
        past = k.shape[2] - n
        apart = torch.arange(k.shape[2]) - torch.arange(n)[:, None]
        later = apart > past
        apart = apart if self.restarts else apart - past
        bias = self.relative_attention_bias(apart.clamp(-4, 4) + 4).permute(2, 0, 1)
        scores = (q @ k.mT + bias).masked_fill(later, -torch.inf)
        weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, m)), (k, v)


class ShiftedRows(nn.Module):
    """A vector for each distance that meets the query, lined up by the shift of Transformer-XL."""

    def __init__(self, d_model=24, num_heads=4, padded_right=False):
        super().__init__()
        self.num_heads, self.padded_right = num_heads, padded_right
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.rel_rows = nn.Parameter(
            torch.randn(512, d_model // num_heads)
        )  # the last is of distance 0

    def forward(self, x):
        b, n, m = x.shape
        parts = (one(x) for one in (self.query, self.key, self.value))
        q, k, v = (one.view(b, n, self.num_heads, -1).transpose(1, 2) for one in parts)
        rel = F.pad(q @ self.rel_rows[-n:].T, (0, 1) if self.padded_right else (1, 0))
        rel = rel.reshape(b, self.num_heads, n + 1, n)[:, :, 1:]
        scores = (q @ k.mT + rel) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(n, n).triu(1) > 0, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, m)


class Disentangled(nn.Module):
    """Vectors for distances that meet the query and the key, and a root for three terms."""

    def __init__(self, hidden_size=24, num_heads=4, transposed=True):
        super().__init__()
        self.num_heads, self.transposed = num_heads, transposed
        self.query_proj, self.key_proj, self.value_proj = (
            nn.Linear(hidden_size, hidden_size) for _ in range(3)
        )
        width = hidden_size // num_heads
        self.rel_of_keys, self.rel_of_queries = (
            nn.Parameter(torch.randn(8, width)) for _ in range(2)
        )

    def forward(self, hidden_states):
        b, n, m = hidden_states.shape
        parts = (one(hidden_states) for one in (self.query_proj, self.key_proj, self.value_proj))
        q, k, v = (one.view(b, n, self.num_heads, -1).transpose(1, 2) for one in parts)
        places = torch.arange(n)
        apart = (places[:, None] - places + 4).clamp(0, 7).expand(b, self.num_heads, n, n)
        c2p = torch.gather(q @ self.rel_of_keys.T, -1, apart)
        p2c = torch.gather(k @ self.rel_of_queries.T, -1, apart)
        scores = q @ k.mT + c2p + (p2c.mT if self.transposed else p2c)
        weights = torch.softmax(scores / math.sqrt(3 * q.shape[-1]), -1)
        return (weights @ v).transpose(1, 2).reshape(b, n, m)

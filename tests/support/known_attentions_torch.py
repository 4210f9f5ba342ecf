"""Layers in the idioms of well-known projects, each in words of its own: all are right."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class GPT2(nn.Module):
    """Queries, keys and values in one projection, split along the width."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            one.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for one in self.c_attn(x).split(c, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MinGPT(nn.Module):
    """Three projections, and a triangle kept as a buffer."""

    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.n_head = n_head
        self.key, self.query = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)
        self.value, self.proj = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            layer(x).view(b, t, self.n_head, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        att = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        att = att.masked_fill(self.mask[:t, :t] == 0, float("-inf")).softmax(dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(b, t, c))


class Wrapper(nn.Module):
    """torch's own layer inside another one."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x):
        out, _ = self.attn(x, x, x, need_weights=False)
        return out


class Perceiver(nn.Module):
    """Latents attend to an array of inputs; keys and values in one projection without a bias."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context):
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


LAYERS = (
    lambda: GPT2(8, 2),
    lambda: MinGPT(8, 2, 16),
    lambda: Wrapper(8, 2),
    lambda: Perceiver(8, 2),
)

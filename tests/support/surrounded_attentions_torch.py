"""Layers with more around attention, or with unusual inputs; of torch.

Each is right where SCALED is true, and otherwise lacks the scale.
"""

from __future__ import annotations

import torch
from torch import nn

SCALED = True


def scale_of(width):
    return width**-0.5 if SCALED else 1.0


def attend(q, k, v):
    return torch.softmax(q @ k.mT * scale_of(q.shape[-1]), dim=-1) @ v


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Fused(nn.Module):
    """The start of the others: one projection, and one for the output."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def parts(self, x):
        b, t, _ = x.shape
        return self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

    def merged(self, y):
        return self.out(y.transpose(1, 2).flatten(2))


class NormBefore(Fused):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.merged(attend(*self.parts(self.norm(x))))


class NormOfQueriesAndKeys(Fused):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // heads), nn.LayerNorm(dim // heads)

    def forward(self, x):
        q, k, v = self.parts(x)
        return self.merged(attend(self.q_norm(q), self.k_norm(k), v))


class Gated(Fused):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        y = attend(*self.parts(x)).transpose(1, 2).flatten(2)
        return self.out(y * torch.sigmoid(self.gate(x)))


class ResidualBlock(Fused):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.merged(attend(*self.parts(self.norm(x))))


class WithTables(Fused):
    def forward(self, x, position_embeddings):
        cos, sin = (one.unsqueeze(1) for one in position_embeddings)
        q, k, v = self.parts(x)
        return self.merged(attend(rotate(q, cos, sin), rotate(k, cos, sin), v))


class WithComplexNumbers(Fused):
    def forward(self, x, freqs_cis):
        q, k, v = self.parts(x)

        def turned(t):
            pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * freqs_cis).flatten(-2)

        return self.merged(attend(turned(q), turned(k), v))


class Bottleneck(nn.Module):
    """Keys and values through a few columns."""

    def __init__(self, dim=32, n_heads=4, kv_rank=12):
        super().__init__()
        self.n_heads, self.each = n_heads, dim // n_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_rank, bias=False)
        self.wkv_b = nn.Linear(kv_rank, 2 * dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        kv = self.wkv_b(self.wkv_a(x)).view(b, t, self.n_heads, -1).transpose(1, 2)
        return self.wo(attend(q, *kv.chunk(2, -1)).transpose(1, 2).flatten(2))


class OverImages(nn.Module):
    """Over feature maps (b, c, h, w), with its input added, by a learned share."""

    def __init__(self, in_dim=16):
        super().__init__()
        self.query_conv = nn.Conv2d(in_dim, in_dim // 2, 1)
        self.key_conv = nn.Conv2d(in_dim, in_dim // 2, 1)
        self.value_conv = nn.Conv2d(in_dim, in_dim, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            one(x).flatten(2).mT for one in (self.query_conv, self.key_conv, self.value_conv)
        )
        return x + self.gamma * attend(q, k, v).mT.reshape(b, c, h, w)


class LearnedTemperature(Fused):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.scale = nn.Parameter(torch.tensor(scale_of(dim // heads)))

    def forward(self, x):
        q, k, v = self.parts(x)
        return self.merged(torch.softmax(q @ k.mT * self.scale, -1) @ v)


class WithSinks(Fused):
    """A learned logit of each head takes part in softmax, without a value."""

    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        q, k, v = self.parts(x)
        scores = q @ k.mT * scale_of(q.shape[-1])
        sinks = self.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        return self.merged(weights @ v)


class FeedForwardBehind(ResidualBlock):
    def __init__(self, dim=32, heads=4):
        super().__init__(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = super().forward(x)
        return x + self.ff(x)


class ConstantsOfFloat32(Fused):
    """Only numbers of float32 can hold its lowest score."""

    def forward(self, x):
        q, k, v = self.parts(x)
        scores = q @ k.mT * scale_of(q.shape[-1])
        low = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min).triu(1)
        return self.merged(torch.softmax(scores + low, -1) @ v)


class KeepsItsContext(nn.Module):
    """Projects what it reads only once, unless it is told that it is `fresh`."""

    def __init__(self, dim=32, heads=4, fresh=False):
        super().__init__()
        self.heads, self.fresh = heads, fresh
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)
        self.kept = None

    def forward(self, x, context):
        if self.fresh or self.kept is None or self.kept.shape[1] != context.shape[1]:
            self.kept = self.to_kv(context)
        parts = (self.to_q(x), *self.kept.chunk(2, -1))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        return self.to_out(attend(q, k, v).transpose(1, 2).flatten(2))


class LearnedDistances(Fused):
    """A learned number for each distance; `same` looks the same one up for all of them."""

    def __init__(self, dim=32, heads=4, same=True):
        super().__init__(dim, heads)
        self.relative_bias, self.same = nn.Embedding(16, heads), same

    def forward(self, x):
        q, k, v = self.parts(x)
        apart = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        bias = self.relative_bias(apart.clamp(0, 0 if self.same else 15)).permute(2, 0, 1)
        return self.merged(torch.softmax(q @ k.mT * scale_of(q.shape[-1]) + bias, -1) @ v)


ALL = (
    WithSinks,
    FeedForwardBehind,
    ConstantsOfFloat32,
    NormBefore,
    NormOfQueriesAndKeys,
    Gated,
    ResidualBlock,
    WithTables,
    WithComplexNumbers,
    Bottleneck,
    OverImages,
    LearnedTemperature,
)

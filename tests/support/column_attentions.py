"""Attention in torch over columns (B, C, N), whose heads take turns in the channels."""

import torch
from torch import nn


class Matcher(nn.Module):
    """Descriptors (B, C, N) read those of another image, with convolutions of width 1."""

    forgets = False

    def __init__(self, feature_dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.dim = num_heads, feature_dim // num_heads
        self.merge = nn.Conv1d(feature_dim, feature_dim, 1)
        self.proj = nn.ModuleList(nn.Conv1d(feature_dim, feature_dim, 1) for _ in range(3))

    def forward(self, query, key, value):
        batch = len(query)
        q, k, v = (
            layer(x).view(batch, self.dim, self.num_heads, -1)
            for layer, x in zip(self.proj, (query, key, value), strict=True)
        )
        s = torch.einsum("bdhn,bdhm->bhnm", q, k) / (1.0 if self.forgets else self.dim**0.5)
        out = torch.einsum("bhnm,bdhm->bdhn", s.softmax(-1), v)
        return self.merge(out.reshape(batch, self.dim * self.num_heads, -1))


class ForgetfulMatcher(Matcher):
    forgets = True

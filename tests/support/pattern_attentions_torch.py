"""Layers in torch with parts beside attention, or with another score, right or with a mistake."""

import torch
import torch.nn.functional as F
from torch import nn


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Beside(nn.Module):
    """Causal; learned keys of no token in front, which all see, and heads mixed twice."""

    def __init__(self, dim=24, heads=4, first=False, count=2):
        super().__init__()
        self.heads, self.first, self.count = heads, first, count
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.mem_k = nn.Parameter(torch.randn(heads, count, dim // heads))
        self.mem_v = nn.Parameter(torch.randn(heads, count, dim // heads))
        self.mix_before = nn.Linear(heads, heads, bias=False)
        self.mix_after = nn.Linear(heads, heads, bias=False)

    def forward(self, x):
        q, k, v = (split(one(x), self.heads) for one in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (
            torch.cat([own.expand(len(x), -1, -1, -1), one], 2)
            for own, one in ((self.mem_k, k), (self.mem_v, v))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hidden = F.pad(hidden, (self.count, 0))
        if self.first:
            scores = scores.masked_fill(hidden, -1e9)
        scores = self.mix_before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if not self.first:
            scores = scores.masked_fill(hidden, -1e9)
        weights = self.mix_after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Settling(nn.Module):
    """A block of a Set Transformer: the scores are divided by the root of the full width."""

    def __init__(self, dim=24, num_heads=4, per_head=False):
        super().__init__()
        self.heads = num_heads
        self.width = dim // num_heads if per_head else dim
        self.fc_q = nn.Linear(dim, dim)
        self.fc_k = nn.Linear(dim, dim)
        self.fc_v = nn.Linear(dim, dim)
        self.fc_o = nn.Linear(dim, dim)

    def forward(self, Q, K):
        q, k, v = (
            split(one(x), self.heads) for one, x in ((self.fc_q, Q), (self.fc_k, K), (self.fc_v, K))
        )
        weights = (q @ k.mT / self.width**0.5).softmax(-1)
        out = (q + weights.matmul(v)).transpose(1, 2).flatten(2)
        return out + F.relu(self.fc_o(out))


class Alibi(nn.Module):
    """Causal, with a slope times the place of the key; columns of one head after another's."""

    def __init__(self, hidden_size=24, n_head=4, by_query=False):
        super().__init__()
        self.n_head, self.by_query = n_head, by_query
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, residual):
        B, T, _ = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(B, T, self.n_head, 3, -1).unbind(3)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.n_head + 1) / self.n_head)
        places = torch.arange(T)[:, None] if self.by_query else torch.arange(T)[None]
        alibi = (slopes[:, None, None] * places).to(q)
        scores = alibi + q @ k.mT * q.shape[-1] ** -0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return residual + self.dense((weights @ v).transpose(1, 2).flatten(2))


class Between(nn.Module):
    """Cross-covariance attention: channels attend to channels, by cosines along the tokens."""

    def __init__(self, dim=24, num_heads=4, axis=-1, softmax=-1):
        super().__init__()
        self.num_heads, self.axis, self.softmax = num_heads, axis, softmax
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 4, 1)
        scores = F.normalize(q, dim=self.axis) @ F.normalize(k, dim=-1).mT * self.temperature
        out = scores.softmax(self.softmax) @ v
        return self.proj(out.permute(0, 3, 1, 2).reshape(B, N, C))


class Images(nn.Module):
    """Efficient attention over the pixels of images (b, c, h, w), without a division."""

    def __init__(self, dim=24, heads=4, of_queries=-2):
        super().__init__()
        self.heads, self.of_queries = heads, of_queries
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1, bias=False)
        self.to_out = nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (one.reshape(b, self.heads, -1, h * w) for one in self.to_qkv(x).chunk(3, 1))
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        out = torch.einsum("bhde,bhdn->bhen", context, q.softmax(self.of_queries))
        return self.to_out(out.reshape(b, c, h, w))


class Shifting(nn.Module):
    """Relative positions as a Conformer's; `last`: the shift drops the last row of the padded."""

    def __init__(self, n_feat=24, n_head=4, last=False):
        super().__init__()
        self.h, self.last = n_head, last
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)

    def rel_shift(self, x):
        b, h, t, n = x.shape
        padded = F.pad(x, (1, 0)).view(b, h, n + 1, t)
        x = padded[:, :, :-1] if self.last else padded[:, :, 1:]
        return x.reshape(b, h, t, n)[..., :t]

    def forward(self, x):
        t, width = x.shape[1:]
        q, k, v = (split(one(x), self.h) for one in (self.linear_q, self.linear_k, self.linear_v))
        places = torch.arange(t - 1, -t, -1.0)[:, None]
        angles = places * 10000 ** (-torch.arange(0, width, 2.0) / width)
        rows = torch.cat([angles.sin(), angles.cos()], -1).to(x)
        p = split(self.linear_pos(rows)[None], self.h)
        scores = (q @ k.mT + self.rel_shift(q @ p.mT)) / q.shape[-1] ** 0.5
        return self.linear_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

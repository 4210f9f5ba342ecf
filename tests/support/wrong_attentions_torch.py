"""Wrong attentions as people write them, in torch: functions and modules.

Written without a look at the catalogue, and shares no code with the package or with the NumPy ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

SCALES = {
    "no_scale": lambda q, k: 1.0,
    "scale_by_width": lambda q, k: 1.0 / q.size(-1),
    "scale_multiplied": lambda q, k: math.sqrt(q.size(-1)),
    "scale_by_model_width": lambda q, k: (q.size(-1) * (q.size(-3) if q.dim() > 2 else 1)) ** -0.5,
    "scale_by_keys": lambda q, k: k.size(-2) ** -0.5,
    "scale_by_queries": lambda q, k: q.size(-2) ** -0.5,
    "width_from_axis_1": lambda q, k: q.size(1) ** -0.5,
    "scale_after_softmax": lambda q, k: 1.0,
}
SOFTMAXES = {
    "softmax_over_queries": lambda s: F.softmax(s, dim=-2),
    "softmax_over_axis_1": lambda s: torch.softmax(s, dim=1),
    "softmax_over_batch": lambda s: torch.softmax(s, dim=0),
    "softmax_over_everything": lambda s: F.softmax(s.flatten(-2), dim=-1).view_as(s),
    "softmax_over_heads_and_keys": lambda s: (
        F.softmax(s.transpose(-3, -2).flatten(-2), dim=-1)
        .unflatten(-1, (s.size(-3), s.size(-1)))
        .transpose(-3, -2)
        if s.dim() > 2
        else s.softmax(-1)
    ),
    "softmax_twice": lambda s: s.softmax(-1).softmax(-1),
    "log_softmax": lambda s: F.log_softmax(s, dim=-1),
    "no_softmax": lambda s: s,
    "sigmoid": torch.sigmoid,
    "exp_missing": lambda s: s / s.sum(dim=-1, keepdim=True),
    "unnormalised": torch.exp,
    "hard_maximum": lambda s: F.one_hot(s.argmax(-1), s.size(-1)).to(s.dtype),
    "one_in_the_denominator": lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    "epsilon_in_the_denominator": lambda s: s.exp() / (s.exp().sum(-1, keepdim=True) + 1e-5),
    "no_maximum_subtracted": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    "global_maximum": lambda s: (s - s.max()).exp() / (s - s.max()).exp().sum(-1, keepdim=True),
    "computed_in_float32": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "computed_in_half_precision": lambda s: s.half().softmax(-1).to(s.dtype),
}
MASKS = {
    "mask_ignored": lambda s, m: s,
    "mask_inverted": lambda s, m: s.masked_fill(m, float("-inf")),
    "mask_multiplied": lambda s, m: s.mul(m),
    "mask_added_as_ones": lambda s, m: s.add(m),
    "mask_transposed": lambda s, m: s.masked_fill(
        ~(m.mT if m.dim() > 1 and m.size(-1) == m.size(-2) else m), float("-inf")
    ),
    "mask_subtracted_small": lambda s, m: s.masked_fill(~m, -1.0),
    "mask_after_softmax": lambda s, m: s,
    "mask_times_infinity": lambda s, m: s + (~m).to(s.dtype) * float("-inf"),
    "mask_constant_1e4": lambda s, m: s.masked_fill(~m, -1e4),
}
TRIANGLES = {
    "causal_ignored": lambda n, m: torch.zeros(n, m, dtype=torch.bool),
    "causal_off_by_one": lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(m - n + 2),
    "causal_hides_own_key": lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(m - n),
    "causal_inverted": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n),
    "causal_reversed": lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(m - n - 1),
    "causal_aligned_at_start": lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(1),
}


def one_of(wrong, table, default):
    return table.get(wrong, default)


def attention(wrong=None):
    def f(q, k, v, mask=None, is_causal=False):
        scores = torch.einsum("...id,...jd->...ij", q, k)
        if wrong == "queries_and_keys_swapped":
            scores = scores.mT
        scores = scores * one_of(wrong, SCALES, lambda q, k: q.size(-1) ** -0.5)(q, k)
        if mask is not None:
            hide = one_of(wrong, MASKS, lambda s, m: s.masked_fill(~m, float("-inf")))
            scores = hide(scores, mask)
        if is_causal:
            n, m = scores.shape[-2:]
            future = one_of(
                wrong, TRIANGLES, lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
            )(n, m)
            scores = scores.masked_fill(future, float("-inf"))
        weights = one_of(wrong, SOFTMAXES, lambda s: s.softmax(-1))(scores)
        if wrong == "mask_after_softmax" and mask is not None:
            weights = weights * mask
        if wrong == "scale_after_softmax":
            weights = weights / q.size(-1) ** 0.5
        if wrong == "weights_transposed":
            weights = weights.mT
        return weights @ (k if wrong == "keys_for_values" else v)

    return f


class MultiHead(nn.Module):
    """Self-attention on (B, L, M) with four Linear layers."""

    def __init__(self, wrong=None, d_model=6, num_heads=2):
        super().__init__()
        self.wrong, self.num_heads = wrong, num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def linear(self, layer, x, lost):
        weight = layer.weight.T if self.wrong == "weights_not_transposed" else layer.weight
        return F.linear(x, weight, None if lost else layer.bias)

    def forward(self, x, mask=None, causal=False):
        wrong, h = self.wrong, self.num_heads
        b, n, m = x.shape
        q = self.linear(self.q_proj, x, wrong in ("b_q_lost", "biases_lost", "all_biases_lost"))
        keys = self.q_proj if wrong == "keys_projected_by_W_q" else self.k_proj
        k = self.linear(keys, x, wrong in ("b_k_lost", "biases_lost", "all_biases_lost"))
        v = self.linear(self.v_proj, x, wrong in ("b_v_lost", "biases_lost", "all_biases_lost"))
        if wrong == "heads_split_without_transpose":
            q, k, v = (t.reshape(b, h, n, m // h) for t in (q, k, v))
        else:
            q, k, v = (t.view(b, n, h, m // h).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(m if wrong == "scale_by_model_width" else m // h)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        if causal:
            future = torch.triu(torch.ones(n, n), diagonal=1).bool()
            scores = scores.masked_fill(future, float("-inf"))
        if wrong == "softmax_over_heads":
            z = scores.softmax(dim=1) @ v
        else:
            z = scores.softmax(dim=-1) @ v
        if wrong == "heads_merged_without_transpose":
            z = z.reshape(b, n, m)
        else:
            z = z.transpose(1, 2).reshape(b, n, m)
        if wrong == "W_o_lost":
            return z
        return self.linear(self.out_proj, z, wrong in ("b_o_lost", "all_biases_lost"))


MODULES = [
    "heads_split_without_transpose",
    "heads_merged_without_transpose",
    "scale_by_model_width",
    "b_q_lost",
    "b_v_lost",
    "biases_lost",
    "all_biases_lost",
    "b_o_lost",
    "W_o_lost",
    "weights_not_transposed",
    "keys_projected_by_W_q",
    "softmax_over_heads",
]

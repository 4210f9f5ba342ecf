"""Attention in torch whose backward pass is written by hand, or does not reach every input."""

from __future__ import annotations

from typing import Any

import torch


def function(mistake: str = "") -> Any:
    """A subclass of torch.autograd.Function with an option that `apply` takes by position only."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, scale=None):
            ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
            p = torch.softmax(q @ k.transpose(-1, -2) * ctx.scale, dim=-1)
            ctx.save_for_backward(q, k, v, p)
            return p @ v

        @staticmethod
        def backward(ctx, do):
            q, k, v, p = ctx.saved_tensors
            dp = do @ v.transpose(-1, -2)
            other = p if mistake == "delta_of_weights" else dp
            ds = p * (dp - (p * other).sum(-1, keepdim=True)) * ctx.scale
            return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do, None

    return Attention


def detached(q, k, v):
    with torch.no_grad():
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
    return weights @ v

"""Attention in JAX whose gradients are written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def attention(lost: str = "") -> Any:
    """A custom_vjp for (L, D) whose gradient `lost` lacks the scale."""

    def weights(q, k):
        return jax.nn.softmax(q @ k.T / jnp.sqrt(q.shape[-1]), axis=-1)

    @jax.custom_vjp
    def attention(q, k, v):
        return weights(q, k) @ v

    def forward(q, k, v):
        return attention(q, k, v), (q, k, v)

    def backward(kept, do):
        q, k, v = kept
        p, dp = weights(q, k), do @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True))
        scale = {name: 1.0 if name == lost else q.shape[-1] ** -0.5 for name in ("dq", "dk")}
        return ds @ k * scale["dq"], ds.T @ q * scale["dk"], p.T @ do

    attention.defvjp(forward, backward)
    return attention

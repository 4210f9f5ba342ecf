"""The columns of a fused projection, where a text says that each part has its heads in order."""

from __future__ import annotations

import pytest

import regard

jnp = pytest.importorskip("jax.numpy")


def in_parts(params, x, n_heads=4):
    """w_qkv is [Wq | Wk | Wv]; in each part head 0 first, then head 1 and so on."""
    t, width = x.shape
    q, k, v = (one.reshape(t, n_heads, -1) for one in jnp.split(x @ params["w_qkv"], 3, -1))
    scores = jnp.einsum("ihd,jhd->hij", q, k) / jnp.sqrt(q.shape[-1])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("hij,jhd->ihd", weights, v).reshape(t, width) @ params["w_o"]


def head_by_head(params, x, n_heads=4):
    """w_qkv is [Wq | Wk | Wv]; in each part head 0 first, then head 1 and so on."""
    t, width = x.shape
    q, k, v = jnp.split((x @ params["w_qkv"]).reshape(t, n_heads, -1), 3, -1)
    scores = jnp.einsum("ihd,jhd->hij", q, k) / jnp.sqrt(q.shape[-1])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("hij,jhd->ihd", weights, v).reshape(t, width) @ params["w_o"]


def test_columns_that_are_taken_head_by_head_where_parts_are_said_are_found():
    wrong = regard.diagnose(head_by_head)
    assert [one.name for one in wrong.mistakes] == ["fused_columns_misread"]
    assert regard.diagnose(in_parts).verdict in ("right", "fragile")

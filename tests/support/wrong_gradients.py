"""Backward passes written out, each with one mistake switched on; without one they are right."""

from __future__ import annotations

from typing import Any

import numpy as np


def _exponentials(q: Any, k: Any, scale: float, causal: bool = False) -> Any:
    s = q @ k.swapaxes(-1, -2) * scale
    if causal:
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
    return np.exp(s - s.max(-1, keepdims=True))


def _weights(q: Any, k: Any, scale: float, causal: bool = False) -> Any:
    e = _exponentials(q, k, scale, causal)
    return e / e.sum(-1, keepdims=True)


def _sums_of_two(cells: Any) -> Any:
    """In each cell the sum over its block of two keys."""
    sums = np.add.reduceat(cells, np.arange(0, cells.shape[-1], 2), axis=-1)
    return np.repeat(sums, 2, axis=-1)[..., : cells.shape[-1]]


def backward(mistake: str = "") -> Any:
    """(q, k, v, d_output, causal=False) → (dq, dk, dv), for arrays of any rank."""

    def attention_backward(q, k, v, d_output, causal=False):
        scale = q.shape[-1] ** -0.5
        if mistake == "backward_without_scale":
            scale = 1.0
        if mistake == "backward_scaled_by_width":
            scale = 1 / q.shape[-1]
        p = _weights(q, k, scale, causal and mistake != "backward_not_masked")
        o = _weights(q, k, scale, causal) @ v
        if mistake in ("mask_forgotten_backward", "lse_of_another_base"):
            s = q @ k.swapaxes(-1, -2) * scale
            top = s.max(-1, keepdims=True) if not causal else np.zeros((*s.shape[:-1], 1))
            seen = np.exp(s - top) * (
                np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2]) if causal else 1
            )
            lse = top + np.log(seen.sum(-1, keepdims=True))
            base = 1.0 if mistake == "mask_forgotten_backward" else np.log(2)
            p = np.exp(s - lse / base)
            if causal and mistake != "mask_forgotten_backward":
                p = np.where(seen > 0, p, 0)
        dp = d_output @ v.swapaxes(-1, -2)
        if mistake == "keys_for_values_backward":
            dp = d_output @ k.swapaxes(-1, -2)
        if mistake == "gradient_of_weights_transposed":
            dp = v @ d_output.swapaxes(-1, -2)
        if mistake == "output_for_its_gradient":
            dp = o @ v.swapaxes(-1, -2)
        delta = (d_output * o).sum(-1, keepdims=True)
        ds = {
            "delta_forgotten": lambda: p * dp,
            "softmax_elementwise": lambda: dp * p * (1 - p),
            "delta_of_weights": lambda: p * (dp - (p * p).sum(-1, keepdims=True)),
            "delta_unweighted": lambda: p * (dp - dp.sum(-1, keepdims=True)),
            "delta_mean": lambda: p * (dp - dp.mean(-1, keepdims=True)),
            "delta_of_outputs": lambda: p * (dp - (o * o).sum(-1, keepdims=True)),
            "delta_of_values": lambda: p * (dp - (d_output * v).sum(-1, keepdims=True)),
            "delta_without_output": lambda: p * (dp - d_output.sum(-1, keepdims=True)),
            "delta_of_gradients": lambda: p * (dp - (d_output**2).sum(-1, keepdims=True)),
            "delta_of_one_block": lambda: p * (dp - _sums_of_two(p * dp)),
            "delta_over_queries": lambda: p * (dp - (p * dp).sum(-2, keepdims=True)),
            "delta_over_everything": lambda: p * (dp - (p * dp).sum((-2, -1), keepdims=True)),
            "delta_lost_its_axis": lambda: p * (dp - delta.swapaxes(-1, -2)),
            "delta_added": lambda: p * (dp + delta),
            "delta_outside": lambda: p * dp - delta,
            "weights_lost_in_softmax": lambda: dp - delta,
            "softmax_skipped_backward": lambda: dp,
            "softmax_negated": lambda: p * (delta - dp),
            "weights_for_their_gradient": lambda: p * (p - (p * p).sum(-1, keepdims=True)),
            "gradient_for_weights": lambda: dp * (dp - (dp * dp).sum(-1, keepdims=True)),
            "log_softmax_backward": lambda: dp - p * dp.sum(-1, keepdims=True),
            "exponentials_for_weights": lambda: _exponentials(q, k, scale, causal) * (dp - delta),
            "squared_weights": lambda: p * p * (dp - delta),
        }.get(mistake, lambda: p * (dp - delta))()
        if mistake == "weights_for_scores_backward":
            ds = p
        ds = ds * {
            "gradient_not_scaled": 1.0,
            "gradient_scaled_twice": scale**2,
            "gradient_divided_by_scale": 1 / scale,
        }.get(mistake, scale)
        turned, up = p.swapaxes(-1, -2), d_output
        dq = {
            "gradient_of_queries_not_scaled": lambda: ds / scale @ k,
            "gradient_of_queries_scaled_twice": lambda: ds * scale @ k,
            "gradient_of_queries_transposed": lambda: ds.swapaxes(-1, -2) @ k,
            "queries_for_keys_backward": lambda: ds @ q,
            "values_for_keys_backward": lambda: ds @ v,
        }.get(mistake, lambda: ds @ k)()
        dk = {
            "gradient_of_keys_not_scaled": lambda: ds.swapaxes(-1, -2) / scale @ q,
            "gradient_of_keys_scaled_twice": lambda: ds.swapaxes(-1, -2) * scale @ q,
            "gradient_of_keys_not_transposed": lambda: ds @ q,
            "keys_for_queries_backward": lambda: ds.swapaxes(-1, -2) @ k,
        }.get(mistake, lambda: ds.swapaxes(-1, -2) @ q)()
        dv = {
            "gradient_of_values_scaled": lambda: scale * turned @ up,
            "weights_not_transposed_backward": lambda: p @ up,
            "gradient_of_values_from_scores": lambda: ds.swapaxes(-1, -2) @ up,
            "gradient_of_values_from_gradient": lambda: dp.swapaxes(-1, -2) @ up,
            "gradient_of_values_unnormalised": lambda: (
                _exponentials(q, k, scale, causal).swapaxes(-1, -2) @ up
            ),
            "gradient_of_values_from_output": lambda: turned @ o,
        }.get(mistake, lambda: turned @ up)()
        return {
            "keys_and_values_returned_swapped": lambda: (dq, dv, dk),
            "queries_and_keys_returned_swapped": lambda: (dk, dq, dv),
            "queries_and_values_returned_swapped": lambda: (dv, dk, dq),
            "gradient_lost": lambda: (dq, 0 * dk, dv),
            "gradient_doubled": lambda: (dq, dk, dv + dv),
            "gradient_negated": lambda: (-dq, dk, dv),
            "gradient_of_another_shape": lambda: (dq, dk.swapaxes(-1, -2), dv),
        }.get(mistake, lambda: (dq, dk, dv))()

    return attention_backward


def by_heads(mistake: str = "") -> Any:
    """(q, k, v, dout) with fewer key heads than query heads, (H, L, D) and (G, S, D)."""

    def grouped_backward(q, k, v, dout):
        shared = len(q) // len(k)
        dq = np.zeros(q.shape)
        dk, dv = (np.zeros((len(q), *one.shape[1:])) for one in (k, v))
        for h in range(len(q)):
            one = q[h], k[h // shared], v[h // shared], dout[h]
            dq[h], dk[h], dv[h] = backward()(*one)
        combine = {
            "grouped_gradient_overwritten": lambda each: each[:, -1],
            "grouped_gradient_of_first": lambda each: each[:, 0],
            "grouped_gradient_averaged": lambda each: each.mean(1),
            "grouped_gradient_tiled": lambda each: each.reshape(shared, -1, *each.shape[2:]).sum(0),
            "grouped_gradient_not_summed": lambda each: each.reshape(-1, *each.shape[2:]),
        }.get(mistake, lambda each: each.sum(1))
        return dq, *(combine(one.reshape(len(k), shared, *one.shape[1:])) for one in (dk, dv))

    return grouped_backward


def by_blocks(mistake: str = "", block: int = 1) -> Any:
    """(Q, K, V, out, dO, L) for one head, some queries at a time, with the output and lse given."""

    def flash_backward(Q, K, V, out, dO, L):
        scale = 1 / np.sqrt(Q.shape[1])
        dQ, dK, dV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
        starts = list(range(0, len(Q), block))
        starts = {
            "block_counted_twice": [*starts, starts[-1]],
            "first_block_counted_twice": [starts[0], *starts],
            "last_block_lost_backward": starts[:-1],
            "first_block_lost_backward": starts[1:],
        }.get(mistake, starts)
        for start in starts:
            i = slice(start, start + block)
            P = np.exp(Q[i] @ K.T * scale - L[i, None])
            dS = P * (dO[i] @ V.T - (dO[i] * out[i]).sum(1)[:, None]) * scale
            dQ[i] = dS @ K
            if mistake == "block_overwritten":
                dK, dV = dS.T @ Q[i], P.T @ dO[i]
            else:
                dK += dS.T @ Q[i]
                dV += P.T @ dO[i]
        return dQ, dK, dV

    return flash_backward


def capped(mistake: str = "") -> Any:
    """(q, k, v, do) with a softcap that is on by default."""

    def capped_backward(q, k, v, do, softcap=5.0):
        scale = q.shape[-1] ** -0.5
        bent = np.tanh(q @ k.swapaxes(-1, -2) * scale / softcap)
        e = np.exp(softcap * bent)
        p = e / e.sum(-1, keepdims=True)
        dp = do @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
        if mistake != "softcap_slope_lost":
            ds = ds * (1 - bent**2)
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    return capped_backward


WRITTEN = {
    "softcap_slope_lost": capped,
    **dict.fromkeys(("grouped_gradient_overwritten", "grouped_gradient_of_first"), by_heads),
    **dict.fromkeys(("grouped_gradient_averaged", "grouped_gradient_tiled"), by_heads),
    **dict.fromkeys(("grouped_gradient_not_summed",), by_heads),
    **dict.fromkeys(("block_counted_twice", "first_block_counted_twice"), by_blocks),
    **dict.fromkeys(("last_block_lost_backward", "first_block_lost_backward"), by_blocks),
    **dict.fromkeys(("block_overwritten",), by_blocks),
}

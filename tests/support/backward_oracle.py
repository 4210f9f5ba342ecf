"""The gradients of attention, row by row in long doubles: the answer the tests compare with.

Owns the chain rule through an explicit softmax Jacobian diag(P) − P Pᵀ, with the sink as one more
key, and a bound on the error of every number. Who sees whom comes from `oracle.cells`. Knows
nothing of the library under test.

The derivation of the bound. A weight is known to a relative 2·η_i, where η_i is the largest error
of the row's logits: u·((D + 4)·Σ|q k|·|scale| + 8·softcap + 2·|bias| + 4·|s| + 4·|lse| + 16). With
M_ij = P_ij·(|dO|·|V_j| + Σ_k P_ik |dO|·|V_k| + |dlse|), a gradient of a score is known to
M_ij·(8·η_i + (2·E + S + 40)·u), and each sum of n products adds n·u of the sum of their sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from oracle import cells

LONG = np.longdouble


class Gradients(NamedTuple):
    """The gradient of each input, in its own shape but for leading axes; or the bounds."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray  # (…, H, L, S): before sums over what was broadcast
    sink: np.ndarray  # (…, H)
    scale: np.ndarray  # ()


def differentiate(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    unit: float,
    grad_lse: Any = None,
    **options: Any,
) -> tuple[Gradients, Gradients]:
    """Gradients and the bounds of their errors; inputs with an axis of heads."""
    query, key, value, grad_output = (
        np.asarray(x).astype(np.float64) for x in (query, key, value, grad_output)
    )
    (heads, length, width), (groups, size) = query.shape[-3:], key.shape[-3:-1]
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    shapes = (
        (*batch, heads, length, width),
        (*batch, groups, size, width),
        (*batch, groups, size, value.shape[-1]),
        (*batch, heads, length, size),
        (*batch, heads),
        (),
    )
    exact = Gradients(*(np.zeros(shape, LONG) for shape in shapes))
    error = Gradients(*(np.zeros(shape, LONG) for shape in shapes))
    every_key, every_value, every_grad = (
        np.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (key, value, grad_output)
    )
    sums = (width + value.shape[-1] + size + length * heads // groups + 40) * unit
    for index, seen, row in cells(query, key, value, batch, **options):
        *b, h, _ = index
        keys = (*b, h // (heads // groups))
        j = np.flatnonzero(seen)
        at = (*keys, j)
        q = np.array(row["q"], LONG)
        k, v = (every[keys][j].astype(LONG) for every in (every_key, every_value))
        grad = every_grad[index].astype(LONG)
        d_lse = LONG(0 if grad_lse is None else grad_lse[index])
        dots, sizes = k @ q, np.abs(k) @ np.abs(q) * abs(row["scale"])
        scaled = dots * row["scale"]
        slope, logits, softcap = np.ones_like(scaled), scaled, row["softcap"]
        if softcap is not None:
            slope, logits = 1 / np.cosh(scaled / softcap) ** 2, softcap * np.tanh(scaled / softcap)
        bias = np.zeros(len(j), LONG) if row["bias"] is None else np.array(row["bias"], LONG)[j]
        logits = logits + bias
        joined = logits if row["sink"] is None else np.append(logits, LONG(row["sink"]))
        if not joined.size:
            continue
        top = joined.max()
        exponentials = np.exp(joined - top)
        weights = exponentials / exponentials.sum()
        lse = top + np.log(exponentials.sum())
        jacobian = np.diag(weights) - np.outer(weights, weights)
        d_weights = np.append(v @ grad, np.zeros(joined.size - len(j), LONG))
        d_logits = jacobian @ d_weights + weights * d_lse
        own = np.append(np.abs(v) @ np.abs(grad), np.zeros(joined.size - len(j), LONG))
        reach = weights * (own + weights @ own + abs(d_lse))
        far = (width + 4) * sizes + 2 * np.abs(bias) + 4 * np.abs(logits)
        eta = unit * (far.max(initial=0) + 8 * (softcap or 0) + 4 * abs(lse) + 16)
        if row["sink"] is not None:
            eta += unit * 2 * abs(row["sink"])
        loose = np.expm1(min(8 * eta, LONG(50))) + sums
        p, d_score, m = weights[: len(j)], d_logits[: len(j)] * slope, reach[: len(j)]
        m_slope = m * (slope + (0 if softcap is None else 4 * eta))
        exact.value[at] += np.outer(p, grad)
        error.value[at] += loose * np.outer(p, np.abs(grad))
        exact.query[index] = row["scale"] * d_score @ k
        error.query[index] = loose * abs(row["scale"]) * m_slope @ np.abs(k)
        exact.key[at] += row["scale"] * np.outer(d_score, q)
        error.key[at] += loose * abs(row["scale"]) * np.outer(m_slope, np.abs(q))
        exact.bias[(*index, j)] = d_logits[: len(j)]
        error.bias[(*index, j)] = loose * m
        exact.scale[...] += d_score @ dots
        error.scale[...] += loose * m_slope @ (np.abs(k) @ np.abs(q))
        if row["sink"] is not None:
            exact.sink[(*b, h)] += d_logits[-1]
            error.sink[(*b, h)] += loose * reach[-1]
    return exact, error

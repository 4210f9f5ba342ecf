"""Backward passes with sinks and softcaps, caches with padding, states that are carried along."""

from __future__ import annotations

import numpy as np
import pytest

import regard


def scores_of(q, k):
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- backward passes ------------------------------------------------------------------------------


def capped_passes(slope):
    def capped_forward(q, k, v, cap=4.0):
        s = scores_of(q, k)
        p = softmax(cap * np.tanh(s / cap))
        return p @ v, (q, k, v, s, p)

    def capped_backward(dout, ctx, cap=4.0):
        q, k, v, s, p = ctx
        dp = dout @ np.swapaxes(v, -1, -2)
        dz = p * (dp - (p * dp).sum(-1, keepdims=True))
        ds = dz * slope(s, cap * np.tanh(s / cap), cap) / np.sqrt(q.shape[-1])
        return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ dout

    return capped_forward, capped_backward


SLOPES = {
    "raw": lambda s, capped, cap: 1 - (s / cap) ** 2,
    "not divided": lambda s, capped, cap: 1 - capped**2,
    "of the scores": lambda s, capped, cap: 1 - np.tanh(s) ** 2,
}


@pytest.mark.parametrize("slope", SLOPES.values(), ids=[*SLOPES])
def test_a_wrong_slope_of_a_softcap_is_named(slope):
    assert regard.diagnose(capped_passes(slope)).names == ("softcap_slope_lost",)


def test_the_slope_of_a_softcap_is_right():
    passes = capped_passes(lambda s, capped, cap: 1 - (capped / cap) ** 2)
    assert regard.diagnose(passes).verdict == "right"


def sink_passes(gradient):
    def sink_forward(q, k, v, sinks):
        s = scores_of(q, k)
        m = np.maximum(s.max(-1), sinks[:, None])
        e, of_sink = np.exp(s - m[..., None]), np.exp(sinks[:, None] - m)
        total = e.sum(-1) + of_sink
        p = e / total[..., None]
        return p @ v, (q, k, v, p, of_sink / total)

    def sink_backward(do, memory):
        q, k, v, p, share = memory
        dp = do @ np.swapaxes(v, -1, -2)
        delta = (p * dp).sum(-1)
        ds = p * (dp - delta[..., None]) / np.sqrt(q.shape[-1])
        dsinks = gradient(share, delta)
        return ds @ k, np.swapaxes(ds, -1, -2) @ q, np.swapaxes(p, -1, -2) @ do, dsinks

    return sink_forward, sink_backward


def test_the_gradient_of_a_sink_is_judged():
    right = regard.diagnose(sink_passes(lambda share, delta: -(share * delta).sum(-1)))
    assert right.verdict == "right"
    assert [one.name for one in right.gradients] == ["queries", "keys", "values", "sink"]
    for wrong in (
        lambda share, delta: (share * delta).sum(-1),
        lambda share, delta: -delta.sum(-1),
        lambda share, delta: -share.sum(-1),
    ):
        found = regard.diagnose(sink_passes(wrong))
        assert found.names == ("gradient_of_sink",)
        assert [one.name for one in found.gradients if one.state == "wrong"] == ["sink"]


def flash_backward(delta_of_row):
    def backward(q, k, v, o, lse, do, block=3):
        scale = q.shape[1] ** -0.5
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        whole = (do * o).sum(1)
        for start in range(0, len(k), block):
            keys = slice(start, start + block)
            p = np.exp(q @ k[keys].T * scale - lse[:, None])
            dp = do @ v[keys].T
            delta = whole if delta_of_row else (p * dp).sum(1)
            ds = p * (dp - delta[:, None]) * scale
            dq += ds @ k[keys]
            dk[keys], dv[keys] = ds.T @ q, p.T @ do
        return dq, dk, dv

    return backward


def test_delta_of_a_block_is_told_from_delta_of_a_row():
    assert regard.diagnose(flash_backward(True)).verdict == "right"
    assert regard.diagnose(flash_backward(False)).names == ("delta_of_one_block",)

"""Right attentions as people write them, in which a mistake takes the place of one expression.

`«target: expression»` marks what a mistake may replace; see `written.py`. A program with the line
of a mistake is its example. Must not know any single mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.normalizers import Proportional, Sigmoid
from regard.scores import Additive, Cosine, Distance, Features, General

# What some of them call; a source has those that it needs.
HELPERS = """def T(x):
    return x.swapaxes(-1, -2)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def exps(x):
    return np.exp(x - x.max(-1, keepdims=True))


def by_sum(e, axis=-1):
    return e / e.sum(axis, keepdims=True)


def attend(q, k, v, causal=False):
    logits = q @ T(k) / np.sqrt(q.shape[-1])
    if causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    return softmax(logits) @ v


def lengths_of(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


def apart(q, k):
    return np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1)


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def flat(heads):
    return heads.swapaxes(1, 2).reshape(len(heads), heads.shape[2], -1)


def of_all_texts(x):
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def of_all_heads(x):
    return x.reshape(len(x), 1, -1, x.shape[3])


def cuts(length, n):
    return [slice(start, start + n) for start in range(0, length, n)]


def of_blocks(cells, n):
    sums = np.add.reduceat(cells, np.arange(0, cells.shape[-1], n), axis=-1)
    return np.repeat(sums, n, axis=-1)[..., : cells.shape[-1]]
"""
_HELPERS = {text.partition("(")[0].removeprefix("def "): text for text in HELPERS.split("\n\n\n")}
PLACE = re.compile(r"«([\w|]+): (.*?)»")


@dataclass(frozen=True)
class Program:
    """A right attention, how an adapter calls it, and what its author states.

    Where the steps in `makes` are the results of a `helper` that works through blocks, a mistake is
    in the helper, and what it makes of blocks of some size takes their place.
    """

    text: str
    call: str  # the body of an adapter
    stated: Mapping[str, Any] = field(default_factory=lambda: _PLAIN)
    means: Mapping[str, Any] = field(default_factory=dict)  # what is found by trying
    helper: str = ""
    makes: tuple[str, ...] = ()

    @property
    def targets(self) -> frozenset[str]:
        """What a mistake may replace."""
        found = (target for targets, _ in PLACE.findall(self.text) for target in targets.split("|"))
        return frozenset(found)

    def source(self, replaced: Mapping[str, str] | None = None) -> str:
        """The code, with other expressions for some targets."""
        return self._marked(replaced or {}).replace(_MARK, "")

    def lines(self, replaced: Mapping[str, str]) -> tuple[int, ...]:
        """The lines of the code that have one of these targets."""
        texts = self._marked(replaced).splitlines()
        return tuple(number for number, text in enumerate(texts, 1) if _MARK in text)

    def _marked(self, replaced: Mapping[str, str]) -> str:
        def put(place: re.Match[str]) -> str:
            own = next((replaced[one] for one in place[1].split("|") if one in replaced), None)
            return place[2] if own is None else _MARK + own

        text = PLACE.sub(put, self.text)
        needed: dict[str, str] = {}
        waiting = [text]
        while waiting:
            words = set(re.findall(r"\w+", waiting.pop()))
            new = {name: own for name, own in _HELPERS.items() if name in words - needed.keys()}
            needed |= new
            waiting += new.values()
        own = [one.strip() for name, one in _HELPERS.items() if name in needed]
        return "\n\n\n".join(["import numpy as np", *own, text])


_MARK = "\0"
_HEADS = "return f(t.query, t.key, t.value)"
_BACKWARD = """names = "query", "key", "value"
return dict(zip(names, f(t.query, t.key, t.value, t.grad_output{})))"""
_LAYER = """weights = t.W_q, t.W_k, t.W_v, t.W_o
return f(t.embeddings, t.heads, *weights, t.b_q, t.b_k, t.b_v, t.b_o)"""
_PARTS = np.linspace(-1, 1, 12).reshape(4, 3), np.linspace(1, -2, 12).reshape(4, 3)
_PLAIN: Mapping[str, Any] = {"causal": False}
_CAUSAL: Mapping[str, Any] = {"causal": "end"}

PROGRAMS: Mapping[str, Program] = {
    "one head": Program(
        """def attention(q, k, v):
    B, H, L, D = q.shape
    S, E = v.shape[-2:]
    scores = «scores: q @ T(k)»
    logits = «scaled: scores / np.sqrt(D)»
    weights = «weights: softmax(logits)»
    return «output: weights @ v»
""",
        _HEADS,
    ),
    "scale": Program(
        """def attention(q, k, v, scale):
    B, H, L, D = q.shape
    scores = q @ T(k)
    logits = «rescaled: scores * scale»
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.scale)",
    ),
    "mask": Program(
        """def attention(q, k, v, mask):
    B, H, L, D = q.shape
    keep = «mask|square: mask»
    raw = q @ T(k) / np.sqrt(D)
    logits = «masked: np.where(keep, raw, -np.inf)»
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.mask)",
    ),
    "masked softmax": Program(
        """def attention(q, k, v, keep):
    raw = q @ T(k) / np.sqrt(q.shape[-1])
    weights = «after: softmax(np.where(keep, raw, -np.inf))»
    return weights @ v
""",
        "return f(t.query, t.key, t.value, t.mask)",
    ),
    "padding": Program(
        """def attention(q, k, v, lengths):
    B, H, L, D = q.shape
    lengths, j = lengths[:, None, None, None], np.arange(k.shape[-2])
    mask = «padding: j < lengths»
    logits = np.where(«mask: mask», q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.lengths)",
    ),
    "mask and causal": Program(
        """def attention(q, k, v, mask):
    (L, D), S = q.shape[-2:], k.shape[-2]
    causal = np.arange(S) <= np.arange(L)[:, None] + S - L
    keep = «keep: mask & causal»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.mask)",
        _CAUSAL,
    ),
    "causal": Program(
        """def attention(q, k, v):
    (L, D), S = q.shape[-2:], k.shape[-2]
    past = S - L
    row, j = np.arange(L)[:, None], np.arange(S)
    i = row + past
    keep = «causal: j <= i»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        _HEADS,
        _CAUSAL,
    ),
    "causal from the start": Program(
        """def attention(q, k, v):
    (L, D), S = q.shape[-2:], k.shape[-2]
    row, j = np.arange(L)[:, None], np.arange(S)
    keep = «causal: j <= row»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        _HEADS,
        {"causal": "start"},
    ),
    "window": Program(
        """def attention(q, k, v, size):
    (L, D), S = q.shape[-2:], k.shape[-2]
    row, j = np.arange(L)[:, None], np.arange(S)
    i = row + S - L
    keep = «window: (j <= i) & (j > i - size)»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.window[0] + 1)",
        _CAUSAL,
    ),
    "heads": Program(
        """def attention(x, heads, W_q, W_k, W_v, W_o, b_q, b_k, b_v, b_o):
    B, L, M = x.shape
    H, E = heads, W_v.shape[1] // heads

    def split(packed):
        return «cut: packed.reshape(B, L, heads, -1).swapaxes(1, 2)»

    q = split(x @ «W_q: W_q» + «b_q: b_q»)
    k = split(x @ «W_k: W_k» + «b_k: b_k»)
    v = split(x @ «W_v: W_v» + «b_v: b_v»)
    output = softmax(q @ T(k) / np.sqrt(q.shape[-1])) @ v
    merged = «merged: output.swapaxes(1, 2).reshape(B, L, H * E)»
    projected = merged @ «W_o: W_o» + «b_o: b_o»
    return «projected_output: projected»
""",
        _LAYER,
    ),
    "fused": Program(
        """def attention(x, heads, W):
    B, L, M = x.shape
    fused = x @ W
    q, k, v = «fused: fused.reshape(B, L, 3, heads, -1).transpose(2, 0, 3, 1, 4)»
    output = softmax(q @ T(k) / np.sqrt(q.shape[-1])) @ v
    return output.swapaxes(1, 2).reshape(B, L, -1)
""",
        """W = np.stack([t.W_q, t.W_k, t.W_v], 1)
return f(t.embeddings, t.heads, W.reshape(len(W), -1))""",
    ),
    "context": Program(
        """def attention(x, context, heads, W_q, W_k, W_v):
    def split(packed):
        return packed.reshape(*packed.shape[:2], heads, -1).swapaxes(1, 2)

    q = split(«embeddings: x» @ «W_q: W_q»)
    k = split(«context: context» @ «W_k: W_k»)
    v = split(«context: context» @ W_v)
    return flat(softmax(q @ T(k) / np.sqrt(q.shape[-1])) @ v)
""",
        "return f(t.embeddings, t.context, t.heads, t.W_q, t.W_k, t.W_v)",
    ),
    "axes": Program(
        """def attention(q, k, v):
    (B, H, L, D), E = q.shape, v.shape[-1]
    return «axes: attend(q, k, v)»
""",
        _HEADS,
    ),
    "grouped heads": Program(
        """def attention(q, k, v):
    (B, H, L, D), (G, S, E) = q.shape, v.shape[1:]

    def shared(one):
        return «repeat: np.repeat(one, H // G, 1)»

    k, v = shared(k), shared(v)
    weights = softmax(q @ T(k) / np.sqrt(D))
    return «grouped: weights @ v»
""",
        _HEADS,
    ),
    "rotary": Program(
        """def signed(f):
    return np.concatenate([-f, f])


def turn(x, places, frequencies):
    angles = places[..., None] * frequencies
    return x * np.cos(angles) + np.roll(x, x.shape[-1] // 2, -1) * np.sin(angles)


def attention(queries, keys, values):
    (L, D), S = queries.shape[-2:], keys.shape[-2]
    past = S - L
    query_positions, key_positions = past + np.arange(L), np.arange(S)
    f = 10000.0 ** (-np.arange(0, D, 2) / D)
    frequencies = «frequencies: signed(f)»
    q = «rotated_queries: turn(queries, query_positions, frequencies)»
    k = «rotated_keys: turn(keys, key_positions, frequencies)»
    v = «values: values»
    return softmax(q @ T(k) / np.sqrt(D)) @ v
""",
        _HEADS,
        means={"rotary": "halves"},
    ),
    "ALiBi": Program(
        """def attention(q, k, v):
    H, L, D = q.shape[1:]
    S = k.shape[-2]
    i, j = np.arange(L)[:, None] + S - L, np.arange(S)
    row = i - S + L
    h = np.arange(1, H + 1)
    slopes = («positions_slopes: 2.0 ** (-8 * h / H)»)[:, None, None]
    scores = q @ T(k)
    scaled = scores / np.sqrt(D)
    logits = «positioned: scaled - slopes * np.abs(i - j)»
    return softmax(logits) @ v
""",
        _HEADS,
        means={"alibi": True},
    ),
    "softcap": Program(
        """def attention(q, k, v, cap):
    D = q.shape[-1]
    scores = q @ T(k)
    scaled = scores / np.sqrt(D)
    logits = «capped: cap * np.tanh(scaled / cap)»
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.softcap)",
    ),
    "softcap and mask": Program(
        """def attention(q, k, v, cap, keep):
    scaled = q @ T(k) / np.sqrt(q.shape[-1])
    raw = cap * np.tanh(scaled / cap)
    logits = «masked: np.where(keep, raw, -np.inf)»
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.softcap, t.mask)",
    ),
    "bias": Program(
        """def attention(q, k, v, bias):
    D = q.shape[-1]
    scores = q @ T(k)
    scaled = scores / np.sqrt(D)
    logits = «biased: scaled + bias»
    return softmax(logits) @ v
""",
        "return f(t.query, t.key, t.value, t.bias)",
    ),
    "sink": Program(
        """def attention(q, k, v, sink):
    D, sink = q.shape[-1], sink[:, None, None]
    logits = q @ T(k) / np.sqrt(D)
    m = np.maximum(logits.max(-1, keepdims=True), sink)
    e = np.exp(logits - m)
    weights = «sunk: e / (e.sum(-1, keepdims=True) + np.exp(sink - m))»
    return «output: weights @ v»
""",
        "return f(t.query, t.key, t.value, t.sink)",
    ),
    "cache": Program(
        """def attention(q, k, v, keys, values):
    k, v = np.concatenate([keys, k], -2), np.concatenate([values, v], -2)
    past, L, S = keys.shape[-2], q.shape[-2], k.shape[-2]
    i, j = past + np.arange(L)[:, None], np.arange(S)
    keep = «causal: j <= i»
    logits = np.where(keep, q @ T(k) / np.sqrt(q.shape[-1]), -np.inf)
    weights = «weights: softmax(logits)»
    return «output: weights @ v»
""",
        "return f(t.query, t.key, t.value, *t.past)",
        _CAUSAL,
    ),
    "rotary cache": Program(
        """def signed(f):
    return np.concatenate([-f, f])


def turn(x, places, frequencies):
    angles = places[..., None] * frequencies
    return x * np.cos(angles) + np.roll(x, x.shape[-1] // 2, -1) * np.sin(angles)


def attention(queries, keys, values, old_keys, old_values):
    L, D = queries.shape[-2:]
    past = old_keys.shape[-2]
    S = past + L
    frequencies = signed(10000.0 ** (-np.arange(0, D, 2) / D))
    query_positions = new_positions = past + np.arange(L)
    q = «new_queries: turn(queries, query_positions, frequencies)»
    k = «new_keys: turn(keys, new_positions, frequencies)»
    k = «all_keys: np.concatenate([old_keys, k], -2)»
    v = np.concatenate([old_values, values], -2)
    keep = np.arange(S) <= query_positions[:, None]
    return softmax(np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)) @ v
""",
        "return f(t.query, t.key, t.value, *t.past)",
        _CAUSAL,
        means={"rotary": "halves"},
    ),
    "running softmax": Program(
        """def blocks(logits, v, n):
    S = logits.shape[-1]
    m, z, out = -np.inf, 0.0, 0.0
    for cut in «blocks: cuts(S, n)»:
        s, own = logits[..., cut], v[..., cut, :]
        m_new = np.maximum(m, s.max(-1, keepdims=True))
        p = np.exp(s - «shift: m_new»)
        a = «correction: np.exp(m - m_new)» if np.isfinite(m).all() else 1.0
        z = «running_sum: a * z + p.sum(-1, keepdims=True)»
        out = «running_output: a * out + p @ own»
        m = m_new
    return «divided: out / z»


def attention(q, k, v):
    return blocks(q @ T(k) / np.sqrt(q.shape[-1]), v, 2)
""",
        _HEADS,
        helper="blocks",
        makes=("output",),
    ),
    "merged blocks": Program(
        """def blocks(logits, v, n):
    m, z, outs = [], [], []
    for cut in cuts(logits.shape[-1], n):
        s = logits[..., cut]
        m.append(s.max(-1, keepdims=True))
        p = np.exp(s - m[-1])
        z.append(p.sum(-1, keepdims=True))
        outs.append(p @ v[..., cut, :] / z[-1])
    m, z, outs = np.stack(m), np.stack(z), np.stack(outs)
    lse = m + np.log(z)
    share = «share: np.exp(lse - lse.max(0))»
    total = «total: share.sum(0)»
    return (share * outs).sum(0) / total


def attention(q, k, v):
    return blocks(q @ T(k) / np.sqrt(q.shape[-1]), v, 2)
""",
        _HEADS,
        helper="blocks",
        makes=("output",),
    ),
    "blocks merged one by one": Program(
        """def blocks(logits, v, n):
    first, *others = cuts(logits.shape[-1], n)
    lse = np.log(np.exp(logits[..., first]).sum(-1, keepdims=True))
    out = «first: softmax(logits[..., first]) @ v[..., first, :]»
    for cut in others:
        new = np.log(np.exp(logits[..., cut]).sum(-1, keepdims=True))
        part = «part: 1 / (1 + np.exp(new - lse))»
        out = part * out + (1 - part) * (softmax(logits[..., cut]) @ v[..., cut, :])
        lse = «merged_lse: np.logaddexp(lse, new)»
    return out


def attention(q, k, v):
    return blocks(q @ T(k) / np.sqrt(q.shape[-1]), v, 2)
""",
        _HEADS,
        helper="blocks",
        makes=("output",),
    ),
    "filled blocks": Program(
        """def blocks(logits, v, n):
    more = -logits.shape[-1] % n
    logits = np.pad(logits, [(0, 0)] * 3 + [(0, more)], constant_values=«filling: -np.inf»)
    v = np.pad(v, [(0, 0)] * 2 + [(0, more), (0, 0)])
    return by_sum(exps(logits)) @ v


def attention(q, k, v):
    return blocks(q @ T(k) / np.sqrt(q.shape[-1]), v, 4)
""",
        _HEADS,
        helper="blocks",
        makes=("output",),
    ),
    "backward": Program(
        """def attention(q, k, v, d_output):
    B, H, L, D = q.shape
    scale = «scale: D**-0.5»
    scores = q @ T(k)
    logits = scores * scale
    m = logits.max(-1, keepdims=True)
    e = np.exp(logits - m)
    z = e.sum(-1, keepdims=True)
    weights, lse = e / z, m + np.log(z)
    output = weights @ v
    d_weights = «d_weights: d_output @ T(v)»
    delta = («delta: (d_output * output).sum(-1)»)[..., None]
    d_scaled = «d_logits: weights * (d_weights - delta)»
    d_scores = «d_scores: d_scaled * scale»
    dq = «d_queries: d_scores @ k»
    dk = «d_keys: T(d_scores) @ q»
    dv = «d_values: T(weights) @ d_output»
    return «dq: dq», «dk: dk», «dv: dv»
""",
        _BACKWARD.format(""),
    ),
    "backward with a saved lse": Program(
        """def attention(q, k, v, d_output):
    (L, D), S = q.shape[-2:], k.shape[-2]
    keep = np.arange(S) <= np.arange(L)[:, None] + S - L
    raw = q @ T(k) / np.sqrt(D)
    logits = np.where(keep, raw, -np.inf)
    m = logits.max(-1, keepdims=True)
    lse = m + np.log(np.exp(logits - m).sum(-1, keepdims=True))
    output = softmax(logits) @ v
    weights = «again: np.exp(logits - lse)»
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(""),
        _CAUSAL,
    ),
    "masked backward": Program(
        """def attention(q, k, v, d_output, keep):
    D = q.shape[-1]
    raw = q @ T(k) / np.sqrt(D)
    output = softmax(np.where(keep, raw, -np.inf)) @ v
    seen = «seen: keep»
    weights = softmax(np.where(seen, raw, -np.inf))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(", t.mask"),
    ),
    "softcap backward": Program(
        """def attention(q, k, v, d_output, cap):
    scale = q.shape[-1] ** -0.5
    scaled = q @ T(k) * scale
    capped = cap * np.tanh(scaled / cap)
    weights = softmax(capped)
    d_weights = d_output @ T(v)
    d_capped = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_scaled = «d_scaled: d_capped * (1 - np.tanh(scaled / cap) ** 2)»
    d_scores = d_scaled * scale
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(", t.softcap"),
    ),
    "grouped backward": Program(
        """def attention(q, k, v, d_output):
    (B, H, L, D), G = q.shape, k.shape[1]

    def together(gradient):
        each = gradient.reshape(B, G, H // G, *gradient.shape[2:])
        return «together: each.sum(2)»

    k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, together(T(d_scores) @ q), together(T(weights) @ d_output)
""",
        _BACKWARD.format(""),
    ),
    "backward by queries": Program(
        """def blocks(weights, d_scores, q, k, d_output, n):
    L = q.shape[-2]
    dq, dk, dv = np.zeros(q.shape), 0.0, 0.0
    for rows in «blocks_of_queries: cuts(L, n)»:
        dq[..., rows, :] = d_scores[..., rows, :] @ k
        dk = «sum_of_keys: dk» + T(d_scores[..., rows, :]) @ q[..., rows, :]
        dv = «sum_of_values: dv» + T(weights[..., rows, :]) @ d_output[..., rows, :]
    return dq, dk, dv


def attention(q, k, v, d_output):
    D = q.shape[-1]
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return blocks(weights, d_scores, q, k, d_output, 2)
""",
        _BACKWARD.format(""),
        helper="blocks",
        makes=("d_queries", "d_keys_by_head", "d_values_by_head"),
    ),
    "backward by keys": Program(
        """def blocks(weights, d_scores, q, k, d_output, n):
    S, v = k.shape[-2], d_output
    dq, dk, dv = 0.0, np.zeros(k.shape), np.zeros((*k.shape[:-1], v.shape[-1]))
    for keys in «blocks_of_keys: cuts(S, n)»:
        dq = «sum_of_queries: dq» + d_scores[..., keys] @ k[..., keys, :]
        dk[..., keys, :] = T(d_scores[..., keys]) @ q
        dv[..., keys, :] = T(weights[..., keys]) @ d_output
    return dq, dk, dv


def attention(q, k, v, d_output):
    D = q.shape[-1]
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return blocks(weights, d_scores, q, k, d_output, 2)
""",
        _BACKWARD.format(""),
        helper="blocks",
        makes=("d_queries", "d_keys_by_head", "d_values_by_head"),
    ),
    "cosines": Program(
        """temperature = 0.5


def attention(queries, keys, values):
    D = queries.shape[-1]
    unit_queries = «unit_queries: queries / lengths_of(queries)»
    unit_keys = «unit_keys: keys / lengths_of(keys)»
    cosines = unit_queries @ T(unit_keys)
    logits = «scores: cosines / temperature»
    return softmax(logits) @ values
""",
        _HEADS,
        {"causal": False, "score": Cosine(temperature=0.5)},
    ),
    "additive score": Program(
        """W_q = np.linspace(-1, 1, 12).reshape(4, 3)
W_k = np.linspace(1, -2, 12).reshape(4, 3)
u = np.array([1.0, -2.0, 0.5])


def attention(q, k, v):
    D = q.shape[-1]
    query_parts, key_parts = q @ W_q, k @ W_k
    hidden = query_parts[..., :, None, :] + key_parts[..., None, :, :]
    logits = «scores: np.tanh(hidden) @ u»
    return softmax(logits) @ v
""",
        _HEADS,
        {"causal": False, "score": Additive(*_PARTS, np.array([1.0, -2.0, 0.5]))},
    ),
    "general score": Program(
        """W = np.linspace(-1, 2, 16).reshape(4, 4)


def attention(queries, k, v):
    D = queries.shape[-1]
    transformed_queries = «transformed_queries: queries @ W»
    logits = «scores: transformed_queries @ T(k)»
    return softmax(logits) @ v
""",
        _HEADS,
        {"causal": False, "score": General(np.linspace(-1, 2, 16).reshape(4, 4))},
    ),
    "distances": Program(
        """def attention(q, k, v):
    D = q.shape[-1]
    logits = «scores: -(apart(q, k) ** 2)»
    return softmax(logits) @ v
""",
        _HEADS,
        {"causal": False, "score": Distance()},
    ),
    "linear attention": Program(
        """def attention(queries, keys, v):
    S = keys.shape[-2]
    query_features = «query_features: phi(queries)»
    key_features = «key_features: phi(keys)»
    scores = query_features @ T(key_features)
    weights = «weights: scores / scores.sum(-1, keepdims=True)»
    return weights @ v
""",
        _HEADS,
        {"causal": False, "score": Features(), "normalize": Proportional()},
    ),
    "sigmoid": Program(
        """shift = -1.0


def attention(q, k, v):
    logits = q @ T(k) / np.sqrt(q.shape[-1])
    with_bias = «with_bias: logits + shift»
    weights = «weights: 1 / (1 + np.exp(-with_bias))»
    return weights @ v
""",
        _HEADS,
        {"causal": False, "normalize": Sigmoid(bias=-1.0)},
    ),
}


def program_of(targets: frozenset[str]) -> str:
    """The first program that has all of these targets; "" if none has."""
    return next((name for name, one in PROGRAMS.items() if targets <= one.targets), "")

"""Right attentions of queries, keys and values, and of layers. Must not know any single mistake."""

from __future__ import annotations

from collections.abc import Mapping

from regard.diagnosis.mistakes.other_programs import OTHERS
from regard.diagnosis.mistakes.program import CAUSAL, HEADS, Program

_LAYER = """weights = t.W_q, t.W_k, t.W_v, t.W_o
return f(t.embeddings, t.heads, *weights, t.b_q, t.b_k, t.b_v, t.b_o)"""

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
        HEADS,
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
        CAUSAL,
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
        HEADS,
        CAUSAL,
    ),
    "causal from the start": Program(
        """def attention(q, k, v):
    (L, D), S = q.shape[-2:], k.shape[-2]
    row, j = np.arange(L)[:, None], np.arange(S)
    keep = «causal: j <= row»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
""",
        HEADS,
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
        CAUSAL,
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
        HEADS,
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
        HEADS,
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
        HEADS,
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
        HEADS,
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
        CAUSAL,
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
        CAUSAL,
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
        HEADS,
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
        HEADS,
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
        HEADS,
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
        HEADS,
        helper="blocks",
        makes=("output",),
    ),
    **OTHERS,
}


def program_of(targets: frozenset[str]) -> str:
    """The first program that has all of these targets; "" if none has."""
    return next((name for name, one in PROGRAMS.items() if targets <= one.targets), "")

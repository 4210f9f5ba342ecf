"""Wrong attentions with positions, a softcap or a sink inside, as people write them.

Written without a look at the catalogue, and shares no code with the package. With an empty name
each is right.
"""

from __future__ import annotations

import numpy as np


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- rotary --------------------------------------------------------------------------------------


def speeds(wrong, d):
    p = np.arange(0, d, 2) / d
    if wrong == "rotary_frequencies_wrong":
        p = np.arange(d // 2) / d
    if wrong == "rotary_frequencies_inverted":
        p = -p
    if wrong == "rotary_one_frequency":
        p = 0 * p
    f = 10000.0**-p
    return f[::-1] if wrong == "rotary_frequencies_reversed" else f


def rope(x, positions, wrong, *, pairs=False, back=False):
    d = x.shape[-1]
    angle = np.outer(positions, speeds(wrong, d))
    if wrong == "rotary_in_degrees":
        angle = np.deg2rad(angle)
    mixed = wrong == "rotary_conventions_mixed"
    whole = np.repeat(angle, 2, -1) if pairs != mixed else np.concatenate([angle, angle], -1)
    cos, sin = np.cos(whole), np.sin(whole) * (-1 if back else 1)
    if pairs:
        other = np.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)
    else:
        other = np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1)
    if wrong == "rotary_sign_lost":
        other = np.where(np.arange(d) < d // 2, -other, other) if not pairs else other
    if wrong == "rotary_sine_for_cosine":
        second = (np.arange(d) % 2 if pairs else np.arange(d) // (d // 2)) == 1
        cos, sin = np.where(second, sin, cos), np.where(second, cos, sin)
    return x * cos + other * sin


def rotary(wrong="", *, pairs=False, causal=False):
    def f(q, k, v):
        n, m = q.shape[-2], k.shape[-2]
        at_q, at_k = np.arange(n) + m - n, np.arange(m)
        if wrong == "rotary_position_of_query":
            at_q = np.arange(n)
        if wrong == "rotary_off_by_one":
            at_q = at_q + 1
        if wrong == "rotary_reversed":
            at_k = at_k[::-1]
        turn = lambda x, at, **more: rope(x, at, wrong, pairs=pairs, **more)  # noqa: E731
        turned_q, turned_k = turn(q, at_q), turn(k, at_k)
        if wrong in ("rotary_twice", "rotary_twice_on_queries"):
            turned_q = turn(turned_q, at_q)
        if wrong in ("rotary_twice", "rotary_twice_on_keys"):
            turned_k = turn(turned_k, at_k)
        if wrong in ("rotary_on_keys_only", "rotary_on_values_and_keys"):
            turned_q = q
        if wrong in ("rotary_on_queries_only", "rotary_on_values_and_queries"):
            turned_k = k
        if wrong == "rotary_opposite_directions":
            turned_k = turn(k, at_k, back=True)
        if "values" in wrong:
            v = turn(v, at_k)
        s = turned_q @ turned_k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if causal:
            s = np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, s, -np.inf)
        return softmax(s) @ v

    return f


def late(wrong):
    """Causal, with more keys than queries."""
    return rotary(wrong, causal=True)


def alibi_in_a_cache(wrong):
    """More keys than queries, of which the last one belongs to the last key; always causal."""

    def f(q, k, v):
        """q: (heads, queries, dim)"""
        n, m = q.shape[-2], k.shape[-2]
        at = np.arange(n)[:, None] + (0 if wrong == "alibi_position_of_query" else m - n)
        slopes = 2.0 ** (-8 * np.arange(1, len(q) + 1) / len(q))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = s - slopes[:, None, None] * np.abs(at - np.arange(m))
        return softmax(np.where(np.arange(m) > np.arange(n)[:, None] + m - n, -np.inf, s)) @ v

    return f


def in_a_cache(wrong):
    """Some tokens at a time, (H, T, D), always causal; the cache has keys and values."""

    def f(q, k, v, cache=None):
        own, old = k, np.zeros_like(k[..., :0, :]) if cache is None else cache[0]
        past = old.shape[-2]
        new = np.arange(k.shape[-2]) + (0 if wrong == "rotary_from_zero_in_each_call" else past)
        turned_q, own = rope(q, new, wrong), rope(own, new, wrong)
        if wrong == "rotary_in_each_call":
            old = rope(old, np.arange(past), wrong)
        keys = np.concatenate([old, own], -2)
        values = v if cache is None else np.concatenate([cache[1], v], -2)
        s = turned_q @ keys.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        later = np.arange(keys.shape[-2]) > past + np.arange(q.shape[-2])[:, None]
        return softmax(np.where(later, -np.inf, s)) @ values, (keys, values)

    return f


CACHED = ("rotary_from_zero_in_each_call", "rotary_in_each_call")
ROTARY = (
    "rotary_on_queries_only",
    "rotary_on_keys_only",
    "rotary_on_values_too",
    "rotary_on_values_and_keys",
    "rotary_on_values_and_queries",
    "rotary_twice",
    "rotary_twice_on_keys",
    "rotary_twice_on_queries",
    "rotary_conventions_mixed",
    "rotary_opposite_directions",
    "rotary_sign_lost",
    "rotary_sine_for_cosine",
    "rotary_off_by_one",
    "rotary_reversed",
    "rotary_frequencies_wrong",
    "rotary_frequencies_inverted",
    "rotary_one_frequency",
    "rotary_frequencies_reversed",
    "rotary_in_degrees",
)

# --- ALiBi ---------------------------------------------------------------------------------------

SLOPES = {
    "alibi_slopes_of_eight": lambda n: 2.0**-n,
    "alibi_slopes_from_zero": lambda n: 2.0 ** (-8 * (n - 1) / len(n)),
    "alibi_slopes_reversed": lambda n: (2.0 ** (-8 * n / len(n)))[::-1],
    "alibi_one_slope": lambda n: np.full(len(n), 0.5),
    "alibi_slopes_linear": lambda n: n / len(n),
}


def alibi(wrong="", *, causal=True):
    def f(q, k, v):
        heads, n, d = q.shape[-3:]
        number = np.arange(1, heads + 1)
        slope = SLOPES.get(wrong, lambda n: 2.0 ** (-8 * n / len(n)))(number)[:, None, None]
        ahead = np.arange(k.shape[-2]) - np.arange(n)[:, None]
        bias = -slope * abs(ahead)
        s = q @ k.swapaxes(-1, -2)
        if wrong == "alibi_sign":
            bias = -bias
        if wrong == "alibi_not_absolute":
            bias = slope * ahead
        if wrong == "alibi_squared":
            bias = -slope * ahead**2
        if wrong == "alibi_twice":
            bias = 2 * bias
        if wrong == "alibi_scaled":
            s = (s + bias) / np.sqrt(d)
        elif wrong == "alibi_unscaled_scores":
            s = s + bias
        elif wrong == "alibi_multiplied":
            s = s / np.sqrt(d) * bias
        else:
            s = s / np.sqrt(d) + bias
        if causal:
            s = np.where(ahead <= 0, s, -np.inf)
        return softmax(s) @ v

    return f


def both_ways(wrong):
    """Not causal."""
    return alibi(wrong, causal=False)


ALIBI = (
    *SLOPES,
    "alibi_sign",
    "alibi_squared",
    "alibi_twice",
    "alibi_scaled",
    "alibi_unscaled_scores",
    "alibi_multiplied",
)

# --- softcap -------------------------------------------------------------------------------------


def softcap(wrong="", cap=5.0):
    def f(q, k, v, mask=None):
        s, root = q @ k.swapaxes(-1, -2), np.sqrt(q.shape[-1])
        late = wrong == "softcap_after_mask"
        if mask is not None and late:
            s = np.where(mask, s, -1e9)
        bend = {
            "softcap_not_multiplied_back": lambda x: np.tanh(x / cap),
            "softcap_not_divided": lambda x: cap * np.tanh(x),
            "softcap_clipped": lambda x: np.clip(x, -cap, cap),
            "softcap_inverted": lambda x: np.tanh(x * cap) / cap,
        }.get(wrong, lambda x: cap * np.tanh(x / cap))
        s = bend(s) / root if wrong == "softcap_before_scale" else bend(s / root)
        if mask is not None and not late:
            s = np.where(mask, s, -np.inf)
        return softmax(s) @ v

    return f


SOFTCAP = (
    "softcap_not_multiplied_back",
    "softcap_not_divided",
    "softcap_before_scale",
    "softcap_after_mask",
    "softcap_inverted",
)

# --- sinks ---------------------------------------------------------------------------------------


def sinks(wrong=""):
    def f(q, k, v, sinks):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        own = np.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
        if wrong == "sink_scaled":
            own = own / np.sqrt(q.shape[-1])
        if wrong == "sink_of_another_head":
            own = np.broadcast_to(sinks[0], own.shape)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        if wrong == "sink_not_shifted":
            return e @ v / (e.sum(-1, keepdims=True) + np.exp(own))
        if wrong == "sink_added_unexponentiated":
            m = np.maximum(m, own)
            e = np.exp(s - m)
            return e @ v / (e.sum(-1, keepdims=True) + own)
        w = softmax(np.concatenate([s, own], -1))
        if wrong == "sink_without_effect":
            w = w[..., :-1] / w[..., :-1].sum(-1, keepdims=True)
            return w @ v
        if wrong == "sink_left_at_the_other_end":
            return w[..., 1:] @ v
        if wrong == "sink_has_a_value":
            return w @ np.concatenate([v, v[..., -1:, :]], -2)
        return w[..., :-1] @ v

    return f


SINKS = (
    "sink_without_effect",
    "sink_not_shifted",
    "sink_added_unexponentiated",
    "sink_has_a_value",
    "sink_left_at_the_other_end",
    "sink_scaled",
    "sink_of_another_head",
)

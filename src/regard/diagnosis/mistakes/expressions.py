"""What a wrong line computes: its expression, of the names that it may use.

Those are the names of all steps, sizes by their letters, and the names below. Must not know what
the value takes the place of.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.mistakes.program import HELPERS
from regard.diagnosis.probe import Probe, Values, turned

Replacement = Callable[[Values, Probe], Any]
Formula = Callable[..., Any]  # of values, a probe and names of its own


def formula(expression: str) -> Replacement:
    """What computes an expression."""
    return lambda values, probe: evaluated(expression, values, probe)


def evaluated(expression: str, values: Values, probe: Probe, **own: Any) -> Any:
    """The value of an expression; a ValueError where code would raise."""
    code = _compiled(expression)
    try:
        names = {name: named(name, values, probe) for name in _names_in(code) if name not in own}
        return eval(code, {**_shared(), **names, **own})
    except Exception as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> types.CodeType:
    return compile(expression, "<mistake>", "eval")


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that are looked up, but for those that every program shares."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    found = frozenset(code.co_names).union(*map(_names_in, inner))
    return found - _shared().keys() - vars(builtins).keys()


@lru_cache(maxsize=1)
def _shared() -> dict[str, Any]:
    names: dict[str, Any] = {"np": np}
    exec(HELPERS, names)
    return names


def named(name: str, values: Values, probe: Probe) -> Any:
    """What a name means in an expression."""
    if name in NAMES:
        return NAMES[name](values, probe)
    if name in probe.sizes:
        return probe.sizes[name]
    if name in probe.inputs:
        return probe.inputs[name]
    if name in values:
        return values[name]
    if name in probe.right:  # it comes later
        return probe.right[name]
    return 0.0 if name.startswith("b_") else None  # such as an attribute


def raw_scores(values: Values) -> Array:
    """The scores before anything is hidden."""
    names = ("biased", "positioned", "capped", "scaled", "scores")
    return next(values[name] for name in names if name in values)


def logits_of(values: Values) -> Array:
    """The scores that softmax gets."""
    return values["masked"] if "masked" in values else raw_scores(values)


def heads_of(values: Values) -> tuple[Array, Array, Array]:
    """Queries, keys and values with as many heads as the queries."""
    queries = values.get("rotated_queries", values["queries"])
    keys = values.get("rotated_keys", values["keys"])
    heads = queries.shape[1]
    return queries, repeated(keys, heads), repeated(values["values"], heads)


def repeated(array: Array, heads: int) -> Array:
    """Keys or values (B, G, S, X) repeated for each query head, (B, H, S, X)."""
    return np.repeat(array, heads // array.shape[1], axis=1)


def _split(packed: Array, probe: Probe, letter: str = "G") -> Array:
    return packed.reshape(*packed.shape[:2], probe.sizes[letter], -1).swapaxes(1, 2)


def _signed(probe: Probe, pairs: Array) -> Array:
    """Frequencies of pairs for each feature, the first of each pair negative."""
    if probe.interleaved:
        return np.stack([-pairs, pairs], -1).ravel()
    return np.concatenate([-pairs, pairs])


def _turn(probe: Probe, rows: Array, places: Array, frequencies: Array) -> Array:
    angles = np.asarray(places)[..., None] * frequencies
    angles = angles[:, None] if angles.ndim == 3 else angles
    return turned(rows, np.cos(angles), np.sin(angles), probe.interleaved)


def _pairs(probe: Probe) -> Array:
    own = probe.inputs["frequencies"]
    return np.asarray(own[own > 0])


def _causal_row(probe: Probe) -> Array:
    return np.arange(probe.sizes["L"])[:, None]


def _lengths(values: Values, probe: Probe) -> Array:
    return np.asarray(probe.rule("key mask").sum(-1)[..., :1, None])


def _maximum(values: Values, probe: Probe) -> Array:
    largest: Array = logits_of(values).max(-1, keepdims=True)
    own = probe.inputs.get("sink")
    return largest if own is None else np.maximum(largest, own[:, None, None])


def _packed(values: Values, probe: Probe) -> Array:
    """The columns of all three projections side by side."""
    names = ("queries", "keys", "values")
    return np.concatenate(
        [values.get(f"projected_{x}", probe.right[f"projected_{x}"]) for x in names], -1
    )


def _together(each: Array, probe: Probe) -> Array:
    """What every query head adds (B, H, S, X) as the sum for each key head."""
    size = probe.sizes
    return np.asarray(each.reshape(size["B"], size["G"], -1, *each.shape[2:]).sum(2))


NAMES: Mapping[str, Callable[[Values, Probe], Any]] = {
    "q": lambda v, p: heads_of(v)[0],
    "k": lambda v, p: heads_of(v)[1],
    "v": lambda v, p: heads_of(v)[2],
    "x": lambda v, p: p.inputs["embeddings"],
    "M": lambda v, p: p.inputs["embeddings"].shape[-1],
    "raw": lambda v, p: raw_scores(v),
    "logits": lambda v, p: logits_of(v),
    "m": _maximum,
    "e": lambda v, p: np.exp(logits_of(v) - _maximum(v, p)),
    "sink": lambda v, p: p.inputs["sink"][:, None, None],
    "lse": lambda v, p: (v["row_maximum"] + np.log(v["row_sums"]))[..., None],
    "keep": lambda v, p: p.visible,
    "mask": lambda v, p: p.keeps(("mask", "key mask")),
    "padding": lambda v, p: p.rule("key mask"),
    "causal": lambda v, p: p.rule("causal"),
    "lengths": _lengths,
    "row": lambda v, p: _causal_row(p),
    "i": lambda v, p: _causal_row(p) + p.offset,
    "j": lambda v, p: np.arange(p.sizes["S"]),
    "h": lambda v, p: np.arange(1.0, p.sizes["H"] + 1),
    "past": lambda v, p: p.offset,
    "size": lambda v, p: p.sides[0] + 1,
    "split": lambda v, p: partial(_split, probe=p),
    "turn": lambda v, p: partial(_turn, p),
    "signed": lambda v, p: partial(_signed, p),
    "cap": lambda v, p: p.inputs["softcap"],
    "temperature": lambda v, p: p.inputs["score_temperature"],
    "W": lambda v, p: p.inputs["score_W"],
    "u": lambda v, p: p.inputs["score_v"],
    "hidden": lambda v, p: v["query_parts"][..., :, None, :] + v["key_parts"][..., None, :, :],
    "shift": lambda v, p: p.inputs["normalize_bias"],
    "slopes": lambda v, p: v["positions_slopes"][:, None, None],
    "fused": _packed,
    "dq": lambda v, p: v["d_scores"] @ heads_of(v)[1],
    "dk": lambda v, p: _together(v["d_keys_by_head"], p),
    "dv": lambda v, p: _together(v["d_values_by_head"], p),
    "f": lambda v, p: _pairs(p),
}

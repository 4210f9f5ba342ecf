"""One function for each verdict of a diagnosis, and a diagnosis with its texts replaced."""

from __future__ import annotations

from typing import Any

import numpy as np

import regard

# Letters of mathematics: a formula has as many of them as it has.
LETTERS = ("var", "sub")


def unshifted(q: Any, k: Any, v: Any) -> Any:
    weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return weights / weights.sum(-1, keepdims=True) @ v


def by_keys(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-2])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def no_masks(q: Any, k: Any, v: Any, mask: Any) -> Any:
    if not mask.all():
        raise NotImplementedError("no masks yet")
    return regard.attention(q, k, v)


def raises(q: Any, k: Any, v: Any) -> Any:
    raise ValueError("<b>not</b> today")


FUNCTIONS = {
    "right": regard.attention,
    "fragile": unshifted,
    "wrong": by_keys,
    "unknown": no_masks,
    "not_callable": raises,
}
CALLS = {"unknown": lambda f, t: f(t.query, t.key, t.value, t.mask)}


def diagnosed() -> dict[str, regard.Diagnosis]:
    """A diagnosis of each verdict."""
    found = {name: regard.diagnose(f, call=CALLS.get(name)) for name, f in FUNCTIONS.items()}
    assert {name: one.verdict for name, one in found.items()} == {n: n for n in FUNCTIONS}
    return found


def filled(one: Any, text: str) -> Any:
    """The same data with one text in place of every text that is free."""
    if isinstance(one, dict):
        bound = {"verdict", "severity"}
        return {k: v if k in bound else filled(v, text) for k, v in one.items()}
    if isinstance(one, list):
        return [filled(part, text) for part in one]
    # NaN and infinity are texts, too.
    return text if isinstance(one, str) and one not in ("nan", "inf", "-inf") else one

"""One function for each verdict of a diagnosis, and a diagnosis with its texts replaced."""

from __future__ import annotations

from typing import Any

import numpy as np

import regard
import wrong_attentions as wrong

# Letters of mathematics: a formula has as many of them as it has.
LETTERS = ("var", "sub")


def sigmoid(q: Any, k: Any, v: Any) -> Any:
    return 1 / (1 + np.exp(-q @ k.swapaxes(-1, -2))) @ np.tanh(v)


def raises(q: Any, k: Any, v: Any) -> Any:
    raise ValueError("<b>not</b> today")


FUNCTIONS = {
    "right": regard.attention,
    "fragile": wrong.unmasked("no_maximum_subtracted"),
    "mistaken": wrong.masked("mask_after_softmax"),
    "unknown": sigmoid,
    "unusable": raises,
}


def filled(one: Any, text: str) -> Any:
    """The same data with one text in place of every text that is free."""
    if isinstance(one, dict):
        bound = {"verdict", "state", "severity"}
        return {k: v if k in bound else filled(v, text) for k, v in one.items()}
    if isinstance(one, list):
        return [filled(part, text) for part in one]
    # NaN and infinity are texts, too.
    return text if isinstance(one, str) and one not in ("nan", "inf", "-inf") else one

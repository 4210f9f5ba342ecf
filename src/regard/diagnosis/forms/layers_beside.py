"""Layers beside attention in a tree of parameters: normalisations, and feed-forward layers.

A normalisation has factors of 1 and offsets of 0; a feed-forward layer has weights of 0 and adds
nothing. Must not know any probe.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import BIAS_LEAVES, nodes_in, spread_over, spreads
from regard.diagnosis.forms.assigned import OTHER, multiplied
from regard.diagnosis.forms.beside_weights import HEADS
from regard.diagnosis.forms.source import code_called
from regard.diagnosis.forms.tree_code import FEED_FORWARD, NORM, TreeCode
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import text_of

OFFSET = re.compile(r"(beta|bias|offset|shift|[_.]b|^b)\d*$", re.IGNORECASE)
OF_HEADS = re.compile(r"(^|_)(q|k|qk|query|key)_?(norm|ln|gamma|scale)", re.IGNORECASE)
# Code that multiplies by 1 more than a factor, as Gemma's.
ONE_MORE = re.compile(r"""\b1(\.0?)? *\+ *([\w.\["']*(scale|weight|gamma|gain|_w|_g)|[wg])\b""")
FACTORS = ("scale", "weight", "gamma", "g", "w")
OFFSETS = ("bias", "offset", "beta", "b")
# The second of two layers, which has as many columns as a token.
SECOND = re.compile(r"proj|out|down|2([._]\w+)?$|wo$|second", re.IGNORECASE)
WIDER = 4  # times the width of a token, inside a feed-forward layer


def layer_beside(function: Callable[..., Any], code: TreeCode, name: str, width: int) -> Any:
    """The numbers of an entry, or of its leaves, by its name; None for one that is none of these.

    An entry of which nothing is known belongs to a feed-forward layer where the projections lie
    side by side with one.
    """
    if FEED_FORWARD.search(name):
        bare = re.fullmatch(r"(mlp|ffn?|feed_?forward)_?\d*", name, re.IGNORECASE)
        if bare or (code.leaves and name not in multiplied(function)):
            own = _feed_forward(function, code, name, width)
            return own if bare else own[name]
        return zeros_of(name, width)
    if OF_HEADS.search(name):  # of queries or keys, whose heads are narrower
        return _norm(function, code, name, width // HEADS)
    if NORM.search(name):
        return _norm(function, code, name, width)
    has_other_columns = any(OTHER in one for one in code.columns.values())
    return zeros_of(f"{name}_out", width) if has_other_columns and name in code.rest else None


def _norm(function: Callable[..., Any], code: TreeCode, name: str, width: int) -> Any:
    ones, zeros = np.ones(width), np.zeros(width)
    if ONE_MORE.search(f"{text_of(function)}\n{code_called(function)}"):
        ones = zeros
    read = [*_keys(function), *(spread_over(function, name) if spreads(function, name) else ())]
    leaves = [one for one in dict.fromkeys(read) if one in (*FACTORS, *OFFSETS)]
    leaves = [one for one in leaves if one not in code.read]
    if OFFSET.search(name):
        return zeros
    is_layer = re.search(r"(norm|ln)_?\w?\d*$", name, re.IGNORECASE) is not None
    if is_layer and name in code.pairs:
        return ones, zeros
    if is_layer and leaves:
        return {one: ones if one in FACTORS else zeros for one in leaves}
    return ones


def _feed_forward(function: Callable[..., Any], code: TreeCode, name: str, width: int) -> Any:
    """A feed-forward layer; with the names that the code spreads over a call, if it does."""
    own = _FeedForward(code, width)
    names = spread_over(function, name) if spreads(function, name) else ()
    own.update({one: own[one] for one in names if role_of(one) not in ("x", "heads", "no")})
    return own


class _FeedForward(dict[str, Any]):
    """The weights of a feed-forward layer, whatever their names."""

    def __init__(self, code: TreeCode, width: int) -> None:
        super().__init__()
        self._leaves, self._width = code.leaves, width

    def __missing__(self, name: str) -> Any:
        if not self._leaves:
            return zeros_of(name, self._width)
        ends = {one: "_b" if one in BIAS_LEAVES else "" for one in self._leaves}
        return {one: zeros_of(name + end, self._width) for one, end in ends.items()}


def zeros_of(name: str, width: int) -> Array:
    """Zeros for a weight or a bias of a feed-forward layer, by its name."""
    rows, columns = (WIDER * width, width) if SECOND.search(name) else (width, WIDER * width)
    return np.zeros(columns) if OFFSET.search(name) else np.zeros((rows, columns))


def _keys(function: Callable[..., Any]) -> list[str]:
    """The constant names by which the code reads anything."""
    found = dict[str, None]()
    for node in nodes_in(function):
        if isinstance(node, ast.Attribute):
            found[node.attr] = None
        elif isinstance(node, ast.Subscript):
            key = getattr(node.slice, "value", None)
            found |= {key: None} if isinstance(key, str) else {}
    return [*found]

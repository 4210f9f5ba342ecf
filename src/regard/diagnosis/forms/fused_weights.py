"""Functions of W_q, W_k and W_v, made of functions that take several weights in one argument.

Side by side in one matrix, or with their bias in a dictionary. Must not know any probe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regard.diagnosis.forms.adapting import BIAS_LEAVES, WEIGHT_LEAVES, spread_over
from regard.diagnosis.forms.packing import Alternative, Packing, side_by_side
from regard.diagnosis.forms.weights import LAYERS
from regard.diagnosis.reading.parameter_names import fused_order, plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter, roles_by_family

_SUFFIX = re.compile("(weights?|w|matrix)$")
_BIAS = re.compile("^(b|bias)_?|_?(b|bias)$", re.IGNORECASE)


def with_fused_weights(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> list[Alternative]:
    """Each way in which the weights may lie side by side; none if no name says that they do."""
    required = [one for one in parameters if one.required]
    if {*PROJECTIONS} <= {*roles_by_family([one.name for one in required]).values()}:
        return []  # each has a matrix of its own: X_kv is what keys and values are made of
    parts = {one.name: [*_parts_of(one.name)] for one in required}
    parts = {name: own for name, own in parts.items() if own}
    if not any(len(own) > 1 for own in parts.values()):
        return []
    leaves = {name: [*spread_over(function, name)] for name in parts}
    inner = [
        Parameter(f"{name}_{role}", role, keyword=True)
        for name, own in parts.items()
        for role in _with_biases(own, leaves[name])
    ]
    rest = [replace(one, keyword=True) for one in parameters if one.name not in parts]

    count = next((p.name for p in parameters if role_of(p.name) == "heads"), "")

    def pack(axis: int, by_head: bool, given: dict[str, Any]) -> dict[str, Any]:
        heads = given.get(count) if by_head else None
        packed = {}
        for name, own in parts.items():
            taken = {role: given.pop(f"{name}_{role}") for role in _with_biases(own, leaves[name])}
            whole = side_by_side([taken[role] for role in own], axis, heads)
            if leaves[name]:
                bias = [one for role, one in taken.items() if role[:2] == "b_"]
                entries = {leaf: whole for leaf in leaves[name] if leaf in WEIGHT_LEAVES}
                if bias:
                    of_bias = (leaf for leaf in leaves[name] if leaf in BIAS_LEAVES)
                    entries |= dict.fromkeys(of_bias, side_by_side(bias, -1, heads))
                whole = entries
            packed[name] = whole
        return given | packed

    found: list[Alternative] = []
    several = any(len(own) == 3 for own in parts.values())
    for by_head, axis in itertools.product((False, True)[: 1 + (several and bool(count))], (-1, 0)):
        packing = Packing(function, partial(pack, axis, by_head))
        packing.by_head, packing.option = by_head, getattr(function, "option", "")
        found.append((packing, [*rest, *inner]))
    return found


def _parts_of(name: str) -> Iterator[str]:
    """The weights or biases that an argument holds, by its name."""
    bare = _BIAS.sub("", name)
    kind = "W_" if bare == name else "b_"
    order = fused_order(bare) or fused_order(_SUFFIX.sub("", bare).rstrip("_"))
    if order:
        yield from (kind + letter for letter in order)
        return
    bare = _SUFFIX.sub("", plain(bare))
    role = role_of(name) or ""
    if role in ("W_o", "b_o") or LAYERS.get(bare) == "W_o":
        yield f"{kind}o"


def _with_biases(roles: Sequence[str], leaves: Sequence[str]) -> list[str]:
    """The same and their biases, if the argument is a dictionary that has them."""
    has_bias = any(leaf in BIAS_LEAVES for leaf in leaves)
    return [*roles, *(role.replace("W_", "b_") for role in roles if has_bias)]

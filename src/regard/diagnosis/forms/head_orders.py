"""The orders in which the columns of weights may be those of heads.

Must not know any probe, nor how weights are found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from regard.boundary.arrays import Array

# The orders of the columns of a fused projection that are tried: 3 of heads of D, and so on.
FUSED_ORDERS = ("PHD", "HPD", "HDP", "DPH")
# Code whose heads take turns in the columns: view(b, dim, heads, n).
TAKES_TURNS = re.compile(
    r"(view|reshape)\(\s*\w+\s*,\s*(self\.)?(dim|d_k|d_head|head_dim|dim_head|dh)\s*,\s*"
    r"(self\.)?(num_heads|n_heads|heads|nhead|h)\b"
)


def heads_together(weights: Mapping[str, Array], heads: int | None) -> dict[str, Array]:
    """The weights if column c is of head c % H: those of each head side by side."""
    count, found = heads or 1, dict(weights)
    for name, array in weights.items():
        axis = 0 if name == "W_o" else array.ndim - 1
        if name != "b_o" and array.shape[axis] % count == 0:
            order = np.arange(array.shape[axis]).reshape(-1, count).T.ravel()
            found[name] = np.ascontiguousarray(array.take(order, axis))
    return found


def reordered(weights: Mapping[str, Array], fused: str, order: str, heads: int) -> dict[str, Array]:
    """The weights if the columns of a fused layer lie in another order of part, head and width."""
    found = dict(weights)
    if order == FUSED_ORDERS[0] or not any(one in fused for one in "qkv"):
        return found
    for kind in ("W_", "b_"):
        own = [weights[kind + one] for one in fused if kind + one in weights]
        if len(own) < len(fused):
            continue
        packed = np.concatenate(own, axis=-1)
        lead, width = packed.shape[:-1], packed.shape[-1]
        if any(one.shape != own[0].shape for one in own):
            sizes = _of_groups([one.shape[-1] for one in own], fused, heads)
            if order == "HPD" and sizes:
                split = packed.reshape(*lead, -1, sum(sizes))
                parts = np.split(split, np.cumsum(sizes)[:-1], axis=-1)
                for letter, part in zip(fused, parts, strict=True):
                    found[kind + letter] = np.ascontiguousarray(part.reshape(*lead, -1))
            continue
        if width % (heads * len(fused)):
            continue
        lengths = {"P": len(fused), "H": heads, "D": width // heads // len(fused)}
        split = packed.reshape(*lead, *(lengths[axis] for axis in order))
        axes = [len(lead) + order.index(axis) for axis in "PHD"]
        split = split.transpose(*range(len(lead)), *axes).reshape(*lead, len(fused), -1)
        for number, letter in enumerate(fused):
            found[kind + letter] = np.ascontiguousarray(split[..., number, :])
    return found


def _of_groups(widths: list[int], fused: str, heads: int) -> list[int]:
    """The columns of each part in one group: those of all its query heads, of a key, of a value.

    As in Falcon and InternLM2; nothing if they do not fit.
    """
    own = dict(zip(fused, widths, strict=True))
    width = own.get("q", 0) // heads
    groups = own.get("k", 0) // max(1, width)
    if not groups or own.get("v") != own["k"] or heads % groups or groups * width != own["k"]:
        return []
    return [one // groups for one in widths]

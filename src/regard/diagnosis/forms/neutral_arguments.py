"""Functions of the usual arguments, made of functions that ask for what is around attention.

What they add to the output gets zeros, an output projection of ready arrays the identity, and a
dictionary for a normalisation factors of 1. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.adapting import spread_over, spreads
from regard.diagnosis.forms.layers_beside import FACTORS, OFFSETS
from regard.diagnosis.forms.packing import QKV, Alternative, Packing
from regard.diagnosis.forms.tree_code import NORM
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter

RESIDUAL = re.compile("^(residual|shortcut|identity|skip|res|resid)(_?(input|x|states?))?$", re.I)
# The layer after heads are put together, and its bias.
AFTER = re.compile(
    "^(dense|out|o|proj|c_proj|output)_?(w(eights?)?|kernel|b(ias)?)$|^[wb]_?o(ut)?$"
)


def with_neutral(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function without what is added to its output, a projection of ready arrays, or norms."""
    asked = [one for one in parameters[1:] if one.required]
    residuals = [one.name for one in asked if RESIDUAL.fullmatch(one.name)]
    whole = next((one.name for one in parameters if QKV.match(plain(one.name))), "")
    others = [one.name for one in parameters if one.required and one.name not in residuals]
    if not whole and not any(role_of(name) in ("x", "query") for name in others):
        residuals = []  # it is what the function gets
    projected = any(role_of(one.name) in PROJECTIONS for one in parameters)
    after = [one.name for one in asked if whole and not projected and AFTER.search(one.name)]
    norms = {
        one.name: {
            leaf: float(leaf in FACTORS)
            for leaf in spread_over(function, one.name)
            if leaf in (*FACTORS, *OFFSETS)
        }
        for one in asked
        if NORM.search(one.name) and role_of(one.name) is None and spreads(function, one.name)
    }
    if not (residuals or after or norms):
        return None
    first = whole or next((one.name for one in parameters if one.required), "")

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        rows = given[first]
        found: dict[str, Any] = dict.fromkeys(residuals, 0 * rows[..., :1])
        for name in after:
            is_bias = name.rpartition("_")[2][:1].lower() == "b"
            found[name] = 0 * rows[..., 0].reshape(-1)[:1] if is_bias else _identity(rows)
        return {**given, **found, **norms}

    made = Packing(function, pack)
    made.left_out = (*residuals, *after, *norms)
    gone = {*made.left_out}
    return made, [replace(one, keyword=True) for one in parameters if one.name not in gone]


def _identity(rows: Any) -> Any:
    """The identity for the heads of queries, keys and values side by side."""
    width = rows.shape[-1] // 3
    if hasattr(rows, "new_zeros"):
        import torch

        return torch.eye(width, dtype=rows.dtype)
    if hasattr(rows, "at"):
        import jax.numpy as jnp

        return jnp.eye(width, dtype=rows.dtype)
    import numpy as np

    return np.eye(width, dtype=rows.dtype)

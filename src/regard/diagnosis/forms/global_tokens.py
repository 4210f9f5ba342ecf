"""A number of tokens that see all others, as in Longformer, in place of a mask or a list of them.

Must not know what a function makes of them, nor mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter, text_of

GLOBAL = re.compile("(^|_)globals?(_|$)", re.IGNORECASE)
COUNT = re.compile("^(n|num|nb|number)_?(of_)?global|global_?(size|count|n$)", re.IGNORECASE)


def with_global_tokens(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function with a number of global tokens, the first ones, in place of a mask or a list."""
    text, names = text_of(function), [one.name for one in parameters]
    own = next((one for one in parameters[1:] if GLOBAL.search(one.name)), None)
    queries = next((one.name for one in parameters if role_of(one.name) == "query"), "")
    if own is None or isinstance(own.default, bool) or not queries:
        return None
    axes = documented_axes(text, names)
    is_count = type(own.default) is int or COUNT.search(own.name) is not None
    is_mask = not is_count and own.name in axes and "mask" not in str(own.default)
    if own.required and not (is_count or set(axes.get(own.name, "?")) <= {*axes.get(queries, ())}):
        return None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        count = given.get(own.name) or 0
        if is_count:
            return {**given, own.name: count}
        if not is_mask:
            return {**given, own.name: tuple(range(count))} if count else _without(given, own.name)
        rows = given[queries]
        sizes = dict(zip(axes.get(queries, ()), rows.shape, strict=False))
        shape = [int(sizes[word]) for word in axes[own.name]]
        mask = np.zeros(shape, bool)
        mask[..., :count] = True
        return {**given, own.name: _like(rows, mask)}

    taken = [
        replace(one, keyword=True, required=False, default=None, role=None)
        if one is own
        else replace(one, keyword=True)
        for one in parameters
    ]
    return Packing(function, pack), taken


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {n: one for n, one in given.items() if n != name}


def _like(rows: Any, mask: Any) -> Any:
    if hasattr(rows, "new_zeros"):
        import torch

        return torch.from_numpy(mask)
    if hasattr(rows, "at"):
        import jax.numpy as jnp

        return jnp.asarray(mask)
    return mask

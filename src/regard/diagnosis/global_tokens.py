"""Tokens that see all others and that all others see, as in Longformer, beside a window.

There are none in the usual probes; what one does is seen apart. Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.convention import Convention
from regard.diagnosis.documented import documented_axes
from regard.diagnosis.local_blocks import seen_with
from regard.diagnosis.packing import Alternative, Packing
from regard.diagnosis.parameter_names import role_of
from regard.diagnosis.signature import Parameter, text_of
from regard.diagnosis.under_test import FunctionUnderTest

GLOBAL = re.compile("(^|_)globals?(_|$)", re.IGNORECASE)
COUNT = re.compile("^(n|num|nb|number)_?(of_)?global|global_?(size|count|n$)", re.IGNORECASE)

# What says that global tokens see all, and that all see them.
_ALL = r"(everything|every\b|all\b|the (whole|full|entire)|each)"
SEE_ALL = re.compile(
    rf"global[^.;]{{0,80}}\b(attend|see|look|read)s?\b[^.;]{{0,20}}\b{_ALL}|"
    rf"(these|they) see {_ALL}|"
    r"both (directions|ways)|symmetric|longformer",
    re.IGNORECASE,
)
SEEN_BY_ALL = re.compile(
    rf"\b{_ALL}[^.;]{{0,60}}\b(attend|see|look|read)s?\b[^.;]{{0,60}}(global|them)|seen by {_ALL}|"
    r"(attend|see|look|read)s? [^;]{0,60}\band (to )?(all |the )?global|longformer",
    re.IGNORECASE,
)


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


def what_globals_miss(tested: FunctionUnderTest, convention: Convention) -> str:
    """The name of what is wrong with a first token that is global; nothing if it is right."""
    names = [one.name for one in tested.callee.parameters if GLOBAL.search(one.name)]
    if len(names) != 1:
        return ""
    seen, without = (seen_with(tested, convention, {names[0]: n}) for n in (1, None))
    if seen is None or without is None or without.all() or np.array_equal(seen, without):
        return ""
    if not np.array_equal(seen[1:, 1:], without[1:, 1:]):
        return ""
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    hides_later = not np.triu(without, 1).any()
    if not seen[:, 0].all() and SEEN_BY_ALL.search(text):
        return "global_keys_not_seen"
    sees_less = not (seen[0].all() or hides_later)
    return "global_queries_see_a_window" * (sees_less and SEE_ALL.search(text) is not None)

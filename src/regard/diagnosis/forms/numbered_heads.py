"""Functions with the matrices of each head as arguments of their own: W_q1, W_k1, …, W_q2, ….

Each becomes a part of a matrix with the columns of all heads. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter, roles_by_family, text_of

COUNT = "number_of_heads"
NUMBERED = re.compile(r"([A-Za-z]\w*?)_?(\d)")


def with_numbered_heads(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> tuple[Alternative, int] | None:
    """The function with whole matrices, and how many heads it has; None if it takes no such."""
    parts: dict[str, list[str]] = {}
    for one in parameters[1:]:
        if one.required and (own := NUMBERED.fullmatch(one.name)):
            parts.setdefault(own[1], []).append(one.name)
    numbered = {name for names in parts.values() for name in names}
    others = [one.name for one in parameters[1:] if one.required and one.name not in numbered]
    roles = {n: role_of(n) for n in (*parts, *others)} | roles_by_family([*parts, *others])
    counts = {len(names) for names in parts.values()}
    if not {*PROJECTIONS} <= {roles[stem] for stem in parts} or len(counts) != 1 or counts == {1}:
        return None
    heads, x = counts.pop(), re.escape(parameters[0].name)
    text = text_of(function)
    turned = re.search(rf"\w *@ *{x}\b|(matmul|dot)\(\w+, *{x}\)", text) is not None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        given = {name: one for name, one in given.items() if name != COUNT}
        for stem, names in parts.items():
            whole = given.pop(stem)
            axis = 0 if turned or whole.ndim == 1 else -1
            wide = whole.shape[axis] // heads
            for number, name in enumerate(sorted(names)):
                own = slice(number * wide, (number + 1) * wide)
                given[name] = whole[own] if axis == 0 else whole[..., own]
        return given

    rest = [
        replace(one, role=one.role or roles.get(one.name), keyword=True)
        for one in parameters
        if one.name not in numbered
    ]
    whole = [Parameter(stem, roles[stem], keyword=True) for stem in parts]
    count = Parameter(COUNT, "heads", keyword=True)
    return (Packing(function, pack), [rest[0], *whole, *rest[1:], count]), heads

"""Queries, keys and values in one array three times as long, as code or documentation says.

Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from regard.diagnosis.reading.parameter_names import is_upstream, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter


def three_wide(text: str, required: Sequence[Parameter]) -> Parameter | None:
    """The array whose last axis code or documentation says is three times as long: (B, T, 3C)."""
    roles = {role_of(one.name) for one in required}
    if roles & {"query", "key", "value", *PROJECTIONS}:
        return None
    for one in required:
        name = re.escape(one.name)
        said = rf"\b{name}\b[^\n]{{0,40}}\([^()\n]*\b3 ?\*? ?[A-Za-z]\w*\s*\)"
        last = re.search(rf"(\w+)\s*=\s*{name}\.(?:shape|size\(\))", text)
        divided = last and re.search(rf"\b{last[1]}\s*//\s*3\b", text)
        if (divided or re.search(said, text)) and not is_upstream(one.name):
            return one
    return None


def apart(place: int | None, result: Any) -> Any:
    """The parts of what three arrays were put together to; of several results, of the last one."""
    if isinstance(result, tuple) and result:
        return (*result[:-1], *apart(place, result[-1]))
    if not hasattr(result, "shape"):
        return result
    if place is None:
        width = result.shape[-1] // 3
        return tuple(result[..., n * width : (n + 1) * width] for n in range(3))
    before = (slice(None),) * (place % result.ndim)
    return tuple(result[(*before, n)] for n in range(3))

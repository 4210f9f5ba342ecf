"""Backward passes: the gradients that a function returns, by the names of what they belong to.

Owns the order of those in a tuple. Must not know how they are computed.
"""

from __future__ import annotations

from regard.diagnosis.call.table import Layout

ORDER = ("query", "key", "value")  # as the arguments, and as papers have it


def as_gradients(code: str, layout: Layout) -> str:
    """The code of a dict of gradients, from that of a tuple of them."""
    names = ", ".join(f'"{name}"' for name in ORDER)
    return f"{{name: {layout.give.format('x')} for name, x in zip(({names}), {code})}}"

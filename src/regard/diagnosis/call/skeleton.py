"""The adapter that is printed where no call was found: ready to edit, with the own parameters.

Must not know why none was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from textwrap import indent
from typing import Any

from regard.diagnosis.call import table
from regard.diagnosis.call.adapter import IMPORTS
from regard.diagnosis.call.search import Search, choices_of, is_needed

FIRST = ("t.query", "t.key", "t.value")
EDIT = "..."


def skeleton(function: Any, searches: Sequence[Search], library: str) -> str:
    """An adapter with one line for each argument; what is not known is to be filled in."""
    search = searches[0] if searches else None
    subject = search.subject if search else None
    parameters = [*subject.parameters] if subject else _parameters(function)
    meanings = search.meanings if search else {}
    layout = table.EMBEDDED[0] if subject and subject.embedded else table.LAYOUTS[0]
    free = iter(FIRST if not meanings else ())
    lines = []
    for one in parameters:
        if not is_needed(one):
            if search and one.name in meanings:
                code = choices_of(search, one.name, layout)[0].code
                lines.append(f"# {one.name}={code},")
            continue
        keyword = f"{one.name}=" * (one.kind is one.KEYWORD_ONLY)
        known = search is not None and one.name in meanings
        code = (
            choices_of(search, one.name, layout)[0].code if known and search else next(free, EDIT)
        )
        note = "" if known or code != EDIT else ": a field of t, or a value"
        lines.append(f"{keyword}{code},  # {one.name}{note}")
    target = subject.target if subject else "f"
    whole = f"return {target}(\n" + indent("\n".join(lines), "    ") + "\n)"
    before = f"{subject.before}\n" if subject and subject.before else ""
    text = f"{IMPORTS[library]}\n\n\ndef call(f, t):\n{indent(before + whole, '    ')}\n"
    return text


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []

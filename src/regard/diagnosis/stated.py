"""What a user states of a function that is diagnosed: read from text, and refused if it cannot be.

Must not know any function, nor any probe.
"""

from __future__ import annotations

from typing import Any

from regard.diagnosis.calls.convention import MASK_KINDS
from regard.diagnosis.reading.libraries import LIBRARIES
from regard.errors import OptionError, safe_text


def parse_signature(text: str) -> dict[str, str]:
    """The roles of parameters, from the text of a command line.

    >>> parse_signature("a=query, b=key, c=value")
    {'a': 'query', 'b': 'key', 'c': 'value'}
    """
    roles = {}
    for part in text.split(","):
        name, equals, role = (word.strip() for word in part.partition("="))
        if not equals or not name or not role:
            raise OptionError(
                f"signature has {safe_text(part.strip(), 40)!r}; write parameter=role, such as "
                "a=query, b=key, c=value"
            )
        roles[name] = role
    return roles


def check_stated(
    causal: Any, mask: Any, window: Any, library: Any, heads: Any, time_limit: Any
) -> None:
    """Refuse what cannot be stated, with an OptionError that names it."""
    choices = (
        ("causal", causal, (None, True, False, "start", "end")),
        ("mask", mask, (None, *MASK_KINDS)),
        ("window", window, (None, "inclusive", "exclusive")),
        ("library", library, (None, *LIBRARIES)),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise OptionError(
                f"{name} is {safe_text(repr(value), 40)}; it must be one of "
                f"{', '.join(map(repr, allowed))}"
            )
    if heads is not None and (not isinstance(heads, int) or heads < 1):
        raise OptionError(f"heads is {safe_text(repr(heads), 40)}; it must be 1 or more")
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise OptionError(f"time_limit is {safe_text(repr(time_limit), 40)}; give seconds above 0")

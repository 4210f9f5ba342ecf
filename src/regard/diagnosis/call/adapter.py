"""Adapters: how one function is called with the fields of a problem.

Owns the text of those that are made here, which is the code that runs. Must not know how one is
found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Assumption:
    """What a verdict holds under: what was assumed, of what, and why this and nothing else."""

    name: str  # such as "causal" or "mask"
    text: str  # "later keys are meant to be hidden"
    source: str = "tried"  # or whose convention it is


@dataclass(frozen=True, eq=False)
class Adapter:
    """A function of the one that is judged and of `t`; `text` is its code, if it was made here."""

    call: Callable[[Any, Any], Any]
    text: str = ""
    assumes: tuple[Assumption, ...] = ()
    unasked: tuple[str, ...] = ()  # what is not passed, and keeps its default

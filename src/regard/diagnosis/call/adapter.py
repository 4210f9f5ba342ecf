"""Adapters: how one function is called with the fields of a problem.

Owns the text of those that are made here, which is the code that runs. Must not know how one is
found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from regard.diagnosis.result import Assumption

IMPORTS = {
    "numpy": "import numpy as np",
    "torch": "import torch",
    "jax": "import jax.numpy as jnp",
}
SHORT = {"numpy": "np", "torch": "torch", "jax": "jnp"}


@dataclass(frozen=True, eq=False)
class Adapter:
    """A function of the one that is judged and of `t`; `text` is its code, if it was made here."""

    call: Callable[[Any, Any], Any]
    text: str = ""
    assumes: tuple[Assumption, ...] = ()
    unasked: tuple[str, ...] = ()  # what is not passed, and keeps its default
    heads: int | None = None  # how many the function has, where it takes no other number
    model: int | None = None  # how wide embeddings are, where it takes no others


@dataclass(frozen=True, eq=False)
class Way:
    """The adapters of one layout; the last way has none, and says why where there was no other."""

    adapters: tuple[Adapter, ...] = ()
    name: str = ""  # of the function
    why: str = ""  # it is not callable
    skeleton: str = ""  # an adapter to edit
    tried: tuple[str, ...] = ()


def written(body: str, library: str, **about: Any) -> Adapter:
    """An adapter of this code, the body of a function of `f` and `t`."""
    text = f"{IMPORTS[library]}\n\n\ndef call(f, t):\n{indent(body, '    ')}\n"
    return Adapter(compiled(text), text, **about)


def compiled(text: str) -> Callable[[Any, Any], Any]:
    """The function `call` of an adapter's code."""
    names: dict[str, Any] = {}
    exec(compile(text, "<adapter>", "exec"), names)
    call: Callable[[Any, Any], Any] = names["call"]
    return call


def called(function: str, arguments: Sequence[tuple[str, str]]) -> str:
    """The code of a call; arguments with a name are passed by it."""
    return f"{function}({', '.join(f'{name}={x}' if name else x for name, x in arguments)})"

"""The normalisations of a layer around attention, which is judged without them.

Each is replaced by nothing. Doubling shows what they reach: queries, keys and values get twice the
input, and the input that is added stays the same. Must not call it, nor know any probe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

NORM = re.compile(r"Norm\d*$|(Layer|RMS|Group)Norm\dd$")
# Normalisations of queries and keys, which reach these alone, and others within attention.
WITHIN = re.compile(r"(^|[._])(q|k|qk|query|key)(_|norm|ln|$)|att\w*\.", re.IGNORECASE)
REPLACED = "regard_replaced"  # marks what was put in place of a normalisation


class Passing:
    """What is put in place of normalisations that are no torch modules: it passes on its input."""

    def __init__(self) -> None:
        self.factor = 1
        self.names: tuple[str, ...] = ()  # of what it is put in the place of

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The first array of several axes."""
        arrays = (one for one in (*given, *named.values()) if getattr(one, "ndim", 0) > 1)
        found: Any = next(arrays, given[0] if given else None)
        return found * self.factor

    forward = __call__


def without_norms(module: Any) -> Any:
    """The torch module with its normalisations replaced by nothing."""
    import torch

    for part in [*module.modules()]:
        for name, child in part.named_children():
            if NORM.search(type(child).__name__):
                nothing = torch.nn.Identity()
                setattr(nothing, REPLACED, True)
                setattr(part, name, nothing)
    return module


@contextlib.contextmanager
def doubled_norms(function: Callable[..., Any]) -> Iterator[None]:
    """Let what replaces a normalisation return twice its input for the time of the block."""
    own: Any = function
    passing = list[Passing]()
    while hasattr(own, "__wrapped__"):
        passing += [own.passing] if hasattr(own, "passing") else []
        own = own.__wrapped__
    for one in passing:
        one.factor = 2
    parts = own.named_modules() if hasattr(own, "named_modules") else ()
    hooks = [
        part.register_forward_hook(lambda *call: 2 * call[-1])
        for name, part in parts
        if hasattr(part, REPLACED) and not WITHIN.search(name)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for one in passing:
            one.factor = 1

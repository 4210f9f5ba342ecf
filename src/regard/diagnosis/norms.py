"""The normalisations of a layer around attention, which is judged without them.

Each is replaced by nothing. Doubling shows what they reach: queries, keys and values get twice the
input, and the input that is added stays the same. Must not call it, nor know any probe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

NORM = re.compile("Norm$")
# Normalisations of queries and keys, which reach these alone, and others within attention.
WITHIN = re.compile(r"(^|[._])(q|k|qk|query|key)(_|norm|ln|$)|att\w*\.", re.IGNORECASE)
REPLACED = "regard_replaced"  # marks what was put in place of a normalisation


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
    own = getattr(function, "__wrapped__", function)
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

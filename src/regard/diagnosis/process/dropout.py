"""Torch's dropout while a function is called: switched off, and noted where it was meant to run.

Must not know any probe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any


@contextlib.contextmanager
def without_dropout(framework: str) -> Iterator[list[str]]:
    """Make torch's dropout the identity; the list gets a name for each that was on.

    A module in evaluation mode passes `training=False`, which is not noted.
    """
    noted: list[str] = []
    if framework != "torch":
        yield noted
        return
    with _mode()(noted):
        yield noted


@cache
def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    functional = torch.nn.functional
    direct = (functional.dropout, torch.dropout)

    class Quiet(TorchFunctionMode):  # type: ignore[misc]
        def __init__(self, noted: list[str]) -> None:
            super().__init__()
            self.noted = noted

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            own = dict(kwargs or {})
            if function in direct:
                p = own.get("p", args[1] if len(args) > 1 else 0.5)
                training = own.get("training", own.get("train", [*args, True, True, True][2]))
                if p and training:
                    self.noted.append("dropout")
                return own["input"] if "input" in own else args[0]
            if function is functional.scaled_dot_product_attention:
                if own.get("dropout_p", args[4] if len(args) > 4 else 0.0):
                    self.noted.append("dropout")
                own.pop("dropout_p", None)
                args = args[:4] + ((0.0, *args[5:]) if len(args) > 4 else ())
            return function(*args, **own)

    return Quiet

"""What torch's fused attention computes inside, step by step, for what notes it.

Must not know what a function should compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


@contextlib.contextmanager
def noting_fused(note: Callable[[Any], Any], framework: str) -> Iterator[None]:
    """While this lasts, q·k, the scores and the weights of fused attention are noted."""
    if framework != "torch":
        yield
        return
    with _mode()(note):
        yield


@cache
def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    fused = torch.nn.functional.scaled_dot_product_attention

    class Open(TorchFunctionMode):  # type: ignore[misc]
        def __init__(self, note: Callable[[Any], Any]) -> None:
            super().__init__()
            self.note = note

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            own = dict(kwargs or {})
            if function is fused:
                names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
                self._notes(**{**dict(zip(names, args, strict=False)), **own})
            return function(*args, **own)

        def _notes(
            self,
            query: Any,
            key: Any,
            attn_mask: Any = None,
            is_causal: bool = False,
            scale: float | None = None,
            **_: Any,
        ) -> None:
            repeats = query.shape[-3] // key.shape[-3] if query.ndim > 3 else 1
            key = key.repeat_interleave(repeats, -3) if repeats > 1 else key
            products = self.note(query @ key.transpose(-2, -1))
            scores = products * (query.shape[-1] ** -0.5 if scale is None else scale)
            if is_causal:
                seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                scores = scores.masked_fill(~seen, -torch.inf)
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                scores = scores.masked_fill(~attn_mask, -torch.inf)
            elif attn_mask is not None:
                scores = scores + attn_mask
            self.note(self.note(scores).softmax(-1))

    return Open

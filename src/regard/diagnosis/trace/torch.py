"""What torch computes inside its own calls, told to notes: attention opened into its steps.

Owns which of its functions are opened, and the line of the user's code that called them. Must not
know what is looked for.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from regard.diagnosis.trace.notes import Notes

# Where torch's own modules look them up.
_OPENED = {
    "torch.nn.functional": ("linear", "softmax", "scaled_dot_product_attention"),
    "torch": ("bmm", "baddbmm", "softmax"),
}


def line_within(file: str) -> int:
    """The line of a file that is running; 0 if none of it is."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def module_of(thing: Any) -> Any:
    """The module of a function, a class or an object; itself, if it is one."""
    if isinstance(thing, types.ModuleType):
        return thing
    name = getattr(thing, "__module__", None) or type(thing).__module__
    return sys.modules.get(name, types.ModuleType("none"))


@contextlib.contextmanager
def opened(notes: Notes, thing: Any) -> Iterator[None]:
    """While this lasts torch tells what it computes inside; where it is not used, nothing does."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    places = [(sys.modules[name], own) for name, every in _OPENED.items() for own in every]
    wrapped = {id(getattr(*one)): _told(getattr(*one), notes) for one in places}
    module = module_of(thing)
    places += [(module, name) for name, one in vars(module).items() if id(one) in wrapped]
    before = [(place, name, getattr(place, name)) for place, name in places]
    fast = torch.backends.mha.get_fastpath_enabled()
    eager: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        eager = torch.compiler.set_stance("force_eager")
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for place, name, own in before:
            setattr(place, name, wrapped[id(own)])
        with eager:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for place, name, own in before:
            setattr(place, name, own)


def _told(function: Callable[..., Any], notes: Notes) -> Callable[..., Any]:
    """A function that tells its result, and that of each of its steps if they are known."""

    @functools.wraps(function)
    def told(*own: Any, **options: Any) -> Any:
        result = function(*own, **options)
        line = line_within(notes.code.file) if notes.listening else 0
        if line:
            operands: tuple[Any, ...] = (*own, *options.values())
            if function.__name__ == "scaled_dot_product_attention":
                operands = _attention(notes, line, *own, **options)
            notes.within(line, function.__name__, result, operands)
        return result

    return told


def _attention(
    notes: Notes,
    line: int,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    """Tell the steps of torch's attention; what its result is made of."""
    import torch

    def told(name: str, made: Any, *of: Any) -> Any:
        notes.within(line, name, made, of)
        return made

    if enable_gqa:
        shared = query.size(-3) // key.size(-3)
        key, value = (
            told("repeated", one.repeat_interleave(shared, -3), one) for one in (key, value)
        )
    scores = told("scores", query @ key.transpose(-2, -1), query, key)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    last = told("scaled", scores * factor, scores)
    if is_causal:
        attn_mask = torch.ones(last.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        last = told("masked", last.masked_fill(~attn_mask, float("-inf")), last, attn_mask)
    elif attn_mask is not None:
        last = told("masked", last + attn_mask, last, attn_mask)
    return told("weights", torch.softmax(last, -1), last), value

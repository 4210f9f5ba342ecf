"""What a block of several layers makes of their results: each layer is silenced, or is told what
to return.

A block that adds what its layers return passes its input on where all are silent, and shows what
each returns. Must not call anything but the block, nor know any probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from regard.diagnosis.forms.norms import REPLACED, doubled_norms

MOST_PARTS = 8
SILENT, DOUBLED = "silent layers", "silent layers, doubled norms"  # names that no layer has


def outputs_of_parts(block: Any, *given: Any, **named: Any) -> dict[str, Any]:
    """The outputs of a torch module where its layers return nothing but zeros.

    One output as the block is; one with every normalisation doubled, but for a last one behind all
    layers; and for each layer, by its name, one where this layer returns numbers.
    A TypeError for other functions.
    """
    parts, ends = _parts_of(block, given, named)

    def output(telling: int | None = None) -> Any:
        hooks = [
            part.register_forward_hook(_returning(number == telling))
            for number, part in enumerate(parts)
        ]
        try:
            return _first(block(*given, **named))
        finally:
            for hook in hooks:
                hook.remove()

    with doubled_norms(block):
        doubled = output() / (2 if ends else 1)
    names = {part: name for name, part in block.named_modules()}
    told = {names[part]: output(number) for number, part in enumerate(parts)}
    return {SILENT: output(), DOUBLED: doubled, **told}


def _parts_of(block: Any, given: Any, named: Any) -> tuple[list[Any], bool]:
    """The layers of a block that return as much as itself; and whether it normalises at the end."""
    calls: list[tuple[Any, Any]] = []
    hooks = [
        child.register_forward_hook(lambda part, _, out: calls.append((part, _first(out))))
        for child in _children(block)
    ]
    try:
        whole = _first(block(*given, **named))
    finally:
        for hook in hooks:
            hook.remove()
    alike = [part for part, out in calls if getattr(out, "shape", 0) == whole.shape]
    parts = [part for part in alike if any(True for _ in part.parameters())]
    square = (getattr(part, "in_features", 0) == getattr(part, "out_features", 1) for part in parts)
    if not 2 <= len(parts) <= MOST_PARTS or len({*parts}) < len(parts) or sum(square) > 1:
        raise TypeError("it has no layers whose results it adds")  # or they are attention itself
    return parts, hasattr(calls[-1][0], REPLACED)


def _children(block: Any) -> Iterator[Any]:
    for child in block.children() if hasattr(block, "children") else ():
        yield from child if type(child).__name__ == "ModuleList" else [child]


def _returning(numbers: bool) -> Callable[..., Any]:
    def hook(_: Any, __: Any, result: Any) -> Any:
        import torch

        out = _first(result)
        drawn = torch.rand(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        changed = drawn if numbers else 0 * drawn
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    return hook


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result

"""Objects of classes without weights that are made for one width of queries, as Attention(d_k).

One is made for each width that probes have, with the scale of that width if the class asks for a
scale. Must not know any probe.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.diagnosis.forms.construction import fresh_weights
from regard.diagnosis.forms.source import SCALE
from regard.diagnosis.reading.constructor_arguments import (
    constructor_arguments,
    is_count,
    size_by_name,
)
from regard.diagnosis.reading.parameter_names import plain
from regard.diagnosis.reading.signature import Parameter, text_of

WIDTHS = {"width": 6, "model": 6}
OF_FUNCTIONS = re.compile("(map|fn|func|function|kernel)$")
NO_SIZES = dict.fromkeys(
    ("heads", "key_heads", "window", "softcap", "block", "turned", "turned share", "length"), None
) | dict.fromkeys(("shift", "batch", "layers", "dropout"), None)


@dataclass
class OfAnyWidth:
    """Calls an object that is made for the width of the queries that it gets."""

    kind: Any
    method: str
    queries: str  # the parameter
    fixed: Mapping[str, Any]  # arguments of the constructor
    width: str  # its parameter for the width, if it has one
    sharp: str  # and that for a scale
    divides: bool  # whether scores are divided by that
    made: dict[int, Any] = field(default_factory=dict)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the object of this width returns."""
        rows = named[self.queries] if self.queries in named else given[0]
        own = self.of(int(rows.shape[-1]))
        return (own if self.method == "forward" else getattr(own, self.method))(*given, **named)

    def of(self, width: int) -> Any:
        """The object of one width."""
        if width not in self.made:
            sizes = {self.width: width} if self.width else {}
            scales = {self.sharp: width ** (0.5 if self.divides else -0.5)} if self.sharp else {}
            self.made[width] = fresh_weights(self.kind(**{**self.fixed, **sizes, **scales}))
        return self.made[width]


def of_any_width(
    kind: Any, method: str, known: Sequence[Parameter], heads: int | None
) -> OfAnyWidth | None:
    """How to call objects of a class that depend on the width, or on the scale, alone."""
    queries = next((one.name for one in known if one.role == "query"), "")
    arguments = dict(constructor_arguments(kind, heads, own_sizes=True))
    parameters = inspect.signature(kind).parameters
    sized = (one for one in parameters if not inspect.isroutine(parameters[one].default))
    widths = [one for one in sized if _is_width(one, kind)]
    sharp = [one for one in parameters if _is_scale(parameters[one], alone=not widths)]
    counts = [one for one in parameters if is_count(one, kind)]
    code = _without_constructor(kind)
    if not queries or len(widths) > 1 or len(sharp) > 1 or not (widths or sharp):
        return None
    if any(re.search(rf"self\.\w*{one}\b|self\.\w*heads?\b|self\.h\b", code) for one in counts):
        return None  # it takes heads apart, and its width may be that of all of them
    divided = sharp and re.search(rf"/=? *(self\.)?_?{sharp[0]}\b", text_of(kind)) is not None
    own = OfAnyWidth(
        kind, method, queries, arguments, "".join(widths), "".join(sharp), bool(divided)
    )
    with contextlib.suppress(Exception):
        made = own.of(5)
        return None if [*_weights_of(made)] else own
    return None


def _is_width(name: str, kind: Any) -> bool:
    if is_count(name, kind) or OF_FUNCTIONS.search(name):
        return False
    return bool(size_by_name(name, {**NO_SIZES, **WIDTHS}) == 6)


def _is_scale(parameter: inspect.Parameter, *, alone: bool) -> bool:
    """Whether a caller has to give a scale, or to change one that does nothing.

    Or any number, where nothing else says the width: it is that of another one by default.
    """
    asked = parameter.default is parameter.empty or parameter.default in (1, 1.0)
    asked |= alone and isinstance(parameter.default, int | float) and parameter.default > 0
    is_flag = isinstance(parameter.default, bool)
    return asked and not is_flag and SCALE.fullmatch(plain(parameter.name)) is not None


def _without_constructor(kind: Any) -> str:
    own = (one for name, one in vars(kind).items() if name != "__init__")
    return "\n".join(text_of(one) for one in own if inspect.isfunction(one))


def _weights_of(made: Any) -> Sequence[Any]:
    own: Callable[[], Any] | None = getattr(made, "parameters", None)
    return [] if own is None else [*own()]

"""Rotary positions that a function gets as tables: cosines and sines, complex numbers, or a pair.

The tables themselves are arguments like others. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.parameter_names import plain
from regard.diagnosis.reading.signature import Callee, Parameter

COMPLEX = re.compile("^(freqs?cis|freqscomplex|rotarycis|cis)$")
PAIRED = re.compile(
    "^(positionembeddings?|rotaryposemb|rotaryemb|rotary|rope|cossin|ropecache|freqs|ropetables?)$"
)
# A number for each pair of features, or for each feature: in two halves, or in pairs.
FORMS = ("halves", "half", "pairs", "batch halves", "batch half")
LONG = 64  # positions of a table from which a function takes its own
BASE = 10000.0


def table(of: Callable[[Array], Array], form: str, rows: int, width: int) -> Array:
    """The cosine or sine of each position's angles, (L, D/2) or (L, D); (1, L, …) of a batch."""
    half = np.arange(rows)[:, None] * BASE ** (-np.arange(0, width, 2) / width)
    kind = form.removeprefix("batch ")
    angles = half if kind == "half" else np.tile(half, 2) if kind == "halves" else half.repeat(2, 1)
    return of(angles)[None] if kind != form else of(angles)


def with_forms(callee: Callee) -> Iterator[Callee]:
    """The same with each form that its tables or positions may have."""
    roles = callee.roles
    if "cos" in roles and "sin" in roles:
        yield from (replace(callee, tables=form) for form in FORMS)
    elif "positions" in roles and roles["positions"].required:
        yield from (replace(callee, tables=form) for form in ("", "batch"))
    else:
        yield callee


def from_tables(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that takes cosines and sines apart, of one that takes both in one argument."""
    own = next((one for one in parameters if one.required and _kind(one.name)), None)
    if own is None:
        return None
    names = {f"{own.name}_{part}": part for part in ("cos", "sin")}
    inner = [Parameter(name, part, keyword=True) for name, part in names.items()]
    rest = [replace(one, keyword=True) for one in parameters if one is not own]
    complex_ones = _kind(own.name) == "complex"

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        cos, sin = (given.pop(name) for name in names)
        return given | {own.name: cos + 1j * sin if complex_ones else (cos, sin)}

    return Packing(function, pack), [*rest[:1], *inner, *rest[1:]]


def _kind(name: str) -> str:
    name = plain(name)
    return "complex" if COMPLEX.match(name) else "pair" if PAIRED.match(name) else ""

"""Functions of retention that ask for the decay of each head, as functions of the usual arrays.

They get the decays of the paper, 1 − 2^(−5 − h). Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.after_attention import like_another
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.forms.source import code_of
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter

DECAY = re.compile("(gamma|decay)(s|_rates?|_factors?)?$", re.IGNORECASE)
RETAINS = re.compile(r"\bretention|_retention|retnet", re.IGNORECASE)


def with_decays(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function without the decays that it asks for, of all heads or of one."""
    text = f"{getattr(function, '__name__', '')}\n{code_of(function)}"
    asked = [one for one in parameters if DECAY.fullmatch(one.name)]
    queries = next((one.name for one in parameters if role_of(one.name) == "query"), "")
    if len(asked) != 1 or not queries or RETAINS.search(text) is None:
        return None
    name = asked[0].name
    words = documented_axes(text, [queries, name])
    axes, own = words.get(queries, ()), words.get(name, ())
    of_one = asked[0].kind == "float" or isinstance(asked[0].default, float)

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        rows = given[queries]
        at = axes.index(own[0]) if own and own[0] in axes and len(axes) == rows.ndim else -3
        heads = rows.shape[at] if rows.ndim > 2 else 1
        decays = 1 - 2.0 ** (-5 - np.arange(1 if of_one else heads))
        one_number = of_one or (rows.ndim == 2 and not own)
        return given | {name: float(decays[0]) if one_number else like_another(decays, rows)}

    rest = [replace(one, keyword=True) for one in parameters if one.name != name]
    if not asked[0].required and asked[0].default is None:
        return Packing(function, lambda given: given), rest  # it makes them itself
    return Packing(function, pack), rest

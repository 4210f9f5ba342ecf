"""Functions that put what attention returns beside the queries and project both, as Luong does.

The matrix takes a small part of the first and nothing of the queries, and that is taken back, with
the tanh around it. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.after_attention import like_another
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.documented import documented_sizes
from regard.diagnosis.reading.signature import Parameter, text_of

# Two arrays, one beside the other, which a function of this name gets.
PAIR = r"(?:concatenate|concat|cat|hstack)\(\s*[\[(]\s*([^,\[\]\n]+?)\s*,\s*([^,\[\]\n]+?)\s*[\])]"
SHARE = 2.0**-10  # so small that tanh is almost what it gets


def with_joined_output(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function without the matrix that it multiplies both with, if it asks for one."""
    text, names = text_of(function), [one.name for one in parameters if one.required]
    pairs = (one.groups() for one in re.finditer(PAIR, text))
    pair = next((one for one in pairs if len({*one} & {*names}) == 1), None)
    if pair is None:
        return None
    query = next(name for name in pair if name in names)
    shapes = documented_sizes(text, names)
    found = [n for n in names if _is_twice(shapes.get(n, ())) or _is_twice(shapes.get(n, ())[::-1])]
    if len(found) != 1:
        return None
    name, turned = found[0], not _is_twice(shapes[found[0]])
    bounded = re.search(rf"tanh\([^\n]*\b{re.escape(name)}\b", text) is not None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        width = int(given[query].shape[-1])
        parts = [np.zeros((width, width)), SHARE * np.eye(width)]
        matrix = np.concatenate(parts if pair[0] == query else parts[::-1])
        matrix = matrix.T.copy() if turned else matrix
        return {**given, name: like_another(matrix, given[query])}

    def unpack(result: Any) -> Any:
        out, *more = result if isinstance(result, tuple) else (result,)
        out = (_arctanh(out) if bounded else out) / SHARE
        return (out, *more) if more else out

    rest = [replace(one, keyword=True) for one in parameters if one.name != name]
    return Packing(function, pack, unpack), rest


def _is_twice(shape: Sequence[str]) -> bool:
    return len(shape) == 2 and re.sub(r"^2 \* ", "", shape[0]) == shape[1] != shape[0]


def _arctanh(array: Any) -> Any:
    if hasattr(array, "at"):
        import jax.numpy as jnp

        return jnp.arctanh(array)
    return array.arctanh() if hasattr(array, "arctanh") else np.arctanh(array)

"""Attention over a pair representation (I, J, C), called as attention over its rows.

As in AlphaFold: every row, or every column, attends within itself, and gets a bias of each head
that is made of the pairs. Options say which. Must not know any probe, and of mistakes
nothing but names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.construction import GATE_LAYER
from regard.diagnosis.forms.images import in_a_row
from regard.diagnosis.forms.norm_functions import without_norm_functions
from regard.diagnosis.forms.trees import Tree
from regard.diagnosis.forms.weights import layers_without_a_role
from regard.diagnosis.reading.constructor_arguments import like
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import PAIRS, Parameter

TRIANGLE = re.compile(
    r"triang\w*?[ _-]?(self[ _-]?)?att|(start|end)ing[ _-]?node|"
    r"pair[ _-]?(representation|stack|act\b)|TriAtt",
    re.IGNORECASE,
)
MASK = re.compile("mask", re.IGNORECASE)
OF_ROWS = re.compile("start|row|outgoing", re.IGNORECASE)
OF_COLUMNS = re.compile("end|col|transpos|incoming", re.IGNORECASE)
# What is exchanged before and after attention, and the mistake of what is right only so.
FORMS: Mapping[str, tuple[tuple[bool, bool, str], ...]] = {
    "rows": ((False, False, ""), (True, True, "pairs_of_the_other_node")),
    "columns": (
        (True, True, ""),
        (True, False, "pairs_not_exchanged_back"),
        (False, False, "pairs_of_the_other_node"),
    ),
    "": ((False, False, ""), (True, True, "")),
}


class OfPairs:
    """A function of pairs as one of rows (I, J, C). `__wrapped__` is the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        axes: int,
        form: tuple[bool, bool, str],
        fixed: Mapping[str, Any],
        option: str,
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._names, self._axes, self._fixed = names, axes, fixed
        self._before, self._after, self.fault = form
        self.option = option

    def __call__(self, **given: Any) -> Any:
        """The output of each pair."""
        rows, length, _ = given[self._names[0]].shape
        if rows != length:
            raise ValueError("it takes as many rows as columns")
        if any(given[name].ndim != 2 for name in self._names[1:] if name in given):
            raise ValueError("a mask of pairs has rows and columns")  # others would fit by accident
        own = {**self._fixed, **given}
        for name in self._names:
            if name in given:
                array = given[name].swapaxes(0, 1) if self._before else given[name]
                own[name] = in_a_row(array)[None] if self._axes == 4 else in_a_row(array)
        result = self.__wrapped__(**own)
        out = result[0] if isinstance(result, tuple) else result
        out = out.reshape(rows, length, -1)
        return out.swapaxes(0, 1) if self._after else out


def are_pairs(text: str, parameters: Sequence[Parameter]) -> bool:
    """Whether a function takes one array, of pairs, and perhaps a mask of them."""
    needed = [one for one in parameters if one.required and not MASK.search(one.name)]
    return bool(TRIANGLE.search(text)) and len(needed) == 1 and needed[0] is parameters[0]


def called_as_rows(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    text: str,
    meant: str,
    option: str = "",
) -> Iterator[tuple[OfPairs, list[Parameter]]]:
    """The function as functions of rows, the right ones first, with each value of its option.

    `meant` says whether it is one of rows or of columns, if that is known.
    """
    first, *others = parameters
    function = without_norm_functions(function, function)
    mask = next((one for one in others if MASK.search(one.name)), None)
    names = [first.name, *([mask.name] if mask else [])]
    documented = len(documented_axes(text, names).get(first.name, ()))
    axes = (documented,) if documented in (3, 4) else (3, 4)
    known = [
        replace(
            one,
            role="x" if one is first else "key_mask" if one is mask else one.role,
            keyword=True,
        )
        for one in parameters
    ]
    flag = next((one for one in others if _values(one.name, one.default, text)), None)
    fixed: list[dict[str, Any]] = [{}]
    if flag is not None:
        known = [one for one in known if one.name != flag.name]
        fixed = [{flag.name: value} for value in _values(flag.name, flag.default, text)]
    for number, own in enumerate(fixed):
        which = next((orientation(*one) for one in own.items()), meant)
        said = option or ", ".join(f"{n}={v!r}" for n, v in own.items() if number)
        for form in FORMS[which]:
            for count in axes:
                yield OfPairs(function, names, count, form, own, said), known


def orientation(name: str, value: Any) -> str:
    """Whether an option means rows or columns; nothing if that is not clear.

    >>> orientation("starting", False), orientation("orientation", "per_row")
    ('columns', 'rows')
    """
    text = value if isinstance(value, str) else name
    found = "rows" if OF_ROWS.search(text) else "columns" if OF_COLUMNS.search(text) else ""
    return {"rows": "columns", "columns": "rows"}.get(found, "") if value is False else found


def _values(name: str, default: Any, text: str) -> list[Any]:
    """The values of an option that says whether rows or columns are meant, its default first."""
    if type(default) is bool and orientation(name, default):
        return [default, not default]
    if not isinstance(default, str) or not orientation(name, default):
        return []
    compared = re.findall(rf"\b{name}\b\s*(?:==|!=|(?:not )?in)\s*([^\n:]*)", text)
    found = [one for words in compared for one in re.findall(r"[\"'](\w+)[\"']", words)]
    return [default, *dict.fromkeys(one for one in found if one != default)]


def options_of(kind: type, text: str) -> list[dict[str, Any]]:
    """What else a constructor may be given: each other value of an option of this kind."""
    for one in inspect.signature(kind).parameters.values():
        default = one.default
        if (
            default is one.empty
            and one.annotation in (bool, "bool")
            and orientation(one.name, True)
        ):
            default = True
        if values := _values(one.name, default, text):
            return [{one.name: value} for value in values]
    return [{}]


def matrix_of_pairs(thing: Any, weights: Mapping[str, Array], heads: int) -> dict[str, Array]:
    """The weights of an object with the matrix that makes a bias of pairs, if it has one."""
    width = len(weights["W_q"])
    for path, weight in layers_without_a_role(thing):
        if GATE_LAYER.search(path) or {*weight.shape} != {width, heads} or width == heads:
            continue
        return {**weights, PAIRS: weight if len(weight) == width else weight.T.copy()}
    return {**weights}


def matrix_in_a_tree(function: Any, weights: Mapping[str, Array], heads: int) -> dict[str, Array]:
    """The same for a function whose weights are in a tree; the matrix in it gets other numbers."""
    width = len(weights["W_q"])
    for tree in getattr(function, "_fixed", {}).values():
        for name, array in tree.items() if isinstance(tree, Tree) else ():
            if getattr(array, "shape", ()) != (width, heads) or role_of(name) or width == heads:
                continue
            drawn = np.random.default_rng(11).uniform(-0.9, 0.9, (width, heads))
            own = drawn if isinstance(array, np.ndarray) else drawn.astype(np.float32)
            tree[name] = own if isinstance(array, np.ndarray) else like(array, own)
            return {**weights, PAIRS: own.astype(float)}
    return {**weights}

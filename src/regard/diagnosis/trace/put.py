"""Other values put into a run, one at a time, to see whether the rest then comes right.

An operator, a number, a name or a mask is exchanged for another while the code runs; nothing of it
is loaded again. Where one such exchange makes the result right, that is where the mistake is. Must
not know what anything is called, nor which mistakes are known.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.trace.notes import Exchange, Record, numbers
from regard.diagnosis.trace.rewrite import IN_PLACE, OPERATORS, Node
from regard.diagnosis.trace.traced import Traced

MOST_TRIES = 400
MOST_WORK = 600_000  # expressions that are run again altogether
OF_JAX = 60  # times as much work is one that JAX computes
LONGER = 4  # times as many expressions may run when one is exchanged
MOST_NAMES = 8  # that take the place of one
FARTHER = 5  # so many lines farther away is as unlikely as a change of the next rank
PUT = 3  # the rank of lengths that are put in, as against small changes; others have the next

# Each operator with those that are written for it by mistake.
OTHERS: Mapping[str, tuple[str, ...]] = {
    "Add": ("Sub", "Mult"),
    "Sub": ("Add",),
    "Mult": ("Div", "Add"),
    "Div": ("Mult", "FloorDiv"),
    "FloorDiv": ("Mod", "Div", "CeilDiv"),
    "Mod": ("FloorDiv",),
    "Pow": ("Mult", "Div"),
    "BitAnd": ("BitOr",),
    "BitOr": ("BitAnd",),
    "BitXor": ("BitAnd", "BitOr"),
    "Lt": ("LtE", "Gt", "GtE"),
    "LtE": ("Lt", "GtE", "Gt"),
    "Gt": ("GtE", "Lt", "LtE"),
    "GtE": ("Gt", "LtE", "Lt"),
    "Eq": ("NotEq", "GtE", "LtE"),
    "NotEq": ("Eq",),
}
UP = {"CeilDiv": lambda a, b: -(-a // b)}
SIGNS = {"Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**"}
SIGNS |= {"BitAnd": "&", "BitOr": "|", "BitXor": "^", "Lt": "<", "LtE": "<=", "Gt": ">"}
SIGNS |= {"CeilDiv": "// rounded up", "GtE": ">=", "Eq": "==", "NotEq": "!="}
TURNED = ("Sub", "Div", "MatMult", "FloorDiv", "Mod", "Pow")  # operands whose order counts


@dataclass(frozen=True)
class Cure:
    """One exchange that makes the result right."""

    node: int
    line: int
    said: str  # such as "with < instead of <="
    rank: int  # how small the change is: the smaller the likelier


@dataclass(frozen=True)
class _Try:
    said: str
    rank: int
    exchange: Exchange


class Putting:
    """Runs the code again with other values."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.work = 0

    def comes_right(self, exchanges: Mapping[int, Exchange], *, everywhere: bool = True) -> bool:
        """Whether the result is right with these values exchanged, and those of other problems."""
        notes = self.traced.notes
        notes.instead, notes.ran = dict(exchanges), {}
        notes.left = LONGER * (1 + len(self.traced.others)) * (100 + sum(notes.runs.values()))
        try:
            # What then takes another way, and computes less, is no cure of this one.
            right = self.traced.is_right_again(everywhere=everywhere)
            return right and notes.ran.keys() >= notes.runs.keys()
        finally:
            self.work += sum(notes.ran.values()) * self._weight
            notes.instead, notes.ran = {}, None

    @cached_property
    def _weight(self) -> int:
        kinds = self.traced.notes.kinds.values()
        return OF_JAX if any(one.__module__.startswith("jax") for one in kinds) else 1

    def cure(self, lines: Sequence[int], until: Record | None = None) -> Cure | None:
        """The smallest change that makes the result right, on the first of the lines that has one.

        A value that is put in is looked for from the first line on: others are made of it. What
        ran after a wrong value, `until` which all else is right, cures nothing.
        """
        notes = self.traced.notes
        place = {line: number for number, line in enumerate(lines)}
        every = [
            (own, number)
            for number, first in notes.first.items()
            if notes.nodes[number].line in place and (until is None or first <= until.number)
            for own in self._tries(number)
        ]
        when = {number: first for first, number in enumerate(notes.runs)}
        every.sort(
            key=lambda one: (
                FARTHER * one[0].rank + min(place[notes.nodes[one[1]].line], 2 * FARTHER)
                if one[0].rank < PUT
                else FARTHER * (one[0].rank + 3),
                # A length is handed on from name to name: it is wrong where it is used.
                -when[one[1]] if one[0].rank == PUT else when[one[1]],
            )
        )
        for own, number in every[:MOST_TRIES]:
            if self.work > MOST_WORK:
                break
            # A value that is put in is that of one problem.
            if self.comes_right({number: own.exchange}, everywhere=own.rank < PUT):
                return Cure(number, notes.nodes[number].line, own.said, own.rank)
        return None

    # --- what is tried at one expression -------------------------------------------------------

    def _tries(self, number: int) -> Iterator[_Try]:
        node = self.traced.notes.nodes[number]
        match node.kind:
            case "BinOp" | "Compare":
                yield from _of_operator(node, OPERATORS)
                if node.detail in OPERATORS:
                    yield from self._of_value(number, OPERATORS[node.detail])
            case "AugAssign":
                yield from _of_operator(node, IN_PLACE)
            case "UnaryOp":
                if node.detail in OPERATORS:
                    yield _Try(f"{node.text} without its sign", 0, lambda own: own)
            case "Constant":
                yield from _of_constant(node)
            case "Name":
                yield from self._of_name(number)
                yield from self._of_value(number)
            case "Call" | "Attribute" | "Subscript":
                yield from self._of_value(number)

    def _of_name(self, number: int) -> Iterator[_Try]:
        """What else is at hand there and has the same form, or is not read anywhere."""
        node = self.traced.notes.nodes[number]
        for other in node.names[: 4 * MOST_NAMES]:
            form = self._forms.get((node.scope, other))
            if other != node.detail and form in (None, self._form(number)):
                yield _Try(f"with {other} instead of {node.detail}", 2, _named(other))

    @cached_property
    def _forms(self) -> Mapping[tuple[int, str], Any]:
        """The form of what each name of a function is, where it is read."""
        nodes = self.traced.notes.nodes
        names = (one for one in self.traced.notes.runs if nodes[one].kind == "Name")
        return {(nodes[one].scope, nodes[one].detail): self._form(one) for one in names}

    def _form(self, number: int) -> tuple[Any, ...]:
        notes = self.traced.notes
        return notes.kinds.get(number), *(one.value.shape for one in notes.last(number))

    def _of_value(self, number: int, operation: Callable[..., Any] | None = None) -> Iterator[_Try]:
        """Another number, or another mask, in the place of a value that may be one."""
        notes = self.traced.notes
        node, kind = notes.nodes[number], notes.kinds.get(number, type(None))
        own = [one.value for one in notes.last(number)]
        is_array = len(own) == 1 and own[0].ndim > 0
        if not (is_array or issubclass(kind, int | float | np.generic) or len(own) == 1):
            return
        tries = [_Try(f"with the opposite of {node.text}", 2, _opposite)]
        for step in (1, -1) if kind is int else ():
            tries.append(_Try(f"with {node.text} {step:+d}", 2, _moved(step)))
        for name, (scalar, rank) in (
            self._scalars.items() if not is_array and kind is not bool else ()
        ):
            tries.append(_Try(f"with {name} for {node.text}", rank, _scalar(scalar)))
        for name, cells in self._masks.items() if is_array and has_two_values(own[0]) else ():
            tries.append(_Try(f"with {name} for {node.text}", PUT + 1, _mask(cells)))
        for one in tries:
            if operation is None:
                yield one
                continue

            def exchange(*own: Any, put: Exchange = one.exchange) -> Any:
                return put(operation(*own), None)

            yield _Try(one.said, one.rank, exchange)

    @cached_property
    def _scalars(self) -> Mapping[str, tuple[float, int]]:
        """Numbers that may be meant, each with its rank."""
        probe = self.traced.problem.probe
        size = probe.sizes
        found = {f"{letter} = {size[letter]}": (float(size[letter]), PUT) for letter in "DLSHE"}
        if "scale" in probe.right:
            scale = float(probe.right["scale"])
            found[f"the scale {scale:.4g}"] = scale, PUT + 1
            found[f"1/scale {1 / scale:.4g}"] = 1 / scale, PUT + 1
        return found

    @cached_property
    def _masks(self) -> Mapping[str, Array]:
        probe = self.traced.problem.probe
        return {"the right mask": probe.visible} if probe.has_rules else {}


def _of_operator(node: Node, operators: Mapping[str, Callable[..., Any]]) -> Iterator[_Try]:
    sign = SIGNS.get(node.detail, node.detail)
    operators = {**operators, **UP}
    for other in OTHERS.get(node.detail, ()):
        if other in operators:
            said = f"with {SIGNS[other]} instead of {sign} in {node.text}"
            yield _Try(said, 0 if other == OTHERS[node.detail][0] else 1, operators[other])
    if node.detail in TURNED and node.kind == "BinOp":
        own = OPERATORS[node.detail]
        yield _Try(f"with the operands of {node.text} exchanged", 1, lambda a, b: own(b, a))
    if node.kind == "BinOp":
        yield _Try(f"with the first operand of {node.text} alone", 2, lambda a, b: a)
        yield _Try(f"with the second operand of {node.text} alone", 2, lambda a, b: b)
    if node.kind == "AugAssign":
        yield _Try(f"with = instead of {sign}=", 1, lambda a, b: b)


def _of_constant(node: Node) -> Iterator[_Try]:
    value: Any = {"True": True, "False": False}.get(node.detail)
    if value is not None:
        yield _Try(f"with {not value} instead of {value}", 0, lambda own, frame: not own)
        return
    try:
        value = float(node.detail) if not node.detail.lstrip("-").isdigit() else int(node.detail)
    except ValueError:
        return
    if isinstance(value, int):
        others: tuple[float, ...] = (value + 1, value - 1, -value, 0, 1, -1, -2, 2)
    else:
        others = (-value, 1 / value if value else 1.0, 0.0, 1.0, 0.5, 2.0, -1e9, float("-inf"))
        others += (10000.0,)
    for rank, other in enumerate(dict.fromkeys(others)):
        if other != value:
            said = f"with {other:g} instead of {node.text}"
            yield _Try(said, 0 if rank < 2 else 1, lambda own, frame, other=other: other)


class Unfit(Exception):
    """A value cannot take the place of another."""


def _named(name: str) -> Exchange:
    def exchange(value: Any, frame: types.FrameType) -> Any:
        place: types.FrameType | None = frame
        while place is not None and name not in place.f_locals:
            place = place.f_back if place.f_code.co_name.startswith("<") else None
        if place is None:
            raise Unfit
        other = place.f_locals[name]
        if type(other) is not type(value) or other is value:
            raise Unfit
        if getattr(other, "shape", ()) != getattr(value, "shape", ()):
            raise Unfit
        return other

    return exchange


def _opposite(value: Any, frame: types.FrameType) -> Any:
    if isinstance(value, bool):
        return not value
    own = numbers(value)
    if own is None or own.size == 0:
        raise Unfit
    return ~value if own.dtype.kind == "b" else -value


def _moved(step: int) -> Exchange:
    """An integer that is one more or less, as the end of a range or of a part."""

    def exchange(value: Any, frame: types.FrameType) -> Any:
        if type(value) is not int:
            raise Unfit
        return value + step

    return exchange


def _scalar(other: float) -> Exchange:
    def exchange(value: Any, frame: types.FrameType) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
            if getattr(value, "ndim", 1) != 0 or not hasattr(value, "dtype"):
                raise Unfit
            return like(value, np.asarray(other))
        return type(value)(other)

    return exchange


def _mask(cells: Array) -> Exchange:
    def exchange(value: Any, frame: types.FrameType) -> Any:
        own = numbers(value)
        if own is None or own.size < 2 or not has_two_values(own):
            raise Unfit
        whole = cells[:, :1] if (cells == cells[:, :1]).all() else cells
        # One of the same shape, or else the whole mask, where the code may spread it.
        for right in (*reduced(cells, own.shape), *([whole] if own.ndim == 4 else [])):
            made = _as_mask(own, right)
            if made is not None and not np.array_equal(made, own):
                return like(value, made)
        raise Unfit

    return exchange


def has_two_values(own: Array) -> bool:
    """Whether an array has two values at most, as a mask has."""
    return bool(((own == own.min()) | (own == own.max())).all())


def is_mask(own: Array, cells: Array) -> bool:
    """Whether an array says which of the cells (B, H, L, S) are seen, or which are hidden."""
    if own.size < 2 or not has_two_values(own):
        return False
    large = own == own.max()
    every = reduced(cells, own.shape)
    return any(np.array_equal(large, x) or np.array_equal(large, ~x) for x in every)


def _as_mask(own: Array, right: Array) -> Array | None:
    """A mask with the meaning of `right`, written as `own` is."""
    kinds = np.array([own.min(), own.max()])
    if own.dtype.kind == "b":
        # It says whether to attend or to hide: what agrees in more cells.
        agrees = (own == right).mean() >= 0.5
        return right if agrees else ~right
    if not ((kinds == 0) | (kinds == 1)).all():
        return np.where(right, 0.0, kinds[0]) if kinds[1] <= 0 else None
    agrees = ((own > 0) == right).mean() >= 0.5
    return np.where(right == agrees, 1, 0).astype(own.dtype)


def reduced(cells: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Cells (B, H, L, S) in another shape, where axes that it lacks make no difference."""
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(4), count) for count in range(1, 5)
    ):
        others = tuple(axis for axis in range(4) if axis not in kept)
        low, high = cells.min(axis=others), cells.max(axis=others)
        if low.size == np.prod(shape) and np.array_equal(low, high):
            wanted = [n for n in shape if n > 1]
            if [n for n in low.shape if n > 1] == wanted:
                yield low.reshape(shape)


def like(value: Any, array: Array) -> Any:
    """An array as one of the library of a value, of its type."""
    if isinstance(value, np.ndarray | np.generic | float | int):
        return np.asarray(array).astype(getattr(value, "dtype", float), copy=False)
    if hasattr(value, "detach"):
        import torch

        made = torch.as_tensor(np.array(array)).to(value.dtype)
        # The gradient goes the way that it went.
        return value + (made - value).detach() if value.requires_grad else made
    if hasattr(value, "aval") and not hasattr(value, "addressable_data"):
        raise Unfit  # JAX traces it
    import jax.numpy as jnp

    return jnp.asarray(array, value.dtype)

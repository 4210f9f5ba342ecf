"""Slopes of a loss in 60 digits: the answer that tests compare gradients with.

Owns the declared forward steps as a graph of cells on mpmath numbers. A number is moved a little,
up and down, and what depends on it is computed again. Knows no backward step and no array operation
of the library under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import numpy as np

from regard.compute.evaluation import Run
from regard.textbook.steps import INDEX_MAPS, Ref, Step

STEP = mpmath.mpf(10) ** -20

Place = tuple[str, tuple[int, ...]]


def slopes_of(run: Run, names: list[str]) -> dict[str, np.ndarray]:
    """The slope of the loss along each number of these steps, by central differences."""
    with mpmath.workdps(60):
        graph = _Graph(run)
        return {name: graph.slopes(name) for name in names}


def _total(*terms: Any) -> Any:
    return sum(terms, start=mpmath.mpf(0))


class _Graph:
    """Every cell that the loss is made of; a cell comes after those that it is made of."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cells: dict[Place, int] = {}
        self.values: list[Any] = []
        self.made_of: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = []
        self.users: list[list[int]] = []
        self.loss = self._loss()

    def slopes(self, name: str) -> np.ndarray:
        found = np.zeros(self.run.shape(name))
        for index in np.ndindex(*found.shape):
            cell = self.cells.get((name, index))
            if cell is not None:
                down, up = (self._moved(cell, way * STEP) for way in (-1, 1))
                found[index] = (up - down) / (2 * STEP)
        return found

    def _moved(self, cell: int, by: Any) -> Any:
        """The loss where one cell is `by` larger than it would be."""
        changed = {cell: self.values[cell] + by}
        waiting, reached = [cell], {cell}
        while waiting:
            more = [user for user in self.users[waiting.pop()] if user not in reached]
            reached.update(more)
            waiting += more
        for one in sorted(reached - {cell}):
            changed[one] = self._evaluated(one, changed)
        return changed.get(self.loss, self.values[self.loss])

    def _evaluated(self, cell: int, changed: Mapping[int, Any]) -> Any:
        operation, terms = self.made_of[cell]
        values = self.values
        factors = ([changed[k] if k in changed else values[k] for k in term] for term in terms)
        return operation(*(x[0] if len(x) == 1 else x[0] * x[1] for x in factors))

    def _add(self, operation: Callable[..., Any], terms: list[tuple[int, ...]]) -> int:
        cell = len(self.values)
        self.made_of.append((operation, terms))
        self.users.append([])
        self.values.append(None)
        self.values[cell] = self._evaluated(cell, {})
        for one in {one for term in terms for one in term}:
            self.users[one].append(cell)
        return cell

    def _constant(self, number: Any) -> int:
        value = mpmath.mpf(float(number))
        return self._add(lambda: value, [])

    def _loss(self) -> int:
        """The step of that name, or what the gradients that arrive are the slopes of."""
        if "loss" in self.run.steps:
            return self._cell("loss", ())
        terms = []
        for name, arrives in self.run.inputs.items():
            if name.startswith("d_"):
                own = name.removeprefix("d_")
                for index in np.ndindex(*arrives.shape):
                    if own == "lse" and not self.values[self._cell("row_sums", index)]:
                        continue
                    if arrives[index]:
                        terms.append((self._constant(arrives[index]), self._cell(own, index)))
        return self._add(_total, terms)

    def _cell(self, name: str, index: tuple[int, ...]) -> int:
        if (name, index) not in self.cells:
            self.cells[name, index] = self._made(self.run.steps[name], index)
        return self.cells[name, index]

    def _made(self, step: Step, index: tuple[int, ...]) -> int:
        if step.op == "given":
            return self._constant(np.asarray(self.run.inputs[step.name])[index])
        at = dict(zip(step.index, index, strict=True))
        if not step.running:
            # What is hidden is left out of every sum.
            refs = step.operands[1:] if step.op == "select" else step.operands
            return self._add(ELEMENTARY[step.op], [(self._operand(ref, at),) for ref in refs])
        along = [ref for ref in step.operands if step.running in ref.index]
        own = self.run.steps[along[0].step]
        axis = own.axes[along[0].index.index(step.running)]
        terms = []
        for position in range(self.run.sizes[axis]):
            here = {**at, step.running: position}
            if step.over == "visible" and step.running in ("i", "j"):
                seen = tuple(here[x] for x in self.run.steps["visible"].index)
                if not self.run.value("visible")[seen]:
                    continue
            if step.op in TERMS:
                every = [(self._operand(ref, here),) for ref in step.operands]
                terms.append((self._add(TERMS[step.op], every),))
            else:
                terms.append(tuple(self._operand(ref, here) for ref in along))
        if step.op in TERMS:
            return self._add(_root if step.op == "length" else _total, terms)
        beside = [ref for ref in step.operands if step.running not in ref.index]
        terms += [(self._operand(ref, at),) for ref in beside]
        return self._add(_largest if step.op == "max" else _total, terms)

    def _operand(self, ref: Ref, at: Mapping[str, int]) -> int:
        index = tuple(
            INDEX_MAPS[x](at, self.run.sizes) if x in INDEX_MAPS else at[x] for x in ref.index
        )
        return self._cell(ref.step, index)


def _root(*squares: Any) -> Any:
    return mpmath.sqrt(_total(*squares))


# A term that is more than a product.
TERMS: dict[str, Callable[..., Any]] = {
    "tanh_dot": lambda v, a, b: v * mpmath.tanh(a + b),
    "squared_distance": lambda a, b: (a - b) ** 2,
    "length": lambda x: x * x,
    "pick": lambda number, place, wanted: number if place == wanted else mpmath.mpf(0),
}


def _largest(*values: Any) -> Any:
    return max(values, default=mpmath.mpf(0))


ELEMENTARY: dict[str, Callable[..., Any]] = {
    "multiply": lambda a, b: a * b,
    "softcap": lambda x, c: c * mpmath.tanh(x / c),
    "add": _total,
    "select": lambda x: x,
    "subtract": lambda a, b: a - b,
    "exp": mpmath.exp,
    "divide": lambda a, b: a / b if b else mpmath.mpf(0),
    "log": lambda x: mpmath.log(x) if x else mpmath.mpf(0),
    "negate": lambda x: -x,
    "keep": lambda _, x: x,
    "elu_plus_one": lambda x: x + 1 if x > 0 else mpmath.exp(x),
    "half_square": lambda a, b: (a - b) ** 2 / 2,
    "cos": mpmath.cos,
    "sin": mpmath.sin,
    "angle": lambda a, b: a * b,
    "rotate": lambda x, cosine, other, sine: x * cosine + other * sine,
    "apart": lambda a, b: abs(a - b),
    "inverse_root": lambda x: 1 / mpmath.sqrt(x),
    "split": lambda x: x,
    "merge": lambda x: x,
}

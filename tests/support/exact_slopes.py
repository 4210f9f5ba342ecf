"""Slopes of a loss in 60 digits: the answer that tests compare gradients with.

Owns the declared forward steps on mpmath numbers, cell by cell, with one of them moved a little.
Knows no backward step and no array operation of the library under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mpmath
import numpy as np

from regard.compute.evaluation import Run
from regard.textbook.steps import INDEX_MAPS, Step

STEP = mpmath.mpf(10) ** -20


class Exact:
    """The forward steps of a run; hidden keys are left out of every sum.

    The cell `moved` (step, index) is `by` larger than it would be. Steps that it has no part in are
    taken from `still`, where nothing is moved.
    """

    def __init__(
        self,
        run: Run,
        moved: tuple[str, tuple[int, ...]] | None = None,
        by: Any = 0,
        still: Exact | None = None,
    ) -> None:
        self.run, self.moved, self.by, self.still, self.cells = run, moved, by, still, {}
        self.changed = {moved[0]} if moved else {*run.steps}
        for step in run.steps.values():
            if any(ref.step in self.changed for ref in step.operands):
                self.changed.add(step.name)

    def loss(self) -> Any:
        """The step of that name, or what the gradients that arrive are the slopes of."""
        if "loss" in self.run.steps:
            return self.cell("loss", ())
        total = mpmath.mpf(0)
        for name, slopes in self.run.inputs.items():
            if name.startswith("d_"):
                own = name.removeprefix("d_")
                for index in np.ndindex(*slopes.shape):
                    if slopes[index] and (own != "lse" or self.cell("row_sums", index)):
                        total += mpmath.mpf(float(slopes[index])) * self.cell(own, index)
        return total

    def cell(self, name: str, index: tuple[int, ...]) -> Any:
        if self.still is not None and name not in self.changed:
            return self.still.cell(name, index)
        key = (name, index)
        if key not in self.cells:
            made = self.made(self.run.steps[name], index)
            self.cells[key] = made + self.by if key == self.moved else made
        return self.cells[key]

    def made(self, step: Step, index: tuple[int, ...]) -> Any:
        if step.op == "given":
            return mpmath.mpf(float(np.asarray(self.run.inputs[step.name])[index]))
        if step.op == "visible":
            return bool(self.run.value("visible")[index])
        at = dict(zip(step.index, index, strict=True))
        if not step.running:
            return ELEMENTARY[step.op](*(self.operand(ref, at) for ref in step.operands))
        axis = next(
            self.run.steps[ref.step].axes[ref.index.index(step.running)]
            for ref in step.operands
            if step.running in ref.index
        )
        terms = []
        for position in range(self.run.sizes[axis]):
            here = {**at, step.running: position}
            if step.over == "visible" and step.running == "j":
                seen = tuple(here[x] for x in self.run.steps["visible"].index)
                if not self.cell("visible", seen):
                    continue
            along = [ref for ref in step.operands if step.running in ref.index]
            terms.append(mpmath.fprod(self.operand(ref, here) for ref in along))
        beside = [ref for ref in step.operands if step.running not in ref.index]
        terms += [self.operand(ref, at) for ref in beside]
        if step.op == "max":
            return max(terms, default=mpmath.mpf(0))
        return mpmath.fsum(terms)

    def operand(self, ref: Any, at: Mapping[str, int]) -> Any:
        index = tuple(
            INDEX_MAPS[x](at, self.run.sizes) if x in INDEX_MAPS else at[x] for x in ref.index
        )
        return self.cell(ref.step, index)


ELEMENTARY = {
    "multiply": lambda a, b: a * b,
    "softcap": lambda x, c: c * mpmath.tanh(x / c),
    "add": lambda *x: mpmath.fsum(x),
    "select": lambda visible, x: x,  # what is hidden is left out of every sum
    "subtract": lambda a, b: a - b,
    "exp": mpmath.exp,
    "divide": lambda a, b: a / b if b else mpmath.mpf(0),
    "log": lambda x: mpmath.log(x) if x else mpmath.mpf(0),
    "split": lambda x: x,
    "merge": lambda x: x,
    "half_square": lambda a, b: (a - b) ** 2 / 2,
    "inverse_root": lambda x: 1 / mpmath.sqrt(x),
}


def slopes(run: Run, name: str) -> np.ndarray:
    """The slope of the loss along each number of a step, by central differences."""
    found = np.zeros(run.shape(name))
    with mpmath.workdps(60):
        still = Exact(run)
        for index in np.ndindex(*found.shape):
            down, up = (Exact(run, (name, index), way * STEP, still).loss() for way in (-1, 1))
            found[index] = (up - down) / (2 * STEP)
    return found

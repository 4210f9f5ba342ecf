"""From the declaration of a step to the derivation of one of its cells.

Owns which operands a cell has, which terms they make, and which rules judge it. Must not know how a
derivation is written, kernels or views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from regard.explanation.derivation import Derivation, Operand, Term, Values, cell_name, verdict
from regard.explanation.labels import Labels
from regard.rules.visibility import Verdict
from regard.textbook.scalar_check import TERMS
from regard.textbook.steps import INDEX_MAPS, Ref, Step, letters_of


def derive(
    source: Values, labels: Labels, step: str, batch: tuple[int, ...], index: tuple[int, ...]
) -> Derivation:
    """Read the declaration of one cell of a step; `index` has the head first, if there is one."""
    declared = source.steps[step]
    at = dict(zip(declared.index, index, strict=True))

    def operand(ref: Ref, at: Mapping[str, int]) -> Operand:
        where = tuple(
            INDEX_MAPS[letter](at, source.sizes) if letter in INDEX_MAPS else at[letter]
            for letter in ref.index
        )
        step = source.steps[ref.step]
        value = _cell(source, step, batch, where)
        return Operand(ref.step, step.symbol, where, labels.cell(step, where), value)

    letter = declared.running
    verdicts: tuple[Verdict, ...] = ()
    judged = declared.op == "visible" or declared.over == "visible"
    if judged and "j" in at and ("i" in at or letter != "i") and source.rules is not None:
        verdicts = (verdict(source, batch, _head(at), at.get("i", 0), at["j"]),)
    operands: list[Operand] = []
    terms: list[Term] = []
    if not letter:
        operands = [operand(ref, at) for ref in declared.operands]
    elif all(verdict.visible for verdict in verdicts):  # a hidden sum has no terms
        operands, terms = _summands(source, labels, declared, batch, at, operand)
    slope_of = ""
    if declared.of:
        slope_of = cell_name(source.steps[declared.of].symbol, labels.cell(declared, index))
    head = at.get("h")
    if "g" in at:
        head = at["g"] * (source.sizes["H"] // source.sizes["G"])
    return Derivation(
        declared=declared,
        batch=batch,
        index=index,
        labels=labels.cell(declared, index),
        value=_cell(source, declared, batch, index),
        operands=tuple(operands),
        terms=tuple(terms),
        verdicts=verdicts,
        head=head,
        opener=partial(_open, source, labels, batch),
        slope_of=slope_of,
        place=[*source.steps].index(step),
    )


def _summands(
    source: Values,
    labels: Labels,
    declared: Step,
    batch: tuple[int, ...],
    at: Mapping[str, int],
    operand: Callable[[Ref, Mapping[str, int]], Operand],
) -> tuple[list[Operand], list[Term]]:
    """What a cell adds up or takes the largest of."""
    operands: list[Operand] = []
    terms: list[Term] = []
    letter = declared.running
    term = TERMS.get(declared.op)
    first = next(ref for ref in declared.operands if _runs(ref, letter))
    together = [ref for ref in declared.operands if term or _runs(ref, letter)]
    # The heads of a group run inside an entry of the index, not along an axis of their own.
    inside = letter not in first.index
    axis = "R" if inside else source.steps[first.step].axes[first.index.index(letter)]
    for position in _positions(source, declared, batch, at, axis):
        factors = [operand(ref, {**at, letter: position}) for ref in together]
        numbers = tuple(range(len(operands), len(operands) + len(factors)))
        operands += factors
        values = [factor.value for factor in factors]
        kinds = {"H": "head", "R": "head", "G": "key head"}
        label = (
            f"{kinds[axis]} {factors[0].index[0]}"
            if axis in kinds
            else labels.along(axis)[position]
        )
        terms.append(Term(label, numbers, term(*values) if term else math.prod(values)))
    for ref in declared.operands:
        if ref not in together:  # the sink, beside the keys
            operands.append(operand(ref, at))
            terms.append(Term("sink", (len(operands) - 1,), operands[-1].value))
    return operands, terms


def _open(source: Values, labels: Labels, batch: tuple[int, ...], chosen: Operand) -> Derivation:
    return derive(source, labels, chosen.step, batch, chosen.index)


def _runs(ref: Ref, letter: str) -> bool:
    """Whether an operand's cell changes with the running letter."""
    return any(letter in letters_of(entry) for entry in ref.index)


def _positions(
    source: Values, step: Step, batch: tuple[int, ...], at: Mapping[str, int], axis: str
) -> list[int]:
    """Where the running letter goes: where declared so, over visible keys only.

    Along the rows, those that see the cell's key.
    """
    every = range(source.sizes[axis])
    if step.over != "visible" or axis not in ("S", "L"):
        return list(every)
    if axis == "L":
        rows = (source.row("visible", batch, _head(at), row) for row in every)
        return [number for number, row in enumerate(rows) if row[at["j"]]]
    row = source.row("visible", batch, _head(at), at.get("i", 0))
    return [int(key) for key in np.flatnonzero(row)]


def _head(at: Mapping[str, int]) -> int:
    """The query head that a cell belongs to; as many key heads have the same numbers."""
    return at.get("h", at.get("g", 0))


def _cell(source: Values, step: Step, batch: tuple[int, ...], index: tuple[int, ...]) -> float:
    at = dict(zip(step.axes, index, strict=True))
    row = source.row(step.name, batch, at.get("H", at.get("G", 0)), at.get("L", 0))
    return float(row[tuple(at[axis] for axis in step.axes if axis not in ("H", "G", "L"))])

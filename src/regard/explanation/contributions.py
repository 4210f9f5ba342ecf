"""What each term adds to one row of a product: of the output over the keys, or of a gradient.

Reads the declaration of the product; must not know how an explanation was made or is shown.
"""

from __future__ import annotations

import numpy as np

from regard.boundary.arrays import Array
from regard.errors import LabelError, safe_text
from regard.explanation.labels import AXIS_NAMES, Batch, Index, own_head
from regard.explanation.table import Table
from regard.explanation.trace import Trace
from regard.textbook.steps import LETTERS, Ref, Step

_HEADS = ("h", "g", "h//(H//G)")


def contributions(
    trace: Trace, row: Index | None, head: int | None, batch: Batch | None, name: str = "output"
) -> Table:
    """The summands of one row of a step that is a product: (terms, columns)."""
    step = trace.steps[name].declared
    if not _is_product(step):
        possible = ", ".join(n for n, one in trace.steps.items() if _is_product(one.declared))
        raise LabelError(
            f"{safe_text(name, 60)} is no product of two tables, of whose rows each term adds a "
            f"part; those are {possible}"
        )
    first, second = step.operands
    over = trace.steps[first.step if name == "output" else name]
    at, h = over.one(head, batch)
    if "G" in over.axes:
        h *= trace.source.sizes["H"] // trace.source.sizes["G"]
    rows, columns = _rows_and_columns(step)
    i = _position(trace, name, rows, row)
    letter, along = step.running, _axis(trace, first, step.running)
    factors = _line(trace, first, letter, at, h, i)
    with np.errstate(all="ignore"):
        parts = factors[:, None] * _table(trace, second, letter, at, h)
    if step.over == "visible" and "visible" in trace.steps:
        visible = trace.steps["visible"].declared.own
        hidden_terms = letter in ("i", "j")
        seen = _line(trace, visible, letter if hidden_terms else "j", at, h, i)
        parts = np.where(seen[:, None] if hidden_terms else seen, parts, 0)
    own = LETTERS[rows] if rows else "i"
    cell = f"{own}, {letter}" if first.index[-1] == letter else f"{letter}, {own}"
    noun = AXIS_NAMES[along].removesuffix("s")
    return Table(
        "contributions",
        f"{first.symbol}·{second.symbol}",
        f"{first.symbol}[{cell}]·{second.symbol}[{letter}] for each {noun} {letter}; "
        f"the rows add up to {step.symbol}[{own}]",
        parts,
        trace.names.along(along),
        trace.names.along(columns),
        trace.row_notes.get(second.step, ()),
        row_axis=AXIS_NAMES[along],
        column_axis=AXIS_NAMES[columns],
    )


def _is_product(step: Step) -> bool:
    axes = [axis for axis in step.axes if axis not in ("H", "G")]
    return step.op == "dot" and bool(axes) and len(_letters(step.operands[1])) == 2


def _letters(ref: Ref) -> list[str]:
    return [letter for letter in ref.index if letter not in _HEADS]


def _rows_and_columns(step: Step) -> tuple[str, str]:
    """The axis of which a row of the product is one ("": there is one row), and its columns'."""
    *rows, columns = (axis for axis in step.axes if axis not in ("H", "G"))
    return (rows[0] if rows else ""), columns


def _axis(trace: Trace, ref: Ref, letter: str) -> str:
    return trace.source.steps[ref.step].axes[ref.index.index(letter)]


def _position(trace: Trace, name: str, axis: str, row: Index | None) -> int:
    size = trace.source.sizes[axis] if axis else 1
    if row is None:
        if size != 1:
            what = "queries" if axis == "L" else AXIS_NAMES[axis]
            raise LabelError(f"there are {size} {what}; say which row")
        return 0
    return trace.names.position(axis, row) if axis else 0


def _own(trace: Trace, ref: Ref, head: int) -> int:
    return own_head(trace.source.sizes, trace.source.steps[ref.step], head) or 0


def _line(
    trace: Trace, ref: Ref, letter: str, batch: tuple[int, ...], head: int, position: int
) -> Array:
    """The numbers of the first factor along the running letter, at one place of the other."""
    letters, own = _letters(ref), _own(trace, ref, head)
    if letters[-1] == letter:  # a row of it
        if "L" in trace.source.steps[ref.step].axes:
            return trace.source.row(ref.step, batch, own, position)
        block = trace.source.block(ref.step, batch, own, range(1))
        return block if block.ndim == 1 else block[position]
    column: Array = _whole(trace, ref, batch, own)[:, position]
    return column


def _table(trace: Trace, ref: Ref, letter: str, batch: tuple[int, ...], head: int) -> Array:
    """The second factor with the running letter down and the columns across."""
    table = _whole(trace, ref, batch, _own(trace, ref, head))
    return table if _letters(ref)[0] == letter else table.T


def _whole(trace: Trace, ref: Ref, batch: tuple[int, ...], head: int) -> Array:
    step = trace.steps[ref.step]
    return step.rows(range(step.matrix_shape[0]), head, batch)

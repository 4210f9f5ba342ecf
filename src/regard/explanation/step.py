"""A step with its numbers and labels: one head of it as a table, and how it shows itself.

Owns `ExplainedStep` and `Steps`. Reads a long step some rows at a time. Must not know kernels,
files, or the call that the step belongs to.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary import absent, answering
from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.boundary.dataframe import Level, dataframe
from regard.errors import LabelError, Setting, safe_text
from regard.explanation.derivation import Values, verdict
from regard.explanation.labels import AXIS_NAMES, Batch, batch_position, head_position, own_head
from regard.explanation.table import Table, caption, counting, shown_of
from regard.textbook.loss import WITHOUT_GRADIENT
from regard.textbook.steps import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What `dir` leaves out of a step: what views read.
_FOR_VIEWS = {"blocks", "declared", "excerpt", "lead", "matrix_shape"}
_FOR_VIEWS |= {"one", "row_notes", "rows", "source"}
# About how many lines a step shows; one head at least.
LINES = 30


def matrix_axes(step: Step) -> tuple[str | None, str | None]:
    """Which axis runs down and which across when one head of the step is shown."""
    axes = [axis for axis in step.axes if axis not in ("H", "G")]
    if len(axes) == 2:
        return axes[0], axes[1]
    if axes == ["L"]:
        return "L", None
    return None, axes[0] if axes else None


def _reason(name: str, present: Mapping[str, ExplainedStep]) -> str | None:
    """Why a step that other calls have is not there."""
    if name.startswith("d_") or name in ("target", "loss", "delta"):
        return _no_gradient(name, present)
    ready = "queries, keys and values were given ready"
    if "W_q" not in present and (
        name in ("embeddings", "context", "W_o", "output_products", "projected_output")
        or name.startswith(("W_", "b_", "projected_"))
        or name.endswith("_products")
    ):
        return ready
    if name.startswith(("query_", "key_", "value_")) and name.endswith("_products"):
        return f"no b_{name[0]} is added after the product"
    if name.startswith("projected_") and name != "projected_output":
        return "there are no heads to split it into"
    if name in ("row_maximum", "shifted") or (name == "sink_shifted" and "sink" in present):
        return 'softmax = "unshifted" takes exp without subtracting the maximum'
    return {
        "width": "this call states its own scale",
        "context": "the keys and values come from the same rows as the queries",
        "softcap": "this call has no softcap",
        "capped": "this call has no softcap",
        "bias": "this call has no bias",
        "biased": "this call has no bias",
        "visible": "nothing hides a key in this call",
        "masked": "nothing hides a key in this call",
        "sink": "this call has no sink",
        "sink_shifted": "this call has no sink",
        "sink_exponential": "this call has no sink",
        "merged": "there are no heads, made from embeddings, to put side by side",
        "output_products": "no b_o is added after an output projection",
        "projected_output": "this call has no output projection",
    }.get(name, "no such weights were given" if name.startswith(("W_", "b_")) else None)


def _no_gradient(name: str, present: Mapping[str, ExplainedStep]) -> str | None:
    """Why a step has no gradient here, or the explanation none at all."""
    own = name.removeprefix("d_")
    if own in WITHOUT_GRADIENT:
        return WITHOUT_GRADIENT[own]
    if "d_output" not in present:
        return "without a loss there are no gradients; give explain a target, or grad_output"
    if own in ("target", "loss") and own not in present:
        return "grad_output is the gradient of a loss that only the caller knows; give a target"
    if own not in present:
        return None if own == "delta" or own.startswith("d_") else _reason(own, present)
    if present[own].declared.phase != "forward":
        return "the gradients are those of the output, and of what it is computed from"
    if not _moved(own, present):
        return "it follows from settings such as the width, not from an input"
    return "the way back passes over it, in one formula from d_weights to the scores' gradient"


def _moved(name: str, present: Mapping[str, ExplainedStep]) -> bool:
    """Whether a step depends on one that has a gradient."""
    operands = {ref.step for ref in present[name].declared.operands}
    return any(f"d_{one}" in present or _moved(one, present) for one in operands)


@dataclass(frozen=True, eq=False, repr=False)
class ExplainedStep:
    """One step with its numbers and labels, which are computed when first asked for.

    It shows itself as a table, in a terminal and in a notebook. `value` is the array of all
    numbers, (…, H, L, S) for weights; so is `numpy.asarray(step)`.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> explanation = regard.explain(x, x, x, labels=["a", "b"])
    >>> explanation["scores"]
    scores  A = Q·Kᵀ  2 query rows × 2 keys
        a   b
    a   5  11
    b  11  25
    """

    declared: Step
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_notes: tuple[str, ...]
    source: Values

    def __dir__(self) -> list[str]:
        """What a user needs, without what the views read."""
        return [name for name in super().__dir__() if name not in _FOR_VIEWS]

    @property
    def name(self) -> str:
        """Such as ``"weights"``."""
        return self.declared.name

    @property
    def symbol(self) -> str:
        """Such as ``"P"``."""
        return self.declared.symbol

    @property
    def formula(self) -> str:
        """Such as ``"P = Y / z"``."""
        return self.declared.formula

    @property
    def latex(self) -> str:
        """The formula as LaTeX."""
        return self.declared.latex

    @property
    def axes(self) -> tuple[str, ...]:
        """Such as ``("H", "L", "S")``, leading axes apart."""
        return self.declared.axes

    @property
    def phase(self) -> str:
        """``"forward"``, ``"loss"`` or ``"backward"``: which part of the explanation it is in."""
        return self.declared.phase

    @property
    def given(self) -> bool:
        """Whether these numbers were given, not computed."""
        return self.declared.op == "given"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of `value`, leading axes included."""
        return self.source.shape(self.name)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of `value`; a matrix of weights has none."""
        return self.shape[: len(self.shape) - len(self.axes)]

    @property
    def hides(self) -> bool:
        """Whether some cells are hidden keys: they are absent, not numbers."""
        return self.declared.over == "visible" and self.axes[-1:] == ("S",)

    @cached_property
    def value(self) -> Array:
        """The whole step in float64 (`visible` in booleans)."""
        value = self.source.value(self.name)
        value.setflags(write=False)
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The array `value`, for `numpy.asarray` and for NumPy's functions."""
        return np.array(self.value, dtype, copy=copy)

    if not TYPE_CHECKING:  # a checker names what is missing by itself
        __getattr__ = absent

        def __getitem__(self, where: Any) -> Any:
            raise TypeError(
                "a step has no cells by index: take step.value[…] with positions, or "
                f'explanation.why("{self.name}", …) with labels'
            )

    # --- one head of it ----------------------------------------------------------------------

    @answering
    def head(self, head: int | None = None, batch: Batch | None = None) -> Array:
        """One head of one batch element: a matrix, a vector or a number.

        Parameters
        ----------
        head : int, optional
            Which query head; for keys and values, the key head that it reads. Needed where there
            are several.
        batch : int or tuple of int, optional
            Which batch element: one position for each leading axis. Needed where there are several.

        Raises
        ------
        LabelError
            If there is no such head or batch element, or there are several and none is named.
        """
        at, own = self.one(head, batch)
        value = self.value[at[: len(self.lead)]]
        return np.asarray(value[own] if {"H", "G"} & set(self.axes) else value)

    def one(self, head: int | None, batch: Batch | None) -> tuple[tuple[int, ...], int]:
        """A batch element and the step's own head, checked; 0 only where there is no other."""
        sizes, lead = self.source.sizes, self.source.lead
        at = batch_position(lead, batch)
        own = own_head(sizes, self.declared, head_position(sizes, head))
        several, hints = [], []
        if batch is None and math.prod(self.lead) > 1:
            several.append(f"a batch of {' × '.join(map(str, lead))}")
            hints.append(Setting("batch", 0 if len(lead) == 1 else (0,) * len(lead)))
        if head is None and max((sizes[a] for a in self.axes if a in ("H", "G")), default=1) > 1:
            several.append(f"{sizes['H']} heads")
            hints.append(Setting("head", 0))
        if hints:
            asked = [part for hint in hints for part in (", ", hint)][1:]
            has = f"{self.name} has {' and '.join(several)}; say which one, such as "
            raise LabelError(has, *asked)
        return at, own or 0

    @answering
    def table(self, *, head: int | None = None, batch: Batch | None = None) -> Table:
        """One head of one batch element as a labelled table; the arguments are those of `head`."""
        at, own = self.one(head, batch)
        return self.excerpt(range(self.matrix_shape[0]), own, at)

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """How many rows and columns a head has; a vector over the queries is a column."""
        rows, columns = matrix_axes(self.declared)
        sizes = self.source.sizes
        return sizes[rows] if rows else 1, sizes[columns] if columns else 1

    def blocks(
        self, own: int, batch: tuple[int, ...]
    ) -> Iterator[tuple[int, Array, NDArray[np.bool_]]]:
        """The rows of a head, some at a time: the first row, the numbers, which are hidden."""
        for rows in self._row_blocks():
            hidden = np.zeros((len(rows), 1), np.bool_)
            if self.hides:
                hidden = ~self._block("visible", rows, own, batch)
            yield rows.start, self._block(self.name, rows, own, batch), hidden

    def rows(
        self, wanted: Sequence[int], own: int, batch: tuple[int, ...], name: str = ""
    ) -> Array:
        """Some rows of a head, in ascending order; of the step `name` with the same cells."""
        found = []
        for rows in self._row_blocks():
            here = [row - rows.start for row in wanted if row in rows]
            if here:
                block = self._block(name or self.name, rows, own, batch)
                found.append(block if len(here) == len(rows) else block[here])
        return np.concatenate(found) if found else np.empty((0, self.matrix_shape[1]), np.bool_)

    def excerpt(self, wanted: Sequence[int], own: int, batch: tuple[int, ...]) -> Table:
        """Some rows of a head, in ascending order, as a labelled table."""

        def picked(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(words[row] for row in wanted) if words else ()

        def hidden_by(row: int, column: int) -> tuple[str, ...]:
            if not self.hides:
                return ()
            return verdict(self.source, batch, own, wanted[row], column).hidden_by()

        rows, columns = matrix_axes(self.declared)
        return Table(
            self.name,
            self.symbol,
            self.formula,
            self.rows(wanted, own, batch),
            picked(self.row_labels),
            self.column_labels,
            picked(self.row_notes),
            ~self.rows(wanted, own, batch, "visible") if self.hides else None,
            hidden_by,
            self.declared.latex_symbol,
            AXIS_NAMES.get(rows or "", ""),
            AXIS_NAMES.get(columns or "", ""),
            self.matrix_shape[0] - len(wanted),
            self._place(own, batch),
            bool(self.declared.of),
        )

    def _place(self, own: int, batch: tuple[int, ...]) -> str:
        """Such as ``batch 1, head 2``; what there is only one of is not named."""
        words = []
        if math.prod(self.lead) > 1:
            words.append(f"batch {batch[0] if len(batch) == 1 else batch}")
        for axis, kind in (("H", "head"), ("G", "key head")):
            if axis in self.axes and self.source.sizes[axis] > 1:
                words.append(f"{kind} {own}")
        return ", ".join(words)

    def _row_blocks(self) -> list[range]:
        return self.source.row_blocks() if "L" in self.axes else [range(self.matrix_shape[0])]

    def _block(self, name: str, rows: range, own: int, batch: tuple[int, ...]) -> Array:
        asked = rows if "L" in self.axes else range(1)
        block = np.asarray(self.source.block(name, batch, own, asked))
        return block.reshape(len(rows), self.matrix_shape[1])

    # --- shown -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        shown, more = self._shown()
        tables = [f"{one.place}\n{one.text()}" if one.place else one.text() for one in shown]
        return "\n".join([f"{self.name}  {self.formula}  {self._size()}", *tables, *more])

    def _repr_html_(self) -> str:
        shown, more = self._shown()
        above = caption(self.name, self.formula, self._size())
        return above + "".join([*(one.html() for one in shown), *(f"<div>{m}</div>" for m in more)])

    def _size(self) -> str:
        """Such as ``3 heads × 4 query rows × 4 keys``."""
        lead = self.lead
        words = [f"batch of {' × '.join(map(str, lead))}"] if lead else []
        kinds = AXIS_NAMES | {"H": "heads", "G": "key heads"}
        words += [counting(self.source.sizes[axis], kinds[axis]) for axis in self.axes]
        return " × ".join(words) or "a number"

    def _shown(self) -> tuple[list[Table], list[str]]:
        """The first heads, large ones in part, and whether there are more."""
        lead, sizes = self.lead, self.source.sizes
        heads = next((sizes[axis] for axis in self.axes if axis in ("H", "G")), 1)
        count = math.prod(lead) * heads
        wanted = [row for row in shown_of(self.matrix_shape[0]) if row is not None]
        found = []
        for number in range(min(count, max(1, LINES // (len(wanted) + 2)))):
            at = [int(n) for n in np.unravel_index(number // heads, lead)] if lead else []
            batch = tuple(at) or (0,) * len(self.source.lead)
            found.append(self.excerpt(wanted, number % heads, batch))
        more = count - len(found)
        which = " and ".join([*(["head"] if heads > 1 else []), *(["batch"] if lead else [])])
        return found, [f"… {more} more: .table() takes {which}"] if more else []

    def to_dataframe(self) -> Any:
        """All numbers as a pandas DataFrame, with the labels as index and columns.

        Where there are batch elements or heads, the index has a level for each. Hidden cells have
        the number that `value` has.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        columns = matrix_axes(self.declared)[1]
        across = (AXIS_NAMES[columns].removesuffix("s") if columns else None, self.column_labels)
        data = self.value.reshape(-1, self.matrix_shape[1])
        return dataframe(data, self.levels(), across if columns else (None, [self.name]))

    def levels(self) -> list[Level]:
        """The levels of an index with an entry for each row: batch elements, heads, rows."""
        lead = self.lead
        batch = ["batch"] if len(lead) == 1 else [f"batch {k}" for k in range(len(lead))]
        levels: list[Level] = [(name, range(size)) for name, size in zip(batch, lead, strict=True)]
        sizes, rows = self.source.sizes, matrix_axes(self.declared)[0]
        for axis, name in (("H", "head"), ("G", "key head")):
            if axis in self.axes:
                levels.append((name, range(sizes[axis])))
        if rows or self.row_labels:
            levels.append((AXIS_NAMES[rows or "L"].removesuffix("s"), self.row_labels))
        return levels


class Steps(Mapping[str, ExplainedStep]):
    """The steps of one explanation by name, in order; a missing one says why it is missing."""

    def __init__(self, steps: Sequence[ExplainedStep]) -> None:
        self._steps = {step.name: step for step in steps}

    def __getitem__(self, name: Any) -> ExplainedStep:
        step = self._steps.get(name) if isinstance(name, str) else None
        if step is not None:
            return step
        for step in self._steps.values():
            if step.symbol == name:
                raise LabelError(
                    f"there is no step {safe_text(name, 60)}: "
                    f"{safe_text(name, 60)} is the symbol of {step.name}"
                )
        reason = _reason(str(name), self._steps)
        if reason is None:
            sort = str(name).startswith("d_")
            alike = [one for one in self._steps if not sort or one.startswith("d_")]
            near = difflib.get_close_matches(str(name), alike, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(alike)}"
            raise LabelError(f"there is no step {safe_text(name, 60)}; {hint}")
        raise LabelError(f"there is no step {safe_text(name, 60)}: {reason}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Steps({', '.join(self._steps)})"

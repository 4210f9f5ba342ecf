"""An explanation: every step of one attention, with labels, and the questions one can ask of it.

Owns `Explanation`, `ExplainedStep` and the answers (`why`, `statistics`, `contributions`,
`without`, `compare`, `first_nonfinite`, `check`). Reads the declared steps and asks a source of
values for numbers when they are needed. Must not know kernels, files or how anything is shown.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.derivation import Derivation, Operand, Term, format_number
from regard.errors import LabelError, OptionError, ShapeError, safe_text
from regard.masks import Block, Mask, Verdict
from regard.steps import INDEX_MAPS, LETTERS, Ref, Step

if TYPE_CHECKING:
    from regard.problem import Expectation, Problem

Array = NDArray[Any]
Index = int | str

# Said with every view.
READING_NOTE = "Weights say where this head reads, not why a model answered."

# Why a step is not there, for those that many calls do not have.
ABSENT = {
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
    "row_maximum": 'softmax = "unshifted" takes exp without subtracting the maximum',
    "shifted": 'softmax = "unshifted" takes exp without subtracting the maximum',
    "merged": "this call has no heads to put side by side for an output projection",
    "output_products": "this call has no output projection with a bias",
    "projected_output": "this call has no output projection",
    "embeddings": "queries, keys and values were given ready",
}


class Values(Protocol):
    """Where an explanation's numbers come from, block by block."""

    steps: dict[str, Step]
    sizes: dict[str, int]
    lead: tuple[int, ...]
    rules: Mask | None
    offset: NDArray[np.int64]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a step's whole value."""

    def value(self, name: str) -> Array:
        """A step's whole value."""

    def row(self, name: str, batch: tuple[int, ...], head: int, row: int) -> Array:
        """One row of a step."""

    def block(self, name: str, batch: tuple[int, ...], head: int, rows: range) -> Array:
        """Some rows of one head of a step."""

    def row_blocks(self) -> list[range]:
        """The rows cut into blocks."""


@dataclass(frozen=True)
class Table:
    """A labelled matrix, vector (one row) or number: what a view shows of a step."""

    name: str
    symbol: str
    formula: str
    values: Array  # (rows, columns)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_notes: tuple[str, ...] = ()
    hidden: NDArray[np.bool_] | None = None
    hidden_by: Callable[[int, int], tuple[str, ...]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ExplainedStep:
    """One step with its numbers and labels. `value` is computed when first asked for."""

    declared: Step
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_notes: tuple[str, ...]
    source: Values = field(repr=False)

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
    def given(self) -> bool:
        """Whether these numbers were given, not computed."""
        return self.declared.op == "given"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of `value`, leading axes included."""
        return self.source.shape(self.name)

    @cached_property
    def value(self) -> Array:
        """The whole step in float64 (`visible` in booleans)."""
        value = self.source.value(self.name)
        value.setflags(write=False)
        return value

    def head(self, head: int = 0, batch: tuple[int, ...] | None = None) -> Array:
        """One head of one batch element: a matrix, a vector or a number."""
        value = self.value
        batch_axes = value.ndim - len(self.axes)
        at = (batch or (0,) * batch_axes)[:batch_axes]
        value = value[at]
        if self.axes and self.axes[0] in ("H", "G"):
            heads = self.source.sizes["H"]
            own = value.shape[0]
            value = value[head // (heads // own) if own and heads != own else head]
        return np.asarray(value)


class Steps(Mapping[str, ExplainedStep]):
    """The steps of one explanation by name, in order; a missing one says why it is missing."""

    def __init__(self, steps: Sequence[ExplainedStep]) -> None:
        self._steps = {step.name: step for step in steps}

    def __getitem__(self, name: str) -> ExplainedStep:
        step = self._steps.get(name)
        if step is not None:
            return step
        reason = ABSENT.get(name)
        if reason is None and name.startswith(("W_", "b_")):
            reason = "no such weights were given"
        if reason is None:
            near = difflib.get_close_matches(str(name), self._steps, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self._steps)}"
            raise LabelError(f"there is no step {safe_text(name, 60)}; {hint}")
        raise LabelError(f"there is no step {safe_text(name, 60)}: {reason}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Steps({', '.join(self._steps)})"


@dataclass(frozen=True)
class KernelCheck:
    """What a kernel answered to the same call, beside the explanation's float64."""

    name: str
    output: Array
    lse: Array
    largest_ulp: float  # of the output's dtype


@dataclass(frozen=True)
class StepStatistics:
    """Of one step, over the cells that count: hidden cells are left out after masking."""

    mean: float
    variance: float  # of the population: divided by the number of cells
    minimum: float
    maximum: float
    cells: int


@dataclass(frozen=True)
class RowStatistics:
    """How each query spreads its weight; arrays (…, H, L) without the axes the call lacks."""

    entropy: Array  # in nats
    effective_keys: Array  # exp(entropy): as many keys with equal weights would spread as far
    largest_weight: Array
    largest_key: NDArray[np.int64]


@dataclass(frozen=True)
class Statistics:
    """Numbers about the numbers: `.steps` by name and `.rows`."""

    steps: Mapping[str, StepStatistics]
    rows: RowStatistics


@dataclass(frozen=True)
class Comparison:
    """The first step in which two explanations differ, and where."""

    step: str
    index: tuple[int, ...]  # leading axes first
    labels: tuple[str, ...]
    difference: float
    here: Derivation
    there: Derivation


@dataclass(frozen=True)
class Mismatch:
    """A stated expectation that the computed numbers do not meet."""

    expectation: Expectation
    step: str
    labels: tuple[str, ...]
    expected: float
    got: float
    derivation: Derivation | None


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Every step of one attention; see `regard.explain`."""

    source: Values
    title: str = ""
    note: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by axis letter
    row_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by step
    problem: Problem | None = None
    rebuild: Callable[[Mask], Explanation] | None = None
    check_kernel: Callable[[], KernelCheck] | None = None

    # --- what there is -------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Steps:
        """The steps in order: ``explanation.steps["weights"].value``."""
        explained = []
        for step in self.source.steps.values():
            rows, columns = self._matrix_axes(step)
            notes = self.row_notes.get(step.name, ())
            explained.append(
                ExplainedStep(
                    step,
                    row_labels=self.axis_labels(rows) if rows else self._single_query(step),
                    column_labels=self.axis_labels(columns) if columns else (),
                    row_notes=notes,
                    source=self.source,
                )
            )
        return Steps(explained)

    @property
    def output(self) -> Array:
        """The last result: the projected output where there is one, else the output."""
        name = "projected_output" if "projected_output" in self.steps else "output"
        return self.steps[name].value

    @property
    def heads(self) -> int | None:
        """How many query heads; None without a head axis."""
        return self.source.sizes.get("H")

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.source.lead

    @cached_property
    def kernel(self) -> KernelCheck | None:
        """What the library's own kernel answers, and how far it is from these numbers in ulp."""
        return self.check_kernel() if self.check_kernel else None

    def axis_labels(self, axis: str) -> tuple[str, ...]:
        """The labels along an axis, each one unique: a repeated token becomes ``the@3``."""
        size = self.source.sizes[axis]
        labels = self.labels.get(axis)
        if labels is None:
            return tuple(str(number) for number in range(size))
        repeated = {label for label in labels if labels.count(label) > 1}
        return tuple(
            f"{label}@{position}" if label in repeated else label
            for position, label in enumerate(labels)
        )

    def _matrix_axes(self, step: Step) -> tuple[str | None, str | None]:
        """Which axis runs down and which across when one head of the step is shown."""
        axes = [axis for axis in step.axes if axis not in ("H", "G")]
        if len(axes) == 2:
            return axes[0], axes[1]
        if axes == ["L"]:
            return "L", None
        return None, axes[0] if axes else None

    def _single_query(self, step: Step) -> tuple[str, ...]:
        """The row label of a step of one query (D,), which has no query axis."""
        alone = "L" not in self.source.sizes and not step.name.startswith(("W_", "b_", "scale"))
        return self.labels.get("L", ()) if alone and step.axes else ()

    def table(
        self, step: str, *, head: int | None = None, batch: tuple[int, ...] | None = None
    ) -> Table:
        """One head of a step as a labelled table."""
        explained = self.steps[step]
        batch_at, head_at = self._batch(batch), self._head(head)
        values = np.asarray(explained.head(head_at, batch_at))
        rows, columns = self._matrix_axes(explained.declared)
        hidden = None
        if columns == "S" and "visible" in self.steps and self._after_masking(explained.declared):
            hidden = ~self.steps["visible"].head(head_at, batch_at).reshape(
                (-1, self.source.sizes["S"])
            )

        def hidden_by(row: int, column: int) -> tuple[str, ...]:
            return self._verdict(batch_at, head_at, row, column).hidden_by()

        if rows and not columns:
            values = values[:, None]
        return Table(
            explained.name,
            explained.symbol,
            explained.formula,
            values.reshape((1,) * max(0, 2 - values.ndim) + values.shape),
            explained.row_labels,
            explained.column_labels,
            explained.row_notes,
            hidden,
            hidden_by if hidden is not None else None,
        )

    def _after_masking(self, step: Step) -> bool:
        return step.op == "select" or step.over == "visible" or step.name == "exponentials"

    # --- why -----------------------------------------------------------------------------------

    def why(
        self,
        step: str,
        *where: Index,
        head: int | None = None,
        batch: tuple[int, ...] | None = None,
    ) -> Derivation:
        """Why one cell has its value: the numbers that made it.

        Parameters
        ----------
        step : str
            The name of a step, such as ``"output"``.
        *where : str or int
            One label or index per axis after batch and head: row, then column. A label comes
            first; a number is a position if no label matches. ``"the@3"`` is the token at
            position 3.
        head : int, optional
            Which head, 0 if not given. For keys and values: the key head.
        batch : tuple of int, optional
            Which batch element, the first if not given.

        Raises
        ------
        LabelError
            If there is no such step, row or column. It is a KeyError.

        Examples
        --------
        >>> import numpy as np, regard
        >>> x = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> explanation = regard.explain(x, x, x, query_labels=["a", "b"], key_labels=["a", "b"])
        >>> print(explanation.why("scores", "a", "b"))
        A[a, b] = 11    A = Q·Kᵀ
          0    1 × 3 = 3
          1    2 × 4 = 8
          sum          11
        """
        declared = self.steps[step].declared
        axes = [axis for axis in declared.axes if axis not in ("H", "G")]
        if len(where) != len(axes):
            names = ", ".join(_AXIS_NAMES.get(axis, axis) for axis in axes) or "no index"
            raise LabelError(
                f"{step} needs {len(axes)} indices after the head ({names}), got {len(where)}"
            )
        index = [self.position(axis, key) for axis, key in zip(axes, where, strict=True)]
        if "H" in declared.axes:
            index.insert(0, self._head(head))
        elif "G" in declared.axes:
            groups = self.source.sizes["G"]
            if head is not None and not 0 <= head < groups:
                raise LabelError(f"{step} has {groups} key heads; there is no key head {head}")
            index.insert(0, head or 0)
        return self._derive(step, self._batch(batch), tuple(index))

    def position(self, axis: str, key: Index) -> int:
        """Where a label stands along an axis; a number counts from 0."""
        labels, own = self.axis_labels(axis), self.labels.get(axis, ())
        what = _AXIS_NAMES.get(axis, axis)
        if isinstance(key, str):
            if key in labels:
                return labels.index(key)
            if key in own:  # repeated, so the plain label names several
                several = [label for label, plain in zip(labels, own, strict=True) if plain == key]
                raise LabelError(
                    f"{safe_text(key, 60)} names {len(several)} of the {what}: say "
                    + " or ".join(safe_text(label, 60) for label in several)
                )
            name, at, number = key.rpartition("@")
            if at and number.isdecimal() and int(number) < len(own) and own[int(number)] == name:
                return int(number)
            if not key.removeprefix("-").isdecimal():
                near = difflib.get_close_matches(key, labels, n=1)
                known = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
                hint = f"did you mean {near[0]}?" if near else f"there are {known}"
                raise LabelError(
                    f"{safe_text(key, 60)} is none of the {what}; {safe_text(hint, 300)}"
                )
        number_key = int(key)
        size = len(labels)
        if not -size <= number_key < size:
            raise LabelError(f"there are {size} {what}, counted from 0; there is no {number_key}")
        return number_key % size

    def _head(self, head: int | None) -> int:
        heads = self.heads or 1
        if head is not None and not 0 <= head < heads:
            count = "one head" if heads == 1 else f"{heads} heads"
            raise LabelError(f"there is {count}, counted from 0; there is no head {head}")
        return head or 0

    def _batch(self, batch: tuple[int, ...] | None) -> tuple[int, ...]:
        lead = self.source.lead
        if batch is None:
            return (0,) * len(lead)
        if len(batch) != len(lead) or any(
            not 0 <= at < size for at, size in zip(batch, lead, strict=True)
        ):
            raise LabelError(f"batch {batch} is not an index into the leading axes {lead}")
        return batch

    def _cell(self, step: str, batch: tuple[int, ...], index: tuple[int, ...]) -> float:
        declared = self.steps[step].declared
        at = dict(zip(declared.axes, index, strict=True))
        row = self.source.row(step, batch, at.get("H", at.get("G", 0)), at.get("L", 0))
        rest = tuple(at[axis] for axis in declared.axes if axis not in ("H", "G", "L"))
        return float(row[rest])

    def _operand(self, step: str, batch: tuple[int, ...], index: tuple[int, ...]) -> Operand:
        declared = self.steps[step].declared
        return Operand(
            step,
            declared.symbol,
            index,
            self._cell_labels(declared, index),
            self._cell(step, batch, index),
        )

    def _cell_labels(self, step: Step, index: tuple[int, ...]) -> tuple[str, ...]:
        names = []
        for axis, position in zip(step.axes, index, strict=True):
            if axis in ("H", "G"):
                if self.source.sizes[axis] > 1:
                    names.append(f"{'head' if axis == 'H' else 'key head'} {position}")
            else:
                names.append(self.axis_labels(axis)[position])
        return tuple(names)

    def _verdict(self, batch: tuple[int, ...], head: int, row: int, key: int) -> Verdict:
        sizes = self.source.sizes
        shape = (*self.source.lead, sizes.get("H", 1), sizes.get("L", 1), sizes["S"])
        offset = int(self.source.offset[batch])
        assert self.source.rules is not None
        return self.source.rules.verdict(Block(shape, batch, head, np.array([row]), offset), key)

    def _derive(self, step: str, batch: tuple[int, ...], index: tuple[int, ...]) -> Derivation:
        """Read the declaration of one cell: which operands, grouped into which terms."""
        declared = self.steps[step].declared
        at = dict(zip(declared.index, index, strict=True))
        verdicts: tuple[Verdict, ...] = ()
        if "visible" in self.steps and "j" in at and self._judged(declared):
            row_at = (batch, at.get("h", 0), at.get("i", 0), at["j"])
            verdicts = (self._verdict(*row_at),)
        operands: list[Operand] = []
        terms: list[Term] = []
        free = [
            letter
            for ref in declared.operands
            for letter in ref.index
            if letter not in at and letter not in INDEX_MAPS
        ]
        if free:  # dot, sum and max run along one letter
            letter = free[0]
            running = [ref for ref in declared.operands if letter in ref.index]
            axis = next(a for a, name in self._axes_of(running[0]) if name == letter)
            for number in self._visible_positions(declared, batch, at, letter):
                cells = [self._resolve(ref, {**at, letter: number}) for ref in running]
                first = len(operands)
                operands += [self._operand(ref.step, batch, cell) for ref, cell in cells]
                value = operands[first].value
                for operand in operands[first + 1 :]:
                    value *= operand.value
                label = self.axis_labels(axis)[number]
                terms.append(Term(label, tuple(range(first, len(operands))), value))
            for ref in declared.operands:
                if letter not in ref.index:  # the sink, beside the keys
                    operands.append(self._operand(*self._place(ref, at, batch)))
                    terms.append(Term("sink", (len(operands) - 1,), operands[-1].value))
        else:
            for ref in declared.operands:
                operands.append(self._operand(*self._place(ref, at, batch)))
        return Derivation(
            declared=declared,
            batch=batch,
            index=index,
            labels=self._cell_labels(declared, index),
            value=self._cell(step, batch, index),
            operands=tuple(operands),
            terms=tuple(terms),
            verdicts=verdicts,
            note=self._cell_note(declared, verdicts),
            opener=lambda operand: self._derive(operand.step, batch, operand.index),
        )

    def _judged(self, step: Step) -> bool:
        return step.op in ("visible", "select", "subtract", "divide")

    def _axes_of(self, ref: Ref) -> list[tuple[str, str]]:
        return list(zip(self.steps[ref.step].axes, ref.index, strict=True))

    def _resolve(self, ref: Ref, at: Mapping[str, int]) -> tuple[Ref, tuple[int, ...]]:
        sizes = self.source.sizes
        return ref, tuple(
            INDEX_MAPS[letter](at, sizes) if letter in INDEX_MAPS else at[letter]
            for letter in ref.index
        )

    def _place(
        self, ref: Ref, at: Mapping[str, int], batch: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return ref.step, batch, self._resolve(ref, at)[1]

    def _visible_positions(
        self, step: Step, batch: tuple[int, ...], at: Mapping[str, int], letter: str
    ) -> list[int]:
        """Where the running letter goes: along keys, over the visible ones only if so declared."""
        running = next(ref for ref in step.operands if letter in ref.index)
        axis = next(a for a, name in self._axes_of(running) if name == letter)
        if step.over != "visible" or letter != "j":
            return list(range(self.source.sizes[axis]))
        row = self.source.row("visible", batch, at.get("h", 0), at.get("i", 0))
        return [int(key) for key in np.flatnonzero(row)]

    def _cell_note(self, step: Step, verdicts: tuple[Verdict, ...]) -> str:
        names = [name for verdict in verdicts for name in verdict.hidden_by()]
        if names:
            return "hidden by: " + ", ".join(safe_text(name, 80) for name in names)
        if step.op == "given":
            return ""
        return ""

    # --- questions -----------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Mean, variance, minimum and maximum of every step; how each row spreads its weight.

        The variances show why the scale is there: that of q·k grows with the width D.
        """
        names = [name for name, step in self.steps.items() if step.declared.op != "visible"]
        steps = {name: self._step_statistics(name) for name in names if self.steps[name].axes}
        return Statistics(steps, self._row_statistics())

    def _blocks(self, name: str) -> Iterator[tuple[tuple[int, ...], int, range, Array]]:
        """Every block of a step, so that a long one is never held whole."""
        shape, axes = self.source.shape(name), self.steps[name].axes
        lead = shape[: len(shape) - len(axes)]
        heads = next((self.source.sizes[axis] for axis in axes if axis in ("H", "G")), 1)
        row_blocks = self.source.row_blocks() if "L" in axes else [range(1)]
        for batch in np.ndindex(*lead):
            for head, rows in itertools.product(range(heads), row_blocks):
                yield batch, head, rows, self.source.block(name, batch, head, rows)

    def _step_statistics(self, name: str) -> StepStatistics:
        declared = self.steps[name].declared
        visible_only = (
            "visible" in self.steps and "S" in declared.axes and self._after_masking(declared)
        )
        count, mean, squares = 0, 0.0, 0.0
        minimum, maximum = np.inf, -np.inf
        for batch, head, rows, block in self._blocks(name):
            cells = (
                block[self.source.block("visible", batch, head, rows)] if visible_only else block
            )
            cells = np.asarray(cells).ravel()
            if not cells.size:
                continue
            # Chan's update: means and squared deviations of blocks combine without cancellation.
            with np.errstate(all="ignore"):
                own = float(cells.mean())
                delta, total = own - mean, count + cells.size
                squares += float(((cells - own) ** 2).sum()) + delta**2 * count * cells.size / total
                mean += delta * cells.size / total
                count = total
                minimum = min(minimum, float(cells.min()))
                maximum = max(maximum, float(cells.max()))
        if not count:
            return StepStatistics(np.nan, np.nan, np.nan, np.nan, 0)
        return StepStatistics(mean, squares / count, minimum, maximum, count)

    def _row_statistics(self) -> RowStatistics:
        shape = self.source.shape("weights")[:-1]
        axes = self.steps["weights"].axes
        entropy, largest = np.zeros(shape), np.zeros(shape)
        largest_key = np.zeros(shape, np.int64)
        for batch, head, rows, block in self._blocks("weights"):
            at: tuple[Any, ...] = (*batch, *((head,) if "H" in axes else ()))
            if "L" in axes:
                at = (*at, slice(rows.start, rows.stop))
            if not block.shape[-1]:
                continue
            with np.errstate(all="ignore"):
                logs = np.where(block > 0, np.log(np.where(block > 0, block, 1)), 0)
                # 0 − Σ…: a row with all its weight on one key has the entropy 0, not −0
                entropy[at] = 0 - (np.where(np.isnan(block), block, block * logs)).sum(axis=-1)
            largest[at] = block.max(axis=-1)
            largest_key[at] = block.argmax(axis=-1)
        return RowStatistics(entropy, np.exp(entropy), largest, largest_key)

    def contributions(
        self,
        row: Index | None = None,
        *,
        head: int | None = None,
        batch: tuple[int, ...] | None = None,
    ) -> Table:
        """What each key adds to one row of the output: weights[i, j]·values[j]; they add up to it.

        Parameters
        ----------
        row : str or int, optional
            The query; not needed where there is only one.
        head, batch
            As for `why`.

        Returns
        -------
        Table
            (S, E): keys down, value features across. A hidden key adds 0.
        """
        at, h = self._batch(batch), self._head(head)
        if row is None:
            if self.source.sizes.get("L", 1) != 1:
                raise LabelError(f"there are {self.source.sizes['L']} queries; say which row")
            row = 0
        i = self.position("L", row) if "L" in self.source.sizes else 0
        group = h // ((self.heads or 1) // self.source.sizes.get("G", 1)) if self.heads else 0
        weights = self.source.row("weights", at, h, i)[:, None]  # (S, 1)
        values = self.source.block("values", at, group, range(1))  # (S, E)
        with np.errstate(all="ignore"):
            parts = weights * values
        if "visible" in self.steps:
            parts = np.where(self.source.row("visible", at, h, i)[:, None], parts, 0)
        return Table(
            "contributions",
            "P·V",
            "P[i, j]·V[j] for each key j; the rows add up to O[i]",
            parts,
            self.axis_labels("S"),
            self.axis_labels("E"),
            self.row_notes.get("values", ()),
        )

    def without(self, key: Index) -> Explanation:
        """The same attention had that key not been there; its `.output` is the answer."""
        from regard.masks import Boolean

        position = self.position("S", key)
        keep = np.arange(self.source.sizes["S"]) != position
        label = self.axis_labels("S")[position]
        assert self.rebuild is not None
        return self.rebuild(Boolean(keep, name=f'without "{label}"'))

    def compare(self, other: Explanation, tolerance: float = 0.0) -> Comparison | None:
        """The first step in which two explanations differ by more than `tolerance`.

        Steps that only one of them has are passed over; NaN equals NaN. None: no step differs.

        Raises
        ------
        ShapeError
            If a step has different shapes in the two.
        """
        for name in self.steps:
            if name not in other.steps:
                continue
            mine, theirs = self.steps[name].value, other.steps[name].value
            if mine.shape != theirs.shape:
                raise ShapeError(
                    f"{name} has shape {mine.shape} here but {theirs.shape} there; "
                    "only attentions of the same sizes can be compared"
                )
            differs = _differs(mine, theirs, tolerance)
            if differs.any():
                first = np.unravel_index(int(differs.argmax()), differs.shape)
                at = tuple(int(n) for n in first)
                lead = len(at) - len(self.steps[name].axes)
                batch = self._batch(at[:lead] or None)
                here = self._derive(name, batch, at[lead:])
                there = other._derive(name, batch, at[lead:])
                with np.errstate(all="ignore"):
                    size = float(
                        np.max(np.abs(np.subtract(mine, theirs, dtype=np.float64)[differs]))
                    )
                return Comparison(name, at, here.labels, size, here, there)
        return None

    def first_nonfinite(self) -> Derivation | None:
        """The first cell, in the order of the steps, that is NaN or infinite without being masked.

        −∞ in a bias, in a hidden cell and in the maximum or lse of a row that sees nothing is how
        attention says "absent", and is passed over.
        """
        for name, step in self.steps.items():
            if step.declared.op == "visible":
                continue
            for batch, head, rows, block in self._blocks(name):
                bad = ~np.isfinite(block)
                if name in ("bias", "biased", "row_maximum", "log_sums", "lse"):
                    bad &= block != -np.inf
                if (
                    "visible" in self.steps
                    and self._after_masking(step.declared)
                    and "S" in step.axes
                ):
                    bad &= self.source.block("visible", batch, head, rows)
                if bad.any():
                    first = [int(n) for n in np.unravel_index(int(bad.argmax()), bad.shape)]
                    if "L" in step.axes:
                        first[0] += rows.start
                    if {"H", "G"} & set(step.axes):
                        first.insert(0, head)
                    return self._derive(name, self._batch(batch or None), tuple(first))
        return None

    def check(self, expectations: Sequence[Expectation] | None = None) -> tuple[Mismatch, ...]:
        """The stated expectations that the numbers do not meet; those of the problem by default."""
        if expectations is None:
            expectations = self.problem.expect if self.problem else ()
        return tuple(
            mismatch for expected in expectations for mismatch in self._mismatches(expected)
        )

    def _mismatches(self, expected: Expectation) -> Iterator[Mismatch]:
        step = self.steps[expected.step]
        if expected.variance is not None:
            got = self._step_statistics(expected.step).variance
            if not _matches(expected, got, expected.variance):
                yield Mismatch(
                    expected, f"variance of {step.name}", (), expected.variance, got, None
                )
        if expected.value is None:
            return
        if expected.at is not None:
            cell = self.why(step.name, *expected.at, head=expected.head)
            wanted = float(np.asarray(expected.value))
            if not _matches(expected, cell.value, wanted):
                yield Mismatch(expected, step.name, cell.labels, wanted, cell.value, cell)
            return
        whole = step.value if expected.head is None else step.head(expected.head)
        wanted_all = np.asarray(expected.value, dtype=np.float64)
        if wanted_all.shape != whole.shape:
            raise OptionError(
                f"expect.{step.name} has shape {wanted_all.shape} but {step.name} has "
                f"{whole.shape}; they must match"
            )
        for at in np.ndindex(*whole.shape):
            got, wanted = float(whole[at]), float(wanted_all[at])
            if not _matches(expected, got, wanted):
                lead = whole.ndim - len(step.axes) if expected.head is None else 0
                index = at[max(lead, 0) :]
                if expected.head is not None and step.axes[0] in ("H", "G"):
                    index = (expected.head, *at)
                cell = self._derive(step.name, self._batch(None), index)
                yield Mismatch(expected, step.name, cell.labels, wanted, got, cell)

    # --- as data and text ----------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Every step as plain data; numbers that JSON does not know are "nan", "inf", "-inf"."""
        return {
            "format": "regard-explanation/1",
            "title": self.title,
            "note": self.note,
            "reading_note": READING_NOTE,
            "batch_shape": list(self.batch_shape),
            "heads": self.heads,
            "steps": [
                {
                    "name": step.name,
                    "symbol": step.symbol,
                    "formula": step.formula,
                    "latex": step.latex,
                    "axes": list(step.axes),
                    "shape": list(step.shape),
                    "given": step.given,
                    "row_labels": list(step.row_labels),
                    "column_labels": list(step.column_labels),
                    "value": _plain(step.value),
                }
                for step in self.steps.values()
            ],
        }

    def __repr__(self) -> str:
        rows = [("step", "", "formula", "shape")]
        for step in self.steps.values():
            shape = " × ".join(str(size) for size in step.shape) or "number"
            formula = "given" if step.given and step.name != "scale" else step.formula
            if step.shape == ():
                formula += f" = {format_number(float(step.value), 6)}"
            rows.append((step.name, step.symbol, formula, shape))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [safe_text(self.title, 200)] if self.title else []
        lines += [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, READING_NOTE])


_AXIS_NAMES = {
    "L": "query rows",
    "S": "keys",
    "D": "key features",
    "E": "value features",
    "M": "embedding features",
    "N": "context features",
    "F": "output features",
    **{packed: "packed features" for packed in LETTERS if len(packed) == 2},
}


def _differs(mine: Array, theirs: Array, tolerance: float) -> NDArray[np.bool_]:
    """Where two arrays differ; NaN equals NaN, and each infinity itself."""
    with np.errstate(all="ignore"):
        same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        near = np.abs(np.subtract(mine, theirs, dtype=np.float64)) <= tolerance
    return np.asarray(~(same | near))


def _matches(expected: Expectation, got: float, wanted: float) -> bool:
    if not (np.isfinite(got) and np.isfinite(wanted)):
        return got == wanted or bool(np.isnan(got) and np.isnan(wanted))
    return abs(got - wanted) <= expected.within + expected.relative * abs(wanted)


def _plain(array: Array) -> Any:
    if array.dtype == np.bool_ or np.isfinite(array).all():
        return array.tolist()
    if array.ndim == 0:
        return str(float(array))
    return [_plain(part) for part in array]

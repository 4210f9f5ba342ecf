"""Every step of one attention with its labels and numbers, and the derivation of any cell.

Owns `Trace` and `ExplainedStep`. Reads the declared steps and asks a source of values for numbers
when they are needed. Must not know kernels, files or how anything is shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.visibility import Mask
from regard.errors import LabelError, safe_text
from regard.explanation.derivation import Derivation, Values, derive
from regard.explanation.labels import Index, Labels, batch_position, head_position, own_head
from regard.explanation.notation import format_number, plain
from regard.explanation.table import aligned
from regard.textbook.steps import Step

if TYPE_CHECKING:
    from regard.problems.problem import Problem


# Said with every view.
READING_NOTE = "Weights say where this head reads, not why a model answered."


def _reason(name: str, present: Mapping[str, object]) -> str | None:
    """Why a step that other calls have is not there."""
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
        """The shape of `value`, leading axes included."""
        return self.source.shape(self.name)

    @cached_property
    def value(self) -> Array:
        """The whole step in float64 (`visible` in booleans)."""
        value = self.source.value(self.name)
        value.setflags(write=False)
        return value

    def head(self, head: int = 0, batch: tuple[int, ...] | None = None) -> Array:
        """One head of one batch element: a matrix, a vector or a number.

        Heads are query heads; for keys and values, the key head that this one reads.
        """
        value, sizes = self.value, self.source.sizes
        own = None
        if head or {"H", "G"} & set(self.axes):
            own = own_head(sizes, self.declared, head_position(sizes, head))
        at = batch_position(self.source.lead, batch)[: value.ndim - len(self.axes)]
        value = value[at]
        return np.asarray(value if own is None else value[own])


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


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Every step of one attention with labels, and why each number has its value."""

    source: Values
    title: str = ""
    note: str = ""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by axis letter
    row_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by step
    problem: Problem | None = None
    rebuild: Callable[[Mask], Trace] | None = None
    check_kernel: Callable[[], KernelCheck] | None = None

    # --- what there is -------------------------------------------------------------------------

    @cached_property
    def names(self) -> Labels:
        """The labels along every axis; numbers where there are none."""
        return Labels(self.labels, self.source.sizes)

    @cached_property
    def steps(self) -> Steps:
        """The steps in order: ``explanation.steps["weights"].value``."""
        explained = []
        for step in self.source.steps.values():
            rows, columns = self.matrix_axes(step)
            row_labels = self.names.along(rows) if rows else self._single_query(step)
            column_labels = self.names.along(columns) if columns else ()
            notes = self.row_notes.get(step.name, ())
            explained.append(ExplainedStep(step, row_labels, column_labels, notes, self.source))
        return Steps(explained)

    @property
    def output(self) -> Array:
        """The last result: projected where there is an output projection, heads side by side."""
        last = next(name for name in ("projected_output", "merged", "output") if name in self.steps)
        return self.steps[last].value

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

    def matrix_axes(self, step: Step) -> tuple[str | None, str | None]:
        """Which axis runs down and which across when one head of the step is shown."""
        axes = [axis for axis in step.axes if axis not in ("H", "G")]
        if len(axes) == 2:
            return axes[0], axes[1]
        if axes == ["L"]:
            return "L", None
        return None, axes[0] if axes else None

    def _single_query(self, step: Step) -> tuple[str, ...]:
        """The row label of a step of one query (D,), which has no query axis."""
        alone = "L" not in self.source.sizes and not step.name.startswith(("W_", "b_"))
        return self.labels.get("L", ()) if alone and step.axes else ()

    def hides(self, step: Step) -> bool:
        """Whether some cells of a step are hidden keys: they are absent, not numbers."""
        return step.over == "visible" and "S" in step.axes

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
            Which query head, 0 if not given. For keys and values it selects the key head that
            this query head reads.
        batch : tuple of int, optional
            Which batch element, the first if not given.

        Raises
        ------
        LabelError
            If there is no such step, row, column, head or batch element. It is a KeyError.
        DtypeError
            If the head or the batch is not made of whole numbers.

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
        index = self.names.positions(declared, where)
        own = own_head(self.source.sizes, declared, self.head_index(head, declared))
        return self.derive(
            step, (*(() if own is None else (own,)), *index), self.batch_index(batch)
        )

    def head_index(self, head: int | None, step: Step | None = None) -> int:
        """The query head, checked; one that is given also where the step has no heads."""
        if head is None and (step is None or not {"H", "G"} & set(step.axes)):
            return 0
        return head_position(self.source.sizes, head)

    def batch_index(self, batch: tuple[int, ...] | None) -> tuple[int, ...]:
        """The position in the leading axes, checked; the first if not given."""
        return batch_position(self.source.lead, batch)

    def derive(self, step: str, index: tuple[int, ...], batch: tuple[int, ...] = ()) -> Derivation:
        """As `why`, with the numbers of a whole index: the head first, if the step has one."""
        return derive(self.source, self.names, step, self.batch_index(batch or None), index)

    # --- as data and text ----------------------------------------------------------------------

    def to_json(self, steps: Sequence[str] | None = None) -> dict[str, Any]:
        """Every step, or those named, as plain data, in order.

        Numbers that JSON does not know are "nan", "inf", "-inf".
        """
        wanted = set(self.steps if steps is None else (self.steps[name].name for name in steps))
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
                    "value": plain(step.value),
                }
                for step in self.steps.values()
                if step.name in wanted
            ],
        }

    def __repr__(self) -> str:
        rows = [("step", "", "formula", "shape")]
        for step in self.steps.values():
            shape = " × ".join(str(size) for size in step.shape) or "number"
            formula = "given" if step.given and step.name != "width" else step.formula
            if step.shape == ():
                formula += f" = {format_number(float(step.value), 6)}"
            rows.append((step.name, step.symbol, formula, shape))
        title = [safe_text(self.title, 200)] if self.title else []
        return "\n".join([*title, aligned(rows, str.ljust), READING_NOTE])

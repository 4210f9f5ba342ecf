"""Every step of one attention with its labels and numbers, and the derivation of any cell.

Owns `Trace`. Reads the declared steps and asks a source of values for numbers when they are needed.
Must not know kernels, files or views.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regard.boundary import answering
from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.boundary.elsewhere import no_such_attribute
from regard.errors import safe_text
from regard.explanation.derivation import Derivation, Values
from regard.explanation.derive import derive
from regard.explanation.labels import Batch, Index, Labels, batch_position, head_position
from regard.explanation.notation import format_number, plain
from regard.explanation.step import ExplainedStep, Steps, matrix_axes
from regard.explanation.table import aligned
from regard.rules.visibility import Mask
from regard.textbook.mechanisms import Declared
from regard.textbook.steps import Step, result_of

if TYPE_CHECKING:
    from regard.problems.problem import Problem


# Said with every view.
READING_NOTE = "Weights say where this head reads, not why a model answered."


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
    mechanism: tuple[str | Declared, str] = (
        "dot",
        "softmax",
    )  # score, normalisation

    # --- what there is -------------------------------------------------------------------------

    @cached_property
    def names(self) -> Labels:
        """The labels along every axis; numbers where there are none."""
        return Labels(self.labels, self.source.sizes)

    @cached_property
    def steps(self) -> Steps:
        """The steps in order, by name; ``explanation["weights"]`` is one of them."""
        explained = []
        for step in self.source.steps.values():
            rows, columns = matrix_axes(step)
            row_labels = self.names.along(rows) if rows else self._single_query(step)
            column_labels = self.names.along(columns) if columns else ()
            notes = self.row_notes.get(step.name, ())
            explained.append(ExplainedStep(step, row_labels, column_labels, notes, self.source))
        return Steps(explained)

    def __getitem__(self, name: str) -> ExplainedStep:
        """A step by its name: ``explanation["weights"]``."""
        return self.steps[name]

    if not TYPE_CHECKING:  # a checker names what is missing by itself

        def __getattr__(self, name: str) -> Any:
            # Asked only where there is no such attribute.
            known = () if name.startswith("_") or "source" not in self.__dict__ else self.steps
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f'for the step write explanation["{near[0]}"]' if near else ""
            raise no_such_attribute(self, name, hint)

    @property
    def output(self) -> Array:
        """The last result: projected where there is an output projection, heads side by side."""
        return self.steps[result_of(self.steps)].value

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

    def _single_query(self, step: Step) -> tuple[str, ...]:
        """The row label of a step of one query (D,), which has no query axis."""
        alone = "L" not in self.source.sizes and not step.name.startswith(("W_", "b_"))
        return self.labels.get("L", ()) if alone and step.axes else ()

    # --- why -----------------------------------------------------------------------------------

    @answering
    def why(
        self,
        step: str,
        *where: Index,
        head: int | None = None,
        batch: Batch | None = None,
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
            Which query head; needed where there are several. For keys and values it selects the
            key head that this query head reads.
        batch : int or tuple of int, optional
            Which batch element; needed where there are several. With more than one leading axis,
            a position for each.

        Raises
        ------
        LabelError
            If there is no such step, row, column, head or batch element, or if there are several
            heads or batch elements and none is named. It is a KeyError.
        DtypeError
            If the head or the batch is not made of whole numbers.

        Examples
        --------
        >>> import numpy as np, regard
        >>> x = np.array([[1.0, 2.0], [3.0, 4.0]])
        >>> explanation = regard.explain(x, x, x, labels=["a", "b"])
        >>> print(explanation.why("scores", "a", "b"))
        A[a, b] = 11    A = Q·Kᵀ
          0    1 × 3 = 3
          1    2 × 4 = 8
          sum          11
        """
        explained = self.steps[step]
        index = self.names.positions(explained.declared, where)
        at, own = explained.one(head, batch)
        heads = {"H", "G"} & set(explained.axes)
        return self.derive(step, (*((own,) if heads else ()), *index), at)

    def head_index(self, head: int | None) -> int:
        """The query head, checked."""
        return head_position(self.source.sizes, head)

    def batch_index(self, batch: Batch | None) -> tuple[int, ...]:
        """The position in the leading axes, checked; the first if not given."""
        return batch_position(self.source.lead, batch)

    def derive(self, step: str, index: tuple[int, ...], batch: tuple[int, ...] = ()) -> Derivation:
        """As `why`, with the numbers of a whole index: the head first, if the step has one."""
        return derive(self.source, self.names, step, self.batch_index(batch or None), index)

    # --- as data and text ----------------------------------------------------------------------

    @answering
    def to_json(self, steps: Sequence[str] | None = None) -> dict[str, Any]:
        """Every step, or those named, as plain data, in order.

        Numbers that JSON does not know are "nan", "inf", "-inf". Steps of the loss and gradients
        say so in "phase", and a gradient names its step in "of".
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
                    **({"phase": step.phase} if step.phase != "forward" else {}),
                    **({"of": step.declared.of} if step.declared.of else {}),
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

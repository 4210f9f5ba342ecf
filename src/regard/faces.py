"""What a user holds: an explanation and a diagnosis, as data, as questions and as something to see.

Owns the methods that need a view or a file. What they say is computed by the modules they call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Self, overload

from regard.boundary import answering
from regard.diagnosis.result import Outcome
from regard.errors import DtypeError, OptionError, safe_text
from regard.explanation import questions
from regard.explanation.contributions import contributions
from regard.explanation.derivation import Derivation
from regard.explanation.labels import Batch, Index
from regard.explanation.questions import Comparison, Mismatch, Statistics
from regard.explanation.table import Table
from regard.explanation.trace import Trace
from regard.problems.parts import Expectation

# What `dir` leaves out of an explanation: how it was made, and what views read.
_FOR_VIEWS = {"batch_index", "check_kernel", "derive", "head_index", "names"}
_FOR_VIEWS |= {"of", "rebuild", "row_notes", "source"}


class Explanation(Trace):
    """Every step of one attention with its numbers, and the questions one can ask of it.

    `regard.explain` makes one. ``explanation["weights"]`` is a step, which shows itself as a table
    and has its array as `value`; ``explanation.steps`` has all of them in order. `why` says how one
    number came about, and each number in the answer can be opened in turn. A notebook shows the
    whole as a page in which every number can be opened, and `to_html` makes a file of it.

    - Ask: `why`, `contributions`, `statistics`, `without`, `compare`, `first_nonfinite`, `check`.
    - Take the numbers: `output`, `table`, `to_dataframe`, `to_npz`, `to_json`.
    - Show them: `to_html`, `to_markdown`, `to_latex`, `plot`, `plot_heads`.

    Where there are several heads or batch elements, a question about one of them names it, such
    as ``head=1, batch=0``.

    Examples
    --------
    >>> import regard
    >>> x = [[0.2, 0.9], [0.8, 0.3], [0.4, 0.6]]
    >>> words = ["she", "likes", "coffee"]
    >>> explanation = regard.explain(x, x, x, labels=words)
    >>> explanation["scores"]
    scores  A = Q·Kᵀ  3 query rows × 3 keys
            she     likes  coffee
    she     0.85    0.43     0.62
    likes   0.43    0.73     0.5
    coffee  0.62    0.5      0.52
    >>> explanation.why("scores", "she", "likes")
    A[she, likes] = 0.43    A = Q·Kᵀ
      0    0.2 × 0.8 = 0.16
      1    0.9 × 0.3 = 0.27
      sum              0.43
    >>> explanation.output.round(3)
    array([[0.437, 0.63 ],
           [0.49 , 0.578],
           [0.459, 0.609]])
    """

    def __dir__(self) -> list[str]:
        """What a user needs: neither how it was made nor what views read."""
        return [name for name in super().__dir__() if name not in _FOR_VIEWS]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The same steps with the methods of this class."""
        return cls(**{each.name: getattr(trace, each.name) for each in fields(Trace)})

    @answering
    def statistics(self, *, head: int | None = None, batch: Batch | None = None) -> Statistics:
        """Mean, variance, minimum and maximum of every step; how each row spreads its weight.

        The variances show why the scale is there: that of q·k grows with the width D.

        Parameters
        ----------
        head, batch
            One query head, one batch element; all of them if not given.
        """
        return questions.statistics(self, head, batch)

    @answering
    def contributions(
        self,
        row: Index | None = None,
        *,
        step: str = "output",
        head: int | None = None,
        batch: Batch | None = None,
    ) -> Table:
        """What each key adds to one row of the output: weights[i, j]·values[j]; they add up to it.

        Or what each term adds to a row of another product, such as each query to ``d_keys``.

        Parameters
        ----------
        row : str or int, optional
            The query, or the row of `step`; not needed where there is only one.
        step : str
            The name of a step that is a product of two tables.
        head, batch
            As for `why`.

        Returns
        -------
        Table
            (S, E): keys down, value features across; of another step its terms and columns. A
            hidden key adds 0.
        """
        return contributions(self, row, head, batch, step)

    @answering
    def table(self, step: str, *, head: int | None = None, batch: Batch | None = None) -> Table:
        """One head of a step as a labelled table."""
        return self.steps[step].table(head=head, batch=batch)

    @answering
    def without(self, key: Index) -> Self:
        """The attention with that key removed; its `.output` is the answer."""
        return self.of(questions.without(self, key))

    @answering
    def compare(self, other: Explanation, tolerance: float = 0.0) -> Comparison | None:
        """The first step in which two explanations differ by more than `tolerance`.

        Steps that only one of them has are passed over; NaN equals NaN. None: no step differs. Of
        two mechanisms, such as a softmax and `regard.normalizers.Sparsemax`, the comparison also
        names these steps and has the weights of both; `compare_html` shows both on one page.

        Raises
        ------
        ShapeError
            If a step has different shapes in the two.
        OptionError
            If the tolerance is negative or NaN.
        """
        if not isinstance(other, Explanation):
            raise DtypeError(f"other must be an Explanation, not {type(other).__name__}")
        return questions.compare(self, other, tolerance)

    def compare_html(
        self,
        other: Explanation,
        path: str | os.PathLike[str],
        *,
        names: tuple[str, str] = ("here", "there"),
        force: bool = False,
    ) -> None:
        """One HTML page with this explanation and another, of which the reader chooses one.

        If the two are of different mechanisms and equal sizes, the page says at which step they
        part and has small weights of both side by side.

        Examples
        --------
        >>> import regard
        >>> from regard.normalizers import Sparsemax
        >>> x = [[1.0, 0.0], [0.0, 2.0]]
        >>> one, other = regard.explain(x, x, x), regard.explain(x, x, x, normalize=Sparsemax())
        >>> one.compare_html(other, "two.html", names=("softmax", "sparsemax"))
        """
        from regard.views import report

        if not isinstance(other, Explanation):
            raise DtypeError(f"other must be an Explanation, not {type(other).__name__}")
        if len({*names}) != 2 or isinstance(names, str):
            raise OptionError(
                f"names has {safe_text(repr(names), 60)}; it needs two names that differ"
            )
        report.write(path, dict(zip(names, (self, other), strict=True)), force=force)

    def first_nonfinite(self) -> Derivation | None:
        """The first cell, in the order of the steps, that is NaN or infinite without being masked.

        −∞ in a bias, in a hidden cell and in the maximum or lse of a row that sees nothing is how
        attention says "absent", and is passed over.
        """
        return questions.first_nonfinite(self)

    @answering
    def check(
        self, expectations: Expectation | Sequence[Expectation] | None = None
    ) -> tuple[Mismatch, ...]:
        """The stated expectations that the numbers do not meet; those of the problem by default."""
        return questions.check(self, expectations)

    @overload
    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        budget: int | str = ...,
        digits: int = ...,
        force: bool = ...,
    ) -> None: ...
    @overload
    def to_html(self, path: None = None, *, budget: int | str = ..., digits: int = ...) -> str: ...
    @answering
    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        budget: int | str = "5MB",
        digits: int = 4,
        force: bool = False,
    ) -> str | None:
        """One HTML page in which every number can be opened: as text, or written to a file.

        Parameters
        ----------
        path : path, optional
            Where the file goes; a page that regard wrote there is replaced, any other file only
            with `force`. Without a path, the page is returned.
        budget : int or str
            The most bytes that it may have, such as 5_000_000 or "5MB". What does not fit is
            pooled, and the page says what.
        digits : int
            How many decimals its tables show at first; a derivation always has 8.

        Raises
        ------
        ProblemError
            If another file is there, or the page cannot be written.
        OptionError, DtypeError
            If the budget is too small, or an argument is of the wrong kind.

        Examples
        --------
        >>> import regard
        >>> explanation = regard.explain([[1.0]], [[2.0]], [[3.0]])
        >>> explanation.to_html("page.html")
        >>> page = explanation.to_html()
        """
        from regard.views import report

        if path is None:
            return report.html(self, budget=budget, digits=digits)
        report.write(path, self, budget=budget, digits=digits, force=force)
        return None

    @answering
    def to_worksheet(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        digits: int = 3,
        gradients: bool = False,
        force: bool = False,
    ) -> str | None:
        """One HTML page to print, with empty tables to fill in by hand and a page of answers.

        What is given has its numbers, and all that is computed from it is left empty; `gradients`
        adds the way back. `path`, `force` and errors are those of `to_html`.

        Examples
        --------
        >>> import regard
        >>> page = regard.explain(regard.load_problem("she-likes-coffee")).to_worksheet()
        """
        from regard.views import worksheet

        if path is None:
            return worksheet.html(self, digits=digits, gradients=gradients)
        worksheet.write(path, self, digits=digits, gradients=gradients, force=force)
        return None

    @answering
    def to_dataframe(self, step: str = "weights") -> Any:
        """All numbers of a step as a pandas DataFrame, with the labels as index and columns.

        Where there are batch elements or heads, the index has a level for each. A derivation,
        contributions and statistics have a `to_dataframe` too.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        return self.steps[step].to_dataframe()

    @answering
    def plot(
        self,
        step: str = "weights",
        *,
        head: int | None = None,
        batch: Batch | None = None,
        axes: Any = None,
    ) -> Any:
        r"""One head of a step as a heat map, on `axes` or on a figure made for it; returns Axes.

        The figure is as large as its cells and labels need, and has a colour bar; nothing is shown.
        To save it: `explanation.plot().figure.savefig("weights.svg")`. On `axes` of your own there
        is no colour bar, and room for labels is made by `figure(layout="constrained")`.

        - Hidden cells are hatched, and NaN and infinite ones are green.
        - Colours reach from 0 to the largest number, or as far on both sides of 0 where there are
          negative ones. In tables of more than 200 numbers the largest 1 in 200 share the last
          colour, so that a few large ones do not leave the others pale; the colour bar then says ≥.
        - Of a gradient, such as ``"d_scores"``, the colour bar says which way the loss goes as a
          number rises.
        - Numbers are written into tables of up to 12 × 12 cells, if each of them fits.
        - Every row and column has its label while lines of text fit beside each other: up to about
          70 of them, 24 in `plot_heads`. In longer tables every 2nd, 5th, 10th, … is named, which
          is said beside the axis.
        - Labels are plain text, in which a ``$`` is no formula. They end in ``…`` after 48
          characters. A letter that no installed font has is written as ``\u65e5``.

        Parameters
        ----------
        step : str
            The name of a step, such as ``"weights"``.
        head, batch
            As for `why`.
        axes : matplotlib.axes.Axes, optional
            Where to draw.

        Raises
        ------
        OptionError
            If matplotlib is not installed.
        """
        from regard.views import plots

        return plots.plot(self.table(step, head=head, batch=batch), axes)

    @answering
    def plot_heads(self, step: str = "weights", *, batch: Batch | None = None) -> tuple[Any, ...]:
        """One heat map for each head on one figure, with one scale; returns the Axes of each.

        As `plot`, with labels at the left and at the bottom only, since all heads share them.
        """
        from regard.views import plots

        heads = range(self.heads or 1)
        return plots.plot_heads([self.table(step, head=head, batch=batch) for head in heads])

    @answering
    def to_markdown(
        self,
        *steps: str,
        head: int | None = None,
        batch: Batch | None = None,
        digits: int = 8,
    ) -> str:
        """Steps as Markdown tables: those named, or all of them."""
        from regard.views import export

        tables = [self.table(name, head=head, batch=batch) for name in steps or self.steps]
        return export.as_markdown(tables, digits)

    @answering
    def to_latex(
        self,
        *steps: str,
        head: int | None = None,
        batch: Batch | None = None,
        digits: int = 8,
    ) -> str:
        """Steps as LaTeX tables: those named, or all of them."""
        from regard.views import export

        tables = [self.table(name, head=head, batch=batch) for name in steps or self.steps]
        return export.as_latex(tables, digits)

    @answering
    def to_npz(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Save the value of every step under its name, and labels as labels_L, labels_S and so on.

        >>> import numpy as np, regard
        >>> regard.explain([[1.0]], [[2.0]], [[3.0]]).to_npz("steps.npz")
        >>> np.load("steps.npz")["output"]
        array([[3.]])
        """
        from regard.views import export

        export.save_npz(self, path, force=force)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: the report in a frame of its own, and the plain text."""
        if "scores" not in self.steps:  # of a whole model
            return {"text/plain": repr(self)}
        from regard.views import report

        return {"text/html": report.frame(self), "text/plain": repr(self)}


class Diagnosis(Outcome):
    """The verdict on an attention function, and the line where it departs from the textbook.

    `verdict` is right; fragile (right on ordinary inputs, not on all); wrong (with the `line` and
    the step where it departs, and `mistakes` where it has a name); unknown; or not_callable (with
    an `adapter` to edit). `lines` are those of the function, each with the steps that it makes.
    """

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """The same verdict with the methods of this class."""
        return cls(**{each.name: getattr(outcome, each.name) for each in fields(Outcome)})

    @overload
    def to_html(self, path: str | os.PathLike[str], *, force: bool = ...) -> None: ...
    @overload
    def to_html(self, path: None = None) -> str: ...
    @answering
    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, force: bool = False
    ) -> str | None:
        """All of it as one HTML page: written to a file, or returned if no path is given.

        A page that regard wrote there is replaced, any other file only with `force`.

        Raises
        ------
        ProblemError
            If another file is there, or the page cannot be written.

        Examples
        --------
        >>> Diagnosis("f", "right", "f is right").to_html("diagnosis.html")
        """
        from regard.views import diagnosis

        if path is None:
            return diagnosis.html(self)
        diagnosis.write(path, self, force=force)
        return None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: the page in a frame of its own, and the plain text."""
        from regard.views import diagnosis

        return {"text/html": diagnosis.frame(self), "text/plain": repr(self)}

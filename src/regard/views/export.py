"""Tables as text for other documents: Markdown, LaTeX; and all numbers as one NPZ file.

Must not know words or pages. Labels come from outside and are escaped for each format.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.boundary.files import write_file
from regard.errors import safe_text
from regard.explanation.notation import format_number, latex_number, latex_text
from regard.explanation.table import Table
from regard.explanation.trace import Trace

LABEL_LENGTH = 80


def as_markdown(tables: Sequence[Table], digits: int = 8) -> str:
    r"""One heading and one pipe table for each step.

    >>> import regard
    >>> explanation = regard.explain([[1.0]], [[2.0]], [[3.0]], key_labels=["a|b"])
    >>> print(explanation.to_markdown("scores"))
    **scores**: A = Q·Kᵀ
    <BLANKLINE>
    |   | a\|b |
    |---|---:|
    | 0 | 2 |
    """
    return "\n\n".join(_markdown(table, digits) for table in tables)


def _markdown(table: Table, digits: int) -> str:
    headers = [_plain(label) for label in table.column_labels] or [_plain(table.symbol)]
    notes = [""] if table.row_notes else []
    lines = [[" ", *headers, *notes]]
    for row, numbers in enumerate(table.value):
        label = _plain(table.row_labels[row]) if table.row_labels else " "
        cells = [_word(table, row, k, digits) for k in range(len(numbers))]
        lines.append([label, *cells, *([_plain(table.row_notes[row])] if notes else [])])
    first, *others = [f"| {' | '.join(line)} |" for line in lines]
    rule = f"|---|{'---:|' * len(headers)}{'---|' * len(notes)}"
    title = f"**{_plain(table.name)}**: {_plain(table.formula)}"
    return "\n".join([title, "", first, rule, *others])


def _word(table: Table, row: int, column: int, digits: int) -> str:
    if table.hidden is not None and table.hidden[row, column]:
        return _plain(", ".join(table.hidden_by(row, column)) or "hidden")
    return format_number(float(table.value[row, column]), digits)


def _plain(label: str) -> str:
    """Text with every character escaped that Markdown, or HTML in it, would interpret."""
    return re.sub(r"([\\`*_{}\[\]<>|&~$#])", r"\\\1", safe_text(label, LABEL_LENGTH))


def as_latex(tables: Sequence[Table], digits: int = 8) -> str:
    r"""One array with labels for each step, for a display formula.

    >>> import regard
    >>> print(regard.explain([[1.0]], [[2.0]], [[3.0]]).to_latex("scores"))
    \begin{array}{r|r}
    A & \text{0} \\ \hline
    \text{0} & 2
    \end{array}
    """
    return "\n\n".join(_latex(table, digits) for table in tables)


def _latex(table: Table, digits: int) -> str:
    columns = table.value.shape[1]
    headers = [latex_text(label) for label in table.column_labels] or [""] * columns
    rows = []
    for row, numbers in enumerate(table.value):
        hidden = [False] * columns if table.hidden is None else table.hidden[row]
        cells = [
            latex_text(_word(table, row, k, digits))
            if hidden[k]
            else latex_number(float(number), digits)
            for k, number in enumerate(numbers)
        ]
        label = latex_text(table.row_labels[row]) if table.row_labels else ""
        rows.append(" & ".join([label, *cells]))
    head = " & ".join([table.latex_symbol, *headers]) + r" \\ \hline"
    body = " \\\\\n".join(rows)
    return "\n".join([rf"\begin{{array}}{{r|{'r' * columns}}}", head, body, r"\end{array}"])


def save_npz(explanation: Trace, path: str | os.PathLike[str], *, force: bool) -> None:
    """Every step by its name, and the labels along each axis that has some."""
    arrays: dict[str, Any] = {name: step.value for name, step in explanation.steps.items()}
    for axis, names in explanation.labels.items():
        arrays[f"labels_{axis}"] = np.array(names, dtype=np.str_)
    with write_file(os.fspath(path), force=force) as file:
        np.savez_compressed(file, **arrays)

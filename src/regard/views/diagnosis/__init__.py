"""A diagnosis to look at: in a terminal, as one HTML file, in a notebook.

`terminal` prints it; `write` makes the file, `html` the text of one and `frame` what a notebook
shows. What it says is in `story.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regard.views import report

if TYPE_CHECKING:
    from regard.diagnosis.result import Outcome

__all__ = ["frame", "html", "write"]


def write(path: str | os.PathLike[str], diagnosis: Outcome, *, force: bool = False) -> None:
    """Write a diagnosis as one HTML file; `force` replaces one that is there.

    Raises
    ------
    ProblemError
        If the file cannot be written, or is there already.
    """
    report.save(path, html(diagnosis), force=force)


def html(diagnosis: Outcome) -> str:
    """The page that `write` puts into a file."""
    from regard.views.diagnosis.page import render

    return render(diagnosis)


def frame(diagnosis: Outcome) -> str:
    """The page as an <iframe> for a notebook: it keeps its style and its policy."""
    return report.framed(html(diagnosis), "a diagnosis of an attention")

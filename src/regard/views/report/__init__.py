"""The report: one HTML file in which every number can be opened.

`write` makes the file, `html` the text of one. Must not know what a page contains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from regard.boundary.files import begins_with, write_file
from regard.boundary.parse import parse_size
from regard.errors import DtypeError, OptionError, safe_text
from regard.explanation.trace import Trace

if TYPE_CHECKING:
    Explanations = Trace | Mapping[str, Trace]

__all__ = ["frame", "framed", "html", "is_page", "save", "write"]

BUDGET = 5_000_000
# Notebooks keep every output, and Jupyter slows down what is larger.
FRAME_BUDGET = 1_000_000
DIGITS = 4
# Height of the frame in pixels, where styles are removed. With its style it is as tall as most of
# the window, not as tall as its page: what is opened is shown at the bottom of the frame, in sight.
FRAME_HEIGHT = 736
LEAST_BUDGET = 200_000


def write(
    path: str | os.PathLike[str],
    explanations: Explanations,
    *,
    budget: int | str = BUDGET,
    digits: int = DIGITS,
    force: bool = False,
) -> None:
    """Write one explanation, or several layers by name, as one HTML file.

    Parameters
    ----------
    explanations : Explanation or mapping of str to Explanation
        What is shown. For a mapping, the reader chooses one layer at a time.
    path, budget, digits, force
        As in `Explanation.to_html`.

    Raises
    ------
    ProblemError
        If the file cannot be written, or is there already and not a page of regard's.
    OptionError, DtypeError
        If the budget is too small, or an argument is of the wrong kind.
    """
    save(path, html(explanations, budget=budget, digits=digits), force=force)


def save(path: str | os.PathLike[str], page: str, *, force: bool) -> None:
    """Write a page to a file, whole or not at all; the errors are those of `write`."""
    place = os.fspath(path)
    with write_file(place, force=force or is_page(place)) as file:
        file.write(page.encode())


def is_page(path: str) -> bool:
    """Whether a file is a page that regard wrote, which a new one replaces without being asked."""
    return begins_with(path, b'<meta name="generator" content="regard">')


def html(explanations: Explanations, *, budget: int | str = BUDGET, digits: int = DIGITS) -> str:
    """The page that `write` puts into a file."""
    from regard.views.report.page import render

    layers: Any = {"": explanations} if isinstance(explanations, Trace) else explanations
    if not isinstance(layers, Mapping) or not all(
        isinstance(name, str) and isinstance(one, Trace) for name, one in layers.items()
    ):
        raise DtypeError("explanations must be an Explanation, or a mapping of names to them")
    if not layers:
        raise OptionError("explanations is empty; give at least one")
    for one in layers.values():
        if 0 in one.batch_shape or one.heads == 0:
            raise OptionError(
                f"there is nothing to show: batch {one.batch_shape}, heads {one.heads}; a page "
                "needs at least one of each"
            )
    if isinstance(digits, bool) or not isinstance(digits, int):
        raise DtypeError(f"digits must be an int, not {safe_text(repr(digits), 60)}")
    if not 0 <= digits <= 17:
        raise OptionError(f"digits is {digits}; it must be between 0 and 17")
    return render(layers, _bytes(budget), digits)


def frame(explanations: Explanations, *, budget: int | str = FRAME_BUDGET) -> str:
    """The page as an <iframe> for a notebook: it keeps its style, its script and its policy."""
    page = html(explanations, budget=budget)
    return framed(page, "attention, every number explained", "allow-scripts")


def framed(page: str, title: str, allowed: str = "") -> str:
    """Any page as an <iframe> that may do nothing but what is `allowed`."""
    return (
        f'<iframe title="{escape(title)}" sandbox="{allowed}" '
        f'width="100%" height="{FRAME_HEIGHT}" style="height: clamp(34rem, 85vh, 60rem); '
        f"box-sizing: border-box; border: 1px solid #8884; border-radius: 6px; "
        f'resize: vertical" srcdoc="{escape(page)}"></iframe>'
    )


def _bytes(budget: Any) -> int:
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise DtypeError(
            f'budget must be bytes or a text such as "5MB", not {type(budget).__name__}'
        )
    count = budget if isinstance(budget, int) else parse_size("budget", budget)
    if count < LEAST_BUDGET:
        raise OptionError(f"budget is {count} bytes; a page needs at least {LEAST_BUDGET}")
    return count

"""A diagnosis as one HTML file: the report's style and tables, no script, nothing from outside.

Owns the signs that repeat what colours say. Text reaches the page through jinja2's autoescaping
alone. Must not know how a diagnosis is made, nor what is said in which order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from regard.views.diagnosis.story import Mood, tell
from regard.views.report.page import asset, policy, template
from regard.views.report.tables import Printed

if TYPE_CHECKING:
    from regard.diagnosis.result import Outcome

SIGNS: dict[Mood, str] = {"good": "✓", "warning": "!", "bad": "✗", "none": "–"}
# More characters in a row may have to be scrolled on a phone, and that with keys as well.
NARROW = 28
LETTERS = (
    "B batch elements, H heads, L queries, D the width of a head. Rows are queries, columns of "
    "scores and weights are keys, counted from 0."
)


def render(diagnosis: Outcome) -> str:
    """The whole page as text."""
    style = asset("report/style.css") + asset("diagnosis/style.css")
    text: str = template("diagnosis/page.html.j2").render(
        story=tell(diagnosis),
        signs=SIGNS,
        letters=LETTERS,
        is_wide=_is_wide,
        policy=policy(style),
        style=Markup(style),
    )
    return text


def _is_wide(shown: Printed) -> bool:
    lines = (sum(len(cell.text) + len(cell.pad) + 3 for cell in row) for row in shown.rows)
    return max(map(len, shown.labels), default=0) + max(lines, default=0) > NARROW

"""Heat maps with matplotlib, which is imported when one is drawn.

Owns what a picture looks like. Returns Axes and never shows anything itself. Must not know words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.arithmetic import format_number
from regard.errors import OptionError, safe_text
from regard.explanation import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Up to so many rows and columns have their numbers written in, or their labels at all.
WRITTEN, LABELLED = 12, 40
LABEL_LENGTH = 24


def plot(table: Table, axes: Any = None, scale: float | None = None) -> Any:
    """One table as a heat map; `scale` is the number that is darkest.

    Raises
    ------
    OptionError
        If matplotlib is not installed.
    """
    pyplot = _pyplot()
    if axes is None:
        rows, columns = table.values.shape
        width, height = (min(12.0, 1.5 + 0.6 * count) for count in (columns, rows))
        axes = pyplot.figure(figsize=(max(width, 3.0), max(height, 2.2))).add_subplot()
    values = np.asarray(table.values, np.float64)
    hidden = np.zeros(values.shape, np.bool_) if table.hidden is None else table.hidden
    largest = _largest([table]) if scale is None else scale
    signed = bool((values[np.isfinite(values) & ~hidden] < 0).any())
    image = axes.imshow(
        np.ma.masked_array(values, hidden | ~np.isfinite(values)),
        cmap="PuOr_r" if signed else "Oranges",
        vmin=-largest if signed else 0,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    _hatch(axes, hidden)
    _label(axes, table)
    if max(values.shape) <= WRITTEN:
        _write(axes, values, hidden, image)
    axes.set_title(f"{table.name}   {_literal(table.formula)}", fontsize="medium")
    return axes


def plot_heads(tables: Sequence[Table]) -> tuple[Any, ...]:
    """One heat map for each table, all with the same scale."""
    pyplot = _pyplot()
    columns = min(4, len(tables))
    rows = -(-len(tables) // columns)
    figure = pyplot.figure(figsize=(3.4 * columns, 3.0 * rows), layout="constrained")
    largest = _largest(tables)
    drawn = []
    for head, table in enumerate(tables):
        axes = plot(table, figure.add_subplot(rows, columns, head + 1), largest)
        axes.set_title(f"head {head}", fontsize="medium")
        drawn.append(axes)
    return tuple(drawn)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise OptionError(
            'a plot needs matplotlib, which is not installed: pip install "regard[plot]"'
        ) from None
    return pyplot


def _largest(tables: Sequence[Table]) -> float:
    if tables[0].name == "weights":
        return 1.0
    found = 0.0
    for table in tables:
        values = np.asarray(table.values, np.float64)
        seen = np.isfinite(values)
        if table.hidden is not None:
            seen &= ~table.hidden
        found = max(found, float(np.abs(values[seen]).max(initial=0)))
    return found or 1.0


def _hatch(axes: Any, hidden: NDArray[np.bool_]) -> None:
    """Hidden cells are hatched, so that they do not look like zeros."""
    if hidden.any() and hidden.size <= 64 * 64:
        from matplotlib.patches import Rectangle

        for row, column in np.argwhere(hidden):
            place = (column - 0.5, row - 0.5)
            style: dict[str, Any] = {"facecolor": "none", "edgecolor": "0.7", "linewidth": 0}
            axes.add_patch(Rectangle(place, 1, 1, hatch="////", **style))


def _label(axes: Any, table: Table) -> None:
    for names, axis, turn in (
        (table.column_labels, axes.xaxis, 45 if len(table.column_labels) > 6 else 0),
        (table.row_labels, axes.yaxis, 0),
    ):
        if not names:
            axis.set_ticks([])
        elif len(names) <= LABELLED:
            texts = [_literal(safe_text(name, LABEL_LENGTH)) for name in names]
            axis.set_ticks(range(len(names)), texts, rotation=turn)
    axes.tick_params(length=0)


def _write(axes: Any, values: Any, hidden: Any, image: Any) -> None:
    for (row, column), value in np.ndenumerate(values):
        if hidden[row, column]:
            continue
        depth = abs(float(image.norm(value)) - (0.5 if image.norm.vmin < 0 else 0))
        dark = np.isfinite(value) and depth > (0.35 if image.norm.vmin < 0 else 0.6)
        axes.text(
            column,
            row,
            _literal(format_number(float(value), 3)),
            ha="center",
            va="center",
            fontsize="small",
            color="white" if dark else "black",
        )


def _literal(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")

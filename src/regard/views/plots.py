"""Heat maps with matplotlib, which is imported when one is drawn.

Owns what a picture looks like and how large it is: first the cells, in inches, then as much room
around them as what is written there was measured to need. Returns Axes and never shows anything
itself. Must not know words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError, safe_text
from regard.explanation.notation import format_number
from regard.explanation.table import Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Inches: the largest cell, the longest side of a table alone and of one among several, the smallest
# cell that a row or column has while its table is small, and the space between things.
CELL, ALONE, AMONG, NAMED, GAP = 0.6, 8.0, 2.8, 0.2, 0.12
WRITTEN = 12  # rows and columns at most, to have their numbers written in
BAR = 0.14, 2.5  # the colour bar's width, and its height at most
LABEL_LENGTH = 48
SIZES = "small", "x-small"  # of what is written at and in the cells, the first that fits
TEXT: dict[str, Any] = {"parse_math": False, "usetex": False}  # a $ or a _ is a letter
HIDDEN: dict[str, Any] = {"facecolor": "0.94", "edgecolor": "0.72", "hatch": "////"}
NOT_FINITE: dict[str, Any] = {"facecolor": "#009e73"}  # which neither colour map has
MOST = float(np.finfo(np.float64).max) / 4  # so that matplotlib can subtract the ends of a scale


def plot(table: Table, axes: Any = None) -> Any:
    """One table as a heat map, on `axes` or on a figure of its own with a colour bar.

    Raises
    ------
    OptionError
        If matplotlib is not installed.
    """
    pyplot = _pyplot()
    title = f"{_title(table)}   {table.place}".rstrip()
    if axes is None:
        axes, *_ = _on_a_figure(pyplot, [table], [title], ALONE)
    else:
        _draw(table, axes, _scale([table]))
        axes.set_title(title, fontsize="medium", **TEXT)
    return axes


def plot_heads(tables: Sequence[Table]) -> tuple[Any, ...]:
    """One heat map for each table, all with the same size, scale and labels."""
    titles = [f"head {head}" for head in range(len(tables))]
    return _on_a_figure(_pyplot(), tables, titles, AMONG, heading=_title(tables[0]))


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise OptionError(
            'a plot needs matplotlib, which is not installed: pip install "regard[plot]"'
        ) from None
    return pyplot


def _title(table: Table) -> str:
    return f"{table.name}   {table.formula}"


@dataclass(frozen=True)
class Scale:
    """The number that is darkest, whether there are larger ones, and whether 0 is in the middle.

    Tables on one scale are written alike: `letters` has the longest number of any of them.
    """

    end: float
    exceeded: bool
    signed: bool
    letters: int

    @property
    def ends(self) -> tuple[float, float]:
        return (-self.end if self.signed else 0.0), self.end

    @property
    def colours(self) -> str:
        return "PuOr_r" if self.signed else "Oranges"


def _scale(tables: Sequence[Table]) -> Scale:
    """Colours for all but the largest 1 in 200 numbers, beside which others could look alike."""
    numbers = np.concatenate([np.asarray(t.value, np.float64)[_numbers(t)] for t in tables])
    sizes = np.abs(numbers)
    largest = float(sizes.max(initial=0))
    end = float(np.quantile(sizes, 0.995, method="higher")) if sizes.size else 0.0
    end = min(end or largest or 1.0, MOST)
    letters = max((len(text) for table in tables for text in _texts(table).values()), default=0)
    return Scale(end, end < largest, tables[0].slopes or bool((numbers < 0).any()), letters)


def _numbers(table: Table) -> NDArray[np.bool_]:
    """Which cells are to be coloured by their number."""
    return np.isfinite(np.asarray(table.value, np.float64)) & ~_hidden(table)


def _hidden(table: Table) -> NDArray[np.bool_]:
    return np.zeros(table.value.shape, np.bool_) if table.hidden is None else table.hidden


# --- a figure of its own --------------------------------------------------------------------------


def _on_a_figure(
    pyplot: Any, tables: Sequence[Table], titles: Sequence[str], side: float, heading: str = ""
) -> tuple[Any, ...]:
    """Tables of one shape, their cells at most `side` inches long, on a figure made for them.

    While it is made it is one inch wide and high, so that its coordinates are inches.
    """
    figure = pyplot.figure(figsize=(1, 1), layout="none")
    width, height = _extent(tables[0].value.shape, side)
    scale = _scale(tables)
    count = len(tables)
    across = count if count <= 4 else next((n for n in (4, 3, 5) if count % n == 0), 4)
    panels = []
    with pyplot.rc_context({"text.usetex": False}):
        for number, (table, title) in enumerate(zip(tables, titles, strict=True)):
            axes = figure.add_axes((0, 0, width, height), label=title)
            # All have the same labels, which are written at the left and at the bottom only.
            sides = number % across == 0, number + across >= count
            _draw(table, axes, scale, sides, slanted=count == 1)
            axes.set_title(title, fontsize="medium", **TEXT)
            panels.append(axes)
        right, top, bottom = _set_out(panels, across, width, height)
        _colour_bar(figure, tables, scale, (right + GAP, top, top - bottom))
    if heading:
        above = max(axes.get_tightbbox().y1 for axes in panels) / figure.dpi
        style = {"ha": "center", "va": "bottom", "fontsize": "medium"}
        figure.suptitle(heading, x=right / 2, y=above + GAP, **style, **TEXT)
    _enclose(figure)
    return tuple(panels)


def _extent(shape: tuple[int, ...], side: float) -> tuple[float, float]:
    """Width and height of the cells: square, unless a short side can have room for names."""
    rows, columns = (max(size, 1) for size in shape)
    cell = max(min(CELL, side / max(rows, columns)), NAMED)
    return min(side, columns * cell), min(side, rows * cell)


def _set_out(
    panels: Sequence[Any], across: int, width: float, height: float
) -> tuple[float, float, float]:
    """Place panels in rows from (0, 0) rightwards and down; the outer edges of their cells."""
    outer = []  # what is written left, below, right and above, in inches
    for axes in panels:
        # A title takes no width: it may reach over what is beside it.
        taken, cells = axes.get_tightbbox(for_layout_only=True), axes.get_window_extent()
        outer.append((*(cells.p0 - taken.p0), *(taken.p1 - cells.p1)))
    margins = np.array(outer) / panels[0].figure.dpi
    columns = [margins[n::across] for n in range(across)]
    rows = [margins[n : n + across] for n in range(0, len(panels), across)]
    lefts, downs = [0.0], [-height]
    for before, after in pairwise(columns):
        lefts.append(lefts[-1] + width + before[:, 2].max() + GAP + after[:, 0].max())
    for before, after in pairwise(rows):
        downs.append(downs[-1] - before[:, 1].max() - GAP - after[:, 3].max() - height)
    for number, axes in enumerate(panels):
        axes.set_position((lefts[number % across], downs[number // across], width, height))
    return lefts[-1] + width, 0.0, downs[-1]


def _colour_bar(
    figure: Any, tables: Sequence[Table], scale: Scale, place: tuple[float, float, float]
) -> None:
    """The colours with their numbers, and below them what else a cell may look like."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    left, top, room = place
    width, most = BAR
    height = min(max(room, most / 2), most)
    axes = figure.add_axes((left, top - height, width, height), label="colour bar")
    beyond = "neither" if not scale.exceeded else "both" if scale.signed else "max"
    colours = ScalarMappable(Normalize(*scale.ends), scale.colours)
    bar = figure.colorbar(colours, cax=axes, extend=beyond, extendfrac=0.04)
    ticks = np.linspace(*scale.ends, 3)
    labels = [format_number(float(tick), 3) for tick in ticks]
    if scale.exceeded:
        labels[-1] = f"≥ {labels[-1]}"
        labels[0] = f"≤ {labels[0]}" if scale.signed else labels[0]
    if tables[0].slopes:  # what happens to the loss as a number rises
        labels[0], labels[-1] = f"{labels[0]}: loss falls", f"{labels[-1]}: loss rises"
    bar.set_ticks(ticks, labels=labels, fontsize="small")
    bar.outline.set_linewidth(0.5)
    kinds = []
    if any(_hidden(table).any() for table in tables):
        kinds.append(Patch(**HIDDEN, linewidth=0, label="hidden"))
    if any(_not_finite(table).any() for table in tables):
        kinds.append(Patch(**NOT_FINITE, linewidth=0, label="NaN or infinite"))
    if kinds:
        axes.legend(
            handles=kinds,
            loc="upper left",
            bbox_to_anchor=(0, -GAP / height),
            fontsize="small",
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.2,
            handleheight=1.2,
        )


def _enclose(figure: Any) -> None:
    """Give the figure the size of all that is on it."""
    taken = figure.get_tightbbox()
    corner = taken.p0 - GAP
    size = taken.size + 2 * GAP
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((*((box.p0 - corner) / size), *(box.size / size)))
    for text in figure.texts:
        text.set_position((np.array(text.get_position()) - corner) / size)
    figure.set_size_inches(size)


# --- one heat map ---------------------------------------------------------------------------------


def _draw(
    table: Table,
    axes: Any,
    scale: Scale,
    sides: tuple[bool, bool] = (True, True),
    slanted: bool = True,
) -> None:
    """Cells, their numbers where there is room, and names at the left and below, if on `sides`."""
    from matplotlib.colors import Normalize

    values, hidden = np.asarray(table.value, np.float64), _hidden(table)
    rows, columns = values.shape
    axes.grid(False)
    if values.size:
        image = axes.imshow(
            np.ma.masked_array(values, ~_numbers(table)),
            cmap=scale.colours,
            norm=Normalize(*scale.ends, clip=True),
            aspect="auto",
            origin="upper",
            interpolation="nearest",
        )
        _cover(axes, hidden, HIDDEN)
        _cover(axes, _not_finite(table), NOT_FINITE)
    else:
        axes.text(0.5, 0.5, "no cells", transform=axes.transAxes, ha="center", va="center")
    axes.set(xlim=(-0.5, max(columns, 1) - 0.5), ylim=(max(rows, 1) - 0.5, -0.5))
    # Inches from cell to cell.
    width, height = (
        axes.get_window_extent().size / axes.figure.dpi / (max(columns, 1), max(rows, 1))
    )
    axes.tick_params(length=0)
    _name(axes.yaxis, table.row_labels if sides[0] else (), table.row_axis, height)
    _name(axes.xaxis, table.column_labels if sides[1] else (), table.column_axis, width, slanted)
    if values.size:
        _write(axes, table, image, scale.letters, (width, height))


def _not_finite(table: Table) -> NDArray[np.bool_]:
    return ~(_numbers(table) | _hidden(table))


def _cover(axes: Any, cells: NDArray[np.bool_], style: dict[str, str]) -> None:
    """Paint some cells over, all with one artist: an outline around each run of them in a row."""
    if not cells.any():
        return
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    steps = np.diff(np.pad(cells, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    row, begin = np.nonzero(steps == 1)
    end = np.nonzero(steps == -1)[1]
    x = np.stack([begin, end, end, begin, begin], axis=1)
    y = np.stack([row, row, row + 1, row + 1, row], axis=1)
    kinds = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(np.stack([x, y], axis=2).reshape(-1, 2) - 0.5, np.tile(kinds, len(row)))
    # Not add_patch, which walks along every outline in Python to find the limits of the axes.
    axes.add_artist(PathPatch(path, linewidth=0, **style))


def _name(
    axis: Any, names: Sequence[str], what: str, pitch: float, slanted: bool | None = None
) -> None:
    """Names along an axis whose cells are `pitch` inches apart: each, or every k-th, said so."""
    if not names:
        axis.set_ticks([])
        return
    figure = axis.axes.figure
    for size in SIZES:
        line = _line(size)
        if line <= pitch:
            break
    # Named one by one, or with room between the names.
    step, turn = 1 if line <= pitch else _step(2 * line / pitch), 90
    if axis.axis_name == "x":
        texts, families = _in_fonts(names[::step])
        widest = max(_width(figure, text, fontsize=size, family=families) for text in texts)
        flat = _step((widest + line / 2) / pitch)
        if flat == 1 or all(map(str.isdecimal, texts)):
            step, turn = flat, 0
        elif slanted and pitch >= 1.5 * line:
            turn = 45
    else:
        turn = 0
    texts, families = _in_fonts(names[::step])
    style: dict[str, Any] = {"fontsize": size, "family": families}
    if turn:
        style |= {"rotation": turn, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    axis.set_ticks(range(0, len(names), step), texts, **style, **TEXT)
    if step > 1:
        axis.set_tick_params(length=2)
        what = f"{what}, every {step}{'nd' if step == 2 else 'th'} named"
    axis.set_label_text(what, fontsize="small", **TEXT)


def _texts(table: Table) -> dict[tuple[int, int], str]:
    """The numbers of a small table as they are written; none of a larger one."""
    if max(table.value.shape) > WRITTEN:
        return {}
    cells = np.argwhere(~_hidden(table)).tolist()
    return {(i, j): format_number(float(table.value[i, j]), 3) for i, j in cells}


def _write(axes: Any, table: Table, image: Any, letters: int, cell: tuple[float, float]) -> None:
    """The numbers of a table, if so many letters fit into a cell."""
    from matplotlib.colors import to_rgb

    width, height = cell
    for size in SIZES:
        taken = _width(axes.figure, "0" * letters, fontsize=size)
        if _line(size) <= height and taken <= 0.95 * width:
            break
    else:
        return
    for (row, column), text in _texts(table).items():
        shade = NOT_FINITE["facecolor"]
        if np.isfinite(float(table.value[row, column])):
            shade = image.cmap(image.norm(image.get_array()[row, column]))
        bright = np.dot(to_rgb(shade), (0.299, 0.587, 0.114))
        colour = "black" if bright > 0.55 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour, **TEXT)


def _step(cells: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50, … that is not less."""
    scale = 1
    while True:
        for step in (scale, 2 * scale, 5 * scale):
            if step >= cells:
                return step
        scale *= 10


# --- text -----------------------------------------------------------------------------------------


def _line(size: str) -> float:
    """The height of a line, in inches."""
    from matplotlib.font_manager import FontProperties

    return float(1.2 / 72 * FontProperties(size=size).get_size_in_points())


def _width(figure: Any, text: str, **style: Any) -> float:
    """How wide a text is, in inches."""
    drawn = figure.text(0, 0, text, **style, **TEXT)
    width = float(drawn.get_window_extent().width / figure.dpi)
    drawn.remove()
    return width


def _in_fonts(names: Sequence[str]) -> tuple[list[str], list[str]]:
    r"""Names to draw, and the families of fonts to draw them in, which have all their letters.

    A letter that no installed font has is written as its escape, such as \u65e5: all of them would
    be the same empty box otherwise.
    """
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    texts = [safe_text(name, LABEL_LENGTH) for name in names]
    families = [*rcParams["font.family"]]
    files = [findfont(FontProperties(family=[family])) for family in families]
    letters = frozenset("".join(texts)).difference(*map(_letters, files))
    more, absent = _fonts_of(letters, len(fontManager.ttflist)) if letters else ((), letters)
    escapes = {ord(one): one.encode("ascii", "backslashreplace").decode() for one in absent}
    written = [safe_text(text.translate(escapes), LABEL_LENGTH) for text in texts]
    return written, [*families, *more]


@lru_cache(maxsize=16)
def _fonts_of(letters: frozenset[str], known: int) -> tuple[tuple[str, ...], frozenset[str]]:
    """Families that together have these letters, as far as any has; and the rest of the letters.

    `known` fonts are looked through, which takes a second, so only once until there are more.
    """
    from matplotlib.font_manager import fontManager

    have: dict[str, frozenset[str]] = {}
    regular = set()
    for font in sorted(fontManager.ttflist, key=lambda font: (font.weight != 400, font.name)):
        # The last resort has a box for every letter.
        if font.style == "normal" and not font.name.startswith("Last Resort"):
            have.setdefault(font.name, letters & _letters(font.fname))
            regular |= {font.name} if font.weight == 400 else set()
    chosen: list[str] = []
    while have := {name: of for name, has in have.items() if (of := has & letters)}:
        chosen.append(max(have, key=lambda name: (name in regular, len(have[name]))))
        letters -= have[chosen[-1]]
    return tuple(chosen), letters


def _letters(file: str) -> frozenset[str]:
    """The letters that a font has; none, if its file is gone or broken."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(map(chr, get_font(file).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()

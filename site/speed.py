"""The figures of docs/performance.md as pictures, and those of the kernel's ladder.

Numbers are read from the tables that people read. Must not measure anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gallery import as_svg
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "performance.md"
LADDER = ROOT / "src/regard/compute/kernels/cpp/README.md"
# A sign besides a colour for each library.
SIGNS = {"regard": "o", "torch": "s", "onnxruntime": "D", "openvino": "^", "jax": "v", "numpy": "x"}
TABLE = re.compile(
    r"^(?:\*\*|\*)([^*\n]+?)(?:\*\*|\*)\n\n\| B,H,L,S,D \((.+?)\) \|(.+)\n\|[-:|]+\n((?:\|.+\n)+)",
    re.MULTILINE,
)

OPENING = """# Speed in pictures

The figures of [Performance](../docs/performance.md), which says how they were measured, on which
machine, and how to repeat them: `regard bench`. Each row is one case, B,H,L,S,D: batch elements,
heads, queries, keys and the width of a head.

"""
LAST = """## What each idea of the kernel is worth

From plain loops to the kernel, one idea per rung
([the ladder](../src/regard/compute/kernels/cpp/README.md#the-ladder)); eight heads, 1024 queries
and keys, 64 wide, float32.

```{image} ladder.svg
:alt: GF/s of each rung of the ladder
```
"""


class Figures(NamedTuple):
    """One table: a row for each case, a column for each library; None where it has no number."""

    title: str
    unit: str
    libraries: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]


def speed() -> Iterator[tuple[str, bytes]]:
    """The page of pictures, and the pictures."""
    text = OPENING
    for number, figures in enumerate(measured()):
        name = f"speed-{number}.svg"
        yield f"reference/{name}", _dots(figures)
        place = "ahead in all cases" if _leads(figures) else "beside its peers"
        words = f"{figures.title}, in {figures.unit}: regard {place}"
        text += f"## {figures.title}\n\n```{{image}} {name}\n:alt: {words}\n```\n\n"
    yield "reference/ladder.svg", _ladder()
    yield "reference/speed.md", (text + LAST).encode()


def measured() -> Iterator[Figures]:
    """Every table of the page whose columns are libraries."""
    for title, unit, head, body in TABLE.findall(MEASURED.read_text("utf-8")):
        libraries = [one.strip() for one in head.split("|")[:-1] if one.strip() in SIGNS]
        rows = []
        for line in body.splitlines():
            case, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows.append((case, [_number(cell) for cell in cells[: len(libraries)]]))
        yield Figures(title, unit, libraries, rows)


def _number(cell: str) -> float | None:
    found = re.match(r"\**([\d.,]+)", cell)
    return float(found[1].replace(",", "")) if found else None


def _is_time(figures: Figures) -> bool:
    return figures.unit in ("µs", "ms", "s")


def _leads(figures: Figures) -> bool:
    best = min if _is_time(figures) else max
    return all(best(filter(None, row)) == row[0] for _, row in figures.rows)


def _dots(figures: Figures) -> bytes:
    """One line for each case, one sign for each library."""
    figure, axes = pyplot.subplots(figsize=(4, 1.2 + 0.34 * len(figures.rows)))
    places = range(len(figures.rows))
    for column, library in enumerate(figures.libraries):
        own = [row[column] for _, row in figures.rows]
        size = 70 if library == "regard" else 32
        axes.scatter(own, places, marker=SIGNS[library], s=size, label=library, zorder=3)
    if _is_time(figures):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    direction = "less is faster" if _is_time(figures) else "more is faster"
    axes.set(xlabel=f"{figures.unit}, {direction}")
    return _finished(figure, axes, [case for case, _ in figures.rows])


def _ladder() -> bytes:
    """The rungs as bars; causal ones count half of the work and are left to the table."""
    rows = re.findall(
        r"^\| ([\w ]+) \| (.+?) \| [\d.]+ \| ([\d.]+) \|", LADDER.read_text("utf-8"), re.MULTILINE
    )
    rows = [(f"{rung}: {adds.replace('`', '')}", float(own)) for rung, adds, own in rows]
    rows = [row for row in rows if "causal" not in row[0]]
    figure, axes = pyplot.subplots(figsize=(2.5, 1.2 + 0.36 * len(rows)))
    bars = axes.barh(range(len(rows)), [own for _, own in rows], color="#d9780a", zorder=3)
    axes.bar_label(bars, padding=3)
    axes.set(xlabel="GF/s")
    return _finished(figure, axes, [name for name, _ in rows])


def _finished(figure: Any, axes: Any, names: Sequence[str]) -> bytes:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dddddd")
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(  # above, so that a phone need not make the text smaller
            loc="lower left", bbox_to_anchor=(-0.3, 1), ncols=3, frameon=False, columnspacing=1
        )
    return as_svg(figure)

"""A report as one plot: speeds relative to the best peer of each case. Must not measure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from regard.bench.libraries import REGARD
from regard.boundary.files import write_file
from regard.errors import safe_text

if TYPE_CHECKING:
    from regard.bench.measure import Report

# Shapes as well as colours (Okabe and Ito's) for colour-blind readers.
MARKS = {
    "torch": ("o", "#d55e00"),
    "onnxruntime": ("s", "#0072b2"),
    "openvino": ("^", "#cc79a7"),
    "jax": ("D", "#e69f00"),
    "numpy": ("v", "#666666"),
}
BAR = "#009e73"
ROW = 0.26  # inches


def draw(report: Report) -> Any:
    """Axes with a bar for regard and a mark for every peer, per case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [one for one in report.results if one.ratio is not None]
    figure = Figure(figsize=(9, 1.6 + ROW * max(len(rows), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(rows))
    ratios = [one.ratio or 0.0 for one in rows]
    # Bars begin at 1: to the right regard is faster, to the left the peer.
    axes.barh(places, [r - 1 for r in ratios], left=1, height=0.62, color=BAR, label=REGARD.name)
    for place, ratio in zip(places, ratios, strict=True):
        # In a column right of all marks.
        axes.annotate(
            f"{ratio:.2f}",
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=BAR,
        )
    speeds = [*ratios, 1.0]
    for name, (mark, colour) in MARKS.items():
        points = []
        for place, one in zip(places, rows, strict=True):
            best = one.outcomes[one.best_peer].seconds if one.best_peer else None
            outcome = one.outcomes.get(name)
            if best and outcome is not None and outcome.seconds is not None:
                points.append((best / outcome.seconds, place))
        if points:
            across, down = zip(*points, strict=True)
            speeds += across
            axes.scatter(across, down, marker=mark, color=colour, s=26, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    left, right = min(speeds) / 1.25, max(*speeds, 1.2) * 1.25
    axes.set_xlim(left, right)
    decades = range(math.floor(math.log10(left)), math.ceil(math.log10(right)))
    ticks = [digit * 10.0**n for n in decades for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if left <= tick <= right]
    if len(ticks) > 12:
        ticks = [10.0**n for n in decades if left <= 10.0**n]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(places, [one.case.name for one in rows], fontsize=8)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_xlabel("speed relative to the fastest peer of the case (its mark is at 1)")
    machine = report.machine
    title = f"{safe_text(machine['cpu'], 80)}, {machine['threads']} threads"
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return axes


def save_plot(report: Report, path: str) -> None:
    """Save the plot; the suffix chooses the format."""
    figure = draw(report).figure
    with write_file(path, force=True) as file:  # the command has asked about --force
        figure.savefig(file, dpi=150, format=path.rpartition(".")[2])

"""A report as one picture: each side's speed relative to the best peer of the case.

Must not compute anything that the report does not say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.bench.sides import REGARD

if TYPE_CHECKING:
    from regard.bench.run import Report

# Told apart by shape as well as by colour (Okabe and Ito's, for all kinds of colour vision).
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
    """A bar for regard and a mark for every peer, per case; returns the Axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [one for one in report.results if one.ratio is not None]
    figure = Figure(figsize=(9, 1.6 + ROW * max(len(rows), 4)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(rows))
    ratios = [one.ratio or 0.0 for one in rows]
    # From 1 to the left or the right, so that a length says by how much one of them is faster.
    axes.barh(places, [r - 1 for r in ratios], left=1, height=0.62, color=BAR, label=REGARD.name)
    for place, ratio in zip(places, ratios, strict=True):
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, place),
            xytext=(4 if ratio >= 1 else -4, 0),
            textcoords="offset points",
            ha="left" if ratio >= 1 else "right",
            va="center",
            fontsize=8,
        )
    for name, (mark, colour) in MARKS.items():
        points = []
        for place, one in zip(places, rows, strict=True):
            best = one.outcomes[one.best_peer].seconds if one.best_peer else None
            outcome = one.outcomes.get(name)
            if best and outcome is not None and outcome.seconds is not None:
                points.append((best / outcome.seconds, place))
        if points:
            across, down = zip(*points, strict=True)
            axes.scatter(across, down, marker=mark, color=colour, s=26, label=name, zorder=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(min([*ratios, 0.05]) * 0.8, max([*ratios, 1.5]) * 1.6)
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(places, [one.case.name for one in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("speed relative to the fastest peer of the case (its mark stands at 1)")
    machine = report.machine
    axes.set_title(f"{machine['cpu']}, {machine['threads']} threads", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return axes


def save_plot(report: Report, path: str) -> None:
    """The picture in a file; its suffix says which kind."""
    draw(report).figure.savefig(path, dpi=150)

"""Every head of a model in a terminal: one small table of layers and heads for each measure.

Owns the words for the measures and how the tables follow each other. Must not know models.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from regard.errors import safe_text
from regard.explanation.trace import READING_NOTE
from regard.views.terminal_layout import FAINT, STRONG, Cell, Layout

if TYPE_CHECKING:
    from regard.explanation.overview import Overview

DIGITS = 2
MOST_TOKENS = 40

MEASURES = {
    "entropy": "How widely a head reads, in nats: 0 is one token, {all} all {count} alike",
    "own": "Weight on the token itself",
    "previous": "Weight on the token before",
    "following": "Weight on the token after",
    "first": "Weight on the first token, {first}",
    "separators": "Weight on the other special tokens",
}


def print_overview(overview: Overview, console: Console, digits: int | None = None) -> None:
    """Each measure as a table, layers down and heads across, with where it is largest."""
    page = Layout(console, DIGITS if digits is None else digits)
    layers, heads = overview.entropy.shape
    count = len(overview.tokens)
    words = [safe_text(token, 24) for token in overview.tokens[:MOST_TOKENS]]
    words += ["…"] if count > MOST_TOKENS else []
    page.say(f"{layers} layers × {heads} heads over {count} tokens", STRONG)
    page.say(" ".join(words))
    page.say("Layers go down and heads across, from 0; each number is a mean over the tokens.")
    facts = {
        "all": f"{math.log(count):.{page.digits}f}",
        "count": str(count),
        "first": safe_text(overview.tokens[0], 24),
    }
    for name, meaning in MEASURES.items():
        page.gap()
        page.say(name, STRONG)
        page.say(f"{meaning.format(**facts)}.")
        page.gap()
        _print_measure(overview, name, page)
    page.section()
    shown = overview.largest("previous", 1) or overview.largest("entropy", 1)
    for layer, head, _ in shown:
        page.say(f"See one head with --layer and --head, such as --layer {layer} --head {head}.")
    page.say(READING_NOTE)


def _print_measure(overview: Overview, name: str, page: Layout) -> None:
    values = overview.measures[name]
    full = math.log(len(overview.tokens)) if name == "entropy" else 1.0
    shade = page.shades(full)

    def cell(value: float) -> Cell:
        if not np.isfinite(value):
            return Cell("NaN", FAINT, word=True)
        return Cell(f"{value:.{page.digits}f}", shade(value))

    page.grid(
        [str(layer) for layer in range(values.shape[0])],
        [str(head) for head in range(values.shape[1])],
        [[cell(float(value)) for value in row] for row in values],
    )
    places = [
        f"{value:.{page.digits}f} in layer {layer} head {head}"
        for layer, head, value in overview.largest(name)
    ]
    if places:
        page.say(f"Most: {', '.join(places)}.", FAINT, indent=2)

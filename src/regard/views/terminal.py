"""An explanation in a terminal: labelled tables, shaded cells, derivations, with rich.

Owns what is printed, and in which order: the words come from `story`, the numbers and formulas from
the explanation, the overview of the steps from `picture`, and `terminal_layout` lays them out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import astuple
from itertools import groupby

import numpy as np
from rich.cells import cell_len
from rich.console import Console

from regard.errors import safe_text
from regard.explanation import questions
from regard.explanation.derivation import Derivation, cell_name
from regard.explanation.notation import exactly
from regard.explanation.questions import Comparison, Mismatch, RowStatistics
from regard.explanation.step import ExplainedStep
from regard.explanation.table import shown_of
from regard.explanation.trace import READING_NOTE, Trace
from regard.textbook.operations import OPERATIONS
from regard.views import story
from regard.views.head_view import Head
from regard.views.picture import picture
from regard.views.step_words import EFFECTIVE_KEYS, sentences, significant, why_the_scale
from regard.views.terminal_layout import ALARM, FAINT, STRONG, Cell, Layout
from regard.views.walk import PATH_NOTE, off_path, walk

MOST_MISMATCHES = 10


# --- what can be printed -------------------------------------------------------------------------


def print_explanation(
    explanation: Trace,
    console: Console,
    steps: Sequence[str] | None = None,
    head: int | None = None,
    digits: int | None = None,
) -> None:
    """Every step as a table with its formula and its meaning; only `steps` if they are named."""
    for name in steps or ():
        explanation.steps[name]  # one that is not there says so before anything is printed
    page = Layout(console, digits)
    own = Head(explanation, head)
    _print_head_line(explanation, page, head, whole=steps is None)
    if steps is not None:
        for name in steps:
            page.gap()
            _print_step(own, page, name)
        return
    _print_picture(explanation, page)
    for title, names in story.outline(explanation).items():
        page.section(title)
        for position, name in enumerate(names):
            if position:
                page.gap()
            _print_step(own, page, name)
    page.section()
    more = story.by_products(explanation)
    if more:
        page.say(f"Not shown: {', '.join(more)}. See one with --step {more[-1]}.", FAINT)
    if 0 not in explanation.steps["output"].shape:
        cell = explanation.derive("output", (0,) * len(explanation.steps["output"].axes))
        page.say(f"See where a number comes from with --why, such as {_why_arguments(cell)}", FAINT)
    page.say(READING_NOTE)


def print_drawn(explanation: Trace, console: Console) -> None:
    """That numbers are random, above what is printed of an explanation without its steps."""
    page = Layout(console, None)
    for sentence in story.drawn(explanation):
        page.say(sentence)


def print_derivation(derivation: Derivation, console: Console, digits: int | None = None) -> None:
    """Why one cell has its value."""
    _print_derivation(Layout(console, digits), derivation, None)


def print_derivation_walk(
    derivation: Derivation, console: Console, digits: int | None = None, shared: int = 1
) -> None:
    """Why one cell has its value, and why the numbers that made it have theirs, to the start."""
    page = Layout(console, digits)
    stops = walk(derivation)
    for position, stop in enumerate(stops):
        if position:
            page.gap()
        _print_derivation(page, stop.derivation, stop.followed if len(stops) > 1 else None)
    if any(stop.derivation.shown_terms()[1] for stop in stops):
        page.gap()
        page.say("All terms of a sum: --json, or derivation.text(terms=None) in Python.", FAINT)
    if len(stops) > 1 and any(stop.followed is not None for stop in stops):
        page.gap()
        page.say(PATH_NOTE, FAINT)
        other = off_path(stops)
        if other is not None:
            page.say(f"To follow another one: --why {_why_arguments(other, shared)}", FAINT)


def print_statistics(explanation: Trace, console: Console, head: int | None = None) -> None:
    """Mean, variance and range of each step, what the scale does, how rows spread their weight."""
    page = Layout(console, None)
    statistics = questions.statistics(explanation)
    page.section("Statistics")
    all_heads = " over all heads" if (explanation.heads or 1) > 1 else ""
    page.say(f"Over all cells of a step{all_heads}; hidden cells do not count after masking.")
    page.gap()
    page.grid(
        tuple(statistics.steps),
        ("mean", "variance", "min", "max", "cells"),
        [
            [*(Cell(significant(number)) for number in astuple(one)[:-1]), Cell(str(one.cells))]
            for one in statistics.steps.values()
        ],
    )
    why = why_the_scale(explanation, statistics)
    if why:
        page.gap()
        page.say(why)
    _print_row_statistics(explanation, statistics.rows, page, head)


def print_mismatches(
    mismatches: Sequence[Mismatch], console: Console, digits: int | None = None
) -> None:
    """What was expected and what came out, each with the numbers that made it."""
    page = Layout(console, digits)
    for mismatch in mismatches[:MOST_MISMATCHES]:
        page.gap()
        allowed = mismatch.expectation.within
        allowed += mismatch.expectation.relative * abs(mismatch.expected)
        page.say(f"{safe_text(cell_name(mismatch.step, mismatch.labels), 200)} differs", STRONG)
        page.say(f"expected {exactly(mismatch.expected)}", indent=2)
        page.say(f"got      {exactly(mismatch.got)}", indent=2)
        apart = abs(mismatch.got - mismatch.expected)
        if np.isfinite(apart):
            page.say(
                f"apart    {significant(apart, 3)}, more than {significant(allowed, 3)}",
                indent=2,
            )
        if mismatch.derivation is not None:
            _print_derivation(page, mismatch.derivation, None)
    if len(mismatches) > MOST_MISMATCHES:
        page.gap()
        page.say(f"… {len(mismatches) - MOST_MISMATCHES} more differ")


def print_comparison(
    comparison: Comparison | None, console: Console, digits: int | None = None
) -> None:
    """The first step in which two explanations differ, with both derivations."""
    page = Layout(console, digits)
    if comparison is None:
        page.say("No step differs.")
        return
    cell = cell_name(comparison.step, comparison.labels)
    page.say(f"{safe_text(cell, 200)} is the first number that differs", STRONG)
    page.say(
        f"In {comparison.step} they are at most {significant(comparison.difference, 3)} apart."
    )
    for name, derivation in (("here", comparison.here), ("there", comparison.there)):
        page.gap()
        page.say(name, FAINT)
        _print_derivation(page, derivation, None)


# --- one step ------------------------------------------------------------------------------------


def _print_head_line(explanation: Trace, page: Layout, head: int | None, *, whole: bool) -> None:
    if explanation.title:
        page.say(safe_text(explanation.title, 200), STRONG)
    if whole and explanation.note:
        page.say(safe_text(explanation.note, 1000))
    for sentence in story.opening(explanation) if whole else story.drawn(explanation):
        page.say(sentence)
    heads = explanation.heads or 1
    if heads > 1:
        page.say(f"Head {head or 0} of {heads}, counted from 0; --head shows another.", STRONG)
    if explanation.batch_shape:
        first = ", ".join("0" for _ in explanation.batch_shape)
        shape = " × ".join(str(size) for size in explanation.batch_shape)
        page.say(f"Batch element {first} of {shape}.", STRONG)
    found = story.nonfinite(explanation) if whole else None
    if found:
        sentence, first_cell = found
        shared = heads // explanation.source.sizes.get("G", 1)
        page.say(f"{sentence} See why: --why {_why_arguments(first_cell, shared)}", ALARM)


def _print_picture(explanation: Trace, page: Layout) -> None:
    """The symbols of the steps where the page has their tables, if the lines are wide enough."""
    if "scores" not in explanation.steps:
        return  # a whole model has no picture yet
    page.gap()
    page.say("A number is made of the row left of it and the column above it:")
    for group in picture(explanation.source.steps.values()).wide:
        cells = {}
        for one in group:
            symbol = explanation.steps[one.step].symbol
            cells[one.row, one.column] = page.spelled(f"{symbol}ᵀ" if one.turned else symbol)
            if one.source:  # what lies between has a column of its own
                cells[one.row, one.column - 1] = page.spelled("→")
        rows, columns = ([*range(min(side), max(side) + 1)] for side in zip(*cells, strict=True))
        widths = [max(cell_len(cells.get((row, k), "")) for row in rows) for k in columns]
        if sum(widths) + 3 * len(widths) <= page.width:
            page.gap()
            for row in rows:
                texts = [cells.get((row, k), "") for k in columns]
                padded = [" " * (w - cell_len(t)) + t for t, w in zip(texts, widths, strict=True)]
                page.line(("  " + "   ".join(padded)).rstrip())


def _print_step(own: Head, page: Layout, name: str) -> None:
    step = own.explanation.steps[name]
    rows, columns = own.shape(name)
    number = "L" not in step.axes and not step.column_labels and columns == 1
    formula = "given" if step.given and step.name == step.symbol else step.formula
    heading = [(step.name, STRONG), (formula, None)]
    if not number:
        heading.append((_shape_words(step), FAINT))
    page.heading(heading)
    for sentence in sentences(own, name):
        page.say(sentence)
    if number:
        page.line(f"  {step.symbol} = {page.number(float(own.rows(step.name, [0])[0, 0]))}")
    elif rows and columns:
        page.gap()
        shown = shown_of(rows)
        table = own.table(name, [row for row in shown if row is not None])
        page.table(table, own.darkest(table), rows)


def _shape_words(step: ExplainedStep) -> str:
    """Such as "3 queries × 4 numbers"."""
    nouns = {"L": "tokens" if step.name.endswith("embeddings") else "queries", "S": "keys"}
    axes = [axis for axis in step.axes if axis not in ("H", "G")]
    sizes = step.shape[len(step.shape) - len(axes) :]
    words = []
    for axis, size in zip(axes, sizes, strict=True):
        noun = nouns.get(axis, "numbers" if axis == axes[-1] else "")
        noun = {"queries": "query", "keys": "key"}.get(noun, noun[:-1]) if size == 1 else noun
        words.append(f"{size} {noun}".strip())
    return " × ".join(words)


def _print_row_statistics(
    explanation: Trace, rows: RowStatistics, page: Layout, head: int | None
) -> None:
    step = explanation.steps["weights"]
    at: tuple[int, ...] = (0,) * len(explanation.batch_shape)
    if "H" in step.axes:
        at = (*at, head or 0)
    entropy, effective, largest, best = (
        np.atleast_1d(array[at])
        for array in (rows.entropy, rows.effective_keys, rows.largest_weight, rows.largest_key)
    )
    page.section(f"Weights by row{f', head {head or 0}' if (explanation.heads or 1) > 1 else ''}")
    page.say(EFFECTIVE_KEYS)
    page.gap()
    keys = step.column_labels
    shown = [row for row in shown_of(len(entropy)) if row is not None]
    cells, notes = [], []
    for row in shown:
        values = (entropy[row], effective[row], largest[row])
        cells.append([Cell(significant(float(value))) for value in values])
        notes.append(keys[int(best[row])] if best[row] >= 0 else "")
    page.grid(
        [step.row_labels[row] if step.row_labels else "" for row in shown],
        ("entropy", "effective keys", "largest weight"),
        cells,
        notes,
        notes_header="its key",
        left_out=len(entropy) - len(shown),
    )
    if len(entropy) > len(shown):
        page.say(
            f"All {len(entropy)} rows: --statistics --json, or explanation.statistics().rows in "
            "Python.",
            FAINT,
            indent=2,
        )


# --- one derivation ------------------------------------------------------------------------------


def _print_derivation(page: Layout, derivation: Derivation, followed: int | None) -> None:
    page.heading([(derivation.step, STRONG), (derivation.declared.formula, None)])
    name = safe_text(derivation.name, 200)
    value = page.number(derivation.value)
    body = derivation.body(page.digits)
    sides = [*body.sides, value]
    page.equation(name, [side for side, _ in groupby(sides)])  # ln z = 2.4 = 2.4 says it twice
    if derivation.terms:
        _print_terms(page, derivation, followed)
    elif not body.sides:
        for line in body.lines:
            page.say(line, indent=4)
    for remark in body.remarks:
        page.say(remark, FAINT, indent=4)


def _print_terms(page: Layout, derivation: Derivation, followed: int | None) -> None:
    """One line per term, aligned, and their sum or the largest below."""
    terms = derivation.terms
    shown, rest = derivation.shown_terms()
    names = [("▸" if k == followed else "", terms[k].label) for k in shown]
    ends = [(rest.label, page.number(rest.value))] if rest else []
    ends.append((OPERATIONS[derivation.op].total, page.number(derivation.value)))
    values = [page.number(terms[k].value) for k in shown]
    if OPERATIONS[derivation.op].term:
        texts = [derivation.term_text(terms[k], page.digits) for k in shown]
        page.terms(names, [("", texts), ("", values)], ends, ("  ", " = "))
        return
    columns = []
    for place, number in enumerate(terms[0].operands):
        operands = [derivation.operands[terms[k].operands[place]] for k in shown]
        columns.append(
            (derivation.operands[number].symbol, [page.number(one.value) for one in operands])
        )
    if len(columns) > 1:
        product = "·".join(symbol for symbol, _ in columns)
        columns.append((product, values))
    page.terms(names, columns, ends)


def _why_arguments(derivation: Derivation, shared: int = 1) -> str:
    """What to type after --why to ask for a cell: labels, or positions of those hard to type.

    So many query heads share a key head; --head names one of them.
    """
    words, head = [derivation.step], 0
    labels = iter(derivation.labels[::-1])
    places = list(zip(derivation.declared.axes, derivation.index, strict=True))
    for axis, position in places[::-1]:
        if axis in ("H", "G"):
            head = position * (shared if axis == "G" else 1)
        else:
            label = next(labels)
            plain = label == safe_text(label, 60) and not label.startswith("-")
            words.insert(1, shlex.quote(label if plain else str(position)))
    return " ".join([*words, *([f"--head {head}"] if head else [])])

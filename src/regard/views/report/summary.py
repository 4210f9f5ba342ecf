"""The statistics of a head, and whether the problem's expectations come out.

Owns what a reader without JavaScript sees of these; `figures.js` and `summary.js` say the same of
what a reader changed. Must not know HTML, nor how a statistic is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard.errors import LabelError, OptionError, ShapeError, safe_text
from regard.explanation import questions
from regard.explanation.notation import exactly, format_number
from regard.explanation.questions import Mismatch, StepStatistics
from regard.explanation.trace import Trace
from regard.views.head_view import Head
from regard.views.report.tables import Printed, figures, is_printed
from regard.views.step_words import why_the_scale

if TYPE_CHECKING:
    from regard.problems.parts import Expectation

OF_STEPS = ("mean", "variance", "min", "max", "cells")
OF_ROWS = ("entropy", "effective keys", "largest weight")
MOST_SCORES = 2**20  # of a head that has statistics
EXCERPT = 8  # rows of weights, where there are too many to be printed
MOST_MISSED = 5  # numbers listed for one expectation that does not come out
NAME_LENGTH = 80
# What adding up many numbers may leave of them where the sum is 0.
NOISE = 2.0**-45


@dataclass(frozen=True)
class Summary:
    """The statistics of one head."""

    steps: Printed
    rows: Printed
    rows_left: int
    words: str


@dataclass(frozen=True)
class Check:
    """One expectation: the sentence for when it comes out, and each number that did not."""

    expected: Expectation
    right: str
    wrong: tuple[str, ...]
    fits: bool  # whether there is such a step, of that shape


def summary(head: Head, digits: int) -> Summary | None:
    """Statistics of each step of a head and of its rows of weights; None where that takes long."""
    explanation = head.explanation
    if not countable(explanation):
        return None
    found = questions.statistics(explanation, head.number, head.batch)
    weights = explanation.steps["weights"]
    keys = found.rows.largest_key.reshape(-1)
    shown = len(keys) if is_printed((len(keys), 1)) else EXCERPT
    rows = np.column_stack(
        [found.rows.entropy.flat, found.rows.effective_keys.flat, found.rows.largest_weight.flat]
    )
    names = explanation.names.along("S")
    steps = [_without_noise(one) for one in found.steps.values()]
    best = tuple(names[key] if key >= 0 else "" for key in keys[:shown].tolist())
    labels = weights.row_labels[:shown]
    return Summary(
        figures(OF_STEPS, tuple(found.steps), steps, digits),
        figures(OF_ROWS, labels, rows[:shown].tolist(), digits, best, "its key"),
        len(keys) - shown,
        scale_words(explanation),
    )


def _without_noise(one: StepStatistics) -> list[float]:
    """The statistics of a step; a mean or a variance that is only rounding is shown as 0."""
    noise = max(abs(one.minimum), abs(one.maximum)) * NOISE
    mean = 0.0 if abs(one.mean) < noise else one.mean
    variance = 0.0 if one.variance < noise * noise else one.variance
    return [mean, variance, one.minimum, one.maximum, float(one.cells)]


def countable(explanation: Trace) -> bool:
    """Whether a head is small enough to have statistics on a page."""
    return explanation.source.sizes.get("L", 1) * explanation.source.sizes["S"] <= MOST_SCORES


def scale_words(explanation: Trace) -> str:
    """What the scale does to the variance of the scores, where there is one head to say it of."""
    several = explanation.batch_shape or (explanation.heads or 1) > 1
    if several or not countable(explanation) or explanation.mechanism != ("dot", "softmax"):
        return ""
    only = ("scores", "scaled", "weights")
    return why_the_scale(explanation, questions.statistics(explanation, only=only))


# --- what should come out ------------------------------------------------------------------------


def checks(explanation: Trace) -> tuple[Check, ...]:
    """Every expectation of the problem beside what came out."""
    expected = explanation.problem.expect if explanation.problem else ()
    return tuple(_check(explanation, one) for one in expected)


def said(count: int, wrong: int) -> str:
    """How many expectations came out."""
    if wrong:
        return f"{wrong} of {count} {'differs' if wrong == 1 else 'differ'}"
    return "it comes out" if count == 1 else f"all {count} come out"


def _check(explanation: Trace, one: Expectation) -> Check:
    try:
        missed = questions.check(explanation, one)
        right = f"{_expected(explanation, one)}, {_tolerance(one)}"
    except (LabelError, ShapeError, OptionError) as error:
        return Check(one, "", (safe_text(f"{one.step} cannot be checked: {error}", 300),), False)
    wrong = [
        f"{_what(mismatch)}: {_exactly(mismatch.expected)} is expected, {_exactly(mismatch.got)} "
        "comes out"
        for mismatch in missed[:MOST_MISSED]
    ]
    if len(missed) > MOST_MISSED:
        wrong.append(f"{one.step}: {len(missed) - MOST_MISSED} more differ")
    return Check(one, right, tuple(wrong), True)


def _expected(explanation: Trace, one: Expectation) -> str:
    """What is expected: the number, or how many numbers they are."""
    if one.value is None:
        assert one.variance is not None
        return f"variance of {one.step} = {_exactly(one.variance)}"
    if np.ndim(one.value):
        return f"{one.step}: {np.size(one.value)} numbers"
    number = _exactly(float(np.asarray(one.value)))
    if one.at is None:
        return f"{one.step} = {number}"
    return f"{_short(questions.stated_cell(explanation, one).name)} = {number}"


def _tolerance(one: Expectation) -> str:
    own = [format_number(one.within, 1)] if one.within else []
    if one.relative:
        own.append(f"{format_number(one.relative, 1)} of it")
    return f"to within {' and '.join(own)}" if own else "exactly"


def _what(mismatch: Mismatch) -> str:
    if mismatch.derivation is None:
        return f"variance of {mismatch.step}"
    return _short(mismatch.derivation.name)


def _short(name: str) -> str:
    return safe_text(name, NAME_LENGTH)


def _exactly(value: float) -> str:
    return exactly(value).removesuffix(".0")

"""What several calls show together: equal calls that differ, what is mixed, what is rounded.

Owns the names of mistakes that replace no step of the textbook. Must not know any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.asking import Answer, Ask
from regard.diagnosis.given import Given
from regard.diagnosis.probe import UNITS
from regard.diagnosis.survey import WORDS
from regard.diagnosis.task import Task, task_of

NEAR = 1e-5  # what the order of sums may change
JUMP = 0.25  # of an error, which otherwise changes by a hundredth
# The numbers whose exponentials are neither 0 nor infinite, in float64, float32 and float16.
RANGES = ((-745.1, 709.8), (-103.9, 88.7), (-17.3, 11.1))
EDGE = 5.0  # of a range, where the sum of a row tells as well
DIFFERS = "two equal calls give different results"


def differs(first: Answer, again: Sequence[Answer]) -> bool:
    """Whether the same problem has got other results: something is drawn, or kept."""
    return not all(_same(first, one) for one in again)


def kept(first: Answer, again: Sequence[Answer]) -> str:
    """The mistake where only calls in between have made a difference, or ""."""
    return "state_kept" if _same(first, again[0]) else ""


def _same(one: Answer, other: Answer) -> bool:
    if one.arrays.keys() != other.arrays.keys():
        return False
    both = [(own, other.arrays[name]) for name, own in one.arrays.items()]
    return all(np.array_equal(*pair, equal_nan=True) for pair in both)


def changed(answers: Sequence[Answer]) -> str:
    """That a function changes arrays that it is given, or ""."""
    names = dict.fromkeys(name for answer in answers for name in answer.changed)
    return f"it changes the arrays that it is given: {', '.join(names)}" if names else ""


def shown_by_calls(ask: Ask, wrong: Sequence[Task]) -> str:
    """The mistake that more calls show on problems with a wrong result, or ""."""
    if not wrong:
        return ""
    several = next((one for one in wrong if one.given.sizes.batch > 1), wrong[0])
    return mixed(ask, several.given) or rounded(ask, wrong[0])


def rounded(ask: Ask, task: Task) -> str:
    """The mistake where numbers are rounded to few digits, or "".

    An error of rounding is another one where all numbers are a little larger; any other error is
    almost the same.
    """
    larger = replace(task.given, moved="all")
    tasks = task, task_of(larger, task.reads, task.reading, task.wanted)
    errors = []
    for one in tasks:
        arrays = ask(one.given).arrays
        if any(arrays.get(x, np.zeros(0)).shape != own.shape for x, own in one.expected.items()):
            return ""
        parts = [np.ravel(arrays[name] - own) for name, own in one.expected.items()]
        errors.append(np.concatenate(parts))
    (before, after), most = errors, task.tolerance(UNITS["bfloat16"])
    size = float(np.abs(before).max(initial=0))
    jumps = float(np.abs(after - before).max(initial=0)) > JUMP * size
    return "computed_in_half_precision" if jumps and size <= most else ""


def overflows(task: Task, answer: Answer) -> str:
    """The mistake where those rows are lost whose exponentials leave their range, or ""."""
    output, tops = answer.arrays.get("output"), task.values.get("row_maximum")
    if output is None or tops is None or output.shape != task.expected["output"].shape:
        return ""
    lost = np.asarray(~np.isfinite(output).all(-1))
    for lowest, highest in RANGES:
        clear: Array = (np.abs(tops - lowest) > EDGE) & (np.abs(tops - highest) > EDGE)
        leaves: Array = (tops < lowest) | (tops > highest)
        if output.ndim == 3:
            clear, leaves = np.asarray(clear.all(1)), np.asarray(leaves.any(1))
        if leaves.any() and np.array_equal(lost[clear], leaves[clear]):
            return "no_maximum_subtracted"
    return ""


def mixed(ask: Ask, given: Given) -> str:
    """The mistake where other numbers in one text or head change the result of another, or ""."""
    before = ask(given).arrays.get("output")
    if before is None or before.shape != given.result_shape:
        return ""
    several = {"texts": len(before) > 1, "heads": before.ndim == 4 and given.sizes.key_heads > 1}
    moves: tuple[tuple[Literal["texts", "heads"], str], ...] = (
        ("texts", "batch_elements_mixed"),
        ("heads", "heads_mixed"),
    )
    for moved, name in moves:
        after = ask(replace(given, moved=moved)).arrays.get("output") if several[moved] else None
        if after is not None and after.shape == before.shape:
            last = (-1,) if moved == "texts" else (slice(None), -1)
            if not np.allclose(after[last], before[last], NEAR, NEAR, equal_nan=True):
                return name
    return ""


# What a problem may have that others have not.
_SIZES: Mapping[str, Callable[[Given], bool]] = {
    "several texts": lambda given: given.shape[0] > 1,
    "several heads": lambda given: given.shape[1] > 1,
    "fewer key heads than heads": lambda given: given.sizes.key_heads < given.sizes.heads,
    "more keys than queries": lambda given: given.shape[3] > given.shape[2],
    "values of another width": lambda given: given.sizes.value_width != given.sizes.width,
}


def _has(given: Given) -> set[str]:
    sized = {words for words, has in _SIZES.items() if has(given)}
    return sized | {words for name, words in WORDS.items() if name in given.asks}


def only_with(wrong: Sequence[Task], every: Sequence[Task]) -> str:
    """What the problems with a wrong result have and no other has, or ""."""
    right = [one for one in every if not any(one is other for other in wrong)]
    if not wrong or not right:
        return ""
    shared = set.intersection(*(_has(one.given) for one in wrong))
    shared -= {words for one in right for words in _has(one.given)}
    return next((words for words in (*_SIZES, *WORDS.values()) if words in shared), "")

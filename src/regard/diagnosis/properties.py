"""What several calls show together: equal calls that differ, what is mixed, where it is wrong.

Must not know the textbook, nor any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from regard.diagnosis.call.asking import Answer, Ask
from regard.diagnosis.given import Given
from regard.diagnosis.survey import WORDS
from regard.diagnosis.task import Task

NEAR = 1e-5  # what the order of sums may change
DIFFERS = "two equal calls give different results"


def differs(first: Answer, again: Sequence[Answer]) -> bool:
    """Whether the same problem has got other results: something is drawn, or kept."""
    return not all(_same(first, one) for one in again)


def _same(one: Answer, other: Answer) -> bool:
    if one.arrays.keys() != other.arrays.keys():
        return False
    both = [(own, other.arrays[name]) for name, own in one.arrays.items()]
    return all(np.array_equal(*pair, equal_nan=True) for pair in both)


def changed(answers: Sequence[Answer]) -> str:
    """That a function changes arrays that it is given, or ""."""
    names = dict.fromkeys(name for answer in answers for name in answer.changed)
    return f"it changes the arrays that it is given: {', '.join(names)}" if names else ""


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

"""Whether a function is right: it is asked many problems, and its answers are compared.

Owns the readings of what values cannot tell, and that right is equality on every problem. Must not
know how a function is called, nor any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.call.asking import Answer, Ask
from regard.diagnosis.given import Given
from regard.diagnosis.probe import SMALLEST_HALF, UNITS
from regard.diagnosis.properties import DIFFERS, changed, differs, kept, overflows
from regard.diagnosis.result import Assumption, DiagnosisVerdict, NotAsked
from regard.diagnosis.statements import Stated
from regard.diagnosis.survey import LARGE, Survey, always_refused, survey
from regard.diagnosis.task import AROUND, Reading, Task, task_of

CLEAR = 1e-3  # times the largest error is one of rounding
SIMPLEST = 3  # of the problems tell which readings are likely


@dataclass(frozen=True, eq=False)
class Judgement:
    """The verdict on one function with one adapter, and under which assumptions it holds."""

    verdict: DiagnosisVerdict
    why: str
    adapter: Adapter
    assumptions: tuple[Assumption, ...] = ()
    asked: tuple[str, ...] = ()
    not_asked: tuple[NotAsked, ...] = ()
    exact_to: str = ""  # the dtype whose digits it has
    reading: Reading = field(default_factory=Reading)
    task: Task | None = None  # the first, and simplest, that shows a difference
    answer: Answer | None = None
    wrong: tuple[Task, ...] = ()
    tasks: tuple[Task, ...] = ()  # all that were compared
    otherwise: tuple[Assumption, ...] = ()  # under which it would be right
    compared: tuple[str, ...] = ()  # what it returns, by names
    observed: str = ""  # a mistake that the calls show
    printed: str = ""
    calls: int = 0
    distance: float = 0.0  # how many of the problems are wrong, and how much of them
    # What else may be meant by one that is wrong either way, and the verdict on each.
    rivals: tuple[Reading, ...] = ()
    again: Callable[[Reading], Judgement] | None = None

    def read_as(self, number: int) -> Judgement:
        """The verdict under a rival reading; 0 is this one."""
        if not number or self.again is None:
            return self
        reading = self.rivals[number - 1]
        found, name = self.again(reading), "alibi" if reading.alibi else "rotary"
        told = Assumption(name, _said(name, getattr(reading, name)), "its values")
        assumptions = (*(one for one in found.assumptions if one.name != name), told)
        return replace(found, calls=self.calls, rivals=(), assumptions=assumptions)


def judge_best(
    groups: Iterable[Sequence[Adapter]], ask: Callable[[Adapter], Ask], stated: Stated
) -> Judgement | None:
    """The verdict with the first adapter under which a function is right, or nearest to that.

    What the adapters of a group assume apart from one another is said.
    """
    nearest: tuple[tuple[float, float], Adapter, Sequence[Adapter]] | None = None
    calls = 0
    for group in groups:
        if not group[0].text:  # the user's own is the only one
            return judge(ask(group[0]), group[0], stated)
        for adapter in group:
            own = ask(adapter)
            simple = survey(own, adapter, stated, SIMPLEST)
            calls += simple.calls
            off = _distance(simple, stated), float("inf")
            if not off[0]:
                found = judge(own, adapter, stated)
                calls += found.calls
                off = 0.0, found.distance
                if found.verdict in ("right", "fragile"):
                    return _open(replace(found, calls=calls), group)
            if nearest is None or off < nearest[0]:
                nearest = off, adapter, group
    if nearest is None:
        return None
    _, adapter, group = nearest
    found = judge(ask(adapter), adapter, stated)
    return _open(replace(found, calls=calls + found.calls), group)


def _open(found: Judgement, group: Sequence[Adapter]) -> Judgement:
    """Without what every adapter that ran assumes: shapes have told that."""
    every = [one.assumes for one in group]
    shared = {one for one in found.adapter.assumes if all(one in own for own in every)}
    told = (
        one
        for one in found.assumptions
        if one not in shared or one.source != "tried" or one.name == "layout"
    )
    own = found.again
    again = own and (lambda reading: _open(own(reading), group))
    return replace(found, assumptions=tuple(told), again=again)


def _distance(found: Survey, stated: Stated) -> float:
    """How far the answers are from right ones, under the reading that is nearest to the first."""
    if not found.answers:
        return float("inf")
    table = _Table(found.answers)
    readings = _readings(_axes(found.fields, stated))
    least = min(table.distance(one, 1) for one in readings)
    return min(sum(table.distance(one)) for one in readings if table.distance(one, 1) == least)


def judge(ask: Ask, adapter: Adapter, stated: Stated) -> Judgement:
    """The verdict on what a function answers with one adapter."""
    found = survey(ask, adapter, stated)
    if not adapter.text:  # it is the user's own
        stated.check_adapter(found.fields)
    if not found.answers:
        why = found.refused[0].why if found.refused else "it was not called"
        return Judgement("not_callable", why, adapter, not_asked=found.refused, calls=found.calls)
    return _judged(found, stated)


def _judged(found: Survey, stated: Stated, meant: Reading | None = None) -> Judgement:
    ordinary = [one for one in found.answers if one[0].name != LARGE]
    axes = _axes(found.fields, stated)
    coarsest = max((answer for _, answer in ordinary), key=_unit)
    table, exact_to = _Table(ordinary), coarsest.dtype
    readings = [one for one in _readings(axes) if meant is None or _turns(one) == _turns(meant)]
    best = table.best(readings)
    if table.distance(best)[0]:
        coarse = _Table(ordinary, UNITS["float32"])
        close = coarse.best(readings)
        if not coarse.distance(close)[0]:
            table, best, exact_to = coarse, close, "float32"
    assumed = _assumed(table, best, axes, stated, found.fields)
    unasked = (NotAsked(one, "its default") for one in found.adapter.unasked)
    own = Judgement(
        "right",
        "",
        found.adapter,
        (*found.adapter.assumes, *assumed),
        tuple(given.name for given, _ in found.answers),
        (*found.refused, *unasked),
        exact_to,
        best,
        tasks=tuple(task for task, *_ in table.of(best)),
        compared=(*ordinary[0][1].arrays,),
        printed=next((answer.printed for _, answer in ordinary if answer.printed), ""),
        calls=found.calls,
    )
    if differs(ordinary[0][1], found.again):
        first, _, answer = table.of(best)[0]
        once = replace(own, verdict="wrong", why=DIFFERS, task=first, answer=answer)
        once = replace(once, observed=kept(ordinary[0][1], found.again))
        return replace(once, distance=sum(table.distance(best)) + 1)
    if table.distance(best)[0]:
        wrong = _wrong(own, table, _otherwise(ordinary, best, found.fields, stated))
        others = [replace(best, rotary=one) for one in axes["rotary"]]
        others += [replace(best, rotary="", alibi=one) for one in axes["alibi"]]
        moved = [one for one in others if one != best and not (best.rotary or best.alibi)]
        return replace(wrong, rivals=(*moved,), again=partial(_judged, found, stated))
    if found.stopped:
        return replace(own, verdict="unknown", why=f"stopped: {found.stopped}")
    if stuck := always_refused(found):
        return replace(own, verdict="unknown", why=f"{stuck.name}: {stuck.why}")
    return _fragile(own, found, table.unit)


def _wrong(own: Judgement, table: _Table, otherwise: tuple[Assumption, ...]) -> Judgement:
    compared = table.of(own.reading)
    wrong = [(task, answer) for task, off, answer in compared if off]
    errors = {task.name: _error(task, answer) for task, answer in wrong}
    clear = CLEAR * max(errors.values())
    wrong.sort(key=lambda one: (not _fits(*one), errors[one[0].name] < clear))
    return replace(
        own,
        verdict="wrong",
        why=f"{len(wrong)} of {len(compared)} problems have another result",
        task=wrong[0][0],
        answer=wrong[0][1],
        wrong=tuple(task for task, _ in wrong),
        otherwise=otherwise,
        distance=sum(table.distance(own.reading)),
    )


def _error(task: Task, answer: Answer) -> float:
    """The largest difference, 1 at most, of an answer that has the right shape."""
    if not _fits(task, answer):
        return 0.0
    apart = (np.abs(answer.arrays[name] - one) for name, one in task.expected.items())
    return min(1.0, max(float(np.nan_to_num(one, nan=1.0).max(initial=0)) for one in apart))


def _fits(task: Task, answer: Answer) -> bool:
    """Whether an answer has the right shape, so that its values can be looked for."""
    return all(answer.arrays[name].shape == one.shape for name, one in task.expected.items())


def _fragile(own: Judgement, found: Survey, unit: float) -> Judgement:
    """The same, or fragile: of few digits, wrong with large scores, or with arrays it changes."""
    if UNITS.get(own.exact_to, 0.0) > SMALLEST_HALF:
        why = f"its results have only the digits of {own.exact_to}"
        return replace(own, verdict="fragile", why=why, observed="computed_in_half_precision")
    large = _Table([one for one in found.answers if one[0].name == LARGE], unit).of(own.reading)
    if large and large[0][1]:
        task, _, answer = large[0]
        why = f"wrong with {LARGE}"
        name = overflows(task, answer)
        return replace(own, verdict="fragile", why=why, task=task, answer=answer, observed=name)
    why = changed([answer for _, answer in found.answers])
    if why:
        return replace(own, verdict="fragile", why=why, observed="argument_changed")
    return own


# --- readings -------------------------------------------------------------------------------------


def _axes(fields: frozenset[str], stated: Stated) -> dict[str, tuple[Any, ...]]:
    """What each part of a reading may be, the usual first; one value where it is known."""
    free = stated.causal is None and "causal" not in fields
    ends: tuple[str, ...] = ("end", "start")
    if isinstance(stated.causal, str):
        ends = (stated.causal,)
    elif fields & {"offset", "past"}:
        ends = ("end",)
    turned: tuple[str, ...] = ("", "halves", "pairs")
    if "rotary" in fields:
        turned = turned[1:]
    elif "positions" in fields:
        turned = ("halves", "pairs", "")
    plain = stated.mechanism is None  # positions belong to dot products
    return {
        "causal": (False, True) if free else (bool(stated.causal),),
        "aligned": ends,
        "scale": (stated.factor,),
        "rotary": turned if plain else ("",),
        "alibi": (False, True) if plain and "rotary" not in fields else (False,),
        "one_mask": (False, True) if "mask" in fields else (False,),
        "around": AROUND if {"embeddings", "W_q"} <= fields else AROUND[:1],
    }


def _readings(axes: Mapping[str, tuple[Any, ...]]) -> list[Reading]:
    """Every reading, those that depart least from the usual first."""
    found = [Reading(**dict(zip(axes, own, strict=True))) for own in product(*axes.values())]
    found = [
        one for one in found if (bool(one.rotary), one.alibi, bool(one.around)).count(True) < 2
    ]
    usual = {name: values[0] for name, values in axes.items()}
    return sorted(found, key=lambda one: sum(getattr(one, n) != x for n, x in usual.items()))


def _turns(reading: Reading) -> tuple[str, bool]:
    return reading.rotary, reading.alibi


# What nobody expects: where it is not so, it is not said.
_TRIED = ("rotary", "alibi", "one_mask", "around")
_SOURCES = {
    "scale": "Vaswani et al. 2017",
    "causal": "unstated",
    "aligned": "unstated",
    "rotary": "tried",
    "alibi": "tried",
    "one_mask": "tried",
    "around": "tried",
}


def _said(name: str, value: Any) -> str:
    """One part of a reading in words."""
    words: dict[tuple[str, Any], str] = {
        ("causal", True): "causal attention is meant",
        ("causal", False): "full attention is meant, not causal",
        ("aligned", "end"): "the last query belongs to the last key",
        ("aligned", "start"): "the first query belongs to the first key",
        ("rotary", ""): "no rotary positions are meant",
        ("rotary", "halves"): "rotary positions are meant, in halves",
        ("rotary", "pairs"): "rotary positions are meant, in neighbouring pairs",
        ("alibi", True): "ALiBi is meant",
        ("one_mask", True): "one mask is for all texts",
        ("around", "adds"): "its input is meant to be added to the result",
        ("around", "norm, adds"): "its input is meant to be normalised first, and added at the end",
        ("around", "adds, norm"): "its input is meant to be added, and the sum normalised",
        ("scale", None): "scores are meant to be divided by √D",
    }
    return words.get((name, value), f"scores are meant to be multiplied by {value}")


def _assumed(
    table: _Table,
    best: Reading,
    axes: Mapping[str, tuple[Any, ...]],
    stated: Stated,
    fields: frozenset[str],
) -> Iterator[Assumption]:
    """What nobody stated, and without which other problems would be wrong."""
    for name, values in axes.items():
        own = getattr(best, name)
        others = [one for one in values if one != own]
        usual = name in _TRIED and not own
        least = table.distance(best)[0]
        others = [replace(best, **{name: one}) for one in others]
        if others and not usual and any(table.distance(one)[0] > least for one in others):
            yield Assumption(name, _said(name, own), _SOURCES[name])
    dots = stated.mechanism is None or stated.mechanism.score is None
    if stated.scale is None and "scale" not in fields and dots:
        yield Assumption("scale", _said("scale", None), _SOURCES["scale"])


def _otherwise(
    answers: Sequence[tuple[Given, Answer]],
    best: Reading,
    fields: frozenset[str],
    stated: Stated,
) -> tuple[Assumption, ...]:
    """What might be stated so that the function is right."""
    dots = stated.mechanism is None or stated.mechanism.score is None
    if "scale" in fields or stated.scale is not None or not dots:
        return ()
    unscaled = _Table(answers).distance(replace(best, scale=1.0))
    return () if unscaled[0] else (Assumption("scale", _said("scale", 1), "tried"),)


# --- comparing ------------------------------------------------------------------------------------

Compared = tuple[Task, float, Answer]  # how much of the answer is wrong


class _Table:
    """How much of each answer is wrong under each reading; nothing is compared twice."""

    def __init__(self, answers: Sequence[tuple[Given, Answer]], unit: float = 0.0) -> None:
        self._answers, self.unit = answers, unit
        self._known: dict[tuple[int, Reading], Compared] = {}

    def of(self, reading: Reading) -> list[Compared]:
        """Every answer under one reading."""
        return [self._compared(number, reading) for number in range(len(self._answers))]

    def distance(self, reading: Reading, most: int | None = None) -> tuple[int, float]:
        """How many answers are wrong, and how much of them: of all, or of the first ones."""
        off = [self._compared(one, reading)[1] for one in range(len(self._answers))[:most]]
        return sum(map(bool, off)), sum(off) / max(1, len(off))

    def best(self, readings: Sequence[Reading]) -> Reading:
        """The first reading under which nothing is wrong, or that under which least is.

        The first problems are the simplest: where these are wrong, the others tell nothing more.
        """
        nearest = min(readings, key=lambda one: self.distance(one, SIMPLEST))
        least = self.distance(nearest, SIMPLEST)
        if least[0]:
            return nearest
        return min(
            (one for one in readings if self.distance(one, SIMPLEST) == least), key=self.distance
        )

    def _compared(self, number: int, reading: Reading) -> Compared:
        given, answer = self._answers[number]
        *_, rows, keys = given.shape
        masks = "mask" in given.asks and given.sizes.batch > 1
        reading = _as_it_counts(reading, aligned=rows != keys, masks=masks)
        place = number, reading
        if place not in self._known:
            task = task_of(given, answer.reads, reading, _wanted(answer))
            off = how_wrong(task, answer, max(self.unit, _unit(answer)))
            self._known[place] = task, off, answer
        return self._known[place]


@lru_cache(maxsize=1024)
def _as_it_counts(reading: Reading, *, aligned: bool, masks: bool) -> Reading:
    """A reading without what makes no difference: nothing is aligned, or texts have no masks."""
    end = reading.aligned if aligned else "end"
    return replace(reading, aligned=end, one_mask=reading.one_mask and masks)


def _unit(answer: Answer) -> float:
    return UNITS.get(answer.dtype, UNITS["float64"])


def _wanted(answer: Answer) -> tuple[str, ...]:
    return tuple(name for name in answer.arrays if name != "output")


def how_wrong(task: Task, answer: Answer, unit: float) -> float:
    """How much of an answer is not what it should be, from 0 to 1."""
    off, count = 0, 0
    for name, right in task.expected.items():
        own = answer.arrays[name]
        if own.shape != right.shape:
            return 1.0
        differ = _differ(own, right, task.tolerance(unit))
        if name == "output":
            rows = task.compared if right.ndim == 3 else task.compared[:, None]
            differ = differ & rows[..., None]
        off, count = off + int(differ.sum()), count + differ.size
    return off / max(1, count)


def _differ(own: Array, right: Array, tolerance: float) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(~(np.abs(own - right) <= tolerance))

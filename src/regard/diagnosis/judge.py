"""Whether a function is right: it is asked many problems, and its answers are compared.

Owns which problems are asked, the readings of what values cannot tell, and that right is equality
on every problem. Must not know how a function is called, nor any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import Adapter, Assumption
from regard.diagnosis.call.asking import Answer, Ask, unfit
from regard.diagnosis.calls.probe import UNITS
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import AROUND, Given, Reading, Sizes, Task

Verdict = Literal["right", "fragile", "wrong", "unknown", "not_callable"]
MOST_CALLS = 150  # of one function with one adapter
LARGE = "large scores"
SIMPLEST = 3  # of the problems tell which readings are likely


@dataclass(frozen=True)
class NotAsked:
    """Something that a verdict says nothing of, and why."""

    name: str
    why: str


@dataclass(frozen=True, eq=False)
class Survey:
    """All answers of a function with one adapter, and what it refused."""

    adapter: Adapter
    fields: frozenset[str]  # that were read in any call
    answers: tuple[tuple[Given, Answer], ...] = ()
    refused: tuple[NotAsked, ...] = ()
    calls: int = 0
    again: Answer | None = None  # of the first problem, asked once more
    stopped: str = ""  # which limit ended it


@dataclass(frozen=True, eq=False)
class Judgement:
    """The verdict on one function with one adapter, and under which assumptions it holds."""

    verdict: Verdict
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
    otherwise: tuple[Assumption, ...] = ()  # under which it would be right
    calls: int = 0
    distance: float = 0.0  # how many of the problems are wrong, and how much of them


def not_judged(why: str) -> Judgement:
    """The verdict on a function that ended its process, or was ended."""

    def call(function: Any, t: Any) -> Any:
        raise NotImplementedError(why)

    return Judgement("not_callable", f"stopped: {why}", Adapter(call))


# --- what is asked --------------------------------------------------------------------------------


def survey(ask: Ask, adapter: Adapter, stated: Stated, most: int | None = None) -> Survey:
    """Ask for sizes that the function takes, then for all that its adapter reads, or the most."""
    calls, fields = 0, frozenset[str]()
    tried: dict[str, str] = {}

    def put(given: Given) -> tuple[Given, Answer]:
        """Ask until no field is read that was not known to be."""
        nonlocal calls, fields
        while True:
            given = replace(given, fields=fields)
            answer = ask(given)
            calls += 1
            new = answer.reads - fields
            fields |= new
            if not new or answer.ended:
                return given, answer

    heads = stated.heads or adapter.heads
    for sizes in _ladder(heads, adapter.model):
        given, answer = put(Given(f"{sizes.queries} tokens", sizes))
        problem = unfit(given, answer)
        if not problem:
            break
        tried.setdefault(_in_words(sizes), problem)
        if answer.ended:
            break
    if problem:
        refused = [NotAsked(*one) for one in tried.items()]
        return Survey(adapter, fields, refused=tuple(refused), calls=calls)
    first, stopped = given, ""
    answers = [(given, answer)]
    refused = [NotAsked(name, why) for name, why in tried.items() if name != _in_words(sizes)]
    for given in islice(_variations(first, refused, bool(heads)), most and most - 1):
        if calls >= MOST_CALLS:
            refused.append(NotAsked(given.name, f"{MOST_CALLS} calls were made"))
            break
        given, answer = put(given)
        if answer.problem or _is_part(given, answer):
            refused.append(NotAsked(given.name, unfit(given, answer)))
        else:
            answers.append((given, answer))
        if answer.ended and stopped:
            break
        stopped = answer.problem if answer.ended else stopped
    else:
        stopped = ""  # once is no reason to end
    again = None if stopped else ask(answers[0][0])
    return Survey(adapter, fields, tuple(answers), tuple(refused), calls + 1, again, stopped)


def _ladder(heads: int | None, model: int | None) -> Iterator[Sizes]:
    """Sizes of the first problem, until some are taken; an object has some already."""
    if model:
        width = model // (heads or 1)
        for batch, rows in ((2, 5), (1, 5), (2, 8), (2, 16)):
            yield Sizes(batch, heads or 1, heads or 1, rows, rows, width, width, model)
        return
    for rows, width in ((5, 6), (8, 8), (16, 8)):
        for batch in (2, 1):
            usual = [many for many in (4, 3, 1, 2, 8) if many != rows]
            for many in usual if heads is None else (heads,):
                about: dict[str, Any] = dict(queries=rows, keys=rows, width=width)
                yield Sizes(batch, many, many, value_width=width, **about)


def _in_words(own: Sizes) -> str:
    several = [word for word, many in (("texts", own.batch), ("heads", own.heads)) if many > 1]
    return f"{own.queries} tokens" + f", several {' and '.join(several)}" * bool(several)


def _is_part(given: Given, answer: Answer) -> bool:
    """Whether it answered one text or head of several, or mixed up heads that share their keys."""
    own = given.sizes
    texts, heads = {1, own.batch}, {1, own.heads, own.key_heads}
    for name, array in answer.arrays.items():
        shape = given.result_shape if name == "output" else given.array(name).shape
        if array.ndim != len(shape):
            return False
        allowed = [{size} for size in shape]
        if len(shape) > 2:
            allowed[0] |= texts
        if len(shape) == 4:
            allowed[1] |= heads
        if not all(size in some for size, some in zip(array.shape, allowed, strict=True)):
            return False
    return bool(unfit(given, answer))


def _variations(first: Given, refused: Sequence[NotAsked], fixed: bool) -> Iterator[Given]:
    """The other problems: each size another one, then each field that is read not neutral.

    What was `refused` meanwhile is not asked with another thing. The number of heads may be fixed.
    """
    sized = _other_sizes(first)
    if fixed:
        del sized["one head"]
    for name, sizes in sized.items():
        yield replace(first, name=name, sizes=sizes, seed=1)
    for seed, sizes in ((2, first.sizes), (3, sized.get(UNEVEN, first.sizes))):
        if UNEVEN in [one.name for one in refused] and seed == 3:
            break
        for asks in _features(first.fields):
            name = " and ".join(word for one, word in _WORDS.items() if one in asks)
            more = f", {UNEVEN}" if sizes is not first.sizes else ""
            yield replace(first, name=name + more, sizes=sizes, asks=asks, seed=seed)
    yield replace(first, name=LARGE, size=60.0, seed=4)


def _other_sizes(first: Given) -> dict[str, Sizes]:
    """What is changed in the sizes of the first problem, by its name."""
    own, fields = first.sizes, first.fields
    small = own.queries < 8
    longer = own.queries + 4 if small else 2 * own.queries
    wide = own.width + 2 if small else 2 * own.width
    changes: dict[str, dict[str, Any]] = {
        "other numbers": {},
        f"{longer} tokens": dict(queries=longer, keys=longer),
        "one token": dict(queries=1, keys=1),
        "one text": dict(batch=1),
        "one head": dict(heads=1, key_heads=1),
        f"width {wide}": dict(width=wide, value_width=wide),
        "values of another width": dict(value_width=own.width + 2),
        "70 tokens": dict(queries=70, keys=70),
    }
    if first.has_own_keys:
        rows = 3 if small else own.queries
        changes[UNEVEN] = dict(queries=rows, keys=7 if small else longer)
        changes["one query"] = dict(queries=1)
    if "embeddings" in fields and not first.is_bare:
        changes["wider embeddings"] = dict(model=first.model + 3)
    if own.heads > 1 and not first.is_bare:
        shared = own.heads // 2 if own.heads % 2 == 0 else 1
        changes["fewer key heads"] = dict(batch=own.batch + (own.batch > 1), key_heads=shared)
        changes["one key head"] = dict(key_heads=1)
    return {name: replace(own, **more) for name, more in changes.items()}


UNEVEN = "more keys than queries"
_WORDS = {
    "mask": "a mask",
    "key_mask": "padding",
    "causal": "causal",
    "window": "a window",
    "scale": "another scale",
    "offset": "another offset",
}
_TOGETHER = (("mask", "key_mask"), ("mask", "causal"), ("key_mask", "causal"), ("causal", "window"))


def _features(fields: frozenset[str]) -> list[frozenset[str]]:
    """What is not neutral in one problem after the other, of what these fields let ask."""
    own = [name for name in _WORDS if name in fields]
    if "lengths" in fields and "key_mask" not in own:
        own.append("key_mask")
    some = [(name,) for name in own]
    pairs = [two for two in _TOGETHER if {*two} <= {*own}]
    every = [tuple(name for name in own if name != "key_mask" or "window" not in own)]
    return list(dict.fromkeys(map(frozenset, (*some, *pairs, *every)))) if own else []


# --- what the answers are right under -------------------------------------------------------------


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
    return replace(found, assumptions=tuple(told))


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


def _judged(found: Survey, stated: Stated) -> Judgement:
    ordinary = [one for one in found.answers if one[0].name != LARGE]
    table, unit = _Table(ordinary), 0.0
    axes = _axes(found.fields, stated)
    best = table.best(_readings(axes))
    right = not table.distance(best)[0]
    units = {_unit(one): one.dtype for _, one in ordinary}
    exact_to = units[max(units)]
    if not right:
        unit = UNITS["float32"]
        coarse = _Table(ordinary, unit)
        close = coarse.best(_readings(axes))
        if not coarse.distance(close)[0]:
            table, best, right, exact_to = coarse, close, True, "float32"
    about: dict[str, Any] = dict(
        adapter=found.adapter,
        assumptions=(*found.adapter.assumes, *_assumed(table, best, axes, stated, found.fields)),
        asked=tuple(given.name for given, _ in found.answers),
        not_asked=(
            *found.refused,
            *(NotAsked(one, "its default") for one in found.adapter.unasked),
        ),
        exact_to=exact_to,
        reading=best,
        calls=found.calls,
    )
    if not right:
        wrong = tuple(task for task, off, _ in table.of(best) if off)
        shown = next(answer for _, off, answer in table.of(best) if off)
        return Judgement(
            "wrong",
            f"{len(wrong)} of {len(ordinary)} problems have another result",
            task=wrong[0],
            answer=shown,
            wrong=wrong,
            otherwise=_otherwise(ordinary, best, found.fields, stated),
            distance=sum(table.distance(best)),
            **about,
        )
    again = found.again
    if again and not _same(again, ordinary[0][1]):
        task = table.of(best)[0][0]
        return Judgement("wrong", "two equal calls give different results", task=task, **about)
    if found.stopped:
        return Judgement("unknown", f"stopped: {found.stopped}", **about)
    if stuck := _always_refused(found):
        return Judgement("unknown", f"{stuck.name}: {stuck.why}", **about)
    return _fragile(found, best, unit, about) or Judgement("right", "", **about)


def _fragile(found: Survey, best: Reading, unit: float, about: dict[str, Any]) -> Judgement | None:
    large = _Table([one for one in found.answers if one[0].name == LARGE], unit).of(best)
    if large and large[0][1]:
        task, _, answer = large[0]
        return Judgement("fragile", f"wrong with {LARGE}", task=task, answer=answer, **about)
    changed = dict.fromkeys(name for _, answer in found.answers for name in answer.changed)
    if changed:
        names = ", ".join(changed)
        return Judgement("fragile", f"it changes the arrays that it is given: {names}", **about)
    return None


def _always_refused(found: Survey) -> NotAsked | None:
    """A field that is read, and with which every problem ends in an error."""
    told = [given.asks for given, _ in found.answers]
    for asks in _features(found.fields):
        if not any(asks <= own for own in told):
            names = [word for one, word in _WORDS.items() if one in asks]
            name = " and ".join(names)
            return next((one for one in found.refused if one.name == name), None)
    return None


def _same(one: Answer, other: Answer) -> bool:
    if one.arrays.keys() != other.arrays.keys():
        return False
    both = [(own, other.arrays[name]) for name, own in one.arrays.items()]
    return all(np.array_equal(*pair, equal_nan=True) for pair in both)


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
    return {
        "causal": (False, True) if free else (bool(stated.causal),),
        "aligned": ends,
        "scale": (stated.factor,),
        "rotary": turned,
        "alibi": (False,) if "rotary" in fields else (False, True),
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
        ("causal", True): "later keys are meant to be hidden",
        ("causal", False): "every key is meant to be seen",
        ("aligned", "end"): "the last query belongs to the last key",
        ("aligned", "start"): "the first query belongs to the first key",
        ("rotary", ""): "nothing is meant to be turned by its position",
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
    if stated.scale is None and "scale" not in fields:
        yield Assumption("scale", _said("scale", None), _SOURCES["scale"])


def _otherwise(
    answers: Sequence[tuple[Given, Answer]],
    best: Reading,
    fields: frozenset[str],
    stated: Stated,
) -> tuple[Assumption, ...]:
    """What might be stated so that the function is right."""
    if "scale" in fields or stated.scale is not None:
        return ()
    unscaled = _Table(answers).distance(replace(best, scale=1.0))
    return () if unscaled[0] else (Assumption("scale", _said("scale", 1), "tried"),)


# --- comparing ------------------------------------------------------------------------------------

Compared = tuple[Task, float, Answer]  # how much of the answer is wrong


class _Table:
    """How much of each answer is wrong under each reading; nothing is compared twice."""

    def __init__(self, answers: Sequence[tuple[Given, Answer]], unit: float = 0.0) -> None:
        self._answers, self._unit = answers, unit
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
        task = Task(given, answer.reads, reading, _wanted(answer))
        if rows == keys:  # nothing is aligned
            task = replace(task, reading=replace(task.reading, aligned="end"))
        if "mask" not in given.asks or given.sizes.batch == 1:
            task = replace(task, reading=replace(task.reading, one_mask=False))
        place = number, task.reading
        if place not in self._known:
            off = how_wrong(task, answer, max(self._unit, _unit(answer)))
            self._known[place] = task, off, answer
        return self._known[place]


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

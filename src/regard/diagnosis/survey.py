"""What is asked of a function: sizes that it takes, then everything that its adapter reads.

Owns the problems and their order, the simplest first. Must not know what answers are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.call.asking import Answer, Ask, unfit
from regard.diagnosis.given import Given, Sizes
from regard.diagnosis.result import NotAsked
from regard.diagnosis.statements import Stated

MOST_CALLS = 150  # of one function with one adapter
MOST_ENDED = 1  # of them by a limit
LARGE = "large scores"


@dataclass(frozen=True, eq=False)
class Survey:
    """All answers of a function with one adapter, and what it refused."""

    adapter: Adapter
    fields: frozenset[str]  # that were read in any call
    answers: tuple[tuple[Given, Answer], ...] = ()
    refused: tuple[NotAsked, ...] = ()
    calls: int = 0
    again: tuple[Answer, ...] = ()  # of the first problem, asked at once and after all others
    stopped: str = ""  # which limit ended it


def survey(ask: Ask, adapter: Adapter, stated: Stated, most: int | None = None) -> Survey:
    """Ask for sizes that the function takes, then for all that its adapter reads, or the most."""
    asker, mechanism, width = _Asker(ask), stated.mechanism, stated.width
    heads = stated.heads or adapter.heads
    ladder = (replace(one, mechanism=mechanism) for one in _ladder(heads, adapter.model, width))
    first, tried = _first(asker, ladder)
    refused = [NotAsked(*one) for one in tried.items()]
    if first is None:
        return Survey(adapter, asker.fields, refused=tuple(refused), calls=asker.calls)
    answers, ended = [first], list[str]()
    twice = asker.put(first[0])[1]
    fixed = {"one head"} if heads else set()
    fixed |= {name for name in _other_sizes(first[0]) if width and name.startswith("width ")}
    for given in islice(_variations(first[0], refused, fixed), most and most - 1):
        if asker.calls >= MOST_CALLS:
            refused.append(NotAsked(given.name, f"{MOST_CALLS} calls were made"))
            break
        asked, answer = asker.put(given)
        if answer.problem or _is_part(asked, answer):
            refused.append(NotAsked(given.name, unfit(asked, answer)))
        else:
            answers.append((asked, answer))
        ended += [answer.problem] * answer.ended
        if len(ended) > MOST_ENDED:
            break
    again = None if len(ended) > MOST_ENDED else asker.put(first[0])[1]
    return Survey(
        adapter,
        asker.fields,
        (*answers,),
        (*refused,),
        asker.calls,
        tuple(one for one in (twice, again) if one is not None),
        ended[-1] if len(ended) > MOST_ENDED else "",
    )


class _Asker:
    """Counts calls, and knows which fields have been read."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self.calls, self.fields = ask, 0, frozenset[str]()

    def put(self, given: Given) -> tuple[Given, Answer]:
        """Ask until no field is read that was not known to be: sizes depend on these."""
        while True:
            given = replace(given, fields=self.fields)
            answer = self._ask(given)
            self.calls += 1
            new = answer.reads - self.fields
            self.fields |= new
            if not new or answer.ended:
                return given, answer


def _first(
    asker: _Asker, ladder: Iterator[Given]
) -> tuple[tuple[Given, Answer] | None, dict[str, str]]:
    """The first problem whose answer has the right form, and why others before it had not."""
    tried: dict[str, str] = {}
    for given in ladder:
        sizes = given.sizes
        given, answer = asker.put(given)
        problem = unfit(given, answer)
        if not problem:
            tried.pop(_in_words(sizes), "")
            return (given, answer), tried
        tried.setdefault(_in_words(sizes), problem)
        if answer.ended:
            break
    return None, tried


def _ladder(heads: int | None, model: int | None, width: int | None) -> Iterator[Given]:
    """Sizes of the first problem, until some are taken; an object has some already."""
    if model:
        width = model // (heads or 1)
        for batch, rows in ((2, 5), (1, 5), (2, 8), (2, 16)):
            own = Sizes(batch, heads or 1, heads or 1, rows, rows, width, width, model)
            yield Given(f"{rows} tokens", own)
        return
    for rows, usual_width in ((5, 6), (8, 8), (16, 8)):
        for batch in (2, 1):
            usual = [many for many in (4, 3, 1, 2, 8) if many != rows]
            for many in usual if heads is None else (heads,):
                about: dict[str, Any] = dict(width=width or usual_width, value_width=usual_width)
                yield Given(f"{rows} tokens", Sizes(batch, many, many, rows, rows, **about))


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


def _variations(first: Given, refused: Sequence[NotAsked], fixed: set[str]) -> Iterator[Given]:
    """The other problems: each size another one, then each field that is read not neutral.

    What was `refused` meanwhile is not asked with another thing. Some sizes are `fixed`.
    """
    sized = {name: sizes for name, sizes in _other_sizes(first).items() if name not in fixed}

    def taken(sizes: Sizes) -> bool:
        # One row fits any number of keys: it tells nothing where no other number does.
        return sizes.queries == sizes.keys or UNEVEN not in [one.name for one in refused]

    for name, sizes in sized.items():
        if taken(sizes):
            yield replace(first, name=name, sizes=sizes, seed=1)
    for seed, sizes in ((2, first.sizes), (3, sized.get(UNEVEN, first.sizes))):
        if not taken(sizes):
            break
        for asks in _features(first.fields):
            name = " and ".join(word for one, word in WORDS.items() if one in asks)
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
        "70 tokens": dict(batch=1, queries=70, keys=70),
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
WORDS = {
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
    own = [name for name in WORDS if name in fields]
    if "lengths" in fields and "key_mask" not in own:
        own.append("key_mask")
    some = [(name,) for name in own]
    pairs = [two for two in _TOGETHER if {*two} <= {*own}]
    every = [tuple(name for name in own if name != "key_mask" or "window" not in own)]
    return list(dict.fromkeys(map(frozenset, (*some, *pairs, *every)))) if own else []


def always_refused(found: Survey) -> NotAsked | None:
    """A field that is read, and with which every problem ends in an error."""
    told = [given.asks for given, _ in found.answers]
    for asks in _features(found.fields):
        if not any(asks <= own for own in told):
            names = [word for one, word in WORDS.items() if one in asks]
            name = " and ".join(names)
            return next((one for one in found.refused if one.name == name), None)
    return None

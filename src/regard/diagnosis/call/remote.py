"""The messages about calls and traces, between the process that judges and that of the function.

Adapters cross as text, problems as what they are drawn from, and answers as arrays. What comes from
the function's process is hostile until it is checked here. Must not know how processes are started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Answer, Ask, asking
from regard.diagnosis.given import FIELDS, GRADIENTS, Given, Sizes
from regard.diagnosis.lines import Told, means, tell
from regard.diagnosis.mechanism import Mechanism
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.process.protocol import (
    MAX_TEXT,
    MAX_WORDS,
    Message,
    as_request,
    checked,
    frame,
    need,
)
from regard.diagnosis.result import Assumption, as_plain, read_plain
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import Reading, Task
from regard.errors import safe_text

MAX_BYTES = 2**24  # of the arrays of one answer
MAX_ADAPTERS = 256
_KNOWN = {*FIELDS, "window right"}
_KNOWN_ARRAYS = {"output", *GRADIENTS}


# --- to the function ------------------------------------------------------------------------------


def asked(given: Given) -> dict[str, Any]:
    """A problem as JSON; the mechanism is stated beside it."""
    sets = {"fields": sorted(given.fields), "asks": sorted(given.asks)}
    plain = {name: getattr(given, name) for name in ("name", "seed", "size", "moved")}
    return {"sizes": asdict(given.sizes), **sets, **plain}


def as_given(content: Mapping[str, Any], mechanism: Mechanism | None) -> Given:
    """What `asked` wrote; the side that asks is trusted."""
    return Given(
        content["name"],
        Sizes(**content["sizes"]),
        frozenset(content["fields"]),
        frozenset(content["asks"]),
        content["seed"],
        content["size"],
        mechanism,
        content["moved"],
    )


def as_json(task: Task) -> dict[str, Any]:
    """A problem with what was read of it and how that is meant."""
    own = {"reads": sorted(task.reads), "wanted": task.wanted, "reading": asdict(task.reading)}
    return {"given": asked(task.given), **own}


def as_task(content: Mapping[str, Any], mechanism: Mechanism | None) -> Task:
    """What `as_json` wrote."""
    given, reading = as_given(content["given"], mechanism), Reading(**content["reading"])
    return Task(given, frozenset(content["reads"]), reading, tuple(content["wanted"]))


# --- from the function ----------------------------------------------------------------------------


def answer_frame(key: bytes, number: int, answer: Answer) -> bytes:
    """An answer as bytes; arrays that take too many become a problem."""
    arrays = {name: np.ascontiguousarray(one, "<f8") for name, one in answer.arrays.items()}
    problem = answer.problem
    if not arrays.keys() <= _KNOWN_ARRAYS or sum(x.nbytes for x in arrays.values()) > MAX_BYTES:
        arrays, problem = {}, "it returned other arrays than a result or gradients"
    content = {
        "reads": sorted(answer.reads),
        "shapes": {name: one.shape for name, one in arrays.items()},
        "dtype": answer.dtype,
        "problem": problem,
        "of_adapter": answer.of_adapter,
        "changed": answer.changed,
        "printed": answer.printed,
        "ended": answer.ended,
    }
    return frame(key, number, content, arrays.values())


@checked
def as_answer(content: dict[str, Any], data: bytes) -> Answer:
    """What `answer_frame` wrote, checked."""
    shapes = content.pop("shapes")
    need(content.keys() == {one.name for one in fields(Answer)} - {"arrays"})
    need(type(shapes) is dict and shapes.keys() <= _KNOWN_ARRAYS)
    need({*content["reads"]} <= _KNOWN and {*content["changed"]} <= _KNOWN)
    need(all(type(content[one]) is str for one in ("dtype", "problem", "printed")))
    need(all(len(content[one]) <= MAX_WORDS for one in ("dtype", "problem", "printed")))
    need(type(content["of_adapter"]) is int and type(content["ended"]) is bool)
    arrays, start = {}, 0
    for name, shape in shapes.items():
        need(all(type(size) is int and size >= 0 for size in shape))
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, "<f8", count, start).reshape(shape)
        start += 8 * count
    need(start == len(data))
    for name in ("dtype", "problem", "printed"):
        content[name] = safe_text(content[name])
    content["reads"] = frozenset(content["reads"])
    content["changed"] = tuple(content["changed"])
    return Answer(arrays=arrays, **content)


def told_frame(key: bytes, number: int, told: Told) -> bytes:
    """What a trace tells, as bytes; without lines, if these take too many."""
    whole = frame(key, number, as_plain(told))
    return whole if len(whole) < MAX_TEXT else frame(key, number, as_plain(replace(told, lines=())))


@checked
def as_told(content: dict[str, Any], data: bytes) -> Told:
    """What `told_frame` wrote, checked; its texts are made safe where they are shown."""
    need(content.keys() == {one.name for one in fields(Told)} and not data)
    told: Told = read_plain(Told, content)
    need(not told.mistake or told.mistake in all_mistakes())
    return told


@checked
def as_number(content: dict[str, Any], data: bytes, most: int) -> int:
    """One of so many readings."""
    need(content.keys() == {"number"} and not data)
    number = content["number"]
    need(type(number) is int and 0 <= number < most)
    return int(number)


def way_frame(key: bytes, number: int, way: Way) -> bytes:
    """A way to call a function, as bytes: adapters as text, and what they assume."""
    content = asdict(replace(way, adapters=()))
    content["adapters"] = [
        {
            "text": one.text,
            "assumes": [[own.name, own.text, own.source] for own in one.assumes],
            "unasked": one.unasked,
            "heads": one.heads,
            "model": one.model,
        }
        for one in way.adapters
    ]
    return frame(key, number, content)


@checked
def as_way(content: dict[str, Any], data: bytes) -> Way:
    """What `way_frame` wrote, checked; its adapters are shown, and called in the other process."""
    need(content.keys() == {one.name for one in fields(Way)} and not data)
    need(len(content["adapters"]) <= MAX_ADAPTERS and len(content["tried"]) <= MAX_ADAPTERS)
    texts = [content["name"], content["why"], content["skeleton"], *content["tried"]]
    need(all(type(one) is str and len(one) <= MAX_WORDS for one in texts))
    adapters = tuple(_as_adapter(one) for one in content["adapters"])
    need(_is_safe(content["skeleton"]))
    tried = tuple(map(safe_text, content["tried"]))
    name, why = map(safe_text, (content["name"], content["why"]))
    return Way(adapters, name, why, content["skeleton"], tried)


def _is_safe(code: str) -> bool:
    """Whether nothing in this code is shown in another form."""
    return all(safe_text(line) == line for line in code.split("\n"))


def _as_adapter(content: dict[str, Any]) -> Adapter:
    assumes = tuple(Assumption(*own) for own in content["assumes"])
    texts = [*content["unasked"], *(x for one in assumes for x in (one.name, one.text, one.source))]
    need(all(type(one) is str and len(one) <= MAX_WORDS for one in (content["text"], *texts)))
    need(_is_safe(content["text"]) and all(map(_is_safe, texts)))
    sizes = content["heads"], content["model"]
    need(all(one is None or (type(one) is int and 0 < one < 2**16) for one in sizes))
    return Adapter(_elsewhere, content["text"], assumes, tuple(content["unasked"]), *sizes)


def _elsewhere(function: Any, t: Any) -> Any:
    raise NotImplementedError("this adapter is called in the function's process")


class Caller:
    """What answers in the function's process: how it may be called, then one call after another."""

    def __init__(self, function: Any, library: str, ways: Iterator[Way], stated: Stated) -> None:
        self._function, self._library, self._ways = function, library, ways
        self._mechanism = stated.mechanism
        self._adapters: list[Adapter] = []
        self._asks: list[Ask] = []

    def answer(self, message: Message, key: bytes) -> bytes:
        """The answer to one message: the next way to call, an answer, or what a trace tells."""
        content = as_request(message)
        if "given" in content:
            ask = self._asks[content["adapter"]]
            answer = ask(as_given(content["given"], self._mechanism))
            return answer_frame(key, message.number, answer)
        if "tasks" in content:
            adapter = self._adapters[content["adapter"]]
            task, *others = (as_task(one, self._mechanism) for one in content["tasks"])
            told = tell(self._function, adapter, self._library, task, others)
            return told_frame(key, message.number, told)
        if "readings" in content:
            adapter = self._adapters[content["adapter"]]
            tasks = [as_task(one, self._mechanism) for one in content["readings"]]
            found = means(self._function, adapter, self._library, tasks)
            return frame(key, message.number, {"number": found})
        way = next(self._ways)
        self._adapters += way.adapters
        self._asks += [asking(self._function, one, self._library) for one in way.adapters]
        return way_frame(key, message.number, way)

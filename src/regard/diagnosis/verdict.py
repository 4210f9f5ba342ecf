"""`diagnose`: from somebody's function to a verdict.

Owns the order of the questions: can it be called, is it right, is it one mistake, is it two, and
what breaks it at the edge. Each is answered in a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.diagnosis import matching
from regard.diagnosis.convention import MASK_KINDS, Ask, Convention
from regard.diagnosis.convention_search import (
    UNITS,
    Told,
    Trial,
    key_mask_way,
    spoken,
    ways_to_call,
)
from regard.diagnosis.examples import named
from regard.diagnosis.matching import Candidates, Entry, Matcher, Seen
from regard.diagnosis.mistakes.numerics import COMPUTED_IN_FLOAT32, COMPUTED_IN_HALF
from regard.diagnosis.observations import (
    abilities,
    findings,
    is_nan_throughout,
    is_random,
    nan_throughout,
    unusable,
)
from regard.diagnosis.probe import RIGHT, Probe
from regard.diagnosis.properties import properties
from regard.diagnosis.result import Named, Outcome, Verdict
from regard.diagnosis.robustness import fragilities
from regard.diagnosis.running import run
from regard.diagnosis.signature import Subject, read
from regard.errors import OptionError, safe_text

TIME_LIMIT = 10.0
FAR = "it explains none of the wrong answers, but comes closest to them"


def here(
    function: Any, signature: Mapping[str, str] | None, heads: int | None, limit: float
) -> tuple[Subject, Ask]:
    """What can be read off a function in this process, and how to put questions to it."""
    called, subject = read(function, signature, heads)
    return subject, lambda question: run(called, subject, question, limit)


def diagnose(
    function: Any,
    *,
    signature: Mapping[str, str] | str | None = None,
    heads: int | None = None,
    causal: bool | str | None = None,
    mask: str | None = None,
    window: str | None = None,
    time_limit: float = TIME_LIMIT,
    reach: Callable[..., tuple[Subject, Ask]] = here,
) -> Outcome:
    """See `regard.diagnose`; `reach` finds the function, in this process or in another one."""
    begin = time.monotonic()
    roles = parse_signature(signature) if isinstance(signature, str) else signature
    _check(causal, mask, window, heads, time_limit)
    subject, ask = reach(function, roles, heads, float(time_limit))
    trial = Trial(subject, Told(causal, mask, window), float(time_limit), ask)
    found = _verdict(trial)
    seconds = round(time.monotonic() - begin, 3)
    return replace(found, calls=trial.calls, seconds=seconds)


def parse_signature(text: str) -> dict[str, str]:
    """Roles as they are written on a command line.

    >>> parse_signature("a=query, b=key, c=value")
    {'a': 'query', 'b': 'key', 'c': 'value'}
    """
    roles = {}
    for part in text.split(","):
        name, equals, role = (word.strip() for word in part.partition("="))
        if not equals or not name or not role:
            raise OptionError(
                f"signature has {safe_text(part.strip(), 40)!r}; write parameter=role, such as "
                "a=query, b=key, c=value"
            )
        roles[name] = role
    return roles


def _check(causal: Any, mask: Any, window: Any, heads: Any, time_limit: Any) -> None:
    choices = (
        ("causal", causal, (None, True, False, "start", "end")),
        ("mask", mask, (None, *MASK_KINDS)),
        ("window", window, (None, "inclusive", "exclusive")),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise OptionError(
                f"{name} is {safe_text(repr(value), 40)}; it must be one of "
                f"{', '.join(map(repr, allowed))}"
            )
    if heads is not None and (not isinstance(heads, int) or heads < 1):
        raise OptionError(f"heads is {safe_text(repr(heads), 40)}; it must be 1 or more")
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise OptionError(f"time_limit is {safe_text(repr(time_limit), 40)}; give seconds above 0")


Ways = Sequence[Convention]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One way of calling a function, what came back, and how that is compared."""

    ways: Ways
    matcher: Matcher

    @property
    def share_wrong(self) -> float:
        """How many of the answers are not right."""
        return len(self.matcher.wrong) / len(self.matcher.seen)


@dataclass(frozen=True, eq=False)
class Settled:
    """The hypothesis that explains all answers, and with which mistakes; with none, it is right."""

    hypothesis: Hypothesis
    entries: tuple[Entry, ...]
    exact_to: str


def _verdict(trial: Trial) -> Outcome:
    hypotheses = ways_to_call(trial)
    name = trial.subject.name
    if not hypotheses:
        return unusable(trial)
    if is_nan_throughout(trial):
        return nan_throughout(trial, hypotheses[0])
    dtype = _returned_dtype(trial)
    observed = [(ways, _observed(trial, ways)) for ways in hypotheses]
    views = _distinct([(ways, seen) for ways, seen in observed if seen])
    if not views or trial.out_of_time:  # part of the evidence proves nothing
        return unusable(trial)
    if (random := is_random(trial)) is not None:
        text = f"{name} gives another result each time it is called"
        called = spoken(trial, hypotheses[0], None)
        return Outcome(name, "unusable", text, called, findings=(random, *findings(trial)))
    settled, best = _settled(views, _units(dtype))
    near: tuple[Named, ...] = ()
    mistakes: tuple[Named, ...] = ()
    fragile: tuple[Named, ...] = ()
    if settled is None:
        verdict: Verdict = "unknown"
        own, exact_to = best, _units(dtype)[0]
        near = (_nearest(trial, best),)
    else:
        own, exact_to = settled.hypothesis, settled.exact_to
        entries = settled.entries or _lost_digits(dtype, own.ways[0].dtype, exact_to)
        mistakes = tuple(named(*entry, trial, own.ways) for entry in entries)
        if not mistakes:
            fragile = tuple(fragilities(trial, own.ways[0], exact_to))
        breaks = any(one.severity == "fragile" for one in fragile)
        verdict = "mistaken" if mistakes else "fragile" if breaks else "right"
    answer = trial.ask(own.ways[0], trial.probes_for(own.ways[0])[0])
    return Outcome(
        name,
        verdict,
        _summary(name, verdict, exact_to, (*mistakes, *near, *fragile)),
        spoken(trial, own.ways, answer),
        exact_to,
        mistakes,
        near,
        fragile,
        tuple(abilities(trial, own.ways, own.matcher)),
        tuple(findings(trial)),
        tuple(properties(trial, own.ways[0], UNITS[exact_to])),
    )


def _settled(
    views: Sequence[tuple[Ways, list[Seen]]], units: Sequence[str]
) -> tuple[Settled | None, Hypothesis]:
    """What explains every answer, if anything does, and the hypothesis with most right ones.

    Within a half type's bound a small mistake looks right: two mistakes are tried before that.
    """
    candidates = Candidates()

    def hypotheses(unit: str) -> list[Hypothesis]:
        less = unit != units[0]
        return [
            Hypothesis(ways, Matcher(seen, UNITS[unit], candidates, less)) for ways, seen in views
        ]

    exact = hypotheses(units[0])
    best_first = sorted(exact, key=lambda one: one.share_wrong)
    for unit in units[:2]:
        if (settled := _right_or_one(hypotheses(unit), unit)) is not None:
            return settled, best_first[0]
    two = matching.pair([one.matcher.of_matrices for one in best_first])
    if two is not None:
        return Settled(best_first[two[0]], two[1], units[0]), best_first[0]
    for unit in units[2:]:
        if (settled := _right_or_one(hypotheses(unit), unit)) is not None:
            return settled, best_first[0]
    return None, best_first[0]


def _right_or_one(hypotheses: Sequence[Hypothesis], unit: str) -> Settled | None:
    for one in hypotheses:
        if not one.matcher.wrong:
            return Settled(one, (), unit)
    for one in hypotheses:
        if (entry := matching.single(one.matcher)) is not None:
            return Settled(one, (entry,), unit)
    for one in hypotheses:
        fewer = one.matcher.of_matrices
        if fewer is not one.matcher and (entry := matching.single(fewer)) is not None:
            return Settled(one, (entry,), unit)
    return None


def _lost_digits(returned: str, given: str, exact_to: str) -> tuple[Entry, ...]:
    """A result that has fewer digits than the dtype in which it went in and out."""
    if returned != given or returned == exact_to:
        return ()
    return ((COMPUTED_IN_FLOAT32 if exact_to == "float32" else COMPUTED_IN_HALF, RIGHT),)


def _nearest(trial: Trial, hypothesis: Hypothesis) -> Named:
    entry, share = matching.nearest(hypothesis.matcher)
    text = f"it explains {share:.0%} of what came back" if share else FAR
    return replace(named(*entry, trial, hypothesis.ways), breaks_on=text)


def _units(dtype: str) -> tuple[str, ...]:
    """From the digits that the returned dtype has to those of a half type."""
    order = ("float64", "float32", "float16")
    return order[order.index(dtype) :] if dtype in order else ("bfloat16",)


def _returned_dtype(trial: Trial) -> str:
    kinds = [answer.dtype for answer in trial.answers.values() if answer.output is not None]
    return kinds[0] if kinds and kinds[0] in UNITS else "float64"


def _observed(trial: Trial, ways: Ways) -> list[Seen]:
    """Everything that ordinary probes gave under one hypothesis."""
    seen = []
    for way in ways:
        for probe in trial.probes_for(way):
            own = key_mask_way(trial, way, probe) if probe.ability == "key mask" else way
            answer = trial.ask(own, probe)
            if answer.output is not None and not _only_by_accident(trial, way, probe):
                seen.append(Seen(probe, answer.output.astype(np.float64)))
    return seen


def _distinct(
    views: Sequence[tuple[Ways, list[Seen]]],
) -> list[tuple[Ways, list[Seen]]]:
    """Without the hypotheses under which the function gave the same as under an earlier one."""
    kept: list[tuple[Ways, list[Seen]]] = []
    for ways, seen in views:
        if not any(_alike(seen, other) for _, other in kept):
            kept.append((ways, seen))
    return kept


def _alike(one: list[Seen], other: list[Seen]) -> bool:
    return len(one) == len(other) and all(
        a.probe is b.probe and np.array_equal(a.output, b.output, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _only_by_accident(trial: Trial, way: Convention, probe: Probe) -> bool:
    """A mask of keys where a mask of cells was wanted broadcasts to something else, and so on."""
    if probe.ability == "mask" and way.mask_shape in ("keys", "batch keys", "batch 1 1 keys"):
        return True
    return probe.keep is not None and way.mask_shape in ("keys",) and probe.ability != "key mask"


def _summary(name: str, verdict: Verdict, exact_to: str, said: Sequence[Named]) -> str:
    titles = [one.title for one in said]
    match verdict:
        case "right":
            return f"{name} is right, to the last digits of {exact_to}"
        case "fragile":
            worst = next(one.title for one in said if one.severity == "fragile")
            return f"{name} is right on ordinary inputs, and fragile: {worst}"
        case "mistaken":
            return f"{name} is mistaken: {', and '.join(titles)}"
    text = f"{name} differs in a way that the catalogue does not know"
    return text if said[0].breaks_on == FAR else f"{text}; nearest: {titles[0]}"

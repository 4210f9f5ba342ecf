"""What else is to be said about a function, whatever the verdict: abilities, habits, refusals.

Reads the answers that a trial has gathered. Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from regard.diagnosis.convention import Convention
from regard.diagnosis.convention_search import UNITS, Trial, agrees, spoken
from regard.diagnosis.matching import Matcher
from regard.diagnosis.probe import ABILITIES
from regard.diagnosis.result import Ability, Finding, Outcome

# Not worth a word where there is no mask, causal flag or window at all.
FINER = ("key mask", "causal rectangular", "causal and mask", "window rectangular")


def abilities(trial: Trial, ways: Sequence[Convention], matcher: Matcher) -> Iterator[Ability]:
    """What became of each ability: right, wrong, refused, or not offered."""
    wrong = {matcher.seen[n].probe for n in matcher.wrong}
    seen = {one.probe for one in matcher.seen}
    for name, title in ABILITIES.items():
        asked = [(way, p) for way in ways for p in trial.probes_for(way) if p.ability == name]
        answered = [probe for _, probe in asked if probe in seen]
        bad = [probe for probe in answered if probe in wrong]
        if bad:
            text = f"{len(bad)} of {len(answered)} probes: {', '.join(p.name for p in bad[:3])}"
            yield Ability(name, title, "wrong", text + (", …" if len(bad) > 3 else ""))
        elif answered:
            count = len(answered)
            yield Ability(name, title, "right", f"{count} probe{'s' if count > 1 else ''}")
        elif asked:
            problems = [trial.ask(way, probe) for way, probe in asked]
            told = next((a for a in problems if a.kind != "refused"), problems[0])
            state = "not offered" if told.kind == "refused" else "refused"
            if state == "not offered" and name in FINER:
                continue
            yield Ability(name, title, state, told.problem)  # type: ignore[arg-type]


def findings(trial: Trial) -> Iterator[Finding]:
    """What the function does besides computing."""
    answers = list(trial.answers.values())
    name = trial.subject.name
    for answer in answers:
        if answer.printed:
            yield Finding("prints", f"{name} prints: {answer.printed[:80]}")
            break
    if trial.out_of_time:
        text = f"{name} is slow: after {trial.calls} calls no time was left for more"
        yield Finding("slow", text)
    for (way, probe), answer in trial.answers.items():
        if answer.weights is not None and trial.is_right(way, probe) and not probe.has_rules:
            bound = probe.tolerance(UNITS["float32"])
            if not agrees(answer.weights, probe.right["weights"], bound):
                yield Finding(
                    "other_weights", f"{name} returns weights that did not make its output"
                )
                break
    for answer in answers:
        if answer.kind == "hung":
            yield Finding("hangs", f"{name}: {answer.problem}")
            break
    if any(answer.returned.startswith("a list") for answer in answers):
        yield Finding("returns_list", f"{name} returns a list instead of an array")
    for (way, probe), answer in trial.answers.items():
        known = way.dtype in ("float64", "float32") and answer.dtype not in ("", way.dtype)
        if known and not probe.has_rules and answer.output is not None:
            text = f"{name} returns {answer.dtype} for {way.dtype} arrays"
            yield Finding("another_dtype", text)
            break


def is_random(trial: Trial) -> Finding | None:
    """The first question that was answered once more, after all the others."""
    answered = ((key, answer) for key, answer in trial.answers.items() if answer.output is not None)
    (way, probe), first = next(answered)
    again = trial.ask(way, replace(probe, name=f"{probe.name}, again"))
    if first.output is None or again.output is None:
        return None
    if agrees(first.output, again.output, probe.tolerance(UNITS["float32"])):
        return None
    said = "two calls with the same inputs differ; is dropout on, or does it remember?"
    return Finding("random", f"{trial.subject.name}: {said}")


def is_nan_throughout(trial: Trial) -> bool:
    """Whether not one number ever came back."""
    outputs = [answer.output for answer in trial.answers.values() if answer.output is not None]
    return all(np.isnan(output).all() for output in outputs)


def nan_throughout(trial: Trial, ways: Sequence[Convention]) -> Outcome:
    """The diagnosis of a function that returns nothing but NaN."""
    name = trial.subject.name
    text = (
        f"{name} returns nothing but NaN; a mask that is made by multiplying with infinity does "
        "that (0·∞ is NaN), and so does an array that nobody has filled"
    )
    summary = f"{name} is wrong: every number that it returns is NaN"
    finding = Finding("nan", text)
    called = spoken(trial, ways, None)
    return Outcome(name, "unknown", summary, called, findings=(finding, *findings(trial)))


def unusable(trial: Trial) -> Outcome:
    """Nothing came back that could be an output: say what came instead, once."""
    name = trial.subject.name
    problems: dict[str, str] = {}
    for (way, _), answer in trial.answers.items():
        if answer.problem and answer.kind != "refused":
            problems.setdefault(answer.kind, f"{answer.problem} ({way.layout})")
    order = ("hung", "prints", "nothing", "type", "shape", "raised")
    kind = next((kind for kind in order if kind in problems), "raised")
    said = problems.get(kind, "it could not be called")
    if trial.out_of_time:
        kind, said = "slow", "it is too slow; a higher time limit gives it more time"
    told = [Finding(kind, f"{name}: {text}") for kind, text in problems.items()]
    own = [finding for finding in findings(trial) if finding.name not in problems]
    text = f"{name} could not be diagnosed: {said}"
    return Outcome(name, "unusable", text, "", findings=(*told, *own))

"""`diagnose`: from a function to a verdict.

Owns the order of the questions: can it be called, is it right, is it one mistake or two, and which
inputs break it. Each is answered in a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.diagnosis import matching
from regard.diagnosis.arguments import KEYS_ONLY
from regard.diagnosis.convention import MASK_KINDS, Ask, Convention
from regard.diagnosis.convention_search import (
    as_layout,
    describe_call,
    find_conventions,
    key_mask_convention,
    likely_readings,
)
from regard.diagnosis.examples import named
from regard.diagnosis.inspection import LIBRARIES, inspect_function
from regard.diagnosis.matching import Found, Matcher, ProbeOutput
from regard.diagnosis.mechanism import as_mechanism
from regard.diagnosis.mistakes.numerics import COMPUTED_IN_FLOAT32, COMPUTED_IN_HALF
from regard.diagnosis.observations import (
    abilities,
    findings,
    is_random,
    nan_throughout,
    no_gradients,
    parts,
    unusable,
)
from regard.diagnosis.probe import RIGHT, UNITS, Probe
from regard.diagnosis.properties import properties
from regard.diagnosis.reproduction import origin, script
from regard.diagnosis.result import DiagnosisVerdict, Named, Outcome
from regard.diagnosis.robustness import fragilities
from regard.diagnosis.running import answer_question
from regard.diagnosis.signature import Callee
from regard.diagnosis.under_test import FunctionUnderTest, StatedConventions
from regard.errors import OptionError, safe_text

TIME_LIMIT = 10.0
FAR = "it explains none of the wrong answers, but comes closest to them"


def in_this_process(
    function: Any,
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    limit: float,
) -> tuple[list[Callee], Ask]:
    """What is known of a function in this process, and how to put questions to it."""
    found = inspect_function(function, roles, heads, library)
    return [callee for _, callee in found], lambda question: answer_question(found, question, limit)


def diagnose(
    function: Any,
    *,
    signature: Mapping[str, str] | str | None = None,
    heads: int | None = None,
    causal: bool | str | None = None,
    mask: str | None = None,
    window: str | None = None,
    time_limit: float = TIME_LIMIT,
    score: Any = None,
    normalize: Any = None,
    layout: str | None = None,
    library: str | None = None,
    connect: Callable[..., tuple[list[Callee], Ask]] = in_this_process,
) -> Outcome:
    """See `regard.diagnose`; `connect` finds the function, in this process or in another one."""
    begin = time.monotonic()
    roles = parse_signature(signature) if isinstance(signature, str) else signature
    _check(causal, mask, window, library, heads, time_limit)
    mechanism = as_mechanism(score, normalize)
    axes = None if layout is None else as_layout(layout)
    callees, ask = connect(function, roles, heads, library, float(time_limit))
    callee = callees[0]
    if mechanism is not None and callee.kind not in ("arrays", "self"):
        raise OptionError(
            f"{callee.name} takes embeddings or packed heads; score and normalize are for "
            "functions of query, key and value"
        )
    stated = StatedConventions(causal, mask, window, mechanism, axes)
    found_at = origin(function)
    all_tested = [
        FunctionUnderTest(one, stated, float(time_limit), ask, origin=found_at) for one in callees
    ]
    found = None
    for tested in likely_readings(all_tested):
        own = _verdict(tested)
        found = found or own
        if own.verdict not in ("unknown", "unusable"):
            found = own
            break
    assert found is not None
    seconds = round(time.monotonic() - begin, 3)
    return replace(found, calls=sum(one.calls for one in all_tested), seconds=seconds)


def parse_signature(text: str) -> dict[str, str]:
    """The roles of parameters, from the text of a command line.

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


def _check(causal: Any, mask: Any, window: Any, library: Any, heads: Any, time_limit: Any) -> None:
    choices = (
        ("causal", causal, (None, True, False, "start", "end")),
        ("mask", mask, (None, *MASK_KINDS)),
        ("window", window, (None, "inclusive", "exclusive")),
        ("library", library, (None, *LIBRARIES)),
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


# Conventions under one hypothesis, and what the function returned under them.
View = tuple[Sequence[Convention], list[ProbeOutput]]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One way of calling a function, and the comparison of what it then returned."""

    conventions: Sequence[Convention]
    matcher: Matcher


@dataclass(frozen=True, eq=False)
class Match:
    """The hypothesis that explains all outputs, and with which mistakes; none if all are right."""

    hypothesis: Hypothesis
    mistakes: tuple[Found, ...]
    exact_to: str


def _verdict(tested: FunctionUnderTest) -> Outcome:
    hypotheses = find_conventions(tested)
    name = tested.callee.name
    if not hypotheses:
        return unusable(tested)
    if (only_nan := nan_throughout(tested, hypotheses[0])) is not None:
        return only_nan
    dtype = _returned_dtype(tested)
    views = _distinct([(one, _outputs(tested, one)) for one in hypotheses])
    if not views or tested.out_of_time:  # some of the probes alone prove nothing
        return unusable(tested)
    if (random := is_random(tested)) is not None:
        text = f"{name} gives another result each time it is called"
        called = describe_call(tested, hypotheses[0], None)
        return Outcome(name, "unusable", text, called, findings=(random, *findings(tested)))
    match, best = _match(views, _units(dtype))
    near: tuple[Named, ...] = ()
    mistakes: tuple[Named, ...] = ()
    fragile: tuple[Named, ...] = ()
    verdict: DiagnosisVerdict = "unknown"
    if match is None:
        own, exact_to = best, _units(dtype)[0]
        near = (_nearest(tested, best),)
    else:
        own, exact_to = match.hypothesis, match.exact_to
        found = match.mistakes or _lost_digits(dtype, own.conventions[0].dtype, exact_to)
        mistakes = tuple(named(*one, tested, own.conventions) for one in found)
        if not mistakes and not tested.of_gradients:
            fragile = tuple(fragilities(tested, own.conventions[0], exact_to))
        breaks = any(one.severity == "fragile" for one in fragile)
        verdict = "mistaken" if mistakes else "fragile" if breaks else "right"
    first = own.conventions[0]
    answer = tested.ask(first, tested.probes_for(first)[0])
    outcome = Outcome(
        name,
        verdict,
        _summary(name, verdict, exact_to, (*mistakes, *near, *fragile)),
        describe_call(tested, own.conventions, answer),
        exact_to,
        mistakes,
        near,
        fragile,
        tuple(abilities(tested, own.conventions, own.matcher)),
        tuple(findings(tested)),
        () if tested.of_gradients else tuple(properties(tested, first, UNITS[exact_to])),
        tuple(parts(own.matcher)) if tested.of_gradients else (),
        script=_script(tested, own),
    )
    return _with_gradients(tested, own.conventions, outcome) if outcome.ok else outcome


def _script(tested: FunctionUnderTest, own: Hypothesis) -> str:
    """Lines that show a wrong number, for the last of the layouts that have one."""
    wrong = [own.matcher.outputs[number].probe for number in own.matcher.wrong]
    written = (script(tested, convention, wrong) for convention in own.conventions)
    return next((lines for lines in written if lines), "")


def _with_gradients(
    tested: FunctionUnderTest, conventions: Sequence[Convention], outcome: Outcome
) -> Outcome:
    """The same with a verdict on the gradients of a function whose output is right."""
    callee = tested.callee
    if callee.is_backward or not (callee.paired or callee.framework in ("torch", "jax")):
        return outcome
    own = replace(tested, forward=tested, answers={}, probes={})
    widest = max(conventions, key=lambda one: len(one.layout))
    outputs = _outputs(own, [widest])
    if not outputs:
        return replace(outcome, findings=(*outcome.findings, *no_gradients(own)))
    match, best = _match([([widest], outputs)], _units(_returned_dtype(own)))
    matcher = best.matcher if match is None else match.hypothesis.matcher
    found = replace(outcome, gradients=tuple(parts(matcher)))
    if match is not None and not match.mistakes:
        return found
    lines = _script(own, best if match is None else match.hypothesis)
    found = replace(found, fragilities=(), script=lines)
    begin = f"{outcome.function}'s output is right, its gradients"
    if match is None:
        near = (_nearest(own, best),)
        text = f"{begin} differ in a way that the catalogue does not know"
        return replace(found, verdict="unknown", summary=text, nearest=near)
    mistakes = tuple(named(*one, own, [widest]) for one in match.mistakes)
    text = f"{begin} are mistaken: {', and '.join(one.title for one in mistakes)}"
    return replace(found, verdict="mistaken", summary=text, mistakes=mistakes)


def _match(views: Sequence[View], units: Sequence[str]) -> tuple[Match | None, Hypothesis]:
    """What explains every output, if anything does, and the hypothesis with most right ones.

    Two mistakes are tried before half precision, within whose tolerance a small mistake is right.
    """

    def hypotheses(unit: str) -> list[Hypothesis]:
        practical = unit != units[0]
        return [
            Hypothesis(conventions, Matcher(outputs, UNITS[unit], practical))
            for conventions, outputs in views
        ]

    def share_wrong(one: Hypothesis) -> float:
        return len(one.matcher.wrong) / len(one.matcher.outputs)

    best_first = sorted(hypotheses(units[0]), key=share_wrong)

    def right_or_one(units: Sequence[str]) -> Match | None:
        matches = (_right_or_one(hypotheses(unit), unit) for unit in units)
        return next((match for match in matches if match is not None), None)

    match = right_or_one(units[:2]) or _two(best_first, units[0]) or right_or_one(units[2:])
    return match, best_first[0]


def _two(hypotheses: Sequence[Hypothesis], unit: str) -> Match | None:
    found = matching.pair([one.matcher.without_single_queries for one in hypotheses])
    return None if found is None else Match(hypotheses[found[0]], found[1], unit)


def _right_or_one(hypotheses: Sequence[Hypothesis], unit: str) -> Match | None:
    for one in hypotheses:
        if not one.matcher.wrong:
            return Match(one, (), unit)
    fewer = [(one, one.matcher.without_single_queries) for one in hypotheses]
    tried = [(one, one.matcher) for one in hypotheses]
    tried += [(one, matcher) for one, matcher in fewer if matcher is not one.matcher]
    for one, matcher in tried:
        if (mistake := matching.single(matcher)) is not None:
            return Match(one, (mistake,), unit)
    return None


def _lost_digits(returned: str, given: str, exact_to: str) -> tuple[Found, ...]:
    """The mistake of a result with fewer correct digits than its dtype and the inputs have."""
    if returned != given or returned == exact_to:
        return ()
    return ((COMPUTED_IN_FLOAT32 if exact_to == "float32" else COMPUTED_IN_HALF, RIGHT),)


def _nearest(tested: FunctionUnderTest, hypothesis: Hypothesis) -> Named:
    found, share = matching.nearest(hypothesis.matcher)
    text = f"it explains {share:.0%} of the outputs" if share else FAR
    return replace(named(*found, tested, hypothesis.conventions), breaks_on=text)


def _units(dtype: str) -> tuple[str, ...]:
    """From the precision of the returned dtype down to half precision."""
    order = ("float64", "float32", "float16")
    return order[order.index(dtype) :] if dtype in order else ("bfloat16",)


def _returned_dtype(tested: FunctionUnderTest) -> str:
    kinds = [answer.dtype for answer in tested.answers.values() if answer.output is not None]
    return kinds[0] if kinds and kinds[0] in UNITS else "float64"


def _outputs(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> list[ProbeOutput]:
    """Everything that ordinary probes gave under one hypothesis."""
    outputs = []
    for convention in conventions:
        for probe in tested.probes_for(convention):
            own = convention
            if probe.ability == "key mask":
                own = key_mask_convention(tested, convention, probe)
            answer = tested.ask(own, probe)
            if answer.output is not None and not _ran_by_accident(convention, probe):
                outputs.append(ProbeOutput(probe, answer.output.astype(np.float64)))
    return outputs


def _ran_by_accident(convention: Convention, probe: Probe) -> bool:
    """Whether a mask of keys was broadcast where the probe has a mask of cells."""
    if probe.ability == "mask" and convention.mask_shape in KEYS_ONLY:
        return True
    return (
        probe.keep is not None and probe.ability != "key mask" and convention.mask_shape == "keys"
    )


def _distinct(views: Sequence[View]) -> list[View]:
    """Without hypotheses that have no outputs, or the same as an earlier one."""
    kept: list[View] = []
    for conventions, outputs in views:
        if outputs and not any(_same_outputs(outputs, other) for _, other in kept):
            kept.append((conventions, outputs))
    return kept


def _same_outputs(one: list[ProbeOutput], other: list[ProbeOutput]) -> bool:
    return len(one) == len(other) and all(
        a.probe is b.probe and np.array_equal(a.output, b.output, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _summary(name: str, verdict: DiagnosisVerdict, exact_to: str, found: Sequence[Named]) -> str:
    titles = [one.title for one in found]
    match verdict:
        case "right":
            return f"{name} is right, to the last digits of {exact_to}"
        case "fragile":
            worst = next(one.title for one in found if one.severity == "fragile")
            return f"{name} is right on ordinary inputs, and fragile: {worst}"
        case "mistaken":
            return f"{name} is mistaken: {', and '.join(titles)}"
    text = f"{name} differs in a way that the catalogue does not know"
    return text if found[0].breaks_on == FAR else f"{text}; nearest: {titles[0]}"

"""The verdict on one reading of a function: is it right, has it one mistake or two, what breaks it.

Must not know other readings of the same function, but for the verdict on an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.description import assumptions, describe_call
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.calls.layout_search import RULED
from regard.diagnosis.calls.mechanism import as_mechanism
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging import matching
from regard.diagnosis.judging.added_scores import factor_of_cosines
from regard.diagnosis.judging.beyond_answers import (
    as_told,
    lost_digits,
    read_otherwise,
    seen_in_calls,
)
from regard.diagnosis.judging.built_in import PLAIN
from regard.diagnosis.judging.examples import named, without_example
from regard.diagnosis.judging.fitted import other_sharpness, temperature_of_cosines
from regard.diagnosis.judging.hypotheses import (
    Hypothesis,
    View,
    best_match,
    distinct_views,
)
from regard.diagnosis.judging.matching import Found
from regard.diagnosis.judging.measured import measured
from regard.diagnosis.judging.observations import (
    abilities,
    depends_on_blocks,
    findings,
    is_random,
    nan_throughout,
    no_gradients,
    parts,
    unusable,
)
from regard.diagnosis.judging.precision import HALF
from regard.diagnosis.judging.properties import properties
from regard.diagnosis.judging.reproduction import script
from regard.diagnosis.judging.robustness import fragilities
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.mistakes.calls import BLOCKS_MATTER, DROPOUT_LEFT_ON
from regard.diagnosis.mistakes.numerics import COMPUTED_IN_FLOAT32
from regard.diagnosis.reading.signature import MASKS, Callee
from regard.diagnosis.result import DiagnosisVerdict, Finding, Named, Outcome
from regard.scores import Cosine

# A cache of numbers alone, which code for inference keeps without their gradients.
KEPT_WITHOUT = re.compile(r"(cache|past|buf)\w*\[[^\]\n]*\] *= *[^\n]*\.(detach\(|data\b)")
# Tables of positions that are left out, of which a verdict says nothing.
TABLE = re.compile("rel|pos|table", re.IGNORECASE)


def of_reading(tested: FunctionUnderTest, so_far: Outcome | None) -> Outcome:
    """The verdict on one reading; the one on an earlier reading if nothing explains this one."""
    hypotheses = find_conventions(tested)
    name = tested.callee.name
    if not hypotheses:
        return unusable(tested)
    if (only_nan := nan_throughout(tested, hypotheses[0])) is not None:
        return only_nan
    dtype = _returned_dtype(tested)
    views = distinct_views(tested, hypotheses)
    if not views or tested.out_of_time:  # some of the probes alone prove nothing
        return unusable(tested)
    if (random := is_random(tested)) is not None:
        return _of_random(tested, hypotheses[0], random)
    if tested.callee.says_cosine and not tested.of_gradients and tested.stated.mechanism is None:
        of_cosines = _of_cosines(tested, views, _units(dtype)[0], so_far)
        if of_cosines is not None:
            return of_cosines
    units, layout_is_said = _units(dtype), _says_layout(tested, hypotheses)
    if so_far is not None and so_far.mistakes and not layout_is_said:
        match, _ = best_match(tested, views, units, most=0)
        if match is None:  # after a mistaken reading another one only counts if it is right
            return so_far
    match, best = best_match(tested, views, units, most=2 if so_far is None else 1)
    if match is None and layout_is_said:  # others ran by accident
        stated = replace(tested.stated, layout=tested.callee.layout)
        return of_reading(replace(tested, stated=stated, answers={}, probes={}), so_far)
    if match and _rests_on_a_guess(tested.callee, match.mistakes):
        match = None
    if match is None:
        return so_far or _unknown(tested, best, units[0])
    own, exact_to = match.hypothesis, match.exact_to
    first, given = own.conventions[0], own.conventions[0].dtype
    found, meant = as_told(tested, own, match.mistakes)
    found = found or read_otherwise(tested, own) or lost_digits(dtype, given, exact_to)
    found = (*found, *((one, RIGHT) for one in seen_in_calls(tested, own, bool(found))))
    mistakes = tuple(named(*one, tested, own.conventions, own.built_in) for one in found)
    fragile: tuple[Named, ...] = ()
    if own.built_in.linear:  # an example would compare it with softmax
        mistakes = tuple(replace(one, example=None, usual_check="") for one in mistakes)
    elif not (mistakes or meant or tested.of_gradients):
        notes = _narrower(tested, own, dtype, exact_to)
        fragile = (*notes, *fragilities(tested, own.conventions[0], exact_to, own.built_in))
    breaks = any(one.severity == "fragile" for one in fragile)
    verdict: DiagnosisVerdict = "mistaken" if mistakes else "fragile" if breaks else "right"
    plain = own.built_in == PLAIN and not tested.of_gradients
    outcome = Outcome(
        name,
        verdict,
        _summary(name, verdict, exact_to, _conditions(tested, own, meant), (*mistakes, *fragile)),
        _called(tested, own),
        exact_to,
        mistakes,
        (),
        fragile,
        tuple(abilities(tested, own.conventions, own.matcher)),
        tuple(findings(tested)),
        tuple(properties(tested, first, UNITS[exact_to])) if plain else (),
        tuple(parts(own.matcher)) if tested.of_gradients else (),
        script=_script(tested, own),
    )
    more = tested.callee.around or replace(own.built_in, softcap=None) != PLAIN
    kept = any(KEPT_WITHOUT.search(text) for _, text in tested.callee.blocks)
    if more or meant or kept or not outcome.ok:
        return outcome
    return _with_gradients(tested, own, outcome)


def _of_cosines(
    tested: FunctionUnderTest, views: Sequence[View], unit: str, so_far: Outcome | None
) -> Outcome | None:
    """The verdict on a function whose scores are cosines; None if they are none."""
    outputs = [own for _, own in views]
    units = dict.fromkeys([unit, "float32"])  # a small number may be added to roots
    fits = (temperature_of_cosines(outputs, UNITS[one]) for one in units)
    temperature = next((one for one in fits if one is not None), None)
    if temperature is None:
        factors = (factor_of_cosines(tested, conventions) for conventions, _ in views)
        factor = next((one for one in factors if one is not None), None)
        if factor is None:
            return None
        temperature = float(f"{1 / factor:.6g}")  # as near as the scores are seen
    width = tested.probes_for(views[0][0][0])[0].sizes["D"]
    other = other_sharpness(tested.callee.sharpness, temperature, width)
    if other is not None:
        name, called = tested.callee.name, describe_call(tested, views[0][0], None)
        text = f"{name} is mistaken: {other.title}"
        return Outcome(name, "mistaken", text, called, mistakes=(without_example(other),))
    stated = replace(tested.stated, mechanism=as_mechanism(Cosine(temperature), None))
    return of_reading(replace(tested, stated=stated, answers={}, probes={}), so_far)


def _rests_on_a_guess(callee: Callee, found: Sequence[Found]) -> bool:
    """Whether a mistake is one of what may be something else than was guessed.

    What is ignored, or, beside a mask that is known, what hides keys.
    """
    guessed = {one.role for one in callee.parameters if one.guessed}
    known = {one.role for one in callee.parameters if not one.guessed}
    kinds = {*MASKS, "key_mask"}
    second = bool(guessed & kinds and known & kinds)
    return bool(guessed) and any(
        one.name.endswith("_ignored") or (second and one.family == "hiding") for one, _ in found
    )


def _says_layout(tested: FunctionUnderTest, hypotheses: Sequence[Sequence[Convention]]) -> bool:
    """Whether the code says one of several layouts in which a function of arrays answered."""
    said = tested.callee.layout
    if not said or tested.stated.layout is not None or tested.callee.kind not in ("arrays", "self"):
        return False
    return any(one.layout == said for one in hypotheses[0]) and len(hypotheses[0]) > 1


def _of_random(
    tested: FunctionUnderTest, conventions: Sequence[Convention], random: Finding
) -> Outcome:
    """The verdict on a function whose answers differ: unusable, but for dropout left on."""
    name, called = tested.callee.name, describe_call(tested, conventions, None)
    more: dict[str, Any] = dict(findings=(random, *findings(tested)))
    if any(one.role == "no" for one in tested.callee.parameters):
        dropout = named(DROPOUT_LEFT_ON, RIGHT, tested, conventions)
        text = f"{name} is mistaken: {dropout.title}"
        return Outcome(name, "mistaken", text, called, mistakes=(dropout,), **more)
    text = f"{name} gives another result each time it is called"
    return Outcome(name, "unusable", text, called, **more)


def _script(tested: FunctionUnderTest, own: Hypothesis) -> str:
    """Lines that show a wrong number, for the last of the layouts that have one."""
    of_weights = tested.callee.is_backward and tested.callee.kind == "projected"
    if own.built_in != PLAIN or of_weights:  # the lines know plain attention alone
        return ""
    wrong = [own.matcher.outputs[number].probe for number in own.matcher.wrong]
    written = (script(tested, convention, wrong) for convention in own.conventions)
    return next((lines for lines in written if lines), "")


def _with_gradients(tested: FunctionUnderTest, forward: Hypothesis, outcome: Outcome) -> Outcome:
    """The same with a verdict on the gradients of a function whose output is right."""
    callee = tested.callee
    if callee.is_backward or not (callee.paired or callee.framework in ("torch", "jax")):
        return outcome
    if callee.reads_more or forward.conventions[0].joined:
        return outcome
    if callee.steps:  # one token after the other: a cache keeps what earlier gradients need
        return outcome
    if outcome.exact_to in (*HALF, "int8", "int4"):  # too few digits to tell a mistake by
        return outcome
    own = replace(tested, forward=tested, answers={}, probes={})
    widest = max(forward.conventions, key=lambda one: len(one.layout))
    judged = {one.probe.name for one in forward.matcher.outputs}  # others ran by accident
    views = [
        (conventions, kept)
        for conventions, outputs in distinct_views(own, [[widest]])
        if (kept := [one for one in outputs if _name_of_forward(one.probe) in judged])
    ]
    if not views:
        return replace(outcome, findings=(*outcome.findings, *no_gradients(own)))
    units = _units(_returned_dtype(own))  # scores that are float32 inside are so in gradients too
    known = outcome.exact_to if outcome.exact_to in units else units[0]
    match, best = best_match(own, views, units[units.index(known) :])
    matcher = best.matcher if match is None else match.hypothesis.matcher
    found = replace(outcome, gradients=tuple(parts(matcher)))
    if match is not None and not match.mistakes:
        return found
    lines = _script(own, best if match is None else match.hypothesis)
    found = replace(found, fragilities=(), script=lines)
    begin = f"{outcome.function}'s output is right, its gradients"
    if match is None:
        near = tuple(one for one in [_nearest(own, best)] if one is not None)
        text = f"{begin} differ in a way that the catalogue does not know"
        return replace(found, verdict="unknown", summary=text, nearest=near)
    mistakes = tuple(named(*one, own, [widest]) for one in match.mistakes)
    text = f"{begin} are mistaken: {', and '.join(one.title for one in mistakes)}"
    return replace(found, verdict="mistaken", summary=text, mistakes=mistakes)


def _name_of_forward(probe: Probe) -> str:
    before = probe.forward if isinstance(probe, GradientProbe) else None
    return probe.name if before is None else before.name


def _called(tested: FunctionUnderTest, own: Hypothesis) -> str:
    first = own.conventions[0]
    answer = tested.ask(first, tested.probes_for(first)[0])
    text = describe_call(tested, own.conventions, answer)
    return text if own.built_in == PLAIN else f"{text}; it computes {own.built_in} too"


def _unknown(tested: FunctionUnderTest, best: Hypothesis, unit: str) -> Outcome:
    """What was measured of a function that nothing explains, and the nearest mistake if any is."""
    name, first = tested.callee.name, best.conventions[0]
    plain = not tested.of_gradients
    facts = tuple(measured(tested, first, UNITS[unit])) if plain else ()
    broken = next((fact for fact in facts if fact.broken), None)
    if broken is not None:  # no right attention has it, whatever else this one computes
        facts = (broken, *(fact for fact in facts if fact is not broken))
    mistakes = () if broken is None else (without_example(all_mistakes()[broken.broken]),)
    if not mistakes and plain and depends_on_blocks(tested, first):
        mistakes = (without_example(BLOCKS_MATTER),)
    near = None if mistakes else _nearest(tested, best)
    tried = tuple(abilities(tested, best.conventions, best.matcher))
    wrong = [one for one in tried if one.state == "wrong"]
    text = f"{name} differs in a way that the catalogue does not know"
    options = {*RULED} - {"long"}
    if [one.name in options for one in wrong] == [True] and any(x.state == "right" for x in tried):
        without = f"is right without {wrong[0].title}"
        text = f"{name} {without}, and differs with it in a way that the catalogue does not know"
    if mistakes:
        text = f"{name} is mistaken: {mistakes[0].title}"
    if facts and (broken is not None or not mistakes):
        text += f"; measured: {facts[0].text}"
    elif near is not None:
        text += f"; nearest: {near.title}"
    return Outcome(
        name,
        "mistaken" if mistakes else "unknown",
        text,
        _called(tested, best),
        unit,
        mistakes,
        () if near is None else (near,),
        (),
        tried,
        (*(Finding("measured", fact.text) for fact in facts[1:]), *findings(tested)),
        tuple(properties(tested, first, UNITS[unit])) if plain else (),
        tuple(parts(best.matcher)) if tested.of_gradients else (),
        script=_script(tested, best),
        measured=bool(mistakes),
    )


def _narrower(
    tested: FunctionUnderTest, own: Hypothesis, returned: str, exact_to: str
) -> tuple[Named, ...]:
    """A note if float64 comes back with the digits of float32, as after an upcast of the scores."""
    if returned != own.conventions[0].dtype or returned != "float64" or exact_to != "float32":
        return ()
    found = named(COMPUTED_IN_FLOAT32, RIGHT, tested, own.conventions)
    return (replace(found, severity="note", breaks_on="the digits of float64 alone"),)


def _nearest(tested: FunctionUnderTest, hypothesis: Hypothesis) -> Named | None:
    found = matching.nearest(hypothesis.matcher)
    if found is None:
        return None
    text = f"it explains {found[1]:.0%} of the outputs"
    return replace(named(*found[0], tested, hypothesis.conventions), breaks_on=text)


def _units(dtype: str) -> tuple[str, ...]:
    """From the precision of the returned dtype down to half precision."""
    order = ("float64", "float32", "float16")
    return order[order.index(dtype) :] if dtype in order else ("bfloat16",)


def _returned_dtype(tested: FunctionUnderTest) -> str:
    kinds = [answer.dtype for answer in tested.answers.values() if answer.output is not None]
    return kinds[0] if kinds and kinds[0] in UNITS else "float64"


def _conditions(tested: FunctionUnderTest, own: Hypothesis, meant: str) -> str:
    """What a function computes besides plain attention, and what its verdict takes for granted."""
    beside = "" if own.built_in == PLAIN else f" with {own.built_in}"
    if tables := [name for name in tested.callee.without if TABLE.search(name)]:
        beside = f"{beside} without its {' and '.join(tables)}"
    beside += f" with {meant}" if meant else ""
    mechanism = tested.stated.mechanism
    if tested.callee.says_cosine and mechanism is not None and mechanism.score is not None:
        beside += f" with {mechanism.score} as its score"
    assumed = " and ".join(assumptions(tested, own.conventions[0]))
    return f"{beside}, if {assumed}" if assumed else beside


def _summary(
    name: str,
    verdict: DiagnosisVerdict,
    exact_to: str,
    beside: str,
    found: Sequence[Named],
) -> str:
    match verdict:
        case "right":
            return f"{name} is right{beside}, to the last digits of {exact_to}"
        case "fragile":
            worst = next(one.title for one in found if one.severity == "fragile")
            return f"{name} is right on ordinary inputs{beside}, and fragile: {worst}"
    return f"{name} is mistaken: {', and '.join(one.title for one in found)}"

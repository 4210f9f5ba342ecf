"""`diagnose`: from a function to a verdict.

Owns the order of the questions: can it be called, is it right, is it one mistake or two, and which
inputs break it. Each is answered in a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regard.diagnosis.calls.calling import Once
from regard.diagnosis.calls.convention import Ask, Convention
from regard.diagnosis.calls.convention_search import (
    RULED,
    SEARCH_SECONDS,
    as_layout,
    find_conventions,
    likely_readings,
)
from regard.diagnosis.calls.description import assumptions, describe_call
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.calls.mechanism import as_mechanism
from regard.diagnosis.calls.patience import Patience
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest, StatedConventions
from regard.diagnosis.forms.inspection import inspect_function
from regard.diagnosis.judging import matching
from regard.diagnosis.judging.added_scores import diagonal_is_seen, factor_of_cosines, seen_as
from regard.diagnosis.judging.beyond_answers import (
    as_told,
    lost_digits,
    read_otherwise,
    seen_in_calls,
)
from regard.diagnosis.judging.built_in import PLAIN, with_built_in
from regard.diagnosis.judging.by_properties import HELD, by_properties
from regard.diagnosis.judging.examples import named, without_example
from regard.diagnosis.judging.fitted import other_sharpness, temperature_of_cosines
from regard.diagnosis.judging.hypotheses import (
    Hypothesis,
    View,
    best_match,
    built_in_of,
    distinct_views,
)
from regard.diagnosis.judging.matching import Found
from regard.diagnosis.judging.measured import measured
from regard.diagnosis.judging.misread import misread
from regard.diagnosis.judging.observations import (
    abilities,
    depends_on_blocks,
    findings,
    is_random,
    lines_never_run,
    nan_throughout,
    no_gradients,
    parts,
    unusable,
)
from regard.diagnosis.judging.precision import HALF
from regard.diagnosis.judging.properties import properties
from regard.diagnosis.judging.repair import repaired
from regard.diagnosis.judging.robustness import fragilities
from regard.diagnosis.judging.round_lengths import of_round_lengths
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.mistakes.calls import BLOCKS_MATTER, DROPOUT_LEFT_ON
from regard.diagnosis.mistakes.numerics import COMPUTED_IN_FLOAT32
from regard.diagnosis.process.changed_code import ChangedCode
from regard.diagnosis.process.jax_traces import Traces
from regard.diagnosis.process.running import answer_question
from regard.diagnosis.reading.signature import MASKS, Callee
from regard.diagnosis.reproduction import origin, script
from regard.diagnosis.result import DiagnosisVerdict, Finding, Named, Outcome, Property
from regard.diagnosis.stated import check_stated, parse_signature
from regard.errors import OptionError
from regard.scores import Cosine

TIME_LIMIT = 10.0
GUESS_SECONDS = 2.0  # of the search, where roles are guesses and the axes of all are documented
MOST_PARTS = 8  # of a file that never ran, which are shown
READINGS_SECONDS = 2.0  # after these no other way of reading a function is judged


def in_this_process(
    function: Any,
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    limit: float,
) -> tuple[list[Callee], Ask]:
    """What is known of a function in this process, and how to put questions to it."""
    found = inspect_function(function, roles, heads, library)
    traces: dict[int, Traces] = {}
    code = ChangedCode(function)
    callees = [replace(callee, blocks=code.blocks) for _, callee in found]
    return callees, lambda question: answer_question(found, question, limit, traces, code)


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
    check_stated(causal, mask, window, library, heads, time_limit)
    mechanism = as_mechanism(score, normalize)
    axes = None if layout is None else as_layout(layout)
    callees, ask = connect(function, roles, heads, library, float(time_limit))
    patience, put = Patience(), Once(ask)
    callee = callees[0]
    if mechanism is not None and callee.kind not in ("arrays", "self"):
        raise OptionError(
            f"{callee.name} takes embeddings or packed heads; score and normalize are for "
            "functions of query, key and value"
        )
    stated = StatedConventions(causal, mask, window, mechanism, axes)
    found_at = origin(function)
    every = [
        FunctionUnderTest(one, stated, float(time_limit), put, origin=found_at) for one in callees
    ]
    found = None
    for option in dict.fromkeys(one.option for one in callees):
        own = _of_option([one for one in every if one.callee.option == option], patience)
        if found is None or (found.ok and own.verdict in ("mistaken", "unknown")):
            found = _under(option, own)
        if not found.ok:
            break
    assert found is not None
    return replace(found, calls=put.calls, seconds=round(time.monotonic() - begin, 3))


def _under(option: str, found: Outcome) -> Outcome:
    """The verdict on a function with another option than its default, which it says."""
    if not option:
        return found
    summary = found.summary.replace(found.function, f"{found.function} with {option}", 1)
    return replace(found, summary=summary)


def _of_option(all_tested: Sequence[FunctionUnderTest], patience: Patience) -> Outcome:
    """The verdict on all readings with one option."""
    callees = [one.callee for one in all_tested]
    whole = next((one for one in all_tested if "residual" not in one.callee.without), all_tested[0])
    found: Outcome | None = None
    guessed = callees[0].axes and any(one.guessed for one in callees[0].parameters)
    outcome = _of_properties(whole) if guessed or callees[0].opaque else None
    if callees[0].opaque and outcome is None:
        raise OptionError(callees[0].opaque)
    if outcome is not None and (callees[0].opaque or outcome.mistakes):
        return outcome
    seconds = SEARCH_SECONDS if outcome is None else GUESS_SECONDS
    likely = of_round_lengths(all_tested, likely_readings(all_tested, seconds))
    if len(likely) > 1 and not likely[0].of_gradients:  # of the right weights, whatever is wrong
        seen = [one for one in likely if _scores_are_seen(one)]
        likely = seen or [one for one in likely if _diagonal_is_seen(one)] or likely
    for tested in likely:
        own = _verdict(tested, found)
        if tested.callee.fault not in ("", *(one.name for one in own.mistakes)):
            continue  # it is not right if tokens lie as a mistake has them
        if found is None or (own.mistakes and not found.mistakes) or own.ok:
            found = own
        if own.ok or patience.spent > READINGS_SECONDS:
            break
    found = found or unusable(likely[0])
    if found.verdict in ("unusable", "unknown") and (callees[0].widths or callees[0].axes):
        by_rule = None if likely[0].out_of_time else _of_properties(whole)
        if by_rule is not None and (by_rule.mistakes or found.verdict == "unusable"):
            found = by_rule
    around = any(one.around for one in callees)  # a change may be one of what is around attention
    if not around and (found.verdict == "unknown" or found.measured):
        found = repaired(likely[0], found, lambda changed: _verdict(changed, None))
    if found.verdict == "unknown" or found.measured:
        found = misread(likely[0], found)
    return _with_lines_never_run(likely[0], found) if found.ok else found


def _with_lines_never_run(tested: FunctionUnderTest, found: Outcome) -> Outcome:
    """The same verdict, which says of which lines it says nothing."""
    parts = list(lines_never_run(tested))
    found = replace(found, findings=(*found.findings, *parts[:MOST_PARTS]))
    which = [one.text.split(" never")[0] for one in parts if one.name == "not_run"]
    if not which:
        return found
    more = " and more" * (len(which) > 3)
    return replace(found, summary=f"{found.summary}; {' and '.join(which[:3])}{more} never ran")


def _scores_are_seen(tested: FunctionUnderTest) -> bool:
    """Whether a softmax of the function gets the scores that this reading of its weights gives.

    They may be those of positions that it computes besides.
    """
    conventions = [one[0] for one in find_conventions(tested)]
    besides = [PLAIN, *(one for one in built_in_of(tested, square=True) if not one.is_combined)]
    return any(
        seen_as(tested, one, partial(with_built_in, own)) == (True, True)
        for own in besides
        for one in conventions
    )


def _diagonal_is_seen(tested: FunctionUnderTest) -> bool:
    return any(diagonal_is_seen(tested, one[0]) for one in find_conventions(tested))


def _verdict(tested: FunctionUnderTest, so_far: Outcome | None) -> Outcome:
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
    match, best = best_match(tested, views, _units(dtype), pairs=so_far is None)
    if match is None and _says_layout(tested, hypotheses):  # others ran by accident
        stated = replace(tested.stated, layout=tested.callee.layout)
        return _verdict(replace(tested, stated=stated, answers={}, probes={}), so_far)
    if match and _rests_on_a_guess(tested.callee, match.mistakes):
        match = None
    if match is None:
        return so_far or _unknown(tested, best, _units(dtype)[0])
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
    if more or meant or not outcome.ok:
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
    return _verdict(replace(tested, stated=stated, answers={}, probes={}), so_far)


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


def _of_properties(tested: FunctionUnderTest) -> Outcome | None:
    """The verdict on a function whose scores are not known, by what holds for every attention."""
    seen = by_properties(tested)
    if seen is None or not (seen.broken or seen.held):
        return None
    name, known = tested.callee.name, all_mistakes()
    mistakes = tuple(without_example(known[one]) for one in seen.broken)
    mistakes = tuple(
        replace(one, why=f"{seen.seen.get(one.name, '')} {one.why}".strip()) for one in mistakes
    )
    text = f"{name} computes scores that are not known here; nothing measured is wrong"
    if mistakes:
        text = f"{name} is mistaken: {', and '.join(one.title for one in mistakes)}"
    return Outcome(
        name,
        "mistaken" if mistakes else "unknown",
        text,
        f"{name} with {seen.call}",
        mistakes=mistakes,
        findings=tuple(findings(tested)),
        properties=tuple(Property(one, HELD[one], True) for one in seen.held),
    )


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

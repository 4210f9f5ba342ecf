"""`diagnose`: from a function to a verdict.

Owns the order of the questions: which of its readings are likely, what is the verdict on each, and
what is asked where none explains it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regard.diagnosis.calls.calling import Once
from regard.diagnosis.calls.convention import Ask, Convention
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.layout_search import as_layout
from regard.diagnosis.calls.likely import SEARCH_SECONDS, likely_readings
from regard.diagnosis.calls.mechanism import as_mechanism
from regard.diagnosis.calls.patience import Patience
from regard.diagnosis.calls.under_test import FunctionUnderTest, StatedConventions
from regard.diagnosis.forms.inspection import inspect_function
from regard.diagnosis.judging.added_scores import (
    MISPLACED,
    cells_are_seen,
    diagonal_is_seen,
    seen_as,
)
from regard.diagnosis.judging.built_in import PLAIN, with_built_in
from regard.diagnosis.judging.by_properties import HELD, by_properties
from regard.diagnosis.judging.examples import without_example
from regard.diagnosis.judging.hypotheses import (
    built_in_of,
)
from regard.diagnosis.judging.misread import misread
from regard.diagnosis.judging.observations import (
    findings,
    lines_never_run,
    unusable,
)
from regard.diagnosis.judging.one_reading import of_reading
from regard.diagnosis.judging.repair import repaired
from regard.diagnosis.judging.reproduction import origin
from regard.diagnosis.judging.round_lengths import of_round_lengths
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.process.changed_code import ChangedCode
from regard.diagnosis.process.jax_traces import Traces
from regard.diagnosis.process.running import answer_question
from regard.diagnosis.reading.signature import WITH_TABLES, Callee
from regard.diagnosis.result import Ability, Finding, Outcome, Property
from regard.diagnosis.stated import check_stated, parse_signature
from regard.errors import OptionError

TIME_LIMIT = 10.0
GUESS_SECONDS = 2.0  # of the search, where roles are guesses and the axes of all are documented
TURNED = "weights_not_transposed"  # where a reading with the others finds something, it is that
MOST_PARTS = 8  # of a file that never ran, which are shown
READINGS_SECONDS = 2.0  # after these no other way of reading a mistaken function is judged


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
        readings = [one for one in every if one.callee.option == option]
        if option == WITH_TABLES and found is not None:
            found = _with_tables(readings, found, patience)
            continue
        own = _of_option(readings, patience)
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


def _with_tables(
    readings: Sequence[FunctionUnderTest], found: Outcome, patience: Patience
) -> Outcome:
    """The verdict on a layer that is right without its tables: with them, where these are known."""
    likely = _likely(readings, SEARCH_SECONDS)
    own = _of_likely(likely, patience) if find_conventions(likely[0]) else None
    if own is None or not (own.ok or own.mistakes):
        return found
    text = own.summary.replace(own.function, f"{own.function} with its tables", 1)
    return replace(found, findings=(*found.findings, Finding("tables", text))) if own.ok else own


def _of_option(all_tested: Sequence[FunctionUnderTest], patience: Patience) -> Outcome:
    """The verdict on all readings with one option."""
    callees = [one.callee for one in all_tested]
    whole = next((one for one in all_tested if "residual" not in one.callee.without), all_tested[0])
    guessed = callees[0].axes and any(one.guessed for one in callees[0].parameters)
    outcome = _of_properties(whole) if guessed or callees[0].opaque else None
    if callees[0].opaque and outcome is None:
        raise OptionError(callees[0].opaque)
    if outcome is not None and (callees[0].opaque or outcome.mistakes):
        return outcome
    likely = _likely(all_tested, SEARCH_SECONDS if outcome is None else GUESS_SECONDS)
    found = _of_likely(likely, patience) or unusable(likely[0])
    if found.verdict in ("unusable", "unknown") and (callees[0].widths or callees[0].axes):
        by_rule = None if likely[0].out_of_time else _of_properties(whole)
        if by_rule is not None and (by_rule.mistakes or found.verdict == "unusable"):
            found = by_rule
    around = any(one.around for one in callees)  # a change may be one of what is around attention
    if not around and (found.verdict == "unknown" or found.measured):
        found = repaired(likely[0], found, lambda changed: of_reading(changed, None))
    if found.verdict == "unknown" or found.measured:
        found = misread(likely[0], found)
    return _as_far_as_it_runs(likely[0], found) if found.ok else found


def _likely(all_tested: Sequence[FunctionUnderTest], seconds: float) -> list[FunctionUnderTest]:
    """The readings that answer, of the right weights where these are seen."""
    likely = of_round_lengths(all_tested, likely_readings(all_tested, seconds))
    if len(likely) > 1 and not likely[0].of_gradients:  # of the right weights, whatever is wrong
        for are_seen in (_scores_are_seen, _is_seen(diagonal_is_seen), _is_seen(cells_are_seen)):
            if seen := [one for one in likely if are_seen(one)]:
                likely = seen
                break
    return likely


def _of_likely(likely: Sequence[FunctionUnderTest], patience: Patience) -> Outcome | None:
    """The verdict on the first reading that is right, or else the first with a mistake."""
    found: Outcome | None = None
    shown_by = likely[0]
    for tested in likely:
        own = of_reading(tested, found)
        if tested.callee.fault not in ("", *(one.name for one in own.mistakes)):
            continue  # it is not right if tokens lie as a mistake has them
        if found is not None and own.ok and _hides(tested.callee, shown_by.callee, found):
            break
        weak = found is not None and (not found.mistakes or found.names == (TURNED,))
        if found is None or (own.mistakes and weak) or own.ok:
            found, shown_by = own, tested
        if own.ok or patience.spent > (READINGS_SECONDS if found.mistakes else SEARCH_SECONDS):
            break
    return found


def _hides(callee: Callee, shown_by: Callee, found: Outcome) -> bool:
    """Whether an object was made with other sizes, as of a square window, which hide a mistake."""
    misplaced = any(one.name == MISPLACED for one in found.mistakes)
    return misplaced and callee.made != shown_by.made


def _as_far_as_it_runs(tested: FunctionUnderTest, found: Outcome) -> Outcome:
    """The same verdict, which says of which lines it says nothing.

    It is unknown what a function does with a mask or a cache that it takes and always refuses.
    """
    if refused := _always_refused(found.abilities):
        ends = f"with {' and '.join(refused)} it raises an error: nothing is known of that"
        broken = tuple(one for one in found.fragilities if one.name != "raises_at_the_edge")
        text = f"{found.summary}; {ends}"
        found = replace(found, verdict="unknown", summary=text, fragilities=broken)
    parts = list(lines_never_run(tested))
    found = replace(found, findings=(*found.findings, *parts[:MOST_PARTS]))
    which = [one.text.split(" never")[0] for one in parts if one.name == "not_run"]
    if not which:
        return found
    more = " and more" * (len(which) > 3)
    return replace(found, summary=f"{found.summary}; {' and '.join(which[:3])}{more} never ran")


def _always_refused(asked: Sequence[Ability]) -> list[str]:
    """What a function says that it takes, and raises an error with, however it is given.

    A NotImplementedError says that it does not take it.
    """
    states = {x.name: x.state for x in asked if not x.detail.startswith("NotImplementedError")}
    masks = {states[name] for name in ("mask", "key mask") if name in states}
    found = ["a mask"] * ("refused" in masks and "right" not in masks)
    return found + ["a cache"] * (states.get("cache") == "refused")


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


def _is_seen(
    what: Callable[[FunctionUnderTest, Convention], bool],
) -> Callable[[FunctionUnderTest], bool]:
    return lambda tested: any(what(tested, one[0]) for one in find_conventions(tested))


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

"""The one small change of the code with which an attention is right, if there is one.

A function that nothing in the catalogue explains is called with one change after the other: first
on the probe that tells most, and on all others only where that one is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.calling import Once
from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.patience import Patience
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe, Variant
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.built_in import with_built_in
from regard.diagnosis.judging.fitted import temperature_of_cosines
from regard.diagnosis.judging.hypotheses import View, built_in_of, distinct_views
from regard.diagnosis.judging.matching import Matcher, ProbeOutput
from regard.diagnosis.judging.small_changes import changes_of
from regard.diagnosis.mistakes import linear
from regard.diagnosis.reading.changed_text import Block, Change, loses_a_result, switched_off
from regard.diagnosis.reading.source_text import parsed
from regard.diagnosis.result import Named, Outcome

SECONDS = 6.0  # of the search
MORE_SECONDS = 3.0  # of it, after which no second change is looked for
MOST_REPAIRS = 3
NEAR = 1e-5  # as near as a change has to bring the first output, before all are judged
NEAR_INTEGERS = 2e-2  # the same where numbers pass through integers of 8 bits
MOST_VIEWS = 3
# Positions that a function computes, in its code and in what is said of its call.
POSITIONED = re.compile(r"rotary|rope|alibi", re.IGNORECASE)
NUMBER = re.compile(r"\b\d+(\.\d*)?")
MAXIMUM = re.compile(r"max(imum)?\(")
# Code that makes integers. Coarser ones are right too within the digits of integers.
ROUNDS = re.compile(r"\b(round|rint|floor)_?\(|\b(astype|to)\([\w.]*int8|\.char\(\)")


@dataclass(frozen=True)
class Repair:
    """A line of code, and what would be right in its place."""

    line: int
    before: str
    after: str


def repaired(
    tested: FunctionUnderTest, unknown: Outcome, verdict: Callable[[FunctionUnderTest], Outcome]
) -> Outcome:
    """The verdict on a function that one small change of its code makes right; else what it was."""
    answered = {one.name for one in unknown.abilities if one.state in ("right", "wrong")}
    code = "\n".join(text for _, text in tested.callee.blocks)

    def is_right(changed: FunctionUnderTest) -> bool:
        own = verdict(changed)
        able = {one.name for one in own.abilities if one.state == "right"}
        sizes = {p.sizes["S"] for (_, p), one in changed.answers.items() if one.output is not None}
        # In one length much looks like attention; what was answered may not fail now.
        # A change that takes away what its code says that it computes makes nothing right.
        kept = POSITIONED.search(code) is None or POSITIONED.search(own.called) is not None
        # Nor does one that loses the maximum which its code subtracts.
        kept &= MAXIMUM.search(code) is None or own.verdict == "right"
        return own.ok and not own.mistakes and len(sizes) > 1 and answered <= able and kept

    repairs = _repairs_of(tested, unknown, is_right)
    if not repairs:
        return unknown
    own, *others = repairs
    title = f"line {own.line} should be `{own.after}`"
    why = f"It is `{own.before}`. With this one change every number that was tried is right."
    if others:
        either = " or ".join(f"`{one.after}` in line {one.line}" for one in others)
        why += f" So it is with {either} instead."
    lines = ("", own.after) if tested.callee.framework == "torch" else (own.after, "")
    # What was measured of the weights is of a computation that is not meant.
    findings = tuple(one for one in unknown.findings if one.name != "measured")
    return replace(
        unknown,
        verdict="mistaken",
        summary=f"{unknown.function} is mistaken: {title}",
        mistakes=(Named("one_change", "", "wrong", title, why, "", *lines),),
        nearest=(),
        findings=findings,
        properties=(),
        measured=False,
    )


def _repairs_of(
    tested: FunctionUnderTest, unknown: Outcome, is_right: Callable[[FunctionUnderTest], bool]
) -> list[Repair]:
    """Changes of different lines after which `is_right` holds, the likeliest first."""
    blocks = tested.callee.blocks
    guessed = any(one.guessed for one in tested.callee.parameters)
    if not blocks or guessed or tested.hung or tested.out_of_time:
        return []
    asked, conventions = tested, find_conventions(tested)
    if unknown.gradients and not tested.callee.is_backward:  # these differ, its output is right
        asked = replace(tested, forward=tested, answers={}, probes={})
    views = distinct_views(asked, conventions)[:MOST_VIEWS]
    patience, aims = Patience(), list(_aims(asked, views, UNITS[unknown.exact_to or "float64"]))
    found: dict[int, Repair] = {}
    of_integers = [*_lines_that_round(blocks)] if tested.quantises else []
    for change in changes_of(blocks) if aims else ():
        line, before, after = change.lines(blocks)
        if any(line in lines for lines in of_integers):
            continue
        if tested.quantises and NUMBER.sub("", before) == NUMBER.sub("", after):
            continue  # coarser integers are right within fewer digits
        if patience.spent > (MORE_SECONDS if found else SECONDS) or len(found) == MOST_REPAIRS:
            break
        changed = with_change(asked, change)
        met = next((aim for aim in aims if aim.is_met(changed)), None)
        loses = met is not None and loses_a_result(blocks, change)
        if met is not None and not loses and not _switches_off(asked, change, met):
            own = Repair(*change.lines(blocks))
            if own.line not in found and is_right(with_change(tested, change)):
                found[own.line] = own
    return list(found.values())


def _lines_that_round(blocks: Sequence[Block]) -> Iterator[range]:
    """The lines of functions that round numbers to integers."""
    for first, text in blocks:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef):
                own = ast.get_source_segment(text, node) or ""
                if ROUNDS.search(own):
                    yield range(first + node.lineno - 1, first + (node.end_lineno or 0))


def _switches_off(tested: FunctionUnderTest, change: Change, aim: _Aim) -> bool:
    """Whether a change makes the rest of its line of no effect, as a rule that hides nothing."""
    before, after = aim.output(tested), aim.output(with_change(tested, change))
    for off, off_before in switched_off(tested.callee.blocks, change):
        one, other = (aim.output(with_change(tested, own)) for own in (off, off_before))
        if one is not None and other is not None and _same(one, after) and not _same(other, before):
            return True
    return False


def _same(one: Array, other: Array | None) -> bool:
    return other is not None and one.shape == other.shape and np.allclose(one, other, 0, NEAR)


def with_change(tested: FunctionUnderTest, change: Change) -> FunctionUnderTest:
    """The function as its code would be after a change; nothing is known of it yet."""
    put = Once(lambda question: tested.put(replace(question, change=change)))
    forward = None if tested.forward is None else with_change(tested.forward, change)
    return replace(tested, put=put, forward=forward, answers={}, probes=dict(tested.probes))


@dataclass(frozen=True, eq=False)
class _Aim:
    """What attention gives on a probe on which the function is wrong, in any of its forms."""

    convention: Convention
    probe: Probe
    right: Array  # one after the other
    tolerances: Array
    of_cosines: bool  # whose temperature is not known

    def output(self, tested: FunctionUnderTest) -> Array | None:
        return tested.ask(self.convention, self.probe).output

    def is_met(self, tested: FunctionUnderTest) -> bool:
        output = self.output(tested)
        if output is None or output.shape != self.right.shape[1:]:
            return False
        if self.of_cosines:
            found = ProbeOutput(self.probe, output)
            return temperature_of_cosines([[found]], NEAR, ways=1) is not None
        apart = np.abs(self.right - output).reshape(len(self.right), -1).max(-1)
        return bool((apart <= self.tolerances).any())


def _aims(tested: FunctionUnderTest, views: Sequence[View], unit: float) -> Iterator[_Aim]:
    seen = set()
    cosines = tested.callee.says_cosine and not tested.of_gradients
    for conventions, outputs in views:
        matcher = Matcher(outputs, unit)
        if not matcher.wrong:
            continue
        order = [n for n in matcher.informative_first if outputs[n].probe.scale is None]
        probe = outputs[(order or [matcher.informative_first[0]])[0]].probe
        convention = next(one for one in conventions if probe in tested.probes_for(one))
        if (convention, probe) in seen:
            continue
        seen.add((convention, probe))
        right, tolerances = [], []
        for own, variant in _forms(tested, probe):
            expected = own.output(variant)
            right.append(expected)
            tolerances.append((NEAR_INTEGERS if tested.quantises else NEAR) * own.largest(variant))
        yield _Aim(convention, probe, np.stack(right), np.array(tolerances), cosines)


def _forms(tested: FunctionUnderTest, probe: Probe) -> Iterator[tuple[Probe, Variant]]:
    """Plain attention, and with what may be computed besides."""
    yield probe, RIGHT
    if tested.callee.says_linear and not tested.of_gradients:
        for variants in linear.RIGHT_ONES.values():
            yield from ((probe, one) for one in variants)
    for own in built_in_of(tested, square=tested.callee.kind != "arrays"):
        if (other := with_built_in(own, probe)) is not None:
            yield other, RIGHT

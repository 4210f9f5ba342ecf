"""What breaks a function that is right on ordinary inputs: overflow, empty rows, hidden NaN.

Outputs for extreme inputs are matched with the fragile entries of the catalogue; what none of them
explains is reported too. Must not decide the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from regard.diagnosis.calls.convention import Convention, agrees
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe, Variant
from regard.diagnosis.calls.probes import extreme_probes, ready_probe, stretched
from regard.diagnosis.calls.under_test import FunctionUnderTest, with_keys_as_values
from regard.diagnosis.judging import matching
from regard.diagnosis.judging.built_in import PLAIN, BuiltIn, with_built_in
from regard.diagnosis.judging.examples import named
from regard.diagnosis.judging.matching import Found, Matcher, ProbeOutput
from regard.diagnosis.mistakes import FRAGILE
from regard.diagnosis.mistakes.calls import POSITIONS_ROUNDED
from regard.diagnosis.mistakes.numerics import HALF_CONSTANT, INTEGERS_TRUNCATED
from regard.diagnosis.process.half_positions import counts_in_half
from regard.diagnosis.result import Named


def fragilities(
    tested: FunctionUnderTest, convention: Convention, exact_to: str, built_in: BuiltIn = PLAIN
) -> Iterator[Named]:
    """Everything that breaks a right function, the simplest first."""
    if convention.one_query or convention.joined or tested.callee.reads_more:
        return
    usual_alone = (built_in.added, built_in.places, tested.callee.around)
    if any(one is not None for one in usual_alone):  # it was seen for usual rows alone
        return
    yield from _changed_arguments(tested)
    if counts_in_half(tested, convention, built_in.positions):  # and is not written for that
        rounded = named(POSITIONS_ROUNDED, RIGHT, tested, [convention])
        yield replace(rounded, severity="fragile", breaks_on="bfloat16, beyond position 256")
    probes = _probes(tested, convention)
    base = RIGHT
    for ability in ("range", "hiding", "empty row", "hidden NaN"):
        own = [probe for probe in probes if probe.ability == ability]
        answers = [(p, tested.ask(_with_mask_shape(convention, p), p)) for p in own]
        # A constant such as −10⁹ that is added leaves seven digits of a score.
        unit = UNITS["float32"] if ability == "empty row" else UNITS[exact_to]
        outputs = [
            ProbeOutput(besides, a.output.astype(float))
            for p, a in answers
            if a.output is not None and (besides := with_built_in(built_in, p)) is not None
        ]
        matcher = Matcher(outputs, max(unit, UNITS[exact_to]))
        broken = [one for n, one in enumerate(outputs) if not matcher.agrees(n, base)]
        if broken:
            names = ", ".join(one.probe.name for one in broken)
            if (found := _explanation(matcher, base, ability)) is None:
                yield _unexplained(broken[0], names)
            else:
                base = base | found[1] if ability == "range" else base
                yield replace(named(*found, tested, [convention], built_in), breaks_on=names)
        for probe, answer in answers:
            if answer.kind == "raised":
                title, why = f"it raises {answer.problem}", "An error is better than wrong numbers."
                yield _uncatalogued("raises_at_the_edge", "note", title, why, probe.name)
    if tested.callee.kind == "arrays" and built_in == PLAIN:
        yield from _more_axes(tested, convention)
        if tested.stated.mechanism is None:
            yield from _other_dtypes(tested, convention)


def _changed_arguments(tested: FunctionUnderTest) -> Iterator[Named]:
    changed = next((one.changed for one in tested.answers.values() if one.changed), ())
    if changed:
        found = _uncatalogued(
            "changes_its_arguments",
            "fragile",
            f"it changes its argument {', '.join(changed)} in place",
            "The caller's array then holds other numbers, and a second call gives another result.",
            "every call",
        )
        yield replace(
            found,
            numpy="scores = scores / np.sqrt(D)  # not scores /= …, nor scores[…] = …",
            torch="scores = scores / math.sqrt(D)  # no div_(), masked_fill_() on an argument",
        )


def _probes(tested: FunctionUnderTest, convention: Convention) -> Sequence[Probe]:
    if tested.callee.kind != "arrays":
        plain = next(probe for probe in tested.probes_for(convention) if probe.keep is None)
        return [stretched(plain, "large scores"), stretched(plain, "rows far apart")]
    always = convention.causal_always
    masks = _takes_masks(tested) and not always
    probes: Sequence[Probe]
    probes = extreme_probes(np.dtype(convention.dtype), masks=masks, causal_always=always)
    if "key_value" in tested.callee.roles:
        probes = [with_keys_as_values(one) for one in probes]
    mechanism = tested.stated.mechanism
    if mechanism is None:
        return probes
    # Scores that overflow are made of the score itself.
    plain = next(probe for probe in tested.probes_for(convention) if probe.keep is None)
    large = [stretched(plain, "large scores"), stretched(plain, "rows far apart")]
    return [
        *large,
        *mechanism.of(one for one in probes if one.ability in ("empty row", "hidden NaN")),
    ]


def _takes_masks(tested: FunctionUnderTest) -> bool:
    return bool({"mask", "keep", "hide", "bias"} & tested.callee.roles.keys())


def _with_mask_shape(convention: Convention, probe: Probe) -> Convention:
    by_key = probe.keep is not None and probe.keep.ndim == 1
    return replace(convention, mask_shape="cells") if by_key else convention


def _explanation(matcher: Matcher, base: Variant, ability: str) -> Found | None:
    """The first fragile entry that explains every output, on top of what was found before."""
    entries = (mistake for mistake in FRAGILE if mistake.breaks == ability)
    ways = ((mistake, variant) for mistake in entries for variant in mistake.variants)
    return next((found for found in ways if matcher.fits(base | found[1])), None)


def _unexplained(broken: ProbeOutput, names: str) -> Named:
    what = "NaN" if np.isnan(broken.output).any() else "wrong numbers"
    severity = "fragile" if broken.probe.ability in ("range", "hiding") else "note"
    title = f"it gives {what}, though ordinary inputs are right"
    why = "The catalogue has no name for this."
    return _uncatalogued("breaks_at_the_edge", severity, title, why, names)


def _uncatalogued(name: str, severity: str, title: str, why: str, breaks_on: str) -> Named:
    """Something that is not in the catalogue."""
    return Named(name, "numerics", severity, title, why, "", "", "", breaks_on=breaks_on)


def _more_axes(tested: FunctionUnderTest, convention: Convention) -> Iterator[Named]:
    """A function that refuses more axes may still run, and be wrong, if all sizes are equal."""
    if convention.layout != "LD" or convention.causal_always:
        return
    for layout, axes in (("HLD", "three axes"), ("BHLD", "four axes")):
        other = replace(convention, layout=layout)
        square, *rest = tested.probes_for(other)
        if tested.ask(other, square).output is not None:
            continue
        for cube in (probe for probe in rest if probe.name.startswith("cube")):
            answer = tested.ask(other, cube)
            if answer.output is None or tested.is_right(other, cube):
                continue
            output = [ProbeOutput(cube, answer.output)]
            found = matching.single(Matcher(output, UNITS["float32"]))
            if found is not None:
                text = f"{axes} of equal length"
                yield replace(named(*found, tested, [other]), severity="note", breaks_on=text)
                return


def _other_dtypes(tested: FunctionUnderTest, convention: Convention) -> Iterator[Named]:
    """What integers and float16 do to a function that is right."""
    causal = convention.causal_always
    probe = ready_probe("integers", "plain", (1, 1, 1, 4, 4, 4, 4), 400, causal=causal)
    whole = {name: np.round(2 * array) for name, array in probe.inputs.items()}
    probe = replace(probe, inputs=whole)
    answer = tested.ask(replace(convention, dtype="int64"), probe)
    if answer.output is not None:
        right = probe.result(probe.right)
        truncated = agrees(answer.output, np.trunc(right), 1e-9)
        if truncated and not agrees(answer.output, right, 1e-3):
            found = named(INTEGERS_TRUNCATED, RIGHT, tested, [convention])
            yield replace(found, breaks_on="integers")
    if not _takes_masks(tested) or tested.callee.framework != "numpy" or causal:
        return
    half, probes = replace(convention, dtype="float16"), tested.probes_for(convention)
    plain = next(probe for probe in probes if not probe.has_rules)
    mask = next(probe for probe in probes if probe.ability == "mask")
    without, masked = tested.ask(half, plain).output, tested.ask(half, mask).output
    if without is None or masked is None:
        return
    if np.isfinite(without).all() and not np.isfinite(masked).all():
        found = named(HALF_CONSTANT, RIGHT, tested, [convention])
        yield replace(found, breaks_on="float16 with a mask")

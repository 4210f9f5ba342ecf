"""What breaks a function that is right on ordinary inputs: overflow, empty rows, hidden NaN.

Each probe at the edge is matched with the fragile entries of the catalogue; what none of them
explains is told all the same. Must not decide the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from regard.diagnosis import matching
from regard.diagnosis.convention import Answer, Convention
from regard.diagnosis.convention_search import UNITS, Trial, agrees
from regard.diagnosis.examples import named
from regard.diagnosis.matching import Candidates, Matcher, Seen
from regard.diagnosis.mistakes import FRAGILE
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.mistakes.numerics import HALF_CONSTANT, INTEGERS_TRUNCATED
from regard.diagnosis.probe import RIGHT, Probe, Variant, edges, ready, stretched
from regard.diagnosis.result import Named


def fragilities(trial: Trial, way: Convention, exact_to: str) -> Iterator[Named]:
    """Everything that breaks a right function, the plainest first."""
    if way.layout == "D":
        return
    yield from _changes(trial)
    probes = _probes(trial, way)
    base = RIGHT
    for ability in ("range", "hiding", "empty row", "hidden NaN"):
        own = [probe for probe in probes if probe.ability == ability]
        answers = [(probe, trial.ask(_edge_way(way, probe), probe)) for probe in own]
        # A constant such as −10⁹ that is added leaves seven digits of a score.
        unit = UNITS["float32"] if ability == "empty row" else UNITS[exact_to]
        seen = [Seen(p, a.output.astype(np.float64)) for p, a in answers if a.output is not None]
        matcher = Matcher(seen, max(unit, UNITS[exact_to]), Candidates())
        broken = [n for n in range(len(seen)) if not matcher.agrees(n, base)]
        names = ", ".join(seen[n].probe.name for n in broken)
        if broken:
            found = _explained(matcher, base, ability)
            if found is None:
                yield _unexplained(seen[broken[0]], names)
            else:
                mistake, variant = found
                base = base | variant if ability == "range" else base
                yield replace(named(mistake, variant, trial, [way]), breaks_on=names)
        yield from (_raises(probe, answer) for probe, answer in answers if answer.kind == "raised")
    if trial.subject.kind == "arrays":
        yield from _more_axes(trial, way)
        yield from _kinds(trial, way)


def _probes(trial: Trial, way: Convention) -> Sequence[Probe]:
    if trial.subject.kind != "arrays":
        plain = next(probe for probe in trial.probes_for(way) if probe.keep is None)
        return [stretched(plain, "large scores"), stretched(plain, "rows far apart")]
    masks = _takes_masks(trial) and not way.causal_always
    return list(edges(np.dtype(way.dtype), masks=masks, causal_always=way.causal_always))


def _takes_masks(trial: Trial) -> bool:
    return bool({"mask", "keep", "hide", "bias"} & trial.subject.roles.keys())


def _explained(matcher: Matcher, base: Variant, ability: str) -> tuple[Mistake, Variant] | None:
    """The first fragile entry that explains every answer, on top of what was found before."""
    for mistake in FRAGILE:
        for variant in mistake.variants if mistake.breaks == ability else ():
            if matcher.fits(base | variant, range(len(matcher.seen))):
                return mistake, variant
    return None


def _changes(trial: Trial) -> Iterator[Named]:
    """Arguments that are not what they were after the call."""
    changed = next((answer.changed for answer in trial.answers.values() if answer.changed), ())
    if changed:
        names = ", ".join(changed)
        yield Named(
            "changes_its_arguments",
            "numerics",
            "fragile",
            f"it changes its argument {names} in place",
            "Whoever calls it finds other numbers in their own array afterwards; a second call "
            "gives another result.",
            "",
            "scores = scores / np.sqrt(D)  # not scores /= …, and no assignment into an argument",
            "scores = scores / math.sqrt(D)  # no div_(), masked_fill_() on what was passed in",
            breaks_on="every call",
        )


def _more_axes(trial: Trial, way: Convention) -> Iterator[Named]:
    """What refuses more axes may still run, and be wrong, where all sizes are equal."""
    if way.layout != "LD" or way.causal_always:
        return
    for layout in ("HLD", "BHLD"):
        other = replace(way, layout=layout)
        square = trial.probes_for(other)[0]
        cubes = [probe for probe in trial.probes_for(other) if probe.name.startswith("cube")]
        if trial.ask(other, square).output is not None:
            continue
        for cube in cubes:
            answer = trial.ask(other, cube)
            if answer.output is None or trial.is_right(other, cube):
                continue
            matcher = Matcher([Seen(cube, answer.output)], UNITS["float32"], Candidates())
            if (found := matching.single(matcher)) is not None:
                axes = "three axes" if layout == "HLD" else "four axes"
                own = named(*found, trial, [other])
                yield replace(own, severity="note", breaks_on=f"{axes} of equal length")
                return


def _edge_way(way: Convention, probe: Probe) -> Convention:
    if probe.keep is not None and probe.keep.ndim == 1:
        return replace(way, mask_shape="cells")
    return way


def _unexplained(seen: Seen, names: str) -> Named:
    got = seen.output
    what = "NaN" if np.isnan(got).any() else "other numbers than it should"
    return Named(
        "breaks_at_the_edge",
        "numerics",
        "fragile" if seen.probe.ability in ("range", "hiding") else "note",
        f"it gives {what} where ordinary inputs are right",
        "The catalogue has no name for this.",
        "",
        "",
        "",
        breaks_on=names,
    )


def _raises(probe: Probe, answer: Answer) -> Named:
    return Named(
        "raises_at_the_edge",
        "numerics",
        "note",
        f"it raises {answer.problem}",
        "An exception is better than a wrong number.",
        "",
        "",
        "",
        breaks_on=probe.name,
    )


def _kinds(trial: Trial, way: Convention) -> Iterator[Named]:
    """Integers and float16: what another kind of number does to a function that is right."""
    probe = ready("integers", "plain", (1, 1, 1, 4, 4, 4, 4), 400, causal=way.causal_always)
    whole = {name: np.round(2 * array) for name, array in probe.inputs.items()}
    probe = replace(probe, inputs=whole)
    answer = trial.ask(replace(way, dtype="int64"), probe)
    if answer.output is not None:
        right = probe.result(probe.right)
        cut = agrees(answer.output, np.trunc(right), 1e-9)
        if cut and not agrees(answer.output, right, 1e-3):
            yield replace(named(INTEGERS_TRUNCATED, RIGHT, trial, [way]), breaks_on="integers")
    if not _takes_masks(trial) or trial.subject.framework != "numpy" or way.causal_always:
        return
    mild = next(probe for probe in trial.probes_for(way) if probe.ability == "mask")
    half = replace(way, dtype="float16")
    plain = next(probe for probe in trial.probes_for(way) if not probe.has_rules)
    without, masked = trial.ask(half, plain), trial.ask(half, mild)
    if without.output is None or masked.output is None:
        return
    if np.isfinite(without.output).all() and not np.isfinite(masked.output).all():
        yield replace(named(HALF_CONSTANT, RIGHT, trial, [way]), breaks_on="float16 with a mask")

"""Mistakes with a number in them that no list can have: a scale, a factor, something added.

The number is fitted to one output and has to explain all others. Must not know how a function is
called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.mechanism import as_mechanism
from regard.diagnosis.calls.probe import RIGHT, Probe, Values, Variant
from regard.diagnosis.judging.matching import Found, Matcher, ProbeOutput
from regard.diagnosis.mistakes.entry import Mistake, Replacement, replacing
from regard.diagnosis.mistakes.mechanisms import cosine_ways
from regard.diagnosis.mistakes.scores import OUTPUT, SCALE
from regard.diagnosis.mistakes.windows import (
    EMPTY_SLOTS,
    NEVER_FILLED,
    NEWEST_SLOT,
    never_filled,
    with_empty_slots,
    without_newest_slot,
)
from regard.scores import Cosine

# Factors of q·k, by how people write them.
FORMULAS: dict[str, Callable[[float], float]] = {
    "1/√(2·D)": lambda d: (2 * d) ** -0.5,
    "1/(2·√D)": lambda d: 0.5 * d**-0.5,
    "2/√D": lambda d: 2 * d**-0.5,
    "1/(2·D)": lambda d: 0.5 / d,
    "2/D": lambda d: 2 / d,
    "1/D²": lambda d: d**-2.0,
    "1/D^¾": lambda d: d**-0.75,
    "1/∛D": lambda d: d ** (-1 / 3),
    "D": lambda d: d,
    "−1/√D": lambda d: -(d**-0.5),
    "−1/D": lambda d: -1 / d,
    "−1": lambda d: -1.0,
    "1/√(D + 1)": lambda d: (d + 1) ** -0.5,
    "1/√(D − 1)": lambda d: (d - 1) ** -0.5,
    "1/(√D + 1)": lambda d: 1 / (d**0.5 + 1),
    "1/(1 + D)": lambda d: 1 / (1 + d),
    "1/log D": lambda d: 1 / np.log(d),
    "1/log₂ D": lambda d: 1 / np.log2(d),
    "√2/√D": lambda d: (2 / d) ** 0.5,
}
FROM = np.concatenate([-np.geomspace(0.02, 8, 9), np.geomspace(0.02, 8, 17)])
TEMPERATURES = np.geomspace(0.05, 100, 12)  # one divided by these
STEPS = 12
BUFFERS = np.geomspace(8, 8192, 16)  # slots of a cache
MOST_SHARPNESS = 100.0  # the usual limit of what multiplies cosines


def fitted(matcher: Matcher) -> Found | None:
    """A mistake whose numbers were fitted, if it explains every output."""
    return next((one for one in _candidates(matcher) if matcher.fits(one[1])), None)


def _candidates(matcher: Matcher) -> Iterator[Found]:
    plain = [n for n in matcher.wrong if not matcher.outputs[n].probe.has_rules]
    if matcher.outputs[0].probe.score != "dot":
        return
    number = min(plain or matcher.wrong, key=lambda n: matcher.outputs[n].output.size)
    if (added := _added(matcher, number)) is not None:
        yield added
    if (scaled := _scaled(matcher)) is not None:
        yield scaled
    if matcher.outputs[number].probe.causal:
        if any(one.probe.chunks for one in matcher.outputs):
            yield replace(NEVER_FILLED, variants=(empty := never_filled(),)), empty
        yield from of_buffers(matcher)


def of_buffers(matcher: Matcher) -> Iterator[Found]:
    """What a cache returns where slots are seen that should not be: its size is fitted."""
    first = matcher.informative_first[0]
    tokens = matcher.outputs[first].probe.sizes["S"]
    for mistake, of_size in ((EMPTY_SLOTS, with_empty_slots), (NEWEST_SLOT, without_newest_slot)):
        size = _fitted_number(matcher, first, of_size, BUFFERS)
        if size is not None:  # or as many slots as there are tokens
            variant = of_size(round(size) if size > tokens else 0)
            yield replace(mistake, variants=(variant,)), variant


def _scaled(matcher: Matcher) -> Found | None:
    """Another factor of q·k: one number, or one for each width."""
    of_width: dict[int, int] = {}
    for n in matcher.informative_first:
        probe = matcher.outputs[n].probe
        if probe.scale is None and not probe.chunks:
            of_width.setdefault(probe.sizes["D"], n)
    found = {}
    for width, n in of_width.items():
        factor = _factor(matcher, n)
        if factor is None:
            return None
        found[width] = factor
    if not found:
        return None

    def scaled(values: Values, probe: Probe) -> Array:
        own = found.get(probe.sizes["D"], np.nan) if probe.scale is None else probe.scale
        return np.asarray(values["scores"] * own)

    width = max(found)
    formula = next(
        (
            name
            for name, value in FORMULAS.items()
            if all(np.isclose(value(d), factor, rtol=1e-4) for d, factor in found.items())
        ),
        "",
    )
    same = len(found) > 1 and np.ptp(list(found.values())) < 1e-6 * abs(found[width])
    says = formula or (f"{found[width]:.4g} whatever D is" if same else f"{found[width]:.4g}")
    at = "" if formula or same else f" for D = {width}"
    others = ", ".join(f"{factor:.4g} for D = {d}" for d, factor in sorted(found.items()))
    negative = all(factor < 0 for factor in found.values())
    why = "Scores have the wrong sign: the key that fits best gets least. " if negative else ""
    return _mistake(
        "scores_negated" if negative else "scale_of_another_size",
        f"the scores are multiplied by {says}{at} instead of 1/√D",
        f"{why}Measured: {others}; 1/√D is {width**-0.5:.4g} for D = {width}.",
        SCALE,
        replacing(scaled=scaled),
    )


def _factor(matcher: Matcher, number: int) -> float | None:
    """The factor of q·k that gives one output, or None."""
    return factor_of(matcher, number, "scaled", lambda values, probe: values["scores"], FROM)


def factor_of(
    matcher: Matcher, number: int, step: str, of: Replacement, begin: Array
) -> float | None:
    """The factor of other scores that gives one output if a step is their product, or None."""

    def product(factor: float) -> Variant:
        return replacing(**{step: lambda values, probe: of(values, probe) * factor})

    return _fitted_number(matcher, number, product, begin)


def _fitted_number(
    matcher: Matcher, number: int, variant_of: Callable[[float], Variant], begin: Array
) -> float | None:
    """The number that makes a variant return one output, or None: by Newton's method."""
    own = matcher.outputs[number]
    probe, got = own.probe, own.output
    if not np.isfinite(got).all():
        return None

    def apart(x: float) -> Array:
        return np.asarray(matcher.compute(number, variant_of(x)) - got)

    tolerance = probe.tolerance(matcher.unit) * max(1.0, float(np.abs(got).max()))
    best = sorted(begin, key=lambda x: float(np.square(apart(x)).sum()))[:2]
    for x in best:
        off = apart(x)
        for _ in range(STEPS):
            small = 1e-6 * abs(x)
            slope = (apart(x + small) - off) / small
            change = float((slope * off).sum() / max(float(np.square(slope).sum()), 1e-300))
            x -= float(np.clip(change, -0.5 * abs(x), 0.5 * abs(x)))
            off = apart(x)
            if abs(change) < 1e-14 * abs(x):
                break
        if np.abs(off).max() <= tolerance:
            return float(x)
    return None


# By what cosines are multiplied; with less, every token gets the same, whatever the scores.
LEAST_FACTOR, MOST_FACTOR = 1e-2, 1e4


def temperature_of_cosines(
    views: Sequence[Sequence[ProbeOutput]], unit: float, *, ways: int | None = None
) -> float | None:
    """The temperature of a function whose scores are cosines, or None.

    They may be made in any of the first `ways`: the first one is right.
    """
    unit_one = as_mechanism(Cosine(), None)
    assert unit_one is not None
    for outputs in views:
        free = [one for one in outputs if not one.probe.has_rules and one.probe.scale is None]
        own = (one for one in outputs if one.probe.keep is None and one.probe.window is None)
        free = free or [one for one in own if not one.probe.chunks]  # it is always causal
        first = min(free, key=lambda one: one.output.size, default=None)
        for probe in () if first is None else unit_one.of([first.probe]):
            assert first is not None
            matcher = Matcher([ProbeOutput(probe, first.output)], unit)
            for way in islice(cosine_ways(), ways):
                factor = factor_of(matcher, 0, "scores", way, TEMPERATURES)
                if factor is not None and LEAST_FACTOR < factor < MOST_FACTOR:
                    short = float(f"{1 / factor:.6g}")  # 0.1 for 0.09999999999999981
                    return short if abs(short * factor - 1) < 1e-12 else 1 / factor
    return None


def other_sharpness(log: float | None, temperature: float, width: int) -> Mistake | None:
    """The mistake of cosines that are multiplied by another number than the learned one.

    What is learned is its logarithm, `log`; lengths of vectors may be powers of their width.
    """
    if log is None:
        return None
    meant, got = min(math.exp(log), MOST_SHARPNESS), 1 / temperature
    if any(math.isclose(got, meant * width**power, rel_tol=1e-3) for power in (0, 0.5, 1, -0.5)):
        return None
    title = f"cosines are multiplied by {got:.4g} instead of exp({log:.4g}) = {meant:.4g}"
    why = "What is learned is a logarithm, which has the limit; its exponential is the factor."
    lines = (
        "scores = cosines * np.exp(np.minimum(logit_scale, np.log(100)))",
        "scores = cosines * self.logit_scale.clamp(max=math.log(100)).exp()",
    )
    return _mistake("scale_of_another_size", title, why, lines, RIGHT)[0]


def _added(matcher: Matcher, number: int) -> Found | None:
    """What is added to the output, or multiplies it: numbers, and arrays of the inputs."""
    own = matcher.outputs[number]
    probe = own.probe
    right = probe.result(probe.right)
    arrays = {"1": np.ones_like(right)}
    for name in ("embeddings", "queries", "keys", "values"):
        rows = probe.right.get(name)
        if rows is not None and rows.shape == right.shape and name != "queries":
            arrays[name] = rows
    if not np.isfinite(own.output).all():
        return None
    columns = np.stack([right.ravel(), *(array.ravel() for array in arrays.values())], -1)
    found, *_ = np.linalg.lstsq(columns, own.output.ravel(), rcond=None)
    clear = np.abs(found) > 1e-5
    factor = float(found[0])
    if abs(factor) < 1e-3:  # the values, or what else is added, are all that there is
        return None
    added = {
        name: float(x)
        for name, x, is_one in zip(arrays, found[1:], clear[1:], strict=True)
        if is_one
    }
    if len(added) > 1 or (not added and abs(factor - 1) < 1e-5):
        return None
    off = columns @ np.where(clear, found, 0) - own.output.ravel()
    if np.abs(off).max() > 1e-4:
        return None

    def result(values: Values, probe: Probe) -> Array:
        extra = sum(x * (1.0 if one == "1" else probe.right[one]) for one, x in added.items())
        return np.asarray(factor * probe.result(probe.right) + extra)

    titles = []
    if abs(factor - 1) > 1e-5:
        titles.append(f"the output is multiplied by {factor:.4g}")
    for name, x in added.items():
        what = (
            f"{x:.4g}"
            if name == "1"
            else f"{'' if abs(x - 1) < 1e-5 else f'{x:.4g} times '}the {name}"
        )
        titles.append(f"{what} {'is' if name == '1' else 'are'} added to the output")
    residual = added.keys() - {"1"} != set()
    why = (
        "A residual connection belongs outside attention."
        if residual
        else "The output is a blend of the values alone, and the weights of a row add up to 1."
    )
    return _mistake(
        "residual_of_inputs" if residual else "output_changed",
        " and ".join(titles),
        why,
        OUTPUT,
        replacing(**{probe.result_step: result}),
    )


def _mistake(name: str, title: str, why: str, lines: tuple[str, str], variant: Variant) -> Found:
    return Mistake(name, "one head", title, why, *lines, (variant,)), variant

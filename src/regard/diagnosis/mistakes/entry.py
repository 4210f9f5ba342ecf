"""What an entry of the catalogue is, and the few pieces that many entries replace steps with.

Must not know any single mistake, nor how one is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.diagnosis.probe import Probe, Rule, Values, Variant

Array = NDArray[Any]
Family = Literal["one head", "hiding", "numerics", "heads and projections", "caching and windows"]
# wrong: ordinary inputs give wrong numbers. fragile: some inputs do, others do not. note: a choice
# that others make differently, or a habit worth knowing.
Severity = Literal["wrong", "fragile", "note"]
Replacement = Callable[[Values, Probe], Array]
# Large and finite, as people write it; by itself harmless.
NINES = -1e9


@dataclass(frozen=True, eq=False)
class Mistake:
    """One wrong way of computing attention, as the textbook with some steps replaced.

    A mistake may be written in several ways that differ where a row sees nothing, say; each is a
    variant, and agreeing with one of them is enough.
    """

    name: str
    family: Family
    title: str
    why: str
    numpy: str
    torch: str
    variants: tuple[Variant, ...]
    severity: Severity = "wrong"
    breaks: str = ""  # the ability at the edge that shows it, if only that does


@dataclass(frozen=True, eq=False)
class Equivalent:
    """Something that looks like a mistake, or like another one, and is the same mathematically."""

    name: str
    title: str
    same_as: str  # "right", or the name of a mistake
    why: str
    variant: Variant


def replacing(absent: bool = True, **steps: Replacement) -> Variant:
    """The textbook with these steps replaced."""
    return Variant(steps, absent)


def raw_scores(values: Values) -> Array:
    """The scores before anything is hidden, under the name of the last step that made them."""
    names = ("biased", "capped", "scaled")
    return next(values[name] for name in names if name in values)


def logits(values: Values) -> Array:
    """The scores that softmax gets."""
    return values["masked"] if "masked" in values else raw_scores(values)


def softmax(scores: Array, axis: int | tuple[int, ...] = -1) -> Array:
    """Softmax as it is written by hand: a slice of nothing but −∞ is NaN."""
    shifted = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=axis, keepdims=True))


def raw_weights(values: Values, probe: Probe) -> Array:
    """Exponentials over their sums, where 0/0 is NaN as NumPy has it."""
    return np.asarray(values["exponentials"] / values["row_sums"][..., None])


def grouped(array: Array, heads: int) -> Array:
    """Keys or values with one head for each query head, (B, H, S, X)."""
    return np.repeat(array, heads // array.shape[1], axis=1)


def blend(weights: Array, values: Array) -> Array:
    """Weights times values, each query head with its key head."""
    return np.asarray(weights @ grouped(values, weights.shape[1]))


Rules = tuple[Rule, ...]
EVERY: Rules = ("mask", "causal", "window")
# Which rules a mistake is made with: with all at once, with the mask alone, with causal alone, or
# with one after the other.
GROUPS: tuple[tuple[Rules, ...], ...] = (
    (EVERY,),
    (("mask",),),
    (("causal", "window"),),
    (("mask",), ("causal", "window")),
)


def kept(probe: Probe, rules: Rules) -> Array:
    """The cells that these rules keep, (B, H, L, S)."""
    size = probe.sizes
    cells = np.ones((size["B"], size["H"], size["L"], size["S"]), bool)
    for rule in rules:
        cells &= probe.rule(rule)
    return cells


def _others(groups: tuple[Rules, ...]) -> Rules:
    return tuple(rule for rule in EVERY if not any(rule in rules for rules in groups))


def _present(probe: Probe, groups: tuple[Rules, ...]) -> list[Rules]:
    """Those groups of which a probe has a rule: without a mask nobody comes to its line."""
    having = {
        "mask": probe.keep is not None,
        "causal": probe.causal,
        "window": probe.window is not None,
    }
    return [rules for rules in groups if any(having[rule] for rule in rules)]


def scored(change: Callable[[Array, Array], Array]) -> tuple[Variant, ...]:
    """Hidden keys are not left out: `change(scores, keep)` stands in place of the masked scores."""

    def variant(groups: tuple[Rules, ...]) -> Variant:
        def masked(values: Values, probe: Probe) -> Array:
            scores = raw_scores(values)
            for rules in _present(probe, groups):
                scores = change(scores, kept(probe, rules))
            return np.where(kept(probe, _others(groups)), scores, -np.inf)

        return Variant({"masked": masked}, absent=False)

    return tuple(variant(groups) for groups in GROUPS)


def weighed(change: Callable[[Array, Array], Array]) -> tuple[Variant, ...]:
    """Nothing is hidden before softmax: `change(weights, keep)` stands in place of the weights."""

    def variant(groups: tuple[Rules, ...]) -> Variant:
        def masked(values: Values, probe: Probe) -> Array:
            return np.where(kept(probe, _others(groups)), raw_scores(values), -np.inf)

        def weights(values: Values, probe: Probe) -> Array:
            shares = softmax(logits(values))
            for rules in _present(probe, groups):
                shares = change(shares, kept(probe, rules))
            return shares

        return Variant({"masked": masked, "weights": weights}, absent=False)

    return tuple(variant(groups) for groups in GROUPS)


def seeing(change: Callable[[Array, Probe], Array], *rules: Rule) -> tuple[Variant, ...]:
    """The wrong keys are hidden: `change(keep, probe)` stands in place of what the rules keep.

    Rows that then see nothing are 0, NaN, or a mean of everything, as it was written.
    """

    def visible(values: Values, probe: Probe) -> Array:
        return np.asarray(change(kept(probe, rules), probe) & kept(probe, _others((rules,))))

    def filled(values: Values, probe: Probe) -> Array:
        return np.where(values["visible"], raw_scores(values), NINES)

    return (
        Variant({"visible": visible}),
        Variant({"visible": visible}, absent=False),
        Variant({"visible": visible, "masked": filled}, absent=False),
    )

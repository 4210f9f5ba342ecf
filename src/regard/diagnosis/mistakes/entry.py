"""What an entry of the catalogue is, and the pieces that many entries share.

Must not know any single mistake, nor how one is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import EVERY_RULE, Probe, Rule, Values, Variant
from regard.diagnosis.mistakes.programs import program_of
from regard.diagnosis.mistakes.written import assignments, variants_of

Family = Literal[
    "one head",
    "hiding",
    "numerics",
    "heads and projections",
    "caching and windows",
    "blocks of keys",
    "positions, softcap and sinks",
    "gradients",
]
# wrong: ordinary inputs give wrong numbers. fragile: some inputs do, others do not. note: a choice
# that others make differently, or a habit worth knowing.
Severity = Literal["wrong", "fragile", "note"]
Replacement = Callable[[Values, Probe], Array]
Variants = tuple[Variant, ...]
# The line to write instead, in NumPy and in torch.
Lines = tuple[str, str]
# By name: title, why, variants, and the line to write if it is not that of the whole table.
Entries = Mapping[str, tuple[str, str, Variants] | tuple[str, str, Variants, Lines]]
# Large and finite, as people write −∞.
NINES = -1e9


@dataclass(frozen=True, eq=False)
class Mistake:
    """One wrong way of computing attention: the textbook with some steps replaced.

    People write a mistake in several ways that differ in details such as rows without a visible
    key. Each way is a variant, and agreeing with one of them is enough.
    """

    name: str
    family: Family
    title: str
    why: str
    numpy: str
    torch: str
    variants: Variants
    severity: Severity = "wrong"
    breaks: str = ""  # the ability of the extreme probes that show it, if only those do
    code: str = ""  # the wrong line in an example
    program: str = ""  # of the examples, in which that line is

    @property
    def replaced(self) -> dict[str, str]:
        """The wrong expressions of its example, by what they take the place of."""
        return dict(assignments(self.code))


def written(
    family: Family,
    lines: Lines,
    table: Mapping[str, tuple[str | Lines, ...]],
    program: str = "",
    severity: Severity = "wrong",
) -> tuple[Mistake, ...]:
    """The mistakes of a table, with what they share.

    By name: title, why, the wrong line as people write it, each other way in which they do, and a
    cure of its own at the end.
    """
    found = []
    for name, (title, why, *codes) in table.items():
        own = codes.pop() if isinstance(codes[-1], tuple) else lines
        ways = tuple(way for code in codes for way in variants_of(code))
        shown = program or program_of(frozenset(dict(assignments(codes[0]))))
        found.append(
            Mistake(
                name, family, title, why, *own, ways, severity, code=codes[0], program=shown
            )
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Equivalent:
    """What looks like a mistake, or like another one, and is mathematically the same."""

    name: str
    title: str
    same_as: str  # "right", or the name of a mistake
    why: str
    variant: Variant


def mistakes(
    family: Family, lines: Lines, table: Entries, severity: Severity = "wrong", breaks: str = ""
) -> tuple[Mistake, ...]:
    """The mistakes of a table, with what they share."""
    return tuple(
        Mistake(name, family, title, why, *(own or [lines])[0], variants, severity, breaks)
        for name, (title, why, variants, *own) in table.items()
    )


def equivalents(entries: Mapping[str, tuple[str, str, str, Variant]]) -> tuple[Equivalent, ...]:
    """Entries by name: title, what it is the same as, why, and the variant."""
    return tuple(Equivalent(name, *entry) for name, entry in entries.items())


def replacing(**steps: Replacement) -> Variant:
    """The textbook with these steps replaced."""
    return Variant(steps)


def both(**steps: Replacement) -> Variants:
    """The textbook with these steps replaced: hidden keys are skipped, or their scores used."""
    return Variant(steps), Variant(steps, absent=False)


def raw_scores(values: Values) -> Array:
    """The scores before anything is hidden."""
    names = ("biased", "positioned", "capped", "scaled", "scores")
    return next(values[name] for name in names if name in values)


def logits(values: Values) -> Array:
    """The scores that softmax gets."""
    return values["masked"] if "masked" in values else raw_scores(values)


def softmax(scores: Array, axis: int | tuple[int, ...] = -1) -> Array:
    """Softmax as people write it: a slice of −∞ alone gives NaN."""
    shifted = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=axis, keepdims=True))


def raw_weights(values: Values, probe: Probe) -> Array:
    """Exponentials divided by their sums; 0/0 is NaN."""
    return np.asarray(values["exponentials"] / values["row_sums"][..., None])


def grouped(array: Array, heads: int) -> Array:
    """Keys or values (B, G, S, X) repeated for each query head, (B, H, S, X)."""
    return np.repeat(array, heads // array.shape[1], axis=1)


def heads_of(values: Values) -> tuple[Array, Array, Array]:
    """Queries, keys and values with as many heads as the queries."""
    queries, keys, own = (values[name] for name in ("queries", "keys", "values"))
    queries, keys = values.get("rotated_queries", queries), values.get("rotated_keys", keys)
    return queries, grouped(keys, queries.shape[1]), grouped(own, queries.shape[1])


def transposed(array: Array) -> Array:
    """With the last two axes exchanged."""
    return array.swapaxes(-1, -2)


def blend(weights: Array, values: Array) -> Array:
    """Weights times values, each query head with its key head."""
    return np.asarray(weights @ grouped(values, weights.shape[1]))


Rules = tuple[Rule, ...]
# Which rules a mistake is made with: all at once, the mask alone, causal alone, or one after the
# other.
GROUPS: tuple[tuple[Rules, ...], ...] = (
    (EVERY_RULE,),
    (("mask",),),
    (("causal", "window"),),
    (("mask",), ("causal", "window")),
)


def _others(groups: tuple[Rules, ...]) -> Rules:
    return tuple(rule for rule in EVERY_RULE if not any(rule in rules for rules in groups))


def _present(probe: Probe, groups: tuple[Rules, ...]) -> list[Rules]:
    """The groups with a rule that the probe has; code for the others does not run."""
    having = {
        "mask": probe.keep is not None,
        "causal": probe.causal,
        "window": probe.window is not None,
    }
    return [rules for rules in groups if any(having[rule] for rule in rules)]


def masked_scores(change: Callable[[Array, Array], Array]) -> Variants:
    """Hidden keys are not skipped: the masked scores are `change(scores, keep)`."""

    def variant(groups: tuple[Rules, ...]) -> Variant:
        def masked(values: Values, probe: Probe) -> Array:
            scores = raw_scores(values)
            for rules in _present(probe, groups):
                scores = change(scores, probe.keeps(rules))
            return np.where(probe.keeps(_others(groups)), scores, -np.inf)

        return Variant({"masked": masked}, absent=False)

    return tuple(variant(groups) for groups in GROUPS)


def masked_weights(change: Callable[[Array, Array], Array]) -> Variants:
    """Nothing is hidden before softmax: the weights are `change(weights, keep)`."""

    def variant(groups: tuple[Rules, ...]) -> Variant:
        def masked(values: Values, probe: Probe) -> Array:
            return np.where(probe.keeps(_others(groups)), raw_scores(values), -np.inf)

        def weights(values: Values, probe: Probe) -> Array:
            shares = softmax(logits(values))
            for rules in _present(probe, groups):
                shares = change(shares, probe.keeps(rules))
            return shares

        return Variant({"masked": masked, "weights": weights}, absent=False)

    return tuple(variant(groups) for groups in GROUPS)


def other_visible(change: Callable[[Array, Probe], Array], *rules: Rule) -> Variants:
    """The wrong keys are hidden: `change(keep, probe)` replaces what `rules` keep.

    Rows without a visible key are 0, NaN, or the mean of all values.
    """

    def visible(values: Values, probe: Probe) -> Array:
        others = probe.keeps(_others((rules,)))
        return np.asarray(change(probe.keeps(rules), probe) & others)

    return (*both(visible=visible), Variant({"visible": visible, "masked": filled(NINES)}, False))


def other_cells(
    sees: Callable[[Array, Array, Probe], Array], *rules: Rule, given: Callable[[Probe], object]
) -> Variants:
    """`sees(row, key, probe)` replaces what `rules` keep, in probes that `given` is true of."""

    def change(keep: Array, probe: Probe) -> Array:
        row, key = np.arange(probe.sizes["L"])[:, None], np.arange(probe.sizes["S"])
        return np.broadcast_to(sees(row, key, probe), keep.shape) if given(probe) else keep

    return other_visible(change, *rules)


def filled(constant: float) -> Replacement:
    """Hidden scores become a finite number."""
    return lambda values, probe: np.where(values["visible"], raw_scores(values), constant)

"""The same attention with something changed: which steps a page runs when a switch is on.

Owns how the declared steps follow from the switches. The steps come from the textbook; only what
the textbook rightly lacks, two mistakes, is declared here by changing its indices. Must not know
numbers or pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import compress, pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from regard.errors import OptionError
from regard.masks import Causal, Window
from regard.rules.visibility import Combined, Mask
from regard.textbook.loss import continued
from regard.textbook.steps import Ref, Step, textbook

if TYPE_CHECKING:
    from regard.explanation.trace import Trace

# The bits of a variant's number: one for each switch that changes steps, and one for whether a rule
# hides keys, which is all that a mask is to the steps.
BITS = {"scale": 1, "mask": 0, "softcap": 2, "axis": 4, "swap": 8, "sink": 32}
MASKED = 16
# What a switch adds is a given number like any other: its first value, which a reader may change.
ADDED = {"softcap": 1.0, "sink": 0.0}
# And of a window, how far it reaches to either side.
REACH = 1

# One number for each row: along the wrong axis it is one for each key.
_ROW_STEPS = ("row_maximum", "sink_shifted", "sink_exponential", "row_sums", "log_sums", "lse")


def switches(explanation: Trace) -> tuple[str, ...]:
    """The switches that change something in this attention."""
    steps, sizes = explanation.source.steps, explanation.source.sizes
    rows, (score, normalize) = "L" in steps["scores"].axes, explanation.mechanism
    square = rows and sizes["L"] == sizes["S"]
    possible = {
        "scale": score == "dot" and float(explanation.steps["scale"].value) != 1,
        "mask": "visible" in steps,
        "causal": square and not _has(explanation.source.rules, Causal),
        "window": square and sizes["L"] > REACH + 1 and not _has(explanation.source.rules, Window),
        "softcap": "softcap" not in steps and normalize != "proportional",
        "sink": "sink" not in steps and normalize == "softmax",
        "axis": rows and normalize == "softmax",
        "swap": square and score == "dot",
    }
    return tuple(name for name, there in possible.items() if there)


def _has(rule: Mask | None, kind: type[Mask]) -> bool:
    parts = rule.parts if isinstance(rule, Combined) else ()
    return isinstance(rule, kind) or any(_has(part, kind) for part in parts)


class Form(NamedTuple):
    """What the declared steps of an attention follow from, whatever its numbers and sizes."""

    given: frozenset[str]
    heads: bool
    rows: bool
    softmax: Literal["shifted", "unshifted"]
    width: bool
    mechanism: tuple[Any, Any]
    switches: tuple[str, ...]
    loss: str  # "target", "gradient" or nothing
    grouped: bool


def form_of(explanation: Trace) -> Form:
    """The form that an explanation has."""
    source = explanation.source
    if "scores" not in source.steps:
        raise OptionError("a page shows one attention, not a whole model; explain one layer of it")
    axes = source.steps["scores"].axes
    loss = ("target" if "target" in source.steps else "gradient") * has_gradients(explanation)
    return Form(
        given=frozenset(given_steps(explanation)),
        heads="H" in axes,
        rows="L" in axes,
        softmax="shifted" if "row_maximum" in source.steps else "unshifted",
        width="width" in source.steps,
        mechanism=explanation.mechanism,
        switches=switches(explanation),
        loss=loss,
        grouped=source.sizes.get("H") != source.sizes.get("G"),
    )


@lru_cache(maxsize=32)
def variants(form: Form) -> dict[int, tuple[Step, ...]]:
    """The declared steps for every combination of switches, by the sum of their bits."""
    names = [name for name in form.switches if BITS.get(name)]
    subsets = [set(compress(names, on)) for on in product((False, True), repeat=len(names))]
    return {
        sum(BITS[name] for name in on) + MASKED * hides: _declared(form, on, hides)
        for on in subsets
        for hides in (False, True)  # whether a rule hides keys, now or after a change
    }


def fullest(form: Form) -> int:
    """The number of the variant with every step that a switch or an edit may add."""
    return MASKED + sum(BITS[name] for name in ADDED if name in form.switches)


@lru_cache(maxsize=32)
def conditions(form: Form) -> tuple[tuple[Step, int, int], ...]:
    """The steps of all variants in order, each with the bits that decide about it."""
    numbers: dict[Step, int] = {}
    every = {
        key: [numbers.setdefault(step, len(numbers)) for step in steps]
        for key, steps in variants(form).items()
    }
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for own in every.values():
        for before, after in pairwise(own):
            sorter.add(after, before)
    bits = [bit for bit in (*BITS.values(), MASKED) if any(bit & key for key in every)]
    named, members = list(numbers), {key: {*own} for key, own in every.items()}
    found = []
    for number in sorter.static_order():
        here = {key for key, own in members.items() if number in own}
        decides = sum(
            bit for bit in bits if any((key ^ bit in here) != (key in here) for key in every)
        )
        found += [
            (named[number], decides, value) for value in sorted({key & decides for key in here})
        ]
    return tuple(found)


def declare(
    form: Form, given: Collection[str], masked: bool, scaled: bool = True
) -> tuple[Step, ...]:
    """The textbook's steps from what is given, in the form that the explanation has."""
    score, normalize = form.mechanism
    return textbook(
        given,
        heads=form.heads,
        rows=form.rows,
        masked=masked,
        softmax=form.softmax,
        default_scale=form.width and scaled,
        score=score,
        normalize=normalize,
    )


def given_steps(explanation: Trace) -> set[str]:
    """The names of what is given, apart from the width and scale of a dot product."""
    given = {
        name
        for name, step in explanation.source.steps.items()
        if step.op == "given" and step.phase == "forward"
    }
    return given - ({"width", "scale"} if explanation.mechanism[0] == "dot" else set())


def _declared(form: Form, on: Collection[str], hides: bool) -> tuple[Step, ...]:
    declared = declare(form, {*form.given, *(ADDED.keys() & on)}, hides, "scale" not in on)
    if "swap" in on:
        declared = tuple(_swapped(step) for step in declared)
    if "axis" in on:
        declared = tuple(_along_columns(step) for step in declared)
    if not form.loss:
        return declared
    return declared + continued(declared, target=form.loss == "target", grouped=form.grouped)


def has_gradients(explanation: Trace) -> bool:
    """Whether an explanation goes on from the result to gradients."""
    return any(step.phase == "backward" for step in explanation.source.steps.values())


def _swapped(step: Step) -> Step:
    """Scores of the keys against the queries, instead of the other way round."""
    if step.name != "scores":
        return step
    queries, keys = step.operands
    return replace(step, operands=(_reindexed(keys, "j", "i"), _reindexed(queries, "i", "j")))


def _along_columns(step: Step) -> Step:
    """Softmax that compares the queries of one key, not the keys of one query."""
    own = step.name in _ROW_STEPS
    return replace(
        step,
        axes=tuple("S" if axis == "L" else axis for axis in step.axes) if own else step.axes,
        operands=tuple(
            _reindexed(ref, "i", "j") if ref.step in _ROW_STEPS else ref for ref in step.operands
        ),
    )


def _reindexed(ref: Ref, old: str, new: str) -> Ref:
    return replace(ref, index=tuple(new if letter == old else letter for letter in ref.index))

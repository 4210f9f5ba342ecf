"""Wrong lines of code as variants of the textbook: the steps that they replace, and by what.

A line is written as people write it, such as `scaled = scores / D`, and computes what takes
the place of a step from the right values of the others; see `expressions.py`. Must not know any
single mistake.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.mistakes.expressions import (
    Formula,
    Replacement,
    evaluated,
    formula,
    heads_of,
    named,
    raw_scores,
)
from regard.diagnosis.mistakes.program import Program
from regard.diagnosis.mistakes.programs import PROGRAMS, program_of
from regard.diagnosis.probe import EVERY_RULE, Probe, Rule, Values, Variant

Variants = tuple[Variant, ...]
NINES = -1e9  # large and finite, as people write −∞


def variants_of(code: str) -> Variants:
    """The textbook with what these lines replace: ``target = expression; …``.

    People write the same line in code that differs in details, such as what becomes of rows without
    a visible key. Each way is a variant, and agreeing with one of them is enough.

    Examples
    --------
    >>> [sorted(one.replaced) for one in variants_of("scaled = scores / D")]
    [['scaled'], ['scaled']]
    """
    return tuple(
        Variant({step: _fitting(step, own) for step, own in one.replaced.items()}, one.absent)
        for one in _variants(dict(assignments(code)))
    )


class Unfit(Exception):
    """Code that has a mistake raises here, or gives another shape."""


def _fitting(step: str, own: Replacement) -> Replacement:
    def replaced(values: Values, probe: Probe) -> Any:
        try:
            value = own(values, probe)
            if value is not None:
                np.broadcast_to(value, probe.right[step].shape)
        except (KeyError, ValueError) as error:
            raise Unfit(str(error)) from error
        return value

    return replaced


def _variants(found: Mapping[str, str]) -> Variants:
    program = PROGRAMS.get(program_of(frozenset(found)))
    if program is not None and program.helper:
        return tuple(_by_blocks(program, found))
    special = [target for target in found if target in TARGETS]
    plain = {
        OTHER_NAMES.get(target, target): formula(own)
        for target, own in found.items()
        if target not in special
    }
    if not special:
        return _both(plain)
    variants: Variants = (Variant(plain),)
    for target in special:
        ways = TARGETS[target](partial(evaluated, found[target]))
        variants = tuple(one | way for one in variants for way in ways)
    return variants


def assignments(code: str) -> Iterator[tuple[str, str]]:
    """The targets and the expressions of some lines."""
    for line in code.split("; "):
        target, _, expression = line.partition(" = ")
        yield target, expression


# --- what is replaced -----------------------------------------------------------------------------


def _both(replaced: Mapping[str, Replacement]) -> Variants:
    """Hidden keys are skipped after it, or their scores used."""
    return Variant(replaced), Variant(replaced, absent=False)


def _filled(values: Values, probe: Probe) -> Array:
    return np.where(values["visible"], raw_scores(values), NINES)


def _of_weights(formula: Formula) -> Variants:
    """The same, and with hidden scores that are finite, where a whole row or column may be."""
    own = {"weights": formula}
    return (*_both(own), Variant({**own, "masked": _filled}, absent=False))


def _where_scale(given: bool) -> Callable[[Formula], Variants]:
    """Scaled scores where a scale is given, or where none is."""

    def variants(formula: Formula) -> Variants:
        def scaled(values: Values, probe: Probe) -> Any:
            return formula(values, probe) if (probe.scale is not None) == given else None

        return _both({"scaled": scaled})

    return variants


def _seen(groups: Iterable[tuple[Rule, ...]], needs: int = 1) -> Callable[[Formula], Variants]:
    """Other keys are visible: one rule after the other of a group keeps others, or all at once.

    Rows without a visible key are 0, NaN, or the mean of all values.
    """

    def variants(formula: Formula) -> Variants:
        found: list[Variant] = []
        for group in groups:

            def visible(values: Values, probe: Probe, group: tuple[Rule, ...] = group) -> Any:
                own = [rule for rule in group if rule in probe.rules]
                if len(own) < needs:
                    return None
                cells = probe.keeps(rule for rule in EVERY_RULE if rule not in group)
                if needs > 1 or "causal" in group:
                    return cells & formula(values, probe)
                for rule in own:
                    kept = probe.rule(rule)
                    cells = cells & formula(values, probe, mask=kept, padding=kept)
                return cells

            found += _both({"visible": visible})
            found.append(Variant({"visible": visible, "masked": _filled}, absent=False))
        return tuple(found)

    return variants


# Which rules a mistake is made with: all at once, some alone, or one after the other.
_GROUPS: tuple[tuple[tuple[Rule, ...], ...], ...] = (
    (EVERY_RULE,),
    (("mask",),),
    (("key mask",),),
    (("causal", "window"),),
    (("mask", "key mask"), ("causal", "window")),
)


def _hiding(step: str) -> Callable[[Formula], Variants]:
    """Hidden scores become something else than −∞, or hidden weights something else than 0."""

    def variants(formula: Formula) -> Variants:
        return tuple(_hidden(formula, step, groups) for groups in _GROUPS)

    return variants


def _hidden(formula: Formula, step: str, groups: tuple[tuple[Rule, ...], ...]) -> Variant:
    others = [rule for rule in EVERY_RULE if not any(rule in group for group in groups)]

    def present(probe: Probe) -> list[tuple[Rule, ...]]:
        return [group for group in groups if any(rule in probe.rules for rule in group)]

    def masked(values: Values, probe: Probe) -> Array:
        cells = raw_scores(values)
        for group in present(probe) if step == "masked" else ():
            cells = formula(values, probe, keep=probe.keeps(group), raw=cells)
        return np.where(probe.keeps(others), cells, -np.inf)

    def weights(values: Values, probe: Probe) -> Any:
        kept = [rule for group in present(probe) for rule in group]
        return formula(values, probe, keep=probe.keeps(kept), raw=values["masked"])

    own: dict[str, Replacement] = {"masked": masked}
    return Variant(own if step == "masked" else {**own, "weights": weights}, absent=False)


def _of_parts(formula: Formula) -> Variants:
    """Projected queries, keys and values are cut into heads in another way: all, or some."""

    def split(name: str, letter: str) -> Replacement:
        def replaced(values: Values, probe: Probe) -> Any:
            packed = values.get(f"projected_{name}")
            heads = probe.sizes[letter]
            return None if packed is None else formula(values, probe, packed=packed, heads=heads)

        return replaced

    own = {"queries": split("queries", "H"), "keys": split("keys", "G")}
    own["values"] = split("values", "G")
    some = (names for count in (3, 1, 2) for names in itertools.combinations(own, count))
    return tuple(Variant({name: own[name] for name in names}) for names in some)


def _of_shared_heads(formula: Formula) -> Variants:
    """Query heads read other key heads: of keys and values, or of one of them."""

    def scores(values: Values, probe: Probe) -> Any:
        keys = values.get("rotated_keys", values["keys"])
        return heads_of(values)[0] @ formula(values, probe, one=keys).swapaxes(-1, -2)

    def output(values: Values, probe: Probe) -> Any:
        return values["weights"] @ formula(values, probe, one=values["values"])

    return (
        *_both({"scores": scores, "output": output}),
        Variant({"scores": scores}),
        Variant({"output": output}),
    )


def _of_softmax_gradient(formula: Formula) -> Variants:
    """Another gradient of the logits; where keys are hidden it is 0, or used as it comes out."""

    def variant(uses_hidden: bool) -> Variant:
        def replaced(name: str, values: Values, probe: Probe) -> Any:
            own = next(step for step in probe.steps if step.op == "softmax_gradient")
            if own.name == name:
                return formula(values, probe, delta=values["delta"][..., None])
            return values[own.name] if uses_hidden and own.name == "d_masked" else None

        names = ("d_masked", "d_capped", "d_scaled")
        return Variant({one: partial(replaced, one) for one in names}, absent=not uses_hidden)

    return variant(uses_hidden=False), variant(uses_hidden=True)


def _by_head(name: str) -> Callable[[Formula], Variants]:
    """A gradient of keys or values, made by every query head, as the sum for each key head."""
    return lambda formula: _both({f"{name}_by_head": formula})


def _of_all_projections(formula: Formula) -> Variants:
    """Columns that lie side by side are taken apart in another way."""

    def part(number: int, values: Values, probe: Probe) -> Any:
        return formula(values, probe, heads=probe.sizes["H"])[number]

    names = ("queries", "keys", "values")
    return (Variant({name: partial(part, number) for number, name in enumerate(names)}),)


def _of_new_keys(*, alone: bool) -> Callable[[Formula], Variants]:
    """Keys are turned in another way: the new ones `alone`, or with those of a cache."""

    def variants(formula: Formula) -> Variants:
        def keys(values: Values, probe: Probe) -> Any:
            old, new = np.split(values["keys"], [probe.offset], axis=-2)
            places = np.arange(probe.offset, probe.sizes["S"])
            row = np.arange(new.shape[-2])
            own = formula(values, probe, keys=new, old_keys=old, new_positions=places, row=row)
            return np.concatenate([old, own], -2) if alone else own

        return (Variant({"rotated_keys": keys}),)

    return variants


def _of_backward_scale(formula: Formula) -> Variants:
    """Another scale, in the scores and in their gradient, where none is given."""

    def scale(values: Values, probe: Probe) -> Any:
        return formula(values, probe) if probe.scale is None else None

    return (Variant({"scale": scale}),)


def _seen_backward(formula: Formula) -> Variants:
    """The weights of a backward pass see other keys than those of the forward pass."""
    own: dict[str, Replacement] = {"visible": formula}
    saved: dict[str, Replacement] = {"output": lambda values, probe: probe.right["output"]}

    def hidden(values: Values, probe: Probe) -> Any:
        return np.where(probe.visible, values["d_masked"], 0) if probe.has_rules else None

    return Variant({**own, **saved}), Variant(own), Variant({**own, "d_scaled": hidden})


def _of_saved_lse(formula: Formula) -> Variants:
    """Weights that a backward pass makes again, with the output of the forward pass."""
    own: dict[str, Replacement] = {"weights": formula}
    saved: dict[str, Replacement] = {**own, "output": lambda v, p: p.right["output"]}
    hidden: dict[str, Replacement] = {"d_scaled": lambda v, p: v.get("d_masked")}
    return (*_both(saved), Variant({**saved, **hidden}, absent=False), *_both(own))


def _of_key_heads(formula: Formula) -> Variants:
    """The gradient of a key head, made otherwise of what its query heads add, (B, G, R, S, X)."""

    def together(name: str) -> Replacement:
        def gradient(values: Values, probe: Probe) -> Any:
            each, size = values[f"{name}_by_head"], probe.sizes
            if size["H"] == size["G"]:
                return None
            each = each.reshape(size["B"], size["G"], -1, *each.shape[2:])
            return formula(values, probe, each=each)

        return gradient

    keys, values = ({name: together(name)} for name in ("d_keys", "d_values"))
    return Variant({**keys, **values}), Variant(keys), Variant(values)


# --- blocks ---------------------------------------------------------------------------------------

# How many keys are in a block, and in how many blocks, cut in three ways, keys may be.
SIZES = (2, 4, 3, 1, 8, 16, 32, 64, 128)
COUNTS = tuple((count, way) for count in (2, 3, 4) for way in range(3))
LOWEST = -1e30  # for −∞, of which differences are numbers


def _by_blocks(program: Program, replaced: Mapping[str, str]) -> Iterator[Variant]:
    """What a helper makes of blocks of any size, in the place of the steps that it makes."""
    source = program.source(replaced)
    for n in (*SIZES, *COUNTS):
        steps = enumerate(program.makes)
        made = {step: partial(_made, source, program, place, n) for place, step in steps}
        yield Variant(made)


def _made(source: str, program: Program, place: int, n: Any, values: Values, probe: Probe) -> Any:
    function = _function(source, program.helper)
    names = function.__code__.co_varnames[: function.__code__.co_argcount - 1]
    given = {name: named(name, values, probe) for name in names}
    if "logits" in given:
        given["logits"] = np.maximum(given["logits"], LOWEST)
    try:
        result = function(**given, n=n)
    except Exception as error:
        raise ValueError(str(error)) from error
    return result[place] if len(program.makes) > 1 else result


@lru_cache(maxsize=1024)
def _function(source: str, name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "<mistake>", "exec"), names)
    names["cuts"] = _cuts
    function: Callable[..., Any] = names[name]
    return function


def _cuts(length: int, n: Any) -> list[slice]:
    """Blocks of n, or so many blocks where their number does not divide the length."""
    if isinstance(n, int):
        return [slice(start, start + n) for start in range(0, length, n)]
    count, way = n
    whole, rest = divmod(length, count)
    own = min(count, length)
    edges = (
        [x * whole + min(x, rest) for x in range(count + 1)],  # longer ones first
        [x * length // max(1, own) for x in range(own + 1)],
        [min(x * -(-length // count), length) for x in range(count + 1)],  # a shorter one last
    )[way]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]


# Each target that is not a step itself, and the variants of what is written for it.
TARGETS: Mapping[str, Callable[[Formula], Variants]] = {
    "weights": _of_weights,
    "scaled": _where_scale(given=False),
    "rescaled": _where_scale(given=True),
    "causal": _seen([("causal",)]),
    "window": _seen([("window", "causal")]),
    "mask": _seen([("mask",), ("key mask",), ("mask", "key mask")]),
    "square": _seen([("mask",)]),
    "padding": _seen([("key mask",)]),
    "keep": _seen([("mask", "key mask", "causal")], needs=2),
    "masked": _hiding("masked"),
    "after": _hiding("weights"),
    "cut": _of_parts,
    "repeat": _of_shared_heads,
    "fused": _of_all_projections,
    "new_keys": _of_new_keys(alone=True),
    "all_keys": _of_new_keys(alone=False),
    "scale": _of_backward_scale,
    "seen": _seen_backward,
    "again": _of_saved_lse,
    "together": _of_key_heads,
    "d_logits": _of_softmax_gradient,
    "d_keys": _by_head("d_keys"),
    "d_values": _by_head("d_values"),
}
# Steps that have another name in some programs.
OTHER_NAMES = {"axes": "output", "grouped": "output", "new_queries": "rotated_queries"}
OTHER_NAMES |= {"sunk": "weights"}
OTHER_NAMES |= {"dq": "d_queries", "dk": "d_keys", "dv": "d_values"}

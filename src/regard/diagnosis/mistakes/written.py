"""Wrong lines of code as variants of the textbook: the steps that they replace, and by what.

A line is written as people write it, such as `scaled = scores / D`, and computes what stands in
the place of a step from the right values of the others. It may use the names of all steps, sizes
by their letters, and the names below. Must not know any single mistake.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import EVERY_RULE, Probe, Rule, Values, Variant, turned
from regard.diagnosis.mistakes.programs import PRELUDE

Replacement = Callable[[Values, Probe], Any]
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
    found = dict(assignments(code))
    special = [target for target in found if target in TARGETS]
    if not special:
        return _both({target: _formula(own) for target, own in found.items()})
    plain = {target: _formula(own) for target, own in found.items() if target not in special}
    variants: Variants = (Variant(plain),)
    for target in special:
        ways = TARGETS[target](partial(_evaluated, found[target]))
        variants = tuple(one | way for one in variants for way in ways)
    return variants


def assignments(code: str) -> Iterator[tuple[str, str]]:
    """The targets and the expressions of some lines."""
    for line in code.split("; "):
        target, _, expression = line.partition(" = ")
        yield target, expression


# --- expressions ----------------------------------------------------------------------------------

Formula = Callable[..., Any]  # of values, a probe and names of its own


def _formula(expression: str) -> Replacement:
    return lambda values, probe: _evaluated(expression, values, probe)


def _evaluated(expression: str, values: Values, probe: Probe, **own: Any) -> Any:
    """The value of an expression; a ValueError where code would raise."""
    code = _compiled(expression)
    names = {name: _named(name, values, probe) for name in _names_in(code) if name not in own}
    try:
        return eval(code, {**_shared(), **names, **own})
    except Exception as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> types.CodeType:
    return compile(expression, "<mistake>", "eval")


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that are looked up, but for those that every program shares."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    found = frozenset(code.co_names).union(*map(_names_in, inner))
    return found - _shared().keys()


@lru_cache(maxsize=1)
def _shared() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names


def _named(name: str, values: Values, probe: Probe) -> Any:
    if name in NAMES:
        return NAMES[name](values, probe)
    if name in probe.sizes:
        return probe.sizes[name]
    if name in values:
        return values[name]
    if name in probe.right:  # it comes later
        return probe.right[name]
    return 0.0 if name.startswith("b_") else None  # such as an attribute


def raw_scores(values: Values) -> Array:
    """The scores before anything is hidden."""
    names = ("biased", "positioned", "capped", "scaled", "scores")
    return next(values[name] for name in names if name in values)


def logits_of(values: Values) -> Array:
    """The scores that softmax gets."""
    return values["masked"] if "masked" in values else raw_scores(values)


def heads_of(values: Values) -> tuple[Array, Array, Array]:
    """Queries, keys and values with as many heads as the queries."""
    queries = values.get("rotated_queries", values["queries"])
    keys = values.get("rotated_keys", values["keys"])
    heads = queries.shape[1]
    return queries, repeated(keys, heads), repeated(values["values"], heads)


def repeated(array: Array, heads: int) -> Array:
    """Keys or values (B, G, S, X) repeated for each query head, (B, H, S, X)."""
    return np.repeat(array, heads // array.shape[1], axis=1)


def _split(packed: Array, probe: Probe, letter: str = "G") -> Array:
    return packed.reshape(*packed.shape[:2], probe.sizes[letter], -1).swapaxes(1, 2)


def _signed(probe: Probe, pairs: Array) -> Array:
    """Frequencies of pairs for each feature, the first of each pair negative."""
    if probe.interleaved:
        return np.stack([-pairs, pairs], -1).ravel()
    return np.concatenate([-pairs, pairs])


def _turn(probe: Probe, rows: Array, places: Array, frequencies: Array) -> Array:
    angles = np.asarray(places)[..., None] * frequencies
    angles = angles[:, None] if angles.ndim == 3 else angles
    return turned(rows, np.cos(angles), np.sin(angles), probe.interleaved)


def _pairs(values: Values) -> Array:
    own = values["frequencies"]
    return np.asarray(own[own > 0])


def _causal_row(probe: Probe) -> Array:
    return np.arange(probe.sizes["L"])[:, None]


def _lengths(values: Values, probe: Probe) -> Array:
    return np.asarray(probe.rule("key mask").sum(-1)[..., :1, None])


NAMES: Mapping[str, Callable[[Values, Probe], Any]] = {
    "q": lambda v, p: heads_of(v)[0],
    "k": lambda v, p: heads_of(v)[1],
    "v": lambda v, p: heads_of(v)[2],
    "x": lambda v, p: v["embeddings"],
    "M": lambda v, p: p.inputs["embeddings"].shape[-1] if "embeddings" in p.inputs else np.nan,
    "raw": lambda v, p: raw_scores(v),
    "logits": lambda v, p: logits_of(v),
    "e": lambda v, p: np.exp(logits_of(v) - logits_of(v).max(-1, keepdims=True)),
    "lse": lambda v, p: (v["row_maximum"] + np.log(v["row_sums"]))[..., None],
    "keep": lambda v, p: p.visible,
    "mask": lambda v, p: p.keeps(("mask", "key mask")),
    "padding": lambda v, p: p.rule("key mask"),
    "causal": lambda v, p: p.rule("causal"),
    "lengths": _lengths,
    "row": lambda v, p: _causal_row(p),
    "i": lambda v, p: _causal_row(p) + p.offset,
    "j": lambda v, p: np.arange(p.sizes["S"]),
    "h": lambda v, p: np.arange(1.0, p.sizes["H"] + 1),
    "past": lambda v, p: p.offset,
    "size": lambda v, p: p.sides[0] + 1,
    "split": lambda v, p: partial(_split, probe=p),
    "turn": lambda v, p: partial(_turn, p),
    "signed": lambda v, p: partial(_signed, p),
    "f": lambda v, p: _pairs(v),
}

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
                own = [rule for rule in group if _has(probe, rule)]
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


def _has(probe: Probe, rule: Rule) -> bool:
    return not probe.rule(rule).all() or (probe.rules is not None and rule in probe.rules)


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
        return [group for group in groups if any(_has(probe, rule) for rule in group)]

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
    some = (names for count in (3, 1, 2) for names in combinations(own, count))
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
    "d_logits": _of_softmax_gradient,
    "d_keys": _by_head("d_keys"),
    "d_values": _by_head("d_values"),
}

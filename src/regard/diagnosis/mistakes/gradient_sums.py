"""Mistakes in backward passes after the gradients of one block: their sums, and what is returned.

Heads that share a key head, blocks that are added up, keys that are hidden, gradients in each
other's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Rule, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    heads_of,
    mistakes,
    transposed,
)

PARTS = ("return dQ, dK, dV", "return dq, dk, dv")
SUMS = ("dQ += …; dK += …; dV += …  # once for each block", "dq += …  # once for each block")
HEADS = (
    "dK = dK.reshape(B, G, H // G, S, D).sum(2)  # over the query heads of a key head",
    "dk = dk.reshape(b, g, h // g, s, d).sum(2)",
)
HIDING = (
    "S = np.where(visible, S, -np.inf)  # in the backward pass too, before softmax",
    "s = s.masked_fill(~visible, -torch.inf)  # in the backward pass too, before softmax",
)
# The largest block, in queries or keys, of which the last one is looked for.
_LARGEST_BLOCK = 5


def over_query_heads(each: Array, probe: Probe) -> Array:
    """What every query head adds (B, H, S, X) as the sum for each key head."""
    size = probe.sizes
    return np.asarray(each.reshape(size["B"], size["G"], -1, *each.shape[2:]).sum(2))


def _summed(values: Values, probe: Probe) -> dict[str, Array]:
    """The right gradient of each part."""
    own = {
        name: over_query_heads(values[f"d_{name}_by_head"], probe) for name in ("keys", "values")
    }
    return own | {"queries": values["d_scores"] @ heads_of(values)[1]}


def _exchanged(**parts: str) -> Variants:
    """Gradients that are returned in each other's place."""

    def replaced(name: str) -> Replacement:
        return lambda values, probe: _summed(values, probe)[name]

    return (Variant({f"d_{place}": replaced(name) for place, name in parts.items()}),)


def _times(factor: float, *parts: str) -> Variant:
    def replaced(name: str) -> Replacement:
        return lambda values, probe: factor * _summed(values, probe)[name]

    return Variant({f"d_{name}": replaced(name) for name in parts})


def _turned(name: str) -> Variant:
    """One gradient with its last two axes exchanged."""
    return Variant({f"d_{name}": lambda v, p: transposed(_summed(v, p)[name])})


def _each(factor: float) -> Variants:
    """All gradients times a factor, then each alone, then two of them."""
    every = ("queries", "keys", "values")
    parts = (every, *((one,) for one in every), *(tuple(o for o in every if o != p) for p in every))
    return tuple(_times(factor, *names) for names in parts)


def _heads(combine: Callable[[Array], Any]) -> Variants:
    """The gradient of a key head otherwise than as the sum; its query heads are on axis 2."""

    def replaced(name: str) -> Replacement:
        def gradient(values: Values, probe: Probe) -> Any:
            each, size = values[f"d_{name}_by_head"], probe.sizes
            if size["H"] == size["G"]:
                return None
            return np.asarray(combine(each.reshape(size["B"], size["G"], -1, *each.shape[2:])))

        return gradient

    names = (("keys", "values"), ("keys",), ("values",))
    return tuple(Variant({f"d_{name}": replaced(name) for name in own}) for own in names)


def _tiled(each: Array) -> Array:
    """The sum over heads h with the same h mod G."""
    batch, groups, shared, *rest = each.shape
    return np.asarray(each.reshape(batch, shared, groups, *rest).sum(1))


def _unmasked() -> Iterator[Variant]:
    """Weights that are computed again without a rule; with the right output, and with their own."""
    rules: tuple[tuple[Rule, ...], ...] = ((), ("mask",), ("causal", "window"), ("mask", "causal"))
    for kept, own_output in product(rules, (False, True)):

        def visible(values: Values, probe: Probe, kept: tuple[Rule, ...] = kept) -> Array:
            return probe.keeps(kept)

        def hides(values: Values, probe: Probe) -> Any:
            return probe.right["output"]

        yield Variant({"visible": visible} if own_output else {"visible": visible, "output": hides})


def _only_softmax_masked() -> Variant:
    """Weights without a rule, and their logits' gradient with all of them."""

    def visible(values: Values, probe: Probe) -> Array:
        return probe.keeps(())

    def masked(values: Values, probe: Probe) -> Any:
        return np.where(probe.visible, values["d_masked"], 0) if probe.has_rules else None

    return Variant({"visible": visible, "d_scaled": masked})


def _blocks(first: bool, times: float) -> Iterator[Variant]:
    """A block of queries, or of keys, that counts `times` times in a sum over the blocks."""
    sums = {"queries": "S", "keys": "L", "values": "L"}
    groups = (("keys", "values"), ("queries",), ("keys",), ("values",))
    for names, size in product(groups, range(1, _LARGEST_BLOCK + 1)):

        def replaced(name: str, size: int = size) -> Replacement:
            def gradient(values: Values, probe: Probe) -> Array:
                count = probe.sizes[sums[name]]
                places = np.arange(count) // size
                weigh = np.where(places == (0 if first else places[-1]), times, 1.0)
                if name == "queries":
                    return np.asarray(values["d_scores"] * weigh @ heads_of(values)[1])
                pair = ("d_scores", "queries") if name == "keys" else ("weights", "d_output")
                factor, other = (values[one] for one in pair)
                return np.asarray(transposed(factor * weigh[:, None]) @ other)

            return gradient

        by = {name: f"d_{name}" if name == "queries" else f"d_{name}_by_head" for name in names}
        yield Variant({by[name]: replaced(name) for name in names})


def _never_reached(which: str) -> Iterator[Variant]:
    """A loop over blocks of keys, or of queries, without its first, last or shorter block."""
    sizes = range(2 if which == "shorter" else 1, _LARGEST_BLOCK + 1)
    for of_keys, size in product((True, False), sizes):

        def kept(probe: Probe, of_keys: bool = of_keys, size: int = size) -> Array:
            places = np.arange(probe.sizes["S" if of_keys else "L"]) // size
            stop = len(places) // size if which == "shorter" else places[-1]
            reached = places > 0 if which == "first" else places < stop
            return reached if of_keys else reached[:, None]

        def scores(values: Values, probe: Probe, kept: Callable[..., Array] = kept) -> Any:
            return values["d_scaled"] * values["scale"] * kept(probe)

        def of_values(values: Values, probe: Probe, kept: Callable[..., Array] = kept) -> Any:
            return transposed(values["weights"] * kept(probe)) @ values["d_output"]

        yield Variant({"d_scores": scores, "d_values_by_head": of_values})


def _last_block_alone() -> Iterator[Variant]:
    """Only the last block counts in a sum: = instead of +=."""
    for last in _blocks(first=False, times=0.0):

        def replaced(name: str, other: Replacement) -> Replacement:
            def gradient(values: Values, probe: Probe) -> Array:
                if name == "d_queries":
                    whole = values["d_scores"] @ heads_of(values)[1]
                elif name == "d_keys_by_head":
                    whole = transposed(values["d_scores"]) @ values["queries"]
                else:
                    whole = transposed(values["weights"]) @ values["d_output"]
                return np.asarray(whole - other(values, probe))

            return gradient

        yield Variant({name: replaced(name, own) for name, own in last.replaced.items()})


RETURNED: Entries = {
    "keys_and_values_returned_swapped": (
        "dK and dV are returned in each other's place",
        "Where keys and values have one shape, nothing else shows it.",
        _exchanged(keys="values", values="keys"),
    ),
    "queries_and_keys_returned_swapped": (
        "dQ and dK are returned in each other's place",
        "Where queries and keys have one shape, nothing else shows it.",
        _exchanged(queries="keys", keys="queries"),
    ),
    "queries_and_values_returned_swapped": (
        "dQ and dV are returned in each other's place",
        "Where queries and values have one shape, nothing else shows it.",
        _exchanged(queries="values", values="queries"),
    ),
    "gradient_lost": (
        "a gradient is 0: nothing reaches that input",
        "A part of the computation is detached (no_grad, detach, .data, stop_gradient, a copy to "
        "NumPy), or its gradient is never written.",
        _each(0.0),
        (
            "no line of NumPy between the inputs and the output loses a gradient by itself",
            "with torch.no_grad(), .detach(), .data and .item() only for what is not trained",
        ),
    ),
    "gradient_doubled": (
        "a gradient is twice what it should be",
        "It is added up twice, as with += on an array that holds it already.",
        _each(2.0),
        SUMS,
    ),
    "gradient_negated": (
        "a gradient has the wrong sign",
        "A step along it then goes the wrong way.",
        _each(-1.0)[:4],
    ),
    "gradient_of_another_shape": (
        "a gradient is transposed, or has another shape than its input",
        "The gradient of an array has its shape; one that is transposed or not summed has not.",
        (*(_turned(name) for name in ("queries", "keys", "values")), *_each(np.nan)[1:]),
    ),
}
GROUPS: Entries = {
    "grouped_gradient_overwritten": (
        "each query head overwrites the gradient of its key head: only the last one counts",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        _heads(lambda each: each[:, :, -1]),
        (
            "dK[h // (H // G)] += …  # not =, for every query head h",
            "dk[h // (H // G)] += …  # not =",
        ),
    ),
    "grouped_gradient_of_first": (
        "only the first query head counts in the gradient of a key head",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        _heads(lambda each: each[:, :, 0]),
    ),
    "grouped_gradient_averaged": (
        "the gradient of a key head is the mean over its query heads instead of the sum",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        _heads(lambda each: each.mean(2)),
    ),
    "grouped_gradient_tiled": (
        "the gradient of a key head adds up the wrong query heads: h mod G instead of h // (H / G)",
        "Query heads that read one key head lie beside each other.",
        _heads(_tiled),
    ),
    "grouped_gradient_not_summed": (
        "dK and dV have a head for each query head: they are not summed over those of a key head",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        _heads(lambda each: np.full((1, 1, 1, 1), np.nan)),
    ),
}
HIDDEN: Entries = {
    "backward_not_masked": (
        "the weights are computed again without hiding keys",
        "The forward pass hides them, so the backward pass has to, with the same rule.",
        (*_unmasked(), _only_softmax_masked()),
    ),
}
BLOCKS: Entries = {
    "block_counted_twice": (
        "the last block is added twice",
        "A loop over blocks adds each of them once.",
        tuple(_blocks(first=False, times=2.0)),
    ),
    "block_overwritten": (
        "each block overwrites the sum: only the last one counts",
        "Gradients of blocks are added up: += instead of =.",
        tuple(_last_block_alone()),
    ),
    "first_block_counted_twice": (
        "the first block is added twice",
        "A loop over blocks adds each of them once.",
        tuple(_blocks(first=True, times=2.0)),
    ),
    "last_block_lost_backward": (
        "the last block is missing in a sum over blocks",
        "A range that ends one block early loses it.",
        (*_blocks(first=False, times=0.0), *_never_reached("last"), *_never_reached("shorter")),
    ),
    "first_block_lost_backward": (
        "the first block is missing in a sum over blocks",
        "A range that begins one block late loses it.",
        (*_blocks(first=True, times=0.0), *_never_reached("first")),
    ),
}
MISTAKES = (
    *mistakes("gradients", PARTS, RETURNED),
    *mistakes("gradients", HEADS, GROUPS),
    *mistakes("gradients", HIDING, HIDDEN),
    *mistakes("gradients", SUMS, BLOCKS),
)

"""Mistakes in the projections before and after the heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    equivalents,
    mistakes,
    replacing,
)

LINEAR = (
    "Q = X @ W_q  # or X @ W_q.T + b_q where W_q is stored as (out, in)",
    "q = self.W_q(x)  # nn.Linear computes x @ weight.T + bias",
)
W_O = (
    "output = merged @ W_o  # (+ b_o)",
    "output = self.W_o(merged)",
)


def _rows_read(weights: Array) -> slice:
    """The rows of a matrix that read something: half of them where values come apart from keys."""
    half = len(weights) // 2
    if weights.ndim == 2 and half and not weights[half:].any():
        return slice(half)
    return slice(half if weights.ndim == 2 and half and not weights[:half].any() else 0, None)


def _instead(own: Array, new: Callable[[Array], Array]) -> Array:
    """A matrix with other numbers in the rows that read something."""
    rows = _rows_read(own)
    changed = new(own[rows])
    if changed.shape == own.shape:
        return changed
    whole = np.zeros_like(own, shape=(len(own), *changed.shape[1:]))
    whole[rows] = changed
    return whole


def _changed(names: str, change: Callable[[Array], Array]) -> Variant:
    """Some weights or biases changed."""

    def changed(name: str) -> Replacement:
        return lambda values, probe: _instead(probe.inputs[name], change)

    return Variant({name: changed(name) for name in names.split()})


def _used_for(**weights: str) -> Variants:
    """Weights, by the names of those that are used instead."""

    def other(part: str, name: str) -> Replacement:
        def taken(values: Values, probe: Probe) -> Array:
            own = probe.inputs[name]
            return _instead(probe.inputs[part], lambda _: own[_rows_read(own)])

        return taken

    return (Variant({part: other(part, name) for part, name in weights.items()}),)


def _values_of_keys() -> Variants:
    """W_v where W_k is: the values are made of what the keys are made of."""

    def moved(values: Values, probe: Probe) -> Array:
        keys, own = (probe.inputs[name] for name in ("W_k", "W_v"))
        whole = np.zeros_like(own)
        whole[_rows_read(keys)] = own[_rows_read(own)]
        return whole

    return (Variant({"W_v": moved}),)


def _without_context(values: Values, probe: Probe) -> Array:
    """The merged heads where the context is not read; a mask hides as many keys as there are."""
    inputs = {name: one for name, one in probe.inputs.items() if name != "context"}
    keep = None if probe.keep is None else probe.keep[..., : probe.sizes["L"]]
    return replace(probe, inputs=inputs, keep=keep, offset=0).right["merged"]


def _transposed(names: str) -> Variant:
    return _changed(names, np.transpose)


def _no_bias(names: str) -> Variant:
    return _changed(names, np.zeros_like)


def _identity(names: str) -> Variant:
    return _changed(names, lambda weights: np.eye(len(weights)))


TURNED = {
    f"W_{part}_not_transposed": (
        f"W_{part} alone is transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways.",
        (_transposed(f"W_{part}"),),
    )
    for part in "qkv"
}
HALF_OF_LINEAR = "x @ W.T is only half of what nn.Linear does."
PROJECTIONS: Entries = {
    "weights_not_transposed": (
        "all weights are transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways, so nothing complains; every projection is another one.",
        (_transposed("W_q W_k W_v W_o"), _transposed("W_q W_k W_v")),
    ),
    **TURNED,
    "W_o_not_transposed": (
        "W_o alone is transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways.",
        (_transposed("W_o"),),
        W_O,
    ),
    "W_o_lost": (
        "the output projection is missing",
        "Heads are put side by side and never mixed.",
        (replacing(projected_output=lambda values, probe: values["merged"]),),
        W_O,
    ),
    "b_o_lost": (
        "the bias of the output projection is missing",
        HALF_OF_LINEAR,
        (_no_bias("b_o"),),
        W_O,
    ),
    "b_q_lost": (
        "the bias of the query projection is missing",
        "q·k loses b_q·k, which differs from key to key.",
        (_no_bias("b_q"), _no_bias("b_q b_k")),
    ),
    "b_v_lost": (
        "the bias of the value projection is missing",
        "Weights add up to 1, so exactly b_v is missing from the output.",
        (_no_bias("b_v"),),
    ),
    "biases_lost": (
        "the biases of queries, keys and values are missing",
        HALF_OF_LINEAR,
        (_no_bias("b_q b_k b_v"),),
    ),
    "b_q_and_b_k_swapped": (
        "the biases of queries and keys are swapped",
        "Each belongs to its own projection.",
        _used_for(b_q="b_k", b_k="b_q"),
    ),
    "b_k_and_b_v_swapped": (
        "the biases of keys and values are swapped",
        "Each belongs to its own projection.",
        _used_for(b_k="b_v", b_v="b_k"),
    ),
    "b_q_for_all": (
        "the bias of the queries is used for keys and values too",
        "Probably a copied line; b_k and b_v are never used.",
        _used_for(b_k="b_q", b_v="b_q") + _used_for(b_v="b_q"),
    ),
    "b_o_twice": (
        "the bias of the output projection is added more than once",
        "The layer has added it already; heads' parts of the output are added up without it.",
        (
            _changed("b_o", lambda bias: 2 * bias),
            Variant({"b_o": lambda values, probe: probe.inputs["b_o"] * probe.sizes["H"]}),
        ),
        W_O,
    ),
    "all_biases_lost": ("all biases are missing", HALF_OF_LINEAR, (_no_bias("b_q b_k b_v b_o"),)),
    "keys_projected_by_W_q": (
        "the keys are projected by W_q",
        "Probably a copied line; W_k is never used.",
        _used_for(W_k="W_q") + _used_for(W_k="W_q", b_k="b_q"),
    ),
    "queries_projected_by_W_k": (
        "the queries are projected by W_k",
        "Probably a copied line; W_q is never used.",
        _used_for(W_q="W_k") + _used_for(W_q="W_k", b_q="b_k"),
    ),
    "values_projected_by_W_k": (
        "the values are projected by W_k",
        "Probably a copied line; W_v is never used.",
        _used_for(W_v="W_k") + _used_for(W_v="W_k", b_v="b_k"),
    ),
    "values_from_key_input": (
        "the values are projected from what the keys are projected from",
        "Where keys and values come apart, what was given as values is never read.",
        _values_of_keys(),
        ("values = value_input @ W_v", "v = self.W_v(value)"),
    ),
    "context_ignored": (
        "keys and values are projected from the queries' own embeddings, not from the context",
        "It is self-attention: what was given as a context is never read.",
        (Variant({"merged": _without_context}),),
        (
            "keys, values = context @ W_k, context @ W_v",
            "k, v = self.W_k(context), self.W_v(context)",
        ),
    ),
    "keys_and_values_swapped": (
        "W_k and W_v are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        _used_for(W_k="W_v", W_v="W_k") + _used_for(W_k="W_v", W_v="W_k", b_k="b_v", b_v="b_k"),
    ),
    "W_q_and_W_k_swapped": (
        "W_q and W_k are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        _used_for(W_q="W_k", W_k="W_q", b_q="b_k", b_k="b_q"),
    ),
    "W_q_and_W_v_swapped": (
        "W_q and W_v are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        _used_for(W_q="W_v", W_v="W_q", b_q="b_v", b_v="b_q"),
    ),
    "projections_rotated": (
        "the three parts of a packed projection are in another order",
        "The weights were trained as q, k, v.",
        _used_for(W_q="W_k", W_k="W_v", W_v="W_q", b_q="b_k", b_k="b_v", b_v="b_q")
        + _used_for(W_q="W_v", W_k="W_q", W_v="W_k", b_q="b_v", b_k="b_q", b_v="b_k"),
    ),
    "values_projected_by_W_q": (
        "the values are projected by W_q",
        "Probably a copied line; W_v is never used.",
        _used_for(W_v="W_q") + _used_for(W_v="W_q", b_v="b_q"),
    ),
    "one_projection_for_all": (
        "queries, keys and values are projected by the same weights",
        "The layer is shared; two of the three projections are never used.",
        tuple(
            variant
            for one in "qkv"
            for variant in _used_for(
                **{f"{kind}_{part}": f"{kind}_{one}" for kind in "Wb" for part in "qkv"}
            )
        ),
    ),
    "values_not_projected": (
        "the values are the embeddings themselves",
        "W_v is never used: the output is a blend of the embeddings.",
        (_identity("W_v"),),
    ),
    "nothing_projected": (
        "queries, keys and values are the embeddings themselves",
        "The weights are never used.",
        (_identity("W_q W_k W_v"),),
    ),
}
MISTAKES = mistakes("heads and projections", LINEAR, PROJECTIONS)

EQUIVALENTS = equivalents(
    {
        "b_k_lost": (
            "losing the bias of the key projection",
            "right",
            "q·b_k is the same for every key, a constant along the row, which cancels in softmax.",
            _no_bias("b_k"),
        ),
        "b_q_and_b_k_lost": (
            "losing the biases of queries and keys instead of that of the queries alone",
            "b_q_lost",
            "The bias of the keys has no effect of its own.",
            _no_bias("b_q b_k"),
        ),
    }
)

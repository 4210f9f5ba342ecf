"""Mistakes around the heads: splitting, merging, sharing, and the projections before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    blend,
    both,
    equivalents,
    heads_of,
    mistakes,
    replacing,
    softmax,
    transposed,
)
from regard.diagnosis.probe import Probe, Values, Variant

SPLIT = (
    "Q = Q.reshape(L, H, D).swapaxes(0, 1)  # (L, HD) -> (L, H, D) -> (H, L, D)",
    "q = q.view(B, L, H, D).transpose(1, 2)  # (B, L, HD) -> (B, H, L, D)",
)
MERGE = (
    "output = output.swapaxes(0, 1).reshape(L, H * E)  # (H, L, E) -> (L, H, E) -> (L, HE)",
    "output = output.transpose(1, 2).reshape(B, L, H * E)",
)
GROUPS = (
    "K = np.repeat(K, H // G, axis=-3)  # 0 0 1 1, not 0 1 0 1",
    "k = k.repeat_interleave(H // G, dim=-3)  # 0 0 1 1, not 0 1 0 1",
)
LINEAR = (
    "Q = X @ W_q  # or X @ W_q.T + b_q where W_q is stored as (out, in)",
    "q = self.W_q(x)  # nn.Linear computes x @ weight.T + bias",
)
W_O = (
    "output = merged @ W_o  # (+ b_o)",
    "output = self.W_o(merged)",
)


def _split(way: Callable[[Array, int, int], Array]) -> dict[str, Replacement]:
    """Projected queries, keys and values cut into heads in another way; ready ones are kept."""

    def replacement(name: str, head_axis: str, width_axis: str) -> Replacement:
        def split(values: Values, probe: Probe) -> Array:
            if f"projected_{name}" not in values:
                return probe.inputs[name]
            heads, width = probe.sizes[head_axis], probe.sizes[width_axis]
            return way(values[f"projected_{name}"], heads, width)

        return split

    parts = (("queries", "H", "D"), ("keys", "G", "D"), ("values", "G", "E"))
    return {part[0]: replacement(*part) for part in parts}


# (L, HD) reshaped to (H, L, D): each head gets some rows instead of some columns.
RESHAPED = _split(lambda packed, heads, width: packed.reshape(len(packed), heads, -1, width))
# (L, HD) read as (L, D, H): head h gets every H-th column.
INTERLEAVED = _split(
    lambda packed, heads, width: packed.reshape(*packed.shape[:2], width, heads).transpose(
        0, 3, 1, 2
    )
)


def _merged(order: Callable[[Array], Array]) -> Replacement:
    """The output (B, H, L, E), its axes in another order, as (B, L, HE)."""

    def merged(values: Values, probe: Probe) -> Array:
        output = values["output"]
        batch, heads, rows, width = output.shape
        return order(output).reshape(batch, rows, heads * width)

    return merged


MERGED_RESHAPED = _merged(lambda output: output)
MERGED_INTERLEAVED = _merged(lambda output: output.transpose(0, 2, 3, 1))
MERGED_REVERSED = _merged(lambda output: output[:, ::-1].swapaxes(1, 2))
MERGED_AVERAGES = _merged(
    lambda output: np.broadcast_to(output.mean(1, keepdims=True), output.shape).swapaxes(1, 2)
)


def _as_one_head(values: Values, probe: Probe) -> Array:
    """The whole width as one head: only the merged result exists."""
    queries, keys, own = (
        array.swapaxes(1, 2).reshape(len(array), array.shape[2], -1) for array in heads_of(values)
    )
    scores = queries @ transposed(keys) / np.sqrt(queries.shape[-1])
    scores = np.where(probe.visible[:, 0], scores, -np.inf)
    return np.asarray(softmax(scores) @ own)


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


def _key_head(choose: Callable[[Array, int, int], Array]) -> Variants:
    """Query head h reads key head `choose(h, heads, groups)` instead of h // (H // G)."""

    def chosen(array: Array, heads: int) -> Array:
        return array[:, choose(np.arange(heads), heads, array.shape[1])]

    def scores(values: Values, probe: Probe) -> Array:
        queries = values.get("rotated_queries", values["queries"])
        keys = values.get("rotated_keys", values["keys"])
        return queries @ transposed(chosen(keys, probe.sizes["H"]))

    def output(values: Values, probe: Probe) -> Array:
        return np.asarray(values["weights"] @ chosen(values["values"], probe.sizes["H"]))

    return (*both(scores=scores, output=output), *both(scores=scores), replacing(output=output))


def _rearranged(
    there: Callable[[Array], Array], back: Callable[[Array, tuple[int, ...]], Array]
) -> Variants:
    """Attention over other axes: arrays (B, H, L, D) go `there`, and the output comes `back`."""

    def variant(hides: bool) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            shape = probe.right["output"].shape
            queries, keys, own = map(there, heads_of(values))
            scores = queries @ transposed(keys) * values["scale"]
            if hides and probe.causal and scores.shape[-1] == scores.shape[-2]:
                scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
            elif hides and probe.has_rules:
                raise ValueError("a function would raise")
            return back(softmax(scores) @ own, shape)

        return replacing(output=output)

    return variant(hides=False), variant(hides=True)


TURNED = {
    f"W_{part}_not_transposed": (
        f"W_{part} alone is transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways.",
        (_transposed(f"W_{part}"),),
    )
    for part in "qkv"
}
HEADS: Entries = {
    "heads_split_without_transpose": (
        "heads are split by reshape alone: (L, HD) becomes (H, L, D)",
        "Each head gets some whole rows instead of its columns of every row: tokens are mixed.",
        (Variant(RESHAPED),),
    ),
    "heads_merged_without_transpose": (
        "heads are merged by reshape alone: (H, L, E) becomes (L, HE)",
        "Rows of one head end up side by side as if they were the heads of one row. Every shape "
        "is right, and training still makes some progress.",
        (replacing(merged=MERGED_RESHAPED),),
        MERGE,
    ),
    "heads_split_and_merged_without_transpose": (
        "heads are split and merged by reshape alone",
        "The two do not undo each other: attention ran within pieces of rows.",
        (Variant({**RESHAPED, "merged": MERGED_RESHAPED}),),
    ),
    "heads_interleaved": (
        "columns are dealt out to the heads in turn: (L, HD) is read as (L, D, H)",
        "Head h gets columns h, h + H, … instead of a block; weights trained elsewhere do not fit.",
        (Variant(INTERLEAVED), Variant({**INTERLEAVED, "merged": MERGED_INTERLEAVED})),
    ),
    "heads_merged_interleaved": (
        "the heads' features alternate after merging",
        "W_o expects all features of head 0, then those of head 1, and so on.",
        (replacing(merged=MERGED_INTERLEAVED),),
        MERGE,
    ),
    "head_order_reversed": (
        "the heads are merged in reverse order",
        "W_o expects head 0 first.",
        (replacing(merged=MERGED_REVERSED),),
        MERGE,
    ),
    "heads_ignored": (
        "there is one head of the whole width, whatever number was asked for",
        "Nothing is split: one softmax serves all features.",
        (replacing(merged=_as_one_head),),
    ),
    "heads_averaged": (
        "the heads are averaged instead of put side by side",
        "What each head found is lost in the mean.",
        (replacing(merged=MERGED_AVERAGES),),
        MERGE,
    ),
}
MIXED: Entries = {
    "batch_flattened": (
        "batch and rows are flattened together: queries attend to the keys of every text",
        "The batch axis has to stay apart; every shape is right at the end.",
        _rearranged(
            lambda a: a.swapaxes(0, 1).reshape(1, a.shape[1], -1, a.shape[3]),
            lambda out, shape: out.reshape(shape[1], shape[0], *shape[2:]).swapaxes(0, 1),
        ),
        SPLIT,
    ),
    "heads_flattened": (
        "heads and rows are flattened together: queries attend to the keys of every head",
        "Each head has a softmax of its own.",
        _rearranged(
            lambda a: a.reshape(a.shape[0], 1, -1, a.shape[3]),
            lambda out, shape: out.reshape(shape),
        ),
        SPLIT,
    ),
    "attention_over_heads": (
        "the heads attend to each other at every position, instead of the positions in every head",
        "The axes of heads and rows are exchanged: softmax has to run over the keys of one head.",
        _rearranged(lambda a: a.swapaxes(1, 2), lambda out, shape: out.swapaxes(1, 2))
        # Turned back all the same before they are merged.
        + _rearranged(
            lambda a: a.swapaxes(1, 2),
            lambda out, shape: out.swapaxes(1, 2).reshape(out.shape).swapaxes(1, 2),
        ),
        SPLIT,
    ),
    "attention_over_batch": (
        "the texts of a batch attend to each other at every position",
        "The axes of batch and rows are exchanged: (L, B, M) was meant, or batch_first=True.",
        _rearranged(lambda a: a.swapaxes(0, 2), lambda out, shape: out.swapaxes(0, 2)),
        SPLIT,
    ),
}


def _by_place_in_group(values: Values, probe: Probe) -> Array:
    """The output's heads, first those that come first in their group."""
    output, groups = blend(values["weights"], values["values"]), probe.sizes["G"]
    split = output.reshape(len(output), groups, -1, *output.shape[2:])
    return np.asarray(split.swapaxes(1, 2).reshape(output.shape))


KEY_HEADS: Entries = {
    "grouped_heads_merged_in_turn": (
        "the heads of the output are in turn of different groups: 0 2 1 3 instead of 0 1 2 3",
        "The axes of groups and of the heads in a group changed places before they were joined.",
        (replacing(output=_by_place_in_group),),
        (
            "output = output.reshape(B, G, H // G, L, E)  # groups first, then heads in a group",
            "out = torch.einsum('bghqk,bgkd->bghqd', w, v).flatten(1, 2)",
        ),
    ),
    "key_heads_tiled": (
        "key heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)",
        "Query head h reads key head h // (H // G); tiled, most heads read another group's keys.",
        _key_head(lambda head, heads, groups: head % groups),
    ),
    "first_key_head_for_all": (
        "every query head reads the first key head",
        "The other groups are not used.",
        _key_head(lambda head, heads, groups: 0 * head),
    ),
    "key_heads_reversed": (
        "the groups of heads are read in reverse order",
        "Query head h reads key head h // (H // G).",
        _key_head(lambda head, heads, groups: groups - 1 - head // (heads // groups)),
    ),
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
        "the bias of the output projection is added twice",
        "The layer has added it already.",
        (_changed("b_o", lambda bias: 2 * bias),),
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
MISTAKES = (
    *mistakes("heads and projections", SPLIT, HEADS),
    *mistakes("heads and projections", SPLIT, MIXED),
    *mistakes("heads and projections", GROUPS, KEY_HEADS),
    *mistakes("heads and projections", LINEAR, PROJECTIONS),
)

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

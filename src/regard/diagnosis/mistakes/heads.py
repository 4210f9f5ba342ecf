"""Mistakes around the heads: splitting, merging, and sharing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    blend,
    both,
    heads_of,
    mistakes,
    replacing,
    softmax,
    transposed,
)

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


# Head h begins at column h: all but the first share columns with their neighbours.
OVERLAPPING = _split(
    lambda packed, heads, width: np.stack(
        [packed[..., head : head + width] for head in range(heads)], axis=1
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


def _key_head(choose: Callable[[Array, int, int], Array], *, by_group: bool = False) -> Variants:
    """Query head h reads key head `choose(h, heads, groups)` instead of h // (H // G).

    If `by_group`, the output has the heads that read the first key head first.
    """

    def chosen(array: Array, heads: int) -> Array:
        return array[:, choose(np.arange(heads), heads, array.shape[1])]

    def scores(values: Values, probe: Probe) -> Array:
        queries = values.get("rotated_queries", values["queries"])
        keys = values.get("rotated_keys", values["keys"])
        return queries @ transposed(chosen(keys, probe.sizes["H"]))

    def output(values: Values, probe: Probe) -> Array:
        found = np.asarray(values["weights"] @ chosen(values["values"], probe.sizes["H"]))
        if by_group:
            split = found.reshape(len(found), -1, probe.sizes["G"], *found.shape[2:])
            found = split.swapaxes(1, 2).reshape(found.shape)
        return found

    if by_group:
        return both(scores=scores, output=output)
    return (*both(scores=scores, output=output), *both(scores=scores), replacing(output=output))


def _rearranged(
    there: Callable[[Array], Array],
    back: Callable[[Array, tuple[int, ...]], Array],
    *,
    of_batch: bool = False,
) -> Variants:
    """Attention over other axes: arrays (B, H, L, D) go `there`, and the output comes `back`.

    `of_batch`: over an axis that arrays of a single text do not have.
    """

    def variant(hides: bool) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            shape = probe.right["output"].shape
            if of_batch and shape[0] == 1 and probe.rank < (4 if "queries" in probe.inputs else 3):
                raise ValueError("there is no batch")
            queries, keys, own = map(there, heads_of(values))
            scores = queries @ transposed(keys) * values["scale"]
            square = scores.shape[-1] == scores.shape[-2] and probe.window is None
            if hides and probe.causal and square:
                scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
            elif hides and probe.has_rules:
                raise ValueError("a function would raise")
            return back(softmax(scores) @ own, shape)

        return replacing(output=output)

    return variant(hides=False), variant(hides=True)


HEADS: Entries = {
    "heads_split_without_transpose": (
        "heads are split by reshape alone: (L, HD) becomes (H, L, D)",
        "Each head gets some whole rows instead of its columns of every row: tokens are mixed.",
        (
            Variant(RESHAPED),
            *(Variant({part: RESHAPED[part]}) for part in RESHAPED),
            Variant({part: RESHAPED[part] for part in ("keys", "values")}),
            Variant({part: RESHAPED[part] for part in ("queries", "keys")}),
        ),
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
    "heads_overlap": (
        "head h begins at column h instead of h · D: heads share columns, the last are not read",
        "Each head has a block of D columns of its own.",
        (Variant(OVERLAPPING),),
        (
            "head = slice(h * D, (h + 1) * D)  # not slice(h, h + D)",
            "q_h = q[..., h * D : (h + 1) * D]  # not q[..., h : h + D]",
        ),
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
        _rearranged(
            lambda a: a.swapaxes(0, 2), lambda out, shape: out.swapaxes(0, 2), of_batch=True
        ),
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
        _key_head(lambda head, heads, groups: head % groups)
        + _key_head(lambda head, heads, groups: head % groups, by_group=True),
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
MISTAKES = (
    *mistakes("heads and projections", SPLIT, HEADS),
    *mistakes("heads and projections", SPLIT, MIXED),
    *mistakes("heads and projections", GROUPS, KEY_HEADS),
)

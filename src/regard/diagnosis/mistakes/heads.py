"""Mistakes around the heads: splitting, merging, sharing, and the projections before and after."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.diagnosis.mistakes.entry import (
    Array,
    Equivalent,
    Mistake,
    Replacement,
    grouped,
    replacing,
    softmax,
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
PARTS = (("queries", "H", "D"), ("keys", "G", "D"), ("values", "G", "E"))


def _split(name: str, way: Callable[[Array, int, int], Array]) -> Replacement:
    """The projected queries, keys or values cut into heads in another way; ready ones stay."""

    def split(values: Values, probe: Probe) -> Array:
        if f"projected_{name}" not in values:
            return probe.inputs[name]
        size = probe.sizes
        _, heads, width = next(part for part in PARTS if part[0] == name)
        return way(values[f"projected_{name}"], size[heads], size[width])

    return split


def _splits(way: Callable[[Array, int, int], Array]) -> dict[str, Replacement]:
    return {name: _split(name, way) for name, _, _ in PARTS}


def _plainly(packed: Array, heads: int, width: int) -> Array:
    """(L, HD) reshaped to (H, L, D): each head gets some rows instead of some columns."""
    return packed.reshape(packed.shape[0], heads, packed.shape[1], width)


def _interleaved(packed: Array, heads: int, width: int) -> Array:
    """(L, HD) read as (L, D, H): head h gets every H-th column."""
    return packed.reshape(*packed.shape[:2], width, heads).transpose(0, 3, 1, 2)


def _merged_plainly(values: Values, probe: Probe) -> Array:
    output = values["output"]
    batch, heads, rows, width = output.shape
    return output.reshape(batch, rows, heads * width)


def _merged_reversed(values: Values, probe: Probe) -> Array:
    output = values["output"][:, ::-1].swapaxes(1, 2)
    return output.reshape(*output.shape[:2], -1)


def _merged_interleaved(values: Values, probe: Probe) -> Array:
    """(B, H, L, E) → (B, L, E, H): the features of all heads alternate."""
    output = values["output"].transpose(0, 2, 3, 1)
    return output.reshape(*output.shape[:2], -1)


def _as_one_head(values: Values, probe: Probe) -> Array:
    """The whole width is one head: only the merged result exists."""
    queries, keys, own = (values[name] for name in ("queries", "keys", "values"))
    heads = queries.shape[1]

    def packed(array: Array) -> Array:
        array = grouped(array, heads).swapaxes(1, 2)
        return array.reshape(*array.shape[:2], -1)

    scores = packed(queries) @ packed(keys).swapaxes(-1, -2) / np.sqrt(heads * queries.shape[-1])
    scores = np.where(probe.visible[:, 0], scores, -np.inf)
    return np.asarray(softmax(scores) @ packed(own))


def _heads_averaged(values: Values, probe: Probe) -> Array:
    output = values["output"]
    mean = output.mean(axis=1)
    return np.concatenate([mean] * output.shape[1], axis=-1)


def _weight(part: str, change: Replacement) -> Variant:
    return Variant({f"W_{part}": change})


def _turned(part: str) -> Replacement:
    return lambda values, probe: probe.inputs[f"W_{part}"].T


def _other(part: str) -> Replacement:
    return lambda values, probe: probe.inputs[f"W_{part}"]


def _identity(part: str) -> Replacement:
    return lambda values, probe: np.eye(probe.inputs[f"W_{part}"].shape[0])


def _no_bias(*parts: str) -> Variant:
    def lost(part: str) -> Replacement:
        return lambda values, probe: np.zeros_like(probe.inputs[f"b_{part}"])

    return Variant({f"b_{part}": lost(part) for part in parts})


def _key_head(choose: str) -> tuple[Variant, ...]:
    """Query head h reads another key head than h // (H // G)."""

    def chosen(array: Array, heads: int) -> Array:
        groups = array.shape[1]
        index = {
            "tile": np.arange(heads) % groups,
            "first": np.zeros(heads, int),
            "reversed": groups - 1 - np.arange(heads) // (heads // groups),
        }[choose]
        return array[:, index]

    def scores(values: Values, probe: Probe) -> Array:
        keys = chosen(values["keys"], probe.sizes["H"])
        return values["queries"] @ keys.swapaxes(-1, -2)

    def output(values: Values, probe: Probe) -> Array:
        return np.asarray(values["weights"] @ chosen(values["values"], probe.sizes["H"]))

    both = {"scores": scores, "output": output}
    return (Variant(both), Variant(both, absent=False), Variant({"output": output}))


def _wrong(name: str, title: str, why: str, lines: tuple[str, str], *variants: Variant) -> Mistake:
    return Mistake(name, "heads and projections", title, why, *lines, variants)


MISTAKES = (
    _wrong(
        "heads_split_without_transpose",
        "heads are split by reshape alone: (L, HD) becomes (H, L, D)",
        "Each head gets a few whole rows cut into pieces, instead of its columns of every row: "
        "tokens are mixed up.",
        SPLIT,
        Variant(_splits(_plainly)),
    ),
    _wrong(
        "heads_merged_without_transpose",
        "heads are merged by reshape alone: (H, L, E) becomes (L, HE)",
        "Rows of one head end up side by side as if they were the heads of one row. Every shape "
        "is right, and training still gets somewhere.",
        MERGE,
        replacing(merged=_merged_plainly),
    ),
    _wrong(
        "heads_split_and_merged_without_transpose",
        "heads are split and merged by reshape alone",
        "The two do not undo each other: attention ran within pieces of rows.",
        SPLIT,
        Variant({**_splits(_plainly), "merged": _merged_plainly}),
    ),
    _wrong(
        "heads_interleaved",
        "columns are dealt out to the heads in turn: (L, HD) is read as (L, D, H)",
        "Head h gets columns h, h + H, … instead of a block of its own; weights trained elsewhere "
        "do not fit.",
        SPLIT,
        Variant(_splits(_interleaved)),
        Variant({**_splits(_interleaved), "merged": _merged_interleaved}),
    ),
    _wrong(
        "heads_merged_interleaved",
        "the heads' features alternate after merging",
        "W_o expects head after head.",
        MERGE,
        replacing(merged=_merged_interleaved),
    ),
    _wrong(
        "head_order_reversed",
        "the heads are merged in the wrong order",
        "W_o expects head 0 first.",
        MERGE,
        replacing(merged=_merged_reversed),
    ),
    _wrong(
        "heads_ignored",
        "there is one head of the whole width, whatever number was asked for",
        "The heads never part: one softmax for all features.",
        SPLIT,
        replacing(merged=_as_one_head),
    ),
    _wrong(
        "heads_averaged",
        "the heads are averaged instead of put side by side",
        "What the heads found separately is blurred into one.",
        MERGE,
        replacing(merged=_heads_averaged),
    ),
    _wrong(
        "key_heads_tiled",
        "key heads are tiled (0 1 0 1) where they should be repeated (0 0 1 1)",
        "Query head h reads key head h // (H // G); tiled, most heads read another group's keys.",
        GROUPS,
        *_key_head("tile"),
    ),
    _wrong(
        "first_key_head_for_all",
        "every query head reads the first key head",
        "The other groups are not used.",
        GROUPS,
        *_key_head("first"),
    ),
    _wrong(
        "key_heads_reversed",
        "the groups of heads are read in reverse order",
        "Query head h reads key head h // (H // G).",
        GROUPS,
        *_key_head("reversed"),
    ),
    _wrong(
        "weights_not_transposed",
        "all weights are used the other way round (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways, so nothing complains; every projection is another one.",
        LINEAR,
        Variant({f"W_{part}": _turned(part) for part in "qkvo"}),
        Variant({f"W_{part}": _turned(part) for part in "qkv"}),
    ),
    _wrong(
        "W_q_not_transposed",
        "W_q alone is used the other way round",
        "Square weights fit both ways.",
        LINEAR,
        _weight("q", _turned("q")),
    ),
    _wrong(
        "W_k_not_transposed",
        "W_k alone is used the other way round",
        "Square weights fit both ways.",
        LINEAR,
        _weight("k", _turned("k")),
    ),
    _wrong(
        "W_v_not_transposed",
        "W_v alone is used the other way round",
        "Square weights fit both ways.",
        LINEAR,
        _weight("v", _turned("v")),
    ),
    _wrong(
        "W_o_not_transposed",
        "W_o alone is used the other way round",
        "Square weights fit both ways.",
        W_O,
        _weight("o", _turned("o")),
    ),
    _wrong(
        "W_o_lost",
        "the output projection is missing",
        "Heads are put side by side and never mixed.",
        W_O,
        replacing(projected_output=lambda values, probe: values["merged"]),
    ),
    _wrong(
        "b_o_lost",
        "the bias of the output projection is missing",
        "x @ W.T is only half of what nn.Linear does.",
        W_O,
        _no_bias("o"),
    ),
    _wrong(
        "b_q_lost",
        "the bias of the query projection is missing",
        "q·k loses b_q·k, which differs from key to key.",
        LINEAR,
        _no_bias("q"),
        _no_bias("q", "k"),
    ),
    _wrong(
        "b_v_lost",
        "the bias of the value projection is missing",
        "Weights add up to 1, so the output misses exactly b_v.",
        LINEAR,
        _no_bias("v"),
    ),
    _wrong(
        "biases_lost",
        "the biases of queries, keys and values are missing",
        "x @ W.T is only half of what nn.Linear does.",
        LINEAR,
        _no_bias("q", "k", "v"),
    ),
    _wrong(
        "all_biases_lost",
        "all biases are missing",
        "x @ W.T is only half of what nn.Linear does.",
        LINEAR,
        _no_bias("q", "k", "v", "o"),
    ),
    _wrong(
        "keys_projected_by_W_q",
        "the keys are projected by W_q",
        "A line was copied and not changed; W_k is never used.",
        LINEAR,
        replacing(W_k=_other("q")),
    ),
    _wrong(
        "queries_projected_by_W_k",
        "the queries are projected by W_k",
        "A line was copied and not changed; W_q is never used.",
        LINEAR,
        replacing(W_q=_other("k")),
    ),
    _wrong(
        "values_projected_by_W_k",
        "the values are projected by W_k",
        "A line was copied and not changed; W_v is never used.",
        LINEAR,
        replacing(W_v=_other("k")),
    ),
    _wrong(
        "keys_and_values_swapped",
        "W_k and W_v are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        LINEAR,
        replacing(W_k=_other("v"), W_v=_other("k")),
    ),
    _wrong(
        "values_not_projected",
        "the values are the embeddings themselves",
        "W_v is never used, so a head can only blend what was there before.",
        LINEAR,
        replacing(W_v=_identity("v")),
    ),
    _wrong(
        "nothing_projected",
        "queries, keys and values are the embeddings themselves",
        "The weights are never used.",
        LINEAR,
        Variant({f"W_{part}": _identity(part) for part in "qkv"}),
    ),
)

EQUIVALENTS = (
    Equivalent(
        "b_k_lost",
        "losing the bias of the key projection",
        "right",
        "q·b_k is the same for every key, a constant along the row, which softmax does not see.",
        _no_bias("k"),
    ),
    Equivalent(
        "b_q_and_b_k_lost",
        "losing the biases of queries and keys instead of that of the queries alone",
        "b_q_lost",
        "The bias of the keys has no effect of its own.",
        _no_bias("q", "k"),
    ),
)

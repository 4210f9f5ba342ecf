"""Mistakes around the heads: splitting, merging, and sharing."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

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

HEADS = {
    "heads_split_without_transpose": (
        "heads are split by reshape alone: (L, HD) becomes (H, L, D)",
        "Each head gets some whole rows instead of its columns of every row: tokens are mixed.",
        "cut = packed.reshape(len(packed), heads, packed.shape[1], -1)",
    ),
    "heads_merged_without_transpose": (
        "heads are merged by reshape alone: (H, L, E) becomes (L, HE)",
        "Rows of one head end up side by side as if they were the heads of one row. Every shape "
        "is right, and training still makes some progress.",
        "merged = output.reshape(B, L, H * E)",
        MERGE,
    ),
    "heads_split_and_merged_without_transpose": (
        "heads are split and merged by reshape alone",
        "The two do not undo each other: attention ran within pieces of rows.",
        "cut = packed.reshape(len(packed), heads, packed.shape[1], -1); "
        "merged = output.reshape(B, L, H * E)",
    ),
    "heads_interleaved": (
        "columns are dealt out to the heads in turn: (L, HD) is read as (L, D, H)",
        "Head h gets columns h, h + H, … instead of a block; weights trained elsewhere do not fit.",
        "cut = packed.reshape(*packed.shape[:2], -1, heads).transpose(0, 3, 1, 2)",
        "cut = packed.reshape(*packed.shape[:2], -1, heads).transpose(0, 3, 1, 2); "
        "merged = output.transpose(0, 2, 3, 1).reshape(B, L, H * E)",
    ),
    "heads_overlap": (
        "head h begins at column h instead of h · D: heads share columns, the last are not read",
        "Each head has a block of D columns of its own.",
        "cut = np.stack([packed[..., n : n + packed.shape[-1] // heads] for n in range(heads)], 1)",
        (
            "head = slice(h * D, (h + 1) * D)  # not slice(h, h + D)",
            "q_h = q[..., h * D : (h + 1) * D]  # not q[..., h : h + D]",
        ),
    ),
    "heads_merged_interleaved": (
        "the heads' features alternate after merging",
        "W_o expects all features of head 0, then those of head 1, and so on.",
        "merged = output.transpose(0, 2, 3, 1).reshape(B, L, H * E)",
        MERGE,
    ),
    "head_order_reversed": (
        "the heads are merged in reverse order",
        "W_o expects head 0 first.",
        "merged = output[:, ::-1].swapaxes(1, 2).reshape(B, L, H * E)",
        MERGE,
    ),
    "heads_ignored": (
        "there is one head of the whole width, whatever number was asked for",
        "Nothing is split: one softmax serves all features.",
        "merged = attend(flat(q), flat(k), flat(v))",
        "merged = softmax("
        "np.where(keep[:, 0], flat(q) @ T(flat(k)) / np.sqrt(H * D), -np.inf)) @ flat(v)",
    ),
    "heads_averaged": (
        "the heads are averaged instead of put side by side",
        "What each head found is lost in the mean.",
        "merged = np.concatenate([output.mean(1)] * H, -1)",
        MERGE,
    ),
}
MIXED = {
    "batch_flattened": (
        "batch and rows are flattened together: queries attend to the keys of every text",
        "The batch axis has to stay apart; every shape is right at the end.",
        "axes = attend(*map(of_all_texts, (q, k, v))).reshape(H, B, L, E).swapaxes(0, 1)",
        SPLIT,
    ),
    "heads_flattened": (
        "heads and rows are flattened together: queries attend to the keys of every head",
        "Each head has a softmax of its own.",
        "axes = attend(*map(of_all_heads, (q, k, v))).reshape(B, H, L, E)",
        SPLIT,
    ),
    "attention_over_heads": (
        "the heads attend to each other at every position, instead of the positions in every head",
        "The axes of heads and rows are exchanged: softmax has to run over the keys of one head.",
        "axes = attend(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)",
        "axes = attend(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)"
        ".reshape(B, L, H, E).swapaxes(1, 2)",
        "axes = attend(*(a.swapaxes(1, 2) for a in (q, k, v)), causal=True).swapaxes(1, 2)",
        SPLIT,
    ),
    "attention_over_batch": (
        "the texts of a batch attend to each other at every position",
        "The axes of batch and rows are exchanged: (L, B, M) was meant, or batch_first=True.",
        "axes = attend(*(a.swapaxes(0, 2) for a in (q, k, v))).swapaxes(0, 2)",
        "axes = attend(*(a.swapaxes(0, 2) for a in (q, k, v)), causal=True).swapaxes(0, 2)",
        SPLIT,
    ),
}
KEY_HEADS = {
    "grouped_heads_merged_in_turn": (
        "the heads of the output are in turn of different groups: 0 2 1 3 instead of 0 1 2 3",
        "The axes of groups and of the heads in a group changed places before they were joined.",
        "grouped = (weights @ v).reshape(B, G, H // G, L, E).swapaxes(1, 2).reshape(B, H, L, E)",
        (
            "output = output.reshape(B, G, H // G, L, E)  # groups first, then heads in a group",
            "out = torch.einsum('bghqk,bgkd->bghqd', w, v).flatten(1, 2)",
        ),
    ),
    "key_heads_tiled": (
        "key heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)",
        "Query head h reads key head h // (H // G); tiled, most heads read another group's keys.",
        "repeat = np.tile(one, (1, H // G, 1, 1))",
    ),
    "first_key_head_for_all": (
        "every query head reads the first key head",
        "The other groups are not used.",
        "repeat = np.repeat(one[:, :1], H, 1)",
    ),
    "key_heads_reversed": (
        "the groups of heads are read in reverse order",
        "Query head h reads key head h // (H // G).",
        "repeat = np.repeat(one[:, ::-1], H // G, 1)",
    ),
}
MISTAKES = (
    *written("heads and projections", SPLIT, HEADS),
    *written("heads and projections", SPLIT, MIXED),
    *written("heads and projections", GROUPS, KEY_HEADS),
)

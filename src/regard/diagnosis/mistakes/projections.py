"""Mistakes in the projections before and after the heads."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

LINEAR = (
    "Q = X @ W_q  # or X @ W_q.T + b_q where W_q is stored as (out, in)",
    "q = self.W_q(x)  # nn.Linear computes x @ weight.T + bias",
)
W_O = (
    "output = merged @ W_o  # (+ b_o)",
    "output = self.W_o(merged)",
)

TURNED = {
    f"W_{part}_not_transposed": (
        f"W_{part} alone is transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways.",
        f"W_{part} = W_{part}.T",
    )
    for part in "qkv"
}
PROJECTIONS = {
    "weights_not_transposed": (
        "all weights are transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways, so nothing complains; every projection is another one.",
        "W_q = W_q.T; W_k = W_k.T; W_v = W_v.T; W_o = W_o.T",
        "W_q = W_q.T; W_k = W_k.T; W_v = W_v.T",
    ),
    **TURNED,
    "W_o_not_transposed": (
        "W_o alone is transposed (x @ W for x @ W.T, or the reverse)",
        "Square weights fit both ways.",
        "W_o = W_o.T",
        W_O,
    ),
    "W_o_lost": (
        "the output projection is missing",
        "Heads are put side by side and never mixed.",
        "projected_output = merged",
        W_O,
    ),
    "b_o_lost": (
        "the bias of the output projection is missing",
        "x @ W.T is only half of what nn.Linear does.",
        "b_o = 0 * b_o",
        W_O,
    ),
    "b_q_lost": (
        "the bias of the query projection is missing",
        "q·k loses b_q·k, which differs from key to key.",
        "b_q = 0 * b_q",
        "b_q = 0 * b_q; b_k = 0 * b_k",
    ),
    "b_v_lost": (
        "the bias of the value projection is missing",
        "Weights add up to 1, so exactly b_v is missing from the output.",
        "b_v = 0 * b_v",
    ),
    "biases_lost": (
        "the biases of queries, keys and values are missing",
        "x @ W.T is only half of what nn.Linear does.",
        "b_q = 0 * b_q; b_k = 0 * b_k; b_v = 0 * b_v",
    ),
    "b_q_and_b_k_swapped": (
        "the biases of queries and keys are swapped",
        "Each belongs to its own projection.",
        "b_q = b_k; b_k = b_q",
    ),
    "b_k_and_b_v_swapped": (
        "the biases of keys and values are swapped",
        "Each belongs to its own projection.",
        "b_k = b_v; b_v = b_k",
    ),
    "b_q_for_all": (
        "the bias of the queries is used for keys and values too",
        "Probably a copied line; b_k and b_v are never used.",
        "b_k = b_q; b_v = b_q",
        "b_v = b_q",
    ),
    "b_o_twice": (
        "the bias of the output projection is added more than once",
        "The layer has added it already; heads' parts of the output are added up without it.",
        "b_o = 2 * b_o",
        "b_o = H * b_o",
        W_O,
    ),
    "all_biases_lost": (
        "all biases are missing",
        "x @ W.T is only half of what nn.Linear does.",
        "b_q = 0 * b_q; b_k = 0 * b_k; b_v = 0 * b_v; b_o = 0 * b_o",
    ),
    "keys_projected_by_W_q": (
        "the keys are projected by W_q",
        "Probably a copied line; W_k is never used.",
        "W_k = W_q",
        "W_k = W_q; b_k = b_q",
    ),
    "queries_projected_by_W_k": (
        "the queries are projected by W_k",
        "Probably a copied line; W_q is never used.",
        "W_q = W_k",
        "W_q = W_k; b_q = b_k",
    ),
    "values_projected_by_W_k": (
        "the values are projected by W_k",
        "Probably a copied line; W_v is never used.",
        "W_v = W_k",
        "W_v = W_k; b_v = b_k",
    ),
    "context_ignored": (
        "keys and values are projected from the queries' own embeddings, not from the context",
        "It is self-attention: what was given as a context is never read.",
        "context = x",
        "output = attend(q, split(x @ W_k + b_k), split(x @ W_v + b_v))",
        (
            "keys, values = context @ W_k, context @ W_v",
            "k, v = self.W_k(context), self.W_v(context)",
        ),
    ),
    "keys_and_values_swapped": (
        "W_k and W_v are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        "W_k = W_v; W_v = W_k",
        "W_k = W_v; W_v = W_k; b_k = b_v; b_v = b_k",
    ),
    "W_q_and_W_v_swapped": (
        "W_q and W_v are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        "W_q = W_v; W_v = W_q; b_q = b_v; b_v = b_q",
    ),
    "projections_rotated": (
        "the three parts of a packed projection are in another order",
        "The weights were trained as q, k, v.",
        "W_q = W_k; W_k = W_v; W_v = W_q; b_q = b_k; b_k = b_v; b_v = b_q",
        "W_q = W_v; W_k = W_q; W_v = W_k; b_q = b_v; b_k = b_q; b_v = b_k",
    ),
    "values_projected_by_W_q": (
        "the values are projected by W_q",
        "Probably a copied line; W_v is never used.",
        "W_v = W_q",
        "W_v = W_q; b_v = b_q",
    ),
    "one_projection_for_all": (
        "queries, keys and values are projected by the same weights",
        "The layer is shared; two of the three projections are never used.",
        "W_k = W_q; W_v = W_q; b_k = b_q; b_v = b_q",
        "W_q = W_k; W_v = W_k; b_q = b_k; b_v = b_k",
        "W_q = W_v; W_k = W_v; b_q = b_v; b_k = b_v",
    ),
    "values_not_projected": (
        "the values are the embeddings themselves",
        "W_v is never used: the output is a blend of the embeddings.",
        "W_v = np.eye(M)",
    ),
    "nothing_projected": (
        "queries, keys and values are the embeddings themselves",
        "The weights are never used.",
        "W_q = np.eye(M); W_k = np.eye(M); W_v = np.eye(M)",
    ),
    "queries_from_context": (
        "queries are made of the context",
        "A query asks, and what it reads is the context; the two may be exchanged as well.",
        "embeddings = context; context = x",
        "embeddings = context",
        ("q, k = x @ W_q, context @ W_k", "q, k = self.W_q(x), self.W_k(context)"),
    ),
    "fused_columns_misread": (
        "the columns of a fused projection are taken apart in another order than they have",
        "(3, heads, D) has all queries first, (heads, 3, D) one head after the other.",
        "fused = fused.reshape(B, L, heads, 3, -1).transpose(3, 0, 2, 1, 4)",
        (
            "q, k, v = np.moveaxis(qkv.reshape(B, L, 3, heads, D), 2, 0)",
            "q, k, v = qkv.view(B, L, 3, heads, D).unbind(2)",
        ),
    ),
}
# In self-attention this is the same as swapping queries and keys.
CROSSED = {
    "W_q_and_W_k_swapped": (
        "W_q and W_k are swapped",
        "The parts of a packed projection were unpacked in the wrong order.",
        "W_q = W_k; W_k = W_q; b_q = b_k; b_k = b_q",
    ),
}
MISTAKES = (
    *written("heads and projections", LINEAR, PROJECTIONS),
    *written("heads and projections", LINEAR, CROSSED, "context"),
)

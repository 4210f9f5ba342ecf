"""Mistakes in backward passes: the textbook's backward steps with some of them replaced.

The weights that a backward pass computes again may have every mistake of the forward pass too.
"""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

SCALE = (
    "dQ = scale * dS @ K; dK = scale * dS.swapaxes(-1, -2) @ Q",
    "dq = scale * ds @ k; dk = scale * ds.transpose(-1, -2) @ q",
)
SOFTMAX = (
    "dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))",
    "ds = p * (dp - (p * dp).sum(-1, keepdim=True))",
)
VALUES = ("dV = P.swapaxes(-1, -2) @ dO", "dv = p.transpose(-1, -2) @ do")
WEIGHTS = ("dP = dO @ V.swapaxes(-1, -2)", "dp = do @ v.transpose(-1, -2)")


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
BLOCKS = (2, 3, 4, 8, 16, 32, 64)  # of keys

SCALES = {
    "gradient_not_scaled": (
        "dQ and dK are not multiplied by the scale",
        "The scores were scaled after Q·Kᵀ, so their gradient is scaled on its way back.",
        "d_scores = d_scaled",
    ),
    "gradient_of_queries_not_scaled": (
        "dQ is not multiplied by the scale",
        "dK is; the gradient of the scores needs the scale before it meets K and Q.",
        "d_queries = d_scaled @ k",
    ),
    "gradient_of_keys_not_scaled": (
        "dK is not multiplied by the scale",
        "dQ is; the gradient of the scores needs the scale before it meets K and Q.",
        "d_keys = T(d_scaled) @ q",
    ),
    "gradient_scaled_twice": (
        "dQ and dK are multiplied by the scale twice",
        "The scores were scaled once; if Q is scaled already, dK needs no further factor.",
        "d_scores = d_scaled * scale**2",
    ),
    "gradient_of_queries_scaled_twice": (
        "dQ is multiplied by the scale twice",
        "dK is scaled once, as it should be.",
        "d_queries = scale * d_scores @ k",
    ),
    "gradient_of_keys_scaled_twice": (
        "dK is multiplied by the scale twice",
        "If Q is scaled before it meets K, dSᵀ·Q has the scale already.",
        "d_keys = scale * T(d_scores) @ q",
    ),
    "gradient_divided_by_scale": (
        "dQ and dK are divided by the scale",
        "Dividing by 1/√D makes them D times too large.",
        "d_scores = d_scaled / scale",
    ),
    "gradient_of_values_scaled": (
        "dV is multiplied by the scale",
        "The scale belongs to the scores; the output is P·V without it.",
        "d_values = scale * T(weights) @ d_output",
    ),
    "backward_without_scale": (
        "the scores are not scaled, neither forward nor backward",
        "The forward pass divides by √D, so the backward pass has to in both places.",
        "scale = 1.0",
    ),
    "backward_scaled_by_width": (
        "the scale is 1/D instead of 1/√D, in the scores and in their gradient",
        "Scores are √D times too small, and so are the gradients.",
        "scale = 1 / D",
    ),
}
SOFTMAXES = {
    "delta_forgotten": (
        "δ is not subtracted: dS = P·dP",
        "The weights of a row add up to 1: raising one lowers the others, which δ = Σ_j P·dP says.",
        "d_logits = weights * d_weights",
    ),
    "softmax_elementwise": (
        "softmax is differentiated cell by cell: dS = dP·P·(1 − P)",
        "That is the diagonal of its Jacobian alone; every weight depends on every score of its "
        "row. With two keys the rows that are equal hide it.",
        "d_logits = d_weights * weights * (1 - weights)",
    ),
    "delta_of_weights": (
        "δ is Σ P·P instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        "delta = (weights**2).sum(-1)",
    ),
    "delta_unweighted": (
        "δ is Σ dP instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        "delta = d_weights.sum(-1)",
    ),
    "delta_mean": (
        "δ is the plain mean of dP instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        "delta = d_weights.mean(-1)",
    ),
    "delta_of_outputs": (
        "δ is Σ O·O instead of Σ dO·O",
        "One of the two factors is the gradient of the output.",
        "delta = (output**2).sum(-1)",
    ),
    "delta_of_values": (
        "δ is Σ dO·V instead of Σ dO·O",
        "Row i of V is of key i, and has nothing to do with what query i gets.",
        "delta = (d_output * v).sum(-1)",
    ),
    "delta_of_gradients": (
        "δ is Σ dO·dO instead of Σ dO·O",
        "One of the two factors is the output itself.",
        "delta = (d_output**2).sum(-1)",
    ),
    "delta_without_output": (
        "δ is Σ dO instead of Σ dO·O",
        "The output is missing: each number of dO has to be multiplied by that of O.",
        "delta = d_output.sum(-1)",
    ),
    "delta_over_queries": (
        "δ is summed over the queries instead of the keys",
        "Softmax runs along each row, and so does the sum that its gradient subtracts.",
        "d_logits = weights * (d_weights - (weights * d_weights).sum(-2, keepdims=True))",
    ),
    "delta_over_everything": (
        "δ is summed over queries and keys",
        "Softmax runs along each row, and so does the sum that its gradient subtracts.",
        "d_logits = weights * (d_weights - delta.sum(-2, keepdims=True))",
    ),
    "delta_of_one_block": (
        "δ is summed over one block of keys instead of the whole row",
        "δ belongs to the row: Σ P·dP over all keys, which is Σ dO·O, known before any block.",
        *(
            f"d_logits = weights * (d_weights - of_blocks(weights * d_weights, {n}))"
            for n in BLOCKS
        ),
        (
            "delta = (dO * O).sum(axis=-1, keepdims=True)  # before the loop over blocks",
            "delta = (do * o).sum(-1, keepdim=True)  # before the loop over blocks",
        ),
    ),
    "delta_lost_its_axis": (
        "δ lost its axis (no keepdims): column j gets the δ of row j",
        "On a square matrix NumPy broadcasts it along the wrong axis without an error.",
        "d_logits = weights * (d_weights - T(delta))",
    ),
    "delta_added": (
        "δ is added instead of subtracted",
        "dS = P·(dP − δ): its rows add up to 0.",
        "d_logits = weights * (d_weights + delta)",
    ),
    "delta_outside": (
        "δ is subtracted without the factor P: dS = P·dP − δ",
        "P multiplies both: dS = P·(dP − δ).",
        "d_logits = weights * d_weights - delta",
    ),
    "weights_lost_in_softmax": (
        "dS is dP − δ without the factor P",
        "P multiplies both: dS = P·(dP − δ).",
        "d_logits = d_weights - delta",
    ),
    "softmax_skipped_backward": (
        "softmax is left out of the backward pass: dS = dP",
        "The gradient of the weights is used as that of the scores.",
        "d_logits = d_weights",
    ),
    "softmax_negated": (
        "dS has the wrong sign: P·(δ − dP)",
        "dQ and dK then point away from where they should.",
        "d_logits = weights * (delta - d_weights)",
    ),
    "weights_for_their_gradient": (
        "P is used where dP is needed",
        "dS = P·(dP − δ) with dP = dO·Vᵀ.",
        "d_logits = weights * (weights - (weights**2).sum(-1, keepdims=True))",
        "d_logits = weights * (weights - delta)",
    ),
    "gradient_for_weights": (
        "dP is used where P is needed",
        "dS = P·(dP − δ) with the weights P outside.",
        "d_logits = d_weights * (d_weights - (d_weights**2).sum(-1, keepdims=True))",
        "d_logits = d_weights * (d_weights - delta)",
    ),
    "log_softmax_backward": (
        "dS is the gradient of log_softmax: dP − P·Σ dP",
        "The forward pass has softmax, not its logarithm.",
        "d_logits = d_weights - weights * d_weights.sum(-1, keepdims=True)",
    ),
    "exponentials_for_weights": (
        "dS is made of exponentials that are not divided by their sum",
        "dS = P·(dP − δ) with weights P that add up to 1.",
        "d_logits = e * (d_weights - delta)",
        "d_logits = np.exp(logits) * (d_weights - delta)",
    ),
    "softcap_slope_lost": (
        "the slope of the softcap is left out or wrong: 1 − tanh²",
        "The scores went through cap·tanh(s / cap), so their gradient is multiplied by its slope.",
        "d_scaled = d_capped",
        "d_scaled = d_capped * (1 - capped / cap) ** 2",
        "d_scaled = d_capped * (1 - (scaled / cap) ** 2)",
        "d_scaled = d_capped * (1 - capped**2)",
        "d_scaled = d_capped * (1 - np.tanh(scaled) ** 2)",
        "d_scaled = d_capped * (1 - np.tanh(capped / cap) ** 2)",
        "d_scaled = d_capped * (1 - capped / cap)",
        "d_scaled = d_capped * (1 - (capped / cap) ** 2) / cap",
        "d_scaled = d_capped * (1 - (capped / cap) ** 2) * cap",
        (
            "dS = dS * (1 - np.tanh(s / cap) ** 2)",
            "ds = ds * (1 - torch.tanh(s / cap) ** 2)",
        ),
    ),
    "squared_weights": (
        "dS = P·P·(dP − δ): the weights count twice",
        "P multiplies dP − δ once.",
        "d_logits = weights**2 * (d_weights - delta)",
    ),
}
OF_WEIGHTS = {
    "mask_forgotten_backward": (
        "hidden keys get weight again in the backward pass",
        "The weights that are made again from the saved log-sum-exp need the mask as well.",
        "again = np.exp(raw - lse)",
        ("P = np.where(keep, np.exp(S - lse), 0)", "p = (s - lse).exp().masked_fill(~keep, 0)"),
    ),
    "lse_of_another_base": (
        "the saved log-sum-exp is of another base than the exponentials of the backward pass",
        "exp2 needs a log-sum-exp of base 2, and exp one of base e: 1.4427 lies between them.",
        "again = np.exp(logits - lse / np.log(2))",
        "again = np.exp(logits - lse * np.log(2))",
        "again = np.exp2(logits - lse)",
        "again = np.exp2(logits / np.log(2) - lse)",
        ("P = np.exp(S - lse)  # both of base e", "p = (s - lse).exp()  # both of base e"),
    ),
    "keys_for_values_backward": (
        "dP is dO·Kᵀ: keys are used instead of values",
        "The weights met the values, so their gradient does.",
        "d_weights = d_output @ T(k)",
    ),
    "gradient_of_weights_transposed": (
        "dP is V·dOᵀ, transposed",
        "Rows of dP belong to queries, columns to keys.",
        "d_weights = v @ T(d_output)",
    ),
    "output_for_its_gradient": (
        "dP is O·Vᵀ: the output is used instead of its gradient",
        "A backward pass starts from dO.",
        "d_weights = output @ T(v)",
    ),
}
OF_VALUES = {
    "weights_not_transposed_backward": (
        "dV is P·dO instead of Pᵀ·dO",
        "With as many queries as keys no shape shows it. Row j of dV belongs to key j.",
        "d_values = weights @ d_output",
    ),
    "gradient_of_values_from_scores": (
        "dV is dSᵀ·dO: the gradient of the scores is used instead of the weights",
        "The output is P·V, so dV = Pᵀ·dO.",
        "d_values = T(d_scores) @ d_output",
        "d_values = T(d_scaled) @ d_output",
    ),
    "gradient_of_values_from_gradient": (
        "dV is dPᵀ·dO: the gradient of the weights is used instead of the weights",
        "The output is P·V, so dV = Pᵀ·dO.",
        "d_values = T(d_weights) @ d_output",
    ),
    "gradient_of_values_unnormalised": (
        "dV uses exponentials that are not divided by their sum",
        "The output is P·V with weights that add up to 1.",
        "d_values = T(e) @ d_output",
        "d_values = T(np.exp(logits)) @ d_output",
    ),
    "gradient_of_values_from_output": (
        "dV is Pᵀ·O: the output is used instead of its gradient",
        "A backward pass starts from dO.",
        "d_values = T(weights) @ output",
    ),
}
OF_SCORES = {
    "gradient_of_keys_not_transposed": (
        "dK is dS·Q instead of dSᵀ·Q",
        "With as many queries as keys no shape shows it. Row j of dK belongs to key j.",
        "d_keys = d_scores @ q",
    ),
    "gradient_of_queries_transposed": (
        "dQ is dSᵀ·K instead of dS·K",
        "With as many queries as keys no shape shows it. Row i of dQ belongs to query i.",
        "d_queries = T(d_scores) @ k",
    ),
    "queries_for_keys_backward": (
        "dQ is dS·Q: queries are used instead of keys",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        "d_queries = d_scores @ q",
    ),
    "keys_for_queries_backward": (
        "dK is dSᵀ·K: keys are used instead of queries",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        "d_keys = T(d_scores) @ k",
    ),
    "values_for_keys_backward": (
        "dQ is dS·V: values are used instead of keys",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        "d_queries = d_scores @ v",
    ),
    "weights_for_scores_backward": (
        "dQ and dK use the weights P instead of the gradient of the scores",
        "dQ = scale·dS·K and dK = scale·dSᵀ·Q.",
        "d_scores = weights * scale",
        "d_scores = weights",
    ),
}
RETURNED = {
    "keys_and_values_returned_swapped": (
        "dK and dV are returned in each other's place",
        "Where keys and values have one shape, nothing else shows it.",
        "dk = dv; dv = dk",
    ),
    "queries_and_keys_returned_swapped": (
        "dQ and dK are returned in each other's place",
        "Where queries and keys have one shape, nothing else shows it.",
        "dq = dk; dk = dq",
    ),
    "queries_and_values_returned_swapped": (
        "dQ and dV are returned in each other's place",
        "Where queries and values have one shape, nothing else shows it.",
        "dq = dv; dv = dq",
    ),
    "gradient_lost": (
        "a gradient is 0: nothing reaches that input",
        "A part of the computation is detached (no_grad, detach, .data, stop_gradient, a copy to "
        "NumPy), or its gradient is never written.",
        "dk = 0 * dk",
        "dq = 0 * dq",
        "dv = 0 * dv",
        "dq = 0 * dq; dk = 0 * dk; dv = 0 * dv",
        "dq = 0 * dq; dk = 0 * dk",
        "dq = 0 * dq; dv = 0 * dv",
        "dk = 0 * dk; dv = 0 * dv",
        (
            "no line of NumPy between the inputs and the output loses a gradient by itself",
            "with torch.no_grad(), .detach(), .data and .item() only for what is not trained",
        ),
    ),
    "gradient_doubled": (
        "a gradient is twice what it should be",
        "It is added up twice, as with += on an array that holds it already.",
        "dk = 2 * dk",
        "dq = 2 * dq",
        "dv = 2 * dv",
        "dq = 2 * dq; dk = 2 * dk; dv = 2 * dv",
        "dq = 2 * dq; dk = 2 * dk",
        "dq = 2 * dq; dv = 2 * dv",
        "dk = 2 * dk; dv = 2 * dv",
        SUMS,
    ),
    "gradient_negated": (
        "a gradient has the wrong sign",
        "A step along it then goes the wrong way.",
        "dk = -dk",
        "dq = -dq",
        "dv = -dv",
        "dq = -dq; dk = -dk; dv = -dv",
    ),
}
GROUPS = {
    "grouped_gradient_overwritten": (
        "each query head overwrites the gradient of its key head: only the last one counts",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        "together = each[:, :, -1]",
        (
            "dK[h // (H // G)] += …  # not =, for every query head h",
            "dk[h // (H // G)] += …  # not =",
        ),
    ),
    "grouped_gradient_of_first": (
        "only the first query head counts in the gradient of a key head",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        "together = each[:, :, 0]",
    ),
    "grouped_gradient_averaged": (
        "the gradient of a key head is the mean over its query heads instead of the sum",
        "A key head is read by several query heads, and its gradient is the sum of theirs.",
        "together = each.mean(2)",
    ),
    "grouped_gradient_tiled": (
        "the gradient of a key head adds up the wrong query heads: h mod G instead of h // (H / G)",
        "Query heads that read one key head lie beside each other.",
        "together = each.reshape(B, H // G, G, *each.shape[3:]).sum(1)",
    ),
}
HIDDEN = {
    "backward_not_masked": (
        "the weights are computed again without hiding keys",
        "The forward pass hides them, so the backward pass has to, with the same rule.",
        "seen = np.ones_like(keep)",
    ),
}
OF_BLOCKS = {
    "block_counted_twice": (
        "the last block is added twice",
        "A loop over blocks adds each of them once.",
        "blocks_of_queries = cuts(L, n) + cuts(L, n)[-1:]",
        "blocks_of_keys = cuts(S, n) + cuts(S, n)[-1:]",
    ),
    "block_overwritten": (
        "each block overwrites the sum: only the last one counts",
        "Gradients of blocks are added up: += instead of =.",
        "sum_of_keys = 0; sum_of_values = 0",
        "sum_of_keys = 0",
        "sum_of_values = 0",
        "sum_of_queries = 0",
    ),
    "first_block_counted_twice": (
        "the first block is added twice",
        "A loop over blocks adds each of them once.",
        "blocks_of_queries = cuts(L, n)[:1] + cuts(L, n)",
        "blocks_of_keys = cuts(S, n)[:1] + cuts(S, n)",
    ),
    "last_block_lost_backward": (
        "the last block is missing in a sum over blocks",
        "A range that ends one block early loses it.",
        "blocks_of_queries = cuts(L, n)[:-1]",
        "blocks_of_keys = cuts(S, n)[:-1]",
        "blocks_of_queries = cuts(L // n * n, n)",
        "blocks_of_keys = cuts(S // n * n, n)",
    ),
    "first_block_lost_backward": (
        "the first block is missing in a sum over blocks",
        "A range that begins one block late loses it.",
        "blocks_of_queries = cuts(L, n)[1:]",
        "blocks_of_keys = cuts(S, n)[1:]",
    ),
}
MISTAKES = (
    *written("gradients", SCALE, SCALES),
    *written("gradients", SOFTMAX, SOFTMAXES),
    *written("gradients", WEIGHTS, OF_WEIGHTS),
    *written("gradients", VALUES, OF_VALUES),
    *written("gradients", SCALE, OF_SCORES),
    *written("gradients", PARTS, RETURNED),
    *written("gradients", HEADS, GROUPS),
    *written("gradients", HIDING, HIDDEN),
    *written("gradients", SUMS, OF_BLOCKS),
)

"""Mistakes of attention that is computed some keys at a time: how blocks are cut and merged."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

RESCALE = (
    "m_new = np.maximum(m, s.max(-1, keepdims=True)); p = np.exp(s - m_new); a = np.exp(m - m_new)"
    "; z = a * z + p.sum(-1, keepdims=True); out = a * out + p @ v; m = m_new  # at last out / z",
    "m_new = torch.maximum(m, s.amax(-1, True)); p = (s - m_new).exp(); a = (m - m_new).exp()"
    "; z = a * z + p.sum(-1, True); out = a * out + p @ v; m = m_new  # at last out / z",
)
MERGE = (
    "share = np.exp(lse - lse.max(0)); out = (share * outs).sum(0) / share.sum(0)",
    "out = (torch.softmax(lse, dim=0) * outs).sum(0)",
)
CUT = (
    "for start in range(0, S, block): k_j = K[start:start + block]  # the last may be shorter",
    "for k_j, v_j in zip(k.split(block, dim=-2), v.split(block, dim=-2)):",
)
KEYS = (
    "for j in range(S):  # 0 … S − 1; K[:S] and V[:S] are all keys and values",
    "for j in range(S):  # 0 … S − 1; k[..., :S, :] and v[..., :S, :] are all keys and values",
)
VISIBLE = (
    "keep = j_of_keys <= i_of_queries[:, None]  # cell by cell in blocks on the diagonal",
) * 2

BLOCKS = {
    "block_output_not_rescaled": (
        "the output so far is not rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so they count too much.",
        "running_output = out + p @ own",
        "share = z; total = (np.exp(m - m.max(0)) * z).sum(0)",
    ),
    "block_sum_not_rescaled": (
        "the sum so far is not rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so their sum is too large.",
        "running_sum = z + p.sum(-1, keepdims=True)",
        "share = np.exp(m - m.max(0)) * z; total = z.sum(0)",
    ),
    "blocks_not_rescaled": (
        "neither the output nor the sum so far is rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so they count too much.",
        "running_sum = z + p.sum(-1, keepdims=True); running_output = out + p @ own",
    ),
    "block_correction_inverted": (
        "the correction of earlier blocks is inverted: exp(new − old) for exp(old − new)",
        "What was shifted by the smaller maximum has to become smaller, not larger.",
        "correction = np.exp(m_new - m)",
    ),
    "block_output_correction_inverted": (
        "the correction of the output so far is inverted: exp(new − old) for exp(old − new)",
        "What was shifted by the smaller maximum has to become smaller, not larger.",
        "running_output = out / a + p @ own",
    ),
    "block_shifted_by_own_maximum": (
        "each block is shifted by its own maximum and never corrected to the common one",
        "Exponentials of two blocks can be added only if both were shifted by the same number.",
        "shift = s.max(-1, keepdims=True)",
    ),
    "block_divided_each_time": (
        "the output is divided by the sum in every block, not only at the end",
        "Divide once, after the last block, or multiply the sum before back in.",
        "running_output = (a * out + p @ own) / z; divided = out",
    ),
    "blocks_averaged": (
        "the outputs of the blocks are averaged",
        "A block with a larger sum of exponentials must count more.",
        "share = np.ones_like(lse)",
        MERGE,
    ),
    "blocks_added": (
        "the outputs of the blocks are added, each with a softmax of its own",
        "The weights of all blocks together add up to the number of blocks instead of 1.",
        "share = np.ones_like(lse); total = 1.0",
        MERGE,
    ),
    "blocks_merged_by_lse": (
        "the outputs of the blocks are merged in proportion to their log-sum-exp",
        "A logarithm is no share: the shares are the softmax of the log-sum-exps.",
        "share = lse",
        MERGE,
    ),
    "blocks_merged_by_sum": (
        "the outputs of the blocks are merged by sums that were shifted by different maxima",
        "Each sum has to be multiplied by exp(m − largest m) first.",
        "share = z",
        MERGE,
    ),
    "blocks_merged_by_maximum": (
        "the outputs of the blocks are merged by exp of their maxima alone",
        "The share of a block is exp(m) times its sum.",
        "share = np.exp(m - m.max(0))",
        MERGE,
    ),
    "merged_lse_is_the_larger": (
        "the log-sum-exp of two merged blocks is taken as the larger of theirs",
        "It is log(exp(a) + exp(b)): from the third block on, earlier ones count too little.",
        "merged_lse = np.maximum(lse, new)",
        MERGE,
    ),
    "blocks_merged_by_each_others_share": (
        "each of two merged blocks gets the share of the other",
        "What was there counts as much as the new block should, and the other way round.",
        "part = 1 / (1 + np.exp(lse - new))",
        "first = 0.0; part = 1 / (1 + np.exp(lse - new))",
        (
            "out = out - (out - out_j) / (1 + np.exp(lse - lse_j))  # the new one's share",
            "out = out - torch.sigmoid(lse_j - lse) * (out - out_j)  # the new one's share",
        ),
    ),
    "blocks_merged_inverted": (
        "blocks with a larger log-sum-exp count less instead of more",
        "The shares are the softmax of the log-sum-exps, not of their negatives.",
        "share = np.exp(lse.min(0) - lse)",
        MERGE,
    ),
    "last_key_lost": (
        "the last key never gets weight",
        "A range or a slice ends one too early.",
        "output = softmax(logits[..., :-1]) @ v[..., :-1, :]",
        KEYS,
    ),
    "first_key_lost": (
        "the first key never gets weight",
        "A range or a slice starts at 1.",
        "output = softmax(logits[..., 1:]) @ v[..., 1:, :]",
        KEYS,
    ),
    "last_block_lost": (
        "the last block is lost if it is not full",
        "S // block counts full blocks only; the keys after them get no weight.",
        "blocks = cuts(S // n * n, n)",
        CUT,
    ),
    "final_block_lost": (
        "the last block of keys is always lost",
        "The loop ends one block too early; its keys get no weight.",
        "blocks = cuts(S, n)[:-1]",
        CUT,
    ),
    "first_block_skipped": (
        "the first block of keys is skipped",
        "Its keys get no weight.",
        "blocks = cuts(S, n)[1:]",
        CUT,
    ),
    "only_last_block": (
        "only the last block of keys counts",
        "Each block overwrites what the ones before it gave.",
        "blocks = cuts(S, n)[-1:]",
        CUT,
    ),
    "only_first_block": (
        "only the first block of keys counts",
        "The loop ends after one block.",
        "blocks = cuts(S, n)[:1]",
        CUT,
    ),
    "block_padding_counts": (
        "the zeros that fill up the last block take part in the softmax",
        "A score of 0 is an ordinary score; padded keys need −∞.",
        "filling = 0.0",
        CUT,
    ),
    "block_on_the_diagonal_not_masked": (
        "in causal attention the blocks on the diagonal are not masked",
        "A query sees the keys after its own that are in the same block.",
        *(f"causal = j // {n} <= i // {n}" for n in (2, 4, 3)),
        VISIBLE,
    ),
    "block_on_the_diagonal_skipped": (
        "in causal attention the blocks on the diagonal are skipped",
        "A query then does not see its own key, nor others in the same block.",
        *(f"causal = j // {n} < i // {n}" for n in (2, 4, 3)),
        VISIBLE,
    ),
}
MISTAKES = written("blocks of keys", RESCALE, BLOCKS)

"""Mistakes with masks and with causal attention: what is hidden, when, and by what number."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

HIDE = (
    "scores = np.where(keep, scores, -np.inf)  # before softmax",
    "scores = scores.masked_fill(~keep, float('-inf'))  # before softmax",
)
CAUSAL = (
    "keep = np.tril(np.ones((L, S), bool), k=S - L)  # j <= i + S - L",
    "keep = torch.ones(L, S, dtype=torch.bool).tril(diagonal=S - L)",
)
PADDING = ("keep = padding[:, None, None, :]  # (B, S) -> (B, 1, 1, S): the key axis is last",) * 2
REPEATED = (
    "mask = np.repeat(mask, H, axis=0)  # not np.tile",
    "mask = mask.repeat_interleave(H, dim=0)  # not mask.repeat(H, 1, 1)",
)
JOINED = (
    "keep = keep & np.tril(np.ones((L, S), bool), k=S - L)",
    "keep = keep & torch.ones(L, S, dtype=torch.bool).tril(diagonal=S - L)",
)
LENGTHS = (
    "keep = np.arange(S) < lengths[:, None]",
    "keep = torch.arange(S) < lengths[:, None]",
)
MASKS = {
    "mask_ignored": (
        "the mask has no effect",
        "What should be hidden is read: padding, or another text.",
        "mask = np.ones_like(mask)",
    ),
    "causal_ignored": (
        "later keys are not hidden: causal has no effect",
        "Every token reads the ones after it: training looks brilliant, generation fails.",
        "causal = j >= 0",
        CAUSAL,
    ),
    "mask_inverted": (
        "the mask is read the wrong way round",
        "What should be seen is hidden, and the reverse. Libraries differ: True hides in torch's "
        "MultiheadAttention, and keeps in its scaled_dot_product_attention.",
        "mask = ~mask",
        "masked = np.where(keep, raw - 1e9, raw)",
    ),
    "mask_transposed": (
        "the mask is transposed",
        "Rows of a mask are queries, columns are keys; a square mask fits both ways.",
        "square = T(mask)",
    ),
    "mask_on_the_query_axis": (
        "the mask of padded keys hides queries instead",
        "Whole rows are hidden, and all others read the padded keys.",
        "padding = T(j < lengths)",
        PADDING,
    ),
    "mask_first_head_only": (
        "only the first head is masked",
        "The other heads read what should be hidden.",
        "mask = mask | (np.arange(H) > 0)[:, None, None]",
        "causal = (j <= i) | (np.arange(H) > 0)[:, None, None]",
        PADDING,
    ),
    "mask_of_first_batch_for_all": (
        "every batch element is masked as the first one",
        "Padding differs between texts, but all get that of the first one.",
        "padding = j < lengths[:1]",
        "mask = mask[:1]",
        PADDING,
    ),
    "mask_tiled_over_heads": (
        "the mask is tiled over heads and batch in the wrong order",
        "(B·H) scores need each mask H times in a row; tiled, heads get that of another text.",
        "mask = mask[np.arange(B * H) % B, 0].reshape(mask.shape)",
        "mask = mask[(np.arange(H) * B + np.arange(B)[:, None]) // H, 0]",
        REPEATED,
    ),
    "mask_after_softmax": (
        "the weights are masked after softmax",
        "Hidden keys are part of the sum that divides: rows add up to less than 1.",
        "after = softmax(raw) * keep",
    ),
    "mask_filled_after_softmax": (
        "the weights are filled with −∞ or −10⁹ after softmax",
        "The number belongs in the scores; as a weight it dominates the output.",
        "after = np.where(keep, softmax(raw), -1e9)",
        "after = np.where(keep, softmax(raw), -np.inf)",
    ),
    "mask_multiplied": (
        "the scores are multiplied by the mask",
        "A hidden score becomes 0, which is an ordinary score: its exponential is 1.",
        "masked = raw * keep",
        "biased = raw * bias",
    ),
    "mask_added_as_ones": (
        "a mask of 1 and 0 is added to the scores",
        "Visible keys get e = 2.7 times their weight, and nothing is hidden.",
        "masked = raw + keep",
    ),
    "mask_subtracted_small": (
        "hidden scores are lowered by a number that is too small",
        "A score lowered by 10 or by 100 still has some weight; −∞ has none.",
        *(f"masked = np.where(keep, raw, raw - {n})" for n in (10, 5)),
        *(f"masked = np.where(keep, raw, {n})" for n in (-10, -5, -2, -1)),
    ),
    "hidden_scores_large": (
        "hidden scores become large instead of small",
        "A sign was lost, or masked scores are multiplied afterwards, as where heads are mixed: "
        "where a row has hidden keys, they alone get weight. Hide keys last.",
        "masked = np.where(keep, raw, 1e9)",
    ),
    "mask_before_scores": (
        "hidden keys get the score of the lowest visible one",
        "The lowest score is still a score; hidden keys keep some weight.",
        "masked = np.where(keep, raw, np.where(keep, raw, np.inf).min(-1, keepdims=True))",
    ),
    "masks_joined_by_or": (
        "the causal mask and the other mask are joined by or instead of and",
        "A key that either of them allows is seen, so padding and later keys are read.",
        "keep = mask | causal",
        JOINED,
    ),
    "padding_one_key_more": (
        "the first padded key of each text is seen",
        "Keys are counted from 0, so a text of n tokens ends before key n: < and not <=.",
        "padding = j <= lengths",
        LENGTHS,
    ),
    "padding_one_key_less": (
        "the last key of each text is taken for padding",
        "Keys are counted from 0, so a text of n tokens ends with key n − 1.",
        "padding = j < lengths - 1",
        LENGTHS,
    ),
    "mask_times_infinity": (
        "the mask is multiplied by infinity",
        "0·∞ is NaN, so every visible score is lost; use where or masked_fill.",
        "masked = raw + (1 - keep) * -np.inf",
    ),
}

TRIANGLES = {
    "causal_off_by_one": (
        "each query sees one key after its own",
        "The next token is what training predicts: the answer leaks.",
        "causal = j <= i + 1",
    ),
    "causal_hides_own_key": (
        "the diagonal is hidden: no query sees its own key",
        "triu(k=1) and tril(k=-1) differ by the diagonal. The first row sees nothing at all.",
        "causal = j < i",
    ),
    "causal_reversed": (
        "each query sees the keys from its own on, instead of those up to it",
        "The triangle is the wrong one: the past is hidden and the future is read.",
        "causal = j >= i",
    ),
    "causal_inverted": (
        "each query sees only the keys after its own",
        "triu(k=1) marks what to hide; here it marks what to keep.",
        "causal = j > i",
    ),
    "causal_aligned_at_start": (
        "with more keys than queries, the first query is aligned with the first key",
        "With a cache the last query belongs to the last key: new tokens now see only the oldest.",
        "causal = j <= row",
    ),
    "causal_offset_reversed": (
        "with more keys than queries, the offset between the two has the wrong sign",
        "Query i belongs to key i + S − L, not to i + L − S: most rows see nothing at all.",
        "causal = j <= row - past",
    ),
    "causal_restarts_in_blocks": (
        "each block of queries takes its first one for the first of all",
        "The rows of a block begin at its start: the mask is key <= start + row.",
        *(f"causal = j <= i % {n}" for n in (3, 2, 4, 8, 16, 32, 64, 128)),
        *(f"causal = j <= row % {n}" for n in (3, 2, 4)),
        (
            "keep = j <= start + i[:, None]  # i counts the rows of the block that begins at start",
            "keep = j <= start + i[:, None]  # i counts the rows of the block that begins at start",
        ),
    ),
}
FROM_THE_START = {
    "causal_aligned_at_end": (
        "with more keys than queries, the last query is aligned with the last key",
        "You asked for query 0 at key 0 (causal=start).",
        "causal = j <= row + S - L",
    ),
}
MISTAKES = (
    *written("hiding", HIDE, MASKS),
    *written("hiding", CAUSAL, TRIANGLES),
    *written("hiding", CAUSAL, FROM_THE_START, "causal from the start"),
)

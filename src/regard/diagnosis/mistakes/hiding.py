"""Mistakes with masks and with causal attention: what is hidden, when, and by what number."""

from __future__ import annotations

import numpy as np

from regard.diagnosis.mistakes.entry import (
    NINES,
    Array,
    Equivalent,
    Mistake,
    logits,
    raw_scores,
    raw_weights,
    replacing,
    scored,
    seeing,
    softmax,
    weighed,
)
from regard.diagnosis.probe import Probe, Variant

HIDE = (
    "scores = np.where(keep, scores, -np.inf)  # before softmax",
    "scores = scores.masked_fill(~keep, float('-inf'))  # before softmax",
)
CAUSAL = (
    "keep = np.tril(np.ones((L, S), bool), k=S - L)  # j <= i + S - L",
    "keep = torch.ones(L, S, dtype=torch.bool).tril(diagonal=S - L)",
)
PADDING = (
    "keep = padding[:, None, None, :]  # (B, S) -> (B, 1, 1, S): the key axis is the last",
    "keep = padding[:, None, None, :]  # (B, S) -> (B, 1, 1, S): the key axis is the last",
)


def _shifted(steps: int) -> tuple[Variant, ...]:
    """Causal with the diagonal moved."""

    def change(keep: Array, probe: Probe) -> Array:
        if not probe.causal:
            return keep
        size = probe.sizes
        row = np.arange(size["L"])[:, None] + probe.offset + steps
        return np.broadcast_to(np.arange(size["S"]) <= row, keep.shape)

    return seeing(change, "causal")


def _aligned_at(start: bool) -> tuple[Variant, ...]:
    def change(keep: Array, probe: Probe) -> Array:
        if not probe.causal:
            return keep
        size = probe.sizes
        row = np.arange(size["L"])[:, None] + (0 if start else size["S"] - size["L"])
        return np.broadcast_to(np.arange(size["S"]) <= row, keep.shape)

    return seeing(change, "causal")


def _reversed(strict: bool) -> tuple[Variant, ...]:
    """Only later keys are seen: the causal mask was read the wrong way round."""

    def change(keep: Array, probe: Probe) -> Array:
        if not probe.causal:
            return keep
        size = probe.sizes
        row = np.arange(size["L"])[:, None] + probe.offset
        key = np.arange(size["S"])
        return np.broadcast_to(key > row if strict else key >= row, keep.shape)

    return seeing(change, "causal")


def _inverted(keep: Array, probe: Probe) -> Array:
    return ~keep if probe.keep is not None else keep


def _turned(keep: Array, probe: Probe) -> Array:
    square = probe.keep is not None and keep.shape[-1] == keep.shape[-2]
    return keep.swapaxes(-1, -2) if square and not _is_padding(probe) else keep


def _is_padding(probe: Probe) -> bool:
    return probe.keep is not None and probe.keep.ndim == 4


def _on_queries(keep: Array, probe: Probe) -> Array:
    square = probe.keep is not None and keep.shape[-1] == keep.shape[-2]
    return keep.swapaxes(-1, -2) if square and _is_padding(probe) else keep


def _first_head_only(keep: Array, probe: Probe) -> Array:
    return keep | (np.arange(keep.shape[1]) > 0)[:, None, None]


def _first_batch_for_all(keep: Array, probe: Probe) -> Array:
    return np.broadcast_to(keep[:1], keep.shape)


def _batches_and_heads_mixed(keep: Array, probe: Probe) -> Array:
    """(B·H) rows of scores meet a mask that was tiled where it should be repeated."""
    batch, heads = keep.shape[:2]
    return np.asarray(keep[np.arange(batch * heads) % batch, 0].reshape(keep.shape))


def _zeros_hidden(scores: Array, keep: Array) -> Array:
    product = scores * keep
    return np.where(product == 0, NINES, product)


def _row_by_row_zero(scores: Array, keep: Array) -> Array:
    product = scores * keep
    return np.where(product == 0, -np.inf, product)


def _hide(name: str, title: str, why: str, variants: tuple[Variant, ...]) -> Mistake:
    return Mistake(name, "hiding", title, why, *HIDE, variants)


def _causal(name: str, title: str, why: str, variants: tuple[Variant, ...]) -> Mistake:
    return Mistake(name, "hiding", title, why, *CAUSAL, variants)


MISTAKES = (
    _hide(
        "mask_ignored",
        "the mask has no effect",
        "What was to be hidden is read: padding, or somebody else's text.",
        seeing(lambda keep, probe: np.ones_like(keep), "mask")[:1],
    ),
    _causal(
        "causal_ignored",
        "the causal flag has no effect",
        "Every token reads the ones after it: training looks brilliant, generation fails.",
        seeing(lambda keep, probe: np.ones_like(keep), "causal")[:1],
    ),
    _hide(
        "mask_inverted",
        "the mask is read the wrong way round",
        "What should be seen is hidden, and what should be hidden is seen. Libraries disagree on "
        "the polarity: torch's MultiheadAttention hides True, its scaled_dot_product_attention "
        "keeps it.",
        seeing(_inverted, "mask"),
    ),
    _hide(
        "mask_transposed",
        "the mask is transposed",
        "Rows of a mask are queries, columns are keys; a square mask fits both ways.",
        seeing(_turned, "mask"),
    ),
    Mistake(
        "mask_on_the_query_axis",
        "hiding",
        "the mask of padded keys hides queries instead",
        "Whole rows are hidden and padded keys are read by all others.",
        *PADDING,
        seeing(_on_queries, "mask"),
    ),
    Mistake(
        "mask_first_head_only",
        "hiding",
        "only the first head is masked",
        "The other heads read what was to be hidden.",
        *PADDING,
        seeing(_first_head_only, "mask", "causal"),
    ),
    Mistake(
        "mask_of_first_batch_for_all",
        "hiding",
        "every batch element is masked as the first one",
        "Padding differs between texts; here the first one's decides for all.",
        *PADDING,
        seeing(_first_batch_for_all, "mask"),
    ),
    Mistake(
        "mask_tiled_over_heads",
        "hiding",
        "the mask is tiled over heads and batch in the wrong order",
        "With (B·H) rows of scores, a mask must be repeated H times in a row, not tiled: else "
        "heads get the mask of another text.",
        "mask = np.repeat(mask, H, axis=0)  # not np.tile",
        "mask = mask.repeat_interleave(H, dim=0)  # not mask.repeat(H, 1, 1)",
        seeing(_batches_and_heads_mixed, "mask"),
    ),
    _hide(
        "mask_after_softmax",
        "the weights are masked after softmax",
        "Hidden keys are left out, but have had their part of the sum: rows add up to less than 1.",
        weighed(lambda weights, keep: weights * keep),
    ),
    _hide(
        "mask_filled_after_softmax",
        "the weights are filled with −∞ or −10⁹ after softmax",
        "The number belongs into the scores; as a weight it drowns the output.",
        weighed(lambda weights, keep: np.where(keep, weights, NINES))
        + weighed(lambda weights, keep: np.where(keep, weights, -np.inf)),
    ),
    _hide(
        "mask_multiplied",
        "the scores are multiplied by the mask",
        "A hidden score becomes 0, which is an ordinary score: exp(0) = 1 is a good share.",
        scored(lambda scores, keep: scores * keep),
    ),
    _hide(
        "mask_added_as_ones",
        "a mask of 1 and 0 is added to the scores",
        "Visible keys get e = 2.7 times their weight, and nothing is hidden.",
        scored(lambda scores, keep: scores + keep),
    ),
    _hide(
        "mask_subtracted_small",
        "hidden scores are lowered by a number that is too small",
        "Lowering a score by 10 or by 100 leaves something of it; −∞ does not.",
        scored(lambda scores, keep: np.where(keep, scores, scores - 10))
        + scored(lambda scores, keep: np.where(keep, scores, -10))
        + scored(lambda scores, keep: np.where(keep, scores, -1.0)),
    ),
    _hide(
        "mask_hides_zero_scores",
        "scores are multiplied by the mask, and every 0 is then hidden",
        "A visible score may be exactly 0, for orthogonal vectors; it is hidden with the others.",
        scored(_zeros_hidden) + scored(_row_by_row_zero),
    ),
    _hide(
        "mask_before_scores",
        "hidden keys get the score of the smallest visible one",
        "The lowest score is still a score; hidden keys keep a part.",
        scored(
            lambda scores, keep: np.where(
                keep, scores, np.where(keep, scores, np.inf).min(-1, keepdims=True)
            )
        ),
    ),
    _hide(
        "mask_times_infinity",
        "the mask is multiplied by infinity",
        "0·∞ is NaN, so every visible score is lost; choose with where, or fill.",
        scored(lambda scores, keep: scores + (1 - keep.astype(float)) * -np.inf),
    ),
    _causal(
        "causal_off_by_one",
        "each query sees one key after its own",
        "The next token is what training asks for: the answer leaks.",
        _shifted(1),
    ),
    _causal(
        "causal_hides_own_key",
        "the diagonal is hidden: no query sees its own key",
        "triu(k=1) and tril(k=-1) differ by the diagonal. The first row sees nothing at all.",
        _shifted(-1),
    ),
    _causal(
        "causal_reversed",
        "each query sees the keys from its own on, instead of those up to it",
        "The triangle is the wrong one: the past is hidden and the future is read.",
        _reversed(strict=False),
    ),
    _causal(
        "causal_inverted",
        "each query sees only the keys after its own",
        "triu(k=1) marks what to hide; here it is what is kept.",
        _reversed(strict=True),
    ),
    _causal(
        "causal_aligned_at_start",
        "with more keys than queries, the first query is aligned with the first key",
        "With a cache the last query belongs to the last key: new tokens then see only the oldest "
        "ones.",
        _aligned_at(start=True),
    ),
    _causal(
        "causal_aligned_at_end",
        "with more keys than queries, the last query is aligned with the last key",
        "Asked for was that query 0 stands at key 0.",
        _aligned_at(start=False),
    ),
)

FRAGILE = (
    Mistake(
        "hidden_maximum",
        "hiding",
        "the row maximum is taken over hidden scores too",
        "If a hidden score is far above the visible ones, their exponentials are all 0, and the "
        "row is 0/0. So does masking after softmax and dividing by the sum again.",
        *HIDE,
        (
            replacing(
                row_maximum=lambda values, probe: raw_scores(values).max(-1),
                weights=raw_weights,
            ),
        ),
        "fragile",
        "hiding",
    ),
    Mistake(
        "mask_constant_1e4",
        "hiding",
        "hidden scores become −10⁴ instead of −∞",
        "Real scores can be lower than that, and then the hidden keys take everything.",
        *HIDE,
        (
            replacing(False, masked=lambda v, p: np.where(v["visible"], raw_scores(v), -1e4)),
            replacing(False, masked=lambda v, p: raw_scores(v) + np.where(v["visible"], 0, -1e4)),
        ),
        "fragile",
        "hiding",
    ),
    Mistake(
        "mask_constant_1e9",
        "hiding",
        "hidden scores become −10⁹ instead of −∞",
        "Harmless until a row sees nothing (then it is a mean of everything hidden) or scores get "
        "below −10⁹; in float16 the constant does not exist.",
        *HIDE,
        (
            replacing(False, masked=lambda v, p: np.where(v["visible"], raw_scores(v), NINES)),
            replacing(False, masked=lambda v, p: raw_scores(v) + np.where(v["visible"], 0, NINES)),
        ),
        "note",
        "hiding",
    ),
    Mistake(
        "empty_row_nan",
        "hiding",
        "a row that sees nothing becomes NaN",
        "−∞ − (−∞) is NaN, and one such row, a text that is padding throughout, spreads it through "
        "the whole network. The row should be 0.",
        "P = np.where(keep.any(-1, keepdims=True), P, 0)",
        "weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0)",
        (Variant({}, absent=False),),
        "note",
        "empty row",
    ),
    Mistake(
        "empty_row_mean",
        "hiding",
        "a row that sees nothing becomes the mean of everything that it must not see",
        "All scores are the same finite number, so all weights are equal. The row should be 0.",
        "P = np.where(keep.any(-1, keepdims=True), P, 0)",
        "weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0)",
        (
            replacing(False, masked=lambda v, p: np.where(v["visible"], raw_scores(v), NINES)),
            replacing(False, masked=lambda v, p: raw_scores(v) + np.where(v["visible"], 0, NINES)),
        ),
        "note",
        "empty row",
    ),
    Mistake(
        "hidden_nan_leaks",
        "hiding",
        "NaN in a hidden value reaches the output",
        "0·NaN is NaN. Memory that nobody has filled, a padded cache, can hold anything.",
        "V = np.where(keep_key[:, None], V, 0)  # before P @ V",
        "v = v.masked_fill(~keep_key[:, None], 0)  # before weights @ v",
        (Variant({}, absent=False),),
        "note",
        "hidden NaN",
    ),
)


EQUIVALENTS = (
    Equivalent(
        "mask_filled_with_1e-9",
        "filling hidden scores with 1e-9 (meant was −1e9)",
        "mask_multiplied",
        "1e-9 and 0 are the same score as far as anybody can see; so are the 0 of a multiplied "
        "score and of a key that was set to 0.",
        scored(lambda scores, keep: np.where(keep, scores, 0.0))[0],
    ),
    Equivalent(
        "mask_added_as_minus_one",
        "adding 0 and −1 instead of 1 and 0",
        "mask_added_as_ones",
        "The two differ by 1 along the whole row, which softmax does not see.",
        scored(lambda scores, keep: scores + keep - 1)[0],
    ),
    Equivalent(
        "one_added_to_visible",
        "adding 1 to visible scores and −∞ to hidden ones",
        "right",
        "A constant along the row cancels in softmax. It is fragile where the maximum is not "
        "subtracted: exp overflows one earlier.",
        replacing(masked=lambda v, p: np.where(v["visible"], raw_scores(v) + 1, -np.inf)),
    ),
    Equivalent(
        "mask_after_softmax_renormalised",
        "masking the weights and dividing each row by its sum again",
        "right",
        "The first denominator cancels. It is fragile: see hidden_maximum.",
        weighed(
            lambda weights, keep: weights * keep / (weights * keep).sum(axis=-1, keepdims=True)
        )[0],
    ),
    Equivalent(
        "mask_before_scale",
        "hiding before the scale instead of after it",
        "right",
        "−∞/√D is −∞, and −10⁹/√D is low enough.",
        replacing(
            False,
            masked=lambda v, p: np.where(v["visible"], raw_scores(v), NINES / p.sizes["D"] ** 0.5),
        ),
    ),
    Equivalent(
        "constant_shift",
        "adding the same number to all scores",
        "right",
        "exp(x + c) = exp(x)·exp(c), and exp(c) cancels.",
        replacing(weights=lambda v, p: softmax(logits(v) + 3.0)),
    ),
)

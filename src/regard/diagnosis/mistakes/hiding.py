"""Mistakes with masks and with causal attention: what is hidden, when, and by what number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Variant, labels_of
from regard.diagnosis.mistakes.entry import (
    NINES,
    Entries,
    Replacement,
    Variants,
    equivalents,
    filled,
    logits,
    masked_scores,
    masked_weights,
    mistakes,
    other_cells,
    other_visible,
    raw_scores,
    raw_weights,
    replacing,
    softmax,
    transposed,
    written,
)

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
TEXTS = ("k, v = k[begin:end], v[begin:end]  # not k[:end]",) * 2
LENGTHS = (
    "keep = np.arange(S) < lengths[:, None]",
    "keep = torch.arange(S) < lengths[:, None]",
)
BORDERS = (
    "labels = np.searchsorted(cu_seqlens[1:], np.arange(n), side='right')",
    "labels = torch.searchsorted(cu_seqlens[1:], torch.arange(n), right=True)",
)
EMPTY_ROW = (
    "P = np.where(keep.any(-1, keepdims=True), P, 0)",
    "weights = weights.masked_fill(~keep.any(-1, keepdim=True), 0)",
)
HIDDEN_VALUE = (
    "V = np.where(keep_key[:, None], V, 0)  # before P @ V",
    "v = v.masked_fill(~keep_key[:, None], 0)  # before weights @ v",
)


def _causal(sees: Callable[[Array, Array, Probe], Array]) -> Variants:
    return other_cells(sees, "causal", given=lambda probe: probe.causal)


def _late(row: Array, key: Array, probe: Probe) -> Array:
    """The cells of causal attention, and of its window, as far too late as they should be early."""
    own = row - probe.offset
    return (key <= own) & (key > own - (probe.window or probe.sizes["S"] + probe.offset))


def _mask(change: Callable[[Array], Array], *, padding: bool | None = None) -> Variants:
    """`change(keep)` replaces the mask; with `padding`, only a mask that is one of keys, or not."""

    def changed(keep: Array, probe: Probe) -> Array:
        of_keys = probe.keep is not None and probe.keep.ndim == 4
        return change(keep) if padding in (None, of_keys) and probe.keep is not None else keep

    return other_visible(changed, "mask")


def _inverted() -> Variants:
    """What should be seen is hidden; all of it where a required mask hides nothing."""

    def where_all_is(number: float) -> Callable[[Mapping[str, Array], Probe], Any]:
        def step(values: Mapping[str, Array], probe: Probe) -> Any:
            none = probe.has_rules or not probe.needs_mask
            return None if none else np.full(values["scores"].shape, number)

        return step

    nothing = where_all_is(0.0)  # every score by a finite number, or every weight, as in torch
    ways = {"scaled": where_all_is(-np.inf)}, {"scaled": nothing}, {"weights": nothing}
    return tuple(one | replacing(**way) for way in ways for one in _mask(np.logical_not))


def _transposed_if_square(keep: Array) -> Array:
    return transposed(keep) if keep.shape[-1] == keep.shape[-2] else keep


def _and_earlier_texts(keep: Array) -> Array:
    if (labels := labels_of(keep)) is None:
        return keep
    rows, keys = labels
    return np.broadcast_to(rows[:, None] >= keys, keep.shape)


def _texts_late(keep: Array) -> Array:
    """Each text begins one token late: its first token belongs to the text before."""
    if (labels := labels_of(keep)) is None:
        return keep
    rows, keys = (own[np.maximum(np.arange(len(own)) - 1, 0)] for own in labels)
    return np.broadcast_to(rows[:, None] == keys, keep.shape)


def _first_token_apart(keep: Array, probe: Probe) -> Array:
    """The same, and the first token of all belongs to no text; also where there is one text."""
    if probe.keep is None and not probe.needs_mask:
        return keep
    size = probe.sizes
    labels = np.zeros(size["L"], int), np.zeros(size["S"], int)
    if probe.keep is not None:
        found = labels_of(probe.keep)
        if found is None:
            return keep
        labels = found
    rows, keys = (np.append(-1, own[:-1]) for own in labels)
    return np.broadcast_to(rows[:, None] == keys, keep.shape)


def _texts_late_and_apart() -> Variants:
    def alone(values: Mapping[str, Array], probe: Probe) -> Any:
        if probe.has_rules or not probe.needs_mask:
            return None
        scaled = values["scores"] * values["scale"]
        return np.where(_first_token_apart(np.ones(scaled.shape, bool), probe), scaled, -np.inf)

    found = other_visible(_first_token_apart, "mask")
    return tuple(one | replacing(scaled=alone) for one in found)


def _moved_end(step: int) -> Variants:
    """Padding begins a key later, or earlier; also where a required mask hides nothing."""

    def moved(keep: Array, probe: Probe) -> Array:
        of_keys = probe.needs_mask if probe.keep is None else probe.keep.ndim == 4
        ends, key = keep.sum(-1, keepdims=True), np.arange(keep.shape[-1])
        return key < ends + step if of_keys and np.array_equal(keep, key < ends) else keep

    def without_last(values: Mapping[str, Array], probe: Probe) -> Any:
        if probe.has_rules or not probe.needs_mask or step > 0:
            return None
        scaled = values["scores"] * values["scale"]
        scaled[..., -1] = -np.inf
        return scaled

    return tuple(one | replacing(scaled=without_last) for one in other_visible(moved, "mask"))


def _joined(join: Callable[[Array, Array], Array]) -> Variants:
    """Where there are a mask and the causal rule, `join(mask, causal)` says what is seen."""

    def joined(keep: Array, probe: Probe) -> Array:
        if not probe.causal or (probe.keep is None and not probe.needs_mask):
            return keep
        return join(probe.rule("mask"), probe.rule("causal"))

    return other_visible(joined, "mask", "causal")


def _first_head_only(keep: Array, probe: Probe) -> Array:
    return keep | (np.arange(keep.shape[1]) > 0)[:, None, None]


def _tiled(keep: Array) -> Array:
    """(B·H) rows of scores with a mask that is tiled instead of repeated."""
    batch, heads = keep.shape[:2]
    return np.asarray(keep[np.arange(batch * heads) % batch, 0].reshape(keep.shape))


def _repeated(keep: Array) -> Array:
    """(H·B) rows of scores, all texts of one head first, with a mask that is not tiled."""
    batch, heads = keep.shape[:2]
    rows = np.arange(heads)[None, :] * batch + np.arange(batch)[:, None]
    return np.asarray(keep[rows // heads, 0])


def _product(hidden: float | None = None) -> Variants:
    """Scores times the mask; with `hidden`, every 0 becomes that."""
    if hidden is None:
        return masked_scores(lambda scores, keep: scores * keep)
    return masked_scores(lambda scores, keep: np.where(scores * keep == 0, hidden, scores * keep))


def _filled_by(constant: float) -> Variants:
    return masked_scores(lambda scores, keep: np.where(keep, scores, constant))


def _lowest_visible(scores: Array, keep: Array) -> Array:
    lowest = np.where(keep, scores, np.inf).min(-1, keepdims=True)
    return np.where(keep, scores, lowest)


def _by_constant(constant: float) -> Variants:
    """Hidden scores become a finite number, or it is added to them."""

    def added(constant: float) -> Replacement:
        return lambda v, p: raw_scores(v) + np.where(v["visible"], 0, constant)

    replacements = (filled(constant), added(constant))
    return tuple(Variant({"masked": one}, absent=False) for one in replacements)


def _own_key_hidden_by_adding() -> Variants:
    """A constant is added to the scores of the own key too; the first row then sees all keys."""

    def masked(values: Mapping[str, Array], probe: Probe) -> Array:
        row, key = np.ogrid[: probe.sizes["L"], : probe.sizes["S"]]
        keep = values["visible"] & ((not probe.causal) | (key < row + probe.offset))
        return raw_scores(values) + np.where(keep, 0, -1e9)

    return (Variant({"masked": masked}, absent=False),)


MASKS: Entries = {
    "mask_ignored": (
        "the mask has no effect",
        "What should be hidden is read: padding, or another text.",
        other_visible(lambda keep, probe: np.ones_like(keep), "mask")[:1],
    ),
    "causal_ignored": (
        "later keys are not hidden: causal has no effect",
        "Every token reads the ones after it: training looks brilliant, generation fails.",
        other_visible(lambda keep, probe: np.ones_like(keep), "causal")[:1],
        CAUSAL,
    ),
    "mask_inverted": (
        "the mask is read the wrong way round",
        "What should be seen is hidden, and the reverse. Libraries differ: True hides in torch's "
        "MultiheadAttention, and keeps in its scaled_dot_product_attention.",
        _inverted(),
    ),
    "mask_transposed": (
        "the mask is transposed",
        "Rows of a mask are queries, columns are keys; a square mask fits both ways.",
        _mask(_transposed_if_square, padding=False),
    ),
    "mask_on_the_query_axis": (
        "the mask of padded keys hides queries instead",
        "Whole rows are hidden, and all others read the padded keys.",
        _mask(_transposed_if_square, padding=True),
        PADDING,
    ),
    "mask_first_head_only": (
        "only the first head is masked",
        "The other heads read what should be hidden.",
        other_visible(_first_head_only, "mask", "causal"),
        PADDING,
    ),
    "mask_of_first_batch_for_all": (
        "every batch element is masked as the first one",
        "Padding differs between texts, but all get that of the first one.",
        _mask(lambda keep: np.broadcast_to(keep[:1], keep.shape)),
        PADDING,
    ),
    "mask_tiled_over_heads": (
        "the mask is tiled over heads and batch in the wrong order",
        "(B·H) scores need each mask H times in a row; tiled, heads get that of another text.",
        _mask(_tiled) + _mask(_repeated),
        REPEATED,
    ),
    "mask_after_softmax": (
        "the weights are masked after softmax",
        "Hidden keys are part of the sum that divides: rows add up to less than 1.",
        masked_weights(lambda weights, keep: weights * keep),
    ),
    "mask_filled_after_softmax": (
        "the weights are filled with −∞ or −10⁹ after softmax",
        "The number belongs in the scores; as a weight it dominates the output.",
        masked_weights(lambda weights, keep: np.where(keep, weights, NINES))
        + masked_weights(lambda weights, keep: np.where(keep, weights, -np.inf)),
    ),
    "mask_multiplied": (
        "the scores are multiplied by the mask",
        "A hidden score becomes 0, which is an ordinary score: its exponential is 1.",
        _product(),
    ),
    "mask_added_as_ones": (
        "a mask of 1 and 0 is added to the scores",
        "Visible keys get e = 2.7 times their weight, and nothing is hidden.",
        masked_scores(lambda scores, keep: scores + keep),
    ),
    "mask_subtracted_small": (
        "hidden scores are lowered by a number that is too small",
        "A score lowered by 10 or by 100 still has some weight; −∞ has none.",
        masked_scores(lambda scores, keep: np.where(keep, scores, scores - 10))
        + masked_scores(lambda scores, keep: np.where(keep, scores, -10))
        + tuple(variant for constant in (-1.0, -2.0, -5.0) for variant in _filled_by(constant))
        + masked_scores(lambda scores, keep: np.where(keep, scores, scores - 5)),
    ),
    "hidden_scores_large": (
        "hidden scores become large instead of small",
        "A sign was lost, or masked scores are multiplied afterwards, as where heads are mixed: "
        "where a row has hidden keys, they alone get weight. Hide keys last.",
        masked_scores(lambda scores, keep: np.where(keep, scores, -NINES)),
    ),
    "mask_hides_zero_scores": (
        "scores are multiplied by the mask, and every 0 is then hidden",
        "The score of a visible key may be exactly 0, for orthogonal vectors; it is hidden too.",
        _product(NINES) + _product(-np.inf),
    ),
    "mask_before_scores": (
        "hidden keys get the score of the lowest visible one",
        "The lowest score is still a score; hidden keys keep some weight.",
        masked_scores(_lowest_visible),
    ),
    "masks_joined_by_or": (
        "the causal mask and the other mask are joined by or instead of and",
        "A key that either of them allows is seen, so padding and later keys are read.",
        _joined(lambda mask, causal: mask | causal),
        JOINED,
    ),
    "mask_replaces_causal": (
        "where a mask is given, attention is no longer causal",
        "Both rules have to hold.",
        _joined(lambda mask, causal: mask),
        JOINED,
    ),
    "causal_replaces_mask": (
        "where attention is causal, the mask has no effect",
        "Both rules have to hold.",
        _joined(lambda mask, causal: causal),
        JOINED,
    ),
    "earlier_texts_read": (
        "texts one after the other also read those before them",
        "Each text begins at its own border, for keys as for queries.",
        _mask(_and_earlier_texts, padding=False),
        TEXTS,
    ),
    "padding_one_key_more": (
        "the first padded key of each text is seen",
        "Keys are counted from 0, so a text of n tokens ends before key n: < and not <=.",
        _moved_end(1),
        LENGTHS,
    ),
    "padding_one_key_less": (
        "the last key of each text is taken for padding",
        "Keys are counted from 0, so a text of n tokens ends with key n − 1.",
        _moved_end(-1),
        LENGTHS,
    ),
    "texts_begin_late": (
        "the first token of each text is taken for the last of the one before",
        "A border is where the next text begins: searchsorted needs right=True.",
        _mask(_texts_late, padding=False) + _texts_late_and_apart(),
        BORDERS,
    ),
    "mask_times_infinity": (
        "the mask is multiplied by infinity",
        "0·∞ is NaN, so every visible score is lost; use where or masked_fill.",
        masked_scores(lambda scores, keep: scores + (1 - keep.astype(float)) * -np.inf),
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
    *mistakes("hiding", HIDE, MASKS),
    *written("hiding", CAUSAL, TRIANGLES),
    *written("hiding", CAUSAL, FROM_THE_START, "causal from the start"),
)
MASK_INVERTED = next(one for one in MISTAKES if one.name == "mask_inverted")
MASK_ADDED = next(one for one in MISTAKES if one.name == "mask_added_as_ones")

MAXIMUM: Entries = {
    "hidden_maximum": (
        "the row maximum is taken over hidden scores too",
        "If a hidden score is far above the visible ones, their exponentials are all 0, and the "
        "row is 0/0. Masking after softmax and dividing by the sum again does the same.",
        (replacing(row_maximum=lambda v, p: raw_scores(v).max(-1), weights=raw_weights),),
    ),
    "mask_constant_1e4": (
        "hidden scores become −10⁴ instead of −∞",
        "Visible scores can be lower than that, and hidden keys then get all weight.",
        _by_constant(-1e4),
    ),
}
CONSTANT: Entries = {
    "mask_constant_1e9": (
        "hidden scores become −10⁹ instead of −∞",
        "Harmless unless a row sees nothing (it is then a mean of hidden values) or scores are "
        "below −10⁹; float16 has no such number.",
        _by_constant(NINES),
    ),
}
EMPTY: Entries = {
    "empty_row_nan": (
        "a row that sees nothing becomes NaN",
        "−∞ − (−∞) is NaN, and one such row, of a text that is all padding, spreads it through "
        "the whole network. The row should be 0.",
        (Variant({}, absent=False),),
    ),
    "empty_row_mean": (
        "a row that sees nothing becomes the mean of hidden values",
        "All scores are the same finite number, so all weights are equal. The row should be 0.",
        _by_constant(NINES),
    ),
}
HIDDEN_NAN: Entries = {
    "hidden_nan_leaks": (
        "NaN in a hidden value reaches the output",
        "0·NaN is NaN. Uninitialised memory, such as a padded cache, can hold anything.",
        (Variant({}, absent=False),),
    ),
}
FRAGILE = (
    *mistakes("hiding", HIDE, MAXIMUM, "fragile", "hiding"),
    *mistakes("hiding", HIDE, CONSTANT, "note", "hiding"),
    *mistakes("hiding", EMPTY_ROW, EMPTY, "note", "empty row"),
    *mistakes("hiding", HIDDEN_VALUE, HIDDEN_NAN, "note", "hidden NaN"),
)

EQUIVALENTS = equivalents(
    {
        "mask_filled_with_1e-9": (
            "filling hidden scores with 1e-9 (meant was −1e9)",
            "mask_multiplied",
            "1e-9 and 0 give the same weights to nine digits; a key set to 0 has a score of 0 too.",
            masked_scores(lambda scores, keep: np.where(keep, scores, 0.0))[0],
        ),
        "mask_added_as_minus_one": (
            "adding 0 and −1 instead of 1 and 0",
            "mask_added_as_ones",
            "The two differ by 1 along the whole row, which cancels in softmax.",
            masked_scores(lambda scores, keep: scores + keep - 1)[0],
        ),
        "one_added_to_visible": (
            "adding 1 to visible scores and −∞ to hidden ones",
            "right",
            "A constant along the row cancels in softmax. It is fragile if the maximum is not "
            "subtracted: exp overflows one earlier.",
            replacing(masked=lambda v, p: np.where(v["visible"], raw_scores(v) + 1, -np.inf)),
        ),
        "mask_after_softmax_renormalised": (
            "masking the weights and dividing each row by its sum again",
            "right",
            "The first denominator cancels. It is fragile: see hidden_maximum.",
            masked_weights(
                lambda weights, keep: weights * keep / (weights * keep).sum(-1)[..., None]
            )[0],
        ),
        "mask_before_scale": (
            "hiding before the scale instead of after it",
            "right",
            "−∞/√D is −∞, and −10⁹/√D is low enough.",
            Variant({"masked": lambda v, p: filled(NINES / p.sizes["D"] ** 0.5)(v, p)}, False),
        ),
        "constant_shift": (
            "adding the same number to all scores",
            "right",
            "exp(x + c) = exp(x)·exp(c), and exp(c) cancels.",
            replacing(weights=lambda v, p: softmax(logits(v) + 3.0)),
        ),
    }
)

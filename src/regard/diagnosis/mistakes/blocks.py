"""Mistakes of attention that is computed some keys at a time: how blocks are cut and merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    logits,
    mistakes,
    other_cells,
    replacing,
)

PAGE = 5  # tokens in a page: a short text has one, a long one many
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
# How many keys there may be in a block, and in how many blocks keys may be cut.
SMALL = (2, 4, 3)
SIZES = (*SMALL, 1, 8, 16, 32, 64, 128, 256)
FILLED = (*SIZES, 512)  # which an object is made with whose blocks are longer than any text
COUNTS = (2, 3, 4)
LOWEST = -1e30

Cuts = Callable[[int], list[slice]]


def _by_size(size: int) -> Cuts:
    return lambda keys: [slice(start, start + size) for start in range(0, keys, size)]


def _by_count(count: int) -> Iterator[Cuts]:
    """So many blocks, where their number does not divide that of the keys: in three ways."""

    def at(edges: Callable[[int], Sequence[int]]) -> Cuts:
        def cuts(keys: int) -> list[slice]:
            return [slice(a, b) for a, b in itertools.pairwise(edges(keys)) if a < b]

        return cuts

    def longer_first(keys: int) -> list[int]:  # as array_split
        whole, rest = divmod(keys, count)
        return [n * whole + min(n, rest) for n in range(count + 1)]

    def alternating(keys: int) -> list[int]:  # as whole numbers of linspace
        own = min(count, keys)
        return [n * keys // max(1, own) for n in range(own + 1)]

    def shorter_last(keys: int) -> list[int]:
        size = -(-keys // count)
        return [min(n * size, keys) for n in range(count + 1)]

    yield from map(at, (longer_first, alternating, shorter_last))


def _dividing(keys: int) -> list[slice]:
    """As few blocks as divide the keys; each key alone where nothing does."""
    count = next((n for n in range(2, keys) if keys % n == 0), max(1, keys))
    return _by_size(keys // count)(keys)


def _every_cut(
    *, counts: tuple[int, ...] = COUNTS, sizes: tuple[int, ...] = SIZES, least: int = 1
) -> Iterator[Cuts]:
    yield from (_by_size(size) for size in sizes if size >= least)
    yield from itertools.chain.from_iterable(map(_by_count, counts))
    yield from [_dividing] if counts else []


def _blocks(values: Values, probe: Probe, cuts: Cuts) -> Iterator[tuple[Array, Array]]:
    """Scores and values of each block of keys, one after the other; −∞ is a very low number."""
    scores = np.maximum(logits(values), LOWEST)
    own = np.repeat(values["values"], scores.shape[1] // values["values"].shape[1], axis=1)
    for cut in cuts(scores.shape[-1]):
        yield scores[..., cut], own[..., cut, :]


def _of_blocks(output: Replacement, cuts: Cuts, kind: Callable[..., object]) -> Variant:
    """Outputs of one kind, which are alike where keys are cut alike."""

    def alike(probe: Probe) -> Hashable:
        keys = probe.sizes["S"]
        return kind, *((cut.start, min(cut.stop, keys)) for cut in cuts(keys))

    return Variant({"output": output}, alike=alike)


def _online(
    *,
    of_output: Callable[[Array, Array], Array] | None = None,
    of_sum: Callable[[Array, Array], Array] | None = None,
    shift: str = "running",
    each: bool = False,
) -> Variants:
    """A running maximum, sum and output.

    `of_output` and `of_sum` are the factors of what there is, from the maximum before and after;
    `shift` is what the new exponentials are shifted by; `each` divides in each block.
    """

    def right(before: Array, after: Array) -> Array:
        return np.asarray(np.exp(before - after))

    output_by, sum_by = of_output or right, of_sum or right

    def variant(cuts: Cuts) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            highest = total = out = None
            for scores, own in _blocks(values, probe, cuts):
                largest = scores.max(-1, keepdims=True)
                if highest is None:
                    exponentials = np.exp(scores - largest)
                    highest, total = largest, exponentials.sum(-1, keepdims=True)
                    out = exponentials @ own
                    out = out / total if each else out
                    continue
                rising = np.maximum(highest, largest)
                exponentials = np.exp(scores - (rising if shift == "running" else largest))
                total = total * sum_by(highest, rising) + exponentials.sum(-1, keepdims=True)
                out = out * output_by(highest, rising) + exponentials @ own
                out = out / total if each else out
                highest = rising
            assert out is not None
            return np.asarray(out if each else out / total)

        return _of_blocks(output, cuts, variant)

    return tuple(map(variant, _every_cut(counts=())))


def _merged(
    share: Callable[[Array, Array, Array], Array],
    *,
    divided: bool = True,
    by: Callable[[Array, Array, Array], Array] | None = None,
    least: int = 1,
) -> Variants:
    """Outputs of blocks, each with a softmax of its own, merged by other shares.

    `share(maxima, sums, lse)` are made of those of all blocks, (blocks, B, H, L, 1); what they are
    divided by is their sum, or that of `by`.
    """

    def variant(cuts: Cuts) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            parts = []
            for scores, own in _blocks(values, probe, cuts):
                largest = scores.max(-1, keepdims=True)
                exponentials = np.exp(scores - largest)
                sums = exponentials.sum(-1, keepdims=True)
                parts.append((largest, sums, largest + np.log(sums), exponentials @ own / sums))
            maxima, sums, lse, outs = (np.stack(one) for one in zip(*parts, strict=True))
            shares = share(maxima, sums, lse)
            whole = (shares * outs).sum(0)
            total = shares if by is None else by(maxima, sums, lse)
            return np.asarray(whole / total.sum(0) if divided else whole)

        return _of_blocks(output, cuts, variant)

    return tuple(map(variant, _every_cut(least=least)))


def _folded(
    merged: Callable[[Array, Array], tuple[Array, Array]], *, first: float, least: int = 3
) -> Variants:
    """Outputs of `least` blocks or more, merged one by one, that of the first times a number.

    `merged` takes the log-sum-exps of what is there and of the next block, below 0, and returns the
    share of what is there and the new log-sum-exp.
    """

    def variant(cuts: Cuts) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            so_far: tuple[Array, Array] | None = None
            several = False  # nothing at all comes of the first alone, times 0
            for scores, own in _blocks(values, probe, cuts):
                largest = scores.max(-1, keepdims=True)
                exponentials = np.exp(scores - largest)
                sums = exponentials.sum(-1, keepdims=True)
                lse, out = largest + np.log(sums), exponentials @ own / sums
                if so_far is None:
                    so_far = lse, first * out
                    continue
                before, whole = so_far
                highest = np.maximum(before, lse)
                share, total = merged(before - highest, lse - highest)
                so_far = highest + total, share * whole + (1 - share) * out
                several = True
            assert so_far is not None
            return so_far[1] if first or several else np.full_like(so_far[1], np.nan)

        return _of_blocks(output, cuts, variant)

    return tuple(map(variant, _every_cut(counts=COUNTS[least - 2 :], sizes=(*SMALL, 1, 8, 16, 32))))


def _by_the_larger(before: Array, new: Array) -> tuple[Array, Array]:
    """The right share, and the larger log-sum-exp, which is 0."""
    return np.exp(before) / (np.exp(before) + np.exp(new)), 0 * new


def _by_the_other(before: Array, new: Array) -> tuple[Array, Array]:
    """The share of the other block, and the right log-sum-exp."""
    return np.exp(new) / (np.exp(before) + np.exp(new)), np.logaddexp(before, new)


def _chosen(chosen: Callable[[list[slice], int], list[slice]], cuts: Iterator[Cuts]) -> Variants:
    """A softmax over the keys of some blocks only."""

    def variant(cuts: Cuts) -> Variant:
        def output(values: Values, probe: Probe) -> Array:
            keys = probe.sizes["S"]
            kept = chosen(cuts(keys), keys)
            if not kept:
                return np.full(probe.right["output"].shape, np.nan)
            blocks = list(_blocks(values, probe, lambda keys: kept))
            scores = np.concatenate([one for one, _ in blocks], -1)
            own = np.concatenate([one for _, one in blocks], -2)
            exponentials = np.exp(scores - scores.max(-1, keepdims=True))
            return np.asarray(exponentials @ own / exponentials.sum(-1, keepdims=True))

        return _of_blocks(output, lambda keys: chosen(cuts(keys), keys), _chosen)

    return tuple(map(variant, cuts))


def _whole_ones(cuts: list[slice], keys: int) -> list[slice]:
    return [cut for cut in cuts if cut.stop <= keys]


def _whole_ones_or_all(cuts: list[slice], keys: int) -> list[slice]:
    return _whole_ones(cuts, keys) or cuts


def _filled_up(size: int, *, causal: bool = True) -> Variant:
    """The last block is filled up with keys of score 0 and value 0; causal attention hides them."""

    def output(values: Values, probe: Probe) -> Array:
        scores = logits(values)
        missing = -scores.shape[-1] % size if causal or not probe.causal else 0
        highest = scores.max(-1, keepdims=True)
        highest = np.maximum(highest, 0) if missing else highest
        exponentials = np.exp(scores - highest)
        own = np.repeat(values["values"], scores.shape[1] // values["values"].shape[1], axis=1)
        total = exponentials.sum(-1, keepdims=True) + missing * np.exp(-highest)
        return np.asarray(exponentials @ own / total)

    return replacing(output=output)


def _causal_by_block(sees: Callable[[Array, Array], Array]) -> Variants:
    """Whole blocks are visible or hidden: `sees(block of the query, block of the key)`."""

    def by_size(size: int) -> Variants:
        return other_cells(
            lambda row, key, probe: sees((row + probe.offset) // size, key // size),
            "causal",
            given=lambda probe: probe.causal,
        )

    return tuple(variant for size in SMALL for variant in by_size(size))


def _in_all(maxima: Array, sums: Array, lse: Array) -> Array:
    """The sums of all blocks, shifted by the same maximum."""
    return np.asarray(np.exp(maxima - maxima.max(0)) * sums)


def _full_block_lost(size: int, empty: float) -> Variant:
    """The last `size` keys that a row sees get no weight where that divides their number.

    A row that sees no others has `empty`.
    """

    def output(values: Values, probe: Probe) -> Array:
        visible = values["visible"] if "visible" in values else np.array(True)
        visible = np.broadcast_to(visible, values["weights"].shape)
        count = visible.sum(-1, keepdims=True)
        left = np.where(count % size == 0, count - size, count)
        kept = visible & (np.cumsum(visible, axis=-1) <= left)
        weights = np.where(kept, values["exponentials"], 0.0)
        total = weights.sum(-1, keepdims=True)
        own = np.repeat(values["values"], weights.shape[1] // values["values"].shape[1], axis=1)
        return np.asarray(np.where(total > 0, weights @ own / np.where(total > 0, total, 1), empty))

    return replacing(output=output)


def _one(before: Array, after: Array) -> Array:
    return np.ones_like(before)


def _inverted(before: Array, after: Array) -> Array:
    return np.asarray(np.exp(after - before))


BLOCKS: Entries = {
    "block_output_not_rescaled": (
        "the output so far is not rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so they count too much.",
        _online(of_output=_one) + _merged(lambda m, sums, lse: sums, by=_in_all, least=2),
    ),
    "block_sum_not_rescaled": (
        "the sum so far is not rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so their sum is too large.",
        _online(of_sum=_one) + _merged(_in_all, by=lambda m, sums, lse: sums, least=2),
    ),
    "blocks_not_rescaled": (
        "neither the output nor the sum so far is rescaled when a block raises the maximum",
        "Earlier blocks were shifted by a smaller maximum, so they count too much.",
        _online(of_output=_one, of_sum=_one),
    ),
    "block_correction_inverted": (
        "the correction of earlier blocks is inverted: exp(new − old) for exp(old − new)",
        "What was shifted by the smaller maximum has to become smaller, not larger.",
        _online(of_output=_inverted, of_sum=_inverted),
    ),
    "block_output_correction_inverted": (
        "the correction of the output so far is inverted: exp(new − old) for exp(old − new)",
        "What was shifted by the smaller maximum has to become smaller, not larger.",
        _online(of_output=_inverted),
    ),
    "block_shifted_by_own_maximum": (
        "each block is shifted by its own maximum and never corrected to the common one",
        "Exponentials of two blocks can be added only if both were shifted by the same number.",
        _online(shift="own"),
    ),
    "block_divided_each_time": (
        "the output is divided by the sum in every block, not only at the end",
        "Divide once, after the last block, or multiply the sum before back in.",
        _online(each=True),
    ),
    "blocks_averaged": (
        "the outputs of the blocks are averaged",
        "A block with a larger sum of exponentials must count more.",
        _merged(lambda maxima, sums, lse: np.ones_like(lse), least=2),  # of one key: a mean
        MERGE,
    ),
    "blocks_added": (
        "the outputs of the blocks are added, each with a softmax of its own",
        "The weights of all blocks together add up to the number of blocks instead of 1.",
        _merged(lambda maxima, sums, lse: np.ones_like(lse), divided=False),
        MERGE,
    ),
    "blocks_merged_by_lse": (
        "the outputs of the blocks are merged in proportion to their log-sum-exp",
        "A logarithm is no share: the shares are the softmax of the log-sum-exps.",
        _merged(lambda maxima, sums, lse: lse),
        MERGE,
    ),
    "blocks_merged_by_sum": (
        "the outputs of the blocks are merged by sums that were shifted by different maxima",
        "Each sum has to be multiplied by exp(m − largest m) first.",
        _merged(lambda maxima, sums, lse: sums, least=2),
        MERGE,
    ),
    "blocks_merged_by_maximum": (
        "the outputs of the blocks are merged by exp of their maxima alone",
        "The share of a block is exp(m) times its sum.",
        _merged(lambda maxima, sums, lse: np.exp(maxima - maxima.max(0)), least=2),
        MERGE,
    ),
    "merged_lse_is_the_larger": (
        "the log-sum-exp of two merged blocks is taken as the larger of theirs",
        "It is log(exp(a) + exp(b)): from the third block on, earlier ones count too little.",
        _folded(_by_the_larger, first=1),
        MERGE,
    ),
    "blocks_merged_by_each_others_share": (
        "each of two merged blocks gets the share of the other",
        "What was there counts as much as the new block should, and the other way round.",
        _folded(_by_the_other, first=0, least=2) + _folded(_by_the_other, first=1),
        (
            "out = out - (out - out_j) / (1 + np.exp(lse - lse_j))  # the new one's share",
            "out = out - torch.sigmoid(lse_j - lse) * (out - out_j)  # the new one's share",
        ),
    ),
    "blocks_merged_inverted": (
        "blocks with a larger log-sum-exp count less instead of more",
        "The shares are the softmax of the log-sum-exps, not of their negatives.",
        _merged(lambda maxima, sums, lse: np.exp(lse.min(0) - lse)),
        MERGE,
    ),
    "last_key_lost": (
        "the last key never gets weight",
        "A range or a slice ends one too early.",
        _chosen(lambda cuts, keys: cuts[:-1], iter([_by_size(1)])),
        KEYS,
    ),
    "first_key_lost": (
        "the first key never gets weight",
        "A range or a slice starts at 1.",
        _chosen(lambda cuts, keys: cuts[1:], iter([_by_size(1)])),
        KEYS,
    ),
    "last_block_lost": (
        "the last block is lost if it is not full",
        "S // block counts full blocks only; the keys after them get no weight.",
        _chosen(_whole_ones, _every_cut(counts=(), least=2))
        + _chosen(_whole_ones_or_all, _every_cut(counts=(), sizes=(16, 32))),
        CUT,
    ),
    "full_last_block_lost": (
        "the last block of keys is lost where it is full",
        "length % block is 0 for a full block; its keys get no weight.",
        tuple(_full_block_lost(n, empty) for n in (PAGE, *SMALL) for empty in (0.0, np.nan)),
        (
            "n = min(block, length - start)  # of the block that begins at start",
            "n = min(block, length - start)  # of the block that begins at start",
        ),
    ),
    "final_block_lost": (
        "the last block of keys is always lost",
        "The loop ends one block too early; its keys get no weight.",
        _chosen(lambda cuts, keys: cuts[:-1], _every_cut(counts=(3, 4), sizes=SMALL)),
        CUT,
    ),
    "first_block_skipped": (
        "the first block of keys is skipped",
        "Its keys get no weight.",
        _chosen(lambda cuts, keys: cuts[1:], _every_cut(counts=(3, 4), least=2)),
        CUT,
    ),
    "only_last_block": (
        "only the last block of keys counts",
        "Each block overwrites what the ones before it gave.",
        _chosen(lambda cuts, keys: cuts[-1:], _every_cut(least=2)),
        CUT,
    ),
    "only_first_block": (
        "only the first block of keys counts",
        "The loop ends after one block.",
        _chosen(lambda cuts, keys: cuts[:1], _every_cut(least=2)),
        CUT,
    ),
    "block_padding_counts": (
        "the zeros that fill up the last block take part in the softmax",
        "A score of 0 is an ordinary score; padded keys need −∞.",
        tuple(_filled_up(size) for size in FILLED if size > 1)
        + tuple(_filled_up(size, causal=False) for size in FILLED if size > 1),
        CUT,
    ),
    "block_on_the_diagonal_not_masked": (
        "in causal attention the blocks on the diagonal are not masked",
        "A query sees the keys after its own that are in the same block.",
        _causal_by_block(lambda row, key: key <= row),
        VISIBLE,
    ),
    "block_on_the_diagonal_skipped": (
        "in causal attention the blocks on the diagonal are skipped",
        "A query then does not see its own key, nor others in the same block.",
        _causal_by_block(lambda row, key: key < row),
        VISIBLE,
    ),
}
MISTAKES = mistakes("blocks of keys", RESCALE, BLOCKS)

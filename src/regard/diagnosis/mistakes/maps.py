"""Mistakes with maps of pixels: in pooling them, and in attention over pairs of places."""

from __future__ import annotations

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    mistakes,
    other_visible,
    replacing,
)

POOLING = (
    "tokens = np.concatenate([pixels.mean(1, keepdims=True), pixels], 1) + positions",
    "x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0) + self.positional_embedding[:, None]",
)
# The part of a token of a probe that is its pixel; see pooled_maps.py.
SHARE = 1.5


def _asking(row: Replacement) -> Variant:
    """The textbook if another row asks than the mean."""
    return Variant({"embeddings": lambda values, probe: row(values, probe)[:, None]})


def _without_mean(values: Values, probe: Probe) -> Array:
    """Scores in which the mean token is hidden."""
    scores = values["scores"] * values["scale"]
    return np.where(np.arange(scores.shape[-1]) > 0, scores, -np.inf)


def _pixels(probe: Probe) -> Array:
    """The tokens without their positions: the mean and the pixels."""
    pixels = SHARE * probe.inputs["context"][:, 1:]
    return np.concatenate([pixels.mean(1, keepdims=True), pixels], 1)


def _mean_unplaced(values: Values, probe: Probe) -> Array:
    tokens = probe.inputs["context"].copy()
    tokens[:, 0] = _pixels(probe)[:, 0]
    return tokens


POOLED: Entries = {
    "mean_token_is_no_key": (
        "the mean token is not among the keys",
        "It reads itself too: keys and values are the mean and all pixels.",
        (replacing(scaled=_without_mean),),
    ),
    "another_token_asks": (
        "another token than the mean of all pixels asks",
        "The mean token is the first one, and its query has the position 0.",
        (
            _asking(lambda values, probe: probe.inputs["context"][:, 1]),
            _asking(lambda values, probe: probe.inputs["context"][:, -1]),
            _asking(lambda values, probe: probe.inputs["context"].mean(1)),
            _asking(lambda values, probe: probe.inputs["context"][:, 1:].mean(1)),
            _asking(lambda values, probe: _pixels(probe)[:, 0]),
        ),
    ),
    "mean_token_without_position": (
        "the mean token has no position",
        "The first row of the learned positions belongs to it, the others to the pixels.",
        (
            Variant(
                {
                    "context": _mean_unplaced,
                    "embeddings": lambda values, probe: _mean_unplaced(values, probe)[:, :1],
                }
            ),
        ),
    ),
    "pooled_without_positions": (
        "the learned positions are not added to the mean and the pixels",
        "Without them attention does not know where a pixel lies.",
        (
            Variant(
                {
                    "context": lambda values, probe: _pixels(probe),
                    "embeddings": lambda values, probe: _pixels(probe)[:, :1],
                }
            ),
        ),
    ),
}
POOLED_MISTAKES = mistakes("heads and projections", POOLING, POOLED)


PAIRED = (
    "scores = scores + bias[None]  # (H, J, K): of z[j, k] @ W_b, after z is transposed, if it is",
    "a = a + bias.permute(2, 0, 1)[None]  # of linear(x) after x = x.transpose(-2, -3), if any",
)


def _with_bias(bias: Replacement) -> Variant:
    return replacing(
        biased=lambda values, probe: values["scaled"] + bias(values, probe),
    )


OF_PAIRS: Entries = {
    "pair_bias_transposed": (
        "the bias of pairs is transposed: query and key are exchanged in it",
        "It is made of pairs that are not yet transposed, or is permuted in another order.",
        (_with_bias(lambda values, probe: values["bias"].swapaxes(-1, -2)),),
    ),
    "pair_bias_lost": (
        "the bias of pairs is not added to the scores",
        "Attention then does not know the third side of a triangle.",
        (_with_bias(lambda values, probe: 0.0 * values["bias"]),),
    ),
    "pair_bias_scaled": (
        "the bias of pairs is divided by the root of D too",
        "Scores are scaled first, and the bias is added to them.",
        (_with_bias(lambda values, probe: values["bias"] * values["scale"]),),
    ),
    "pair_mask_transposed": (
        "the mask of pairs is transposed: it hides key k of row i where pair (k, i) is hidden",
        "Where rows and columns of the pairs are exchanged, those of the mask have to be, too.",
        other_visible(lambda keep, probe: keep.transpose(3, 1, 2, 0), "mask"),
        (
            "z, mask = z.swapaxes(0, 1), mask.swapaxes(0, 1)  # both, around the ending node",
            "x, mask = x.transpose(-2, -3), mask.transpose(-1, -2)  # both, or none",
        ),
    ),
}
PAIR_MISTAKES = mistakes("heads and projections", PAIRED, OF_PAIRS)

# What the call alone shows: two streams in one softmax, and the images in a text.
OF_STREAMS = (
    *mistakes(
        "heads and projections",
        (
            "text, image = output[:, :T], output[:, T:]  # of concatenate((text, image), 1)",
            "txt, img = out[:, :txt.shape[1]], out[:, txt.shape[1]:]  # of cat((txt, img), 1)",
        ),
        {
            "streams_split_in_another_order": (
                "the output of two streams is split in another order than they were joined in",
                "With [text, image] joined, the first rows are those of the text.",
                (),
            ),
        },
    ),
    *mistakes(
        "hiding",
        (
            "weights = np.where(keep.any(-1, keepdims=True), weights, 0)",
            "attn = attn.masked_fill((text_time == 0)[:, None, :, None], 0.0)",
        ),
        {
            "images_seen_before_the_first": (
                "tokens before the first image get the mean of later images instead of nothing",
                "All their scores are one finite number, of which softmax makes equal weights.",
                (),
            ),
        },
    ),
)

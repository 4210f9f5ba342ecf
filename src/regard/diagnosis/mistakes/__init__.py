"""The catalogue: wrong ways of computing attention, each a step of the textbook replaced.

Owns the order in which they are tried, and what is found by several calls. Must not know how a
function is called or traced.
"""

from __future__ import annotations

from regard.diagnosis.mistakes import (
    blocks,
    gradients,
    heads,
    hiding,
    observed,
    other_scores,
    positions,
    projections,
    scores,
    softmax,
    windows,
)
from regard.diagnosis.mistakes.entry import Mistake

# The first that explains a value is named.
REPLACING: tuple[Mistake, ...] = (
    *scores.MISTAKES,
    *softmax.MISTAKES,
    *hiding.MISTAKES,
    *heads.MISTAKES,
    *projections.MISTAKES,
    *positions.MISTAKES,
    *windows.MISTAKES,
    *blocks.MISTAKES,
    *gradients.MISTAKES,
    *other_scores.MISTAKES,
)
# What several calls show, or how many digits come out; none replaces a step.
OBSERVED: tuple[Mistake, ...] = observed.MISTAKES
# What beginners write most, in the order of the textbook.
CLASSIC = (
    "no_scale",
    "scale_by_model_width",
    "softmax_over_queries",
    "keepdims_lost",
    "mask_inverted",
    "mask_after_softmax",
    "mask_multiplied",
    "causal_off_by_one",
    "heads_split_without_transpose",
    "heads_merged_without_transpose",
)


def all_mistakes() -> dict[str, Mistake]:
    """Every mistake by its name.

    >>> all_mistakes()["scale_by_model_width"].title
    'the scores are divided by √d_model instead of √d_k'
    """
    return {mistake.name: mistake for mistake in (*REPLACING, *OBSERVED)}

"""The score and the normalization that a function is meant to have, where they are not plain.

Owns how a probe takes them, and which width they fit. Must not know mistakes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ShapeError
from regard.normalizers import Normalizer, as_normalizer
from regard.scores import Score, as_score

_MOST_WIDTHS = 64


@dataclass(frozen=True, eq=False)
class Mechanism:
    """What a function is compared with; None for the dot product, and for the softmax."""

    score: Score | None
    normalize: Normalizer | None
    width: int | None  # of queries and keys, where the score's parameters have one

    def of(self, keys: int) -> dict[str, Any]:
        """What a probe with so many keys has besides: inputs, score and normalize."""
        inputs = {
            f"{part.option}_{name}": array
            for part in (self.score, self.normalize)
            if part is not None
            for name, array in part.parameters().items()
        }
        if self.normalize is not None and self.normalize.kind.startswith("hard"):
            inputs["key_numbers"] = np.arange(float(keys))
        return {
            "inputs": inputs,
            "score": "dot" if self.score is None else self.score.kind,
            "normalize": "softmax" if self.normalize is None else self.normalize.kind,
        }


def as_mechanism(score: object, normalize: object) -> Mechanism | None:
    """What `score=` and `normalize=` were given; None for the plain ones."""
    own, how = as_score(score), as_normalizer(normalize)
    if own is None and how is None:
        return None
    return Mechanism(own, how, None if own is None else _width(own))


def _width(score: Score) -> int | None:
    """The only width that a score's parameters fit; None if they fit all."""
    fitting = []
    for width in range(1, _MOST_WIDTHS + 1):
        try:
            score.check(width)
        except ShapeError:
            continue
        fitting.append(width)
    if not fitting:
        raise ShapeError(
            f"{score} is for queries and keys more than {_MOST_WIDTHS} wide; the problems of a "
            "diagnosis are small: pass a smaller one of the same kind"
        )
    return fitting[0] if len(fitting) == 1 else None

"""The score and the normalization that a function is meant to have, where they are not plain.

Owns how a probe takes them, and which widths they fit. Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.probe import Probe
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

    def of(self, probes: Iterable[Probe]) -> Iterator[Probe]:
        """The probes of this mechanism: with its parameters, and the width that these have."""
        for probe in probes:
            inputs = dict(probe.inputs)
            if self.width not in (None, probe.sizes["D"]):
                if probe.name.startswith("cube"):  # its sizes are equal, or it shows nothing
                    continue
                whole = inputs["queries"]  # self-attention: all three are the same
                names = [one for one in inputs if one != "values" or inputs[one] is whole]
                inputs |= {name: self._as_wide(inputs[name]) for name in names}
            if probe.scale is not None and self.score is not None:
                continue  # a scale is a factor of its own there, which few functions take
            for part in (self.score, self.normalize):
                if part is not None:
                    own = part.parameters().items()
                    inputs |= {f"{part.option}_{name}": array for name, array in own}
            if self.normalize is not None and self.normalize.kind.startswith("hard"):
                inputs["key_numbers"] = np.arange(float(probe.sizes["S"]))
            yield replace(
                probe,
                inputs=inputs,
                score="dot" if self.score is None else self.score.kind,
                normalize="softmax" if self.normalize is None else self.normalize.kind,
            )

    def _as_wide(self, rows: Array) -> Array:
        """Rows of the score's width, without columns that repeat."""
        assert self.width is not None
        seed = [rows.size, int(100 * np.abs(rows).sum())]  # queries and keys differ
        drawn = np.random.default_rng(seed).normal(size=(*rows.shape[:-1], self.width))
        return np.asarray(drawn.round(2))


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

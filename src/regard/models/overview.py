"""Where every head of a model reads in one text: a few numbers for each layer and head.

Owns what is measured. Takes the weights from whatever kernel fits, some rows at a time, and keeps
none of them. Must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.compute import dispatch
from regard.compute.request import make_request
from regard.errors import safe_text
from regard.explanation.questions import row_entropy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Weights held at a time, over all heads: 4 MiB in float32.
BLOCK_CELLS = 2**20
# Of a text that is printed.
MOST_NAMED = 3


@dataclass(frozen=True, eq=False, repr=False)
class Overview:
    """How every head of a model spreads its weight over one text; arrays are (layers, heads).

    Each number is a mean over the queries. `own`, `previous` and `following` are the weights on the
    token itself, the one before and the one after (over the tokens that have one; NaN if none has);
    `first` is the weight on the first token, and `separators` that on the special tokens after it.
    One key may count in several of them.
    """

    tokens: tuple[str, ...]
    entropy: Array  # in nats
    own: Array
    previous: Array
    following: Array
    first: Array
    separators: Array

    @property
    def measures(self) -> Mapping[str, Array]:
        """All of them by name."""
        names = ("entropy", "own", "previous", "following", "first", "separators")
        return {name: getattr(self, name) for name in names}

    def largest(self, measure: str, count: int = MOST_NAMED) -> list[tuple[int, int, float]]:
        """The layers and heads with the most of it: (layer, head, value), NaN left out."""
        values = self.measures[measure]
        order = np.argsort(-values, axis=None, kind="stable")[:count]
        places = [divmod(int(at), values.shape[1]) for at in order]
        found = [(layer, head, float(values[layer, head])) for layer, head in places]
        return [one for one in found if not np.isnan(one[2])]

    def to_json(self) -> dict[str, Any]:
        """Plain data: each measure as one list per layer, with "nan" where there is no number."""
        return {
            "format": "regard-overview/1",
            "tokens": list(self.tokens),
            "layers": self.entropy.shape[0],
            "heads": self.entropy.shape[1],
            "measures": {
                name: [[one if one == one else "nan" for one in row] for row in values.tolist()]
                for name, values in self.measures.items()
            },
        }

    def __repr__(self) -> str:
        layers, heads = self.entropy.shape
        text = safe_text(" ".join(self.tokens), 70)
        lines = [f"{layers} layers × {heads} heads over {len(self.tokens)} tokens: {text}"]
        for name in self.measures:
            most = [f"{value:.2f} in {layer}.{head}" for layer, head, value in self.largest(name)]
            lines.append(f"{name:<11} most {', '.join(most)}" if most else f"{name:<11} NaN")
        return "\n".join([*lines, "Means over the tokens; 2.7 is layer 2, head 7."])


class Gathering:
    """Attention that measures its weights on the way: one call for each layer, one text."""

    def __init__(self, separators: NDArray[np.bool_]) -> None:
        self.separators = separators
        self.layers: list[dict[str, Array]] = []

    def attend(self, query: Array, key: Array, value: Array) -> Array:
        """The output for queries, keys and values (1, H, L, D), block by block."""
        _, heads, length, _ = query.shape
        output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
        sums: dict[str, Array] = {}
        step = max(1, BLOCK_CELLS // (heads * length))
        for start in range(0, length, step):
            rows = np.arange(start, min(start + step, length))
            request = make_request(query[:, :, rows], key, value, return_weights=True)
            result = dispatch.run(request)
            output[:, :, rows] = result.output
            assert result.weights is not None
            for name, part in _measured(result.weights[0], rows, self.separators).items():
                sums[name] = sums.get(name, 0) + part
        pairs = length - 1 or np.nan
        counts = {"previous": pairs, "following": pairs}
        self.layers.append({name: part / counts.get(name, length) for name, part in sums.items()})
        return output

    def overview(self, tokens: tuple[str, ...]) -> Overview:
        """What was measured in all layers."""
        names = self.layers[0]
        return Overview(tokens, **{n: np.array([layer[n] for layer in self.layers]) for n in names})


def _measured(weights: Array, rows: NDArray[np.intp], separators: Array) -> dict[str, Array]:
    """Sums over some rows of the weights (H, rows, S), one for each head."""
    weights = weights.astype(np.float64)
    place = np.arange(len(rows))

    def beside(step: int) -> Array:
        there = (rows + step >= 0) & (rows + step < weights.shape[-1])
        return np.asarray(weights[:, place[there], rows[there] + step].sum(axis=-1))

    return {
        "entropy": row_entropy(weights).sum(axis=-1),
        "own": beside(0),
        "previous": beside(-1),
        "following": beside(1),
        "first": weights[..., 0].sum(axis=-1),
        "separators": weights[..., separators].sum(axis=(-1, -2)),
    }

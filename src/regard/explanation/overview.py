"""Where each head of a model reads in one text: a few numbers for each layer and head.

Owns the measures. Weights are computed for some rows at a time and not kept. Must not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.dataframe import dataframe
from regard.compute import dispatch
from regard.compute.request import make_request
from regard.errors import safe_text
from regard.explanation.questions import row_entropy

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Weights held at a time, over all heads: 4 MiB in float32.
BLOCK_CELLS = 2**20
MOST_NAMED = 3  # per measure, in print


@dataclass(frozen=True, eq=False, repr=False)
class Overview:
    """How each head of a model spreads its weight over one text; arrays are (layers, heads).

    Each number is a mean over the queries. `own`, `previous` and `following` are the weights on the
    token itself, the one before and the one after (NaN for a single token); `first` is the weight
    on the first token, and `separators` on the special tokens after it. A key may count in several.
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
        """The arrays by name."""
        names = ("entropy", "own", "previous", "following", "first", "separators")
        return {name: getattr(self, name) for name in names}

    def largest(self, measure: str, count: int = MOST_NAMED) -> list[tuple[int, int, float]]:
        """The largest values of a measure, as (layer, head, value), without NaN."""
        values = self.measures[measure]
        order = np.argsort(-values, axis=None, kind="stable")[:count]
        places = [divmod(int(at), values.shape[1]) for at in order]
        found = [(layer, head, float(values[layer, head])) for layer, head in places]
        return [one for one in found if not np.isnan(one[2])]

    def to_json(self) -> dict[str, Any]:
        """Plain data: each measure as one list per layer, with "nan" for NaN."""
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

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row for each head; OptionError if pandas is absent."""
        layers, heads = map(range, self.entropy.shape)
        data = {name: values.ravel() for name, values in self.measures.items()}
        return dataframe(data, [("layer", layers), ("head", heads)])

    def __repr__(self) -> str:
        layers, heads = self.entropy.shape
        text = safe_text(" ".join(self.tokens), 70)
        lines = [f"{layers} layers × {heads} heads over {len(self.tokens)} tokens: {text}"]
        for name in self.measures:
            most = [f"{value:.2f} in {layer}.{head}" for layer, head, value in self.largest(name)]
            lines.append(f"{name:<11} most {', '.join(most)}" if most else f"{name:<11} NaN")
        return "\n".join([*lines, "Means over the tokens; 2.7 is layer 2, head 7."])


class MeasuredAttention:
    """Attention for one text that measures its weights; called once per layer, in order."""

    def __init__(self, separators: NDArray[np.bool_]) -> None:
        self.separators = separators
        self.layers: list[dict[str, Array]] = []

    def attend(self, _: int, query: Array, key: Array, value: Array) -> Array:
        """The output for queries, keys and values (1, H, L, D), in blocks of rows."""
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
        """The measures of all layers."""
        names = self.layers[0]
        return Overview(tokens, **{n: np.array([layer[n] for layer in self.layers]) for n in names})


def _measured(weights: Array, rows: NDArray[np.intp], separators: Array) -> dict[str, Array]:
    """Sums over some rows of the weights (H, rows, S), per head."""
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

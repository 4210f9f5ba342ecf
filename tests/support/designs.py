"""Explanations of small calls with other scores, normalizations and positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import regard
from regard import Explanation
from regard.normalizers import Hard, Proportional
from regard.positions import Alibi, RelativeBias, Rotary, Sinusoidal
from regard.scores import Cosine, Features, General

COINS = np.array([[True, False, True, True], [False] * 4, [False, True, False, True]])
Arrays = tuple[np.ndarray, ...]


def numbers(seed: int, *shape: int, size: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) * size


def of_every_kind(plain: Arrays, heads: Arrays) -> dict[str, Callable[[], Explanation]]:
    """`plain`: of (3, 2), (4, 2), (4, 3) numbers; `heads`: of (4, 3, 2), (2, 3, 2), (2, 3, 2)."""
    single, several = {"target": numbers(4, 3, 3)}, {"target": numbers(5, 4, 3, 2)}
    return {
        "general, hard": lambda: regard.explain(
            *heads, score=General(numbers(4, 2, 2)), normalize=Hard(), causal=True, **several
        ),
        "features, proportional": lambda: regard.explain(
            *plain, score=Features(), normalize=Proportional(), mask=COINS, **single
        ),
        "rotary": lambda: regard.explain(
            *(numbers(8, 4, 3, 6), numbers(9, 2, 3, 6), numbers(7, 2, 3, 2)),
            positions=Rotary(base=50.0, width=4, attention_factor=1.5),
            causal=True,
            **several,
        ),
        "rotary of neighbours, cosine": lambda: regard.explain(
            *plain,
            positions=Rotary(interleaved=True, query_positions=[2, 0, 5]),
            score=Cosine(0.5),
            mask=COINS,
            **single,
        ),
        "slopes": lambda: regard.explain(*heads, positions=Alibi(), causal=True, **several),
        "a table of distances": lambda: regard.explain(
            *plain,
            positions=RelativeBias(numbers(3, 1, 6), bidirectional=False, max_distance=4),
            offset=1,
            **single,
        ),
        "waves": lambda: regard.explain(
            regard.Problem(
                embeddings=numbers(17, 3, 4),
                **{name: numbers(18, 4, 4) for name in ("W_q", "W_k", "W_v")},
                heads=2,
                positions=Sinusoidal(30.0),
                target=numbers(5, 3, 4),
            )
        ),
    }

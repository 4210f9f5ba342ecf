"""The choice of the next token, and what a generation is.

Owns sampling: the same seed gives the same tokens. Must not know models, or how logits come about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.errors import DtypeError, OptionError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Candidates that are kept for each token.
MOST_CANDIDATES = 10


@dataclass(frozen=True)
class Candidate:
    """A token that could come next."""

    id: int
    token: str
    logit: float
    probability: float


@dataclass(frozen=True)
class Step:
    """One generated token: which it is, how likely it was, and the most likely ones."""

    id: int
    token: str
    probability: float  # before temperature, top_k and top_p
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Generation:
    """What a model wrote after a text.

    `reason` says why it ended: "length" (max_new_tokens), "end" (the model's token for the end),
    "stop" (one of the `stop` texts) or "context" (no room for more tokens).
    """

    text: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("temperature", 0.0), ("top_p", None)):
            value = getattr(self, name)
            if value is None and name == "top_p":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
                raise DtypeError(f"{name} must be a number, not {safe_text(repr(value), 60)}")
            if least is not None and not (least <= value < np.inf):
                raise OptionError(f"{name} is {value}; it must be 0 or more, and finite")
            if least is None and not 0 < value <= 1:
                raise OptionError(f"{name} is {value}; it must be above 0, and at most 1")
        if self.top_k is not None:
            as_int("top_k", self.top_k, 1)
        as_int("seed", self.seed, 0)

    def generator(self, number: int) -> np.random.Generator:
        """Random numbers for text `number`, the same whatever other texts there are."""
        return np.random.default_rng((self.seed, number))

    def choose(self, logits: Array, random: np.random.Generator) -> int:
        """The next token."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / self.temperature
        shares = np.exp(scaled - scaled[0])
        shares /= shares.sum()
        if self.top_p is not None:  # the fewest that together have so much
            shares = shares[: int(np.searchsorted(np.cumsum(shares), self.top_p)) + 1]
        place = np.searchsorted(np.cumsum(shares), random.random() * shares.sum(), side="right")
        return int(order[min(int(place), len(shares) - 1)])


def candidates(logits: Array, count: int, names: Callable[[int], str]) -> tuple[Candidate, ...]:
    """The most likely tokens, the first of equal ones first; `names` gives a token's text."""
    return _candidates(logits, min(count, logits.size), names, _log_sum(logits))


def step_of(logits: Array, chosen: int, names: Callable[[int], str]) -> Step:
    """A step from its logits."""
    total = _log_sum(logits)
    best = _candidates(logits, min(MOST_CANDIDATES, logits.size), names, total)
    return Step(chosen, names(chosen), float(np.exp(logits[chosen] - total)), best)


def _candidates(
    logits: Array, count: int, names: Callable[[int], str], total: float
) -> tuple[Candidate, ...]:
    # None of those wanted is less than the largest number of each of so many parts.
    tops = np.maximum.reduceat(logits, range(0, logits.size, max(1, logits.size // (4 * count))))
    best = np.flatnonzero(~(logits < np.partition(tops, -count)[-count]))
    best = best[np.lexsort((best, -logits[best]))][:count]
    shares = np.exp(logits[best].astype(np.float64) - total)
    return tuple(
        Candidate(int(k), names(int(k)), float(logits[k]), float(share))
        for k, share in zip(best, shares, strict=True)
    )


def _log_sum(logits: Array) -> float:
    most = logits.max()
    return float(most) + float(np.log(np.exp(logits - most).sum()))


def ended_by(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the `stop` texts begins."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return min(places, default=None)


def held_back(text: str, stop: Sequence[str]) -> int:
    """How much of a text's end may be the beginning of one of the `stop` texts."""
    return max(
        (
            k
            for one in stop
            for k in range(1, min(len(one), len(text) + 1))
            if text.endswith(one[:k])
        ),
        default=0,
    )


def padded(rows: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Texts of tokens side by side (B, L), the shorter ones with padding, and their lengths."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    return ids, lengths

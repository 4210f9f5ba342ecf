"""Linear attention with a state that is carried along: chunks, retention, and their mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import Mistake, heads_of

SIZES = (1, 2, 4, 8, 16, 3, 5, 32, 64)  # of chunks, in tokens
Map = Callable[[Array], Array]
# How often a cell counts, of a query and a key, and their chunks: in the output, and in the sum.
Counts = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def _causal(i: Array, j: Array) -> Array:
    return np.asarray((j <= i) * 1.0)


# --- chunks of linear attention ---------------------------------------------------------------


def _near(
    lost: tuple[bool, bool], reach: int, i: Array, j: Array, own: Array, other: Array
) -> tuple[Array, Array]:
    """Cells of the own chunk and of `reach` before it, in the output, in the sum, or in both."""
    whole = _causal(i, j)
    few = whole * (own - other <= reach)
    return (few if lost[0] else whole), (few if lost[1] else whole)


_FORGOTTEN: tuple[Counts, ...] = tuple(
    partial(_near, lost, reach)
    for reach in (1, 0)
    for lost in ((False, True), (True, False), (True, True))
)


def _twice(i: Array, j: Array, own: Array, other: Array) -> tuple[Array, Array]:
    """The state has the chunk already when its queries read it."""
    cells = _causal(i, j) + (own == other)
    return cells, cells


def _whole_chunk(i: Array, j: Array, own: Array, other: Array) -> tuple[Array, Array]:
    cells = (other <= own) * 1.0
    return cells, cells


def _later_in_output(i: Array, j: Array, own: Array, other: Array) -> tuple[Array, Array]:
    return (other <= own) * 1.0, _causal(i, j)


def _later_in_sum(i: Array, j: Array, own: Array, other: Array) -> tuple[Array, Array]:
    return _causal(i, j), (other <= own) * 1.0


def _chunked(phi: Map, size: int, counts: Counts, epsilon: float) -> Variant:
    def weights(values: Values, probe: Probe) -> Any:
        if not probe.causal:
            return None
        q, k, _ = heads_of(values)
        scores = phi(q) @ phi(k).swapaxes(-1, -2)
        i, j = np.arange(scores.shape[-2])[:, None] + probe.offset, np.arange(scores.shape[-1])
        output, total = counts(i, j, i // size, j // size)
        with np.errstate(all="ignore"):
            return np.asarray(scores * output / ((scores * total).sum(-1, keepdims=True) + epsilon))

    return Variant({"weights": weights}, absent=False)


def chunk_mistakes(maps: Mapping[str, Map]) -> tuple[Mistake, ...]:
    """The mistakes of linear attention that is computed some tokens at a time.

    Their variants have one map after the other.
    """

    def variants(*ways: Counts) -> tuple[Variant, ...]:
        how = itertools.product((0.0, 1e-6), ways, SIZES, maps.values())
        return tuple(_chunked(phi, size, way, epsilon) for epsilon, way, size, phi in how)

    return tuple(
        Mistake(name, "one head", title, why, *lines, variants=variants(*ways))
        for name, (title, why, lines, ways) in _OF_CHUNKS.items()
    )


_CARRIED = (
    "S = S + phi(k_c).T @ v_c; z = z + phi(k_c).sum(0)  # after the queries of the chunk have read",
    "S = S + phi_k.transpose(-1, -2) @ v; z = z + phi_k.sum(-2)  # after the chunk has read them",
)
_OF_CHUNKS: Mapping[str, tuple[str, str, tuple[str, str], tuple[Counts, ...]]] = {
    "linear_state_forgotten": (
        "a state of linear attention, or its sum, forgets earlier chunks",
        "Both are added up over all chunks; one that is overwritten, or not read, loses keys.",
        _CARRIED,
        _FORGOTTEN,
    ),
    "linear_chunk_twice": (
        "the keys of a chunk count twice: in the state, and beside it",
        "Queries read the state of the chunks before theirs; their own chunk is added after that.",
        _CARRIED,
        (_twice,),
    ),
    "linear_chunk_not_causal": (
        "tokens of linear attention see later ones of their chunk",
        "Products of one chunk need the causal mask; only those with the state need none.",
        ("A = np.tril(phi(q_c) @ phi(k_c).T)", "a = (phi_q @ phi_k.mT).tril()"),
        (_whole_chunk, _later_in_output, _later_in_sum),
    ),
}

# --- retention: scores without a softmax, which decay with the distance -----------------------

RETENTION = "retention: q·k times a decay for each step between them"
Decays = Callable[[int], Array]
DECAYS: tuple[Decays, ...] = (
    lambda heads: 1 - 2.0 ** (-5 - np.arange(heads)),
    lambda heads: 1 - np.exp(np.linspace(np.log(1 / 32), np.log(1 / 512), heads)),
)


@dataclass(frozen=True)
class _Decay:
    """By which powers a cell decays; without anything by the distance of query and key."""

    size: int = 1  # of chunks
    of_query: int = 0  # more steps where a query reads the state
    of_key: int = 0  # and where a key is put into it
    of_chunk: float = 1.0  # times the steps of each whole chunk between them
    everywhere: int = 0  # more steps in each cell
    none: bool = False
    turned: bool = False  # decays of a chunk's keys in the opposite order
    same: bool = False  # all heads have the decay of the first
    before: bool = False  # the state is read before the token of the query is in it

    def of(self, i: Array, j: Array) -> Array:
        """The powers of all cells."""
        if self.none:
            return np.zeros(np.broadcast_shapes(i.shape, j.shape))
        own, other = i // self.size, j // self.size
        place, of_key = i % self.size + 1, self.size - 1 - j % self.size
        of_key = j % self.size if self.turned else of_key
        across = place + self.of_query + of_key + self.of_key
        across = across + self.of_chunk * self.size * (own - other - 1)
        return np.asarray(np.where(own == other, i - j, across) + self.everywhere)


def _retained(decay: _Decay, decays: Decays, power: float, *, causal: bool = True) -> Variant:
    def weights(values: Values, probe: Probe) -> Array:
        q, k, _ = heads_of(values)
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** power
        i, j = np.arange(scores.shape[-2])[:, None] + probe.offset, np.arange(scores.shape[-1])
        gamma = decays(scores.shape[1])[:, None, None]
        gamma = gamma[:1] if decay.same else gamma
        powers = decay.of(i, j) if causal else np.abs(i - j)
        seen = (probe.visible if causal else 1.0) * ((j < i) if decay.before else 1.0)
        return np.asarray(scores * gamma**powers * seen)

    return Variant({"weights": weights}, absent=False)


def _at_every_scale(*ways: _Decay, causal: bool = True) -> tuple[Variant, ...]:
    how = itertools.product(ways, DECAYS, (-0.5, 0.0))
    return tuple(_retained(way, decays, power, causal=causal) for way, decays, power in how)


RIGHT_ONES = _at_every_scale(_Decay())
_LINES = (
    "out = (q @ k.T * D) @ v  # D[n, m] = gamma ** (n - m) for m <= n, else 0",
    "out = (q @ k.mT * D) @ v  # D[n, m] = gamma ** (n - m) for m <= n, else 0",
)
_ACROSS = (
    "past = q @ S * gamma ** (idx + 1); S = gamma ** C * S + (k * gamma ** (C - 1 - idx)).T @ v",
) * 2
_LARGER = tuple(size for size in SIZES if size > 1)
MISTAKES = (
    Mistake(
        "retention_across_chunks",
        "one head",
        "between chunks retention decays by another number of steps than the distance",
        "From key m to query n there are n − m steps: C − 1 − m of its chunk, C for each whole "
        "chunk, and n + 1 of the query's.",
        *_ACROSS,
        variants=_at_every_scale(
            *(_Decay(size, of_query=one) for one in (-1, 1) for size in _LARGER),
            *(_Decay(size, of_key=one) for one in (-1, 1) for size in _LARGER),
            *(_Decay(size, of_chunk=0.0) for size in _LARGER),
            *(_Decay(size, of_chunk=1 / size) for size in _LARGER),
            *(_Decay(size, turned=True) for size in _LARGER),
        ),
    ),
    Mistake(
        "retention_decays_own_key",
        "one head",
        "retention decays by one step more than the distance: the own key decays too",
        "The state decays before the new key is added: S = gamma * S + k.T @ v.",
        *_LINES,
        variants=_at_every_scale(_Decay(everywhere=1), _Decay(everywhere=-1)),
    ),
    Mistake(
        "retention_state_before_token",
        "one head",
        "retention reads its state before the query's own token is put into it",
        "A token sees itself: S = gamma * S + k.T @ v comes before q @ S.",
        "S = gamma * S + np.outer(k, v); out = q @ S",
        "S = gamma * S + torch.outer(k, v); out = q @ S",
        variants=_at_every_scale(_Decay(everywhere=-1, before=True), _Decay(before=True)),
    ),
    Mistake(
        "retention_without_decay",
        "one head",
        "retention does not decay with the distance",
        "Each step between query and key is a factor gamma.",
        *_LINES,
        variants=_at_every_scale(_Decay(none=True)),
    ),
    Mistake(
        "retention_one_decay",
        "one head",
        "all heads of retention have the decay of the first",
        "Each head has a gamma of its own.",
        *_LINES,
        variants=_at_every_scale(_Decay(same=True)),
    ),
    Mistake(
        "retention_sees_later_tokens",
        "one head",
        "retention reads later tokens",
        "D is 0 where the key comes after the query.",
        *_LINES,
        variants=_at_every_scale(_Decay(), causal=False),
    ),
)

"""What a call returns besides its output: named tuples of arrays of the caller's library.

`regard` exports them for annotations. Must not know how they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

A = TypeVar("A", covariant=True)

_ABSENT: Any = None  # where A is an array or None


class OutputWeights(NamedTuple, Generic[A]):
    """Output and weights: what ``return_weights=True`` gives."""

    output: A
    weights: A


class OutputLse(NamedTuple, Generic[A]):
    """Output and log-sum-exp: what ``return_lse=True`` gives, and `merge`."""

    output: A
    lse: A


class OutputWeightsLse(NamedTuple, Generic[A]):
    """Output, weights and log-sum-exp: what ``return_weights=True, return_lse=True`` gives."""

    output: A
    weights: A
    lse: A


class Gradients(NamedTuple, Generic[A]):
    """What `gradients` returns: one gradient per input, None where it was not asked for.

    `parameters` has those of a score or a normalisation, under names such as "score.W".

    To a type checker a call without `wrt` gives arrays (`Gradients[A]`), one with it arrays or None
    (`Gradients[A | None]`).
    """

    query: A = _ABSENT
    key: A = _ABSENT
    value: A = _ABSENT
    bias: A | None = None
    sink: A | None = None
    scale: float | None = None
    parameters: Mapping[str, Any] | None = None


class LayerGradients(NamedTuple, Generic[A]):
    """What `MultiHeadAttention.gradients` returns: None where not there or not asked for.

    `parameters` has those of a score or a normalisation, under names such as "score.W". To a type
    checker x and the first three weights are as the inputs of `Gradients`.
    """

    x: A = _ABSENT
    context: A | None = None
    W_q: A = _ABSENT
    W_k: A = _ABSENT
    W_v: A = _ABSENT
    W_o: A | None = None
    b_q: A | None = None
    b_k: A | None = None
    b_v: A | None = None
    b_o: A | None = None
    bias: A | None = None
    sink: A | None = None
    scale: float | None = None
    parameters: Mapping[str, Any] | None = None

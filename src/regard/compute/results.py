"""What a call returns besides its output: named tuples of arrays of the caller's library.

`regard` exports them for annotations. Must not know how they are computed.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

A = TypeVar("A", covariant=True)


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

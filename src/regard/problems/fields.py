"""The types of a problem's fields as callers pass them; read only where types are checked.

`Problem` has the fields as it keeps them, and `checks` checks values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from regard.compute.option_types import ArrayIn, Booleans, Ints, ProblemOptions
from regard.normalizers import Normalizer
from regard.positions import Positions
from regard.problems.parts import Expectation, RandomMatrices
from regard.scores import Score


class Given(TypedDict, total=False):
    """What a problem is made of, beside the options of a call."""

    note: str
    embeddings: ArrayIn | None
    context: ArrayIn | None
    W_q: ArrayIn | None
    W_k: ArrayIn | None
    W_v: ArrayIn | None
    W_o: ArrayIn | None
    b_q: ArrayIn | None
    b_k: ArrayIn | None
    b_v: ArrayIn | None
    b_o: ArrayIn | None
    heads: int | None
    key_heads: int | None
    queries: ArrayIn | None
    keys: ArrayIn | None
    values: ArrayIn | None
    labels: Sequence[str] | None
    query_labels: Sequence[str] | None
    key_labels: Sequence[str] | None
    embedding_features: Sequence[str] | None
    context_features: Sequence[str] | None
    key_features: Sequence[str] | None
    value_features: Sequence[str] | None
    output_features: Sequence[str] | None
    row_notes: Mapping[str, Sequence[str]]
    lengths: int | None
    query_segments: Ints | None
    key_segments: Ints | None
    random: RandomMatrices | None
    expect: Sequence[Expectation]


class Fields(Given, total=False):
    """What `Problem` takes."""

    title: str
    mask: Booleans | None
    bias: ArrayIn | float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    offset: int | Literal["end"] | None
    scale: float | None
    softcap: float | None
    sink: ArrayIn | float | None
    softmax: Literal["shifted", "unshifted"]
    score: Score | Literal["dot"] | None
    normalize: Normalizer | Literal["softmax"] | None
    positions: Positions | None
    target: ArrayIn | None
    grad_output: ArrayIn | None


class PartsOptions(Given, ProblemOptions, total=False):
    """What `explain` takes in place of a problem."""

"""The types of what callers pass, for type checkers and editors; read only where types are checked.

Owns the types of arrays and the options of each call. The signatures have the defaults, and
`compute.request` checks values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, Protocol, Required, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from regard.normalizers import Normalizer
from regard.positions import Positions
from regard.rules.visibility import Mask
from regard.scores import Score


class Tensor(Protocol):
    """An array with DLPack; NumPy's have it too, so overloads for NumPy come first."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...


class Table(Protocol):
    """What converts itself to NumPy on request, such as a DataFrame or a DataArray."""

    @property
    def to_numpy(self) -> Callable[..., Any]: ...


class TorchTensor(Protocol):
    """A tensor of PyTorch."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...
    @property
    def requires_grad(self) -> bool: ...


class JaxArray(Protocol):
    """An array of JAX."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...
    @property
    def at(self) -> Any: ...


# Dtypes whose results have them throughout; half types have a wider log-sum-exp.
F = TypeVar("F", np.float32, np.float64)
Floating = TypeVar("Floating", bound=np.floating[Any])
T = TypeVar("T", bound=Tensor)
A = TypeVar("A")

# What NumPy reads: the result is an ndarray.
Numbers: TypeAlias = NDArray[Any] | list[Any] | tuple[Any, ...] | Table
# Any array, where the type of the result does not depend on it.
ArrayIn: TypeAlias = Numbers | Tensor
Int: TypeAlias = int | np.integer[Any]
Ints: TypeAlias = Int | NDArray[np.integer[Any]] | Sequence[Int] | Table | TorchTensor | JaxArray
Booleans: TypeAlias = (
    NDArray[np.bool_] | list[Any] | tuple[Any, ...] | Table | TorchTensor | JaxArray
)
Window: TypeAlias = tuple[int | None, int | None]


class Rules(TypedDict, total=False):
    """Which keys a query sees, and what becomes of a score."""

    mask: Mask | Booleans | None
    bias: ArrayIn | float | None
    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    sink: ArrayIn | float | None


class Computed(TypedDict, total=False):
    """How a call is computed."""

    precision: Literal["working", "high", "exact"]
    kernel: str | None
    threads: int | None


class Options(Rules, total=False):
    """Options of every call that knows where its queries are."""

    offset: Ints | Literal["end"] | None


class Parts(TypedDict, total=False):
    """How scores and weights are made."""

    score: Score | Literal["dot"]
    normalize: Normalizer | Literal["softmax"]


class Placed(TypedDict, total=False):
    """Where queries and keys are."""

    positions: Positions | None


class LayerOptions(Options, Computed, Parts, Placed, total=False):
    """Options of `MultiHeadAttention`."""


class LayerGradientOptions(LayerOptions, total=False):
    """Options of `MultiHeadAttention.gradients`, for all inputs."""

    wrt: None


class SomeLayerGradientOptions(LayerOptions, total=False):
    """The same, for the inputs that are named."""

    wrt: Required[str | Iterable[str] | None]


class WeightsOptions(Options, total=False):
    """Options of `weights`."""

    rows: Ints | slice | None
    score: Score | Literal["dot"]
    kernel: str | None
    threads: int | None
    positions: Positions | None


class LinearOptions(TypedDict, total=False):
    """Options of `linear_attention`."""

    feature_map: Literal["elu+1"]
    causal: bool
    offset: Ints | Literal["end"] | None


class GradientOptions(Options, Computed, Parts, Placed, total=False):
    """Options of `gradients`, for query, key and value."""

    output: ArrayIn | None
    lse: ArrayIn | None
    grad_lse: ArrayIn | None


class SomeGradientOptions(GradientOptions, total=False):
    """The same, for the inputs that are named."""

    wrt: Required[str | Iterable[str]]


class StepsOptions(Options, Parts, Placed, total=False):
    """Options of an explanation of a layer."""

    target: ArrayIn | None
    grad_output: ArrayIn | None
    softmax: Literal["shifted", "unshifted"]


class ProblemOptions(StepsOptions, total=False):
    """What replaces a problem's own when it is explained."""

    title: str


class LabelledOptions(ProblemOptions, total=False):
    """Options of `explain` of arrays."""

    labels: Sequence[str] | None
    query_labels: Sequence[str] | None
    key_labels: Sequence[str] | None
    key_features: Sequence[str] | None
    value_features: Sequence[str] | None


# Options of `attention`, by what is returned.


class Plain(Options, Computed, Parts, Placed, Generic[A], total=False):
    """The output alone."""

    return_weights: Literal[False]
    return_lse: Literal[False]
    out: A | None


class ForWeights(Options, Computed, Parts, Placed, Generic[A], total=False):
    """Output and weights."""

    return_weights: Required[Literal[True]]
    return_lse: Literal[False]
    out: A | None


class ForLse(Options, Computed, Parts, Placed, Generic[A], total=False):
    """Output and log-sum-exp."""

    return_weights: Literal[False]
    return_lse: Required[Literal[True]]
    out: A | None


class ForBoth(Options, Computed, Parts, Placed, Generic[A], total=False):
    """Output, weights and log-sum-exp."""

    return_weights: Required[Literal[True]]
    return_lse: Required[Literal[True]]
    out: A | None


# Options of `KVCache.attend`, by what is returned. The cache knows where the queries are.


class Step(Rules, Computed, Parts, total=False):
    """Options of every step of decoding."""

    lengths: Ints | None


class PlainStep(Step, Generic[A], total=False):
    """The output alone."""

    return_weights: Literal[False]
    return_lse: Literal[False]
    out: A | None


class StepForWeights(Step, Generic[A], total=False):
    """Output and weights."""

    return_weights: Required[Literal[True]]
    return_lse: Literal[False]
    out: A | None


class StepForLse(Step, Generic[A], total=False):
    """Output and log-sum-exp."""

    return_weights: Literal[False]
    return_lse: Required[Literal[True]]
    out: A | None


class StepForBoth(Step, Generic[A], total=False):
    """Output, weights and log-sum-exp."""

    return_weights: Required[Literal[True]]
    return_lse: Required[Literal[True]]
    out: A | None


# Options of `diagnose`, for functions that pass them on.


class DiagnoseOptions(TypedDict, total=False):
    """As in its signature."""

    call: Callable[[Any, Any], Any] | None
    mask: Literal["attend", "hide", "add"] | None
    causal: bool | Literal["start", "end"] | None
    window: Literal["inclusive", "exclusive"] | None
    scale: float | Literal["none"] | None
    heads: int | None
    library: Literal["numpy", "torch", "jax"] | None
    score: Score | Literal["dot"]
    normalize: Normalizer | Literal["softmax"]

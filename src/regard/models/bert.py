"""BERT and encoders that differ from it only in names: configuration, weights, one layer.

Owns the tensors of each family, their shapes, and the computation of a layer around attention. Must
not know text, file formats or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.files import about
from regard.boundary.parse import as_integer, as_number, either, shown
from regard.errors import ProblemError, safe_text
from regard.models.activations import ACTIVATIONS, layer_norm
from regard.models.safetensors import Tensor, find_tensors, read_table, read_tensor

CONFIG = "config.json"
# From (…, M) to (…, M); a layer norm works in place.
Function = Callable[[Array], Array]


@dataclass(frozen=True)
class Family:
    """The names that one kind of encoder has for its sizes and tensors."""

    prefix: str  # of all tensor names, if the model has a head above the encoder
    layer: str
    tensors: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)  # in config.json, where unlike BERT's
    after_padding: bool = False  # positions count from pad_token_id + 1

    @property
    def has_types(self) -> bool:
        """Whether there are token type embeddings."""
        return "types" in self.tensors


_EMBEDDINGS = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "norm": "embeddings.LayerNorm",
}
_BERT = {
    **_EMBEDDINGS,
    "types": "embeddings.token_type_embeddings",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "output_norm": "output.LayerNorm",
}
_DISTILBERT = {
    **_EMBEDDINGS,
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attended": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "inner": "ffn.lin1",
    "outer": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
_DISTILBERT_KEYS = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
_ROBERTA = Family("roberta.", "encoder.layer.", _BERT, after_padding=True)

# By model_type in config.json.
FAMILIES = {
    "bert": Family("bert.", "encoder.layer.", _BERT),
    "camembert": _ROBERTA,
    "distilbert": Family("distilbert.", "transformer.layer.", _DISTILBERT, _DISTILBERT_KEYS),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


@dataclass(frozen=True)
class Config:
    """The sizes and options of an encoder."""

    family: str
    layers: int
    heads: int
    width: int
    inner: int
    vocabulary: int
    positions: int
    types: int
    padding: int
    epsilon: float
    activation: str

    @property
    def longest(self) -> int:
        """The largest number of tokens."""
        return self.positions - (self.padding + 1 if FAMILIES[self.family].after_padding else 0)


@dataclass(frozen=True, eq=False)
class Linear:
    """x @ weight.T + bias."""

    weight: Array  # (out, in)
    bias: Array  # (out,)

    def __call__(self, x: Array) -> Array:
        """Map x (…, in) to (…, out)."""
        rows = x.reshape(-1, x.shape[-1]) @ self.weight.T
        rows += self.bias
        return rows.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention and a feed-forward network, each added to its input and normalised."""

    heads: int
    projections: Linear  # of queries, keys and values, stacked: (3·M, M)
    attended: Linear
    attention_norm: Function
    inner: Linear
    outer: Linear
    output_norm: Function
    activation: Function

    def __call__(self, x: Array, attend: Callable[[Array, Array, Array], Array]) -> Array:
        """The next hidden states (B, L, M); `attend` maps Q, K, V (B, H, L, D) to (B, H, L, D)."""
        packed = self.projections(x).reshape(*x.shape[:-1], 3, self.heads, -1)  # (B, L, 3, H, D)
        query, key, value = np.moveaxis(packed, -3, 0).swapaxes(-3, -2)  # each (B, H, L, D)
        merged = attend(query, key, value).swapaxes(-3, -2).reshape(x.shape)
        between = self.attended(merged)
        between += x
        between = self.attention_norm(between)
        after = self.outer(self.activation(self.inner(between)))
        after += between
        return self.output_norm(after)

    def projection(self, name: str) -> tuple[Array, Array]:
        """W and b of x @ W + b for "query", "key" or "value"."""
        width = self.projections.weight.shape[1]
        start = ("query", "key", "value").index(name) * width
        own = slice(start, start + width)
        return self.projections.weight[own].T, self.projections.bias[own]


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of an encoder."""

    words: Array
    positions: Array
    types: Array | None
    norm: Function
    layers: tuple[Layer, ...]

    def embed(self, config: Config, ids: Array, types: Array) -> Array:
        """The input of the first layer, for ids and types of tokens (B, L)."""
        if FAMILIES[config.family].after_padding:
            real = ids != config.padding
            at = np.where(real, real.cumsum(axis=-1), 0) + config.padding
        else:
            at = np.arange(ids.shape[-1])
        x = self.words[ids] + self.positions[at]
        if self.types is not None:
            x += self.types[types]
        return self.norm(x)


# --- configuration -------------------------------------------------------------------------------


def read_config(folder: str) -> Config:
    """Read config.json; options that would change the computation are refused."""
    path, table = read_table(folder, CONFIG)
    with about(path):
        kind = _supported_kind(table)
        family = FAMILIES[kind]

        def given(key: str, default: Any = None) -> tuple[str, Any]:
            key = family.keys.get(key, key)
            if key not in table and default is None:
                raise ProblemError(f"has no {key}")
            return key, table.get(key, default)

        def size(key: str, least: int = 1, default: Any = None) -> int:
            key, value = given(key, default)
            number = as_integer(key, value)
            if number < least:
                raise ProblemError(f"{key} is {number}; it must be {least} or more")
            return number

        if not family.after_padding and table.get("pad_token_id", 0) is None:
            table.pop("pad_token_id")  # not used
        activation, epsilon = given("hidden_act", "gelu"), given("layer_norm_eps", 1e-12)
        config = Config(
            kind,
            layers=size("num_hidden_layers"),
            heads=size("num_attention_heads"),
            width=size("hidden_size"),
            inner=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            positions=size("max_position_embeddings"),
            types=size("type_vocab_size", default=2) if family.has_types else 0,
            padding=size("pad_token_id", 0, 1 if family.after_padding else 0),
            epsilon=as_number(*epsilon),
            activation=activation[1],
        )
        _check_sizes(config, *activation)
        return config


# Options that change the computation, with the only supported value; null counts as false.
_NOT_COMPUTED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "quantization_config": None,
}


def _supported_kind(table: Mapping[str, Any]) -> str:
    """The supported model_type of a configuration."""
    if table.get("auto_map"):
        raise ProblemError(
            "auto_map names Python code of the model's own, which is never run; only models with "
            "transformers' own code are read"
        )
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ProblemError(
            f"model_type is {shown(kind)}, which is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    for key, value in _NOT_COMPUTED.items():
        if table.get(key, value) != value and (value or table[key] is not None):
            raise ProblemError(
                f"{key} is {shown(table[key])}, which is not supported; it must be {shown(value)}"
            )
    return kind


def _check_sizes(config: Config, key: str, activation: Any) -> None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ProblemError(f"{key} is {shown(activation)}; it must be {either(tuple(ACTIVATIONS))}")
    if config.width % config.heads:
        raise ProblemError(f"hidden size {config.width} is not a multiple of {config.heads} heads")
    if not 0 <= config.epsilon < 1:
        raise ProblemError(
            f"layer_norm_eps is {config.epsilon}; it must be 0 or more, and less than 1"
        )
    if config.longest < 1:
        raise ProblemError(
            f"max_position_embeddings is {config.positions} but positions start after "
            f"pad_token_id {config.padding}; no position is left"
        )


# --- weights -------------------------------------------------------------------------------------


def read_weights(folder: str, config: Config, dtype: np.dtype[Any]) -> Weights:
    """Read the tensors of an encoder; shapes are checked first."""
    place, tensors = find_tensors(folder)
    family = FAMILIES[config.family]
    words = f"{family.tensors['words']}.weight"
    prefix = family.prefix if family.prefix + words in tensors else ""
    source = _Source(place, tensors, prefix, dtype, config)

    def table(name: str, rows: int) -> Array:
        return source.read(family.tensors[name], ("weight",), (rows, config.width))

    return Weights(
        words=table("words", config.vocabulary),
        positions=table("positions", config.positions),
        types=table("types", config.types) if family.has_types else None,
        norm=source.norm(family.tensors["norm"]),
        layers=tuple(_layers(source, family, config)),
    )


def _layers(source: _Source, family: Family, config: Config) -> Iterator[Layer]:
    width, inner = config.width, config.inner
    for number in range(config.layers):
        names = {key: f"{family.layer}{number}.{name}" for key, name in family.tensors.items()}
        parts = [source.linear(names[one], width, width) for one in ("query", "key", "value")]
        yield Layer(
            config.heads,
            projections=Linear(
                np.concatenate([part.weight for part in parts]),
                np.concatenate([part.bias for part in parts]),
            ),
            attended=source.linear(names["attended"], width, width),
            attention_norm=source.norm(names["attention_norm"]),
            inner=source.linear(names["inner"], inner, width),
            outer=source.linear(names["outer"], width, inner),
            output_norm=source.norm(names["output_norm"]),
            activation=ACTIVATIONS[config.activation],
        )


@dataclass(frozen=True)
class _Source:
    """Reads tensors of a directory by name and shape."""

    place: str
    tensors: Mapping[str, Tensor]
    prefix: str
    dtype: np.dtype[Any]
    config: Config

    def linear(self, name: str, out: int, into: int) -> Linear:
        weight = self.read(name, ("weight",), (out, into))
        return Linear(weight, self.read(name, ("bias",), (out,)))

    def norm(self, name: str) -> Function:
        """A layer norm, whose weights may have the old names gamma and beta."""
        scale = self.read(name, ("weight", "gamma"), (self.config.width,))
        shift = self.read(name, ("bias", "beta"), (self.config.width,))
        return partial(layer_norm, scale=scale, shift=shift, epsilon=self.config.epsilon)

    def read(self, name: str, endings: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        """The tensor of that name with one of the endings."""
        names = [f"{self.prefix}{name}.{ending}" for ending in endings]
        tensor = next((self.tensors[one] for one in names if one in self.tensors), None)
        if tensor is None:
            with about(self.place):
                raise ProblemError(
                    f"there is no tensor {' or '.join(names)} of shape {shape}, which {CONFIG} and "
                    f"model_type {self.config.family} require"
                )
        if tensor.shape != shape:
            with about(tensor.path):
                raise ProblemError(
                    f"{safe_text(tensor.name, 120)} has the shape {tensor.shape}, but {CONFIG} "
                    f"requires {shape}"
                )
        return read_tensor(tensor, self.dtype)

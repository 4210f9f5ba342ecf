"""The layers of a model: their weights by the textbook's names, and the run of one after the other.

Owns which tensor is which input of the declared steps, and the check of its shape. Must not know
text, configurations, or how attention is computed: `attend` is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.files import about
from regard.compute import native
from regard.compute.program import Program
from regard.compute.stored import Matrix, Stored, product, rounded, rows_of
from regard.errors import OptionError, ProblemError, safe_text
from regard.models.architecture import Architecture, Names
from regard.models.files.tensors import NARROW, Tensor, read_rows, read_tensor
from regard.textbook.block import Layer, layer, norm
from regard.textbook.operations import OPERATIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# From queries, keys and values (B, H, L, D) to outputs, in layer `number`.
Attend = Callable[[int, Array, Array, Array], Array]
_SCALE, _SHIFT = ("weight", "gamma"), ("bias", "beta")
_READY = {"queries": "normed_queries", "keys": "normed_keys", "values": "values"}
# What weights are kept as, and the bytes of a number.
KEPT = {"float64": 8, "float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, eq=False)
class OneLayer:
    """A layer with its weights, as two programs: what is before its attention, and after."""

    form: Layer
    given: Mapping[str, Matrix]
    before: Program
    after: Program
    names: tuple[str, ...]  # the steps that attention reads

    def __call__(self, x: Array, attend: Callable[[Array, Array, Array], Array]) -> Array:
        """The next hidden states (B, L, M)."""
        values = self.before({"embeddings": x})
        query, key, value = (values[name] for name in self.names)
        values["output"] = attend(query, key, value)
        return self.after(values)["hidden"]


@dataclass(frozen=True, eq=False)
class Stack:
    """All weights of a model, and what is computed outside its layers."""

    config: Architecture
    tables: Mapping[str, Matrix]  # token_table, positions_table, types_table, unembedding
    layers: tuple[OneLayer, ...]
    norms: Mapping[str, tuple[Layer, Mapping[str, Array], Program]]  # of embeddings, and the final
    kept: str  # as which weights are
    unembed: Callable[[Array], Array] | None = None  # to logits

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of all numbers that are computed."""
        return np.dtype(np.float64 if self.kept == "float64" else np.float32)

    def embed(
        self, ids: NDArray[np.int64], places: NDArray[np.int64], types: Array | None = None
    ) -> Array:
        """The input of the first layer, for tokens (B, L) at places (B, L) or (L,)."""
        x = rows_of(self.tables["token_table"], ids).astype(self.dtype, copy=False)
        if self.config.embedding_scale is not None:
            x *= self.dtype.type(self.config.embedding_scale)
        if "positions_table" in self.tables:
            x = x + rows_of(self.tables["positions_table"], places)
        if types is not None and "types_table" in self.tables:
            x += rows_of(self.tables["types_table"], types)
        return self._norm("normed_embeddings", x)

    def states(self, x: Array, attend: Attend) -> Iterator[Array]:
        """The input of each layer in turn, then the output of the last."""
        yield x
        for number, one in enumerate(self.layers):
            x = one(x, partial(attend, number))
            yield x

    def run(self, x: Array, attend: Attend) -> Array:
        """The output of the last layer."""
        for number, one in enumerate(self.layers):
            x = one(x, partial(attend, number))
        return x

    def logits(self, hidden: Array) -> Array:
        """How likely each token is next, (…, V), for states of the last layer (…, M)."""
        assert self.unembed is not None
        made = self.unembed(self._norm("final", hidden))
        if self.config.logits_softcap is not None:
            cap = OPERATIONS["softcap"].value
            assert cap is not None
            made = cap(made, self.config.logits_softcap).astype(self.dtype)
        return made

    def _norm(self, name: str, x: Array) -> Array:
        if name not in self.norms:
            return x
        return self.norms[name][2]({"embeddings": x})[name]


class Reader:
    """Reads tensors by the textbook's names, and knows which were read.

    Matrices are `kept` in so many bytes a number at most; what a file has in fewer is not rounded.
    """

    def __init__(
        self,
        place: str,
        tensors: Mapping[str, Tensor],
        names: Names,
        config: Architecture,
        kept: str,
    ) -> None:
        self.place, self.tensors, self.names = place, tensors, names
        self.config, self.kept = config, kept
        self.dtype = np.dtype(np.float64 if kept == "float64" else np.float32)
        self.used: set[str] = set()

    def stack(self) -> Stack:
        """All weights."""
        config, tables = self.config, dict[str, Matrix]()
        width = config.width
        for name, rows in (
            ("token_table", config.vocabulary),
            ("positions_table", config.positions),
            ("types_table", config.types),
            ("unembedding", config.vocabulary if config.family.causal else 0),
        ):
            stored = self.names.whole.get(name)
            if stored is not None and rows:
                if name == "unembedding" and config.tied:
                    tables[name] = tables["token_table"]
                    self.used |= {f"{stored}.weight"}
                elif name in ("token_table", "unembedding"):
                    tables[name] = self._matrix(stored, (rows, width))
                else:
                    tables[name] = self.read(stored, ("weight",), (rows, width))
        norms = {
            name: self._norm(name, symbol)
            for name, symbol in (("normed_embeddings", "X_e"), ("final", "X_f"))
            if name in self.names.whole
        }
        layers = tuple(self._layer(number) for number in range(config.layers))
        if config.family.causal:
            self._check_all_used()
        unembed = product([tables["unembedding"].T], self.dtype) if config.family.causal else None
        return Stack(config, tables, layers, norms, self.kept, unembed)

    def _numbers(self) -> dict[str, Array]:
        config = self.config
        numbers = {
            "model_width": config.width,
            "width": config.head_width,
            "epsilon": config.epsilon,
        }
        return {name: np.asarray(float(number)) for name, number in numbers.items()}

    def _norm(self, name: str, symbol: str) -> tuple[Layer, Mapping[str, Array], Program]:
        given = self._norm_weights(name, self.names.whole[name], self.config.width)
        form = self.config.form(frozenset(given))
        given |= self._numbers()
        known = {"known": ("embeddings",), "wanted": (name,)}
        return form, given, Program(norm(form, name, symbol), given, {}, self.dtype, **known)

    def _layer(self, number: int) -> OneLayer:
        config = self.config
        into = {"W_down": config.inner, "W_o": config.heads * config.head_width}
        out = {
            "W_q": config.heads * config.head_width,
            **dict.fromkeys(("W_k", "W_v"), config.key_heads * config.head_width),
            **dict.fromkeys(("W_gate", "W_up"), config.inner),
        }
        given: dict[str, Matrix] = {}
        for name, template in self.names.of_layer.items():
            stored = template.format(number)
            if name == "sink":
                place, _, ending = stored.rpartition(".")
                given[name] = self.read(place, (ending,), (config.heads,))
                continue
            if not name.startswith("W_"):
                width = config.head_width if name.startswith("normed_") else config.width
                given |= self._norm_weights(name, stored, width)
                continue
            parts = name.split()
            sizes = [out.get(part, config.width) for part in parts]
            given |= self._linear(parts, sizes, into.get(parts[0], config.width), stored)
        form = config.form(frozenset(given))
        given |= self._numbers()
        steps = layer(form)
        there = {step.name for step in steps}
        names = tuple(step if step in there else plain for plain, step in _READY.items())
        heads = {"H": config.heads, "G": config.key_heads}
        known = ("embeddings",)
        before = Program(steps, given, heads, self.dtype, known=known, wanted=names)
        done = [*known, "output", *(name for name, _ in before.calls)]
        after = Program(steps, given, heads, self.dtype, known=done, wanted=("hidden",))
        return OneLayer(form, given, before, after, names)

    def _linear(
        self, parts: list[str], sizes: list[int], width: int, stored: str
    ) -> dict[str, Matrix]:
        """W (in, out) and b of each part, which are stored together."""
        total, turned = sum(sizes), self.names.turned
        weight = self._matrix(stored, (width, total) if turned else (total, width), turned)
        given, start = dict[str, Matrix](), 0
        bias = None
        if self.config.family.norm == "layer" or f"{stored}.bias" in self.tensors:
            bias = self.read(stored, ("bias",), (total,))
        for part, size in zip(parts, sizes, strict=True):
            given[part] = weight[start : start + size].T
            if bias is not None:
                given[f"b{part[1:]}"] = bias[start : start + size]
            start += size
        return given

    def _norm_weights(self, name: str, stored: str, width: int) -> dict[str, Array]:
        scale = self.read(stored, _SCALE, (width,))
        if adds := self.config.family.norm_adds:
            scale = scale + self.dtype.type(adds)
        given = {f"{name}_scale": scale}
        if self.config.family.norm == "layer":
            given[f"{name}_shift"] = self.read(stored, _SHIFT, (width,))
        return given

    def read(self, name: str, endings: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        """The tensor of that name with one of the endings."""
        tensor = self._find(name, endings, shape)
        with about(tensor.path):
            numbers = read_tensor(tensor, self.dtype)
            self._check_finite(tensor, np.isfinite(numbers).all())
        return numbers

    def _matrix(self, name: str, shape: tuple[int, int], turned: bool = False) -> Matrix:
        """A matrix as rows (N, K) that a product reads; `turned`, its tensor is (K, N)."""
        tensor, bytes_of = self._find(name, ("weight",), shape), KEPT[self.kept]
        narrow = self.config.family.causal and self.kept != "float64" and native.BUILT
        if narrow and NARROW.get(tensor.dtype, 8) <= bytes_of:
            rows = read_rows(tensor)
            stored = Stored(np.ascontiguousarray(rows.T) if turned else rows, shape[not turned])
            with about(tensor.path):
                self._check_finite(tensor, stored.is_finite())
            return stored
        numbers = self.read(name, ("weight",), shape)
        numbers = numbers.T if turned else numbers
        if bytes_of >= numbers.itemsize:
            return numbers
        with about(tensor.path):
            try:
                stored = rounded(numbers, self.kept)
            except OptionError as error:
                raise ProblemError(f"{safe_text(tensor.name, 120)} {error}") from None
        return stored if native.BUILT else stored.numbers()

    def _check_finite(self, tensor: Tensor, finite: Any) -> None:
        if self.config.family.causal and not finite:
            own = safe_text(tensor.name, 120)
            raise ProblemError(f"{own} has numbers that are NaN or infinite; it is damaged")

    def _find(self, name: str, endings: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        names = [f"{name}.{ending}" for ending in endings]
        tensor = next((self.tensors[one] for one in names if one in self.tensors), None)
        said = self.names.said
        if tensor is None:
            with about(self.place):
                raise ProblemError(
                    f"there is no tensor {' or '.join(names)} of shape {shape}, which {said} and "
                    f"model_type {self.config.kind} require"
                )
        if tensor.shape != shape:
            own = safe_text(tensor.name, 120)
            with about(tensor.path):
                raise ProblemError(
                    f"{own} has the shape {tensor.shape}, but {said} requires {shape}"
                )
        self.used.add(tensor.name)
        return tensor

    def _check_all_used(self) -> None:
        """Refuse tensors that the description does not have: they would change what is computed."""
        ignored = self.config.family.ignored
        rest = [name for name in self.tensors if name not in self.used]
        rest = [name for name in rest if not (ignored and name.endswith(ignored))]
        if rest:
            with about(self.place):
                raise ProblemError(
                    f"has {len(rest)} tensors that a model of the type {self.config.kind} does not "
                    f"have here, such as {safe_text(rest[0], 120)}; it is another architecture"
                )

"""A sentence encoder from a local directory: text in; hidden states, embeddings, explanations out.

Owns the public methods and the batches. `text` makes tokens, `layers` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.compute import dispatch
from regard.compute.request import make_request
from regard.errors import DtypeError, ProblemError, safe_text
from regard.explanation.overview import MeasuredAttention, Overview
from regard.masks import Lengths
from regard.models.architecture import Architecture
from regard.models.explaining import Read, counted, one_layer
from regard.models.files.safetensors import CONFIG
from regard.models.layers import Stack
from regard.models.pooling import Pooling, unit_length
from regard.models.text.tokenizer import Tokenizer, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.compute.option_types import ProblemOptions
    from regard.faces import Explanation

    _Attend = Callable[[int, Array, Array, Array], Array]


@dataclass(frozen=True, eq=False, repr=False)
class Encoder:
    """An encoder of the BERT family, in NumPy; see `regard.models.load`."""

    directory: str
    config: Architecture
    stack: Stack
    tokenizer: Tokenizer
    pooling: Pooling
    dtype: np.dtype[Any]

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        batch_size: int = 32,
        truncate: bool = False,
        normalise: bool | None = None,
    ) -> Array:
        """One vector per text, as sentence-transformers computes it from the same directory.

        Parameters
        ----------
        texts : str or iterable of str
        batch_size : int
            Texts computed together, chosen by similar length; shorter ones are padded.
        truncate : bool
            Cut texts that are too long; otherwise they are an error.
        normalise : bool, optional
            Divide each vector by its length. Default: as modules.json says; True without that file.

        Returns
        -------
        ndarray, (texts, M), or (M,) for one string
            In the model's dtype, pooled as 1_Pooling/config.json says; without it the mean.

        Raises
        ------
        OptionError
            If a text has more tokens than the model takes.
        ProblemError
            If the directory's pooling, or one of its modules, is not supported.
        """
        if self.pooling.refusal:
            raise ProblemError(f"{self.directory}: {safe_text(self.pooling.refusal, 300)}")
        if not isinstance(texts, (str, Iterable)):
            raise DtypeError(f"texts must be strings, not {safe_text(repr(texts), 60)}")
        listed = [texts] if isinstance(texts, str) else [_text(text) for text in texts]
        batch_size = as_int("batch_size", batch_size, 1)
        if self.pooling.lower:
            listed = [text.lower() for text in listed]
        prepared = [self.pooling.prompt + text for text in listed]
        limit = min(self.pooling.longest or self.config.longest, self.config.longest)
        named = self.pooling.limit if limit < self.config.longest else CONFIG
        tokens = self.tokenizer(prepared, limit, named, truncate=truncate)
        vectors = np.empty((len(tokens), self.config.width * len(self.pooling.ways)), self.dtype)
        for own in _batches(tokens, batch_size):
            batch = _Batch.of([tokens[number] for number in own])
            *_, hidden = self._states(batch)
            vectors[own] = self.pooling(hidden, batch.lengths)
        if self.pooling.normalise if normalise is None else normalise:
            vectors = unit_length(vectors)
        return vectors[0] if isinstance(texts, str) else vectors

    def tokens(self, text: str, *, truncate: bool = False) -> Tokens:
        """The tokens of a text with their ids, special ones included."""
        return self.tokenizer([_text(text)], self.config.longest, CONFIG, truncate=truncate)[0]

    def hidden_states(self, text: str, *, truncate: bool = False) -> Array:
        """The input of each layer and the output of the last: (layers + 1, L, M)."""
        batch = _Batch.of([self.tokens(text, truncate=truncate)])
        return np.concatenate(list(self._states(batch)))

    def explain(
        self,
        text: str,
        layer: int,
        head: int | None = None,
        *,
        truncate: bool = False,
        **options: Unpack[ProblemOptions],
    ) -> Explanation:
        """Every step of the attention of one layer, for one text.

        Parameters
        ----------
        text : str
        layer : int
            From 0.
        head : int, optional
            From 0: only this head. Default: all heads and the output projection.
        truncate : bool
            Cut a text that is too long; otherwise it is an error.
        **options
            As for `regard.explain` of a problem, such as mask or scale.

        Returns
        -------
        Explanation
            Tokens are the labels, the embeddings are the layer's input, and W_q, b_q and so on are
            the layer's weights, used as x @ W.
        """
        number = counted("layer", layer, self.config.layers)
        tokens = self.tokens(text, truncate=truncate)
        hidden = next(islice(self._states(_Batch.of([tokens])), number, None))
        read = Read(self.stack, text, tokens, self.tokenizer.name)
        return one_layer(read, hidden[0], number, head, dict(options))

    def overview(self, text: str, *, truncate: bool = False) -> Overview:
        """Where each head of each layer reads in one text."""
        tokens = self.tokens(text, truncate=truncate)
        measured = MeasuredAttention(tokens.separators)
        for _ in self._states(_Batch.of([tokens]), measured.attend):
            pass
        return measured.overview(tokens.labels)

    def _states(self, batch: _Batch, attend: _Attend | None = None) -> Iterator[Array]:
        """The input of each layer in turn, then the output of the last."""
        places = np.arange(batch.ids.shape[1])
        if self.config.family.after_padding:
            real = batch.ids != self.config.padding
            places = np.where(real, real.cumsum(axis=-1), 0) + self.config.padding
        hidden = self.stack.embed(batch.ids, places, batch.types)
        return self.stack.states(hidden, attend or batch.attend)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Encoder({safe_text(self.directory, 200)}: {config.kind}, {config.layers} layers × "
            f"{config.heads} heads, {config.width} wide, {self.dtype})"
        )


@dataclass(frozen=True, eq=False)
class _Batch:
    """Some texts together; the shorter ones end in padding."""

    ids: NDArray[np.int64]  # (B, L)
    types: NDArray[np.int64]
    lengths: NDArray[np.int64]  # (B,)

    @classmethod
    def of(cls, sentences: Sequence[Tokens]) -> _Batch:
        lengths = np.array([len(tokens) for tokens in sentences])
        ids = np.zeros((len(sentences), lengths.max()), np.int64)
        types = np.zeros_like(ids)
        for row, tokens in enumerate(sentences):
            ids[row, : len(tokens)] = tokens.ids
            types[row, : len(tokens)] = tokens.types
        return cls(ids, types, lengths)

    def attend(self, _: int, query: Array, key: Array, value: Array) -> Array:
        padded = self.lengths.min() < self.ids.shape[1]
        request = make_request(query, key, value, mask=Lengths(self.lengths) if padded else None)
        return dispatch.run(request).output


def _batches(tokens: Sequence[Tokens], size: int) -> Iterator[list[int]]:
    """Positions of texts, the longest first, so that batches need little padding."""
    order = sorted(range(len(tokens)), key=lambda number: -len(tokens[number]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise DtypeError(f"text must be a string, not {safe_text(repr(text), 60)}")
    return text

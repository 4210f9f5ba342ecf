"""What is drawn for one problem: a value for every field that an adapter may read.

Must not know what the textbook makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.mechanism import Mechanism

# What an adapter may read, and what it gets.
FIELDS = {
    "query": "(B, H, L, D)",
    "key": "(B, G, S, D); H is a multiple of G",
    "value": "(B, G, S, E)",
    "mask": "bool (B, H, L, S), True = may attend",
    "key_mask": "bool (B, S), True = a real token",
    "lengths": "ints (B,), the real tokens of each sequence",
    "bias": "(B, H, L, S), added to the scaled scores",
    "scale": "a number that multiplies the scores",
    "softcap": "a number",
    "sink": "(H,), a logit without a value that takes part in the softmax",
    "causal": "bool: whether later keys are hidden",
    "window": "(left, right): keys i - left to i + right are visible",
    "offset": "int, the position of the first query among the keys",
    "heads": "int H",
    "key_heads": "int G",
    "embeddings": "(B, L, M)",
    "context": "(B, S, M)",
    "W_q": "(M, H*D), for x @ W_q",
    "W_k": "(M, G*D)",
    "W_v": "(M, G*E)",
    "W_o": "(H*E, M)",
    "b_q": "(H*D,)",
    "b_k": "(G*D,)",
    "b_v": "(G*E,)",
    "b_o": "(M,)",
    "positions": "ints (B, L)",
    "rotary": "(cos, sin), each (L, D/2): one column for each pair",
    "past": "(keys, values) of earlier tokens, (B, G, P, D) and (B, G, P, E)",
    "grad_output": "like the result",
}
# What the textbook calls the fields that are inputs of its steps.
INPUTS = {"query": "queries", "key": "keys", "value": "values"}
_OF_TEXTS = {*INPUTS, "past key", "past value", "embeddings", "earlier", "context"}
_WEIGHTS = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")
SAME = ("embeddings", "context", "bias", *_WEIGHTS)
GRADIENTS = INPUTS | {name: name for name in SAME}


@dataclass(frozen=True)
class Sizes:
    """How long each axis is; `past` tokens come before the queries, where an adapter reads them."""

    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    queries: int = 5
    keys: int = 5
    width: int = 4
    value_width: int = 4
    model: int | None = None  # of embeddings; None: as wide as the values of all heads together
    past: int = 3


@dataclass(frozen=True)
class Given:
    """What is drawn for one problem: a value for every field, whether it is read or not.

    `fields` are those that an adapter is known to read, on which the number of keys depends. `asks`
    names what is not neutral here: mask, key_mask, causal, window, scale, offset.
    """

    name: str
    sizes: Sizes = field(default_factory=Sizes)
    fields: frozenset[str] = frozenset()
    asks: frozenset[str] = frozenset()
    seed: int = 0
    size: float = 1.0  # of queries, or of embeddings; large ones make scores that exp cannot take
    mechanism: Mechanism | None = None  # that is meant, where it is not the plain one
    moved: Literal["", "texts", "heads", "all"] = ""  # the first have other numbers, or all have

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S)."""
        own, fields = self.sizes, self.fields
        keys = own.keys if self.has_own_keys else own.queries + own.past * ("past" in fields)
        return own.batch, 1 if self.is_bare else own.heads, own.queries, keys

    @property
    def has_own_keys(self) -> bool:
        """Whether there may be more keys than queries, because they are not of the same tokens."""
        of_tokens = "embeddings" in self.fields and "context" not in self.fields
        return not of_tokens and self.fields.isdisjoint({"past", "positions", "rotary"})

    @property
    def is_bare(self) -> bool:
        """Whether embeddings are queries, keys and values themselves."""
        return "embeddings" in self.fields and not self.fields & {"W_q", "W_k", "W_v"}

    @property
    def result_shape(self) -> tuple[int, ...]:
        """(B, L, M) for embeddings, else (B, H, L, E)."""
        own, (batch, heads, rows, _) = self.sizes, self.shape
        if "embeddings" not in self.fields:
            return batch, heads, rows, own.value_width
        packed = heads * own.value_width
        return batch, rows, self.model if {"W_o"} & self.fields or self.is_bare else packed

    @property
    def model(self) -> int:
        """The width of embeddings."""
        return self.sizes.model or self.sizes.heads * self.sizes.value_width

    @property
    def width(self) -> int:
        """The width of queries and keys."""
        return self.model if self.is_bare else self.sizes.width

    @cached_property
    def window(self) -> tuple[int, int]:
        """How many keys to the left and to the right are visible."""
        *_, rows, keys = self.shape
        return (2, 1) if "window" in self.asks else (rows + keys, rows + keys)

    @cached_property
    def offset(self) -> int:
        """The position of the first query among the keys, as the field says it."""
        *_, rows, keys = self.shape
        return max(0, keys - rows - ("offset" in self.asks))

    @cached_property
    def scale(self) -> float:
        """What multiplies the scores, as the field says it."""
        return 0.37 if "scale" in self.asks else float(self.width**-0.5)

    @cached_property
    def lengths(self) -> Array:
        """How many tokens of each sequence are real: all, or no fewer than there are queries."""
        batch, _, rows, keys = self.shape
        if "key_mask" not in self.asks:
            return np.full(batch, keys)
        fewer = keys - 1 - 2 * ((np.arange(batch) + self.seed) % 2)
        return np.maximum(fewer, rows if rows < keys else 1)

    @cached_property
    def mask(self) -> Array:
        """What may attend to what, (B, H, L, S); every query sees its own place, where it has one.

        It is the same for all heads.
        """
        batch, _, rows, keys = self.shape
        cells = np.ones((batch, 1, rows, keys), bool)
        if "mask" in self.asks:
            cells = np.random.default_rng([self.seed, rows, keys]).random(cells.shape) < 0.5
            apart = np.arange(keys) - np.arange(rows)[:, None]
            cells |= (apart == 0) | (apart == keys - rows) | (apart == self.offset)
            cells[..., :1] |= "key_mask" in self.asks
        return np.broadcast_to(cells, self.shape)

    @cached_property
    def positions(self) -> Array:
        """Where tokens are: one after the other, after those of a past."""
        batch, _, rows, _ = self.shape
        start = self.sizes.past if "past" in self.fields else 0
        return np.broadcast_to(start + np.arange(rows), (batch, rows))

    def array(self, name: str) -> Array:
        """One field of numbers that are drawn, once; "earlier" are the embeddings of the past."""
        if name not in self._arrays:
            self._arrays[name] = self._drawn(name)
            self._arrays[name].flags.writeable = False
        return self._arrays[name]

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        return {}

    def _drawn(self, name: str) -> Array:
        own, (batch, heads, rows, keys) = self.sizes, self.shape
        groups, model = own.key_heads, self.model
        width, value_width = own.width, own.value_width
        new = rows if "past" in self.fields else keys
        shape: tuple[int, ...] = {
            "query": (batch, heads, rows, width),
            "key": (batch, groups, new, width),
            "value": (batch, groups, new, value_width),
            "past key": (batch, groups, own.past, width),
            "past value": (batch, groups, own.past, value_width),
            "bias": (batch, heads, rows, keys),
            "embeddings": (batch, rows, model),
            "earlier": (batch, own.past, model),
            "context": (batch, keys, model),
            "W_q": (model, heads * width),
            "W_k": (model, groups * width),
            "W_v": (model, groups * value_width),
            "W_o": (heads * value_width, model),
            "sink": (heads,),
            "b_q": (heads * width,),
            "b_k": (groups * width,),
            "b_v": (groups * value_width,),
            "b_o": (model,),
            "grad_output": self.result_shape,
        }[name]
        drawn = np.array(_normal(self.seed, shape, name))
        if self.moved == "all":
            drawn *= LARGER
        if self.moved == "texts" and name in _OF_TEXTS:
            drawn[0] = 1 - drawn[0]
        if self.moved == "heads" and name in INPUTS:
            drawn[:, 0] = 1 - drawn[:, 0]
        if name == "grad_output" and own.queries == keys:  # nothing follows from padding
            real = np.arange(keys) < self.lengths[:, None]
            return drawn * (real if len(shape) == 3 else real[:, None])[..., None]
        if name.startswith("W_"):
            return np.asarray(drawn * (1.5 / np.sqrt(shape[0])))
        factor = {"query": self.size**2, "embeddings": self.size}.get(name, 1.0)
        return np.asarray(drawn * factor)


@lru_cache(maxsize=512)
def _normal(seed: int, shape: tuple[int, ...], name: str) -> Array:
    """Numbers of few digits, the same for every adapter."""
    return np.random.default_rng([seed, *shape, *map(ord, name)]).normal(size=shape).round(2)


LARGER = 1.003  # times as large, which rounds to other numbers
SOFTCAP = 1.5
WHOLE_WINDOW = "window right"  # is read where both numbers of a window are

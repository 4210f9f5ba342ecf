"""One problem that a function is asked, as named arrays in one standard layout.

`Given` is what is drawn for it, `Reading` what only the author of a function knows, and `Task` what
the textbook computes of the fields that were read, every step by name. `TaskView` is the `t` of an
adapter: it hands fields out as arrays of the function's library and notes which were read. Must not
know functions, nor mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.compute.distances import slopes
from regard.compute.rotary import turned
from regard.diagnosis.gradient_probe import OF_ALL_TEXTS, GradientProbe
from regard.diagnosis.mechanism import Mechanism
from regard.diagnosis.probe import Probe
from regard.diagnosis.surroundings import Surroundings
from regard.errors import safe_text
from regard.masks import Causal, Window
from regard.positions import Rotary
from regard.textbook.steps import Step

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
_SAME = ("embeddings", "context", "bias", *_WEIGHTS)
GRADIENTS = INPUTS | {name: name for name in _SAME}


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
    moved: Literal["", "texts", "heads"] = ""  # of which the first has other numbers

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
        drawn = np.random.default_rng([self.seed, *shape, *map(ord, name)]).normal(size=shape)
        drawn = drawn.round(2)
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


@dataclass(frozen=True)
class Reading:
    """What values cannot tell: stated, usual, or tried."""

    causal: bool = False  # whether later keys are hidden, where no field says so
    aligned: Literal["start", "end"] = "end"  # where there are fewer queries than keys
    scale: float | None = None  # None: 1/√D
    rotary: Literal["", "halves", "pairs"] = ""  # which features are turned together
    alibi: bool = False
    one_mask: bool = False  # whether all texts have the mask of the first
    around: str = ""  # what a layer computes around attention


PLAIN = Reading()
AROUND = ("", "adds", "norm, adds", "adds, norm")
_NORM = Surroundings(last="result", epsilon=1e-5)


@dataclass(frozen=True, eq=False)
class Task:
    """One problem of which an adapter read these fields, and what the textbook makes of it.

    `wanted` names the fields whose gradients are the result.
    """

    given: Given
    reads: frozenset[str]
    reading: Reading = PLAIN
    wanted: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What is asked, in words."""
        return self.given.name

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the textbook, backward ones too where gradients are wanted."""
        return self.probe.steps

    @property
    def values(self) -> Mapping[str, Array]:
        """The value of every step, by its name; see `axes`."""
        return self.probe.right

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of a value, such as ("B", "H", "L", "S"); what all texts share has no B."""
        own = self.probe.declared[name].axes
        return ("B", *own) if self.values[name].ndim > len(own) else own

    @property
    def result_step(self) -> str:
        """The step that is the output."""
        return self.probe.result_step

    @cached_property
    def expected(self) -> dict[str, Array]:
        """What the adapter should return: the "output", or a gradient for each field wanted."""
        if not self.wanted:
            output = self.values[self.result_step].reshape(self.given.result_shape)
            return {"output": self._finished(output)}
        found = {}
        for name in self.wanted:
            one = self._gradient(name)
            one = one.sum(0) if name in OF_ALL_TEXTS else one
            found[name] = one.reshape(self.given.array(name).shape)
        return found

    def _finished(self, output: Array) -> Array:
        """With what a layer computes after attention, where its result is as wide as its input."""
        rows = self.given.array("embeddings")
        if not self.reading.around or rows.shape != output.shape:
            return output
        whole = rows + output
        return _NORM.finish(whole, whole) if self.reading.around == "adds, norm" else whole

    def _gradient(self, name: str) -> Array:
        if not (self.given.is_bare and name in ("embeddings", "context")):
            return np.asarray(self.values[f"d_{GRADIENTS[name]}"])
        cross = "context" in self.reads
        names = {"embeddings": "queries" if cross else "queries keys values"}.get(name)
        names = names or "keys values"
        one: Array = np.sum([self.values[f"d_{x}"][:, 0] for x in names.split()], axis=0)
        return one

    @cached_property
    def compared(self) -> Array:
        """The rows of the output that are compared, (B, L).

        A text that attends to itself may have anything in the rows of its padding.
        """
        batch, _, rows, keys = self.given.shape
        if not self.reads & {"lengths", "key_mask"} or rows != keys:
            return np.ones((batch, rows), bool)
        return np.asarray(np.arange(rows) < self.given.lengths[:, None])

    def tolerance(self, unit: float) -> float:
        """How far two right computations that round to `unit` may differ."""
        return self.probe.tolerance(unit)

    @property
    def is_causal(self) -> bool:
        """Whether later keys are hidden."""
        return "causal" in self.given.asks if "causal" in self.reads else self.reading.causal

    @property
    def offset(self) -> int:
        """The position of the first query among the keys."""
        *_, rows, keys = self.given.shape
        if "past" in self.reads:
            return self.given.sizes.past
        if "offset" in self.reads:
            return self.given.offset
        return keys - rows if self.reading.aligned == "end" else 0

    @property
    def sides(self) -> tuple[int, int]:
        """How many keys a window has on the left and on the right."""
        left, right = self.given.window  # one number alone is for both sides
        return left, 0 if self.is_causal else right if WHOLE_WINDOW in self.reads else left

    @cached_property
    def rules(self) -> dict[str, Array]:
        """What each rule lets a query see, (B, H, L, S), by its name."""
        given, reads = self.given, self.reads
        rows, keys = given.shape[2:]
        found: dict[str, Array] = {}
        if self.is_causal:
            found["causal"] = Causal().visible(rows, keys, offset=self.offset)
        if "window" in reads:
            found["window"] = Window(*self.sides).visible(rows, keys, offset=self.offset)
        if reads & {"lengths", "key_mask"}:
            found["key mask"] = (np.arange(keys) < given.lengths[:, None])[:, None, None]
        if "mask" in reads:
            found["mask"] = given.mask[:1] if self.reading.one_mask else given.mask
        return {name: np.broadcast_to(cells, given.shape) for name, cells in found.items()}

    @property
    def visible(self) -> Array:
        """What all rules together let a query see, (B, H, L, S)."""
        return self.probe.visible

    @cached_property
    def probe(self) -> Probe:
        """The problem as the textbook computes it."""
        given = self.given
        heads = given.shape[1]
        about: dict[str, Any] = dict(
            heads=heads,
            groups=1 if given.is_bare else given.sizes.key_heads,
            rules=self.rules,
            offset=self.offset,
            sides=self.sides,
            scale=given.scale if "scale" in self.reads else self.reading.scale,
        )
        inputs = self._inputs() | self._positions()
        if given.mechanism is not None:
            about |= given.mechanism.of(given.shape[-1])
            inputs |= about.pop("inputs")
        forward = Probe(given.name, "", inputs, **about)
        if not self.wanted:
            return forward
        result = forward.right[forward.result_step]
        inputs[f"d_{forward.result_step}"] = given.array("grad_output").reshape(result.shape)
        wanted = dict.fromkeys(
            name
            for field in self.wanted
            for name in (INPUTS.values() if given.is_bare else (GRADIENTS[field],))
        )
        return GradientProbe(given.name, "", inputs, forward=forward, wanted=(*wanted,), **about)

    def _inputs(self) -> dict[str, Array]:
        given, reads = self.given, self.reads
        found = {name: given.array(name) for name in _SAME if name in reads}
        if self.reading.around == "norm, adds":
            found["embeddings"] = _NORM.finish(found["embeddings"], found["embeddings"])
        if "softcap" in reads:
            found["softcap"] = np.asarray(SOFTCAP)
        if "sink" in reads:
            found["sink"] = given.array("sink")
        if "embeddings" not in reads:
            found |= {own: given.array(name) for name, own in INPUTS.items()}
            if "past" in reads:
                for name in ("key", "value"):
                    early = given.array(f"past {name}")
                    found[INPUTS[name]] = np.concatenate([early, found[INPUTS[name]]], axis=2)
            return found
        if "past" in reads:
            both = given.array("earlier"), found["embeddings"]
            found["context"] = np.concatenate(both, axis=1)
        for name in INPUTS:
            if f"W_{name[0]}" not in reads:  # the rows themselves, as one head
                source = "embeddings" if name == "query" else "context"
                found[INPUTS[name]] = found.get(source, found["embeddings"])[:, None]
        if given.is_bare:
            del found["embeddings"]
            found.pop("context", None)
        return found

    def _positions(self) -> dict[str, Array]:
        """What queries and keys are turned by, or what their distances follow from."""
        given, reads, reading = self.given, self.reads, self.reading
        if not (reading.alibi or reading.rotary or "rotary" in reads):
            return {}
        batch, heads, rows, keys = given.shape
        here, there = np.arange(rows) + self.offset, np.arange(keys)
        if "past" in reads and not reading.alibi:  # keys of the past come turned
            there = there * (there >= self.offset)
        found = {
            name: np.broadcast_to(one, (batch, one.size)).astype(float)
            for name, one in (("query_positions", here), ("key_positions", there))
        }
        if reading.alibi:
            return {**found, "positions_slopes": slopes(heads)}
        pairs = Rotary().frequencies_of(given.width, rows)
        order: Any = np.stack if reading.rotary == "pairs" else np.concatenate
        return {**found, "frequencies": order([-pairs, pairs], -1).ravel()}


@lru_cache(maxsize=1024)
def task_of(given: Given, reads: frozenset[str], reading: Reading, wanted: tuple[str, ...]) -> Task:
    """The same task for the same problem, whose steps are then computed once."""
    return Task(given, reads, reading, wanted)


SOFTCAP = 1.5
WHOLE_WINDOW = "window right"  # is read where both numbers of a window are


class _Pair(tuple[int, int]):
    """The two sides of a window, which note whether the right one is read."""

    note: Callable[[str], None]

    @classmethod
    def noting(cls, sides: tuple[int, int], note: Callable[[str], None]) -> _Pair:
        own = cls(sides)
        own.note = note
        return own

    def __getitem__(self, place: Any) -> Any:
        if place not in (0, -2):
            self.note(WHOLE_WINDOW)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[int]:
        self.note(WHOLE_WINDOW)
        return super().__iter__()


class TaskView:
    """The `t` of an adapter: the fields of one problem, as arrays of the function's library.

    Reading a field asks for it. `convert` makes an array of the library of one of NumPy.

    Examples
    --------
    >>> t = TaskView(Given("plain"))
    >>> t.query.shape, t.heads
    ((2, 2, 5, 4), 2)
    >>> sorted(reads_of(t))
    ['heads', 'query']
    """

    def __init__(
        self,
        given: Given,
        convert: Callable[[Array], Any] = np.array,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._given, self._convert = given, convert
        self._reads: set[str] = set()
        self._fields = dict(fields or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FIELDS:
            names = ", ".join(FIELDS)
            raise AttributeError(f"t has no field {safe_text(name, 40)}; its fields are {names}")
        self._reads.add(name)
        if name not in self._fields:
            self._fields[name] = _converted(field_of(self._given, name), self._convert)
        if name == "window":
            return _Pair.noting(self._fields[name], self._reads.add)
        return self._fields[name]

    def __dir__(self) -> list[str]:
        return list(FIELDS)


def reads_of(view: TaskView) -> frozenset[str]:
    """The fields that were read of a view."""
    return frozenset(view._reads)


def changed_in(view: TaskView, as_numpy: Callable[[Any], Array]) -> tuple[str, ...]:
    """The fields whose arrays are no longer as they were handed out."""
    return tuple(
        name
        for name, now in view._fields.items()
        for own, was in zip(_parts(now), _parts(field_of(view._given, name)), strict=True)
        if isinstance(was, np.ndarray) and not np.array_equal(as_numpy(own), was)
    )


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _converted(value: Any, convert: Callable[[Array], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_converted(one, convert) for one in value)
    return convert(value) if isinstance(value, np.ndarray) else value


def field_of(given: Given, name: str) -> Any:
    """The value of one field; arrays are NumPy's."""
    own, (*_, rows, keys) = given.sizes, given.shape
    if name in GRADIENTS or name in ("grad_output", "sink"):
        return given.array(name)
    match name:
        case "heads" | "key_heads":
            return getattr(own, name)
        case "causal":
            return name in given.asks
        case "softcap":
            return SOFTCAP
        case "key_mask":
            return np.arange(keys) < given.lengths[:, None]
        case "rotary":
            angles = turned(given.positions[0], Rotary().frequencies_of(given.width, rows), 1.0)
            return tuple(np.asarray(one) for one in angles)
        case "past" if "embeddings" in given.fields:
            early = Task(given, given.fields | {"past"}).values
            return tuple(early[one][:, :, : own.past] for one in ("keys", "values"))
        case "past":
            return given.array("past key"), given.array("past value")
    return getattr(given, name)  # mask, lengths, scale, offset, window, positions

"""One problem that a function is asked, as named arrays in one standard layout.

`Reading` is what only the author of a function knows, and `Task` what the textbook computes of the
fields that were read, every step by name. Must not know functions, nor mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.given import GRADIENTS, INPUTS, SAME, SOFTCAP, WHOLE_WINDOW, Given
from regard.diagnosis.gradient_probe import OF_ALL_TEXTS, GradientProbe
from regard.diagnosis.probe import Probe
from regard.masks import Causal, Window
from regard.positions import Rotary
from regard.rules.distances import slopes
from regard.textbook.steps import Step


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
EPSILON = 1e-5  # of a layer's normalisation


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
        return _normalised(whole) if self.reading.around == "adds, norm" else whole

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
        forward = Probe(given.name, inputs, **about)
        if not self.wanted:
            return forward
        result = forward.right[forward.result_step]
        inputs[f"d_{forward.result_step}"] = given.array("grad_output").reshape(result.shape)
        wanted = dict.fromkeys(
            name
            for field in self.wanted
            for name in (INPUTS.values() if given.is_bare else (GRADIENTS[field],))
        )
        return GradientProbe(given.name, inputs, forward=forward, wanted=(*wanted,), **about)

    def _inputs(self) -> dict[str, Array]:
        given, reads = self.given, self.reads
        found = {name: given.array(name) for name in SAME if name in reads}
        if self.reading.around == "norm, adds":
            found["embeddings"] = _normalised(found["embeddings"])
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


def _normalised(rows: Array) -> Array:
    apart = rows - rows.mean(-1, keepdims=True)
    return np.asarray(apart / np.sqrt(np.square(apart).mean(-1, keepdims=True) + EPSILON))


@lru_cache(maxsize=1024)
def task_of(given: Given, reads: frozenset[str], reading: Reading, wanted: tuple[str, ...]) -> Task:
    """The same task for the same problem, whose steps are then computed once."""
    return Task(given, reads, reading, wanted)

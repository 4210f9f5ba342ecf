"""The parts of a problem that are objects of their own: a recipe for matrices, an expectation.

Must not know files, kernels or views.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from regard.boundary.arguments import labels_of
from regard.boundary.arrays import Array
from regard.boundary.parse import (
    MAX_AXES,
    MAX_NUMBERS,
    as_integer,
    as_labels,
    as_number,
    as_number_or_numbers,
    check_choice,
    check_text,
    shown,
)
from regard.errors import OptionError, ProblemError, ShapeError, safe_text
from regard.textbook.loss import continued
from regard.textbook.mechanisms import NORMALIZATIONS, SCORES
from regard.textbook.positions import ABSOLUTE
from regard.textbook.positions import GIVEN as POSITIONS
from regard.textbook.steps import PROJECTED, textbook

# What a problem may start from, in place of embeddings and weights.
READY = ("queries", "keys", "values")

# The axis that each field names.
NAMED_AXES = {
    "query_labels": "L",
    "key_labels": "S",
    "embedding_features": "M",
    "context_features": "N",
    "key_features": "D",
    "value_features": "E",
    "output_features": "F",
}

# What `labels` says at once.
SHARED = ("query_labels", "key_labels")

# The axes of what may be a DataFrame, whose labels name them.
_AXES = {"embeddings": "LM", "context": "SN", "queries": "LD", "keys": "SD", "values": "SE"}


def all_labels(names: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The names that are given, and where there are none, those of DataFrames among the arrays."""
    fields = {axis: field for field, axis in NAMED_AXES.items()}
    given = {field: labels for field, labels in names.items() if labels is not None}
    found: dict[str, tuple[str, ...]] = {}
    for name, axes in _AXES.items():
        for axis, labels in zip(axes, labels_of(arrays.get(name)), strict=True):
            if labels is not None and not ("labels" in given and fields[axis] in SHARED):
                found.setdefault(fields[axis], labels)
    return found | given


def check_shared(
    names: Mapping[str, Any], queries: tuple[int, str], keys: tuple[int, str], context: bool = False
) -> None:
    """Whether `labels`, if given, can name queries and keys: a number of rows and its reason."""
    if names.get("labels") is None:
        return
    for name in SHARED:
        if names.get(name) is not None:
            raise OptionError(f"labels and {name} are both given; leave one of the two out")
    if context or queries[0] != keys[0]:
        reason = "context has rows of its own" if context else f"{queries[1]} and {keys[1]}"
        raise ShapeError(
            f"labels name queries and keys alike, but {reason}; pass query_labels and key_labels"
        )


_ALIASES = {"X": "embeddings"}


@dataclass(frozen=True, kw_only=True)
class RandomMatrices:
    """A recipe for random matrices: one seeded stream, drawn from in a stated order.

    ``generator="legacy"`` is ``np.random.RandomState(seed)``, the stream behind
    ``np.random.seed``; "default_rng" is ``np.random.default_rng(seed)``. ``distribution`` is
    "uniform" on [0, 1) or standard "normal". ``draw`` names fields of a problem ("X" is another
    name for "embeddings"), and ``shapes`` has one shape for each.

    >>> recipe = RandomMatrices(
    ...     generator="legacy", seed=42, distribution="uniform", draw=("X",), shapes={"X": (1, 2)}
    ... )
    >>> recipe.matrices()["embeddings"].round(8).tolist()
    [[0.37454012, 0.95071431]]
    """

    generator: Literal["legacy", "default_rng"]
    seed: int
    distribution: Literal["uniform", "normal"]
    draw: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        check_choice("random.generator", self.generator, ("legacy", "default_rng"))
        check_choice("random.distribution", self.distribution, ("uniform", "normal"))
        bits = 32 if self.generator == "legacy" else 63
        seed = as_integer("random.seed", self.seed, bits=63)
        if not 0 <= seed < 2**bits:
            raise ProblemError(
                f"random.seed is {shown(seed)}; with the generator {self.generator} it must be "
                f"at least 0 and at most 2**{bits} - 1"
            )
        set_field(self, "seed", seed)
        draw = as_labels("random.draw", self.draw)
        if not draw:
            raise ProblemError("random.draw is empty; name the matrices in the order of drawing")
        drawable = (*_ALIASES, *PROJECTED, *READY)
        for name in draw:
            if name not in drawable:
                raise ProblemError(
                    f"random.draw names {shown(name)}; it may name {', '.join(drawable)}"
                )
        set_field(self, "draw", draw)
        if len(set(self.fields)) < len(draw):
            raise ProblemError(f"random.draw names a matrix twice: {', '.join(draw)}")
        if not isinstance(self.shapes, Mapping):
            raise ProblemError(f"random.shapes must be a table, not {shown(self.shapes)}")
        shapes = {str(name): _shape(str(name), shape) for name, shape in self.shapes.items()}
        for name in [*draw, *shapes]:
            if name not in shapes or name not in draw:
                here, there = ("draw", "shapes") if name in draw else ("shapes", "draw")
                raise ProblemError(
                    f"random.{here} has {shown(name)} but random.{there} has not; "
                    "every drawn matrix needs one shape"
                )
        total = sum(math.prod(shape) for shape in shapes.values())
        if total > MAX_NUMBERS:
            raise ProblemError(
                f"random.shapes asks for {shown(total)} numbers in total; "
                f"at most {MAX_NUMBERS} are drawn"
            )
        set_field(self, "shapes", MappingProxyType({name: shapes[name] for name in draw}))

    @property
    def fields(self) -> tuple[str, ...]:
        """The drawn names as fields of a problem, in order."""
        return tuple(_ALIASES.get(name, name) for name in self.draw)

    def matrices(self) -> dict[str, Array]:
        """The random matrices by field name, all from one stream."""
        stream: Any
        if self.generator == "legacy":
            stream = np.random.RandomState(self.seed)
            sample = stream.random_sample  # what rand draws, with the shape as one argument
        else:
            stream = np.random.default_rng(self.seed)
            sample = stream.random
        if self.distribution == "normal":
            sample = stream.standard_normal
        return {
            name: sample(shape)
            for name, shape in zip(self.fields, self.shapes.values(), strict=True)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), fields_of(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class Expectation:
    """The numbers that a step is expected to have: checked, never used in the calculation.

    It holds when ``|ours − value| ≤ within + relative·|value|``; an infinity or NaN must be met
    as such. `at` names one cell by labels and positions, one for each axis but that of the heads;
    without it, `value` is the whole step. `variance` is that of all cells of the step.
    """

    step: str
    value: Array | float | None = None
    at: tuple[str | int, ...] | None = None
    variance: float | None = None
    head: int | None = None
    within: float = 5.0e-9
    relative: float = 0.0

    def __post_init__(self) -> None:
        check_step("expect", self.step, backward=True)
        name = f"expect.{self.step}"
        if self.value is None and self.variance is None:
            raise ProblemError(f"{name} says neither value nor variance; give one of them")
        if self.value is not None:
            set_field(self, "value", as_number_or_numbers(f"{name}.value", self.value))
        if self.at is not None:
            if self.value is None:
                raise ProblemError(f"{name}.at names a cell but there is no value for it")
            if np.ndim(self.value):
                raise ProblemError(
                    f"{name}.at names one cell but value has the shape {np.shape(self.value)}; "
                    "give one number, or leave out at to give the whole step"
                )
            set_field(self, "at", _cell(f"{name}.at", self.at))
        for key in ("variance", "within", "relative"):
            if getattr(self, key) is not None:
                number = as_number(f"{name}.{key}", getattr(self, key))
                if key != "variance" and not (number >= 0 and math.isfinite(number)):
                    raise ProblemError(
                        f"{name}.{key} is {number}; it must be 0 or more, and finite"
                    )
                set_field(self, key, number)
        if self.head is not None:
            head = as_integer(f"{name}.head", self.head)
            if head < 0:
                raise ProblemError(f"{name}.head is {shown(head)}; heads count from 0")
            set_field(self, "head", head)


@cache
def step_axes() -> dict[str, tuple[str, ...]]:
    """Every step that any problem can have, with its axes."""
    everything = {*PROJECTED, "bias", "softcap", "sink"}
    found = {step.name: step.axes for step in textbook(everything, masked=True)}
    given = everything | _PARAMETERS
    for score, normalize in _mechanisms():
        for step in textbook(given, masked=True, score=score, normalize=normalize):
            found.setdefault(step.name, step.axes)
    for own in (*POSITIONS.values(), *ABSOLUTE.values()):
        for step in textbook(everything | own):
            found.setdefault(step.name, step.axes)
    return found


# What other scores and normalisations are given.
_PARAMETERS = {"score_W", "score_W_q", "score_W_k", "score_v", "score_temperature"}
_PARAMETERS |= {"normalize_bias", "key_numbers"}


def _mechanisms() -> Iterator[tuple[str, str]]:
    """Every score, and every normalisation, each with the plain other one."""
    yield from ((score, "softmax") for score in SCORES)
    yield from (("dot", normalize) for normalize in NORMALIZATIONS)


@cache
def backward_axes() -> dict[str, tuple[str, ...]]:
    """Every step that a loss adds to any problem, with its axes."""
    every = {*PROJECTED, "bias", "softcap", "sink"}
    biases = {name for name in PROJECTED if name.startswith("b_")}
    found: dict[str, tuple[str, ...]] = {}
    for biased, context, heads in product((True, False), repeat=3):
        given = every - (set() if biased else biases) - (set() if context else {"context"})
        forward = textbook(given, heads=heads, masked=True, default_scale=False)
        for step in continued(forward):
            found.setdefault(step.name, step.axes)
    for step in continued(textbook({*READY})):
        found.setdefault(step.name, step.axes)
    given = {*READY, *_PARAMETERS, "scale"}
    for heads, (score, normalize) in product((True, False), _mechanisms()):
        forward = textbook(given, heads=heads, masked=True, score=score, normalize=normalize)
        for step in continued(forward):
            found.setdefault(step.name, step.axes)
    placed = [{*READY, *own} for own in POSITIONS.values()]
    placed += [{"embeddings", "W_q", "W_k", "W_v", *own} for own in ABSOLUTE.values()]
    for heads, given in product((True, False), placed):
        for step in continued(textbook(given, heads=heads)):
            found.setdefault(step.name, step.axes)
    return found


def check_step(name: str, step: Any, *, backward: bool = False) -> None:
    """The name of a step that some problem can have, with `backward` of a gradient too."""
    if isinstance(step, str) and (step in step_axes() or (backward and step in backward_axes())):
        return
    near = difflib.get_close_matches(
        str(step), [*step_axes(), *(backward_axes() if backward else ())], n=1
    )
    more = " and, with a target or grad_output, gradients such as d_queries" if backward else ""
    known = f"the steps are {', '.join(step_axes())}{more}"
    hint = f"did you mean {near[0]}?" if near else known
    raise ProblemError(f"{name} names the step {shown(step)}, which does not exist; {hint}")


def _cell(name: str, cell: Any) -> tuple[str | int, ...]:
    if not isinstance(cell, (list, tuple)) or not cell:
        raise ProblemError(f"{name} must be a list of labels or positions, not {shown(cell)}")
    return tuple(
        check_text(name, index) if isinstance(index, str) else as_integer(name, index)
        for index in cell
    )


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    name = f"random.shapes.{safe_text(name, 40)}"
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= MAX_AXES:
        raise ProblemError(f"{name} must be a list of 1 to {MAX_AXES} sizes, not {shown(shape)}")
    sizes = tuple(as_integer(name, size) for size in shape)
    if min(sizes) < 1:
        raise ProblemError(f"{name} has the size {shown(min(sizes))}; sizes are 1 or more")
    return sizes


def set_field(instance: object, name: str, value: object) -> None:
    """Set a field of a frozen instance, which is still being checked."""
    object.__setattr__(instance, name, value)


def fields_of(instance: Any) -> dict[str, Any]:
    """The fields of an instance by name."""
    values = {each.name: getattr(instance, each.name) for each in fields(instance)}
    return {
        name: dict(value) if isinstance(value, MappingProxyType) else value
        for name, value in values.items()
    }


def rebuild(kind: Any, values: dict[str, Any]) -> Any:
    """An instance with these fields, for copying and pickling."""
    return kind(**values)

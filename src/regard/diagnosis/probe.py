"""One probe: a small attention problem, and the textbook run on it.

Owns `evaluate`, which runs the textbook's steps with some of them replaced, and the tolerance
within which two results count as equal. Must not know mistakes, nor how a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.textbook.mechanisms import Declared
from regard.textbook.operations import block_of
from regard.textbook.steps import LETTERS, Ref, Step, textbook

Values = Mapping[str, "Array"]
_Computation = Callable[["Values", "Probe"], Array]
Rule = Literal["mask", "key mask", "causal", "window"]
EVERY_RULE: tuple[Rule, ...] = ("mask", "key mask", "causal", "window")

# Half the distance from 1 to the next number.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNITS["int8"] = 2.0**-10  # scores are sums of many rounded numbers
UNITS["int4"] = 2.0**-6  # the same, and 17 times as coarse
_FLOAT64 = np.dtype(np.float64)
WIDEST = 1e-3  # of what two computations may differ by, of the largest number
SMALLEST_HALF = 2.0**-20  # a unit above this is that of a half-precision type


@dataclass(frozen=True, eq=False)
class Probe:
    """One problem: the inputs by their names in the textbook, and what hides keys.

    Inputs have all axes, (B, H, L, D) or (B, L, M) for embeddings; those that a function does not
    take have length 1.
    """

    name: str
    inputs: Mapping[str, Array]
    heads: int = 1
    groups: int = 1
    rules: Mapping[str, Array] = field(default_factory=dict)  # what each keeps, (B, H, L, S)
    offset: int = 0
    sides: tuple[int, int] = (0, 0)  # how many keys a window has on the left and on the right
    scale: float | None = None
    score: str | Declared = "dot"
    normalize: str = "softmax"

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How long each axis is, by its letter."""
        if "queries" in self.inputs:
            batch, heads, rows, width = self.inputs["queries"].shape
            groups, keys, value_width = self.inputs["values"].shape[1:]
        else:
            heads, groups = self.heads, self.groups
            batch, rows, _ = self.inputs["embeddings"].shape
            keys = self.inputs.get("context", self.inputs["embeddings"]).shape[1]
            width = self.inputs["W_q"].shape[1] // heads
            value_width = self.inputs["W_v"].shape[1] // groups
        return dict(B=batch, H=heads, G=groups, L=rows, S=keys, D=width, E=value_width)

    def part(self, array: Array, axes: tuple[str, ...], batch: int, head: int) -> Array:
        """What one query head of one batch element reads of an array with these axes."""
        array = array[batch] if array.ndim > len(axes) else array
        if axes[:1] == ("G",):
            head //= self.sizes["H"] // self.sizes["G"]
        return array[head] if axes[:1] in (("H",), ("G",)) else array

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps that the textbook has for these inputs."""
        return textbook(
            set(self.inputs),
            masked=self.has_rules,
            default_scale=self.scale is None,
            score=self.score,
            normalize=self.normalize,
        )

    @cached_property
    def declared(self) -> dict[str, Step]:
        """The steps by their names."""
        return {step.name: step for step in self.steps}

    @cached_property
    def numbered(self) -> dict[str, int]:
        """Which number each step has in their order."""
        return {step.name: number for number, step in enumerate(self.steps)}

    @cached_property
    def hiding(self) -> frozenset[str]:
        """The steps that skip hidden keys, apart from the one that hides them."""
        own = (step.name for step in self.steps if step.over == "visible")
        return frozenset(own) - {"masked"}

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax over dot products."""
        return self.score == "dot" and self.normalize == "softmax"

    @property
    def scaled(self) -> str:
        """The step that has the scores, scaled where they are."""
        return "scaled" if self.score == "dot" else "scores"

    @property
    def interleaved(self) -> bool:
        """Whether rotary positions turn features 0 and 1, 2 and 3, …, instead of two halves."""
        return bool(self.inputs["frequencies"][1] > 0)

    @property
    def has_rules(self) -> bool:
        """Whether a rule may hide keys."""
        return bool(self.rules)

    def rule(self, name: Rule) -> Array:
        """The cells that one rule keeps, (B, H, L, S)."""
        size = self.sizes
        kept = self.rules.get(name, np.ones((), bool))
        return np.broadcast_to(kept, (size["B"], size["H"], size["L"], size["S"]))

    def keeps(self, rules: Iterable[Rule]) -> Array:
        """The cells that all of these rules keep, (B, H, L, S), computed once."""
        own = tuple(rules)
        if own not in self._kept:
            size = self.sizes
            cells = np.ones((size["B"], size["H"], size["L"], size["S"]), bool)
            for rule in own:
                cells &= self.rule(rule)
            cells.flags.writeable = False
            self._kept[own] = cells
        return self._kept[own]

    @cached_property
    def _kept(self) -> dict[tuple[Rule, ...], Array]:
        return {}

    @cached_property
    def visible(self) -> Array:
        """The cells that every rule keeps."""
        return self.keeps(EVERY_RULE)

    @cached_property
    def right(self) -> dict[str, Array]:
        """The value of every step in the textbook."""
        return evaluate(self)

    @cached_property
    def result_step(self) -> str:
        """The step whose value a function returns."""
        names = [step.name for step in self.steps]
        return next(name for name in ("projected_output", "merged", "output") if name in names)

    @property
    def results(self) -> tuple[str, ...]:
        """The steps that a function returns."""
        return (self.result_step,)

    @property
    def last_step(self) -> str:
        """The step after which nothing is needed for what a function returns."""
        return max(self.results, key=self.numbered.__getitem__)

    def reach(self, variant: Variant, last: str) -> tuple[int, int]:
        """The numbers of the first step that a variant may change, and of that after the `last`."""
        numbers, end = self.numbered, len(self.steps)
        if last:
            end = numbers[last] + 1
        changed = (*variant.replaced, *(() if variant.absent else self.hiding))
        return min([end, *(numbers[name] for name in changed if name in numbers)]), end

    def computed(self, step: Step, values: Values, *, over_all: bool) -> Array:
        """The value of one step from these of earlier ones; hidden keys count if `over_all`."""
        own = (step.name, over_all)
        if own not in self._computations:
            self._computations[own] = _computation(step, values, self, over_all)
        return self._computations[own](values, self)

    @cached_property
    def _computations(self) -> dict[tuple[str, bool], _Computation]:
        axes = tuple((name, array.ndim) for name, array in self.inputs.items())
        return _computations_of(self.steps, tuple(self.sizes.items()), axes)

    @cached_property
    def magnitude(self) -> float:
        """How far a score can enlarge rounding: the largest Σ|q||k|·scale.

        With another score the largest number on the way to it, and some more.
        """
        if self.score != "dot":
            names = [step.name for step in self.steps]
            before = (self.right[one] for one in names[: names.index("scores") + 1])
            return 16 * max(float(np.abs(np.nan_to_num(x)).max(initial=1.0)) for x in before)
        queries, keys = self.right["queries"], self.right["keys"]
        spread = np.abs(queries).sum(-1).max() * np.abs(keys).max(initial=0) * self.right["scale"]
        return float(np.nan_to_num(spread))

    def tolerance(self, unit: float) -> float:
        """How far two right computations that round to `unit` may differ, computed once."""
        if unit not in self._tolerances:
            self._tolerances[unit] = self._tolerance(unit)
        return self._tolerances[unit]

    @cached_property
    def _tolerances(self) -> dict[float, float]:
        return {}

    def _tolerance(self, unit: float) -> float:
        """How far two right computations that round to `unit` may differ.

        A score is off by at most (D + 2) u Σ|q||k|·scale; projections add M roundings before it.
        The weights are off by twice that, relative, and by S + 8 roundings of softmax and the sum;
        the factor of 2 is for two computations. For half-precision types, and for large scores in
        float32, this bound is so wide that mistakes would pass, and `practical_tolerance` is used.
        """
        if unit > SMALLEST_HALF:
            return self.practical_tolerance(unit)
        size = self.sizes
        inner = max(array.shape[-1] for array in self.inputs.values() if array.ndim)
        largest = max(
            np.abs(np.nan_to_num(values, posinf=0, neginf=0)).max(initial=1.0)
            for values in (self.right["values"], self.right[self.result_step])
        )
        # An angle is as many radians as the position for the first feature, and rounded to that.
        angle = float(np.abs(self.inputs.get("key_positions", np.zeros(1))).max(initial=0))
        angle = angle if "frequencies" in self.inputs else 0.0
        terms = 2 * (inner + 2 + angle) * self.magnitude + size["S"] + 8
        usual = max(WIDEST * largest, 16 * self.practical_tolerance(unit))
        return float(min(2 * unit * terms * largest, usual))

    def practical_tolerance(self, unit: float) -> float:
        """How far rounding usually goes: some units of the largest score and result."""
        return unit * self._usual_units

    @cached_property
    def _usual_units(self) -> float:
        score = np.nan_to_num(self.right[self.scaled], posinf=0, neginf=0)
        largest = np.abs(np.nan_to_num(self.right[self.result_step])).max(initial=1.0)
        return float((4 * np.abs(score).max(initial=0) + 8) * largest)


@dataclass(frozen=True, eq=False)
class Variant:
    """One way of computing attention: the textbook with some steps replaced.

    A replacement that returns None leaves the step as the textbook has it. With `absent=False` the
    steps after the mask do not skip hidden keys but use their scores.
    """

    replaced: Mapping[str, Callable[[Values, Probe], Array]] = field(default_factory=dict)
    absent: bool = True

    def __or__(self, other: Variant) -> Variant:
        """Both at once; where both replace a step, `other` does."""
        return Variant({**self.replaced, **other.replaced}, self.absent and other.absent)


RIGHT = Variant()


def evaluate(probe: Probe, variant: Variant = RIGHT, last: str = "") -> dict[str, Array]:
    """The value of every step under a variant, or of those up to the `last`, for the whole batch.

    Steps that no replaced step reaches are taken from `probe.right`.
    """
    known = probe.right if variant is not RIGHT else {}
    begin, end = probe.reach(variant, last) if variant is not RIGHT else (0, len(probe.steps))
    values = dict(islice(known.items(), begin))
    changed: set[str] = set()
    with np.errstate(all="ignore"):  # NaN and infinity are results here, not accidents
        for step in probe.steps[begin:end]:
            name = step.name
            own = _replaced(name, variant, values, probe) if name in variant.replaced else None
            hides = not variant.absent and name in probe.hiding
            if own is None and name in known and not hides and changed.isdisjoint(step.reads):
                values[name] = known[name]
                continue
            values[name] = probe.computed(step, values, over_all=hides) if own is None else own
            changed.add(name)
    return values


def _replaced(name: str, variant: Variant, values: Values, probe: Probe) -> Array | None:
    """The value of a replaced step; NaN if its shapes do not fit, where a function would raise."""
    right = probe.right[name]
    try:
        value = variant.replaced[name](values, probe)
        if value is None:
            return None
        result = np.asarray(value).astype(right.dtype, copy=False)
        return result if result.shape == right.shape else np.broadcast_to(result, right.shape)
    except (KeyError, ValueError):  # or it reads a step that this computation does not have
        return np.full(right.shape, np.nan, right.dtype)


@lru_cache(maxsize=512)
def _computations_of(
    steps: tuple[Step, ...], sizes: tuple[tuple[str, int], ...], axes: tuple[tuple[str, int], ...]
) -> dict[tuple[str, bool], _Computation]:
    """How steps are computed, as far as that is known, for all probes with these sizes and axes."""
    return {}


def _computation(step: Step, values: Values, probe: Probe, over_all: bool) -> _Computation:
    """How one step of the textbook is computed from such values, for every batch element and head.

    It computes so under every variant: replaced values have as many axes as those of the textbook.
    """
    size, sources = probe.sizes, [ref.step for ref in step.operands]
    if step.op == "visible":
        return lambda values, probe: probe.visible
    if step.name == "width":
        return lambda values, probe: np.asarray(float(size["D"]))
    if step.name == "scale" and step.op == "given":
        return lambda values, probe: np.asarray(probe.scale)
    if step.op == "given":
        return lambda values, probe: probe.inputs[step.name].astype(float)
    if step.op == "merge":  # (B, H, L, E) → (B, L, HE)
        return lambda values, probe: _side_by_side(values[sources[0]])
    if step.op == "split":
        return lambda values, probe: _apart(values[sources[0]], size[step.axes[0]])
    if step.op in ("rotate", "rotate_back"):
        rows, cosines, _, sines = sources
        sign = 1.0 if step.op == "rotate" else -1.0
        return lambda values, probe: turned(
            values[rows], values[cosines][:, None], sign * values[sines][:, None], probe.interleaved
        )
    if not step.axes:
        alone = block_of(step.op, (), ((),) * len(sources), None)
        return lambda values, probe: alone([values[x] for x in sources], None, _FLOAT64)
    by = next((axis for axis in ("H", "G") if axis in step.axes), "")
    lead = ("b", LETTERS[by]) if by else ("b",)
    letters = (*lead, *(LETTERS[axis] for axis in step.axes if axis != by))
    hides = step.over == "visible" and not over_all
    operands = [_operand(ref, values, probe, by) for ref in step.operands]
    owns = tuple(own for _, own in operands)
    block = block_of(step.op, letters, owns, (*lead, "i", "j") if hides else None, lead)
    reads = [read for read, _ in operands]
    visible = _of_heads("H", by, size)
    sizes = (size["B"], size[by]) if by else (size["B"],)

    def compute(values: Values, probe: Probe) -> Array:
        seen = visible(values["visible"]) if hides else None
        whole = block([read(values) for read in reads], seen, _FLOAT64)
        if whole.shape[: len(lead)] == sizes:
            return whole
        # An operand that no batch element or head has its own of leaves an axis of length 1.
        return np.broadcast_to(whole, (*sizes, *whole.shape[len(lead) :]))

    return compute


def turned(rows: Array, cosines: Array, sines: Array, interleaved: bool) -> Array:
    """Rows (…, D) by angles of which the first of each pair is negative."""
    order = np.arange(rows.shape[-1])
    other = order ^ 1 if interleaved else np.roll(order, len(order) // 2)
    return np.asarray(rows * cosines + rows[..., other] * sines)


def _side_by_side(heads: Array) -> Array:
    return heads.swapaxes(1, 2).reshape(*heads.shape[:1], heads.shape[2], -1)


def _apart(packed: Array, heads: int) -> Array:
    return packed.reshape(*packed.shape[:2], heads, -1).swapaxes(1, 2)


def _operand(
    ref: Ref, values: Values, probe: Probe, by: str
) -> tuple[Callable[[Values], Array], tuple[str, ...]]:
    """What reads an operand for a step with one block `by` head, and the letters of its axes."""
    name, axes, size = ref.step, probe.declared[ref.step].axes, probe.sizes
    lead = ("b",) if values[name].ndim > len(axes) else ()
    own = axes[0] if axes[:1] in (("H",), ("G",)) else ""
    if not own:
        return itemgetter(name), (*lead, *ref.index)
    if ref.index[0] == "g*R+r":  # every query head of a key head
        groups, place = size["G"], len(lead)
        shape = values[name].shape
        whole = (*shape[:place], groups, shape[place] // groups, *shape[-2:])
        return lambda values: values[name].reshape(whole), (*lead, "g", "r", *ref.index[1:])
    turn = _of_heads(own, by, size, len(lead))
    return (
        lambda values: turn(values[name]),
        (*lead, *((LETTERS[by],) if by else ()), *ref.index[1:]),
    )


def _of_heads(
    own: str, by: str, size: Mapping[str, int], axis: int = 1
) -> Callable[[Array], Array]:
    """Gives an array with the axis `own` of heads the axis `by`: each reads its own."""
    shared = size["H"] // size["G"]
    if own == by or (by and shared == 1):
        return lambda array: array
    if by == "H":
        return lambda array: array.repeat(shared, axis)
    return lambda array: array.take(range(0, size["H"], shared) if by else 0, axis)

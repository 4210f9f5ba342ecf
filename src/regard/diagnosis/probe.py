"""The designed problems on which somebody's attention is tried, and the textbook run on them.

Owns the inputs of every probe and `walk`, which runs the textbook's steps with some of them
replaced. Must not know mistakes, nor how anybody's function is called.

Every probe has all its axes, batch and heads too: (B, H, L, D), or (B, L, M) for embeddings; what
a function does not take is 1. All sizes differ where a function allows it, so that whoever takes
the wrong one shows it. The numbers are small, so that rounding stays far below any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.textbook.operations import compute
from regard.textbook.steps import LETTERS, Ref, Step, textbook

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Values = Mapping[str, "Array"]
Rule = Literal["mask", "causal", "window"]

SMALLEST_HALF = 2.0**-20  # a unit above this is one of a half type

ABILITIES = {
    "plain": "as many queries as keys",
    "rectangular": "more keys than queries",
    "heads": "several heads or batch elements at once",
    "grouped": "fewer key heads than query heads",
    "mask": "a mask",
    "key mask": "a mask of padded keys, one for each batch element",
    "causal": "causal",
    "causal rectangular": "causal with more keys than queries",
    "causal and mask": "causal and a mask together",
    "window": "a window",
    "window rectangular": "a window with more keys than queries",
    "cache": "a cache, some tokens at a time",
    "bias": "a bias on the scores",
    "scale": "a scale of the caller's",
    "float32": "float32 arrays",
}


@dataclass(frozen=True, eq=False)
class Probe:
    """One designed problem: the inputs by their names in the textbook, and what hides keys."""

    name: str
    ability: str
    inputs: Mapping[str, Array]
    heads: int = 1
    groups: int = 1
    keep: Array | None = None  # what the mask argument keeps, broadcastable to (B, H, L, S)
    causal: bool = False
    offset: int = 0
    window: int | None = None  # how many keys a row sees, itself included
    chunks: tuple[int, ...] = ()  # how many tokens at a time a cache is fed
    scale: float | None = None
    rank: int = 4  # of the arrays as the function gets them
    dtype: np.dtype[Any] = field(default=np.dtype(np.float64))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How long each axis is, by its letter."""
        if "queries" in self.inputs:
            batch, heads, rows, width = self.inputs["queries"].shape
            groups, keys, value_width = self.inputs["values"].shape[1:]
            return dict(B=batch, H=heads, G=groups, L=rows, S=keys, D=width, E=value_width)
        batch, rows, _ = self.inputs["embeddings"].shape
        keys = self.inputs.get("context", self.inputs["embeddings"]).shape[1]
        width = self.inputs["W_q"].shape[1] // self.heads
        value_width = self.inputs["W_v"].shape[1] // self.groups
        sizes = dict(B=batch, H=self.heads, G=self.groups, L=rows, S=keys, D=width, E=value_width)
        return sizes

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The textbook of this probe."""
        given = set(self.inputs)
        return textbook(given, masked=self.has_rules, default_scale=self.scale is None)

    @property
    def has_rules(self) -> bool:
        """Whether anything may hide a key."""
        return self.keep is not None or self.causal or self.window is not None

    def rule(self, name: Rule) -> NDArray[np.bool_]:
        """The cells that one rule keeps, (B, H, L, S)."""
        size = self.sizes
        row = np.arange(size["L"])[:, None] + self.offset
        key = np.arange(size["S"])
        kept: Array = np.ones((size["L"], size["S"]), bool)
        if name == "mask" and self.keep is not None:
            kept = self.keep
        elif name == "causal" and self.causal:
            kept = key <= row
        elif name == "window" and self.window is not None:
            kept = np.abs(key - row) < self.window
            kept &= (key <= row) | (not self.causal)
        return np.broadcast_to(kept, (size["B"], size["H"], size["L"], size["S"]))

    @cached_property
    def visible(self) -> NDArray[np.bool_]:
        """The cells that every rule keeps."""
        return self.rule("mask") & self.rule("causal") & self.rule("window")

    @cached_property
    def right(self) -> dict[str, Array]:
        """The value of every step, as the textbook has it."""
        return walk(self)

    def result(self, values: Values) -> Array:
        """What a function is to return, out of the values of the steps."""
        return next(
            values[name] for name in ("projected_output", "merged", "output") if name in values
        )

    @cached_property
    def magnitude(self) -> float:
        """How far rounding can be enlarged on the way: the longest of the sums behind a score."""
        queries, keys = self.right["queries"], self.right["keys"]
        spread = np.abs(queries).sum(-1).max() * np.abs(keys).max(initial=0) * self.right["scale"]
        return float(np.nan_to_num(spread))

    def tolerance(self, unit: float) -> float:
        """How far two right computations of this probe may differ that round to `unit`.

        A score is off by at most (D + 2) u Σ|q||k|·scale; with projections M more roundings go
        before it. The weights are off by twice that, relative, and by S + 8 roundings of softmax
        and the sum; both computations are, hence the factor of 2. For half types such a bound is
        so wide that mistakes would hide behind it.
        """
        if unit > SMALLEST_HALF:
            return self.practical_tolerance(unit)
        size = self.sizes
        inner = max(array.shape[-1] for array in self.inputs.values() if array.ndim)
        largest = max(
            np.abs(np.nan_to_num(values, posinf=0, neginf=0)).max(initial=1.0)
            for values in (self.right["values"], self.result(self.right))
        )
        terms = 2 * (inner + 2) * self.magnitude + size["S"] + 8
        return float(2 * unit * terms * largest)

    def practical_tolerance(self, unit: float) -> float:
        """How far rounding does go, as a rule: some units of the largest score and result."""
        score = np.nan_to_num(self.right["scaled"], posinf=0, neginf=0)
        largest = np.abs(np.nan_to_num(self.result(self.right))).max(initial=1.0)
        return float(unit * (4 * np.abs(score).max(initial=0) + 8) * largest)


@dataclass(frozen=True, eq=False)
class Variant:
    """One way of computing: the textbook with some steps replaced.

    `absent=False`: after the mask, hidden keys are no longer passed over, so what stands in their
    scores counts.
    """

    replaced: Mapping[str, Callable[[Values, Probe], Array]] = field(default_factory=dict)
    absent: bool = True

    def __or__(self, other: Variant) -> Variant:
        """Both at once; of a step that both replace, the second one stands."""
        return Variant({**self.replaced, **other.replaced}, self.absent and other.absent)


RIGHT = Variant()


def walk(probe: Probe, variant: Variant = RIGHT) -> dict[str, Array]:
    """The value of every step with some of them replaced, all heads and batch elements.

    What comes before the first replaced step is as in the textbook and is not computed again.
    """
    values: dict[str, Array] = {}
    known = probe.right if variant is not RIGHT else {}
    changed: set[str] = set()
    for step in probe.steps:
        hides = not variant.absent and step.over == "visible" and step.name != "masked"
        dirty = hides or any(ref.step in changed for ref in step.operands)
        if step.name in variant.replaced:
            values[step.name] = _replaced(step, variant, values, probe)
            changed.add(step.name)
        elif step.name in known and not dirty:
            values[step.name] = known[step.name]
        else:
            values[step.name] = _evaluate(step, values, probe, over_all=hides)
            changed.add(step.name)
    return values


def _replaced(step: Step, variant: Variant, values: Values, probe: Probe) -> Array:
    """What stands in place of a step; NaN where the shapes do not allow it.

    There a function of this kind raises, or gives something else; either way not what is right.
    """
    right = probe.right[step.name]
    try:
        with np.errstate(all="ignore"):
            result = np.asarray(variant.replaced[step.name](values, probe)).astype(right.dtype)
        return np.broadcast_to(result, right.shape)
    except ValueError:
        return np.full(right.shape, np.nan, right.dtype)


def _evaluate(step: Step, values: Values, probe: Probe, over_all: bool) -> Array:
    """One step for every batch element and head, put together."""
    size = probe.sizes
    if step.op == "visible":
        return probe.visible
    if step.name == "width":
        return np.asarray(float(size["D"]))
    if step.name == "scale" and step.op == "given":
        return np.asarray(probe.scale)
    if step.op == "given":
        return probe.inputs[step.name].astype(probe.dtype)
    if step.op == "merge":
        output = values[step.operands[0].step]  # (B, H, L, E) → (B, L, HE)
        return output.swapaxes(1, 2).reshape(*output.shape[:1], output.shape[2], -1)
    if step.op == "split":
        packed = values[step.operands[0].step]
        heads = size[step.axes[0]]
        return packed.reshape(*packed.shape[:2], heads, -1).swapaxes(1, 2)
    letters = tuple(LETTERS[axis] for axis in step.axes if axis not in ("H", "G"))
    if not step.axes:
        alone: list[tuple[Array, tuple[str, ...]]] = [(values[r.step], ()) for r in step.operands]
        return compute(step.op, (), alone, None, np.dtype(np.float64))
    heads = size["H"] if "H" in step.axes else 1
    blocks = []
    for batch in range(size["B"]):
        for head in range(heads):
            operands = [_operand(step, ref, values, probe, batch, head) for ref in step.operands]
            hidden = None
            if step.over == "visible" and not over_all:
                hidden = values["visible"][batch, head]
            block = compute(step.op, letters, operands, hidden, probe.dtype)
            blocks.append(block)
    whole = np.stack([np.asarray(block) for block in blocks])
    lead = (size["B"], heads) if "H" in step.axes else (size["B"],)
    return whole.reshape(*lead, *whole.shape[1:])


def _operand(
    step: Step, ref: Ref, values: Values, probe: Probe, batch: int, head: int
) -> tuple[Array, tuple[str, ...]]:
    declared = next(other for other in probe.steps if other.name == ref.step)
    array = values[ref.step]
    if array.ndim > len(declared.axes):
        array = array[batch]
    letters = ref.index
    if declared.axes[:1] in (("H",), ("G",)):
        own = head
        if declared.axes[0] == "G":
            own = head // (probe.sizes["H"] // probe.sizes["G"])
        array, letters = array[own], letters[1:]
    return array, letters


# --- the inputs -----------------------------------------------------------------------------------


def _draw(seed: int, *shape: int) -> Array:
    # Two decimals: what an example shows is then all there is of a number.
    return np.random.default_rng(seed).normal(size=shape).round(2)


def ready(
    name: str, ability: str, sizes: tuple[int, int, int, int, int, int, int], seed: int, **more: Any
) -> Probe:
    """A probe with ready queries, keys and values: sizes (B, H, G, L, S, D, E)."""
    batch, heads, groups, rows, keys, width, value_width = sizes
    inputs = {
        "queries": 1.5 * _draw(seed, batch, heads, rows, width),
        "keys": _draw(seed + 1, batch, groups, keys, width),
        "values": _draw(seed + 2, batch, groups, keys, value_width),
    }
    return Probe(name, ability, inputs, heads, groups, **more)


def with_scores(name: str, ability: str, scores: Array, seed: int, **more: Any) -> Probe:
    """A probe of one head whose scaled scores are exactly these, (L, S)."""
    rows, keys = scores.shape
    queries = np.eye(rows) * np.sqrt(rows)
    inputs = {"queries": queries, "keys": scores.T, "values": _draw(seed, keys, rows)}
    return Probe(name, ability, {n: a[None, None] for n, a in inputs.items()}, **more)


def _keep(seed: int, rows: int, keys: int) -> NDArray[np.bool_]:
    """A mask with some of everything: no row and no column of it is empty, none is symmetric."""
    keep = np.random.default_rng(seed).random((rows, keys)) < 0.55
    keep[np.arange(rows), np.arange(rows) % keys] = True
    keep[np.arange(keys) % rows, np.arange(keys)] = True
    keep[0, -1] = keep[-1, 1] = False
    return keep


def of_rank(rank: int, *, self_attention: bool = False) -> Iterator[Probe]:
    """The probes of ordinary use for arrays of this rank: 2 has one head, 3 several, 4 a batch."""
    batch, heads = {1: (1, 1), 2: (1, 1), 3: (1, 4), 4: (2, 4)}[rank]
    plain = "plain" if rank < 3 else "heads"

    def sized(name: str, ability: str, shape: tuple[int, int, int, int], **more: Any) -> Probe:
        groups = more.pop("groups", heads)
        sizes = (batch, heads, groups, *shape)
        return ready(f"{name} {rank}-D", ability, sizes, 10 * rank, rank=rank, **more)

    rows, keys = (1, 5) if rank == 1 else (3, 5)
    if rank > 1:
        yield sized("square", plain, (5, 5, 6, 6))
        yield sized("square, wide values", plain, (5, 5, 6, 7))
    yield sized("rectangle", "rectangular", (rows, keys, 6, 7))
    if rank == 1:
        return
    if rank > 2:
        cube = (3, 3, 3, 3, 3, 3, 3) if rank == 4 else (1, 3, 3, 3, 3, 3, 3)
        yield ready(f"cube {rank}-D", plain, cube, 70 + rank, rank=rank)
        yield sized("grouped", "grouped", (5, 5, 6, 6), groups=2)
    keep = _keep(rank, 5, 5)
    yield sized("mask", "mask", (5, 5, 6, 6), keep=keep)
    yield sized("mask, rectangle", "mask", (3, 5, 6, 7), keep=_keep(rank + 5, 3, 5))
    if rank == 2:
        scores = np.array([[0.0, 1.5, -0.5], [0.75, 0.0, 2.0], [1.0, -1.25, 0.5]])
        yield with_scores("zero scores", "mask", scores, 7, keep=_keep(3, 3, 3), rank=2)
        scores = np.array([[0.75, 1.5, -0.5], [0.0, 0.75, 2.0], [1.0, 0.0, 0.5]])
        yield with_scores("zero scores, causal", "causal", scores, 7, causal=True, rank=2)
    padding = np.ones((batch, 1, 1, 5), bool)
    padding[0, ..., 3:] = False
    padding[-1, ..., 4:] = False
    yield sized("padding", "key mask", (5, 5, 6, 6), keep=padding)
    yield sized("causal", "causal", (5, 5, 6, 6), causal=True)
    yield sized("causal, rectangle", "causal rectangular", (3, 5, 6, 6), causal=True, offset=2)
    yield sized("causal and mask", "causal and mask", (5, 5, 6, 6), causal=True, keep=_both(keep))
    yield sized("window", "window", (6, 6, 6, 6), causal=True, window=3)
    more = dict(causal=True, window=3, offset=3)
    yield sized("window, rectangle", "window rectangular", (3, 6, 6, 6), **more)
    yield sized("cache", "cache", (6, 6, 6, 6), causal=True, chunks=(2, 1, 3))
    yield sized("scale", "scale", (5, 5, 6, 6), scale=0.7)


def _both(keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A mask that leaves every row something under the causal rule too."""
    both = keep.copy()
    both[:, 0] = True
    return both


def projected(
    shapes: Mapping[str, tuple[int, ...]],
    heads: int,
    groups: int | None = None,
    *,
    weights: Mapping[str, Array] | None = None,
    batch: int = 1,
    rows: int = 5,
    cross: bool = False,
    rank: int = 2,
) -> Iterator[Probe]:
    """The probes of self-attention from embeddings: `shapes` are those of the weights."""
    own = dict(weights or {})
    for number, (name, shape) in enumerate(shapes.items()):
        own.setdefault(name, 0.8 * _draw(100 + number, *shape))
    width = shapes["W_q"][0]
    inputs = {"embeddings": _draw(90 + rank, batch, rows, width), **own}
    ability = "plain" if batch == 1 else "heads"

    def probe(name: str, ability: str, inputs: Mapping[str, Array], **more: Any) -> Probe:
        label = f"{name} {rank}-D"
        return Probe(label, ability, inputs, heads, groups or heads, rank=rank, **more)

    yield probe("embeddings", ability, inputs)
    if cross:
        context = _draw(95, batch, rows + 2, shapes["W_k"][0])
        yield probe("context", "rectangular", {**inputs, "context": context})
    yield probe("mask", "mask", inputs, keep=_keep(4, rows, rows))
    padding = np.ones((batch, 1, 1, rows), bool)
    padding[0, ..., 3:] = False
    padding[-1, ..., 4:] = False
    yield probe("padding", "key mask", inputs, keep=padding)
    yield probe("causal", "causal", inputs, causal=True)


# --- the edge: each probe breaks a way of computing that is right elsewhere -----------------------


def edges(dtype: np.dtype[Any], *, masks: bool, causal_always: bool = False) -> Iterator[Probe]:
    """Scores that overflow, rows far apart, hidden keys that shine through, rows that see nothing.

    With `causal_always` the function hides later keys whether it is asked or not.
    """
    limit = float(np.log(np.finfo(dtype).max))
    more: dict[str, Any] = dict(rank=2, dtype=dtype, causal=causal_always)
    mild = np.array([[0.5, -0.25, 1.0], [1.5, 0.25, -0.5], [-1.0, 0.75, 0.5]])
    high = mild + 1.5 * limit
    yield with_scores("large scores", "range", high, 1, **more)
    yield with_scores("low scores", "range", mild - 1.5 * limit, 1, **more)
    apart = mild - np.array([[0.0], [3 * limit], [0.0]])
    yield with_scores("rows far apart", "range", apart, 2, **more)
    wide = mild + np.array([0.0, 2.5 * limit, 0.0])
    yield with_scores("one large score", "range", wide, 3, **more)
    yield with_scores("edge of exp", "range", mild - mild.max() + limit - 0.4, 4, **more)
    if not masks:
        return
    keep = np.array([[True, True, False], [True, True, True], [False, True, True]])
    if causal_always:
        keep = np.array([[True, True, True], [True, True, True], [False, True, True]])
    for name, height in (("low visible scores, 1e4", 5e4), ("low visible scores, 1e9", 5e9)):
        scores = np.where(keep, mild - height, mild) if height < 1e6 else mild - height
        yield with_scores(name, "hiding", scores.round(2), 5, keep=keep, **more)
    shining = np.where(keep, mild, mild + 3 * limit)
    yield with_scores("hidden key with a large score", "hiding", shining, 6, keep=keep, **more)
    none = keep.copy()
    none[1] = False
    yield with_scores("row that sees nothing", "empty row", mild, 7, keep=none, **more)
    poisoned = with_scores("NaN in a hidden value", "hidden NaN", mild, 8, **more)
    values = poisoned.inputs["values"].copy()
    values[..., 2, :] = np.nan
    hides = np.array([True, True, False])
    yield replace(poisoned, inputs={**poisoned.inputs, "values": values}, keep=hides)


def stretched(probe: Probe, name: str) -> Probe:
    """A probe of embeddings with scores that overflow exp: all rows made long, or one alone."""
    limit = float(np.log(np.finfo(probe.dtype).max))
    source = "embeddings" if "embeddings" in probe.inputs else "queries"
    array = probe.inputs[source]
    rows = np.arange(array.shape[-2])[:, None]
    longest = float(np.nanmax(np.abs(probe.right["scaled"])))
    factor = np.sqrt(3 * limit / longest)
    factors = np.where((name == "large scores") | (rows == 1), factor, 1.0)
    inputs = {**probe.inputs, source: array * factors}
    if source == "queries":  # self-attention: all three are the same
        inputs = dict.fromkeys(probe.inputs, array * factors)
    return replace(probe, name=name, ability="range", inputs=inputs)

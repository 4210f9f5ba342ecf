"""Finding out how somebody's attention wants to be called.

Owns the search over layouts, masks and the rest; the right attention decides where it can. Must
not know mistakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.calling import call, mask_role
from regard.diagnosis.convention import LAYOUTS, MASK_KINDS, RANKS, Answer, Ask, Convention
from regard.diagnosis.probe import ABILITIES, Probe, of_rank, projected
from regard.diagnosis.signature import Subject
from regard.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Abilities that need a mask, a causal flag, a window, a cache or a scale.
RULED = tuple(ABILITIES)[tuple(ABILITIES).index("mask") :]
# Half the distance from 1 to the next number.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# How many times the limit of one call all of them may take together.
CALLS_IN_ALL = 10
MASK_SHAPES = ("full", "cells", "batch cells")
KEY_MASK_SHAPES = ("batch 1 1 keys", "batch keys", "keys", "full", "batch cells", "cells")


@dataclass(frozen=True)
class Told:
    """What the user says about the conventions; None is to be found out."""

    causal: bool | str | None = None  # True, False, "start", "end"
    mask: str | None = None
    window: str | None = None  # "inclusive": the own key counts; "exclusive"


@dataclass(eq=False)
class Trial:
    """A function under trial, and everything that it has answered so far."""

    subject: Subject
    told: Told
    limit: float
    put: Ask
    answers: dict[tuple[Convention, Probe], Answer] = field(default_factory=dict)
    probes: dict[tuple[Any, ...], list[Probe]] = field(default_factory=dict)
    hung: bool = False
    spent: float = 0.0  # seconds inside the function

    def ask(self, way: Convention, probe: Probe) -> Answer:
        """The answer to one probe; each is asked once."""
        key = (way, probe)
        if key not in self.answers:
            if self.hung:
                return Answer(problem="it had not come back from an earlier call", kind="hung")
            if self.out_of_time:
                return Answer(problem="no time was left for it", kind="refused")
            self.answers[key] = call(self.subject, way, probe, self.put)
            self.spent += self.answers[key].seconds
            self.hung = self.answers[key].kind == "hung"
        return self.answers[key]

    @property
    def out_of_time(self) -> bool:
        """Whether the function has taken more than all calls may take together."""
        return self.spent > CALLS_IN_ALL * self.limit

    @property
    def calls(self) -> int:
        """How often the function was called; what it has no parameter for is not asked."""
        return sum(answer.kind != "refused" for answer in self.answers.values())

    def probes_for(self, way: Convention) -> list[Probe]:
        """The probes of ordinary use for one way of calling, made once."""
        key = (way.layout, way.causal_always, way.aligned)
        if key not in self.probes:
            found = list(_probes(self.subject, way))
            if self.subject.kind == "self":
                found = [_self(probe) for probe in found if _is_square(probe)]
            if way.causal_always:
                found = [_always_causal(probe) for probe in found]
            elif self.subject.roles.keys() & {"window"} and "causal" not in self.subject.roles:
                found = [_on_both_sides(probe) for probe in found]
            self.probes[key] = [_aligned(probe, way.aligned) for probe in found]
        return self.probes[key]

    def is_right(self, way: Convention, probe: Probe) -> bool:
        """Whether the answer to a probe is the textbook's, so far as a half type could tell.

        Conventions differ by far more than that, and a function that has lost digits has one too.
        """
        answer = self.ask(way, probe)
        if answer.output is None:
            return False
        unit = max(UNITS["float16"], UNITS.get(answer.dtype, 0.0))
        return agrees(answer.output, probe.result(probe.right), probe.tolerance(unit))


def agrees(got: Array, expected: Array, tolerance: float) -> bool:
    """Equal within a tolerance; NaN and infinity only where the other has them too."""
    if got.shape != expected.shape:
        return False
    with np.errstate(all="ignore"):
        near = (got == expected) | (np.abs(got - expected) <= tolerance)
    return bool((near | (np.isnan(got) & np.isnan(expected))).all())


def ways_to_call(trial: Trial) -> list[list[Convention]]:
    """The hypotheses about how it wants to be called, the likeliest first.

    Each is a list of conventions, one for each layout that the function takes.
    """
    layouts = _layouts(trial)
    if not layouts:
        return []
    roles = trial.subject.roles
    always: tuple[bool, ...] = (False,)
    if "causal" not in roles and trial.told.causal is not False:
        always = (True,) if trial.told.causal else (False, True)
    turned = (False, True) if _may_turn(trial.subject) else (False,)
    hypotheses = []
    for causal_always, turn in itertools.product(always, turned):
        base = [replace(way, causal_always=causal_always, turned=turn) for way in layouts]
        hypotheses += _with_masks(trial, base)
    return [settled for ways in hypotheses for settled in _settled(trial, ways)]


def _may_turn(subject: Subject) -> bool:
    # F.linear takes weights as (out, in); a function on NumPy arrays has no reason to.
    return subject.kind == "projected" and subject.framework == "torch" and not subject.weights


def _layouts(trial: Trial) -> list[Convention]:
    """Every layout that gives an output of the right shape, in one dtype for all."""
    dtypes = ("float32",) if trial.subject.framework == "jax" else ("float64", "float32")
    ready = trial.subject.kind in ("arrays", "self")
    orders = (("LD",), ("HLD", "LHD"), ("BHLD", "BLHD"), ("D",))
    for dtype in dtypes:
        found = []
        for names in orders if ready else (("LM",), ("BLM", "LBM")):
            ways = [Convention(layout=name, dtype=dtype) for name in names]
            taken = [(way, _taken(trial, way)) for way in ways]
            fitting = [one for one in taken if one[1] is not Taken.NOTHING]
            if fitting:  # the first of the best: square arrays fit more orders than were meant
                found.append(max(fitting, key=lambda one: one[1].value))
        # Where one layout takes more keys than queries, one that refuses them was not meant.
        if any(how in (Taken.RECTANGLES, Taken.RIGHTLY) for _, how in found):
            found = [one for one in found if one[1] is not Taken.SQUARES]
        if found:
            return [_with_order(trial, way) for way, _ in found]
    return []


class Taken(Enum):
    """What a layout is good for; the higher, the likelier that it was meant."""

    NOTHING, SQUARES, RECTANGLES, RIGHTLY = range(4)


def _taken(trial: Trial, way: Convention) -> Taken:
    own = way if trial.told.causal is not True else replace(way, causal_always=True)
    probes = [probe for probe in trial.probes_for(own) if probe.ability not in RULED]
    plain = [p for p in probes if not p.name.startswith("cube") and p.ability != "grouped"]
    answered = [probe for probe in plain if trial.ask(own, probe).output is not None]
    if not answered:
        return Taken.NOTHING
    if any(trial.is_right(own, probe) for probe in answered):
        return Taken.RIGHTLY
    return Taken.RECTANGLES if any(map(_is_rectangle, answered)) else Taken.SQUARES


def _with_order(trial: Trial, way: Convention) -> Convention:
    """Which of several results is the output, from a probe where no two can be confused."""
    for causal_always in (False, True):
        own = replace(way, causal_always=causal_always)
        for probe in trial.probes_for(own):
            answer = trial.ask(own, probe)
            if probe.sizes["E"] != probe.sizes["S"] and answer.output is not None:
                return replace(way, output_at=answer.position)
    return way


def _is_square(probe: Probe) -> bool:
    return probe.sizes["L"] == probe.sizes["S"] and probe.sizes["D"] == probe.sizes["E"]


def _is_rectangle(probe: Probe) -> bool:
    return probe.sizes["L"] != probe.sizes["S"]


def _probes(subject: Subject, way: Convention) -> Iterator[Probe]:
    rank = RANKS[way.layout]
    if subject.kind in ("arrays", "self"):
        yield from of_rank(rank)
        return
    batch = 1 if rank == 2 else 2
    given = subject.weights
    if given:
        heads = subject.heads or 1
        groups = _groups(given, heads)
        shapes = {name: array.shape for name, array in given.items()}
        cross = bool({"context", "key"} & subject.roles.keys())
        yield from projected(
            shapes, heads, groups, weights=given, batch=batch, rank=rank, cross=cross
        )
        return
    if subject.kind == "packed":
        yield from _packed_heads(subject.heads or 2, batch, rank)
        return
    roles = subject.roles
    heads = (subject.heads or 2) if "heads" in roles else 1
    width, value_width = (3 * heads, 3 * heads) if "heads" in roles else (4, 5)
    shapes = {
        "W_q": (6, width),
        "W_k": (6, width),
        "W_v": (6, value_width),
        "W_o": (value_width, 6 if "heads" in roles else 7),
        "b_q": (width,),
        "b_k": (width,),
        "b_v": (value_width,),
        "b_o": (6 if "heads" in roles else 7,),
    }
    taken = {name: shape for name, shape in shapes.items() if name in roles}
    cross = bool({"context", "key"} & roles.keys())
    square = {name: ((6, 6) if len(shape) == 2 else (6,)) for name, shape in taken.items()}
    if "heads" in roles:
        yield from projected(square, heads, batch=batch, rank=rank, cross=cross)
        return
    for shape in (square, taken):
        yield from projected(shape, heads, batch=batch, rank=rank, cross=cross)


def _groups(weights: Mapping[str, Array], heads: int) -> int:
    """How many heads the keys have, where the shapes of the weights fit together."""
    shapes: dict[str, tuple[int, ...]] = {name: array.shape for name, array in weights.items()}

    def refuse(why: str) -> OptionError:
        told = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items()))
        return OptionError(f"the weights do not fit together: {told}; {why}")

    for name, shape in shapes.items():
        wanted = 2 if name.startswith("W_") else 1
        if len(shape) != wanted or 0 in shape:
            raise refuse(f"{name} must have {wanted} {'axes' if wanted > 1 else 'axis'}, none of 0")
    rows, width = shapes["W_q"]
    if any(shapes[name][0] != rows for name in ("W_k", "W_v")):
        raise refuse("W_q, W_k and W_v must have as many rows")
    if width % heads:
        raise OptionError(f"{heads} heads do not fit into a width of {width}")
    groups, rest = divmod(shapes["W_k"][1], width // heads)
    if rest or not groups or heads % groups or shapes["W_v"][1] % groups:
        raise refuse(f"with {heads} heads the columns of W_k or W_v are no whole number of heads")
    if "W_o" in shapes and shapes["W_o"][0] != (joined := shapes["W_v"][1] // groups * heads):
        raise refuse(f"W_o must have {joined} rows")
    for part in "qkvo":
        bias, matrix = shapes.get(f"b_{part}"), shapes.get(f"W_{part}")
        if bias is not None and (matrix is None or bias[0] != matrix[1]):
            raise refuse(f"b_{part} must be as long as W_{part} has columns")
    return groups


def _packed_heads(heads: int, batch: int, rank: int) -> Iterator[Probe]:
    """Heads side by side in ready arrays: projections that only pick columns."""
    width = 3 * heads
    eye, none = np.eye(width), np.zeros((width, width))
    weights = {"W_q": eye, "W_k": np.vstack([eye, none]), "W_v": np.vstack([none, eye])}
    rng = np.random.default_rng(50 + rank)
    for probe in projected(
        {name: array.shape for name, array in weights.items()},
        heads,
        weights=weights,
        batch=batch,
        rank=rank,
    ):
        for rows, keys in ((5, 5), (3, 5)):
            inputs = {
                **probe.inputs,
                "embeddings": 1.5 * rng.normal(size=(batch, rows, width)).round(2),
                "context": rng.normal(size=(batch, keys, 2 * width)).round(2),
            }
            if rows != keys and probe.has_rules:
                continue
            more = {} if rows == keys else {"ability": "rectangular"}
            yield replace(probe, inputs=inputs, name=f"{probe.name} {rows}×{keys}", **more)  # type: ignore[arg-type]


def _self(probe: Probe) -> Probe:
    own = probe.inputs["queries"]
    return replace(probe, inputs={"queries": own, "keys": own / 1, "values": own / 1})


def _always_causal(probe: Probe) -> Probe:
    keep = probe.keep
    if keep is not None and keep.ndim == 2:
        keep = keep | (np.arange(keep.shape[1]) == 0)
    offset = probe.sizes["S"] - probe.sizes["L"]
    return replace(probe, causal=True, keep=keep, offset=offset)


def _on_both_sides(probe: Probe) -> Probe:
    """A window without a causal flag may look both ways."""
    return probe if probe.window is None else replace(probe, causal=False)


def _aligned(probe: Probe, aligned: str) -> Probe:
    return replace(probe, offset=0) if aligned == "start" and probe.offset else probe


def _with_masks(trial: Trial, base: list[Convention]) -> list[list[Convention]]:
    """The same with every kind of mask that it may want; only the right one if there is one."""
    roles = trial.subject.roles
    kinds: tuple[str, ...] = tuple(MASK_KINDS)
    for role, own in (
        ("bias", ("add",)),
        ("keep", ("keep", "keep01")),
        ("hide", ("hide", "hide01")),
        ("key_mask", ("keep", "hide", "keep01", "hide01")),
    ):
        if role in roles and "mask" not in roles:
            kinds = own
    if trial.told.mask is not None:
        kinds = (trial.told.mask,)
    if mask_role(trial.subject) is None:
        return [base]
    options: list[str] = []
    shaped: dict[str, list[Convention]] = {}
    for kind in kinds:
        ways = []
        right = False
        ran = False
        for way in base:
            chosen, fits, answered = _mask_shape(trial, replace(way, mask=kind))
            ways.append(chosen)
            right |= fits
            ran |= answered
        shaped[kind] = ways
        if right:
            return [ways]
        if ran:
            options.append(kind)
    return [shaped[kind] for kind in options or kinds[:1]]


def _mask_shape(trial: Trial, way: Convention) -> tuple[Convention, bool, bool]:
    """The shape of mask that is right, or else the first that is taken; cells before keys."""
    probes = trial.probes_for(way)
    for ability, shapes in (("mask", MASK_SHAPES), ("key mask", KEY_MASK_SHAPES)):
        taken = None
        for shape in shapes:
            own = replace(way, mask_shape=shape)
            for probe in [probe for probe in probes if probe.ability == ability][:1]:
                if trial.ask(own, probe).output is None:
                    continue
                taken = taken or own
                if trial.is_right(own, probe):
                    return own, True, True
        if taken is not None:
            return taken, False, True
    return way, False, False


def key_mask_way(trial: Trial, way: Convention, probe: Probe) -> Convention:
    """How a mask of padded keys is taken: the right way, or the first that runs."""
    own_parameter = "key_mask" in trial.subject.roles and "mask" in trial.subject.roles
    kinds = tuple(MASK_KINDS) if own_parameter and trial.told.mask is None else (way.mask,)
    taken = None
    for kind, shape in itertools.product(kinds, KEY_MASK_SHAPES):
        own = replace(way, mask=kind, mask_shape=shape)
        if trial.ask(own, probe).output is not None:
            taken = taken or own
            if trial.is_right(own, probe):
                return own
    return taken or way


def _settled(trial: Trial, ways: list[Convention]) -> Iterator[list[Convention]]:
    """How causal is aligned and how a window is counted: as told, or whichever is right.

    Where neither alignment is right, a mistake may stand on either of them.
    """
    for aligned in _alignments(trial, ways):
        out = []
        for way in ways:
            way = replace(way, aligned=aligned)
            if trial.told.window is not None:
                way = replace(way, window_extra=int(trial.told.window == "exclusive"))
            else:
                way = _first_right(trial, "window", [way, replace(way, window_extra=1)], way)
            way = _first_right(trial, "scale", [way, replace(way, scale_divides=True)], way)
            out.append(way)
        yield out


def _alignments(trial: Trial, ways: list[Convention]) -> tuple[str, ...]:
    if trial.told.causal in ("start", "end"):
        return (str(trial.told.causal),)
    both = ("end", "start")
    answered = False
    for aligned, way in itertools.product(both, ways):
        own = replace(way, aligned=aligned)
        ability = "rectangular" if way.causal_always else "causal rectangular"
        for probe in trial.probes_for(own):
            if probe.ability == ability:
                if trial.is_right(own, probe):
                    return (aligned,)
                answered |= trial.ask(own, probe).output is not None
    return both if answered else both[:1]


def _first_right(
    trial: Trial, ability: str, ways: list[Convention], default: Convention
) -> Convention:
    for way in ways:
        for probe in trial.probes_for(way):
            if probe.ability == ability and trial.is_right(way, probe):
                return way
    return default


def spoken(trial: Trial, ways: Sequence[Convention], answer: Answer | None) -> str:
    """How it was called, in words."""
    subject, way = trial.subject, ways[0]
    arguments = []
    for parameter in subject.parameters:
        if parameter.role is None or parameter.role in ("yes",):
            continue
        arguments.append(parameter.name)
    library = {"numpy": "NumPy", "torch": "torch", "jax": "JAX"}[subject.framework]
    shapes = ", ".join(LAYOUTS[one.layout] for one in ways)
    text = f"{subject.name}({', '.join(arguments)}) with {library} {way.dtype} arrays {shapes}"
    role = mask_role(subject)
    if role is not None:
        text += f"; {subject.roles[role].name}: {MASK_KINDS[way.mask]}"
    if way.causal_always:
        text += "; always causal"
    if way.aligned == "start" and (way.causal_always or "causal" in subject.roles):
        text += "; causal aligns the first query with the first key"
    if "window" in subject.roles:
        counts = "does not count" if way.window_extra else "counts"
        text += f"; the window {counts} the query's own key"
    if way.scale_divides:
        text += "; scores are divided by the scale"
    if way.turned:
        text += "; weights stored as (out, in)"
    if subject.weights:
        text += f"; weights {', '.join(sorted(subject.weights))} read from it"
        text += f", {subject.heads or 1} head{'s' if (subject.heads or 1) > 1 else ''}"
    if answer is not None and answer.returned:
        text += f"; returns {answer.returned}"
    return text

"""Finding out how a function is called: layouts, masks, alignment and the rest.

Each convention is tried, and the one that gives right results wins where there is one. Must not
know mistakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum

from regard.diagnosis.arguments import KEYS_ONLY, mask_role
from regard.diagnosis.convention import MASK_KINDS, Answer, Convention, spell
from regard.diagnosis.probe import Probe
from regard.diagnosis.probes import ABILITIES
from regard.diagnosis.under_test import FunctionUnderTest
from regard.normalizers import Normalizer
from regard.scores import Score

# Abilities that need a mask, a causal flag, a window, a cache or a scale.
RULED = tuple(ABILITIES)[tuple(ABILITIES).index("mask") :]
MASK_SHAPES = ("full", "cells", "batch cells")
KEY_MASK_SHAPES = (*KEYS_ONLY, "full", "batch cells", "cells")
# Kinds of masks that a parameter of this role takes, if none is called just mask.
KINDS_BY_ROLE = {
    "bias": ("add",),
    "keep": ("keep", "keep01"),
    "hide": ("hide", "hide01"),
    "key_mask": ("keep", "hide", "keep01", "hide01"),
}


def find_conventions(tested: FunctionUnderTest) -> list[list[Convention]]:
    """The hypotheses about how a function is called, the likeliest first.

    Each is a list of conventions, one for each layout that the function takes.
    """
    layouts = _layouts(tested)
    callee, causal = tested.callee, tested.stated.causal
    always: tuple[bool, ...] = (False,)
    if "causal" not in callee.roles and causal is not False:
        always = (True,) if causal else (False, True)
    # F.linear takes weights as (out, in); a function on NumPy arrays has no reason to.
    projects = callee.kind == "projected" and not callee.weights
    transposed = (False, True) if projects and callee.framework == "torch" else (False,)
    hypotheses = []
    for causal_always, turn in itertools.product(always, transposed) if layouts else ():
        base = [replace(one, causal_always=causal_always, transposed=turn) for one in layouts]
        hypotheses += _with_masks(tested, base)
    return [found for one in hypotheses for found in _with_details(tested, one)]


def _layouts(tested: FunctionUnderTest) -> list[Convention]:
    """Every layout that gives an output of the right shape, in the first dtype that does."""
    dtypes = ("float32",) if tested.callee.framework == "jax" else ("float64", "float32")
    orders: tuple[tuple[str, ...], ...] = (("LM",), ("BLM", "LBM"))
    if tested.callee.kind in ("arrays", "self"):
        orders = (("LD",), ("HLD", "LHD"), ("BHLD", "BLHD"), ("D",))
    for dtype in dtypes:
        found = []
        for layouts in orders:
            tried = [Convention(layout=layout, dtype=dtype) for layout in layouts]
            fits = [(one, _fit(tested, one)) for one in tried]
            # The first of the best: square arrays fit more orders than the one that is meant.
            best = max(fits, key=lambda one: one[1].value)
            if best[1] is not Fit.NONE:
                found.append(best)
        # If one layout takes more keys than queries, one that refuses them was not meant.
        if any(fit in (Fit.RECTANGULAR, Fit.RIGHT) for _, fit in found):
            found = [one for one in found if one[1] is not Fit.SQUARE]
        if found:
            return [_with_output_position(tested, convention) for convention, _ in found]
    return []


class Fit(Enum):
    """How well a layout fits: not at all, on square arrays, on any, or with right results."""

    NONE, SQUARE, RECTANGULAR, RIGHT = range(4)


def _fit(tested: FunctionUnderTest, convention: Convention) -> Fit:
    if tested.stated.causal is True:
        convention = replace(convention, causal_always=True)
    answered = [
        probe
        for probe in tested.probes_for(convention)
        if probe.ability not in (*RULED, "grouped")
        and not probe.name.startswith("cube")
        and tested.ask(convention, probe).output is not None
    ]
    if any(tested.is_right(convention, probe) for probe in answered):
        return Fit.RIGHT
    if any(probe.sizes["L"] != probe.sizes["S"] for probe in answered):
        return Fit.RECTANGULAR
    return Fit.SQUARE if answered else Fit.NONE


def _with_output_position(tested: FunctionUnderTest, convention: Convention) -> Convention:
    """Which of several results is the output, from a probe where shapes tell them apart."""
    for causal_always in (False, True):
        own = replace(convention, causal_always=causal_always)
        for probe in tested.probes_for(own):
            answer = tested.ask(own, probe)
            if probe.sizes["E"] != probe.sizes["S"] and answer.output is not None:
                return replace(convention, output_at=answer.position)
    return convention


def _with_masks(tested: FunctionUnderTest, base: list[Convention]) -> list[list[Convention]]:
    """The same with every kind of mask that runs, or with the first that gives right results."""
    roles, stated = tested.callee.roles, tested.stated.mask
    if mask_role(tested.callee) is None:
        return [base]
    kinds = tuple(MASK_KINDS)
    for role, own in KINDS_BY_ROLE.items():
        if role in roles and "mask" not in roles:
            kinds = own
    if stated is not None:
        kinds = (stated,)
    running, by_kind = [], {}
    for kind in kinds:
        found = [_mask_shape(tested, replace(one, mask=kind)) for one in base]
        by_kind[kind] = [convention for convention, _, _ in found]
        if any(right for _, right, _ in found):
            return [by_kind[kind]]
        if any(ran for _, _, ran in found):
            running.append(kind)
    return [by_kind[kind] for kind in running or kinds[:1]]


def _mask_shape(tested: FunctionUnderTest, base: Convention) -> tuple[Convention, bool, bool]:
    """The shape of mask that is right, or the first that runs; whether it is right, and runs."""
    for ability, shapes in (("mask", MASK_SHAPES), ("key mask", KEY_MASK_SHAPES)):
        probe = next((one for one in tested.probes_for(base) if one.ability == ability), None)
        if probe is None:
            continue
        found = _first_right(tested, [replace(base, mask_shape=shape) for shape in shapes], probe)
        if found is not None:
            return found, tested.is_right(found, probe), True
    return base, False, False


def _first_right(
    tested: FunctionUnderTest, conventions: Sequence[Convention], probe: Probe
) -> Convention | None:
    """The first convention that gives the right result, or else the first that gives any."""
    running = None
    for convention in conventions:
        if tested.ask(convention, probe).output is not None:
            running = running or convention
            if tested.is_right(convention, probe):
                return convention
    return running


def key_mask_convention(
    tested: FunctionUnderTest, convention: Convention, probe: Probe
) -> Convention:
    """How a mask of padded keys is taken."""
    own_parameter = {"key_mask", "mask"} <= tested.callee.roles.keys()
    any_kind = own_parameter and tested.stated.mask is None
    kinds = tuple(MASK_KINDS) if any_kind else (convention.mask,)
    conventions = [
        replace(convention, mask=kind, mask_shape=shape)
        for kind, shape in itertools.product(kinds, KEY_MASK_SHAPES)
    ]
    return _first_right(tested, conventions, probe) or convention


def _with_details(
    tested: FunctionUnderTest, base: Sequence[Convention]
) -> Iterator[list[Convention]]:
    """With the alignment of causal, the count of a window and the sense of a scale.

    Both alignments, if neither gives right results: either may have the mistake.
    """
    for aligned in _alignments(tested, base):
        found = []
        for one in base:
            one = replace(one, aligned=aligned)
            if tested.stated.window is not None:
                one = replace(one, window_extra=int(tested.stated.window == "exclusive"))
            elif _is_right(tested, replace(one, window_extra=1), "window", unless=one):
                one = replace(one, window_extra=1)
            if _is_right(tested, replace(one, scale_divides=True), "scale", unless=one):
                one = replace(one, scale_divides=True)
            found.append(one)
        yield found


def _is_right(
    tested: FunctionUnderTest, convention: Convention, ability: str, *, unless: Convention
) -> bool:
    """Whether one convention gives a right result with an ability, and another gives none."""
    probes = [probe for probe in tested.probes_for(convention) if probe.ability == ability]
    if any(tested.is_right(unless, probe) for probe in probes):
        return False
    return any(tested.is_right(convention, probe) for probe in probes)


def _alignments(tested: FunctionUnderTest, base: Sequence[Convention]) -> tuple[str, ...]:
    if tested.stated.causal in ("start", "end"):
        return (str(tested.stated.causal),)
    both = ("end", "start")
    answered = False
    for aligned, one in itertools.product(both, base):
        own = replace(one, aligned=aligned)
        ability = "rectangular" if one.causal_always else "causal rectangular"
        for probe in tested.probes_for(own):
            if probe.ability == ability:
                if tested.is_right(own, probe):
                    return (aligned,)
                answered |= tested.ask(own, probe).output is not None
    return both if answered else both[:1]


def _parts(tested: FunctionUnderTest) -> list[Score | Normalizer]:
    """The score and the normalization that it is compared with, where they are not plain."""
    own = tested.stated.mechanism
    return [] if own is None else [x for x in (own.score, own.normalize) if x is not None]


def describe_call(
    tested: FunctionUnderTest, conventions: Sequence[Convention], answer: Answer | None
) -> str:
    """How the function was called, in words."""
    callee, one = tested.callee, conventions[0]
    names = [p.name for p in callee.parameters if p.role not in (None, "yes")]
    library = {"numpy": "NumPy", "torch": "torch", "jax": "JAX"}[callee.framework]
    shapes = ", ".join(spell(own.layout) for own in conventions)
    role, roles, heads = mask_role(callee), callee.roles, callee.heads or 1
    weights = f"weights {', '.join(sorted(callee.weights))} read from it, {heads} head"
    at_start = one.aligned == "start" and (one.causal_always or "causal" in roles)
    counts = "does not count" if one.window_extra else "counts"
    parts = [
        (True, f"{callee.name}({', '.join(names)}) with {library} {one.dtype} arrays {shapes}"),
        *((True, f"{part.option}={part}") for part in _parts(tested)),
        (role is not None, f"{role and roles[role].name}: {MASK_KINDS[one.mask]}"),
        (one.causal_always, "always causal"),
        (at_start, "causal aligns the first query with the first key"),
        ("window" in roles, f"the window {counts} the query's own key"),
        (one.scale_divides, "scores are divided by the scale"),
        (one.transposed, "weights stored as (out, in)"),
        (bool(callee.weights), weights + "s" * (heads > 1)),
        (bool(answer and answer.returned), f"returns {answer and answer.returned}"),
    ]
    return "; ".join(text for holds, text in parts if holds)

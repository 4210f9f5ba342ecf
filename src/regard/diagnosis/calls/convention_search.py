"""Finding out how a function is called: masks, alignment and more, in the layouts that it takes.

Each convention is tried, and the one that gives right results wins where there is one. Must not
know mistakes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.calls.arguments import mask_role
from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.layout_search import (
    ANY_KIND,
    KEY_MASK_SHAPES,
    KINDS_BY_ROLE,
    MASK_SHAPES,
    RULED,
    always_causal,
    layouts_of,
    mask_kinds,
)
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.probes import PADDED_PREFIX
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.signature import OF_KEYS, Callee

# The shape of a mask whose documented axes are these.
SHAPES_SAID = (
    ("BT", "batch keys"),
    ("[^B1]T", "cells"),
    ("B[^1]T", "batch cells"),
    ("B1[^1]T", "batch 1 cells"),
    ("B11T", "batch 1 1 keys"),
)
# Code that puts the mask of new keys to that of earlier ones, and that cuts one to the keys so far.
JOINS_MASKS = re.compile(
    r"\b(cat|concat|concatenate|hstack|append)\(\s*[\[(]?[^\])\n]*(mask|pad|valid)", re.IGNORECASE
)
CUTS_MASK = re.compile(r"(mask|pad|valid)\w*\[[^\]\n]*: *(k|s|kv|key|src|total|cur|past|n|end)")
# Code that makes a causal mask where it gets none.
NO_MASK = re.compile(
    r"mask\w* is None(?s:.){0,160}?(causal|tri[lu]?\b|tri\(|inf|full)|"
    r"causal[^\n]{0,60}\band\b[^\n]{0,20}mask\w* is None",
    re.IGNORECASE,
)


def find_conventions(tested: FunctionUnderTest) -> list[list[Convention]]:
    """The hypotheses about how a function is called, the likeliest first; searched for once.

    Each is a list of conventions, one for each layout that the function takes.
    """
    if tested.conventions is None:
        tested.conventions = _search(tested)
    return tested.conventions


def _search(tested: FunctionUnderTest) -> list[list[Convention]]:
    layouts = layouts_of(tested)
    callee = tested.callee
    # F.linear takes weights as (out, in); a function on NumPy arrays has no reason to.
    projects = callee.kind == "projected" and not callee.weights
    turned = callee.framework == "torch" or callee.says_transposed
    transposed = (False, True) if projects and turned else (False,)
    hypotheses = []
    always = always_causal(tested)
    if not projects:
        right = [
            one
            for one in always
            if any(_is_plainly_right(tested, replace(c, causal_always=one)) for c in layouts)
        ]
        # A mask that hides nothing may have replaced the causal rule.
        if not (right == [False] and callee.needs_mask and callee.says_causal):
            always = tuple(right[:1]) or always
    of_embeddings = callee.kind == "projected"
    joined = (False, True) if of_embeddings and "context" in callee.roles else (False,)
    for join, always_so, turn in itertools.product(joined, always, transposed) if layouts else ():
        how: dict[str, Any] = dict(causal_always=always_so, joined=join)
        base = [replace(one, transposed=turn or one.transposed, **how) for one in layouts]
        if always_so and not join and _joins(callee):  # the context is what came before
            continue
        if join and any(_reads_context(tested, replace(one, joined=False)) for one in base):
            continue
        hypotheses += _with_masks(tested, base)
    if len(transposed) > 1:  # weights of fewer key heads are not square, and fit in one way
        fitting = [one for one in hypotheses if _takes_fewer_key_heads(tested, one)]
        hypotheses = fitting or hypotheses
    return [found for one in hypotheses for found in _with_details(tested, one)]


def _takes_fewer_key_heads(tested: FunctionUnderTest, base: Sequence[Convention]) -> bool:
    """Whether there is an output for fewer key heads than query heads."""
    return any(
        probe.ability == "grouped" and tested.ask(one, probe).output is not None
        for one in base
        for probe in tested.probes_for(one)
    )


def _joins(callee: Callee) -> bool:
    """Whether the code puts what it gets and its context one after the other."""
    if "context" not in callee.roles:
        return False
    name = re.escape(callee.roles["context"].name)
    joins = rf"\b(?:cat|concat|concatenate)\(\s*[\[(][^\n]{{0,60}}?\b{name}\b[^\n]{{0,20}},"
    return any(re.search(joins, text) for _, text in callee.blocks)


def _is_plainly_right(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a result without a mask, a window, a cache or a scale is right."""
    return any(
        probe.ability not in RULED and tested.is_right(convention, probe)
        for probe in tested.probes_for(convention)
    )


def _reads_context(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a result with a context is right, without joining anything to it."""
    return any(
        "context" in probe.inputs and tested.is_right(convention, probe)
        for probe in tested.probes_for(convention)
    )


def _with_masks(tested: FunctionUnderTest, base: list[Convention]) -> list[list[Convention]]:
    """The same with every kind of mask that runs, or with the first that gives right results."""
    if mask_role(tested.callee) is None:
        return [base]
    kinds = mask_kinds(tested)
    replaces = tested.callee.says_causal and any(one.causal_always for one in base)
    if tested.callee.needs_mask and not replaces:
        right = (
            kind
            for kind in kinds
            if any(_is_plainly_right(tested, replace(one, mask=kind)) for one in base)
        )
        kinds = tuple(right) or kinds
    bases = [base]
    if replaces and any(NO_MASK.search(text) for _, text in tested.callee.blocks):
        bases.append([replace(one, mask_instead=one.causal_always) for one in base])
    running, others = list[list[Convention]](), list[list[Convention]]()
    for own, kind in itertools.product(bases, kinds):
        found = [_mask_shape(tested, replace(one, mask=kind)) for one in own]
        conventions = [convention for convention, _, _ in found]
        if any(right for _, right, _ in found):
            return [conventions]
        ran = any(ran for _, _, ran in found)
        (running if ran else others).append(conventions)
    return running or others[:1]


def _mask_shape(tested: FunctionUnderTest, base: Convention) -> tuple[Convention, bool, bool]:
    """The shape of mask that is right, or the first that runs; whether it is right, and runs."""
    of_cells = ("mask", MASK_SHAPES), ("key mask", KEY_MASK_SHAPES)
    of_keys = mask_role(tested.callee) in OF_KEYS or tested.callee.mask_of_keys
    for ability, shapes in of_cells[of_keys:]:
        probe = next((one for one in tested.probes_for(base) if one.ability == ability), None)
        if probe is None:
            continue
        said = [replace(base, mask_shape=shape) for shape in _said_first(tested, shapes)]
        found = _first_right(tested, said, probe)
        if found is not None:
            return found, tested.is_right(found, probe), True
    return base, False, False


def _said_first(tested: FunctionUnderTest, shapes: Sequence[str]) -> Sequence[str]:
    """The shapes of a mask, first the one whose axes the documentation gives."""
    role = mask_role(tested.callee)
    axes = "" if role is None else tested.callee.axes.get(tested.callee.roles[role].name, "")
    said = next((one for form, one in SHAPES_SAID if re.fullmatch(form, axes)), None)
    return sorted(shapes, key=lambda shape: shape != said)


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
    own = mask_role(tested.callee, keys=True)
    kinds: tuple[str, ...] = (convention.mask,)
    if own != mask_role(tested.callee) and tested.stated.mask is None:
        said = tested.callee.key_mask_means  # where none gives right results, as the text says
        kinds = KINDS_BY_ROLE.get(own or "", ANY_KIND)
        kinds = tuple(sorted(kinds, key=lambda kind: bool(said) and not kind.startswith(said)))
    conventions = [
        replace(convention, mask=kind, mask_shape=shape)
        for kind, shape in itertools.product(kinds, _said_first(tested, KEY_MASK_SHAPES))
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
            window = tested.stated.window or tested.callee.window_means
            if window:
                one = replace(one, window_extra=int(window == "exclusive"))
            elif _is_right(tested, replace(one, window_extra=1), "window", unless=one):
                one = replace(one, window_extra=1)
            if _is_right(tested, replace(one, scale_divides=True), "scale", unless=one):
                one = replace(one, scale_divides=True)
            one = replace(one, mask_of_new=_mask_of_new(tested, one))
            found.append(one)
        yield found


def _mask_of_new(tested: FunctionUnderTest, convention: Convention) -> bool | None:
    """Whether a mask beside a cache is that of new keys alone; None if nothing tells.

    The one that gives right results; else as the code joins masks, or cuts one to all keys so far.
    """
    masked = mask_role(tested.callee, keys=True)
    prefixed = (p for p in tested.probes_for(convention) if p.name.startswith(PADDED_PREFIX))
    probe = next(prefixed, None)
    if masked is None or probe is None or not (tested.callee.remembers or tested.keeps_keys):
        return None
    for of_new in (True, False):
        if tested.is_right(replace(convention, mask_of_new=of_new), probe):
            return of_new
    code = "\n".join(text for _, text in tested.callee.blocks)
    return True if JOINS_MASKS.search(code) else False if CUTS_MASK.search(code) else None


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
    if tested.callee.has_past or any(one.joined for one in base):  # what came before
        return ("end",)
    if tested.callee.causal_aligns:
        return (tested.callee.causal_aligns,)
    both = ("end", "start")
    answered = False
    for aligned, one in itertools.product(both, base):
        own = replace(one, aligned=aligned)
        abilities = ("rectangular", "causal rectangular")[not one.causal_always :]
        for probe in tested.probes_for(own):
            if probe.ability in abilities:
                if tested.is_right(own, probe):
                    return (aligned,)
                answered |= tested.ask(own, probe).output is not None
    return both if answered else both[:1]

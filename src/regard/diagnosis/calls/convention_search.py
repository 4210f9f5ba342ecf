"""Finding out how a function is called: layouts, masks, alignment and the rest.

Each convention is tried, and the one that gives right results wins where there is one. Must not
know mistakes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from regard.diagnosis.calls.arguments import KEYS_ONLY, mask_role
from regard.diagnosis.calls.convention import MASK_KINDS, READY, Convention
from regard.diagnosis.calls.patience import Patience
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.probes import ABILITIES
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.documented import documented_axes, is_of_tokens
from regard.diagnosis.reading.signature import OF_KEYS, OF_TEXTS, Callee
from regard.errors import OptionError, safe_text

SEARCH_SECONDS = 10.0  # after these no other way of reading a function is tried
# Abilities that need a mask, a causal flag, a window, a cache or a scale.
RULED = tuple(ABILITIES)[tuple(ABILITIES).index("mask") :]
MASK_SHAPES = ("full", "cells", "batch cells", "batch 1 cells", "head cells", "1 head cells")
KEY_MASK_SHAPES = (*KEYS_ONLY, "full", "batch cells", "batch 1 cells", "cells")
SHAPES_SAID = (
    ("BT", "batch keys"),
    ("[^B1]T", "cells"),
    ("B[^1]T", "batch cells"),
    ("B1[^1]T", "batch 1 cells"),
    ("B11T", "batch 1 1 keys"),
)
# Kinds of masks that a parameter of this role takes, if none is called just mask: as its name says,
# or the other way round, which is a mistake.
KINDS_BY_ROLE = {
    "bias": ("add",),
    "keep": ("keep", "keep01", "hide", "hide01"),
    "hide": ("hide", "hide01", "keep", "keep01"),
    "key_mask": ("keep", "hide", "keep01", "hide01"),
    "key_keep": ("keep", "keep01", "hide", "hide01"),
    "key_hide": ("hide", "hide01", "keep", "keep01"),
    "lengths": ("lengths",),
    "borders": ("borders",),
    "segments": ("segments",),
}
ANY_KIND = tuple(kind for kind in MASK_KINDS if kind not in ("lengths", *OF_TEXTS))
# Orders of the axes that are tried, for each number of axes: the usual one first.
READY_LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("LD", "DL"),
    ("HLD", "LHD", "BLD", "LBD", "BDL"),
    ("BHLD", "BLHD", "HBLD", "LBHD", "BHDL"),
)
# The layouts of queries without an axis of rows, and of their keys.
ONE_QUERY_LAYOUTS = (
    ("BD", "BLD"),
    ("HD", "LHD"),
    ("HD", "HLD"),
    ("BHD", "BLHD"),
    ("BHD", "BHLD"),
    ("BD", "LBD"),
)
# Code that makes a causal mask where it gets none.
NO_MASK = re.compile(
    r"mask\w* is None(?s:.){0,160}?(causal|tri[lu]?\b|tri\(|inf|full)", re.IGNORECASE
)
SHARED_LAYOUTS = ("BHLD", "HBLD", "BLHD", "HLD", "LHD")  # of queries, with keys that have no heads
EMBEDDED_LAYOUTS: tuple[tuple[str, ...], ...] = (("LM",), ("BLM", "LBM"))


def find_conventions(tested: FunctionUnderTest) -> list[list[Convention]]:
    """The hypotheses about how a function is called, the likeliest first; searched for once.

    Each is a list of conventions, one for each layout that the function takes.
    """
    if tested.conventions is None:
        tested.conventions = _search(tested)
    return tested.conventions


def _search(tested: FunctionUnderTest) -> list[list[Convention]]:
    layouts = _layouts(tested)
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
    return [found for one in hypotheses for found in _with_details(tested, one)]


def _joins(callee: Callee) -> bool:
    """Whether the code puts what it gets and its context one after the other."""
    if "context" not in callee.roles:
        return False
    name = re.escape(callee.roles["context"].name)
    joins = rf"\b(?:cat|concat|concatenate)\(\s*[\[(][^\n]{{0,60}}?\b{name}\b[^\n]{{0,20}},"
    return any(re.search(joins, text) for _, text in callee.blocks)


def as_layout(text: str) -> str:
    """A layout as its axes: "(B, L, H, D)", "b l h d" and "BLHD" are the same; or an OptionError.

    >>> as_layout("(B, L, H, D)"), as_layout("N L H E")
    ('BLHD', 'BLHD')
    """
    axes = "".join(re.findall("[a-z]", str(text).lower())).upper()
    axes = axes.translate(str.maketrans("TSNE", "LLBD"))  # as others name them
    every = [axes for orders in (*READY_LAYOUTS, ("D",), *EMBEDDED_LAYOUTS) for axes in orders]
    if axes not in every:
        raise OptionError(
            f"layout is {safe_text(repr(text), 40)}; it must be one of {', '.join(every)}: B "
            "batch, H heads, L rows, D their width, M the width of embeddings"
        )
    return axes


def likely_readings(
    readings: Sequence[FunctionUnderTest], seconds: float = SEARCH_SECONDS
) -> list[FunctionUnderTest]:
    """The readings of a function that answer, the best first; the right one alone if there is one.

    A later library is tried only if no reading in an earlier one answers; after so many `seconds`
    no other reading is.
    """
    if len(readings) == 1:
        return list(readings)
    found: list[tuple[float, FunctionUnderTest]] = []
    patience = Patience()
    for tested in readings:
        if patience.spent > seconds or (found and _stage(tested) != _stage(found[0][1])):
            break
        if tested.callee.steps and tested.callee.says_pieces and any(one > 0.5 for one, _ in found):
            continue  # it is meant to take several tokens in a call, and does
        several = any(one > 0 and not other.callee.steps for one, other in found)
        if tested.callee.steps and tested.callee.remembers and several:
            continue  # it takes several tokens at a time, rightly at first: one alone hides more
        share = max((_share_right(tested, one) for one in find_conventions(tested)), default=None)
        if share == 1 or tested.hung or tested.out_of_time:
            return [tested]
        if share is not None:
            found.append((share, tested))
    found.sort(key=lambda one: -one[0])
    return [tested for _, tested in found] or list(readings[:1])


def _stage(tested: FunctionUnderTest) -> tuple[str, bool, bool, bool, bool]:
    """What distinguishes readings of which a later kind is tried only if an earlier one fails."""
    callee, roles = tested.callee, tested.callee.roles
    by_token = bool(callee.steps) and "cache" in roles and not roles["cache"].required
    of_blocks = "block" in roles and roles["block"].required
    return callee.framework, of_blocks, by_token, callee.narrow, _has_fewer_keys(callee.weights)


def _has_fewer_keys(weights: Mapping[str, Any]) -> bool:
    """Whether there are fewer key heads than query heads: as many would hide mistakes."""
    return bool(weights) and weights["W_k"].shape[-1] < weights["W_q"].shape[-1]


def _share_right(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> float:
    """How many of the answers under one hypothesis are right."""
    asked = [(one, probe) for one in conventions for probe in tested.probes_for(one)]
    answered = [pair for pair in asked if tested.ask(*pair).output is not None]
    return sum(tested.is_right(*pair) for pair in answered) / max(1, len(answered))


def always_causal(tested: FunctionUnderTest) -> tuple[bool, ...]:
    """Whether it may hide later keys without being asked to: as stated, or both."""
    causal = tested.stated.causal
    if tested.callee.steps:
        return (True,)
    if "causal" in tested.callee.roles or causal is False:
        return (False,)
    return (True,) if causal else (False, True)


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


def _layouts(tested: FunctionUnderTest) -> list[Convention]:
    """Every layout that gives an output of the right shape, in the first dtype that does."""
    dtypes = ("float32",) if tested.callee.framework == "jax" else ("float64", "float32")
    ready = tested.callee.kind in ("arrays", "self")
    kept = (False, True) if {"lse", "delta"} & tested.callee.roles.keys() else (False,)
    for dtype in dtypes:
        found = []
        for layouts in (*READY_LAYOUTS, ("D",)) if ready else EMBEDDED_LAYOUTS:
            if tested.callee.says_transposed and not ready:  # W @ x: tokens may be columns
                layouts = (*layouts, *(one[:-2] + "ML" for one in layouts if one.endswith("LM")))
            if not tested.callee.rows_first:
                layouts = tuple(one for one in layouts if one != "LBM")
            told = "" if ready else _embedded_as_told(tested.callee)
            if told == "BML" and "BLM" in layouts:
                layouts = ("BML",)
            layouts = tuple(sorted(layouts, key=lambda one: bool(told) and one != told))
            said = tested.callee.layout
            if ready and tested.stated.layout is None and said in layouts:
                layouts = (said, *(one for one in layouts if one != said))
            if tested.stated.layout is not None:
                layouts = tuple(one for one in layouts if one == tested.stated.layout)
            fits: list[tuple[Convention, Fit]] = []
            if "borders" in tested.callee.roles:  # texts one after the other have no batch
                layouts = tuple(one for one in layouts if "B" not in one and "L" in one)
                layouts = tuple(sorted(layouts, key=lambda one: one != "LHD"))
            if mask_role(tested.callee) in OF_KEYS:  # one for each batch element
                layouts = tuple(sorted(layouts, key=lambda one: "B" not in one))
            for layout, keeps in itertools.product(layouts, kept):
                of_keys = "LD" if layout == "D" else ""
                bare = Convention(layout=layout, dtype=dtype, keeps_axis=keeps, keys=of_keys)
                bare = replace(bare, transposed=layout.endswith("ML") and told != "BML")
                fits += [(one, _fit(tested, one)) for one in _with_required_mask(tested, bare)]
                fitting = fits and fits[-1][1]
                if fitting is Fit.RIGHT or (layout == said and fitting not in ([], Fit.NONE)):
                    break
            # The first of the best: square arrays fit more orders than the one that is meant.
            best = max(fits, key=lambda one: one[1].value, default=None)
            if best is not None and best[1] is not Fit.NONE:
                found.append(best)
        if not ready and any(len(one.layout) == 2 for one, _ in found) and _of_one_text(tested):
            found = [one for one in found if len(one[0].layout) == 2]
        # If one layout takes more keys than queries, one that refuses them was not meant.
        if ready and any(fit in (Fit.RECTANGULAR, Fit.RIGHT) for _, fit in found):
            found = [one for one in found if one[1] is not Fit.SQUARE]
        # A function that is right on more axes was not written for fewer, where it is not.
        if found and max(found, key=lambda one: len(one[0].layout))[1] is Fit.RIGHT:
            found = [one for one in found if one[1] is Fit.RIGHT]
        elif not tested.callee.batched:
            right = [one for one in found if one[1] is Fit.RIGHT]
            # One query alone may run, and be right, by accident.
            found = right if any(len(one.layout) > 1 for one, _ in right) else found
        if ready and Fit.RIGHT not in (fit for _, fit in found):
            single = _of_one_query(tested, dtype)
            found = single if not found or (single and single[0][1] is Fit.RIGHT) else found
        if ready and not found:
            orders = sorted(SHARED_LAYOUTS, key=lambda one: one != tested.callee.layout)
            shared = [Convention(one, dtype, shared=True) for one in orders]
            fitting = [(one, _fit(tested, one)) for one in shared]
            right = [one for one in fitting if one[1] is Fit.RIGHT]
            found = (right or [one for one in fitting if one[1] is not Fit.NONE])[:1]
        if tested.callee.is_backward and any(one.layout == told for one, _ in found):
            found = [one for one in found if one[0].layout == told]  # others ran by accident
        if found:
            return [_with_output_position(tested, convention) for convention, _ in found]
    return []


def _embedded_as_told(callee: Callee) -> str:
    """The layout of embeddings with three axes, where documentation tells their axes."""
    own = next((callee.roles[one].name for one in ("x", "query") if one in callee.roles), "")
    axes = re.sub("[^BT]", "M", callee.axes.get(own, "")).replace("T", "L")
    if axes == "BML":  # not where both words may be of tokens: b, n, m = x.shape
        text = "\n".join(block for _, block in callee.blocks)
        words = documented_axes(text, [own]).get(own, ())
        axes = axes * (len(words) == len(axes) and not is_of_tokens(words[1]))
    return axes if axes in ("BLM", "LBM", "BML") else ""


def _of_one_text(tested: FunctionUnderTest) -> bool:
    """Whether embeddings are documented as those of one text, such as xs: (T, dim)."""
    x = tested.callee.roles.get("x")
    return x is not None and len(tested.callee.axes.get(x.name, "")) == 2


def _of_one_query(tested: FunctionUnderTest, dtype: str) -> list[tuple[Convention, Fit]]:
    """The layout of a function that takes one query for each head and batch element, if it does.

    Where no usual layout fits at all it may be wrong, and otherwise not.
    """
    if tested.stated.layout is not None or tested.callee.is_backward:
        return []
    found: list[tuple[Convention, Fit]] = []
    for layout, keys in ONE_QUERY_LAYOUTS:
        bare = Convention(layout=layout, dtype=dtype, keys=keys)
        found += [(one, _fit(tested, one)) for one in _with_required_mask(tested, bare)]
    right = [one for one in found if one[1] is Fit.RIGHT]
    return right[:1] or [one for one in found if one[1] is not Fit.NONE][:1]


def _with_required_mask(tested: FunctionUnderTest, bare: Convention) -> list[Convention]:
    """The same with a kind and shape of an all-visible mask that it takes, if it needs a mask."""
    role = mask_role(tested.callee)
    if role is None or not tested.callee.needs_mask:
        return [bare]
    shapes = KEYS_ONLY if role in OF_KEYS else MASK_SHAPES + KEY_MASK_SHAPES
    kinds = _mask_kinds(tested)
    running = None
    for shape, kind in itertools.product(dict.fromkeys(shapes), kinds):
        one = replace(bare, mask=kind, mask_shape=shape)
        for always in always_causal(tested):
            own = replace(one, causal_always=always)
            probe = next((p for p in tested.probes_for(own) if p.ability not in RULED), None)
            if probe is None or tested.ask(own, probe).output is None:
                break
            running = running or one
            if tested.is_right(own, probe):
                return [one]
    return [] if running is None else [running]


def _mask_kinds(tested: FunctionUnderTest) -> tuple[str, ...]:
    """The kinds of masks that its parameter may take: as stated, by its name, or any."""
    roles = tested.callee.roles
    if tested.stated.mask is not None:
        return (tested.stated.mask,)
    if "mask" in roles and tested.callee.mask_means and not tested.callee.says_added:
        return tuple(one for one in ANY_KIND if one != "add")
    if "mask" in roles:
        return ANY_KIND
    return next((own for role, own in KINDS_BY_ROLE.items() if role in roles), ANY_KIND)


class Fit(Enum):
    """How well a layout fits: not at all, on square arrays, on any, or with right results."""

    NONE, SQUARE, RECTANGULAR, RIGHT = range(4)


def _fit(tested: FunctionUnderTest, convention: Convention) -> Fit:
    fit = Fit.NONE
    for always in always_causal(tested):
        own = replace(convention, causal_always=always)
        answered = [
            probe
            for probe in tested.probes_for(own)
            if probe.ability not in (*RULED, "grouped")
            and not probe.name.startswith("cube")
            and tested.ask(own, probe).output is not None
        ]
        if any(tested.is_right(own, probe) for probe in answered):
            return Fit.RIGHT
        if any(probe.sizes["L"] != probe.sizes["S"] for probe in answered):
            fit = Fit.RECTANGULAR
        elif answered and fit is Fit.NONE:
            fit = Fit.SQUARE
    return fit


def _with_output_position(tested: FunctionUnderTest, convention: Convention) -> Convention:
    """Which of several results is the output, from a probe where shapes tell them apart."""
    for causal_always in (False, True):
        own = replace(convention, causal_always=causal_always)
        for probe in tested.probes_for(own):
            answer = tested.ask(own, probe)
            if probe.sizes["E"] != probe.sizes["S"] and answer.output is not None:
                rows_first = tuple(probe.sizes[axis] for axis in "BLHE")
                turned = own.layout == READY and answer.shape == rows_first
                return replace(convention, output_at=answer.position, turned_output=turned)
    return convention


def _with_masks(tested: FunctionUnderTest, base: list[Convention]) -> list[list[Convention]]:
    """The same with every kind of mask that runs, or with the first that gives right results."""
    if mask_role(tested.callee) is None:
        return [base]
    kinds = _mask_kinds(tested)
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

"""Finding out in which order of axes a function takes its arrays.

Must not know mistakes, nor what comes after: shapes of masks, alignment and the rest.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from enum import Enum

from regard.diagnosis.calls.arguments import KEYS_ONLY, mask_role
from regard.diagnosis.calls.convention import MASK_KINDS, READY, Convention
from regard.diagnosis.calls.probes import ABILITIES
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.documented import documented_axes, is_of_tokens
from regard.diagnosis.reading.signature import OF_KEYS, OF_TEXTS, Callee
from regard.errors import OptionError, safe_text

# Abilities that need a mask, a causal flag, a window, a cache or a scale.
RULED = tuple(ABILITIES)[tuple(ABILITIES).index("mask") :]
MASK_SHAPES = ("full", "cells", "batch cells", "batch 1 cells", "head cells", "1 head cells")
KEY_MASK_SHAPES = (*KEYS_ONLY, "full", "batch cells", "batch 1 cells", "cells")
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
SHARED_LAYOUTS = ("BHLD", "HBLD", "BLHD", "HLD", "LHD")  # of queries, with keys that have no heads
EMBEDDED_LAYOUTS: tuple[tuple[str, ...], ...] = (("LM",), ("BLM", "LBM"))


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


def always_causal(tested: FunctionUnderTest) -> tuple[bool, ...]:
    """Whether it may hide later keys without being asked to: as stated, or both."""
    causal = tested.stated.causal
    if tested.callee.steps:
        return (True,)
    if "causal" in tested.callee.roles or causal is False:
        return (False,)
    return (True,) if causal else (False, True)


def layouts_of(tested: FunctionUnderTest) -> list[Convention]:
    """Every layout that gives an output of the right shape, in the first dtype that does."""
    narrow = tested.callee.narrow or tested.callee.framework == "jax"
    dtypes = ("float32",) if narrow else ("float64", "float32")
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
            if (
                ready
                and best
                and said in layouts
                and best[0].layout != said
                and best[1] is not Fit.RIGHT
            ):
                continue  # it ran by accident, where the one that is meant did not
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
    kinds = mask_kinds(tested)
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


def mask_kinds(tested: FunctionUnderTest) -> tuple[str, ...]:
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

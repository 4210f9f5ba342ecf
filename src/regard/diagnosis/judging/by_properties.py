"""What can be said of an attention whose scores are not known: what holds for every attention.

Batch elements stay apart, padding changes nothing, and weights add up to 1. Must not know mistakes,
nor any probe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.observations import OF_POSITIONS, TO_QUERIES_AND_KEYS
from regard.diagnosis.judging.token_calls import (
    BATCH,
    COUNTED,
    KINDS,
    LISTED,
    REAL,
    TOKENS,
    Calls,
    Way,
    kinds_of,
    ways,
)
from regard.diagnosis.process.sublayers import DOUBLED, SILENT

HELD = {
    "batch_elements_mixed": "texts of a batch stay apart",
    "padding_changes_the_output": "padded tokens change nothing",
    "padding_one_key_more": "padding begins where it should",
    "padding_one_key_less": "padding begins where it should",
    "weights_do_not_add_up": "beside padding the weights add up to 1",
    "later_tokens_seen": "later tokens are hidden",
    "weights_all_equal": "tokens get different weights",
    "queries_without_effect": "each query gets something else",
    "normalised_input_added": "the input is added as it came",
    "sublayer_lost": "what each layer computes reaches the output",
    "positions_in_values": "positions change no values",
    "scale_of_a_part": "scores are divided by the root of the width of queries and keys",
}
POSITIONED = re.compile("pos|rope|rotary|alibi|relative|decay|order", re.IGNORECASE)
ADDITIVE = re.compile(r"bahdanau|additive[ _]?(attention|score)", re.IGNORECASE)
MOST_CALLS = 160
SAME_SHARE = 1e-3  # of a width, which a factor gives


@dataclass(frozen=True)
class Measured:
    """What holds, what does not, each by a name, and how the function was called."""

    broken: tuple[str, ...]
    held: tuple[str, ...]
    call: str
    seen: Mapping[str, str] = field(default_factory=dict)  # what was seen of what is broken


def by_properties(tested: FunctionUnderTest) -> Measured | None:
    """The properties of a function that can be called with tokens at all; else None."""
    calls = Calls(tested)
    for way in ways(tested.callee):
        arrays = calls.draw(way)
        output = calls.put(way, arrays, real=TOKENS)
        again = None if output is None else calls.put(way, arrays, real=TOKENS)
        if output is None or again is None or not _same(output, again):
            pass  # it cannot be called so, or is random
        elif np.isfinite(output).all() and output.size > 1:
            if not _reads_others(calls, way, arrays, output):
                apart = _apart(calls, way, arrays, output)
                if tested.callee.rows_first or all(apart.values()):
                    return None  # no attention at all
                return Measured(tuple(apart), (), _words(way))  # it reads other texts instead
            found = {**_apart(calls, way, arrays, output), **_masked(calls, way, arrays)}
            found |= _evenly(calls, way, arrays, output)
            if found.get("weights_all_equal") is False and _inverted(calls, way, arrays, output):
                return Measured(("mask_inverted",), (), _words(way))
            found |= _later(calls, way, arrays, output)
            found |= {} if "weights_do_not_add_up" in found else _by_length(calls, way, arrays)
            found |= _of_queries(calls, way, arrays, output) | _of_positions(calls, way, arrays)
            seen = dict[str, str]()
            for own, texts in (_scaled(calls, way, arrays), _of_parts(calls, way, arrays)):
                found, seen = found | own, seen | texts
            if output.shape[-1] == TOKENS and not {*output.shape} & {*way.lengths.values()}:
                found.pop("weights_do_not_add_up", None)  # they are what it returns
            broken = tuple(name for name, holds in found.items() if not holds)
            held = tuple(name for name, holds in found.items() if holds)
            return Measured(broken, held, _words(way), seen)
        elif way.kind == COUNTED and any((_influence(calls, way, arrays) or ())[REAL:]):
            return Measured(("padding_changes_the_output",), (), _words(way))
        if calls.count > MOST_CALLS:
            break
    return None


def _words(way: Way) -> str:
    return ", ".join(f"{name} ({', '.join(axes)})" for name, axes in way.axes.items())


def _reads_others(calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> bool:
    """Whether a token changes what another one gets; of pooled texts, what they get."""
    changed = dict(arrays)
    for name, axes in way.axes.items():
        if "T" in axes:
            rows = changed[name] = arrays[name].copy()
            np.moveaxis(rows, axes.index("T"), 0)[0] += 0.9
    after = calls.put(way, changed, real=TOKENS)
    if after is None or after.shape != output.shape:
        return False
    if TOKENS in output.shape:
        place = output.shape.index(TOKENS)
        return not _same(output.take(-1, place), after.take(-1, place))
    return not _same(output, after)


def _apart(calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
    """Whether the first text's output stays the same if the last text changes."""
    place = _batch_axis(way, output)
    if place is None:
        return {}
    changed = {}
    for name, array in arrays.items():
        changed[name] = array.copy()
        if "B" in way.axes[name]:
            np.moveaxis(changed[name], way.axes[name].index("B"), 0)[-1] += 0.7
    after = calls.put(way, changed, real=TOKENS)
    if after is None:
        return {}
    same = _same(output.take(0, place), after.take(0, place))
    return {"batch_elements_mixed": same}


def _batch_axis(way: Way, output: Array) -> int | None:
    if not any("B" in axes for axes in way.axes.values()) or BATCH not in output.shape:
        return None
    return output.shape.index(BATCH)


def _masked(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Whether padding changes the output, and whether weights add up to 1 beside padding."""
    if not way.mask:
        return {}
    role = next(p for p in calls.tested.callee.parameters if p.name == way.mask)
    kinds = kinds_of(calls.tested.callee, role)
    seen = []
    for kind in kinds:
        first = calls.tested.callee.says_causal and kind in KINDS
        own = replace(way, kind=kind, first=first, square=way.square or kind == LISTED)
        influence = _influence(calls, own, arrays)
        seen += [] if influence is None else [any(influence[REAL:])]
        # A mask of another kind than is meant hides real tokens, or nothing at all.
        if influence is None or not influence[1] or all(influence):
            continue
        if not any(influence[REAL:]):
            less = not influence[REAL - 1]
            meant = less or "weights_do_not_add_up" in calls.tested.callee.meant
            add_up = {} if meant else _add_up(calls, own, arrays)
            name = "padding_one_key_less" if less else "padding_changes_the_output"
            return {name: not less} | add_up
        if not any(influence[REAL + 1 :]):
            return {"padding_one_key_more": False}
    return {"padding_changes_the_output": False} if seen and all(seen) else {}


def _influence(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> tuple[bool, ...] | None:
    """Whether each token of the first text changes what its last real row gets."""
    before = calls.put(way, arrays, real=REAL)
    if before is None or not np.isfinite(_first(way, before)).all():
        return None
    found = []
    for token in range(TOKENS):
        changed = dict(arrays)
        for name, axes in way.axes.items():
            if "T" in axes:
                rows = changed[name] = arrays[name].copy()
                own = np.moveaxis(rows, axes.index("T"), 0)
                own[(token, 0) if "B" in axes else token] += 0.9
        after = calls.put(way, changed, real=REAL)
        if after is None:
            return None
        found.append(not _same(_first(way, before), _first(way, after)))
    return tuple(found[::-1] if way.first else found)


def _first(way: Way, output: Array) -> Array:
    """What the first text, and of several rows the last real one, gets."""
    place = _batch_axis(way, output)
    own = output if place is None else output.take(0, place)
    last = TOKENS - 1 if way.first else REAL - 1
    return own.take(last, own.shape.index(TOKENS)) if TOKENS in own.shape else own


def _add_up(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Padding may not change the mean of tokens that are all the same."""
    same = {
        name: np.ones_like(array) * array.take([0], way.axes[name].index("T"))
        if "T" in way.axes[name]
        else array
        for name, array in arrays.items()
    }
    whole, part = calls.put(way, same, real=TOKENS), calls.put(way, same, real=REAL)
    if whole is None or part is None:
        return {}
    return {"weights_do_not_add_up": _same(_first(way, whole), _first(way, part))}


def _by_length(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Tokens that are all the same give the same, however many, if a softmax makes the weights."""
    code = " ".join(text for _, text in calls.tested.callee.blocks)
    additive = ADDITIVE.search(code) is not None
    ordered = calls.tested.callee.has_positions or (POSITIONED.search(code) and not additive)
    meant = "weights_do_not_add_up" in calls.tested.callee.meant and not additive
    shares = re.search(r"softmax|exp\(", code) and not meant
    if way.kind or way.square or not shares or ordered:
        return {}
    found = []
    for length in (TOKENS, TOKENS + 2):
        same = {
            name: np.repeat(array.take([0], axes.index("T")), length, axes.index("T"))
            if "T" in (axes := way.axes[name])
            else array
            for name, array in arrays.items()
        }
        output = calls.put(way, same, real=length)
        if output is None:
            return {}
        place = _batch_axis(way, output)
        own = output if place is None else output.take(0, place)
        found.append(own.take(0, own.shape.index(length)) if length in own.shape else own)
    if found[0].shape != found[1].shape:
        return {}
    return {"weights_do_not_add_up": _same(*found)}


def _later(calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
    """Whether the last token leaves the first one's output alone, where the code says so."""
    callee, names = calls.tested.callee, list(way.axes)
    place = output.shape.index(TOKENS) if TOKENS in output.shape else None
    flagged = "causal" in callee.roles or "later_tokens_seen" in callee.meant
    if place is None or flagged or not callee.says_causal or len(names) > 1:
        return {}
    rows = arrays[names[0]].copy()
    np.moveaxis(rows, way.axes[names[0]].index("T"), 0)[-1] += 0.9
    after = calls.put(way, {names[0]: rows}, real=TOKENS)
    if after is None or after.shape != output.shape:
        return {}
    return {"later_tokens_seen": _same(output.take(0, place), after.take(0, place))}


Seen = tuple[dict[str, bool], dict[str, str]]  # what holds, and what was seen of what does not


def _scaled(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> Seen:
    """Whether q·k is divided by the root of the width of q and k, and not by that of a part."""
    factors = calls.factors(way, arrays)
    for factor, width in factors:
        parts = factor**-2 if factor > 0 else 0.0
        if abs(parts - width) < SAME_SHARE * width:
            return {"scale_of_a_part": True}, {}
        # A single feature more may come of the sizes that were chosen for an object.
        if 1 < round(parts) < width - 1 and abs(parts - round(parts)) < SAME_SHARE * parts:
            seen = f"q·k is multiplied by {factor:.4g} = 1/√{round(parts)}"
            text = f"{seen}; q and k are {width:g} wide."
            return {"scale_of_a_part": False}, {"scale_of_a_part": text}
    return {}, {}


def _of_parts(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> Seen:
    """Whether a block of several layers adds what each of them computes to what it got."""
    outputs = calls.of_parts(way, arrays)
    silent, doubled = outputs.pop(SILENT, None), outputs.pop(DOUBLED, None)
    if silent is None or doubled is None or not _same(silent, next(iter(arrays.values()))):
        return {}, {}
    kept = _same(silent, doubled) or calls.tested.callee.norm_place != "first"
    lost = [name for name, one in outputs.items() if _same(silent, one)]
    text = f"Whatever {lost[0]} returns, the output is the same." if lost else ""
    return {"normalised_input_added": kept, "sublayer_lost": not lost}, {"sublayer_lost": text}


def _of_positions(calls: Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Whether positions that are those of queries and keys leave equal values as they are."""
    callee = calls.tested.callee
    names = [one.name for one in callee.parameters if OF_POSITIONS.search(one.name)]
    code = "\n".join(text for _, text in callee.blocks)
    if not names or {*names} & arrays.keys() or not TO_QUERIES_AND_KEYS.search(code):
        return {}
    same = {
        name: np.ones_like(array) * array.take([0], way.axes[name].index(axis))
        for name, array in arrays.items()
        for axis in way.axes[name]
        if axis in "TLO" or (axis.islower() and axis == way.axes[name][0])
    }
    if same.keys() != arrays.keys() or (before := calls.put(way, same, real=TOKENS)) is None:
        return {}
    found = []
    for name, rows in itertools.product(names, same.values()):
        drawn = np.random.default_rng(5).normal(size=rows.shape)
        after = calls.put(way, {**same, name: drawn}, real=TOKENS)
        if after is not None and after.shape == before.shape:
            found.append(_same(before, after))
    return {"positions_in_values": all(found)} if found else {}


def _of_queries(
    calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array
) -> dict[str, bool]:
    """Whether other queries get other results."""
    names = [one.name for one in calls.tested.callee.parameters if one.role == "query"]
    if len(arrays) < 2 or not {*names} & arrays.keys():
        return {}
    own = next(name for name in names if name in arrays)
    drawn = np.random.default_rng(9).normal(size=arrays[own].shape)
    after = calls.put(way, {**arrays, own: drawn}, real=TOKENS)
    return {} if after is None else {"queries_without_effect": not _same(output, after)}


def _evenly(calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
    """Whether a pooled text is more than the mean of its tokens."""
    (name, axes), *others = way.axes.items()
    if others or "T" not in axes or "B" not in axes:
        return {}
    mean = arrays[name].mean(axes.index("T"))
    mean = mean if axes.index("B") == 0 or axes == "TBM" else mean.T
    return {"weights_all_equal": not _same(mean, output)} if mean.shape == output.shape else {}


def _inverted(calls: Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> bool:
    """Whether a mask that hides all, as its text says it, is one that hides nothing."""
    if not way.kind or not calls.tested.callee.mask_means:
        return False
    other = calls.put(way, arrays, real=0)
    return other is not None and bool(np.isfinite(other).all()) and not _same(other, output)


def _same(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    size = max(1.0, float(np.abs(np.nan_to_num(one)).max(initial=0)))
    return bool(np.allclose(one, other, rtol=0, atol=1e-5 * size, equal_nan=True))

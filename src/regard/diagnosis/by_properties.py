"""What can be said of an attention whose scores are not known: what holds for every attention.

Batch elements stay apart, padding changes nothing, and weights add up to 1. Must not know mistakes,
nor any probe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.convention import Question
from regard.diagnosis.observations import OF_POSITIONS, TO_QUERIES_AND_KEYS
from regard.diagnosis.signature import EDGES, MASKS, OF_KEYS, Callee, Parameter
from regard.diagnosis.under_test import FunctionUnderTest

# What is measured, in the words for a function of which it holds.
HELD = {
    "batch_elements_mixed": "texts of a batch stay apart",
    "padding_changes_the_output": "padded tokens change nothing",
    "padding_one_key_more": "padding begins where it should",
    "padding_one_key_less": "padding begins where it should",
    "weights_do_not_add_up": "beside padding the weights add up to 1",
    "later_tokens_seen": "later tokens are hidden",
    "weights_all_equal": "tokens get different weights",
    "normalised_input_added": "the input is added as it came",
    "sublayer_lost": "what each layer computes reaches the output",
    "positions_in_values": "positions change no values",
    "scale_of_a_part": "scores are divided by the root of the width of queries and keys",
}
BATCH, TOKENS, ROWS, REAL = 3, 5, 4, 3
SIDE = 4  # of an image, whose pixels are tokens
LENGTHS = (4, 6, 8, 2, 10, 12)  # of axes that are neither texts nor tokens
MASK = re.compile("mask|adj|pad|valid|edge_?(index|list)|^edges$", re.IGNORECASE)
POSITIONED = re.compile("pos|rope|rotary|alibi|relative|decay|order", re.IGNORECASE)
GRAPH = re.compile("^adj|edge", re.IGNORECASE)
MOST_CALLS = 160
SAME_SHARE = 1e-3  # of a width, which a factor gives
OF_TOKENS = ("x", "query", "key", "value", "context", "key_value")
# The axes that tokens may have: one array of them, or a query and what it reads.
ALONE = ("BTM", "BMT", "TM", "BMhw", "TBM")
READING = (("BM", "BTM"), ("BLM", "BTM"), ("OBM", "TBM"), ("BM", "TBM"), ("M", "TM"), ("LM", "TM"))
# What a mask of tokens may be: its numbers where a token is real, and where it is not.
KINDS: dict[str, tuple[Any, Any]] = {
    "True for real tokens": (True, False),
    "1 for real tokens": (1, 0),
    "True for padding": (False, True),
    "0 for real tokens and −inf for padding": (0.0, -np.inf),
    "1.0 for real tokens": (1.0, 0.0),
}
LISTED = "edges of a graph, as a list"
COUNTED, SHARE = "the number of real tokens", "the share of real tokens"


@dataclass(frozen=True)
class Way:
    """One way of calling: the axes and widths of each array, and the kind of mask that it needs."""

    axes: Mapping[str, str]
    widths: Mapping[str, int]
    mask: str = ""  # the parameter
    kind: str = ""
    square: bool = False  # a mask (T, T), as of a graph
    lengths: Mapping[str, int] = field(default_factory=dict)  # of axes that are documented
    first: bool = False  # whether padding comes before the text: causal code hides what follows

    def size(self, axis: str, name: str) -> int:
        """How long an axis is."""
        own = {"B": BATCH, "T": TOKENS, "L": ROWS, "O": 1, "M": self.widths.get(name), "1": 1}
        return (own | dict(self.lengths)).get(axis) or SIDE


@dataclass(frozen=True)
class Measured:
    """What holds, what does not, each by a name, and how the function was called."""

    broken: tuple[str, ...]
    held: tuple[str, ...]
    call: str
    scale: str = ""  # what was seen of a wrong one


def by_properties(tested: FunctionUnderTest) -> Measured | None:
    """The properties of a function that can be called with tokens at all; else None."""
    calls = _Calls(tested)
    for way in _ways(tested.callee):
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
                return Measured(("mask_inverted",), (), _words(way), "")
            found |= _later(calls, way, arrays, output)
            found |= {} if "weights_do_not_add_up" in found else _by_length(calls, way, arrays)
            scaled, scale = _scaled(calls, way, arrays)
            found |= scaled | _of_parts(calls, way, arrays) | _of_positions(calls, way, arrays)
            broken = tuple(name for name, holds in found.items() if not holds)
            held = tuple(name for name, holds in found.items() if holds)
            return Measured(broken, held, _words(way), scale)
        elif way.kind == COUNTED and any((_influence(calls, way, arrays) or ())[REAL:]):
            return Measured(("padding_changes_the_output",), (), _words(way))
        if calls.count > MOST_CALLS:
            break
    return None


def _words(way: Way) -> str:
    return ", ".join(f"{name} ({', '.join(axes)})" for name, axes in way.axes.items())


def _documented(callee: Callee) -> Iterator[Way]:
    """The ways in which the arguments have the axes that the code or its documentation gives."""
    needed = [one for one in callee.parameters if one.required]
    axes = {one.name: callee.axes[one.name] for one in needed if one.name in callee.axes}
    if len(axes) < len(needed) or not any("T" in own for own in axes.values()):
        return
    weights = [one.name for one in needed if (one.role or one.name)[:1] in "wW"]
    if any("T" in axes[name] for name in weights):  # it is the width, and not the tokens
        return
    counted = [one for one in needed if one.role == "lengths" or axes[one.name] == "B"]
    named = (one for one in needed if one.role in OF_KEYS or MASK.search(one.name))
    masks = [*counted, *named]
    mask = next(iter(masks), None)
    kinds = [("", False)]
    if mask is None:
        hides = (one for one in callee.parameters if one.role in (*MASKS, "key_mask"))
        counts = (one for one in callee.parameters if callee.axes.get(one.name) == "B")
        mask = next(iter((*hides, *counts)), None)
    else:
        own = axes.pop(mask.name)
        listed = EDGES.search(mask.name) is not None
        kinds = [(kind, listed or own in ("TT", "BTT")) for kind in _kinds(callee, mask)]
        if not listed and own not in ("B", "T", "BT", "TT", "BTT", "B11T"):
            return
    letters = list(dict.fromkeys(axis for own in axes.values() for axis in own if axis.islower()))
    widths = [dict(zip(letters, LENGTHS, strict=False))]
    if callee.widths:  # its own weights say how wide arrays are
        some = itertools.product(callee.widths, repeat=min(len(letters), 3))
        widths = [dict(zip(letters, one, strict=False)) for one in some]
    for (kind, square), lengths in itertools.product(kinds, widths):
        yield Way(axes, {}, "" if mask is None else mask.name, kind, square, lengths)


def _ways(callee: Callee) -> Iterator[Way]:
    """Every way in which a function may take tokens, the likeliest first."""
    yield from _documented(callee)
    if not (callee.widths or callee.opaque):  # in a layout that nothing says, everything is mixed
        return
    needed = [one for one in callee.parameters if one.required]
    tokens = [one.name for one in callee.parameters if one.role in OF_TOKENS]
    tokens = [one.name for one in needed if one.name in tokens] or tokens[:1]
    masks = [one for one in callee.parameters if one.role in MASKS or one.role == "key_mask"]
    required = next((one for one in masks if one.required), None)
    if not tokens or any(one.name not in tokens and one is not required for one in needed):
        return
    mask = required or next(iter(masks), None)
    kinds = [("", False)]
    if required is not None:
        kinds = [(kind, square) for square in (False, True) for kind in _kinds(callee, required)]
    orders = [(one,) for one in ALONE] if len(tokens) == 1 else READING
    if required is not None and GRAPH.search(required.name):
        kinds, orders = [one for one in kinds if one[1]], [("TM",)]
    widths = callee.widths or (6,)
    pairs = [(w, w) for w in widths] + [(a, b) for a in widths for b in widths if a != b]
    pairs = [(w, w) for w in widths] if len(tokens) == 1 else pairs
    for (kind, square), axes, (own, other) in itertools.product(kinds, orders, pairs):
        first, rest = tokens[0], tokens[1:]
        yield Way(
            {first: axes[0]} | dict.fromkeys(rest, axes[-1]),
            {first: own} | dict.fromkeys(rest, other),
            "" if mask is None else mask.name,
            kind,
            square,
        )


def _kinds(callee: Callee, mask: Parameter) -> list[str]:
    if EDGES.search(mask.name):
        return [LISTED]
    if mask.role == "lengths" or callee.axes.get(mask.name) == "B":
        return [COUNTED, SHARE]
    hides = mask.role in ("hide", "key_hide")
    if mask.role == "key_keep" and callee.mask_means != "hide":  # by its name, or by a number
        return ["True for real tokens"]
    return sorted(KINDS, key=lambda kind: kind.startswith("True for padding") != hides)


class _Calls:
    """Calls of the function with arrays of tokens; each is one question."""

    def __init__(self, tested: FunctionUnderTest) -> None:
        self._tested, self.count = tested, 0

    def draw(self, way: Way) -> dict[str, Array]:
        rng = np.random.default_rng(7)
        return {
            name: rng.normal(size=[way.size(axis, name) for axis in axes])
            for name, axes in way.axes.items()
        }

    def put(self, way: Way, arrays: Mapping[str, Array], *, real: int) -> Array | None:
        """The first array of its answer, if `real` tokens of the first text are real; or None."""
        given = self._given(way, arrays, real)
        self.count += 1
        name = f"properties {self.count}"
        result = self._tested.put(Question(name, (given,), reading=self._tested.callee.number))[-1]
        return None if result.problem or not result.arrays else result.arrays[0].numbers

    def _given(self, way: Way, arrays: Mapping[str, Array], real: int) -> dict[str, Any]:
        given: dict[str, Any] = dict(arrays)
        if way.kind:
            given[way.mask] = self._mask(way, real)
        callee = self._tested.callee
        dtype = "float32" if callee.narrow or callee.framework == "jax" else "float64"
        return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in given.items()}

    def factors(self, way: Way, arrays: Mapping[str, Array]) -> Array:
        """By what q·k is multiplied in each softmax that is seen inside, and the width of q."""
        given = self._given(way, arrays, TOKENS)
        own = Question("a look", (given,), reading=self._tested.callee.number, looks="factors")
        result = self._tested.put(own)[-1]
        found = [one.numbers for one in result.arrays if one.shape == (1, 2)]
        found = [one for one in found if one is not None]
        return np.concatenate([np.empty((0, 2)), *found])

    def of_parts(self, way: Way, arrays: Mapping[str, Array]) -> list[Array]:
        """The outputs of a block whose layers are silenced; see sublayers.py."""
        given = self._given(way, arrays, TOKENS)
        own = Question("layers", (given,), reading=self._tested.callee.number, looks="parts")
        result = self._tested.put(own)[-1]
        found = [] if result.problem else [one.numbers for one in result.arrays]
        return [one for one in found if one is not None]

    def _mask(self, way: Way, real: int) -> Array:
        if way.kind == COUNTED:
            return np.array([real, *[TOKENS] * (BATCH - 1)])
        if way.kind == SHARE:
            return np.array([real / TOKENS, *[1.0] * (BATCH - 1)])
        seen = np.ones((TOKENS, TOKENS) if way.square else (BATCH, TOKENS), bool)
        seen[:, real:] = not way.square
        seen[0, real:] = False
        if way.square:
            seen[:, real:] = False
        seen = seen[:, ::-1] if way.first else seen
        if way.kind == LISTED:
            return np.stack(np.nonzero(seen)[::-1])
        yes, no = KINDS[way.kind]
        mask = np.asarray(np.where(seen, yes, no))
        axes = self._tested.callee.axes.get(way.mask, "")
        if axes == "T":
            mask = mask[0]
        if axes == "BTT":
            mask = np.broadcast_to(mask, (BATCH, TOKENS, TOKENS)).copy()
        return np.asarray(mask[:, None, None] if axes == "B11T" else mask)


def _reads_others(calls: _Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> bool:
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


def _apart(calls: _Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
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


def _masked(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Whether padding changes the output, and whether weights add up to 1 beside padding."""
    if not way.mask:
        return {}
    role = next(p for p in calls._tested.callee.parameters if p.name == way.mask)
    kinds = _kinds(calls._tested.callee, role)
    seen = []
    for kind in kinds:
        first = calls._tested.callee.says_causal and kind in KINDS
        own = replace(way, kind=kind, first=first)
        influence = _influence(calls, own, arrays)
        seen += [] if influence is None else [any(influence[REAL:])]
        # A mask of another kind than is meant hides real tokens, or nothing at all.
        if influence is None or not influence[1] or all(influence):
            continue
        if not any(influence[REAL:]):
            less = not influence[REAL - 1]
            meant = less or "weights_do_not_add_up" in calls._tested.callee.meant
            add_up = {} if meant else _add_up(calls, own, arrays)
            name = "padding_one_key_less" if less else "padding_changes_the_output"
            return {name: not less} | add_up
        if not any(influence[REAL + 1 :]):
            return {"padding_one_key_more": False}
    return {"padding_changes_the_output": False} if seen and all(seen) else {}


def _influence(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> tuple[bool, ...] | None:
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
                own = np.moveaxis(rows, axes.index("T"), 0)[token]
                (own[0] if "B" in axes else own)[...] += 0.9
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


def _add_up(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
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


def _by_length(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Tokens that are all the same give the same, however many, if a softmax makes the weights."""
    code = " ".join(text for _, text in calls._tested.callee.blocks)
    ordered = calls._tested.callee.has_positions or POSITIONED.search(code)
    shares = (
        re.search(r"softmax|exp\(", code)
        and "weights_do_not_add_up" not in calls._tested.callee.meant
    )
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


def _later(calls: _Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
    """Whether the last token leaves the first one's output alone, where the code says so."""
    callee, names = calls._tested.callee, list(way.axes)
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


def _scaled(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> tuple[dict[str, bool], str]:
    """Whether q·k is divided by the root of the width of q and k, and not by that of a part.

    And the numbers, if it is not.
    """
    factors = calls.factors(way, arrays)
    for factor, width in factors:
        parts = factor**-2 if factor > 0 else 0.0
        if abs(parts - width) < SAME_SHARE * width:
            return {"scale_of_a_part": True}, ""
        # A single feature more may come of the sizes that were chosen for an object.
        if 1 < round(parts) < width - 1 and abs(parts - round(parts)) < SAME_SHARE * parts:
            seen = f"q·k is multiplied by {factor:.4g} = 1/√{round(parts)}"
            return {"scale_of_a_part": False}, f"{seen}; q and k are {width:g} wide."
    return {}, ""


def _of_parts(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Whether a block of several layers adds what each of them computes to what it got."""
    outputs = calls.of_parts(way, arrays)
    rows = next(iter(arrays.values()))
    if len(outputs) < 3 or not _same(outputs[0], rows):
        return {}
    silent, doubled, *told = outputs
    kept = _same(silent, doubled) or calls._tested.callee.norm_place != "first"
    lost = any(_same(silent, one) for one in told)
    return {"normalised_input_added": kept, "sublayer_lost": not lost}


def _of_positions(calls: _Calls, way: Way, arrays: Mapping[str, Array]) -> dict[str, bool]:
    """Whether positions that are those of queries and keys leave equal values as they are."""
    callee = calls._tested.callee
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
        found += [] if after is None else [_same(before, after)]
    return {"positions_in_values": all(found)} if found else {}


def _evenly(calls: _Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> dict[str, bool]:
    """Whether a pooled text is more than the mean of its tokens."""
    (name, axes), *others = way.axes.items()
    if others or "T" not in axes or "B" not in axes:
        return {}
    mean = arrays[name].mean(axes.index("T"))
    mean = mean if axes.index("B") == 0 or axes == "TBM" else mean.T
    return {"weights_all_equal": not _same(mean, output)} if mean.shape == output.shape else {}


def _inverted(calls: _Calls, way: Way, arrays: Mapping[str, Array], output: Array) -> bool:
    """Whether a mask that hides all, as its text says it, is one that hides nothing."""
    if not way.kind or not calls._tested.callee.mask_means:
        return False
    other = calls.put(way, arrays, real=0)
    return other is not None and bool(np.isfinite(other).all()) and not _same(other, output)


def _same(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    size = max(1.0, float(np.abs(np.nan_to_num(one)).max(initial=0)))
    return bool(np.allclose(one, other, rtol=0, atol=1e-5 * size, equal_nan=True))

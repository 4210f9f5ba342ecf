"""What a page carries: numbers as bytes, declarations, labels and words as plain data.

Owns the shape of the embedded data. Numbers are never written as decimals: NaN and infinity are not
JSON, and a float64 must come back as it was. Must not know HTML.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.errors import safe_text
from regard.explanation import questions
from regard.explanation.derivation import Values
from regard.explanation.labels import own_head
from regard.explanation.trace import READING_NOTE, Trace
from regard.masks import Causal, Lengths, Segments, Window
from regard.rules.visibility import (
    All,
    AllowedByBias,
    AnyOf,
    Block,
    Boolean,
    Combined,
    LeftOut,
    Mask,
    Not,
)
from regard.textbook.operation import Operation
from regard.textbook.operations import OPERATIONS
from regard.textbook.steps import LETTERS, Step
from regard.views import story
from regard.views.head_view import Head
from regard.views.picture import picture
from regard.views.report.plan import Plan, pooled

if TYPE_CHECKING:
    from numpy.typing import NDArray
from regard.views.report.summary import checks, countable, scale_words
from regard.views.report.whatif import (
    ADDED,
    BITS,
    MASKED,
    REACH,
    Form,
    conditions,
    form_of,
    fullest,
    has_gradients,
    variants,
)
from regard.views.step_words import SPREAD, sentences

# More of a label than this is never shown.
LABEL_LENGTH = 201


def page_data(explanations: Mapping[str, Trace], plan: Plan, digits: int) -> Data:
    """Everything that the script of a page needs."""
    data = Data()
    first = next(iter(explanations.values()))
    data.content = {
        "letters": LETTERS,
        "bits": BITS,
        "masked": MASKED,
        "digits": digits,
        "reach": REACH,
        "readingNote": READING_NOTE,
        "spread": SPREAD,
        "title": safe_text(first.title, 200),
        "layers": [
            _layer(data, name, explanation, plan) for name, explanation in explanations.items()
        ],
        "declarations": data.declarations.items,
        "labelSets": data.label_sets.items,
        "sentences": data.sentences.items,
        "pictures": data.pictures.items,
    }
    used = dict.fromkeys(declared[3] for declared in data.declarations.items)
    offered = {name for layer in data.content["layers"] for name in layer["switches"]}
    data.content["switches"] = {name: story.WHAT_IF[name]["words"] for name in sorted(offered)}
    data.content["operations"] = {name: _words(OPERATIONS[name]) for name in used}
    return data


class Data:
    """The plain content, and one run of bytes that its arrays point into."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self.declarations = Pool(list)
        self.label_sets = Pool(lambda labels: None if labels is None else list(labels))
        self.sentences = Pool(str)
        self.pictures = Pool(_picture)
        self._bytes = bytearray()
        self._places: dict[tuple[str, bytes], int] = {}

    def array(self, array: Array, *, tight: bool = False) -> dict[str, Any]:
        """Where an array's bytes are; `tight` allows numbers to be rounded to 32 bits."""
        flat = np.ascontiguousarray(array).reshape(-1)
        if flat.dtype == np.bool_:
            return self._place("bit", np.packbits(flat, bitorder="little"), flat.size)
        flat = flat.astype(np.float64, copy=False)
        if flat.size > 1 and (flat.view(np.uint64) == flat.view(np.uint64)[0]).all():
            return {**self._place("f8", flat[:1], flat.size), "fill": True}
        with np.errstate(over="ignore"):
            short = flat.astype("<f4")
        if tight or (short.astype(np.float64).view(np.uint64) == flat.view(np.uint64)).all():
            return self._place("f4", short, flat.size)
        return self._place("f8", flat.astype("<f8", copy=False), flat.size)

    def short(self, array: Array, dtype: str) -> dict[str, Any]:
        """As `array`, in 16 bits: f2 for what is only drawn, u2 for positions."""
        flat = np.ascontiguousarray(array).reshape(-1)
        with np.errstate(over="ignore"):
            return self._place(dtype, flat.astype(f"<{dtype}"), flat.size)

    def _place(self, dtype: str, stored: Array, count: int) -> dict[str, Any]:
        raw = stored.tobytes()
        at = self._places.get((dtype, raw))
        if at is None:
            self._bytes += b"\0" * (-len(self._bytes) % 8)
            at = self._places[dtype, raw] = len(self._bytes)
            self._bytes += raw
        return {"dtype": dtype, "at": at, "count": count}

    @property
    def base64(self) -> str:
        """All arrays."""
        return base64.b64encode(bytes(self._bytes)).decode("ascii")

    @property
    def json(self) -> str:
        """The content, such that no HTML parser finds anything in it."""
        text = json.dumps(self.content, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Pool:
    """Things that occur several times, each kept once and called by its number."""

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self.items: list[Any] = []
        self._plain = plain
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: Hashable) -> int:
        """The number of a thing; a new one is added."""
        if thing not in self._numbers:
            self._numbers[thing] = len(self.items)
            self.items.append(self._plain(thing))
        return self._numbers[thing]


def _words(operation: Operation) -> dict[str, Any]:
    """What the page cannot know of an operation by computing it."""
    fields = "lead names numbers term numpy nonzero total exact overflows latex_numbers"
    return {field: getattr(operation, field) for field in fields.split()}


def _picture(form: Form) -> dict[str, Any]:
    """The picture with every step that a switch or an edit may bring."""
    drawn = picture(variants(form)[fullest(form)])
    return {
        "slices": drawn.slices,
        **{
            kind: [[list(astuple(station)) for station in group] for group in groups]
            for kind, groups in (("wide", drawn.wide), ("narrow", drawn.narrow))
        },
    }


def _declaration(step: Step) -> tuple[str, ...]:
    """A step in few bytes; `stepOf` in carried.js reads it."""
    operands = " ".join(f"{ref.step}:{','.join(ref.index)}" for ref in step.operands)
    parts = [step.name, step.symbol, step.formula, step.op, " ".join(step.axes), operands]
    parts += [step.running, step.over.removeprefix("all"), step.of]
    parts += [step.phase.removeprefix("forward")]
    parts += [step.latex_symbol if step.latex_symbol != step.symbol else ""]
    while not parts[-1]:
        parts.pop()
    return tuple(parts)


# --- one layer -----------------------------------------------------------------------------------


def _layer(data: Data, name: str, explanation: Trace, plan: Plan) -> dict[str, Any]:
    source, layer = explanation.source, plan.layers[name]
    shown = layer.explanation
    own_rules = _without_bias(source.rules)
    form = form_of(shown)
    added = ADDED.keys() & {*form.switches}
    steps = shown.source.steps.values()
    axes = {axis for step in steps for axis in step.axes} - {"H", "G"}

    def parts(wanted: Iterable[Step]) -> dict[str, Any]:
        return {one.name: _parts(data, explanation, one, plan, layer.exact) for one in wanted}

    return {
        "name": safe_text(name, 200),
        "sizes": shown.source.sizes,
        "lead": list(source.lead),
        "labels": {
            axis: data.label_sets.number(_exported(explanation, axis)) for axis in sorted(axes)
        },
        "notes": {
            step: data.label_sets.number(tuple(safe_text(note, LABEL_LENGTH) for note in notes))
            for step, notes in explanation.row_notes.items()
            if step in shown.steps
        },
        "alone": "" if "L" in source.sizes else safe_text("".join(shown.labels.get("L", ())), 200),
        "switches": list(form.switches),
        "picture": data.pictures.number(form),
        "steps": [
            [data.declarations.number(_declaration(step)), bits, value]
            for step, bits, value in conditions(form)
        ],
        "rules": None if own_rules is None else _rule(data, own_rules, explanation.source),
        "positions": [_positions(one) for one in _rows(source.query_positions)],
        "given": {
            **parts(step for step in steps if step.op == "given"),
            **{name: _added(data, name, shown) for name in sorted(added) if layer.exact},
        },
        "known": parts(s for s in steps if plan.small and s.op not in ("given", "visible")),
        "words": {
            f"{batch}/{head.number}": {
                step: [data.sentences.number(sentence) for sentence in sentences(head, step)]
                for step in shown.steps
            }
            for batch, head in layer.exact
        },
        "aside": [*_aside(shown), *(["sink_shifted"] if "sink" in added else [])],
        **({"shared": _shared(explanation)} if has_gradients(shown) else {}),
        "countable": countable(shown),
        "scaleWords": scale_words(shown) if layer.exact else "",
        "expect": _expectations(data, explanation) if len(layer.exact) == len(layer.every) else [],
        "overview": {
            f"{batch}/{head.number}": _overview(data, head, plan)
            for batch, head in (layer.every if plan.overview else ())
        },
    }


def _aside(explanation: Trace) -> list[str]:
    """The steps that a reader is not led to; a mask that was given is none of them."""
    given = {"visible"} if _has_table(explanation.source.rules) else set()
    return [name for name in story.by_products(explanation) if name not in given]


def _shared(explanation: Trace) -> dict[str, str]:
    """Along which axes a bias and a sink were given once, for all their places."""
    source = explanation.source
    found: dict[str, str] = {}
    for name in {"bias", "sink"} & {*source.inputs}:
        axes, array = source.steps[name].axes, source.inputs[name]
        at = zip(axes, array.shape[array.ndim - len(axes) :], strict=True)
        strides = array.strides[array.ndim - len(axes) :]
        found[name] = "".join(
            axis
            for (axis, size), stride in zip(at, strides, strict=True)
            if size > 1 and not stride
        )
    return found


def _exported(explanation: Trace, axis: str) -> tuple[str, ...] | None:
    """Labels without control characters, cut to the length that is shown; None for positions."""
    if explanation.labels.get(axis) is None:
        return None
    return tuple(safe_text(label)[:LABEL_LENGTH] for label in explanation.names.along(axis))


def _parts(
    data: Data,
    explanation: Trace,
    step: Step,
    plan: Plan,
    exact: tuple[tuple[int, Head], ...],
) -> dict[str, Any]:
    """The numbers of a step, one array for each batch element and head that has its own."""
    source = explanation.source
    batched = len(source.shape(step.name)) > len(step.axes)
    parts: dict[str, Any] = {}
    for batch, head in exact:
        own = own_head(source.sizes, step, head.number)
        key = f"{batch if batched else '-'}/{'-' if own is None else own}"
        if key not in parts:
            rows = range(source.sizes["L"]) if "L" in step.axes else range(head.shape(step.name)[0])
            parts[key] = data.array(head.rows(step.name, rows), tight=plan.tight)
    return parts


def _added(data: Data, name: str, explanation: Trace) -> dict[str, Any]:
    """What a switch adds, the same for every head that has its own."""
    heads = explanation.heads if name == "sink" and explanation.heads else 0
    number = data.array(np.array([ADDED[name]]))
    return {f"-/{head}": number for head in (range(heads) if heads else "-")}


def _overview(data: Data, head: Head, plan: Plan) -> dict[str, Any]:
    found = pooled(head, plan.tiles, plan.strongest)
    return {
        "rows": found.mean.shape[0],
        "columns": found.mean.shape[1],
        "mean": data.short(found.mean, "f2"),
        "largest": data.short(found.largest, "f2"),
        "keys": data.short(found.keys, "u2"),
        "shares": data.short(found.shares, "f2"),
        "each": found.keys.shape[1],
    }


def _expectations(data: Data, explanation: Trace) -> list[dict[str, Any]]:
    """What should come out, and the sentence for when it does."""
    found: list[dict[str, Any]] = []
    for check in checks(explanation):
        one = check.expected
        if not check.fits:
            found.append({"unfit": check.wrong[0]})
            continue
        own: dict[str, Any] = {"step": one.step, "right": check.right}
        if one.variance is not None:
            own["variance"] = data.array(np.array([one.variance]))
        if one.value is not None:
            own["values"] = data.array(np.asarray(one.value, np.float64))
        declared = explanation.steps[one.step].declared
        head = None if one.head is None else own_head(explanation.source.sizes, declared, one.head)
        if head is not None:
            own["head"] = head
        if one.at is not None:
            own["at"] = list(questions.stated_cell(explanation, one).index)
        found.append(own | {"within": one.within, "relative": one.relative})
    return found


# --- rules ---------------------------------------------------------------------------------------


def _has_table(rule: Mask | None) -> bool:
    """Whether one of the rules is a table of yes and no, whose cells can be changed."""
    match rule:
        case Boolean():
            return True
        case Combined(parts):
            return any(map(_has_table, parts))
    return False


def _without_bias(rule: Mask | None) -> Mask | None:
    """The rules apart from −∞ in the bias, which the page reads off the bias itself."""
    if isinstance(rule, AllowedByBias):
        return None
    if isinstance(rule, All) and isinstance(rule.parts[-1], AllowedByBias):
        rest = rule.parts[:-1]
        return rest[0] if len(rest) == 1 else All(rest)
    return rule


# Exact types: a subclass may say something else.
_RULES = (Causal, Window, Lengths, Segments, Boolean, LeftOut, Not, All, AnyOf, AllowedByBias)


def _rule(data: Data, rule: Mask, source: Values) -> dict[str, Any]:
    def whole(array: Any) -> dict[str, Any]:
        array = np.asarray(array)
        return {**data.array(array), "shape": list(array.shape)}

    own: dict[str, Any] = {"name": safe_text(rule.name)[:LABEL_LENGTH]}
    known = rule if type(rule) in _RULES else None
    match known:
        case Causal():
            return own | {"kind": "causal"}
        case Window(left, right):
            return own | {"kind": "window", "left": left, "right": right}
        case Lengths(lengths):
            return own | {"kind": "lengths", "lengths": whole(lengths)}
        case Segments(query, key):
            key = query if key is None else key
            return own | {"kind": "segments", "query": whole(query), "key": whole(key)}
        case Boolean(cells):
            said = dict(_said(known))
            seen, unseen = said.get(True, ""), said.get(False, "")
            return own | {"kind": "cells", "cells": whole(cells), "seen": seen, "unseen": unseen}
        case Not((part,)):
            return own | {"kind": "not", "part": _rule(data, part, source)}
        case All(parts) | AnyOf(parts):
            kind = "all" if isinstance(rule, All) else "any"
            return own | {"kind": kind, "parts": [_rule(data, part, source) for part in parts]}
        case AllowedByBias():
            return own | {"kind": "bias"}
    # A rule of the user's own: its answer for every cell.
    shape = (*source.lead, *(source.sizes.get(axis, 1) for axis in "HLS"))
    cells = np.empty(shape, np.bool_)
    for *batch, head in np.ndindex(*shape[:-2]):
        at = Block(shape, tuple(batch), head, np.arange(shape[-2]), source.query_positions)
        cells[(*batch, head)] = rule.block(at)
    return own | {"kind": "cells", "cells": whole(cells), "seen": "visible", "unseen": "hidden"}


def _rows(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of the queries of each batch element, (batch elements, L)."""
    return positions.reshape(math.prod(positions.shape[:-1]), positions.shape[-1])


def _positions(own: NDArray[np.int64]) -> int | list[int]:
    """That of the first query, where those of the others follow one by one; else those of all."""
    first = int(own[0]) if own.size else 0
    consecutive = (own == first + np.arange(own.size)).all()
    return first if consecutive else own.tolist()


def _said(rule: Boolean) -> Iterator[tuple[bool, str]]:
    """What a table of yes and no says where it says yes, and where no."""
    for answer in (True, False):
        single = type(rule)(np.array([[[answer]]]), name=rule.name)
        at = Block((1, 1, 1), (), 0, np.array([0]), np.array([0]))
        yield answer, single.verdict(at, 0).detail

"""How a function may be called without an adapter: by the table, and by what only trying tells.

A call is taken if it runs on sizes that differ, and what comes back has the shape of a result.
Nothing is said of its meaning: where a name leaves two meanings, there are two adapters. Must not
know the textbook.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from regard.diagnosis.call import table
from regard.diagnosis.call.adapter import SHORT, Adapter, called, written
from regard.diagnosis.call.asking import asking, shapes_of, unfit
from regard.diagnosis.call.gradients import as_gradients
from regard.diagnosis.call.table import Layout, Meaning
from regard.diagnosis.given import FIELDS, Given, Sizes
from regard.diagnosis.result import Assumption
from regard.diagnosis.statements import Stated

MOST_TRIES = 600  # calls in search of one that runs
MOST_ADAPTERS = 24
MATRICES = ("W_q", "W_k", "W_v", "W_o")
MOST_PRODUCTS = 24  # of meanings of the arguments that a function needs, for one layout


@dataclass(frozen=True)
class Subject:
    """What is called: the function itself, or a part of an object that the adapter makes first."""

    target: str  # code
    parameters: tuple[inspect.Parameter, ...]
    before: str = ""  # code that makes it
    embedded: bool = False  # whether it has weights, so that it gets embeddings
    heads: int | None = None  # that an object has
    model: int | None = None  # the width that an object has
    assumes: tuple[Assumption, ...] = ()
    unknown: tuple[str, ...] = ()  # of how it is made


@dataclass(frozen=True)
class Choice:
    """What one parameter gets, and what is assumed with that."""

    code: str
    assumes: tuple[Assumption, ...] = ()


@dataclass(frozen=True)
class Bound:
    """A call that runs: what its parameters get, in which layout, and where the result is."""

    subject: Subject
    layout: Layout
    arguments: tuple[tuple[str, str], ...]
    path: str = ""
    assumes: tuple[Assumption, ...] = ()
    unasked: tuple[str, ...] = ()
    heads: int | None = None

    def adapter(self, library: str, *, raw: bool = False, backward: bool = False) -> Adapter:
        """It as an adapter; a `raw` one returns what the function returns."""
        code = called(self.subject.target, self.arguments) + self.path
        if backward and not raw:
            code = as_gradients(code, self.layout)
        elif not raw:
            code = self.layout.give.format(code)
        body = f"{self.subject.before}\nreturn {code}".lstrip("\n")
        return written(
            body,
            library,
            assumes=(*self.subject.assumes, *self.assumes),
            unasked=self.unasked,
            heads=self.heads or self.subject.heads,
            model=self.subject.model,
        )


@dataclass(frozen=True)
class Search:
    """What is searched for, and where."""

    function: Any
    subject: Subject
    library: str
    stated: Stated
    tried: list[str] = field(default_factory=list)  # why calls failed, each once

    @property
    def meanings(self) -> dict[str, Meaning]:
        """What the table says of each parameter that it knows."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        hints = table.HINTS.get(name, ())
        names = [one.name for one in self.subject.parameters if one.name not in hints]
        found = {
            one: table.PARAMETERS[one.lower()] for one in names if one.lower() in table.PARAMETERS
        }
        roles = {one.role for one in found.values()}
        if self.subject.embedded or any(role.startswith("W_") for role in roles):
            cross = {"query": "embeddings", "key": "context", "value": "context"}
            found = {
                name: replace(one, role=cross.get(one.role, one.role))
                for name, one in found.items()
            }
        return found

    @property
    def unknown(self) -> list[str]:
        """The parameters that need a value of which the table does not know what it is."""
        known, own = self.meanings, self.subject
        names = [one.name for one in own.parameters if one.name not in known and is_needed(one)]
        return [*own.unknown, *names]


def find_adapters(search: Search) -> Iterator[list[Adapter]]:
    """The adapters with which a function runs and returns something like a result, by layout."""
    roles = {one.role for one in search.meanings.values()}
    if search.unknown or not roles & {"query", "embeddings"}:
        return
    layouts = table.EMBEDDED if "embeddings" in roles else table.LAYOUTS
    for several in _sizes(search):
        runs = [one for layout in layouts if (one := _first(search, layout, several))]
        if runs:
            yield from _adapters(search, _told_apart(runs), "grad_output" in roles)
            return
        if len(search.tried) > MOST_TRIES:
            return


Runs = tuple[Given, list[Bound]]  # calls that run on a problem


def _first(search: Search, layout: Layout, several: Sequence[Given]) -> Runs | None:
    """The calls in one layout that run on the first of these problems on which any does."""
    for given in several if "H" in layout.axes or layout in table.EMBEDDED else several[:1]:
        if found := [*_running(search, layout, given)]:
            return given, found
    return None


def _adapters(search: Search, runs: list[Runs], backward: bool) -> Iterator[list[Adapter]]:
    """These calls with all that a function takes; none leaves out a mask which another takes."""
    whole = [[*_whole(search, found, given)] for given, found in runs]
    least = min(len(one.unasked) for found in whole for one in found)
    for found in whole:
        kept = [one for one in found if len(one.unasked) == least]
        if kept:
            yield [one.adapter(search.library, backward=backward) for one in kept]


def _told_apart(runs: list[Runs]) -> list[Runs]:
    """The same, which say what arrays they assume where several layouts run, but for the first."""
    found = runs[:1]
    for given, several in runs[1:]:
        own = Assumption("layout", f"arrays are {several[0].layout.axes}")
        found.append((given, [replace(one, assumes=(own, *one.assumes)) for one in several]))
    return found


def _whole(search: Search, found: list[Bound], given: Given) -> Iterator[Bound]:
    """Calls with all that a function takes besides what it needs, in each meaning that runs."""
    for one in search.subject.parameters:
        if not is_needed(one):
            found = [more for bound in found for more in _with(search, bound, one, given)]
    for bound in found[:MOST_ADAPTERS]:
        yield from _with_heads(search, bound, given)


def is_needed(one: inspect.Parameter) -> bool:
    """Whether a parameter has no default."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return one.default is inspect.Parameter.empty and one.kind not in various


def _sizes(search: Search) -> Iterator[list[Given]]:
    """Problems of sizes that all differ, then of sizes that functions may need to be equal.

    Those in a list differ in the number of heads.
    """
    heads = search.stated.heads or search.subject.heads
    asks = frozenset({"mask", "key_mask", "window"})
    for (rows, width), (keys, more) in product(((5, 6), (8, 8), (16, 8)), ((2, 2), (2, 0), (0, 0))):
        several = []
        usual = [many for many in (4, 3, 2, 8, 1) if many != rows]
        for many in (heads,) if heads else usual:
            model = search.subject.model
            own = model // many if model else search.stated.width or width
            if model is None and more:
                model = many * (width + more) + 3
            sizes = Sizes(2, many, many, rows, rows + keys, own, own + more, model)
            several.append(Given("tried", sizes, asks=asks))
        yield several


def _running(search: Search, layout: Layout, given: Given) -> Iterator[Bound]:
    """The calls in one layout that run with what a function needs, one for each meaning."""
    needed = [one for one in search.subject.parameters if is_needed(one)]
    known = set()
    for some in islice(_arrangements(search, needed, layout), MOST_PRODUCTS):
        assumes = tuple(dict.fromkeys(x for one in some for x in one.assumes))
        if assumes in known:
            continue
        arguments = tuple(
            (one.name if one.kind is one.KEYWORD_ONLY else "", choice.code)
            for one, choice in zip(needed, some, strict=True)
        )
        bound = Bound(search.subject, layout, arguments, assumes=assumes)
        for own in _completed(search, bound, given):
            known.add(assumes)
            yield own
            break


def _arrangements(
    search: Search, needed: Sequence[inspect.Parameter], layout: Layout
) -> Iterator[tuple[Choice, ...]]:
    """What all parameters may get at once; all matrices are handed over in one form."""
    choices = [choices_of(search, one.name, layout) for one in needed]
    matrices = [search.meanings[one.name].role in MATRICES for one in needed]
    for form in range(len(table.WEIGHTS) if any(matrices) else 1):
        own = [
            (some[form : form + 1] or some[:1]) if matrix else some
            for some, matrix in zip(choices, matrices, strict=True)
        ]
        yield from product(*own)


def _without_axes(given: Given, layout: Layout) -> Given:
    """The same for a layout that has no batch, or no heads."""
    own = given.sizes
    if "B" not in layout.axes:
        own = replace(own, batch=1)
    if "H" not in layout.axes and layout not in table.EMBEDDED:
        own = replace(own, heads=1, key_heads=1)
    return replace(given, sizes=own)


def _completed(search: Search, bound: Bound, given: Given) -> Iterator[Bound]:
    """The same with the place of the result in what is returned."""
    given = _without_axes(given, bound.layout)
    backward = any("t.grad_output" in code for _, code in bound.arguments)
    raw = replace(bound, path="").adapter(search.library, raw=True)
    given = replace(given, fields=_fields(raw.text))
    paths, problem = shapes_of(search.function, raw, search.library, given)
    search.tried.append(problem)
    for path in ("",) if backward else paths:
        own = replace(bound, path=path)
        adapter = own.adapter(search.library, backward=backward)
        answer = asking(search.function, adapter, search.library, checked=True)(
            replace(given, fields=_fields(adapter.text))
        )
        problem = unfit(given, answer)
        search.tried.append(problem)
        if not problem:
            yield own


def _fields(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\bt\.(\w+)", text)) & {*FIELDS}


def _with(search: Search, bound: Bound, one: inspect.Parameter, given: Given) -> Iterator[Bound]:
    """A call with one more argument, for each of its meanings that runs; else without."""
    meaning = search.meanings.get(one.name)
    if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
        yield bound
        return
    known = meaning is not None and meaning.role not in ("", "context")
    square = replace(given.sizes, keys=given.sizes.queries)
    found = set()
    for own in (given, replace(given, sizes=square)) if known else ():
        for choice in choices_of(search, one.name, bound.layout):
            more = replace(
                bound,
                arguments=(*bound.arguments, (one.name, choice.code)),
                assumes=(*bound.assumes, *choice.assumes),
            )
            if choice.assumes in found:
                continue
            if any(x.path == bound.path for x in _completed(search, more, own)):
                found.add(choice.assumes)
                yield more
        if found:
            return
    yield replace(bound, unasked=(*bound.unasked, one.name))


def _with_heads(search: Search, bound: Bound, given: Given) -> Iterator[Bound]:
    """A call of code that has some number of heads, which nobody says, for each that runs."""
    text = bound.adapter(search.library).text
    known = search.stated.heads or search.subject.heads or "t.heads" in text
    side_by_side = bound.layout.packed or "t.embeddings" in text
    if known or not side_by_side:
        yield bound
        return
    for many in (2, 3, 4, 8) if bound.layout.packed else (1, 2, 3, 4, 8):
        sizes = replace(given.sizes, heads=many, key_heads=many)
        own = replace(
            bound,
            heads=many,
            assumes=(*bound.assumes, Assumption("heads", _heads_in_words(many))),
        )
        if any(x.path == bound.path for x in _completed(search, own, replace(given, sizes=sizes))):
            yield own


def _heads_in_words(many: int) -> str:
    return "there is 1 head" if many == 1 else f"there are {many} heads"


# --- what a parameter may get ---------------------------------------------------------------------


def choices_of(search: Search, name: str, layout: Layout) -> list[Choice]:
    """What a parameter may get by the meaning of its name, the likeliest first."""
    meaning, short = search.meanings[name], SHORT[search.library]
    take, role = layout.take, meaning.role
    match role:
        case "":
            return [Choice(meaning.neutral)]
        case "query" | "key" | "value" | "grad_output" | "embeddings" | "context":
            return [Choice(take.format(f"t.{role}"))]
        case "mask" | "key_mask":
            return [*_masks(search, name, meaning, layout)]
        case "bias":
            return [Choice(form.format("t.bias")) for form in layout.masks]
        case "lengths" if layout.tokens != "{}":
            return [Choice("int(t.lengths[0])"), Choice("t.lengths[:1]")]
        case "positions":
            return [Choice(layout.tokens.format("t.positions")), Choice("t.positions[0]")]
        case "cos" | "sin":
            part = f"t.rotary[{int(role == 'sin')}]"
            twice = f"{short}.concatenate([{part}, {part}], -1)"
            paired = f"{short}.stack([{part}, {part}], -1).reshape({part}.shape[0], -1)"
            return [Choice(part), Choice(twice), Choice(paired)]
        case "past key" | "past value":
            return [Choice(take.format(f"t.past[{int(role == 'past value')}]"))]
        case "past":
            parts = ", ".join(take.format(f"t.past[{place}]") for place in (0, 1))
            return [Choice(f"({parts})")]
        case "window":
            return _windows(search, name, meaning)
        case "W_qkv" | "b_qkv":
            return _fused(role, short)
    if role.startswith("W_"):
        turned = (Assumption("weights", "weights are (columns, rows), for x @ W.T"),)
        plain, transposed, by_head = (form.format(f"t.{role}") for form in table.WEIGHTS)
        several = [] if role == "W_o" else [Choice(by_head)]
        return [Choice(plain), Choice(transposed, turned), *several]
    return [Choice(f"t.{role}")]


def _masks(search: Search, name: str, meaning: Meaning, layout: Layout) -> Iterator[Choice]:
    """A mask in each of its meanings, in every form; one that is stated is the only one."""
    kinds: Sequence[str] = [*table.MASKS]
    if search.stated.mask:
        kinds = [search.stated.mask]
    elif meaning.kind:
        kinds = [meaning.kind]
    forms = [form.format("t.mask") for form in layout.masks] if meaning.role == "mask" else []
    tokens = layout.tokens.format("t.key_mask")
    forms += [tokens, f"{tokens}[:, None, None]"] if layout.tokens == "{}" else [tokens]
    for kind in kinds:
        text = table.MASKS_IN_WORDS[kind].format(name)
        assumes = (Assumption("mask", text, meaning.source if meaning.kind else "tried"),)
        for form in forms:
            for template in table.MASKS[kind]:
                code = template.format(form, SHORT[search.library])
                yield Choice(code, () if search.stated.mask else assumes)


def _windows(search: Search, name: str, meaning: Meaning) -> list[Choice]:
    """A window that counts the query's own key, or does not, or a pair of sides."""
    counted = Assumption("window", f"`{name}` counts the query's own key")
    beside = Assumption("window", f"`{name}` counts keys beside the query's own")
    one, other = Choice("t.window[0] + 1", (counted,)), Choice("t.window[0]", (beside,))
    if search.stated.window:
        own = one if search.stated.window == "inclusive" else other
        return [replace(own, assumes=())]
    pair = [Choice("t.window")] if meaning.source == table.FLASH else []
    return [*pair, one, other]


def _fused(role: str, short: str) -> list[Choice]:
    """Matrices or biases side by side: those of queries, keys and values, or head by head."""
    parts = [f"t.{role[0]}_{one}" for one in "qkv"]
    whole = f"{short}.concatenate([{', '.join(parts)}], -1)"
    shape = "(t.W_q.shape[0], t.heads, -1)" if role[0] == "W" else "(t.heads, -1)"
    heads = ", ".join(f"{one}.reshape{shape}" for one in parts)
    rest = "t.W_q.shape[0], -1" if role[0] == "W" else "-1"
    mixed = f"{short}.concatenate([{heads}], -1).reshape({rest})"
    first = Assumption("columns", "queries, keys and values follow one another in fused weights")
    other = Assumption("columns", "fused weights have queries, keys and values of each head")
    return [
        Choice(form.format(code), (own,))
        for code, own in ((whole, first), (mixed, other))
        for form in table.WEIGHTS[: 2 if role[0] == "W" else 1]
    ]


def subject_of(function: Any) -> Subject | None:
    """The function as what is called; None where its parameters cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        text = table.SIGNATURES.get(getattr(function, "__name__", ""))
        if text is None:
            return None
        parameters = inspect.signature(eval(f"lambda {text}: None")).parameters
    return Subject("f", tuple(parameters.values()))

"""The function under test: the probes that fit it, and every answer that it has given.

Must not know mistakes, nor how a convention is found out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.calls.arguments import mask_role
from regard.diagnosis.calls.calling import Once, call
from regard.diagnosis.calls.convention import Answer, Convention, agrees
from regard.diagnosis.calls.gradient_probe import GradientProbe, with_gradients
from regard.diagnosis.calls.mechanism import Mechanism
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.probes import (
    AS_LONG,
    LEFT,
    OF_HEADS,
    ROUND,
    one_query_probes,
    projected_probes,
    ready_probes,
    round_probes,
)
from regard.diagnosis.forms.differentiation import inputs_wanted
from regard.diagnosis.forms.weights import key_heads
from regard.diagnosis.reading.signature import LATENTS, OF_TEXTS, PAIRS, Callee
from regard.diagnosis.reading.surroundings import Surroundings

# A mask whose axes are said to have heads among them, and one whose real keys are counted.
MASKS_OF_HEADS = re.compile(
    r"mask\w*\b[^\n]{0,100}[(\[][^)\]\n]*\b(n_?heads?|num_heads|heads|Hq|H|nh)\b[^)\]\n]*[)\]]"
)
GROUPED = re.compile(r"kv_?head|n_?kv|group|multi.?query|hkv", re.IGNORECASE)
COUNTED = re.compile(r"mask\w*(\.\w+\(\))*\.sum\(|sum\(\w*mask|lengths|right.pad|causal|tri[lu]")
# All calls together may take this many times the limit of one call.
CALLS_IN_ALL = 10


# Text that gives weights the same axis twice.
SQUARE = re.compile(
    r"\b(?:weights?|matrices|projections|[wW]_?[qkvo]|[wW]_?\*|[oO]mega_\W?)\W[^\n]{0,50}?"
    r"(?:[\[(] *(\w+) *, *\1 *[\])]|\b(\w+) *(?:x|×|by) *\2\b)"
)
QUANTISED = re.compile(r"\bu?int8\b|quanti[sz]e|fake_quant", re.IGNORECASE)
# Code of rotary positions, which turn pairs of features.
TURNS = re.compile(r"rope|rotary|rotate|rotation|rotating", re.IGNORECASE)


@dataclass(frozen=True)
class StatedConventions:
    """What the user says about the conventions; None is to be found out."""

    causal: bool | str | None = None  # True, False, "start", "end"
    mask: str | None = None
    window: str | None = None  # "inclusive": the query's own key counts; "exclusive"
    mechanism: Mechanism | None = None
    layout: str | None = None  # BHLD: the axes of the arrays, in their order


@dataclass(eq=False)
class FunctionUnderTest:
    """A function with everything that it has answered so far."""

    callee: Callee
    stated: StatedConventions
    limit: float  # seconds that one call may take
    put: Once
    answers: dict[tuple[Convention, Probe], Answer] = field(default_factory=dict)
    probes: dict[tuple[Any, ...], list[Probe]] = field(default_factory=dict)
    hung: bool = False
    spent: float = 0.0  # seconds inside the function
    # Where the forward pass is asked, whose gradients are asked for here; None: its results are.
    forward: FunctionUnderTest | None = None
    origin: tuple[str, ...] = ()  # the lines of Python that import it
    is_round: bool = False  # whether all probes have as many tokens as most sizes divide
    # How it is called, once that is found out; `replace` forgets it.
    conventions: list[list[Convention]] | None = field(default=None, init=False)

    def ask(self, convention: Convention, probe: Probe) -> Answer:
        """The answer to one probe; the function is called once for each."""
        key = (convention, probe)
        if key not in self.answers:
            if self.hung:
                return Answer(problem="it has not returned from an earlier call", kind="hung")
            if self.out_of_time:
                return Answer(problem="no time was left for it", kind="refused")
            before = None
            if self.forward is not None and isinstance(probe, GradientProbe):
                before = self.forward.ask(convention, probe.forward or probe)
            self.answers[key] = call(self.callee, convention, probe, self.put, before)
            self.spent += self.answers[key].seconds
            self.hung = self.answers[key].kind == "hung"
        return self.answers[key]

    @property
    def out_of_time(self) -> bool:
        """Whether the function has taken more than all calls may take together."""
        return self.spent > CALLS_IN_ALL * self.limit

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are asked for."""
        return self.callee.is_backward or self.forward is not None

    @property
    def keeps_keys(self) -> bool:
        """Whether it takes a cache, or tokens one at a time."""
        return "cache" in self.callee.roles or bool(self.callee.steps)

    @cached_property
    def quantises(self) -> bool:
        """Whether its code says that numbers pass through integers of 8 bits."""
        return any(QUANTISED.search(text) for _, text in self.callee.blocks)

    @property
    def calls(self) -> int:
        """How many probes called the function, in whatever way it is read."""
        return self.put.calls

    def probes_for(self, convention: Convention) -> list[Probe]:
        """The ordinary probes for one way of calling, made once."""
        layout = convention.keys or convention.layout
        own = (convention.one_query, convention.causal_always, convention.aligned)
        key = (layout, *own, convention.shared, convention.joined, convention.mask_instead)
        if key not in self.probes:
            kind, roles = self.callee.kind, self.callee.roles
            rank, of_batch = len(layout), "B" in layout and "H" not in layout
            both_ways = "window" in roles and "causal" not in roles
            rules = (convention.causal_always, both_ways, convention.aligned)
            if kind in ("arrays", "self"):
                one = 1 if convention.one_query else None
                how = (of_batch, kind == "self", one, self.is_round)
                found = [*_ready_probes(rank, *how, *rules)]
                first = convention.causal_always and convention.aligned == "start"
                if first or self.callee.has_one_length:  # two queries would see two keys
                    found = [p for p in found if p.ability != "long" or _is_square(p)]
                if "causal" in roles:
                    found += [_as_causal(p) for p in found if p.ability == "long" and _is_square(p)]
            else:
                rows = ROUND if self.is_round else 5
                drawn = _projected_probes(self.callee, rank, rows)
                asked = (p for p in drawn if p.window is None or "window" in roles)
                found = [_with_rules(p, *rules) for p in asked]
                if self.is_round:
                    found = [p for p in found if p.sizes["L"] == p.sizes["S"] == ROUND]
            found = [one for one in found if self._may_be_asked(convention, one)]
            if not self._refuses_rectangles(convention, found):
                found = [one for one in found if not one.name.startswith(AS_LONG)]
            if self.callee.says_single:
                found = [_token_by_token(one) for one in found]
            if convention.joined:
                both = (_with_joined_context(probe, convention.aligned) for probe in found)
                found = [one for one in both if one is not None]
            if self.stated.mechanism is not None:
                found = list(self.stated.mechanism.of(found))
            if "key_t" in roles:  # it may read the width from the values alone
                found = [probe for probe in found if probe.sizes["D"] == probe.sizes["E"]]
            if "key_value" in roles and kind in ("arrays", "self"):
                found = [with_keys_as_values(one) for one in found]
            if convention.shared:
                found = [_with_shared_keys(probe) for probe in found if probe.sizes["G"] > 1]
            if mask_role(self.callee) is not None:
                found += [_with_bias(probe) for probe in found if _may_be_biased(probe)]
            if convention.mask_instead:
                found = [_without_causal(one) for one in found if one.ability != "causal and mask"]
            if "softcap" in roles:
                found += [_with_softcap(probe) for probe in found if CAPPED.match(probe.name)]
            if "sink" in roles:
                found = [_with_sink(probe) for probe in found]
            if mask_role(self.callee) in OF_TEXTS:
                apart = any(f"key_{role}" in roles for role in OF_TEXTS)
                both = (_with_texts(one, apart) for one in found)
                found = [one for one in both if one is not None]
            if self.callee.needs_mask:
                found = [replace(probe, needs_mask=True) for probe in found]
            if (around := self.callee.around) is not None:
                found = [_with_surroundings(one, around) for one in found]
            if self.of_gradients:
                wanted = inputs_wanted(self.callee)
                found = [with_gradients(probe, wanted) for probe in found if not probe.chunks]
            self.probes[key] = found
        return self.probes[key]

    def _may_be_asked(self, convention: Convention, probe: Probe) -> bool:
        """Whether a function says that it takes masks of heads, or nothing that padding is last.

        A mask of texts is none of one text, where the axes of both are said.
        """
        own = [self.callee.axes.get(one.name, "") for one in self.callee.parameters]
        of_texts = own[:1] == ["BTa"] and "BT" in own
        if of_texts and probe.ability == "key mask" and probe.rank == 2:
            return False
        code = "\n".join(text for _, text in self.callee.blocks)
        if probe.name.startswith(OF_HEADS):
            few = probe.groups == probe.heads or GROUPED.search(code) is not None
            return few and MASKS_OF_HEADS.search(code) is not None
        if probe.name.startswith(LEFT):  # the first rows of a causal rule would see nothing
            return not (convention.causal_always or COUNTED.search(code))
        return True

    def _refuses_rectangles(self, convention: Convention, probes: list[Probe]) -> bool:
        """Whether it takes no context of another length than what asks."""
        others = [p for p in probes if "context" in p.inputs and p.ability == "rectangular"]
        return bool(others) and all(self.ask(convention, p).kind == "raised" for p in others)

    def is_right(self, convention: Convention, probe: Probe) -> bool:
        """Whether the answer to a probe is the textbook's within the digits of float16.

        Conventions differ by far more, and a function that loses digits has a convention too.
        """
        answer = self.ask(convention, probe)
        if answer.output is None:
            return False
        kind = "int8" if self.quantises else "float16"
        unit = max(UNITS[kind], UNITS.get(answer.dtype, 0.0))
        return agrees(answer.output, probe.result(probe.right), probe.tolerance(unit))


@lru_cache(maxsize=32)  # with what candidates return for them: some megabytes
def _ready_probes(
    rank: int,
    of_batch: bool,
    itself: bool,
    rows: int | None,
    is_round: bool,
    always: bool,
    both_ways: bool,
    aligned: str,
) -> list[Probe]:
    """The same probes in every diagnosis of a function of arrays; `itself`: of a single one.

    With `rows` each has so many queries.
    """
    make = one_query_probes if rows else round_probes if is_round else ready_probes
    probes: Iterator[Probe] = make(rank, of_batch=of_batch)
    if itself:
        probes = (_self_attention(probe) for probe in probes if _is_square(probe))
    return [_with_rules(probe, always, both_ways, aligned) for probe in probes]


def _with_rules(probe: Probe, always: bool, both_ways: bool, aligned: str) -> Probe:
    """A probe for a function that is `always` causal, whose window may look `both_ways`."""
    if always:
        probe = as_always_causal(probe)
    elif both_ways and probe.window is not None:
        probe = replace(probe, causal=False)
    return replace(probe, offset=0) if aligned == "start" and probe.offset else probe


def _token_by_token(probe: Probe) -> Probe:
    """A probe with a cache that gets one token in each call but the first."""
    if not probe.chunks:
        return probe
    first = probe.chunks[0]
    return replace(probe, chunks=(first, *(1,) * (sum(probe.chunks) - first)))


def _without_causal(probe: Probe) -> Probe:
    """A probe whose mask takes the place of the causal rule."""
    has_mask = probe.keep is not None or "bias" in probe.inputs
    return replace(probe, causal=False) if has_mask else probe


def _projected_probes(callee: Callee, rank: int, rows: int) -> Iterator[Probe]:
    batch = 1 if rank == 2 else 2
    if PAIRS in callee.weights:
        return _pair_probes(callee, rank, rows)
    if callee.kind == "packed":
        return _packed_probes(callee.heads or 4, batch, rank)
    more: dict[str, Any] = dict(batch=batch, rank=rank, rows=rows)
    more["cross"] = bool({"context", "key"} & callee.roles.keys())
    latents = callee.weights.get(LATENTS)
    if callee.reads_for_itself:
        more["cross"] = False
    found = _of_weights(callee, more) if callee.weights else _projected_by_arguments(callee, more)
    return _pooling(found, latents) if callee.reads_for_itself else found


def _of_weights(callee: Callee, more: dict[str, Any]) -> Iterator[Probe]:
    """Probes of the weights that an object has."""
    weights = {n: one for n, one in callee.weights.items() if n != LATENTS}
    heads = callee.heads or 1
    shapes = {name: array.shape for name, array in weights.items()}
    groups = key_heads(weights, heads)
    found = projected_probes(shapes, heads, groups, weights=weights, **more)
    apart = {"key", "value"} <= callee.roles.keys() and not callee.reads_for_itself
    return itertools.chain.from_iterable(map(_with_values_apart, found)) if apart else found


def _pair_probes(callee: Callee, rank: int, rows: int) -> Iterator[Probe]:
    """As many texts as each has tokens, and a bias of each head that all of them make together."""
    own, heads = dict(callee.weights), callee.heads or 1
    matrix = own.pop(PAIRS)
    shapes = {name: array.shape for name, array in own.items()}
    more: dict[str, Any] = dict(weights=own, batch=rows, rank=rank, rows=rows)
    for probe in projected_probes(shapes, heads, key_heads(own, heads), **more):
        pairs = probe.inputs["embeddings"]
        if len(pairs) == pairs.shape[1] and not probe.causal and rank == 3:
            bias = (pairs @ matrix).transpose(2, 0, 1)
            yield replace(probe, inputs={**probe.inputs, "bias": bias, "pair_bias": np.array(1.0)})


def _with_values_apart(probe: Probe) -> Iterator[Probe]:
    """And one with embeddings for the values that are not those of the keys, if there is a context.

    Both are one context, twice as wide, and either matrix reads half of it.
    """
    yield probe
    if "context" in probe.inputs and probe.ability == "rectangular":
        keys, own = probe.inputs["context"], dict(probe.inputs)
        none = {name: np.zeros_like(own[name]) for name in ("W_k", "W_v")}
        own["context"] = np.concatenate([keys, 0.8 * keys[..., ::-1, ::-1]], axis=-1)
        own["W_k"] = np.concatenate([own["W_k"], none["W_k"]])
        own["W_v"] = np.concatenate([none["W_v"], own["W_v"]])
        yield replace(probe, inputs=own, name=f"{probe.name}, values apart")


def _pooling(probes: Iterator[Probe], latents: Array | None) -> Iterator[Probe]:
    """Learned queries, or the first token, read what the function gets.

    Only a mask of keys can hide some of that.
    """
    for probe in probes:
        if probe.causal or (probe.keep is not None and probe.keep.ndim == 2):
            continue
        given = probe.inputs["embeddings"]
        inputs = {**probe.inputs, "context": given}
        if latents is None:
            inputs |= {"embeddings": given[:, :1], "pooled": np.array(1.0)}
        else:
            inputs["embeddings"] = np.broadcast_to(latents, (len(given), *latents.shape)).copy()
        yield replace(probe, inputs=inputs)


def _with_joined_context(probe: Probe, aligned: str) -> Probe | None:
    """With a context that ends in the embeddings themselves, if they are as wide."""
    rows = probe.inputs["embeddings"]
    context = probe.inputs.get("context", 0.7 * rows[:, ::-1])
    plain = replace(probe, causal=False)
    if plain.has_rules or context.shape[-1] != rows.shape[-1]:
        return None
    both = {**probe.inputs, "context": np.concatenate([context, rows], axis=1)}
    offset = 0 if aligned == "start" else context.shape[1]  # it comes before the first query
    return replace(probe, inputs=both, offset=offset * probe.causal)


def _projected_by_arguments(callee: Callee, more: dict[str, Any]) -> Iterator[Probe]:
    """Square weights, and, without heads, some whose widths all differ."""
    shapes = {"W_q": (6, 4), "W_k": (6, 4), "W_v": (6, 5), "W_o": (5, 7)}
    shapes |= {"b_q": (4,), "b_k": (4,), "b_v": (5,), "b_o": (7,)}  # type: ignore[dict-item]
    taken = {name: shape for name, shape in shapes.items() if name in callee.roles}
    width = 6 if 6 % (callee.heads or 1) == 0 else 3 * (callee.heads or 1)
    square = {name: (width,) * len(shape) for name, shape in taken.items()}
    if "heads" in callee.roles:
        heads, groups = callee.heads or 2, None
        if TURNS.search("".join(text for _, text in callee.blocks)):  # an even width of heads
            square = {name: (4 * heads,) * len(shape) for name, shape in taken.items()}
            width = 4 * heads
        if _keys_are_narrower(callee):
            of_keys = {
                n: (*shape[:-1], width // heads) for n, shape in square.items() if n[-1] in "kv"
            }
            square, groups = square | of_keys, 1
        yield from projected_probes(square, heads, groups, **more)
        if "key_heads" in callee.roles and callee.heads in (None, 4):
            yield from _with_fewer_key_heads(taken, more)
        return
    yield from projected_probes(square, 1, **more)
    if not SQUARE.search("".join(text for _, text in callee.blocks)):
        yield from projected_probes(taken, 1, **more)


def _with_fewer_key_heads(taken: Mapping[str, Any], more: dict[str, Any]) -> Iterator[Probe]:
    """Probes of 4 query heads and 2 key heads, of an even width, without a rule of their own."""
    widths = {"W_k": (16, 8), "W_v": (16, 8), "b_k": (8,), "b_v": (8,)}
    shapes = {name: widths.get(name, (16,) * len(shape)) for name, shape in taken.items()}
    for probe in projected_probes(shapes, 4, 2, **more):
        if not (probe.has_rules or probe.ability == "long"):
            yield replace(probe, name=f"fewer key heads, {probe.name}", ability="grouped")


def _keys_are_narrower(callee: Callee) -> bool:
    """Whether W_k is documented with other columns than W_q: (M, D) and (M, H · D)."""
    roles = callee.roles
    if not {"W_q", "W_k"} <= roles.keys() or "key_heads" in roles:
        return False
    own, other = (callee.axes.get(roles[one].name, "") for one in ("W_q", "W_k"))
    return len(own) == len(other) == 2 and own[0] == other[0] and own[1] != other[1]


def _packed_probes(heads: int, batch: int, rank: int) -> Iterator[Probe]:
    """Heads side by side in ready arrays: projections that only pick columns."""
    width = 3 * heads
    eye, none = np.eye(width), np.zeros((width, width))
    weights = {"W_q": eye, "W_k": np.vstack([eye, none]), "W_v": np.vstack([none, eye])}
    shapes = {name: array.shape for name, array in weights.items()}
    rng = np.random.default_rng(50 + rank)
    for probe in projected_probes(shapes, heads, weights=weights, batch=batch, rank=rank):
        if probe.name.startswith(("rising", AS_LONG)):
            continue
        for rows, keys in ((70, 70),) if probe.ability == "long" else ((5, 5), (3, 5)):
            inputs = {
                **probe.inputs,
                "embeddings": 1.5 * rng.normal(size=(batch, rows, width)).round(2),
                "context": rng.normal(size=(batch, keys, 2 * width)).round(2),
            }
            ability = probe.ability if rows == keys else "rectangular"
            if rows == keys or not probe.has_rules:
                name = f"{probe.name} {rows}×{keys}"
                yield replace(probe, inputs=inputs, name=name, ability=ability)


def _with_texts(probe: Probe, of_keys: bool) -> Probe | None:
    """With texts one after the other instead of a mask; None if it has another mask.

    Where those `of_keys` are told apart, they may be longer than those of the queries.
    """
    if probe.keep is None or "bias" in probe.inputs:
        return probe if "bias" not in probe.inputs else None
    rows, keys = probe.sizes["L"], probe.sizes["S"]
    if probe.keep.ndim == 2 and of_keys and 2 < rows < keys and not probe.causal:
        texts = np.arange(rows) > 0, np.arange(keys) > 2  # of 1 and 2 queries, and of 3 and 2 keys
        return replace(probe, keep=texts[0][:, None] == texts[1], name=f"texts, {probe.name}")
    if probe.keep.ndim != 2 or rows != keys or keys < 5:
        return None
    labels = np.minimum(np.arange(probe.sizes["S"]) * 2 // 3, 2)  # of 2, 1 and 2 tokens
    return replace(probe, keep=labels[:, None] == labels, name=f"texts, {probe.name}")


def with_keys_as_values(probe: Probe) -> Probe:
    """A probe for a function whose keys are its values too."""
    return replace(probe, inputs={**probe.inputs, "values": probe.inputs["keys"]})


def _with_shared_keys(probe: Probe) -> Probe:
    """With one head of keys and values for all query heads."""
    one = {name: probe.inputs[name][:, :1] for name in ("keys", "values")}
    return replace(probe, inputs={**probe.inputs, **one}, groups=1)


def _with_surroundings(probe: Probe, around: Surroundings) -> Probe:
    """With rows that the normalisation before attention makes of themselves, if there is one."""
    tokens = ("embeddings", "context")
    rows = {name: around.rows(probe.inputs[name]) for name in tokens if name in probe.inputs}
    return replace(probe, inputs={**probe.inputs, **rows}, around=around)


BIASED = {f"{name} {rank}-D" for name in ("square", "embeddings") for rank in (2, 3, 4)}


def _may_be_biased(probe: Probe) -> bool:
    return probe.name in BIASED and "bias" not in probe.inputs


def _with_bias(probe: Probe) -> Probe:
    """With a finite number added to each score, the same in every head."""
    sizes = [probe.sizes[axis] for axis in "HLS"]
    drawn = np.random.default_rng(60).normal(size=sizes[1:]).round(2)
    inputs = {**probe.inputs, "bias": np.broadcast_to(drawn, sizes)}
    return replace(probe, inputs=inputs, name=f"bias {probe.name}", ability="bias")


# Without a mask, with one, with a causal rule and with a bias.
CAPPED = re.compile(r"(square|embeddings|mask|causal|bias (square|embeddings)) \d-D$")


def _with_softcap(probe: Probe) -> Probe:
    """With a softcap of the caller's, of the size of the scores."""
    inputs = {**probe.inputs, "softcap": np.array(2.0)}
    return replace(probe, inputs=inputs, name=f"softcap, {probe.name}", ability="softcap")


def _with_sink(probe: Probe) -> Probe:
    """With a sink of each head, of the size of the scores."""
    sink = 0.4 + 0.7 * np.arange(probe.sizes["H"])
    return replace(probe, inputs={**probe.inputs, "sink": sink})


def _as_causal(probe: Probe) -> Probe:
    """The same with a causal rule that is asked for."""
    return replace(probe, causal=True, name=f"causal, {probe.name}", ability="causal")


def _is_square(probe: Probe) -> bool:
    return probe.sizes["L"] == probe.sizes["S"] and probe.sizes["D"] == probe.sizes["E"]


def _self_attention(probe: Probe) -> Probe:
    return replace(probe, inputs=dict.fromkeys(probe.inputs, probe.inputs["queries"]))


def as_always_causal(probe: Probe) -> Probe:
    """A probe for a function that hides later keys without being asked to."""
    keep = probe.keep
    if keep is not None and keep.ndim == 2:
        keep = keep | (np.arange(keep.shape[1]) == 0)
    offset = probe.sizes["S"] - probe.sizes["L"]
    return replace(probe, causal=True, keep=keep, offset=offset)

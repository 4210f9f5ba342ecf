"""Numbers that a function adds to its scores by the places of query and key, by looking at them.

A learned table of distances, as in Swin and T5, or rows of relative positions that meet the query,
as in Transformer-XL: what is added is read from the scores that the softmax gets, and counts as
given. Must not know mistakes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.convention import Convention, Question
from regard.diagnosis.calls.mechanism import as_mechanism
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.distance_tables import is_out_of_order, is_reversed, is_unscaled
from regard.scores import Cosine

# Code that adds nothing by place has none of these words.
WORDS = re.compile(
    r"relative|rel_|_rel|bias|pair|position|pos_|_pos|dist|alibi|slope|decay|edge|spatial|bucket|offset|"
    r"table|displace",
    re.IGNORECASE,
)
MISPLACED = "relative_bias_misplaced"
RELATIVE = re.compile(r"relative|rel_|_rel|distance|bucket", re.IGNORECASE)
# Other places have numbers of their own beside those of distances: a class token, or each place.
ABSOLUTE = re.compile(r"cls|class_token|absolute|abs_pos|num_relative_distance", re.IGNORECASE)
IMAGE = re.compile(r"(bias_)?table|relative_position_index|window_size", re.IGNORECASE)
BUCKETS = re.compile(r"bucket|clamp|clip|abs\(|min\(", re.IGNORECASE)
SLOPES = re.compile(r"alibi", re.IGNORECASE)
# Vectors that meet the query and the key, and then those of the other's place.
UNKNOWNS = ((), ("query", "key"), ("query", "key", "key at the query", "query at the key"))
# Some divide terms that are added up, each of the size of q·k, by the root of their number too.
SHARES = (2**-0.5, 3**-0.5)
LOW = -1e3  # below this a cell is hidden
LARGEST_PROBE = 2**15  # cells of the scores that are looked at


@dataclass(frozen=True, eq=False)
class AddedScores:
    """What is added to the scores of a probe by the places of its queries and keys."""

    tested: FunctionUnderTest
    conventions: Sequence[Convention]
    by: str  # what it depends on: the distance, or the places
    factor: float = 1.0  # of q·k beside it, where the usual scale is 1
    fault: str = ""  # the name of a mistake that shows in it
    is_of_table: bool = False  # whether cells of a head share numbers, as those of a table do
    is_confused: bool = False  # whether different displacements in an image get the same number
    is_linear: bool = False  # whether it is a number for each head times the distance

    def __str__(self) -> str:
        return f"numbers added to the scores by the {self.by} of query and key (not judged)"

    def of(self, probe: Probe) -> Array | None:
        """The numbers (B, H, L, S), seen without the probe's rules; None if they are not seen."""
        asked = ((c, p) for c in self.conventions for p in self.tested.probes_for(c))
        found = next((pair for pair in asked if pair[1].name == probe.name), None)
        if found is None:
            return None
        own, bare = found[0], _without_rules(*found)
        scores = scores_inside(self.tested, own, bare)
        if scores is None:
            return None
        added = scores - self.factor * _right(self.tested, bare)
        return np.where(bare.visible & (scores > LOW), added, 0.0)


def added_scores(
    tested: FunctionUnderTest, conventions: Sequence[Convention]
) -> AddedScores | None:
    """What a function adds to its scores, if that is a matter of places alone; else None."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    if not WORDS.search(code) or tested.callee.reads_more or tested.of_gradients:
        return None
    convention = max(conventions, key=lambda one: len(one.layout))
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or probe.chunks or probe.sizes["L"] < 3:
        return None
    if not (probe.is_plain or tested.callee.says_cosine):
        return None
    found = _seen(tested, convention, _without_rules(convention, probe))
    if found is None:
        return None
    relative = RELATIVE.search(code) is not None and ABSOLUTE.search(code) is None
    fault = found.fault or (MISPLACED * (relative and found.by == "places" and found.is_of_table))
    if found.is_linear and SLOPES.search(code) and "Parameter" not in code:
        fault = fault or "alibi_slopes_of_heads"
    elif found.is_confused and IMAGE.search(code) and not BUCKETS.search(code):
        fault = fault or MISPLACED
    return replace(found, conventions=conventions, fault=fault)


def factor_of_cosines(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> float | None:
    """By what cosines are multiplied in the scores of a softmax, where places add numbers to them.

    None if no other numbers are seen, or scores are no cosines.
    """
    mechanism = as_mechanism(Cosine(), None)
    stated = replace(tested.stated, mechanism=mechanism)
    found = added_scores(replace(tested, stated=stated, answers={}, probes={}), conventions)
    return None if found is None or found.factor <= 0 else found.factor


def are_plain(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a softmax is seen to get the scaled scores, with nothing added and nothing else."""
    return seen_as(tested, convention, lambda probe: probe) == (True, True)


def seen_as(
    tested: FunctionUnderTest, convention: Convention, besides: Callable[[Probe], Probe | None]
) -> tuple[bool, bool]:
    """Whether a softmax is seen to hide the keys, and to get the scores, of the probe `besides`."""
    bare = plain_probe(tested, convention)
    if bare is None:
        return False, False
    scores, own = scores_inside(tested, convention, bare), besides(bare)
    if scores is None or own is None:
        return False, False
    visible = own.visible
    if not np.array_equal(scores > LOW, visible):
        return False, False
    if own is bare:
        right = _right(tested, bare)
    else:
        names = ("biased", "positioned", "capped", "scaled")
        right = next(own.right[one] for one in names if one in own.right)
    size = max(1.0, float(np.abs(right).max()))
    return True, bool(np.abs(scores - right)[visible].max() < 1e-5 * size)


def diagonal_is_seen(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a softmax gets the scaled score of each token with itself, whatever others get.

    No positions that are relative change it, right or wrong ones.
    """
    bare = plain_probe(tested, convention)
    if bare is None or bare.sizes["L"] != bare.sizes["S"]:
        return False
    scores = scores_inside(tested, convention, bare)
    if scores is None:
        return False
    own, right = (np.diagonal(one, axis1=-2, axis2=-1) for one in (scores, _right(tested, bare)))
    return bool(np.abs(own - right).max() < 1e-5 * max(1.0, float(np.abs(right).max())))


def plain_probe(tested: FunctionUnderTest, convention: Convention) -> Probe | None:
    """A probe without rules whose scores may be seen."""
    if tested.of_gradients or tested.stated.mechanism is not None or convention.one_query:
        return None
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or probe.chunks or tested.callee.reads_more:
        return None
    return _without_rules(convention, probe)


def _without_rules(convention: Convention, probe: Probe) -> Probe:
    causal = probe.causal and convention.causal_always
    inputs = {name: array for name, array in probe.inputs.items() if name != "bias"}
    bare = replace(probe, inputs=inputs, keep=None, window=None, chunks=(), causal=causal)
    return replace(bare, name=f"{probe.name}, without rules")


def _right(tested: FunctionUnderTest, probe: Probe) -> Array:
    """The scores as they are scaled, before anything is added or hidden."""
    right = probe.right
    if not probe.is_plain:
        return right["scores"]
    said = tested.callee.said_scale if probe.scale is None else ""
    return right["scores"] * factor_of(said, probe.sizes) if said else right["scaled"]


def factor_of(said_scale: str, sizes: Mapping[str, int]) -> float:
    """By what q·k is multiplied where a text says that it is not divided by the root of D."""
    if said_scale == "model":
        return float((sizes["D"] * sizes["H"]) ** -0.5)
    return 1.0 if said_scale == "none" else 1.0 / sizes["D"]


def cells_are_seen(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a softmax gets nothing but scores of a query and a key, as those of windows are."""
    bare = plain_probe(tested, convention)
    if bare is None:
        return False
    rows = math.prod(bare.sizes[axis] for axis in "BHL")
    parts = [one for one in _softmaxes(tested, convention, bare) if one.size % rows == 0]
    known = np.sort(_right(tested, bare), axis=None)
    near = 1e-5 * max(1.0, float(np.abs(known).max()))
    for one in parts:
        seen = one[one > LOW]
        after = np.clip(np.searchsorted(known, seen), 1, len(known) - 1)
        apart = np.minimum(np.abs(known[after] - seen), np.abs(known[after - 1] - seen))
        if apart.max(initial=0.0) > near:
            return False
    return bool(parts)


def scores_inside(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> Array | None:
    """The scores (B, H, L, S) that the softmax of a function gets for a probe, if it is seen."""
    return next(_arranged(_softmaxes(tested, convention, probe), probe), None)


def _softmaxes(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> list[Array]:
    """What the softmaxes of a function get for a probe."""
    if math.prod(probe.sizes[axis] for axis in "BHLS") > LARGEST_PROBE:
        return []
    try:
        given = arguments_for(tested.callee, convention, probe)
    except NotOfferedError:
        return []
    question = Question(probe.name, (given,), reading=tested.callee.number, looks="scores")
    result = tested.put(question)[-1]
    arrays = [one.numbers for one in result.arrays if one.numbers is not None]
    return [] if result.problem else arrays


def _arranged(arrays: Sequence[Array], probe: Probe) -> Iterator[Array]:
    """Scores with the axes (B, H, L, S), also of heads or texts that come one after the other."""
    size = probe.sizes
    whole = tuple(size[axis] for axis in "BHLS")
    for array in arrays:
        if array.size == math.prod(whole) and array.shape[-1] == size["S"]:
            own = tuple(n for n in array.shape[:-1] if n > 1)
            for order in itertools.permutations(range(3)):
                if tuple(whole[n] for n in order if whole[n] > 1) == own:
                    turned = array.reshape([*(whole[n] for n in order), size["S"]])
                    yield turned.transpose([*np.argsort(order), 3])
                    break
            else:
                if array.shape[-2:] == whole[-2:]:
                    yield array.reshape(whole)
    cells = [one for one in arrays if one.shape[-2:] == whole[-2:]]
    for lead in ((0, 1), (0,), (1,)):
        rest = tuple(whole[n] for n in (0, 1) if n not in lead)
        own_count = math.prod(whole[n] for n in lead)
        parts = [one for one in cells if one.size == math.prod(whole) // own_count]
        if own_count > 1 and len(parts) == own_count:
            stacked = np.stack([part.reshape(*rest, *whole[2:]) for part in parts])
            if lead == (1,):
                yield stacked.swapaxes(0, 1)
            else:
                yield stacked.reshape(whole)


def _seen(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> AddedScores | None:
    """What is added to the scores of different texts, if one rule holds for all of them."""
    visible = probe.visible[0, 0]
    rows, keys = np.nonzero(visible)
    samples: list[tuple[Array, ...]] = []
    seeds = itertools.count()
    square = probe.sizes["L"] == probe.sizes["S"]
    for unknowns in UNKNOWNS[: 2 + square]:
        while len(samples) < 6 + probe.sizes["D"] * len(unknowns):
            own = _drawn(probe, next(seeds))
            scores = scores_inside(tested, convention, own)
            if scores is None or not np.isfinite(scores[:, :, visible]).all():
                return None
            if scores[:, :, visible].min() < LOW:  # it hides what nothing asked it to hide
                return None
            queries, of_keys = own.right["queries"], own.right["keys"]
            of_keys = of_keys.repeat(queries.shape[1] // of_keys.shape[1], 1)
            samples += list(zip(scores, _right(tested, own), queries, of_keys, strict=True))
        found = _solved(samples, rows, keys, unknowns)
        if found is not None:
            added = _described(tested, *found, unknowns, rows, keys, probe.sizes)
            if added is None or added.fault or added.by != "distance" or len(unknowns) > 2:
                return added
            changes = _change_with_length(tested, convention, probe, *found, unknowns)
            return replace(added, fault="distances_counted_from_the_end" * changes)
    return None


def _change_with_length(
    tested: FunctionUnderTest,
    convention: Convention,
    probe: Probe,
    found: Array,
    factor: float,
    unknowns: Sequence[str],
) -> bool:
    """Whether the same distance gets other numbers in a shorter text, if it may be shorter."""
    inputs, less = dict(probe.inputs), 0
    if convention.joined:  # what came before is shorter
        less = min(2, inputs["context"].shape[1] - probe.sizes["L"])
        inputs["context"] = inputs["context"][:, less:]
    elif "embeddings" in inputs and "context" not in inputs:
        length = probe.sizes["L"] - 1
        length -= length == probe.sizes["H"]  # so that axes cannot be confused
        inputs["embeddings"] = inputs["embeddings"][:, :length]
    else:
        return False
    offset = probe.offset - less if probe.offset else 0
    shorter = _drawn(replace(probe, inputs=inputs, offset=offset), 99)
    scores = scores_inside(tested, convention, shorter)
    visible = shorter.visible[0, 0]
    if scores is None or less < convention.joined or not np.isfinite(scores[0, 0][visible]).all():
        return False
    rows, keys = np.nonzero(probe.visible[0, 0])
    vectors = {int(d): own for d, own in zip(keys - rows - probe.offset, found[0], strict=True)}
    queries, of_keys, right = (
        own[0, 0]
        for own in (shorter.right["queries"], shorter.right["keys"], _right(tested, shorter))
    )
    apart = []
    for row, key in zip(*np.nonzero(visible), strict=True):
        own = vectors.get(int(key - row - offset))
        if own is None:
            continue
        rest = dict(query=queries[row], key=of_keys[key])
        known = np.concatenate([[1.0], *(rest[one] for one in unknowns)])
        apart.append(abs(factor * right[row, key] + own @ known - scores[0, 0, row, key]))
    size = max(1.0, float(np.abs(scores[0, 0][visible]).max(initial=0)))
    return bool(max(apart, default=0.0) > 1e-3 * size)


def _described(
    tested: FunctionUnderTest,
    found: Array,
    factor: float,
    unknowns: Sequence[str],
    rows: Array,
    keys: Array,
    sizes: dict[str, int],
) -> AddedScores | None:
    by, fault = _by(found, rows, keys, sizes), ""
    if by is None:
        return None
    if unknowns:
        at_zero = np.abs(found[:, rows == keys]).max(initial=0)
        fault = "distance_zero_not_read" * bool(at_zero < 1e-6 * np.abs(found).max())
        fault = fault or "relative_term_transposed" * (unknowns == UNKNOWNS[2])
        if any(abs(factor - share) < 1e-4 for share in SHARES):
            factor = 1.0
    elif is_reversed(tested, found[..., 0], rows, keys):
        fault = "relative_bias_reversed"
    if not fault and is_out_of_order(tested, found, rows, keys):
        fault = "distance_rows_out_of_order"
    if not (fault or tested.callee.said_scale) and unknowns and abs(factor - 1) < 1e-3:
        fault = "relative_term_unscaled" * is_unscaled(tested, found, rows, keys, sizes["D"])
    apart = np.stack([np.abs(rows - keys), np.ones(len(rows))], -1)
    rest = found[..., 0].T - apart @ np.linalg.lstsq(apart, found[..., 0].T, rcond=None)[0]
    is_linear = not unknowns and bool(np.abs(rest).max() < 1e-6 * np.abs(found).max())
    confused = by == "distance" and not unknowns and _are_confused(found, rows, keys, sizes)
    numbers = (np.unique(np.round(head, 5), axis=0) for head in found)
    is_of_table = any(len(one) < len(rows) for one in numbers)
    return AddedScores(tested, (), by, factor, fault, is_of_table, confused, is_linear)


def _drawn(probe: Probe, seed: int) -> Probe:
    """The same problem with other numbers."""
    rng = np.random.default_rng(700 + seed)
    names = ("embeddings", "context", "queries", "keys", "values")
    drawn = {n: rng.normal(size=a.shape) for n, a in probe.inputs.items() if n in names}
    rows, context = (probe.inputs.get(one) for one in ("embeddings", "context"))
    if rows is not None and context is not None:
        own = slice(-rows.shape[1], None)
        if np.array_equal(context[:, own], rows):  # it is joined with them
            drawn["context"][:, own] = drawn["embeddings"]
    name = f"{probe.name}, drawn {seed}"
    return replace(probe, inputs={**probe.inputs, **drawn}, name=name)


def _solved(
    samples: Sequence[tuple[Array, ...]], rows: Array, keys: Array, unknowns: Sequence[str]
) -> tuple[Array, float] | None:
    """What is added in each visible cell, (H, cells, numbers), and the factor of the scores.

    It is a constant and a vector for each of the `unknowns`; None if that does not explain all.
    """
    scores, right, queries, of_keys = (np.stack(one) for one in zip(*samples, strict=True))
    found, factors = [], []
    for head in range(scores.shape[1]):
        for row, key in zip(rows, keys, strict=True):
            vectors = {
                "query": queries[:, head, row],
                "key": of_keys[:, head, key],
                "key at the query": of_keys[:, head, row % of_keys.shape[2]],
                "query at the key": queries[:, head, key % queries.shape[2]],
            }
            constant = np.ones((len(scores), 1))
            known = [right[:, head, row, key, None], constant, *(vectors[one] for one in unknowns)]
            table, own = np.concatenate(known, -1), scores[:, head, row, key]
            solution = np.linalg.lstsq(table, own, rcond=None)[0]
            size = max(1.0, float(np.abs(own).max()))
            if np.abs(table @ solution - own).max() > 1e-5 * size:
                return None
            factors.append(solution[0])
            found.append(solution[1:])
    # Where a vector is both of the query's place and the key's, its share is not known.
    cells = np.array(factors).reshape(scores.shape[1], -1)
    cells = cells[:, rows != keys] if len(unknowns) > 2 else cells
    if np.ptp(cells) > 1e-3 * max(1.0, float(np.abs(cells).max())):
        return None
    in_cells = np.reshape(found, (scores.shape[1], len(rows), -1))
    return in_cells, float(np.median(cells))


def _by(found: Array, rows: Array, keys: Array, size: dict[str, int]) -> str | None:
    """Whether numbers for cells are a matter of the distance, or of the places; None of neither."""
    near = 1e-4 * max(1.0, float(np.abs(found).max()))
    if np.ptp(found, 1).max() < near:  # the same everywhere, and none is no position
        return None
    apart = [rows - keys]
    if size["S"] == size["L"]:  # and of the pixels of an image
        for side in (n for n in range(2, size["S"]) if size["S"] % n == 0):
            down, across = rows // side - keys // side, rows % side - keys % side
            apart.append(down * size["S"] + across)
    for distance in apart:
        same = (found[:, distance == one] for one in np.unique(distance))
        if all(np.ptp(one, 1).max(initial=0) < near for one in same):
            return "distance"
    return "places"


def _are_confused(found: Array, rows: Array, keys: Array, size: dict[str, int]) -> bool:
    """Whether displacements in an image that differ are given the same number, here and there."""
    if found.shape[-1] != 1 or size["S"] != size["L"]:
        return False
    for side in (n for n in range(2, size["S"]) if size["S"] % n == 0):
        apart = np.stack([rows // side - keys // side, rows % side - keys % side])
        _, of_cell = np.unique(apart, axis=1, return_inverse=True)
        numbers = np.round(found[0, :, 0], 6)
        pairs = np.unique(np.stack([of_cell.ravel(), numbers]), axis=1)
        if pairs.shape[1] == of_cell.max() + 1:  # one number for each displacement
            return bool(len(np.unique(numbers)) < pairs.shape[1])
    return False

"""Keys and values that pass through integers, and are read back as other numbers.

What meets the queries is found by asking with other queries, and what the weights blend too: where
either is not within steps of what the integers were made of, they are misread. Must not know how
integers are made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.calling import question_of
from regard.diagnosis.calls.convention import Convention, Question
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.examples import without_example
from regard.diagnosis.mistakes.calls import MISREAD
from regard.diagnosis.result import Outcome

# Code that changes keys after they are read: they are no longer those that were stored.
CHANGES_KEYS = re.compile(
    r"rope|rotary|rotate|hadamard|(rms|layer|k)_?norm|normali[sz]e\(|linalg\.norm", re.IGNORECASE
)
LOW = -1e3  # below this a cell is hidden
EXACT = 1e-4  # of the size of what is solved for
MOST_STEPS = 3.0  # by which what is read may differ from what was stored
MOST_NUMBERS = 2**12  # of the keys of a probe


@dataclass(frozen=True)
class Reading:
    """By how many steps at most keys, and values, differ from what was stored; 0: not seen."""

    keys: float = 0.0
    values: float = 0.0

    def __str__(self) -> str:
        parts = (("meets the queries", self.keys), ("the weights blend", self.values))
        return " and ".join(
            f"what {what} differs from it by up to {steps:.3g} steps of the integers"
            for what, steps in parts
            if steps > MOST_STEPS
        )

    @property
    def is_wrong(self) -> bool:
        """Whether keys or values are read as others."""
        return max(self.keys, self.values) > MOST_STEPS


def read_back(tested: FunctionUnderTest) -> Reading | None:
    """How far keys and values are read back as others than they were; None if it is not seen."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    if not tested.quantises or tested.of_gradients or CHANGES_KEYS.search(code):
        return None
    if tested.callee.kind != "arrays" or tested.stated.mechanism is not None:
        return None
    for convention in (own for one in find_conventions(tested) for own in one):
        probe = next(_probes(tested, convention), None)
        found = None if probe is None else _read(tested, convention, probe)
        if found is not None:
            return found
    return None


def misread(tested: FunctionUnderTest, unknown: Outcome) -> Outcome:
    """The verdict on a function whose keys or values are misread; else what it was."""
    seen = read_back(tested)
    if seen is None or not seen.is_wrong:
        return unknown
    why = f"The integers are rounded well, but {seen}. {MISREAD.why}"
    return replace(
        unknown,
        verdict="mistaken",
        summary=f"{unknown.function} is mistaken: {MISREAD.title}",
        mistakes=(replace(without_example(MISREAD), why=why),),
        nearest=(),
        findings=tuple(one for one in unknown.findings if one.name != "measured"),
        measured=False,
    )


def reads_well(tested: FunctionUnderTest) -> bool:
    """Whether keys and values are seen to be read back as what they were, within their steps."""
    seen = read_back(tested)
    return seen is not None and 0 < seen.keys < 1 and 0 < seen.values < 1


def _probes(tested: FunctionUnderTest, convention: Convention) -> Iterator[Probe]:
    for probe in tested.probes_for(convention):
        rules = probe.keep is not None or probe.window is not None or probe.scale is not None
        sizes = probe.sizes
        small = min(sizes["D"], sizes["S"]) > 2 and probe.inputs["keys"].size <= MOST_NUMBERS
        if rules or probe.chunks or not small or "bias" in probe.inputs:
            continue
        if tested.ask(convention, probe).output is not None:
            yield probe


def _read(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> Reading | None:
    """What is read in a probe; None if what happens inside is not seen."""
    stored = _steps(tested, convention, probe)
    if stored is None:
        return None
    samples = [*_samples(tested, convention, probe)]
    if len(samples) < _count(probe):
        return None
    rows = [*_rows_of_scores([one for one, _, _ in samples])]
    queries, outputs = (np.stack([one[n] for one in samples]) for n in (1, 2))
    of_keys, of_values = 0.0, 0.0
    for scores in rows:
        # Room for more keys is hidden; fewer may be in any places.
        count, seen = probe.sizes["S"], np.abs(scores).max(0) < -LOW
        if len(seen) < count or seen[count:].any() or seen.sum() < 2:
            continue
        scores, seen = scores[:, :count], seen[:count]
        for place in np.ndindex(*queries.shape[1:-1]):
            batch, head, _ = place
            group = head * probe.sizes["G"] // probe.sizes["H"]
            read = _solved(queries[(slice(None), *place)], scores[:, seen])
            if read is None:
                continue
            scale = probe.sizes["D"] ** -0.5
            keys, step = (one[batch, group][seen] for one in (probe.inputs["keys"], stored[0]))
            if step.all():
                of_keys = max(of_keys, _apart(read.T / scale, keys, step, of_scores=True))
            with np.errstate(all="ignore"):
                weights = np.exp(scores[:, seen] - scores[:, seen].max(-1, keepdims=True))
            weights = weights / weights.sum(-1, keepdims=True)
            blended = _solved(weights, outputs[(slice(None), *place)], shift=False)
            values, step = (one[batch, group][seen] for one in (probe.inputs["values"], stored[1]))
            if blended is not None and step.all():
                of_values = max(of_values, _apart(blended, values, step, of_scores=False))
    return Reading(of_keys, of_values) if rows else None


def _count(probe: Probe) -> int:
    return max(probe.sizes["D"], probe.sizes["S"]) + 4


def _steps(
    tested: FunctionUnderTest, convention: Convention, probe: Probe
) -> tuple[Array, Array] | None:
    """The steps of the integers that keys and values pass through, where they fit them."""
    names = ("keys", "values")
    try:
        given = arguments_for(tested.callee, convention, probe)
    except NotOfferedError:
        return None
    own: Question = question_of(tested.callee, convention, probe, given)
    arrays = {name: probe.inputs[name] for name in names}
    own = replace(own, calls=(*own.calls, arrays), looks="integers")
    result = tested.put(own)[-1]
    found = [one.numbers for one in result.arrays if one.numbers is not None]
    if result.problem or len(found) != len(names) or not any(one.any() for one in found):
        return None
    return found[0], found[1]


def _samples(
    tested: FunctionUnderTest, convention: Convention, probe: Probe
) -> Iterator[tuple[list[Array], Array, Array]]:
    """The scores that softmaxes get, the queries, and the output, for other queries each time."""
    rng = np.random.default_rng(31)
    for number in range(_count(probe)):
        queries = rng.normal(size=probe.inputs["queries"].shape)
        inputs = {**probe.inputs, "queries": queries}
        other = replace(probe, inputs=inputs, name=f"{probe.name}, queries {number}")
        output = tested.ask(convention, other).output
        given = arguments_for(tested.callee, convention, other)
        own = question_of(tested.callee, convention, other, given)
        result = tested.put(replace(own, looks="scores"))[-1]
        arrays = [one.numbers for one in result.arrays if one.numbers is not None]
        if output is None or result.problem or not np.isfinite(output).all():
            return
        yield arrays, queries.astype(convention.dtype).astype(float), output


def _rows_of_scores(samples: list[list[Array]]) -> Iterator[Array]:
    """Each row of scores (samples, keys) that is there in every sample."""
    shapes = [[one.shape for one in arrays] for arrays in samples]
    if any(own != shapes[0] for own in shapes):
        return
    for arrays in zip(*samples, strict=True):
        whole = np.stack(arrays)
        yield from np.moveaxis(whole.reshape(len(whole), -1, whole.shape[-1]), 1, 0)


def _solved(known: Array, got: Array, *, shift: bool = True) -> Array | None:
    """The matrix by which rows are multiplied, if that explains all numbers.

    With `shift` the same may be added to, or taken from, all numbers of a row.
    """
    if got.shape[-1] < 2:
        return None
    own = got - got.mean(-1, keepdims=True) if shift else got
    table = np.concatenate([known, np.ones((len(known), 1))], -1) if shift else known
    if len(table) <= table.shape[-1]:
        return None
    solution = np.linalg.lstsq(table, own, rcond=None)[0]
    size = max(1e-3, float(np.abs(own).max()))
    if np.abs(table @ solution - own).max() > EXACT * size:
        return None
    return np.asarray(solution[: known.shape[-1]])


def _apart(read: Array, stored: Array, step: Array, *, of_scores: bool) -> float:
    """By how many steps what is read differs at most from some row that was stored.

    Another factor of all rows is no matter of integers, nor is the order in which rows lie. What
    is added to all keys alike changes no weight.
    """
    if of_scores:
        read, stored = (one - one.mean(0) for one in (read, stored))
    factor = float(np.linalg.norm(read) / max(float(np.linalg.norm(stored)), 1e-30))
    apart = (
        np.abs(read[:, None] - own * stored).max(-1) / (own * step.max(-1))
        for own in (1.0, max(factor, 1e-3))
    )
    return min(float(one.min(-1).max()) for one in apart)

"""What can be measured of a function that no mistake of the catalogue explains.

The weights, from values of the identity; who influences whom; where a text becomes too long. Some
facts hold for no right attention: these have a name. Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Convention, agrees
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.probes import ROUND, ready_probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.added_scores import are_plain
from regard.diagnosis.judging.local_blocks import may_be_meant, wraps_around
from regard.diagnosis.judging.random_features import weighs_by_length
from regard.diagnosis.judging.third_tokens import reads_third_tokens

KEYS = 6
# Code that moves what is computed for each distance to the cells of queries and keys.
SHIFTS = re.compile(r"rel\w*_shift|shift_rel|relative_to_absolute|rel_to_abs|skew", re.IGNORECASE)
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33, 64, 65, 128, 129)


@dataclass(frozen=True)
class Fact:
    """What was measured; `broken` is the name of a mistake if no right attention has it."""

    text: str
    broken: str = ""


def measured(tested: FunctionUnderTest, convention: Convention, unit: float) -> Iterator[Fact]:
    """Facts about a function, the most telling first."""
    callee, stated = tested.callee, tested.stated
    if callee.unused:
        yield Fact(f"nothing reads {', '.join(callee.unused)}", "layer_unused")
    # In another layout than is meant everything seems mixed.
    sure = not any(one.guessed for one in callee.parameters) and (
        callee.kind != "arrays"
        or convention.layout in (callee.layout, stated.layout)
        or any(tested.is_right(convention, own) for own in tested.probes_for(convention))
    )
    for fact in _measured(tested, convention, unit):
        meant = fact.broken in callee.meant or stated.mechanism is not None
        # Where rows may come before the batch, what seems a text may be a position.
        turned = callee.rows_first and convention.layout == "BLM" and stated.layout is None
        meant = meant or (fact.broken == "batch_elements_mixed" and turned)
        yield fact if sure and not meant else replace(fact, broken="")


def _measured(tested: FunctionUnderTest, convention: Convention, unit: float) -> Iterator[Fact]:
    first = tested.probes_for(convention)[0]
    if not tested.is_right(convention, first) and are_plain(tested, convention):
        yield Fact(
            "the scores that the softmax gets are right: look at the weights, the values, and how "
            "heads are put together"
        )
    if tested.callee.kind != "arrays":
        yield from _of_tokens(tested, convention)
    elif not convention.one_query:
        if weighs_by_length(tested, convention):
            text = "a query of zeros gives long keys another weight than short ones"
            yield Fact(text, "random_features_weigh_keys")
        if wraps_around(tested, convention):
            text = "the first block sees the last one, and nothing between them"
            yield Fact(text, "window_wraps_around")
        yield from _of_identity(tested, convention, _keys(tested), unit)
        means = _hides_by_itself(tested)
        seen = _seeing_the_last(tested, convention) if means else None
        if seen is not None and seen[:-1].any():
            text = f"the last key changes the output of query {seen.argmax()} of {len(seen)}"
            yield Fact(text, "later_tokens_seen")
        yield from _mixing(tested, convention)
        yield from _of_length(tested, convention, unit)


def _hides_by_itself(tested: FunctionUnderTest) -> bool:
    """Whether code has a causal rule, without a flag or a needed mask for it."""
    callee = tested.callee
    return callee.says_causal and "causal" not in callee.roles and not callee.needs_mask


def order_matters(tested: FunctionUnderTest, convention: Convention) -> bool | None:
    """Whether the order of the keys changes what the last query gets; None if it is not known."""
    if tested.callee.kind in ("arrays", "self"):
        if convention.one_query:
            return None
        probe = _square(convention, _keys(tested))
        names = ("keys", "values") if tested.callee.kind == "arrays" else tuple(probe.inputs)
        axis = -2
    else:
        probe = next(one for one in tested.probes_for(convention) if one.keep is None)
        names, axis = ("context" if "context" in probe.inputs else "embeddings",), 1
    order = np.arange(probe.sizes["S"])
    order[:-1] = np.roll(order[:-1], 2)
    if tested.callee.kind == "self":
        same = probe.inputs["queries"]
        probe = replace(probe, inputs=dict.fromkeys(probe.inputs, same))
    inputs = dict(probe.inputs)
    inputs |= {name: np.take(probe.inputs[name], order, axis) for name in names}
    moved = replace(probe, inputs=inputs)
    one, other = tested.ask(convention, probe).output, tested.ask(convention, moved).output
    if one is None or other is None:
        return None
    return not agrees(one[..., -1, :], other[..., -1, :], 1e-4 * max(1.0, float(np.abs(one).max())))


def is_causal(tested: FunctionUnderTest, convention: Convention) -> bool | None:
    """Whether the last key or token leaves the output of the first alone; None if unknown."""
    seen = _seeing_the_last(tested, convention)
    return None if seen is None or not seen[-1] else not seen[0]


def _seeing_the_last(tested: FunctionUnderTest, convention: Convention) -> Array | None:
    """Which rows of the output the last key or token changes; None if that is not known."""
    if tested.callee.kind == "arrays":
        if convention.one_query:
            return None
        probe = _square(convention, _keys(tested))
        names: tuple[str, ...] = ("keys", "values")
    else:
        probe = next(one for one in tested.probes_for(convention) if one.keep is None)
        names = ("embeddings" if "embeddings" in probe.inputs else "queries",)
    if (before := tested.ask(convention, probe).output) is None:
        return None
    for name in names:
        rows = probe.inputs[name].copy()
        rows[..., -1, :] = 0.5 - rows[..., -1, ::-1]  # no normalisation takes that out again
        probe = _with_rows(probe, name, rows)
    if (after := tested.ask(convention, probe).output) is None:
        return None
    apart = np.abs(after - before).max(-1).reshape(-1, before.shape[-2]).max(0)
    return np.asarray(apart > 1e-4 * (float(np.abs(before).max()) + 1e-30))


def _keys(tested: FunctionUnderTest) -> int:
    return ROUND if tested.is_round else KEYS


def _square(convention: Convention, keys: int) -> Probe:
    """As many queries as keys, in the layout of a convention."""
    batch, heads = 2 if "B" in convention.layout else 1, 2 if "H" in convention.layout else 1
    sizes = (batch, heads, heads, keys, keys, keys, keys)
    rank = len(convention.layout)
    name = f"{keys} keys measured"
    return ready_probe(name, "plain", sizes, 600, rank=rank, causal=convention.causal_always)


def _identity(probe: Probe) -> Array:
    return np.broadcast_to(np.eye(probe.sizes["S"]), probe.inputs["values"].shape).copy()


def _of_identity(
    tested: FunctionUnderTest, convention: Convention, keys: int, unit: float
) -> Iterator[Fact]:
    """What the weights of a function show, which it returns for values of the identity."""
    if "value" not in tested.callee.roles:  # the keys are the values
        return
    probe = _square(convention, keys)
    probe = replace(probe, inputs={**probe.inputs, "values": _identity(probe)})
    weights = tested.ask(convention, probe).output
    if weights is not None and np.isfinite(weights).all():
        for fact in _of_weights(weights, probe, 8 * probe.tolerance(unit)):
            yield replace(fact, broken="") if may_be_meant(tested, fact.broken) else fact


def _of_weights(weights: Array, probe: Probe, tolerance: float) -> Iterator[Fact]:
    """What the weights (B, H, L, S) of a function show."""
    right = probe.right["weights"]
    if agrees(weights, right, tolerance):
        return
    seen, visible = np.abs(weights) > tolerance, right > 0
    never = np.flatnonzero(~seen.any((0, 1, 2)))
    if never.size:
        keys = ", ".join(map(str, never))
        many = never.size > 1
        yield Fact(
            f"key{'s' if many else ''} {keys} of 0 … {weights.shape[-1] - 1} "
            f"get{'' if many else 's'} no weight from any query: is it the end of a loop or a "
            f"slice that leaves {'them' if many else 'it'} out?",
            "keys_never_seen",
        )
    first = seen[0, 0, 0]
    inner = np.flatnonzero(first)
    if (
        first[0]
        and first[-1]
        and not first.all()
        and np.diff(inner).max() == weights.shape[-1] - len(inner) + 1
    ):
        yield Fact(
            "the first query sees the last keys and none in the middle", "window_wraps_around"
        )
    if _counts_twice(weights, probe, seen):
        text = "some keys have twice the weight that their scores give them, and no key has less"
        yield Fact(text, "keys_counted_twice")
    leaking = seen & ~visible
    if leaking.any():
        _, _, row, key = np.argwhere(leaking)[0]
        yield Fact(f"query {row} gives weight to key {key}, which comes after it")
    sums = weights.sum(-1)
    off = np.abs(sums - 1) > max(tolerance, 8 * UNITS["float32"] * KEYS)
    if off.any():
        low, high = float(sums.min()), float(sums.max())
        how = f"all to {low:.4g}" if high - low < tolerance else f"to {low:.4g} … {high:.4g}"
        yield Fact(
            f"rows of weights do not add up to 1 but {how}: look at what divides them",
            "weights_do_not_add_up",
        )
        columns = weights.sum(-2)
        if np.abs(columns - 1).max() < tolerance:
            yield Fact("columns of weights add up to 1: the softmax runs along the queries")
    if weights.min() < -tolerance:
        lowest = float(weights.min())
        yield Fact(f"a weight is negative ({lowest:.4g}): it does not come from a softmax")
        return
    yield from _of_scores(weights, probe, seen)


def _counts_twice(weights: Array, probe: Probe, seen: Array) -> bool:
    """Whether exponentials are added once, twice, or more often."""
    if weights.min() < 0 or weights.shape != probe.right["scaled"].shape or not seen.any():
        return False
    ratio = np.where(seen, weights / np.exp(probe.right["scaled"]), np.inf)
    times = np.where(seen, ratio / ratio.min(-1, keepdims=True), 1.0)
    whole = np.abs(times - np.round(times)).max() < 1e-4
    return bool(
        whole and 1.5 < times.max() < 8.5 and (np.round(times) == 1).sum() > times.size // 4
    )


def _of_scores(weights: Array, probe: Probe, seen: Array) -> Iterator[Fact]:
    """What the logarithms of the weights show of the scores, each row without its mean."""
    cells = seen & (probe.right["weights"] > 0)
    if cells.sum() < 8:
        return

    def centred(numbers: Array) -> Array:
        counts = np.maximum(cells.sum(-1, keepdims=True), 1)
        means = np.where(cells, numbers, 0).sum(-1, keepdims=True) / counts
        return np.where(cells, numbers - means, 0)

    with np.errstate(all="ignore"):
        own = centred(np.where(cells, np.log(np.where(cells, weights, 1)), 0))
    scores = centred(np.where(cells, probe.right["scaled"], 0))
    factor = float((own * scores).sum() / max(float(np.square(scores).sum()), 1e-30))
    rest = own - factor * scores
    share = float(np.square(rest).sum() / max(float(np.square(own).sum()), 1e-30))
    width = probe.sizes["D"]
    if share < 1e-9:
        if abs(factor - 1) > 1e-6:
            yield Fact(
                f"the scores are multiplied by {factor / width**0.5:.4g} instead of 1/√D = "
                f"{width**-0.5:.4g} for D = {width}"
            )
        return
    if abs(factor) < 0.05:
        yield Fact("the weights hardly depend on q·k")
        return
    size, row = probe.sizes["L"], np.arange(probe.sizes["L"])[:, None]
    apart = np.broadcast_to(row - np.arange(size), own.shape)
    bias = [rest[:, :, apart[0, 0] == n] for n in range(1 - size, size)]
    if all(np.ptp(np.round(one, 6), -1).max(initial=0) < 1e-5 for one in bias if one.size):
        yield Fact(
            "something is added to the scores that depends on the distance of query and key alone"
        )
    elif factor < 0:
        yield Fact("scores count the wrong way round: the key that fits best gets least weight")


def _mixing(tested: FunctionUnderTest, convention: Convention) -> Iterator[Fact]:
    """Whether batch elements, heads, or queries influence each other."""
    probe = _square(convention, _keys(tested))
    before = tested.ask(convention, probe).output
    if before is None:
        return
    size = float(np.abs(before).max()) + 1e-30
    for axis, what in ((0, "batch elements"), (1, "heads")):
        if before.shape[axis] < 2:
            continue
        first = (slice(None),) * axis + (0,)
        changed = {name: array.copy() for name, array in probe.inputs.items()}
        for name in ("keys", "values"):
            changed[name][first] += 0.5
        after = tested.ask(convention, replace(probe, inputs=changed)).output
        if after is None:
            continue
        other = (slice(None),) * axis + (1,)
        if np.abs(after[other] - before[other]).max() > 1e-4 * size:
            yield Fact(
                f"{what} are mixed: keys and values of the first change the output of the second",
                f"{what.replace(' ', '_')}_mixed",
            )
    queries = probe.inputs["queries"].copy()
    queries[..., -1, :] += 1.0
    after = tested.ask(
        convention, replace(probe, inputs={**probe.inputs, "queries": queries})
    ).output
    if after is not None and np.abs(after[..., 0, :] - before[..., 0, :]).max() > 1e-4 * size:
        yield Fact(
            "queries influence each other: the last query changes the output of the first",
            "queries_mixed",
        )
    if not convention.causal_always and order_matters(tested, convention):
        yield Fact(
            "the order of the keys matters: look for positions, a window, blocks, or a mask that "
            "is always on"
        )


def _of_length(tested: FunctionUnderTest, convention: Convention, unit: float) -> Iterator[Fact]:
    """From how many keys on a function is wrong."""
    right, coarse = 0, UNITS["float32"]
    for keys in [] if tested.is_round else LENGTHS:
        probe = _square(convention, keys)
        output = tested.ask(convention, probe).output
        if output is None:
            return
        if not agrees(output, probe.result(probe.right), probe.tolerance(coarse)):
            if right > 1:
                broken = (x for x in _of_identity(tested, convention, keys, unit) if x.broken)
                yield from broken
                yield Fact(
                    f"it is right up to {right} keys and wrong for {keys}: is a block, a buffer or "
                    f"a window {right} long?"
                )
            return
        right = keys


def _of_tokens(tested: FunctionUnderTest, convention: Convention) -> Iterator[Fact]:
    """The same for a function of embeddings."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    if SHIFTS.search(code) and reads_third_tokens(tested, convention):
        text = "the score of two tokens depends on a third one, next to either"
        yield Fact(text, "relative_shift_misplaced")
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or (before := tested.ask(convention, probe).output) is None:
        return
    size = float(np.abs(before).max()) + 1e-30
    name = "embeddings" if "embeddings" in probe.inputs else "queries"
    rows = probe.inputs[name]
    if len(rows) > 1:
        changed = rows.copy()
        changed[0] += 0.5
        after = tested.ask(convention, _with_rows(probe, name, changed)).output
        if after is not None and np.abs(after[1] - before[1]).max() > 1e-4 * size:
            yield Fact(
                "batch elements are mixed: tokens of the first change the output of the second",
                "batch_elements_mixed",
            )
    if is_causal(tested, convention) is False and tested.callee.says_causal:
        broken = "later_tokens_seen" * _hides_by_itself(tested)
        yield Fact("the last token changes the output of the first", broken)
    if order_matters(tested, convention):
        yield Fact(
            "the order of earlier tokens changes what the last one gets: look for positions, a "
            "window, or tokens and heads that were reshaped instead of transposed"
        )


def _with_rows(probe: Probe, name: str, rows: Array) -> Probe:
    own = probe.inputs[name]
    same = {one: rows for one, array in probe.inputs.items() if array is own}
    return replace(probe, inputs={**probe.inputs, **same})

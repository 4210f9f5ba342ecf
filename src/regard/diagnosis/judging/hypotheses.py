"""Which hypothesis about a function explains everything that it returned.

A hypothesis says how it is called and what it computes besides; with it go no mistake, one, or two.
Must not know how findings are worded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.diagnosis.calls.arguments import KEYS_ONLY, mask_role
from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.convention_search import key_mask_convention
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.trees import FEWER_KEYS
from regard.diagnosis.judging import matching
from regard.diagnosis.judging.added_scores import added_scores, are_plain, seen_as
from regard.diagnosis.judging.built_in import PLAIN, BuiltIn, usual, with_built_in
from regard.diagnosis.judging.fitted import fitted, of_buffers
from regard.diagnosis.judging.matching import Found, Matcher, ProbeOutput
from regard.diagnosis.judging.measured import is_causal, order_matters
from regard.diagnosis.judging.misread import reads_well
from regard.diagnosis.judging.places import are_in_another_order, larger, seen_places
from regard.diagnosis.judging.precision import HALF, half_type
from regard.diagnosis.mistakes import all_mistakes, linear
from regard.diagnosis.mistakes.calls import POSITIONS_RESTART, TOKENS_MISPLACED
from regard.diagnosis.mistakes.positions import positions_of_slots
from regard.diagnosis.mistakes.windows import SLOT_POSITIONS
from regard.diagnosis.reading.constructor_arguments import PARTIAL, SLOPES

# Windows of functions that have no parameter for one.
WINDOWS = (2, 3, 4, 5)
# The share of outputs that are wrong at least where half precision is the reason.
MOST_EXACT = 0.5
# What the code of a computation has that has something besides.
WORDS_OF = {
    "rotary": re.compile(r"cos|sin|rope|rot|freq|polar|angle|theta|pos", re.IGNORECASE),
    "ALiBi": re.compile(r"alibi|slope|dist|range|iota|indices|bias|pos|decay", re.IGNORECASE),
    "softcap": re.compile(r"tanh|cap", re.IGNORECASE),
    "window": re.compile(
        r"window|band|range|local|tri[lu]|near|dist|unfold|roll|iota|block|chunk|eye",
        re.IGNORECASE,
    ),
}
INTEGERS = ("int8", "int4")  # through which numbers may pass
# Conventions under one hypothesis, and what the function returned under them.
OWN_WINDOW = re.compile(r"\bself\.\w*window")  # of an object's method
View = tuple[Sequence[Convention], list[ProbeOutput]]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One way of calling a function, what it computes besides, and the comparison of outputs."""

    conventions: Sequence[Convention]
    matcher: Matcher
    built_in: BuiltIn = PLAIN
    groups_are_meant: bool = False  # whether the code says that there may be fewer key heads


@dataclass(frozen=True, eq=False)
class Match:
    """The hypothesis that explains all outputs, and with which mistakes; none if all are right."""

    hypothesis: Hypothesis
    mistakes: tuple[Found, ...]
    exact_to: str


def best_match(
    tested: FunctionUnderTest, views: Sequence[View], units: Sequence[str], *, most: int = 2
) -> tuple[Match | None, Hypothesis]:
    """What explains every output, if anything does, and the hypothesis with most right ones.

    With at most so many mistakes: 0, 1 or 2 at once. Half precision comes last, and only with
    evidence of it: within its tolerance a small mistake is right.
    """
    if len(views) > 1 and not tested.callee.needs_mask:  # a required one may make it causal
        views = _plain_ones(tested, views)

    code = "".join(text for _, text in tested.callee.blocks)
    meant = FEWER_KEYS.search(tested.callee.name + code)
    mends = "nan_to_num" in code or "isnan(" in code

    def hypotheses(unit: str) -> list[Hypothesis]:
        practical = unit != units[0]
        found = [
            Hypothesis(
                conventions,
                Matcher(outputs, UNITS[unit], practical, mends_nan=mends),
                PLAIN,
                meant is not None,
            )
            for conventions, outputs in views
        ]
        return [own for one in found for own in (*_as_scaled(tested, one), one)]

    def share_wrong(one: Hypothesis) -> float:
        return len(one.matcher.wrong) / len(one.matcher.outputs)

    best_first = sorted(hypotheses(units[0]), key=share_wrong)
    match, wide = None, [unit for unit in units if unit not in HALF] or units[:1]
    for unit in wide:
        match = match or _right_or_one(hypotheses(unit), unit, most)
    # Digits that are lost besides are told afterwards: a candidate is computed only once.
    plain = match is None and any(are_plain(tested, own[0]) for own, _ in views)
    if not plain:  # where it is seen that the softmax gets the scores alone, nothing is besides
        match = match or _with_built_in(tested, hypotheses(wide[-1]), wide, most)
    softmax_lost = match is not None and [one.name for one, _ in match.mistakes] == ["no_softmax"]
    if tested.callee.says_linear and not tested.of_gradients and (match is None or softmax_lost):
        match = _linear(hypotheses(wide[-1]), wide[-1], most) or match
    for unit in wide if most and not tested.of_gradients else ():
        match = match or _fitted(sorted(hypotheses(unit), key=share_wrong), unit)
    as_meant = [own for one in best_first for own in _as_meant(tested, one)]
    for unit in wide:
        own = [own for one in hypotheses(unit) for own in _as_meant(tested, one)]
        match = match or _right_or_one(own, unit, most)
    if not plain and as_meant:
        match = match or _with_built_in(tested, as_meant, wide, most)
    match = match or (None if plain else _with_added(tested, hypotheses, wide, most))
    for unit in wide if not plain else ():
        match = match or _with_places(tested, hypotheses(unit), unit, most)
    if most > 1:
        match = match or _two(best_first, units[0])
    rounds = share_wrong(best_first[0]) > MOST_EXACT  # rounding leaves few numbers as they were
    if match is None and len(units) > 1 and rounds and not tested.of_gradients:
        half = half_type(tested, best_first[0].conventions[0])
        for unit in () if half is None else (half, "bfloat16"):
            match = match or _right_or_one(hypotheses(unit), unit, most)
    if match is None and tested.quantises and not tested.of_gradients:
        match = _of_integers(tested, hypotheses)
    pieces = tested.callee.says_pieces or (tested.callee.remembers and not tested.callee.steps)
    if most and match is None and pieces and _wrong_in(best_first[0]) == {"cache"}:
        match = Match(best_first[0], ((TOKENS_MISPLACED, RIGHT),), units[0])
    return match, best_first[0]


def _plain_ones(tested: FunctionUnderTest, views: Sequence[View]) -> Sequence[View]:
    """The views under which the softmax gets the scores, if there are any.

    Code that means to be causal may hide later keys after its softmax.
    """
    plain, rest = list[View](), list[View]()
    for view in views:
        (plain if are_plain(tested, view[0][0]) else rest).append(view)
    if not (plain and tested.callee.says_causal):
        return plain or views
    return [*plain, *(view for view in rest if view[0][0].causal_always)]


def _of_integers(
    tested: FunctionUnderTest, hypotheses: Callable[[str], list[Hypothesis]]
) -> Match | None:
    """A function that is right within the digits of integers, also with something besides."""
    for kind in INTEGERS:
        found = next((one for one in hypotheses(kind) if not one.matcher.wrong), None)
        square = tested.callee.kind != "arrays"
        for own in built_in_of(tested, square=square) if found is None else ():
            for one in hypotheses(kind):
                matcher = one.matcher.with_built_in(own)
                if matcher is not None and matcher.is_right:
                    found = found or replace(one, matcher=matcher, built_in=own)
        if found is not None and (kind == "int8" or reads_well(tested)):
            return Match(found, (), kind)
    return None


def _wrong_in(one: Hypothesis) -> set[str]:
    """The abilities in which something is wrong."""
    return {one.matcher.outputs[number].probe.ability for number in one.matcher.wrong}


def _as_scaled(tested: FunctionUnderTest, one: Hypothesis) -> Iterator[Hypothesis]:
    """The same with another scale, if the code says that it is meant to have that, or none."""
    own = BuiltIn(said_scale=tested.callee.said_scale)
    if not own.said_scale or tested.stated.mechanism is not None:
        return
    if (matcher := one.matcher.with_built_in(own)) is not None:
        yield replace(one, matcher=matcher, built_in=own)


def _linear(hypotheses: Sequence[Hypothesis], unit: str, most: int) -> Match | None:
    """Linear attention: right with one of the feature maps, or with one mistake."""
    for one, (name, variants) in itertools.product(hypotheses, linear.RIGHT_ONES.items()):
        for variant in variants:
            if one.matcher.fits(variant):
                matcher = replace(one.matcher, base=variant)
                own = replace(one, matcher=matcher, built_in=BuiltIn(linear=name))
                return Match(own, (), unit)
    for one, mistake in itertools.product(hypotheses, linear.MISTAKES if most else ()):
        names = itertools.cycle(linear.maps_of(mistake))
        for name, variant in zip(names, mistake.variants, strict=False):
            if one.matcher.fits(variant):
                matcher = replace(one.matcher, base=linear.RIGHT_ONES[name][0])
                own = replace(one, matcher=matcher, built_in=BuiltIn(linear=name))
                return Match(own, ((mistake, variant),), unit)
    return None


def _as_meant(tested: FunctionUnderTest, one: Hypothesis) -> Iterator[Hypothesis]:
    """Without masks that were broadcast by accident, and lengths that are not documented.

    Where one of keys (B, S) is right, those are of cells; where one of cells (L, S) is right, those
    that differ between batch elements.
    """
    right = {x.probe.ability for x in one.matcher.outputs} - {
        one.matcher.outputs[n].probe.ability for n in one.matcher.wrong
    }
    shapes = {convention.mask_shape for convention in one.conventions}
    for convention in one.conventions if "key mask" in right else ():
        for probe in tested.probes_for(convention):
            if probe.ability == "key mask":
                shapes.add(key_mask_convention(tested, convention, probe).mask_shape)
    accidents: tuple[str, ...] = ()
    if "key mask" in right and "batch keys" in shapes and "bias" not in tested.callee.roles:
        accidents = ("mask", "causal and mask", "bias")
    elif "mask" in right and shapes <= {"cells", "head cells"} and not _has_mask_of_keys(tested):
        accidents = ("key mask",)
    kept = [x for x in one.matcher.outputs if x.probe.ability not in accidents]
    if tested.callee.has_one_length:
        kept = [x for x in kept if x.probe.sizes["L"] == x.probe.sizes["S"]]
    if 0 < len(kept) < len(one.matcher.outputs):
        yield replace(one, matcher=Matcher(kept, one.matcher.unit, one.matcher.practical))


def _has_mask_of_keys(tested: FunctionUnderTest) -> bool:
    """Whether padded keys have a mask of their own, beside one of cells."""
    return mask_role(tested.callee, keys=True) != mask_role(tested.callee)


def _with_added(
    tested: FunctionUnderTest,
    hypotheses: Callable[[str], list[Hypothesis]],
    units: Sequence[str],
    most: int,
) -> Match | None:
    """A function that adds numbers to its scores by place besides: right, or with one mistake."""
    known_one = tested.stated.mechanism is None or tested.callee.says_cosine
    plain = hypotheses(units[0]) if known_one else []
    known = {id(one.conventions): added_scores(tested, one.conventions) for one in plain}
    for unit in units:
        found = []
        for one in hypotheses(unit) if any(known.values()) else ():
            own = replace(one.built_in, added=known[id(one.conventions)])
            matcher = one.matcher.with_built_in(own) if own.added else None
            found += [] if matcher is None else [replace(one, matcher=matcher, built_in=own)]
        if (match := _right_or_one(found, unit, most)) is not None:
            return match
        # How a context is read is found out by right results, which there are none of here.
        alone = [less for one in found if (less := _without_context(one)) is not None]
        match = _right_or_one(alone, unit, most)
        if match is not None and not match.mistakes:
            return match
        for one in found if most else ():
            if _wrong_in(one) == {"cache"}:
                return Match(one, ((POSITIONS_RESTART, RIGHT),), unit)
    return None


def _with_places(
    tested: FunctionUnderTest, hypotheses: Sequence[Hypothesis], unit: str, most: int
) -> Match | None:
    """A function that hides keys by their places in a map: right, or with one mistake."""
    found = []
    for one in hypotheses if tested.stated.mechanism is None else ():
        more = larger(tested, one.conventions[0], one.matcher.outputs[0].probe)
        if more is not None:
            output = tested.ask(one.conventions[0], more).output
            outputs = [*one.matcher.outputs, ProbeOutput(more, np.asarray(output, float))]
            one = replace(one, matcher=Matcher(outputs, one.matcher.unit, one.matcher.practical))
        probes = [own.probe for own in one.matcher.outputs]
        for places in seen_places(tested, one.conventions[0], probes):
            built_in = replace(one.built_in, places=places)
            if (matcher := one.matcher.with_built_in(built_in)) is None:
                continue
            own = replace(one, matcher=matcher, built_in=built_in)
            if not places.misplaced:
                found.append(own)
            elif most:
                pairs = ((x.output, x.probe.result(x.probe.right)) for x in matcher.outputs)
                if all(x.ndim == 3 and are_in_another_order(x, right) for x, right in pairs):
                    return Match(own, ((all_mistakes()[places.fault], RIGHT),), unit)
    return _right_or_one(found, unit, most)


def _without_context(one: Hypothesis) -> Hypothesis | None:
    """The same without what was returned for a context; None if there is nothing else."""
    outputs = [x for x in one.matcher.outputs if "context" not in x.probe.inputs]
    if not 0 < len(outputs) < len(one.matcher.outputs):
        return None
    return replace(one, matcher=Matcher(outputs, one.matcher.unit, one.matcher.practical))


def _fitted(hypotheses: Sequence[Hypothesis], unit: str) -> Match | None:
    for one in hypotheses:
        if (found := fitted(one.matcher.without_accidents)) is not None:
            return Match(one, (found,), unit)
    return None


def _two(hypotheses: Sequence[Hypothesis], unit: str) -> Match | None:
    found = matching.pair([one.matcher.without_accidents for one in hypotheses])
    return None if found is None else Match(hypotheses[found[0]], found[1], unit)


def _right_or_one(hypotheses: Sequence[Hypothesis], unit: str, most: int) -> Match | None:
    for one in hypotheses:
        if not one.matcher.wrong:
            return Match(one, (), unit)
    fewer = [(one, one.matcher.without_accidents) for one in hypotheses]
    tried = [(one, one.matcher) for one in hypotheses]
    tried += [(one, matcher) for one, matcher in fewer if matcher is not one.matcher]
    for one, matcher in tried if most else ():
        if (mistake := matching.single(matcher)) is not None:
            return Match(one, (mistake,), unit)
    for one in hypotheses:
        wrong = [one.matcher.outputs[n].probe.ability for n in one.matcher.wrong]
        if set(wrong) == {"grouped"} and not one.groups_are_meant:  # it ran by accident
            outputs = [x for x in one.matcher.outputs if x.probe.ability != "grouped"]
            return Match(replace(one, matcher=replace(one.matcher, outputs=outputs)), (), unit)
    return None


def _with_built_in(
    tested: FunctionUnderTest, plain: Sequence[Hypothesis], units: Sequence[str], most: int
) -> Match | None:
    """A function that computes positions, a softcap or a window besides: right, or one mistake."""
    if tested.stated.mechanism is not None:
        return None

    def match(one: Hypothesis, *mistakes: Found) -> Match:
        """To the first precision in which it holds."""
        variant = mistakes[0][1] if mistakes else RIGHT
        finer = replace(one.matcher, unit=UNITS[units[0]], practical=False)
        return Match(one, mistakes, units[0] if finer.fits(variant) else units[-1])

    asked = None if tested.of_gradients else plain[0].conventions[0]
    causal = asked and is_causal(tested, asked)
    leaks = causal is False and tested.callee.says_causal
    if causal is not None and not leaks and "causal" not in tested.callee.roles:
        own = [one for one in plain if one.conventions[0].causal_always == causal]
        plain = own or plain
    ordered = asked is None or order_matters(tested, asked) is not False
    square = tested.callee.kind != "arrays"
    has_flag = "causal" in tested.callee.roles
    every = [
        replace(one, matcher=matcher, built_in=replace(own, said_scale=one.built_in.said_scale))
        for own in built_in_of(tested, square=square)
        for one in plain
        if (ordered or own.window is None)
        if square or _agree_on_places(own, one.conventions[0], has_flag=has_flag)
        if (matcher := one.matcher.with_built_in(own)) is not None
    ]
    for one in every:
        if one.matcher.is_right:
            return match(one)
    if not most:
        return None
    # Where scores are seen inside, they tell what is computed besides, or which keys are hidden.
    seen = [(one, *_is_seen(tested, one)) for one in every if not tested.of_gradients]
    alike = [one for one, _, same in seen if same]
    alike = alike or [one for one, hidden, _ in seen if hidden and one.built_in.is_combined]
    for whole, one in itertools.product((False, True), alike):
        if (found := matching.single(one.matcher, whole=whole)) is not None:
            return match(one, found)
    if any(same for *_, same in seen):
        return None
    for one in (one for one in every if not one.built_in.is_combined):
        if (found := matching.single(one.matcher, whole=tested.of_gradients)) is not None:
            return match(one, found)
    for one in every if ordered else ():
        if one.built_in.is_combined or one.built_in.softcap is not None:
            continue
        if (found := matching.single(one.matcher)) is not None:
            return match(one, found)
    for one in every:
        if one.built_in.positions and one.built_in.window and ordered:
            for variant in positions_of_slots():
                if one.matcher.fits(variant):
                    slots = replace(SLOT_POSITIONS, variants=(variant,))
                    return match(one, (slots, variant))
    for one in (one for one in every if not one.built_in.is_combined):
        causal_always = one.conventions[0].causal_always and not tested.of_gradients
        for found in of_buffers(one.matcher) if causal_always else ():
            if one.matcher.fits(found[1]):
                return match(one, found)
    return None


def _is_seen(tested: FunctionUnderTest, one: Hypothesis) -> tuple[bool, bool]:
    """Whether a softmax of the function hides the keys, and gets the scores, of a computation."""
    return seen_as(tested, one.conventions[0], lambda probe: with_built_in(one.built_in, probe))


def built_in_of(tested: FunctionUnderTest, *, square: bool) -> Iterator[BuiltIn]:
    """What it may compute besides; of a backward pass only the softcap that it has by default."""
    if tested.of_gradients:
        cap = tested.callee.roles.get("softcap")
        given = None if cap is None else cap.default
        own = [float(given)] if isinstance(given, int | float) and given else []
        caps = dict.fromkeys([*own, *tested.callee.caps])
        yield from (BuiltIn(softcap=one) for one in caps if one > 0)
        return
    code = "\n".join(text for _, text in tested.callee.blocks)
    every = SLOPES.search(code) is not None
    shares = (0.25, 0.5) if PARTIAL.search(code) else ()
    said = {name for name, words in WORDS_OF.items() if not code or words.search(code)}
    for one in usual(*_numbers(tested), square=square, shares=shares):
        if _needed(one) <= said:
            yield replace(one, any_heads=every and one.positions == "ALiBi")


def _needed(own: BuiltIn) -> set[str]:
    """What code has a word of if it computes this besides: each is a key of WORDS_OF."""
    parts = own.positions.partition(",")[0], own.softcap and "softcap", own.window and "window"
    return {one for one in parts if one}


def _agree_on_places(own: BuiltIn, convention: Convention, *, has_flag: bool) -> bool:
    """Whether positions and the causal rule place queries alike, if there are more keys."""
    if not own.positions or not (convention.causal_always or has_flag):
        return True
    return own.at_end == (convention.aligned == "end")


def _numbers(tested: FunctionUnderTest) -> tuple[list[float], list[int]]:
    """Numbers that parameters have by default, and the windows that may be built in."""
    defaults = [one.default for one in tested.callee.parameters]
    numbers = [float(x) for x in defaults if isinstance(x, int | float) and x is not True]
    numbers += tested.callee.caps
    hidden = tested.callee.kind in ("self", "projected") or tested.callee.remembers
    hidden |= any(OWN_WINDOW.search(text) for _, text in tested.callee.blocks)
    hidden = hidden and "window" not in tested.callee.roles
    return numbers, list(WINDOWS) if hidden else []


def _outputs(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> list[ProbeOutput]:
    """Everything that ordinary probes gave under one hypothesis."""
    outputs: list[ProbeOutput] = []
    for convention in conventions:
        for probe in tested.probes_for(convention):
            if _has_longer(outputs, probe):
                continue
            own = convention
            if probe.ability == "key mask":
                own = key_mask_convention(tested, convention, probe)
            answer = tested.ask(own, probe)
            if answer.output is not None and not _ran_by_accident(convention, probe):
                outputs.append(ProbeOutput.of(probe, answer.output.astype(np.float64)))
    return outputs


def _ran_by_accident(convention: Convention, probe: Probe) -> bool:
    """Whether a mask of keys was broadcast where the probe has a mask of cells."""
    if probe.ability == "mask" and convention.mask_shape in KEYS_ONLY:
        return True
    return (
        probe.keep is not None and probe.ability != "key mask" and convention.mask_shape == "keys"
    )


def _has_longer(outputs: Sequence[ProbeOutput], probe: Probe) -> bool:
    """Whether a long probe has been answered at this rank already."""
    return probe.ability == "long" and any(
        one.probe.ability == "long" and one.probe.rank == probe.rank for one in outputs
    )


def distinct_views(
    tested: FunctionUnderTest, hypotheses: Sequence[Sequence[Convention]]
) -> list[View]:
    """What a function returned, without hypotheses that give nothing, or the same as others.

    One under which all is NaN is a mask read the wrong way, if another has numbers.
    """
    kept: list[View] = []
    for conventions in hypotheses:
        outputs = _outputs(tested, conventions)
        if outputs and not any(_same_outputs(outputs, other) for _, other in kept):
            kept.append((conventions, outputs))
    numbers = [view for view in kept if any(np.isfinite(one.output).any() for one in view[1])]
    return numbers or kept


def _same_outputs(one: list[ProbeOutput], other: list[ProbeOutput]) -> bool:
    return len(one) == len(other) and all(
        a.probe is b.probe and np.array_equal(a.output, b.output, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )

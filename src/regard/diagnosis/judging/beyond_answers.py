"""Mistakes that the match of answers does not show: what was tried, or said, decides.

A mask that is read otherwise than documented, digits that are lost, and what several calls show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from regard.diagnosis.calls.arguments import mask_role
from regard.diagnosis.calls.convention_search import key_mask_convention
from regard.diagnosis.calls.probe import RIGHT
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.beams import beams_are_misplaced
from regard.diagnosis.judging.hypotheses import Hypothesis
from regard.diagnosis.judging.local_blocks import wraps_around
from regard.diagnosis.judging.matching import Found
from regard.diagnosis.judging.measured import is_causal
from regard.diagnosis.judging.norms_reached import what_norms_miss
from regard.diagnosis.judging.observations import (
    adds_numbers,
    adds_positions_to_values,
    depends_on_blocks,
    depends_on_prompt,
    inverts_integers,
    keeps_context,
    keeps_default,
    masks_of_windows_misplaced,
    option_of_mask,
)
from regard.diagnosis.judging.precision import HALF
from regard.diagnosis.judging.seen_globally import what_globals_miss
from regard.diagnosis.judging.value_rows import reads_opposite_rows
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.mistakes.calls import (
    BEAMS_MISPLACED,
    BLOCKS_MATTER,
    COLUMNS_MISREAD,
    DEFAULT_KEPT,
    DROPOUT_LEFT_ON,
    INTEGER_MASK,
    LATER_TOKENS,
    LAYER_UNUSED,
    MASKS_OF_WINDOWS,
    OF_NORMS,
    POSITIONS_IN_VALUES,
    POSITIONS_ROUNDED,
    POSITIONS_UNUSED,
    QUERIES_FROM_CONTEXT,
    STALE_CONTEXT,
    TOKENS_MISPLACED,
    VALUE_ROWS_REVERSED,
)
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.mistakes.hiding import MASK_ADDED, MASK_INVERTED
from regard.diagnosis.mistakes.numerics import COMPUTED_IN_HALF
from regard.diagnosis.process.half_positions import counts_in_half, is_for_half
from regard.diagnosis.reading.signature import OF_TEXTS, given_windows

# Numbers of texts that are compared otherwise than for being the same.
LATER = re.compile(r"(seg|doc|text|ids?)\w*(\[[^\]]*\]|\.unsqueeze\([^)]*\))? *[<>]=")
# Code that merges blocks by a running maximum.
RESCALES = re.compile(r"exp2?\(\s*\w*m(ax)?\w* ?- ?\w*new")
# Code that means to add 1 to the sum of the exponentials.
ADDS_ONE = re.compile(r"softmax_?(1|one|plus)|off.by.one|quiet|no.?op|attend to nothing", re.I)
RESIDUAL = re.compile(
    r"resid|skip|\+=? *attn|shortcut|\b(pre|post)[-_]?(norm|ln)|\+ *\w*(att\w*|mha|msa)\(|"
    r"\+ *[^\n]{0,40}\bgat(e|ing)",
    re.IGNORECASE,
)
# A causal rule and another one of which one is enough.
JOINED_BY_OR = re.compile(
    r"\b\w*(causal|tri[lu]?|past)\w*(\([^\n]*\))? *\| *[\w(~]|\w+ *\| *\w*causal|logical_or\(",
    re.IGNORECASE,
)
# What says that a token sees those before it alone.
STRICTLY = re.compile(
    r"strict(ly)?[- _]causal|\bnot (to|see|at|look at|attend to) (itself|themselves|oneself)|"
    r"\b(itself|own (key|token|position))\b[^.\n]{0,20}\b(excluded|hidden|masked)|"
    r"exclud\w+ (itself|self)|"
    r"\bstrictly (before|earlier|previous)",
    re.IGNORECASE,
)
# Code that turns queries: by angles that are 0 for a single token, if they stay as they were.
TURNS_QUERIES = re.compile(r"(rope|rot\w*|turn)\(\s*(xq|q|query|queries)\b", re.IGNORECASE)
# What says that each head is normalised by itself.
BY_HEAD = re.compile(r"per[- ]head|(each|every|a) head|head'?s'? vector|head_?wise", re.IGNORECASE)
# Names of what is attended to, and of nothing else.
CONTEXT = re.compile("context|memory|encoder|^enc(_|$)", re.IGNORECASE)


def read_otherwise(tested: FunctionUnderTest, own: Hypothesis) -> tuple[Found, ...]:
    """The mistake of a mask that is read otherwise than its name or the code's text says."""
    if _read_otherwise_of_keys(tested, own):
        return ((MASK_INVERTED, MASK_INVERTED.variants[0]),)
    means, read = tested.callee.mask_means, own.conventions[0].mask.removesuffix("01")
    was_tried = any(one.probe.keep is not None for one in own.matcher.outputs)
    if tested.stated.mask is not None or not means or not was_tried:
        return ()
    if {means, read} == {"keep", "hide"}:
        return ((MASK_INVERTED, MASK_INVERTED.variants[0]),)
    is_added = read == "add" and not tested.callee.says_added
    return ((MASK_ADDED, MASK_ADDED.variants[0]),) if is_added else ()


def _read_otherwise_of_keys(tested: FunctionUnderTest, own: Hypothesis) -> bool:
    """Whether a mask of padded keys, beside another mask, hides what its text says it keeps."""
    callee, means = tested.callee, tested.callee.key_mask_means
    if not means or mask_role(callee, keys=True) == mask_role(callee) or tested.stated.mask:
        return False
    asked = [
        (key_mask_convention(tested, convention, probe), probe)
        for convention in own.conventions
        for probe in tested.probes_for(convention)
        if probe.ability == "key mask"
    ]
    read = {one.mask.removesuffix("01") for one, probe in asked if tested.is_right(one, probe)}
    return read == {"keep", "hide"} - {means}


def _own_constant(tested: FunctionUnderTest, code: str) -> int:
    """The width of the embeddings that it gets, if its code has the same number; else 0."""
    inputs = (probe.inputs for _, probe in tested.answers)
    widths = {own["embeddings"].shape[-1] for own in inputs if "embeddings" in own}
    rooted = r"scalar(: *\w+)? *= *{0}\b|(?<![\w.]){0}(\.0?)? *\*\* *-|sqrt\({0}(\.0?)?\)"
    return next((n for n in widths if re.search(rooted.format(n), code)), 0)


def _given_scale(title: str, code: str) -> str:
    """The default of a constructor by whose root, or by which, scores are scaled as measured."""
    measured = re.search(r"multiplied by ([\d.e-]+)", title)
    for made in re.findall(r"def __init__\(([^)]*)\)", code) if measured else ():
        for name, number in re.findall(
            r"\b(\w*scal\w*|temp\w*|tau)(?: *: *\w+)? *= *([\d.]+)", made
        ):
            own = float(number)
            ways = (own, own**-0.5, 1 / own) if own > 0 else ()
            if measured and any(math.isclose(float(measured[1]), w, rel_tol=1e-3) for w in ways):
                return f"{name}={number}"
    return ""


def as_told(
    tested: FunctionUnderTest, own: Hypothesis, found: tuple[Found, ...]
) -> tuple[tuple[Found, ...], str]:
    """The same mistakes under the names that the code gives them, and what it means to compute.

    What its text says that it means is no mistake.
    """
    callee, names = tested.callee, [one.name for one, _ in found]
    code = "\n".join(text for _, text in callee.blocks)
    if names == ["weights_all_equal"] and callee.inverts_mask:
        return ((INTEGER_MASK, RIGHT),), ""
    if names == ["key_heads_tiled"] and "key_heads_tiled" in callee.meant:
        return (), "query heads h that read key head h % G"
    if names == ["scale_by_model_width"] and (constant := _own_constant(tested, code)):
        return (), f"scores divided by the root of {constant}, a number of its code"
    if names == ["scale_of_another_size"] and (given := _given_scale(found[0][0].title, code)):
        return (), f"scores scaled by {given}, which a constructor takes"
    causal_always = own.conventions[0].causal_always
    if names == ["cache_chunk_not_causal"] and mask_role(callee) and not causal_always:
        return (), "a mask of the caller's for several new tokens"
    if names == ["mask_ignored"] and (option := option_of_mask(tested)):
        return (), f"a mask only where {option}"
    if names == ["causal_hides_own_key"] and STRICTLY.search(code):
        return (), "each token hidden from itself"
    if names == ["heads_normalised_together"] and not BY_HEAD.search(code):
        return (), "queries and keys normalised over all heads together"
    if names == ["rotary_position_of_query"] and callee.has_one_length:
        return (), "as many queries as keys"  # as it says of their axes
    if names == ["alibi_scaled"] and "alibi_scaled" in callee.meant:
        return (), "slopes that are divided like the scores"
    if names == ["rotary_on_keys_only"] and callee.steps and TURNS_QUERIES.search(code):
        return ((all_mistakes()["rotary_from_zero_in_each_call"], found[0][1]),), ""
    if names == ["residual_of_inputs"] and RESIDUAL.search(code):
        return (), "its input added"
    adds_one = names == ["one_in_the_denominator"] and found[0][1] is found[0][0].variants[1]
    if adds_one and ADDS_ONE.search(code):  # a logit of 0, shifted like others
        return (), "1 added to the sum of the exponentials"
    least = found[0][0].variants[-2:] if names == ["epsilon_in_the_denominator"] else ()
    if any(found[0][1] is one for one in least) and RESCALES.search(code):
        return (), "1e-6 added to sums, for rows that see nothing in any block"
    if names == ["earlier_texts_read"] and callee.says_causal and JOINED_BY_OR.search(code):
        return ((all_mistakes()["masks_joined_by_or"], found[0][1]),), ""
    reads_earlier = callee.says_causal and LATER.search(code) is not None
    if names == ["mask_ignored"] and mask_role(callee) in OF_TEXTS and reads_earlier:
        return ((all_mistakes()["earlier_texts_read"], found[0][1]),), ""
    return found, ""


def lost_digits(returned: str, given: str, exact_to: str) -> tuple[Found, ...]:
    """The mistake of a result with fewer correct digits than its dtype and the inputs have."""
    if returned != given or returned == exact_to or exact_to not in HALF:
        return ()
    return ((COMPUTED_IN_HALF, RIGHT),)


def seen_in_calls(tested: FunctionUnderTest, own: Hypothesis, wrong: bool) -> Iterator[Mistake]:
    """Mistakes that no single answer shows."""
    if any(answer.dropped for answer in tested.answers.values()):
        yield DROPOUT_LEFT_ON
    if wrong:
        return
    if tested.callee.fault:
        yield all_mistakes()[tested.callee.fault]
    if own.built_in.added is not None and own.built_in.added.fault:
        yield all_mistakes()[own.built_in.added.fault]
    if own.built_in.places is not None and own.built_in.places.fault:
        yield all_mistakes()[own.built_in.places.fault]
    said, by_head = tested.callee.columns_said, tested.callee.by_head
    if by_head is not None and said == ("parts" if by_head else "heads"):
        yield COLUMNS_MISREAD
    if name := _wrong_window(tested, own):
        yield all_mistakes()[name]
    if reads_opposite_rows(tested, own.conventions[0]):
        yield VALUE_ROWS_REVERSED
    if counts_in_half(tested, own.conventions[0], own.built_in.positions) and is_for_half(tested):
        yield POSITIONS_ROUNDED
    if tested.callee.has_positions and not (own.built_in.positions or own.built_in.added):
        code = "\n".join(text for _, text in tested.callee.blocks)
        turns = tested.callee.steps and TURNS_QUERIES.search(code)
        yield all_mistakes()["rotary_from_zero_in_each_call"] if turns else POSITIONS_UNUSED
    if tested.callee.unused:
        names = ", ".join(tested.callee.unused)
        yield replace(LAYER_UNUSED, why=f"Nothing reads {names}. {LAYER_UNUSED.why}")
    if missed := what_norms_miss(tested, own.conventions[0]):
        yield OF_NORMS[missed]
    if wraps_around(tested, own.conventions[0]):
        yield all_mistakes()["window_wraps_around"]
    if missed := what_globals_miss(tested, own.conventions[0]):
        yield all_mistakes()[missed]
    if depends_on_blocks(tested, own.conventions[0]):
        yield BLOCKS_MATTER
    if any(beams_are_misplaced(tested, one) for one in own.conventions):
        yield BEAMS_MISPLACED
    if any(depends_on_prompt(tested, one) for one in own.conventions):
        yield TOKENS_MISPLACED
    if _has_rows_of_context(tested):
        yield QUERIES_FROM_CONTEXT
    if adds_positions_to_values(tested, own.conventions[0]):
        yield POSITIONS_IN_VALUES
    if _leaks(tested, own):
        yield LATER_TOKENS
    if any(masks_of_windows_misplaced(tested, one) for one in own.conventions):
        yield MASKS_OF_WINDOWS
    if inverts_integers(tested, own.conventions):
        yield INTEGER_MASK
    if adds_numbers(tested, own.conventions):
        yield MASK_ADDED
    if keeps_context(tested, own.conventions[0]):
        yield STALE_CONTEXT
    if keeps_default(tested, own.conventions[0]):
        yield DEFAULT_KEPT


def _wrong_window(tested: FunctionUnderTest, own: Hypothesis) -> str:
    """The mistake of a window that is a key longer or shorter than an object's text says."""
    given, means = [*given_windows(tested.callee.made).values()], tested.callee.window_means
    if own.built_in.window is None or len(given) != 1 or not means:
        return ""
    more = own.built_in.window - given[0] - (means == "exclusive")
    return {1: "window_one_long", -1: "window_one_short"}.get(more, "")


def _has_rows_of_context(tested: FunctionUnderTest) -> bool:
    """Whether the output has a row for each token of what is called a context."""
    context = tested.callee.roles.get("context")
    if context is None or CONTEXT.search(context.name) is None:
        return False
    return any(
        answer.kind == "shape"
        and "context" in probe.inputs
        and probe.sizes["L"] != probe.sizes["S"]
        and answer.shape[:-1] == (probe.sizes["B"], probe.sizes["S"])
        for (_, probe), answer in tested.answers.items()
    )


def _leaks(tested: FunctionUnderTest, own: Hypothesis) -> bool:
    """Whether code that has a causal rule, and neither a flag nor a mask for it, does not obey."""
    callee, first = tested.callee, own.conventions[0]
    if not callee.says_causal or "later_tokens_seen" in callee.meant or "causal" in callee.roles:
        return False
    if mask_role(callee) is not None or callee.steps or tested.of_gradients:
        return False
    return is_causal(tested, first) is False

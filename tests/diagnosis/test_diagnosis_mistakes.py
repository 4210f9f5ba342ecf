"""Every mistake of the catalogue, written independently of it, is named; no two are confused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from regard.diagnosis.calls.under_test import _projected_probes, _with_values_apart
from regard.diagnosis.judging.built_in import BuiltIn
from regard.diagnosis.judging.examples import usual_check
from regard.diagnosis.probes import projected_probes, ready_probes
from regard.diagnosis.reading.signature import PAIRS, Callee, Parameter

import regard
import wrong_attentions as wrong
import wrong_blocks
import wrong_positions
from regard.diagnosis.mistakes import (
    BY_DIGITS,
    BY_KIND,
    CATALOGUE,
    EQUIVALENTS,
    FRAGILE,
    GRADIENTS,
    OF_INPUT,
    all_mistakes,
    linear,
)
from regard.diagnosis.probe import RIGHT, UNITS, Variant, evaluate

UNMASKED = [*wrong.SCALES, *wrong.PRODUCTS, *wrong.SOFTMAXES, *wrong.OUTPUTS]
MASKED = [*wrong.BEFORE, *wrong.READ]
CAUSAL = [*wrong.TRIANGLES, "causal_aligned_at_start"]
WINDOWED = [*wrong.WINDOWS, "window_ignores_offset"]
PADDED = ["mask_on_the_query_axis", "mask_of_first_batch_for_all", "mask_tiled_over_heads"]
GROUPED = ["key_heads_tiled", "first_key_head_for_all", "key_heads_reversed"]
GROUPED += ["grouped_heads_merged_in_turn"]
CASES = [
    ("given_scale_besides", wrong.scaled_besides, {}),
    *((name, wrong.unmasked, {}) for name in UNMASKED),
    *((name, wrong.masked, {"mask": "keep"}) for name in MASKED),
    *((name, wrong.with_causal, {"causal": "end"}) for name in CAUSAL),
    ("causal_aligned_at_end", lambda name: wrong.with_causal(), {"causal": "start"}),
    *((name, wrong.windowed, {"window": "inclusive"}) for name in WINDOWED),
    *((name, wrong.padded, {"mask": "keep"}) for name in PADDED),
    *((name, wrong.grouped, {}) for name in GROUPED),
    *((name, wrong.multihead, {}) for name in wrong.PROJECTED),
    *((name, wrong.cached, {}) for name in wrong.CACHED),
    *((name, wrong.mixed, {"layout": "BHLD"}) for name in wrong.MIXED),
    ("causal_replaces_mask", wrong.mask_or_causal, {"mask": "keep", "causal": "end"}),
    *((name, wrong.padded_and_causal, {"mask": "keep"}) for name in wrong.JOINED),
    *((name, wrong_blocks.streaming, {}) for name in wrong_blocks.STREAMING),
    *((name, wrong_blocks.merging, {}) for name in wrong_blocks.MERGING),
    *((name, wrong_blocks.causal_in_blocks, {}) for name in wrong_blocks.CAUSAL),
    *((name, wrong_positions.rotary, {}) for name in wrong_positions.ROTARY),
    *((name, wrong_positions.in_a_cache, {"causal": True}) for name in wrong_positions.CACHED),
    *((name, wrong_positions.alibi, {"layout": "BHLD"}) for name in wrong_positions.ALIBI),
    *((name, wrong_positions.softcap, {"mask": "keep"}) for name in wrong_positions.SOFTCAP),
    *((name, wrong_positions.sinks, {}) for name in wrong_positions.SINKS),
    ("rotary_position_of_query", wrong_positions.late, {}),
    ("alibi_position_of_query", wrong_positions.alibi_in_a_cache, {}),
    ("alibi_not_absolute", wrong_positions.both_ways, {}),
]
# Tested by functions of their own below.
BY_HAND = {
    "cached_padding_misplaced",
    "cached_padding_forgotten",
    "full_last_block_lost",
    "gradient_of_sink",
    "empty_row_nan",
    "empty_row_mean",
    "hidden_nan_leaks",
    "integers_truncated",
    "half_precision_constant",
    "dropout_left_on",
    "earlier_texts_read",
    "causal_offset_reversed",
    "padding_one_key_more",
    "padding_one_key_less",
    "texts_begin_late",
    "stale_context",
    "default_kept",
    "distances_counted_from_the_end",
    "fused_columns_misread",
    "norm_before_the_sum",
    "distance_rows_out_of_order",
    "batch_elements_mixed",
    "padding_changes_the_output",
    "weights_do_not_add_up",
    "weights_all_equal",
    "heads_mixed",
    "queries_mixed",
    "keys_never_seen",
    "later_tokens_seen",
    "masks_of_windows_misplaced",
    "window_wraps_around",
    "integer_mask_inverted",
    "positions_unused",
    "layer_unused",
    "value_rows_reversed",
    "queries_without_effect",
    "positions_rounded",
    "sublayer_lost",
    "normalised_input_added",
    "norm_misses_a_part",
    "blocks_change_the_output",
    "queries_from_context",
    "scale_of_a_part",
    "linear_map_of_hidden_keys",
    "positions_in_values",
    "relative_bias_misplaced",
    "map_reshaped",
    "pixels_misplaced",
    "pairs_of_the_other_node",
    "streams_split_in_another_order",
    "heads_overlap",
    "images_seen_before_the_first",
    "pairs_not_exchanged_back",
    *(one.name for one in (*OF_INPUT["pooled"], *OF_INPUT["pair_bias"])),
    "relative_term_transposed",
    "relative_term_unscaled",
    "relative_bias_reversed",
    "distance_zero_not_read",
    "alibi_slopes_of_heads",
    "positions_restart",
    "tokens_misplaced_in_a_cache",
    "context_ignored",
    "values_from_key_input",
    "relative_shift_misplaced",
    "global_queries_see_a_window",
    "global_keys_not_seen",
    "keys_counted_twice",
    "random_features_weigh_keys",
    "quantized_numbers_misread",
    "beams_misplaced_in_a_cache",
    "cache_never_filled",
    "empty_slots_attended",
    "newest_slot_not_attended",
    "positions_of_slots",
    *(one.name for one in linear.MISTAKES),
}
# Pairs: at least this share with one of the two named. Larger samples give the same or more.
SHARE_OF_PAIRS = 0.8


@pytest.mark.parametrize(("name", "make", "told"), CASES, ids=[case[0] for case in CASES])
def test_a_mistake_is_named(name, make, told):
    found = regard.diagnose(make(name), **told)
    assert found.names[:1] == (name,), found


def test_what_a_candidate_returns_is_computed_once_for_each_probe_and_forgotten_with_it():
    calls = []

    def output(values, probe):
        calls.append(probe.name)
        return np.zeros(())

    probe, variant = next(iter(ready_probes(2))), Variant({"output": output})
    np.testing.assert_array_equal(probe.output(variant), np.zeros((1, 1, 5, 6)))
    np.testing.assert_array_equal(probe.output(variant), probe.result(evaluate(probe, variant)))
    assert len(calls) == 2  # one of them by evaluate
    remembered, forgotten = weakref.ref(probe.output(variant)), weakref.ref(variant)
    del variant
    gc.collect()
    assert remembered() is forgotten() is None


def for_matrices(softmax, width=lambda q, k: q.shape[1]):
    """Attention as one writes it for matrices: whatever counts axes from the left is literal."""
    return lambda q, k, v: softmax(q @ k.T / np.sqrt(width(q, k))) @ v


def by_sums(e, axis):
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax_over_queries", for_matrices(lambda s: by_sums(np.exp(s), 0))),
        ("softmax_over_queries", for_matrices(lambda s: by_sums(np.exp(s - s.max(0)), 0))),
        (
            "softmax_over_queries",
            for_matrices(lambda s: by_sums(np.exp(s), 0), lambda q, k: q.shape[-1]),
        ),
        (
            "denominator_over_queries",
            for_matrices(
                lambda s: by_sums(np.exp(s - s.max(-1, keepdims=True)), 0),
                lambda q, k: q.shape[-1],
            ),
        ),
        (
            "maximum_over_queries",
            for_matrices(lambda s: by_sums(np.exp(s - s.max(0)), -1), lambda q, k: q.shape[-1]),
        ),
        (
            "scale_by_queries",
            for_matrices(lambda s: by_sums(np.exp(s), -1), lambda q, k: q.shape[0]),
        ),
        ("keepdims_lost", for_matrices(lambda s: np.exp(s) / np.exp(s).sum(axis=1))),
    ],
)
def test_a_mistake_written_for_matrices_is_named_though_a_vector_makes_it_right(name, function):
    found = regard.diagnose(function)
    assert found.names == (name,), found


@pytest.mark.needs("torch")
@pytest.mark.parametrize("group", ["plain", "masks", "triangles", "modules"])
def test_mistakes_in_torch_are_named(group):
    import wrong_attentions_torch as in_torch

    more = ("queries_and_keys_swapped", "weights_transposed", "keys_for_values")
    names, told, make = {
        "plain": ((*in_torch.SCALES, *in_torch.SOFTMAXES, *more), {}, in_torch.attention),
        "masks": (tuple(in_torch.MASKS), {"mask": "keep"}, in_torch.attention),
        "triangles": (tuple(in_torch.TRIANGLES), {"causal": "end"}, in_torch.attention),
        "modules": (in_torch.MODULES, {}, in_torch.MultiHead),
    }[group]
    named = {name: regard.diagnose(make(name), **told).names[:1] for name in names}
    assert named == {name: (name,) for name in names}


def test_the_catalogue_has_at_least_sixty_mistakes_and_a_test_for_each():
    parts = (linear.MISTAKES, CATALOGUE, *OF_INPUT.values(), GRADIENTS, FRAGILE, BY_DIGITS, BY_KIND)
    assert len(all_mistakes()) == sum(map(len, parts))
    assert len(all_mistakes()) >= 60
    backward = {one.name for one in GRADIENTS}  # tests/diagnosis/test_diagnosis_gradients.py
    assert {name for name, _, _ in CASES} | BY_HAND == set(all_mistakes()) - backward


def ordinary_probes():
    square = {f"W_{part}": (6, 6) for part in "qkvo"} | {f"b_{part}": (6,) for part in "qkvo"}
    probes = [probe for rank in (2, 3, 4) for probe in ready_probes(rank)]
    texts = np.array([0, 0, 1, 2, 2])  # one after the other
    of_texts = replace(probes[0], name="texts", keep=texts[:, None] == texts)
    long = next(probe for probe in probes if probe.name == "150 keys, 150 queries 2-D")
    causal = replace(long, name="causal, 150 keys", ability="causal", causal=True)
    crossed = [p for p in projected_probes(square, 2, cross=True) if "context" in p.inputs]
    apart = [one for probe in crossed for one in _with_values_apart(probe)]
    return [*probes, of_texts, causal, *projected_probes(square, 2), *apart]


def test_probes_of_a_causal_rule_are_causal_and_no_others():
    square = {f"W_{part}": (6, 6) for part in "qkvo"}
    ready = [probe for rank in (2, 3, 4) for probe in ready_probes(rank)]
    for probe in (*ready, *projected_probes(square, 2)):
        follows = any(rule in probe.ability for rule in ("causal", "window", "cache"))
        follows |= bool(probe.chunks)  # a cache beside a mask
        assert probe.causal == follows, probe.name


def probes_with(name):
    """Probes of what has positions, a softcap or a sink, or of maps and pairs."""
    if name == "sink":
        probes = [probe for rank in (3, 4) for probe in ready_probes(rank)]
        sinks = (0.4 + 0.7 * np.arange(probe.sizes["H"]) for probe in probes)
        pairs = zip(probes, sinks, strict=True)
        return [replace(p, inputs={**p.inputs, "sink": sink}) for p, sink in pairs]
    if name in ("pooled", "pair_bias"):
        square = {
            f"W_{part}": np.random.default_rng(n).normal(size=(8, 8))
            for n, part in enumerate("qkvo")
        }
        more = {"weights": square, "heads": 2, "parameters": (Parameter("x", "x"),)}
        if name == "pooled":
            return list(_projected_probes(Callee("pool", pools=True, **more), 3, 5))
        square[PAIRS] = np.random.default_rng(9).normal(size=(8, 2))
        return list(_projected_probes(Callee("pairs", **more), 3, 5))
    own = {
        "frequencies": BuiltIn("rotary, halves", at_end=True),
        "positions_slopes": BuiltIn("ALiBi", at_end=True),
        "softcap": BuiltIn(softcap=2.0),
    }[name]
    return list(own.of(probe for rank in (3, 4) for probe in ready_probes(rank)))


def same(one, other, tolerance):
    """Of each row, whether it is the same as in the other array."""
    with np.errstate(all="ignore"):
        near = (one == other) | (np.abs(one - other) <= tolerance)
    return (near | (np.isnan(one) & np.isnan(other))).all(-1)


def outputs(probe, variants):
    with np.errstate(all="ignore"):
        return np.stack([probe.output(variant).ravel() for variant in variants])


def alike(variants, probes, tolerances):
    """Pairs of names whose variants give the same; what a probe tells apart goes to no other."""
    one, other = np.triu_indices(len(variants), 1)
    for probe, near in zip(probes, tolerances, strict=True):
        if not len(one):
            break
        left, place = np.unique([one, other], return_inverse=True)
        results = outputs(probe, [variants[n][1] for n in left])
        first, second = place.reshape(2, -1)
        alike = same(results[first], results[second], near)
        one, other = one[alike], other[alike]
    pairs = {(variants[n][0], variants[m][0]) for n, m in zip(one, other, strict=True)}
    return {pair for pair in pairs if pair[0] != pair[1]}


@pytest.mark.parametrize("of", ["", *OF_INPUT])
def test_no_two_mistakes_give_the_same_on_all_probes_and_none_gives_what_is_right(of):
    probes = probes_with(of) if of else ordinary_probes()
    # Small ones first, with rules that hide keys: they tell most mistakes apart.
    probes.sort(key=lambda one: (one.ability == "long", not one.has_rules))
    # Small roundings and epsilons are told apart in float64 only, alignment only where it is told.
    excused = {"rounded", "epsilon_in_the_denominator", "causal_aligned_at_end"}
    variants = [
        (mistake.name, variant)
        for mistake in (OF_INPUT[of] if of else CATALOGUE)
        if mistake.name not in excused
        for variant in mistake.variants
    ]
    tolerances = [probe.tolerance(UNITS["float32"]) for probe in probes]
    assert alike([*variants, ("right", RIGHT)], probes, tolerances) == set()


@pytest.mark.parametrize("equivalent", EQUIVALENTS, ids=lambda one: one.name)
def test_what_is_listed_as_equivalent_is(equivalent):
    probes = ordinary_probes()
    # 1e-9 in place of 0, and −10⁹ in place of −∞, are equivalent for all that anybody can see.
    least = 1e-7 if "1e-9" in equivalent.name else 0
    near = [max(probe.tolerance(UNITS["float64"]), least) for probe in probes]
    others = (
        [RIGHT]
        if equivalent.same_as == "right"
        else list(all_mistakes()[equivalent.same_as].variants)
    )
    assert any(
        all(same(*outputs(*one), bound) for one, bound in zip(pairs, near, strict=True))
        for pairs in ([(p, (equivalent.variant, other)) for p in probes] for other in others)
    )


def test_equivalents_are_not_accused():
    for name in ("b_k_lost",):
        assert regard.diagnose(wrong.multihead(name)).verdict == "right"


TABLES = (
    wrong.PRODUCTS,
    wrong.SCALES,
    wrong.BEFORE,
    wrong.READ,
    wrong.TRIANGLES,
    wrong.SOFTMAXES,
    wrong.OUTPUTS,
)


def pairs(count, seed=0):
    """Two mistakes in different places of the same function, at random."""
    ordinary = {mistake.name for mistake in CATALOGUE} - {"all_axes_reversed"}
    places = [[name for name in table if name in ordinary] for table in TABLES]
    every = [
        (a, b)
        for one, other in itertools.combinations(places, 2)
        for a in one
        for b in other
        if "scale_after_softmax" not in (a, b)  # stands in two places
    ]
    chosen = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[n] for n in chosen]


@pytest.mark.parametrize("count", [10, pytest.param(25, marks=pytest.mark.full)])
def test_of_two_mistakes_at_once_one_is_named_and_neither_is_called_right(count):
    counts: Counter[str] = Counter()
    for pair in pairs(count):
        with np.errstate(all="ignore"):
            found = regard.diagnose(wrong.general(*pair), mask="keep", causal="end")
        named = {one.name for one in (*found.mistakes, *found.nearest)}
        counts["named" if named & set(pair) else "missed"] += 1
        assert found.verdict in ("mistaken", "unknown"), pair
    assert counts["named"] >= SHARE_OF_PAIRS * count


def test_most_mistakes_pass_the_usual_check():
    """One head, as many queries as keys, no mask: the check that a tutorial ends with."""
    passing = [one.name for one in CATALOGUE if "it passes" in usual_check(one.variants[0])]
    assert {"scale_by_model_width", "mask_after_softmax", "causal_off_by_one"} <= set(passing)
    assert "no_scale" not in passing
    assert len(passing) > len(CATALOGUE) / 2


def test_a_mistake_comes_with_an_example_where_its_step_departs():
    found = regard.diagnose(wrong.unmasked("scale_by_model_width")).mistakes[0]
    assert found.step == "scaled"
    assert found.example is not None
    departing = next(shown for shown in found.example.steps if shown.departs)
    assert departing.step == "scaled"
    assert departing.right != departing.wrong
    ratio = np.array(departing.right) / np.array(departing.wrong)
    np.testing.assert_allclose(ratio, np.sqrt(2), rtol=1e-12)  # √H for two heads


@pytest.mark.parametrize("mistake", all_mistakes().values(), ids=lambda one: one.name)
def test_an_entry_says_everything_that_a_reader_needs(mistake):
    assert mistake.title
    assert mistake.title[0] not in ".,"
    assert len(mistake.why) > 20
    assert mistake.numpy
    assert mistake.torch
    assert mistake.variants or mistake in (*BY_DIGITS, *BY_KIND)


def test_a_row_that_sees_nothing_is_told_by_what_becomes_of_it():
    finite = regard.diagnose(wrong.masked("mask_constant_1e9"))
    assert "mask_constant_1e9" in finite.names
    assert "empty_row_mean" in finite.names
    assert {"empty_row_nan", "hidden_nan_leaks"} <= set(regard.diagnose(wrong.masked()).names)


def test_integers_cut_by_a_buffer_like_the_query_are_told():
    def f(q, k, v):
        out = np.empty_like(v, shape=(*q.shape[:-1], v.shape[-1]))
        out[...] = wrong.attention((), q, k, v)
        return out

    assert "integers_truncated" in regard.diagnose(f).names


def test_a_constant_that_float16_does_not_have_is_told():
    def f(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
        if mask is not None:
            s = s + (1 - mask.astype(s.dtype)) * s.dtype.type(-1e9)
        return wrong.plain_softmax(s) @ v

    assert "half_precision_constant" in regard.diagnose(f).names


# What is smaller than the rounding of a type cannot be told there; exp_missing divides by a sum
# that float16 may round to nearly 0.
BELOW_ROUNDING = {
    "float32": {"epsilon_in_the_denominator"},
    "float16": {"epsilon_in_the_denominator", "rounded", "exp_missing", "all_axes_reversed"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", list(BELOW_ROUNDING))
@pytest.mark.parametrize("name", sorted({mistake.name for mistake in CATALOGUE} & set(UNMASKED)))
def test_a_mistake_is_named_in_narrower_types_too(name, dtype):
    def f(q, k, v):
        own = (one.astype(dtype) for one in (q, k, v))
        return wrong.attention((name,), *own).astype(dtype)

    found = regard.diagnose(f, signature="q=query,k=key,v=value")
    assert found.names[:1] == (name,) or name in BELOW_ROUNDING[dtype]

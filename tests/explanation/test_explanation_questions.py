"""The questions one can ask of an explanation: statistics, contributions, without, compare, …"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

import regard
from bounds import assert_within, error_bounds
from calls import numbers
from oracle import attend
from regard import DtypeError, Expectation, Explanation, OptionError, Problem
from regard.compute import evaluation
from regard.masks import Boolean, Causal, Lengths
from regard.normalizers import Sparsemax
from regard.scores import Distance
from regard.views.json_output import as_data

INF, NAN = np.inf, np.nan
UNIT = 2.0**-53
FLOOR = 2.0**-1074
# Roundings beside the n of a sum: a division, a subtraction and a square, in each of two ways.
SOME_ROUNDINGS = 16
# exp and log are within 1 ulp in NumPy, and their arguments within a few.
FUNCTION_ROUNDINGS = 16

# Cells of a block of scores: one row at a time, several rows, everything.
BLOCKS = [1, 12, 2**18]
every_block_size = pytest.mark.parametrize("cells", BLOCKS)


def inputs(*shapes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
    return tuple(numbers(shape, np.float64, 100 * seed + n) for n, shape in enumerate(shapes))


PLAIN = inputs((7, 2), (5, 2), (5, 3))
HEADS = inputs((4, 7, 2), (2, 5, 2), (2, 5, 3))
BATCH = inputs((2, 1, 4, 7, 2), (3, 2, 5, 2), (2, 5, 3))
CALLS = {"plain": PLAIN, "heads": HEADS, "batch": BATCH, "one query": inputs((2,), (5, 2), (5, 3))}
every_call = pytest.mark.parametrize("arrays", CALLS.values(), ids=CALLS)


def with_cells(array: np.ndarray, cells: dict[tuple[int, ...], float]) -> np.ndarray:
    array = array.copy()
    for at, value in cells.items():
        array[at] = value
    return array


def coins(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.6


def in_blocks(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    monkeypatch.setattr(evaluation, "BLOCK_CELLS", cells)


# statistics of steps ------------------------------------------------------------------------------


def check_statistics(found: Any, cells: np.ndarray) -> None:
    """Mean, variance, minimum and maximum are NumPy's in more digits, up to rounding."""
    assert found.cells == cells.size
    wide = cells.astype(np.longdouble)
    roundings = (cells.size + SOME_ROUNDINGS) * UNIT
    largest = float(abs(wide).max())
    assert abs(found.mean - float(wide.mean())) <= roundings * largest
    variance = float(wide.var())
    # Deviations are as exact as the numbers are; the mean is never squared.
    assert abs(found.variance - variance) <= roundings * (variance + math.sqrt(variance) * largest)
    assert found.minimum == cells.min()
    assert found.maximum == cells.max()


@every_block_size
@every_call
def test_statistics_of_a_step_are_those_of_all_its_cells(monkeypatch, arrays, cells):
    in_blocks(monkeypatch, cells)
    explanation = regard.explain(*arrays, softcap=2.0, bias=numbers((5,)), sink=0.5)
    statistics = explanation.statistics().steps
    for name, step in explanation.steps.items():
        if step.axes:
            check_statistics(statistics[name], step.value)
    assert set(statistics) == {n for n, step in explanation.steps.items() if step.axes}


@every_block_size
@every_call
def test_statistics_after_masking_leave_hidden_cells_out(monkeypatch, arrays, cells):
    in_blocks(monkeypatch, cells)
    explanation = regard.explain(*arrays, mask=Lengths(4) & ~Boolean(np.arange(5) == 2))
    visible = explanation.steps["visible"].value
    statistics = explanation.statistics().steps
    for name in ("masked", "shifted", "exponentials", "weights"):
        check_statistics(statistics[name], explanation.steps[name].value[visible])
    for name in ("scores", "scaled", "keys", "output"):
        check_statistics(statistics[name], explanation.steps[name].value)
    assert "visible" not in statistics


@every_block_size
def test_statistics_do_not_cancel_where_the_mean_is_large(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    q, k, v = inputs((40, 1), (5, 1), (5, 1))
    explanation = regard.explain(q + 1e8, k, v)
    found = explanation.statistics().steps["queries"]
    check_statistics(found, q + 1e8)
    assert 0.1 < found.variance < 10


@every_block_size
def test_statistics_of_large_numbers_do_not_overflow_on_the_way(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    large = 2.0**600  # its square is beyond float64
    q, k, v = np.zeros((8, 2)), np.zeros((4, 2)), np.full((4, 2), large)
    q[:, 0] = large
    q[:, 1] = -large
    statistics = regard.explain(q, k, v).statistics().steps
    values, queries = statistics["values"], statistics["queries"]
    assert (values.mean, values.variance) == (large, 0.0)
    assert (values.minimum, values.maximum, values.cells) == (large, large, 8)
    assert (queries.mean, queries.variance) == (0.0, INF)


@every_block_size
def test_cells_that_are_all_alike_have_no_variance(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    found = regard.explain(np.full((7, 3), 0.1), np.ones((3, 3)), np.ones((3, 1))).statistics()
    assert dataclasses.astuple(found.steps["queries"]) == (0.1, 0.0, 0.1, 0.1, 21)


@every_block_size
def test_statistics_of_one_head_of_one_batch_element(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    shapes = ((2, 3, 4, 6, 2), (2, 3, 2, 5, 2), (2, 3, 2, 5, 1))
    explanation = regard.explain(*inputs(*shapes), mask=Lengths([[4, 3, 5], [1, 5, 2]]))
    whole = explanation.statistics().rows
    for batch in np.ndindex(2, 3):
        for head in range(4):
            found = explanation.statistics(head=head, batch=batch)
            for name, one in found.steps.items():
                step = explanation.steps[name]
                own = step.head(head, batch)
                if step.hides:
                    own = own[explanation.steps["visible"].head(head, batch)]
                check_statistics(one, own)
            assert found.rows.entropy.shape == (6,)
            for name in ("entropy", "effective_keys", "largest_weight", "largest_key"):
                np.testing.assert_array_equal(
                    getattr(found.rows, name), getattr(whole, name)[(*batch, head)]
                )
    assert explanation.statistics(batch=(1, 2)).rows.entropy.shape == (4, 6)
    assert explanation.statistics(head=3).rows.entropy.shape == (2, 3, 6)
    with pytest.raises(regard.LabelError, match="there is no head 4"):
        explanation.statistics(head=4)


@every_block_size
@pytest.mark.parametrize("at", [(0, 0), (3, 1), (6, 0)])
def test_statistics_of_a_step_with_a_nan_are_nan(monkeypatch, cells, at):
    in_blocks(monkeypatch, cells)
    explanation = regard.explain(with_cells(PLAIN[0], {at: NAN}), *PLAIN[1:])
    statistics = explanation.statistics().steps
    for name in ("queries", "scores", "weights", "output", "lse"):
        found = statistics[name]
        assert np.isnan([found.mean, found.variance, found.minimum, found.maximum]).all(), name
        assert found.cells == explanation.steps[name].value.size
    assert np.isfinite(dataclasses.astuple(statistics["keys"])).all()


@every_block_size
@pytest.mark.parametrize("at", [(0, 0), (3, 1), (6, 0)])
def test_statistics_of_a_step_with_an_infinity_are_those_of_numpy(monkeypatch, cells, at):
    in_blocks(monkeypatch, cells)
    queries = with_cells(PLAIN[0], {at: -INF})
    found = regard.explain(queries, *PLAIN[1:]).statistics().steps["queries"]
    assert found.mean == queries.mean() == -INF
    assert np.isnan(found.variance)  # of an infinite number there is no distance to the mean
    assert (found.minimum, found.maximum) == (-INF, queries.max())


def test_statistics_pass_over_a_nan_that_is_hidden():
    keys = with_cells(PLAIN[1], {(4, 0): NAN})
    statistics = regard.explain(PLAIN[0], keys, PLAIN[2], mask=Lengths(4)).statistics().steps
    assert np.isnan(statistics["scores"].mean)
    for name in ("masked", "shifted", "exponentials", "weights", "output"):
        assert np.isfinite(dataclasses.astuple(statistics[name])).all(), name


def test_statistics_where_nothing_is_visible_are_of_no_cell():
    found = regard.explain(*PLAIN, mask=Lengths(0)).statistics().steps["weights"]
    assert found.cells == 0
    assert np.isnan([found.mean, found.variance, found.minimum, found.maximum]).all()


def test_the_variance_of_scores_grows_with_the_width_and_the_scale_takes_it_back():
    variances = []
    for width in (4, 64):
        q, k, v = inputs((60, width), (60, width), (60, 1), seed=width)
        steps = regard.explain(q, k, v).statistics().steps
        variances.append((steps["scores"].variance, steps["scaled"].variance))
    # 3600 products of normal numbers: within a third of D and of 1.
    np.testing.assert_allclose([scores for scores, _ in variances], [4, 64], rtol=1 / 3)
    np.testing.assert_allclose([scaled for _, scaled in variances], [1, 1], rtol=1 / 3)


# statistics of rows -------------------------------------------------------------------------------


@every_block_size
@every_call
def test_every_row_says_how_far_it_spreads(monkeypatch, arrays, cells):
    in_blocks(monkeypatch, cells)
    explanation = regard.explain(*arrays, mask=[True, True, False, True, True])
    rows = explanation.statistics().rows
    weights = explanation.steps["weights"].value
    shape = explanation.steps["lse"].shape
    for array in (rows.entropy, rows.effective_keys, rows.largest_weight, rows.largest_key):
        assert np.shape(array) == shape
    for at in np.ndindex(*shape):
        row = [float(p) for p in weights[at]]
        terms = [-p * math.log(p) for p in row if p > 0]
        entropy = math.fsum(terms)
        allowed = (len(row) + FUNCTION_ROUNDINGS) * UNIT * math.fsum(map(abs, terms))
        assert abs(rows.entropy[at] - entropy) <= allowed
        spread = math.exp(entropy)
        allowed = (allowed + FUNCTION_ROUNDINGS * UNIT) * spread
        assert abs(rows.effective_keys[at] - spread) <= allowed
        assert rows.largest_weight[at] == max(row)
        assert rows.largest_key[at] == row.index(max(row))


def test_equal_weights_spread_over_as_many_keys_as_there_are():
    rows = regard.explain(np.zeros((2, 3)), np.ones((8, 3)), np.ones((8, 1))).statistics().rows
    np.testing.assert_allclose(rows.effective_keys, 8.0, rtol=FUNCTION_ROUNDINGS * UNIT)
    np.testing.assert_allclose(rows.entropy, math.log(8), rtol=FUNCTION_ROUNDINGS * UNIT)


def test_all_the_weight_on_one_key_is_no_entropy_and_not_minus_zero():
    rows = regard.explain([[1000.0]], [[0.0], [10.0], [-3.0]], np.ones((3, 1))).statistics().rows
    assert rows.entropy.tobytes() == np.zeros(1).tobytes()
    assert (rows.effective_keys[0], rows.largest_weight[0], rows.largest_key[0]) == (1.0, 1.0, 1)


def test_a_row_with_a_nan_spreads_nobody_knows_how_far_and_the_others_do():
    rows = regard.explain(with_cells(PLAIN[0], {(3, 0): NAN}), *PLAIN[1:]).statistics().rows
    for array in (rows.entropy, rows.effective_keys, rows.largest_weight):
        np.testing.assert_array_equal(np.isnan(array), np.arange(7) == 3)


# contributions ------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("masked", [False, True])
def test_contributions_of_the_keys_add_up_to_the_row_of_the_output(arrays, masked):
    options = {"mask": np.array([True, False, True, True, False])} if masked else {}
    explanation = regard.explain(*arrays, **options)
    batches = list(np.ndindex(*explanation.batch_shape))
    heads = range(explanation.heads or 1)
    rows = range(explanation.source.sizes["L"]) if "L" in explanation.source.sizes else [0]
    output, weights = explanation.steps["output"], explanation.steps["weights"]
    values = explanation.steps["values"]
    for batch, head, row in itertools.product(batches, heads, rows):
        table = explanation.contributions(row, head=head, batch=batch if batch else None)
        expected = np.atleast_2d(output.head(head, batch))[row]
        p = np.atleast_2d(weights.head(head, batch))[row]
        v = values.head(head, batch)
        np.testing.assert_array_equal(table.value, p[:, np.newaxis] * v)
        sums = [math.fsum(column) for column in table.value.T]
        bound = (len(p) + 1) * UNIT * abs(table.value).sum(axis=0)
        assert_within(np.array(sums), expected, bound, "sum of the contributions")
        if masked:
            np.testing.assert_array_equal(table.value[[1, 4]], 0.0)


def test_contributions_are_labelled_by_key_and_value_feature():
    explanation = regard.explain(
        *PLAIN,
        query_labels=list("abcdefg"),
        key_labels=["the", "cat", "the", "dog", "sat"],
        value_features=["u", "v", "w"],
    )
    table = explanation.contributions("c")
    assert table.row_labels == ("the@0", "cat", "the@2", "dog", "sat")
    assert table.column_labels == ("u", "v", "w")
    np.testing.assert_array_equal(table.value, explanation.contributions(2).value)
    assert not np.array_equal(table.value, explanation.contributions(3).value)


def test_contributions_need_no_row_where_there_is_one_and_need_it_elsewhere():
    single = regard.explain(*CALLS["one query"])
    np.testing.assert_array_equal(single.contributions().value, single.contributions(0).value)
    one_row = regard.explain(PLAIN[0][:1], *PLAIN[1:])
    np.testing.assert_array_equal(one_row.contributions().value, one_row.contributions(0).value)
    with pytest.raises(regard.LabelError, match="7 queries; say which row"):
        regard.explain(*PLAIN).contributions()
    with pytest.raises(regard.LabelError, match="no 7"):
        regard.explain(*PLAIN).contributions(7)


def test_contributions_of_hidden_keys_are_zero_whatever_stands_there():
    values = with_cells(PLAIN[2], {(4, 0): NAN, (4, 1): INF, (4, 2): -INF})
    explanation = regard.explain(*PLAIN[:2], values, mask=Lengths(4))
    table = explanation.contributions(0)
    assert table.value[4].tobytes() == np.zeros(3).tobytes()
    assert np.isfinite(table.value).all()


def test_contributions_show_a_nan_that_is_in_sight():
    values = with_cells(PLAIN[2], {(1, 0): NAN})
    table = regard.explain(*PLAIN[:2], values).contributions(0)
    np.testing.assert_array_equal(np.argwhere(np.isnan(table.value)), [[1, 0]])


# without ------------------------------------------------------------------------------------------

WITHOUT = [
    {},
    {"causal": True, "offset": 0},
    {"window": (2, 2), "offset": 0, "sink": 0.5},
    {"mask": coins(7, 5), "softcap": 2.0},
    {"bias": with_cells(numbers((7, 5)).astype(np.float64), {(1, 1): -INF})},
    {"mask": ~Causal() | Lengths(3), "offset": 0},
]


def same_answer(found: Explanation, arrays: Any, mask: np.ndarray, **options: Any) -> None:
    """The explanation is within the bounds of attention over exactly these visible cells."""
    answer = attend(*arrays, mask=mask, **options)
    bounds = error_bounds(*arrays, answer, dtype=np.float64, **options)
    for name in ("output", "weights", "lse"):
        value = found.steps[name].value
        assert_within(value, getattr(answer, name), getattr(bounds, name), name)


@every_call
@pytest.mark.parametrize("key", [0, 2, -1])
def test_without_a_key_is_attention_with_that_key_deleted(arrays, key):
    q, k, v = arrays
    found = regard.explain(q, k, v).without(key)
    rest = [np.delete(x, key, axis=-2) for x in (k, v)]
    answer = attend(q, *rest)
    bounds = error_bounds(q, *rest, answer, dtype=np.float64)
    assert_within(found.output, answer.output, bounds.output)
    assert_within(found.steps["lse"].value, answer.lse, bounds.lse)
    weights = found.steps["weights"].value
    np.testing.assert_array_equal(weights[..., key], 0.0)
    assert_within(np.delete(weights, key, axis=-1), answer.weights, bounds.weights)


@pytest.mark.parametrize("options", WITHOUT, ids=range(len(WITHOUT)))
def test_without_a_key_keeps_every_other_rule_and_option(options):
    explanation = regard.explain(*PLAIN, **options)
    before = explanation.steps["visible"].value if "visible" in explanation.steps else True
    found = explanation.without(1)
    keep = np.arange(5) != 1
    np.testing.assert_array_equal(
        found.steps["visible"].value, np.broadcast_to(before & keep, (7, 5))
    )
    others = {n: x for n, x in options.items() if n in ("softcap", "bias", "sink")}
    same_answer(found, PLAIN, found.steps["visible"].value, **others)
    assert [n for n in found.steps if n not in ("visible", "masked")] == [
        n for n in explanation.steps if n not in ("visible", "masked")
    ]


def test_without_a_key_by_its_label_names_it_where_it_hides():
    explanation = regard.explain(
        *PLAIN, key_labels=["the", "cat", "the", "dog", "sat"], title="Cats"
    )
    found = explanation.without("cat")
    assert found.table("weights").hidden_by(0, 1) == ('without "cat"',)
    assert found.title == "Cats"
    assert found.steps["keys"].row_labels == explanation.steps["keys"].row_labels
    again = found.without("the@2")
    assert again.table("weights").hidden_by(0, 2) == ('without "the@2"',)
    assert again.table("weights").hidden_by(0, 1) == ('without "cat"',)
    with pytest.raises(regard.LabelError, match="names 2 of the keys"):
        explanation.without("the")
    with pytest.raises(regard.LabelError, match="no 5"):
        explanation.without(5)


def test_without_a_key_the_softmax_stays_as_it_was():
    options = {"softmax": "unshifted", "scale": 0.25, "query_labels": list("abcdefg")}
    found = regard.explain(*PLAIN, **options).without(2)
    assert "shifted" not in found.steps
    assert found.steps["scale"].value == 0.25
    assert found.steps["weights"].row_labels == tuple("abcdefg")
    same_answer(found, PLAIN, np.broadcast_to(np.arange(5) != 2, (7, 5)), scale=0.25)


def test_without_leaves_the_explanation_itself_as_it_was():
    explanation = regard.explain(*PLAIN)
    before = explanation.output.copy()
    assert explanation.without(0).compare(explanation) is not None
    np.testing.assert_array_equal(explanation.output, before)
    assert "visible" not in explanation.steps


def test_without_every_key_nothing_is_left():
    found = regard.explain(*PLAIN)
    for key in range(5):
        found = found.without(key)
    np.testing.assert_array_equal(found.output, np.zeros((7, 3)))
    np.testing.assert_array_equal(found.steps["lse"].value, np.full(7, -INF))


def test_without_a_key_of_a_problem_goes_through_to_the_projected_output():
    problem = Problem(
        embeddings=numbers((3, 4), seed=1),
        W_q=numbers((4, 4), seed=2),
        W_k=numbers((4, 2), seed=3),
        W_v=numbers((4, 2), seed=4),
        W_o=numbers((4, 3), seed=5),
        heads=2,
        key_heads=1,
        lengths=2,
        query_labels=("she", "likes", "coffee"),
    )
    found = regard.explain(problem, scale=2.0).without("she")
    only = np.broadcast_to(np.arange(3) == 1, (3, 3))
    expected = regard.explain(problem.replace(lengths=None, mask=only), scale=2.0)
    np.testing.assert_array_equal(found.output, expected.output)
    assert found.steps["scale"].value == 2.0
    assert found.table("weights", head=0).hidden_by(0, 2) == ("lengths",)
    assert found.problem is not None


# compare ------------------------------------------------------------------------------------------


@every_call
def test_an_explanation_does_not_differ_from_its_own_repetition(arrays):
    options = {"mask": [True, False, True, True, True], "bias": [0.0, 0.0, -INF, 0.0, 1.0]}
    one, other = (regard.explain(*arrays, **options) for _ in range(2))
    assert one.compare(other) is None
    assert other.compare(one) is None


def test_nan_equals_nan_and_each_infinity_itself():
    bad = with_cells(PLAIN[2], {(0, 0): NAN, (1, 1): INF, (2, 2): -INF})
    one, other = (regard.explain(*PLAIN[:2], bad) for _ in range(2))
    assert one.compare(other) is None
    found = one.compare(regard.explain(*PLAIN[:2], with_cells(bad, {(1, 1): -INF})))
    assert (found.step, found.index, found.difference) == ("values", (1, 1), INF)


@pytest.mark.parametrize(
    ("changes", "step", "index"),
    [
        ({"query": with_cells(PLAIN[0], {(2, 1): 9.0})}, "queries", (2, 1)),
        ({"key": with_cells(PLAIN[1], {(4, 0): NAN})}, "keys", (4, 0)),
        ({"value": with_cells(PLAIN[2], {(3, 2): -9.0})}, "values", (3, 2)),
        ({"scale": 0.5}, "scale", ()),
        ({"softcap": 0.5}, "row_maximum", None),
        ({"bias": with_cells(np.zeros((7, 5)), {(1, 3): 2.0})}, None, None),
        ({"mask": with_cells(np.ones((7, 5)), {(3, 3): 0.0}) == 1}, None, None),
        ({"sink": 3.0}, None, None),
    ],
    ids=range(8),
)
def test_the_first_step_that_differs_is_found_in_the_order_of_the_steps(changes, step, index):
    call = dict(zip(("query", "key", "value"), PLAIN, strict=True))
    here, there = regard.explain(**call), regard.explain(**(call | changes))
    found = here.compare(there)
    for name in here.steps:
        if name == found.step:
            break
        if name in there.steps:
            np.testing.assert_array_equal(here.steps[name].value, there.steps[name].value)
    mine, theirs = here.steps[found.step].value, there.steps[found.step].value
    differs = ~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs)))
    assert found.index == tuple(np.argwhere(differs)[0])
    assert step is None or found.step == step
    assert index is None or found.index == index
    for derivation, value in ((found.here, mine), (found.there, theirs)):
        np.testing.assert_array_equal(derivation.value, value[found.index])
        assert derivation.step == found.step
    assert found.labels == found.here.labels


def test_the_difference_is_how_far_the_cell_is_from_the_other():
    changed = with_cells(PLAIN[2], {(3, 2): float(PLAIN[2][3, 2]) + 0.5})
    found = regard.explain(*PLAIN).compare(regard.explain(*PLAIN[:2], changed))
    assert found.difference == 0.5
    assert found.there.value - found.here.value == 0.5


def test_what_differs_by_no_more_than_the_tolerance_does_not_differ():
    one, other = regard.explain(*PLAIN), regard.explain(PLAIN[0] * (1 + 1e-9), *PLAIN[1:])
    assert one.compare(other).step == "queries"
    assert one.compare(other, tolerance=1e-6) is None
    assert one.compare(regard.explain(*PLAIN, scale=1.0), tolerance=1e-6).step == "scale"
    nan = regard.explain(PLAIN[0] * NAN, *PLAIN[1:])
    assert one.compare(nan, tolerance=1e9).step == "queries"


def test_steps_that_only_one_of_them_has_are_passed_over():
    one = regard.explain(*PLAIN, mask=np.ones(5, bool))
    assert one.compare(regard.explain(*PLAIN)) is None
    assert regard.explain(*PLAIN).compare(one) is None
    unshifted = regard.explain(*PLAIN, softmax="unshifted")
    assert regard.explain(*PLAIN).compare(unshifted).step == "exponentials"


def test_a_difference_in_a_batch_is_found_with_its_leading_axes():
    values = np.broadcast_to(BATCH[2], (2, 3, 2, 5, 3))
    changed = with_cells(values, {(1, 2, 1, 4, 0): 7.0})
    found = regard.explain(*BATCH[:2], values).compare(regard.explain(*BATCH[:2], changed))
    assert (found.step, found.index) == ("values", (1, 2, 1, 4, 0))
    assert (found.there.value, found.there.batch) == (7.0, (1, 2))
    assert found.here.value == values[1, 2, 1, 4, 0]
    assert found.labels == ("key head 1", "4", "0")


def test_the_rule_that_hides_a_cell_is_where_two_masks_differ():
    found = regard.explain(*PLAIN, mask=Lengths(4)).compare(regard.explain(*PLAIN, mask=Lengths(3)))
    assert (found.step, found.index) == ("visible", (0, 3))
    assert (found.here.value, found.there.value) == (1.0, 0.0)
    assert "lengths: hidden" in found.there.text()


def test_two_mechanisms_part_at_a_step_and_have_their_weights_beside_each_other():
    softmax, sparse = (regard.explain(*PLAIN, normalize=own) for own in ("softmax", Sparsemax()))
    found = sparse.compare(softmax)
    assert found.step == "weights"
    assert found.only_here == ("threshold",)
    assert found.only_there == (
        *("row_maximum", "shifted", "exponentials", "row_sums", "log_sums", "lse"),
    )
    for table, own in zip(found.weights, (sparse, softmax), strict=True):
        np.testing.assert_array_equal(table.value, own["weights"].value)
    assert "weights here  P = max(A_s − τ_s, 0)\n" in repr(found)
    assert "weights there  P = Y / z\n" in repr(found)
    assert softmax.compare(regard.explain(*PLAIN, scale=1.0)).weights is None


def test_a_page_shows_two_mechanisms_on_the_same_input(tmp_path):
    one, other = regard.explain(*PLAIN), regard.explain(*PLAIN, score=Distance())
    page = tmp_path / "two.html"
    one.compare_html(other, page, names=("dot", "distance"))
    text = page.read_text("utf-8")
    assert "2 mechanisms, of which one is shown." in text
    assert "<label>mechanism <select" in text
    assert ">distance</option>" in text
    assert "<h2>Where they part</h2>" in text
    found = one.compare(other)
    first = f"scores is the first step of both that differs: A[0, 0] is {found.here.value:.4f} with"
    assert first.replace("-", "−") in text
    assert "Only distance has distances." in text
    both = [text.index(f"<bdi>weights, {name}</bdi>") for name in ("dot", "distance")]
    rows = [f"{each['weights'].value[0, 0]:.4f}" for each in (one, other)]
    assert text.index(rows[0], both[0]) < both[1] < text.index(rows[1], both[1])
    with pytest.raises(DtypeError, match="other must be an Explanation, not dict"):
        one.compare_html({}, page)
    with pytest.raises(OptionError, match="it needs two names that differ"):
        one.compare_html(other, page, names=("dot",), force=True)
    shorter = regard.explain(PLAIN[0][:3], *PLAIN[1:], score=Distance())
    one.compare_html(shorter, page, names=("dot", "shorter"), force=True)
    assert "Where they part" not in page.read_text("utf-8")


def test_attentions_of_other_sizes_cannot_be_compared():
    other = regard.explain(PLAIN[0][:3], *PLAIN[1:])
    with pytest.raises(
        regard.ShapeError, match=r"queries has shape \(7, 2\) here but \(3, 2\) there"
    ):
        regard.explain(*PLAIN).compare(other)


# first_nonfinite ----------------------------------------------------------------------------------


@every_call
def test_where_everything_is_finite_there_is_nothing_to_find(arrays):
    assert regard.explain(*arrays, causal=True, offset=1, sink=0.5).first_nonfinite() is None


@every_block_size
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("argument", "step", "at"),
    [(0, "queries", (3, 6, 1)), (1, "keys", (1, 2, 0)), (2, "values", (0, 4, 2))],
)
def test_the_input_in_which_a_nan_stands_is_where_it_starts(
    monkeypatch, cells, value, argument, step, at
):
    in_blocks(monkeypatch, cells)
    arrays = list(HEADS)
    arrays[argument] = with_cells(arrays[argument], {at: value})
    found = regard.explain(*arrays).first_nonfinite()
    assert (found.step, found.index) == (step, at)
    np.testing.assert_equal(found.value, value)
    assert found.op == "given"


@every_block_size
def test_the_product_that_overflows_is_where_infinity_starts(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    q, k, v = np.ones((7, 2)), np.ones((5, 2)), np.ones((5, 1))
    q[5] = k[3] = 1e200
    found = regard.explain(q, k, v).first_nonfinite()
    assert (found.step, found.index, found.value) == ("scores", (5, 3), INF)
    assert [operand.value for operand in found.operands] == [1e200] * 4


def test_the_projection_that_overflows_is_where_infinity_starts():
    problem = Problem(
        embeddings=[[1.0, 2.0], [1e200, 1e200]],
        W_q=np.zeros((2, 2)),
        W_k=[[1e200, 0.0], [1e200, 1.0]],
        W_v=np.eye(2),
        heads=2,
        b_k=[0.0, 1.0],
    )
    found = regard.explain(problem).first_nonfinite()
    assert (found.step, found.index, found.value) == ("key_products", (1, 0), INF)


def test_a_nan_in_the_bias_starts_there_and_minus_infinity_does_not():
    bias = with_cells(np.zeros((7, 5)), {(0, 0): -INF, (2, 2): NAN, (3, 3): INF})
    found = regard.explain(*PLAIN, bias=bias).first_nonfinite()
    assert (found.step, found.index) == ("bias", (2, 2))
    hides = regard.explain(*PLAIN, bias=np.where(np.isfinite(bias), 0.0, -INF))
    assert hides.first_nonfinite() is None


def test_what_attention_says_for_absent_is_passed_over():
    empty = regard.explain(*PLAIN, mask=Lengths(0))
    assert np.isneginf(empty.steps["lse"].value).all()
    assert empty.first_nonfinite() is None
    assert regard.explain(*PLAIN, causal=True, offset=-3).first_nonfinite() is None


@pytest.mark.parametrize("value", [NAN, INF])
def test_what_stands_in_a_key_that_nobody_sees_is_passed_over(value):
    """Padding may hold anything: no result depends on it, so no search should stop there."""
    keys, values = (with_cells(x, {(4, 0): value}) for x in PLAIN[1:])
    explanation = regard.explain(PLAIN[0], keys, values, mask=Lengths(4))
    assert np.isfinite(explanation.output).all()
    assert explanation.first_nonfinite() is None


def test_a_nan_in_sight_is_found_behind_one_that_nobody_sees():
    keys = with_cells(PLAIN[1], {(0, 0): NAN, (4, 0): NAN})
    values = with_cells(PLAIN[2], {(0, 0): NAN, (2, 1): NAN})
    mask = np.array([False, True, True, True, False])
    found = regard.explain(PLAIN[0], keys, values, mask=mask).first_nonfinite()
    assert (found.step, found.index) == ("values", (2, 1))


def test_a_key_that_some_queries_see_is_in_sight():
    keys = with_cells(PLAIN[1], {(4, 0): NAN})
    explanation = regard.explain(PLAIN[0], keys, PLAIN[2], causal=True, offset=0)
    found = explanation.first_nonfinite()
    assert (found.step, found.index) == ("keys", (4, 0))


def test_a_nan_in_a_batch_is_found_in_its_element():
    found = regard.explain(
        with_cells(BATCH[0], {(1, 0, 2, 3, 1): NAN}), *BATCH[1:]
    ).first_nonfinite()
    assert (found.step, found.batch, found.index) == ("queries", (1, 0), (2, 3, 1))
    assert np.isnan(found.value)


# check --------------------------------------------------------------------------------------------


def expect(step: str, value: Any = None, **more: Any) -> tuple[Expectation]:
    return (Expectation(step=step, value=value, **more),)


def test_what_came_out_as_stated_is_no_mismatch():
    explanation = regard.explain(*HEADS)
    for name, step in explanation.steps.items():
        value = step.value if step.axes else float(step.value)
        assert explanation.check(expect(name, value, within=0.0)) == ()
    assert explanation.check() == ()
    assert explanation.check(()) == ()


def test_every_number_that_did_not_come_out_is_a_mismatch():
    explanation = regard.explain(*PLAIN, query_labels=list("abcdefg"))
    weights = explanation.steps["weights"].value
    stated = with_cells(weights, {(2, 3): 0.75, (6, 0): -1.0})
    first, second = explanation.check(expect("weights", stated))
    assert (first.step, first.labels) == ("weights", ("c", "3"))
    assert (first.expected, first.got) == (0.75, weights[2, 3])
    assert (first.derivation.step, first.derivation.index) == ("weights", (2, 3))
    assert first.derivation.value == first.got
    assert (first.expectation.step, first.what, first.index) == ("weights", "value", (2, 3))
    assert (second.labels, second.expected, second.derivation.index) == (("g", "0"), -1.0, (6, 0))


@pytest.mark.parametrize(
    ("within", "relative", "meets"),
    [
        (0.1, 0.0, True),
        (0.09, 0.0, False),
        (0.0, 0.06, True),
        (0.0, 0.04, False),
        (0.05, 0.03, True),
    ],
)
def test_a_number_matches_within_its_absolute_and_relative_distance(within, relative, meets):
    explanation = regard.explain([[1.9]], [[1.0]], [[1.0]], scale=1.0)
    stated = expect("scores", [[2.0]], within=within + 1e-12, relative=relative)
    assert (explanation.check(stated) == ()) is meets


def test_a_number_matches_to_nine_digits_unless_told_otherwise():
    explanation = regard.explain([[1.0]], [[1.0]], [[1.0]], scale=1.0)
    assert explanation.check(expect("scores", [[1.0 + 4e-9]])) == ()
    assert len(explanation.check(expect("scores", [[1.0 + 6e-9]]))) == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_must_come_out_as_such(value):
    explanation = regard.explain([[1.0]], [[1.0]], [[value]], scale=1.0)
    assert explanation.check(expect("values", [[value]])) == ()
    for other in (NAN, INF, -INF, 1.0):
        if not (other == value or (np.isnan(other) and np.isnan(value))):
            (mismatch,) = explanation.check(expect("values", [[other]], within=1e300, relative=1.0))
            np.testing.assert_equal((mismatch.expected, mismatch.got), (other, value))


def test_one_cell_is_stated_by_labels_or_positions():
    explanation = regard.explain(*PLAIN, query_labels=list("abcdefg"))
    value = float(explanation.steps["weights"].value[2, 3])
    for at in (("c", 3), (2, "3"), ("c", -2)):
        assert explanation.check(expect("weights", value, at=at)) == ()
        (mismatch,) = explanation.check(expect("weights", value + 1, at=at))
        assert (mismatch.labels, mismatch.expected, mismatch.got) == (("c", "3"), value + 1, value)
        assert mismatch.derivation.value == value


def test_several_numbers_stated_for_one_cell_are_refused():
    with pytest.raises(ValueError, match="weights"):
        regard.explain(*PLAIN).check(expect("weights", [1.0, 2.0], at=(0, 1)))
    with pytest.raises(regard.LabelError, match="weights needs 2"):
        regard.explain(*PLAIN).check(expect("weights", 1.0, at=(0,)))


def test_one_head_is_stated_by_its_number():
    explanation = regard.explain(*HEADS)
    for name in ("weights", "keys", "row_sums"):
        step = explanation.steps[name]
        for head in range(4):
            assert explanation.check(expect(name, step.head(head), head=head)) == ()
    stated = with_cells(explanation.steps["weights"].value[3], {(1, 2): 5.0})
    (mismatch,) = explanation.check(expect("weights", stated, head=3))
    assert mismatch.labels == ("head 3", "1", "2")
    assert mismatch.derivation.index == (3, 1, 2)
    assert mismatch.derivation.value == mismatch.got == explanation.steps["weights"].value[3, 1, 2]
    cell = float(explanation.steps["weights"].value[3, 1, 2])
    assert explanation.check(expect("weights", cell, at=(1, 2), head=3)) == ()
    (mismatch,) = explanation.check(expect("weights", cell + 1, at=(1, 2), head=3))
    assert mismatch.got == cell


def test_a_mismatch_in_the_keys_of_a_head_is_derived_in_its_key_head():
    explanation = regard.explain(*HEADS)
    keys = explanation.steps["keys"].value
    stated = with_cells(keys[1], {(4, 0): 5.0})
    (mismatch,) = explanation.check(expect("keys", stated, head=3))
    assert mismatch.got == keys[1, 4, 0]
    assert (mismatch.derivation.index, mismatch.derivation.value) == ((1, 4, 0), keys[1, 4, 0])


def test_one_cell_of_the_keys_of_a_head_is_that_of_its_key_head():
    explanation = regard.explain(*HEADS)
    value = float(explanation.steps["keys"].value[1, 4, 0])
    assert explanation.check(expect("keys", value, at=(4, 0), head=3)) == ()


def test_a_mismatch_in_a_batch_is_derived_in_its_element():
    explanation = regard.explain(*BATCH)
    weights = explanation.steps["weights"].value
    (mismatch,) = explanation.check(expect("weights", with_cells(weights, {(1, 2, 3, 0, 4): 5.0})))
    assert mismatch.got == weights[1, 2, 3, 0, 4]
    assert (mismatch.derivation.batch, mismatch.derivation.index) == ((1, 2), (3, 0, 4))
    assert mismatch.derivation.value == mismatch.got
    scale = explanation.check(expect("scale", 2.0))
    assert scale[0].derivation.value == scale[0].got == float(explanation.steps["scale"].value)


def test_the_variance_of_a_step_is_checked():
    explanation = regard.explain(*PLAIN, mask=Lengths(3))
    for name in ("scores", "weights"):
        variance = explanation.statistics().steps[name].variance
        assert explanation.check(expect(name, variance=variance)) == ()
        (mismatch,) = explanation.check(expect(name, variance=variance + 1.0))
        assert (mismatch.expected, mismatch.got) == (variance + 1.0, variance)
        assert (mismatch.step, mismatch.what) == (name, "variance")
        assert (mismatch.index, mismatch.labels, mismatch.derivation) == ((), (), None)


def test_value_and_variance_are_both_checked():
    explanation = regard.explain(*PLAIN)
    value = explanation.steps["scores"].value
    both = expect("scores", with_cells(value, {(0, 0): 99.0}), variance=99.0)
    assert [m.what for m in explanation.check(both)] == ["variance", "value"]


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0], np.zeros((5, 7)), np.zeros((1, 7, 5))])
def test_an_expectation_of_another_shape_is_refused_with_both_shapes(value):
    with pytest.raises(regard.OptionError, match=r"weights has shape .* but weights has \(7, 5\)"):
        regard.explain(*PLAIN).check(expect("weights", value))


def test_an_expectation_of_a_step_that_is_not_there_says_why():
    with pytest.raises(regard.LabelError, match="no step masked: nothing hides a key"):
        regard.explain(*PLAIN).check(expect("masked", 1.0))


def test_the_expectations_of_a_problem_are_checked_without_being_named():
    problem = Problem(
        queries=[[1.0, 0.0]],
        keys=[[1.0, 0.0], [0.0, 1.0]],
        values=[[1.0], [2.0]],
        scale=1.0,
        expect=(*expect("scores", [[1.0, 0.0]]), *expect("output", [[1.5]], within=0.01)),
    )
    (mismatch,) = regard.explain(problem).check()
    assert (mismatch.step, mismatch.expected) == ("output", 1.5)
    np.testing.assert_allclose(mismatch.got, 1 + 1 / (1 + math.e), rtol=FUNCTION_ROUNDINGS * UNIT)
    assert mismatch.expectation is problem.expect[1]


# rows without weight, and with a sink -------------------------------------------------------------


def test_effective_keys_count_shares_of_the_weight_that_is_not_the_sinks():
    arrays = np.zeros((1, 1)), np.zeros((2, 1)), np.zeros((2, 1))
    rows = regard.explain(*arrays, sink=math.log(8)).statistics().rows
    np.testing.assert_allclose(rows.largest_weight, [0.1], rtol=FUNCTION_ROUNDINGS * UNIT)
    np.testing.assert_allclose(rows.effective_keys, [2.0], rtol=FUNCTION_ROUNDINGS * UNIT)
    np.testing.assert_allclose(rows.entropy, [math.log(2)], rtol=FUNCTION_ROUNDINGS * UNIT)


@pytest.mark.parametrize("sink", [None, 0.5])
def test_a_row_that_sees_nothing_has_no_effective_and_no_largest_key(sink):
    rows = regard.explain(*PLAIN, mask=np.arange(7)[:, None] > 0, sink=sink).statistics().rows
    found = (rows.entropy[0], rows.effective_keys[0], rows.largest_weight[0], rows.largest_key[0])
    assert found == (0.0, 0.0, 0.0, -1)
    assert (rows.largest_key[1:] >= 0).all()
    assert (rows.effective_keys[1:] >= 1 - SOME_ROUNDINGS * UNIT).all()


def test_without_any_key_no_row_has_a_largest_one():
    rows = regard.explain(np.ones((2, 1)), np.ones((0, 1)), np.ones((0, 1))).statistics().rows
    np.testing.assert_array_equal(rows.largest_key, [-1, -1])
    np.testing.assert_array_equal(rows.effective_keys, [0, 0])


# wrong kinds and places ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda e: e.why("weights", 0, 0, head="x"), TypeError, "head must be an int"),
        (lambda e: e.why("weights", 0, 0, head=1.0), TypeError, "head must be an int"),
        (lambda e: e.why("weights", 0, 0, head=True), TypeError, "head must be an int"),
        (lambda e: e.table("weights", head="x"), TypeError, "head must be an int"),
        (lambda e: e.contributions(0, head=[0]), TypeError, "head must be an int"),
        (lambda e: e.why("weights", 0, 0, batch=1), regard.LabelError, "batch (1,) is not"),
        (lambda e: e.why("weights", 0, 0, batch=[1]), regard.LabelError, "batch (1,) is not"),
        (lambda e: e.table("weights", batch=("x", 0)), TypeError, "batch must be a tuple of ints"),
        (lambda e: e.why("scale").open("x"), TypeError, "operand must be an int"),
        (lambda e: e.why(["output"]), regard.LabelError, "there is no step ['output']"),
        (lambda e: e.steps["weights"].head(7), regard.LabelError, "there is no head 7"),
        (lambda e: e.steps["weights"].head(-1), regard.LabelError, "there is no head -1"),
        (lambda e: e.steps["weights"].head(0, (5, 0)), regard.LabelError, "batch (5, 0) is not"),
        (lambda e: e.compare(None), TypeError, "other must be an Explanation, not NoneType"),
        (lambda e: e.compare(e, tolerance=NAN), regard.OptionError, "tolerance is nan"),
        (lambda e: e.compare(e, tolerance=-1), regard.OptionError, "tolerance is -1"),
        (lambda e: e.compare(e, tolerance="x"), TypeError, "tolerance must be a number"),
        (lambda e: e.check(3), TypeError, "expectations must be Expectation objects, not int"),
        (
            lambda e: e.check((Expectation(step="weights", value=np.ones((7, 5)), head=4),)),
            regard.LabelError,
            "there is no head 4",
        ),
    ],
)
def test_a_question_of_the_wrong_kind_is_refused_by_the_name_of_its_argument(ask, error, said):
    explanation = regard.explain(*BATCH)
    with pytest.raises(error) as caught:
        ask(explanation)
    assert said in str(caught.value)


def test_a_batch_element_may_be_named_by_a_list():
    explanation = regard.explain(*BATCH)
    assert explanation.why("weights", 0, 0, head=0, batch=[1, 2]).batch == (1, 2)
    lone = regard.explain(*inputs((2, 1, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2)))
    assert lone.why("weights", 0, 0, batch=1).batch == (1,)


def test_contributions_of_no_heads_at_all_are_refused():
    with pytest.raises(regard.LabelError, match="there are 0 heads"):
        regard.explain(*inputs((0, 2, 2), (0, 3, 2), (0, 3, 2))).contributions(0)


def test_one_expectation_may_be_checked_by_itself():
    explanation = regard.explain(*PLAIN)
    (mismatch,) = explanation.check(Expectation(step="scale", value=7.0))
    assert mismatch.expected == 7.0


def test_a_variance_with_a_head_is_that_of_the_head():
    explanation = regard.explain(*HEADS)
    for name in ("weights", "keys"):
        own = float(explanation.steps[name].head(3).var())
        assert abs(own - float(explanation.steps[name].value.var())) > 1e-4
        assert explanation.check(Expectation(step=name, variance=own, head=3)) == ()


# printed answers ----------------------------------------------------------------------------------


def test_a_table_is_printed_with_its_labels_and_rounded_numbers():
    x = np.eye(2)
    table = regard.explain(x, x, x, query_labels=["a", "b"], key_labels=["c", "d\x1b"])
    assert repr(table.table("weights")).split("\n") == [
        "weights  P = Y / z  2 query rows × 2 keys",
        "        c   d\\x1b",
        "a  0.6698  0.3302",
        "b  0.3302  0.6698",
    ]


def test_a_long_table_is_printed_in_part():
    x = np.zeros((100, 30))
    text = repr(regard.explain(x, x, x).table("values"))
    assert len(text.split("\n")) < 30
    assert max(map(len, text.split("\n"))) < 100
    assert "…" in text


def test_statistics_are_printed_one_step_a_line():
    explanation = regard.explain(*PLAIN)
    lines = repr(explanation.statistics()).split("\n")
    assert lines[0].split() == ["step", "mean", "variance", "minimum", "maximum", "cells"]
    assert [line.split()[0] for line in lines[1:-1]] == list(explanation.statistics().steps)


def test_a_comparison_is_printed_with_the_cell_and_both_numbers():
    x = np.eye(2)
    names = {"query_labels": ["a", "b"], "key_labels": ["a", "b"]}
    found = regard.explain(x, x, x, **names).compare(regard.explain(2 * x, x, x, **names))
    assert repr(found).split("\n") == [
        "queries is the first step that differs, by 1 at most",
        "Q[a, 0] = 1.0 here, 2.0 there",
    ]


# only what is asked for ---------------------------------------------------------------------------


def test_plain_data_holds_and_computes_only_the_steps_that_are_named(monkeypatch):
    explanation = regard.explain(*PLAIN)
    asked = []
    value = evaluation.Run.value
    monkeypatch.setattr(
        evaluation.Run, "value", lambda run, name: (asked.append(name), value(run, name))[1]
    )
    data = explanation.to_json(["output"])
    assert ([step["name"] for step in data["steps"]], asked) == (["output"], ["output"])
    assert explanation.to_json([])["steps"] == []
    with pytest.raises(regard.LabelError, match="there is no step nothing"):
        explanation.to_json(["nothing"])


def test_data_with_a_derivation_has_no_steps_unless_they_are_named():
    explanation = regard.explain(*PLAIN)
    cell = explanation.why("output", 0, 0)
    assert as_data(explanation, derivation=cell)["steps"] == []
    both = as_data(explanation, ["scores"], cell)
    assert [step["name"] for step in both["steps"]] == ["scores"]
    assert len(as_data(explanation)["steps"]) == len(explanation.steps)


def test_a_row_is_found_without_listing_all_blocks(monkeypatch):
    in_blocks(monkeypatch, 1)
    explanation = regard.explain(*PLAIN)
    expected = explanation.steps["weights"].value[6, 4]
    monkeypatch.setattr(evaluation.Run, "row_blocks", None)
    assert explanation.why("weights", 6, 4).value == expected

"""The evaluation of declared steps: on demand, block by block, and the same numbers either way."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import regard
from bounds import assert_within, error_bounds
from calls import every_float, numbers
from layouts import layouts
from oracle import attend
from regard.compute import evaluation
from regard.compute.evaluation import Run
from regard.masks import Causal, Lengths, Mask
from regard.textbook.steps import textbook

INF, NAN = np.inf, np.nan
BLOCKS = [1, 5, 11, 2**18]
every_block_size = pytest.mark.parametrize("cells", BLOCKS)

# What adding in another order, as matrices of other sizes may, does to numbers of a few steps.
ANOTHER_ORDER = 64 * 2.0**-53

# A long call: one head of 3000 queries and keys, whose scores take 72 MB.
LONG = 3000
MATRIX_BYTES = LONG * LONG * 8


def inputs(*shapes: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> tuple[Any, ...]:
    return tuple(numbers(shape, dtype, 100 * seed + n) for n, shape in enumerate(shapes))


PLAIN = inputs((7, 2), (5, 2), (5, 3))
HEADS = inputs((4, 7, 2), (2, 5, 2), (2, 5, 3))


def run_of(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    rules: Mask | None = None,
    offset: Any = 0,
    dtype: Any = np.float64,
    **optional: Any,
) -> Run:
    """The textbook over ready arrays (…, H, L, D), (…, G, S, D), (…, G, S, E) or without heads."""
    heads = queries.ndim > 2
    lead = queries.shape[:-3] if heads else ()
    given = {"queries": queries, "keys": keys, "values": values}
    given |= {name: np.asarray(value) for name, value in optional.items() if name != "scale"}
    steps = textbook(given, heads=heads, masked=rules is not None, default_scale=False)
    return Run(
        steps,
        {**given, "scale": np.asarray(optional.get("scale", 0.5))},
        {},
        dtype=np.dtype(dtype),
        lead=lead,
        rules=rules,
        query_positions=np.broadcast_to(
            np.asarray(offset)[..., np.newaxis] + np.arange(queries.shape[-2]),
            (*lead, queries.shape[-2]),
        ),
    )


def everything(seed: int = 0) -> Run:
    """A run with every option, on heads that share keys."""
    return run_of(
        *HEADS,
        rules=Causal() & Lengths(4),
        offset=1,
        bias=numbers((4, 7, 5)),
        softcap=2.0,
        sink=numbers((4,)),
    )


def blocks(run: Run, name: str) -> Iterator[tuple[int, range, np.ndarray]]:
    axes = run.steps[name].axes
    heads = next((run.sizes[axis] for axis in axes if axis in ("H", "G")), 1)
    for head in range(heads):
        for rows in run.row_blocks() if "L" in axes else [range(1)]:
            yield head, rows, run.block(name, (), head, rows)


def in_blocks(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    monkeypatch.setattr(evaluation, "BLOCK_CELLS", cells)


# blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [1, 4, 5, 9, 10, 34, 35, 2**18])
def test_blocks_cover_every_row_once_in_order_and_are_no_larger_than_allowed(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    found = run_of(*PLAIN).row_blocks()
    assert [row for rows in found for row in rows] == list(range(7))
    assert all(len(rows) * 5 <= cells or len(rows) == 1 for rows in found)
    assert all(len(rows) == len(found[0]) for rows in found[:-1])  # so that a row's block is known


def test_a_single_query_is_one_block_and_no_queries_are_none():
    single = textbook({"queries", "keys", "values"}, heads=False, rows=False, default_scale=False)
    given = {"queries": np.ones(2), "keys": np.ones((3, 2)), "values": np.ones((3, 1))}
    run = Run(single, given | {"scale": np.asarray(1.0)}, {}, dtype=np.dtype(np.float64))
    assert run.row_blocks() == [range(1)]
    np.testing.assert_array_equal(run.value("output"), [1.0])
    assert run_of(np.ones((0, 2)), *PLAIN[1:]).row_blocks() == []


@every_block_size
def test_a_whole_value_has_the_bytes_of_its_blocks_and_of_its_rows(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    run = everything()
    for name, step in run.steps.items():
        whole = run.value(name)
        assert whole.shape == run.shape(name)
        for head, rows, block in blocks(everything(), name):
            mine = whole[head] if {"H", "G"} & set(step.axes) else whole
            mine = mine[rows.start : rows.stop] if "L" in step.axes else mine
            assert block.shape == mine.shape, name
            assert block.tobytes() == mine.tobytes(), name
            if "L" in step.axes:
                for row in rows:
                    one = everything().row(name, (), head, row)
                    assert one.tobytes() == mine[row - rows.start].tobytes(), name


def test_a_step_without_rows_has_the_same_block_whichever_row_is_asked_for():
    run = everything()
    np.testing.assert_array_equal(run.row("keys", (), 1, 6), run.value("keys")[1])
    np.testing.assert_array_equal(run.row("sink", (), 3, 2), run.value("sink")[3])


@pytest.mark.parametrize("rows", [range(2, 5), (0, 3, 6), (4,), None])
def test_any_rows_can_be_asked_for(rows):
    run, whole = everything(), everything()
    chosen = list(range(7)) if rows is None else list(rows)
    for name in ("queries", "scale", "biased", "row_maximum", "log_sums", "weights", "output"):
        block = run.block(name, (), 2, range(7) if rows is None else rows)
        value = whole.value(name)
        value = value[2][chosen] if "L" in run.steps[name].axes else value
        assert_within(block, value, ANOTHER_ORDER * max(1.0, abs(value).max()), name)


@every_block_size
def test_the_size_of_a_block_does_not_change_what_comes_out(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    options = {"softcap": 2.0, "bias": numbers((4, 7, 5)), "sink": numbers((4,)), "scale": 0.5}
    hidden = np.arange(5) < 4
    answer = attend(*HEADS, causal=True, offset=1, mask=hidden, **options)
    bounds = error_bounds(*HEADS, answer, dtype=np.float64, **options)
    run = everything()
    for name in ("output", "weights", "lse"):
        assert_within(run.value(name), getattr(answer, name), getattr(bounds, name), name)
    np.testing.assert_array_equal(run.value("visible"), answer.visible)


@every_block_size
def test_the_size_of_a_block_does_not_move_a_nan(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    queries, keys, values = (x.copy() for x in HEADS)
    queries[1, 3, 0] = NAN
    keys[0, 4, 1] = values[1, 4, 0] = INF  # hidden
    values[0, 2, 1] = NAN
    run = run_of(queries, keys, values, rules=Lengths(4))
    expected = np.zeros((4, 7, 3), bool)
    expected[:2, :, 1] = True  # heads 0 and 1 read key head 0
    expected[1, 3] = True
    np.testing.assert_array_equal(np.isnan(run.value("output")), expected)
    np.testing.assert_array_equal(np.isfinite(run.value("output")), ~expected)


@every_block_size
def test_a_mask_with_rows_of_its_own_is_cut_where_the_rows_are(monkeypatch, cells):
    in_blocks(monkeypatch, cells)
    mask = np.random.default_rng(0).random((4, 7, 5)) < 0.5
    run = run_of(*HEADS, rules=regard.masks.Boolean(mask))
    np.testing.assert_array_equal(run.value("visible"), mask)
    np.testing.assert_array_equal(run.value("weights") > 0, mask)


# on demand ----------------------------------------------------------------------------------------


class Recorded(Mapping[str, np.ndarray]):
    """Inputs that know which of them were read."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.read = arrays, set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class Work:
    """How many cells every step has computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cells: dict[str, int] = {}
        genuine = Run.part

        def compute(run: Run, step: Any, *arguments: Any) -> np.ndarray:
            block = genuine(run, step, *arguments)
            if step.op not in ("given", "visible"):
                self.cells[step.name] = self.cells.get(step.name, 0) + block.size
            return block

        monkeypatch.setattr(Run, "part", compute)


def test_only_what_a_number_is_made_of_is_computed(monkeypatch):
    work = Work(monkeypatch)
    run = everything()
    run.inputs = Recorded(run.inputs)
    run.row("scaled", (), 2, 3)
    assert set(work.cells) == {"scores", "scaled"}
    assert run.inputs.read == {"queries", "keys", "scale"}


def test_nothing_is_computed_before_it_is_asked_for(monkeypatch):
    work = Work(monkeypatch)
    explanation = regard.explain(*HEADS, sink=0.5)
    assert next(iter(explanation.steps)) == "queries"
    assert explanation.steps["weights"].shape == (4, 7, 5)
    assert work.cells == {}
    explanation.why("weights", 0, 0, head=1)
    assert work.cells["scores"] == 7 * 5  # of one head
    assert "output" not in work.cells


def test_a_block_is_computed_once_for_all_that_need_it(monkeypatch):
    work = Work(monkeypatch)
    run = everything()
    for name in ("output", "lse", "weights", "output"):
        run.value(name)
    assert work.cells["scores"] == 4 * 7 * 5
    assert work.cells["exponentials"] == 4 * 7 * 5
    assert work.cells["output"] == 4 * 7 * 3


def test_one_row_of_a_long_call_touches_few_blocks(monkeypatch):
    work = Work(monkeypatch)
    explanation = regard.explain(*inputs((LONG, 4), (LONG, 4), (LONG, 2)), causal=True)
    cell = explanation.why("weights", LONG // 2, 7)
    assert cell.open(1).step == "row_sums"
    assert len(cell.open(1).terms) == LONG // 2 + 1
    assert cell.recompute() == cell.value
    rows = len(explanation.source.row_blocks()[0])
    assert rows < LONG / 20
    assert work.cells["scores"] == rows * LONG  # one block
    assert max(work.cells.values()) == rows * LONG


def test_one_row_of_a_long_call_needs_a_fraction_of_its_memory():
    arrays = inputs((LONG, 4), (LONG, 4), (LONG, 2))
    tracemalloc.start()
    try:
        explanation = regard.explain(*arrays, causal=True)
        explanation.why("weights", LONG // 2, 7)
        explanation.contributions(LONG - 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MATRIX_BYTES / 2


# forgetting ---------------------------------------------------------------------------------------


def test_what_was_forgotten_is_computed_again_to_the_same_bytes(monkeypatch):
    expected = {name: everything().value(name) for name in everything().steps}
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 0)
    in_blocks(monkeypatch, 2**18)
    run = everything()
    for name, value in expected.items():
        assert run.value(name).tobytes() == value.tobytes(), name
    kept = everything()
    first = kept.value("output")
    kept.forget()
    assert kept.value("output").tobytes() == first.tobytes()


def test_forgetting_makes_the_work_anew(monkeypatch):
    work = Work(monkeypatch)
    run = run_of(*PLAIN)
    run.value("weights")
    run.forget()
    run.value("weights")
    assert work.cells["scores"] == 2 * 7 * 5


def test_a_run_keeps_no_more_than_it_may(monkeypatch):
    rows = keys = 1000
    monkeypatch.setattr(evaluation, "BLOCK_CELLS", 16 * keys)
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 2**20)
    run = run_of(*inputs((rows, 2), (keys, 2), (keys, 1)), rules=Causal())
    tracemalloc.start()
    try:
        output = run.value("output")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert output.shape == (rows, 1)
    block_bytes = 16 * keys * 8
    assert peak < 2**20 + 2 * len(run.steps) * block_bytes
    assert peak < rows * keys * 8


def test_arrays_that_were_handed_out_survive_forgetting():
    run = everything()
    block = run.block("weights", (), 0, run.row_blocks()[0])
    before = block.copy()
    run.forget()
    run.value("weights")
    np.testing.assert_array_equal(block, before)


# batches and heads --------------------------------------------------------------------------------


def test_every_element_of_a_batch_is_what_it_is_alone():
    q, k, v = inputs((2, 3, 4, 7, 2), (2, 3, 2, 5, 2), (2, 3, 2, 5, 3))
    lengths = np.array([[5, 0, 3], [1, 4, 2]])
    offset = np.array([[0, 1, 2], [-1, 5, 0]])
    bias, sink = numbers((2, 3, 4, 7, 5)), numbers((2, 3, 4))
    run = run_of(*(q, k, v), rules=Causal() & Lengths(lengths), offset=offset, bias=bias, sink=sink)
    for b in np.ndindex(2, 3):
        alone = run_of(
            *(q[b], k[b], v[b]),
            rules=Causal() & Lengths(lengths[b]),
            offset=offset[b],
            bias=bias[b],
            sink=sink[b],
        )
        for name in run.steps:
            whole = run.value(name)
            mine = whole[b] if run.shape(name)[:2] == (2, 3) and whole.ndim > 0 else whole
            assert mine.tobytes() == alone.value(name).tobytes(), (b, name)


def test_every_head_is_what_it_is_alone_with_its_key_head():
    run = run_of(*HEADS, sink=numbers((4,)), bias=numbers((4, 7, 5)))
    for head in range(4):
        alone = run_of(
            *(HEADS[0][head], HEADS[1][head // 2], HEADS[2][head // 2]),
            sink=numbers((4,))[head],
            bias=numbers((4, 7, 5))[head],
        )
        for name in ("scores", "biased", "weights", "output", "lse"):
            assert run.value(name)[head].tobytes() == alone.value(name).tobytes(), name


def test_what_a_batch_shares_is_not_repeated():
    steps = textbook({"embeddings", "W_q", "W_k", "W_v", "W_o"}, default_scale=False)
    given = {
        "embeddings": numbers((2, 3, 7, 4), np.float64),
        "W_q": numbers((4, 8), np.float64, 1),
        "W_k": numbers((4, 4), np.float64, 2),
        "W_v": numbers((4, 6), np.float64, 3),
        "W_o": numbers((12, 5), np.float64, 4),
        "scale": np.asarray(0.5),
    }
    run = Run(steps, given, {"H": 4, "G": 2}, dtype=np.dtype(np.float64), lead=(2, 3))
    assert run.shape("W_q") == run.value("W_q").shape == (4, 8)
    assert run.shape("scale") == ()
    assert run.shape("queries") == (2, 3, 4, 7, 2)
    assert run.shape("keys") == (2, 3, 2, 7, 2)
    assert run.shape("merged") == (2, 3, 7, 12)
    assert run.value("projected_output").shape == (2, 3, 7, 5)
    one = Run(
        steps,
        given | {"embeddings": given["embeddings"][1, 2]},
        {"H": 4, "G": 2},
        dtype=np.dtype(np.float64),
    )
    for name in ("keys", "weights", "merged", "projected_output"):
        assert run.value(name)[1, 2].tobytes() == one.value(name).tobytes(), name


@every_block_size
def test_keys_made_from_the_same_rows_as_the_queries_are_all_there_in_every_block(
    monkeypatch, cells
):
    in_blocks(monkeypatch, cells)
    steps = textbook({"embeddings", "W_q", "W_k", "W_v"}, heads=False, default_scale=False)
    x = np.random.default_rng(0).integers(-3, 4, (7, 4)).astype(np.float64)
    w = np.random.default_rng(1).integers(-3, 4, (4, 2)).astype(np.float64)  # x @ w is exact
    given = {"embeddings": x, "W_q": w, "W_k": w, "W_v": w, "scale": np.asarray(0.125)}
    run = Run(steps, given, {}, dtype=np.dtype(np.float64))
    answer = attend(x @ w, x @ w, x @ w, scale=0.125)
    bounds = error_bounds(*[x @ w] * 3, answer, dtype=np.float64, scale=0.125)
    assert_within(run.row("output", (), 0, 3), answer.output[3], bounds.output[3])
    assert_within(run.value("output"), answer.output, bounds.output)


# dtypes and layouts -------------------------------------------------------------------------------


@every_float
@pytest.mark.parametrize("working", [np.float32, np.float64, np.longdouble])
def test_every_step_is_computed_in_the_working_dtype(dtype, working):
    arrays = [x.astype(dtype) for x in HEADS]
    run = run_of(*arrays, rules=Causal(), dtype=working, bias=numbers((4, 7, 5)), softcap=2.0)
    for name, step in run.steps.items():
        expected = np.bool_ if step.op == "visible" else working
        assert run.value(name).dtype == expected, name


def test_a_scalar_keeps_its_own_precision_until_the_result_is_rounded():
    scores = np.arange(1.0, 50.0, dtype=np.float32)
    run = run_of(np.ones((1, 1)), scores[:, np.newaxis], np.ones((49, 1)), scale=0.1, dtype="f4")
    assert float(run.block("scale", (), 0, range(1))) == 0.1
    expected = (scores.astype(np.float64) * 0.1).astype(np.float32)
    assert (scores * np.float32(0.1) != expected).any()
    np.testing.assert_array_equal(run.value("scaled"), expected[np.newaxis])


@pytest.mark.parametrize("name", ["queries", "keys", "values", "bias"])
def test_the_bytes_do_not_depend_on_how_an_input_lies_in_memory(name):
    # Wide enough for BLAS to add in another order where the numbers lie in another one.
    q, k, v = inputs((4, 9, 33), (2, 17, 33), (2, 17, 35))
    arrays = {"queries": q, "keys": k, "values": v, "bias": numbers((4, 9, 17), np.float64)}
    expected = run_of(**arrays).value("output").tobytes()
    for layout, array in layouts(arrays[name]):
        found = run_of(**(arrays | {name: array})).value("output")
        assert found.tobytes() == expected, layout


def test_inputs_are_never_written():
    arrays = [x.copy() for x in HEADS]
    for array in arrays:
        array.setflags(write=False)
    run = run_of(*arrays, rules=Lengths(3))
    for name in run.steps:
        run.value(name)
    for array, before in zip(arrays, HEADS, strict=True):
        assert array.tobytes() == before.tobytes()


def test_a_value_is_not_a_view_of_an_input():
    run = run_of(*PLAIN)
    value = run.value("queries")
    assert not np.shares_memory(value, PLAIN[0])

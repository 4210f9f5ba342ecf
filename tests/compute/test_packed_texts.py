"""Texts packed into one row: each has the numbers that it has alone, wherever it lies.

The oracle in `packed.py` computes each text by itself. `draw(number)` makes a packed call that
failed again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import regard
from bounds import assert_within, error_bounds
from calls import (
    FLOATS,
    PATHS,
    answer_of,
    arithmetic_of,
    assert_other_numbers,
    assert_same_bytes,
    assert_same_result,
    every_kernel,
    every_target,
    inputs,
    numbers,
    on_path,
    run,
)
from packed import CALLS, Packed, alone, alone_of, compare, draw, forward_bounds, path_of, texts
from regard import OptionError, ShapeError
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.normalizers import Sigmoid
from regard.positions import Alibi, RelativeBias, Rotary
from regard.scores import Cosine

ARRAYS = ("query", "key", "value", "grad")
# Numbers below 4, in float64 and float32: at most so many roundings on two ways to the same sum.
NEAR, NEAR_IN_FLOAT32 = (100 * 4 * unit for unit in (2.0**-53, 2.0**-24))
POSITIONS: dict[str, Any] = {
    "alibi": Alibi(0.5),
    "table": RelativeBias(numbers((2, 8), np.float64, 5), max_distance=6),
    "halves": Rotary(base=100.0),
    "pairs": Rotary(base=100.0, interleaved=True, width=2),
}
every_kind_of_positions = pytest.mark.parametrize("kind", [None, *POSITIONS])


def positions_of(kind: str | None) -> dict[str, Any]:
    return {} if kind is None else {"positions": POSITIONS[kind]}


def table(rows: list[str]) -> np.ndarray:
    """Visible cells written as rows of 0 and 1."""
    return np.array([[cell == "1" for cell in row] for row in rows])


# the oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "alibi", "table", "rotary"])
def test_the_gradients_of_the_oracle_are_the_slopes_of_its_output(kind):
    step, most = 1e-3, 1e-9  # differences of the fourth order: step**4 / 30 of a fifth derivative
    several = (draw(n) for n in range(CALLS) if draw(n).kind == kind)
    several = (call for call in several if 4 < call.key.shape[-2] < 20)
    call = next(call for call in several if all(grad.any() for grad in alone(call).grads))
    arrays = {name: getattr(call, name).astype(np.float64) for name in ARRAYS[:3]}
    grads = alone(dataclasses.replace(call, **arrays)).grads
    for (name, array), grad in zip(arrays.items(), grads, strict=True):
        for at in list(np.ndindex(array.shape))[:: array.size // 4]:
            losses = []
            for steps in (-2, -1, 1, 2):
                moved = array.copy()
                moved[at] += steps * step
                output = alone(dataclasses.replace(call, **arrays | {name: moved})).answer.output
                losses.append(float((output * call.grad).sum()))
            slope = (losses[0] - 8 * losses[1] + 8 * losses[2] - losses[3]) / (12 * step)
            np.testing.assert_allclose(grad[at], slope, rtol=0, atol=most, err_msg=f"{name}{at}")


# a thousand calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_thousand_packed_calls_have_the_numbers_of_their_texts_alone(path, own):
    mine = [number for number in range(CALLS) if (path_of(number) == path) == own]
    for number in mine:
        with on_path(path) as kernel:
            try:
                compare(draw(number), alone_of(number), kernel)
            except (AssertionError, ValueError, TypeError) as error:
                raise AssertionError(f"draw({number}) on {path}: {error}") from error
    print(f"{path}: {len(mine)} packed calls compared, forward and backward")
    np.testing.assert_array_less(150, len(mine))


def test_the_thousand_calls_are_spread_over_every_path_and_option():
    shares = Counter(path_of(number) for number in range(CALLS))
    assert shares.keys() == set(PATHS)
    assert (sum(shares.values()), min(shares.values()) > 150) == (CALLS, True)
    found: Counter[str] = Counter()
    for call in map(draw, range(CALLS)):
        found.update(
            name
            for name, has in {
                str(call.query.dtype): True,
                "no offset": call.offset is None,
                "end": isinstance(call.offset, str),
                "one offset": call.offset is not None and np.ndim(call.offset) == 0,
                "own offsets": np.ndim(call.offset) == 1,
                "offsets of two axes": np.ndim(call.offset) == 2,
                "two axes": call.headless,
                "batch": call.batch,
                "shared heads": call.query.shape[-3] > call.key.shape[-3],
                "own packing": call.segments is not None and call.segments[0].ndim > 1,
                "lengths": call.lengths is not None,
                "lengths beside": call.lengths is not None and call.segments is not None,
                "causal": call.causal,
                "window": call.window is not None,
                f"rule {call.rule}": True,
                f"positions {call.kind}": True,
                "part": call.given.get("width"),
                "pairs": call.given.get("interleaved"),
                "several chunks": call.key.shape[-2] > 256,
                "text without queries": _has(call, lambda one: not one.rows),
                "text without keys": _has(call, lambda one: not one.keys),
            }.items()
            if has
        )
    assert len(found) == 27, sorted(found)
    np.testing.assert_array_less(9, min(found.values()), str(found))


def _has(call: Packed, what: Any) -> bool:
    return any(what(text) for b in np.ndindex(*call.batch) for text in texts(call, b))


@every_kernel
@pytest.mark.parametrize("dtype", [one for one in FLOATS if one.id in ("float16", "bfloat16")])
def test_half_types_have_the_numbers_of_their_texts_alone(kernel, dtype):
    for number in range(0, 60, 2):
        call = draw(number)
        if call.kind == "rotary":
            continue
        halves = (x.astype(dtype) for x in (call.query, call.key, call.value, call.grad))
        call = dataclasses.replace(call, **dict(zip(ARRAYS, halves, strict=True)))
        expected, arrays = alone(call), call.arrays()[:3]
        bound = forward_bounds(call, expected, kernel)
        result = run(kernel, *arrays, **call.options)
        for name in ("output", "weights", "lse"):
            exact, error = getattr(expected.answer, name), getattr(bound, name)
            cut = 0 if call.headless else ...
            assert_within(getattr(result, name), exact[cut], error[cut], f"draw({number}): {name}")


# where a text's queries are -----------------------------------------------------------------------


def test_the_last_query_of_each_text_is_at_its_last_key():
    rule = Segments([0, 0, 1], [0, 0, 1, 1, 1]) & Causal()
    np.testing.assert_array_equal(rule.visible(3, 5, offset="end")[0], [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(
        rule.visible(3, 5, offset="end"), table(["10000", "11000", "00111"])
    )


def test_the_last_query_is_at_the_last_key_within_the_length():
    visible = (Lengths([4]) & Causal()).visible(2, 10, offset="end")
    expected = table(["1110000000", "1111000000"])
    np.testing.assert_array_equal(visible.reshape(2, 10), expected)


# A text of two queries and three keys, whose keys come last, and one of three and five.
TWO = Segments([7, 7, 3, 3, 3], [3, 3, 3, 3, 3, 7, 7, 7])
SEEN = {
    0: ["00000100", "00000110", "10000000", "11000000", "11100000"],
    1: ["00000110", "00000111", "11000000", "11100000", "11110000"],
    -1: ["00000000", "00000100", "00000000", "10000000", "11000000"],
    "end": ["00000110", "00000111", "11100000", "11110000", "11111000"],
    None: ["00000000", "00000000", "11100000", "11110000", "11111000"],  # query i is at i
    2**40: ["00000111", "00000111", "11111000", "11111000", "11111000"],
    -(2**40): ["00000000"] * 5,
}


@pytest.mark.parametrize("offset", SEEN)
def test_first_is_at_first_last_at_last_and_an_integer_adds(offset):
    visible = (TWO & Causal()).visible(5, 8, offset=offset)
    np.testing.assert_array_equal(visible, table(SEEN[offset]))


@every_kernel
@pytest.mark.parametrize("offset", [offset for offset in SEEN if offset is not None])
def test_a_call_sees_the_same(kernel, offset):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    by_cells = run(kernel, *arrays, mask=table(SEEN[offset]))
    for options in ({"mask": TWO, "causal": True}, {"mask": TWO & Causal()}):
        assert_same_result(run(kernel, *arrays, offset=offset, **options), by_cells)


@every_kernel
def test_each_batch_element_has_its_own_offset(kernel):
    arrays = inputs((3, 2, 5, 4), (3, 2, 8, 4), (3, 2, 8, 3))
    cells = np.array([table(SEEN[offset]) for offset in (0, -1, 1)])[:, np.newaxis]
    expected = run(kernel, *arrays, mask=cells)
    for offset in ([0, -1, 1], np.array([0, -1, 1], np.int32)):
        made = run(kernel, *arrays, mask=TWO, causal=True, offset=offset)
        assert_same_result(made, expected)


@every_kernel
def test_each_batch_element_has_its_own_packing(kernel):
    sides = [[7, 7, 3, 3, 3], [0, 1, 1, 1, 1]], [[3] * 5 + [7] * 3, [1] * 6 + [0] * 2]
    arrays = inputs((2, 2, 5, 4), (2, 2, 8, 4), (2, 2, 8, 3))
    both = run(kernel, *arrays, mask=Segments(*sides), causal=True, offset="end")
    for b in range(2):
        mask = Segments(sides[0][b], sides[1][b])
        one = run(kernel, *(x[b] for x in arrays), mask=mask, causal=True, offset="end")
        for name in ("output", "weights", "lse"):
            assert_same_bytes(getattr(both, name)[b], getattr(one, name), name)


@every_kernel
def test_lengths_move_the_end_of_each_text_and_no_integer(kernel):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    # Of the eight keys, six are within: text 7 has one of its three left, text 3 all five.
    within = {
        "end": ["00000000", "00000100", "11100000", "11110000", "11111000"],
        1: [row[:6] + "00" for row in SEEN[1]],
    }
    for offset, cells in within.items():
        visible = (TWO & Lengths(6) & Causal()).visible(5, 8, offset=offset)
        np.testing.assert_array_equal(visible.reshape(5, 8), table(cells))
        made = run(kernel, *arrays, mask=Lengths(6) & TWO, causal=True, offset=offset)
        assert_same_result(made, run(kernel, *arrays, mask=table(cells)))


@every_kernel
def test_lengths_alone_put_the_end_of_each_batch_element(kernel):
    arrays = inputs((3, 2, 2, 4), (3, 2, 6, 4), (3, 2, 6, 3))
    lengths = np.array([5, 0, 1])
    made = run(kernel, *arrays, mask=Lengths(lengths), causal=True, offset="end")
    by_numbers = run(kernel, *arrays, mask=Lengths(lengths), causal=True, offset=lengths - 2)
    assert_same_result(made, by_numbers)
    cells = np.arange(6) <= (lengths - 2)[:, None, None] + np.arange(2)[:, None]
    assert_same_result(made, run(kernel, *arrays, mask=cells[:, np.newaxis]))


@every_kernel
def test_lengths_leave_an_integer_as_it_is(kernel):
    arrays = inputs((2, 3, 4), (2, 6, 4), (2, 6, 3))
    made = run(kernel, *arrays, mask=Lengths(4), causal=True, offset=2)
    cells = table(["111000", "111100", "111100"])
    assert_same_result(made, run(kernel, *arrays, mask=cells))


@every_kernel
@every_kind_of_positions
def test_one_query_without_an_axis_of_rows_is_a_text_too(kernel, kind):
    query, key, value = inputs((4,), (5, 4), (5, 3), dtype=np.float64)
    positions = {} if kind == "table" else positions_of(kind)  # the table is one of two heads
    options = {"causal": True, "offset": "end", **positions}
    made = run(kernel, query, key, value, mask=Segments([3], [1, 1, 3, 3, 3]), **options)
    expected = run(kernel, query, key[2:], value[2:], **options)
    np.testing.assert_allclose(made.output, expected.output, rtol=0, atol=NEAR)
    np.testing.assert_array_equal(made.weights[:2], 0)


@every_kernel
def test_what_visible_shows_is_what_has_a_weight(kernel):
    compared = 0
    for number in range(80):
        call = draw(number)
        if np.ndim(call.offset):
            continue  # of a batch, which `visible` is not told
        given = call.options.get("mask")
        terms = [term for term in (given, Causal() if call.causal else None) if term is not None]
        terms += [Window(*call.window)] if call.window else []
        if not terms:
            continue
        rule = terms[0]
        for term in terms[1:]:
            rule = rule & term
        result = run(kernel, *call.arrays()[:3], **call.options)
        sizes = call.query.shape[-2], call.key.shape[-2]
        visible = np.broadcast_to(rule.visible(*sizes, offset=call.offset), result.weights.shape)
        np.testing.assert_array_equal(result.weights > 0, visible, f"draw({number})")
        expected = alone_of(number).answer.visible[0 if call.headless else ...]
        np.testing.assert_array_equal(visible, expected, f"draw({number})")
        compared += 1
    np.testing.assert_array_less(30, compared)


@every_kernel
@every_kind_of_positions
def test_without_an_offset_query_i_is_at_position_i(kernel, kind):
    arrays = inputs((2, 6, 4), (2, 6, 4), (2, 6, 3))
    sides = np.array([4, 4, 4, 9, 9, 2]), np.array([9, 9, 4, 4, 4, 2])
    apart = np.array([0, 1, 0, 1, 2, 2]), np.array([1, 0, 0, 1, 2, 0])
    for query, key in (sides, apart):
        cells = (query[:, None] == key) & np.tri(6, dtype=bool)
        visible = (Segments(query, key) & Causal()).visible(6, 6)
        np.testing.assert_array_equal(visible, cells)
        made = run(kernel, *arrays, mask=Segments(query, key), causal=True, **positions_of(kind))
        expected = run(kernel, *arrays, mask=cells, **positions_of(kind))
        assert_same_result(made, expected)


@every_kernel
@every_kind_of_positions
def test_the_same_texts_in_queries_and_keys_need_no_offset(kernel, kind):
    call = inputs((2, 6, 4), (2, 6, 4), (2, 6, 3))
    options = {"mask": Segments([4, 4, 4, 9, 9, 2]), "causal": True, **positions_of(kind)}
    without = run(kernel, *call, **options)
    for offset in (0, "end"):
        assert_same_result(run(kernel, *call, offset=offset, **options), without)


@every_kernel
def test_where_the_terms_stand_changes_nothing(kernel):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    causal, window, some = Causal(), Window(1, None), Boolean(np.arange(8) != 1)
    expected = run(
        kernel, *arrays, mask=TWO & some & Lengths(7), causal=True, window=(1, None), offset="end"
    )
    for mask in (
        TWO & causal & window & some & Lengths(7),
        (Lengths(7) & (some & causal)) & (window & TWO),
        causal & (window & (some & (Lengths(7) & TWO))),
    ):
        assert_same_result(run(kernel, *arrays, mask=mask, offset="end"), expected)


@every_kernel
def test_the_offset_has_no_effect_where_nothing_uses_positions(kernel):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    apart = Segments([1, 0, 1, 0, 2], [0, 0, 1, 0, 2, 2, 1, 0])
    for mask in (TWO, apart, ~TWO, TWO | apart, apart & Lengths(5)):
        expected = run(kernel, *arrays, mask=mask)
        for offset in (0, "end", 3):
            assert_same_result(run(kernel, *arrays, mask=mask, offset=offset), expected)


# each text alone ----------------------------------------------------------------------------------

COUNTS = {"a": (2, 3), "b": (3, 5), "no queries": (0, 2), "no keys": (2, 0), "c": (4, 4)}
TEXTS = {
    name: inputs((2, queries, 4), (1, keys, 4), (1, keys, 3), seed=n)
    for n, (name, (queries, keys)) in enumerate(COUNTS.items())
}
IN_ORDER = dict(zip(COUNTS, range(5), strict=True))


def runs(order: list[str], side: int, numbers: dict[str, int]) -> list[int]:
    return [numbers[name] for name in order for _ in range(COUNTS[name][side])]


def packed(
    query_order: list[str], key_order: list[str], numbers: dict[str, int] = IN_ORDER
) -> tuple[list[np.ndarray], Segments]:
    """The arrays of one call with all texts in these orders, and its segments."""
    orders = query_order, key_order, key_order
    arrays = [
        np.concatenate([TEXTS[n][x] for n in order], axis=1) for x, order in enumerate(orders)
    ]
    return arrays, Segments(runs(query_order, 0, numbers), runs(key_order, 1, numbers))


def rows_of(name: str, order: list[str], side: int) -> slice:
    first = sum(COUNTS[one][side] for one in order[: order.index(name)])
    return slice(first, first + COUNTS[name][side])


@every_kernel
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1, 1)}, {}], ids=str)
def test_the_order_of_the_texts_changes_no_number(kernel, options):
    names = list(COUNTS)
    options = options | {"offset": "end"}
    for query_order, key_order in (
        (names, names),
        (names[::-1], names),
        (names[2:] + names[:2], names[3:] + names[:3]),
    ):
        arrays, segments = packed(query_order, key_order)
        result = run(kernel, *arrays, mask=segments, **options)
        for name in names:
            answer = answer_of(*TEXTS[name], **options)
            bound = error_bounds(
                *TEXTS[name], answer, dtype=np.float32, arithmetic=arithmetic_of(kernel, *arrays)
            )
            rows, keys = rows_of(name, query_order, 0), rows_of(name, key_order, 1)
            assert_within(result.output[:, rows], answer.output, bound.output, name)
            assert_within(result.lse[:, rows], answer.lse, bound.lse, name)
            assert_within(result.weights[:, rows, keys], answer.weights, bound.weights, name)


@every_kernel
@every_kind_of_positions
def test_the_numbers_of_the_texts_change_no_byte(kernel, kind):
    names, options = list(COUNTS), {"causal": True, "offset": "end", **positions_of(kind)}
    arrays, segments = packed(names, names)
    expected = run(kernel, *arrays, mask=segments, **options)
    for own in ([4, 3, 2, 1, 0], [9, 0, 2**31, 5, 2**40]):
        _, segments = packed(names, names, dict(zip(names, own, strict=True)))
        assert_same_result(run(kernel, *arrays, mask=segments, **options), expected)


@every_target
@pytest.mark.needs("fused")
def test_a_text_whose_keys_begin_a_chunk_has_its_bytes_alone(target):
    counts = [(5, 256), (1, 256), (40, 300)]  # keys from 0, 256 and 512: where chunks begin
    arrays = inputs(*((2, sum(n for n, _ in counts), 16), (1, 812, 16), (1, 812, 8)))
    segments = Segments(*(np.repeat([2, 0, 1], side) for side in zip(*counts, strict=True)))
    for options in ({"causal": True}, {"window": (30, 2)}, {"causal": True, "window": (270, 0)}):
        with on_path(f"fused:{target}") as kernel:
            result = run(kernel, *arrays, mask=segments, offset="end", **options)
            row = first = 0
            for queries, keys in counts:
                rows, there = slice(row, row + queries), slice(first, first + keys)
                one = [x[:, at] for x, at in zip(arrays, (rows, there, there), strict=True)]
                expected = run(kernel, *one, offset="end", **options)
                assert_same_bytes(result.output[:, rows], expected.output, f"keys from {first}")
                assert_same_bytes(result.lse[:, rows], expected.lse, f"keys from {first}")
                row, first = row + queries, first + keys


@every_kernel
@every_kind_of_positions
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_the_other_texts_hold_changes_no_byte_and_no_gradient(kernel, kind, bad):
    names, options = list(COUNTS), {"offset": "end", "causal": True, **positions_of(kind)}
    arrays, segments = packed(names, names)
    grad = numbers((2, arrays[0].shape[1], 3), seed=9)
    options |= {"mask": segments}
    clean = run(kernel, *arrays, **options)
    grads = regard.gradients(*arrays, grad, kernel=kernel, **options)
    for name in ("a", "b", "c"):
        rows, keys = rows_of(name, names, 0), rows_of(name, names, 1)
        spoilt = []
        for array, here in zip(arrays, (rows, keys, keys), strict=True):
            every = np.full_like(array, bad)
            every[:, here] = array[:, here]
            spoilt.append(every)
        result = run(kernel, *spoilt, **options)
        for part in ("output", "weights", "lse"):
            made, expected = (getattr(one, part)[:, rows] for one in (result, clean))
            assert_same_bytes(made, expected, f"{part} of {name}")
        made = regard.gradients(*spoilt, grad, kernel=kernel, **options)
        for part, here in (("query", rows), ("key", keys), ("value", keys)):
            one, other = (getattr(x, part)[:, here] for x in (made, grads))
            what = f"the gradient of {part} of {name}"
            np.testing.assert_allclose(one, other, rtol=0, atol=NEAR_IN_FLOAT32, err_msg=what)


@every_kernel
@every_kind_of_positions
def test_a_text_without_keys_is_zero_and_one_without_queries_has_no_gradient(kernel, kind):
    names, options = list(COUNTS), {"offset": "end", "causal": True, **positions_of(kind)}
    arrays, segments = packed(names, names)
    rows, keys = rows_of("no keys", names, 0), rows_of("no queries", names, 1)
    result = run(kernel, *arrays, mask=segments, **options)
    for part, expected in (("output", 0), ("weights", 0), ("lse", -np.inf)):
        np.testing.assert_array_equal(getattr(result, part)[:, rows], expected)
    np.testing.assert_array_equal(result.weights[..., keys], 0)
    grads = regard.gradients(
        *arrays, numbers(result.output.shape, seed=9), mask=segments, kernel=kernel, **options
    )
    np.testing.assert_array_equal(grads.query[:, rows], 0)
    np.testing.assert_array_equal(grads.key[:, keys], 0)
    np.testing.assert_array_equal(grads.value[:, keys], 0)


@pytest.mark.parametrize(
    "options",
    [
        {"score": Cosine(0.3)},
        {"normalize": Sigmoid(bias=-1.0)},
        {"softcap": 2.0, "sink": 0.5},
        {"bias": numbers((14,), np.float64, 7), "window": (2, 1)},
    ],
    ids=["cosine", "sigmoid", "softcap and sink", "bias and window"],
)
@every_kind_of_positions
def test_every_other_option_sees_each_text_as_it_is_alone(options, kind):
    names = list(COUNTS)
    arrays, segments = packed(names, names)
    arrays = [x.astype(np.float64) for x in arrays]
    options = options | {"causal": True, "offset": "end"} | positions_of(kind)
    bias = options.pop("bias", np.zeros(arrays[1].shape[1]))
    result = regard.attention(*arrays, mask=segments, bias=bias, **options)
    for name in ("a", "b", "c"):
        rows, keys = rows_of(name, names, 0), rows_of(name, names, 1)
        one = [x[:, at] for x, at in zip(arrays, (rows, keys, keys), strict=True)]
        expected = regard.attention(*one, bias=bias[keys], **options)
        np.testing.assert_allclose(result[:, rows], expected, rtol=0, atol=NEAR, err_msg=name)


# what is refused ----------------------------------------------------------------------------------

OF_A_BATCH = inputs((2, 2, 3, 4), (2, 2, 4, 4), (2, 2, 4, 3))
REFUSED = {
    "queries in pieces": Segments([0, 1, 0], [0, 0, 1, 1]),
    "keys in pieces": Segments([0, 0, 1], [0, 1, 0, 1]),
    "keys in pieces, of no query": Segments([0, 0, 0], [1, 0, 0, 1]),
    "one batch element in pieces": Segments([[0, 0, 1], [0, 1, 0]], [0, 0, 1, 1]),
    "any of": Segments([0, 0, 1], [0, 0, 1, 1]) | Lengths(1),
    "not": ~Segments([0, 0, 1], [0, 0, 1, 1]),
    "any of, beside a term": (Segments([0, 0, 1], [0, 0, 1, 1]) | Lengths(1)) & Lengths(4),
    "not, beside a term": Boolean(True) & ~Segments([0, 0, 1], [0, 0, 1, 1]),
}
NAMED = r"(?is)(?=.*segments)(?=.*offset)"
every_refused = pytest.mark.parametrize("mask", REFUSED.values(), ids=REFUSED)


@every_kernel
@every_refused
@pytest.mark.parametrize("offset", [0, "end", 1, [0, 1]], ids=str)
def test_texts_whose_places_are_not_defined_are_refused(kernel, mask, offset):
    for options in (
        {"causal": True},
        {"window": (1, 0)},
        {"positions": Alibi()},
        {"positions": Rotary()},
        {"positions": POSITIONS["table"]},
    ):
        with pytest.raises(OptionError, match=NAMED):
            regard.attention(*OF_A_BATCH, mask=mask, offset=offset, kernel=kernel, **options)
    with pytest.raises(OptionError, match=NAMED):
        regard.attention(*OF_A_BATCH, mask=mask & Causal(), offset=offset, kernel=kernel)


@every_refused
def test_every_function_refuses_them(mask):
    query, _, _ = OF_A_BATCH
    lse, options = np.zeros(query.shape[:-1], np.float32), {"causal": True, "offset": "end"}
    for ask in (
        lambda: regard.gradients(*OF_A_BATCH, OF_A_BATCH[0][..., :3], mask=mask, **options),
        lambda: regard.weights(*OF_A_BATCH[:2], lse, mask=mask, **options),
        lambda: regard.explain(*OF_A_BATCH, mask=mask, **options),
        lambda: (mask & Causal()).visible(3, 4, offset="end"),
        lambda: (Window(1, 1) & mask).visible(3, 4, offset=0),
    ):
        with pytest.raises(OptionError, match=NAMED):
            ask()


@every_kernel
@every_refused
def test_they_are_accepted_where_nothing_uses_positions(kernel, mask):
    expected = run(kernel, *OF_A_BATCH, mask=mask)
    for offset in (0, "end", [0, 1]):
        assert_same_result(run(kernel, *OF_A_BATCH, mask=mask, offset=offset), expected)
    visible = mask.visible(3, 4, offset="end")
    np.testing.assert_array_equal(visible, mask.visible(3, 4))


@every_kernel
def test_an_offset_must_be_given_where_there_are_more_keys_than_queries(kernel):
    for options in ({"causal": True}, {"window": (1, 0)}, {"positions": Alibi()}):
        with pytest.raises(OptionError, match="offset"):
            regard.attention(
                *OF_A_BATCH, mask=Segments([0, 0, 1], [0, 0, 1, 1]), kernel=kernel, **options
            )


@every_kernel
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ([-1, 0, 0], [0, 0, 0, 0]),
        ([0, 0, 1], [0, 0, 1, -3]),
        ([[0, 0, 1], [0, -1, -1]], [0, 0, 1, 1]),
        ([0.0, 0.0, 1.0], [0, 0, 1, 1]),
        ([0, 0, 1], [0, 0, 1, 1.5]),
        (["a", "a", "b"], [0, 0, 1, 1]),
        ([0, 0, 1], None),  # four keys, and the numbers of three queries
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 0], [0, 0, 1, 1]),
        ([0, 0, 1], [0, 0, 1]),
        ([0, 0, 1], [0, 0, 1, 1, 1]),
        ([[0, 0, 1]] * 3, [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_numbers_that_are_none_or_not_one_a_row_are_refused_by_name(kernel, query, key):
    with pytest.raises((ValueError, TypeError), match=r"(?i)segment"):
        regard.attention(
            *OF_A_BATCH, mask=Segments(query, key), causal=True, offset="end", kernel=kernel
        )


@pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (3, 3), (3, 5)], ids=str)
def test_numbers_for_other_sizes_are_refused_by_visible(sizes):
    with pytest.raises(ShapeError, match=r"(?i)segment"):
        (Segments([0, 0, 1], [0, 0, 1, 1]) & Causal()).visible(*sizes, offset="end")


@every_kernel
@pytest.mark.parametrize("lengths", [5, [4, 5], -1, [0, -2]], ids=str)
def test_lengths_beside_segments_are_numbers_of_keys(kernel, lengths):
    mask = Segments([0, 0, 1], [0, 0, 1, 1]) & Lengths(lengths)
    with pytest.raises(ValueError, match=r"(?i)length"):
        regard.attention(*OF_A_BATCH, mask=mask, causal=True, offset="end", kernel=kernel)


# Segments.from_lengths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "query", "key"),
    [
        (([2, 1], [2, 3]), [0, 0, 1], [0, 0, 1, 1, 1]),
        (([2, 0, 1], [1, 3, 0]), [0, 0, 2], [0, 1, 1, 1]),
        ((np.array([1, 2], np.int32), (2, 1)), [0, 1, 1], [0, 0, 1]),
        (([2, 1],), [0, 0, 1], [0, 0, 1]),
        (([2, 1], None), [0, 0, 1], [0, 0, 1]),
        (([0, 0], [2, 0]), [], [0, 0]),
        (([],), [], []),
    ],
    ids=str,
)
def test_texts_may_be_given_by_their_lengths(lengths, query, key):
    rule = Segments.from_lengths(*lengths)
    assert isinstance(rule, Segments)
    assert np.asarray(rule.query).tolist() == query
    expected = np.equal.outer(np.array(query, int), np.array(key, int))
    np.testing.assert_array_equal(rule.visible(len(query), len(key)), expected)


@every_kernel
def test_lengths_of_texts_are_called_as_their_segments_are(kernel):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    one = Segments.from_lengths([2, 0, 3], [3, 1, 4])
    other = Segments([0, 0, 2, 2, 2], [0, 0, 0, 1, 2, 2, 2, 2])
    for offset in (0, "end", -1):
        options = {"causal": True, "offset": offset}
        made = run(kernel, *arrays, mask=one, **options)
        assert_same_result(made, run(kernel, *arrays, mask=other, **options))


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        (([2, -1],), "query_lengths"),
        (([2, 1], [3, -1]), "key_lengths"),
        (([2.0, 1.0],), "query_lengths"),
        (([2, 1], [1, 1.5]), "key_lengths"),
        ((["2"],), "query_lengths"),
        ((None,), "query_lengths"),
        ((3,), "query_lengths"),
        (([[2, 1]],), "query_lengths"),
        (([2, 1], [[3, 1]]), "key_lengths"),
        (([2, 1], [3]), "key_lengths"),
        (([2], [3, 1]), "key_lengths"),
    ],
    ids=str,
)
def test_lengths_of_no_texts_are_refused_by_name(lengths, name):
    with pytest.raises((ValueError, TypeError), match=name):
        Segments.from_lengths(*lengths)


# beside everything else ---------------------------------------------------------------------------


@every_kernel
def test_query_positions_of_a_rotation_win_over_the_offset(kernel):
    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3), dtype=np.float64)
    packing = {"mask": TWO, "causal": True, "offset": "end"}
    cells = {"mask": table(SEEN["end"]), "offset": 0}
    own = Rotary(base=100.0, query_positions=[3, 0, 7, 2, 2])
    made = run(kernel, *arrays, positions=own, **packing)
    expected = run(kernel, *arrays, positions=own, **cells)
    np.testing.assert_allclose(made.output, expected.output, rtol=0, atol=NEAR)
    np.testing.assert_array_equal(made.weights > 0, cells["mask"][np.newaxis].repeat(2, 0))
    derived = run(kernel, *arrays, positions=POSITIONS["halves"], **packing)
    assert_other_numbers(made.output, derived.output)
    same = Rotary(base=100.0, query_positions=[6, 7, 2, 3, 4])  # where the offset puts them
    made = run(kernel, *arrays, positions=same, **packing)
    np.testing.assert_allclose(made.output, derived.output, rtol=0, atol=NEAR)


@every_kernel
def test_weights_made_again_are_those_of_the_packed_call(kernel):
    for number in range(0, 150, 5):
        call, expected = draw(number), alone_of(number)
        query, key, value, _ = call.arrays()
        lse = regard.attention(
            query, key, value, return_lse=True, kernel=kernel, **call.options
        ).lse
        cut = 0 if call.headless else ...
        near = forward_bounds(call, expected, kernel).weights[cut]
        for rows in (slice(None), slice(None, None, -2)):
            made = regard.weights(query, key, lse, rows=rows, kernel=kernel, **call.options)
            exact = expected.answer.weights[cut][..., rows, :]
            assert_within(made, exact, near[..., rows, :], f"draw({number})")


def test_an_explanation_has_the_numbers_of_the_packed_call():
    for number in range(30):
        call, expected = draw(number), alone_of(number)
        bound = forward_bounds(call, expected, "reference")
        explanation = regard.explain(*call.arrays()[:3], **call.options)
        cut = 0 if call.headless else ...
        for name in ("output", "weights"):
            exact, near = getattr(expected.answer, name)[cut], getattr(bound, name)[cut]
            assert_within(explanation[name].value, exact, near, f"draw({number}): {name}")
        visible = np.broadcast_to(explanation["visible"].value, expected.answer.visible[cut].shape)
        np.testing.assert_array_equal(visible, expected.answer.visible[cut])


def test_an_explanation_names_the_rules_that_hide_a_key_and_the_position():
    arrays = inputs((5, 4), (8, 4), (8, 3), dtype=np.float64)
    mask = TWO & Lengths(7)
    explanation = regard.explain(*arrays, mask=mask, causal=True, offset="end")
    # Text 7 has two keys within the length, 5 and 6; text 3 has five.
    queries, positions = [7, 7, 3, 3, 3], [5, 6, 2, 3, 4]
    shown = explanation.table("weights")
    for (i, number), j in itertools.product(enumerate(queries), range(8)):
        hides = {
            "segments": number != (3 if j < 5 else 7),
            "lengths": j >= 7,
            "causal": j > positions[i],
        }
        assert set(shown.hidden_by(i, j)) == {name for name, hidden in hides.items() if hidden}
        why = explanation.why("visible", i, j).text()
        assert f"key {j} {'>' if hides['causal'] else '≤'} position {positions[i]})" in why


@every_kernel
@pytest.mark.parametrize("kind", [None, "alibi", "halves", "pairs"])
def test_positions_of_a_cache_come_from_its_lengths_alone(kernel, kind):
    key, value = numbers((2, 1, 6, 4), np.float64, 1), numbers((2, 1, 6, 3), np.float64, 2)
    query, has = numbers((2, 2, 3, 4), np.float64, 3), np.array([3, 2])
    lengths = np.array([6, 4])
    cache = regard.KVCache(**positions_of(kind))
    cache.append(key, value, lengths=lengths)
    for sides in (
        (np.array([[0, 0, 1], [1, 1, 1]]), np.array([0, 0, 0, 1, 1, 1])),
        (np.array([0, 1, 0]), np.array([0, 1, 0, 1, 1, 0])),
    ):
        made = cache.attend(
            query, lengths=has, mask=Segments(*sides), kernel=kernel, return_weights=True
        )
        cells = (sides[0][..., np.newaxis] == sides[1]).reshape(-1, 1, 3, 6)
        expected = run(
            kernel,
            *(query, key, value),
            mask=Boolean(cells) & Lengths(lengths),
            causal=True,
            offset=lengths - has,
            **positions_of(kind),
        )
        for b in range(2):
            rows = slice(int(has[b]))
            for name in ("output", "weights"):
                one, other = (getattr(x, name)[b, :, rows] for x in (made, expected))
                np.testing.assert_allclose(one, other, rtol=0, atol=NEAR, err_msg=name)


MANY = (
    Segments(np.repeat([5, 0, 9], [90, 100, 110]), np.repeat([0, 9, 5], [300, 300, 400])),
    Segments(
        np.repeat([[0, 1], [3, 2]], [150, 150], axis=1),
        np.stack([np.repeat([1, 0], [400, 600]), np.repeat([2, 3], [1, 999])]),
    ),
)


@pytest.mark.sweep
@pytest.mark.needs("dask", "fused")
@pytest.mark.parametrize("mask", [*MANY, MANY[0] & Lengths([900, 650]), Lengths([900, 20])])
@pytest.mark.parametrize("offset", ["end", 0, [3, -2]], ids=str)
@pytest.mark.parametrize("kind", [None, "alibi", "halves"])
def test_the_bytes_over_dask_are_those_of_one_call(mask, offset, kind):
    import dask.array as da

    import regard.interop.dask as over_dask

    arrays = inputs((2, 2, 300, 16), (2, 1, 1000, 16), (2, 1, 1000, 8))
    options = {"mask": mask, "causal": True, "window": (400, None), "offset": offset}
    options |= positions_of(kind)
    one = regard.attention(*arrays, return_lse=True, **options)
    chunks = (1, 2, 130, -1), (1, 1, 512, -1), (1, 1, 512, -1)
    lazy = [da.from_array(x, chunks=c) for x, c in zip(arrays, chunks, strict=True)]
    output, lse = over_dask.attention(*lazy, return_lse=True, **options)
    assert_same_bytes(output.compute(scheduler="sync"), one.output, "output")
    assert_same_bytes(lse.compute(scheduler="sync"), one.lse, "lse")
    rows = [0, 89, 90, 299]
    made = over_dask.weights(*lazy[:2], one.lse, rows=rows, **options)
    expected = regard.weights(*arrays[:2], one.lse, rows=rows, **options)
    assert_same_bytes(made.compute(scheduler="sync"), expected, "weights")


@pytest.mark.full
@pytest.mark.needs("xarray", "dask", "fused")
@pytest.mark.parametrize("over_dask", [False, True])
def test_the_numbers_over_names_are_those_of_the_call(over_dask):
    import xarray

    import regard.interop.xarray as over_xarray

    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    named = [
        xarray.DataArray(x, dims=("head", dim, "f"))
        for x, dim in zip(arrays, ("word", "seen", "seen"), strict=True)
    ]
    named = [x.chunk({"head": 1}) for x in named] if over_dask else named
    names = {"head": "head", "row": "word", "key_row": "seen", "feature": "f"}
    options = {"mask": TWO, "causal": True, "offset": "end"}
    made = over_xarray.attention(*named, **names, **options)
    assert_same_bytes(made.values, regard.attention(*arrays, **options))


@pytest.mark.full
@pytest.mark.needs("torch")
def test_tensors_have_the_bytes_of_the_arrays():
    import torch

    arrays = inputs((2, 5, 4), (2, 8, 4), (2, 8, 3))
    grad = numbers((2, 5, 3), seed=9)
    options = {"mask": TWO, "causal": True, "offset": "end"}
    tensors = [torch.from_numpy(x) for x in (*arrays, grad)]
    made = regard.attention(*tensors[:3], **options)
    assert_same_bytes(made.numpy(), regard.attention(*arrays, **options))
    grads = regard.gradients(*tensors, **options)
    expected = regard.gradients(*arrays, grad, **options)
    for name in ("query", "key", "value"):
        assert_same_bytes(getattr(grads, name).numpy(), getattr(expected, name), name)

"""`regard.weights`: rows of the weights, made again from the log-sum-exp of an earlier call."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from bounds import (
    FUSED,
    WHOLE_ROWS,
    accumulator,
    assert_within,
    error_bounds,
    precision_of,
)
from calls import (
    answer_of,
    assert_same_bytes,
    every_float,
    every_kernel,
    inputs,
    numbers,
    result_dtype,
    run,
)
from drawn_calls import calls, for_the_oracle
from regard import DtypeError, OptionError, ShapeError
from regard.masks import Boolean, Causal, Lengths, Segments, Window

EXAMPLES = settings().max_examples
DECIDING = ("mask", "bias", "causal", "window", "offset", "scale", "softcap", "sink")

B, H, G, L, S, D = 2, 4, 2, 7, 9, 5
Q, K, V = inputs((B, H, L, D), (B, G, S, D), (B, G, S, 3))
MASK = np.random.default_rng(5).random((B, H, L, S)) < 0.7
EVERYTHING: dict[str, Any] = {
    "mask": Boolean(MASK) & Segments(np.arange(L) // 5, np.arange(S) // 7) & ~Lengths(1),
    "bias": numbers((L, S), seed=6),
    "causal": True,
    "window": (4, 1),
    "offset": np.array([1, 3]),
    "scale": 0.7,
    "softcap": 2.0,
    "sink": numbers((H,), seed=7),
}


def deciding(options: dict[str, Any]) -> dict[str, Any]:
    return {name: option for name, option in options.items() if name in DECIDING}


def recalled(kernel: str, call: Any, options: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """The result of a call, and its weights made again."""
    result = run(kernel, *call, **options)
    query, key, _ = call
    return result, regard.weights(
        query, key, result.lse, kernel=kernel, **deciding(options), **more
    )


def assert_recalled(
    kernel: str, again: Any, result: Any, answer: Any, call: Any, options: Any
) -> None:
    """Within the bound of float64 of the exact weights, and that of the call of its own."""
    given = deciding(options)
    query, key, value = call
    dtype = result_dtype(query, key)
    wide = dtype != np.float64
    for name in ("mask", "causal", "window", "offset"):
        given.pop(name, None)
    near = error_bounds(query, key, value, answer, dtype=dtype, exact=wide, **given).weights
    assert_within(again, answer.weights, near, "weights made again")
    # What the call itself gives is flushed where the fused kernel computes in float32.
    own = WHOLE_ROWS._replace(flushed=FUSED.flushed) if kernel == "fused" else WHOLE_ROWS
    dtype = result.weights.dtype
    far = error_bounds(query, key, value, answer, dtype=dtype, arithmetic=own, **given).weights
    assert_within(again, result.weights.astype(np.float64), near + far, "weights of the call")


@every_kernel
@settings(max_examples=EXAMPLES)
@given(calls(), st.data())
def test_weights_are_those_of_the_call_whatever_the_options(kernel, call, data):
    arrays, options, rule = call
    result, again = recalled(kernel, arrays, options)
    answer = answer_of(*arrays, **for_the_oracle(options, rule))
    assert_recalled(kernel, again, result, answer, arrays, options)
    hidden = ~answer.visible
    assert_same_bytes(again[hidden], np.zeros(int(hidden.sum()), again.dtype), "hidden keys")
    query, key, _ = arrays
    if query.ndim == 1 or not query.shape[-2]:
        return
    row = st.integers(-query.shape[-2], query.shape[-2] - 1)
    chosen = np.array(data.draw(st.lists(row, max_size=6)), dtype=np.int64)
    some = regard.weights(query, key, result.lse, rows=chosen, kernel=kernel, **deciding(options))
    np.testing.assert_equal(some.shape, (*again.shape[:-2], len(chosen), again.shape[-1]))
    if kernel == "fused":  # whose rows do not depend on their neighbours
        assert_same_bytes(some, again[..., chosen, :], "some rows")
    everywhere = again.copy()
    everywhere[..., chosen, :] = some
    assert_recalled(kernel, everywhere, result, answer, arrays, options)


@pytest.mark.parametrize("name", EVERYTHING)
@every_kernel
def test_every_option_of_the_call_decides(kernel, name):
    _, again = recalled(kernel, (Q, K, V), EVERYTHING)
    without = {key: value for key, value in EVERYTHING.items() if key != name}
    if name == "offset":
        without["offset"] = 0
    lse = run(kernel, Q, K, V, **without).lse
    other = regard.weights(Q, K, lse, kernel=kernel, **without)
    assert float(abs(again - other).max()) > 1e-2


@every_kernel
def test_rows_are_an_int_a_slice_or_ints_in_any_order(kernel):
    result, whole = recalled(kernel, (Q, K, V), EVERYTHING)

    def chosen(rows):
        return regard.weights(Q, K, result.lse, rows=rows, kernel=kernel, **EVERYTHING)

    within = 4 * precision_of(np.float32).unit
    np.testing.assert_equal(chosen(3).shape, (B, H, S))
    for rows in (3, -1, np.int32(2), slice(None), slice(2, 5), slice(None, None, -2)):
        np.testing.assert_allclose(chosen(rows), whole[..., rows, :], rtol=within)
    for rows in ([4, 5, 0, 0, -1], (6,), np.array([1, 2], np.uint8), [], np.array([], np.int64)):
        index = np.array(rows, dtype=np.int64)
        np.testing.assert_allclose(chosen(rows), whole[..., index, :], rtol=within)


@every_float
@every_kernel
def test_the_dtype_is_that_of_query_and_key(kernel, dtype):
    query, key, value = inputs((H, L, D), (G, S, D), (G, S, 3), dtype=dtype)
    result, again = recalled(kernel, (query, key, value), {})
    np.testing.assert_equal((again.dtype, again.shape), (dtype, (H, L, S)))
    np.testing.assert_equal(result.lse.dtype, accumulator(dtype))
    mixed = regard.weights(query, key.astype(np.float64), result.lse, kernel=kernel)
    np.testing.assert_equal(mixed.dtype, np.dtype(np.float64))


@every_kernel
def test_shapes_without_heads_or_rows_come_back_as_the_call_gave_them(kernel):
    for q, k, v in ((Q[0, 0], K[0, 0], V[0, 0]), (Q[0, 0, 0], K[0, 0], V[0, 0])):
        result, again = recalled(kernel, (q, k, v), {"scale": 0.3})
        np.testing.assert_equal(again.shape, result.weights.shape)
    lse = run(kernel, Q[0, 0], K[0, 0], V[0, 0]).lse
    np.testing.assert_equal(
        regard.weights(Q[0, 0], K[0, 0], lse, rows=2, kernel=kernel).shape, (S,)
    )


@every_kernel
def test_leading_axes_broadcast_those_of_the_values_too(kernel):
    values = numbers((3, 1, G, S, 2), seed=9)
    result, again = recalled(kernel, (Q, K, values), {})
    np.testing.assert_equal(again.shape, (3, B, H, L, S))
    np.testing.assert_allclose(again, result.weights, rtol=1e-5)


@every_kernel
def test_masked_means_absent_and_empty_rows_are_zero(kernel):
    mask = MASK.copy()
    mask[:, :, 2] = False
    mask[..., 4] = False
    result, again = recalled(kernel, (Q, K, V), {"mask": mask})
    np.testing.assert_array_equal(again[:, :, 2], 0)
    for poison in (np.nan, np.inf, -np.inf, 1e38, 1e-42):
        key, query = K.copy(), Q.copy()
        key[:, :, 4] = poison
        query[:, :, 2] = poison
        for lse in (result.lse, result.lse.copy()):
            other = regard.weights(query, key, lse, mask=mask, kernel=kernel)
            assert_same_bytes(other, again, str(poison))


@every_kernel
def test_hidden_keys_do_not_widen_what_rounding_explains(kernel):
    # 1/1000 of the sum stands in further keys: more than rounding, less than with a key of 1e30.
    lse = run(kernel, Q, K, V).lse + np.float32(1e-3)
    small = regard.weights(Q, K, lse, kernel=kernel)
    garbage = np.concatenate([K, np.full((B, G, 1, D), 1e30, np.float32)], axis=-2)
    other = regard.weights(Q, garbage, lse, mask=Lengths(S), kernel=kernel)
    np.testing.assert_allclose(other[..., :S], small, rtol=1e-6)
    np.testing.assert_allclose(small.sum(axis=-1), np.exp(-1e-3), rtol=1e-5)


@every_kernel
def test_nan_reaches_the_visible_cells_of_its_row_and_nothing_else(kernel):
    mask = np.broadcast_to(np.arange(S) != 5, (L, S))
    _, whole = recalled(kernel, (Q, K, V), {"mask": mask})
    query = Q.copy()
    query[1, 2, 3, 0] = np.nan
    _, again = recalled(kernel, (query, K, V), {"mask": mask})
    where = np.zeros((B, H, L, S), np.bool_)
    where[1, 2, 3] = mask[3]
    np.testing.assert_array_equal(np.isnan(again), where)
    assert_same_bytes(again[~where], whole[~where])
    lse = run(kernel, Q, K, V, mask=mask).lse.copy()
    lse[1, 2, 3] = np.nan
    np.testing.assert_array_equal(
        np.isnan(regard.weights(Q, K, lse, mask=mask, kernel=kernel)), where
    )


@every_kernel
def test_a_sink_is_missing_from_the_sum_of_a_row(kernel):
    sink = numbers((H,), seed=8)
    result, again = recalled(kernel, (Q, K, V), {"sink": sink})
    share = np.exp(sink[:, None].astype(np.float64) - result.lse)
    np.testing.assert_allclose(again.sum(axis=-1) + share, 1, rtol=1e-5)


@every_kernel
def test_scores_that_no_rounded_lse_could_tell_apart_still_give_weights(kernel):
    # Here the lse is near 4e10 and its last digit is worth 4096, or is no float32 at all.
    for size in (1e5, 1e19, 1e30):
        query, key = Q * np.float32(size), K * np.float32(size)
        result, again = recalled(kernel, (query, key, V), {})
        np.testing.assert_allclose(again, result.weights, atol=1e-6)
        np.testing.assert_allclose(again.sum(axis=-1), 1, rtol=1e-5)


@every_kernel
def test_the_lse_of_more_keys_gives_the_share_of_those_at_hand(kernel):
    whole = run(kernel, Q, K, V)
    parts = [run(kernel, Q, K[:, :, a:b], V[:, :, a:b]) for a, b in ((0, 4), (4, S))]
    merged = regard.merge([part.output for part in parts], [part.lse for part in parts])
    shares = [
        regard.weights(Q, K[:, :, a:b], merged.lse, kernel=kernel) for a, b in ((0, 4), (4, S))
    ]
    size = abs(Q).max() * abs(K).max() * D  # no logit is larger
    unit = precision_of(np.float32).unit
    bound = unit * ((D + 16) * size + S + 16 + 4 * abs(merged.lse).max())
    np.testing.assert_allclose(
        np.concatenate(shares, axis=-1), whole.weights, rtol=2 * float(bound), atol=0
    )


def test_an_lse_of_fewer_keys_or_of_other_options_is_refused_with_both_numbers():
    lse = regard.attention(Q, K, V, return_lse=True, window=(1, 0), offset=0).lse
    with pytest.raises(OptionError, match=r"lse is .* in row 2, but .* give .* already; pass"):
        regard.weights(Q, K, lse, rows=[2, 3])
    empty = np.full((B, H, L), -np.inf, np.float32)
    with pytest.raises(OptionError, match="row 0"):
        regard.weights(Q, K, empty)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lse": np.zeros((B, H, L + 1))}, ShapeError, r"lse has shape \(2, 4, 8\).*\(2, 4, 7\)"),
        ({"lse": np.zeros((H, L))}, ShapeError, r"\(4, 7\).*\(2, 4, 7\)"),
        ({"lse": np.zeros((3, H, L))}, ShapeError, r"\(3, 4, 7\).*\(2, 4, 7\)"),
        ({"lse": np.zeros((B, H, L), np.float16)}, DtypeError, "lse has dtype float16"),
        ({"lse": "no"}, DtypeError, "lse"),
        ({"rows": L}, OptionError, "row 7 but there are 7 queries"),
        ({"rows": [0, -8]}, OptionError, "row -8 but there are 7 queries"),
        ({"rows": 1.0}, DtypeError, "not float64"),
        ({"rows": np.ones(L, np.bool_)}, DtypeError, "np.flatnonzero"),
        ({"rows": True}, DtypeError, "bool"),
        ({"rows": slice(0, "a")}, DtypeError, "a slice takes ints"),
        ({"rows": [[1]]}, ShapeError, "rows has 2 axes"),
        ({"rows": "first"}, DtypeError, "rows must be"),
        ({"key": K[..., :4]}, ShapeError, "query is 5 wide but key is 4 wide"),
        ({"key": K[0, 0, 0]}, ShapeError, "key has 1 axes"),
        ({"causal": True}, OptionError, "pass offset=0"),
        ({"kernel": "none"}, OptionError, "kernel must be one of"),
        ({"threads": 0}, OptionError, "threads is 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_with_both_numbers(changes, error, words):
    arguments = {"query": Q, "key": K, "lse": np.zeros((B, H, L))} | changes
    with pytest.raises(error, match=words):
        regard.weights(**arguments)


def test_one_query_has_no_rows_to_choose_from():
    lse = regard.attention(Q[0, 0, 0], K[0, 0], V[0, 0], return_lse=True).lse
    np.testing.assert_equal(regard.weights(Q[0, 0, 0], K[0, 0], lse).shape, (S,))
    with pytest.raises(OptionError, match="leave it out"):
        regard.weights(Q[0, 0, 0], K[0, 0], lse, rows=0)


LONG = 16384
WIDTH = 64


@pytest.mark.parametrize("rows", [[5, 9000, 16383], slice(8000, 8003)])
def test_some_rows_of_a_long_call_take_no_matrix(rows):
    query, key, value = inputs(*3 * [(LONG, WIDTH)], dtype=np.float32)
    lse = regard.attention(query[:1], key, value, return_lse=True).lse
    lse = np.full(LONG, lse[0] + 20, np.float32)  # of more keys, so that nothing is skipped
    mask = Causal() & Window(4000, 0)
    tracemalloc.start()
    try:
        some = regard.weights(query, key, lse, rows=rows, mask=mask)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_equal(some.shape, (3, LONG))
    keys_in_float64 = LONG * WIDTH * 8
    assert peak < 5 * keys_in_float64 < LONG * LONG * 4 / 20

"""Scale, softcap, sink; every option counts, alone and beside every other; bad ones are refused."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    BFLOAT16,
    answer_of,
    assert_other_numbers,
    assert_same_bytes,
    assert_same_result,
    check,
    check_result,
    every_float,
    every_kernel,
    every_target,
    inputs,
    numbers,
    on_path,
    path_of,
    recording,
    run,
)
from oracle import attend
from regard.masks import Boolean, Causal, Lengths, Segments, Window

INF, NAN = np.inf, np.nan

# scale --------------------------------------------------------------------------------------------


@every_kernel
@every_float
@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.0, -0.3, 2.5, 1e-30, 3, np.float32(0.7)])
def test_scale_may_be_any_finite_number(kernel, dtype, scale):
    check(kernel, *inputs((2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype), scale=scale)


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_scale_and_softcap_may_be_numbers_of_every_float_dtype(name):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6))
    expected = regard.attention(q, k, v, **{name: 0.5})
    for dtype in (np.float16, BFLOAT16, np.float32, np.float64, np.longdouble):
        for number in (np.full((), 0.5, dtype), np.full((), 0.5, dtype)[()]):
            assert_same_bytes(regard.attention(q, k, v, **{name: number}), expected)


@every_kernel
@every_float
@pytest.mark.parametrize("width", [1, 3, 4, 7, 64])
def test_scale_that_is_not_given_is_one_over_the_root_of_the_width(kernel, dtype, width):
    q, k, v = inputs((2, 3, width), (2, 5, width), (2, 5, 6), dtype=dtype)
    given = run(kernel, q, k, v, scale=1 / np.sqrt(width))
    assert_same_result(run(kernel, q, k, v), given)
    answer = attend(q, k, v, scale=1 / np.sqrt(width))
    check_result(kernel, given, answer, q, k, v)


@every_kernel
def test_scale_of_zero_gives_equal_weights(kernel):
    q, k, v = inputs((3, 4), (8, 4), (8, 2))
    np.testing.assert_array_equal(run(kernel, q, k, v, scale=0).weights, 0.125)


@every_kernel
def test_scale_that_is_negative_prefers_the_most_unlike(kernel):
    q, k, v = inputs((3, 4), (8, 4), (8, 2))
    up, down = (run(kernel, q, k, v, scale=s).weights for s in (2.0, -2.0))
    np.testing.assert_array_equal(up.argmax(axis=-1), down.argmin(axis=-1))


@every_kernel
def test_scale_applies_to_the_products_and_to_nothing_else(kernel):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6))
    options = {"bias": numbers((3, 5), seed=3) * 4, "sink": np.array([2.0, -1.0])}
    check(kernel, q, k, v, scale=0.01, **options)
    check(kernel, q, k, v, scale=0.01, softcap=3.0, **options)


@every_kernel
@pytest.mark.parametrize("factor", [2.0, 0.25, -1.0])
def test_scale_is_not_split_between_queries_and_keys(kernel, factor):
    q, k, v = inputs((3, 4), (8, 4), (8, 2))
    one = run(kernel, q, k, v, scale=0.3 * factor)
    assert_same_result(one, run(kernel, q * np.float32(factor), k, v, scale=0.3))


@every_kernel
@pytest.mark.parametrize("scale", [NAN, INF, -INF, np.float32(NAN)])
def test_scale_that_is_not_finite_is_refused_by_name(kernel, scale):
    with pytest.raises(ValueError, match="scale"):
        regard.attention(*inputs((3, 4), (8, 4), (8, 2)), scale=scale, kernel=kernel)


@every_kernel
@pytest.mark.parametrize("scale", ["1", 1j, [1.0, 2.0], np.ones(3), {}, 10**400])
def test_scale_that_is_not_a_number_is_refused_by_name(kernel, scale):
    with pytest.raises((TypeError, ValueError), match="scale"):
        regard.attention(*inputs((3, 4), (8, 4), (8, 2)), scale=scale, kernel=kernel)


# softcap ------------------------------------------------------------------------------------------


@every_kernel
@every_float
@pytest.mark.parametrize("softcap", [0.1, 1.0, 50, 1e6, np.float32(3)])
def test_softcap_is_c_times_tanh_of_x_over_c(kernel, dtype, softcap):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype, size=4.0)
    check(kernel, q, k, v, softcap=softcap)


@every_kernel
def test_softcap_bounds_the_scores_and_leaves_bias_and_sink_alone(kernel):
    q, k = np.full((1, 1), 1e10, np.float32), np.array([[1.0], [-1.0]], np.float32)
    v = np.array([[1.0], [0.0]], np.float32)
    result, _ = check(kernel, q, k, v, softcap=1.0, scale=1.0)
    np.testing.assert_allclose(result.output, [[1 / (1 + np.exp(-2.0))]], rtol=1e-6)
    result, _ = check(kernel, q, k, v, softcap=1.0, scale=1.0, bias=[[0.0, 30.0]])
    np.testing.assert_array_less(result.output, 1e-9)
    result, _ = check(kernel, q, k, v, softcap=1.0, scale=1.0, sink=40.0)
    np.testing.assert_array_less(result.output, 1e-9)


@every_kernel
def test_softcap_never_lets_a_masked_key_back_in(kernel):
    q, k, v = inputs((4, 3), (4, 3), (4, 2))
    result, answer = check(kernel, q, k, v, softcap=0.5, causal=True)
    np.testing.assert_array_equal(result.weights > 0, answer.visible)
    result, answer = check(kernel, q, k, v, softcap=0.5, bias=np.where(answer.visible, 0.0, -INF))
    np.testing.assert_array_equal(result.weights > 0, answer.visible)


@every_kernel
@pytest.mark.parametrize("softcap", [0, 0.0, -1.0, NAN, INF, -INF])
def test_softcap_that_caps_nothing_is_refused_by_name(kernel, softcap):
    with pytest.raises(ValueError, match="softcap"):
        regard.attention(*inputs((3, 4), (8, 4), (8, 2)), softcap=softcap, kernel=kernel)


@every_kernel
@pytest.mark.parametrize("softcap", ["1", 1j, [1.0, 2.0], np.ones(3)])
def test_softcap_that_is_not_a_number_is_refused_by_name(kernel, softcap):
    with pytest.raises((TypeError, ValueError), match="softcap"):
        regard.attention(*inputs((3, 4), (8, 4), (8, 2)), softcap=softcap, kernel=kernel)


# sink ---------------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_sink_is_a_key_without_a_value(kernel, dtype):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype)
    result, answer = check(kernel, q, k, v, sink=0.7)
    assert (result.weights.astype(float).sum(axis=-1) < 0.99).all()
    longer = [np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v)]
    bias = np.zeros((5 + 1,))
    bias[5] = 0.7
    as_key = answer_of(q, *longer, bias=bias)
    np.testing.assert_allclose(as_key.output, answer.output, atol=1e-14)
    np.testing.assert_allclose(as_key.lse, answer.lse, atol=1e-14)


@every_kernel
@pytest.mark.parametrize("sink", [0, -3.5, 50.0, -200.0, 1e4, np.float64(0.1), np.array(2)])
def test_sink_may_be_one_number_for_all_heads(kernel, sink):
    check(kernel, *inputs((2, 3, 4), (2, 5, 4), (2, 5, 6)), sink=sink)
    check(kernel, *inputs((3, 4), (5, 4), (5, 6)), sink=sink)
    check(kernel, *inputs((4,), (5, 4), (5, 6)), sink=sink)


@every_kernel
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3)])
def test_sink_belongs_to_the_query_head(kernel, leading):
    q, k, v = inputs((*leading, 4, 3, 5), (*leading, 2, 6, 5), (*leading, 2, 6, 2))
    sink = np.array([-2.0, 0.0, 1.0, 5.0])
    result, _ = check(kernel, q, k, v, sink=sink)
    for h in range(4):
        one, _ = check(kernel, q, k, v, sink=float(sink[h]))
        assert_same_bytes(one.output[..., h, :, :], result.output[..., h, :, :])
    check(kernel, q, k, v, sink=[1, 2, 3, 4])


@every_kernel
def test_sink_of_zero_is_softmax_with_one_more_in_the_sum(kernel):
    q, k, v = np.zeros((2, 3)), np.zeros((4, 3)), np.ones((4, 2))
    result = run(kernel, q, k, v, sink=0)
    np.testing.assert_allclose(result.output, 4 / 5, rtol=1e-15)


@every_kernel
def test_sink_joins_the_maximum(kernel):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6))
    result, _ = check(kernel, q, k, v, sink=300.0)  # exp(300) is beyond float32
    np.testing.assert_allclose(result.lse, 300.0)
    result, _ = check(kernel, q * 100, k, v, sink=0.0)
    result, _ = check(kernel, q, k, v, sink=0.0, bias=-300.0)


@every_kernel
def test_sink_is_counted_once_however_long_the_row(kernel):
    for size in (1, 63, 64, 65, 511, 1025):
        q, k, v = np.zeros((1, 1)), np.zeros((size, 1)), np.ones((size, 1))
        result = run(kernel, q, k, v, sink=np.log(float(size)))
        np.testing.assert_allclose(result.output, 0.5, rtol=1e-13)


@every_kernel
def test_sink_is_never_masked_scaled_or_capped(kernel):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6))
    mask = np.array([[True], [False], [True]])
    result, _ = check(kernel, q, k, v, mask=mask, sink=6.0, softcap=0.1, scale=0.01)
    np.testing.assert_array_equal(result.lse[:, 1], np.float32(6.0))
    np.testing.assert_array_equal(result.output[:, 1], 0.0)


@every_kernel
@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1), (2, 3), (0,)])
def test_sink_of_another_shape_is_refused_by_name(kernel, shape):
    with pytest.raises(regard.ShapeError, match="sink"):
        regard.attention(
            *inputs((2, 3, 4), (2, 5, 4), (2, 5, 6)), sink=np.zeros(shape), kernel=kernel
        )


@every_kernel
def test_sink_for_heads_is_refused_where_there_are_none(kernel):
    with pytest.raises(regard.ShapeError, match="sink"):
        regard.attention(*inputs((3, 4), (5, 4), (5, 6)), sink=np.zeros(3), kernel=kernel)


@every_kernel
@pytest.mark.parametrize("sink", ["0", 1j, np.array(["x", "y"]), object(), np.ma.ones(2)])
def test_sink_that_is_not_a_number_is_refused_by_name(kernel, sink):
    with pytest.raises((TypeError, ValueError), match="sink"):
        regard.attention(*inputs((2, 3, 4), (2, 5, 4), (2, 5, 6)), sink=sink, kernel=kernel)


@every_kernel
@pytest.mark.parametrize("sink", [NAN, INF, -INF, np.array([0.0, NAN])])
def test_sink_that_is_not_finite_is_refused_by_name(kernel, sink):
    with pytest.raises(ValueError, match="sink"):
        regard.attention(*inputs((2, 3, 4), (2, 5, 4), (2, 5, 6)), sink=sink, kernel=kernel)


# every argument counts ----------------------------------------------------------------------------

LENGTH, SIZE = 5, 7
MASK = np.random.default_rng(4).random((2, LENGTH, SIZE)) < 0.6
IDS = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1, 1])  # begin where their rows do


def options_that_count() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> the options of the call, and those of the oracle."""
    plain: dict[str, dict[str, Any]] = {
        "mask": {"mask": MASK},
        "bias": {"bias": numbers((2, LENGTH, SIZE), np.float32, 21, 2.0)},
        "causal": {"causal": True},
        "window": {"window": (2, 3)},
        "scale": {"scale": -1.3},
        "softcap": {"softcap": 0.6},
        "sink": {"sink": np.array([1.5, -0.5])},
    }
    cases = {name: (options, options) for name, options in plain.items()}
    cases["mask object"] = {"mask": Boolean(MASK)}, {"mask": MASK}
    cases["lengths"] = {"mask": Lengths(3)}, {"lengths": 3}
    cases["segments"] = {"mask": Segments(*IDS)}, {"segments": IDS}
    cases["or"] = (
        {"mask": Lengths(1) | Window(0, 2)},
        {"mask": lambda b, h, i, j, p: j < 1 or p <= j <= p + 2},
    )
    return cases


CASES = options_that_count()


def base() -> tuple[np.ndarray, ...]:
    return inputs((2, LENGTH, 4), (2, SIZE, 4), (2, SIZE, 3), size=1.5)


@every_kernel
@pytest.mark.parametrize("name", CASES)
def test_every_option_changes_the_result(kernel, name):
    q, k, v = base()
    options, rules = CASES[name]
    plain = run(kernel, q, k, v, offset=1)
    result = run(kernel, q, k, v, offset=1, **options)
    check_result(kernel, result, answer_of(q, k, v, offset=1, **rules), q, k, v, **options)
    assert_other_numbers(result.output, plain.output, name)
    assert_same_bytes(
        regard.attention(q, k, v, offset=1, kernel=kernel, **options),
        regard.attention(q, k, v, offset=1, kernel=kernel, **options),
    )


@every_kernel
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pair
        for pair in itertools.combinations(CASES, 2)
        if not set(CASES[pair[0]][0]) & set(CASES[pair[1]][0])
    ],
)
def test_every_option_counts_beside_every_other(kernel, one, other):
    q, k, v = base()
    options = CASES[one][0] | CASES[other][0]
    rules = {"offset": 1} | CASES[one][1] | CASES[other][1]
    both = run(kernel, q, k, v, offset=1, **options)
    check_result(kernel, both, answer_of(q, k, v, **rules), q, k, v, **options)
    for name in (one, other):
        alone = run(kernel, q, k, v, offset=1, **CASES[name][0])
        assert_other_numbers(both.output, alone.output, f"what is not {name} of {one} and {other}")


def beyond(x, sign):
    """Columns before those of `x`, whose products leave the range of its type, but cancel."""
    size = 1e200 if x.dtype == np.float64 else 1e25
    more = np.full((*x.shape[:-1], 2), size, x.dtype)
    more[..., 1] *= sign
    return np.concatenate([more, x], axis=-1)


either_float = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.mark.needs("fused")
@every_target
@either_float
@pytest.mark.parametrize("name", CASES)
def test_every_option_counts_in_rows_that_leave_the_range_of_their_type(target, dtype, name):
    # The fused kernel computes such rows again, in code of their own.
    q, k, v = (x.astype(dtype) for x in base())
    options, rules = ({"scale": 0.5} | x for x in CASES[name])
    with on_path(f"fused:{target}") as kernel:
        far = beyond(q, 1), beyond(k, -1)
        plain = run(kernel, *far, v, offset=1, scale=0.5)
        result = run(kernel, *far, v, offset=1, **options)
    check_result(kernel, result, answer_of(q, k, v, offset=1, **rules), q, k, v, **options)
    assert_other_numbers(result.output, plain.output, name)


@pytest.mark.needs("fused")
@every_target
@either_float
def test_grouped_heads_count_in_rows_that_leave_the_range_of_their_type(target, dtype):
    q, k, v = inputs((4, LENGTH, 4), (2, SIZE, 4), (2, SIZE, 3), dtype=dtype)
    with on_path(f"fused:{target}") as kernel:
        result = run(kernel, beyond(q, 1), beyond(k, -1), v, scale=0.5)
    check_result(kernel, result, answer_of(q, k, v, scale=0.5), q, k, v, scale=0.5)


ALL_AT_ONCE = {
    **{name: CASES[name][0][name] for name in ("causal", "scale", "softcap", "sink", "bias")},
    "mask": np.arange(SIZE) != 1,
    "window": (2, None),
}


@every_kernel
@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_every_option_counts_among_all_the_others(kernel, name):
    q, k, v = base()
    fewer = {other: x for other, x in ALL_AT_ONCE.items() if other != name}
    one, _ = check(kernel, q, k, v, offset=3, **ALL_AT_ONCE)
    other, _ = check(kernel, q, k, v, offset=3, **fewer)
    assert_other_numbers(one.output, other.output, name)


@every_kernel
@pytest.mark.parametrize("offsets", list(itertools.combinations((0, 1, -2, "end", (0, 1, 2)), 2)))
@pytest.mark.parametrize("by", [{"causal": True}, {"window": (1, 1)}, {"mask": Causal()}], ids=str)
def test_every_offset_is_another_one(kernel, offsets, by):
    q, k, v = inputs((3, 2, LENGTH, 4), (3, 2, SIZE, 4), (3, 2, SIZE, 3))
    one, other = (
        regard.attention(
            q, k, v, offset=np.array(x) if isinstance(x, tuple) else x, kernel=kernel, **by
        )
        for x in offsets
    )
    assert_other_numbers(one, other, str(offsets))


@every_kernel
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_every_number_of_the_inputs_counts(kernel, which):
    arrays = dict(zip(("query", "key", "value"), base(), strict=True))
    plain = run(kernel, **arrays)
    for index in np.ndindex(*arrays[which].shape):
        changed = {name: x.copy() for name, x in arrays.items()}
        changed[which][index] += 1.0
        result = run(kernel, **changed)
        head = index[0]
        assert (result.output[head] != plain.output[head]).any()
        assert_same_bytes(result.output[1 - head], plain.output[1 - head])


@every_kernel
def test_every_cell_of_a_mask_and_a_bias_counts(kernel):
    q, k, v = base()
    mask, bias = np.ones((2, LENGTH, SIZE), bool), np.zeros((2, LENGTH, SIZE), np.float32)
    plain = run(kernel, q, k, v, mask=mask, bias=bias)
    for index in np.ndindex(*mask.shape):
        fewer, more = mask.copy(), bias.copy()
        fewer[index], more[index] = False, 1.0
        for result in (run(kernel, q, k, v, mask=fewer), run(kernel, q, k, v, bias=more)):
            changed = (result.output != plain.output).any(axis=-1)
            assert changed[index[:2]]
            assert changed.sum() == 1


@every_kernel
@pytest.mark.parametrize("threads", [None, 1, 2, 7])
def test_threads_change_how_and_not_what(kernel, threads):
    q, k, v = base()
    plain = run(kernel, q, k, v, causal=True, offset=0)
    assert_same_result(run(kernel, q, k, v, causal=True, offset=0, threads=threads), plain)


@every_kernel
def test_kernel_that_is_named_is_the_one_that_runs(kernel):
    with recording() as ran:
        regard.attention(*base(), kernel=kernel, return_weights=True, causal=True, offset=0)
    assert ran == [path_of(kernel)]


def test_kernel_that_is_not_named_is_one_of_those_there_are():
    q, k, v = base()
    result = regard.attention(q, k, v, return_weights=True, return_lse=True)
    check_result("any", result, attend(q, k, v), q, k, v)


def test_every_parameter_of_attention_is_known_to_these_tests():
    names = list(inspect.signature(regard.attention).parameters)
    assert names == [
        *("query", "key", "value", "mask", "bias", "causal", "window", "offset", "scale"),
        *("softcap", "sink", "precision", "return_weights", "return_lse", "out", "kernel"),
        *("threads", "score", "normalize", "positions"),
    ]
    parameters = inspect.signature(regard.attention).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == names[3:]


# options that make no sense -----------------------------------------------------------------------

BAD = [
    ("window", -1),
    ("window", 3),
    ("window", (3,)),
    ("window", (1, 2, 3)),
    ("window", ()),
    ("window", (-1, 0)),
    ("window", (0, -1)),
    ("window", (1.0, 0)),
    ("window", (NAN, 0)),
    ("window", (0, INF)),
    ("window", (True, 0)),
    ("window", ("1", 0)),
    ("window", "causal"),
    ("window", {1: 2, 3: 4}),
    ("window", np.array([[1, 0]])),
    ("offset", 1.0),
    ("offset", 0.5),
    ("offset", NAN),
    ("offset", True),
    ("offset", np.True_),
    ("offset", "start"),
    ("offset", "END"),
    ("offset", ""),
    ("offset", "0"),
    ("offset", np.zeros(2)),
    ("offset", np.zeros(2, bool)),
    ("offset", [0.0, 1.0]),
    ("offset", np.zeros(3, int)),
    ("offset", np.zeros((2, 2), int)),
    ("offset", np.zeros((2, 1, 1), int)),
    ("offset", {}),
    ("offset", [[0], [0, 1]]),
    ("offset", 2**70),
    ("offset", np.uint64(2**64 - 1)),
    ("causal", 1),
    ("causal", 0),
    ("causal", None),
    ("causal", "yes"),
    ("causal", "lower_right"),
    ("causal", np.ones(2, bool)),
    ("causal", np.array([True])),
    ("threads", 0),
    ("threads", -1),
    ("threads", 1.0),
    ("threads", True),
    ("threads", "2"),
    ("kernel", "cuda"),
    ("kernel", ""),
    ("kernel", 1),
    ("kernel", "Reference"),
    ("precision", "double"),
    ("precision", "float64"),
    ("precision", ""),
    ("precision", None),
    ("precision", 64),
    ("return_weights", 1),
    ("return_weights", None),
    ("return_weights", "yes"),
    ("return_lse", 0),
    ("return_lse", np.array([True])),
    ("bias", "x"),
    ("bias", 1j),
    ("bias", np.ones((5, 7), object)),
    ("bias", np.ma.ones((5, 7))),
    ("bias", np.ones((5, 7), bool)),
    ("bias", np.ones((5, 7), np.longdouble)),
    ("bias", np.ones((5, 7), "datetime64[s]")),
]


@every_kernel
@pytest.mark.parametrize(("name", "bad"), BAD, ids=lambda x: repr(x).replace("\n", ""))
def test_options_that_make_no_sense_are_refused_by_name(kernel, name, bad):
    q, k, v = inputs((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    out = np.full((2, 2, 5, 3), 7.0, np.float32)
    # The window needs an offset, and the offset needs something that uses it.
    options = {"causal": True, "offset": 0, "kernel": kernel, "out": out} | {name: bad}
    with pytest.raises((regard.OptionError, regard.DtypeError, regard.ShapeError)) as caught:
        regard.attention(q, k, v, **options)
    assert name in str(caught.value).split(" (query")[0]
    np.testing.assert_array_equal(out, 7.0)


@pytest.mark.parametrize("name", ["kernel", "precision"])
def test_options_of_a_few_names_are_refused_with_the_names_there_are(name):
    with pytest.raises(regard.OptionError, match=name) as caught:
        regard.attention(*base(), **{name: "abacus"})
    assert "abacus" in str(caught.value)
    assert ("reference" if name == "kernel" else "exact") in str(caught.value)


def test_options_are_quoted_inertly():
    for name in ("kernel", "precision", "offset"):
        with pytest.raises(ValueError, match=name) as caught:
            regard.attention(*base(), causal=True, **({"offset": 0} | {name: "\x1b[31m\u202e\nx"}))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("causal", [np.True_, np.False_])
def test_options_may_be_the_bools_of_numpy(causal):
    q, k, v = base()
    assert_same_result(
        run("reference", q, k, v, causal=causal, offset=0),
        run("reference", q, k, v, causal=bool(causal), offset=0),
    )


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match="dropout"):
        regard.attention(*base(), dropout=0.1)
    with pytest.raises(TypeError):
        regard.attention(*base(), None)

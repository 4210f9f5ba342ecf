"""Gradients by every path, each number within a derived bound of an independent chain rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from backward_oracle import differentiate
from bounds import precision_of
from calls import BFLOAT16, TARGETS, on_path
from gradient_check import ALL, compare
from gradient_check import check_gradients as check
from regard import gradients, masks
from regard.compute.gradients import INPUTS

PATHS = ["reference", *(f"fused:{target}" for target in TARGETS)]
TYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)]
if BFLOAT16 is not None:
    TYPES.append(BFLOAT16)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def call(
    lead: tuple[int, ...] = (),
    heads: int = 2,
    groups: int = 1,
    queries: int = 7,
    keys: int = 9,
    width: int = 5,
    wide: int = 6,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, ...]:
    shapes = ((heads, queries, width), (groups, keys, width), (groups, keys, wide))
    shapes += ((heads, queries, wide),)
    return tuple(normal(*lead, *one, seed=n, dtype=dtype) for n, one in enumerate(shapes))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "offset": "end"},
    "window": {"window": (3, 1), "offset": 1},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": normal(2, 7, 9, seed=8)},
    "bias of keys": {"bias": normal(9, seed=8)},
    "bias of rows and heads": {"bias": normal(2, 7, 1, seed=8)},
    "sink": {"sink": np.array([0.3, -1.0], np.float32)},
    "mask": {"mask": normal(7, 9, seed=5) > -0.4},
    "all": {
        "causal": True,
        "offset": 3,
        "scale": 0.4,
        "softcap": 2.0,
        "bias": normal(7, 9, seed=8),
        "sink": np.float32(0.5),
        "mask": normal(2, 7, 9, seed=5) > -0.8,
    },
}


@pytest.mark.sweep
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_has_its_gradient(path, dtype, options):
    wrt = ALL + tuple(name for name in ("bias", "sink") if name in options)
    check(call(dtype=dtype), path, wrt, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"queries": 1, "keys": 1, "width": 1, "wide": 1},
        {"queries": 100, "keys": 65, "width": 16, "wide": 16},
        {"queries": 13, "keys": 200, "width": 17, "wide": 33},
        {"queries": 193, "keys": 130, "width": 64, "wide": 48, "heads": 4, "groups": 2},
        {"lead": (2, 3), "queries": 20, "keys": 33, "heads": 3, "groups": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "offset": "end"}], ids=str)
def test_sizes_that_cross_blocks_of_rows_and_keys(path, sizes, options):
    check(call(**sizes), path, **options)


@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_of_lse_is_taken_too(path):
    arrays = call()
    check(arrays, path, grad_lse=normal(2, 7, seed=6), sink=0.2)


@pytest.mark.parametrize("path", PATHS)
def test_segments_and_lengths_hide_as_a_mask_does(path):
    q, k, v, grad = call(queries=9)
    ids = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3])
    check((q, k, v, grad), path, mask=masks.Segments(ids, ids), oracle={
        "mask": ids[:, None] == ids[None],
    })  # fmt: skip
    check((q, k, v, grad), path, mask=masks.Lengths(5), oracle={"mask": np.arange(9) < 5})


@pytest.mark.parametrize("path", PATHS)
def test_what_is_hidden_has_no_gradient_and_changes_none(path):
    q, k, v, grad = call(queries=7, keys=70)
    mask = np.ones((7, 70), bool)
    mask[:, 60:] = False
    mask[3] = False  # a row that sees no key
    clean = [x.copy() for x in (q, k, v, grad)]
    k[:, 60:], v[:, 61:], q[:, 3], grad[:, 3] = np.nan, -np.inf, np.inf, np.nan
    with on_path(path) as kernel:
        garbage = gradients(q, k, v, grad, mask=mask, wrt=ALL, kernel=kernel)
        result = gradients(*clean, mask=mask, wrt=ALL, kernel=kernel)
    for one, other in zip(garbage[:3], result[:3], strict=True):
        assert one.tobytes() == other.tobytes()
    assert garbage.scale == result.scale
    np.testing.assert_array_equal(result.key[:, 60:], 0)
    np.testing.assert_array_equal(result.value[:, 60:], 0)
    np.testing.assert_array_equal(result.query[:, 3], 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("hide", ["mask", "bias", "window"])
def test_a_row_that_sees_no_key_leaves_the_sink_its_gradient(path, hide):
    q, k, v, grad = call()
    options = {
        "mask": {"mask": np.arange(7)[:, None] > [2] * 9},
        "bias": {"bias": np.where(np.arange(7)[:, None] > 2, 0, -np.inf).repeat(9, 1)},
        "window": {"window": (0, 0), "offset": -3},
    }[hide]
    with on_path(path) as kernel:
        named = {"sink": np.array([0.3, -1]), "wrt": "sink", "kernel": kernel, **options}
        clean = gradients(q, k, v, grad, **named)
        grad[:, 2], grad[0, 1, 3] = np.nan, np.inf
        result = gradients(q, k, v, grad, **named)
        assert result.sink.tobytes() == clean.sink.tobytes()
        grad[0, 4, 1] = np.nan  # a row that sees keys
        assert np.isnan(gradients(q, k, v, grad, **named).sink).tolist() == [True, False]


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_reaches_what_depends_on_it_and_no_more(path):
    q, k, v, grad = call(heads=1, queries=20, keys=70)
    mask = np.ones((20, 70), bool)
    mask[4, 30:] = False
    grad[0, 4, 2] = np.nan
    with on_path(path) as kernel:
        result = gradients(q, k, v, grad, mask=mask, kernel=kernel)
    broken = np.zeros((1, 70, 6), bool)
    broken[0, :30, 2] = True
    np.testing.assert_array_equal(np.isnan(result.value), broken)
    np.testing.assert_array_equal(np.isnan(result.query).any(-1)[0], np.arange(20) == 4)
    np.testing.assert_array_equal(np.isnan(result.key).any(-1)[0], np.arange(70) < 30)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sink": 0.2}], ids=["softcap", "sink"])
def test_an_infinity_that_leaves_weights_finite_breaks_its_own_column(path, where, options):
    q, k, v, grad = call(heads=1, queries=6, keys=70)
    mask = np.ones((6, 70), bool)
    mask[4, 60] = False
    if where == "key":  # which all rows but one see
        q[..., 2], k[0, 60, 2] = 1, -np.inf
    else:  # every score of this row is −∞
        q[0, 5, 2], k[..., 2] = np.inf, -1
    far = [np.nan_to_num(x, posinf=1e3, neginf=-1e3) for x in (q, k)]  # the same weights
    near, error = differentiate(*far, v, grad, precision_of(np.float32).unit, mask=mask, **options)
    rows = {
        "query": np.isinf(k).any() & (np.arange(6) != 4),
        "key": np.isinf(q).any() & [True] * 70,
    }
    with on_path(path) as kernel:
        result = gradients(q, k, v, grad, mask=mask, kernel=kernel, wrt=ALL, **options)
    assert not np.isfinite(result.scale)
    for name in ("query", "key", "value"):
        got, exact = getattr(result, name), getattr(near, name)
        if name in rows:
            broken = rows[name][:, None] & (np.arange(5) == 2)
            np.testing.assert_array_equal(~np.isfinite(got[0]), broken)
            got = np.where(np.isfinite(got), got, exact.astype(got.dtype))
        compare(name, got, exact, getattr(error, name), {})


@pytest.mark.parametrize("path", PATHS)
def test_inputs_that_were_broadcast_sum_their_gradients(path):
    q, k, v, grad = call((3,), groups=2, dtype=np.float64)
    with on_path(path) as kernel:
        many = gradients(np.stack([q[0]] * 3), k, np.stack([v[1]] * 3), grad, kernel=kernel)
        one = gradients(q[0], k, v[1:2], grad, kernel=kernel)
    assert one.query.shape == q[0].shape
    assert one.value.shape == v[1:2].shape
    np.testing.assert_allclose(one.query, many.query.sum(0), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(one.value, many.value.sum(0, keepdims=True), rtol=1e-13, atol=1e-13)
    assert one.key.tobytes() == many.key.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_sums_over_broadcast_axes_round_half_types_once(path):
    q, k, v, grad = call((50,), dtype=np.float16)
    shared = k[:1], v[:1]
    each = [np.repeat(x, 50, axis=0) for x in shared]
    exact = gradients(*(x.astype(float) for x in (q, *each, grad)), kernel="reference")
    with on_path(path) as kernel:
        one = gradients(q, *shared, grad, kernel=kernel)
    for name in ("key", "value"):
        whole = getattr(exact, name).sum(axis=0, keepdims=True)
        off = np.abs(getattr(one, name) - whole)
        np.testing.assert_array_less(off, 2.0**-11 * np.abs(whole) + 1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(2, 7), (7,)])
def test_axes_that_the_caller_does_not_have_are_not_in_the_gradient(path, shape):
    rows = shape[:-1]
    q, grad = normal(*rows, 7), normal(*rows, 4, seed=1)
    k, v = normal(5, 7, seed=2), normal(5, 4, seed=3)
    with on_path(path) as kernel:
        result = gradients(q, k, v, grad, kernel=kernel)
    padded = q.reshape(1, -1, 7), k[None], v[None], grad.reshape(1, -1, 4)
    exact, error = differentiate(*padded, precision_of(np.float32).unit)
    for name, array in (("query", q), ("key", k), ("value", v)):
        assert getattr(result, name).shape == array.shape
        reshaped = (getattr(one, name).reshape(array.shape) for one in (exact, error))
        compare(name, getattr(result, name), *reshaped, {})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16)], ids=str)
def test_exact_precision_sums_in_float64_and_rounds_once(path, dtype):
    options = {"causal": True, "offset": 3, "sink": 0.3, "softcap": 2.0, "precision": "exact"}
    check(call(dtype=dtype), path, **options, bias=normal(7, 9, seed=8))


@pytest.mark.parametrize("path", PATHS)
def test_inputs_are_never_written_and_gradients_own_their_memory(path):
    q, k, v, grad = call(dtype=np.float64)
    output, lse = regard.attention(q, k, v, bias=normal(9), sink=0.3, return_lse=True)
    given = {"bias": normal(9), "sink": np.array([0.3] * 2), "mask": normal(7, 9, seed=5) > -9}
    given |= {"output": output, "lse": lse, "grad_lse": normal(2, 7)}
    arrays = (q, k, v, grad, *given.values())
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    wrt = ("query", "key", "value", "bias", "sink")
    with on_path(path) as kernel:
        result = gradients(q, k, v, grad, **given, wrt=wrt, kernel=kernel)
    assert [array.tobytes() for array in arrays] == before
    for made in result[:5]:
        assert made.flags.writeable
        assert not any(np.may_share_memory(made, array) for array in arrays)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", ["queries", "keys", "width", "wide", "heads"])
def test_sizes_of_zero_give_gradients_of_zero(path, size):
    arrays = call(**{"groups": 2, **{size: 0}, **({"groups": 0} if size == "heads" else {})})
    with on_path(path) as kernel:
        result = gradients(*arrays, wrt=ALL, kernel=kernel)
    for name, array in zip(("query", "key", "value"), arrays, strict=False):
        assert getattr(result, name).shape == array.shape
        if size != "width" or name != "value":
            np.testing.assert_array_equal(getattr(result, name), 0)


@pytest.mark.parametrize("path", PATHS)
def test_only_what_is_wanted_is_there(path):
    arrays = call()
    with on_path(path) as kernel:
        whole = gradients(*arrays, wrt=ALL, kernel=kernel)
        for name in ALL:
            one = gradients(*arrays, wrt=name, kernel=kernel)
            for other in INPUTS:
                value = getattr(one, other)
                if other == name:
                    np.testing.assert_array_equal(value, getattr(whole, name))
                else:
                    assert value is None


@pytest.mark.parametrize("path", PATHS)
def test_finite_gradients_stay_finite_where_products_overflow(path):
    q, k, v, grad = call()
    check((q * np.float32(1e25), k * np.float32(1e-25), v, grad), path)
    check((q, k, v * np.float32(1e30), grad * np.float32(1e-12)), path, ("query", "key", "value"))


@pytest.mark.parametrize("path", PATHS)
def test_gradients_of_sink_and_scale_beyond_float32_are_finite(path):
    q, k, v, grad = call()
    large = (q, k * np.float32(1e10), v * np.float32(1e15), grad * np.float32(1e15))
    result = check(large, path, ("scale",), scale=1e-10)
    np.testing.assert_array_less(1e39, abs(result.scale))
    large = (q, k, v * np.float32(1e20), grad * np.float32(1e20))
    result = check(large, path, ("sink",), sink=np.array([0.2, 0.4]))
    np.testing.assert_array_less(4e38, np.abs(result.sink))  # float32 ends at 3.4e38


@pytest.mark.parametrize("path", PATHS)
def test_gradients_are_right_where_exp_knows_nothing_of_logits_and_products_overflow(path):
    one = np.eye(2, dtype=np.float32)
    v, grad = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 8]], np.float32)
    far = one * np.float32(1e20), one * np.float32(1e15), v  # each row sees its own key alone
    output, lse = regard.attention(*far, return_lse=True)
    with on_path(path) as kernel:
        for given in ({}, {"output": output, "lse": lse}):
            result = gradients(*far, grad, **given, kernel=kernel)
            np.testing.assert_array_equal(result.query, 0)
            np.testing.assert_array_equal(result.key, 0)
            np.testing.assert_array_equal(result.value, grad)
        huge = np.full((1, 2), 1e200)  # of one key, weight 1: dP overflows, dX is exactly 0
        result = gradients(np.ones((1, 2)), np.ones((1, 2)), huge, huge, kernel=kernel)
        np.testing.assert_array_equal(result.query, 0)
        np.testing.assert_array_equal(result.value, huge)


@pytest.mark.parametrize("path", PATHS)
def test_an_lse_that_float32_rounds_too_far_is_computed_again(path):
    q, k, v, grad = call()
    arrays = q * np.float32(300), k, v, grad
    output, lse = regard.attention(*arrays[:3], return_lse=True)
    np.testing.assert_array_less(200, np.abs(lse).max())
    check(arrays, path, ("query", "key", "value"), output=output, lse=lse)


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_batch_and_no_heads_have_gradients(path):
    one, none = np.ones((1, 2, 3, 4)), np.ones((0, 2, 3, 4))
    with on_path(path) as kernel:
        result = gradients(one, none, none, none, kernel=kernel)
        np.testing.assert_array_equal(result.query, np.zeros_like(one))
        no_heads = np.ones((0, 3, 4))
        output, lse = regard.attention(no_heads, no_heads, no_heads, return_lse=True)
        given = {"output": output, "lse": lse}
        assert gradients(*[no_heads] * 4, **given, kernel=kernel).key.shape == (0, 3, 4)


# --- the forward call's own results ---------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_given_results_change_nothing_but_the_time(path, dtype):
    arrays = call(dtype=dtype)
    output, lse = regard.attention(*arrays[:3], sink=0.3, return_lse=True)
    check(arrays, path, output=output, lse=lse, sink=0.3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrt", [*ALL, "sink", ("value", "sink")])
def test_given_results_belong_whichever_gradients_are_asked_for(wrt, path):
    arrays = call()
    output, lse = regard.attention(*arrays[:3], sink=0.3, return_lse=True)
    with on_path(path) as kernel:
        gradients(*arrays, sink=0.3, output=output, lse=lse, wrt=wrt, kernel=kernel)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["output", "lse"])
@pytest.mark.parametrize(
    ("dtype", "factor", "size", "options"),
    [
        (np.float32, 1.001, 1, {}),
        (np.float64, 1 + 1e-10, 1, {}),
        *((dtype, 1.5, 1, {}) for dtype in TYPES[2:]),
        (np.float32, 1.001, 1, {"precision": "exact"}),
        (np.float32, 1.5, 300, {}),  # lse beyond 100 is computed again
    ],
)
def test_results_of_another_call_are_noticed(path, name, dtype, factor, size, options):
    q, k, v, grad = call(queries=30, dtype=dtype)
    q = (q * size).astype(dtype)
    output, lse = regard.attention(q, k, v, return_lse=True, **options)
    given = {"output": output, "lse": lse}
    wide = regard.attention(*(x.astype(float) for x in (q, k, v)), return_lse=True)
    with on_path(path) as kernel:
        gradients(q, k, v, grad, kernel=kernel, **given, **options)
        gradients(q, k, v, grad, kernel=kernel, **{**given, "lse": wide.lse}, **options)
        given[name] = given[name].copy()
        given[name][1, 17] *= given[name].dtype.type(factor)
        with pytest.raises(regard.OptionError, match=rf"^{name} does not belong.*row 17 of head 1"):
            gradients(q, k, v, grad, kernel=kernel, **given, **options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"wrt": "keys"}, regard.OptionError, "wrt has 'keys'; it may have"),
        ({"wrt": "mask"}, regard.OptionError, "'mask', which has no gradient: a key is visible or"),
        ({"wrt": "labels"}, regard.OptionError, "'labels', which has no gradient: names are no"),
        ({"wrt": "weights"}, regard.OptionError, "no input; explain.* has the gradients on the"),
        (
            {"wrt": ("query", "bias")},
            regard.OptionError,
            'wrt has "bias", but the call has no bias',
        ),
        ({"wrt": 3}, regard.DtypeError, "wrt must be names of inputs, not 3"),
        ({"output": normal(2, 7, 6)}, regard.OptionError, "output is given but lse is not"),
        ({"lse": normal(2, 7)}, regard.OptionError, "lse is given but output is not"),
        ({"grad_lse": normal(2, 6)}, regard.ShapeError, "grad_lse has shape .* but attention"),
        ({"grad_output": normal(2, 7, 5)}, regard.ShapeError, "grad_output has shape .* but"),
        (
            {"grad_output": normal(2, 7, 6, dtype=np.float64)},
            regard.DtypeError,
            "grad_output has dtype float64 but must have float32",
        ),
        (
            {"query": np.ones((2, 7, 5), int)},
            regard.DtypeError,
            "query has dtype int64, which has no gradients; pass floats",
        ),
        ({"query": None}, regard.DtypeError, "query must be an array of numbers, not None"),
        ({"return_weights": True}, TypeError, "return_weights"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_name_the_argument_and_how_to_mend_it(change, error, words):
    named = dict(zip(("query", "key", "value", "grad_output"), call(), strict=True))
    with pytest.raises(error, match=words):
        gradients(**{**named, **change})

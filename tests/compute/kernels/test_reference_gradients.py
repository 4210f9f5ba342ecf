"""The reference's gradients: blocks, memory, and numbers at the ends of the range of float64."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import regard
from calls import numbers
from regard.compute import evaluation
from regard.compute.gradients import make_gradient_request
from regard.compute.kernels import reference
from regard.masks import Causal, Mask

ALL = ("query", "key", "value", "scale")
SHAPES = ((2, 3, 2), (1, 4, 2), (1, 4, 3), (2, 3, 3))  # queries, keys, values, what arrives


def call(dtype: Any = np.float64) -> list[np.ndarray]:
    return [numbers(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]


def gradients(*arrays: np.ndarray, wrt: Any = ALL, **options: Any) -> Any:
    return regard.gradients(*arrays, wrt=wrt, kernel="reference", **options)


@pytest.mark.parametrize("cells", [1, 5, 9])
def test_the_size_of_a_block_changes_gradients_by_rounding_only(monkeypatch, cells):
    options = {"bias": numbers((3, 1)), "sink": numbers((2,)), "causal": True, "offset": 2}
    wrt = (*ALL, "bias", "sink")
    whole = gradients(*call(), wrt=wrt, **options)
    monkeypatch.setattr(evaluation, "BLOCK_CELLS", cells)
    blocked = gradients(*call(), wrt=wrt, **options)
    for name in wrt:
        np.testing.assert_allclose(
            getattr(blocked, name), getattr(whole, name), 1e-13, 1e-14, err_msg=name
        )


def test_the_gradients_of_a_long_call_never_need_a_whole_matrix():
    rows = 3000
    arrays = [numbers((1, rows, 4), np.float32, seed) for seed in range(4)]
    bias = numbers((rows,), np.float32)
    tracemalloc.start()
    result = gradients(*arrays, bias=bias, wrt=(*ALL, "bias"), causal=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.bias.shape == (rows,)
    assert peak < rows * rows * 4 / 3


@dataclass(frozen=True, eq=False)
class EveryOther(Mask):
    """A rule that only the reference can ask."""

    name = "every other key"

    def block(self, at: Any) -> np.ndarray:
        return (np.arange(at.shape[-1]) + at.positions) % 2 == 0


def test_a_rule_of_ones_own_has_gradients():
    own = regard.gradients(*call(), mask=EveryOther() & Causal(), offset=1)
    sees = (np.add.outer(np.arange(3) + 1, np.arange(4)) % 2 == 0) & np.tri(3, 4, 1, dtype=bool)
    for one, other in zip(own[:3], gradients(*call(), mask=sees)[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_exact_gradients_of_float32_are_those_of_float64_rounded_once():
    single = call(np.float32)
    exact = gradients(*single, precision="exact")
    double = gradients(*(array.astype(np.float64) for array in single))
    for one, other in zip(exact[:3], double[:3], strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))
    assert exact.scale == double.scale


# --- the ends of the range ------------------------------------------------------------------------


def test_products_that_overflow_on_the_way_leave_finite_gradients_finite():
    q, k, v, grad = call()
    scale = 2.0**-300
    wrt = ("query", "key", "value")
    expected = gradients(q, k, v, grad, wrt=wrt, scale=scale)
    result = gradients(q, k, v * 2.0**900, grad * 2.0**200, wrt=wrt, scale=scale)
    for name in ("query", "key"):
        one, other = (getattr(x, name) for x in (result, expected))
        np.testing.assert_allclose(one, other * 2.0**550 * 2.0**550, 1e-11, err_msg=name)
    np.testing.assert_allclose(result.value, expected.value * 2.0**200, 1e-13)


def test_a_nan_in_one_row_and_hidden_garbage_leave_the_other_rows_alone():
    q, k, v, grad = call()
    sees = np.array([True, True, True, False])
    clean = gradients(q, k, v, grad, mask=sees)
    k[:, 3], v[:, 3] = 1e308, -1e308
    grad[0, 0, 1] = np.nan
    result = gradients(q, k, v, grad, mask=sees)
    np.testing.assert_array_equal(result.query[:, 1:], clean.query[:, 1:])
    assert np.isnan(result.query[0, 0]).all()
    np.testing.assert_array_equal(result.value[..., [0, 2]], clean.value[..., [0, 2]])
    np.testing.assert_array_equal(np.isnan(result.value[0, :, 1]), sees)


def test_logits_beyond_the_range_have_the_gradients_of_a_choice():
    q, k, v, grad = call()
    result = gradients(q * 1e200, k * 1e200, v, grad)
    largest = (q @ k[0].T).argmax(axis=-1)
    chosen = np.zeros((2, 3, 4))
    np.put_along_axis(chosen, largest[..., None], 1.0, axis=-1)
    np.testing.assert_allclose(result.value[0], np.einsum("hij,hie->je", chosen, grad), 1e-13)
    assert all(np.isfinite(np.asarray(x)).all() for x in result if x is not None)


def test_a_score_that_overflows_on_its_way_to_a_number_is_that_number():
    # The first half of the products sums to −∞ in float32, in any order; the whole to 0.
    q = np.full((1, 1, 64), 1e19, np.float32)
    k = np.zeros((1, 2, 64), np.float32)
    k[0, 0] = np.repeat([-3e19, 3e19], 32)
    v, grad = numbers((1, 2, 2), np.float32, 0), numbers((1, 1, 2), np.float32, 1)
    bias, wrt = np.zeros(2, np.float32), ("value", "bias")
    result = gradients(q, k, v, grad, bias=bias, wrt=wrt)
    expected = gradients(np.zeros_like(q), k, v, grad, bias=bias, wrt=wrt)
    np.testing.assert_allclose(result.value, expected.value, 1e-6)
    np.testing.assert_allclose(result.bias, expected.bias, 1e-6)


def test_scores_whose_products_overflow_have_a_gradient_of_the_scale():
    # 2^1024·(1 − (1 − m·2^−52)) = m·2^972, which the scale takes to m.
    m = np.array([0.0, 2.0, 1.0, -1.0])
    far = np.stack([np.ones(4), m * 2.0**-52 - 1.0], axis=-1)[None] * 2.0**512
    near = np.stack([m, np.zeros(4)], axis=-1)[None]
    v, grad = (numbers(shape, np.float64, 1) for shape in ((1, 4, 2), (1, 1, 2)))
    wrt = ("value", "scale")
    result = gradients(np.full((1, 1, 2), 2.0**512), far, v, grad, scale=2.0**-972, wrt=wrt)
    expected = gradients(np.ones((1, 1, 2)), near, v, grad, scale=1.0, wrt=wrt)
    np.testing.assert_allclose(result.value, expected.value, 1e-14)
    np.testing.assert_allclose(result.scale, expected.scale * 2.0**972, 1e-14)


@pytest.mark.parametrize(("far", "share"), [(1e200, 0.0), (-1e200, 1.0)])
def test_the_sink_has_its_share_beside_logits_of_any_size(far, share):
    q, k, v, grad = (np.abs(array) + 0.1 for array in call())
    result = gradients(
        *(q * 1e200, k * far, v, grad), sink=0.5, grad_lse=np.ones((2, 3)), wrt=("sink", "value")
    )
    np.testing.assert_allclose(result.sink, share * 6)
    np.testing.assert_array_equal((result.value == 0).all(), share == 1.0)


# --- second gradients -----------------------------------------------------------------------------


def test_second_gradients_are_the_slopes_of_gradients():
    q, k, v, grad = (np.stack([array, array[::-1]]) for array in call())
    arrays = {"query": q, "key": k, "value": v, "grad_output": grad}
    options = {
        **{"bias": numbers((3, 1), np.float64), "sink": numbers((2,), np.float64), "scale": 0.7},
        **{"grad_lse": numbers((2, 2, 3), np.float64), "softcap": 2.0, "causal": True},
        **{"offset": 0, "wrt": (*ALL, "bias", "sink")},
    }
    whole = make_gradient_request(*arrays.values(), **options)
    rng = np.random.default_rng(3)
    made = gradients(*arrays.values(), **options)._asdict()
    weights = {name: one for name, one in made.items() if one is not None}
    arrives = {name: rng.normal(size=np.shape(one)) for name, one in weights.items()}
    wrt = (*arrays, "bias", "sink", "scale", "grad_lse")
    found = reference.second_gradients(whole, arrives, wrt)

    def loss(name, moved):
        moved = float(moved) if name == "scale" else moved
        named = {**arrays, **options, name: moved}
        own = [named.pop(one) for one in arrays]
        made = gradients(*own, **named)._asdict()
        return sum((made[one] * arrives[one]).sum() for one in arrives)

    for name in wrt:
        array = np.asarray({**arrays, **options}[name])
        way = rng.normal(size=array.shape)
        slope = (loss(name, array + 1e-5 * way) - loss(name, array - 1e-5 * way)) / 2e-5
        rise = (found[name] * way).sum()
        np.testing.assert_allclose(rise, slope, 1e-7, 1e-8, err_msg=name)


def test_what_a_gradient_does_not_depend_on_has_no_second_gradient():
    names = ("query", "key", "value", "grad_output", "grad_lse")
    whole = make_gradient_request(*call(), grad_lse=np.ones((2, 3)), wrt="value")
    arrives = {"value": np.ones_like(whole.request.value)}
    found = reference.second_gradients(whole, arrives, names)
    np.testing.assert_equal(set(found), {"query", "key", "grad_output"})
    assert all(array.any() for array in found.values())

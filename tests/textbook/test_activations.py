"""The functions of a feed-forward layer keep to the bounds that they state."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from regard.textbook.activations import (
    GELU_ROUNDOFFS,
    gelu,
    gelu_slope,
    gelu_tanh,
    gelu_tanh_slope,
    silu,
    silu_slope,
)


def exact_gelu(x):
    with mpmath.workdps(40):
        return [mpmath.mpf(float(one)) * mpmath.ncdf(float(one)) for one in x]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_keeps_to_its_bound_down_to_the_last_normal_number(dtype):
    tiny = np.finfo(dtype).tiny
    x = np.concatenate([np.linspace(-38, 12, 4001), -np.logspace(-30, 0, 301), [0.0]]).astype(dtype)
    roundoff = np.finfo(dtype).eps / 2
    for got, exact in zip(gelu(x), exact_gelu(x), strict=True):
        if abs(exact) >= tiny:
            assert abs(mpmath.mpf(float(got)) - exact) <= GELU_ROUNDOFFS * roundoff * abs(exact)
        else:
            assert abs(got) <= tiny


def test_gelu_of_what_is_no_number_or_has_no_end():
    x = np.array([np.nan, np.inf, -np.inf, -0.0, -1e300, 1e300])
    np.testing.assert_array_equal(gelu(x), [np.nan, np.inf, 0, 0, 0, 1e300])


def test_gelu_does_not_depend_on_where_a_number_stands():
    x = np.random.default_rng(0).normal(size=(3, 40_000)).astype(np.float32)
    whole = gelu(x)
    np.testing.assert_array_equal(whole[1, 39_990:], gelu(x[1, 39_990:]))
    np.testing.assert_array_equal(gelu(x.T), whole.T)
    assert whole.dtype == np.float32


def test_gelu_tanh_is_the_formula():
    x = np.linspace(-6, 6, 101)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    # A handful of roundings of numbers that are no larger than |x|.
    np.testing.assert_allclose(
        gelu_tanh(x), x * (1 + np.tanh(inner)) / 2, rtol=0, atol=6 * 2.0**-50
    )


def test_silu_is_the_formula():
    x = np.linspace(-40, 40, 801)
    exact = x / (1 + np.exp(-x))
    np.testing.assert_allclose(silu(x), exact, rtol=8 * 2.0**-52)
    assert silu(np.float32([-200.0, 200.0])).tolist() == [0.0, 200.0]


@pytest.mark.parametrize(
    ("function", "slope"),
    [(gelu, gelu_slope), (gelu_tanh, gelu_tanh_slope), (silu, silu_slope)],
    ids=lambda one: one.__name__,
)
def test_a_slope_is_that_of_its_function(function, slope):
    x, step = np.linspace(-9, 9, 1001), 2.0**-17
    rise = (function(x + step) - function(x - step)) / (2 * step)
    # The third derivative is below 2; a difference of two roundings is divided by the step.
    np.testing.assert_allclose(slope(x), rise, rtol=0, atol=step**2 + 20 * 2.0**-52 / step)

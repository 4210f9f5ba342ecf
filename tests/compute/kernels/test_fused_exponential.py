"""2^x as every CPU target of the fused kernel computes it, for the x ≤ 0 that softmax needs."""

from __future__ import annotations

import os
import platform

import mpmath
import numpy as np
import pytest

import regard
from calls import TARGETS, every_target, on_path
from exponential import MOST_ULPS, SMALLEST, exponential, ulps_off

pytestmark = pytest.mark.needs("fused")

EVERY = 257  # a prime: all low bits take part


def from_bits(first: float, last: float, every: int) -> np.ndarray:
    """Every n-th float32 between two negative numbers."""
    low, high = (int(np.float32(x).view(np.uint32)) for x in (first, last))
    return np.arange(low, high, every, dtype=np.uint32).view(np.float32)


def around(x: np.ndarray, steps: int) -> np.ndarray:
    """The numbers next to each of these, on both sides, no larger than 0."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    near = (bits[:, np.newaxis] + np.arange(-steps, steps + 1)).ravel()
    near = near[(near >= 1 << 31) & (near <= int(np.float32(-np.inf).view(np.uint32)))]
    return near.astype(np.uint32).view(np.float32)


@every_target
def test_the_exponential_is_off_by_one_ulp_at_most(target):
    for start, stop in ((-0.0, -1.0), (-1.0, -32.0), (-32.0, -126.0), (-126.0, -152.0)):
        x = from_bits(start, stop, EVERY)
        worst = ulps_off(x, exponential(x, target)).max()
        np.testing.assert_array_less(worst, MOST_ULPS, f"between {start} and {stop}")


@every_target
def test_the_exponential_is_off_by_one_ulp_at_most_around_every_half_integer(target):
    x = around(-np.arange(0.5, 151.0, 0.5), 2000)
    np.testing.assert_array_less(ulps_off(x, exponential(x, target)).max(), MOST_ULPS)


@every_target
def test_the_exponential_of_an_integer_is_a_power_of_two(target):
    x = -np.arange(0.0, 160.0, dtype=np.float32)
    np.testing.assert_array_equal(exponential(x, target), np.exp2(x.astype(float)).astype("f4"))


@every_target
def test_the_exponential_of_zero_is_one_and_of_what_is_nearly_zero_nearly_one(target):
    x = np.array([0.0, -0.0, -1e-45, -1e-30, -(2.0**-26)], np.float32)
    np.testing.assert_array_equal(exponential(x, target), np.ones(5, np.float32))
    assert exponential(np.array([-(2.0**-22)], np.float32), target)[0] < 1.0


@every_target
def test_the_exponential_keeps_nan_and_takes_minus_infinity_to_zero(target):
    with np.errstate(all="raise"):
        x = np.array([np.nan, -np.nan, -np.inf, -1e30, -3e38, -152.0, -200.0], np.float32)
        result = exponential(x, target)
    np.testing.assert_array_equal(np.isnan(result), [True, True, False, False, False, False, False])
    np.testing.assert_array_equal(result[2:], np.zeros(5, np.float32))
    assert not np.signbit(result[2:]).any()


@every_target
def test_the_exponential_of_every_kind_of_nan_is_nan(target):
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], "u4")
    assert np.isnan(exponential(bits.view(np.float32), target)).all()


@every_target
def test_the_exponential_underflows_gradually(target):
    x = np.linspace(-149.0, -126.0, 100_001, dtype=np.float32)
    result = exponential(x, target)
    assert (result > 0).all()
    assert np.unique(result[result < np.finfo(np.float32).tiny]).size > 30_000
    np.testing.assert_array_less(abs(result - np.exp2(x.astype(float))), 1.001 * SMALLEST)


def rising(target: str) -> tuple[np.ndarray, np.ndarray]:
    seams = around(-np.arange(0.5, 151.0, 0.5), 999)
    x = np.unique(np.concatenate([from_bits(-0.0, -152.0, 997), seams, from_bits(-0.4, -0.6, 1)]))
    return x, exponential(x, target).astype(np.float64)


# x86-64 without further instructions has no fused multiply-add; every other target has.
UNFUSED = platform.machine() in ("x86_64", "AMD64") and not os.environ.get("REGARD_TEST_KERNEL")
STEPS_BACK = pytest.mark.xfail(
    strict=True, reason="where 2^x hardly moves, one fused rounding may step back by an ulp"
)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(one, marks=() if one == "baseline" and UNFUSED else STEPS_BACK)
        for one in TARGETS
    ],
)
def test_the_exponential_never_falls_where_x_rises(target):
    _, y = rising(target)
    np.testing.assert_array_equal(np.flatnonzero(np.diff(y) < 0), [])


@every_target
def test_the_exponential_never_falls_by_more_than_one_ulp_where_x_rises(target):
    x, y = rising(target)
    highest = np.maximum.accumulate(y)
    unit = np.maximum(np.exp2(np.frexp(highest)[1] - 24.0), SMALLEST)
    behind = (highest - y) / unit
    np.testing.assert_array_equal(np.flatnonzero(behind > 1), [], f"at {x[behind > 1][:3]!r}")


@every_target
def test_the_exponential_never_exceeds_one(target):
    x = np.concatenate([from_bits(-1e-12, -1.0, 97), around(np.array([-(2.0**-24)]), 3000)])
    assert exponential(x, target).max() == 1.0


def test_targets_with_fused_multiply_add_agree_on_every_bit():
    from regard.compute import native

    usable = {one for one, runs in native.targets().items() if runs}
    if not {"avx2", "avx512"} <= usable:
        pytest.skip("needs a CPU with AVX2 and AVX-512")
    x = from_bits(-0.0, -152.0, 1009)
    np.testing.assert_array_equal(exponential(x, "avx2"), exponential(x, "avx512"))


# float64 -----------------------------------------------------------------------------------------

MOST_ULPS_OF_FLOAT64 = 1.0
LOG2_E = 1.4426950408889634  # what the kernel multiplies with, in float64


def weight_of(t: np.ndarray, target: str) -> np.ndarray:
    """2^x for x = t·log2 e rounded, where it is less than half of the last place of 1.

    Two keys, with logits 0 and t: the output for the values 0 and 1 is p / (1 + p), which is p.
    """
    one = np.ones((len(t), 1, 1))
    key = np.stack([np.zeros_like(t), t], axis=-1)[..., np.newaxis]
    value = np.broadcast_to(np.array([[0.0], [1.0]]), key.shape)
    with on_path(f"fused:{target}") as kernel:
        return regard.attention(one, key, value, scale=1.0, kernel=kernel)[:, 0, 0]


@every_target
def test_the_exponential_in_float64_is_off_by_one_ulp_at_most(target):
    rng = np.random.default_rng(0)
    halves = -np.arange(54.5, 1075.0, 8.5) / LOG2_E
    seams = np.concatenate([halves, np.nextafter(halves, 0.0), np.nextafter(halves, -np.inf)])
    t = np.concatenate([-rng.uniform(37.5, 745.0, 4000), seams])
    with mpmath.workdps(40):
        worst = 0.0
        for x, p in zip(t * LOG2_E, weight_of(t, target), strict=True):
            exact = mpmath.power(2, mpmath.mpf(float(x)))
            unit = max(2.0 ** (int(mpmath.floor(x)) - 52), 5e-324)
            worst = max(worst, abs(float((mpmath.mpf(float(p)) - exact) / unit)))
    np.testing.assert_array_less(worst, MOST_ULPS_OF_FLOAT64)

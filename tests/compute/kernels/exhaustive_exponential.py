"""2^x for every float32 that softmax can ask for: zero, all negative numbers, and every NaN.

Not among the tests that always run: `nox -s exhaustive`, or pytest with this file's name. Numbers
above zero are left out, because nothing exceeds the maximum that was subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from calls import every_target
from exponential import MOST_ULPS, exponential, ulps_off

pytestmark = pytest.mark.needs("fused")

AT_ONCE = 1 << 22
MINUS_INFINITY = 0xFF800000
NOTHING_LEFT = int(np.float32(-151.0).view(np.uint32))  # 2^x is below half of what there is


def patterns(first: int, last: int) -> Iterator[np.ndarray]:
    """All float32 whose bits lie between these, in pieces."""
    for start in range(first, last, AT_ONCE):
        yield np.arange(start, min(start + AT_ONCE, last), dtype=np.uint32).view(np.float32)


@every_target
def test_every_exponential_is_off_by_one_ulp_at_most(target, capsys):
    worst, at, wrong, count = 0.0, np.float32(0), 0, 0
    for x in patterns(0x80000000, NOTHING_LEFT):
        y = exponential(x, target)
        ulps = ulps_off(x, y)
        count += x.size
        wrong += int((y != np.exp2(x.astype(np.float64)).astype(np.float32)).sum())
        if ulps.max() > worst:
            worst, at = float(ulps.max()), x[ulps.argmax()]
    with capsys.disabled():
        print(
            f"\n{target}: {count} numbers, at most {worst:.4f} ulp off (at {at!r}); "
            f"{100 * wrong / count:.3f} % not correctly rounded"
        )
    np.testing.assert_array_less(worst, MOST_ULPS)


@every_target
def test_every_exponential_of_what_is_too_small_is_zero(target):
    for x in patterns(NOTHING_LEFT, MINUS_INFINITY + 1):
        y = exponential(x, target)
        np.testing.assert_equal(y.view(np.uint32).any(), False)


@every_target
def test_every_exponential_of_a_nan_is_nan(target):
    for first, last in ((0x7F800001, 0x80000000), (MINUS_INFINITY + 1, 1 << 32)):
        for x in patterns(first, last):
            np.testing.assert_equal(np.isnan(exponential(x, target)).all(), True)

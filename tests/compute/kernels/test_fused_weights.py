"""Products of a few rows with stored weights: their numbers, their bytes, what is not answered."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import regard
from calls import BFLOAT16, every_target, numbers, on_path
from places import SUPPORT
from products import KINDS, bound, exact, kept
from regard import OptionError
from regard.compute import native
from regard.compute.stored import GROUP, Stored, product, rounded

pytestmark = [pytest.mark.needs("fused")]
every_kind = pytest.mark.parametrize("kind", KINDS)

# Rows, columns and rows of weights: odd ends, whole groups and less, more than one piece.
SIZES = [(1, 1, 1), (2, 7, 3), (3, 16, 17), (4, 31, 5), (1, 32, 33), (5, 63, 8), (8, 64, 40)]
SIZES += [(1, 576, 960), (7, 200, 129), (1, 1537, 300), (6, 96, 2)]


def answered(x: np.ndarray, *weights: Any) -> np.ndarray:
    """The product of native code, which must be what answers."""
    rows = tuple(one.rows if isinstance(one, Stored) else one for one in weights)
    made = np.full((len(x), sum(map(len, rows))), np.nan, np.float32)
    assert native.module.product(x, rows, made)
    return made


@every_target
@every_kind
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_number_is_within_the_bound_of_its_sum(target, kind, sizes):
    count, columns, rows = sizes
    x, weights = numbers((count, columns), seed=1), kept(numbers((rows, columns), seed=2), kind)
    with on_path(f"fused:{target}"):
        found = answered(x, weights)
    off, limit = np.abs(found - x.astype(np.float64) @ exact(weights).T), bound(x, weights, target)
    assert (off <= limit).all(), float((off / limit).max())


@every_target
@every_kind
def test_a_row_has_its_bytes_whatever_is_beside_it_and_for_any_threads(target, kind):
    x = numbers((9, 100), seed=3)
    parts = [kept(numbers((rows, 100), seed=rows), kind) for rows in (1500, 1, 77, 0, 3000)]
    with on_path(f"fused:{target}"):
        whole = answered(x, *parts)
        try:
            for threads in (1, 2, 3, 7):
                regard.set_threads(threads)
                assert answered(x, *parts).tobytes() == whole.tobytes()
        finally:
            regard.set_threads(None)
        for first in range(9):
            for last in range(first + 1, 10):
                some = answered(x[first:last], *parts)
                assert some.tobytes() == np.ascontiguousarray(whole[first:last]).tobytes()
        assert (
            answered(x, parts[0][700:709]).tobytes()
            == np.ascontiguousarray(whole[:, 700:709]).tobytes()
        )


@every_target
@every_kind
def test_what_is_no_number_reaches_its_own_row_alone(target, kind):
    x, weights = numbers((3, 40)), kept(numbers((5, 40), seed=1), kind)
    x[1, 39] = np.nan
    plain = np.delete(x, 1, axis=0)
    with on_path(f"fused:{target}"):
        found = answered(x, weights)
        assert np.isnan(found[1]).all()
        assert np.delete(found, 1, axis=0).tobytes() == answered(plain, weights).tobytes()
        x[1, 39] = np.inf
        assert np.isinf(answered(x, weights)[1][exact(weights)[:, 39] != 0]).all()


@every_target
def test_numbers_below_the_smallest_normal_one_are_kept(target):
    x, weights = np.full((1, 33), 2.0**-70, np.float32), np.full((1, 33), 2.0**-70, np.float32)
    with on_path(f"fused:{target}"):
        assert answered(x, weights)[0, 0] == 33 * 2.0**-140


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65])
@every_kind
def test_few_rows_and_many_have_the_same_numbers(kind, rows, monkeypatch):
    few = 8 if kind == "float32" else 64
    x = numbers((2, rows // 2, 70) if rows % 2 == 0 else (rows, 70))
    parts = [kept(numbers((count, 70), seed=count), kind) for count in (30, 5)]
    answers, module = [], native.module

    class Noted:
        @staticmethod
        def product(*arguments: Any) -> bool:
            answers.append(module.product(*arguments))
            return answers[-1]

    monkeypatch.setattr(native, "module", Noted)
    found = product([one.T for one in parts], np.dtype(np.float32))(x)
    assert answers == [True] * (rows <= few)
    flat = x.reshape(-1, 70)
    both = np.concatenate([exact(one) for one in parts])
    # Any order: 70 products, 70 additions.
    limit = 141 * 2.0**-24 * (np.abs(flat).astype(np.float64) @ np.abs(both).T)
    assert found.shape == (*x.shape[:-1], 35)
    assert (np.abs(found.reshape(-1, 35) - flat.astype(np.float64) @ both.T) <= limit).all()


def test_what_native_code_does_not_read_is_not_answered_and_nothing_is_written():
    x, w = numbers((2, 40)), numbers((3, 40))
    made = np.full((2, 3), 7, np.float32)
    wrong = [
        (x.astype(np.float64), (w,), made),
        (x[:, ::2], (w[:, ::2],), made),
        (x, (w.astype(np.float64),), made),
        (x, (w[:, :39],), made),
        (x, (w[:, ::-1],), made),
        (x, (w, w), made),
        (x, (), made),
        (x[:1], (w,), made),
        (x, (w,), made[:, ::-1]),
        (x, (np.zeros((3, 40), np.int8),), made),
        (x, (np.zeros((3, 40), np.int32),), made),
        (x, (np.zeros((3, 40), "S2"), np.zeros((3, 40), "S3")), made),
        (x, (w[0],), made),
        (x[:, :0], (w[:, :0],), made),
    ]
    for arguments in wrong:
        assert not native.module.product(*arguments)
        assert (made == 7).all()
    locked = made.copy()
    locked.flags.writeable = False
    assert not native.module.product(x, (w,), locked)
    for arguments in ((None, (w,), made), (x, (3,), made), (x, w, made), (x, (w,))):
        with pytest.raises(TypeError):
            native.module.product(*arguments)


@every_kind
def test_sizes_of_zero_are_sums_of_nothing(kind):
    for rows, columns, count in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        weights = kept(numbers((count, columns)), kind)
        found = product([weights.T], np.dtype(np.float32))(numbers((rows, columns)))
        assert found.shape == (rows, count)
        assert not found.any()


# --- rounding ------------------------------------------------------------------------------------


@pytest.mark.needs("ml_dtypes")
def test_bfloat16_is_rounded_to_nearest():
    assert BFLOAT16 is not None
    x = numbers((40, 33), size=1e3) * 2.0 ** np.arange(-60, 6, 2, dtype=np.float32)
    x[0, :3] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0  # two ties
    stored = rounded(x, "bfloat16")
    np.testing.assert_array_equal(stored.rows, x.astype(BFLOAT16).view(np.uint16))
    np.testing.assert_array_equal(stored.numbers(), x.astype(BFLOAT16).astype(np.float32))


@pytest.mark.parametrize("width", [1, 31, 32, 33, 576])
def test_int8_is_within_half_a_step_of_each_group(width):
    x = numbers((20, width)) * 2.0 ** np.random.default_rng(0).integers(-9, 9, (20, 1))
    x[3], x[4] = 0, 2.0**-30  # a scale of 0: below all that float16 has
    stored = rounded(x.astype(np.float32), "int8")
    np.testing.assert_array_equal(stored.numbers(), exact(stored))
    groups = np.pad(x, ((0, 0), (0, -width % GROUP))).reshape(20, -1, GROUP)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    # Half a step; a scale is off by 2⁻¹¹ of itself, or by 2⁻²⁵, which 127 steps show.
    limit = most / 254 * (1 + 2.0**-10) + 127 * np.maximum(most / 127 * 2.0**-11, 2.0**-25)
    off = np.abs(
        np.pad(exact(stored), ((0, 0), (0, -width % GROUP))).reshape(groups.shape) - groups
    )
    assert (off <= limit).all()
    assert not stored.numbers()[3].any()


def test_numbers_that_int8_groups_cannot_have_are_refused():
    with pytest.raises(OptionError, match="beyond the range of int8 groups"):
        rounded(np.full((1, 32), 9e6, np.float32), "int8")
    assert rounded(np.full((1, 32), 8e6, np.float32), "int8").is_finite()


@every_kind
def test_a_number_that_is_none_is_found(kind):
    weights = kept(numbers((4, 64)), kind)
    if kind == "float32":
        return
    assert weights.is_finite()
    rows = weights.rows.copy()
    for bits in (0x7C00, 0xFC01) if kind != "bfloat16" else (0x7F80, 0xFF81):  # infinite, NaN
        rows[2].view(np.uint16)[0] = bits
        assert not Stored(rows, 64).is_finite()
        rows[2] = weights.rows[2]


# --- memory --------------------------------------------------------------------------------------

GUARDED = """
import sys
import numpy as np
from guarded import Pages
from products import KINDS, kept
from regard.compute import native
native.use_target(sys.argv[1])
rng = np.random.default_rng(0)
places = [Pages(1 << 16) for _ in range(3)]
for columns in range(1, 131):
    for number, kind in enumerate(KINDS):
        end, count, rows = columns % 2 == 0, 1 + columns % 5, 1 + (columns + number) % 4
        x = rng.normal(size=(count, columns)).astype(np.float32)
        weights = kept(rng.normal(size=(rows, columns)).astype(np.float32), kind)
        own = getattr(weights, "rows", weights)
        free = np.empty((count, rows), np.float32)
        assert native.module.product(x, (own,), free)
        for end in (True, False):
            made = places[2].place(np.zeros_like(free), end, writable=True)
            given = places[0].place(x, end), (places[1].place(own, end),)
            assert native.module.product(*given, made)
            assert made.tobytes() == free.tobytes(), (columns, kind, end)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect as Linux has it")
@every_target
def test_no_byte_beyond_an_array_is_read_or_written(target):
    command = [sys.executable, "-c", GUARDED, target]
    ended = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr

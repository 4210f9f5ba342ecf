"""The backward pass of the fused kernel: bytes, threads, interrupts, memory."""

from __future__ import annotations

import numpy as np
import pytest

from calls import TARGETS, assert_same_bytes, on_path
from regard import gradients
from regard.compute.gradients import INPUTS

pytestmark = pytest.mark.needs("fused")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def call(heads: int = 4, groups: int = 2, queries: int = 210, keys: int = 330, width: int = 24):
    shapes = ((heads, queries, width), (groups, keys, width), (groups, keys, 20))
    return tuple(normal(*one, seed=n) for n, one in enumerate((*shapes, (heads, queries, 20))))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "offset": "end"},
        {"bias": normal(210, 330, seed=9), "wrt": ("query", "key", "value", "bias", "scale")},
        {"mask": normal(4, 210, 330, seed=9) > 0, "sink": 0.2, "softcap": 3.0},
        {"bias": normal(4, 1, 1, seed=9), "wrt": "bias"},
    ],
    ids=["plain", "causal", "shared bias", "mask", "bias of heads"],
)
def test_any_number_of_threads_gives_the_same_bytes(target, options):
    with on_path(f"fused:{target}") as kernel:
        alone = gradients(*call(), threads=1, kernel=kernel, **options)
        for threads in (2, 3, 8):
            others = gradients(*call(), threads=threads, kernel=kernel, **options)
            for name in INPUTS:
                one, other = getattr(alone, name), getattr(others, name)
                if one is not None:
                    assert_same_bytes(np.asarray(one), np.asarray(other), f"{name}, {threads}")


@pytest.mark.parametrize("target", TARGETS)
def test_blocks_of_keys_add_in_order_though_later_ones_are_ready_first(target):
    q, k, v, grad = call(heads=16, groups=1, queries=960, keys=400, width=128)
    mask = np.arange(400) < np.where(np.arange(960) < 959, 64, 400)[:, None]
    with on_path(f"fused:{target}") as kernel:
        # All rows see the first block of keys, only the last row of a head the others.
        alone = gradients(q, k, v, grad, mask=mask, wrt="query", threads=1, kernel=kernel)
        for threads in (2, 3, 8):
            other = gradients(q, k, v, grad, mask=mask, wrt="query", threads=threads, kernel=kernel)
            assert_same_bytes(alone.query, other.query, f"{threads} threads")


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_has_its_bytes_alone_and_anywhere_in_a_batch(target):
    q, k, v, grad = call()
    with on_path(f"fused:{target}") as kernel:
        whole = gradients(q, k, v, grad, causal=True, offset=100, kernel=kernel)
        one = gradients(q[2:], k[1:], v[1:], grad[2:], causal=True, offset=100, kernel=kernel)
        stacked = (np.stack([normal(*x.shape, seed=5), x]) for x in (q, k, v, grad))
        second = gradients(*stacked, causal=True, offset=100, kernel=kernel)
    for name, first in (("query", 2), ("key", 1), ("value", 1)):
        assert_same_bytes(getattr(one, name), getattr(whole, name)[first:], name)
        assert_same_bytes(getattr(second, name)[1], getattr(whole, name), name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_gradient_of_a_query_has_its_bytes_alone(target):
    q, k, v, grad = call()
    with on_path(f"fused:{target}") as kernel:
        whole = gradients(q, k, v, grad, causal=True, offset=100, kernel=kernel).query
        for i in (0, 95, 96, 209):
            row = slice(i, i + 1)
            alone = gradients(q[:, row], k, v, grad[:, row], causal=True, offset=100 + i)
            assert_same_bytes(alone.query, whole[:, row], f"row {i}")


@pytest.mark.parametrize("layout", ["rows before heads", "reversed", "every other", "swapped"])
def test_the_layout_of_the_inputs_changes_no_byte(layout):
    change = {
        "rows before heads": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
        "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "every other": lambda x: np.repeat(x, 2, axis=-2)[:, ::2],
        "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    }[layout]
    arrays = call()
    plain = gradients(*arrays)
    other = gradients(*map(change, arrays))
    for name in ("query", "key", "value"):
        assert getattr(other, name).dtype == change(arrays[0]).dtype
        assert_same_bytes(
            getattr(other, name).astype(np.float32), getattr(plain, name), f"{layout} {name}"
        )

"""The native kernel without Python around it, as `nox -s arm64` runs it on another CPU.

The program that makes that possible is compiled here for this CPU, and must give the bytes that the
module gives: so it cannot go stale, and what the emulated tests say is said of the same kernel.
Compiling it takes ten seconds, so all of it waits for `--full`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    assert_same_bytes,
    assert_same_result,
    every_float,
    inputs,
    numbers,
    on_path,
    run,
)
from kernel_process import LISTED, Module, compile_process
from layouts import layouts
from regard.compute import native
from regard.masks import Causal, Lengths, Segments, Window
from regard.rules.visibility import Placed

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("fused"),
    pytest.mark.skipif(
        COMPILER is None or not LISTED.exists(), reason="needs a compiler and the sources"
    ),
]


@pytest.fixture(scope="session", params=["-O0", "-O3"])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Module]:
    folder = tmp_path_factory.mktemp("native")
    process = Module([str(compile_process(str(COMPILER), folder, request.param))])
    yield process
    process.close()


@contextmanager
def answering(module: Any) -> Iterator[None]:
    before, native.module = native.module, module
    try:
        yield
    finally:
        native.module = before


def both(elsewhere: Module, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """What the module answers on its baseline target, and what the program answers."""
    with on_path("fused:baseline") as kernel:
        here = run(kernel, q, k, v, **options)
        with answering(elsewhere):
            there = run(kernel, q, k, v, **options)
    return here, there


def test_the_program_has_the_baseline_target_and_says_so(elsewhere):
    assert elsewhere.targets() == [("baseline", True)]


@every_float
@pytest.mark.parametrize("size", [1, 5, 257, 600])
def test_the_program_gives_the_bytes_of_the_module(elsewhere, dtype, size):
    q, k, v = inputs((2, 4, 14, 20), (2, 2, size, 20), (1, 2, size, 9), dtype=dtype)
    bias = numbers((4, 14, size), dtype, 3)
    bias[:, :, ::5] = -np.inf
    mask = np.random.default_rng(0).random((2, 1, 14, size)) < 0.7
    options: dict[str, Any]
    for options in (
        {},
        {"mask": mask, "bias": bias, "softcap": 4.0, "sink": 0.3, "scale": -0.4},
        {"causal": True, "window": (9, None), "offset": np.array([0, 300])},
        {
            "mask": ~(Segments(np.arange(14) % 3, np.arange(size) % 3) & Window(5, 3)),
            "offset": Placed(np.arange(14) + 2),
        },
        {"mask": Lengths(np.array([size // 2, 1])) | Causal() & mask, "offset": 1},
        {"threads": 3, "mask": Lengths(np.array([size, 0]))},
        {"precision": "exact"} if dtype != np.float64 else {"sink": np.arange(4.0)},
    ):
        assert_same_result(*both(elsewhere, q, k, v, **options), f"{sorted(options)}")


def test_the_program_gives_the_bytes_of_the_module_where_rows_are_computed_again(elsewhere):
    q, k, v = inputs((3, 30, 8), (1, 300, 8), (1, 300, 8))
    q[1] *= np.float32(1e30)
    k[:, 7] *= np.float32(1e20)
    assert_same_result(*both(elsewhere, q, k, v))


def test_the_program_gives_the_bytes_of_the_module_in_every_layout(elsewhere):
    for name, q in layouts(numbers((2, 5, 12))):
        k = dict(layouts(numbers((2, 9, 12), seed=1)))[name]
        v = dict(layouts(numbers((2, 9, 4), seed=2)))[name]
        assert_same_result(*both(elsewhere, q, k, v), name)


def test_the_program_gives_the_exponentials_of_the_module(elsewhere):
    x = np.linspace(-160.0, 0.0, 100_003, dtype=np.float32)
    there, here = (one.exponential(x, "baseline") for one in (elsewhere, native.module))
    assert_same_bytes(there, here)


def test_the_program_says_where_memory_runs_out(elsewhere):
    # Every axis is of stride 0: only what the call takes for itself is large.
    one = np.zeros((), np.float32)
    call = [np.broadcast_to(one, shape) for shape in ((1, 2**45), (1, 2**45), (1, 1))]
    with (
        on_path("fused:baseline") as kernel,
        answering(elsewhere),
        pytest.raises(MemoryError),
    ):
        regard.attention(*call, kernel=kernel)

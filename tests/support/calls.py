"""Calls of `regard.attention` that the semantics tests make, each held against the oracle.

Owns the list of paths (kernels, and CPU targets of the fused one) that every semantics test runs
over, the dtypes, and `check`: run one call, hold every number of it within its bound. Must not know
how any kernel works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import regard
import regard.compute.dispatch
from bounds import FUSED, PAIRS, WHOLE_ROWS, Arithmetic, accumulator, assert_within, error_bounds
from oracle import Answer, attend, attend_exactly
from regard.compute import native

try:
    import ml_dtypes
except ImportError:
    BFLOAT16 = None
else:
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


TARGETS = [target for target, usable in native.targets().items() if usable]
# What can answer a call: a kernel, or the fused one with the instructions of one CPU target.
PATHS = [
    path
    for one in regard.compute.dispatch.kernels()
    for path in ([f"fused:{t}" for t in TARGETS] if one.name == "fused" else [one.name])
]


@contextmanager
def on_path(path: str) -> Iterator[str]:
    """Answer by this path meanwhile; yields what `kernel=` takes."""
    kernel, _, target = path.partition(":")
    before = native.target
    if target:
        native.use_target(target)
    try:
        yield kernel
    finally:
        if target:
            native.use_target(before)


def _cases(paths: list[Any]) -> list[Any]:
    """Where avx512_bf16 runs, those of avx512 wait for `--full`: all but bfloat16 is the same."""
    again = {"avx512", "fused:avx512"} if "avx512_bf16" in TARGETS else set()
    full = pytest.mark.full
    return [pytest.param(p, marks=full) if type(p) is str and p in again else p for p in paths]


def _over(paths: list[Any], test: Callable[..., None]) -> Callable[..., None]:
    # A wrapper and not a fixture: hypothesis runs many examples within one use of a fixture, and
    # the target must be back as it was whatever a test does.
    @functools.wraps(test)
    def on_each_path(*arguments: Any, kernel: str, **options: Any) -> None:
        with on_path(kernel) as name:
            test(*arguments, kernel=name, **options)

    return pytest.mark.parametrize("kernel", _cases(paths))(on_each_path)


def every_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test over every path; its argument `kernel` is what `kernel=` takes."""
    return _over(PATHS, test)


def every_kernel_where_the_reference_fails(
    reason: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For promises that only a fused kernel keeps; strict, so that keeping one is noticed."""
    failing = pytest.mark.xfail(strict=True, reason=reason, raises=AssertionError)
    paths = [pytest.param(p, marks=failing) if p == "reference" else p for p in PATHS]
    return functools.partial(_over, paths)


every_target = pytest.mark.parametrize("target", _cases(TARGETS))


FLOATS = [
    pytest.param(np.dtype(np.float16), id="float16"),
    pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.needs("ml_dtypes")),
    pytest.param(np.dtype(np.float32), id="float32"),
    pytest.param(np.dtype(np.float64), id="float64"),
]
every_float = pytest.mark.parametrize("dtype", FLOATS)


def numbers(
    shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, size: float = 1.0
) -> np.ndarray:
    """Normally distributed numbers, another set for each seed."""
    return (np.random.default_rng(seed).normal(size=shape) * size).astype(dtype)


def inputs(
    *shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0, size: float = 1.0
) -> tuple[np.ndarray, ...]:
    """Query, key and value of these shapes."""
    return tuple(numbers(s, dtype, 1000 * seed + n, size) for n, s in enumerate(shapes))


def path_of(kernel: str) -> str:
    """The path that answers now where `kernel=` is this."""
    return f"fused:{native.target}" if kernel == "fused" else kernel


def run(kernel: str, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """One call by the kernel named, with weights and lse; that path must be the one that ran."""
    path = path_of(kernel)
    with recording() as ran:
        result = regard.attention(
            query, key, value, return_weights=True, return_lse=True, kernel=kernel, **options
        )
    assert ran == [path], (ran, path)
    return result


@contextmanager
def recording() -> Iterator[list[str]]:
    """The paths that run meanwhile; the native module itself says with which target it was called.

    A call on the fast path is answered without any kernel's `run` and leaves no trace here.
    """
    ran: list[str] = []

    def recorded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            ran.append(name)
            return work(*arguments, **options)

        return run

    kernels = [(one, one.run) for one in regard.compute.dispatch.kernels() if one.name != "fused"]
    module = native.module if native.BUILT else None
    try:
        for one, work in kernels:
            one.run = recorded(one.name, work)
        if module is not None:
            native.module = Recorded(module, ran)
        yield ran
    finally:
        for one, work in kernels:
            one.run = work
        if module is not None:
            native.module = module


@contextmanager
def recording_fast_calls_too() -> Iterator[list[str]]:
    """As `recording`, with "fused:fast path" for each call answered before a request is built."""
    fast_path = native.fast_path

    def recorded(*arguments: Any) -> Any:
        answer = fast_path(*arguments)
        if answer is not None:
            ran.append("fused:fast path")
        return answer

    with recording() as ran:
        regard.api.fast_path = native.fast_path = recorded
        try:
            yield ran
        finally:
            regard.api.fast_path = native.fast_path = fast_path


class Recorded:
    """The native module, whose `run` takes the target as its last text."""

    def __init__(self, native: Any, ran: list[str]) -> None:
        self.native, self.ran = native, ran

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def run(self, *arguments: Any) -> None:
        target = next(one for one in reversed(arguments) if isinstance(one, str))
        self.ran.append(f"fused:{target}")
        self.native.run(*arguments)


MOST_SCALE = 1e6  # of a call that dot instructions on pairs answer


def arithmetic_of(kernel: str, *arrays: Any, **options: Any) -> Arithmetic:
    """How the path that answers now computes a call, by its dtypes and options alone."""
    if kernel != "fused":
        return WHOLE_ROWS
    pairs = native.target == "avx512_bf16" and abs(options.get("scale") or 0.0) <= MOST_SCALE
    pairs &= options.get("precision", "working") == "working"
    return PAIRS if pairs and all(x.dtype == BFLOAT16 for x in arrays) else FUSED


def result_dtype(*arrays: Any) -> np.dtype:
    dtype = np.result_type(*(np.asarray(x).dtype for x in arrays))
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def answer_of(query: Any, key: Any, value: Any, **options: Any) -> Answer:
    """The oracle's answer, by the oracle that is precise enough for these dtypes."""
    options.pop("precision", None)
    narrow = result_dtype(query, key, value) != np.float64
    return (attend if narrow else attend_exactly)(query, key, value, **options)


def check(
    kernel: str, query: Any, key: Any, value: Any, *, rule: Any = None, **options: Any
) -> tuple[Any, Answer]:
    """Run a call and hold output, weights and lse against the oracle, number by number.

    `rule` is what the oracle takes for the call's mask, where that is a mask object.
    """
    result = run(kernel, query, key, value, **options)
    answer = answer_of(query, key, value, **(options | ({} if rule is None else {"mask": rule})))
    check_result(kernel, result, answer, query, key, value, **options)
    return result, answer


def check_result(
    kernel: str, result: Any, answer: Answer, query: Any, key: Any, value: Any, **options: Any
) -> None:
    dtype = result_dtype(query, key, value)
    dtypes = tuple(x.dtype for x in (result.output, result.weights, result.lse))
    assert dtypes == (dtype, dtype, accumulator(dtype)), dtypes
    bound = error_bounds(
        query,
        key,
        value,
        answer,
        dtype=dtype,
        exact=options.get("precision") == "exact",
        arithmetic=arithmetic_of(kernel, query, key, value, **options),
        **{name: options[name] for name in ("scale", "softcap", "bias", "sink") if name in options},
    )
    assert_within(result.output, answer.output, bound.output, "output")
    assert_within(result.weights, answer.weights, bound.weights, "weights")
    assert_within(result.lse, answer.lse, bound.lse, "lse")


def assert_same_bytes(actual: Any, expected: Any, what: str = "") -> None:
    """Equal to the last bit, NaN and the sign of zero included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    kinds = (actual.dtype, actual.shape), (expected.dtype, expected.shape)
    if kinds[0] != kinds[1]:  # NumPy's own comparison writes its message before it compares
        np.testing.assert_equal(*kinds, what)
    if actual.tobytes() != expected.tobytes():
        unlike = np.frombuffer(actual.tobytes(), np.uint8) != np.frombuffer(
            expected.tobytes(), np.uint8
        )
        unlike = unlike.reshape(*actual.shape, -1).any(axis=-1)
        places = np.argwhere(unlike).tolist()
        raise AssertionError(
            f"{what}: {len(places)} of {actual.size} numbers have other bytes, first at "
            f"{places[0]}: {actual[unlike][0]!r} and {expected[unlike][0]!r}"
        )


def assert_same_result(actual: Any, expected: Any, what: str = "") -> None:
    for name in ("output", "weights", "lse"):
        assert_same_bytes(getattr(actual, name), getattr(expected, name), f"{what} {name}")


def assert_other_numbers(one: Any, other: Any, what: str = "") -> None:
    """The two outputs differ by far more than any rounding does."""
    one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
    difference = float(np.nan_to_num(abs(one - other), nan=np.inf).max(initial=0.0))
    np.testing.assert_array_less(1e-2, difference, f"{what}: it changes nothing")

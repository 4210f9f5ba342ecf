"""The checks of `regard info --verify`: quick forms of regard's tests, for this machine.

They need only NumPy, and compare every usable kernel, the fused one on each CPU target, with plain
loops or with itself. Must not know how anything is shown.
"""

from __future__ import annotations

import io
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from regard.api import attention, explain, gradients
from regard.boundary import npz
from regard.boundary.arrays import Array
from regard.compute import native
from regard.compute.dispatch import kernels
from regard.errors import ProblemError
from regard.problems.files import parse_problem

FORMATS = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
# Around the sizes of vectors, tiles and chunks.
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65)


@dataclass(frozen=True)
class Check:
    """One promise, checked on this machine."""

    number: str
    promise: str
    failure: str  # empty if the promise is kept
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether the promise is kept."""
        return not self.failure


def verify() -> Iterator[Check]:
    """Check one promise after the other, lazily; a few seconds in all.

    >>> next(verify()).kept
    True
    """
    usable = [kernel.name for kernel in kernels() if kernel.status().startswith("usable")]
    targets = [target for target, runs in native.targets().items() if runs]
    paths = [(name, one) for name in usable for one in (targets if name == "fused" else [""])]
    for number, (promise, check) in CHECKS.items():
        begin = time.perf_counter()
        failure = ""
        for kernel, target in paths:
            try:
                with _on(target):
                    check(kernel)
            except Exception as error:
                kind = "" if isinstance(error, _Broken) else f"{type(error).__name__}: "
                failure = f"kernel {f'{kernel} on {target}' if target else kernel}: {kind}{error}"
                break
        yield Check(number, promise, failure, time.perf_counter() - begin)


@contextmanager
def _on(target: str) -> Iterator[None]:
    """Use this CPU target meanwhile, if one is named."""
    before = native.target
    if target:
        native.use_target(target)
    try:
        yield
    finally:
        if target:
            native.use_target(before)


class _Broken(Exception):
    """Raised for a promise that is not kept."""


def _hold(condition: object, said: str) -> None:
    if not condition:
        raise _Broken(said)


def _same(one: Array, other: Array, said: str) -> None:
    """Compare bytes, so that NaN and the sign of zero count."""
    _hold(one.tobytes() == other.tobytes(), said)


def _draw(seed: int, *shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def _qkv(rows: int, keys: int, width: int, dtype: str = "float32") -> tuple[Array, Array, Array]:
    shapes = ((1, 2, rows, width), (2, 2, keys, width), (3, 2, keys, width))
    query, key, value = (_draw(seed, *shape, dtype=dtype) for seed, *shape in shapes)
    return query, key, value


@cache
def _exact(rows: int, keys: int, width: int, dtype: str) -> tuple[Array, float]:
    """One head by plain loops with exact sums, and the largest scaled sum of |q·k| of a score."""
    query, key, value = (one[0] for one in _qkv(rows, keys, width, dtype))
    scale = 1 / math.sqrt(query.shape[-1])
    out = np.zeros((len(query), value.shape[-1]))
    longest = 0.0
    for i, row in enumerate(query.astype(float).tolist()):
        products = [[a * b for a, b in zip(row, one, strict=True)] for one in key.astype(float)]
        scores = [math.fsum(terms) * scale for terms in products]
        longest = max(longest, *(math.fsum(map(abs, terms)) * scale for terms in products))
        shares = [math.exp(score - max(scores)) for score in scores]
        for e in range(value.shape[-1]):
            column = value[:, e].astype(float).tolist()
            terms = (share * number for share, number in zip(shares, column, strict=True))
            out[i, e] = math.fsum(terms) / math.fsum(shares)
    return out, longest


def _masked_is_absent(kernel: str) -> None:
    query, key, value = _qkv(5, 40, 9)
    keep = np.random.default_rng(9).random((5, 40)) < 0.6
    keep[:, -3:] = False
    before = attention(query, key, value, mask=keep, kernel=kernel)
    for poison in (np.nan, np.inf, -np.inf, 1e38, 1e-45):
        own_key, own_value = key.copy(), value.copy()
        own_key[:, -3:] = own_value[:, -3:] = poison
        after = attention(query, own_key, own_value, mask=keep, kernel=kernel)
        _same(after, before, f"{poison} in a hidden key changes the result")


def _empty_rows_are_zero(kernel: str) -> None:
    query, key, value = _qkv(3, 5, 4)
    for keep in ([[False] * 5] * 3, [[True] * 5, [False] * 5, [True] * 5]):
        mask = np.array(keep)
        got = attention(query, key, value, mask=mask, kernel=kernel, return_lse=True)
        empty = ~mask.any(-1)
        _hold((got.output[:, empty] == 0).all(), "a row that sees no key is not 0")
        _hold(np.isneginf(got.lse[:, empty]).all(), "its log-sum-exp is not −inf")


def _finite_stays_finite(kernel: str) -> None:
    for size in (1e2, 1e4, 1e10, 1e19, 1e38):
        query, key, value = _qkv(4, 30, 8)
        got = attention(np.float32(size) * np.sign(query), key, value, kernel=kernel)
        _hold(np.isfinite(got).all(), f"queries of {size:g} give infinity or NaN")
        slack = np.float32(1e-5)
        low, high = value.min(1, keepdims=True) - slack, value.max(1, keepdims=True) + slack
        inside = (got >= low) & (got <= high)
        _hold(inside.all(), f"queries of {size:g} give an output outside the values")


def _nan_stays_where_it_belongs(kernel: str) -> None:
    query, key, value = _qkv(4, 20, 8)
    value[0, 7, 3] = np.nan
    got = np.isnan(attention(query, key, value, kernel=kernel))
    _hold(got[0, :, 3].all() and got.sum() == 4, "NaN in a value reaches another column, or none")
    query, key, value = _qkv(4, 20, 8)
    query[1, 2, 0] = np.nan
    got = np.isnan(attention(query, key, value, kernel=kernel))
    _hold(got[1, 2].all() and got.sum() == 8, "NaN in a query reaches another row, or none")


def _within_the_bound(kernel: str, dtypes: tuple[str, ...] = ("float16", "float32")) -> None:
    for dtype in dtypes:
        for keys, width in ((1, 1), (7, 5), (33, 17), (300, 8)):
            query, key, value = (one[0] for one in _qkv(2, keys, width, dtype))
            exact, longest = _exact(2, keys, width, dtype)
            # Half types accumulate in float32 and round once at the end.
            unit = FORMATS[dtype] if dtype != "float16" else FORMATS["float32"]
            terms = 2 * (width + 2) * longest + 2 * keys + 14
            bound = terms * unit * np.abs(value.astype(float)).max()
            bound += FORMATS[dtype] * np.abs(exact)
            got = attention(query, key, value, kernel=kernel).astype(float)
            off = np.abs(got - exact)
            _hold((off <= bound).all(), f"{dtype}, {keys} keys: off by {off.max():.2g}")


def _exact_rounds_once(kernel: str) -> None:
    query, key, value = _qkv(64, 200, 16)
    got = attention(query, key, value, precision="exact", kernel=kernel)
    wide = attention(*(one.astype(float) for one in (query, key, value)), kernel=kernel)
    differing = int((got != wide.astype(np.float32)).sum())
    _hold(differing <= got.size // 10_000 + 1, f"{differing} of {got.size} are rounded wrongly")


def _deterministic(kernel: str) -> None:
    query, key, value = _qkv(70, 600, 24)
    whole = attention(query, key, value, kernel=kernel)
    for threads in (1, 2, 3):
        again = attention(query, key, value, threads=threads, kernel=kernel)
        _same(again, whole, f"{threads} threads give other bytes")
    turned = np.asfortranarray(query), key[:, ::-1][:, ::-1], value.astype(">f4")
    _same(attention(*turned, kernel=kernel), whole, "another memory layout gives other bytes")
    if kernel == "fused":  # not promised by the reference
        alone = attention(query[:, 40:41], key, value, kernel=kernel)
        _same(alone, whole[:, 40:41].copy(), "a row alone gives other bytes")


def _every_argument_counts(kernel: str) -> None:
    query, key, value = _qkv(6, 6, 8)
    plain = attention(query, key, value, kernel=kernel)
    half = np.tril(np.ones((6, 6), bool))
    single: dict[str, Any] = {
        "mask": half,
        "bias": np.arange(6.0),
        "causal": True,
        "window": (1, 0),
    }
    single |= {"scale": 0.1, "softcap": 0.5, "sink": 1.0}
    for options in (*({name: one} for name, one in single.items()), {"causal": True, "offset": 2}):
        other = attention(query, key, value, kernel=kernel, **options)
        _hold(not np.array_equal(other, plain), f"{', '.join(options)} changes nothing")


def _bad_input_is_an_error(kernel: str) -> None:
    query, key, value = _qkv(4, 5, 8)
    bad: tuple[tuple[tuple[Any, Any, Any], dict[str, Any]], ...] = (
        ((query, key[:, :4], value), {}),
        ((query[..., :7], key, value), {}),
        ((query, key, value), {"mask": np.ones((4, 6), bool)}),
        ((query, key, value), {"mask": np.ones((4, 5), int)}),
        ((query, key, value), {"causal": True}),
        ((query, key, value), {"scale": np.nan}),
        ((query.astype(complex), key, value), {}),
        ((query[:, :, None, None], key, value), {"out": np.zeros(3, np.float32)}),
    )
    for number, (arrays, options) in enumerate(bad):
        try:
            attention(*arrays, kernel=kernel, **options)
        except (ValueError, TypeError):
            continue
        raise _Broken(f"bad call {number} is not refused")


def _writes_nowhere_else(kernel: str) -> None:
    for width in SIZES:
        for keys in SIZES[::3]:
            query, key, value = _qkv(3, keys, width)
            around = np.full((2, 5, width + 2), 7, np.float32)
            out = around[:, 1:4, 1:-1]
            expected = attention(query, key, value, kernel=kernel)
            attention(query, key, value, out=out, kernel=kernel)
            _same(out.copy(), expected, f"width {width}: out holds another result")
            around[:, 1:4, 1:-1] = 7
            _hold((around == 7).all(), f"width {width}: a write outside out")


def _inputs_are_not_written(kernel: str) -> None:
    arrays = _qkv(5, 30, 12)
    kept = [one.copy() for one in arrays]
    for one in arrays:
        one.flags.writeable = False
    got = attention(*arrays, causal=True, offset="end", kernel=kernel)
    for one, other in zip(arrays, kept, strict=True):
        _same(one, other, "an input was written")
    _hold(not any(np.shares_memory(got, one) for one in arrays), "the output is part of an input")


def _leaves_the_process_alone(kernel: str) -> None:
    tiny = np.array([5e-324, 1e-310])
    with np.errstate(all="raise"):
        before = np.geterr()
        attention(*_qkv(40, 300, 16), kernel=kernel)
        _hold(np.geterr() == before, "NumPy's error state was changed")
    _hold((tiny * 1.0 > 0).all(), "denormal numbers have become 0")
    _hold(float(np.float64(1) + np.float64(2.0**-52)) > 1, "the rounding mode was changed")


def _memory_is_bounded(kernel: str) -> None:
    arrays = _qkv(1024, 1024, 16)
    attention(*(one[:, :8] for one in arrays), kernel=kernel)  # what the first call keeps
    traced = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        attention(*arrays, kernel=kernel)
        most = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not traced:
            tracemalloc.stop()
    _hold(most < 1024 * 1024 * 4, f"a call of 1024 rows and keys takes {most} bytes")


def _reports_are_inert_and_files_bounded(kernel: str) -> None:
    label = "<script>alert(1)</script>"
    numbers = "queries = [[1]]\nkeys = [[1], [0]]\nvalues = [[1], [2]]\n"
    named = parse_problem(f"{numbers}context_tokens = ['{label}', 'b']\n", "toml")
    _hold(label not in explain(named).to_html(), "a label is code in a page")
    for text in ('{"a":' * 100_000, "[" * 100_000, '{"queries": ' + "9" * 100_000 + "}"):
        try:
            parse_problem(text, "json")
        except ProblemError:
            continue
        raise _Broken("a hostile file is not refused")
    archive = io.BytesIO()
    np.savez(archive, queries=np.array([{}], object))
    archive.seek(0)
    try:
        npz.read(archive)
    except ProblemError:
        return
    raise _Broken("an archive with objects is not refused")


def _gradients_are_slopes(kernel: str) -> None:
    """Compare each gradient in float64 with a central difference along a random direction."""
    arrays = _qkv(5, 7, 4, "float64")
    grad_output = _draw(4, 2, 5, 4, dtype="float64")
    options: dict[str, Any] = {"causal": True, "offset": 1, "softcap": 2.0, "kernel": kernel}
    got = gradients(*arrays, grad_output, **options)
    step = 1e-4
    for number, name in enumerate(("query", "key", "value")):
        direction = _draw(5 + number, *arrays[number].shape, dtype="float64")
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[number] = arrays[number] + sign * step * direction
            ends.append((attention(*moved, **options) * grad_output).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        off = abs(float((getattr(got, name) * direction).sum() - slope))
        # The difference is off by a third derivative times step², about 1e-8 times the numbers.
        _hold(off <= 1e-5 * (1 + abs(slope)), f"the gradient of {name} is off by {off:.2g}")
    hidden = gradients(*arrays, grad_output, mask=np.zeros((5, 7), bool), kernel=kernel)
    _hold(not any(np.any(one) for one in hidden[:3]), "what is hidden has a gradient")


CHECKS: dict[str, tuple[str, Callable[[str], None]]] = {
    "G1": ("masked means absent", _masked_is_absent),
    "G2": ("empty rows are zero", _empty_rows_are_zero),
    "G3": ("finite in, finite out", _finite_stays_finite),
    "G4": ("NaN stays where it belongs", _nan_stays_where_it_belongs),
    "G5": ("within the stated error bound", _within_the_bound),
    "G6": ("float64 is float64", partial(_within_the_bound, dtypes=("float64",))),
    "G7": ('precision="exact" rounds once', _exact_rounds_once),
    "G8": ("the same bytes for any threads and layout", _deterministic),
    "G9": ("every argument counts", _every_argument_counts),
    "G10": ("bad input is an error, not a crash", _bad_input_is_an_error),
    "G11": ("nothing beside the output is written", _writes_nowhere_else),
    "G12": ("inputs are never written", _inputs_are_not_written),
    "G13": ("the process is left as it was", _leaves_the_process_alone),
    "G14": ("no matrix of scores in memory", _memory_is_bounded),
    "G15": ("reports are inert, files are bounded", _reports_are_inert_and_files_bounded),
    "gradients": ("gradients are slopes, 0 where hidden", _gradients_are_slopes),
}

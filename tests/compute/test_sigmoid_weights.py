"""Weights by a sigmoid: every number of every path within a bound, forward and backward.

The bound. A logit is known to η = u·((D + 2)·Σ|q k|·|scale| + 8·min(Σ|q k|·|scale|, softcap)
+ 2·|bias| + |x| + |shift| + 8), of the base 2 exponent too; u of the sums. Neither ln σ(x) nor
ln σ'(x) has a slope beyond 1, so a weight and its slope are known to exp(η) − 1 of themselves, and
4 u for the sigmoid's own roundings. A sum of n products adds n·u of the sum of their sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from bounds import assert_within, precision_of
from calls import (
    BFLOAT16,
    assert_same_bytes,
    every_kernel,
    every_target,
    numbers,
    on_path,
    path_of,
    recording,
)
from regard import masks
from regard.normalizers import Sigmoid
from regard.scores import Cosine

LONG = np.longdouble
SHIFT = -1.25
TYPES = [np.dtype(one) for one in (np.float32, np.float64, np.float16)]
TYPES += [] if BFLOAT16 is None else [BFLOAT16]
ROWS, KEYS, WIDTH = 7, 300, 5  # keys of two chunks
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "offset": 280},
    "everything": {
        "window": (240, 30),
        "offset": 250,
        "scale": -0.8,
        "softcap": 2.0,
        "bias": numbers((2, ROWS, KEYS), seed=8),
        "mask": numbers((ROWS, KEYS), seed=5) > -0.8,
    },
    "lengths": {"mask": masks.Lengths(200)},
    "exact": {"precision": "exact"},
}


def seen_by(options: dict[str, Any]) -> np.ndarray:
    i, j = np.ogrid[:ROWS, :KEYS]
    seen = np.broadcast_to(options.get("mask", True), (ROWS, KEYS)) if "mask" in options else True
    if isinstance(options.get("mask"), masks.Lengths):
        seen = j < 200
    at = i + options.get("offset", 0)
    if options.get("causal"):
        seen = seen & (j <= at)
    if "window" in options:
        seen = seen & (j >= at - options["window"][0]) & (j <= at + options["window"][1])
    return np.broadcast_to(seen, (ROWS, KEYS))


def arrays(dtype: Any, rows: int = ROWS) -> tuple[np.ndarray, ...]:
    shapes = ((2, rows, WIDTH), (1, KEYS, WIDTH), (1, KEYS, 6), (2, rows, 6))
    return tuple(numbers(s, dtype, seed=n) for n, s in enumerate(shapes))


class Exact:
    """The call in long doubles, and how far each number may be off."""

    def __init__(self, given: tuple[np.ndarray, ...], options: dict[str, Any]) -> None:
        wide = given[0].dtype == np.float64 or options.get("precision") == "exact"
        unit = self.unit = LONG(precision_of(np.float64 if wide else np.float32).unit)
        q, k, v, grad = (x.astype(LONG) for x in given)
        seen = seen_by(options)
        scale = LONG(options.get("scale", 1 / np.sqrt(LONG(WIDTH))))
        sizes = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * abs(scale)
        scores, slope = q @ k.swapaxes(-1, -2), LONG(1)
        x = scores * scale
        off = unit * ((WIDTH + 2) * sizes + 8)
        if "softcap" in options:
            cap = LONG(options["softcap"])
            slope = 1 / np.cosh(x / cap) ** 2
            x = cap * np.tanh(x / cap)
            off = off + 8 * unit * np.minimum(sizes, cap)
        if "bias" in options:
            x = x + options["bias"]
            off = off + 2 * unit * np.abs(options["bias"])
        x = x + LONG(SHIFT)
        off = np.expm1(off + unit * (np.abs(x) + abs(SHIFT))) + 4 * unit
        self.weights = np.where(seen, 1 / (1 + np.exp(-x)), 0)
        self.off_weights = self.weights * off
        self.output = self.weights @ v
        self.off_output = (self.off_weights + KEYS * unit * self.weights) @ np.abs(v)
        # Backward: what each product adds up to, and to what share it is known.
        width = grad.shape[-1]
        products, most = grad @ v.swapaxes(-1, -2), np.abs(grad) @ np.abs(v).swapaxes(-1, -2)
        of_sigmoid = self.weights * (1 - self.weights)
        logits = of_sigmoid * products
        off_logits = of_sigmoid * most * (off + (width + 4) * unit)
        # A softcap's slope is known to 16 u of 1, beside what its argument is off by.
        scaled = logits * slope
        off_scores = off_logits + np.abs(logits) * (16 * unit + off)
        sums = (ROWS * 2 + KEYS + 8) * unit
        self.gradients, self.off_gradients = {}, {}
        heads = np.abs(scaled)
        for name, one, two in (("query", scaled, k), ("key", scaled.swapaxes(-1, -2), q)):
            loose = off_scores if name == "query" else off_scores.swapaxes(-1, -2)
            size = heads if name == "query" else heads.swapaxes(-1, -2)
            self.gradients[name] = one @ two * scale
            self.off_gradients[name] = (loose + sums * size) @ np.abs(two) * abs(scale)
        turned = self.weights.swapaxes(-1, -2)
        loose = (self.off_weights + sums * self.weights).swapaxes(-1, -2)
        self.gradients["value"], self.off_gradients["value"] = turned @ grad, loose @ np.abs(grad)
        for name in ("key", "value"):  # two query heads share them
            for found in (self.gradients, self.off_gradients):
                found[name] = found[name].sum(axis=0, keepdims=True)
        for name, what, loose in (
            ("normalize.bias", logits, off_logits),
            ("scale", scaled * scores, off_scores * sizes / abs(scale)),
            ("bias", logits, off_logits),
        ):
            self.gradients[name] = what if name == "bias" else what.sum()
            near = loose + sums * np.abs(what)
            self.off_gradients[name] = near if name == "bias" else near.sum()


def held(got: Any, exact: Any, off: Any, what: str) -> None:
    last = precision_of(np.asarray(got).dtype)
    exact = np.asarray(exact).reshape(np.shape(got))
    bound = np.asarray(off).reshape(exact.shape)
    bound = bound + (last.unit + 2.0**-60) * (np.abs(exact) + bound) + 4 * last.floor
    assert_within(got, exact.astype(float), bound.astype(float), what)


@every_kernel
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_number_is_within_its_bound(kernel, dtype, case):
    given, options = arrays(dtype), OPTIONS[case]
    if case == "exact" and dtype == np.float64:
        return
    exact = Exact(given, options)
    call = {"normalize": Sigmoid(SHIFT), "return_weights": True, **options}
    with recording() as ran:
        found = regard.attention(*given[:3], kernel=kernel, **call)
    assert ran == [path_of(kernel)]
    held(found.output, exact.output, exact.off_output, "output")
    held(found.weights, exact.weights, exact.off_weights, "weights")
    wrt = ["query", "key", "value", "normalize.bias", *({"bias", "scale"} & options.keys())]
    slopes = regard.gradients(*given, wrt=wrt, kernel=kernel, normalize=Sigmoid(SHIFT), **options)
    for name in wrt:
        got = slopes.parameters[name] if "." in name else getattr(slopes, name)
        held(got, exact.gradients[name], exact.off_gradients[name], name)


@every_target
def test_a_row_has_its_bytes_whatever_is_beside_it_and_however_many_threads(target):
    for dtype in TYPES:
        query, key, value, _ = arrays(dtype)
        call = {"normalize": Sigmoid(SHIFT), "causal": True, "offset": 280, "return_weights": True}
        with on_path(f"fused:{target}"):
            whole = regard.attention(query, key, value, kernel="fused", threads=1, **call)
            for row in range(ROWS):
                call["offset"] = 280 + row
                alone = regard.attention(query[:, row : row + 1], key, value, **call)
                assert_same_bytes(alone.output, whole.output[:, row : row + 1])
                assert_same_bytes(alone.weights, whole.weights[:, row : row + 1])
    # Few rows and many keys: these are split over threads.
    query, key, value = (numbers((1, n, 64), seed=n) for n in (2, 40_000, 40_001))
    value = value[:, :-1]
    one, two = (
        regard.attention(query, key, value, normalize=Sigmoid(SHIFT), threads=n) for n in (1, 2)
    )
    assert_same_bytes(one, two)


@every_kernel
def test_what_is_hidden_is_absent(kernel):
    query, key, value, grad = arrays(np.float32)
    odd = [x.copy() for x in (query, key, value)]
    odd[0][:, 4], odd[1][:, 200:], odd[2][:, 200:] = np.nan, np.inf, np.nan
    mask = np.outer(np.arange(ROWS) != 4, np.arange(KEYS) < 200)
    call = {"mask": mask, "normalize": Sigmoid(SHIFT), "kernel": kernel}
    assert_same_bytes(regard.attention(*odd, **call), regard.attention(query, key, value, **call))
    with_odd, without = (regard.gradients(*x, grad, **call) for x in (odd, (query, key, value)))
    for name in ("query", "key", "value"):
        assert_same_bytes(getattr(with_odd, name), getattr(without, name), name)


@every_kernel
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_beyond_the_range_and_visible_nan_and_infinity(kernel, dtype):
    """A NaN logit makes its own weight NaN alone; an infinite one 1 or 0."""
    largest = float(np.finfo(dtype).max)
    key = np.array([[1, 0], [-1, 0], [0, 1], [0, np.nan], [0, 0]], dtype)
    value = np.array([[1, 2], [np.inf, 3], [-np.inf, 4], [5, 6], [largest, largest]], dtype)
    call = {"normalize": Sigmoid(), "return_weights": True, "kernel": kernel, "scale": largest}

    def seen(*keys: int) -> Any:
        query = np.array([[largest, 1]], dtype)
        return regard.attention(query, key[list(keys)], value[list(keys)], **call)

    found = seen(0, 1, 4)
    np.testing.assert_array_equal(found.weights, [[1, 0, 0.5]])
    np.testing.assert_array_equal(found.output, [[np.nan, largest / 2]])
    found = seen(2, 3)
    np.testing.assert_array_equal(found.weights, [[1, np.nan]])
    np.testing.assert_array_equal(found.output, [[np.nan, np.nan]])
    np.testing.assert_array_equal(seen(0, 2).output, [[-np.inf, 6]])
    # The sum of many large values is as large as it is, though parts of it are beyond the range.
    ones = np.ones((4, 2), dtype)
    values = np.array([[largest], [largest], [-largest], [-largest]], dtype)
    call["scale"] = 100.0
    if kernel != "reference" or dtype == np.float32:
        np.testing.assert_array_equal(regard.attention(ones, ones, values, **call).output, 0)


@every_target
def test_int8_keys_and_other_scores_meet_it_too(target):
    query, key, value, _ = arrays(np.float32)
    with on_path(f"fused:{target}"):
        cache = regard.KVCache(dtype="int8")
        cache.append(key, value)
        held_keys, held_values = (np.asarray(x) for x in (cache.keys, cache.values))
        call = {"normalize": Sigmoid(SHIFT)}
        found = cache.attend(query, causal=False, **call)
        np.testing.assert_allclose(
            found, regard.attention(query, held_keys, held_values, **call), 1e-5, 1e-5
        )
        one, other = (
            regard.attention(query, key, value, score=Cosine(0.3), kernel=name, **call)
            for name in ("fused", "reference")
        )
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)

"""Scores that the fused kernel computes as dot products of rows: within a bound, on every path.

A made row is rounded once to the dtype of the sums, after float64: a number of it is off by at most

    e = (u + 2⁻⁵³)·|x| + smallest/2 + (D + 6)·2⁻⁵³·X

where X is Σ_d |q_d W_dk| for a matrix, |x| for a row of length 1. Gradients: with rows rounded, a
logit's error and each product with a row grow by less than the bound of exact rows, so it counts
twice; the way on from a row to what it is made of is linear.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from backward_oracle import differentiate
from bounds import FUSED, WHOLE_ROWS, assert_within, error_bounds, precision_of
from calls import BFLOAT16, assert_same_bytes, every_kernel, numbers, run
from oracle import attend, attend_exactly
from regard import masks, scores
from regard.compute.kernels import fused
from regard.compute.request import make_request
from regard.normalizers import KNOWN as NORMALIZERS
from regard.normalizers import Sparsemax
from regard.scores import Cosine, Distance, Features, General
from regard.textbook import Mechanism

LONG, UNIT = np.longdouble, 2.0**-53
W = numbers((5, 5), np.float64, seed=7)
TYPES = [np.dtype(one) for one in (np.float32, np.float64, np.float16)]
TYPES += [] if BFLOAT16 is None else [BFLOAT16]
# What a score makes of the rows, how large the sums are that they come from, and the scale.
SCORES = {
    "general": (General(W), lambda q: q @ W, lambda k: k, 1.0),
    "cosine": (Cosine(0.3), lambda q: unit(q), lambda k: unit(k), 1 / 0.3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "offset": 2},
    "everything": {
        "window": (4, 2),
        "offset": 1,
        "scale": -0.8,
        "softcap": 2.0,
        "bias": numbers((2, 7, 9), seed=8),
        "sink": np.array([0.3, -1.0]),
        "mask": numbers((7, 9), seed=5) > -0.8,
    },
    "lengths": {"mask": masks.Lengths(6)},
    "exact": {"precision": "exact"},
}
SIGHT = {"lengths": {"mask": np.arange(9) < 6}}


def unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.sqrt(np.square(rows).sum(-1, keepdims=True))
    return rows / np.where(lengths == 0, 1, lengths)


def arrays(dtype: Any) -> tuple[np.ndarray, ...]:
    shapes = ((2, 7, 5), (1, 9, 5), (1, 9, 6), (2, 7, 6))
    query, key, value, grad = (numbers(s, dtype, seed=n) for n, s in enumerate(shapes))
    query[1, 3], key[0, 2] = 0, 0
    return query, key, value, grad


def rows_of(kind: str, side: int, array: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The exact rows, and how far they may be off where they are rounded to the dtype of sums."""
    exact = SCORES[kind][1 + side](array.astype(LONG))
    if kind == "general" and side == 1:
        return exact, np.zeros(exact.shape)
    size = np.abs(array.astype(float)) @ np.abs(W) if kind == "general" else np.abs(exact)
    inner = precision_of(dtype)
    off = (inner.unit + UNIT) * np.abs(exact) + inner.floor / 2 + (5 + 6) * UNIT * size
    return exact, off.astype(np.float64)


def sums(dtype: Any, options: dict[str, Any]) -> np.dtype:
    wide = dtype == np.float64 or options.get("precision") == "exact"
    return np.dtype(np.float64 if wide else np.float32)


@every_kernel
@pytest.mark.sweep
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_number_is_within_the_bound_of_rounded_rows(kernel, kind, dtype, case):
    options = OPTIONS[case]
    if case == "exact" and dtype == np.float64:
        return
    query, key, value, _ = arrays(dtype)
    score, *_, scale = SCORES[kind]
    result = run(kernel, query, key, value, score=score, **options)
    inner = sums(dtype, options) if kernel == "fused" else np.dtype(float)
    made = [rows_of(kind, side, x, inner) for side, x in enumerate((query, key))]
    given = {name: x for name, x in options.items() if name != "precision"}
    given |= {"scale": scale * given.get("scale", 1.0), **SIGHT.get(case, {})}
    rows = [exact.astype(np.float64) for exact, _ in made]
    oracle = attend_exactly if inner == np.float64 else attend
    answer = oracle(*rows, value, **given)
    of_bound = {name: given[name] for name in ("scale", "softcap", "bias", "sink") if name in given}
    bound = error_bounds(
        *(*rows, value, answer),
        **of_bound,
        dtype=dtype,
        exact=inner == np.float64,
        arithmetic=FUSED if kernel == "fused" else WHOLE_ROWS,
        rows_off=tuple(off for _, off in made),
    )
    for name in ("output", "weights", "lse"):
        assert_within(getattr(result, name), getattr(answer, name), getattr(bound, name), name)


@every_kernel
@pytest.mark.sweep
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_every_gradient_is_within_the_bound_of_rounded_rows(kernel, kind, dtype, case):
    options = OPTIONS[case]
    if case == "exact" and dtype == np.float64:
        return
    query, key, value, grad = arrays(dtype)
    score, *_, scale = SCORES[kind]
    own = next(f"score.{name}" for name in score.parameters())
    given = {name: x for name, x in options.items() if name != "precision"}
    times = given.get("scale", 1.0)
    given |= {"scale": scale * times, **SIGHT.get(case, {})}
    wrt = ["query", "key", "value", own, *({"bias", "sink", "scale"} & options.keys())]
    found = regard.gradients(
        query, key, value, grad, score=score, wrt=wrt, kernel=kernel, **options
    )
    inner = precision_of(sums(dtype, options)).unit
    rows = [SCORES[kind][1 + side](x.astype(LONG)) for side, x in enumerate((query, key))]
    exact, error = (one._asdict() for one in differentiate(*rows, value, grad, 2 * inner, **given))
    if kind == "general":
        q, w = query.astype(LONG), W.astype(LONG)
        exact[own] = np.einsum("hid,hik->dk", q, exact["query"])
        error[own] = np.einsum("hid,hik->dk", abs(q), error["query"])
        exact["query"], error["query"] = exact["query"] @ w.T, error["query"] @ abs(w).T
    else:
        for side, x, row in zip(("query", "key"), (query, key), rows, strict=True):
            wide = x.astype(LONG)
            length = np.sqrt(np.square(wide).sum(-1, keepdims=True))
            some, at_zero = np.where(length == 0, 1, length), length == 0
            along = (row * exact[side]).sum(-1, keepdims=True)
            loose = (abs(row) * error[side]).sum(-1, keepdims=True)
            loose = error[side] + abs(row) * loose + 8 * inner * abs(exact[side])
            exact[side] = np.where(at_zero, 0, (exact[side] - row * along) / some)
            error[side] = np.where(at_zero, 0, loose / some)
        exact[own] = -exact["scale"] * times * LONG(scale) ** 2
        error[own] = error["scale"] * abs(times) * scale**2
        exact["scale"], error["scale"] = exact["scale"] * scale, error["scale"] * scale
    for name in wrt:
        got = found.parameters[name] if "." in name else getattr(found, name)
        wide = exact[name].reshape(np.shape(got))
        last = precision_of(np.asarray(got).dtype)
        bound = error[name].reshape(np.shape(got)) + last.unit * abs(wide) + 4 * last.floor
        assert_within(got, wide.astype(float), (bound + 8 * UNIT * abs(wide)).astype(float), name)


GATED = Mechanism(
    "gated",
    [
        ("W", "W_s", "D K", "given"),
        ("turned", "Q_w", "H L K", "dot", "queries", "W"),
        ("gates", "B", "H L K", "sigmoid", "turned"),
        ("sides", "C", "G S K", "dot", "keys", "W"),
        ("scores", "A", "H L S", "dot", "gates", ("sides", "h//(H//G) j k")),
    ],
    W=numbers((5, 11), np.float64, seed=3),
)
SUMMED = Mechanism(
    "queries in all rows",
    [
        ("all", "z", "H D", "sum", "queries"),
        ("both", "B", "H L D", "multiply", "queries", "all"),
        ("scores", "A", "H L S", "dot", "both", "keys"),
    ],
)


@pytest.mark.parametrize("score", [GATED, Features(), General(W), Cosine()], ids=str)
def test_kernels_agree_on_leading_axes_pieces_of_rows_and_no_rows_at_all(score):
    for queries, keys in ((1030, 3), (2, 1100), (0, 3), (3, 0)):
        shapes = ((3, 1, 2, queries, 5), (2, 1, keys, 5), (2, 1, keys, 6), (3, 2, 2, queries, 6))
        query, key, value, grad = (numbers(s, np.float64, seed=n) for n, s in enumerate(shapes))
        wrt = ["query", "key", *(f"score.{name}" for name in score.parameters())]
        calls = [{"score": score, "kernel": kernel} for kernel in ("fused", "reference")]
        first, second = (regard.attention(query, key, value, **call) for call in calls)
        np.testing.assert_allclose(first, second, 1e-12, 1e-13)
        first, second = (regard.gradients(query, key, value, grad, wrt=wrt, **c) for c in calls)
        for name in wrt:
            one, other = (
                x.parameters[name] if "." in name else getattr(x, name) for x in (first, second)
            )
            np.testing.assert_allclose(one, other, 1e-11, 1e-10, err_msg=name)


@pytest.mark.parametrize("score", [GATED, Features(), General(W), Cosine()], ids=str)
def test_what_is_hidden_is_absent_from_made_rows_and_their_gradients(score):
    query, key, value, grad = arrays(np.float32)
    odd = [x.copy() for x in (query, key, value)]
    odd[0][:, 4], odd[1][:, 6:], odd[2][:, 6:] = np.nan, np.inf, np.nan
    mask = np.outer(np.arange(7) != 4, np.arange(9) < 6)
    call = {"mask": mask, "score": score, "kernel": "fused"}
    assert_same_bytes(regard.attention(*odd, **call), regard.attention(query, key, value, **call))
    wrt = ["query", "key", *(f"score.{name}" for name in score.parameters())]
    with_odd = regard.gradients(*odd, grad, wrt=wrt, **call)
    without = regard.gradients(query, key, value, grad, wrt=wrt, **call)
    for one, other in ((with_odd.query, without.query), (with_odd.key, without.key)):
        assert_same_bytes(one, other)
    for name, one in (with_odd.parameters or {}).items():
        np.testing.assert_array_equal(one, without.parameters[name])


def test_rows_beyond_float32_are_computed_in_float64():
    query, key = np.full((1, 2), 1e25, np.float32), np.array([[1e-25, 0], [0, 1e-30]], np.float32)
    score = General([[1e25, 0], [0, 1e25]])
    for kernel in ("fused", "reference"):
        call = {"score": score, "scale": 1e-25, "kernel": kernel, "return_weights": True}
        weights = regard.attention(query, key, np.eye(2, dtype=np.float32), **call).weights
        np.testing.assert_allclose(weights, [[0.7310564, 0.2689436]], 1e-6)


def test_a_row_has_its_bytes_whatever_is_beside_it():
    query, key, value, _ = arrays(np.float32)
    whole = regard.attention(query, key, value, score=Cosine(), kernel="fused")
    for row in range(7):
        alone = regard.attention(query[:, row : row + 1], key, value, score=Cosine())
        assert_same_bytes(alone, whole[:, row : row + 1])
    general = regard.attention(query, key, value, score=General(W), threads=1)
    assert_same_bytes(regard.attention(query, key, value, score=General(W), threads=2), general)


def test_the_fused_kernel_answers_what_info_says_it_knows_and_refuses_the_rest():
    given = {"General": {"W": W}, "Additive": {"W_q": W, "W_k": W, "v": W[0]}}
    query, key, value, _ = arrays(np.float32)
    info = regard.show_config("dict")
    listed = (
        ("score", info["scores"], scores.KNOWN),
        ("normalize", info["normalizers"], NORMALIZERS),
    )
    for option, said, known in listed:
        for name, make in known.items():
            part = make(**given.get(name, {}))
            call = {option: part} | ({"score": Features()} if name == "Proportional" else {})
            request = make_request(query, key, value, **call)
            why = fused.supports(request)
            assert (why is None) == ("fused" in said[name]), name
            assert why is None or why == f"it does not know {option}={name}"
    assert fused.supports(make_request(query, key, value, score=GATED)) is None
    for score in (SUMMED, Distance()):
        with pytest.raises(regard.OptionError, match="it does not know score="):
            regard.attention(query, key, value, score=score, kernel="fused")
    with pytest.raises(regard.OptionError, match=r"score\.temperature give scores beyond float64"):
        regard.attention(query, key, value, score=Cosine(1e-320), kernel="fused")
    with pytest.raises(regard.OptionError, match="it does not know normalize=Sparsemax"):
        regard.attention(query, key, value, score=Cosine(), normalize=Sparsemax(), kernel="fused")

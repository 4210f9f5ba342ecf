"""Other scores and normalisations: against plain loops, by slopes, and what goes with what."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard import DtypeError, OptionError, ShapeError, normalizers, scores
from regard.normalizers import Hard, Proportional, Sigmoid, Sparsemax
from regard.scores import Additive, Cosine, Distance, Features, General
from regard.textbook.operations import compute

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=n) for n in ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)))
GRAD = RNG.normal(size=(2, 4, 3, 3))
W, W_Q, W_K, V = (RNG.normal(size=n) for n in ((2, 2), (2, 4), (2, 4), (4,)))
SEES = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]], bool)

# What each is given, and how it is made of it.
SCORES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "dot": ({}, lambda: "dot"),
    "general": ({"W": W}, General),
    "additive": ({"W_q": W_Q, "W_k": W_K, "v": V}, Additive),
    "cosine": ({"temperature": np.array(0.7)}, Cosine),
    "distance": ({}, Distance),
    "features": ({}, Features),
}
NORMALIZERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "softmax": ({}, lambda: "softmax"),
    "sigmoid": ({"bias": np.array(-0.4)}, Sigmoid),
    "hard": ({}, Hard),
    "sparsemax": ({}, Sparsemax),
    "proportional": ({}, Proportional),
}
PAIRS = [
    pair
    for pair in itertools.product(SCORES, NORMALIZERS)
    if pair[1] != "proportional" or pair[0] == "features"
]


# in plain loops -----------------------------------------------------------------------------------


def score_of(kind: str, q: list[float], k: list[float]) -> float:
    pairs = [*zip(q, k, strict=True)]
    match kind:
        case "dot":
            return sum(a * b for a, b in pairs) / math.sqrt(len(q))
        case "general":
            width = range(len(q))
            return sum(q[d] * W[d, e] * k[e] for d in width for e in width)
        case "additive":
            hidden = 0.0
            for u in range(len(V)):
                inner = sum(a * W_Q[d, u] + b * W_K[d, u] for d, (a, b) in enumerate(pairs))
                hidden += V[u] * math.tanh(inner)
            return hidden
        case "cosine":
            lengths = math.hypot(*q) * math.hypot(*k)
            return sum(a * b for a, b in pairs) / lengths / 0.7 if lengths else 0.0
        case "distance":
            return -sum((a - b) ** 2 for a, b in pairs)
    positive = [[x + 1 if x > 0 else math.exp(x) for x in one] for one in (q, k)]
    return sum(a * b for a, b in zip(*positive, strict=True))


def weights_of(kind: str, row: dict[int, float]) -> dict[int, float]:
    """The weights of the keys that a row sees, from their logits."""
    match kind:
        case "softmax":
            total = sum(math.exp(x) for x in row.values())
            return {j: math.exp(x) / total for j, x in row.items()}
        case "sigmoid":
            return {j: 1 / (1 + math.exp(0.4 - x)) for j, x in row.items()}
        case "hard":
            best = min((j for j in row if row[j] == max(row.values())), default=-1)
            return {j: float(j == best) for j in row}
        case "proportional":
            total = sum(row.values())
            return {j: x / total for j, x in row.items()}
    # The threshold by halving: the sum falls as it rises.
    low, high = min(row.values(), default=0) - 1, max(row.values(), default=0)
    for _ in range(200):
        middle = (low + high) / 2
        above = sum(max(x - middle, 0) for x in row.values())
        low, high = (middle, high) if above > 1 else (low, middle)
    return {j: max(x - low, 0) for j, x in row.items()}


def in_loops(score: str, normalize: str, sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    output, weights = np.zeros((2, 4, 3, 3)), np.zeros((2, 4, 3, 5))
    for b, h, i in np.ndindex(2, 4, 3):
        keys = KEY[b, h // 2].tolist()
        seen = [j for j in range(5) if sees[i, j]]
        row = {j: score_of(score, QUERY[b, h, i].tolist(), keys[j]) for j in seen}
        for j, weight in weights_of(normalize, row).items():
            weights[b, h, i, j] = weight
            for e in range(3):
                output[b, h, i, e] += weight * VALUE[b, h // 2, j, e]
    return output, weights


def made(kinds: tuple[str, str], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """`score=` and `normalize=` of a call, of their own parameters or of `given` ones."""
    own = {}
    for name, (parameters, make) in zip(
        ("score", "normalize"), (SCORES[kinds[0]], NORMALIZERS[kinds[1]]), strict=True
    ):
        changed = {one: (given or {}).get(f"{name}.{one}", x) for one, x in parameters.items()}
        own[name] = make(**changed)
    return own


def parameters(kinds: tuple[str, str]) -> dict[str, Any]:
    (score, _), (normalize, _) = SCORES[kinds[0]], NORMALIZERS[kinds[1]]
    return {f"score.{name}": x for name, x in score.items()} | {
        f"normalize.{name}": x for name, x in normalize.items()
    }


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_output_and_weights_are_those_of_plain_loops(kinds, masked):
    sees = SEES if masked else np.ones_like(SEES)
    output, weights = in_loops(*kinds, sees)
    call = {**made(kinds), "mask": sees}
    result = regard.attention(QUERY, KEY, VALUE, **call, return_weights=True)
    np.testing.assert_allclose(result.weights, weights, 1e-12, 1e-14)
    np.testing.assert_allclose(result.output, output, 1e-12, 1e-14)


@pytest.mark.parametrize("kinds", PAIRS[1:], ids="-".join)
def test_an_explanation_has_the_numbers_of_the_call(kinds):
    call = {**made(kinds), "mask": SEES}
    result = regard.attention(QUERY, KEY, VALUE, **call, return_weights=True, kernel="reference")
    explanation = regard.explain(QUERY, KEY, VALUE, **call)
    np.testing.assert_array_equal(explanation["weights"].value, result.weights)
    np.testing.assert_array_equal(explanation.output, result.output)


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_gradients_are_the_slopes_of_the_loss(kinds):
    inputs = {"query": QUERY, "key": KEY, "value": VALUE, **parameters(kinds)}
    given = {"mask": SEES, "wrt": [*inputs]}
    grads = regard.gradients(QUERY, KEY, VALUE, GRAD, **given, **made(kinds))

    def loss(changed: dict[str, Any]) -> float:
        arrays = (changed[name] for name in ("query", "key", "value"))
        return float((regard.attention(*arrays, mask=SEES, **made(kinds, changed)) * GRAD).sum())

    rng = np.random.default_rng(1)
    for name, array in inputs.items():
        way = rng.normal(size=np.shape(array))
        up, down = (loss({**inputs, name: array + sign * 1e-6 * way}) for sign in (1, -1))
        found = grads.parameters[name] if "." in name else getattr(grads, name)
        assert np.shape(found) == np.shape(array)
        np.testing.assert_allclose(
            (found * way).sum(), (up - down) / 2e-6, 1e-6, 1e-7, err_msg=name
        )


def test_bias_scale_softcap_and_sink_have_gradients_beside_another_score():
    bias, sink = RNG.normal(size=(4, 1, 5)), RNG.normal(size=4)
    call = {"score": Distance(), "softcap": 2.0, "mask": SEES}

    def loss(bias: Any, sink: Any, scale: float) -> float:
        own = regard.attention(QUERY, KEY, VALUE, bias=bias, sink=sink, scale=scale, **call)
        return float((own * GRAD).sum())

    wrt = ("bias", "sink", "scale")
    point = [bias, sink, 0.7]
    grads = regard.gradients(
        QUERY, KEY, VALUE, GRAD, bias=bias, sink=sink, scale=0.7, wrt=wrt, **call
    )
    ways = (RNG.normal(size=bias.shape), RNG.normal(size=4), 1.0)
    for place, (name, way) in enumerate(zip(wrt, ways, strict=True)):
        up, down = (
            loss(*(*point[:place], point[place] + step * way, *point[place + 1 :]))
            for step in (1e-6, -1e-6)
        )
        slope = (np.asarray(getattr(grads, name)) * way).sum()
        np.testing.assert_allclose(slope, (up - down) / 2e-6, 1e-6, 1e-8, err_msg=name)


def test_a_hard_choice_has_no_gradient_unless_it_goes_straight_through():
    grads = regard.gradients(QUERY, KEY, VALUE, GRAD, normalize=Hard())
    np.testing.assert_array_equal(grads.query, 0)
    np.testing.assert_array_equal(grads.key, 0)
    straight = regard.gradients(QUERY, KEY, VALUE, GRAD, normalize=Hard(straight_through=True))
    d_weights = GRAD @ VALUE.repeat(2, axis=1).swapaxes(-1, -2)
    expected = d_weights @ KEY.repeat(2, axis=1) / math.sqrt(2)
    np.testing.assert_allclose(straight.query, expected, 1e-13)
    np.testing.assert_array_equal(straight.value, grads.value)


# single properties --------------------------------------------------------------------------------


def test_of_equal_scores_a_hard_choice_takes_the_first():
    weights = regard.attention(
        np.zeros((3, 2)), KEY[0, 0], VALUE[0, 0], mask=SEES, normalize=Hard(), return_weights=True
    ).weights
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])


def test_a_vector_of_zeros_has_the_cosine_zero_and_directions_alone_count():
    zeros = np.zeros((3, 2))
    call = {"score": Cosine(), "return_weights": True}
    even = regard.attention(zeros, KEY[0, 0], VALUE[0, 0], **call).weights
    np.testing.assert_allclose(even, 1 / 5, 1e-15)
    grads = regard.gradients(zeros, KEY[0, 0], VALUE[0, 0], GRAD[0, 0], score=Cosine())
    np.testing.assert_array_equal(grads.query, 0)  # there is no slope at a jump
    one, other = (
        regard.attention(QUERY * size, KEY / size, VALUE, **call).weights for size in (1, 1e-200)
    )
    np.testing.assert_allclose(one, other, 1e-12)


def test_what_is_hidden_is_absent_whatever_it_holds():
    key, value = KEY.copy(), VALUE.copy()
    key[:, :, 3:], value[:, :, 3:] = np.nan, np.inf
    sees = np.arange(5) < 3
    for kinds in PAIRS:
        calls = [
            regard.gradients(QUERY, *arrays, GRAD, mask=mask, **made(kinds))
            for arrays, mask in (
                ((key, value), sees),
                ((KEY[:, :, :3], VALUE[:, :, :3]), None),
            )
        ]
        np.testing.assert_array_equal(calls[0].key[:, :, 3:], 0)
        np.testing.assert_allclose(calls[0].query, calls[1].query, 1e-12, 1e-14, err_msg=str(kinds))
        outputs = [
            regard.attention(QUERY, key, value, mask=sees, **made(kinds)),
            regard.attention(QUERY, KEY[:, :, :3], VALUE[:, :, :3], **made(kinds)),
        ]
        np.testing.assert_allclose(*outputs, 1e-12, 1e-14, err_msg=str(kinds))


def test_half_types_are_computed_wide_and_rounded_once():
    arrays = [x.astype(np.float16) for x in (QUERY, KEY, VALUE)]
    wide = regard.attention(*(x.astype(float) for x in arrays), **made(("additive", "sparsemax")))
    half = regard.attention(*arrays, **made(("additive", "sparsemax")))
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, wide.astype(np.float16))


def test_a_row_of_additive_scores_has_its_bytes_alone_and_no_array_has_three_axes():
    hidden, first, second = RNG.normal(size=100), *RNG.normal(size=(2, 600, 100))
    operands = [(hidden, ("u",)), (first, ("i", "u")), (second, ("j", "u"))]
    tracemalloc.start()
    whole = compute("tanh_dot", ("i", "j"), operands, None, np.dtype(float))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6, "600 × 600 × 100 numbers are 288 MB"
    operands[1] = (first[77:78], ("i", "u"))
    alone = compute("tanh_dot", ("i", "j"), operands, None, np.dtype(float))
    np.testing.assert_array_equal(whole[77:78], alone)


@pytest.mark.parametrize("kinds", [("cosine", "softmax"), ("general", "softmax")])
def test_a_softmax_over_another_score_returns_lse_that_parts_are_merged_by(kinds):
    whole = regard.attention(QUERY, KEY, VALUE, **made(kinds), return_lse=True)
    parts = [
        regard.attention(QUERY, KEY[:, :, own], VALUE[:, :, own], **made(kinds), return_lse=True)
        for own in (slice(0, 2), slice(2, 5))
    ]
    merged = regard.merge([x.output for x in parts], [x.lse for x in parts])
    np.testing.assert_allclose(merged.output, whole.output, 1e-13)
    np.testing.assert_allclose(merged.lse, whole.lse, 1e-13)


def test_the_plain_ones_by_name_have_the_bytes_of_the_plain_call():
    plain = regard.attention(QUERY, KEY, VALUE)
    named = regard.attention(QUERY, KEY, VALUE, score="dot", normalize="softmax")
    np.testing.assert_array_equal(plain, named)


OF_ROWS = ["general", "cosine", "features"]


@pytest.mark.parametrize("kind", OF_ROWS)
def test_weights_of_chosen_rows_are_those_of_a_score_that_is_a_dot_product(kind):
    call = {"score": made((kind, "softmax"))["score"], "mask": SEES, "softcap": 3.0}
    arrays = [x.astype(np.float32) for x in (QUERY, KEY, VALUE)]
    whole = regard.attention(*arrays, **call, return_weights=True, return_lse=True)
    rows = regard.weights(*arrays[:2], whole.lse, rows=[2, 0], **call)
    np.testing.assert_allclose(rows, whole.weights[..., [2, 0], :], 2e-6)
    half = regard.weights(
        arrays[0], arrays[1][:, :, :3], whole.lse, **{**call, "mask": SEES[:, :3]}
    )
    np.testing.assert_allclose(half, whole.weights[..., :3], 4e-6)


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("kinds", PAIRS[1:], ids="-".join)
def test_a_cache_attends_with_every_score_and_normalization(kinds, dtype):
    query, key, value = (x.astype(np.float32) for x in (QUERY, KEY, VALUE))
    cache = regard.KVCache(dtype=dtype)
    for j in range(5):
        cache.append(key[:, :, j : j + 1], value[:, :, j : j + 1])
    # Over int8, only the arithmetic of float32 has the bytes of `attention`.
    last = cache.attend(query, precision="high", **made(kinds))
    held = [np.asarray(x, np.float32) for x in (cache.keys, cache.values)]
    call = {"causal": True, "offset": "end", **made(kinds)}
    np.testing.assert_array_equal(last, regard.attention(query, *held, **call))


@pytest.mark.parametrize("kinds", PAIRS[1:], ids="-".join)
def test_a_layer_has_every_score_and_normalization_and_their_gradients(kinds):
    rng = np.random.default_rng(4)
    x, grad, *weights = (
        rng.normal(size=(5, 4)),
        rng.normal(size=(5, 4)),
        *rng.normal(size=(4, 4, 4)),
    )
    layer = regard.MultiHeadAttention(*weights, heads=2)
    output = layer(x, causal=True, **made(kinds))
    packed = [(x @ one).reshape(5, 2, 2).swapaxes(0, 1) for one in weights[:3]]
    heads = regard.attention(*packed, causal=True, **made(kinds))
    np.testing.assert_allclose(output, heads.swapaxes(0, 1).reshape(5, 4) @ weights[3], 1e-12)
    shown = layer.explain(x, causal=True, **made(kinds))
    np.testing.assert_allclose(shown.output, output, 1e-12)
    point = {"x": x, "W_q": weights[0], **parameters(kinds)}
    found = layer.gradients(x, grad, wrt=[*point], causal=True, **made(kinds))

    def loss(changed: dict[str, Any]) -> float:
        own = regard.MultiHeadAttention(changed["W_q"], *weights[1:], heads=2)
        return float((own(changed["x"], causal=True, **made(kinds, changed)) * grad).sum())

    for name, array in point.items():
        way = rng.normal(size=np.shape(array))
        up, down = (loss({**point, name: array + sign * 1e-6 * way}) for sign in (1, -1))
        slope = found.parameters[name] if "." in name else getattr(found, name)
        np.testing.assert_allclose(
            (slope * way).sum(), (up - down) / 2e-6, 1e-6, 1e-7, err_msg=name
        )


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_one_plain_query_is_explained_as_it_is_given(kinds):
    arrays = QUERY[0, 0, 0], KEY[0, 0], VALUE[0, 0]
    output = regard.attention(*arrays, **made(kinds))
    np.testing.assert_allclose(regard.explain(*arrays, **made(kinds)).output, output, 1e-14)
    with_loss = regard.explain(*arrays, **made(kinds), grad_output=np.ones(3))
    grads = regard.gradients(*arrays, np.ones(3), **made(kinds))
    found = with_loss["d_queries"].value.reshape(2)
    np.testing.assert_allclose(found, grads.query, 1e-12, 1e-14)


# what does not fit --------------------------------------------------------------------------------


def attend(**options: Any) -> Any:
    return regard.attention(QUERY, KEY, VALUE, **options)


def filled() -> regard.KVCache:
    cache = regard.KVCache()
    cache.append(KEY, VALUE)
    return cache


def layer() -> regard.MultiHeadAttention:
    return regard.MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))


# fmt: off
REFUSED = {
    "W of another width": (ShapeError, "score.W has shape (3, 3) but queries and keys are 2 wide",
                           lambda: attend(score=General(np.eye(3)))),
    "W that is no matrix": (ShapeError, "score.W has shape (2,) but must be a matrix (D, D)",
                            lambda: General([1.0, 2.0])),
    "hidden widths that differ": (ShapeError, "score.W_k has 3 columns but score.v has 4 numbers",
                                  lambda: Additive(W_Q, W_K[:, :3], V)),
    "rows that are no features": (ShapeError, "score.W_q has 3 rows but queries and keys are 2",
                                  lambda: attend(score=Additive(np.ones((3, 4)), W_K, V))),
    "a temperature of zero": (OptionError, "score.temperature is 0.0; it must be above 0",
                              lambda: Cosine(0.0)),
    "a bias without end": (OptionError, "normalize.bias is inf; it must be finite",
                           lambda: Sigmoid(math.inf)),
    "no flag": (DtypeError, "normalize.straight_through must be True or False",
                lambda: Hard(straight_through=1)),
    "an unknown map": (OptionError, "score.map is 'relu'; it must be \"elu+1\"",
                       lambda: Features("relu")),
    "an unknown score": (OptionError, "score is 'manhattan'; it must be \"dot\" or one of",
                         lambda: attend(score="manhattan")),
    "a name for an object": (DtypeError, "pass regard.scores.Cosine(…)",
                             lambda: attend(score="cosine")),
    "a class": (DtypeError, "the class Sparsemax, which needs brackets",
                lambda: attend(normalize=Sparsemax)),
    "one for the other": (DtypeError, "score must be \"dot\" or one of",
                          lambda: attend(score=Hard())),
    "a sink without a softmax": (OptionError, "sink takes part in the sum of a softmax",
                                 lambda: attend(normalize=Sigmoid(), sink=0.0)),
    "lse without a softmax": (OptionError, "which Sparsemax() does not have; leave it out",
                              lambda: attend(normalize=Sparsemax(), return_lse=True)),
    "shares of a dot product": (OptionError, "pass score=regard.scores.Features()",
                                lambda: attend(normalize=Proportional())),
    "shares that are scaled": (OptionError, "scale changes scores, of which Proportional()",
                               lambda: attend(score=Features(), normalize=Proportional(),
                                              scale=2.0)),
    "the fused kernel": (OptionError, "it does not know score=Distance",
                         lambda: attend(score=Distance(), kernel="fused")),
    "weights of sums that are none": (OptionError, "weights takes scores that are dot products",
                                      lambda: regard.weights(QUERY, KEY, QUERY[..., 0],
                                                             score=Distance())),
    "a name for a cache": (DtypeError, "pass regard.scores.Cosine(…)",
                           lambda: filled().attend(QUERY, score="cosine")),
    "a parameter that a layer has not": (OptionError, "wrt has 'score.W'; it may have",
                                         lambda: layer().gradients(np.eye(2), np.eye(2),
                                                                   wrt="score.W",
                                                                   score=Cosine())),
    "a scale that is not there": (OptionError, "pass scale=1.0, or leave it out",
                                  lambda: regard.gradients(QUERY, KEY, VALUE, GRAD, wrt="scale",
                                                           score=Distance())),
    "a parameter that is not there": (OptionError, "wrt has 'score.W'; it may have",
                                      lambda: regard.gradients(QUERY, KEY, VALUE, GRAD,
                                                               wrt="score.W", score=Cosine())),
    "an output of another call": (OptionError, "this call has score=Distance(); leave them out",
                                  lambda: regard.gradients(QUERY, KEY, VALUE, GRAD, output=GRAD,
                                                           lse=GRAD[..., 0], score=Distance())),
    "a gradient of no lse": (OptionError, "Sparsemax() has no log-sum-exp; leave it out",
                             lambda: regard.gradients(QUERY, KEY, VALUE, GRAD,
                                                      grad_lse=GRAD[..., 0],
                                                      normalize=Sparsemax())),
}
# fmt: on


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case):
    error, words, call = REFUSED[case]
    with pytest.raises(error) as refused:
        call()
    assert words in str(refused.value)


def test_parameters_are_copied_and_cannot_be_written():
    matrix = np.eye(2)
    score = General(matrix)
    matrix[0, 0] = 5.0
    assert score.W[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        score.W[0, 0] = 5.0


@pytest.mark.parametrize("module", [scores, normalizers])
def test_every_object_shows_what_it_was_given(module):
    assert sorted(dir(module)) == sorted(module.__all__)
    assert repr(General(W)) == "General(W (2, 2))"
    assert repr(Cosine(0.5)) == "Cosine(temperature=0.5)"
    assert repr(Hard()) == "Hard(straight_through=False)"
    assert repr(Sparsemax()) == "Sparsemax()"


# linear attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "offset"), [(150, None), (1, "end"), (70, 130), (200, -3), (130, -140), (90, 500)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_is_that_of_its_declared_steps(causal, queries, offset):
    query, key = RNG.normal(size=(2, 4, queries, 3)), RNG.normal(size=(2, 2, 150, 3))
    value = RNG.normal(size=(1, 2, 150, 5))
    call = {"causal": causal, "offset": offset if causal else None}
    steps = regard.attention(query, key, value, score=Features(), normalize=Proportional(), **call)
    found = regard.linear_attention(query, key, value, **call)
    np.testing.assert_allclose(found, steps, 1e-12, 1e-14)


def test_linear_attention_never_meets_a_later_key_and_has_the_dtype_of_its_inputs():
    query, key, value = (RNG.normal(size=(100, 2)).astype(np.float32) for _ in range(3))
    odd = [x.copy() for x in (key, value)]
    odd[0][80:], odd[1][80:] = np.nan, np.inf
    whole = regard.linear_attention(query, key, value, causal=True)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(
        regard.linear_attention(query, *odd, causal=True)[:80], whole[:80]
    )
    empty = regard.linear_attention(query, key[:0], value[:0])
    np.testing.assert_array_equal(empty, np.zeros((100, 2)))
    with pytest.raises(OptionError, match="feature_map is 'softmax'"):
        regard.linear_attention(query, key, value, feature_map="softmax")

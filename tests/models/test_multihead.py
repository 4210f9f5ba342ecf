"""MultiHeadAttention: given weights around the same attention, and every step of it explained."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import oracle
import regard
from regard import DtypeError, MultiHeadAttention, OptionError
from regard.masks import Boolean, Causal

RNG = np.random.default_rng(7)
M, N, H, G, D, E, F, L, S = 6, 5, 4, 2, 3, 2, 7, 5, 8
UNIT = 2.0**-53
# Products of M, D, S, E·H terms follow each other; every one may round once per term.
TERMS = M + D + S + H * E
SLACK = 64 * TERMS * UNIT  # the softmax in between magnifies what came before


def weights(**bias: bool) -> dict[str, np.ndarray]:
    shapes = {"W_q": (M, H * D), "W_k": (N, G * D), "W_v": (N, G * E), "W_o": (H * E, F)}
    given = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    for name in bias:
        given[name] = RNG.normal(size=shapes["W" + name[1:]][1])
    return given


def by_hand(x, context, given, visible=lambda i, j: True):
    """Plain loops from the definition: project, cut into heads, attend, put side by side."""

    def times(rows, matrix, bias):
        return [
            [
                math.fsum([*(a * b for a, b in zip(row, column, strict=True)), add])
                for column, add in zip(matrix.T, bias, strict=True)
            ]
            for row in rows
        ]

    def bias(name):
        return given.get(name, np.zeros(given["W" + name[1:]].shape[1]))

    q = times(x, given["W_q"], bias("b_q"))
    k = times(context, given["W_k"], bias("b_k"))
    v = times(context, given["W_v"], bias("b_v"))
    merged = []
    for i in range(len(x)):
        row = []
        for h in range(H):
            g = h // (H // G)
            keys = [j for j in range(len(context)) if visible(i, j)]
            scores = [
                math.fsum(q[i][h * D + d] * k[j][g * D + d] for d in range(D)) / math.sqrt(D)
                for j in keys
            ]
            exponentials = [math.exp(score - max(scores)) for score in scores]
            total = math.fsum(exponentials)
            row += [
                math.fsum(
                    w / total * v[j][g * E + e] for w, j in zip(exponentials, keys, strict=True)
                )
                for e in range(E)
            ]
        merged.append(row)
    return np.array(times(merged, given["W_o"], bias("b_o")))


@pytest.mark.parametrize("bias", [(), ("b_q", "b_k", "b_v", "b_o")], ids=["plain", "biases"])
def test_cross_attention_with_grouped_heads_is_what_the_definition_says(bias):
    given = weights(**dict.fromkeys(bias, True))
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    layer = MultiHeadAttention(**given, heads=H, key_heads=G)
    np.testing.assert_allclose(
        layer(x, context), by_hand(x, context, given), rtol=SLACK, atol=SLACK
    )


def test_causal_cross_attention_hides_what_comes_later():
    given = weights()
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    output = MultiHeadAttention(**given, heads=H, key_heads=G)(
        x, context, causal=True, offset="end"
    )
    expected = by_hand(x, context, given, lambda i, j: j <= i + S - L)
    np.testing.assert_allclose(output, expected, rtol=SLACK, atol=SLACK)


def test_the_explanation_ends_in_what_the_call_returns():
    layer = MultiHeadAttention(**weights(b_q=True, b_o=True), heads=H, key_heads=G)
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    explanation = layer.explain(x, context, causal=True, offset=0, query_labels=list("abcde"))
    np.testing.assert_allclose(
        explanation.output, layer(x, context, causal=True, offset=0), rtol=SLACK, atol=SLACK
    )
    names = list(explanation.steps)
    assert names.index("query_products") < names.index("projected_queries") < names.index("queries")
    assert explanation.why("queries", "b", 1, head=2).open(0).step == "projected_queries"
    assert explanation.steps["projected_output"].row_labels == ("a", "b", "c", "d", "e")


def test_every_batch_element_is_answered_as_if_alone():
    layer = MultiHeadAttention(**weights(), heads=H, key_heads=G)
    x, context = RNG.normal(size=(2, 3, L, M)), RNG.normal(size=(3, S, N))
    result = layer(x, context, return_weights=True)
    assert result.output.shape == (2, 3, L, F)
    assert result.weights.shape == (2, 3, H, L, S)
    for b, c in np.ndindex(2, 3):
        np.testing.assert_array_equal(result.output[b, c], layer(x[b, c], context[c]))


def test_without_an_output_projection_the_heads_stand_side_by_side():
    given = weights()
    del given["W_o"]
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    layer = MultiHeadAttention(**given, heads=H, key_heads=G)
    merged = layer(x, context)
    assert merged.shape == (L, H * E)
    np.testing.assert_allclose(
        layer.explain(x, context).steps["merged"].value, merged, rtol=SLACK, atol=SLACK
    )


def test_one_head_is_attention_on_the_projections():
    W_q, W_k, W_v = RNG.normal(size=(3, M, D))
    x = RNG.normal(size=(L, M))
    expected = oracle.attend(x @ W_q, x @ W_k, x @ W_v).output
    np.testing.assert_allclose(
        MultiHeadAttention(W_q, W_k, W_v)(x), expected, rtol=SLACK, atol=SLACK
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_result_has_the_dtype_of_inputs_and_weights(dtype):
    given = {name: array.astype(dtype) for name, array in weights().items()}
    layer = MultiHeadAttention(**given, heads=H, key_heads=G)
    x, context = RNG.normal(size=(L, M)).astype(dtype), RNG.normal(size=(S, N)).astype(dtype)
    result = layer(x, context, return_weights=True)
    assert result.output.dtype == result.weights.dtype == np.dtype(dtype)
    exact = MultiHeadAttention(
        **{name: array.astype(np.float64) for name, array in given.items()}, heads=H, key_heads=G
    )(x.astype(np.float64), context.astype(np.float64))
    bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[np.dtype(dtype).name]
    # Half types are computed in float32 and rounded once: half a unit of the result's last bit.
    computed = 64 * TERMS * 2.0 ** -min(max(bits, 23), 52)
    bound = 2.0 ** -(bits + 1) * np.abs(exact) + computed * (1 + np.abs(exact))
    np.testing.assert_array_less(np.abs(result.output.astype(np.float64) - exact), bound)


def test_masks_and_options_reach_every_head():
    layer = MultiHeadAttention(**weights(), heads=H, key_heads=G)
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    hidden = Boolean(np.arange(S) < 3) & ~Causal()
    result = layer(x, context, mask=hidden, offset=-2, return_weights=True)
    visible = (np.arange(S) < 3) & (np.arange(S) > np.arange(L)[:, None] - 2)
    np.testing.assert_array_equal(result.weights != 0, np.broadcast_to(visible, (H, L, S)))
    assert np.abs(layer(x, context, softcap=0.5) - layer(x, context)).max() > SLACK
    assert np.abs(layer(x, context, sink=1.0) - layer(x, context)).max() > SLACK


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"heads": 5}, regard.OptionError, ("heads", "5", "2")),
        ({"heads": 0}, regard.OptionError, ("heads", "0")),
        ({"heads": 2.0}, regard.DtypeError, ("heads", "int", "2.0")),
        ({"heads": True}, regard.DtypeError, ("heads", "int", "True")),
        ({"W_q": np.ones((M, 11))}, regard.ShapeError, ("W_q", "11", "4")),
        ({"W_q": np.ones((M, 8))}, regard.ShapeError, ("W_q", "W_k", "6", "4", "each 2 wide")),
        ({"W_v": np.ones((4, G * E))}, regard.ShapeError, ("W_k", "W_v", "5", "4")),
        ({"W_o": np.ones((9, F))}, regard.ShapeError, ("W_o", "9", "8")),
        ({"W_k": np.ones(N)}, regard.ShapeError, ("W_k", "1")),
        ({"b_q": np.ones(3)}, regard.ShapeError, ("b_q", "W_q", "3", "12")),
        ({"W_o": None, "b_o": np.ones(F)}, regard.OptionError, ("b_o", "W_o")),
        ({"W_q": np.ones((M, H * D), complex)}, regard.DtypeError, ("W_q", "complex")),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_with_both_numbers(changes, error, words):
    with pytest.raises(error) as caught:
        MultiHeadAttention(**{**weights(), "heads": H, "key_heads": G, **changes})
    for word in words:
        assert word in str(caught.value)


def test_inputs_that_do_not_fit_are_refused_by_name_with_both_numbers():
    layer = MultiHeadAttention(**weights(), heads=H, key_heads=G)
    with pytest.raises(regard.ShapeError, match=r"x is 4 wide but W_q has 6 rows"):
        layer(np.ones((L, 4)), np.ones((S, N)))
    with pytest.raises(regard.ShapeError, match=r"context is 4 wide but W_k has 5 rows"):
        layer(np.ones((L, M)), np.ones((S, 4)))
    with pytest.raises(regard.ShapeError, match=r"x is 6 wide but W_k has 5 rows"):
        layer(np.ones((L, M)))
    with pytest.raises(regard.ShapeError, match=r"do not broadcast"):
        layer(np.ones((2, L, M)), np.ones((3, S, N)))
    with pytest.raises(regard.ShapeError, match=r"at least 2"):
        layer(np.ones(M), np.ones((S, N)))
    with pytest.raises(regard.OptionError, match="offset"):
        layer(np.ones((L, M)), np.ones((S, N)), causal=True)


def test_a_layer_prints_as_its_heads_and_shapes():
    layer = MultiHeadAttention(**weights(), heads=H, key_heads=G)
    assert repr(layer) == (
        "MultiHeadAttention(heads=4, key_heads=2, W_q (6, 12), W_k (5, 6), W_v (5, 4), W_o (8, 7))"
    )


@pytest.mark.parametrize("name", ["return_lse", "out", "nonsense"])
def test_an_option_that_a_layer_does_not_take_is_refused_by_name(name):
    layer = MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
    with pytest.raises(TypeError, match=f"has no argument {name}: .* mask, bias"):
        layer(np.eye(2), **{name: True})


def test_a_layer_without_weights_is_refused_by_the_name_of_the_weight():
    with pytest.raises(DtypeError, match=r"^W_q "):
        MultiHeadAttention(None, None, None)


@pytest.mark.parametrize("labels", [3, "ab", [1, 2]])
@pytest.mark.parametrize("name", ["query_labels", "key_labels"])
def test_labels_of_a_layer_are_a_sequence_of_strings(name, labels):
    layer = MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
    with pytest.raises(DtypeError, match=f"{name} must be a sequence of strings"):
        layer.explain(np.eye(2), **{name: labels})


def test_a_precision_that_is_an_array_is_refused_by_a_layer():
    layer = MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
    with pytest.raises(OptionError, match="precision must be"):
        layer(np.eye(2), precision=np.ones(2))


# gradients ----------------------------------------------------------------------------------------


def slope(layer_of, given, grad, name, way):
    """How the loss Σ dR∘R changes along one way, by central differences to the fourth order."""

    def difference(step):
        down, up = (
            math.fsum((layer_of({**given, name: given[name] + by * way}) * grad).ravel())
            for by in (-step, step)
        )
        return (up - down) / (2 * step)

    return (4 * difference(1e-4) - difference(2e-4)) / 3


@pytest.mark.parametrize(
    "kernel", ["reference", pytest.param("fused", marks=pytest.mark.needs("fused"))]
)
@pytest.mark.parametrize("crossed", [True, False])
def test_gradients_of_a_layer_are_the_slopes_of_its_output(kernel, crossed):
    given = {**weights(b_q=True, b_k=True, b_v=True, b_o=True), "x": RNG.normal(size=(2, 3, M))}
    given["bias"], given["sink"] = RNG.normal(size=(3, 1)), RNG.normal(size=H)
    if crossed:
        given["context"] = RNG.normal(size=(4, N))  # the same one for both elements of the batch
    else:
        given |= {name: RNG.normal(size=(M, *given[name].shape[1:])) for name in ("W_k", "W_v")}

    def layer_of(given, run=MultiHeadAttention.__call__, **options):
        own = {name: array for name, array in given.items() if name[:2] in ("W_", "b_")}
        layer = MultiHeadAttention(**own, heads=H, key_heads=G)
        named = {name: given[name] for name in ("context", "bias", "sink") if name in given}
        return run(layer, given["x"], causal=True, offset=0, kernel=kernel, **named, **options)

    grad = RNG.normal(size=(2, 3, F))
    found = layer_of(given, MultiHeadAttention.gradients, grad_output=grad, wrt=given)
    for name in given:
        assert getattr(found, name).shape == given[name].shape
        for _ in range(3):
            way = RNG.normal(size=given[name].shape)
            expected = slope(layer_of, given, grad, name, way)
            rise = (getattr(found, name) * way).sum()
            np.testing.assert_allclose(rise, expected, 1e-8, 1e-8, err_msg=name)
    assert found.scale is None


def test_gradients_of_a_layer_without_w_o_and_of_one_input():
    given = weights()
    del given["W_o"]
    layer = MultiHeadAttention(**given, heads=H, key_heads=G)
    x, context = RNG.normal(size=(L, M)), RNG.normal(size=(S, N))
    whole = layer.gradients(x, np.ones((L, H * E)), context)
    assert [name for name, one in whole._asdict().items() if one is not None] == [
        *("x", "context", "W_q", "W_k", "W_v")
    ]
    one = layer.gradients(x, np.ones((L, H * E)), context, wrt="W_k")
    np.testing.assert_array_equal(one.W_k, whole.W_k)
    assert one.x is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_gradients_of_a_layer_have_the_dtypes_of_its_inputs_rounded_once(dtype):
    narrow = {name: array.astype(dtype) for name, array in weights(b_o=True).items()}
    x, context = RNG.normal(size=(2, L, M)).astype(dtype), RNG.normal(size=(2, S, N)).astype(dtype)
    grad = RNG.normal(size=(2, L, F)).astype(dtype)
    layer = MultiHeadAttention(**narrow, heads=H, key_heads=G)
    wide = {name: array.astype(np.float64) for name, array in narrow.items()}
    exact = MultiHeadAttention(**wide, heads=H, key_heads=G).gradients(
        *(array.astype(np.float64) for array in (x, grad, context))
    )
    found = layer.gradients(x, grad, context)
    half_an_ulp = 2.0**-11 if dtype == np.float16 else float(ml_dtypes.finfo(dtype).eps) / 2
    for name in ("x", "context", *narrow):
        one, other = getattr(found, name), getattr(exact, name)
        assert one.dtype == dtype
        allowed = 1.01 * half_an_ulp if dtype != np.float32 else 64 * half_an_ulp
        least = 1e-5 * abs(other).max()
        np.testing.assert_allclose(one.astype(np.float64), other, allowed, least, err_msg=name)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"wrt": "W_x"}, OptionError, 'wrt has \'W_x\'; it may have "x", "W_q", "W_k"'),
        ({"wrt": 3}, DtypeError, "wrt must be names of inputs, not 3"),
        ({"wrt": "bias"}, OptionError, 'wrt has "bias", but the call has no bias'),
        ({"grad_output": np.ones((2, 2))}, regard.ShapeError, "grad_output has shape .2, 2. but"),
        ({"grad": 1}, TypeError, "grad"),
    ],
    ids=str,
)
def test_bad_arguments_of_gradients_are_named(change, error, words):
    layer = MultiHeadAttention(np.eye(4), np.eye(4), np.eye(4), heads=2)
    with pytest.raises(error, match=words):
        layer.gradients(**{"x": np.ones((3, 4)), "grad_output": np.ones((3, 4)), **change})

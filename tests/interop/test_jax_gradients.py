"""Gradients through JAX's attention call on regard: those of JAX, and of differences."""

from __future__ import annotations

import numpy as np
import pytest

from calls import recording_fast_calls_too

try:
    import jax
    import jax.numpy as jnp
    from jax import test_util

    from regard.interop.jax import dot_product_attention
except ImportError:
    jax = None

pytestmark = [pytest.mark.needs("jax"), pytest.mark.needs("fused")]

B, T, S, N, K, H = 2, 3, 4, 4, 2, 3
NAMES = ("query", "key", "value", "bias")
# Two correct ways in float64 to gradients whose sums have at most a hundred terms of about 1.
SAME = 100 * 2.0**-52


@pytest.fixture(autouse=True)
def in_double_precision():
    if jax is None:
        yield
        return
    with jax.enable_x64(True):
        yield


def numbers(*shape, dtype="float64", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def given(dtype="float64", bias=(1, N, T, S)):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, 2), bias
    return [numbers(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


def theirs(query, key, value, bias=None, mask=None, is_causal=False, scale=None, **ends):
    """Output and residual in JAX's own operations, in float64 throughout, unlike its function."""
    key, value = (jnp.repeat(one, N // K, 2) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    scores = scores if bias is None else scores + bias
    rows, keys = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    seen = jnp.ones(scores.shape, bool) if mask is None else jnp.broadcast_to(mask, scores.shape)
    seen &= (keys <= rows) | (not is_causal)
    for name, places in (("query_seq_lengths", rows), ("key_value_seq_lengths", keys)):
        if name in ends:
            seen &= places < ends[name][:, None, None, None]
    some = seen.any(-1, keepdims=True)
    scores = jnp.where(seen, scores, jnp.where(some, -jnp.inf, 0))
    weights = jnp.where(some, jax.nn.softmax(scores), 0)
    output = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return output, jax.nn.logsumexp(scores, -1).swapaxes(1, 2)


CASES = {
    "plain": lambda: {},
    "causal": lambda: {"is_causal": True},
    "scale": lambda: {"scale": -0.4},
    "mask": lambda: {"mask": numbers(1, N, T, S, seed=7) > -0.5},
    "lengths": lambda: {
        "query_seq_lengths": lengths(2, T),
        "key_value_seq_lengths": lengths(3, S),
    },
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_their_gradients_are_slopes(case):
    def call(*arrays):
        output, lse = dot_product_attention(*arrays, **CASES[case](), return_residual=True)
        return output, jnp.where(jnp.isfinite(lse), lse, 0)

    test_util.check_grads(call, given(), order=2, modes=["rev"], rtol=1e-6, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("bias", [(B, N, T, S), (1, N, T, S), (B, 1, 1, S), (T, S)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_jax(case, bias):
    options = CASES[case]()
    to = numbers(B, T, N, 2, seed=8), numbers(B, T, N, seed=9)

    def loss(function, *arrays):
        output, lse = function(*arrays, **options)
        return (output * to[0]).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * to[1]).sum()

    def ours(*arrays, **options):
        return dot_product_attention(*arrays, **options, return_residual=True)

    arrays = given(bias=bias)
    if case == "lengths":  # rows that see nothing have no residual to compare
        to = to[0], jnp.zeros_like(to[1])
    for transform in (lambda f: f, jax.jit):
        found = [
            transform(jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2, 3)))(*arrays)
            for f in (ours, theirs)
        ]
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=SAME, atol=SAME)


def square(function, **options):
    def loss(*arrays):
        output = function(*arrays, is_causal=True, **options)
        output = output[0] if isinstance(output, tuple) else output
        return (output**2).sum()

    return loss


WAYS = {
    "value_and_grad": lambda f, q, k, v, b: jax.value_and_grad(f, (0, 3))(q, k, v, b),
    "jit_within": lambda f, q, k, v, b: jax.grad(jax.jit(f), (1, 2))(q, k, v, b),
    "one_array_thrice": lambda f, q, k, v, b: jax.grad(lambda x: f(x, x[:, :, :K], x[:, :, :K]))(q),
    # A shared key has a gradient for each mapped element.
    "vmap": lambda f, q, k, v, b: jax.vmap(jax.grad(f, (0, 1, 3)), (0, None, None, None))(
        jnp.stack([q, 2 * q]), k, v, b
    ),
    "grad_of_vmap": lambda f, q, k, v, b: jax.grad(
        lambda k: jax.vmap(f, (0, None, None, 0))(
            jnp.stack([q, 2 * q]), k, v, jnp.stack([b, -b])
        ).sum()
    )(k),
    "checkpoint": lambda f, q, k, v, b: jax.jit(jax.grad(jax.checkpoint(f), (0, 2)))(q, k, v, b),
    "scan": lambda f, q, k, v, b: jax.grad(
        lambda k: jax.lax.scan(lambda c, q: (c + f(q, k, v, b), None), 0.0, jnp.stack([q, -q]))[0]
    )(k),
    "second": lambda f, q, k, v, b: jax.jacrev(jax.grad(f, (0, 3)), (1, 2))(q, k, v, b),
    "second_mapped": lambda f, q, k, v, b: jax.jit(
        jax.vmap(jax.jacrev(jax.grad(f, 2), 2), (None, None, 0, None))
    )(q, k, jnp.stack([v, 2 * v]), b),
}


FULL = {"grad_of_vmap", "checkpoint", "scan", "second_mapped"}  # compiling takes long


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.full] * (way in FULL)) for way in WAYS]
)
def test_transforms_go_through(way):
    found = [
        jax.tree.leaves(WAYS[way](square(f), *given())) for f in (dot_product_attention, theirs)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=10 * SAME, atol=10 * SAME)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_gradients_of_narrow_types_are_rounded_once(name):
    arrays = given(name)
    to = numbers(B, T, N, 2, seed=8, dtype=name)

    def gradients(arrays, to):
        output, pull = jax.vjp(dot_product_attention, *arrays)
        assert output.dtype == to.dtype
        return pull(to)

    found = gradients(arrays, to)
    exact = gradients([one.astype("float64") for one in arrays], to.astype("float64"))
    unit = float(jnp.finfo(name).eps) / 2
    for ours, whole in zip(found, exact, strict=True):
        assert ours.dtype == name
        atol = 100 * 2.0**-24 + 2.0**-24
        np.testing.assert_allclose(ours.astype("float64"), whole, rtol=unit, atol=atol)


def test_nan_in_what_is_hidden_poisons_no_gradient_unlike_in_jax():
    q, k, v, b = given()
    few = {"key_value_seq_lengths": lengths(2, 2)}
    dirty = [one.at[:, 2:].set(jnp.nan) for one in (k, v)]
    for order in (1, 2):

        def made(k, v, order=order):
            f = jax.grad(square(lambda *a, **o: dot_product_attention(*a, **o, **few)), (0, 1, 2))
            if order == 2:
                first, f = f, jax.grad(lambda *a: sum((x**2).sum() for x in first(*a)), (0, 1, 2))
            return f(q, k, v, b)

        for one, other in zip(made(*dirty), made(k, v), strict=True):
            np.testing.assert_array_equal(one, other)


def test_only_the_gradients_that_are_asked_for_are_computed():
    arrays = given()
    text = str(jax.make_jaxpr(jax.grad(square(dot_product_attention), 1))(*arrays))
    assert "wrt=('key',)" in text
    with recording_fast_calls_too() as ran:
        jax.grad(square(dot_product_attention))(*arrays)
    assert len(ran) == 1  # the output is not computed again


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["jvp", "jacfwd", "hessian", "linearize"])
def test_forward_mode_is_refused_by_name(way, compiled):
    arrays = given()
    transforms = {
        "jvp": lambda f: lambda q: jax.jvp(f, (q,), (q,)),
        "linearize": lambda f: lambda q: jax.linearize(f, q)[1](q),
        "jacfwd": jax.jacfwd,
        "hessian": jax.hessian,
    }
    call = transforms[way](lambda q: square(dot_product_attention)(q, *arrays[1:]))
    with pytest.raises(NotImplementedError, match=r"no forward mode.*jacrev"):
        jax.block_until_ready((jax.jit(call) if compiled else call)(arrays[0]))


def test_third_derivatives_are_refused_by_name():
    arrays = given()
    call = jax.jacrev(jax.jacrev(jax.jacrev(square(dot_product_attention))))
    with pytest.raises(NotImplementedError, match=r"third.*jax\.nn\.dot_product_attention"):
        call(*arrays)


def test_a_gradient_of_something_else_goes_past():
    query = numbers(B, T, N, H)

    def loss(weight):
        frozen = jax.lax.stop_gradient(query * weight)
        return (dot_product_attention(frozen, query, query) * weight).sum()

    expected = dot_product_attention(query * 2.0, query, query).sum()
    np.testing.assert_allclose(jax.grad(loss)(2.0), expected, rtol=1e-5)

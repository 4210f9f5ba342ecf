"""Functions of JAX that NumPy computes from their traces give what JAX gives."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.diagnosis.process import jax_traces
from regard.diagnosis.process.jax_traces import Traces, Untraceable

pytestmark = pytest.mark.needs("jax")


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=(3, 4)) for name in "qkv"}
    return arrays | {"mask": np.ones((3, 3), bool), "number": 2, "none": None}


def operations(own):
    """Many operations of JAX, from ordinary code."""
    import jax
    import jax.numpy as jnp

    q, k, v, mask = (own[name] for name in ("q", "k", "v", "mask"))
    scores = jnp.where(jnp.tril(mask), q @ k.T / jnp.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    total, before = jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(4), v, reverse=True)
    nothing = jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(4), v[:0])
    largest = jnp.argmax(scores, -1)
    return {
        "attention": weights @ v,
        "scan": (total, before, nothing),
        "loops": jax.lax.fori_loop(0, 3, lambda n, c: c + v[n], jnp.zeros(4)),
        "branch": jax.lax.cond(v[0, 0] > own["number"], jnp.sum, jnp.max, v),
        "gradient": jax.grad(lambda x: (jax.nn.softmax(x @ k.T) @ v).sum())(q),
        "by cell": (jax.nn.relu(v), jax.nn.sigmoid(v), jnp.clip(v, 0, 1), jax.nn.gelu(v), v % 2),
        "powers": (v**3, jnp.exp2(v), jax.lax.rsqrt(jnp.abs(v) + 1), jnp.exp2(v) ** 0.5),
        "sums": (jnp.cumsum(v, 0), jax.lax.cumsum(v, 1, True), jnp.var(v), jnp.any(v > 1)),
        "of integers": (jnp.arange(-3, 4) // 2, largest, jax.nn.one_hot(largest, 3)),
        "places": (
            v[::-1],
            v[:, ::2],
            jnp.split(v, 3),
            jnp.concatenate([q, k]),
            jnp.squeeze(v[None]),
        ),
        "blocks": (
            jax.lax.dynamic_slice(v, (2, 0), (2, 4)),
            jax.lax.dynamic_update_slice(v, jnp.ones((2, 2)), (5, 1)),
        ),
        "products": (jnp.einsum("ij,kj->ik", q, k), jnp.tensordot(q, k), jax.vmap(jnp.dot)(q, k)),
        "of JAX itself": (k[largest], k.at[1].set(0), jnp.sort(v), (v.astype("bfloat16") @ q.T)),
    }


def test_a_trace_gives_what_jax_gives_for_other_numbers_too():
    import jax

    traces = Traces()
    for seed in (0, 1):
        given = arguments(seed)
        got = traces.run("one", operations, given)
        converted = jax.tree.map(lambda one: one, given) | {
            name: jax.numpy.asarray(one)
            for name, one in given.items()
            if isinstance(one, np.ndarray)
        }
        expected = operations(converted)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert one.dtype == other.dtype
            pair = (np.asarray(x, float) for x in (one, other))
            np.testing.assert_allclose(*pair, rtol=2e-5, atol=1e-6)
    assert len(traces.known) == 1
    assert traces.usable


@pytest.mark.parametrize(
    "function",
    [
        lambda own: own["q"] if own["q"].sum() > 0 else own["k"],
        lambda own: np.asarray(own["q"]),
        lambda own: own["q"][own["q"] > 0],
    ],
    ids=["a branch in Python", "NumPy", "a shape that depends on numbers"],
)
def test_code_that_looks_at_numbers_is_run_by_jax(function):
    traces = Traces()
    for _ in range(2):
        with pytest.raises(Untraceable):
            traces.run("one", function, arguments())
    assert not traces.known


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(TypeError, match="dot_general"):
        Traces().run("one", lambda own: own["q"] @ own["k"], arguments())


def test_a_trace_that_gives_something_else_than_jax_is_not_used(monkeypatch):
    operation = {"tanh": lambda parameters, a: np.tanh(a) * 1.001}
    monkeypatch.setattr(jax_traces, "OPERATIONS", {**jax_traces.OPERATIONS, **operation})
    traces = Traces()
    with pytest.raises(Untraceable):
        traces.run("one", operations, arguments())
    assert not traces.usable


def test_random_numbers_are_noticed_though_a_trace_has_them_as_constants():
    rng = np.random.default_rng(0)

    def noisy(q, k, v):
        import jax

        scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
        return jax.nn.softmax(scores + rng.normal()) @ v * (1 + rng.normal())

    found = regard.diagnose(noisy, library="jax")
    assert found.verdict == "wrong", found

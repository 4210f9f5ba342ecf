"""JAX's attention call on regard: the same meaning, also within jit and vmap."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest

import regard
from bounds import assert_within, error_bounds, precision_of
from calls import arithmetic_of, recording_fast_calls_too
from oracle import attend

try:
    import jax
    import jax.numpy as jnp

    from regard.interop.jax import dot_product_attention
except ImportError:
    jax = None

pytestmark = [pytest.mark.needs("jax"), pytest.mark.needs("fused")]

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
BOTH_LENGTHS = {"query_seq_lengths": (3, 5), "key_value_seq_lengths": (4, 7)}
FEW_KEYS = {"key_value_seq_lengths": (7, 2)}


@pytest.fixture(autouse=True)
def in_double_precision():
    if jax is None:
        yield
        return
    with jax.enable_x64(True):
        yield


def numbers(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def lengths(values):
    return jnp.asarray(values, jnp.int32)


def options_of(mask, bias, causal, window, ends):
    """JAX's keyword arguments, arrays that many cells of the grid share among them."""
    random = np.random.default_rng(7)
    seen = random.random((B, N, T, S)) > 0.3
    seen[..., 0] = True
    arrays = {"mask": mask and jnp.asarray(seen[: mask[0], : mask[1], : mask[2], : mask[3]])}
    arrays |= {"bias": bias and numbers(*bias, seed=5)}
    arrays |= {name: lengths(values) for name, values in ends.items()}
    options = {"is_causal": causal, "local_window_size": window}
    return options | {name: array for name, array in arrays.items() if array is not None}


GRID = [
    options
    for options in itertools.product(
        [None, (B, N, T, S), (1, 1, T, S), (B, 1, 1, S)],
        [None, (B, N, T, S), (1, N, 1, S)],
        [False, True],
        [None, 2, (3, 1), (0, 0)],
        [{}, FEW_KEYS, BOTH_LENGTHS],
    )
]
# What JAX computes in float32 whatever comes in: the scores' softmax, and the weights.
SOFTMAX_IN_FLOAT32 = 2.0**-24


def check(ours, query, key, value, return_residual=True, **options):
    """Our output and residual against JAX's, where a query sees a key; 0 and −inf elsewhere."""
    own = jax.nn.dot_product_attention(
        query.astype(float), key.astype(float), value.astype(float),
        return_residual=True, **options,
    )  # fmt: skip
    answer, bound = bound_of(query, key, value, **options)
    seen = np.asarray(answer.visible.any(-1)).swapaxes(-1, -2)
    output, residual = (np.asarray(array) for array in ours)
    assert output.dtype == residual.dtype == query.dtype
    for actual, theirs, allowed, empty in (
        (output, own[0], bound.output.swapaxes(-3, -2), 0),
        (residual, own[1], bound.lse.swapaxes(-1, -2), -np.inf),
    ):
        rows = seen[..., None] if actual.ndim > seen.ndim else seen
        assert_within(actual, np.where(rows, theirs, empty), np.where(rows, allowed, 0))


def bound_of(query, key, value, mask=None, bias=None, is_causal=False, local_window_size=None,
             query_seq_lengths=None, key_value_seq_lengths=None, scale=None):  # fmt: skip
    """The oracle's answer, and what we and JAX may be off together."""
    dtype = query.dtype
    q, k, v = (np.asarray(a).astype(float).swapaxes(-3, -2) for a in (query, key, value))
    batch, _, queries, _ = q.shape
    keys = k.shape[-2]
    visible = np.ones((batch, 1, queries, keys), bool) if mask is None else np.asarray(mask)
    if query_seq_lengths is not None:
        ends = np.asarray(query_seq_lengths)[:, None, None, None]
        visible = visible & (np.arange(queries)[:, None] < ends)
    if key_value_seq_lengths is not None:
        visible = visible & (
            np.arange(keys) < np.asarray(key_value_seq_lengths)[:, None, None, None]
        )
    window = local_window_size
    window = (window, window) if isinstance(window, int) else window
    extra = {} if bias is None else {"bias": np.asarray(bias).astype(float)}
    answer = attend(
        q, k, v, mask=visible, causal=is_causal, window=window, offset=0, scale=scale, **extra
    )
    how = arithmetic_of("fused", np.empty(0, dtype), scale=scale)
    ours = error_bounds(q, k, v, answer, dtype=dtype, arithmetic=how, scale=scale, **extra)
    theirs = error_bounds(q, k, v, answer, dtype="float32", scale=scale, **extra)
    # JAX rounds the scores to float32 before its softmax and its residual after it.
    largest = np.abs(np.where(answer.visible, answer.logits, 0)).max(initial=1)
    spread = np.abs(v).max(initial=0)
    rounded = precision_of(dtype).unit * (
        np.abs(np.where(np.isfinite(answer.lse), answer.lse, 0)) + 1
    )
    return answer, type(ours)(
        ours.output + theirs.output + 4 * SOFTMAX_IN_FLOAT32 * largest * spread,
        ours.weights,
        ours.lse + theirs.lse + 4 * SOFTMAX_IN_FLOAT32 * largest + 2 * rounded,
    )


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_grid_of_the_options_gives_the_numbers_of_jax(name):
    query, key, value = (numbers(B, n, h, H, dtype=name, seed=s)
                         for s, (n, h) in enumerate(((T, N), (S, K), (S, K)), 1))  # fmt: skip
    checked = 0
    for cell in GRID:
        options = options_of(*cell)
        with recording_fast_calls_too() as ran:
            ours = dot_product_attention(query, key, value, return_residual=True, **options)
        assert len(ran) == 1
        assert ran[0].startswith("fused")
        check(ours, query, key, value, **options)
        checked += 1
    print(f"{name}: {checked} combinations")
    assert checked == len(GRID) == 288


@pytest.mark.parametrize("scale", [0.7, -0.2, 0, np.float32(0.5), jnp.float32(0.5) if jax else 0])
def test_the_scale_is_what_it_is_in_jax(scale):
    query, key, value = (numbers(B, T, N, H, seed=s) for s in range(3))
    ours = dot_product_attention(query, key, value, scale=scale, return_residual=True)
    check(ours, query, key, value, scale=float(scale))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_half_types_come_back_as_they_went_in(name, causal):
    query, key, value = (numbers(B, T, N, H, dtype=name, seed=s) for s in range(3))
    for call in (
        dot_product_attention,
        jax.jit(dot_product_attention, static_argnames=("is_causal", "return_residual")),
    ):
        ours = call(query, key, value, is_causal=causal, return_residual=True)
        check(ours, query, key, value, is_causal=causal)


def test_float64_is_float64_where_jax_is_right_to_seven_digits():
    query, key, value = (numbers(B, T, N, H, dtype="float64", seed=s) for s in range(3))
    q, k, v = (np.asarray(a).swapaxes(1, 2) for a in (query, key, value))
    answer = attend(q, k, v)
    bound = error_bounds(q, k, v, answer, dtype="float64").output
    for call in (dot_product_attention, jax.jit(dot_product_attention)):
        ours = np.asarray(call(query, key, value)).swapaxes(1, 2)
        assert_within(ours, answer.output, bound + 2.0**-50)
    theirs = np.asarray(jax.nn.dot_product_attention(query, key, value)).swapaxes(1, 2)
    assert abs(theirs - answer.output).max() > 1e-9


def test_without_a_batch_axis_there_is_none_in_the_result():
    query, key, value = numbers(T, N, H), numbers(S, K, H, seed=1), numbers(S, K, 3, seed=2)
    output, residual = dot_product_attention(query, key, value, return_residual=True)
    assert (output.shape, residual.shape) == ((T, N, 3), (T, N))
    whole = dot_product_attention(query[None], key[None], value[None])
    np.testing.assert_array_equal(output, whole[0])


def test_lengths_beyond_the_arrays_hide_nothing_as_in_jax():
    query, key, value = (
        numbers(B, T, N, H),
        numbers(B, S, K, H, seed=1),
        numbers(B, S, K, H, seed=2),
    )
    options = {"query_seq_lengths": lengths((9, 9)), "key_value_seq_lengths": lengths((99, S))}
    np.testing.assert_array_equal(
        dot_product_attention(query, key, value, **options),
        dot_product_attention(query, key, value),
    )


def test_a_query_that_sees_no_key_gives_zero_where_jax_gives_a_mean():
    query, key, value = (
        numbers(B, T, N, H),
        numbers(B, S, K, H, seed=1),
        numbers(B, S, K, H, seed=2),
    )
    options = {"key_value_seq_lengths": lengths((0, S)), "return_residual": True}
    output, residual = dot_product_attention(query, key, value, **options)
    assert not output[0].any()
    assert (residual[0] == -jnp.inf).all()
    theirs, _ = jax.nn.dot_product_attention(query, key, value, **options)
    np.testing.assert_allclose(
        theirs[0], jnp.broadcast_to(jnp.repeat(value[0].mean(0), N // K, 0), (T, N, H)), atol=1e-5
    )


def test_what_stands_in_a_hidden_value_has_no_influence_unlike_in_jax():
    query, key, value = (
        numbers(B, T, N, H),
        numbers(B, S, K, H, seed=1),
        numbers(B, S, K, H, seed=2),
    )
    dirty = value.at[:, 4:].set(jnp.nan)
    few = {"key_value_seq_lengths": lengths((4, 4))}
    np.testing.assert_array_equal(
        dot_product_attention(query, key, dirty, **few),
        dot_product_attention(query, key, value, **few),
    )
    assert jnp.isnan(jax.nn.dot_product_attention(query, key, dirty, **few)).any()


# --- jit and vmap --------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", GRID[::17])
def test_within_jit_the_bytes_are_those_without(cell):
    query, key, value = (
        numbers(B, T, N, H),
        numbers(B, S, K, H, seed=1),
        numbers(B, S, K, H, seed=2),
    )
    options = options_of(*cell)
    arrays = {name: option for name, option in options.items() if isinstance(option, jax.Array)}
    fixed = {name: option for name, option in options.items() if name not in arrays}

    @jax.jit
    def compiled(query, key, value, arrays):
        return dot_product_attention(query, key, value, return_residual=True, **arrays, **fixed)

    with recording_fast_calls_too() as ran:
        inside = jax.block_until_ready(compiled(query, key, value, arrays))
    assert len(ran) == 1
    assert ran[0].startswith("fused")
    outside = dot_product_attention(query, key, value, return_residual=True, **options)
    for one, other in zip(inside, outside, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mapped", [
    {"query": 0}, {"key": 0, "value": 0}, {"mask": 0}, {"bias": 1}, {"query": 2, "bias": 0},
    {"key_value_seq_lengths": 0}, {"query_seq_lengths": 1},
    {"query": 0, "key": 1, "value": 2, "mask": 3, "bias": 4, "key_value_seq_lengths": 1},
], ids=lambda mapped: "-".join(f"{name}{axis}" for name, axis in mapped.items()))  # fmt: skip
def test_vmap_gives_the_bytes_of_a_loop(mapped, compiled):
    shapes = {
        "query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H),
        "mask": (1, N, T, S), "bias": (B, 1, 1, S),
    }  # fmt: skip
    given = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        axes = [*shape]
        if name in mapped:
            axes.insert(mapped[name], 3)
        given[name] = numbers(*axes, seed=seed)
    given["mask"] = given["mask"] > -0.5
    for name, values in {
        "query_seq_lengths": (5, 3, 4),
        "key_value_seq_lengths": (7, 0, 3),
    }.items():
        whole = lengths([values, values[::-1]])  # (B, 3)
        given[name] = jnp.moveaxis(whole, 1, mapped[name]) if name in mapped else whole[:, 0]

    def call(given):
        return dot_product_attention(**given, is_causal=True)

    over = jax.vmap(call, in_axes=({name: mapped.get(name) for name in given},))
    result = (jax.jit(over) if compiled else over)(given)
    for at in range(3):
        one = {n: jnp.take(a, at, mapped[n]) if n in mapped else a for n, a in given.items()}
        assert np.asarray(result[at]).tobytes() == np.asarray(call(one)).tobytes()


def test_vmap_within_vmap_and_scan_and_checkpoint():
    queries, keys = numbers(3, B, T, N, H), numbers(2, B, S, K, H, seed=1)

    def over_both(call):
        return jax.vmap(jax.vmap(call, (0, None, None)), (None, 0, 0))(queries, keys, keys)

    result = jax.jit(lambda: over_both(dot_product_attention))()
    assert result.shape == (2, 3, B, T, N, H)
    _, scanned = jax.lax.scan(
        lambda carry, q: (carry, jax.checkpoint(dot_product_attention)(q, keys[1], keys[1])),
        0,
        queries,
    )
    np.testing.assert_array_equal(result[1], scanned)


def test_many_threads_with_large_arrays_do_not_wait_for_each_other():
    """With jax.pure_callback this stands still; in a process of its own, which can be ended."""
    program = """if True:
        import threading, jax, jax.numpy as jnp
        from regard.interop.jax import dot_product_attention
        @jax.jit
        def several(a, b):
            return sum(dot_product_attention(a * 2 + i, b * i, b) for i in range(4))
        x = jnp.ones((1, 5000, 4, 16))
        def work():
            for i in range(6):
                several(x + i, x[:, :16]).block_until_ready()
        threads = [threading.Thread(target=work) for _ in range(6)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert done.stdout.strip() == b"done", done.stderr.decode()


# --- refusals ------------------------------------------------------------------------------------


REFUSED = {
    "implementation": ({"implementation": "xla"}, "implementation is 'xla'"),
    "axes": ({"query": (N, H)}, r"query \(4, 8\), key.*do not fit"),
    "too_many_axes": ({"query": (1, B, T, N, H)}, "query has 5 axes"),
    "heads": ({"query": (B, T, 3, H)}, "3 heads but key has 2"),
    "width": ({"key": (B, S, K, 9)}, "do not fit"),
    "batch": ({"value": (1, S, K, H)}, "do not fit"),
    "mask_shape": (
        {"mask": np.ones((B, N, T, 3), bool)},
        r"mask \(2, 4, 5, 3\) does not broadcast",
    ),
    "mask_dtype": ({"mask": np.ones((B, N, T, S), np.float32)}, "mask must be boolean"),
    "bias_shape": ({"bias": np.ones((3, S), np.float32)}, r"bias \(3, 7\) does not broadcast"),
    "bias_dtype": ({"bias": np.ones((T, S), bool)}, "bias has dtype bool"),
    "lengths": ({"key_value_seq_lengths": np.ones(3, np.int32)}, "2 int32 numbers"),
    "lengths_dtype": ({"query_seq_lengths": np.ones(2, np.float32)}, "2 int32 numbers"),
    "window": ({"local_window_size": (-1, 0)}, "window left is -1"),
    "window_of_three": ({"local_window_size": (1, 2, 3)}, "pair"),
    "scale": ({"scale": float("inf")}, "scale is inf"),
    "scale_of_words": ({"scale": "big"}, "scale must be a number"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name_before_anything_runs(case, compiled):
    change, message = REFUSED[case]
    given = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)} | change
    given = {
        n: numbers(*g) if isinstance(g, tuple) and n in ("query", "key", "value") else g
        for n, g in given.items()
    }

    def call():
        return dot_product_attention(**given)

    with pytest.raises((regard.ShapeError, regard.OptionError, regard.DtypeError), match=message):
        (jax.jit(call) if compiled else call)()


def test_dtypes_that_differ_or_are_no_floats_are_refused():
    query = numbers(B, T, N, H)
    with pytest.raises(regard.DtypeError, match="key has dtype float64 and query float32"):
        dot_product_attention(query, query.astype(float), query)
    with pytest.raises(regard.DtypeError, match="int32"):
        dot_product_attention(*[query.astype(jnp.int32)] * 3)


def test_a_scale_that_is_traced_is_refused():
    query = numbers(B, T, N, H)
    with pytest.raises(regard.OptionError, match="scale is traced"):
        jax.jit(lambda scale: dot_product_attention(query, query, query, scale=scale))(1.0)


def test_without_double_precision_float64_is_float32_as_everywhere_in_jax():
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        query = jnp.ones((B, T, N, H), "float64")
        assert dot_product_attention(query, query, query).dtype == np.float32

"""Every option with every other, drawn at random, against the oracle number by number."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import regard
from bounds import assert_within, error_bounds
from calls import answer_of, arithmetic_of, check_result, every_kernel, result_dtype, run
from drawn_calls import calls, for_the_oracle
from oracle import attend_exactly
from regard.masks import Lengths

EXAMPLES = 3 * settings().max_examples  # of the profile: more when asked to be thorough


@every_kernel
@settings(max_examples=EXAMPLES)
@given(calls())
def test_every_number_is_within_its_bound_whatever_the_options(kernel, call):
    (q, k, v), options, rule = call
    event(f"{len(options)} options")
    result = run(kernel, q, k, v, **options)
    answer = answer_of(q, k, v, **for_the_oracle(options, rule))
    check_result(kernel, result, answer, q, k, v, **options)
    np.testing.assert_array_equal(result.weights.astype(float)[~answer.visible], 0.0)
    empty = ~answer.visible.any(axis=-1)
    np.testing.assert_array_equal(result.output.astype(float)[empty], 0.0)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls())
def test_every_number_is_within_its_bound_in_exact_precision(kernel, call):
    (q, k, v), options, rule = call
    if result_dtype(q, k, v) == np.float64:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    result = run(kernel, q, k, v, precision="exact", **options)
    answer = attend_exactly(q, k, v, **for_the_oracle(options, rule))
    check_result(kernel, result, answer, q, k, v, precision="exact", **options)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 1e-42]))
def test_no_byte_depends_on_what_nobody_sees(kernel, call, poison):
    (q, k, v), options, rule = call
    q, k, v = (x.astype(np.float32) if x.dtype.kind == "i" else x for x in (q, k, v))
    clean = run(kernel, q, k, v, **options)
    visible = answer_of(q, k, v, **for_the_oracle(options, rule)).visible
    assume(visible.size > 0)
    # A key is hidden if no row sees it: none of any head of its group, nor of any batch element.
    groups, size = k.shape[-3] if k.ndim > 2 else 1, k.shape[-2]
    rows = visible.size // size
    per_group = rows // groups // max(int(np.prod(visible.shape[:-3])), 1)
    hidden = ~visible.reshape(-1, groups, per_group, size).any(axis=(0, 2))
    hidden = hidden if k.ndim > 2 else hidden[0]
    k2, v2 = k.copy(), v.copy()
    with np.errstate(all="ignore"):
        k2[..., hidden, :] = poison
        v2[..., hidden, :] = poison
    event(f"hides {bool(hidden.any())}")
    result = run(kernel, q, k2, v2, **options)
    for name in ("output", "weights", "lse"):
        assert getattr(result, name).tobytes() == getattr(clean, name).tobytes(), name


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.integers(1, 3))
def test_keys_hidden_at_the_end_are_as_good_as_none(kernel, call, more):
    (q, k, v), options, meant = call
    options.pop("mask", None)
    options.pop("bias", None)
    assume(k.shape[-2] > 0)
    if "offset" in options:
        options["offset"] = meant.offset
    if isinstance(meant.offset, str):
        options["offset"] = k.shape[-2] - (q.shape[-2] if q.ndim > 1 else 1)
    longer = [np.concatenate([x, x[..., :1, :].repeat(more, -2)], axis=-2) for x in (k, v)]
    padded = run(kernel, q, *longer, **options, mask=Lengths(k.shape[-2]))
    np.testing.assert_array_equal(padded.weights[..., -more:].astype(float), 0.0)
    padded = padded._replace(weights=padded.weights[..., :-more])
    check_result(kernel, padded, answer_of(q, k, v, **options), q, k, v, **options)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls())
def test_negating_the_values_negates_the_output_to_the_bit(kernel, call):
    (q, k, v), options, _ = call
    one = regard.attention(q, k, v, kernel=kernel, **options)
    other = regard.attention(q, k, -v, kernel=kernel, **options)
    np.testing.assert_array_equal(one, -other)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.floats(-1e3, 1e3))
def test_equal_values_come_out_as_they_are(kernel, call, number):
    (q, k, v), options, rule = call
    options.pop("sink", None)
    v = np.full_like(v, number)
    answer = answer_of(q, k, v, **for_the_oracle(options, rule))
    result = regard.attention(q, k, v, kernel=kernel, **options)
    bound = error_bounds(
        q,
        k,
        v,
        answer,
        dtype=result_dtype(q, k, v),
        arithmetic=arithmetic_of(kernel, q, k, v, **options),
        **{name: options[name] for name in ("scale", "softcap", "bias") if name in options},
    )
    some = answer.visible.any(axis=-1)[..., np.newaxis]
    constant = np.where(some, np.float64(v.ravel()[0]) if v.size else 0.0, 0.0)
    assert_within(result, np.broadcast_to(constant, answer.output.shape), 2 * bound.output)

"""How a function is called is found out and said; whatever it does instead of answering, too."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import regard
import wrong_attentions as wrong
from regard.diagnosis.reading.mask_words import what_true_means
from regard.diagnosis.reading.signature import Parameter
from regard.errors import OptionError

right = wrong.unmasked()


def found_names(found):
    return {finding.name for finding in found.findings}


# --- signatures ----------------------------------------------------------------------------------


def test_three_arrays_without_telling_names_are_query_key_value():
    found = regard.diagnose(lambda a, b, c: right(a, b, c))
    assert found.verdict == "right"


def test_a_signature_says_what_names_do_not():
    def f(memory_v, memory_k, asking):
        return right(asking, memory_k, memory_v)

    told = {"memory_v": "value", "memory_k": "key", "asking": "query"}
    assert regard.diagnose(f, signature=told).verdict == "right"
    as_text = "memory_v=value, memory_k=key, asking=query"
    assert regard.diagnose(f, signature=as_text).verdict == "right"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda q, k, v, r, f, u: q, {}, "state them with signature='r=mask, f=mask, u=mask'"),
        (lambda mask, k: k, {}, "no parameter takes the queries"),
        (lambda q, k, v: q, {"layout": "(L, Q)"}, "it must be one of LD, DL"),
        (lambda q, k, v: q, {"library": "tensorflow"}, "library is 'tensorflow'"),
        (lambda q, k, v: q, {"signature": "q"}, "write parameter=role"),
        (lambda q, k, v: q, {"signature": "q=question"}, "must be one of"),
        (lambda q, k, v: q, {"signature": "z=query"}, "not a parameter"),
        (lambda q, k, v: q, {"mask": "yes"}, "mask is 'yes'"),
        (lambda q, k, v: q, {"causal": "middle"}, "causal is 'middle'"),
        (lambda q, k, v: q, {"heads": 0}, "heads is 0"),
        (lambda q, k, v: q, {"time_limit": -1}, "time_limit is -1"),
        (42, {}, "needs a function"),
    ],
)
def test_what_cannot_be_known_is_asked_for(function, options, message):
    with pytest.raises(OptionError, match=message):
        regard.diagnose(function, **options)


@pytest.mark.parametrize(
    ("hide", "said"),
    [
        (lambda s, m: np.where(m.astype(bool), s, -np.inf), "True = attend"),
        (lambda s, m: np.where(m.astype(bool), -np.inf, s), "True = hide"),
        (lambda s, m: s + m, "0 and −inf, to be added"),
        (lambda s, m: s + (1 - m) * -1e9, "True = attend"),
        (lambda s, m: s + np.log(m.astype(float)), "True = attend"),
    ],
)
def test_the_kind_of_mask_is_found_out(hide, said):
    def f(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        return wrong.plain_softmax(s if mask is None else hide(s, mask)) @ v

    found = regard.diagnose(f)
    assert found.verdict == "right"
    assert said in found.called
    assert ("if True in mask means hide," in found.summary) is (said == "True = hide")


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("mask: True where attention is NOT allowed", "hide"),
        ("mask (Tensor): bool, True means the position is ignored", "hide"),
        ("mask: True marks positions that must not be attended to", "hide"),
        ("mask: True if the key cannot be seen", "hide"),
        ("mask: 1s are positions to mask out", "hide"),
        ("inputs 'x' and 'mask' (B, L), 1 for real tokens", "keep"),
        ("mask: 0 -> ignore, 1 -> attend", "keep"),
        ("mask is nonzero where attention is allowed", "keep"),
        ("mask: (L, L) of zeros and ones, one where query i may read key j", "keep"),
        ("mask: additive (0 or -1e9)", ""),
        ("causal: True hides the future\n    mask: None", ""),
        ("scores.masked_fill(mask == 1, -1e9)", ""),
        ("mask: True = visible in one line\n    mask: True = hidden in another", ""),
    ],
)
def test_what_true_means_in_a_mask_is_read_from_the_text(text, means):
    assert what_true_means(text, [Parameter("batch_mask", "mask")]) == means


def test_a_mask_that_is_read_otherwise_than_its_name_or_its_text_says_is_inverted():
    def as_named(q, k, v, hide):
        return wrong.plain_softmax(np.where(hide, -np.inf, q @ k.T / np.sqrt(q.shape[-1]))) @ v

    def of_padding(q, k, v, pad):
        return as_named(q, k, v, ~pad)

    def as_written(q, k, v, mask):
        """mask: True where a key may be seen."""
        return as_named(q, k, v, mask)

    def never_tried(q, k, v, mask=None):
        """mask: True where a key is hidden."""
        if mask is not None:
            raise NotImplementedError
        return wrong.plain_softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v

    for function in (as_named, never_tried):
        assert not regard.diagnose(function).mistakes
    for function in (of_padding, as_written):
        found = regard.diagnose(function)
        assert [one.name for one in found.mistakes] == ["mask_inverted"], found


def test_caches_that_are_given_whole_are_keys_and_values():
    def decode(q, k_cache, v_cache):
        return wrong.plain_softmax(q @ k_cache.T / np.sqrt(q.shape[-1])) @ v_cache

    assert regard.diagnose(decode).verdict == "right"


@pytest.mark.full
def test_parameters_that_are_guessed_to_be_a_mask_end_no_diagnosis():
    def of_blocks(q, k_blocks, v_blocks):
        parts = [wrong.plain_softmax(q @ k.T) @ v for k, v in zip(k_blocks, v_blocks, strict=True)]
        return np.mean(parts, axis=0)

    assert not regard.diagnose(of_blocks).ok


def test_a_mask_that_was_told_otherwise_is_inverted():
    f = wrong.masked("mask_inverted")
    assert "True = hide" in regard.diagnose(f).called
    assert ", if" not in regard.diagnose(f, mask="hide").summary
    assert regard.diagnose(f, mask="keep").names == ("mask_inverted",)


def test_both_ways_of_aligning_are_right_unless_one_is_asked_for():
    f = wrong.with_causal("causal_aligned_at_start")
    found = regard.diagnose(f)
    assert found.verdict == "right"
    assert "first query with the first key" in found.called
    assert ", if causal aligns the first query with the first key," in found.summary


def test_what_it_does_not_take_is_said_to_be_refused_or_not_offered():
    def square(q, k, v):
        assert q.shape == k.shape == v.shape, "square only"
        return right(q, k, v)

    states = {one.name: one for one in regard.diagnose(square).abilities}
    assert states["plain"].state == "right"
    assert states["rectangular"].state == "refused"
    assert "square only" in states["rectangular"].detail
    assert states["mask"].state == "not offered"


def test_a_decorated_function_is_read_through():
    import functools

    def decorator(function):
        @functools.wraps(function)
        def inner(*arguments, **more):
            return function(*arguments, **more)

        return inner

    assert regard.diagnose(decorator(wrong.masked())).verdict == "right"


# --- what a call may do --------------------------------------------------------------------------


def test_a_function_that_raises_is_quoted():
    def f(q, k, v):
        raise RuntimeError("not today\x1b[31m")

    found = regard.diagnose(f)
    assert found.verdict == "unusable"
    assert found.exit_code == 2
    assert "RuntimeError: not today\\x1b[31m" in found.summary


def test_a_function_that_exits_does_not_end_us():
    def f(q, k, v):
        sys.exit(0)

    assert regard.diagnose(f).verdict == "unusable"


@pytest.mark.skipif(not hasattr(__import__("signal"), "setitimer"), reason="needs Unix signals")
def test_a_function_that_hangs_is_stopped():
    def f(q, k, v):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    begin = time.monotonic()
    found = regard.diagnose(f, time_limit=0.2)
    assert time.monotonic() - begin < 60
    assert found.verdict == "unusable"
    assert "hung" in found_names(found)


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (lambda q, k, v: None, "nothing", "returned nothing"),
        (lambda q, k, v: "attention", "type", "holds no array"),
        (lambda q, k, v: right(q, k, v).T, "shape", "the output should be"),
        (lambda q, k, v: q @ k.swapaxes(-1, -2), "shape", "the output should be"),
        (lambda q, k, v: 0.5, "type", "holds no array"),
    ],
)
def test_what_is_no_output_is_told(result, kind, text):
    found = regard.diagnose(result)
    assert found.verdict == "unusable"
    assert kind in found_names(found)
    assert text in found.summary


def test_nan_throughout_is_told():
    found = regard.diagnose(lambda q, k, v: right(q, k, v) * np.nan)
    assert found.verdict == "unknown"
    assert "nan" in found_names(found)
    assert found.exit_code == 1


def test_a_random_function_is_told():
    rng = np.random.default_rng(0)
    found = regard.diagnose(lambda q, k, v: right(q, k, v) * (rng.random() > 0.5))
    found = found if found.verdict == "unusable" else None
    found = found or regard.diagnose(lambda q, k, v: right(q, k, v) + rng.random())
    assert "random" in found_names(found)
    assert found.exit_code == 2


def test_printing_is_kept_from_the_terminal_and_told(capsys):
    def f(q, k, v):
        print("hello")
        return right(q, k, v)

    found = regard.diagnose(f)
    assert capsys.readouterr() == ("", "")
    assert found.verdict == "right"
    assert "prints" in found_names(found)


def test_changed_inputs_are_told():
    def f(q, k, v):
        q /= np.sqrt(q.shape[-1])
        return wrong.plain_softmax(q @ k.swapaxes(-1, -2)) @ v

    found = regard.diagnose(f)
    assert found.names == ("changes_its_arguments",)
    assert found.verdict == "fragile"
    assert "argument q" in found.summary


def test_a_list_and_a_narrower_dtype_are_told():
    assert "returns_list" in found_names(regard.diagnose(lambda q, k, v: right(q, k, v).tolist()))
    narrow = regard.diagnose(lambda q, k, v: right(q, k, v).astype(np.float32))
    assert "another_dtype" in found_names(narrow)
    assert narrow.verdict == "right"
    assert narrow.exact_to == "float32"


def test_what_the_catalogue_does_not_know_comes_with_measurements_and_the_properties_that_fail():
    found = regard.diagnose(lambda q, k, v: np.tanh(q @ k.swapaxes(-1, -2)) @ v)
    assert found.verdict == "unknown"
    assert "measured: rows of weights do not add up to 1" in found.summary
    assert found.nearest == ()  # none explains a wrong answer
    failing = {one.name for one in found.properties if one.holds is False}
    assert "rows_add_up" in failing
    assert "key_order" not in failing


@pytest.mark.parametrize("always", [False, True], ids=["with a flag", "always"])
@pytest.mark.parametrize("aligned", ["start", "end"])
@pytest.mark.parametrize(
    ("extra", "name"), [(0, None), (1, "causal_off_by_one"), (-1, "causal_hides_own_key")]
)
def test_causal_mistakes_are_named_however_unequal_lengths_align(aligned, extra, name, always):
    def attend(q, k, v, causal):
        scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        if causal:
            rows, keys = scores.shape[-2:]
            shift = extra + (keys - rows if aligned == "end" else 0)
            scores = np.where(np.tri(rows, keys, shift, dtype=bool), scores, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    def always_causal(q, k, v):
        return attend(q, k, v, True)

    def with_a_flag(q, k, v, causal=False):
        return attend(q, k, v, causal)

    found = regard.diagnose(always_causal if always else with_a_flag)
    assert [one.name for one in found.mistakes] == ([name] if name else [])
    assert ("always causal" in found.called) is always
    assert ("first query with the first key" in found.called) is (aligned == "start")
    if always and name:
        assert "no mask" not in found.mistakes[0].usual_check


def test_a_leak_from_a_later_key_is_found_without_the_catalogue():
    found = regard.diagnose(wrong.with_causal("causal_off_by_one"))
    leak = next(one for one in found.properties if one.name == "no_leak")
    assert leak.holds is False
    assert "changes row" in leak.evidence


@pytest.mark.needs("torch")
def test_the_users_module_is_not_changed():
    import torch

    module = torch.nn.MultiheadAttention(6, 2)
    before = [parameter.clone() for parameter in module.parameters()]
    regard.diagnose(module)
    for parameter, kept in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
    assert module.training
    assert next(module.parameters()).dtype == torch.float32


def test_a_diagnosis_survives_json():
    import json

    found = regard.diagnose(wrong.masked("mask_after_softmax"))
    text = json.dumps(found.to_json(), allow_nan=False)
    assert regard.Diagnosis.from_json(json.loads(text)) == found


def test_printing_a_diagnosis_says_what_to_change():
    text = str(regard.diagnose(wrong.unmasked("no_scale")))
    assert "not scaled" in text
    assert "np.sqrt(K.shape[-1])" in text


def test_a_slow_function_is_given_up_after_a_while():
    def f(q, k, v):
        time.sleep(0.05)
        return right(q, k, v)

    found = regard.diagnose(f, time_limit=0.1)
    assert "slow" in found_names(found)
    assert found.verdict == "unusable"
    assert "too slow" in found.summary
    assert found.calls <= 10 * 0.1 / 0.05 + 1


def test_weights_that_did_not_make_the_output_are_told():
    def f(q, k, v):
        return right(q, k, v), q @ k.swapaxes(-1, -2)

    found = regard.diagnose(f)
    assert found.verdict == "right"
    assert "other_weights" in found_names(found)


def test_what_else_would_compute_the_same_is_said():
    found = regard.diagnose(wrong.masked("mask_multiplied"), mask="keep")
    assert "1e-9" in found.mistakes[0].same_as[0]


@pytest.mark.needs("torch")
def test_weights_that_cannot_be_recognised_are_asked_for():
    import torch

    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.one(x)

    with pytest.raises(OptionError, match="weights of Strange"):
        regard.diagnose(Strange())


def test_a_scale_that_divides_and_one_that_is_a_switch_are_no_mistakes():
    def divides(q, k, v, temperature_or_scale=None):
        s = q @ k.swapaxes(-1, -2)
        by = np.sqrt(q.shape[-1]) if temperature_or_scale is None else temperature_or_scale
        return wrong.plain_softmax(s / by) @ v

    found = regard.diagnose(divides, signature="temperature_or_scale=scale,q=query,k=key,v=value")
    assert found.verdict == "right"
    assert "divided by the scale" in found.called

    def switched(q, k, v, scale=True, dim=-1):
        s = q @ k.swapaxes(-1, -2)
        return wrong.plain_softmax(s / np.sqrt(q.shape[-1]) if scale else s, dim) @ v

    assert regard.diagnose(switched).verdict == "right"


def keyword_only(*, query, key, value):
    return right(query, key, value)


def any_arguments(*arrays):
    return right(*arrays)


def positional_only(q, k, v, /):
    return right(q, k, v)


def as_mapping(q, k, v):
    return {"weights": q @ k.swapaxes(-1, -2), "output": right(q, k, v)}


@pytest.mark.parametrize("function", [keyword_only, any_arguments, positional_only, as_mapping])
def test_however_arguments_come_in_and_results_come_out_it_is_called(function):
    assert regard.diagnose(function).verdict == "right"


def test_an_array_of_something_else_and_a_coroutine_are_told():
    assert "complex128" in regard.diagnose(lambda q, k, v: right(q, k, v) + 0j).summary

    async def f(q, k, v):
        return right(q, k, v)

    assert "asynchronous" in regard.diagnose(f).summary


def test_a_function_that_remembers_is_told():
    calls = []

    def f(q, k, v):
        calls.append(1)
        return right(q, k, v) * (1 if len(calls) < 4 else 2)

    assert "random" in found_names(regard.diagnose(f))


# --- arguments that a function needs -------------------------------------------------------------


def scores_of(q, k):
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


def needs_a_mask(q, k, v, mask):
    return wrong.plain_softmax(np.where(mask, scores_of(q, k), -np.inf)) @ v


def needs_ones_to_hide(q, k, v, mask):
    return wrong.plain_softmax(scores_of(q, k) - 1e9 * mask) @ v


def needs_padding(q, k, v, pad):
    return wrong.plain_softmax(np.where(pad[:, None, None, :], -1e9, scores_of(q, k))) @ v


def needs_lengths(queries, keys, values, valid_lens):
    scores = scores_of(queries, keys)
    seen = np.arange(scores.shape[-1]) < valid_lens[:, None, None]
    return wrong.plain_softmax(np.where(seen, scores, -1e6)) @ values


def needs_what_no_name_tells(q, k, v, fancy):
    return wrong.plain_softmax(scores_of(q, k) + fancy) @ v


def needs_a_temperature(q, k, v, tau):
    return wrong.plain_softmax(q @ np.swapaxes(k, -1, -2) * tau) @ v


def has_a_window(q, k, v, window=3):
    rows, keys = np.indices((q.shape[-2], k.shape[-2]))
    rows += k.shape[-2] - q.shape[-2]
    seen = (keys <= rows) & (rows - keys < window)
    return wrong.plain_softmax(np.where(seen, scores_of(q, k), -np.inf)) @ v


def has_columns(Q, K, V):
    return V @ wrong.plain_softmax(Q.T @ K / np.sqrt(len(Q))).T


def needs_a_mask_of_four_axes(query, key, value, attention_mask, scaling, training=False):
    assert training is False
    assert attention_mask.ndim == 4
    scores = query @ np.swapaxes(key, -1, -2) * scaling + attention_mask[..., : key.shape[-2]]
    return (wrong.plain_softmax(scores) @ value).swapaxes(1, 2)


def takes_steps(v_new, k_new, q_new):
    return right(q_new, k_new, v_new)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (needs_a_mask, "mask: True = attend"),
        (needs_ones_to_hide, "mask: True = hide"),
        (needs_padding, "(B, H, L, D); pad: True = hide"),
        (needs_lengths, "valid_lens: the number of visible keys"),
        (needs_what_no_name_tells, "fancy: 0 and"),
        (needs_a_temperature, "tau"),
        (has_a_window, "counts the query's own key"),
        (has_columns, "arrays (D, L)"),
        (needs_a_mask_of_four_axes, "(B, H, L, D); attention_mask: 0 and"),
        (takes_steps, "takes_steps(v_new, k_new, q_new)"),
    ],
)
def test_what_a_function_needs_is_given_before_it_is_judged(function, said):
    found = regard.diagnose(function)
    assert found.verdict == "right", found
    assert said in found.called


def test_a_layout_and_a_library_may_be_stated():
    found = regard.diagnose(right, layout="(L, D)", library="numpy")
    assert "NumPy float64 arrays (L, D);" in found.called


# --- dictionaries, classes, layers ---------------------------------------------------------------


def takes_a_dictionary(inputs):
    scores = scores_of(inputs["query"], inputs["key"])
    if inputs.get("mask") is not None:
        scores = np.where(inputs["mask"], scores, -np.inf)
    return {"context": wrong.plain_softmax(scores) @ inputs["value"]}


def has_weights_in_a_tree(params, x, num_heads=2):
    query, key, value = (
        (x @ params[one]["w"] + params[one]["b"]).reshape(len(x), num_heads, -1).swapaxes(0, 1)
        for one in ("query", "key", "value")
    )
    heads = wrong.plain_softmax(scores_of(query, key)) @ value
    return heads.swapaxes(0, 1).reshape(x.shape) @ params["out"]["w"] + params["out"]["b"]


def has_one_packed_weight(x, params):
    query, key, value = np.split(x @ params["c_attn"], 3, axis=-1)
    return wrong.plain_softmax(scores_of(query, key)) @ value @ params["c_proj"]


class Layer:
    """Stores weights as (out, in), and does not name its number of heads."""

    def __init__(self, dim, parts=2):
        rng = np.random.default_rng(0)
        self.parts = parts
        self.wq, self.wk, self.wv, self.wo = rng.normal(0, 0.02, (4, dim, dim))

    def __call__(self, x):
        def split(weight):
            return (x @ weight.T).reshape(*x.shape[:-1], self.parts, -1).swapaxes(-2, -3)

        heads = right(split(self.wq), split(self.wk), split(self.wv))
        return heads.swapaxes(-2, -3).reshape(x.shape) @ self.wo.T


class Decoder:
    """Keeps the keys and values of every token that it has seen."""

    def __init__(self):
        self.keys, self.values = [], []

    def step(self, q, k, v):
        self.keys.append(k)
        self.values.append(v)
        weights = wrong.plain_softmax(np.stack(self.keys) @ q / np.sqrt(len(q)))
        return weights @ np.stack(self.values)


class Preallocated:
    """The same, in arrays of a fixed length."""

    def __init__(self, n_heads, head_dim, max_len=128):
        self.k, self.v = np.zeros((2, n_heads, max_len, head_dim))
        self.at = 0

    def step(self, q, k, v):
        self.k[:, self.at], self.v[:, self.at] = k, v
        self.at += 1
        seen = self.k[:, : self.at], self.v[:, : self.at]
        return right(q[:, None], *seen)[:, 0]


def one_token(q, k, v, cache):
    keys, values = [*cache["keys"], k], [*cache["values"], v]
    weights = wrong.plain_softmax(np.stack(keys) @ q / np.sqrt(len(q)))
    return weights @ np.stack(values), {"keys": keys, "values": values}


def takes_the_past_apart(q, k, v, past_k=None, past_v=None):
    if past_k is not None:
        k, v = np.concatenate([past_k, k], axis=-2), np.concatenate([past_v, v], axis=-2)
    return wrong.with_causal()(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (takes_a_dictionary, "inputs_query"),
        (has_weights_in_a_tree, "weights W_k, W_o, W_q, W_v, b_k"),
        (has_one_packed_weight, "weights W_k, W_o, W_q, W_v read"),
        (Layer, "2 heads"),
        (Layer(6, 3), "3 heads"),
        (Decoder, "always causal"),
        (Preallocated, "(H, L, D)"),
        (one_token, "always causal"),
        (takes_the_past_apart, "past_k"),
    ],
)
def test_whatever_form_an_attention_has_it_is_called(function, said):
    found = regard.diagnose(function)
    assert found.verdict == "right", found
    assert said in found.called


def shares_keys(q, k, v):
    """q is (H, B, L, D), k and v are (B, S, D)."""
    weights = wrong.plain_softmax(np.einsum("hbld,bsd->hbls", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("hbls,bsd->hbld", weights, v)


def needs_whole_blocks(q, k, v, chunk=3):
    scores = scores_of(q, np.concatenate(k.reshape(-1, chunk, k.shape[-1])))
    return wrong.plain_softmax(scores) @ v


def needs_a_transposed_key(q, k_t, v):
    return wrong.plain_softmax(q @ k_t / np.sqrt(v.shape[-1])) @ v


@pytest.mark.parametrize("function", [shares_keys, needs_whole_blocks, needs_a_transposed_key])
def test_unusual_shapes_are_right_where_they_are_meant(function):
    found = regard.diagnose(function)
    assert found.verdict == "right", found


def test_a_bias_that_is_scaled_with_the_scores_is_not_right():
    def scaled(q, k, v, bias):
        return wrong.plain_softmax((q @ np.swapaxes(k, -1, -2) + bias) / np.sqrt(q.shape[-1])) @ v

    found = regard.diagnose(scaled)
    assert not found.ok
    states = {one.name: one.state for one in found.abilities}
    assert (states["plain"], states["bias"]) == ("right", "wrong")


def test_a_function_that_cannot_be_called_says_what_its_own_layout_raises():
    def f(q, k, v, table):
        batch, heads, rows, width = q.shape
        return q.reshape(batch, heads, rows, width) * table["missing"]

    said = regard.diagnose(f).summary
    assert "with arrays (B, H, L, D)" in said
    assert "signature='q=query, k=key, v=value, table=mask'" in said
    assert "unpack" not in said


def test_diagnoses_in_two_threads_leave_printing_and_warnings_as_they_were():
    inside, over, found = threading.Event(), threading.Event(), []
    calls = {"first": 0, "second": 0}

    def first(q, k, v):
        calls["first"] += 1
        if calls["first"] == 1:
            inside.wait(0.5)  # the other one would begin within this call
        return right(q, k, v)

    def second(q, k, v):
        inside.set()
        calls["second"] += 1
        if calls["second"] == 1:
            over.wait(0.5)  # and end after the last of these
        return right(q, k, v)

    def diagnose():
        found.append(regard.diagnose(first).verdict)
        over.set()

    before = sys.stdout, list(warnings.filters)
    thread = threading.Thread(target=diagnose)
    thread.start()
    found.append(regard.diagnose(second).verdict)
    thread.join()
    assert found == ["right"] * 2
    assert sys.stdout is before[0]
    assert warnings.filters == before[1]

"""The questions of a diagnosis in order, and what is said of the answers."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.errors import OptionError


def softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def plain(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def masked(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ v


def by_keys(q, k, v):
    """Divided by √S, the number of keys."""
    width = k.shape[-2]
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(width)) @ v


def of_queries(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=-2) @ v


def curved(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = softmax(scores + 0.3 * np.sin(scores))
    return weights @ v


def line_of(function, text):
    """The line of the file on which a function has some code."""
    code = function.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().split("\n")
    return next(n for n in range(code.co_firstlineno, len(lines)) if text in lines[n - 1])


def made(found):
    """The steps that lines make, by number: right ones, and with a sign those that are wrong."""
    return {
        line.number: ["✗" * one.departs + one.step for one in line.makes]
        for line in found.lines
        if line.makes
    }


# --- the verdicts ---------------------------------------------------------------------------------


def test_a_right_function_is_explained_line_by_line():
    found = regard.diagnose(masked)
    assert found.verdict == "right"
    lines = made(found)
    assert lines[line_of(masked, "q @ k")] == ["scores", "scaled"]
    assert lines[line_of(masked, "np.where")] == ["masked"]
    assert lines[line_of(softmax, "np.exp")] == ["exponentials"]
    assert lines[line_of(masked, "return softmax")] == ["output"]
    assert found.departure is None
    assert found.mistakes == ()


def test_a_right_verdict_says_first_what_nobody_has_stated():
    assert (
        regard.diagnose(plain).summary == "plain is right, if full attention is meant, not causal"
    )
    assert regard.diagnose(plain, causal=False).summary == "plain is right"
    found = regard.diagnose(masked, causal=False)
    assert found.summary == "masked is right, if True in `mask` means attend"
    assert regard.diagnose(masked, causal=False, mask="attend").summary == "masked is right"
    conventions = {one.name: one.source for one in found.assumptions if not one.is_open}
    assert conventions == {"scale": "Vaswani et al. 2017"}


def test_a_wrong_function_has_a_line_a_step_a_name_and_numbers():
    found = regard.diagnose(by_keys)
    assert found.verdict == "wrong"
    assert found.line == line_of(by_keys, "width = k.shape")
    assert found.names == ("scale_by_keys",)
    assert found.summary == f"by_keys is wrong at line {found.line}: {found.mistakes[0].title}"
    assert (found.departure.step, found.departure.right) == ("scaled", "scores")
    (step,) = (one for line in found.lines for one in line.makes if one.departs)
    right, wrong = np.array(step.right), np.array(step.wrong)
    np.testing.assert_allclose(wrong, right * np.sqrt(6 / 5))


def test_what_has_no_name_is_told_by_what_was_measured():
    found = regard.diagnose(curved)
    assert found.verdict == "wrong"
    assert found.line == line_of(curved, "np.sin")
    assert found.names == ()
    assert f"at line {found.line}, in the step " in found.summary


def test_a_wrong_function_that_another_statement_makes_right_says_so():
    found = regard.diagnose(lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v)
    assert found.verdict == "wrong"
    assert found.summary.endswith("; right, if scores are meant to be multiplied by 1")
    unscaled = regard.diagnose(lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v, scale="none")
    assert unscaled.verdict == "right"


def test_a_text_that_changes_another_is_told_by_calls_where_no_step_is_replaced():
    def one_text(q, k, v):
        return plain(q, k, v) + np.tanh(v[:1, :, :1, :1])

    found = regard.diagnose(one_text)
    assert found.verdict == "wrong"
    assert found.names == ("batch_elements_mixed",)


def test_what_is_wrong_on_some_problems_alone_is_said():
    def narrow(q, k, v):
        return plain(q, k, v) + (v.shape[-1] != q.shape[-1]) * np.tanh(q[..., :1])

    assert "only with values of another width" in regard.diagnose(narrow).summary


def test_a_function_of_unknown_parameters_gets_an_adapter_to_edit():
    def renamed(first, second, third, *, fancy):
        return plain(first, second, third)

    found = regard.diagnose(renamed)
    assert found.verdict == "not_callable"
    assert "first, second, third, fancy" in found.summary
    assert "fancy=...,  # fancy: a field of t, or a value" in found.adapter
    names = {}
    exec(found.adapter.replace("...", "None"), names)
    assert regard.diagnose(renamed, call=names["call"]).verdict == "right"


def test_two_equal_calls_that_differ_are_told_by_the_line_that_draws():
    rng = np.random.default_rng(0)

    def dropping(q, k, v):
        weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        keep = rng.random(weights.shape) > 0.1
        return weights * keep @ v

    found = regard.diagnose(dropping)
    assert found.verdict == "wrong"
    assert found.line == line_of(dropping, "rng.random(weights")
    assert found.names == ("dropout_left_on",)


def test_large_scores_make_a_function_fragile_and_the_line_is_told():
    def unshifted(q, k, v):
        weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        return weights / weights.sum(-1, keepdims=True) @ v

    found = regard.diagnose(unshifted)
    assert (found.verdict, found.ok, found.exit_code) == ("fragile", True, 0)
    assert found.summary.startswith("unshifted is right, but fragile: wrong with large scores")


def test_only_what_leaves_the_range_of_exp_is_named_so():
    def unshifted(q, k, v):
        weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        return weights / weights.sum(-1, keepdims=True) @ v

    def one_maximum(q, k, v):
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        return weights / weights.sum(-1, keepdims=True) @ v

    assert regard.diagnose(unshifted).names == ("no_maximum_subtracted",)
    found = regard.diagnose(one_maximum)
    assert (found.verdict, found.names) == ("fragile", ())


def test_an_error_that_jumps_with_the_numbers_is_one_of_few_digits():
    def rounded(q, k, v):
        scores = (q @ k.swapaxes(-1, -2)).astype(np.float16) / np.sqrt(q.shape[-1])
        return softmax(scores.astype(float)) @ v

    def near(q, k, v):
        return plain(q * 1.0005, k, v)

    assert regard.diagnose(rounded).names == ("computed_in_half_precision",)
    assert regard.diagnose(near).names == ()


def test_a_result_of_few_digits_is_right_and_fragile():
    found = regard.diagnose(lambda q, k, v: plain(q, k, v).astype(np.float16), causal=False)
    assert (found.verdict, found.names) == ("fragile", ("computed_in_half_precision",))
    assert "its results have only the digits of float16" in found.summary


def test_what_is_kept_from_an_earlier_call_is_told_from_what_is_drawn():
    def growing(q, k, v, cache=[]):  # noqa: B006  this is the mistake
        cache.append(float(k.mean()))
        return plain(q + sum(cache), k, v)

    most = {}

    def of_the_longest(q, k, v):
        most["keys"] = max(k.shape[-2], most.get("keys", 0))
        return plain(q, k, v) * k.shape[-2] / most["keys"]

    assert regard.diagnose(growing).names == ("state_kept",)
    assert regard.diagnose(of_the_longest).names == ("state_kept",)


def test_positions_are_meant_where_their_steps_are_among_the_values():
    def growing(q, k, v):
        slopes = 2.0 ** (-8.0 * np.arange(1, q.shape[1] + 1) / q.shape[1])
        (L, D), S = q.shape[-2:], k.shape[-2]
        apart = np.abs(np.arange(L)[:, None] + S - L - np.arange(S))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(D) + slopes[:, None, None] * apart
        return softmax(scores) @ v

    found = regard.diagnose(growing, causal=False, call=lambda f, t: f(t.query, t.key, t.value))
    assert found.line == line_of(growing, "scores = q")
    assert found.names == ("alibi_sign",)
    assert "ALiBi is meant" in str(found)


def test_a_value_that_is_changed_again_before_it_is_used_is_the_one_that_departs():
    def padded(q, k, v, lengths):
        keep = np.arange(q.shape[-2]) < lengths[:, None]
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = np.where(keep[:, None, :, None], scores, -1e9)
        return softmax(scores) @ v

    found = regard.diagnose(padded, causal=False)
    assert found.line in (line_of(padded, "np.where(keep"), line_of(padded, "keep = "))


# --- what is stated -------------------------------------------------------------------------------


def test_an_adapter_says_what_a_table_does_not_know():
    def padded(x, y, z, pad):
        return masked(x, y, z, ~pad[:, None, None])

    found = regard.diagnose(padded, call=lambda f, t: f(t.query, t.key, t.value, pad=~t.key_mask))
    assert found.verdict == "right"
    assert {"padding"} <= set(found.asked)
    wrong = regard.diagnose(padded, call=lambda f, t: f(t.query, t.key, t.value, pad=t.key_mask))
    assert wrong.verdict == "wrong"


def test_another_score_and_normalization_may_be_meant():
    from regard.normalizers import Proportional
    from regard.scores import Cosine, Features

    def cosine(q, k, v, factor=2.0):
        q = q / np.linalg.norm(q, axis=-1, keepdims=True)
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        return softmax(q @ k.swapaxes(-1, -2) * factor) @ v

    call = {"call": lambda f, t: f(t.query, t.key, t.value)}
    assert regard.diagnose(cosine, score=Cosine(temperature=0.5), **call).verdict == "right"
    found = regard.diagnose(cosine, score=Cosine(temperature=2.0), **call)
    assert (found.verdict, found.departure.step) == ("wrong", "scores")

    def linear(q, k, v):
        q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
        return q @ (k.swapaxes(-1, -2) @ v) / (q @ k.sum(-2)[..., None])

    found = regard.diagnose(linear, score=Features(), normalize=Proportional())
    assert found.verdict == "right"


def test_the_width_of_a_score_is_that_of_every_problem():
    from regard.scores import General

    matrix = np.random.default_rng(0).normal(size=(3, 3))
    found = regard.diagnose(
        lambda q, k, v: softmax(q @ matrix @ k.swapaxes(-1, -2)) @ v, score=General(matrix)
    )
    assert found.verdict == "right"
    with pytest.raises(OptionError, match="scale is for dot products"):
        regard.diagnose(plain, score=General(matrix), scale=1.0)


def test_gradients_are_judged_by_their_names_and_traced():
    def backward(q, k, v, d_output):
        scale = q.shape[-1] ** -0.5
        p = softmax(q @ k.swapaxes(-1, -2) * scale)
        dp = d_output @ v.swapaxes(-1, -2)
        ds = p * dp * scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_output

    found = regard.diagnose(backward)
    assert found.compared == ("query", "key", "value")
    assert found.verdict == "wrong"
    assert found.line == line_of(backward, "ds = p * dp")


# --- bad input ------------------------------------------------------------------------------------


def test_code_without_source_is_judged_by_its_results_and_that_is_said():
    names = {"np": np}
    exec("def typed(q, k, v):\n    return q @ k.swapaxes(-1, -2) @ v", names)
    found = regard.diagnose(names["typed"])
    assert (found.verdict, found.line, found.lines) == ("wrong", 0, ())
    assert [one.name for one in found.findings] == ["no_lines"]
    assert "its source is not at hand" in found.findings[0].text


def test_a_loop_that_an_exchanged_value_makes_endless_is_left():
    def halving(q, k, v):
        step = k.shape[-2]
        while step > 0:
            step = step - 1
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    assert regard.diagnose(halving).verdict == "wrong"


def test_a_diagnosis_is_the_same_each_time():
    first, second = (regard.diagnose(by_keys) for _ in range(2))
    assert first == second
    assert regard.Diagnosis.from_json(first.to_json()) == first


def test_printing_it_shows_the_lines_with_their_steps():
    text = str(regard.diagnose(by_keys))
    assert "✗ scaled" in text
    assert "✓ scores" in text
    assert "assumed: scores are meant to be divided by √D (Vaswani et al. 2017)" in text

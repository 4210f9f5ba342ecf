"""Whether a function is right, as an adapter calls it: equality on every problem that is asked."""

from __future__ import annotations

import numpy as np
import pytest

from judged import judge_function
from regard.diagnosis.call.asking import running
from regard.errors import OptionError


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def scaled(q, k):
    return q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])


def plain(q, k, v):
    return softmax(scaled(q, k)) @ v


def unscaled(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2)) @ v


def masked(q, k, v, mask):
    return softmax(np.where(mask, scaled(q, k), -1e9)) @ v


def causal(q, k, v, late=True, diagonal=0):
    """Later keys are hidden; with `late` the last query belongs to the last key."""
    rows, keys = q.shape[-2], k.shape[-2]
    return masked(q, k, v, np.tri(rows, keys, (keys - rows) * late + diagonal, dtype=bool))


def of_arrays(f, t):
    return f(t.query, t.key, t.value)


def with_mask(f, t):
    return f(t.query, t.key, t.value, t.mask)


def names(found):
    return {one.name: one.text for one in found.assumptions}


def test_a_right_function_is_right_and_what_it_refuses_is_listed():
    found = judge_function(plain, of_arrays)
    assert found.verdict == "right"
    assert found.exact_to == "float64"
    assert "more keys than queries" in found.asked
    assert [one.name for one in found.not_asked] == ["fewer key heads"]


def test_a_wrong_function_comes_with_the_simplest_problem_that_shows_it():
    found = judge_function(lambda q, k, v: causal(q, k, v, diagonal=-1), of_arrays, causal=True)
    assert found.verdict == "wrong"
    assert found.task is found.wrong[0]
    assert found.task.name == "5 tokens"
    assert found.answer.arrays["output"].shape == found.task.expected["output"].shape


def test_the_same_call_can_be_made_again_and_departs_from_what_is_expected():
    found = judge_function(unscaled, of_arrays)
    result = running(unscaled, found.adapter, "numpy", found.task.given)()
    assert result.keys() == found.task.expected.keys()
    np.testing.assert_array_equal(result["output"], found.answer.arrays["output"])
    assert not np.allclose(result["output"], found.task.expected["output"])
    assert {one.name for one in found.wrong} < {one.name for one in found.tasks}


def test_one_text_and_one_head_suffice():
    found = judge_function(plain, lambda f, t: of_arrays(f, _first(t))[None, None])
    assert found.verdict == "right"
    assert any(one.name == "5 tokens, several texts and heads" for one in found.not_asked)


class _first:
    def __init__(self, t):
        self.query, self.key, self.value = t.query[0, 0], t.key[0, 0], t.value[0, 0]


@pytest.mark.parametrize("late", [True, False])
def test_unstated_order_is_tried_both_ways_and_said(late):
    found = judge_function(lambda q, k, v: causal(q, k, v, late), of_arrays)
    assert found.verdict == "right"
    assert names(found)["causal"] == "causal attention is meant"
    assert ("last" if late else "first") in names(found)["aligned"]


def test_a_stated_alignment_is_the_only_one():
    stated = judge_function(causal, of_arrays, causal="start")
    assert stated.verdict == "wrong"
    assert stated.task.name == "more keys than queries"
    assert judge_function(causal, of_arrays, causal="end").verdict == "right"


def test_a_scale_is_assumed_by_a_convention_which_is_named():
    found = judge_function(unscaled, of_arrays)
    assert found.verdict == "wrong"
    assert next(x.source for x in found.assumptions if x.name == "scale") == "Vaswani et al. 2017"
    assert [one.name for one in found.otherwise] == ["scale"]
    assert judge_function(unscaled, of_arrays, scale="none").verdict == "right"
    assert judge_function(unscaled, of_arrays, scale=1.0).verdict == "right"


def test_a_mask_that_an_adapter_inverts_wrongly_is_wrong():
    assert judge_function(masked, with_mask).verdict == "right"
    inverted = judge_function(masked, lambda f, t: f(t.query, t.key, t.value, ~t.mask))
    assert inverted.verdict == "wrong"


def test_one_mask_for_all_texts_is_said():
    found = judge_function(masked, lambda f, t: f(t.query, t.key, t.value, t.mask[0, 0]))
    assert found.verdict == "right"
    assert names(found)["one_mask"] == "one mask is for all texts"


@pytest.mark.parametrize("first", [True, False])
def test_what_a_layer_computes_around_attention_is_tried_and_said(first):
    def normalised(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)

    def block(x, W_q, W_k, W_v, W_o):
        rows = normalised(x) if first else x
        result = x + plain(rows @ W_q, rows @ W_k, rows @ W_v) @ W_o
        return result if first else normalised(result)

    def call(f, t):
        return f(t.embeddings, t.W_q, t.W_k, t.W_v, t.W_o)

    found = judge_function(block, call, heads=1)
    assert found.verdict == "right"
    assert names(found)["around"].startswith("its input is meant to be ")
    assert ("first" in names(found)["around"]) == first


@pytest.mark.parametrize(
    ("adapter", "stated", "text"),
    [
        (with_mask, {"mask": "hide"}, "mask='hide' is about a mask argument"),
        (with_mask, {"window": "inclusive"}, "the adapter passes the window"),
        (lambda f, t: f(t.query, t.key * t.scale, t.value), {"scale": 1.0}, "passes t.scale"),
        (of_arrays, {"causal": "yes"}, "causal is 'yes'; it must be one of None, True, False"),
        (of_arrays, {"heads": 0}, "heads is 0; it must be an integer of 1 or more"),
        (of_arrays, {"scale": "one"}, "scale is 'one'; it must be a number"),
    ],
)
def test_what_is_stated_in_vain_or_cannot_be_is_refused(adapter, stated, text):
    with pytest.raises(OptionError, match=text.replace("(", r"\(")):
        judge_function(plain if adapter is not with_mask else masked, adapter, **stated)


def test_scores_that_exp_cannot_take_make_a_function_fragile():
    def unshifted(q, k, v):
        weights = np.exp(scaled(q, k))
        return weights / weights.sum(-1, keepdims=True) @ v

    found = judge_function(unshifted, of_arrays)
    assert (found.verdict, found.why) == ("fragile", "wrong with large scores")


def test_a_function_that_changes_its_arrays_is_fragile():
    def changing(q, k, v):
        q /= np.sqrt(q.shape[-1])
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    found = judge_function(changing, of_arrays)
    assert (found.verdict, found.why) == (
        "fragile",
        "it changes the arrays that it is given: query",
    )


def test_two_equal_calls_give_the_same_result_or_it_is_wrong():
    seen = []

    def tiring(q, k, v):
        call = q.tobytes(), k.tobytes(), v.tobytes()
        seen.append(call)
        return plain(q, k, v) * (seen.count(call) < 3)

    found = judge_function(tiring, of_arrays)
    assert (found.verdict, found.why) == ("wrong", "two equal calls give different results")


def test_digits_of_float32_are_enough_and_said():
    found = judge_function(lambda q, k, v: plain(q, k, v) * (1 + 1e-9), of_arrays)
    assert (found.verdict, found.exact_to) == ("right", "float32")
    found = judge_function(lambda *x: plain(*x).astype(np.float32), of_arrays)
    assert (found.verdict, found.exact_to) == ("right", "float32")


def test_another_shape_and_an_error_of_the_adapter_are_told():
    found = judge_function(plain, lambda f, t: of_arrays(f, t).swapaxes(1, 2))
    assert found.verdict == "not_callable"
    assert found.why == "output has shape (2, 5, 4, 6), but (2, 4, 5, 6) is expected"
    found = judge_function(plain, lambda f, t: f(t.keys))
    assert "t has no field keys" in found.why


def test_a_mask_with_which_a_function_always_fails_leaves_it_unknown():
    def failing(q, k, v, mask):
        if not mask.all():
            raise NotImplementedError("no masks yet")
        return plain(q, k, v)

    found = judge_function(failing, with_mask)
    assert found.verdict == "unknown"
    assert found.why == "a mask: NotImplementedError: no masks yet"


def test_a_call_without_end_is_stopped_by_its_time_of_computing(monkeypatch):
    monkeypatch.setattr("regard.diagnosis.call.asking.CPU_SECONDS", 0.1)

    def endless(q, k, v):
        while len(q) < 9:
            pass

    found = judge_function(endless, of_arrays)
    assert found.verdict == "not_callable"
    assert found.why == "it was stopped after 0.1 s of computing"


def test_a_dict_of_gradients_is_judged_by_names():
    def backward(q, k, v, up, delta=True):
        scale = q.shape[-1] ** -0.5
        weights = softmax(q @ k.swapaxes(-1, -2) * scale)
        through = up @ v.swapaxes(-1, -2)
        rest = (through * weights).sum(-1, keepdims=True) * delta
        scores = weights * (through - rest) * scale
        turned = scores.swapaxes(-1, -2), weights.swapaxes(-1, -2)
        return {"query": scores @ k, "key": turned[0] @ q, "value": turned[1] @ up}

    def call(f, t):
        return f(t.query, t.key, t.value, t.grad_output)

    assert judge_function(backward, call).verdict == "right"
    assert judge_function(lambda *x: backward(*x, delta=False), call).verdict == "wrong"


def test_the_number_of_heads_is_that_which_is_stated():
    def of_two(x, *weights):
        heads = ((x @ one).reshape(*x.shape[:2], 2, -1).swapaxes(1, 2) for one in weights)
        return plain(*heads).swapaxes(1, 2).reshape(*x.shape[:2], -1)

    def call(f, t):
        return f(t.embeddings, t.W_q, t.W_k, t.W_v)

    assert judge_function(of_two, call, heads=2).verdict == "right"
    assert judge_function(of_two, call, heads=3).verdict != "right"


def test_a_judgement_is_the_same_each_time():
    first, second = (judge_function(unscaled, of_arrays) for _ in range(2))
    assert (first.why, first.asked, first.assumptions) == (
        second.why,
        second.asked,
        second.assumptions,
    )

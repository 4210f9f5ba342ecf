"""How a function is called without an adapter: by the table, and by what only trying tells."""

from __future__ import annotations

import numpy as np
import pytest

from judged import judge_function
from regard.diagnosis.call.adapter import compiled
from regard.diagnosis.call.table import ATTRIBUTES, CONSTRUCTOR, PARAMETERS


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def scaled(q, k):
    return q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])


def matrices(q, k, v):
    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def heads_last(q, k, v):
    weights = softmax(np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("bhls,bshe->blhe", weights, v), weights


def packed(q, k, v, num_heads):
    texts, rows, _ = q.shape
    q, k, v = (x.reshape(texts, -1, num_heads, x.shape[-1] // num_heads) for x in (q, k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return (softmax(scaled(q, k)) @ v).swapaxes(1, 2).reshape(texts, rows, -1)


def four_heads(q, k, v):
    return packed(q, k, v, 4)


def attending(q, k, v, mask=None):
    return softmax(scaled(q, k) if mask is None else np.where(mask, scaled(q, k), -1e9)) @ v


def hiding(q, k, v, mask):
    return softmax(np.where(mask, -1e9, scaled(q, k))) @ v


def adding(q, k, v, mask=None):
    return softmax(scaled(q, k) + (0 if mask is None else mask)) @ v


def with_padding(q, k, v, key_padding_mask):
    return softmax(np.where(key_padding_mask[:, None, None], -1e9, scaled(q, k))) @ v


def keeping_padding(q, k, v, key_padding_mask):
    return with_padding(q, k, v, ~key_padding_mask)


def layer(x, W_q, W_k, W_v, W_o, n_heads, causal=False):
    texts, rows, _ = x.shape
    q, k, v = ((x @ w).reshape(texts, rows, n_heads, -1).swapaxes(1, 2) for w in (W_q, W_k, W_v))
    scores = scaled(q, k)
    if causal:
        scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    return (softmax(scores) @ v).swapaxes(1, 2).reshape(texts, rows, -1) @ W_o


def transposed(x, Wq, Wk, Wv):
    return matrices(x @ Wq.T, x @ Wk.T, x @ Wv.T)


def backward(q, k, v, d_out):
    scale = q.shape[-1] ** -0.5
    weights = softmax(q @ k.swapaxes(-1, -2) * scale)
    through = d_out @ v.swapaxes(-1, -2)
    scores = weights * (through - (through * weights).sum(-1, keepdims=True)) * scale
    return scores @ k, scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ d_out


def windowed(q, k, v, window):
    apart = np.arange(len(q))[:, None] - np.arange(len(k))
    return softmax(np.where((apart >= 0) & (apart < window), scaled(q, k), -1e9)) @ v


class Layer:
    def __init__(self, d_model, num_heads):
        draw = np.random.default_rng(0).normal
        self.W_q, self.W_k, self.W_v, self.W_o = (draw(size=(d_model, d_model)) for _ in range(4))
        self.heads = num_heads

    def forward(self, x):
        return layer(x, self.W_q, self.W_k, self.W_v, self.W_o, self.heads)


class WithGain(Layer):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.gain = np.ones(d_model)


RIGHT = {
    matrices: "f(t.query[0, 0], t.key[0, 0], t.value[0, 0])[None, None]",
    heads_last: "f(t.query.swapaxes(1, 2), t.key.swapaxes(1, 2), t.value.swapaxes(1, 2))[0]",
    packed: "t.heads).reshape(",
    attending: "f(t.query, t.key, t.value, mask=t.mask)",
    hiding: "f(t.query, t.key, t.value, ~t.mask)",
    adding: "mask=np.where(t.mask, 0.0, -np.inf))",
    with_padding: "~t.key_mask)",
    layer: "f(t.embeddings, t.W_q, t.W_k, t.W_v, t.W_o, t.heads, causal=t.causal)",
    transposed: "f(t.embeddings[0], t.W_q.T, t.W_k.T, t.W_v.T)[None]",
    backward: '("query", "key", "value"), f(t.query, t.key, t.value, t.grad_output))',
    windowed: "t.window[0] + 1)",
    Layer: "m.W_o = t.W_o",
}


@pytest.mark.parametrize("function", RIGHT, ids=lambda one: one.__name__)
def test_a_function_of_the_table_is_called_and_right(function):
    found = judge_function(function)
    assert found.verdict == "right"
    assert RIGHT[function] in found.adapter.text


def test_a_number_of_heads_in_the_code_is_tried_and_said():
    found = judge_function(four_heads)
    assert found.verdict == "right"
    assert "there are 4 heads" in [one.text for one in found.assumptions]


def test_both_meanings_of_a_mask_are_tried_and_the_right_one_is_said():
    for function, text in ((attending, "means attend"), (hiding, "means hidden")):
        mask = next(one for one in judge_function(function).assumptions if one.name == "mask")
        assert (mask.text, mask.source) == (f"True in `mask` {text}", "tried")


def test_a_stated_meaning_is_the_only_one_and_no_assumption():
    assert judge_function(hiding, mask="attend").verdict == "wrong"
    found = judge_function(hiding, mask="hide")
    assert found.verdict == "right"
    assert "mask" not in [one.name for one in found.assumptions]


def test_a_name_of_one_library_has_its_meaning_and_the_verdict_names_it():
    found = judge_function(keeping_padding)
    assert found.verdict == "wrong"
    mask = next(one for one in found.assumptions if one.name == "mask")
    assert (mask.text, mask.source) == ("True in `key_padding_mask` means hidden", "torch")


def with_gamma(q, k, v, gamma):
    return matrices(q, k, v) * gamma


def test_an_argument_that_the_table_does_not_know_needs_an_adapter_which_is_printed():
    found = judge_function(with_gamma)
    assert found.verdict == "not_callable"
    assert found.why == "it is not known what gamma should get"
    code = found.adapter.text.replace("...,", "1.0,").replace("t.query,", "t.query[0, 0],")
    code = code.replace("t.key,", "t.key[0, 0],").replace("t.value,", "t.value[0, 0],")
    assert judge_function(with_gamma, compiled(code.rstrip() + "[None, None]\n")).verdict == "right"


def test_three_arrays_without_names_are_printed_in_their_usual_order():
    found = judge_function(lambda a, b, c: softmax(scaled(a, b)) @ c)
    assert found.verdict == "not_callable"
    assert (
        judge_function(
            lambda a, b, c: softmax(scaled(a, b)) @ c, compiled(found.adapter.text)
        ).verdict
        == "right"
    )


def test_an_argument_with_a_default_that_the_table_does_not_know_keeps_it_and_is_listed():
    found = judge_function(lambda q, k, v, gamma=1.0: attending(q, k, v) * gamma)
    assert found.verdict == "right"
    assert ("gamma", "its default") in [(one.name, one.why) for one in found.not_asked]


def test_an_object_with_other_numbers_than_the_table_knows_needs_an_adapter():
    assert judge_function(WithGain).verdict == "not_callable"


def test_names_in_the_table_are_whole_and_few():
    assert len(PARAMETERS) <= 300
    assert all(name == name.lower() for name in (*PARAMETERS, *CONSTRUCTOR, *ATTRIBUTES))
    assert not {"qq", "my_mask", "maske"} & {*PARAMETERS}


def test_layers_of_torch_are_filled_by_the_names_of_their_parts():
    torch = pytest.importorskip("torch")

    class Causal(torch.nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.c_attn = torch.nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = torch.nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x):
            texts, rows, width = x.shape
            parts = self.c_attn(x).split(width, 2)
            q, k, v = (one.view(texts, rows, self.n_head, -1).transpose(1, 2) for one in parts)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(out.transpose(1, 2).reshape(x.shape))

    for one in (Causal, Causal(12, 3), torch.nn.MultiheadAttention):
        found = judge_function(one)
        assert found.verdict == "right"
    assert judge_function(Causal, causal=False).verdict == "wrong"

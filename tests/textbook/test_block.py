"""Norms, residual sums, MLPs and whole models: their numbers, their gradients and their words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard.compute.evaluation import Run
from regard.explanation.derive import derive
from regard.explanation.labels import Labels
from regard.masks import Causal
from regard.textbook.block import Layer, layer, model
from regard.textbook.block_operations import BLOCK_OPERATIONS
from regard.textbook.gradients import backward
from regard.views.step_words import words_of_model

SIZES = {"L": 4, "S": 4, "M": 6, "HD": 8, "GD": 4, "GE": 4, "HE": 8, "D": 4, "I": 5, "V": 9, "X": 3}
HEADS = {"H": 2, "G": 1, "P": 2, "Q": 4, "W": 4}
NUMBERS = {
    "model_width": np.array(6.0),
    "width": np.array(4.0),
    "epsilon": np.array(1e-5),
    "tokens": np.array([7, 2, 5, 2]),
    "token_numbers": np.array([2, 5, 7]),
    "query_positions": np.arange(4),
    "key_positions": np.arange(4),
}
FREQUENCIES = np.array([-1.0, -0.1, 1.0, 0.1])
ATTENTION = {f"W_{name}" for name in "qkvo"} | {"query_positions", "key_positions", "frequencies"}
FORMS = {
    "llama": (
        Layer(
            frozenset(
                ATTENTION
                | {"W_gate", "W_up", "W_down", "attention_input_scale", "mlp_input_scale"}
                | {"normed_queries_scale", "normed_keys_scale"}
            ),
            *("rms", "before", "silu"),
        ),
        {"final_scale"},
    ),
    "bert": (
        Layer(
            frozenset(
                ATTENTION
                | {"W_up", "W_down", "b_q", "b_o", "b_up", "b_down"}
                | {f"{n}_{p}" for n in ("after_attention", "hidden") for p in ("scale", "shift")}
            ),
            *("layer", "after", "gelu"),
        ),
        {"positions_vectors"},
    ),
    "gemma": (
        Layer(
            frozenset(ATTENTION | {"W_gate", "W_up", "W_down", "mlp_result_scale"}),
            *("rms", "both", "gelu_tanh"),
        ),
        {"embedding_scale", "logits_softcap", "final_scale"},
    ),
    "opt": (
        Layer(frozenset(ATTENTION | {"W_up", "W_down"}), "layer", "before", "relu"),
        set(),
    ),
}
# Cells of some hundred roundings each; sums of at most nine terms.
NEAR = 1e-11


def run_of(name, changes=None):
    """A model of two layers with random weights, and the steps back from its logits."""
    form, extra = FORMS[name]
    steps = model((form, form), frozenset(extra), form)
    rng, inputs = np.random.default_rng(0), {}
    for step in steps:
        if step.op == "given":
            inputs[step.name] = rng.normal(size=[SIZES[axis] for axis in step.axes])
    inputs |= {key: one for key, one in NUMBERS.items() if key in inputs}
    inputs |= {key: FREQUENCIES for key in inputs if key.endswith("frequencies")}
    inputs |= {key: abs(inputs[key]) for key in inputs if key in ("logits_softcap",)}
    inputs |= changes or {}
    return Run(steps, inputs, HEADS, dtype=np.dtype(np.float64), rules=Causal())


@pytest.mark.parametrize("name", FORMS)
def test_the_gradients_of_a_model_are_the_slopes_of_its_logits(name):
    run = run_of(name)
    wanted = {"token_table", "unembedding", "0.W_up", "1.W_q", "0.W_v"}
    wanted |= {key for key in run.inputs if key.endswith(("_scale", "_shift")) and key[0] in "01"}
    steps = backward(tuple(run.steps.values()), wanted, ("logits",), compact=False)
    rng = np.random.default_rng(1)
    arrives = rng.normal(size=run.shape("logits"))
    whole = run.continued(steps, {"d_logits": arrives})
    for key in wanted:
        way = rng.normal(size=run.inputs[key].shape)
        above, below = (
            (run_of(name, {key: run.inputs[key] + step * way}).value("logits") * arrives).sum()
            for step in (1e-6, -1e-6)
        )
        rise = (whole.value(f"d_{key}") * way).sum()
        np.testing.assert_allclose(rise, (above - below) / 2e-6, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", FORMS)
def test_every_cell_of_a_model_follows_from_its_operands(name):
    run = run_of(name)
    steps = backward(tuple(run.steps.values()), {"embeddings"}, ("logits",), compact=False)
    whole = run.continued(steps, {"d_logits": np.ones(run.shape("logits"))})
    labels, rng = Labels({}, whole.sizes), np.random.default_rng(2)
    for step in whole.steps.values():
        if step.op in ("given", "visible"):
            continue
        shape = whole.shape(step.name)
        index = tuple(int(rng.integers(size)) for size in shape)
        cell = derive(whole, labels, step.name, (), index)
        np.testing.assert_allclose(cell.recompute(), cell.value, rtol=NEAR, atol=NEAR)
        with np.errstate(all="ignore"):
            line = eval(cell.numpy(), {"np": np, "math": math})
        np.testing.assert_allclose(line, cell.value, rtol=NEAR, atol=NEAR)
        assert cell.text()
        assert cell.latex()
        assert step.latex


def test_every_operation_of_a_block_is_met():
    met = set()
    for name in FORMS:
        run = run_of(name)
        steps = tuple(run.steps.values())
        met |= {one.op for one in (*steps, *backward(steps, {"embeddings"}, ("logits",)))}
    assert BLOCK_OPERATIONS.keys() <= met


@pytest.mark.parametrize("name", FORMS)
def test_every_step_of_a_model_has_its_words(name):
    for step in run_of(name).steps.values():
        assert words_of_model(step.name), step.name


def test_a_norm_has_rows_of_size_one_and_a_layer_norm_no_mean():
    for kind in ("rms", "layer"):
        form = Layer(
            frozenset({"W_q", "W_k", "W_v", "W_o", "W_up", "W_down"}), kind, "before", "relu"
        )
        steps = layer(form)
        rng = np.random.default_rng(3)
        given = {
            step.name: rng.normal(3, 5, [SIZES[axis] for axis in step.axes])
            for step in steps
            if step.op == "given"
        } | {name: NUMBERS[name] for name in ("model_width", "width")}
        given["epsilon"] = np.array(0.0)
        run = Run(steps, given, HEADS, dtype=np.dtype(np.float64), rules=Causal())
        rows = run.value("attention_input")
        np.testing.assert_allclose(np.square(rows).mean(axis=-1), 1, rtol=16 * 2.0**-52)
        if kind == "layer":
            np.testing.assert_allclose(rows.mean(axis=-1), 0, atol=16 * 2.0**-52)

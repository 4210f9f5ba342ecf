"""Backward passes: how they are called, and which of their gradients and steps are wrong."""

from __future__ import annotations

import numpy as np
import pytest

import regard
import wrong_gradients as wrong
from regard.diagnosis.gradient_probe import with_gradients
from regard.diagnosis.probe import RIGHT, UNITS
from regard.diagnosis.probes import projected_probes, ready_probes
from regard.diagnosis.mistakes import GRADIENTS
from regard.errors import OptionError

PARTS = ("queries", "keys", "values")


def states(found):
    return {one.name: one.state for one in found.gradients}


@pytest.mark.parametrize("rank", [2, 4])
def test_a_probe_of_gradients_has_those_of_regard_gradients(rank):
    for probe in ready_probes(rank):
        own = with_gradients(probe)
        given = own.inputs
        visible = probe.visible if probe.has_rules else None
        found = regard.gradients(
            given["queries"],
            given["keys"],
            given["values"],
            grad_output=given["d_output"],
            mask=visible,
            scale=probe.scale,
        )
        expected = np.concatenate([found.query, found.key, found.value], axis=None)
        tolerance = own.tolerance(UNITS["float64"])
        np.testing.assert_allclose(own.output(RIGHT), expected, rtol=0, atol=tolerance)


def test_a_probe_of_embeddings_has_the_slope_of_its_output():
    shapes = dict(W_q=(3, 4), W_k=(3, 2), W_v=(3, 2), W_o=(4, 3), b_q=(4,))
    probe = next(projected_probes(shapes, 2, 1, rows=3))
    own = with_gradients(probe)
    moved = np.random.default_rng(0).normal(size=probe.inputs["embeddings"].shape)

    def loss(step):
        inputs = {**probe.inputs, "embeddings": probe.inputs["embeddings"] + step * moved}
        one = type(probe)(probe.name, probe.ability, inputs, probe.heads, probe.groups)
        return (one.result(one.right) * own.inputs["d_projected_output"]).sum()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    np.testing.assert_allclose(own.output(RIGHT) @ moved.ravel(), slope, rtol=1e-8)


# These need different ways of calling and matching.
TELLING = {"delta_forgotten", "backward_not_masked", "grouped_gradient_not_summed"}
TELLING |= {"softcap_slope_lost", "keys_and_values_returned_swapped", "last_block_lost_backward"}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one.name, marks=() if one.name in TELLING else pytest.mark.full)
        for one in GRADIENTS
    ],
)
def test_every_mistake_of_a_backward_pass_is_named(mistake):
    found = regard.diagnose(wrong.WRITTEN.get(mistake, wrong.backward)(mistake))
    assert found.names == (mistake,), found
    assert found.exit_code == 1
    assert "wrong" in states(found).values()
    assert found.mistakes[0].example is not None


@pytest.mark.parametrize("make", [wrong.backward, wrong.by_heads, wrong.by_blocks, wrong.capped])
def test_backward_passes_without_a_mistake_are_right(make):
    found = regard.diagnose(make())
    assert found.verdict == "right", found
    assert states(found) == dict.fromkeys(PARTS, "right")


def test_which_gradients_are_right_is_said():
    found = regard.diagnose(wrong.backward("weights_not_transposed_backward"))
    assert states(found) == {"queries": "right", "keys": "right", "values": "wrong"}
    assert found.mistakes[0].step == "d_values"
    assert "dV" in found.summary


def test_a_backward_pass_of_wrong_weights_has_a_mistake_of_the_forward_pass():
    def unmasked_maximum(q, k, v, do):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        p = np.exp(s - s.max(-2, keepdims=True))
        p = p / p.sum(-2, keepdims=True)
        dp = do @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    found = regard.diagnose(unmasked_maximum)
    assert found.names == ("softmax_over_queries",), found


def attention_forward(q, k, v):
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p @ v, (q, k, v, p)


def attention_backward(dout, cache):
    q, k, v, p = cache
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


class Attention:
    """Two passes that keep what they need in the object, and the gradients too."""

    factor = 1.0

    def forward(self, q, k, v):
        out, self.cache = attention_forward(q, k, v)
        return out

    def backward(self, grad):
        self.dq, self.dk, self.dv = attention_backward(grad, self.cache)
        self.dk = self.dk * self.factor


class Doubled(Attention):
    factor = 2.0


@pytest.mark.parametrize(
    "passes",
    [attention_backward, (attention_forward, attention_backward), Attention, Attention()],
    ids=["a backward pass beside its forward pass", "both", "a class", "an object"],
)
def test_a_backward_pass_that_takes_what_the_forward_pass_kept_is_called(passes):
    found = regard.diagnose(passes)
    assert found.verdict in ("right", "fragile"), found
    assert states(found) == dict.fromkeys(PARTS, "right")


def test_an_object_with_a_wrong_backward_pass_is_named():
    found = regard.diagnose(Doubled)
    assert found.names == ("gradient_doubled",)
    assert found.summary.startswith("Doubled's output is right, its gradients are mistaken: ")
    assert states(found) == {"queries": "right", "keys": "wrong", "values": "right"}


def test_gradients_are_told_apart_by_the_names_in_a_return_or_a_dictionary():
    def other_order(v, k, q, upstream):
        dq, dk, dv = wrong.backward()(q, k, v, upstream)
        return dv, dk, dq

    def by_name(query, key, value, grad_output):
        dq, dk, dv = wrong.backward()(query, key, value, grad_output)
        return {"grad_value": dv, "grad_query": dq, "grad_key": dk}

    for function in (other_order, by_name):
        assert regard.diagnose(function).verdict == "right"


def test_what_cannot_be_paired_or_read_says_so():
    def lonely_backward(dout, cache):
        return dout

    with pytest.raises(OptionError, match="no forward pass is found beside it"):
        regard.diagnose(lonely_backward)
    with pytest.raises(OptionError, match="two functions"):
        regard.diagnose((attention_forward, 3))
    found = regard.diagnose(lambda q, k, v, dout: (dout, dout))
    assert found.verdict == "unusable"
    assert "the gradients of 3 inputs are asked for" in found.summary


@pytest.mark.needs("torch")
def test_autograd_functions_and_detached_weights_are_named():
    import torch

    import wrong_gradients_torch as in_torch

    assert regard.diagnose(in_torch.function()).verdict == "right"
    found = regard.diagnose(in_torch.function("delta_of_weights"))
    assert found.names == ("delta_of_weights",), found
    found = regard.diagnose(in_torch.detached)
    assert found.names == ("gradient_lost",), found
    assert states(found) == {"queries": "wrong", "keys": "wrong", "values": "right"}
    # What is made without gradients on purpose has none to be wrong.
    found = regard.diagnose(torch.no_grad()(in_torch.detached))
    assert found.ok
    assert found.gradients == ()
    assert "no gradient" in " ".join(one.text for one in found.findings)


@pytest.mark.needs("jax")
def test_a_custom_vjp_is_named():
    import wrong_gradients_jax as in_jax

    found = regard.diagnose(in_jax.attention(lost="dk"))
    assert found.names == ("gradient_of_keys_not_scaled",), found
    assert states(found) == {"queries": "right", "keys": "wrong", "values": "right"}

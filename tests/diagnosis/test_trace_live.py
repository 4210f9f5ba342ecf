"""Living functions run rewritten for as long as a trace takes, with what libraries do inside."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from regard.diagnosis.trace.depart import story, trace
from regard.diagnosis.trace.live import code_of
from traced import asked, drawn, with_gradients

OF_CLASS = """
import functools
import numpy as np

def counted(function):
    @functools.wraps(function)
    def call(*own):
        return function(*own)
    return call

def softmax(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)

class Layer:
    factor = 1.0

    @counted
    def attend(self, q, k, v):
        def weigh(s):
            return softmax(s * self.factor / q.shape[-1])
        return weigh(q @ k.swapaxes(-1, -2)) @ v

    def __call__(self, *own):
        return self.attend(*own)
"""
OF_TORCH = """
import torch
import torch.nn.functional as F

def attention(q, k, v):
    return F.scaled_dot_product_attention(q * 0.5, k, v)
"""
OF_JAX = """
import jax
import jax.numpy as jnp

@jax.jit
def attention(q, k, v):
    def head(q, k, v):
        s = q @ k.T / jnp.sqrt(q.shape[-1])
        return jax.nn.softmax(s, axis=0) @ v
    return jax.vmap(jax.vmap(head))(q, k, v)
"""
BACKWARD = """
import numpy as np

def backward(q, k, v, g):
    d = np.sqrt(q.shape[-1])
    s = q @ k.swapaxes(-1, -2) / d
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dv = p.swapaxes(-1, -2) @ g
    dp = g @ v.swapaxes(-1, -2)
    ds = p * dp
    return ds @ k / d, ds.swapaxes(-1, -2) @ q / d, dv
"""


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    def load(source):
        path = tmp_path / "strangers.py"
        path.write_text(source.lstrip("\n"), "utf-8")
        spec = importlib.util.spec_from_file_location("strangers", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "strangers", module)
        spec.loader.exec_module(module)
        return module

    return load


def traced(thing, call, problem):
    return trace(call, code_of(thing), thing, problem)


def test_an_object_is_traced_where_it_lives_and_left_unchanged(loaded):
    module, problem = loaded(OF_CLASS), asked(drawn())
    layer, own = module.Layer(), problem.probe.inputs.values()
    before = {name: vars(module.Layer)[name] for name in ("attend", "__call__")}
    code = module.softmax.__code__
    _, departure = traced(layer, lambda: {"output": layer(*own)}, problem)
    assert departure is not None
    assert (departure.step, departure.line) == ("scaled", 20)
    assert module.softmax.__code__ is code
    assert {name: vars(module.Layer)[name] for name in before} == before
    assert not [name for name in vars(module) if name.startswith("regard")]


def test_code_without_source_says_so():
    space: dict = {}
    exec("def f(q): return q", space)
    assert code_of(space["f"]).broken
    assert code_of(np.exp).broken


def test_a_gradient_by_hand_departs_at_the_line_of_its_step(loaded):
    module = loaded(BACKWARD)
    problem = asked(with_gradients(drawn()), "queries", "keys", "values")
    given = [np.array(one) for one in problem.probe.inputs.values()]

    def run():
        return dict(zip(("queries", "keys", "values"), module.backward(*given), strict=True))

    _, departure = traced(module.backward, run, problem)
    assert departure is not None
    assert (departure.step, departure.line) == ("d_scaled", 10)
    assert departure.mistake == "delta_forgotten"


@pytest.mark.needs("torch")
def test_attention_of_torch_is_opened(loaded):
    import torch

    module, problem = loaded(OF_TORCH), asked(drawn())
    given = [torch.from_numpy(np.array(one)) for one in problem.probe.inputs.values()]
    own, departure = traced(
        module.attention, lambda: {"output": module.attention(*given).numpy()}, problem
    )
    assert departure is not None
    assert departure.line == 5
    assert departure.how == "put"
    assert "keys" not in story(own).right


@pytest.mark.needs("jax")
def test_jax_is_traced_through_jit_and_vmap(loaded):
    import jax

    with jax.enable_x64(True):
        module, problem = loaded(OF_JAX), asked(drawn())
        given = [jax.numpy.asarray(one) for one in problem.probe.inputs.values()]
        _, departure = traced(
            module.attention, lambda: {"output": np.asarray(module.attention(*given))}, problem
        )
    assert departure is not None
    assert departure.line == 8

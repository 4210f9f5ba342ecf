"""The lines that `reproduce()` writes run as they are, and print a wrong and a right number."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import regard
from regard.diagnosis.isolation import diagnose_target

IN_NUMPY = """
import numpy as np

def weights(q, k, scale):
    e = np.exp(q @ k.swapaxes(-1, -2) * scale)
    return e / e.sum(-1, keepdims=True)

def by_width(q, k, v):
    return weights(q, k, 1 / q.shape[-1]) @ v

def masked_late(q, k, v, mask):
    p = weights(q, k, q.shape[-1] ** -0.5)
    return (p * mask) @ v, p

def backward(q, k, v, do, o, lse):
    p = np.exp(q @ k.T / q.shape[-1] ** 0.5 - lse[:, None])
    ds = p * (do @ v.T - (do * o).sum(-1, keepdims=True))
    return ds @ k / q.shape[-1] ** 0.5, ds.T @ q, p.T @ do
"""
IN_TORCH = """
import torch

def forgetful(q, k, v, is_causal=False):
    s = q @ k.mT
    hidden = torch.ones(s.shape[-2:]).triu(1).bool()
    return (s.masked_fill(hidden, -torch.inf) if is_causal else s).softmax(-1) @ v

def detached(q, k, v):
    p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return p.detach() @ v, p

class Layer(torch.nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, torch.nn.Linear(embed_dim, embed_dim))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        p = (q @ k.mT / x.shape[-1] ** 0.5).softmax(-1)
        return self.o_proj((p @ v).transpose(-2, -3).flatten(-2))

layer = Layer(4, 2)
"""
NUMBERS = re.compile(r"wrong (\S+)  right (\S+)\n")


def run(scripts):
    """What each script prints, in one process without the tests' folders, and both its numbers."""
    code = "\n".join(f"exec({script!r}, {{}})" for script in scripts)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True
    )
    return [tuple(map(float, pair)) for pair in NUMBERS.findall(done.stdout)]


def check(place, names):
    found = [diagnose_target(f"{place}:{name}", {}, in_process=True) for name in names]
    assert [one.verdict for one in found] == ["mistaken"] * len(names)
    numbers = run([one.reproduce() for one in found])
    assert len(numbers) == len(names)
    for one, (wrong, right) in zip(found, numbers, strict=True):
        assert abs(wrong - right) > 1e-3, one.reproduce()
    return found


def test_the_lines_for_functions_on_numpy_run(tmp_path):
    place = tmp_path / "in_numpy.py"
    place.write_text(IN_NUMPY)
    found = check(place, ["by_width", "masked_late", "backward"])
    lines = found[0].reproduce().split("\n")
    assert len(lines) <= 12
    assert "from in_numpy import by_width" in lines
    assert any(
        "regard.gradients(q, k, v, grad_output=up).key" in one
        for one in found[2].reproduce().split("\n")
    )


@pytest.mark.needs("torch")
def test_the_lines_for_functions_modules_and_classes_in_torch_run(tmp_path):
    place = tmp_path / "with-torch.py"
    place.write_text(IN_TORCH)
    found = check(place, ["forgetful", "detached", "Layer", "layer"])
    assert 'importlib.import_module("with-torch")' in found[0].reproduce().replace("'", '"')
    assert "model = Layer(embed_dim=24, num_heads=4)" in found[2].reproduce()


def test_what_is_right_or_was_defined_elsewhere_says_so():
    assert regard.diagnose(regard.attention).reproduce().startswith("# attention is right")
    found = regard.diagnose(lambda q, k, v: q @ k.swapaxes(-1, -2) @ v)
    assert "# function is what was diagnosed" in found.reproduce()
    assert found.from_json(found.to_json()).reproduce() == found.reproduce()

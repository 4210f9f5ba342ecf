"""Attention with more around it, and with arguments packed in unusual ways."""

from __future__ import annotations

import pytest

import regard
from support import surrounded_attentions as of_numpy


def check(function):
    name = getattr(function, "__name__", "")
    found = regard.diagnose(function)
    assert found.verdict == "right", f"{name}: {found}"
    return found


def check_unscaled(monkeypatch, module, function):
    monkeypatch.setattr(module, "SCALED", False)
    found = regard.diagnose(function)
    assert found.verdict == "mistaken", str(found)
    first = str(found).splitlines()[0]
    assert "not scaled" in first or "multiplied by 1 instead" in first, first


@pytest.mark.parametrize("function", of_numpy.ALL, ids=lambda one: one.__name__)
def test_a_function_with_packed_arguments_is_right_and_without_its_scale_it_is_not(
    function, monkeypatch
):
    check(function)
    if function is not of_numpy.Cache:  # of wrong numbers alone nobody can tell H from T
        check_unscaled(monkeypatch, of_numpy, function)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("number", range(12))
def test_a_layer_with_more_around_attention_is_right_and_without_its_scale_it_is_not(
    number, monkeypatch
):
    from support import surrounded_attentions_torch as of_torch

    assert len(of_torch.ALL) == 12
    layer = of_torch.ALL[number]
    found = check(layer)
    if hasattr(layer(), "norm"):
        assert "judged without its norm" in str(found)
    check_unscaled(monkeypatch, of_torch, layer)


@pytest.mark.needs("torch")
def test_what_only_several_calls_or_all_weights_show_is_named():
    from support import surrounded_attentions_torch as of_torch

    assert regard.diagnose(of_torch.KeepsItsContext()).names == ("stale_context",)
    assert regard.diagnose(of_torch.KeepsItsContext(fresh=True)).verdict == "right"
    assert regard.diagnose(of_torch.LearnedDistances()).names == ("positions_unused",)
    found = regard.diagnose(of_torch.LearnedDistances(same=False))
    assert found.verdict == "right"
    assert "by the distance of query and key (not judged)" in str(found)


@pytest.mark.parametrize(
    ("code", "layout"),
    [
        ("b, t, h, d = q.shape", "BLHD"),
        ("q: [num_heads, seq_len, head_dim]", "HLD"),
        ("q, k, v: b h n d", "BHLD"),
        ("q is an array (batch, heads, queries)", ""),
    ],
)
def test_a_layout_is_read_from_code_and_comments(code, layout):
    from regard.diagnosis.reading.layouts import layout_said

    assert layout_said(code, "q") == layout

"""Functions that read settings from the layer they belong to, as model repositories write them."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.diagnosis.forms.source import unused_layers
from regard.diagnosis.forms.weights import readings_of_weights

pytestmark = pytest.mark.needs("torch")


def eager(*, scaled=True, sinks=False, axis=-1):
    """Attention of a layer, rows before heads in its result."""
    import torch

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        each = module.num_key_value_groups
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3)
        scores = scores * scaling if scaled else scores
        if attention_mask is not None:
            scores = scores + attention_mask[..., : key.shape[-2]]
        if sinks:
            sink = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink.to(scores)], dim=-1)
        weights = torch.nn.functional.softmax(scores, dim=axis)
        weights = torch.nn.functional.dropout(weights, dropout, training=module.training)
        weights = weights[..., :-1] if sinks else weights
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


@pytest.mark.parametrize("sinks", [False, True])
def test_a_function_of_a_layer_is_called_and_right(sinks):
    found = regard.diagnose(eager(sinks=sinks))
    assert found.verdict == "right", str(found)


def test_a_function_of_a_layer_that_is_wrong_is_named_with_code_that_runs():
    found = regard.diagnose(eager(axis=-2))
    assert found.verdict == "mistaken", str(found)
    assert "softmax" in str(found).splitlines()[0]
    assert "SimpleNamespace(training=False, num_heads=" in found.reproduce()
    unscaled = str(regard.diagnose(eager(scaled=False))).splitlines()[0]
    assert "multiplied by 1 instead of 1/√D" in unscaled


@pytest.mark.full
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    "family", ["llama", "bert", "gpt_neox", "clip", "gpt_oss", "internvl", "llama4", "blip_2"]
)
def test_what_models_of_transformers_compute_is_right(family):
    from importlib import import_module

    module = import_module(f"transformers.models.{family}.modeling_{family}")
    found = regard.diagnose(module.eager_attention_forward)
    assert found.verdict == "right", str(found)


@pytest.mark.parametrize(
    "name",
    [
        *("dense", "unifyheads", "projection", "final", "fc", "combine", "mix"),
        *("out", "o", "output", "proj", "c_proj", "out_proj", "to_out", "fc_out"),
    ],
)
def test_the_layer_after_the_heads_has_many_names(name):
    class Layer:
        def __init__(self):
            self.query, self.key, self.value = np.random.default_rng(1).normal(size=(3, 8, 8))
            setattr(self, name, 2 * np.eye(8))

    (weights, heads, _), *_ = readings_of_weights(Layer(), 2)
    assert (sorted(weights), heads) == (["W_k", "W_o", "W_q", "W_v"], 2)
    np.testing.assert_array_equal(weights["W_o"], 2 * np.eye(8))


def test_a_parameter_that_nothing_reads_is_named():
    import torch

    import wrong_attentions_torch as of_torch

    class Head(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(dim, dim) for _ in range(3))
            self.spare_bias = torch.nn.Parameter(torch.zeros(dim))
            torch.nn.init.zeros_(self.spare_bias)

        def forward(self, x):
            s = self.q(x) @ self.k(x).transpose(-1, -2) / x.shape[-1] ** 0.5
            return s.softmax(-1) @ self.v(x)

    found = regard.diagnose(Head)
    assert found.names == ("layer_unused",)
    assert "_".join(("spare", "bias")) in str(found)  # its name as a text would be a use of it
    assert unused_layers(of_torch.MultiHead) == ()


@pytest.mark.parametrize(
    ("inputs", "added", "again", "names"),
    [
        ("hhh", "x", False, ()),
        ("xxx", "x", True, ()),
        ("hhh", "h", False, ("normalised_input_added",)),
        ("hxx", "x", False, ("norm_misses_a_part",)),
        ("hhx", "x", True, ("norm_misses_a_part",)),
    ],
)
def test_what_a_normalisation_reaches_is_seen(inputs, added, again, names):
    import torch

    class PreNormLayer(torch.nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.norm = torch.nn.LayerNorm(dim)
            self.attention = torch.nn.MultiheadAttention(dim, heads, batch_first=True)

        def forward(self, x):
            known = {"x": x, "h": self.norm(x)}
            x = known[added] + self.attention(*(known[one] for one in inputs))[0]
            return self.norm(x) if again else x

    found = regard.diagnose(PreNormLayer)
    assert (found.names, found.ok) == (names, not names), str(found)


@pytest.mark.parametrize("everywhere", [False, True])
def test_positions_of_queries_and_keys_that_reach_the_values_are_named(everywhere):
    import torch

    class Encoder(torch.nn.Module):
        """pos is added to queries and keys."""

        def __init__(self, dim):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(dim, dim) for _ in range(3))

        def forward(self, src, pos=None):
            """src, pos: (batch, length, dim)"""
            both = src if pos is None else src + pos
            s = self.q(both) @ self.k(both).transpose(-1, -2) / src.shape[-1] ** 0.5
            return s.softmax(-1) @ self.v(both if everywhere else src)

    assert regard.diagnose(Encoder).names == ("positions_in_values",) * everywhere


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("width", [16, 12])
def test_a_scale_by_a_part_of_the_width_is_named_where_no_catalogue_knows_the_scores(width, summed):
    import torch

    def turned(x):
        return x.roll(1, -1) * torch.arange(x.shape[-2])[:, None].cos()

    class Latent(torch.nn.Module):
        def __init__(self, dim=24):
            super().__init__()
            self.q_down, self.q_up = torch.nn.Linear(dim, 8), torch.nn.Linear(8, 2 * 16)
            self.kv_down, self.kv_up = torch.nn.Linear(dim, 8 + 4), torch.nn.Linear(8, 2 * 24)
            self.proj = torch.nn.Linear(24, dim)

        def forward(self, x):
            split = (*x.shape[:2], 2, -1)
            q, near = self.q_up(self.q_down(x)).view(split).transpose(1, 2).split([12, 4], -1)
            low, far = self.kv_down(x).split([8, 4], -1)
            k, v = self.kv_up(low).view(split).transpose(1, 2).split([12, 12], -1)
            near, far = turned(near), turned(far)[:, None]
            if summed:
                s = q @ k.transpose(-1, -2) + near @ far.transpose(-1, -2)
            else:
                q, k = torch.cat([q, near], -1), torch.cat([k, far.expand(-1, 2, -1, -1)], -1)
                s = q @ k.transpose(-1, -2)
            s = (s / width**0.5).softmax(-1) @ v
            return self.proj(s.transpose(1, 2).flatten(2))

    found = regard.diagnose(Latent())
    assert found.names == (() if width == 16 else ("scale_of_a_part",)), found
    held = [one.name for one in found.properties]
    assert width == 12 or "scale_of_a_part" in held

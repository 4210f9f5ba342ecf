"""Attention whose scores are not known here: judged by what holds for every attention."""

from __future__ import annotations

import numpy as np
import pytest

import regard


class Pooling:
    """A learned vector scores the tokens of a text; the text becomes their weighted mean."""

    def __init__(self, dim=6, wrong=""):
        rng = np.random.default_rng(3)
        self.hidden, self.vector, self.wrong = rng.normal(size=(dim, 9)), rng.normal(size=9), wrong

    def __call__(self, tokens, attention_mask):
        """tokens: (batch, length, dim); attention_mask: (batch, length), 1 for tokens."""
        scores = np.tanh(tokens @ self.hidden) @ self.vector
        real = np.asarray(attention_mask) > 0
        if self.wrong == "padding_one_key_more":
            real = np.arange(real.shape[1]) <= real.sum(-1, keepdims=True)
        late = self.wrong in ("weights_do_not_add_up", "padding_changes_the_output")
        e = np.exp(scores if late else np.where(real, scores, -1e30))
        weights = e / e.sum(0 if self.wrong == "batch_elements_mixed" else 1, keepdims=True)
        if self.wrong == "weights_do_not_add_up":
            weights = np.where(real, weights, 0) * np.exp(-scores) / 9
        if self.wrong == "weights_all_equal":
            weights = real / real.sum(1, keepdims=True)
        return np.einsum("bt,btd->bd", weights, tokens)


NAMES = (
    "padding_one_key_more",
    "padding_changes_the_output",
    "batch_elements_mixed",
    "weights_all_equal",
)


def test_nothing_is_said_against_a_right_one():
    found = regard.diagnose(Pooling())
    assert found.verdict == "unknown", str(found)
    assert "nothing measured is wrong" in str(found).splitlines()[0]
    assert {one.name for one in found.properties if one.holds} >= {
        "batch_elements_mixed",
        "padding_changes_the_output",
        "weights_do_not_add_up",
        "weights_all_equal",
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_breaks_a_property_is_named(name):
    found = regard.diagnose(Pooling(wrong=name))
    assert name in found.names, str(found)


def test_weights_that_are_left_small_beside_padding_are_named():
    class Unrenormalised(Pooling):
        def __call__(self, tokens, attention_mask):
            real = np.asarray(attention_mask) > 0
            share = real / real.shape[1]  # of the whole length, padding included
            return np.einsum("bt,btd->bd", share, np.tanh(tokens))

    assert regard.diagnose(Unrenormalised()).names == ("weights_do_not_add_up",)


@pytest.mark.needs("torch")
def test_a_layer_with_unknown_weights_is_judged_and_an_error_only_where_it_cannot_be_called():
    import torch

    class Step(torch.nn.Module):
        """One decoder state (B, H) reads states (B, T, H) through a network of both."""

        def __init__(self, units=10, dim=8):
            super().__init__()
            self.both, self.one = torch.nn.Linear(2 * dim, units), torch.nn.Linear(units, 1)

        def forward(self, state, memory):
            pairs = torch.cat([state[:, None].expand(-1, memory.shape[1], -1), memory], -1)
            weights = torch.softmax(self.one(torch.tanh(self.both(pairs)))[..., 0], 1)
            return (weights[..., None] * memory).sum(1)

    class OfNothing(Step):
        def forward(self, state, memory, edges, features):
            raise RuntimeError("takes something else")

    assert "nothing measured is wrong" in str(regard.diagnose(Step()))
    with pytest.raises(regard.OptionError, match="weights"):
        regard.diagnose(OfNothing())

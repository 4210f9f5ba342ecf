"""Right attentions, however they are written, are not accused."""

from __future__ import annotations

import numpy as np
import pytest

import known_attentions as known
import regard
import wrong_attentions as wrong
from regard.testing import assert_attention_correct
from right_attentions import RIGHT

FRAGILE = {"scaled_queries", "both_scaled"}  # exp without the maximum subtracted


@pytest.mark.parametrize("function", RIGHT, ids=lambda f: getattr(f, "__name__", "Layer"))
def test_a_right_attention_is_right_however_it_is_written(function):
    found = regard.diagnose(function)
    assert found.ok, found
    assert found.mistakes == ()
    assert found.exit_code == 0
    assert (found.verdict == "fragile") == (found.function in FRAGILE)
    failing = [one for one in found.properties if one.holds is False]
    assert failing == []


SLOW = {known.gemma_softcap}  # a softcap is found after all else


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(one, marks=pytest.mark.full if one in SLOW else (), id=one.__name__)
        for one in known.NUMPY
    ],
)
def test_the_idioms_of_known_projects_are_not_accused(function):
    found = regard.diagnose(function)
    assert found.verdict == "right", found


def test_an_attention_that_is_meant_without_a_scale_is_right_if_that_is_said():
    meant = regard.scores.General(np.eye(6))
    assert regard.diagnose(known.t5_unscaled, score=meant).verdict == "right"


@pytest.mark.needs("torch")
def test_the_layers_of_known_projects_are_not_accused():
    import known_attentions_torch as in_torch

    for make in in_torch.LAYERS:
        found = regard.diagnose(make())
        assert found.verdict == "right", found
        assert {one.state for one in found.gradients} == {"right"}, found


@pytest.mark.parametrize(
    "make",
    [
        wrong.unmasked,
        wrong.masked,
        wrong.with_causal,
        wrong.general,
        wrong.windowed,
        wrong.multihead,
        wrong.cached,
        lambda: wrong.grouped(None),
        lambda: wrong.padded(None),
    ],
)
def test_the_wrong_attentions_are_right_without_their_mistakes(make):
    assert regard.diagnose(make()).verdict == "right"


def test_regard_itself_is_right_and_breaks_nowhere():
    found = regard.diagnose(regard.attention)
    assert found.verdict == "right"
    assert found.fragilities == ()
    states = {ability.name: ability.state for ability in found.abilities}
    for name in ("plain", "rectangular", "heads", "grouped", "mask", "causal", "scale"):
        assert states[name] == "right", name


@pytest.mark.needs("torch")
def test_what_torch_brings_is_right():
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import wrong_attentions_torch as in_torch

    assert regard.diagnose(scaled_dot_product_attention).verdict == "right"
    assert regard.diagnose(torch.nn.MultiheadAttention(6, 2, batch_first=True)).verdict == "right"
    assert regard.diagnose(torch.nn.MultiheadAttention(6, 3)).verdict == "right"
    assert regard.diagnose(in_torch.attention()).verdict == "right"
    assert regard.diagnose(in_torch.MultiHead()).verdict == "right"
    assert regard.diagnose(in_torch.MultiHead).verdict == "right"
    assert regard.diagnose(in_torch.MultiHead("b_k_lost")).verdict == "right"


@pytest.mark.needs("jax")
def test_what_jax_computes_is_right():
    import jax
    import jax.numpy as jnp

    def mine(q, k, v, mask=None):
        s = q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(q.shape[-1])
        s = s if mask is None else jnp.where(mask, s, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    found = regard.diagnose(mine)
    assert found.verdict == "right"
    assert "JAX float32" in found.called
    assert regard.diagnose(jax.nn.dot_product_attention).verdict == "right"


@pytest.mark.needs("scipy")
def test_scipys_softmax_is_right():
    from scipy import special

    def mine(q, k, v):
        return special.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1]), axis=-1) @ v

    assert regard.diagnose(mine).verdict == "right"


def test_the_assertion_passes_what_is_right_and_names_what_is_not():
    assert assert_attention_correct(wrong.masked()).verdict == "right"
    with pytest.raises(AssertionError, match="not scaled"):
        assert_attention_correct(wrong.unmasked("no_scale"))
    with pytest.raises(AssertionError, match="without subtracting the row maximum"):
        assert_attention_correct(wrong.unmasked("no_maximum_subtracted"))
    fragile = wrong.unmasked("no_maximum_subtracted")
    assert assert_attention_correct(fragile, allow_fragile=True).verdict == "fragile"


@pytest.mark.needs("torch")
def test_half_types_are_right_within_their_own_bound_and_lost_digits_are_told():
    from torch.nn.functional import scaled_dot_product_attention as attend

    def narrow(q, k, v):
        return attend(q.bfloat16(), k.bfloat16(), v.bfloat16())

    def there_and_back(q, k, v):
        return attend(q.half(), k.half(), v.half()).to(q.dtype)

    found = regard.diagnose(narrow)
    assert (found.verdict, found.exact_to) == ("right", "bfloat16")
    assert regard.diagnose(there_and_back).names == ("computed_in_half_precision",)

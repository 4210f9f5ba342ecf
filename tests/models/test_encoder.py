"""A tiny random encoder: its numbers, its batches, its explanations and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest

import regard
import tiny_bert
from regard import DtypeError, LabelError, OptionError, ProblemError
from regard.explanation.overview import BLOCK_CELLS
from regard.models.encoder import Encoder
from regard.models.pooling import WAYS

pytestmark = [pytest.mark.needs("safetensors"), pytest.mark.needs("tokenizers")]

TEXT = "The cat sat on the mat."
LABELS = ("[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]")
LONG = "the cat waits . " * 4  # 4·5 tokens and two special ones, of at most 16

# Every number of a hidden state has gone through so many sums of so many terms, and normalising
# keeps it near 1. Errors of one step may be enlarged by the next: weights of width 12 drawn from
# N(0, 1) stretch by √12, the normalisation shrinks again by as much.
_TERMS = tiny_bert.CONFIG["num_hidden_layers"] * (
    4 * tiny_bert.CONFIG["hidden_size"] + tiny_bert.CONFIG["intermediate_size"]
)
TOLERANCE = {np.float64: 16 * _TERMS * 2.0**-53, np.float32: 16 * _TERMS * 2.0**-24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_bert.write(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture(scope="module")
def encoder(folder):
    return regard.models.load(folder, dtype="float64")


def changed(tmp_path, **config):
    """A directory whose config.json says something else; None takes a key away."""
    merged = {**tiny_bert.CONFIG, **config}
    tiny_bert.write(tmp_path, weights=tiny_bert.tensors())
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in merged.items() if value is not None})
    )
    return tmp_path


def refusal(folder, *says):
    with pytest.raises(ProblemError) as caught:
        regard.models.load(folder)
    for said in says:
        assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_hidden_states_are_those_of_plain_loops(folder, dtype):
    encoder = regard.models.load(folder, dtype=dtype)
    exact = tiny_bert.hidden_states(tiny_bert.tensors(), encoder.tokens(TEXT).ids)
    states = encoder.hidden_states(TEXT)
    assert states.dtype == dtype
    np.testing.assert_allclose(states, exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.needs("ml_dtypes")
def test_half_weights_are_computed_in_float32(tmp_path, dtype):
    import ml_dtypes

    half = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    weights = {name: array.astype(half) for name, array in tiny_bert.tensors().items()}
    folder = tiny_bert.write(tmp_path, weights=weights)
    states = regard.models.load(folder).hidden_states(TEXT)
    exact = tiny_bert.hidden_states(weights, regard.models.load(folder).tokens(TEXT).ids)
    assert states.dtype == np.float32
    np.testing.assert_allclose(states, exact, rtol=0, atol=TOLERANCE[np.float32])


def test_a_prefix_and_old_names_of_normalisation_make_no_difference(tmp_path, encoder):
    def old(name):
        return "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    weights = {old(name): array for name, array in tiny_bert.tensors().items()}
    weights["cls.predictions.bias"] = np.zeros(3, np.float32)
    other = regard.models.load(tiny_bert.write(tmp_path, weights=weights), dtype="float64")
    np.testing.assert_array_equal(other.hidden_states(TEXT), encoder.hidden_states(TEXT))


def test_shards_make_no_difference(tmp_path, encoder):
    from safetensors.numpy import save_file

    tiny_bert.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names, places = list(tiny_bert.tensors()), {}
    for number, own in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tiny_bert.tensors()[name] for name in own}, tmp_path / file)
        places |= dict.fromkeys(own, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    other = regard.models.load(tmp_path, dtype="float64")
    np.testing.assert_array_equal(other.hidden_states(TEXT), encoder.hidden_states(TEXT))


@pytest.mark.needs("transformers")
@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"])
@pytest.mark.parametrize("head", [False, True], ids=["encoder", "with-a-head"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_every_family_computes_what_transformers_computes(tmp_path, kind, head, activation):
    import torch
    import transformers

    own = {"vocab_size": len(tiny_bert.WORDS), "max_position_embeddings": 20, "pad_token_id": 0}
    if kind == "distilbert":
        own |= {"dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20, "activation": activation}
    else:
        own |= {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
        own |= {"intermediate_size": 20, "hidden_act": activation}
    config = transformers.AutoConfig.for_model(kind, **own)
    maker = transformers.AutoModelForMaskedLM if head else transformers.AutoModel
    torch.manual_seed(0)
    theirs = maker.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases start as 0, and would be right if left out
            parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in tiny_bert.WORDS))
    ours = regard.models.load(tmp_path, dtype="float64")
    # A padding token inside the text counts for nothing when RoBERTa counts positions.
    tokens = ours.tokens(f"the cat [PAD] {TEXT}")
    with torch.no_grad():
        states = theirs.double()(
            torch.tensor(tokens.ids)[None], output_hidden_states=True
        ).hidden_states
    np.testing.assert_allclose(
        ours.hidden_states(f"the cat [PAD] {TEXT}"),
        np.concatenate([state.numpy() for state in states]),
        rtol=0,
        atol=TOLERANCE[np.float64],
    )


# --- batches -------------------------------------------------------------------------------------

TEXTS = ["cat", TEXT, "the dog ran on the cats .", "", "dog dog", TEXT]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 99])
def test_a_sentence_is_the_same_in_any_batch(encoder, batch_size):
    together = encoder.encode(TEXTS, batch_size=batch_size)
    alone = np.array([encoder.encode(text) for text in TEXTS])
    assert together.shape == (6, 12)
    np.testing.assert_allclose(together, alone, rtol=0, atol=TOLERANCE[np.float64])


def test_an_embedding_is_the_normalised_mean_where_no_file_says_otherwise(encoder):
    mean = encoder.hidden_states(TEXT)[-1].mean(axis=0)
    few = TOLERANCE[np.float64]
    np.testing.assert_allclose(encoder.encode(TEXT, normalise=False), mean, rtol=0, atol=few)
    unit = mean / np.sqrt((mean**2).sum())
    np.testing.assert_allclose(encoder.encode(TEXT), unit, rtol=0, atol=few)


def test_no_texts_give_no_embeddings(encoder):
    assert encoder.encode([]).shape == (0, 12)


def sentence_files(folder, pooling, kinds=("Transformer", "Pooling"), **prompts):
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": at, "path": paths.get(kind, f"{at}_{kind}"), "type": f"some.package.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_each_way_of_pooling_is_what_it_is_called(tmp_path, encoder):
    states = [encoder.hidden_states(text)[-1] for text in TEXTS]
    ways = {
        "cls": [state[0] for state in states],
        "max": [state.max(axis=0) for state in states],
        "mean": [state.mean(axis=0) for state in states],
        "mean_sqrt_len": [state.sum(axis=0) / np.sqrt(len(state)) for state in states],
        "lasttoken": [state[-1] for state in states],
    }
    assert tuple(ways) == WAYS
    keys = {f"pooling_mode_{way}": True for way in ("cls_token", "max_tokens", "mean_tokens")}
    keys |= {"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_lasttoken": True}
    folder = sentence_files(tiny_bert.write(tmp_path), keys)
    every = regard.models.load(folder, dtype="float64").encode(TEXTS)
    expected = np.concatenate([np.array(ways[way]) for way in WAYS], axis=-1)
    np.testing.assert_allclose(every, expected, rtol=0, atol=4 * TOLERANCE[np.float64])


def test_modules_json_decides_about_length_prompt_and_normalising(tmp_path, encoder):
    folder = sentence_files(
        tiny_bert.write(tmp_path),
        {"pooling_mode": "cls"},
        ("Transformer", "Pooling", "Normalize"),
        prompts={"query": "the dog "},
        default_prompt_name="query",
    )
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": 1}')
    made = regard.models.load(folder, dtype="float64")
    state = encoder.hidden_states("the dog sat")[-1][0]
    np.testing.assert_allclose(
        made.encode("SAT"), state / np.sqrt((state**2).sum()), rtol=0, atol=TOLERANCE[np.float64]
    )
    with pytest.raises(OptionError, match=r"has 7 tokens.*takes 6 \(sentence_bert_config.json\)"):
        made.encode("sat on the")
    cut = made.encode("sat on the", truncate=True)
    np.testing.assert_array_equal(cut, made.encode("sat on"))
    assert len(made.tokens("the dog sat on the")) == 7  # without sentences, only positions count


@pytest.mark.parametrize(
    ("pooling", "kinds", "says"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "weightedmean"),
        ({"pooling_mode": "median"}, ("Transformer", "Pooling"), '"median" is not supported'),
        ({}, ("Transformer", "Pooling"), "pooling by nothing"),
        ({"pooling_mode": "cls", "include_prompt": False}, ("Transformer", "Pooling"), "prompt"),
        ({"pooling_mode": "cls"}, ("Transformer", "Pooling", "Dense"), 'module "Dense"'),
        ({"pooling_mode": "cls"}, ("Transformer",), "no module Pooling"),
    ],
)
def test_sentences_that_cannot_be_made_are_refused_but_explained(tmp_path, pooling, kinds, says):
    made = regard.models.load(sentence_files(tiny_bert.write(tmp_path), pooling, kinds))
    with pytest.raises(ProblemError, match=says):
        made.encode(TEXT)
    assert made.explain(TEXT, 0).steps["weights"].shape == (3, 9, 9)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("modules.json", "{}", "list of modules"),
        ("modules.json", "[3]", "3 where a module"),
        (
            "modules.json",
            '[{"type": "a.Pooling", "path": "../1_Pooling"}]',
            "name of a directory",
        ),
        ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "name of a directory"),
        ("modules.json", '[{"path": ""}]', "type has nothing"),
        ("1_Pooling/config.json", "[]", "must be a table"),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', "max_seq_length is 0"),
        ("sentence_bert_config.json", '{"max_seq_length": "a"}', "must be a whole number"),
        ("sentence_bert_config.json", "[]", "must be a table"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "no such prompt"),
    ],
)
def test_what_makes_sentences_must_be_well_formed(tmp_path, file, content, says):
    folder = sentence_files(tiny_bert.write(tmp_path), {"pooling_mode": "cls"})
    (folder / file).write_text(content)
    refusal(folder, f"{file}: ", says)


# --- explanations --------------------------------------------------------------------------------


def test_an_explanation_of_all_heads_ends_in_what_the_layer_adds(encoder):
    states = encoder.hidden_states(TEXT)
    for number, layer in enumerate(encoder.stack.layers):
        explanation = encoder.explain(TEXT, number)
        assert explanation.names.along("L")[2] == "cat"
        np.testing.assert_array_equal(explanation.steps["embeddings"].value, states[number])
        after = layer.after(
            {"embeddings": states[number][None], "output": explanation["output"].value[None]}
        )
        for found, wanted in (
            (after["projected_output"][0], explanation.output),
            (after["hidden"][0], states[number + 1]),
        ):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[np.float64])


def test_one_head_is_that_part_of_all_heads(encoder):
    whole = encoder.explain(TEXT, 1)
    for head in range(3):
        one = encoder.explain(TEXT, 1, head)
        assert one.heads is None
        for step in ("weights", "output"):
            np.testing.assert_allclose(
                one.steps[step].value,
                whole.steps[step].value[head],
                rtol=0,
                atol=TOLERANCE[np.float64],
            )
        assert one.problem.note == (
            f"A bert model: layer 1 of 2, head {head} of 3, from 0. The embeddings are the "
            "layer's input."
        )


def test_why_leads_back_to_what_the_layer_gets(encoder):
    why = encoder.explain(TEXT, 1, 2).why("output", "cat", 0)
    steps = []
    while why.operands:
        steps.append(why.step)
        why = why.open(0)
    assert steps[0] == "output"
    assert why.step == "embeddings"
    assert why.value in encoder.hidden_states(TEXT)[1][2]


def test_options_ask_what_if(encoder):
    weights = encoder.explain(TEXT, 0, 0, mask=regard.masks.Causal()).steps["weights"].value
    assert weights[0, 0] == 1
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("cells", [BLOCK_CELLS, 1, 3 * 9 * 4])
def test_an_overview_is_the_means_of_the_weights(encoder, monkeypatch, cells):
    monkeypatch.setattr("regard.explanation.overview.BLOCK_CELLS", cells)
    overview = encoder.overview(TEXT)
    assert overview.tokens == LABELS
    n = len(LABELS)
    for layer in range(2):
        weights = encoder.explain(TEXT, layer).steps["weights"].value  # (3, 9, 9)
        expected = {
            "entropy": -(weights * np.log(weights)).sum(axis=-1).mean(axis=-1),
            "own": np.trace(weights, axis1=1, axis2=2) / n,
            "previous": np.trace(weights, offset=-1, axis1=1, axis2=2) / (n - 1),
            "following": np.trace(weights, offset=1, axis1=1, axis2=2) / (n - 1),
            "first": weights[:, :, 0].mean(axis=-1),
            "separators": weights[:, :, -1].mean(axis=-1),
        }
        assert overview.measures.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(
                overview.measures[name][layer], values, rtol=0, atol=TOLERANCE[np.float64]
            )


def test_an_overview_says_where_most_is(encoder):
    overview = encoder.overview(TEXT)
    layer, head, value = overview.largest("previous", 1)[0]
    assert value == overview.previous[layer, head] == overview.previous.max()
    assert f"previous    most {value:.2f} in {layer}.{head}, " in repr(overview)
    data = json.loads(json.dumps(overview.to_json(), allow_nan=False))
    assert data["format"] == "regard-overview/1"
    np.testing.assert_array_equal(data["measures"]["own"], overview.own)


def test_an_overview_of_one_token_has_no_neighbours(tmp_path):
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel({"cat": 0}, unk_token="cat"))
    folder = tiny_bert.write(tmp_path)
    library.save(str(folder / "tokenizer.json"))
    overview = regard.models.load(folder).overview("cat")
    assert np.isnan(overview.previous).all()
    assert (overview.own == 1).all()
    assert overview.largest("previous") == []
    assert "previous    NaN" in repr(overview)
    assert overview.to_json()["measures"]["following"] == [["nan"] * 3] * 2


# --- tokens --------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_vocabulary(encoder):
    tokens = encoder.tokens("The cats, waitting!")
    assert tokens.labels == (
        "[CLS]",
        "the",
        "cat",
        "##s",
        "[UNK]",
        "wait",
        "##ting",
        "[UNK]",
        "[SEP]",
    )
    assert tokens.ids.tolist() == [2, 4, 5, 12, 1, 14, 13, 1, 3]
    assert tokens.separators.tolist() == [False] * 8 + [True]


def test_a_ready_tokenizer_comes_before_a_vocabulary_and_never_pads_or_cuts(tmp_path, encoder):
    library = encoder.tokenizer.library.from_str(encoder.tokenizer.library.to_str())
    library.enable_padding(length=16)
    library.enable_truncation(max_length=4)
    folder = tiny_bert.write(tmp_path, words=["nothing"])
    library.save(str(folder / "tokenizer.json"))
    assert regard.models.load(folder).tokens(TEXT).labels == LABELS


def test_tokens_made_of_bytes_are_labelled_by_the_text(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"Ġcat": 0, "Ġthe": 1, "Ġ": 2, "<unk>": 3}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel()
    folder = tiny_bert.write(tmp_path)
    library.save(str(folder / "tokenizer.json"))
    assert regard.models.load(folder).tokens("the cat é").labels == ("the", "cat", "é")


def test_a_text_that_is_too_long_is_an_error_or_cut_on_request(encoder):
    said = r"has 22 tokens, but the model takes 16 \(config.json\).*truncate=True"
    for ask in (encoder.tokens, encoder.encode, encoder.hidden_states, encoder.overview):
        with pytest.raises(OptionError, match=said):
            ask(LONG)
    tokens = encoder.tokens(LONG, truncate=True)
    assert len(tokens) == 16
    assert (tokens.labels[0], tokens.labels[-1]) == ("[CLS]", "[SEP]")
    assert encoder.explain(LONG, 0, truncate=True).source.sizes["L"] == 16
    np.testing.assert_array_equal(encoder.encode(TEXT, truncate=True), encoder.encode(TEXT))


def test_a_tokenizer_with_more_tokens_than_embeddings_does_not_belong(tmp_path):
    folder = tiny_bert.write(tmp_path, words=[*tiny_bert.WORDS, "more"])
    refusal(folder, "vocab.txt: ", "the id 15, but there are 15 word embeddings")


def test_an_id_that_only_the_post_processor_knows_is_found_when_it_comes(tmp_path, encoder):
    made = json.loads(encoder.tokenizer.library.to_str())
    made["post_processor"]["cls"][1] = 99
    folder = tiny_bert.write(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ProblemError, match="the id 99, but there are 15 word embeddings"):
        regard.models.load(folder).tokens("cat")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"model": {"type": "X"}}', "\xff\0"])
def test_a_tokenizer_that_is_none_is_refused(tmp_path, content):
    folder = tiny_bert.write(tmp_path)
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    refusal(folder, "tokenizer.json: ")


def test_what_the_library_cannot_do_with_its_own_tokenizer_is_about_the_file(tmp_path, encoder):
    made = json.loads(encoder.tokenizer.library.to_str())
    made["model"]["unk_token"] = "[X]"
    folder = tiny_bert.write(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(
        ProblemError, match=r"tokenizer.json: is not a working tokenizer: .*\[UNK\]"
    ):
        regard.models.load(folder).tokens("zebra")


def test_a_panic_of_the_library_is_an_error_about_the_file(encoder):
    class PanicException(BaseException):
        pass

    class Library:
        def encode_batch(self, texts):
            raise kind("index out of\nbounds")

    broken = dataclasses.replace(
        encoder, tokenizer=dataclasses.replace(encoder.tokenizer, library=Library())
    )
    kind = PanicException
    with pytest.raises(ProblemError, match=r"vocab.txt: is not a working tokenizer: index out of"):
        broken.tokens("cat")
    kind = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        broken.tokens("cat")


def test_a_vocabulary_needs_the_special_tokens_and_settings_their_kind(tmp_path):
    folder = tiny_bert.write(tmp_path, words=["[CLS]", "[UNK]", "cat"])
    refusal(folder, "vocab.txt: ", "[SEP]")
    tiny_bert.write(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": "no"}')
    refusal(folder, "tokenizer_config.json: ", "true or false")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert regard.models.load(folder).tokens("Cat cat").labels[1:3] == ("[UNK]", "cat")
    (folder / "vocab.txt").unlink()
    refusal(folder, "there is neither tokenizer.json nor vocab.txt")


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "t5"}, '"t5", which is not supported; supported are'),
        ({"model_type": None}, "bert, camembert, distilbert, roberta, xlm-roberta"),
        ({"model_type": ["bert"]}, "a list of 1"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "never run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is a table"),
        ({"position_embedding_type": "relative_key"}, 'it must be "absolute"'),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"hidden_act": "tanh"}, 'hidden_act is "tanh"; it must be "gelu"'),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "12"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 5}, "hidden size 12 is not a multiple of 5 heads"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0"),
        ({"vocab_size": 10**15}, "vocab.txt"),
        ({"model_type": "roberta", "pad_token_id": 20}, "no position is left"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(tmp_path, config, says):
    folder = changed(tmp_path, **config)
    if "vocab_size" in config:
        refusal(
            folder, "has the shape (15, 12), but config.json requires", str(config["vocab_size"])
        )
    else:
        refusal(folder, "config.json: ", says)


SIZES = [key for key, value in tiny_bert.CONFIG.items() if type(value) is int]
NO_NUMBERS = [None, True, False, "2", [2], {"2": 2}]
# Those of the family that positions depend on; `pad_token_id` counts in RoBERTa alone.
ROBERTA = {**tiny_bert.CONFIG, "model_type": "roberta"}


@pytest.mark.parametrize("value", [*NO_NUMBERS, 2.0, 1.5, -1, -(2**63), 0, 2**62, 2**64, 2**200])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_in_a_configuration_that_is_none_is_refused_by_name(tmp_path, key, value):
    folder = changed(tmp_path)
    (folder / "config.json").write_text(json.dumps({**ROBERTA, key: value}))
    if key == "pad_token_id" and value == 0 and value is not False:
        assert regard.models.load(folder).config.padding == 0
    else:
        refusal(folder, f"config.json: {key} ")


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1e-12, 1, 1.0, 1e300, 2**200, -1])
def test_an_epsilon_in_a_configuration_that_is_none_is_refused_by_name(tmp_path, value):
    folder = changed(tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny_bert.CONFIG, "layer_norm_eps": value}))
    refusal(folder, "config.json: layer_norm_eps ")


@pytest.mark.parametrize("key", ["hidden_act", "position_embedding_type", "model_type"])
def test_a_word_in_a_configuration_that_is_null_is_refused_by_name(tmp_path, key):
    folder = changed(tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny_bert.CONFIG, key: None}))
    refusal(folder, f"config.json: {key} is nothing")


def test_null_in_a_configuration_is_read_where_it_means_no(tmp_path, encoder):
    folder = changed(tmp_path)
    no = ("pad_token_id", "is_decoder", "add_cross_attention", "quantization_config", "auto_map")
    (folder / "config.json").write_text(json.dumps(tiny_bert.CONFIG | dict.fromkeys(no)))
    read = regard.models.load(folder, dtype="float64")
    np.testing.assert_array_equal(read.hidden_states(TEXT), encoder.hidden_states(TEXT))


@pytest.mark.parametrize("content", ["", "[]", "3", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_configuration_that_is_no_table_is_refused(tmp_path, content):
    folder = changed(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refusal(folder, "config.json: ")


def test_a_missing_tensor_and_a_wrong_shape_are_named_with_file_and_shapes(tmp_path):
    weights = tiny_bert.tensors()
    name = "encoder.layer.1.intermediate.dense.weight"
    weights[name] = weights[name].T.copy()
    folder = tiny_bert.write(tmp_path, weights=weights)
    refusal(folder, "model.safetensors: ", name, "the shape (12, 20)", "requires (20, 12)")
    del weights[name]
    tiny_bert.write(tmp_path, weights=weights)
    refusal(folder, "model.safetensors: ", f"no tensor {name}", "of shape (20, 12)")
    del weights["embeddings.LayerNorm.bias"]
    tiny_bert.write(tmp_path, weights=weights)
    refusal(folder, "embeddings.LayerNorm.bias or embeddings.LayerNorm.beta")


@pytest.mark.skipif(os.name != "posix", reason="FIFOs are POSIX")
@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer.json", "modules.json"])
def test_a_pipe_or_a_directory_in_place_of_any_file_is_refused_at_once(tmp_path, name):
    folder = tiny_bert.write(tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    refusal(folder, f"{name}: is a directory")
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    refusal(folder, f"{name}: is a named pipe")


@pytest.mark.parametrize("where", [3, None, "", "a\0b"])
def test_a_directory_is_a_file_name(where):
    with pytest.raises(ProblemError, match="path must be a file name"):
        regard.models.load(where)


def test_a_directory_that_is_not_there_is_said_to_be_missing(tmp_path):
    refusal(tmp_path / "nowhere", "nowhere: does not exist; a model is a directory")
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file", "file: is not a directory; a model is a directory with config.json")
    refusal(tmp_path, "config.json: cannot be read: No such file")


def test_arguments_of_the_wrong_kind_are_refused(folder, encoder: Encoder):
    for dtype in ("float16", "int32", "no", None, object()):
        with pytest.raises(
            DtypeError, match="dtype must be one of float64, float32, bfloat16, int8"
        ):
            regard.models.load(folder, dtype=dtype)
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(OptionError, match=f"dtype is {dtype}, which is for language models"):
            regard.models.load(folder, dtype=dtype)
    with pytest.raises(DtypeError, match="text must be a string"):
        encoder.encode([3])
    with pytest.raises(DtypeError, match="texts must be"):
        encoder.encode(3)
    with pytest.raises(ProblemError, match="surrogate"):
        encoder.tokens("\ud800")
    for size in (0, -1):
        with pytest.raises(OptionError, match=f"batch_size is {size}"):
            encoder.encode(TEXTS, batch_size=size)
    with pytest.raises(DtypeError, match="batch_size must be an int"):
        encoder.encode(TEXTS, batch_size=2.0)
    with pytest.raises(LabelError, match="layer is 2; it must be 0 to 1"):
        encoder.explain(TEXT, 2)
    with pytest.raises(LabelError, match="head is -1; it must be 0 to 2"):
        encoder.explain(TEXT, 0, -1)
    with pytest.raises(DtypeError, match="layer must be an int"):
        encoder.explain(TEXT, "0")
    with pytest.raises(OptionError, match="cannot be overridden"):
        encoder.explain(TEXT, 0, layers=3)

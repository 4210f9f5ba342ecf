"""Rotary positions of a model's configuration: right numbers, or an error that names why not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from regard.errors import DtypeError, OptionError, RegardError, ShapeError
from regard.positions import Rotary

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 4096,
}
PHI3 = {**LLAMA, "model_type": "phi3", "rope_theta": 10000.0, "rope_scaling": LONGROPE}
KINDS = ["sliding_attention"] * 5 + ["full_attention"]
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 256,
    "layer_types": KINDS,
    "rope_parameters": BASES,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 4}


def with_scaling(**entries):
    return {**LLAMA, "rope_scaling": entries}


def test_longrope_grows_by_the_lengths_of_the_whole_configuration():
    found = Rotary.from_config(PHI3)
    np.testing.assert_allclose(found.factor, 1.1902380714238083, 1e-15)  # √(1 + ln 32 / ln 4096)
    np.testing.assert_allclose(found.frequencies_of(96, 4097)[:2], [0.5, 0.4127020926], 1e-9)


def test_longrope_alone_does_not_know_how_far_it_was_extended():
    with pytest.raises(
        OptionError, match=r"needs factor.*max_position_embeddings / original.*from"
    ):
        Rotary(scaling=LONGROPE)
    np.testing.assert_allclose(Rotary(scaling={**LONGROPE, "factor": 32.0}).factor, 1.19023807142)


def test_layers_of_each_kind_have_their_own_base():
    older = {
        **{name: GEMMA3[name] for name in GEMMA3 if name != "rope_parameters"},
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    for config in (GEMMA3, older):
        near, far = Rotary.from_config(config, 4), Rotary.from_config(config, 5)
        np.testing.assert_equal((near.base, far.base), (10000.0, 1000000.0))
        np.testing.assert_allclose(near.frequencies_of(256, 1)[:2], [1.0, 0.93057204093], 1e-10)
        np.testing.assert_allclose(far.frequencies_of(256, 1)[:2], [0.125, 0.1122108916], 1e-9)
        with pytest.raises(OptionError, match=r"sliding_attention \(layer 0\), full_attention \(l"):
            Rotary.from_config(config)


@pytest.mark.parametrize("field", [{}, {"no_rope_layers": [1, 1, 1, 0]}])
def test_a_layer_without_rotation_has_no_positions(field):
    config = {**SMOLLM3, **field}
    assert Rotary.from_config(config, 3) is None
    np.testing.assert_equal(Rotary.from_config(config, 2).base, 500000.0)
    with pytest.raises(OptionError, match=r"turned without rotation \(layer 3\)"):
        Rotary.from_config(config)


def test_only_sliding_layers_of_cohere_are_turned():
    config = {**GEMMA3, "model_type": "cohere2", "rope_parameters": BASES["sliding_attention"]}
    config["sliding_window"] = 4096
    assert Rotary.from_config(config, 5) is None
    assert Rotary.from_config(config, 0).interleaved


def test_layers_that_agree_need_no_number():
    found = Rotary.from_config(with_scaling(**LLAMA3))
    np.testing.assert_allclose(
        found.frequencies_of(128, 1)[[0, 28, 31, 40]],
        [1.0, 0.00321144611, 0.00085675146, 3.42810235e-05],
        1e-6,
    )
    from_file = json.loads(json.dumps(with_scaling(**LLAMA3)))
    np.testing.assert_equal(Rotary.from_config(from_file, 3), found)


def test_yarn_divides_one_growth_by_the_other():
    scaling = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    config = {
        **with_scaling(**scaling, original_max_position_embeddings=4096),
        "model_type": "deepseek_v3",
        "qk_rope_head_dim": 64,
        "head_dim": 64,
    }
    found = Rotary.from_config(config, 0)
    np.testing.assert_allclose(
        found.factor, 1.1557219902, 1e-10
    )  # (1 + 0.1 ln 40) / (1 + 0.05 ln 40)
    np.testing.assert_equal((found.width, found.interleaved), (64, True))
    assert not Rotary.from_config({**config, "rope_interleave": False}, 0).interleaved


def test_a_part_of_the_features_is_turned_under_every_name_of_it():
    half = {**LLAMA, "model_type": "phi", "rope_scaling": {"partial_rotary_factor": 0.5}}
    beside = {**LLAMA, "model_type": "phi", "partial_rotary_factor": 0.5}
    neox = {"model_type": "gpt_neox", "num_hidden_layers": 2, "rotary_pct": 0.25}
    neox["rotary_emb_base"] = 500000
    gptj = {"model_type": "gptj", "n_layer": 2, "rotary_dim": 64}
    for config, turned in ((half, 64), (beside, 64), (neox, 32), (gptj, 64)):
        found = Rotary.from_config(config)
        np.testing.assert_equal(found.turned(128), turned)
        np.testing.assert_equal(found.base, 10000.0 if config is gptj else 500000.0)


def test_a_text_is_longer_than_max_position_embeddings_for_dynamic():
    config = {**with_scaling(type="dynamic", factor=2.0), "max_position_embeddings": 100}
    found = Rotary.from_config(config)
    plain = 500000.0 ** (-2 / 128)
    np.testing.assert_allclose(found.frequencies_of(128, 100)[1], plain)
    np.testing.assert_allclose(found.frequencies_of(128, 200)[1], plain * 3 ** (-2 / 126))


def test_a_field_that_says_what_is_so_anyway_is_no_obstacle():
    same = {"alibi": False, "use_mrope": False, "rope_interleaved": False, "rope_scaling": None}
    np.testing.assert_equal(Rotary.from_config({**LLAMA, **same}), Rotary.from_config(LLAMA))


def test_any_object_with_the_fields_is_a_configuration():
    expected = Rotary.from_config(LLAMA)
    whole = SimpleNamespace(to_dict=lambda: LLAMA)
    for config in (SimpleNamespace(**LLAMA), whole):
        np.testing.assert_equal(Rotary.from_config(config), expected)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "nanochat"}, "model_type 'nanochat', and whether it turns halves"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "gemma3", "text_config": {}}, "pass one of its parts: text_config"),
        ({"rope_theta": None}, "has no rope_theta, for which each model has a default"),
        ({"rope_theta": NAN}, "rope_theta.*nan; it must be positive and finite"),
        ({"rope_theta": INF}, "rope_theta.*inf; it must be positive and finite"),
        ({"rope_theta": -1.0}, "rope_theta.*-1.0; it must be positive and finite"),
        ({"rope_theta": "1e4"}, "rope_theta.* must be a number"),
        ({"rope_theta": True}, "rope_theta.* must be a number"),
        ({"rope_scaling": {"rope_theta": 1.0}}, "rope_theta 500000.0 beside rope_parameters with"),
        ({"rope_scaling": [1.0]}, "rope_parameters must be a mapping"),
        ({"rope_scaling": {"type": "linear", "factor": NAN}}, "factor.*nan; it must be pos"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor.*must be a number"),
        ({"rope_scaling": {"type": "linear", "rope_type": "ntk", "factor": 2}}, "keep one of them"),
        ({"rope_scaling": {"type": "proportional"}}, "rope_type 'proportional'"),
        ({"rope_scaling": {"type": "su"}}, "rope_type 'su'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type 'mrope'"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "'mrope_section', which default does"),
        (
            {
                "layer_types": ["full_attention"] * 4,
                "rope_scaling": {"full_attention": {"type": "yarn", "truncate": False}},
            },
            "truncate for full_attention alone",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            "'llama_4_scaling_beta', which yarn does not take",
        ),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "keep one"),
        ({"rope_scaling": BASES}, "entries for sliding_attention, full_attention, but this layer"),
        (
            {
                "rope_scaling": {
                    "type": "dynamic",
                    "factor": 2,
                    "original_max_position_embeddings": 9,
                }
            },
            "differ in which of them they use",
        ),
        ({"rope_dimension": 64}, "has rope_dimension, which is not known here"),
        ({"rope_interleave": True}, "has rope_interleave, which is not known here"),
        ({"rotary_dim": 64}, "has rotary_dim, which is not known here"),
        ({"rope_interleaved": True}, "has rope_interleaved, which is not known here"),
        ({"alibi": True}, "has alibi, which is not known here"),
        ({"layer_types": ["fast_attention"] * 4}, "'fast_attention', which is not known here"),
        ({"layer_types": ["full_attention"]}, "layer_types of the config.* no entry for layer 1"),
        ({"model_type": "phi"}, "has no partial_rotary_factor"),
        ({"model_type": "cohere2", "layer_types": KINDS}, "has no sliding_window"),
        ({"model_type": "gemma3_text"}, "has no layer_types"),
        ({"model_type": "smollm3"}, "has no no_rope_layers"),
        ({"model_type": "deepseek_v3"}, "has no qk_rope_head_dim"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, "64, but 128 of head_dim 128 are"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers; pass layer="),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(change, says):
    with pytest.raises(RegardError, match=says):
        Rotary.from_config({**LLAMA, **change})


def test_a_list_of_another_length_than_the_pairs_is_refused():
    with pytest.raises(ShapeError, match=r"48 numbers but 128 features are rotated.*have 64"):
        Rotary.from_config(PHI3).frequencies_of(128, 1)


def test_a_layer_that_the_model_lacks_is_refused():
    for layer, kind in ((4, OptionError), (-1, OptionError), ("0", DtypeError), (1.0, DtypeError)):
        with pytest.raises(kind, match="layer"):
            Rotary.from_config(LLAMA, layer)
    for config in (None, "llama", [LLAMA], type("Config", (), LLAMA)):
        with pytest.raises(DtypeError, match="config must be the whole configuration of a model"):
            Rotary.from_config(config)


def test_scaling_is_one_entry_and_not_one_for_each_kind_of_layer():
    with pytest.raises(OptionError, match="pass one of them: 'sliding_attention', 'full_attention"):
        Rotary(scaling=BASES)
    with pytest.raises(OptionError, match="rope_type linear and type yarn; keep one"):
        Rotary(scaling={"rope_type": "linear", "type": "yarn", "factor": 2.0})
    with pytest.raises(OptionError, match="low_freq_factor 8 above high_freq_factor 4"):
        Rotary.from_config(with_scaling(**{**LLAMA3, "low_freq_factor": 8.0}))

"""Every configuration of transformers: turned as its model turns, or refused by name.

For each model that is known, a small one runs, and the scores of the rows that its own functions
turned are compared in every layer, with every scaling. For all classes, frequencies and factors are
compared at their usual sizes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest

from regard.compute.positioned import Rotation
from regard.errors import OptionError
from regard.positions import Rotary
from regard.rules import rotary, rotary_config

pytestmark = [pytest.mark.full, pytest.mark.needs("transformers")]

# A score is a sum of up to 64 products of float32, whose angles of up to 12 radians are rounded.
TOLERANCE = 64 * 12 * 2.0**-24
KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
# Some sizes that a small model of this type needs besides.
NEEDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jetmoe": {"kv_channels": 16},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 4},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 4},
    "mimo_v2_flash": {"head_dim": 24},
    "minimax": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "mixtral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Arrays are so small that two threads wait for each other longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def entries(kind: str, trained: int, pairs: int) -> dict[str, Any]:
    """Rope parameters of this kind, for a model that was trained on so many tokens."""
    given: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        given["factor"] = 4.0
    if kind in ("yarn", "longrope", "llama3"):
        given["original_max_position_embeddings"] = trained
    if kind == "yarn":
        given |= {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 20.0, "beta_slow": 2.0}
    if kind == "longrope":
        del given["factor"]
        given |= {"short_factor": [1.25] * pairs, "long_factor": [2.0] * (pairs - 1) + [3.0]}
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return given


def usual(model_type: str) -> Any:
    """The class of its configurations; a width of heads is added where there is none."""
    own = class_of(model_type)
    fields = own().to_dict()
    if "head_dim" in fields and fields["head_dim"] is None:
        return partial(own, head_dim=fields["hidden_size"] // fields["num_attention_heads"])
    return own


def scaled(make: Any, kind: str, trained: int) -> Any:
    """A configuration with this kind of scaling in each of its rope parameters."""
    usual = make().to_dict()
    given = usual.get("rope_parameters")
    if not given:
        raise LookupError("no rope parameters")
    head = usual.get("head_dim") or usual.get("kv_channels")
    head = head or usual.get("hidden_size", 64) // usual.get("num_attention_heads", 1)

    def changed(one: Mapping[str, Any]) -> dict[str, Any]:
        if one["rope_type"] == "proportional":
            return dict(one)
        kept = {n: one[n] for n in ("rope_theta", "partial_rotary_factor") if n in one}
        width = usual.get("qk_rope_head_dim") or int(head * kept.get("partial_rotary_factor", 1))
        return {**kept, **entries(kind, trained, width // 2)}

    nested = any(isinstance(one, Mapping) for one in given.values())
    made = {n: changed(one) for n, one in given.items()} if nested else changed(given)
    lengths = {"max_position_embeddings": trained if kind == "dynamic" else 8 * trained}
    lengths["original_max_position_embeddings"] = trained
    return make(rope_parameters=made, **{n: x for n, x in lengths.items() if n in usual})


def class_of(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def turned(positions: Rotary, rows: np.ndarray, head: int) -> np.ndarray:
    """Rows (heads, tokens, width), which may be the turned part alone, as regard turns them."""
    width = positions.turned(head)
    assert rows.shape[-1] in (width, head)
    own = Rotary(
        frequencies=positions.frequencies_of(head, rows.shape[-2]),
        attention_factor=positions.factor,
        interleaved=positions.interleaved,
    )
    return Rotation.of_tokens(own, rows, "query", 0, own.frequencies_of(rows.shape[-1], 0))


def scores(rows: Any) -> np.ndarray:
    return rows[0][0] @ rows[-1][0].T


def compare_layers(config: Any) -> Counter[str]:
    """What became of each layer of a small model: equal, without rotation, or refused."""
    from small_models import turned_by

    seen, count = turned_by(config), Counter[str]()
    fields = config.to_dict()
    for layer in range(fields.get("num_hidden_layers") or fields["n_layer"]):
        calls = [call for call in seen if call.layer == layer]
        try:
            positions = Rotary.from_config(config, layer)
        except OptionError:
            count["refused"] += 1
            continue
        if positions is None:
            assert not calls, layer
            count["without rotation"] += 1
            continue
        assert calls, layer
        for _, head, before, after in calls:
            head = positions.width or head or before[0].shape[-1]
            found = scores([turned(positions, one, head) for one in before])
            most = np.abs(scores(after)).max()
            assert most > 0
            np.testing.assert_allclose(found, scores(after), 0, TOLERANCE * most)
        count["equal"] += 1
    return count


@pytest.mark.parametrize("model_type", sorted(rotary_config._MODELS))
def test_every_layer_is_turned_as_the_model_turns_it(model_type):
    from small_models import small

    def make(**more: Any) -> Any:
        return small(class_of(model_type), **{**NEEDS.get(model_type, {}), **more})

    counts = {"usual": compare_layers(make())}
    try:
        config = scaled(make, "yarn", 8)
    except Exception:  # phi3, phimoe and those without rope parameters take none
        config = None
    if config:
        counts["yarn"] = compare_layers(config)
    if "rope_interleave" in make().to_dict():
        counts["halves"] = compare_layers(make(rope_interleave=False))
    print(model_type, {name: dict(one) for name, one in counts.items()})
    assert sum(one["equal"] for one in counts.values())


def ways(config: Any) -> list[tuple[str | None, Rotary | str]]:
    """What is made of each kind of layer: positions, or why there are none."""
    fields, found = config.to_dict(), []
    kinds = fields.get("layer_types") or [None]
    for layer, kind in enumerate(kinds):
        if kind not in [one for one, _ in found]:
            try:
                found.append((kind, Rotary.from_config(config, layer) or "without rotation"))
            except OptionError as error:
                found.append((kind, reason(str(error), config)))
    return found


def reason(message: str, config: Any) -> str:
    """The part of a refusal that is the same for all models; it must name what is refused."""
    if "whether it turns halves" in message:
        assert repr(config.model_type) in message
        return "refused: model_type"
    named = re.search(r"has (?:no |rope_type )?'?(\w+)'?(, which|, for which|; it must)", message)
    assert named, message
    return f"refused: {named[1]}"


def own_numbers(config: Any, kind: str | None, scaling: str, length: int) -> tuple[Any, float]:
    """Frequencies and factor of the class itself."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    nested = kind in config.rope_parameters
    if scaling != "default":
        layer = {"layer_type": kind} if nested else {}
        try:
            found = ROPE_INIT_FUNCTIONS[scaling](config, None, seq_len=length, **layer)
        except (RuntimeError, TypeError):  # of an odd width, or without a width of heads
            raise LookupError("its own code fails") from None
        return found[0].double().numpy(), found[1]
    name = type(config).__module__.replace("configuration_", "modeling_")
    for one in vars(importlib.import_module(name)).values():
        if hasattr(one, "compute_default_rope_parameters") and one.__module__ == name:
            own = inspect.get_annotations(one.__init__).get("config")
            if own in (type(config), type(config).__name__):
                made = one(config=config)
                prefix = f"{kind}_" if nested else ""
                factor = getattr(made, f"{prefix}attention_scaling")
                return getattr(made, f"{prefix}inv_freq").double().numpy(), factor
    raise LookupError("no module of its own")


def same_numbers(positions: Rotary, config: Any, kind: str | None, scaling: str) -> None:
    """The angles at some places, with those beyond the lengths of training, and the factor."""
    for length in (64, TRAINED, TRAINED + 1, 5 * TRAINED):
        theirs, factor = own_numbers(config, kind, scaling, length)
        fields = config.to_dict()
        plain = fields["hidden_size"] // fields["num_attention_heads"]
        head = fields.get("head_dim") or fields.get("kv_channels") or plain
        if fields.get("per_layer_config") and kind == "full_attention":
            head = config.per_layer_config[kind].head_dim
        mine = positions.frequencies_of(head, length)
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(positions.factor, factor, 1e-14)
        places = np.array([0, 1, 7, length - 1])
        for found, expected in zip(
            rotary.turned(places, mine, positions.factor),
            rotary.turned(places, theirs, factor),
            strict=True,
        ):
            # Their frequencies are float32, after some roundings.
            np.testing.assert_allclose(found, expected, 0, 2.0**-20 * length)


TRAINED = 512


def test_no_class_has_other_numbers_unless_it_is_refused_by_name():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    count, classes, wrong = Counter[str](), Counter[str](), {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        try:
            make = usual(model_type)
            config = make()
        except Exception:
            classes["cannot be made"] += 1
            continue
        if not config.to_dict().get("rope_parameters"):
            continue
        classes["with rope parameters"] += 1
        classes["known"] += config.model_type in rotary_config._MODELS
        for scaling in KINDS:
            try:
                changed = scaled(make, scaling, TRAINED)
            except Exception as error:
                count[f"the class does not take it: {type(error).__name__}"] += 1
                continue
            for kind, positions in ways(changed):
                if isinstance(positions, str):
                    count[positions] += 1
                    continue
                try:
                    same_numbers(positions, changed, kind, scaling)
                except LookupError as error:
                    count[str(error)] += 1
                except AssertionError as error:
                    wrong[model_type, scaling, kind] = str(error)
                else:
                    count["equal"] += 1
    print(dict(classes), dict(count))
    assert not wrong
    assert classes["known"] > 100
    assert count["equal"] > 500


@pytest.mark.parametrize("model_type", sorted(rotary_config._MODELS))
def test_a_field_that_a_file_lacks_is_refused_unless_its_class_says_the_same(model_type):
    make = class_of(model_type)
    whole = make().to_dict()
    count = Counter[str]()
    about = re.compile("rope|rotary|layer_types|head_dim|position_emb|sliding|num_hidden|n_layer")
    for name in [None, *filter(about.search, whole)]:
        left = {one: value for one, value in whole.items() if one != name}
        try:
            config = make.from_dict(deepcopy(left))
        except Exception:
            continue
        for layer in range(min(8, whole.get("num_hidden_layers") or whole["n_layer"])):
            try:
                found = Rotary.from_config(left, layer)
            except OptionError:
                count["refused"] += 1
                continue
            expected = Rotary.from_config(config, layer)
            assert (found is None) == (expected is None), (name, layer)
            if found is not None:
                head = config.to_dict().get("head_dim") or 64
                np.testing.assert_array_equal(
                    found.frequencies_of(head, 999), expected.frequencies_of(head, 999), str(name)
                )
                assert (found.factor, found.interleaved) == (expected.factor, expected.interleaved)
            count["equal"] += 1
    assert count

"""A model's configuration as rotary positions: by what each of its layers is turned.

Owns the names of fields that configurations have, and what none of them has: which models turn
neighbouring features, and which of their layers. Must not know calls or formulas. What is not known
here is refused by name, because a wrong angle looks like a right one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.boundary.arguments import as_flag, as_int
from regard.errors import DtypeError, OptionError, safe_text
from regard.rules.rotary import LENGTH, kind_of, positive

Fields = Mapping[str, Any]

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
_NO_ATTENTION = ("linear_attention", "conv", "mlp")
_NO_ROPE = ("no_rope_layers", "no_rope_layer_interval")


@dataclass(frozen=True)
class _Turns:
    """What no configuration says: how models turn the queries and keys of their layers."""

    pairs: bool = False  # neighbours, else halves
    kinds: tuple[str, ...] = _ATTENTION  # layers that are turned
    needs: tuple[str, ...] = ()  # fields for which each class has a default of its own
    part: bool = False  # so has the part that is turned
    also: tuple[str, ...] = ()  # further fields about rotation that the class reads
    width: str = ""  # the field that has the width, if there is one
    base: float | None = None  # if the code has it as a number


_SLIDING: dict[str, Any] = {
    "kinds": ("sliding_attention",),
    "needs": ("layer_types", "sliding_window"),
}
_OWN_HEAD: dict[str, Any] = {"width": "qk_rope_head_dim", "needs": ("qk_rope_head_dim",)}
_TYPES = ("layer_types",)

# By model_type. A test runs a small model of each type and compares every layer.
_FAMILIES = (
    (
        _Turns(),
        """apertus apertus1p5_text arcee aria_text bitnet csm_depth_decoder_model cwm dia_encoder
        diffllama doge dots1 emu3_text_model esmc eurobert falcon falcon_h1 flex_olmo gemma gemma2
        gpt_oss granite granite4_vision_text granite_docling_text granitemoe
        granitemoeshared gte higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2
        jetmoe jina_embeddings_v3 llama ministral mistral mixtral moshi
        nomic_bert olmo olmo2 olmoe phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss solar_open
        starcoder2 vaultgemma voxtral_realtime_encoder""",
    ),
    (
        _Turns(part=True),
        """glm4_moe nemotron nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio
        persimmon phi stablelm""",
    ),
    (_Turns(part=True, also=("rotary_pct", "rotary_emb_base")), "gpt_neox gpt_neox_japanese"),
    (_Turns(needs=_TYPES, part=True), "qwen3_next"),
    (
        _Turns(needs=_TYPES, also=("rope_local_base_freq",)),
        "gemma3_text",
    ),
    (
        _Turns(needs=_TYPES),
        """embedding_gemma2_text gemma4_text gemma4_unified_text laguna lfm2 lfm2_moe lfm3 mellum
        mimo_v2_flash minimax modernbert modernbert-decoder neomme olmo3 olmo_hybrid ultrabert""",
    ),
    (_Turns(**_SLIDING), "afmoe flint"),
    (_Turns(**_SLIDING, also=("sliding_window",)), "exaone4 exaone_moe kolibri1"),
    (_Turns(also=_NO_ROPE), "smollm3"),
    (_Turns(also=("layer_rope_theta",)), "granite_swa granitemoe_swa"),
    (_Turns(width="rotary_dim"), "minimax_m2"),
    (_Turns(**_OWN_HEAD), "hy_v4 minicpm3"),
    (
        _Turns(pairs=True),
        """blt_global_transformer blt_patcher cohere ernie4_5 ernie4_5_moe helium
        openai_privacy_filter""",
    ),
    (_Turns(pairs=True, part=True), "glm glm4"),
    (_Turns(pairs=True, **_SLIDING), "cohere2"),
    (_Turns(pairs=True, also=_NO_ROPE), "llama4_text"),
    (_Turns(pairs=True, width="rotary_dim", needs=("rotary_dim",), base=10000.0), "codegen gptj"),
    (_Turns(pairs=True, **_OWN_HEAD), "axk2 deepseek_v2 deepseek_v32 glm_moe_dsa"),
    (
        _Turns(pairs=True, **_OWN_HEAD, also=("rope_interleave",)),
        "axk1 deepseek_v3 glm4_moe_lite youtu",
    ),
)
_MODELS = {name: turns for turns, names in _FAMILIES for name in names.split()}

# Fields about rotation that all models read.
_EVERYWHERE = ("rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling")

# What a field was called, the newest name first.
_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "rope_parameters": ("rope_parameters", "rope_scaling"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
}


def arguments(config: Any, layer: int | None) -> dict[str, Any] | None:
    """What `Rotary` takes for one layer of a model; None if that layer is not turned."""
    fields = _fields(config)
    turns = _turns(fields)
    count = _get(fields, "num_hidden_layers")
    if count is not None:
        count = as_int("num_hidden_layers", count, 1)
    if layer is not None:
        layer = as_int("layer", layer, 0)
        if count is not None and layer >= count:
            raise OptionError(f"layer is {layer} but the model has {count}, the first of them 0")
        return _of_layer(fields, turns, layer)
    if count is None:
        raise OptionError("the configuration has no num_hidden_layers; pass layer=")
    ways: list[dict[str, Any] | None] = []
    shown: list[str] = []
    for one in range(count):
        way = _of_layer(fields, turns, one)
        if way not in ways:
            ways.append(way)
            what = _at(fields, "layer_types", one) or "turned"
            shown.append(f"{what}{'' if way else ' without rotation'} (layer {one})")
    if len(ways) > 1:
        raise OptionError(
            f"the layers of this configuration differ: {safe_text(', '.join(shown), 200)}; "
            "pass layer=, the number of one of them"
        )
    return ways[0]


def _fields(config: Any) -> Fields:
    """All fields of a configuration."""
    if callable(getattr(config, "to_dict", None)) and not isinstance(config, type):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    own = [name for name in dir(config) if not name.startswith("_")]
    fields = {name: one for name in own if not callable(one := getattr(config, name, None))}
    if isinstance(config, type) or "model_type" not in fields:
        raise DtypeError(
            "config must be the whole configuration of a model, an object or a dict with "
            f"model_type, not {safe_text(repr(config), 60)}"
        )
    return fields


def _get(fields: Fields, name: str) -> Any:
    """A field under any of its names; they must agree."""
    found = {one: fields[one] for one in _NAMES.get(name, (name,)) if fields.get(one) is not None}
    values = list(found.values())
    if any(one != values[0] for one in values[1:]):
        raise OptionError(f"the configuration has {' and '.join(found)}, which differ; keep one")
    return values[0] if values else None


def _at(fields: Fields, name: str, layer: int) -> Any:
    """The entry of a layer in a field that has one for each; None without the field."""
    entries = fields.get(name)
    if not entries:
        return None
    if not isinstance(entries, (list, tuple)) or layer >= len(entries):
        raise OptionError(f"{name} of the configuration has no entry for layer {layer}")
    return entries[layer]


def _turns(fields: Fields) -> _Turns:
    """How this model turns; refuses models, and fields about rotation, that are not known."""
    model = fields.get("model_type")
    shown = safe_text(repr(model), 60)
    by_hand = "if you know what its code does, pass regard.positions.Rotary(…) with that"
    if not isinstance(model, str) or model not in _MODELS:
        parts = [name for name in fields if isinstance(fields[name], Mapping) and "config" in name]
        hint = f", or pass one of its parts: {safe_text(', '.join(parts), 120)}" if parts else ""
        raise OptionError(
            f"config has model_type {shown}, and whether it turns halves or neighbours, and in "
            f"which layers, is in no configuration; {by_hand}{hint}"
        )
    turns = _MODELS[model]
    known = {*_EVERYWHERE, *turns.also, turns.width}
    # Files of some models also say what is so anyway.
    anyway = {"alibi": False, "use_mrope": False, "rope_interleaved": turns.pairs}
    for name, value in fields.items():
        about = re.search("rope|rotary|alibi", str(name)) and value is not None
        if about and name not in known and value is not anyway.get(name):
            raise OptionError(
                f"config has {safe_text(name, 60)}, which is not known here for model_type "
                f"{shown}; {by_hand}"
            )
    for name in turns.needs:
        if name not in fields or (fields[name] is None and name not in turns.also):
            raise _missing(name)
    return turns


def _missing(name: str) -> OptionError:
    return OptionError(
        f"the configuration has no {name}, for which each model has a default of its own; add it, "
        "or pass transformers' object, which has it"
    )


def _of_layer(fields: Fields, turns: _Turns, layer: int) -> dict[str, Any] | None:
    kind = _at(fields, "layer_types", layer)
    if kind is None and "layer_types" in turns.needs:
        raise _missing("layer_types")
    if kind is not None and kind not in (*_ATTENTION, *_NO_ATTENTION):
        raise OptionError(f"layer_types has {safe_text(repr(kind), 60)}, which is not known here")
    everywhere = "sliding_window" in turns.also and fields.get("sliding_window") is None
    if kind is not None and kind not in turns.kinds and not everywhere:
        return None
    if "no_rope_layers" in turns.also and _without(fields, layer):
        return None
    entry = _entry(fields, turns, kind)
    base = _at(fields, "layer_rope_theta", layer)
    if base is not None:
        if base == 0:
            return None
        entry["rope_theta"] = base
    width = _width(fields, turns, entry)
    pairs = turns.pairs
    if "rope_interleave" in turns.also and fields.get("rope_interleave") is not None:
        pairs = as_flag("rope_interleave", fields["rope_interleave"])
    return {"scaling": entry, "interleaved": pairs, "width": width}


def _without(fields: Fields, layer: int) -> bool:
    """Whether the number of a layer says that it is not turned."""
    turned = _at(fields, "no_rope_layers", layer)
    if turned is not None:
        return not turned
    if fields.get("no_rope_layer_interval") is None:
        raise _missing("no_rope_layers")
    return (layer + 1) % as_int("no_rope_layer_interval", fields["no_rope_layer_interval"], 1) == 0


def _entry(fields: Fields, turns: _Turns, kind: str | None) -> dict[str, Any]:
    """The rope parameters of a layer of this kind, with what is beside them."""
    given = _get(fields, "rope_parameters")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise DtypeError(f"rope_parameters must be a mapping, not {safe_text(repr(given), 60)}")
    nested = any(isinstance(one, Mapping) for one in given.values())
    if nested and not isinstance(given.get(kind), Mapping):
        raise OptionError(
            f"rope_parameters has entries for {safe_text(', '.join(map(str, given)), 120)}, but "
            f"this layer is of the kind {safe_text(repr(kind), 60)}"
        )
    local = fields.get("rope_local_base_freq")
    if local is not None and not nested and kind == "sliding_attention":
        return {"rope_type": "default", "rope_theta": local}
    one: Mapping[str, Any] = given[kind] if nested else given
    entry = {name: value for name, value in one.items() if value is not None}
    if nested and entry.get("truncate") is not None:
        raise OptionError(
            f"rope_parameters has truncate for {safe_text(kind, 60)} alone, where models do not "
            "read it; leave it out if it is True"
        )
    rope_type = kind_of(entry)
    beside = ["rope_theta", "partial_rotary_factor"]
    if rope_type in ("yarn", "longrope", "llama3"):
        beside.append(LENGTH)
    for name in beside:
        value = _get(fields, name)
        if value is None:
            continue
        own = entry.get(name, None if nested else value)
        if own is not value and own != value:
            raise OptionError(
                f"the configuration has {name} {safe_text(repr(value), 60)} beside rope_parameters "
                f"with {safe_text(repr(own), 60)}; keep one of them"
            )
        entry[name] = value
    if turns.base is not None:
        entry.setdefault("rope_theta", turns.base)
    for name in ("rope_theta", *(("partial_rotary_factor",) if turns.part else ())):
        if name not in entry:
            raise _missing(name)
    if rope_type in ("dynamic", "yarn", "longrope", "llama3"):
        _add_lengths(entry, rope_type, fields.get("max_position_embeddings"))
    return entry


def _add_lengths(entry: dict[str, Any], rope_type: str, longest: Any) -> None:
    """How long texts were in training, and by how much they may be longer."""
    if longest is None:
        return
    longest = positive("max_position_embeddings", longest)
    trained = entry.setdefault(LENGTH, longest)
    if rope_type == "dynamic" and trained != longest:
        raise OptionError(
            f"the configuration has max_position_embeddings {longest:g} and {LENGTH} "
            f"{safe_text(trained, 60)}, and models of the type dynamic differ in which of them "
            "they use; keep max_position_embeddings"
        )
    if rope_type in ("yarn", "longrope") and "factor" not in entry:
        entry["factor"] = longest / positive(LENGTH, trained)


def _width(fields: Fields, turns: _Turns, entry: dict[str, Any]) -> int | None:
    """How many features are turned, where a field says so; None: the part of what a call has."""
    if not turns.width or fields.get(turns.width) is None:
        return None
    width = as_int(turns.width, fields[turns.width], 2)
    part, head = entry.pop("partial_rotary_factor", 1.0), fields.get("head_dim")
    if head is not None:
        found = int(as_int("head_dim", head, 2) * positive("partial_rotary_factor", part))
        if found != width:
            raise OptionError(
                f"the configuration has {turns.width} {width}, but {found} of head_dim {head} are "
                "turned by its partial_rotary_factor; keep one of them"
            )
    return width

"""What a model is made of, in one description, and the families that are read as one.

Owns the names that each family has for its sizes and tensors. Must not know tensors' numbers, text,
or how anything is computed: the steps of a layer follow from `Architecture.form`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from regard.boundary.parse import as_integer, as_number, either, shown
from regard.errors import ProblemError, RegardError, safe_text
from regard.positions import Rotary
from regard.textbook.block import Layer

# By their names in configurations.
ACTIVATIONS = {
    **{"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
}
# Sizes are checked against the tensors before memory is allocated; layers take time at once.
MAX_LAYERS = 2**12
# Where null means the usual value.
_MAY_BE_NULL = {"n_inner", "num_key_value_heads", "head_dim"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Family:
    """The names that one kind of model has for its sizes and tensors, and what its code does.

    `tensors` are by the textbook's names, without what is added for each: `.weight` and `.bias`; in
    `layer` and `tensors`, a name of several, such as "W_q W_k W_v", is one tensor with all of them.
    """

    prefix: str  # of tensor names, if the model has a head above it
    layer: str  # the prefix of a layer's, with {} for its number
    tensors: Mapping[str, str]  # of the whole model
    of_layer: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)  # in config.json, where unlike BERT's
    # By `keys` alone are read, where null means none: scale (of which it has 1/x²), softcap,
    # logits_softcap and sliding_window; the last for layers of `pattern`, over and over again.
    pattern: tuple[str, ...] = (_SLIDING,)  # where there is no layer_types
    causal: bool = True
    norm: Literal["rms", "layer"] = "rms"
    place: Literal["before", "after", "both"] = "before"
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    norm_adds: float = 0  # to the scale of each norm that is stored
    scaled: bool = False  # whether embeddings are multiplied by the root of their width
    wider: int = 0  # how many times as wide as the model is its MLP, where that is not said
    activation: str = "silu"  # where the configuration does not say
    turned: bool = False  # whether matrices are stored (in, out)
    rotary: bool = True
    tied: bool = False  # where the configuration does not say
    after_padding: bool = False  # learned positions count from pad_token_id + 1
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the only value of an option
    ignored: tuple[str, ...] = ()  # ends of names of tensors that nothing reads


_NORM_NAMES = ("weight", "gamma"), ("bias", "beta")
_LLAMA = {
    "attention_input": "input_layernorm",
    **{f"W_{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"},
    "mlp_input": "post_attention_layernorm",
    **{f"W_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_GPT2 = {
    "attention_input": "ln_1",
    "W_q W_k W_v": "attn.c_attn",
    "W_o": "attn.c_proj",
    "mlp_input": "ln_2",
    "W_up": "mlp.c_fc",
    "W_down": "mlp.c_proj",
}
_BERT = {
    **{f"W_{name[0]}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "W_o": "attention.output.dense",
    "after_attention": "attention.output.LayerNorm",
    "W_up": "intermediate.dense",
    "W_down": "output.dense",
    "hidden": "output.LayerNorm",
}
_DISTILBERT = {
    **{f"W_{letter}": f"attention.{letter}_lin" for letter in "qkv"},
    "W_o": "attention.out_lin",
    "after_attention": "sa_layer_norm",
    "W_up": "ffn.lin1",
    "W_down": "ffn.lin2",
    "hidden": "output_layer_norm",
}
_EMBEDDINGS = {
    "token_table": "embeddings.word_embeddings",
    "positions_table": "embeddings.position_embeddings",
    "normed_embeddings": "embeddings.LayerNorm",
}
_ENCODER: dict[str, Any] = {
    **{"causal": False, "norm": "layer", "place": "after", "activation": "gelu"},
    **{"rotary": False, "epsilon": ("layer_norm_eps", 1e-12)},
    "fixed": {
        **{"position_embedding_type": "absolute", "is_decoder": False},
        **{"add_cross_attention": False, "quantization_config": None},
    },
}
_TYPED = {**_EMBEDDINGS, "types_table": "embeddings.token_type_embeddings"}
_ROBERTA = Family("roberta.", "encoder.layer.{}.", _TYPED, _BERT, after_padding=True, **_ENCODER)

_LLAMAS = Family(
    "model.",
    "layers.{}.",
    {"token_table": "embed_tokens", "final": "norm", "unembedding": "lm_head"},
    _LLAMA,
    fixed={"quantization_config": None, "pretraining_tp": 1},
    ignored=("rotary_emb.inv_freq",),
)
_QWEN = {**_LLAMAS.fixed, "use_sliding_window": False}
_NORMED = {f"normed_{name}": f"self_attn.{name[0]}_norm" for name in ("queries", "keys")}
_AROUND = {
    "attention_result": "post_attention_layernorm",
    "mlp_input": "pre_feedforward_layernorm",
    "mlp_result": "post_feedforward_layernorm",
}

# By model_type in config.json.
FAMILIES = {
    "llama": _LLAMAS,
    "mistral": replace(_LLAMAS, keys={"sliding_window": "sliding_window"}),
    "qwen2": replace(_LLAMAS, fixed=_QWEN),
    "qwen3": replace(_LLAMAS, fixed=_QWEN, of_layer=_LLAMA | _NORMED),
    "gemma2": replace(
        _LLAMAS,
        of_layer=_LLAMA | _AROUND,
        keys={
            **{"hidden_act": "hidden_activation", "scale": "query_pre_attn_scalar"},
            **{"softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping"},
            "sliding_window": "sliding_window",
        },
        pattern=(_SLIDING, _FULL),
        place="both",
        norm_adds=1,
        scaled=True,
        tied=True,
        fixed={"quantization_config": None, "use_bidirectional_attention": None},
    ),
    "gpt2": Family(
        "transformer.",
        "h.{}.",
        {**{"token_table": "wte", "positions_table": "wpe"}, "final": "ln_f"}
        | {"unembedding": "lm_head"},
        _GPT2,
        {
            **{"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
            **{"hidden_size": "n_embd", "intermediate_size": "n_inner"},
            **{"max_position_embeddings": "n_positions", "hidden_act": "activation_function"},
        },
        norm="layer",
        epsilon=("layer_norm_epsilon", 1e-5),
        activation="gelu_new",
        turned=True,
        rotary=False,
        tied=True,
        wider=4,
        fixed={
            **{"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True},
            **{"add_cross_attention": False, "quantization_config": None},
        },
        ignored=("attn.bias", "attn.masked_bias"),
    ),
    "bert": Family("bert.", "encoder.layer.{}.", _TYPED, _BERT, **_ENCODER),
    "camembert": _ROBERTA,
    "distilbert": Family(
        "distilbert.",
        "transformer.layer.{}.",
        _EMBEDDINGS,
        _DISTILBERT,
        {
            **{"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
            **{"hidden_size": "dim", "intermediate_size": "hidden_dim"},
            "hidden_act": "activation",
        },
        **_ENCODER,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


@dataclass(frozen=True)
class Names:
    """How a file calls its tensors: `whole` and `of_layer` by the textbook's names; see Family."""

    whole: Mapping[str, str]
    of_layer: Mapping[str, str]  # with {} for the number of the layer
    turned: bool = False  # whether matrices are stored (in, out)
    said: str = "config.json"  # what requires them


@dataclass(frozen=True)
class Architecture:
    """The sizes of a model, and what its layers are made of."""

    kind: str
    layers: int
    heads: int
    key_heads: int
    head_width: int
    width: int
    inner: int
    vocabulary: int
    longest: int  # tokens
    epsilon: float
    activation: str
    tied: bool
    positions: int = 0  # learned ones
    types: int = 0
    padding: int = 0
    rotary: tuple[Rotary | None, ...] = ()  # of each layer
    windows: tuple[int | None, ...] = ()  # keys to the left of a query, of each layer
    scale: float | None = None  # of scores; None: 1/√D
    softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float | None = None

    @property
    def family(self) -> Family:
        """What its kind says."""
        return FAMILIES[self.kind]

    def form(self, given: frozenset[str]) -> Layer:
        """What the steps of a layer with these weights are made of."""
        return Layer(
            given,
            self.family.norm,
            self.family.place,
            self.activation,
            masked=self.family.causal,
            default_scale=self.scale is None,
        )


@dataclass(frozen=True)
class _Said:
    """What a configuration says, by the names of one family."""

    table: Mapping[str, Any]
    family: Family

    def given(self, key: str, default: Any = None) -> tuple[str, Any]:
        """What an option is called there, and its value; one that is missing is refused."""
        key = self.family.keys.get(key, key)
        value = self.table.get(key, default)
        if value is None and (key not in self.table or default is None):
            raise ProblemError(f"has no {key}" if key not in self.table else f"{key} is nothing")
        return key, default if value is None and key in _MAY_BE_NULL else value

    def size(self, key: str, least: int = 1, default: Any = None) -> int:
        """A number of things."""
        key, value = self.given(key, default)
        number = as_integer(key, value)
        if number < least:
            raise ProblemError(f"{key} is {number}; it must be {least} or more")
        return number

    def number(self, name: str, parse: Callable[[str, Any], Any] = as_number) -> Any:
        """A number above 0, or None where the family has none, or it is null."""
        key = self.family.keys.get(name)
        if key is None or (key in self.table and self.table[key] is None):
            return None
        found = parse(*self.given(key))
        if found <= 0:
            raise ProblemError(f"{key} is {found}; it must be above 0")
        return found


def describe(table: Mapping[str, Any]) -> Architecture:
    """The architecture that a configuration says; options that are not computed are refused."""
    kind = _supported_kind(table)
    family = FAMILIES[kind]
    said = _Said(table, family)
    given, size, number = said.given, said.size, said.number
    width, heads, layers = (
        size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if layers > MAX_LAYERS:
        raise ProblemError(f"num_hidden_layers is {layers}; at most {MAX_LAYERS} are read")
    if table.get("head_dim") is None and width % heads:
        raise ProblemError(f"hidden size {width} is not a multiple of {heads} heads")
    key_heads = size("num_key_value_heads", default=heads) if family.rotary else heads
    if heads % key_heads:
        raise ProblemError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}"
        )
    head_width = size("head_dim", default=width // heads) if family.rotary else width // heads
    name, activation = given("hidden_act", family.activation)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ProblemError(
            f"{name} is {shown(activation)}; it must be {either(tuple(ACTIVATIONS))}"
        )
    epsilon = as_number(*given(*family.epsilon))
    if not 0 <= epsilon < 1:
        raise ProblemError(
            f"{family.epsilon[0]} is {epsilon}; it must be 0 or more, and less than 1"
        )
    longest = size("max_position_embeddings")
    padding = size("pad_token_id", 0, 1) if family.after_padding else 0
    learned = longest if "positions_table" in family.tensors else 0
    if family.after_padding:
        longest -= padding + 1
    if longest < 1:
        raise ProblemError(
            f"max_position_embeddings is {learned} but positions start after "
            f"pad_token_id {padding}; no position is left"
        )
    scale = number("scale")
    return Architecture(
        kind,
        layers,
        heads,
        key_heads,
        head_width,
        width,
        inner=size("intermediate_size", default=family.wider * width or None),
        vocabulary=size("vocab_size"),
        longest=longest,
        epsilon=epsilon,
        activation=ACTIVATIONS[activation],
        tied=bool(table.get("tie_word_embeddings", family.tied)),
        positions=learned,
        types=size("type_vocab_size", default=2) if "types_table" in family.tensors else 0,
        padding=padding,
        rotary=tuple(_rotary(table, layers, head_width)) if family.rotary else (None,) * layers,
        windows=_windows(table, family, layers, number("sliding_window", as_integer)),
        scale=None if scale is None else scale**-0.5,
        softcap=number("softcap"),
        logits_softcap=number("logits_softcap"),
        embedding_scale=width**0.5 if family.scaled else None,
    )


def _windows(
    table: Mapping[str, Any], family: Family, layers: int, width: int | None
) -> tuple[int | None, ...]:
    """How many keys to its left each query sees, in each layer; a window has the query too."""
    if width is None:
        return (None,) * layers
    kinds = table.get("layer_types")
    if kinds is None:
        kinds = [family.pattern[number % len(family.pattern)] for number in range(layers)]
    known = isinstance(kinds, list) and all(one in (_SLIDING, _FULL) for one in kinds)
    if not known or len(kinds) != layers:
        raise ProblemError(f"layer_types must have {layers} words, each {_SLIDING} or {_FULL}")
    return tuple(width - 1 if kind == _SLIDING else None for kind in kinds)


def _rotary(table: Mapping[str, Any], layers: int, width: int) -> list[Rotary | None]:
    if table.get("rope_theta") is None and table.get("rope_parameters") is None:
        table = {**table, "rope_theta": 10000.0}  # of configurations that are older than the field
    try:
        found = [Rotary.from_config(table, layer) for layer in range(layers)]
        for one in found:
            if one is not None:
                one.fits(width, (0, 0, 0))
    except RegardError as error:
        raise ProblemError(safe_text(error, 400)) from None
    for one in found:
        if one is not None and one.depends_on_length:
            raise ProblemError(
                f"rope_scaling of the type {safe_text(one.scaling, 120)} turns the first tokens of "
                "a longer text by other angles, which is not supported"
            )
    return found


def _supported_kind(table: Mapping[str, Any]) -> str:
    """The supported model_type of a configuration."""
    if table.get("auto_map"):
        raise ProblemError(
            "auto_map names Python code of the model's own, which is never run; only models with "
            "transformers' own code are read"
        )
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ProblemError(
            f"model_type is {shown(kind)}, which is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    for key, value in FAMILIES[kind].fixed.items():
        if table.get(key, value) != value and (value or table[key] is not None):
            raise ProblemError(
                f"{key} is {shown(table[key])}, which is not supported; it must be {shown(value)}"
            )
    return kind


# --- GGUF ----------------------------------------------------------------------------------------

_IN_GGUF = ("llama", "gpt2")
# What configurations call the keys of a GGUF file, which begin with the architecture's name.
_GGUF_KEYS = {
    **{"block_count": "num_hidden_layers", "embedding_length": "hidden_size"},
    **{"attention.head_count": "num_attention_heads", "feed_forward_length": "intermediate_size"},
    **{"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"},
    **{"context_length": "max_position_embeddings", "vocab_size": "vocab_size"},
    **{"rope.freq_base": "rope_theta"},
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_GGUF_WHOLE = {
    **{"token_table": "token_embd", "positions_table": "position_embd"},
    **{"final": "output_norm", "unembedding": "output"},
}
_GGUF_LAYER = {
    **{"attention_input": "attn_norm", "mlp_input": "ffn_norm", "W_q W_k W_v": "attn_qkv"},
    **{f"W_{letter}": f"attn_{letter}" for letter in "qkv"},
    "W_o": "attn_output",
    **{f"W_{name}": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def describe_gguf(said: Mapping[str, Any], tensors: Collection[str]) -> Architecture:
    """The architecture that a GGUF file says.

    It has the rows of queries and keys so that a pair of features is side by side.
    """
    kind = said.get("general.architecture")
    if kind not in _IN_GGUF:
        raise ProblemError(
            f"general.architecture is {shown(kind)}, which is not supported; supported are "
            f"{', '.join(_IN_GGUF)}"
        )
    family, table = FAMILIES[kind], dict[str, Any](model_type=kind)
    for key, value in said.items():
        own = key.removeprefix(f"{kind}.")
        if own == key:
            continue
        if own in _GGUF_KEYS:
            name = _GGUF_KEYS[own]
            table[family.keys.get(name, name)] = value
        elif own == "rope.dimension_count":
            table["rotary"] = value
        elif own != "attention.value_length":
            raise ProblemError(f"has {safe_text(key, 80)}, which is not known here")
    table.setdefault("vocab_size", len(said.get("tokenizer.ggml.tokens") or ()))
    table["tie_word_embeddings"] = "output.weight" not in tensors
    turned = table.pop("rotary", None)
    found = describe(table)
    if family.rotary and turned not in (None, found.head_width):
        raise ProblemError(
            f"{kind}.rope.dimension_count is {shown(turned)}, but heads are {found.head_width} wide"
        )
    if not family.rotary:
        return found
    rotary = tuple(Rotary(one.base, interleaved=True) if one else None for one in found.rotary)
    return replace(found, rotary=rotary)


def names_of(config: Architecture, tensors: Collection[str], *, gguf: bool = False) -> Names:
    """What the tensors of a model are called in its file."""
    family = config.family
    if gguf:
        of_layer = {name: f"blk.{{}}.{_GGUF_LAYER[name]}" for name in family.of_layer}
        return Names(
            {name: _GGUF_WHOLE[name] for name in family.tensors}, of_layer, said="the header"
        )
    words = f"{family.tensors['token_table']}.weight"
    prefix = family.prefix if family.prefix + words in tensors else ""
    whole = {name: prefix + own for name, own in family.tensors.items()}
    if "unembedding" in whole:
        whole["unembedding"] = family.tensors["unembedding"]
    of_layer = {name: prefix + family.layer + own for name, own in family.of_layer.items()}
    return Names(whole, of_layer, family.turned)

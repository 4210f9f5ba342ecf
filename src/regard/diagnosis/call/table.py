"""What names of parameters, of attributes and of layouts mean, by whose convention: data.

A name is looked up whole, in lower case. A name that is not here is not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

USUAL = "as papers and tutorials write it"
TORCH = "torch"
HF = "transformers"
FLASH = "flash-attn"
JAX = "jax.nn and flax"
D2L = "Dive into Deep Learning"


@dataclass(frozen=True)
class Meaning:
    """What a parameter gets: a field of `t`, or something neutral; and who means it so."""

    role: str
    source: str = USUAL
    kind: str = ""  # of a mask: attend, hide or add, where the name alone says it
    neutral: str = ""  # the code of what it gets if it has no default


def _names(text: str, role: str, source: str = USUAL, **more: str) -> dict[str, Meaning]:
    return {name: Meaning(role, source, **more) for name in text.split()}


def _each(names: str, value: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), value)


PARAMETERS: Mapping[str, Meaning] = {
    **_names("q query queries qs xq q_heads query_heads", "query"),
    **_names("query_states query_layer", "query", HF),
    **_names("k key keys ks xk k_heads key_vectors", "key"),
    **_names("key_states key_layer", "key", HF),
    **_names("v value values vs xv v_heads vals", "value"),
    **_names("value_states value_layer", "value", HF),
    **_names("x xs inputs input embeddings emb tokens sequence x_q hidden h_in", "embeddings"),
    **_names("hidden_states hidden_state", "embeddings", HF),
    **_names("src tgt", "embeddings", TORCH),
    **_names("inputs_q", "embeddings", JAX),
    **_names(
        "context ctx memory enc_out encoder_output encoder_outputs y x_kv kv_input", "context"
    ),
    **_names("encoder_hidden_states", "context", HF),
    **_names("inputs_kv inputs_k", "context", JAX),
    **_names("w_q wq q_w q_weight w_query wquery q_proj_weight weight_q", "W_q"),
    **_names("w_k wk k_w k_weight w_key wkey k_proj_weight weight_k", "W_k"),
    **_names("w_v wv v_w v_weight w_value wvalue v_proj_weight weight_v", "W_v"),
    **_names("w_o wo o_w o_weight w_out wout w_output out_proj_weight weight_o", "W_o"),
    **_names("b_q bq q_bias bias_q", "b_q"),
    **_names("b_k bk k_bias bias_k", "b_k"),
    **_names("b_v bv v_bias bias_v", "b_v"),
    **_names("b_o bo o_bias bias_o b_out out_proj_bias", "b_o"),
    **_names("w_qkv wqkv qkv_weight in_proj_weight", "W_qkv"),
    **_names("b_qkv bqkv qkv_bias in_proj_bias", "b_qkv"),
    **_names("mask attn_mask att_mask m", "mask"),
    **_names("attention_mask", "mask", HF),
    **_names("tgt_mask src_mask", "mask", TORCH),
    **_names("allowed visible keep attend_mask", "mask", kind="attend"),
    **_names("key_padding_mask src_key_padding_mask", "key_mask", TORCH, kind="hide"),
    **_names("key_mask pad_mask padding_mask kv_mask k_mask mask_k token_mask", "key_mask"),
    **_names("key_value_seq_lengths", "lengths", JAX),
    **_names("valid_lens valid_len", "lengths", D2L),
    **_names("lengths lens seq_lens seqlens seq_lengths lengths_k kv_lens key_lengths", "lengths"),
    **_names("bias attn_bias attention_bias score_bias position_bias pos_bias rel_bias", "bias"),
    **_names("scale scaling sm_scale qk_scale", "scale"),
    **_names("softmax_scale", "scale", FLASH),
    **_names("softcap soft_cap logit_cap logits_soft_cap attn_logit_softcapping cap", "softcap"),
    **_names("sink sinks", "sink", HF),
    **_names("causal is_causal use_causal_mask autoregressive", "causal"),
    **_names("window window_len sliding_window window_length local_window", "window"),
    **_names("window_size local_window_size", "window", FLASH),
    **_names("offset start_pos query_offset q_offset position_offset pos_offset", "offset"),
    **_names("heads num_heads n_heads n_head nhead nheads h num_attention_heads", "heads"),
    **_names("kv_heads num_kv_heads n_kv_heads num_key_value_heads n_kv_head groups", "key_heads"),
    **_names("positions position_ids pos position", "positions"),
    **_names("cos cosines", "cos"),
    **_names("sin sines", "sin"),
    **_names("past past_kv past_key_value past_key_values layer_past kv", "past"),
    **_names("k_cache past_k past_keys cache_k k_past past_key", "past key"),
    **_names("v_cache past_v past_values cache_v v_past past_value", "past value"),
    **_names("d_out dout do grad_out grad_output d_output dy upstream", "grad_output"),
    **_names(
        "dropout dropout_p dropout_rate attn_dropout attention_dropout p_drop", "", neutral="0.0"
    ),
    **_names("training train is_training", "", neutral="False"),
    **_names("deterministic", "", JAX, neutral="True"),
    **_names("return_weights return_attn need_weights output_attentions", "", neutral="False"),
    **_names("return_attention return_attn_weights return_probs", "", neutral="False"),
}

# What a constructor gets. A name with a default that is not here keeps it.
CONSTRUCTOR: Mapping[str, str] = {
    **_each(
        "embed_dim d_model dim hidden_size hidden_dim n_embd emb_dim embedding_dim model_dim "
        "embed_size d_in d_out dim_in features num_hiddens channels c n_state width",
        "{model}",
    ),
    **_each(
        "num_heads n_heads n_head nhead heads h nheads num_attention_heads",
        "{heads}",
    ),
    **_each(
        "num_kv_heads n_kv_heads num_key_value_heads kv_heads n_kv_head",
        "{key_heads}",
    ),
    **_each(
        "head_dim dim_head d_head d_k head_size key_dim",
        "{width}",
    ),
    "d_v": "{value_width}",
    **_each("causal is_causal", "{causal}"),
    **_each(
        "dropout attn_dropout dropout_p attn_pdrop resid_pdrop p_drop attn_drop proj_drop "
        "dropout_rate attention_dropout",
        "0.0",
    ),
    **_each(
        "block_size context_length max_len max_seq_len max_length",
        "128",
    ),
}

# Attributes of layers: a matrix, or a part with a weight and perhaps a bias.
ATTRIBUTES: Mapping[str, str] = {
    **_each(
        "q_proj query w_q wq to_q q q_lin linear_q query_proj q_linear w_query proj_q wquery fc_q "
        "query_linear q_proj_weight",
        "q",
    ),
    **_each(
        "k_proj key w_k wk to_k k k_lin linear_k key_proj k_linear w_key proj_k wkey fc_k "
        "key_linear k_proj_weight",
        "k",
    ),
    **_each(
        "v_proj value w_v wv to_v v v_lin linear_v value_proj v_linear w_value proj_v wvalue fc_v "
        "value_linear v_proj_weight",
        "v",
    ),
    **_each(
        "out_proj o_proj proj c_proj w_o wo dense to_out fc_out out o_lin out_lin linear_o "
        "output_proj proj_out w_out o projection fc_o out_linear output w_output",
        "o",
    ),
    **_each(
        "qkv c_attn in_proj w_qkv wqkv qkv_proj to_qkv query_key_value in_proj_weight attn_qkv "
        "qkv_linear",
        "qkv",
    ),
    **_each(
        "kv to_kv kv_proj w_kv wkv",
        "kv",
    ),
    "in_proj_bias": "b_qkv",
    **{f"b_{one}": f"b_{one}" for one in "qkvo"},
    **{f"b{one}": f"b_{one}" for one in "qkvo"},
    **{f"bias_{one}": f"b_{one}" for one in "qkvo"},
}

# The parameters of compiled functions, which say none.
SIGNATURES: Mapping[str, str] = {
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0, "
    "is_causal=False, scale=None, enable_gqa=False",
}
# Arguments that change nothing: torch's layer uses its mask, and takes this as a word about it.
HINTS: Mapping[str, tuple[str, ...]] = {"MultiheadAttention": ("is_causal",)}

# How many heads, for an object that is given.
HEADS = ["num_heads", "n_heads", "n_head", "nhead", "heads", "h", "nheads", "num_attention_heads"]
# The methods of an object that is no function itself.
METHODS = ["__call__", "forward", "attend", "attention", "compute", "apply"]


@dataclass(frozen=True)
class Layout:
    """How (B, H, L, D) becomes what a function takes, and its result (B, H, L, E) again."""

    axes: str
    take: str
    give: str
    masks: tuple[str, ...]  # forms of (B, H, L, S), the likely ones first
    tokens: str = "{}"  # the form of what has (B, L) or (B, S)
    packed: bool = False  # whether heads are side by side


_FULL = ("{}", "{}[:, :1]", "{}[:, 0]", "{}[0, 0]")
_PACK = "{0}.swapaxes(1, 2).reshape({0}.shape[0], {0}.shape[2], -1)"
_UNPACK = "{0}.reshape(*t.query.shape[:1], t.query.shape[2], t.query.shape[1], -1).swapaxes(1, 2)"
LAYOUTS = (
    Layout("(B, H, L, D)", "{}", "{}", _FULL),
    Layout("(B, L, H, D)", "{}.swapaxes(1, 2)", "{}.swapaxes(1, 2)", _FULL),
    Layout("(B, L, H*D)", _PACK, _UNPACK, _FULL, packed=True),
    Layout("(B, L, D)", "{}[:, 0]", "{}[:, None]", ("{}[:, 0]", "{}[0, 0]")),
    Layout("(H, L, D)", "{}[0]", "{}[None]", ("{}[0]", "{}[0, 0]"), "{}[0]"),
    Layout("(L, D)", "{}[0, 0]", "{}[None, None]", ("{}[0, 0]",), "{}[0]"),
    Layout(
        "(L, H, D)",
        "{}[0].swapaxes(0, 1)",
        "{}.swapaxes(0, 1)[None]",
        ("{}[0]", "{}[0, 0]"),
        "{}[0]",
    ),
    Layout("(L, B, D)", "{}[:, 0].swapaxes(0, 1)", "{}.swapaxes(0, 1)[:, None]", ("{}[:, 0]",)),
    Layout("(D, L)", "{}[0, 0].T", "{}.T[None, None]", ("{}[0, 0]", "{}[0, 0].T"), "{}[0]"),
)
EMBEDDED = (
    Layout("(B, L, M)", "{}", "{}", _FULL),
    Layout("(L, B, M)", "{}.swapaxes(0, 1)", "{}.swapaxes(0, 1)", _FULL),
    Layout("(L, M)", "{}[0]", "{}[None]", ("{}[0, 0]", "{}[0]"), "{}[0]"),
)

# How a matrix for x @ W is handed over; the last for a list or an axis of heads.
WEIGHTS = ("{0}", "{0}.T", "{0}.reshape({0}.shape[0], t.heads, -1).swapaxes(0, 1)")
MASKS: Mapping[str, tuple[str, ...]] = {
    "attend": ("{0}", "1.0 * {0}"),
    "hide": ("~{0}", "1.0 * ~{0}"),
    "add": ("{1}.where({0}, 0.0, -{1}.inf)",),
}
MASKS_IN_WORDS = {
    "attend": "True in `{}` means attend",
    "hide": "True in `{}` means hidden",
    "add": "`{}` is added to the scores",
}

"""Decoders small enough to check: random weights in directories and in GGUF files, and a tokenizer.

Shares no code with the package: files are written by the library `safetensors`, and here by hand.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 262,
    "max_position_embeddings": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 40,
    "vocab_size": 262,
    "eos_token_id": 256,
}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def shapes(config):
    """Every tensor of a decoder and its shape, as transformers saves it."""
    if config["model_type"] == "gpt2":
        return _shapes_of_gpt2(config)
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    found = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        for name, out, into in (
            ("self_attn.q_proj", queries, width),
            ("self_attn.k_proj", keys, width),
            ("self_attn.v_proj", keys, width),
            ("self_attn.o_proj", width, queries),
            ("mlp.gate_proj", inner, width),
            ("mlp.up_proj", inner, width),
            ("mlp.down_proj", width, inner),
        ):
            found[f"model.layers.{layer}.{name}.weight"] = (out, into)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = (width,)
    found["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], width)
    return found


def _shapes_of_gpt2(config):
    width = config["n_embd"]
    found = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
    }
    for layer in range(config["n_layer"]):
        own = f"transformer.h.{layer}"
        for name, into, out in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            found |= {f"{own}.{name}.weight": (into, out), f"{own}.{name}.bias": (out,)}
        for name in ("ln_1", "ln_2"):
            found |= {f"{own}.{name}.weight": (width,), f"{own}.{name}.bias": (width,)}
    return found | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def tensors(config=LLAMA, dtype=np.float32):
    """Random numbers for each of them; norms are near 1."""
    rng = np.random.default_rng(0)
    norms = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    return {
        name: (rng.normal(size=shape) * 0.4 + name.endswith(norms)).astype(dtype)
        for name, shape in shapes(config).items()
    }


def tokenizer_json():
    """Bytes as tokens 0 to 255, then <|end|> and pairs of letters."""
    letters = _letters()
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    pairs = [("t", "h"), ("th", "e"), ("c", "a"), ("ca", "t"), ("Ġ", "the")]
    vocabulary["<|end|>"] = 256
    vocabulary |= {a + b: 257 + number for number, (a, b) in enumerate(pairs)}
    end = {"id": 256, "content": "<|end|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": level | {"use_regex": True},
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [" ".join(p) for p in pairs]},
    }


def _letters():
    """The letter that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 400))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write(folder: Path, config=LLAMA, weights=None, tokenizer=True, template=TEMPLATE) -> Path:
    """A directory with config.json, model.safetensors and tokenizer.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config) if weights is None else weights, folder / "model.safetensors")
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


# --- GGUF ----------------------------------------------------------------------------------------

_NAMES = {
    "llama": {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    },
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "transformer.h.": "blk.",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
    },
}


def metadata(config):
    """What a converter writes into a GGUF file about this decoder."""
    kind = config["model_type"]
    ready = tokenizer_json()["model"]
    tokens = sorted(ready["vocab"], key=ready["vocab"].get)
    said = {
        "general.architecture": kind,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": ready["merges"],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": TEMPLATE,
    }
    if kind == "gpt2":
        return said | {
            "gpt2.block_count": config["n_layer"],
            "gpt2.context_length": config["n_positions"],
            "gpt2.embedding_length": config["n_embd"],
            "gpt2.feed_forward_length": 4 * config["n_embd"],
            "gpt2.attention.head_count": config["n_head"],
            "gpt2.attention.layer_norm_epsilon": 1e-5,
            "gpt2.vocab_size": config["vocab_size"],
        }
    return said | {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
    }


def converted(config, weights):
    """The tensors as a converter writes them: other names, and pairs of a rotation side by side."""
    kind, found = config["model_type"], {}
    for name, array in weights.items():
        for old, new in _NAMES[kind].items():
            name = name.replace(old, new)
        if kind == "gpt2" and array.ndim == 2 and name.startswith("blk."):
            array = array.T
        if "attn_q." in name or "attn_k." in name:
            heads = len(array) // config["head_dim"]
            halves = array.reshape(heads, 2, config["head_dim"] // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        found[name] = np.ascontiguousarray(array)
    return found


def gguf(said, arrays, kinds=None) -> bytes:
    """A GGUF file. `kinds` has (type number, shape, bytes) of tensors that are no floats."""
    head, data = bytearray(), bytearray()
    for key, value in said.items():
        head += _text(key) + _value(value)
    entries = {
        name: (0 if array.dtype == np.float32 else 1, array.shape, array.tobytes())
        for name, array in arrays.items()
    } | (kinds or {})
    for name, (kind, shape, content) in entries.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack(
            "<IQ", kind, len(data)
        )
        data += content + bytes(-len(content) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(said)) + head
    return bytes(start + bytes(-len(start) % 32) + data)


def _text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    kind, one = (8, _text) if isinstance(value[0], str) else (5, lambda n: struct.pack("<i", n))
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(one, value))


def write_gguf(path: Path, config=LLAMA, weights=None) -> Path:
    """A GGUF file with the same weights as `write`."""
    weights = tensors(config) if weights is None else weights
    path.write_bytes(gguf(metadata(config), converted(config, weights)))
    return path

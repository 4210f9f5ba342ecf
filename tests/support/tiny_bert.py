"""A BERT small enough to compute with plain loops, written to a directory as transformers does.

Shares no code with the package: the numbers are drawn here, the files written by the library
`safetensors`, and `hidden_states` below is the model once more, one number after the other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    ".",
    "##s",
    "##ting",
    "wait",
]
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 12,
    "intermediate_size": 20,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 16,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(WORDS),
}


def shapes(config=CONFIG):
    """Every tensor of a BERT and its shape."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    found = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        "embeddings.LayerNorm.weight": (width,),
        "embeddings.LayerNorm.bias": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, out, into in (
            ("attention.self.query", width, width),
            ("attention.self.key", width, width),
            ("attention.self.value", width, width),
            ("attention.output.dense", width, width),
            ("intermediate.dense", inner, width),
            ("output.dense", width, inner),
        ):
            found[f"encoder.layer.{layer}.{name}.weight"] = (out, into)
            found[f"encoder.layer.{layer}.{name}.bias"] = (out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            found[f"encoder.layer.{layer}.{name}.weight"] = (width,)
            found[f"encoder.layer.{layer}.{name}.bias"] = (width,)
    return found


def tensors(config=CONFIG, dtype=np.float32):
    """Random numbers for each of them."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=shape) + name.endswith("LayerNorm.weight")).astype(dtype)
        for name, shape in shapes(config).items()
    }


def write(folder: Path, *, config=None, weights=None, words=WORDS) -> Path:
    """A directory with config.json, model.safetensors and vocab.txt; None leaves one out."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG if config is None else config
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config) if weights is None else weights, folder / "model.safetensors")
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return folder


def packed(header, data=b"", length=None) -> bytes:
    """A safetensors file by hand, so that it may be wrong."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def hidden_states(weights, ids, config=CONFIG):
    """What each layer gets and the last one returns, in Python floats, number by number."""
    w = {name: array.astype(np.float64).tolist() for name, array in weights.items()}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    part = width // heads

    def linear(name, x):
        matrix, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        return [
            math.fsum([*(a * b for a, b in zip(row, x, strict=True)), one])
            for row, one in zip(matrix, bias, strict=True)
        ]

    def norm(name, x):
        mean = math.fsum(x) / len(x)
        variance = math.fsum((one - mean) ** 2 for one in x) / len(x)
        root = math.sqrt(variance + config["layer_norm_eps"])
        scale, shift = w[f"{name}.weight"], w[f"{name}.bias"]
        return [(o - mean) / root * a + b for o, a, b in zip(x, scale, shift, strict=True)]

    def plus(x, y):
        return [a + b for a, b in zip(x, y, strict=True)]

    def gelu(x):
        return x * math.erfc(-x / math.sqrt(2)) / 2

    rows = []
    for place, number in enumerate(ids):
        parts = (
            w["embeddings.word_embeddings.weight"][number],
            w["embeddings.position_embeddings.weight"][place],
            w["embeddings.token_type_embeddings.weight"][0],
        )
        rows.append(
            norm("embeddings.LayerNorm", [sum(three) for three in zip(*parts, strict=True)])
        )
    states = [rows]
    for layer in range(config["num_hidden_layers"]):
        own = f"encoder.layer.{layer}"
        q, k, v = (
            [linear(f"{own}.attention.self.{one}", row) for row in rows]
            for one in ("query", "key", "value")
        )
        merged = []
        for query in q:
            out = []
            for head in range(heads):
                cut = slice(head * part, (head + 1) * part)
                scores = [
                    math.fsum(a * b for a, b in zip(query[cut], key[cut], strict=True))
                    / math.sqrt(part)
                    for key in k
                ]
                most = max(scores)
                shares = [math.exp(score - most) for score in scores]
                total = math.fsum(shares)
                out += [
                    math.fsum(
                        share / total * value[cut][at]
                        for share, value in zip(shares, v, strict=True)
                    )
                    for at in range(part)
                ]
            merged.append(out)
        after = []
        for row, one in zip(rows, merged, strict=True):
            added = [
                a + b
                for a, b in zip(row, linear(f"{own}.attention.output.dense", one), strict=True)
            ]
            between = norm(f"{own}.attention.output.LayerNorm", added)
            inner = [gelu(x) for x in linear(f"{own}.intermediate.dense", between)]
            added = [
                a + b for a, b in zip(between, linear(f"{own}.output.dense", inner), strict=True)
            ]
            after.append(norm(f"{own}.output.LayerNorm", added))
        rows = after
        states.append(rows)
    return np.array(states)

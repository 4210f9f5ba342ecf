"""Models from local files, run in NumPy: no framework, no network, no pickles.

`load(path)` reads a model of one of the `FAMILIES`: a directory as transformers saves it, or a GGUF
file. An encoder becomes an `Encoder`: `encode` gives sentence embeddings. A decoder becomes a
`LanguageModel`: `generate` writes on after a text. Both explain every step of a head.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from regard.boundary.files import about, file_name
from regard.errors import DtypeError, OptionError, ProblemError, safe_text
from regard.explanation.overview import Overview
from regard.models.architecture import FAMILIES, Architecture, describe, describe_gguf, names_of
from regard.models.encoder import Encoder
from regard.models.files.gguf import read_gguf
from regard.models.files.safetensors import CONFIG, WHOLE, find_tensors, read_table
from regard.models.generation import Candidate, Generation, Step
from regard.models.language import LanguageModel, Run
from regard.models.layers import KEPT, Reader
from regard.models.pooling import read_pooling
from regard.models.text.chat import Template, template_of
from regard.models.text.tokenizer import Tokens, read_tokenizer, tokenizer_of_gguf

__all__ = ["FAMILIES", "Candidate", "Encoder", "Generation", "LanguageModel", "Overview", "Run"]
__all__ += ["Step", "Tokens", "load"]


def __dir__() -> list[str]:
    return __all__


def load(directory: str | os.PathLike[str], *, dtype: Any = "float32") -> Encoder | LanguageModel:
    """Read a model from a directory saved by transformers, or from a GGUF file.

    Parameters
    ----------
    directory : str or path
        With config.json, model.safetensors (or model.safetensors.index.json and its shards) and
        tokenizer.json or vocab.txt. An optional modules.json, from sentence-transformers, says how
        token states are pooled. Or a file whose name ends in .gguf, which has all of this.
    dtype : "float32", "float64", "bfloat16" or "int8"
        What the weights of products are kept as; all else is computed in float32, or in float64.
        "bfloat16" and "int8", for language models, round weights that a file has in more bytes;
        a token then takes less time, because it reads less. int8 has groups of 32 with a scale
        each, as Q8_0 of GGUF files; docs/language-models.md has the errors. Weights may be
        float16, bfloat16, float32 or float64, and quantised in GGUF: Q8_0, Q4_0, Q4_1, Q4_K, Q5_K,
        Q6_K. Those of a language model that have no more bytes in their file than here stay there,
        if they are float32, bfloat16, float16 or Q8_0; others are converted once.

    Returns
    -------
    Encoder, or LanguageModel
        With `encode`, `hidden_states`, `explain` and `overview`; or with `generate`, `chat`, `run`
        and `logits`.

    Raises
    ------
    ProblemError
        If a file is missing, damaged, inconsistent with the others, or of an unsupported
        architecture: one line with the file, the tensor and both shapes.

    Notes
    -----
    Supported are the model types in `FAMILIES`. Dropout is not applied. Code in the directory is
    never run, and pickled weights are never read. A template of conversations, which is a program,
    runs in a sandbox in another process, with limits on memory, time and output.

    References
    ----------
    Devlin et al., "BERT" (2019); Reimers, Gurevych, "Sentence-BERT" (2019); Radford et al.,
    "Language Models are Unsupervised Multitask Learners" (2019); Touvron et al., "Llama" (2023).
    """
    kept = _kept(dtype)
    path = file_name(directory)
    if path.endswith(".gguf") and not os.path.isdir(path):
        return _of_gguf(path, kept)
    if not os.path.isdir(path):
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        with about(path):
            raise ProblemError(f"{what}; a model is a directory with {CONFIG} and {WHOLE}")
    pooling = read_pooling(path)
    below = os.path.join(path, pooling.folder)
    place, table = read_table(below, CONFIG)
    with about(place):
        config = describe(table)
    tokenizer = read_tokenizer(below, config.vocabulary, config.types)
    place, tensors = find_tensors(below)
    if not config.family.causal and KEPT[kept] < 4:
        raise OptionError(
            f"dtype is {kept}, which is for language models; an encoder multiplies many rows at "
            "once by its weights, and takes float32 or float64"
        )
    stack = Reader(place, tensors, names_of(config, tensors), config, kept).stack()
    if not config.family.causal:
        return Encoder(path, config, stack, tokenizer, pooling, stack.dtype)
    generation = read_table(below, "generation_config.json", needed=False)[1]
    ends = _ids(generation.get("eos_token_id", table.get("eos_token_id")), config)
    return LanguageModel(path, config, stack, tokenizer, ends, template_of(below))


def _of_gguf(path: str, kept: str) -> LanguageModel:
    said, tensors = read_gguf(path)
    with about(path):
        config = describe_gguf(said, tensors)
    tokenizer = tokenizer_of_gguf(path, said, config.vocabulary)
    names = names_of(config, tensors, gguf=True)
    stack = Reader(path, tensors, names, config, kept).stack()
    keys = ("eos_token_id", "eot_token_id")
    ends = _ids([said.get(f"tokenizer.ggml.{key}") for key in keys], config)
    text, template = said.get("tokenizer.chat_template"), None
    if isinstance(text, str):
        named = {
            f"{key}_token": said.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")
        }
        special = {
            name: tokenizer.name(one)
            for name, number in named.items()
            for one in _ids(number, config)
        }
        template = Template(path, text, special)
    return LanguageModel(path, config, stack, tokenizer, ends, template)


def _ids(found: Any, config: Architecture) -> tuple[int, ...]:
    """Tokens by their numbers: one, or a list."""
    listed = found if isinstance(found, list) else [found]
    return tuple(
        one
        for one in listed
        if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < config.vocabulary
    )


def _kept(dtype: Any) -> str:
    named = dtype
    with suppress(TypeError):  # not a dtype, or one that NumPy does not have
        named = dtype if dtype is None else np.dtype(dtype).name
    if isinstance(named, str) and named in KEPT:
        return named
    raise DtypeError(f"dtype must be one of {', '.join(KEPT)}, not {safe_text(repr(dtype), 60)}")

"""Sentence encoders from local files, run in NumPy: no framework, no network, no pickles.

`load(directory)` reads an encoder of one of the `FAMILIES`, as transformers saves it, and returns
an `Encoder`: `encode` gives sentence embeddings, `explain` every step of one head, and `overview`
where each head of each layer reads.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from regard.boundary.files import about, file_name
from regard.errors import DtypeError, ProblemError, safe_text
from regard.models.bert import CONFIG, FAMILIES, read_config, read_weights
from regard.models.encoder import Encoder
from regard.models.overview import Overview
from regard.models.pooling import read_pooling
from regard.models.safetensors import WHOLE
from regard.models.tokenizer import Tokens, read_tokenizer

__all__ = ["FAMILIES", "Encoder", "Overview", "Tokens", "load"]


def __dir__() -> list[str]:
    return __all__


def load(directory: str | os.PathLike[str], *, dtype: Any = "float32") -> Encoder:
    """Read an encoder of the BERT family from a directory saved by transformers.

    Parameters
    ----------
    directory : str or path
        With config.json, model.safetensors (or model.safetensors.index.json and its shards) and
        tokenizer.json or vocab.txt. An optional modules.json, from sentence-transformers, says how
        token states are pooled.
    dtype : "float32" or "float64"
        For all computation. Weights may be float16, bfloat16, float32 or float64.

    Returns
    -------
    Encoder
        With `encode`, `hidden_states`, `explain` and `overview`.

    Raises
    ------
    ProblemError
        If a file is missing, damaged, inconsistent with the others, or of an unsupported
        architecture: one line with the file, the tensor and both shapes.

    Notes
    -----
    Supported are the model types in `FAMILIES`. Dropout is not applied. Code in the directory is
    never run, and pickled weights are never read.

    References
    ----------
    Devlin et al., "BERT" (2019); Reimers, Gurevych, "Sentence-BERT" (2019).
    """
    working = _working(dtype)
    folder = file_name(directory)
    if not os.path.isdir(folder):
        what = "is not a directory" if os.path.lexists(folder) else "does not exist"
        with about(folder):
            raise ProblemError(f"{what}; a model is a directory with {CONFIG} and {WHOLE}")
    pooling = read_pooling(folder)
    below = os.path.join(folder, pooling.folder)
    config = read_config(below)
    tokenizer = read_tokenizer(below, config.vocabulary, config.types)
    weights = read_weights(below, config, working)
    return Encoder(folder, config, weights, tokenizer, pooling, working)


def _working(dtype: Any) -> np.dtype[Any]:
    for known in (np.dtype(np.float32), np.dtype(np.float64)):
        with suppress(TypeError):  # not a dtype
            if dtype is not None and np.dtype(dtype) == known:
                return known
    raise DtypeError(f"dtype must be float32 or float64, not {safe_text(repr(dtype), 60)}")

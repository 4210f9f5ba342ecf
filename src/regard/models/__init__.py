"""Real encoders from local files, run in NumPy: no framework, no network, nothing unpickled.

Owns how a directory becomes an `Encoder`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np

from regard.errors import DtypeError, ProblemError, safe_text
from regard.models.bert import CONFIG, FAMILIES, read_config, read_weights
from regard.models.encoder import Encoder
from regard.models.overview import Overview
from regard.models.pooling import read_pooling
from regard.models.safetensors import WHOLE
from regard.models.tokenizer import Tokens, read_tokenizer
from regard.problems.files import about, file_name

__all__ = ["FAMILIES", "Encoder", "Overview", "Tokens", "load"]


def load(directory: str | os.PathLike[str], *, dtype: Any = "float32") -> Encoder:
    """An encoder of the BERT kind from a directory as transformers saves it.

    Parameters
    ----------
    directory : str or path
        With config.json, model.safetensors (or model.safetensors.index.json and its shards) and
        tokenizer.json or vocab.txt. Where modules.json is there, as sentence-transformers saves
        it, it says how sentences are made of tokens.
    dtype : "float32" or "float64"
        In which everything is computed. Weights may be float16, bfloat16, float32 or float64.

    Returns
    -------
    Encoder
        With `encode`, `hidden_states`, `explain` and `overview`.

    Raises
    ------
    ProblemError
        If a file is missing, damaged, of an architecture that is not supported, or does not fit
        the others: one line with the file, the tensor and both shapes.

    Notes
    -----
    The families are those of `FAMILIES`. A dropout, being for training, is not applied. Code that a
    model brings along is never run, and pickled weights are never read.

    References
    ----------
    Devlin et al., "BERT" (2019); Reimers, Gurevych, "Sentence-BERT" (2019).
    """
    working = _working(dtype)
    folder = file_name(directory)
    if not os.path.isdir(folder):
        what = "is no directory" if os.path.lexists(folder) else "there is no such directory"
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
        with suppress(TypeError):  # what is no dtype at all
            if dtype is not None and np.dtype(dtype) == known:
                return known
    raise DtypeError(f"dtype must be float32 or float64, not {safe_text(repr(dtype), 60)}")

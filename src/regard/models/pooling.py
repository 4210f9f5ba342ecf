"""Pooling the states of tokens into one vector per sentence, as sentence-transformers does.

Owns modules.json and the files it names. Must not know weights or how hidden states are computed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.files import about
from regard.boundary.parse import as_integer, check_text, either, shown
from regard.errors import ProblemError, safe_text
from regard.models.files.safetensors import plain_name, read_json, read_table

MODULES = "modules.json"
LIMITS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "xlm-roberta")
)
PROMPTS = "config_sentence_transformers.json"
# Several of them are concatenated in this order.
WAYS = ("cls", "max", "mean", "mean_sqrt_len", "lasttoken")
_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class Pooling:
    """How the token states of a text become its vector."""

    ways: tuple[str, ...] = ("mean",)
    normalise: bool = True
    folder: str = ""  # of the encoder, inside the directory
    longest: int | None = None  # tokens
    limit: str = ""  # the file with that limit
    lower: bool = False
    prompt: str = ""  # put before every text
    refusal: str = ""  # why this model cannot encode texts, if so

    def __call__(self, hidden: Array, lengths: Array) -> Array:
        """Pool the first `lengths` (B,) rows of hidden states (B, L, M) into (B, M·ways)."""
        pooled = [_pooled(way, hidden, lengths) for way in self.ways]
        return np.concatenate(pooled, axis=-1)


def _pooled(way: str, hidden: Array, lengths: Array) -> Array:
    real = np.arange(hidden.shape[1]) < lengths[:, None]  # (B, L)
    counts = lengths.astype(hidden.dtype)[:, None]
    match way:
        case "cls":
            return np.asarray(hidden[:, 0])
        case "lasttoken":
            return np.asarray(hidden[np.arange(len(hidden)), lengths - 1])
        case "max":
            return np.asarray(np.where(real[..., None], hidden, -np.inf).max(axis=1))
    total = (real.astype(hidden.dtype)[:, None] @ hidden)[:, 0]
    return np.asarray(total / (counts if way == "mean" else np.sqrt(counts)))


def unit_length(vectors: Array) -> Array:
    """Each vector divided by its length; 0 stays 0.

    >>> unit_length(np.array([[3.0, 4.0], [0.0, 0.0]]))
    array([[0.6, 0.8],
           [0. , 0. ]])
    """
    lengths = np.sqrt(np.einsum("...i,...i->...", vectors, vectors))[..., None]
    return np.asarray(vectors / np.maximum(lengths, 1e-12))


def read_pooling(folder: str) -> Pooling:
    """The pooling that modules.json describes; without that file the normalised mean."""
    path, modules = read_json(folder, MODULES, needed=False)
    if modules is None:
        return Pooling(**_limits(folder))
    below, refusal = "", ""
    ways: tuple[str, ...] | None = None
    normalise = False
    with about(path):
        for kind, place in _modules(modules):
            if kind == "Transformer" and ways is None:
                below = place
            elif kind == "Pooling" and ways is None:
                ways, refusal = _ways(folder, place)
            elif kind == "Normalize" and ways is not None:
                normalise = True
            else:
                refusal = refusal or f"{path} has a module {shown(kind)}, which is not supported"
    if ways is None:
        refusal = refusal or f"{path} has no module Pooling"
    return Pooling(
        ways or ("mean",),
        normalise,
        below,
        refusal=refusal,
        **_limits(os.path.join(folder, below)),
        **_prompt(folder),
    )


def _modules(modules: Any) -> list[tuple[str, str]]:
    """Kind and directory of each module."""
    if not isinstance(modules, list) or len(modules) > 16:
        raise ProblemError("must be a list of modules, 16 at most")
    found = []
    for module in modules:
        if not isinstance(module, dict):
            raise ProblemError(f"has {shown(module)} where a module is expected")
        kind = check_text("type", module.get("type")).rpartition(".")[2]
        place = check_text("path", module.get("path", ""))
        if place and not plain_name(place):
            raise ProblemError(
                f"path is {shown(place)}; it must be the name of a directory beside {MODULES}"
            )
        found.append((kind, place))
    return found


def _ways(folder: str, place: str) -> tuple[tuple[str, ...], str]:
    """The ways of pooling, and the reason if they are not supported."""
    path, table = read_table(os.path.join(folder, place), "config.json")
    named = table.get("pooling_mode")
    if named is None:
        wanted = [way for key, way in _KEYS.items() if table.get(key)]
    else:
        wanted = named if isinstance(named, list) else [named]
    unknown = [way for way in wanted if way not in WAYS]
    if unknown or not wanted:
        what = shown(unknown[0]) if unknown else "nothing"
        return (), f"{path}: pooling by {what} is not supported; it must be {either(WAYS)}"
    if table.get("include_prompt") is False:
        return (), f"{path}: include_prompt is false, which is not supported"
    return tuple(way for way in WAYS if way in wanted), ""


def _limits(folder: str) -> dict[str, Any]:
    for name in LIMITS:
        path, table = read_table(folder, name, needed=False)
        if not table:
            continue
        with about(path):
            longest = table.get("max_seq_length")
            if longest is not None and as_integer("max_seq_length", longest) < 1:
                raise ProblemError(f"max_seq_length is {longest}; it must be 1 or more")
            lower = bool(table.get("do_lower_case"))
            return {"longest": longest, "limit": name, "lower": lower}
    return {}


def _prompt(folder: str) -> dict[str, Any]:
    path, table = read_table(folder, PROMPTS, needed=False)
    name, prompts = table.get("default_prompt_name"), table.get("prompts")
    if name is None:
        return {}
    with about(path):
        if not isinstance(prompts, dict) or not isinstance(name, str) or name not in prompts:
            raise ProblemError(f"default_prompt_name is {shown(name)}, but there is no such prompt")
        return {"prompt": check_text(f"prompts.{safe_text(name, 40)}", prompts[name])}

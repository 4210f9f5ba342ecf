"""Weights of latent attention: down to a few numbers for each token, and up again to every head.

The product of both is the matrix of a usual projection. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.reading.parameter_names import plain

RANK = 10  # numbers of a latent: as many as no other axis has
_ENDS = re.compile("^w_?|_?(proj|weight|kernel|w|mat)$", re.IGNORECASE)
_DOWN = {
    **dict.fromkeys(("dkv", "kva", "kvdown", "downkv", "kvdownproj", "kvlatent", "dc"), "kv"),
    **dict.fromkeys(("dq", "qa", "qdown", "downq", "qlatent"), "q"),
}
_UP = {
    **dict.fromkeys(("uk", "kb", "kup", "upk"), "k"),
    **dict.fromkeys(("uv", "vb", "vup", "upv"), "v"),
    **dict.fromkeys(("ukv", "kvb", "kvup", "upkv"), "kv"),
    **dict.fromkeys(("uq", "qb", "qup", "upq"), "q"),
}


def latent_part(name: str) -> str:
    """Which matrix of latent attention has such a name: "down kv", "up k"; or nothing.

    >>> latent_part("W_DKV"), latent_part("w_uk"), latent_part("kv_b_proj"), latent_part("w_q")
    ('down kv', 'up k', 'up kv', '')
    """
    bare = plain(_ENDS.sub("", _ENDS.sub("", name)))
    if bare in _DOWN:
        return f"down {_DOWN[bare]}"
    return f"up {_UP[bare]}" if bare in _UP else ""


def latent_parts(names: Iterator[str] | list[str]) -> dict[str, str]:
    """The matrices of latent attention among names, if they make keys and values together."""
    found = {name: part for name in names if (part := latent_part(name))}
    parts = {*found.values()}
    ups = {letter for part in parts if part[:3] == "up " for letter in part[3:]}
    if "down kv" not in parts or not {*"kv"} <= ups or ("down q" in parts) != ("q" in ups):
        return {}
    return found


def letters_made(parts: Mapping[str, str]) -> set[str]:
    """The projections that are products of these matrices."""
    return {"k", "v", *(["q"] if "down q" in parts.values() else [])} if parts else set()


def with_latents(weights: Mapping[str, Array], parts: Mapping[str, str]) -> dict[str, Array]:
    """The same weights with products of new matrices, and these by their parts and letters."""
    rng, found = np.random.default_rng(2), dict(weights)
    for letter in sorted(letters_made(parts)):
        rows, columns = weights[f"W_{letter}"].shape
        side = "q" if letter == "q" else "kv"
        if f"down {side}" not in found:
            found[f"down {side}"] = _rounded(rng.uniform(-0.9, 0.9, (rows, RANK)), weights)
        found[f"up {letter}"] = _rounded(rng.uniform(-0.9, 0.9, (RANK, columns)), weights)
        found[f"W_{letter}"] = found[f"down {side}"] @ found[f"up {letter}"]
    return found


def _rounded(drawn: Array, weights: Mapping[str, Array]) -> Array:
    """As many digits as the other weights have."""
    narrow = all((one == one.astype(np.float32)).all() for one in weights.values())
    return drawn.astype(np.float32).astype(float) if narrow else drawn

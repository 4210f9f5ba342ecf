"""Functions of arrays, made of functions that project what attention returns and add an input to
it, with the matrix, its bias and that input as arguments.

Each gets numbers, and what they do is taken back. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.packing import KV, QKV, Alternative, Packing
from regard.diagnosis.forms.tree_code import projection
from regard.diagnosis.reading.parameter_names import is_upstream, plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter, text_of

RESIDUAL = re.compile("residual|shortcut|skip|identity|res")
OUT_FIRST = re.compile(r"\(out\w*, *in\w*\)|\.m?T\b|F\.linear|\.t\(\)|transpose\(")


def with_projection_after(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function without its last projection and the input that it adds, if it asks for these."""
    found = {_part(one): one for one in parameters if one.required and _part(one)}
    names = [one.name for one in parameters if one.required]
    packed = next((name for name in names if QKV.match(plain(name))), "")
    queries = packed or next((name for name in names if role_of(name) == "query"), "")
    projects = any((role_of(name) or projection(name)) in PROJECTIONS for name in names)
    is_fused = packed or any(KV.match(plain(name)) for name in names)
    keys = is_fused or any(role_of(name) in ("key", "key_t") for name in names)
    is_backward = any(is_upstream(name) for name in names)
    if (
        is_backward
        or not found
        or projects
        or not (queries and keys)
        or ("bias" in found and len(found) == 1)
    ):
        return None
    turned = _is_turned(function, found)
    state: dict[str, Any] = {}

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        like = given[queries]
        width = int(like.shape[-1]) // (3 if packed else 1)
        rng = np.random.default_rng(17)
        shapes = {"matrix": (width, width), "bias": (width,), "added": (*like.shape[:-1], width)}
        drawn = {part: rng.uniform(-0.9, 0.9, shapes[part]) for part in ("matrix", "bias", "added")}
        drawn["matrix"] += 2 * np.eye(width)
        state.update({part: like_another(drawn[part], like) for part in found})
        inverse = np.linalg.inv(drawn["matrix"].T if turned else drawn["matrix"])
        state["inverse"] = like_another(inverse, like)
        return given | {one.name: state[part] for part, one in found.items()}

    def unpack(result: Any) -> Any:
        out, *more = result if isinstance(result, tuple) else (result,)
        for part in ("added", "bias"):
            out = out - state[part] if part in found else out
        out = out @ state["inverse"] if "matrix" in found else out
        return (out, *more) if more else out

    rest = [replace(one, keyword=True) for one in parameters if one not in found.values()]
    return Packing(function, pack, unpack), rest


def _part(one: Parameter) -> str:
    """What an argument is for: the matrix after attention, its bias, or what is added."""
    if RESIDUAL.fullmatch(plain(one.name)):
        return "added"
    if plain(one.name) in ("o", "out", "output"):  # what attention has returned
        return ""
    return {"W_o": "matrix", "b_o": "bias"}.get(projection(one.name), "")


def _is_turned(function: Callable[..., Any], found: Mapping[str, Parameter]) -> bool:
    """Whether the matrix is (out, in), as its text says, or else its code."""
    if "matrix" not in found:
        return False
    text, name = text_of(function), re.escape(found["matrix"].name)
    if re.search(rf"\b{name}\b[^\n]{{0,40}}\(in\w*, *out", text):
        return False
    near = re.findall(rf"[^\n]{{0,24}}\b{name}\b[^\n]{{0,30}}", text)
    return any(OUT_FIRST.search(one) for one in near)


def like_another(drawn: Any, like: Any) -> Any:
    """The numbers in the library and the type of another argument."""
    if hasattr(like, "new_tensor"):
        return like.new_tensor(drawn)
    if hasattr(like, "at"):
        import jax.numpy as jnp

        return jnp.asarray(drawn, like.dtype)
    return drawn.astype(like.dtype)

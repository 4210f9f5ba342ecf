"""Attention of two streams of tokens together, each with weights of its own, as attention of one.

As text and image in SD3 and Flux: queries, keys and values of both are put together, and the output
is split again. Both get the same weights, so that the tokens of both are those of one text. Must
not know any probe, and of mistakes nothing but a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.forms.source import code_called, code_of
from regard.diagnosis.forms.weights import role_of_path
from regard.diagnosis.reading.parameter_names import fused_order, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter

FAULT = "streams_split_in_another_order"
# Words in names that say to which stream something belongs.
STREAM = re.compile(
    r"(?<![a-zA-Z])(img|images?|imgs|txt|texts?|add(ed)?|context|ctx|cond|enc|encoder|vis|visual|vision|"
    r"lang|language|audio|video|vid|latents?|tokens?|prompt|caption|cap|words?|pixels?|speech|"
    r"motion|action|state|[abcxyzs]|\d+)(?![a-zA-Z])",
    re.IGNORECASE,
)
PUT_TOGETHER = re.compile(r"\b(?:cat|concat|concatenate)\(\s*[\[(]([^\])]*)|\bh?stack\(")
RETURNS_TWO = re.compile(r"\breturn [^\n]*,")


class OfOneText:
    """What is called with two streams, as a function of the tokens of both, one after the other.

    `__wrapped__` is what is called. With a fault the output is read as it was split by mistake.
    """

    def __init__(
        self, called: Callable[..., Any], names: tuple[str, str], *, turned: bool, fault: str
    ) -> None:
        self.__wrapped__ = called
        self.__name__ = getattr(called, "__name__", type(called).__name__)
        self._names, self._turned, self.fault = names, turned, fault

    def __call__(self, **given: Any) -> Any:
        """The output of each token."""
        rows = given.pop(self._names[0])
        length = rows.shape[-2]
        if length < 2:
            raise ValueError("two streams have at least two tokens")
        first = (length + 1) // 3
        parts = [rows[..., :first, :], rows[..., first:, :]]
        names = self._names[::-1] if self._turned else self._names
        result = self.__wrapped__(**given, **dict(zip(names, parts, strict=True)))
        if not isinstance(result, tuple | list) or len(result) < 2:
            raise ValueError("it returns no output of each stream")
        one, other = result[:2][::-1] if self._turned else result[:2]
        if self.fault:  # the second stream was split off at the front
            return _joined(other, one)
        if one.shape[-2] != first or other.shape[-2] != length - first:
            raise ValueError("its outputs are not as long as its streams")
        return _joined(one, other)


def _joined(one: Any, other: Any) -> Any:
    """One array after the other along the tokens, in their own library."""
    if hasattr(one, "new_zeros"):
        import torch

        return torch.cat((one, other), dim=-2)
    if hasattr(one, "at"):
        import jax.numpy as jnp

        return jnp.concatenate((one, other), axis=-2)
    return np.concatenate((one, other), axis=-2)


def _bare(name: str) -> str:
    """A name without the words that say to which stream something belongs.

    >>> _bare("img_attn.qkv"), _bare("w_q_txt"), _bare("to_add_out"), _bare("qkv.1")
    ('attn.qkv', 'w_q', 'to_out', 'qkv')
    """
    parts = (
        "_".join(word for word in part.split("_") if not STREAM.fullmatch(word))
        for part in name.split(".")
    )
    return ".".join(part for part in parts if part)


def _key(name: str) -> tuple[str, str]:
    """What two arrays of the same use in both streams have in common: a role, or a bare name."""
    held, _, last = name.rpartition(".")
    kind = last if last in ("weight", "bias", "kernel", "b", "w") and held else ""
    bare = _bare(held if kind else name)
    own = bare.rpartition(".")[2]
    role = role_of_path(bare) or bare
    role = role if role[:2] in ("W_", "b_") or not fused_order(own) else own
    return role, "b" if kind in ("bias", "b") else ""


def _arrays(thing: Any) -> dict[str, tuple[Any, Any]]:
    """The weights of an object by path: what holds each, and under which key."""
    if hasattr(thing, "named_parameters"):
        return {name: (one, None) for name, one in thing.named_parameters()}
    found = dict[str, tuple[Any, Any]]()
    for name, value in vars(thing).items():
        if _is_float(value):
            found[name] = vars(thing), name
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for own, array in inner.items() if not hasattr(value, "shape") else ():
            if _is_float(array):
                found[f"{name}.{own}"] = inner, own
    return found


def _is_float(value: Any) -> bool:
    return hasattr(value, "shape") and str(getattr(value, "dtype", ""))[:5] == "float"


def with_equal_weights(thing: Any) -> SimpleNamespace | None:
    """Give both streams of an object the same weights, in place; those of one, by their roles.

    None if its weights are no pairs.
    """
    twins = dict[tuple[str, str], list[tuple[Any, Any]]]()
    for name, place in _arrays(thing).items():
        twins.setdefault(_key(name), []).append(place)
    roles = {role for role, _ in twins}
    whole = any(len(fused_order(role)) == 3 for role in roles)
    if not whole and not {*PROJECTIONS} <= {*roles, *("W_k", "W_v") * any(map(_is_kv, roles))}:
        return None
    own = SimpleNamespace()
    for (role, kind), places in twins.items():
        values = [one if key is None else one[key] for one, key in places]
        if len(values) == 1 and values[0].ndim < 2:  # both have it already, as a norm's scale
            continue
        if len(values) != 2 or values[0].shape != values[1].shape:
            return None
        first = values[0]
        for holder, key in places[1:]:
            if key is None:
                holder.data.copy_(first.data)
            else:
                holder[key] = first
        is_layer = hasattr(first, "detach")
        array = np.asarray(first.detach().numpy() if is_layer else first)
        name = role.replace("W_", "b_") if kind and role[:2] == "W_" else f"{role}{kind and '_b'}"
        setattr(own, name, np.ascontiguousarray(array.T) if is_layer else array)
    return own


def _is_kv(role: str) -> bool:
    return fused_order(role) == "kv"


def names_of_streams(parameters: Sequence[Parameter], text: str) -> tuple[str, str] | None:
    """The arguments of two streams whose queries, keys and values the code puts together."""
    needed = [one.name for one in parameters if one.required]
    if len(needed) != 2 or needed[0] != parameters[0].name or not RETURNS_TWO.search(text):
        return None
    if len(PUT_TOGETHER.findall(text)) < 2 and not re.search(r"cat\w*\([^\n]* for ", text):
        return None
    return needed[0], needed[1]


def _turned(names: tuple[str, str], text: str) -> bool:
    """Whether the tokens of the second stream come first where both are put together."""
    together = PUT_TOGETHER.search(text)
    parts = (together[1] or "").split(",") if together else []
    words = [{*re.findall("[a-z]+", one.lower())} for one in names]
    own = {*re.findall("[a-z]+", parts[0].lower())} if parts else set()
    return bool(own & words[1] - words[0])


def of_joint_streams(
    called: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> Iterator[tuple[OfOneText, list[Parameter]]]:
    """What is called as functions of one text, the right one first; none if it is none of these."""
    names = names_of_streams(parameters, text)
    if names is None:
        return
    known = [
        replace(one, role="x" if one.name == names[0] else one.role, keyword=True)
        for one in parameters
        if one.name != names[1]
    ]
    for one in _of_one_text(called, names, text):
        yield one, known


def _of_one_text(
    called: Callable[..., Any], names: tuple[str, str], text: str
) -> Iterator[OfOneText]:
    """The ways to read the output: as it should be, and as either order would have it."""
    turned = _turned(names, text)
    for own, fault in ((turned, ""), (turned, FAULT), (not turned, FAULT)):
        yield OfOneText(called, names, turned=own, fault=fault)


def with_joint_streams(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> list[Alternative]:
    """A function of two streams and the weights of each, as functions of one text and weights."""
    text = f"{code_of(function)}\n{code_called(function)}"
    required = [one for one in parameters if one.required and role_of(one.name) != "heads"]
    groups = dict[str, list[Parameter]]()
    for one in required:
        groups.setdefault(_bare(one.name), []).append(one)
    pairs = [*groups.values()]
    if len(pairs) < 2 or any(len(own) != 2 for own in pairs):
        return []
    first, *others = pairs
    twins = {own[0].name: own[1].name for own in others}

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        return given | {twin: given[name] for name, twin in twins.items() if name in given}

    roles = {own[0].name: role_of(_bare(own[0].name)) for own in others}
    known = [
        replace(one, role=roles.get(one.name) or one.role, keyword=True)
        for one in parameters
        if one.name not in twins.values()
    ]
    packed = Packing(function, pack)
    asked = [replace(one, required=one in first) for one in parameters]
    names = names_of_streams([one for one in asked if one.required], text)
    if names is None:
        return []
    kept = [
        replace(one, role="x" if one.name == names[0] else one.role)
        for one in known
        if one.name != names[1]
    ]
    return [(one, kept) for one in _of_one_text(packed, names, text)]

"""What the parameters of a function mean: the role of each, from its name.

Owns the names that people give them. Must not call the function, nor know any probe.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.boundary.arrays import Array
from regard.errors import OptionError, safe_text

# Role -> names of parameters that have it, in lower case without underscores.
NAMES = {
    "query": "q query queries querys xq qs qin",
    "key": "k key keys xk ks kin",
    "value": "v value values val vals xv vs vin",
    "x": "x xs input inputs hiddenstates hidden embeddings embedding tokens sequence src emb",
    "context": "context memory encoderhiddenstates kv encoderoutput y",
    "mask": "mask attnmask attentionmask m masks causalmask",
    "key_mask": "keypaddingmask paddingmask padmask keymask padding",
    "keep": "keep attend visible keepmask allowed attendmask",
    "hide": "hide ignore hidemask ignoremask blocked forbidden",
    "bias": "bias attnbias attentionbias additivemask scorebias",
    "causal": "causal iscausal usecausalmask autoregressive masked usecausal",
    "scale": "scale scaling scalefactor smscale softmaxscale",
    "heads": "h heads numheads nheads nhead numberofheads headcount nh numhead",
    "width": "dk d dim dhead headdim dimk width headsize",
    "window": "window windowsize slidingwindow localwindow attentionwindow",
    "cache": "cache kvcache past pastkv pastkeyvalue pastkeyvalues layerpast state",
    "no": "dropout dropoutp pdropout dropoutrate pdrop training train istraining",
    "yes": "deterministic needweights returnweights returnattention returnattn outputattentions",
    "grouped": "enablegqa gqa",
}
for _part in "qkvo":
    _word = {"q": "query", "k": "key", "v": "value", "o": "output"}[_part]
    NAMES[f"W_{_part}"] = " ".join(
        f"w{name} {name}weight {name}weights weight{name} weights{name} {name}proj {name}w "
        f"{name}projection {name}matrix {name}linear proj{name} fc{name} linear{name} lin{name} "
        f"{name}lin to{name}"
        for name in (_part, _word, *(("out", "0", "project") if _part == "o" else ()))
    )
    NAMES[f"b_{_part}"] = " ".join(
        f"b{name} {name}bias bias{name}"
        for name in (_part, _word, *(("out",) if _part == "o" else ()))
    )
_ROLE_OF = {name: role for role, names in NAMES.items() for name in names.split()}
# Every role that a user may state.
ROLES = {*NAMES, "keep01", "hide01", "add"}
ARRAYS = ("query", "key", "value")
PROJECTIONS = ("W_q", "W_k", "W_v")


@dataclass(frozen=True)
class Parameter:
    """One parameter: its role, and whether it is passed by keyword."""

    name: str
    role: str | None
    required: bool = True
    keyword: bool = False
    default: Any = None


@dataclass(frozen=True, eq=False)
class Callee:
    """What is known of a function without calling it."""

    name: str
    parameters: tuple[Parameter, ...]
    framework: str = "numpy"
    weights: Mapping[str, Array] = field(default_factory=dict)  # used as x @ W
    heads: int | None = None

    @property
    def roles(self) -> dict[str, Parameter]:
        """The parameters by their roles."""
        return {parameter.role: parameter for parameter in self.parameters if parameter.role}

    @property
    def kind(self) -> str:
        """arrays, packed (heads side by side), projected (with weights), or self (X alone)."""
        roles = self.roles
        if self.weights or set(PROJECTIONS) <= roles.keys():
            return "projected"
        if "x" in roles and "query" not in roles:
            return "self"
        return "packed" if "heads" in roles else "arrays"


def parameters_of(
    function: Callable[..., Any], roles: Mapping[str, str] | None
) -> tuple[Parameter, ...]:
    """The parameters with roles as stated or by name; an OptionError if one stays unknown."""
    return with_roles(_parameters(function), dict(roles or {}))


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    kinds = inspect.Parameter
    if [one.kind for one in found] == [kinds.VAR_POSITIONAL]:
        return [Parameter(name, None) for name in ARRAYS]
    parameters = []
    for one in found:
        if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            required = one.default is one.empty
            keyword = one.kind is kinds.KEYWORD_ONLY
            keyword |= not required and one.kind is not kinds.POSITIONAL_ONLY
            default = None if required else one.default
            parameters.append(Parameter(one.name, None, required, keyword, default))
    return parameters


def _documented(function: Any) -> list[Parameter]:
    """The signature of a native function, from the first line of its documentation."""
    text = str(getattr(function, "__doc__", "") or "")
    match = re.match(r"\s*\w+\((.*?)\)\s*->", text, re.DOTALL)
    if match is None:
        return [Parameter(name, None) for name in ARRAYS]
    parts = [part.partition("=") for part in match[1].replace("*,", "").split(",")]
    return [
        Parameter(name.split(":")[0].strip(), None, not equals, bool(equals))
        for name, equals, _ in parts
        if name.strip().isidentifier()
    ]


def with_roles(parameters: list[Parameter], stated: dict[str, str]) -> tuple[Parameter, ...]:
    """Each parameter with its role: as stated, by its name, or by its position."""
    for name, role in stated.items():
        if role not in ROLES:
            raise OptionError(
                f"signature says {safe_text(name, 40)} is {safe_text(role, 40)}; it must be one of "
                f"{', '.join(sorted(ROLES))}"
            )
        if name not in {parameter.name for parameter in parameters}:
            raise OptionError(f"signature names {safe_text(name, 40)}, which is not a parameter")
    found = [replace(one, role=stated.get(one.name) or _role_by_name(one)) for one in parameters]
    required = [n for n, parameter in enumerate(found) if parameter.required]
    if not stated and not _takes_queries(found):
        # Names that say nothing: query, key, value and a mask in their usual order, or X alone.
        by_position = {1: ("x",), 3: ARRAYS, 4: (*ARRAYS, "mask")}.get(len(required), ())
        for n, role in zip(required, by_position, strict=False):
            found[n] = replace(found[n], role=role)
    for parameter in found:
        if parameter.required and parameter.role is None:
            name = safe_text(parameter.name, 40)
            raise OptionError(
                f"the role of parameter {name} is not known; state it with signature, such as "
                f"{name}=query; it must be one of {', '.join(sorted(ROLES))}"
            )
    if not _takes_queries(found):
        raise OptionError(
            "no parameter takes the queries; state which one with signature, such as x=query"
        )
    return tuple(found)


def _takes_queries(parameters: list[Parameter]) -> bool:
    return any(parameter.role in ("x", "query") for parameter in parameters)


def _role_by_name(parameter: Parameter) -> str | None:
    role = role_of(parameter.name)
    if role in ("scale", "window", "cache") and isinstance(parameter.default, bool):
        return None  # a switch: whether to scale, not by how much
    if role == "width" and not parameter.required:
        return None  # dim=-1 is an axis
    return role


def role_of(name: str) -> str | None:
    """The role that people mean by a name, or None."""
    return _ROLE_OF.get(plain(name))


def plain(name: str) -> str:
    """A name in lower case without underscores."""
    return name.lower().replace("_", "")

"""What the parameters of somebody's attention mean, and which weights an object carries.

Owns the names that people use. Must not call the function, nor know any probe.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Role -> how it is called, without case and underscores. The role is what we hand over.
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
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
# Only on an object: a layer that is called `query` is its weight.
LAYERS = {
    "query": "W_q",
    "queries": "W_q",
    "q": "W_q",
    "key": "W_k",
    "keys": "W_k",
    "k": "W_k",
    "value": "W_v",
    "values": "W_v",
    "v": "W_v",
    "out": "W_o",
    "o": "W_o",
    "output": "W_o",
    "proj": "W_o",
    "cproj": "W_o",
    "outproj": "W_o",
    "toout": "W_o",
    "fcout": "W_o",
    "dense": "W_o",
    "unifyheads": "W_o",
}
PACKED = ("inproj", "cattn", "qkv", "qkvproj", "toqkv", "wqkv", "queryvaluekey")
ARRAYS, WEIGHTS = ("query", "key", "value"), ("W_q", "W_k", "W_v")


@dataclass(frozen=True)
class Parameter:
    """One parameter, what it is for, and whether a call hands it over by its name."""

    name: str
    role: str | None
    required: bool = True
    keyword: bool = False
    default: Any = None


@dataclass(frozen=True, eq=False)
class Subject:
    """All that could be read off a function without calling it."""

    name: str
    parameters: tuple[Parameter, ...]
    framework: str = "numpy"
    weights: Mapping[str, Array] = field(default_factory=dict)  # as x @ W
    heads: int | None = None

    @property
    def roles(self) -> dict[str, Parameter]:
        """The parameters that have a role, by it."""
        return {parameter.role: parameter for parameter in self.parameters if parameter.role}

    @property
    def kind(self) -> str:
        """arrays, packed (heads side by side), projected (with weights), or self (X alone)."""
        roles = self.roles
        if self.weights or set(WEIGHTS) <= roles.keys():
            return "projected"
        if "x" in roles and "query" not in roles:
            return "self"
        return "packed" if "heads" in roles else "arrays"


def read(
    function: Any, signature: Mapping[str, str] | None, heads: int | None
) -> tuple[Callable[..., Any], Subject]:
    """What is to be called, and all that can be known before the first call."""
    name = getattr(function, "__name__", type(function).__name__)
    name = safe_text(name, 60)
    framework = "numpy"
    weights: Mapping[str, Array] = {}
    if not callable(function):
        raise OptionError(
            f"diagnose needs a function, or an object that can be called, not "
            f"{safe_text(repr(function), 60)}"
        )
    if _is_torch_module(function) or _is_module_class(function):
        function = _own_module(function, heads)
        framework, name = "torch", type(function).__name__
        weights = torch_weights(function)
        if not weights and next(function.parameters(), None) is not None:
            raise OptionError(
                f"the weights of {type(function).__name__} are not where they can be recognised; "
                "layers called W_q, W_k, W_v (or query, q_proj, to_q, qkv, …) and W_o are, or give "
                "a function of embeddings and weights"
            )
        heads = heads or _head_count(function)
        called: Any = function.forward
    elif inspect.isclass(function):
        raise OptionError(
            f"{name} is a class; diagnose needs one of its objects, with weights in it"
        )
    else:
        called = function
        framework = _framework_of(function)
        if not inspect.isroutine(function):
            weights = array_weights(function)
            heads = heads or _head_count(function)
    parameters = _with_roles(_parameters(called), signature)
    return function, Subject(name, parameters, framework, weights, heads)


def _is_torch_module(function: Any) -> bool:
    return any(base.__module__.startswith("torch.nn") for base in type(function).__mro__)


def _is_module_class(function: Any) -> bool:
    return inspect.isclass(function) and any(
        base.__module__.startswith("torch.nn") for base in function.__mro__
    )


def _own_module(module: Any, heads: int | None) -> Any:
    """A copy with weights of our own, in float64, without dropout: the user's is left alone."""
    import copy

    import torch

    if inspect.isclass(module):
        module = _constructed(module, heads)
    own = copy.deepcopy(module).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.uniform_(-0.9, 0.9, generator=generator)
    return own


def _constructed(module: Any, heads: int | None) -> Any:
    """An object of a Module class: widths 6, two heads, no dropout, by the names of arguments."""
    count = heads or 2
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(module).parameters.values():
        name = _plain(parameter.name)
        if name in ("dropout", "dropoutp", "attndropout", "dropoutrate", "pdrop"):
            arguments[parameter.name] = 0.0
        elif ROLES.get(name) == "heads":
            arguments[parameter.name] = count
        elif parameter.default is not parameter.empty:
            continue
        elif re.search(r"len|block|context|max|seq", name):
            arguments[parameter.name] = 16
        elif name.startswith(("d", "emb", "in", "out", "hid", "dim", "model", "width")):
            arguments[parameter.name] = 6
        else:
            raise OptionError(
                f"{module.__name__} needs {safe_text(parameter.name, 40)}; give an object of it"
            )
    return module(**arguments)


def _head_count(thing: Any) -> int | None:
    for name, value in _attributes(thing):
        if ROLES.get(_plain(name)) == "heads" and isinstance(value, int) and value > 0:
            return value
    return None


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(thing, "__dict__", {})
    yield from own.items()
    yield from own.get("_modules", {}).items()
    yield from own.get("_parameters", {}).items()


def torch_weights(module: Any) -> dict[str, Array]:
    """The projections of a module as x @ W, by the names of its layers or parameters."""
    found: dict[str, Array] = {}
    for name, thing in _attributes(module):
        plain = _plain(name)
        role = LAYERS.get(plain) or ROLES.get(plain)
        thing = _only_layer(thing)
        if hasattr(thing, "weight") and hasattr(thing.weight, "detach"):  # a Linear layer
            weight = thing.weight.detach().numpy()
            if weight.ndim != 2:
                continue
            weight = weight if type(thing).__name__ == "Conv1D" else weight.T
            bias = getattr(thing, "bias", None)
            bias = None if bias is None else bias.detach().numpy()
            if plain in PACKED:
                _unpack(found, weight, bias)
            elif role in ("W_q", "W_k", "W_v", "W_o"):
                found[role] = weight
                if bias is not None:
                    found[role.replace("W", "b")] = bias
        elif hasattr(thing, "detach"):
            array = thing.detach().numpy()
            if plain == "inprojweight":
                _unpack(found, array.T, None)
            elif plain == "inprojbias":
                found |= dict(zip(("b_q", "b_k", "b_v"), np.split(array, 3), strict=True))
            elif role and role[:2] in ("W_", "b_"):
                found[role] = array
    return found if set(WEIGHTS) <= found.keys() else {}


def _only_layer(thing: Any) -> Any:
    """The one layer with a weight in a sequence of layers; anything else is itself."""
    if hasattr(thing, "weight") or type(thing).__name__ != "Sequential":
        return thing
    own = [layer for layer in thing if hasattr(layer, "weight")]
    return own[0] if len(own) == 1 else thing


def _unpack(found: dict[str, Array], weight: Array, bias: Array | None) -> None:
    if weight.shape[1] % 3:
        return
    found |= dict(zip(WEIGHTS, np.split(weight, 3, axis=1), strict=True))
    if bias is not None:
        found |= dict(zip(("b_q", "b_k", "b_v"), np.split(bias, 3), strict=True))


def array_weights(thing: Any) -> dict[str, Array]:
    """The projections that an object carries as arrays: x @ W."""
    found = {}
    for name, value in _attributes(thing):
        role = ROLES.get(_plain(name)) or ""
        if role[:2] in ("W_", "b_") and isinstance(value, np.ndarray):
            found[role] = value
    return found if set(WEIGHTS) <= found.keys() else {}


def _framework_of(function: Any) -> str:
    """Which library's arrays it works on: the one that its code uses."""
    inner = inspect.unwrap(function)
    if not inspect.isfunction(inner):
        home = str(getattr(inner, "__module__", None) or type(inner).__module__)
        if home.partition(".")[0] in ("torch", "jax", "jaxlib"):
            return home.partition(".")[0].removesuffix("lib")
        inner = inspect.getattr_static(type(inner), "__call__", None)
    if not inspect.isfunction(inner):
        return "numpy"
    if (inner.__module__ or "").partition(".")[0] in ("torch", "jax"):
        return inner.__module__.partition(".")[0]
    used = inspect.getclosurevars(inner)
    of_code = _libraries([*used.nonlocals.values(), *used.globals.values()])
    of_module = _libraries(inner.__globals__.values())
    for libraries in (of_code, of_module):
        for framework in ("torch", "jax"):
            if framework in libraries and "numpy" not in libraries:
                return framework
    return next((name for name in ("torch", "jax") if name in of_code), "numpy")


def _libraries(things: Iterable[Any]) -> set[str]:
    """The packages that modules, functions and classes come from."""
    homes = (
        thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
        for thing in things
    )
    return {str(home).partition(".")[0] for home in homes}


def _parameters(function: Any) -> list[Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    kinds = inspect.Parameter
    if [one.kind for one in found] == [kinds.VAR_POSITIONAL]:
        return [Parameter(name, None) for name in ARRAYS]
    parameters = []
    for one in found:
        if one.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            continue
        required = one.default is one.empty
        named = one.kind is kinds.KEYWORD_ONLY
        named |= not required and one.kind is not kinds.POSITIONAL_ONLY
        parameters.append(
            Parameter(one.name, None, required, named, None if required else one.default)
        )
    return parameters


def _documented(function: Any) -> list[Parameter]:
    """A function in native code says its signature in the first line of its documentation."""
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


def _with_roles(
    parameters: list[Parameter], signature: Mapping[str, str] | None
) -> tuple[Parameter, ...]:
    """Each parameter with its role: as told, by its name, or by its place."""
    given = dict(signature or {})
    known = set(NAMES) | {"keep01", "hide01", "add"}
    for name, role in given.items():
        if role not in known:
            raise OptionError(
                f"signature says {safe_text(name, 40)} is {safe_text(role, 40)}; it must be one of "
                f"{', '.join(sorted(known))}"
            )
        if name not in {parameter.name for parameter in parameters}:
            raise OptionError(f"signature names {safe_text(name, 40)}, which is no parameter")
    out = []
    for parameter in parameters:
        meant = given.get(parameter.name) or _role_by_name(parameter)
        out.append(replace(parameter, role=meant))
    roles = {parameter.role for parameter in out}
    required = [n for n, parameter in enumerate(out) if parameter.required]
    if not roles & {"x", "query"} and not given and len(required) in (3, 4):
        # Three arrays without names that say anything: query, key and value in their usual order.
        for n, role in zip(required, (*ARRAYS, "mask"), strict=False):
            out[n] = replace(out[n], role=role)
    elif not roles & {"x", "query"} and not given and len(required) == 1:
        out[required[0]] = replace(out[required[0]], role="x")
    for parameter in out:
        if parameter.required and parameter.role is None:
            name = safe_text(parameter.name, 40)
            raise OptionError(
                f"what is its parameter {name}? Say so with signature, such as {name}=query; known "
                f"are {', '.join(sorted(NAMES))}"
            )
    if not {parameter.role for parameter in out} & {"x", "query"}:
        raise OptionError("no parameter takes the queries; say which one with signature")
    return tuple(out)


def _role_by_name(parameter: Parameter) -> str | None:
    role = ROLES.get(_plain(parameter.name))
    if role in ("scale", "window", "cache") and isinstance(parameter.default, bool):
        return None  # whether to scale, not by how much
    if role == "width" and not parameter.required:
        return None  # dim=-1 is an axis
    return role


def _plain(name: str) -> str:
    return name.lower().replace("_", "")

"""Functions and objects: what is called, in which library, and with which weights.

Owns the names of layers that hold weights. Must not call the function, nor know any probe.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.differentiation import (
    Applied,
    Pair,
    is_autograd_function,
    pair_of,
    returned_gradients,
)
from regard.diagnosis.signature import PROJECTIONS, Callee, parameters_of, plain, role_of
from regard.errors import OptionError, ProblemError, safe_text
from regard.problems.checks import weight_sizes

# Layers that hold a weight under a name that would mean an array as a parameter.
LAYERS = {
    **dict.fromkeys(("query", "queries", "q"), "W_q"),
    **dict.fromkeys(("key", "keys", "k"), "W_k"),
    **dict.fromkeys(("value", "values", "v"), "W_v"),
    **dict.fromkeys(("out", "o", "output", "proj", "cproj", "outproj", "toout", "fcout"), "W_o"),
    **dict.fromkeys(("dense", "unifyheads"), "W_o"),
}
# Layers that hold W_q, W_k and W_v side by side.
PACKED = ("inproj", "cattn", "qkv", "qkvproj", "toqkv", "wqkv", "queryvaluekey")
BIASES = ("b_q", "b_k", "b_v")


# Where an object that is made here keeps what it was made with.
_MADE = "regard_made_with"
LIBRARIES = ("numpy", "torch", "jax")


def inspect_function(
    function: Any, roles: Mapping[str, str] | None, heads: int | None, library: str | None
) -> list[tuple[Callable[..., Any], Callee]]:
    """What to call, and what is known of it before the first call, or an OptionError.

    Every reading of the function, the likeliest first.
    """
    if (pair := pair_of(function)) is not None:
        function = pair
    elif is_autograd_function(function):
        function = Applied(function)
    name = safe_text(getattr(function, "__name__", type(function).__name__), 60)
    framework = "numpy"
    weights: Mapping[str, Array] = {}
    if not callable(function):
        raise OptionError(
            f"diagnose needs a function, or an object that can be called, not "
            f"{safe_text(repr(function), 60)}"
        )
    if _is_module(function if inspect.isclass(function) else type(function)):
        function = _own_module(function, heads)
        framework, name = "torch", type(function).__name__
        weights = torch_weights(function)
        if not weights and next(function.parameters(), None) is not None:
            raise OptionError(
                f"the weights of {name} cannot be recognised; call the layers W_q, W_k, W_v (or "
                "query, q_proj, to_q, qkv, …) and W_o, or give a function of embeddings and weights"
            )
        heads = heads or _head_count(function)
        called: Any = function.forward
    elif inspect.isclass(function):
        raise OptionError(
            f"{name} is a class; diagnose needs one of its objects, with weights in it"
        )
    else:
        called, holder = function, function
        framework = _framework_of(function)
        if isinstance(function, Pair):
            called, holder, name = function.forward, function.holder, safe_text(function.name, 60)
            framework = _framework_of(called)
        elif isinstance(function, Applied):
            framework = library = "torch"
        if not inspect.isroutine(holder):
            weights = array_weights(holder)
            heads = heads or _head_count(holder)
    framework = library or framework
    others = [] if library or framework != _framework_of(called) else _other_libraries(called)
    readings = parameters_of(called, roles)
    written = function.backward if isinstance(function, Pair) else function
    of_gradients = isinstance(function, Pair) or any(one.role == "d_output" for one in readings[0])
    returns = returned_gradients(written) if of_gradients else ()
    paired, made = isinstance(function, Pair), str(getattr(function, _MADE, ""))
    return [
        (function, Callee(name, parameters, one, weights, heads, number, returns, paired, made))
        for number, (one, parameters) in enumerate(
            itertools.product((framework, *others), readings)
        )
    ]


def _other_libraries(function: Any) -> list[str]:
    """The libraries besides the likeliest that a function may work on: what is loaded, or NumPy."""
    first = _framework_of(function)
    return [name for name in LIBRARIES if name != first and name in sys.modules]


def _is_module(kind: type) -> bool:
    return any(base.__module__.startswith("torch.nn") for base in kind.__mro__)


def _own_module(module: Any, heads: int | None) -> Any:
    """A copy in float64 without dropout, with random weights; the user's is not changed."""
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
    """An object of a Module class: widths of 6, two heads unless stated, no dropout."""
    count = heads or 2
    arguments: dict[str, Any] = {}
    for parameter in inspect.signature(module).parameters.values():
        name = plain(parameter.name)
        if name in ("dropout", "dropoutp", "attndropout", "dropoutrate", "pdrop"):
            arguments[parameter.name] = 0.0
        elif role_of(name) == "heads":
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
    made = module(**arguments)
    setattr(made, _MADE, ", ".join(f"{name}={value!r}" for name, value in arguments.items()))
    return made


def _head_count(thing: Any) -> int | None:
    numbers = (value for name, value in _attributes(thing) if role_of(name) == "heads")
    return next((n for n in numbers if isinstance(n, int) and n > 0), None)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(thing, "__dict__", {})
    yield from own.items()
    yield from own.get("_modules", {}).items()
    yield from own.get("_parameters", {}).items()


def torch_weights(module: Any) -> dict[str, Array]:
    """The projections of a module as x @ W, by the names of its layers or parameters."""
    found: dict[str, Array] = {}
    for attribute, thing in _attributes(module):
        name = plain(attribute)
        role = LAYERS.get(name) or role_of(name) or ""
        thing = _only_layer(thing)
        if hasattr(thing, "weight") and hasattr(thing.weight, "detach"):  # a Linear layer
            weight = thing.weight.detach().numpy()
            if weight.ndim != 2:
                continue
            weight = weight if type(thing).__name__ == "Conv1D" else weight.T
            bias = getattr(thing, "bias", None)
            arrays = [weight] if bias is None else [weight, bias.detach().numpy()]
            if name in PACKED:
                for names, array in zip((PROJECTIONS, BIASES), arrays, strict=False):
                    found |= _unpacked(names, array)
            elif role.startswith("W_"):
                found |= zip((role, role.replace("W", "b")), arrays, strict=False)
        elif hasattr(thing, "detach"):
            array = thing.detach().numpy()
            if name == "inprojweight":
                found |= _unpacked(PROJECTIONS, array.T)
            elif name == "inprojbias":
                found |= _unpacked(BIASES, array)
            elif role[:2] in ("W_", "b_"):
                found[role] = array
    return _if_complete(found)


def array_weights(thing: Any) -> dict[str, Array]:
    """The projections that an object carries as arrays: x @ W."""
    found = {}
    for name, value in _attributes(thing):
        role = role_of(name) or ""
        if role[:2] in ("W_", "b_") and isinstance(value, np.ndarray):
            found[role] = value
    return _if_complete(found)


def _if_complete(found: dict[str, Array]) -> dict[str, Array]:
    return found if set(PROJECTIONS) <= found.keys() else {}


def _only_layer(thing: Any) -> Any:
    """The one layer with a weight in a sequence of layers; anything else is itself."""
    if hasattr(thing, "weight") or type(thing).__name__ != "Sequential":
        return thing
    own = [layer for layer in thing if hasattr(layer, "weight")]
    return own[0] if len(own) == 1 else thing


def _unpacked(names: tuple[str, ...], packed: Array) -> dict[str, Array]:
    """The parts of an array that holds queries, keys and values side by side."""
    if packed.shape[-1] % 3:
        return {}
    return dict(zip(names, np.split(packed, 3, axis=-1), strict=True))


def key_heads(weights: Mapping[str, Array], heads: int) -> int:
    """How many heads the keys have; an OptionError if the weights do not fit together."""
    width, packed = (math.prod(weights[name].shape[-1:]) for name in ("W_q", "W_k"))
    groups = max(1, packed * heads // max(1, width))
    try:
        weight_sizes({**weights, "heads": heads, "key_heads": groups}, {"N": "M"})
    except ProblemError as error:
        raise OptionError("the weights do not fit together: ", *error.args) from None
    if heads % groups:
        raise OptionError(
            f"W_k has the columns of {groups} heads; {heads} heads must be a multiple of that"
        )
    return groups


def _framework_of(function: Any) -> str:
    """The library whose arrays a function works on: the one that its code uses."""
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

"""Making an object of a class: small sizes for the parameters of its constructor, by their names.

Must not know what the object computes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from regard.diagnosis.forms.neutral_parts import made_neutral, neutral_parts
from regard.diagnosis.forms.norms import NORM, without_norms
from regard.diagnosis.reading.constructor_arguments import (
    GRID,
    MODEL_NAMES,
    OF_PAIRS,
    OF_WINDOWS,
    PAIRED,
    PAIRS,
    Configuration,
    constructor_arguments,
    dtypes_asked,
    is_count,
    is_module,
    is_pair,
    like,
)
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import text_of
from regard.errors import OptionError, safe_text

# Where an object that is made here keeps what it was made with.
_MADE = "regard_made_with"
_HEADS = "regard_made_with_heads"
_IN_HALF = "regard_made_in_half"  # a tuple, which torch does not take for a part
# A single learned number that multiplies what attention returns; of others the module is kept.
GATE = re.compile(r"(gamma|gate|alpha|beta)$|(^|[._])(alpha|gate)_(\w*att\w*|dense|ff\w*|mlp)$")
# A learned factor of each feature of what attention returns, the same for all at first.
LAYER_SCALE = re.compile(r"(^|[._])(ls\d?|layer_?scale\w*|gamma_?\d?|lambda_?\d?)(\.\w+)?$")

# A learned factor of the scores; where each head has the same, all keep it.
SHARPNESS = re.compile(r"(scale|temperature|tau)$")
# A layer whose sigmoid multiplies it; with a large bias it multiplies by 1.
GATE_LAYER = re.compile("gat(e|ing)|g_proj$|linear_g$")
# Learned vectors of distances that are added to the values.
OF_VALUES = re.compile(
    r"(^|[._])(rel\w*_(v|values?|vals?)|(v|values?)_rel\w*|a_?v|rel\w*_(emb\w*|pos\w*|table)_v\w*)(\.|$)",
    re.IGNORECASE,
)
SHIFT = re.compile("shift(_?size)?")
SIDE = 4  # of a map of as many pixels as round probes have tokens
# Numbers of features whose softplus multiplies queries: 0 is a factor of 1, as in lingvo.
OF_FEATURES = re.compile(r"per_?dim(_?scale)?$", re.IGNORECASE)
# Tables of numbers that are added to scores by the places of pixels.
BY_PLACE = re.compile(r"table|rpb|(rel|relative)_|(pos|position)_bias|_rel$", re.IGNORECASE)
# Layers behind attention, whose output is added: without numbers they add nothing.
FEED_FORWARD = re.compile(r"(^|\.)(ff|ffn|mlp|feed_?forward|linear[12]|fc[12])$")

# The same as arrays of an object, whose code has an activation.
FEED_FORWARD_ARRAY = re.compile(
    r"^[wb]_?[123]$|(^|_)(ff|ffn|mlp|feed_?forward|fc_?[12]|up|down)(_|\d|$)|(^|_)(w|b)_?(up|down)$",
    re.IGNORECASE,
)
ACTIVATED = re.compile(r"relu|gelu|silu|swish|maximum\(|tanh\(", re.IGNORECASE)


def constructed(kind: Any, heads: int | None, fixed: Mapping[str, Any] | None = None) -> list[Any]:
    """Objects of a class, the one with sizes chosen here first; an OptionError if there is none.

    Arguments that are `fixed` are given as they are.
    """
    name = safe_text(getattr(kind, "__name__", "it"), 60)
    found, problem = list[Any](), ""
    for own_sizes in (True, False):
        try:
            arguments = constructor_arguments(kind, heads, own_sizes) | dict(fixed or {})
            made, *with_others = _made(kind, arguments)
            if own_sizes and (width := _width_of_heads(made, arguments)):
                arguments |= width
                made = kind(**arguments)
            if is_module(kind) and not all(own.numel() for own in made.parameters()):
                raise ValueError("a weight has no numbers")  # such as a width of dim // 8
            for own, given in ((made, arguments), *with_others):
                with contextlib.suppress(AttributeError):
                    counts = (value for name, value in given.items() if is_count(name, kind))
                    setattr(own, _HEADS, next(counts, None))
                    setattr(own, _IN_HALF, (*_in_half(kind, given),))
                    setattr(own, _MADE, ", ".join(f"{n}={_said(v)}" for n, v in given.items()))
                found.append(own)
            if OF_WINDOWS.search(text_of(kind)):  # by default a map of a probe may be one window
                break
        except OptionError as error:
            problem = problem or str(error)
        except Exception as error:
            text = safe_text(f"{type(error).__name__}: {error}", 160)
            problem = problem or f"{name} cannot be made: {text}; give an object of it"
    if not found:
        raise OptionError(problem)
    return found


def _said(value: Any) -> str:
    """An argument of a constructor as code; the shape of a weight."""
    return f"<{tuple(value.shape)}>" if hasattr(value, "shape") else repr(value)


def _made(kind: Any, arguments: dict[str, Any]) -> list[Any]:
    """An object of a class, with pairs for the sizes that are pairs to it.

    After it others with other pairs, each with its arguments.
    """
    sizes = [n for n, v in arguments.items() if is_pair(n, v)]
    try:
        made = kind(**arguments)
        if not sizes:
            return [made]
        problem: Exception = ValueError("no pair of sizes fits it")
    except TypeError as error:
        sizes = [n for n, v in arguments.items() if type(v) is int and PAIRED.search(plain(n))]
        if not sizes or not OF_PAIRS.search(str(error)):
            raise
        problem = error
    found = []
    for pair in PAIRS:
        with contextlib.suppress(Exception):
            own = arguments | dict.fromkeys(sizes, pair)
            found.append((kind(**own), own))
    if not found:
        raise problem
    (made, own), *others = found
    arguments |= own
    return [made, *others]


def _width_of_heads(made: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The width that heads need if the width of embeddings is fixed outside; else nothing."""
    roles = {role_of(name): name for name in arguments if plain(name) not in MODEL_NAMES}
    if not is_module(type(made)) or not {"heads", "width"} >= roles.keys() or "width" not in roles:
        return {}
    count = arguments[roles["heads"]] if "heads" in roles else 1
    first = next((p.shape[1] for p in made.parameters() if p.ndim > 1), 0)
    fits = "heads" in roles and first and first % count == 0
    return {roles["width"]: first // count} if fits else {}


def _in_half(kind: Any, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """The same object of torch in bfloat16, if its constructor asks for a dtype."""
    asked = [*dtypes_asked(kind)]
    if asked and is_module(kind):
        import torch

        with contextlib.suppress(Exception):
            yield kind(**{**arguments, **dict.fromkeys(asked, torch.bfloat16)})


def twin_in_half(thing: Any) -> Any:
    """The same object made in bfloat16, with weights of its own; None if it asks for no dtype."""
    return next(iter(getattr(thing, _IN_HALF, ())), None)


def heads_made_with(thing: Any) -> int | None:
    """The number of heads with which an object was made here, if that is known."""
    count = getattr(thing, _HEADS, None)
    return count if type(count) is int else None


def made_with(thing: Any) -> str:
    """The arguments with which an object was made here, as code; nothing for another object."""
    return str(getattr(thing, _MADE, ""))


def as_written(own: Any, thing: Any) -> bool:
    """Whether lines of code can say how an object was made of a class, or was another's copy."""
    is_module = hasattr(own, "state_dict")
    return own is thing or (is_module and Configuration.__name__ not in made_with(own))


def fresh_weights(thing: Any, *, narrow: bool = False) -> Any:
    """A copy of an object with random weights in float64, made for evaluation; the rest is kept.

    With `narrow` they are of float32.

    Single numbers, such as a learned temperature, are kept too.
    """
    own = copy.deepcopy(thing)
    if hasattr(own, "state_dict") and hasattr(own, "parameters"):
        import torch

        own = without_norms(own).eval()
        own = own.float() if narrow else own.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                of_heads = parameter.ndim > 2 and parameter.numel() == max(parameter.shape)
                is_same = parameter.numel() and (parameter == parameter.flatten()[0]).all()
                if is_same and (SHARPNESS.search(name) or (of_heads and parameter.any())):
                    continue
                if OF_VALUES.search(name) or _in_softplus(own, name):
                    parameter.zero_()
                elif is_same and parameter.ndim == 1 and LAYER_SCALE.search(name):
                    parameter.fill_(_open_gate(own, name))
                elif parameter.numel() > 1:
                    parameter.uniform_(-0.9, 0.9, generator=generator)
                elif GATE.search(name):
                    parameter.fill_(_open_gate(own, name))
            for name, part in own.named_modules():
                if FEED_FORWARD.search(name):
                    for parameter in part.parameters():
                        parameter.zero_()
                if GATE_LAYER.search(name) and getattr(part, "bias", None) is not None:
                    part.weight.zero_()
                    part.bias.fill_(100.0)  # its sigmoid is 1
        made_neutral(own)
        return own
    rng = np.random.default_rng(0)
    for holder in (vars(own), *(one for one in vars(own).values() if isinstance(one, dict))):
        for name, value in holder.items():
            if (role_of(str(name)) or "")[:2] in ("W_", "b_") and _is_float(value):
                drawn = rng.uniform(-0.9, 0.9, value.shape).astype(value.dtype)
                holder[name] = drawn if isinstance(value, np.ndarray) else like(value, drawn)
    behind = _feed_forward_of(own)
    for name, value in vars(own).items():
        if OF_VALUES.search(name) or name in behind:
            _empty(own, name)
        elif type(value) is tuple and value and all(map(_is_float, value)):
            drawn = (rng.uniform(-0.9, 0.9, one.shape).astype(one.dtype) for one in value)
            parts = zip(value, drawn, strict=True)
            setattr(
                own, name, tuple(d if isinstance(v, np.ndarray) else like(v, d) for v, d in parts)
            )
    for part in vars(own).values():
        for name, value in arrays_of_layer(part).items():
            drawn = rng.uniform(-0.9, 0.9, value.shape).astype(value.dtype)
            drawn = drawn if isinstance(value, np.ndarray) else like(value, drawn)
            object.__setattr__(part, name, drawn)
    made_neutral(own)
    return own


def _feed_forward_of(thing: Any) -> list[str]:
    """The arrays of the layers behind attention in an object that has both."""
    own = {name: one for name, one in getattr(thing, "__dict__", {}).items() if _is_float(one)}
    roles = {role_of(name) for name in own}
    if not {"W_q", "W_k", "W_v"} <= roles or not ACTIVATED.search(text_of(type(thing))):
        return []
    return [name for name in own if FEED_FORWARD_ARRAY.search(name) and role_of(name) is None]


def _open_gate(own: Any, name: str) -> float:
    """The number of a gate that lets all through: large where tanh or a sigmoid bounds it."""
    path, _, last = name.rpartition(".")
    text = text_of(type(own.get_submodule(path)))
    bounded = rf"(tanh|sigmoid)\([^\n)]*\b{last}\b|\b{last}\)?(\.\w+\([^)\n]*\))*\.(tanh|sigmoid)\("
    return 100.0 if re.search(bounded, text) else 1.0


def _in_softplus(own: Any, name: str) -> bool:
    """Whether a parameter has the numbers of features whose softplus is their factor."""
    part = own.get_submodule(name.rpartition(".")[0])
    return OF_FEATURES.search(name) is not None and "softplus" in text_of(type(part))


def without_tables(own: Any) -> list[str]:
    """Fill the tables of biases by place of an object with zeros; their names."""
    names = tables_of(own)
    if hasattr(own, "named_parameters"):
        import torch

        parameters = dict(own.named_parameters())
        with torch.no_grad():
            for name in names:
                parameters[name].zero_()
        return names
    for name in names:
        _empty(own, name)
    return names


def tables_of(own: Any) -> list[str]:
    """The names of an object's tables of biases by place."""
    is_layer = hasattr(own, "named_parameters")
    arrays = own.named_parameters() if is_layer else vars(own).items()
    return [
        name
        for name, one in arrays
        if BY_PLACE.search(name) or (name == "bias" and getattr(one, "ndim", 0) > 1)
        if is_layer or _is_float(one)
    ]


def as_one_window(kind: Any, heads: int | None) -> Any:
    """An object of a class that cuts a map into windows, whose window is all of a small map.

    None if it has no size of a window.
    """
    if not OF_WINDOWS.search(text_of(kind)):
        return None
    names = [*inspect.signature(kind).parameters]
    windows = [n for n in names if role_of(n) == "window" or GRID.search(plain(n))]
    shifts = [n for n in names if SHIFT.fullmatch(n)]
    fixed = dict.fromkeys(windows, SIDE) | dict.fromkeys(shifts, 0)
    with contextlib.suppress(OptionError):
        return constructed(kind, heads, fixed)[0] if windows else None
    return None


def _empty(own: Any, name: str) -> None:
    """Fill an array of an object with zeros, or those of an object that is its part."""
    value = getattr(own, name)
    if _is_float(value):
        setattr(own, name, 0 * value)
    for inner, array in vars(value).items() if hasattr(value, "__dict__") else ():
        if _is_float(array) and not hasattr(value, "shape"):
            setattr(value, inner, 0 * array)


def learned_log(thing: Any, text: str) -> float | None:
    """The logarithm of a factor of the scores that an object has learned, one for all heads."""
    own = (
        vars(thing) | dict(getattr(thing, "_parameters", {})) if hasattr(thing, "__dict__") else {}
    )
    for name, value in own.items():
        if role_of(name) == "sharpness" and _is_float(value) and "log(" in text:
            numbers = np.unique(np.asarray(value.detach() if hasattr(value, "detach") else value))
            return float(numbers[0]) if len(numbers) == 1 else None
    return None


def arrays_of_layer(part: Any) -> dict[str, Any]:
    """The weight and the bias of an object that is a layer, as Equinox has them; empty for others.

    The weight comes first.
    """
    own = getattr(part, "__dict__", {})
    weight = next((n for n in ("weight", "kernel", "w", "W") if _is_float(own.get(n))), "")
    if not weight or own[weight].ndim != 2:
        return {}
    bias = next((n for n in ("bias", "b") if _is_float(own.get(n))), "")
    return {name: own[name] for name in (weight, bias) if name}


def without(thing: Any) -> list[str]:
    """The layers of an object that `fresh_weights` leaves out, by their names."""
    if not hasattr(thing, "named_modules"):
        tables = [name for name in getattr(thing, "__dict__", {}) if OF_VALUES.search(name)]
        return [*tables, *neutral_parts(thing), *_feed_forward_of(thing)]
    parts = thing.named_modules()
    left_out = (
        n for n, part in parts if NORM.search(type(part).__name__) or FEED_FORWARD.search(n)
    )
    parameters = (name for name, _ in thing.named_parameters())
    tables = [n for n in parameters if OF_VALUES.search(n) or _in_softplus(thing, n)]
    beside = (name.split(".")[0] for name in (*tables, *neutral_parts(thing)))
    return [name for name in itertools.chain(left_out, dict.fromkeys(beside)) if name]


def _is_float(value: Any) -> bool:
    return hasattr(value, "shape") and str(getattr(value, "dtype", ""))[:5] == "float"

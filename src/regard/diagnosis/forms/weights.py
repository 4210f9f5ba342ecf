"""The weights that an object carries: which of its layers or arrays project queries, keys, values.

Owns the names of layers. Reads, and calls nothing. Must not know any probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.assigned import columns_assigned
from regard.diagnosis.forms.construction import GATE_LAYER
from regard.diagnosis.forms.head_orders import (
    FUSED_ORDERS,
    TAKES_TURNS,
    heads_together,
    reordered,
)
from regard.diagnosis.forms.neutral_parts import OF_NO_TOKEN, logit_of_no_token, mixes_before
from regard.diagnosis.forms.object_layers import (
    OTHER_LAYERS,
    Layer,
    is_numbers,
    layers_of,
    without_bottlenecks,
)
from regard.diagnosis.reading.constructor_arguments import CONFIGURATION
from regard.diagnosis.reading.parameter_names import fused_order, plain, role_of
from regard.diagnosis.reading.signature import LATENTS, PROJECTIONS, text_of
from regard.errors import OptionError, ProblemError
from regard.problems.checks import weight_sizes

# Layers that hold a weight under a name that would mean an array as a parameter.
LAYERS = {
    **dict.fromkeys(("query", "queries", "q"), "W_q"),
    **dict.fromkeys(("key", "keys", "k"), "W_k"),
    **dict.fromkeys(("value", "values", "v"), "W_v"),
    **dict(theta="W_q", phi="W_k", g="W_v", wz="W_o"),  # as in non-local blocks
    **dict.fromkeys(
        ("out", "o", "output", "proj", "cproj", "outproj", "toout", "fcout", "attnvec"), "W_o"
    ),
    **dict.fromkeys(("dense", "unifyheads", "projection", "final", "fc", "combine", "mix"), "W_o"),
    "reprojection": "W_o",
}
GROUPED = re.compile(r"^_?Conv|Norm\d*d?$")
# What a comment says of the columns of a fused projection.
_THREE = r"\b([qkv])\W{1,3}([qkv])\W{1,3}(?:and )?([qkv])\b"
ORDER_SAID = re.compile(
    rf"{_THREE}[^\n]{{0,12}}\border\b|\border\b[^\n=]{{0,30}}{_THREE}", re.IGNORECASE
)
# Text that knows the order of the columns of a fused projection.
OF_ORDER = re.compile(
    r"gpt-?2|checkpoint|pretrained|state_?dict|nn\.MultiheadAttention\b|"
    r"\bq\W{1,3}k\W{1,3}(and )?v\b[^\n=]{0,20}(columns|order|side by side|rows|stacked)|"
    r"(columns|order|rows|stacked)[^\n=]{0,30}\bq\W{1,3}(then )?k\W{1,3}(then |and )?v\b",
    re.IGNORECASE,
)
# Learned queries: each pools what the layer gets.
LEARNED = re.compile(
    "^(q|query|queries|latents?|seeds?|probe|cls|cls_token|inducing|slots|(learned|pool|latent|"
    "query|object|class|seed)_?(query|queries|tokens?|vectors?|embed|embeddings?|array|seeds?)|I|S)$"
)
MOST_HEADS = 4  # numbers of heads that are tried

Weights = dict[str, Array]


class Read(NamedTuple):
    """The weights of an object, the number of heads, and the order of fused columns if known."""

    weights: Weights
    heads: int | None
    by_head: bool | None = None


def readings_of_weights(thing: Any, heads: int | None) -> list[Read]:
    """Every way to read the weights of an object, as x @ W: the likeliest first."""
    stated = heads or head_count(thing)
    layers = [one for one in layers_of(thing) if one[2].size > 1 and not OF_NO_TOKEN.search(one[0])]
    layers = [*_in_said_order(thing, without_bottlenecks(layers))]
    groups = _number(thing, "key_heads") or _groups_beside(layers, stated)
    found: list[Weights] = []
    per_head: list[int] = []
    latents, layers = _learned_queries(layers)
    if "theta" in (path for path, *_ in layers):  # there W alone is the output's
        layers = [("wz" if path == "W" else path, *more) for path, *more in layers]
    named = _named(layers, stated, groups, per_head)
    if latents is None and not {*PROJECTIONS} <= named.keys():
        told = [*_as_assigned(thing, layers)]
        groups = _groups_beside(told, stated) or groups
        of_told = _named(told, stated, groups, per_head)
        layers, named = (told, of_told) if {*PROJECTIONS} <= of_told.keys() else (layers, named)
    if latents is not None:
        named = {**dict.fromkeys(PROJECTIONS, np.eye(latents.shape[-1])), **named}
    if set(PROJECTIONS) <= named.keys():
        found = [named]
        if "W_o" not in named and (last := _only_other(layers, named)) is not None:
            found.insert(0, named | last)
        raw = {role for path, role, _ in _raw(layers) if role in named}
        if raw and all(named[one].ndim == 2 for one in raw):
            found.append(_turned(named, raw))
    else:
        found = [*_in_order(layers, named)]
        if not hasattr(thing, "state_dict"):  # whose layers say how they lie
            found += [_turned(one, one.keys()) for one in found]
    if not found:
        return []
    found = [_shared_by_heads(one, stated) for one in found]
    count = stated or (per_head[0] if per_head else None)
    each: list[tuple[Weights, int | None]] = [
        (weights, own)
        for weights in found
        for own in ((count,) if count else [*_possible_heads(thing, weights)] or (None,))
    ]
    fused = _fused_name(layers)
    out: list[Read] = []
    for weights, count in each:
        orders = FUSED_ORDERS if fused and count else FUSED_ORDERS[:1]
        of_order = {"PHD": False, "HPD": True} if len(orders) > 1 else {}
        out += [
            Read(reordered(weights, fused, order, count or 1), count, of_order.get(order))
            for order in orders
        ]
    if any(TAKES_TURNS.search(text_of(type(part))) for part in _parts(thing)):
        out = [*(one._replace(weights=heads_together(*one[:2])) for one in out), *out]
    out = [one for one in out if _fits(one.weights, one.heads)] or out[:1]
    sinks = (one for path, _, one, _ in layers if role_of(path.rpartition(".")[2]) == "sink")
    if (sink := next(sinks, None)) is not None:
        out = [_with(one, sink=sink.ravel()) for one in out if sink.size == (one.heads or 1)] or out
    if mixes_before(thing):
        out = [
            _with(one, **{r: -a for r, a in one.weights.items() if r[1:] == "_q"}) for one in out
        ]
    logit = logit_of_no_token(thing, found[0]["W_k"].shape[-1])
    if logit is not None:
        out = [_with(one, sink=np.full(one.heads or 1, logit)) for one in out]
    if latents is not None:
        out = [_with(one, **{LATENTS: latents}) for one in out]
    return out


def _turned(weights: Weights, roles: Collection[str]) -> Weights:
    """The same with the matrices of some roles transposed."""
    turned = {role: array.T if role in roles else array for role, array in weights.items()}
    return {role: np.ascontiguousarray(array) for role, array in turned.items()}


def _in_said_order(thing: Any, layers: list[Layer]) -> Iterator[Layer]:
    """The layers, c_attn as vkq where it gives v, k, q in that order.

    As a comment says, or as the code calls them, if no checkpoint has another order.
    """
    text = text_of(type(thing))
    said = ORDER_SAID.search(text)
    order = "".join(filter(None, said.groups())).lower() if said else ""
    packed = {path: one for path, *_ in layers if (one := fused_order(path.rpartition(".")[2]))}
    own_ones = [] if OF_ORDER.search(text) else [*packed]
    called = columns_assigned(type(thing), own_ones) if own_ones else {}
    for path, *more in layers:
        own = fused_order(order) or fused_order(called.get(path, ""))
        is_other = path in packed and sorted(own) == sorted(packed[path])
        yield (own if is_other else path, *more)


def _as_assigned(thing: Any, layers: list[Layer]) -> Iterator[Layer]:
    """The layers, those that code takes apart into queries, keys and values by these names."""
    letters = columns_assigned(type(thing), [path for path, *_ in layers])
    for path, *more in layers:
        yield (letters[path] if fused_order(letters.get(path, "")) else path, *more)


def _with(read: Read, **others: Array) -> Read:
    """The same with other weights."""
    return read._replace(weights=read.weights | others)


def _shared_by_heads(weights: Weights, heads: int | None) -> Weights:
    """Matrices as wide as one head, which all heads share, as those of all heads."""
    shapes = {weights[name].shape for name in PROJECTIONS}
    if not heads or len(shapes) > 1 or "W_o" not in weights:
        return weights
    ((rows, columns),) = shapes
    if rows != columns or len(weights["W_o"]) != rows * heads:
        return weights
    return weights | {name: np.kron(np.eye(heads), weights[name]) for name in PROJECTIONS}


def _learned_queries(layers: list[Layer]) -> tuple[Array | None, list[Layer]]:
    """Queries that an object has learned, (N, M), and its other layers.

    A matrix beside another of the same size for keys is a projection.
    """

    def is_of_keys(path: str) -> bool:
        return LAYERS.get(plain(path.rpartition(".")[2])) == "W_k"

    of_keys = {array.shape for path, _, array, _ in layers if is_of_keys(path)}
    for one in layers:
        path, layer, array, _ = one
        if array.ndim == 0 or array.shape in of_keys:
            continue
        name, wide = path.rpartition(".")[2], array.reshape(-1, array.shape[-1])
        alone = array.ndim == 1 or array.shape[0] == 1 or len(wide) != array.shape[-1]
        if layer is None and LEARNED.search(name) and alone and array.size == wide.size:
            return wide, [other for other in layers if other is not one]
    return None, layers


def has_positions(thing: Any) -> bool:
    """Whether a torch module has learned a table of positions."""
    own = thing.named_parameters() if hasattr(thing, "state_dict") else ()
    return any(one.ndim > 1 and re.search("rel|pos(?!t)|bias_table", name) for name, one in own)


def widths_of(thing: Any) -> tuple[int, ...]:
    """The widths that arrays may have which meet the weights of an object, in their order."""
    if hasattr(thing, "named_modules") and hasattr(thing, "state_dict"):
        every = [one for _, one in thing.named_parameters() if one.ndim > 0]
        own = [one for one in every if one.ndim > 1]
        sizes = [one.shape[1] for one in own] + [one.shape[0] for one in own or every]
    else:
        arrays = [one for one in getattr(thing, "__dict__", {}).values() if is_numbers(one)]
        arrays = [one for one in arrays if one.ndim > 0]
        sizes = [one.shape[0] for one in arrays if one.ndim > 1] or [len(one) for one in arrays]
    sizes += [size // part for size in sizes[:2] for part in (4, 3, 2)]  # several side by side
    return tuple(dict.fromkeys(int(size) for size in sizes if 1 < size <= 512))[:9]


def layers_without_a_role(thing: Any) -> Iterator[tuple[str, Array]]:
    """The matrices of an object, as x @ W, whose names are none of projections."""
    for path, _, weight, _ in layers_of(thing):
        if weight.ndim == 2 and not role_of_path(path) and not fused_order(path.split(".")[-1]):
            yield path, weight


def head_count(thing: Any) -> int | None:
    """The number of heads that an object, or a part of it, says it has."""
    return _number(thing, "heads")


def _number(thing: Any, role: str) -> int | None:
    for part in _parts(thing):
        of_torch = type(part).__module__.startswith("torch.") and not hasattr(part, "num_heads")
        if role in ("key_heads", "width") and of_torch:
            continue  # a convolution has groups of channels, and a softmax an axis called dim
        settings = (one for name, one in vars(part).items() if CONFIGURATION.fullmatch(plain(name)))
        for own in (vars(part), *map(_entries, settings)):
            for name, value in own.items():
                if role_of(name) == role and type(value) is int and value > 0:
                    return value
    return None


def _entries(settings: Any) -> Mapping[str, Any]:
    """What a configuration says, by name: an object, a NamedTuple or a dictionary."""
    if isinstance(settings, Mapping):
        return settings
    return settings._asdict() if hasattr(settings, "_asdict") else getattr(settings, "__dict__", {})


def _parts(thing: Any) -> Iterator[Any]:
    """The object, the parts of a torch module, and objects that it holds."""
    if hasattr(thing, "modules") and hasattr(thing, "state_dict"):
        for part in thing.modules():  # groups of a convolution or of a norm are none of heads
            names = (kind.__name__ for kind in type(part).__mro__)
            if hasattr(part, "__dict__") and not any(map(GROUPED.search, names)):
                yield part
    elif hasattr(thing, "__dict__"):
        yield thing


def _raw(layers: list[Layer]) -> Iterator[tuple[str, str, Array]]:
    """Weights that are arrays, not layers, with their roles."""
    for path, layer, array, _ in layers:
        role = role_of_path(path)
        if layer is None and role[:2] == "W_":
            yield path, role, array


def role_of_path(path: str) -> str:
    """What a layer or array projects, from its name or that of what holds it."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    for part in reversed(parts[-2:]):
        name = plain(part)
        role = LAYERS.get(name) or role_of(part) or LAYERS.get(name.removesuffix("net"), "")
        if role[:2] in ("W_", "b_") or fused_order(part):
            return role if role[:2] in ("W_", "b_") else part
        held = re.fullmatch("(.+?)(?:_?(?:weight|kernel|(bias))|_(?:w|(b)))", part)  # proj_weight
        if held is not None and (role := LAYERS.get(plain(held[1]), "")):
            return role.replace("W_", "b_") if held[2] or held[3] else role
    return ""


def _fused_name(layers: list[Layer]) -> str:
    names = (fused_order(path.split(".")[-1]) for path, *_ in layers)
    return next((name for name in names if name), "")


def _fused_order(path: str, weight: Array) -> str:
    """The projections that lie side by side in a weight, or in a bias such as qkv_b."""
    name = path.split(".")[-1]
    return fused_order(re.sub("^b(ias)?_?|_?b(ias)?$", "", name) if weight.ndim == 1 else name)


def _named(
    layers: list[Layer], heads: int | None, groups: int | None, per_head: list[int]
) -> Weights:
    """The projections by the names of layers; those of single heads are put side by side."""
    found: dict[str, list[Array]] = {}
    orders = {path: _fused_order(path, weight) for path, _, weight, _ in layers}
    joined_rows = {
        path
        for path, layer, weight, _ in layers
        if weight.ndim == 2 and layer is None and orders[path]
        if len(weight) == len(orders[path]) * weight.shape[1]
    }
    for path, layer, weight, bias in layers:
        role, order = role_of_path(path), orders[path]
        # Where rows of arrays are what is joined, each is (out, in), as in torch.
        if path in joined_rows or (joined_rows and layer is None and weight.ndim == 2):
            weight = weight.T
        if order:
            is_bias = weight.ndim == 1
            for array, kind in ((weight, "b_" if is_bias else "W_"), (bias, "b_")):
                if array is not None:
                    for letter, part in _unpacked(order, array, heads, groups):
                        found.setdefault(kind + letter, []).append(part)
        elif role[:2] in ("W_", "b_"):
            if weight.ndim == 3:
                count, weight = _joined_heads(role, weight)
                per_head.append(count)
            elif role[:2] == "b_" and weight.ndim == 2:
                weight = weight.reshape(-1)
            found.setdefault(role, []).append(weight)
            if bias is not None:
                found.setdefault(role.replace("W", "b"), []).append(bias)
    counts = {len(found[one]) for one in PROJECTIONS if one in found}
    if max(counts, default=1) > 1 and len(counts) == 1:
        per_head.append(counts.pop())
    return {
        role: np.concatenate(arrays, axis=-1) if len(arrays) > 1 else arrays[0]
        for role, arrays in found.items()
        if role not in ("W_o", "b_o") or len(arrays) == 1
    }


def _only_other(layers: list[Layer], named: Weights) -> Weights | None:
    """The one layer whose name says nothing, as that of the output, if its sizes are those."""
    rest = [one for one in layers if one[1] is not None and not role_of_path(one[0])]
    if len(rest) != 1:
        return None
    path, _, weight, bias = rest[0]
    of_heads = {named[one].shape[-1] for one in ("W_v", "W_q")}  # keys may have fewer of them
    fits = len(weight) in of_heads and weight.shape[-1] == len(named["W_q"])
    if not fits or OTHER_LAYERS.search(path) or GATE_LAYER.search(path):
        return None
    return {"W_o": weight} | ({} if bias is None else {"b_o": bias})


def _groups_beside(layers: list[Layer], heads: int | None) -> int | None:
    """How many key heads a layer of queries, keys and values has columns for, if they are fewer."""
    for path, layer, weight, _ in layers:
        order = fused_order(path.split(".")[-1])
        if heads and layer is not None and sorted(order) == [*"kqv"]:
            width, columns = len(weight) // heads, weight.shape[-1]
            groups, rest = divmod(columns - heads * width, 2 * width)
            if len(weight) % heads == rest == 0 and 0 < groups < heads:
                return int(groups)
    return None


def _unpacked(
    order: str, array: Array, heads: int | None, groups: int | None
) -> Iterator[tuple[str, Array]]:
    """The parts of an array that holds several projections side by side."""
    width = array.shape[-1]
    sizes = [width // len(order)] * len(order)
    if heads and groups and len(order) == 3 and groups != heads:
        one = width // (heads + 2 * groups)
        sizes = [one * (heads if letter == "q" else groups) for letter in order]
    if sum(sizes) == width:
        yield from zip(order, np.split(array, np.cumsum(sizes)[:-1], axis=-1), strict=True)


def _joined_heads(role: str, array: Array) -> tuple[int, Array]:
    """Weights of each head, (H, M, D), (M, H, D) or for the output (H, D, M), side by side."""
    if role == "W_o":
        return len(array), array.reshape(-1, array.shape[-1])
    if np.argmax(array.shape) == 0:
        return array.shape[1], array.reshape(len(array), -1)
    return len(array), array.swapaxes(0, 1).reshape(array.shape[1], -1)


def _in_order(layers: list[Layer], named: Weights) -> Iterator[Weights]:
    """Layers whose names say nothing: queries, keys, values and the output as they are defined."""
    listed = [path.rpartition(".")[0] for path, *_ in layers if path[-2:] in (".0", ".1", ".2")]
    if len(listed) == 3 == listed.count(listed[0]):  # what a list of three holds comes first
        layers = sorted(layers, key=lambda one: one[0].rpartition(".")[0] != listed[0])
    plain_layers = [
        (weight, bias)
        for path, layer, weight, bias in layers
        if weight.ndim == 2 and (layer is not None or not OTHER_LAYERS.search(path))
    ]
    for count in (4, 3):
        if len(plain_layers) == count:
            for order in ("qkvo", "kqvo", "vkqo"):
                own: Weights = {}
                for letter, (weight, bias) in zip(order, plain_layers, strict=False):
                    own[f"W_{letter}"] = weight
                    own |= {} if bias is None else {f"b_{letter}": bias}
                yield own
            return
    if len(plain_layers) in (1, 2):
        weight, bias = plain_layers[0]
        if weight.shape[1] % 3 == 0:
            own = {f"W_{letter}": part for letter, part in _unpacked("qkv", weight, None, None)}
            if bias is not None:
                own |= {f"b_{x}": part for x, part in _unpacked("qkv", bias, None, None)}
            for weight, bias in plain_layers[1:]:
                own |= {"W_o": weight} | ({} if bias is None else {"b_o": bias})
            yield own


def _possible_heads(thing: Any, weights: Weights) -> Iterator[int]:
    """The number of heads that a stated head width gives, or else those that the weights allow."""
    columns = weights["W_q"].shape[-1]
    width = _number(thing, "width")
    if width and columns % width == 0 and width < columns:
        yield columns // width
        return
    allowed = [n for n in range(1, columns + 1) if columns % n == 0 and columns // n > 1]
    yield from allowed[:MOST_HEADS]


def _fits(weights: Weights, heads: int | None) -> bool:
    try:
        key_heads(weights, heads or 1)
    except OptionError:
        return False
    return True


def key_heads(weights: Mapping[str, Array], heads: int) -> int:
    """How many heads the keys have; an OptionError if the weights do not fit together."""
    width, packed = (math.prod(weights[name].shape[-1:]) for name in ("W_q", "W_k"))
    groups = max(1, packed * heads // max(1, width))
    cross = len(weights["W_k"]) == len(weights["W_v"]) != len(weights["W_q"])
    try:
        shared = {} if cross else {"N": "M"}
        weight_sizes({**weights, "heads": heads, "key_heads": groups}, shared)
    except ProblemError as error:
        raise OptionError("the weights do not fit together: ", *error.args) from None
    if heads % groups:
        raise OptionError(
            f"W_k has the columns of {groups} heads; {heads} heads must be a multiple of that"
        )
    return groups

"""Every weight that an object carries, with its path: those of its layers, and its arrays.

Reads, and calls nothing. Must not know which of them project queries, keys and values.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.construction import FEED_FORWARD, arrays_of_layer
from regard.diagnosis.forms.einsums import axes_in_einsums
from regard.diagnosis.forms.source import code_called, code_of
from regard.diagnosis.reading.signature import text_of
from regard.diagnosis.reading.source_text import nodes_of, tree_of

OTHER_LAYERS = re.compile("norm|ln|embed|rel|slope|rotary|pos|edge|skip|root", re.IGNORECASE)
ATTENTION = re.compile("(self_?)?(attn|attention|att|mha)", re.IGNORECASE)
GRADIENTS = re.compile("_?(d_?)?(grads?|gradients?|velocity|momentum|moments)", re.IGNORECASE)
WEIGHTS, BIASES = ("weight", "kernel", "w"), ("bias", "b")  # of a layer in a dictionary
# Code that reads attributes by names that it computes.
GENERAL = re.compile(r"\b(getattr|vars|setattr)\(|__dict__|asdict")
# A layer whose weight is (out, in), by its code.
TURNED = re.compile(r"\.m?T\b|\b(weight|kernel|w|W) *@|(dot|matmul)\( *self\.\w+ *,|oi *,")
# An einsum whose matrix is (out, in), and whose tokens are columns: "oc,bcn->bon".
OF_COLUMNS = re.compile(r"""["'](\w)(\w) *, *\w?\2(\w) *-> *\w?\1\3["']""")
# Matrices of queries, keys, values and perhaps the output, one after the other.
STACKED = re.compile("w|ws|weights?|projections", re.IGNORECASE)
Layer = tuple[str, Any, "Array", "Array | None"]  # path, the layer or None, weight, bias
_DOWN = re.compile("(^|_)(w?)(q|kv|k|v)_?(a|down)(_proj)?$")
_UP = "(^|_)(w?){0}_?(b|up)(_proj)?$"


def layers_of(thing: Any) -> Iterator[Layer]:
    """Every weight of an object with its path, in the order in which it was defined."""
    if hasattr(thing, "named_modules") and hasattr(thing, "state_dict"):
        for path, part in thing.named_modules():
            if any(map(FEED_FORWARD.search, itertools.accumulate(path.split("."), "{}.{}".format))):
                continue
            own = dict(part.named_parameters(recurse=False))
            weight = own.get("weight")
            if weight is not None and path:
                array = _array(weight)
                if (
                    array.ndim > 2 and array.shape[2:].count(1) == array.ndim - 2
                ):  # a convolution of width 1
                    array = array.reshape(array.shape[:2])
                if array.ndim == 2 and not OTHER_LAYERS.search(type(part).__name__):
                    turned = array if type(part).__name__ == "Conv1D" else array.T
                    bias = own.get("bias")
                    yield path, part, turned, None if bias is None else _array(bias)
                continue
            for name, value in own.items():
                if value.ndim > 2 and value.numel() == max(value.shape):
                    continue  # a number for each head
                yield f"{path}.{name}".lstrip("."), None, _array(value), None
        return
    axes = axes_in_einsums(type(thing)) if hasattr(thing, "__dict__") else {}
    made_of_others = _read_by_init_alone(thing)
    text = f"{code_of(type(thing))}\n{code_called(type(thing))}"
    of_columns = OF_COLUMNS.search(text) is not None
    attributes = getattr(thing, "__dict__", {})
    held = [one for own in attributes.values() if isinstance(own, dict) for one in own.values()]
    shapes = [np.shape(one) for one in held if np.ndim(one) == 2]
    side_by_side = any(columns == 3 * rows for rows, columns in shapes)  # so they are (in, out)
    out_first = TURNED.search(text) is not None and not side_by_side
    for name, value in attributes.items():
        if name in made_of_others:
            continue
        if is_numbers(value) and sorted(axes.get(name, "")) == [*"DHMP"] and np.ndim(value) == 4:
            whole = np.asarray(value, float).transpose([axes[name].index(one) for one in "MPHD"])
            yield name, None, whole.reshape(len(whole), -1), None
        elif is_numbers(value) and np.shape(value)[:-2] in ((3,), (4,)) and STACKED.fullmatch(name):
            parts = zip("qkvo", np.asarray(value, float), strict=False)
            yield from ((f"W_{letter}", None, one, None) for letter, one in parts)
        elif isinstance(value, dict) and not GRADIENTS.fullmatch(name):
            yield from _of_dictionary(name, value, out_first)
        elif _is_layer(value):
            yield name, *_of_pair(value, of_columns)
        elif isinstance(value, list | tuple) and value and all(map(_is_layer, value)):
            for number, layer in enumerate(value):  # of queries, keys and values
                yield f"{name}.{number}", *_of_pair(layer, of_columns)
        elif isinstance(value, list | tuple) and value and all(isinstance(x, dict) for x in value):
            for number, own in enumerate(value):  # of each head
                yield from _of_dictionary(f"{name}.{number}", own, out_first)
        elif isinstance(value, list | tuple) and all(map(is_numbers, value)):
            for number, array in enumerate(value):  # of each head
                yield f"{name}.{number}", None, np.asarray(array, float), None
        elif arrays := [*arrays_of_layer(value).values()]:
            weight, *bias = (np.asarray(one, float) for one in arrays)
            weight = weight.T if TURNED.search(text_of(type(value))) else weight
            yield name, value, weight, bias[0] if bias else None
        elif is_numbers(value) and not _is_kept(value, name, text):
            yield name, None, np.asarray(value, float), None


def _of_dictionary(where: str, value: Mapping[Any, Any], turned: bool) -> Iterator[Layer]:
    """The arrays of a dictionary; those of a checkpoint, qkv.weight and qkv.bias, as a layer."""
    if re.fullmatch("b|bias|biases", where, re.IGNORECASE):
        value = {f"b_{name}": one for name, one in value.items()}
    found = {str(name): np.asarray(one, float) for name, one in value.items() if is_numbers(one)}
    if found and found.keys() <= {*WEIGHTS, *BIASES}:  # c_attn = {"w": ..., "b": ...}
        found = {f"{where}.{name}": one for name, one in found.items()}
    for name, array in found.items():
        base, _, leaf = name.rpartition(".")
        bias = next((found[n] for n in (f"{base}.{one}" for one in BIASES) if n in found), None)
        if leaf in WEIGHTS and base and array.ndim == 2:
            fused = array.shape[1] == 3 * array.shape[0] and ATTENTION.fullmatch(base)
            yield "c_attn" if fused else base, value, array.T if turned else array, bias
        elif leaf not in BIASES or not any(f"{base}.{one}" in found for one in WEIGHTS):
            yield name, None, array, None


def _is_kept(value: Any, name: str, text: str) -> bool:
    """Whether an array is an empty cache, or zeros that code adds to, and no weight."""
    changed = re.search(rf"\bself\.{name} *[-+*]=", text) is not None
    return not np.any(np.asarray(value)) and (np.ndim(value) > 2 or changed)


def _of_pair(value: Any, turned: bool) -> tuple[Any, Array, Array]:
    """A layer that is its matrix and its bias: what holds it, the matrix as x @ W, and the bias."""
    weight, bias = (np.asarray(one, float) for one in value)
    columns = turned or bias.ndim == 2  # W @ x + b of tokens that are columns
    return value if columns else None, weight.T if columns else weight, bias.ravel()


def _read_by_init_alone(thing: Any) -> set[str]:
    """The arrays of an object that only its constructor reads: it puts them side by side."""
    made, text = text_of(getattr(type(thing), "__init__", None)), text_of(type(thing))
    if not made or made not in text or GENERAL.search(text):
        return set()
    rest = text.replace(made, "")
    arrays = {name for name, one in vars(thing).items() if is_numbers(one)}
    read = {
        node.attr
        for node in nodes_of(tree_of(type(thing).__init__))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return {name for name in arrays & read if not re.search(rf"\.{name}\b", rest)}


def _is_layer(value: Any) -> bool:
    """Whether something is a matrix and the bias of its columns, or of its rows, also (n, 1)."""
    if not isinstance(value, list | tuple) or not all(map(is_numbers, value)):
        return False
    shapes = [np.shape(one) for one in value]
    if [*map(len, shapes)] == [2, 2]:
        return shapes[1] == (shapes[0][0], 1) and shapes[0][1] > 1
    return [*map(len, shapes)] == [2, 1] and shapes[1][0] in shapes[0]


def without_bottlenecks(layers: list[Layer]) -> list[Layer]:
    """Two layers of a projection, down to a few columns and up again, as their product."""
    found, products = list[Layer](), set[str]()
    for path, layer, weight, bias in layers:
        down = _DOWN.search(path)
        up = next((one for one in layers if down and re.search(_UP.format(down[3]), one[0])), None)
        if down and up and weight.shape[-1] == len(up[2]):
            products.add(up[0])
            more = up[3] if bias is None else bias @ up[2] + (0 if up[3] is None else up[3])
            path, weight, bias = f"w{down[3]}", weight @ up[2], more
        found.append((path, layer, weight, bias))
    return [one for one in found if one[0] not in products]


def is_numbers(value: Any) -> bool:
    """Whether something is an array of numbers that are not whole."""
    kind = str(getattr(value, "dtype", ""))[:5]
    return hasattr(value, "shape") and kind == "float" and 0 not in value.shape


def _array(value: Any) -> Array:
    own = value.detach()
    return np.asarray((own if own.element_size() > 2 else own.float()).numpy())

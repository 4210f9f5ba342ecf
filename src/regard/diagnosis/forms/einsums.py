"""The axes of weights, as the subscripts of einsums, loops over heads, or words say.

Reads the code of a function. Must not call it, nor know any probe.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import WEIGHT_LEAVES, nodes_in
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.parameter_names import fused_order
from regard.diagnosis.reading.signature import text_of

# M: the width of a token. H: heads, or G: groups of them and R: those of each. D: their width.
# P: the projections of a fused weight.
HEADS = re.compile("h|n?_?heads?|nh|num_heads|n_head|q_heads|kv_heads|hq|hkv")
WIDTHS = re.compile("d_?[kvhq]|hd|d_head|dh|head_?(dim|size|width)|dim_head|k|v|dk")
_SUBSCRIPTS = re.compile(r"[\w. ]+(,[\w. ]+)+->[\w. ]*")


def axes_in_einsums(function: Callable[..., Any]) -> dict[str, str]:
    """The axes of each weight that meets its rows in an einsum, by its name: MHD, HMD, MD, HDM.

    A name is that of a variable, an attribute or an entry.
    """
    nodes = [*nodes_in(function)]
    others = _other_names(nodes)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    own = [one for call in calls for one in _operands(call)]
    # Subscripts of the heads of keys, of which a weight has one axis.
    groups = {kept[-2] for name, *_, kept in own if len(kept) == 2 + bool(fused_order(name))}
    known = [(one[0], axes) for one in own if (axes := _axes(*one, groups))]
    found: dict[str, str] = {}
    for name, axes in known:
        found.setdefault(name, axes)
    for name, axes in known:
        for one in others.get(name, ()):
            found.setdefault(one, axes)
    return found


def axes_in_words(
    function: Callable[..., Any], names: Collection[str], text: str = ""
) -> dict[str, str]:
    """The same for those that documentation gives three axes, one of them of heads: (h, d, d_k).

    It may be more `text` than that of the function.
    """
    found = {}
    known = documented_axes(f"{text}\n{text_of(function)}", ("x", *names))
    model = known.get("x", ("",))[-1]  # the width of a token
    for name, words in ((name, words) for name, words in known.items() if name in names):
        fused = "P" * (words[:1] == ("3",) and fused_order(name) == "qkv")
        words = words[len(fused) :]
        heads = [one for one in words if HEADS.fullmatch(one.lower())]
        widths = [one for one in words if WIDTHS.fullmatch(one.lower()) and one not in heads]
        if len(words) == 3 and len(heads) == len(widths) == 1:
            letters = dict.fromkeys(words, "M") | {heads[0]: "H", widths[0]: "D"}
            found[name] = fused + "".join(letters[one] for one in words)
        elif len(words) == 3 and len(heads) == 1 and words.count(model) == 1:
            letters = dict.fromkeys(words, "D") | {heads[0]: "H", model: "M"}
            found[name] = fused + "".join(letters[one] for one in words)
        elif len(words) == 3 and [*words[1:2]] == heads:  # between the rows and the columns
            found[name] = f"{fused}MHD"
        elif fused and len(words) == 2:
            found[name] = "PMD"
    return found


def axes_in_loops(function: Callable[..., Any], roles: Mapping[str, str]) -> dict[str, str]:
    """The same for weights of which a loop takes one after the other: W_q[h], or zip(W_q, W_k)."""
    nodes = [*nodes_in(function)]
    loops = [node for node in nodes if isinstance(node, ast.For | ast.comprehension)]
    over = {name for one in loops for name in _looped_over(one.iter)}
    counts = {
        part.id for one in loops for part in ast.walk(one.target) if isinstance(part, ast.Name)
    }
    taken = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and getattr(node.slice, "id", "") in counts
    }
    return {
        name: {"W_o": "HDM"}.get(role, "HMD" if role[0] == "W" else "HD")
        for name, role in roles.items()
        if name in over | taken
    }


def _looped_over(node: ast.expr) -> Iterator[str]:
    """What a loop takes one part of after the other: x, or zip(x, y), but not (x, y)."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("zip", "enumerate"):
        for one in node.args:
            yield from _looped_over(one)


def _other_names(nodes: Sequence[ast.AST]) -> dict[str, list[str]]:
    """What names of loops and of parameters of inner functions are for: for w in (w_k, w_v)."""
    found: dict[str, list[str]] = {}

    def note(target: ast.expr | ast.arg, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner, own in zip(target.elts, value.elts, strict=False):
                note(inner, own)
        elif name := getattr(target, "id", getattr(target, "arg", "")):
            found.setdefault(name, []).append(_name(value))

    inside = {node.name: node.args.args for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.For | ast.comprehension):
            for value in getattr(node.iter, "elts", ()):
                note(node.target, value)
        elif isinstance(node, ast.Call):
            known = inside.get(getattr(node.func, "id", ""), [])
            for parameter, value in zip(known, node.args, strict=False):
                note(parameter, value)
    return found


def _operands(call: ast.Call) -> Iterator[tuple[str, str, str, str]]:
    """Each operand of an einsum that may be a weight: its name and its subscripts.

    And which of these are summed, and which are kept.
    """
    if getattr(call.func, "attr", getattr(call.func, "id", "")) != "einsum" or len(call.args) < 3:
        return
    text = getattr(call.args[0], "value", None)
    if not isinstance(text, str) or not _SUBSCRIPTS.fullmatch(text):
        return
    inputs, output = text.replace(" ", "").replace("...", "").split("->")
    operands = inputs.split(",")
    for number, (own, node) in enumerate(zip(operands, call.args[1:], strict=False)):
        others = set("".join(operands[:number] + operands[number + 1 :]))
        summed = "".join(one for one in own if one in others and one not in output)
        kept = "".join(one for one in own if one in output and one not in others)
        if (name := _name(node)) and len(summed) + len(kept) == len(own):
            yield name, own, summed, kept


def _axes(name: str, own: str, summed: str, kept: str, groups: set[str]) -> str:
    """The axes of one operand that is a weight; nothing if it may be none.

    `groups` are the subscripts of the heads of keys, where queries have an axis of these.
    """
    fused = fused_order(name)
    match len(summed), len(kept):
        case 1, 1:
            letters = "H" if kept in groups else "D"
        case 1, 2:
            letters = "PD" if fused else "HD"
        case 1, 3 if fused:
            letters = "PHD"
        case 1, 3 if len(groups & {*kept[:2]}) == 1:
            letters = "GRD" if kept[0] in groups else "RGD"
        case 2 | 3, 1:
            letters = "HD" if len(summed) == 2 else "GRD" if summed[0] in groups else "RGD"
            return "".join("M" if one in kept else letters[summed.index(one)] for one in own)
        case _:
            return ""
    return "".join("M" if one in summed else letters[kept.index(one)] for one in own)


def _name(node: ast.expr) -> str:
    """The name of an operand: of a variable, an attribute, or an entry."""
    if isinstance(node, ast.Subscript):
        key = getattr(node.slice, "value", None)
        inner = _name(node.value) if key in WEIGHT_LEAVES else ""  # params["query"]["kernel"]
        return inner or (key if isinstance(key, str) else "")
    if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
        return _name(node.value) if node.attr in WEIGHT_LEAVES else node.attr
    return str(getattr(node, "attr", getattr(node, "id", "")))


def in_axes(whole: Array, axes: str, heads: int, *, output: bool = False, groups: int = 1) -> Array:
    """A matrix with the axes of a weight: (M, H · D), several of them, or an output's (H · D, M).

    An axis of heads may be two, one of `groups` (G) and one of the heads of each (R).

    >>> own, last = np.zeros((6, 8)), np.zeros((8, 6))
    >>> in_axes(own, "HMD", 2).shape, in_axes(last, "HDM", 2, output=True).shape
    ((2, 6, 4), (2, 4, 6))
    >>> in_axes(np.zeros((2, 6, 8)), "MPHD", 2).shape, in_axes(np.zeros((6, 4)), "DM", 1).shape
    ((6, 2, 2, 4), (4, 6))
    >>> in_axes(own, "MRGD", 4, groups=2).shape
    (6, 2, 2, 2)
    """
    known = "P" * (whole.ndim == 3) + ("HDM" if output else "MHD")
    at = known.index("M")
    sizes = {"P": len(whole), "M": whole.shape[-1 if at == len(known) - 1 else -2], "H": heads}
    split = whole.reshape([sizes.get(axis, -1) for axis in known])
    if "G" in axes:
        at, known = known.index("H"), known.replace("H", "GR")
        split = split.reshape(*split.shape[:at], groups, -1, *split.shape[at + 1 :])
    elif "H" not in axes:
        split, known = split.squeeze(known.index("H")), known.replace("H", "")
    return np.ascontiguousarray(split.transpose([known.index(axis) for axis in axes]))

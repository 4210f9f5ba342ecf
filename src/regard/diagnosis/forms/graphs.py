"""Attention over the edges of a graph, called as attention with a mask of cells.

Edges are a list of two rows, or two lists: those of nodes that are read, and of those that read.
What edges have of their own is left out or zero, as is what a node keeps of itself. Must not know
any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import EDGES, Parameter, text_of

# Lists of the nodes that are read, and of those that read them.
SENDS = re.compile("(edge_)?(senders?|src|sources?|from_idx|tails?)(_?(idx|index|ids?))?", re.I)
RECEIVES = re.compile("(edge_)?(receivers?|dst|dest|targets?|to_idx)(_?(idx|index|ids?))?", re.I)
NODES = re.compile("(nodes?|node_?(feat|attr|x|h)\\w*|h|feats?|features)", re.IGNORECASE)
COUNTS = re.compile("(n|num|n_?of|number)_?(of_?)?(nodes|vertices|segments)|[nN]", re.IGNORECASE)
OF_EDGES = re.compile("edge_?(attr|feat|weight|emb|bias|vec|f)", re.IGNORECASE)
# Edges as rows: edges (E, 2).
IN_ROWS = re.compile(r"\(\s*\w*E\w*\s*,\s*2\s*\)|num_edges, 2\b|\[:, *[01]\]", re.IGNORECASE)
# Text that says that the first node of an edge is read by the second one.
DIRECTED = re.compile(
    r"source|sender|sending|\bsrc\b|-> ?i\b|row 0[^.\n]{0,20}\bj\b|"
    r"\bfrom (a |the )?(node|key|neighbou?r)s? to\b",
    re.IGNORECASE,
)
# What a node keeps of itself, beside attention.
KEPT = re.compile(r"(^|[._])(lin_?|w_?)?(skip|root|self_?loop|res(idual)?_?(fc|proj)?)(\W|_|$)")


def of_graph(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str = ""
) -> Alternative | None:
    """A function of nodes and edges as one of tokens and a mask; None if it takes no edges."""
    text = text or text_of(function)
    edges = [one for one in parameters if one.required and EDGES.search(one.name)]
    if not edges:
        sides = [[x for x in parameters if own.fullmatch(x.name)] for own in (SENDS, RECEIVES)]
        edges = [one[0] for one in sides if len(one) == 1]
        if len(edges) != 2 or not all(one.required for one in edges):
            return None
    others = [one for one in parameters if one.required and one not in edges]
    named = [x for x in others if NODES.fullmatch(x.name) or role_of(x.name) in ("x", "query")]
    nodes = next(iter((*named, *others)), None)
    if nodes is None:
        return None
    mask = edges[0].name if len(edges) == 1 else "edges"
    features = [one.name for one in parameters if OF_EDGES.search(one.name)]
    counts = [o.name for o in parameters if o.required and COUNTS.fullmatch(o.name)]
    needed = {one.name for one in parameters if one.required}
    directed = len(edges) > 1 or DIRECTED.search(text) is not None
    is_graph = role_of(nodes.name) != "query"

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        own, rows = dict(given), given[nodes.name]
        if is_graph and len(rows.shape) != 2:
            raise ValueError("the nodes of a graph are rows")
        seen = own.pop(mask, None)
        length = rows.shape[0] if is_graph else np.shape(seen)[-1]
        seen = np.ones((length, length)) if seen is None else np.asarray(seen)
        if not (directed or _is_list(seen) or np.array_equal(seen, seen.T)):
            raise NotImplementedError("nothing says which node of an edge reads the other one")
        listed = _listed(seen, length)
        parts = [listed] if len(edges) == 1 else [*listed]
        if len(edges) == 1 and IN_ROWS.search(text):
            parts = [np.ascontiguousarray(listed.T)]
        own |= {one.name: _like(part, rows) for one, part in zip(edges, parts, strict=True)}
        for name in (one for one in features if one in needed):
            width = _width_of_edges(function)
            own[name] = _like(np.zeros((listed.shape[1], width)), rows)
        return own | dict.fromkeys(counts, length)

    gone = {*counts, *features, *(one.name for one in edges)}
    rest = [replace(one, keyword=True) for one in parameters if one.name not in gone]
    rest = [replace(x, role="x") if x.name == nodes.name and is_graph else x for x in rest]
    keeps = Parameter(mask, "keep", keyword=True, required=not is_graph)
    made = Packing(function, pack)
    made.left_out = (*features, *_without_kept(function))
    return made, [*rest, keeps]


def _is_list(seen: Array) -> bool:
    """Whether an array is a list of edges, and no mask of cells."""
    return seen.dtype.kind in "iu" and len(seen) == 2


def _listed(seen: Array, length: int) -> Array:
    """The edges of a mask of cells, from what is read to what reads it; a list as it comes."""
    if _is_list(seen):
        return seen
    if seen.shape != (length, length) or (not seen.all() and (seen == seen[0]).all()):
        raise ValueError("a graph has a mask of cells, and no padding")
    rows, columns = np.nonzero(seen)
    return np.stack([columns, rows])


def _like(array: Array, other: Any) -> Any:
    """An array of NumPy in the library of another one; floats are of its type."""
    if hasattr(other, "new_tensor"):
        import torch

        found = torch.from_numpy(array)
        return found.to(other.dtype) if array.dtype.kind == "f" else found
    return array.astype(other.dtype) if array.dtype.kind == "f" else array


def _width_of_edges(thing: Any) -> int:
    """How many features an edge has, by the matrix of an object that meets them; else one."""
    if hasattr(thing, "named_parameters"):
        found = [p for n, p in thing.named_parameters() if "edge" in n and p.ndim == 2]
        return int(found[0].shape[1]) if found else 1
    arrays = getattr(thing, "__dict__", {})
    found = [a for n, a in arrays.items() if "edge" in n and getattr(a, "ndim", 0) == 2]
    return int(found[0].shape[0]) if found else 1


def _without_kept(thing: Any) -> list[str]:
    """Fill with zeros the weights of what a node keeps of itself; their names."""
    if hasattr(thing, "named_parameters"):
        found = [n for n, _ in thing.named_parameters() if KEPT.search(n)]
        own = dict(thing.named_parameters())
        for name in found:
            own[name].data.zero_()
        return list(dict.fromkeys(name.rpartition(".")[0] or name for name in found))
    arrays = getattr(thing, "__dict__", {})
    found = [n for n, a in arrays.items() if KEPT.search(n) and getattr(a, "ndim", 0) > 0]
    for name in found:
        setattr(thing, name, 0 * arrays[name])
    return found

"""Which projections a weight holds, as the names say that the code gives to what it computes by it.

`q, k, v, ff = split(h @ p.wi)` says it of wi. Reads the code of a function. Must not call it, nor
know any probe.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from regard.diagnosis.forms.adapting import trees_of
from regard.diagnosis.reading.parameter_names import fused_order, plain, role_of
from regard.diagnosis.reading.signature import globals_of

PRODUCTS = ("einsum", "dot", "matmul", "tensordot", "linear", "mm", "dense", "dot_general")
_LETTERS = {"query": "q", "key": "k", "value": "v"}
OTHER = "."  # columns that are none of queries, keys and values


def columns_assigned(function: Callable[..., Any], layers: Collection[str] = ()) -> dict[str, str]:
    """The letters of each entry of a tree that meets its rows in a product, in their order.

    Or of `layers` of an object that it calls: q, kv = self.wi(h).split(...).

    >>> def block(p, h):
    ...     q, k, v, gate = np.split(h @ p.wi, 4, axis=-1)
    >>> columns_assigned(block)
    {'wi': 'qkv.'}
    """
    found: dict[str, str] = {}
    for own in trees_of(function):
        held: dict[str, str] = {}  # what a name was computed by
        for node in ast.walk(own):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                entry = _entry_in(node.value, held, layers)
                if not entry:
                    continue
                names = [*_names(node.targets[0])]
                letters = "".join(
                    fused_order(one) or _LETTERS.get(role_of(one) or "", OTHER) for one in names
                )
                if len(names) == 1:
                    held[names[0]] = entry
                if letters.strip(OTHER):
                    found.setdefault(entry, letters)
    return found


def multiplied(function: Callable[..., Any]) -> set[str]:
    """The entries of trees that are factors of products in the code, not in those it calls."""
    known = globals_of(inspect.unwrap(function))
    found = set[str]()
    for node in (node for own in trees_of(function) for node in ast.walk(own)):
        helper = getattr(getattr(node, "func", None), "id", "") in known
        found |= set() if helper or not _is_product(node) else {*_multiplied(node)}
    return found


def _names(target: ast.expr) -> Iterator[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    yield from (getattr(one, "id", "") for one in parts)


def _entry_in(value: ast.expr, held: Mapping[str, str], layers: Collection[str]) -> str:
    """The only entry by which an expression multiplies, or the one of the only name that it has."""
    called = (one.func for one in ast.walk(value) if isinstance(one, ast.Call))
    own = (one.attr for one in called if isinstance(one, ast.Attribute))
    entries = {*_multiplied(value), *(one for one in own if one in layers)}
    if not entries:
        names = {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}
        entries = {held[name] for name in names if name in held}
        has_products = any(map(_is_product, ast.walk(value)))
        return entries.pop() if len(entries) == 1 and not has_products else ""
    return entries.pop() if len(entries) == 1 else ""


def _is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    return plain(getattr(node.func, "attr", getattr(node.func, "id", ""))) in PRODUCTS


def _multiplied(value: ast.AST) -> Iterator[str]:
    """The entries that are factors of the products in an expression."""
    for node in ast.walk(value):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            factors = [node.left, node.right]
        elif isinstance(node, ast.Call) and _is_product(node):
            factors = [*node.args]
        else:
            continue
        for one in factors:
            yield from filter(None, [_entry(one)])


def _entry(node: ast.expr) -> str:
    """The name of an entry: p.wi, p["wi"], p["wi"]["w"], p["wi"].T."""
    while isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "w", "kernel", "weight"):
        node = node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr
    if isinstance(node, ast.Subscript):
        key = getattr(node.slice, "value", None)
        inner = _entry(node.value) if isinstance(node.value, ast.Subscript) else ""
        return inner or (key if isinstance(key, str) else "")
    return ""

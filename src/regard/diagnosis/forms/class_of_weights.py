"""Classes whose constructor, or whose method, takes the weights in one tree, as functions of these.

Tells them by their code. Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from regard.diagnosis.forms.adapting import keeps_state
from regard.diagnosis.forms.construction import constructed
from regard.diagnosis.forms.object_readings import method_called
from regard.diagnosis.forms.tree_code import TreeCode
from regard.diagnosis.forms.trees import TREES
from regard.diagnosis.reading.constructor_arguments import is_module
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, parts_of, text_of
from regard.diagnosis.reading.source_text import nodes_of, tree_of

# Code that changes what an object holds.
CHANGES = re.compile(
    r"\bself\.\w+(\[[^\]\n]*\])? *[-+*/]?=(?!=)|\bself\.\w+\.(append|extend|update)\("
)


def as_function_of_weights(kind: Any, method: str) -> Callable[..., Any] | None:
    """A function of the arguments of a class and of its method, if it reads entries of the first.

    It makes an object of the class and calls its method. `__wrapped__` is the class.
    """
    if not inspect.isclass(kind):
        return None
    method = method or method_called(kind)
    try:
        first, *own = inspect.signature(kind).parameters.values()
        asked = [*inspect.signature(getattr(kind, method)).parameters.values()][1:]
    except (TypeError, ValueError):
        return None
    names = {one.name for one in (first, *own)}
    if is_module(kind) or names & {one.name for one in asked} or not _is_tree(kind, first):
        return None
    methods = (pair for part in parts_of(kind) for pair in vars(part).items())
    others = (one for name, one in methods if name != "__init__" and inspect.isfunction(one))
    if any(CHANGES.search(text_of(one)) for one in others):
        return None  # what one call leaves in the object the next one reads

    def made_and_called(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named).arguments
        made = kind(**{name: one for name, one in bound.items() if name in names})
        return getattr(made, method)(**{n: one for n, one in bound.items() if n not in names})

    every = [first, *own, *asked]
    required = [one for one in every if one.default is one.empty]
    ordered = [*required, *(one for one in every if one.default is not one.empty)]
    if any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in ordered):
        return None
    signature = inspect.Signature(ordered)
    made_and_called.__name__ = kind.__name__
    made_and_called.__wrapped__ = kind  # type: ignore[attr-defined]
    made_and_called.__signature__ = signature  # type: ignore[attr-defined]
    return made_and_called


def method_of_weights(thing: Any, method: str, heads: int | None) -> Callable[..., Any] | None:
    """The method of an object, or of one of a class, that takes its weights in a tree."""
    kind = thing if inspect.isclass(thing) else type(thing)
    method = method or method_called(kind)
    if is_module(kind) or not inspect.isfunction(written := getattr(kind, method, None)):
        return None
    for name in [*inspect.signature(written).parameters][1:]:
        if TREES.fullmatch(plain(name)) and {*PROJECTIONS} <= TreeCode(written, name).roles:
            made = constructed(kind, heads)[0] if inspect.isclass(thing) else thing
            bound: Callable[..., Any] = getattr(made, method)
            return None if keeps_state(bound) else bound
    return None


def _is_tree(kind: type, first: inspect.Parameter) -> bool:
    """Whether an argument of a constructor is a tree of parameters, of which the code reads."""
    name = plain(first.name)
    if first.default is not first.empty or role_of(first.name) or not TREES.fullmatch(name):
        return False
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        nodes = [node for one in parts_of(kind) for node in nodes_of(tree_of(one))]
        known = {first.name, *_kept_as(nodes, first.name)}
        return any(
            isinstance(node, ast.Subscript) and ast.unparse(node.value) in known for node in nodes
        )
    return False


def _kept_as(nodes: Sequence[ast.AST], name: str) -> Iterator[str]:
    """The attributes in which code keeps an argument: self.p = params."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = [*zip(target.elts, node.value.elts, strict=False)]
                yield from (
                    ast.unparse(kept) for kept, value in pairs if getattr(value, "id", "") == name
                )

"""Functions of arrays, made of functions that ask for something else: a dictionary, or a cache.

Reads the code of the function for the names of entries. Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.reading.constructor_arguments import CONFIGURATION, configuration
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import Parameter, globals_of, names_in, parts_of, text_of
from regard.diagnosis.reading.source_text import nodes_of, tree_of

WEIGHT_LEAVES = ("kernel", "weight", "weights", "w", "W")
BIAS_LEAVES = ("bias", "b", "B")
# What a method calls that begins anew each time.
BEGINS = re.compile(r"\bself\.(reset|clear)\w*\(\)")
# Methods that may be called again and again.
ONE_CALL = ("forward", "__call__", "step", "decode")
# Methods that change the list, dictionary or array that they belong to.
CHANGING = ("append", "extend", "update", "copy_", "index_copy_")
# Those of the classes of a file that keep keys and values.
FILLING = (*CHANGING, "add", "push", "insert", "write", "store", "put", "prefill", "set")
CACHE = re.compile("cache|buf|past|kv|ring|window|pages|pool", re.IGNORECASE)

SCALAR = re.compile("attentionmultiplier$|attnscale$")
# Roles of numbers whose names, H and D, are those of matrices too.
OF_NUMBERS = ("heads", "key_heads", "width", "block", "window", "pos")


class Adapted:
    """A function of arrays that calls another with some of them in a dictionary.

    `__wrapped__` is the function itself, so that its library is found.
    """

    by_head: bool | None = None  # whether a fused matrix has one head's columns after another's
    left_out: tuple[str, ...] = ()  # what is fixed so that it changes nothing
    has_table = False  # whether a table of distances is among what is fixed

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any], packed: str) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self._fixed, self._packed = fixed, packed

    def __call__(self, **given: Any) -> Any:
        """Call the function, with its fixed arguments."""
        own = dict(self._fixed)
        if self._packed:
            prefix = f"{self._packed}_"
            entries = [name for name in given if name.startswith(prefix)]
            own[self._packed] = {name[len(prefix) :]: given.pop(name) for name in entries}
        return self.__wrapped__(**given, **own)


class WithSink:
    """An object whose sink is an argument of the call. `__wrapped__` is the object."""

    def __init__(self, thing: Any, name: str) -> None:
        self.__wrapped__ = thing
        self.__name__ = type(thing).__name__
        self._name = name

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the object with another sink of each head."""
        own = getattr(self.__wrapped__, self._name)
        sink = named.pop(self._name)  # of as many heads as a probe has
        sink = sink.reshape([len(sink) if size > 1 else 1 for size in own.shape])
        if hasattr(self.__wrapped__, "named_parameters"):
            import torch

            return torch.func.functional_call(self.__wrapped__, {self._name: sink}, given, named)
        setattr(self.__wrapped__, self._name, sink)
        return self.__wrapped__(*given, **named)


def with_sink(
    thing: Any, parameters: Sequence[Parameter]
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """An object of queries, keys and values as a function of its sink, too, if it has one."""
    if not callable(thing) or not any(role_of(one.name) == "query" for one in parameters):
        return None
    own = vars(thing) | dict(getattr(thing, "_parameters", {}))
    names = [n for n, one in own.items() if role_of(n) == "sink" and hasattr(one, "reshape")]
    if len(names) != 1 or any(role_of(one.name) == "sink" for one in parameters):
        return None
    return WithSink(thing, names[0]), [*parameters, Parameter(names[0], "sink", keyword=True)]


def from_dictionary(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """The function as one of arrays, if its only required parameter is a dictionary of them."""
    required = [one for one in parameters if one.required]
    if len(required) != 1:
        return None
    name = required[0].name
    needed, asked = entries_of(function, name)
    if not needed or not any(role_of(one) in ("query", "x") for one in needed):
        return None
    inner = [
        Parameter(f"{name}_{entry}", role_of(entry), entry in needed, keyword=True)
        for entry in dict.fromkeys((*needed, *asked))
        if entry.isidentifier()
    ]
    rest = [replace(one, keyword=True) for one in parameters if not one.required]
    return Adapted(function, {}, name), [*inner, *rest]


def as_used(parameters: Sequence[Parameter], text: str) -> list[Parameter]:
    """With the role of embeddings for a name of a number, such as H, that code uses as a matrix."""
    found: list[Parameter] = []
    for one in parameters:
        name = re.escape(one.name)
        used = rf"(?<![\w.]){name}\s*(@|\.(shape|T|dot|transpose|swapaxes)\b)|@\s*{name}\b(?!\.)"
        if role_of(one.name) in OF_NUMBERS and re.search(used, text):
            first = any(role_of(other.name) in ("x", "query") for other in found)
            one = replace(one, role="context" if first else "x")
        is_given = one.required or one.default is not None
        if is_given and SCALAR.search(plain(one.name)):  # whatever the width of its heads
            rooted = rf"\b{name} *\*\* *-|sqrt\( *{name}\b|{name}\) *\*\* *-"
            role = "width" if re.search(rooted, text) else "scale"
            one = replace(one, role=role, required=True, keyword=True)
        found.append(one)
    return found


def as_self_attention(own: Any, method: str, known: list[Parameter]) -> list[Parameter]:
    """Without keys and values, if an option of the object has them replaced by the queries.

    As in: if self.self_attention: key = value = query.
    """
    named = {role_of(one.name): one.name for one in known}
    gone = {named[one] for one in ("key", "value") if one in named}
    q, names = named.get("query"), "|".join(map(re.escape, gone))
    if q is None or len(gone) < 2:
        return known
    chained = rf"^({names}) = ({names}) = {q}$|^\(?({names}), ({names})\)? = \(?{q}, {q}\)?$"
    for node in nodes_in(getattr(own, method)):
        match node:
            case ast.If(test=ast.Attribute(value=ast.Name(id="self"), attr=option)):
                body = "\n".join(map(ast.unparse, node.body))
            case _:
                continue
        if getattr(own, option, False) and re.search(chained, body, re.MULTILINE):
            return [
                replace(one, role="x" if one.name == q else one.role)
                for one in known
                if one.name not in gone
            ]
    return known


def with_configuration(
    function: Callable[..., Any], parameters: Sequence[Parameter], heads: int
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """The function with sizes and switches in the configuration that it asks for, if it does."""
    known: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):
        known = inspect.signature(function).parameters
    for one in known.values():
        own = next((p for p in parameters if p.name == one.name and p.required), None)
        if own is None or not CONFIGURATION.fullmatch(plain(one.name)):
            continue
        if any(_attributes_of(function, one.name)) or entries_of(function, one.name)[0]:
            made = configuration(inspect.unwrap(function), one, heads)
            rest = [replace(p, keyword=True) for p in parameters if p is not own]
            return Adapted(function, {one.name: made}, ""), rest
    return None


def keeps_state(method: Callable[..., Any]) -> bool:
    """Whether a method, with those that it calls, changes an attribute that it has read before."""
    if BEGINS.search(text_of(method)):
        return False
    kind = type(getattr(method, "__self__", None))
    own: list[Any] = [method]
    for one in own:  # and what these call, which are put behind them
        called = (getattr(kind, name, None) for name in names_in(one))
        known = [other for other in called if inspect.isfunction(other) and other not in own]
        own += [other for other in known if other.__module__ == method.__module__]
    changed, read, begun, counted = set[str](), set[str](), set[str](), set[str]()
    for tree in itertools.islice(trees_of(method), 1):
        if _numbers_tokens(tree):
            return False
        first = _uses_of_attributes(tree)[1]
        begun = {name for name, line in _begun(tree) if line < first.get(name, line + 1)}
    for tree in itertools.chain.from_iterable(itertools.islice(trees_of(one), 1) for one in own):
        set_at, read_at = _uses_of_attributes(tree)
        # What is set before it is read is what this call computes.
        read |= {name for name, line in read_at.items() if line <= set_at.get(name, line)}
        changed |= set_at.keys()
        added = (one.target for one in ast.walk(tree) if isinstance(one, ast.AugAssign))
        counted |= {name for one in added if (name := _attribute(one))}
    loops = re.search(r"\bself\.\w+\([^\n]* for |^ +for [^\n]*:$", text_of(method), re.MULTILINE)
    if begun & counted and (loops or method.__name__ not in ONE_CALL):
        return False  # it counts from the beginning, and takes one token after the other
    return bool(changed & read - begun)


def _numbers_tokens(tree: ast.AST) -> bool:
    """Whether code tells another method of self the number of each token, from 0 in every call."""
    numbers = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
            counts = getattr(node.iter.func, "id", ""), len(node.iter.args)
            if counts in (("enumerate", 1), ("range", 1)):
                first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                numbers.add(getattr(first, "id", ""))
    calls = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _attribute(node.func) == getattr(node.func, "attr", None)
    )
    given = (one for call in calls for one in (*call.args, *(key.value for key in call.keywords)))
    return any(isinstance(one, ast.Name) and one.id in numbers for one in given)


def _begun(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The attributes of self that code makes anew without a condition, and in which line."""
    for statement in getattr(tree.body[0], "body", []) if isinstance(tree, ast.Module) else []:
        for target in statement.targets if isinstance(statement, ast.Assign) else []:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and (name := _attribute(part)):
                    yield name, part.lineno


def _uses_of_attributes(tree: ast.AST) -> tuple[dict[str, int], dict[str, int]]:
    """The attributes of self that are changed, and that are read, with the first line of each."""
    set_at, read_at = dict[str, int](), dict[str, int]()
    short = {  # c = self.cache
        getattr(target, "id", ""): _attribute(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }

    def note(where: dict[str, int], node: ast.expr) -> None:
        for part in node.elts if isinstance(node, ast.Tuple) else [node]:
            if name := _attribute(part, short):
                where[name] = min(part.lineno, where.get(name, part.lineno))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                note(set_at, target)
                if isinstance(target, ast.Subscript):  # a part of it: the rest is kept
                    note(read_at, target)
        elif isinstance(node, ast.AugAssign):
            note(set_at, node.target)
            note(read_at, node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = _attribute(node.func, short)
            names = FILLING if CACHE.search(own) else CHANGING
            if own != node.func.attr and node.func.attr in names:  # and no method of its own
                note(set_at, node.func)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            note(read_at, node)
    return set_at, read_at


def _attribute(node: ast.expr, short: Mapping[str, str] | None = None) -> str:
    """The name of an attribute of self, also where a part of it is meant; or nothing.

    `short` are names that mean attributes, of which parts may be meant.
    """
    whole = node
    while isinstance(node, ast.Subscript | ast.Attribute):
        own, node = node, node.value
        if isinstance(own, ast.Attribute) and getattr(node, "id", "") == "self":
            return own.attr
    return (short or {}).get(getattr(node, "id", ""), "") if node is not whole else ""


def _attributes_of(function: Callable[..., Any], name: str) -> Iterator[str]:
    """The attributes that the code reads of something with this name."""
    for node in nodes_in(function):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == name:
            yield node.attr


def nodes_in(function: Callable[..., Any]) -> Iterator[ast.AST]:
    """Every node of the code of a function, and of those of its module that it names."""
    return itertools.chain.from_iterable(map(nodes_of, trees_of(function)))


def unread_of(function: Callable[..., Any], names: Sequence[str]) -> tuple[str, ...]:
    """The arguments of these that the function's own code never reads."""
    tree = next(trees_of(function), None)
    if tree is None:
        return ()
    loaded = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)
    }
    return tuple(name for name in names if name not in loaded)


def trees_of(function: Callable[..., Any]) -> Iterator[ast.Module]:
    """The code of a function, and of those of its module that it names."""
    inner = inspect.unwrap(function)
    names = names_in(inner)
    known = globals_of(inner)
    others = (known.get(name) for name in names)
    own = parts_of(inner) if inspect.isclass(inner) else [inner]
    for one in (*own, *(other for other in others if inspect.isfunction(other))):
        try:
            yield tree_of(one)
        except (OSError, TypeError, SyntaxError):
            continue


def spreads(function: Callable[..., Any], name: str) -> bool:
    """Whether the code spreads a dictionary with this name over a call."""
    calls = (one for one in nodes_in(function) if isinstance(one, ast.Call))
    keywords = (k for one in calls for k in one.keywords)
    return any(k.arg is None and _dictionary(k.value) == name for k in keywords)


def _dictionary(node: ast.expr) -> str:
    """The name of a dictionary that is spread over a call: that of an entry, or of a variable."""
    key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return key if isinstance(key, str) else str(getattr(node, "id", ""))


def spread_over(function: Callable[..., Any], name: str | None) -> Iterator[str]:
    """The entries of a dictionary `name` of weights that the code reads, or spreads over a call."""
    for node in nodes_in(function):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == name:
            entry = getattr(node.slice, "value", None)
            yield from [entry] if isinstance(entry, str) else []
        if not isinstance(node, ast.Call):
            continue
        spread = [_dictionary(one.value) for one in node.keywords if one.arg is None]
        if spread and name in (None, *spread):
            called = getattr(node.func, "id", "")
            inner = getattr(inspect.unwrap(function), "__globals__", {}).get(called)
            if inspect.isfunction(inner):
                yield from inspect.signature(inner).parameters


def entries_of(function: Callable[..., Any], name: str) -> tuple[list[str], list[str]]:
    """The entries of a parameter that the code reads, and those that it asks for with get."""
    needed, asked = [], []
    for node in nodes_in(function):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == name:
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                needed.append(node.slice.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and getattr(node.func.value, "id", "") == name:
                asked += [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            own = getattr(node.comparators[0], "id", "") == name  # "mask" in inputs
            asked += [node.left.value] if own else []
    return [one for one in needed if one not in asked], [str(one) for one in asked]

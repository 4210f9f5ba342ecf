"""Gradients as a user's code computes them: by autograd, or by a backward pass written beside it.

Owns what a backward pass looks like: its names, how it is found beside its forward pass, and which
gradient is which. Must not know probes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from regard.diagnosis.forms.construction import constructed
from regard.diagnosis.reading.parameter_names import is_upstream, plain, role_of
from regard.diagnosis.reading.signature import DIFFERENTIATED, WEIGHTS, Callee
from regard.diagnosis.reading.source_text import tree_of
from regard.errors import OptionError, safe_text

# What a name says about the direction of a pass, and the other direction.
_DIRECTIONS = (
    ("backward", "forward"),
    ("bwd", "fwd"),
    ("back", "forward"),
    ("vjp", ""),
    ("grad", ""),
)
# What is put before or after an input's name in the name of its gradient.
_PREFIXES = ("dldo", "dld", "dloss", "grad", "gradient", "dl", "d", "g")
_SUFFIXES = ("gradient", "grad", "bar")


# What may have a gradient in a backward pass beside what attention reads.
BESIDE = (*WEIGHTS, "sink")


class NoGradientError(Exception):
    """Nothing differentiates this output, as where it was made without gradients."""


@dataclass(frozen=True)
class Pair:
    """A forward pass and the backward pass written for it.

    What the forward pass returns beside its output, if anything, is handed to the backward pass.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    holder: Any = None  # the object whose methods they are
    name: str = ""
    of_width: Callable[[int], Any] | None = None  # an object of its class, for queries so wide

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What the forward pass returns."""
        return self._made_for(*arguments, *options.values()).forward(*arguments, **options)

    def _made_for(self, queries: Any, *rest: Any) -> Pair:
        if self.of_width is None:
            return self
        own = self.of_width(int(queries.shape[-1]))
        return Pair(getattr(own, "forward", own), own.backward, own, self.name)

    def gradients(self, upstream: Any, *arguments: Any, **options: Any) -> Any:
        """What the backward pass returns, or leaves in the object."""
        if self.of_width is not None:
            made = self._made_for(*arguments, *options.values())
            return made.gradients(upstream, *arguments, **options)
        returned = self.forward(*arguments, **options)
        several = isinstance(returned, tuple | list) and len(returned) > 1
        cache = (returned[1] if len(returned) == 2 else returned[1:]) if several else None
        names = [one.name for one in _required(self.backward)]
        own = inspect.signature(self.forward).bind(*arguments, **options).arguments
        given = [upstream if is_upstream(name) else own.get(name, cache) for name in names]
        if len(names) == 1 or not any(map(is_upstream, names)):
            given = [upstream, cache][: len(names)]
        known = inspect.signature(self.backward).parameters
        rest = {n: one for n, one in own.items() if n in known and n not in names}
        found = self.backward(*given, **rest)
        if found is None and self.holder is not None:
            found = {n: one for n, one in vars(self.holder).items() if gradient_of(n)}
        return found


def pair_of(thing: Any) -> Pair | None:
    """The two passes that something has: a tuple of them, an object, or a backward pass's file."""
    if isinstance(thing, tuple):
        if len(thing) != 2 or not all(callable(one) for one in thing):
            raise OptionError(
                "diagnose takes a forward and a backward pass as (forward, backward), two functions"
            )
        return Pair(*thing, name=getattr(thing[0], "__name__", "forward"))
    if inspect.isfunction(thing):
        forward = _forward_of(thing)
        return None if forward is None else Pair(forward, thing, name=thing.__name__)
    if not callable(getattr(thing, "backward", None)) or hasattr(thing, "parameters"):
        return None
    if inspect.isclass(thing):
        if _base_of(thing) is not None:
            return None
        thing = constructed(thing, None)[0]
    forward = getattr(thing, "forward", thing)
    own = type(thing).__name__
    return Pair(forward, thing.backward, thing, own) if callable(forward) else None


def _forward_of(backward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The forward pass beside a backward pass that takes only dO and what that one has kept.

    What was kept may be called ctx or memory, as a context is that queries read.
    """
    names = [one.name for one in _required(backward)]
    roles = [role_of(one) for one in names]
    if not any(map(is_upstream, names)) or ({*roles} - {"context"}) & {*DIFFERENTIATED}:
        return None
    name, beside = backward.__name__.lower(), getattr(backward, "__globals__", {})
    for word, other in _DIRECTIONS:
        if word in name:
            wanted = name.replace(word, other).strip("_")
            for own, one in beside.items():
                if own.lower().strip("_") == wanted and inspect.isfunction(one):
                    return one
    raise OptionError(
        f"{safe_text(backward.__name__, 60)} takes what a forward pass has kept, and no forward "
        "pass is found beside it; give both, as in diagnose((forward, backward)), or name them "
        "alike, such as attention_forward and attention_backward"
    )


def _required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in found if one.kind in kinds and one.default is one.empty]


class Applied:
    """A torch.autograd.Function as a function: `apply` takes no keywords and no defaults."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.__name__ = kind.__name__
        self.__doc__ = kind.__doc__
        found = [*inspect.signature(kind.forward).parameters.values()]
        keeps = kind.setup_context is not _base_of(kind).setup_context  # forward has no ctx then
        self.__signature__ = inspect.Signature(found if keeps else found[1:])

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """What `apply` returns for all parameters in their order."""
        bound = self.__signature__.bind(*arguments, **options)
        bound.apply_defaults()
        return self.kind.apply(*bound.args)


def is_autograd_function(thing: Any) -> bool:
    """Whether something is a subclass of torch.autograd.Function."""
    return inspect.isclass(thing) and _base_of(thing) is not None


def _base_of(kind: Any) -> Any:
    bases = (one for one in kind.__mro__[1:] if one.__module__.startswith("torch.autograd"))
    return next((one for one in bases if one.__name__ == "Function"), None)


# --- computing gradients -------------------------------------------------------------------------


def by_torch(
    call: Callable[[Mapping[str, Any]], Any],
    passed: Mapping[str, Any],
    wrt: Sequence[str],
    upstream: Any,
    place: int,
) -> dict[str, Any]:
    """The gradients of array number `place` among the results, by the names of arguments."""
    import torch

    with torch.enable_grad():
        leaves = {name: passed[name].detach().requires_grad_() for name in wrt}
        # A copy may be changed in place, as a number inside a model may.
        own = {name: leaf.clone() for name, leaf in leaves.items()}
        output = nth_array(call({**passed, **own}), place)
        if not getattr(output, "requires_grad", False):
            raise NoGradientError("its output carries no gradient")
        given = upstream.to(output.dtype).reshape(output.shape)
        found = torch.autograd.grad(output, [*leaves.values()], given, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if one is None else one for (name, leaf), one in pairs}


def by_jax(
    call: Callable[[Mapping[str, Any]], Any],
    passed: Mapping[str, Any],
    wrt: Sequence[str],
    upstream: Any,
    place: int,
) -> dict[str, Any]:
    """The gradients of array number `place` among the results, by the names of arguments."""
    import jax
    import jax.numpy as jnp

    def output(own: Mapping[str, Any]) -> Any:
        return nth_array(call({**passed, **own}), place)

    value, pullback = jax.vjp(output, {name: passed[name] for name in wrt})
    (found,) = pullback(jnp.asarray(upstream, value.dtype).reshape(value.shape))
    return dict(found)


def nth_array(result: Any, place: int) -> Any:
    """Array number `place` of what a call returned, as the library that made it has it."""
    arrays = [one for one in parts_of(result) if hasattr(one, "shape")]
    return arrays[place]


def parts_of(result: Any) -> list[Any]:
    """What a call returned, one by one."""
    if is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        return list(result.values())
    return list(result) if isinstance(result, tuple | list) else [result]


# --- which gradient is which ---------------------------------------------------------------------


def gradient_of(name: str) -> str | None:
    """The role of the input that a name says the gradient of.

    >>> gradient_of("dQ"), gradient_of("grad_value"), gradient_of("k_bar"), gradient_of("dS")
    ('query', 'value', 'key', None)
    >>> gradient_of("dWq"), gradient_of("grad_b_o"), gradient_of("dsinks")
    ('W_q', 'b_o', 'sink')
    """
    name = plain(name)
    inner = [name.removeprefix(one) for one in _PREFIXES if name.startswith(one)]
    inner += [name.removesuffix(one) for one in _SUFFIXES if name.endswith(one)]
    roles = (role_of(one) for one in inner if one != "s")  # the scores
    return next((role for role in roles if role in (*DIFFERENTIATED, *BESIDE)), None)


def roles_wanted(callee: Callee) -> tuple[str, ...]:
    """The roles of the arguments whose gradients are asked for.

    Of a backward pass that says what it returns, these alone, weights among them.
    """
    own = tuple(role for role in DIFFERENTIATED if role in callee.roles)
    if not (callee.is_backward or callee.paired):
        return own
    found = [gradient_of(name) for name in callee.returns]
    if found.count(None) == len(own):  # those of the inputs, which have no names, and others
        own_ones = iter(own)
        found = [next(own_ones) if one is None else one for one in found]
    said = tuple(one for one in (*own, *BESIDE) if one in callee.roles and one in found)
    return said if said and ({*own} <= {*said} or all(found)) else own


def inputs_wanted(callee: Callee) -> tuple[str, ...]:
    """The inputs of a probe whose gradients are asked for; nothing for those of all arrays."""
    wanted = roles_wanted(callee)
    of_object = "sink" in callee.weights  # a number that it keeps
    beside = "sink" in callee.roles and callee.kind in ("packed", "self")
    if of_object or (beside and "sink" not in wanted):
        return ("queries", "keys", "values", "embeddings", "context")
    all_of_them = {*wanted} == {*DIFFERENTIATED, "sink"} & callee.roles.keys()
    if callee.kind in ("packed", "self") or all_of_them:
        return ()
    arrays = {"query": "queries", "key": "keys", "value": "values"}
    if callee.kind == "projected":
        arrays = {"query": "embeddings", "x": "embeddings", "key": "context"}
    return tuple(arrays.get(role, role) for role in wanted)


def returned_gradients(function: Any) -> tuple[str, ...]:
    """The names of what a function returns last, each "" where it says no gradient's name.

    They may be the entries of a dictionary, or what a function that it calls returns.
    """
    try:
        function = inspect.unwrap(function)
        tree = tree_of(function).body[0]
    except (OSError, TypeError, ValueError, SyntaxError, IndexError):
        return ()
    beside = getattr(function, "__globals__", {})
    values = [_names_in(one.value, tree, beside) for one in _returns(tree)]
    return next((names for names in reversed(values) if names), ())


def _names_in(value: ast.expr | None, tree: ast.AST, beside: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of gradients in what is returned; nothing where it is one thing without parts."""
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            found = (_names_in(one, tree, {}) or (_named(one),) for one in parts)
            return tuple(itertools.chain(*found))
        case ast.Dict(keys=keys):
            return tuple(_gradient_said(key) for key in keys)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            return tuple(_gradient_said(ast.Constant(one.arg)) for one in keywords)
        case ast.Call(func=ast.Name(id=name)) if name != getattr(tree, "name", ""):
            return returned_gradients(beside[name]) if inspect.isfunction(beside.get(name)) else ()
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (*_names_in(left, tree, beside), *_names_in(right, tree, beside))
        case ast.Subscript(slice=ast.Constant() as key):
            return (_gradient_said(key),) * bool(_gradient_said(key))
        case ast.Name(id=name):
            return _entries_set(name, tree) or (name,) * (gradient_of(name) is not None)
    return ()


def _entries_set(name: str, tree: ast.AST) -> tuple[str, ...]:
    """The entries of a dictionary that code makes under a name."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=own)], value=ast.Dict() | ast.Call() as value):
                found += _names_in(value, ast.Module([], []), {}) if own == name else ()
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id=own), slice=ast.Constant() as key)]
            ) if own == name:
                found.append(_gradient_said(key))
    return tuple(found)


def _gradient_said(key: ast.expr | None) -> str:
    """The name of a gradient under an entry: `dWq`, or `Wq` itself."""
    name = str(getattr(key, "value", ""))
    return name if gradient_of(name) else f"d_{name}" if gradient_of(f"d_{name}") else ""


def _returns(tree: ast.AST) -> Iterator[ast.Return]:
    """The returns of a function itself, not of those inside it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(node)


def _named(value: ast.expr) -> str:
    names = {one.id for one in ast.walk(value) if isinstance(one, ast.Name) and gradient_of(one.id)}
    return names.pop() if len(names) == 1 else ""

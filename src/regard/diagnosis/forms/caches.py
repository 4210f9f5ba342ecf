"""Functions that need a cache: what an empty one may be, by the file's own maker or by guessing.

Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import numpy as np

from regard.diagnosis.forms.adapting import CHANGING, entries_of, trees_of
from regard.diagnosis.reading.constructor_arguments import MODEL_NAMES, size_by_name
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import Parameter, names_in, text_of

LONGEST_CACHE = 64  # tokens, more than a probe has
_MAKES = "init|initial(ize)?|make|create|new|empty|alloc(ate)?|build|get|fresh|start|zeros?|blank"
MAKER = re.compile(
    rf"^_?({_MAKES})_?\w*(cache|state|carry|past|memory|kv|buffer)\w*$", re.IGNORECASE
)
MAKING_METHOD = re.compile(rf"^({_MAKES})(_\w+)?$", re.IGNORECASE)
Sizes = tuple[int, int, int]  # of the batch, the heads, and a head's width


class Remembering:
    """An object that keeps state between calls, or a function with a cache: each question anew.

    `begin` makes a new copy of the object. If the function needs a cache, the first call tries what
    an empty one may be, and keeps the first with which the output of one token is its value.
    """

    def __init__(
        self,
        thing: Any,
        method: str,
        cache: str = "",
        value: str = "",
        heads: int | None = None,
    ) -> None:
        self.__wrapped__ = thing if not method else getattr(thing, method)
        self.__name__ = getattr(thing, "__name__", type(thing).__name__)
        self._thing, self._method, self._cache, self._value = thing, method, cache, value
        self._own, self._heads = thing, heads
        self._kept: dict[int, int] = {}  # for each number of axes, which of the caches
        # What the function changes in place, if it does not return it.
        self.in_place = bool(cache) and _changes(self.__wrapped__, cache)
        self.given: Any = None

    @property
    def is_pure(self) -> bool:
        """Whether a call leaves nothing behind."""
        return not self._method and bool(self._kept) and not self.in_place

    def begin(self) -> None:
        """Forget every earlier call."""
        if self._method:
            self._own = copy.deepcopy(self._thing)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function, with an empty cache for None."""
        function = getattr(self._own, self._method) if self._method else self._own
        if not self._cache or named.get(self._cache) is not None:
            return function(*given, **named)
        arrays = (one for one in named.values() if hasattr(one, "shape") and one.ndim)
        like = named.get(self._value, next(arrays))  # there may be fewer heads of keys
        counts = {role_of(name): one for name, one in named.items() if type(one) is int}
        heads = self._heads or counts.get("heads")
        empty = [*_made(self.__wrapped__, self._cache, like, heads, counts.get("key_heads"))]
        empty = empty or [*_empty_caches(self.__wrapped__, self._cache, like)]
        if like.ndim not in self._kept:
            self._kept[like.ndim] = self._first_that_fits(function, given, named, empty)
        self.given = empty[self._kept[like.ndim]]
        return function(*given, **{**named, self._cache: self.given})

    def _first_that_fits(
        self,
        function: Callable[..., Any],
        given: Sequence[Any],
        named: Mapping[str, Any],
        empty: Sequence[Any],
    ) -> int:
        """The first cache with which a token's output is its value, or else that runs."""
        runs: list[int] = []
        for number, cache in enumerate(empty):
            with contextlib.suppress(Exception):
                own = copy.deepcopy(cache)
                out = function(*given, **{**named, self._cache: own})
                later = out[1] if isinstance(out, tuple | list) and len(out) == 2 else own
                if 0 < size_of(cache) < size_of(later):  # it grows: these rows would be keys
                    continue
                runs.append(number)
                first = out[0] if isinstance(out, tuple | list) else out
                output, value = np.asarray(first), np.asarray(named[self._value])
                if output.size == value.size and np.allclose(output.ravel(), value.ravel()):
                    return number
        return (*runs, 0)[0]


class OneText(Remembering):
    """A function of a batch of one text, as one of a text (L, M). `__wrapped__` is the function."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, "")
        self._name = name

    @property
    def is_pure(self) -> bool:
        """Whether a call leaves nothing behind."""
        return not isinstance(self.__wrapped__, Remembering)

    def begin(self) -> None:
        """Forget every earlier call."""
        if isinstance(self.__wrapped__, Remembering):
            self.__wrapped__.begin()

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The output of the text alone."""
        x, *rest = given or (named.pop(self._name),)
        if x.ndim != 2:
            raise TypeError("it takes one text")
        result = self.__wrapped__(x[None], *rest, **named)
        return (result[0] if isinstance(result, tuple) else result)[0]


def with_one_text(
    target: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> OneText | None:
    """The same for a batch of one text, if the text says that it has one: x: (1, T, dim)."""
    required = [one.name for one in parameters if one.required]
    if len(required) != 1:
        return None
    says = rf"\b{re.escape(required[0])}\b[^\n]{{0,12}}\(1, *[a-zA-Z_]\w*, *\w+\)"
    return OneText(target, required[0]) if re.search(says, text) else None


def size_of(cache: Any) -> int:
    """How many numbers the arrays of a cache have together."""
    if isinstance(cache, Mapping):
        cache = [*cache.values()]
    if isinstance(cache, tuple | list):
        return sum(map(size_of, cache))
    shape = getattr(cache, "shape", None)
    return int(np.prod(tuple(shape))) if shape is not None and len(shape) > 1 else 0


def _changes(function: Callable[..., Any], name: str) -> bool:
    """Whether code changes a parameter in place: an entry, an attribute, or by a method."""
    return any(_changes_in(tree, name) for tree in trees_of(function))


def _changes_in(tree: ast.AST, name: str) -> bool:
    names = {name, *_other_names(tree, name)}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGING:
            targets = [node.func]
        parts = [one.elts if isinstance(one, ast.Tuple) else [one] for one in targets]
        for target in itertools.chain.from_iterable(parts):
            own = target
            while isinstance(own, ast.Subscript | ast.Attribute):
                own = own.value
            if own is not target and getattr(own, "id", "") in names:
                return True
    return False


def fills_dictionary(function: Callable[..., Any], name: str) -> bool:
    """Whether code puts entries with names of their own into a parameter, and returns it nowhere.

    It may be empty at first: the code asks what it has, or whether it has anything.
    """
    named, asked = False, False
    for tree in _trees_of_methods(function):
        names = {name, *_other_names(tree, name)}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=targets):
                    for one in targets:
                        parts = one.elts if isinstance(one, ast.Tuple) else [one]
                        named |= any(_entry_of(part) in names for part in parts)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=own), attr="update")):
                    named |= own in names
                case ast.Call(func=ast.Attribute(value=ast.Name(id=own), attr="get")):
                    asked |= own in names
                case (
                    ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=own)])
                    | ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=own))
                    | ast.If(test=ast.Name(id=own))
                    | ast.IfExp(test=ast.Name(id=own))
                ):
                    asked |= own in names
                case ast.Return(value=ast.Tuple(elts=parts)):
                    if any(getattr(part, "id", "") in names for part in parts):
                        return False
    return named and asked


def _trees_of_methods(function: Callable[..., Any]) -> Iterator[ast.AST]:
    """The code of a function, and of the methods of the same object that it names."""
    kind = type(getattr(function, "__self__", None))
    named = (getattr(kind, one, None) for one in names_in(inspect.unwrap(function)))
    yield from itertools.islice(trees_of(function), 1)
    for one in named:
        if inspect.isfunction(one):
            yield from itertools.islice(trees_of(one), 1)


def _entry_of(node: ast.expr) -> str:
    """The name of a dictionary of which this is the entry under a text; or nothing."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        key = node.slice
        is_text = isinstance(key, ast.JoinedStr) or isinstance(getattr(key, "value", None), str)
        return node.value.id if is_text else ""
    return ""


def _other_names(tree: ast.AST, name: str) -> Iterator[str]:
    """Names for the same thing, or for an entry of it: saved = {} if state is None else state."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        match node.value:
            case ast.IfExp(body=body, orelse=other):
                values = [body, other]
            case ast.BoolOp(values=several):
                values = several
            case ast.Call(func=ast.Attribute(value=inner, attr="get" | "setdefault")):
                values = [inner]
            case ast.Subscript(value=inner):
                values = [inner]
            case value:
                values = [value]
        if any(getattr(one, "id", "") == name for one in values):
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))


def _empty_caches(function: Callable[..., Any], name: str, like: Any) -> Iterator[Any]:
    """What an empty cache may be, the likeliest first; `like` is an array of new tokens."""
    shape, axes = tuple(like.shape), range(like.ndim + 1)
    inserted = [(*shape[:n], LONGEST_CACHE, *shape[n:]) for n in axes[:-1] or axes]
    longer = [(*shape[:n], LONGEST_CACHE, *shape[n + 1 :]) for n in range(max(1, like.ndim - 1))]
    none = [(*one[:n], 0, *one[n + 1 :]) for one in (shape,) for n in range(max(1, like.ndim - 1))]
    none += [(*shape[:n], 0, *shape[n:]) for n in axes[:-1]]

    def zeros(size: tuple[int, ...]) -> Any:
        return like.new_zeros(size) if hasattr(like, "new_zeros") else _zeros_like(like, size)

    kind = annotated(function, name)
    needed, asked = entries_of(function, name)
    names = [*dict.fromkeys((*needed, *asked, *fields_of(kind)))]
    make: Callable[..., Any] = dict if kind is None else kind
    for size in (*inserted, *longer, *none) if names else ():
        with contextlib.suppress(TypeError, ValueError):
            yield make(**{one: zeros(size) if _holds_tokens(one) else 0 for one in names})
    nothing: tuple[Any, ...] = ([], None)
    for empty in nothing if names else ():
        with contextlib.suppress(TypeError, ValueError):
            yield make(**{one: copy.copy(empty) if _holds_tokens(one) else 0 for one in names})
    yield None
    for size in none:
        yield zeros(size), zeros(size)
    yield [], []
    yield {}
    yield []
    yield [None]  # one layer's
    for size in (*inserted, *longer):
        yield zeros(size), zeros(size)
        yield zeros(size), zeros(size), 0


def _zeros_like(like: Any, size: tuple[int, ...]) -> Any:
    made = np.zeros(size, str(like.dtype))
    return made if isinstance(like, np.ndarray) else like.__array_namespace__().asarray(made)


def _holds_tokens(name: str) -> bool:
    """Whether an entry of a cache has keys or values, and not a position."""
    return plain(name)[:1] in "kvx" or "key" in name.lower() or "val" in name.lower()


# --- the file's own maker -------------------------------------------------------------------------


def annotated(function: Callable[..., Any], name: str) -> Any:
    """The NamedTuple or dataclass that a parameter is said to be, if it is one."""
    inner = inspect.unwrap(function)
    said = getattr(inner, "__annotations__", {}).get(name)
    known = getattr(inner, "__globals__", {})
    words = re.findall(r"\w+", said) if isinstance(said, str) else []
    parts = [*map(known.get, words), said, *get_args(said)]  # Optional[Cache], Cache | None
    return next((one for one in parts if inspect.isclass(one) and [*fields_of(one)]), None)


def fields_of(kind: Any) -> Iterator[str]:
    """The names of the fields of a NamedTuple or a dataclass."""
    if is_dataclass(kind):
        yield from (one.name for one in fields(kind) if one.init)
    else:
        yield from getattr(kind, "_fields", ())


def _made(
    function: Callable[..., Any], name: str, like: Any, heads: int | None, key_heads: int | None
) -> Iterator[Any]:
    """Empty caches of the function or the class of the same file that makes them."""
    makers = [*_makers(function, name)]
    for maker in makers:
        for sizes in _sizes(like, heads):
            with contextlib.suppress(Exception):
                made = maker(**_arguments(maker, sizes, like, key_heads))
                if made is not None:
                    yield _in_dtype(made, like)


def _makers(function: Callable[..., Any], name: str) -> Iterator[Callable[..., Any]]:
    """Functions called init_cache and the like, and methods and classes of caches."""
    inner = inspect.unwrap(function)
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    own = [
        one
        for one in vars(module).values()
        if getattr(one, "__module__", "") == getattr(module, "__name__", None) and one is not inner
    ]
    note = getattr(inner, "__annotations__", {}).get(name)
    said = note if isinstance(note, str) else getattr(note, "__name__", "")
    kinds = [one for one in own if inspect.isclass(one) and one.__name__ == said]
    kinds = kinds or [one for one in own if inspect.isclass(one) and _has_read(one, inner, name)]
    for kind in kinds:
        for method, held in vars(kind).items():
            if isinstance(held, classmethod | staticmethod) and MAKING_METHOD.match(method):
                yield getattr(kind, method)
    yield from (
        one for one in own if inspect.isroutine(one) and MAKER.match(getattr(one, "__name__", ""))
    )
    yield from (one for one in kinds if not [*fields_of(one)])


def _has_read(kind: Any, function: Callable[..., Any], name: str) -> bool:
    """Whether a class sets every attribute that the code reads of a parameter, if it reads any."""
    nodes = (node for tree in itertools.islice(trees_of(function), 1) for node in ast.walk(tree))
    read = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == name
    }
    return bool(read) and all(re.search(rf"\bself\.{one}\b", text_of(kind)) for one in read)


def _sizes(like: Any, heads: int | None) -> Iterator[Sizes]:
    """What batch, heads and width may be, by the shape of new tokens."""
    *rest, width = like.shape
    if heads and heads > 1 and width % heads == 0:  # embeddings: heads lie side by side
        yield rest[0] if rest else 1, heads, width // heads
    if 1 in rest:
        rest.remove(1)
    if len(rest) > 1:
        yield rest[0], rest[1], width
        yield rest[1], rest[0], width
    elif rest:
        yield rest[0], 1, width
        yield 1, rest[0], width
    else:
        yield 1, 1, width


def _arguments(
    maker: Callable[..., Any], sizes: Sizes, like: Any, key_heads: int | None
) -> dict[str, Any]:
    """The arguments of a maker by the names of its parameters; a KeyError if one is not known."""
    batch, heads, width = sizes
    known = {"batch": batch, "heads": heads, "width": width, "layers": 1}
    known["key_heads"] = key_heads or heads
    known |= dict.fromkeys(("length", "block", "window"), LONGEST_CACHE)
    parameters = inspect.signature(maker).parameters.values()
    of_heads = any(role_of(one.name) in ("heads", "key_heads") for one in parameters)
    known["model"] = heads * width
    given = {}
    for one in parameters:
        if "dtype" in one.name.lower():
            given[one.name] = like.dtype
            continue
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        divided = rf"\b{one.name} *//"  # dim // n_heads: it is that of all heads
        of_head = of_heads and plain(one.name) in MODEL_NAMES
        of_head = of_head and not re.search(divided, text_of(maker))
        size = width if of_head else size_by_name(one.name, known)
        if size is not None:
            given[one.name] = size
        elif one.default is one.empty:
            raise KeyError(one.name)
    return given


def _in_dtype(made: Any, like: Any) -> Any:
    """A cache whose floating numbers are of the same type as new tokens."""
    if isinstance(made, dict):
        return {name: _in_dtype(one, like) for name, one in made.items()}
    if hasattr(made, "_fields"):
        return type(made)(*(_in_dtype(one, like) for one in made))
    if isinstance(made, list | tuple):
        return type(made)(_in_dtype(one, like) for one in made)
    if "float" in str(getattr(made, "dtype", "")):
        if made.dtype == like.dtype:
            return made
        return made.to(like.dtype) if hasattr(made, "new_zeros") else made.astype(like.dtype)
    for name, one in getattr(made, "__dict__", {}).items():
        object.__setattr__(made, name, _in_dtype(one, like))
    return made

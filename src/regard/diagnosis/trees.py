"""Functions of arrays, made of functions that take their weights in one tree of parameters.

A dictionary, a NamedTuple or a dataclass, as deep as the code reads it, with matrices or with an
axis of heads. Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.adapting import BIAS_LEAVES, WEIGHT_LEAVES, Adapted, spread_over, trees_of
from regard.diagnosis.beside_weights import HEADS, TABLE, WIDTH, beside_weights, is_gate
from regard.diagnosis.caches import annotated, fields_of
from regard.diagnosis.constructor_arguments import initial_tree
from regard.diagnosis.einsums import axes_in_einsums, axes_in_words, in_axes
from regard.diagnosis.packing import side_by_side
from regard.diagnosis.parameter_names import fused_order, plain, role_of
from regard.diagnosis.signature import LATENTS, PROJECTIONS, Parameter, text_of
from regard.diagnosis.source import code_called
from regard.diagnosis.weights import LAYERS, LEARNED
from regard.errors import OptionError, safe_text

TREES = ("params", "parameters", "weights", "w", "theta", "p", "variables", "ws", "model", "layer")
# Between the tree and its weights: variables["params"]["attention"]["query"].
CONTAINERS = re.compile("^(params|.*attn|.*attention|mha|layers?|blocks?|h|self|cross)_?\\d*$")
FEWER_KEYS = re.compile(r"kv_?h|n_?kv|kh\b|gqa|mqa|grouped|group_size|groups?\b", re.IGNORECASE)
SIGMOID = re.compile(r"sigmoid|expit|1(\.0?)? *\+ *(\w+\.)?exp\( *-")
TURNED = re.compile(r"\(out\w*, *in\w*\)|\.T\b|\.mT\b|F\.linear|functional\.linear")

# The function, its other parameters, its weights as x @ W, and their heads where these are known.
Weighed = tuple[Callable[..., Any], list[Parameter], dict[str, Array], "int | None"]


@dataclass(frozen=True)
class _Form:
    """How weights lie in a tree."""

    axes: str = ""  # of W_q, W_k and W_v: MHD, HMD, or those of matrices
    output: bool = False  # W_o is (H, D, M)
    turned: bool = False  # matrices are (out, in)
    groups: int = HEADS  # heads of keys
    learned: int | None = None  # learned queries
    by_head: bool = False  # the columns of a fused matrix are those of one head after the other


class Tree(dict[str, Any]):
    """Weights by the names that the code reads, as items and as attributes.

    A name that nothing tells before the code runs, such as "attention/" + name, is found by its
    last word.
    """

    def __init__(self, entries: Mapping[str, Any], by_role: Callable[[str], Any]) -> None:
        super().__init__(entries)
        self._by_role = by_role

    def __missing__(self, name: Any) -> Any:
        if isinstance(name, int) or CONTAINERS.match(name.lower()):
            return self
        if (found := self._by_role(name)) is None:
            raise KeyError(name)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def with_weights(
    function: Callable[..., Any], parameters: Sequence[Parameter], framework: str
) -> list[Weighed]:
    """The function with weights in the tree of parameters that it asks for, if it asks for one.

    One reading for each way in which the weights may lie in it.
    """
    for tree in parameters:
        kind = annotated(function, tree.name)
        own = [*fields_of(kind)]
        if tree.required and (plain(tree.name) in TREES or any(map(projection, own))):
            code = _Code(function, tree.name, own)
            made = initial_tree(function, (*code.names, *code.rest), HEADS)
            made = made if _has_usual_sizes(made) else {}
            code.names |= {one: role for one in made if (role := projection(one))}
            if {*PROJECTIONS} <= code.roles:
                few = _groups_made(made, code)
                forms = [*_forms(function, code)]
                forms = [replace(one, groups=few) for one in forms] if few else forms
                return [
                    _weighed(function, parameters, tree, code, kind, framework, form, made)
                    for form in dict.fromkeys(forms)
                ]
    return _weighed_apart(function, parameters, framework)


def _forms(function: Callable[..., Any], code: _Code) -> Iterator[_Form]:
    """Every form that the code may mean, the likeliest first."""
    text = text_of(function) + code_called(function)
    if any("H" in axes for name, axes in code.axes.items() if _letters(name) != "o"):
        learned: tuple[int | None, ...] = (1, 3) if code.learned else (None,)
        for few, queries in itertools.product(_groups_in(code.axes, text), learned):
            yield _Form("MHD", False, False, few, queries)
            yield _Form("MHD", True, False, few, queries)
        return
    turned = (False, True) if TURNED.search(text) else (False,)
    shapes = [("", False, one) for one in turned]
    shapes += [("MHD", True, False), ("HMD", True, False), ("MHD", False, False)]
    shapes += [("HMD", False, False)]
    groups = (HEADS // 2, HEADS) if FEWER_KEYS.search(text) else (HEADS,)
    learned = (1, 3) if code.learned else (None,)
    fused = any(len(fused_order(_without_bias(name))) == 3 for name in code.names)
    for by_head in (False, True)[: 1 + fused]:
        for few, (axes, output, turn), queries in itertools.product(groups, shapes, learned):
            if few == HEADS or not by_head:
                yield _Form(axes, output, turn, few, queries, by_head)


def _groups_in(axes: Mapping[str, str], text: str) -> tuple[int, ...]:
    """The heads that keys may have: one where their weights have no axis of heads."""
    if any("H" not in own for name, own in axes.items() if _letters(name)[-1] in "kv"):
        return (1,)
    return (HEADS // 2, HEADS) if FEWER_KEYS.search(text) else (HEADS,)


def _has_usual_sizes(made: Mapping[str, Any]) -> bool:
    """Whether the queries' and the output's weights are as wide as those that are drawn here."""
    parts = {name: projection(name)[-1:] for name in made if not fused_order(_without_bias(name))}
    own = [_size_of(made[name]) for name, letter in parts.items() if letter in ("q", "o")]
    return all(size in (WIDTH, WIDTH**2) for size in own)


def _size_of(made: Any) -> int:
    """How many numbers a weight has, which may be a layer with a bias."""
    with contextlib.suppress(ValueError):  # of lists of different lengths
        return max(map(np.size, made.values() if isinstance(made, Mapping) else [made]), default=0)
    return 0


def _groups_made(made: Mapping[str, Any], code: _Code) -> int | None:
    """The heads of keys of weights that were made, by their size; None if that is not known."""
    for name, role in code.names.items():
        letters = _letters(name)
        if name in made and role[:2] == "W_" and letters and {*letters} <= {*"kv"}:
            if "H" in (axes := code.axes.get(name, "")) and np.ndim(made[name]) == len(axes):
                return int(made[name].shape[axes.index("H")])
            return max(1, _size_of(made[name]) * HEADS // (len(letters) * WIDTH**2))
    return None


class _Code:
    """What the code of a function says of its tree: the names of entries, and their leaves."""

    def __init__(self, function: Callable[..., Any], tree: str, known: Sequence[str]) -> None:
        read = [*dict.fromkeys((*known, *_read_from(function, tree)))]
        texts = [*dict.fromkeys((*_texts(function), *read))]
        self.unpacked = _unpacked(function, tree)
        self.names = {one: role for one in read if (role := projection(one))}
        if "theta" not in self.names:  # only beside that g is the values', as in non-local blocks
            self.names.pop("g", None)
        named = {*self.names.values()}  # what another object calls so is none, as cache.k
        names = [one for one in (*texts, *self.unpacked) if projection(one) not in named]
        self.names |= {one: role for one in names if (role := projection(one))}
        words = (one.strip(".") for one in texts)  # name + ".weight" too
        leaves = [one for one in words if one in (*WEIGHT_LEAVES, *BIAS_LEAVES)]
        self.leaves = [one for one in leaves if one not in self.names]
        has_weight = any(one in WEIGHT_LEAVES for one in self.leaves)
        rest = [one for one in read if one not in self.names and not CONTAINERS.match(one.lower())]
        rest = [one for one in rest if not (has_weight and one in (*WEIGHT_LEAVES, *BIAS_LEAVES))]
        self.learned = [one for one in rest if LEARNED.match(one)]
        self.rest = [one for one in rest if one not in self.learned]
        rest = [one for one in rest if one not in self.learned and not one.startswith("_")]
        if "W_o" not in self.names.values() and len(rest) == 1:  # the only other one
            self.names[rest[0]] = "W_o"
        self.own_leaves = _own_leaves(function)
        self.leaves = [one for one in self.leaves if one not in self.names] if has_weight else []
        found = axes_in_einsums(function)
        self.axes = {name: found[name] for name in self.names if name in found}

    def leaves_of(self, name: str) -> list[str]:
        """The leaves of one entry."""
        return [one for one in self.leaves if one in self.own_leaves.get(name, self.leaves)]

    @property
    def roles(self) -> set[str]:
        """The weights and biases that there are."""
        found = set()
        for name, role in self.names.items():
            letters = fused_order(_without_bias(name)) or role[-1]
            found |= {role[:2] + letter for letter in letters}
            if role[:2] == "W_" and any(one in BIAS_LEAVES for one in self.leaves_of(name)):
                found |= {f"b_{letter}" for letter in letters}
        return found


def _weighed(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    tree: Parameter,
    code: _Code,
    kind: Any,
    framework: str,
    form: _Form,
    made: Mapping[str, Any],
) -> Weighed:
    """The function with its tree in one form, and what else was `made` for it."""
    weights = _drawn(code.roles, form, exact=framework == "numpy")
    text = text_of(function)
    if form.learned is not None:
        rng = np.random.default_rng(1)
        weights[LATENTS] = rng.uniform(-0.9, 0.9, (form.learned, WIDTH)).astype(np.float32) + 0.0

    def entry(name: str, role: str) -> Any:
        """A weight with the shape of the form, or the leaves of a layer."""
        whole = _shaped(weights, role, fused_order(_without_bias(name)), form, code.axes.get(name))
        leaves = code.leaves_of(name) if role[:2] == "W_" else []
        if not leaves:
            return _in_library(whole, framework)
        letters = fused_order(name)
        bias = f"b_{role[-1]}"
        taken = {one: whole for one in leaves if one in WEIGHT_LEAVES}
        if bias in weights:
            own = _shaped(weights, bias, letters, form)
            taken |= {one: own for one in leaves if one in BIAS_LEAVES}
        return Tree({n: _in_library(one, framework) for n, one in taken.items()}, lambda _: None)

    def by_role(name: str) -> Any:
        *outer, last = re.split(r"[/.]", name)
        if (
            name not in code.names and outer and last in (*WEIGHT_LEAVES, *BIAS_LEAVES)
        ):  # "query.weight", as in a state_dict
            whole = by_role(outer[-1])
            return whole[last] if isinstance(whole, Tree) else whole
        role = code.names.get(last) or projection(last)
        return entry(last, role) if role and role in weights else None

    entries = {name: entry(name, role) for name, role in code.names.items() if role in weights}
    entries |= {name: made[name] for name in code.rest if name in made}
    for name in code.learned:
        entries[name] = _in_library(weights[LATENTS], framework)
    counts = {p.name: p.default for p in parameters if type(p.default) is int}
    beside = beside_weights(function, kind, code.rest, code.names, code.axes, counts)
    for name, array in beside.items():
        own = array if framework == "numpy" else array.astype(np.float32)
        if name not in entries or is_gate(name, text):  # it is open, however it was made
            entries[name] = _in_library(own, framework)
    whole: Any = Tree(entries, by_role)
    if code.unpacked and all(one in entries for one in code.unpacked):
        whole = tuple(entries[one] for one in code.unpacked)
    elif kind is not None:
        whole = _made(kind, whole)
    elif framework == "jax":
        _as_pytree()
    rest = [replace(one, keyword=True) for one in parameters if one is not tree]
    known = bool(form.axes) or form.groups < HEADS
    if _half_open_gates(text, beside):
        weights["W_o" if "W_o" in weights else "W_v"] *= 0.5
    adapted = Adapted(function, {tree.name: whole}, "")
    adapted.has_table = any(TABLE.search(n) and np.any(one) for n, one in beside.items())
    adapted.left_out = tuple(name for name in beside if is_gate(name, text))
    if any(len(fused_order(_without_bias(name))) == 3 for name in code.names):
        adapted.by_head = form.by_head
    known = known or any(HEADS in one.shape for one in beside.values())
    return adapted, rest, weights, HEADS if known else None


def _half_open_gates(text: str, beside: Mapping[str, Any]) -> bool:
    """Whether what attention returns is multiplied by the sigmoid of 0: a gate without a bias."""
    gates = [name for name in beside if is_gate(name, text)]
    closed = not any(np.any(beside[name]) for name in gates)
    return bool(gates) and closed and SIGMOID.search(text) is not None


def _weighed_apart(
    function: Callable[..., Any], parameters: Sequence[Parameter], framework: str
) -> list[Weighed]:
    """The function with its weights, if each is an argument and einsums give them their heads."""
    required = [p.name for p in parameters if p.required]
    own = (one for one in required if (role_of(one) or "W_")[:2] in ("W_", "b_"))  # not a query
    names = {name: role for name in own if (role := projection(name))}
    found = axes_in_words(function, names) | axes_in_einsums(function)
    code = _Code(function, "", [])
    code.axes = {name: found[name] for name in names if name in found}
    code.names, code.leaves = names, []
    of_weights = {name for name, role in names.items() if role[:2] == "W_" and role != "W_o"}
    has_heads = any("H" in axes for axes in code.axes.values())
    if not has_heads or not of_weights <= code.axes.keys() or not {*PROJECTIONS} <= code.roles:
        return []
    rest = [replace(one, keyword=True) for one in parameters if one.name not in names]
    weighed = list[Weighed]()
    for form in _forms(function, code):
        weights = _drawn(code.roles, form, exact=framework == "numpy")
        given = {
            name: _in_library(
                _shaped(weights, role, fused_order(_without_bias(name)), form, code.axes.get(name)),
                framework,
            )
            for name, role in names.items()
        }
        weighed.append((Adapted(function, given, ""), rest, weights, HEADS))
    return weighed


def _drawn(roles: set[str], form: _Form, *, exact: bool) -> dict[str, Array]:
    """Random weights as x @ W, in float32 unless `exact`."""
    rng, found = np.random.default_rng(0), {}
    for role in sorted(roles):
        columns = WIDTH * form.groups // HEADS if role[-1] in "kv" else WIDTH
        drawn = rng.uniform(-0.9, 0.9, (WIDTH, columns) if role[:2] == "W_" else (columns,))
        found[role] = drawn if exact else drawn.astype(np.float32).astype(float)
    return found


def _shaped(
    weights: Mapping[str, Array], role: str, letters: str, form: _Form, axes: str | None = None
) -> Array:
    """One weight or bias, or several side by side, in its axes where they are known."""
    if axes:
        parts = [weights[role[:2] + letter] for letter in letters or role[-1]]
        heads = form.groups if (letters or role)[-1] in "kv" and letters != "qkv" else HEADS
        heads = heads if {*axes} & {*"HG"} else 1
        whole = np.stack(parts) if "P" in axes else np.concatenate(parts, -1)
        return in_axes(whole, axes, heads, output=role[-1] == "o", groups=form.groups)
    if letters:
        parts = [weights[role[:2] + letter] for letter in letters]
        whole = np.asarray(side_by_side(parts, -1, HEADS if form.by_head else None))
        return whole.T.copy() if form.turned and whole.ndim == 2 else whole
    whole = weights[role]
    if role == "W_o" and form.output:
        return whole.reshape(HEADS, -1, WIDTH)
    if form.axes and role[-1] != "o":
        heads = form.groups if role[-1] in "kv" else HEADS
        split = whole.reshape(*whole.shape[:-1], heads, -1)
        return split if form.axes == "MHD" or whole.ndim == 1 else split.swapaxes(0, 1).copy()
    return whole.T.copy() if form.turned and whole.ndim == 2 else whole


def _in_library(array: Array, framework: str) -> Any:
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    if framework == "torch":
        import torch

        return torch.from_numpy(np.array(array))
    return array


def _as_pytree() -> None:
    """Tell JAX how to take a tree apart, as a function that is compiled asks for."""
    import jax

    with contextlib.suppress(ValueError):  # it has been told before
        jax.tree_util.register_pytree_node(
            Tree,
            lambda tree: (tuple(tree.values()), (tuple(tree), tree._by_role)),
            lambda known, own: Tree(dict(zip(known[0], own, strict=True)), known[1]),
        )


# --- NamedTuples and dataclasses ------------------------------------------------------------------


def _made(kind: Any, tree: Any) -> Any:
    """An object of the class with the weights of a tree."""
    notes = getattr(kind, "__annotations__", {})
    module = sys.modules.get(kind.__module__)
    given = {}
    for name in fields_of(kind):
        inner = notes.get(name)
        inner = getattr(module, inner, None) if isinstance(inner, str) else inner
        if name in tree:
            own = tree[name]
            given[name] = _made(inner, own) if [*fields_of(inner)] else own
        elif role_of(name) in ("heads", "key_heads"):
            given[name] = HEADS
    try:
        return kind(**given)
    except TypeError as error:
        name = safe_text(kind.__name__, 60)
        raise OptionError(f"{name} cannot be made: {safe_text(error, 200)}") from None


# --- the code -------------------------------------------------------------------------------------


def projection(name: str) -> str:
    """The role of a weight by its name, W_q for a fused one; or nothing."""
    if (own := re.fullmatch("[Pp]_([qkvo])", name)) is not None:  # as Shazeer writes them
        return f"W_{own[1]}"
    if (leaf := re.fullmatch(r"(\w+)\.(weight|bias)", name)) is not None:  # as in a state_dict
        role = projection(leaf[1])
        return role if leaf[2] == "weight" else role.replace("W_", "b_")
    bare = _without_bias(name)
    if fused_order(bare):
        return "W_q" if bare == name else "b_q"
    role = LAYERS.get(plain(name)) or role_of(name) or ""
    if role[:2] in ("W_", "b_"):
        return role
    role = LAYERS.get(plain(re.sub("_?(weight|kernel|w|mat)$", "", name)), "")  # out_proj_weight
    return role or (LAYERS.get(plain(bare), "").replace("W_", "b_") if bare != name else "")


def _letters(name: str) -> str:
    """The letters of the projections that a weight holds."""
    return fused_order(_without_bias(name)) or projection(name)[-1:]


def _without_bias(name: str) -> str:
    """The name of the weight that a bias belongs to."""
    return re.sub("^(b|bias)_?|_?(b|bias)$", "", name)


def _texts(function: Callable[..., Any]) -> Iterator[str]:
    """Every text in the code, and the parameters of functions that a dictionary is spread over."""
    texts, ends = list[str](), list[str]()
    for node in _nodes(function):
        match node:
            case ast.Constant(value=str(text)):
                texts.append(text)
            case ast.Attribute(attr=name):
                texts.append(name)
            case ast.BinOp(op=ast.Add(), right=ast.Constant(value=str(end))):
                ends.append(end)  # name + "_w"
            case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(end))]):
                ends.append(end)  # f"{name}_w"
    yield from texts
    ends = [end for end in ends if end.isidentifier()]  # and no ".weight": a leaf, not a name
    yield from (f"{text}{end}" for text in texts if len(text) < 6 for end in ends)
    yield from spread_over(function, None)


def _read_from(function: Callable[..., Any], tree: str) -> Iterator[str]:
    """The entries and attributes that the code reads of the tree itself, by a constant name."""
    for node in _nodes(function):
        if (found := _entry(node)) is not None and getattr(found[0], "id", "") == tree:
            yield found[1]


def _own_leaves(function: Callable[..., Any]) -> dict[str, set[str]]:
    """The leaves of entries, where the code reads each by its name: params["out"]["kernel"]."""
    found: dict[str, set[str]] = {}
    for node in _nodes(function):
        if (outer := _entry(node)) is not None and (inner := _entry(outer[0])) is not None:
            found.setdefault(inner[1], set()).add(outer[1])
    return {name: own for name, own in found.items() if own & {*WEIGHT_LEAVES, *BIAS_LEAVES}}


def _entry(node: ast.AST) -> tuple[ast.expr, str] | None:
    """What a constant entry or an attribute is read from, and its name."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return (node.value, key) if isinstance(node, ast.Subscript) and isinstance(key, str) else None


def _unpacked(function: Callable[..., Any], tree: str) -> list[str]:
    """The names that the code gives to the parts of a tree: w_q, w_k, w_v = params."""
    for node in _nodes(function):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", "") == tree:
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    return [getattr(one, "id", "") for one in target.elts]
    return []


def _nodes(function: Callable[..., Any]) -> Iterator[ast.AST]:
    for tree in trees_of(function):
        yield from ast.walk(tree)

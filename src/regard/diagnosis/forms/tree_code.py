"""What the code of a function says of its tree of parameters: names, leaves, and what each is for.

Reads the code of a function. Must not call it, nor know any probe.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from regard.diagnosis.forms.adapting import (
    BIAS_LEAVES,
    WEIGHT_LEAVES,
    nodes_in,
    spread_over,
    trees_of,
)
from regard.diagnosis.forms.assigned import OTHER, columns_assigned
from regard.diagnosis.forms.caches import fields_of
from regard.diagnosis.forms.einsums import axes_in_einsums, axes_in_words
from regard.diagnosis.forms.latent_weights import latent_parts, letters_made
from regard.diagnosis.forms.weights import LAYERS, LEARNED, OF_ORDER
from regard.diagnosis.reading.parameter_names import fused_order, plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, globals_of, roles_by_family, text_of
from regard.diagnosis.reading.source_text import nodes_of

# Between the tree and its weights: variables["params"]["attention"]["query"].
CONTAINERS = re.compile("^(params|.*attn|.*attention|mha|layers?|blocks?|h|self|cross)_?\\d*$")

# A normalisation, or a number of each feature that belongs to one.
NORM = re.compile(r"norm|(^|_)ln(_|\d|$)|^ln|^n_?\d\b|gamma|beta$|^rms|(^|_)g$", re.IGNORECASE)
FEED_FORWARD = re.compile(
    r"^(mlp|ffn?|feed_?forward|fc_?[12]|c_fc)(_|\d|\.|$)|^[wb]_?[12]$", re.IGNORECASE
)
_SUFFIX = re.compile("_?(weight|kernel|w|mat|einsum)$")
_PREFIX = re.compile("^((self_?)?(attn|att|attention|mha|sa)_(?!vec)|[wW]_(?=proj|dense|c_))")


class TreeCode:
    """What the code of a function says of its tree: the names of entries, and their leaves."""

    def __init__(self, function: Callable[..., Any], tree: str, kind: Any = None) -> None:
        known, self.text_of_kind = fields_of(kind), text_of(kind)
        read = [*dict.fromkeys((*known, *read_from(function, tree)))]
        texts = [*dict.fromkeys((*_texts(function), *read))]
        self.unpacked = _unpacked(function, tree)
        self.names = {one: role for one in read if (role := projection(one))}
        named = self.roles_of(self.names, {})  # what another object calls so is none, as cache.k
        names = [one for one in (*texts, *self.unpacked) if projection(one) not in named]
        self.names |= {one: role for one in names if (role := projection(one))}
        families = roles_by_family(read)
        if {"W_q", "b_q"} <= {*families.values()}:  # beta_q beside omega_q, which says nothing
            self.names |= families
        if "theta" not in self.names:  # only beside that g is the values', as in non-local blocks
            self.names.pop("g", None)
        self.read = read
        self.latents = latent_parts(texts)
        self.names = {n: role for n, role in self.names.items() if n not in self.latents}
        self.columns = self._assigned(function, texts)
        words = (one.strip(".") for one in texts)  # name + ".weight" too
        leaves = [one for one in words if one in (*WEIGHT_LEAVES, *BIAS_LEAVES)]
        own = {*_read_itself(function, tree)}
        if {*self.names} <= own:  # beside them it is one of the entries, and no leaf
            leaves = [one for one in leaves if one not in own]
        leaves = [one for one in leaves if one not in self.names]
        has_weight = any(one in WEIGHT_LEAVES for one in leaves)
        rest = [one for one in read if one not in self.names and not CONTAINERS.match(one.lower())]
        of_layers = (*WEIGHT_LEAVES, *BIAS_LEAVES) if has_weight else ()
        rest = [one for one in rest if one not in (*of_layers, *self.latents)]
        self.learned = [one for one in rest if LEARNED.match(one)]
        self.rest = [one for one in rest if one not in self.learned]
        rest = [one for one in rest if one not in self.learned and not one.startswith("_")]
        rest = [one for one in rest if not (NORM.search(one) or FEED_FORWARD.search(one))]
        if "W_o" not in self.names.values() and len(rest) == 1:  # the only other one
            self.names[rest[0]] = "W_o"
        self.leaves = [one for one in leaves if one not in self.names] if has_weight else []
        self.own_leaves = _own_leaves(function)
        self.pairs = {*_pairs(function)}
        found = axes_in_einsums(function)
        said = axes_in_words(function, (*self.names, *self.latents), self.text_of_kind)
        # Other orders are as likely those of other letters: (M, K, H) has K heads of H.
        found = {n: own for n, own in said.items() if own == "MHD" or own[0] in "HP"} | found
        self.axes = {n: found[n] for n in (*self.names, *self.latents) if n in found}

    def _assigned(self, function: Callable[..., Any], texts: Sequence[str]) -> dict[str, str]:
        """The columns of entries whose names say nothing, as the code unpacks what they make.

        These entries get a role: that of queries if they hold several.
        """
        columns = dict[str, str]()
        of_checkpoint = OF_ORDER.search(f"{text_of(function)}\n{self.text_of_kind}")
        for name, letters in () if of_checkpoint else columns_assigned(function).items():
            if name in self.names and sorted(letters) == sorted(fused_order(name)):
                columns |= {name: letters, _bias_of(name): letters}  # as the code calls them
        made = {f"W_{letter}" for letter in letters_made(self.latents)}
        missing = {*PROJECTIONS} - self.roles_of(self.names, columns) - made
        if missing:
            for name, letters in columns_assigned(function).items():
                if name in texts and name not in self.names:
                    own = {_bias_of(name): "b_", name: "W_"}
                    for one in own.keys() & {*texts}:
                        self.names[one] = own[one] + letters.strip(OTHER)[0]
                        columns |= {one: letters} if len(letters) > 1 else {}
        return columns

    def order_of(self, name: str) -> str:
        """The projections side by side in an entry; nothing where it is one alone."""
        return self.columns.get(name) or fused_order(without_bias(name))

    def letters_of(self, name: str) -> str:
        """The letters of the projections that an entry holds."""
        return self.order_of(name) or self.names.get(name, projection(name))[-1:]

    def leaves_of(self, name: str) -> list[str]:
        """The leaves of one entry; none where its name says which it is: "q_proj.weight"."""
        if name.rpartition(".")[2] in (*WEIGHT_LEAVES, *BIAS_LEAVES):
            return []
        return [one for one in self.leaves if one in self.own_leaves.get(name, self.leaves)]

    @property
    def roles(self) -> set[str]:
        """The weights and biases that there are."""
        found = self.roles_of(self.names, self.columns)
        found |= {f"W_{letter}" for letter in letters_made(self.latents)}
        for name, role in self.names.items():
            letters = self.order_of(name) or role[-1]
            has_bias = any(one in BIAS_LEAVES for one in self.leaves_of(name))
            if role[:2] == "W_" and (has_bias or name in self.pairs):
                found |= {f"b_{letter}" for letter in letters if letter != OTHER}
        return found

    def roles_of(self, names: Mapping[str, str], columns: Mapping[str, str]) -> set[str]:
        """The weights and biases that names mean."""
        return {
            role[:2] + letter
            for name, role in names.items()
            for letter in columns.get(name) or fused_order(without_bias(name)) or role[-1]
            if letter != OTHER
        }


def _roles_of_names(names: Iterable[str]) -> set[str]:
    """The weights and biases that names mean, also where several are fused."""
    known = {name: role for name in names if (role := projection(name))}
    return {r[:2] + one for n, r in known.items() for one in fused_order(without_bias(n)) or r[-1]}


def kind_of_file(function: Callable[..., Any]) -> Any:
    """The only class of weights in the file of a function that names no entry in a text."""
    texts = (node.value for node in nodes_in(function) if isinstance(node, ast.Constant))
    if any(isinstance(one, str) and projection(one) for one in texts):
        return None
    own = [one for one in globals_of(inspect.unwrap(function)).values() if inspect.isclass(one)]
    kinds = [one for one in own if {*PROJECTIONS} <= _roles_of_names(fields_of(one))]
    return kinds[0] if len(kinds) == 1 else None


def projection(name: str) -> str:
    """The role of a weight by its name, W_q for a fused one; or nothing."""
    if (own := re.fullmatch("[Pp]_([qkvo])", name)) is not None:  # as Shazeer writes them
        return f"W_{own[1]}"
    if (leaf := re.fullmatch(r"([\w.]+)\.(weight|bias)", name)) is not None:  # as in a state_dict
        role = projection(leaf[1])
        return role if leaf[2] == "weight" else role.replace("W_", "b_")
    if (outer := re.fullmatch(r"\w+\.(\w+)", name)) is not None:  # self.query
        return projection(outer[1])
    bare = without_bias(name)
    if fused_order(bare):
        return "W_q" if bare == name else "b_q"
    role = LAYERS.get(plain(name)) or role_of(name) or ""
    if role[:2] in ("W_", "b_"):
        return role
    role = LAYERS.get(plain(_SUFFIX.sub("", name)), "")  # out_proj_weight
    role = role or (LAYERS.get(plain(bare), "").replace("W_", "b_") if bare != name else "")
    inner = _PREFIX.sub("", name)  # attn_wo, w_proj
    return role or (projection(inner) if inner != name else "")


def without_bias(name: str) -> str:
    """The name of the weight that a bias belongs to."""
    if name.endswith((".weight", ".bias")):  # as in a state_dict
        return name.split(".")[-2]
    return re.sub("^(b|bias)_?|_?(b|bias)$", "", name)


def _bias_of(name: str) -> str:
    """The name of the bias beside a weight: in_b beside in_w."""
    return re.sub("(weight|kernel|[wW])$", lambda end: "b" if len(end[1]) == 1 else "bias", name)


def _texts(function: Callable[..., Any]) -> Iterator[str]:
    """Every text in the code, and the parameters of functions that a dictionary is spread over."""
    texts, ends = list[str](), list[str]()
    is_class = inspect.isclass(inspect.unwrap(function))
    for node in nodes_in(function):
        match node:
            case ast.Constant(value=str(text)):
                texts.append(text)
            case ast.Attribute(value=ast.Name("self")) if is_class:
                pass  # it belongs to the object, not to its tree
            case ast.Attribute(attr=name):
                texts.append(name)
            case ast.BinOp(op=ast.Add(), right=ast.Constant(value=str(end))):
                ends.append(end)  # name + "_w"
            case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(end))]):
                ends.append(end)  # f"{name}_w"
    yield from texts
    ends = [end for end in ends if end.isidentifier()]  # and no ".weight": a leaf, not a name
    letters = (one for text in texts if {*text} < {*"qkvo"} for one in text)  # for n in "qk"
    names = [one for one in texts if len(one) < 6]
    yield from (f"{text}{end}" for text in (*letters, *names) for end in ends)
    yield from spread_over(function, None)


def read_from(function: Callable[..., Any], tree: str) -> Iterator[str]:
    """The entries and attributes that the code reads of the tree itself, by a constant name."""
    for own in trees_of(function):
        if not _gets_a_part(function, own.body[0], tree):
            yield from _entries_of(nodes_of(own), tree)


def _gets_a_part(function: Callable[..., Any], helper: ast.stmt, tree: str) -> bool:
    """Whether a helper has a parameter called as the tree, and gets a part of it: p["ln1"]."""
    if not isinstance(helper, ast.FunctionDef):
        return False
    names = [one.arg for one in helper.args.args]
    if tree not in names:
        return False
    calls = [node for node in nodes_in(function) if isinstance(node, ast.Call)]
    calls = [node for node in calls if getattr(node.func, "id", "") == helper.name]
    given = [node.args[names.index(tree)] for node in calls if len(node.args) > names.index(tree)]
    return bool(given) and not any(isinstance(one, ast.Name) for one in given)


def _read_itself(function: Callable[..., Any], tree: str) -> Iterator[str]:
    """The same of the function's own code, without what it calls."""
    own = next(trees_of(function), None)
    yield from _entries_of(() if own is None else nodes_of(own), tree)


def _entries_of(nodes: Iterable[ast.AST], tree: str) -> Iterator[str]:
    for node in nodes:
        if (found := _entry(node)) is not None and getattr(found[0], "id", "") == tree:
            yield found[1]


def _own_leaves(function: Callable[..., Any]) -> dict[str, set[str]]:
    """The leaves of entries, where the code reads each by its name: params["out"]["kernel"]."""
    found: dict[str, set[str]] = {}
    for node in nodes_in(function):
        if (outer := _entry(node)) is not None and (inner := _entry(outer[0])) is not None:
            found.setdefault(inner[1], set()).add(outer[1])
    return {name: own for name, own in found.items() if own & {*WEIGHT_LEAVES, *BIAS_LEAVES}}


def _pairs(function: Callable[..., Any]) -> Iterator[str]:
    """The entries that the code takes apart in two: p["q"][1], w, b = p["q"], f(x, *p["q"])."""
    for node in nodes_in(function):
        own: ast.AST | None = None
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=1)):
                own = value
            case ast.Assign(targets=[ast.Tuple(elts=[_, _])], value=ast.Subscript() as value):
                own = value
            case ast.Starred(value=ast.Subscript() as value):
                own = value
        if own is not None and (found := _entry(own)) is not None and found[1] != "shape":
            yield found[1]
        elif isinstance(own, ast.Subscript) and isinstance(own.slice, ast.Name):
            yield from _texts(function)  # of every name that it gets


def _entry(node: ast.AST) -> tuple[ast.expr, str] | None:
    """What a constant entry or an attribute is read from, and its name."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
    return (node.value, key) if isinstance(node, ast.Subscript) and isinstance(key, str) else None


def _unpacked(function: Callable[..., Any], tree: str) -> list[str]:
    """The names that the code gives to the parts of a tree: w_q, w_k, w_v = params."""
    for node in nodes_in(function):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", "") == tree:
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    return [getattr(one, "id", "") for one in target.elts]
    return []

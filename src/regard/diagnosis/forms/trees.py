"""Functions of arrays, made of functions that take their weights in one tree of parameters.

A dictionary, a NamedTuple or a dataclass, as deep as the code reads it, with matrices or with an
axis of heads. Must not know any probe.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import (
    BIAS_LEAVES,
    WEIGHT_LEAVES,
    Adapted,
    spread_over,
    spreads,
)
from regard.diagnosis.forms.assigned import OTHER
from regard.diagnosis.forms.beside_weights import HEADS, TABLE, WIDTH, beside_weights, is_gate
from regard.diagnosis.forms.caches import annotated, fields_of
from regard.diagnosis.forms.einsums import axes_in_einsums, axes_in_loops, axes_in_words, in_axes
from regard.diagnosis.forms.latent_weights import latent_part, latent_parts, with_latents
from regard.diagnosis.forms.layers_beside import WIDER, layer_beside
from regard.diagnosis.forms.packing import side_by_side
from regard.diagnosis.forms.source import code_called, documentation_of_file
from regard.diagnosis.forms.tree_code import (
    CONTAINERS,
    FEED_FORWARD,
    NORM,
    TreeCode,
    kind_of_file,
    projection,
    read_from,
    without_bias,
)
from regard.diagnosis.reading.constructor_arguments import initial_tree
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import LATENTS, PROJECTIONS, Parameter, text_of
from regard.errors import OptionError, safe_text

TREES = re.compile(
    "params|parameters|weights|w|theta|p|variables|ws|model|layer|sd|statedict|checkpoint|ckpt|block|"
    "blk|prms?|pars|tree|(self)?(attn|attention|mha)(params|weights)?"
)
# What is put before the names of entries.
PREFIX = re.compile("prefix|pre|scope|path|(layer_)?name")
FEWER_KEYS = re.compile(r"kv_?h|n_?kv|kh\b|gqa|grouped|group_size|groups?\b", re.IGNORECASE)
ONE_FOR_ALL = re.compile(
    r"multi-?_?query|\bmqa\b|(one|single) (key|kv|k/v)\b|one key", re.IGNORECASE
)
FEED_WIDTH = re.compile("d?ff(n|w)?(dim|inner|hidden|size|width)?|mlp(dim|hidden)|dmlp|dinner")
SIGMOID = re.compile(r"sigmoid|expit|1(\.0?)? *\+ *(\w+\.)?exp\( *-")
# Matrices that are entries, or attributes, before tokens that are columns.
OF_ENTRIES_FIRST = re.compile(r"([\"']\w+[\"']\]|\bp(arams)?\.\w+) *@ *[a-zA-Z]\w*\b")
TURNED = re.compile(
    r"\.T\b|\.mT\b|\.t\(\)|F\.linear|functional\.linear|"
    r"\b[wW]\w*(\[[^\]\n]*\])? @ (x|row|tok|token|vec|vector)(_\w+)?\b"
)
OF_WEIGHT = re.compile("weight|kernel|proj", re.IGNORECASE)
SAID_TURNED = re.compile(r"\(out\w*, *in\w*\)")

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
    columns: bool = False  # tokens are columns, and so are biases


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

    def get(self, name: Any, default: Any = None) -> Any:
        """An entry that may be missing."""
        try:
            return self[name]
        except KeyError:
            return default

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

    def reads_weights(one: Parameter) -> bool:
        return any(map(projection, read_from(function, one.name)))

    for tree in sorted(parameters, key=reads_weights, reverse=True):  # w may be hidden states
        kind = annotated(function, tree.name)
        if kind is None and TREES.fullmatch(plain(tree.name)):
            kind = kind_of_file(function)
        own = [*fields_of(kind)]
        named = any(projection(one) or latent_part(one) for one in own)
        if tree.required and role_of(tree.name) is None and not own:
            named = reads_weights(tree)
        if tree.required and role_of(tree.name) == "cache" and not own:  # or the state of a layer
            entries = read_from(function, tree.name)
            named = any(projection(one) and OF_WEIGHT.search(one) for one in entries)
        if tree.required and (TREES.fullmatch(plain(tree.name)) or named):
            code = TreeCode(function, tree.name, kind)
            made = initial_tree(function, (*code.names, *code.rest), HEADS)
            made = made if _has_usual_sizes(made, code) else {}
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


def _forms(function: Callable[..., Any], code: TreeCode) -> Iterator[_Form]:
    """Every form that the code may mean, the likeliest first."""
    text = text_of(function) + code_called(function)
    out_first = TURNED.search(text) is not None
    if any("H" in axes for name, axes in code.axes.items() if code.letters_of(name) != "o"):
        learned: tuple[int | None, ...] = (1, 3) if code.learned else (None,)
        known = any(code.letters_of(name) == "o" for name in code.axes)  # of the output too
        outputs = (True,) if known else (False, True)
        sides = (False, True) if out_first and not known else (False,)  # of W_o
        several = itertools.product(_groups_in(code, text), learned, outputs, sides)
        for few, queries, out, turn in several:
            yield _Form("MHD", out, turn, few, queries)
        return
    turned = (False, True) if out_first else (False,)
    told = f"{text}\n{documentation_of_file(function)}\n{code.text_of_kind}"
    turned = (True,) if SAID_TURNED.search(told) else turned
    if OF_ENTRIES_FIRST.search(text) and "column" in text.lower():
        yield _Form(turned=True, columns=True)
    shapes = [("", False, one) for one in turned]
    shapes += [("MHD", True, False), ("HMD", True, False), ("MHD", False, False)]
    shapes += [("HMD", False, False)]
    groups = _groups_said(text)
    learned = (1, 3) if code.learned else (None,)
    fused = any(len(code.order_of(name)) == 3 for name in code.names)  # and nothing besides
    fused |= "up kv" in code.latents.values()
    for by_head in (False, True)[: 1 + fused]:
        for few, (axes, output, turn), queries in itertools.product(groups, shapes, learned):
            if few == HEADS or not by_head:
                yield _Form(axes, output, turn, few, queries, by_head)


def _groups_in(code: TreeCode, text: str) -> tuple[int, ...]:
    """The heads that keys may have: one where their weights have no axis of heads."""
    known = {
        name: own for name, own in code.axes.items() if code.letters_of(name)[-1:] in ("k", "v")
    }
    return (1,) if any("H" not in own for own in known.values()) else _groups_said(text)


def _groups_said(text: str) -> tuple[int, ...]:
    """The heads that keys may have, as a text says."""
    fewer = (HEADS // 2, HEADS) if FEWER_KEYS.search(text) else (HEADS,)
    return (1, *fewer) if ONE_FOR_ALL.search(text) else fewer


def _has_usual_sizes(made: Mapping[str, Any], code: TreeCode) -> bool:
    """Whether the queries' and the output's weights are as wide as those that are drawn here."""
    parts = {name: projection(name)[-1:] for name in made if not code.order_of(name)}
    own = [_size_of(made[name]) for name, letter in parts.items() if letter in ("q", "o")]
    return all(size in (WIDTH, WIDTH**2) for size in own)


def _size_of(made: Any) -> int:
    """How many numbers a weight has, which may be a layer with a bias."""
    with contextlib.suppress(ValueError):  # of lists of different lengths
        return max(map(np.size, made.values() if isinstance(made, Mapping) else [made]), default=0)
    return 0


def _groups_made(made: Mapping[str, Any], code: TreeCode) -> int | None:
    """The heads of keys of weights that were made, by their size; None if that is not known."""
    for name, role in code.names.items():
        letters = code.letters_of(name)
        if name in made and role[:2] == "W_" and letters and {*letters} <= {*"kv"}:
            if "H" in (axes := code.axes.get(name, "")) and np.ndim(made[name]) == len(axes):
                return int(made[name].shape[axes.index("H")])
            return max(1, _size_of(made[name]) * HEADS // (len(letters) * WIDTH**2))
    return None


def _weighed(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    tree: Parameter,
    code: TreeCode,
    kind: Any,
    framework: str,
    form: _Form,
    made: Mapping[str, Any],
) -> Weighed:
    """The function with its tree in one form, and what else was `made` for it."""
    weights = _drawn(code.roles, form, exact=framework == "numpy")
    parts = with_latents(weights, code.latents) if code.latents else weights
    weights = {role: parts[role] for role in weights}
    text = text_of(function)
    if form.learned is not None:
        rng = np.random.default_rng(1)
        weights[LATENTS] = rng.uniform(-0.9, 0.9, (form.learned, WIDTH)).astype(np.float32) + 0.0

    def entry(name: str, role: str) -> Any:
        """A weight with the shape of the form, or the leaves of a layer."""
        whole = _shaped(weights, role, code.order_of(name), form, code.axes.get(name))
        if role[:2] == "b_" and code.axes.get(without_bias(name), "").startswith("P"):
            whole = np.stack([weights[f"b_{letter}"] for letter in code.order_of(name)])
        leaves = code.leaves_of(name) if role[:2] == "W_" else []
        if name in code.pairs and role[:2] == "W_":
            own = _shaped(weights, f"b_{role[-1]}", code.order_of(name), form)
            return _in_library(whole, framework), _in_library(own, framework)
        if not leaves:
            return _in_library(whole, framework)
        letters = code.order_of(name)
        bias = f"b_{role[-1]}"
        taken = {one: whole for one in leaves if one in WEIGHT_LEAVES}
        if bias in weights:
            own = _shaped(weights, bias, letters, form)
            taken |= {one: own for one in leaves if one in BIAS_LEAVES}
        return Tree({n: _in_library(one, framework) for n, one in taken.items()}, lambda _: None)

    def beside_attention(name: str) -> Any:
        """What belongs to a normalisation or to a feed-forward layer, as matrices lie."""
        own = layer_beside(function, code, name, WIDTH)
        return own.T if form.turned and np.ndim(own) == 2 else own

    def by_role(name: str) -> Any:
        *outer, last = re.split(r"[/.]", name)
        of_leaf = name not in code.names and outer and last in (*WEIGHT_LEAVES, *BIAS_LEAVES)
        if of_leaf and not NORM.search(outer[-1]):  # "query.weight", as in a state_dict
            whole = by_role(outer[-1])
            if last in BIAS_LEAVES and not isinstance(whole, Tree):
                return by_role(f"{outer[-1]}_bias")
            return whole[last] if isinstance(whole, Tree) else whole
        role = code.names.get(last) or projection(last)
        if role and role in weights:
            return entry(last, role)
        return _given(beside_attention(name), framework)

    entries = {name: entry(name, role) for name, role in code.names.items() if role in weights}
    if not any(OTHER in one for one in code.columns.values()):
        kept = (name for name in code.rest if name in made and not FEED_FORWARD.search(name))
        entries |= {name: made[name] for name in kept}
    for name, part in code.latents.items():
        axes = code.axes.get(name)
        entries[name] = _in_library(_of_latents(parts, part, form, axes), framework)
    for name in code.learned:
        entries[name] = _in_library(weights[LATENTS], framework)
    sizes = [p for p in parameters if type(p.default) is int and role_of(p.name) != "heads"]
    counts = {p.name: p.default for p in sizes}
    beside = beside_weights(function, kind, code.rest, code.names, code.axes, counts)
    for name, array in beside.items():
        if name not in entries or is_gate(name, text):  # it is open, however it was made
            entries[name] = _given(array, framework)
    entries |= _sizes_in(code.rest, form)
    for name in code.rest:
        if name not in entries and (own := beside_attention(name)) is not None:
            entries[name] = _given(own, framework)
    spread = {*spread_over(function, tree.name)} if spreads(function, tree.name) else {*entries}
    whole: Any = Tree({n: one for n, one in entries.items() if n in spread}, by_role)
    if code.unpacked and all(one in entries for one in code.unpacked):
        whole = tuple(entries[one] for one in code.unpacked)
    elif kind is not None:
        whole = _made(kind, whole)
    elif framework == "jax":
        _as_pytree()
    fed: dict[str, Any] = {}
    fed |= {p.name: WIDER * WIDTH for p in parameters if FEED_WIDTH.fullmatch(plain(p.name))}
    for one in parameters:  # layers beside attention, each an argument
        own = beside_attention(one.name) if one.required else None
        if one is not tree and own is not None and role_of(one.name) is None:
            fed[one.name] = _given(own, framework)
    fed |= {p.name: "" for p in parameters if p.required and PREFIX.fullmatch(p.name)}
    rest = [_as_sized(one) for one in parameters if one is not tree and one.name not in fed]
    known = form.axes or form.groups < HEADS or any(HEADS in one.shape for one in beside.values())
    if _half_open_gates(text, beside):
        weights["W_o" if "W_o" in weights else "W_v"] *= 0.5
    adapted = Adapted(function, {tree.name: whole, **fed}, "")
    adapted.has_table = any(TABLE.search(n) and np.any(one) for n, one in beside.items())
    adapted.left_out = tuple(name for name in beside if is_gate(name, text))
    if any(len(code.order_of(name)) == 3 for name in code.names):
        adapted.by_head = form.by_head
    known = known or any(role_of(one) == "heads" for one in fields_of(kind))
    return adapted, rest, weights, HEADS if known else None


def _sizes_in(names: Sequence[str], form: _Form) -> dict[str, int]:
    """Numbers of heads, and widths, that a tree holds beside its weights."""
    sizes = {"heads": HEADS, "key_heads": form.groups, "model": WIDTH}
    sizes |= dict.fromkeys(("width", "turned"), WIDTH // HEADS)
    return {one: sizes[role] for one in names if (role := role_of(one) or "") in sizes}


def _as_sized(one: Parameter) -> Parameter:
    """A parameter beside the tree; a width of heads is that of the weights, not its default."""
    is_width = role_of(one.name) == "width" and plain(one.name) not in ("d", "dim", "width")
    if is_width and type(one.default) is int and one.default > 0:
        return replace(one, keyword=True, role="width", required=True)
    return replace(one, keyword=True)


def _half_open_gates(text: str, beside: Mapping[str, Any]) -> bool:
    """Whether what attention returns is multiplied by the sigmoid of 0: a gate without a bias."""
    gates = [name for name in beside if is_gate(name, text)]
    closed = not any(np.any(beside[name]) for name in gates)
    return bool(gates) and closed and SIGMOID.search(text) is not None


def _weighed_apart(
    function: Callable[..., Any], parameters: Sequence[Parameter], framework: str
) -> list[Weighed]:
    """The function with its weights, if each is an argument and nothing else tells what they are.

    Their axes are known, with one of heads, they are those of latent attention, or a normalisation
    has some.
    """
    required = [p.name for p in parameters if p.required]
    own = [one for one in required if (role_of(one) or "W_")[:2] in ("W_", "b_")]  # not a query
    code = TreeCode(function, "")
    code.latents = latent_parts(own)
    names = {n: role for n in own if n not in code.latents and (role := projection(n))}
    found = axes_in_words(function, (*names, *code.latents)) | axes_in_einsums(function)
    found |= axes_in_loops(function, names)
    code.axes = {n: found[n] for n in (*names, *code.latents) if n in found}
    code.names, code.leaves, code.columns = names, [], {}
    norms = [n for n in own if NORM.search(n) and n not in names and role_of(n) is None]
    code.rest = norms
    of_weights = {name for name, role in names.items() if role[:2] == "W_" and role != "W_o"}
    has_heads = any("H" in axes for axes in code.axes.values())
    is_known = has_heads and of_weights <= code.axes.keys()
    if not (is_known or code.latents or norms) or not {*PROJECTIONS} <= code.roles:
        return []
    known = {*names, *code.latents, *norms}
    rest = [_as_sized(one) for one in parameters if one.name not in known]
    weighed = list[Weighed]()
    for form in _forms(function, code):
        weights = _drawn(code.roles, form, exact=framework == "numpy")
        parts = with_latents(weights, code.latents) if code.latents else weights
        weights = {role: parts[role] for role in weights}
        given = {
            name: _shaped(weights, role, code.order_of(name), form, code.axes.get(name))
            for name, role in names.items()
        }
        given |= {
            name: _of_latents(parts, part, form, code.axes.get(name))
            for name, part in code.latents.items()
        }
        inside = {name: _in_library(one, framework) for name, one in given.items()}
        beside = {n: _given(layer_beside(function, code, n, WIDTH), framework) for n in norms}
        count = HEADS if has_heads or form.axes or form.groups < HEADS else None
        weighed.append((Adapted(function, inside | beside, ""), rest, weights, count))
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
    if axes == "HD":
        return weights[role].reshape(HEADS, -1)
    if axes:
        parts = [weights[role[:2] + letter] for letter in letters or role[-1]]
        heads = form.groups if (letters or role)[-1] in "kv" and letters != "qkv" else HEADS
        heads = heads if {*axes} & {*"HG"} else 1
        whole = np.stack(parts) if "P" in axes else np.concatenate(parts, -1)
        return in_axes(whole, axes, heads, output=role[-1] == "o", groups=form.groups)
    if letters:
        parts = [_columns(weights, role[:2] + letter) for letter in letters]
        whole = np.asarray(side_by_side(parts, -1, HEADS if form.by_head else None))
        return whole.T.copy() if form.turned and whole.ndim == 2 else whole
    whole = weights[role]
    if role == "W_o" and form.output:
        return whole.reshape(HEADS, -1, WIDTH)
    if form.axes and role[-1] != "o":
        heads = form.groups if role[-1] in "kv" else HEADS
        split = whole.reshape(*whole.shape[:-1], heads, -1)
        return split if form.axes == "MHD" or whole.ndim == 1 else split.swapaxes(0, 1).copy()
    if form.columns and whole.ndim == 1:
        return whole[:, None]
    return whole.T.copy() if form.turned and whole.ndim == 2 else whole


def _of_latents(
    parts: Mapping[str, Array], part: str, form: _Form, axes: str | None = None
) -> Array:
    """A matrix of latent attention in its form: down, or up to several projections."""
    where, letters = part.split()
    if where == "down":
        return parts[part].T.copy() if form.turned else parts[part]
    own = {f"W_{letter}": parts[f"up {letter}"] for letter in letters}
    return _shaped(own, f"W_{letters[0]}", letters if len(letters) > 1 else "", form, axes)


def _columns(weights: Mapping[str, Array], role: str) -> Array:
    """The columns of one projection; zeros for those of a layer beside attention."""
    if role[-1] != OTHER:
        return weights[role]
    return np.zeros([*weights["W_q"].shape[:1], WIDER * WIDTH][role[:2] == "b_" :])


def _given(own: Any, framework: str) -> Any:
    """Numbers that are not judged, or layers of them, in a library."""
    if isinstance(own, tuple):
        return tuple(_given(one, framework) for one in own)
    if isinstance(own, Mapping):
        leaves = {name: _given(one, framework) for name, one in own.items()}
        return Tree(leaves, lambda name: _given(own[name], framework))
    if own is None or framework == "numpy":
        return own
    return _in_library(own.astype(np.float32).astype(float), framework)


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

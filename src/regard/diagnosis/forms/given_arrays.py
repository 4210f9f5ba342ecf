"""Functions of the usual arguments, made of functions that ask for learned arrays besides.

Biases of positions as in Transformer-XL, rows for distances as in Shaw's: each gets numbers in the
shape that its documentation gives it, and they count as given. Must not know any probe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import unread_of
from regard.diagnosis.forms.after_attention import like_another
from regard.diagnosis.forms.beside_weights import HEADS as HEADS_IN_TREES
from regard.diagnosis.forms.construction import OF_FEATURES
from regard.diagnosis.forms.einsums import HEADS, WIDTHS
from regard.diagnosis.forms.latent_weights import latent_part
from regard.diagnosis.forms.packing import PAGED_KEYS, PAGED_VALUES, TABLE, Alternative, Packing
from regard.diagnosis.forms.source import code_called
from regard.diagnosis.forms.tree_code import NORM, projection
from regard.diagnosis.forms.trees import TREES
from regard.diagnosis.reading.documented import (
    documented_axes,
    documented_sizes,
    length_written,
    letters_of,
)
from regard.diagnosis.reading.parameter_names import is_upstream, plain, role_of
from regard.diagnosis.reading.signature import EDGES, PROJECTIONS, Parameter, text_of

# Vectors of positions that are named as in the paper, and matrices for rows of positions.
BARE = re.compile("[uvwrb]")
MATRIX = re.compile(
    r"[wW]_?([kq]_?)?[rRpP](el|os)?|[wW]_?([rRpP]|rel|pos)_?[kq]|(rel|pos)_?([kq]|key|query)_?(proj|w)?"
)
# The matrix between queries and keys of Luong's general score.
BETWEEN = re.compile("w_?(a|g|s|general|bilinear|score|att(n|ention)?)?", re.IGNORECASE)
# Rows for distances that are added to values, which get zeros: what they add is not judged.
OF_VALUES = re.compile(
    r"^(rel|a|r|e|emb|pos|p)_?(v|vals?|values?)$|rel\w*_(v|vals?|values?)\b", re.I
)
# Keys and values of other tokens, which are attended to: those of a prefix.
OF_OTHER_TOKENS = re.compile(
    r"(prefix|past|shared|prompt|system|previous|prev|old|history|cached|context|ctx)_"
    r"(k|v|keys?|values?)$|(k|v|keys?|values?)_(prefix|past|shared|prompt|system|old|history)$",
    re.IGNORECASE,
)
# Names of numbers for distances.
OF_DISTANCES = re.compile(r"\w*(table|rel|bias|distance|bucket|pos)\w*", re.IGNORECASE)
OF_HEADS = re.compile(f"{WIDTHS.pattern}|[de]")  # where embeddings have another letter
BOTH_SIDES = re.compile(r"2 \* \w+ [+-] 1")  # of 0: a row for each distance
FURTHEST = 2  # the distance at which rows of distances end
BUCKETS, ANY = 32, 7  # lengths that nothing tells


class Given(Packing):
    """A function that gets what it asks for besides. `__wrapped__` is the function itself."""

    left_out: tuple[str, ...] = ()
    has_table = False
    arrays: Mapping[str, Any] = {}  # as they were at the last call
    with_values = False  # whether rows that are added to values are drawn too


@contextlib.contextmanager
def with_value_rows(function: Any) -> Iterator[None]:
    """Let a function get rows that are added to values for the time of the block."""
    while not isinstance(function, Given) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if isinstance(function, Given):
        function.with_values = True
    try:
        yield
    finally:
        if isinstance(function, Given):
            function.with_values = False


def with_given(function: Callable[..., Any], parameters: Sequence[Parameter]) -> Alternative | None:
    """The function without the learned arrays that it asks for besides, if they have shapes."""
    text, names = text_of(function), [one.name for one in parameters]
    required = [one.name for one in parameters if one.required]
    projected = {n for n in required if (role_of(n) or projection(n)) in PROJECTIONS}
    queries = any(role_of(n) == "query" for n in names)
    of_tree = role_of(names[0]) == "x" and any(TREES.fullmatch(plain(n)) for n in names[1:])
    if not (projected or queries or of_tree or any(role_of(n) == "context" for n in names)):
        return None
    shapes, words = documented_sizes(text, names), documented_axes(text, names)
    letters = letters_of(words) or {}
    shapes |= {n: [] for n in names if projected and n not in shapes and MATRIX.fullmatch(n)}
    asked = [
        one
        for one in parameters[1:]
        if one.name in shapes and not _is_of_tokens(letters.get(one.name, ""))
        if one.required and _is_besides(one, bool(projected), role_of(names[0]), shapes[one.name])
        if projected or queries or (OF_DISTANCES if of_tree else BETWEEN).fullmatch(one.name)
    ]
    if not asked or any(is_upstream(one.name) for one in parameters):
        return None
    in_shapes = {word for one in asked for size in shapes[one.name] for word in _words(size)}
    counts = {
        one.name: FURTHEST if one.required else one.default
        for one in parameters
        if one.name in in_shapes and role_of(one.name) is None
        if one.required or type(one.default) is int
    }
    left = {one.name for one in asked}
    rest = [one for one in parameters if one.name not in left and not _is_fixed(one, counts)]

    first = parameters[0].name
    plus = "softplus" in f"{text}\n{code_called(function)}"
    features = [one.name for one in asked if plus and OF_FEATURES.search(one.name)]

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        known = counts | _sizes(given, words)
        like = next(iter(given.values()))
        found = {}
        for number, one in enumerate(asked):
            sizes = shapes[one.name] or _as_first(given, projected)
            drawn = np.random.default_rng(40 + number).normal(
                size=[_value(size, known, of_tree=of_tree) for size in sizes]
            )
            if not projected and len(sizes) == 2 and BETWEEN.fullmatch(one.name):
                drawn, back = _turning(drawn, words.get(first, ()), words[one.name])
                found[first] = given[first] @ like_another(back, given[first])
            kept = made.with_values or not OF_VALUES.search(one.name)
            kept = kept and one.name not in features
            found[one.name] = like_another(drawn * kept, like)
        made.arrays = {**found}
        fixed = {n: size for n, size in counts.items() if n not in given}
        return {**given, **found, **fixed}

    made = Given(function, pack)
    of_values = (one.name for one in asked if OF_VALUES.search(one.name))
    made.left_out = (*of_values, *features)
    made.has_table = any(
        OF_DISTANCES.search(one.name) or any(map(BOTH_SIDES.fullmatch, shapes[one.name]))
        for one in asked
    )
    learned = (BARE.fullmatch, MATRIX.fullmatch, OF_DISTANCES.search)
    asked_for = [one.name for one in asked if any(kind(one.name) for kind in learned)]
    made.unread = unread_of(function, asked_for)
    return made, [replace(one, keyword=True) for one in rest]


def _turning(drawn: Array, query: Sequence[str], matrix: Sequence[str]) -> tuple[Array, Array]:
    """A matrix between queries and keys, and by what queries meet it as what they are.

    It is the identity where its documented axes do not tell which of them is the queries'.
    """
    if len(set(drawn.shape)) > 1 or matrix[0] == matrix[1] or not {*query[-1:]} & {*matrix}:
        return np.eye(*drawn.shape), np.eye(drawn.shape[0])
    turned = np.linalg.qr(drawn)[0]
    return turned, turned.T if matrix[0] == query[-1] else turned


def _is_besides(one: Parameter, projected: bool, first: str | None, shape: Sequence[str]) -> bool:
    """Whether an argument has none of the usual roles, or not that of its name.

    Nor has one that is called embeddings beside those that come `first`, or a bias of buckets.
    """
    if NORM.search(one.name) or latent_part(one.name):  # weights too, which trees.py makes
        return False
    role = role_of(one.name) or projection(one.name) or EDGES.search(one.name)
    if any(own.match(one.name) for own in (PAGED_KEYS, PAGED_VALUES, TABLE, OF_OTHER_TOKENS)):
        return False
    bare = projected and BARE.fullmatch(one.name) is not None
    of_buckets = role == "bias" and any("bucket" in size.lower() for size in shape)
    return not role or bare or of_buckets or role == first == "x"


def _is_of_tokens(axes: str) -> bool:
    """Whether an array has a number, or a row, for each token: a mask, or more of them."""
    rows = axes.startswith("BT") or ("T" in axes and len(axes) < 3)
    return bool(axes) and ({*axes} <= {*"BT1"} or rows)


def _is_fixed(one: Parameter, counts: Mapping[str, int]) -> bool:
    return one.name in counts and one.required


def _sizes(given: Mapping[str, Any], words: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The lengths of axes by their names, as the arguments have them."""
    found = dict[str, int]()
    for name, own in words.items():
        shape = getattr(given.get(name), "shape", ())
        if len(own) == len(shape):
            found |= dict(zip(own, map(int, shape), strict=True))
    found |= {n: size for n, size in given.items() if type(size) is int}
    heads = next((size for word, size in found.items() if HEADS.fullmatch(word.lower())), 1)
    matrix = next((one for n, one in given.items() if role_of(n) == "W_q"), None)
    width = matrix.shape[-1] // heads if matrix is not None and matrix.ndim == 2 else 0
    return {"": width} | found


def _value(size: str, known: Mapping[str, int], *, of_tree: bool) -> int:
    """A length, as `2*clip + 1`, with the lengths that are known."""

    def of(name: str) -> int:
        if name in known:
            return known[name]
        if BOTH_SIDES.fullmatch(size):
            return FURTHEST
        if OF_HEADS.fullmatch(name.lower()) and known.get(""):
            return known[""]
        if of_tree and HEADS.fullmatch(name.lower()):
            return HEADS_IN_TREES
        return BUCKETS if "bucket" in name else ANY if name == size else FURTHEST

    return length_written(size, of)


def _words(size: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", size)


def _as_first(given: Mapping[str, Any], projected: set[str]) -> list[str]:
    """The shape of the first projection, for a matrix of positions whose shape is not said."""
    first = next(given[name] for name in given if name in projected)
    return [str(int(size)) for size in first.shape]

"""A labelled attention problem: words, vectors, weights, options, and what should come out.

Owns what a problem consists of and every check that its parts fit together. A message begins with
the name of the field that it is about, so that the formats can put the key of a file in its place.
Must not know files, kernels or views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.boundary.parse import (
    MAX_AXES,
    as_booleans,
    as_integer,
    as_labels,
    as_number,
    as_number_or_numbers,
    as_numbers,
    check_choice,
    check_text,
    either,
    shown,
)
from regard.errors import ProblemError, safe_text
from regard.textbook.steps import textbook

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Booleans = NDArray[np.bool_]

# Where the numbers of a problem start: projections of embeddings, or ready vectors.
PROJECTED = ("embeddings", "context", "W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")
READY = ("queries", "keys", "values")

# What one recipe of random matrices may draw, and what one text file may come to hold.
MAX_NUMBERS = 10_000_000
_ALIASES = {"X": "embeddings"}


@dataclass(frozen=True, kw_only=True)
class RandomMatrices:
    """A recipe for random matrices: one seeded stream, drawn from in a stated order.

    ``generator="legacy"`` is ``np.random.RandomState(seed)``, the stream behind
    ``np.random.seed``; "default_rng" is ``np.random.default_rng(seed)``. ``distribution`` is
    "uniform" on [0, 1) or standard "normal". ``draw`` names fields of a problem ("X" is another
    name for "embeddings"), and ``shapes`` has one shape for each.

    >>> recipe = RandomMatrices(
    ...     generator="legacy", seed=42, distribution="uniform", draw=("X",), shapes={"X": (1, 2)}
    ... )
    >>> recipe.matrices()["embeddings"].round(8).tolist()
    [[0.37454012, 0.95071431]]
    """

    generator: Literal["legacy", "default_rng"]
    seed: int
    distribution: Literal["uniform", "normal"]
    draw: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        check_choice("random.generator", self.generator, ("legacy", "default_rng"))
        check_choice("random.distribution", self.distribution, ("uniform", "normal"))
        bits = 32 if self.generator == "legacy" else 63
        seed = as_integer("random.seed", self.seed, bits=63)
        if not 0 <= seed < 2**bits:
            raise ProblemError(
                f"random.seed is {shown(seed)}; with the generator {self.generator} it must be "
                f"at least 0 and at most 2**{bits} - 1"
            )
        _set(self, "seed", seed)
        draw = as_labels("random.draw", self.draw)
        if not draw:
            raise ProblemError("random.draw is empty; name the matrices in the order of drawing")
        drawable = (*_ALIASES, *PROJECTED, *READY)
        for name in draw:
            if name not in drawable:
                raise ProblemError(
                    f"random.draw names {shown(name)}; it may name {', '.join(drawable)}"
                )
        _set(self, "draw", draw)
        if len(set(self.fields)) < len(draw):
            raise ProblemError(f"random.draw names a matrix twice: {', '.join(draw)}")
        if not isinstance(self.shapes, Mapping):
            raise ProblemError(f"random.shapes must be a table, not {shown(self.shapes)}")
        shapes = {str(name): _shape(str(name), shape) for name, shape in self.shapes.items()}
        for name in [*draw, *shapes]:
            if name not in shapes or name not in draw:
                here, there = ("draw", "shapes") if name in draw else ("shapes", "draw")
                raise ProblemError(
                    f"random.{here} has {shown(name)} but random.{there} has not; "
                    "every drawn matrix needs one shape"
                )
        total = sum(math.prod(shape) for shape in shapes.values())
        if total > MAX_NUMBERS:
            raise ProblemError(
                f"random.shapes asks for {shown(total)} numbers in total; "
                f"at most {MAX_NUMBERS} are drawn"
            )
        _set(self, "shapes", MappingProxyType({name: shapes[name] for name in draw}))

    @property
    def fields(self) -> tuple[str, ...]:
        """The drawn names as fields of a problem, in order."""
        return tuple(_ALIASES.get(name, name) for name in self.draw)

    def matrices(self) -> dict[str, Array]:
        """The drawn matrices by field name, all from one stream."""
        stream: Any
        if self.generator == "legacy":
            stream = np.random.RandomState(self.seed)
            sample = stream.random_sample  # what rand draws, with the shape as one argument
        else:
            stream = np.random.default_rng(self.seed)
            sample = stream.random
        if self.distribution == "normal":
            sample = stream.standard_normal
        return {
            name: sample(shape)
            for name, shape in zip(self.fields, self.shapes.values(), strict=True)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), _fields_of(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class Expectation:
    """What a step should come out as: checked, never used in the calculation.

    It holds when |ours − value| ≤ within + relative·|value|; an infinity or NaN must be met
    as such. `at` names one cell by labels and positions, one for each axis but that of the heads;
    without it, `value` is the whole step. `variance` is that of all cells of the step.
    """

    step: str
    value: Array | float | None = None
    at: tuple[str | int, ...] | None = None
    variance: float | None = None
    head: int | None = None
    within: float = 5.0e-9
    relative: float = 0.0

    def __post_init__(self) -> None:
        check_step("expect", self.step)
        name = f"expect.{self.step}"
        if self.value is None and self.variance is None:
            raise ProblemError(f"{name} says neither value nor variance; give one of them")
        if self.value is not None:
            _set(self, "value", as_number_or_numbers(f"{name}.value", self.value))
        if self.at is not None:
            if self.value is None:
                raise ProblemError(f"{name}.at names a cell but there is no value for it")
            if np.ndim(self.value):
                raise ProblemError(
                    f"{name}.at names one cell but value has the shape {np.shape(self.value)}; "
                    "give one number, or leave out at to give the whole step"
                )
            _set(self, "at", _cell(f"{name}.at", self.at))
        for key in ("variance", "within", "relative"):
            if getattr(self, key) is not None:
                number = as_number(f"{name}.{key}", getattr(self, key))
                if key != "variance" and not (number >= 0 and math.isfinite(number)):
                    raise ProblemError(
                        f"{name}.{key} is {number}; it must be 0 or more, and finite"
                    )
                _set(self, key, number)
        if self.head is not None:
            head = as_integer(f"{name}.head", self.head)
            if head < 0:
                raise ProblemError(f"{name}.head is {shown(head)}; heads count from 0")
            _set(self, "head", head)


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """An attention problem with names: everything that `regard.explain` needs.

    It starts either from `embeddings` and the weights `W_q`, `W_k`, `W_v` (queries are
    ``embeddings @ W_q``, heads stand side by side in the columns), or from ready `queries`, `keys`
    and `values`. Arrays are copied to float64 and cannot be written. NaN and infinity are allowed
    in them, because finding where one starts is a use.

    Parameters
    ----------
    title, note : str
        What the problem is called, and one remark.
    embeddings, context : array, (L, M) and (S, N)
        One row per token. Without a context the tokens look at each other (self-attention).
    W_q, W_k, W_v, W_o : array, (M, H·D), (N, G·D), (N, G·E), (H·E, F)
        The weights; without heads (M, D), (N, D), (N, E), (E, F).
    b_q, b_k, b_v, b_o : array
        What is added after each product: as long as the weights have columns.
    heads, key_heads : int
        H and G. None: there is no head axis; `key_heads` is otherwise the same as `heads`.
    queries, keys, values : array, (L, D) or (D,), (S, D), (S, E)
        Ready vectors, or with a head axis in front: (H, L, D), (G, S, D), (G, S, E).
    query_labels, key_labels : tuple of str
        Names of the rows. In self-attention the keys bear the names of the queries.
    embedding_features, context_features, key_features, value_features, output_features
        Names of the columns. Keys and queries share theirs.
    row_notes : mapping of str to tuple of str
        For the name of a step, one remark per row.
    mask, bias, causal, window, offset, scale, softcap, sink
        As in `regard.attention`. True in a mask means that the query may see the key.
    lengths : int
        How many keys are real; those after them are padding.
    query_segments, key_segments : tuple of int
        A query sees only keys of its own segment.
    softmax : {"shifted", "unshifted"}
        Whether the maximum of each row is subtracted before exp.
    random : RandomMatrices
        A recipe from which the fields that it names are drawn.
    expect : tuple of Expectation
        What should come out.

    Raises
    ------
    ProblemError
        If parts are missing or do not fit together; the message names the field.

    Examples
    --------
    >>> Problem(
    ...     title="Pets", query_labels=("pet",), key_labels=("cat", "car"),
    ...     queries=[1, 0], keys=[[2, 1], [0, 3]], values=[[1], [0]],
    ... )
    Problem: Pets
      queries     pet
      keys        cat, car
      given       queries (2,)  keys (2, 2)  values (2, 1)
    """

    title: str = ""
    note: str = ""
    embeddings: Array | None = None
    context: Array | None = None
    W_q: Array | None = None
    W_k: Array | None = None
    W_v: Array | None = None
    W_o: Array | None = None
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None
    heads: int | None = None
    key_heads: int | None = None
    queries: Array | None = None
    keys: Array | None = None
    values: Array | None = None
    query_labels: tuple[str, ...] | None = None
    key_labels: tuple[str, ...] | None = None
    embedding_features: tuple[str, ...] | None = None
    context_features: tuple[str, ...] | None = None
    key_features: tuple[str, ...] | None = None
    value_features: tuple[str, ...] | None = None
    output_features: tuple[str, ...] | None = None
    row_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mask: Booleans | None = None
    bias: float | Array | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    lengths: int | None = None
    query_segments: tuple[int, ...] | None = None
    key_segments: tuple[int, ...] | None = None
    offset: int | Literal["end"] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: float | Array | None = None
    softmax: Literal["shifted", "unshifted"] = "shifted"
    random: RandomMatrices | None = None
    expect: tuple[Expectation, ...] = ()

    def __post_init__(self) -> None:
        check_text("title", self.title)
        check_text("note", self.note)
        _draw(self)
        for name in (*PROJECTED, *READY):
            if (given := getattr(self, name)) is not None:
                _set(self, name, as_numbers(name, given))
        _check_presence(self)
        sizes = _check_projected(self) if self.embeddings is not None else _check_ready(self)
        _check_options(self, sizes)
        _check_names(self, sizes)
        _check_expectations(self)

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some fields changed.

        A field that only repeats another follows it: `key_labels` in self-attention, `key_heads`
        where it equals `heads`, `heads` of ready vectors. Changing a drawn matrix keeps the others
        and drops the recipe; changing the recipe draws anew.
        """
        kept = _fields_of(self)
        if self.embeddings is not None and self.context is None:
            kept["key_labels"] = None
        if self.embeddings is None:
            kept["heads"] = kept["key_heads"] = None
        elif self.key_heads == self.heads:
            kept["key_heads"] = None
        if self.random is not None:
            if "random" in changes:
                kept |= dict.fromkeys(self.random.fields)
            elif not changes.keys().isdisjoint(self.random.fields):
                kept["random"] = None
        return Problem(**(kept | changes))

    def __repr__(self) -> str:
        return _summary(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), _fields_of(self))


# --- where the numbers come from -----------------------------------------------------------------


def _draw(problem: Problem) -> None:
    """Fill in what the recipe draws."""
    if problem.random is None:
        return
    if not isinstance(problem.random, RandomMatrices):
        raise ProblemError(f"random must be a RandomMatrices, not {shown(problem.random)}")
    for name, drawn in problem.random.matrices().items():
        given = getattr(problem, name)
        if given is not None and not np.array_equal(as_numbers(name, given), drawn):
            raise ProblemError(
                f"{name} is given and also drawn by random, with other numbers; keep one of the two"
            )
        _set(problem, name, drawn)


def _check_presence(problem: Problem) -> None:
    present = {name for name in (*PROJECTED, *READY) if getattr(problem, name) is not None}
    projected = [name for name in PROJECTED if name in present]
    ready = [name for name in READY if name in present]
    if projected and ready:
        raise ProblemError(
            f"{ready[0]} and {projected[0]} are both given; a problem starts either from "
            "embeddings and weights or from ready queries, keys and values"
        )
    needed = READY if ready else ("embeddings", "W_q", "W_k", "W_v")
    missing = [name for name in needed if name not in present]
    if missing:
        if not present:
            raise ProblemError(
                "embeddings, W_q, W_k and W_v are needed, or queries, keys and values; "
                "none of them is given"
            )
        raise ProblemError(
            f"{missing[0]} is missing; {(ready or projected)[0]} is given, "
            f"so {', '.join(needed)} are all needed"
        )


def _check_projected(problem: Problem) -> dict[str, int]:
    """The size of every axis of the textbook, for embeddings and weights."""
    embeddings = _axes(problem, "embeddings", "(L, M)", 2)
    context = embeddings
    source = "embeddings"
    if problem.context is not None:
        context, source = _axes(problem, "context", "(S, N)", 2), "context"
    heads, key_heads = _heads(problem)
    columns = {}
    for name, origin, rows in (
        ("W_q", "embeddings", embeddings[1]),
        ("W_k", source, context[1]),
        ("W_v", source, context[1]),
    ):
        shape = _axes(problem, name, "(rows, columns)", 2)
        if shape[0] != rows:
            raise ProblemError(
                f"{name} has {shape[0]} rows but {origin} has {rows} columns; "
                f"they must match ({origin} @ {name})"
            )
        columns[name] = shape[1]
    for name, count, title in (
        ("W_q", heads, "heads"),
        ("W_k", key_heads, "key_heads"),
        ("W_v", key_heads, "key_heads"),
    ):
        if count and columns[name] % count:
            raise ProblemError(
                f"{name} has {columns[name]} columns but {title} is {count}; heads stand side by "
                "side in the columns, so the first must be a multiple of the second"
            )
    key_width = columns["W_q"] // (heads or 1)
    if columns["W_k"] != key_width * (key_heads or 1):
        because = f" (heads {heads}, key_heads {key_heads}, each {key_width} wide)" if heads else ""
        raise ProblemError(
            f"W_k has {columns['W_k']} columns but W_q has {columns['W_q']}, so it needs "
            f"{key_width * (key_heads or 1)}{because}"
        )
    value_width = columns["W_v"] // (key_heads or 1)
    sizes = {
        "L": embeddings[0],
        "S": context[0],
        "M": embeddings[1],
        "N": context[1],
        "D": key_width,
        "E": value_width,
        "F": value_width,
        "HE": value_width * (heads or 1),
    }
    if problem.W_o is not None:
        shape = _axes(problem, "W_o", "(rows, columns)", 2)
        if shape[0] != sizes["HE"]:
            raise ProblemError(
                f"W_o has {shape[0]} rows but the output is {sizes['HE']} wide"
                + (f" ({heads} heads of {value_width})" if heads else "")
                + "; they must match"
            )
        columns["W_o"] = sizes["F"] = shape[1]
    for letter in "qkvo":
        bias, weights = f"b_{letter}", f"W_{letter}"
        if getattr(problem, bias) is not None:
            if weights not in columns:
                raise ProblemError(f"{bias} is given without {weights}; give both or neither")
            (length,) = _axes(problem, bias, "(columns,)", 1)
            if length != columns[weights]:
                raise ProblemError(
                    f"{bias} has {length} numbers but {weights} has {columns[weights]} columns; "
                    "they must match"
                )
    return sizes


def _check_ready(problem: Problem) -> dict[str, int]:
    """The size of every axis of the textbook, for ready queries, keys and values."""
    queries = _axes(problem, "queries", "(D,), (L, D) or (H, L, D)", 1, 2, 3)
    axes = max(2, len(queries))
    keys = _axes(problem, "keys", "(S, D)" if axes == 2 else "(G, S, D), as queries", axes)
    values = _axes(problem, "values", "(S, E)" if axes == 2 else "(G, S, E), as queries", axes)
    if keys[-1] != queries[-1]:
        raise ProblemError(
            f"keys has {keys[-1]} columns but queries has {queries[-1]}; they must match"
        )
    if values[-2] != keys[-2]:
        raise ProblemError(
            f"values has {values[-2]} rows but keys has {keys[-2]}; every key needs one value"
        )
    for name, count, found in (
        ("heads", problem.heads, queries[0] if axes == 3 else None),
        ("key_heads", problem.key_heads, keys[0] if axes == 3 else None),
    ):
        array = "queries" if name == "heads" else "keys"
        if count is not None:
            as_integer(name, count)
        if found is None and count is not None:
            raise ProblemError(
                f"{name} is {shown(count)} but {array} has {len(queries)} axes; "
                f"ready {array} with heads have the shape (heads, rows, columns)"
            )
        if count is not None and count != found:
            raise ProblemError(f"{name} is {shown(count)} but {array} has {found} heads")
        _set(problem, name, found)
    if axes == 3 and values[0] != keys[0]:
        raise ProblemError(f"values has {values[0]} heads but keys has {keys[0]}; they must match")
    _heads(problem)
    return {
        "L": queries[-2] if len(queries) > 1 else 1,
        "S": keys[-2],
        "D": keys[-1],
        "E": values[-1],
        "F": values[-1],
    }


def _axes(problem: Problem, name: str, wanted: str, *counts: int) -> tuple[int, ...]:
    """The shape of a field, which must have one of these numbers of axes, and no empty one."""
    shape: tuple[int, ...] = getattr(problem, name).shape
    if len(shape) not in counts:
        raise ProblemError(
            f"{name} has {len(shape)} axes, shape {shape}, but needs {either(counts)}: {wanted}"
        )
    if 0 in shape:
        raise ProblemError(
            f"{name} is empty, shape {shape}; it needs at least one row and one column"
        )
    return shape


def _heads(problem: Problem) -> tuple[int | None, int | None]:
    if problem.heads is None:
        if problem.key_heads is not None:
            raise ProblemError(f"key_heads is {shown(problem.key_heads)} but heads is not given")
        return None, None
    for name in ("heads", "key_heads"):
        count = getattr(problem, name)
        count = problem.heads if count is None else as_integer(name, count)
        if count < 1:
            raise ProblemError(f"{name} is {shown(count)}; it must be 1 or more")
        _set(problem, name, count)
    assert problem.key_heads is not None
    if problem.heads % problem.key_heads:
        raise ProblemError(
            f"heads is {shown(problem.heads)} but key_heads is {shown(problem.key_heads)}; "
            "the first must be a multiple of the second"
        )
    return problem.heads, problem.key_heads


# --- options -------------------------------------------------------------------------------------


def _check_options(problem: Problem, sizes: Mapping[str, int]) -> None:
    rows, keys = sizes["L"], sizes["S"]
    shape: tuple[int, ...] = (rows, keys)
    if problem.heads is not None:
        shape = (problem.heads, *shape)
    elif problem.queries is not None and problem.queries.ndim == 1:
        shape = (keys,)
    if problem.mask is not None:
        _set(problem, "mask", as_booleans("mask", problem.mask))
        _check_broadcast("mask", np.shape(problem.mask), shape)
    if problem.bias is not None:
        _set(problem, "bias", as_number_or_numbers("bias", problem.bias))
        _check_broadcast("bias", np.shape(problem.bias), shape)
    if problem.sink is not None:
        sink = as_number_or_numbers("sink", problem.sink)
        _set(problem, "sink", sink)
        if np.ndim(sink) and np.shape(sink) != (problem.heads,):
            wanted = "one number" if problem.heads is None else f"one number or {problem.heads}"
            raise ProblemError(
                f"sink has the shape {np.shape(sink)} but needs {wanted}, one per head"
            )
        if not np.isfinite(sink).all():
            raise ProblemError("sink must be finite; leave it out where there is none")
    if not isinstance(problem.causal, (bool, np.bool_)):
        raise ProblemError(f"causal must be true or false, not {shown(problem.causal)}")
    _set(problem, "causal", bool(problem.causal))
    if problem.window is not None:
        _set(problem, "window", _window(problem.window))
    _check_offset(problem, rows, keys)
    if problem.lengths is not None:
        lengths = as_integer("lengths", problem.lengths)
        if not 0 <= lengths <= keys:
            raise ProblemError(
                f"lengths is {shown(lengths)} but there are {keys} keys; "
                "it says how many of them, from the first on, are real"
            )
        _set(problem, "lengths", lengths)
    _check_segments(problem, rows, keys)
    for name in ("scale", "softcap"):
        if getattr(problem, name) is not None:
            number = as_number(name, getattr(problem, name))
            if not math.isfinite(number) or (name == "softcap" and number <= 0):
                wanted = "positive and finite" if name == "softcap" else "finite"
                raise ProblemError(f"{name} is {number}; it must be {wanted}")
            _set(problem, name, number)
    check_choice("softmax", problem.softmax, ("shifted", "unshifted"))


def _check_broadcast(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(shape, scores) == scores
    except ValueError:
        fits = False
    if not fits:
        raise ProblemError(
            f"{name} has the shape {shape} but the scores have {scores}; "
            "aligned from the right, each axis must be the same or 1"
        )


def _window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ProblemError(f"window must have two entries, left and right, not {shown(window)}")
    sides = [None if side is None else as_integer("window", side) for side in window]
    if any(side is not None and side < 0 for side in sides):
        raise ProblemError(
            f"window is ({', '.join(map(shown, sides))}); "
            "it counts positions to the left and to the right, 0 or more"
        )
    return sides[0], sides[1]


def _check_offset(problem: Problem, rows: int, keys: int) -> None:
    offset = problem.offset
    if offset is None:
        if rows != keys and (problem.causal or problem.window is not None):
            raise ProblemError(
                f"offset is needed: {'causal' if problem.causal else 'window'} compares positions, "
                f"but there are {rows} queries and {keys} keys; give 0 (the first query stands at "
                'the first key) or "end" (the last query stands at the last key)'
            )
    elif isinstance(offset, str):
        if offset != "end":
            raise ProblemError(f'offset must be a whole number or "end", not {shown(offset)}')
    else:
        _set(problem, "offset", as_integer("offset", offset))


def _check_segments(problem: Problem, rows: int, keys: int) -> None:
    if problem.query_segments is None:
        if problem.key_segments is not None:
            raise ProblemError("query_segments is missing; key_segments is given")
        return
    for name, count, what in (
        ("query_segments", rows, "queries"),
        ("key_segments", keys, "keys"),
    ):
        given = getattr(problem, name)
        if given is None:
            if rows != keys:
                raise ProblemError(
                    f"{name} is missing; it can be left out only if there are as many "
                    f"keys as queries, but there are {keys} and {rows}"
                )
            continue
        if isinstance(given, np.ndarray):
            given = given.tolist()
        if not isinstance(given, (tuple, list)):
            raise ProblemError(f"{name} must be a list of whole numbers, not {shown(given)}")
        segments = tuple(as_integer(name, segment) for segment in given)
        if len(segments) != count:
            raise ProblemError(
                f"{name} has {len(segments)} numbers but there are {count} {what}; each needs one"
            )
        _set(problem, name, segments)


# --- names and expectations ----------------------------------------------------------------------


def _check_names(problem: Problem, sizes: Mapping[str, int]) -> None:
    """Labels, features and notes: one for each row or column."""
    query_source = "queries" if problem.embeddings is None else "embeddings"
    key_source = "keys"
    if problem.embeddings is not None:
        key_source = "embeddings" if problem.context is None else "context"
        if problem.context is None:
            if problem.context_features is not None:
                raise ProblemError("context_features is given but context is not")
            _share_labels(problem)
    for name, source, axis, what in (
        ("query_labels", query_source, "L", "rows"),
        ("key_labels", key_source, "S", "rows"),
        ("embedding_features", "embeddings", "M", "columns"),
        ("context_features", "context", "N", "columns"),
        ("key_features", "keys", "D", "columns"),
        ("value_features", "values", "E", "columns"),
        ("output_features", "output", "F", "columns"),
    ):
        if getattr(problem, name) is None:
            continue
        labels = as_labels(name, getattr(problem, name))
        if axis not in sizes:
            raise ProblemError(f"{name} is given but {source} is not")
        if len(labels) != sizes[axis]:
            raise ProblemError(
                f"{name} has {len(labels)} names but {source} has {sizes[axis]} {what}; "
                "each needs one"
            )
        _set(problem, name, labels)
    if not isinstance(problem.row_notes, Mapping):
        raise ProblemError(f"row_notes must be a table, not {shown(problem.row_notes)}")
    notes = {}
    for step, given in problem.row_notes.items():
        check_step("row_notes", step)
        remarks = as_labels(f"row_notes.{step}", given)
        axis_of_rows = next((axis for axis in _step_axes()[step] if axis in _ROWS), None)
        rows = sizes.get(axis_of_rows, None) if axis_of_rows else None
        if rows is None:
            raise ProblemError(f"row_notes.{step} is given but {step} has no rows here")
        if len(remarks) != rows:
            raise ProblemError(
                f"row_notes.{step} has {len(remarks)} notes but {step} has {rows} rows; "
                "each needs one"
            )
        notes[step] = remarks
    _set(problem, "row_notes", MappingProxyType(notes))


def _share_labels(problem: Problem) -> None:
    """In self-attention the rows of keys are those of the queries."""
    if problem.key_labels is not None and (
        problem.query_labels is None
        or as_labels("key_labels", problem.key_labels)
        != as_labels("query_labels", problem.query_labels)
    ):
        raise ProblemError(
            "key_labels must be the same as query_labels, because there is no context; leave it out"
        )
    _set(problem, "key_labels", problem.query_labels)


def _check_expectations(problem: Problem) -> None:
    if isinstance(problem.expect, (str, Mapping)) or not isinstance(problem.expect, Iterable):
        raise ProblemError(f"expect must be a tuple of Expectation, not {shown(problem.expect)}")
    for expectation in problem.expect:
        if not isinstance(expectation, Expectation):
            raise ProblemError(f"expect must hold Expectation, not {shown(expectation)}")
        if expectation.head is not None and expectation.head >= (problem.heads or 0):
            have = "no head axis" if problem.heads is None else f"{problem.heads} heads"
            raise ProblemError(
                f"expect.{expectation.step}.head is {shown(expectation.head)} "
                f"but the problem has {have}; heads count from 0"
            )
        axes = _axes_below_heads(problem, expectation.step)
        if expectation.at is not None and len(expectation.at) != len(axes):
            raise ProblemError(
                f"expect.{expectation.step}.at has {len(expectation.at)} entries but "
                f"{expectation.step} has {len(axes)} axes here ({', '.join(axes)}); "
                "each needs one label or position"
            )
    # A file groups them by step, so a problem does too: then both have them in the same order.
    order = list(_step_axes())
    _set(problem, "expect", tuple(sorted(problem.expect, key=lambda one: order.index(one.step))))


def _axes_below_heads(problem: Problem, step: str) -> tuple[str, ...]:
    single = problem.queries is not None and problem.queries.ndim == 1
    absent = {"H", "G", "L"} if single else {"H", "G"}
    return tuple(axis for axis in _step_axes()[step] if axis not in absent)


# The axes of the textbook that run down a matrix; the rows of W_o are the packed heads.
_ROWS = ("L", "S", "M", "N", "HE")


@cache
def _step_axes() -> dict[str, tuple[str, ...]]:
    """Every step that any problem can have, with its axes."""
    everything = {*PROJECTED, "bias", "softcap", "sink"}
    return {step.name: step.axes for step in textbook(everything, masked=True)}


def check_step(name: str, step: Any) -> None:
    """The name of a step that some problem can have."""
    if not isinstance(step, str) or step not in _step_axes():
        raise ProblemError(
            f"{name} names the step {shown(step)}, which does not exist; "
            f"the steps are {', '.join(_step_axes())}"
        )


def _cell(name: str, cell: Any) -> tuple[str | int, ...]:
    if not isinstance(cell, (list, tuple)) or not cell:
        raise ProblemError(f"{name} must be a list of labels or positions, not {shown(cell)}")
    return tuple(
        check_text(name, index) if isinstance(index, str) else as_integer(name, index)
        for index in cell
    )


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    name = f"random.shapes.{safe_text(name, 40)}"
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= MAX_AXES:
        raise ProblemError(f"{name} must be a list of 1 to {MAX_AXES} sizes, not {shown(shape)}")
    sizes = tuple(as_integer(name, size) for size in shape)
    if min(sizes) < 1:
        raise ProblemError(f"{name} has the size {shown(min(sizes))}; sizes are 1 or more")
    return sizes


# --- the object itself ---------------------------------------------------------------------------


def _set(instance: object, name: str, value: object) -> None:
    object.__setattr__(instance, name, value)  # frozen, but not yet while it is being checked


def _fields_of(instance: Any) -> dict[str, Any]:
    values = {each.name: getattr(instance, each.name) for each in fields(instance)}
    return {
        name: dict(value) if isinstance(value, MappingProxyType) else value
        for name, value in values.items()
    }


def _rebuild(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**values)


def _summary(problem: Problem) -> str:
    """A few lines: what is there, not the numbers."""
    title = safe_text(problem.title, 70)
    lines = [f"Problem: {title}" if title else "Problem"]

    def add(name: str, content: str) -> None:
        if content:
            lines.append(f"  {name:<11} {content}")

    if problem.key_labels == problem.query_labels:
        add("tokens", _few(problem.query_labels or ()))
    else:
        add("queries", _few(problem.query_labels or ()))
        add("keys", _few(problem.key_labels or ()))
    given = [
        f"{name} {getattr(problem, name).shape}"
        for name in (*PROJECTED, *READY)
        if getattr(problem, name) is not None
    ]
    add("given", "  ".join(given))
    options = [
        f"{name} {value}"
        for name in ("heads", "key_heads", "window", "lengths", "offset", "scale", "softcap")
        if (value := getattr(problem, name)) is not None
    ]
    options += ["causal"] if problem.causal else []
    for name in ("mask", "bias", "sink"):
        if (value := getattr(problem, name)) is not None:
            options.append(f"{name} {np.shape(value) or value}")
    options += ["segments"] if problem.query_segments is not None else []
    options += ["softmax unshifted"] if problem.softmax == "unshifted" else []
    add("options", "  ".join(options))
    if problem.random is not None:
        recipe = problem.random
        add(
            "random",
            f"{', '.join(recipe.draw)} ({recipe.generator}, seed {recipe.seed}, "
            f"{recipe.distribution})",
        )
    add("expects", _few(tuple(dict.fromkeys(one.step for one in problem.expect))))
    return "\n".join(lines)


def _few(labels: tuple[str, ...]) -> str:
    shown_labels = [safe_text(label, 24) for label in labels[:8]]
    more = [f"… ({len(labels)} in all)"] if len(labels) > 8 else []
    return ", ".join([*shown_labels, *more])

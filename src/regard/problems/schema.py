"""The keys of a problem file, declared once, and both ways between them and a `Problem`.

A file of any kind is first a mapping: what `tomllib` or `json` makes of it, or the arrays of an NPZ
archive under their keys. Must not know how a mapping is spelled on disk. An error from here has one
line: the file, the key, what is wrong, how to mend it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.parse import (
    as_number,
    as_number_or_numbers,
    as_numbers,
    check_choice,
    check_text,
    shown,
)
from regard.errors import ProblemError, safe_text
from regard.problems.parts import MAX_NUMBERS, PROJECTED, READY, Expectation, RandomMatrices
from regard.problems.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FORMAT = "regard/1"

# JSON has no such numbers, so they may be strings, in TOML too.
WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

# Deeper than any key goes, so that nothing downstream meets a bottomless file.
MAX_DEPTH = 32


def problem_from_mapping(data: Any, source: str = "problem") -> Problem:
    """The problem that a mapping describes; `source` names its origin in errors."""
    try:
        return _read(data)
    except ProblemError as error:
        raise ProblemError(f"{safe_text(source, 200)}: {error}") from None
    except MemoryError:
        message = "problem needs more memory than there is"
        raise ProblemError(f"{safe_text(source, 200)}: {message}") from None


def mapping_from_problem(problem: Problem, *, tables: bool = True) -> dict[str, Any]:
    """The mapping that describes a problem; matrices stay arrays.

    With `tables`, labelled vectors become tables of label and vector where that loses nothing.
    """
    data: dict[str, Any] = {}
    drawn = problem.random.fields if problem.random is not None else ()
    for key in KEYS:
        value = _stated(problem, key.field)
        if value is None or key.field in drawn:
            continue
        if key.write is not None:
            value = key.write(value)
        *parents, name = key.path.split(".")
        table = data
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    if problem.queries is not None and problem.queries.ndim == 1 and "tokens" in data:
        (label,) = data.pop("tokens")
        data = {"format": FORMAT, "query_label": label, **data}
    if tables:
        for side in _SIDES:
            for name in side.vectors:
                if name in data and side.tokens in data:
                    data[name] = _as_table(data[side.tokens], data[name])
    return {"format": FORMAT, **data}


# --- the schema ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a file: the field that it fills, and how to read and write its value.

    Without `read` the value is taken as it is, and the problem checks it.
    """

    path: str
    field: str
    read: Callable[[str, Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


def _number(name: str, value: Any) -> float:
    return as_number(name, value, WORDS)


def _numbers(name: str, value: Any) -> Array:
    return as_numbers(name, value, WORDS)


def _number_or_numbers(name: str, value: Any) -> float | Array:
    return as_number_or_numbers(name, value, WORDS)


def _vectors(name: str, value: Any) -> Array | dict[str, Array]:
    """An array, or a table of label and vector."""
    if not isinstance(value, Mapping):
        return _numbers(name, value)
    if not value:
        raise ProblemError(f"{name} is an empty table; it needs at least one label with a vector")
    table: dict[str, Array] = {}
    first = ""
    for label, vector in value.items():
        where = f"{name}.{shown(check_text(name, label))}"
        try:
            table[label] = _vector(where, vector)
            first = first or where
            width = len(next(iter(table.values())))
            if len(table[label]) != width:
                raise ProblemError(
                    f"{where} has {len(table[label])} numbers but {first} has {width}; "
                    "all vectors must be equally long"
                )
        except ProblemError as error:
            if label not in {key.path.partition(".")[0] for key in KEYS} | {*LONE_KEYS}:
                raise
            # What follows a header in TOML belongs to that table, also a key of the whole file.
            raise ProblemError(f"{error}; if {label} is no label here: {TOML_ORDER}") from None
    return table


TOML_ORDER = "keys outside a table stand before the first [table]"


def _vector(where: str, value: Any) -> Array:
    if isinstance(value, Mapping):
        raise ProblemError(f"{where} is a table, not a vector; quote a label that has dots")
    vector = _numbers(where, value)
    if vector.ndim != 1:
        raise ProblemError(f"{where} has {vector.ndim} axes; a vector has 1")
    return vector


def _window(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for side in value:
            if isinstance(side, str) and side != "unbounded":
                raise ProblemError(
                    f'{name} has {shown(side)}; each side is a whole number or "unbounded"'
                )
        return tuple(None if side == "unbounded" else side for side in value)
    return value


def _write_window(window: tuple[int | None, int | None]) -> list[int | str]:
    return ["unbounded" if side is None else side for side in window]


def _random(name: str, value: Any) -> RandomMatrices:
    return RandomMatrices(**_table(name, value, RandomMatrices))


def _write_random(recipe: RandomMatrices) -> dict[str, Any]:
    return {
        "generator": recipe.generator,
        "seed": recipe.seed,
        "distribution": recipe.distribution,
        "draw": list(recipe.draw),
        "shapes": {drawn: list(shape) for drawn, shape in recipe.shapes.items()},
    }


def _expectations(name: str, value: Any) -> tuple[Expectation, ...]:
    """A table of step and what is expected of it: one table, or several in a list."""
    if not isinstance(value, Mapping):
        raise ProblemError(f"{name} must be a table of steps, not {shown(value)}")
    expectations = []
    for step, entries in value.items():
        where = f"{name}.{safe_text(step, 40)}"
        for entry in entries if isinstance(entries, list) else [entries]:
            given = _table(where, entry, Expectation, without=("step",))
            for key, read in _READ_OF_EXPECTATION.items():
                if key in given:
                    given[key] = read(f"{where}.{key}", given[key])
            expectations.append(Expectation(step=step, **given))
    return tuple(expectations)


_READ_OF_EXPECTATION: dict[str, Callable[[str, Any], Any]] = {
    "value": _number_or_numbers,
    "variance": _number,
    "within": _number,
    "relative": _number,
}


def _write_expectations(expectations: Sequence[Expectation]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for one in expectations:
        entry = {
            each.name: value
            for each in fields(one)
            if each.name != "step" and (value := getattr(one, each.name)) is not None
        }
        if one.at is not None:
            entry["at"] = list(one.at)
        if one.relative == 0.0:
            del entry["relative"]
        data.setdefault(one.step, []).append(entry)
    return {step: entries[0] if len(entries) == 1 else entries for step, entries in data.items()}


def _notes(notes: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    return {step: list(remarks) for step, remarks in notes.items()}


KEYS = (
    Key("title", "title"),
    Key("note", "note"),
    Key("tokens", "query_labels", write=list),
    Key("context_tokens", "key_labels", write=list),
    Key("heads", "heads"),
    Key("key_heads", "key_heads"),
    Key("embeddings", "embeddings", _vectors),
    Key("context", "context", _vectors),
    *(Key(f"weights.{name}", name, _numbers) for name in PROJECTED[2:]),
    *(Key(name, name, _vectors) for name in READY),
    Key("features.embeddings", "embedding_features", write=list),
    Key("features.context", "context_features", write=list),
    Key("features.keys", "key_features", write=list),
    Key("features.values", "value_features", write=list),
    Key("features.output", "output_features", write=list),
    Key("row_notes", "row_notes", write=_notes),
    Key("options.causal", "causal"),
    Key("options.window", "window", _window, _write_window),
    Key("options.offset", "offset"),
    Key("options.scale", "scale", _number),
    Key("options.softcap", "softcap", _number),
    Key("options.sink", "sink", _number_or_numbers),
    Key("options.bias", "bias", _number_or_numbers),
    Key("options.mask", "mask"),
    Key("options.lengths", "lengths"),
    Key("options.segments.queries", "query_segments", write=list),
    Key("options.segments.keys", "key_segments", write=list),
    Key("options.softmax", "softmax"),
    Key("random", "random", _random, _write_random),
    Key("expect", "expect", _expectations, _write_expectations),
)
# Keys that fill no field by themselves.
LONE_KEYS = ("format", "query_label")

_BY_PATH = {key.path: key for key in KEYS}
_PATHS = {key.field: key.path for key in KEYS}
_TABLES = {key.path[:end] for key in KEYS for end, c in enumerate(key.path) if c == "."}
_ARRAYS = {*PROJECTED, *READY, "mask", "bias", "sink"}


@dataclass(frozen=True, slots=True)
class _Side:
    """Rows that bear the same labels: of whatever asks, or of whatever is looked at."""

    labels: str
    tokens: str
    vectors: tuple[str, ...]


_SIDES = (
    _Side("query_labels", "tokens", ("embeddings", "queries")),
    _Side("key_labels", "context_tokens", ("context", "keys", "values")),
)


# --- reading -------------------------------------------------------------------------------------


def _read(data: Any) -> Problem:
    if not isinstance(data, Mapping):
        raise ProblemError(f"problem must be a table, not {shown(data)}")
    _check_depth(data)
    values: dict[str, Any] = {}
    _collect(data, "", values)
    if "format" in values:
        check_choice("format", values.pop("format"), (FORMAT,))
    lone_label = values.pop("query_label", None)
    found: dict[str, Any] = {}
    for path, value in values.items():
        key = _BY_PATH[path]
        if isinstance(value, np.ndarray) and key.field not in _ARRAYS:
            value = _unpacked(path, value)
        found[key.field] = key.read(path, value) if key.read is not None else value
    _check_drawn(found, values)
    if lone_label is not None:
        if "query_labels" in found:
            raise ProblemError(
                "query_label and tokens are both given; tokens name the rows of a matrix, "
                "query_label names one plain vector"
            )
        found["query_labels"] = (check_text("query_label", _unpacked("query_label", lone_label)),)
    for side in _SIDES:
        _resolve_labels(side, found)
    paths = _PATHS if lone_label is None else {**_PATHS, "query_labels": "query_label"}
    try:
        problem = Problem(**found)
    except ProblemError as error:
        # What a problem says of its field is said of the key under which the file has it.
        raise error.with_keys(paths) from None
    if lone_label is not None and (problem.queries is None or problem.queries.ndim != 1):
        raise ProblemError(
            "query_label names one plain vector, queries = [numbers], which is not given; "
            "use tokens for the rows of a matrix"
        )
    return problem


def _check_depth(data: Mapping[str, Any]) -> None:
    """No recursion: the file may be as deep as its parser allowed."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (Mapping, list))
        ]
        if not level:
            return
    raise ProblemError(f"problem is nested deeper than {MAX_DEPTH} tables and lists")


def _collect(table: Mapping[Any, Any], prefix: str, values: dict[str, Any]) -> None:
    """The value of every known key under its path; any other key is an error."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(name, str) and "." in name:
            raise ProblemError(
                f"{prefix}{shown(name)} is one key with a dot in it; keys stand in nested tables"
            )
        if path in _TABLES:
            if not isinstance(value, Mapping):
                raise ProblemError(f"{path} must be a table of keys, not {shown(value)}")
            _collect(value, f"{path}.", values)
        elif path not in _BY_PATH and path not in LONE_KEYS:
            raise _unknown(prefix, name, (*_BY_PATH, *_TABLES, *LONE_KEYS))
        elif value is None:
            raise ProblemError(f"{path} is null; leave the key out")
        else:
            values[path] = value


def _table(name: str, value: Any, kind: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A table whose keys are the fields of a dataclass."""
    if not isinstance(value, Mapping):
        raise ProblemError(f"{name} must be a table of keys, not {shown(value)}")
    known = {each.name: each for each in fields(kind) if each.name not in without}
    for key, inner in value.items():
        if key not in known:
            raise _unknown(f"{name}.", key, tuple(f"{name}.{each}" for each in known))
        if inner is None:
            raise ProblemError(f"{name}.{key} is null; leave the key out")
    if kind is RandomMatrices and (missing := known.keys() - value.keys()):
        raise ProblemError(
            f"{name}.{min(missing)} is missing; a recipe has the keys {', '.join(known)}"
        )
    return {
        key: _unpacked(f"{name}.{key}", inner) if key != "value" else inner
        for key, inner in value.items()
    }


def _unknown(prefix: str, name: Any, known: Sequence[str]) -> ProblemError:
    """An unknown key, and the known one that was probably meant, wherever its place is."""
    given = safe_text(name, 40)
    path = f"{prefix}{given}"
    last_names: dict[str, str] = {}
    for each in known:
        last_names.setdefault(each.rpartition(".")[2].lower(), each)
    siblings = [each for each in known if each.rpartition(".")[0] == prefix.removesuffix(".")]
    near_here = {each.rpartition(".")[2].lower(): each for each in siblings}
    if exact := last_names.get(given.lower()):
        order = f" ({TOML_ORDER})" if prefix and "." not in exact else ""
        return ProblemError(f"{path} is not a known key; did you mean {exact}?{order}")
    for choices in (near_here, last_names):
        if near := difflib.get_close_matches(given.lower(), choices, n=1):
            return ProblemError(f"{path} is not a known key; did you mean {choices[near[0]]}?")
    return ProblemError(f"{path} is not a known key; known here are {', '.join(siblings)}")


def _unpacked(path: str, value: Any) -> Any:
    """Lists and plain values for what an archive holds as an array, but is none in a problem."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size > MAX_NUMBERS:
        raise ProblemError(f"{path} has {value.size} entries; at most {MAX_NUMBERS} are read")
    return value.tolist()


def _check_drawn(found: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    recipe = found.get("random")
    for name in recipe.fields if recipe is not None else ():
        if name in found:
            raise ProblemError(
                f"random.draw names {name}, but {_PATHS[name]} is given as well; keep one of them"
            )


def _resolve_labels(side: _Side, found: dict[str, Any]) -> None:
    """Stack the vectors of tables in the order of the tokens, or in their own."""
    tables = {name: found[name] for name in side.vectors if isinstance(found.get(name), dict)}
    if not tables:
        return
    first = next(iter(tables))
    labels: Any = found.get(side.labels)
    if labels is None:
        labels = list(tables[first])
        for name, table in tables.items():
            if extra := [label for label in table if label not in tables[first]]:
                raise ProblemError(
                    f"{name} has {_listed(extra)} but {first} has not; "
                    "the two tables must have the same labels"
                )
    elif not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ProblemError(f"{side.tokens} must be a list of strings, in quotes")
    for name, table in tables.items():
        if missing := [label for label in dict.fromkeys(labels) if label not in table]:
            raise ProblemError(
                f"{name} has no vector for {_listed(missing)}; "
                f"it has {len(table)} labels, among them {_listed(list(table))}"
            )
        width = len(next(iter(table.values())))
        # A short list of tokens and one long vector could otherwise fill any memory.
        if len(labels) * width > MAX_NUMBERS:
            raise ProblemError(
                f"{name} becomes a matrix of {len(labels)} × {width} numbers; "
                f"at most {MAX_NUMBERS} are read"
            )
        found[name] = np.array([table[label] for label in labels]).reshape(len(labels), width)
    found[side.labels] = labels


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 8} more" if len(labels) > 8 else ""
    return ", ".join(shown(label) for label in labels[:8]) + more


# --- writing -------------------------------------------------------------------------------------

_DEFAULTS = {each.name: each.default for each in fields(Problem)}


def _stated(problem: Problem, field: str) -> Any:
    """The value of a field if it says more than its absence would."""
    value = getattr(problem, field)
    if field == "key_labels" and problem.embeddings is not None and problem.context is None:
        return None
    if field == "key_heads" and value == problem.heads:
        return None
    if isinstance(value, np.ndarray):
        return value
    empty = value is None or (isinstance(value, (str, tuple, Mapping)) and len(value) == 0)
    return None if empty or value == _DEFAULTS[field] else value


def _as_table(labels: Sequence[str], rows: Array) -> Array | dict[str, Array]:
    """A table, unless the rows have a head axis or one label stands for two vectors."""
    if rows.ndim != 2:
        return rows
    table: dict[str, Array] = {}
    for label, row in zip(labels, rows, strict=True):
        if table.setdefault(label, row).tobytes() != row.tobytes():
            return rows
    return table

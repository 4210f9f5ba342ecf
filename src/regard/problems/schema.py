"""The keys of a problem file, declared once, and both ways between them and a `Problem`.

A file of any kind is first a mapping: what `tomllib` or `json` makes of it, or the arrays of an NPZ
archive under their keys. Must not know how a mapping is spelled on disk. An error from here has one
line: the file, the key, what is wrong, how to mend it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.files import about
from regard.boundary.parse import (
    MAX_DEPTH,
    MAX_NUMBERS,
    WORDS,
    as_number,
    as_number_or_numbers,
    check_choice,
    check_text,
    read_numbers,
    shown,
)
from regard.compute import spelling
from regard.compute.loss import LOSS
from regard.errors import ProblemError, safe_text
from regard.problems.parts import READY, Expectation, RandomMatrices, fields_of
from regard.problems.problem import Problem
from regard.problems.tables import SIDES, as_table, read_vectors, stack_tables
from regard.textbook.steps import PROJECTED

FORMAT = "regard/1"


def problem_from_mapping(data: Any, source: str = "problem") -> Problem:
    """The problem that a mapping describes; `source` names its origin in errors."""
    with about(source):
        return _read(data)


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
        value = _with_lists(value if key.write is None else key.write(value))
        *parents, name = key.path.split(".")
        table = data
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    if problem.queries is not None and problem.queries.ndim == 1 and "tokens" in data:
        (label,) = data.pop("tokens")
        data = {"format": FORMAT, "query_label": label, **data}
    if tables:
        for side in SIDES:
            for name in side.vectors:
                if name in data and side.tokens in data:
                    data[name] = as_table(data[side.tokens], data[name])
    return {"format": FORMAT, **data}


def target_from(data: Any, labels: Sequence[str] | None) -> Any:
    """The target alone: of a mapping its only key, or a list of rows; `labels` order a table."""
    if isinstance(data, Mapping):
        others = [key for key in data if key not in ("format", "target")]
        if others or "target" not in data:
            has = f"has {safe_text(others[0], 40)}" if others else "is empty"
            raise ProblemError(f"a file for a target has one key, target; this one {has}")
        data = data["target"]
    found = {"query_labels": labels and list(labels), "target": _vectors("target", data)}
    stack_tables(SIDES[0], found)
    return found["target"]


# --- the schema ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a file: the field that it fills, and how to read and write its value.

    Without `read` the value is taken unchanged, and the problem checks it.
    """

    path: str
    field: str
    read: Callable[[str, Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


_number = partial(as_number, words=WORDS)
_number_or_numbers = partial(as_number_or_numbers, words=WORDS)

TOML_ORDER = "keys outside a table come before the first [table]"


def _vectors(name: str, value: Any) -> Array | dict[str, Array]:
    try:
        return read_vectors(name, value)
    except ProblemError as error:
        label = error.field
        place = {key.path.rpartition(".")[2]: key.path for key in KEYS}.get(label, "")
        if label in {key.path.partition(".")[0] for key in KEYS} | {*LONE_KEYS}:
            where = TOML_ORDER
        elif place.startswith("options."):
            where = f"it belongs below [{place.rpartition('.')[0]}]"
        else:
            raise
        # What follows a header in TOML belongs to that table, also a key of the whole file.
        raise ProblemError(f"{error}; if {label} is not a label here: {where}") from None


def _flag(name: str, value: Any) -> Any:
    if isinstance(value, str):
        raise ProblemError(f"{name} is {shown(value)}; write true or false, without quotes")
    return value


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
        if one.relative == 0.0:
            del entry["relative"]
        data.setdefault(one.step, []).append(entry)
    return {step: entries[0] if len(entries) == 1 else entries for step, entries in data.items()}


KEYS = (
    Key("title", "title"),
    Key("note", "note"),
    Key("tokens", "query_labels"),
    Key("context_tokens", "key_labels"),
    Key("heads", "heads"),
    Key("key_heads", "key_heads"),
    Key("embeddings", "embeddings", _vectors),
    Key("context", "context", _vectors),
    *(Key(f"weights.{name}", name, read_numbers) for name in PROJECTED[2:]),
    *(Key(name, name, _vectors) for name in READY),
    Key("features.embeddings", "embedding_features"),
    Key("features.context", "context_features"),
    Key("features.keys", "key_features"),
    Key("features.values", "value_features"),
    Key("features.output", "output_features"),
    Key("row_notes", "row_notes"),
    Key("options.causal", "causal", _flag),
    Key("options.window", "window", _window, _write_window),
    Key("options.offset", "offset"),
    Key("options.scale", "scale", _number),
    Key("options.softcap", "softcap", _number),
    Key("options.sink", "sink", _number_or_numbers),
    Key("options.bias", "bias", _number_or_numbers),
    Key("options.mask", "mask"),
    Key("options.lengths", "lengths"),
    Key("options.segments.queries", "query_segments"),
    Key("options.segments.keys", "key_segments"),
    Key("options.softmax", "softmax"),
    *(Key(f"options.{name}", name, read, spelling.write) for name, read in spelling.READ.items()),
    *(Key(name, name, _vectors) for name in LOSS),
    Key("random", "random", _random, fields_of),
    Key("expect", "expect", _expectations, _write_expectations),
)
# Keys that fill no field by themselves.
LONE_KEYS = ("format", "query_label")

_BY_PATH = {key.path: key for key in KEYS}
_PATHS = {key.field: key.path for key in KEYS}
# Where a file has what is an argument of `Problem`.
_ARGUMENTS = {"labels": "tokens", **_PATHS}
_TABLES = {key.path[:end] for key in KEYS for end, c in enumerate(key.path) if c == "."}
_ARRAYS = {*PROJECTED, *READY, *LOSS, "mask", "bias", "sink"}


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
    for side in SIDES:
        stack_tables(side, found)
    paths = _PATHS if lone_label is None else {**_PATHS, "query_labels": "query_label"}
    try:
        problem = Problem(**found)
    except ProblemError as error:
        # The field of the error is under another key in the file.
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
                f"{prefix}{shown(name)} is one key with a dot in it; write it as nested tables"
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
    if (argument := _ARGUMENTS.get(given)) in known:
        return ProblemError(f"{path} is not a known key; did you mean {argument}?")
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


# --- writing -------------------------------------------------------------------------------------


def _with_lists(value: Any) -> Any:
    """The same with a list for every tuple, as a file has it."""
    if isinstance(value, Mapping):
        return {name: _with_lists(inner) for name, inner in value.items()}
    return [_with_lists(inner) for inner in value] if isinstance(value, (tuple, list)) else value


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

"""Tables of label and vector, as a file may have in place of a matrix and its labels.

Must not know the other keys of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.parse import MAX_NUMBERS, check_text, read_numbers, shown
from regard.compute.loss import LOSS
from regard.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Side:
    """The fields whose rows share labels: those of the queries, or those of the keys."""

    labels: str
    tokens: str
    vectors: tuple[str, ...]


SIDES = (
    Side("query_labels", "tokens", ("embeddings", "queries", *LOSS)),
    Side("key_labels", "context_tokens", ("context", "keys", "values")),
)


def read_vectors(name: str, value: Any) -> Array | dict[str, Array]:
    """An array, or a table of label and vector; an error has the label as its field."""
    if not isinstance(value, Mapping):
        return read_numbers(name, value)
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
            error.field = label
            raise
    return table


def _vector(where: str, value: Any) -> Array:
    if isinstance(value, Mapping):
        raise ProblemError(f"{where} is a table, not a vector; quote a label that has dots")
    vector = read_numbers(where, value)
    if vector.ndim != 1:
        raise ProblemError(f"{where} has {vector.ndim} axes; a vector has 1")
    return vector


def stack_tables(side: Side, found: dict[str, Any]) -> None:
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


def as_table(labels: Sequence[str], rows: Array) -> Array | dict[str, Array]:
    """A table, unless the rows have a head axis or two vectors have the same label."""
    if rows.ndim != 2:
        return rows
    table: dict[str, Array] = {}
    for label, row in zip(labels, rows, strict=True):
        if table.setdefault(label, row).tobytes() != row.tobytes():
            return rows
    return table

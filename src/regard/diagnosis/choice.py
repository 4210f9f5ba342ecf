"""Which function of a file is meant, when a command line names only the file.

The file is read, not run. Must not know how a function is loaded or called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from regard.boundary.files import about, read_file
from regard.diagnosis.call.table import PARAMETERS
from regard.diagnosis.process.target import MAX_BYTES, code_cells, is_file
from regard.errors import OptionError, ProblemError, safe_text

MOST = 8  # functions that a message lists


class _Definition(NamedTuple):
    """A function, or a class with a forward or __call__ method, at the top level of a file."""

    name: str
    text: str  # with its parameters
    roles: frozenset[str]  # what its parameters are by the table


def choose(target: str) -> tuple[str, str]:
    """The target with a function, and a sentence if it was chosen here: `file.py` has no `:name`.

    A function that takes queries comes before one that takes embeddings, by the table of names. An
    OptionError lists the functions if several will do, or none; a ProblemError says why the file
    cannot be read.
    """
    _, colon, name = target.rpartition(":")
    is_named = colon and all(part.isidentifier() for part in name.split("."))
    if is_named or not is_file(target):
        return target, ""
    found = {one.name: one for one in _definitions(target) if not one.name.startswith("_")}
    fitting: list[_Definition] = []
    for role in ("query", "embeddings"):
        fitting = fitting or [one for one in found.values() if role in one.roles]
    if len(found) == 1:
        fitting = [*found.values()]
    place = safe_text(target, 100)
    if len(fitting) == 1:
        (chosen,) = fitting
        others = [one for one in found.values() if one is not chosen]
        besides = f"; also there: {_listed(others)}" if others else ""
        return f"{target}:{chosen.name}", f"{place}: diagnosing {chosen.text}{besides}"
    if fitting:
        raise OptionError(
            f"{place} has {len(fitting)} functions that may be an attention: {_listed(fitting)}; "
            f"name one, such as {place}:{fitting[0].name}"
        )
    has = f"; it has {_listed([*found.values()])}" if found else ""
    raise OptionError(
        f"{place} has no function that is recognised as an attention{has}; name one, as in "
        f"{place}:function"
    )


def _listed(definitions: list[_Definition]) -> str:
    more = len(definitions) - MOST
    texts = [one.text for one in definitions[:MOST]]
    return ", ".join([*texts, *([f"and {more} more"] if more > 0 else [])])


def _definitions(place: str) -> Iterator[_Definition]:
    for node in _nodes(place):
        if isinstance(node, ast.FunctionDef):
            yield _definition(node.name, node.args)
        elif isinstance(node, ast.ClassDef) and any("Module" in ast.unparse(b) for b in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    ordinary = method.args.posonlyargs or method.args.args
                    del ordinary[:1]  # self
                    yield _definition(node.name, method.args)


def _nodes(place: str) -> Iterator[ast.stmt]:
    """What a file or the cells of a notebook have at the top level."""
    if place.endswith(".ipynb"):
        for _, source in code_cells(Path(place)):
            # Running the notebook skips a cell that fails.
            with suppress(SyntaxError, ValueError):
                yield from ast.parse(source).body
        return
    with about(safe_text(place, 100)):
        text = read_file(place, MAX_BYTES)
        try:
            yield from ast.parse(text, Path(place).name).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ProblemError(f"is not valid Python: {safe_text(error, 200)}") from None


def _definition(name: str, arguments: ast.arguments) -> _Definition:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    known = (PARAMETERS.get(one.arg.lower()) for one in every)
    roles = frozenset(one.role for one in known if one is not None)
    return _Definition(name, safe_text(f"{name}({ast.unparse(arguments)})", 100), roles)

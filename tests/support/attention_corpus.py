"""The corpus: attentions as data, right and wrong, one TOML file each.

Owns the fields of a file, what must hold of them, and how code and adapter of a case become a
function and a call. Knows nothing of the library under test. tests/corpus/README.md has the format.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from places import ROOT

CORPUS = ROOT / "tests" / "corpus"
LIBRARIES = ("numpy", "torch", "jax")
STATED = {
    "causal": (True, False, "start", "end"),
    "mask": ("attend", "hide", "add"),
    "window": ("inclusive", "exclusive"),
    "scale": float,
    "heads": int,
}
NUMBERS = itertools.count()  # of modules, so that each has a name of its own


@dataclass(frozen=True)
class Case:
    """One attention, what its author states of it, and how it is called."""

    name: str
    title: str
    library: str
    function: str
    wrong: bool
    code: str
    adapter: str
    mistake: str = ""
    line: int = 0  # of `code`, from 1; 0 where nothing is wrong
    corrected: str = ""  # what should stand in place of this line
    names: tuple[str, ...] | None = (
        None  # mistakes of the catalogue that it is; None: not looked up
    )
    near: tuple[str, ...] = ()  # mistakes whose cure mends it as well
    stated: dict[str, Any] = field(default_factory=dict)

    @property
    def cured(self) -> str:
        """The code with the corrected line in its place."""
        lines = self.code.splitlines()
        lines[self.line - 1] = self.corrected
        return "\n".join(lines) + "\n"


def read(path: Path) -> Case:
    fields = tomllib.loads(path.read_text("utf-8"))
    fields |= {name: tuple(fields[name]) for name in ("names", "near") if name in fields}
    return Case(path.stem, **fields)


def cases(folder: Path = CORPUS) -> Iterator[Case]:
    """Every case below a folder, in the order of paths."""
    return map(read, sorted(folder.rglob("*.toml")))


def faults(case: Case) -> Iterator[str]:
    """What does not hold of a file, in words."""
    if case.library not in LIBRARIES:
        yield f"library is {case.library!r}"
    if case.wrong != bool(case.mistake and case.line and case.corrected):
        yield "mistake, line and corrected belong to wrong code, all three"
    if not case.wrong and (case.names is not None or case.near):
        yield "right code has no names"
    for what, value in case.stated.items():
        kinds = STATED.get(what)
        of_a_type = isinstance(kinds, type) and isinstance(value, kinds)
        none = (what, value) == ("scale", "none")
        if not (of_a_type or none or (isinstance(kinds, tuple) and value in kinds)):
            yield f"stated.{what} = {value!r}"
    defined = {name for node in ast.parse(case.code).body for name in _names(node)}
    if case.function not in defined:
        yield f"{case.function} is not defined"
    if "call" not in {name for node in ast.parse(case.adapter).body for name in _names(node)}:
        yield "the adapter has no call"
    if case.wrong:
        lines = case.code.splitlines()
        if case.line > len(lines) or not lines[case.line - 1].strip():
            yield f"line {case.line} has no code"
        elif lines[case.line - 1] == case.corrected:
            yield f"line {case.line} is what is corrected"
        else:
            ast.parse(case.cured)


def _names(node: ast.stmt) -> Iterator[str]:
    """What a statement of a module binds."""
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.alias):
            yield one.asname or one.name
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id


def load(text: str, name: str, folder: Path) -> Any:
    """An object of some code, which is written to a file of its own, so that it has source."""
    path = folder / f"case_{next(NUMBERS)}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def callable_of(
    case: Case, folder: Path, code: str | None = None
) -> tuple[Any, Callable[..., Any]]:
    """What a case judges, perhaps with other code, and its adapter."""
    function = load(case.code if code is None else code, case.function, folder)
    return function, load(case.adapter, "call", folder)

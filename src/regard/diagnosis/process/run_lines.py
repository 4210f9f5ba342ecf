"""The lines of a function's own file that its calls have run, and the statements that never ran.

A verdict says nothing of what never ran. Must not know what the function computes.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

from regard.diagnosis.reading.changed_text import Block
from regard.diagnosis.reading.source_text import parsed

# Conditions whose statements are no part of attention at inference.
APART = re.compile(
    r"train|drop|return_|need_|output_attentions|verbose|debug|log|print|isinstance|hasattr|device|"
    r"dtype|_available|gradient_checkpoint|__name__|version"
)
# What refuses a call, or only says something.
REFUSES = (ast.Raise, ast.Assert, ast.Pass, ast.Continue, ast.Import, ast.ImportFrom, ast.Global)


class RunLines:
    """The lines of some code that were run while it was watched."""

    def __init__(self, codes: Sequence[CodeType]) -> None:
        # Code is watched as long as some of its lines were not run.
        self._missing = {code: lines_of(code) for code in codes}
        self.found: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts lines are noted, unless a debugger or a coverage tool watches itself."""
        if not self._missing or sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        return self._ran if frame.f_code in self._missing else None

    def _ran(self, frame: Any, event: str, argument: Any) -> Any:
        missing = self._missing.get(frame.f_code)
        if missing is not None and event == "line":
            self.found.add(frame.f_lineno)
            missing.discard(frame.f_lineno)
            if not missing:
                del self._missing[frame.f_code]
        return self._ran


def lines_of(code: CodeType) -> set[int]:
    """The lines of code that may run, without the one that defines it."""
    return {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}


class Unrun(NamedTuple):
    """Statements that never ran: their first and last lines, and the condition above them."""

    first: int
    last: int
    condition: str
    arguments: frozenset[str]  # of the function that they belong to, in the condition


def never_run(blocks: Sequence[Block], run: set[int]) -> Iterator[Unrun]:
    """The parts of some code of which no line ran.

    Only functions that ran are looked at; what refuses a call, or is of training, is left out.
    """
    for first, text in blocks:
        tree = parsed("\n" * (first - 1) + text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(_has_run(one, run) for one in node.body):
                known = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
                for first, last, condition in _parts_never_run(node.body, run, ""):
                    words = set(re.findall(r"\w+", condition))
                    yield Unrun(first, last, condition, frozenset(known & words))


def _parts_never_run(
    body: Sequence[ast.stmt], run: set[int], condition: str
) -> Iterator[tuple[int, int, str]]:
    if body and condition and not any(_has_run(one, run) for one in body):
        if any(map(_computes, body)) and not APART.search(condition):
            yield body[0].lineno, body[-1].end_lineno or body[-1].lineno, condition
        return
    for one in body:
        if isinstance(one, ast.If):
            test = ast.unparse(one.test)
            yield from _parts_never_run(one.body, run, test)
            yield from _parts_never_run(one.orelse, run, f"not ({test})")
        elif isinstance(one, ast.For | ast.While | ast.With):
            yield from _parts_never_run(one.body, run, ast.unparse(one).split("\n")[0])


def _computes(statement: ast.stmt) -> bool:
    """Whether a statement does more than refuse a call, or say something."""
    if isinstance(statement, ast.If):
        return any(map(_computes, (*statement.body, *statement.orelse)))
    return not isinstance(statement, REFUSES) and not _only_says(statement)


def _has_run(statement: ast.stmt, run: set[int]) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return False
    last = statement.end_lineno or statement.lineno
    return any(line in run for line in range(statement.lineno, last + 1))


def _only_says(statement: ast.stmt) -> bool:
    """A text alone, or a call whose result nothing reads."""
    if not isinstance(statement, ast.Expr):
        return False
    name = ast.unparse(statement.value).split("(")[0]
    return isinstance(statement.value, ast.Constant) or name.startswith(("print", "warn", "log"))

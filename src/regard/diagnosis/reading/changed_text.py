"""The text of code with a part of it replaced, and where the parts of its syntax tree are.

Must not know which changes are worth a try.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.diagnosis.reading.source_text import parsed

MOST_CHARACTERS = 60_000  # of all blocks together
Block = tuple[int, str]  # the number of the first line, and the text of a whole top-level statement
Span = tuple[int, int, str]  # from where to where in a block, and what is there instead
# Limits, and counts of steps: with another one they may hide what differs.
LIMITS = {"clamp", "clip", "clamp_", "minimum", "maximum", "min", "max"}
COUNTS = {"range", "zip", "enumerate", "linspace", "arange"}


@dataclass(frozen=True)
class Change:
    """Text that replaces the characters from `start` to `end` of a block."""

    block: int
    start: int
    end: int
    text: str

    def of(self, blocks: Sequence[Block]) -> str:
        """The text of the changed block."""
        text = blocks[self.block][1]
        return text[: self.start] + self.text + text[self.end :]

    def lines(self, blocks: Sequence[Block]) -> tuple[int, str, str]:
        """The number of the line that changes first, what is there, and what is there then."""
        first, text = blocks[self.block]
        begin = text.rfind("\n", 0, self.start) + 1
        before, after = text[begin:].splitlines(), self.of(blocks)[begin:].splitlines()
        ahead = next(
            n for n, pair in enumerate(zip(before, after, strict=False)) if len({*pair}) > 1
        )
        number = first + text.count("\n", 0, begin) + ahead
        count = 1 + self.text.count("\n") - (ahead if self.text.count("\n") else 0)
        return (
            number,
            _one_line(before[ahead : ahead + count]),
            _one_line(after[ahead : ahead + count]),
        )


class Syntax:
    """The syntax tree of one top-level statement, and where each part of it is in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.tree = parsed(text)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def is_within_function(self, node: ast.AST) -> bool:
        """Whether a node is inside a function."""
        while (parent := self.parents.get(node)) is not None:
            if isinstance(parent, ast.FunctionDef):
                return True
            node = parent
        return False

    def limits(self, node: ast.AST) -> bool:
        """Whether a node is in a limit, or in a count of steps."""
        while (parent := self.parents.get(node)) is not None and not isinstance(parent, ast.stmt):
            if isinstance(parent, ast.Call) and node is not parent.func:
                name = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
                limit = node in parent.args[1:] or getattr(node, "arg", "") in ("min", "max")
                if name in COUNTS or (limit and name in LIMITS):
                    return True
            node = parent
        return False

    def _place(self, line: int, column: int) -> int:
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins in the text, and where it ends."""
        own: ast.expr = node  # type: ignore[assignment]
        last, column = own.end_lineno or own.lineno, own.end_col_offset or 0
        return self._place(own.lineno, own.col_offset), self._place(last, column)

    def code(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def instead(self, node: ast.AST, text: str) -> Span:
        """Another text in the place of a node."""
        return (*self.span(node), text)

    def exchanged(self, one: ast.AST, other: ast.AST) -> Span:
        """Two parts of the text in each other's place."""
        (start, middle), (later, end) = sorted([self.span(one), self.span(other)])
        between = self.text[middle:later]
        return start, end, self.text[later:end] + between + self.text[start:middle]

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Span]:
        """An operator between two operands; parentheses may be there too."""
        start, end = self.span(left)[1], self.span(right)[0]
        place = self.text.find(old, start, end)
        if place >= 0:
            yield place, place + len(old), new


def switched_off(blocks: Sequence[Block], change: Change) -> Iterator[tuple[Change, Change]]:
    """What a change is in, with its value switched off: in the changed code, and as it was.

    Where the first one alters nothing, and the second one does, the change switches it off itself.
    """
    text, new = blocks[change.block][1], change.of(blocks)
    longer = len(change.text) - (change.end - change.start)
    own = Syntax(new)
    for node in ast.walk(own.tree):
        if not isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
            continue
        start, end = own.span(node)
        if start > change.start or end < change.start + len(change.text):
            continue
        is_rule = not isinstance(node, ast.BinOp) or isinstance(node.op, ast.BitAnd | ast.BitOr)
        for off in ("({}) | True", "({}) & False") if is_rule else ("0 * ({})",):
            yield (
                Change(change.block, start, end - longer, f"({off.format(new[start:end])})"),
                Change(
                    change.block, start, end - longer, f"({off.format(text[start : end - longer])})"
                ),
            )


def loses_a_result(blocks: Sequence[Block], change: Change) -> bool:
    """Whether after a change nothing reads what a function has computed last under a name."""
    before, after = (len({*_unread(one)}) for one in (blocks[change.block][1], change.of(blocks)))
    return after > before


def _unread(text: str) -> Iterator[tuple[str, str]]:
    """The functions in a text, each with names that it reads nowhere after it has set them last."""
    for function in ast.walk(parsed(text)):
        if isinstance(function, ast.FunctionDef):
            reads, sets = _read_and_set(function)
            loops = [node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)]
            again = {name for loop in loops for own in _read_and_set(loop) for name in own}
            for name, line in sets.items():
                if name not in again and reads.get(name, 0) <= line:
                    yield function.name, name


def _read_and_set(node: ast.AST) -> tuple[dict[str, int], dict[str, int]]:
    """The names that code reads, and those that it sets, also in part, each with the last line."""
    parts = (one for one in ast.walk(node) if isinstance(one, ast.Subscript))
    in_part = {id(one.value) for one in parts if isinstance(one.ctx, ast.Store)}
    found: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            own = found[isinstance(one.ctx, ast.Store) or id(one) in in_part]
            own[one.id] = max(one.lineno, own.get(one.id, 0))
    return found


def _one_line(lines: Sequence[str]) -> str:
    return "; ".join(re.sub(r"\s+#.*$", "", one).strip() for one in lines)

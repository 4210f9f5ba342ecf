"""Every small change of a line of Python, C++ or JavaScript that is still a program.

Owns what a drawn mutant may be. Python is changed in its syntax tree; C++ and JavaScript, which
their formatters write in one way, in their tokens.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import NamedTuple


class Change(NamedTuple):
    """Bytes of a file, and what takes their place."""

    line: int
    start: int
    end: int
    new: bytes


COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
COMPARED |= {new: old for old, new in COMPARED.items()}
COMBINED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.Pow: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
}
COMBINED |= {new: old for old, new in COMBINED.items() if new is not ast.Mult}
BRANCHES = (ast.If, ast.While, ast.IfExp)


def changes(file: str, data: bytes) -> Iterator[Change]:
    """What can be changed in a file, each change by itself."""
    return python_changes(data) if file.endswith(".py") else token_changes(data)


def python_changes(data: bytes) -> Iterator[Change]:
    starts = line_starts(data)

    def change(node: ast.AST, new: ast.AST | None) -> Change:
        a = starts[node.lineno - 1] + node.col_offset
        b = starts[node.end_lineno - 1] + node.end_col_offset
        text = "pass" if new is None else ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.expr) and not isinstance(new, (ast.Constant, ast.Call)):
            text = f"({text})"
        return Change(node.lineno, a, b, text.encode())

    for node in code_of(ast.parse(data)):
        if isinstance(node, BRANCHES):
            yield change(node.test, ast.UnaryOp(ast.Not(), node.test))
        if isinstance(node, ast.Return) and node.value is not None:
            yield change(node.value, ast.Constant(None))
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if called or isinstance(node, (ast.Assign, ast.AugAssign)):
            yield change(node, None)
        if isinstance(node, ast.Call):
            for arguments in ("args", "keywords"):
                if getattr(node, arguments):
                    new = deepcopy(node)
                    getattr(new, arguments).pop()
                    yield change(node, new)
        if isinstance(node, ast.expr):
            for new in other_values(node):
                yield change(node, new)


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotation, and no part of an f-string, which has no place."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, ast.JoinedStr):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from code_of(one)


def other_values(node: ast.expr) -> Iterator[ast.expr]:
    """The same expression with one operator or one constant changed."""
    new = deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARED:
        new.ops[0] = COMPARED[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp) and type(new.op) in COMBINED:
        new.op = COMBINED[type(new.op)]()
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.Not, ast.USub)):
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        for value in (new.value + 1, new.value - 1):
            yield ast.Constant(value)
        return
    else:
        return
    yield new


# In C++ and JavaScript, with comments and the insides of strings blanked.
SILENT = re.compile(rb"//.*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^\s*#.*", re.M)
SWAPS = [(b" < ", b" <= "), (b" > ", b" >= "), (b" == ", b" != "), (b" === ", b" !== ")]
SWAPS += [(b" + ", b" - "), (b" * ", b" / "), (b" += ", b" -= "), (b" && ", b" || ")]
SWAPS += [(b" & ", b" | "), (b"Math.min(", b"Math.max("), (b"smaller(", b"larger(")]
SWAPS = [*SWAPS, *((new, old) for old, new in SWAPS), (b" % ", b" * ")]
WORDS = [(rb"\btrue\b", b"false"), (rb"\bfalse\b", b"true"), (rb"(?<=[ (])!(?=[\w(])", b"")]
NUMBER = re.compile(rb"(?<![\w.])\d+(?![\w.'])")
TEST = re.compile(rb"\bif \((?!const|auto)(.*?)\)(?= [^&|<>=+*/?-])")
STATEMENT = re.compile(
    rb"^[ ]+[\w.\->\[\], ()+*&]+ (?:=|\+=|-=|\|=) [^;{}]*;$|^[ ]+[\w.]+\([^;{}]*\);$"
)
DECLARED = re.compile(rb"^ +(const|let|return|auto|static|[\w:<>]+ \w+ =)")


def token_changes(data: bytes) -> Iterator[Change]:
    code = SILENT.sub(lambda found: b" " * len(found[0]), data)
    for number, start in enumerate(line_starts(data)[:-1], 1):
        line = code[start : code.find(b"\n", start) % (len(code) + 1)]
        for old, new in SWAPS:
            for at in re.finditer(re.escape(old), line):
                yield Change(number, start + at.start(), start + at.end(), new)
        for word, new in WORDS:
            for at in re.finditer(word, line):
                yield Change(number, start + at.start(), start + at.end(), new)
        for at in NUMBER.finditer(line):
            yield Change(number, start + at.start(), start + at.end(), b"%d" % (int(at[0]) + 1))
        for at in TEST.finditer(line):
            if at[1].count(b"(") == at[1].count(b")"):
                a, b = start + at.start(1), start + at.end(1)
                yield Change(number, a, b, b"!(%b)" % data[a:b])
        if STATEMENT.match(line) and not DECLARED.match(line):
            blank = len(line) - len(line.lstrip())
            yield Change(number, start + blank, start + len(line), b";")


def line_starts(data: bytes) -> list[int]:
    """Where each line starts, and where the last one ends."""
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts

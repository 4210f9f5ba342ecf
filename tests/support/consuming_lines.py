"""Which lines read what a line has made, on the syntax tree.

A line consumes another if it reads, without a call between, a name or an attribute that the other
binds: it follows in the same function, or in the same loop, before the name is bound anew; an
attribute may be read anywhere. What stands under an `if` or a `while` consumes its condition, and
the other lines of one statement consume each other. Knows no attention.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
Block = tuple[ast.stmt, ...]


def consuming_lines(code: str, line: int) -> set[int]:
    """The lines that consume what a line of some code has made, without the line itself."""
    tree = ast.parse(code)
    path = _path_to(tree, line)
    if not path:
        return set()
    made = path[-1]
    lines = set(_own_lines(made))
    if isinstance(made, ast.If | ast.While):
        lines |= {n for one in made.body for n in _own_lines(one)}
    for name in _bound(made):
        inside = [tree] if "." in name else path[:-1]
        lines |= {n for one in _readers(name, made, inside) for n in _own_lines(one)}
    return lines - {line}


def _path_to(tree: ast.Module, line: int) -> list[ast.AST]:
    """The module and the statements around a line, the innermost last."""
    path: list[ast.AST] = [tree]
    while True:
        inner = [
            one
            for one in _statements(path[-1])
            if _first(one) <= line <= (one.end_lineno or one.lineno)
        ]
        if not inner:
            return path[1:] and path
        path.append(inner[0])


def _first(one: ast.stmt) -> int:
    return min([one.lineno, *(x.lineno for x in getattr(one, "decorator_list", ()))])


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements directly in the blocks of a node."""
    for block in _blocks(node):
        yield from block


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for one in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield one.body


def _own_lines(one: ast.stmt) -> range:
    """The lines of a statement without those of its blocks."""
    blocks = [block[0] for block in _blocks(one) if block]
    last = one.end_lineno or one.lineno
    return range(one.lineno, min([last + 1, *(max(one.lineno + 1, x.lineno) for x in blocks)]))


def _own(one: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement without those of its blocks."""
    inner = {id(x) for x in _statements(one)}
    waiting = [x for x in ast.iter_child_nodes(one) if id(x) not in inner]
    for x in waiting:
        if isinstance(x, ast.ExceptHandler | ast.match_case):
            continue
        yield from ast.walk(x)


def _bound(one: ast.AST) -> set[str]:
    """The names, and attributes such as `self.k`, that a statement binds or writes into."""
    if isinstance(one, ast.FunctionDef):
        every = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
        return {x.arg for x in every} | {one.name}
    names = set()
    for x in _own(one):
        if isinstance(getattr(x, "ctx", None), ast.Store):
            while isinstance(x, ast.Subscript | ast.Starred):
                x = x.value
            if isinstance(x, ast.Name | ast.Attribute):
                names.add(ast.unparse(x))
    return names


def _reads(name: str, one: ast.AST) -> bool:
    augmented = isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name
    return augmented or any(
        isinstance(x, ast.Name | ast.Attribute)
        and isinstance(x.ctx, ast.Load)
        and ast.unparse(x) == name
        for x in _own(one)
    )


def _readers(name: str, made: ast.AST, around: list[ast.AST]) -> Iterator[ast.stmt]:
    """The statements that read a name which one statement has bound."""
    if "." in name:  # an attribute, of an object that other methods have as well
        yield from (x for x in ast.walk(around[0]) if isinstance(x, ast.stmt) and _reads(name, x))
        return
    inner: ast.AST = made
    if isinstance(made, ast.FunctionDef) or list(_blocks(made)):
        yield from _reading(name, list(_statements(made)))[0]
    for outer in reversed(around):
        block = next(x for x in _blocks(outer) if inner in x)
        found, over = _reading(name, block[block.index(inner) + 1 :])
        yield from found
        if isinstance(outer, ast.For | ast.While) and not over:
            found, over = _reading(name, [*block[: block.index(inner) + 1]])
            yield from found
            if isinstance(outer, ast.While) and _reads(name, outer):
                yield outer
            over = False  # the loop may have ended
        if over or isinstance(outer, SCOPES):
            return
        inner = outer


def _reading(name: str, block: list[ast.stmt]) -> tuple[list[ast.stmt], bool]:
    """What reads a name in a block before it is bound anew, and whether it is."""
    found = []
    for one in block:
        if _reads(name, one):
            found.append(one)
        inner = [_reading(name, x) for x in _blocks(one)]
        found += [x for part, _ in inner for x in part]
        plain = isinstance(one, ast.Assign | ast.AnnAssign) and any(
            isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id == name
            for x in _own(one)
        )
        if plain or (isinstance(one, ast.If) and one.orelse and all(over for _, over in inner)):
            return found, True
    return found, False

"""Source rewritten so that every expression hands its value to a listener, which may exchange it.

Owns the syntax: which expressions are listened to, of which parts each is made, and where each
is. Must not know values, nor what the code computes.
"""

from __future__ import annotations

import ast
import io
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOTE, OPERATE, WRITE = "regard_note", "regard_operate", "regard_write"
UPDATE, BIND = "regard_update", "regard_bind"
MOST_CHARACTERS = 200_000
# What reads the frame of its caller, and would see the listener's.
FRAMES = {"super", "locals", "globals", "vars", "eval", "exec", "dir"}

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "MatMult": operator.matmul,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "USub": operator.neg,
    "UAdd": operator.pos,
    "Invert": operator.invert,
}
IN_PLACE: Mapping[str, Callable[..., Any]] = {
    "Add": operator.iadd,
    "Sub": operator.isub,
    "Mult": operator.imul,
    "Div": operator.itruediv,
    "MatMult": operator.imatmul,
    "BitAnd": operator.iand,
    "BitOr": operator.ior,
    "BitXor": operator.ixor,
    "FloorDiv": operator.ifloordiv,
    "Mod": operator.imod,
    "Pow": operator.ipow,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One expression that is listened to, or one statement that changes an object in place."""

    line: int
    text: str
    parts: tuple[int, ...]  # the numbers of the expressions that it is made of
    kind: str  # the class of its syntax
    detail: str = ""  # the operator, or the name that is read
    names: tuple[str, ...] = ()  # all names of the function around it
    scope: int = 0  # the number of the function around it


@dataclass(eq=False)
class Code:
    """A user's source, rewritten; `broken` says why it runs unchanged."""

    text: str
    file: str
    nodes: list[Node] = field(default_factory=list)
    broken: str = ""
    compiled: types.CodeType | None = None

    def names(self) -> dict[str, Callable[..., Any]]:
        """What the rewritten code calls, until a listener takes its place."""
        return {
            NOTE: lambda node, value: value,
            OPERATE: lambda node, *own: OPERATORS[self.nodes[node].detail](*own),
            WRITE: lambda node, value: None,
            UPDATE: lambda node, *own: updated(IN_PLACE[self.nodes[node].detail], *own),
            BIND: lambda node, value: True,
        }

    def module(self, name: str) -> types.ModuleType:
        """The source run as a module of this name; unchanged, if it breaks when rewritten."""
        made = types.ModuleType(name)
        made.__file__ = self.file
        if self.compiled is not None and not self.broken:
            made.__dict__.update(self.names())
            try:
                exec(self.compiled, made.__dict__)
                return made
            except Exception as error:  # code of a stranger may look at itself
                self.broken = f"{type(error).__name__}: {error}"
                made = types.ModuleType(name)
                made.__file__ = self.file
        exec(compile(self.text, self.file, "exec", dont_inherit=True), made.__dict__)
        return made


def updated(operation: Callable[..., Any], target: Any, value: Any, *index: Any) -> Any:
    """What `target op= value` or `target[index] op= value` leaves in the name."""
    if not index:
        return operation(target, value)
    (at,) = index
    target[at] = operation(target[at], value)
    return target


def rewritten(text: str, file: str = "<code>") -> Code:
    r"""A source text with every expression listened to; what cannot be rewritten says so.

    Examples
    --------
    >>> code = rewritten("y = 1 + 1\ndef f(x): return x + y")
    >>> code.module("own").f(2), [node.text for node in code.nodes]
    (4, ['x', 'y', 'x + y'])
    """
    code = Code(text, file)
    if len(text) > MOST_CHARACTERS:
        code.broken = f"it has {len(text)} characters; at most {MOST_CHARACTERS} are traced"
        return code
    try:
        tree = ast.parse(text, file)
        _Rewriter(code).visit(tree)
        code.compiled = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        code.broken = f"{type(error).__name__}: {error}"
    return code


def bound_names(function: ast.AST) -> tuple[str, ...]:
    """The names that a function binds: its parameters, and what it assigns."""
    found: dict[str, None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            found[node.arg] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
    return tuple(found)


class _Rewriter(ast.NodeTransformer):
    """Wraps what is read within functions; the rest of a module stays."""

    def __init__(self, code: Code) -> None:
        self.code, self.lines = code, [*io.StringIO(code.text)]
        self.parts: list[list[int]] = [[]]
        self.names: list[tuple[str, ...]] = []
        self.scopes, self.scope = 0, [0]

    # --- places --------------------------------------------------------------------------------

    def declare(self, node: Any, parts: list[int], detail: str = "") -> int:
        """The number of a new node."""
        names = self.names[-1] if self.names else ()
        text, kind = self.text_of(node), type(node).__name__
        made = Node(node.lineno, text, tuple(parts), kind, detail, names, self.scope[-1])
        self.code.nodes.append(made)
        return len(self.code.nodes) - 1

    def text_of(self, node: Any) -> str:
        """The text of a node; `ast.get_source_segment` splits the whole file each time."""
        own = self.lines[node.lineno - 1 : node.end_lineno]
        if not own or node.end_col_offset is None:
            return ""
        parts = [line.encode() for line in own]
        parts[-1] = parts[-1][: node.end_col_offset]
        parts[0] = parts[0][node.col_offset :]
        return b"".join(parts).decode(errors="replace")

    def call(self, name: str, node: ast.AST, *arguments: ast.expr | int) -> ast.Call:
        own = [ast.Constant(one) if isinstance(one, int) else one for one in arguments]
        made = ast.Call(ast.Name(name, ast.Load()), own, [])
        for one in ast.walk(made):
            if not hasattr(one, "lineno") and isinstance(one, ast.expr):
                ast.copy_location(one, node)
        return made

    def inner(self, node: Any, *fields: str) -> list[int]:
        """Visit fields of a node, and give the numbers of the expressions in them."""
        self.parts.append([])
        for name in fields or node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                setattr(node, name, [self.visit(x) if isinstance(x, ast.AST) else x for x in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return self.parts.pop()

    def noted(self, node: Any, parts: list[int], detail: str = "") -> ast.Call:
        number = self.declare(node, parts, detail)
        self.parts[-1].append(number)
        return self.call(NOTE, node, number, node)

    # --- functions -----------------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Leave the statements of a module, and visit the functions in them."""
        for one in node.body:
            self._outside(one)
        return node

    def _outside(self, node: ast.AST) -> None:
        for one in ast.iter_child_nodes(node) if not _is_function(node) else (node,):
            if _is_function(one):
                self.visit(one)
            else:
                self._outside(one)

    def visit_FunctionDef(self, node: Any) -> Any:
        """Visit the body; decorators, defaults and annotations stay."""
        outer = self.names[-1] if self.names else ()
        self.names.append(tuple(dict.fromkeys((*bound_names(node), *outer))))
        self.scopes += 1
        self.scope.append(self.scopes)
        self.parts.append([])
        node.body = self.block(node.body)
        self.parts.pop()
        self.names.pop()
        self.scope.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Visit the body."""
        self.names.append((*bound_names(node), *(self.names[-1] if self.names else ())))
        node.body = self.visit(node.body)
        self.names.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Visit the methods alone."""
        for one in node.body:
            self._outside(one)
        return node

    # --- statements ----------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [one for statement in body for one in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement, and what tells of the objects that it changes in place."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return [self.visit(node)]
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            return [node]
        if isinstance(node, ast.AugAssign):
            return [self._augmented(node)]
        if isinstance(node, ast.Match):
            node.subject = self.visit(node.subject)
            for case in node.cases:
                case.body = self.block(case.body)
            return [node]
        fields = set(node._fields) - {"body", "orelse", "finalbody", "handlers", "annotation"}
        parts = self.inner(node, *(one for one in node._fields if one in fields))
        for name in ("body", "orelse", "finalbody"):
            if getattr(node, name, None):
                setattr(node, name, self.block(getattr(node, name)))
        if isinstance(node, ast.For) and (bound := self._bound(node.target, parts)):
            node.body.insert(0, ast.copy_location(ast.Expr(bound), node.target))
        for handler in getattr(node, "handlers", ()):
            handler.body = self.block(handler.body)
        targets = node.targets if isinstance(node, ast.Assign) else ()
        return [node, *(one for target in targets for one in self._writes(node, target, parts))]

    def _writes(self, node: ast.stmt, target: ast.expr, parts: list[int]) -> list[ast.stmt]:
        if isinstance(target, ast.Tuple | ast.List):
            return [one for own in target.elts for one in self._writes(node, own, parts)]
        if not isinstance(target, ast.Subscript) or not (base := _plain(target.value)):
            return []
        number = self.declare(node, parts)
        return [ast.copy_location(ast.Expr(self.call(WRITE, node, number, base)), node)]

    def _bound(self, target: ast.expr, parts: list[int]) -> ast.expr | None:
        """What tells of the objects that a loop puts into its names."""
        names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
        if any(
            not isinstance(x, ast.Name | ast.Tuple | ast.expr_context) for x in ast.walk(target)
        ):
            return None
        number = self.declare(target, parts)
        value = ast.Tuple([ast.Name(one, ast.Load()) for one in names], ast.Load())
        return self.call(BIND, target, number, value)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """Listen to what is gone through, and to what the names become."""
        parts = self.inner(node, "iter")
        self.parts[-1] += parts
        node.ifs = [self.visit(one) for one in node.ifs]
        if bound := self._bound(node.target, parts):
            node.ifs.insert(0, bound)
        return node

    def _augmented(self, node: ast.AugAssign) -> ast.stmt:
        """`x op= y` as an assignment whose operation can be listened to."""
        detail, target = type(node.op).__name__, node.target
        base = _plain(target.value if isinstance(target, ast.Subscript) else target)
        if detail not in IN_PLACE or base is None:
            parts = self.inner(node, "value", "target")
            self.declare(node, parts, detail)
            return node
        self.parts.append([])
        arguments = [self.visit(node.value)]
        if isinstance(target, ast.Subscript):
            arguments.append(_as_object(self.visit(target.slice)))
        parts = self.parts.pop()
        number = self.declare(node, parts, detail)
        value = self.call(UPDATE, node, number, base, *arguments)
        if isinstance(target, ast.Subscript):
            return ast.copy_location(ast.Expr(value), node)
        return ast.copy_location(ast.Assign([target], value), node)

    # --- expressions ---------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Listen to numbers and truth, which may be exchanged."""
        is_number = isinstance(node.value, bool | int | float)
        return self.noted(node, [], repr(node.value)) if is_number and self.names else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Listen to what is read."""
        own = isinstance(node.ctx, ast.Load) and node.id not in FRAMES
        return self.noted(node, [], node.id) if own and self.names else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Listen to the result; the name of what is called is left."""
        if isinstance(node.func, ast.Name):
            parts = self.inner(node, "args", "keywords")
            return node if node.func.id in FRAMES else self.noted(node, parts, node.func.id)
        if isinstance(node.func, ast.Attribute):
            outer = self.inner(node.func, "value")
            parts = self.inner(node, "args", "keywords")
            return self.noted(node, [*outer, *parts], node.func.attr)
        return self.noted(node, self.inner(node))

    def visit_BinOp(self, node: Any) -> ast.AST:
        """Compute with a listener."""
        detail = type(node.op).__name__
        fields = ("left", "right") if isinstance(node, ast.BinOp) else ("operand",)
        parts = self.inner(node, *fields)
        if detail not in OPERATORS:
            return self.noted(node, parts, detail)
        number = self.declare(node, parts, detail)
        self.parts[-1].append(number)
        return self.call(OPERATE, node, number, *(getattr(node, one) for one in fields))

    visit_UnaryOp = visit_BinOp

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Compute with a listener, unless it is a chain or asks for identity or membership."""
        detail = type(node.ops[0]).__name__
        parts = self.inner(node, "left", "comparators")
        if len(node.ops) > 1 or detail not in OPERATORS:
            return self.noted(node, parts)
        number = self.declare(node, parts, detail)
        self.parts[-1].append(number)
        return self.call(OPERATE, node, number, node.left, node.comparators[0])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Listen to what is read."""
        parts = self.inner(node, "value")
        if isinstance(node.ctx, ast.Load):
            return self.noted(node, parts, node.attr)
        self.parts[-1] += parts
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Listen to a part of an object."""
        parts = self.inner(node, "value", "slice")
        if isinstance(node.ctx, ast.Load):
            return self.noted(node, parts)
        self.parts[-1] += parts
        return node

    def _whole(self, node: Any) -> ast.AST:
        return self.noted(node, self.inner(node))

    visit_IfExp = visit_BoolOp = _whole

    def visit_ListComp(self, node: Any) -> ast.AST:
        """Listen to a list that is made; the sources of its elements come first."""
        return self.noted(node, self.inner(node, "generators", "elt"))

    def visit_List(self, node: Any) -> ast.AST:
        """Listen to lists and tuples that are made."""
        if isinstance(node.ctx, ast.Load) and node.elts:
            return self._whole(node)
        return self.generic_visit(node)

    visit_Tuple = visit_List

    def visit_GeneratorExp(self, node: Any) -> Any:
        """Its elements are listened to; itself would be used up."""
        self.parts[-1] += self.inner(node, "generators", "elt")
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Leave a text."""
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave the annotation."""
        node.value = None if node.value is None else self.visit(node.value)
        return node


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _plain(node: ast.expr) -> ast.expr | None:
    """A name or an attribute of names, read again; None for what may do more when read twice.

    The node may have been rewritten: a listener's call is what it was given.
    """
    match node:
        case ast.Name(id):
            return ast.Name(id, ast.Load())
        case ast.Attribute(value, attr):
            base = _plain(value)
            return base and ast.Attribute(base, attr, ast.Load())
        case ast.Call(ast.Name(name), [_, value]) if name == NOTE:
            return _plain(value)
        case _:
            return None


def _as_object(index: ast.expr) -> ast.expr:
    """An index as an expression: slices are made."""
    if isinstance(index, ast.Slice):
        empty = ast.Constant(None)
        own = [one or empty for one in (index.lower, index.upper, index.step)]
        return ast.copy_location(ast.Call(ast.Name("slice", ast.Load()), own, []), index)
    if isinstance(index, ast.Tuple):
        return ast.Tuple([_as_object(one) for one in index.elts], ast.Load())
    return index

"""The code of functions and objects as text, and what it shows of them before a call.

Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from regard.diagnosis.forms.differentiation import Applied, Pair
from regard.diagnosis.reading.constructor_arguments import is_module
from regard.diagnosis.reading.parameter_names import plain
from regard.diagnosis.reading.signature import names_in, parameters_of, text_of
from regard.diagnosis.reading.source_text import nodes_of, parsed, tree_of, tree_of_text

BATCHED = re.compile(r"(?<!un)[Bb]atch|\b(B|b,|bs|bsz|nb)\b|-2\b|\.\.\.|\.mT\b")
# What only matrices have: a transpose of all axes, a length, a shape of two numbers.
OF_MATRICES = re.compile(r"\.T\b|\blen\(\w+\)|^\s*\w+, *\w+ *= *\w+\.shape *$", re.MULTILINE)

# A call for rotary positions, and a choice whether there are any.
TURNING = re.compile(r"(?<!def )\b[a-z_]*(rope|rotary|rotate)[a-z_]*\(")
OPTIONALLY = re.compile(r"\bif\b.*(rope|rotary|rotate|positions?\b)", re.IGNORECASE)
# What turns rows by their positions, and names of rows that it turns.
ROPE = re.compile("rope|rotary", re.IGNORECASE)
ROWS = re.compile(r"(x?[qk]|query|key|queries|keys)(_?(heads?|states?|h|proj|layer|rot|t))?|xq|xk")
# A line that makes another mask, or changes the one that was given.
MAKES_MASK = re.compile(
    r"\s*(?:self\.)?\w*(?:mask|pad|keep|valid|allow|visib|hid[de]|attend|bias)\w*\s*"
    r"(?::[^=]+)?[-+*/|&^]?=(?!=)"
)


# What scores are multiplied by, or divided by, as a caller gives it.
SCALE = re.compile("temperature|temp|scale|scaling|scalefactor|smscale|softmaxscale|normfactor")
MOST_DOCUMENTATION = 2000  # characters at the top of a file
# What makes a layer or a parameter, and the methods in which being read is no use of it.
MAKES_LAYER = re.compile(r"(Linear|Dense|Conv1d|Conv2d|Parameter|Embedding)$")
MAKES_ONLY = re.compile(
    "__init__|_?(re)?init(ialize)?_?(weights?|param\\w*)|_?reset_param\\w*|setup|build"
)


def unused_layers(thing: Any) -> tuple[str, ...]:
    """The layers and parameters that a class makes and that nothing in its file reads."""
    kind = thing if inspect.isclass(thing) else type(thing)
    if is_function(thing) or not is_module(kind):
        return ()
    try:
        tree = tree_of(kind)
        file = tree_of(sys.modules[kind.__module__])
    except (OSError, TypeError, SyntaxError, KeyError):
        return ()
    made = [
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if MAKES_LAYER.search(ast.unparse(node.value.func))
        for target in node.targets
        if isinstance(target, ast.Attribute)
    ]
    used = {*_words_in(file)}
    return tuple(name for name in dict.fromkeys(made) if name not in used)


def _words_in(node: ast.AST) -> Iterator[str]:
    """The attributes that code reads, and words of its texts.

    But for code that makes layers, and for what is computed and never read.
    """
    if isinstance(node, ast.FunctionDef) and MAKES_ONLY.fullmatch(node.name):
        return
    read = set[str]()
    if isinstance(node, ast.FunctionDef):
        names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
        read = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"\w+", node.value)
    for inner in ast.iter_child_nodes(node):
        if not (read and isinstance(inner, ast.Assign) and _is_dead(inner, read)):
            yield from _words_in(inner)


def _is_dead(assignment: ast.Assign, read: set[str]) -> bool:
    """Whether an assignment is to one name, which is not among those that are read."""
    target, *others = assignment.targets
    return not others and isinstance(target, ast.Name) and target.id not in read


def code_of(function: Any) -> str:
    """The code of a function, of the class of an object, or of two passes; empty if unknown."""
    if isinstance(function, Pair):
        return code_of(function.holder or function.forward)
    if isinstance(function, Applied):
        function = function.kind
    kind = function if inspect.isclass(function) else type(function)
    return text_of(function if is_function(function) else kind)


def code_called(function: Any) -> str:
    """The code of the functions and classes of its file that a function or an object names."""
    inner = inspect.unwrap(function)
    parts: list[Any] = [inner]
    if inspect.isclass(inner) or not is_function(function):
        kind = inner if inspect.isclass(inner) else type(function)
        parts = [one for one in vars(kind).values() if inspect.isfunction(one)]
    home = getattr(parts[0], "__module__", None) if parts else None
    known = getattr(parts[0], "__globals__", {}) if parts else {}
    names = dict.fromkeys(name for one in parts for name in names_in(one))
    own = [known[one] for one in names if one in known and known[one] is not function]
    own = [one for one in own if getattr(one, "__module__", "") == home]
    return "\n".join(text_of(one) for one in own if inspect.isfunction(one) or inspect.isclass(one))


def words_of_options(function: Any) -> str:
    """What the classes of the options of a function, that it has by default, say of themselves.

    A scale of 1 in them is one that the caller gives.
    """
    if not is_function(function):
        return ""
    defaults = [one.default for one in parameters_of(function)]
    own = [one for one in defaults if type(one).__module__ == getattr(function, "__module__", "")]
    found = [words_of(text_of(type(one))) for one in own]
    for one in own:
        scales = (getattr(one, name) for name in dir(one) if SCALE.fullmatch(plain(name)))
        found += ["unscaled"] * any(type(scale) in (int, float) and scale == 1 for scale in scales)
    return "\n".join(found)


def code_of_file(function: Any) -> str:
    """The code of the file in which a function or class is written."""
    own = function.forward if isinstance(function, Pair) else function
    own = own.kind if isinstance(own, Applied) else own
    kind = own if inspect.isroutine(own) or inspect.isclass(own) else type(own)
    module = sys.modules.get(getattr(inspect.unwrap(kind), "__module__", ""))
    return text_of(module) if getattr(module, "__file__", "") else ""


def documentation_of_file(function: Any) -> str:
    """The documentation at the top of the file in which a function or class is written."""
    kind = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    module = sys.modules.get(getattr(kind, "__module__", "") or "")
    alone = module is not None and not hasattr(module, "__path__")  # and not that of a package
    return str(getattr(module, "__doc__", "") or "")[:MOST_DOCUMENTATION] if alone else ""


def turns_rows(code: str) -> bool:
    """Whether code calls a function for rotary positions, always."""
    return bool(TURNING.search(code)) and not OPTIONALLY.search(code)


def always_turns(function: Any) -> bool:
    """Whether code turns queries or keys by positions that no argument and no condition tells."""
    try:
        kind = function if is_function(function) or inspect.isclass(function) else type(function)
        tree = tree_of(inspect.unwrap(kind))
    except (OSError, TypeError, SyntaxError):
        return False
    methods = [node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef)]
    return any(map(_turns, (one for one in methods if not MAKES_ONLY.fullmatch(one.name))))


def _turns(method: ast.FunctionDef) -> bool:
    given = {one.arg for one in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
    given = {one for one in given if not ROWS.fullmatch(one)}
    return any(
        ROPE.search(ast.unparse(call.func).rpartition(".")[2])
        and any(ROWS.fullmatch(getattr(one, "id", "")) for one in call.args)
        and not {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} & given
        for statement in method.body
        if isinstance(statement, ast.Assign)
        for call in _calls_in(statement.value)
    )


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression, whatever its conditions are."""
    if isinstance(node, ast.IfExp | ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    for inner in ast.iter_child_nodes(node):
        yield from _calls_in(inner)


def without_words(text: str) -> str:
    """A piece of code without its comments and documentation; nothing if it is no code."""
    try:
        return ast.unparse(_Silent().visit(parsed(textwrap.dedent(text))))
    except (SyntaxError, ValueError):
        return ""


class _Silent(ast.NodeTransformer):
    """A syntax tree without texts that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def words_of(text: str) -> str:
    """The comments and documentation in a piece of code, without the code itself."""
    lines = textwrap.dedent(text)
    found = re.findall("#(.*)", lines)
    with contextlib.suppress(SyntaxError, ValueError):
        for node in nodes_of(tree_of_text(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def said_of_arguments(text: str) -> str:
    """Documentation, and comments beside arguments; all comments where there is neither."""
    lines, found, beside = textwrap.dedent(text), list[str](), set[int]()
    with contextlib.suppress(SyntaxError, ValueError):
        for node in nodes_of(tree_of_text(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
            elif isinstance(node, ast.arg):
                beside.add(node.lineno)
    found += [comment for row, _, comment in _comments(lines) if row in beside]
    return "\n".join(filter(None, found)) or words_of(text)


def prose_of(text: str, *, of_arguments: bool = False) -> str:
    """Documentation and comments, with an empty line between one and the next.

    A comment beside an argument begins with its name. With `of_arguments` comments are left out
    that are about a mask which the code itself makes.
    """
    lines = textwrap.dedent(text)
    found, beside = list[str](), dict[int, list[str]]()
    with contextlib.suppress(SyntaxError, ValueError):
        for node in nodes_of(tree_of_text(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append(ast.get_docstring(node) or "")
            elif isinstance(node, ast.arg):
                beside.setdefault(node.lineno, []).append(node.arg)
    for row, code, comment in _comments(lines):
        names = beside.get(row, [])
        if of_arguments and not names and MAKES_MASK.match(code):
            continue
        found.append(f"{names[0]}: {comment}" if len(names) == 1 else comment)
    return "\n\n".join(filter(None, found))


def _comments(lines: str) -> Iterator[tuple[int, str, str]]:
    """Comments: the row of the last line, the code beside or below, and the text."""
    rows, block = lines.splitlines(), list[str]()
    with contextlib.suppress(SyntaxError, tokenize.TokenError):
        for token in tokenize.generate_tokens(io.StringIO(lines).readline):
            if token.type != tokenize.COMMENT:
                continue
            (row, column), said = token.start, token.string.lstrip("#! ")
            before = rows[row - 1][:column]
            if before.strip():
                yield row, before, said
                continue
            block.append(said)
            below = rows[row] if row < len(rows) else ""
            if not below.lstrip().startswith("#"):
                yield row, below, "\n".join(block)
                block = []


def may_be_batched(function: Any, text: str) -> bool:
    """Whether a function may be meant for more axes than those of matrices.

    It is not if its own code treats its arrays as matrices, mentions no batch, and does not count
    axes from the end; what it computes by functions of its surroundings is not known.
    """
    if is_module(function if inspect.isclass(function) else type(function)) or not text:
        return True
    if getattr(function, "__closure__", None):
        return True
    return BATCHED.search(text) is not None or OF_MATRICES.search(text) is None


def is_function(thing: Any) -> bool:
    """Whether something is a function, also one that a library has wrapped in an object."""
    home = type(thing).__module__.partition(".")[0]
    return inspect.isroutine(thing) or (
        home in ("jax", "jaxlib", "functools", "numba") and callable(thing)
    )

"""The text of functions, classes and files, and its syntax tree, each read only once.

Must not know what is looked for in it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from functools import lru_cache
from typing import Any

from regard.boundary.cached import kept_while_it_exists


@kept_while_it_exists
def source_of(thing: Any) -> str:
    """The text of a function, class or file, or an OSError or TypeError as of `inspect`."""
    return inspect.getsource(thing)


def tree_of(thing: Any) -> ast.Module:
    """The syntax tree of that text, which no caller may change."""
    return tree_of_text(source_of(thing))


@lru_cache(maxsize=64)
def tree_of_text(text: str) -> ast.Module:
    """The syntax tree of code that may be indented, which no caller may change."""
    return parsed(textwrap.dedent(text))


@lru_cache(maxsize=64)
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a syntax tree, as `ast.walk` gives them."""
    return tuple(ast.walk(tree))


def parsed(text: str) -> ast.Module:
    """A new syntax tree of code: Python 3.11 may fail where two threads make one at once."""
    for _ in range(10):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    raise SyntaxError("no syntax tree")

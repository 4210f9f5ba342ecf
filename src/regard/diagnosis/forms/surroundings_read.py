"""What the code of a function computes around attention, read statement by statement.

Must not call it, nor know any probe.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.adapting import nodes_in
from regard.diagnosis.forms.source import code_called
from regard.diagnosis.reading.signature import text_of
from regard.diagnosis.reading.surroundings import Place, Surroundings

# A call that normalises rows of tokens, and neither weights nor vectors of queries and keys.
NORM_CALL = re.compile(r"(^|_)(ln|norm|normali[sz]e|layer_?norm|rms_?norm|rms)_?\d*$|norm$", re.I)
OTHER_NORM = re.compile(r"l2|unit|linalg|softmax|cos|qk", re.IGNORECASE)
INLINE = re.compile(r"sqrt|\bstd\b|\.std\(|\*\* ?-? ?\(?-?0?\.5|\brstd\b|inv_std")
ATTENDS = re.compile(r"softmax|\bexp\(|(attention|attn|attend|mha|sdpa|self_att|att)\w*\(")
PRODUCT = re.compile(r"(einsum|matmul|dot|linear|dense)\(", re.IGNORECASE)
EPSILON = re.compile(
    r"\beps\w*\s*(?::\s*float)?\s*=\s*(\d[\d.]*(?:e-?\d+)?)|\+\s*(\d[\d.]*e-\d+|0\.0+1)\b"
)
TORCHS = 1e-5  # what is added to the squares where nothing says another number
CENTRED = re.compile(r"\.(var|std)\(|\b(var|std)\(|- *\w*\.?(mean|mu|avg)\w*|- *[um]\b|layer_?norm")
OUTSIDE = re.compile(
    r"(\b(std|sd|sigma)\b|\.std\([^\n]*?\)|"
    r"\bsqrt\([^()\n]*(\([^()]*\))?[^()\n]*\)) *\+ *(\w*eps|\d)"
)
UNBIASED = re.compile(r"\.(std|var)\((?![^\n]*(unbiased=False|correction=0|ddof))")


def surroundings_of(function: Callable[..., Any], x: str) -> Surroundings | None:
    """What a function computes around attention of its argument `x`; None if that is nothing."""
    known = {node.name: node for node in nodes_in(function) if isinstance(node, ast.FunctionDef)}
    definition = known.get(getattr(inspect.unwrap(function), "__name__", ""))
    if definition is None:
        return None
    found = _Reading(x, definition, known)
    own = Surroundings(found.before, found.adds, found.last if found.adds else "")
    if own == Surroundings():
        return None
    code = f"{text_of(function)}\n{code_called(function)}"
    said = EPSILON.search(code)
    usual = TORCHS if "layer_norm(" in code else 0.0
    return replace(
        own,
        centred=CENTRED.search(code) is not None,
        epsilon=float(said[1] or said[2]) if said else usual,
        outside=OUTSIDE.search(code) is not None,
        unbiased=UNBIASED.search(code) is not None and "torch" in _library(function),
    )


def _library(function: Callable[..., Any]) -> set[str]:
    return {*getattr(function, "__globals__", {})}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Assignments and returns, in the order in which they are written."""
    for one in body:
        if isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return):
            yield one
        elif not isinstance(one, ast.FunctionDef):
            yield from _statements(getattr(one, "body", []))


class _Reading:
    """What the statements of a function do with its input, one after the other."""

    def __init__(
        self, x: str, definition: ast.FunctionDef, known: Mapping[str, ast.FunctionDef]
    ) -> None:
        self.parameters = [one.arg for one in definition.args.args]
        self.input, self._known = {x}, known  # names of the input, normalised or not
        self.sums, self.ends = set[str](), dict[str, Place]()  # and of normalised sums
        self.before = self.adds = self._attends = False
        self.last: Place = ""
        for statement in _statements(definition.body):
            self.read(statement)

    def read(self, one: ast.stmt) -> None:
        """Take in one statement."""
        value = getattr(one, "value", None)
        if value is None:
            return
        targets = getattr(one, "targets", [getattr(one, "target", None)])
        name = getattr(targets[0], "id", "")
        self._attends |= self._calls_attention(value)
        if isinstance(one, ast.AugAssign):
            added = isinstance(one.op, ast.Add) and self._attends and name in self.input
            self._note(name, added, "")
            return
        is_sum = self._attends and any(map(self._adds, ast.walk(value)))
        is_sum |= any(map(self._is_sum_of_another, ast.walk(value)))
        calls = [node for node in ast.walk(value) if _is_norm(node) and not _has_products(node)]
        if self._attends and _is_norm(value) and any(map(self._adds, value.args)):
            calls = [value]  # norm(x + weights @ v @ w)
        is_inline = not calls and INLINE.search(ast.unparse(value)) and not _has_products(value)
        inside = {name for call in calls for name in _names(call)}
        inside = _names(value) if is_inline else inside
        sums = bool(inside & self.sums) or any(self._adds(n) for c in calls for n in ast.walk(c))
        within = {id(node) for call in calls for node in ast.walk(call)}
        others = [n for n in ast.walk(value) if isinstance(n, ast.Call) and id(n) not in within]
        alone = not (others or _has_products(value))
        is_norm = bool(is_inline) or value in calls or (bool(calls) and alone)
        self.before |= bool(inside & self.input) and not sums
        normalised = is_norm and inside & self.input and not (sums or is_sum)
        if normalised or (isinstance(value, ast.Name) and value.id in self.input):
            self.input |= {name}
        end: Place = "sum" if self._attends and sums and is_norm else ""
        if self._attends and is_sum and calls and not inside & (self.input | self.sums):
            end = "result"
        # Another layer ends so too, as a feed-forward layer of zeros, which adds nothing.
        normed = _names(value) if _is_norm(value) and self._attends else set()
        if any(self.ends.get(one) == "sum" for one in normed & self.sums):
            end = "sum twice"
        kept = "" if is_sum else self.ends.get(_scaled(value), "")
        self._note(name, is_sum, end or kept)

    def _note(self, name: str, is_sum: bool, end: Place) -> None:
        """What has just been computed, which is returned if it has no name."""
        self.adds |= is_sum
        self.sums |= {name} if (is_sum or end) and name else set()
        self.ends[name] = end
        self.last = end

    def _calls_attention(self, value: ast.AST) -> bool:
        """Whether a softmax is called, or attention by its name, or a function that does so."""
        names = (getattr(n.func, "id", "") for n in ast.walk(value) if isinstance(n, ast.Call))
        inner = (ast.unparse(self._known[name]) for name in names if name in self._known)
        return any(map(ATTENDS.search, (ast.unparse(value), *inner)))

    def _is_sum_of_another(self, node: ast.AST) -> bool:
        """Whether another function of the file attends, and adds the input."""
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name not in self._known:
            return False
        definition = self._known[name]
        others = {n: own for n, own in self._known.items() if n != name}
        names = (getattr(one, "id", "") for one in node.args)
        pairs = zip(names, (one.arg for one in definition.args.args), strict=False)
        inner = (_Reading(own, definition, others) for one, own in pairs if one in self.input)
        return any(one.adds for one in inner)

    def _adds(self, node: ast.AST) -> bool:
        """Whether the input is added to something that the function has computed."""
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
            return False
        for own, other in ((node.left, node.right), (node.right, node.left)):
            given = isinstance(other, ast.Constant) or getattr(other, "id", "") in self.parameters
            if getattr(own, "id", "") in self.input and not given:
                return True
        return False


def _is_norm(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    return NORM_CALL.search(last) is not None and OTHER_NORM.search(name) is None


def _scaled(value: ast.AST) -> str:
    """What a value is but for a factor and an offset, as y of y * gain + shift."""
    while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Mult):
        value = value.left
    return getattr(value, "id", "")


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _has_products(value: ast.AST) -> bool:
    is_product = any(isinstance(one, ast.MatMult) for one in ast.walk(value))
    return is_product or PRODUCT.search(ast.unparse(value)) is not None

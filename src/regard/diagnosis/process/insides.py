"""The scores that a softmax gets inside a function: each value of its code is noted while it runs.

A softmax may be a call or five lines: among the noted arrays are weights, whose rows add up to 1,
and the scores whose softmax they are. Must not know what the function should compute.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.reading.source_text import parsed

NOTE = "regard_note"  # the name under which the code finds what notes a value
MOST_NUMBERS = 2**16  # of an array that is noted
MOST_ARRAYS = 2000
MOST_FOUND = 16  # softmaxes, as many as loops over batch and heads have in a probe
NEAR = 1e-4
MOST_PAIRS = 1000  # of arrays that may be queries and keys
LOW = -1e3  # below this a cell is hidden


class Notes:
    """The arrays that the values of some code were, each content once, in their order."""

    def __init__(self) -> None:
        self._found: dict[tuple[tuple[int, ...], bytes], Array] = {}
        self._integers: dict[tuple[tuple[int, ...], bytes], Array] = {}

    def __call__(self, value: Any) -> Any:
        """Note a value, and return it."""
        axes = getattr(value, "ndim", 0)  # of NumPy itself this is a function
        if type(axes) is not int or axes < 1:
            return value
        try:
            if value.shape[-1] > 1 and np.prod(value.shape) <= MOST_NUMBERS:
                kind, numbers = _numbers(value)
                known = {"f": self._found, "i": self._integers, "u": self._integers}.get(kind)
                if known is not None and len(known) < MOST_ARRAYS:
                    known.setdefault((numbers.shape, numbers.tobytes()), numbers)
        except Exception:  # an array that JAX traces has no numbers, others may be anything
            pass
        return value

    def integers(self) -> list[Array]:
        """The arrays of integers, also those of another type."""
        whole = [one for one in self._found.values() if np.array_equal(one, np.round(one))]
        return [*self._integers.values(), *whole]

    def softmaxes(self) -> list[Array]:
        """The scores of each softmax, as they are when it gets them, its axis as the last one."""
        arrays = list(self._found.values())
        axes = range(1, max((one.ndim for one in arrays), default=1) + 1)
        return next((own for axis in axes if (own := _softmaxes(arrays, axis))), [])

    def factor_of(self, scores: Array) -> tuple[float, int] | None:
        """By what products of queries and keys are multiplied in scores, and their width.

        One product, or the sum of two, each of features of its own. Where all heads share keys,
        these may be what keys are made of: then the width is that of the heads of which the code
        takes a part; where no such heads are seen, the usual factor alone is told.
        """
        axes = {scores.ndim, scores.ndim - 1} - {0, 1}
        arrays = [one for one in self._found.values() if one.ndim in axes and scores.ndim > 1]
        arrays = [one for one in arrays if np.abs(one).max(initial=0) < -LOW]  # nothing is hidden
        alike = [one for one in arrays if one.shape == scores.shape]
        # (B, L, H, S) and (L, H, S) are (B, H, L, S) and (H, L, S).
        for turned in (False, True)[: 1 + (scores.ndim > 2)]:
            own, *terms = (one.swapaxes(-3, -2) if turned else one for one in (scores, *alike))
            widths = [_width_of(one, arrays) for one in terms]
            products = [pair for pair in zip(terms, widths, strict=True) if pair[1]]
            for count in (1, 2):
                for parts in itertools.combinations(products, count):
                    factor = _factor(own, np.sum([one for one, _ in parts], axis=0))
                    if factor is not None:
                        width = sum(abs(width) for _, width in parts)
                        shared = any(width < 0 for _, width in parts)
                        heads = _width_of_heads(own, arrays) if shared else width
                        usual = abs(factor * width**0.5 - 1) < NEAR
                        return (factor, heads or width) if heads or usual else None
        return None


def _width_of_heads(scores: Array, arrays: Sequence[Array]) -> int:
    """How wide the heads are of which the code takes the first features, or the last; or 0."""
    rows = scores.shape[:-1]
    heads = [own for one in arrays for own in _with_heads(one) if own.shape[:-1] == rows]
    for whole, part in itertools.permutations(heads, 2):
        width = part.shape[-1]
        if width < whole.shape[-1] and (
            np.array_equal(whole[..., :width], part) or np.array_equal(whole[..., -width:], part)
        ):
            return int(whole.shape[-1])
    return 0


def _softmaxes(arrays: Sequence[Array], axis: int) -> list[Array]:
    """The scores of softmaxes along an axis, counted from the end."""
    turned = [np.moveaxis(one, -axis, -1) for one in arrays if one.ndim >= axis]
    found: list[Array] = []
    for place, weights in enumerate(turned):
        if not _are_weights(weights):
            continue
        alike = (one for one in turned[:place] if one.shape == weights.shape)
        scores = next((one for one in alike if _is_softmax(one, weights)), None)
        found += [] if scores is None else [scores]
        if len(found) == MOST_FOUND:
            break
    return found


def _factor(scores: Array, products: Array) -> float | None:
    """By what products are multiplied in scores, where these are not hidden; None if by nothing."""
    seen = np.abs(scores) < -LOW
    own, products = scores[seen], products[seen]
    factor = float((products * own).sum() / max((products**2).sum(), 1e-300))
    size = max(1e-3, float(np.abs(own).max(initial=0)))
    return factor if np.abs(factor * products - own).max(initial=0) < NEAR * size else None


def _width_of(term: Array, arrays: Sequence[Array]) -> int:
    """How many features of queries and keys are multiplied in an array; 0 if it is no product.

    It is negative where all heads share the keys.
    """
    size = max(1e-3, float(np.abs(term).max(initial=0)))
    queries = [own for one in arrays for own in _rows_of(one, term.shape[:-1])]
    rows = (*term.shape[:-2], term.shape[-1])
    keys = [own for one in arrays for own in _rows_of(one, rows)]
    pairs = ((q, k) for q in queries for k in keys if q.shape[-1] == k.shape[-1])
    for query, key in itertools.islice(pairs, MOST_PAIRS):
        products = query @ key.swapaxes(-1, -2)
        if products.shape == term.shape and np.allclose(products, term, 0, NEAR * size):
            shared = term.ndim > 2 and key.shape[-3] < term.shape[-3]
            return -int(query.shape[-1]) if shared else int(query.shape[-1])
    return 0


def _rows_of(array: Array, rows: tuple[int, ...]) -> Iterator[Array]:
    """An array with these axes before that of the features, also one of rows before heads.

    Heads that share it are one, or none.
    """
    for own in _with_heads(array) if array.ndim > len(rows) else (array[..., None, :, :],):
        alike = all(n in (whole, 1) for n, whole in zip(own.shape[:-1], rows, strict=True))
        if alike and own.shape[-2] == rows[-1] and own.shape[-1] > 1:
            yield own


def _with_heads(array: Array) -> Iterator[Array]:
    """Heads of rows of features, also where rows come before heads."""
    yield array
    if array.ndim > 2:
        yield array.swapaxes(-3, -2)


def _numbers(value: Any) -> tuple[str, Array]:
    """The kind of an array, and its numbers as float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    numbers = np.asarray(value)
    return numbers.dtype.kind, numbers.astype(
        np.float64
    ) if numbers.dtype.kind in "fiu" else numbers


def _are_weights(array: Array) -> bool:
    if not (np.isfinite(array).all() and array.min(initial=0) >= 0):
        return False
    shared = ((array > 0) & (array < 1)).any()  # and not only ones and zeros, as a mask has
    return bool(shared and np.abs(array.sum(-1) - 1).max() < NEAR)


def _is_softmax(scores: Array, weights: Array) -> bool:
    if np.isnan(scores).any() or scores.max(initial=0) == np.inf:
        return False
    with np.errstate(all="ignore"):
        own = np.exp(scores - scores.max(-1, keepdims=True))
        return bool(np.allclose(own / own.sum(-1, keepdims=True), weights, 0, NEAR))


def noting(text: str) -> ast.Module:
    """Code that notes the values of its expressions, and computes what it did before."""
    tree = parsed(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [_Noting().visit(one) for one in node.body]
    return ast.fix_missing_locations(tree)


class _Noting(ast.NodeTransformer):
    """Wraps what is called, computed or read in a call of the function that notes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leave it: its own body is visited by itself."""
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Leave it."""
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave its annotation."""
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        """Leave its patterns."""
        node.subject = self.visit(node.subject)
        for case in node.cases:
            case.body = [self.visit(one) for one in case.body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave the name of what is called."""
        if isinstance(node.func, ast.Attribute):
            node.func = self._parts(node.func)
        node.args = [self.visit(one) for one in node.args]
        node.keywords = [self.visit(one) for one in node.keywords]
        is_super = isinstance(node.func, ast.Name) and node.func.id in ("super", "locals")
        return node if is_super else _noted(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Note the result."""
        return _noted(self._parts(node))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Note what it means: an array may have been changed in place."""
        return _noted(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Note a part of an array."""
        own = self._parts(node)
        return _noted(own) if isinstance(node.ctx, ast.Load) else own

    def _parts(self, node: Any) -> Any:
        return self.generic_visit(node)


def _noted(node: Any) -> ast.Call:
    name = ast.Name(NOTE, ast.Load())
    return ast.copy_location(ast.Call(name, [node], []), node)

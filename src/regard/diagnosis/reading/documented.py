"""The axes of a function's arguments, where its code or its documentation says them.

`H: (batch, tokens, dim)` and `n, f = Wh.shape` name axes; the same name is the same length. Must
not know any probe.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

# B: texts, heads or images that have nothing to do with each other. T: what is attended to.
_WORD = r"(?:[A-Za-z_]\w*'?|\d+)"
_PRODUCT = rf"{_WORD}(?:\s*(?:\*|//)\s*\w+)?"
_LIST = rf"{_PRODUCT}(?:\s*,\s*{_PRODUCT}){{0,5}}\s*,?"
_FACTOR = r"(?:\d*[A-Za-z_]\w*'?|\d+)"  # a number before a name multiplies it: 2c + 1
_SUM = rf"{_FACTOR}(?:\s*(?:\*|//?|\+|-)\s*{_FACTOR}){{0,3}}"
_SUMS = rf"{_SUM}(?:\s*,\s*{_SUM}){{0,5}}\s*,?"
_BATCH = re.compile(
    r"(b|bs|bsz|bb|batch\w*|n?_?batch|\w+_batch|nw|b_|n(um)?_?win(dow)?s?|n_?seq|samples)$"
)
_TOKENS = re.compile(
    r"(t|l|s|n|m|tk|tx|t_x|t_k|lk|ls|src\w*|j|i|k|kv|total\w*|nnz|len\w*|\w*len\w*|seq\w*|\w*tok\w*|time\w*|steps?|"
    r"n_?res|n_?keys|n_?nodes|nodes|slots|items|frames|words|regions|pixels|patches|points|history|"
    r"neighbou?rs)$"
)
_OF_ALL = re.compile(
    rf"\b[Aa]ll (?:arrays|inputs|tensors|of shape|shaped)\b[\w ,:]{{0,30}}[(\[]\s*({_LIST})\s*[)\]]"
)
_EACH = re.compile(rf"[(\[]\s*({_LIST})\s*[)\]],? each\b")
_SHAPE = rf"[(\[]\s*{_LIST}\s*[)\]]"
_IN_ORDER = re.compile(rf"((?:{_SHAPE}\s*,\s*)+{_SHAPE})\s*(?:->|→)")
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}
LETTERS = "acdefgijkmnpqrs"  # of the axes that are neither


def documented_axes(text: str, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The names of the axes of each argument whose shape a text gives.

    >>> documented_axes("h, mask: (batch, tokens, dim)", ["h"])
    {'h': ('batch', 'tokens', 'dim')}
    >>> documented_axes("def f(x: Tensor,  # [B, T]", ["x"]), documented_axes("b, d = q.shape", "q")
    ({'x': ('B', 'T')}, {'q': ('b', 'd')})
    >>> documented_axes("(L, D), (S, D), (S, E) -> (L, E)", ["a", "b"])
    {'a': ('L', 'D'), 'b': ('S', 'D')}
    >>> documented_axes("hidden: the last state (1, batch, dim)", ["hidden"])
    {'hidden': ('1', 'batch', 'dim')}
    >>> documented_axes("x (n, D); W* (D, d)", ["x", "Wq"])
    {'x': ('n', 'D'), 'Wq': ('D', 'd')}
    >>> documented_axes("Wk: (C, C // heads)", ["Wk"])
    {'Wk': ('C', 'C_by_heads')}
    >>> documented_axes("return w @ k, turned(scores)  # All arrays (H, T, D)", ["k"])
    {'k': ('H', 'T', 'D')}
    """
    found = {}
    for name in names:
        one, said = re.escape(name), _said(name, _LIST)
        unpacked = (
            rf"^\s*({_WORD}(?:\s*,\s*{_WORD}){{1,5}})\s*=\s*{one}\.(?:shape|size\(\))\s*(?:#.*)?$"
        )
        annotated = rf"(?<![\w.]){one}\s*:\s*\w+\[[^\"\n]*\"([\w ]+)\"\]"
        for pattern in (annotated, said, unpacked):
            matches = re.finditer(pattern, text, re.MULTILINE)
            lists = (_words_of(match[1]) for match in matches)
            words = next((one for one in lists if _are_axes(one, name)), None)
            if words is not None:
                found[name] = tuple(words)
                break
    if (in_order := _IN_ORDER.search(text)) is not None:
        shapes = (re.findall(_WORD, own) for own in re.findall(_SHAPE, in_order[1]))
        found = {name: tuple(own) for name, own in zip(names, shapes, strict=False)} | found
    alike = axes_of_all(text)
    return dict.fromkeys(names, alike) | found if alike else found


def _words_of(shape: str) -> list[str]:
    """The names of axes; a part of one, as C // heads, is another axis."""
    parted = re.sub(r"\s*//\s*(\w+)", r"_by_\1", shape)
    return re.findall(_WORD, re.sub(r"\*\s*\w+", "", parted))


def _said(name: str, within: str) -> str:
    """The pattern of a list in brackets that a text gives a name, perhaps with others.

    W_* are all whose names begin so.
    """
    others = rf"|{re.escape(name[0])}_?\*" if len(name) > 1 else ""
    return (
        rf"(?<![\w.])(?:{re.escape(name)}\b{others})(?:\s*:\s*[\w.]+\s*(?:=\s*\w+)?\s*,?\s*\#)?"
        rf"[\w ,/&`\"']{{0,40}}?"
        rf"\s*(?::|=|-)?\s*(?:[a-z ]{{3,40}}(?:,\s*| ))?(?:optional,? |of )?(?:shape )?(?<!\w)"
        rf"[(\[]\s*({within})\s*[)\]]"
    )


def documented_sizes(text: str, names: Collection[str]) -> dict[str, list[str]]:
    """The lengths of the axes of each argument whose shape a text gives, as it writes them.

    >>> documented_sizes("rel_k, rel_v: (2 * clip + 1, d)", ["rel_v"])
    {'rel_v': ['2 * clip + 1', 'd']}
    >>> documented_sizes("rel_k: (2c + 1, d / n)", ["rel_k"])
    {'rel_k': ['2 * c + 1', 'd / n']}
    """
    found = {}
    for name in names:
        for match in re.finditer(_said(name, _SUMS), text):
            written = re.sub(r"(?<![\w.])(\d+)(?=[A-Za-z_])", r"\1 * ", match[1])
            sizes = [one.strip() for one in written.split(",") if one.strip()]
            if _are_axes(re.findall(_WORD, match[1]), name):
                found[name] = sizes
                break
    return found


def length_written(size: str, of: Callable[[str], int]) -> int:
    """A length of a text, where `of` tells the length that a name means.

    >>> length_written("2 * clip + 1", {"clip": 4}.__getitem__)
    9
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return of(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return int(_ARITHMETIC[type(op)](value(left), value(right)))
        raise TypeError(f"the length {size} is not known")

    return value(ast.parse(size, mode="eval").body)


def length_of_any(text: str, name: str) -> str:
    """The name of the length of an array of any number of axes, as a text gives it; or nothing.

    >>> length_of_any("q, k, v: (..., T, d)", "k"), length_of_any("k: (L, D)", "k")
    ('T', '')
    """
    found = re.search(_said(name, rf"\.\.\.\s*,\s*{_LIST}"), text)
    words = re.findall(_WORD, found[1]) if found else []
    return words[-2] if len(words) > 1 else ""


def axes_of_all(text: str) -> tuple[str, ...]:
    """The axes that a text gives all arrays.

    >>> axes_of_all("(H, L, D) each"), axes_of_all("all arrays are (L, D)")
    (('H', 'L', 'D'), ('L', 'D'))
    >>> axes_of_all("All of shape (B, T, d)")
    ('B', 'T', 'd')
    """
    found = _OF_ALL.search(text) or _EACH.search(text)
    return tuple(re.findall(_WORD, found[1])) if found else ()


def _are_axes(words: Sequence[str], name: str) -> bool:
    """Whether words may be axes: not those of a call, as in f(q, k, v), nor of x[None, None]."""
    if all(word.isdigit() for word in words):  # an example
        return False
    if name in words and not any(_BATCH.match(one.lower()) for one in words if one != name):
        return False  # hidden: (batch, 1, hidden) has an axis of the same name
    return not {"None", "self", "dtype", "int", "float"} & {*words}


def is_of_tokens(word: str) -> bool:
    """Whether an axis with such a name has an entry for each token."""
    return _TOKENS.match(word.lower()) is not None


def letters_of(shapes: Mapping[str, Sequence[str]]) -> dict[str, str] | None:
    """The axes of each argument as letters: B, T, 1, or one for each other name; None if unclear.

    >>> letters_of({"h": ("batch", "tokens", "dim"), "u": ("dim",)})
    {'h': 'BTa', 'u': 'a'}
    """
    words = list(dict.fromkeys(word for own in shapes.values() for word in own if word != "1"))
    longest = max(shapes.values(), key=len, default=())
    batch = next((word for word in words if _BATCH.match(word.lower())), "")
    if not batch and len(longest) > 2 and longest[0].lower() == "n":
        batch = longest[0]
    tokens = [word for word in words if word != batch and _TOKENS.match(word.lower())]
    if not tokens or len(words) > len(LETTERS):
        return None
    # Keys are what most arguments have, and the last of two: (n, c) reads (m, c).
    last = max(
        tokens, key=lambda word: (sum(word in own for own in shapes.values()), words.index(word))
    )
    letters = {"1": "1", last: "T"} | dict.fromkeys([batch] * bool(batch), "B")
    rest = iter(LETTERS)
    letters |= {word: next(rest) for word in words if word not in letters}
    return {name: "".join(letters[word] for word in own) for name, own in shapes.items()}

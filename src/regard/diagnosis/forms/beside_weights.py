"""What lies beside the weights in a tree of parameters: gates, factors, tables of distances.

Owns the sizes of weights that are made for a function. Must not know any probe.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.forms.caches import fields_of
from regard.diagnosis.forms.construction import GATE_LAYER
from regard.diagnosis.forms.einsums import HEADS as HEAD_AXIS
from regard.diagnosis.forms.einsums import WIDTHS as WIDTH_AXIS
from regard.diagnosis.forms.einsums import axes_in_einsums
from regard.diagnosis.forms.source import code_of_file
from regard.diagnosis.reading.documented import (
    documented_axes,
    documented_sizes,
    is_of_tokens,
    length_written,
)
from regard.diagnosis.reading.signature import text_of

WIDTH, HEADS = 24, 4  # 1, 2, 3, 4 and 6 heads fit; where weights have an axis of heads, 4
LETTERS = {"M": WIDTH, "H": HEADS, "D": WIDTH // HEADS}
MODEL_AXIS = re.compile("d_?model|embed(_dim)?|dim|e|c|m|hidden(_size)?|model|width")
TABLE = re.compile("rel|table|alibi|position|pos_", re.IGNORECASE)
# Code of Transformer-XL's positions, and its matrices and vectors for them.
RELATIVE = re.compile(r"rel\w*_?shift|transformer-?_?xl|rel\w*_(multi|pos|att)", re.IGNORECASE)
OF_POSITIONS = re.compile(
    r"[ruv]|w_?k?_?r|r_?(net|proj|emb\w*)|(linear|proj|w|k)_?(pos|rel)|(pos|rel)_?(proj|kernel|w)|"
    r"(r_?[wr]|pos|content|[uv])_?bias(_?[uv])?|bias_[uv]",
    re.IGNORECASE,
)
# Factors and shifts of normalisations.
BIAS = re.compile("bias|rel", re.IGNORECASE)
# Factors, which are 1 where nothing is learned.
ONES = re.compile("scale|gamma|gain|weight|(^|_)[gw]$", re.IGNORECASE)


def is_gate(name: str, text: str) -> bool:
    """Whether the sigmoid of a layer multiplies attention, by its name or by the code around it."""
    in_sigmoid = rf"sigmoid\([^\n]*[\"'.]{re.escape(name)}\b"
    return GATE_LAYER.search(name) is not None or re.search(in_sigmoid, text) is not None


def beside_weights(
    function: Callable[..., Any],
    kind: Any,
    rest: Sequence[str],
    weights: Collection[str],
    known: Mapping[str, str],
    sizes: Mapping[str, int],
) -> dict[str, Array]:
    """What other entries of a tree may be, if their axes are known: by einsums, or as documented.

    `known` are the axes of its `weights`. Gates are open, factors 1, tables drawn, all else is 0.
    """
    names = [*fields_of(kind)] if kind is not None else rest
    said = f"{text_of(kind)}\n{code_of_file(function)}"
    words = documented_axes(said, [*names, *weights])
    written = documented_sizes(said, [one for one in names if one not in words])
    sizes = dict(sizes)
    for name, axes in known.items():
        if len(axes) == len(words.get(name, ())):
            own = zip(words[name], axes, strict=True)
            sizes |= {word: LETTERS[axis] for word, axis in own if axis in LETTERS}
    found, in_einsums, text = {}, axes_in_einsums(function), text_of(function)
    relative = RELATIVE.search(text) is not None
    for name in names:
        axes = in_einsums.get(name, "")
        shape = [LETTERS[one] for one in axes if one in LETTERS]
        if len(shape) != len(axes) or not axes:
            own_words = words.get(name, ())
            of_cells = BIAS.search(name) is not None  # none, in any number of tokens
            shape = [
                int(is_of_tokens(one)) * of_cells
                or sizes.get(one)
                or _size_named(one)
                or int(is_of_tokens(one))
                for one in own_words
            ]
            shape = shape or _as_written(written.get(name, ()), sizes)
        gates, is_bias = is_gate(name, text), re.search("(^b|_b|bias)$", name)
        shape = [HEADS, LETTERS["D"]] if gates and is_bias and not shape else shape
        if gates and not shape and re.search(rf"@ *\w+\[[\"']{re.escape(name)}[\"']\]", text):
            shape = [WIDTH, WIDTH]
        if name in weights or not shape or not all(shape):
            continue
        drawn = np.random.default_rng(len(name)).normal(size=shape)
        filled = 100.0 * bool(is_bias) if gates else float(bool(ONES.search(name)))
        is_table = TABLE.search(name) and shape.count(1) < 2
        is_table = is_table or (relative and OF_POSITIONS.fullmatch(name) is not None)
        found[name] = drawn if is_table else np.full(shape, filled)
    return found


def _as_written(lengths: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """The lengths of axes that are sums, as `2 * distance + 1`; none if a name is not known."""

    def of(word: str) -> int:
        if (size := sizes.get(word) or _size_named(word)) == 0:
            raise TypeError(f"the length {word} is not known")
        return size

    with contextlib.suppress(TypeError, SyntaxError):
        return [length_written(one, of) for one in lengths]
    return []


def _size_named(word: str) -> int:
    """The length of an axis with such a name; 0 if that is not known."""
    if word.isdigit():
        return int(word)
    kinds = (HEAD_AXIS, HEADS), (WIDTH_AXIS, LETTERS["D"]), (MODEL_AXIS, WIDTH)
    return next((size for kind, size in kinds if kind.fullmatch(word.lower())), 0)

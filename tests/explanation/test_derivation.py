"""Where one number came from: every cell of every step re-derives, and its text adds up."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from designs import COINS, numbers, of_every_kind
from regard import Derivation, Explanation, Problem
from regard.explanation.notation import format_number, latex_number, numpy_literal
from regard.masks import Boolean, Causal, Lengths, Mask, Segments, Window
from regard.normalizers import Hard, Sigmoid, Sparsemax
from regard.rules.visibility import Placed
from regard.scores import Additive, Cosine, Distance
from regard.textbook.block_operations import BLOCK_OPERATIONS
from regard.textbook.operations import OPERATIONS

INF, NAN = np.inf, np.nan

# Half the distance from 1 to the next float64: what one rounding may do.
UNIT = 2.0**-53
FLOOR = 2.0**-1074
# How many ulp the same function of the same number may differ between NumPy's vectors and the C
# library behind `math`: exp and log are within 1 ulp in each, tanh within 2, and c·tanh(x/c) rounds
# the quotient, whose error tanh never enlarges, and the product. The slope of a softcap is made of
# one exp or cosh within 2 ulp, which is squared, a sum and a quotient.
POINTWISE_ULP = {"exp": 2, "log": 2, "softcap": 6, "softcap_slope": 12}
POINTWISE_ULP |= {"sigmoid": 6, "sigmoid_slope": 12, "elu_plus_one": 2, "elu_slope": 2}
# Everything else is one operation of IEEE arithmetic on the same numbers.
OTHER_ULP = 1

SUMS = ("dot", "row_dot", "sum")
REDUCING = (*SUMS, "max")


# problems -----------------------------------------------------------------------------------------


def ready(*shapes: tuple[int, ...], seed: int = 0, size: float = 1.0) -> tuple[np.ndarray, ...]:
    """Query, key and value of these shapes."""
    return tuple(numbers(10 * seed + n, *shape, size=size) for n, shape in enumerate(shapes))


def with_cells(array: np.ndarray, cells: dict[tuple[int, ...], float]) -> np.ndarray:
    array = array.copy()
    for at, value in cells.items():
        array[at] = value
    return array


def weights(
    *, heads: int = 1, key_heads: int = 1, inner: int = 3, context: int | None = None
) -> dict[str, np.ndarray]:
    """Projections to widths 2 and 2, from embeddings `inner` wide and a context."""
    return {
        "W_q": numbers(1, inner, heads * 2),
        "W_k": numbers(2, context or inner, key_heads * 2),
        "W_v": numbers(3, context or inner, key_heads * 2),
    }


PLAIN = ready((3, 2), (4, 2), (4, 3))
SQUARE = ready((3, 2), (3, 2), (3, 2))
HEADS = ready((4, 3, 2), (2, 3, 2), (2, 3, 2))

DESIGNED: dict[str, Callable[[], Explanation]] = {
    "plain": lambda: regard.explain(*PLAIN),
    "labelled": lambda: regard.explain(
        *SQUARE,
        query_labels=["the", "cat", "the"],
        key_labels=["the", "cat", "the"],
        key_features=["x", "y"],
        value_features=["u", "v"],
        causal=True,
    ),
    "one query": lambda: regard.explain(*ready((2,), (3, 2), (3, 2)), mask=[True, False, True]),
    "one query, one head": lambda: regard.explain(*ready((2,), (1, 3, 2), (1, 3, 2)), sink=0.5),
    "grouped heads": lambda: regard.explain(*HEADS, causal=True, sink=numbers(5, 4)),
    "batches": lambda: regard.explain(
        *ready((2, 1, 2, 2, 2), (1, 2, 1, 3, 2), (2, 1, 3, 2)),
        mask=Lengths([[3, 1], [0, 2]]),
        causal=True,
        offset=[1, 0],
    ),
    "every kind of rule": lambda: regard.explain(
        *SQUARE,
        mask=((Boolean(COINS[:, 1:]) | Segments([0, 1, 1])) & ~Lengths(1)) | (~Causal()),
        window=(1, 2),
    ),
    "a mask per head": lambda: regard.explain(*HEADS, mask=numbers(6, 4, 3, 3) > 0.4),
    "rows that see nothing": lambda: regard.explain(*PLAIN, mask=COINS),
    "rows that see nothing, with a sink": lambda: regard.explain(*PLAIN, mask=COINS, sink=-0.25),
    "a bias that hides": lambda: regard.explain(
        *PLAIN, bias=with_cells(numbers(7, 3, 4), {(0, 1): -INF, (2, 0): -INF, (2, 3): INF})
    ),
    "a bias that is nan": lambda: regard.explain(
        *PLAIN,
        bias=with_cells(np.zeros((3, 4)), {(0, 1): NAN, (1, 2): -INF}),
        causal=True,
        offset=1,
    ),
    "a bias per head": lambda: regard.explain(*HEADS, bias=numbers(8, 4, 1, 3)),
    "softcap": lambda: regard.explain(*PLAIN, softcap=1.5, scale=-2.0),
    "everything at once": lambda: regard.explain(
        *HEADS,
        mask=Boolean(numbers(9, 3, 3) > -1, name="padding"),
        bias=numbers(10, 3, 3),
        softcap=2.0,
        sink=0.0,
        window=(1, 1),
        scale=0.3,
    ),
    "unshifted": lambda: regard.explain(*PLAIN, softmax="unshifted", sink=0.5, mask=COINS),
    "unshifted, overflowing": lambda: regard.explain(
        *ready((2, 2), (3, 2), (3, 2), size=60.0), softmax="unshifted", scale=1.0
    ),
    "unshifted, vanishing": lambda: regard.explain(
        [[-800.0], [1.0]], [[1.0], [2.0]], [[1.0], [3.0]], softmax="unshifted", scale=1.0
    ),
    "nan in sight": lambda: regard.explain(
        with_cells(PLAIN[0], {(1, 0): NAN}),
        with_cells(PLAIN[1], {(2, 1): INF}),
        with_cells(PLAIN[2], {(0, 2): NAN, (3, 1): -INF}),
    ),
    "nan out of sight": lambda: regard.explain(
        PLAIN[0],
        with_cells(PLAIN[1], {(3, 0): NAN}),
        with_cells(PLAIN[2], {(3, 0): NAN, (3, 1): INF}),
        mask=Lengths(3),
    ),
    "nan in sight of some": lambda: regard.explain(
        SQUARE[0],
        with_cells(SQUARE[1], {(2, 0): NAN}),
        with_cells(SQUARE[2], {(1, 0): -INF, (2, 1): NAN}),
        causal=True,
    ),
    "beyond float64": lambda: regard.explain(
        [[1e200, 1e200]], [[1e200, 1.0], [-1e200, 1.0]], [[1.0], [2.0]]
    ),
    "tiny": lambda: regard.explain(*(x * 1e-150 for x in PLAIN)),
    "zeros of both signs": lambda: regard.explain(
        [[0.0, -0.0]], [[-1.0, 2.0], [-0.0, 0.0]], [[-0.0], [0.0]], causal=True, offset=0
    ),
    "scale of zero": lambda: regard.explain(*PLAIN, scale=0.0),
    "half precision": lambda: regard.explain(*(x.astype(np.float16) for x in HEADS)),
    "integers": lambda: regard.explain(np.arange(6).reshape(3, 2), [[1, 0], [2, 3]], [[1], [0]]),
    "no keys": lambda: regard.explain(*ready((2, 2), (0, 2), (0, 3)), sink=0.5),
    "no width": lambda: regard.explain(*ready((2, 0), (3, 0), (3, 2))),
    "projected": lambda: regard.explain(Problem(embeddings=numbers(0, 3, 3), **weights())),
    "projected, with biases": lambda: regard.explain(
        Problem(
            embeddings=numbers(0, 3, 3),
            **weights(),
            b_q=numbers(4, 2),
            b_k=numbers(5, 2),
            b_v=numbers(6, 2),
            W_o=numbers(7, 2, 4),
            b_o=numbers(8, 4),
            query_labels=("a", "b", "c"),
            causal=True,
        )
    ),
    "projected, with heads": lambda: regard.explain(
        Problem(
            embeddings=numbers(0, 3, 3),
            **weights(heads=4, key_heads=2),
            heads=4,
            key_heads=2,
            b_k=numbers(5, 4),
            W_o=numbers(7, 8, 2),
            lengths=2,
        )
    ),
    "projected, with heads and every bias": lambda: regard.explain(
        Problem(
            embeddings=numbers(0, 2, 3),
            **weights(heads=2, key_heads=1),
            heads=2,
            key_heads=1,
            b_q=numbers(4, 4),
            b_k=numbers(5, 2),
            b_v=numbers(6, 2),
            W_o=numbers(7, 4, 3),
            b_o=numbers(8, 3),
            softcap=1.0,
            sink=(0.5, -0.5),
            bias=0.25,
            mask=[[True, True], [False, True]],
        )
    ),
    "projected, without an output projection": lambda: regard.explain(
        Problem(embeddings=numbers(0, 2, 3), **weights(heads=2, key_heads=2), heads=2)
    ),
    "cross-attention": lambda: regard.explain(
        Problem(
            embeddings=numbers(0, 3, 3),
            context=numbers(9, 2, 4),
            **weights(heads=2, key_heads=2, context=4),
            heads=2,
            b_v=numbers(6, 4),
            query_segments=(0, 1, 1),
            key_segments=(1, 0),
            softmax="unshifted",
        )
    ),
    "pulled to a target": lambda: regard.explain(*PLAIN, target=numbers(4, 3, 3)),
    "everything at once, pulled": lambda: regard.explain(
        *HEADS,
        mask=Boolean(numbers(9, 3, 3) > -1, name="padding"),
        bias=with_cells(numbers(10, 3, 3), {(0, 1): -INF}),
        softcap=2.0,
        sink=0.0,
        window=(1, 1),
        scale=0.3,
        target=numbers(11, 4, 3, 2),
    ),
    "one query, given its gradient": lambda: regard.explain(
        *ready((2,), (3, 2), (3, 2)), sink=0.5, grad_output=[1.0, -2.0]
    ),
    "projected, pulled": lambda: regard.explain(
        Problem(
            embeddings=numbers(0, 3, 3),
            **weights(heads=2),
            heads=2,
            key_heads=1,
            W_o=numbers(4, 4, 2),
            b_q=numbers(5, 4),
            b_o=numbers(6, 2),
            target=numbers(7, 3, 2),
        )
    ),
    **of_every_kind(PLAIN, HEADS),
    "additive, sigmoid": lambda: regard.explain(
        *HEADS,
        score=Additive(numbers(4, 2, 3), numbers(5, 2, 3), numbers(6, 3)),
        normalize=Sigmoid(-0.5),
        mask=numbers(9, 3, 3) > -1,
        target=numbers(5, 4, 3, 2),
    ),
    "cosine, sparsemax": lambda: regard.explain(
        with_cells(PLAIN[0], {(1, 0): 0.0, (1, 1): 0.0}),
        *PLAIN[1:],
        score=Cosine(0.25),
        normalize=Sparsemax(),
        mask=COINS,
        target=numbers(4, 3, 3),
    ),
    "distance, hard, straight through": lambda: regard.explain(
        *ready((2,), (3, 2), (3, 2)),
        score=Distance(),
        normalize=Hard(straight_through=True),
        scale=0.5,
        target=[1.0, 2.0],
    ),
}
every_design = pytest.mark.parametrize(
    "design", [pytest.param(d, id=n) for n, d in DESIGNED.items()]
)


# Random problems: hypothesis chooses the structure, the numbers come from a seed that it chooses.
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-310, 40.0, -40.0)


@st.composite
def arrays(draw: Any, *shape: int, odd: tuple[float, ...] = SPECIAL) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    array = rng.normal(size=shape) * draw(st.sampled_from([1.0, 5.0, 1e-3]))
    if odd and draw(st.integers(0, 3)) == 0:
        where = rng.random(shape) < 0.2
        array[where] = rng.choice(odd, size=int(where.sum()))
    return array


@st.composite
def rules(draw: Any, lead: tuple[int, ...], rows: int, keys: int, depth: int = 2) -> Mask:
    kind = draw(st.integers(0, 4 if depth == 0 else 7))
    seeds = st.integers(0, 2**20)
    if kind == 0:
        front = (*lead, 1) if lead else ()
        shape = draw(st.sampled_from([(keys,), (rows, keys), (rows, 1), (*front, rows, keys)]))
        coins = np.random.default_rng(draw(seeds)).random(shape) < 0.6
        return Boolean(coins, name=draw(st.sampled_from(["mask", "padding"])))
    if kind == 1:
        return Causal()
    if kind == 2:
        sides = st.none() | st.integers(0, 3)
        return Window(draw(sides), draw(sides))
    if kind == 3:
        shape = draw(st.sampled_from([(), lead]))
        return Lengths(np.random.default_rng(draw(seeds)).integers(0, keys + 1, shape))
    if kind == 4:
        rng = np.random.default_rng(draw(seeds))
        return Segments(rng.integers(0, 2, rows), rng.integers(0, 2, keys))
    if kind == 5:
        return ~draw(rules(lead, rows, keys, depth - 1))
    one, other = (draw(rules(lead, rows, keys, depth - 1)) for _ in range(2))
    return one & other if kind == 6 else one | other


@st.composite
def options(draw: Any, heads: int | None, rows: int, keys: int) -> dict[str, Any]:
    """What calls and problems have in common."""
    some = st.integers(0, 2).map(lambda n: n == 0)
    chosen: dict[str, Any] = {}
    if draw(some):
        chosen["causal"] = True
    if draw(some):
        chosen["window"] = draw(st.tuples(*[st.none() | st.integers(0, 2)] * 2))
    chosen["offset"] = draw(st.sampled_from([0, "end", -1, 2]))
    if draw(some):
        front = () if heads is None else draw(st.sampled_from([(), (1,), (heads,)]))
        shape = (*front, rows, keys)
        chosen["bias"] = draw(arrays(*shape, odd=(-INF, -INF, INF, NAN, -0.0)))
    if draw(some):
        chosen["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    if draw(some):
        per_head = heads is not None and draw(st.booleans())
        chosen["sink"] = numbers(draw(st.integers(0, 99)), *((heads,) if per_head else ()))
    if draw(some):
        chosen["scale"] = draw(st.sampled_from([1.0, 0.0, -0.5, 30.0]))
    if draw(some):
        chosen["softmax"] = "unshifted"
    return chosen


GROUPS = [None, (1, 1), (2, 1), (2, 2), (4, 2)]
small = st.integers(1, 3)


@st.composite
def calls(draw: Any) -> Explanation:
    """An explanation of ready queries, keys and values."""
    rows, keys, width, values = (draw(small) for _ in range(4))
    group = draw(st.sampled_from(GROUPS))
    lead = draw(st.sampled_from([(), (2,), (2, 1)])) if group else ()
    if group:
        shapes = [(*lead, group[0], rows, width), (group[1], keys, width), (group[1], keys, values)]
    elif draw(st.integers(0, 3)) == 0:
        shapes, rows = [(width,), (keys, width), (keys, values)], 1
    else:
        shapes = [(rows, width), (keys, width), (keys, values)]
    chosen = draw(options(group and group[0], rows, keys))
    if len(shapes[0]) == 1 and "bias" in chosen:
        chosen["bias"] = chosen["bias"][0]
    if len(shapes[0]) > 1 and draw(st.booleans()):
        chosen["mask"] = draw(rules(lead, rows, keys))
        # A position for each query, as any rules may be here: an offset counts within segments.
        first = keys - rows if chosen["offset"] == "end" else chosen["offset"]
        chosen["offset"] = Placed(np.arange(rows) + first)
    if draw(st.booleans()):
        chosen["key_labels"] = draw(st.lists(st.sampled_from("abc"), min_size=keys, max_size=keys))
    return regard.explain(*(draw(arrays(*shape)) for shape in shapes), **chosen)


@st.composite
def problems(draw: Any) -> Explanation:
    """An explanation that starts from embeddings."""
    rows, inner, width, values = (draw(small) for _ in range(4))
    group = draw(st.sampled_from(GROUPS[:4]))
    heads, groups = group or (1, 1)
    keys, outer = (draw(small), draw(small)) if draw(st.booleans()) else (rows, inner)
    fields: dict[str, Any] = {"embeddings": draw(arrays(rows, inner))}
    if (keys, outer) != (rows, inner):
        fields["context"] = draw(arrays(keys, outer))
    columns = {"q": heads * width, "k": groups * width, "v": groups * values, "o": draw(small)}
    before = {"q": inner, "k": outer, "v": outer, "o": heads * values}
    for letter in "qkv" + "o" * draw(st.booleans()):
        fields[f"W_{letter}"] = draw(arrays(before[letter], columns[letter], odd=()))
        if draw(st.booleans()):
            fields[f"b_{letter}"] = draw(arrays(columns[letter]))
    if group:
        fields |= {"heads": heads, "key_heads": groups}
    fields |= draw(options(group and heads, rows, keys))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    if draw(st.booleans()):
        fields["mask"] = rng.random((rows, keys)) < 0.7
    if draw(st.booleans()):
        fields["lengths"] = int(rng.integers(0, keys + 1))
    if draw(st.booleans()):
        fields["query_segments"] = tuple(np.sort(rng.integers(0, 2, rows)).tolist())
        fields["key_segments"] = tuple(np.sort(rng.integers(0, 2, keys)).tolist())
    return regard.explain(Problem(**fields))


# what every cell must keep ------------------------------------------------------------------------


def cells(explanation: Explanation) -> Iterator[Derivation]:
    """Every cell of every step, each as a reader asks for it."""
    for name, step in explanation.steps.items():
        lead = len(step.shape) - len(step.axes)
        headed = bool(step.axes) and step.axes[0] in ("H", "G")
        for at in np.ndindex(*step.shape):
            batch, index = at[:lead], at[lead:]
            head = index[0] if headed else None
            yield explanation.why(
                name, *index[1 if headed else 0 :], head=head, batch=batch if lead else None
            )


def stands(
    explanation: Explanation, step: str, batch: tuple[int, ...], index: tuple[int, ...]
) -> float:
    """The number of one cell, read from the whole step."""
    explained = explanation.steps[step]
    lead = len(explained.shape) - len(explained.axes)
    return float(explained.value[(*batch[:lead], *index)])


def same(one: float, other: float) -> bool:
    """Equal, NaN to NaN and each zero to itself."""
    return np.float64(one).tobytes() == np.float64(other).tobytes() or (
        one != one and other != other
    )


def agree(one: float, other: float, allowed: float) -> bool:
    """Within `allowed` of each other; NaN only with NaN and each infinity only with itself."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    if math.isinf(one) or math.isinf(other):
        return one == other
    return abs(one - other) <= allowed


def ulp(*values: float) -> float:
    return max((math.ulp(value) for value in values if math.isfinite(value)), default=0.0)


def exact_terms(derivation: Derivation) -> list[Fraction] | None:
    """The terms of a sum without any rounding; None where one of them is not finite, or rounded."""
    terms = []
    every = [(term.operands, term.value) for term in derivation.terms]
    every = every or [((k,), one.value) for k, one in enumerate(derivation.operands)]
    for operands, value in every:
        factors = [derivation.operands[k].value for k in operands]
        if not all(map(math.isfinite, [*factors, value])):
            return None
        terms.append(math.prod(map(Fraction, factors), start=Fraction(1)))
    return terms


def allowed_in_sum(terms: list[Fraction]) -> Fraction:
    """n·u·Σ|terms|, to all orders, and what underflows in n products and sums."""
    roundings = len(terms) * Fraction(UNIT)
    return roundings / (1 - roundings) * sum(map(abs, terms)) + 2 * len(terms) * Fraction(FLOOR)


def check_cell(explanation: Explanation, cell: Derivation) -> None:
    order = list(explanation.steps)
    stored = stands(explanation, cell.step, cell.batch, cell.index)
    assert same(cell.value, stored), f"{cell}\nbut the step has {stored}"
    for operand in cell.operands:
        assert order.index(operand.step) < order.index(cell.step), cell
        assert same(operand.value, stands(explanation, operand.step, cell.batch, operand.index)), (
            cell
        )
        assert operand.symbol == explanation.steps[operand.step].symbol, cell
    again = cell.recompute()
    with np.errstate(all="ignore"):
        line = float(eval(cell.numpy(), {"np": np, "__builtins__": {}}))
    terms = exact_terms(cell) if cell.op in (*SUMS, "add") else None
    if terms is not None and sum(map(abs, terms)) < Fraction(np.finfo(np.float64).max):
        exact, allowed = sum(terms, start=Fraction(0)), allowed_in_sum(terms)
        for number in (cell.value, line):
            assert abs(Fraction(number) - exact) <= allowed, f"{cell}\nexactly {float(exact)!r}"
        # The terms are rounded once each, and so is their sum.
        rounded = 2 * Fraction(UNIT) * sum(map(abs, terms)) + 2 * len(terms) * Fraction(FLOOR)
        assert abs(Fraction(again) - exact) <= rounded, f"{cell}\nexactly {float(exact)!r}"
        return
    if OPERATIONS[cell.op].total and cell.op not in (*SUMS, *EXACT):
        # Each term is rounded a few times, and so is every sum.
        size = sum(abs(term.value) for term in cell.terms if math.isfinite(term.value))
        for number in (again, line):
            assert agree(number, cell.value, (len(cell.terms) + 12) * UNIT * size), cell
        return
    ulps = POINTWISE_ULP.get(cell.op, OTHER_ULP)
    for number in (again, line):
        allowed = ulps * ulp(cell.value, number)
        assert agree(number, cell.value, allowed), f"{cell}\nbut again it is {number!r}"


def check_verdicts(explanation: Explanation, cell: Derivation) -> None:
    if not cell.verdicts:
        return
    at = dict(zip(cell.declared.axes, cell.index, strict=True))
    visible = explanation.steps["visible"]
    where = tuple(at[axis] for axis in visible.axes)
    seen = stands(explanation, "visible", cell.batch, where)
    (verdict,) = cell.verdicts
    assert verdict.visible == bool(seen) == (not cell.hidden), cell
    assert bool(verdict.hidden_by()) == cell.hidden, cell
    assert ("hidden by: " in cell.text()) == cell.hidden, cell


def parsed(printed: str) -> Decimal:
    """A printed finite number, exactly as printed."""
    return Decimal(printed.strip("()").replace("−", "-"))


def last_digit(printed: str, digits: int) -> Decimal:
    """What one unit of the last digit is worth that a number with so many digits may show."""
    exponent = int(printed.split("e")[1]) if "e" in printed else 0
    return Decimal(1).scaleb(exponent - digits)


def is_finite_text(printed: str) -> bool:
    return "∞" not in printed and "NaN" not in printed


def says_rounded(lines: list[str]) -> bool:
    return any("rounded" in line for line in lines)


def reads_back(value: float, digits: int) -> bool:
    """Whether a number as printed is that number, or has its first 15 digits."""
    if not math.isfinite(value):
        return True
    printed = parsed(format_number(value, digits))
    with localcontext(prec=15):
        return float(printed) == value or printed == +Decimal(value)


# The value of these is one of the operands: nothing is calculated from rounded numbers.
EXACT = ("given", "visible", "max", "select", "split", "merge", "same", "keep", "first_at")


def check_text(cell: Derivation, digits: int) -> None:
    """The text says that numbers are rounded exactly where a number that it shows is."""
    head, *lines = cell.text(digits).split("\n")
    result = format_number(cell.value, digits)
    assert f" = {result}    {cell.declared.formula}" in head
    shown = [cell.value, *(one.value for one in (*cell.operands, *cell.terms))]
    rounded = any(not reads_back(value, digits) for value in shown)
    calculated = cell.op not in EXACT and not cell.hidden
    assert says_rounded(lines) == (calculated and rounded), cell.text(digits)
    if cell.terms:
        rows = [line.split() for line in lines[: len(cell.terms) + 1]]
        terms = [format_number(term.value, digits) for term in cell.terms]
        assert [row[-1] for row in rows[:-1]] == terms
        assert rows[-1] == [OPERATIONS[cell.op].total, result]
        if cell.op in ("max", "first_at"):
            assert result in terms


# fmt: off
LATEX_COMMANDS = {
    "text", "textbackslash", "textasciicircum", "textasciitilde", "cdot", "mathrm", "infty",
    "tanh", "exp", "ln", "max", "left", "right", "frac", "sqrt", "quad", "underbrace",
    "ell", "delta", "tau", "min", "hat", "varphi", "sigma", "Delta", "Vert",
    "theta", "mu", "beta", "cos", "sin", "perp",
}
# fmt: on


def check_latex(latex: str) -> None:
    """One line of mathematics: balanced, of known commands, with nothing special unescaped."""
    assert "\n" not in latex
    depth, position = 0, 0
    while position < len(latex):
        character = latex[position]
        if character == "\\":
            name = re.match(r"[A-Za-z]+", latex[position + 1 :])
            if name:
                assert name[0] in LATEX_COMMANDS, latex
                position += len(name[0])
            else:
                assert latex[position + 1] in "&%$#_{};", latex
                position += 1
        else:
            assert character not in "%&$#~", latex
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0, latex
        position += 1
    assert depth == 0, latex
    assert latex.count(r"\left(") == latex.count(r"\right)"), latex


@every_design
def test_every_cell_of_a_designed_problem_rederives(design):
    explanation = design()
    for cell in cells(explanation):
        check_cell(explanation, cell)
        check_verdicts(explanation, cell)


@every_design
def test_every_cell_of_a_designed_problem_says_whether_it_is_rounded(design):
    for cell in cells(design()):
        check_text(cell, 8)
        check_text(cell, 2)


@every_design
def test_every_cell_of_a_designed_problem_is_one_line_of_sound_latex(design):
    for cell in cells(design()):
        check_latex(cell.latex())
        check_latex(cell.latex(0))


@pytest.mark.parametrize("design", ["everything at once", "projected, with heads and every bias"])
def test_latex_never_has_two_subscripts_on_one_symbol(design):
    """A_s_{…} is an error in LaTeX: its A_s has to be grouped, or the two joined."""
    twice = re.compile(r"_(\{[^{}]*\}|\w)_")
    latex = [cell.latex().split("=")[0] for cell in cells(DESIGNED[design]())]
    assert [line for line in latex if twice.search(re.sub(r"\\_", "", line))] == []


@every_design
def test_every_operand_can_be_opened_down_to_given_numbers(design):
    explanation = design()
    opened: dict[tuple[Any, ...], Derivation] = {}
    waiting = [cell for cell in cells(explanation) if cell.step in last_steps(explanation)]
    while waiting:
        cell = waiting.pop()
        if (cell.step, cell.batch, cell.index) in opened:
            continue
        opened[cell.step, cell.batch, cell.index] = cell
        for k, operand in enumerate(cell.operands):
            made = cell.open(k)
            assert (made.step, made.index, made.batch) == (operand.step, operand.index, cell.batch)
            assert made.labels == operand.labels
            assert made.name == operand.name
            assert same(made.value, operand.value)
            waiting.append(made)
        if not cell.operands:
            empty = cell.op in REDUCING and not cell.terms
            assert cell.op in ("given", "visible") or empty, cell
    if all(0 not in step.shape for step in explanation.steps.values()):
        hidden_somewhere = {"scores", "scaled", "capped", "biased", "bias", "queries", "keys"}
        unmet = set(explanation.steps) - {step for step, *_ in opened}
        assert not unmet - hidden_somewhere, "some step leads nowhere"


def last_steps(explanation: Explanation) -> set[str]:
    """The results, of which every other number is a part."""
    results = ("projected_output", "merged", "output")
    steps = explanation.steps
    found = {"lse", next(name for name in results if name in steps)}
    given = {name for name, step in steps.items() if step.given}
    return found | {"loss"} & {*steps} | {s.name for s in steps.values() if s.declared.of in given}


@given(calls())
def test_every_cell_of_a_random_call_rederives(explanation):
    for cell in cells(explanation):
        check_cell(explanation, cell)
        check_verdicts(explanation, cell)
        check_text(cell, 8)
        check_latex(cell.latex())


@given(problems())
def test_every_cell_of_a_random_problem_rederives(explanation):
    for cell in cells(explanation):
        check_cell(explanation, cell)
        check_verdicts(explanation, cell)
        check_text(cell, 8)
        check_latex(cell.latex())


def test_a_changed_operand_no_longer_rederives():
    explanation = DESIGNED["everything at once"]()
    ops = set()
    for cell in cells(explanation):
        if cell.op in ("given", "visible", "select") or not cell.operands or cell.hidden:
            continue
        ops.add(cell.op)
        changed = [dataclasses.replace(o, value=o.value + 0.5) for o in cell.operands]
        terms = [
            dataclasses.replace(t, value=math.prod(changed[k].value for k in t.operands))
            for t in cell.terms
        ]
        other = dataclasses.replace(cell, operands=tuple(changed), terms=tuple(terms))
        unchanged = cell.op == "subtract" or (cell.op == "divide" and cell.value == 1)
        assert unchanged or abs(other.recompute() - cell.value) > 1e-6, cell
    assert ops == {
        *("dot", "multiply", "softcap", "add", "max", "subtract", "exp", "sum", "divide", "log")
    }


# what a derivation says ---------------------------------------------------------------------------


def teaching(**options: Any) -> Explanation:
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    labels = {"query_labels": ["she", "likes"], "key_labels": ["cat", "car"]}
    features = {"key_features": ["x", "y"], "value_features": ["u", "v"]}
    return regard.explain(x, x, x, **labels, **features, **options)


def test_a_dot_product_is_printed_term_by_term():
    assert teaching().why("scores", "she", "car").text() == "\n".join(
        [
            "A[she, car] = 11    A = Q·Kᵀ",
            "  x    1 × 3 = 3",
            "  y    2 × 4 = 8",
            "  sum          11",
        ]
    )


def test_a_hidden_cell_is_printed_with_what_every_rule_says():
    explanation = teaching(
        mask=Boolean([True, False], name="padding") & ~Window(0, None), causal=True
    )
    text = explanation.why("masked", "she", "car").text()
    assert text == "\n".join(
        [
            "A_m[she, car] = −∞    A_m = A_s where visible, else −∞",
            "  hidden, so −∞",
            "  padding: hidden (padding is False here)",
            "  not window: hidden (the opposite of: key 1 is inside 0 to …)",
            "  causal: hidden (key 1 > position 0)",
            "  hidden by: padding, not window, causal",
        ]
    )


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("masked", "  hidden, so −∞"),
        ("shifted", "  hidden, so −∞"),
        ("exponentials", "  hidden, so 0"),
        ("weights", "  hidden, so 0"),
    ],
)
def test_a_hidden_cell_is_printed_as_hidden_in_every_step_after_masking(step, line):
    lines = teaching(causal=True).why(step, "she", "car").text().split("\n")
    assert lines[1:] == [
        *(line, "  causal: hidden (key 1 > position 0)"),
        "  hidden by: causal",
    ]


def test_a_negative_number_is_subtracted_in_brackets():
    explanation = regard.explain([[1.0]], [[-1.0], [-3.0]], [[1.0], [2.0]], scale=1.0)
    cell = explanation.why("shifted", 0, 1)
    assert cell.text().split("\n")[1] == "  A_s[0, 1] − m[0] = −3 − (−1)"
    assert cell.latex().endswith("= -3 - (-1) = -2")


def test_a_visible_cell_of_the_mask_lists_every_rule_too():
    explanation = teaching(mask=Lengths(1) | Segments([0, 1]))
    text = explanation.why("visible", "likes", "car").text()
    assert text.split("\n")[1:] == [
        "  lengths: hidden (key 1 is after the first 1)",
        "  segments: visible (query in segment 1, key in segment 1)",
    ]


@pytest.mark.parametrize(
    ("step", "body"),
    [
        ("queries", "a given number"),
        ("capped", "c·tanh(A_s[she, cat] / c) = 4 × tanh(3.53553391 / 4)"),
        ("biased", "A_c[she, cat] + bias[she, cat] = 2.83352 − 1"),
        ("shifted", "A_b[she, cat] − m[she] = "),
        ("exponentials", "exp(T[she, cat]) = exp("),
        ("weights", "Y[she, cat] / z[she] = "),
        ("log_sums", "ln(z[she]) = ln("),
    ],
)
def test_each_pointwise_step_is_printed_with_names_and_numbers(step, body):
    explanation = teaching(softcap=4.0, bias=-1.0)
    where = {"queries": ("she", "x"), "log_sums": ("she",)}.get(step, ("she", "cat"))
    line = explanation.why(step, *where).text().split("\n")[1].strip()
    assert line.startswith(body[:24]), line
    assert is_finite_text(line)


def test_heads_side_by_side_are_printed_as_the_same_number():
    explanation = DESIGNED["projected, with heads"]()
    split = explanation.why("queries", 1, 0, head=3)
    assert split.operands[0].index == (1, 6)
    assert (
        split.text().split("\n")[1]
        == f"  the same number as Q*[1, 6] = {format_number(split.value)}"
    )
    merged = explanation.why("merged", 1, 5)
    assert merged.operands[0].index == (2, 1, 1)
    assert merged.operands[0].labels == ("head 2", "1", "1")


def test_an_empty_row_is_printed_as_one():
    explanation = teaching(mask=np.zeros((2, 2), bool))
    assert "no visible key, so −∞" in explanation.why("row_maximum", "she").text()
    assert "no visible key, so 0" in explanation.why("row_sums", "she").text()
    assert "no visible key, so 0" in explanation.why("output", "she", "u").text()


def test_a_sink_is_one_more_term_of_the_maximum_and_of_the_sum_and_of_nothing_else():
    explanation = teaching(sink=0.5)
    for step in ("row_maximum", "row_sums"):
        cell = explanation.why(step, "she")
        assert [term.label for term in cell.terms] == ["cat", "car", "sink"]
    assert [term.label for term in explanation.why("output", "she", "u").terms] == ["cat", "car"]


def test_a_hidden_key_is_no_term_at_all():
    explanation = teaching(mask=[True, False])
    for step, *where in (("row_maximum",), ("row_sums",), ("output", "u")):
        assert [t.label for t in explanation.why(step, "she", *where).terms] == ["cat"]


ROUNDED = "(numbers are rounded to 8 decimals; the result is of unrounded ones)"


def test_rounded_terms_are_said_to_be_rounded():
    thirds = regard.explain([[1.0]], [[1.0]] * 3, [[1.0], [1.0], [1.0]])
    assert ROUNDED in thirds.why("output", 0, 0).text()
    halves = regard.explain([[1.0]], [[1.0]] * 2, [[1.0], [1.0]])
    assert "rounded" not in halves.why("output", 0, 0).text()


@pytest.mark.parametrize("step", ["biased", "shifted", "lse"])
def test_an_addition_of_rounded_numbers_says_so_and_one_of_whole_numbers_does_not(step):
    query, key, value = ready((2, 2), (3, 2), (3, 1))
    bias = numbers(0, 2, 3)
    whole = [np.round(array) for array in (query, key, value)]
    for arrays, added, rounded in (
        ((query, key, value), bias, True),
        (whole, np.round(bias), step == "lse"),  # a logarithm of more than one key is not whole
    ):
        explanation = regard.explain(*arrays, bias=added, scale=1.0)
        cell = explanation.why(step, 0) if step == "lse" else explanation.why(step, 0, 1)
        one, other = (format_number(operand.value, 3) for operand in cell.operands)
        _, line, *remarks = cell.text(3).split("\n")
        sign = " − " if step == "shifted" or other.startswith("−") else " + "
        other = other.removeprefix("−") if step != "shifted" else other
        assert line.replace("(", "").replace(")", "").endswith(f" = {one}{sign}{other}")
        assert says_rounded(remarks) == rounded


def test_fewer_digits_print_fewer_decimals_in_text_and_latex():
    cell = teaching().why("scaled", "she", "cat")
    assert "3.54" in cell.text(2)
    assert "3.5355" not in cell.text(2)
    assert "3.54" in cell.latex(2)
    assert "3.53553391" in cell.latex()


def test_printing_a_derivation_prints_its_text():
    cell = teaching().why("weights", "she", "cat")
    assert str(cell) == repr(cell) == cell.text()


def test_latex_shows_the_same_numbers():
    explanation = teaching(causal=True, softcap=4.0)
    latex = explanation.why("scores", "likes", "car").latex()
    assert latex.endswith(r"_{\text{likes}, \text{car}} = 3 \cdot 3 + 4 \cdot 4 = 25")
    assert r"\frac{" in explanation.why("weights", "likes", "car").latex()
    assert explanation.why("weights", "she", "car").latex().endswith("= 0")
    assert explanation.why("masked", "she", "car").latex().endswith(r"= -\infty")
    biased = teaching(bias=-1.0).why("biased", "she", "cat")
    assert biased.latex().endswith(r"= 3.53553391 - 1 = 2.53553391")
    assert biased.numpy().endswith(" - 1.0")
    tiny = regard.explain([[1e-8]], [[1.0]], [[1.0]]).why("scores", 0, 0)
    assert tiny.latex().endswith(r"= 1 \cdot 10^{-8}")


def test_numpy_is_one_line_with_exact_numbers():
    cell = regard.explain([[0.1, 0.2]], [[0.3, NAN]], [[1.0]]).why("scores", 0, 0)
    assert cell.numpy() == "np.dot([0.1, 0.2], [0.3, np.nan])"
    assert teaching().why("queries", "she", "x").numpy() == "1.0"
    assert teaching(causal=True).why("shifted", "she", "car").numpy() == "-np.inf"


@pytest.mark.parametrize("operand", [4, -5, 100])
def test_opening_an_operand_that_is_not_there_says_how_many_there_are(operand):
    cell = teaching().why("scores", "she", "cat")
    with pytest.raises(regard.LabelError, match="4 operands"):
        cell.open(operand)


def test_opening_counts_from_the_end_as_lists_do():
    cell = teaching().why("scores", "she", "cat")
    assert cell.open(-1).name == cell.open(3).name == "K[cat, y]"


def test_a_derivation_cannot_be_changed():
    cell = teaching().why("scores", "she", "cat")
    for thing, name in ((cell, "value"), (cell.operands[0], "value"), (cell.terms[0], "label")):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(thing, name, 1.0)


# labels that mean harm ----------------------------------------------------------------------------

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x9b31m",
    "\u202egnidaelsim\u202c",
    "a\u200bb\u2060c\ufeff",
    "two\nlines",
    "over\rwritten\x08",
    "line\u2028separator\u2029",
    "nul\x00",
    "\U000e0041\U000e0042",
    "\ue000private",
    "<script>alert(1)</script>",
    "[bold red]markup[/]",
    r"\input{/etc/passwd}",
    r"$\write18{ls}$ % & # _ ^ ~ {",
    "}}}{{{",
    "= 5    A = B",
    "x" * 5000,
    "",
    " ",
]


def is_inert(text: str) -> bool:
    unseen = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return not any(unicodedata.category(character) in unseen for character in text)


@pytest.mark.parametrize("label", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_label_is_inert_in_text_latex_and_numpy(label):
    x = np.array([[1.0, 2.0], [3.0, 4.0]])

    def explained(label: str) -> Explanation:
        names = [label, "plain"]
        return regard.explain(
            *(x, x, x),
            query_labels=names,
            key_labels=names,
            key_features=names,
            value_features=names,
            mask=~Boolean([[True, False], [False, False]], name=label),
            sink=0.5,
        )

    for hostile, harmless in zip(cells(explained(label)), cells(explained("it")), strict=True):
        lines, expected = hostile.text().split("\n"), harmless.text().split("\n")
        assert len(lines) == len(expected)
        assert all(map(is_inert, lines))
        assert max(map(len, lines)) < 1000  # nobody can scroll the screen away
        check_latex(hostile.latex())
        assert is_inert(hostile.latex())
        assert hostile.numpy() == harmless.numpy()


def test_a_label_with_letters_of_any_script_stays_readable():
    labels = ["naïve", "愛", "щука", "א"]
    explanation = regard.explain(*ready((4, 2), (4, 2), (4, 2)), query_labels=labels)
    for label in labels:
        assert label in explanation.why("queries", label, 0).text()
        assert label in explanation.why("queries", label, 0).latex()


# numbers as text ----------------------------------------------------------------------------------


@given(st.lists(st.floats(), min_size=10, max_size=40), st.integers(0, 17))
def test_a_printed_number_parses_back_within_half_a_unit_of_its_last_digit(values, digits):
    for value in values:
        text = format_number(value, digits)
        if not math.isfinite(value):
            assert text == ("NaN" if math.isnan(value) else "∞" if value > 0 else "−∞")
            continue
        half = last_digit(text, digits) / 2
        assert abs(parsed(text) - Decimal(value)) <= half
        assert (value != 0) == (parsed(text) != 0)  # only zero is printed as zero
        assert text.startswith("−") == (math.copysign(1.0, value) < 0)
        assert "-" not in text.split("e")[0]
        assert len(text) <= 26 + digits


@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(0, 17))
def test_a_whole_number_below_ten_to_the_fifteen_is_printed_in_full(value, digits):
    text = format_number(float(value), digits)
    assert parsed(text) == value
    assert "e" not in text
    assert "." not in text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_seventeen_digits_of_a_scientific_number_are_enough_to_get_it_back(value):
    text = format_number(value, 17)
    if "e" in text:
        assert float(parsed(text)) == value


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 8, "0"),
        (-0.0, 8, "−0"),
        (1.0, 8, "1"),
        (-2.0, 0, "−2"),
        (0.5053029375, 8, "0.50530294"),
        (-0.5, 8, "−0.5"),
        (0.1, 17, "0.10000000000000001"),
        (0.999999999, 8, "1"),
        (1e-4, 8, "0.0001"),
        (9.9999e-5, 2, "1e-04"),
        (1.10228985e-13, 8, "1.10228985e-13"),
        (-1.5e-10, 8, "−1.5e-10"),
        (5e-324, 3, "4.941e-324"),
        (123456789.25, 8, "123456789.25"),
        (1e9, 8, "1000000000"),
        (1234567890.5, 8, "1.23456789e+09"),
        (1e15, 8, "1e+15"),
        (-1.7976931348623157e308, 4, "−1.7977e+308"),
        (NAN, 8, "NaN"),
        (INF, 8, "∞"),
        (-INF, 8, "−∞"),
        (2.5, 0, "2"),
        (0.25, 0, "2e-01"),
        (np.float32(0.1), 8, "0.1"),
        (np.float64(3), 8, "3"),
        (0.3, 4, "0.3"),
        (0.1 + 0.2, 4, "0.3"),
        (0.30004505, 4, "0.3000"),
        (0.999999, 3, "1.000"),
    ],
)
def test_numbers_are_printed_like_this(value, digits, text):
    assert format_number(value, digits) == text


@given(st.floats())
def test_a_numpy_literal_gives_the_same_float_back(value):
    with np.errstate(all="ignore"):
        assert same(eval(numpy_literal(value), {"np": np, "__builtins__": {}}), value)


def test_zero_keeps_its_sign_from_the_inputs_to_the_text():
    explanation = regard.explain([[-0.0]], [[1.0]], [[1.0]])
    assert explanation.why("queries", 0, 0).text().startswith("Q[0, 0] = −0 ")
    assert explanation.why("queries", 0, 0).numpy() == "-0.0"


def test_every_operation_of_the_textbook_is_met_by_some_designed_problem():
    met = {step.declared.op for design in DESIGNED.values() for step in design().steps.values()}
    # At a maximum, nothing is learned: the weights do not change with it.
    # Those of the block around attention are met by models.
    assert met == OPERATIONS.keys() - {"at_maximum"} - BLOCK_OPERATIONS.keys()
    kinds = [
        cell.value
        for design in DESIGNED.values()
        for cell in itertools.islice(cells(design()), 400)
    ]
    assert any(map(math.isnan, kinds))
    assert INF in kinds
    assert -INF in kinds


# what printed numbers cannot give -----------------------------------------------------------------


def test_a_product_of_rounded_numbers_is_said_to_be_rounded():
    cell = regard.explain([[1e6 / 3]], [[1.0]], [[1.0]], scale=1 / 3).why("scaled", 0, 0)
    assert cell.text().split("\n")[-1].strip() == ROUNDED
    exact = regard.explain([[3.0]], [[1.0]], [[1.0]], scale=0.25).why("scaled", 0, 0)
    assert "rounded" not in exact.text()


def test_terms_that_overflow_are_said_to():
    explanation = regard.explain([[1e300, 1e300]], [[1e300, -1e300]], [[1.0]])
    text = explanation.why("scores", 0, 0).text()
    assert "the terms overflow" in text
    assert "the order of adding decides" in text
    assert "overflow" not in regard.explain([[INF]], [[1.0]], [[1.0]]).why("scores", 0, 0).text()


def test_an_exponential_that_overflows_is_said_to():
    cell = regard.explain([[1000.0]], [[1.0]], [[1.0]], softmax="unshifted")
    assert "(the result overflows" in cell.why("exponentials", 0, 0).text()


# labels -------------------------------------------------------------------------------------------


def test_one_plain_query_may_be_named_by_its_label():
    explanation = regard.explain(
        np.ones(2), np.eye(2), np.eye(2), query_labels=["mammal"], key_labels=["wolf", "carp"]
    )
    assert explanation.why("weights", "mammal", "carp").index == (1,)
    assert explanation.why("weights", "carp").index == (1,)
    assert explanation.why("output", "mammal", 1).index == (1,)
    assert explanation.why("lse", "mammal").index == ()
    with pytest.raises(regard.LabelError, match=r"weights needs 1 index \(keys\), got 2"):
        explanation.why("weights", "reptile", "carp")
    with pytest.raises(regard.LabelError, match="keys needs 2 indices"):
        explanation.why("keys", "mammal", "wolf", 0)


def test_a_label_that_looks_like_a_place_is_a_label_first():
    tokens = ["the", "cat", "sat", "the", "the@3"]
    explanation = regard.explain(*ready((5, 2), (5, 2), (5, 2)), query_labels=tokens)
    assert explanation.why("output", "the@3", 0).index == (4, 0)
    assert explanation.why("output", "the@0", 0).index == (0, 0)
    for position, label in enumerate(explanation.names.along("L")):
        assert explanation.why("output", label, 0).index == (position, 0)


def test_a_symbol_is_no_step_but_the_error_knows_whose_it_is():
    explanation = regard.explain(*PLAIN)
    with pytest.raises(regard.LabelError, match="there is no step P: P is the symbol of weights"):
        explanation.steps["P"]


# rules --------------------------------------------------------------------------------------------


def test_the_opposite_of_several_rules_names_them_all():
    mask = ~(Causal() & Lengths(2))
    (verdict,) = regard.explain(*SQUARE, mask=mask).why("masked", 1, 0).verdicts
    assert verdict.rule == "not (causal & lengths)"
    assert verdict.detail == (
        "the opposite of: causal visible (key 0 ≤ position 1), "
        "lengths visible (key 0 is among the first 2)"
    )
    nested = ~(Causal() & (Lengths(2) | ~Window(1, 0)))
    assert nested.name == "not (causal & (lengths | not window))"


def test_a_key_left_out_by_without_is_said_to_be():
    explanation = regard.explain(*PLAIN).without(1)
    assert "hidden (left out by without())" in explanation.why("masked", 0, 1).text()
    assert explanation.why("visible", 0, 0).verdicts[0].detail == "not left out"


# many terms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["output", "row_sums", "row_maximum", "scores"])
def test_of_many_terms_the_largest_are_written_and_the_rest_is_one_exact_number(step: str) -> None:
    query, key, value = ready((3, 30), (40, 30), (40, 2), seed=7)
    key *= np.geomspace(1e-6, 1, 40)[:, None]
    explanation = regard.explain(query, key, value * np.geomspace(1, 1e12, 40)[:, None])
    why = explanation.derive(step, (1, 0)[: len(explanation.steps[step].axes)])
    shown, rest = why.shown_terms()
    assert rest is not None
    np.testing.assert_equal((len(shown), shown), (15, sorted(shown)))
    hidden = [term.value for k, term in enumerate(why.terms) if k not in shown]
    kept = [why.terms[k].value for k in shown]
    if why.op == "max":
        np.testing.assert_equal((rest.value, max(kept)), (max(hidden), why.value))
        assert rest.value <= min(kept)
    else:
        np.testing.assert_equal(rest.value, float(sum(map(Fraction, hidden))))
        assert max(map(abs, hidden)) <= min(map(abs, kept))
    words = "at most" if why.op == "max" else "together"
    lines = why.text().split("\n")
    left_out = f"  {len(hidden)} more, {words} "
    np.testing.assert_equal([line.startswith(left_out) for line in lines].index(True), 16)
    assert f" {format_number(rest.value)}" in lines[16]
    assert len(why.text(terms=None).split("\n")) == len(lines) + len(hidden) - 1
    latex = why.latex()
    check_latex(latex)
    assert rf"\text{{and {rest.label}}}" in latex or rf"_{{\text{{{rest.label}}}}}" in latex
    assert latex_number(abs(rest.value), 8) in latex
    np.testing.assert_equal(why.latex(terms=None).count(r"\text"), latex.count(r"\text") - 1)
    assert len(latex) < len(why.latex(terms=None))


def test_as_many_terms_as_fit_are_all_written() -> None:
    explanation = regard.explain(*ready((1, 2), (16, 2), (16, 2)))
    why = explanation.why("output", 0, 0)
    np.testing.assert_equal(why.shown_terms(), (list(range(16)), None))
    np.testing.assert_equal(why.text(), why.text(terms=None))


def test_a_term_that_is_no_number_is_among_the_largest() -> None:
    query, key, value = ready((1, 2), (40, 2), (40, 2), seed=3)
    value[[7, 11, 13], 0] = NAN, INF, -INF
    shown, rest = regard.explain(query, key, value).why("output", 0, 0).shown_terms()
    assert {7, 11, 13} <= set(shown)
    assert rest is not None
    assert np.isfinite(rest.value)

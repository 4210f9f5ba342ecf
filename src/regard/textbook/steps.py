"""The textbook: every step of attention, declared once, in order.

A step says its name, symbol, formula, axes, the operation and which cells of which earlier steps
each of its own cells is made of. The reference kernel, the explanation, LaTeX, the views and the
tests read these declarations; nothing else knows a formula. Must not know arrays' origin, labels
or views.

The shape alphabet: H query heads, G key heads, L queries, S keys, D key width, E value width,
M and N embedding widths of the queries' and the keys' side, HD, GD, GE, HE the packed widths of
all heads side by side, F the width of the projected output. Leading batch axes stand outside the
textbook: it describes one batch element.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Operation = Literal[
    "given",
    "visible",
    "dot",
    "multiply",
    "cap",
    "add",
    "select",
    "max",
    "subtract",
    "exp",
    "sum",
    "divide",
    "log",
    "inverse_root",
    "split",
    "merge",
]

# The letter that runs along each axis in a cell's index.
LETTERS = {
    "H": "h",
    "G": "g",
    "L": "i",
    "S": "j",
    "D": "d",
    "E": "e",
    "M": "m",
    "N": "n",
    "F": "f",
    "HD": "c",
    "GD": "c",
    "GE": "c",
    "HE": "c",
}

# Every way in which an operand's index follows from a cell's, besides the letter itself.
INDEX_MAPS: dict[str, Callable[[Mapping[str, int], Mapping[str, int]], int]] = {
    "h//(H//G)": lambda at, size: at["h"] // (size["H"] // size["G"]),
    "h*D+d": lambda at, size: at["h"] * size["D"] + at["d"],
    "g*D+d": lambda at, size: at["g"] * size["D"] + at["d"],
    "g*E+e": lambda at, size: at["g"] * size["E"] + at["e"],
    "c//E": lambda at, size: at["c"] // size["E"],
    "c%E": lambda at, size: at["c"] % size["E"],
}


@dataclass(frozen=True, slots=True)
class Ref:
    """Which cells of an earlier step a cell is made of: one index per axis of that step.

    A letter that the cell itself does not have runs over its whole axis.
    """

    step: str
    index: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One declared step of attention."""

    name: str
    symbol: str
    formula: str
    latex: str
    axes: tuple[str, ...]
    op: Operation
    operands: tuple[Ref, ...] = ()
    over: Literal["all", "visible"] = "all"  # "visible": hidden keys are absent, not zero

    @property
    def index(self) -> tuple[str, ...]:
        """The letters of one cell's index, such as ('h', 'i', 'j')."""
        return tuple(LETTERS[axis] for axis in self.axes)

    @property
    def latex_symbol(self) -> str:
        """The symbol as LaTeX: the left side of the formula, or the symbol itself."""
        return self.latex.split("=")[0].strip()


def textbook(
    given: Collection[str],
    *,
    heads: bool = True,
    rows: bool = True,
    masked: bool = False,
    softmax: Literal["shifted", "unshifted"] = "shifted",
    default_scale: bool = True,
) -> tuple[Step, ...]:
    """The steps of one call, in order; a step that the call does not have is absent.

    Parameters
    ----------
    given : collection of str
        The names of the inputs: embeddings, context, W_q … b_o or queries, keys, values; bias,
        softcap, sink.
    heads, rows : bool
        Whether there is a head axis (H, G) and a query axis (L): neither for a single query (D,).
    masked : bool
        Whether any rule may hide a key.
    softmax : {"shifted", "unshifted"}
        Whether each row's maximum is subtracted before exp; textbooks often do not.
    default_scale : bool
        Whether the scale is 1/√D, which the formulas then say.

    Examples
    --------
    >>> [step.name for step in textbook({"queries", "keys", "values"}, heads=False)][-3:]
    ['output', 'log_sums', 'lse']
    """
    return _textbook(frozenset(given), heads, rows, masked, softmax, default_scale)


@lru_cache(maxsize=256)
def _textbook(
    given: frozenset[str],
    heads: bool,
    rows: bool,
    masked: bool,
    softmax: Literal["shifted", "unshifted"],
    default_scale: bool,
) -> tuple[Step, ...]:
    steps: list[Step] = []

    def declare(*step: Any, **more: Any) -> str:
        steps.append(Step(*step, **more))
        return steps[-1].name

    def symbol(name: str) -> str:
        return next(step.symbol for step in steps if step.name == name)

    def latex(name: str) -> str:
        return next(step.latex_symbol for step in steps if step.name == name)

    def give(name: str, sign: str, tex: str, axes: tuple[str, ...]) -> None:
        if name in given:
            declare(name, sign, f"{sign} is given", tex, axes, "given")

    # 1. Where the numbers start: embeddings and weights, or ready queries, keys and values.
    give("embeddings", "X", "X", ("L", "M"))
    give("context", "C", "C", ("S", "N"))
    source = ("context", "N") if "context" in given else ("embeddings", "M")

    # 2. Projections: X·W (+ b), split into heads. The last one carries the plain name.
    for name, short, sign, origin, head_axis, width, row in (
        ("queries", "q", "Q", ("embeddings", "M"), "H", "D", ("L", "i")),
        ("keys", "k", "K", source, "G", "D", ("S", "j")),
        ("values", "v", "V", source, "G", "E", ("S", "j")),
    ):
        singular = {"queries": "query", "keys": "key", "values": "value"}[name]
        packed = head_axis + width if heads else width
        column = LETTERS[packed]
        inner = LETTERS[origin[1]]
        if f"W_{short}" not in given:
            give(name, sign, sign, (head_axis, row[0], width))
            continue
        give(f"W_{short}", f"W_{short}", f"W_{{{short}}}", (origin[1], packed))
        give(f"b_{short}", f"b_{short}", f"b_{{{short}}}", (packed,))
        biased = f"b_{short}" in given
        last = f"projected_{name}" if heads else name
        last_sign, last_tex = (f"{sign}*", f"{sign}^{{*}}") if heads else (sign, sign)
        product = f"{singular}_products" if biased else last
        product_sign, product_tex = (f"{sign}′", f"{sign}'") if biased else (last_sign, last_tex)
        declare(
            product,
            product_sign,
            f"{product_sign} = {symbol(origin[0])}·W_{short}",
            f"{product_tex} = {symbol(origin[0])} W_{{{short}}}",
            (row[0], packed),
            "dot",
            (Ref(origin[0], (row[1], inner)), Ref(f"W_{short}", (inner, column))),
        )
        if biased:
            declare(
                last,
                last_sign,
                f"{last_sign} = {product_sign} + b_{short}",
                f"{last_tex} = {product_tex} + b_{{{short}}}",
                (row[0], packed),
                "add",
                (Ref(product, (row[1], column)), Ref(f"b_{short}", (column,))),
            )
        if heads:
            h = LETTERS[head_axis]
            index = (row[1], f"{h}*{width}+{LETTERS[width]}")
            declare(
                name,
                sign,
                f"{sign} = {last_sign} split into {head_axis} heads of width {width}",
                rf"{sign} = \mathrm{{split}}({last_tex})",
                (head_axis, row[0], width),
                "split",
                (Ref(last, index),),
            )

    # 3. Scores: how well each query matches each key.
    cell = ("h", "i", "j")
    declare(
        "scores",
        "A",
        "A = Q·Kᵀ",
        r"A = Q K^{\top}",
        ("H", "L", "S"),
        "dot",
        (Ref("queries", ("h", "i", "d")), Ref("keys", ("h//(H//G)", "j", "d"))),
    )
    if default_scale:
        declare("width", "D", "D is the width of a key", "D", (), "given")
        declare(
            "scale",
            "scale",
            "scale = 1 / √D",
            r"\mathrm{scale} = 1 / \sqrt{D}",
            (),
            "inverse_root",
            (Ref("width", ()),),
        )
    else:
        declare("scale", "scale", "scale is given", r"\mathrm{scale}", (), "given")
    last = declare(
        "scaled",
        "A_s",
        "A_s = A / √D" if default_scale else "A_s = A·scale",
        r"A_s = A / \sqrt{D}" if default_scale else r"A_s = A \cdot \mathrm{scale}",
        ("H", "L", "S"),
        "multiply",
        (Ref("scores", cell), Ref("scale", ())),
    )
    give("softcap", "c", "c", ())
    if "softcap" in given:
        last = declare(
            "capped",
            "A_c",
            "A_c = c·tanh(A_s / c)",
            r"A_c = c \tanh(A_s / c)",
            ("H", "L", "S"),
            "cap",
            (Ref(last, cell), Ref("softcap", ())),
        )
    give("bias", "bias", r"\mathrm{bias}", ("H", "L", "S"))
    if "bias" in given:
        last = declare(
            "biased",
            "A_b",
            f"A_b = {symbol(last)} + bias",
            rf"A_b = {latex(last)} + \mathrm{{bias}}",
            ("H", "L", "S"),
            "add",
            (Ref(last, cell), Ref("bias", cell)),
        )
    over: Literal["all", "visible"] = "all"
    if masked:
        over = "visible"
        declare(
            "visible",
            "visible",
            "visible = may query i see key j?",
            r"\mathrm{visible} = \text{may query } i \text{ see key } j\text{?}",
            ("H", "L", "S"),
            "visible",
        )
        last = declare(
            "masked",
            "A_m",
            f"A_m = {symbol(last)} where visible, else −∞",
            rf"A_m = {latex(last)} \text{{ where visible, else }} {{-\infty}}",
            ("H", "L", "S"),
            "select",
            (Ref("visible", cell), Ref(last, cell)),
            over=over,
        )

    # 4. Softmax: weights that are positive and sum to one along each row.
    give("sink", "s", "s", ("H",))
    sink = "sink" in given
    sink_exponent = Ref("sink", ("h",))
    if softmax == "shifted":
        row_max = rf"\max_j {latex(last)}"
        declare(
            "row_maximum",
            "m",
            f"m = max(max_j {symbol(last)}, s)" if sink else f"m = max_j {symbol(last)}",
            rf"m = \max({row_max}, s)" if sink else f"m = {row_max}",
            ("H", "L"),
            "max",
            (Ref(last, cell), *((Ref("sink", ("h",)),) if sink else ())),
            over=over,
        )
        last = declare(
            "shifted",
            "T",
            f"T = {symbol(last)} − m",
            f"T = {latex(last)} - m",
            ("H", "L", "S"),
            "subtract",
            (Ref(last, cell), Ref("row_maximum", ("h", "i"))),
            over=over,
        )
        if sink:
            declare(
                "sink_shifted",
                "t",
                "t = s − m",
                "t = s - m",
                ("H", "L"),
                "subtract",
                (Ref("sink", ("h",)), Ref("row_maximum", ("h", "i"))),
            )
            sink_exponent = Ref("sink_shifted", ("h", "i"))
    declare(
        "exponentials",
        "Y",
        f"Y = exp({symbol(last)})",
        rf"Y = \exp({latex(last)})",
        ("H", "L", "S"),
        "exp",
        (Ref(last, cell),),
        over=over,
    )
    if sink:
        exponent = symbol(sink_exponent.step)
        declare(
            "sink_exponential",
            "y",
            f"y = exp({exponent})",
            rf"y = \exp({exponent})",
            ("H", "L"),
            "exp",
            (sink_exponent,),
        )
    declare(
        "row_sums",
        "z",
        "z = Σ_j Y + y" if sink else "z = Σ_j Y",
        r"z = \sum_j Y + y" if sink else r"z = \sum_j Y",
        ("H", "L"),
        "sum",
        (Ref("exponentials", cell), *((Ref("sink_exponential", ("h", "i")),) if sink else ())),
        over=over,
    )
    declare(
        "weights",
        "P",
        "P = Y / z",
        "P = Y / z",
        ("H", "L", "S"),
        "divide",
        (Ref("exponentials", cell), Ref("row_sums", ("h", "i"))),
        over=over,
    )

    # 5. Output: each row of weights blends the value vectors.
    declare(
        "output",
        "O",
        "O = P·V",
        "O = P V",
        ("H", "L", "E"),
        "dot",
        (Ref("weights", cell), Ref("values", ("h//(H//G)", "j", "e"))),
        over=over,
    )
    steps.extend(_tail(given, heads))
    log_sums = declare(
        "log_sums",
        "ln z",
        "ln z = the natural logarithm of z",
        r"\ln z = \ln(z)",
        ("H", "L"),
        "log",
        (Ref("row_sums", ("h", "i")),),
    )
    shifted = softmax == "shifted"
    declare(
        "lse",
        "lse",
        "lse = m + ln z" if shifted else "lse = ln z",
        r"\mathrm{lse} = m + \ln z" if shifted else r"\mathrm{lse} = \ln z",
        ("H", "L"),
        "add",
        (*((Ref("row_maximum", ("h", "i")),) if shifted else ()), Ref(log_sums, ("h", "i"))),
    )
    return _without_axes(steps, heads, rows)


def merging(given: Collection[str]) -> tuple[Step, ...]:
    """The steps from every head's output to the projected output; `output` itself is given."""
    output = Step("output", "O", "O is given", "O", ("H", "L", "E"), "given")
    return (output, *_tail({*given, "output"}, heads=True))


def projecting(given: Collection[str], *, heads: bool = True) -> tuple[Step, ...]:
    """The steps from the embeddings to queries, keys and values."""
    steps = textbook(given, heads=heads)
    names = [step.name for step in steps]
    return steps[: names.index("scores")]


def _tail(given: Collection[str], heads: bool) -> list[Step]:
    """Heads that came from embeddings are put side by side; then the output projection, if any."""
    steps = []
    last, symbol, column, width = "output", "O", "e", "E"
    if heads and "embeddings" in given:
        steps.append(
            Step(
                "merged",
                "O*",
                "O* = the heads of O side by side",
                r"O^{*} = \mathrm{merge}(O)",
                ("L", "HE"),
                "merge",
                (Ref("output", ("c//E", "i", "c%E")),),
            )
        )
        last, symbol, column, width = "merged", "O*", "c", "HE"
    if "W_o" in given:
        biased = "b_o" in given
        name, sign = ("output_products", "R′") if biased else ("projected_output", "R")
        tex = {"R′": "R'", "O*": "O^{*}"}
        steps.append(Step("W_o", "W_o", "W_o is given", "W_{o}", (width, "F"), "given"))
        steps.append(
            Step(
                name,
                sign,
                f"{sign} = {symbol}·W_o",
                f"{tex.get(sign, sign)} = {tex.get(symbol, symbol)} W_{{o}}",
                ("L", "F"),
                "dot",
                (Ref(last, ("i", column)), Ref("W_o", (column, "f"))),
            )
        )
        if biased:
            steps.append(Step("b_o", "b_o", "b_o is given", "b_{o}", ("F",), "given"))
            steps.append(
                Step(
                    "projected_output",
                    "R",
                    "R = R′ + b_o",
                    "R = R' + b_{o}",
                    ("L", "F"),
                    "add",
                    (Ref("output_products", ("i", "f")), Ref("b_o", ("f",))),
                )
            )
    return steps


def _without_axes(steps: Sequence[Step], heads: bool, rows: bool) -> tuple[Step, ...]:
    """The same steps where some axes do not exist: no heads, or a single query."""
    gone: set[str] = set()
    if not heads:
        gone |= {"H", "G", "h", "g", "h//(H//G)"}
    if not rows:
        gone |= {"L", "i"}

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in gone)

    return tuple(
        replace(
            step,
            axes=kept(step.axes),
            operands=tuple(Ref(ref.step, kept(ref.index)) for ref in step.operands),
        )
        for step in steps
    )


# The NumPy of every operation. Operands arrive as blocks of one head with the letters of their
# axes; the result has the letters of the step. Ordered as the declarations above.


def compute(
    step: Step,
    letters: tuple[str, ...],
    operands: Sequence[tuple[Array, tuple[str, ...]]],
    visible: NDArray[np.bool_] | None,
    dtype: np.dtype[Any],
) -> Array:
    """One block of a step from the blocks of its operands, in the working dtype."""
    arrays = [_aligned(array, own, letters) for array, own in operands]
    hidden = visible if step.over == "visible" else None
    with np.errstate(all="ignore"):  # NaN and infinity are results here, not accidents
        match step.op:
            case "dot":
                result = _dot(operands[0], operands[1], letters, hidden)
            case "multiply":
                result = arrays[0] * arrays[1]
            case "cap":
                result = arrays[1] * np.tanh(_wide(arrays[0]) / arrays[1])
            case "add":
                result = arrays[0] if len(arrays) == 1 else arrays[0] + arrays[1]
            case "select":
                result = np.where(arrays[0], arrays[1], -np.inf)
            case "max":
                result = operands[0][0].max(axis=-1, initial=-np.inf)  # (L, S) → (L,)
                for other in arrays[1:]:
                    result = np.maximum(result, other)
            case "subtract":
                result = arrays[0] - arrays[1]
                if hidden is not None:
                    result = np.where(hidden, result, -np.inf)
            case "exp":
                result = np.exp(_wide(arrays[0]))
                if hidden is not None:
                    result = np.where(hidden, result, 0)
            case "sum":
                result = operands[0][0].sum(axis=-1)  # (L, S) → (L,)
                for other in arrays[1:]:
                    result = result + other
            case "divide":
                result = arrays[0] / np.where(arrays[1] == 0, 1, arrays[1])  # 0 / 0 → 0
                if hidden is not None:
                    result = np.where(hidden, result, 0)
            case "log":
                result = np.log(_wide(arrays[0]))
            case "inverse_root":
                # Without width every score is 0 and any scale will do.
                result = 1 / np.sqrt(_wide(arrays[0])) if arrays[0] else np.ones(())
            case _:
                raise NotImplementedError(step.op)
        if letters:
            result = np.asarray(result).astype(dtype, copy=False)
    return np.asarray(result)  # one number for the whole call keeps its own precision


def _wide(array: Array) -> Array:
    """At least float64: NumPy's own float32 exp is 2.5 ulp off, one rounding is half of one."""
    return array.astype(np.result_type(array.dtype, np.float64), copy=False)


def _aligned(array: Array, own: tuple[str, ...], letters: tuple[str, ...]) -> Array:
    """`array` with an axis of size 1 for every letter of the step that it does not have."""
    if not set(own) <= set(letters):
        return array  # reduced over one of its axes: the operation handles it
    return array[tuple(slice(None) if letter in own else None for letter in letters)]


def _dot(
    first: tuple[Array, tuple[str, ...]],
    second: tuple[Array, tuple[str, ...]],
    letters: tuple[str, ...],
    visible: NDArray[np.bool_] | None,
) -> Array:
    """Σ over the letter that the cell does not have, over visible keys only where declared."""
    a, b = first[0], second[0]
    contracted = first[1][-1]
    if second[1][-1] == contracted:
        b = b.T
    if visible is None or np.isfinite(b).all():
        # + 0 turns −0 into +0: else the sign of a hidden value could show in 0·(−v).
        return np.asarray(a @ b) + np.zeros((), a.dtype)
    # A hidden value that is NaN or infinite is absent, so it must not meet its weight of 0.
    seen = np.broadcast_to(visible, a.shape)
    special = sum_of_special(seen & (a > 0), seen & ~(a > 0), b)
    return np.asarray(a @ np.where(np.isfinite(b), b, 0)) + special


def sum_of_special(
    counted: NDArray[np.bool_], lost: NDArray[np.bool_], values: Array
) -> NDArray[np.float64]:
    """What NaN and infinite values (S, E) add to rows (L, S); 0 where there are none.

    A row adds the values of the keys that it counts, and NaN for those of the keys that it lost:
    0 · ∞ is NaN, and so is ∞ − ∞.
    """
    special = ~np.isfinite(values)
    keys = np.flatnonzero(special.any(axis=-1))
    counted, lost = counted[..., keys], lost[..., keys]
    values, special = values[keys], special[keys]

    def met(rows: NDArray[np.bool_], cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not (rows.any() and cells.any()):
            return np.zeros((*rows.shape[:-1], cells.shape[-1]), np.bool_)
        return np.asarray(rows.astype(np.float32) @ cells.astype(np.float32) > 0)

    up, down = met(counted, values == np.inf), met(counted, values == -np.inf)
    nan = met(counted, np.isnan(values)) | met(lost, special) | (up & down)
    return np.where(nan, np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0.0)))

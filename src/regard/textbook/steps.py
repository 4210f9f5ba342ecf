"""The textbook: every step of attention, declared once, in order.

A step says its name, symbol, axes, its operation and which cells of which earlier steps each of
its own cells is made of; formula and LaTeX follow from these. The reference kernel, the
explanation, the views and the tests read these declarations; nothing else knows a formula. Must
not know arrays' origin, labels or views.

The shape alphabet: H query heads, G key heads, L queries, S keys, D key width, E value width,
M and N embedding widths of the queries' and the keys' side, I the width inside an MLP, V the
vocabulary, X the different tokens of a text, K the width that a general score gives
a query, U the hidden width of an additive one, T the buckets of a table of distances, HD, GD, GE,
HE the packed widths of all heads side by side, F the width of the projected output, R = H / G the
query heads of a key head. The textbook describes one batch element: it does not know leading batch
axes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from regard.boundary.cached import cached_property
from regard.textbook.mechanisms import NORMALIZATIONS, Declared, declare_score
from regard.textbook.operation import fill
from regard.textbook.operations import OPERATIONS
from regard.textbook.positions import (
    OTHER,
    declare_absolute,
    declare_distances,
    declare_rotation,
)

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
    "R": "r",
    "K": "k",
    "U": "u",
    "T": "t",
    "I": "p",
    "V": "v",
    "X": "x",
}

# Every way in which an operand's index follows from a cell's, besides the letter itself.
INDEX_MAPS: dict[str, Callable[[Mapping[str, int], Mapping[str, int]], int]] = {
    "h//(H//G)": lambda at, size: at["h"] // (size["H"] // size["G"]),
    "h*D+d": lambda at, size: at["h"] * size["D"] + at["d"],
    "g*D+d": lambda at, size: at["g"] * size["D"] + at["d"],
    "g*E+e": lambda at, size: at["g"] * size["E"] + at["e"],
    "c//E": lambda at, size: at["c"] // size["E"],
    "c%E": lambda at, size: at["c"] % size["E"],
    OTHER: lambda at, size: (
        (at["d"] // size["Q"] * size["Q"] + (at["d"] + size["P"]) % size["Q"]) % size["W"]
    ),
    # Those below are for gradients alone.
    "h*E+e": lambda at, size: at["h"] * size["E"] + at["e"],
    "c//D": lambda at, size: at["c"] // size["D"],
    "c%D": lambda at, size: at["c"] % size["D"],
    "g*R+r": lambda at, size: at["g"] * size["R"] + at["r"],
}

# What a call from embeddings may be given, in the order of the steps.
PROJECTED = ("embeddings", "context", "W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")


def letters_of(entry: str) -> list[str]:
    """The letters that an entry of an index is made of."""
    return [character for character in entry if character.islower()]


@dataclass(frozen=True, slots=True)
class Ref:
    """Which cells of an earlier step a cell is made of: one index per axis of that step.

    A letter that the cell itself does not have runs over its whole axis.
    """

    step: str
    index: tuple[str, ...]
    symbol: str = ""
    latex_symbol: str = ""


@dataclass(frozen=True)
class Step:
    """One declared step of attention."""

    name: str
    symbol: str
    latex_symbol: str
    axes: tuple[str, ...]
    op: str  # a key of OPERATIONS
    operands: tuple[Ref, ...] = ()
    over: Literal["all", "visible"] = "all"  # "visible": hidden keys are absent, not zero
    absent: bool = False  # whether −∞ is expected here: it means "no visible key"
    written: tuple[str, str] | None = None  # what follows the symbols, where no operation says it
    phase: Literal["forward", "loss", "backward"] = "forward"
    of: str = ""  # the forward step that this is the whole gradient of

    @cached_property
    def index(self) -> tuple[str, ...]:
        """The letters of one cell's index, such as ('h', 'i', 'j')."""
        return tuple(LETTERS[axis] for axis in self.axes)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The steps whose values its own are made of."""
        seen = ("visible",) if self.over == "visible" else ()
        return frozenset((*seen, *(ref.step for ref in self.operands)))

    @property
    def own(self) -> Ref:
        """The cell at the same place, as an operand of another step."""
        return Ref(self.name, self.index, self.symbol, self.latex_symbol)

    @cached_property
    def running(self) -> str:
        """The letter that a dot, a sum or a maximum runs along; "" where nothing runs."""
        entries = (entry for ref in self.operands for entry in ref.index)
        letters = (letter for entry in entries for letter in letters_of(entry))
        return next((letter for letter in letters if letter not in self.index), "")

    @cached_property
    def formula(self) -> str:
        """Such as ``P = Y / z``."""
        symbols = [ref.symbol for ref in self.operands]
        if self.written:
            return self.symbol + fill(self.written[0], lambda _, number: symbols[number])
        if self.op == "given":
            return f"{self.symbol} is given"
        return f"{self.symbol} = {self._filled(OPERATIONS[self.op].formula, symbols, 'ᵀ')}"

    @cached_property
    def latex(self) -> str:
        """The formula as LaTeX."""
        symbols = [ref.latex_symbol for ref in self.operands]
        if self.written:
            return self.latex_symbol + fill(self.written[1], lambda _, number: symbols[number])
        if self.op == "given":
            return self.latex_symbol
        if self.op == "dot":  # room for the sign of a transposed matrix beside a star
            symbols = [f"{{{one}}}" if "^" in one else one for one in symbols]
        right = self._filled(OPERATIONS[self.op].latex, symbols, r"^{\top}")
        return f"{self.latex_symbol} = {right}"

    def _filled(self, template: str | tuple[str, str], symbols: list[str], transposed: str) -> str:
        if isinstance(template, tuple):
            template = template[len(symbols) - 1]
        if self.op == "dot":
            first, second = (
                [letter for letter in ref.index if letter not in ("h", "g", *INDEX_MAPS)]
                for ref in self.operands
            )
            # A product runs along the columns of its first operand and the rows of its second.
            if len(first) == 2 and first[0] == self.running:
                symbols[0] += transposed
            if len(second) == 2 and second[1] == self.running:
                symbols[1] += transposed

        def word(kind: str, number: int) -> str:
            return {"": symbols, "a": self.axes, "k": self.running}[kind][number]

        return fill(template, word, [(number,) for number in range(len(symbols))])


def result_of(steps: Container[str]) -> str:
    """The step that is the result: projected where there is W_o, else heads side by side."""
    names = ("logits", "projected_output", "merged", "output")
    return next(name for name in names if name in steps)


def textbook(
    given: Collection[str],
    *,
    heads: bool = True,
    rows: bool = True,
    masked: bool = False,
    softmax: Literal["shifted", "unshifted"] = "shifted",
    default_scale: bool = True,
    score: str | Declared = "dot",
    normalize: str = "softmax",
) -> tuple[Step, ...]:
    """The steps of one call, in order; a step that the call does not have is absent.

    Parameters
    ----------
    given : collection of str
        The names of the inputs: embeddings, context, W_q … b_o or queries, keys, values; bias,
        softcap, sink; what positions are made of.
    heads, rows : bool
        Whether there is a head axis (H, G) and a query axis (L): neither for a single query (D,).
    masked : bool
        Whether any rule may hide a key.
    softmax : {"shifted", "unshifted"}
        Whether each row's maximum is subtracted before exp; textbooks often do not.
    default_scale : bool
        Whether the scale is 1/√D, which the formulas then say. Only a dot product has it.
    score, normalize : str
        How queries and keys are compared, and how logits become weights: names in `mechanisms.py`,
        or a score that a caller declares.

    Examples
    --------
    >>> [step.name for step in textbook({"queries", "keys", "values"}, heads=False)][-3:]
    ['output', 'log_sums', 'lse']
    """
    forms = score, normalize
    return _textbook(frozenset(given), heads, rows, masked, softmax, default_scale, forms)


@lru_cache(maxsize=256)
def _textbook(
    given: frozenset[str],
    heads: bool,
    rows: bool,
    masked: bool,
    softmax: Literal["shifted", "unshifted"],
    default_scale: bool,
    forms: tuple[str | Declared, str],
) -> tuple[Step, ...]:
    book = Builder(given, heads, rows)
    _declare_inputs(book)
    declare_attention(book, masked, softmax, default_scale, *forms)
    return tuple(book.steps.values())


def declare_attention(
    book: Builder,
    masked: bool,
    softmax: Literal["shifted", "unshifted"],
    default_scale: bool,
    score: str | Declared,
    normalize: str,
) -> None:
    """Declare all steps after queries, keys and values."""
    book.instead |= declare_rotation(book)
    last, own = declare_score(book, score), score == "dot"
    last = _declare_logits(book, last, own and default_scale, own or "scale" in book.given)
    other = NORMALIZATIONS.get(normalize)
    if masked:
        last = _declare_masking(book, last, other.hidden if other else "select")
    if other:
        other.declare(book, last)
        _declare_output(book)
    else:
        _declare_softmax(book, last, softmax == "shifted")
        _declare_output(book)
        _declare_lse(book, softmax == "shifted")


def projecting(given: Collection[str], *, heads: bool = True) -> tuple[Step, ...]:
    """The steps from the embeddings to queries, keys and values."""
    book = Builder(given, heads)
    _declare_inputs(book)
    return tuple(book.steps.values())


def merging(given: Collection[str]) -> tuple[Step, ...]:
    """The steps from every head's output to the projected output; `output` itself is given."""
    book = Builder({*given, "output"})
    book.give("output", "O", "H L E")
    _declare_merging(book)
    return tuple(book.steps.values())


class Builder:
    """Builds the list of steps, each with the symbols of the earlier steps it is made of."""

    def __init__(self, given: Collection[str], heads: bool = True, rows: bool = True) -> None:
        self.given, self.heads = given, heads
        self.over: Literal["all", "visible"] = "all"
        self.steps: dict[str, Step] = {}
        self.out = "F"  # the width of the projected output
        self.instead: dict[str, str] = {}  # the step that takes another one's place from now on
        self._gone: set[str] = set()  # axes that the call does not have, and their indices
        if not heads:
            self._gone |= {"H", "G", "h", "g", "h//(H//G)"}
        if not rows:
            self._gone |= {"L", "i"}

    def _kept(self, names: str) -> tuple[str, ...]:
        return tuple(name for name in names.split() if name not in self._gone)

    def step(
        self,
        name: str,
        symbol: str,
        axes: str,
        op: str,
        *operands: str | tuple[str, str],
        latex: str = "",
        visible: bool = False,
        absent: bool = False,
        written: tuple[str, str] | None = None,
    ) -> str:
        """Declare a step and return its name.

        An operand is the name of a step, or the name and the index of its cells where that is not
        the letters of its own axes. `visible` leaves hidden keys out, if any may be hidden.
        """
        refs = []
        for operand in operands:
            named = operand if isinstance(operand, str) else operand[0]
            own = self.steps[self.instead.get(named, named)]
            index = own.index if isinstance(operand, str) else self._kept(operand[1])
            refs.append(Ref(own.name, index, own.symbol, own.latex_symbol))
        self.steps[name] = Step(
            name,
            symbol,
            latex or symbol,
            self._kept(axes),
            op,
            tuple(refs),
            over=self.over if visible else "all",
            absent=absent,
            written=written,
        )
        return name

    def give(
        self, name: str, symbol: str, axes: str, *, latex: str = "", absent: bool = False
    ) -> bool:
        """Declare a given step, if the call has it; whether it has."""
        if name in self.given:
            self.step(name, symbol, axes, "given", latex=latex, absent=absent)
        return name in self.given


def _declare_inputs(book: Builder) -> None:
    """Embeddings, and queries, keys and values: given, or projected from the embeddings."""
    embedded = book.give("embeddings", "X", "L M")
    book.give("context", "C", "S N")
    if embedded:
        book.instead |= declare_absolute(book)
    declare_projections(book)


def declare_projections(book: Builder) -> None:
    """Queries, keys and values, given or made of the embeddings and the context."""
    source = ("context", "N") if "context" in book.given else ("embeddings", "M")
    _declare_projection(book, "queries", ("embeddings", "M"), "L", "H", "D")
    _declare_projection(book, "keys", source, "S", "G", "D")
    _declare_projection(book, "values", source, "S", "G", "E")


def _declare_projection(
    book: Builder, name: str, source: tuple[str, str], row: str, head: str, width: str
) -> None:
    """X·W + b, split into heads: rows of embeddings (row, inner) to `name` (head, row, width)."""
    symbol, short = name[0].upper(), name[0]
    if f"W_{short}" not in book.given:
        book.give(name, symbol, f"{head} {row} {width}")
        return
    origin, inner = source
    packed = head + width if book.heads else width
    book.give(f"W_{short}", f"W_{short}", f"{inner} {packed}", latex=f"W_{{{short}}}")
    biased = book.give(f"b_{short}", f"b_{short}", packed, latex=f"b_{{{short}}}")
    # The last step has the plain name.
    whole = (f"projected_{name}", f"{symbol}*", f"{symbol}^{{*}}")
    last, last_symbol, latex = whole if book.heads else (name, symbol, symbol)
    axes, rows = f"{row} {packed}", (origin, f"{LETTERS[row]} {LETTERS[inner]}")
    if biased:
        product = {"q": "query", "k": "key", "v": "value"}[short] + "_products"
        book.step(product, f"{symbol}′", axes, "dot", rows, f"W_{short}", latex=f"{symbol}'")
        book.step(last, last_symbol, axes, "add", product, f"b_{short}", latex=latex)
    else:
        book.step(last, last_symbol, axes, "dot", rows, f"W_{short}", latex=latex)
    if book.heads:
        cell = f"{LETTERS[row]} {LETTERS[head]}*{width}+{LETTERS[width]}"
        book.step(name, symbol, f"{head} {row} {width}", "split", (last, cell))


def _declare_logits(book: Builder, last: str, default_scale: bool, scaled: bool) -> str:
    """Everything that is done to the scores before masking."""
    cells = "H L S"
    written = None
    if default_scale:
        meaning = (" is the width of a key", "")
        book.step("width", "D", "", "given", written=meaning)
        book.step("scale", "scale", "", "inverse_root", "width", latex=r"\mathrm{scale}")
        written = (" = $0 / √D", r" = $0 / \sqrt{D}")
    elif scaled:
        book.step("scale", "scale", "", "given", latex=r"\mathrm{scale}")
    if scaled:
        last = book.step("scaled", "A_s", cells, "multiply", last, "scale", written=written)
    if book.give("softcap", "c", ""):
        last = book.step("capped", "A_c", cells, "softcap", last, "softcap")
    last = declare_distances(book, last)
    if book.give("bias", "bias", cells, latex=r"\mathrm{bias}", absent=True):
        last = book.step("biased", "A_b", cells, "add", last, "bias", absent=True)
    return last


def _declare_masking(book: Builder, last: str, op: str) -> str:
    book.over = "visible"
    book.step("visible", "visible", "H L S", "visible", latex=r"\mathrm{visible}")
    return book.step("masked", "A_m", "H L S", op, "visible", last, visible=True)


def _declare_softmax(book: Builder, last: str, shifted: bool) -> None:
    """Weights that are positive and sum to one along each row, with the sink's share."""
    sink = ["sink"] if book.give("sink", "s", "H") else []
    if shifted:
        book.step("row_maximum", "m", "H L", "max", last, *sink, visible=True, absent=True)
        last = book.step("shifted", "T", "H L S", "subtract", last, "row_maximum", visible=True)
        if sink:
            sink = [book.step("sink_shifted", "t", "H L", "subtract", "sink", "row_maximum")]
    book.step("exponentials", "Y", "H L S", "exp", last, visible=True)
    if sink:
        sink = [book.step("sink_exponential", "y", "H L", "exp", *sink)]
    book.step("row_sums", "z", "H L", "sum", "exponentials", *sink, visible=True)
    book.step("weights", "P", "H L S", "divide", "exponentials", "row_sums", visible=True)


def _declare_output(book: Builder) -> None:
    """Each row of weights blends the value vectors."""
    values = ("values", "h//(H//G) j e")
    book.step("output", "O", "H L E", "dot", "weights", values, visible=True)
    _declare_merging(book)


def _declare_merging(book: Builder) -> None:
    """Heads that came from embeddings side by side; then the output projection, if any."""
    last, column = "output", "E"
    if book.heads and "embeddings" in book.given:
        column = "HE"
        cells = ("output", "c//E i c%E")
        last = book.step("merged", "O*", "L HE", "merge", cells, latex="O^{*}")
    out = book.out
    if not book.give("W_o", "W_o", f"{column} {out}", latex="W_{o}"):
        return
    factors = (last, f"i {LETTERS[column]}"), "W_o"
    if "b_o" not in book.given:
        book.step("projected_output", "R", f"L {out}", "dot", *factors)
        return
    product = book.step("output_products", "R′", f"L {out}", "dot", *factors, latex="R'")
    book.give("b_o", "b_o", out, latex="b_{o}")
    book.step("projected_output", "R", f"L {out}", "add", product, "b_o")


def _declare_lse(book: Builder, shifted: bool) -> None:
    """The natural logarithm of each row's sum of exponentials, the maximum put back."""
    last = book.step("log_sums", "ln z", "H L", "log", "row_sums", latex=r"\ln z", absent=True)
    summands = ["row_maximum", last] if shifted else [last]
    book.step("lse", "lse", "H L", "add", *summands, latex=r"\mathrm{lse}", absent=True)

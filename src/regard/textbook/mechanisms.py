"""The scores and the normalisations that there are, each declared as steps.

A score goes from queries and keys to the step `scores`, a normalisation from the last step before
it to the step `weights`; all other steps are the same for all of them. What a score or a
normalisation is given beside the arrays is a step of its own, such as `score_W`. Must not know
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_CELLS = "H L S"


class Book(Protocol):
    """Where steps are declared; see `steps.py`."""

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
    ) -> str:
        """Declare a step and return its name."""

    def give(self, name: str, symbol: str, axes: str, *, latex: str = "") -> bool:
        """Declare a given step, if the call has it; whether it has."""


def _dot(book: Book) -> str:
    return book.step("scores", "A", _CELLS, "dot", "queries", ("keys", "h//(H//G) j d"))


def _general(book: Book) -> str:
    """q·W·k (Luong, Pham and Manning 2015)."""
    book.give("score_W", "W_s", "D K", latex="W_{s}")
    name = "transformed_queries"
    book.step(name, "Q_w", "H L K", "dot", "queries", "score_W", latex="Q_{w}")
    return book.step("scores", "A", _CELLS, "dot", name, ("keys", "h//(H//G) j k"))


def _additive(book: Book) -> str:
    """v·tanh(q·W_q + k·W_k) (Bahdanau, Cho and Bengio 2014)."""
    book.give("score_W_q", "U_q", "D U", latex="U_{q}")
    book.give("score_W_k", "U_k", "D U", latex="U_{k}")
    book.give("score_v", "v", "U")
    book.step("query_parts", "Q_u", "H L U", "dot", "queries", "score_W_q", latex="Q_{u}")
    book.step("key_parts", "K_u", "G S U", "dot", "keys", "score_W_k", latex="K_{u}")
    operands = "score_v", "query_parts", ("key_parts", "h//(H//G) j u")
    return book.step("scores", "A", _CELLS, "tanh_dot", *operands)


def _cosine(book: Book) -> str:
    """cos(q, k) / temperature; a vector of zeros has the cosine 0 to all."""
    for name, symbol, axes in (("queries", "Q", "H L"), ("keys", "K", "G S")):
        one = name.replace("ies", "y").removesuffix("s")
        latex = rf"\Vert {symbol} \Vert"
        book.step(f"{one}_lengths", f"‖{symbol}‖", axes, "length", name, latex=latex)
        pair = name, f"{one}_lengths"
        unit = f"unit_{name}", f"{symbol}_n", f"{axes} D"
        book.step(*unit, "divide", *pair, latex=rf"\hat{{{symbol}}}")
    units = "unit_queries", ("unit_keys", "h//(H//G) j d")
    book.step("cosines", "cos", _CELLS, "dot", *units, latex=r"\mathrm{cos}")
    book.give("score_temperature", "τ", "", latex=r"\tau")
    return book.step("scores", "A", _CELLS, "divide", "cosines", "score_temperature")


def _distance(book: Book) -> str:
    """−‖q − k‖²."""
    pair = "queries", ("keys", "h//(H//G) j d")
    book.step("distances", "Δ", _CELLS, "squared_distance", *pair, latex=r"\Delta")
    return book.step("scores", "A", _CELLS, "negate", "distances")


def _features(book: Book) -> str:
    """φ(q)·φ(k), never negative, with φ = elu + 1 (Katharopoulos et al. 2020)."""
    book.step("query_features", "φ_q", "H L D", "elu_plus_one", "queries", latex=r"\varphi_{q}")
    book.step("key_features", "φ_k", "G S D", "elu_plus_one", "keys", latex=r"\varphi_{k}")
    return book.step(
        "scores", "A", _CELLS, "dot", "query_features", ("key_features", "h//(H//G) j d")
    )


@dataclass(frozen=True, slots=True)
class Declared:
    """A score of a caller's own: (name, symbol, axes, operation, *operands) for each step."""

    name: str
    steps: tuple[tuple[Any, ...], ...]


def declare_score(book: Book, score: str | Declared) -> str:
    """Declare the steps of a score; the name of the last."""
    if isinstance(score, str):
        return SCORES[score](book)
    last = ""
    for name, symbol, axes, op, *operands in score.steps:
        last = book.step(name, symbol, axes, op, *operands)
    return last


SCORES: dict[str, Callable[[Book], str]] = {
    "dot": _dot,
    "general": _general,
    "additive": _additive,
    "cosine": _cosine,
    "distance": _distance,
    "features": _features,
}


@dataclass(frozen=True, slots=True)
class Normalization:
    """How logits become weights.

    `declare` takes the name of the logits; `hidden` is the operation that hides keys in them.
    """

    declare: Callable[[Book, str], str]
    hidden: str = "select"


def _sigmoid(book: Book, last: str) -> str:
    """σ(x + b): each weight for itself (Ramapuram et al. 2024)."""
    book.give("normalize_bias", "b", "")
    last = book.step("with_bias", "A_σ", _CELLS, "add", last, "normalize_bias", absent=True)
    return book.step("weights", "P", _CELLS, "sigmoid", last, visible=True)


def _hard(straight: bool) -> Callable[[Book, str], str]:
    op = "one_hot_straight" if straight else "one_hot"

    def declare(book: Book, last: str) -> str:
        """All weight on the first of the largest."""
        book.step("row_maximum", "m", "H L", "max", last, visible=True, absent=True)
        book.give("key_numbers", "n", "S")
        operands = last, "row_maximum", "key_numbers"
        book.step("chosen", "j*", "H L", "first_at", *operands, latex="j^{*}", visible=True)
        return book.step("weights", "P", _CELLS, op, "key_numbers", "chosen", last, visible=True)

    return declare


def _sparsemax(book: Book, last: str) -> str:
    """max(x − τ, 0) with the τ that makes a row add up to 1 (Martins and Astudillo 2016)."""
    own = "threshold", "τ_s", "H L", "threshold", last
    book.step(*own, latex=r"\tau_{s}", visible=True, absent=True)
    return book.step("weights", "P", _CELLS, "above", last, "threshold", visible=True)


def _proportional(book: Book, last: str) -> str:
    """Each score's share of its row's sum."""
    book.step("row_sums", "z", "H L", "sum", last, visible=True)
    return book.step("weights", "P", _CELLS, "divide", last, "row_sums", visible=True)


# All but the softmax, which has a form of its own in `steps.py`.
NORMALIZATIONS: dict[str, Normalization] = {
    "sigmoid": Normalization(_sigmoid),
    "hard": Normalization(_hard(straight=False)),
    "hard, straight-through": Normalization(_hard(straight=True)),
    "sparsemax": Normalization(_sparsemax),
    "proportional": Normalization(_proportional, hidden="keep"),
}

"""The block around attention, and a whole model, declared as steps like those of attention.

Owns norms, residual sums, MLPs, the embedding of tokens and the logits. A model's step has the
number of its layer before its name, such as `2.scores`; a layer's `embeddings` are the `hidden`
states of the layer before. Must not know arrays, configurations or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from regard.textbook.positions import declare_absolute
from regard.textbook.steps import (
    Builder,
    Ref,
    Step,
    declare_attention,
    declare_projections,
)

# What all layers share: numbers of the model, where tokens are, and which keys are visible.
SHARED = {
    *("model_width", "epsilon", "width", "scale", "visible"),
    *("query_positions", "key_positions", "softcap"),
}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Layer:
    """What the steps of a layer are made of.

    `given` are the names of its inputs: those of attention from embeddings, `W_gate` (if the MLP
    is gated), `W_up`, `W_down` and their biases, and scale and shift of each norm. The norms are
    before attention and MLP; "after" their residual sums; or on "both" sides, within the sums.
    """

    given: frozenset[str]
    norm: Literal["rms", "layer"]
    place: Literal["before", "after", "both"]
    activation: str
    masked: bool = True
    default_scale: bool = True


@lru_cache(maxsize=64)
def layer(form: Layer) -> tuple[Step, ...]:
    """The steps of one layer, from `embeddings` to `hidden`.

    Examples
    --------
    >>> given = {"embeddings", "W_q", "W_k", "W_v", "W_o", "W_up", "W_down"}
    >>> steps = layer(Layer(frozenset(given), "rms", "before", "gelu"))
    >>> [step.formula for step in steps if step.op != "given"][-4:]
    ['U = X_m·W_u', 'U_a = U·Φ(U)', 'R_m = U_a·W_d', 'X⁺ = X_a + R_m']
    """
    book = Builder({"embeddings", *form.given})
    book.out = "M"
    book.give("embeddings", "X", "L M")
    if form.place != "after":
        book.instead["embeddings"] = declare_norm(
            book, form, "attention_input", "X_n", "embeddings"
        )
    declare_projections(book)
    for name, symbol, axes in (("queries", "Q", "H L D"), ("keys", "K", "G S D")):
        if f"normed_{name}_scale" in book.given:
            normed = f"normed_{name}", f"{symbol}_n", name, axes
            book.instead[name] = declare_norm(book, form, *normed)
    declare_attention(book, form.masked, "shifted", form.default_scale, "dot", "softmax")
    book.instead = {}
    last = _residual(book, form, "attention", "embeddings", "projected_output", "X_a")
    source = last
    if form.place != "after":
        source = declare_norm(book, form, "mlp_input", "X_m", last)
    result = _declare_mlp(book, form, source)
    _residual(book, form, "mlp", last, result, "X⁺", name="hidden")
    return tuple(book.steps.values())


def _residual(
    book: Builder, form: Layer, part: str, before: str, result: str, symbol: str, name: str = ""
) -> str:
    """What a part of the layer made, added to what it was made of."""
    name = name or f"after_{part}"
    if form.place == "both":
        result = declare_norm(book, form, f"{part}_result", f"R_{part[0]}n", result)
    if form.place != "after":
        return book.step(name, symbol, "L M", "add", before, result, latex=_latex(symbol))
    made, latex = f"{part}_sum", _latex(f"{symbol}_s")
    total = book.step(made, f"{symbol}_s", "L M", "add", before, result, latex=latex)
    return declare_norm(book, form, name, symbol, total)


def _declare_mlp(book: Builder, form: Layer, source: str) -> str:
    """One hidden layer for each row; with a gate, by which it is multiplied number by number."""
    up = declare_linear(book, "up", "U", source, "L I", "W_u")
    if "W_gate" in book.given:
        gate = declare_linear(book, "gate", "Γ", source, "L I", "W_g")
        opened = book.step("activated", "Γ_a", "L I", form.activation, gate, latex=_latex("Γ_a"))
        last = book.step("gated", "U_g", "L I", "multiply", opened, up)
    else:
        last = book.step("activated", "U_a", "L I", form.activation, up)
    return declare_linear(book, "down", "R_m", last, "L M", "W_d")


def declare_linear(
    book: Builder, name: str, symbol: str, source: str, axes: str, weight: str
) -> str:
    """Declare source·W + b; the weights are `W_` and `b_` before the name."""
    out = axes.split()[1]
    inner = book.steps[source].axes[-1]
    book.give(f"W_{name}", weight, f"{inner} {out}", latex=f"W_{{{weight[2:]}}}")
    pair = source, f"W_{name}"
    if not book.give(f"b_{name}", f"b{weight[1:]}", out, latex=f"b_{{{weight[2:]}}}"):
        return book.step(name, symbol, axes, "dot", *pair, latex=_latex(symbol))
    book.step(f"{name}_products", f"{symbol}′", axes, "dot", *pair, latex=f"{{{_latex(symbol)}}}'")
    return book.step(
        name, symbol, axes, "add", f"{name}_products", f"b_{name}", latex=_latex(symbol)
    )


def declare_norm(
    book: Builder, form: Layer, name: str, symbol: str, source: str, axes: str = "L M"
) -> str:
    """Declare a norm of the rows of `source`: each is divided by the root of its mean square.

    A layer norm subtracts the mean first. Its inputs are `_scale` and `_shift` after the name.
    """
    *rows, column = axes.split()
    row, width = " ".join(rows), "model_width" if column == "M" else "width"
    for size, letter in ((width, column), ("epsilon", "ε")):
        if size not in book.steps:
            book.step(size, letter, "", "given", latex=_latex(letter))

    def made(step: str, sign: str, own: str, op: str, *operands: str) -> str:
        known = f"{_latex(sign)}_{{{_latex(symbol)}}}"
        return book.step(f"{name}_{step}", f"{sign}({symbol})", own, op, *operands, latex=known)

    if form.norm == "layer":
        sums = made("sums", "s", row, "sum", source)
        means = made("means", "μ", row, "divide", sums, width)
        source = made("centered", "c", axes, "subtract", source, means)
    squares = made("squares", "q", row, "row_dot", source, source)
    mean = made("mean_squares", "v", row, "divide", squares, width)
    factors = made("factors", "r", row, "norm_factor", mean, "epsilon")
    parts = []
    for part, op, sign in (("scale", "multiply", "γ"), ("shift", "add", "β")):
        latex = f"{_latex(sign)}_{{{_latex(symbol)}}}"
        if book.give(f"{name}_{part}", f"{sign}({symbol})", column, latex=latex):
            parts.append((part, op))
    steps = [("units", "multiply", factors), *((f"{a}d", op, f"{name}_{a}") for a, op in parts)]
    for step, op, operand in steps[:-1]:
        source = made(step, "u" if step == "units" else "w", axes, op, source, operand)
    return book.step(name, symbol, axes, steps[-1][1], source, steps[-1][2], latex=_latex(symbol))


@lru_cache(maxsize=64)
def norm(form: Layer, name: str, symbol: str) -> tuple[Step, ...]:
    """The steps of one norm alone, from `embeddings` to `name`; its scale and shift are given."""
    book = Builder({f"{name}_scale", f"{name}_shift"} & form.given)
    book.step("embeddings", "X", "L M", "given")
    declare_norm(book, form, name, symbol, "embeddings")
    return tuple(book.steps.values())


@lru_cache(maxsize=16)
def model(
    layers: tuple[Layer, ...], given: frozenset[str], epilogue: Layer, embedded: bool = False
) -> tuple[Step, ...]:
    """The steps of a whole model, from tokens to `logits`.

    `given` are names of its own inputs: `positions_vectors`, `embedding_scale`, those of the norms
    `embeddings` and `final`, and `logits_softcap`. With `epilogue`, the form of the last norm.
    """
    book = Builder({*given})
    book.step("tokens", "t", "L", "given")
    book.step("token_numbers", "n", "X", "given")
    book.step("token_table", "E", "X M", "given")
    pick = "token_table", "token_numbers", "tokens"
    last = book.step("embeddings", "X", "L M", "pick", *pick)
    if book.give("embedding_scale", "κ", "", latex=_latex("κ")):
        pair = last, "embedding_scale"
        last = book.step("scaled_embeddings", "X_κ", "L M", "multiply", *pair, latex=_latex("X_κ"))
        book.instead["embeddings"] = last
    last = declare_absolute(book).get("embeddings", last)
    book.instead = {}
    if embedded:
        last = declare_norm(book, epilogue, "normed_embeddings", "X_e", last)
    for number, form in enumerate(layers):
        book.steps |= _placed(layer(form), number, book.steps)
        last = f"{number}.hidden"
    if "final_scale" in given:
        last = declare_norm(book, epilogue, "final", "X_f", last)
    book.step("unembedding", "W_v", "V M", "given", latex="W_{v}")
    logits = "logits" if "logits_softcap" not in given else "uncapped_logits"
    symbol = "Λ" if logits == "logits" else "Λ_u"
    book.step(logits, symbol, "L V", "dot", last, ("unembedding", "v m"), latex=_latex(symbol))
    if book.give("logits_softcap", "c_v", ""):
        book.step("logits", "Λ", "L V", "softcap", logits, "logits_softcap", latex=_latex("Λ"))
    return tuple(book.steps.values())


def _placed(steps: Sequence[Step], number: int, before: dict[str, Step]) -> dict[str, Step]:
    """The steps of a layer as those of layer `number`, whose input is the last step before."""
    mark = str(number).translate(_SUPERSCRIPTS)
    last = next(reversed(before.values()))
    made: dict[str, Step] = {"embeddings": last}
    for step in steps:
        if step.name == "embeddings":
            continue
        if step.name in SHARED:
            made[step.name] = before.get(step.name, step)
            continue
        operands = tuple(
            Ref(made[ref.step].name, ref.index, made[ref.step].symbol, made[ref.step].latex_symbol)
            for ref in step.operands
        )
        made[step.name] = replace(
            step,
            name=f"{number}.{step.name}",
            symbol=f"{step.symbol}⁽{mark}⁾",
            latex_symbol=f"{{{step.latex_symbol}}}^{{({number})}}",
            operands=operands,
        )
    return {step.name: step for step in made.values()}


_LATEX = {"ε": r"\epsilon", "γ": r"\gamma", "β": r"\beta", "μ": r"\mu", "κ": r"\kappa"}
_LATEX |= {"Γ": r"\Gamma", "Λ": r"\Lambda", "X⁺": "X^{+}"}


def _latex(symbol: str) -> str:
    head, _, tail = symbol.partition("_")
    head, tail = _LATEX.get(head, head), _LATEX.get(tail, tail)
    return f"{head}_{{{tail}}}" if tail else head

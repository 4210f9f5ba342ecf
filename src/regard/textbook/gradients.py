"""The backward steps of any declared computation, from the adjoints of its operations.

Each forward step that depends on a requested input gets one backward step `d_<name>`: the gradient
of the loss with respect to its numbers. Where several steps use it, the contribution of each is a
step too, and so is each sum over an axis that was broadcast. A hidden key is absent: its gradient
is 0 whatever its numbers are. Must not know arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from regard.textbook.operations import OPERATIONS
from regard.textbook.steps import INDEX_MAPS, LETTERS, Ref, Step, letters_of

# The steps that the compact form of the softmax's gradient skips.
_SOFTMAX = {
    *("row_maximum", "shifted", "sink_shifted", "exponentials", "sink_exponential"),
    *("row_sums", "weights", "log_sums", "lse"),
}


def backward(
    steps: Sequence[Step],
    wrt: Collection[str],
    given: Collection[str] = ("output",),
    *,
    compact: bool = True,
    grouped: bool = True,
    sign: str = "d",
) -> tuple[Step, ...]:
    """The steps of the backward pass, in order; steps that no requested gradient needs are absent.

    Parameters
    ----------
    steps : sequence of Step
        The forward steps, in order.
    wrt : collection of str
        The names of the steps whose gradients are requested, such as "queries".
    given : collection of str
        The names of the steps whose gradients are given, such as "output", and "lse" where the
        loss depends on it.
    compact : bool
        Whether the gradient of the logits is P·(dP − δ) with δ = Σ_e dO·O − dlse. If not, it goes
        back through every operation of the softmax; the numbers differ by rounding only.
    grouped : bool
        Whether several query heads may share a key head, whose gradient is then a sum over them.
    sign : str
        The prefix of the gradients' names and symbols. For second gradients, pass forward and
        backward steps together as `steps`, another prefix, and ``compact=False``.

    Raises
    ------
    ValueError
        If a name in `wrt` is not one of the steps, or the loss does not depend on that step.

    Examples
    --------
    >>> from regard.textbook.steps import textbook
    >>> forward = textbook({"queries", "keys", "values"}, heads=False)
    >>> for step in backward(forward, {"queries", "values"}):
    ...     print(step.formula)
    dO is given
    dP = dO·Vᵀ
    δ = Σ_e dO·O
    dA_s = P·(dP − δ)
    dA = dA_s·scale
    dV = Pᵀ·dO
    dQ = dA·K
    """
    return _backward(tuple(steps), frozenset(wrt), frozenset(given), compact, grouped, sign)


@lru_cache(maxsize=256)
def _backward(
    steps: tuple[Step, ...],
    wrt: frozenset[str],
    given: frozenset[str],
    compact: bool,
    grouped: bool,
    sign: str,
) -> tuple[Step, ...]:
    book = _Book(steps, wrt, given, grouped, sign)
    compact = compact and "exponentials" in book.forward
    for step in reversed(steps):
        gradient = book.gradient(step) if step.name in book.on_the_way else None
        if gradient is None or (compact and step.name in _SOFTMAX - {"weights"}):
            continue
        if step.op == "above":
            _through_sparsemax(book, step, gradient)
            continue
        if compact and step.name == "weights":
            _through_softmax(book, gradient)
            continue
        for position, ref in enumerate(step.operands):
            if ref.step in book.on_the_way:
                _through(book, step, gradient, position)
    return book.needed(wrt)


def _symbols(step: Step) -> tuple[str, str]:
    return step.symbol, step.latex_symbol


class _Book:
    """The backward steps so far, and the contributions to each forward step's gradient."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        wrt: frozenset[str],
        given: frozenset[str],
        grouped: bool,
        sign: str,
    ) -> None:
        self.forward = {step.name: step for step in steps}
        self.grouped = grouped
        self._sign = sign
        self.made: dict[str, Step] = {}
        self._arrived: dict[str, list[str]] = {}
        # The steps that depend on a requested one.
        self.on_the_way = set(wrt)
        for step in steps:
            if any(ref.step in self.on_the_way for ref in step.operands):
                self.on_the_way.add(step.name)
        hiding = self.forward.get("visible")
        self._seen = {*hiding.index} - {"h"} if hiding else None
        for step in steps:
            if step.name in given:
                self.contribute(step, step.name, "given", (), step.axes)

    def step(
        self,
        name: str,
        symbol: tuple[str, str],
        axes: tuple[str, ...],
        op: str,
        operands: Sequence[Ref] = (),
        written: tuple[str, str] | None = None,
        of: str = "",
    ) -> Ref:
        """Declare a step, over visible keys only where its cells have a query and a key."""
        letters = {LETTERS[axis] for axis in axes}
        letters |= {x for ref in operands for entry in ref.index for x in letters_of(entry)}
        # Where rows and columns change places, what is hidden is a 0 and not left out.
        turned = any(ref.index[-2:] == ("j", "i") for ref in operands)
        over = self._seen is not None and self._seen <= letters and not turned
        while name in self.made or name in self.forward:  # a second one of this name
            name, symbol = f"{name}_too", (f"{symbol[0]}′", f"{{{symbol[1]}}}'")
        self.made[name] = Step(
            *(name, *symbol, axes, op, tuple(operands)),
            over="visible" if over else "all",
            written=written,
            phase="backward",
            of=of,
        )
        return self.made[name].own

    def contribute(
        self,
        to: Step,
        source: str,
        op: str,
        operands: Sequence[Ref],
        axes: tuple[str, ...],
        written: tuple[str, str] | None = None,
    ) -> None:
        """Declare the contribution to the gradient of `to` from one of the steps that use it."""
        name, (symbol, latex) = self.d(to)
        made = self.forward.get(source, to)
        symbols = f"{symbol}_{made.symbol}", f"{{{latex}}}_{{{made.latex_symbol}}}"
        # The letters of a cell say which is which, in any order.
        axes = to.axes if {*axes} == {*to.axes} else axes
        one = self.step(f"{name}_from_{source}", symbols, axes, op, operands, written)
        self._arrived.setdefault(to.name, []).append(one.step)

    def d(self, step: Step) -> tuple[str, tuple[str, str]]:
        """The name and the symbols of a step's gradient."""
        latex = rf"\mathrm{{{self._sign}}}{step.latex_symbol}"
        return f"{self._sign}_{step.name}", (f"{self._sign}{step.symbol}", latex)

    def gradient(self, step: Step) -> Step | None:
        """The sum of all contributions to a forward step's gradient; None if there are none."""
        arrived = self._arrived.get(step.name, [])
        name, symbol = self.d(step)
        if len(arrived) == 1:
            only = self.made.pop(arrived[0])
            made = (only.axes, only.op, only.operands, only.written)
            self.step(name, symbol, *made, of=step.name)
        elif arrived:
            parts = [self.made[x].own for x in arrived]
            self.step(name, symbol, step.axes, "add", parts, of=step.name)
        return self.made.get(name)

    def needed(self, wrt: Collection[str]) -> tuple[Step, ...]:
        """The steps that the requested gradients need, in order."""
        for name in wrt:
            if f"{self._sign}_{name}" not in self.made:
                raise ValueError(f"{name} has no gradient in this computation")
        needed = {f"{self._sign}_{name}" for name in wrt}
        for step in reversed(self.made.values()):
            if step.name in needed:
                needed |= {ref.step for ref in step.operands}
        return tuple(step for step in self.made.values() if step.name in needed)


def _through(book: _Book, step: Step, gradient: Step, position: int) -> None:
    """Declare what a step, whose own gradient is given, contributes to that of one operand."""
    adjoint = OPERATIONS[step.op].adjoint
    template = adjoint[min(position, len(adjoint) - 1)]
    if not template:
        return
    if step.op == "dot" or OPERATIONS[step.op].term:
        _through_sum(book, step, gradient, position, *template.split())
    elif "g*R+r" in step.operands[position].index:
        own = Ref(gradient.name, ("h//(H//G)", *step.index[1:]), *_symbols(gradient))
        to = book.forward[step.operands[position].step]
        book.contribute(to, step.name, "same", [own], to.axes)
    elif step.op in ("rotate", "rotate_back"):
        _through_rotation(book, step, gradient)
    elif step.op in ("split", "merge"):
        _through_move(book, step, gradient)
    else:
        _through_cells(book, step, gradient, position, template.split(", "))


def _through_cells(
    book: _Book, step: Step, gradient: Step, position: int, template: Sequence[str]
) -> None:
    """An operation on cells: its adjoint, then sums over the axes that the operand lacks."""
    ref = step.operands[position]
    to = book.forward[ref.step]
    own, (short, latex) = book.d(to)
    axes = step.axes
    if step.running in ref.index:
        axes = (*axes, to.axes[ref.index.index(step.running)])
    known = {"d": Ref(gradient.name, step.index, *_symbols(gradient))}
    known |= {"y": step.own} | {str(n): one for n, one in enumerate(step.operands)}
    for number, part in enumerate(template[:-1], 1):
        op, *names = part.split()
        # Named after the step whose slope or product it is.
        name = f"{step.name}_{op.removeprefix(step.op + '_')}"
        symbol = f"{step.symbol}{'′' * number}", step.latex_symbol + "'" * number
        known["_"] = book.step(name, symbol, axes, op, [known[x] for x in names])
    op, *names = template[-1].split()
    operands = [known[x] for x in names]
    broadcast = [axis for axis in axes if LETTERS[axis] not in ref.index]
    if broadcast and op not in ("multiply", "same"):
        # Sums begin with the products themselves.
        symbol = f"{short}′", f"{latex}'"
        operands, op = [book.step(f"{own}_{op}", symbol, axes, op, operands)], "same"
    while broadcast:
        axes = tuple(axis for axis in axes if axis != broadcast[-1])
        op = "row_dot" if op == "multiply" else "sum"
        broadcast.pop()
        if broadcast:
            letters = [LETTERS[axis] for axis in axes]
            symbol = f"{short}_{''.join(letters)}", f"{{{latex}}}_{{{' '.join(letters)}}}"
            name = f"{own}_by_{'row' if 'L' in axes else 'head'}"
            operands = [book.step(name, symbol, axes, op, operands)]
    book.contribute(to, step.name, op, operands, axes)


def _renamed(ref: Ref, names: Mapping[str, str]) -> Ref:
    index = tuple(names.get(entry, entry) for entry in ref.index)
    return Ref(ref.step, index, ref.symbol, ref.latex_symbol)


def _through_sum(
    book: _Book, step: Step, gradient: Step, position: int, op: str, *factors: str
) -> None:
    """A sum of products or of other terms: the gradient of one operand is a sum of the same kind.

    Of a product it is the step's gradient times the other factor.
    """
    ref = step.operands[position]
    to = book.forward[ref.step]
    # Indices are written with the letters of the operand's own axes.
    names = {
        entry: LETTERS[axis]
        for entry, axis in zip(ref.index, to.axes, strict=True)
        if entry not in INDEX_MAPS
    }
    # Two letters that change places, as where queries and keys were taken for each other.
    names |= {new: old for old, new in names.items() if new not in names}
    shared = "h//(H//G)" in ref.index
    if shared and not book.grouped:
        names |= {"h": "g", "h//(H//G)": "g"}
    per_head = shared and book.grouped
    axes = tuple("H" if per_head and axis == "G" else axis for axis in to.axes)
    known = {"d": Ref(gradient.name, step.index, *_symbols(gradient))}
    known |= {str(n): one for n, one in enumerate(step.operands)}
    operands = [_renamed(known[one], names) for one in factors]
    used = {x for one in operands for entry in one.index for x in letters_of(entry)}
    missing = [axis for axis in step.axes if LETTERS[axis] in used - {LETTERS[own] for own in axes}]
    if op == "dot":
        letters = [LETTERS[axis] for axis in axes if axis not in ("H", "G")]
        rows = [letter for letter in operands[0].index if letter not in ("h", "g")]
        if len(rows) == 2 and letters[0] not in rows:
            operands.reverse()  # the rows of the first factor are those of the result
    if missing and missing[-1] not in ("H", "G"):
        missing.pop()  # what the operation itself runs along
    elif op == "dot":
        op = "multiply"
    name, (symbol, latex) = book.d(to)
    while missing:
        cell = (*missing, *axes)
        kind = "row" if "L" in missing else "head"
        symbols = f"{symbol}_{LETTERS[missing[-1]]}", f"{latex}_{{{LETTERS[missing[-1]]}}}"
        operands = [book.step(f"{name}_by_{kind}", symbols, cell, op, operands)]
        missing.pop()
        op = "sum"
    if not per_head:
        book.contribute(to, step.name, op, operands, axes)
        return
    each = book.step(f"{name}_by_head", (f"{symbol}_h", f"{latex}_{{h}}"), axes, op, operands)
    written = (" = Σ_h $0 over the heads h that share it", r" = \sum_{h} $0")
    own = Ref(each.step, ("g*R+r", *each.index[1:]), each.symbol, each.latex_symbol)
    book.contribute(to, step.name, "sum", [own], to.axes, written)


def _through_move(book: _Book, step: Step, gradient: Step) -> None:
    """A change of layout: split heads are merged, merged heads are split."""
    (ref,) = step.operands
    to = book.forward[ref.step]
    if step.op == "split":
        width = step.axes[-1]
        index: tuple[str, ...] = (f"c//{width}", LETTERS[to.axes[0]], f"c%{width}")
    else:
        head, row, width = to.axes
        index = (LETTERS[row], f"{LETTERS[head]}*{width}+{LETTERS[width]}")
    own = Ref(gradient.name, index, *_symbols(gradient))
    op = OPERATIONS[step.op].adjoint[0].split()[0]
    book.contribute(to, step.name, op, [own], to.axes)


def _through_rotation(book: _Book, step: Step, gradient: Step) -> None:
    """A rotation of pairs: the gradient is turned back, what both operands add in one step."""
    own, cosine, other, sine = step.operands
    d = Ref(gradient.name, step.index, *_symbols(gradient))
    operands = [d, cosine, replace(d, index=other.index), sine]
    op = OPERATIONS[step.op].adjoint[0]
    book.contribute(book.forward[own.step], step.name, op, operands, step.axes)


def _through_softmax(book: _Book, gradient: Step) -> None:
    """The softmax in its compact form: P·(dP − δ) for logits, −Σ p·δ for a sink of weight p.

    δ is Σ P·dP along the softmax, which is Σ_e dO·O where the output sums along the same keys.
    """
    forward, rows = book.forward, book.forward["row_sums"].axes
    logits = forward["exponentials"].operands[0].step
    logits = forward[logits].operands[0].step if logits == "shifted" else logits
    lse = book.made.get("d_lse")
    symbol, products = ("δ", r"\delta"), [book.made["d_output"].own, forward["output"].own]
    if forward["row_sums"].running != forward["output"].running:
        products = [forward["weights"].own, gradient.own]
    if lse:
        of_output = book.step("output_delta", ("δ_O", r"\delta_{O}"), rows, "row_dot", products)
        delta = book.step("delta", symbol, rows, "subtract", [of_output, lse.own])
    else:
        delta = book.step("delta", symbol, rows, "row_dot", products)
    if logits in book.on_the_way:
        operands = [forward["weights"].own, gradient.own, delta]
        axes = forward["weights"].axes
        book.contribute(forward[logits], "weights", "softmax_gradient", operands, axes)
    if "sink" in book.on_the_way:
        sink = forward["sink"]
        share = [forward[name].own for name in ("sink_exponential", "row_sums")]
        weight = book.step("sink_weights", ("p", "p"), rows, "divide", share)
        op = "multiply" if rows == sink.axes else "row_dot"
        product = book.step(
            "d_sink_products", ("ds′", r"\mathrm{d}s'"), sink.axes, op, [weight, delta]
        )
        book.contribute(sink, "sink_weights", "negate", [product], sink.axes)


def _through_sparsemax(book: _Book, step: Step, gradient: Step) -> None:
    """A sparsemax: I·(dP − δ), where I is 1 for the keys with weight, δ the mean of their dP."""
    logits, threshold = step.operands
    rows = book.forward[threshold.step].axes
    has = book.step("support", ("I", "I"), step.axes, "positive", [step.own])
    size = book.step("support_sizes", ("n", "n"), rows, "sum", [has])
    symbols = "σ", r"\sigma"
    total = book.step("support_sums", symbols, rows, "row_dot", [gradient.own, has])
    delta = book.step("delta", ("δ", r"\delta"), rows, "divide", [total, size])
    operands = [has, gradient.own, delta]
    book.contribute(book.forward[logits.step], "weights", "softmax_gradient", operands, step.axes)

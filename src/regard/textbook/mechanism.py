"""A score that a caller declares, as steps of the textbook's operations.

Owns the checks of such a declaration; its value, explanation and gradients follow from the
operations. Must not know arrays of a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from regard.boundary import answering
from regard.boundary.arguments import as_array
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.rules.part import own_array
from regard.scores import Score
from regard.textbook.mechanisms import Declared
from regard.textbook.operations import OPERATIONS
from regard.textbook.steps import INDEX_MAPS, LETTERS, letters_of, textbook

_GIVEN = {"queries": "H L D", "keys": "G S D"}
_AXES = ("H", "G", "L", "S", "D", "K", "U")


@answering
class Mechanism(Score):
    """A score of your own, composed of steps: for `attention(score=…)`, and `explain`, `gradients`.

    Parameters
    ----------
    name : str
        What it is called in an explanation.
    steps : sequence of tuples ``(name, symbol, axes, operation, *operands)``
        Each step is made of earlier ones, of "queries" (H, L, D) and of "keys" (G, S, D); the last
        is "scores" (H, L, S). Axes are letters such as "H L S"; K and U are widths of your own.
        An operand is a name, or a pair of a name and the index of its cells, such as
        ``("keys", "h//(H//G) j d")``, where that is not the letters of its own axes; the head of a
        key is found without saying so. A letter that the step does not have is added up. The
        operation "given" takes the parameter of the step's name.
    **parameters : array_like
        The numbers of the "given" steps, which have gradients under names such as "score.W".

    Raises
    ------
    OptionError, ShapeError, DtypeError
        When it is declared: an unknown operation or axis, operands that do not fit, a step that is
        not used, a parameter that is missing.

    Examples
    --------
    >>> import numpy as np, regard
    >>> steps = [
    ...     ("W", "W_s", "D K", "given"),
    ...     ("turned", "Q_w", "H L K", "dot", "queries", "W"),
    ...     ("gates", "B", "H L K", "sigmoid", "turned"),
    ...     ("scores", "A", "H L S", "dot", "gates", ("keys", "h//(H//G) j k")),
    ... ]
    >>> score = Mechanism("gated queries", steps, W=np.eye(2))
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> regard.attention(x, x, x, score=score).round(3)
    array([[0.558, 0.442],
           [0.442, 0.558]])
    >>> print(regard.explain(x, x, x, score=score).why("scores", 0, 1))
    A[0, 1] = 0.5    A = B·Kᵀ
      0    0.73105858 × 0 = 0
      1             0.5 × 1 = 0.5
      sum                  0.5
      (numbers are rounded to 8 decimals; the result is of unrounded ones)
    """

    def __init__(self, name: str, steps: Sequence[tuple[Any, ...]], **parameters: Any) -> None:
        if not name or type(name) is not str:
            raise DtypeError(f"name must be a text, not {safe_text(repr(name), 60)}")
        lines = _Lines()
        for number, line in enumerate(steps):
            lines.add(number, line)
        lines.check_end()
        given = {own for own, (_, _, op, *_) in lines.found.items() if op == "given"}
        for own in parameters.keys() ^ given:
            which = "no step of that name is given" if own in parameters else "no parameter has it"
            raise OptionError(f"{safe_text(own, 60)} is a parameter or a given step, but {which}")
        self._declared = Declared(name, lines.declared(given))
        self._axes = {own: lines.axes[own] for own in parameters}
        for own, value in parameters.items():
            wanted = ", ".join(self._axes[own])
            count = len(self._axes[own])
            array = own_array(f"score.{own}", as_array(f"score.{own}", value), count, f"({wanted})")
            setattr(self, own, array)
        self.check(0)

    @property
    def kind(self) -> Declared:  # type: ignore[override]
        """The declaration itself, which the textbook takes."""
        return self._declared

    def parameters(self) -> dict[str, Any]:
        """The numbers of the given steps."""
        return {own: getattr(self, own) for own in self._axes}

    def check(self, width: int) -> None:
        """Raise unless axes of one name are equally long, and D is `width`, where it is known."""
        sizes = {"D": (width, "queries and keys")} if width else {}
        for own, axes in self._axes.items():
            for axis, size in zip(axes, getattr(self, own).shape, strict=True):
                known, origin = sizes.setdefault(axis, (size, f"score.{own}"))
                if size != known:
                    raise ShapeError(
                        f"score.{own} has {size} along {axis} but {origin} has {known}; "
                        "they must match"
                    )

    def __repr__(self) -> str:
        return f'Mechanism("{safe_text(self._declared.name, 60)}")'


class _Lines:
    """The steps so far, each checked against those before it."""

    def __init__(self) -> None:
        self.axes = {name: tuple(axes.split()) for name, axes in _GIVEN.items()}
        self.found: dict[str, tuple[Any, ...]] = {}
        self.used: set[str] = set()

    def add(self, number: int, line: Any) -> None:
        """Check one step and keep it."""
        if not (isinstance(line, (tuple, list)) and len(line) >= 4):
            raise DtypeError(
                f"step {number} must be (name, symbol, axes, operation, *operands), not "
                f"{safe_text(repr(line), 80)}"
            )
        name, symbol, axes, op, *operands = line
        if not all(isinstance(word, str) for word in (name, symbol, axes, op)):
            raise DtypeError(f"step {number} must begin with four texts: name, symbol, axes, op")
        where = f"step {safe_text(name, 40)}"
        if not re.fullmatch(r"[A-Za-z]\w*", name) or name in self.axes or name in _TAKEN:
            raise OptionError(f"{where} needs a name of its own: letters, not one that is there")
        own = tuple(axes.split())
        for axis in own:
            if axis not in _AXES:
                raise OptionError(
                    f"{where} has the axis {safe_text(axis, 20)}; there are {', '.join(_AXES)}"
                )
        if len({*own}) < len(own) or len([a for a in own if a not in ("H", "G")]) > 2:
            raise OptionError(f"{where} has the axes {axes}; beside a head it may have two, once")
        made = [self._operand(where, own, one) for one in operands]
        _check_operation(where, op, made, own)
        self.used |= {operand for operand, _ in made}
        self.axes[name] = own
        self.found[name] = (symbol, axes, op, *made)

    def _operand(self, where: str, own: tuple[str, ...], given: Any) -> tuple[str, str]:
        """The name and the index of an operand."""
        name, index = given if isinstance(given, (tuple, list)) and len(given) == 2 else (given, "")
        if not (isinstance(name, str) and name in self.axes and isinstance(index, str)):
            known = ", ".join(self.axes)
            raise OptionError(
                f"{where} is made of {safe_text(repr(given), 60)}; before it there are {known}"
            )
        axes = self.axes[name]
        default = ("h//(H//G)" if a == "G" and "H" in own else LETTERS[a] for a in axes)
        entries = index.split() or [*default]
        if len(entries) != len(axes):
            raise OptionError(
                f"{where} reads {name} at [{index}], but {name} has the axes {' '.join(axes)}; "
                "an index has one entry for each"
            )
        for entry, axis in zip(entries, axes, strict=True):
            heads = {"G": ("g", "h//(H//G)"), "H": ("h",)}.get(axis)
            letters = heads or {LETTERS[a] for a in _AXES if a not in ("H", "G")}
            if entry not in letters or (entry in INDEX_MAPS and axis != "G"):
                raise OptionError(
                    f"{where} reads {name} at {safe_text(entry, 20)} along {axis}; it may be "
                    f"{' or '.join(sorted(letters))}"
                )
        return name, " ".join(entries)

    def check_end(self) -> None:
        """Raise unless the last step is the scores, and every other one is used."""
        last = next(reversed(self.found), "")
        if last != "scores" or self.axes[last] != ("H", "L", "S"):
            raise OptionError('the last step must be "scores" with the axes "H L S"')
        given = [name for name, (_, _, op, *_) in self.found.items() if op == "given"]
        known = {axis for name in given for axis in self.axes[name]}
        for name, axes in self.axes.items():
            for axis in {*axes} & ({"K", "U"} - known):
                raise OptionError(f"step {name} has the axis {axis}, which no given step has")
        idle = [name for name in self.axes if name not in self.used and name != "scores"]
        if idle:
            raise OptionError(f"{idle[0]} is not used by any step; every one leads to the scores")

    def declared(self, given: set[str]) -> tuple[tuple[Any, ...], ...]:
        """The steps under the names that the textbook has for them."""

        def named(name: str) -> str:
            return f"score_{name}" if name in given else name

        return tuple(
            (named(name), symbol, axes, op, *((named(one), index) for one, index in operands))
            for name, (symbol, axes, op, *operands) in self.found.items()
        )


def _check_operation(
    where: str, op: str, operands: Sequence[tuple[str, str]], axes: tuple[str, ...]
) -> None:
    """Raise unless the operation takes such operands, and adds up one letter at most."""
    if op == "given":
        if operands:
            raise OptionError(f"{where} is given, so it is made of nothing")
        if not {*axes} <= {"D", "K", "U"}:
            raise OptionError(
                f"{where} is given, so its axes may be D, K and U: all heads share it"
            )
        return
    if op not in COMPOSABLE:
        raise OptionError(
            f"{where} has the operation {safe_text(op, 40)}; there are {', '.join(COMPOSABLE)}"
        )
    formula = OPERATIONS[op].formula
    text = formula[0] if isinstance(formula, tuple) else formula
    count = 1 + max(int(digit) for digit in re.findall(r"\$[a-z]?(\d)", text) if digit)
    several = "⟨" in text
    if len(operands) != count and not (several and operands):
        raise OptionError(f"{where}: {op} takes {count} operands, not {len(operands)}")
    meets = any("h//(H//G)" in index for _, index in operands)
    if meets and not (op == "dot" or OPERATIONS[op].term):
        raise OptionError(
            f"{where}: a step of queries meets the keys of its head in {', '.join(_MEETING)} "
            f"alone; {op} comes before or after them"
        )
    letters = {x for _, index in operands for entry in index.split() for x in letters_of(entry)}
    over = sorted(letters - {LETTERS[axis] for axis in axes})
    wanted = 1 if OPERATIONS[op].total else 0
    if len(over) != wanted:
        has = f"its operands have {', '.join(over) or 'none'}"
        raise OptionError(
            f"{where}: {op} adds up {'one letter' if wanted else 'nothing'} that the step itself "
            f"does not have, but {has}"
        )
    if {"h", "g"} & {*over}:
        raise OptionError(f"{where} lacks the heads of an operand; heads are not added up")
    if op == "dot":
        rows = [x for _, index in operands for x in index.split() if x not in (over[0], *_HEADS)]
        cells = [LETTERS[axis] for axis in axes if axis not in ("H", "G")]
        if rows != cells or not all(over[0] in index.split() for _, index in operands):
            raise OptionError(
                f"{where}: a dot product along {over[0]} has the other letters of its first "
                f"operand, then those of its second: {' '.join(rows)}, not {' '.join(cells)}"
            )


# Operations that a score may be made of: with a gradient, and not about visibility or layout.
COMPOSABLE = (
    *("dot", "row_dot", "multiply", "add", "subtract", "divide", "negate", "exp", "log", "sum"),
    *("softcap", "sigmoid", "elu_plus_one", "length", "tanh_dot", "squared_distance"),
)
_HEADS = ("h", "g", "h//(H//G)")
_MEETING = ("dot", "tanh_dot", "squared_distance")
_TAKEN = {
    step.name
    for step in textbook({*_GIVEN, "values", "bias", "softcap", "sink", "scale"}, masked=True)
} - {"scores"}

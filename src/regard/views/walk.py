"""From one number back to the given ones: which derivations a walk passes, and in which order.

Must not know how a derivation is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from regard.explanation.derivation import COMPARED, Derivation

PATH_NOTE = "In each sum the largest term (▸) is followed, down to the given numbers."


@dataclass(frozen=True)
class Stop:
    """One derivation of a walk, and which of its terms the walk follows."""

    derivation: Derivation
    followed: int | None = None  # a position in derivation.terms


def walk(derivation: Derivation) -> tuple[Stop, ...]:
    """From one number back to the given ones: every cell once, results first.

    A sum has many terms; both factors of the largest one are followed.
    """
    waiting = {(derivation.step, derivation.index): derivation}
    found: dict[tuple[str, tuple[int, ...]], Stop] = {}
    while waiting:
        # Always the latest step: everything that uses it has been seen by then.
        at = max(waiting, key=lambda place: waiting[place].place)
        here = waiting.pop(at)
        followed = largest_term(here)
        if here.op in ("sum", "max") and here is not derivation:
            # One of the row's own numbers is followed already, as a rule.
            source = here.operands[0].step if here.operands else ""
            if any(step == source for step, _ in (*waiting, *found)):
                followed = None
        opened = [here.open(number) for number in _opened(here, followed)]
        opened = [inner for inner in opened if inner.op not in ("given", "visible")]
        found[at] = Stop(here, followed if opened else None)
        for inner in opened:
            waiting.setdefault((inner.step, inner.index), inner)
    return tuple(found.values())


def largest_term(derivation: Derivation) -> int | None:
    """Which term counts most: a NaN before all, then by size."""

    def weight(number: int) -> tuple[bool, float]:
        value = derivation.terms[number].value
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value if sign else abs(value)

    sign = COMPARED.get(derivation.op, 0)
    return max(range(len(derivation.terms)), key=weight, default=None)


def off_path(stops: tuple[Stop, ...]) -> Derivation | None:
    """An operand that the walk does not pass through, to suggest as another start."""
    passed = {(stop.derivation.step, stop.derivation.index) for stop in stops}
    for stop in stops:
        for term in stop.derivation.terms:
            for number in term.operands:
                operand = stop.derivation.operands[number]
                if (operand.step, operand.index) not in passed:
                    other = stop.derivation.open(number)
                    if other.op != "given":
                        return other
    return None


def _opened(derivation: Derivation, followed: int | None) -> tuple[int, ...]:
    if derivation.hidden:
        return ()
    if derivation.terms:
        return derivation.terms[followed].operands if followed is not None else ()
    return tuple(range(len(derivation.operands)))

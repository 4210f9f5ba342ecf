"""An explanation as plain data that JSON can hold: what `--json` prints.

Must not know terminals. JSON has no NaN and no infinity: they are strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.explanation import questions
from regard.explanation.notation import plain
from regard.views.walk import walk

if TYPE_CHECKING:
    from regard.explanation.derivation import Derivation
    from regard.explanation.trace import Trace


def as_data(
    explanation: Trace,
    steps: Sequence[str] | None = None,
    derivation: Derivation | None = None,
    statistics: bool = False,
) -> dict[str, Any]:
    """The steps (all, or those named; omitted beside a derivation), and what else was asked for."""
    data = explanation.to_json(steps or (() if derivation is not None else None))
    if derivation is not None:
        data["why"] = [_derivation(stop.derivation) for stop in walk(derivation)]
    if statistics:
        data["statistics"] = _statistics(explanation)
    problem = explanation.problem
    if problem is not None and problem.expect:
        mismatches = questions.check(explanation)
        data["expectations"] = {
            "count": len(problem.expect),
            "mismatches": [_fields(one, "step what labels expected got") for one in mismatches],
        }
    return data


def _derivation(derivation: Derivation) -> dict[str, Any]:
    cell = "step symbol labels index value"
    return {
        **_fields(derivation, cell),
        "formula": derivation.declared.formula,
        **_fields(derivation, "hidden note"),
        "operands": [_fields(operand, cell) for operand in derivation.operands],
        "terms": [_fields(term, "label operands value") for term in derivation.terms],
        "latex": derivation.latex(),
        "numpy": derivation.numpy(),
    }


def _statistics(explanation: Trace) -> dict[str, Any]:
    found = questions.statistics(explanation)
    numbers = "mean variance minimum maximum cells"
    return {
        "steps": {name: _fields(one, numbers) for name, one in found.steps.items()},
        "rows": _fields(found.rows, "entropy effective_keys largest_weight largest_key"),
    }


def _fields(thing: Any, names: str) -> dict[str, Any]:
    return {name: plain(getattr(thing, name)) for name in names.split()}

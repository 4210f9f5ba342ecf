"""An explanation as plain data that JSON can hold: what `--json` prints.

Must not know terminals. JSON has no NaN and no infinity: they are strings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.explanation import questions
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
    """The steps (all, or those named; none beside a derivation), and what else was asked for."""
    data = explanation.to_json(steps or (() if derivation is not None else None))
    if derivation is not None:
        data["why"] = [_derivation(stop.derivation) for stop in walk(derivation)]
    if statistics:
        data["statistics"] = _statistics(explanation)
    problem = explanation.problem
    if problem is not None and problem.expect:
        data["expectations"] = {
            "count": len(problem.expect),
            "mismatches": [
                {
                    "step": mismatch.step,
                    "what": mismatch.what,
                    "labels": list(mismatch.labels),
                    "expected": _number(mismatch.expected),
                    "got": _number(mismatch.got),
                }
                for mismatch in questions.check(explanation)
            ],
        }
    return data


def _derivation(derivation: Derivation) -> dict[str, Any]:
    return {
        "step": derivation.step,
        "symbol": derivation.symbol,
        "labels": list(derivation.labels),
        "index": list(derivation.index),
        "value": _number(derivation.value),
        "formula": derivation.declared.formula,
        "hidden": derivation.hidden,
        "note": derivation.note,
        "operands": [
            {
                "step": operand.step,
                "symbol": operand.symbol,
                "labels": list(operand.labels),
                "index": list(operand.index),
                "value": _number(operand.value),
            }
            for operand in derivation.operands
        ],
        "terms": [
            {
                "label": term.label,
                "operands": list(term.operands),
                "value": _number(term.value),
            }
            for term in derivation.terms
        ],
        "latex": derivation.latex(),
        "numpy": derivation.numpy(),
    }


def _statistics(explanation: Trace) -> dict[str, Any]:
    found = questions.statistics(explanation)
    return {
        "steps": {
            name: {
                "mean": _number(one.mean),
                "variance": _number(one.variance),
                "minimum": _number(one.minimum),
                "maximum": _number(one.maximum),
                "cells": one.cells,
            }
            for name, one in found.steps.items()
        },
        "rows": {
            name: _numbers(getattr(found.rows, name))
            for name in ("entropy", "effective_keys", "largest_weight", "largest_key")
        },
    }


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are strings."""
    return float(value) if math.isfinite(value) else str(float(value))


def _numbers(array: Any) -> Any:
    array = np.asarray(array)
    if array.ndim:
        return [_numbers(part) for part in array]
    return int(array) if array.dtype.kind in "iu" else _number(float(array))

"""Attention on NumPy arrays that can show where every number came from."""

from typing import Any

from regard import masks
from regard.api import attention, explain
from regard.derivation import Derivation
from regard.errors import DtypeError, LabelError, OptionError, ProblemError, ShapeError
from regard.explanation import Explanation
from regard.lse import merge, softmax
from regard.problem import Expectation, Problem, RandomMatrices

__all__ = [
    "Derivation",
    "DtypeError",
    "Expectation",
    "Explanation",
    "LabelError",
    "OptionError",
    "Problem",
    "ProblemError",
    "RandomMatrices",
    "ShapeError",
    "__version__",
    "attention",
    "explain",
    "masks",
    "merge",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name != "__version__":
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    # Looked up when asked for: importlib.metadata costs more than the rest of the import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("regard")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"

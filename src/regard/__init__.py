"""Attention on NumPy arrays that can show where every number came from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.api import attention, diagnose, explain, set_threads, weights
from regard.errors import DtypeError, LabelError, OptionError, ProblemError, ShapeError

if TYPE_CHECKING:
    from regard import masks, models
    from regard.cache import KVCache
    from regard.config import show_config
    from regard.derivation import Derivation
    from regard.diagnosis import Diagnosis
    from regard.explanation import Explanation
    from regard.formats import load_problem
    from regard.lse import merge, softmax
    from regard.multihead import MultiHeadAttention
    from regard.problem import Expectation, Problem, RandomMatrices

    __version__: str

__all__ = [
    "Derivation",
    "Diagnosis",
    "DtypeError",
    "Expectation",
    "Explanation",
    "KVCache",
    "LabelError",
    "MultiHeadAttention",
    "OptionError",
    "Problem",
    "ProblemError",
    "RandomMatrices",
    "ShapeError",
    "__version__",
    "attention",
    "diagnose",
    "explain",
    "load_problem",
    "masks",
    "merge",
    "models",
    "set_threads",
    "show_config",
    "softmax",
    "weights",
]

# What plain attention does not need is loaded when it is first asked for.
_LAZY = {
    "Derivation": "derivation",
    "Diagnosis": "diagnosis",
    "Expectation": "problem",
    "Explanation": "explanation",
    "KVCache": "cache",
    "MultiHeadAttention": "multihead",
    "Problem": "problem",
    "RandomMatrices": "problem",
    "load_problem": "formats",
    "merge": "lse",
    "softmax": "lse",
    "show_config": "config",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(f"regard.{_LAZY[name]}"), name)
    elif name in ("masks", "models"):
        value = import_module(f"regard.{name}")
    elif name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            value = version("regard")
        except PackageNotFoundError:  # a source tree that was never installed
            value = "0+unknown"
    else:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

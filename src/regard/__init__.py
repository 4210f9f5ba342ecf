"""Attention on NumPy arrays that can show where every number came from.

- `attention` computes scaled dot-product attention; rules for its mask are in `masks`, other
  mechanisms than the dot product and the softmax in `scores` and `normalizers`, and ways to
  use positions in `positions`.
- `gradients` computes its backward pass; `linear_attention` is attention without a softmax.
- `explain` shows every step with labels, and its result says why a number is what it is.
- `diagnose` finds the mistake in a function that computes attention; `testing` asserts it has none.
- `KVCache` decodes token by token, `merge` joins parts of the keys, `weights` gives chosen rows.
- `MultiHeadAttention` is a layer from given weights; `models` reads sentence encoders.
- `Problem`, `load_problem` and `save_problem` keep a labelled example in a file.

Arrays may be PyTorch's or JAX's too, and results are then theirs; `regard.interop` has the
attention calls of those libraries. In a shell, `regard --help` lists the commands.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.api import attention, linear_attention, weights
from regard.errors import DtypeError, LabelError, OptionError, ProblemError, ShapeError

if TYPE_CHECKING:
    from regard import masks, models, normalizers, positions, scores, testing, textbook
    from regard.api import diagnose, explain, gradients
    from regard.compute.config import set_threads, show_config
    from regard.compute.kv_cache import KVCache
    from regard.compute.results import (
        Gradients,
        LayerGradients,
        OutputLse,
        OutputWeights,
        OutputWeightsLse,
    )
    from regard.compute.softmax import merge, softmax
    from regard.explanation.derivation import Derivation
    from regard.faces import Diagnosis, Explanation
    from regard.models.multi_head import MultiHeadAttention
    from regard.problems.files import load_problem, save_problem
    from regard.problems.parts import Expectation, RandomMatrices
    from regard.problems.problem import Problem

    __version__: str

__all__ = [
    "Derivation",
    "Diagnosis",
    "DtypeError",
    "Expectation",
    "Explanation",
    "Gradients",
    "KVCache",
    "LabelError",
    "LayerGradients",
    "MultiHeadAttention",
    "OptionError",
    "OutputLse",
    "OutputWeights",
    "OutputWeightsLse",
    "Problem",
    "ProblemError",
    "RandomMatrices",
    "ShapeError",
    "__version__",
    "attention",
    "diagnose",
    "explain",
    "gradients",
    "linear_attention",
    "load_problem",
    "masks",
    "merge",
    "models",
    "normalizers",
    "positions",
    "save_problem",
    "scores",
    "set_threads",
    "show_config",
    "softmax",
    "testing",
    "textbook",
    "weights",
]

# What plain attention does not need is loaded when it is first asked for.
_LAZY = {
    "Derivation": "explanation.derivation",
    "Diagnosis": "faces",
    "Expectation": "problems.parts",
    "Explanation": "faces",
    "Gradients": "compute.results",
    "diagnose": "api",
    "explain": "api",
    "gradients": "api",
    "LayerGradients": "compute.results",
    "KVCache": "compute.kv_cache",
    "MultiHeadAttention": "models.multi_head",
    "OutputLse": "compute.results",
    "OutputWeights": "compute.results",
    "OutputWeightsLse": "compute.results",
    "Problem": "problems.problem",
    "RandomMatrices": "problems.parts",
    "load_problem": "problems.files",
    "save_problem": "problems.files",
    "merge": "compute.softmax",
    "softmax": "compute.softmax",
    "set_threads": "compute.config",
    "show_config": "compute.config",
}


_MODULES = (
    "interop",
    "masks",
    "models",
    "normalizers",
    "positions",
    "scores",
    "testing",
    "textbook",
)

if not TYPE_CHECKING:  # a checker knows the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            value = getattr(import_module(f"regard.{_LAZY[name]}"), name)
        elif name in _MODULES:
            value = import_module(f"regard.{name}")
        elif name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                value = version("regard")
            except PackageNotFoundError:  # a source tree that was never installed
                value = "0+unknown"
        else:
            if name.startswith("_"):
                raise AttributeError(f"module 'regard' has no attribute {name!r}")
            from regard.boundary.elsewhere import no_such_name

            raise AttributeError(no_such_name(name, __all__), name=name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__

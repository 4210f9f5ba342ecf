"""For test suites: assertions that a function computes attention, and its gradients, correctly.

Owns the list of what was diagnosed in a run, which the plugin for pytest prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from regard.api import diagnose
from regard.faces import Diagnosis

if TYPE_CHECKING:
    from regard.compute.option_types import DiagnoseOptions

__all__ = ["assert_attention_correct", "assert_gradients_correct"]

# Every diagnosis of an assertion, in order.
diagnosed: list[Diagnosis] = []


def __dir__() -> list[str]:
    return __all__


def assert_attention_correct(
    function: Callable[..., Any], *, allow_fragile: bool = False, **options: Unpack[DiagnoseOptions]
) -> Diagnosis:
    """Raise an AssertionError with the diagnosis unless a function computes attention correctly.

    Parameters
    ----------
    function, **options
        As for `regard.diagnose`.
    allow_fragile : bool
        Accept a function that fails on extreme inputs only, such as exp of large scores.

    Returns
    -------
    Diagnosis

    Examples
    --------
    >>> import regard
    >>> assert_attention_correct(regard.attention).verdict
    'right'
    """
    found = _diagnose(function, **options)
    if not found.ok or (found.verdict == "fragile" and not allow_fragile):
        raise AssertionError(_failure(found))
    return found


def assert_gradients_correct(
    function: Callable[..., Any], **options: Unpack[DiagnoseOptions]
) -> Diagnosis:
    """Raise an AssertionError with the diagnosis unless every gradient of a function is right.

    Parameters
    ----------
    function, **options
        As for `regard.diagnose`: a backward pass (q, k, v, d_output) → (dq, dk, dv), a pair
        (forward, backward), an object with both, or a function that torch or JAX differentiates.

    Returns
    -------
    Diagnosis
        Its `gradients` say what was tried. Extreme inputs are not among it.

    Examples
    --------
    >>> import numpy as np
    >>> import regard
    >>> def backward(q, k, v, d_output):
    ...     found = regard.gradients(q, k, v, grad_output=d_output)
    ...     return found.query, found.key, found.value
    >>> [one.state for one in assert_gradients_correct(backward).gradients]
    ['right', 'right', 'right']
    """
    found = _diagnose(function, **options)
    if not found.gradients:
        raise AssertionError(f"{found.function} has no gradients that were tried\n{found}")
    if not found.ok:
        raise AssertionError(_failure(found))
    return found


def _diagnose(function: Callable[..., Any], **options: Unpack[DiagnoseOptions]) -> Diagnosis:
    found = diagnose(function, **options)
    diagnosed.append(found)
    return found


def _failure(found: Diagnosis) -> str:
    """What was found, and lines that show it where there are any."""
    return f"{found}\n\n{found.script}" if found.script else str(found)

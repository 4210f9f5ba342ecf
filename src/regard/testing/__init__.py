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
        raise AssertionError(str(found))
    return found


def assert_gradients_correct(
    function: Callable[..., Any], **options: Unpack[DiagnoseOptions]
) -> Diagnosis:
    """Raise an AssertionError with the diagnosis unless every gradient of a function is right.

    Parameters
    ----------
    function, **options
        As for `regard.diagnose`: a backward pass (q, k, v, d_output) → (dq, dk, dv), or what an
        adapter makes a dict of gradients of, with torch's or JAX's derivative too.

    Returns
    -------
    Diagnosis
        Its `compared` says which gradients there are.

    Examples
    --------
    >>> import numpy as np
    >>> import regard
    >>> def backward(q, k, v, d_output):
    ...     found = regard.gradients(q, k, v, grad_output=d_output)
    ...     return found.query, found.key, found.value
    >>> assert_gradients_correct(backward).compared
    ('query', 'key', 'value')
    """
    found = _diagnose(function, **options)
    if "output" in found.compared or not found.compared:
        raise AssertionError(f"{found.function} has no gradients that were tried\n{found}")
    if not found.ok:
        raise AssertionError(str(found))
    return found


def _diagnose(function: Callable[..., Any], **options: Unpack[DiagnoseOptions]) -> Diagnosis:
    found = diagnose(function, **options)
    diagnosed.append(found)
    return found

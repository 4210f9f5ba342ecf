"""For test suites: an assertion that a function computes attention correctly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from regard.api import diagnose
from regard.faces import Diagnosis

if TYPE_CHECKING:
    from regard.compute.options import DiagnoseOptions

__all__ = ["assert_attention_correct"]


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
    found = diagnose(function, **options)
    if not found.ok or (found.verdict == "fragile" and not allow_fragile):
        raise AssertionError(str(found))
    return found

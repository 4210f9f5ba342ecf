"""For other people's test suites: one assertion about an attention.

Must not know how a diagnosis is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.api import diagnose
from regard.faces import Diagnosis


def assert_attention_correct(
    function: Callable[..., Any], *, allow_fragile: bool = False, **options: Any
) -> Diagnosis:
    """Fail, with the name of the mistake, unless a function computes attention rightly.

    Parameters
    ----------
    function : callable
        As for `regard.diagnose`.
    allow_fragile : bool
        Whether it may break at the edge, such as by exp of large scores.
    **options
        As for `regard.diagnose`.

    Returns
    -------
    Diagnosis
        What was found.

    Raises
    ------
    AssertionError
        With the diagnosis as its text.

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

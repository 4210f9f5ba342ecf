"""From a function to a judgement: with the user's adapter, or with those that are found.

Owns how a function and its adapter are brought together. Must not know what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.call.asking import asking
from regard.diagnosis.judge import Judgement, judge
from regard.diagnosis.reading.libraries import framework_of
from regard.diagnosis.statements import Stated


def judge_function(
    function: Any, call: Callable[[Any, Any], Any] | None = None, **statements: Any
) -> Judgement:
    """Whether a function is right, as `call(function, t)` calls it.

    Examples
    --------
    >>> import regard
    >>> judge_function(regard.attention, lambda f, t: f(t.query, t.key, t.value)).verdict
    'right'
    """
    stated = Stated(**statements)
    library = stated.library or framework_of(function)
    assert call is not None
    adapter = Adapter(call)
    return judge(asking(function, adapter, library), adapter, stated)

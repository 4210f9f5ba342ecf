"""A function judged in this process, without a trace, for tests of what right is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.diagnosis.diagnose import Here
from regard.diagnosis.door import judge_ways
from regard.diagnosis.judge import Judgement
from regard.diagnosis.statements import Stated


def judge_function(
    function: Any, call: Callable[[Any, Any], Any] | None = None, **statements: Any
) -> Judgement:
    """Whether a function is right, as `call` calls it, or as the table does."""
    stated = Stated(**statements)
    place = Here(function, call, stated)
    return judge_ways(place.ways(), place.asking, stated)

"""Functions that read a prompt at once and the rest token by token, as ones of a whole text.

Without a prompt all tokens come one by one. Must not know any probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.packing import Alternative, Packing, joined
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter


class AfterPrompt(Packing):
    """A function of a text of which the first tokens are a prompt: none, unless it is said."""

    def __init__(self, function: Callable[..., Any], name: str, arrays: Sequence[str]) -> None:
        super().__init__(function, lambda given: given)
        self._name, self._arrays = name, arrays

    def __call__(self, **given: Any) -> Any:
        """The output of all tokens; where it returns none of the prompt's, they are no answer."""
        length = given.pop(self._name, None)
        if length is not None:
            return self._whole(given, int(length))
        try:
            return self._whole(given, 0)
        except Exception:  # some need a token to begin with
            return self._whole(given, 1)

    def _whole(self, given: dict[str, Any], length: int) -> Any:
        result = self.__wrapped__(**given, **{self._name: length})
        out = result[0] if isinstance(result, tuple | list) else result
        first = given[self._arrays[0]]
        fewer = [
            n
            for n, (own, one) in enumerate(zip(out.shape, first.shape, strict=False))
            if own == one - length
        ]
        if not length or not fewer or out.shape[fewer[0]] == first.shape[fewer[0]]:
            return result
        axis = fewer[0]
        whole = given[self._arrays[-1]]  # the first token sees its own value alone
        rows = np.take(np.asarray(whole), range(length), axis)
        for n, size in enumerate(out.shape):
            if n != axis and rows.shape[n] != size:
                rows = rows.repeat(size // rows.shape[n], n)
        begin = out.new_tensor(rows) if hasattr(out, "new_tensor") else rows.astype(str(out.dtype))
        return joined([begin, out], axis)


def with_prompt(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function without the length of its prompt, if it takes one."""
    own = next((one for one in parameters if role_of(one.name) == "prompt"), None)
    arrays = [one.name for one in parameters if role_of(one.name) in ("query", "x", "value")]
    if own is None or not arrays:
        return None
    rest = [
        replace(one, keyword=True)
        if one is not own
        else replace(one, role="prompt", required=False, keyword=True)
        for one in parameters
    ]
    return AfterPrompt(function, own.name, arrays), rest

"""Functions of heads, made of functions of one token whose heads lie one after the other.

Queries (H·D,) meet caches (T, G·D), as in small runtimes. Must not know any probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.packing import Alternative, Packing, joined, stacked
from regard.diagnosis.reading.documented import documented_axes, letters_of
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter, text_of

ARRAYS = ("query", "key", "value")
CACHES = {"cache_k": "key", "cache_v": "value"}


class OneByOne(Packing):
    """A function that gets one query after the other."""

    def __call__(self, **given: Any) -> Any:
        """Call the function for each query."""
        calls: Any = self._pack(given)
        return self._unpack([self.__wrapped__(**one) for one in calls])


def with_flat_token(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function of arrays (heads, L, D), if it takes one token, its position and caches.

    The caches have a slot more than there are tokens.
    """
    roles = {one.name: role_of(one.name) or "" for one in parameters}
    names = {CACHES.get(role, role): name for name, role in roles.items()}
    if not {*ARRAYS, "pos", "heads"} <= names.keys():
        return None
    query, *caches = own = [names[role] for role in ARRAYS]
    axes = letters_of(documented_axes(text_of(function), own)) or {}
    if [len(axes.get(name, "")) for name in own] != [1, 2, 2]:
        return None

    def flat(heads: Any) -> Any:
        rows = heads.swapaxes(0, 1)
        return rows.reshape(len(rows), -1)

    def pack(given: dict[str, Any]) -> Any:
        groups, length, _ = given[caches[0]].shape
        sizes = {"heads": len(given[query]), "key_heads": groups, "pos": length - 1}
        fixed = {names[one]: size for one, size in sizes.items() if one in names}
        fixed |= {n: joined([rows := flat(given[n]), rows[:1]], 0) for n in caches}
        state["heads"] = len(given[query])
        return (given | fixed | {query: one} for one in flat(given[query]))

    def unpack(results: list[Any]) -> Any:
        whole = stacked(results, 0)
        return whole.reshape(len(whole), state["heads"], -1).swapaxes(0, 1)

    state: dict[str, int] = {}
    sizes = [names.get(role) for role in ("heads", "key_heads", "pos")]
    rest = [replace(p, keyword=True) for p in parameters if p.name not in sizes]
    return OneByOne(function, pack, unpack), rest

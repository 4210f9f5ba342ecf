"""Functions that get the arrays of earlier keys and values as two arguments, beside embeddings.

They fill them in place, or return longer or other ones. Must not know any probe.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.caches import LONGEST_CACHE, Remembering, size_of
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter


class KeepingArrays(Remembering):
    """A function with two arrays of its own between the calls of a question."""

    def __init__(self, function: Callable[..., Any], names: Mapping[str, str]) -> None:
        super().__init__(function, "")
        self._names = names  # by role
        self._arrays: tuple[Any, Any] | None = None
        self._shape: dict[tuple[int, ...], int] = {}  # the kind that runs, by that of the tokens

    @property
    def is_pure(self) -> bool:
        """Whether a call leaves nothing behind."""
        return False

    def begin(self) -> None:
        """Forget every earlier call."""
        self._arrays = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function with what earlier calls have left."""
        if self._arrays is None:
            self._arrays = self._first(named)
        result, self._arrays = self._called(named, self._arrays)
        return result

    def _called(self, named: Mapping[str, Any], arrays: tuple[Any, Any]) -> tuple[Any, Any]:
        keys, values = (self._names[one] for one in ("cache_k", "cache_v"))
        result = self.__wrapped__(**named, **{keys: arrays[0], values: arrays[1]})
        out, *more = result if isinstance(result, tuple) else (result,)
        if len(more) == 1 and isinstance(more[0], tuple):
            more = [*more[0]]
        later = [one for one in more if getattr(one, "ndim", 0) == arrays[0].ndim]
        return out, (later[0], later[1]) if len(later) == 2 else arrays

    def _first(self, named: Mapping[str, Any]) -> tuple[Any, Any]:
        """Empty arrays in the first of the shapes with which the function runs."""
        x = named[self._names["x"]]
        shapes = [*self._shapes(named)]
        if x.shape not in self._shape:
            for number, shape in enumerate(shapes):
                with contextlib.suppress(Exception):
                    arrays = _zeros(x, shape), _zeros(x, shape)
                    _, later = self._called(copy.deepcopy(dict(named)), arrays)
                    if size_of(later) in (size_of(arrays), size_of(arrays) + self._added(named)):
                        if 0 < size_of(arrays) < size_of(later):
                            continue  # it grows: rows of zeros would be keys
                        self._shape[x.shape] = number
                        break
        shape = shapes[self._shape.get(x.shape, 0)]
        return _zeros(x, shape), _zeros(x, shape)

    def _added(self, named: Mapping[str, Any]) -> int:
        """How many numbers the keys and values of the new tokens have."""
        x = named[self._names["x"]]
        return sum(
            int(np.prod(tuple(x.shape[:-1]))) * named[self._names[one]].shape[-1]
            for one in ("W_k", "W_v")
        )

    def _shapes(self, named: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
        x, matrix = (named[self._names[one]] for one in ("x", "W_k"))
        heads = [named[self._names[n]] for n in ("key_heads", "heads") if n in self._names]
        lead = tuple(x.shape[:-1])
        leads = dict.fromkeys((lead, lead[:-1] if lead[-1:] == (1,) else lead))
        widths = dict.fromkeys(int(one) for one in matrix.shape[::-1])
        for rows, own, width in itertools.product((LONGEST_CACHE, 0), leads, widths):
            for count in heads:
                if width % count == 0:
                    yield (*own, rows, count, width // count)
                    yield (*own, count, rows, width // count)
            yield (*own, rows, width)


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(like, "new_zeros"):
        return like.new_zeros(shape)
    made = np.zeros(shape, str(like.dtype))
    return made if isinstance(like, np.ndarray) else like.__array_namespace__().asarray(made)


def with_kept_arrays(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> tuple[KeepingArrays, list[Parameter]] | None:
    """The function without the arrays of earlier keys and values, if it has weights and these."""
    named = {one.role or role_of(one.name) or "": one.name for one in parameters}
    needed = {"x", "cache_k", "cache_v", *PROJECTIONS}
    if not needed <= named.keys():
        return None
    if not all(one.required for one in parameters if one.name in map(named.get, needed)):
        return None
    apart = (named["cache_k"], named["cache_v"])
    rest = [replace(one, keyword=True) for one in parameters if one.name not in apart]
    return KeepingArrays(function, named), rest


def with_arrays_in_one(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that gets arrays of earlier keys and values, as one of one cache.

    One of embeddings need not get them; those of ready queries, keys and values may have to.
    """
    named = {one.role or role_of(one.name): one for one in parameters}
    apart = [named[one] for one in ("cache_k", "cache_v") if one in named]
    needed = len(apart) == 2 and all(one.required for one in apart)
    is_ready = {"query", "key", "value"} <= named.keys() and not {"pos", "lengths"} & named.keys()
    if len(apart) != 2 or not (is_ready if needed else "x" in named):
        return None
    keys, values = (one.name for one in apart)
    both = Parameter(f"{keys}_and_{values}", "cache", required=needed)

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        given = dict(given)
        cache = given.pop(both.name, None) or (None, None)
        return given | dict(zip((keys, values), cache, strict=True))

    rest = [replace(one, role=one.role or role_of(one.name)) for one in parameters]
    known = [both if one.name == keys else one for one in rest if one.name != values]
    return Packing(function, pack), [replace(one, keyword=True) for one in known]

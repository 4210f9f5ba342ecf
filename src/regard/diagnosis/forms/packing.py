"""Functions of queries, keys and values, made of functions that take them packed.

Queries, keys and values in one array, or keys and values in pages. Must not know any probe.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from regard.diagnosis.forms.adapting import unread_of
from regard.diagnosis.forms.caches import annotated, fields_of
from regard.diagnosis.forms.source import code_called, code_of_file
from regard.diagnosis.forms.three_in_one import apart, three_wide
from regard.diagnosis.reading.documented import documented_axes, is_of_tokens
from regard.diagnosis.reading.parameter_names import is_upstream, plain, role_of
from regard.diagnosis.reading.signature import PROJECTIONS, Parameter, text_of

QKV = re.compile("^(x|in|mixed|fused|packed)?qkv(s|packed|proj|tensor|layer|states|heads)?$")
KV = re.compile("^(x|mixed|fused|packed)?kv(s|packed|heads)?$")
PAGED_KEYS = re.compile("^(k|key)s?_?(cache|pages?|pool|blocks|buffer|paged|cached)", re.IGNORECASE)
PAGED_VALUES = re.compile(
    "^(v|value)s?_?(cache|pages?|pool|blocks|buffer|paged|cached)", re.IGNORECASE
)
TABLE = re.compile("(block|page)s?_?(table|index|indices|ids|idx|map|list)", re.IGNORECASE)
# Queries with an axis of groups and one of the heads in a group: "qhmd" beside "khd".
GROUPED = re.compile(
    r"""["'][a-z]*(hm|hg|hr|gm|gh|gr|kg|nm)d *, *[a-z]*[hgkn]d\b|"""
    r"\w+, *\w*head\w*, *(q_mult|\w*mult|n_rep|q_per_kv|groups?_size), *\w+ *= *\w+\.shape"
)
OF_PAGES = re.compile("(PAGE|BLOCK|PAGE_LEN)(_?SIZE)?$|(TOKENS|SLOTS)_PER_(PAGE|BLOCK)$")
PAGE = 5  # tokens in a page: a short text of a probe has one, a long one many
# Where three arrays of equal shape are put together: side by side, or along a new axis.
PLACES: tuple[int | None, ...] = (-3, None, 0, 1)
# Code, or its text, of columns of one head after the other.
BY_HEAD = re.compile(r"\b(\w*heads?|nh|h|n) *, *3 *[,)*]|(per|each|every) head", re.IGNORECASE)
# How long the texts of queries, or of keys, are: q_lens, seqlens_q, kv_lengths.
LENGTHS_OF_SIDE = re.compile(
    "^(?:(q|query|queries)_?(?:seq)?(?:lens|lengths)|(?:seq)?(?:lens|lengths)(q)|"
    "(k|kv|key|keys)_?(?:seq)?(?:lens|lengths)|(?:seq)?(?:lens|lengths)(k|kv))$"
)
Alternative = tuple[Callable[..., Any], list[Parameter]]


class Packing:
    """A function of arrays that packs them as another takes them.

    `__wrapped__` is the function itself, so that its library is found.
    """

    left_out: tuple[str, ...] = ()  # what is fixed so that it changes nothing
    option = ""  # which of its readings are judged apart
    by_head: bool | None = None  # whether a fused matrix has one head's columns after another's
    unread: tuple[str, ...] = ()  # arguments that the code never reads

    def __init__(
        self,
        function: Callable[..., Any],
        pack: Callable[..., dict[str, Any]],
        unpack: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self._pack, self._unpack = pack, unpack

    def __call__(self, **given: Any) -> Any:
        """Call the function."""
        return self._unpack(self.__wrapped__(**self._pack(given)))


def with_borders(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that takes how long each text of queries and of keys is, as one of borders."""
    roles = {"query": "borders", "key": "key_borders"}
    names = {one.name: roles[side] for one in parameters if (side := _side_of_lengths(one.name))}
    if "borders" not in names.values():
        return None
    known = [
        replace(one, role=names[one.name], keyword=True) if one.name in names else one
        for one in parameters
    ]

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        lengths = {n: np.diff(np.asarray(given[n])).tolist() for n in names if n in given}
        return given | lengths

    return Packing(function, pack), [replace(one, keyword=True) for one in known]


def _side_of_lengths(name: str) -> str:
    own = LENGTHS_OF_SIDE.search(plain(name))
    return "" if own is None else "query" if own[1] or own[2] else "key"


# How far a query sees beyond its own place.
LOOK_AHEAD = re.compile("^(look_?ahead|n?_?right|right_context|ahead|window_?right)$", re.I)


def with_one_window(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that takes how far a window reaches to the left and to the right, as one of keys.

    It does not reach to the right where a flag makes attention causal.
    """
    pair = next((one for one in parameters if _is_window_of_two(one)), None)
    if pair is None:
        return None
    flags = [one.name for one in parameters if role_of(one.name) == "causal"]

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        if type(count := given.get(pair.name)) is int:
            causal = any(given.get(one) for one in flags)
            given = {**given, pair.name: (count - 1, 0 if causal else count - 1)}
        return given

    known = [replace(one, default=None) if one is pair else one for one in parameters]
    return Packing(function, pack), [replace(one, keyword=True) for one in known]


def with_two_sides(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that takes both sides of a window apart, the right one too, as one of a window."""
    after = next((one for one in parameters if LOOK_AHEAD.search(one.name)), None)
    before = next((one for one in parameters if role_of(one.name) == "window"), None)
    if before is None or after is None or after.default == 0 or before is after:
        return None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        count = given.get(before.name)
        return given if count is None else {**given, after.name: count}

    known = [replace(one, keyword=True) for one in parameters if one is not after]
    return Packing(function, pack), known


def with_half_windows(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function whose window has half of its keys on either side, as one of keys on each."""
    one = next((one for one in parameters if role_of(one.name) == "window"), None)
    if one is None or not re.search(rf"\b{re.escape(one.name)} *// *2\b", text_of(function)):
        return None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        count = given.get(one.name)
        return {**given, one.name: 2 * (count - 1)} if type(count) is int else given

    return Packing(function, pack), [replace(p, keyword=True) for p in parameters]


def with_texts_of_both(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """A function that takes the texts of queries and keys in a pair, as one of the same texts."""
    for one in parameters:
        kind = annotated(function, one.name)
        if role_of(one.name) == "segments" and len([*fields_of(kind)]) == 2:
            break
    else:
        return None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        texts = given.get(one.name)
        return given if texts is None else {**given, one.name: kind(texts, texts)}

    return Packing(function, pack), [replace(p, keyword=True) for p in parameters]


# What tells padding from tokens: `ids != 0`, `tokens.eq(PAD)`.
COMPARED = r"(?<![\w.]){name}\b\s*(?:[!=]=|\.(?:eq|ne)\()\s*(?:self\.)?(\w+)"
PADDING = re.compile("(^|_)pad", re.IGNORECASE)
IDENTIFIERS = re.compile(r"(^|_)(ids?|idx|tokens|items?|words|seqs?|log_seqs)$", re.IGNORECASE)


def with_ids(function: Callable[..., Any], parameters: Sequence[Parameter]) -> Alternative | None:
    """A function that takes tokens' numbers, of which one is padding, as one of a mask."""
    text = code_of_file(function)
    for one in parameters[1:]:
        compared = re.search(COMPARED.format(name=re.escape(one.name)), text)
        is_said = compared and (IDENTIFIERS.search(one.name) or PADDING.search(compared[1]))
        if compared and is_said and role_of(one.name) in (None, "x", "context"):
            padding = _number_named(compared[1], text)
            break
    else:
        return None
    if padding is None:
        return None

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        keep = given.get(one.name)  # True for what is no padding
        return given if keep is None else {**given, one.name: keep * 3 + padding}

    named = [replace(p, keyword=True, role="key_keep" if p is one else p.role) for p in parameters]
    return Packing(function, pack), named


def _number_named(word: str, text: str) -> int | None:
    """A number, or what a name is set to in code: PAD = 1, pad_id=0, pad_id: int = 0."""
    if word.isdigit():
        return int(word)
    said = re.search(rf"\b{re.escape(word)}\s*(?::\s*int)?\s*=\s*(\d+)", text)
    return int(said[1]) if said else None


def _is_window_of_two(one: Parameter) -> bool:
    return (
        role_of(one.name) == "window" and isinstance(one.default, tuple) and len(one.default) == 2
    )


def unpacked(function: Callable[..., Any], parameters: Sequence[Parameter]) -> list[Alternative]:
    """Every way in which a function may take its arrays packed; none if its names say nothing."""
    required = {plain(one.name): one for one in parameters if one.required}
    whole = next((one for name, one in required.items() if QKV.match(name)), None)
    text = f"{text_of(function)}\n{code_called(function)}"
    whole = whole or three_wide(text, [*required.values()])
    if whole is not None:
        return _of_parts(function, parameters, whole, ("query", "key", "value"))
    if (parts := _in_parts(function, parameters)) is not None:
        return [parts]
    if (grouped := _grouped(function, parameters)) is not None:
        return grouped
    if (paged := _paged(function, parameters)) is not None:
        return paged
    keys = next((one for name, one in required.items() if KV.match(name)), None)
    if keys is not None and any(role_of(one.name) == "query" for one in parameters):
        both = _of_parts(function, parameters, keys, ("key", "value"))
        return [*both, (function, [*parameters])]
    return []


def _in_parts(function: Callable[..., Any], parameters: Sequence[Parameter]) -> Alternative | None:
    """With arrays that the code takes out of one argument, such as q, k, v = inputs.

    Or the matrices of each head, as in: for W_q, W_k, W_v in heads.
    """
    text = text_of(function)
    for one in parameters:
        listed = r"(\w+(?:\s*,\s*\w+)+)"
        taken = re.search(rf"^\s*\(?{listed}\)?\s*=\s*{one.name}\s*$", text, re.MULTILINE)
        looped = re.search(rf"\bfor\s+\(?{listed}\)?\s+in\s+{one.name}\b", text)
        if not one.required or (match := taken or looped) is None:
            continue
        words = re.findall(r"\w+", match[1])
        roles = [role_of(word) or "" for word in words]
        wanted = {"query", "key", "value"} if taken else {*PROJECTIONS}
        if not wanted <= {*roles} or not all(roles):
            continue
        inner = [
            Parameter(f"{one.name}_{word}", role, keyword=True)
            for word, role in zip(words, roles, strict=True)
        ]
        pack: Callable[..., dict[str, Any]] = partial(_together, one.name, [x.name for x in inner])
        if not taken:
            inner.append(Parameter(f"{one.name}_count", "heads", keyword=True))
            pack = partial(_of_heads, one.name, [x.name for x in inner])
        rest = [replace(x, keyword=True) for x in parameters if x is not one]
        return Packing(function, pack), [*inner, *rest]
    return None


def _together(name: str, parts: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Several arguments as a tuple."""
    return given | {name: tuple(given.pop(part) for part in parts)}


def _of_heads(name: str, parts: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Matrices whose columns are those of several heads as a list with those of each."""
    *arrays, heads = (given.pop(part) for part in parts)
    wide = [one.shape[-1] // heads for one in arrays]
    return given | {
        name: [
            tuple(one[..., n * w : (n + 1) * w] for one, w in zip(arrays, wide, strict=True))
            for n in range(heads)
        ]
    }


def _grouped(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> list[Alternative] | None:
    """With queries (L, G, H/G, D) for keys (S, G, D), if its code or documentation says so."""
    names = {role_of(one.name): one.name for one in parameters if one.required}
    if not {"query", "key", "value"} <= names.keys():
        return None
    text = text_of(function)
    axes = documented_axes(text, [one.name for one in parameters])
    place = _axis_in_a_group(*(axes.get(names[one], ()) for one in ("query", "key")))
    if place is None and not GROUPED.search(text):
        return None
    place = -2 if place is None else place
    flat_sink = len(axes.get(names.get("sink", ""), ())) == 1

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        own = dict(given)
        q, groups = own[names["query"]], own[names["key"]].shape[place]
        at = place % q.ndim
        own[names["query"]] = q.reshape(*q.shape[:at], groups, -1, *q.shape[at + 1 :])
        if "sink" in names and not flat_sink:
            own[names["sink"]] = own[names["sink"]].reshape(groups, -1)
        return own

    def unpack(result: Any) -> Any:
        out, *more = result if isinstance(result, tuple) else (result,)
        if out.ndim > 3:  # (L, G, H/G, D) as (L, H, D)
            at = place % (out.ndim - 1)
            out = out.reshape(*out.shape[:at], -1, *out.shape[at + 2 :])
        return (out, *more) if more else out

    packed = (Packing(function, pack, unpack), [replace(one, keyword=True) for one in parameters])
    return [packed, (function, [*parameters])]


def _axis_in_a_group(queries: Sequence[str], keys: Sequence[str]) -> int | None:
    """Which axis of keys is that of heads, after which queries have one more: heads of a group.

    It is counted from the end.
    """
    if len(queries) != len(keys) + 1 or len(keys) < 3 or queries[-1] != keys[-1]:
        return None
    shared = [word for word in queries if word in keys]
    more = [place for place, word in enumerate(queries) if word not in keys]
    for place in more[::-1]:
        rest = [*queries[:place], *queries[place + 1 :]]
        alike = [
            a == b or (is_of_tokens(a) and is_of_tokens(b)) for a, b in zip(rest, keys, strict=True)
        ]
        if place and all(alike) and queries[place - 1] in shared and len(shared) > 1:
            return place - 1 - len(keys)
    return None


def _of_parts(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    whole: Parameter,
    parts: Sequence[str],
) -> list[Alternative]:
    """With one array put together of several."""
    names = {f"{whole.name}_{part}": part for part in parts}
    inner = [Parameter(name, role, keyword=True) for name, role in names.items()]
    rest = [replace(one, keyword=True) for one in parameters if one is not whole]

    heads = next((one for one in parameters if role_of(one.name) == "heads"), None)

    def pack(place: int | str | None, given: dict[str, Any]) -> dict[str, Any]:
        own = dict(given)
        arrays = [own.pop(name) for name in names]
        if place == "by head" and heads is not None:
            together = side_by_side(arrays, -1, own.get(heads.name, heads.default))
        elif isinstance(place, int):
            together = stacked(arrays, place)
        else:
            together = joined(arrays, -1)
        return own | {whole.name: together}

    places: list[int | str | None] = [*PLACES]
    if heads is not None:
        first = BY_HEAD.search(text_of(function)) is not None
        places.insert(0 if first else len(places), "by head")
    # The result of a backward pass is as the argument.
    backward = len(parts) == 3 and any(is_upstream(one.name) and one.required for one in rest)
    found = list[Alternative]()
    for place in places:
        parted = [] if isinstance(place, str) or not backward else [partial(apart, place)]
        found.append((Packing(function, partial(pack, place), *parted), [*inner, *rest]))
    return found


def joined(arrays: Sequence[Any], axis: int) -> Any:
    """Arrays side by side along an axis."""
    first = arrays[0]
    if hasattr(first, "new_zeros"):
        import torch

        return torch.cat([*arrays], axis)
    return _library_of(first).concatenate(arrays, axis)


def side_by_side(arrays: Sequence[Any], axis: int, heads: int | None) -> Any:
    """Weights or biases side by side; those of one head after the other, if so many are given."""
    if len(arrays) == 1:
        return arrays[0]
    axis = axis if np.ndim(arrays[0]) > 1 else -1
    if not heads:
        return joined(arrays, axis)
    if axis == 0:
        parts = [one.reshape(heads, 1, -1, one.shape[-1]) for one in arrays]
        return joined(parts, 1).reshape(-1, arrays[0].shape[-1])
    lead = arrays[0].shape[:-1]
    return joined([one.reshape(*lead, heads, 1, -1) for one in arrays], -2).reshape(*lead, -1)


def stacked(arrays: Sequence[Any], axis: int) -> Any:
    """Arrays along a new axis."""
    first = arrays[0]
    if hasattr(first, "new_zeros"):
        import torch

        return torch.stack([*arrays], axis)
    return _library_of(first).stack(arrays, axis)


def _library_of(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    import jax.numpy

    return jax.numpy


def _paged(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> list[Alternative] | None:
    """With keys and values (B, S, H, D) put into pages that lie in another order."""
    keys, values, table = (
        next((one for one in parameters if pattern.match(one.name)), None)
        for pattern in (PAGED_KEYS, PAGED_VALUES, TABLE)
    )
    if keys is None or values is None or table is None:
        return None
    sizes = [one for one in parameters if role_of(one.name) == "block"]
    inner = [
        Parameter("pages_of_keys", "key", keyword=True),
        Parameter("pages_of_values", "value", keyword=True),
    ]
    own = (keys, values, table, *sizes)
    counted = any(_counts(one.name) and one.required for one in parameters)
    page = PAGE if sizes else _page_of(function)
    rest = [
        replace(one, keyword=True, role="lengths" if _counts(one.name) else None)
        for one in parameters
        if one not in own
    ]

    def pack(heads_first: bool, filled_up: bool, given: dict[str, Any]) -> dict[str, Any]:
        own = dict(given)
        k, v = own.pop("pages_of_keys"), own.pop("pages_of_values")
        is_one = k.ndim == 3  # a single text, (S, H, D)
        batch, length = (1, *k.shape)[-4:-2] if is_one else k.shape[:2]
        if length % page and not filled_up:
            raise ValueError("the last page of a text is not full")
        count = -(-length // page)
        order = np.random.default_rng(0).permutation(batch * count + 1)[: batch * count]
        places = order.reshape(batch, count)
        own[table.name] = _like(k, places[0] if is_one else places)
        for name, array in ((keys.name, k), (values.name, v)):
            rows = np.asarray(array).reshape(batch, *array.shape[-3:])
            rest = rows.shape[2:]
            filled = np.full((batch, count * page, *rest), 7, rows.dtype)
            filled[:, :length] = rows
            pages = np.full((batch * count + 1, page, *rest), 7, rows.dtype)
            pages[places] = filled.reshape(batch, count, page, *rest)
            own[name] = _like(k, pages.swapaxes(1, 2).copy() if heads_first else pages)
        return own | {one.name: page for one in sizes}

    # What ignores the lengths reads places that are not filled, and is better judged without them.
    ways = itertools.product((True, False) if counted else (False,), (False, True))
    paged = [Packing(function, partial(pack, first, filled_up)) for filled_up, first in ways]
    for one in paged:
        one.unread = unread_of(function, [table.name])
    return [(one, [*rest[:1], *inner, *rest[1:]]) for one in paged]


def _page_of(function: Callable[..., Any]) -> int:
    """The number of tokens in a page, where the file has a constant for it."""
    known = getattr(inspect.unwrap(function), "__globals__", {})
    sizes = (own for name, own in known.items() if OF_PAGES.match(name) and type(own) is int)
    return next((own for own in sizes if 1 < own <= 64), PAGE)


def _counts(name: str) -> bool:
    """Whether a name is that of the number of tokens in each text."""
    return role_of(name) == "lengths" or re.search("len|num_tok|n_tok", name) is not None


def _like(like: Any, array: Any) -> Any:
    if hasattr(like, "new_zeros"):
        import torch

        return torch.from_numpy(array)
    if isinstance(like, np.ndarray):
        return array
    import jax.numpy as jnp

    return jnp.asarray(array)

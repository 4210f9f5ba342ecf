"""A call of attention cut along batch, heads, queries and keys, for more than one machine.

Owns which part of every option a part of a call takes, which parts see nothing, and how the states
of rows go from one part of the keys to the next. With parts that begin at multiples of `CHUNK`
keys, merged in order, the bytes are those of one call. Must not know who computes the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.boundary.arguments import as_int, as_integers
from regard.boundary.arrays import Array
from regard.compute import dispatch
from regard.compute.kernels import fused
from regard.compute.kernels.fused import CHUNK
from regard.compute.options import Options
from regard.compute.positioned import Places, Rotation, as_places
from regard.compute.request import Request, check_options, make_request
from regard.compute.visibility import All, AnyOf, Boolean, Combined, Mask
from regard.errors import OptionError, ShapeError
from regard.masks import Causal, Lengths, Segments, Window
from regard.positions import Alibi, RelativeBias, Rotary

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CHUNK", "Part", "Place", "Plan", "carry", "end", "merge", "part_of", "plan", "refused"]


class Place(NamedTuple):
    """Where a part is: slices of the leading axes, of key heads, of queries and of keys."""

    batch: tuple[slice, ...]
    heads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True, eq=False)
class Part:
    """The options of a part of a call; its arrays come when it is computed."""

    request: Request  # arrays without a number, of the right dtypes; no positions
    positions: Places  # of its queries, for masks
    query_places: Places | None = None  # of a rotation
    key_places: Places | None = None

    def of(self, query: Array, key: Array, value: Array, extras: dict[str, Array]) -> Request:
        """The part as a request of its own; `extras` has a mask and a bias for its cells."""
        rules = self.request.options.mask
        if "mask" in extras:
            mask = Boolean(extras["mask"])
            rules = mask if rules is None else rules & mask
        bias = extras.get("bias", self.request.options.bias)
        options = self.request.options._replace(mask=rules, bias=bias)
        if isinstance(options.positions, Rotary):
            places = {"query_positions": self.query_places, "key_positions": self.key_places}
            given: dict[str, Any] = {
                name: np.asarray(one, np.float64) for name, one in places.items()
            }
            turned = Rotary(
                interleaved=options.positions.interleaved,
                frequencies=options.positions.frequencies,
                attention_factor=options.positions.factor,
                **given,
            )
            options = options._replace(positions=turned)
        request = replace(self.request, query=query, key=key, value=value, options=options)
        positions = np.broadcast_to(np.asarray(self.positions), (*request.lead, query.shape[-2]))
        return dispatch.without_positions(replace(request, query_positions=positions))


def refused(request: Request) -> str | None:
    """Why a call cannot be computed in parts of its keys, or None."""
    if request.options.return_weights:
        return "weights take a number for each pair; ask for some rows of them"
    return fused.supports(request)


# --- calls without arrays ---------------------------------------------------------------------


def hollow(array: Any) -> Array:
    """An array of the same shape and dtype without memory, for the checks of a call."""
    return np.asarray(np.broadcast_to(np.zeros((), array.dtype), array.shape))


def has_cells(array: Any) -> bool:
    """Whether a mask or a bias has cells for queries and keys, which go along with the keys."""
    shape = getattr(array, "shape", ())
    return len(shape) > 1 and min(shape[-2:]) > 1


def without_cells(request: Request, cells: Mapping[str, Any], options: Any) -> Request:
    """The call without a mask and a bias of cells: they go to the parts with their keys."""
    if "mask" in cells:
        given = {n: options[n] for n in ("causal", "window", "offset") if n in options}
        rest, _ = check_options(request.shape, len(request.shape), Options(**given))
        request = request.with_options(mask=rest["mask"])
    if "bias" in cells:
        request = request.with_options(bias=np.zeros((1, 1), cells["bias"].dtype))
    return request


# --- what a part takes -----------------------------------------------------------------------


def part_of(request: Request, place: Place) -> Part:
    """The part of a call at a place, with every option cut to it."""
    groups = request.key.shape[-3]
    shared = request.query.shape[-3] // groups if groups else 1
    heads = slice(place.heads.start * shared, place.heads.stop * shared)
    arrays: dict[str, Any] = {
        name: np.empty((0, 0, 0), getattr(request, name).dtype)
        for name in ("query", "key", "value")
    }
    options, places = request.options, {}
    mask, bias, sink, positions = options.mask, options.bias, options.sink, options.positions
    if isinstance(positions, Rotary):
        rotation = Rotation.of(positions, request)
        places = {
            "query_places": _places(rotation.places["query"], place.batch, place.rows),
            "key_places": _places(rotation.places["key"], place.batch, place.keys),
        }
        positions = Rotary(
            interleaved=positions.interleaved,
            frequencies=rotation.frequencies,
            attention_factor=positions.factor,
        )
    elif isinstance(positions, Alibi):
        positions = Alibi(positions.slopes_of(request.shape[-3])[heads])
    elif isinstance(positions, RelativeBias):
        positions = _with_table(positions, positions.table[heads])
    options = options._replace(
        mask=None if mask is None else _rule(mask, place, heads),
        bias=None if bias is None else _cells(bias, place, heads),
        sink=None if sink is None else np.array(sink[(*place.batch, heads)]),
        positions=positions,
        out=None,
    )
    nowhere = np.empty(0, np.int64)
    cut = replace(
        request,
        **arrays,
        options=options,
        query_positions=nowhere,
        has_heads=True,
        has_rows=True,
    )
    return Part(cut, as_places(_positions(request, place) - place.keys.start), **places)


def _with_table(positions: RelativeBias, table: Array) -> RelativeBias:
    return RelativeBias(
        table, bidirectional=positions.bidirectional, max_distance=positions.max_distance
    )


def _places(places: Places, batch: tuple[slice, ...], rows: slice) -> Places:
    if isinstance(places, range) or places.ndim == 1:
        return places[rows]
    return np.asarray(places[(*batch, rows)])


def _cells(array: Array, place: Place, heads: slice) -> Array:
    """The part of what broadcasts to (…, H, L, S)."""
    axes = (*place.batch, heads, place.rows, place.keys)
    own = axes[len(axes) - array.ndim :]
    return array[tuple(s if n > 1 else slice(None) for s, n in zip(own, array.shape, strict=True))]


def _lead(array: Array, batch: tuple[slice, ...]) -> Array:
    own = batch[len(batch) - array.ndim :] if array.ndim else ()
    return array[tuple(s if n > 1 else slice(None) for s, n in zip(own, array.shape, strict=True))]


def _rule(rule: Mask, place: Place, heads: slice) -> Mask:
    """The rule for the part's own rows and keys, both counted from 0, as its positions are."""
    keys = place.keys
    match rule:
        case Combined():
            return replace(rule, parts=tuple(_rule(one, place, heads) for one in rule.parts))
        case Boolean():
            return replace(rule, array=_cells(rule.array, place, heads))
        case Lengths():
            lengths = _lead(rule.lengths, place.batch) - keys.start
            return Lengths(np.clip(lengths, 0, keys.stop - keys.start))
        case Segments():
            sides = ((rule.query, place.rows), (rule.key, keys))
            return Segments(*(array[(*_own(array, place.batch), rows)] for array, rows in sides))
    return rule


def _own(array: Array, batch: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices of the leading axes (…, n) that an array has itself."""
    own = batch[len(batch) - (array.ndim - 1) :] if array.ndim > 1 else ()
    return tuple(s if n > 1 else slice(None) for s, n in zip(own, array.shape, strict=False))


def may_see(request: Request, place: Place) -> bool:
    """False where a rule by position, length, segment or array hides all keys from all rows."""
    positions = _positions(request, place)
    if not positions.size:
        return False
    reach = int(positions.min()), int(positions.max())
    return request.options.mask is None or _may_see(request.options.mask, request, place, reach)


def _positions(request: Request, place: Place) -> NDArray[np.int64]:
    return np.asarray(request.query_positions[(*place.batch, place.rows)])


def _may_see(rule: Mask, request: Request, place: Place, positions: tuple[int, int]) -> bool:
    keys = place.keys
    match rule:
        case All():
            return all(_may_see(one, request, place, positions) for one in rule.parts)
        case AnyOf():
            return any(_may_see(one, request, place, positions) for one in rule.parts)
        case Causal():
            return bool(keys.start <= positions[1])
        case Window():
            after = rule.left is not None and keys.stop - 1 < positions[0] - rule.left
            before = rule.right is not None and keys.start > positions[1] + rule.right
            return not (after or before)
        case Lengths():
            return bool((_lead(rule.lengths, place.batch) > keys.start).any())
        case Segments():
            own = _rule(rule, place, slice(0, 0))
            assert isinstance(own, Segments)
            return bool(own.query.max() >= own.key.min() and own.query.min() <= own.key.max())
        case Boolean():
            groups = request.key.shape[-3]
            shared = request.query.shape[-3] // groups
            heads = slice(place.heads.start * shared, place.heads.stop * shared)
            return bool(_cells(rule.array, place, heads).any())
    return True


# --- states ----------------------------------------------------------------------------------


def no_states(request: Request) -> Array:
    """States to begin with: none."""
    call = (*request.shape[:-1], 3 + request.value.shape[-1])
    far = request.options.scale and not 1e-30 < abs(request.options.scale) < 1e30
    return np.empty((0, *call), np.float64 if far else request.accumulator)


def carry(request: Request, before: Array | None = None, *, apart: bool = False) -> Array:
    """The states (…, H, L, 3 + E) of all rows after these keys; `before` are those after others.

    With `apart` those of every chunk of 256 keys alone, (chunks, …, H, L, 3 + E).
    """
    known = no_states(request) if before is None else before[None]
    return fused.carry(request, known, apart=apart)


def merge(request: Request, states: Sequence[Array]) -> Array:
    """The states (…, H, L, 3 + E) of parts, each (parts, …, H, L, 3 + E), merged in their order."""
    return fused.carry(_without_keys(request), np.concatenate(states))


def finish(request: Request, states: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Output (…, H, L, E), lse (…, H, L), and which rows need all their keys again."""
    return fused.finish(_without_keys(request), states)


def _without_keys(request: Request) -> Request:
    """The call with no keys: states need what makes numbers of scores, and the sink."""
    none = {name: getattr(request, name)[..., :0, :] for name in ("key", "value")}
    bias = request.options.bias
    bias = None if bias is None else np.zeros((1, 0), bias.dtype)
    return replace(request, **none, options=request.options._replace(mask=None, bias=bias))


def of_no_keys(part: Part, widths: tuple[int, int], query: Array) -> Request:
    """The part as a call of its queries and of no key; `widths` are those of key and value."""
    groups = max(1, query.shape[-3])
    types = (part.request.key.dtype, part.request.value.dtype)
    key, value = (
        np.empty((*query.shape[:-3], groups, 0, width), dtype)
        for width, dtype in zip(widths, types, strict=True)
    )
    plain = part.request.with_options(mask=None, positions=None)
    return Part(plain, part.positions).of(query, key, value, {})


def end(
    part: Part,
    widths: tuple[int, int],
    query: Array,
    states: Sequence[Array],
    read: Callable[[], dict[str, Array]],
) -> tuple[Array, Array]:
    """Output (…, H, L, E) and lse (…, H, L) of a part with all keys, from their states.

    `states` are (parts, …, H, L, 3 + E) each. `read` gives the keys and values, and the mask and
    bias of cells, where rows left their range and are made again.
    """
    request = of_no_keys(part, widths, query)
    output, lse, rows = finish(request, np.concatenate([no_states(request), *states]))
    if rows.any():
        arrays = read()
        full = part.of(query, arrays.pop("key"), arrays.pop("value"), arrays)
        make_again(full, rows, output, lse)
    return output, lse


# Rows of one call: more would pack a copy of the keys.
MOST_ROWS = 128


def make_again(request: Request, rows: NDArray[np.bool_], output: Array, lse: Array) -> None:
    """Compute marked rows (…, H, L) from all their keys, into the output and the lse."""
    shared = request.query.shape[-3] // request.key.shape[-3]
    for *batch, head in np.argwhere(rows.any(axis=-1)):
        at, group = (*batch, head), head // shared
        for some in _runs(np.flatnonzero(rows[at])):
            place = Place(
                tuple(slice(b, b + 1) for b in batch),
                slice(group, group + 1),
                some,
                slice(0, request.shape[-1]),
            )
            of_group = (*place.batch, place.heads)
            heads = slice(group * shared, (group + 1) * shared)
            one = part_of(request, place).of(
                request.query[(*place.batch, heads, some)],
                request.key[of_group],
                request.value[of_group],
                {},
            )
            made = fused.run(one.with_options(return_lse=request.options.normalize is None))
            inside = (*(0 for _ in batch), head - group * shared)
            output[(*at, some)] = made.output[inside]
            if made.lse is not None:
                lse[(*at, some)] = made.lse[inside]


def _runs(rows: NDArray[Any]) -> list[slice]:
    """Rows in runs of at most MOST_ROWS, which may have others between them."""
    found: list[slice] = []
    for row in rows.tolist():
        if found and row < found[-1].start + MOST_ROWS:
            found[-1] = slice(found[-1].start, row + 1)
        else:
            found.append(slice(row, row + 1))
    return found


# --- plans -----------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a call is cut, and why."""

    heads: int  # query heads of a block
    rows: int
    keys: int
    tasks: int
    why: str


def plan(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, memory: int, workers: int
) -> Plan:
    """Chunk sizes for arrays of these shapes, so that blocks are long and every worker has some.

    Parameters
    ----------
    query, key, value : sequence of int
        Shapes (…, H, L, D), (…, G, S, D) and (…, G, S, E), computed in float32.
    memory : int
        Bytes that one worker has for its blocks.
    workers : int
        How many tasks run at the same time.

    Returns
    -------
    Plan
        Query heads, queries and keys of a block, the number of tasks, and the reason in words.

    Raises
    ------
    OptionError, ShapeError
        If the shapes do not fit, or the memory does not hold a block of 256 queries and keys.

    Examples
    --------
    >>> plan((8, 32768, 64), (8, 32768, 64), (8, 32768, 64), memory=2**30, workers=2)[:4]
    (1, 4096, 32768, 64)
    """
    memory, workers = as_int("memory", memory, 1), as_int("workers", workers, 1)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, given in {"query": query, "key": key, "value": value}.items():
        sizes = as_integers(name, given, "a shape, an int for each axis")
        shapes[name] = tuple(sizes.reshape(-1).tolist())
        if len(shapes[name]) < 3:
            raise ShapeError(f"{name} is {shapes[name]}; plan needs shapes (…, H, L, D)")
    hollow_arrays = (np.broadcast_to(np.zeros((), np.float32), one) for one in shapes.values())
    request = make_request(*hollow_arrays)
    *lead, heads, length, size = request.shape
    shared = heads // request.key.shape[-3]
    width = request.query.shape[-1] + request.value.shape[-1]
    batch = math.prod(lead) * request.key.shape[-3]

    def needed(rows: int, keys: int) -> int:
        # A block and the next one's keys; a query's rows, states before and after.
        return int(4 * (2 * keys * width + shared * rows * (3 * width + 6)))

    rows, keys = max(min(length, 4096), 1), max(size, 1)
    while rows > 256 and batch * -(-length // rows) < 4 * workers:
        rows //= 2
    while needed(rows, keys) > memory and keys > CHUNK:
        keys = -(-keys // 2 // CHUNK) * CHUNK
    while needed(rows, keys) > memory and rows > 256:
        rows //= 2
    if needed(rows, keys) > memory:
        raise OptionError(
            f"a block of {rows} queries and {keys} keys takes {needed(rows, keys)} bytes, but "
            f"memory is {memory}; give each worker more"
        )
    blocks = batch * -(-length // rows)
    why = (
        f"{blocks} blocks of rows for {workers} workers; a block with {keys} keys takes "
        f"{needed(rows, keys)} of {memory} bytes"
    )
    return Plan(shared, rows, keys, blocks * -(-size // keys), why)

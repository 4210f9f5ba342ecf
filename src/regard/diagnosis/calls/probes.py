"""The probes: small problems that tell mistakes apart.

Owns the inputs of every probe. Sizes differ where a function allows it, so that taking the wrong
one changes the result; numbers are small, so that rounding stays far below any mistake. Must not
know mistakes, nor how a function is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.probe import Probe

ABILITIES = {
    "plain": "as many queries as keys",
    "rectangular": "more keys than queries",
    "heads": "several heads or batch elements at once",
    "grouped": "fewer key heads than query heads",
    "mask": "a mask",
    "key mask": "a mask of padded keys, one for each batch element",
    "causal": "causal",
    "causal rectangular": "causal with more keys than queries",
    "causal and mask": "causal and a mask together",
    "window": "a window",
    "window rectangular": "a window with more keys than queries",
    "cache": "a cache, some tokens at a time",
    "scale": "a scale of the caller's",
    "bias": "a bias that is added to the scores",
    "softcap": "a softcap of the caller's",
    "long": "hundreds of keys",
}


# Queries and keys of a text that several blocks make, the last of them not full. A function that
# takes only as many queries as keys gets the second one.
LONG = ((2, 300), (150, 150))
# A length that windows, blocks, rings and images of the usual sizes divide.
ROUND = 16
AS_LONG = "context as long"  # as what asks, for code that takes no other
# A text whose padding is followed by more tokens, and how many tokens each of its calls has.
PADDED_PREFIX, PREFIX = "cache, padded prefix", (3, 1, 2)
# Only some functions are asked for these.
OF_HEADS, LEFT = "a mask for each head", "padding in front"


def _draw(seed: int, *shape: int) -> Array:
    # Two decimals, so that an example prints every digit of a number.
    return np.random.default_rng(seed).normal(size=shape).round(2)


def ready_probe(
    name: str, ability: str, sizes: tuple[int, int, int, int, int, int, int], seed: int, **more: Any
) -> Probe:
    """A probe with queries, keys and values; `sizes` are (B, H, G, L, S, D, E)."""
    batch, heads, groups, rows, keys, width, value_width = sizes
    inputs = {
        "queries": 1.5 * _draw(seed, batch, heads, rows, width),
        "keys": _draw(seed + 1, batch, groups, keys, width),
        "values": _draw(seed + 2, batch, groups, keys, value_width),
    }
    return Probe(name, ability, inputs, heads, groups, **more)


def probe_with_scores(name: str, ability: str, scores: Array, seed: int, **more: Any) -> Probe:
    """A probe of one head whose scaled scores are exactly these, (L, S)."""
    rows, keys = scores.shape
    queries = np.eye(rows) * np.sqrt(rows)
    inputs = {"queries": queries, "keys": scores.T, "values": _draw(seed, keys, rows)}
    return Probe(name, ability, {n: a[None, None] for n, a in inputs.items()}, **more)


def _along(seed: int, *shape: int) -> Array:
    """Rows in one direction, from far back to far ahead, and some noise.

    As queries and keys they give some rows scores that rise from key to key, and others falling
    ones: a running maximum then changes in every block, or never.
    """
    *lead, rows, width = shape
    direction = np.where(np.arange(width) % 2, -1.0, 1.0)
    ahead = np.linspace(-1.5, 1.5, rows)[:, None] * direction
    return (ahead + 0.3 * np.random.default_rng(seed).normal(size=(*lead, rows, width))).round(2)


def _rising(name: str, ability: str, sizes: tuple[int, ...], seed: int, **more: Any) -> Probe:
    """A probe whose scores rise along some rows and fall along others."""
    probe = ready_probe(name, ability, sizes, seed, **more)  # type: ignore[arg-type]
    shapes = {one: probe.inputs[one].shape for one in ("queries", "keys")}
    rows = {one: _along(seed + n, *shape) for n, (one, shape) in enumerate(shapes.items())}
    return replace(probe, inputs={**probe.inputs, **rows})


def _keep(seed: int, rows: int, keys: int) -> Array:
    """A mask without symmetry whose rows and columns all keep something."""
    keep = np.random.default_rng(seed).random((rows, keys)) < 0.55
    keep[np.arange(rows), np.arange(rows) % keys] = True
    keep[np.arange(keys) % rows, np.arange(keys)] = True
    keep[0, -1] = keep[-1, 1] = False
    return keep


def _padding(batch: int, keys: int) -> Array:
    """A mask of padded keys: the first batch element ends at key 3, the last one at key 4."""
    keep = np.ones((batch, 1, 1, keys), bool)
    keep[0, ..., 3:] = False
    keep[-1, ..., 4:] = False
    return keep


def _padded_prefix(batch: int) -> Array:
    """Texts of different lengths that are filled up to 3 tokens, and 3 tokens after them."""
    keep = np.ones((batch, 1, 1, sum(PREFIX)), bool)
    keep[0, ..., 1:3] = False
    keep[-1, ..., 2:3] = False
    return keep


def _of_each_head(heads: int) -> Array:
    """Another mask for each head, (H, L, S)."""
    return np.stack([_keep(40 + head, 5, 5) for head in range(heads)])


def _left_padding(batch: int, keys: int) -> Array:
    """A mask of keys that are padded in front of each text, more than most blocks have."""
    keep = np.ones((batch, 1, 1, keys), bool)
    keep[0, ..., : keys // 2] = False
    keep[-1, ..., : keys // 2 + 5] = False
    return keep


def round_probes(rank: int, *, of_batch: bool = False) -> Iterator[Probe]:
    """The same of ROUND tokens, for functions that take few lengths."""
    for probe in ready_probes(rank, of_batch=of_batch):
        size = probe.sizes
        known = size["L"] == 5 or probe.ability == "window"
        if size["L"] != size["S"] or probe.ability in ("long", "cache") or not known:
            continue
        own = (size["B"], size["H"], size["G"], ROUND, ROUND, 8, 8)
        new = ready_probe(probe.name, probe.ability, own, 10 * rank)
        keep = probe.keep
        if keep is not None:
            keep = _padding(size["B"], ROUND) if keep.ndim == 4 else _keep(rank, ROUND, ROUND)
            keep = keep | (np.arange(ROUND) == 0) if probe.causal else keep
        window = None if probe.window is None else ROUND // 4
        yield replace(probe, inputs=new.inputs, keep=keep, window=window)


def ready_probes(rank: int, *, of_batch: bool = False) -> Iterator[Probe]:
    """Ordinary probes for arrays of this rank: 2 one head, 3 heads, 4 a batch.

    With `of_batch` the first of three axes is the batch.
    """
    batch, heads = {2: (1, 1), 3: (4, 1) if of_batch else (1, 4), 4: (2, 4)}[rank]
    plain = "plain" if rank < 3 else "heads"

    def sized(name: str, ability: str, shape: tuple[int, int, int, int], **more: Any) -> Probe:
        sizes = (batch, heads, more.pop("groups", heads), *shape)
        return ready_probe(f"{name} {rank}-D", ability, sizes, 10 * rank, rank=rank, **more)

    yield sized("square", plain, (5, 5, 6, 6))
    yield sized("square, wide values", plain, (5, 5, 6, 7))
    yield sized("rectangle", "rectangular", (3, 5, 6, 7))
    sizes = (batch, heads, heads, 6, 6, 8, 8)
    yield _rising(f"rising and falling scores {rank}-D", plain, sizes, 60 + rank, rank=rank)
    for rows, keys in LONG:
        name = f"{keys} keys, {rows} quer{'ies' if rows > 1 else 'y'} {rank}-D"
        yield _rising(name, "long", (1, 1, 1, rows, keys, 4, 4), 80 + rank, rank=rank)
    if rank > 2:
        cube_heads = 1 if of_batch else 3
        cube = (3 if rank == 4 or of_batch else 1, cube_heads, cube_heads, 3, 3, 3, 3)
        yield ready_probe(f"cube {rank}-D", plain, cube, 70 + rank, rank=rank)
        if heads > 1:
            yield sized("grouped", "grouped", (5, 5, 6, 6), groups=2)
    keep = _keep(rank, 5, 5)
    yield sized("mask", "mask", (5, 5, 6, 6), keep=keep)
    yield sized("mask, rectangle", "mask", (3, 5, 6, 7), keep=_keep(rank + 5, 3, 5))
    if rank == 2:
        scores = np.array([[0.0, 1.5, -0.5], [0.75, 0.0, 2.0], [1.0, -1.25, 0.5]])
        yield probe_with_scores("zero scores", "mask", scores, 7, keep=_keep(3, 3, 3), rank=2)
        scores = np.array([[0.75, 1.5, -0.5], [0.0, 0.75, 2.0], [1.0, 0.0, 0.5]])
        yield probe_with_scores("zero scores, causal", "causal", scores, 7, causal=True, rank=2)
    if heads > 1:
        yield sized(OF_HEADS, "mask", (5, 5, 6, 6), keep=_of_each_head(heads))
        shared, own = (batch, 6, 2, 5, 5, 6, 6), dict(keep=_of_each_head(6), rank=rank)
        yield ready_probe(f"{OF_HEADS} of a group {rank}-D", "mask", shared, 10 * rank, **own)
    yield sized("padding", "key mask", (5, 5, 6, 6), keep=_padding(batch, 5))
    yield sized(LEFT, "key mask", (70, 70, 4, 4), keep=_left_padding(batch, 70))
    yield sized("causal", "causal", (5, 5, 6, 6), causal=True)
    yield sized("causal, rectangle", "causal rectangular", (3, 5, 6, 6), causal=True, offset=2)
    both = keep | (np.arange(5) == 0)  # every row keeps a key under the causal rule too
    yield sized("causal and mask", "causal and mask", (5, 5, 6, 6), causal=True, keep=both)
    yield sized("window", "window", (6, 6, 6, 6), causal=True, window=3)
    more = dict(causal=True, window=3, offset=3)
    yield sized("window, rectangle", "window rectangular", (3, 6, 6, 6), **more)
    yield sized("cache", "cache", (6, 6, 6, 6), causal=True, chunks=(2, 1, 3))
    prefixed: dict[str, Any] = dict(causal=True, chunks=PREFIX, keep=_padded_prefix(batch))
    yield sized(PADDED_PREFIX, "key mask", (6, 6, 6, 6), **prefixed)
    yield sized("scale", "scale", (5, 5, 6, 6), scale=0.7)


def one_query_probes(rank: int, *, of_batch: bool = False) -> Iterator[Probe]:
    """The same of a single query for each head and batch element; `rank` is that of the keys."""
    for probe in ready_probes(rank, of_batch=of_batch):
        if probe.causal or probe.chunks or probe.sizes["L"] == 3 or probe.name[:4] == "cube":
            continue
        if probe.keep is not None and probe.keep.shape[-2] > 1:  # of several queries
            continue
        queries = probe.inputs["queries"][..., -1:, :]
        ability = "rectangular" if probe.ability == "plain" else probe.ability
        inputs = {**probe.inputs, "queries": queries}
        own: dict[str, Any] = dict(
            name=f"one query, {probe.name}", inputs=inputs, ability=ability, rank=rank - 1
        )
        if rank > 2 or probe.sizes["E"] != probe.sizes["D"]:
            yield replace(probe, **own)


def projected_probes(
    shapes: Mapping[str, tuple[int, ...]],
    heads: int,
    groups: int | None = None,
    *,
    weights: Mapping[str, Array] | None = None,
    batch: int = 1,
    rows: int = 5,
    cross: bool = False,
    rank: int = 2,
) -> Iterator[Probe]:
    """Probes of attention on embeddings; `shapes` are those of the weights that it takes."""
    own = dict(weights or {})
    for number, (name, shape) in enumerate(shapes.items()):
        own.setdefault(name, 0.8 * _draw(100 + number, *shape))
    width = shapes["W_q"][0]
    inputs = {"embeddings": _draw(90 + rank, batch, rows, width), **own}
    if shapes["W_k"][0] != width:  # keys of other embeddings alone
        inputs["context"] = _draw(96, batch, rows, shapes["W_k"][0])
    ability = "plain" if batch == 1 else "heads"

    def probe(name: str, ability: str, inputs: Mapping[str, Array], **more: Any) -> Probe:
        label = f"{name} {rank}-D"
        return Probe(label, ability, inputs, heads, groups or heads, rank=rank, **more)

    yield probe("embeddings", ability, inputs)
    rising = _along(96, batch, 6, width)
    yield probe("rising and falling scores", ability, {**inputs, "embeddings": rising})
    yield probe("70 tokens", "long", {**inputs, "embeddings": _along(97, batch, 70, width)})
    if cross:
        context = _draw(95, batch, rows + 2, shapes["W_k"][0])
        yield probe("context", "rectangular", {**inputs, "context": context})
        context = _draw(94, batch, rows, shapes["W_k"][0])
        yield probe(AS_LONG, ability, {**inputs, "context": context})
    yield probe("mask", "mask", inputs, keep=_keep(4, rows, rows))
    yield probe("padding", "key mask", inputs, keep=_padding(batch, rows))
    yield probe("causal", "causal", inputs, causal=True)
    if rows > 3:
        yield probe("window", "window", inputs, causal=True, window=3)
    if rows > 2 and not cross:
        yield probe("cache", "cache", inputs, causal=True, chunks=(2, 1, rows - 3))
    if rows == 5 and not cross:
        more: dict[str, Any] = dict(causal=True, chunks=PREFIX, keep=_padded_prefix(batch))
        yield probe(PADDED_PREFIX, "key mask", {**inputs, "embeddings": rising}, **more)


# --- inputs at which a function that is right elsewhere may break ---------------------------------


@lru_cache(maxsize=8)
def extreme_probes(
    dtype: np.dtype[Any], *, masks: bool, causal_always: bool = False
) -> tuple[Probe, ...]:
    """Scores that overflow, rows far apart, large hidden scores, rows without a visible key.

    With `causal_always` the function hides later keys without being asked to.
    """
    return tuple(_extreme_probes(dtype, masks, causal_always))


def _extreme_probes(dtype: np.dtype[Any], masks: bool, causal_always: bool) -> Iterator[Probe]:
    limit = float(np.log(np.finfo(dtype).max))
    more: dict[str, Any] = dict(rank=2, dtype=dtype, causal=causal_always)
    mild = np.array([[0.5, -0.25, 1.0], [1.5, 0.25, -0.5], [-1.0, 0.75, 0.5]])
    one_row = np.array([[0.0], [3 * limit], [0.0]])
    one_key = np.array([0.0, 2.5 * limit, 0.0])
    for name, scores, seed in (
        ("large scores", mild + 1.5 * limit, 1),
        ("low scores", mild - 1.5 * limit, 1),
        ("rows far apart", mild - one_row, 2),
        ("one large score", mild + one_key, 3),
        ("edge of exp", mild - mild.max() + limit - 0.4, 4),
    ):
        yield probe_with_scores(name, "range", scores, seed, **more)
    if not masks:
        return
    keep = np.array([[True, True, False], [True, True, True], [False, True, True]])
    hiding = dict(keep=keep, **more)
    low = np.where(keep, mild - 5e4, mild).round(2)
    yield probe_with_scores("low visible scores, 1e4", "hiding", low, 5, **hiding)
    low = (mild - 5e9).round(2)
    yield probe_with_scores("low visible scores, 1e9", "hiding", low, 5, **hiding)
    high = np.where(keep, mild, mild + 3 * limit)
    yield probe_with_scores("hidden key with a large score", "hiding", high, 6, **hiding)
    empty = dict(more, keep=keep & (np.arange(3) != 1)[:, None])
    yield probe_with_scores("row that sees nothing", "empty row", mild, 7, **empty)
    plain = probe_with_scores("NaN in a hidden value", "hidden NaN", mild, 8, **more)
    values = plain.inputs["values"].copy()
    values[..., 2, :] = np.nan
    yield replace(plain, inputs={**plain.inputs, "values": values}, keep=np.arange(3) < 2)


def stretched(probe: Probe, name: str) -> Probe:
    """A probe with scores that overflow exp: in every row ("large scores"), or in one alone."""
    limit = float(np.log(np.finfo(probe.dtype).max))
    source = "embeddings" if "embeddings" in probe.inputs else "queries"
    array = probe.inputs[source]
    rows = np.arange(array.shape[-2])[:, None]
    factor = 3 * limit / float(np.nanmax(np.abs(probe.right[probe.scaled])))
    one_side = source == "queries" and probe.inputs["keys"] is not array
    factor = factor if one_side else np.sqrt(factor)
    array = array * np.where((name == "large scores") | (rows == 1), factor, 1.0)
    itself = probe.inputs[source]  # self-attention: all three are the same
    same = {name: array for name, own in probe.inputs.items() if own is itself}
    inputs = {**probe.inputs, **same}
    return replace(probe, name=name, ability="range", inputs=inputs)

"""Texts packed into one row, each computed alone in plain loops: what a packed call must give.

Owns the oracle (`alone`: output, weights, lse and gradients, text by text, with the bounds of their
errors), and random packed calls (`draw`). The oracle knows numbers, counts and places, and nothing
of the library under test: a text is the rows of one number, and its first key is at 0.

The bounds are those of `bounds.py` and `backward_oracle.py`, with ‖q‖·‖k‖ instead of Σ |q k|: a
rotation leaves it as it is. A rotated pair is off by at most 2·ε of its length, where ε = 3·u + a:
a cosine, a product, a sum, and the error a of an angle in float64; so 4·ε of ‖q‖·‖k‖ in a score.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import regard
from bounds import Bounds, accumulator, assert_within, error_bounds
from calls import PATHS, arithmetic_of
from oracle import Answer
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.positions import Alibi, RelativeBias, Rotary

LONG = np.longdouble
CALLS = 1000
ANGLE_ROUNDINGS = 4  # of a frequency, its power, the angle, and cosine or sine, in float64


@dataclass(frozen=True)
class Packed:
    """One packed call in plain words, and the options that say the same to the library."""

    query: np.ndarray  # (…, H, L, D)
    key: np.ndarray
    value: np.ndarray
    grad: np.ndarray
    segments: tuple[np.ndarray, np.ndarray] | None = None  # numbers (…, L) and (…, S)
    lengths: Any = None
    offset: Any = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    rule: str | None = None  # "later": only keys after the query; "near": none after the next one
    seen: np.ndarray | None = None  # (L, S)
    kind: str | None = None  # of positions
    given: dict[str, Any] = field(default_factory=dict)  # what those are made of
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of `regard.attention`
    headless: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.query.shape[:-3], self.key.shape[:-3])

    def arrays(self) -> tuple[np.ndarray, ...]:
        every = self.query, self.key, self.value, self.grad
        return tuple(x[0] for x in every) if self.headless else every


class Alone(NamedTuple):
    answer: Answer
    bias: np.ndarray  # (…, H, L, S): what positions add
    grads: tuple[np.ndarray, ...]  # of query, key and value
    errors: tuple[np.ndarray, ...]


class Text(NamedTuple):
    rows: list[int]
    keys: list[int]
    places: list[int]  # of the queries, where the text's first key is at 0
    within: int  # keys within the length


# each text alone ----------------------------------------------------------------------------------


def texts(call: Packed, b: tuple[int, ...]) -> Iterator[Text]:
    """The texts of one batch element, with each query's place beside its own keys."""
    length, size = call.query.shape[-2], call.key.shape[-2]
    numbers = [0] * length, [0] * size
    if call.segments is not None:
        sides = zip(call.segments, (length, size), strict=True)
        numbers = tuple(np.broadcast_to(x, (*call.batch, n))[b].tolist() for x, n in sides)
    most = size if call.lengths is None else int(np.broadcast_to(call.lengths, call.batch)[b])
    for number in sorted({*numbers[0], *numbers[1]}):
        rows, keys = ([i for i, n in enumerate(side) if n == number] for side in numbers)
        within = len([j for j in keys if j < most])
        if call.segments is None:
            within = most
        if call.offset is None:
            places = [i - keys[0] if keys else i for i in rows]
        elif isinstance(call.offset, str):
            places = [within - len(rows) + n for n in range(len(rows))]
        else:
            added = int(np.broadcast_to(call.offset, call.batch)[b])
            places = [n + added for n in range(len(rows))]
        yield Text(rows, keys, places, within)


def sees(call: Packed, place: int, j: int) -> bool:
    left, right = call.window or (None, None)
    return (
        (not call.causal or j <= place)
        and (left is None or place - left <= j)
        and (right is None or j <= place + right)
        and (call.rule != "later" or j > place)
        and (call.rule != "near" or j <= place + 1)
    )


def turned(rows: Any, places: list[int], call: Packed) -> Any:
    """Each row turned to its place; with the places below 0, turned back."""
    if call.kind != "rotary":
        return rows
    result, width = rows.copy(), call.given.get("width") or rows.shape[-1]
    for p in range(width // 2):
        angles = np.array(places, LONG) * LONG(call.given["base"]) ** (LONG(-2 * p) / width)
        cos, sin = np.cos(angles), np.sin(angles)
        x, y = (2 * p, 2 * p + 1) if call.given["interleaved"] else (p, p + width // 2)
        result[..., x] = rows[..., x] * cos - rows[..., y] * sin
        result[..., y] = rows[..., y] * cos + rows[..., x] * sin
    return result


def added(call: Packed, h: int, place: int, j: int) -> float:
    """What positions add to the logit of a query at this place and key j."""
    if call.kind == "alibi":
        slopes, heads = call.given["slopes"], call.query.shape[-3]
        slope = 2.0 ** (-8 * (h + 1) / heads) if slopes is None else np.ravel(slopes)[h]
        return -float(slope) * abs(place - j)
    if call.kind != "table":
        return 0.0
    table, most = call.given["table"], call.given["max_distance"]
    count, first, distance = table.shape[-1], 0, max(place - j, 0)
    if call.given["bidirectional"]:
        count, distance = count // 2, abs(place - j)
        first = count if j > place else 0
    small = count // 2
    if distance >= small:
        share = math.log(distance / small) / math.log(most / small)
        distance = min(small + int(share * (count - small)), count - 1)
    return float(table[h, first + distance])


class Rows(NamedTuple):
    """What H heads make of one text: of its n queries and its m keys."""

    output: np.ndarray  # (H, n, E)
    lse: np.ndarray  # (H, n)
    weights: np.ndarray  # (H, n, m)
    logits: np.ndarray
    bias: np.ndarray
    grads: tuple[np.ndarray, ...]
    errors: tuple[np.ndarray, ...]


def text_alone(call: Packed, text: Text, q: Any, k: Any, v: Any, arriving: Any, terms: int) -> Rows:
    """The cells in plain loops, softmax and the chain rule as they are written."""
    heads, keys = len(q), range(len(text.keys))
    visible = np.zeros((len(text.rows), len(keys)), bool)
    bias = np.zeros((heads, *visible.shape), LONG)
    for n, place in enumerate(text.places):
        for j in range(text.within):
            visible[n, j] = sees(call, place, j)
            if call.kind in ("alibi", "table") and visible[n, j]:
                bias[:, n, j] = [added(call, h, place, j) for h in range(heads)]
    if call.seen is not None:
        visible &= call.seen[np.ix_(text.rows, text.keys)]

    scale = scale_of(call)
    turned_q, turned_k = turned(q, text.places, call), turned(k, keys, call)
    x = scale * (turned_q @ turned_k.mT) + bias
    seen = np.where(visible, x, -np.inf)
    top = seen.max(axis=-1, initial=-np.inf)
    top[np.isinf(top)] = 0  # a row that sees no key
    exponentials = np.exp(seen - top[..., np.newaxis])
    total = exponentials.sum(axis=-1)
    some = np.where(total > 0, total, 1)
    p, lse = exponentials / some[..., np.newaxis], np.where(total > 0, top + np.log(some), -np.inf)

    d_p = arriving @ v.mT
    d_x = scale * p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))
    d_q = turned(d_x @ turned_k, [-place for place in text.places], call)
    d_k = turned(d_x.mT @ turned_q, [-j for j in keys], call)

    unit, turns = unit_of(call), 4 * turning(call, unit_of(call))
    q_norms, k_norms = norms(q)[..., np.newaxis], norms(k)[..., np.newaxis]
    far = ((q.shape[-1] + 4) * unit + turns) * abs(scale) * q_norms * k_norms.mT
    far += unit * (4 * abs(bias) + 4 * abs(x))
    eta = np.where(visible, far, 0).max(axis=-1, initial=0)
    eta += unit * (4 * abs(np.where(total > 0, lse, 0)) + 16)
    loose = (np.expm1(np.minimum(8 * eta, 50)) + terms * unit)[..., np.newaxis]
    sizes = abs(arriving) @ abs(v).mT
    reach = p * (sizes + (p * sizes).sum(axis=-1, keepdims=True)) * abs(scale) * (loose + turns)
    errors = reach @ k_norms, reach.mT @ q_norms, (loose * p).mT @ abs(arriving)
    return Rows(p @ v, lse, p, seen, bias, (d_q, d_k, p.mT @ arriving), errors)


def alone(call: Packed) -> Alone:
    """Every text of every batch element by itself."""
    query, key, value, grad = (
        np.broadcast_to(x, (*call.batch, *x.shape[-3:])).astype(LONG)
        for x in (call.query, call.key, call.value, call.grad)
    )
    (heads, length, width), (groups, size) = query.shape[-3:], key.shape[-3:-1]
    cells = (*call.batch, heads, length, size)
    output, lse = np.zeros(grad.shape), np.full(cells[:-1], -np.inf)
    weights, bias, logits = np.zeros(cells), np.zeros(cells), np.full(cells, -np.inf)
    grads, errors = ([np.zeros(x.shape, LONG) for x in (query, key, value)] for _ in range(2))
    shared = heads // groups
    terms = width + value.shape[-1] + size + length * shared * math.prod(call.batch) + 40
    for b in np.ndindex(*call.batch):
        for text in texts(call, b):
            q, arriving = query[b][:, text.rows], grad[b][:, text.rows]
            k, v = (np.repeat(x[b][:, text.keys], shared, axis=0) for x in (key, value))
            made = text_alone(call, text, q, k, v, arriving, terms)
            output[b][:, text.rows], lse[b][:, text.rows] = made.output, made.lse
            for every, one in zip((weights, logits, bias), made[2:5], strict=True):
                every[b][(slice(None), *np.ix_(text.rows, text.keys))] = one
            for every, found in ((grads, made.grads), (errors, made.errors)):
                every[0][b][:, text.rows] = found[0]
                for array, one in zip(every[1:], found[1:], strict=True):
                    grouped = one.reshape(groups, shared, *one.shape[1:]).sum(axis=1)
                    array[b][:, text.keys] = grouped
    inputs = call.query, call.key, call.value
    return Alone(
        Answer(output, weights, lse, np.isfinite(logits), logits),
        bias,
        *(
            tuple(summed(x, y.shape) for x, y in zip(side, inputs, strict=True))
            for side in (grads, errors)
        ),
    )


def summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Summed over the leading axes that were broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    short = tuple(n for n, (now, was) in enumerate(zip(x.shape, shape, strict=True)) if now != was)
    return x.sum(axis=short, keepdims=True).astype(np.float64)


def norms(rows: Any) -> Any:
    return np.sqrt((rows * rows).sum(axis=-1))


def scale_of(call: Packed) -> float:
    return 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale


def unit_of(call: Packed) -> float:
    return 2.0**-53 if accumulator(call.query.dtype) == np.float64 else 2.0**-24


def turning(call: Packed, unit: float) -> float:
    """ε: how far a number of a turned pair is off, as a share of the pair's length; 2·ε of both."""
    farthest = call.key.shape[-2] + call.query.shape[-2] + 8
    return (3 * unit + ANGLE_ROUNDINGS * 2.0**-53 * farthest) if call.kind == "rotary" else 0.0


def forward_bounds(call: Packed, expected: Alone, kernel: str) -> Bounds:
    width, epsilon = call.query.shape[-1], turning(call, unit_of(call))

    def even(rows: np.ndarray) -> np.ndarray:  # of the same norm, and the same in every feature
        long = norms(np.broadcast_to(rows, (*call.batch, *rows.shape[-3:])).astype(np.float64))
        return np.repeat(long[..., np.newaxis] / math.sqrt(width), width, axis=-1)

    query, key = even(call.query), even(call.key)
    return error_bounds(
        *(query, key, np.broadcast_to(call.value, (*key.shape[:-1], call.value.shape[-1]))),
        expected.answer,
        dtype=call.query.dtype,
        scale=call.scale,
        bias=2 * expected.bias if call.kind in ("alibi", "table") else None,
        arithmetic=arithmetic_of(kernel, call.query),
        rows_off=(2 * epsilon * query, 2 * epsilon * key) if epsilon else None,
    )


# the library beside it ----------------------------------------------------------------------------


def compare(call: Packed, expected: Alone, kernel: str) -> None:
    """Output, weights, lse and the three gradients of the packed call, each within its bound."""
    query, key, value, grad = call.arrays()
    bound = forward_bounds(call, expected, kernel)
    cut = (lambda x: x[0]) if call.headless else (lambda x: x)
    with_weights = call.grad.shape[-1] % 2 == 1  # half of the calls: others take another way
    more = {"return_weights": with_weights, "return_lse": True}
    result = regard.attention(query, key, value, kernel=kernel, **more, **call.options)
    for name in ("output", "lse", *(["weights"] if with_weights else [])):
        exact, error = (getattr(x, name) for x in (expected.answer, bound))
        assert_within(getattr(result, name), cut(exact), cut(error), name)
    given = {"output": result.output, "lse": result.lse} if with_weights else {}
    grads = regard.gradients(query, key, value, grad, kernel=kernel, **given, **call.options)
    for name, exact, error in zip(
        ("query", "key", "value"), expected.grads, expected.errors, strict=True
    ):
        assert_within(getattr(grads, name), cut(exact), cut(error), f"the gradient of {name}")


# random packed calls ------------------------------------------------------------------------------


def packing(rng: np.random.Generator, counts: tuple[Any, Any], same: bool) -> tuple[Any, Any]:
    """Numbers of the rows and of the keys: texts in any order, of any distinct numbers."""
    numbers = rng.choice(int(rng.choice([12, 1000])), size=len(counts[0]), replace=False)
    orders = [rng.permutation(len(numbers)) for _ in range(2)]
    if same:
        orders[1] = orders[0]
    return tuple(
        np.repeat(numbers[order], np.asarray(count)[order])
        for order, count in zip(orders, counts, strict=True)
    )


def drawn_segments(
    rng: np.random.Generator, batch: tuple[int, ...], long: bool
) -> tuple[np.ndarray, np.ndarray]:
    """One packing for each batch element, or one for several, all with as many rows and keys."""
    texts = int(rng.integers(1, 4 if batch else 5))
    counts = [rng.integers(0, 7, size=texts), rng.integers(0, 10, size=texts)]
    kind = rng.choice(["own", "same counts", "same totals"], p=[0.6, 0.25, 0.15])
    if long:
        counts[0], kind = np.minimum(counts[0], 2), "own"
        counts[1][int(rng.integers(texts))] = rng.integers(257, 400)
    if kind == "same counts":
        counts[1] = counts[0]
    totals = [int(count.sum()) for count in counts]
    if kind == "same totals":
        totals[1] = totals[0]
        counts[1] = rng.multinomial(totals[1], [1 / texts] * texts)
    lead = batch[int(rng.integers(0, len(batch) + 1)) :]
    lead = tuple(1 if rng.random() < 0.2 else n for n in lead)
    made: tuple[list[Any], list[Any]] = ([], [])
    for n in range(math.prod(lead)):
        if n:
            texts = int(rng.integers(1, 5))
            shares = [1 / texts] * texts
            counts = [rng.multinomial(total, shares) for total in totals]
            counts[1] = counts[0] if kind == "same counts" else counts[1]
        for side, numbers in zip(
            made, packing(rng, tuple(counts), kind == "same counts"), strict=True
        ):
            side.append(numbers)
    return tuple(
        np.array(side, np.int64).reshape(*lead, total)
        for side, total in zip(made, totals, strict=True)
    )


def drawn_positions(rng: np.random.Generator, heads: int, width: int) -> tuple[Any, Any, Any]:
    kind = rng.choice([None, "alibi", "table", "rotary"], p=[0.3, 0.2, 0.2, 0.3])
    if kind == "alibi":
        slopes = [None, rng.uniform(0.1, 1, size=heads)][int(rng.integers(2))]
        return kind, {"slopes": slopes}, Alibi(slopes)
    if kind == "table":
        both = bool(rng.integers(2))  # no distance is where a bucket begins but by its definition
        given = {"bidirectional": both, "max_distance": 6 if both else 10}
        given["table"] = rng.normal(size=(heads, 8))
        return kind, given, RelativeBias(**given)
    if kind == "rotary":
        part = int(rng.integers(1, width // 2 + 1)) * 2 if rng.random() < 0.4 else None
        given = {"base": 100.0, "width": part, "interleaved": bool(rng.integers(2))}
        return kind, given, Rotary(**given)
    return None, {}, None


@functools.lru_cache(maxsize=CALLS)
def draw(number: int) -> Packed:
    """The packed call of this number: always the same."""
    rng = np.random.default_rng(number)
    long = number % 40 == 39
    batches = [*[()] * 14, *[(2,)] * 3, (3,), (2, 2), (2, 1)]
    batch = () if long else batches[int(rng.integers(len(batches)))]
    groups, repeats = [(1, 1), (1, 1), (1, 1), (1, 2), (2, 1), (2, 2)][int(rng.integers(6))]
    headless = not batch and groups * repeats == 1
    heads, width, values = groups * repeats, 2 * int(rng.integers(1, 5)), int(rng.integers(1, 5))
    packed = rng.random() < 0.85
    segments = drawn_segments(rng, batch, long)
    length, size = (side.shape[-1] for side in segments)
    terms: list[Any] = []
    said: dict[str, Any] = {}
    if packed:
        own = segments[0].shape == segments[1].shape and (segments[0] == segments[1]).all()
        terms.append(Segments(segments[0]) if own else Segments(*segments))
        said["segments"] = segments
    if rng.random() < (0.3 if packed else 0.6):
        said["lengths"] = rng.integers(0, size + 1, size=batch if rng.random() < 0.7 else ())
        terms.append(Lengths(said["lengths"]))
    if rng.random() < 0.15:
        said["seen"] = rng.random((length, size)) < 0.7
        terms.append(Boolean(said["seen"]))
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        said["causal"] = True
        options |= {"causal": True} if rng.random() < 0.5 else {"mask": Causal()}
    if rng.random() < 0.35:
        sides = [None, 0, 1, 2, 3]
        said["window"] = tuple(sides[int(n)] for n in rng.integers(0, 5, size=2))
        if rng.random() < 0.5:
            options["window"] = said["window"]
        else:
            terms.append(Window(*said["window"]))
    if rng.random() < 0.2:
        said["rule"] = ["later", "near"][int(rng.integers(2))]
        terms.append(~Causal() if said["rule"] == "later" else Causal() | Window(0, 1))
    terms += [options.pop("mask")] if "mask" in options else []
    while len(terms) > 1:  # nested in any way
        one, other = (terms.pop(int(rng.integers(len(terms)))) for _ in range(2))
        terms.append(one & other)
    options |= {"mask": terms[0]} if terms else {}

    kind, given, positions = drawn_positions(rng, heads, width)
    options |= {} if positions is None else {"positions": positions}
    uses = said.keys() & {"causal", "window", "rule"} or kind
    offsets: list[Any] = [0, "end", "end", int(rng.integers(-4, 5))]
    offsets.append(rng.integers(-3, 4, size=batch))
    offsets.append(np.int32(1) if not batch else rng.integers(-3, 4, size=batch[-1:]).tolist())
    offset = offsets[int(rng.integers(6))]
    if (length == size or not uses) and rng.random() < 0.3:
        offset = None
    options |= {} if offset is None else {"offset": offset}
    said["scale"] = [None, 0.7, -1.5][int(rng.integers(3))]
    options |= {} if said["scale"] is None else {"scale": said["scale"]}

    dtype = (np.float32, np.float64)[number // 7 % 2]
    lead = batch if rng.random() < 0.8 else (1,) * len(batch)
    shapes = (
        (*batch, heads, length, width),
        (*lead, groups, size, width),
        (*lead, groups, size, values),
        (*batch, heads, length, values),
    )
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    said |= {"offset": offset, "kind": kind, "given": given, "options": options}
    return Packed(*arrays, **said, headless=headless)


def path_of(number: int) -> str:
    """The path of this call, among those of `calls.PATHS`: the reference, which is slow, less."""
    fused = [path for path in PATHS if path != "reference"]
    return (
        "reference" if number % 6 == 0 or not fused else fused[(number - number // 6) % len(fused)]
    )


alone_of = functools.lru_cache(maxsize=CALLS)(lambda number: alone(draw(number)))

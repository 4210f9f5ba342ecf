"""Attention in plain Python, one cell at a time: the answer the tests compare with.

Owns two oracles. `attend` works on Python floats and sums with `math.fsum`; `attend_exactly` works
with 50 significant digits and does not even subtract the maximum, because its exponents have no
end. They share who sees whom and nothing of the arithmetic. Neither knows anything of the library
under test, and neither is meant to be fast.

Letters as everywhere: H query heads, G key heads, L queries, S keys, D key width, E value width.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mpmath
import numpy as np

DIGITS = 50
KEPT = 64  # answers, of each oracle

# predicate(batch index, head, query row i, key j, position i + offset) -> may row i see key j?
Predicate = Callable[[tuple[int, ...], int, int, int, int], bool]


class Answer(NamedTuple):
    """What attention returns, and the two intermediates that the error bound needs."""

    output: np.ndarray  # (…, H, L, E)
    weights: np.ndarray  # (…, H, L, S)
    lse: np.ndarray  # (…, H, L)
    visible: np.ndarray  # (…, H, L, S) bool
    logits: np.ndarray  # (…, H, L, S) what the softmax sees; -inf where not visible


class Row(NamedTuple):
    output: list[float]
    weights: list[float]
    lse: float
    logits: list[float]


def asked_once(oracle: Callable[..., Answer]) -> Callable[..., Answer]:
    """The oracle, which remembers its latest answers: every kernel is compared with the same."""
    answers: OrderedDict[bytes, Answer] = OrderedDict()

    @functools.wraps(oracle)
    def answer(*arguments: Any, **options: Any) -> Answer:
        try:
            question = pickle.dumps((arguments, sorted(options.items())))
        except (AttributeError, TypeError, pickle.PicklingError):  # a mask that is a function
            return oracle(*arguments, **options)
        name = hashlib.sha256(question).digest()
        if name not in answers:
            answers[name] = oracle(*arguments, **options)
        answers.move_to_end(name)
        if len(answers) > KEPT:
            answers.popitem(last=False)
        return Answer(*(x.copy() for x in answers[name]))

    return answer


@asked_once
def attend(query: Any, key: Any, value: Any, **options: Any) -> Answer:
    """Attention on Python floats; the options are those of `cells`.

    One kind of input has axes left out: a query (L, D) or (D,) goes with key (S, D), value (S, E).
    """
    return _attend(_row_in_floats, query, key, value, **options)


@asked_once
def attend_exactly(query: Any, key: Any, value: Any, **options: Any) -> Answer:
    """Attention with 50 digits, each number rounded to float64 once at the end.

    Visible numbers must be finite.
    """
    return _attend(_row_in_digits, query, key, value, **options)


def _attend(row: Callable[..., Row], query: Any, key: Any, value: Any, **options: Any) -> Answer:
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    vector, headless = query.ndim == 1, query.ndim <= 2  # axes put in now and taken out at the end
    if vector:
        query = query[np.newaxis]
    if headless:
        query, key, value = query[np.newaxis], key[np.newaxis], value[np.newaxis]

    (heads, length, _), (size, width) = query.shape[-3:], value.shape[-2:]
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    output = np.zeros((*batch, heads, length, width))
    weights = np.zeros((*batch, heads, length, size))
    lse = np.zeros((*batch, heads, length))
    visible = np.zeros((*batch, heads, length, size), bool)
    logits = np.full((*batch, heads, length, size), -math.inf)
    for index, seen, arguments in cells(query, key, value, batch, **options):
        one = row(seen=seen, **arguments)
        output[index] = one.output
        weights[index] = one.weights
        lse[index] = one.lse
        visible[index] = seen
        logits[index] = one.logits

    answer = Answer(output, weights, lse, visible, logits)
    if headless:
        answer = Answer(*(x[0] for x in answer))
    if vector:
        answer = Answer(*(x[0] for x in answer))
    return answer


def cells(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    batch: tuple[int, ...],
    *,
    mask: Any = None,  # nested bools that broadcast to (…, H, L, S), or a Predicate
    bias: Any = None,  # numbers that broadcast to (…, H, L, S)
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    offset: Any = None,  # int, "end", or ints that broadcast to the batch; None is 0
    positions: Any = None,  # of the queries, (…, L), instead of an offset
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,  # a number, or one per query head
    lengths: Any = None,  # an int, or ints that broadcast to the batch
    segments: tuple[Any, Any] | None = None,  # ids (…, L) and (…, S)
) -> Iterator[tuple[tuple[int, ...], list[bool], dict[str, Any]]]:
    """Every row of the result: its index, which keys it sees, and the numbers it is made of."""
    (heads, length, width), (groups, size) = query.shape[-3:], key.shape[-3:-1]
    everything = (*batch, heads, length, size)
    query = np.broadcast_to(query, (*batch, heads, length, width))
    key = np.broadcast_to(key, (*batch, *key.shape[-3:]))
    value = np.broadcast_to(value, (*batch, *value.shape[-3:]))
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0
    if mask is not None and not callable(mask):
        mask = np.broadcast_to(np.asarray(mask), everything)
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias).astype(np.float64), everything)
    offset = size - length if isinstance(offset, str) else 0 if offset is None else offset
    offset = np.broadcast_to(offset, batch)
    if positions is not None:
        positions = np.broadcast_to(positions, (*batch, length))
    if lengths is not None:
        lengths = np.broadcast_to(lengths, batch)
    if segments is not None:
        query_ids = np.broadcast_to(segments[0], (*batch, length))
        key_ids = np.broadcast_to(segments[1], (*batch, size))
    if sink is not None:
        sink = np.broadcast_to(np.asarray(sink).astype(np.float64), (heads,))

    for b in np.ndindex(*batch):
        for h in range(heads):
            g = h // (heads // groups)
            keys, values = key[b][g].tolist(), value[b][g].tolist()
            for i in range(length):
                position = i + int(offset[b]) if positions is None else int(positions[(*b, i)])
                seen = []
                for j in range(size):
                    see = True
                    if callable(mask):
                        see = see and mask(b, h, i, j, position)
                    elif mask is not None:
                        see = see and bool(mask[(*b, h, i, j)])
                    if bias is not None:
                        see = see and float(bias[(*b, h, i, j)]) != -math.inf
                    if causal:
                        see = see and j <= position
                    if window is not None and window[0] is not None:
                        see = see and position - window[0] <= j
                    if window is not None and window[1] is not None:
                        see = see and j <= position + window[1]
                    if lengths is not None:
                        see = see and j < int(lengths[b])
                    if segments is not None:
                        see = see and bool(query_ids[(*b, i)] == key_ids[(*b, j)])
                    seen.append(see)
                yield (
                    (*b, h, i),
                    seen,
                    {
                        "q": query[(*b, h, i)].tolist(),
                        "keys": keys,
                        "values": values,
                        "width": value.shape[-1],
                        "scale": float(scale),
                        "softcap": None if softcap is None else float(softcap),
                        "bias": None if bias is None else bias[(*b, h, i)].tolist(),
                        "sink": None if sink is None else float(sink[h]),
                    },
                )


def _row_in_floats(
    q: Sequence[float],
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    width: int,
    seen: Sequence[bool],
    scale: float,
    softcap: float | None,
    bias: Sequence[float] | None,
    sink: float | None,
) -> Row:
    logits = []
    for j, k in enumerate(keys):
        if not seen[j]:
            logits.append(-math.inf)
            continue
        x = total([a * b for a, b in zip(q, k, strict=True)]) * scale
        if softcap is not None:
            x = softcap * math.tanh(x / softcap)
        if bias is not None:
            x = x + bias[j]
        logits.append(x)

    keys_seen = [j for j in range(len(keys)) if seen[j]]
    if not keys_seen:
        zeros = [0.0] * len(keys)
        return Row([0.0] * width, zeros, -math.inf if sink is None else sink, logits)

    joining = [logits[j] for j in keys_seen] + ([] if sink is None else [sink])
    maximum = math.nan if any(math.isnan(x) for x in joining) else max(joining)
    exponentials = {j: math.exp(logits[j] - maximum) for j in keys_seen}
    row_sum = total([*exponentials.values(), *([] if sink is None else [math.exp(sink - maximum)])])
    weights = [exponentials[j] / row_sum if seen[j] else 0.0 for j in range(len(keys))]
    output = [
        total([product(weights[j], values[j][d], logits[j]) for j in keys_seen])
        for d in range(width)
    ]
    return Row(output, weights, maximum + math.log(row_sum), logits)


def product(weight: float, value: float, logit: float) -> float:
    """Weight times value: a finite logit has a positive weight, even where that underflows to 0."""
    return value if weight == 0 and math.isinf(value) and math.isfinite(logit) else weight * value


def total(terms: Sequence[float]) -> float:
    """The sum, correctly rounded; by IEEE's rules where a term, or the sum, is not finite."""
    if all(math.isfinite(x) for x in terms):
        try:
            return math.fsum(terms)
        except OverflowError:
            pass
    return sum(terms, 0.0)


def _row_in_digits(
    q: Sequence[float],
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    width: int,
    seen: Sequence[bool],
    scale: float,
    softcap: float | None,
    bias: Sequence[float] | None,
    sink: float | None,
) -> Row:
    keys_seen = [j for j in range(len(keys)) if seen[j]]
    if not keys_seen:
        zeros = [0.0] * len(keys)
        lse = -math.inf if sink is None else sink
        return Row([0.0] * width, zeros, lse, [-math.inf] * len(keys))

    mp = mpmath.mp
    with mpmath.workdps(DIGITS):
        # A logit of size 10**n needs n more digits, or its exponential has none that are right.
        largest = mp.mpf(1)
        for j in keys_seen:
            sizes = ((_exact(abs(a)), _exact(abs(b))) for a, b in zip(q, keys[j], strict=True))
            largest += mp.fdot(sizes) * abs(scale)
        if bias is not None:
            largest += sum((abs(mp.mpf(bias[j])) for j in keys_seen), mp.mpf(0))
        if sink is not None and sink != -math.inf:
            largest += abs(mp.mpf(sink))
        digits = DIGITS + int(mp.log10(largest)) + 1
    with mpmath.workdps(digits):
        logits = {}
        for j in keys_seen:
            x = mp.fdot(zip(map(_exact, q), map(_exact, keys[j]), strict=True)) * scale
            if softcap is not None:
                x = mp.mpf(softcap) * mp.tanh(x / mp.mpf(softcap))
            if bias is not None:
                x += bias[j]
            logits[j] = x
        powers = {j: mp.exp(x) for j, x in logits.items()}
        row_sum = sum(powers.values(), mp.mpf(0))
        if sink is not None and sink != -math.inf:
            row_sum += mp.exp(mp.mpf(sink))
        weights = [powers[j] / row_sum if seen[j] else mp.mpf(0) for j in range(len(keys))]
        columns = ([_exact(values[j][d]) for j in keys_seen] for d in range(width))
        output = [mp.fdot([weights[j] for j in keys_seen], column) for column in columns]
        lse = mp.log(row_sum)
        return Row(
            [_float(x) for x in output],
            [_float(x) for x in weights],
            _float(lse),
            [_float(logits[j]) if seen[j] else -math.inf for j in range(len(keys))],
        )


@functools.lru_cache(maxsize=2**16)
def _exact(x: float) -> Any:
    """The same number for sums of products, made only once: this takes longer than to multiply."""
    return mpmath.mp.convert(x)


def _float(x: Any) -> float:
    """The nearest float64; infinite where it would overflow."""
    try:
        return float(x)
    except OverflowError:
        return math.copysign(math.inf, x)

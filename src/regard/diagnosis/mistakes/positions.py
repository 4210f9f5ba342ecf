"""Mistakes with positions: rows that are turned by the wrong angles, slopes of ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant, turned
from regard.diagnosis.mistakes.entry import (
    Entries,
    Family,
    Replacement,
    Variants,
    mistakes,
    replacing,
)

TURNED = (
    "Q, K = turn(Q, positions), turn(K, positions)  # before the scores; V is not turned",
    "q, k = apply_rotary_pos_emb(q, k, cos, sin)  # v is not turned",
)
HALVES = (
    "angles = np.outer(positions, base ** (-np.arange(0, D, 2) / D)); "
    "angles = np.concatenate([angles, angles], -1)  # with rotate_half",
    "emb = torch.cat((angles, angles), dim=-1)  # with rotate_half; repeat_interleave with pairs",
)
FREQUENCIES = (
    "frequencies = base ** (-np.arange(0, D, 2) / D)",
    "inv_freq = 1.0 / base ** (torch.arange(0, D, 2).float() / D)",
)
PLACES = (
    "Q = turn(Q, past + np.arange(L)); K = turn(K, np.arange(S))",
    "position_ids = torch.arange(past, past + L)  # for the queries and for the new keys",
)
BIAS = (
    "scores = Q @ K.swapaxes(-1, -2) / np.sqrt(D) - slopes[:, None, None] * np.abs(i - j)",
    "scores = q @ k.transpose(-1, -2) / math.sqrt(D) - slopes[:, None, None] * (i - j).abs()",
)
SLOPES = (
    "slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)",
    "slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H)",
)


def _turn(rows: Array, places: Array, frequencies: Array, probe: Probe) -> Array:
    angles = np.outer(places, frequencies)
    return turned(rows, np.cos(angles), np.sin(angles), probe.interleaved)


def _unturned(values: Values, side: str) -> Array:
    return np.asarray(values["queries" if side == "query" else "keys"])


def _rows(query: Callable[[Array], Array] | None, key: Callable[[Array], Array] | None) -> Variant:
    """Queries and keys turned at other positions; None: not turned."""

    def at(side: str, change: Callable[[Array], Array] | None) -> Replacement:
        def rows(values: Values, probe: Probe) -> Array:
            own, places = _unturned(values, side), values[f"{side}_positions"]
            return (
                own if change is None else _turn(own, change(places), values["frequencies"], probe)
            )

        return rows

    return replacing(rotated_queries=at("query", query), rotated_keys=at("key", key))


def _both(turn: Callable[[Array, Array, Array, Probe], Array]) -> Variant:
    """Queries and keys turned otherwise: `turn(rows, places, frequencies, probe)`."""

    def by(side: str) -> Replacement:
        def rows(values: Values, probe: Probe) -> Array:
            places, own = values[f"{side}_positions"], _unturned(values, side)
            return turn(own, places, values["frequencies"], probe)

        return rows

    return replacing(rotated_queries=by("query"), rotated_keys=by("key"))


def _both_by(frequencies: Callable[[Array], Array]) -> Variant:
    """Queries and keys turned by other angles."""
    return _both(lambda rows, places, own, probe: _turn(rows, places, frequencies(own), probe))


def _exchanged(first: bool, second: bool) -> Variant:
    """Queries and keys of whose pairs the first, or the second, has the sine for the cosine."""

    def turn(rows: Array, places: Array, frequencies: Array, probe: Probe) -> Array:
        angles, signs = np.outer(places, frequencies), np.sign(frequencies)
        cosines, sines = np.cos(angles), np.sin(angles)
        changed = (first & (signs < 0)) | (second & (signs > 0))
        other = np.where(changed, signs * sines, cosines)
        return turned(rows, other, np.where(changed, signs * cosines, sines), probe.interleaved)

    return _both(turn)


def _with_other_partners(rows: Array, places: Array, frequencies: Array, probe: Probe) -> Array:
    """Rows whose features are turned with those of the other convention."""
    angles, features = np.outer(places, frequencies), np.arange(rows.shape[-1])
    pairs, halves = features.reshape(-1, 2)[:, ::-1], features.reshape(2, -1)[::-1]
    order = (halves if probe.interleaved else pairs).T.ravel()
    return np.asarray(rows * np.cos(angles) + rows[..., order] * np.sin(angles))


def _other_layout(frequencies: Array) -> Array:
    """The frequencies of halves where the signs are those of pairs, and the reverse."""
    own = frequencies[: np.count_nonzero(frequencies)]  # the first features are turned
    half = len(own) // 2
    if half == 1 or own[1] < 0:  # in halves
        other = np.repeat(-own[:half], 2) * np.repeat([-1, 1], half)
    else:
        other = np.tile(-own[::2], 2) * np.tile([-1, 1], half)
    return np.concatenate([other, np.zeros(len(frequencies) - len(own))])


def _other_layout_of_part(frequencies: Array) -> Array:
    """The same where a part of the features is turned in halves, which come here as pairs."""
    own = frequencies[: np.count_nonzero(frequencies)]
    if len(own) == len(frequencies):
        return np.full(len(own), np.nan)
    angles = np.repeat(own[1::2], 2)
    first, second = np.split(angles, 2)
    pairs = np.stack([-first, second], -1).ravel()
    return np.concatenate([pairs, np.zeros(len(frequencies) - len(own))])


def _by_power(power: float) -> Variant:
    return _both_by(lambda f: np.sign(f) * np.abs(f) ** power)


def _values_too(values: Values, probe: Probe) -> Array:
    right = probe.right  # positions come after the values
    return _turn(right["values"], right["key_positions"], right["frequencies"], probe)


def _twice(side: str) -> Variant:
    name = f"rotated_{'queries' if side == 'query' else 'keys'}"

    def rows(values: Values, probe: Probe) -> Array:
        return _turn(probe.right[name], values[f"{side}_positions"], values["frequencies"], probe)

    return replacing(**{name: rows})


def _same(places: Array) -> Array:
    return places


def _from_zero(places: Array) -> Array:
    return np.arange(float(len(places)))


def _of_each_call(values: Values, probe: Probe, side: str) -> Array:
    """Positions that begin at 0 in each call with a cache."""
    calls = probe.chunks
    places = np.concatenate([np.arange(float(n)) for n in calls]) if calls else None
    own = values[f"{side}_positions"] if places is None else places
    return _turn(_unturned(values, side), own, values["frequencies"], probe)


def _turned_by_token(values: Values, probe: Probe) -> Array:
    """The same where one call decodes all tokens, one after the other."""
    return _turned_in_each_call(values, probe, probe.chunks or (1,) * probe.sizes["S"])


def _turned_in_each_call(
    values: Values, probe: Probe, chunks: tuple[int, ...] | None = None
) -> Array:
    """Scores with keys of a cache that are turned once more in each call that reads them."""
    queries, keys = values["rotated_queries"], values["rotated_keys"]
    chunks = probe.chunks if chunks is None else chunks
    calls = np.repeat(np.arange(len(chunks)), chunks)
    each = queries.shape[-3] // keys.shape[-3]
    scores = queries @ keys.repeat(each, -3).swapaxes(-1, -2)
    for call in range(1, len(chunks)):
        more = values["key_positions"] * (1 + np.maximum(call - calls, 0))
        again = _turn(_unturned(values, "key"), more, values["frequencies"], probe)
        rows = np.flatnonzero(calls == call) - probe.offset
        rows = rows[(rows >= 0) & (rows < probe.sizes["L"])]
        scores[..., rows, :] = queries[..., rows, :] @ again.repeat(each, -3).swapaxes(-1, -2)
    return scores


ROTARY: Entries = {
    "rotary_from_zero_in_each_call": (
        "with a cache, new tokens are turned as if they were at position 0",
        "Position i of a call is position past + i of the text.",
        (
            replacing(
                rotated_queries=lambda v, p: _of_each_call(v, p, "query"),
                rotated_keys=lambda v, p: _of_each_call(v, p, "key"),
            ),
            replacing(rotated_queries=lambda v, p: _of_each_call(v, p, "query")),
        ),
        PLACES,
    ),
    "rotary_in_each_call": (
        "keys in the cache are turned again in each call",
        "A cache of turned keys must not be turned again: turn only the new ones.",
        (replacing(scores=_turned_in_each_call), replacing(scores=_turned_by_token)),
        PLACES,
    ),
    "rotary_on_queries_only": (
        "rotary positions turn the queries but not the keys",
        "A score then depends on the position of the query, not on how far apart the two are.",
        (_rows(_same, None),),
    ),
    "rotary_on_keys_only": (
        "rotary positions turn the keys but not the queries",
        "A score then depends on the position of the key, not on how far apart the two are.",
        (_rows(None, _same),),
    ),
    "rotary_on_values_too": (
        "rotary positions turn the values too",
        "Only scores need positions; a turned value is another value.",
        (replacing(values=_values_too),),
    ),
    "rotary_on_values_and_keys": (
        "rotary positions turn keys and values instead of queries and keys",
        "Queries are not turned, and a turned value is another value.",
        (_rows(None, _same) | replacing(values=_values_too),),
    ),
    "rotary_on_values_and_queries": (
        "rotary positions turn queries and values instead of queries and keys",
        "Keys are not turned, and a turned value is another value.",
        (_rows(_same, None) | replacing(values=_values_too),),
    ),
    "rotary_twice": (
        "rotary positions are applied twice",
        "Rows are turned by twice the angle: a distance counts as twice as far.",
        (_twice("query") | _twice("key"),),
    ),
    "rotary_twice_on_keys": (
        "the keys are turned twice",
        "A cache of turned keys must not be turned again.",
        (_twice("key"),),
    ),
    "rotary_twice_on_queries": (
        "the queries are turned twice",
        "A score then depends on the position of the query too.",
        (_twice("query"),),
    ),
    "rotary_conventions_mixed": (
        "rotary angles are laid out for one convention and rows turned by the other",
        "With halves (rotate_half) feature p and p + D/2 have one angle; with interleaved pairs "
        "features 2p and 2p + 1 do.",
        (_both_by(_other_layout), _both_by(_other_layout_of_part), _both(_with_other_partners)),
        HALVES,
    ),
    "rotary_opposite_directions": (
        "queries and keys are turned in opposite directions",
        "A score then depends on the sum of two positions instead of their difference.",
        (_rows(_same, np.negative), _rows(np.negative, _same)),
    ),
    "rotary_sign_lost": (
        "the minus of the rotation is missing",
        "A pair (x, y) becomes (x·cos − y·sin, y·cos + x·sin): one of the two sines is negative.",
        (_both_by(np.abs), _both_by(lambda f: -np.abs(f))),
    ),
    "rotary_sine_for_cosine": (
        "a sine and a cosine of the rotation are exchanged",
        "A pair (x, y) becomes (x·cos − y·sin, y·cos + x·sin).",
        (_exchanged(False, True), _exchanged(True, False), _exchanged(True, True)),
        (
            "Q[..., 1::2] = even * sin + odd * cos  # even * cos - odd * sin before it",
            "out_odd = even * sin + odd * cos  # even * cos - odd * sin before it",
        ),
    ),
    "rotary_position_of_query": (
        "with more keys than queries, the first query is turned as if it were at position 0",
        "With a cache, position i of a call is position past + i of the text.",
        (_rows(_from_zero, _same),),
        PLACES,
    ),
    "rotary_off_by_one": (
        "queries and keys are turned at positions that differ by one",
        "The first query and the first key have the same position.",
        (_rows(lambda p: p + 1, _same), _rows(_same, lambda p: p + 1)),
        PLACES,
    ),
    "rotary_reversed": (
        "positions of the keys are counted from the end",
        "Key 0 is at position 0, like query 0.",
        (_rows(_same, lambda p: p[::-1]),),
        PLACES,
    ),
    "rotary_frequencies_wrong": (
        "the frequencies of rotary positions have another exponent",
        "Pair p turns by base^(−2p/D) radians for each position.",
        (_by_power(0.5), _by_power(2.0)),
        FREQUENCIES,
    ),
    "rotary_frequencies_inverted": (
        "the frequencies of rotary positions are inverted",
        "Pair p turns by base^(−2p/D) radians for each position, not base^(2p/D).",
        (_by_power(-1.0),),
        FREQUENCIES,
    ),
    "rotary_one_frequency": (
        "every pair of features turns at the same speed",
        "Pair p turns by base^(−2p/D) radians for each position.",
        (_by_power(0.0),),
        FREQUENCIES,
    ),
    "rotary_frequencies_reversed": (
        "the frequencies of rotary positions are in reverse order",
        "Pair 0 turns fastest, by 1 radian for each position.",
        (_both_by(lambda f: np.sign(f) * np.abs(f[::-1])),),
        FREQUENCIES,
    ),
    "rotary_in_degrees": (
        "angles are taken as degrees",
        "Sines and cosines take radians.",
        (_both_by(np.deg2rad), _both_by(np.rad2deg)),
        FREQUENCIES,
    ),
}


def _biased(bias: Callable[[Values, Probe], Array]) -> Variants:
    """Something else is added to the scores than the penalties of the distances."""

    def positioned(values: Values, probe: Probe) -> Array:
        names = ("capped", "scaled")
        before = next(values[name] for name in names if name in values)
        return np.asarray(before + bias(values, probe))

    return (replacing(positioned=positioned),)


def _signed(values: Values, probe: Probe) -> Array:
    """Slopes times the position of the key, less that of the query."""
    ahead = values["key_positions"] - values["query_positions"][:, None]
    return np.asarray(_by_head(values) * ahead)


def _by_head(values: Values) -> Array:
    return np.asarray(values["positions_slopes"][:, None, None])


def _with_slopes(slopes: Callable[[Array], Array]) -> Variants:
    """Other slopes, made of the numbers of the heads from 1."""

    def bias(values: Values, probe: Probe) -> Array:
        heads = np.arange(1.0, probe.sizes["H"] + 1)
        apart = np.abs(values["key_positions"] - values["query_positions"][:, None])
        return np.asarray(-np.broadcast_to(slopes(heads), heads.shape)[:, None, None] * apart)

    return _biased(bias)


def _from_first_key(values: Values, probe: Probe) -> Array:
    """Distances with the first query at position 0."""
    places = np.arange(float(probe.sizes["L"]))[:, None]
    apart = np.abs(values["key_positions"] - places)
    return np.asarray(-np.reshape(values["positions_slopes"], (-1, 1, 1)) * apart)


ALIBI: Entries = {
    "alibi_sign": (
        "ALiBi is added with the wrong sign: far keys are favoured",
        "slope·|i − j| is a penalty: it is subtracted.",
        _biased(lambda values, probe: values["penalties"]),
    ),
    "alibi_position_of_query": (
        "with more keys than queries, ALiBi takes the first query for the first token",
        "With a cache, query i is at position past + i: the oldest keys are favoured otherwise.",
        _biased(_from_first_key),
        PLACES,
    ),
    "alibi_not_absolute": (
        "ALiBi grows with j − i instead of falling with |i − j|",
        "Keys after the query are then favoured the more, the further away they are.",
        _biased(_signed) + _biased(lambda values, probe: -_signed(values, probe)),
    ),
    "alibi_slopes_of_eight": (
        "the slopes of ALiBi are 2^−1, 2^−2, … whatever the number of heads",
        "That is right for 8 heads alone; with H heads slope n is 2^(−8n/H).",
        _with_slopes(lambda n: 2.0**-n),
        SLOPES,
    ),
    "alibi_slopes_from_zero": (
        "the slopes of ALiBi are counted from 0: the first one is 1",
        "Slope n of H is 2^(−8n/H) for n = 1 … H.",
        _with_slopes(lambda n: 2.0 ** (-8 * (n - 1) / len(n)))
        + _with_slopes(lambda n: 2 ** (1 - n)),
        SLOPES,
    ),
    "alibi_slopes_reversed": (
        "the slopes of ALiBi are in reverse order",
        "The first head has the steepest slope.",
        _with_slopes(lambda n: 2.0 ** (-8 * n[::-1] / len(n))),
        SLOPES,
    ),
    "alibi_one_slope": (
        "every head has the same slope of ALiBi",
        "Heads look near or far because their slopes differ.",
        _with_slopes(lambda n: np.ones(1))
        + _with_slopes(lambda n: np.full(1, 0.5))
        + _with_slopes(lambda n: np.full(1, 0.25))
        + _with_slopes(lambda n: np.full(1, 0.1))
        + _with_slopes(lambda n: 2.0 ** (-8 * n[:1] / len(n)))
        + _with_slopes(lambda n: 2.0 ** (-8 * n[-1:] / len(n))),
        SLOPES,
    ),
    "alibi_slopes_linear": (
        "the slopes of ALiBi are not powers of two",
        "Slope n of H is 2^(−8n/H).",
        _with_slopes(lambda n: n / len(n))
        + _with_slopes(lambda n: 1 / n)
        + _with_slopes(lambda n: np.exp(-8 * n / len(n)))
        + _with_slopes(lambda n: np.exp(-n)),
        SLOPES,
    ),
    "alibi_scaled": (
        "ALiBi is divided by √D like the scores",
        "It is added after the scale.",
        _biased(lambda values, probe: -values["penalties"] * probe.sizes["D"] ** -0.5),
    ),
    "alibi_unscaled_scores": (
        "with ALiBi the scores are not scaled",
        "The dot products are divided by √D before the penalty is subtracted.",
        (
            replacing(
                positioned=lambda values, probe: np.asarray(values["scores"] - values["penalties"])
            ),
        ),
    ),
    "alibi_twice": (
        "ALiBi is subtracted twice",
        "slope·|i − j| is subtracted once.",
        _biased(lambda values, probe: -2 * values["penalties"]),
    ),
    "alibi_multiplied": (
        "the scores are multiplied by the distances instead of lowered by them",
        "slope·|i − j| is subtracted from each score.",
        (
            replacing(
                positioned=lambda values, probe: np.asarray(values["scaled"] * -values["penalties"])
            ),
        ),
    ),
    "alibi_squared": (
        "ALiBi grows with the square of the distance",
        "The penalty is slope·|i − j|.",
        _biased(
            lambda values, probe: (
                -_by_head(values)
                * np.square(values["key_positions"] - values["query_positions"][:, None])
            )
        ),
    ),
}


# By window: where code of a ring buffer takes a query, and a key, to be.
SLOTS: tuple[tuple[Callable[[Array, int], Array], Callable[[Array, int], Array]], ...] = (
    (lambda row, size: np.minimum(row, size - 1), np.mod),
    (np.mod, np.mod),
    (lambda row, size: row, np.mod),
)


def positions_of_slots() -> Iterator[Variant]:
    """Slots of a ring buffer for the positions of its keys, with rotary positions and ALiBi."""
    for of_row, of_key in SLOTS:

        def places(values: Values, probe: Probe, own: Any = (of_row, of_key)) -> list[Array]:
            sides = (values["query_positions"], values["key_positions"])
            return [of(one, probe.window or len(one)) for of, one in zip(own, sides, strict=True)]

        def apart(values: Values, probe: Probe, places: Any = places) -> Array:
            row, key = places(values, probe)
            return np.asarray(row[:, None] - key)

        def rows(values: Values, probe: Probe, places: Any = places) -> Array:
            return _turn(values["queries"], places(values, probe)[0], values["frequencies"], probe)

        def keys(values: Values, probe: Probe, places: Any = places) -> Array:
            return _turn(values["keys"], places(values, probe)[1], values["frequencies"], probe)

        def lowered(values: Values, probe: Probe, apart: Any = apart) -> Array:
            return np.asarray(-_by_head(values) * apart(values, probe))

        def lowered_by_size(values: Values, probe: Probe, apart: Any = apart) -> Array:
            return np.asarray(-_by_head(values) * np.abs(apart(values, probe)))

        yield replacing(rotated_queries=rows, rotated_keys=keys)
        yield from (*_biased(lowered), *_biased(lowered_by_size))


FAMILY: Family = "positions, softcap and sinks"
ROTARY_MISTAKES = mistakes(FAMILY, TURNED, ROTARY)
ALIBI_MISTAKES = mistakes(FAMILY, BIAS, ALIBI)

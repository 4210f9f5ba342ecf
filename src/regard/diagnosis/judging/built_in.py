"""What a function may compute besides, without a parameter that says so.

Positions, a softcap and a window: each turns a probe into that of the computation which has it.
Must not know mistakes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.gradient_probe import GradientProbe, with_gradients
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.judging.added_scores import AddedScores, factor_of
from regard.diagnosis.judging.places import SeenPlaces
from regard.positions import Alibi

Positions = Literal["", "rotary, halves", "rotary, pairs", "ALiBi"]
POSITIONS: tuple[Positions, ...] = ("", "rotary, halves", "rotary, pairs", "ALiBi")
BASES = (10000.0, 500000.0, 1000000.0)
# Limits of models and of examples; those of a function's own parameters come first.
SOFTCAPS = (30.0, 50.0, 20.0, 5.0, 10.0, 2.0, 15.0, 25.0, 100.0)
WORDS = {
    "rotary, halves": "rotary positions in halves",
    "rotary, pairs": "rotary positions in interleaved pairs",
    "ALiBi": "ALiBi",
}

SCALES = {
    "none": "unscaled scores",
    "width": "scores divided by D",
    "model": "scores divided by the root of the width of all heads",
}


@dataclass(frozen=True)
class BuiltIn:
    """What is computed besides; without any, plain attention."""

    positions: Positions = ""
    base: float = BASES[0]
    share: float = 1.0  # of the features of a head, the first ones, that rotary positions turn
    softcap: float | None = None
    window: int | None = None
    linear: str = ""  # the feature map of linear attention
    said_scale: str = ""  # as its code says it is meant to be: see SCALES
    added: AddedScores | None = None
    places: SeenPlaces | None = None  # what is seen of a map
    any_heads: bool = False  # its slopes are known for numbers of heads that are no power of two
    at_end: bool = False  # with more keys than queries, the last of both are at the same position

    def __str__(self) -> str:
        words = [SCALES[self.said_scale]] if self.said_scale else []
        is_map = not self.linear.startswith(("attention", "efficient", "retention"))
        of_map = "linear attention of φ(x) = " * is_map
        words += [f"{of_map}{self.linear}"] if self.linear else []
        words += [WORDS[self.positions]] if self.positions else []
        if self.positions.startswith("rotary") and self.base != BASES[0]:
            words[-1] += f" of base {self.base:g}"
        if self.share != 1:
            words[-1] += f" of {self.share:.0%} of the features"
        if self.softcap is not None:
            words.append(f"a softcap of {self.softcap:g}")
        if self.window is not None:
            words.append(f"a window of {self.window} key{'s' if self.window > 1 else ''}")
        if self.added is not None:
            words.append(str(self.added))
        words += [str(self.places)] if self.places is not None else []
        return " and ".join(words)

    @property
    def is_combined(self) -> bool:
        """Whether there are two of them."""
        return bool(self.positions) and (self.softcap, self.window) != (None, None)

    def of(self, probes: Iterable[Probe]) -> Iterator[Probe]:
        """The probes of this computation; without those that it does not fit."""
        return (one for probe in probes if (one := with_built_in(self, probe)) is not None)


PLAIN = BuiltIn()


@lru_cache(maxsize=4096)
def with_built_in(own: BuiltIn, probe: Probe) -> Probe | None:
    """The probe of a computation that has this; None if it does not fit."""
    if own == PLAIN:
        return probe
    if isinstance(probe, GradientProbe):
        if own.share != 1:
            return None
        forward = None if probe.forward is None else with_built_in(own, probe.forward)
        return None if forward is None else with_gradients(forward, probe.wanted)
    sizes, inputs = probe.sizes, dict(probe.inputs)
    if own.positions:
        heads = sizes["H"]  # few have the slopes for a number that is no power of two
        if own.positions == "ALiBi":
            if heads & (heads - 1) and not own.any_heads:
                return None
        elif sizes["D"] * own.share % 2:
            return None
        elif own.share != 1 and own.positions == "rotary, halves":
            inputs = _in_pairs(inputs, int(sizes["D"] * own.share), sizes["D"])
        late = sizes["S"] - sizes["L"] if own.at_end else 0
        inputs["query_positions"] = np.arange(float(sizes["L"])) + late
        inputs["key_positions"] = np.arange(float(sizes["S"]))
        if own.positions == "ALiBi":
            inputs["positions_slopes"] = Alibi().slopes_of(sizes["H"])
        else:
            inputs["frequencies"] = _frequencies(own, sizes["D"])
    if own.added is not None:
        if (added := own.added.of(probe)) is None:
            return None
        inputs["bias"] = inputs.get("bias", 0.0) + added
    keep = probe.keep
    if own.places is not None:
        seen = own.places.of(probe)
        if seen is None:
            return None
        keep = seen if keep is None else seen & keep
    if own.softcap is not None and "softcap" not in inputs:
        inputs["softcap"] = np.array(own.softcap)
    window = probe.window if own.window is None or probe.window else own.window
    scale = probe.scale
    if own.said_scale and scale is None:
        scale = factor_of(own.said_scale, sizes)
    return replace(probe, inputs=inputs, window=window, scale=scale, keep=keep)


def _in_pairs(inputs: Mapping[str, Array], turned: int, width: int) -> dict[str, Array]:
    """The same queries and keys with their features in another order, which changes no score.

    The two halves of the first ones, of which the first `turned` are, alternate.
    """
    order = np.arange(width)
    order[:turned] = order[:turned].reshape(2, -1).T.ravel()
    found = dict(inputs)
    for name in ("queries", "keys", "W_q", "W_k", "b_q", "b_k"):
        if name in found:
            array = found[name]
            heads = array.reshape(*array.shape[:-1], -1, width)
            found[name] = heads[..., order].reshape(array.shape)
    return found


def _frequencies(own: BuiltIn, width: int) -> Array:
    """Radians per position of each feature; the first one of a pair turns the other way."""
    turned = int(width * own.share)
    pairs = own.base ** (-np.arange(0, turned, 2) / turned)
    if own.share != 1:  # see _in_pairs
        return np.append(np.stack([-pairs, pairs], -1).ravel(), np.zeros(width - turned))
    if own.positions == "rotary, pairs":
        return np.stack([-pairs, pairs], -1).ravel()
    return np.concatenate([-pairs, pairs])


def usual(
    defaults: Iterable[float],
    windows: Iterable[int],
    *,
    square: bool = False,
    shares: Sequence[float] = (),
) -> Iterator[BuiltIn]:
    """What functions often have, one at a time and then together.

    `defaults` are numbers of the function's; `square`: it never has more keys than queries;
    `shares`: of the features that rotary positions may turn.
    """
    defaults = list(defaults)
    bases = [BASES[0]] + [base for base in BASES[1:] if base in defaults]
    caps = list(dict.fromkeys([*(x for x in defaults if 0.5 <= x <= 200), *SOFTCAPS]))
    at_ends = (False,) if square else (False, True)
    positions = [
        BuiltIn(one, base, at_end=at_end)
        for one in POSITIONS[1:]
        for base in (bases if one != "ALiBi" else bases[:1])
        for at_end in at_ends
    ]
    positions += [
        replace(one, share=share)
        for share in shares
        for one in positions
        if one.positions != "ALiBi"
    ]
    capped = [BuiltIn(softcap=cap) for cap in caps]
    windowed = [BuiltIn(window=window) for window in windows]
    yield from (*positions, *windowed, *capped)
    for one, other in itertools.product(positions, (*windowed, *capped)):
        yield replace(one, softcap=other.softcap, window=other.window)
    own = [one for one in capped if one.softcap in defaults]
    for other, cap in itertools.product(windowed, own):
        yield replace(other, softcap=cap.softcap)
        for one in positions:
            yield replace(one, softcap=cap.softcap, window=other.window)

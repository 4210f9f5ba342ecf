"""The angles of rotary positions: frequencies under each way of scaling, cosines and sines.

Owns the names and the formulas of scalings, as transformers' configurations have them. Must not
know calls. All of it is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import as_flag, as_number, read_array
from regard.errors import DtypeError, OptionError, ShapeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray


LENGTH = "original_max_position_embeddings"

# For each kind of scaling what it needs, and what it may have besides.
_NAMES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor", LENGTH), ()),
    "yarn": (
        ("factor", LENGTH),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", LENGTH), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", LENGTH), ()),
}
# What a model's configuration also has there: it goes to the base and to the width.
BESIDE = ("rope_theta", "partial_rotary_factor")

Scaling = tuple[tuple[str, Any], ...]  # (name, value) for each entry, the kind first


def read_scaling(given: Any) -> Scaling:
    """The entries of `scaling=`, checked; a value of None is left out, as in a configuration."""
    if not isinstance(given, Mapping):
        raise DtypeError(
            "positions.scaling must be a mapping with rope_type, such as a model's rope_parameters,"
            f" not {safe_text(repr(given), 60)}"
        )
    entries = {name: value for name, value in given.items() if value is not None}
    if inner := [name for name, value in entries.items() if isinstance(value, Mapping)]:
        raise OptionError(
            f"positions.scaling has one entry for each kind of layer; pass one of them: "
            f"{safe_text(', '.join(map(repr, inner)), 120)}, or use Rotary.from_config"
        )
    kind = kind_of(entries)
    entries = {name: value for name, value in entries.items() if name not in ("rope_type", "type")}
    needed, also = _NAMES[kind]
    for name in needed:
        if name not in entries:
            hint = ""
            if name == LENGTH:
                hint = "; it is max_position_embeddings of the model before it was extended"
            raise OptionError(f'positions.scaling of type "{kind}" needs {name}{hint}')
    known = (*needed, *also, *BESIDE)
    for name in entries:
        if name not in known:
            raise OptionError(
                f"positions.scaling has {safe_text(repr(name), 60)}, which {kind} does not take; "
                f"it takes {', '.join(known)}"
            )
    if kind == "longrope" and not {"factor", "attention_factor"} & entries.keys():
        raise OptionError(
            'positions.scaling of type "longrope" needs factor, by which cosines and sines grow: '
            f"max_position_embeddings / {LENGTH} of the model; Rotary.from_config finds it"
        )
    read = {name: _read(name, one) for name, one in entries.items()}
    if kind == "llama3" and read["low_freq_factor"] > read["high_freq_factor"]:
        raise OptionError(
            f"positions.scaling has low_freq_factor {read['low_freq_factor']:g} above "
            f"high_freq_factor {read['high_freq_factor']:g}; it must be below"
        )
    return (("rope_type", kind), *read.items())


def kind_of(entries: Mapping[str, Any]) -> str:
    """The kind of scaling, under its newer or its older name."""
    kinds = [entries[name] for name in ("rope_type", "type") if entries.get(name) is not None]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _NAMES:
            raise OptionError(
                f"positions.scaling has rope_type {safe_text(repr(kind), 60)}; it must be one of "
                f"{', '.join(_NAMES)}"
            )
    if kinds[1:] and kinds[0] != kinds[1]:
        raise OptionError(
            f"positions.scaling has rope_type {kinds[0]} and type {kinds[1]}; keep one of them"
        )
    return kinds[0] if kinds else "default"


def _read(name: str, value: Any) -> Any:
    name = f"positions.scaling[{name!r}]"
    if name.endswith("truncate']"):
        return as_flag(name, value)
    if name.endswith(("short_factor']", "long_factor']")):
        array = read_array(name, value, "a list of numbers")
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise ShapeError(f"{name} must be a list of numbers, one for each pair of features")
        return tuple(positive(name, one) for one in array.tolist())
    return positive(name, value)


def positive(name: str, value: Any) -> float:
    """A number that is finite and above 0."""
    number = as_number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise OptionError(f"{name} is {number}; it must be positive and finite")
    return number


def depends_on_length(scaling: Scaling) -> bool:
    """Whether the frequencies of a longer text are others, those of its first tokens included."""
    return dict(scaling)["rope_type"] in ("dynamic", "longrope")


@lru_cache(maxsize=64)
def frequencies(base: float, width: int, scaling: Scaling, length: int) -> NDArray[np.float64]:
    """Radians per position of each pair of features, (width / 2,).

    `length` is that of the text, which two kinds of scaling look at: its largest position + 1.
    """
    entries = dict(scaling)
    kind, factor = entries["rope_type"], entries.get("factor", 1.0)
    trained = entries.get(LENGTH, 0.0)
    if kind == "dynamic":
        factor = factor * max(length, trained) / trained - (factor - 1)
    if kind in ("dynamic", "ntk") and width > 2:
        base = base * factor ** (width / (width - 2))
    exponents = np.arange(0, width, 2) / width
    plain = 1.0 / base**exponents
    match kind:
        case "linear":
            plain = plain / factor
        case "longrope":
            name = "long_factor" if length > trained else "short_factor"
            own = np.array(entries[name])
            if own.shape != plain.shape:
                raise ShapeError(
                    f"positions.scaling[{name!r}] has {own.size} numbers but {width} features are "
                    f"rotated; it must have {plain.size}, one for each pair"
                )
            plain = plain / own
        case "llama3":
            plain = _between(plain, factor, trained, entries)
        case "yarn":
            plain = _by_ramp(plain, base, width, entries)
    plain.setflags(write=False)
    return plain


def _between(
    plain: NDArray[np.float64], factor: float, trained: float, entries: Mapping[str, Any]
) -> NDArray[np.float64]:
    """Llama 3: slow frequencies are divided by the factor, fast ones stay, others blend."""
    low, high = entries["low_freq_factor"], entries["high_freq_factor"]
    turns = trained * plain / (2 * math.pi)  # whole turns over the text of training
    if high == low:
        kept = (turns > high).astype(np.float64)
    else:
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - kept) * plain / factor + kept * plain)


def _by_ramp(
    plain: NDArray[np.float64], base: float, width: int, entries: Mapping[str, Any]
) -> NDArray[np.float64]:
    """YaRN: pairs of few turns are divided by the factor, those of many stay, a ramp between."""
    trained = entries[LENGTH]

    def pair_of(turns: float) -> float:
        """The number of the pair that makes so many turns over the text of training."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(entries.get("beta_fast", 32.0)), pair_of(entries.get("beta_slow", 1.0))
    if entries.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 0.001
    divided = np.clip((np.arange(width // 2) - low) / span, 0.0, 1.0)
    return np.asarray(plain / entries["factor"] * divided + plain * (1 - divided))


def attention_factor(scaling: Scaling) -> float:
    """What cosines and sines are multiplied by: 1, but for YaRN and LongRoPE."""
    entries = dict(scaling)
    kind, factor = entries["rope_type"], entries.get("factor", 1.0)
    if "attention_factor" in entries:
        return float(entries["attention_factor"])
    if kind == "yarn":

        def grown(by: float) -> float:
            return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

        if "mscale" in entries and "mscale_all_dim" in entries:
            return grown(entries["mscale"]) / grown(entries["mscale_all_dim"])
        return grown(1.0)
    if kind == "longrope" and factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(entries[LENGTH]))
    return 1.0


# Tables of at most so many bytes are kept: those of a model's layers are all the same, and those of
# one token more are a row more of them.
_KEPT_BYTES, _LEAST_ROWS = 2**23, 256


def table(
    own: NDArray[np.float64], factor: float, places: range
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines (count, pairs) of consecutive positions."""
    rows = max(_LEAST_ROWS, 1 << max(0, places.stop - 1).bit_length())
    if places.start < 0 or 16 * rows * own.size > _KEPT_BYTES:
        return turned(np.arange(places.start, places.stop), own, factor)
    cosines, sines = _kept(own.tobytes(), factor, rows)
    return cosines[places.start : places.stop], sines[places.start : places.stop]


@lru_cache(maxsize=8)
def _kept(own: bytes, factor: float, rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return turned(np.arange(rows), np.frombuffer(own), factor)


def turned(
    positions: NDArray[Any], own: NDArray[np.float64], factor: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines (…, pairs) of any positions, times the attention factor."""
    angles = np.multiply.outer(np.ascontiguousarray(positions, np.float64), own)
    return np.cos(angles) * factor, np.sin(angles) * factor

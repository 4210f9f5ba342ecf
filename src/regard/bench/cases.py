"""The cases of each grid, and the arrays of one case.

Owns shapes, masks and the useful work of a case. Must not know the libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.errors import OptionError, safe_text
from regard.masks import Lengths
from regard.positions import Alibi, Rotary

MASKS = ("padding", "dense", "bias", "window", "lengths", "blocks")
POSITIONS = ("rotary", "alibi")  # named in the place of a mask, and compared with none like one
# The work of each direction in that of a forward pass: five products to its two, then all seven.
DIRECTIONS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
WINDOW = 256  # keys to the left in the window case
BLOCK = 256  # rows and columns of a block of the block mask
WHOLE = 16  # keys: as many lanes as the widest vector has, so that none is left over


@dataclass(frozen=True)
class Case:
    """One call to measure. `unit` is the unit of its printed speed.

    Queries are normal numbers times `queries`; those of a `huge_key` are the largest there are.
    """

    group: str
    B: int
    H: int
    L: int
    S: int
    D: int
    G: int
    E: int
    dtype: str = "float32"
    causal: bool = False
    mask: str | None = None
    unit: str = "GF/s"
    direction: str = "forward"
    queries: int = 1
    huge_key: bool = False

    @property
    def name(self) -> str:
        """The shape, after what differs from a plain forward call: `backward causal 1,8,77,77,64`.

        What may differ: direction, numbers, mask, causal, and the dtype if it is not float32.
        """
        heads = f"{self.H}" if self.G == self.H else f"{self.H}/{self.G}"
        width = f"{self.D}" if self.E == self.D else f"{self.D}/{self.E}"
        words = [None if self.direction == "forward" else self.direction]
        words.append(f"queries×{self.queries}" if self.queries != 1 else None)
        words.append("huge key" if self.huge_key else None)
        words += [self.mask, "causal" if self.causal else None]
        words.append(None if self.dtype == "float32" else self.dtype)
        words.append(f"{self.B},{heads},{self.L},{self.S},{width}")
        return " ".join(word for word in words if word)

    @property
    def plain(self) -> Case | None:
        """What the cost of a mask, of numbers or of the last keys is measured beside, if anything.

        >>> tails = [case("tails", 1, 8, keys, keys, 64, unit="ms") for keys in (33, 77)]
        >>> [one.plain.name for one in tails]
        ['1,8,32,32,64', '1,8,64,64,64']
        """
        if self.unit != "ms":
            return None
        odd = self.S % WHOLE if self.group == "tails" else 0
        bare = replace(self, mask=None, queries=1, huge_key=False, L=self.L - odd, S=self.S - odd)
        return None if bare == self else bare

    @property
    def bytes(self) -> int:
        """The size of all keys and values."""
        return self.B * self.G * self.S * (self.D + self.E) * dtype_of(self.dtype).itemsize

    @property
    def array_bytes(self) -> int:
        """The size of all arrays that a call takes and returns."""
        B, H, L = self.B, self.H, self.L
        sizes = [B * H * L * self.D, B * self.G * self.S * (self.D + self.E)]
        sizes += [math.prod(shape) for shape in self.answers.values()]
        if self.direction != "forward":
            sizes.append(B * H * L * self.E)
        numbers = H * self.S * L * 4
        masks = {"bias": numbers, "alibi": numbers, "rotary": 0, None: 0}
        mask = masks.get(self.mask, self.S * L)
        return sum(sizes) * dtype_of(self.dtype).itemsize + mask

    @property
    def answers(self) -> dict[str, tuple[int, ...]]:
        """What a call returns, by name, with its shape: output, then gradients."""
        B, H, G, L, S = self.B, self.H, self.G, self.L, self.S
        shapes: dict[str, tuple[int, ...]] = {}
        shapes |= {"output": (B, H, L, self.E)} if self.direction != "backward" else {}
        if self.direction != "forward":
            shapes |= {"query": (B, H, L, self.D), "key": (B, G, S, self.D)}
            shapes |= {"value": (B, G, S, self.E)}
            shapes |= {"bias": (1, H, L, S)} if self.mask == "bias" else {}
        return shapes

    @property
    def scores(self) -> int:
        """The size of the matrix of scores."""
        return self.B * self.H * self.L * self.S


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case: query (B, H, L, D), key (B, G, S, D), value (B, G, S, E).

    `keep` (True = attend, broadcastable to (B, H, L, S)) is the mask of the case as booleans,
    without causal; `bias` is added to the scores. `options` are regard's preferred form of them:
    for the bias of Alibi, and for Rotary, which others have no form of, the positions.
    `grad_output` (B, H, L, E) is there unless the direction is forward.
    """

    case: Case
    query: Array
    key: Array
    value: Array
    keep: Array | None = None
    bias: Array | None = None
    lengths: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    grad_output: Array | None = None

    @property
    def keep_or_bias(self) -> Array | None:
        """The mask in the form that most libraries take."""
        return self.keep if self.bias is None else self.bias

    def visible_keys(self, rows: Any = slice(None)) -> Array | None:
        """Which keys (…, rows, S) some rows see, causal included; None if all."""
        keep, case = self.keep, self.case
        if keep is not None and keep.shape[2] > 1:
            keep = keep[:, :, rows]
        if not case.causal:
            return keep
        below = np.arange(case.L)[rows, None] >= np.arange(case.S)
        return below if keep is None else keep & below

    @cached_property
    def visible(self) -> int:
        """The number of visible scores."""
        keep = self.visible_keys()
        return (
            self.case.scores if keep is None else int(keep.sum()) * (self.case.scores // keep.size)
        )

    @property
    def operations(self) -> int:
        """Floating-point operations of a forward pass's two products over visible scores, or
        the usual multiple of them: 2.5 for a backward pass, 3.5 for both.
        """
        forward = 2 * self.visible * (self.case.D + self.case.E)
        return int(DIRECTIONS[self.case.direction] * forward)


def grid(name: str) -> tuple[Case, ...]:
    """The cases of a grid; an OptionError if there is none of that name.

    >>> [case.name for case in grid("quick")][:3]
    ['1,1,3,3,4', '1,8,128,128,64', '1,8,1024,1024,64']
    """
    if name not in GRIDS:
        raise OptionError(
            f"grid is {safe_text(repr(name), 40)}; known are {', '.join(sorted(GRIDS))}"
        )
    return GRIDS[name]


def case(group: str, *sizes: int, G: int | None = None, E: int | None = None, **more: Any) -> Case:
    """A case of B, H, L, S, D; G and E are H and D unless given.

    >>> case("full", 1, 8, 128, 128, 64, causal=True).name
    'causal 1,8,128,128,64'
    """
    B, H, L, S, D = sizes
    return Case(group, B, H, L, S, D, H if G is None else G, D if E is None else E, **more)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random normal arrays with unit variance, and the mask of the case."""
    rng = np.random.default_rng(seed)
    B, H, G, L, S = case.B, case.H, case.G, case.L, case.S
    query = _normal(rng, (B, H, L, case.D), case.dtype, case.queries)
    key, value = (_normal(rng, (B, G, S, width), case.dtype) for width in (case.D, case.E))
    if case.huge_key:
        key[:, :, S // 2] = np.copysign(np.finfo(key.dtype).max, key[:, :, S // 2])
    options: dict[str, Any] = {"causal": case.causal}
    keep = bias = lengths = None
    match case.mask:
        case "padding" | "lengths":
            # From all keys down to three quarters of them, as in a batch sorted by length.
            lengths = np.linspace(S, 3 * S // 4, B).astype(np.int64)
            keep = np.arange(S) < lengths[:, None, None, None]
        case "dense":
            keep = rng.random((B, 1, L, S)) < 0.75
            keep[..., 0] = True
        case "bias":
            bias = _normal(rng, (1, H, L, S), case.dtype)
            options["bias"] = bias
        case "alibi":
            options["positions"] = Alibi()
            apart = np.abs(np.arange(L)[:, None] - np.arange(S))
            bias = (-Alibi().slopes_of(H)[:, None, None] * apart)[None].astype(case.dtype)
        case "rotary":
            options["positions"] = Rotary()
        case "window":
            distance = np.arange(L)[:, None] - np.arange(S)
            keep = ((distance <= WINDOW) & (distance >= 0))[None, None]
            options["window"] = (WINDOW, 0)
        case "blocks":
            rows, columns = np.arange(L)[:, None] // BLOCK, np.arange(S) // BLOCK
            keep = ((rows + columns) % 2 == 0)[None, None]
    if case.mask == "lengths":
        options["mask"] = Lengths(lengths)
    else:
        lengths = None
        options |= {} if keep is None or case.mask == "window" else {"mask": keep}
    grad = None if case.direction == "forward" else _normal(rng, (B, H, L, case.E), case.dtype)
    return Inputs(case, query, key, value, keep, bias, lengths, options, grad)


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of this name, bfloat16 too.

    >>> dtype_of("float16")
    dtype('float16')
    """
    if name != "bfloat16":
        return np.dtype(name)
    from ml_dtypes import bfloat16

    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, times: int = 1) -> Array:
    """At an address that is a multiple of 64: some peers copy other arrays."""
    kind = dtype_of(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    array = room[start : start + size].view(kind).reshape(shape)
    numbers = rng.standard_normal(shape, np.float64 if dtype == "float64" else np.float32)
    array[...] = numbers * times
    return array


SHAPES = (
    (1, 8, 128, 128, 64),
    (8, 12, 128, 128, 32),
    (1, 8, 512, 512, 64),
    (1, 8, 1024, 1024, 64),
    (1, 8, 2048, 2048, 64),
    (1, 8, 2048, 2048, 128),
    (1, 1, 8192, 8192, 64),
)
LONG = (1, 1, 32768, 32768, 64)
SMALL = ((1, 1, 3, 3, 4), (1, 1, 16, 16, 64))
MIDDLE = (1, 8, 1024, 1024, 64)
DECODE: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1, 32, 1, 4096, 128), 32),
    ((1, 32, 1, 4096, 128), 8),
    ((1, 32, 1, 65536, 128), 8),
    ((8, 32, 1, 1024, 128), 8),
)


def _small() -> list[Case]:
    return [case("small", *sizes, unit="µs") for sizes in SMALL]


def _decode() -> list[Case]:
    return [case("decode", *sizes, G=groups, unit="GB/s") for sizes, groups in DECODE]


def _masked(names: tuple[str, ...]) -> list[Case]:
    # Four batch elements where the mask differs between them.
    batch = {"padding": 4, "lengths": 4}
    return [
        case("masks", batch.get(name, 1), 8, 1024, 1024, 64, mask=name, unit="ms") for name in names
    ]


def _positioned() -> list[Case]:
    return [
        case("positions", 1, 8, L, L, 64, mask=name, causal=True, unit="ms", direction=direction)
        for direction in ("forward", "both")
        for name in POSITIONS
        for L in (512, 2048)
    ]


def _full() -> list[Case]:
    kinds = ("float16", "bfloat16", "float64")
    odd = [(1, 8, 1024, 1024, D) for D in (40, 80, 96)] + [
        (1, 8, L, L, 64) for L in (77, 257, 1000)
    ]
    return [
        *_small(),
        *(case("full", *sizes) for sizes in SHAPES),
        *(case("causal", *sizes, causal=True) for sizes in SHAPES),
        *_masked(MASKS),
        *_positioned(),
        *_decode(),
        *(case("types", *MIDDLE, dtype=kind, causal=c) for kind in kinds for c in (False, True)),
        case("types", 1, 8, 2048, 2048, 128, dtype="bfloat16"),
        *(case("widths", 1, 8, 1024, 1024, D, E=E) for D, E in ((64, 128), (128, 64), (192, 128))),
        *(case("odd", *sizes) for sizes in odd),
        *(case("odd", 1, 8, L, L, 64, causal=True) for L in (257, 1000)),
        case("long", *LONG),
        *_gradients("backward"),
        *_gradients("both"),
    ]


def _gradients(direction: str) -> list[Case]:
    sizes = [(1, 8, L, L, 64) for L in (128, 257, 512, 1024, 2048, 4096)]
    sizes += [(1, 8, L, L, 128) for L in (512, 2048)]
    others: tuple[dict[str, Any], ...] = (
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"mask": "bias"},
        {"G": 2},
    )
    return [
        *(case(direction, *one, direction=direction) for one in sizes),
        *(case(direction, *one, causal=True, direction=direction) for one in sizes[2:6]),
        *(case(direction, *MIDDLE, **other, direction=direction) for other in others),
    ]


def _spread() -> list[Case]:
    """What the time must not depend on: the numbers, and one key more."""
    sizes, batch = (1, 8, 512, 512, 64), (4, 8, 512, 512, 64)
    return [
        *(
            case("spread", *sizes, dtype=kind, unit="ms", direction=direction, queries=times)
            for direction in ("forward", "backward")
            for kind in ("float32", "float16", "bfloat16", "float64")
            for times in (1, 5, 20, 50, 200)
        ),
        *(one for one in _positioned() if one.mask == "alibi"),
        *(case("masks", *batch, mask=name, unit="ms") for name in ("padding", "lengths", "dense")),
        *(case("tails", 8, 12, keys, keys, 64, unit="ms") for keys in (33, 77, 129, 197, 257)),
        case("range", *sizes, unit="ms", huge_key=True),
    ]


def _quick() -> list[Case]:
    return [
        _small()[0],
        case("full", *SHAPES[0]),
        case("full", *MIDDLE),
        case("full", *SHAPES[5]),
        case("causal", *MIDDLE, causal=True),
        case("causal", *SHAPES[4], causal=True),
        *_masked(("padding", "dense")),
        _decode()[1],
        case("types", *MIDDLE, dtype="float64"),
        case("backward", *MIDDLE, direction="backward"),
        case("both", *MIDDLE, direction="both"),
    ]


GRIDS: dict[str, tuple[Case, ...]] = {
    "quick": tuple(_quick()),
    "full": tuple(_full()),
    "gradients": tuple(one for direction in DIRECTIONS for one in _gradients(direction)),
    "spread": tuple(_spread()),
}

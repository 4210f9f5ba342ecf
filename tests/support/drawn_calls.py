"""Calls of attention drawn by hypothesis: sizes, dtypes, and every option beside every other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from calls import BFLOAT16
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.rules.visibility import Placed
from texts import positions_in_texts

DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.int32)]
if BFLOAT16 is not None:
    DTYPES.append(BFLOAT16)


class Call:
    """The sizes of one call, and the dice with which its numbers are thrown."""

    def __init__(self, draw: Any) -> None:
        size = st.one_of(st.integers(1, 4), st.integers(0, 9))
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.form = draw(st.sampled_from(["vector", "matrices", "heads", "heads", "heads"]))
        self.length = 1 if self.form == "vector" else draw(size)
        self.size, self.width, self.values = draw(size), draw(st.integers(0, 5)), draw(size)
        self.groups = draw(st.integers(1, 2)) if self.form == "heads" else 1
        self.heads = self.groups * draw(st.integers(1, 3)) if self.form == "heads" else 1
        batch = st.lists(st.integers(0, 2), max_size=2).map(tuple)
        self.batch = draw(batch) if self.form == "heads" else ()
        # What says where texts are: ids of queries and of keys, and lengths.
        self.texts: list[tuple[np.ndarray, np.ndarray]] = []
        self.lengths: list[np.ndarray] = []
        self.placed = False  # whether other segments hide keys, which no offset can count from

    def leading(self) -> tuple[int, ...]:
        """Leading axes that broadcast to those of the call."""
        axes = tuple(n if self.rng.random() < 0.7 else 1 for n in self.batch)
        return axes[int(self.rng.integers(0, len(axes) + 1)) :] if self.rng.random() < 0.3 else axes

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value; the first has all the leading axes, so that the batch is known."""
        one = self.draw(st.sampled_from(DTYPES))
        mixed = self.draw(st.booleans()) and one.kind == "f"
        spread = self.draw(st.sampled_from([0.1, 1.0, 1.0, 6.0]))
        heads = {"heads": (self.heads,), "matrices": (), "vector": ()}[self.form]
        groups = (self.groups,) if heads else ()
        rows = () if self.form == "vector" else (self.length,)
        shapes = [
            (*self.batch, *heads, *rows, self.width),
            (*(self.leading() if heads else ()), *groups, self.size, self.width),
            (*(self.leading() if heads else ()), *groups, self.size, self.values),
        ]
        others = [np.dtype(np.float32), np.dtype(np.float64), one]
        dtypes = [self.draw(st.sampled_from(others)) if mixed else one for _ in shapes]
        factors = (spread, spread, 1.0)
        return tuple(
            (self.rng.normal(size=s) * f * (2 if t.kind == "i" else 1)).astype(t)
            for s, f, t in zip(shapes, factors, dtypes, strict=True)
        )

    def cells(self) -> tuple[int, ...]:
        """A shape that broadcasts to (…, H, L, S), with fewer axes or some of length one."""
        full = {
            "heads": (*self.batch, self.heads, self.length, self.size),
            "matrices": (self.length, self.size),
            "vector": (self.size,),
        }[self.form]
        shape = tuple(n if self.rng.random() < 0.7 else 1 for n in full)
        return shape[int(self.rng.integers(0, len(full))) :] if self.rng.random() < 0.4 else shape

    def bools(self) -> np.ndarray:
        return self.rng.random(self.cells()) < self.draw(st.sampled_from([0.3, 0.7, 1.0]))

    def full(self, array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, (*self.batch, self.heads, self.length, self.size))

    def mask(self, depth: int = 0, *, alone: bool = True) -> tuple[Any, Any]:
        """A mask object and the rule it stands for; `alone`: a key must pass it."""
        kinds = ["array", "causal", "window", "lengths", "segments"]
        if depth < 3:
            kinds += ["and", "or", "not"]
        kind = self.draw(st.sampled_from(kinds))
        if kind in ("and", "or"):
            alone &= kind == "and"
            (one, rule), (other, other_rule) = (self.mask(depth + 1, alone=alone) for _ in "12")
            if kind == "and":
                return one & other, lambda *cell: rule(*cell) and other_rule(*cell)
            return one | other, lambda *cell: rule(*cell) or other_rule(*cell)
        if kind == "not":
            one, rule = self.mask(depth + 1, alone=False)
            return ~one, lambda *cell: not rule(*cell)
        if kind == "causal":
            return Causal(), lambda b, h, i, j, p: j <= p
        if kind == "window":
            left, right = self.sides()
            return (
                Window(left, right),
                lambda b, h, i, j, p: (
                    (left is None or p - left <= j) and (right is None or j <= p + right)
                ),
            )
        if kind == "lengths":
            lengths = self.rng.integers(0, self.size + 1, self.leading())
            every = np.broadcast_to(lengths, self.batch)
            self.lengths += [every] if alone else []
            return Lengths(lengths), lambda b, h, i, j, p: j < every[b]
        if kind == "segments":
            ids = self.rng.integers(0, 3, (*self.leading(), self.length))
            others = self.rng.integers(0, 3, (*self.leading(), self.size))
            if alone:  # the rows of a text side by side, texts in any order
                order = self.rng.permutation(3)
                ids, others = order[np.sort(ids)], order[np.sort(others)]
            wide = np.broadcast_to(ids, (*self.batch, self.length))
            wider = np.broadcast_to(others, (*self.batch, self.size))
            self.texts += [(wide, wider)] if alone else []
            self.placed |= not alone
            return Segments(ids, others), lambda b, h, i, j, p: wide[(*b, i)] == wider[(*b, j)]
        array = self.bools()
        cells = self.full(array)
        return Boolean(array), lambda b, h, i, j, p: bool(cells[(*b, h, i, j)])

    def sides(self) -> tuple[int | None, int | None]:
        side = st.one_of(st.none(), st.integers(0, 4))
        return self.draw(side), self.draw(side)

    def options(self) -> tuple[dict[str, Any], Any]:
        """Options of the call, and the rule that its mask stands for."""
        options: dict[str, Any] = {}
        rule = None
        chosen = self.draw(
            st.sets(
                st.sampled_from(
                    ["mask", "array", "bias", "causal", "window", "scale", "softcap", "sink"]
                )
            )
        )
        if "mask" in chosen:
            options["mask"], rule = self.mask()
        elif "array" in chosen:
            options["mask"] = self.bools()
        if "bias" in chosen:
            bias = self.rng.normal(size=self.cells()) * 3
            holes = self.draw(st.sampled_from([0.0, 0.3]))
            options["bias"] = np.where(self.rng.random(bias.shape) < holes, -np.inf, bias)
            kinds = st.sampled_from([np.float16, np.float32, np.float64])
            options["bias"] = options["bias"].astype(self.draw(kinds))
        if "causal" in chosen:
            options["causal"] = True
        if "window" in chosen:
            options["window"] = self.sides()
        if "scale" in chosen:
            options["scale"] = self.draw(st.sampled_from([1.0, 0.0, -0.4, 2.5]))
        if "softcap" in chosen:
            options["softcap"] = self.draw(st.sampled_from([0.5, 5.0, 100.0]))
        if "sink" in chosen:
            per_head = self.form == "heads" and self.draw(st.booleans())
            options["sink"] = self.rng.normal(size=(self.heads,) if per_head else ()) * 2
        if {"causal", "window", "mask"} & options.keys():
            offset = self.draw(st.sampled_from([0, 1, -2, "end", "batch"]))
            if offset == "batch":
                offset = self.rng.integers(-3, 4, self.leading())
            options["offset"] = Placed(self.positions(offset)) if self.placed else offset
            self.offset = offset
        return options, rule

    def positions(self, offset: Any) -> np.ndarray:
        """Where the queries are, by plain loops."""
        return positions_in_texts(
            offset,
            self.batch,
            self.length,
            self.size,
            text_of_query=lambda b, i: tuple(int(one[(*b, i)]) for one, _ in self.texts),
            text_of_key=lambda b, j: tuple(int(one[(*b, j)]) for _, one in self.texts),
            length=lambda b: min([int(one[b]) for one in self.lengths], default=self.size),
        )


@st.composite
def calls(draw: Any) -> tuple[tuple[np.ndarray, ...], dict[str, Any], Any]:
    call = Call(draw)
    arrays = call.arrays()
    options, rule = call.options()
    if "offset" not in options:
        return arrays, options, Meant(rule)
    return arrays, options, Meant(rule, call.offset, call.positions(call.offset))


class Meant(NamedTuple):
    """What a call's mask means, and where its offset, as it was drawn, puts the queries."""

    rule: Any
    offset: Any = None
    positions: np.ndarray | None = None


def for_the_oracle(options: dict[str, Any], meant: Meant) -> dict[str, Any]:
    own = {"mask": meant.rule} if meant.rule is not None else {}
    own |= {"positions": meant.positions, "offset": None} if meant.positions is not None else {}
    return options | own

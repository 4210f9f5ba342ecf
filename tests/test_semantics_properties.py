"""Every option with every other, drawn at random, against the oracle number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

import regard
from bounds import assert_within, error_bounds
from calls import BFLOAT16, answer_of, check_result, every_kernel, result_dtype, run
from oracle import attend_exactly
from regard.masks import Boolean, Causal, Lengths, Segments, Window

DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.int32)]
if BFLOAT16 is not None:
    DTYPES.append(BFLOAT16)
EXAMPLES = 3 * settings().max_examples  # of the profile: more when asked to be thorough


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

    def mask(self, depth: int = 0) -> tuple[Any, Any]:
        """A mask object and the rule it stands for."""
        kinds = ["array", "causal", "window", "lengths", "segments"]
        if depth < 3:
            kinds += ["and", "or", "not"]
        kind = self.draw(st.sampled_from(kinds))
        if kind in ("and", "or"):
            (one, rule), (other, other_rule) = self.mask(depth + 1), self.mask(depth + 1)
            if kind == "and":
                return one & other, lambda *cell: rule(*cell) and other_rule(*cell)
            return one | other, lambda *cell: rule(*cell) or other_rule(*cell)
        if kind == "not":
            one, rule = self.mask(depth + 1)
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
            return Lengths(lengths), lambda b, h, i, j, p: j < every[b]
        if kind == "segments":
            ids = self.rng.integers(0, 3, (*self.leading(), self.length))
            others = self.rng.integers(0, 3, (*self.leading(), self.size))
            wide = np.broadcast_to(ids, (*self.batch, self.length))
            wider = np.broadcast_to(others, (*self.batch, self.size))
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
            options["offset"] = offset
        return options, rule


@st.composite
def calls(draw: Any) -> tuple[tuple[np.ndarray, ...], dict[str, Any], Any]:
    call = Call(draw)
    arrays = call.arrays()
    options, rule = call.options()
    return arrays, options, rule


def for_the_oracle(options: dict[str, Any], rule: Any) -> dict[str, Any]:
    return options if rule is None else options | {"mask": rule}


@every_kernel
@settings(max_examples=EXAMPLES)
@given(calls())
def test_every_number_is_within_its_bound_whatever_the_options(kernel, call):
    (q, k, v), options, rule = call
    event(f"{len(options)} options")
    result = run(kernel, q, k, v, **options)
    answer = answer_of(q, k, v, **for_the_oracle(options, rule))
    check_result(kernel, result, answer, q, k, v, **options)
    np.testing.assert_array_equal(result.weights.astype(float)[~answer.visible], 0.0)
    empty = ~answer.visible.any(axis=-1)
    np.testing.assert_array_equal(result.output.astype(float)[empty], 0.0)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls())
def test_every_number_is_within_its_bound_in_exact_precision(kernel, call):
    (q, k, v), options, rule = call
    if result_dtype(q, k, v) == np.float64:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    result = run(kernel, q, k, v, precision="exact", **options)
    answer = attend_exactly(q, k, v, **for_the_oracle(options, rule))
    check_result(kernel, result, answer, q, k, v, precision="exact", **options)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 1e-42]))
def test_no_byte_depends_on_what_nobody_sees(kernel, call, poison):
    (q, k, v), options, rule = call
    q, k, v = (x.astype(np.float32) if x.dtype.kind == "i" else x for x in (q, k, v))
    clean = run(kernel, q, k, v, **options)
    visible = answer_of(q, k, v, **for_the_oracle(options, rule)).visible
    assume(visible.size > 0)
    # A key is hidden if no row sees it: none of any head of its group, nor of any batch element.
    groups, size = k.shape[-3] if k.ndim > 2 else 1, k.shape[-2]
    rows = visible.size // size
    per_group = rows // groups // max(int(np.prod(visible.shape[:-3])), 1)
    hidden = ~visible.reshape(-1, groups, per_group, size).any(axis=(0, 2))
    hidden = hidden if k.ndim > 2 else hidden[0]
    k2, v2 = k.copy(), v.copy()
    with np.errstate(all="ignore"):
        k2[..., hidden, :] = poison
        v2[..., hidden, :] = poison
    event(f"hides {bool(hidden.any())}")
    result = run(kernel, q, k2, v2, **options)
    for name in ("output", "weights", "lse"):
        assert getattr(result, name).tobytes() == getattr(clean, name).tobytes(), name


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.integers(1, 3))
def test_keys_hidden_at_the_end_are_as_good_as_none(kernel, call, more):
    (q, k, v), options, _ = call
    options.pop("mask", None)
    options.pop("bias", None)
    assume(k.shape[-2] > 0)
    if isinstance(options.get("offset"), str):
        options["offset"] = k.shape[-2] - (q.shape[-2] if q.ndim > 1 else 1)
    longer = [np.concatenate([x, x[..., :1, :].repeat(more, -2)], axis=-2) for x in (k, v)]
    padded = run(kernel, q, *longer, **options, mask=Lengths(k.shape[-2]))
    np.testing.assert_array_equal(padded.weights[..., -more:].astype(float), 0.0)
    padded = padded._replace(weights=padded.weights[..., :-more])
    check_result(kernel, padded, answer_of(q, k, v, **options), q, k, v, **options)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls())
def test_negating_the_values_negates_the_output_to_the_bit(kernel, call):
    (q, k, v), options, _ = call
    one = regard.attention(q, k, v, kernel=kernel, **options)
    other = regard.attention(q, k, -v, kernel=kernel, **options)
    np.testing.assert_array_equal(one, -other)


@every_kernel
@settings(max_examples=EXAMPLES // 4)
@given(calls(), st.floats(-1e3, 1e3))
def test_equal_values_come_out_as_they_are(kernel, call, number):
    (q, k, v), options, rule = call
    options.pop("sink", None)
    v = np.full_like(v, number)
    answer = answer_of(q, k, v, **for_the_oracle(options, rule))
    result = regard.attention(q, k, v, kernel=kernel, **options)
    bound = error_bounds(
        q,
        k,
        v,
        answer,
        dtype=result_dtype(q, k, v),
        **{name: options[name] for name in ("scale", "softcap", "bias") if name in options},
    )
    some = answer.visible.any(axis=-1)[..., np.newaxis]
    constant = np.where(some, np.float64(v.ravel()[0]) if v.size else 0.0, 0.0)
    assert_within(result, np.broadcast_to(constant, answer.output.shape), 2 * bound.output)

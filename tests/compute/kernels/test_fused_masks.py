"""Rules as the fused kernel reads them: programs in postfix order, and blocks that are skipped."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import regard
from calls import (
    assert_same_bytes,
    assert_same_result,
    check,
    every_target,
    inputs,
    numbers,
    on_path,
    run,
)
from regard.masks import Boolean, Causal, Lengths, Mask, Segments, Window
from regard.rules.visibility import Placed

pytestmark = pytest.mark.needs("fused")

EXAMPLES = max(settings().max_examples // 2, 20)
CHUNK = 256


class Draw:
    """Rules of all kinds for one shape (B, H, L, S), and what they let through."""

    def __init__(self, draw: Any, shape: tuple[int, int, int, int]) -> None:
        self.draw, self.shape = draw, shape
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        self.offset = draw(st.integers(-3, shape[-1]))

    def rule(self, depth: int) -> tuple[Mask, np.ndarray]:
        """A rule and the cells (B, H, L, S) that it lets through."""
        leaves = ["boolean", "causal", "window", "lengths", "segments"]
        kind = self.draw(st.sampled_from(leaves if depth == 0 else [*leaves, *"&|~&|~"]))
        if kind in ("&", "|"):
            (one, seen), (other, too) = self.rule(depth - 1), self.rule(depth - 1)
            return (one & other, seen & too) if kind == "&" else (one | other, seen | too)
        if kind == "~":
            one, seen = self.rule(depth - 1)
            return ~one, ~seen
        return getattr(self, kind)()

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        _, _, length, size = self.shape
        return np.arange(length)[:, np.newaxis] + self.offset, np.arange(size)

    def wide(self, cells: np.ndarray) -> np.ndarray:
        return np.broadcast_to(cells, self.shape)

    def boolean(self) -> tuple[Mask, np.ndarray]:
        share = self.draw(st.sampled_from([0.02, 0.5, 0.98]))
        axes = [n if self.rng.random() < 0.6 else 1 for n in self.shape]
        cells = self.rng.random(axes) < share
        if self.draw(st.booleans()):  # strides that are not one byte
            cells = np.ascontiguousarray(cells.swapaxes(-1, -2)).swapaxes(-1, -2)
        return Boolean(cells), self.wide(cells)

    def causal(self) -> tuple[Mask, np.ndarray]:
        i, j = self.places()
        return Causal(), self.wide(j <= i)

    def window(self) -> tuple[Mask, np.ndarray]:
        i, j = self.places()
        side = st.one_of(st.none(), st.integers(0, 5), st.integers(0, self.shape[-1] + 5))
        left, right = self.draw(side), self.draw(side)
        low = -(10**9) if left is None else i - left
        high = 10**9 if right is None else i + right
        return Window(left, right), self.wide((low <= j) & (j <= high))

    def lengths(self) -> tuple[Mask, np.ndarray]:
        batch, _, _, size = self.shape
        lengths = self.rng.integers(0, size + 1, batch if self.draw(st.booleans()) else ())
        cells = np.arange(size) < np.broadcast_to(lengths, batch)[:, None, None, None]
        return Lengths(lengths), self.wide(cells)

    def segments(self) -> tuple[Mask, np.ndarray]:
        batch, _, length, size = self.shape
        lead = (batch,) if self.draw(st.booleans()) else ()
        ids, others = (self.rng.integers(0, 4, (*lead, n)) for n in (length, size))
        wide = [np.broadcast_to(x, (batch, x.shape[-1])) for x in (ids, others)]
        cells = wide[0][:, None, :, None] == wide[1][:, None, None, :]
        return Segments(ids, others), self.wide(cells)


@st.composite
def masked(draw: Any) -> tuple[tuple[int, ...], Mask, np.ndarray, int]:
    size = draw(st.sampled_from([1, 5, 31, 33, 64, 255, 256, 257, 300, 515]))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 14)), size)
    one = Draw(draw, shape)
    rule, seen = one.rule(draw(st.integers(0, 4)))
    return shape, rule, seen, one.offset


def placed(length: int, offset: int) -> Placed:
    """Query i at i + offset whatever the rules are: an offset would count within each segment."""
    return Placed(np.arange(length) + offset)


@every_target
@settings(max_examples=EXAMPLES)
@given(masked())
def test_a_tree_of_rules_has_the_bytes_of_the_mask_that_it_means(target, case):
    shape, rule, seen, offset = case
    event(f"lets through {'none' if not seen.any() else 'all' if seen.all() else 'some'}")
    batch, heads, length, size = shape
    q, k, v = inputs((batch, heads, length, 8), (batch, 1, size, 8), (batch, 1, size, 5))
    with on_path(f"fused:{target}") as kernel:
        by_rule = run(kernel, q, k, v, mask=rule, offset=placed(length, offset))
        by_cells = run(kernel, q, k, v, mask=seen)
    assert_same_result(by_rule, by_cells)
    np.testing.assert_array_equal(by_rule.weights[~seen], 0.0)
    np.testing.assert_array_equal(np.isneginf(by_rule.lse), ~seen.any(axis=-1))
    by_reference = run("reference", q, k, v, mask=rule, offset=placed(length, offset))
    np.testing.assert_array_equal(np.isneginf(by_reference.lse), ~seen.any(axis=-1))
    np.testing.assert_allclose(by_rule.weights, by_reference.weights, atol=ATOL_OF_WEIGHTS)


ATOL_OF_WEIGHTS = 64 * float(np.finfo(np.float32).eps)  # for logits below 16


@every_target
@settings(max_examples=EXAMPLES // 2)
@given(masked(), st.sampled_from([np.nan, np.inf, 3e38]))
def test_no_byte_depends_on_what_a_tree_of_rules_hides(target, case, poison):
    (batch, heads, length, size), rule, seen, offset = case
    q, k, v = inputs((batch, heads, length, 8), (batch, 1, size, 8), (batch, 1, size, 5))
    with on_path(f"fused:{target}") as kernel:
        clean = run(kernel, q, k, v, mask=rule, offset=placed(length, offset))
        hidden = ~seen.any(axis=(1, 2))[:, np.newaxis]  # from every row
        k, v = k.copy(), v.copy()
        k[hidden], v[hidden] = poison, poison
        assert_same_result(run(kernel, q, k, v, mask=rule, offset=placed(length, offset)), clean)


@every_target
@settings(max_examples=EXAMPLES // 2)
@given(masked())
def test_options_and_rules_that_mean_the_same_have_the_same_bytes(target, case):
    (batch, heads, length, size), rule, seen, offset = case
    q, k, v = inputs((batch, heads, length, 8), (batch, 1, size, 8), (batch, 1, size, 5))
    both = {"causal": True, "window": (size // 2, 1), "offset": placed(length, offset)}
    i, j = np.arange(length)[:, None] + offset, np.arange(size)
    cells = seen & (j <= i) & (i - size // 2 <= j)
    with on_path(f"fused:{target}") as kernel:
        expected = run(kernel, q, k, v, mask=cells)
        by_options = run(kernel, q, k, v, mask=rule, **both)
        three = Window(size // 2, 1) & rule & Causal()
        by_rules = run(kernel, q, k, v, mask=three, offset=both["offset"])
        by_bias = run(kernel, q, k, v, bias=np.where(cells, 0.0, -np.inf).astype(np.float32))
    assert_same_result(by_options, expected, "options")
    assert_same_result(by_rules, expected, "rules")
    assert_same_result(by_bias, expected, "bias")


@every_target
@pytest.mark.parametrize("size", [63, 64, 65, 300])
@pytest.mark.parametrize("step", [1, 3])
def test_every_byte_of_a_mask_but_0_lets_a_key_through(target, size, step):
    q, k, v = inputs((14, 8), (size, 8), (size, 5))
    cells = np.random.default_rng(0).choice([0, 1, 2, 127, 128, 255], (14, size * step))
    cells = cells.astype(np.uint8)[:, ::step]
    with on_path(f"fused:{target}") as kernel:
        result = run(kernel, q, k, v, mask=cells.view(bool))
        assert_same_result(result, run(kernel, q, k, v, mask=cells != 0))
    np.testing.assert_array_equal(result.weights > 0, cells != 0)


# blocks that are skipped -------------------------------------------------------------------------

HIDDEN = {
    "the first chunk": [slice(0, CHUNK)],
    "a chunk in the middle": [slice(CHUNK, 2 * CHUNK)],
    "the last chunks": [slice(2 * CHUNK, None)],
    "all but one key": [slice(0, 700), slice(701, None)],
    "every second chunk": [slice(0, CHUNK), slice(2 * CHUNK, 3 * CHUNK)],
    "a run across a chunk's edge": [slice(CHUNK - 3, 2 * CHUNK + 3)],
    "a chunk but its last key": [slice(CHUNK, 2 * CHUNK - 1)],
    "everything": [slice(None)],
}
SIZE = 3 * CHUNK + 20


def visible(what: str) -> np.ndarray:
    seen = np.ones(SIZE, bool)
    for keys in HIDDEN[what]:
        seen[keys] = False
    return seen


@every_target
@pytest.mark.parametrize("what", HIDDEN)
def test_hidden_chunks_are_as_good_as_deleted_ones(target, what):
    q, k, v = inputs((20, 16), (SIZE, 16), (SIZE, 12))
    seen = visible(what)
    with on_path(f"fused:{target}") as kernel:
        hidden, _ = check(kernel, q, k, v, mask=seen)
        deleted, _ = check(kernel, q, k[seen], v[seen])
        # Both are within the bound of the same exact numbers; what is hidden weighs nothing.
        np.testing.assert_array_equal(hidden.weights[:, ~seen], 0.0)
        np.testing.assert_array_equal(np.isneginf(hidden.lse), np.isneginf(deleted.lse))


@every_target
@pytest.mark.parametrize("what", HIDDEN)
def test_hidden_chunks_may_hold_anything(target, what):
    q, k, v = inputs((20, 16), (SIZE, 16), (SIZE, 12))
    seen = visible(what)
    with on_path(f"fused:{target}") as kernel:
        clean = run(kernel, q, k, v, mask=seen)
        for poison in (np.nan, np.inf, -np.inf, 3e38, 1e-45):
            worse = [np.where(seen[:, np.newaxis], x, np.float32(poison)) for x in (k, v)]
            for threads in (1, 3):
                again = run(kernel, q, *worse, mask=seen, threads=threads)
                assert_same_result(again, clean, f"{poison}")


@every_target
def test_skipping_what_only_some_rows_cannot_see_changes_no_byte(target):
    # Rows of one tile that see different chunks: the tile skips only what all of them may not see.
    q, k, v = inputs((24, 16), (SIZE, 16), (SIZE, 12))
    seen = np.zeros((24, SIZE), bool)
    for i in range(24):
        seen[i, (i % 4) * CHUNK : (i % 4) * CHUNK + 7 + i] = True
    with on_path(f"fused:{target}") as kernel:
        whole = run(kernel, q, k, v, mask=seen)
        for i in range(24):
            alone = run(kernel, q[i : i + 1], k, v, mask=seen[i : i + 1])
            assert_same_bytes(alone.output[0], whole.output[i], f"row {i}")
            assert_same_bytes(alone.weights[0], whole.weights[i], f"row {i}")


@every_target
def test_documents_in_one_sequence_are_as_good_as_sequences_of_their_own(target):
    ends = [0, 100, 256, 300, 700, 780]
    ids = np.repeat(np.arange(5), np.diff(ends))
    x = numbers((780, 16))
    with on_path(f"fused:{target}") as kernel:
        packed = run(kernel, x, x, x, mask=Segments(ids) & Causal())
        for a, b in itertools.pairwise(ends):
            alone = run(kernel, x[a:b], x[a:b], x[a:b], causal=True)
            np.testing.assert_array_equal(packed.weights[a:b, :a], 0.0)
            np.testing.assert_array_equal(packed.weights[a:b, b:], 0.0)
            near = packed.weights[a:b, a:b]
            np.testing.assert_allclose(near, alone.weights, atol=ATOL_OF_WEIGHTS)


# sizes that no position reaches ------------------------------------------------------------------

HUGE = (2**62, 2**63 - 1, 2**63, 2**70)


@every_target
@pytest.mark.parametrize("side", HUGE)
@pytest.mark.parametrize("offset", [0, 3, -3, 2**61, -(2**61)])
def test_a_window_wider_than_any_sequence_is_an_unbounded_one(target, side, offset):
    q, k, v = inputs((5, 4), (5, 4), (5, 4))
    with on_path(f"fused:{target}") as kernel:
        for window in ((side, None), (None, side), (side, side), (side, 0), (0, side)):
            sides = tuple(None if s == side else s for s in window)
            expected = run(kernel, q, k, v, window=sides, offset=offset)
            result = run(kernel, q, k, v, window=window, offset=offset)
            assert_same_result(result, expected, f"{window}")
            for twist in (lambda rule: ~rule, lambda rule: rule | Lengths(1)):
                expected = run(kernel, q, k, v, mask=twist(Window(*sides)), offset=offset)
                result = run(kernel, q, k, v, mask=twist(Window(*window)), offset=offset)
                assert_same_result(result, expected, f"{window} in a tree")


@every_target
@pytest.mark.parametrize("offset", [2**62 - 1, -(2**62) + 1])
def test_offsets_beyond_every_key_show_all_keys_or_none(target, offset):
    q, k, v = inputs((5, 4), (300, 4), (300, 4))
    with on_path(f"fused:{target}") as kernel:
        result = run(kernel, q, k, v, causal=True, offset=offset)
        seen = np.full((5, 300), offset > 0)
        assert_same_result(result, run(kernel, q, k, v, mask=seen))
        nothing = run(kernel, q, k, v, window=(3, 3), offset=offset)
        np.testing.assert_array_equal(nothing.output, 0.0)
        result = run(kernel, q, k, v, mask=~Window(3, 3), offset=offset)
        assert_same_result(result, run(kernel, q, k, v))


def test_a_deep_tree_of_rules_is_answered():
    q, k, v = inputs((5, 4), (300, 4), (300, 4))
    left = right = Lengths(200)
    for n in range(60):
        left = (left & Lengths(290 - n)) | Lengths(n)
        right = Lengths(n) | (Lengths(290 - n) & right)
    for rule in (left, right):
        expected = run("fused", q, k, v, mask=rule.visible(5, 300))
        assert_same_result(run("fused", q, k, v, mask=rule), expected)


def test_rules_that_hide_everything_make_the_call_quick_and_the_output_zero():
    q, k, v = inputs((40, 16), (3000, 16), (3000, 16))
    for rule in (Lengths(0), ~Window(None, None), Causal() & ~Causal()):
        result = regard.attention(q, k, v, mask=rule, offset=0)
        assert_same_bytes(result, np.zeros((40, 16), np.float32))

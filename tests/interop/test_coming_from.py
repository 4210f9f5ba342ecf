"""The rows of docs/coming-from.md as numbers.

The code in a row runs as it stands there. What it gives is compared with what the other library
documents of the argument, written here in plain loops: no code of that library, and none of regard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import regard
from regard.compute import dispatch

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text("utf-8")

ANY = ""  # the table that is about all libraries
SDPA = "torch.nn.functional.scaled_dot_product_attention"
MHA = "torch.nn.MultiheadAttention"
FLEX = "torch.nn.attention.flex_attention"
JAX = "jax.nn.dot_product_attention"
ONNX = "ONNX Attention"
FLASH = "flash-attn"
XFORMERS = "xformers.ops.memory_efficient_attention"
MORE = "FlashInfer, Triton, MLX"
HF = "Hugging Face transformers"
KERAS = "Keras"
SOFTMAX = "softmax of PyTorch and SciPy"

# Rows of what changes no number, and why.
NO_NUMBERS = {
    (MHA, "device"): "where arrays are",
    (FLEX, "kernel_options"): "how a kernel is tuned",
    (FLASH, "deterministic"): "whether gradients have the same bytes in each run",
    (FLASH, "max_seqlen_q"): "the longest text, which the lengths tell",
    (FLASH, "max_seqlen_k"): "the longest text, which the lengths tell",
    (FLASH, "num_splits"): "how the work is divided",
    (XFORMERS, "op"): "which kernel answers",
    (KERAS, "flash_attention"): "which kernel answers",
}

SIZES = [(4, 4), (3, 5), (5, 3)] * 2  # L and S
# The lengths of packed texts: of their queries, and of their keys.
TEXTS = [
    ([2, 3], [2, 3]),
    ([2, 3], [4, 1]),
    ([3, 2], [4, 4]),
    ([3, 0, 2], [2, 2, 4]),
    ([1, 3, 2], [0, 2, 1]),
]
WIDTH = 3
LOGIT = 16  # no logit that is drawn here is beyond it
# A weight has the error of its logit, WIDTH + 4 roundings; an output that of up to 6 weights.
ROUNDINGS = 6 * (WIDTH + 4) * LOGIT


def eps(dtype) -> float:
    return float(np.finfo(dtype).eps)


# --- the rows, and their rules -------------------------------------------------------------------


@dataclass
class Row:
    """What the page says of one argument."""

    name: str
    text: str
    used: set[str] = field(default_factory=set)

    def pieces(self) -> set[str]:
        """All code of the row; what other libraries call something is none."""
        return {*re.findall("`([^`]+)`", self.text)} - HEADINGS - {name for _, name in ROWS}

    def _use(self, piece: str) -> str:
        assert piece in self.pieces()
        self.used.add(piece)
        return piece.replace("…", "None")

    def __call__(self, piece: str, **names: Any) -> dict[str, Any]:
        """The arguments that a piece such as `scale=scale` passes."""
        return eval(f"dict({self._use(piece)})", {"np": np, "regard": regard, **names})

    def where(self, condition: bool, piece: str) -> dict[str, Any]:
        """What a piece passes that the row wants only where a condition holds."""
        return self(piece) if condition else {}

    def value(self, piece: str, it: Any = None, **names: Any) -> Any:
        """The value of a piece such as `~mask`, or `.astype` of something."""
        code = "it" * piece.startswith(".") + self._use(piece)
        return eval(code, {"np": np, "regard": regard, "it": it, **names})

    def argument(self, piece: str) -> str:
        """The name of an argument that stands without a value."""
        return self._use(piece).removesuffix("=")


Rule = Callable[[Row, np.random.Generator], None]
RULES: dict[tuple[str, str], Rule] = {}
HEADINGS = {*re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}


def rows_of(page: str) -> dict[tuple[str, str], str]:
    """Table and name → what the page says of it."""
    library, rows = ANY, {}
    for line in page.splitlines():
        if line.startswith("## "):
            library = line.removeprefix("## ")
        row = re.match(r"\| (`?\w[^|]*) \| (.*) \|$", line) or re.match(r"- (`\w+`): (.*)$", line)
        if row and row[1] != "there":
            rows[library, row[1].strip("`")] = row[2]
    return rows


ROWS = rows_of(PAGE)


def of(library: str, *names: str) -> Callable[[Rule], Rule]:
    """The rule of rows of one library."""

    def put(rule: Rule) -> Rule:
        for name in names:
            assert (library, name) not in RULES
            RULES[library, name] = rule
        return rule

    return put


def test_every_row_of_the_page_has_a_rule_or_a_reason_why_it_changes_no_number():
    assert ROWS.keys() == RULES.keys() | NO_NUMBERS.keys()
    assert not RULES.keys() & NO_NUMBERS.keys()


@pytest.mark.parametrize("row", RULES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_code_of_a_row_gives_the_numbers_of_the_other_library_s_rule(row):
    said = Row(row[1], ROWS[row])
    RULES[row](said, np.random.default_rng(2024))
    assert said.used == said.pieces()


# --- plain loops ---------------------------------------------------------------------------------

Cell = Callable[[int, int, int, int], Any]  # of batch element, head, query and key


class Told(NamedTuple):
    output: np.ndarray
    weights: np.ndarray
    lse: np.ndarray


def loops(
    query,
    key,
    value,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    added: Cell | None = None,
    sees: Cell | None = None,
    sink=None,  # a logit of each head
    changed: Callable[[int, float], float] | None = None,  # the weights, after the softmax
) -> Told:
    """Attention of (B, H, L, D) to as many heads of keys; a query that sees no key gives 0."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    (batch, heads, length, width), size = query.shape, key.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    output = np.zeros((batch, heads, length, value.shape[3]))
    weights = np.zeros((batch, heads, length, size))
    lse = np.full((batch, heads, length), -math.inf)
    for b, h, i in np.ndindex(batch, heads, length):
        logits = {}
        for j in range(size):
            if sees is not None and not sees(b, h, i, j):
                continue
            x = scale * math.fsum(query[b, h, i, d] * key[b, h, j, d] for d in range(width))
            if softcap > 0:
                x = softcap * math.tanh(x / softcap)
            logits[j] = x if added is None else x + added(b, h, i, j)
        every = [*logits.values()] + ([] if sink is None else [sink[h]])
        if not every:
            continue
        top = max(every)
        total = math.fsum(math.exp(x - top) for x in every)
        lse[b, h, i] = top + math.log(total)
        for j, x in logits.items():
            weight = math.exp(x - top) / total
            weights[b, h, i, j] = weight if changed is None else changed(h, weight)
            for e in range(value.shape[3]):
                output[b, h, i, e] += weights[b, h, i, j] * value[b, h, j, e]
    return Told(output, weights, lse)


def same(ours, theirs, dtype=np.float64) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ROUNDINGS * eps(dtype))


def drawn(rng, length: int, size: int, heads: int = 2, groups: int | None = None, batch: int = 2):
    """Queries, keys and values (B, H, L, D)."""
    shapes = (heads, length, WIDTH), (groups or heads, size, WIDTH), (groups or heads, size, 2)
    return tuple(rng.normal(size=(batch, *shape)) for shape in shapes)


def calls(rng, **options) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    for length, size in SIZES:
        yield length, size, drawn(rng, length, size, **options)


def at(array, *axes: int) -> Cell:
    """The number of an array that has some of the axes B, H, L and S."""
    return lambda *cell: array[tuple(cell[axis] for axis in axes)]


def check(arrays, given: dict[str, Any], **rule: Any) -> None:
    """The output of regard with these arguments is that of the loops with this rule."""
    same(regard.attention(*arrays, **given), loops(*arrays, **rule).output)


def some(rng, *shape: int):
    """Booleans, of which the first of each row is True."""
    chosen = rng.random(shape) < 0.6
    chosen[..., 0] = True
    return chosen


@dataclass(frozen=True)
class Placed:
    """Where queries are among the keys."""

    away: Cell  # how many keys the position of the query is after the key
    its_text: Cell = lambda *cell: True  # whether the key belongs to the text of the query

    def inside(self, left: int = -1, right: int = -1) -> Cell:
        """Keys of a window with both ends included, where -1 leaves a side unbounded."""

        def sees(*cell: int) -> bool:
            away = self.away(*cell)
            return (
                self.its_text(*cell)
                and (left == -1 or away <= left)
                and (right == -1 or -away <= right)
            )

        return sees

    def sloped(self, slopes) -> Cell:
        """ALiBi: the slope of a head, or of a batch element and head, times the distance."""
        slopes = np.broadcast_to(slopes, (2, 2))
        return lambda *cell: -slopes[cell[:2]] * abs(self.away(*cell))


def shifted(shift=0, lengths=None) -> Placed:
    """Query i is at position i + shift; each text may have its own shift and length."""
    shift = np.broadcast_to(shift, 2)
    return Placed(
        away=lambda b, h, i, j: i + shift[b] - j,
        its_text=lambda b, h, i, j: lengths is None or j < lengths[b],
    )


def packed(query_lengths, key_lengths, *, at_the_end: bool = True, room=None) -> Placed:
    """Texts one after the other, each aligned with the end or the beginning of its keys.

    Where there is room, each text has so many keys, of which the first are its own.
    """
    queries = [(text, row) for text, length in enumerate(query_lengths) for row in range(length)]
    rooms = key_lengths if room is None else [room] * len(key_lengths)
    keys = [(text, key) for text, length in enumerate(rooms) for key in range(length)]

    def away(b, h, i, j):
        (text, row), (_, key) = queries[i], keys[j]
        return row + (key_lengths[text] - query_lengths[text]) * at_the_end - key

    def its_text(b, h, i, j):
        (text, _), (of_text, key) = queries[i], keys[j]
        return text == of_text and key < key_lengths[text]

    return Placed(away, its_text)


CAUSAL = shifted().inside(right=0)

# --- masks and biases ----------------------------------------------------------------------------


@of(SDPA, "attn_mask")
@of(ONNX, "attn_mask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        mask = some(rng, length, size)
        check(arrays, row("mask=attn_mask", attn_mask=mask), sees=at(mask, 2, 3))
        added = np.where(mask, rng.normal(size=mask.shape), -np.inf)
        check(arrays, row("bias=attn_mask", attn_mask=added), added=at(added, 2, 3))


@of(MHA, "attn_mask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        hidden = ~some(rng, length, size)
        check(arrays, row("mask=~attn_mask", attn_mask=hidden), sees=at(~hidden, 2, 3))
        added = rng.normal(size=hidden.shape)
        check(arrays, row("bias=attn_mask", attn_mask=added), added=at(added, 2, 3))


@of(MHA, "key_padding_mask")
def _(row, rng):
    for _, size, arrays in calls(rng):
        hidden = ~some(rng, 2, size)
        given = row("mask=~key_padding_mask[:, None, None, :]", key_padding_mask=hidden)
        check(arrays, given, sees=at(~hidden, 0, 3))
        added = rng.normal(size=hidden.shape)
        given = row("bias=key_padding_mask[:, None, None, :]", key_padding_mask=added)
        check(arrays, given, added=at(added, 0, 3))


@of(JAX, "mask")
@of(MORE, "custom_mask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        mask = some(rng, length, size)
        check(arrays, row(f"mask={row.name}", **{row.name: mask}), sees=at(mask, 2, 3))


@of(JAX, "bias")
def _(row, rng):
    for length, size, arrays in calls(rng):
        bias = rng.normal(size=(2, 2, length, size))
        check(arrays, row("bias=bias", bias=bias), added=at(bias, 0, 1, 2, 3))


@of(FLEX, "score_mod")
def _(row, rng):
    """Of the scaled score, batch element, head, query and key, it makes the logit."""
    for length, size, arrays in calls(rng):
        bias = rng.normal(size=(2, length, size))
        check(arrays, {row.argument("bias="): bias}, added=at(bias, 1, 2, 3))
        check(arrays, {row.argument("softcap="): 0.5}, softcap=0.5)


@of(FLEX, "block_mask")
def _(row, rng):
    """Made of a function of batch element, head, query and key, whose numbers begin at 0."""
    for length, size, arrays in calls(rng):
        mask = some(rng, 2, length, size)
        given = {row.argument("mask="): mask}
        check(arrays, given, sees=at(mask, 1, 2, 3))
        rules = row.value("regard.masks")
        given["mask"] = rules.Causal() & rules.Window(1, None)
        given |= row.where(length != size, "offset=0")
        check(arrays, given, sees=shifted().inside(1, 0))


@of(XFORMERS, "attn_bias")
def _(row, rng):
    for length, size, arrays in calls(rng):
        bias = rng.normal(size=(2, 2, length, size))
        check(arrays, row("bias=attn_bias", attn_bias=bias), added=at(bias, 0, 1, 2, 3))
        if length == size:
            check(arrays, row("causal=True"), sees=CAUSAL)
            rule = row.value("regard.masks").Causal()
            check(arrays, {row.argument("mask="): rule}, sees=CAUSAL)


@of(HF, "attention_mask")
def _(row, rng):
    tokens = "mask=(attention_mask == 1)[:, None, None, :]"
    for length, size, arrays in calls(rng):
        ones = some(rng, 2, size).astype(int)
        check(arrays, row(tokens, attention_mask=ones), sees=at(ones == 1, 0, 3))
        mask = rng.random((2, 1, length, size)) < 0.6
        check(arrays, row("mask=attention_mask", attention_mask=mask), sees=at(mask[:, 0], 0, 2, 3))
        low = np.where(mask, 0.0, float(np.finfo(np.float32).min))
        check(arrays, row("bias=attention_mask", attention_mask=low), added=at(low[:, 0], 0, 2, 3))


@of(HF, "position_bias")
def _(row, rng):
    for length, size, arrays in calls(rng):
        bias = rng.normal(size=(1, 2, length, size))
        added = at(bias[0], 1, 2, 3)
        given = row("bias=position_bias", position_bias=bias)
        check(arrays, given, added=added)
        check(arrays, given | row("scale=1"), scale=1.0, added=added)


@of(KERAS, "attention_mask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        mask = some(rng, 2, length, size)
        given = row("mask=attention_mask[:, None]", attention_mask=mask)
        check(arrays, given, sees=at(mask, 0, 2, 3))


@of(KERAS, "value_mask", "key_mask")
def _(row, rng):
    for _, size, arrays in calls(rng):
        mask = some(rng, 2, size)
        piece = f"mask={row.name}[:, None, None, :]"
        check(arrays, row(piece, **{row.name: mask}), sees=at(mask, 0, 3))


# --- where queries are ---------------------------------------------------------------------------


@of(SDPA, "is_causal")
@of(MHA, "is_causal")
@of(JAX, "is_causal")
@of(ONNX, "is_causal")
@of(KERAS, "is_causal", "use_causal_mask")
def from_the_first(row, rng):
    """The first query is aligned with the first key."""
    piece = f"causal={row.name}"
    for length, size, arrays in calls(rng):
        given = row(piece, **{row.name: True})
        check(arrays, given | row.where(length != size, "offset=0"), sees=CAUSAL)
        check(arrays, row(piece, **{row.name: False}))
        if length == size:
            cache = regard.KVCache()
            cache.append(*arrays[1:])
            same(cache.attend(arrays[0], **given), loops(*arrays, sees=CAUSAL).output)


@of(FLASH, "causal")
def from_the_last(row, rng):
    """The last query is aligned with the last key; a row without a key gives 0."""
    for length, size, arrays in calls(rng):
        given = row('causal=causal, offset="end"', causal=True)
        check(arrays, given, sees=shifted(size - length).inside(right=0))


def unbounded(side: int) -> int | None:
    return None if side == -1 else side


@of(JAX, "local_window_size")
def _(row, rng):
    for length, size, arrays in calls(rng):
        pair = row("window=local_window_size", local_window_size=(2, 1))
        for given, sides in ((pair, (2, 1)), (row("window=(n, n)", n=1), (1, 1))):
            theirs = loops(*arrays, sees=shifted().inside(*sides))
            ours = regard.attention(*arrays, **given, **row.where(length != size, "offset=0"))
            seen = theirs.weights.any(axis=-1)  # where not, the mean of all values there
            same(ours[seen], theirs.output[seen])


@of(ONNX, "left_window_size", "right_window_size")
def _(row, rng):
    left = row.name == "left_window_size"
    piece = f"window=({row.name}, …)" if left else f"window=(…, {row.name})"
    for length, size, arrays in calls(rng):
        for side in (-1, 0, 1):
            given = row(piece, **{row.name: unbounded(side)})
            given |= row.where(length != size, "offset=0")
            sides = (side, -1) if left else (-1, side)
            check(arrays, given, sees=shifted().inside(*sides))


@of(FLASH, "window_size")
def _(row, rng):
    for length, size, arrays in calls(rng):
        for sides in [(1, 0), (-1, 1), (2, -1), (-1, -1)]:
            given = row("window=window_size", window_size=tuple(map(unbounded, sides)))
            given |= row.where(length != size, 'offset="end"')
            check(arrays, given, sees=shifted(size - length).inside(*sides))


@of(MORE, "window_left")
def _(row, rng):
    """FlashInfer bounds the left side alone; the right one is bounded by causal."""
    for length, size, arrays in calls(rng):
        placed = shifted(size - length)
        for side in (0, 2, -1):
            given = row("window=(window_left, None)", window_left=unbounded(side))
            given |= row.where(length != size, 'offset="end"')
            check(arrays, given, sees=placed.inside(side))
            check(arrays, given | {"causal": True}, sees=placed.inside(side, 0))


@of(HF, "sliding_window")
def _(row, rng):
    """Of a causal mask key > query - sliding_window; |key - query| <= it where both sides count."""
    for length, size, arrays in calls(rng):
        end = row.where(length != size, 'offset="end"')
        away = shifted(size - length).away
        given = row("window=(sliding_window - 1, 0)", sliding_window=2)
        check(arrays, given | end, sees=lambda *cell, away=away: 0 <= away(*cell) < 2)
        given = row("window=(sliding_window, sliding_window)", sliding_window=2)
        check(arrays, given | end, sees=lambda *cell, away=away: abs(away(*cell)) <= 2)


@of(FLASH, "alibi_slopes")
def _(row, rng):
    """-slope · |i + S - L - j| is added."""
    for length, size, arrays in calls(rng):
        placed = shifted(size - length)
        slopes = rng.uniform(0.1, 1.0, size=(2, 2))
        given = row("positions=regard.positions.Alibi(alibi_slopes)", alibi_slopes=slopes[0])
        given |= row.where(length != size, 'offset="end"')
        check(arrays, given, added=placed.sloped(slopes[0]))
        distances = abs(np.arange(size - length, size)[:, None] - np.arange(size))
        bias = {row.argument("bias="): -slopes[..., None, None] * distances}
        check(arrays, bias, added=placed.sloped(slopes))


# --- several texts -------------------------------------------------------------------------------


def check_places(arrays, given: dict[str, Any], placed: Placed) -> None:
    """Causal, windows and ALiBi begin where queries are, and see keys of their text alone."""
    check(arrays, given | {"causal": True}, sees=placed.inside(right=0))
    check(arrays, given | {"window": (1, 1)}, sees=placed.inside(1, 1))
    alibi = {"positions": regard.positions.Alibi([0.5, 0.2]), "window": (2, None)}
    check(arrays, given | alibi, sees=placed.inside(2), added=placed.sloped([0.5, 0.2]))


@of(FLASH, "cu_seqlens_q", "cu_seqlens_k")
def _(row, rng):
    """Rows cu_seqlens[n] to cu_seqlens[n + 1] are text n, aligned with the end of its keys."""
    piece = "mask=regard.masks.Segments.from_lengths(np.diff(cu_seqlens_q), np.diff(cu_seqlens_k))"
    for lengths in TEXTS:
        arrays = drawn(rng, *map(sum, lengths), batch=1)
        ends = [np.cumsum([0, *one]).astype(np.int32) for one in lengths]
        given = row(piece, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
        check(arrays, given, sees=packed(*lengths).inside())
        check_places(arrays, given | row('offset="end"'), packed(*lengths))


@of(FLASH, "cache_seqlens")
def _(row, rng):
    """Only the first keys of the cache count, those that k and v append among them."""
    piece = "mask=regard.masks.Lengths(cache_seqlens)"
    for length, size in [(1, 6), (2, 6), (3, 4)]:
        arrays = drawn(rng, length, size)
        for before in ([0, 1], [size - length, 1], [1, 1]):
            for cache, new in zip(arrays[1:], drawn(rng, length, length)[1:], strict=True):
                for b, n in enumerate(before):
                    cache[b, :, n : n + length] = new[b]
            for more in (0, length):  # without k and v, and with them
                lengths = np.array(before, np.int32) + more
                given = row(piece, cache_seqlens=lengths)
                placed = shifted(lengths - length, lengths)
                check(arrays, given, sees=placed.inside())
                check_places(arrays, given | row('offset="end"'), placed)


@of(ONNX, "nonpad_kv_seqlen")
def _(row, rng):
    """Query i is at i + nonpad_kv_seqlen - L, also before the first key."""
    for length, size, arrays in calls(rng):
        lengths = rng.integers(0, size + 1, size=2)
        given = row("mask=regard.masks.Lengths(nonpad_kv_seqlen)", nonpad_kv_seqlen=lengths)
        placed = shifted(lengths - length, lengths)
        check(arrays, given, sees=placed.inside())
        check_places(arrays, given | row('offset="end"'), placed)


@of(JAX, "key_value_seq_lengths")
def _(row, rng):
    piece = "mask=regard.masks.Lengths(key_value_seq_lengths)"
    for _, size, arrays in calls(rng):
        lengths = rng.integers(1, size + 1, size=2)
        given = row(piece, key_value_seq_lengths=lengths)
        check(arrays, given, sees=shifted(0, lengths).inside())


@of(JAX, "query_seq_lengths")
@of(KERAS, "query_mask")
def _(row, rng):
    """Rows of padding see nothing, and no other row is changed."""
    for length, _, arrays in calls(rng):
        there = some(rng, 2, length)
        theirs = loops(*arrays, sees=at(there, 0, 2)).output
        for b in range(2):
            same(regard.attention(*arrays)[b][:, there[b]], theirs[b][:, there[b]])


@of(XFORMERS, "LowerTriangularMask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        given = row("causal=True") | row.where(length != size, "offset=0")
        check(arrays, given, sees=CAUSAL)


@of(XFORMERS, "LowerTriangularFromBottomRightMask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        given = row('causal=True, offset="end"')
        check(arrays, given, sees=shifted(size - length).inside(right=0))


@of(XFORMERS, "BlockDiagonalMask", "BlockDiagonalCausalMask")
@of(XFORMERS, "BlockDiagonalCausalFromBottomRightMask")
def _(row, rng):
    """Blocks are causal from their first query and key, or from the last ones."""
    made = "regard.masks.Segments.from_lengths(q_seqlen, kv_seqlen)"
    assert f"`texts` is `{made}`" in PAGE
    for q_seqlen, kv_seqlen in TEXTS:
        arrays = drawn(rng, sum(q_seqlen), sum(kv_seqlen), batch=1)
        texts = eval(made, {"regard": regard, "q_seqlen": q_seqlen, "kv_seqlen": kv_seqlen})
        if row.name == "BlockDiagonalMask":
            given, right = row("mask=texts", texts=texts), -1
        elif row.name == "BlockDiagonalCausalMask":
            given, right = row("mask=texts, causal=True", texts=texts), 0
            given |= row.where(q_seqlen != kv_seqlen, "offset=0")
        else:
            given, right = row('mask=texts, causal=True, offset="end"', texts=texts), 0
        placed = packed(q_seqlen, kv_seqlen, at_the_end="Bottom" in row.name)
        check(arrays, given, sees=placed.inside(right=right))


@of(XFORMERS, "BlockDiagonalPaddedKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask")
def _(row, rng):
    """Each text has room for as many keys, of which the first are there."""
    room = 4
    for queries, keys in TEXTS:
        arrays = drawn(rng, sum(queries), room * len(keys), batch=1)
        texts = regard.masks.Segments.from_lengths(
            [n for length in queries for n in (length, 0)],
            [n for length in keys for n in (length, room - length)],
        )
        if "Causal" in row.name:
            given, right = row('mask=texts, causal=True, offset="end"', texts=texts), 0
        else:
            given, right = row("mask=texts", texts=texts), -1
        check(arrays, given, sees=packed(queries, keys, room=room).inside(right=right))


# --- earlier keys and values ---------------------------------------------------------------------


@of(ONNX, "past_key", "past_value")
@of(FLASH, "k_cache", "v_cache")
@of(HF, "past_key_values", "use_cache", "cache_position")
def after_earlier_ones(row, rng):
    """New keys come after the earlier ones, and query i at position past + i."""
    for past, new in [(0, 3), (2, 3), (4, 1)]:
        query, key, value = drawn(rng, new, past + new)
        cache = row.value("regard.KVCache")()
        cache.append(key[:, :, :past], value[:, :, :past])
        cache.append(key[:, :, past:], value[:, :, past:])
        theirs = loops(query, key, value, sees=shifted(past).inside(right=0)).output
        same(cache.attend(query), theirs)
    if "past_key.shape[2]" in row.text:  # the new keys need not be as many as the queries
        for past, new in [(0, 3), (1, 4), (2, 1)]:
            arrays = drawn(rng, 3, past + new)
            given = row("offset=past_key.shape[2]", past_key=arrays[1][:, :, :past])
            sees = shifted(past).inside(right=0)
            check(arrays, given | {"causal": True}, sees=sees)


@of(FLASH, "block_table")
def _(row, rng):
    """Key t of text b is row t % page of block block_table[b, t // page]."""
    page, count = 2, 5
    query, blocks, rows = drawn(rng, 1, page, batch=6)
    block_table = np.array([[4, 0, 2], [1, 5, 3]])
    query = query[:2]
    cache = row.value("regard.KVCache")()
    theirs = []
    for pool in (blocks, rows):
        gathered = np.empty((2, 2, count, pool.shape[-1]))
        for b, h, t in np.ndindex(2, 2, count):
            gathered[b, h, t] = pool[block_table[b, t // page], h, t % page]
        theirs.append(gathered)
    for t in range(count):
        cache.append(*(array[:, :, t : t + 1] for array in theirs))
    same(cache.attend(query), loops(query, *theirs).output)


@of(HF, "layer_idx")
def _(row, rng):
    layers = [drawn(rng, 3, 3) for _ in range(2)]
    caches = [row.value("regard.KVCache")() for _ in layers]
    for t in range(3):
        for cache, (query, key, value) in zip(caches, layers, strict=True):
            cache.append(key[:, :, t : t + 1], value[:, :, t : t + 1])
            theirs = loops(query, key, value, sees=CAUSAL).output
            same(cache.attend(query[:, :, t : t + 1]), theirs[:, :, t : t + 1])


@of(HF, "max_cache_len")
def _(row, rng):
    query, key, value = drawn(rng, 4, 4)
    cache = regard.KVCache(**row("capacity=max_cache_len", max_cache_len=4))
    cache.append(key, value)
    same(cache.attend(query), loops(query, key, value, sees=CAUSAL).output)
    with pytest.raises(regard.OptionError, match="capacity"):
        cache.append(key[:, :, :1], value[:, :, :1])


# --- numbers of the softmax ----------------------------------------------------------------------


@of(SDPA, "scale")
@of(FLEX, "scale")
@of(JAX, "scale")
@of(ONNX, "scale")
@of(FLASH, "softmax_scale")
@of(XFORMERS, "scale")
@of(MORE, "sm_scale")
@of(HF, "scaling")
def _(row, rng):
    for _, _, arrays in calls(rng):
        check(arrays, row(f"scale={row.name}", **{row.name: 0.7}), scale=0.7)


@of(ONNX, "softcap")
@of(FLASH, "softcap")
@of(MORE, "logits_soft_cap")
@of(HF, "softcap")
@of(KERAS, "attn_logits_soft_cap")
def _(row, rng):
    """softcap · tanh(x / softcap) of the scaled score, before the mask; 0 is none."""
    for length, size, arrays in calls(rng):
        bias = rng.normal(size=(length, size))
        given = {"bias": bias} | row(f"softcap={row.name}", **{row.name: 0.6})
        check(arrays, given, softcap=0.6, added=at(bias, 2, 3))
        check(arrays, {}, softcap=0.0)


@of(FLASH, "learnable_sink")
@of(MORE, "sinks")
@of(HF, "s_aux")
def _(row, rng):
    """A logit of each head that is in the sum, and has no value."""
    for _, _, arrays in calls(rng):
        sinks = rng.normal(size=2)
        given = row(f"sink={row.name}", **{row.name: sinks})
        ours = regard.attention(*arrays, **given, return_weights=True)
        theirs = loops(*arrays, sink=sinks)
        same(ours.output, theirs.output)
        same(ours.weights, theirs.weights)


@of(MHA, "add_zero_attn")
def _(row, rng):
    for _, _, arrays in calls(rng):
        more = [np.concatenate([x, np.zeros_like(x[:, :, :1])], axis=2) for x in arrays[1:]]
        same(regard.attention(*arrays, **row("sink=0")), loops(arrays[0], *more).output)


@of(MHA, "add_bias_kv")
def _(row, rng):
    """One more key and one more value, the same for every text: bias_k and bias_v."""
    for _, size, (query, key, value) in calls(rng):
        bias_k, bias_v = rng.normal(size=(2, WIDTH)), rng.normal(size=(2, 2))
        more = []
        for array, bias in ((key, bias_k), (value, bias_v)):
            longer = np.empty((2, 2, size + 1, array.shape[-1]))
            for b, h, j in np.ndindex(2, 2, size + 1):
                longer[b, h, j] = bias[h] if j == size else array[b, h, j]
            more.append(longer)
        key, value = (
            np.concatenate([array, np.stack([bias[:, None]] * 2)], axis=2)
            for array, bias in ((key, bias_k), (value, bias_v))
        )
        same(regard.attention(query, key, value), loops(query, *more).output)


@of(SDPA, "dropout_p")
@of(MHA, "dropout")
@of(FLASH, "dropout_p")
@of(XFORMERS, "p")
@of(HF, "dropout")
@of(KERAS, "training")
def _(row, rng):
    """A weight is 0 with probability p, else divided by 1 - p; outside training p is 0."""
    p = 0.0
    for _, _, arrays in calls(rng):
        check(arrays, {}, changed=lambda h, weight: weight / (1 - p) * (rng.random() >= p))


@of(HF, "head_mask")
def _(row, rng):
    """The weights of each head are multiplied by a number."""
    for _, _, arrays in calls(rng):
        factors = rng.uniform(size=2)
        theirs = loops(*arrays, changed=lambda h, weight, by=factors: by[h] * weight).output
        same(factors[:, None, None] * regard.attention(*arrays), theirs)


@of(MHA, "need_weights")
@of(FLASH, "return_attn_probs")
@of(HF, "output_attentions")
@of(KERAS, "return_attention_scores")
def _(row, rng):
    for _, _, arrays in calls(rng):
        given = row(f"return_weights={row.name}", **{row.name: True})
        if row.name == "return_attn_probs":
            given |= row("return_lse=return_attn_probs", return_attn_probs=True)
        result = regard.attention(*arrays, **given)
        for ours, theirs in zip(result, loops(*arrays), strict=False):
            same(ours, theirs)


@of(FLEX, "return_lse", "return_aux")
@of(JAX, "return_residual")
@of(FLASH, "return_softmax_lse")
def _(row, rng):
    """The natural logarithm of the sum of exponentials of each row."""
    piece = "return_lse=True" if row.name == "return_aux" else f"return_lse={row.name}"
    for _, _, arrays in calls(rng):
        result = regard.attention(*arrays, **row(piece, **{row.name: True}))
        theirs = loops(*arrays)
        same(result.output, theirs.output)
        same(result.lse, theirs.lse)


@of(MHA, "average_attn_weights")
def _(row, rng):
    for length, size, arrays in calls(rng):
        result = regard.attention(*arrays, **row("return_weights=True"))
        theirs, heads, weights = np.zeros((2, length, size)), 2, loops(*arrays).weights
        for b, h, i, j in np.ndindex(2, heads, length, size):
            theirs[b, i, j] += weights[b, h, i, j] / heads
        same(row.value(".weights.mean(axis=-3)", result), theirs)


@of(ONNX, "qk_matmul_output_mode")
def _(row, rng):
    """The scaled products (0), after the softcap (1), with the mask added (2), the weights (3)."""
    for length, size, arrays in calls(rng):
        options = {"softcap": 0.6, "bias": rng.normal(size=(length, size))}
        told = row.value("regard.explain")(*arrays, **options)
        modes = np.zeros((3, 2, 2, length, size))
        for b, h, i, j in np.ndindex(2, 2, length, size):
            x = math.fsum(arrays[0][b, h, i] * arrays[1][b, h, j]) / math.sqrt(WIDTH)
            capped = 0.6 * math.tanh(x / 0.6)
            modes[:, b, h, i, j] = x, capped, capped + options["bias"][i, j]
        for name, theirs in zip(("scaled", "capped", "biased"), modes, strict=True):
            same(told[name].value, theirs)
        ours = regard.attention(*arrays, **options, **row("return_weights=True")).weights
        same(ours, loops(*arrays, softcap=0.6, added=at(options["bias"], 2, 3)).weights)


@of(ONNX, "softmax_precision")
def _(row, rng):
    for _, _, arrays in calls(rng):
        arrays = tuple(array.astype(np.float32) for array in arrays)
        theirs = loops(*arrays).output
        same(regard.attention(*arrays), theirs, np.float32)
        exact = regard.attention(*arrays, **row('precision="exact"'))
        np.testing.assert_allclose(exact, theirs, rtol=eps(np.float32), atol=0)


@of(JAX, "implementation")
def _(row, rng):
    for _, _, arrays in calls(rng):
        for kernel in dispatch.kernels():
            check(arrays, {row.argument("kernel="): kernel.name})


# --- heads, weights and shapes -------------------------------------------------------------------


@of(SDPA, "enable_gqa")
@of(FLEX, "enable_gqa")
def _(row, rng):
    """Each key head is repeated for H / G query heads next to each other."""
    for _, _, (query, key, value) in calls(rng, heads=4, groups=2):
        repeated = [np.stack([x[:, h // 2] for h in range(4)], axis=1) for x in (key, value)]
        same(regard.attention(query, key, value), loops(query, *repeated).output)


def heads_of(x, heads: int):
    """Row t of head h is features h·D … (h + 1)·D of row t."""
    batch, rows, width = x.shape
    split = np.empty((batch, heads, rows, width // heads))
    for b, h, t, d in np.ndindex(split.shape):
        split[b, h, t, d] = x[b, t, h * (width // heads) + d]
    return split


def joined(heads):
    batch, count, rows, width = heads.shape
    x = np.empty((batch, rows, count * width))
    for b, h, t, d in np.ndindex(heads.shape):
        x[b, t, h * width + d] = heads[b, h, t, d]
    return x


@of(ONNX, "q_num_heads", "kv_num_heads")
@of(HF, "num_attention_heads", "num_key_value_heads")
@of(MHA, "num_heads")
def _(row, rng):
    heads, groups = (2, 2) if row.name == "num_heads" else (4, 2)
    of_keys = row.name in ("kv_num_heads", "num_key_value_heads")
    for length, size in SIZES:
        x, keys = (rng.normal(size=(2, n, WIDTH * h)) for n, h in ((length, heads), (size, groups)))
        repeated = np.stack(
            [heads_of(keys, groups)[:, h * groups // heads] for h in range(heads)], 1
        )
        theirs = loops(heads_of(x, heads), repeated, repeated).output
        split = [
            row.value("x.reshape(B, L, H, D).swapaxes(1, 2)", x=one, B=2, L=n, H=h, D=WIDTH)
            for one, n, h in ((x, length, heads), (keys, size, groups))
        ]
        same(regard.attention(split[0], split[1], split[1]), theirs)
        given = {"heads": heads, "key_heads": groups}
        piece = f"key_heads={row.name}" if of_keys else f"heads={row.name}"
        given |= row(piece, **{row.name: groups if of_keys else heads})
        unchanged = [np.eye(WIDTH * n) for n in (heads, groups, groups)]
        same(regard.MultiHeadAttention(*unchanged, **given)(x, keys), joined(theirs))


@of(ONNX, "Q", "K", "V")
def _(row, rng):
    argument = {"Q": "query", "K": "key", "V": "value"}[row.name]
    for _, _, arrays in calls(rng):
        given = dict(zip(("query", "key", "value"), arrays, strict=True))
        given |= row(f"{argument}={row.name}", **{row.name: given[argument]})
        same(regard.attention(**given), loops(*arrays).output)


def linear(x, weight, bias=None):
    """x·Wᵀ + b, one number at a time."""
    batch, rows, width = x.shape
    result = np.empty((batch, rows, len(weight)))
    for b, t, n in np.ndindex(result.shape):
        products = [x[b, t, m] * weight[n, m] for m in range(width)]
        result[b, t, n] = math.fsum([*products, 0.0 if bias is None else bias[n]])
    return result


def layer(x, context, heads: int, weights, biases=(None,) * 4):
    query, key, value = (
        heads_of(linear(one, weight, bias), heads)
        for one, weight, bias in zip((x, context, context), weights[:3], biases[:3], strict=True)
    )
    return linear(joined(loops(query, key, value).output), weights[3], biases[3])


@of(MHA, "embed_dim", "kdim", "vdim", "bias")
@of(KERAS, "key_dim", "value_dim", "use_bias")
def _(row, rng):
    """Heads of keys are as wide as the weights make them, and so are heads of values."""
    heads, width = 2, 6
    key_dim, value_dim = (width // heads,) * 2
    context_width = width
    if row.name in ("kdim", "vdim"):
        context_width = 5
    if row.name in ("key_dim", "value_dim"):
        key_dim, value_dim = 2, 4
    shapes = [(heads * key_dim, width), (heads * key_dim, context_width)]
    shapes += [(heads * value_dim, context_width), (width, heads * value_dim)]
    x, context = rng.normal(size=(2, 3, width)), rng.normal(size=(2, 4, context_width))
    weights = [rng.normal(size=shape) / 4 for shape in shapes]
    given, biases = {}, (None,) * 4
    if "bias" in row.name:
        biases = [rng.normal(size=len(weight)) for weight in weights]
        for name, bias in zip("qkvo", biases, strict=True):
            if row.name == "use_bias":  # Keras has an axis for heads
                bias = bias.reshape(heads, -1) if name != "o" else bias
                bias = row.value(".ravel()", bias)
            given[row.argument(f"b_{name}=")] = bias
    ours = regard.MultiHeadAttention(*(weight.T for weight in weights), heads=heads, **given)
    same(ours(x, context), layer(x, context, heads, weights, biases))


@of(MHA, "batch_first")
def _(row, rng):
    x = rng.normal(size=(4, 2, 6))  # L, B, M
    weights = [rng.normal(size=(6, 6)) / 4 for _ in range(4)]
    ours = regard.MultiHeadAttention(*(weight.T for weight in weights), heads=2)
    first = row.value("x.swapaxes(0, 1)", x=x)
    there = np.empty((2, 4, 6))
    for b, t in np.ndindex(2, 4):
        there[b, t] = x[t, b]
    same(ours(first), layer(there, there, 2, weights))


@of(MHA, "dtype")
def _(row, rng):
    for _, _, arrays in calls(rng):
        converted = [row.value(".astype", array)(np.float32) for array in arrays]
        ours = regard.attention(*converted)
        assert ours.dtype == np.float32
        same(ours, loops(*converted).output, np.float32)


# --- softmax -------------------------------------------------------------------------------------


def softmax_of(numbers) -> list[float]:
    exponentials = [math.exp(x) for x in numbers]
    return [x / math.fsum(exponentials) for x in exponentials]


@of(SOFTMAX, "input", "x")
def _(row, rng):
    scores = rng.normal(size=(3, 4))
    ours = regard.softmax(**row(f"scores={row.name}", **{row.name: scores}))
    same(ours, [softmax_of(numbers) for numbers in scores])
    if row.name == "x":
        ours = regard.softmax(**row("scores=x.ravel()", x=scores))
        same(ours, softmax_of([number for numbers in scores for number in numbers]))


@of(SOFTMAX, "dim")
def _(row, rng):
    scores = rng.normal(size=(3, 4))
    ours = regard.softmax(scores, **row("axis=dim", dim=0))
    same(ours, np.transpose([softmax_of(numbers) for numbers in scores.T]))


@of(SOFTMAX, "dtype")
def _(row, rng):
    """Numbers are converted first."""
    scores = rng.normal(size=(3, 4)).astype(np.float32)
    ours = regard.softmax(row.value(".astype", scores)(np.float64))
    assert ours.dtype == np.float64
    same(ours, [softmax_of(map(float, numbers)) for numbers in scores])


# --- what differs between libraries --------------------------------------------------------------


@of(ANY, "order of axes")
def _(row, rng):
    for _, _, arrays in calls(rng):
        there = [np.moveaxis(array, 1, 2) for array in arrays]  # B, L, H, D
        here = [row.value("query.swapaxes(-3, -2)", query=array) for array in there]
        same(regard.attention(*here), loops(*arrays).output)


@of(ANY, "booleans in a mask")
def _(row, rng):
    for length, size, arrays in calls(rng):
        hidden = ~some(rng, length, size)
        check(arrays, {"mask": row.value("~mask", mask=hidden)}, sees=at(~hidden, 2, 3))


@of(ANY, "a mask of three axes")
def _(row, rng):
    for length, size, arrays in calls(rng):
        mask = some(rng, 2, length, size)
        check(arrays, {"mask": row.value("mask[:, None]", mask=mask)}, sees=at(mask, 0, 2, 3))
        mask = some(rng, 4, length, size)  # the heads of one text after those of the other
        sizes = {"B": 2, "H": 2, "L": length, "S": size}
        given = {"mask": row.value("mask.reshape(B, H, L, S)", mask=mask, **sizes)}
        check(arrays, given, sees=lambda b, h, i, j, mask=mask: mask[b * 2 + h, i, j])


@of(ANY, "causal with L ≠ S")
def _(row, rng):
    for length, size, arrays in calls(rng):
        if length != size:
            with pytest.raises(regard.OptionError, match=row.argument("offset=")):
                regard.attention(*arrays, causal=True)
        causal = {"causal": True}
        check(arrays, causal | row("offset=0"), sees=CAUSAL)
        last = shifted(size - length).inside(right=0)
        check(arrays, causal | row('offset="end"'), sees=last)
    for lengths in TEXTS:
        arrays = drawn(rng, *map(sum, lengths), batch=1)
        texts = {"mask": regard.masks.Segments.from_lengths(*lengths)}
        last = packed(*lengths).inside(right=0)
        check(arrays, causal | texts | row('offset="end"'), sees=last)

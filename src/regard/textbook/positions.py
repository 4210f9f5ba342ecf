"""Positions, each declared as steps: vectors added to embeddings, rotations, additions to logits.

Which of them a call has follows from what it is given, such as frequencies, slopes or a table. Must
not know arrays.
"""

from __future__ import annotations

from regard.textbook.mechanisms import Book

# The other feature of a pair, as an index: P is how far it is, Q twice that, W how many are turned.
OTHER = "(d//Q*Q+(d+P)%Q)%W"

_PLACES = {"query_positions", "key_positions"}
# What each kind of positions is given, which says that a call has it.
GIVEN = {
    "rotary": _PLACES | {"frequencies", "rotary_factors"},
    "alibi": _PLACES | {"positions_slopes"},
    "relativebias": {"positions_table", "bucket_numbers", "buckets"},
}
# The same for those that are added to embeddings.
ABSOLUTE = {
    "sinusoidal": {"embedding_positions", "wave_frequencies", "wave_starts"},
    "learned": {"positions_vectors"},
}
# What has no gradient.
_ALL = set().union(*GIVEN.values(), *ABSOLUTE.values())
SETTINGS = {name for name in _ALL if not name.startswith("positions_")}


def declare_absolute(book: Book) -> dict[str, str]:
    """Declare embeddings with a vector for each place added; for each step the one in its place."""
    cells, vectors = "L M", "positions_vectors"
    if book.give("embedding_positions", "p_x", "L", latex="p_{x}"):
        book.give("wave_frequencies", "f_x", "M", latex="f_{x}")
        book.give("wave_starts", "φ", "M", latex=r"\varphi")
        pair = "embedding_positions", "wave_frequencies"
        angles = book.step("wave_angles", "θ_x", cells, "multiply", *pair, latex=r"\theta_{x}")
        pair = angles, "wave_starts"
        phases = book.step("wave_phases", "θ_s", cells, "add", *pair, latex=r"\theta_{s}")
        vectors = book.step("waves", "V_p", cells, "sin", phases, latex="V_{p}")
    elif not book.give(vectors, "V_p", cells, latex="V_{p}"):
        return {}
    pair = "embeddings", vectors
    return {"embeddings": book.step("placed_embeddings", "X_p", cells, "add", *pair, latex="X_{p}")}


def declare_rotation(book: Book) -> dict[str, str]:
    """Declare the turned queries and keys; for each step the one that takes its place."""
    book.give("query_positions", "p_q", "L", latex="p_{q}")
    book.give("key_positions", "p_k", "S", latex="p_{k}")
    if not book.give("frequencies", "f", "D"):
        return {}
    factors = book.give("rotary_factors", "a", "D")
    return {
        "queries": _turned(book, "query", "Q", "L", "H i", factors),
        "keys": _turned(book, "key", "K", "S", "G j", factors),
    }


def _turned(book: Book, one: str, symbol: str, row: str, place: str, factors: bool) -> str:
    short = one[0]
    angles, axes = f"{one}_angles", f"{row} D"
    origin = f"{one}_positions", "frequencies"
    book.step(angles, f"θ_{short}", axes, "angle", *origin, latex=rf"\theta_{{{short}}}")
    sides = []
    for op, name in (("cos", "cosines"), ("sin", "sines")):
        step, latex = f"{one}_{name}", rf"\{op}_{{{short}}}"
        book.step(step, f"{op}_{short}", axes, op, angles, latex=latex)
        if factors:
            own, pair = f"scaled_{step}", (step, "rotary_factors")
            step = book.step(own, f"a·{op}_{short}", axes, "multiply", *pair, latex=f"a{latex}")
        sides.append(step)
    head, letter = place.split()
    plural = {"query": "queries", "key": "keys"}[one]
    other = plural, f"{head.lower()} {letter} {OTHER}"
    name, axes = f"rotated_{plural}", f"{head} {row} D"
    operands = (plural, sides[0], other, sides[1])
    return book.step(name, f"{symbol}_r", axes, "rotate", *operands, latex=f"{symbol}_{{r}}")


def declare_distances(book: Book, last: str) -> str:
    """Declare what is added to the logits for how far apart query and key are; the last step."""
    cells = "H L S"
    if book.give("positions_slopes", "μ", "H", latex=r"\mu"):
        pair = "query_positions", "key_positions"
        book.step("apart", "Δ_p", "L S", "apart", *pair, latex=r"\Delta_{p}")
        own = "positions_slopes", "apart"
        penalties = book.step("penalties", "B_p", cells, "multiply", *own, latex="B_{p}")
        return book.step("positioned", "A_p", cells, "subtract", last, penalties, latex="A_{p}")
    if book.give("positions_table", "b_p", "H T", latex="b_{p}"):
        book.give("bucket_numbers", "n", "T")
        book.give("buckets", "β", "L S", latex=r"\beta")
        operands = "positions_table", "bucket_numbers", "buckets"
        bias = book.step("relative_bias", "B_p", cells, "pick", *operands, latex="B_{p}")
        return book.step("positioned", "A_p", cells, "add", last, bias, latex="A_{p}")
    return last

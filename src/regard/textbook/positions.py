"""Positions, each declared as steps: rotations before the scores, additions after them.

Which of them a call has follows from what it is given: frequencies, slopes, or a table. Must not
know arrays.
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
# What has no gradient.
SETTINGS = set().union(*GIVEN.values()) - {"positions_slopes", "positions_table"}


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

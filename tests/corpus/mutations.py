"""Right code of the corpus with one token changed: a second yardstick, which nobody has tuned on.

Owns which tokens have another in their place, and that a seed draws them. A change counts if the
code still runs on the simplest problem and some result is another. Knows nothing that judges.
"""

from __future__ import annotations

import io
import random
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from attention_corpus import Case, callable_of
from corpus_tasks import OTHER, answers, distances, reading_of

EACH = 4  # changes of one case
OPERATORS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "@": "*", "**": "*",
    "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "&": "|", "|": "&", "~": "",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
}  # fmt: skip
WORDS = {"True": "False", "False": "True"}
# What may stand in each other's place.
THREES = (
    ("q", "k", "v"),
    ("Q", "K", "V"),
    ("query", "key", "value"),
    ("queries", "keys", "values"),
    ("query_states", "key_states", "value_states"),
    ("W_q", "W_k", "W_v"),
    ("W_Q", "W_K", "W_V"),
    ("wq", "wk", "wv"),
    ("bq", "bk", "bv"),
    ("q_proj", "k_proj", "v_proj"),
)


class Change(NamedTuple):
    line: int
    column: int
    old: str
    new: str


def changes(code: str) -> Iterator[Change]:
    """Every change of one token, in the order of the code; imports and `def` lines stay."""
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    left_out = False
    begins = True
    for token in tokens:
        if begins and token.type in (tokenize.NAME, tokenize.OP):
            left_out = token.string in ("import", "from", "def", "class", "@")
            begins = False
        if token.type == tokenize.NEWLINE:
            begins = True
        if left_out:
            continue
        for new in replacements(token):
            yield Change(*token.start, token.string, new)


def replacements(token: tokenize.TokenInfo) -> Iterator[str]:
    """What may stand in place of one token."""
    old = token.string
    if token.type == tokenize.NUMBER:
        if old.isdigit():
            yield str(int(old) + 1)
            if int(old):
                yield str(int(old) - 1)
        else:
            yield repr(2 * float(old))
    elif token.type == tokenize.OP and old in OPERATORS:
        yield OPERATORS[old]
    elif token.type == tokenize.NAME:
        if old in WORDS:
            yield WORDS[old]
        for three in THREES:
            if old in three:
                yield from (other for other in three if other != old)


def changed(case: Case, one: Change) -> Case:
    """A case with one change, which is its mistake."""
    lines = case.code.splitlines()
    line = lines[one.line - 1]
    lines[one.line - 1] = line[: one.column] + one.new + line[one.column + len(one.old) :]
    return replace(
        case,
        name=f"{case.name} {one.line}:{one.column} {one.old} → {one.new}".rstrip(),
        wrong=True,
        mistake=f"{one.old} became {one.new or 'nothing'}.",
        line=one.line,
        corrected=line,
        code="\n".join(lines) + "\n",
    )


def mixed(some: list[Change], rng: random.Random) -> list[Change]:
    """Changes in an order that is drawn, with one of each kind before a second of any."""
    rng.shuffle(some)
    seen: Counter[str] = Counter()
    order = []
    for one in some:
        kind = one.old if one.old in OPERATORS else "name" if one.old.isidentifier() else "number"
        order.append((seen[kind], one))
        seen[kind] += 1
    return [one for _, one in sorted(order, key=lambda pair: pair[0])]


def mutations_of(case: Case, seed: int, each: int = EACH) -> list[Case]:
    """Some changes of a right case that run and change a result, drawn by a seed."""
    order = mixed(list(changes(case.code)), random.Random(f"{seed} {case.name}"))
    found: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        right = answers(*callable_of(case, Path(folder)), case.library, case.stated)
        reading = reading_of(right)
        for one in order:
            if len(found) == each:
                break
            other = changed(case, one)
            try:
                function, call = callable_of(other, Path(folder))
            except Exception:  # no code any more
                continue
            now = answers(function, call, case.library, case.stated)
            again = answers(function, call, case.library, case.stated, many=1)
            one_answer = distances(now[:1], reading) == distances(again, reading)
            if one_answer and any(far > OTHER for far in distances(now, reading)):
                found.append(other)
    return found

"""One table of what every rule lets through, for the three places that decide it.

The table is made by plain loops that share no code with the package. regard.masks, the fused kernel
(with its retries in wider arithmetic) and the page's visibility.js are compared with every cell.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

import regard
from calls import every_target, on_path
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.rules.visibility import Block, Mask, Placed

BATCH, HEADS = 2, 2
SIZES = [(1, 4), (3, 2), (4, 5)]
OFFSETS = [-2, 0, 3]

# A rule is a tuple: its kind, then what it needs. `sees` says what it lets through.
Rule = tuple[Any, ...]


def sees(rule: Rule, batch: int, head: int, query: int, key: int, offset: int) -> bool:
    kind, *of = rule
    cell = batch, head, query, key, offset
    if kind == "causal":
        return key <= query + offset
    if kind == "window":
        left, right = of
        distance = key - (query + offset)
        return (left is None or distance >= -left) and (right is None or distance <= right)
    if kind == "lengths":
        return key < of[0][batch]
    if kind == "segments":
        return of[0][batch][query] == of[1][batch][key]
    if kind == "cells":
        return of[0][batch][head][query][key]
    if kind == "not":
        return not sees(of[0], *cell)
    answers = [sees(part, *cell) for part in of]
    return all(answers) if kind == "all" else any(answers)


def leaves(queries: int, keys: int, rng: np.random.Generator) -> Iterator[Rule]:
    yield ("causal",)
    for left, right in itertools.product((None, 0, 2), repeat=2):
        yield "window", left, right
    yield "lengths", [0, keys]
    yield "lengths", rng.integers(0, keys + 1, BATCH).tolist()
    yield (
        "segments",
        rng.integers(0, 3, (BATCH, queries)).tolist(),
        rng.integers(0, 3, (BATCH, keys)).tolist(),
    )
    yield "cells", (rng.random((BATCH, HEADS, queries, keys)) < 0.5).tolist()


def rules(queries: int, keys: int) -> Iterator[Rule]:
    """Every rule, its opposite, every pair both ways, and some deeper trees."""
    rng = np.random.default_rng(1000 * queries + keys)
    single = list(leaves(queries, keys, rng))
    yield from single
    yield from (("not", rule) for rule in single)
    for kind, (one, other) in itertools.product(("all", "any"), itertools.combinations(single, 2)):
        yield kind, one, other
    for _ in range(20):
        a, b, c, d = (single[i] for i in rng.integers(0, len(single), 4))
        yield "any", ("all", a, ("not", b)), ("not", ("any", c, d))
        yield "not", ("all", ("any", a, b), ("not", ("all", c, d)))


def cases() -> list[tuple[int, int, int, Rule]]:
    """(queries, keys, offset, rule), every rule at every offset that can matter."""
    return [
        (queries, keys, offset, rule)
        for queries, keys in SIZES
        for rule in rules(queries, keys)
        for offset in (OFFSETS if "causal" in str(rule) or "window" in str(rule) else [0])
    ]


CASES = cases()


@functools.cache
def tables() -> list[np.ndarray]:
    """What each case lets through, (B, H, L, S)."""
    return [table(*case) for case in CASES]


def table(queries: int, keys: int, offset: int, rule: Rule) -> np.ndarray:
    cells = [
        sees(rule, batch, head, query, key, offset)
        for batch, head, query, key in np.ndindex(BATCH, HEADS, queries, keys)
    ]
    return np.array(cells, bool).reshape(BATCH, HEADS, queries, keys)


def placed(queries: int, offset: int) -> Placed:
    """Query i at i + offset whatever the rules are: an offset would count within each segment."""
    return Placed(np.arange(queries) + offset)


def mask_of(rule: Rule) -> Mask:
    kind, *of = rule
    if kind in ("all", "any"):
        one, other = map(mask_of, of)
        return one & other if kind == "all" else one | other
    if kind == "not":
        return ~mask_of(of[0])
    made = {
        "causal": Causal,
        "window": Window,
        "lengths": Lengths,
        "segments": Segments,
        "cells": Boolean,
    }
    return made[kind](*of)


def test_the_table_shows_and_hides_cells_of_every_kind() -> None:
    for kind in ("causal", "window", "lengths", "segments", "cells", "not", "all", "any"):
        seen = [t.mean() for case, t in zip(CASES, tables(), strict=True) if case[3][0] == kind]
        assert any(0 < share < 1 for share in seen), kind


def test_masks_let_through_what_the_table_says() -> None:
    for (queries, keys, offset, rule), expected in zip(CASES, tables(), strict=True):
        visible = mask_of(rule).visible(queries, keys, offset=placed(queries, offset))
        np.testing.assert_array_equal(np.broadcast_to(visible, expected.shape), expected, f"{rule}")


@pytest.mark.needs("fused")
@every_target
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(np.float32, 0.0), (np.float32, 1e30), (np.float64, 1e200)],
    ids=["streamed", "again in float64", "again with numbers of any size"],
)
def test_the_fused_kernel_lets_through_what_the_table_says(target: str, dtype: Any, size: float):
    with on_path(f"fused:{target}") as kernel:
        for (queries, keys, offset, rule), expected in zip(CASES, tables(), strict=True):
            # Equal scores, so that every visible key has the same weight, and no hidden one any.
            query = np.full((BATCH, HEADS, queries, 2), size, dtype)
            key = np.full((BATCH, HEADS, keys, 2), size, dtype)
            weights = regard.attention(
                query, key, key, mask=mask_of(rule), offset=placed(queries, offset),
                return_weights=True, kernel=kernel,
            ).weights  # fmt: skip
            np.testing.assert_array_equal(weights > 0, expected, f"{rule}")


# In the page's own script: [visible, detail, the rules that hide the cell] of each cell.
PROGRAM = """
import { readFileSync } from "node:fs";
const { judge, hiddenBy } = await import(process.argv[1]);
const said = JSON.parse(readFileSync(0)).map(({ rule, cells }) =>
  cells.map(([batch, head, query, key, offset]) => {
    const position = query + offset;
    const verdict = judge(rule, { batch: [batch], head, query, key, position });
    return [verdict.visible, verdict.detail, hiddenBy(verdict)];
  }),
);
console.log(JSON.stringify(said));
"""


def as_page_has_it(rule: Rule, name: str) -> dict[str, Any]:
    def whole(array: Any) -> dict[str, Any]:
        array = np.asarray(array)
        return {"shape": list(array.shape), "data": array.astype(int).ravel().tolist()}

    kind, *of = rule
    own: dict[str, Any] = {"kind": kind, "name": name}
    if kind == "window":
        return own | {"left": of[0], "right": of[1]}
    if kind == "lengths":
        return own | {"lengths": whole(of[0])}
    if kind == "segments":
        return own | {"query": whole(of[0]), "key": whole(of[1])}
    if kind == "cells":
        said = {"seen": "mask is True here", "unseen": "mask is False here"}
        return own | said | {"cells": whole(of[0])}
    mask: Any = mask_of(rule)
    if kind == "not":
        return own | {"part": as_page_has_it(of[0], mask.parts[0].name)}
    if kind in ("all", "any"):
        return own | {"parts": [as_page_has_it(part, mask_of(part).name) for part in of]}
    return own


@pytest.mark.needs("node")
def test_the_page_lets_through_what_the_table_says_in_the_words_of_regard_masks() -> None:
    nested = [case for case in CASES if all(part[0] != case[3][0] for part in parts(case[3]))]
    tasks = [
        {
            "rule": as_page_has_it(rule, mask_of(rule).name),
            "cells": [(*cell, offset) for cell in np.ndindex(BATCH, HEADS, queries, keys)],
        }
        for queries, keys, offset, rule in nested
    ]
    script = (files("regard") / "views" / "report" / "visibility.js").as_uri()
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", PROGRAM, script],
        input=json.dumps(tasks).encode(),
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    for (queries, keys, offset, rule), said in zip(nested, json.loads(done.stdout), strict=True):
        shape = (BATCH, HEADS, queries, keys)
        visible = np.array([cell[0] for cell in said]).reshape(shape)
        np.testing.assert_array_equal(visible, table(queries, keys, offset, rule), f"{rule}")
        for (batch, head, query, key), cell in zip(np.ndindex(*shape), said, strict=True):
            if head == 0 and (query + key) % 3 == 0:  # the words of every third cell
                positions = np.broadcast_to(np.arange(queries) + offset, (BATCH, queries))
                at = Block(shape, (batch,), head, np.array([query]), positions)
                verdict = mask_of(rule).verdict(at, key)
                assert cell == [verdict.visible, verdict.detail, list(verdict.hidden_by())]


def parts(rule: Rule) -> list[Rule]:
    """The rules that a combination is made of."""
    return [part for part in rule[1:] if rule[0] in ("all", "any", "not")]

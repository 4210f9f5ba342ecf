"""Past failures of the random calls, replayed, and whether the attack finds a planted fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regard
from attack_calls import build, check, draw
from attack_kinds import draw_more
from attack_shrinking import failure, program, smaller
from calls import PATHS
from long_oracle import ENOUGH, attend_long
from oracle import attend_exactly

CORPUS = Path(__file__).parent / "corpus.jsonl"
ROUNDINGS = 4 * 2.0**-53  # each answer is rounded to float64 once

pytestmark = pytest.mark.skipif(not ENOUGH, reason="long double is no wider than float64")


def test_calls_of_the_corpus_are_answered_rightly():
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 8
    for line in lines:
        call = json.loads(line)
        if call["path"] in PATHS:
            assert failure(call) == "", line


def test_some_random_calls_are_answered_rightly():
    for seed in range(300):
        assert failure(draw(seed)) == "", f"seed {seed}"


def test_some_random_gradients_caches_and_merges_are_right():
    kinds = {draw_more(seed)["kind"] for seed in range(150)}
    assert kinds == {"gradients", "cache", "merge", "product"}
    for seed in range(150):
        assert failure(draw_more(seed)) == "", f"seed {seed}"


@pytest.mark.parametrize("name", ["gradients", "merge"])
def test_a_fault_planted_in_the_rest_is_found_and_made_small(monkeypatch, name):
    right = getattr(regard, name)

    def wrong(*arrays, **options):
        found = right(*arrays, **options)
        first = np.asarray(found[0])
        if first.size > 2:
            first.reshape(-1)[-1] += 1
        return found

    monkeypatch.setattr(regard, name, wrong)
    calls = (draw_more(seed) for seed in range(3000))
    least = smaller(next(one for one in calls if failure(one)))
    assert failure(least)
    assert least["options"] == [] if name == "gradients" else least["parts"] == 1
    monkeypatch.undo()
    assert failure(least) == ""
    exec(compile(program(least), "program", "exec"), {})


def test_the_fast_oracle_agrees_with_fifty_digits():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, n, 5)) for n in (3, 4, 4))
    visible = rng.random((2, 3, 4)) < 0.7
    visible[0, 1] = False
    for options in ({}, {"softcap": 0.7, "sink": 0.5}, {"scale": -40.0, "bias": [[1.0, -5, 0, 9]]}):
        fast = attend_long(query, key, value, visible, **options)
        slow = attend_exactly(query, key, value, mask=visible, **options)
        for one, other in zip(fast, slow, strict=True):
            np.testing.assert_allclose(one, other, rtol=ROUNDINGS, atol=ROUNDINGS)


def test_a_planted_fault_is_found_and_made_small(monkeypatch):
    right = regard.attention

    def wrong(*arrays, **options):
        if "sink" in options and options.get("causal"):
            del options["sink"]
        return right(*arrays, **options)

    monkeypatch.setattr(regard, "attention", wrong)
    found = next(seed for seed in range(3000) if failure(draw(seed)))
    least = smaller(draw(found))
    assert set(least["options"]) <= {"sink", "causal", "offset", "return_lse"}
    assert max(least[letter] for letter in "LSDE") <= 2
    assert least["batch"] == []
    text = program(least)
    assert len(text.splitlines()) <= 10
    exec(compile(text, "program", "exec"), {})
    monkeypatch.undo()
    check(least)


def test_drawn_calls_hide_keys_empty_rows_and_use_every_option():
    seen = {name for seed in range(300) for name in draw(seed)["options"]}
    assert len(seen) == 13, seen
    empty = [build(draw(seed))[2] for seed in range(300)]
    assert sum(x.size > 0 and not x.any(axis=-1).all() for x in empty) > 30

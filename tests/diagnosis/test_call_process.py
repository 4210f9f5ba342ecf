"""A function and its adapter in a process of their own, by path and name."""

from __future__ import annotations

import pytest

from regard.diagnosis.isolation import diagnose_target
from regard.errors import OptionError, ProblemError

CODE = """
import os
import numpy as np


def attention(q, k, v, mask=None):
    print("called")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def backwards(q, k, v):
    return attention(k, q, v)


def leaving(q, k, v):
    os._exit(3)


def renamed(first, second, third):
    return attention(first, second, third)


def call(f, t):
    return f(t.query, t.key, t.value)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "mine.py"
    file.write_text(CODE)
    return file


def test_the_verdict_is_that_of_this_process(path):
    found = diagnose_target(f"{path}:attention")
    assert found.verdict == "right"
    assert "True in `mask` means attend" in [one.text for one in found.assumptions]
    assert "return f(t.query, t.key, t.value, mask=t.mask)" in found.adapter
    assert [one.name for one in found.findings] == ["prints"]
    wrong = diagnose_target(f"{path}:backwards", f"{path}:call", scale=0.5)
    assert wrong.verdict == "wrong"


def test_an_adapter_is_printed_where_one_is_needed(path):
    found = diagnose_target(f"{path}:renamed")
    assert found.verdict == "not_callable"
    assert "    t.query,  # first\n" in found.adapter
    assert diagnose_target(f"{path}:renamed", f"{path}:call").verdict == "right"


def test_what_ends_its_process_is_told(path):
    found = diagnose_target(f"{path}:leaving", f"{path}:call")
    assert found.verdict == "not_callable"
    assert "it ended the process (exit code 3)" in found.summary


def test_what_cannot_be_loaded_or_is_stated_in_vain_is_refused(path):
    with pytest.raises(ProblemError, match="has no nothing"):
        diagnose_target(f"{path}:attention", f"{path}:nothing")
    with pytest.raises(OptionError, match="mask='hide' is about a mask argument"):
        diagnose_target(f"{path}:attention", f"{path}:call", mask="hide")


def test_lines_and_names_are_those_of_this_process(path):
    there = diagnose_target(f"{path}:attention", scale=0.5)
    here = diagnose_target(f"{path}:attention", in_process=True, scale=0.5)
    assert there == here
    assert (
        there.line == CODE.split("\n").index(next(x for x in CODE.split("\n") if "q @ k" in x)) + 1
    )


def test_a_score_that_is_meant_is_known_in_both_processes(path):
    from regard.scores import Cosine

    found = diagnose_target(f"{path}:attention", score=Cosine())
    assert found.verdict == "wrong"
    assert found.departure.step in ("cosines", "scores", "unit_queries")

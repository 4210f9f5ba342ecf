"""A function and its adapter in a process of their own, by path and name."""

from __future__ import annotations

import pytest

from regard.diagnosis.isolation import judge_target
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
    found = judge_target(f"{path}:attention")
    assert found.verdict == "right"
    assert "True in `mask` means attend" in [one.text for one in found.assumptions]
    assert "return f(t.query, t.key, t.value, mask=t.mask)" in found.adapter.text
    wrong = judge_target(f"{path}:backwards", f"{path}:call", scale=0.5)
    assert wrong.verdict == "wrong"
    assert wrong.task.expected["output"].shape == wrong.answer.arrays["output"].shape


def test_an_adapter_is_printed_where_one_is_needed(path):
    found = judge_target(f"{path}:renamed")
    assert found.verdict == "not_callable"
    assert "    t.query,  # first\n" in found.adapter.text
    assert judge_target(f"{path}:renamed", f"{path}:call").verdict == "right"


def test_what_ends_its_process_is_told(path):
    found = judge_target(f"{path}:leaving", f"{path}:call")
    assert found.verdict == "not_callable"
    assert "it ended the process (exit code 3)" in found.why


def test_what_cannot_be_loaded_or_is_stated_in_vain_is_refused(path):
    with pytest.raises(ProblemError, match="has no nothing"):
        judge_target(f"{path}:attention", f"{path}:nothing")
    with pytest.raises(OptionError, match="mask='hide' is about a mask argument"):
        judge_target(f"{path}:attention", f"{path}:call", mask="hide")

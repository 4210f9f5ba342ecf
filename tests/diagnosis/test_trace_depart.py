"""The line where code departs from the textbook is found by its values alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from regard.diagnosis.trace.depart import story
from traced import asked, drawn, run

SOFTMAX = """
import numpy as np

def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)
"""


def heads(module, given):
    return module.attention(given["queries"], given["keys"], given["values"])


def each_head(module, given):
    texts = zip(*given.values(), strict=True)
    return [[module.attention(*own) for own in zip(*text, strict=True)] for text in texts]


RIGHT = {
    "whole arrays": (
        heads,
        """
        def attention(q, k, v):
            return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    """,
    ),
    "loops of numbers": (
        each_head,
        """
        def attention(q, k, v):
            out = np.zeros((len(q), v.shape[1]))
            for i in range(len(q)):
                keys = range(len(k))
                s = [sum(a * b for a, b in zip(q[i], k[j])) / len(q[i]) ** 0.5 for j in keys]
                e = [np.exp(x - max(s)) for x in s]
                for j in keys:
                    out[i] += e[j] / sum(e) * v[j]
            return out
    """,
    ),
    "a running softmax": (
        heads,
        """
        def attention(q, k, v):
            m = np.full(q.shape[:-1], -np.inf); l = 0.0; o = 0.0
            for j in range(0, k.shape[-2], 2):
                s = q @ k[..., j:j + 2, :].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
                n = np.maximum(m, s.max(-1))
                p = np.exp(s - n[..., None])
                c = np.exp(m - n)
                l = l * c + p.sum(-1)
                o = o * c[..., None] + p @ v[..., j:j + 2, :]
                m = n
            return o / l[..., None]
    """,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_does_not_depart(name):
    call, source = RIGHT[name]
    _, traced, departure = run(SOFTMAX + _flush(source), asked(drawn()), call)
    assert departure is None
    assert {"scaled", "output"} <= {step for own in story(traced).right.values() for step in own}


def _flush(source: str) -> str:
    lines = source.rstrip().split("\n")
    return "\n".join(line[8:] for line in lines) + "\n"


# What is wrong, the line of the marked expression, and the first step that is not there.
WRONG = {
    "scale": ("q.shape[-1] ** -0.5", "q.shape[-1] ** -1", "scaled"),
    "axis": ("p = softmax(s)", "p = softmax(s, axis=-2)", "weights"),
    "values": ("o = p @ v", "o = p @ k", "output"),
    "added": ("p = softmax(s)", "p = softmax(s) + 0.01", "weights"),
    "keys": ("k.swapaxes(-1, -2)", "k.reshape(*k.shape[:2], k.shape[3], k.shape[2])", "scores"),
}
LINES = """
def attention(q, k, v):
    d = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(-1, -2)
    s = s * d
    p = softmax(s)
    o = p @ v
    return o
"""


@pytest.mark.parametrize("name", WRONG)
def test_the_line_that_departs_is_found(name):
    right, wrong, step = WRONG[name]
    source = SOFTMAX + LINES.replace(right, wrong)
    _, _, departure = run(source, asked(drawn()), heads)
    lines = source.lstrip("\n").split("\n")
    (line,) = (n for n, text in enumerate(lines, 1) if wrong in text)
    assert departure is not None
    assert departure.step == step
    assert departure.line in (line, line + 2 if name == "scale" else line)


def test_a_step_that_is_left_out_is_said_where_it_should_be():
    source = SOFTMAX + LINES.replace("    s = s * d\n", "")
    _, _, departure = run(source, asked(drawn()), heads)
    assert departure is not None
    assert (departure.step, departure.line) == ("scaled", 10)
    assert departure.right == ("scores", 9)
    assert departure.mistake


def test_a_wrong_mask_is_found_through_the_line_that_made_it():
    source = (
        SOFTMAX
        + """
def attention(q, k, v):
    i, j = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])
    keep = j < i + 1
    keep = keep & (j != i)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(keep, s, -1e9)) @ v
"""
    )
    _, _, departure = run(source, asked(drawn(rules={"causal": np.tri(5, dtype=bool)})), heads)
    assert departure is not None
    assert departure.line == 10
    assert departure.how == "put"


def test_equal_names_of_strangers_decide_nothing():
    names = {"softmax": "a", "attention": "attention", "q": "w", "k": "mask", "v": "scale"}
    source = SOFTMAX + LINES.replace("p = softmax(s)", "p = softmax(s, axis=-2)")
    told = []
    for own in ({}, names):
        text = source
        for old, new in own.items():
            text = "".join(new if one == old else one for one in _words(text))
        _, _, departure = run(text, asked(drawn()), heads)
        assert departure is not None
        told.append((departure.step, departure.line, departure.mistake))
    assert told[0] == told[1]


def _words(text: str) -> list[str]:
    return re.split(r"(\W)", text)

"""The exercises of the course: each check takes the answer below it, and refuses wrong ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

from places import ROOT

LEARN = ROOT / "site" / "pages" / "learn"
CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANSWER = ":tags: [hide-input, answer]\n"

SOFTMAX = """
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
# What a learner may well write, and an attention that was asked for something else.
WRONG: dict[str, dict[int, tuple[str, ...]]] = {
    "words": {
        1: ("cup_dog = 0.4 * 0.1 + 0.9",),
        2: ("def most_like(i): return int((vectors @ vectors[i]).argmax())",),
        3: ("milk = np.array([0.0, 1.0, 0.0])", "milk = np.array([1.0, 0.0, 0.0])"),
    },
    "queries": {
        1: (
            "def project(X, q, k, v): return X @ k, X @ q, X @ v",
            "def project(X, q, k, v): return X @ q.T, X @ k.T, X @ v.T",
            "def project(X, q, k, v): return X, X, X",
        ),
        2: ("W_q = np.zeros((4, 4)); W_q[:, 3] = 1.0", "W_q = np.eye(4)"),
        3: ("W_v = np.ones((4, 4))", "W_v = problem.W_v"),
    },
    "scores": {
        1: (
            "def scaled_scores(q, k): return q @ k.swapaxes(-1, -2)",
            "def scaled_scores(q, k): return q @ k.swapaxes(-1, -2) / np.sqrt(len(q))",
        ),
        2: ("harmless = {8}", "harmless = {64, 128}", "harmless = set()"),
        3: ("def variance_of_scores(s, t, D): return (s + t) * D",),
    },
    "softmax": {
        1: (
            "def attention(q, k, v):\n    s = q @ k.swapaxes(-1, -2)" + SOFTMAX,
            "def attention(q, k, v):\n    p = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)\n"
            "    return p / p.sum(-1, keepdims=True) @ v",
        ),
        2: ("right_axis = -2", "right_axis = 0"),
        3: ("scores = np.array([0.5, 0.3, 0.2])",),
    },
    "masks": {
        1: (
            "def causal_attention(q, k, v):\n    s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5"
            + SOFTMAX,
            "def causal_attention(q, k, v): return regard.attention(q, k, v, window=(0, None))",
        ),
        2: (
            "def masked_attention(q, k, v, mask):\n    s = q @ k.swapaxes(-1, -2) / 2"
            "\n    s = np.where(mask, s, -1e9)" + SOFTMAX,
            "def masked_attention(q, k, v, mask): return regard.attention(q, k, v, mask=~mask)",
        ),
        3: ("rule = Causal()", "rule = Window(1, 0)"),
    },
    "heads": {
        1: ("def cut(a, heads): return a.reshape(heads, len(a), -1)",),
        2: (
            "def multi_head(x, W_q, W_k, W_v, W_o, num_heads):\n"
            "    q, k, v = ((x @ W).reshape(num_heads, len(x), -1) for W in (W_q, W_k, W_v))\n"
            "    return regard.attention(q, k, v).reshape(len(x), -1) @ W_o",
        ),
        3: ("readers = [2]", "readers = [2, 6, 10]"),
    },
    "positions": {
        1: (
            "def reordered(output, order): return output",
            "def reordered(output, order): return output[np.argsort(order)]",
        ),
        2: ("def turn(array): return array", "def turn(array): return explanation['keys'].value"),
        3: ("slope = 0.5",),
    },
    "gradients": {
        1: (
            "def learn(problem, steps=100): return [0.67] * steps",
            "def learn(problem, steps=100): return [regard.explain(problem)['loss'].value] * steps",
        ),
        2: ("def backward(q, k, v, d): return regard.gradients(q, k, v, d, scale=1.0)[:3]",),
        3: ("gradient_of_query = np.array([1.0, 0.0, 0.0, 0.0])",),
    },
    "mechanisms": {
        1: ("cosine_attention = regard.attention",),
        2: (
            "def additive_scores(q, k, a, b, v): return (q @ a) @ (k @ b).T",
            "def additive_scores(q, k, a, b, v): return np.tanh(k @ b + (q @ a)[:, None]) @ v + 1",
        ),
        3: ("linear_attention = regard.attention",),
    },
    "encoder": {
        1: ("def looks_ahead(overview): return divmod(int(overview.previous.argmax()), 12)",),
        2: ("def nearest(question, texts): return 0",),
        3: ("def weights_of(queries, keys): return regard.softmax(queries @ keys.T)",),
    },
    "decoder": {
        1: ("def probabilities(logits): return logits / logits.sum()",),
        2: ("def rms_norm(rows, epsilon): return rows / np.sqrt((rows**2).mean() + epsilon)",),
        3: ("def write(text, count): return text + ' floor'",),
    },
    "machines": {
        1: (
            "def merge(a, b, c, d): return (a + c) / 2",
            "def merge(a, b, c, d):\n    b, d = np.exp(b)[..., None], np.exp(d)[..., None]\n"
            "    return (b * a + d * c) / (b + d)",
        ),
        2: ("def streaming(q, k, v): return v.mean(-2, keepdims=True) + 0 * q[..., :1]",),
        3: ("parts = 64", "parts = 28"),
    },
}


def test_every_chapter_has_wrong_answers_to_try() -> None:
    chapters = {path.stem for path in LEARN.glob("*.md")} - {"index"}
    assert chapters == WRONG.keys()
    assert all(wrong.keys() == {1, 2, 3} for wrong in WRONG.values())


@pytest.mark.full
@pytest.mark.needs("minilm", "smollm2", "dask")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of wrong answers
@pytest.mark.parametrize("chapter", WRONG)
def test_a_check_takes_the_answer_and_refuses_wrong_ones(chapter: str) -> None:
    text = (LEARN / f"{chapter}.md").read_text("utf-8")
    before, *exercises = re.split(r"^### \d\. ", text, flags=re.MULTILINE)
    known: dict[str, Any] = {}
    for cell in CELL.findall(before):
        exec(cell, known)
    for number, exercise in enumerate(exercises, 1):
        cells = CELL.findall(exercise)
        at = next(n for n, cell in enumerate(cells) if cell.startswith(ANSWER))
        answer, checks = cells[at].removeprefix(ANSWER), cells[at + 1 :]
        for cell in cells[:at]:
            exec(cell, known)
        for wrong in WRONG[chapter][number]:
            tried = dict(known)
            exec(wrong, tried)
            # An answer of the wrong shape may fail before it is compared.
            with pytest.raises((AssertionError, ValueError)):
                exec("\n".join(checks), tried)
        for cell in (answer, *checks):
            exec(cell, known)

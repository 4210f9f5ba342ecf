"""Wrong code that no entry of the catalogue explains: the one line that makes it right."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import numpy as np
import pytest

import regard
from regard.diagnosis.judging.small_changes import changes_of
from regard.diagnosis.process.changed_code import ChangedCode
from regard.diagnosis.reading.changed_text import Change, switched_off


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def with_a_sink(q, k, v, sink):
    """Causal attention with a sink of each head, (H,), in front: q, k, v (B, H, L, D)."""
    s = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(s.shape[-2], dtype=bool), s, -np.inf)
    s = np.concatenate([np.zeros_like(s[..., :1]) - sink[:, None, None], s], axis=-1)
    w = softmax(s)[..., 1:]
    return np.einsum("bhij,bhjd->bhid", w, v)


def capped(q, k, v, d_output, cap=3.0):
    """The gradients of attention with a softcap, of matrices (L, D)."""
    scale = q.shape[-1] ** -0.5
    t = np.tanh(q @ k.T * scale / cap)
    p = softmax(cap * t)
    d_p = d_output @ v.T
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    d_s = d_s * (1 - t**3) * scale
    return d_s @ k, d_s.T @ q, p.T @ d_output


def of_cosines(q, k, v):
    """The cosines of rows with a temperature of 0.1, of (B, H, L, D)."""
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = k / np.linalg.norm(k, axis=-2, keepdims=True)
    return softmax(q @ k.swapaxes(-1, -2) / 0.1) @ v


def first_and_last(q, k, v, first=2, last=3):
    """What is right, and unknown: every token sees the first two and the last three before it."""
    i, j = np.ogrid[: q.shape[-2], : k.shape[-2]]
    seen = (j <= i) & ((j < first) | (i - j < last))
    return softmax(np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)) @ v


def with_gains(q, k, v):
    """What is right, and unknown: each feature of the result has a gain of its own."""
    gains = 0.5 + np.arange(v.shape[-1])
    out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    return out * gains


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            with_a_sink,
            "s = np.concatenate([np.zeros_like(s[..., :1]) + sink[:, None, None], s], axis=-1)",
        ),
        pytest.param(capped, "d_s = d_s * (1 - t**2) * scale", marks=pytest.mark.full),
        pytest.param(
            of_cosines,
            "k = k / np.linalg.norm(k, axis=-1, keepdims=True)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_line_that_makes_code_right_is_named(function, line):
    found = regard.diagnose(function)
    assert found.verdict == "mistaken", found
    (mistake,) = found.mistakes
    assert mistake.name == "one_change"
    assert line in (mistake.numpy, *mistake.why.split("`")), found
    number = int(mistake.title.split()[1])
    assert mistake.why.split("`")[1] in _line(number)


def _line(number):
    with open(__file__, encoding="utf-8") as file:
        return file.read().splitlines()[number - 1]


@pytest.mark.full
@pytest.mark.parametrize("function", [first_and_last, with_gains])
def test_what_is_right_and_unknown_is_not_made_plain_attention(function):
    """One change of each would make it plain attention, without what it computes besides."""
    assert regard.diagnose(function).verdict == "unknown"


@pytest.mark.full
def test_the_line_is_found_in_a_process_of_its_own(tmp_path):
    file = tmp_path / "mine.py"
    text = "\n\n".join(map(_text, (softmax, with_a_sink)))
    file.write_text(f"import numpy as np\n\n{text}")
    ran = subprocess.run(
        [sys.executable, "-m", "regard", "diagnose", f"{file}:with_a_sink"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    line = "s = np.concatenate([np.zeros_like(s[..., :1]) + sink[:, None, None], s], axis=-1)"
    assert f"should be `{line}`" in " ".join(ran.stdout.split()), ran


def _text(function):
    code = function.__code__
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    node = next(
        one
        for one in ast.parse("\n".join(lines)).body
        if isinstance(one, ast.FunctionDef) and one.lineno == code.co_firstlineno
    )
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


# --- calling changed code ------------------------------------------------------------------------


@functools.lru_cache
def table(count):
    return tuple(range(count))


class Adds:
    def __init__(self):
        self.offset = 1

    def more(self, x):
        return x + len(table(3))

    def __call__(self, x):
        def inner(y):
            return self.more(y) - self.offset

        return inner(x) * 2


def changed(thing, old, new):
    code = ChangedCode(thing)
    number = next(n for n, (_, text) in enumerate(code.blocks) if old in text)
    start = code.blocks[number][1].index(old)
    return code.with_change(Change(number, start, start + len(old), new))


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("x + len", "x - len", 2 * (10 - 3 - 1)),
        ("self.more(y) - ", "self.more(y) + ", 2 * (10 + 3 + 1)),
        ("range(count)", "range(count + 1)", 2 * (10 + 4 - 1)),
        ("inner(x) * 2", "inner(x) * (", 2 * (10 + 3 - 1)),  # no Python
    ],
)
def test_code_is_changed_for_a_call_alone(old, new, result):
    own = Adds()
    assert own(10) == 24
    with changed(own, old, new):
        assert own(10) == result
    assert own(10) == 24
    with pytest.raises(ZeroDivisionError), changed(own, old, new):
        raise ZeroDivisionError
    assert own(10) == 24


def test_code_whose_file_has_changed_is_left_alone(tmp_path):
    file = tmp_path / "once.py"
    file.write_text("def f(x):\n    return x\n")
    own = {}
    exec(compile("def f(x, y):\n    return x + y\n", str(file), "exec"), own)
    assert ChangedCode(own["f"]).blocks == ()
    exec(compile(file.read_text(), str(file), "exec"), own)
    assert ChangedCode(own["f"]).blocks == ((1, "def f(x):\n    return x\n"),)
    assert ChangedCode(len).blocks == ()
    assert ChangedCode(eval("lambda x: x")).blocks == ()


# --- which changes there are ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("y = a[..., :-1]", "y = a[..., 1:]"),
        ("y = a[:, None]", "y = a[None, :]"),
        ("y = i < n", "y = i <= n"),
        ("y = a.sum(axis=1)", "y = a.sum(axis=-2)"),
        ("y = a.sum(axis=-1)", "y = a.mean(axis=-1)"),
        ("y = f(a, b, c)", "y = f(c, b, a)"),
        ("y = (a) - b", "y = (b) - (a)"),
        ("y = 1 - a", "y = 1 - a ** 2"),
        ("y = a * b", "y = a / b"),
        ("y += a", "y = a"),
        ("y = np.einsum('id,jd->ij', a, b)", "y = np.einsum('di,jd->ij', a, b)"),
        ("y = np.exp(a - a.max())", "y = np.exp(b - b.max())"),
        ("y = f(mask)", "y = f((~mask))"),
        ("y = roll(a, (-i, -n))", "y = roll(a, (i, n))"),
        ("y = a @ b", "y = (a @ b) * scale"),
        ("y = a + scale * b.sum(-1)", "y = a * scale + b.sum(-1)"),
        (
            "y = f.normalize(a), f.normalize(b)",
            "y = f.normalize(a, dim=-1), f.normalize(b, dim=-1)",
        ),
        ("y = {'é': 1 - a}", "y = {'é': 1 - b}"),
    ],
)
def test_a_small_change_is_tried(line, new):
    text = f"def f(a, b, c, i, n, mask, scale):\n    y = 0\n    {line}\n    return y\n"
    blocks = [(5, text)]
    found = [one.lines(blocks) for one in changes_of(blocks)]
    assert any((number, before) == (7, line) and after == new for number, before, after in found)
    for one in changes_of(blocks):
        ast.parse(one.of(blocks))


def test_no_change_touches_a_limit_or_leaves_a_step_out():
    lines = ["y = np.clip(a, 0, 3)", "for i in range(4):", "    y = y * 2", "return y"]
    text = "\n    ".join(["def f(a, b):", *lines])
    changed_lines = {one.lines([(1, text)])[2] for one in changes_of([(1, text)])}
    assert not any("clip(a, 1" in one or "clip(a, 0, 4" in one for one in changed_lines)
    assert not any(one.startswith("for i in range") for one in changed_lines)
    assert not {"y = y * 0", "y = y * 1", "y = 2", "y = y"} & changed_lines


def test_what_a_change_switches_off_is_known():
    text = "def f(i, j, b):\n    return (j <= i) & (i - j < 3)\n"
    start = text.index("i - j")
    both = list(switched_off([(1, text)], Change(0, start, start + 1, "b")))
    assert {one.lines([(1, text)])[2] for one, _ in both} >= {
        "return (j <= i) & ((b - j < 3) | True)",
        "return (j <= i) & ((b - j < 3) & False)",
        "return (j <= i) & (0 * (b - j) < 3)".replace("(0 * (b - j))", "(0 * (b - j))"),
    } or both

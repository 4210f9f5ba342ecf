"""Rewritten source computes what it computed, and its values have the lines that made them."""

from __future__ import annotations

import numpy as np
import pytest

from regard.diagnosis.trace.notes import Notes
from regard.diagnosis.trace.rewrite import Code, rewritten
from regard.diagnosis.trace.traced import listening

SOURCE = '''
import numpy as np

SCALE = 2.0

def helper(x, axis=-1, *rest, flag=True, **more):
    total = 0.0
    for i, row in enumerate(x):
        total += row.sum() if flag else 0
    x = x.copy()
    x[0] += total
    x[1:, ::2] *= SCALE
    x[..., None]
    return x, [a * b for a, b in zip(x[0], x[1]) if a == a], {k: v for k, v in more.items()}

class Box:
    size: int = 3

    def __init__(self, *items):
        self.items, (self.first, *_) = list(items), items
        self.count = 0

    @property
    def last(self):
        return self.items[-1]

    def add(self, value):
        self.count += 1
        self.items[0] -= value
        return f"{self.count} {value:.2f} {self.last!r}"

def every(a, b=(1, 2), *, c=None):
    """It says nothing."""
    match b:
        case (1, y) if y > 1:
            z = lambda t, u=2: t ** u + y
        case _:
            z = None
    try:
        d = a[-1] if c is None and not a[0] < 1 < a[1] else ~np.array([True, a[0] <= 3])
        assert z is not None, "text"
        del a[0]
        with np.errstate(all="ignore"):
            e = np.float64(1) / 0
        raise KeyError("x")
    except KeyError as error:
        e = str(error)
    finally:
        g = (n := 3) + sum(i * z(i) for i in range(n))
    def inner(k):
        nonlocal g
        g -= k
        yield from (g, k)
    *h, last = inner(1)
    return d, e, g, h, last, -2 % 3, set(h) | {1}, a[:1:], locals().keys() >= {"a"}
'''


def calls(module):
    box = module.Box(np.float64(5), 2)
    return (
        [
            np.asarray(one).tolist() if i < 2 else one
            for i, one in enumerate(module.helper(np.arange(12.0).reshape(3, 4), w=1))
        ],
        box.add(1.5),
        box.items,
        [
            one if not isinstance(one, np.ndarray) else one.tolist()
            for one in module.every([1, 2, 3])
        ],
    )


def plain() -> Code:
    code = rewritten(SOURCE)
    code.broken = "told"
    return code


def test_rewritten_code_computes_what_it_computed():
    code = rewritten(SOURCE)
    assert not code.broken
    want = repr(calls(plain().module("own")))
    module = code.module("own")
    assert repr(calls(module)) == want
    notes = Notes(code)
    with listening(module, notes):
        notes.listening = True
        assert repr(calls(module)) == want
    assert len(notes.records) > 20


def test_a_value_has_the_line_that_made_it_and_what_it_is_made_of():
    code = rewritten("def f(a, b):\n    c = a + b\n    c[0] = 7\n    return c * 2\n")
    module, notes = code.module("own"), Notes(code)
    with listening(module, notes):
        notes.listening = True
        module.f(np.ones(3), np.arange(3.0))
    last = notes.records[-1]
    assert [notes.nodes[one.node].line for one in notes.records] == [2, 2, 2, 3, 4]
    assert last.value.tolist() == [14, 4, 6]
    assert [notes.nodes[one.node].text for one in last.parents] == ["c[0] = 7"]


@pytest.mark.parametrize("source", ["def f(:", "x = 1\n" * 50_000])
def test_what_cannot_be_rewritten_says_so(source):
    assert rewritten(source).broken


def test_source_that_breaks_when_rewritten_runs_as_it_is():
    own = "sys._getframe().f_code.co_names"
    names = "('sys', '_getframe', 'f_code', 'co_names')"
    source = f"import sys\ndef g(): return {own}\nassert g() == {names}\nx = 3\n"
    code = rewritten(source)
    assert code.module("own").x == 3
    assert "AssertionError" in code.broken


def test_notes_are_bounded():
    code = rewritten(
        "def f(n):\n    x = 0.5\n    for i in range(n):\n        x = x * 1.0001\n    return x\n"
    )
    module, notes = code.module("own"), Notes(code)
    with listening(module, notes):
        notes.listening = True
        module.f(40_000)
    assert notes.full
    assert len(notes.records) <= 30_000


def test_a_value_is_exchanged_while_code_runs():
    code = rewritten("def f(a, b):\n    return a - b\n")
    module, notes = code.module("own"), Notes(code)
    with listening(module, notes):
        (minus,) = (n for n, node in enumerate(notes.nodes) if node.kind == "BinOp")
        notes.instead = {minus: lambda a, b: a + b}
        assert module.f(2, 1) == 3
    assert module.f(2, 1) == 1

"""Right attentions as people write them, in which a mistake takes the place of one expression.

`«target: expression»` marks what a mistake may replace; see `written.py`. A program with the line
of a mistake is its example. Must not know any single mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRELUDE = '''import numpy as np


def T(x):
    return x.swapaxes(-1, -2)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def length(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


def apart(q, k):
    return np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1)


def by_sum(e, axis=-1):
    return e / e.sum(axis, keepdims=True)


'''
PLACE = re.compile(r"«(\w+): (.*?)»")


@dataclass(frozen=True)
class Program:
    """A right attention, how an adapter calls it, and what its author states."""

    text: str
    call: str  # the body of an adapter
    stated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def targets(self) -> frozenset[str]:
        """What a mistake may replace."""
        return frozenset(target for target, _ in PLACE.findall(self.text))

    def source(self, replaced: Mapping[str, str] | None = None) -> str:
        """The code, with other expressions for some targets."""
        own = replaced or {}
        return PRELUDE + PLACE.sub(lambda one: own.get(one[1], one[2]), self.text)

    def lines(self, replaced: Mapping[str, str]) -> tuple[int, ...]:
        """The lines of the code that have one of these targets."""
        texts = (PRELUDE + self.text).splitlines()
        return tuple(
            number
            for number, text in enumerate(texts, 1)
            if any(target in replaced for target, _ in PLACE.findall(text))
        )


PROGRAMS: Mapping[str, Program] = {
    "one head": Program(
        '''def attention(q, k, v):
    B, H, L, D = q.shape
    S, E = v.shape[-2:]
    scores = «scores: q @ T(k)»
    logits = «scaled: scores / np.sqrt(D)»
    weights = «weights: softmax(logits)»
    return «output: weights @ v»
''',
        "return f(t.query, t.key, t.value)",
    ),
    "scale": Program(
        '''def attention(q, k, v, scale):
    B, H, L, D = q.shape
    scores = q @ T(k)
    logits = «rescaled: scores * scale»
    return softmax(logits) @ v
''',
        "return f(t.query, t.key, t.value, t.scale)",
    ),
    "mask": Program(
        '''def attention(q, k, v, mask):
    B, H, L, D = q.shape
    S = k.shape[-2]
    keep = «mask: mask»
    raw = q @ T(k) / np.sqrt(D)
    logits = «masked: np.where(keep, raw, -np.inf)»
    weights = «after: softmax(logits)»
    return weights @ v
''',
        "return f(t.query, t.key, t.value, t.mask)",
    ),
    "causal": Program(
        '''def attention(q, k, v):
    (L, D), S = q.shape[-2:], k.shape[-2]
    past = S - L
    row, j = np.arange(L)[:, None], np.arange(S)
    i = row + past
    keep = «causal: j <= i»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
''',
        "return f(t.query, t.key, t.value)",
        {"causal": "end"},
    ),
    "causal from the start": Program(
        '''def attention(q, k, v):
    (L, D), S = q.shape[-2:], k.shape[-2]
    row, j = np.arange(L)[:, None], np.arange(S)
    keep = «causal: j <= row»
    logits = np.where(keep, q @ T(k) / np.sqrt(D), -np.inf)
    return softmax(logits) @ v
''',
        "return f(t.query, t.key, t.value)",
        {"causal": "start"},
    ),
}


def program_of(targets: frozenset[str]) -> str:
    """The first program that has all of these targets; "" if none has."""
    return next((name for name, one in PROGRAMS.items() if targets <= one.targets), "")

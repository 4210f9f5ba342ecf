"""A right attention as people write it, in which a mistake takes the place of one expression.

`«target: expression»` marks what a mistake may replace; see `written.py`. A program with the line
of a mistake is its example. Must not know any single program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What some of them call; a source has those that it needs.
HELPERS = """def T(x):
    return x.swapaxes(-1, -2)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def exps(x):
    return np.exp(x - x.max(-1, keepdims=True))


def by_sum(e, axis=-1):
    return e / e.sum(axis, keepdims=True)


def attend(q, k, v, causal=False):
    logits = q @ T(k) / np.sqrt(q.shape[-1])
    if causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    return softmax(logits) @ v


def lengths_of(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


def apart(q, k):
    return np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1)


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def flat(heads):
    return heads.swapaxes(1, 2).reshape(len(heads), heads.shape[2], -1)


def of_all_texts(x):
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def of_all_heads(x):
    return x.reshape(len(x), 1, -1, x.shape[3])


def cuts(length, n):
    return [slice(start, start + n) for start in range(0, length, n)]


def of_blocks(cells, n):
    sums = np.add.reduceat(cells, np.arange(0, cells.shape[-1], n), axis=-1)
    return np.repeat(sums, n, axis=-1)[..., : cells.shape[-1]]
"""
_HELPERS = {text.partition("(")[0].removeprefix("def "): text for text in HELPERS.split("\n\n\n")}
PLACE = re.compile(r"«([\w|]+): (.*?)»")


@dataclass(frozen=True)
class Program:
    """A right attention, how an adapter calls it, and what its author states.

    Where the steps in `makes` are the results of a `helper` that works through blocks, a mistake is
    in the helper, and what it makes of blocks of some size takes their place.
    """

    text: str
    call: str  # the body of an adapter
    stated: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    means: Mapping[str, Any] = field(default_factory=dict)  # what is found by trying
    helper: str = ""
    makes: tuple[str, ...] = ()

    @property
    def targets(self) -> frozenset[str]:
        """What a mistake may replace."""
        found = (target for targets, _ in PLACE.findall(self.text) for target in targets.split("|"))
        return frozenset(found)

    def source(self, replaced: Mapping[str, str] | None = None) -> str:
        """The code, with other expressions for some targets."""
        return self._marked(replaced or {}).replace(_MARK, "")

    def lines(self, replaced: Mapping[str, str]) -> tuple[int, ...]:
        """The lines of the code that have one of these targets."""
        texts = self._marked(replaced).splitlines()
        return tuple(number for number, text in enumerate(texts, 1) if _MARK in text)

    def _marked(self, replaced: Mapping[str, str]) -> str:
        def put(place: re.Match[str]) -> str:
            own = next((replaced[one] for one in place[1].split("|") if one in replaced), None)
            return place[2] if own is None else _MARK + own

        text = PLACE.sub(put, self.text)
        needed: dict[str, str] = {}
        waiting = [text]
        while waiting:
            words = set(re.findall(r"\w+", waiting.pop()))
            new = {name: own for name, own in _HELPERS.items() if name in words - needed.keys()}
            needed |= new
            waiting += new.values()
        own = [one.strip() for name, one in _HELPERS.items() if name in needed]
        return "\n\n\n".join(["import numpy as np", *own, text])


_MARK = "\0"

# How an adapter calls one, and what its author states.
HEADS = "return f(t.query, t.key, t.value)"
PLAIN: Mapping[str, Any] = {"causal": False}
CAUSAL: Mapping[str, Any] = {"causal": "end"}

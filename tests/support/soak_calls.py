"""Calls of every kind for a soak, each known by a kind and a seed, and the bytes that it answers.

The same call must always answer the same bytes on one CPU target. What is right is checked
elsewhere. Must not know threads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from attack_calls import DTYPES, build, draw
from regard.positions import Alibi, Rotary

Answers = Iterator[Any]  # arrays and texts
Dice = np.random.Generator

# A diagnosis takes as long as fifty of the others.
SHARES = {"attention": 7, "gradients": 2, "cache": 2, "long": 2, "diagnose": 0}

OPTIONS: dict[str, Callable[[Dice, tuple[int, ...]], Any]] = {
    "causal": lambda dice, cells: True,
    "window": lambda dice, cells: (int(dice.integers(40)), 0),
    "scale": lambda dice, cells: float(dice.choice([-0.7, 0.3, 2.0])),
    "softcap": lambda dice, cells: float(dice.choice([0.5, 30.0])),
    "sink": lambda dice, cells: dice.normal(size=cells[0]).astype(np.float32),
    "bias": lambda dice, cells: dice.normal(size=cells).astype(np.float32),
    "mask": lambda dice, cells: dice.random(cells) < 0.7,
}


def answer(kind: str, seed: int, folder: Path) -> str:
    """Make a call, and fold all bytes that it answers into one short text."""
    digest = hashlib.sha256()
    for one in KINDS[kind](np.random.default_rng([seed, len(kind)]), seed, folder):
        if isinstance(one, str):
            digest.update(one.encode())
        else:
            array = np.ascontiguousarray(one)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:24]


def jobs(count: int, seed: int, kinds: list[str]) -> list[tuple[str, int]]:
    """That many calls, most of them of attention; the first are one of each kind."""
    dice = random.Random(seed)
    usual = [kind for kind in kinds for _ in range(SHARES.get(kind, 1))]
    drawn = (dice.choice(usual) for _ in range(max(0, count - len(kinds))))
    return [(kind, dice.randrange(10**6)) for kind in (*kinds, *drawn)]


def _kernel(seed: int) -> str | None:
    return "reference" if seed % 5 == 0 else None


def _numbers(dice: Dice, dtype: str, *shape: int) -> np.ndarray:
    return np.clip(dice.normal(size=shape), -5, 5).astype(dtype)


def _attention(dice: Dice, seed: int, folder: Path) -> Answers:
    """One of `nox -s fuzz`: any sizes, layouts, types and options."""
    arrays, options, _ = build(draw(seed))
    options.pop("out", None)
    found = regard.attention(*arrays, kernel=_kernel(seed), **options)
    yield from found if isinstance(found, tuple) else (found,)


def _chosen(dice: Dice, heads: int, rows: int, keys: int) -> dict[str, Any]:
    chosen = [name for name in OPTIONS if dice.random() < 0.3]
    options = {name: OPTIONS[name](dice, (heads, rows, keys)) for name in chosen}
    return options | ({"offset": "end"} if {"causal", "window"} & options.keys() else {})


def _long(dice: Dice, seed: int, folder: Path) -> Answers:
    """Enough rows for every worker of the kernel, and for an interrupt in the middle."""
    rows, width = int(dice.integers(200, 700)), int(dice.choice([16, 40, 64]))
    dtype = str(dice.choice(DTYPES))
    query, key, value = (_numbers(dice, dtype, heads, rows, width) for heads in (4, 2, 2))
    threads = [None, 1, 2, 5][seed % 4]
    yield regard.attention(query, key, value, threads=threads, **_chosen(dice, 4, rows, rows))


def _gradients(dice: Dice, seed: int, folder: Path) -> Answers:
    rows, keys = (int(n) for n in dice.integers(1, 90, size=2))
    width, wide = (int(n) for n in dice.integers(1, 40, size=2))
    dtype = str(dice.choice(DTYPES))
    shapes = ((4, rows, width), (2, keys, width), (2, keys, wide), (4, rows, wide))
    query, key, value, grad = (_numbers(dice, dtype, *shape) for shape in shapes)
    options = _chosen(dice, 4, rows, keys)
    wrt = ["query", "key", "value", "scale", *({"bias", "sink"} & options.keys())]
    kernel = _kernel(seed)
    yield from regard.gradients(
        query, key, value, grad, wrt=tuple(sorted(wrt)), kernel=kernel, **options
    )


def _cache(dice: Dice, seed: int, folder: Path) -> Answers:
    """A cache filled in steps, kept in a file on the way, copied and cut back."""
    dtype = str(dice.choice(DTYPES))
    positions = [None, Rotary(), Alibi()][seed % 3]
    window = [None, (40, 0), (300, None)][seed // 3 % 3]
    narrow = "int8" if seed % 4 == 0 and dtype == "float32" else None
    cache = regard.KVCache(window=window, positions=positions, dtype=narrow)
    for step, size in enumerate(dice.choice([1, 1, 2, 17, 130], size=5)):
        cache.append(*(_numbers(dice, dtype, 1, 2, int(size), 32) for _ in range(2)))
        query = _numbers(dice, dtype, 1, 4, int(size), 32)
        yield from cache.attend(query, return_lse=True)
        if step == 2:
            path = folder / f"{_unique()}.npz"
            cache.save(path)
            cache = regard.KVCache.load(path)
            path.unlink()
    yield str(cache)


def _unique() -> int:
    return random.SystemRandom().getrandbits(64)


def _merge(dice: Dice, seed: int, folder: Path) -> Answers:
    shape = (int(dice.integers(1, 5)), 3, int(dice.integers(1, 20)))
    outputs = _numbers(dice, str(dice.choice(["float32", "float64"])), *shape, 9)
    yield from regard.merge(outputs, (5 * dice.normal(size=shape)).astype(outputs.dtype))


def _explain(dice: Dice, seed: int, folder: Path) -> Answers:
    """Every step of a small call: as text, and as a page."""
    rows, keys = (int(n) for n in dice.integers(1, 6, size=2))
    arrays = [_numbers(dice, "float64", n, 3) for n in (rows, keys, keys)]
    found = regard.explain(*arrays, causal=seed % 2 == 0, offset="end" if seed % 2 == 0 else None)
    yield str(found)
    yield found.to_html() if seed % 3 == 0 else found["weights"].value


def _diagnose(dice: Dice, seed: int, folder: Path) -> Answers:
    factor = float(dice.choice([1.0, 0.5]))

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        scores = factor * q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)

    yield str(regard.diagnose(attend))


def _problem(dice: Dice, seed: int, folder: Path) -> Answers:
    """A problem written and read again."""
    arrays = [_numbers(dice, "float64", 3, 2) for _ in range(3)]
    names = ("queries", "keys", "values")
    problem = regard.Problem(**dict(zip(names, arrays, strict=True)))
    path = folder / f"{_unique()}{['.toml', '.json', '.npz'][seed % 3]}"
    regard.save_problem(problem, path)
    again = regard.load_problem(path)
    path.unlink()
    yield str(again)
    yield regard.explain(again).output


def _too_much(dice: Dice, seed: int, folder: Path) -> Answers:
    """Far more memory than any machine has is refused, and nothing of it is kept."""
    query = np.broadcast_to(_numbers(dice, "float32", 1, 1), (2**38, 1))
    key, value = _numbers(dice, "float32", 4, 1), _numbers(dice, "float32", 4, 64)
    with pytest.raises(MemoryError):
        regard.attention(query, key, value, threads=2)
    yield regard.attention(query[:3], key, value)


KINDS: dict[str, Callable[[Dice, int, Path], Answers]] = {
    "attention": _attention,
    "long": _long,
    "gradients": _gradients,
    "cache": _cache,
    "merge": _merge,
    "explain": _explain,
    "diagnose": _diagnose,
    "problem": _problem,
    "too_much": _too_much,
}

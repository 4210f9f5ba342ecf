"""Random calls of the rest: gradients, caches step by step, merges of parts, products with weights.

As in `attack_calls`, a call is a plain dictionary. Owns what each kind draws and when it is right.
Must not know how any kernel works.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import regard
from attack_calls import DTYPES, Call
from calls import PATHS, on_path
from gradient_check import check_gradients
from products import KINDS as WEIGHTS
from products import bound, exact, kept
from regard.compute.stored import product
from regard.positions import Alibi, Rotary

LONG = np.longdouble
TARGETS = [path for path in PATHS if path.startswith("fused")]
SIZES = [0, 1, 1, 2, 3, 5, 8, 9, 17, 33]


def draw_more(seed: int) -> Call:
    """One call of another kind than plain attention."""
    r = random.Random(seed)
    kind = r.choice(sorted(KINDS))
    call = {"kind": kind, "seed": seed, "dtype": r.choice(DTYPES), "path": r.choice(TARGETS)}
    return call | KINDS[kind][0](r)


def check_more(call: Call) -> None:
    """Make the call; every number must be what it has to be."""
    KINDS[call["kind"]][1](call, np.random.default_rng(call["seed"]))


def _numbers(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return np.clip(rng.normal(size=shape), -5, 5).astype(dtype)


# --- gradients -----------------------------------------------------------------------------------


def _draw_gradients(r: random.Random) -> Call:
    sizes = {name: r.choice(SIZES) for name in ("queries", "keys", "width", "wide")}
    if r.random() < 0.05:
        sizes["keys"] = r.choice([65, 130, 200])
    groups = r.choice([1, 1, 2])
    names = ["causal", "window", "scale", "softcap", "bias", "sink", "mask", "grad_lse"]
    return {
        "path": r.choice(PATHS),
        "lead": [r.choice([1, 2])] * r.choice([0, 0, 1]),
        "groups": groups,
        "heads": groups * r.choice([1, 2, 3]),
        "sizes": sizes,
        "options": [name for name in names if r.random() < 0.25],
        "precision": r.choice(["working", "working", "exact"]),
    }


def _check_gradients(call: Call, rng: np.random.Generator) -> None:
    lead, heads, groups = tuple(call["lead"]), call["heads"], call["groups"]
    rows, keys, width, wide = (call["sizes"][x] for x in ("queries", "keys", "width", "wide"))
    shapes = (
        (heads, rows, width),
        (groups, keys, width),
        (groups, keys, wide),
        (heads, rows, wide),
    )
    arrays = tuple(_numbers(rng, call["dtype"], *lead, *one) for one in shapes)
    drawn: dict[str, Callable[[], Any]] = {
        "causal": lambda: True,
        "window": lambda: (int(rng.integers(4)), int(rng.integers(3))),
        "scale": lambda: float(rng.choice([-0.7, 0.3, 2.0])),
        "softcap": lambda: float(rng.choice([0.5, 3.0, 50.0])),
        "bias": lambda: _numbers(rng, "float32", heads, rows, keys),
        "sink": lambda: _numbers(rng, "float32", heads),
        "mask": lambda: rng.random((heads, rows, keys)) < 0.7,
        "grad_lse": lambda: _numbers(rng, "float32", *lead, heads, rows),
    }
    options = {name: drawn[name]() for name in call["options"]}
    if {"causal", "window"} & options.keys():
        options["offset"] = int(rng.integers(-2, keys + 2))
    if call["precision"] == "exact":
        options["precision"] = "exact" if call["dtype"] != "float64" else "high"
    wrt = ("query", "key", "value", "scale", *(x for x in ("bias", "sink") if x in options))
    check_gradients(arrays, call["path"], wrt, **options)


# --- caches --------------------------------------------------------------------------------------


def _draw_cache(r: random.Random) -> Call:
    groups = r.choice([1, 2])
    return {
        "batch": r.choice([1, 2]),
        "groups": groups,
        "heads": groups * r.choice([1, 2]),
        "width": r.choice([1, 2, 8, 17, 64]),
        "wide": r.choice([1, 5, 8, 33]),
        "steps": [r.choice([0, 1, 1, 1, 2, 5, 17, 60, 130]) for _ in range(r.randint(1, 9))],
        "window": r.choice([None, None, [0, 0], [3, 0], [40, 2], [255, 0], [300, None]]),
        "positions": r.choice([None, None, "rotary", "alibi"]),
        "options": [name for name in ("scale", "softcap", "sink") if r.random() < 0.3],
    }


def _check_cache(call: Call, rng: np.random.Generator) -> None:
    """Step by step a cache gives the bytes of one call over everything."""
    total, batch, heads = sum(call["steps"]), call["batch"], call["heads"]
    query = _numbers(rng, call["dtype"], batch, heads, total, call["width"])
    key = _numbers(rng, call["dtype"], batch, call["groups"], total, call["width"])
    value = _numbers(rng, call["dtype"], batch, call["groups"], total, call["wide"])
    given = {"scale": 0.3, "softcap": 2.0, "sink": _numbers(rng, "float32", heads)}
    options = {name: given[name] for name in call["options"]}
    window = None if call["window"] is None else tuple(call["window"])
    kinds = {"rotary": Rotary(), "alibi": Alibi(), None: None}
    positions = kinds[call["positions"]] if call["width"] % 2 == 0 else None
    with on_path(call["path"]):
        more = {} if positions is None else {"positions": positions}
        whole = regard.attention(
            query, key, value, causal=True, window=window, return_lse=True, **more, **options
        )
        cache = regard.KVCache(window=window, **more)
        end = 0
        for size in call["steps"]:
            begin, end = end, end + size
            cache.append(key[:, :, begin:end], value[:, :, begin:end])
            step = cache.attend(query[:, :, begin:end], return_lse=True, **options)
            for name in ("output", "lse"):
                one, other = getattr(step, name), getattr(whole, name)[:, :, begin:end]
                same = np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
                assert same, f"{name} of tokens {begin} to {end} differs from that of one call"
    assert len(cache) == total


# --- merges --------------------------------------------------------------------------------------


def _draw_merge(r: random.Random) -> Call:
    return {
        "shape": [r.choice([0, 1, 2, 3]) for _ in range(r.choice([1, 2, 3]))],
        "wide": r.choice([0, 1, 3, 16]),
        "parts": r.choice([1, 2, 3, 7, 40]),
        "spread": r.choice([0.0, 1.0, 30.0, 1000.0]),
        "empty": r.choice([0.0, 0.2, 0.9]),
    }


def _check_merge(call: Call, rng: np.random.Generator) -> None:
    """A merge is the softmax of the parts' lse over their outputs, in long doubles."""
    kind = "float64" if call["dtype"] == "float64" else "float32"
    shape, parts = call["shape"], call["parts"]
    outputs = _numbers(rng, call["dtype"], parts, *shape, call["wide"])
    lses = (call["spread"] * rng.normal(size=(parts, *shape))).astype(kind)
    nothing = rng.random(lses.shape) < call["empty"]
    lses[nothing], outputs[nothing] = -np.inf, 0
    result = regard.merge(outputs, lses)
    top = np.where(nothing.all(0), 0, lses.max(0, initial=-np.inf)).astype(LONG)
    shares = np.exp(lses.astype(LONG) - top)
    total = shares.sum(0)
    shares = (shares / np.where(total == 0, 1, total))[..., np.newaxis]
    numbers = outputs.astype(np.float64).astype(LONG)
    unit = float(np.finfo(kind).eps)
    own = unit if call["dtype"] in ("float32", "float64") else 2.0**-8
    exact, sizes = (shares * numbers).sum(0), (shares * np.abs(numbers)).sum(0)
    off = np.abs(result.output.astype(np.float64).astype(LONG) - exact)
    # A share is off by u·|lse − top| of itself, which is at most u/e of all.
    limit = (2 * parts + 16) * unit * sizes + own * np.abs(exact) + 1e-7 * (own > unit)
    assert (off <= limit).all(), f"output: {float((off / np.maximum(limit, 1e-300)).max())} bounds"
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    empty = nothing.all(0)
    assert (result.lse[empty] == -np.inf).all(), "lse of a row without keys"
    off = np.abs(result.lse[~empty].astype(LONG) - lse[~empty])
    limit = unit * (np.abs(lse[~empty]) + 2 * parts + 16)
    assert (off <= limit).all(), f"lse: {float((off / limit).max(initial=0))} bounds"


# --- products with weights -----------------------------------------------------------------------


def _draw_product(r: random.Random) -> Call:
    return {
        "weights": r.choice(WEIGHTS),
        "rows": r.choice([0, 1, 1, 2, 3, 4, 5, 8, 9, 65]),
        "columns": r.choice([1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 257, 576]),
        "parts": [r.choice([0, 1, 2, 5, 33, 500]) for _ in range(r.randint(1, 3))],
        "alone": r.randint(0, 64),
        "power": r.choice([0, 0, -20, 20]),
    }


def _check_product(call: Call, rng: np.random.Generator) -> None:
    """Each number is its sum, and a row alone has the same bytes."""
    x = _numbers(rng, "float32", call["rows"], call["columns"]) * np.float32(2.0 ** call["power"])
    parts = [
        kept(_numbers(rng, "float32", rows, call["columns"]), call["weights"])
        for rows in call["parts"]
    ]
    multiply = product([one.T for one in parts], np.dtype(np.float32))
    with on_path(call["path"]):
        found = multiply(x)
        one = slice(call["alone"], call["alone"] + 1)
        alone = multiply(x[one])
    few = call["rows"] <= (8 if call["weights"] == "float32" else 64)
    whole = np.concatenate([exact(one) for one in parts])
    off = np.abs(found - x.astype(np.float64) @ whole.T)
    if few:
        limits = [bound(x, one, call["path"].partition(":")[2]) for one in parts]
        limit = np.concatenate(limits, axis=1)
        assert alone.tobytes() == np.ascontiguousarray(found[one]).tobytes(), "a row alone differs"
    else:
        sizes = np.abs(x.astype(np.float64)) @ np.abs(whole).T
        limit = (2 * call["columns"] + 1) * 2.0**-24 * sizes + 2.0**-140
    assert (off <= limit).all(), f"product: {float((off / limit).max())} bounds"


KINDS: dict[str, tuple[Callable[[random.Random], Call], Callable[..., None]]] = {
    "gradients": (_draw_gradients, _check_gradients),
    "cache": (_draw_cache, _check_cache),
    "merge": (_draw_merge, _check_merge),
    "product": (_draw_product, _check_product),
}

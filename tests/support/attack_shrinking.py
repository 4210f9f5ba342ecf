"""Makes a failing call smaller, and writes it as a short program.

Must not know what is right: `attack_calls.check` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attack_calls import Call, build, check, draw, positional
from attack_kinds import check_more, draw_more

SIMPLEST = {
    "nan": None,
    "poison": None,
    "form": "rows",
    "dtypes": ["float32"] * 3,
    "layouts": ["plain"] * 3,
    "shared": [False] * 3,
    "powers": [0, 0, 0],
    "batch": [],
    "groups": 1,
    "repeats": 1,
}


def any_call(seed: int) -> Call:
    """Every third call is one of gradients, of a cache or of a merge."""
    return draw_more(seed) if seed % 3 == 2 else draw(seed)


def failure(call: Call) -> str:
    """What is wrong with the answer to the call; empty if nothing."""
    try:
        with np.errstate(all="ignore"):
            (check_more if "kind" in call else check)(call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def smaller(call: Call, failing: Callable[[Call], Any] = failure) -> Call:
    """The smallest call that still fails, one change after the other."""
    changed = True
    while changed:
        changed = False
        for one in _simpler(call):
            if failing(one):
                call, changed = one, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    if "kind" in call:
        yield from _simpler_numbers(call)
        return
    options = call["options"]
    for name in options:
        rest = {key: one for key, one in options.items() if key != name}
        less = {**call, "options": rest}
        if positional(less) and "offset" not in rest:
            rest["offset"] = 0
        if not positional(less):
            rest.pop("offset", None)
        if rest != options:
            yield less
    for part in options.get("mask", [])[1:]:
        if isinstance(part, list):
            yield {**call, "options": {**options, "mask": part}}
    for name, plain in SIMPLEST.items():
        if call[name] == plain:
            continue
        if name == "dtypes" and any(call["powers"]):
            continue  # another type may not hold such numbers
        less = {**call, name: plain}
        if name == "form" and (call["batch"] or call["groups"] * call["repeats"] != 1):
            continue
        yield less
        if isinstance(call[name], list) and len(call[name]) == 3 and name != "batch":
            for n in range(3):
                if call[name][n] != plain[n]:
                    yield {**call, name: [*call[name][:n], plain[n], *call[name][n + 1 :]]}
    for letter in "LSDE":
        for size in sorted({0, 1, 2, call[letter] // 2, call[letter] - 1}):
            if 0 <= size < call[letter] and (call["form"] != "vector" or letter != "L"):
                yield {**call, letter: size}


def _simpler_numbers(call: Call) -> Iterator[Call]:
    """With one entry left out of a list, or one size smaller."""
    for name, value in call.items():
        if isinstance(value, dict):
            yield from ({**call, name: less} for less in _simpler_numbers(value))
        elif isinstance(value, list) and name not in ("window", "shape"):
            yield from ({**call, name: value[:n] + value[n + 1 :]} for n in range(len(value)))
        elif type(value) is int and value > 1 and name not in ("seed", "heads", "groups"):
            yield from ({**call, name: size} for size in (1, value // 2, value - 1) if size < value)


def program(call: Call) -> str:
    """The call with its numbers, as a program that needs only regard and NumPy."""
    if "kind" in call:  # in a clone, with tests/support on the path
        return f"from attack_kinds import check_more\ncheck_more({call!r})"
    arrays, options, _ = build(call)
    lines = ["import ml_dtypes"] if "bfloat16" in call["dtypes"] else []
    lines += ["import numpy as np", "import regard"]
    lines += ["from regard.masks import Boolean, Causal, Lengths, Segments, Window"]
    lines += ["from numpy import array, inf, nan"]
    for name, one in zip(("query", "key", "value"), arrays, strict=True):
        numbers = json.dumps(one.astype(np.float64).tolist())
        numbers = numbers.replace("NaN", "nan").replace("Infinity", "inf")
        kind = one.dtype.newbyteorder("=").name
        lines.append(f"{name} = np.reshape({numbers}, {one.shape}).astype({kind!r})")
    options.pop("out", None)
    kernel, _, target = call["path"].partition(":")
    with np.printoptions(threshold=10**6, linewidth=10**6, floatmode="unique"):
        said = "".join(f", {name}={value!r}" for name, value in options.items())
    said = said.replace("dtype=", "dtype=np.")
    lines.append(f"print(regard.attention(query, key, value, kernel={kernel!r}{said}))")
    layouts = [one for one in call["layouts"] if one != "plain"]
    if target or layouts:
        lines.append(f"# CPU target {target or 'any'}, layouts {call['layouts']}")
    return "\n".join(lines)

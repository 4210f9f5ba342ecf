"""Which promises of docs/performance.md hold in a saved run; exit code 1 if one does not.

python benchmarks/promises.py results.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Case = dict[str, Any]


class Promise(NamedTuple):
    """`holds` is None where the run says nothing about it."""

    words: str
    holds: bool | None
    found: str


def main() -> int:
    report = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    kept = list(promises(report))
    for one in kept:
        mark = {True: "holds ", False: "BROKEN", None: "–     "}[one.holds]
        print(f"{mark} {one.words}: {one.found}")
    return int(any(one.holds is False for one in kept))


def promises(report: dict[str, Any]) -> Iterator[Promise]:
    cases = report["cases"]

    def chosen(*groups: str, **sizes: Any) -> list[Case]:
        return [
            case
            for case in cases
            if case["group"] in groups and all(case[name] == size for name, size in sizes.items())
        ]

    def long(found: list[Case]) -> list[Case]:
        return [case for case in found if case["L"] >= 1024]

    float32 = [
        case for case in cases if case["dtype"] == "float32" and case["direction"] == "forward"
    ]
    yield least(
        "every float32 shape 1.25 × the best peer, or 78 % of the peak",
        float32,
        lambda case: case["ratio"] and max(case["ratio"] / 1.25, (case["share"] or 0) / 0.78),
        1,
    )
    yield least("nowhere slower than a peer", cases, lambda case: case["ratio"], 1)
    mean = report["summary"]["mean_ratio"]
    yield Promise(
        "geometric mean 1.5 × the best peer",
        None if mean is None else mean >= 1.5,
        "nothing" if mean is None else f"{mean:.2f}",
    )
    causal = long(chosen("causal"))
    yield least("causal 2 × from L = 1024", causal, lambda case: case["ratio"], 2)
    common = [case for case in chosen("masks") if case["mask"] != "blocks"]
    yield most("masks cost at most 15 %", common, lambda case: case["cost"], 1.15)
    blocks = chosen("masks", mask="blocks")
    yield most("half hidden in blocks saves 40 %", blocks, lambda case: case["cost"], 0.6)
    yield from of_the_spread(chosen)
    for width, bar in ((64, 0.78), (128, 0.82)):
        full = long(chosen("full", "long", D=width))
        yield least(f"{bar:.0%} of the peak, D = {width}", full, lambda case: case["share"], bar)
    yield least("72 % of the peak, causal", causal, lambda case: case["share"], 0.72)
    decode = [case for case in chosen("decode") if case["S"] >= 4096]
    read = report["limits"]["read"] / 1e9 if report["limits"] else float("inf")
    words = "85 % of the bandwidth of memory"
    yield least(words, decode, lambda case: (case["sides"]["regard"]["speed"] or 0) / read, 0.85)
    for length, bar in ((3, 1.0), (16, 3.0)):
        small = chosen("small", L=length)
        words = f"{length} × {length} in {bar:g} µs"
        yield most(words, small, lambda case: case["sides"]["regard"]["speed"], bar)
    yield from against_float32(cases)
    wide = chosen("types", dtype="float64")
    yield least("float64 1.5 × torch", wide, lambda case: over(case, "torch"), 1.5)
    yield from of_gradients(chosen("backward"))


def of_the_spread(chosen: Callable[..., list[Case]]) -> Iterator[Promise]:
    """The time depends neither on the numbers nor on one key more: each beside its plain call."""
    tails = chosen("tails")
    bars = (
        ("larger queries cost at most 15 %, forward", chosen("spread", direction="forward"), 1.15),
        (
            "larger queries cost at most 15 %, backward",
            chosen("spread", direction="backward"),
            1.15,
        ),
        ("ALiBi costs at most 15 % of causal", chosen("positions", mask="alibi"), 1.15),
        ("33 keys cost at most 25 % per score", [one for one in tails if one["S"] == 33], 1.25),
        ("more odd keys at most 10 %", [one for one in tails if one["S"] > 33], 1.1),
        ("one huge key takes 6 × the time", chosen("range"), 6),
    )
    for words, cases, bar in bars:
        yield most(words, cases, lambda case: case["cost"], bar)


def of_gradients(cases: list[Case]) -> Iterator[Promise]:
    """The backward pass: each bar against torch's, and one against the peak."""
    plain = [
        case
        for case in cases
        if case["dtype"] == "float32" and not case["mask"] and case["G"] == case["H"]
    ]
    full = [case for case in plain if not case["causal"]]
    bars = (
        ("D = 64", [one for one in full if one["D"] == 64 and one["L"] >= 512], 2.4),
        ("D = 128", [one for one in full if one["D"] == 128], 2.2),
        ("causal", [one for one in plain if one["causal"]], 3),
        ("128 and 257 keys", [one for one in full if one["L"] < 512], 2),
        ("float64", [one for one in cases if one["dtype"] == "float64"], 2),
        ("bfloat16", [one for one in cases if one["dtype"] == "bfloat16"], 1),
        ("bias with a gradient", [one for one in cases if one["mask"] == "bias"], 4),
    )
    for words, some, bar in bars:
        yield least(
            f"backward, {words} {bar:g} × torch", some, lambda case: over(case, "torch"), bar
        )
    long = [case for case in full if case["L"] >= 1024]
    yield least("backward, 75 % of the peak from L = 1024", long, lambda case: case["share"], 0.75)


def against_float32(cases: list[Case]) -> Iterator[Promise]:
    """Half types are no slower than float32 in the same run; 2 % is what two runs differ by."""
    places = ("B", "H", "L", "S", "D", "G", "E", "causal", "mask", "direction")
    places += ("queries", "huge_key")
    plain = {
        tuple(case[name] for name in places): case["sides"]["regard"]["seconds"]
        for case in cases
        if case["dtype"] == "float32"
    }
    for kind in ("float16", "bfloat16"):
        half = [case for case in cases if case["dtype"] == kind and case["direction"] == "forward"]

        def relative(case: Case) -> float | None:
            other = plain.get(tuple(case[name] for name in places))
            mine = case["sides"]["regard"]["seconds"]
            return mine / other if mine and other else None

        yield most(f"{kind} no slower than float32", half, relative, 1.02)


def over(case: Case, peer: str) -> float | None:
    """How many times as fast as one peer."""
    other = case["sides"].get(peer, {}).get("seconds")
    return other / case["sides"]["regard"]["seconds"] if other else None


def least(words: str, cases: list[Case], figure: Any, bar: float) -> Promise:
    return extreme(words, cases, figure, lambda value: value >= bar, min)


def most(words: str, cases: list[Case], figure: Any, bar: float) -> Promise:
    return extreme(words, cases, figure, lambda value: value <= bar, max)


def extreme(words: str, cases: list[Case], figure: Any, fine: Any, worst: Any) -> Promise:
    values = {case["name"]: figure(case) for case in cases}
    values = {name: value for name, value in values.items() if value}
    if not values:
        return Promise(words, None, "nothing was measured")
    name = worst(values, key=lambda one: values[one])
    broken = sum(not fine(value) for value in values.values())
    text = f"{values[name]:.2f} at worst, {name}"
    if broken:
        text += f"; {broken} of {len(values)} cases miss it"
    return Promise(words, not broken, text)


if __name__ == "__main__":
    sys.exit(main())

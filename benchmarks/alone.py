"""Each library alone in a process of its own, beside the times that a common run gives.

Idle threads of one library can slow down the next; where the two columns differ, that is why.

    python benchmarks/alone.py [peer ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from regard.bench.cases import case, make_inputs
from regard.bench.command import checked_threads, process_for
from regard.bench.libraries import PEERS, REGARD, Work, prepared
from regard.bench.timing import Budget, time_in_rotation

CASES = (
    case("small", 1, 1, 3, 3, 4, unit="µs"),
    case("full", 1, 8, 128, 128, 64),
    case("full", 1, 8, 1024, 1024, 64),
    case("causal", 1, 8, 1024, 1024, 64, causal=True),
    case("decode", 1, 32, 1, 4096, 128, G=8, unit="GB/s"),
)
LIBRARIES = {library.name: library for library in (REGARD, *PEERS)}


def main() -> None:
    if sys.argv[1:2] == ["--in-this-process"]:
        target, *names = sys.argv[2:]
        Path(target).write_text(json.dumps(measured(names)), "utf-8")
        return
    names = [
        "regard",
        *(sys.argv[1:] or [library.name for library in PEERS if not library.missing()]),
    ]
    together = in_a_process(names)
    alone = {name: in_a_process([name])[name] for name in names}
    print("µs per call: in rotation with the others / alone (their ratio)")
    for one in CASES:
        print(one.name)
        for name in names:
            pair = together[name].get(one.name), alone[name].get(one.name)
            if None not in pair:
                common, own = (seconds * 1e6 for seconds in pair)
                print(f"  {name:<12}{common:>12.1f} / {own:<12.1f}({common / own:.2f})")


def in_a_process(names: list[str]) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "times.json")
        if process_for(checked_threads(None), [__file__, "--in-this-process", target, *names]):
            sys.exit(f"measuring {', '.join(names)} failed")
        return json.loads(Path(target).read_text("utf-8"))


def measured(names: list[str]) -> dict[str, dict[str, float]]:
    """Library -> case -> median seconds per call."""
    prepares = {name: LIBRARIES[name].load(checked_threads(None)) for name in names}
    times: dict[str, dict[str, float]] = {name: {} for name in names}
    for one in CASES:
        inputs = make_inputs(one)
        works = {n: prepared(LIBRARIES[n], prepare, inputs) for n, prepare in prepares.items()}
        calls = {name: work.call for name, work in works.items() if isinstance(work, Work)}
        for name, samples in time_in_rotation(calls, Budget()).items():
            times[name][one.name] = samples.median
    return times


if __name__ == "__main__":
    main()

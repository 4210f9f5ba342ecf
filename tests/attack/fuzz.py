"""Random calls against an oracle in long double, on every path, for as long as asked.

`python tests/attack/fuzz.py --minutes 60` prints its first seed; `--first-seed` repeats
a run. A call that fails is made smaller until nothing can be left out, and printed as a program and
as a line for `corpus.jsonl`, which the default tests replay.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from attack_shrinking import any_call, failure, program, smaller

MOST_FAILURES = 3  # of one process; more are rarely another fault


def attack(seeds: range, until: float, place: Any) -> tuple[int, list[tuple[int, str]]]:
    """Check the calls of these seeds until the time is up; `place` holds the one under way."""
    warnings.simplefilter("error")
    failures: list[tuple[int, str]] = []
    for done, seed in enumerate(seeds):
        if time.monotonic() > until or len(failures) == MOST_FAILURES:
            return done, failures
        place.value = seed
        wrong = failure(any_call(seed))
        if wrong:
            print(f"seed {seed}: {wrong}", flush=True)
            failures.append((seed, wrong))
    return len(seeds), failures


def _work(first: int, until: float, place: Any, answers: Any) -> None:
    answers.put(attack(range(first, first + 10**9), until, place))


def main() -> int:
    """Attack in several processes; 1 if a call was answered wrongly or a process died."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=int(time.time()) * 10**4)
    asked = parser.parse_args()
    print(f"first seed {asked.first_seed}, a thousand million apart for each process", flush=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    begin = time.monotonic()
    workers = []
    for number in range(asked.processes):
        first = asked.first_seed + number * 10**9
        place = context.Value("q", first)
        until = begin + 60 * asked.minutes
        one = context.Process(target=_work, args=(first, until, place, answers), daemon=True)
        one.start()
        workers.append((one, place))
    for one, _ in workers:
        one.join()
    died = [place.value for one, place in workers if one.exitcode]
    found = [answers.get() for one, _ in workers if not one.exitcode]
    for seed in died:
        print(f"the process of seed {seed} died: {json.dumps(any_call(seed))}")
    failed = [seed for _, failures in found for seed, _ in failures]
    for seed in failed:
        least = smaller(any_call(seed))
        print(f"\n# seed {seed}: {failure(least)}\n{program(least)}\n# {json.dumps(least)}")
    calls, hours = sum(done for done, _ in found), (time.monotonic() - begin) / 3600
    print(f"{calls} calls, {calls / hours:.3g} an hour; {len(failed)} failed, {len(died)} died")
    return 1 if failed or died or not calls else 0


if __name__ == "__main__":
    sys.exit(main())

"""Calls of every kind under valgrind: no byte is read that does not exist or was never written.

`python tests/attack/memcheck.py --calls 60`, or `--minutes 60`, runs them in a process that
valgrind watches, on every CPU target that valgrind knows (no AVX-512), and fails on a report with a
line of the native module in it; CPython has some of its own. Two planted mistakes must be reported
first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import count, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np

import regard
from calls import TARGETS
from regard.compute import native

KINDS = ("attention", "gradients", "cache", "merge")
MODULE = "_fused."
LOT = 400  # calls that are drawn at once
# Whether whole vectors of scores have something special in them, keys that no row sees included,
# is a hint: where they have, `any_seen_special` asks the seen ones alone.
HINT = "prepare_tile<"


def work(calls: int, minutes: float | None, seed: int) -> None:
    """Make that many calls, or as many as the minutes give, each on one of the targets."""
    from soak_calls import answer, jobs

    warnings.simplefilter("ignore")
    drawn = (job for lot in count(seed) for job in jobs(LOT, lot, [*KINDS]))
    until, made = time.monotonic() + 60 * (minutes or 0), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        for job in drawn if minutes else islice(drawn, calls):
            if minutes and time.monotonic() > until:
                break
            native.use_target(TARGETS[made.total() % len(TARGETS)])
            answer(*job, Path(place))
            made[job[0]] += 1
    print(f"{made.total()} calls on {', '.join(TARGETS)}: {dict(made)}", flush=True)


def plant() -> None:
    """Two mistakes of a caller: numbers that were never written, and more than there are."""
    x = np.ones((1, 40, 64), np.float32)
    regard.attention(np.empty_like(x), x, x, causal=True, offset="end")
    beyond = np.lib.stride_tricks.as_strided(
        np.ones((40, 64), np.float32), (1, 44, 64), (0, 256, 4)
    )
    regard.attention(beyond, x, x)


def reports(*arguments: str) -> list[tuple[str, list[str]]]:
    """What valgrind says of this program: the kind of each report, and its stack."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "found.xml"
        watch = ["valgrind", "--xml=yes", f"--xml-file={path}", "--partial-loads-ok=no"]
        watch.append("--error-limit=no")  # or it is silent after a thousand, CPython's included
        environment = os.environ | {"PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
        program = [sys.executable, __file__, *arguments]
        subprocess.run([*watch, *program], env=environment, check=True)
        found = []
        for error in ET.parse(path).getroot().iter("error"):
            kind = error.findtext("kind") or ""
            if kind.startswith("Leak"):  # of what lives as long as the process; soak.py has leaks
                continue
            frames = [
                f"{(frame.findtext('fn') or '?')[:60]} {frame.findtext('file')}:"
                f"{frame.findtext('line')} {Path(frame.findtext('obj') or '').name}"
                for frame in error.findall("stack[1]/frame")
            ]
            found.append((kind, frames))
        return found


def ours(found: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Reports of what the native module did, or made the C library do, but for one kind."""
    here = [one for one in found if any(MODULE in frame for frame in one[1])]
    return [one for one in here if not one[1][0].startswith(HINT)]


def main() -> int:
    """Watch; 1 if a mistake is reported, or a planted one is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=LOT)
    parser.add_argument("--minutes", type=float, help="as many calls as these give")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", choices=("work", "plant"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        plant() if asked.worker == "plant" else work(asked.calls, asked.minutes, asked.seed)
        return 0
    if not shutil.which("valgrind"):
        parser.error("needs valgrind; on Debian: apt-get install valgrind")
    planted = {kind for kind, _ in ours(reports("--worker", "plant"))}
    if not {"UninitCondition", "InvalidRead"} <= planted:
        print(f"planted mistakes were not reported, only {sorted(planted)}")
        return 1
    given = ["--worker", "work", "--calls", str(asked.calls), "--seed", str(asked.seed)]
    found = reports(*given, *(("--minutes", str(asked.minutes)) if asked.minutes else ()))
    for kind, frames in ours(found):
        print(kind, *frames[:12], sep="\n    ")
    print(f"{len(ours(found))} reports of the native module, {len(found)} in all")
    return 1 if ours(found) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Mixed calls from eight threads, with forks, interrupts and too little memory, for an hour.

`python tests/attack/soak.py --minutes 60`: every answer has the bytes of the first one, and what
the process holds (memory, objects, files, threads) stays the same. A line a minute, and figures in
JSON at the end. `--plant memory` and the like put a fault in, which must be found.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np

import regard
from calls import TARGETS
from regard.compute import native
from soak_calls import KINDS, answer, jobs
from soak_meter import FEWEST, Reading, judge, keep_no_free_memory, read

THREADS = 8
PLANTS = ("answer", "memory", "files", "threads", "leftovers")
PATIENCE = 120  # seconds for all calls under way to end, or for a child, on a busy machine
LITTLE = 2**27  # bytes that a child with little memory may take
MOST_WRONG = 20
PLANTED = 2  # the number of the call whose answer is made wrong


class Soak:
    """One run: the calls with their first answers, and what happens meanwhile."""

    def __init__(
        self, calls: list[tuple[str, int]], seed: int, targets: list[str], plant: str | None
    ) -> None:
        self.jobs, self.seed, self.targets, self.plant = calls, seed, targets, plant
        self.folder = Path(tempfile.mkdtemp(prefix="regard-soak-"))
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kept: list[Any] = []  # by a planted fault
        self.over, self.open = threading.Event(), threading.Event()
        self.idle = threading.Semaphore(0)
        self.armed = False  # whether an interrupt may be raised
        self.first = {}
        for target in targets:
            native.use_target(target)
            self.first[target] = [answer(*job, self.folder) for job in self.jobs]
        self.target = targets[-1]

    # calls ---------------------------------------------------------------------------------------

    def check(self, number: int) -> str:
        """Make a call again; what is wrong with it."""
        job = self.jobs[number]
        try:
            again = answer(*job, self.folder)
        except Exception as error:
            return f"{job} on {self.target}: {type(error).__name__}: {str(error)[:300]}"
        if self.plant == "answer" and number == PLANTED and not self.wrong:
            again = again[::-1]
        same = again == self.first[self.target][number]
        return "" if same else f"{job} on {self.target}: other bytes than at first"

    def call(self, dice: random.Random) -> None:
        number = dice.randrange(len(self.jobs))
        wrong = self.check(number)
        if wrong:
            self.wrong.append(wrong)
        self.counts[self.jobs[number][0]] += 1
        if self.plant is not None:
            self.do_wrong(dice)

    def do_wrong(self, dice: random.Random) -> None:
        if self.plant == "memory":
            self.kept.append(b"x" * 2**17 + bytes([len(self.kept) % 256]))
        elif self.plant == "files" and dice.random() < 0.2:
            self.kept.append(open(os.devnull, "rb"))  # noqa: SIM115
        elif self.plant == "threads" and dice.random() < 0.2:
            threading.Thread(target=self.over.wait, daemon=True).start()
        elif self.plant == "leftovers" and dice.random() < 0.2:
            (self.folder / f".{dice.random()}.part").touch()

    def work(self, number: int) -> None:
        """A thread: one call after the other, and now and then an interrupt of the main thread."""
        dice = random.Random(self.seed + number)
        while not self.over.is_set():
            if not self.open.is_set():
                self.idle.release()
                self.open.wait()
                continue
            self.call(dice)
            if self.armed and dice.random() < 0.05:
                os.kill(os.getpid(), signal.SIGINT)

    # what happens between them, in the main thread -----------------------------------------------

    def interrupt(self, signum: int, frame: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def be_interrupted(self, dice: random.Random) -> None:
        """Calls in the main thread until one is interrupted, or ten are through."""
        try:
            self.armed = True
            for _ in range(10):
                wrong = self.check(dice.randrange(len(self.jobs)))
                if wrong:
                    self.wrong.append(wrong)
                self.counts["main thread"] += 1
            self.armed = False
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1

    def fork(self, dice: random.Random) -> None:
        """Some calls in a child, while the threads here go on; at times with little memory."""
        chosen, little = dice.sample(range(len(self.jobs)), 5), dice.random() < 0.5
        child = os.fork()
        if child == 0:
            code = 1
            try:
                faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__)
                code = self.be_a_child(chosen, little)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.counts["forks with little memory" if little else "forks"] += 1
        if status:
            self.wrong.append(f"a child of calls {chosen}, little={little}, ended with {status}")

    def be_a_child(self, chosen: list[int], little: bool) -> int:
        self.plant = None
        if little:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + LITTLE, before[1]))
            query = np.ones((2**16, 1), np.float32)
            for width in (2**12, 2**20):  # a GiB, a quarter of a TiB
                value = np.broadcast_to(np.ones((1, 1), np.float32), (4, width))
                try:
                    regard.attention(query, query[:4], value)
                except MemoryError:
                    continue
                return 2
            resource.setrlimit(resource.RLIMIT_AS, before)
        return 3 if any(self.check(number) for number in chosen) else 0

    def rest(self) -> Reading | None:
        """What is held when no call is under way; None if some call does not end."""
        self.open.clear()
        for _ in range(THREADS):
            if not self.idle.acquire(timeout=PATIENCE):
                self.wrong.append(f"a call did not end within {PATIENCE} s")
                return None
        for path in self.folder.glob("[!.]*"):  # of a call that was interrupted after it was saved
            path.unlink()
        return read(self.folder)

    def run(self, minutes: float, every: float) -> list[Reading]:
        dice = random.Random(self.seed)
        signal.signal(signal.SIGINT, self.interrupt)
        workers = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(8)]
        self.open.set()
        for one in workers:
            one.start()
        begin, readings = time.monotonic(), []
        while len(self.wrong) < MOST_WRONG:
            until = time.monotonic() + every
            while time.monotonic() < until:
                self.be_interrupted(dice)
                self.fork(dice)
            reading = self.rest()
            if reading is None:
                break
            readings.append(reading)
            passed = (reading.at - begin) / 60
            print(
                f"{passed:6.1f} min  {self.target:<12}{self.calls():>8} calls  "
                f"{reading.memory:7.1f} MiB  {reading.objects} objects  {reading.files} files  "
                f"{reading.threads} threads  {len(self.wrong)} wrong",
                flush=True,
            )
            if passed >= minutes and len(readings) >= FEWEST:
                break
            self.target = self.targets[len(readings) % len(self.targets)]
            native.use_target(self.target)
            self.open.set()
        self.over.set()
        self.open.set()
        return readings

    def calls(self) -> int:
        return sum(n for name, n in self.counts.items() if not name.startswith(("fork", "inter")))


def main() -> int:
    """Soak; 1 if an answer changed or something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between readings")
    parser.add_argument("--calls", type=int, default=400, help="different calls, made again")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="CPU targets, in turn")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--plant", choices=PLANTS, help="a fault that must be found")
    asked = parser.parse_args()
    if not Path("/proc/self/task").is_dir():
        parser.error("reads what a process holds from /proc, which only Linux has")
    warnings.simplefilter("error")
    # A file that an interrupt leaves to the collector is closed by it.
    warnings.simplefilter("ignore", ResourceWarning)
    keep_no_free_memory()
    print(f"seed {asked.seed}; first {asked.calls} calls on {', '.join(asked.targets)}", flush=True)
    calls = jobs(asked.calls, asked.seed, asked.kinds)
    soak = Soak(calls, asked.seed, asked.targets, asked.plant)
    every = min(asked.every, asked.minutes * 60 / 10)  # ten readings at least
    found, wrong = judge(soak.run(asked.minutes, every))
    wrong += soak.wrong
    counts = dict(sorted(soak.counts.items()))
    print(json.dumps({"calls": soak.calls(), "counts": counts, "held": found, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""One library in a process of its own, told over its input what to prepare and when to run it.

Idle threads of one library can slow another in the same process down. A line of JSON asks, a line
of JSON answers, and arrays go through a folder of the process that asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from regard.bench.cases import Case, make_inputs
from regard.bench.libraries import PEERS, REGARD, Library, Work, prepared, reason_of
from regard.bench.timing import InThisProcess, Timed
from regard.boundary.arrays import Array

# Read when a library is loaded, so they are set before the process begins.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class SideError(Exception):
    """A library that cannot be loaded, or whose process ended: `side`, if it was there."""

    def __init__(self, reason: str, side: Side | None = None) -> None:
        super().__init__(reason)
        self.side = side


class Side(Timed, Protocol):
    """One library, ready to prepare cases."""

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """What the library answers to the case, by name, or why it cannot."""

    def close(self) -> None:
        """Let go of everything."""


class Here:
    """A library in this process."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        try:
            self._prepare = library.load(threads)
        except Exception as error:  # a peer may raise anything
            raise SideError(reason_of(error)) from error
        self._call = InThisProcess(lambda: None)

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """See `Side`."""
        self.close()
        work = prepared(self._library, self._prepare, make_inputs(case))
        if not isinstance(work, Work):
            return work
        try:
            answer = work.read(work.call())
        except Exception as error:  # a peer may raise anything
            return reason_of(error)
        self._call = InThisProcess(work.call)
        return dict(zip(case.answers, answer, strict=True))

    def estimate(self) -> float:
        """See `Timed`."""
        return self._call.estimate()

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """See `Timed`."""
        return self._call.block(warm, repeats, count)

    def close(self) -> None:
        """See `Side`."""
        self._call = InThisProcess(lambda: None)


class Elsewhere:
    """A library in a process of its own, with `threads` threads and as many CPUs."""

    def __init__(self, library: Library, threads: int, folder: str) -> None:
        self._folder = Path(folder)
        words = [sys.executable, "-m", __name__, library.name, str(threads), folder]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))},
        )
        try:
            said = self._hear()
        except SideError:
            self.close()
            raise
        if isinstance(said, str):
            self.close()
            raise SideError(said)

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """See `Side`."""
        said = self._ask("prepare", asdict(case))
        if isinstance(said, str):
            return said
        answer = {}
        for name, file in said.items():
            answer[name] = np.load(self._folder / file, allow_pickle=False)
            (self._folder / file).unlink()
        return answer

    def estimate(self) -> float:
        """See `Timed`."""
        return float(self._ask("estimate"))

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """See `Timed`."""
        return list(self._ask("block", warm, repeats, count))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(OSError):  # what it was not told is told now
            self._process.communicate()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, which the next line says
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"its process ended with exit code {self._process.wait()}", self)
        return json.loads(line)


def main(name: str, threads: str, folder: str) -> None:
    """Answer each line of standard input with one on standard output, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if hasattr(os, "sched_setaffinity"):  # jax has as many threads as the process has CPUs
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    library = next(one for one in (REGARD, *PEERS) if one.name == name)
    try:
        side = Here(library, int(threads))
    except SideError as error:
        say(str(error))
        return
    say(None)
    for line in sys.stdin:
        word, *given = json.loads(line)
        if word == "prepare":
            say(_saved(side.prepare(Case(**given[0])), name, Path(folder)))
        else:
            say(getattr(side, word)(*given))


def _saved(answer: Mapping[str, Array] | str, side: str, folder: Path) -> dict[str, str] | str:
    """The files of the arrays: half types, which NumPy's files do not know, as float32."""
    if isinstance(answer, str):
        return answer
    files = {}
    for name, array in answer.items():
        files[name] = f"{os.getpid()}-{side}-{name}.npy"
        whole = np.ascontiguousarray(array)
        np.save(folder / files[name], whole.astype(np.float32) if whole.itemsize == 2 else whole)
    return files


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)  # the process that asks says so

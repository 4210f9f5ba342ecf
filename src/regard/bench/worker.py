"""One library in a process of its own, told over its input what to prepare and when to run it.

Idle threads of one library can slow another in the same process down, and in another process too,
while they spin. So a process runs only while it is asked, and is stopped in between. A line of
JSON asks, a line of JSON answers, and the bytes of arrays follow it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import Any, Protocol

import numpy as np

from regard.bench.cases import Case, make_inputs
from regard.bench.libraries import PEERS, REGARD, Library, Work, prepared, reason_of
from regard.bench.machine import Limits, Meter
from regard.bench.timing import InThisProcess, Timed
from regard.boundary.arrays import Array
from regard.errors import safe_text

# Read when a library is loaded, so they are set before the process begins.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# OpenVINO sends statistics of its use, from a child process that can hang, but not for these.
ALONE = {"CI": "true"}
# Loading, compiling, or a block of calls: of what is in the grids, the slowest takes a tenth.
MOST_SECONDS = 300.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
METER = "the machine"
NOTHING = Work(lambda: None, lambda _: [])


class SideError(Exception):
    """A library that cannot be loaded, or whose process ended: `side`, if it was there."""

    def __init__(self, reason: str, side: Side | None = None) -> None:
        super().__init__(reason)
        self.side = side


class Side(Timed, Protocol):
    """One library, ready to prepare cases."""

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """What the library answers to the case, by name, or why it cannot."""

    def release(self) -> None:
        """Let go of the case."""

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
        self._work = NOTHING

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """See `Side`."""
        self.release()
        work = prepared(self._library, self._prepare, make_inputs(case))
        if not isinstance(work, Work):
            return work
        try:
            answer = work.read(work.call())
        except Exception as error:  # a peer may raise anything
            return reason_of(error)
        self._work = work
        return dict(zip(case.answers, answer, strict=True))

    def estimate(self) -> float:
        """See `Timed`."""
        return InThisProcess(self._work.call).estimate()

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """See `Timed`."""
        return InThisProcess(self._work.call).block(warm, repeats, count)

    def release(self) -> None:
        """See `Side`."""
        self._work = NOTHING

    def close(self) -> None:
        """See `Side`."""
        self.release()


class Elsewhere:
    """A library, or the meter, in a process of its own with `threads` threads and as many CPUs."""

    def __init__(self, name: str, threads: int) -> None:
        self._late = False
        self._errors = TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), **ALONE},
        )
        try:
            with self._running():
                said = self._hear()
            if said is not None:
                raise SideError(said)
        except BaseException:  # an interrupt too
            self.close()
            raise

    def prepare(self, case: Case) -> Mapping[str, Array] | str:
        """See `Side`."""
        said = self._ask("prepare", asdict(case))
        return said if isinstance(said, str) else dict(said)

    def estimate(self) -> float:
        """See `Timed`."""
        return float(self._ask("estimate"))

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """See `Timed`."""
        return list(self._ask("block", warm, repeats, count))

    def limits(self) -> Limits | None:
        """What the meter found at its start."""
        said = self._ask("limits")
        return None if said is None else Limits.from_data(said)

    def release(self) -> None:
        """See `Side`."""
        self._ask("release")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(OSError):  # what it was not told is told now
            self._process.communicate()
        self._errors.close()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        with self._running():
            try:
                self._process.stdin.write(json.dumps(words).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:
                pass  # it has ended, which the next line says
            return self._hear()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let the process run, for `MOST_SECONDS` at most; stop all of its threads afterwards."""
        timer = threading.Timer(MOST_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        if os.name == "posix":
            self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            timer.cancel()
            self._stop()

    def _stop(self) -> None:
        """Stop the process, and wait until all of its threads have stopped."""
        if os.name == "posix":
            self._process.send_signal(signal.SIGSTOP)
            if hasattr(os, "waitid"):
                with suppress(ChildProcessError):  # it has ended
                    os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _hear(self) -> Any:
        """What it says, or the arrays that follow."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise SideError(self._how_it_ended(), self)
        message = json.loads(line)
        if message["arrays"] is None:
            return message["said"]
        arrays = {}
        for name, (dtype, shape) in message["arrays"].items():
            size = np.dtype(dtype).itemsize * math.prod(shape)
            data = self._process.stdout.read(size)
            if len(data) < size:
                raise SideError(self._how_it_ended(), self)
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
        return arrays

    def _how_it_ended(self) -> str:
        """The exit code or signal, and the last line that it wrote on standard error."""
        code = self._process.wait()
        if self._late:
            return f"no answer for {MOST_SECONDS:g} s, so its process was ended"
        how = f"with exit code {code}"
        if code < 0:
            how = f"by signal {-code} ({signal.strsignal(-code)})"
        if code == -9:  # SIGKILL
            how += ", as when memory runs out"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended {how}" + (f": {safe_text(last, 200)}" if last else "")


def main(name: str, threads: str) -> None:
    """Answer each line of standard input with one on standard output, until there are no more."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(what: Any, arrays: Mapping[str, Array] | None = None) -> None:
        plain = {key: _plain(array) for key, array in (arrays or {}).items()}
        kinds = {key: (one.dtype.str, one.shape) for key, one in plain.items()}
        head = {"said": what, "arrays": None if arrays is None else kinds}
        answers.write(json.dumps(head).encode() + b"\n")
        for one in plain.values():
            answers.write(one.data.cast("B"))
        answers.flush()

    if hasattr(os, "sched_setaffinity"):  # jax has as many threads as the process has CPUs
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    known = {one.name: one for one in (REGARD, *PEERS)}
    try:
        side = Meter(int(threads)) if name == METER else Here(known[name], int(threads))
    except SideError as error:
        say(str(error))
        return
    say(None)
    for line in sys.stdin:
        word, *given = json.loads(line)
        if word != "prepare":
            say(getattr(side, word)(*given))
            continue
        found = side.prepare(Case(**given[0]))
        say(*([found] if isinstance(found, str) else [None, found]))


def _plain(array: Array) -> Array:
    """Half types, whose names NumPy alone does not know, as float32."""
    return np.ascontiguousarray(array, np.float32 if array.itemsize == 2 else None)


def _end_with_parent() -> None:
    """On Linux, be killed when the process that asks ends, whatever ended it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)  # the process that asks says so

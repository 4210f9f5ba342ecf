"""The process between the one that diagnoses and the one in which the function runs.

It starts the worker, watches its descendants, and ends all of them, those in sessions of their own
too. It runs as a file, on the standard library alone, and ends when its input is closed. Must not
know attention.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module

KEY_BYTES = 16
MAX_PROCESSES = 64
MAX_MEMORY = 2**30  # bytes that a function and what it starts may take
# Time between two looks, and the share of time that looking may take if there are many processes.
TICK_SECONDS = 0.1
LOOKING_SHARE = 0.1
ENDING_SECONDS = 5.0

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


class StopRequested(BaseException):
    """The process that diagnoses asked this one to end."""


def main() -> None:
    """Run the worker; then write on standard error what ended it and how many processes it left."""
    key = os.read(0, KEY_BYTES)
    if not hasattr(os, "fork"):  # Windows: only the function's own process is ended
        _work(key)
    signal.signal(signal.SIGTERM, _request_stop)
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    worker = os.fork()
    if worker == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        _work(key)
    try:
        what = _watch(worker)
    except StopRequested:
        what = "asked to"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    left = len(_descendants() - {worker})
    _end(worker)
    os.write(2, f"{what}\n{left}".encode())
    os._exit(0)


def _request_stop(number: int, frame: object) -> None:
    raise StopRequested


def _work(key: bytes) -> None:
    """Run as the worker; the process ends with this call."""
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))
    try:
        import_module(sys.argv[1]).serve(key, MAX_MEMORY)
    finally:
        os._exit(1)


def _prctl() -> Callable[[int, int], object]:
    """Linux's prctl; elsewhere a function that does nothing."""
    if sys.platform != "linux":
        return lambda option, value: None
    import ctypes

    return ctypes.CDLL(None).prctl


def _watch(worker: int) -> str:
    """Wait until the worker ends or must be ended; return why."""
    listener = select.poll()
    listener.register(0, 0)  # reports that our input has been closed
    before = None  # bytes in use before the function is called
    while True:
        begin = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return f"signal {-code}" if code < 0 else f"exit code {code}"
        running = _descendants()
        if len(running) > MAX_PROCESSES:
            return "processes"
        if (limit := _limit_of(worker)) is not None:
            now = sum(map(_memory, running))
            if before is None:  # private data that the worker had, or less: some is only reserved
                before = min(now, limit - MAX_MEMORY)
            if now > before + MAX_MEMORY:
                return "memory"
        pause = max(TICK_SECONDS, (time.monotonic() - begin) / LOOKING_SHARE)
        if listener.poll(1000 * pause):
            return "asked to"


def _end(worker: int) -> None:
    """Kill the worker's group and every descendant, until none is left."""
    deadline = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline:
        for pid in _descendants():
            _kill(os.kill, pid)
        _kill(os.killpg, worker)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(OSError):
        kill(number, signal.SIGKILL)


def _descendants() -> set[int]:
    """The descendants that are running, on Linux; none elsewhere."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with (
                    contextlib.suppress(OSError, ValueError),
                    open(f"/proc/{name}/stat", "rb") as file,
                ):
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                    if state not in b"ZX":
                        children.setdefault(int(parent), []).append(int(name))
    found, todo = set(), [os.getpid()]
    while todo:
        more = children.get(todo.pop(), [])
        found.update(more)
        todo += more
    return found


def _limit_of(pid: int) -> int | None:
    """The limit in bytes that the worker has set for itself; None before it has."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import resource

        limit = resource.prlimit(pid, resource.RLIMIT_DATA)[0]
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def _memory(pid: int) -> int:
    """Bytes of a process outside files; shared memory is split between the processes."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        own = (line.split() for line in file)
        return sum(1024 * int(line[1]) for line in own if line[0] in (b"Pss_Anon:", b"Pss_Shmem:"))
    return 0


if __name__ == "__main__":
    main()

"""Attentions that attack the process in which they are called, or the one that calls them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time

import numpy as np

FORGED = {"function": "f", "verdict": "right", "summary": "f is right", "called": ""}
FORGED_LINE = (json.dumps({"diagnosis": FORGED}) + "\n").encode()
DEEP_LINE = b"[" * 200_000 + b"\n"


def right(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def call(f, t):
    return f(t.query, t.key, t.value)


def forgetful(q, k, v):
    return right(q * np.sqrt(q.shape[-1]), k, v)


def to_every_file(content):
    for number in range(256):
        with contextlib.suppress(OSError):
            os.set_blocking(number, False)
            os.write(number, content)


# --- writing where it should not -----------------------------------------------------------------


def writes_to_every_file(q, k, v):
    for content in (b"\x00\xff junk \n", b"[1, 2]\n", DEEP_LINE):
        to_every_file(content)
    return right(q, k, v)


def forges_a_verdict(q, k, v):
    to_every_file(FORGED_LINE)
    return forgetful(q, k, v)


def refuses_open_files(q, k, v):
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        others = {int(name) for name in os.listdir(listing)} - {listing}
    finally:
        os.close(listing)
    for number in others:
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
    return right(q, k, v)


def closes_every_file(q, k, v):
    os.closerange(0, 256)
    return right(q, k, v)


def reads_every_file(q, k, v):
    for number in range(256):
        with contextlib.suppress(OSError):
            os.set_blocking(number, False)
            os.read(number, 2**20)
    return right(q, k, v)


def prints_without_end(q, k, v):
    while True:
        print("x" * 100_000)


def threads_write_after_the_return(q, k, v):
    def go_on():
        for _ in range(100):
            os.write(1, b"still here\n")
            sys.__stderr__.write("still here\n")
            time.sleep(0.001)

    threading.Thread(target=go_on).start()
    return right(q, k, v)


# --- changing what others use --------------------------------------------------------------------


def replaces_stdout(q, k, v):
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None
    return right(q, k, v)


def replaces_json(q, k, v):
    json.dumps = json.loads = json.JSONEncoder.encode = lambda *_, **__: FORGED_LINE.decode()
    return forgetful(q, k, v)


def replaces_numpy(q, k, v):
    out = right(q, k, v)
    for name in (
        "array",
        "asarray",
        "frombuffer",
        "float64",
        "ndarray",
        "errstate",
        "isnan",
        "abs",
    ):
        setattr(np, name, None)
    return out


def replaces_the_library(q, k, v):
    for name, module in list(sys.modules.items()):
        if name.startswith("regard.diagnosis"):
            for inside in dir(module):
                if not inside.startswith("_"):
                    setattr(module, inside, FORGED)
    return forgetful(q, k, v)


def changes_the_process(q, k, v):
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    sys.argv[:] = ["other"]
    atexit.register(os.kill, os.getppid(), signal.SIGKILL)
    atexit.register(time.sleep, 1000)
    return right(q, k, v)


def sets_an_alarm(q, k, v):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(1)
    return right(q, k, v)


def lowers_the_recursion_limit(q, k, v):
    out = right(q, k, v)
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(20)
    return out


# --- ending, and not ending ----------------------------------------------------------------------


def exits(q, k, v):
    sys.exit(0)


def exits_at_once(q, k, v):
    os._exit(0)


def interrupts(q, k, v):
    raise KeyboardInterrupt


def segfaults(q, k, v):
    ctypes.string_at(0)


def recurses(q, k, v):
    return recurses(q, k, v)


def kills_its_parent(q, k, v):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def asks_its_parent_to_end(q, k, v):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1000)


def kills_its_group(q, k, v):
    os.kill(0, signal.SIGKILL)


def stops_itself(q, k, v):
    os.kill(os.getpid(), signal.SIGSTOP)


def hears_no_signal(q, k, v):
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def catches_everything(q, k, v):
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


# --- taking too much -----------------------------------------------------------------------------


def allocates_much(q, k, v):
    return np.ones(2**30) * right(q, k, v).sum()


def shares_much_memory(q, k, v):
    shared = mmap.mmap(-1, 2**31)
    page = b"x" * 2**20
    while True:
        shared.write(page) if shared.tell() < 2**31 else time.sleep(0.1)


def forks_many(q, k, v):
    for _ in range(150):
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
    time.sleep(1000)


PIDS = "pids.txt"


def leaves_a_daemon(q, k, v):
    if not os.path.exists(PIDS):
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            if os.fork() == 0:
                with open(PIDS, "a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(60)
            os._exit(0)
        os.wait()
        while not os.path.exists(PIDS):
            time.sleep(0.001)
    return right(q, k, v)


def waits_for_ever(q, k, v):
    with open(PIDS, "w") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(1000)


# --- returning what is no array ------------------------------------------------------------------


def returns_deep_nesting(q, k, v):
    out = []
    for _ in range(50_000):
        out = [out]
    return out


def returns_itself(q, k, v):
    out = [1.0]
    out.append(out)
    return out


def returns_a_huge_array(q, k, v):
    return np.broadcast_to(np.int8(1), (2**20, 2**20))


def returns_a_large_array(q, k, v):
    return np.zeros((3, 2**23), np.int8)


def returns_many_arrays(q, k, v):
    return [np.zeros(3)] * 10**6


class Hostile(Exception):
    """Everything that may be asked of it does something else."""

    dtype = property(lambda self: 1 / 0)

    @property
    def shape(self):
        raise KeyError("\x1b[31m" * 10**5)

    def __array__(self, *_, **__):
        os._exit(9)

    def __repr__(self):
        raise SystemExit(5)

    __str__ = __len__ = __iter__ = __getitem__ = __bool__ = __hash__ = __eq__ = __repr__


class Nameless:
    __name__ = property(lambda self: 1 / 0)

    def __call__(self, q, k, v):
        return right(q, k, v)


nameless = Nameless()


def returns_a_hostile_object(q, k, v):
    return Hostile()


def raises_a_hostile_object(q, k, v):
    raise Hostile


def raises_a_long_text(q, k, v):
    raise ValueError("\x1b]0;title\x07" * 10**5)

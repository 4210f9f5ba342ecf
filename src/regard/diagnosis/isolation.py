"""The diagnosis of a function that runs in another process.

This process computes the verdict; the other one only loads, calls and traces the function. If that
hangs, crashes, exits, writes anything else or takes too much memory, its process ends and the
diagnosis says so. Must not know any view.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from regard.compute.spelling import write
from regard.diagnosis.call import remote
from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Answer, Ask
from regard.diagnosis.given import Given
from regard.diagnosis.lines import Told
from regard.diagnosis.process import protocol, supervisor
from regard.diagnosis.process.target import load
from regard.diagnosis.result import Finding, Outcome
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import Task
from regard.errors import OptionError, ProblemError, safe_text

LOADING_SECONDS = 120.0  # loading a file may import torch
# A call interrupts itself at its limit, unless it is in native code: its process then gets this.
GRACE_SECONDS = 5.0
# A function that waits takes no time of the CPU, whose limit is what ends a call usually.
CALL_SECONDS, SEARCH_SECONDS = 60.0, 300.0
LOOK_SECONDS = 0.1  # between two looks whether an answer is late

T = TypeVar("T")


class ConnectionLostError(Exception):
    """The process has ended or answers no more: the name of a finding, and what happened."""


def diagnose_target(
    target: str, call: str | None = None, *, in_process: bool = False, **statements: Any
) -> Outcome:
    """The diagnosis of the function that `target` names, in another process or in this one.

    `call` names an adapter in the same way. The errors are those of `regard.diagnose`, and a
    ProblemError if one of them cannot be loaded.
    """
    stated = Stated(**statements)
    if in_process:
        from regard.diagnosis.diagnose import diagnose

        return diagnose(load(target), None if call is None else load(call), **statements)
    process = _Process()
    try:
        return process.diagnosed(target, call, stated)
    finally:
        process.end()


def _as_request(stated: Stated) -> dict[str, Any]:
    """What is stated as JSON; a score and a normalization as a file has them."""
    own = {one.name: getattr(stated, one.name) for one in fields(stated)}
    for name in ("score", "normalize"):
        if not isinstance(own[name], str):
            own[name] = write(own[name])
    return own


class _Process:
    """The supervisor and its worker, and a thread that ends them when an answer is late."""

    def __init__(self) -> None:
        self._key = os.urandom(supervisor.KEY_BYTES)
        self._number = 0
        self._adapters: list[Adapter] = []
        self._deadline = math.inf
        self._late = False
        self._over = threading.Event()
        self._last_words: tuple[str, int] | None = None
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", supervisor.__file__, "regard.diagnosis.call.worker"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONUTF8": "1"},
        )
        pipes = self._supervisor.stdin, self._supervisor.stdout, self._supervisor.stderr
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._watchdog = threading.Thread(target=self._watch, daemon=True)
        self._watchdog.start()

    def diagnosed(self, target: str, call: str | None, stated: Stated) -> Outcome:
        """The diagnosis; if the process ends early, that is its finding."""
        from regard.diagnosis.diagnose import diagnose_at  # loaded while the worker starts

        name = safe_text(target.rpartition(":")[2], 60)
        try:
            self._begin({"target": target, "call": call, "stated": _as_request(stated)})
            found = diagnose_at(self, name, stated)
        except ConnectionLostError as lost:
            kind, text = lost.args
            finding = Finding(kind, f"{name}: {text}")
            summary = f"{name} could not be diagnosed: {text}"
            return Outcome(name, "not_callable", summary, findings=(finding,))
        _, left = self.end()
        if left == 0:
            return found
        text = f"{name} left {left} process{'es' if left > 1 else ''} running; ended with it"
        return replace(found, findings=(*found.findings, Finding("leaves_processes", text)))

    def _begin(self, request: Mapping[str, Any]) -> None:
        """Load a function and its adapter."""

        def read(message: protocol.Message) -> None:
            if (error := protocol.as_error(message)) is not None:
                kind, text = error
                raise (OptionError if kind == "OptionError" else ProblemError)(text)

        def write(number: int) -> bytes:
            return self._key + protocol.frame(self._key, number, request)

        self._exchange(write, read, "loading the file", LOADING_SECONDS, 0)

    def ways(self) -> Iterator[Way]:
        """How the function may be called; adapters have numbers in the order in which they come."""
        while True:
            way = self._exchange(
                lambda number: protocol.frame(self._key, number, {}),
                remote.as_way,
                "the search for a call",
                SEARCH_SECONDS,
                0,
            )
            self._adapters += way.adapters
            yield way

    def asking(self, adapter: Adapter) -> Ask:
        """What asks for one call with an adapter."""
        own = self._number_of(adapter)

        def ask(given: Given) -> Answer:
            request = {"adapter": own, "given": remote.asked(given)}
            return self._exchange(
                lambda number: protocol.frame(self._key, number, request),
                remote.as_answer,
                f"the problem {given.name}",
                CALL_SECONDS,
                remote.MAX_BYTES,
            )

        return ask

    def tell(self, adapter: Adapter, task: Task, others: Sequence[Task]) -> Told:
        """What a trace of one problem tells, in that process; the verdict does not depend on it."""
        tasks = [remote.as_json(one) for one in (task, *others)]
        request = {"adapter": self._number_of(adapter), "tasks": tasks}
        try:
            return self._exchange(
                lambda number: protocol.frame(self._key, number, request),
                remote.as_told,
                f"a trace of the problem {task.name}",
                SEARCH_SECONDS,
                0,
            )
        except ConnectionLostError as lost:
            return Told(why=lost.args[1])

    def means(self, adapter: Adapter, tasks: Sequence[Task]) -> int:
        """Which reading of one problem has most of its own steps in that process."""
        request = {
            "adapter": self._number_of(adapter),
            "readings": [remote.as_json(one) for one in tasks],
        }
        try:
            return self._exchange(
                lambda number: protocol.frame(self._key, number, request),
                lambda message: remote.as_number(message, len(tasks)),
                f"a trace of the problem {tasks[0].name}",
                SEARCH_SECONDS,
                0,
            )
        except ConnectionLostError:
            return 0

    def _number_of(self, adapter: Adapter) -> int:
        return next(place for place, one in enumerate(self._adapters) if one is adapter)

    def end(self) -> tuple[str, int]:
        """End the worker and its descendants: what had ended it, and how many processes it left."""
        if self._last_words is None:
            self._over.set()
            self._stop()
            self._watchdog.join()
            self._last_words = self._read_last_words()
            for pipe in self._pipes:
                pipe.close()
        return self._last_words

    def _watch(self) -> None:
        """Run in a thread: reading a pipe may block until the supervisor has ended."""
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() > self._deadline:
                self._late = True
                self._stop()
                return

    def _stop(self) -> None:
        self._supervisor.terminate()
        try:
            self._supervisor.wait(supervisor.ENDING_SECONDS + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def _read_last_words(self) -> tuple[str, int]:
        with contextlib.suppress(OSError, ValueError):
            pipe = self._pipes[2].fileno()
            if hasattr(os, "fork"):  # reading must not block
                os.set_blocking(pipe, False)
            *_, what, left = os.read(pipe, 2**16).decode().split("\n")
            return what, int(left)
        return "", 0

    def _exchange(
        self,
        write: Callable[[int], bytes],
        read: Callable[[protocol.Message], T],
        doing: str,
        patience: float,
        most: int,
    ) -> T:
        """Send one message and read the answer, with at most `most` bytes of arrays."""
        self._number += 1
        inbox, outbox = self._pipes[0].fileno(), self._pipes[1].fileno()
        self._deadline = time.monotonic() + patience
        try:
            message = write(self._number)
            while message:
                message = message[os.write(inbox, message) :]
            got = protocol.receive(lambda count: os.read(outbox, count), self._key, most)
            if got.number != self._number:
                raise protocol.InvalidMessage
            return read(got)
        except protocol.InvalidMessage:
            raise ConnectionLostError(
                "channel", f"its process sent something that is not an answer, in {doing}"
            ) from None
        except (EOFError, OSError):
            if self._late:
                raise ConnectionLostError("hangs", f"it did not return from {doing}") from None
            raise self._ended(doing) from None
        finally:
            self._deadline = math.inf

    def _ended(self, doing: str) -> ConnectionLostError:
        what, _ = self.end()
        kind = what if what in ("processes", "memory") else "ends_process"
        if what == "processes":
            text = f"it started more than {supervisor.MAX_PROCESSES} processes"
        elif what == "memory":
            text = f"it took more than {supervisor.MAX_MEMORY / 2**30:g} GiB of memory"
        elif what.startswith(("exit code", "signal")) or not hasattr(os, "fork"):
            text = f"it ended the process ({what or f'exit code {self._supervisor.returncode}'})"
        else:
            text = "it ended the process that watches it,"
        return ConnectionLostError(kind, f"{text} in {doing}")

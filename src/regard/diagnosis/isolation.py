"""A diagnosis of a function in another process, so that what the function does stays there.

This side computes the verdict and puts questions; the other one only loads and calls. A function
that never returns, crashes, exits, writes junk or takes too much ends its process, and that is the
verdict. Must not know any view.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from regard.diagnosis import protocol, supervisor
from regard.diagnosis.convention import Ask, Question, Returned
from regard.diagnosis.result import Finding, Outcome
from regard.diagnosis.running import MAX_BYTES
from regard.diagnosis.signature import Subject
from regard.diagnosis.target import load
from regard.diagnosis.worker import MAX_MEMORY
from regard.errors import OptionError, ProblemError, safe_text

# Loading a file may import torch; a loop in native code gets no signal, so we wait a little longer.
LOADING_SECONDS = 120.0
GRACE_SECONDS = 5.0
# How often we look whether an answer is late.
LOOK_SECONDS = 0.1

T = TypeVar("T")


class Lost(Exception):
    """Nothing more can be asked: the name of a finding, and what happened, in words."""


def diagnose_target(
    target: str, options: Mapping[str, Any], *, in_process: bool = False
) -> Outcome:
    """The diagnosis of what `target` names, called in another process unless asked otherwise.

    Raises
    ------
    OptionError, ProblemError
        As `regard.diagnose` does, and if the target cannot be loaded.
    """
    if in_process:
        from regard.diagnosis.verdict import diagnose

        return diagnose(load(target), **options)
    process = _Process()
    try:
        return process.diagnosed(target, options)
    finally:
        process.end()


class _Process:
    """The keeper and its worker, and a thread that ends them when an answer is late."""

    def __init__(self) -> None:
        self._key = os.urandom(supervisor.KEY_BYTES)
        self._number = 0
        self._deadline = math.inf
        self._late = False
        self._over = threading.Event()
        self._last_words: tuple[str, int] | None = None
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", supervisor.__file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONUTF8": "1"},
        )
        pipes = self._keeper.stdin, self._keeper.stdout, self._keeper.stderr
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._watchdog = threading.Thread(target=self._watch, daemon=True)
        self._watchdog.start()

    def diagnosed(self, target: str, options: Mapping[str, Any]) -> Outcome:
        """The diagnosis; whatever ends it early is one too."""
        from regard.diagnosis.verdict import diagnose  # loaded while the worker starts

        name = safe_text(target.rpartition(":")[2], 60)
        try:
            found = diagnose(target, reach=self._reach, **options)
        except Lost as lost:
            kind, text = lost.args
            summary, finding = f"{name} could not be diagnosed: {text}", f"{name}: {text}"
            return Outcome(name, "unusable", summary, "", findings=(Finding(kind, finding),))
        _, left = self.end()
        if left == 0:
            return found
        text = f"{name} leaves {left} process{'es' if left > 1 else ''} behind; ended with it"
        return replace(found, findings=(*found.findings, Finding("leaves_processes", text)))

    def end(self) -> tuple[str, int]:
        """End the worker and all that came of it: what ended it before, and how many it left."""
        if self._last_words is None:
            self._over.set()
            self._stop()
            self._watchdog.join()
            self._last_words = self._read_last_words()
            for pipe in self._pipes:
                pipe.close()
        return self._last_words

    def _watch(self) -> None:
        """The thread: a pipe may keep the other one waiting, until the keeper has ended."""
        while not self._over.wait(LOOK_SECONDS):
            if time.monotonic() > self._deadline:
                self._late = True
                self._stop()
                return

    def _stop(self) -> None:
        self._keeper.terminate()
        try:
            self._keeper.wait(supervisor.ENDING_SECONDS + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _read_last_words(self) -> tuple[str, int]:
        with contextlib.suppress(OSError, ValueError):
            pipe = self._pipes[2].fileno()
            if hasattr(os, "fork"):  # nobody else writes there, but nothing may keep us waiting
                os.set_blocking(pipe, False)
            *_, what, left = os.read(pipe, 2**16).decode().split("\n")
            return what, int(left)
        return "", 0

    def _reach(
        self, target: str, signature: Mapping[str, str] | None, heads: int | None, limit: float
    ) -> tuple[Subject, Ask]:
        roles = None if signature is None else dict(signature)
        request = {"target": target, "signature": roles, "heads": heads, "limit": limit}

        def read(message: protocol.Message) -> Subject:
            if (error := protocol.as_error(message)) is not None:
                kind, text = error
                raise (OptionError if kind == "OptionError" else ProblemError)(text)
            return protocol.as_subject(message)

        def ask(question: Question) -> list[Returned]:
            return self._exchange(
                lambda number: protocol.question_frame(self._key, number, question),
                lambda message: protocol.as_returned(message, question),
                f"the probe {question.name}",
                limit * len(question.calls) + GRACE_SECONDS,
                MAX_BYTES * len(question.calls),
            )

        subject = self._exchange(
            lambda number: self._key + protocol.frame(self._key, number, request),
            read,
            "loading the file",
            LOADING_SECONDS,
            protocol.MAX_WEIGHTS,
        )
        return subject, ask

    def _exchange(
        self,
        write: Callable[[int], bytes],
        read: Callable[[protocol.Message], T],
        doing: str,
        patience: float,
        most: int,
    ) -> T:
        """Send one message and read the answer to it, which has at most so many bytes of arrays."""
        self._number += 1
        inbox, outbox = self._pipes[0].fileno(), self._pipes[1].fileno()
        self._deadline = time.monotonic() + patience
        try:
            message = write(self._number)
            while message:
                message = message[os.write(inbox, message) :]
            got = protocol.receive(lambda count: os.read(outbox, count), self._key, most)
            if got.number != self._number:
                raise protocol.Junk
            return read(got)
        except protocol.Junk:
            raise Lost("channel", f"what came from its process was no answer, in {doing}") from None
        except (EOFError, OSError):
            if self._late:
                raise Lost("hangs", f"it did not come back from {doing}") from None
            raise self._ended(doing) from None
        finally:
            self._deadline = math.inf

    def _ended(self, doing: str) -> Lost:
        what, _ = self.end()
        if what == "processes":
            text = f"it started more than {supervisor.MAX_PROCESSES} processes in {doing}"
            return Lost("processes", text)
        if what == "memory":
            text = f"it took more than {MAX_MEMORY / 2**30:g} GiB of memory in {doing}"
            return Lost("memory", text)
        if not what.startswith(("exit code", "signal")):
            code = self._keeper.returncode
            if hasattr(os, "fork"):
                return Lost("ends_process", f"it ended the process that watches it, in {doing}")
            what = f"exit code {code}"
        return Lost("ends_process", f"it ended the process ({what}) in {doing}")

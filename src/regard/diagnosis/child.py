"""A diagnosis in a process of its own, so that what a function does there stays there.

The child loads and calls the function; only lines of JSON come back. A function that never
returns, crashes or exits ends the child, not the caller. Must not know any view.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from regard.diagnosis.result import Diagnosis, Finding
from regard.diagnosis.target import load
from regard.diagnosis.verdict import TIME_LIMIT, diagnose
from regard.errors import OptionError, ProblemError, safe_text

# Loading a file may import torch; a loop in native code gets no signal, so we wait a little longer.
LOADING_SECONDS = 120.0
GRACE_SECONDS = 5.0
MAX_LINE = 2**24


def diagnose_target(
    target: str, options: Mapping[str, Any], *, in_process: bool = False
) -> Diagnosis:
    """The diagnosis of what `target` names, made in a child process unless asked otherwise.

    Raises
    ------
    OptionError, ProblemError
        As `regard.diagnose` does, and if the target cannot be loaded.
    """
    if in_process:
        return diagnose(load(target), **options)
    child = subprocess.Popen(
        [sys.executable, "-m", "regard.diagnosis.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    request = {"target": target, "options": dict(options)}
    try:
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        return _listen(child, child.stdout, target, options.get("time_limit", TIME_LIMIT))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def _listen(
    child: subprocess.Popen[bytes], pipe: IO[bytes], target: str, time_limit: float
) -> Diagnosis:
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        while line := pipe.readline(MAX_LINE):
            lines.put(line)
        lines.put(b"")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    doing, patience = "loading the file", LOADING_SECONDS
    try:
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                return _lost(target, "hangs", f"it did not come back from {doing}")
            if not line:
                code = child.wait()
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return _lost(target, "ends_process", f"it ended the process ({how}) in {doing}")
            message = json.loads(line)
            if "diagnosis" in message:
                return Diagnosis.from_json(message["diagnosis"])
            if "error" in message:
                kind = OptionError if message["kind"] == "OptionError" else ProblemError
                raise kind(message["error"])
            doing = f"the probe {message['asking']}"
            patience = time_limit + GRACE_SECONDS
    finally:
        child.kill()
        reader.join(timeout=1)


def _lost(target: str, kind: str, text: str) -> Diagnosis:
    name = safe_text(target.rpartition(":")[2], 60)
    summary = f"{name} could not be diagnosed: {text}"
    return Diagnosis(name, "unusable", summary, "", findings=(Finding(kind, f"{name}: {text}"),))


def main() -> None:
    """The child: a request on standard input, lines of JSON on what was standard output."""
    # What the function prints must not get between the lines.
    out = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    request = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message, allow_nan=False) + "\n")

    try:
        function = load(request["target"])
        found = diagnose(function, watch=lambda what: say({"asking": what}), **request["options"])
    except (OptionError, ProblemError, OSError) as error:
        say({"error": str(error), "kind": type(error).__name__})
    else:
        say({"diagnosis": found.to_json()})
    out.flush()
    os._exit(0)  # threads that the function has left behind do not keep us


if __name__ == "__main__":
    main()

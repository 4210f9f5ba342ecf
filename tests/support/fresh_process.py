"""Programs in a Python process of their own, for what they do to a process and cannot undo.

Where many small programs differ in their environment alone, `many` has them all run by one process
that imports NumPy once and forks for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from places import SUPPORT

# Seconds until a process counts as hanging, on a busy machine too; more under the sanitizers.
WATCHDOG = 600.0 if "ASAN_OPTIONS" in os.environ else 120.0

START = """
import os, signal, sys, threading, time
import numpy as np
import regard
from regard.compute import native
rng = np.random.default_rng(0)
def arrays(*shapes, dtype=np.float32):
    return [rng.normal(size=s).astype(dtype) for s in shapes]
q, k, v = arrays((4, 300, 64), (4, 300, 64), (4, 300, 64))
def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def python(
    program: str,
    *arguments: str,
    start: str = START,
    emulator: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    before = {name: x for name, x in os.environ.items() if not name.startswith("REGARD_")}
    return subprocess.run(
        [*emulator, sys.executable, "-X", "faulthandler", "-c", start + program, *arguments],
        cwd=SUPPORT,
        env=before | environment,
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )


FORKS = """
import json, os, sys, tempfile, tomllib, traceback, zipfile
import numpy.ma, numpy.typing, rich.console, typer
app = typer.Typer()
@app.command()
def loads_what_options_need(option: int = 0): pass
app(["--option", "1"], standalone_mode=False)
def run(words, environment):
    os.environ.update(environment)
    program, *sys.argv = words
    try:
        exec(program, {"__name__": "__main__"})
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
ended = []
for words, environment in json.load(sys.stdin):
    files = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        code = run(words, environment)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    ended.append([code, *(file.read().decode() for file in files)])
json.dump(ended, sys.stdout)
"""
COMMAND = "from regard.__main__ import main; main()"


def many(
    cases: Sequence[tuple[Sequence[str], dict[str, str]]],
) -> list[subprocess.CompletedProcess[str]]:
    """A program with its `sys.argv`, and an environment, for each process; how each has ended."""
    before = {name: x for name, x in os.environ.items() if not name.startswith("REGARD_")}
    before["PYTHONUTF8"] = "1"
    if hasattr(os, "fork"):
        parent = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FORKS],
            env=before,
            input=json.dumps(cases),
            capture_output=True,
            encoding="utf-8",
            timeout=WATCHDOG,
            check=True,
        )
        return [subprocess.CompletedProcess([], *one) for one in json.loads(parent.stdout)]
    return [
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = sys.argv[1:]\n{program}", *words],
            env=before | environment,
            capture_output=True,
            encoding="utf-8",
            timeout=WATCHDOG,
        )
        for (program, *words), environment in cases
    ]


def well(process: subprocess.CompletedProcess[str]) -> str:
    """What a process that ended well has printed."""
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    assert process.stderr == ""
    return process.stdout.strip()

"""Compiles a file, or takes its object from what an earlier build has kept: launches the compiler.

pip builds in a new folder each time, with new copies of the headers of nanobind and NumPy: neither
paths nor times say what is the same. An object follows from the preprocessed text, the flags and
the compiler's version, where CMakeLists.txt allows no other flags; its name is their digest.
`python kept_objects.py FOLDER COMPILER ARGUMENTS…`; a folder that cannot be written keeps nothing.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

MOST = 100  # files to keep, of 25 in a build
ABOUT_HEADERS = {"-I", "-isystem"}  # the text has what they lead to
ABOUT_FILES = {"-o", "-MF", "-MT", "-MQ", "-c"}


def main(folder: Path, command: list[str]) -> int:
    """The exit status of the compiler."""
    name = digest(command)
    if name is None:  # the compiler says what is wrong
        return subprocess.call(command)
    kept, output = folder / f"{name}.o", command[command.index("-o") + 1]
    with contextlib.suppress(OSError):
        shutil.copyfile(kept, output)
        os.utime(kept)  # the files used last are kept
        return 0
    status = subprocess.call(command)
    if status == 0 and digest(command) == name:  # nothing was edited meanwhile
        with contextlib.suppress(OSError):
            keep(output, kept)
    return status


def digest(command: list[str]) -> str | None:
    """What an object follows from; writes the list of headers that the build asked for."""
    at, source = command.index("-o"), command.index("-c")
    preprocess = [*command[:at], *command[at + 2 : source], "-E", "-P", *command[source + 1 :]]
    found = hashlib.sha256("\0".join(flags(command)).encode())
    for question in ([*command, "--version"], preprocess):
        done = subprocess.run(question, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if done.returncode or not done.stdout:
            return None
        found.update(done.stdout + b"\0")
    return found.hexdigest()


def flags(command: list[str]) -> list[str]:
    """The command without what names folders and files of this build."""
    rest, left = iter(command), []
    for one in rest:
        if one in ABOUT_HEADERS | ABOUT_FILES:
            next(rest, None)
        elif not one.startswith(tuple(ABOUT_HEADERS)):
            left.append(one)
    return left


def keep(output: str, kept: Path) -> None:
    """At once or not at all: other builds may read and write here."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    try:
        shutil.copyfile(output, part)
        part.replace(kept)
    finally:
        part.unlink(missing_ok=True)
    for old in sorted(kept.parent.glob("*.o"), key=os.path.getmtime)[:-MOST]:
        old.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

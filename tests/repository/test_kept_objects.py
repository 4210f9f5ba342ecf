"""What a build compiles again: the launcher in `cmake/`, with a compiler that counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

LAUNCHER = ROOT / "cmake/kept_objects.py"
COMPILER = """
import pathlib, sys
words = sys.argv[1:]
if "--version" in words:
    print(pathlib.Path("version").read_text())
elif "broken" in (text := pathlib.Path(words[-1]).read_text()):
    sys.exit(3)
elif "-E" in words:
    print(text)
else:
    with open("compiled", "a") as log:
        log.write("once\\n")
    pathlib.Path(words[words.index("-o") + 1]).write_text("object of " + text)
"""


class Checkout:
    """A folder with one source file, and builds of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("compiler.py", COMPILER)
        self.write("version", "12.2")
        self.write("unit.cpp", "one")

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(text, "utf-8")

    def build(self, *flags: str, to: str = "unit.o") -> int:
        command = [sys.executable, "-IS", LAUNCHER, "objects", sys.executable, "compiler.py"]
        command += [*flags, "-MD", "-MF", f"{to}.d", "-o", to, "-c", "unit.cpp"]
        return subprocess.run(command, cwd=self.root, timeout=60).returncode

    @property
    def compiled(self) -> int:
        log = self.root / "compiled"
        return len(log.read_text("utf-8").splitlines()) if log.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    one = Checkout(tmp_path)
    assert one.build("-O3", "-I", "/here/numpy", "-isystem", "/here/nanobind") == 0
    assert one.compiled == 1
    return one


def test_a_second_build_in_another_folder_compiles_nothing(checkout):
    (checkout.root / "elsewhere").mkdir()
    given = ("-O3", "-I/there/numpy", "-isystem", "/there/nanobind")
    assert checkout.build(*given, to="elsewhere/unit.o") == 0
    assert checkout.compiled == 1
    assert (checkout.root / "elsewhere/unit.o").read_text("utf-8") == "object of one"


@pytest.mark.parametrize("changed", ["text", "flags", "compiler"])
def test_a_build_with_anything_changed_compiles_again(checkout, changed):
    if changed == "text":
        checkout.write("unit.cpp", "two")
    elif changed == "compiler":
        checkout.write("version", "12.3")
    assert checkout.build("-O2" if changed == "flags" else "-O3") == 0
    assert checkout.compiled == 2


def test_what_was_compiled_before_a_change_is_still_kept_after_it(checkout):
    checkout.write("unit.cpp", "two")
    checkout.build("-O3")
    checkout.write("unit.cpp", "one")
    assert checkout.build("-O3") == 0
    assert checkout.compiled == 2
    assert (checkout.root / "unit.o").read_text("utf-8") == "object of one"


def test_the_compilers_failure_is_that_of_the_build_and_nothing_is_kept(checkout):
    checkout.write("unit.cpp", "broken")
    assert checkout.build("-O3") == 3
    assert len(list((checkout.root / "objects").iterdir())) == 1


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    one = Checkout(tmp_path)
    one.write("objects", "a file where the folder would be")
    assert one.build("-O3") == one.build("-O3") == 0
    assert one.compiled == 2

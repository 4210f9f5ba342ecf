"""Small faults at places drawn by lot among the lines that plain tests execute.

`nox -s mutants -- --drawn` puts in 60 of Python, 20 of C++ and 20 of the page's JavaScript, one
after the other, and runs the tests that execute the place: those of `pytest`, and where they pass
all their cases. A place is drawn by a hash of its text, so that it stays while other code changes.
A fault that no test notices must be in `explained.py`, with the reason. One line of
JSON per fault goes to `--results`, which a second call takes up; `--lines` keeps what is executed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack import executed_lines
from attack.explained import EXPLAINED
from attack.one_change import changes
from mutants import LEFT_OUT, ROOT, Copy, Mutant

SEED = "1"
AMOUNTS = {"py": 60, "cpp": 20, "js": 20}
TIERS: dict[str, list[str]] = {"plain": [], "full": ["--full"]}
LONGEST = 600.0  # seconds for the tests of one fault in one tier
HANGING = 120  # seconds for one test: a fault that makes it hang is noticed
# Of C++ only how long all tests of a file take is known: these notice most, and early.
FIRST = ("kernels/test_fused_numbers.py", "test_semantics_masks.py", "test_semantics_numbers.py")
FIRST += ("test_semantics_layout.py", "test_gradients.py", "kernels/test_fused_bytes.py")


class Drawn(NamedTuple):
    """One fault: `old` at a place of a file becomes `new`."""

    language: str
    file: str
    line: int
    start: int
    old: str
    new: str
    before: str  # the whole line
    tests: list[str]

    @property
    def name(self) -> str:
        short = " ".join(self.before.split())
        return f"{Path(self.file).name}: {short}: {' '.join(self.old.split())} -> {self.new}"


def drawn(tree: Path, lines: executed_lines.Lines) -> Iterator[Drawn]:
    """Every executed line of one language with one of its changes, in the order of the lot."""
    places = []
    for file, executed in lines.items():
        data = (tree / file).read_bytes()
        text, found, seen = data.splitlines(), {}, Counter()
        for change in changes(file, data):
            found.setdefault(change.line, []).append(change)
        for number, of_line in sorted(found.items()):
            line = text[number - 1].decode()
            seen[line] += 1
            if str(number) in executed:
                lot = digest(file, line, str(seen[line]))
                one = min(
                    of_line, key=lambda c: digest(lot, str(c.start - of_line[0].start), c.new)
                )
                places.append((lot, file, one, line, data, executed[str(number)]))
    for _, file, one, line, data, tests in sorted(places, key=lambda place: place[0]):
        language = {".py": "py", ".js": "js"}.get(Path(file).suffix, "cpp")
        old, new = data[one.start : one.end].decode(), one.new.decode()
        yield Drawn(language, file, one.line, one.start, old, new, line, tests)


def digest(*words: str | bytes) -> str:
    told = [SEED.encode(), *(one if isinstance(one, bytes) else one.encode() for one in words)]
    return hashlib.sha256(b"\0".join(told)).hexdigest()


class Bench:
    """A copy of the repository with its native module, in which faults are put and tests run."""

    def __init__(self, folder: Path, module: Path | None) -> None:
        self.copy = None if module else Copy(folder, [])
        self.tree = folder / "tree"
        if module:
            shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT)
            shutil.copy2(module, self.tree / "src/regard")
        self.environment = {name: x for name, x in os.environ.items() if name[:7] != "REGARD_"}
        self.environment |= {"PYTHONPATH": str(self.tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        self.fails_anyway: dict[str, bool] = {}

    def noticed(self, one: Drawn) -> tuple[str, str] | None:
        """The tier whose tests fail and the first that does; None if the fault does not compile."""
        for tier, options in TIERS.items():
            for tests in stages(one):
                without: list[str] = []
                while True:
                    with self.put(one) as fits:
                        if not fits:
                            return None
                        failing = self.failing(tests, [*options, *without])
                    if "::" not in failing or not self.fails_without(failing, options):
                        break
                    without += ["--deselect", failing]
                if failing:
                    return tier, failing
        return "none", ""

    @contextmanager
    def put(self, one: Drawn) -> Iterator[bool]:
        path = self.tree / one.file
        data = path.read_bytes()
        end = one.start + len(one.old.encode())
        wrong = data[: one.start] + one.new.encode() + data[end:]
        if self.copy and one.language == "cpp":
            below = str(Path(one.file).relative_to("src/regard"))
            fault = Mutant("", "", below, data.decode(), wrong.decode(), "", "")
            with self.copy.changed(fault, self.copy.targets[0]) as fits:
                yield fits
            return
        path.write_bytes(wrong)
        yield True
        path.write_bytes(data)

    def fails_without(self, test: str, options: list[str]) -> bool:
        """Whether a test fails without the fault too."""
        if test not in self.fails_anyway:
            self.fails_anyway[test] = bool(self.failing([test], options))
        return self.fails_anyway[test]

    def failing(self, tests: list[str], options: list[str]) -> str:
        """The first of these tests that fails, or how their process ended; empty if all pass."""
        listed = self.tree / "listed"
        listed.write_text("\n".join(tests), "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--tb=no", "-rfE"]
        command += ["-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANGING}"]
        command += ["-o", "faulthandler_exit_on_timeout=true", *options, f"@{listed}"]
        process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # what the tests leave behind ends with them
        )
        late = threading.Timer(LONGEST, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        said = process.communicate()[0].decode(errors="replace")
        late.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.M)
        if found:
            return found[1]
        tested = re.search(r"^[.sxX]+", said, re.M)
        passed = process.returncode in (0, 5)  # 5: these tests have no case in this tier
        late_but_right = process.returncode == -signal.SIGKILL and tested
        return "" if passed or late_but_right else f"the process ends with {process.returncode}"


def stages(one: Drawn) -> list[list[str]]:
    """The tests that execute a fault, those first that notice most in the least time."""
    if one.language == "js":
        return [list(executed_lines.NODE_TESTS), ["tests/views/report/test_report_browser.py"]]
    if one.language == "cpp":
        return [[f"tests/compute/{file}" for file in FIRST], list(executed_lines.CPP_TESTS)]
    return [one.tests[:40], one.tests[40:]] if len(one.tests) > 40 else [one.tests]


def table(found: list[dict[str, str]]) -> str:
    rows = ["| language | drawn | noticed by plain | by --full only | explained | unnoticed |"]
    rows.append("|---|---|---|---|---|---|")
    for language in AMOUNTS:
        tiers = [one["tier"] for one in found if one["language"] == language]
        own = [
            one["name"] for one in found if one["language"] == language and one["tier"] == "none"
        ]
        known = sum(name in EXPLAINED for name in own)
        counts = [len(tiers), tiers.count("plain"), tiers.count("full"), known, len(own) - known]
        rows.append(f"| {language} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def main() -> int:
    """1 if a fault is neither noticed nor explained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", nargs="+", default=list(AMOUNTS), choices=list(AMOUNTS))
    parser.add_argument("--results", type=Path, help="a file of JSON lines")
    parser.add_argument("--lines", type=Path, help="a file with what is executed")
    parser.add_argument("--module", type=Path, help="a native module that is built already")
    asked = parser.parse_args()
    results, found = asked.results, []
    if results and results.exists():
        found = [json.loads(one) for one in results.read_text("utf-8").splitlines()]
    with tempfile.TemporaryDirectory(prefix="regard-drawn-") as place:
        bench = Bench(Path(place), asked.module)
        if asked.lines and asked.lines.exists():
            lines = json.loads(asked.lines.read_text("utf-8"))
        else:
            lines = executed_lines.measured(bench.tree, bench.environment, Path(place))
        if asked.lines:
            asked.lines.write_text(json.dumps(lines), "utf-8")
        for language in asked.languages:
            for row in rows_of(bench, language, lines[language], found):
                print(*row.values(), flush=True)
                found.append(row)
                if results:
                    with results.open("a", encoding="utf-8") as file:
                        print(json.dumps(row), file=file)
    unknown = [one for one in found if one["tier"] == "none" and one["name"] not in EXPLAINED]
    for one in unknown:
        print(f"unnoticed: {one['place']}: {one['name']}")
    print(table(found))
    return bool(unknown)


def rows_of(
    bench: Bench, language: str, lines: executed_lines.Lines, found: list[dict[str, str]]
) -> Iterator[dict[str, str]]:
    """What became of each fault that is drawn and not yet among those found."""
    done = {one["name"] for one in found if one["language"] == language}
    count = 0
    for one in drawn(bench.tree, lines):
        if count == AMOUNTS[language]:
            return
        verdict = None if one.name in done else bench.noticed(one)
        count += one.name in done or verdict is not None
        if verdict:
            told = {"language": language, "tier": verdict[0], "by": verdict[1]}
            yield told | {"place": f"{one.file}:{one.line}", "name": one.name}


if __name__ == "__main__":
    sys.exit(main())

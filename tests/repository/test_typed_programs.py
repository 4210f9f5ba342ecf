"""Programs as users write them, right and wrong, seen by mypy --strict and by pyright.

A line that ends in `# wrong: …` must be refused by both checkers, and raises when it runs.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.compute import option_types as options
from regard.compute.loss import LOSS
from regard.explanation.build import OPTIONS, PARTS
from regard.models.multi_head import CALL_OPTIONS
from regard.problems.fields import Fields, PartsOptions

PROGRAMS = Path(__file__).parents[1] / "support" / "typed_programs"
PACKAGE = Path(regard.__file__).parent
NEEDED = {"onnx_deployer": "onnx", "torch_user": "torch", "jax_user": "jax", "tensors": "torch"}
Lines = dict[Path, set[int]]


def programs(kind: str) -> list[Any]:
    return [
        pytest.param(path, marks=pytest.mark.needs(*needed(path)), id=path.stem)
        for path in sorted(PROGRAMS.glob(f"{kind}/*.py"))
    ]


def needed(path: Path) -> list[str]:
    return [NEEDED[path.stem]] if path.stem in NEEDED else []


def refused_by_mypy(files: list[Path], cache: Path) -> Lines:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--output=json"]
    command += [f"--cache-dir={cache}", *map(str, files)]
    path = {} if PACKAGE.parent.name == "site-packages" else {"MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    assert not done.stderr, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    errors = (each for each in found if each["severity"] == "error")
    return _by_file((Path(each["file"]), each["line"]) for each in errors)


def refused_by_pyright(files: list[Path], cache: Path) -> Lines:
    config = cache / "pyrightconfig.json"
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(PACKAGE.parent)]}
    config.write_text(json.dumps(settings | {"include": [str(file) for file in files]}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(config)]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = (each for each in found if each["severity"] == "error")
    return _by_file((Path(each["file"]), each["range"]["start"]["line"] + 1) for each in errors)


def _by_file(places: Iterator[tuple[Path, int]]) -> Lines:
    lines: Lines = {}
    for file, line in places:
        lines.setdefault(file.resolve(), set()).add(line)
    return lines


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(refused_by_mypy, marks=pytest.mark.needs("mypy"), id="mypy"),
        pytest.param(refused_by_pyright, marks=pytest.mark.needs("basedpyright"), id="pyright"),
    ],
)
def refused(request: pytest.FixtureRequest) -> Lines:
    """The lines that a checker refuses, in one run over all programs."""
    known = [path for path in PROGRAMS.glob("*/*.py") if all(map(find_spec, needed(path)))]
    checker: Callable[[list[Path], Path], Lines] = request.param
    return checker(known, request.config.cache.mkdir(checker.__name__))


def marked(path: Path) -> set[int]:
    lines = path.read_text("utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if "# wrong: " in line}


@pytest.mark.parametrize("path", programs("right") + programs("wrong"))
def test_a_checker_refuses_each_mistake_on_its_line_and_nothing_else(
    path: Path, refused: Lines
) -> None:
    assert refused.get(path, set()) == marked(path)


@pytest.mark.parametrize("path", programs("right"))
def test_a_right_program_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", programs("wrong"))
def test_each_mistake_that_a_checker_refuses_raises(path: Path) -> None:
    names: dict[str, Any] = {}
    for statement in ast.parse(path.read_text("utf-8")).body:
        code = compile(ast.Module([statement], []), str(path), "exec")
        if statement.lineno in marked(path):
            with pytest.raises((TypeError, ValueError, AttributeError)):
                exec(code, names)
        else:
            exec(code, names)


def keywords(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        *[
            (each, keywords(regard.attention))
            for each in (options.Plain, options.ForWeights, options.ForLse, options.ForBoth)
        ],
        *[
            (each, keywords(regard.KVCache.attend))
            for each in (
                options.PlainStep,
                options.StepForWeights,
                options.StepForLse,
                options.StepForBoth,
            )
        ],
        (options.WeightsOptions, keywords(regard.weights)),
        (options.SomeGradientOptions, keywords(regard.gradients)),
        (options.SomeLayerGradientOptions, {*CALL_OPTIONS, "kernel", "wrt"}),
        (options.DiagnoseOptions, keywords(regard.diagnose)),
        (options.LabelledOptions, {*keywords(regard.explain), *OPTIONS, *PARTS, *LOSS}),
        (options.ProblemOptions, {*OPTIONS, *PARTS, *LOSS, "softmax", "title"}),
        (options.StepsOptions, {*OPTIONS, *PARTS, *LOSS, "softmax"}),
        (options.LayerOptions, {*CALL_OPTIONS, "kernel"}),
        (Fields, keywords(regard.Problem)),
        (PartsOptions, keywords(regard.Problem)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_the_typed_options_are_those_of_the_signature(typed: type, taken: set[str]) -> None:
    assert set(typed.__annotations__) == taken


@pytest.mark.needs("jax")
def test_the_typed_options_for_jax_are_those_of_the_signature() -> None:
    from regard.interop.jax import Options, dot_product_attention

    assert {*Options.__annotations__, "return_residual"} == keywords(dot_product_attention)

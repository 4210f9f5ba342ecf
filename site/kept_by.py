"""The tests that pages name, as pages: a rule or a promise leads to the code that checks it.

A page names a test as `test_name` or `test_file.py`; on the site both are links. Must not know any
rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FOLDER = "reference/tests"
# A name in backticks that is not a link yet.
NAMED = re.compile(r"(?<!\[)`(?:[\w/]*/)?(test_\w+)(\.py)?`(?!\])")


def linked(page: str, text: str) -> str:
    """The text of a page, with every test that it names as a link; code blocks stay the same."""
    up, before = "../" * page.count("/"), [""]

    def link(found: re.Match[str]) -> str:
        name, is_file = found[1], found[2]
        files = [name] if is_file else homes().get(name, [])
        # A name in several files belongs to the file that was named last.
        file = next((one for one in reversed(before) if one in files), (*files, "")[0])
        if file not in sources():
            return found[0]
        before.extend([file] if is_file else [])
        return f"[{found[0]}]({up}{FOLDER}/{file}.md{'' if is_file else '#' + slug(name)})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if n % 2 else NAMED.sub(link, part) for n, part in enumerate(parts))


def tests(pages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """A page for each file of tests that one of these texts names, and a list of them."""
    named = {found for text in pages for found in NAMED.findall(text)}
    files = {name for name, is_file in named if is_file}
    files |= {file for name, _ in named for file in homes().get(name, ())}
    rows = ""
    for file in sorted(files & sources().keys()):
        path, tree = sources()[file]
        about = (ast.get_docstring(tree) or file).partition("\n")[0]
        text = f"# {path.name}\n\n`{path.relative_to(ROOT).as_posix()}`: {about}\n"
        for function in functions(tree):
            text += f"\n## {sentence(function.name)}\n\n```python\n{source(path, function)}\n```\n"
        yield f"{FOLDER}/{file}.md", text
        rows += f"| [{path.relative_to(TESTS).as_posix()}]({file}.md) | {about} |\n"
    listed = "\n".join(sorted(files & sources().keys()))
    yield (
        f"{FOLDER}/index.md",
        "# Tests\n\nThe files of tests that the rules and promises name. Run one with "
        "`pytest tests/FILE`, or one test with `pytest -k NAME`.\n\n"
        f"| file | what it checks |\n|---|---|\n{rows}\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n",
    )


def sentence(name: str) -> str:
    """The name of a test is a sentence."""
    return name.removeprefix("test_").replace("_", " ").capitalize()


def slug(name: str) -> str:
    """The anchor that MyST makes of this sentence."""
    return sentence(name).lower().replace(" ", "-")


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every file of tests by its name without `.py`."""
    return {
        path.stem: (path, ast.parse(path.read_text("utf-8")))
        for path in sorted(TESTS.rglob("test_*.py"))
    }


@cache
def homes() -> dict[str, list[str]]:
    """The files in which a test of a name is."""
    found: dict[str, list[str]] = {}
    for file, (_, tree) in sources().items():
        for function in functions(tree):
            found.setdefault(function.name, []).append(file)
    return found


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """The tests of a file, those of classes too."""
    every = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    return sorted(
        (one for one in every if one.name.startswith("test_")), key=lambda one: one.lineno
    )


def source(path: Path, function: ast.FunctionDef) -> str:
    """The lines of a test, with its decorators."""
    first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
    lines = path.read_text("utf-8").splitlines()[first - 1 : function.end_lineno]
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[indent:] for line in lines)

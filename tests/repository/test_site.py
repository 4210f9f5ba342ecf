"""The site: its pages are complete, and, with --full, it builds and can be read by anyone."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
from places import ROOT

PAGES = ROOT / "site" / "pages"
CHAPTERS = sorted(path for path in (PAGES / "learn").glob("*.md") if path.stem != "index")
CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="needs the repository")


def in_toctree(page: Path) -> list[str]:
    """The pages that a page leads to."""
    lists = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    lines = [line for text in lists for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_has_three_exercises_each_with_an_answer_and_a_check(chapter: Path):
    before, exercises = chapter.read_text("utf-8").split("\n## Exercises\n")
    assert ".explain(" in before
    parts = re.split(r"^### (\d)\. .+$", exercises, flags=re.MULTILINE)
    assert parts[1::2] == ["1", "2", "3"]
    for part in parts[2::2]:
        assert "\n```python\n" in part  # where a reader begins
        cells = CELL.findall(part)
        answers = [n for n, cell in enumerate(cells) if cell.startswith(":tags: [hide-input, ans")]
        assert len(answers) == 1
        assert any("assert" in cell for cell in cells[answers[0] + 1 :])


def test_the_course_and_the_documents_are_listed_once():
    for folder in ("learn", "classroom"):
        pages = {path.stem for path in (PAGES / folder).glob("*.md")} - {"index"}
        listed = in_toctree(PAGES / folder / "index.md")
        assert sorted(listed) == sorted(pages)
    assert 10 <= len(CHAPTERS) <= 13


def test_every_page_of_the_documentation_is_on_the_site():
    listed = [*in_toctree(PAGES / "how-to/index.md"), *in_toctree(PAGES / "reference/index.md")]
    found = {Path(name).name for name in listed if name.startswith("../docs/")}
    assert found == {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_every_public_name_is_in_the_reference():
    page = (PAGES / "reference" / "api.rst").read_text("utf-8")
    listed = set(re.findall(r"^   (?!interop)([A-Za-z][\w.]*)$", page, re.MULTILINE))
    modules = ("masks", "normalizers", "positions", "scores", "testing", "textbook", "models")
    names = {name for name in regard.__all__ if name not in (*modules, "__version__")}
    for module in modules:
        names |= {f"{module}.{name}" for name in getattr(regard, module).__all__}
    # Types of annotations, and of what no caller makes.
    apart = {"masks.Verdict", "models.FAMILIES", "normalizers.Normalizer", "positions.Positions"}
    assert listed == names - {*apart, "scores.Score"}


def test_rules_and_promises_lead_to_the_tests_that_check_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "site"))
    kept_by = importlib.import_module("kept_by")
    pages = [f"docs/{name}.md" for name in ("semantics", "guarantees", "diagnose")]
    texts = {page: (ROOT / page).read_text("utf-8") for page in pages}
    made = dict(kept_by.tests(texts.values()))
    for page, text in texts.items():
        linked = kept_by.linked(page, text)
        for name, place, anchor in re.findall(r"\[`([^`]+)`\]\((\.\./[^)#]+)#?([^)]*)\)", linked):
            shown = made[place.removeprefix("../")]
            if name.endswith(".py"):
                assert (shown.startswith(f"# {Path(name).name}\n"), anchor) == (True, "")
                continue
            before, code, _ = shown.partition(f"def {name}(")
            heading = before.rpartition("\n## ")[2].partition("\n")[0]
            assert (code != "", heading.lower().replace(" ", "-")) == (True, anchor)
        # Every test that is named is a link.
        assert set(re.findall(r"`(test_\w+)`", text)) == set(re.findall(r"\[`(test_\w+)`", linked))
    # A name that two files have leads to the one that was named last.
    both = kept_by.linked("docs/x.md", "`test_dask.py` `test_the_bytes_are_those_of_one_call`")
    assert both.endswith("(../reference/tests/test_dask.md#the-bytes-are-those-of-one-call)")


# --- the site itself -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error and every cell executed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "site" / "build.py"), "--to", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder / "html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUM)))
    # No name of a host leads anywhere, so that a page that needs one is seen to fail.
    alone = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
    alone.append("--allow-file-access-from-files")  # for axe, which looks into frames
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=alone)
        yield browser
        browser.close()


Open = Callable[[str, int, str], Any]
full = [
    pytest.mark.full,
    pytest.mark.needs("sphinx", "chromium", "playwright", "axe", "minilm", "matplotlib", "dask"),
]


@pytest.fixture
def open_page(site: Path, browser: Any) -> Iterator[Open]:
    """Open a page of the site, `width` wide; asking anything else than its files is an error."""
    asked: list[str] = []
    contexts = []

    def opened(name: str, width: int, scheme: str) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: asked.append(f"failed: {request.url}"))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    elsewhere = [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))]
    assert elsewhere == []


class TestBuilt:
    pytestmark = full

    def test_every_page_is_there_and_no_link_leads_nowhere(self, site: Path) -> None:
        pages = {
            path: path.read_text("utf-8")
            for path in site.rglob("*.html")
            if "_static" not in path.parts
        }  # templates of the theme
        assert len(pages) > 350
        for path, text in pages.items():
            for link in re.findall(r'(?:href|src)="([^"#?]+)', text):
                if not re.match(r"[a-z]+:", link):
                    assert (path.parent / link).resolve().exists(), f"{path.name}: {link}"

    @pytest.mark.parametrize("width", [390, 800, 1280])
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_a_page_fits_its_width_and_breaks_no_rule_of_axe(
        self, open_page: Open, width: int, scheme: str
    ) -> None:
        from axe_core_python.sync_playwright import Axe

        for name in (
            "index",
            "learn/gradients",
            "classroom/animals",
            "docs/training",
            "gallery/index",
            "bounds",
            "reference/mistakes/softmax_over_queries",
            "reference/tests/test_semantics_masks",
            "reference/api/regard.attention",
        ):
            page = open_page(name, width, scheme)
            page.evaluate("async () => { await window.MathJax?.startup?.promise }")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            found = Axe().run(page)["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], name

    def test_a_report_in_a_page_opens_its_numbers_and_follows_the_colours(
        self, open_page: Open
    ) -> None:
        page = open_page("classroom/she-likes-coffee", 1280, "dark")
        page.locator("iframe").first.scroll_into_view_if_needed()
        report = page.frame_locator("iframe").first
        report.locator('[data-step="output"] [role=gridcell]').nth(2).click()
        assert report.locator("#why .value").text_content() == "0.50530294"
        dark = report.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
        assert all(int(number) < 80 for number in re.findall(r"\d+", dark)[:3])

    def test_every_example_is_valid_in_the_schema_and_a_mistyped_key_is_not(
        self, site: Path, tmp_path: Path
    ) -> None:
        from jsonschema import Draft202012Validator

        schema = json.loads((site / "problem.schema.json").read_text("utf-8"))
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        for path in (ROOT / "examples").glob("*.toml"):
            read = tomllib.loads(path.read_text("utf-8"))
            saved = tmp_path / f"{path.stem}.json"
            regard.save_problem(regard.load_problem(path), saved)
            for data in (read, json.loads(saved.read_text("utf-8"))):
                assert [one.message for one in validator.iter_errors(data)] == [], path.name
                for wrong in ({"qeries": 1}, {"options": {"causal": "yes"}}, {"heads": 0}):
                    assert not validator.is_valid(data | wrong)

    def test_a_chapter_as_a_notebook_leaves_what_a_reader_writes_open(self, site: Path) -> None:
        import nbformat

        found = {path.stem: path for path in site.rglob("learn-*.ipynb")}
        assert found.keys() == {f"learn-{path.stem}" for path in CHAPTERS}
        for path in found.values():
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
            code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
            assert sum("..." in cell and "assert" not in cell for cell in code) >= 3, path.name
            assert not any(cell.startswith(":tags:") for cell in code)

    def test_formulas_are_drawn_without_a_network(self, open_page: Open) -> None:
        page = open_page("learn/scores", 1280, "light")
        page.locator("mjx-container svg").first.wait_for()

"""A diagnosis in a real browser: it stays alone, fits, can be read, and text stays text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
import wrong_attentions as wrong
from pages import ELEMENTS, PATIENCE, PAYLOADS, WIDTHS, violations
from regard import Diagnosis
from regard.views import diagnosis as view
from verdicts import FUNCTIONS, LETTERS, diagnosed, filled

pytestmark = pytest.mark.needs("chromium", "playwright")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def found() -> dict[str, Diagnosis]:
    projected = wrong.multihead("heads_split_without_transpose")
    return {**diagnosed(), "projected": regard.diagnose(projected)}


NAMES = [*FUNCTIONS, "projected"]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """A page of a diagnosis; in the end it has asked for nothing and complained of nothing."""
    requests: list[str] = []
    complaints: list[str] = []
    contexts = []

    def open_one(diagnosis: Diagnosis, width: int = 1440, scheme: str = "light") -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        diagnosis.to_html(path)
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(path.as_uri())
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert [url for url in requests if not url.startswith(tmp_path.as_uri())] == []
    assert complaints == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_hangs_over_the_side_of_the_page(
    name: str, found: dict[str, Diagnosis], open_page: Open
) -> None:
    for width in WIDTHS:
        page = open_page(found[name], width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.needs("axe")
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing(
    name: str, width: int, scheme: str, found: dict[str, Diagnosis], open_page: Open
) -> None:
    assert violations(open_page(found[name], width, scheme)) == []


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_text_from_outside_stays_text(
    payload: str, found: dict[str, Diagnosis], open_page: Open
) -> None:
    for name in ("wrong", "fragile", "not_callable"):
        trees = []
        for text in ("benign", payload):
            data = filled(found[name].to_json(), text)
            page = open_page(Diagnosis.from_json(data), width=390)
            trees.append([one for one in page.evaluate(ELEMENTS) if one.lower() not in LETTERS])
            assert page.evaluate("typeof pwned") == "undefined"
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert trees[0] == trees[1]


INSIDE = """() => [...document.querySelectorAll("td.differs")].map((td) => {
  const own = td.getBoundingClientRect(), text = document.createRange();
  text.selectNodeContents(td);
  const drawn = text.getBoundingClientRect();
  return drawn.left >= own.left && drawn.right <= own.right + .5;
})"""


@pytest.mark.parametrize("width", WIDTHS)
def test_what_differs_is_marked_within_its_cell(
    width: int, found: dict[str, Diagnosis], open_page: Open
) -> None:
    inside = open_page(found["wrong"], width).evaluate(INSIDE)
    assert len(inside) > 10
    assert all(inside)


def test_a_script_that_got_into_the_file_would_not_run(
    browser: Any,
    tmp_path: Path,
    found: dict[str, Diagnosis],
) -> None:
    path = tmp_path / "page.html"
    text = view.html(found["wrong"])
    path.write_text(text.replace("</body>", "<script>window.stranger = 1</script></body>"), "utf-8")
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("window.stranger") is None
    assert any("Content Security Policy" in one for one in said)
    page.close()


def test_on_paper_everything_is_still_there(found: dict[str, Diagnosis], open_page: Open) -> None:
    page = open_page(found["wrong"])
    page.emulate_media(media="print")
    for place in ("h1", ".lines", ".facts", ".compared", ".states"):
        assert page.locator(place).first.is_visible()

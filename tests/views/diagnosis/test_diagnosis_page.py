"""A diagnosis as one HTML file: what it holds, what stands out, and that text stays text."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import regard
from commands import CliRunner
from regard import Diagnosis
from regard.cli import app
from regard.diagnosis.result import Example, Finding, Named, Shown
from regard.errors import ProblemError
from regard.explanation.notation import format_number
from regard.views import diagnosis as view
from regard.views.diagnosis.story import tell
from regard.views.diagnosis.terminal import print_diagnosis
from verdicts import FUNCTIONS, LETTERS, diagnosed, filled

SOURCE = """
import numpy as np

def wrong(q, k, v):
    s = q @ k.swapaxes(-1, -2)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v

def marks(q, k, v):
    open("was-called", "w").close()
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Diagnosis]:
    """One diagnosis of each verdict."""
    return diagnosed()


class Page(HTMLParser):
    """The elements of a page, its tables by their captions, and all of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.tables: dict[str, list[list[tuple[str, str]]]] = {}
        self.texts: list[str] = []
        self.style = ""
        self._inside: list[str] = []
        self.feed(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = sorted(name for name, _ in attributes if name != "data-pad")
        self.elements.append((tag, tuple(names)))
        if tag not in ("meta", "link"):
            self._inside.append(tag)
        if tag == "table":
            self._rows: list[list[tuple[str, str]]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag == "td":
            self._rows[-1].append((str(dict(attributes).get("class") or ""), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag
        if tag == "table":
            self.tables[self._caption] = [row for row in self._rows[1:] if row]

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            self.style += data
        elif "caption" in self._inside:
            self._caption = data
        else:
            self.texts.append(data)
            if "td" in self._inside:
                style, text = self._rows[-1][-1]
                self._rows[-1][-1] = (style, text + data)


# --- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_verdict_makes_one_small_file_without_script_that_names_nothing_outside(
    name: str, found: dict[str, Diagnosis]
) -> None:
    text = view.html(found[name])
    assert len(text.encode()) < 120_000
    assert re.findall(r"""\b(?:src|href|action)\s*=\s*["']([^"']*)""", text) == ["data:,"]
    assert "url(" not in text
    assert not re.search(r"https?://|<script|@import", text)
    assert not any(one.startswith("on") for _, names in Page(text).elements for one in names)


def test_the_policy_allows_the_style_of_the_page_and_nothing_else(
    found: dict[str, Diagnosis],
) -> None:
    text = view.html(found["wrong"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(Page(text).style.encode()).digest()).decode()
    assert policy[1].replace("&#39;", "'").split("; ") == [
        "default-src 'none'",
        "script-src 'none'",
        f"style-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_page_says_everything_that_the_diagnosis_says(
    name: str, found: dict[str, Diagnosis]
) -> None:
    one = found[name]
    text = Page(view.html(one)).text
    said = [one.summary, f"{one.calls} calls", one.adapter]
    for part in one.mistakes:
        said += [part.name, part.why, part.numpy, part.torch]
    said += [part.text for part in (*one.assumptions, *one.findings, *one.otherwise)]
    tried = one.verdict == "not_callable"
    said += [*one.asked, *(part.why if tried else part.name for part in one.not_asked)]
    said += [line.text for line in one.lines if any(each.makes for each in one.lines)]
    for sentence in said:
        assert " ".join(sentence.split()) in text


def test_each_line_opens_the_numbers_of_its_steps_and_the_wrong_one_is_open(
    found: dict[str, Diagnosis],
) -> None:
    text = view.html(found["wrong"])
    tables = Page(text).tables
    assert text.count("<details open>") == 1
    for line in found["wrong"].lines:
        for step in line.makes:
            labels = ("right", "wrong") if step.departs else ("the same in both",)
            for label, matrix in zip(labels, (step.right, step.wrong), strict=False):
                rows = tables[f"{step.step}, {label}"]
                assert matrix is not None
                for i, row in enumerate(matrix):
                    for j, number in enumerate(row):
                        style, shown = rows[i][j]
                        sign, _, digits = shown.rpartition(" ")
                        apart = label == "wrong" and not np.isclose(number, step.right[i][j])
                        assert digits == format_number(number, 4)
                        assert (sign == "≠") == ("differs" in style) == apart


def test_a_finite_number_where_a_key_should_be_hidden_differs() -> None:
    hidden = Shown("masked", "A_m", "A_m", ((1.0, -np.inf),), ((1.0, -0.3),), True)
    (step,) = example_of(hidden)
    assert step.wrong is not None
    assert [cell.mark for cell in step.wrong.rows[0]] == ["", "≠"]
    assert step.wrong.rows[0][1].hint == "should be −∞"


def test_numbers_that_differ_late_have_as_many_decimals_as_show_it() -> None:
    (step,) = example_of(Shown("weights", "P", "P", ((0.25, 0.75),), ((0.2500003, 0.75),), True))
    assert step.wrong is not None
    assert step.wrong.rows[0][0].text == "0.2500003"
    assert step.wrong.rows[0][1].mark == ""


def test_steps_stand_in_the_order_of_the_textbook_and_the_same_is_shown_once() -> None:
    wrong_output = Shown("output", "O", "O", ((1.0,),), ((2.0,),), True)
    weights = Shown("weights", "P", "P", ((1.0,),), ((1.0,),))
    first, second = example_of(wrong_output, weights)
    assert (first.name, first.wrong) == ("weights", None)
    assert (second.name, second.departs) == ("output", True)


def example_of(*steps: Shown) -> Any:
    given = (Shown("queries", "Q", "Q is given", ((1.0,),)),)
    example = Example("small", given, steps)
    named = Named("a", "one head", "wrong", "a", "b", steps[0].step, "c", "d", example=example)
    (part,) = tell(Diagnosis("f", "wrong", "f is wrong", mistakes=(named,))).parts
    assert part.example is not None
    assert [stop.name for stop in part.way if stop.place == "departs"] == [steps[0].step]
    return part.example.steps


# --- text from outside ---------------------------------------------------------------------------

PAYLOADS = [
    "</style><img src=x onerror=y>",
    "<!--<script>",
    '"><b a="',
    "' onclick='pwned=1",
    "{{ 7 * 7 }}{% raw %}",
    "a\u2028b\u202e",
    "&lt;b&gt; &amp;",
    "\x00\x1b[31m",
    "x" * 10_000,
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_text_makes_an_element(name: str, payload: str, found: dict[str, Diagnosis]) -> None:
    def elements(text: str) -> Any:
        page = Page(view.html(Diagnosis.from_json(filled(found[name].to_json(), text))))
        return [one for one in page.elements if one[0] not in LETTERS]

    assert elements(payload) == elements("benign")


@pytest.mark.parametrize("payload", ["\x1b]0;title\x07", "\u202e", "[bold]x[/bold]"])
def test_no_text_reaches_a_terminal_as_more_than_text(
    payload: str, found: dict[str, Diagnosis]
) -> None:
    for one in found.values():
        console = Console(width=90, record=True, color_system=None, file=io.StringIO())
        print_diagnosis(Diagnosis.from_json(filled(one.to_json(), payload)), console)
        shown = console.export_text()
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)
        assert not payload.startswith("[") or payload in shown


def test_the_name_of_an_error_is_text_as_well() -> None:
    kind = type("<i>Odd\x1b", (Exception,), {})

    def f(q: Any, k: Any, v: Any) -> Any:
        raise kind("</bdi><b>")

    page = Page(view.html(regard.diagnose(f)))
    assert "<i>Odd\\x1b: </bdi><b>" in page.text
    assert not {"i", "b"} & {tag for tag, _ in page.elements}


# --- files, notebooks, the command ---------------------------------------------------------------


def test_a_page_of_regard_is_replaced_and_another_file_only_by_force(
    tmp_path: Path, found: dict[str, Diagnosis]
) -> None:
    path = tmp_path / "page.html"
    for verdict in ("fragile", "right"):
        found[verdict].to_html(path)
        assert path.read_text("utf-8") == view.html(found[verdict])
    path.write_text("mine")
    with pytest.raises(ProblemError, match=r"page\.html: already exists"):
        found["fragile"].to_html(path)
    assert path.read_text("utf-8") == "mine"
    found["fragile"].to_html(path, force=True)
    assert path.read_text("utf-8") == view.html(found["fragile"])
    with pytest.raises(ProblemError, match="there is no folder"):
        found["fragile"].to_html(tmp_path / "none" / "page.html")
    link = tmp_path / "link.html"
    link.symlink_to(path)
    with pytest.raises(ProblemError, match="never replaced"):
        found["fragile"].to_html(link, force=True)


def test_a_diagnosis_that_was_sent_as_json_makes_the_same_page(
    found: dict[str, Diagnosis],
) -> None:
    for one in found.values():
        assert view.html(Diagnosis.from_json(one.to_json())) == view.html(one)


def test_a_notebook_gets_the_page_in_a_frame_that_may_do_nothing(
    found: dict[str, Diagnosis],
) -> None:
    bundle = found["wrong"]._repr_mimebundle_()
    assert bundle["text/plain"] == repr(found["wrong"])
    frames: list[dict[str, str | None]] = []

    class Frames(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            frames.append({"tag": tag, **dict(attributes)})

    Frames().feed(bundle["text/html"])
    (frame,) = frames
    assert (frame["tag"], frame["sandbox"]) == ("iframe", "")
    assert frame["srcdoc"] == view.html(found["wrong"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["diagnose", *words], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_html_writes_the_page_and_prints_the_verdict_alone(folder: Path) -> None:
    done = call("mine.py:wrong", "--html", "page.html")
    assert done.exit_code == 1
    assert done.stdout.startswith("wrong is wrong at line 6: the scores are not scaled")
    assert done.stderr == "saved page.html\n"
    assert "the scores are not scaled" in (folder / "page.html").read_text("utf-8")
    done = call("mine.py:wrong", "--html", "page.html", "--force", "--json")
    assert done.stdout.startswith('{"function": "wrong"')


def test_a_page_that_is_there_is_refused_before_the_function_runs(folder: Path) -> None:
    (folder / "page.html").write_text("mine")
    done = call("mine.py:marks", "--html", "page.html")
    assert done.exit_code == 2
    assert "page.html: already exists; pass --force to replace it" in done.stderr
    assert (folder / "page.html").read_text() == "mine"
    assert not (folder / "was-called").exists()
    assert call("mine.py:marks", "--html", "page.html", "--force").exit_code == 2  # gives nothing
    assert (folder / "was-called").exists()
    assert "could not be called" in (folder / "page.html").read_text("utf-8")


@pytest.mark.parametrize("option", ["--open", "--force"])
def test_what_goes_with_html_only_is_refused_without_it(option: str, folder: Path) -> None:
    done = call("mine.py:marks", option)
    assert done.exit_code == 2
    assert f"{option} goes with --html only" in done.stderr
    assert not (folder / "was-called").exists()


def test_open_shows_the_page_in_the_browser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert call("mine.py:wrong", "--html", "page.html", "--open").exit_code == 1
    assert opened == [(folder / "page.html").as_uri()]


def test_a_finding_about_the_function_is_told(found: dict[str, Diagnosis]) -> None:
    one = replace(found["right"], findings=(Finding("prints", "f prints: hello"),))
    assert "f prints: hello." in Page(view.html(one)).text

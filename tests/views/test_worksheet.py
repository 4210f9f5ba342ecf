"""The worksheet: blank is what a reader computes, and every answer is on a sheet of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from commands import CliRunner
from regard.cli import app
from regard.errors import DtypeError, OptionError, ProblemError
from regard.problems.files import example_names

TABLE = re.compile(r"<table>\n<caption>(.+?)</caption>(.+?)</table>", re.DOTALL)


def tables(page: str) -> dict[str, str]:
    return dict(TABLE.findall(page))


def numbers(table: str) -> list[float]:
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table.partition("<tbody>")[2])
    return [float(cell.replace("−", "-")) for cell in cells if cell]


@pytest.mark.parametrize("name", example_names())
def test_what_is_given_has_numbers_and_what_is_computed_has_them_as_answers_only(name: str):
    explanation = regard.explain(regard.load_problem(name))
    every = tables(explanation.to_worksheet(digits=4))
    copies = {one.removesuffix(", again"): every[one] for one in every if one.endswith(", again")}
    for step, copy in copies.items():  # of what is given it has the numbers, and else none
        assert (
            bool(numbers(re.sub(r'<td class="hidden".*?</td>', "", copy)))
            == explanation.steps[step].given
        )
    found = {one: table for one, table in every.items() if not one.endswith(", again")}
    answered = {one.removesuffix(", answer") for one in found if one.endswith(", answer")}
    assert {"scores", "weights", "output"} <= answered
    for step in {one.removesuffix(", answer") for one in found}:
        assert explanation.steps[step].given == (step not in answered)
        if step not in answered:
            assert numbers(found[step])
            continue
        assert "blank" in found[step]
        assert not re.search(r"<td[^>]*>[−\d]", found[step])
    weights = explanation["weights"].value[explanation.steps["weights"].value != 0]
    shown = numbers(re.sub(r'<td class="hidden".*?</td>', "", found["weights, answer"]))
    if explanation.heads is None:
        np.testing.assert_allclose(shown, weights, atol=5e-5)


def test_a_hidden_cell_names_its_rule_and_is_not_blank():
    page = regard.explain(regard.load_problem("causal-mask")).to_worksheet()
    row = tables(page)["weights"].split("<tr>")[2]
    assert [row.count('"blank"'), row.count(">causal<")] == [1, 3]


def test_what_all_heads_share_is_on_the_sheet_once():
    rng = np.random.default_rng(0)
    layer = regard.MultiHeadAttention(*rng.normal(size=(3, 4, 4)), heads=2)
    captions = [name for name, _ in TABLE.findall(layer.explain(np.eye(4)[:3]).to_worksheet())]
    assert captions.count("embeddings") == captions.count("W_q") == 1
    assert captions.count("weights") == captions.count("weights, answer") == 2


def test_the_way_back_is_on_it_only_if_asked_for():
    explanation = regard.explain(regard.load_problem("coffee-target"))
    assert "d_W_q" not in tables(explanation.to_worksheet())
    assert {"loss", "d_W_q", "d_W_q, answer"} <= tables(
        explanation.to_worksheet(gradients=True)
    ).keys()


def test_labels_stay_text():
    page = regard.explain([[1.0]], [[1.0]], [[1.0]], query_labels=["<b>"]).to_worksheet()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        (13, {}, OptionError, "queries is 13 × 2; a worksheet has room for 12 × 12"),
        (2, {"digits": 9}, OptionError, "digits is 9"),
        (2, {"digits": 2.0}, DtypeError, "digits must be an int"),
        (2, {"gradients": True}, OptionError, "gradients need a loss"),
    ],
)
def test_what_makes_no_worksheet_is_refused(
    rows: int, options: dict[str, Any], error: type[Exception], said: str
):
    explanation = regard.explain(*np.ones((3, rows, 2)))
    with pytest.raises(error, match=said):
        explanation.to_worksheet(**options)


def test_a_file_is_replaced_only_if_asked_for(tmp_path: Path):
    explanation = regard.explain([[1.0]], [[2.0]], [[3.0]])
    explanation.to_worksheet(tmp_path / "sheet.html")
    explanation.to_worksheet(tmp_path / "sheet.html")
    (tmp_path / "sheet.html").write_text("mine")
    with pytest.raises(ProblemError, match="already exists"):
        explanation.to_worksheet(tmp_path / "sheet.html")
    explanation.to_worksheet(tmp_path / "sheet.html", force=True, digits=2)
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert page == explanation.to_worksheet(digits=2)


def test_the_command_writes_the_same_page(tmp_path: Path):
    path = tmp_path / "sheet.html"
    asked = ["worksheet", "coffee-target", "--gradients", "--digits", "2", "--html", str(path)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    explanation = regard.explain(regard.load_problem("coffee-target"))
    assert path.read_text("utf-8") == explanation.to_worksheet(gradients=True, digits=2)
    assert CliRunner().invoke(app, asked).exit_code == 0  # its own page may be written again
    path.write_text("mine", "utf-8")
    assert CliRunner().invoke(app, asked).exit_code == 2


@pytest.mark.needs("chromium", "playwright", "axe")
@pytest.mark.parametrize("width", [390, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["coffee-target", "look-back"])
def test_it_fits_a_phone_and_breaks_no_rule_of_axe(
    browser: Any, tmp_path: Path, width: int, name: str
):
    from axe_core_python.sync_playwright import Axe

    path = tmp_path / "sheet.html"
    regard.explain(regard.load_problem(name)).to_worksheet(path, gradients=True)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)["violations"]
    page.close()
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []

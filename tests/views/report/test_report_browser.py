"""The report in a real browser: what it shows, what keys and clicks do, and that it stays alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from pages import ELEMENTS, PATIENCE, PAYLOADS, WIDTHS, WORDS, violations
from regard import Explanation
from regard.explanation.notation import format_number
from regard.problems.files import example_names, load_problem
from regard.textbook.positions import GIVEN
from regard.views import report
from regard.views.head_view import Head
from regard.views.report.summary import summary

pytestmark = pytest.mark.needs("chromium", "playwright")

# See test_report_script.py: the page adds from left to right, NumPy in pairs.
CHAIN = 1024 * 2.0**-53
READABLE = 4.5  # the contrast that the WCAG asks of text

Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """A page of an explanation; in the end it has asked for nothing and complained of nothing."""
    requests: list[str] = []
    complaints: list[str] = []
    contexts = []

    def open_one(
        explanation: Any,
        fragment: str = "",
        *,
        width: int = 1440,
        scheme: str = "light",
        **more: Any,
    ) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        report.write(path, explanation, **more.pop("written", {}))
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **more
        )
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(path.as_uri() + (f"#{fragment}" if fragment else ""))
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert [url for url in requests if not url.startswith(tmp_path.as_uri())] == []
    assert complaints == []


def example(name: str) -> Explanation:
    return regard.explain(load_problem(name))


def read(page: Any) -> dict[str, list[Any]]:
    """Every cell of every step as the page has it: index, value, derivation."""
    return page.evaluate(
        """() => {
        const { runs, text } = regard, own = regard.content.layers[regard.state.layer], all = {};
        for (const step of runs().now.steps.values()) {
          const shape = step.axes.map((axis) => own.sizes[axis]);
          let places = [[]];
          for (const size of shape)
            places = places.flatMap((at) => [...Array(size).keys()].map((n) => [...at, n]));
          all[step.name] = places.map((at) => {
            const value = regard.value(step.name, at);
            return [at, Object.is(value, -0) ? "-0" : String(value), text(step.name, at)];
          });
        }
        return all;
      }"""
    )


def tables(page: Any) -> dict[str, list[list[str]]]:
    """The texts in every table of the picture, each opened where it is."""
    return page.evaluate(
        """() => {
        const { shown, runs, state, reveal, shelve, turnBack } = regard, all = {};
        const { shelf, backwards } = state;
        for (const name of runs().now.steps.keys()) {
          reveal(name);
          const view = [...shown.values()].find((one) => one.step.name === name && !one.copy);
          const at = (r, c) => (view.turned ? c : r) * view.columns + (view.turned ? r : c);
          const [rows, columns] = [view.rows, view.columns];
          const sizes = view.turned ? [columns, rows] : [rows, columns];
          const [down, across] = sizes.map((size) => [...Array(size).keys()]);
          all[name] = down.map((r) => across.map((c) => view.cells[at(r, c)].textContent));
        }
        turnBack(backwards);
        shelve(shelf);
        return all;
      }"""
    )


def cell(page: Any, step: str, row: int, column: int) -> Any:
    """A cell of the picture, where it is on the screen."""
    rows = page.locator(f'[data-station="{step}"] [role=row]')
    return rows.nth(row + 1).locator("[role=gridcell]").nth(column)


def assert_reads(text: str, value: float) -> None:
    """A number rounded to as many decimals as are shown of it."""
    if not np.isfinite(value):
        assert text == format_number(value)
    else:
        shown, decimals = float(text.replace("−", "-")), len(text.partition(".")[2])
        width = abs(value) * 0.5 if "e" in text else 0.5 * 10.0**-decimals
        assert abs(shown - value) <= width * (1 + 1e-9), (text, value)


def received(value: str) -> float:
    return float(value.replace("Infinity", "inf"))


def assert_same_numbers(page: Any, explanation: Explanation) -> int:
    """The numbers behind the page, computed by itself, against Python's."""
    found = read(page)
    assert list(found) == list(explanation.steps)
    for name, step in explanation.steps.items():
        ours = np.asarray(step.value, np.float64).ravel()
        theirs = [received(cell[1]) for cell in found[name]]
        largest = float(np.abs(ours[np.isfinite(ours)]).max(initial=1.0))
        np.testing.assert_allclose(theirs, ours, rtol=CHAIN, atol=CHAIN * largest, err_msg=name)
    return sum(map(len, found.values()))


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", example_names())
def test_every_cell_and_every_derivation_on_the_page_is_pythons(name: str, open_page: Open) -> None:
    explanation = example(name)
    found = read(open_page(explanation))
    count = 0
    for step, cells in found.items():
        for index, value, text in cells:
            why = explanation.derive(step, tuple(index))
            np.testing.assert_equal(received(value), why.value)
            assert text == why.text()
            count += 1
    assert count == sum(step.value.size for step in explanation.steps.values()) > 40


@pytest.mark.parametrize("name", example_names())
def test_every_table_shows_every_number_as_exactly_as_there_is_room(
    name: str, open_page: Open
) -> None:
    explanation = example(name)
    page = open_page(explanation)
    few = tables(page)
    page.select_option("[name=digits]", "8")
    many = tables(page)
    assert set(few) == set(many) == set(explanation.steps)
    longer = 0
    for step in few:
        table = explanation.table(step)
        for row, column in np.ndindex(table.value.shape):
            texts = few[step][row][column], many[step][row][column]
            if table.hidden is not None and table.hidden[row, column]:
                assert texts == ("–", "–")
            else:
                for text in texts:
                    assert_reads(text, float(table.value[row, column]))
                longer += len(texts[1]) > len(texts[0])
    assert longer > 0


# --- keys and clicks -----------------------------------------------------------------------------


def test_keys_alone_lead_from_an_output_to_an_embedding(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"))
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.place?.name") == "output":
            break
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    opened = page.locator("#why h2")
    assert opened.text_content() == "O[she, 2]"
    way = []
    for key in ("ArrowDown", "Enter", "Enter", "Enter", "Enter", "Enter", "ArrowDown", "Enter"):
        page.keyboard.press(key)
        way.append(opened.text_content())
    assert way[1:] == [
        "P[she, likes]",
        "Y[she, likes]",
        "As[she, likes]",
        "A[she, likes]",
        "Q[she, 0]",
        "Q[she, 0]",
        "X[she, 1]",
    ]
    assert page.locator("#why .value").text_content() == "0.9"
    for _ in range(6):
        page.keyboard.press("Backspace")
    assert opened.text_content() == "O[she, 2]"
    page.keyboard.press("Escape")
    here = page.evaluate("document.activeElement.place")
    assert here == {"name": "output", "row": 0, "column": 2}


def test_a_click_opens_a_number_and_lights_up_what_made_it(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"))
    cell(page, "output", 0, 2).click()
    assert page.locator("#why .value").text_content() == "0.50530294"
    lit = """(kind) => [...document.querySelectorAll(`[role=gridcell].${kind}`)]
      .map((cell) => [cell.place.name, cell.place.row, cell.place.column])"""
    assert page.evaluate(lit, "open") == [["output", 0, 2]]
    assert page.evaluate(lit, "first") == [["weights", 0, k] for k in range(3)]
    assert page.evaluate(lit, "second") == [["values", k, 2] for k in range(3)]
    assert "O[she, 2] is 0.50530294" in page.locator(".live").text_content()
    page.locator("#why .operand").nth(2).click()
    assert page.locator("#why h2").text_content() == "P[she, likes]"
    page.locator("#why .back").click()
    assert page.locator("#why h2").text_content() == "O[she, 2]"
    page.go_back()  # the browser's own way back
    assert page.locator("#why h2").text_content() == "P[she, likes]"


def test_a_weight_leads_to_its_score_and_to_the_scores_of_its_row(open_page: Open) -> None:
    page = open_page(example("causal-mask"))
    cell(page, "weights", 2, 1).hover()
    lit = """(kind) => [...document.querySelectorAll(`[role=gridcell].${kind}`)]
      .map((cell) => [cell.place.name, cell.place.row, cell.place.column])"""
    assert page.evaluate(lit, "first") == [["scores", 2, 1]]
    assert page.evaluate(lit, "second") == [["scores", 2, k] for k in range(3)]


def test_a_long_axis_leaves_room_for_the_words(open_page: Open) -> None:
    rng = np.random.default_rng(0)
    square = rng.normal(size=(300, 300)) / 300
    weights = {name: square[:, :32] for name in ("W_q", "W_k", "W_v")}
    page = open_page(regard.explain(rng.normal(size=(40, 300)), **weights))
    sizes = {
        name: page.locator(f"[data-station={name}] .drawing").bounding_box()
        for name in ("embeddings", "queries", "scores", "weights")
    }
    assert sizes["scores"]["width"] == pytest.approx(sizes["embeddings"]["width"], abs=2)
    assert sizes["weights"]["width"] > sizes["queries"]["width"] > 80
    assert all(one["height"] > 80 for one in sizes.values())


def test_the_bands_of_words_stay_within_the_page(open_page: Open) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(20, 4)) for _ in range(3)]
    words = [f"word{k}" for k in range(20)]
    explanation = regard.explain(*arrays, causal=True, query_labels=words, key_labels=words)
    page = open_page(explanation, width=800)
    boxes = page.evaluate(
        "[...document.querySelectorAll('.words-above path')].map((one) => one.getBBox())"
        ".map(({ x, width }) => [x, x + width])"
    )
    assert min(left for left, _ in boxes) >= 0
    assert max(right for _, right in boxes) <= 800


def test_on_a_phone_an_opened_number_is_in_sight_above_its_explanation(open_page: Open) -> None:
    page = open_page(example("look-back"), width=390, has_touch=True)
    places = """['.mark.open', '#why'].map((one) =>
      document.querySelector(one).getBoundingClientRect())"""
    for number, name in enumerate(("weights", "d_W_v", "scaled", "d_scores", "output")):
        page.evaluate("(name) => regard.reveal(name)", name)
        first = page.locator(f"[data-step={name}] [role=gridcell]").first
        if number % 2:
            first.press("Enter")
        else:
            first.tap()
        for _ in range(2):  # then the last of those that made it
            opened, sheet = page.evaluate(places)
            assert 0 <= opened["top"] < opened["bottom"] <= sheet["top"], name
            page.locator("#why .operand").last.press("Enter")


# A page whose first look at its size comes when it is asked for.
LATE = """window.ResizeObserver = class extends ResizeObserver {
  observe(element) { window.look = () => super.observe(element); }
}"""
CELL = "document.querySelector('[data-step=output] [role=gridcell]').getBoundingClientRect()"


def test_a_page_that_begins_unseen_is_laid_out_when_it_is_seen(
    open_page: Open, tmp_path: Path
) -> None:
    page = open_page(example("she-likes-coffee"))
    page.add_init_script(LATE)
    frame = "<iframe src='page-0.html' style='width: 0; height: 700px'></iframe>"
    (tmp_path / "frame.html").write_text(frame, "utf-8")
    page.goto((tmp_path / "frame.html").as_uri())
    inside = page.frames[1]
    assert inside.evaluate(CELL)["width"] < 1
    page.evaluate("document.querySelector('iframe').style.width = '900px'")
    inside.evaluate("look()")
    inside.wait_for_function(f"{CELL}.width > 20")


def test_arrow_keys_stay_in_the_table_and_home_and_end_go_to_its_sides(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"))
    page.evaluate(
        """document.querySelector('[data-step="scores"] [role=gridcell][tabindex="0"]').focus()"""
    )
    places = []
    for key in ("ArrowLeft", "ArrowDown", "End", "ArrowRight", "Control+Home", "Control+End"):
        page.keyboard.press(key)
        places.append(
            page.evaluate("[document.activeElement.place.row, document.activeElement.place.column]")
        )
    assert places == [[0, 0], [1, 0], [1, 2], [1, 2], [0, 0], [2, 2]]


def test_where_a_nan_starts_is_said_and_one_click_away(open_page: Open) -> None:
    query, key, value = (np.ones((2, heads, 2, 2)) for heads in (4, 2, 2))
    key[1, 1, 0, 1] = np.nan
    page = open_page(regard.explain(query, key, value))
    page.get_by_text("Open it").click()
    assert page.locator("#why h2").text_content() == "K[key head 1, 0, 1]"
    assert page.locator("#why .value").text_content() == "NaN"
    assert page.input_value("[name=batch]") == "1"
    assert page.locator('[data-step="keys"] .open').text_content() == "NaN"


def test_a_hidden_number_says_which_rule_hides_it(open_page: Open) -> None:
    page = open_page(example("causal-mask"), "cell=weights:0,3")
    assert page.locator("#why .remark").text_content() == "hidden, so 0"
    assert page.locator("#why .rules").text_content() == "causal: hidden (key 3 > position 0)"


# --- edits, switches, links ----------------------------------------------------------------------


def edited(problem: regard.Problem, name: str, index: tuple[int, ...], value: float) -> Explanation:
    array = regard.explain(problem).steps[name].value.copy()
    array[index] = value
    own = name.removeprefix("score_")
    if own != name:
        given = {**vars(problem.score), own: array if array.ndim else float(array)}
        return regard.explain(problem.replace(score=type(problem.score)(**given)))
    return regard.explain(problem.replace(**{name: array}))


def with_mask(**more: Any) -> regard.Problem:
    """A table of yes and no as a mask, causal and a length beside it."""
    rng = np.random.default_rng(6)
    words = ["the", "cat", "sat", "down"]
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=bool)
    return regard.Problem(
        **{
            "title": "A given mask",
            "query_labels": words,
            "embeddings": rng.normal(size=(4, 3)),
            **{name: rng.normal(size=(3, 2)) for name in ("W_q", "W_k", "W_v")},
            "mask": mask,
            "causal": True,
            "lengths": 3,
            **more,
        }
    )


def masked_edit(problem: regard.Problem, row: int, column: int) -> Explanation:
    """The problem with one cell of its mask turned, if that cell is what decides."""
    assert problem.mask is not None
    mask = problem.mask.copy()
    mask[row, column] ^= True
    turned = regard.explain(problem.replace(mask=mask))
    visible = [one.steps["visible"].value[row, column] for one in (regard.explain(problem), turned)]
    return turned if visible[0] != visible[1] else regard.explain(problem)


def test_after_each_of_fifty_turns_of_a_mask_the_page_has_what_python_computes(
    open_page: Open,
) -> None:
    problem = with_mask()
    page = open_page(regard.explain(problem))
    page.locator(".figures summary").click()
    rng = np.random.default_rng(9)
    places = [(int(i), int(j)) for i, j in rng.integers(4, size=(50, 2))]
    turned = 0
    for row, column in places:
        page.evaluate("([i, j]) => regard.turn(i, j)", [row, column])
        expected = masked_edit(problem, row, column)
        turned += expected.problem is not problem
        assert_same_numbers(page, expected)
        assert_same_figures(page, expected)
        if page.locator("[name=reset]").is_enabled():
            page.locator("[name=reset]").click()
    assert 10 < turned < 40
    for step, cells in read(page).items():  # all as it was
        for index, number, text in cells:
            why = regard.explain(problem).derive(step, tuple(index))
            np.testing.assert_equal(received(number), why.value)
            assert text == why.text()


def assert_same_figures(page: Any, explanation: Explanation) -> None:
    """The statistics that stand on the page, against Python's at the same decimals."""
    found = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".figures tbody tr")].map((tr) =>
          [tr.querySelector("th").textContent,
           [...tr.querySelectorAll("td")].map((td) => td.textContent)]))"""
    )
    ours = explanation.statistics()
    for name, one in ours.steps.items():
        numbers = (one.mean, one.variance, one.minimum, one.maximum)
        assert found[name] == [*(format_number(number, 4) for number in numbers), str(one.cells)]
    names = explanation.names.along("S")
    for row, label in enumerate(explanation.names.along("L")):
        rows = ours.rows
        numbers = (rows.entropy[row], rows.effective_keys[row], rows.largest_weight[row])
        key = rows.largest_key[row]
        shown = [format_number(float(number), 4) for number in numbers]
        assert found[label] == [*shown, names[key] if key >= 0 else ""]


def test_a_cell_of_a_given_mask_is_turned_by_keys(open_page: Open) -> None:
    problem = with_mask()
    page = open_page(regard.explain(problem))
    page.evaluate("regard.reveal('visible')")
    page.evaluate(
        """document.querySelector('[data-step="visible"] [role=gridcell][tabindex="0"]').focus()"""
    )
    for key in ("ArrowDown", "ArrowDown", "Space"):
        page.keyboard.press(key)
    texts = [cell(page, "visible", 2, column).text_content() for column in range(4)]
    assert texts == ["1", "1", "1", "0"]
    here = page.evaluate("document.activeElement.place")
    assert here == {"name": "visible", "row": 2, "column": 0}  # the focus stays in the table
    assert "visible[sat, the] is 1" in page.locator(".live").text_content()
    assert_same_numbers(page, masked_edit(problem, 2, 0))
    changed = page.evaluate("[...document.querySelectorAll('.changed')].map((td) => td.place)")
    assert {"name": "visible", "row": 2, "column": 0} in changed
    assert {"masked", "weights", "output"} <= {place["name"] for place in changed}
    assert "scores" not in {place["name"] for place in changed}
    said = page.locator(".status").text_content()
    assert said.startswith("1 cell of a mask changed. The result changes most at O[sat, ")
    page.keyboard.press("Space")
    assert page.locator(".status").text_content() == ""
    page.keyboard.press("Enter")  # opens it, and Enter again turns it
    page.keyboard.press("Enter")
    assert cell(page, "visible", 2, 0).text_content() == "1"
    page.keyboard.press("Enter")
    assert cell(page, "visible", 2, 0).text_content() == "0"


def test_a_hidden_number_is_shown_by_a_click_and_the_link_keeps_that(open_page: Open) -> None:
    problem = with_mask()
    page = open_page(regard.explain(problem))
    cell(page, "weights", 2, 0).click()
    rules = page.locator("#why .rules li").all_text_contents()
    assert rules[0] == "mask: hidden (mask is False here)"
    page.get_by_text("Show this key").click()
    expected = masked_edit(problem, 2, 0)
    assert_same_numbers(page, expected)
    assert (
        page.locator("#why .was")
        .text_content()
        .startswith("It was 0 before the changes; it rose by 0.")
    )
    link = page.url
    assert "mask%7C0%7C8%7C1" in link
    page.goto("about:blank")
    page.goto(link)
    assert_same_numbers(page, expected)
    page.locator("[name=reset]").click()
    assert_same_numbers(page, regard.explain(problem))
    page.goto("about:blank")
    page.goto(link.replace("%7C8%7C1", "%7C8%7C7"))  # a mask has no cell that is 7
    assert page.locator(".status").text_content() == ""


def test_a_cell_that_only_other_rules_hide_cannot_be_turned_and_says_so(open_page: Open) -> None:
    problem = with_mask()
    before = tables(page := open_page(regard.explain(problem), "cell=visible:0,1"))
    remark = "Hidden by causal, which is a rule and not a table: there is no cell to change."
    assert page.locator("#why .decided").text_content() == remark
    assert page.locator("#why .turn").count() == 0
    page.locator('[data-step="visible"] .open').focus()
    page.keyboard.press("Space")
    assert tables(page) == before
    assert not page.locator("[name=reset]").is_enabled()
    page = open_page(regard.explain(problem), "cell=visible:3,3")  # the length alone
    assert page.locator("#why .decided").text_content() == remark.replace("causal", "lengths")
    page = open_page(example("causal-mask"), "cell=weights:0,3")
    assert remark in page.locator("#why").text_content()
    narrow = with_mask(causal=False, lengths=None, window=(0, 0))
    page = open_page(regard.explain(narrow), "cell=masked:0,1")
    assert page.locator("#why .turn").count() == 0
    assert remark.replace("causal", "window") in page.locator("#why").text_content()


def test_a_key_that_the_bias_hides_leads_to_the_bias(open_page: Open) -> None:
    bias = np.zeros((4, 4))
    bias[2, 1] = -np.inf
    problem = with_mask(bias=bias, mask=None)
    page = open_page(regard.explain(problem), "cell=weights:2,1")
    page.locator("#why .operand").click()
    assert page.locator("#why h2").text_content() == "bias[sat, cat]"
    page.fill("#edit", "0.5")
    page.keyboard.press("Enter")
    bias[2, 1] = 0.5
    ours = regard.explain(problem.replace(bias=bias)).steps["weights"].value.ravel()
    found = [received(cell[1]) for cell in read(page)["weights"]]
    np.testing.assert_allclose(found, ours, rtol=CHAIN, atol=CHAIN)


def test_one_cell_of_a_mask_for_all_heads_says_for_whom_it_counts(open_page: Open) -> None:
    problem = regard.Problem(
        embeddings=np.eye(4),
        **{name: np.eye(4) for name in ("W_q", "W_k", "W_v")},
        heads=2,
        mask=np.tri(4, dtype=bool),
    )
    page = open_page(regard.explain(problem), "cell=visible:1,0,2&head=1")
    assert "This cell of it counts for every head." in page.locator("#why").text_content()
    page.get_by_text("Show this key").click()
    mask = np.tri(4, dtype=bool)
    mask[0, 2] = True
    assert_same_numbers(page, regard.explain(problem.replace(mask=mask)))


def test_what_should_come_out_follows_what_is_changed(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"), "cell=weights:0,1")
    summary = page.locator(".checks summary")
    assert summary.text_content() == "What should come out: all 7 come out"
    assert page.locator("#why .expected").text_content() == "0.30004505 is expected: right"
    page.get_by_label("without the scale").check()
    assert summary.text_content() == "What should come out: 5 of 7 differ"
    assert page.locator("#why .expected").text_content() == "0.30004505 is expected: wrong"
    summary.click()
    first = page.locator(".checks li.wrong").first
    assert "A_s[she, she]: " in first.text_content()
    first.get_by_text("open it").click()
    assert page.locator("#why h2").text_content() == "As[she, she]"
    page.locator("[name=reset]").click()
    page.evaluate("regard.edit('embeddings', [0, 0], 5)")  # what is expected is of the old numbers
    assert summary.text_content() == "What should come out of the numbers given: all 7 come out"
    assert page.locator(".wrong, .alarm").count() == 0
    cell(page, "weights", 0, 1).click()
    said = page.locator("#why .expected").text_content()
    assert said == "0.30004505 is expected for the numbers given"
    page.locator("[name=reset]").click()
    page.get_by_label("softmax over the wrong axis").check()
    said = page.locator(".checks li.absent").all_text_contents()
    assert said == ["absent row_sums is not part of what is shown"]


@pytest.mark.parametrize("name", example_names())
def test_statistics_are_pythons_at_any_number_of_decimals(name: str, open_page: Open) -> None:
    explanation = example(name)
    page = open_page(explanation)
    page.locator(".figures summary").click()
    page.locator(".figures td").first.wait_for()
    for digits in (8, 4):
        page.select_option("[name=digits]", str(digits))
        printed = summary(Head(explanation, None), digits)
        assert printed is not None
        rows = page.evaluate(
            """() => [...document.querySelectorAll(".figures tbody tr")].map((tr) =>
              [...tr.querySelectorAll("td:not(.remark)")].map((td) => td.textContent))"""
        )
        assert rows == [
            [one.text for one in row] for row in (*printed.steps.rows, *printed.rows.rows)
        ]


def test_statistics_of_many_rows_are_made_when_somebody_looks(open_page: Open) -> None:
    explanation = large(1, 1)["layer 0"]
    page = open_page(explanation)
    assert page.locator(".figures .sheet").count() == 0
    page.locator(".figures summary").click()
    rows = page.locator(".figures .long tbody tr")
    rows.last.wait_for(state="attached")  # they are made after the click
    assert rows.count() == 200
    ours = explanation.statistics(head=0, batch=()).rows
    last = rows.nth(199).locator("td").all_text_contents()
    assert last == [
        *(format_number(float(one[199]), 4) for one in (ours.entropy, ours.effective_keys)),
        format_number(float(ours.largest_weight[199]), 4),
        f"tok{ours.largest_key[199]}",
    ]


@pytest.mark.parametrize("name", example_names())
def test_after_each_of_fifty_edits_the_page_has_what_python_computes(
    name: str, open_page: Open
) -> None:
    problem = load_problem(name)
    explanation = regard.explain(problem)
    page = open_page(explanation)
    rng = np.random.default_rng(3)
    # A problem's positions are one field, not the numbers of their steps.
    fixed = {"width", "scale"}.union(*GIVEN.values())
    steps = [n for n, s in explanation.steps.items() if s.given and n not in fixed]
    for _ in range(50):
        step = str(rng.choice(steps))
        index = tuple(int(rng.integers(size)) for size in explanation.steps[step].shape)
        value = float(rng.normal() * 2)
        value = abs(value) + 0.1 if step == "score_temperature" else value
        page.evaluate("([s, i, v]) => regard.edit(s, i, v)", [step, list(index), value])
        after = edited(problem, step, index, value)
        assert assert_same_numbers(page, after) > 40
        page.locator("[name=reset]").click()
    for step, cells in read(page).items():  # all as it was
        for index, number, text in cells:
            why = explanation.derive(step, tuple(index))
            np.testing.assert_equal(received(number), why.value)
            assert text == why.text()


def test_a_number_is_changed_by_typing_and_what_follows_is_marked(open_page: Open) -> None:
    problem = load_problem("she-likes-coffee")
    page = open_page(regard.explain(problem), "cell=embeddings:0,1")
    assert page.input_value("#edit") == "0.9"  # the shortest text of this float
    page.fill("#edit", "no number")
    page.keyboard.press("Enter")
    assert "not a number" in page.locator("#why [role=alert]").text_content()
    page.fill("#edit", "-1,5")
    page.keyboard.press("Enter")
    assert_same_numbers(page, edited(problem, "embeddings", (0, 1), -1.5))
    assert (
        page.locator("#why .was").text_content() == "It was 0.9 before the changes; it fell by 2.4"
    )
    assert cell(page, "embeddings", 0, 1).text_content() == "−1.5"
    changed = page.evaluate("[...document.querySelectorAll('.changed')].map((td) => td.place.name)")
    assert {"embeddings", "queries", "weights", "output"} <= set(changed)
    assert "W_q" not in changed
    assert "1 given number changed. The result changes most at O[" in (
        page.locator(".status").text_content()
    )
    link = page.url
    page.get_by_text("Put back").click()
    assert page.locator(".status").text_content() == ""
    page.goto("about:blank")
    page.goto(link)
    assert page.locator("#why .value").text_content() == "−1.5"
    assert_same_numbers(page, edited(problem, "embeddings", (0, 1), -1.5))


def test_typing_on_a_given_number_in_its_table_changes_it(open_page: Open) -> None:
    problem = load_problem("she-likes-coffee")
    page = open_page(regard.explain(problem))
    page.evaluate(
        """document.querySelector('[data-step="W_v"] [role=gridcell][tabindex="0"]').focus()"""
    )
    page.keyboard.press("ArrowDown")
    page.keyboard.type("7.25")
    page.keyboard.press("Enter")
    assert cell(page, "W_v", 1, 0).text_content() == "7.25"
    assert_same_numbers(page, edited(problem, "W_v", (1, 0), 7.25))
    page.keyboard.press("Escape")
    page.keyboard.press("F2")
    assert page.evaluate("document.activeElement.value") == "7.25"
    page.keyboard.press("Control+c")  # what is no number does nothing
    page.keyboard.press("Escape")
    page.evaluate(
        """document.querySelector('[data-step="output"] [role=gridcell][tabindex="0"]').focus()"""
    )
    page.keyboard.type("5")
    assert page.locator("#edit").count() == 0


@pytest.mark.parametrize("typed", ["NaN", "-inf", "1e300", "-0"])
def test_odd_numbers_can_be_typed_in_and_are_shown_as_what_they_are(
    typed: str, open_page: Open
) -> None:
    problem = load_problem("the-cat-sat")
    page = open_page(regard.explain(problem), "cell=embeddings:1,2")
    page.fill("#edit", typed)
    page.keyboard.press("Enter")
    expected = edited(problem, "embeddings", (1, 2), float(typed))
    found = read(page)
    for name in ("embeddings", "queries", "weights", "output"):
        ours = expected.steps[name].value.ravel()
        theirs = [received(cell[1]) for cell in found[name]]
        np.testing.assert_array_equal(np.isnan(theirs), np.isnan(ours))
    text = {"NaN": "NaN", "-inf": "−∞", "1e300": "1e300", "-0": "−0"}[typed]
    assert cell(page, "embeddings", 1, 2).text_content() == text


def test_switches_change_the_steps_and_say_what_they_do(open_page: Open) -> None:
    problem = load_problem("causal-mask")
    page = open_page(regard.explain(problem))
    page.get_by_label("without the mask").check()
    assert "No key is hidden" in page.locator(".status").text_content()
    assert "masked" not in tables(page)
    found = read(page)["output"]
    ours = regard.explain(problem, causal=False).steps["output"].value.ravel()
    np.testing.assert_allclose([received(cell[1]) for cell in found], ours, rtol=CHAIN, atol=CHAIN)
    page.get_by_label("softcap").check()
    capped = regard.explain(problem, causal=False, softcap=1.0).steps["capped"].value.ravel()
    shown = [received(cell[1]) for cell in read(page)["capped"]]
    np.testing.assert_allclose(shown, capped, rtol=CHAIN, atol=CHAIN)
    page.get_by_label("softcap").uncheck()
    page.get_by_label("softmax over the wrong axis").check()
    columns = np.array(tables(page)["weights"], dtype=object)
    sums = np.array([[float(text) for text in row] for row in columns]).sum(axis=0)
    np.testing.assert_allclose(sums, 1, atol=4 * 0.5e-3)
    link = page.url
    page.locator("[name=reset]").click()
    assert "masked" in tables(page)
    page.goto("about:blank")
    page.goto(link)
    assert page.get_by_label("softmax over the wrong axis").is_checked()
    assert "masked" not in tables(page)


@pytest.mark.parametrize(
    "fragment",
    [
        *("cell=nothing:0", "cell=output:9,9", "cell=output:a", "cell=output", "layer=7&head=x"),
        *("set=1|2", "set=0|queries|-/-|99999|1;0|W_q|-/-|0|x", "off=everything", "digits=99"),
        *("%%%", "set=" + "|" * 999),
    ],
)
def test_a_link_that_makes_no_sense_opens_the_page_as_it_was_made(
    fragment: str, open_page: Open
) -> None:
    page = open_page(example("she-likes-coffee"), fragment)
    assert tables(page) == tables(open_page(example("she-likes-coffee")))


# --- heads, batches, layers ----------------------------------------------------------------------


def several_heads(seed: int = 0) -> Explanation:
    rng = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "down"]
    return regard.explain(
        regard.Problem(
            title="Four heads",
            query_labels=words,
            embeddings=rng.normal(size=(4, 8)),
            **{name: rng.normal(size=(8, 8)) for name in ("W_q", "W_o")},
            **{name: rng.normal(size=(8, 4)) for name in ("W_k", "W_v")},
            heads=4,
            key_heads=2,
            causal=True,
        )
    )


def test_every_head_of_every_layer_can_be_chosen(open_page: Open) -> None:
    layers = {"layer 0": several_heads(0), "layer 1": several_heads(1)}
    page = open_page(layers)
    for number, explanation in enumerate(layers.values()):
        page.select_option("[name=layer]", str(number))
        for head in range(4):
            page.select_option("[name=head]", str(head))
            shown = tables(page)
            for step in ("queries", "keys", "weights", "output", "projected_output"):
                table = explanation.table(step, head=head)
                for row, cells in enumerate(shown[step]):
                    for column, text in enumerate(cells):
                        if table.hidden is None or not table.hidden[row, column]:
                            assert_reads(text, float(table.value[row, column]))


def test_the_way_leads_into_the_head_that_a_number_comes_from(open_page: Open) -> None:
    page = open_page(several_heads(), "cell=merged:1,5")
    page.locator("#why .operand").click()
    assert page.locator("#why h2").text_content() == "O[head 2, cat, 1]"
    assert page.input_value("[name=head]") == "2"
    page.locator('[aria-label="head 1"]').click()
    assert page.input_value("[name=head]") == "1"


def test_batch_elements_can_be_chosen(open_page: Open) -> None:
    rng = np.random.default_rng(5)
    arrays = [rng.normal(size=(2, 3, 1, 4, 2)) for _ in range(3)]
    explanation = regard.explain(*arrays, mask=regard.masks.Lengths([[4, 3, 2], [1, 4, 4]]))
    page = open_page(explanation)
    page.select_option("[name=batch]", "4")
    table = explanation.table("output", batch=(1, 1))
    for text, value in zip(np.ravel(tables(page)["output"]), table.value.flat, strict=True):
        assert_reads(text, float(value))


@pytest.mark.parametrize(
    "shapes", [((2, 3), (0, 3), (0, 2)), ((0, 3), (2, 3), (2, 2)), ((2, 0), (2, 0), (2, 2)),
               ((2, 1), (2, 1), (2, 0)), ((3,), (2, 3), (2, 2)), ((3,), (90, 3), (90, 2))],
)  # fmt: skip
def test_sizes_of_nothing_and_of_one_make_a_page(shapes: Any, open_page: Open) -> None:
    explanation = regard.explain(*map(np.ones, shapes))
    page = open_page(explanation)
    assert assert_same_numbers(page, explanation) == sum(
        step.value.size for step in explanation.steps.values()
    )


# --- large inputs --------------------------------------------------------------------------------


def large(layers: int = 3, heads: int = 4, tokens: int = 200) -> dict[str, Explanation]:
    words = [f"tok{number}" for number in range(tokens)]

    def one(seed: int) -> Explanation:
        rng = np.random.default_rng(seed)
        arrays = (rng.normal(size=(heads, tokens, 64)).astype(np.float32) for _ in range(3))
        return regard.explain(*arrays, causal=True, query_labels=words, key_labels=words)

    return {f"layer {number}": one(number) for number in range(layers)}


def test_a_large_matrix_is_drawn_and_its_rows_are_computed_when_asked_for(open_page: Open) -> None:
    layers = large()
    page = open_page(layers, written={"budget": "1MB"})
    explanation = layers["layer 0"]
    assert "heads have all their numbers" in page.locator("main .pooled").first.text_content()
    canvas = page.locator('[data-step="weights"] canvas').first
    for _ in range(100):  # it is drawn a few rows per frame
        page.wait_for_timeout(50)
        if canvas.evaluate("canvas => canvas.width") == 200:
            break
    box = canvas.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 20.5 / 200, box["y"] + box["height"] * 150.5 / 200)
    assert page.locator("#why h2").text_content() == "P[head 0, tok150, tok20]"
    ours = explanation.why("weights", "tok150", "tok20", head=0).value
    shown = float(page.locator("#why .value").text_content())
    np.testing.assert_allclose(shown, ours, atol=0.5e-8 + CHAIN)


def test_keys_go_over_a_drawn_matrix_and_open_a_number(open_page: Open) -> None:
    page = open_page(large(1, 1))
    page.locator('[data-step="scores"] canvas').first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator(".live").text_content().startswith("A[tok2, tok1] = ")
    page.keyboard.press("Enter")
    assert page.locator("#why h2").text_content() == "A[tok2, tok1]"
    page.keyboard.press("Escape")
    assert page.locator("#why").is_hidden()


def test_where_a_drawn_cell_gets_room_its_number_is_written(open_page: Open) -> None:
    page = open_page(large(1, 1))
    written = "() => [...document.querySelectorAll('canvas.figures')].filter((one) => !one.hidden)"
    assert page.evaluate(f"({written})().length") == 0
    canvas = page.locator('[data-step="scores"] canvas').first.bounding_box()
    page.mouse.move(canvas["x"] + 20, canvas["y"] + 20)
    for _ in range(8):
        page.mouse.wheel(0, -300)
    page.wait_for_function("regard.state.zoom > 10")
    assert page.evaluate(f"({written})().length") > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


def test_a_head_without_its_numbers_shows_tiles_and_the_strongest_keys(open_page: Open) -> None:
    layers = large()
    page = open_page(layers, written={"budget": "1MB"})
    button = page.locator(".gallery button.pooled").last
    label = button.get_attribute("aria-label")
    button.click()
    assert label == "layer 2, head 3, pooled"
    weights = layers["layer 2"].steps["weights"].value[3]
    # Half floats have 11 bits, and four decimals are shown.
    first = page.locator(".long tbody tr").nth(100).locator("td").nth(0).text_content()
    key, share = first.split()
    assert key == f"tok{weights[100].argmax()}"
    np.testing.assert_allclose(float(share), weights[100].max(), rtol=2.0**-10, atol=0.5e-4)
    page.locator(".picture canvas").click(position={"x": 5, "y": 440})
    said = page.locator(".picture + .words").text_content()
    assert said.startswith("Queries 193 to 199, keys 0 to 5: largest ")
    largest = float(said.split("largest ")[1].split(",")[0])
    np.testing.assert_allclose(largest, weights[193:200, :6].max(), rtol=2.0**-10, atol=0.5e-4)


def test_a_page_may_have_nothing_but_tiles(open_page: Open) -> None:
    rng = np.random.default_rng(0)
    explanation = regard.explain(*(rng.normal(size=(20, 5000)) for _ in range(3)))
    page = open_page(explanation, "cell=weights:0,0", written={"budget": "300kB"})
    assert page.locator(".long tbody tr").count() == 20
    assert page.locator("#why").is_hidden()


def test_a_large_page_says_without_javascript_what_it_has(open_page: Open) -> None:
    page = open_page(large(2, 2), java_script_enabled=False)
    assert page.locator('[data-step="weights"] tbody tr').count() == 8
    assert "200 × 200" in page.locator('[data-step="weights"] .left').text_content()
    assert "those of the first head" in page.locator("noscript").inner_text()


ROWS = {
    "long labels": (3, ["x" * 300, "y" * 300, "z" * 300]),
    "other scripts": (3, ["שלום", "ก็็็็็็", "e\u0301\u0301\u0301 👩\u200d👩\u200d👧"]),
    "no labels": (3, None),
    "one": (1, None),
}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ROWS)
def test_odd_labels_and_sizes_have_a_picture_that_fits(
    kind: str, width: int, open_page: Open
) -> None:
    rows, labels = ROWS[kind]
    query, key, value = np.random.default_rng(0).normal(size=(3, rows, 2))
    page = open_page(
        regard.explain(query, key, value, query_labels=labels, key_labels=labels), width=width
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cell(page, "weights", 0, 0).click()
    assert page.locator("#why .value").is_visible()


def test_numbers_that_are_not_finite_and_a_query_that_sees_nothing_have_a_picture(
    open_page: Open,
) -> None:
    query, key, value = np.random.default_rng(0).normal(size=(3, 3, 2))
    query[0, 0], key[1, 1] = np.nan, np.inf
    page = open_page(regard.explain(query, key, value, mask=np.zeros((3, 3), bool)))
    assert [cell(page, "weights", 0, k).text_content() for k in range(3)] == ["–"] * 3
    assert cell(page, "scores", 0, 0).text_content() == "NaN"
    assert page.locator(".words-above path").count() == 0


def test_two_fingers_make_cells_larger(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"), has_touch=True)
    speak = page.context.new_cdp_session(page)
    for kind, apart in (("touchStart", 40), ("touchMove", 60), ("touchMove", 80)):
        points = [{"x": 700 - apart, "y": 400}, {"x": 700 + apart, "y": 400}]
        speak.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    speak.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    np.testing.assert_allclose(page.evaluate("regard.state.zoom"), 2, rtol=0.1)


# --- notebooks -----------------------------------------------------------------------------------


@pytest.mark.needs("jupyter")
def test_a_notebook_that_was_run_shows_a_page_that_lives(browser: Any, tmp_path: Path) -> None:
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    cell = 'import regard\nregard.explain(regard.load_problem("she-likes-coffee"))'
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    ExecutePreprocessor(timeout=120).preprocess(notebook)
    (output,) = notebook.cells[0].outputs
    assert output["data"]["text/plain"].startswith("She likes coffee")
    text, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{text}</body>", "utf-8")
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.set_viewport_size({"width": 1000, "height": 900})
    frame = page.frames[1]
    box = page.locator("iframe").bounding_box()
    assert 640 <= box["height"] <= 900  # what is opened is in sight, and so is what was clicked
    frame.locator('[data-step="output"] [role=gridcell]').nth(2).click()
    assert frame.locator("#why .value").text_content() == "0.50530294"
    assert complaints == []
    page.close()


# --- alone, inert, for everybody -----------------------------------------------------------------


@pytest.mark.parametrize("name", example_names())
def test_a_classroom_page_is_small_and_complete_without_javascript(
    name: str, open_page: Open, tmp_path: Path
) -> None:
    explanation = example(name)
    page = open_page(explanation, java_script_enabled=False)
    most = 250_000 if "loss" in explanation.steps else 180_000  # gradients are as many tables again
    assert (tmp_path / "page-0.html").stat().st_size <= most
    rows = page.locator('[data-step="weights"] tbody tr')
    texts = [[td.strip() for td in row.locator("td").all_text_contents()] for row in rows.all()]
    table = explanation.table("weights")
    for row, cells in enumerate(texts):
        for column, text in enumerate(cells):
            if table.hidden is None or not table.hidden[row, column]:
                assert text == format_number(float(table.value[row, column]), 4)
    assert not page.locator(".tools").is_visible()
    assert not page.locator("#why").is_visible()


def test_the_policy_stops_a_script_that_is_not_the_pages_own(browser: Any, tmp_path: Path) -> None:
    text = report.html(example("she-likes-coffee"))
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", "<script>window.stranger = 1</script></body>"), "utf-8")
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("window.stranger") is None
    assert page.evaluate("regard.state.layer") == 0
    assert any("Content Security Policy" in one for one in said)
    page.close()


def labelled(text: str) -> Explanation:
    """One text in every field that takes text."""
    rng = np.random.default_rng(0)
    names = (text, f"{text}2", text)
    return regard.explain(
        regard.Problem(
            title=text,
            note=text,
            query_labels=names,
            embeddings=rng.normal(size=(3, 2)),
            W_q=rng.normal(size=(2, 2)),
            W_k=rng.normal(size=(2, 2)),
            W_v=rng.normal(size=(2, 2)),
            embedding_features=(text, f"{text}2"),
            key_features=(text, f"{text}2"),
            value_features=(text, f"{text}2"),
            row_notes={"values": names},
        ),
        mask=regard.masks.Boolean(rng.normal(size=(3, 3)) > 0, name=text),
    )


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_text_from_outside_stays_text(payload: str, open_page: Open) -> None:
    found = []
    for text in ("benign", payload):
        layers = {f"{text}1": labelled(text), f"{text}2": labelled(text)}
        page = open_page(layers, "cell=output:0,1", width=390)
        page.locator("#why summary").click()
        page.locator("#why pre").nth(1).wait_for()
        found.append(page.evaluate(ELEMENTS))
        # How many words have room depends on their widths; each is a text and nothing else.
        assert all(page.evaluate(WORDS))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator("#why .operand").nth(0).click()
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert found[0] == found[1]


# --- gradients -----------------------------------------------------------------------------------


def loss_of(page: Any) -> float:
    return page.evaluate("regard.value('loss', [])")


def test_every_gradient_is_where_its_number_is(open_page: Open) -> None:
    page = open_page(example("coffee-target"))
    places = """() => Object.fromEntries([...document.querySelectorAll(".station")].map((one) => {
      const { x, y, width } = one.querySelector(".grid").getBoundingClientRect();
      return [one.dataset.step, [x, y, width]];
    }))"""
    forward = page.evaluate(places)
    before = read(page)
    page.get_by_label("gradients").check()
    backward = page.evaluate(places)
    steps = example("coffee-target").steps.values()
    there = {step.name: step.declared.of for step in steps if step.declared.of in forward}
    assert len(there) >= 9
    for name, of in there.items():
        assert backward[name] == forward[of]
    page.get_by_label("gradients").uncheck()
    assert page.evaluate(places) == forward
    for mistake in ("Q and K swapped", "softmax over the wrong axis"):
        page.get_by_label(mistake).check()
        assert read(page)["d_queries"] != before["d_queries"]
        page.get_by_label(mistake).uncheck()
        assert read(page) == before


def test_a_click_on_a_gradient_outlines_its_factors_forward_and_backward(open_page: Open) -> None:
    page = open_page(example("coffee-target"))
    page.get_by_label("gradients").check()
    page.locator("[data-step=d_queries] [role=gridcell]").nth(0).click()
    outlined = """(kind) => [...document.querySelectorAll(`[role=gridcell].${kind}`)]
      .map((cell) => cell.closest("[data-step]").dataset.step)"""
    assert page.evaluate(outlined, "open") == ["d_queries"]
    assert page.evaluate(outlined, "first") == ["d_scores"] * 3
    assert page.evaluate(outlined, "second") == ["keys"] * 3  # shown as it is in the sum
    why = example("coffee-target").why("d_queries", "she", 0)
    said = page.locator("#why .meaning").text_content()
    assert said == f"As {why.meaning().removeprefix('as ')}."
    while page.locator("#why .operand").count():  # the way leads down to a given number
        page.locator("#why .operand").last.click()
    assert "A given number" in page.locator("#why .remark").first.text_content()


def test_a_derivative_is_checked_by_keys_alone(open_page: Open) -> None:
    explanation = example("coffee-target")
    page = open_page(explanation, "cell=d_W_q:1,2")
    slope = float(explanation["d_W_q"].value[1, 2])
    page.get_by_text("Check this derivative").click()
    field = page.get_by_label("change W_q[1, 2] by")
    field.focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0.5")
    cells = page.locator("#why .nudge td").all_text_contents()
    problem = load_problem("coffee-target")
    after = edited(problem, "W_q", (1, 2), float(problem.W_q[1, 2]) + 0.5)
    losses = [float(one["loss"].value) for one in (explanation, after)]
    assert cells[:2] == [format_number(loss) for loss in losses]
    moved, line, off = (float(cell.replace("−", "-")) for cell in cells[2:5])
    np.testing.assert_allclose(moved, losses[1] - losses[0], atol=1e-8)
    np.testing.assert_allclose(line, slope / 2, atol=1e-8)
    np.testing.assert_allclose(off, losses[1] - losses[0] - slope / 2, rtol=1e-2)
    for typed, words in {"0": "moves nothing", "much": "not a number", "": "not a number"}.items():
        field.fill(typed)
        assert words in page.locator("#why .nudge [role=alert]").text_content()
        assert page.locator("#why .nudge td").count() == 0
    assert loss_of(page) == losses[0]  # nothing was changed


def test_a_setting_and_a_mask_have_no_derivative_to_check(open_page: Open) -> None:
    explanation = regard.explain(*np.ones((3, 2, 2)), softcap=2.0, causal=True, target=np.eye(2))
    page = open_page(explanation, "cell=softcap:")
    assert page.locator("#why .value").text_content() == "2"
    assert page.locator("#why .nudge").count() == 0
    for cell in ("visible:0,1", "visible:1,0", "d_masked:0,1", "target:0,0"):
        page.evaluate("(cell) => { location.hash = `cell=${cell}`; }", cell)
        page.locator("#why .formula-line").wait_for()
        assert page.locator("#why .nudge").count() == 0


def test_steps_run_by_keys_bring_the_loss_down_and_can_be_undone(open_page: Open) -> None:
    problem = load_problem("look-back")
    page = open_page(regard.explain(problem))
    losses = [loss_of(page)]
    page.locator(".learn summary").focus()
    page.keyboard.press("Enter")
    page.locator("#rate").focus()
    page.keyboard.press("Enter")  # one step
    losses.append(loss_of(page))
    now, moved = regard.explain(problem), {}
    for name in ("W_q", "W_k", "W_v"):
        moved[name] = now[name].value - 0.1 * now[f"d_{name}"].value
    assert_same_numbers(page, regard.explain(problem.replace(**moved)))
    page.get_by_role("button", name="Ten steps").focus()
    page.keyboard.press("Space")
    page.get_by_text("11 steps took the loss").wait_for()
    losses.append(loss_of(page))
    assert losses == sorted(losses, reverse=True)
    points = page.locator(".curve polyline").get_attribute("points").split()
    assert len(points) == 12
    link = page.url
    for _ in range(10):
        page.get_by_role("button", name="Undo a step").click()
    assert loss_of(page) == losses[1]
    page.get_by_role("button", name="Start over").click()
    assert loss_of(page) == losses[0]
    assert page.locator(".status").text_content() == ""
    assert page.locator(".learn .said").text_content() == "Back at the start."
    assert page.evaluate("document.activeElement.textContent") == "One step"
    page.goto("about:blank")
    page.goto(link)  # which holds what was learned
    np.testing.assert_allclose(loss_of(page), losses[2], rtol=1e-15)


def test_a_run_is_stopped_and_a_change_by_hand_starts_a_new_curve(open_page: Open) -> None:
    page = open_page(example("coffee-target"))
    page.locator(".learn summary").click()
    for box in page.locator(".learn fieldset input").all():
        box.uncheck()
    page.get_by_role("button", name="Run").click()
    assert "No input is chosen" in page.locator(".learn .said").text_content()
    page.get_by_label("embeddings", exact=True).check()
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Stop").click()
    assert "steps took the loss" in page.locator(".learn .said").text_content()
    changed = page.evaluate("[...regard.state.edits.keys()]")
    assert changed == ["0|embeddings|-/-"]
    page.evaluate("regard.edit('W_q', [0, 0], 3)")
    assert page.locator(".learn summary").text_content().count("after") == 0
    assert page.get_by_role("button", name="Undo a step").is_disabled()


def test_a_rate_that_makes_no_sense_or_diverges_is_said_and_stopped(open_page: Open) -> None:
    page = open_page(example("coffee-target"))
    page.locator(".learn summary").click()
    start, said = loss_of(page), page.locator(".learn .said")
    for rate, words in {
        "0": "nothing moves",
        "-1": "would climb",
        "fast": "not a number",
        "inf": "not a number",
    }.items():
        page.fill("#rate", rate)
        page.keyboard.press("Enter")
        assert words in said.text_content()
        assert loss_of(page) == start
    page.fill("#rate", "30")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("The loss diverges").wait_for()
    assert page.get_by_role("button", name="Run").is_visible()
    page.get_by_role("button", name="Start over").click()
    assert loss_of(page) == start
    page.fill("#rate", "1e200")
    page.get_by_role("button", name="One step").click()
    assert "The loss overflows" in said.text_content()
    page.get_by_role("button", name="Undo a step").click()
    assert loss_of(page) == start


def test_where_only_a_gradient_is_given_nothing_can_be_learned(open_page: Open) -> None:
    arrays = np.random.default_rng(5).normal(size=(4, 3, 2))
    page = open_page(regard.explain(*arrays[:3], grad_output=arrays[3]), "cell=d_queries:0,0")
    assert page.locator(".learn").is_hidden()
    assert "Σ gradient·result" in page.locator("#why .nudge").text_content()


@pytest.mark.needs("axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_where_a_page_learns(width: int, scheme: str, open_page: Open) -> None:
    page = open_page(example("look-back"), "cell=d_W_q:1,2", width=width, scheme=scheme)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.get_by_role("button", name="One step").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", example_names())
def test_nothing_hangs_over_the_side_of_the_page(name: str, width: int, open_page: Open) -> None:
    page = open_page(
        example(name), "cell=output:0,1" if name != "animals-vector" else "", width=width
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.needs("axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("name", ["causal-mask", "she-likes-coffee"])
def test_axe_finds_nothing(name: str, width: int, scheme: str, open_page: Open) -> None:
    page = open_page(example(name), "cell=output:0,1", width=width, scheme=scheme)
    page.get_by_label("without the scale").check()
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.evaluate("regard.edit(Object.keys(regard.content.layers[0].given)[0], [0, 0], 3)")
    assert violations(page) == []


@pytest.mark.needs("axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_where_a_mask_can_be_changed(scheme: str, open_page: Open) -> None:
    page = open_page(regard.explain(with_mask()), "cell=visible:2,0", width=768, scheme=scheme)
    page.evaluate("regard.turn(2, 0)")
    assert page.locator("#why .turn").is_visible()
    assert violations(page) == []


@pytest.mark.needs("axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_large_pages(scheme: str, open_page: Open) -> None:
    page = open_page(large(), "cell=weights:0,3,4", scheme=scheme, written={"budget": "1MB"})
    assert violations(page) == []
    page.locator(".gallery button.pooled").last.click()
    assert violations(page) == []


CONTRAST = """(kinds) => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const style = getComputedStyle(document.body);
  const pixel = (...layers) => {
    for (const colour of layers) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  return kinds.map(([step, kind, share]) => {
    const cell = document.querySelector(`[data-step=${step}] [role=gridcell]`);
    cell.closest(".station").classList.toggle("backward", kind.startsWith("d"));
    cell.className = kind.at(-1);
    cell.style.setProperty("--share", share);
    const own = getComputedStyle(cell);
    const ground = pixel(style.backgroundColor, own.backgroundColor);
    return [step + kind + share, ground, pixel(own.color)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_shade_leaves_the_digits_readable(scheme: str, open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"), scheme=scheme)
    shares = (0, 25, 50, 75, 100)
    kinds = [("queries", kind, share) for kind in ("p", "n", "dp", "dn") for share in shares]
    kinds += [("weights", "p", share) for share in shares]
    kinds += [("queries", "hidden", 0), ("queries", "odd", 0)]

    def luminance(colour: list[int]) -> float:
        part = np.array(colour) / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    seen = set()
    for kind, paper, ink in page.evaluate(CONTRAST, kinds):
        dark, light = sorted((luminance(paper), luminance(ink)))
        assert (light + 0.05) / (dark + 0.05) >= READABLE, kind
        seen.add(tuple(paper))
    assert len(seen) == 5 * 4 + 1  # each shade is one of its own


def test_colours_can_be_chosen_against_the_system(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"), scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.select_option("[name=theme]", "dark")
    dark = page.evaluate(paper)
    assert dark != light
    page.emulate_media(color_scheme="dark")
    page.select_option("[name=theme]", "light")
    assert page.evaluate(paper) == light
    page.select_option("[name=theme]", "")
    assert page.evaluate(paper) == dark


def test_on_paper_the_tools_are_gone(open_page: Open) -> None:
    page = open_page(example("she-likes-coffee"))
    assert page.locator("details.figures").is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"  # whatever the screen has
    assert not page.locator("details.figures").is_visible()  # folded away, and cannot be opened
    assert not page.locator(".tools").is_visible()
    assert page.locator('[data-step="weights"]').first.is_visible()

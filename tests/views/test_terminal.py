"""What a terminal shows of an explanation, compared character by character and rule by rule.

The files in tests/views/golden are output that a person has read. To write them anew after a change
that is meant: `REGARD_UPDATE_GOLDEN=1 pytest tests/views/test_terminal.py`, then read the
difference.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console

import regard
from regard.errors import LabelError
from regard.explanation.notation import format_number
from regard.explanation.trace import READING_NOTE
from regard.views import colours, head_view, step_words, story, terminal, terminal_layout
from regard.views.all_steps import declared
from regard.views.step_words import EXP_LIMIT, significant
from regard.views.walk import Stop, largest_term, walk

GOLDEN = Path(__file__).resolve().parent / "golden"
EXAMPLES = (
    "animals-matrix",
    "animals-vector",
    "causal-mask",
    "look-back",
    "random-three-tokens",
    "she-likes-coffee",
    "the-cat-sat",
)
READABLE = 4.5  # the contrast that the WCAG asks of text
LEFT_TO_RIGHT = "\u200e"


def shown(
    draw: Callable[[Console], None],
    width: int = 80,
    encoding: str = "utf-8",
    color_system: Any = None,
) -> str:
    """What `draw` prints on a terminal of that kind. ASCII is strict: other characters raise."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", newline="\n")
    console = Console(
        file=file,
        width=width,
        color_system=color_system,
        force_terminal=color_system is not None,
        legacy_windows=False,
        _environ={},
    )
    draw(console)
    file.flush()
    return raw.getvalue().decode(encoding)


def explanation_text(explanation: regard.Explanation, *args: Any, **kind: Any) -> str:
    return shown(
        lambda console: terminal.print_explanation(explanation, console, *args),
        **kind,
    )


def walk_text(derivation: regard.Derivation, digits: int | None = None, **kind: Any) -> str:
    return shown(
        lambda console: terminal.print_derivation_walk(derivation, console, digits), **kind
    )


def example(name: str) -> regard.Explanation:
    return regard.explain(regard.load_problem(name))


def tokens(labels: list[str], **more: Any) -> regard.Explanation:
    """Self-attention over tokens with these names, each with two numbers of its own."""
    vectors = np.arange(2.0 * len(labels)).reshape(-1, 2) / 8
    return regard.explain(vectors, vectors, vectors, query_labels=labels, key_labels=labels, **more)


def everything() -> regard.Problem:
    """A problem in which every step there is occurs."""
    draw = np.random.default_rng(7).standard_normal
    return regard.Problem(
        title="Everything",
        note="All steps at once.",
        embeddings=draw((3, 5)),
        context=draw((4, 3)),
        W_q=draw((5, 8)),
        W_k=draw((3, 4)),
        W_v=draw((3, 6)),
        W_o=draw((12, 2)),
        b_q=draw(8),
        b_k=draw(4),
        b_v=draw(6),
        b_o=draw(2),
        heads=4,
        key_heads=2,
        query_labels=("a", "b", "c"),
        key_labels=("u", "v", "w", "x"),
        bias=draw((3, 4)),
        softcap=5.0,
        sink=0.5,
        causal=True,
        window=(1, None),
        lengths=3,
        query_segments=(0, 0, 1),
        key_segments=(0, 0, 0, 1),
        mask=np.array([True, True, True, False]),
        offset=1,
    )


def compare_with_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REGARD_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8", newline="\n")
    np.testing.assert_equal(text.split("\n"), path.read_text(encoding="utf-8").split("\n"))


# --- as people have read it ----------------------------------------------------------------------


@pytest.mark.parametrize("width", [120, 60])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_looks_as_it_should(name: str, width: int) -> None:
    compare_with_golden(f"{name}-{width}", explanation_text(example(name), width=width))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_looks_as_it_should_in_ascii(name: str) -> None:
    text = explanation_text(example(name), width=80, encoding="ascii")
    compare_with_golden(f"{name}-ascii", text)


def test_every_step_there_is_looks_as_it_should() -> None:
    explanation = regard.explain(everything())
    compare_with_golden(
        "everything-100", explanation_text(explanation, list(explanation.steps), 2, 4, width=100)
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("she-likes-coffee", ("output", "she", 2)),
        ("causal-mask", ("lse", 3)),
        ("causal-mask", ("masked", 0, 3)),
        ("animals-vector", ("weights", "kitten")),
        ("coffee-target", ("d_queries", "she", 2)),
    ],
)
def test_the_way_back_looks_as_it_should(name: str, where: tuple[Any, ...]) -> None:
    words = "-".join(str(word) for word in where)
    compare_with_golden(f"why-{name}-{words}-80", walk_text(example(name).why(*where)))


@pytest.mark.parametrize("name", ["causal-mask", "animals-vector"])
def test_statistics_look_as_they_should(name: str) -> None:
    text = shown(lambda console: terminal.print_statistics(example(name), console), width=100)
    compare_with_golden(f"statistics-{name}-100", text)


# --- widths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [120, 80, 60])
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    explanation = example(name)
    last = (0,) * len(explanation.steps["output"].axes)
    for text in (
        explanation_text(explanation, width=width),
        walk_text(explanation.why("output", *last), width=width),
        shown(lambda console: terminal.print_statistics(explanation, console), width=width),
    ):
        assert max(cell_len(line) for line in text.split("\n")) <= width


@pytest.mark.parametrize("width", [120, 60, 30, 10])
def test_every_number_is_printed_whole_however_narrow_the_terminal(width: int) -> None:
    explanation = example("the-cat-sat")
    text = explanation_text(explanation, ["W_q", "queries", "weights"], width=width)
    for name in ("W_q", "queries", "weights"):
        numbers = [format_number(number) for number in explanation.steps[name].value.ravel()]
        assert not set(numbers) - set(text.split())


def test_a_table_that_is_too_wide_repeats_its_row_labels() -> None:
    text = explanation_text(example("causal-mask"), ["queries"], width=60)
    np.testing.assert_equal(len(re.findall(r"^  3 │", text, re.MULTILINE)), 2)


def test_remarks_stand_beside_their_rows() -> None:
    text = explanation_text(example("animals-matrix"), ["values"], width=60)
    assert re.search(r"^  salmon │ .*0\.1   slippery$", text, re.MULTILINE)


def test_remarks_move_to_the_next_piece_rather_than_widen_a_table() -> None:
    text = explanation_text(example("animals-matrix"), ["values"], None, 8, width=34)
    assert "ferocious" in text
    assert max(cell_len(line) for line in text.split("\n")) <= 34


# --- alignment -----------------------------------------------------------------------------------


def test_decimal_points_stand_below_each_other() -> None:
    np.testing.assert_equal(
        terminal_layout.align(["1", "−12.5", "1.5e-13", "0.25"]),
        ["  1      ", "−12.5    ", "  1.5e-13", "  0.25   "],
    )


@pytest.mark.parametrize(
    "labels",
    [
        ["日本語", "ab", "ｗｉｄｅ"],
        ["👩", "e\u0301", "한국어"],
        ["שלום", "مرحبا", "x"],
        ["a label that is much longer than any label should be", "b", "c"],
    ],
)
def test_every_row_of_a_table_has_its_bar_at_the_same_place(labels: list[str]) -> None:
    for width in (120, 60, 40):
        text = explanation_text(tokens(labels), ["weights"], width=width)
        rows = [line for line in text.split("\n") if "│" in line]
        bars = {cell_len(line.replace(LEFT_TO_RIGHT, "").split("│")[0]) for line in rows}
        np.testing.assert_equal(len(bars), 1)
        ends = {cell_len(line.replace(LEFT_TO_RIGHT, "")) for line in rows}
        assert max(ends) <= width


def test_terms_with_wide_labels_are_aligned() -> None:
    text = walk_text(tokens(["日本語", "ab", "c"]).why("output", "ab", 0))
    lines = [line for line in text.split("\n") if " × " in line][:3]
    np.testing.assert_equal(len({cell_len(line.split(" × ")[0]) for line in lines}), 1)


# --- untrusted labels ----------------------------------------------------------------------------


def test_nothing_in_a_label_reaches_the_terminal_as_a_control() -> None:
    evil = "\x1b[31mred\x07\x9b1m\u202e\u2066\r\n\tx"
    explanation = tokens([evil, "[bold red]b[/]", ":smile:"], title=evil)
    for text in (
        explanation_text(explanation),
        walk_text(explanation.why("output", 0, 0)),
        shown(lambda console: terminal.print_statistics(explanation, console)),
    ):
        assert not set(text.replace("\n", "")) & set("\x1b\x07\x9b\u202e\u2066\r\t")
        assert "\\x1b[31mred" in text
        assert "[bold red]b[/]" in text
    assert ":smile:" in explanation_text(explanation)


def test_numbers_after_a_label_that_runs_to_the_left_keep_their_order() -> None:
    text = explanation_text(tokens(["שלום", "b"]), ["weights"])
    (row,) = re.findall(r"^  (.*) │ 0\.", text, re.MULTILINE)[:1]
    np.testing.assert_equal(row, f"{LEFT_TO_RIGHT}שלום{LEFT_TO_RIGHT}")


def test_repeated_tokens_are_told_apart() -> None:
    text = explanation_text(tokens(["the", "cat", "the"]), ["weights"])
    np.testing.assert_equal(
        re.findall(r"^  (\S+) +│ 0", text, re.MULTILINE), ["the@0", "cat", "the@2"]
    )


# --- cells that are no plain numbers -------------------------------------------------------------


def test_a_hidden_cell_names_the_rule_that_hides_it_and_shows_no_number() -> None:
    explanation = example("causal-mask")
    for name in ("masked", "exponentials", "weights"):
        text = explanation_text(explanation, [name])
        np.testing.assert_equal(len(re.findall(r"\bcausal\b", text.split("┼")[1])), 6)
        np.testing.assert_equal(
            len(re.findall(r"\d\.\d", text.split("┼")[1])), 10 - (name == "weights")
        )
    assert "−∞" not in explanation_text(explanation, ["weights"])


def test_a_cell_hidden_by_several_rules_says_how_many_more_there_are() -> None:
    explanation = tokens(["a", "b"], causal=True, mask=np.array([True, False]))
    assert "mask +1" in explanation_text(explanation, ["weights"])


def test_a_visible_weight_of_zero_is_a_number_and_not_a_hidden_cell() -> None:
    query = np.array([[1.0], [1.0]])
    key = np.array([[0.0], [-1000.0]])
    explanation = regard.explain(query, key, key, causal=True)
    rows = re.findall(r"^  [01] │ (.*)$", explanation_text(explanation, ["weights"]), re.MULTILINE)
    np.testing.assert_equal([row.split() for row in rows], [["1", "causal"], ["1", "0"]])


def test_nan_and_infinity_are_shown_as_such_and_their_origin_is_named() -> None:
    query = np.array([[1.0, np.nan], [np.inf, 0.5]])
    key = np.array([[1.0, 1.0], [-1.0, 1.0]])
    text = explanation_text(regard.explain(query, key, np.eye(2)))
    rows = re.findall(r"^  [01] │ (.*)$", text, re.MULTILINE)
    np.testing.assert_equal([row.split() for row in rows[:2]], [["1", "NaN"], ["∞", "0.5"]])
    assert "Q[0, 1] = NaN, in queries. See why: --why queries 0 1" in " ".join(text.split())
    ascii_text = explanation_text(regard.explain(query, key, np.eye(2)), encoding="ascii")
    assert re.search(r"^  1 \| inf +0\.5$", ascii_text, re.MULTILINE)


def test_a_row_that_sees_nothing_says_so() -> None:
    explanation = tokens(["a", "b"], mask=np.array([[True, True], [False, False]]))
    assert "A row that sees no key" in explanation_text(explanation)
    assert "no visible key, so 0" in walk_text(explanation.why("output", "b", 0))


def test_one_number_needs_no_table() -> None:
    text = explanation_text(example("animals-vector"), ["row_maximum"])
    assert "\n  m = 54.07462621\n" in text
    assert "│" not in text


# --- large matrices ------------------------------------------------------------------------------


def test_the_middle_of_a_large_matrix_is_left_out_and_said_to_be_elsewhere() -> None:
    vectors = np.random.default_rng(3).standard_normal((30, 4))
    explanation = regard.explain(vectors, vectors, vectors)
    text = explanation_text(explanation, ["weights"], width=200)
    np.testing.assert_equal(len(re.findall(r"^  … 19 more$", text, re.MULTILINE)), 1)
    assert "All 900 numbers: --json" in text
    rows = re.findall(r"^  (\d+) +│", text, re.MULTILINE)
    np.testing.assert_equal(rows, [str(n) for n in (*range(6), *range(25, 30))])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp1252", "cp437"])
def test_a_large_matrix_can_be_printed_in_every_encoding(encoding: str) -> None:
    many = tokens([f"t{number}" for number in range(13)])
    text = explanation_text(many, ["scores"], width=400, encoding=encoding)
    np.testing.assert_equal(len(re.findall(r"^  (…|\.\.\.) 2 more$", text, re.MULTILINE)), 1)
    assert "\\u2026" not in text


@pytest.mark.parametrize("dots", ["...", "…", "… 2 more"])
def test_a_label_that_looks_like_a_gap_has_its_numbers(dots: str) -> None:
    plain = explanation_text(tokens(["wait", "x", "what"]), ["queries"])
    odd = explanation_text(tokens(["wait", dots, "what"]), ["queries"])
    numbers = [re.findall(r"^  .* │ (.*)$", text, re.MULTILINE) for text in (plain, odd)]
    np.testing.assert_equal(len(numbers[0]), 3 + 1)  # and the header
    np.testing.assert_equal(numbers[1], numbers[0])


def test_a_long_problem_is_shown_from_the_blocks_that_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = np.random.default_rng(3).standard_normal((2, 700, 2))
    explanation = regard.explain(vectors, vectors, vectors, causal=True, bias=np.zeros((700, 700)))

    def whole(*_: object) -> None:
        raise AssertionError("a whole step was asked for")

    monkeypatch.setattr(type(explanation.source), "value", whole)
    assert "All 490000 numbers" in explanation_text(explanation, ["scores", "weights"], 1)
    monkeypatch.undo()
    asked = []
    value = type(explanation.source).value
    monkeypatch.setattr(
        type(explanation.source), "value", lambda s, name: asked.append(name) or value(s, name)
    )
    explanation_text(explanation)
    assert not {name for name in asked if explanation.steps[name].axes}


def test_a_part_of_a_step_has_the_numbers_of_the_whole() -> None:
    explanation = regard.explain(everything())
    for head in range(4):
        own = head_view.Head(explanation, head)
        for name, step in explanation.steps.items():
            table = explanation.table(name, head=head)
            whole = step.head(head)
            np.testing.assert_array_equal(table.value, whole.reshape(table.value.shape))
            np.testing.assert_equal(own.shape(name), table.value.shape)
            rows = [0] if own.shape(name)[0] < 3 else [0, 2]
            few = own.table(name, rows)
            np.testing.assert_array_equal(few.value, table.value[rows], err_msg=step.name)
            if table.hidden is not None:
                np.testing.assert_array_equal(few.hidden, table.hidden[rows])
                for k, row in enumerate(rows):
                    np.testing.assert_equal(few.hidden_by(k, 3), table.hidden_by(row, 3))


@pytest.mark.parametrize(
    ("queries", "keys", "width", "columns"),
    [(0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 2, 0), (0, 0, 1, 1), (2, 2, 0, 2)],
)
def test_sizes_of_zero_can_be_shown(queries: int, keys: int, width: int, columns: int) -> None:
    explanation = regard.explain(
        np.ones((queries, width)), np.ones((keys, width)), np.ones((keys, columns)), scale=1.0
    )
    text = explanation_text(explanation)
    assert text.rstrip().endswith(READING_NOTE)
    assert f"{keys} key{'s' * (keys != 1)} × {columns} number" in text
    statistics_text(explanation)


def test_the_largest_of_many_terms_are_shown_and_the_rest_is_one_number() -> None:
    vectors = np.random.default_rng(3).standard_normal((40, 4))
    text = walk_text(regard.explain(vectors, vectors, vectors).why("output", 5, 1))
    first = text.split("\n\n")[0]
    np.testing.assert_equal(len(re.findall(" = ", first)) - 2, 15)  # the formula, the cell
    assert re.search("\n    25 more, together +−?[0-9.]+\n    sum ", first)
    assert "All terms of a sum: --json" in text
    assert_terms_add_up(text, 8)


# --- heads ---------------------------------------------------------------------------------------


def test_one_head_is_shown_at_a_time_and_named() -> None:
    explanation = regard.explain(everything())
    for head in range(4):
        text = explanation_text(explanation, ["weights", "queries", "keys"], head)
        assert f"Head {head} of 4" in text
        assert f"Head {head} has the columns {2 * head} to {2 * head + 1} of W_q." in text
        own = f"Key head {head // 2} has the columns {2 * (head // 2)} to {2 * (head // 2) + 1}"
        assert own in " ".join(text.split())
        number = explanation.steps["queries"].value[head, 2, 1]
        assert format_number(number) in text


def test_a_call_without_heads_does_not_speak_of_them() -> None:
    assert "ead 0" not in explanation_text(example("she-likes-coffee"))


# --- colour --------------------------------------------------------------------------------------


@pytest.mark.parametrize("colours", ["truecolor", "256", "standard"])
def test_colour_hides_no_digit(colours: str) -> None:
    explanation = example("causal-mask")
    plain = explanation_text(explanation, width=100)
    coloured = explanation_text(explanation, width=100, color_system=colours)
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    np.testing.assert_equal(
        [line.rstrip() for line in stripped.split("\n")],
        [line.rstrip() for line in plain.split("\n")],
    )


@pytest.mark.parametrize("background", ["", "15;0", "0;15"])
@pytest.mark.parametrize("sign", [1, -1])
def test_shades_stay_distinct_where_there_are_only_256_colours(
    background: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", background)
    styles = [colours.shading(sign * share, few=True) for share in np.linspace(0.1, 1, 10)]
    behind = [style.bgcolor.downgrade(ColorSystem.EIGHT_BIT).number for style in styles]
    np.testing.assert_equal(len(set(behind)), 5)
    np.testing.assert_equal(sum(a != b for a, b in pairwise(behind)), 4)
    for style in styles:
        pair = [color.get_truecolor() for color in (style.color, style.bgcolor)]
        assert colours.contrast(*pair) >= READABLE


def test_plain_text_has_no_escapes() -> None:
    assert "\x1b" not in explanation_text(example("causal-mask"))


@pytest.mark.parametrize("background", ["", "15;0", "0;15", "0;default;15", "nonsense"])
def test_the_digits_stand_out_from_every_background(
    background: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", background)
    for share in np.linspace(-1, 1, 401):
        style = colours.shading(float(share))
        if style is not None:
            pair = [color.get_truecolor() for color in (style.color, style.bgcolor)]
            assert colours.contrast(*pair) >= READABLE


def test_larger_numbers_are_further_from_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    for background, dark in (("15;0", True), ("0;15", False)):
        monkeypatch.setenv("COLORFGBG", background)
        behind = (0, 0, 0) if dark else (255, 255, 255)
        for sign in (1, -1):
            styles = [colours.shading(sign * share) for share in (0.1, 0.4, 0.7, 1.0)]
            away = [colours.contrast(style.bgcolor.get_truecolor(), behind) for style in styles]
            np.testing.assert_equal(away, sorted(away))


# --- ASCII ---------------------------------------------------------------------------------------


def test_every_formula_symbol_and_sentence_can_be_printed_in_ascii() -> None:
    explanation = regard.explain(everything())
    explanation_text(explanation, encoding="ascii")
    explanation_text(explanation, list(explanation.steps), encoding="ascii")
    shown(lambda console: terminal.print_statistics(explanation, console), encoding="ascii")
    walk_text(explanation.why("projected_output", "b", 0), encoding="ascii")
    unshifted = regard.explain(everything(), softmax="unshifted", scale=-0.5, softcap=None)
    explanation_text(unshifted, list(unshifted.steps), encoding="ascii")
    explanation_text(tokens(["日本語", "−", "×"]), encoding="latin-1")


def test_ascii_spells_out_what_it_cannot_print() -> None:
    text = explanation_text(example("causal-mask"), encoding="ascii")
    for spelled in ("A = Q * K^T", "A_s = A / sqrt(D)", "else -inf", "z = sum_j Y", "4 x 4"[:1]):
        assert spelled in text
    assert "\\u65e5" in explanation_text(tokens(["日", "b"]), ["weights"], encoding="ascii")


# --- from one number back ------------------------------------------------------------------------

TERM = re.compile(r"^  [ ▸] (?P<label>.*?)  (?P<rest>.*)$")


def numbers_in(text: str) -> list[float]:
    return [
        float(number.replace("−", "-"))
        for number in re.findall(r"−?\d+(?:\.\d+)?(?:e[+-]\d+)?", text)
    ]


def assert_terms_add_up(text: str, digits: int) -> int:
    """How many sums are printed, each of which its printed terms must give, but for rounding."""
    found = 0
    for block in text.split("\n\n"):
        lines = block.split("\n")
        sums = [k for k, line in enumerate(lines) if re.match(r"^    sum ", line)]
        for end in sums:
            start = next(k for k in range(end, 0, -1) if re.match(r"^  [^ ▸].* = ", lines[k])) + 2
            terms, rounding = [], 0.0
            for line in lines[start:end]:
                term = numbers_in(line)[-1]
                terms.append(term)
                # The last digit of a term is that of 10^-digits, less where it is e-20.
                rounding += 0.5 * 10.0**-digits * max(1.0, abs(term))
                if " × " in line:
                    first, second, product = numbers_in(line.split("  ", 2)[-1])[-3:]
                    slack = 10.0**-digits * (abs(first) + abs(second) + 2)
                    np.testing.assert_allclose(product, first * second, rtol=0, atol=slack)
            total = numbers_in(lines[end])[-1]
            rounding += 0.5 * 10.0**-digits
            np.testing.assert_allclose(math.fsum(terms), total, rtol=0, atol=rounding)
            found += 1
    return found


@pytest.mark.parametrize("digits", [1, 2, 4, 8, 12])
def test_the_printed_terms_add_up_as_printed_at_every_level(digits: int) -> None:
    text = walk_text(example("she-likes-coffee").why("output", "she", 2), digits)
    np.testing.assert_equal(assert_terms_add_up(text, digits), 6)  # O, z, A, V, K, Q


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_terms_of_every_output_add_up(name: str) -> None:
    explanation = example(name)
    for at in np.ndindex(*explanation.steps["output"].shape):
        text = walk_text(explanation.derive("output", at))
        assert assert_terms_add_up(text, 8) >= 2


def test_rounding_is_said_exactly_where_a_shown_number_is_rounded() -> None:
    explanation = example("she-likes-coffee")
    said = "(numbers are rounded to 8 decimals"
    assert said in walk_text(explanation.why("output", "she", 2))
    assert said not in walk_text(explanation.why("queries", "she", 0))


@pytest.mark.parametrize("digits", [0, 3, 17])
def test_the_number_of_digits_is_what_was_asked_for(digits: int) -> None:
    text = explanation_text(example("the-cat-sat"), ["weights"], None, digits)
    decimals = [len(part) for part in re.findall(r"\d\.(\d+)", text.split("┼")[1])]
    np.testing.assert_equal(max(decimals, default=0), digits)


def walks() -> list[tuple[str, Stop, tuple[Stop, ...]]]:
    found = []
    for name in EXAMPLES:
        explanation = example(name)
        for step in explanation.steps.values():
            first = explanation.derive(step.name, (0,) * len(step.axes))
            stops = walk(first)
            found.append((f"{name} {step.name}", stops[0], stops))
    return found


def test_a_walk_passes_each_cell_once_and_only_by_way_of_one_before_it() -> None:
    for name, first, stops in walks():
        cells = [(stop.derivation.step, stop.derivation.index) for stop in stops]
        np.testing.assert_equal(len(set(cells)), len(cells), err_msg=name)
        reached = {cells[0]}
        assert first is stops[0]
        for stop in stops:
            assert (stop.derivation.step, stop.derivation.index) in reached, name
            reached |= {(operand.step, operand.index) for operand in stop.derivation.operands}


def test_a_walk_leads_down_to_given_numbers() -> None:
    for name, _, stops in walks():
        given = {
            operand.step
            for stop in stops
            for operand in stop.derivation.operands
            if stop.derivation.open(stop.derivation.operands.index(operand)).op == "given"
        }
        computed = len(stops) > 1 or stops[0].derivation.op not in ("given", "visible")
        assert bool(given) == computed or stops[-1].derivation.hidden, name


def test_a_walk_is_short_enough_to_read() -> None:
    she = example("she-likes-coffee")
    np.testing.assert_array_less(7, len(walk(she.why("output", "she", 2))))
    for name in EXAMPLES:
        explanation = example(name)
        for at in np.ndindex(*explanation.steps["output"].shape):
            np.testing.assert_array_less(len(walk(explanation.derive("output", at))), 15)


def test_a_walk_follows_both_factors_of_the_largest_term() -> None:
    for _, _, stops in walks():
        cells = {(stop.derivation.step, stop.derivation.index) for stop in stops}
        for stop in stops:
            if stop.followed is None:
                continue
            terms, operands = stop.derivation.terms, stop.derivation.operands
            largest = max(abs(term.value) for term in terms)
            if stop.derivation.op != "max":
                np.testing.assert_equal(abs(terms[stop.followed].value), largest)
            for number in terms[stop.followed].operands:
                operand = operands[number]
                inner = stop.derivation.open(number)
                assert inner.op == "given" or (operand.step, operand.index) in cells


def test_a_walk_follows_a_nan_before_anything_else() -> None:
    query = np.array([[1.0, np.nan, 1e9]])
    explanation = regard.explain(query, np.ones((2, 3)), np.ones((2, 1)))
    stops = walk(explanation.why("scores", 0, 1))
    np.testing.assert_equal(largest_term(stops[0].derivation), 1)


def test_a_walk_ends_at_a_hidden_cell() -> None:
    stops = walk(example("causal-mask").why("weights", 0, 3))
    np.testing.assert_equal([stop.derivation.step for stop in stops], ["weights"])
    assert "causal: hidden (key 3 > position 0)" in walk_text(stops[0].derivation)


def test_the_way_to_another_number_is_one_that_can_be_typed() -> None:
    explanation = regard.explain(everything())
    derivation = explanation.why("projected_output", "b", 0)
    text = walk_text(derivation, width=200)
    (asked,) = re.findall(r"To follow another one: --why (\S+) (\S+) (\S+)(?: --head (\d))?", text)
    step, row, column, head = asked
    where = [word for word in (row, column) if word]
    other = explanation.why(step, *where, head=int(head) if head else None)
    passed = {(s.derivation.step, s.derivation.index) for s in walk(derivation)}
    assert (other.step, other.index) not in passed


def test_a_hint_names_what_is_hard_to_type_by_its_position() -> None:
    evil = tokens(["\x1b[31mred", "--step", "x" * 61, "it's"])
    text = explanation_text(evil, width=200)
    assert "such as output 0 0\n" in text
    hints = [terminal._why_arguments(evil.why("output", row, 1)) for row in range(4)]
    np.testing.assert_equal(
        hints, ["output 0 1", "output 1 1", "output 2 1", "output 'it'\"'\"'s' 1"]
    )


def test_a_hint_for_a_key_names_a_query_head_that_reads_it() -> None:
    values = np.ones((2, 2, 1))
    values[1, 0, 0] = np.nan
    explanation = regard.explain(np.ones((4, 1, 1)), np.ones((2, 2, 1)), values)
    text = " ".join(explanation_text(explanation).split())
    assert "--why values 0 0 --head 2" in text
    assert np.isnan(explanation.why("values", 0, 0, head=2).value)


# --- statistics, differences ---------------------------------------------------------------------


def test_the_variances_are_printed_to_eight_significant_digits() -> None:
    explanation = example("causal-mask")
    text = shown(lambda console: terminal.print_statistics(explanation, console), width=100)
    for variance in ("1.3772889", "0.7481376", "1.2000978", "2.4433005", "0.30541256"):
        assert variance in text
    assert "Dividing by √8 brings it to 0.30541256." in " ".join(text.split())


def statistics_text(explanation: regard.Explanation, **kind: Any) -> str:
    text = shown(lambda console: terminal.print_statistics(explanation, console), **kind)
    return " ".join(text.split())


def test_softmax_is_said_to_saturate_by_the_weights_and_not_by_the_scores() -> None:
    assert "in 1 of 2 rows one key gets more than 0.9" in statistics_text(example("animals-matrix"))
    assert "no key gets more than 0.742" in statistics_text(example("animals-vector"))
    apart = regard.explain([[0.0], [100.0]], [[1.0], [1.0]], [[1.0], [2.0]])  # scores by row alike
    assert "no key gets more than 0.5 of" in statistics_text(apart)
    near = regard.explain([[0.0], [6.0]], [[1.0], [0.0]], [[1.0], [2.0]], causal=True)
    assert "in every row one key gets more than 0.9" in statistics_text(near)
    one = regard.explain([[0.0], [6.0]], [[1.0]], [[1.0]])  # no row has a choice
    assert "aturate" not in statistics_text(one)


def test_the_statistics_of_many_rows_are_elided_as_tables_are() -> None:
    vectors = np.random.default_rng(3).standard_normal((30, 4))
    explanation = regard.explain(vectors, vectors, vectors)
    text = shown(lambda console: terminal.print_statistics(explanation, console))
    assert re.search(r"^  … 19 more$", text, re.MULTILINE)
    assert "All 30 rows: --statistics --json" in text
    rows = re.findall(r"^  (\d+) +│", text, re.MULTILINE)
    np.testing.assert_equal(rows, [str(n) for n in (*range(6), *range(25, 30))])


def test_the_row_statistics_are_those_of_the_chosen_head() -> None:
    explanation = regard.explain(everything())
    text = shown(lambda console: terminal.print_statistics(explanation, console, 3), width=100)
    entropy = explanation.statistics().rows.entropy[3]
    for number in entropy:
        assert significant(float(number)) in text


def test_a_mismatch_shows_both_numbers_and_the_derivation() -> None:
    explanation = example("she-likes-coffee")
    wrong = regard.Expectation(step="weights", at=("likes", "coffee"), value=0.25)
    (mismatch,) = explanation.check((wrong,))
    text = shown(lambda console: terminal.print_mismatches([mismatch], console))
    assert "weights[likes, coffee] differs" in text
    assert "expected 0.25\n" in text
    assert f"got      {mismatch.got!r}\n" in text
    assert "= Y[likes, coffee] / z[likes]" in text


def test_many_mismatches_are_counted_not_all_printed() -> None:
    explanation = example("causal-mask")
    wrong = regard.Expectation(step="scores", value=np.zeros((4, 4)))
    found = explanation.check((wrong,))
    text = shown(lambda console: terminal.print_mismatches(found, console))
    np.testing.assert_equal(text.count("differs"), terminal.MOST_MISMATCHES)
    assert f"… {16 - terminal.MOST_MISMATCHES} more differ" in text


def test_a_comparison_shows_where_two_explanations_part() -> None:
    problem = regard.load_problem("the-cat-sat")
    here, there = regard.explain(problem), regard.explain(problem, causal=True)
    text = shown(lambda console: terminal.print_comparison(here.compare(there), console))
    assert "row_maximum[The] is the first number that differs" in text
    assert "\nhere\n" in text
    assert "\nthere\n" in text
    other = regard.explain(problem, scale=1.0)
    text = shown(lambda console: terminal.print_comparison(here.compare(other), console))
    assert text.startswith("scale is the first number that differs\n")
    same = shown(lambda console: terminal.print_comparison(here.compare(here), console))
    np.testing.assert_equal(same, "No step differs.\n")


# --- the story -----------------------------------------------------------------------------------


def test_every_step_is_told_once_or_is_a_by_product() -> None:
    for explanation in (regard.explain(everything()), *(example(name) for name in EXAMPLES)):
        told = [name for names in story.outline(explanation).values() for name in names]
        np.testing.assert_equal(
            sorted((*told, *story.by_products(explanation))), sorted(explanation.steps)
        )
        order = list(explanation.steps)
        for names in story.outline(explanation).values():
            places = [order.index(name) for name in names]
            np.testing.assert_equal(places, sorted(places))


def test_the_sections_come_in_the_order_of_the_textbook() -> None:
    titles = list(story.outline(regard.explain(everything())))
    np.testing.assert_equal(titles, list(story.SECTIONS))


def test_there_are_words_for_every_step() -> None:
    for explanation in (
        regard.explain(everything()),
        regard.explain(everything(), softmax="unshifted"),
        regard.explain(everything(), scale=2.0),
    ):
        for step in explanation.steps:
            words = step_words.sentences(head_view.Head(explanation, None), step)
            assert words, step
            assert all(sentence.endswith((".", "?")) for sentence in words), step
    assert set(regard.explain(everything()).steps) <= set(declared())


def test_a_step_that_is_not_there_says_why() -> None:
    with pytest.raises(LabelError, match="nothing hides a key"):
        explanation_text(example("she-likes-coffee"), ["masked"])


def sentences(explanation: regard.Explanation, step: str) -> str:
    return " ".join(step_words.sentences(head_view.Head(explanation, None), step))


def test_a_constant_bias_is_said_to_change_nothing() -> None:
    explanation = example("causal-mask")
    assert "The bias is 1 everywhere" in sentences(explanation, "biased")
    assert "bias" in story.by_products(explanation)
    rows = tokens(["a", "b"], bias=np.array([[1.0], [2.0]]))
    assert "changes nothing after softmax" in sentences(rows, "biased")
    other = tokens(["a", "b"], bias=np.array([1.0, 2.0]))
    assert "changes nothing" not in sentences(other, "biased")


def test_a_constant_bias_beside_a_sink_is_not_said_to_change_nothing() -> None:
    for bias in (1.0, np.array([[1.0], [2.0]])):
        words = sentences(tokens(["a", "b"], bias=bias, sink=0.0), "biased")
        assert "changes nothing" not in words


def test_a_row_bias_that_differs_only_where_hidden_changes_nothing() -> None:
    hidden = tokens(["a", "b"], bias=np.array([[1.0, 9.0], [2.0, 2.0]]), causal=True)
    assert "changes nothing after softmax" in sentences(hidden, "biased")


def test_unshifted_exponentials_name_the_limit() -> None:
    assert "709.78" in sentences(example("she-likes-coffee"), "exponentials")
    assert "709.78" not in sentences(example("the-cat-sat"), "exponentials")
    large = np.array([[40.0]])
    broken = regard.explain(large, large, large, softmax="unshifted")
    assert "exp overflows to ∞" in sentences(broken, "exponentials")
    np.testing.assert_equal(np.exp(np.array(EXP_LIMIT)) < np.inf, True)


def test_unshifted_exponentials_that_all_underflow_are_said_to_lose_the_weights() -> None:
    keys = np.ones((2, 1))
    lost = regard.explain([[-800.0], [0.0]], keys, keys, softmax="unshifted")
    assert "in 1 row every exponential did" in sentences(lost, "exponentials")
    assert "does not change the weights" not in sentences(lost, "exponentials")
    assert "1 of 2 rows does not" in sentences(lost, "weights")
    fine = regard.explain([[-700.0], [0.0]], keys, keys, softmax="unshifted")
    assert "every exponential did" not in sentences(fine, "exponentials")
    assert "Every row adds up to 1;" in sentences(fine, "weights")


def test_rows_are_said_to_add_up_to_1_only_where_they_do() -> None:
    blind = tokens(["a", "b"], mask=np.array([[True, True], [False, False]]))
    assert "Every row that sees a key adds up to 1;" in sentences(blind, "weights")
    nan = regard.explain([[np.nan], [1.0]], [[1.0], [2.0]], [[1.0], [2.0]])
    assert "1 of 2 rows does not" in sentences(nan, "weights")
    sink = tokens(["a", "b"], sink=0.5, mask=np.array([[True, True], [False, False]]))
    assert "Every row adds up to 1 with the sink's share" in sentences(sink, "weights")


def test_random_numbers_are_said_to_be_random() -> None:
    assert "Random, not learned" in " ".join(story.opening(example("random-three-tokens")))
    assert "Random" not in " ".join(story.opening(example("she-likes-coffee")))


def test_a_symmetric_table_is_explained_only_where_the_weights_are_the_same() -> None:
    assert "symmetric" in sentences(example("she-likes-coffee"), "scores")
    assert "symmetric" not in sentences(example("the-cat-sat"), "scores")


def test_the_rules_that_hide_keys_are_explained() -> None:
    words = sentences(regard.explain(everything()), "masked")
    for rule in ("Mask:", "causal:", "window:", "lengths:", "segments:"):
        assert rule in words
    assert "bias −inf:" not in words
    assert "No key is hidden" in sentences(tokens(["a"], mask=np.array([True])), "masked")


def test_a_weight_of_nearly_one_is_pointed_out() -> None:
    assert 'Nearly all of the weight of "reptile" is on "lizard"' in sentences(
        example("animals-matrix"), "weights"
    )
    assert "Nearly all" not in sentences(example("animals-vector"), "weights")
    assert "Nearly all" not in sentences(tokens(["a", "b"], causal=True), "weights")


def test_the_reading_note_ends_every_explanation() -> None:
    for name in EXAMPLES:
        text = explanation_text(example(name), width=120)
        np.testing.assert_equal(text.rstrip().split("\n")[-1], READING_NOTE)

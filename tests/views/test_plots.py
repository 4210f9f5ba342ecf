"""Heat maps: their numbers and colours, how many artists draw them, and that nothing is cut off."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest

import regard
from calls import numbers
from regard.errors import OptionError
from regard.explanation.table import Table
from regard.faces import Explanation
from regard.problems.files import load_problem
from regard.views import plots

pytestmark = pytest.mark.needs("matplotlib")

WORDS = ["The", "quick", "brown", "fox", "jumps"]
HARD = [
    "internationalization-and-localization",
    "$x_1$ and $y$",
    "a_name_in_snake_case_of_many_words",
    "one $ sign",
    "\\frac{1}{2} \\$",
    "日本語のラベルはとても長い",
    "🙂 and 🎉",
    "\u202eright to left",
]


@pytest.fixture(autouse=True)
def pyplot() -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def example(name: str = "causal-mask") -> Explanation:
    return regard.explain(load_problem(name))


def explained(heads: int, tokens: int, names: list[str] | None = None, **options: Any) -> Any:
    query, key, value = (numbers((heads, tokens, 16), seed=seed) for seed in range(3))
    labels = {} if names is None else {"query_labels": names, "key_labels": names}
    return regard.explain(query, key, value, **labels, **options)


def table(values: Any, hidden: Any = None, name: str = "label") -> Table:
    values = np.array(values, np.float64)
    labels = ([f"{name} {n}" for n in range(size)] for size in values.shape)
    return Table("scores", "A", "A = Q·Kᵀ", values, *map(tuple, labels), (), hidden)


def shown_texts(figure: Any) -> list[Any]:
    """Every text that a reader sees, once the figure is drawn."""
    from matplotlib.text import Text

    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def assert_all_texts_are_inside(figure: Any) -> None:
    for text in shown_texts(figure):
        box = text.get_window_extent()
        inside = figure.bbox
        within = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= inside.x1 and box.y1 <= inside.y1
        assert within, (text.get_text(), box, inside)


# --- numbers and colours --------------------------------------------------------------------------


def test_a_plot_shows_the_numbers_of_the_step_and_hatches_what_is_hidden(pyplot: Any) -> None:
    explanation = example()
    axes = explanation.plot("weights")
    (image,) = axes.get_images()
    drawn = image.get_array()
    visible = explanation.steps["visible"].value
    np.testing.assert_array_equal(drawn.mask, ~visible)
    np.testing.assert_array_equal(drawn.compressed(), explanation.steps["weights"].value[visible])
    np.testing.assert_equal([text.get_text() for text in axes.texts][:2], ["1", "0.451"])
    (hatched,) = axes.patches
    assert hatched.get_hatch()
    for (row, column), seen in np.ndenumerate(visible):
        np.testing.assert_equal(hatched.get_path().contains_point((column, row)), not seen)
    ours = pyplot.figure().add_subplot()
    assert explanation.plot("scores", axes=ours) is ours
    np.testing.assert_equal(len(ours.figure.axes), 1)


def test_numbers_that_are_not_finite_are_told_from_hidden_ones() -> None:
    values = [[1.0, np.nan, 3.0], [-np.inf, 5.0, np.nan]]
    hidden = np.array([[False, False, True], [False, False, True]])
    axes = plots.plot(table(values, hidden))
    cells = [(column, row) for row in range(2) for column in range(3)]
    covered = [[cell for cell in cells if p.get_path().contains_point(cell)] for p in axes.patches]
    np.testing.assert_equal(covered, [[(2, 0), (2, 1)], [(1, 0), (0, 1)]])
    legend = axes.figure.axes[-1].get_legend().get_texts()
    np.testing.assert_equal([text.get_text() for text in legend], ["hidden", "NaN or infinite"])


def test_heads_are_plotted_side_by_side_on_one_scale() -> None:
    drawn = explained(6, 4).plot_heads("scores")
    np.testing.assert_equal([axes.get_title() for axes in drawn], [f"head {n}" for n in range(6)])
    np.testing.assert_equal(len({axes.get_images()[0].norm.vmax for axes in drawn}), 1)
    sizes = [axes.get_position().size for axes in drawn]
    np.testing.assert_allclose(sizes, [sizes[0]] * 6, rtol=1e-12)


def test_heads_have_their_numbers_written_all_or_none() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0.1, 0.9, size=(4, 6, 6))
    alike = [len(axes.texts) for axes in plots.plot_heads([*map(table, values)])]
    np.testing.assert_equal(alike, [36] * 4)
    values[3, 0, 0] = 1.234e-13  # which is longer than a cell
    written = [len(axes.texts) for axes in plots.plot_heads([*map(table, values)])]
    np.testing.assert_equal(written, [0] * 4)


def colour_bar(axes: Any) -> list[str]:
    axes.figure.canvas.draw()
    return [tick.get_text() for tick in axes.figure.axes[-1].get_yticklabels()]


def test_colours_end_at_the_largest_number_and_lie_around_zero_where_some_are_negative() -> None:
    np.testing.assert_equal(colour_bar(plots.plot(table([[0.1, 0.3]]))), ["0", "0.15", "0.3"])
    np.testing.assert_equal(colour_bar(plots.plot(table([[-4, 2]]))), ["−4", "0", "4"])
    np.testing.assert_equal(colour_bar(plots.plot(table([[0, 0]]))), ["0", "0.5", "1"])


def test_a_few_large_numbers_do_not_leave_the_others_pale() -> None:
    values = np.full((40, 40), 0.1)
    values[0, 0] = 1
    np.testing.assert_equal(colour_bar(plots.plot(table(values))), ["0", "0.05", "≥ 0.1"])
    np.testing.assert_equal(colour_bar(plots.plot(table(-values))), ["≤ −0.1", "0", "≥ 0.1"])


def test_the_colour_bar_of_a_gradient_says_which_way_the_loss_goes(pyplot: Any) -> None:
    explanation = example("look-back")
    bar = colour_bar(explanation.plot("d_scores"))
    np.testing.assert_equal(bar, ["−0.189: loss falls", "0", "0.189: loss rises"])
    # 0 is white where all numbers are positive too.
    weights = colour_bar(example("coffee-target").plot("d_weights"))
    np.testing.assert_equal(weights, ["−0.530: loss falls", "0", "0.530: loss rises"])
    assert_all_texts_are_inside(explanation.plot("d_scores").figure)
    assert "loss" not in "".join(colour_bar(explanation.plot("weights")))


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 3)),
        np.zeros((3, 0)),
        [[np.finfo(np.float64).max, -np.finfo(np.float64).max], [0, 1]],
        [[5e-324, 0]],
        [[np.nan, np.inf, -np.inf]],
        np.where(np.arange(900).reshape(30, 30) == 7, 1e308, 1e-3),
    ],
    ids=["no rows", "no columns", "the largest", "the least", "no number", "far apart"],
)
def test_any_numbers_can_be_drawn(values: Any) -> None:
    for axes in (plots.plot(table(values)), plots.plot_heads([table(values)] * 2)[0]):
        for kind in ("png", "svg"):
            axes.figure.savefig(BytesIO(), format=kind)


def test_without_matplotlib_a_plot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r'pip install "regard\[plot\]"'):
        example().plot()


# --- artists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 64, 512])
def test_hidden_cells_are_one_artist_however_many_there_are(tokens: int) -> None:
    hidden = np.random.default_rng(0).random((tokens, tokens)) < 0.5
    axes = plots.plot(table(np.zeros((tokens, tokens)), hidden))
    np.testing.assert_equal((len(axes.patches), len(axes.images)), (1, 1))
    np.testing.assert_equal(len(axes.collections), 0)


def test_heads_of_many_cells_take_few_artists() -> None:
    drawn = explained(12, 64, causal=True).plot_heads()
    # Of each: image, patch, title, axes and their ticks. One for each hidden cell were 24192.
    np.testing.assert_array_less(len(drawn[0].figure.findobj()), 12 * 300)


# --- labels ---------------------------------------------------------------------------------------


def labels_of(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.sweep
@pytest.mark.parametrize("step", ["weights", "row_sums", "scale"])
@pytest.mark.parametrize("names", [WORDS, HARD, [f"{n:03} {'w' * 36}" for n in range(30)]])
@pytest.mark.parametrize("heads", [1, 2, 12])
def test_nothing_that_is_written_is_cut_off(heads: int, names: list[str], step: str) -> None:
    explanation = explained(heads, len(names), names, causal=True)
    (first, *_) = explanation.plot_heads(step) if heads > 1 else (explanation.plot(step),)
    assert_all_texts_are_inside(first.figure)


@pytest.mark.parametrize("dpi", [50, 72, 200])
def test_nothing_is_cut_off_at_any_resolution(dpi: int) -> None:
    figure = explained(1, len(HARD), HARD).plot().figure
    figure.set_dpi(dpi)
    assert_all_texts_are_inside(figure)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(1, 1), (1, 512), (512, 1), (3, 64), (64, 3), (200, 200)])
@pytest.mark.parametrize("size", [6, 20])
def test_nothing_is_cut_off_in_any_shape_and_size_of_font(
    pyplot: Any, shape: tuple[int, int], size: int
) -> None:
    with pyplot.rc_context({"font.size": size}):
        one = table(np.ones(shape))
        for axes in (plots.plot(one), plots.plot_heads([one] * 3)[0]):
            assert_all_texts_are_inside(axes.figure)


@pytest.mark.sweep
@pytest.mark.parametrize("tokens", [5, 14, 40, 64, 65, 200, 512])
@pytest.mark.parametrize("heads", [1, 4])
def test_names_do_not_overlap_and_the_axis_says_which_are_written(heads: int, tokens: int) -> None:
    names = [f"word {n}" for n in range(tokens)]
    explanation = explained(heads, tokens, names)
    axes = explanation.plot_heads()[0] if heads > 1 else explanation.plot()
    axes.figure.canvas.draw()
    for axis, what in ((axes.yaxis, "query rows"), (axes.xaxis, "keys")):
        drawn = axis.get_ticklabels()
        step = names.index(labels_of(axis)[1])
        np.testing.assert_equal(labels_of(axis), names[::step])
        said = what if step == 1 else f"{what}, every {step}{'nd' if step == 2 else 'th'} named"
        np.testing.assert_equal(axis.get_label_text(), said)
        boxes = [label.get_window_extent() for label in drawn if label.get_rotation() != 45]
        sides = sorted(
            (box.x0, box.x1) if axis is axes.xaxis else (box.y0, box.y1) for box in boxes
        )
        for (_, end), (begin, _) in itertools.pairwise(sides):
            assert end <= begin, (end, begin)


def test_labels_are_text_and_no_formulas(pyplot: Any) -> None:
    with pyplot.rc_context({"text.usetex": True}):
        axes = explained(1, 5, HARD[:5]).plot()
    for axis in (axes.xaxis, axes.yaxis):
        np.testing.assert_equal(labels_of(axis), HARD[:5])
        axes.figure.canvas.draw()
        for label in axis.get_ticklabels():
            assert not label.get_parse_math()
            assert not label.get_usetex()


def test_a_label_is_shortened_after_48_characters() -> None:
    axes = plots.plot(table([[1.0]], name="w" * 60))
    np.testing.assert_equal(labels_of(axes.xaxis), ["w" * 47 + "…"])


def test_a_letter_that_only_another_font_has_is_drawn_in_that_font(pyplot: Any) -> None:
    letter = "\N{LATIN SMALL LETTER D WITH PALATAL HOOK}"  # in STIX, which matplotlib brings
    axes = plots.plot(table([[1.0]], name=letter))
    np.testing.assert_equal(labels_of(axes.xaxis), [f"{letter} 0"])
    families = axes.get_xticklabels()[0].get_fontfamily()
    np.testing.assert_equal(families[:-1], pyplot.rcParams["font.family"])
    axes.figure.canvas.draw()  # without a warning of a missing glyph


def test_a_letter_that_no_font_has_is_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_fonts_of", lambda letters, known: ((), letters))
    axes = plots.plot(table([[1.0]], name="ab\N{EGYPTIAN HIEROGLYPH A001}\u202e"))
    np.testing.assert_equal(labels_of(axes.xaxis), [r"ab\U00013000\u202e 0"])
    axes.figure.canvas.draw()

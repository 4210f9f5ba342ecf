"""The report without a browser: what a file holds, how large it is, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import Explanation
from regard.boundary.parse import parse_size
from regard.errors import DtypeError, OptionError, ProblemError
from regard.explanation.notation import format_number
from regard.problems.files import example_names, load_problem
from regard.views import report
from regard.views.head_view import Head
from regard.views.report import page
from regard.views.report.json_data import page_data
from regard.views.report.plan import make_plan, pooled
from regard.views.report.tables import printed
from regard.views.report.whatif import MASKED, conditions, form_of, switches, variants

NOISE = 2.0**-45  # of the largest number: what adding up may leave where the sum is 0


def example(name: str = "she-likes-coffee") -> Explanation:
    return regard.explain(load_problem(name))


def random_heads(heads: int, tokens: int, width: int = 16, seed: int = 0) -> Explanation:
    rng = np.random.default_rng(seed)
    arrays = (rng.normal(size=(heads, tokens, width)).astype(np.float32) for _ in range(3))
    return regard.explain(*arrays, causal=True, title="Random heads")


class Parts(HTMLParser):
    """The tags of a page and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attributes))))
        kind = dict(attributes).get("type", "")
        self._open = f"{tag} {kind}".strip() if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside.setdefault(self._open, []).append(data)


# --- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", example_names())
def test_a_page_of_an_example_is_one_small_file_that_names_nothing_outside(name: str) -> None:
    text = report.html(example(name))
    gradients = load_problem(name).target is not None
    assert len(text.encode()) < (250_000 if gradients else 180_000)
    links = re.findall(r"""\b(?:src|href|action)\s*=\s*["']([^"']*)""", text)
    assert links == ["data:,"]
    assert "url(" not in text
    assert "/**" not in text  # the types of the script
    assert not re.search(r"https?://|\bfetch\(|XMLHttp|WebSocket|sendBeacon|import\(", text)


def test_gradients_make_a_page_at_most_twice_as_large() -> None:
    problem = load_problem("look-back")
    forward = report.html(regard.explain(problem.replace(target=None, expect=())))
    assert len(forward.encode()) < len(report.html(regard.explain(problem)).encode())
    assert len(report.html(regard.explain(problem)).encode()) < 2 * len(forward.encode())
    assert "d_queries" not in forward


def test_where_not_every_head_fits_the_gradients_are_left_out_and_the_page_says_so() -> None:
    arrays = np.random.default_rng(0).normal(size=(4, 4, 100, 64))
    explanation = regard.explain(*arrays[:3], target=arrays[3])
    text = report.html(explanation, budget=600_000)
    assert "The loss and the gradients are left out" in text
    assert len(text.encode()) <= 600_000
    assert "The loss and the gradients are left out" not in report.html(explanation)


def test_the_policy_allows_this_style_and_this_script_and_nothing_else() -> None:
    text = report.html(example())
    parts = Parts(text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = policy[1].replace("&#39;", "'")
    assert rules.startswith("default-src 'none'; ")
    for kind, source in (("script module", "script-src"), ("style", "style-src")):
        (content,) = parts.inside[kind]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}';" in rules
    assert "unsafe" not in rules


def test_no_two_modules_of_the_script_share_an_outermost_name() -> None:
    declared = r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+|[\[{][^=]*[\]}])"
    folder = files("regard") / "views" / "report"
    sources = [one.read_text("utf-8") for one in folder.iterdir() if one.name.endswith(".js")]
    names = [
        name
        for source in sources
        for found in re.findall(declared, source, re.MULTILINE)
        for name in re.findall(r"\w+", found)
    ]
    assert len(names) > 300
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_numbers_are_carried_as_bytes_and_come_back_as_they_were() -> None:
    odd = np.array([[np.nan, -0.0], [np.inf, -np.inf], [1e-300, 0.1]])
    parts = Parts(report.html(regard.explain(np.ones((1, 2)), odd, np.ones((3, 1)))))
    content = json.loads(parts.inside["script application/json"][0])
    raw = base64.b64decode(parts.inside["script text/plain"][0])
    place = content["layers"][0]["given"]["keys"]["-/-"]
    assert place["dtype"] == "f8"
    found = np.frombuffer(raw, "<f8", place["count"], place["at"])
    np.testing.assert_array_equal(found.view(np.uint64), odd.ravel().view(np.uint64))


@pytest.mark.parametrize(
    "text",
    ["</script><img src=x onerror=y>", "</script x", "<!--", '"><b a="', "a\u2028b\u202e", "&amp;"],
)
def test_text_from_outside_makes_no_element(text: str) -> None:
    def tags(label: str) -> list[Any]:
        arrays = [np.arange(6.0).reshape(3, 2)] * 3
        labels = (label, f"{label}2", label)
        explanation = regard.explain(
            *arrays,
            query_labels=labels,
            key_labels=labels,
            title=label,
            mask=regard.masks.Boolean(np.tri(3, dtype=bool), name=label),
        )
        return Parts(report.html({label: explanation, f"{label}1": explanation})).tags

    assert tags(text) == tags("benign")


def test_the_data_of_a_page_hold_no_character_that_markup_begins_with() -> None:
    explanation = regard.explain([[1.0]], [[1.0]], [[1.0]], key_labels=["<a> & \u2028"])
    (content,) = Parts(report.html(explanation)).inside["script application/json"]
    assert not set("<>&\u2028") & set(content)
    assert json.loads(content)["labelSets"][-1] == ["<a> & \\u2028"]


def test_a_page_of_regard_is_replaced_and_another_file_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    example().to_html(path)
    before = path.read_bytes()
    example("causal-mask").to_html(path)
    assert path.read_bytes() != before
    path.write_bytes(b" " * 1000 + before)  # of another author, who quotes a page
    with pytest.raises(ProblemError, match=r"page\.html: already exists"):
        example("causal-mask").to_html(path)
    assert path.read_bytes() == b" " * 1000 + before
    example().to_html(path, force=True)
    assert path.read_bytes() == before
    with pytest.raises(ProblemError, match="there is no folder"):
        example().to_html(tmp_path / "none" / "page.html")


def test_two_pages_of_the_same_explanation_are_the_same_bytes() -> None:
    assert report.html(example()) == report.html(example())


# --- what fits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["600kB", "1MB", "20MB"])
def test_a_page_stays_within_its_budget_and_says_what_it_pooled(budget: str) -> None:
    layers = {f"layer {n}": random_heads(6, 128, seed=n) for n in range(4)}
    text = report.html(layers, budget=budget)
    assert len(text.encode()) <= parse_size("budget", budget)
    said = re.search(r"(\d+) of 24 heads have all their numbers", text)
    assert (said is None) == (budget == "20MB")
    if said:
        assert 0 < int(said[1]) < 24


def random_call(*shape: int, **options: Any) -> Explanation:
    rng = np.random.default_rng(0)
    return regard.explain(*(rng.normal(size=shape) for _ in range(3)), **options)


def embedded() -> Explanation:
    square = np.random.default_rng(0).normal(size=(300, 300))
    weights = dict.fromkeys(("W_q", "W_k", "W_v"), square)
    return regard.explain(regard.Problem(embeddings=square[:8], heads=10, **weights))


LABELS = {"query_labels": ["語" * 60] * 30, "key_labels": ["<" * 60] * 30}
# What most of the bytes are.
HARD_TO_FIT = {
    "numbers": lambda: random_call(6, 100, 16, causal=True),
    "words": lambda: random_call(4, 60, 8, 4, causal=True),
    "labels": lambda: random_call(12, 30, 8, mask=np.tri(30) == 1, **LABELS),
    "tables": lambda: random_call(32, 32, causal=True, softcap=3.0, bias=np.eye(32)),
    "a mask": lambda: random_call(
        8, 200, 16, mask=np.random.default_rng(1).random((8, 200, 200)) > 0.5
    ),
    "32 bits": lambda: random_heads(12, 50),
    "embeddings": embedded,
}


@pytest.mark.parametrize("kind", HARD_TO_FIT)
def test_a_page_of_any_budget_is_built_once_and_stays_within_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def counted(*arguments: Any) -> Any:
        plans.append(arguments[1])
        return page_data(*arguments)

    monkeypatch.setattr(page, "page_data", counted)
    explanation, heads = HARD_TO_FIT[kind](), []
    for budget in (200_000, 270_000, 400_000, 600_000, 900_000, 3_000_000):
        plans.clear()
        try:
            text = report.html(explanation, budget=budget)
        except OptionError:
            assert not heads, "a larger budget is refused, and a smaller one was not"
            continue
        assert len(text.encode()) <= budget
        bare, plan = plans
        assert not any(layer.every for layer in bare.layers.values())
        heads.append(len(plan.layers[""].exact))
    assert heads[-1] == np.prod(explanation.batch_shape, dtype=int) * (explanation.heads or 1)


def test_one_head_that_does_not_fit_leaves_its_weights() -> None:
    rng = np.random.default_rng(0)
    explanation = regard.explain(*(rng.normal(size=(20, 5000)) for _ in range(3)))
    text = report.html(explanation, budget="300kB")
    assert len(text) < 300_000
    assert "0 of 1 heads have all their numbers" in text


def test_what_does_not_fit_at_all_is_refused_with_both_numbers() -> None:
    layers = {f"layer {n}": random_heads(12, 400, 2, seed=n) for n in range(6)}
    with pytest.raises(OptionError, match=r"budget is 200000 bytes, but .* needs about \d+"):
        report.html(layers, budget="200kB")


def test_embeddings_that_do_not_fit_are_left_out_and_the_page_says_so() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(300, 300)) for name in ("W_q", "W_k", "W_v")}
    explanation = regard.explain(
        regard.Problem(embeddings=rng.normal(size=(8, 300)), heads=10, **weights)
    )
    assert "start" not in " ".join(make_plan({"": explanation}, 10**8).said)
    plan = make_plan({"": explanation}, 900_000)
    assert plan.said[0].startswith("The embeddings and the weight matrices are left out")
    shown = plan.layers[""].explanation
    assert list(shown.steps)[:3] == ["queries", "keys", "values"]
    np.testing.assert_array_equal(shown.steps["output"].value, explanation.steps["output"].value)
    assert len(report.html(explanation, budget=900_000).encode()) <= 900_000


def test_tiles_are_the_mean_and_the_largest_and_rows_name_their_strongest_keys() -> None:
    explanation = random_heads(1, 70)
    weights = explanation.steps["weights"].value[0]
    found = pooled(Head(explanation, 0), 16, 3)
    edges = [70 * tile // 16 for tile in range(17)]
    for row, column in np.ndindex(16, 16):
        tile = weights[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
        assert found.largest[row, column] == tile.max()
        np.testing.assert_allclose(found.mean[row, column], tile.mean(), rtol=1e-12)
    for row in range(3, 70):
        best = np.sort(weights[row])[::-1][:3]
        np.testing.assert_array_equal(found.shares[row], best)
        np.testing.assert_array_equal(weights[row, found.keys[row]], best)


def test_a_large_matrix_is_printed_in_part_for_readers_without_javascript() -> None:
    explanation = random_heads(2, 50)
    shown = printed(Head(explanation, 1), "scores", 4)
    assert (len(shown.rows), shown.rows_left) == (8, 42)
    assert shown.rows[3][2].text == format_number(explanation.steps["scores"].value[1, 3, 2], 4)
    assert "50 × 50" in report.html(explanation)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.3, 4, "0.3"), (0.30004505, 4, "0.3000"), (1.99999, 4, "2.0000"), (-0.0, 4, "−0")],
)
def test_a_rounded_number_keeps_the_zeros_that_say_so(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


# --- switches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", example_names())
def test_without_a_switch_the_steps_are_those_of_the_explanation(name: str) -> None:
    explanation = example(name)
    own = tuple(explanation.source.steps.values())
    assert variants(form_of(explanation))[MASKED if "visible" in explanation.steps else 0] == own


@pytest.mark.parametrize("name", example_names())
def test_what_decides_about_each_step_gives_the_steps_of_every_variant(name: str) -> None:
    form = form_of(example(name))
    for bits, steps in variants(form).items():
        there = [step for step, deciding, value in conditions(form) if bits & deciding == value]
        assert tuple(there) == steps


def test_only_switches_that_change_something_are_offered() -> None:
    added = ("softcap", "sink")
    assert switches(example("animals-vector")) == ("scale", *added)
    assert switches(example("animals-matrix")) == ("scale", *added, "axis")
    assert switches(example("causal-mask")) == ("scale", "mask", "window", *added, "axis", "swap")
    assert switches(example("linear-attention")) == ("causal", "window")
    own = regard.explain(*[np.ones((3, 2))] * 3, causal=True, window=(1, 1), softcap=2.0, sink=0.0)
    assert not {"causal", "window", *added} & {*switches(own)}
    one = regard.explain(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)))
    assert "scale" not in switches(one)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": "5 apples"}, OptionError, "budget is 5 apples"),
        ({"budget": 1000}, OptionError, "budget is 1000 bytes; a page needs at least"),
        ({"budget": 1.5}, DtypeError, "budget must be bytes"),
        ({"budget": True}, DtypeError, "budget must be bytes"),
        ({"digits": 18}, OptionError, "digits is 18"),
        ({"digits": "4"}, DtypeError, "digits must be an int"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        report.html(example(), **arguments)


@pytest.mark.parametrize("given", [None, [example()], {"a": 1}, {1: example()}])
def test_only_explanations_make_a_page(given: Any) -> None:
    with pytest.raises(DtypeError, match="must be an Explanation"):
        report.html(given)
    with pytest.raises(OptionError, match="explanations is empty"):
        report.html({})


@pytest.mark.parametrize("shape", [(0, 2, 2), (0, 1, 2, 2)])
def test_an_explanation_without_heads_or_batch_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="nothing to show"):
        report.html(regard.explain(*[np.zeros(shape)] * 3))


# --- statistics, and what should come out --------------------------------------------------------


def part(text: str, kind: str) -> str:
    """One of the two parts at the end of a page, as text."""
    (found,) = re.findall(rf'<details class="part {kind}".*?</details>', text, re.DOTALL)
    return str(found)


def words(markup: str) -> list[str]:
    return [one.strip() for one in re.findall(r">([^<>]+)<", markup) if one.strip()]


@pytest.mark.parametrize("name", example_names())
def test_the_statistics_are_printed_and_folded_away(name: str) -> None:
    explanation = example(name)
    shown = part(report.html(explanation), "figures")
    assert not re.match(r"<details[^>]* open", shown)
    found = words(shown)
    statistics = explanation.statistics()
    for step, one in statistics.steps.items():
        at = found.index(step)
        noise = max(abs(one.minimum), abs(one.maximum)) * NOISE
        mean = 0.0 if abs(one.mean) < noise else one.mean  # 1e-17 says only that it is 0
        variance = 0.0 if one.variance < noise**2 else one.variance
        numbers = (mean, variance, one.minimum, one.maximum)
        assert found[at + 1 : at + 6] == [*(format_number(n, 4) for n in numbers), str(one.cells)]
    rows = statistics.rows
    for number in (*np.ravel(rows.entropy), *np.ravel(rows.effective_keys)):
        assert format_number(float(number), 4) in found


def test_the_statistics_are_those_of_the_head_that_is_shown() -> None:
    explanation = random_heads(3, 5)
    found = words(part(report.html(explanation), "figures"))
    own = explanation.statistics(head=0, batch=()).steps["scores"]
    assert found[found.index("scores") + 1] == format_number(own.mean, 4)
    assert format_number(own.mean, 4) != format_number(
        explanation.statistics().steps["scores"].mean, 4
    )


def test_what_the_problem_expects_is_right_or_wrong_with_the_expected_number() -> None:
    problem = load_problem("she-likes-coffee")
    text = report.html(regard.explain(problem))
    shown = part(text, "checks")
    assert "all 7 come out" in shown
    assert "Q[she, 0] = 0.33000000000000007, to within 5.6e-17" in shown
    assert not re.match(r"<details[^>]* open", shown)
    assert "Not everything comes out" not in text

    changed = regard.explain(problem, scale=0.25)
    text = report.html(changed)
    shown = part(text, "checks")
    assert re.match(r"<details[^>]* open", shown)
    (first, *_) = changed.check()
    assert first.step == "scaled"
    ours = f"A_s[she, she]: {first.expected!r} is expected, {first.got!r} comes out"
    assert ours in shown
    assert "Not everything comes out as the problem expects: 5 of 7 differ" in text
    assert "scaled: 4 more differ" in shown


def test_an_expectation_that_does_not_fit_says_why() -> None:
    explanation = regard.explain(load_problem("causal-mask"), causal=False)
    shown = part(report.html(explanation), "checks")
    assert "masked cannot be checked: there is no step masked" in shown


def test_a_page_without_expectations_has_no_part_about_them() -> None:
    assert "What should come out" not in report.html(random_heads(1, 3)).split("<script")[0]


def test_a_reader_is_led_to_a_mask_that_was_given_and_not_to_a_rule() -> None:
    x = np.eye(3)

    def aside(**more: Any) -> str:
        found = re.search(r'"aside":\[(.*?)\]', report.html(regard.explain(x, x, x, **more)))
        assert found is not None
        return found[1]

    assert "visible" not in aside(mask=np.tri(3, dtype=bool))
    assert "visible" in aside(causal=True)


# --- the script ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "sent"),
    [
        ("const a = b ? [1, 2] : { c };", "let a=b?[1,2]:{c};"),
        ('say("a = b, c", d);', 'say("a = b, c",d);'),
        ("return `a = ${b}`;", "return `a = ${b}`;"),
        ("const a = b ? `a + ${b}` : `, ${c}`;", "let a=b?`a + ${b}`:`, ${c}`;"),
        ("x = y / z;", "x=y/z;"),
        ("x = y / (z + 1) / 2 - 3;", "x=y/(z+1)/2-3;"),
        ("if (/^a, *[=\\/]$/.test(x)) return x + 1;", "if(/^a, *[=\\/]$/.test(x))return x+1;"),
        ("const MOST = 3; // that many, at most", "let MOST=3;"),
        ("a - -b + +c", "a - -b + +c"),
    ],
)
def test_blanks_are_left_out_only_where_they_mean_nothing(source: str, sent: str) -> None:
    assert page._tight(source) == sent


# --- notebooks -----------------------------------------------------------------------------------


def test_a_notebook_gets_the_page_in_a_frame_and_the_plain_text() -> None:
    explanation = example()
    bundle = explanation._repr_mimebundle_()
    assert bundle["text/plain"] == repr(explanation)
    (frame,) = [tag for tag, names in Parts(bundle["text/html"]).tags if "srcdoc" in names]
    assert frame == "iframe"
    assert 'sandbox="allow-scripts"' in bundle["text/html"]
    assert 'width="100%" height="736"' in bundle["text/html"]


# --- Markdown, LaTeX, NPZ ------------------------------------------------------------------------


def test_markdown_has_every_number_and_labels_that_stay_text() -> None:
    explanation = regard.explain(
        np.eye(2), np.eye(2), np.eye(2), causal=True, query_labels=["a|b", "<i>*x*"]
    )
    text = explanation.to_markdown("weights", digits=4)
    assert text.splitlines() == [
        "**weights**: P = Y / z",
        "",
        "|   | 0 | 1 |",
        "|---|---:|---:|",
        r"| a\|b | 1 | causal |",
        r"| \<i\>\*x\* | 0.3302 | 0.6698 |",
    ]
    whole = explanation.to_markdown()
    assert [name for name in explanation.steps if f"**{name}**" in whole.replace("\\", "")] == list(
        explanation.steps
    )


def test_latex_has_every_number_and_labels_that_stay_text() -> None:
    explanation = regard.explain([[1.0]], [[-2.0]], [[1e-9]], key_labels=["50% & $x$"])
    text = explanation.to_latex("values", "scores")
    assert r"\text{50\% \& \$x\$}" in text
    assert r"1 \cdot 10^{-9}" in text
    assert text.count(r"\begin{array}") == text.count(r"\end{array}") == 2
    assert "-2" in text


def test_npz_has_every_step_and_the_labels(tmp_path: Path) -> None:
    explanation = example("the-cat-sat")
    explanation.to_npz(tmp_path / "all.npz")
    with np.load(tmp_path / "all.npz", allow_pickle=False) as saved:
        for name, step in explanation.steps.items():
            np.testing.assert_array_equal(saved[name], step.value)
        assert saved["labels_L"].tolist() == ["The", "cat", "sat"]
    with pytest.raises(ProblemError, match="already exists"):
        explanation.to_npz(tmp_path / "all.npz")

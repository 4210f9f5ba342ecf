"""The page's own arithmetic, run by node: every cell and every derivation against Python's.

The script of the page is JavaScript modules that know nothing of a page; `report_script.mjs` drives
them. What they run is the data that a page carries, made by `page_data`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from designs import COINS, numbers, of_every_kind
from places import SUPPORT
from regard import Explanation
from regard.compute import evaluation
from regard.compute.evaluation import Run
from regard.explanation.notation import format_number, is_rounded, numpy_literal
from regard.masks import Boolean, Causal, Lengths, Mask, Segments, Window
from regard.normalizers import Hard, Sigmoid, Sparsemax
from regard.positions import Alibi
from regard.problems.files import example_names, load_problem
from regard.rules.visibility import Block
from regard.scores import Additive, Cosine, Distance
from regard.textbook.operations import OPERATIONS
from regard.textbook.positions import SETTINGS
from regard.views.report.json_data import page_data
from regard.views.report.plan import make_plan
from regard.views.report.whatif import BITS, MASKED, form_of, variants

pytestmark = pytest.mark.needs("node")

DRIVER = SUPPORT / "report_script.mjs"
SCRIPTS = files("regard") / "views" / "report"
# NumPy adds in pairs, the page from left to right: a sum of n terms is off by n·u·Σ|terms|; exp,
# tanh and log are within 2 ulp of each other. exp of a score near 20 multiplies the error of the
# score by 20, and what follows adds to it: every chain here stays below so many times 2⁻⁵³.
CHAIN = 1024 * 2.0**-53


@functools.cache
def node() -> subprocess.Popen[bytes]:
    """The one process that answers all questions; what it says of errors is pytest's to show."""
    command = ["node", str(DRIVER), str(SCRIPTS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture(scope="module", autouse=True)
def node_is_ended() -> Iterator[None]:
    yield
    with node():
        node.cache_clear()


def ask(*tasks: dict[str, Any]) -> list[Any]:
    process = node()
    hanging = threading.Timer(300, process.kill)
    hanging.start()
    try:
        process.stdin.write(json.dumps(tasks, allow_nan=False).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    finally:
        hanging.cancel()
    if not answer:
        node_ended = process.wait(60)
        node.cache_clear()
        pytest.fail(f"node has ended with {node_ended}")
    return json.loads(answer)


def sent(value: float) -> float | str:
    """A number as JSON can carry it."""
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return value if math.isfinite(value) else {"nan": "NaN"}.get(str(value), str(value))


def received(value: float | str) -> float:
    return -0.0 if value == "-0" else float(value)


def carried(explanation: Explanation) -> dict[str, Any]:
    explanations = {"": explanation}
    data = page_data(explanations, make_plan(explanations, 10**9), 4)
    return {"content": data.content, "arrays": data.base64}


def random_numbers() -> Iterator[float]:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**64, size=3000, dtype=np.uint64)
    yield from (struct.unpack("<d", one.tobytes())[0] for one in bits)
    yield from rng.normal(size=3000)
    yield from 10.0 ** rng.uniform(-12, 12, size=3000) * rng.choice([-1, 1], size=3000)
    yield from (k / 2.0**n for n in range(1, 24) for k in (1, 3, 5, 7, -11))  # exact halves
    yield from (0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e9, 1e-4, 1e15, 1e300, 1e-300)


def test_the_parts_of_the_script_pass_their_own_tests() -> None:
    done = subprocess.run(
        ["node", "--test", str(Path(__file__).with_name("report.test.mjs"))],
        env={**os.environ, "REGARD_SCRIPTS": Path(str(SCRIPTS)).as_uri()},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout.decode()
    assert b"# pass 12" in done.stdout


def test_a_number_is_written_with_the_same_digits() -> None:
    cases = [(value, digits) for value in random_numbers() for digits in (0, 4, 8, 17)]
    (found,) = ask({"task": "format", "cases": [[sent(v), digits] for v, digits in cases]})
    assert len(found) > 30_000
    wrong = [
        (value, digits, ours)
        for (value, digits), ours in zip(cases, found, strict=True)
        if ours != format_number(value, digits)
    ]
    assert wrong == []


def test_a_number_is_written_as_the_same_python() -> None:
    cases = list(random_numbers())
    (found,) = ask({"task": "literal", "cases": [sent(value) for value in cases]})
    assert found == [numpy_literal(value) for value in cases]


def test_whether_a_printed_number_is_rounded_is_decided_alike() -> None:
    cases = [(value, digits) for value in random_numbers() for digits in (0, 2, 8, 17)]
    cases += [(round(value, 3), 8) for value in random_numbers() if abs(value) < 1e6]
    (found,) = ask({"task": "rounded", "cases": [[sent(v), digits] for v, digits in cases]})
    assert found == [is_rounded(value, digits) for value, digits in cases]
    assert 1000 < found.count(False) < len(found) - 1000


def test_the_page_computes_every_operation_of_the_textbook() -> None:
    (found,) = ask({"task": "operations"})
    assert found == [name for name, operation in OPERATIONS.items() if operation.value]


def test_what_a_reader_types_is_a_number_or_refused() -> None:
    typed = ["0.5", " -1e-3 ", "−2", "1,5", "inf", "-∞", "NaN", ".5", "", "1/3", "0x10", "1e", "e5"]
    (found,) = ask({"task": "parse", "cases": typed})
    assert found[:6] == [0.5, -1e-3, -2, 1.5, "Infinity", "-Infinity"]
    assert found[6:8] == ["NaN", 0.5]
    assert found[8:] == [None] * 5


# --- every cell ----------------------------------------------------------------------------------


def with_odd_numbers() -> Explanation:
    query, key, value = numbers(1, 3, 2), numbers(2, 4, 2), numbers(3, 4, 2)
    key[1, 0], value[2, 1], value[0, 0], query[2, 1] = np.nan, np.inf, -0.0, 1e-300
    value[3, 1] = -np.inf
    return regard.explain(query, key, value)


def with_odd_cells(array: np.ndarray) -> np.ndarray:
    array[3, 1], array[5, 1] = np.nan, np.inf
    return array


def with_odd_value(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed[1, 0] = np.nan  # two of three rows do not see it
    return changed


HEADS = (numbers(4, 4, 3, 2), numbers(5, 2, 3, 2), numbers(6, 2, 3, 2))
PLAIN = (numbers(7, 3, 2), numbers(8, 4, 2), numbers(9, 4, 3))
BATCH = (numbers(10, 2, 1, 3, 2), numbers(11, 2, 1, 3, 2), numbers(12, 2, 1, 3, 2))

DESIGNED = {
    **{name: lambda name=name: regard.explain(load_problem(name)) for name in example_names()},
    "plain": lambda: regard.explain(*PLAIN),
    "odd numbers": with_odd_numbers,
    "one query": lambda: regard.explain(PLAIN[0][0], *PLAIN[1:], mask=[True, False, True, True]),
    "grouped heads": lambda: regard.explain(*HEADS, causal=True, sink=numbers(13, 4)),
    "batches": lambda: regard.explain(
        *BATCH, mask=Lengths([3, 2]), causal=True, offset=np.array([1, 0])
    ),
    "packed texts": lambda: regard.explain(
        *BATCH,
        mask=Segments([[0, 0, 1], [1, 1, 1]], [[0, 1, 1], [0, 1, 1]]) & Lengths([3, 2]),
        causal=True,
        offset="end",
        positions=regard.positions.Alibi(0.5),
    ),
    "every rule": lambda: regard.explain(
        *(array[:, :3] for array in HEADS),
        mask=((Boolean(COINS[:, 1:]) | Segments([0, 1, 1])) & ~Lengths(1)) | (~Causal()),
        window=(1, None),
    ),
    "rules under not": lambda: regard.explain(*HEADS, mask=~(Causal() & Window(1, 0))),
    "a mask per head": lambda: regard.explain(*HEADS, mask=numbers(14, 4, 3, 3) > 0.4),
    "rows that see nothing": lambda: regard.explain(*PLAIN, mask=COINS, sink=-0.25),
    **of_every_kind(PLAIN, HEADS),
    "additive, sigmoid": lambda: regard.explain(
        *(array[:, :2] for array in HEADS),
        score=Additive(numbers(4, 2, 20), numbers(5, 2, 20), numbers(6, 20)),
        normalize=Sigmoid(-0.5),
        mask=COINS[1:, 2:],
        target=numbers(5, 4, 2, 2),
    ),
    "cosine, sparsemax": lambda: regard.explain(
        *PLAIN, score=Cosine(0.8), normalize=Sparsemax(), mask=COINS, target=numbers(4, 3, 3)
    ),
    "distance, hard, straight through": lambda: regard.explain(
        *(numbers(7, 2, 2), numbers(8, 20, 2), numbers(9, 20, 1)),
        score=Distance(),
        normalize=Hard(straight_through=True),
        scale=0.5,
        target=numbers(5, 2, 1),
    ),
    "left out": lambda: regard.explain(*PLAIN, causal=True, offset=1).without(1),
    "a bias that hides": lambda: regard.explain(
        *PLAIN, bias=np.where(COINS, numbers(15, 3, 4), -np.inf), causal=True, offset=2
    ),
    "softcap": lambda: regard.explain(*PLAIN, softcap=1.5, scale=-2.0, bias=numbers(16, 3, 4)),
    "many terms": lambda: regard.explain(
        numbers(25, 2, 18),
        numbers(26, 20, 18),
        with_odd_cells(numbers(27, 20, 2) * 10.0 ** np.arange(-10, 10)[:, None]),
    ),
    "overflow": lambda: regard.explain(PLAIN[0] * 1e200, PLAIN[1] * 1e200, PLAIN[2]),
    "heads from embeddings": lambda: regard.explain(
        regard.Problem(
            query_labels=("the", "cat", "the"),
            embeddings=numbers(17, 3, 4),
            **{name: numbers(18, 4, 4) for name in ("W_q", "W_k", "W_v", "W_o")},
            **{name: numbers(19, 4) for name in ("b_q", "b_k", "b_v", "b_o")},
            heads=2,
            softmax="unshifted",
        )
    ),
    "context": lambda: regard.explain(
        regard.Problem(
            query_labels=("a", "b"),
            key_labels=("x", "y", "z"),
            embeddings=numbers(20, 2, 3),
            context=numbers(21, 3, 2),
            W_q=numbers(22, 3, 4),
            W_k=numbers(23, 2, 2),
            W_v=numbers(24, 2, 2),
            heads=2,
            key_heads=1,
        )
    ),
}

PROJECTED = regard.Problem(
    query_labels=("the", "cat", "the"),
    embeddings=numbers(17, 3, 4),
    **{name: numbers(18, 4, 4) for name in ("W_q", "W_o")},
    **{name: numbers(19, 4, 2) for name in ("W_k", "W_v")},
    **{name: numbers(20, 4) for name in ("b_q", "b_o")},
    **{name: numbers(21, 2) for name in ("b_k", "b_v")},
    heads=2,
    key_heads=1,
    causal=True,
    sink=numbers(22, 2),
    target=numbers(23, 3, 4),
)
GRADIENTS = {
    "gradients": lambda: regard.explain(*PLAIN, target=numbers(50, 3, 3)),
    "gradients of every option": lambda: regard.explain(
        *PLAIN,
        mask=COINS,
        softcap=1.5,
        scale=-2.0,
        sink=0.3,
        bias=np.where(COINS.T.reshape(3, 4), numbers(16, 3, 4), -np.inf),
        grad_output=numbers(51, 3, 3),
    ),
    "gradients of one query": lambda: regard.explain(
        PLAIN[0][0], *PLAIN[1:], mask=[True, False, True, True], target=numbers(52, 3)
    ),
    "gradients of grouped heads": lambda: regard.explain(
        *HEADS, causal=True, sink=numbers(13, 4), scale=0.3, target=numbers(53, 4, 3, 2)
    ),
    "gradients with a mask per head": lambda: regard.explain(
        HEADS[0],
        *(numbers(54 + k, 4, 3, 2) for k in range(2)),
        mask=numbers(14, 4, 3, 3) > 0.4,
        target=numbers(53, 4, 3, 2),
    ),
    "gradients of batches": lambda: regard.explain(
        *BATCH, mask=Lengths([3, 2]), causal=True, target=numbers(56, 2, 1, 3, 2)
    ),
    "gradients of odd numbers": lambda: regard.explain(
        *PLAIN[:2], with_odd_value(PLAIN[2]), mask=COINS, target=numbers(50, 3, 3)
    ),
    "gradients from embeddings": lambda: regard.explain(PROJECTED),
    "gradients of context": lambda: regard.explain(
        regard.Problem(
            query_labels=("a", "b"),
            key_labels=("x", "y", "z"),
            embeddings=numbers(20, 2, 3),
            context=numbers(21, 3, 2),
            W_q=numbers(22, 3, 4),
            W_k=numbers(23, 2, 2),
            W_v=numbers(24, 2, 2),
            heads=2,
            key_heads=1,
            softmax="unshifted",
            target=numbers(25, 2, 4),
        )
    ),
}
DESIGNED |= GRADIENTS


def cells_of(explanation: Explanation) -> Iterator[tuple[tuple[int, ...], str, tuple[int, ...]]]:
    for name, step in explanation.steps.items():
        for batch in np.ndindex(*explanation.batch_shape):
            for index in np.ndindex(*step.shape[len(step.shape) - len(step.axes) :]):
                yield batch, name, index


@pytest.mark.parametrize("name", DESIGNED)
def test_every_cell_and_every_derivation_reads_as_in_python(name: str) -> None:
    explanation = DESIGNED[name]()
    (found,) = ask({"task": "cells", "known": True, "texts": True, **carried(explanation)})
    batches = list(np.ndindex(*explanation.batch_shape))
    expected = {
        (batches.index(batch), step, index): explanation.derive(step, index, batch)
        for batch, step, index in cells_of(explanation)
    }
    assert len(found) == len(expected) > 20
    for batch, step, index, value, text, line, latex in found:
        why = expected[batch, step, tuple(index)]
        np.testing.assert_equal(received(value), why.value)
        assert text == why.text()
        assert line == why.numpy()
        assert latex == why.latex()


def assert_same_numbers(found: list[Any], explanation: Explanation) -> None:
    """What the page computed, against Python's explanation of the same attention."""
    names = [step.declared.name for step in explanation.steps.values()]
    assert list(dict.fromkeys(cell[1] for cell in found)) == names
    for name, step in explanation.steps.items():
        ours = np.asarray(step.value, np.float64)
        page = np.array([received(cell[3]) for cell in found if cell[1] == name])
        page = page[: ours.size].reshape(ours.shape)
        largest = float(np.abs(ours[np.isfinite(ours)]).max(initial=1.0))
        np.testing.assert_allclose(page, ours, rtol=CHAIN, atol=CHAIN * largest, err_msg=name)


# Where ∞ meets −∞, the order of adding decides between them and NaN, and ours is not NumPy's.
@pytest.mark.parametrize("name", [name for name in DESIGNED if name != "overflow"])
def test_the_page_computes_every_cell_from_what_is_given(name: str) -> None:
    explanation = DESIGNED[name]()
    (found,) = ask({"task": "cells", "known": False, **carried(explanation)})
    assert_same_numbers(found, explanation)


# --- edits and switches --------------------------------------------------------------------------


def given_cells(problem: regard.Problem, explanation: Explanation) -> list[tuple[str, int]]:
    cells = [
        (name, flat)
        for name, step in explanation.steps.items()
        if step.given and name not in ("width", *SETTINGS)  # those follow from a few parameters
        for flat in range(step.value.size)
    ]
    mask = () if problem.mask is None else range(problem.mask.size)
    return [*cells, *(("mask", flat) for flat in mask)]


def edited(problem: regard.Problem, explanation: Explanation, changes: dict[Any, float]) -> Any:
    """The same problem with some given numbers, or cells of its mask, changed."""
    arrays: dict[str, Any] = {}
    for (name, flat), value in changes.items():
        was = problem.mask if name == "mask" else explanation.steps[name].value
        arrays.setdefault(name, was.copy()).flat[flat] = value
    fields = {name: array if array.ndim else float(array) for name, array in arrays.items()}
    own = {name for name in fields if name.startswith("score_")}
    if own:
        given = {name.removeprefix("score_"): fields.pop(name) for name in own}
        fields["score"] = type(problem.score)(**{**vars(problem.score), **given})
    if "positions_slopes" in fields:
        fields["positions"] = Alibi(fields.pop("positions_slopes"))
    return regard.explain(problem.replace(**fields))


def edit_in_page(explanation: Explanation, name: str, flat: int, value: float) -> list[Any]:
    """The same change as the page keeps it: by layer, name and part."""
    if name == "mask":
        return ["0|mask|0", flat, int(value)]
    step = explanation.steps[name]
    if not {"H", "G"} & set(step.axes):
        return [f"0|{name}|-/-", flat, sent(value)]
    head, within = divmod(flat, step.value[0].size)
    return [f"0|{name}|-/{head}", within, sent(value)]


def with_mask(**more: Any) -> regard.Problem:
    """A problem with a table of yes and no, in which one row sees nothing at first."""
    return regard.Problem(
        embeddings=numbers(40, 4, 3),
        **{name: numbers(41 + k, 3, 4) for k, name in enumerate(("W_q", "W_k", "W_v"))},
        **{"mask": numbers(44, 4, 4) > [[-0.5], [0.0], [9.0], [0.2]], **more},
    )


TABLES = {
    "a mask": lambda: with_mask(),
    "a mask and every rule beside it": lambda: with_mask(
        causal=True, window=(2, None), lengths=3, query_segments=(0, 1, 1, 1)
    ),
    "a mask and all options": lambda: with_mask(
        bias=numbers(45, 4, 4), scale=0.4, softcap=2.0, sink=-0.3
    ),
    "a mask for every head": lambda: with_mask(
        heads=2, mask=numbers(46, 2, 4, 4) > 0, sink=numbers(47, 2)
    ),
    "a mask of one row": lambda: with_mask(heads=2, key_heads=2, mask=[True, False, True, True]),
}
PROBLEMS = {
    **{name: lambda name=name: load_problem(name) for name in example_names()},
    **TABLES,
    "gradients": lambda: PROJECTED,
}


def random_edits(
    problem: regard.Problem, explanation: Explanation, count: int
) -> Iterator[dict[Any, float]]:
    rng = np.random.default_rng(7)
    places = given_cells(problem, explanation)
    masks = [place for place in places if place[0] == "mask"]

    def value(name: str, flat: int) -> float:
        if name == "mask":
            assert problem.mask is not None
            return float(not problem.mask.flat[flat])
        number = float(rng.normal() * 2)
        return abs(number) + 0.1 if name in ("softcap", "score_temperature") else number

    for _ in range(count):
        chosen = [places[k] for k in rng.choice(len(places), rng.integers(1, 4), replace=False)]
        if masks:  # at least one cell of the mask, too
            chosen.append(masks[rng.integers(len(masks))])
        yield {place: value(*place) for place in chosen}


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_after_any_edits_the_page_computes_what_python_does(name: str, count: int) -> None:
    problem = PROBLEMS[name]()
    explanation = regard.explain(problem)
    trials = list(random_edits(problem, explanation, count))
    edits = [
        [edit_in_page(explanation, step, flat, value) for (step, flat), value in changes.items()]
        for changes in trials
    ]
    page = carried(explanation)
    found = ask(*({"task": "cells", "texts": True, "edits": own, **page} for own in edits))
    figures = ask(*({"task": "figures", "edits": own, **page} for own in edits))
    checks = ask(*({"task": "checks", "edits": own, **page} for own in edits))
    for changes, cells, own, missed in zip(trials, found, figures, checks, strict=True):
        after = edited(problem, explanation, changes)
        assert_same_numbers(cells, after)
        assert_same_figures(own, after)
        assert missed == expected_misses(after)
        for _, step, index, _, text, *_ in cells:  # which rules decide, in Python's words
            if step == "visible":
                assert text == after.derive(step, tuple(index)).text()


def expected_misses(explanation: Explanation) -> list[list[Any]]:
    assert explanation.problem is not None
    return [
        [
            [miss.step, list(miss.index) if miss.what == "value" else None, sent(miss.expected)]
            for miss in explanation.check((one,))
        ]
        for one in explanation.problem.expect
    ]


def assert_same_figures(found: list[Any], explanation: Explanation) -> None:
    """The page's statistics of every head, against Python's."""
    batches = list(np.ndindex(*explanation.batch_shape))
    assert len(found) == len(batches) * (explanation.heads or 1)
    for batch, head, steps, rows in found:
        ours = explanation.statistics(head=head, batch=batches[batch])
        assert list(steps) == list(ours.steps)
        for name, one in ours.steps.items():
            page = [received(number) for number in steps[name]]
            expected = [one.mean, one.variance, one.minimum, one.maximum, one.cells]
            finite = np.abs([n for n in (one.minimum, one.maximum) if np.isfinite(n)])
            largest = float(np.max(finite, initial=1.0))
            # A variance is made of squares, and takes twice the error of its numbers.
            np.testing.assert_allclose(
                page, expected, rtol=CHAIN, atol=4 * CHAIN * largest**2, err_msg=name
            )
        # −p·ln p of a weight that is off by δ is off by δ·(1 + |ln p|), |ln p| being below 745.
        # There are S of these, and e^entropy, which is at most S, multiplies their error.
        spread_error = 746 * explanation.source.sizes["S"] ** 2 * CHAIN
        page_rows = np.array([[received(number) for number in row] for row in rows])
        own = ours.rows
        for column, array in enumerate((own.entropy, own.effective_keys, own.largest_weight)):
            np.testing.assert_allclose(
                page_rows[:, column], np.ravel(array), rtol=CHAIN, atol=spread_error
            )
        # Of two weights that differ by less than their errors, either is the largest.
        place = batches[batch] + ((head,) if explanation.heads else ())
        weights = explanation["weights"].value[place].reshape(len(page_rows), -1)
        keys = np.ravel(own.largest_key)
        for row in np.flatnonzero(page_rows[:, 3] != keys):
            theirs, largest = weights[row, [int(page_rows[row, 3]), keys[row]]]
            np.testing.assert_allclose(theirs, largest, rtol=CHAIN)


@pytest.mark.parametrize("name", [name for name in DESIGNED if name != "overflow"])
def test_the_page_has_the_statistics_of_every_head(name: str) -> None:
    explanation = DESIGNED[name]()
    (found,) = ask({"task": "figures", **carried(explanation)})
    assert_same_figures(found, explanation)


def test_a_bias_of_minus_infinity_hides_a_key_once_it_is_typed_in() -> None:
    query, key, value = PLAIN
    bias = numbers(30, 3, 4)
    page = carried(regard.explain(query, key, value, bias=bias))
    hidden = bias.copy()
    hidden[1, 2] = hidden[2, 0] = -np.inf
    edits = [["0|bias|-/-", 6, "-Infinity"], ["0|bias|-/-", 8, "-Infinity"]]
    (found,) = ask({"task": "cells", "edits": edits, **page})
    assert_same_numbers(found, regard.explain(query, key, value, bias=hidden))


def test_taking_minus_infinity_out_of_a_bias_shows_the_key() -> None:
    query, key, value = PLAIN
    bias = np.zeros((3, 4))
    bias[1, 2] = -np.inf
    page = carried(regard.explain(query, key, value, bias=bias))
    (found,) = ask({"task": "cells", "edits": [["0|bias|-/-", 6, 0.0]], **page})
    assert_same_numbers(found, regard.explain(query, key, value, bias=np.zeros((3, 4))))


@pytest.mark.parametrize("given", ["nothing", "a mask", "heads"])
def test_a_key_hidden_by_hand_is_hidden_as_by_a_mask(given: str) -> None:
    query, key, value = HEADS if given == "heads" else PLAIN
    mask = np.ones((query.shape[-2], key.shape[-2]), dtype=bool)
    options = {"causal": True, "offset": 1} if given == "a mask" else {}
    page = carried(regard.explain(query, key, value, **options))
    mask[1, 0] = mask[2, 1] = False
    edits = [["0|mask|own", int(flat), 0] for flat in np.flatnonzero(~mask)]
    (found,) = ask({"task": "cells", "edits": edits, **page})
    assert_same_numbers(found, regard.explain(query, key, value, mask=mask, **options))


def test_a_causal_mask_is_switched_on() -> None:
    arrays = [numbers(seed, 3, 2) for seed in range(3)]
    page = carried(regard.explain(*arrays, target=numbers(50, 3, 2)))
    (found,) = ask({"task": "cells", "switches": ["causal"], **page})
    assert_same_numbers(found, regard.explain(*arrays, target=numbers(50, 3, 2), causal=True))


@pytest.mark.parametrize("softmax", ["shifted", "unshifted"])
@pytest.mark.parametrize("heads", [(), (2,)])
def test_a_window_a_softcap_and_a_sink_are_switched_on(heads: Any, softmax: Any) -> None:
    arrays = [numbers(seed, *heads, 4, 2) for seed in range(3)]
    options = {"target": numbers(50, *heads, 4, 2), "softmax": softmax}
    page = carried(regard.explain(*arrays, **options))
    added = {"window": (1, 1), "softcap": 1.0, "sink": np.zeros(heads)}
    switched = [[name] for name in added] + [list(added)]
    found = ask(*({"task": "cells", "switches": on, **page} for on in switched))
    for on, cells in zip(switched, found, strict=True):
        own = regard.explain(*arrays, **options, **{name: added[name] for name in on})
        assert_same_numbers(cells, own)


@pytest.mark.parametrize("softmax", ["shifted", "unshifted"])
def test_each_switch_gives_what_python_computes_with_that_change(softmax: Any) -> None:
    x = numbers(31, 4, 3)
    query, key, value = x @ numbers(32, 3, 2), x @ numbers(33, 3, 2), x
    page = carried(regard.explain(query, key, value, causal=True, softmax=softmax))
    changed = {
        ("scale",): regard.explain(query, key, value, causal=True, scale=1.0, softmax=softmax),
        ("mask",): regard.explain(query, key, value, softmax=softmax),
        ("swap",): regard.explain(key, query, value, causal=True, softmax=softmax),
        ("mask", "scale"): regard.explain(query, key, value, scale=1.0, softmax=softmax),
    }
    found = ask(*({"task": "cells", "switches": list(on), **page} for on in changed))
    for cells, explanation in zip(found, changed.values(), strict=True):
        own = [cell for cell in cells if cell[1] not in ("queries", "keys")]
        names = set(explanation.steps) - {"queries", "keys"}
        for name in names:
            ours = np.asarray(explanation.steps[name].value, np.float64)
            page_numbers = [received(cell[3]) for cell in own if cell[1] == name]
            np.testing.assert_allclose(page_numbers, ours.ravel(), rtol=CHAIN, atol=CHAIN)


def test_without_the_mask_a_bias_of_minus_infinity_counts_as_nothing() -> None:
    query, key, value = PLAIN
    bias = np.where(COINS, numbers(34, 3, 4), -np.inf)
    page = carried(regard.explain(query, key, value, bias=bias, causal=True, offset=1))
    (found,) = ask({"task": "cells", "switches": ["mask"], **page})
    shown = np.where(COINS, bias, 0.0)
    assert_same_numbers(found, regard.explain(query, key, value, bias=shown))


class EveryOther(Mask):
    """A rule of the user's own: keys at even distances."""

    name = "every other"

    def block(self, at: Block) -> np.ndarray:
        return (at.rows[:, None] - np.arange(at.shape[-1])) % 2 == 0


class Strict(Causal):
    """A rule that looks like one of regard's and is not."""

    def block(self, at: Block) -> np.ndarray:
        return np.arange(at.shape[-1]) < at.positions


@pytest.mark.parametrize("rule", [EveryOther(), Strict(), ~EveryOther() | Lengths(2)])
def test_the_page_hides_what_a_rule_of_the_users_own_hides(rule: Mask) -> None:
    explanation = regard.explain(*PLAIN, mask=rule, offset=1)
    (found,) = ask({"task": "cells", **carried(explanation)})
    assert_same_numbers(found, explanation)
    assert explanation.why("visible", 0, 1).verdicts[0].detail


@pytest.mark.parametrize("softmax", ["shifted", "unshifted"])
def test_softmax_over_the_wrong_axis_runs_down_the_columns(softmax: Any) -> None:
    query, key, value = PLAIN
    sink = 0.5
    page = carried(regard.explain(query, key, value, mask=COINS, softmax=softmax, sink=sink))
    (cells,) = ask({"task": "cells", "switches": ["axis"], "texts": True, **page})
    scores = np.where(COINS, query @ key.T / np.sqrt(2), -np.inf)
    grown = np.exp(scores)
    weights = grown / (grown.sum(axis=0) + np.exp(sink))
    for name, ours in {"weights": weights, "output": weights @ value}.items():
        found = [received(cell[3]) for cell in cells if cell[1] == name]
        np.testing.assert_allclose(found, ours.ravel(), rtol=CHAIN, atol=CHAIN)
    sums = [cell for cell in cells if cell[1] == "row_sums"]
    assert [cell[2] for cell in sums] == [[0], [1], [2], [3]]
    assert "z = Σ_i Y + y" in sums[0][4]


# --- gradients -----------------------------------------------------------------------------------

MISTAKEN = {
    "embeddings": lambda: regard.Problem(
        embeddings=numbers(30, 4, 3),
        **{name: numbers(31 + k, 3, 4) for k, name in enumerate(("W_q", "W_k", "W_v"))},
        causal=True,
        target=numbers(35, 4, 4),
    ),
    "grouped heads": lambda: regard.Problem(
        queries=numbers(36, 4, 3, 2),
        keys=numbers(37, 2, 3, 2),
        values=numbers(38, 2, 3, 2),
        mask=COINS[:, 1:],
        sink=numbers(39, 4),
        softmax="unshifted",
        grad_output=numbers(40, 4, 3, 2),
    ),
}


def mistaken_loss(problem: regard.Problem, given: dict[str, np.ndarray], on: set[str]) -> Any:
    """The loss with these mistakes, in plain NumPy that complex numbers go through too."""
    if problem.embeddings is None:
        query = given["queries"]
        key, value = (given[name].repeat(2, axis=0) for name in ("keys", "values"))
    else:
        query, key, value = (given["embeddings"] @ given[f"W_{x}"] for x in "qkv")
    mask = np.tri(4, dtype=bool) if problem.causal else problem.mask
    query, key = (key, query) if "swap" in on else (query, key)
    scale = 1.0 if "scale" in on else 1 / np.sqrt(query.shape[-1])
    scores = query @ np.swapaxes(key, -1, -2) * scale
    grown = np.exp(scores) * (True if "mask" in on else mask)
    sink = np.exp(given["sink"])[:, None, None] if "sink" in given else 0.0
    total = grown.sum(-2 if "axis" in on else -1, keepdims=True) + sink
    output = grown / np.where(total == 0, 1, total) @ value
    if problem.target is None:
        return (output * problem.grad_output).sum()
    return ((output - problem.target) ** 2).sum() / 2


@pytest.mark.parametrize("name", MISTAKEN)
def test_gradients_of_a_mistake_are_the_slopes_of_what_it_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MISTAKEN[name]()
    explanation = regard.explain(problem)
    given = {
        one: np.asarray(step.value)
        for one, step in explanation.steps.items()
        if step.given and f"d_{one}" in explanation.steps and one != "scale"
    }
    assert len(given) == 4
    switched = [{"axis"}, {"swap"}, {"axis", "swap"}, {"axis", "swap", "scale", "mask"}]
    page = carried(explanation)
    found = ask(*({"task": "cells", "switches": sorted(on), **page} for on in switched))
    source = explanation.source
    for on, cells in zip(switched, found, strict=True):
        bits = sum(BITS[one] for one in on) + MASKED * ("mask" not in on)
        inputs = source.inputs | {"scale": np.ones(())} if "scale" in on else source.inputs
        heads = {axis: source.sizes[axis] for axis in "HG" if axis in source.sizes}
        if "axis" not in on:  # every row in a block of its own
            monkeypatch.setattr(evaluation, "BLOCK_CELLS", source.sizes["S"])
        run = Run(
            variants(form_of(explanation))[bits],
            inputs,
            heads,
            dtype=np.dtype(float),
            rules=None if "mask" in on else source.rules,
        )
        for one in given:
            slopes = np.empty(given[one].shape)
            for index in np.ndindex(*slopes.shape):
                moved = given[one].astype(complex)
                moved[index] += 1e-40j  # exact: no difference of near numbers
                slopes[index] = mistaken_loss(problem, {**given, one: moved}, on).imag / 1e-40
            mine = [received(cell[3]) for cell in cells if cell[1] == f"d_{one}"]
            np.testing.assert_allclose(mine, slopes.ravel(), CHAIN, CHAIN, err_msg=f"{on} {one}")
            np.testing.assert_allclose(run.value(f"d_{one}"), slopes, CHAIN, CHAIN)
        monkeypatch.undo()


LEARNED = {
    **{name: lambda name=name: load_problem(name) for name in ("coffee-target", "look-back")},
    "every input": lambda: PROJECTED,
    "given queries": lambda: regard.Problem(
        queries=PLAIN[0],
        keys=PLAIN[1],
        values=PLAIN[2],
        mask=COINS,
        bias=np.where(COINS | (numbers(60, 3, 4) > 0), numbers(16, 3, 4), -np.inf),
        softcap=2.0,
        sink=0.3,
        target=numbers(61, 3, 3),
    ),
}


@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LEARNED)
def test_after_each_gradient_step_the_page_has_what_python_computes(name: str, steps: int) -> None:
    problem, rate = LEARNED[name](), 0.05
    now = regard.explain(problem)
    names, found = ask({"task": "learn", "rate": rate, "steps": steps, **carried(now)})[0]
    learned = [
        step.name for step in now.steps.values() if step.given and f"d_{step.name}" in now.steps
    ]
    assert names == learned
    assert len(found) == steps
    losses = [float(now["loss"].value)]
    for edits, cells in found:
        moved = {}
        for learner in names:
            was = np.array(now[learner].value)
            moved[learner] = was - rate * now[f"d_{learner}"].value
            largest = float(np.abs(was[np.isfinite(was)]).max(initial=1.0))
            page = was_given(problem, learner)
            for key, flat, value in edits:
                _, own, part = key.split("|")
                if own == learner:
                    head = part.split("/")[1]
                    own_head = page if head == "-" else page[int(head) : int(head) + 1]
                    own_head.flat[flat] = received(value)
            np.testing.assert_allclose(page, moved[learner], rtol=CHAIN, atol=CHAIN * largest)
            moved[learner] = page if page.ndim else float(page)
        now = regard.explain(problem.replace(**moved))
        assert_same_numbers(cells, now)
        losses.append(float(now["loss"].value))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("shape", [(3, 4), (2, 1, 4), (3, 1), (4,)])
def test_a_gradient_step_keeps_a_bias_and_a_sink_shared_that_were_given_once(
    shape: tuple[int, ...],
) -> None:
    q, k, v, target = (numbers(30 + n, 2, m, 3) for n, m in enumerate((3, 4, 4, 3)))
    bias = numbers(16, *shape)
    explanation = regard.explain(q, k, v, bias=bias, sink=0.3, target=target)
    asked = {"task": "learn", "rate": 0.05, "steps": 1, "only": ["bias", "sink"]}
    _, ((edits, _),) = ask({**asked, **carried(explanation)})[0]
    given = {"bias": bias, "sink": np.array(0.3)}
    slopes = regard.gradients(
        q, k, v, grad_output=explanation["d_output"].value, bias=bias, sink=0.3, wrt=[*given]
    )
    for name, was in given.items():
        moved = np.broadcast_to(was, explanation[name].value.shape).copy()
        for key, flat, value in edits:
            _, own, part = key.split("|")
            if own == name:
                head = int(part.split("/")[1])
                moved[head : head + 1].flat[flat] = received(value)
        wanted = np.broadcast_to(was - 0.05 * getattr(slopes, name), moved.shape)
        np.testing.assert_allclose(moved, wanted, rtol=CHAIN, atol=CHAIN)


def test_a_gradient_step_moves_the_chosen_inputs_alone_and_keeps_what_was_changed() -> None:
    page = carried(regard.explain(PROJECTED))
    edit = ["0|W_o|-/-", 3, 0.5]
    asked = {"task": "learn", "rate": 0.05, "steps": 1, "only": ["W_q"], "edits": [edit]}
    _, ((edits, _),) = ask({**asked, **page})[0]
    assert edit in edits
    assert {key for key, *_ in edits if key != edit[0]} == {"0|W_q|-/-"}
    assert len(edits) == 1 + PROJECTED.W_q.size


def was_given(problem: regard.Problem, name: str) -> np.ndarray:
    return np.array(regard.explain(problem)[name].value)


@pytest.mark.parametrize("name", ["gradients of grouped heads", "gradients from embeddings"])
def test_a_changed_number_moves_the_loss_by_its_slope(name: str) -> None:
    explanation = GRADIENTS[name]()
    slopes = [step for step in explanation.steps.values() if step.declared.of]
    cases = [
        (step, index)
        for step in slopes
        for index in np.ndindex(*explanation[step.declared.of].shape)
        if not explanation.derive(step.declared.of, index).hidden
    ]
    assert len(cases) > 50
    asked = [[step.declared.of, list(index), 2e-4] for step, index in cases]
    (found,) = ask({"task": "nudges", "cases": asked, **carried(explanation)})
    loss = float(explanation["loss"].value)
    for number, (step, index) in enumerate(cases):
        slope, before, _, off, half = (received(one) for one in found[number])
        np.testing.assert_allclose(slope, step.value[index], rtol=CHAIN, atol=CHAIN)
        np.testing.assert_allclose(before, loss, rtol=CHAIN)
        # The straight line is off by the second derivative: a quarter at half the change.
        np.testing.assert_allclose(half, off / 4, atol=1e-9 * loss)
        assert abs(off) < 1e-5 * loss


def test_where_only_a_gradient_is_given_its_products_move_by_the_slope() -> None:
    explanation = GRADIENTS["gradients of every option"]()
    (found,) = ask({"task": "nudges", "cases": [["queries", [0, 1], 1e-4]], **carried(explanation)})
    slope, before, after, off, _ = (received(one) for one in found[0])
    total = float((explanation["d_output"].value * explanation["output"].value).sum())
    np.testing.assert_allclose(before, total, rtol=CHAIN)
    np.testing.assert_allclose(slope, explanation["d_queries"].value[0, 1], rtol=CHAIN)
    np.testing.assert_allclose(after - before, 1e-4 * slope + off, atol=CHAIN)
    assert abs(off) < 1e-6

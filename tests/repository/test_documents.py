"""Every number printed in five classroom documents, beside what regard computes in its place.

The printed numbers are in the folder documents, transcribed from the documents and never from our
own output. `python tests/repository/test_documents.py` prints how many of them come out again, and
how exactly.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import regard

Array = NDArray[np.float64]
Entry = dict[str, Any]

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
DOCUMENTS = {path.stem: path for path in sorted((HERE / "documents").glob("*.toml"))}

# A number or infinity, but not the 64 of "float64" nor the 3 of a name.
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?(?:inf|nan|\d+(?:\.\d*)?(?:e[-+]?\d+)?)(?![A-Za-z0-9_])")

# The documents print with NumPy's defaults, which a test run may not have.
PRINTING: dict[str, Any] = {
    "precision": 8,
    "threshold": 1000,
    "edgeitems": 3,
    "linewidth": 75,
    "suppress": False,
    "floatmode": "maxprec",
    "sign": "-",
    "nanstr": "nan",
    "infstr": "inf",
    "formatter": None,
}


class Verdict(Enum):
    """How a printed number compares with ours."""

    TYPED_IN = "typed in, and the same here"
    AS_PRINTED = "equal as printed"
    WITHIN_ULP = "within 1 ulp"
    WITHIN_ROUNDING = "within the propagated rounding"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Comparison:
    """One printed number beside ours."""

    what: str
    printed: str
    ours: str
    verdict: Verdict


@cache
def document(name: str) -> dict[str, Any]:
    return tomllib.loads(DOCUMENTS[name].read_text(encoding="utf-8"))


def entries() -> list[Any]:
    return [
        pytest.param(name, entry, id=f"{name}: {entry['what']}")
        for name in DOCUMENTS
        for entry in document(name)["printed"]
    ]


@pytest.mark.parametrize(("name", "entry"), entries())
def test_every_printed_number_comes_out_again(name: str, entry: Entry) -> None:
    accepted = {Verdict.TYPED_IN, Verdict.AS_PRINTED}
    if "ulp" in entry:
        accepted.add(Verdict.WITHIN_ULP)
    if "inputs_are_rounded" in document(name):
        accepted.add(Verdict.WITHIN_ROUNDING)
    wrong = [each for each in compare(name, entry) if each.verdict not in accepted]
    assert wrong == []


def test_the_variances_agree_to_eight_significant_digits() -> None:
    for name in DOCUMENTS:
        for entry in document(name)["printed"]:
            if entry.get("take") == "variance":
                (each,) = compare(name, entry)
                ours, printed = float(each.ours), float(each.printed)
                np.testing.assert_equal(f"{ours:.7e}", f"{printed:.7e}", err_msg=each.what)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_number_of_a_document_is_compared_exactly_once(name: str) -> None:
    printed = document(name)["printed"]
    assert max(Counter(entry["what"] for entry in printed).values()) == 1
    compared = [each.printed for entry in printed for each in compare(name, entry)]
    np.testing.assert_equal(compared, [token for e in printed for token in tokens(e["text"])])
    np.testing.assert_equal(len(compared), document(name)["numbers"])


@pytest.mark.parametrize(("name", "entry"), entries())
def test_a_number_that_is_not_the_printed_one_is_noticed(name: str, entry: Entry) -> None:
    first = tokens(entry["text"])[0]
    # 1e-6 is several times the rounding that any number of any document may carry.
    other = str(int(first) + 1) if entry["form"] == "shape" else repr(float(first) + 1e-6)
    changed = {**entry, "text": entry["text"].replace(first, other, 1)}
    np.testing.assert_equal(compare(name, changed)[0].verdict, Verdict.DIFFERS)


def test_adding_the_mask_of_ones_and_minus_infinity_gives_the_masked_scores() -> None:
    steps = explained("causal-mask").steps
    mask = np.where(steps["visible"].value, steps["bias"].value, -np.inf)
    np.testing.assert_array_equal(steps["scaled"].value + mask, steps["masked"].value)


def test_the_masked_example_allows_for_the_propagated_rounding_and_for_little_more() -> None:
    # What the example file states by hand must be what the printed digits imply, rounded up.
    bounds = propagated_rounding("004-causal-mask")
    stated = {
        expectation.step: expectation.within
        for expectation in load("causal-mask").expect
        if expectation.within and expectation.variance is None
    }
    np.testing.assert_equal(set(stated), {"scores", "scaled", "masked", "weights", "output"})
    for step, within in stated.items():
        implied = bounds[step, "value"].max() + half_a_unit(printed_at("004-causal-mask", step))
        np.testing.assert_array_less(implied, within)
        np.testing.assert_array_less(within, 1.1 * implied)  # two digits, rounded up


# What the documents print, and what we have in its place.


def tokens(text: str) -> list[str]:
    return NUMBER.findall(text)


def compare(name: str, entry: Entry) -> list[Comparison]:
    """Each number of one entry beside ours."""
    values = reading(name, entry)
    theirs, ours = tokens(entry["text"]), tokens(written(values, entry["form"]))
    if entry.get("cut_off"):
        ours, values = ours[: len(theirs)], values.ravel()[: len(theirs)]
        ours[-1] = ours[-1][: len(theirs[-1])]
    bounds = np.zeros(np.shape(values))
    if "inputs_are_rounded" in document(name):
        bound = propagated_rounding(name).get((entry["step"], entry.get("take", "value")))
        bounds = bounds if bound is None else bound + half_a_unit(entry)
    np.testing.assert_equal(len(ours), len(theirs), err_msg=f"{name}: {entry['what']}")
    return [
        Comparison(entry["what"], printed, written_, verdict(entry, printed, written_, value, off))
        for printed, written_, value, off in zip(
            theirs, ours, np.ravel(values), np.ravel(bounds), strict=True
        )
    ]


def verdict(entry: Entry, printed: str, ours: str, value: float, bound: float) -> Verdict:
    if entry["form"] == "typed":  # a person's 1.0 is NumPy's "1.": the numbers count
        return Verdict.TYPED_IN if float(printed) == value else Verdict.DIFFERS
    if printed == ours:
        return Verdict.AS_PRINTED
    difference = abs(float(printed) - float(value))  # infinite where an infinity is missing
    if "ulp" in entry and difference <= entry["ulp"] * np.spacing(float(printed)):
        return Verdict.WITHIN_ULP
    return Verdict.WITHIN_ROUNDING if difference <= bound else Verdict.DIFFERS


def written(values: Array, form: str) -> str:
    """Our numbers as the document writes its own."""
    with np.printoptions(**PRINTING):
        match form:
            case "array":
                return repr(values)
            case "print":
                return str(values)
            case _:
                return repr(values.tolist())


@cache
def load(example: str) -> regard.Problem:
    return regard.load_problem(EXAMPLES / f"{example}.toml")


@cache
def explained(example: str, query: str | None = None) -> regard.Explanation:
    """The example explained, or asked with one named query of animals-matrix, as a vector."""
    problem = load(example)
    if query is not None:
        queries = explained("animals-matrix").steps["queries"]
        row = queries.row_labels.index(query)
        problem = problem.replace(queries=queries.value[row], query_labels=(query,), expect=())
    return regard.explain(problem)


def reading(name: str, entry: Entry) -> Array:
    """What the explanation has where the document prints the entry."""
    example = entry.get("example", document(name)["example"])
    explanation = explained(example, entry.get("query"))
    if "at" in entry:
        return np.asarray(explanation.why(entry["step"], *entry["at"]).value)
    take = TAKE[entry.get("take", "value")](explanation, entry["step"])
    step = explanation.steps[entry["step"]]
    if entry["form"] == "shape":
        return np.array(take.shape)
    if "row" in entry:
        return np.asarray(take[step.row_labels.index(entry["row"])])
    if "note" in entry:
        return np.asarray(take[step.row_notes.index(entry["note"])])
    return take


TAKE: dict[str, Callable[[regard.Explanation, str], Array]] = {
    "value": lambda explanation, step: explanation.steps[step].value.astype(np.float64),
    "as a column": lambda explanation, step: explanation.steps[step].value[:, None],
    "transposed": lambda explanation, step: explanation.steps[step].value.T,
    "variance": lambda explanation, step: np.array(explanation.statistics().steps[step].variance),
    "the divisor": lambda explanation, step: divisor(explanation, step),
    "bias where visible": lambda explanation, step: np.where(
        explanation.steps[step].value, explanation.steps["bias"].value, -np.inf
    ),
}


def divisor(explanation: regard.Explanation, step: str) -> Array:
    """The number shown in the derivation of a factor that it is one over: √D for the scale."""
    derivation = explanation.why(step)
    shown = map(float, tokens(derivation.text(digits=16)))
    return np.array(min(shown, key=lambda number: abs(number * derivation.value - 1)))


# How far a number may be off because the document prints fewer digits than it computed with.


def half_a_unit(entry: Entry) -> float:
    """Half a unit of the last decimal that the entry is printed with."""
    # NumPy drops zeros at the end, so the longest number tells how many decimals all of them have.
    return 0.5 * 10.0 ** -max(len(token.partition(".")[2]) for token in tokens(entry["text"]))


def printed_at(name: str, step: str) -> Entry:
    """The whole matrix of one step, as the document prints it."""
    (found,) = (
        entry
        for entry in document(name)["printed"]
        if entry["step"] == step and not {"take", "cut_off"} & entry.keys()
    )
    return found


@cache
def propagated_rounding(name: str) -> dict[tuple[str, str], Array]:
    """A bound for every cell of every step of a causal problem with printed q, k and v.

    Each number of q, k and v lies within half a unit of its last decimal. What follows from them
    is bounded by the triangle inequality, nothing left out; only float64's own rounding, a
    millionth of these bounds, is.
    """

    def printed(step: str, columns: int = 8) -> tuple[Array, Array]:
        entry = printed_at(name, step)
        values = np.array([float(token) for token in tokens(entry["text"])]).reshape(-1, columns)
        return values, np.full(values.shape, half_a_unit(entry))

    (q, q_off), (k, k_off), (v, v_off) = printed("queries"), printed("keys"), printed("values")
    scores = q @ k.T
    scores_off = np.abs(q) @ k_off.T + q_off @ np.abs(k).T + q_off @ k_off.T
    scaled, scaled_off = scores / np.sqrt(q.shape[1]), scores_off / np.sqrt(q.shape[1])

    visible = np.tril(np.ones(scores.shape, dtype=bool))
    exponentials = np.where(visible, np.exp(scaled), 0)
    high, low = exponentials * np.exp(scaled_off), exponentials * np.exp(-scaled_off)
    weights = exponentials / exponentials.sum(axis=1, keepdims=True)
    # A weight is largest where its own score is as high and all others are as low as they can be.
    highest = high / (high + low.sum(axis=1, keepdims=True) - low)
    lowest = low / (low + high.sum(axis=1, keepdims=True) - high)
    weights_off = np.maximum(highest - weights, weights - lowest)

    # Both rows of weights sum to 1, so Σ w'v' − Σ wv = Σ (w' − w)(v − output) + Σ w'(v' − v).
    output = weights @ v
    spread = np.abs(v[None] - output[:, None])  # (L, S, E)
    output_off = np.einsum("ls,lse->le", weights_off, spread) + v_off.max()

    def variance(values: Array, off: Array) -> Array:
        # var(x + δ) = var(x) + 2 mean((x − mean(x)) δ) + var(δ)
        return np.array(2 * np.mean(np.abs(values - values.mean()) * off) + off.max() ** 2)

    return {
        ("scores", "value"): scores_off,
        ("scaled", "value"): scaled_off,
        ("masked", "value"): np.where(visible, scaled_off, 0),
        ("weights", "value"): weights_off,
        ("output", "value"): output_off,
        ("queries", "variance"): variance(q, q_off),
        ("keys", "variance"): variance(k, k_off),
        ("values", "variance"): variance(v, v_off),
        ("scores", "variance"): variance(scores, scores_off),
        ("scaled", "variance"): variance(scaled, scaled_off),
    }


def summary() -> str:
    """Per document, how many numbers it prints and how they compare with ours."""
    heads = ("document", "numbers", *(each.value for each in Verdict))
    lines: list[Sequence[object]] = [heads]
    for name in DOCUMENTS:
        found = [each for entry in document(name)["printed"] for each in compare(name, entry)]
        counts = Counter(each.verdict for each in found)
        lines.append((name, len(found), *(counts[each] for each in Verdict)))
    lines.append(
        ("all", *(sum(column) for column in zip(*(x[1:] for x in lines[1:]), strict=True)))
    )
    first = max(len(str(line[0])) for line in lines)
    return "\n".join(
        str(line[0]).ljust(first)
        + "".join(
            f"{cell:>{len(head) + 3}}" for cell, head in zip(line[1:], heads[1:], strict=True)
        )
        for line in lines
    )


if __name__ == "__main__":
    print(summary())

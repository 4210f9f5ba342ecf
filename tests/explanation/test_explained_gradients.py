"""An explanation that goes on from a loss: every gradient is right and says where it is from."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import regard
from exact_slopes import slopes
from places import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.toml"))
# A gradient is a chain of at most a dozen operations and sums of at most eight terms, each rounded
# once: fewer than 2⁹ roundings of what is at most as large as the largest gradient.
CLOSE = 2.0**-53 * 2**9


@cache
def pulled(name: str) -> regard.Explanation:
    """An example with its own loss, or with a target drawn for it."""
    problem = regard.load_problem(ROOT / "examples" / f"{name}.toml")
    explanation = regard.explain(problem)
    if "d_output" in explanation.steps:
        return explanation
    target = np.random.default_rng(0).normal(size=explanation.output.shape)
    return regard.explain(problem, target=target)


def gradients(explanation: regard.Explanation) -> dict[str, str]:
    """Each step that is a gradient, and the step that it belongs to."""
    steps = explanation.steps.values()
    return {step.name: step.declared.of for step in steps if step.declared.of}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.full if x == "causal-mask" else ()) for x in EXAMPLES],
)
def test_every_gradient_of_every_example_is_the_slope_of_the_loss_in_60_digits(name):
    explanation = pulled(name)
    found = gradients(explanation)
    assert {"d_output", "d_weights", "d_scores", "d_queries", "d_keys", "d_values"} <= {*found}
    value = {gradient: explanation[gradient].value for gradient in found}
    size = max(float(np.abs(one).max()) for one in value.values())
    for gradient, of in found.items():
        expected = slopes(explanation.source, of)
        np.testing.assert_allclose(value[gradient], expected, CLOSE, CLOSE * size, gradient)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_with_a_loss_is_shown_in_every_way(name):
    explanation = pulled(name)
    assert explanation.first_nonfinite() is None
    assert "d_queries" in explanation.statistics().steps
    assert explanation.to_json()["steps"][-1]["name"] == list(explanation.steps)[-1]
    assert r"**d\_queries**" in explanation.to_markdown()
    assert explanation.to_html().startswith("<!doctype html>")

"""An explanation that goes on from a loss: every gradient is right and says where it is from."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import regard
from backward_oracle import differentiate
from bounds import precision_of
from exact_slopes import slopes_of
from places import ROOT
from regard.errors import DtypeError, LabelError, OptionError, ProblemError, ShapeError

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


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_gradient_of_every_example_is_the_slope_of_the_loss_in_60_digits(name):
    assert {"d_output", "d_weights", "d_scores", "d_queries", "d_keys", "d_values"} <= {
        *gradients(pulled(name))
    }
    check_slopes(pulled(name))


def check_slopes(explanation: regard.Explanation) -> None:
    """Every gradient against central differences in 60 digits."""
    found = gradients(explanation)
    value = {gradient: explanation[gradient].value for gradient in found}
    size = max(float(np.abs(one).max(initial=0)) for one in value.values())
    expected = slopes_of(explanation.source, [*found.values()])
    for gradient, of in found.items():
        np.testing.assert_allclose(value[gradient], expected[of], CLOSE, CLOSE * size, gradient)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_with_a_loss_is_shown_in_every_way(name):
    explanation = pulled(name)
    assert explanation.first_nonfinite() is None
    assert "d_queries" in explanation.statistics().steps
    assert explanation.to_json()["steps"][-1]["name"] == list(explanation.steps)[-1]
    assert r"**d\_queries**" in explanation.to_markdown()
    assert explanation.to_html().startswith("<!doctype html>")


# random problems ----------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Query, key and value with heads, and options; the loss is among them."""
    rng = np.random.default_rng(seed)
    groups, shared = (int(rng.integers(1, 3)) for _ in "ab")
    heads, rows, keys, width, wide = groups * shared, *(int(n) for n in rng.integers(1, 4, 4))
    shapes = [(heads, rows, width), (groups, keys, width), (groups, keys, wide)]
    options: dict[str, Any] = {
        "bias": rng.normal(size=(heads, rows, keys)),
        "sink": rng.normal(size=heads),
        "softcap": 1.5,
        "scale": -0.7,
        "mask": rng.random((rows, keys)) < 0.7,
        "causal": True,
        "offset": int(rng.integers(-1, 3)),
    }
    options = {name: one for name, one in options.items() if rng.random() < 0.5}
    if "causal" not in options:
        options.pop("offset", None)
    elif rows != keys:
        options.setdefault("offset", "end")
    loss = "target" if rng.random() < 0.7 else "grad_output"
    options[loss] = rng.normal(size=(heads, rows, wide))
    return [rng.normal(size=shape) for shape in shapes], options


def projected(seed: int) -> regard.Problem:
    """Self- or cross-attention from embeddings, with heads or without, and a target."""
    rng = np.random.default_rng(seed)
    rows, keys, inner, other, width, wide, last = (int(n) for n in rng.integers(1, 4, 7))
    heads, groups = (int(rng.integers(1, 3)), 1) if rng.random() < 0.6 else (0, 0)
    context = rng.random() < 0.4
    source = other if context else inner
    queried, keyed = max(heads, 1), max(groups, 1)
    arrays = {
        "embeddings": (rows, inner),
        **({"context": (keys, source)} if context else {}),
        "W_q": (inner, queried * width),
        "W_k": (source, keyed * width),
        "W_v": (source, keyed * wide),
    }
    result = queried * wide
    if rng.random() < 0.5:
        arrays["W_o"], result = (result, last), last
    for name in ("b_q", "b_k", "b_v", "b_o"):
        if rng.random() < 0.4 and f"W_{name[2]}" in arrays:
            arrays[name] = arrays[f"W_{name[2]}"][1:]
    made: dict[str, Any] = {name: rng.normal(size=shape) for name, shape in arrays.items()}
    if heads:
        made |= {"heads": heads, "key_heads": groups}
    if rng.random() < 0.5 and not context:
        made["causal"] = True
    softmax = "unshifted" if rng.random() < 0.3 else "shifted"
    return regard.Problem(**made, softmax=softmax, target=rng.normal(size=(rows, result)))


def some(count: int, plain: int) -> list[Any]:
    """So many seeds, of which the first few are for every run."""
    return [pytest.param(n, marks=pytest.mark.full if n >= plain else ()) for n in range(count)]


@pytest.mark.parametrize("seed", some(100, 5))
def test_every_gradient_of_random_calls_is_the_slope_of_the_loss_in_60_digits(seed):
    arrays, options = drawn(seed)
    check_slopes(regard.explain(*arrays, **options))


@pytest.mark.parametrize("seed", some(100, 5))
def test_every_gradient_of_random_problems_is_the_slope_of_the_loss_in_60_digits(seed):
    check_slopes(regard.explain(projected(seed)))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("seed", some(200, 40))
def test_the_fused_kernel_has_the_same_gradients_within_its_bound(seed):
    arrays, options = drawn(seed)
    explanation = regard.explain(*arrays, **options)
    options = {name: one for name, one in options.items() if name not in ("target", "grad_output")}
    grad = explanation["d_output"].value
    wrt = ["query", "key", "value", *(n for n in ("bias", "sink", "scale") if n in options)]
    made = regard.gradients(*arrays, grad, wrt=wrt, kernel="fused", **options)
    unit = precision_of(np.float64).unit
    _, error = differentiate(*arrays, grad, unit, **options)
    for name in wrt:
        step = {"query": "d_queries", "key": "d_keys", "value": "d_values"}.get(name, f"d_{name}")
        one, other = explanation[step].value, np.asarray(getattr(made, name))
        # Both are within the bound of the exact gradient.
        assert (np.abs(one - other) <= 2 * getattr(error, name)).all(), name


# what it says -------------------------------------------------------------------------------------


def test_a_gradient_is_followed_down_to_given_numbers_as_text_latex_and_numpy():
    cell = pulled("she-likes-coffee").why("d_queries", "she", 2)
    assert str(cell).splitlines()[-1] == (
        f"  (as Q[she, 2] rises, the loss {'rises' if cell.value > 0 else 'falls'} "
        f"{abs(cell.value):.8f} times as fast)"
    )
    assert cell.latex().startswith(r"{\mathrm{d}Q}_{\text{she}, \text{2}} = ")
    np.testing.assert_allclose(eval(cell.numpy(), {"np": np}), cell.value, 1e-14)
    assert "the loss" in cell._repr_latex_()
    waiting, opened = [cell], set()
    while waiting:
        here = waiting.pop()
        if (here.step, here.index) not in opened:
            opened.add((here.step, here.index))
            waiting += [here.open(k) for k in range(len(here.operands))]
    passed = {step for step, _ in opened}
    assert {"embeddings", "W_q", "W_k", "W_v", "target", "d_output", "delta", "d_scores"} <= passed
    assert "d_keys" not in passed


def test_forward_comes_first_then_the_loss_then_the_way_back():
    phases = [step.phase for step in pulled("coffee-target").steps.values()]
    assert phases == sorted(phases, key=["forward", "loss", "backward"].index)
    assert [step for step in regard.explain([[1.0]], [[2.0]], [[3.0]]).steps.values()][
        -1
    ].phase == "forward"


def test_a_gradient_of_zero_and_a_hidden_one_say_so():
    explanation = regard.explain(
        [[1.0], [2.0]], [[1.0], [2.0]], [[1.0], [3.0]], causal=True, target=[[1.0], [0.0]]
    )
    assert "as O[0, 0] rises, the loss stays the same" in str(explanation.why("d_output", 0, 0))
    hidden = str(explanation.why("d_weights", 0, 1)).splitlines()
    assert hidden[1:] == [
        "  hidden, so 0",
        "  causal: hidden (key 1 > position 0)",
        "  hidden by: causal",
    ]


def test_a_given_gradient_has_no_loss_and_says_so():
    explanation = regard.explain([[1.0]], [[2.0]], [[3.0]], grad_output=[[2.0]])
    np.testing.assert_array_equal(explanation["d_output"].value, [[2.0]])
    assert "loss" not in explanation.steps
    with pytest.raises(LabelError, match="a loss that only the caller knows"):
        explanation["loss"]


@pytest.mark.parametrize("name", ["d_loss", "d_target"])
def test_a_loss_with_a_target_does_not_ask_for_one(name):
    explanation = regard.explain([[1.0]], [[2.0]], [[3.0]], target=[[2.0]])
    with pytest.raises(LabelError, match="those of the output, and of what it is computed from"):
        explanation[name]


def test_a_target_that_a_problem_states_gives_way_to_a_gradient():
    problem = regard.Problem(queries=[[1.0]], keys=[[2.0]], values=[[3.0]], target=[[2.0]])
    with pytest.raises(ProblemError, match="target=None"):
        regard.explain(problem, grad_output=[[5.0]])
    explanation = regard.explain(problem, target=None, grad_output=[[5.0]])
    np.testing.assert_array_equal(explanation["d_output"].value, [[5.0]])


def test_each_batch_element_has_a_loss_and_gradients_of_its_own():
    rng = np.random.default_rng(0)
    arrays, target = rng.normal(size=(3, 2, 1, 3, 2)), rng.normal(size=(2, 1, 3, 2))
    both = regard.explain(*arrays, target=target)
    assert both["loss"].shape == (2,)
    for n in range(2):
        alone = regard.explain(*arrays[:, n], target=target[n])
        for name in ("loss", "d_queries", "d_keys", "d_values"):
            np.testing.assert_array_equal(both[name].value[n], alone[name].value)


def test_the_loss_goes_with_an_explanation_without_a_key():
    explanation = pulled("she-likes-coffee")
    without = explanation.without("likes")
    np.testing.assert_array_equal(without["d_values"].value[1], 0)
    np.testing.assert_array_equal(without["target"].value, explanation["target"].value)
    assert explanation.compare(without).step == "visible" or "d_values" in without.steps


def test_changed_given_arrays_change_no_explanation():
    target = np.zeros((1, 1))
    explanation = regard.explain([[1.0]], [[2.0]], [[3.0]], target=target)
    target[...] = 5.0
    np.testing.assert_array_equal(explanation["loss"].value, 4.5)


def test_the_gradients_of_a_layer_are_those_that_it_computes():
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(4, 4)) for name in ("W_q", "W_k", "W_v", "W_o")}
    layer = regard.MultiHeadAttention(**weights, heads=2)
    x, grad = rng.normal(size=(2, 3, 4))
    explanation = layer.explain(x, grad_output=grad, causal=True)
    made = layer.gradients(x, grad, causal=True)
    for name in ("x", *weights):
        step = "d_embeddings" if name == "x" else f"d_{name}"
        # Chains of fewer than 2⁹ roundings of numbers below 2⁵.
        np.testing.assert_allclose(
            getattr(made, name), explanation[step].value, CLOSE, CLOSE * 2**5
        )


# questions ----------------------------------------------------------------------------------------


def test_statistics_cover_the_gradients():
    explanation = pulled("causal-mask")
    one = explanation.statistics().steps["d_weights"]
    seen = explanation["visible"].value
    np.testing.assert_allclose(one.mean, explanation["d_weights"].value[seen].mean(), 1e-13)
    assert one.cells == seen.sum()
    assert explanation.statistics().steps["d_keys"].cells == explanation["keys"].value.size


@pytest.mark.parametrize("seed", range(12))
def test_what_the_terms_of_a_product_add_to_its_rows_adds_up_to_it(seed):
    arrays, options = drawn(seed)
    for explanation in (regard.explain(*arrays, **options), regard.explain(projected(seed))):
        products = 0
        for name, step in explanation.steps.items():
            for head in range(explanation.heads or 1) if step.declared.op == "dot" else ():
                of_head = {"head": head} if explanation.heads else {}
                whole = step.table(**of_head).value
                rows = range(step.matrix_shape[0])
                tables = [explanation.contributions(r, step=name, **of_head).value for r in rows]
                sums = [table.sum(axis=0) for table in tables]
                size = np.abs(tables).sum(axis=1)
                assert (np.abs(sums - whole) <= 8 * 2.0**-53 * size).all(), name
                products += 1
        assert products >= 4


def test_contributions_to_a_gradient_are_labelled():
    table = pulled("look-back").contributions("sat", step="d_keys")
    assert table.formula == "dA[i, j]·Q[i] for each query row i; the rows add up to dK[j]"
    assert (table.row_labels, table.column_labels) == (("the", "cat", "sat", "down"), ("x", "y"))
    np.testing.assert_array_equal(table.value[:2], 0)  # "the" and "cat" do not see "sat"


def test_contributions_to_what_is_no_product_name_those_that_are():
    with pytest.raises(LabelError, match=r"d_scores is no product.* d_queries"):
        pulled("look-back").contributions("sat", step="d_scores")


def test_json_says_which_steps_are_gradients_and_of_what():
    steps = {step["name"]: step for step in pulled("look-back").to_json()["steps"]}
    assert (steps["d_queries"]["phase"], steps["d_queries"]["of"]) == ("backward", "queries")
    assert (steps["loss"]["phase"], "of" in steps["loss"]) == ("loss", False)
    assert "phase" not in steps["weights"]


def test_the_first_gradient_that_overflows_is_found():
    explanation = regard.explain([[1.0]], [[1.0]], [[1e200]], target=[[0.0]])
    assert explanation.first_nonfinite().step == "cell_losses"
    assert "overflows" in str(explanation.why("cell_losses", 0, 0))
    explanation = regard.explain([[1.0]], [[1.0]], [[1e200]], grad_output=[[1e200]])
    assert explanation.first_nonfinite().step == "d_weights"


def test_two_targets_differ_first_where_they_are_given():
    here, there = (regard.explain([[1.0]], [[2.0]], [[3.0]], target=[[t]]) for t in (1.0, 2.0))
    assert here.compare(there).step == "target"
    assert here.compare(regard.explain([[1.0]], [[2.0]], [[3.0]])) is None


# bad input ----------------------------------------------------------------------------------------

ONE = ([[1.0]], [[2.0]], [[3.0]])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ShapeError, {"target": [1.0]}, r"target has shape \(1,\) but the output has \(1, 1\)"),
        (ShapeError, {"grad_output": [[1.0, 2.0]]}, "grad_output has shape"),
        (OptionError, {"target": [[1.0]], "grad_output": [[1.0]]}, "keep one of them"),
        (OptionError, {"target": [[np.nan]]}, r"target is nan at \(0, 0\).*grad_output with a 0"),
        (OptionError, {"target": [[np.inf]]}, "every number must be finite"),
        (OptionError, {"target": [[1e200]]}, r"the loss overflows: target has .* 1e\+200"),
        (DtypeError, {"target": [[True]]}, "target has booleans, as a mask has"),
        (DtypeError, {"target": [["she"]]}, "target"),
        (DtypeError, {"grad_output": [[1j]]}, "grad_output has dtype complex128"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused_by_name(kind, options, message):
    with pytest.raises(kind, match=message):
        regard.explain(*ONE, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d_mask", "a key is visible or not.*a bias has"),
        ("d_causal", "a key is visible or not"),
        ("d_labels", "names are no numbers"),
        ("d_softcap", "it is a setting"),
        ("d_lse", "the loss does not depend on it"),
        ("d_quries", "did you mean d_queries"),
        ("d_bias", "this call has no bias"),
        ("d_W_q", "queries, keys and values were given ready"),
        ("d_row_sums", "the way back passes over it, in one formula from d_weights"),
        ("d_scale", "it follows from settings such as the width"),
        ("d_cell_losses", "the gradients are those of the output"),
        ("d_delta", "the gradients are those of the output"),
        ("d_d_scores", "the gradients are those of the output"),
    ],
)
def test_what_has_no_gradient_says_why(name, message):
    with pytest.raises(LabelError, match=message):
        regard.explain(*ONE, target=[[1.0]])[name]


@pytest.mark.parametrize("name", ["d_queries", "loss", "target", "delta"])
def test_gradients_without_a_loss_are_refused_with_what_to_give(name):
    with pytest.raises(LabelError, match="give explain a target, or grad_output"):
        regard.explain(*ONE)[name]


# problems -----------------------------------------------------------------------------------------


def test_a_problem_has_a_target_that_explain_may_replace_or_take_away():
    problem = regard.Problem(queries=[[1.0]], keys=[[2.0]], values=[[3.0]], target=[[1.0]])
    np.testing.assert_array_equal(regard.explain(problem)["loss"].value, 2.0)
    np.testing.assert_array_equal(regard.explain(problem, target=[[3.0]])["loss"].value, 0.0)
    given = regard.explain(problem, target=None, grad_output=[[1.0]])
    np.testing.assert_array_equal(given["d_values"].value, [[1.0]])
    assert "d_output" not in regard.explain(problem, target=None).steps
    assert "target (1, 1)" in repr(problem)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": [1.0]}, "target has shape"),
        ({"target": [[np.nan]]}, "target is nan"),
        ({"target": [[1.0]], "grad_output": [[1.0]]}, "keep one of them"),
        ({"target": [["a"]]}, "target at"),
    ],
)
def test_a_problem_with_a_wrong_loss_is_refused_by_name(given, message):
    with pytest.raises(ProblemError, match=message):
        regard.Problem(queries=[[1.0]], keys=[[2.0]], values=[[3.0]], **given)


def test_a_wrong_expected_gradient_is_reported_with_its_derivation():
    problem = regard.load_problem("look-back")
    wrong = regard.Expectation(step="d_W_q", at=("y", "x"), value=0.5)
    (mismatch,) = regard.explain(problem).check((wrong,))
    assert (mismatch.step, mismatch.labels) == ("d_W_q", ("y", "x"))
    assert "dW_q[y, x]" in str(mismatch.derivation)
    with pytest.raises(LabelError, match="without a loss"):
        regard.explain(problem, target=None).check((wrong,))


def test_a_head_learns_to_look_one_word_back():
    problem, losses = regard.load_problem("look-back"), []
    for _ in range(100):
        explanation = regard.explain(problem)
        losses.append(float(explanation["loss"].value))
        problem = problem.replace(W_q=problem.W_q - explanation["d_W_q"].value)
    assert losses == sorted(losses, reverse=True)
    np.testing.assert_allclose([losses[0], losses[1], losses[-1]], [1.82, 0.67, 0.02], atol=5e-3)
    weights = regard.explain(problem)["weights"].value
    assert (np.diagonal(weights, -1) > 0.89).all()

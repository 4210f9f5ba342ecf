"""A score of a caller's own: its value, gradients and explanation, and the checks of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import regard
from regard import DtypeError, OptionError, ProblemError, ShapeError
from regard.textbook import Mechanism

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=n) for n in ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)))
GRAD, W = RNG.normal(size=(2, 4, 3, 3)), RNG.normal(size=(2, 2))
STEPS = [
    ("W", "W_s", "D K", "given"),
    ("turned", "Q_w", "H L K", "dot", "queries", "W"),
    ("gates", "B", "H L K", "sigmoid", "turned"),
    ("products", "A_p", "H L S", "dot", "gates", ("keys", "h//(H//G) j k")),
    ("lengths", "l", "H L", "length", "queries"),
    ("scores", "A", "H L S", "divide", "products", "lengths"),
]


def in_loops(sees):
    output = np.zeros((2, 4, 3, 3))
    for b, h, i in np.ndindex(2, 4, 3):
        q = QUERY[b, h, i].tolist()
        gates = [1 / (1 + math.exp(-sum(q[d] * W[d, k] for d in range(2)))) for k in range(2)]
        scores = {
            j: sum(gates[k] * KEY[b, h // 2, j, k] for k in range(2)) / math.hypot(*q)
            for j in range(5)
            if sees(i, j)
        }
        total = sum(map(math.exp, scores.values()))
        for j, score in scores.items():
            output[b, h, i] += math.exp(score) / total * VALUE[b, h // 2, j]
    return output


def test_a_score_of_ones_own_has_the_output_of_plain_loops_and_the_slopes_of_its_loss():
    score = Mechanism("gated", STEPS, W=W)
    output = regard.attention(QUERY, KEY, VALUE, score=score, causal=True, offset=2)
    np.testing.assert_allclose(output, in_loops(lambda i, j: j <= i + 2), 1e-12)
    wrt = ["query", "key", "score.W"]
    grads = regard.gradients(QUERY, KEY, VALUE, GRAD, score=score, wrt=wrt)
    given = {"query": QUERY, "key": KEY, "score.W": W}

    def loss(own):
        made = Mechanism("gated", STEPS, W=own["score.W"])
        return (regard.attention(own["query"], own["key"], VALUE, score=made) * GRAD).sum()

    for name, array in given.items():
        way = RNG.normal(size=array.shape)
        up, down = (loss({**given, name: array + step * way}) for step in (1e-6, -1e-6))
        found = grads.parameters[name] if "." in name else getattr(grads, name)
        np.testing.assert_allclose((found * way).sum(), (up - down) / 2e-6, 1e-6, err_msg=name)


def test_it_is_explained_down_to_what_was_given_and_shown():
    score = Mechanism("gated", STEPS, W=W)
    arrays = QUERY[0, 0], KEY[0, 0], VALUE[0, 0]
    explanation = regard.explain(*arrays, score=score, target=np.ones((3, 3)))
    np.testing.assert_allclose(explanation.output, regard.attention(*arrays, score=score), 1e-15)
    for name, step in explanation.steps.items():
        for index in np.ndindex(*step.shape):
            cell = explanation.derive(name, index)
            np.testing.assert_allclose(cell.recompute(), cell.value, 1e-12, 1e-14, err_msg=name)
    names = ("score_W", "turned", "gates", "products", "lengths")
    found = explanation.compare(regard.explain(*arrays))
    assert (found.step, found.only_here) == ("scores", names)
    assert "A step of the score" in explanation.to_html()
    assert repr(score) == 'Mechanism("gated")'


SCORES = ("scores", "A", "H L S", "dot", "queries", "keys")
# fmt: off
REFUSED = {
    "no steps": ([], 'the last step must be "scores" with the axes "H L S"'),
    "an unknown operation": ([(*SCORES[:3], "dott", *SCORES[4:])], "the operation dott; there are"),
    "too few operands": ([SCORES[:5]], "dot takes 2 operands, not 1"),
    "an unknown operand": ([(*SCORES[:5], "values")], "is made of 'values'; before it there are"),
    "an unknown axis": ([("scores", "A", "H L Z", *SCORES[3:])], "has the axis Z; there are"),
    "a name that is taken": ([("weights", *SCORES[1:]), SCORES], "needs a name of its own"),
    "a step that is idle": ([("idle", *SCORES[1:]), SCORES], "idle is not used by any step"),
    "an index of another length": ([(*SCORES[:5], ("keys", "j d"))], "one entry for each"),
    "a wrong index of a head": ([(*SCORES[:5], ("keys", "h j d"))], "at h along G; it may be"),
    "nothing to add up": ([(*SCORES[:3], "negate", "queries")], "adds up nothing that the step"),
    "keys beside queries": ([(*SCORES[:3], "add", "queries", "keys")], "meets the keys of its"),
    "a product turned over": ([("a", "a", "H D L", "dot", "queries", "queries"), SCORES],
                              "adds up one letter that the step itself does not have"),
    "a width from nowhere": ([("a", "a", "H L K", "negate", "queries"), SCORES],
                             "adds up nothing that the step itself does not have"),
    "three axes": ([("a", "a", "H L S D", "add", "queries"), SCORES], "it may have two, once"),
    "given by head": ([("W", "W", "H D", "given"), SCORES], "its axes may be D, K and U"),
    "a parameter that is missing": ([STEPS[0], *STEPS[1:]], "W is a parameter or a given step"),
}
# fmt: on


@pytest.mark.parametrize("case", REFUSED)
def test_a_declaration_that_makes_no_sense_is_refused(case):
    steps, words = REFUSED[case]
    with pytest.raises(OptionError) as refused:
        Mechanism("x", steps)
    assert words in str(refused.value)


def test_what_is_given_to_it_must_fit():
    with pytest.raises(ShapeError, match=r"score.W has shape \(2,\) but must be \(D, K\)"):
        Mechanism("x", STEPS, W=[1.0, 2.0])
    with pytest.raises(ShapeError, match="has 3 along D but queries and keys has 2"):
        regard.attention(QUERY, KEY, VALUE, score=Mechanism("x", STEPS, W=np.ones((3, 2))))
    with pytest.raises(DtypeError, match="step 0 must be"):
        Mechanism("x", ["scores"])
    score = Mechanism("x", STEPS, W=W)
    with pytest.raises(OptionError, match="it does not know score=Mechanism"):
        regard.attention(QUERY, KEY, VALUE, score=score, kernel="fused")


def test_a_file_cannot_have_it(tmp_path):
    arrays = {"queries": QUERY[0, 0], "keys": KEY[0, 0], "values": VALUE[0, 0]}
    problem = regard.Problem(**arrays, score=Mechanism("x", STEPS, W=W))
    assert regard.explain(problem).output.shape == (3, 3)
    with pytest.raises(ProblemError, match="a file cannot hold steps of your own"):
        regard.save_problem(problem, tmp_path / "own.toml")

"""Layers that add numbers to their scores by the places of query and key."""

import numpy as np
import pytest

import regard
from regard.diagnosis.changed_code import ChangedCode

NOT_JUDGED = "numbers added to the scores by the distance of query and key (not judged)"


def layer(name, **options):
    from support import relative_attentions_torch as of_torch

    sizes = {"WindowTable": dict(dim=24, window_size=(4, 4), num_heads=4)}
    return getattr(of_torch, name)(**sizes.get(name, {}), **options)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["WindowTable", "Buckets", "ShiftedRows", "Disentangled"])
def test_what_is_added_by_distance_is_seen_and_makes_nothing_wrong(name):
    found = regard.diagnose(layer(name))
    assert found.verdict == "right"
    assert NOT_JUDGED in found.summary


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "option", "mistake"),
    [
        ("WindowTable", dict(misplaced=True), "relative_bias_misplaced"),
        ("ShiftedRows", dict(padded_right=True), "distance_zero_not_read"),
        ("Disentangled", dict(transposed=False), "relative_term_transposed"),
    ],
)
def test_a_mistake_in_what_is_added_or_beside_it_is_named(name, option, mistake):
    assert regard.diagnose(layer(name, **option)).names == (mistake,)


@pytest.mark.needs("torch")
def test_a_class_whose_window_is_a_pair_is_made():
    from support.relative_attentions_torch import WindowTable

    assert regard.diagnose(WindowTable).verdict == "right"


def by_hand(q, k, v):
    s = q @ k.T / np.sqrt(q.shape[-1])
    s[0, -1] = -np.inf
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def test_the_scores_of_a_softmax_in_several_lines_are_seen():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 5))
    code = ChangedCode(by_hand)
    with code.noted() as notes:
        result = by_hand(q, k, v)
    scores = q @ k.T / np.sqrt(5)
    scores[0, -1] = -np.inf
    (seen,) = notes.softmaxes()
    np.testing.assert_array_equal(seen, scores)
    np.testing.assert_array_equal(result, by_hand(q, k, v))
    assert "regard_note" not in globals()

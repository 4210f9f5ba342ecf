"""Layers that add numbers to their scores by the places of query and key."""

import numpy as np
import pytest

import regard
from regard.diagnosis.process.changed_code import ChangedCode

NOT_JUDGED = "numbers added to the scores by the distance of query and key (not judged)"


def layer(name, **options):
    from support import relative_attentions_torch as of_torch

    sizes = {"WindowTable": dict(dim=24, window_size=(4, 4), num_heads=4)}
    return getattr(of_torch, name)(**sizes.get(name, {}), **options)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "name",
    ["WindowTable", "Buckets", "SidedBuckets", "CachedBuckets", "ShiftedRows", "Disentangled"],
)
def test_what_is_added_by_distance_is_seen_and_makes_nothing_wrong(name):
    found = regard.diagnose(layer(name))
    assert found.verdict == "right"
    assert NOT_JUDGED in found.summary


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "option", "mistake"),
    [
        ("WindowTable", dict(misplaced=True), "relative_bias_misplaced"),
        ("WindowTable", dict(order=(2, 1, 0)), "relative_bias_reversed"),
        ("SidedBuckets", dict(sign=-1), "relative_bias_reversed"),
        ("CachedBuckets", dict(restarts=True), "positions_restart"),
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


def alibi(q, k, v, first=0):
    def of(heads):
        return 2.0 ** (-8 / heads * np.arange(1, heads + 1))

    heads, places = q.shape[1], np.arange(k.shape[2])
    lower = 2 ** int(np.log2(heads))  # a power of two
    slopes = np.concatenate([of(lower), of(2 * lower)[first::2][: heads - lower]])
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores -= slopes[:, None, None] * np.abs(places[: q.shape[2], None] - places)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def alibi_from_the_second(q, k, v):
    return alibi(q, k, v, first=1)


def test_the_slopes_of_three_heads_are_judged():
    assert "is right with ALiBi" in regard.diagnose(alibi, signature={"first": "none"}).summary
    assert regard.diagnose(alibi_from_the_second).names == ("alibi_slopes_of_heads",)


def by_heads(q, k, v, mask=None, exchanged=False):
    """mask: True = attend, (batch, heads, queries, keys)"""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask[:, ::-1] if exchanged else mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def by_other_heads(q, k, v, mask=None):
    """mask: True = attend, (batch, heads, queries, keys)"""
    return by_heads(q, k, v, mask, exchanged=True)


def test_each_head_has_a_mask_of_its_own_where_the_text_says_so():
    assert regard.diagnose(by_heads).verdict == "right"
    assert not regard.diagnose(by_other_heads).ok


def in_blocks(q, k, v, key_mask=None, block=16):
    """key_mask: (batch, keys), True = real"""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if key_mask is not None:
        scores = np.where(key_mask[:, None, None], scores, -np.inf)
    top, total, out = -np.inf, 0.0, 0.0
    for at in range(0, k.shape[-2], block):
        part = scores[..., at : at + block]
        new = np.maximum(top, part.max(-1, keepdims=True))
        part, shrink = np.exp(part - new), np.exp(top - new)
        total = total * shrink + part.sum(-1, keepdims=True)
        out, top = out * shrink + part @ v[..., at : at + block, :], new
    return out / total


def test_a_block_that_is_all_padding_in_front_is_tried():
    assert not regard.diagnose(in_blocks).ok


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


@pytest.mark.parametrize("first", [0, 1])
def test_vectors_of_distances_that_are_documented_are_given(first):
    def relative(q, k, v, e):
        """q, k, v: (H, L, D); e: (H, L, D), e[:, L - 1 - r] is for distance r."""
        H, L, D = q.shape
        skewed = np.pad(q @ e.swapaxes(1, 2), ((0, 0), (0, 0), (1, 0))).reshape(H, L + 1, L)
        s = (q @ k.swapaxes(1, 2) + skewed[:, first : L + first]) / np.sqrt(D)
        s = np.where(np.tri(L, dtype=bool), s, -np.inf)
        w = np.exp(s - s.max(-1, keepdims=True))
        return w / w.sum(-1, keepdims=True) @ v

    found = regard.diagnose(relative)
    if first:
        assert found.verdict == "right", found
        assert "by the distance" in str(found)
    else:
        assert found.verdict not in ("right", "unusable"), found

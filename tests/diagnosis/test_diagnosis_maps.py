"""Attention over images, windows, pairs and pooled maps."""

from functools import partial

import pytest

import regard
from regard.diagnosis.mistakes.maps import PAIR_MISTAKES, POOLED_MISTAKES
from support import map_attentions as maps

POOLED = [one.name for one in POOLED_MISTAKES]
OF_PAIRS = [one.name for one in PAIR_MISTAKES]


def test_a_function_that_pools_a_map_is_right_and_its_mistakes_are_named():
    assert regard.diagnose(maps.pooled).verdict == "right"
    for name in (*POOLED, "map_reshaped"):
        assert regard.diagnose(partial(maps.pooled, wrong=name)).names == (name,)


@pytest.mark.parametrize("wrong", [*OF_PAIRS, "pairs_not_exchanged_back"])
def test_mistakes_of_attention_over_pairs_are_named(wrong):
    assert regard.diagnose(maps.EndingNode(wrong=wrong)).names == (wrong,)


def test_right_attention_over_pairs_is_not_accused():
    assert regard.diagnose(maps.EndingNode).verdict == "right"
    assert regard.diagnose(maps.TriangleAttention).verdict == "right"
    assert regard.diagnose(maps.triangle).verdict == "right"


@pytest.mark.parametrize("kind", [maps.Unturned, maps.NotTurnedBack])
def test_a_mistake_with_another_option_than_the_default_is_found(kind):
    found = regard.diagnose(kind)
    assert found.names == (kind.wrong,)
    assert "starting=False" in found.summary

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


BY_PLACE = "with keys that are hidden by their places in a map (not judged)"


def test_windows_of_a_map_are_right_and_what_their_pixels_get_comes_back_to_them():
    found = regard.diagnose(maps.ShiftedWindows)
    assert found.verdict == "right"
    assert BY_PLACE in found.summary
    for wrong in ("window_wraps_around", "pixels_misplaced"):
        layer = maps.ShiftedWindows(24, 4, window=2, shift=1, wrong=wrong)
        assert regard.diagnose(layer).names == (wrong,)


def test_neighbourhoods_of_maps_are_right_or_have_a_mistake():
    found = regard.diagnose(maps.neighbourhood)
    assert found.verdict == "right"
    assert BY_PLACE in found.summary
    assert regard.diagnose(maps.neighbourhood_unscaled).names == ("no_scale",)


def test_attention_over_pixels_in_numpy_is_called():
    assert regard.diagnose(maps.OfPixels).verdict == "right"
    assert regard.diagnose(maps.OfPixels(wrong="map_reshaped")).names == ("map_reshaped",)


def test_efficient_attention_is_right_and_its_softmaxes_have_their_axes():
    assert regard.diagnose(maps.EfficientAttention).verdict == "right"
    found = regard.diagnose(maps.KeysOverFeatures)
    assert found.names == ("softmax_of_keys_over_features",)
    found = regard.diagnose(maps.QueriesOverPixels)
    assert found.names == ("softmax_of_queries_over_tokens",)


def test_cosines_with_numbers_by_distance_are_right():
    found = regard.diagnose(maps.CosineWindow)
    assert found.verdict == "right"
    assert "Cosine(temperature=0.1)" in found.summary

"""Tables and grids in maps, pairs whose mask is not exchanged, and graphs with lists of edges."""

import pytest

import regard
from support import image_attentions as images


@pytest.mark.parametrize("kind", [images.ByRowsAndColumns, images.CutWindows, images.Grid])
def test_windows_grids_and_terms_of_height_and_width_are_right(kind):
    assert regard.diagnose(kind).verdict == "right"


@pytest.mark.parametrize("kind", [images.ColumnsForRows, images.PlacesExchanged])
def test_a_table_by_place_that_is_read_wrongly_is_named(kind):
    assert regard.diagnose(kind).names == ("relative_bias_misplaced",)


def test_a_grid_that_is_put_back_as_windows_are_is_named():
    assert regard.diagnose(images.GridAsWindows).names == ("pixels_misplaced",)


def test_a_mask_of_pairs_that_is_not_exchanged_with_them_is_named():
    assert regard.diagnose(images.EndingNode).names == ("pair_mask_transposed",)


@pytest.mark.parametrize("thing", [images.GraphLayer, images.on_edges, images.UndirectedGraph])
def test_attention_over_edges_is_right(thing):
    assert regard.diagnose(thing).verdict == "right"


@pytest.mark.parametrize("thing", [images.GraphOfSenders, images.on_edges_of_senders])
def test_weights_of_edges_that_add_up_for_each_sender_are_named(thing):
    assert regard.diagnose(thing).names == ("softmax_over_queries",)


def test_edges_that_lead_the_other_way_are_named():
    assert regard.diagnose(images.GraphTurned).names == ("mask_transposed",)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("name", "found"), [("Matcher", ()), ("ForgetfulMatcher", ("no_scale",))])
def test_descriptors_in_columns_whose_heads_take_turns_are_called(name, found):
    from support import column_attentions

    diagnosis = regard.diagnose(getattr(column_attentions, name))
    assert diagnosis.names == found
    assert diagnosis.verdict == ("mistaken" if found else "right")

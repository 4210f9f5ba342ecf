"""Diagnoses of functions that are meant to compute another score or normalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mechanism_attentions as functions
import regard
from regard import OptionError, ShapeError
from regard.diagnosis.mechanism import as_mechanism
from regard.diagnosis.probe import RIGHT, UNITS
from regard.diagnosis.probes import ready_probe
from regard.diagnosis.mistakes import catalogue_of
from regard.scores import Additive, Cosine, General

# The others repeat what these cover: a score without a width and one with, a mask, a caller's own
# score, a normalization, an entry of the plain catalogue, and two mistakes at once.
ALWAYS = {
    functions.right_bahdanau,
    functions.right_both,
    functions.cosine_of_keys_alone,
    functions.bahdanau_mask_after_softmax,
    functions.gates_without_sigmoid,
    functions.sigmoid_bias_forgotten,
}


def cases(table: dict[Any, Any]) -> list[Any]:
    full = pytest.mark.full
    return [
        pytest.param(one, meant, id=one.__name__, marks=() if one in ALWAYS else full)
        for one, meant in table.items()
    ]


@pytest.mark.parametrize(("function", "kind"), cases(functions.RIGHT))
def test_a_function_that_computes_its_mechanism_is_right(function, kind):
    found = regard.diagnose(function, **functions.MEANT[kind])
    assert (found.verdict, found.mistakes) == ("right", ())
    assert all(one.holds for one in found.properties), found.properties
    for option, part in functions.MEANT[kind].items():
        assert f"{option}={part}" in found.called


@pytest.mark.parametrize(("function", "meant"), cases(functions.WRONG))
def test_the_mistake_in_a_mechanism_is_named(function, meant):
    kind, names = meant
    found = regard.diagnose(function, **functions.MEANT[kind])
    assert found.verdict == "mistaken"
    assert " ".join(sorted(one.name for one in found.mistakes)) == names
    assert all(one.example is not None for one in found.mistakes)
    assert str(found)


@pytest.mark.full
def test_what_overflows_in_another_score_is_fragile():
    found = regard.diagnose(functions.fragile_general_without_maximum, **functions.MEANT["general"])
    assert (found.verdict, found.fragilities[0].name) == ("fragile", "no_maximum_subtracted")


@pytest.mark.parametrize("kind", functions.MEANT)
def test_every_mistake_of_a_mechanism_changes_something_and_has_a_name_of_its_own(kind):
    meant = functions.MEANT[kind]
    mechanism = as_mechanism(meant.get("score"), meant.get("normalize"))
    assert mechanism is not None
    width = mechanism.width or 6
    sizes = [(1, 1, 1, 5, 5, width, width), (1, 1, 1, 3, 5, width, width)]
    drawn = [ready_probe(f"{n}", "plain", one, 40 + n, rank=2) for n, one in enumerate(sizes)]
    # Equal scores tell the first of the largest from the last.
    even = {name: np.round(x) for name, x in drawn[0].inputs.items()}
    drawn.append(ready_probe("even", "plain", sizes[0], 44, rank=2))
    drawn[-1].inputs.update(even, keys=np.zeros_like(even["keys"]))  # type: ignore[attr-defined]
    probes = [*mechanism.of(drawn)]
    own = [one for one in catalogue_of(probes[0]) if one not in catalogue_of(drawn[0])]
    assert own
    assert len({one.name for one in own}) == len(own)
    for one in own:
        for variant in one.variants:
            apart = [
                np.nan_to_num(np.abs(p.output(variant) - p.output(RIGHT)), nan=1).max()
                for p in probes
            ]
            assert max(apart) > probes[0].tolerance(UNITS["float32"]), one.name


def test_what_cannot_be_compared_is_refused_by_name():
    def other(q, k, v):
        return v

    with pytest.raises(ShapeError, match="more than 64 wide"):
        regard.diagnose(other, score=General(np.eye(65)))
    with pytest.raises(TypeError, match=r"pass regard\.scores\.Cosine"):
        regard.diagnose(other, score="cosine")

    def layer(x, W_q, W_k, W_v):
        return x

    with pytest.raises(OptionError, match="layer takes embeddings or packed heads"):
        regard.diagnose(layer, score=Cosine())
    assert as_mechanism(Additive(np.eye(3), np.eye(3), np.ones(3)), None).width == 3  # type: ignore[union-attr]

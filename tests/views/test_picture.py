"""The description of the picture: each step in one place, factors around their product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from regard import Explanation
from regard.positions import Alibi, Rotary
from regard.problems.files import example_names, load_problem
from regard.scores import Additive, General
from regard.views.picture import Station, picture


def numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def embedded(**more: Any) -> Explanation:
    given = {name: numbers(seed, 4, 4) for seed, name in enumerate(("W_q", "W_k", "W_v"))}
    return regard.explain(regard.Problem(embeddings=numbers(3, 3, 4), **given, **more))


ROWS = [numbers(seed, 5, 4) for seed in range(3)]
CALLS = {
    **{name: lambda name=name: regard.explain(load_problem(name)) for name in example_names()},
    "heads": lambda: embedded(heads=2, b_q=numbers(4, 4), W_o=numbers(5, 4, 4), causal=True),
    "another sequence": lambda: embedded(context=numbers(6, 5, 4)),
    "additive": lambda: regard.explain(
        *ROWS, score=Additive(numbers(7, 4, 3), numbers(8, 4, 3), numbers(9, 3))
    ),
    "general": lambda: regard.explain(*ROWS, score=General(numbers(7, 4, 4))),
    "rotary": lambda: regard.explain(*ROWS, positions=Rotary()),
    "everything": lambda: regard.explain(
        *ROWS, positions=Alibi(0.5), bias=np.eye(5), softcap=2.0, sink=0.3, causal=True
    ),
    "a gradient": lambda: regard.explain(*ROWS, grad_output=np.ones((5, 4))),
}


@pytest.fixture(params=CALLS)
def explanation(request: pytest.FixtureRequest) -> Explanation:
    return CALLS[request.param]()


def of(explanation: Explanation) -> Any:
    return picture(explanation.source.steps.values())


def test_a_head_with_projections_is_three_crosses_around_the_scores() -> None:
    (stations,) = of(regard.explain(load_problem("she-likes-coffee"))).wide
    assert {one.name: (one.column, one.row) for one in stations} == {
        "embeddings": (0, 0),
        "W_q": (1, -1),
        "queries": (1, 0),
        "W_k": (2, -1),
        "embeddings>keys": (3, -2),
        "keys": (3, -1),
        "scores": (3, 0),
        "weights": (5, 0),
        "embeddings>values": (5, -1),
        "W_v": (6, -2),
        "values": (6, -1),
        "output": (6, 0),
    }
    assert {one.name for one in stations if one.turned} == {"W_k", "keys", "embeddings>keys"}


def test_every_step_is_in_the_picture_once(explanation: Explanation) -> None:
    for groups in (of(explanation).wide, of(explanation).narrow):
        stations = [one for group in groups for one in group if not one.copy]
        beside = {
            name
            for name, step in explanation.source.steps.items()
            if step.of in {one.step for one in stations}
        }
        found = [name for one in stations for name in (one.step, *one.inside)]
        assert sorted([*found, *beside]) == sorted(explanation.source.steps)
        assert all(not one.inside for group in groups for one in group if one.copy)


def test_no_two_tables_are_in_one_place(explanation: Explanation) -> None:
    for groups in (of(explanation).wide, of(explanation).narrow):
        for group in groups:
            places = [(one.column, one.row) for one in group]
            assert len({*places}) == len(places)
            assert min(column for column, _ in places) == 0


def test_the_row_of_a_number_is_left_of_it_and_its_column_above(explanation: Explanation) -> None:
    for groups in (of(explanation).wide, of(explanation).narrow):
        for group in groups:
            by_name = {one.name: one for one in group}
            for one in filter(lambda one: one.above, group):
                left, above = by_name[one.left], by_name[one.above]
                assert (left.row, above.column) == (one.row, one.column)
                assert (above.row, left.column < one.column) == (one.row - 1, True)


def test_what_is_left_times_what_is_above_is_the_number(explanation: Explanation) -> None:
    def shown(station: Station) -> Any:
        step, head = explanation.source.steps[station.step], 0
        value = np.asarray(explanation.steps[station.step].value)
        value = value[head] if {"H", "G"} & {*step.axes} else value
        if step.axes[-1] in of(explanation).slices:  # the part of the first head
            value = value[..., : explanation.source.sizes[station_width(step.axes[-1])]]
        value = np.atleast_2d(value)
        return value.T if station.turned else value

    def station_width(axis: str) -> str:
        return axis[1:]

    checked = 0
    for group in of(explanation).wide:
        by_name = {one.name: one for one in group}
        for one in filter(lambda one: one.above, group):
            step = explanation.source.steps[one.step]
            if step.op != "dot":
                continue
            expected = shown(by_name[one.left]) @ shown(by_name[one.above])
            np.testing.assert_allclose(shown(one), expected, atol=1e-12)
            checked += 1
    assert checked >= 1

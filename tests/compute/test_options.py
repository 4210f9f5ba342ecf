"""The record of options: the signature, native code, problems and other calls have what it has."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import regard
from calls import inputs
from places import ROOT
from regard.compute.options import BY_POSITION, DEFAULTS, Options
from regard.problems.schema import KEYS

CPP = ROOT / "src" / "regard" / "compute" / "kernels" / "cpp"
MOST_FUNCTIONS = 60  # of Python, that a call with a mask enters; 108 before there was a record


def test_the_record_has_the_options_of_attention_in_their_order_with_their_defaults():
    parameters = [*inspect.signature(regard.attention).parameters.values()]
    assert [one.name for one in parameters[:3]] == ["query", "key", "value"]
    assert {one.name: one.default for one in parameters[3:]} == DEFAULTS
    assert [one.name for one in parameters[3:]] == [*Options._fields]


def test_native_code_counts_the_arguments_as_the_record_does():
    text = (CPP / "fast_path.hpp").read_text("utf-8")
    listed = re.search(r"enum Argument \{(.*?)\}", text, re.DOTALL)
    assert listed is not None
    names = re.findall(r"\w+", listed[1].partition(", Count")[0])
    longer = {"Weights": "return_weights", "Lse": "return_lse", "KernelName": "kernel"}
    record = ("query", "key", "value", *Options._fields[:BY_POSITION])
    assert tuple(longer.get(name, name.lower()) for name in names) == record


def test_a_problem_states_the_options_by_which_attention_differs_and_its_file_has_a_key_for_each():
    how = {"precision", "return_weights", "return_lse", "out", "kernel", "threads"}
    stated = {*Options._fields} - how
    assert stated == {one.name for one in fields(regard.Problem)} & {*Options._fields}
    assert stated == {key.field for key in KEYS} & {*Options._fields}


@pytest.mark.parametrize(
    ("call", "without"),
    [
        (regard.weights, {"precision", "return_weights", "return_lse", "out", "normalize"}),
        (regard.gradients, {"return_weights", "return_lse", "out"}),
        (regard.KVCache.attend, {"offset", "positions"}),
    ],
    ids=["weights", "gradients", "attend"],
)
def test_another_call_takes_the_options_of_the_record_and_shows_them(
    call: Any, without: set[str]
) -> None:
    shown = inspect.signature(call).parameters
    assert {*DEFAULTS} - without == {*shown} & {*DEFAULTS}
    for name in {*DEFAULTS} - without - {"causal"}:
        assert shown[name].default == DEFAULTS[name]
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
    whole = inspect.getfullargspec(call)
    assert {*whole.args, *whole.kwonlyargs} == {*shown}


@pytest.mark.needs("fused")
@pytest.mark.parametrize("shapes", [((3, 4),) * 3, ((2, 4, 3, 8),) * 3], ids=["rows", "heads"])
def test_a_call_with_a_mask_enters_few_functions(shapes: Any) -> None:
    query, key, value = inputs(*shapes)
    mask = np.tri(3, dtype=np.bool_)
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] != "torch":  # where another test loaded it
            entered.append(frame.f_code.co_name)

    regard.attention(query, key, value, mask=mask)  # what is imported on request is there
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        regard.attention(query, key, value, mask=mask)
    finally:
        sys.setprofile(before)
    assert entered[0] == "attention"
    assert len(entered) <= MOST_FUNCTIONS, entered

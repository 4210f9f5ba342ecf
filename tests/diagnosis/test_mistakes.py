"""Every entry of the catalogue: the line of its example is found and named."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from consuming_lines import consuming_lines
from regard.diagnosis.call.adapter import Adapter, compiled, written
from regard.diagnosis.call.asking import asking, running
from regard.diagnosis.catalogue import described, families
from regard.diagnosis.given import Given, Sizes
from regard.diagnosis.judge import judge
from regard.diagnosis.mistakes import CLASSIC, OBSERVED, REPLACING, all_mistakes
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.mistakes.naming import name
from regard.diagnosis.mistakes.program import Program
from regard.diagnosis.mistakes.programs import PROGRAMS
from regard.diagnosis.mistakes.written import Unfit, variants_of
from regard.diagnosis.probe import Probe, evaluate
from regard.diagnosis.statements import Stated
from regard.diagnosis.survey import LARGE
from regard.diagnosis.task import Reading, Task
from regard.diagnosis.trace import depart
from regard.diagnosis.trace.rewrite import rewritten
from regard.diagnosis.trace.traced import is_right
from regard.diagnosis.view import TaskView, reads_of

# Texts, heads, key heads, queries, keys and widths.
SIZES = (
    (2, 4, 4, 5, 5, 6, 6),
    (1, 4, 4, 3, 7, 4, 4),
    (2, 4, 2, 4, 4, 4, 4),
    (1, 2, 2, 9, 9, 4, 2),
    (3, 4, 4, 4, 4, 2, 2),
)


def module_of(source: str) -> Any:
    code = rewritten(source, "example.py")
    return code, code.module("example")


def tasks_of(program: Program, function: Any) -> list[Task]:
    """Problems that ask all that the adapter of a program reads."""
    call, found = written(program.call, "numpy").call, []
    stated = Stated(**program.stated)
    for own in SIZES:
        if stated.width not in (None, own[5]):
            continue
        fields: frozenset[str] = frozenset()
        for _ in range(4):  # sizes depend on what is read
            given = Given("own", Sizes(*own, past=3), fields, mechanism=stated.mechanism)
            view = TaskView(given)
            try:
                with np.errstate(all="ignore"):
                    call(function, view)
            except Exception:  # wrong code may raise
                pass
            fields |= reads_of(view)
        asks = fields & {"mask", "key_mask", "window", "scale"}
        asks |= {"key_mask"} if "lengths" in fields else set()
        given = replace(given, fields=fields, asks=frozenset(asks), seed=3)
        if own[3] != own[4] and not given.has_own_keys:
            continue
        causal = program.stated["causal"]
        aligned = "start" if causal == "start" else "end"
        reading = Reading(bool(causal), aligned, **program.means)
        wanted = ("query", "key", "value") if "grad_output" in fields else ()
        found.append(Task(given, fields, reading, wanted))
    return found


def departure_of(mistake: Mistake) -> depart.Departure | None:
    """Where the example of an entry departs."""
    program = PROGRAMS[mistake.program]
    code, module = module_of(mistake.source)
    adapter = written(program.call, "numpy")
    runs = []
    for task in tasks_of(program, module.attention):
        run = running(module.attention, adapter, "numpy", task.given)
        try:
            with np.errstate(all="ignore"):
                result = run()
        except Exception:  # and does not for other sizes
            continue
        if all(result[one].shape == own.shape for one, own in task.expected.items()):
            runs.append((run, task, is_right(result, task)))
    run, task, _ = next(one for one in runs if not one[2])
    others = [(one[0], one[1]) for one in runs if one[1] is not task]
    return depart.trace(run, code, module, task, others)[1]


# Of the same program one is enough in the default tier.
FIRST = {one.program: one.name for one in reversed(REPLACING)}
PLAIN = {*CLASSIC, *FIRST.values()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_right_without_a_mistake(program):
    own = PROGRAMS[program]
    _, module = module_of(own.source())
    adapter = Adapter(compiled(written(own.call, "numpy").text))
    found = judge(asking(module.attention, adapter, "numpy"), adapter, Stated(**own.stated))
    assert found.verdict == "right" or found.why == f"wrong with {LARGE}"
    assert {name: getattr(found.reading, name) for name in own.means} == own.means


def near(source: str, lines: tuple[int, ...]) -> set[int]:
    """The lines that read what wrong ones make, through a call too, and what these call."""
    functions = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)]
    spans = {one.name: range(one.lineno, (one.end_lineno or 0) + 1) for one in functions}
    texts = dict(enumerate(source.splitlines(), 1))
    around = {name for name, span in spans.items() for line in lines if line in span}
    calls = {n for n, text in texts.items() for name in around if re.search(rf"\b{name}\(", text)}
    found = {*lines, *calls}
    read = found.union(*(consuming_lines(source, line) for line in found))
    called = {x for line in read for x in spans if re.search(rf"\b{x}\b", texts.get(line, ""))}
    return read | {line for name in called for line in spans[name]}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(one, id=one.name, marks=() if one.name in PLAIN else pytest.mark.full)
        for one in REPLACING
    ],
)
def test_an_example_is_found_on_its_line_and_named(mistake):
    found = departure_of(mistake)
    assert found is not None
    assert found.mistake == mistake.name
    assert found.line in near(mistake.source, mistake.lines) or mistake.name in ELSEWHERE


# Another change near by makes it right as well, or what is wrong is seen two lines on.
ELSEWHERE = {
    "W_o_lost",
    "queries_and_keys_swapped",
    "sink_not_shifted",
    "window_without_own_key",
    "blocks_not_rescaled",
    "block_correction_inverted",
    "blocks_merged_by_sum",
    "final_block_lost",
    "only_first_block",
}


def test_names_and_programs_are_there_once_and_the_classic_ones_come_first():
    every = [one.name for one in (*REPLACING, *OBSERVED)]
    assert len(every) == len(set(every)) == len(all_mistakes())
    assert {one.program for one in REPLACING} <= set(PROGRAMS)
    assert [one.name for one in next(iter(families().values()))] == list(CLASSIC)
    assert sorted(one.name for own in families().values() for one in own) == sorted(every)


@pytest.mark.parametrize("mistake", all_mistakes().values(), ids=lambda one: one.name)
def test_an_entry_says_everything_that_a_reader_needs(mistake):
    assert mistake.title
    assert mistake.title[0] not in ".,"
    assert len(mistake.why) > 20
    assert mistake.numpy
    assert mistake.torch
    if mistake.codes:
        assert mistake.lines
        assert mistake.source != PROGRAMS[mistake.program].source()
        compile(mistake.source, "example.py", "exec")


@pytest.mark.parametrize("mistake", REPLACING, ids=lambda one: one.name)
def test_an_entry_is_shown_in_numbers_where_its_step_departs(mistake):
    found = described(mistake.name).mistakes[0]
    assert found.example is not None
    (departing,) = (shown for shown in found.example.steps if shown.departs)
    assert departing.step == found.step
    assert departing.right != departing.wrong


def drawn(**more: Any) -> Probe:
    rng = np.random.default_rng(5)
    shapes = {"queries": (2, 3, 5, 4), "keys": (2, 3, 5, 4), "values": (2, 3, 5, 6)}
    return Probe("own", {key: rng.normal(size=own) for key, own in shapes.items()}, **more)


def named_by(probe: Probe, *codes: str, there: tuple[str, ...] = ()) -> str:
    """The name of what replaces steps by these lines together."""
    (whole,) = (variants_of("; ".join(codes))[:1],)
    values = evaluate(probe, whole[0])

    def gives(number: int, own: Any) -> bool:
        near = np.allclose(own["output"], values["output"], rtol=1e-6, atol=1e-9)
        return bool(near)

    found = name([probe], gives, {step: values[step] for step in there})
    return found.name if found else ""


def test_a_value_is_named_only_where_one_entry_explains_all_of_it():
    probe = drawn()
    assert named_by(probe, "scaled = scores / D", there=("scaled",)) == "scale_by_width"
    assert named_by(probe, "scaled = scores / 3.7") == ""
    assert named_by(probe, "scaled = scores / D", "output = T(weights) @ v") == ""


def test_an_entry_that_gives_the_value_is_named_before_one_that_gives_the_result_alone():
    probe = drawn()
    twice = "scaled = scores; weights = softmax(logits / D)"
    assert named_by(probe, twice) == "scale_by_width"
    assert named_by(probe, "weights = softmax(2.5 * logits)", there=("weights",)) == ""


def test_code_that_would_raise_explains_no_nan():
    (first, *_) = variants_of("scores = q @ k")  # 4 wide, 5 tokens
    with pytest.raises(Unfit):
        evaluate(drawn(), first)


def test_a_mistake_of_one_rule_leaves_the_other_rules():
    row, key = np.arange(5)[:, None], np.arange(5)
    causal = np.broadcast_to(key <= row, (2, 3, 5, 5))
    mask = np.broadcast_to((row + key) % 3 > 0, causal.shape)
    probe = drawn(rules={"causal": causal, "mask": mask})
    seen = [evaluate(probe, one)["visible"] for one in variants_of("causal = j <= i + 1")]
    np.testing.assert_array_equal(seen[0], mask & (key <= row + 1))
    hidden = variants_of("masked = raw * keep")
    found = [evaluate(probe, one)["masked"] for one in hidden]
    scaled = probe.right["scaled"]
    np.testing.assert_array_equal(found[0], scaled * (mask & causal))
    np.testing.assert_array_equal(found[1], np.where(causal, scaled * mask, -np.inf))

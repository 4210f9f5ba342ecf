"""The textbook: that its declarations hold together, for every combination of options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from regard.textbook.block import Layer, layer, model
from regard.textbook.gradients import backward
from regard.textbook.loss import continued
from regard.textbook.operations import OPERATIONS, compute
from regard.textbook.positions import GIVEN as POSITIONS
from regard.textbook.scalar_check import RECOMPUTE
from regard.textbook.steps import (
    INDEX_MAPS,
    LETTERS,
    Ref,
    Step,
    letters_of,
    merging,
    projecting,
    textbook,
)

READY = frozenset({"queries", "keys", "values"})
PROJECTED = frozenset({"embeddings", "W_q", "W_k", "W_v"})
OPTIONS = ("bias", "softcap", "sink")
# A query head more than there are key heads, and no two axes equally long that may be confused.
SIZES = {"H": 4, "G": 2, "R": 2, "L": 3, "S": 5, "D": 2, "E": 3, "M": 7, "N": 11, "F": 6}
SIZES |= {"K": SIZES["D"], "U": 13, "T": 17, "P": 1, "Q": 2, "W": 2}
SIZES |= {"I": 19, "V": 23, "X": 29}
PACKED = {"HD": ("H", "D"), "GD": ("G", "D"), "GE": ("G", "E"), "HE": ("H", "E")}

# Operations that run along one letter which their cell does not have.
REDUCING = {
    *("dot", "row_dot", "sum", "max", "length", "threshold", "first_at"),
    *("tanh_dot", "tanh_sum", "tanh_slope_sum", "squared_distance", "pull", "pick"),
}
OPERAND_COUNTS = {
    "given": {0},
    "visible": {0},
    "dot": {2},
    "row_dot": {2},
    "multiply": {2},
    "softcap": {2},
    "softcap_slope": {2},
    "add": {1, 2, 3, 4, 5},  # lse of an unshifted softmax adds nothing to the logarithm
    "select": {2},
    "keep": {2},
    "max": {1, 2},  # the sink joins
    "at_maximum": {3},
    "subtract": {2},
    "exp": {1},
    "sum": {1, 2},
    "divide": {2},
    "log": {1},
    "negate": {1},
    "softmax_gradient": {3},
    "same": {1},
    "half_square": {2},
    "inverse_root": {1},
    "split": {1},
    "merge": {1},
    "tanh_dot": {3},
    "tanh_sum": {3},
    "tanh_slope_sum": {4},
    "squared_distance": {2},
    "pull": {3},
    "length": {1},
    "sigmoid": {1},
    "sigmoid_slope": {1},
    "elu_plus_one": {1},
    "elu_slope": {1},
    "first_at": {3},
    "one_hot": {3},
    "one_hot_straight": {3},
    "zero": {1},
    "threshold": {1},
    "above": {2},
    "positive": {1},
    "cos": {1},
    "sin": {1},
    "rotate": {4},
    "rotate_back": {4},
    "angle": {2},
    "apart": {2},
    "pick": {3},
    "norm_factor": {2},
    "gelu": {1},
    "gelu_slope": {1},
    "gelu_tanh": {1},
    "gelu_tanh_slope": {1},
    "silu": {1},
    "silu_slope": {1},
    "relu": {1},
}


def subsets(names: Collection[str]) -> Iterator[frozenset[str]]:
    names = sorted(names)
    for count in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, count))


def origins() -> Iterator[tuple[frozenset[str], dict[str, bool]]]:
    """Where the numbers start, and which axes there are."""
    for heads, rows in itertools.product((True, False), repeat=2):
        yield READY, {"heads": heads, "rows": rows}
    for heads, context, biases, output in itertools.product(
        (True, False), ((), ("context",)), subsets({"b_q", "b_k", "b_v"}), ("", "W_o", "W_o b_o")
    ):
        yield PROJECTED | {*context, *biases, *output.split()}, {"heads": heads}


def combinations() -> Iterator[tuple[frozenset[str], dict[str, Any]]]:
    """Every call that the textbook can describe: what is given, and the other arguments."""
    for (given, axes), options, masked, softmax, default_scale in itertools.product(
        list(origins()), subsets(OPTIONS), (True, False), ("shifted", "unshifted"), (True, False)
    ):
        call = {"masked": masked, "softmax": softmax, "default_scale": default_scale, **axes}
        yield given | options, call


@cache
def books() -> list[tuple[str, tuple[Step, ...]]]:
    """Every textbook there is, with a name for messages."""
    whole = [(f"{sorted(given)} {call}", textbook(given, **call)) for given, call in combinations()]
    parts = []
    for given, axes in origins():
        if "embeddings" in given:
            parts.append((f"projecting {sorted(given)}", projecting(given, heads=axes["heads"])))
            united = given & {"embeddings", "W_o", "b_o"}
            parts.append((f"merging {sorted(united)}", merging(united)))
    more = (*backward_books(), *positioned_books(), *model_books())
    return whole + parts + list(more)


def model_books() -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Layers of every form, and models of two of them, with their backward passes."""
    weights = {f"W_{name}" for name in "qkvo"} | {"W_up", "W_down"}
    biases = {f"b_{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    norms = ("attention_input", "mlp_input", "after_attention", "hidden", "normed_queries")
    norms += ("attention_result", "mlp_result", "normed_keys", "final", "normed_embeddings")
    scales, shifts = ({f"{name}_{part}" for name in norms} for part in ("scale", "shift"))
    rotary = POSITIONS["rotary"] | {"softcap"}
    for norm, place, given in itertools.product(
        ("rms", "layer"),
        ("before", "after", "both"),
        (set(), {"W_gate"} | biases | scales, scales | shifts | rotary),
    ):
        for activation in ("gelu", "gelu_tanh", "silu", "relu"):
            form = Layer(frozenset(weights | given), norm, place, activation)
            yield f"layer {form}", layer(form)
            own = frozenset({"final_scale", "positions_vectors", "logits_softcap"})
            forward = model((form, form), own, form, embedded=place == "after")
            wrt = {"embeddings", "0.W_up", "1.W_q"}
            back = backward(forward, wrt, {"logits"}, compact=False)
            yield f"model {form}", forward + back


def backward_books() -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Textbooks with their backward passes, with respect to all that is given."""
    for (given, axes), masked, compact in itertools.product(
        list(origins()), (True, False), (True, False)
    ):
        forward = textbook(given | {*OPTIONS}, masked=masked, default_scale=False, **axes)
        there = names_of(forward)
        last = next(x for x in ("projected_output", "merged", "output") if x in there)
        wrt = {step.name for step in forward if step.op == "given"} - {"softcap"}
        arrives = {last, "lse"} if masked else {last}
        steps = backward(forward, wrt, arrives, compact=compact)
        yield f"backward of {sorted(given)} {axes} {masked=} {compact=}", forward + steps


def positioned_books() -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Textbooks with positions, and their backward passes."""
    for (kind, own), heads, rows in itertools.product(
        POSITIONS.items(), (True, False), (True, False)
    ):
        forward = textbook(READY | own, masked=rows, heads=heads, rows=rows)
        yield f"{kind} {heads=} {rows=}", (*forward, *continued(forward))


class Declared(NamedTuple):
    """A step among the steps that it refers to: many textbooks have the same one."""

    step: Step
    operands: tuple[Step, ...]
    self_attention: bool  # the keys are the queries' rows

    @property
    def sizes(self) -> dict[str, int]:
        sizes = SIZES | {packed: SIZES[a] * SIZES[b] for packed, (a, b) in PACKED.items()}
        return sizes | ({"S": sizes["L"]} if self.self_attention else {})


@cache
def declarations() -> list[Declared]:
    """Every step of every textbook, each once."""
    found: dict[Declared, None] = {}
    for _, steps in books():
        by_name = {step.name: step for step in steps}
        self_attention = "embeddings" in by_name and "context" not in by_name
        for step in steps:
            operands = tuple(by_name[ref.step] for ref in step.operands)
            found[Declared(step, operands, self_attention)] = None
    return list(found)


def cells(step: Step, sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    for index in np.ndindex(*(sizes[axis] for axis in step.axes)):
        yield dict(zip(step.index, index, strict=True))


def resolved(ref: Ref, at: dict[str, int], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(
        INDEX_MAPS[entry](at, sizes) if entry in INDEX_MAPS else at[entry] for entry in ref.index
    )


def names_of(steps: tuple[Step, ...]) -> list[str]:
    return [step.name for step in steps]


# every combination --------------------------------------------------------------------------------


def test_there_are_as_many_combinations_as_there_are_choices():
    assert len(list(combinations())) == (4 + 2 * 2 * 8 * 3) * 8 * 2 * 2 * 2


def test_names_and_symbols_are_unique_in_every_combination():
    for what, steps in books():
        assert len({step.name for step in steps}) == len(steps), what
        assert len({step.symbol for step in steps}) == len(steps), what


def test_every_operand_is_an_earlier_step_with_an_index_for_each_of_its_axes():
    for what, steps in books():
        axes: dict[str, int] = {}
        for step in steps:
            for ref in step.operands:
                assert axes.get(ref.step) == len(ref.index), (what, step, ref)
            axes[step.name] = len(step.axes)


def test_operations_are_in_the_closed_set_and_have_as_many_operands_as_they_take():
    assert OPERATIONS.keys() == OPERAND_COUNTS.keys()
    for step, *_ in declarations():
        assert len(step.operands) in OPERAND_COUNTS[step.op], step


def test_every_index_entry_is_a_letter_or_a_declared_map():
    used = {entry for one in declarations() for ref in one.step.operands for entry in ref.index}
    assert used <= {*LETTERS.values(), *INDEX_MAPS}
    assert used >= set(INDEX_MAPS)  # a map that nothing uses is no declaration


def test_the_letters_of_one_cell_are_distinct():
    for step, *_ in declarations():
        assert len(set(step.index)) == len(step.axes), step


def test_only_dots_sums_and_maxima_run_along_a_letter_and_along_one_only():
    for step, *_ in declarations():
        entries = {entry for ref in step.operands for entry in ref.index}
        running = {x for entry in entries for x in letters_of(entry)} - set(step.index)
        assert len(running) == (1 if step.op in REDUCING else 0), step
        if step.op in ("dot", "row_dot"):  # both factors of every product move together
            assert all(running <= set(ref.index) for ref in step.operands), step


def test_every_operand_of_every_cell_lies_inside_its_step():
    for one in declarations():
        sizes = one.sizes
        last = {  # where a running letter ends
            entry: sizes[axis] - 1
            for ref, operand in zip(one.step.operands, one.operands, strict=True)
            for axis, entry in zip(operand.axes, ref.index, strict=True)
            if entry not in INDEX_MAPS and entry not in one.step.index
        }
        last["r"] = sizes["R"] - 1
        for at in cells(one.step, sizes):
            for ref, operand in zip(one.step.operands, one.operands, strict=True):
                where = resolved(ref, at | last, sizes)
                limits = [sizes[axis] for axis in operand.axes]
                inside = all(0 <= n < limit for n, limit in zip(where, limits, strict=True))
                assert inside, (one, at, where, limits)


def test_a_letter_runs_along_equally_long_axes_wherever_it_stands():
    for one in declarations():
        lengths: dict[str, set[int]] = {}
        places = list(zip(one.step.axes, one.step.index, strict=True))
        for ref, operand in zip(one.step.operands, one.operands, strict=True):
            places += zip(operand.axes, ref.index, strict=True)
        for axis, entry in places:
            if entry not in INDEX_MAPS:
                lengths.setdefault(entry, set()).add(one.sizes[axis])
        assert all(len(found) == 1 for found in lengths.values()), (one, lengths)


def test_splitting_and_merging_heads_use_every_number_once():
    moving = [one for one in declarations() if one.step.op in ("split", "merge")]
    forward = {"queries", "keys", "values", "merged"}
    back = {"d_projected_queries", "d_projected_keys", "d_projected_values", "d_output"}
    assert {re.sub(r"\d\.", "", one.step.name) for one in moving} == forward | back  # of all layers
    for one in moving:
        (ref,), (operand,) = one.step.operands, one.operands
        used = [resolved(ref, at, one.sizes) for at in cells(one.step, one.sizes)]
        limits = [one.sizes[axis] for axis in operand.axes]
        assert sorted(used) == list(np.ndindex(*limits)), one


def test_heads_lie_side_by_side_each_in_one_run_of_columns():
    at, sizes = {"h": 1, "g": 1, "d": 1, "e": 2}, {"D": 2, "E": 3}
    assert [INDEX_MAPS[name](at, sizes) for name in ("h*D+d", "g*D+d", "g*E+e")] == [3, 3, 5]
    merged = [
        (INDEX_MAPS["c//E"]({"c": c}, sizes), INDEX_MAPS["c%E"]({"c": c}, sizes)) for c in range(6)
    ]
    assert merged == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_query_head_reads_the_key_head_of_its_group():
    read = [INDEX_MAPS["h//(H//G)"]({"h": head}, {"H": 6, "G": 2}) for head in range(6)]
    assert read == [0, 0, 0, 1, 1, 1]


def test_formulas_and_latex_say_something_and_begin_with_their_symbol():
    for step, *_ in declarations():
        assert step.formula.startswith(step.symbol), step
        assert len(step.formula) > len(step.symbol), step
        assert step.latex.strip(), step
        assert step.latex.startswith(step.latex_symbol), step
        assert "=" not in step.latex_symbol, step


def test_a_formula_speaks_of_every_operand():
    # 1/√D is written out where it is the scale, and who may see whom is said in words.
    in_words = {"scale", "visible"}
    for step, operands, _ in declarations():
        right = step.formula.removeprefix(step.symbol)
        right_latex = step.latex.removeprefix(step.latex_symbol)
        for operand in operands:
            if operand.name not in in_words:
                assert operand.symbol in right, (step, operand)
                assert operand.latex_symbol in right_latex, (step, operand)


def test_latex_is_plain_text_with_balanced_braces():
    for step, *_ in declarations():
        assert step.latex.isascii(), step
        depth = 0
        for character in re.sub(r"\\[{}]", "", step.latex):
            depth += {"{": 1, "}": -1}.get(character, 0)
            assert depth >= 0, step
        assert depth == 0, step


def test_what_is_declared_over_visible_keys_follows_the_rules_that_hide_them():
    for what, steps in books():
        names = names_of(steps)
        visible = {step.name for step in steps if step.over == "visible"}
        if "visible" not in names:
            assert not visible, what
            continue
        # A hidden key must not enter these, whatever stands in it.
        must = {"row_maximum", "shifted", "row_sums", "weights", "output"} & set(names)
        assert must <= visible, what
        assert not visible & {"scores", "scaled", "capped", "biased", "lse", "log_sums"}, what


# which steps a call has ---------------------------------------------------------------------------

EVERYTHING = (
    "embeddings",
    "W_q",
    "b_q",
    "query_products",
    "projected_queries",
    "queries",
    "W_k",
    "b_k",
    "key_products",
    "projected_keys",
    "keys",
    "W_v",
    "b_v",
    "value_products",
    "projected_values",
    "values",
    "scores",
    "width",
    "scale",
    "scaled",
    "softcap",
    "capped",
    "bias",
    "biased",
    "visible",
    "masked",
    "sink",
    "row_maximum",
    "shifted",
    "sink_shifted",
    "exponentials",
    "sink_exponential",
    "row_sums",
    "weights",
    "output",
    "merged",
    "W_o",
    "output_products",
    "b_o",
    "projected_output",
    "log_sums",
    "lse",
)
EVERY_BIAS = frozenset({"b_q", "b_k", "b_v", "b_o"})
EVERY_OPTION = frozenset(OPTIONS)


def test_a_call_with_every_option_has_every_step_in_order():
    given = PROJECTED | EVERY_BIAS | EVERY_OPTION | {"W_o"}
    assert tuple(names_of(textbook(given, masked=True))) == EVERYTHING
    with_context = names_of(textbook(given | {"context"}, masked=True))
    assert with_context == ["embeddings", "context", *EVERYTHING[1:]]


def test_the_plainest_call_has_only_the_steps_of_attention():
    assert names_of(textbook(READY)) == [
        *("queries", "keys", "values", "scores", "width", "scale", "scaled", "row_maximum"),
        *("shifted", "exponentials", "row_sums", "weights", "output", "log_sums", "lse"),
    ]


@pytest.mark.parametrize(
    ("without", "absent"),
    [
        ({"bias"}, {"bias", "biased"}),
        ({"softcap"}, {"softcap", "capped"}),
        ({"sink"}, {"sink", "sink_shifted", "sink_exponential"}),
        ({"b_q"}, {"b_q", "query_products"}),
        ({"b_k"}, {"b_k", "key_products"}),
        ({"b_v"}, {"b_v", "value_products"}),
        ({"b_o"}, {"b_o", "output_products"}),
        ({"W_o", "b_o"}, {"W_o", "b_o", "output_products", "projected_output"}),
        ({"context"}, {"context"}),
    ],
)
def test_an_option_that_is_absent_takes_its_own_steps_along_and_no_other(without, absent):
    given = PROJECTED | EVERY_BIAS | EVERY_OPTION | {"W_o", "context"}
    whole = names_of(textbook(given, masked=True))
    rest = names_of(textbook(given - without, masked=True))
    assert rest == [name for name in whole if name not in absent]


def test_nothing_is_masked_where_nothing_hides_a_key():
    given = READY | EVERY_OPTION
    masked = names_of(textbook(given, masked=True))
    assert [n for n in masked if n not in ("visible", "masked")] == names_of(textbook(given))


def test_an_unshifted_softmax_has_no_maximum_and_subtracts_nothing():
    shifted = names_of(textbook(READY | {"sink"}))
    unshifted = textbook(READY | {"sink"}, softmax="unshifted")
    assert names_of(unshifted) == [
        n for n in shifted if n not in ("row_maximum", "shifted", "sink_shifted")
    ]
    formulas = {step.name: step.formula for step in unshifted}
    assert formulas["exponentials"] == "Y = exp(A_s)"
    assert formulas["sink_exponential"] == "y = exp(s)"
    assert formulas["lse"] == "lse = ln z"


def test_without_heads_nothing_is_packed_split_or_merged():
    steps = textbook(PROJECTED | EVERY_BIAS | {"W_o"}, heads=False)
    assert not {"split", "merge"} & {step.op for step in steps}
    assert not {name for name in names_of(steps) if name.startswith("projected_")} - {
        "projected_output"
    }
    assert not {"H", "G", *PACKED} & {axis for step in steps for axis in step.axes}


def test_a_single_query_has_no_query_axis_and_its_weights_run_along_the_keys():
    steps = {step.name: step for step in textbook(READY, heads=False, rows=False)}
    assert not [step for step in steps.values() if "L" in step.axes]
    assert steps["queries"].axes == ("D",)
    assert steps["weights"].axes == ("S",)
    assert steps["row_sums"].axes == ()
    assert steps["output"].axes == ("E",)


def test_axes_are_those_that_the_shape_alphabet_says():
    given = PROJECTED | EVERY_BIAS | EVERY_OPTION | {"W_o", "context"}
    axes = {step.name: step.axes for step in textbook(given, masked=True)}
    assert axes["embeddings"] == ("L", "M")
    assert axes["context"] == ("S", "N")
    assert axes["W_k"] == ("N", "GD")
    assert axes["queries"] == ("H", "L", "D")
    assert axes["keys"] == ("G", "S", "D")
    assert axes["values"] == ("G", "S", "E")
    for name in ("scores", "scaled", "capped", "biased", "visible", "masked", "shifted", "weights"):
        assert axes[name] == ("H", "L", "S")
    for name in ("row_maximum", "row_sums", "log_sums", "lse", "sink_exponential"):
        assert axes[name] == ("H", "L")
    assert axes["output"] == ("H", "L", "E")
    assert axes["merged"] == ("L", "HE")
    assert axes["projected_output"] == ("L", "F")


def test_the_scale_is_said_as_one_over_the_root_of_the_width_only_where_it_is():
    for default in (True, False):
        steps = {s.name: s for s in textbook(READY, default_scale=default)}
        assert ("√D" in steps["scale"].formula) is default
        assert ("√D" in steps["scaled"].formula) is default
        assert (r"\sqrt{D}" in steps["scaled"].latex) is default
        assert ("width" in steps) is default
        assert (steps["scale"].op == "given") is not default


def test_the_parts_of_the_textbook_are_declared_as_in_the_whole():
    for given, axes in origins():
        if "embeddings" not in given:
            continue
        whole = textbook(given, **axes)
        part = projecting(given, **axes)
        assert part == whole[: len(part)]
        assert part[-1].name == "values"
    given = PROJECTED | {"W_o", "b_o"}
    whole = {step.name: step for step in textbook(given)}
    output, *rest = merging(given)
    assert (output.name, output.op) == ("output", "given")
    assert [whole[step.name] for step in rest] == rest
    assert rest[-1].name == "projected_output"


# the NumPy of the operations ----------------------------------------------------------------------

FLOAT = np.dtype(np.float64)


def test_an_operation_that_is_not_declared_is_not_computed():
    for op in ("given", "visible"):  # their numbers come from outside
        with pytest.raises(NotImplementedError, match=op):
            compute(op, ("j",), [], None, FLOAT)
    one, two = ((np.array([number]), ("j",)) for number in (3.0, 1.0))
    np.testing.assert_array_equal(compute("subtract", ("j",), [one, two], None, FLOAT), [2.0])


def test_zero_over_zero_is_zero():
    cell, row = (np.array([[0.0, 0.0]]), ("i", "j")), (np.array([0.0]), ("i",))
    result = compute("divide", ("i", "j"), [cell, row], None, FLOAT)
    np.testing.assert_array_equal(result, [[0.0, 0.0]])


def test_a_dot_over_visible_keys_never_meets_what_stands_in_a_hidden_one():
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]])
    values = np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, -np.inf]])
    visible = np.array([[True, False, False], [True, False, True]])
    operands = [(weights, ("i", "j")), (values, ("j", "e"))]
    result = compute("dot", ("i", "e"), operands, visible, FLOAT)
    np.testing.assert_array_equal(result, [[1.0, 2.0], [2.0, -np.inf]])


def test_infinite_values_take_the_sign_of_what_they_are_multiplied_with():
    weights = np.array([[-2.0, 1.0], [2.0, 0.0], [0.0, -1.0], [1.0, 1.0]])
    values = np.array([[np.inf, -np.inf], [1.0, np.inf]])
    visible = np.array([[True, False], [True, False], [True, True], [True, True]])
    operands = [(weights, ("i", "j")), (values, ("j", "e"))]
    result = compute("dot", ("i", "e"), operands, visible, FLOAT)
    nan = np.nan
    np.testing.assert_array_equal(
        result, [[-np.inf, np.inf], [np.inf, -np.inf], [nan, nan], [np.inf, nan]]
    )


def test_a_dot_has_no_negative_zero():
    operands = [(np.array([[0.0]]), ("i", "j")), (np.array([[-1.0]]), ("j", "e"))]
    result = compute("dot", ("i", "e"), operands, np.array([[False]]), FLOAT)
    assert result.tobytes() == np.zeros((1, 1)).tobytes()


def test_a_row_that_sees_nothing_has_the_maximum_minus_infinity():
    empty = (np.full((2, 0), 1.0), ("i", "j"))
    result = compute("max", ("i",), [empty], None, FLOAT)
    np.testing.assert_array_equal(result, [-np.inf, -np.inf])


def test_every_operation_has_its_value_in_numpy_a_scalar_check_and_its_words():
    computed = {name for name, operation in OPERATIONS.items() if operation.value}
    assert OPERATIONS.keys() - computed == {"given", "visible"}
    assert computed == RECOMPUTE.keys()
    for name in computed:
        operation = OPERATIONS[name]
        assert operation.formula, name
        assert operation.latex, name
        assert operation.numpy, name
        assert operation.latex_numbers, name
        assert operation.total or (operation.names and operation.numbers), name

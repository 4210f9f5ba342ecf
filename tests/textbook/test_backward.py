"""The backward steps: against slopes in 60 digits, and against the softmax step by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import mpmath
import numpy as np
import pytest

from exact_slopes import slopes_of
from regard.compute import evaluation
from regard.compute.evaluation import Run
from regard.explanation.derive import derive
from regard.explanation.labels import Labels
from regard.rules.visibility import Boolean
from regard.textbook.gradients import backward
from regard.textbook.operations import OPERATIONS
from regard.textbook.steps import Step, textbook

FLOAT = np.dtype(np.float64)
READY = {"queries": "H L D", "keys": "G S D", "values": "G S E"}
OPTIONS = {"bias": "H L S", "sink": "H", "softcap": "", "scale": ""}
PROJECTED = {
    **{"embeddings": "L M", "W_q": "M HD", "W_k": "N GD", "W_v": "N GE", "W_o": "HE F"},
    **{"b_q": "HD", "b_k": "GD", "b_v": "GE", "b_o": "F"},
}
SIZES = {"L": 2, "S": 3, "D": 2, "E": 3, "M": 2, "F": 2, "N": 2}
# Row 1 sees no key, and key 0 is hidden from all.
SEES = np.array([[False, True, True], [False, False, False]])


def numbers(axes: Mapping[str, str], sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    packed = {a + b: sizes.get(a, 1) * sizes[b] for a, b in ("HD", "GD", "GE", "HE")}
    whole = {**sizes, **packed}
    found = {
        name: rng.normal(size=[whole[axis] for axis in own.split() if axis in whole])
        for name, own in axes.items()
    }
    return {name: abs(one) + 0.3 if name == "softcap" else one for name, one in found.items()}


def run_of(inputs: Mapping[str, Any], heads: int, groups: int, *, masked: bool, **how: Any) -> Run:
    """Forward and backward steps over given arrays, with respect to all of them."""
    rows = inputs["embeddings" if "embeddings" in inputs else "queries"].ndim > 1
    softmax = how.pop("softmax", "shifted")
    forward = textbook(
        inputs, heads=heads > 0, rows=rows, masked=masked, default_scale=False, softmax=softmax
    )
    there = {step.name for step in forward}
    last = next(name for name in ("projected_output", "merged", "output") if name in there)
    given = {last, "lse"} if how.pop("lse", True) else {last}
    wrt = how.pop("wrt", {step.name for step in forward if step.op == "given"} - {"softcap"})
    counts = {"H": heads, "G": groups} if heads else {}
    sees = SEES if rows else SEES[0]
    rules = Boolean(sees) if masked else None
    run = Run(forward, inputs, counts, dtype=FLOAT, rules=rules)
    rng = np.random.default_rng(9)
    arrives = {f"d_{name}": rng.normal(size=run.shape(name)) for name in given}
    return run.continued(backward(forward, wrt, given, **how), arrives)


# every number, by numerical slopes in 60 digits ---------------------------------------------------


CALLS = {
    "heads that share keys": (READY, 4, 2),
    "heads": (READY, 2, 2),
    "no heads": ({name: axes[2:] for name, axes in READY.items()}, 0, 0),
    "one query": ({"queries": "D", "keys": "S D", "values": "S E"}, 0, 0),
}


@pytest.mark.parametrize("options", [{"scale"}, set(OPTIONS)], ids=["plain", "every option"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", CALLS)
def test_every_gradient_is_the_slope_of_the_loss_in_60_digits(kind, masked, options):
    axes, heads, groups = CALLS[kind]
    own = {name: OPTIONS[name] for name in sorted(options)}
    if not heads:
        own = {name: " ".join(x for x in axis.split() if x != "H") for name, axis in own.items()}
    sizes = {**SIZES, **({"H": heads, "G": groups} if heads else {})}
    if kind == "one query":
        sizes.pop("L")
    run = run_of(numbers({**axes, **own}, sizes), heads, groups, masked=masked)
    check_slopes(run, [name for name in run.inputs if f"d_{name}" in run.steps])


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (0, 0)])
def test_gradients_of_projections_are_the_slopes_of_the_loss_in_60_digits(heads, groups, context):
    axes = {**PROJECTED, **({"context": "S N"} if context else {}), "scale": ""}
    sizes = {**SIZES, **({"H": heads, "G": groups} if heads else {})}
    run = run_of(numbers(axes, sizes), heads, groups, masked=context)
    check_slopes(run, [*axes])


def check_slopes(run: Run, names: list[str]) -> None:
    for name, expected in slopes_of(run, names).items():
        np.testing.assert_allclose(run.value(f"d_{name}"), expected, 1e-13, 1e-14, err_msg=name)


# the compact softmax ------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", ["shifted", "unshifted"])
@pytest.mark.parametrize(("masked", "lse"), [*itertools.product([True, False], repeat=2)])
def test_the_softmax_in_one_step_is_the_chain_of_its_operations(masked, lse, softmax):
    inputs = numbers({**READY, **OPTIONS}, {**SIZES, "H": 4, "G": 2}, seed=3)
    inputs["bias"][0, 0, 1] = inputs["bias"][0, 0, 2]
    compact, chain = (
        run_of(inputs, 4, 2, masked=masked, lse=lse, softmax=softmax, compact=form)
        for form in (True, False)
    )
    assert "delta" in compact.steps
    assert "d_row_sums" in chain.steps
    for name in inputs:
        if name != "softcap":
            one, other = (run.value(f"d_{name}") for run in (compact, chain))
            np.testing.assert_allclose(one, other, 1e-12, 1e-14, err_msg=name)


# second gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"scale"}, set(OPTIONS)], ids=["plain", "every option"])
@pytest.mark.parametrize("masked", [True, False])
def test_the_backward_pass_of_the_backward_pass_has_the_slopes_of_gradients(masked, options):
    axes = {**READY, **{name: OPTIONS[name] for name in sorted(options)}}
    first = run_of(numbers(axes, {**SIZES, "H": 4, "G": 2}), 4, 2, masked=masked)
    inputs = {name: array for name, array in first.inputs.items() if name != "softcap"}
    asked = [f"d_{name}" for name in axes if name != "softcap"]
    rng = np.random.default_rng(5)
    arrives = {f"dd_{name}": rng.normal(size=first.shape(name)) for name in asked}
    steps = tuple(first.steps.values())
    second = backward(steps, inputs, asked, compact=False, sign="dd")
    run = first.continued(second, arrives)
    assert len({step.name for step in run.steps.values()}) == len(steps) + len(second)

    def loss(name, moved):
        again = first.continued((), {name: moved})
        return sum((again.value(one) * arrives[f"dd_{one}"]).sum() for one in asked)

    for name, array in inputs.items():
        way = rng.normal(size=array.shape)
        slope = (loss(name, array + 1e-5 * way) - loss(name, array - 1e-5 * way)) / 2e-5
        rise = (run.value(f"dd_{name}") * way).sum()
        np.testing.assert_allclose(rise, slope, 1e-7, 1e-8, err_msg=name)


def test_every_operation_hands_its_gradient_on():
    settings = {name for name, one in OPERATIONS.items() if not any(one.adjoint)}
    # Those of a second gradient, which only a dot product and a softmax have, and of a sparsemax.
    ends = {
        "tanh_sum",
        "tanh_slope_sum",
        "pull",
        "elu_slope",
        "gelu_slope",
        "gelu_tanh_slope",
        "silu_slope",
        "positive",
        "threshold",
        "above",
    }
    ends |= {"given", "visible", "inverse_root", "at_maximum", "first_at", "apart", "angle"}
    assert settings == ends
    for operation in OPERATIONS.values():
        for template in filter(None, operation.adjoint):
            for op, *operands in map(str.split, template.split(", ")):
                assert op in OPERATIONS
                assert {*operands} <= {"d", "y", "_", "0", "1", "2"}


# what a cell is made of ---------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_every_cell_of_the_backward_pass_follows_from_its_operands(masked, compact):
    axes = {**PROJECTED, "bias": "H L S", "sink": "H", "softcap": "", "scale": ""}
    sizes = {**SIZES, "S": 2 if not masked else 3, "H": 2, "G": 1}
    if masked:
        axes["context"] = "S N"
    run = run_of(numbers(axes, sizes), 2, 1, masked=masked, compact=compact)
    labels = Labels({}, run.sizes)
    for step in run.steps.values():
        if step.name.startswith("d_") or step.name in ("delta", "capped_slope", "sink_weights"):
            for index in np.ndindex(*run.shape(step.name)):
                cell = derive(run, labels, step.name, (), index)
                np.testing.assert_allclose(cell.recompute(), cell.value, 1e-12, 1e-15)
                line = eval(cell.numpy(), {"np": np})
                np.testing.assert_allclose(line, cell.value, 1e-12, 1e-15)
                assert cell.text()
                assert cell.latex()


# what is hidden -----------------------------------------------------------------------------------


def twice(run: Run, names: list[str]) -> Run:
    """A run with its second gradients too, from those of some first ones."""
    asked = [f"d_{name}" for name in names]
    rng = np.random.default_rng(5)
    arrives = {f"dd_{name}": rng.normal(size=run.shape(name)) for name in asked}
    steps = tuple(run.steps.values())
    return run.continued(backward(steps, names, asked, compact=False, sign="dd"), arrives)


def test_a_hidden_key_has_second_gradients_of_zero_and_changes_no_byte():
    inputs = numbers({**READY, **OPTIONS}, {**SIZES, "H": 4, "G": 2})
    names = [name for name in inputs if name != "softcap"]
    clean = twice(run_of(inputs, 4, 2, masked=True), names)
    hostile = {name: array.copy() for name, array in inputs.items()}
    hostile["keys"][:, 0], hostile["values"][:, 0] = np.nan, -np.inf
    hostile["queries"][:, 1], hostile["bias"][:, :, 0] = np.inf, np.nan
    dirty = twice(run_of(hostile, 4, 2, masked=True), names)
    for name in names:
        one, other = (run.value(f"dd_{name}") for run in (clean, dirty))
        assert one.tobytes() == other.tobytes(), name
    np.testing.assert_array_equal(dirty.value("dd_keys")[:, 0], 0)


def test_a_hidden_key_has_a_gradient_of_zero_and_changes_no_byte_whatever_is_in_it():
    inputs = numbers({**READY, **OPTIONS}, {**SIZES, "H": 4, "G": 2})
    clean = run_of(inputs, 4, 2, masked=True)
    hostile = {name: array.copy() for name, array in inputs.items()}
    hostile["keys"][:, 0], hostile["values"][:, 0] = np.nan, -np.inf
    hostile["queries"][:, 1], hostile["bias"][:, :, 0] = np.inf, np.nan
    dirty = run_of(hostile, 4, 2, masked=True)
    for name in inputs:
        if name != "softcap":
            one, other = (run.value(f"d_{name}") for run in (clean, dirty))
            assert one.tobytes() == other.tobytes(), name
    for name, hidden in (("keys", np.s_[:, 0]), ("values", np.s_[:, 0]), ("queries", np.s_[:, 1])):
        np.testing.assert_array_equal(dirty.value(f"d_{name}")[hidden], 0)
    np.testing.assert_array_equal(dirty.value("d_bias")[:, ~SEES], 0)


def test_the_slope_of_a_softcap_is_exact_far_from_zero():
    inputs = numbers({**READY, **OPTIONS}, {**SIZES, "H": 1, "G": 1})
    inputs["softcap"] = np.asarray(1.0)
    inputs["queries"][...], inputs["keys"][...] = 1.0, 20.0
    inputs["scale"] = np.asarray(1.0)
    slope = run_of(inputs, 1, 1, masked=False).value("capped_slope")
    np.testing.assert_allclose(slope, float(mpmath.sech(40) ** 2), 1e-14)
    inputs["keys"][...] = 1e4  # tanh is 1
    np.testing.assert_array_equal(run_of(inputs, 1, 1, masked=False).value("capped_slope"), 0)


@pytest.mark.parametrize("cells", [1, 4])
def test_sums_over_rows_add_all_blocks_of_them(monkeypatch, cells):
    axes = {**PROJECTED, **OPTIONS}
    inputs = numbers(axes, {**SIZES, "L": 5, "S": 5, "H": 2, "G": 1})
    run = run_of(inputs, 2, 1, masked=False)
    whole = {name: run.value(f"d_{name}") for name in axes if name != "softcap"}
    monkeypatch.setattr(evaluation, "BLOCK_CELLS", cells)
    cut = run_of(inputs, 2, 1, masked=False)
    for name, expected in whole.items():
        np.testing.assert_allclose(cut.value(f"d_{name}"), expected, 1e-13, 1e-14, err_msg=name)


# which steps there are ----------------------------------------------------------------------------


def names_of(steps: tuple[Step, ...]) -> list[str]:
    return [step.name for step in steps]


def test_only_what_is_needed_is_declared():
    forward = textbook({*READY, "sink", "bias"}, heads=False, masked=True)
    assert names_of(backward(forward, {"values"})) == ["d_output", "d_values"]
    assert names_of(backward(forward, {"sink"})) == [
        *("d_output", "delta", "sink_weights", "d_sink_products", "d_sink")
    ]
    assert names_of(backward(forward, {"bias"})) == [
        *("d_output", "d_weights", "delta", "d_masked", "d_biased", "d_bias")
    ]
    assert backward(forward, set()) == ()


def test_the_backward_pass_reads_like_this():
    forward = textbook({*READY, *OPTIONS}, masked=True, default_scale=False)
    wrt = {*READY, "bias", "sink", "scale"}
    assert [step.formula for step in backward(forward, wrt, ("output", "lse"))] == [
        "dlse is given",
        "dO is given",
        "dV_h = Pᵀ·dO",
        "dP = dO·Vᵀ",
        "δ_O = Σ_e dO·O",
        "δ = δ_O − dlse",
        "p = y / z",
        "ds′ = Σ_i p·δ",
        "ds = −ds′",
        "dA_m = P·(dP − δ)",
        "dA_b = dA_m where visible, else 0",
        "dbias = dA_b",
        "dA_c = dA_b",
        "A_c′ = 1 − tanh²(A_s / c)",
        "dA_s = dA_c·A_c′",
        "dscale_hi = Σ_j dA_s·A",
        "dscale_h = Σ_i dscale_hi",
        "dscale = Σ_h dscale_h",
        "dA = dA_s·scale",
        "dK_h = dAᵀ·Q",
        "dV = Σ_h dV_h over the heads h that share it",
        "dK = Σ_h dK_h over the heads h that share it",
        "dQ = dA·K",
    ]


def test_heads_that_share_no_keys_need_no_sum_over_them():
    forward = textbook(READY)
    assert "d_keys_by_head" in names_of(backward(forward, {"keys"}))
    inputs = numbers({**READY, "scale": ""}, {**SIZES, "H": 2, "G": 2})
    one, other = (run_of(inputs, 2, 2, masked=False, grouped=form) for form in (True, False))
    assert "d_keys_by_head" not in other.steps
    for name in inputs:
        np.testing.assert_array_equal(one.value(f"d_{name}"), other.value(f"d_{name}"))


@pytest.mark.parametrize("name", ["softcap", "width", "lse", "anything"])
def test_what_has_no_gradient_is_named(name):
    forward = textbook({*READY, "softcap"})
    with pytest.raises(ValueError, match=f"^{name} has no gradient"):
        backward(forward, {name})

"""ONNX's own cases for Attention and RotaryEmbedding, run unchanged, and what they do not ask.

`python tests/interop/test_onnx.py` prints which kernel answered each case.
"""

from __future__ import annotations

import importlib
import unittest
import warnings
from collections import Counter
from functools import cache
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.compute import dispatch
from regard.errors import OptionError, ShapeError

pytestmark = pytest.mark.needs("onnx")

OPERATORS = {"Attention": 93, "RotaryEmbedding": 8}

# float64 through another order of operations: some tens of roundings of numbers near 1.
NEAR = 1e-13


@cache
def cases() -> dict:
    """ONNX's node cases of our operators by name; those expanded to other operators are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases warn while ONNX makes them
        node = importlib.import_module("onnx.backend.test.case.node")
        # A module's cases are made when it is imported; those of pooling take seconds.
        for module in ("attention", "rotaryembedding"):
            importlib.import_module(f"onnx.backend.test.case.node.{module}")
        with mock.patch.object(node, "import_recursive"):
            every = node.collect_testcases()
    return {
        case.name: case
        for case in every
        if {n.op_type for n in case.model.graph.node} <= {*OPERATORS}
    }


def interop():
    return importlib.import_module("regard.interop.onnx")


class Answers:
    """Which kernels answered since this was made; ONNX's own attention may not."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def __enter__(self) -> Answers:
        def choose(request):
            kernel = chosen(request)
            self.kernels.append(kernel.name)
            return kernel

        def forbidden(*_: object, **__: object) -> None:
            raise AssertionError("ONNX's own evaluator answered")

        chosen = dispatch.choose
        places = ("op_attention._compute_attention", "op_rotary_embedding.rotary_embedding")
        self.patches = [mock.patch.object(dispatch, "choose", choose)]
        self.patches += [mock.patch(f"onnx.reference.ops.{place}", forbidden) for place in places]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def run_case(case) -> list[str]:
    """Run one case as ONNX's runner does; the kernels that answered."""
    runner = importlib.import_module("onnx.backend.test.runner")
    onnx = importlib.import_module("onnx")

    def arrays(tensors):
        made = onnx.numpy_helper.to_array
        return [made(one) if isinstance(one, onnx.TensorProto) else one for one in tensors]

    with Answers() as answers:
        prepared = interop().Backend.prepare(case.model)
        for inputs, expected in case.data_sets:
            outputs = prepared.run(arrays(inputs))
            runner.Runner.assert_similar_outputs(arrays(expected), outputs, case.rtol, case.atol)
    return answers.kernels


def test_every_case_that_onnx_has_for_our_operators_passes():
    answered = {name: run_case(case) for name, case in cases().items()}
    operators = Counter(case.model.graph.node[0].op_type for case in cases().values())
    # ONNX may add cases; it may not lose those that there were.
    assert all(operators[operator] >= count for operator, count in OPERATORS.items()), operators
    best = next(kernel.name for kernel in dispatch.kernels() if "not built" not in kernel.status())
    for name, kernels in answered.items():
        attention = cases()[name].model.graph.node[0].op_type == "Attention"
        assert kernels == ([best] if attention else []), name
    print(f"\n{sum(operators.values())} cases of ONNX pass: {dict(operators)}")


def test_onnx_runs_its_cases_through_the_backend_by_itself():
    cases()
    backend_test = importlib.import_module("onnx.backend.test")
    with mock.patch("onnx.backend.test.loader.import_recursive"):  # makes the cases of all of ONNX
        runner = backend_test.BackendTest(interop().Backend, __name__)
    runner.include("^test_(attention|rotary_embedding)_?(?!.*expanded).*_cpu$")
    with Answers() as answers:
        result = unittest.TestResult()
        runner.test_suite.run(result)
    assert not result.errors + result.failures, (result.errors + result.failures)[0][1]
    ran = result.testsRun - len(result.skipped)
    assert ran == len(cases())
    assert len(answers.kernels) == OPERATORS["Attention"]


@st.composite
def calls(draw):
    """Arguments of one Attention node, in float64, of every kind that the operator takes."""
    batch, groups, times = (draw(st.integers(1, 3)) for _ in range(3))
    heads, queries, keys = groups * times, draw(st.integers(1, 5)), draw(st.integers(1, 6))
    width, value_width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = [(batch, heads, queries, width), (batch, groups, keys, width)]
    query, key, value = (
        rng.normal(size=shape) for shape in (*shapes, (batch, groups, keys, value_width))
    )
    call = {"Q": query, "K": key, "V": value}
    total = keys
    cache = draw(st.sampled_from(["none", "past", "lengths"]))
    if cache == "past":
        past = draw(st.integers(0, 4))
        total += past
        call["past_key"] = rng.normal(size=(batch, groups, past, width))
        call["past_value"] = rng.normal(size=(batch, groups, past, value_width))
    if cache == "lengths":
        call["nonpad_kv_seqlen"] = rng.integers(0, keys + 1, size=batch)
    if draw(st.booleans()):
        shape = [*draw(st.sampled_from([(), (queries,), (heads, queries), (batch, 1, queries)]))]
        longest = int(call["nonpad_kv_seqlen"].max()) if cache == "lengths" else 1
        shape.append(draw(st.integers(max(longest, 1), total)))
        mask = rng.random(shape) < 0.7
        kind = draw(st.sampled_from(["bool", "float", "int"]))
        numbers = np.where(mask, rng.normal(size=shape), -np.inf)
        call["attn_mask"] = {"bool": mask, "float": numbers, "int": mask.astype(np.int64)}[kind]
    call |= {
        "is_causal": draw(st.integers(0, 1)),
        "scale": draw(st.sampled_from([None, 0.3, 0.0])),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "left_window_size": draw(st.integers(-1, 3)),
        "right_window_size": draw(st.integers(-1, 3)),
        "softmax_precision": draw(st.sampled_from([None, 11])),
        "qk_matmul_output_mode": draw(st.integers(0, 3)),
    }
    if draw(st.booleans()):
        call |= {"q_num_heads": heads, "kv_num_heads": groups}
        for name in "QKV":
            array = call[name].swapaxes(1, 2)
            call[name] = np.ascontiguousarray(array).reshape(*array.shape[:2], -1)
    return call


@given(calls())
def test_any_call_means_what_it_means_to_onnx(call):
    reference = importlib.import_module("onnx.reference.ops.op_attention")
    theirs = dict(call)
    if "attn_mask" in call:  # its evaluator needs floats and an axis of queries where it is causal
        mask = np.atleast_2d(call["attn_mask"])
        queries = call["Q"].shape[-2]
        mask = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
        theirs["attn_mask"] = mask if mask.dtype == np.bool_ else mask.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = reference._compute_attention(**theirs)
        if call["qk_matmul_output_mode"] == 0:
            # The schema says "raw QK matmul result"; its evaluator returns the capped one.
            theirs["softcap"] = 0.0
            expected = (*expected[:3], reference._compute_attention(**theirs)[3])
    outputs = interop().attention(**call)
    for name, own, theirs in zip(outputs._fields, outputs, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=NEAR, atol=NEAR, err_msg=name)


@pytest.mark.parametrize("kind", [bool, float])
def test_a_mask_shorter_than_the_keys_hides_the_keys_that_it_does_not_reach(kind):
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 1, 5, 4))
    mask = np.ones((5, 3), bool) if kind is bool else np.zeros((5, 3))
    ours = interop().attention(query, key, value, mask).Y
    expected = interop().attention(query, key[:, :, :3], value[:, :, :3]).Y
    np.testing.assert_array_equal(ours, expected)


def test_a_mask_and_lengths_apply_together():
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 1, 5, 4))
    mask, lengths = np.array([[False, True, True, True, True]]), np.array([3, 4])
    ours = interop().attention(query, key, value, mask, nonpad_kv_seqlen=lengths).Y
    for number, length in enumerate(lengths):
        own = query[number, None], key[number, None, :, 1:length], value[number, None, :, 1:length]
        np.testing.assert_array_equal(ours[number], interop().attention(*own).Y[0])


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_each_mode_returns_another_step(mode):
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 2, 3, 4))
    bias = np.array([[0.5, -np.inf, 0.0]] * 3)
    call = {"attn_mask": bias, "softcap": 0.5, "scale": 0.7, "qk_matmul_output_mode": mode}
    scores = interop().attention(query, key, value, **call).qk_matmul_output
    scaled = 0.7 * query @ key.swapaxes(-1, -2)
    capped = 0.5 * np.tanh(scaled / 0.5)
    exponentials = np.exp(capped + bias)
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    expected = (scaled, capped, capped + bias, weights)[mode]
    np.testing.assert_allclose(scores, expected, rtol=NEAR, atol=NEAR)


def test_values_of_another_type_leave_the_output_in_that_of_the_queries():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 2, 3, 4))
    half = query.astype(np.float16), key.astype(np.float16), value.astype(np.float64)
    outputs = interop().attention(*half)
    assert outputs.Y.dtype == np.float16
    assert outputs.present_value.dtype == np.float64
    expected = interop().attention(*(array.astype(np.float64) for array in half)).Y
    np.testing.assert_allclose(outputs.Y.astype(np.float64), expected, rtol=2**-10, atol=2**-14)


def test_a_negative_scale_is_a_scale():
    query = np.random.default_rng(0).normal(size=(1, 1, 3, 4))
    ours = interop().attention(query, query, query, scale=-1.0).Y
    np.testing.assert_array_equal(ours, interop().attention(-query, query, query, scale=1.0).Y)


def test_double_precision_is_computed_in_double_precision():
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 1, 64, 16)).astype(np.float32)
    exact = interop().attention(*(a.astype(np.float64) for a in (query, key, value))).Y
    rounded_once = exact.astype(np.float32)
    double = interop().attention(query, key, value, softmax_precision=11).Y
    np.testing.assert_array_equal(double, rounded_once)
    assert not np.array_equal(interop().attention(query, key, value).Y, rounded_once)


X = np.ones((1, 2, 3, 4), np.float32)
PACKED = np.ones((1, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "words", "arguments", "options"),
    [
        (OptionError, "q_num_heads must give", (PACKED,) * 3, {"kv_num_heads": 2}),
        (ShapeError, "not a multiple of", (PACKED,) * 3, {"q_num_heads": 3, "kv_num_heads": 2}),
        (ShapeError, "omit the attribute", (X,) * 3, {"q_num_heads": 4}),
        (ShapeError, "3 or 4", (X[0, 0],) * 3, {}),
        (OptionError, "belong together", (X,) * 3, {"past_key": X}),
        (ShapeError, "past_key has shape", (X,) * 3, {"past_key": X[..., :2], "past_value": X}),
        (
            OptionError,
            "one of the two",
            (X,) * 3,
            {"past_key": X, "past_value": X, "nonpad_kv_seqlen": np.array([2])},
        ),
        (ShapeError, "attn_mask has shape", (X, X, X, np.ones((3, 9), bool)), {}),
        (OptionError, "left_window_size is -2", (X,) * 3, {"left_window_size": -2}),
        (OptionError, "softmax_precision is 7", (X,) * 3, {"softmax_precision": 7}),
        (OptionError, "qk_matmul_output_mode is 4", (X,) * 3, {"qk_matmul_output_mode": 4}),
        (OptionError, "softcap is -1", (X,) * 3, {"softcap": -1.0}),
    ],
)
def test_what_does_not_fit_is_refused_in_words(error, words, arguments, options):
    with pytest.raises(error, match=words):
        interop().attention(*arguments, **options)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("rotary_embedding_dim is 3 but X has 4", {"rotary_embedding_dim": 3}),
        ("cos_cache gives", {"cos_cache": np.ones((1, 3, 1), np.float32)}),
    ],
)
def test_a_rotation_that_does_not_fit_is_refused_in_words(words, change):
    cache = np.ones((1, 3, 2), np.float32)
    with pytest.raises(ShapeError, match=words):
        interop().rotary_embedding(**{"X": X, "cos_cache": cache, "sin_cache": cache, **change})


def model(*nodes, inputs=("Q", "K", "V"), version=23):
    helper = importlib.import_module("onnx").helper
    shape = [1, 2, 3, 4]
    made = [helper.make_node(*node) for node in nodes]
    graph = helper.make_graph(
        made,
        "attention",
        [helper.make_tensor_value_info(name, 1, shape) for name in inputs],
        [helper.make_tensor_value_info("Y", 1, shape)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])


ATTENTION = ("Attention", ["Q", "K", "V"], ["A"])


def test_a_model_with_other_nodes_is_declined_and_runs_in_onnx_with_our_operators():
    mixed = model(ATTENTION, ("Neg", ["A"], ["Y"]))
    onnx = interop()
    assert not onnx.Backend.is_compatible(mixed)
    with pytest.raises(OptionError, match=r"ai\.onnx\.Neg"):
        onnx.Backend.prepare(mixed)
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    with Answers() as answers:
        (output,) = evaluator(mixed, new_ops=onnx.OPERATORS).run(None, {"Q": X, "K": X, "V": X})
    assert len(answers.kernels) == 1
    np.testing.assert_array_equal(output, -X)


def test_the_backend_answers_models_and_nodes_on_the_cpu_only():
    onnx = interop()
    alone = model(("Attention", ["Q", "K", "V"], ["Y"]))
    assert onnx.Backend.is_compatible(alone)
    assert not onnx.Backend.is_compatible(alone, "CUDA")
    with Answers() as answers:
        (output,) = onnx.Backend.run_model(alone, [X, X, X])
        (node_output,) = onnx.Backend.run_node(alone.graph.node[0], [X, X, X])
    assert len(answers.kernels) == 2
    np.testing.assert_array_equal(output, X)
    np.testing.assert_array_equal(node_output, X)
    with pytest.raises(OptionError, match="on the CPU"):
        onnx.Backend.prepare(alone, "CUDA")
    with pytest.raises(OptionError, match="3 inputs but 2"):
        onnx.Backend.prepare(alone).run([X, X])


def test_an_opset_without_the_operator_is_refused_by_onnx_itself():
    with pytest.raises(Exception, match="No Op registered for Attention"):
        interop().Backend.prepare(model(("Attention", ["Q", "K", "V"], ["Y"]), version=22))


def main() -> None:
    """Print every case, the opset that it belongs to and what answered."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, case in sorted(cases().items()):
        operator = case.model.graph.node[0].op_type
        version = case.model.opset_import[0].version
        try:
            kernels = run_case(case)
        except AssertionError:
            verdict, kernels = "FAILS", []
        else:
            verdict = "passes"
        counts[operator, verdict] += 1
        print(f"{verdict}  opset {version}  {', '.join(kernels) or 'no kernel':<10} {name}")
    for (operator, verdict), count in sorted(counts.items()):
        print(f"{count} of {operator} {verdict.lower() if verdict == 'FAILS' else 'pass'}")


if __name__ == "__main__":
    main()

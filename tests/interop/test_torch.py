"""PyTorch's attention call on regard: the same meaning, the same numbers, and who answered."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest

import regard
from bounds import assert_within, error_bounds
from calls import arithmetic_of, recording_fast_calls_too
from oracle import attend
from regard.boundary.arrays import as_numpy

try:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    from regard.interop.torch import patched, scaled_dot_product_attention
except ImportError:
    torch = None

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("fused")]

NAMES = ["float16", "bfloat16", "float32", "float64"]
every_dtype = pytest.mark.parametrize("name", NAMES)


def numbers(*shape, dtype="float32", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def check(query, key, value, attn_mask=None, **options):
    """Ours against PyTorch in float64; the fused kernel answers, within the bounds of its dtype."""
    with recording_fast_calls_too() as ran:
        ours = scaled_dot_product_attention(query, key, value, attn_mask, **options)
    assert len(ran) == 1
    assert ran[0].startswith("fused")
    assert (type(ours), ours.dtype, ours.device.type) == (torch.Tensor, query.dtype, "cpu")
    wide_mask = attn_mask
    if attn_mask is not None and attn_mask.is_floating_point():
        wide_mask = attn_mask.double()
    wide = (query.double(), key.double(), value.double())
    theirs = functional.scaled_dot_product_attention(*wide, wide_mask, **options)
    bound = bound_of(wide, wide_mask, query.dtype, theirs, **options)
    assert_within(as_numpy("ours", ours), theirs.numpy(), bound)


def bound_of(inputs, mask, dtype, theirs, is_causal=False, scale=None, enable_gqa=False):
    """Of our error, and of PyTorch's own in float64; the oracle has its heads side by side."""
    heads = max(t.shape[-3] if t.ndim > 2 else 1 for t in inputs)
    arrays = []
    for tensor in inputs:
        if tensor.ndim > 2 and tensor.shape[-3] != heads:
            tensor = tensor.repeat_interleave(heads // tensor.shape[-3], -3)
        arrays.append(tensor.numpy())
    lead = np.broadcast_shapes(*(array.shape[:-2] for array in arrays))
    arrays = [np.broadcast_to(array, (*lead, *array.shape[-2:])) for array in arrays]
    options, bias = {"causal": is_causal, "offset": 0, "scale": scale}, {}
    if mask is not None and mask.dtype == torch.bool:
        options["mask"] = mask.numpy()
    elif mask is not None:
        bias = {"bias": mask.numpy()}
    answer = attend(*arrays, **options, **bias)
    name = str(dtype).removeprefix("torch.")
    how = arithmetic_of("fused", np.empty(0, name), scale=scale)
    both = (
        error_bounds(*arrays, answer, dtype=name, arithmetic=how, scale=scale, **bias).output,
        error_bounds(*arrays, answer, dtype="float64", scale=scale, **bias).output,
    )
    return sum(both).reshape(theirs.shape)


# --- PyTorch's own samples -----------------------------------------------------------------------


@pytest.mark.needs("expecttest")  # by PyTorch's own test tools
@every_dtype
def test_the_samples_of_pytorch_itself_give_its_numbers(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its test tools import what is deprecated
        from torch.testing._internal.common_methods_invocations import op_db
    info = next(o for o in op_db if o.name == "nn.functional.scaled_dot_product_attention")
    checked, refused = 0, 0
    for sample in info.sample_inputs("cpu", getattr(torch, name), requires_grad=False):
        options = dict(sample.kwargs)
        if options.pop("dropout_p"):
            with pytest.raises(regard.OptionError, match="dropout_p"):
                scaled_dot_product_attention(sample.input, *sample.args, **sample.kwargs)
            refused += 1
        check(sample.input, *sample.args, **options)
        checked += 1
    print(f"{name}: {checked} samples, {refused} of them with dropout and once more without")
    assert checked >= 25
    assert refused < checked


# --- and what they leave out ---------------------------------------------------------------------


CASES = {
    "wider_values": (((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 5)), {}),
    "no_heads": (((3, 8), (6, 8), (6, 5)), {}),
    "five_axes": (((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)), {}),
    "leading_axes_broadcast": (((3, 1, 4, 5, 8), (2, 4, 6, 8), (1, 6, 8)), {}),
    "heads_broadcast": (((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {}),
    "no_heads_among_heads": (((5, 8), (4, 6, 8), (4, 6, 8)), {}),
    "grouped": (((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), {"enable_gqa": True}),
    "grouped_apart": (((2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8)), {"enable_gqa": True}),
    "one_key_head": (((2, 6, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)), {}),
    "fewer_queries_causal": (((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}),
    "more_queries_causal": (((2, 4, 9, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}),
    "grouped_causal": (
        ((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        {"enable_gqa": True, "is_causal": True},
    ),
    "negative_scale": (((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {"scale": -0.7}),
    "scale_zero": (((2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {"scale": 0.0}),
    "no_queries": (((2, 4, 0, 8), (2, 4, 6, 8), (2, 4, 6, 8)), {}),
    "no_keys": (((2, 4, 3, 8), (2, 4, 0, 8), (2, 4, 0, 8)), {}),
    "no_width": (((2, 4, 3, 0), (2, 4, 6, 0), (2, 4, 6, 8)), {}),
}


@every_dtype
@pytest.mark.parametrize("case", CASES)
def test_shapes_and_options_give_the_numbers_of_pytorch(case, name):
    shapes, options = CASES[case]
    check(*(numbers(*s, dtype=name, seed=n) for n, s in enumerate(shapes)), **options)


LAYOUTS = {
    "rows_before_heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns_before_rows": lambda t: t.mT.contiguous().mT,
    "every_other_column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "expanded_batch": lambda t: t[:1].expand(t.shape),
    "expanded_rows": lambda t: t[..., :1, :].expand(t.shape),
    "inside_something_larger": lambda t: functional.pad(t, (1, 1, 1, 1))[..., 1:-1, 1:-1],
}


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_will_do_and_change_no_bit(layout, name):
    given = [LAYOUTS[layout](numbers(2, 4, 6, 8, dtype=name, seed=n)) for n in range(3)]
    check(*given, is_causal=True)
    strided = scaled_dot_product_attention(*given)
    assert torch.equal(strided, scaled_dot_product_attention(*(t.contiguous() for t in given)))


MASKS = {
    "rows_and_keys": lambda: numbers(5, 7),
    "of_each_head": lambda: numbers(4, 5, 7),
    "of_each_batch_element": lambda: numbers(2, 1, 1, 7),
    "whole": lambda: numbers(2, 4, 5, 7),
    "expanded": lambda: numbers(5, 1).expand(2, 4, 5, 7),
    "transposed": lambda: numbers(7, 5).mT,
}


@every_dtype
@pytest.mark.parametrize("kind", ["bool", "float32", "own"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_booleans_or_numbers_to_be_added(mask, kind, name):
    query, key, value = (
        numbers(2, 4, n, 8, dtype=name, seed=s) for s, n in enumerate((5, 7, 7), 1)
    )
    given = MASKS[mask]()
    given = given > -0.5 if kind == "bool" else given.to(getattr(torch, name), copy=True)
    if kind == "float32":
        given = given.float()
    check(query, key, value, given)
    check(query, key, value, given, scale=0.3)


def test_a_mask_and_causality_both_apply_as_in_the_flash_kernel():
    query, key, value = (numbers(2, 4, 5, 8, seed=n) for n in range(3))
    mask = numbers(5, 5) > -0.5
    mask.fill_diagonal_(True)
    both = scaled_dot_product_attention(query, key, value, mask, is_causal=True)
    assert torch.equal(both, scaled_dot_product_attention(query, key, value, mask.tril()))


@every_dtype
@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_rows_that_see_no_key_are_zero_as_in_pytorch(kind, name):
    query, key, value = (numbers(2, 4, 5, 8, dtype=name, seed=n) for n in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    if kind == "numbers":
        mask = torch.zeros(5, 5, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    check(query, key, value, mask)
    assert not scaled_dot_product_attention(query, key, value, mask)[..., 2, :].any()


def test_what_stands_in_a_masked_value_has_no_influence_unlike_in_pytorch():
    query, key, value = (numbers(1, 1, 3, 4, seed=n) for n in range(3))
    mask = torch.tensor([True, True, False])
    expected = scaled_dot_product_attention(query, key[..., :2, :], value[..., :2, :])
    value[..., 2, :] = torch.nan
    assert torch.equal(scaled_dot_product_attention(query, key, value, mask[None]), expected)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_the_causal_biases_of_pytorch_are_understood(queries, keys):
    query, key, value = (numbers(2, 4, n, 8) for n in (queries, keys, keys))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it may give NaN, which it does not
        biases = {
            0: causal_upper_left(queries, keys),
            keys - queries: causal_lower_right(queries, keys),
        }
    for diagonal, bias in biases.items():
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)
        ours = scaled_dot_product_attention(query, key, value, bias)
        assert torch.equal(ours, scaled_dot_product_attention(query, key, value, mask))


# --- refusals ------------------------------------------------------------------------------------


def good():
    return {name: numbers(2, 4, 5, 8) for name in ("query", "key", "value")}


def ragged(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(4, 5, 8), torch.ones(4, 3, 8)], layout=layout)


REFUSED = {
    "dropout_in_training": (
        lambda: {"query": numbers(2, 4, 5, 8).requires_grad_(), "dropout_p": 0.1},
        "dropout_p is 0.1",
    ),
    "gradient_elsewhere": (
        lambda: {"query": torch.ones(2, 4, 5, 8, device="meta", requires_grad=True)},
        "query.*meta.*no numbers",
    ),
    "dropout": (lambda: {"dropout_p": 0.1}, "dropout_p is 0.1"),
    "another_device": (lambda: {"value": good()["value"].to("meta")}, "value.*meta.*no numbers"),
    "nested": (lambda: {"query": ragged(torch.strided)}, "query is a nested"),
    "nested_jagged": (lambda: {"query": ragged(torch.jagged)}, "query is a nested"),
    "sparse": (lambda: {"query": good()["query"].to_sparse()}, r"query.*[Ss]parse"),
    "another_dtype": (lambda: {"query": good()["query"].int()}, "query has dtype torch.int32"),
    "several_dtypes": (lambda: {"query": good()["query"].double()}, "one dtype"),
    "mask_of_integers": (
        lambda: {"attn_mask": torch.ones(5, 5, dtype=torch.int64)},
        "True = attend",
    ),
    "mask_of_another_dtype": (lambda: {"attn_mask": torch.ones(5, 5).half()}, "float16"),
    "no_tensor": (lambda: {"query": np.ones((2, 4, 5, 8))}, "query must be a Tensor"),
    "mask_of_the_batch": (
        lambda: {"attn_mask": torch.ones(3, 5, dtype=torch.bool)},
        r"5 queries and 5 keys; if .* pass attn_mask\[:, None",
    ),
    "mask_is_a_rule": (lambda: {"attn_mask": regard.masks.Causal()}, "this call is_causal=True"),
    "mask_is_a_class": (
        lambda: {"attn_mask": regard.masks.Causal},
        "not the class Causal; .* this",
    ),
    "mask_is_no_tensor": (lambda: {"attn_mask": np.ones((5, 5), bool)}, "attn_mask must be"),
    "one_axis": (lambda: {"query": torch.ones(8)}, "query has 1 axes"),
    "heads": (
        lambda: {"key": torch.ones(2, 2, 5, 8), "value": torch.ones(2, 2, 5, 8)},
        "enable_gqa",
    ),
    "mask_that_does_not_fit": (
        lambda: {"attn_mask": torch.ones(4, 5, dtype=torch.bool)},
        r"\(4, 5\)",
    ),
    "causal_bias_that_does_not_fit": (lambda: {"attn_mask": causal_upper_left(3, 5)}, "3 queries"),
    "causal_twice": (
        lambda: {"attn_mask": causal_upper_left(5, 5), "is_causal": True},
        "is_causal",
    ),
    "scale": (lambda: {"scale": float("nan")}, "scale is nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(case):
    options, message = REFUSED[case]
    with pytest.raises((regard.DtypeError, regard.OptionError, regard.ShapeError), match=message):
        scaled_dot_product_attention(**(good() | options()))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"is_casual": True}, r"did you mean is_causal=True\?"),
        ({"causal": True}, "causal: pass is_causal=True$"),
        ({"mask": np.ones((5, 5))}, "mask: pass attn_mask=mask$"),
        ({"bias": np.ones((5, 5))}, "bias: pass attn_mask=bias$"),
    ],
)
def test_an_argument_that_is_not_there_is_answered_with_the_one_that_was_meant(given, answer):
    with pytest.raises(TypeError, match=answer):
        scaled_dot_product_attention(**good(), **given)


def test_patched_takes_nothing():
    with pytest.raises(TypeError, match=r"patched\(\) takes nothing by position"):
        patched(True)


# --- autocast ------------------------------------------------------------------------------------

MIXED = [*((name,) * 3 for name in NAMES), ("float32", "bfloat16", "float16")]
MIXED += [("float64", "float32", "float32"), ("float64", "float64", "bfloat16")]


def answer_of(function, tensors, mask):
    """What comes back, or None where the call is refused."""
    try:
        return function(*tensors, attn_mask=mask)
    except (RuntimeError, regard.DtypeError):
        return None


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("names", MIXED, ids="_".join)
@pytest.mark.parametrize("mask", [None, "bool", *NAMES])
def test_autocast_casts_what_it_casts_for_pytorch_s_own_function(mask, names, to):
    given = [numbers(2, 4, 5, 8, dtype=name, seed=n) for n, name in enumerate(names)]
    added = None if mask is None else numbers(5, 5, seed=3) > -0.5
    if mask not in (None, "bool"):
        added = numbers(5, 5, dtype=mask, seed=3)
    narrow = getattr(torch, to)
    own = functional.scaled_dot_product_attention
    with torch.autocast("cpu", dtype=narrow):
        theirs, ours = (
            answer_of(own, given, added),
            answer_of(scaled_dot_product_attention, given, added),
        )
        with torch.autocast("cpu", enabled=False):
            off = answer_of(scaled_dot_product_attention, given, added)
    without = answer_of(scaled_dot_product_attention, given, added)
    assert (off is None) == (without is None)
    assert off is None or torch.equal(off, without)
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return
    assert ours.dtype == theirs.dtype == (torch.float64 if names[0] == "float64" else narrow)
    if names[0] != "float64":
        given = [tensor.to(narrow) for tensor in given]
        added = added.to(narrow) if mask not in (None, "bool") else added
    assert torch.equal(ours, scaled_dot_product_attention(*given, added))


def test_autocast_counts_within_the_context_too():
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = numbers(2, 5, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x, x, x, need_weights=False)[0]
        with patched() as calls:
            output = layer(x, x, x, need_weights=False)[0]
    assert (calls.answered, output.dtype) == (1, expected.dtype)
    # Attended values below 1 differ by a unit of bfloat16 at most, 2^-8; the last layer adds 16 of
    # them, each with a weight of at most 1/4.
    most = 16 * 2**-8 / 4
    np.testing.assert_allclose(output.float(), expected.float(), rtol=0, atol=most)


def test_attention_on_tensors_follows_their_dtypes_and_not_autocast():
    query = numbers(2, 4, 5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(query, query, query).dtype == torch.float32


# --- tensors of other classes --------------------------------------------------------------------


def test_a_class_of_tensors_is_asked_and_gets_its_own_back_as_from_pytorch():
    asked = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            asked.append(function)
            return super().__torch_function__(function, types, arguments, options)

    given = list(good().values())
    ours = scaled_dot_product_attention(*(tensor.as_subclass(Mine) for tensor in given))
    assert asked[0] is scaled_dot_product_attention
    assert type(ours) is Mine
    plain = ours.as_subclass(torch.Tensor)
    assert torch.equal(plain, scaled_dot_product_attention(*given))


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
def test_a_trace_is_refused_and_torch_compile_calls_regard_each_time():
    query, mask = numbers(2, 4, 5, 8), numbers(5, 5)

    def attend(tensor):
        return scaled_dot_product_attention(tensor * 2, tensor, tensor, mask) + 1

    with pytest.raises(regard.DtypeError, match=r"attn_mask is being traced.*torch\.compile"):
        torch.jit.trace(attend, query)
    compiled = torch.compile(attend, backend="eager")
    for seed in range(3):
        query = numbers(2, 4, 5, 8, seed=seed)
        assert torch.equal(compiled(query), attend(query))


@pytest.mark.filterwarnings("ignore")  # quantisation is deprecated
def test_quantised_tensors_are_refused():
    quantised = torch.quantize_per_tensor(torch.ones(2, 4, 5, 8), 0.1, 0, torch.qint8)
    with pytest.raises(regard.DtypeError, match="qint8"):
        scaled_dot_product_attention(**(good() | {"query": quantised}))


def test_a_parameter_is_fine_where_no_gradient_is_followed():
    query = torch.nn.Parameter(numbers(2, 4, 5, 8))
    with torch.no_grad():
        check(query, *list(good().values())[1:])


@pytest.mark.filterwarnings("ignore")  # PyTorch makes the first one with what it deprecates
def test_a_tangent_is_refused_not_dropped():
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        query = forward.make_dual(numbers(2, 4, 5, 8), torch.ones(2, 4, 5, 8))
        with pytest.raises(regard.DtypeError, match="tangent"):
            scaled_dot_product_attention(**(good() | {"query": query}))


# --- in the place of PyTorch's own ---------------------------------------------------------------

# Two implementations in float32 of a layer whose numbers are about 1 differ by some roundings in
# each of its sums of at most 64 terms.
LAYER_TOLERANCE = 64 * 2.0**-23


@pytest.fixture(autouse=True)
def pytorch_is_as_before():
    own = functional.scaled_dot_product_attention if torch else None
    yield
    if torch:
        assert functional.scaled_dot_product_attention is own
        assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_of_pytorch_runs_on_regard_within_the_context():
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = numbers(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        expected = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        with patched() as calls, recording_fast_calls_too() as ran:
            output = layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert (calls.answered, calls.passed_on, len(ran)) == (1, 0, 1)
    np.testing.assert_allclose(output, expected, rtol=0, atol=LAYER_TOLERANCE)


def test_an_encoder_runs_on_regard_although_it_has_a_fast_path_of_its_own():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = numbers(2, 5, 16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        expected = encoder(x, mask=mask, is_causal=True)
        with patched() as calls:
            output = encoder(x, mask=mask, is_causal=True)
    assert (calls.answered, calls.passed_on) == (3, 0)
    np.testing.assert_allclose(output, expected, rtol=0, atol=3 * LAYER_TOLERANCE)


def test_calls_that_regard_cannot_answer_go_to_pytorch_and_are_counted_with_the_reason():
    query, key, value = good().values()
    with patched() as calls:
        functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        functional.scaled_dot_product_attention(*(t.to("meta") for t in (query, key, value)))
        with pytest.raises(RuntimeError):  # in PyTorch's own words
            functional.scaled_dot_product_attention(query, key.double(), value)
        functional.scaled_dot_product_attention(query.requires_grad_(), key, value).sum().backward()
    assert (calls.answered, calls.passed_on) == (1, 3)
    assert sum(calls.reasons.values()) == 3
    for word in ("dropout_p", "meta", "one dtype"):
        assert any(word in reason for reason in calls.reasons)


def test_a_causal_bias_is_answered_or_passed_on():
    query, key, value = good().values()
    bias = causal_lower_right(5, 5)
    with patched() as calls:
        ours = functional.scaled_dot_product_attention(query, key, value, bias)
        theirs = functional.scaled_dot_product_attention(query, key, value, bias, dropout_p=1e-9)
    assert (calls.answered, calls.passed_on) == (1, 1)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LAYER_TOLERANCE)


def test_the_context_is_left_as_found_after_an_error():
    with pytest.raises(ZeroDivisionError), patched():
        raise ZeroDivisionError


def test_contexts_nest_and_each_counts_what_happens_within_it():
    tensors = good().values()
    with patched() as outer:
        functional.scaled_dot_product_attention(*tensors)
        with patched() as inner:
            functional.scaled_dot_product_attention(*tensors)
        functional.scaled_dot_product_attention(*tensors)
    functional.scaled_dot_product_attention(*tensors)
    assert (outer.answered, inner.answered) == (3, 1)


def test_contexts_of_several_threads_may_end_in_any_order():
    tensors = list(good().values())
    counts, entered, first_left = {}, threading.Barrier(2), threading.Event()

    def work(name):
        with patched() as calls:
            entered.wait(60)
            if name == "second":
                first_left.wait(60)
            for _ in range(10):
                functional.scaled_dot_product_attention(*tensors)
        counts[name] = (calls.answered, calls.passed_on)
        if name == "first":
            first_left.set()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == {"first": (10, 0), "second": (10, 0)}


def test_other_threads_keep_the_function_of_pytorch():
    tensors = list(good().values())
    with patched() as calls, recording_fast_calls_too() as ran:
        thread = threading.Thread(target=functional.scaled_dot_product_attention, args=tensors)
        thread.start()
        thread.join(60)
    assert (calls.answered, calls.passed_on, ran) == (0, 0, [])


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
def test_what_is_compiled_or_traced_is_recorded_as_pytorch_s_own_call():
    query = numbers(2, 4, 5, 8)

    def attend_to_itself(x):
        return functional.scaled_dot_product_attention(x, x, x)

    with patched() as calls:
        traced = torch.jit.trace(attend_to_itself, (query,), check_trace=False)
        graph = torch.fx.symbolic_trace(attend_to_itself).code
        compiled = torch.compile(attend_to_itself, backend="eager")(query)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert "regard" not in graph
    assert calls.answered == 0
    for output in (traced(2 * query), 0.5 * traced(2 * query), compiled):
        assert output.shape == query.shape
    np.testing.assert_array_equal(traced(2 * query), attend_to_itself(2 * query))


@pytest.mark.parametrize("mode", ["device", "nothing"])
def test_a_mode_of_pytorch_does_not_stand_in_the_way(mode):
    with patched() as calls, torch.device("cpu") if mode == "device" else nullcontext():
        functional.scaled_dot_product_attention(*good().values())
    assert (calls.answered, calls.passed_on) == (1, 0)

"""Gradients through PyTorch's attention call on regard: those of PyTorch, and of differences."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest

import regard
from calls import recording_fast_calls_too

try:
    import torch
    import torch.nn.functional as functional
    from torch.autograd import gradcheck, gradgradcheck
    from torch.utils.checkpoint import checkpoint

    from regard.interop.torch import patched, scaled_dot_product_attention
except ImportError:
    torch = None

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("fused")]

NAMES = ("query", "key", "value", "attn_mask")
# Two correct ways in float64 to gradients whose sums have at most a hundred terms of about 1.
SAME = 100 * 2.0**-52


def numbers(*shape, seed=0, dtype="float64"):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    return made.to(getattr(torch, dtype))


def learning(*shapes, dtype="float64"):
    return [numbers(*s, seed=n, dtype=dtype).requires_grad_() for n, s in enumerate(shapes)]


def half_hidden():
    mask = numbers(2, 1, 3, 5, seed=9) > 0
    mask[0, 0, 1] = False  # a row that sees nothing
    return mask


QKV = ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))
CASES = {
    "plain": (QKV, {}),
    "two_axes": (((3, 4), (5, 4), (5, 2)), {"scale": 0.7}),
    "five_axes": (((2, 1, 2, 2, 3), (2, 1, 2, 4, 3), (2, 1, 2, 4, 3)), {}),
    "causal": (((2, 3, 4), (2, 3, 4), (2, 3, 4)), {"is_causal": True}),
    "causal_fewer_keys": (((2, 5, 4), (2, 3, 4), (2, 3, 4)), {"is_causal": True}),
    "grouped": (((1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 3)), {"enable_gqa": True}),
    "grouped_apart": (((1, 6, 2, 2), (1, 2, 3, 2), (1, 3, 3, 2)), {"enable_gqa": True}),
    "heads_broadcast": (((2, 1, 3, 4), (2, 2, 5, 4), (2, 1, 5, 3)), {}),
    "leading_axes_broadcast": (((3, 1, 2, 2, 3), (2, 2, 4, 3), (1, 4, 3)), {}),
    "negative_scale": (QKV, {"scale": -0.5}),
    "hidden": (QKV, {"attn_mask": half_hidden}),
    "bias": ((*QKV, (2, 2, 3, 5)), {}),
    "bias_of_keys": ((*QKV, (2, 1, 1, 5)), {}),
    "bias_of_rows": ((*QKV, (3, 5)), {}),
}


def called(function, options):
    options = {name: one() if callable(one) else one for name, one in options.items()}
    return lambda *tensors: function(**dict(zip(NAMES, tensors, strict=False)), **options)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_their_gradients_are_slopes(case):
    shapes, options = CASES[case]
    ours, given = called(scaled_dot_product_attention, options), learning(*shapes)
    assert gradcheck(ours, given, fast_mode=True)
    assert gradgradcheck(ours, given, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_pytorch(case):
    shapes, options = CASES[case]
    given = learning(*shapes)
    found = []
    for function in (scaled_dot_product_attention, functional.scaled_dot_product_attention):
        output = called(function, options)(*given)
        weights = numbers(*output.shape, seed=7)
        found.append(torch.autograd.grad((output * weights).sum(), given))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_only_what_requires_a_gradient_gets_one(wrt, monkeypatch):
    from regard.interop import torch_gradients

    asked = []
    whole = torch_gradients.gradients
    monkeypatch.setattr(
        torch_gradients, "gradients", lambda **k: (asked.append(k["wrt"]), whole(**k))[1]
    )
    given = [numbers(*s, seed=n) for n, s in enumerate(CASES["bias"][0])]
    for n in wrt:
        given[n].requires_grad_()
    scaled_dot_product_attention(*given).sum().backward()
    assert asked == [tuple(("query", "key", "value", "bias")[n] for n in wrt)]
    assert [one.grad is not None for one in given] == [n in wrt for n in range(4)]
    assert gradgradcheck(scaled_dot_product_attention, given, fast_mode=True)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_gradients_of_half_types_are_rounded_once(name):
    given = learning((2, 64, 8), (2, 256, 8), (2, 256, 8), (64, 256), dtype=name)
    grad = numbers(2, 64, 8, seed=5, dtype=name)
    found = torch.autograd.grad(scaled_dot_product_attention(*given), given, grad)
    wide = [one.detach().double().requires_grad_() for one in given]
    output = scaled_dot_product_attention(*wide)
    for ours, exact in zip(found, torch.autograd.grad(output, wide, grad.double()), strict=True):
        assert ours.dtype == getattr(torch, name)
        # One rounding, and sums in float32 of products of about 1.
        unit = torch.finfo(ours.dtype).eps / 2
        atol = 256 * 2.0**-23 * exact.abs().max().item() + 2.0**-24
        np.testing.assert_allclose(ours.double(), exact, rtol=unit, atol=atol)


def samples_of_pytorch():
    """Calls by which PyTorch tests its own function, and that function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its test tools import what is deprecated
        from torch.testing._internal.common_methods_invocations import op_db

    info = next(o for o in op_db if o.name == "nn.functional.scaled_dot_product_attention")
    for sample in info.sample_inputs("cpu", torch.float64, requires_grad=True):
        yield (sample.input, *sample.args), {**sample.kwargs, "dropout_p": 0.0}, info.op


@pytest.mark.needs("expecttest")
def test_the_samples_of_pytorch_itself_have_its_gradients():
    checked = 0
    for arguments, options, function_of_pytorch in samples_of_pytorch():
        given = [one for one in arguments if one.requires_grad]
        results = (
            function(*arguments, **options)
            for function in (scaled_dot_product_attention, function_of_pytorch)
        )
        ours, theirs = (torch.autograd.grad(one.sum(), given) for one in results)
        for one, other in zip(ours, theirs, strict=True):
            # Its numbers are up to 9: scores and gradients are products of two of them.
            np.testing.assert_allclose(one, other, rtol=81 * SAME, atol=81 * SAME)
        checked += 1
    assert checked >= 25


@pytest.mark.full
@pytest.mark.needs("expecttest")
def test_gradients_of_the_samples_of_pytorch_are_slopes_and_so_are_second_ones():
    for arguments, options, _ in samples_of_pytorch():
        call = functools.partial(scaled_dot_product_attention, **options)
        tensors = tuple(one.detach().requires_grad_(one.requires_grad) for one in arguments)
        assert gradcheck(call, tensors, fast_mode=True)
        assert gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("order", [1, 2])
def test_nan_in_what_is_hidden_poisons_no_gradient_unlike_in_pytorch(order):
    clean = learning((1, 3, 4), (1, 5, 4), (1, 5, 3), (3, 5))
    seen = torch.tensor([True, True, False, True, False])

    def of(tensors):
        hidden = torch.where(seen, tensors[3], -torch.inf)
        output = scaled_dot_product_attention(*tensors[:3], hidden)
        made = torch.autograd.grad((output**2).sum(), tensors[:3], create_graph=order == 2)
        if order == 2:
            made = torch.autograd.grad(sum((one**2).sum() for one in made), tensors[:3])
        return [one.detach() for one in made]

    dirty = [one.detach().clone() for one in clean]
    dirty[1][:, ~seen] = dirty[2][:, ~seen] = torch.nan
    dirty = [one.requires_grad_() for one in dirty]
    for one, other in zip(of(dirty), of(clean), strict=True):
        np.testing.assert_array_equal(one, other)
    for one in of(dirty)[1:]:
        assert not one[:, ~seen].any()


def test_no_gradients_are_kept_where_none_is_needed():
    given = learning(*QKV)
    with torch.no_grad(), recording_fast_calls_too() as ran:
        assert scaled_dot_product_attention(*given).grad_fn is None
    assert len(ran) == 1
    plain = scaled_dot_product_attention(*(one.detach() for one in given))
    assert torch.equal(plain, scaled_dot_product_attention(*given))


# --- what goes around a call ---------------------------------------------------------------------


def loss(query, key, value):
    return (scaled_dot_product_attention(query, key, value, is_causal=True) ** 2).sum()


def their_loss(query, key, value):
    return (functional.scaled_dot_product_attention(query, key, value, is_causal=True) ** 2).sum()


def check_same(transform, *given):
    ours, theirs = transform(loss)(*given), transform(their_loss)(*given)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=10 * SAME, atol=10 * SAME)


def test_functions_of_torch_func_go_through():
    func = torch.func
    x, y = numbers(3, 2, 4, 3), numbers(3, 2, 4, 3, seed=1)
    check_same(lambda f: func.grad(f, (0, 1, 2)), x, y, y)
    check_same(lambda f: func.grad(lambda q: f(q, q, q)), x)
    check_same(func.vmap, x, y, y)
    check_same(lambda f: func.vmap(f, (0, None, 1)), x, y[0], y.movedim(0, 1))
    # A shared key has a gradient for each mapped element.
    check_same(lambda f: func.vmap(func.grad(f, (0, 1)), (0, None, None)), x, y[0], y[0])
    check_same(lambda f: func.vmap(func.vmap(func.grad(f))), x, y, y)
    check_same(lambda f: func.jacrev(func.grad(f)), x[0], y[0], y[0])
    check_same(lambda f: func.vmap(func.jacrev(func.jacrev(f))), x, y, y)


def test_a_mapped_mask_and_bias_belong_to_their_elements():
    x, bias = numbers(3, 4, 3), numbers(3, 4, 4, seed=1)
    for mask in (bias, bias > -0.5):
        mapped = torch.func.vmap(lambda q, m: scaled_dot_product_attention(q, q, q, m))(x, mask)
        for n in range(3):
            alone = scaled_dot_product_attention(x[n], x[n], x[n], mask[n])
            np.testing.assert_array_equal(mapped[n], alone)


@pytest.mark.filterwarnings("ignore")  # PyTorch makes the first tangent with what it deprecates
def test_forward_mode_and_third_derivatives_are_refused_in_words():
    x = numbers(4, 3)

    def of(q):
        return loss(q, q, q)

    for transform in (
        lambda: torch.func.jvp(of, (x,), (x,)),
        lambda: torch.func.jacfwd(of)(x),
        lambda: torch.func.hessian(of)(x),
    ):
        with pytest.raises(regard.DtypeError, match=r"no forward mode.*jacrev"):
            transform()
    with pytest.raises(regard.OptionError, match=r"third.*torch\.nn\.functional"):
        torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(of)))(x)


def test_what_regard_does_not_follow_goes_to_pytorch_within_the_context():
    x = numbers(4, 3)
    jvp, grad, functionalize = torch.func.jvp, torch.func.grad, torch.func.functionalize
    with pytest.raises(regard.DtypeError, match=r"within torch\.func\.functionalize"):
        functionalize(grad(lambda q: loss(q, q, q)))(x)
    with patched() as calls:
        made = functionalize(grad(lambda q: their_loss(q, q, q)))(x)
        jvp(lambda q: their_loss(q, q, q), (x,), (x,))
    assert (calls.answered, calls.passed_on) == (0, 2)
    np.testing.assert_allclose(made, grad(lambda q: loss(q, q, q))(x), rtol=SAME, atol=SAME)


def test_checkpoints_compute_the_call_again():
    given = learning(*CASES["causal"][0])
    expected = torch.autograd.grad(loss(*given), given)
    for reentrant in (False, True):
        output = checkpoint(loss, *given, use_reentrant=reentrant)
        output.backward()
        for one, other in zip(given, expected, strict=True):
            np.testing.assert_array_equal(one.grad, other)
            one.grad = None


@pytest.mark.filterwarnings("ignore")  # what torch.compile warns of by itself
def test_a_compiled_function_has_the_same_gradients():
    given = learning(*CASES["causal"][0])
    expected = torch.autograd.grad(loss(*(2 * one for one in given)), given)
    compiled = torch.compile(lambda *own: loss(*(2 * one for one in own)), backend="eager")
    for one, other in zip(torch.autograd.grad(compiled(*given), given), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_autocast_narrows_the_call_and_gradients_come_back_wide():
    given = learning(*CASES["causal"][0], dtype="float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = scaled_dot_product_attention(*given)
    assert output.dtype == torch.bfloat16
    found = torch.autograd.grad(output.float().sum(), given)
    narrow = [one.detach().bfloat16().requires_grad_() for one in given]
    expected = torch.autograd.grad(scaled_dot_product_attention(*narrow).float().sum(), narrow)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        np.testing.assert_array_equal(one, other.float())


def test_layers_of_pytorch_learn_within_the_context():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    x = numbers(2, 5, 8)
    found = []
    for context in (True, False):
        layer.zero_grad()
        if context:
            with patched() as calls:
                layer(x).square().sum().backward()
            assert (calls.answered, calls.passed_on) == (1, 0)
        else:
            layer(x).square().sum().backward()
        found.append([one.grad for one in layer.parameters()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)

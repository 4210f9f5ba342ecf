"""Attention as functions of torch.autograd: regard computes first and second derivatives.

Owns what is saved for the backward pass, and how torch.func.vmap maps forward and backward. Must
not know any signature of attention but regard's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, cast

import torch
from torch.autograd import Function

from regard.api import attention, gradients
from regard.boundary.arrays import as_numpy, home_of
from regard.compute import dispatch
from regard.errors import DtypeError, OptionError

__all__: list[str] = []

ARRAYS = ("query", "key", "value", "bias", "sink", "mask")


def is_followed(*tensors: Any) -> bool:
    """Whether one of these requires a gradient, or belongs to a transform of torch.func."""
    recording = torch.is_grad_enabled()
    transforms = torch._C._functorch
    return any(
        ((recording and one.requires_grad) or transforms.is_functorch_wrapped_tensor(one))
        and not torch._is_functional_tensor(one)
        for one in tensors
        if isinstance(one, torch.Tensor)
    )


def attend(
    query: Any, key: Any, value: Any, *, return_weights: bool = False, **options: Any
) -> tuple[Any, ...]:
    """Output, lse, and with `return_weights` the weights; PyTorch can differentiate the output.

    The options are those of `regard.attention`. The loss must not depend on lse or weights.
    """
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    if any(one.key() == functorch.TransformType.Functionalize for one in stack):
        raise DtypeError(
            "this call is within torch.func.functionalize, which cannot rewrite it; call regard "
            "outside of functionalize"
        )
    own = max(one.ndim for one in (query, key, value))
    axes = max(own, 3)  # the same for all, so that vmap adds an axis in front of each
    given = {"query": query, "key": key, "value": value}
    given |= {name: options.pop(name, None) for name in ("bias", "sink", "mask")}
    tensors = (_padded(one, axes - 2 if name == "sink" else axes) for name, one in given.items())
    results = _Attention.apply(_Call(options, return_weights), *tensors)
    return tuple(one.reshape(one.shape[axes - own :]) for one in results[: 2 + return_weights])


def _padded(tensor: Any, axes: int) -> Any:
    if tensor is None or tensor.ndim >= axes:
        return tensor
    return tensor.reshape((1,) * (axes - tensor.ndim) + tensor.shape)


@dataclass(frozen=True)
class _Call:
    """What a call has besides tensors."""

    options: Mapping[str, Any]
    return_weights: bool = False
    wrt: tuple[str, ...] = ()
    second: tuple[str, ...] = ()  # whose second gradients are requested

    def arguments(self, tensors: Any) -> dict[str, Any]:
        """The arguments of `regard.attention` and `regard.gradients`."""
        return {**dict(zip(ARRAYS, tensors, strict=False)), **self.options}


class _Mapped(Function):
    """A function that torch.func.vmap may map: with one more axis in front of every tensor."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, call: _Call, *tensors: Any) -> Any:
        """Add the axis to every tensor, mapped or not: each element has its own gradients."""
        moved = [
            one
            if one is None
            else one.expand(info.batch_size, *one.shape)
            if axis is None
            else one.movedim(axis, 0)
            for one, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        made = cls.apply(call, *moved)
        return made, (0,) * len(made)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward mode is refused."""
        raise DtypeError(
            "an input carries a tangent, but regard has no forward mode (jvp, jacfwd, hessian); "
            "use torch.func.grad, vjp or jacrev"
        )


class _Attention(_Mapped):
    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        """Output and lse, then the weights if asked for; last a half output before its rounding."""
        returned = {"return_weights": call.return_weights, "return_lse": True}
        attended = cast("Callable[..., Any]", attention)  # any of its overloads
        query, key, value = tensors[:3]
        dtype = query.dtype
        if dtype.itemsize > 2 or {key.dtype, value.dtype} != {dtype}:
            output, *weights, lse = attended(**call.arguments(tensors), **returned)
            return output, lse, *weights
        lead = torch.broadcast_shapes(*(one.shape[:-3] for one in (query, key, value)))
        wide = torch.float64 if call.options.get("precision") == "exact" else torch.float32
        unrounded = torch.empty((*lead, *query.shape[-3:-1], value.shape[-1]), dtype=wide)
        _, *weights, lse = attended(**call.arguments(tensors), **returned, out=unrounded)
        return unrounded.to(dtype), lse, *weights, unrounded

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save inputs and results, a half output as it was before its rounding: for δ."""
        ctx.call, *tensors = inputs
        ctx.set_materialize_grads(False)
        output, lse, *others = output
        unrounded = others[ctx.call.return_weights :]
        ctx.mark_non_differentiable(lse, *unrounded)
        exact = (*unrounded, output)[0]
        kept = (exact, lse) if exact.element_size() > 2 else (None, None)
        ctx.save_for_backward(*tensors, *kept)

    @staticmethod
    def backward(ctx: Any, grad_output: Any, _: Any, *others: Any) -> Any:
        """The gradients of the tensors that need one."""
        if any(one is not None for one in others):  # unrounded has none
            raise OptionError(
                "the loss depends on the returned weights, through which regard computes no "
                'gradients; pass weights.detach() to it, or use attn_implementation="eager"'
            )
        wrt = tuple(compress(ARRAYS, ctx.needs_input_grad[1:]))
        if grad_output is None or not wrt:
            return (None,) * 7
        *tensors, output, lse = ctx.saved_tensors
        # Detached, because second gradients include how these depend on the inputs.
        kept = (one if one is None else one.detach() for one in (output, lse))
        made = _Gradients.apply(replace(ctx.call, wrt=wrt), *tensors, grad_output, *kept)
        named = dict(zip(wrt, made, strict=True))
        return None, *map(named.get, ARRAYS)


class _Gradients(_Mapped):
    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        """The requested gradients, in the order of `wrt`."""
        *_, grad_output, output, lse = tensors
        made = gradients(
            **call.arguments(tensors),
            grad_output=grad_output,
            output=output,
            lse=lse,
            wrt=call.wrt,
        )
        return tuple(getattr(made, name) for name in call.wrt)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the inputs."""
        ctx.call, *tensors, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *arrives: Any) -> Any:
        """The second gradients: of the inputs and of `grad_output`."""
        names = (*ARRAYS, "grad_output")
        second = tuple(compress(names, ctx.needs_input_grad[1:]))
        arrived = {n: one for n, one in zip(ctx.call.wrt, arrives, strict=True) if one is not None}
        if not arrived or not second:
            return (None,) * 10
        call = replace(ctx.call, wrt=tuple(arrived), second=second)
        made = _SecondGradients.apply(call, *ctx.saved_tensors, *arrived.values())
        named = dict(zip(second, made, strict=True))
        return None, *map(named.get, names), None, None


class _SecondGradients(_Mapped):
    @staticmethod
    def forward(call: _Call, *tensors: Any) -> Any:
        """The gradients of the gradients, by the reference kernel."""
        names = (*ARRAYS, "grad_output", *(f"gradient of {name}" for name in call.wrt))
        arrays: list[Any] = [
            one if one is None else as_numpy(name, one)
            for name, one in zip(names, tensors, strict=True)
        ]
        made = dispatch.second_gradients_of_arrays(
            **call.arguments(arrays),
            grad_output=arrays[6],
            arrives=dict(zip(call.wrt, arrays[7:], strict=True)),
            wrt=call.second,
        )
        home = home_of({"query": tensors[0]})
        assert home is not None  # it is a tensor
        return tuple(home(made[name]) for name in call.second)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: there is no third derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Third derivatives are refused."""
        raise OptionError(
            "regard computes first and second derivatives, and this asks for the third; use "
            "torch.nn.functional.scaled_dot_product_attention"
        )

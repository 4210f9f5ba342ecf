"""Attention, its gradients and its second gradients as three primitives of JAX.

Owns how JAX runs, compiles, maps and differentiates them, and JAX's layout of arrays: rows before
heads. Must not know the public function, which is in interop/jax.py.
"""

# A primitive and not `jax.pure_callback`, which copies operands to JAX arrays: with several threads
# those copies wait for the threads that the callbacks hold (jax 0.10.2: a deadlock with six threads
# and 100,000 numbers). Here operands are NumPy arrays on XLA's memory; the callback uses no JAX.

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from regard import api
from regard.boundary.arrays import as_numpy
from regard.compute import dispatch
from regard.masks import Boolean, Lengths, Mask

__all__ = ["Settings", "attention"]


class Settings(NamedTuple):
    """The arguments of a call that are not arrays."""

    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None


# The operands of a primitive are listed by `names`: first the arrays of the call, then the
# gradients of its results. vmap adds axes in front of every operand.


def _primitive(name: str) -> Any:
    made = Primitive(f"regard_{name}")
    made.multiple_results = True
    return made


attention, _gradients, _second = map(
    _primitive, ("attention", "gradients", "gradients_of_gradients")
)

ROWS_FIRST = {"query", "key", "value", "output", "grad_output"}  # swapped in regard
LENGTHS = {"query_seq_lengths", "key_value_seq_lengths"}  # (…, B); others have three more axes


def _turned(name: str, array: Any) -> Any:
    """An array in regard's layout, heads before rows, or from there back in JAX's."""
    if name in ROWS_FIRST:
        return array.swapaxes(-3, -2)
    return array.swapaxes(-2, -1) if name in ("lse", "grad_lse") else array


def _lead(arrays: dict[str, Any]) -> tuple[int, ...]:
    """The common leading axes: those of vmap, then B."""
    known = {"query", "key", "value", "bias", "mask", *LENGTHS} & arrays.keys()
    shapes = (arrays[name].shape for name in known - LENGTHS)
    own = (arrays[name].shape for name in known & LENGTHS)
    return np.broadcast_shapes(*(shape[:-3] for shape in shapes), *own)


def _arguments(arrays: dict[str, Any], options: Settings) -> dict[str, Any]:
    """The arguments of `regard.attention`, whose heads come before rows."""
    query, key, value = (_turned(name, arrays[name]) for name in ("query", "key", "value"))
    queries, keys = query.shape[-2], key.shape[-2]
    rules: list[Mask] = []
    if "mask" in arrays:
        rules.append(Boolean(arrays["mask"]))
    if "query_seq_lengths" in arrays:
        length = arrays["query_seq_lengths"][..., None, None, None]
        rules.append(Boolean(np.arange(queries)[:, None] < length))
    if "key_value_seq_lengths" in arrays:
        rules.append(Lengths(np.clip(arrays["key_value_seq_lengths"], 0, keys)))
    return {
        "query": np.broadcast_to(query, (*_lead(arrays), *query.shape[-3:])),
        "key": key,
        "value": value,
        "mask": reduce(operator.and_, rules) if rules else None,
        "bias": arrays.get("bias"),
        "causal": options.is_causal,
        "window": options.window,
        "offset": 0,
        "scale": options.scale,
    }


def _arrived(arrays: dict[str, Any], *names: str) -> dict[str, Any]:
    """Results and their gradients in regard's layout: (…, H, L, E), and lse (…, H, L)."""
    return {name: _turned(name, arrays[name]) for name in names if name in arrays}


def _attend(arrays: dict[str, Any], options: Settings) -> list[Any]:
    """Output (…, B, T, N, E) and log-sum-exp (…, B, T, N)."""
    output, lse = api.attention(**_arguments(arrays, options), return_lse=True)
    return [_turned("output", output), _turned("lse", lse).astype(output.dtype)]


def _differentiate(arrays: dict[str, Any], options: Settings, wrt: tuple[str, ...]) -> list[Any]:
    arrived = _arrived(arrays, "grad_output", "grad_lse", "output", "lse")
    made = api.gradients(**_arguments(arrays, options), **arrived, wrt=wrt)
    return [_turned(name, getattr(made, name)) for name in wrt]


def _differentiate_again(
    arrays: dict[str, Any], options: Settings, wrt: tuple[str, ...], second: tuple[str, ...]
) -> list[Any]:
    given = (name for name in wrt if f"d_{name}" in arrays)
    arrives = {name: _turned(name, arrays[f"d_{name}"]) for name in given}
    made = dispatch.second_gradients_of_arrays(
        **_arguments(arrays, options),
        **_arrived(arrays, "grad_output", "grad_lse"),
        arrives=arrives,
        wrt=second,
    )
    return [_turned(name, made[name]) for name in second]


def _shapes_of_results(arrays: dict[str, Any], options: Settings) -> list[Any]:
    query, value = arrays["query"], arrays["value"]
    rows = (*_lead(arrays), *query.shape[-3:-1])
    return [((*rows, value.shape[-1]), query.dtype), (rows, query.dtype)]


def _shapes_of_gradients(
    arrays: dict[str, Any],
    options: Settings,
    wrt: tuple[str, ...],
    second: tuple[str, ...] | None = None,
) -> list[Any]:
    names = wrt if second is None else second
    return [(arrays[name].shape, arrays[name].dtype) for name in names]


def _register(
    primitive: Any, compute: Callable[..., list[Any]], shapes: Callable[..., list[Any]]
) -> None:
    """Let JAX run, compile and map a primitive."""

    def called(*operands: Any, names: tuple[str, ...], **params: Any) -> list[Any]:
        arrays = (as_numpy(name, array) for name, array in zip(names, operands, strict=True))
        made = compute(dict(zip(names, arrays, strict=True)), **params)
        return [jnp.asarray(array) for array in made]

    def abstract(*operands: Any, names: tuple[str, ...], **params: Any) -> list[Any]:
        made = shapes(dict(zip(names, operands, strict=True)), **params)
        return [jax.core.ShapedArray(*one) for one in made]

    def compiled(ctx: Any, *operands: Any, names: tuple[str, ...], **params: Any) -> Any:
        def callback(*arrays: Any) -> Any:
            given = dict(zip(names, map(np.asarray, arrays), strict=True))
            return tuple(compute(given, **params))

        avals = ctx.avals_in, ctx.avals_out
        return mlir.emit_python_callback(
            ctx, callback, None, list(operands), *avals, has_side_effect=False
        )[0]

    def batched(operands: Any, axes: Any, **params: Any) -> Any:
        """Add a leading axis to every operand; regard broadcasts what is not mapped.

        For gradients every operand is repeated, because each mapped element has its own gradient.
        """
        size = next(o.shape[a] for o, a in zip(operands, axes, strict=True) if a is not None)
        repeats = 1 if primitive is attention else size
        moved = [
            jnp.broadcast_to(operand, (repeats, *operand.shape))
            if axis is None
            else jnp.moveaxis(operand, axis, 0)
            for operand, axis in zip(operands, axes, strict=True)
        ]
        made = primitive.bind(*moved, **params)
        return made, [0] * len(made)

    primitive.def_impl(called)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, compiled, platform="cpu", cacheable=False)
    batching.primitive_batchers[primitive] = batched


_register(attention, _attend, _shapes_of_results)
_register(_gradients, _differentiate, _shapes_of_gradients)
_register(_second, _differentiate_again, _shapes_of_gradients)


# --- differentiation -----------------------------------------------------------------------------

# JAX gets reverse mode by transposing forward mode, which is linear in the tangents. So each
# primitive has a forward rule that binds a second primitive, `tangent_of_…`: its transpose computes
# the gradients, and it can do nothing else.


def _differentiable(primitive: Any, transposed: Callable[..., dict[str, Any]]) -> None:
    """Let JAX differentiate a primitive in reverse mode.

    `transposed` gets the operands by name, the results, the gradients of the results (None where
    the loss does not depend on one), and the names of the operands whose gradients it returns.
    """
    tangent = _primitive(f"tangent_of_{primitive.name.removeprefix('regard_')}")

    def forward(operands: Any, tangents: Any, *, names: tuple[str, ...], **params: Any) -> Any:
        results = primitive.bind(*operands, names=names, **params)
        moving = [n for n, one in enumerate(tangents) if not isinstance(one, ad.Zero)]
        made = tangent.bind(
            *operands,
            *results,
            *(tangents[n] for n in moving),
            names=names,
            moving=tuple(names[n] for n in moving),
            **params,
        )
        return results, made

    def abstract(
        *operands: Any, names: tuple[str, ...], moving: tuple[str, ...], **_: Any
    ) -> list[Any]:
        results = operands[len(names) : len(operands) - len(moving)]
        return [jax.core.ShapedArray(one.shape, one.dtype) for one in results]

    def backward(
        arrived: Any, *operands: Any, names: tuple[str, ...], moving: tuple[str, ...], **params: Any
    ) -> Any:
        given = dict(zip(names, operands, strict=False))
        results = operands[len(names) : len(operands) - len(moving)]
        arrived = [None if isinstance(one, ad.Zero) else one for one in arrived]
        made = transposed(given, results, arrived, moving, **params)
        return [None] * (len(operands) - len(moving)) + [made[name] for name in moving]

    def refused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "regard has no forward mode (jax.jvp, jacfwd, hessian); use jax.grad, vjp or jacrev, "
            "or differentiate jax.nn.dot_product_attention"
        )

    ad.primitive_jvps[primitive] = forward
    tangent.def_abstract_eval(abstract)
    ad.primitive_transposes[tangent] = backward
    tangent.def_impl(refused)
    mlir.register_lowering(tangent, refused)
    ad.primitive_jvps[tangent] = refused
    batching.primitive_batchers[tangent] = refused


def _pulled_back(
    given: dict[str, Any],
    results: Any,
    arrived: Any,
    wrt: tuple[str, ...],
    *,
    options: Settings,
) -> dict[str, Any]:
    """The gradients of attention."""
    output, lse = results
    grad_output, grad_lse = arrived
    operands = dict(given)
    operands["grad_output"] = jnp.zeros_like(output) if grad_output is None else grad_output
    if grad_lse is not None:
        operands["grad_lse"] = grad_lse
    if output.dtype.itemsize > 2:  # δ needs an output that is not rounded to a half type
        # Detached, because second gradients include how these depend on the inputs.
        operands |= {"output": jax.lax.stop_gradient(output), "lse": jax.lax.stop_gradient(lse)}
    made = _gradients.bind(*operands.values(), names=tuple(operands), options=options, wrt=wrt)
    return dict(zip(wrt, made, strict=True))


def _pulled_back_again(
    given: dict[str, Any],
    results: Any,
    arrived: Any,
    second: tuple[str, ...],
    *,
    options: Settings,
    wrt: tuple[str, ...],
) -> dict[str, Any]:
    """The gradients of the gradients."""
    operands = {name: one for name, one in given.items() if name not in ("output", "lse")}
    arrives = zip(wrt, arrived, strict=True)
    operands |= {f"d_{name}": one for name, one in arrives if one is not None}
    made = _second.bind(
        *operands.values(), names=tuple(operands), options=options, wrt=wrt, second=second
    )
    return dict(zip(second, made, strict=True))


def _third(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "regard computes first and second derivatives, and this asks for the third; differentiate "
        "jax.nn.dot_product_attention"
    )


_differentiable(attention, _pulled_back)
_differentiable(_gradients, _pulled_back_again)
ad.primitive_jvps[_second] = _third

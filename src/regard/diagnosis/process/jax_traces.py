"""Functions of JAX without a compiler: JAX traces them, and NumPy computes what was traced.

JAX compiles every operation for every shape, which takes a hundred times longer than a probe. An
operation that is not listed here is JAX's own. Must not know probes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.boundary.arrays import Array

# How far JAX's own result may be from the one here, relative to the largest number.
NEAR = 1e-5
# The same if numbers are rounded to integers: one in the middle goes here up and there down.
NEAR_INTEGERS = 2e-2


class Untraceable(Exception):
    """JAX has to run this function itself."""


@dataclass(eq=False)
class Traces:
    """The traces of one function: one for each question and the arguments' shapes."""

    known: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)
    usable: bool = True  # False as soon as a trace cannot be made, or gives something else
    checked: bool = False  # whether results need no comparison with those of JAX

    def run(self, name: Hashable, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """What a function of a dictionary of arguments returns; Untraceable if JAX has to say.

        A trace that has a `name` serves all arguments of the same shapes.
        """
        import jax

        if not self.usable:
            raise Untraceable
        fixed = {n: one for n, one in given.items() if isinstance(one, bool | int | float | None)}
        arrays = {n: one for n, one in given.items() if n not in fixed}
        leaves, structure = jax.tree.flatten(arrays)
        shapes = [(one.dtype, one.shape) for one in leaves]
        key = (name, structure, *shapes, *((n, type(one), one) for n, one in fixed.items()))
        first = not self.known
        if key not in self.known:
            trace = jax.make_jaxpr(lambda own: function({**own, **fixed}), return_shape=True)
            try:
                self.known[key] = trace(arrays)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
                self.usable = False
                raise Untraceable from error
        closed, shape = self.known[key]
        try:
            with np.errstate(all="ignore"):
                results = _run(closed.jaxpr, closed.consts, leaves)
            if first and not self.checked:
                _check(closed, leaves, results)
        except Exception as error:
            self.usable = False
            raise Untraceable from error
        return jax.tree.unflatten(jax.tree.structure(shape), results)


def _check(closed: Any, given: Sequence[Array], results: Sequence[Any]) -> None:
    """Compare results with those of JAX."""
    import jax
    from jax.extend.core import jaxpr_as_fun

    own = jax.jit(jaxpr_as_fun(closed))(*given)
    near = NEAR_INTEGERS if any(one.primitive.name == "round" for one in _all_in(closed)) else NEAR
    for pair in zip(own, results, strict=True):
        expected, got = (np.asarray(one, float) for one in pair)
        largest = np.nan_to_num(np.abs(expected)).max(initial=1.0)
        if not agrees(got, expected, near * largest):
            raise NotImplementedError


def agrees(got: Array, expected: Array, tolerance: float) -> bool:
    """Whether two arrays are equal within a tolerance, NaN and infinities included."""
    if got.shape != expected.shape:
        return False
    with np.errstate(all="ignore"):
        near = np.abs(got - expected) <= tolerance
    return bool((near | (got == expected) | (np.isnan(got) & np.isnan(expected))).all())


def _all_in(closed: Any) -> Iterator[Any]:
    """The equations of a trace, and of the traces that it calls."""
    for equation in getattr(closed, "jaxpr", closed).eqns:
        yield equation
        for name in _INNER:
            if hasattr(getattr(equation.params.get(name), "eqns", None), "__iter__"):
                yield from _all_in(equation.params[name])


def _run(jaxpr: Any, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The results of a trace."""
    values: dict[Any, Any] = {}

    def read(one: Any) -> Any:
        return one.val if hasattr(one, "val") else values[one]

    def write(variables: Sequence[Any], results: Sequence[Any]) -> None:
        for variable, result in zip(variables, results, strict=True):
            aval = variable.aval
            if isinstance(result, np.ndarray | np.generic | bool | int | float):
                result = np.asarray(result).astype(aval.dtype, copy=False)
            if result.shape != aval.shape:
                raise NotImplementedError
            values[variable] = result

    write(jaxpr.constvars, constants)
    write(jaxpr.invars, given)
    for equation in jaxpr.eqns:
        operands = [read(one) for one in equation.invars]
        write(equation.outvars, _results(equation, operands))
    return [read(one) for one in jaxpr.outvars]


def _results(equation: Any, operands: list[Any]) -> Sequence[Any]:
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = next(parameters[one] for one in _INNER if one in parameters)
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
    if name == "scan":
        return _scan(parameters, operands)
    if name == "cond":
        branches = parameters["branches"]
        branch = branches[min(max(int(operands[0]), 0), len(branches) - 1)]
        return _run(branch.jaxpr, branch.consts, operands[1:])
    if name == "while":
        return _while(parameters, operands)
    wide = (one.aval.dtype for one in (*equation.invars, *equation.outvars))
    if name in OPERATIONS and all(one in _DTYPES for one in wide):
        parts = [np.asarray(one) for one in operands]
        with contextlib.suppress(NotImplementedError):
            found = OPERATIONS[name](parameters, *parts)
            return found if equation.primitive.multiple_results else [found]
    bound = equation.primitive.get_bind_params(parameters)
    functions, bound = ((), bound) if isinstance(bound, dict) else bound  # before JAX 0.10
    found = equation.primitive.bind(*functions, *operands, **bound)
    return found if equation.primitive.multiple_results else [found]


def _scan(parameters: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    body, length = parameters["jaxpr"], parameters["length"]
    kept, carried = parameters["num_consts"], parameters["num_carry"]
    constants, carry = operands[:kept], operands[kept : kept + carried]
    rows = [np.asarray(one) for one in operands[kept + carried :]]
    places = [one.aval for one in body.jaxpr.outvars[carried:]]
    outputs = [np.empty((length, *one.shape), one.dtype) for one in places]
    steps = range(length)
    for step in reversed(steps) if parameters["reverse"] else steps:
        own = [one[step] for one in rows]
        results = _run(body.jaxpr, body.consts, [*constants, *carry, *own])
        carry = results[:carried]
        for output, result in zip(outputs, results[carried:], strict=True):
            output[step] = result
    return [*carry, *outputs]


def _while(parameters: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    test, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
    first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
    asked, kept = operands[:first], operands[first : first + second]
    carry = list(operands[first + second :])
    while _run(test.jaxpr, test.consts, [*asked, *carry])[0]:
        carry = _run(body.jaxpr, body.consts, [*kept, *carry])
    return carry


def _dot(parameters: Mapping[str, Any], a: Array, b: Array) -> Array:
    (left, right), (left_batch, right_batch) = parameters["dimension_numbers"]
    rows = [one for one in range(a.ndim) if one not in (*left, *left_batch)]
    columns = [one for one in range(b.ndim) if one not in (*right, *right_batch)]

    def sizes(array: Array, axes: Sequence[int]) -> list[int]:
        return [array.shape[one] for one in axes]

    lead, inner = sizes(a, left_batch), math.prod(sizes(a, left))
    shape = (*lead, *sizes(a, rows), *sizes(b, columns))
    first = a.transpose([*left_batch, *rows, *left])
    second = b.transpose([*right_batch, *right, *columns])
    first = first.reshape((*lead, math.prod(sizes(a, rows)), inner))
    second = second.reshape((*lead, inner, math.prod(sizes(b, columns))))
    return np.asarray(first @ second).reshape(shape)


def _broadcast(parameters: Mapping[str, Any], a: Array, *_: Array) -> Array:
    own = [1] * len(parameters["shape"])
    for axis, place in enumerate(parameters["broadcast_dimensions"]):
        own[place] = a.shape[axis]
    return np.broadcast_to(a.reshape(own), parameters["shape"])


def _iota(parameters: Mapping[str, Any]) -> Array:
    axis, shape = parameters["dimension"], parameters["shape"]
    own = [-1 if place == axis else 1 for place in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(own), shape)


def _slice(parameters: Mapping[str, Any], a: Array) -> Array:
    bounds = parameters["start_indices"], parameters["limit_indices"]
    strides = parameters["strides"] or (1,) * a.ndim
    return a[tuple(map(slice, *bounds, strides))]


def _cells(a: Array, sizes: Sequence[int], starts: Sequence[Array]) -> tuple[slice, ...]:
    """A block of these sizes; one that would end outside begins earlier."""
    begins = [
        min(max(int(x), 0), n - own) for x, n, own in zip(starts, a.shape, sizes, strict=True)
    ]
    return tuple(slice(x, x + own) for x, own in zip(begins, sizes, strict=True))


def _updated(_: Mapping[str, Any], a: Array, block: Array, *starts: Array) -> Array:
    a = a.copy()
    a[_cells(a, block.shape, starts)] = block
    return a


def _select(_: Mapping[str, Any], which: Array, *cases: Array) -> Array:
    return np.asarray(np.choose(which.astype(int), cases))


def _cumulative(parameters: Mapping[str, Any], a: Array) -> Array:
    axis = parameters["axis"]
    if parameters["reverse"]:
        return np.flip(np.cumsum(np.flip(a, axis), axis), axis)
    return np.cumsum(a, axis)


def _parts(parameters: Mapping[str, Any], a: Array) -> list[Array]:
    return np.split(a, np.cumsum(parameters["sizes"])[:-1], parameters["axis"])


def _divided(_: Mapping[str, Any], a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))  # towards 0


def _cellwise(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *operands: operation(*operands)


def _gathered(parameters: Mapping[str, Any], a: Array, at: Array) -> Array:
    """Blocks of an array from where each row of `at` says, as an array of indices reads."""
    how, sizes, mode = (
        parameters["dimension_numbers"],
        parameters["slice_sizes"],
        parameters["mode"],
    )
    dropped = {*how.collapsed_slice_dims, *how.operand_batching_dims}
    kept = [axis for axis in range(a.ndim) if axis not in dropped]
    lead = at.shape[:-1]
    index: list[Array] = []
    inside = np.ones((*lead, *(1,) * len(kept)), bool)
    for axis, (length, size) in enumerate(zip(a.shape, sizes, strict=True)):
        start = np.zeros(lead, np.int64)
        if axis in how.start_index_map:
            start = at[..., how.start_index_map.index(axis)].astype(np.int64)
        elif axis in how.operand_batching_dims:
            own = how.start_indices_batching_dims[how.operand_batching_dims.index(axis)]
            shape = [-1 if place == own else 1 for place in range(len(lead))]
            start = np.broadcast_to(np.arange(length).reshape(shape), lead)
        whole = start.reshape((*lead, *(1,) * len(kept)))
        inside = inside & (whole >= 0) & (whole <= length - size)
        whole = np.clip(whole, 0, length - size)
        if axis in kept:
            shape = [-1 if axis == one else 1 for one in kept]
            whole = whole + np.arange(size).reshape(shape)
        index.append(whole)
    found = a[tuple(index)]
    if not inside.all() and "FILL" in str(mode):
        if a.dtype.kind != "f":
            raise NotImplementedError
        found = np.where(inside, found, np.nan)
    return np.moveaxis(found, range(len(lead), found.ndim), how.offset_dims)


def _rounded(parameters: Mapping[str, Any], a: Array) -> Array:
    if "EVEN" in str(parameters["rounding_method"]):
        return np.rint(a)
    return np.sign(a) * np.floor(np.abs(a) + 0.5)


def _padded(parameters: Mapping[str, Any], a: Array, fill: Array) -> Array:
    edges = parameters["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in edges):
        raise NotImplementedError
    return np.pad(a, [(low, high) for low, high, _ in edges], constant_values=fill)


def _over(operation: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda parameters, a: operation(a, axis=tuple(parameters["axes"]), **options)


# Calls of another trace, and the parameter that has it.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_KNOWN = ("bool", "int8", "uint8", "int32", "int64", "uint32", "float32", "float64")
_DTYPES = {np.dtype(name) for name in _KNOWN}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _cellwise(getattr(np, own))
        for name, own in {
            **{one: one for one in ("exp", "exp2", "expm1", "log1p", "log", "sin", "cos", "tanh")},
            **{one: one for one in ("sqrt", "square", "abs", "sign", "floor", "ceil")},
            **dict(add="add", add_any="add", sub="subtract", mul="multiply", neg="negative"),
            **dict(max="maximum", min="minimum", pow="power", rem="fmod", is_finite="isfinite"),
            **dict(eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater"),
            **dict(ge="greater_equal", xor="bitwise_xor", **{"not": "bitwise_not"}),
            **{"and": "bitwise_and", "or": "bitwise_or"},
        }.items()
    },
    "div": _divided,
    "rsqrt": _cellwise(lambda a: 1 / np.sqrt(a)),
    "logistic": _cellwise(lambda a: 1 / (1 + np.exp(-a))),
    "integer_pow": lambda parameters, a: a ** parameters["y"],
    "clamp": _cellwise(lambda low, a, high: np.minimum(np.maximum(a, low), high)),
    "select_n": _select,
    **dict.fromkeys(
        ("stop_gradient", "copy", "copy_p", "convert_element_type"), _cellwise(lambda a: a)
    ),
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda parameters, a: a.reshape(parameters["new_sizes"]),
    "squeeze": lambda parameters, a: np.squeeze(a, tuple(parameters["dimensions"])),
    "transpose": lambda parameters, a: a.transpose(parameters["permutation"]),
    "rev": lambda parameters, a: np.flip(a, tuple(parameters["dimensions"])),
    "concatenate": lambda parameters, *a: np.concatenate(a, parameters["dimension"]),
    "iota": _iota,
    "slice": _slice,
    "dynamic_slice": lambda parameters, a, *at: a[_cells(a, parameters["slice_sizes"], at)],
    "dynamic_update_slice": _updated,
    "split": _parts,
    "cumsum": _cumulative,
    "reduce_sum": _over(np.sum),
    "reduce_max": _over(np.max),
    "reduce_min": _over(np.min),
    "reduce_and": _over(np.all),
    "reduce_or": _over(np.any),
    "reduce_prod": _over(np.prod),
    "gather": _gathered,
    "round": _rounded,
    "pad": _padded,
    "argmin": lambda parameters, a: np.argmin(a, parameters["axes"][0]),
    "argmax": lambda parameters, a: np.argmax(a, parameters["axes"][0]),
}

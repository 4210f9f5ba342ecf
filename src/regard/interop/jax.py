"""JAX's attention call, computed by regard, also within jit and vmap.

`dot_product_attention` has the signature of the function in `jax.nn`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from regard.boundary import answering
from regard.boundary.arguments import as_number
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.interop.jax_primitives import Settings, attention
from regard.masks import Window

__all__ = ["dot_product_attention"]


def __dir__() -> list[str]:
    return __all__


DTYPES = ("float16", "bfloat16", "float32", "float64")


class Options(TypedDict, total=False):
    """Options of `dot_product_attention`, for type checkers."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@answering
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    r"""softmax(scale·Q·Kᵀ + bias)·V on JAX's CPU arrays, with JAX's signature and layout.

    Rows come before heads: B batch, T queries, S keys, N query heads, K key heads, H width.

    Parameters
    ----------
    query : array, (B, T, N, H) or (T, N, H)
        float16, bfloat16, float32 or float64.
    key, value : array, (B, S, K, H) or (S, K, H)
        The same dtype; N is a multiple of K. value may have another width.
    bias : array, broadcastable to (B, N, T, S), optional
        Added after the scale.
    mask : array of bool, broadcastable to (B, N, T, S), optional
        True = attend.
    scale : float, optional
        Default 1/√H. A number, not a traced array.
    is_causal : bool
        Query i sees key j only if j ≤ i, also if T ≠ S.
    query_seq_lengths, key_value_seq_lengths : array of int32, (B,), optional
        Later queries give 0, later keys are hidden.
    local_window_size : int or (left, right), optional
        Query i sees keys i − left … i + right.
    implementation : None
        Must be None.
    return_residual : bool
        Return the log-sum-exp (B, T, N) or (T, N) too.

    Returns
    -------
    array, (B, T, N, H) or (T, N, H), or a tuple (output, residual)
        In query's dtype.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        When called or traced with invalid arguments.
    NotImplementedError
        For forward mode (jvp, jacfwd, hessian) and third derivatives.

    Notes
    -----
    Gradients of query, key, value and bias, the residual's too, are those of `regard.gradients`
    (jax.grad, vjp, jacrev); they have gradients too, made by the reference kernel with a matrix
    T × S for each head.

    Unlike in JAX, a query that sees no key gives 0 and the residual −inf (JAX: the mean of all
    values); a hidden key or value, NaN included, has no influence; half-type weights are not
    rounded before the product with the values; float64 (``jax_enable_x64``) is float64 throughout
    (JAX: softmax in float32, accurate to about 1e-7).

    References
    ----------
    JAX's documentation of ``jax.nn.dot_product_attention``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> query = jnp.eye(2)[:, None]  # two queries, one head, two wide
    >>> value = jnp.array([[[10.0, 0.0]], [[0.0, 10.0]]])
    >>> jax.jit(lambda q, v: dot_product_attention(q, q, v, is_causal=True))(query, value)[:, 0]
    Array([[10.       ,  0.       ],
           [ 3.3023846,  6.6976156]], dtype=float32)
    """
    if implementation is not None:
        raise OptionError(
            f"implementation is {safe_text(repr(implementation), 60)}; it must be None, or call "
            "jax.nn.dot_product_attention"
        )
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays = {name: _as_jax(name, array) for name, array in given.items() if array is not None}
    shapes = {name: array.shape for name, array in arrays.items()}
    batched = arrays["query"].ndim != 3
    for name, array in arrays.items():
        arrays[name] = array.reshape(*(1,) * (4 - array.ndim), *array.shape)
    lengths = {"query_seq_lengths": query_seq_lengths}
    lengths |= {"key_value_seq_lengths": key_value_seq_lengths}
    arrays |= {name: _as_jax(name, own) for name, own in lengths.items() if own is not None}
    _check(arrays, shapes)
    options = Settings(_number(scale), bool(is_causal), _window(local_window_size))
    output, residual = attention.bind(*arrays.values(), names=tuple(arrays), options=options)
    if not batched:
        output, residual = output[0], residual[0]
    return (output, residual) if return_residual else output


# --- checks, when called or traced ---------------------------------------------------------------


def _check(arrays: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Check shapes and dtypes, which is all that is known within jit; `shapes` are as given."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    for name, array in list(arrays.items())[:3]:
        if array.ndim != 4:
            count = len(shapes[name])
            raise ShapeError(f"{name} has {count} axes; it must have 3 or 4: ([B,] T, N, H)")
        if array.dtype.name not in DTYPES or array.dtype != query.dtype:
            raise DtypeError(
                f"{name} has dtype {array.dtype} and query {query.dtype}; "
                f"all three must have one of {', '.join(DTYPES)}"
            )
    batch, queries, heads, width = query.shape
    keys = key.shape[1]
    if key.shape[::3] != (batch, width) or value.shape[:3] != key.shape[:3]:
        raise ShapeError(
            f"query {shapes['query']}, key {shapes['key']} and value {shapes['value']} do not fit: "
            "they must be (B, T, N, H), (B, S, K, H) and (B, S, K, H)"
        )
    if key.shape[2] == 0 or heads % key.shape[2]:
        raise ShapeError(
            f"query has {heads} heads but key has {key.shape[2]}; "
            "the number of query heads must be a multiple of the number of key heads"
        )
    scores = (batch, heads, queries, keys)
    for name in ("bias", "mask"):
        if name in arrays:
            own = arrays[name].shape
            if len(own) != 4 or any(a not in (1, b) for a, b in zip(own, scores, strict=True)):
                raise ShapeError(
                    f"{name} {shapes[name]} does not broadcast to (B, N, T, S) = {scores}"
                )
    if "mask" in arrays and arrays["mask"].dtype != np.bool_:
        raise DtypeError(
            f"mask must be boolean, True = attend, but has dtype {arrays['mask'].dtype}; "
            "pass numbers to add as bias="
        )
    if "bias" in arrays and arrays["bias"].dtype.name not in DTYPES:
        raise DtypeError(
            f"bias has dtype {arrays['bias'].dtype}; it must be one of {', '.join(DTYPES)}"
        )
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in arrays and (arrays[name].shape, arrays[name].dtype) != ((batch,), np.int32):
            raise ShapeError(
                f"{name} must be {batch} int32 numbers, one per batch element, not "
                f"{arrays[name].dtype} {arrays[name].shape}"
            )


def _as_jax(name: str, given: Any) -> Any:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError) as error:
        reason = safe_text(str(error).partition("\n")[0], 120)
        raise DtypeError(f"{name} is not an array that JAX accepts: {reason}") from None


def _number(scale: Any) -> float | None:
    if isinstance(scale, jax.core.Tracer):
        raise OptionError("scale is traced; it must be a number")
    number = None if scale is None else as_number("scale", scale)
    if number is not None and not math.isfinite(number):
        raise OptionError(f"scale is {number}; it must be a finite number (None: 1/√H)")
    return number


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or None in sides:
        raise OptionError(
            "local_window_size must be an int or a pair (left, right) of ints, not "
            f"{safe_text(repr(window), 60)}"
        )
    rule = Window(*sides)  # checks both sides
    return int(rule.left or 0), int(rule.right or 0)

"""The backward pass of attention, as a public function: its docstring and a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from regard.boundary import answering, taking
from regard.boundary.arrays import lend
from regard.compute.options import DEFAULTS
from regard.errors import naming_shapes

if TYPE_CHECKING:
    from regard.boundary.arrays import Array
    from regard.compute.option_types import GradientOptions, Numbers, SomeGradientOptions, T
    from regard.compute.results import Gradients


@overload
def gradients(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    grad_output: Numbers,
    **options: Unpack[GradientOptions],
) -> Gradients[Array]: ...
@overload
def gradients(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    grad_output: Numbers,
    **options: Unpack[SomeGradientOptions],
) -> Gradients[Array | None]: ...
@overload
def gradients(
    query: T,
    key: T | Numbers,
    value: T | Numbers,
    grad_output: T | Numbers,
    **options: Unpack[GradientOptions],
) -> Gradients[T]: ...
@overload
def gradients(
    query: T,
    key: T | Numbers,
    value: T | Numbers,
    grad_output: T | Numbers,
    **options: Unpack[SomeGradientOptions],
) -> Gradients[T | None]: ...
@answering
@taking(DEFAULTS, "return_weights", "return_lse", "out", before="precision")
def gradients(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    *,
    output: Any = None,
    lse: Any = None,
    grad_lse: Any = None,
    wrt: Any = ("query", "key", "value"),
    **options: Any,
) -> Any:
    r"""The gradients of attention: how a loss changes with each number of its inputs.

    With P the weights, O the output, X the logits (the scores after scale, softcap and bias), and
    dO the gradient of the loss with respect to O: dV = Pᵀ·dO, dP = dO·Vᵀ, δ = Σ_e dO∘O − dlse,
    dX = P∘(dP − δ), dQ = scale·dX·K, dK = scale·dXᵀ·Q, where ∘ multiplies cell by cell. With a
    softcap, dX is multiplied by its slope before dQ and dK.

    Parameters
    ----------
    query, key, value : array_like of floats
        As for `attention`.
    grad_output : array_like, (…, H, L, E)
        The gradient of the loss with respect to the output, in its shape and dtype.
    mask, bias, causal, window, offset, scale, softcap, sink
        The options of the call of `attention` whose gradients are computed.
    output, lse : array_like, (…, H, L, E) and (…, H, L), optional
        What `attention` returned with ``return_lse=True``, which saves computing it again. An
        output of a half type is computed again, because δ needs it unrounded; ``out=`` a float32
        array makes `attention` leave it so.
    grad_lse : array_like, (…, H, L), optional
        The gradient of the loss with respect to lse, where the loss depends on it.
    wrt : str or names, optional
        Which gradients to compute: "query", "key", "value", "bias", "sink", "scale", and what a
        score, a normalization or positions are given, such as "score.W", "normalize.bias" or
        "positions.table".
    precision : {"working", "high", "exact"}
        "exact" accumulates float32 and half inputs in float64 and rounds once; "high" is "working".
    kernel, threads
        As for `attention`. The result does not depend on the number of threads.
    score, normalize, positions
        As for `attention`: those of its call.

    Returns
    -------
    Gradients
        A named tuple (query, key, value, bias, sink, scale, parameters), None where not asked for.
        Each has the shape and dtype of its input, summed over axes along which the input was
        broadcast; scale is a float, and parameters a dictionary of those of score, normalize and
        positions.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `attention`; also for integer inputs, and for an output or lse that does not belong
        to the inputs.

    Notes
    -----
    A hidden key and its value have gradient 0, whatever they hold, and change no other gradient. A
    query that sees no key has gradient 0. No matrix of weights is made. Inputs of half types
    accumulate in float32, so each gradient is rounded once.

    References
    ----------
    Dao, "FlashAttention-2" (2023), section 3.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> grads = gradients(x, x, x, np.ones((2, 2)), causal=True)
    >>> grads.value.round(3)
    array([[1.33, 1.33],
           [0.67, 0.67]])
    """
    from regard.compute.dispatch import gradients_of_arrays

    (query, key, value, grad_output, output, lse, grad_lse), give_back = lend(
        query=query,
        key=key,
        value=value,
        grad_output=grad_output,
        output=output,
        lse=lse,
        grad_lse=grad_lse,
    )
    with naming_shapes(query=query, key=key, value=value, grad_output=grad_output):
        given = {"output": output, "lse": lse, "grad_lse": grad_lse}
        result = gradients_of_arrays(query, key, value, grad_output, **given, wrt=wrt, **options)
    return give_back(result)

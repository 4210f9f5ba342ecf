"""The public functions, each a docstring and a few lines: attention, and its weights, here.

`backward` has its gradients, `explaining` why a number is what it is. Must not compute anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from numpy import ndarray

from regard.boundary import NOTHING, answering, refused, taking
from regard.boundary.arrays import lend, unchanged, untraced
from regard.compute.native import fast_path
from regard.compute.options import BY_POSITION, DEFAULTS, NOT_OF_WEIGHTS, Options
from regard.errors import naming_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.api.backward import gradients
    from regard.api.explaining import diagnose, explain
    from regard.boundary.arrays import Array
    from regard.compute.option_types import (
        F,
        ForBoth,
        ForLse,
        ForWeights,
        LinearOptions,
        Numbers,
        Plain,
        T,
        WeightsOptions,
    )
    from regard.compute.results import OutputLse, OutputWeights, OutputWeightsLse


__all__ = ["attention", "diagnose", "explain", "gradients", "linear_attention", "weights"]

# What plain attention does not need is loaded when it is first asked for.
_LAZY = {"gradients": "backward", "explain": "explaining", "diagnose": "explaining"}

if not TYPE_CHECKING:  # a checker knows the names above

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'regard.api' has no attribute {name!r}")
        return getattr(import_module(f"regard.api.{_LAZY[name]}"), name)


@overload
def attention(
    query: NDArray[F], key: NDArray[F], value: NDArray[F], **options: Unpack[Plain[NDArray[F]]]
) -> NDArray[F]: ...
@overload
def attention(
    query: NDArray[F], key: NDArray[F], value: NDArray[F], **options: Unpack[ForWeights[NDArray[F]]]
) -> OutputWeights[NDArray[F]]: ...
@overload
def attention(
    query: NDArray[F], key: NDArray[F], value: NDArray[F], **options: Unpack[ForLse[NDArray[F]]]
) -> OutputLse[NDArray[F]]: ...
@overload
def attention(
    query: NDArray[F], key: NDArray[F], value: NDArray[F], **options: Unpack[ForBoth[NDArray[F]]]
) -> OutputWeightsLse[NDArray[F]]: ...
@overload
def attention(
    query: Numbers, key: Numbers, value: Numbers, **options: Unpack[Plain[Array]]
) -> Array: ...
@overload
def attention(
    query: Numbers, key: Numbers, value: Numbers, **options: Unpack[ForWeights[Array]]
) -> OutputWeights[Array]: ...
@overload
def attention(
    query: Numbers, key: Numbers, value: Numbers, **options: Unpack[ForLse[Array]]
) -> OutputLse[Array]: ...
@overload
def attention(
    query: Numbers, key: Numbers, value: Numbers, **options: Unpack[ForBoth[Array]]
) -> OutputWeightsLse[Array]: ...
@overload
def attention(query: T, key: T | Numbers, value: T | Numbers, **options: Unpack[Plain[T]]) -> T: ...
@overload
def attention(
    query: T, key: T | Numbers, value: T | Numbers, **options: Unpack[ForWeights[T]]
) -> OutputWeights[T]: ...
@overload
def attention(
    query: T, key: T | Numbers, value: T | Numbers, **options: Unpack[ForLse[T]]
) -> OutputLse[T]: ...
@overload
def attention(
    query: T, key: T | Numbers, value: T | Numbers, **options: Unpack[ForBoth[T]]
) -> OutputWeightsLse[T]: ...
@taking(DEFAULTS)
def attention(
    query: Any = NOTHING,
    key: Any = NOTHING,
    value: Any = NOTHING,
    more: Any = NOTHING,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    offset: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    precision: Literal["working", "high", "exact"] = "working",
    return_weights: bool = False,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    threads: int | None = None,
    **unknown: Any,
) -> Any:
    r"""Scaled dot-product attention: softmax(scale·Q·Kᵀ + bias)·V over the visible keys.

    scores = Q·Kᵀ → × scale → softcap → + bias → mask → softmax → · V, in this order, where
    B is batch, H query heads, G key heads, L queries, S keys, D key width, E value width.

    Parameters
    ----------
    query : array_like, (…, H, L, D)
        Also (L, D) without heads, or one query (D,).
    key : array_like, (…, G, S, D)
        H must be a multiple of G; query head h reads key head h // (H // G).
    value : array_like, (…, G, S, E)
        E may differ from D. Leading axes broadcast by NumPy's rules, without a copy.
    mask : array_like of bool or mask, broadcastable to (…, H, L, S), optional
        True = attend. Or rules from `regard.masks`, combined with ``&``, ``|`` and ``~``.
    bias : array_like, broadcastable to (…, H, L, S), optional
        Added after scale and softcap. −inf hides a key exactly as False in a mask does.
    causal : bool
        Query i sees key j only if j ≤ i + offset.
    window : (left, right), optional
        Query i sees keys i + offset − left … i + offset + right; None is unbounded.
    offset : int, (B,) ints or "end", optional
        Query i is at position i + offset. Required when L ≠ S and causal or window is used: 0
        aligns the first query with the first key, "end" the last with the last; beside `Segments`
        those of each text, and beside `Lengths` "end" is the last key that they leave.
    scale : float, optional
        1/√D if None. Applied once, to Q·Kᵀ only.
    softcap : float, optional
        c·tanh(x / c) on the scaled scores, before bias and mask.
    sink : float or array_like (H,), optional
        A logit without a value that takes part in the softmax of each row; 0 gives softmax1.
    precision : {"working", "high", "exact"}
        "exact" accumulates float32 and half inputs in float64 and rounds once. "high" keeps weights
        in float32 where a CPU with AVX512-BF16 would round them to bfloat16: half the speed, and an
        error of 0.42 instead of 0.57 units; elsewhere it is "working".
    return_weights, return_lse : bool
        Also return the weights (…, H, L, S), the log-sum-exp (…, H, L).
    out : ndarray or tensor, optional
        Receives the output; must have its shape and its dtype, or the one that it is computed in:
        float32 for half inputs, which `gradients` takes without computing it again. Overlap with an
        input costs a copy.
        After an interrupt it may be partly written.
    kernel : str, optional
        The kernel to use, never replaced by another. See `regard.show_config`.
    threads : int, optional
        Maximum number of threads. The result does not depend on it.
    score : "dot" or an object of `regard.scores`
        How a query and a key are compared; with another score than the dot product, `scale` is 1
        if None.
    normalize : "softmax" or an object of `regard.normalizers`
        How logits become weights. `regard.show_config` lists the kernels that know each score and
        normalization; the reference computes those that are not plain in float64, rounded once.
    positions : object of `regard.positions`, optional
        Where queries and keys are: `Rotary` turns them, `Alibi` and `RelativeBias` are added after
        scale and softcap. Query i is at i + offset, so that offset is required when L ≠ S.

    Returns
    -------
    ndarray, (…, H, L, E), or a named tuple (output[, weights][, lse])
        In the dtype of the inputs, promoted by NumPy's rules; integers give float64. A row that
        sees no key is 0, its weights are 0, its lse is −inf (or the sink). Arrays of another
        library if query, key, value or out is one.

    Raises
    ------
    ShapeError, OptionError
        Shapes that do not fit, invalid options; both are ValueErrors.
    DtypeError
        A TypeError: complex, object, longdouble or masked arrays, masks that are not boolean,
        arrays of two other libraries, on another device, lazy, traced or requiring a gradient.

    Notes
    -----
    CPU arrays of any library with DLPack, such as PyTorch and JAX, are read without a copy, and
    may be mixed with NumPy arrays. The content of a hidden key or value (NaN, infinity, garbage)
    never changes the result. For arrays in (B, L, H, D) order pass ``query.swapaxes(-3, -2)``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> query = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> value = np.array([[10.0, 0.0], [0.0, 10.0]])
    >>> attention(query, query, value, causal=True).round(3)
    array([[10.   ,  0.   ],
           [ 3.302,  6.698]])
    """
    given = (query, key, value, mask, bias, causal, window, offset, scale, softcap, sink, precision,
             return_weights, return_lse, out, kernel, threads)  # fmt: skip
    if type(query) is ndarray and more is NOTHING:
        answer = _placed_answer(given, **unknown) if unknown else fast_path(*given)
        if answer is not None:
            return answer
    return untraced(_answer)(given, more, unknown)


def _answer(given: tuple[Any, ...], more: Any, rare: dict[str, Any]) -> Any:
    """What `attention` returns for a call that the fast path declined, or was not asked for."""
    query, key, value, *stated = given
    if more is not NOTHING or query is NOTHING or key is NOTHING or value is NOTHING:
        raise _refusal(given, more, rare)
    try:
        options = Options(*stated, **rare)
    except TypeError:
        raise _refusal(given, more, rare) from None
    (query, key, value, out), give_back = lend(query=query, key=key, value=value, out=options.out)
    options = options if give_back is unchanged else options._replace(out=out)
    # What other libraries lent is arrays now, of which the fast path was not asked.
    given = (query, key, value, *options[:BY_POSITION])
    answer = None if give_back is unchanged else _fast_answer(given, rare)
    if answer is None:
        # Deferred: the fast path does not need it, and `import regard` stays quick.
        from regard.compute.dispatch import run_arrays

        with naming_shapes(query=query, key=key, value=value):
            answer = run_arrays(query, key, value, options)
    return give_back(answer)


def _fast_answer(given: tuple[Any, ...], rare: dict[str, Any]) -> Any:
    return _placed_answer(given, **rare) if rare else fast_path(*given)


def _placed_answer(given: tuple[Any, ...], /, *, positions: Any = None, **others: Any) -> Any:
    """The answer of the fast path, which takes some positions, and nothing else that is rare."""
    if others or positions is None:
        return None
    from regard.compute.positioned import fast

    placed = fast(positions, *given[:2])
    return None if placed is None else fast_path(*given, placed)


def _refusal(given: tuple[Any, ...], more: Any, unknown: dict[str, Any]) -> TypeError:
    """What to raise for arguments that `attention` does not take, or that it lacks."""
    if more is not NOTHING:
        return refused(attention, (*given[:3], more), unknown)
    inputs = dict(zip(("query", "key", "value"), given, strict=False)) | unknown
    return refused(attention, (), {n: one for n, one in inputs.items() if one is not NOTHING})


@overload
def weights(
    query: NDArray[F], key: NDArray[F], lse: Array, **options: Unpack[WeightsOptions]
) -> NDArray[F]: ...
@overload
def weights(
    query: Numbers, key: Numbers, lse: Numbers, **options: Unpack[WeightsOptions]
) -> Array: ...
@overload
def weights(
    query: T, key: T | Numbers, lse: T | Numbers, **options: Unpack[WeightsOptions]
) -> T: ...
@answering
@taking(DEFAULTS, *NOT_OF_WEIGHTS)
def weights(
    query: Any,
    key: Any,
    lse: Any,
    *,
    rows: Any = None,
    **options: Any,
) -> Any:
    r"""The weights of some rows of an earlier call: exp(scores − lse), 0 where hidden.

    A row costs O(S·D), as one query does; no other row is computed.

    Parameters
    ----------
    query, key : array_like, (…, H, L, D) and (…, G, S, D)
        All queries and keys of that call.
    lse : array_like, (…, H, L)
        As that call returned it with ``return_lse=True``. With an lse over more keys, such as
        `merge` returns, the weights are these keys' share of the whole.
    rows : int, slice or (rows,) ints, optional
        The queries, in any order; negative numbers count from the end. None: all.
    mask, bias, causal, window, offset, scale, softcap, sink, kernel, threads, positions
        As for `attention`; give what that call was given.
    score
        As for `attention`: "dot", or one that is a dot product of rows, such as General or Cosine.

    Returns
    -------
    ndarray, (…, H, rows, S)
        Without the axis of rows for an int. In the promoted dtype of query and key.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `attention`; also if lse does not have one number per row, or is smaller than the
        log-sum-exp of the keys that a row sees.

    Notes
    -----
    Sums run in float64, so each weight is the exact one, rounded once. A difference between lse
    and the recomputed log-sum-exp counts only where rounding cannot explain it, above

        u·((D + 16)·(\|scale\|·max ‖q‖·‖k‖ + max \|bias\| + \|sink\|) + S + 16 + 4·\|lse\|)

    over the keys that the row sees, where u is half the distance from 1 to the next number in the
    dtype of lse. This also bounds the relative error of a share.

    References
    ----------
    Milakov, Gimelshein, "Online normalizer calculation for softmax" (2018).

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> lse = attention(x, x, x, causal=True, return_lse=True).lse
    >>> weights(x, x, lse, rows=-1, causal=True).round(3)
    array([0.248, 0.248, 0.503])
    """
    from regard.compute.recompute_weights import weights_of_rows

    (query, key, lse), give_back = lend(query=query, key=key, lse=lse)
    with naming_shapes(query=query, key=key, lse=lse):
        result = weights_of_rows(query, key, lse, rows=rows, **options)
    return give_back(result)


@overload
def linear_attention(
    query: Numbers, key: Numbers, value: Numbers, **options: Unpack[LinearOptions]
) -> Array: ...
@overload
def linear_attention(
    query: T, key: T | Numbers, value: T | Numbers, **options: Unpack[LinearOptions]
) -> T: ...
@answering
def linear_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    feature_map: Literal["elu+1"] = "elu+1",
    causal: bool = False,
    offset: Any = None,
) -> Any:
    r"""Linear attention: Σ_j φ(q)·φ(k_j)·v_j / Σ_j φ(q)·φ(k_j), in time and memory linear in S.

    The sums over keys are made first, so that no table of scores is: L·S·D products become
    (L + S)·D·E.

    Parameters
    ----------
    query, key, value : array_like, (…, H, L, D), (…, G, S, D) and (…, G, S, E)
        As for `attention`.
    feature_map : {"elu+1"}
        φ(x) = x + 1 above 0, else exp(x), for each feature.
    causal, offset
        As for `attention`.

    Returns
    -------
    ndarray, (…, H, L, E)
        Computed in float64 and rounded once. A row that sees no key is 0.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `attention`.

    Notes
    -----
    ``attention(…, score=regard.scores.Features(), normalize=regard.normalizers.Proportional())`` is
    the same up to rounding, through a table of scores; with these, `explain` shows its steps and
    `gradients` has its gradients.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> linear_attention(x, x, x, causal=True).round(3)
    array([[1.   , 0.   ],
           [0.444, 0.556]])
    """
    from regard.compute import linear
    from regard.compute.request import make_request
    from regard.normalizers import Proportional
    from regard.scores import Features, check_map

    check_map("feature_map", feature_map)
    (query, key, value), give_back = lend(query=query, key=key, value=value)
    score, normalize = Features(feature_map), Proportional()
    with naming_shapes(query=query, key=key, value=value):
        request = make_request(
            query, key, value, causal=causal, offset=offset, score=score, normalize=normalize
        )
    return give_back(linear.run(request))

"""The public functions, each a docstring and a few lines. Must not compute anything itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from numpy import ndarray

from regard.boundary import NOTHING, answering, refused, taking
from regard.boundary.arrays import lend, unchanged, untraced
from regard.compute.native import fast_path
from regard.compute.options import BY_POSITION, DEFAULTS, NOT_OF_WEIGHTS, Options
from regard.errors import naming_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.boundary.arrays import Array
    from regard.compute.option_types import (
        ArrayIn,
        F,
        ForBoth,
        ForLse,
        ForWeights,
        GradientOptions,
        LabelledOptions,
        LinearOptions,
        Numbers,
        Plain,
        ProblemOptions,
        SomeGradientOptions,
        T,
        WeightsOptions,
    )
    from regard.compute.results import Gradients, OutputLse, OutputWeights, OutputWeightsLse
    from regard.faces import Diagnosis, Explanation
    from regard.problems.fields import PartsOptions
    from regard.problems.problem import Problem


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
    options = options._replace(out=out)
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


@overload
def explain(query: Problem, **options: Unpack[ProblemOptions]) -> Explanation: ...
@overload
def explain(query: ArrayIn = ..., **options: Unpack[PartsOptions]) -> Explanation: ...
@overload
def explain(
    query: ArrayIn, key: ArrayIn, value: ArrayIn, **options: Unpack[LabelledOptions]
) -> Explanation: ...
@answering
def explain(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    softmax: Literal["shifted", "unshifted"] | None = None,
    labels: Sequence[str] | None = None,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    key_features: Sequence[str] | None = None,
    value_features: Sequence[str] | None = None,
    title: str | None = None,
    **options: Any,
) -> Explanation:
    """Every step of one attention, each number traceable to its source.

    Parameters
    ----------
    query : array_like, (…, H, L, D), or a Problem
        With a `Problem`, key, value and labels come from it and options override its own; None
        takes away what the problem states. Without key and value, the embeddings (L, M).
    key, value : array_like, (…, G, S, D) and (…, G, S, E)
        As for `attention`.
    softmax : {"shifted", "unshifted"}, optional
        Whether each row's maximum is subtracted before exp. Textbooks often leave it out; then
        scores above 709 overflow.
    labels : sequence of str, optional
        Names of the rows in self-attention, where query, key and value have the same.
    query_labels, key_labels : sequence of str, optional
        Names of the rows of query and of key and value; if not given, the labels of DataFrames,
        or numbers.
    key_features, value_features : sequence of str, optional
        Names of the columns, found likewise.
    title : str, optional
        Shown with every view.
    target : array_like, the shape of the output, optional
        What the output should be. The loss is L = ½ Σ (output − target)², one for each batch
        element, and the explanation goes on with its gradients, back to every given number.
    grad_output : array_like, the shape of the output, optional
        In place of a target: the gradient of another loss with respect to the output.
    **options
        mask, bias, causal, window, offset, scale, softcap and sink, as for `attention`; and what a
        `Problem` has besides: W_q, W_k and W_v, which embeddings need, a context, heads, W_o, ….

    Returns
    -------
    Explanation
        The steps in float64, computed when asked for; printing it gives a short table.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `attention`; labels that are too many or too few are a ShapeError, and so is a
        target of another shape than the output. A target must be finite.
    ProblemError
        As for `Problem`, where parts of one are given.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.eye(2)
    >>> explanation = explain(x, x, x, labels=["a", "b"])
    >>> explanation.steps["weights"].value.round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    >>> print(explanation.why("scaled", "a", "a"))
    A_s[a, a] = 0.70710678    A_s = A / √D
      A[a, a] · scale = 1 × 0.70710678
      (numbers are rounded to 8 decimals; the result is of unrounded ones)
    >>> explain(x, W_q=2 * x, W_k=x, W_v=x)["queries"].value
    array([[2., 0.],
           [0., 2.]])
    >>> explanation = explain(x, x, x, target=np.zeros((2, 2)))
    >>> explanation["d_values"].value.round(3)
    array([[0.558, 0.442],
           [0.442, 0.558]])
    """
    # Explaining loads as much again as computing; a plain `import regard` does not pay for it.
    from regard.explanation.build import explain_call
    from regard.faces import Explanation

    names = {"labels": labels, "query_labels": query_labels, "key_labels": key_labels}
    names |= {"key_features": key_features, "value_features": value_features}
    options |= {n: own for n, own in (("softmax", softmax), ("title", title)) if own is not None}
    return Explanation.of(explain_call(query, key, value, names, options))


@answering
def diagnose(
    function: Callable[..., Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
    mask: Literal["attend", "hide", "add"] | None = None,
    causal: bool | Literal["start", "end"] | None = None,
    window: Literal["inclusive", "exclusive"] | None = None,
    scale: float | Literal["none"] | None = None,
    heads: int | None = None,
    score: Any = "dot",
    normalize: Any = "softmax",
    library: Literal["numpy", "torch", "jax"] | None = None,
) -> Diagnosis:
    """Find out whether an attention function is right, and where it departs from the textbook.

    The function is called on a few dozen small problems, and what comes back is compared with the
    textbook. Then the values of its own lines are: each line is told which step it makes, and
    the first that is wrong. Nothing is read of what code says, only what it computes.

    Parameters
    ----------
    function : callable
        A function, an object or a class such as a torch Module. NumPy, torch or JAX.
    call : callable, optional
        How it is called: ``lambda f, t: f(t.query, t.key, t.value, pad=~t.key_mask)``. `t` has the
        fields of one problem, such as query, key, value (B, H, L, D), mask (True = attend), causal,
        embeddings, W_q; the result is (B, H, L, E) or (B, L, M), or a dict of gradients by fields.
        What it reads is asked. If None, a table of usual names and layouts is tried; where that
        tells no call, the verdict is not_callable, with an adapter to edit.
    mask : {"attend", "hide", "add"}, optional
        What True in a mask argument means, or that the mask is added. An adapter says it itself.
    causal : bool or {"start", "end"}, optional
        Whether later keys are meant to be hidden; or which tokens are aligned, where there are
        fewer queries than keys.
    window : {"inclusive", "exclusive"}, optional
        Whether a window argument counts the query's own key.
    scale : float or "none", optional
        What multiplies the scores; "none" is 1. If None, 1/√D.
    heads : int, optional
        How many heads it has, where it does not say.
    score : "dot" or an object of `regard.scores`, or a `regard.textbook.Mechanism`
        What it is meant to compute its scores with.
    normalize : "softmax" or an object of `regard.normalizers`
        How it is meant to make weights of scores.
    library : {"numpy", "torch", "jax"}, optional
        Whose arrays it takes. If None, the library that its code uses.

    Returns
    -------
    Diagnosis
        `verdict` is right, fragile, wrong, unknown or not_callable; `lines` has the source with
        what each line makes. Printing it says why.

    Raises
    ------
    OptionError
        If an option makes no sense, or says nothing beside an adapter.

    Notes
    -----
    The function runs in this process. `regard diagnose` runs it in a child.

    Examples
    --------
    >>> import numpy as np
    >>> def mine(q, k, v):
    ...     scores = q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-2])
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> diagnosis = diagnose(mine)
    >>> diagnosis.verdict, diagnosis.line
    ('wrong', 2)
    >>> diagnosis.mistakes[0].title
    'the scores are divided by √S, the number of keys, instead of √D'
    """
    from regard.diagnosis import diagnose as questions
    from regard.faces import Diagnosis

    return Diagnosis.of(
        questions.diagnose(
            function,
            call,
            mask=mask,
            causal=causal,
            window=window,
            scale=scale,
            heads=heads,
            score=score,
            normalize=normalize,
            library=library,
        )
    )

"""Where a number came from, and which mistake a function has: two public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from regard.boundary import answering

if TYPE_CHECKING:
    from regard.compute.option_types import ArrayIn, LabelledOptions, ProblemOptions
    from regard.faces import Diagnosis, Explanation
    from regard.problems.fields import PartsOptions
    from regard.problems.problem import Problem


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
    signature: Mapping[str, str] | str | None = None,
    heads: int | None = None,
    causal: bool | Literal["start", "end"] | None = None,
    mask: Literal["keep", "keep01", "add", "hide", "hide01"] | None = None,
    window: Literal["inclusive", "exclusive"] | None = None,
    time_limit: float = 10.0,
    score: Any = "dot",
    normalize: Any = "softmax",
    layout: str | None = None,
    library: Literal["numpy", "torch", "jax"] | None = None,
) -> Diagnosis:
    """Find the mistake in an attention function.

    The function is called on a few dozen small designed problems, and what comes back is compared
    with the textbook and with a catalogue of wrong ways to compute attention.

    Parameters
    ----------
    function : callable
        Takes query, key, value (and a mask, a causal flag, a scale, a window, a cache, a number of
        heads); or of embeddings and weight matrices; or a torch Module. NumPy, torch or JAX; two
        to four axes, or a single query. How to call it is found out, and said in `called`.
    signature : mapping or str, optional
        What its parameters mean where their names do not tell: ``{"a": "query", "m": "keep"}`` or
        ``"a=query, m=keep"``.
    heads : int, optional
        How many heads a Module has, where it does not say.
    causal : bool or {"start", "end"}, optional
        Whether it always hides later keys; or where causal attention has to align unequal numbers
        of queries and keys. Found out if None, and either alignment is then right.
    mask : {"keep", "keep01", "add", "hide", "hide01"}, optional
        How its mask has to be read: True = attend, 1 = attend, 0 and −inf to be added, True = hide,
        1 = hide. Found out if None, and any of them is then right.
    window : {"inclusive", "exclusive"}, optional
        Whether its window counts the query's own key. Found out if None.
    time_limit : float
        Seconds that one call may take, where it can be interrupted.
    score : "dot" or an object of `regard.scores`, or a `regard.textbook.Mechanism`
        What the function is meant to compute its scores with; its parameters are those inside the
        function, whose queries and keys have the width of score's matrices. For functions of query,
        key and value.
    normalize : "softmax" or an object of `regard.normalizers`
        How it is meant to make weights of logits.
    layout : str, optional
        The axes of its arrays in their order, such as ``"(B, L, H, D)"``: B batch, H heads, L rows,
        D their width, M the width of embeddings. Found out if None.
    library : {"numpy", "torch", "jax"}, optional
        Whose arrays it takes. If None, the library that its code uses, or else the next one.

    Returns
    -------
    Diagnosis
        `verdict` is right, fragile, mistaken, unknown or unusable. Printing it says why.

    Raises
    ------
    OptionError
        If the roles of its parameters cannot be found out, or an option makes no sense.

    Notes
    -----
    The function runs in this process. `regard diagnose` runs it in a child.

    Examples
    --------
    >>> import numpy as np
    >>> def mine(q, k, v):
    ...     scores = q @ k.T / np.sqrt(k.shape[0])
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> diagnose(mine).summary
    'mine is mistaken: the scores are divided by √S, the number of keys, instead of √D'
    """
    from regard.diagnosis import verdict
    from regard.faces import Diagnosis

    return Diagnosis.of(
        verdict.diagnose(
            function,
            signature=signature,
            heads=heads,
            causal=causal,
            mask=mask,
            window=window,
            time_limit=time_limit,
            score=score,
            normalize=normalize,
            layout=layout,
            library=library,
        )
    )

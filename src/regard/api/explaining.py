"""Where a number came from, and which mistake a function has: two public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    textbook. Then the values of its lines are: this shows which step each line computes, and the
    first line that is wrong. Names, comments and docstrings are not read.

    Parameters
    ----------
    function : callable
        A function, an object or a class such as a torch Module. NumPy, torch or JAX.
    call : callable, optional
        How it is called: ``lambda f, t: f(t.query, t.key, t.value, pad=~t.key_mask)``. `t` has the
        fields of one problem, such as query, key, value (B, H, L, D), mask (True = attend), causal,
        embeddings, W_q; the result is (B, H, L, E) or (B, L, M), or a dict of gradients by fields.
        Problems vary in the fields that it reads. If None, usual names and layouts are tried; if
        none of them works, the verdict is not_callable, with an adapter to edit.
    mask : {"attend", "hide", "add"}, optional
        What True in a mask argument means, or that the mask is added; an adapter inverts it itself.
    causal : bool or {"start", "end"}, optional
        Whether later keys are meant to be hidden; or which tokens are aligned, where there are
        fewer queries than keys.
    window : {"inclusive", "exclusive"}, optional
        Whether a window argument counts the query's own key.
    scale : float or "none", optional
        What multiplies the scores; "none" is 1. If None, 1/√D.
    heads : int, optional
        How many heads it has, if its arguments do not say that.
    score : "dot" or an object of `regard.scores`, or a `regard.textbook.Mechanism`
        The score that it is meant to compute.
    normalize : "softmax" or an object of `regard.normalizers`
        The normalization that it is meant to compute.
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
        If an option makes no sense, or has no effect beside an adapter.

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

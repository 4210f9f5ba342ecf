"""A labelled attention problem: words, vectors, weights, options, and what should come out.

Must not know files, kernels or views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from regard.boundary import answering
from regard.boundary.arrays import Array
from regard.compute.loss import LOSS
from regard.errors import safe_text
from regard.normalizers import Normalizer
from regard.positions import Positions
from regard.problems.checks import checked
from regard.problems.parts import (
    READY,
    SHARED,
    Expectation,
    RandomMatrices,
    fields_of,
    rebuild,
    set_field,
)
from regard.scores import Score
from regard.textbook.steps import PROJECTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.problems.fields import Fields

    Booleans = NDArray[np.bool_]


@answering
@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """An attention problem with names: everything that `regard.explain` needs.

    It starts either from `embeddings` and the weights `W_q`, `W_k`, `W_v` (queries are
    ``embeddings @ W_q``, heads side by side in the columns), or from ready `queries`, `keys`
    and `values`. Arrays are copied to float64 and cannot be written. NaN and infinity are allowed
    in them, because finding where one starts is a use.

    Parameters
    ----------
    title, note : str
        What the problem is called, and one remark.
    embeddings, context : array, (L, M) and (S, N)
        One row per token. Without a context the tokens look at each other (self-attention).
    W_q, W_k, W_v, W_o : array, (M, H·D), (N, G·D), (N, G·E), (H·E, F)
        The weights; without heads (M, D), (N, D), (N, E), (E, F).
    b_q, b_k, b_v, b_o : array
        What is added after each product: as long as the weights have columns.
    heads, key_heads : int
        H and G. None: there is no head axis; `key_heads` is otherwise the same as `heads`.
    queries, keys, values : array, (L, D) or (D,), (S, D), (S, E)
        Ready vectors, or with a head axis in front: (H, L, D), (G, S, D), (G, S, E).
    query_labels, key_labels : tuple of str
        Names of the rows. In self-attention the keys have the names of the queries.
    labels : tuple of str
        Both at once, where queries and keys are the same rows.
    embedding_features, context_features, key_features, value_features, output_features
        Names of the columns. Keys and queries share theirs. Where no labels are given, those of
        the index and columns of a DataFrame are taken.
    row_notes : mapping of str to tuple of str
        For the name of a step, one remark per row.
    mask, bias, causal, window, offset, scale, softcap, sink
        As in `regard.attention`. True in a mask means that the query may see the key.
    lengths : int
        How many keys are real; those after them are padding.
    query_segments, key_segments : tuple of int
        A query sees only keys of its own segment.
    softmax : {"shifted", "unshifted"}
        Whether the maximum of each row is subtracted before exp.
    score, normalize, positions
        As in `regard.attention`; None for the dot product, the softmax, and no positions.
    target : array, the shape of the result
        What the result should be: the loss is half the squared distance to it, and the explanation
        goes on with its gradients.
    grad_output : array, the shape of the result
        In place of a target: the gradient of another loss with respect to the result.
    random : RandomMatrices
        A recipe from which the fields that it names are drawn.
    expect : tuple of Expectation
        What should come out.

    Raises
    ------
    ProblemError
        If parts are missing or do not fit together; the message names the field.

    Examples
    --------
    >>> Problem(
    ...     title="Pets", query_labels=("pet",), key_labels=("cat", "car"),
    ...     queries=[1, 0], keys=[[2, 1], [0, 3]], values=[[1], [0]],
    ... )
    Problem: Pets
      queries     pet
      keys        cat, car
      given       queries (2,)  keys (2, 2)  values (2, 1)
    """

    title: str = ""
    note: str = ""
    embeddings: Array | None = None
    context: Array | None = None
    W_q: Array | None = None
    W_k: Array | None = None
    W_v: Array | None = None
    W_o: Array | None = None
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None
    heads: int | None = None
    key_heads: int | None = None
    queries: Array | None = None
    keys: Array | None = None
    values: Array | None = None
    query_labels: tuple[str, ...] | None = None
    key_labels: tuple[str, ...] | None = None
    embedding_features: tuple[str, ...] | None = None
    context_features: tuple[str, ...] | None = None
    key_features: tuple[str, ...] | None = None
    value_features: tuple[str, ...] | None = None
    output_features: tuple[str, ...] | None = None
    row_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mask: Booleans | None = None
    bias: float | Array | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    lengths: int | None = None
    query_segments: tuple[int, ...] | None = None
    key_segments: tuple[int, ...] | None = None
    offset: int | Literal["end"] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: float | Array | None = None
    softmax: Literal["shifted", "unshifted"] = "shifted"
    score: Score | None = None
    normalize: Normalizer | None = None
    positions: Positions | None = None
    target: Array | None = None
    grad_output: Array | None = None
    random: RandomMatrices | None = None
    expect: tuple[Expectation, ...] = ()
    labels: InitVar[Sequence[str] | None] = None

    if TYPE_CHECKING:  # any array and any sequence is taken; the fields are what they become

        def __init__(self, **given: Unpack[Fields]) -> None: ...

    def __post_init__(self, labels: Sequence[str] | None) -> None:
        for name, value in checked({**fields_of(self), "labels": labels}).items():
            set_field(self, name, value)

    def replace(self, **changes: Unpack[Fields]) -> Problem:
        """The same problem with some fields changed.

        A field that only repeats another follows it: `key_labels` in self-attention, `key_heads`
        where it equals `heads`, `heads` of ready vectors. Changing a drawn matrix keeps the others
        and drops the recipe; changing the recipe draws anew.
        """
        kept = fields_of(self)
        if changes.get("labels") is not None:
            kept |= dict.fromkeys(SHARED)
        if self.embeddings is not None and self.context is None:
            kept["key_labels"] = None
        if self.embeddings is None:
            kept["heads"] = kept["key_heads"] = None
        elif self.key_heads == self.heads:
            kept["key_heads"] = None
        if self.random is not None:
            if "random" in changes:
                kept |= dict.fromkeys(self.random.fields)
            elif not changes.keys().isdisjoint(self.random.fields):
                kept["random"] = None
        kept |= dict(changes)
        return Problem(**kept)

    def __repr__(self) -> str:
        return _summary(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), fields_of(self))


delattr(Problem, "labels")  # the default of an argument, which no problem has


def _summary(problem: Problem) -> str:
    """A few lines: what is there, not the numbers."""
    title = safe_text(problem.title, 70)
    lines = [f"Problem: {title}" if title else "Problem"]

    def add(name: str, content: str) -> None:
        if content:
            lines.append(f"  {name:<11} {content}")

    if problem.key_labels == problem.query_labels:
        add("tokens", _few(problem.query_labels or ()))
    else:
        add("queries", _few(problem.query_labels or ()))
        add("keys", _few(problem.key_labels or ()))
    given = [
        f"{name} {getattr(problem, name).shape}"
        for name in (*PROJECTED, *READY, *LOSS)
        if getattr(problem, name) is not None
    ]
    add("given", "  ".join(given))
    options = [
        f"{name} {value}"
        for name in ("heads", "key_heads", "window", "lengths", "offset", "scale", "softcap")
        if (value := getattr(problem, name)) is not None
    ]
    options += ["causal"] if problem.causal else []
    for name in ("mask", "bias", "sink"):
        if (value := getattr(problem, name)) is not None:
            options.append(f"{name} {np.shape(value) or value}")
    options += ["segments"] if problem.query_segments is not None else []
    parts = (problem.score, problem.normalize, problem.positions)
    options += [repr(one) for one in parts if one is not None]
    options += ["softmax unshifted"] if problem.softmax == "unshifted" else []
    add("options", "  ".join(options))
    if problem.random is not None:
        recipe = problem.random
        add(
            "random",
            f"{', '.join(recipe.draw)} ({recipe.generator}, seed {recipe.seed}, "
            f"{recipe.distribution})",
        )
    add("expects", _few(tuple(dict.fromkeys(one.step for one in problem.expect))))
    return "\n".join(lines)


def _few(labels: tuple[str, ...]) -> str:
    shown_labels = [safe_text(label, 24) for label in labels[:8]]
    more = [f"… ({len(labels)} in all)"] if len(labels) > 8 else []
    return ", ".join([*shown_labels, *more])

"""Multi-head attention from given weights: project, attend in every head, put together.

Owns the weights and their shapes. The projections are the textbook's own steps and attention is
whatever kernel fits; must not know how either is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.boundary.arguments import as_array, result_dtype
from regard.boundary.arrays import home_of
from regard.compute import dispatch
from regard.compute.kernels.reference import project, unite
from regard.compute.request import make_request
from regard.errors import DtypeError, OptionError, ShapeError, safe_text, with_shapes
from regard.explanation.build import OPTIONS, explain_problem, string_labels
from regard.faces import Explanation
from regard.problems.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


CALL_OPTIONS = (*OPTIONS, "precision", "threads")


class MultiHeadOutput(NamedTuple):
    """What `MultiHeadAttention` returns with `return_weights`."""

    output: Array
    weights: Array


@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadAttention:
    r"""concat(head_1 … head_H)·W_o (+ b_o), where head_h = attention(x·W_q, c·W_k, c·W_v)_h.

    Weights stand on the right, x @ W: M and N are the widths of x and of the context c, the
    columns of W_q, W_k and W_v hold the heads side by side. A layer that computes x @ W.T (as
    torch.nn.Linear does) passes its weights transposed.

    Parameters
    ----------
    W_q : array_like, (M, H·D)
        Queries.
    W_k, W_v : array_like, (N, G·D) and (N, G·E)
        Keys and values; N = M for self-attention.
    W_o : array_like, (H·E, F), optional
        The output projection. Without it the heads are put side by side: (…, L, H·E).
    heads : int
        H, the number of query heads.
    key_heads : int, optional
        G, of which H is a multiple; H if not given.
    b_q, b_k, b_v, b_o : array_like, optional
        Added after each product.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        If the weights do not fit together.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; grouped heads: Ainslie et
    al., "GQA" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> layer = MultiHeadAttention(np.eye(4), np.eye(4), np.eye(4), heads=2)
    >>> layer(np.eye(4)[:2], causal=True).round(2)
    array([[1.  , 0.  , 0.  , 0.  ],
           [0.33, 0.67, 0.  , 0.  ]])
    """

    W_q: Array
    W_k: Array
    W_v: Array
    W_o: Array | None = None
    heads: int = 1
    key_heads: int | None = None
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if "heads" in field.name:
                continue
            if value is not None or field.name in ("W_q", "W_k", "W_v"):
                object.__setattr__(self, field.name, as_array(field.name, value))
        if self.key_heads is None:
            object.__setattr__(self, "key_heads", self.heads)
        _check_heads(self)
        _check_weights(self)

    def __call__(
        self,
        x: Any,
        context: Any = None,
        *,
        return_weights: bool = False,
        kernel: str | None = None,
        **options: Any,
    ) -> Any:
        """Attend from every row of x to every row of x, or of the context.

        Parameters
        ----------
        x : array_like, (…, L, M)
            One row per query.
        context : array_like, (…, S, N), optional
            Where keys and values come from; x itself if not given.
        return_weights : bool
            Return the weights (…, H, L, S) too.
        kernel : str, optional
            As for `attention`.
        **options
            mask, bias, causal, window, offset, scale, softcap, sink, precision, threads, as for
            `attention`.

        Returns
        -------
        ndarray, (…, L, F), or a named tuple (output, weights)
            In the dtype of x, context and weights together; half types are computed in float32
            throughout and rounded once. Arrays of another library if x or context is one.
        """
        for name in options:
            if name not in CALL_OPTIONS:
                raise TypeError(
                    f"MultiHeadAttention takes no option {safe_text(name, 60)} in a call; "
                    f"it takes {', '.join(('return_weights', 'kernel', *CALL_OPTIONS))}"
                )
        home = home_of(x=x, context=context)
        inputs = {"embeddings": as_array("x", x), **self._weights()}
        if context is not None:
            inputs["context"] = as_array("context", context)
        dtype = result_dtype(inputs)
        working = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        precision = options.get("precision")
        if isinstance(precision, str) and precision == "exact" and dtype != np.float64:
            working = np.dtype(np.float64)
            del options["precision"]
        try:
            self._check_input(inputs)
            inputs = self._broadcast(inputs)
            heads = {"H": self.heads, "G": self.key_heads or self.heads}
            projected = project(inputs, heads, working)
            request = make_request(
                *(projected.value(name) for name in ("queries", "keys", "values")),
                return_weights=return_weights,
                **options,
            )
        except (ShapeError, OptionError, DtypeError) as error:
            raise with_shapes(error, {"x": inputs["embeddings"], "context": context}) from None
        result = dispatch.run(request, kernel)
        united = unite({**inputs, "output": result.output}, working)
        last = "projected_output" if self.W_o is not None else "merged"
        output = united.value(last).astype(dtype, copy=False)
        answer: Any = output
        if result.weights is not None:
            answer = MultiHeadOutput(output, result.weights.astype(dtype, copy=False))
        return answer if home is None else home(answer)

    def explain(
        self,
        x: Any,
        context: Any = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
        **options: Any,
    ) -> Explanation:
        """Every step from the embeddings to the projected output, for x (L, M) and labels.

        Returns
        -------
        Explanation
            As `regard.explain` gives it.
        """
        problem = Problem(
            title=title,
            embeddings=as_array("x", x),
            context=None if context is None else as_array("context", context),
            query_labels=(
                None if query_labels is None else string_labels("query_labels", query_labels)
            ),
            key_labels=(None if key_labels is None else string_labels("key_labels", key_labels)),
            **{field.name: getattr(self, field.name) for field in fields(self)},
        )
        return Explanation.of(explain_problem(problem, **options))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self._weights().items())
        return f"MultiHeadAttention(heads={self.heads}, key_heads={self.key_heads}, {shapes})"

    def _weights(self) -> dict[str, Array]:
        names = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")
        given = {name: getattr(self, name) for name in names}
        return {name: array for name, array in given.items() if array is not None}

    def _check_input(self, inputs: dict[str, Array]) -> None:
        sources = [("x", inputs["embeddings"], "W_q", self.W_q)]
        sources += [
            ("context" if "context" in inputs else "x", inputs.get("context", sources[0][1]), n, w)
            for n, w in (("W_k", self.W_k), ("W_v", self.W_v))
        ]
        for name, array, weight_name, weight in sources:
            if array.ndim < 2:
                raise ShapeError(f"{name} has {array.ndim} axes but needs at least 2: (…, L, M)")
            if array.shape[-1] != weight.shape[0]:
                raise ShapeError(
                    f"{name} is {array.shape[-1]} wide but {weight_name} has {weight.shape[0]} "
                    "rows; they must match"
                )

    def _broadcast(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """X and context with the same leading axes."""
        if "context" not in inputs:
            return inputs
        x, context = inputs["embeddings"], inputs["context"]
        try:
            lead = np.broadcast_shapes(x.shape[:-2], context.shape[:-2])
        except ValueError:
            raise ShapeError(
                f"the leading axes of x {x.shape[:-2]} and context {context.shape[:-2]} do not "
                "broadcast together"
            ) from None
        return {
            **inputs,
            "embeddings": np.broadcast_to(x, (*lead, *x.shape[-2:])),
            "context": np.broadcast_to(context, (*lead, *context.shape[-2:])),
        }


def _check_heads(layer: MultiHeadAttention) -> None:
    for name in ("heads", "key_heads"):
        count = getattr(layer, name)
        if isinstance(count, (bool, np.bool_)) or not isinstance(count, (int, np.integer)):
            raise DtypeError(f"{name} must be an int, not {type(count).__name__}")
        if count < 1:
            raise OptionError(f"{name} is {count}; it must be 1 or more")
        object.__setattr__(layer, name, int(count))
    if layer.heads % (layer.key_heads or 1):
        raise OptionError(
            f"heads is {layer.heads} but key_heads is {layer.key_heads}; "
            "heads must be a multiple of key_heads"
        )


def _check_weights(layer: MultiHeadAttention) -> None:
    """Every weight is a matrix, heads divide its columns, and widths agree."""
    groups = layer.key_heads or layer.heads
    for name, count in (("q", layer.heads), ("k", groups), ("v", groups)):
        weight, bias = getattr(layer, f"W_{name}"), getattr(layer, f"b_{name}")
        _check_matrix(f"W_{name}", weight, f"b_{name}", bias)
        if weight.shape[1] % count:
            raise ShapeError(
                f"W_{name} has {weight.shape[1]} columns, which {count} heads do not divide"
            )
    if layer.W_q.shape[1] // layer.heads != layer.W_k.shape[1] // groups:
        raise ShapeError(
            f"W_q gives each head {layer.W_q.shape[1] // layer.heads} columns but W_k gives "
            f"{layer.W_k.shape[1] // groups}; queries and keys must be equally wide"
        )
    if layer.W_k.shape[0] != layer.W_v.shape[0]:
        raise ShapeError(
            f"W_k has {layer.W_k.shape[0]} rows but W_v has {layer.W_v.shape[0]}; "
            "both multiply the same rows"
        )
    if layer.W_o is None:
        if layer.b_o is not None:
            raise OptionError("b_o is given but W_o is not; it is added after x @ W_o")
        return
    _check_matrix("W_o", layer.W_o, "b_o", layer.b_o)
    merged = layer.W_v.shape[1] // groups * layer.heads
    if layer.W_o.shape[0] != merged:
        raise ShapeError(
            f"W_o has {layer.W_o.shape[0]} rows but {layer.heads} heads of width "
            f"{merged // layer.heads} make {merged}; they must match"
        )


def _check_matrix(name: str, weight: Array, bias_name: str, bias: Array | None) -> None:
    if weight.ndim != 2:
        raise ShapeError(f"{name} has {weight.ndim} axes but must be a matrix, used as x @ {name}")
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ShapeError(
            f"{bias_name} has shape {bias.shape} but {name} has {weight.shape[1]} columns; "
            "it needs one number for each"
        )

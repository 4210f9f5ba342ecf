"""Multi-head attention from given weights: project, attend in every head, project the result.

Owns the weights and their shapes. The projections are steps of the textbook; must not know how they
or attention are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from regard.boundary import answering
from regard.boundary.arguments import as_array, as_float_array, as_int, result_dtype
from regard.boundary.arrays import Array, lend
from regard.boundary.elsewhere import no_such_argument
from regard.compute import dispatch
from regard.compute.evaluation import Run, added_vectors, project, unite
from regard.compute.gradients import fit
from regard.compute.request import make_request
from regard.compute.results import LayerGradients, OutputWeights
from regard.errors import OptionError, ProblemError, ShapeError, naming_shapes
from regard.explanation.build import OPTIONS, PARTS, explain_problem, string_labels
from regard.faces import Explanation
from regard.models.multi_head_gradients import layer_gradients, parameters_of, wanted_of_layer
from regard.positions import Absolute, as_positions
from regard.problems.checks import weight_sizes
from regard.problems.problem import Problem

if TYPE_CHECKING:
    from regard.compute.option_types import (
        ArrayIn,
        LayerGradientOptions,
        LayerOptions,
        Numbers,
        SomeLayerGradientOptions,
        StepsOptions,
        T,
    )

CALL_OPTIONS = (*OPTIONS, *PARTS, "precision", "threads")


@answering
@dataclass(frozen=True, eq=False, repr=False)
class MultiHeadAttention:
    r"""concat(head_1 … head_H)·W_o (+ b_o), where head_h = attention(x·W_q, c·W_k, c·W_v)_h.

    Weights multiply from the right, x @ W; transpose those of a layer that computes x @ W.T, such
    as torch.nn.Linear. M and N are the widths of x and of the context c; the columns of W_q, W_k
    and W_v are head 0, then head 1, and so on.

    Parameters
    ----------
    W_q : array_like, (M, H·D)
        Queries.
    W_k, W_v : array_like, (N, G·D) and (N, G·E)
        Keys and values; N = M for self-attention.
    W_o : array_like, (H·E, F), optional
        The output projection. Without it the heads are concatenated: (…, L, H·E).
    heads : int
        H, the number of query heads.
    key_heads : int, optional
        G; H is a multiple of it. Default: H.
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

    if TYPE_CHECKING:  # any array is taken; the fields are NumPy's

        def __init__(
            self,
            W_q: ArrayIn,
            W_k: ArrayIn,
            W_v: ArrayIn,
            W_o: ArrayIn | None = None,
            heads: int = 1,
            key_heads: int | None = None,
            b_q: ArrayIn | None = None,
            b_k: ArrayIn | None = None,
            b_v: ArrayIn | None = None,
            b_o: ArrayIn | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if "heads" in field.name:
                continue
            if value is not None or field.name in ("W_q", "W_k", "W_v"):
                object.__setattr__(self, field.name, as_array(field.name, value))
        if self.key_heads is None:
            object.__setattr__(self, "key_heads", self.heads)
        _check(self)

    @overload
    def __call__(
        self,
        x: Numbers,
        context: Numbers | None = None,
        *,
        return_weights: Literal[False] = False,
        **options: Unpack[LayerOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        x: Numbers,
        context: Numbers | None = None,
        *,
        return_weights: Literal[True],
        **options: Unpack[LayerOptions],
    ) -> OutputWeights[Array]: ...
    @overload
    def __call__(
        self,
        x: T,
        context: T | Numbers | None = None,
        *,
        return_weights: Literal[False] = False,
        **options: Unpack[LayerOptions],
    ) -> T: ...
    @overload
    def __call__(
        self,
        x: T,
        context: T | Numbers | None = None,
        *,
        return_weights: Literal[True],
        **options: Unpack[LayerOptions],
    ) -> OutputWeights[T]: ...
    @answering
    def __call__(
        self,
        x: Any,
        context: Any = None,
        *,
        return_weights: bool = False,
        kernel: str | None = None,
        **options: Any,
    ) -> Any:
        """Attend from each row of x to the rows of x, or of the context.

        Parameters
        ----------
        x : array_like, (…, L, M)
            One row per query.
        context : array_like, (…, S, N), optional
            Source of keys and values. Default: x.
        return_weights : bool
            Return the weights (…, H, L, S) too.
        kernel, **options
            mask, bias, causal, window, offset, scale, softcap, sink, score, normalize, positions,
            precision, threads, as for `attention`. All heads share a score.

        Returns
        -------
        ndarray, (…, L, F), or a named tuple (output, weights)
            In the common dtype of x, context and weights; half types are computed in float32 and
            rounded once. The array type is that of x and context.
        """
        unknown = {name: one for name, one in options.items() if name not in CALL_OPTIONS}
        if unknown:
            taken = ("x", "context", "return_weights", "kernel", *CALL_OPTIONS)
            raise no_such_argument("MultiHeadAttention.__call__()", unknown, taken)
        (x, context), give_back = lend(x=x, context=context)
        given = {**_inputs(x, context), **self._weights()}
        dtype = result_dtype(given)
        with naming_shapes(x=given["embeddings"], context=context):
            projected = self._projected(given, options)
            request = make_request(
                *(projected.value(name) for name in ("queries", "keys", "values")),
                return_weights=return_weights,
                kernel=kernel,
                **options,
            )
        result = dispatch.run(request)
        united = unite({**projected.inputs, "output": result.output}, projected.dtype)
        output = united.value(self._last).astype(dtype, copy=False)
        answer: Any = output
        if result.weights is not None:
            answer = OutputWeights(output, result.weights.astype(dtype, copy=False))
        return give_back(answer)

    @overload
    def gradients(
        self,
        x: Numbers,
        grad_output: Numbers,
        context: Numbers | None = None,
        **options: Unpack[LayerGradientOptions],
    ) -> LayerGradients[Array]: ...
    @overload
    def gradients(
        self,
        x: Numbers,
        grad_output: Numbers,
        context: Numbers | None = None,
        **options: Unpack[SomeLayerGradientOptions],
    ) -> LayerGradients[Array | None]: ...
    @overload
    def gradients(
        self,
        x: T,
        grad_output: T | Numbers,
        context: T | Numbers | None = None,
        **options: Unpack[LayerGradientOptions],
    ) -> LayerGradients[T]: ...
    @overload
    def gradients(
        self,
        x: T,
        grad_output: T | Numbers,
        context: T | Numbers | None = None,
        **options: Unpack[SomeLayerGradientOptions],
    ) -> LayerGradients[T | None]: ...
    @answering
    def gradients(
        self,
        x: Any,
        grad_output: Any,
        context: Any = None,
        *,
        wrt: Any = None,
        kernel: str | None = None,
        **options: Any,
    ) -> Any:
        """How a loss changes with each number of x, the context, the weights and the options.

        Parameters
        ----------
        x, context
            As in the call.
        grad_output : array_like, (…, L, F)
            The gradient of the loss with respect to the output.
        wrt : str or names, optional
            Which gradients to compute: "x", "context", "W_q" … "b_o", "bias", "sink", "scale", and
            parameters of score, normalize and positions, such as "score.W" and "positions.table".
            Default: of x, the context and the weights.
        kernel, **options
            As in the call.

        Returns
        -------
        LayerGradients
            A named tuple with these names; None for an input that the call does not have or that
            `wrt` does not name. Each has the shape and dtype of its input, summed over axes along
            which the input was broadcast; for a weight these are the leading axes of x. Half
            types are computed in float32 and rounded once; integers have gradients in float64. The
            array type is that of x.

        Raises
        ------
        ShapeError, DtypeError, OptionError
            As for the call and for `regard.gradients`.

        Examples
        --------
        >>> import numpy as np
        >>> layer = MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
        >>> layer.gradients(np.eye(2), np.ones((2, 2)), causal=True).W_v.round(2)
        array([[1.33, 1.33],
               [0.67, 0.67]])
        """
        unknown = {name: one for name, one in options.items() if name not in CALL_OPTIONS}
        if unknown:
            taken = ("x", "grad_output", "context", "wrt", "kernel", *CALL_OPTIONS)
            raise no_such_argument("MultiHeadAttention.gradients()", unknown, taken)
        (x, grad_output, context), give_back = lend(x=x, grad_output=grad_output, context=context)
        given = {**_inputs(x, context), **self._weights()}
        with naming_shapes(x=given["embeddings"], context=context, grad_output=grad_output):
            grad = as_array("grad_output", grad_output)
            wanted = wanted_of_layer(wrt, given, parameters_of(options))
            positions = as_positions(options.get("positions"))
            projected = self._projected(given, options)
            options["kernel"] = kernel
            made = dict(layer_gradients(projected, self._last, grad, wanted, options))
        made |= {name: fit(made[name], given[name]) for name in given.keys() & made.keys()}
        if positions is not None and "positions_vectors" in made:
            vectors = fit(made.pop("positions_vectors"), positions.parameters()["vectors"])
            made["parameters"] = {**(made.get("parameters") or {}), "positions.vectors": vectors}
        return give_back(LayerGradients(x=made.pop("embeddings", None), **made))

    @answering
    def explain(
        self,
        x: ArrayIn,
        context: ArrayIn | None = None,
        *,
        labels: Sequence[str] | None = None,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str = "",
        **options: Unpack[StepsOptions],
    ) -> Explanation:
        """Every step from x (L, M) to the projected output, as an Explanation.

        With `target` or `grad_output` it goes on to the gradients, as `regard.explain` does.
        """
        names = {"labels": labels, "query_labels": query_labels, "key_labels": key_labels}
        given: dict[str, Any] = {
            name: string_labels(name, own) for name, own in names.items() if own is not None
        }
        given |= {field.name: getattr(self, field.name) for field in fields(self)}
        given |= _inputs(x, context)
        for name, one in given.items():
            if isinstance(one, np.ndarray):
                given[name] = as_float_array(name, one)
        problem = Problem(title=title, **given)
        return Explanation.of(explain_problem(problem, **options))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self._weights().items())
        return f"MultiHeadAttention(heads={self.heads}, key_heads={self.key_heads}, {shapes})"

    def _weights(self) -> dict[str, Array]:
        names = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")
        given = {name: getattr(self, name) for name in names}
        return {name: array for name, array in given.items() if array is not None}

    @property
    def _last(self) -> str:
        """The step whose value is returned."""
        return "projected_output" if self.W_o is not None else "merged"

    def _projected(self, inputs: dict[str, Array], options: dict[str, Any]) -> Run:
        """The steps to queries, keys and values, in the dtype that precision asks for."""
        dtype = result_dtype(inputs)
        working = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        precision = options.get("precision")
        if isinstance(precision, str) and precision == "exact" and dtype != np.float64:
            working = np.dtype(np.float64)
            del options["precision"]
        self._check_input(inputs)
        positions = as_positions(options.get("positions"))
        if isinstance(positions, Absolute):  # rounded to the type of the sums, and deciding none
            vectors = added_vectors(positions, inputs["embeddings"])
            inputs = {**inputs, "positions_vectors": vectors}
            del options["positions"]
        heads = {"H": self.heads, "G": self.key_heads or self.heads}
        return project(self._broadcast(inputs), heads, working)

    def _check_input(self, inputs: dict[str, Array]) -> None:
        source = "context" if "context" in inputs else "embeddings"
        for origin, weight_name in (("embeddings", "W_q"), (source, "W_k"), (source, "W_v")):
            array, rows = inputs[origin], len(inputs[weight_name])
            name = "x" if origin == "embeddings" else origin
            if array.ndim < 2:
                raise ShapeError(f"{name} has {array.ndim} axes but needs at least 2: (…, L, M)")
            if array.shape[-1] != rows:
                raise ShapeError(
                    f"{name} is {array.shape[-1]} wide but {weight_name} has {rows} rows; "
                    "they must match"
                )

    def _broadcast(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """The inputs with x and context broadcast to the same leading axes."""
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


def _inputs(x: Any, context: Any) -> dict[str, Array]:
    given = {"embeddings": as_array("x", x)}
    return given if context is None else {**given, "context": as_array("context", context)}


def _check(layer: MultiHeadAttention) -> None:
    for name in ("heads", "key_heads"):
        object.__setattr__(layer, name, as_int(name, getattr(layer, name), 1))
    if layer.heads % (layer.key_heads or 1):
        raise OptionError(
            f"heads is {layer.heads} but key_heads is {layer.key_heads}; "
            "heads must be a multiple of key_heads"
        )
    if layer.b_o is not None and layer.W_o is None:
        raise OptionError("b_o is given but W_o is not; it is added after x @ W_o")
    try:
        weight_sizes({field.name: getattr(layer, field.name) for field in fields(layer)}, {})
    except ProblemError as error:
        raise ShapeError(*error.args) from None

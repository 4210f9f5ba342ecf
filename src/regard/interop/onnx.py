"""ONNX's operators `Attention` and `RotaryEmbedding`, computed by regard.

`attention` and `rotary_embedding` are the operators as functions on NumPy arrays. With
``ReferenceEvaluator(model, new_ops=OPERATORS)`` a whole graph runs, and `Backend` runs graphs of
these operators alone.
"""

# Owns ONNX's conventions: heads packed in three axes, masks shorter than the keys, two kinds of
# cache, −1 for an unbounded window, four modes of `qk_matmul_output`.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.backend.base import Backend as OnnxBackend
from onnx.backend.base import BackendRep
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from regard.boundary import answering
from regard.boundary.arguments import as_array, as_float_array, as_integers, as_number
from regard.boundary.arrays import Array
from regard.compute import dispatch
from regard.compute.evaluation import Run
from regard.compute.positioned import turn_rows
from regard.compute.request import Request, make_request
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.masks import Boolean, Lengths, Mask

__all__ = [
    "OPERATORS",
    "Attention",
    "AttentionOutputs",
    "Backend",
    "PreparedModel",
    "RotaryEmbedding",
    "attention",
    "rotary_embedding",
]


def __dir__() -> list[str]:
    return __all__


# Each qk_matmul_output_mode below 3 returns the first of these steps that the call has: without a
# softcap, for example, there is no step "capped".
AFTER = {
    0: ("scaled",),
    1: ("capped", "scaled"),
    2: ("masked", "biased", "capped", "scaled"),
}


class AttentionOutputs(NamedTuple):
    """The outputs of the operator; `qk_matmul_output` only if requested."""

    Y: Array
    present_key: Array
    present_value: Array
    qk_matmul_output: Array | None


@answering
def attention(
    Q: Array,
    K: Array,
    V: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float | None = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int | None = None,
) -> AttentionOutputs:
    """The operator `Attention` of opset 23 to 25 on NumPy arrays, with ONNX's names.

    Y = softmax(softcap(scale·Q·Kᵀ) + attn_mask)·V over the visible keys.

    Parameters
    ----------
    Q, K, V : ndarray, (B, H, L, D), (B, G, S, D), (B, G, S, E)
        Or packed: (B, L, H·D), (B, S, G·D), (B, S, G·E) with `q_num_heads` and `kv_num_heads`.
    attn_mask : ndarray, broadcastable to (B, H, L, total)
        Boolean (True = attend), or numbers to add. Keys beyond a shorter last axis are hidden.
    past_key, past_value : ndarray, (B, G, past, D) and (B, G, past, E)
        Keys and values before K and V; query i is then at position past + i.
    nonpad_kv_seqlen : ndarray of int, (B,)
        The number of keys of each batch element; the last query is at the last of them.
    is_causal, scale, softcap, left_window_size, right_window_size
        As in ONNX: 0 for no softcap, −1 for an unbounded side.
    softmax_precision : {1, 10, 11, 16}, optional
        The least precise type allowed for softmax: FLOAT, FLOAT16, DOUBLE, BFLOAT16. regard uses
        float32 or better.
    qk_matmul_output_mode : {0, 1, 2, 3}, optional
        `qk_matmul_output` is the scaled scores (0), those after softcap (1), with mask and bias
        too (2), or the weights (3). Default: None is returned.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        If the inputs do not fit together.

    Notes
    -----
    The scale is applied once, to Q·Kᵀ, so it may be negative; half types are computed in float32
    and rounded once. ONNX's evaluator applies √scale twice and rounds the weights too.

    References
    ----------
    ONNX operator schemas, `Attention` versions 23, 24 and 25.

    Examples
    --------
    >>> x = np.eye(2, dtype=np.float32)[None]
    >>> attention(x, x, x, is_causal=1, q_num_heads=1, kv_num_heads=1).Y.round(2)
    array([[[1.  , 0.  ],
            [0.33, 0.67]]], dtype=float32)
    """
    if qk_matmul_output_mode not in (None, *AFTER, 3):
        raise OptionError(
            f"qk_matmul_output_mode is {qk_matmul_output_mode}; it must be 0, 1, 2 or 3"
        )
    Q = as_float_array("Q", Q)
    packed = Q.ndim == 3
    query = _heads("Q", Q, "q_num_heads", q_num_heads)
    key = _heads("K", as_float_array("K", K), "kv_num_heads", kv_num_heads)
    value = _heads("V", as_float_array("V", V), "kv_num_heads", kv_num_heads)
    offset: Any = 0
    if (past_key is None) != (past_value is None):
        raise OptionError("past_key and past_value belong together, but only one is given")
    if past_key is not None and past_value is not None:
        if nonpad_kv_seqlen is not None:
            raise OptionError(
                "nonpad_kv_seqlen is for a cache inside K and V and past_key for one outside; "
                "give one of the two"
            )
        fresh = key.shape[2]
        key = _after("past_key", as_float_array("past_key", past_key), "K", key)
        value = _after("past_value", as_float_array("past_value", past_value), "V", value)
        offset = key.shape[2] - fresh
    lengths = None
    if nonpad_kv_seqlen is not None:
        lengths = as_integers("nonpad_kv_seqlen", nonpad_kv_seqlen, "integers")
        offset = lengths - query.shape[2]
    mask, bias = _mask_and_bias(attn_mask, key.shape[2], lengths)
    wide = _one_dtype(query, key, value)
    request = make_request(
        query.astype(wide, copy=False),
        key.astype(wide, copy=False),
        value.astype(wide, copy=False),
        mask=mask,
        bias=bias,
        causal=bool(is_causal),
        window=_window(left_window_size, right_window_size),
        offset=offset,
        scale=scale,
        softcap=None if softcap is None else as_number("softcap", softcap) or None,
        precision=_precision(softmax_precision, wide),
        return_weights=qk_matmul_output_mode == 3,
    )
    result = dispatch.run(request)
    output = result.output.astype(Q.dtype, copy=False)
    if packed:
        output = output.swapaxes(1, 2).reshape(*Q.shape[:2], -1)
    scores = result.weights
    if qk_matmul_output_mode is not None and scores is None:
        scores = _scores(request, qk_matmul_output_mode)
    if scores is not None:
        with np.errstate(over="ignore"):
            scores = scores.astype(Q.dtype, copy=False)
    return AttentionOutputs(output, key, value, scores)


def _heads(name: str, array: Array, attribute: str, heads: int | None) -> Array:
    """(B, L, H·D) as a view (B, H, L, D); an array with four axes as it came."""
    if array.ndim == 4:
        if heads is not None and heads != array.shape[1]:
            raise ShapeError(
                f"{name} has {array.shape[1]} heads on its own axis but {attribute} is {heads}; "
                "omit the attribute"
            )
        return array
    if array.ndim != 3:
        raise ShapeError(f"{name} has {array.ndim} axes; the operator takes 3 or 4")
    if heads is None:
        raise OptionError(f"{name} has 3 axes, so {attribute} must give its number of heads")
    batch, rows, width = array.shape
    if heads < 1 or width % heads:
        raise ShapeError(f"{name} is {width} wide, not a multiple of {attribute} = {heads}")
    return array.reshape(batch, rows, heads, width // heads).swapaxes(1, 2)


def _after(past_name: str, past: Array, name: str, array: Array) -> Array:
    """The cached rows followed by the new ones."""
    if past.ndim != 4 or np.delete(past.shape, 2).tolist() != np.delete(array.shape, 2).tolist():
        raise ShapeError(
            f"{past_name} has shape {past.shape} but {name}, by heads, has {array.shape}; "
            "all but the third axis must match"
        )
    return np.concatenate((past, array), axis=2)


def _mask_and_bias(
    given: Array | None, keys: int, lengths: Array | None
) -> tuple[Mask | None, Array | None]:
    """ONNX's mask as a mask or a bias as long as the keys, with the rule of the lengths."""
    rule = None if lengths is None else Lengths(lengths)
    if given is None:
        return rule, None
    given = as_array("attn_mask", given)
    if given.dtype != np.bool_:
        given = as_float_array("attn_mask", given)  # numbers to add; −∞ needs a float
    if given.ndim and given.shape[-1] < keys:
        hidden = np.array(False if given.dtype == np.bool_ else -np.inf, given.dtype)
        rest = np.broadcast_to(hidden, (*given.shape[:-1], keys - given.shape[-1]))
        given = np.concatenate((given, rest), axis=-1)
    if given.dtype != np.bool_:
        return rule, given
    own = Boolean(given, name="attn_mask")
    return own if rule is None else own & rule, None


def _one_dtype(*arrays: Array) -> np.dtype[Any]:
    """A dtype for Q, K and V: the type of V may differ from that of Q and K."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1:
        return arrays[0].dtype
    return np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)


def _window(left: int, right: int) -> tuple[int | None, int | None] | None:
    for name, size in (("left_window_size", left), ("right_window_size", right)):
        if size < -1:
            raise OptionError(f"{name} is {size}; it must be 0 or more, or −1 for unbounded")
    if left == right == -1:
        return None
    return None if left == -1 else left, None if right == -1 else right


def _precision(softmax_precision: int | None, dtype: np.dtype[Any]) -> str:
    """Only DOUBLE needs more than the usual precision."""
    kinds = onnx.TensorProto
    if softmax_precision not in (None, kinds.FLOAT, kinds.FLOAT16, kinds.DOUBLE, kinds.BFLOAT16):
        raise OptionError(
            f"softmax_precision is {softmax_precision}; it must be 1 (FLOAT), 10 (FLOAT16), "
            "11 (DOUBLE) or 16 (BFLOAT16)"
        )
    exact = softmax_precision == kinds.DOUBLE and dtype != np.float64
    return "exact" if exact else "working"


def _scores(request: Request, mode: int) -> Array:
    """The scores of a mode below 3, computed by the reference."""
    run = Run.of_request(request, request.accumulator)
    return run.value(next(step for step in AFTER[mode] if step in run.steps))


@answering
def rotary_embedding(
    X: Array,
    cos_cache: Array,
    sin_cache: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """The operator `RotaryEmbedding` of opset 23: rotate pairs of features by position.

    (a, b) → (a·cos − b·sin, a·sin + b·cos) for feature pairs (k, k + D/2), or (2k, 2k + 1).

    Parameters
    ----------
    X : ndarray, (B, H, L, D) or (B, L, H·D) with `num_heads`
        The rows to rotate.
    cos_cache, sin_cache : ndarray, (B, L, D/2), or (positions, D/2) with `position_ids`
        Cosines and sines of the angles.
    position_ids : ndarray of int, (B, L), optional
        The row of the caches for each row of X.
    interleaved : int
        Pair neighbouring features instead of one feature of each half.
    rotary_embedding_dim : int
        Rotate only so many first features; 0 for all.

    Returns
    -------
    ndarray, shaped like X
        In its dtype; computed in float64 and rounded once.

    Examples
    --------
    >>> cos, sin = np.zeros((1, 1, 1)), np.ones((1, 1, 1))  # a quarter turn
    >>> rotary_embedding(np.array([[[[1.0, 0.0]]]]), cos, sin).tolist()
    [[[[0.0, 1.0]]]]
    """
    X = as_float_array("X", X)
    by_heads = _heads("X", X, "num_heads", num_heads)
    turned = rotary_embedding_dim or by_heads.shape[-1]
    if not 0 < turned <= by_heads.shape[-1] or turned % 2:
        raise ShapeError(
            f"rotary_embedding_dim is {turned} but X has {by_heads.shape[-1]} features; it must be "
            "even and at most that"
        )
    expected = (by_heads.shape[0], by_heads.shape[2], turned // 2)
    cos, sin = (
        _angles(name, as_float_array(name, cache), position_ids, expected)
        for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache))
    )
    output = np.empty(by_heads.shape, X.dtype)
    turn_rows([(by_heads, output, cos, sin)], interleaved=bool(interleaved))
    return output if X.ndim == 4 else output.swapaxes(1, 2).reshape(X.shape)


def _angles(name: str, cache: Array, places: Any, expected: tuple[int, ...]) -> Array:
    """The cosines or sines for each row of X, in float64."""
    if places is not None:
        places = as_integers("position_ids", places, "integers")
        if cache.ndim != 2:
            raise ShapeError(f"{name} has {cache.ndim} axes; with position_ids it needs 2")
        if places.size and not 0 <= places.min() <= places.max() < len(cache):
            raise OptionError(
                f"position_ids run from {places.min()} to {places.max()}, but {name} has "
                f"{len(cache)} rows, from 0"
            )
        cache = cache[places]
    if cache.shape != expected:
        raise ShapeError(f"{name} gives {cache.shape} but X needs {expected}: (B, L, pairs)")
    return np.ascontiguousarray(cache, np.float64)


# --- for ONNX's evaluator and backend ----------------------------------------------------------

# ONNX finds an operator by the name of its class.


class Attention(OpRun):
    """The operator `Attention`, for ``ReferenceEvaluator(model, new_ops=OPERATORS)``."""

    op_domain = ""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Array, ...]:
        wants_scores = len(self.onnx_node.output) > 3 and self.onnx_node.output[3] != ""
        mode = attributes.pop("qk_matmul_output_mode") or 0
        attributes["qk_matmul_output_mode"] = mode if wants_scores else None
        return tuple(one for one in attention(*inputs, **attributes) if one is not None)


class RotaryEmbedding(OpRun):
    """The operator `RotaryEmbedding`, for ``ReferenceEvaluator(model, new_ops=OPERATORS)``."""

    op_domain = ""

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Array, ...]:
        return (rotary_embedding(*inputs, **attributes),)


OPERATORS: list[type[OpRun]] = [Attention, RotaryEmbedding]


class Backend(OnnxBackend):
    """A backend, for example for `onnx.backend.test`, for models of these operators only.

    ``ReferenceEvaluator(model, new_ops=OPERATORS)`` runs models with other nodes too.

    Examples
    --------
    >>> Backend.supports_device("CPU"), Backend.supports_device("CUDA")
    (True, False)
    """

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether a device is the CPU."""
        return device.partition(":")[0] == "CPU"

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether regard supports every node of the model."""
        return cls.supports_device(device) and not _foreign(model)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """The model, checked by ONNX and ready to run."""
        _refuse_elsewhere(device)
        if foreign := _foreign(model):
            raise OptionError(
                f"the model has nodes that regard does not support: {', '.join(foreign)}; "
                "ReferenceEvaluator(model, new_ops=regard.interop.onnx.OPERATORS) runs it"
            )
        super().prepare(model, device)
        evaluator = ReferenceEvaluator(model, new_ops=OPERATORS)
        return PreparedModel(evaluator, evaluator.input_names)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[Array, ...]:
        """Run one node, with the newest opset."""
        names = [name for name in node.input if name]
        _refuse_elsewhere(device)
        if not _owned(node):
            raise OptionError(f"regard does not support {safe_text(node.op_type, 60)}")
        return PreparedModel(ReferenceEvaluator(node, new_ops=OPERATORS), names).run(inputs)


class PreparedModel(BackendRep):
    """A model prepared by `Backend.prepare`."""

    def __init__(self, evaluator: ReferenceEvaluator, names: Sequence[str]) -> None:
        self.evaluator = evaluator
        self.names = names  # of the inputs

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> tuple[Array, ...]:
        """Compute the outputs from inputs, both in the model's order."""
        if len(inputs) != len(self.names):
            raise OptionError(f"there are {len(self.names)} inputs but {len(inputs)} were given")
        feed = dict(zip(self.names, inputs, strict=True))
        try:
            return tuple(self.evaluator.run(None, feed))
        except TypeError as error:  # the evaluator has its own words for what an operator refuses
            raise (error.__cause__ if isinstance(error.__cause__, DtypeError) else error) from None


def _refuse_elsewhere(device: str) -> None:
    if not Backend.supports_device(device):
        raise OptionError(f"device is {safe_text(device, 60)}; regard computes on the CPU")


def _foreign(model: onnx.ModelProto) -> list[str]:
    """The unsupported nodes, by domain and operator."""
    return sorted(
        {
            safe_text(f"{node.domain or 'ai.onnx'}.{node.op_type}", 60)
            for node in model.graph.node
            if not _owned(node)
        }
    )


def _owned(node: onnx.NodeProto) -> bool:
    return node.domain == "" and node.op_type in [one.__name__ for one in OPERATORS]

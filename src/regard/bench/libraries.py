"""Who is measured: regard and its peers, each called in the way that is fastest for it.

A `Side` is a name, a distribution whose version is looked up, and `load`, which imports the library
and returns how it prepares a case: a call without arguments, or the reason why there is none.
Preparing, copying into its own arrays and compiling are never timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.bench.cases import Inputs

    Array = NDArray[Any]


@dataclass(frozen=True)
class Work:
    """What is timed, and how its answer becomes an array (B, H, L, E)."""

    call: Callable[[], Any]
    read: Callable[[Any], Array]


# The work, or why this side cannot do the case.
Prepare = Callable[["Inputs"], "Work | str"]


@dataclass(frozen=True)
class Side:
    """One library: `load` takes the number of threads."""

    name: str
    distribution: str
    load: Callable[[int], Prepare]
    needs: tuple[str, ...] = ()
    materialises: bool = False  # whether it makes the matrix of scores

    def missing(self) -> str | None:
        """None if it can be loaded, else why not."""
        if find_spec(self.name) is None:
            return "not installed"
        absent = [name for name in self.needs if find_spec(name) is None]
        return f"needs {' and '.join(absent)}, which is not installed" if absent else None

    def version(self) -> str:
        """Of the distribution, as installed."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "unknown"


def peers(names: Sequence[str] | None = None) -> tuple[Side, ...]:
    """The peers of these names, or all of them.

    Raises
    ------
    OptionError
        If there is no peer of some name.

    Examples
    --------
    >>> [side.name for side in peers()]
    ['torch', 'onnxruntime', 'openvino', 'jax', 'numpy']
    """
    if names is None:
        return PEERS
    known = {side.name: side for side in PEERS}
    for name in names:
        if name not in known:
            raise OptionError(
                f"there is no peer {safe_text(repr(name), 40)}; known are {', '.join(known)}"
            )
    return tuple(known[name] for name in dict.fromkeys(names))


def prepared(side: Side, prepare: Prepare, inputs: Inputs) -> Work | str:
    """The work of a side, or the reason why not: its own words if it raised an error."""
    cells = inputs.case.scores
    if side.materialises and cells > MOST_SCORES:
        return f"its matrix of scores would have {cells:.2g} numbers"
    try:
        return prepare(inputs)
    except Exception as error:  # a peer may raise anything
        return reason_of(error)


def reason_of(error: BaseException) -> str:
    """One line of a peer's error."""
    return safe_text(f"{type(error).__name__}: {error}", 200)


MOST_SCORES = 2**28


# --- regard --------------------------------------------------------------------------------------


def _load_regard(threads: int) -> Prepare:
    from regard.api import attention, set_threads

    set_threads(threads)

    def prepare(inputs: Inputs) -> Work:
        query, key, value, options = inputs.query, inputs.key, inputs.value, inputs.options
        if options.keys() == {"causal"}:  # written out, as a user does
            causal = options["causal"]
            return Work(lambda: attention(query, key, value, causal=causal), np.asarray)
        return Work(lambda: attention(query, key, value, **options), np.asarray)

    return prepare


# --- what peers are given ------------------------------------------------------------------------


def _folded(inputs: Inputs) -> Array:
    """Queries (B, G, H / G · L, D): heads that share keys become rows of one head.

    Rows know nothing of each other, so the answer is the same, and at 32/8 heads and 4096 keys the
    fastest calls were several times as fast as with the options of torch and onnxruntime for it.
    """
    case = inputs.case
    if case.G == case.H:
        return inputs.query
    if case.causal or case.mask:
        raise NotImplementedError("grouped heads with a mask are not in any grid")
    rows = case.H // case.G * case.L
    return inputs.query.reshape(case.B, case.G, rows, case.D)


def _unfolded(inputs: Inputs, output: Array) -> Array:
    case = inputs.case
    return output.reshape(case.B, case.H, case.L, case.E)


# --- torch ---------------------------------------------------------------------------------------


def _load_torch(threads: int) -> Prepare:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def tensor(array: Array | None) -> Any:
        if array is None:
            return None
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def prepare(inputs: Inputs) -> Work:
        query, key, value = map(tensor, (_folded(inputs), inputs.key, inputs.value))
        mask = tensor(inputs.keep if inputs.bias is None else inputs.bias)
        causal = inputs.case.causal

        def call() -> Any:
            return sdpa(query, key, value, attn_mask=mask, is_causal=causal)

        return Work(call, lambda output: _unfolded(inputs, output.double().numpy()))

    return prepare


# --- onnxruntime ---------------------------------------------------------------------------------


def _load_onnxruntime(threads: int) -> Prepare:
    import onnxruntime
    from onnx import helper

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4

    def prepare(inputs: Inputs) -> Work:
        arrays = {"Q": _folded(inputs), "K": inputs.key, "V": inputs.value}
        mask = inputs.keep if inputs.bias is None else inputs.bias
        if mask is not None:  # it broadcasts over batch and heads only
            rows = (*mask.shape[:2], inputs.case.L, inputs.case.S)
            arrays["mask"] = np.ascontiguousarray(np.broadcast_to(mask, rows))
        kinds = {name: helper.np_dtype_to_tensor_dtype(a.dtype) for name, a in arrays.items()}
        given = [
            helper.make_tensor_value_info(name, kinds[name], array.shape)
            for name, array in arrays.items()
        ]
        output = helper.make_tensor_value_info("Y", kinds["Q"], None)
        node = helper.make_node("Attention", list(arrays), ["Y"], is_causal=int(inputs.case.causal))
        model = helper.make_model(
            helper.make_graph([node], "attention", given, [output]),
            opset_imports=[helper.make_opsetid("", 23)],
            ir_version=10,
        )
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        # Bound to memory of its own for inputs and output: nothing is copied or allocated.
        shape = (*arrays["Q"].shape[:-1], inputs.case.E)
        place = np.empty(shape, inputs.query.dtype)
        bound = session.io_binding()
        for name, array in arrays.items():
            bound.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        bound.bind_ortvalue_output("Y", onnxruntime.OrtValue.ortvalue_from_numpy(place))

        def read(_: Any) -> Array:
            return _unfolded(inputs, bound.get_outputs()[0].numpy())

        return Work(lambda: session.run_with_iobinding(bound), read)

    return prepare


# --- openvino ------------------------------------------------------------------------------------


def _load_openvino(threads: int) -> Prepare:
    import openvino
    from openvino import opset13

    core = openvino.Core()
    kinds = {
        "float16": openvino.Type.f16,
        "bfloat16": openvino.Type.bf16,
        "float32": openvino.Type.f32,
        "float64": openvino.Type.f64,
        "bool": openvino.Type.boolean,
    }

    def prepare(inputs: Inputs) -> Work:
        arrays = [_folded(inputs), inputs.key, inputs.value]
        mask = inputs.keep if inputs.bias is None else inputs.bias
        if mask is not None:
            arrays.append(mask)
        given = [opset13.parameter(list(a.shape), kinds[a.dtype.name]) for a in arrays]
        node = opset13.scaled_dot_product_attention(*given, causal=inputs.case.causal)
        # bfloat16 has instructions of its own on some CPUs; a hint of float16 means bfloat16 there.
        narrow = inputs.case.dtype == "bfloat16"
        precision = openvino.Type.bf16 if narrow else openvino.Type.f32
        compiled = core.compile_model(
            openvino.Model([node], given),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": precision,
            },
        )
        request = compiled.create_infer_request()
        # Tensors over our own memory, set once: half the cost of handing arrays to every call.
        for place, array in enumerate(arrays):
            request.set_input_tensor(place, _ov_tensor(openvino, array, kinds[array.dtype.name]))

        def read(_: Any) -> Array:
            return _unfolded(inputs, _ov_array(request.get_output_tensor(0), inputs.case.dtype))

        return Work(request.infer, read)

    return prepare


def _ov_tensor(openvino: Any, array: Array, kind: Any) -> Any:
    if array.dtype.name == "bfloat16":
        return openvino.Tensor(array.view(np.uint16), openvino.Shape(array.shape), kind)
    return openvino.Tensor(np.ascontiguousarray(array), shared_memory=True)


def _ov_array(tensor: Any, dtype: str) -> Array:
    data = np.array(tensor.data)
    if dtype != "bfloat16" or data.dtype.name == "bfloat16":
        return data
    from ml_dtypes import bfloat16

    return data.view(bfloat16)


# --- jax -----------------------------------------------------------------------------------------


def _load_jax(threads: int) -> Prepare:
    # Its threads follow the CPUs that the process may run on, which are as many as `threads`.
    import jax
    from jax import numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)

    def prepare(inputs: Inputs) -> Work:
        query, key, value = (
            jnp.asarray(array.swapaxes(1, 2))
            for array in (_folded(inputs), inputs.key, inputs.value)
        )
        extra: dict[str, Any] = {}
        options: dict[str, Any] = {"is_causal": inputs.case.causal}
        if inputs.bias is not None:
            extra["bias"] = jnp.asarray(inputs.bias)
        elif inputs.lengths is not None:
            extra["key_value_seq_lengths"] = jnp.asarray(inputs.lengths, dtype=jnp.int32)
        elif "window" in inputs.options:
            options["local_window_size"] = inputs.options["window"]
        elif inputs.keep is not None:
            extra["mask"] = jnp.asarray(inputs.keep)

        def attention(query: Any, key: Any, value: Any, extra: dict[str, Any]) -> Any:
            return jax.nn.dot_product_attention(query, key, value, **extra, **options)

        attend = jax.jit(attention)

        def read(output: Any) -> Array:
            return _unfolded(inputs, np.asarray(output).swapaxes(1, 2))

        return Work(lambda: attend(query, key, value, extra).block_until_ready(), read)

    return prepare


# --- NumPy ---------------------------------------------------------------------------------------


def _load_numpy(_: int) -> Prepare:
    # OpenBLAS has read its number of threads from the environment when it was loaded.
    def prepare(inputs: Inputs) -> Work:
        case = inputs.case
        half = case.dtype in ("float16", "bfloat16")  # NumPy multiplies those one by one
        query, key, value = _folded(inputs), inputs.key, inputs.value
        keep, bias = inputs.keep, inputs.bias
        if case.causal:
            below = np.tri(case.L, case.S, dtype=bool)
            keep = below if keep is None else keep & below
        scale = 1 / math.sqrt(case.D)

        def call() -> Array:
            q, k, v = query, key, value
            if half:
                q, k, v = (array.astype(np.float32) for array in (query, key, value))
            scores: Array = q @ k.swapaxes(-1, -2) * scale
            if bias is not None:
                scores += bias
            if keep is not None:
                scores = np.where(keep, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            output: Array = weights / weights.sum(-1, keepdims=True) @ v
            return output.astype(query.dtype, copy=False)

        return Work(call, lambda output: _unfolded(inputs, output))

    return prepare


REGARD = Side("regard", "regard", _load_regard)
PEERS = (
    Side("torch", "torch", _load_torch),
    Side("onnxruntime", "onnxruntime", _load_onnxruntime, ("onnx",), materialises=True),
    Side("openvino", "openvino", _load_openvino),
    Side("jax", "jax", _load_jax, materialises=True),
    Side("numpy", "numpy", _load_numpy, materialises=True),
)

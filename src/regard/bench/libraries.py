"""What is measured: regard and its peers, each called in the way that is fastest for it.

A `Library` imports itself and returns a function that prepares a case: a call without arguments, or
the reason why it cannot do the case. Copying into its own arrays and compiling are never timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard.bench.cases import Case, Inputs, dtype_of
from regard.boundary.arrays import Array
from regard.errors import OptionError, safe_text

MOST_SCORES = 2**28
NO_GRADIENTS = "has no gradients"
NO_ROTATION = "does not turn queries and keys"


@dataclass(frozen=True)
class Work:
    """The timed call, and how its answer becomes arrays, in the order of `Case.answers`.

    `kept` is what the call reads without holding it: memory that a library only shares.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Sequence[Array]]
    kept: Any = None


# Prepares a case: the work, or why the library cannot do it.
Prepare = Callable[[Inputs], Work | str]


@dataclass(frozen=True)
class Library:
    """One library; `load` takes the number of threads."""

    name: str
    distribution: str
    load: Callable[[int], Prepare]
    needs: tuple[str, ...] = ()
    materialises: bool = False  # makes the whole matrix of scores
    folds: bool = True  # gets grouped heads as rows of the key head that they share

    def memory(self, case: Case) -> int:
        """Bytes that a case takes at most, about: arrays, and two copies in its own layout."""
        scores = case.scores * max(4, dtype_of(case.dtype).itemsize) if self.materialises else 0
        return 3 * case.array_bytes + (3 if case.direction == "forward" else 6) * scores

    def missing(self) -> str | None:
        """Why it cannot be loaded, or None."""
        if find_spec(self.name) is None:
            return "not installed"
        absent = [name for name in self.needs if find_spec(name) is None]
        return f"needs {' and '.join(absent)}, which is not installed" if absent else None

    def version(self) -> str:
        """The installed version."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return "unknown"


def peers(names: Sequence[str] | None = None) -> tuple[Library, ...]:
    """The peers of these names, or all of them.

    Raises
    ------
    OptionError
        If there is no peer of some name.

    Examples
    --------
    >>> [library.name for library in peers()]
    ['torch', 'onnxruntime', 'openvino', 'jax', 'numpy']
    """
    known = {library.name: library for library in PEERS}
    for name in names or ():
        if name not in known:
            raise OptionError(
                f"there is no peer {safe_text(repr(name), 40)}; known are {', '.join(known)}"
            )
    return PEERS if names is None else tuple(known[name] for name in dict.fromkeys(names))


def prepared(library: Library, prepare: Prepare, inputs: Inputs) -> Work | str:
    """The work of a library on a case, or why there is none."""
    case = inputs.case
    if library.materialises and case.scores > MOST_SCORES:
        return f"its matrix of scores would have {case.scores:.2g} numbers"
    if case.mask == "rotary" and library.load is not _load_regard:
        return NO_ROTATION
    try:
        given = _folded(inputs) if library.folds else inputs
        work = prepare(given)
    except Exception as error:  # a peer may raise anything
        return reason_of(error)
    if given is inputs or isinstance(work, str):
        return work
    shapes = case.answers.values()
    return Work(
        work.call,
        lambda answer: [
            array.reshape(shape) for array, shape in zip(work.read(answer), shapes, strict=True)
        ],
        work.kept,
    )


def reason_of(error: BaseException) -> str:
    """One line of a peer's error."""
    return safe_text(f"{type(error).__name__}: {error}", 200)


def _only(output: Any) -> list[Array]:
    return [np.asarray(output)]


def _folded(inputs: Inputs) -> Inputs:
    """Queries (B, G, H / G · L, D): heads that share keys become rows of one head.

    Rows are independent, so the answer is the same. With 32/8 heads and 4096 keys the fastest calls
    of torch and onnxruntime were several times as fast as with their own option for grouped heads.
    """
    case = inputs.case
    if case.G == case.H:
        return inputs
    if case.causal or case.mask:
        raise NotImplementedError("grouped heads with a mask are not in any grid")
    folded = case.B, case.G, case.H // case.G * case.L
    grad = inputs.grad_output
    return replace(
        inputs,
        query=inputs.query.reshape(*folded, case.D),
        grad_output=None if grad is None else grad.reshape(*folded, case.E),
    )


# --- each library --------------------------------------------------------------------------------


def _load_regard(threads: int) -> Prepare:
    from regard.api import attention, gradients
    from regard.compute.config import set_threads

    set_threads(threads)

    def prepare(inputs: Inputs) -> Work:
        query, key, value, options = inputs.query, inputs.key, inputs.value, inputs.options
        if inputs.case.direction != "forward":
            return training(inputs)
        if options.keys() == {"causal"}:  # written out, as a user does
            causal = options["causal"]
            return Work(lambda: attention(query, key, value, causal=causal), _only)
        return Work(lambda: attention(query, key, value, **options), _only)

    def training(inputs: Inputs) -> Work:
        query, key, value, options = inputs.query, inputs.key, inputs.value, inputs.options
        grad = inputs.grad_output
        wrt = tuple(name for name in inputs.case.answers if name != "output")
        assert grad is not None
        shape = (*query.shape[:-1], value.shape[-1])

        def forward() -> tuple[Array, dict[str, Any]]:
            # The backward pass of half types needs the output before its rounding.
            out = np.empty(shape, np.float32) if query.itemsize == 2 else None
            output, lse = attention(query, key, value, return_lse=True, out=out, **options)
            return output.astype(query.dtype, copy=False), {"output": output, "lse": lse}

        def backward(kept: dict[str, Any]) -> list[Array]:
            made = gradients(query, key, value, grad, wrt=wrt, **kept, **options)
            return [getattr(made, name) for name in wrt]

        if inputs.case.direction == "backward":
            _, kept = forward()
            return Work(lambda: backward(kept), list)

        def both() -> list[Array]:
            output, kept = forward()
            return [output, *backward(kept)]

        return Work(both, list)

    return prepare


def _load_torch(threads: int) -> Prepare:
    import torch

    torch.set_num_threads(threads)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def tensor(array: Array | None) -> Any:
        if array is None:
            return None
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def prepare(inputs: Inputs) -> Work:
        query, key, value = map(tensor, (inputs.query, inputs.key, inputs.value))
        mask, causal = tensor(inputs.keep_or_bias), inputs.case.causal
        grad, direction = tensor(inputs.grad_output), inputs.case.direction
        followed = [query, key, value] + ([mask] if "bias" in inputs.case.answers else [])

        def forward() -> Any:
            return sdpa(query, key, value, attn_mask=mask, is_causal=causal)

        def both() -> Any:
            output = forward()
            return output, *torch.autograd.grad(output, followed, grad)

        def read(answer: Any) -> list[Array]:
            return [one.detach().double().numpy() for one in answer]

        torch.set_grad_enabled(direction != "forward")
        if direction == "forward":
            return Work(lambda: (forward(),), read)
        for one in followed:
            one.requires_grad_()
        if direction == "both":
            return Work(both, read)
        kept = forward()
        return Work(lambda: torch.autograd.grad(kept, followed, grad, retain_graph=True), read)

    return prepare


def _load_onnxruntime(threads: int) -> Prepare:
    import onnxruntime
    from onnx import helper

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4

    def prepare(inputs: Inputs) -> Work | str:
        if inputs.case.direction != "forward":
            return NO_GRADIENTS
        arrays = {"Q": inputs.query, "K": inputs.key, "V": inputs.value}
        mask = inputs.keep_or_bias
        if mask is not None:  # onnxruntime broadcasts it over batch and heads only
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
        # Inputs and output are bound to their memory, so a call neither copies nor allocates.
        place = np.empty((*inputs.query.shape[:-1], inputs.case.E), inputs.query.dtype)
        bound = session.io_binding()
        for name, array in arrays.items():
            bound.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        bound.bind_ortvalue_output("Y", onnxruntime.OrtValue.ortvalue_from_numpy(place))
        return Work(
            lambda: session.run_with_iobinding(bound),
            lambda _: [bound.get_outputs()[0].numpy()],
            (arrays, place),
        )

    return prepare


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

    def tensor(array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            shape = openvino.Shape(array.shape)
            return openvino.Tensor(array.view(np.uint16), shape, kinds["bfloat16"])
        return openvino.Tensor(array, shared_memory=True)

    def prepare(inputs: Inputs) -> Work | str:
        if inputs.case.direction != "forward":
            return NO_GRADIENTS
        arrays = [inputs.query, inputs.key, inputs.value]
        causal, bias, visible = inputs.case.causal, inputs.bias, inputs.visible_keys()
        if causal and bias is not None and visible is not None:  # with `causal` it reads no mask
            causal = False
            arrays.append(np.where(visible, bias, bias.dtype.type(-np.inf)))
        elif inputs.keep_or_bias is not None:
            arrays.append(np.ascontiguousarray(inputs.keep_or_bias))
        given = [opset13.parameter(list(a.shape), kinds[a.dtype.name]) for a in arrays]
        node = opset13.scaled_dot_product_attention(*given, causal=causal)
        # Where the CPU has no instructions of float16, a hint of it means bfloat16: 8 units off.
        narrow = inputs.case.dtype == "bfloat16"
        has_float16 = "FP16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        hint = {"bfloat16": "bfloat16", "float16": "float16" if has_float16 else "float32"}
        hints = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": kinds[hint.get(inputs.case.dtype, "float32")],
        }
        compiled = core.compile_model(openvino.Model([node], given), "CPU", hints)
        request = compiled.create_infer_request()
        # Input tensors share our memory and are set once, which halves the cost of small calls.
        tensors = [tensor(array) for array in arrays]
        for place, one in enumerate(tensors):
            request.set_input_tensor(place, one)

        def read(_: Any) -> list[Array]:
            data = np.array(request.get_output_tensor(0).data)
            return [data.view(inputs.query.dtype) if narrow else data]

        return Work(request.infer, read, (arrays, tensors))

    return prepare


def _load_jax(threads: int) -> Prepare:
    # Its threads follow the CPUs of the process, which are as many as `threads`.
    import jax
    from jax import numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)

    def prepare(inputs: Inputs) -> Work:
        def tensor(array: Array | None) -> Any:
            return None if array is None else jnp.asarray(array.swapaxes(1, 2))

        query, key, value = map(tensor, (inputs.query, inputs.key, inputs.value))
        grad, direction = tensor(inputs.grad_output), inputs.case.direction
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

        def read(answer: Any) -> list[Array]:
            names = zip(inputs.case.answers, map(np.asarray, answer), strict=True)
            return [one if name == "bias" else one.swapaxes(1, 2) for name, one in names]

        attend = jax.jit(attention)
        if direction == "forward":
            return Work(lambda: (attend(query, key, value, extra).block_until_ready(),), read)

        # Followed alone: a mask and lengths have no gradients.
        followed = {"bias": extra.pop("bias")} if "bias" in inputs.case.answers else {}

        def both(query: Any, key: Any, value: Any, followed: Any, grad: Any) -> Any:
            output, back = pulled(query, key, value, followed)
            return output, *arrays(back(grad))

        def pulled(*inputs: Any) -> Any:
            return jax.vjp(lambda q, k, v, more: attend(q, k, v, {**extra, **more}), *inputs)

        def arrays(made: Any) -> Any:
            return *made[:3], *made[3].values()

        if direction == "both":
            trained = jax.jit(both)
            return Work(
                lambda: jax.block_until_ready(trained(query, key, value, followed, grad)), read
            )
        _, back = jax.jit(pulled)(query, key, value, followed)
        again = jax.jit(lambda back, grad: arrays(back(grad)))
        return Work(lambda: jax.block_until_ready(again(back, grad)), read)

    return prepare


def _load_numpy(_: int) -> Prepare:
    # OpenBLAS reads its number of threads from the environment when it is loaded.
    def prepare(inputs: Inputs) -> Work:
        case = inputs.case
        half = case.dtype in ("float16", "bfloat16")  # no BLAS for these
        query, key, value = inputs.query, inputs.key, inputs.value
        keep, bias = inputs.visible_keys(slice(None)), inputs.bias
        grad, scale = inputs.grad_output, 1 / math.sqrt(case.D)

        def wide(*arrays: Array | None) -> list[Any]:
            return [x.astype(np.float32) if half and x is not None else x for x in arrays]

        def forward() -> tuple[Array, Array]:
            q, k, v = wide(query, key, value)
            scores: Array = q @ k.swapaxes(-1, -2) * scale
            if bias is not None:
                scores += bias
            if keep is not None:
                scores = np.where(keep, scores, -np.inf)
            weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            return weights @ v, weights

        def backward(output: Array, weights: Array) -> list[Array]:
            q, k, v, g = wide(query, key, value, grad)
            delta = (g * output).sum(-1, keepdims=True)
            by_scores: Array = weights * (g @ v.swapaxes(-1, -2) - delta)
            made = [by_scores @ k * scale, by_scores.swapaxes(-1, -2) @ q * scale]
            made.append(weights.swapaxes(-1, -2) @ g)
            if "bias" in case.answers:
                made.append(by_scores.sum(0, keepdims=True) if case.B > 1 else by_scores)
            return made

        def rounded(arrays: list[Array]) -> list[Array]:
            return [one.astype(query.dtype, copy=False) for one in arrays]

        def both() -> list[Array]:
            kept = forward()
            return rounded([kept[0], *backward(*kept)])

        if case.direction == "forward":
            return Work(lambda: rounded([forward()[0]]), list)
        if case.direction == "both":
            return Work(both, list)
        kept = forward()
        return Work(lambda: rounded(backward(*kept)), list)

    return prepare


REGARD = Library("regard", "regard", _load_regard, folds=False)
PEERS = (
    Library("torch", "torch", _load_torch),
    Library("onnxruntime", "onnxruntime", _load_onnxruntime, ("onnx",), materialises=True),
    Library("openvino", "openvino", _load_openvino),
    Library("jax", "jax", _load_jax, materialises=True),
    Library("numpy", "numpy", _load_numpy, materialises=True),
)

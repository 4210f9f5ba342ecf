"""How far from the exact answer `regard` and its neighbours are, on a fixed list of workloads.

    python benchmarks/accuracy.py            # everything that is installed, in one run
    python benchmarks/accuracy.py long       # workloads whose name has this in it
    python benchmarks/accuracy.py gradients  # the backward pass, at 64 to 4096 keys

The error of a number is given in units of u·Σ p|v|: half the distance between two floats at the
size of what was added up. Prints one table in Markdown and then every workload on which `regard`'s
error (root mean square) exceeds that of the best neighbour by more than a tenth. Errors of
gradients are given in those of rounding the exact gradient once. Owns the list of workloads; the
exact answer is computed here in 80-bit numbers, from the formula (gradients of types below float64:
in float64).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import regard
from regard.bench.cases import dtype_of

Array = np.ndarray[Any, Any]

HEADS, QUERIES, COLUMNS = 2, 48, 64  # 6144 numbers each: a mean square to about 2 %
MOST_BEHIND = 1.1
CORRECTLY_ROUNDED = 0.9999


class Call(NamedTuple):
    """One workload: arrays (H, rows, columns), and what is added or hidden."""

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    causal: bool = False  # with as many queries as keys


def main(wanted: list[str]) -> int:
    if wanted == ["gradients"]:
        return main_of_gradients()
    peers = {name: peer for name, peer in PEERS.items() if answers(peer)}
    absent = [name for name in PEERS if name not in peers]
    columns = ["regard", *peers, "regard, exact"]
    print("| workload | " + " | ".join(f"{name} rms / max" for name in columns), end=" |")
    print(" correctly rounded | regard / best |")
    print("|---" * (len(columns) + 3) + "|")
    behind, seldom = [], []
    for name, make in WORKLOADS.items():
        if wanted and not any(part in name for part in wanted):
            continue
        call = make(np.random.default_rng(len(name)))
        exact, unit = exactly(call)
        outputs = {"regard": ours(call), **{peer: PEERS[peer](call) for peer in peers}}
        wide = ours(call, precision="exact") if call.query.dtype != np.float64 else None
        outputs["regard, exact"] = wide
        errors = {who: error(x, exact, unit) for who, x in outputs.items() if x is not None}
        best = min((errors[peer][0] for peer in peers if peer in errors), default=np.inf)
        ratio = errors["regard"][0] / best if best else float(errors["regard"][0] > 0) * np.inf
        ratio = 1.0 if np.isnan(ratio) else ratio
        cells = [
            f"{errors[who][0]:.3g} / {errors[who][1]:.3g}" if who in errors else "–"
            for who in columns
        ]
        share = np.nan
        if wide is not None:
            share = float((wide == exact.astype(wide.dtype)).mean())
        rounded = "–" if wide is None else f"{100 * share:.3f} %"
        print(f"| {name} | " + " | ".join(cells) + f" | {rounded} | {ratio:.2f} |", flush=True)
        if ratio > MOST_BEHIND:
            behind.append(f"{name} ({ratio:.2f})")
        if share < CORRECTLY_ROUNDED:
            seldom.append(f"{name} ({100 * share:.3f} %)")
    print(f"\nBehind the best by more than a tenth: {', '.join(behind) or 'nowhere'}.")
    print(f"Exact, but too seldom correctly rounded: {', '.join(seldom) or 'nowhere'}.")
    if absent:
        print(f"Not installed: {', '.join(absent)}.")
    return bool(behind or seldom)


def exactly(call: Call) -> tuple[Array, Array]:
    """The exact output, and u·Σ p|v| of each of its numbers, in 80-bit numbers."""
    q, k, v = (x.astype(np.longdouble) for x in call[:3])
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(np.longdouble(q.shape[-1]))
    if call.bias is not None:
        logits = logits + call.bias
    if call.causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    half = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}
    return p @ v, half.get(call.query.dtype.name, 2.0**-8) * (p @ abs(v))


def error(output: Array, exact: Array, unit: Array) -> tuple[float, float]:
    """Root mean square and maximum."""
    off = abs(output.astype(np.longdouble) - exact) / unit
    return float(np.sqrt((off**2).mean())), float(off.max())


# who is asked -------------------------------------------------------------------------------------


def ours(call: Call, **options: Any) -> Array:
    return regard.attention(*call[:3], bias=call.bias, causal=call.causal, **options)


def with_torch(call: Call) -> Array | None:
    import torch

    def tensor(x: Array) -> Any:
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)[None]
        return torch.from_numpy(x)[None]

    q, k, v = (tensor(x) for x in call[:3])
    bias = None if call.bias is None else tensor(call.bias).to(q.dtype)
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=call.causal
    )[0]
    if call.query.dtype.name == "bfloat16":
        return result.view(torch.int16).numpy().view(call.query.dtype)
    return result.numpy()


def with_jax(call: Call) -> Array:
    import jax

    jax.config.update("jax_enable_x64", True)
    # It wants keys as wide as values: columns of zeros change nothing.
    width, columns = call.query.shape[-1], call.value.shape[-1]
    most = max(width, columns)
    q, k, v = (
        jax.numpy.asarray(np.pad(x, ((0, 0), (0, 0), (0, most - x.shape[-1])))[None])
        for x in (x.swapaxes(0, 1) for x in call[:3])
    )
    bias = None if call.bias is None else jax.numpy.asarray(call.bias[None]).astype(q.dtype)
    result = jax.nn.dot_product_attention(q, k, v, bias, scale=width**-0.5, is_causal=call.causal)
    return np.asarray(result)[0].swapaxes(0, 1)[..., :columns]


def with_onnxruntime(call: Call) -> Array | None:
    import onnx
    import onnxruntime

    if call.query.dtype != np.float32:
        return None  # its Attention on a CPU is for float32 alone
    names = ["query", "key", "value"] + ["bias"] * (call.bias is not None)
    arrays = [x[None] for x in (*call[:3], call.bias) if x is not None]
    floats = onnx.TensorProto.FLOAT
    inputs = [
        onnx.helper.make_tensor_value_info(name, floats, x.shape)
        for name, x in zip(names, arrays, strict=True)
    ]
    output = onnx.helper.make_tensor_value_info("output", floats, None)
    node = onnx.helper.make_node("Attention", names, ["output"], is_causal=int(call.causal))
    graph = onnx.helper.make_graph([node], "attention", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    model.ir_version = 10
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip(names, arrays, strict=True)))[0][0]


def with_numpy(call: Call) -> Array | None:
    if call.query.dtype.name not in ("float32", "float64"):
        return None  # its matrix product in half precision adds in half precision
    q, k, v = call[:3]
    logits = q @ k.swapaxes(-1, -2) * q.dtype.type(1 / np.sqrt(q.shape[-1]))
    if call.bias is not None:
        logits = logits + call.bias
    if call.causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, q.dtype.type(-np.inf))
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


PEERS: dict[str, Callable[[Call], Array | None]] = {
    "torch": with_torch,
    "jax": with_jax,
    "onnxruntime": with_onnxruntime,
    "numpy": with_numpy,
}


def answers(peer: Callable[[Call], Array | None]) -> bool:
    try:
        peer(normal(np.random.default_rng(0)))
    except ImportError:
        return False
    return True


# what is asked ------------------------------------------------------------------------------------


def normal(
    rng: np.random.Generator,
    keys: int = 512,
    width: int = 64,
    size: float = 1.0,
    queries: int = QUERIES,
    dtype: Any = np.float32,
) -> Call:
    """Normally distributed numbers; queries and keys of this size."""
    shapes = (queries, width), (keys, width), (keys, COLUMNS)
    q, k, v = (rng.normal(size=(HEADS, *shape)) for shape in shapes)
    return Call((q * size).astype(dtype), (k * size).astype(dtype), v.astype(dtype))


def one_query(rng: np.random.Generator) -> Call:
    """One query for each of many heads."""
    call = normal(rng, 2048, 128, queries=1)
    many = [rng.normal(size=(64, *x.shape[1:])).astype(x.dtype) for x in call[:3]]
    return Call(*many)


def with_bias(rng: np.random.Generator, size: float) -> Call:
    call = normal(rng)
    bias = rng.normal(size=(HEADS, QUERIES, 512)) * size
    return call._replace(bias=bias.astype(np.float32))


def with_distances(rng: np.random.Generator) -> Call:
    distance = abs(np.arange(QUERIES)[:, None] + 400 - np.arange(512))
    slopes = np.array([0.5, 0.03125])[:, None, None]
    return normal(rng)._replace(bias=(-slopes * distance).astype(np.float32))


def one_hot(rng: np.random.Generator) -> Call:
    """Every query finds one key, far above all others."""
    call = normal(rng)
    return call._replace(query=call.key[:, :QUERIES] * np.float32(8))


def with_sinks(rng: np.random.Generator) -> Call:
    """Four keys that draw most of the attention and have small values, as models learn them."""
    call = normal(rng, 1024)
    call.key[:, :4] += call.query.mean(axis=1, keepdims=True) * 30
    call.query[...] += call.query.mean(axis=1, keepdims=True) * 6
    call.value[:, :4] *= np.float32(0.01)
    return call


def with_outlying_columns(rng: np.random.Generator) -> Call:
    """Two columns of queries and keys that are far larger than all others."""
    call = normal(rng)
    call.query[..., [3, 40]] *= np.float32(20)
    call.key[..., [3, 40]] *= np.float32(20)
    return call


def with_a_common_value(rng: np.random.Generator) -> Call:
    call = normal(rng)
    return call._replace(value=call.value + np.float32(100))


def equal_keys(rng: np.random.Generator) -> Call:
    call = normal(rng)
    return call._replace(key=np.repeat(call.key[:, :1], 512, axis=1))


def bfloat16(rng: np.random.Generator) -> Call:
    import ml_dtypes

    return normal(rng, dtype=ml_dtypes.bfloat16)


def workload(make: Callable[..., Call], *given: Any, **sizes: Any) -> Callable[..., Call]:
    return lambda rng: make(rng, *given, **sizes)


WORKLOADS: dict[str, Callable[[np.random.Generator], Call]] = {
    **{f"size {s:g}": workload(normal, size=s) for s in (0.1, 0.3, 1.0, 2.0, 3.0, 10.0)},
    **{
        f"{n} keys": workload(normal, n)
        for n in (1, 2, 3, 7, 16, 33, 64, 128, 256, 257, 1024, 2048, 4096, 8192)
    },
    **{f"width {d}": workload(normal, width=d) for d in (1, 2, 5, 8, 16, 32, 96, 128, 256)},
    "one query": one_query,
    "bias of size 1": workload(with_bias, 1.0),
    "bias of size 10": workload(with_bias, 10.0),
    "bias by distance": with_distances,
    "causal": lambda rng: normal(rng, 256, queries=256)._replace(causal=True),
    "causal, long": lambda rng: normal(rng, 1024, queries=1024)._replace(causal=True),
    "one-hot": one_hot,
    "sinks": with_sinks,
    "outlying columns": with_outlying_columns,
    "a common value": with_a_common_value,
    "equal keys": equal_keys,
    "float64": workload(normal, dtype=np.float64),
    "float64, size 3": workload(normal, size=3.0, dtype=np.float64),
    "float16": workload(normal, dtype=np.float16),
    "bfloat16": bfloat16,
}

# gradients ----------------------------------------------------------------------------------------

LENGTHS = (64, 256, 1024, 4096)
GRADIENTS = "dQ", "dK", "dV"
DTYPES = ("float32", "float64", "float16", "bfloat16")


def main_of_gradients() -> int:
    peers = {"torch": torch_gradients, "jax": jax_gradients}
    peers = {name: peer for name, peer in peers.items() if name in PEERS and answers(PEERS[name])}
    columns = ["regard", *peers]
    print("| L = S | " + " | ".join(f"{name}: {', '.join(GRADIENTS)}" for name in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    behind = []
    for kind in DTYPES:
        for causal in (False, True):
            for length in LENGTHS:
                name = f"{kind} {'causal ' if causal else ''}{length}"
                call, grad = training(kind, length, causal)
                exact = exact_gradients(call, grad)
                found = {"regard": regard.gradients(*call[:3], grad, causal=causal)[:3]}
                found |= {who: peer(call, grad) for who, peer in peers.items()}
                errors = {
                    who: roundings(made, exact, call.query.dtype)
                    for who, made in found.items()
                    if made is not None
                }
                cells = [
                    ", ".join(f"{one:.2f}" if one < 1e3 else f"{one:.0e}" for one in errors[who])
                    if who in errors
                    else "–"
                    for who in columns
                ]
                print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
                others = [one for who, one in errors.items() if who != "regard"]
                for place, which in enumerate(GRADIENTS):
                    best = min((one[place] for one in others), default=np.inf)
                    if errors["regard"][place] > MOST_BEHIND * best:
                        behind.append(f"{name} {which} ({errors['regard'][place] / best:.2f})")
    print(f"\nBehind the best by more than a tenth: {', '.join(behind) or 'nowhere'}.")
    return bool(behind)


def training(kind: str, length: int, causal: bool) -> tuple[Call, Array]:
    """A workload with as many queries as keys, and the gradient of its output."""
    rng = np.random.default_rng(length)
    arrays = [rng.normal(size=(1, length, 64)).astype(dtype_of(kind)) for _ in "qkvg"]
    return Call(*arrays[:3], causal=causal), arrays[3]


def exact_gradients(call: Call, grad: Array) -> list[Array]:
    """dQ, dK, dV: 256 rows at a time, in numbers with at least 11 bits more."""
    wide = np.longdouble if call.query.dtype == np.float64 else np.float64
    query, key, value, grad = (x[0].astype(wide) for x in (*call[:3], grad))
    scale = 1 / np.sqrt(wide(query.shape[-1]))
    made = [np.zeros_like(x) for x in (query, key, value)]
    for first in range(0, len(query), 256):
        rows = slice(first, min(first + 256, len(query)))
        keys = slice(0, rows.stop if call.causal else len(key))
        logits = query[rows] @ key[keys].T * scale
        if call.causal:
            ahead = np.arange(len(key))[keys] > np.arange(len(query))[rows, None]
            logits[ahead] = -np.inf
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        dp = grad[rows] @ value[keys].T
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
        made[0][rows] = ds @ key[keys] * scale
        made[1][keys] += ds.T @ query[rows] * scale
        made[2][keys] += p.T @ grad[rows]
    return [x[None] for x in made]


def roundings(made: Any, exact: list[Array], dtype: Any) -> list[float]:
    """Each gradient's error (root mean square), in those of rounding the exact one once."""
    pairs = list(zip(made, exact, strict=True))
    once = [np.linalg.norm(x.astype(dtype).astype(x.dtype) - x) for x in exact]
    off = [np.linalg.norm(x.astype(right.dtype) - right) for x, right in pairs]
    return [float(one / unit) for one, unit in zip(off, once, strict=True)]


def torch_gradients(call: Call, grad: Array) -> list[Array] | None:
    import torch

    half = grad.dtype.name == "bfloat16"
    q, k, v, g = (
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)[None]
        if half
        else torch.from_numpy(x)[None]
        for x in (*call[:3], grad)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=call.causal)
    return [x[0].double().numpy() for x in torch.autograd.grad(output, inputs, g)]


def jax_gradients(call: Call, grad: Array) -> list[Array] | None:
    import jax

    if grad.dtype == np.float16:
        return None  # its products of float16 are not for CPUs
    jax.config.update("jax_enable_x64", True)
    q, k, v, g = (jax.numpy.asarray(x.swapaxes(0, 1)[None]) for x in (*call[:3], grad))

    def made(q: Any, k: Any, v: Any, g: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=call.causal)

        return jax.vjp(attend, q, k, v)[1](g)

    return [np.asarray(x)[0].swapaxes(0, 1) for x in jax.jit(made)(q, k, v, g)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How each public function that takes numbers is called: the rows of one table.

A row names the function, its arguments with numbers of their own kind (float64; int64 for counts
and places; bool for masks), and what to call with them; by default the function itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import regard

# --- arguments without numbers -------------------------------------------------------------------

_FLAGS = """
allow_fragile bidirectional causal enable_gqa force gradients interleaved is_causal normalise
return_lse return_residual return_weights stop_at_eos straight_through truncate
"""
_COUNTS = """
at axes batch batch_size budget capacity chunks count digits head heads index key_heads kv_num_heads
layer left_window_size local_window_size max_new_tokens most num_heads number operand position
q_num_heads qk_matmul_output_mode right_window_size rotary_embedding_dim seed shape shapes
softmax_precision temperature term terms threads top_k top_p where window dropout dropout_p
time_limit tolerance
"""
_WORDS = """
context_features device directory distribution draw dtype embedding_features feature feature_map
generator implementation kernel key_features key_labels key_row labels layout library map measure
mode name names note order output_features path precision query_labels row row_notes signature
softmax step steps stop text texts title value_features wrt
"""
_OBJECTS = """
self after changes config data executor expect function kwargs messages model module more node
normalize other outcome outputs_info parameters positions problem random scaling score stream
trace watch
"""
NO_ARRAYS = {*_FLAGS.split(), *_COUNTS.split(), *_WORDS.split(), *_OBJECTS.split()}

# What a call takes in `**options`.
IN_OPTIONS = {"mask", "bias", "offset", "scale", "softcap", "sink"}

# Arguments that have the name of an array but are none, or whose parts have rows.
BESIDE = {
    ("regard.Explanation.without", "key"),  # the name of a row
    ("regard.diagnose", "call"),  # a function
    ("regard.diagnose", "mask"),  # how masks are read
    ("regard.diagnose", "scale"),  # what is meant
    ("regard.interop.onnx.Backend.run_node", "inputs"),  # Q, K and V
    ("regard.interop.onnx.PreparedModel.run", "inputs"),
    *(("regard.interop.zarr.attention", one) for one in ("output", "lse", "memory", "workers")),
    *(("regard.testing.assert_attention_correct", one) for one in IN_OPTIONS),  # of `diagnose`
    *(("regard.testing.assert_gradients_correct", one) for one in IN_OPTIONS),
    *(("regard.models.LanguageModel.chat", one) for one in IN_OPTIONS),  # of `generate`
}


# --- numbers -------------------------------------------------------------------------------------


def numbers(*shape: int) -> np.ndarray:
    """Whole numbers that every kind has; products of two are too large for 8 bits."""
    return (np.arange(np.prod(shape)) * 7 % 19).reshape(shape).astype(np.float64)


def counts(*given: int) -> np.ndarray:
    return np.array(given, np.int64)


def one(number: float) -> np.ndarray:
    """A number without axes."""
    return np.array(number)


def seen(*shape: int) -> np.ndarray:
    """Booleans, with a True in each row."""
    return (np.arange(np.prod(shape)) % 3 != 1).reshape(shape)


QKV = {"query": numbers(2, 3, 4), "key": numbers(2, 5, 4) + 1, "value": numbers(2, 5, 3) + 2}
SMALL = [array / 10 for array in QKV.values()]  # where something else is of another kind
SCALE = {"scale": one(0.01)}  # so that no weight is all of a row's
OPTIONS = {
    **SCALE,
    **{"mask": seen(3, 5), "bias": numbers(3, 5), "sink": numbers(2)},
    **{"softcap": one(2.0), "offset": one(2)},
}


# --- rows ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    of: str
    call: Callable[..., Any]
    given: Mapping[str, np.ndarray]
    needs: tuple[str, ...]
    said: Mapping[str, str]  # what messages call an argument, where it is not its name
    note: str

    @property
    def name(self) -> str:
        return f"{self.of} {self.note}".strip()


ROWS: list[Row] = []


def row(
    of: str,
    call: Callable[..., Any] | None = None,
    *,
    needs: str = "",
    note: str = "",
    said: Mapping[str, str] | None = None,
    **given: np.ndarray,
) -> None:
    ROWS.append(Row(of, call or itself(of), given, tuple(needs.split()), said or {}, note))


def itself(of: str) -> Callable[..., Any]:
    """The public function or class of that name, imported when it is called."""
    room, _, name = of.removesuffix("()").rpartition(".")
    return lambda **given: getattr(import_module(room), name)(**given)


def attended(**options: Any) -> Any:
    """Attention, for what is an option of it."""
    return regard.attention(*SMALL, offset=1, **options)


# --- regard --------------------------------------------------------------------------------------

MORE = {"return_weights": True, "return_lse": True}
row("regard.attention", **QKV, **SCALE, note="of inputs alone")
row(
    "regard.attention", lambda **own: regard.attention(**own, causal=True, **MORE), **QKV, **OPTIONS
)
row(
    "regard.attention",
    lambda **own: regard.attention(**own, positions=regard.positions.Rotary(), offset=1),
    **{**QKV, **SCALE},
    note="with positions",
)
row(
    "regard.attention",
    lambda **own: regard.attention(**own, score=regard.scores.Distance()),
    **{**QKV, **SCALE},
    note="with a score",
)
row("regard.attention", attended, out=numbers(2, 3, 3), note="into out")
row("regard.softmax", scores=numbers(3, 5) / 10, axis=one(1))
row("regard.merge", outputs=numbers(2, 3, 4), lses=numbers(2, 3) / 10)
row(
    "regard.linear_attention",
    lambda **own: regard.linear_attention(**own, causal=True),
    **{**QKV, "offset": one(2)},
)
row(
    "regard.gradients",
    lambda **own: regard.gradients(
        **own, causal=True, wrt=("query", "key", "value", "bias", "sink", "scale")
    ),
    **{**QKV, **OPTIONS, "grad_output": numbers(2, 3, 3), "grad_lse": numbers(2, 3)},
)
row(
    "regard.gradients",
    lambda **own: regard.gradients(*SMALL, np.ones((2, 3, 3)), **own),
    **regard.attention(*SMALL, return_lse=True)._asdict(),
    note="after a call",
)
row(
    "regard.weights",
    lambda **own: regard.weights(**own, causal=True),
    **{"query": QKV["query"], "key": QKV["key"], "lse": numbers(2, 3) + 100, **OPTIONS},
    rows=counts(2, 0),
)
row(
    "regard.explain",
    lambda **own: regard.explain(**own, causal=True),
    **{**QKV, **OPTIONS, "target": numbers(2, 3, 3)},
)
row("regard.explain", **QKV, **SCALE, grad_output=numbers(2, 3, 3), note="with a gradient")

READY = {"queries": QKV["query"], "keys": QKV["key"], "values": QKV["value"]}
row(
    "regard.explain",
    lambda **own: regard.explain(regard.Problem(**READY), causal=True, **own),
    **{**OPTIONS, "target": numbers(2, 3, 3)},
    note="of a problem",
)
row(
    "regard.Problem.replace",
    lambda **own: regard.explain(regard.Problem(**READY).replace(**own)),
    **{"queries": QKV["query"], "mask": seen(3, 5), "bias": numbers(3, 5)},
)


def problem(**given: Any) -> Any:
    """What a problem has, and what comes out of it."""
    more = {"heads": 2, "causal": True} if "embeddings" in given else {}
    made = regard.Problem(**given, **more)
    return {name: getattr(made, name) for name in given}, regard.explain(made)


PROJECTED = {
    **{"embeddings": numbers(3, 4) / 100, "context": numbers(5, 4) / 100},
    **{"W_q": numbers(4, 4), "W_k": numbers(4, 4), "W_v": numbers(4, 6), "W_o": numbers(6, 3)},
    **{"b_q": numbers(4), "b_k": numbers(4), "b_v": numbers(6), "b_o": numbers(3)},
}
row("regard.Problem()", problem, **PROJECTED, **OPTIONS, lengths=one(5), target=numbers(3, 3))
row(
    "regard.Problem()",
    problem,
    **{**READY, **SCALE, "grad_output": numbers(2, 3, 3)},
    **{"query_segments": counts(0, 1, 1), "key_segments": counts(0, 1, 1, 0, 0)},
    note="of ready vectors",
)


def expectation(**given: Any) -> Any:
    made = regard.Expectation(step="weights", **given)
    return {name: getattr(made, name) for name in given}


row("regard.Expectation()", expectation, value=numbers(3, 5), within=one(1.0), relative=one(0.5))
row("regard.Expectation()", expectation, variance=one(1.0), note="of a variance")


# --- a layer, a cache ----------------------------------------------------------------------------

WEIGHTS = {name: array for name, array in PROJECTED.items() if name[1] == "_"}
X = {"x": PROJECTED["embeddings"], "context": PROJECTED["context"], **OPTIONS}
OF_LAYER = {"grad_output": numbers(3, 3)}


def layer(**given: Any) -> Any:
    return regard.MultiHeadAttention(**{**WEIGHTS, **given}, heads=2)


row("regard.MultiHeadAttention()", lambda **own: layer(**own)(X["x"]), **WEIGHTS)
row(
    "regard.MultiHeadAttention.__call__",
    lambda **own: layer()(**own, causal=True, return_weights=True),
    **X,
)
row(
    "regard.MultiHeadAttention.gradients",
    lambda **own: layer().gradients(**own, causal=True),
    **{**X, **OF_LAYER},
)
row(
    "regard.MultiHeadAttention.gradients",
    lambda grad_output, **own: layer(**own).gradients(X["x"], grad_output),
    **{**WEIGHTS, **OF_LAYER},
    note="of weights",
)
row(
    "regard.MultiHeadAttention.explain",
    lambda **own: layer().explain(**own, causal=True),
    **{**X, "target": numbers(3, 3)},
)

TOKENS = {"key": numbers(2, 1, 5, 4), "value": numbers(2, 1, 5, 3)}


def filled(dtype: str | None = None, **given: Any) -> Any:
    cache = regard.KVCache(dtype=dtype)
    cache.append(**{**TOKENS, **given})
    return cache


def asked(cache: Any) -> Any:
    return cache.lengths, cache.attend(numbers(2, 1, 1, 4) / 10)


def truncated(length: Any) -> Any:
    cache = filled()
    cache.truncate(length)
    return cache.lengths


row("regard.KVCache.append", lambda **own: asked(filled(**own)), **TOKENS, lengths=counts(5, 3))
for kind in ("float64", "int8"):
    row(
        "regard.KVCache.append",
        lambda kind=kind, **own: asked(filled(kind, **own)),
        **TOKENS,
        note=f"as {kind}",
    )
row(
    "regard.KVCache.attend",
    lambda **own: filled().attend(**own, **MORE),
    **{"query": numbers(2, 1, 3, 4), "lengths": counts(3, 2), "mask": seen(3, 5)},
    **{"bias": numbers(3, 5), "sink": numbers(1), "softcap": one(2.0), **SCALE},
)
row(
    "regard.KVCache.attend",
    lambda out: filled().attend(numbers(2, 1, 3, 4) / 10, out=out),
    out=numbers(2, 1, 3, 3),
    note="into out",
)
row("regard.KVCache.truncate", truncated, length=counts(4, 1))


# --- masks, scores, normalisations, positions ----------------------------------------------------


def part(use: Callable[[Any], Any], of: str, **given: Any) -> None:
    """The row of an object that is made, then used."""
    row(of, lambda **own: use(itself(of)(**own)), **given)


def applied(rule: Any) -> Any:
    return rule.visible(3, 5), attended(mask=rule)


part(applied, "regard.masks.Boolean()", array=seen(3, 5), said={"array": "mask"})
part(applied, "regard.masks.Lengths()", lengths=one(4))
part(applied, "regard.masks.Window()", left=one(1), right=one(1))
part(
    applied,
    "regard.masks.Segments()",
    **{"query": counts(0, 1, 1), "key": counts(0, 1, 1, 0, 0)},
    said={"query": "segments of the queries", "key": "segments of the keys"},
)
row(
    "regard.masks.Segments.from_lengths",
    lambda **given: applied(regard.masks.Segments.from_lengths(**given)),
    **{"query_lengths": counts(1, 2), "key_lengths": counts(2, 3)},
)
RULES = {
    "Causal": regard.masks.Causal(),
    "Boolean": regard.masks.Boolean(seen(3, 5)),
    "Lengths": regard.masks.Lengths(4),
    "Mask": regard.masks.Causal() & ~regard.masks.Boolean(seen(3, 5)),
    "Segments": regard.masks.Segments([0, 1, 1], [0, 1, 1, 0, 0]),
    "Window": regard.masks.Window(1, 1),
}
for name, rule in RULES.items():
    row(f"regard.masks.{name}.visible", rule.visible, queries=one(3), keys=one(5), offset=one(1))


def scored(score: Any) -> Any:
    return attended(score=score)


def placed(positions: Any) -> Any:
    return attended(positions=positions)


def embedded(positions: Any) -> Any:
    return layer()(X["x"], positions=positions)


part(scored, "regard.scores.General()", W=numbers(4, 4))
part(scored, "regard.scores.Additive()", W_q=numbers(4, 2), W_k=numbers(4, 2), v=numbers(2))
part(scored, "regard.scores.Cosine()", temperature=one(2.0))
part(lambda own: attended(normalize=own), "regard.normalizers.Sigmoid()", bias=one(-2.0))
part(
    placed,
    "regard.positions.Rotary()",
    **{"frequencies": numbers(2), "attention_factor": one(2.0)},
    **{"query_positions": numbers(3), "key_positions": numbers(5)},
)
part(placed, "regard.positions.Rotary()", base=one(100.0), width=one(2), note="of a base")
part(placed, "regard.positions.Alibi()", slopes=numbers(2))
part(placed, "regard.positions.RelativeBias()", table=numbers(2, 8), max_distance=one(9))
part(embedded, "regard.positions.Learned()", vectors=numbers(3, 4))
part(embedded, "regard.positions.Sinusoidal()", base=one(100.0))


def scaled(**given: Any) -> Any:
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 4, **given}
    return attended(positions=regard.positions.Rotary(scaling=scaling))


row(
    "regard.positions.Rotary()",
    scaled,
    **{"short_factor": numbers(2) + 1, "long_factor": numbers(2) + 2, "factor": one(2.0)},
    note="with a scaling",
)


def declared(**given: Any) -> Any:
    steps = [
        ("W", "W", "D K", "given"),
        ("turned", "Q_w", "H L K", "dot", "queries", "W"),
        ("scores", "A", "H L S", "dot", "turned", ("keys", "h//(H//G) j k")),
    ]
    return attended(score=regard.textbook.Mechanism("turned", steps, **given))


row("regard.textbook.Mechanism()", declared, W=numbers(4, 4))


@cache
def encoder() -> Any:
    import tiny_bert

    with tempfile.TemporaryDirectory() as folder:
        return regard.models.load(tiny_bert.write(Path(folder) / "bert"), dtype="float64")


row(
    "regard.models.Encoder.explain",
    lambda **own: encoder().explain("the cat", 0, **own, causal=True),
    **{**OPTIONS, "mask": seen(4, 4), "bias": numbers(4, 4), "sink": numbers(3)},
    needs="safetensors tokenizers",
)


@cache
def decoder() -> Any:
    import tiny_decoder

    with tempfile.TemporaryDirectory() as folder:
        return regard.models.load(tiny_decoder.write(Path(folder) / "llama"), dtype="float64")


OF_DECODER = {**OPTIONS, "mask": seen(3, 3), "bias": numbers(3, 3), "sink": numbers(3)}
row(
    "regard.models.LanguageModel.explain",
    lambda **own: decoder().explain("the cat", 0, **own),
    **OF_DECODER,
    needs="safetensors tokenizers",
)
row(
    "regard.models.Run.explain",
    lambda **own: decoder().run("the cat").explain(0, **own),
    **OF_DECODER,
    needs="safetensors tokenizers",
)


# --- ONNX ----------------------------------------------------------------------------------------

ATTENTION = {"Q": numbers(2, 2, 3, 4), "K": numbers(2, 2, 3, 4) + 1, "V": numbers(2, 2, 3, 3) + 2}
PAST = {"past_key": numbers(2, 2, 2, 4), "past_value": numbers(2, 2, 2, 3)}
ROTARY = {
    **{"X": numbers(2, 2, 3, 4), "cos_cache": numbers(5, 2), "sin_cache": numbers(5, 2)},
    "position_ids": np.array([[0, 1, 2], [2, 3, 4]]),
}


def in_every_mode(**given: Any) -> Any:
    attention = itself("regard.interop.onnx.attention")
    return [attention(**given, is_causal=1, qk_matmul_output_mode=n) for n in (None, 0, 2, 3)]


def of_node(**given: Any) -> Any:
    import onnx

    from regard.interop.onnx import Backend

    node = onnx.helper.make_node("Attention", [*given], ["Y"], scale=0.01)
    return Backend.run_node(node, [*given.values()])


def of_model(**given: Any) -> Any:
    import onnx

    from regard.interop.onnx import Backend

    value, double = onnx.helper.make_tensor_value_info, onnx.TensorProto.DOUBLE
    kinds = {name: double for name in given} | {"position_ids": onnx.TensorProto.INT64}
    inputs = [value(name, kinds[name], [None] * ROTARY[name].ndim) for name in given]
    node = onnx.helper.make_node("RotaryEmbedding", [*given], ["Y"])
    graph = onnx.helper.make_graph([node], "turned", inputs, [value("Y", double, [None] * 4)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    return Backend.prepare(model).run([*given.values()])


OF_ONNX = "regard.interop.onnx.attention"
row(OF_ONNX, **ATTENTION, **SCALE, needs="onnx", note="of inputs alone")
row(
    OF_ONNX,
    in_every_mode,
    **{**ATTENTION, **SCALE, **PAST, "attn_mask": numbers(3, 5), "softcap": one(2.0)},
    needs="onnx",
)
row(
    OF_ONNX,
    in_every_mode,
    **{**ATTENTION, **SCALE, "nonpad_kv_seqlen": counts(2, 3)},
    **{"needs": "onnx", "note": "with lengths"},
)
row("regard.interop.onnx.rotary_embedding", **ROTARY, needs="onnx")
row("regard.interop.onnx.Backend.run_node", of_node, **ATTENTION, needs="onnx")
row("regard.interop.onnx.PreparedModel.run", of_model, **ROTARY, needs="onnx")


# --- PyTorch, transformers, JAX ------------------------------------------------------------------

BATCHED = {name: array[None] for name, array in QKV.items()}


def as_tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays that PyTorch has a dtype for as tensors; others as they are."""
    import torch

    def tensor(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if array.dtype.name == "float8_e4m3fn":
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):
            return array

    return {name: tensor(array) for name, array in given.items()}


def in_torch(**given: Any) -> Any:
    call = itself("regard.interop.torch.scaled_dot_product_attention")
    return call(**as_tensors(given))


def in_transformers(**given: Any) -> Any:
    import torch

    call = itself("regard.interop.transformers.attend")
    return call(module=torch.nn.Identity(), **as_tensors(given), output_attentions=True)


def in_jax(**given: Any) -> Any:
    import jax

    for name in ("query_seq_lengths", "key_value_seq_lengths"):  # JAX counts in 32 bits
        if getattr(given[name], "dtype", "") == np.int64:
            given[name] = given[name].astype(np.int32)
    with jax.enable_x64(True):
        return itself("regard.interop.jax.dot_product_attention")(**given)


row(
    "regard.interop.torch.scaled_dot_product_attention",
    in_torch,
    **{**BATCHED, **SCALE, "attn_mask": numbers(3, 5)},
    needs="torch fused",
)
row(
    "regard.interop.transformers.attend",
    in_transformers,
    **{**BATCHED, "attention_mask": numbers(1, 1, 3, 5), "position_bias": numbers(1, 2, 3, 5)},
    **{"s_aux": numbers(2), "softcap": one(2.0), "scaling": SCALE["scale"]},
    said={"s_aux": "sink", "scaling": "scale", "attention_mask": "mask", "position_bias": "bias"},
    needs="transformers fused",
)
row(
    "regard.interop.jax.dot_product_attention",
    in_jax,
    **{name: array.swapaxes(1, 2) for name, array in BATCHED.items()},
    **{"bias": numbers(1, 2, 3, 5), "mask": seen(1, 2, 3, 5), **SCALE},
    **{"query_seq_lengths": counts(2), "key_value_seq_lengths": counts(4)},
    needs="jax fused",
)


# --- dask, xarray, Zarr --------------------------------------------------------------------------


def chunked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays with axes as lazy ones of dask."""
    import dask.array as da

    return {
        name: da.from_array(array, array.shape)
        if isinstance(array, np.ndarray) and array.ndim and name not in ("sink", "offset", "rows")
        else array
        for name, array in given.items()
    }


def in_dask(**given: Any) -> Any:
    call = itself("regard.interop.dask.attention")
    made = call(**{"offset": 1, **given}, causal=True, return_lse=True)
    return [one.compute(scheduler="sync") for one in made]


def weights_in_dask(**given: Any) -> Any:
    made = itself("regard.interop.dask.weights")(**chunked(given), causal=True)
    return made.compute(scheduler="sync")


row("regard.interop.dask.attention", in_dask, **QKV, needs="dask fused", note="of NumPy's arrays")
row(
    "regard.interop.dask.attention",
    lambda **own: in_dask(**chunked(own)),
    **{**QKV, **OPTIONS},
    needs="dask fused",
)
row(
    "regard.interop.dask.weights",
    weights_in_dask,
    **{"query": QKV["query"], "key": QKV["key"], "lse": numbers(2, 3) + 100, **OPTIONS},
    rows=counts(2, 0),
    needs="dask fused",
)
row(
    "regard.interop.dask.plan",
    **{name: counts(2, 9, 4) for name in QKV},
    **{"memory": one(2**24), "workers": one(2)},
    needs="dask fused",
)


def labelled(function: str, given: Mapping[str, Any]) -> Any:
    """A call with inputs as labelled arrays, where they have the axes."""
    import xarray

    axes = {name: ("head", "row" if name == "query" else "key_row", "feature") for name in QKV}
    arrays = {
        name: xarray.DataArray(array, dims=axes[name])
        if name in axes and isinstance(array, np.ndarray) and array.ndim == 3
        else array
        for name, array in given.items()
    }
    names = {name: name for name in ("head", "row", "key_row", "feature")}
    return itself(f"regard.interop.xarray.{function}")(**arrays, **names, causal=True)


row(
    "regard.interop.xarray.attention",
    lambda **own: labelled("attention", own),
    **{**QKV, **OPTIONS},
    needs="xarray",
)
row(
    "regard.interop.xarray.explain",
    lambda **own: labelled("explain", own),
    **{**QKV, **OPTIONS, "target": numbers(2, 3, 3)},
    needs="xarray",
)


def in_files(**given: Any) -> Any:
    import zarr

    for name in ("offset", "sink"):  # as JSON has them, kept with the output
        if isinstance(given[name], (np.ndarray, np.generic)):
            given[name] = given[name].tolist()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("query", "key", "value", "mask", "bias"):
            array = given[name]
            if isinstance(array, (np.ndarray, np.generic)):
                given[name] = os.path.join(folder, name)
                zarr.create_array(given[name], shape=array.shape, dtype=array.dtype)[...] = array
        paths = {name: os.path.join(folder, name) for name in ("output", "lse")}
        itself("regard.interop.zarr.attention")(**given, **paths, causal=True)
        return {name: zarr.open_array(path)[...] for name, path in paths.items()}


row("regard.interop.zarr.attention", in_files, **QKV, **OPTIONS, needs="zarr fused")

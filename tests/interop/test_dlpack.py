"""Arrays of other libraries at the doors: read where they lie, and results come back as theirs."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import regard
from calls import inputs, recording_fast_calls_too
from regard.boundary.arrays import as_numpy

try:
    import torch
except ImportError:
    torch = None
try:
    import jax.numpy as jnp
except ImportError:
    jnp = None


class Lent:
    """An array of some library that knows DLPack and the array API, and NumPy not at all."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.place = np.asarray(array), device

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        return Lent(self.array[index])

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __array_namespace__(self, **_):
        return LENDER


LENDER = types.SimpleNamespace(__name__="lender", from_dlpack=Lent)

LIBRARIES = {
    "lender": Lent,
    "torch": lambda array: to_torch(array),
    "jax": lambda array: jnp.asarray(array),
}
every_library = pytest.mark.parametrize(
    "library",
    ["lender", *(pytest.param(name, marks=pytest.mark.needs(name)) for name in ("torch", "jax"))],
)
SHAPES = (2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)


def to_torch(array):
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def dtypes_of(library):
    """bfloat16 comes with ml_dtypes, float64 in JAX only on demand."""
    names = ["float16", "float32"]
    if library != "jax":
        names.append("float64")
    if library != "lender" and "ml_dtypes" in sys.modules:
        names.append("bfloat16")
    return names


def same(theirs, ours, kind):
    assert type(theirs) is kind
    array = as_numpy("theirs", theirs)
    assert (array.dtype, array.tobytes()) == (ours.dtype, ours.tobytes())


@every_library
def test_attention_gives_back_the_type_and_dtype_it_got_and_numpy_s_bytes(library):
    wrap = LIBRARIES[library]
    for name in dtypes_of(library):
        given = inputs(*SHAPES, dtype=np.dtype(name))
        theirs = [wrap(array) for array in given]
        for options in ({}, {"causal": True, "offset": "end"}, {"kernel": "reference"}):
            expected = regard.attention(*given, return_weights=True, return_lse=True, **options)
            result = regard.attention(*theirs, return_weights=True, return_lse=True, **options)
            assert type(result).__name__ == "OutputWeightsLse"
            for one, other in zip(result, expected, strict=True):
                same(one, other, type(theirs[0]))
            same(regard.attention(*theirs, **options), expected.output, type(theirs[0]))


@every_library
def test_masks_biases_sinks_and_offsets_may_be_arrays_of_any_library(library):
    wrap = LIBRARIES[library]
    given = inputs(*SHAPES)
    mask = np.random.default_rng(0).random((5, 6)) > 0.3
    arrays = {"mask": mask, "bias": np.ones((3, 1, 6), np.float32), "sink": np.zeros(3, np.float32)}
    arrays["offset"] = np.array([0, 1], np.int32)
    expected = regard.attention(*given, causal=True, **arrays)
    theirs = {name: wrap(array) for name, array in arrays.items()}
    same(regard.attention(*given, causal=True, **theirs), expected, np.ndarray)
    rule = regard.masks.Boolean(theirs["mask"])
    assert np.array_equal(rule.visible(5, 6), mask)


@every_library
def test_numpy_arrays_go_with_those_of_one_library_which_the_result_belongs_to(library):
    wrap = LIBRARIES[library]
    q, k, v = inputs(*SHAPES)
    expected = regard.attention(q, k, v)
    for given in ((wrap(q), k, v), (q, wrap(k), v), (q, k, wrap(v))):
        same(regard.attention(*given), expected, type(wrap(q)))


@pytest.mark.needs("torch")
def test_two_libraries_in_one_call_are_refused_by_name():
    q, k, v = inputs(*SHAPES)
    with pytest.raises(regard.DtypeError, match="query is an array of torch but value one of lend"):
        regard.attention(to_torch(q), k, Lent(v))
    with pytest.raises(regard.DtypeError, match="out one of torch"):
        regard.attention(Lent(q), k, v, out=torch.empty(2, 3, 5, 4))


@every_library
def test_a_cache_gives_back_what_its_queries_are(library):
    wrap = LIBRARIES[library]
    q, k, v = inputs((3, 5, 8), (3, 5, 8), (3, 5, 4))
    cache, theirs = regard.KVCache(), regard.KVCache()
    for rows in (slice(0, 4), slice(4, 5)):
        cache.append(k[:, rows], v[:, rows])
        theirs.append(wrap(k[:, rows]), wrap(v[:, rows]))
        query = wrap(np.ascontiguousarray(q[:, rows]))
        same(theirs.attend(query), cache.attend(q[:, rows]), type(query))
        one = theirs.attend(query, return_lse=True, return_weights=True)
        other = cache.attend(q[:, rows], return_lse=True, return_weights=True)
        assert type(one) is type(other)
        for mine, its in zip(one, other, strict=True):
            same(mine, its, type(query))


@pytest.mark.needs("torch")
def test_a_cache_writes_into_a_tensor():
    q, k, v = inputs((3, 5, 8), (3, 5, 8), (3, 5, 4))
    cache = regard.KVCache()
    cache.append(k, v)
    for options in ({}, {"return_lse": True}):
        out = torch.empty(3, 5, 4)
        result = cache.attend(to_torch(q), out=out, **options)
        assert (result.output if options else result) is out
        np.testing.assert_array_equal(out.numpy(), cache.attend(q))


@every_library
def test_softmax_merge_and_layers_give_back_what_they_got(library):
    wrap = LIBRARIES[library]
    scores = inputs((4, 6))[0]
    same(regard.softmax(wrap(scores)), regard.softmax(scores), type(wrap(scores)))

    q, k, v = inputs((3, 5, 8), (3, 6, 8), (3, 6, 4))
    halves = [
        regard.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 2), (2, 6))
    ]
    outputs, lses = [h.output for h in halves], [h.lse for h in halves]
    expected = regard.merge(outputs, lses)
    for merged in (
        regard.merge([wrap(o) for o in outputs], [wrap(lse) for lse in lses]),
        regard.merge(wrap(np.stack(outputs)), wrap(np.stack(lses))),
    ):
        assert type(merged) is type(expected)
        for one, other in zip(merged, expected, strict=True):
            same(one, other, type(wrap(scores)))

    weights = inputs(*[(8, 8)] * 3)
    layer, theirs = (
        regard.MultiHeadAttention(*(f(w) for w in weights), heads=2) for f in (np.asarray, wrap)
    )
    expected = layer(q, return_weights=True)
    result = theirs(wrap(q), return_weights=True)
    same(result.output, expected.output, type(wrap(q)))
    same(result.weights, expected.weights, type(wrap(q)))
    same(theirs(q), expected.output, np.ndarray)


@every_library
def test_an_explanation_takes_what_attention_takes(library):
    q, k, v = (LIBRARIES[library](array) for array in inputs((3, 4), (3, 4), (3, 4)))
    weights = regard.explain(q, k, v).steps["weights"].value
    np.testing.assert_array_equal(
        weights, regard.explain(*map(as_numpy, "qkv", (q, k, v))).steps["weights"].value
    )


# --- no copy -------------------------------------------------------------------------------------


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32", "bool"])
def test_tensors_are_read_where_they_lie_whatever_their_strides(name):
    tensor = torch.ones(4, 6).to(getattr(torch, name))
    for view in (tensor, tensor.mT, tensor[:1].expand(3, 6), tensor[1:, ::2]):
        array = as_numpy("view", view)
        assert array.__array_interface__["data"][0] == view.data_ptr()
        assert array.shape == view.shape
        assert array.strides == tuple(s * view.element_size() for s in view.stride())
        assert array.dtype.name == name


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int32"])
def test_arrays_of_jax_are_read_where_they_lie(name):
    array = jnp.ones((4, 6), name)
    read = as_numpy("array", array)
    assert read.__array_interface__["data"][0] == array.unsafe_buffer_pointer()
    assert read.dtype.name == name


def test_arrays_that_speak_dlpack_are_read_where_they_lie():
    array = np.ones((4, 6))[::2, ::3]
    assert np.shares_memory(as_numpy("array", Lent(array)), array)


@pytest.mark.needs("torch")
@pytest.mark.needs("fused")
def test_a_plain_call_on_tensors_is_still_a_plain_call():
    given = [to_torch(array) for array in inputs(*SHAPES)]
    with recording_fast_calls_too() as ran:
        regard.attention(*given)
    assert ran == ["fused:fast path"]


@pytest.mark.needs("fused")
def test_a_plain_call_on_numpy_arrays_is_answered_before_anybody_asks_whose_they_are(monkeypatch):
    def asked(**_):
        raise AssertionError("the fast path pays for neighbours")

    monkeypatch.setattr(regard.api, "lend", asked)
    assert regard.attention(*inputs(*SHAPES)).shape == (2, 3, 5, 4)
    with pytest.raises(AssertionError, match="pays"):
        regard.attention(*inputs(*SHAPES), offset=0)


# --- out -----------------------------------------------------------------------------------------


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_out_may_be_a_tensor_of_any_strides_and_comes_back_itself(name):
    given = [to_torch(array).to(getattr(torch, name)) for array in inputs(*SHAPES)]
    out = torch.zeros(2, 5, 3, 4, dtype=given[0].dtype).transpose(1, 2)
    assert regard.attention(*given, out=out) is out
    assert torch.equal(out, regard.attention(*given))
    result = regard.attention(*given, out=out, return_lse=True)
    assert result.output is out
    assert type(result.lse) is torch.Tensor


@pytest.mark.needs("torch")
def test_out_decides_too_whose_the_results_are():
    given = inputs(*SHAPES)
    out = torch.zeros(2, 3, 5, 4)
    result = regard.attention(*given, out=out, return_weights=True)
    assert result.output is out
    assert type(result.weights) is torch.Tensor
    array = np.zeros((2, 3, 5, 4), np.float32)
    assert regard.attention(*map(to_torch, given), out=array) is array
    assert array.any()


@pytest.mark.needs("torch")
def test_out_of_the_wrong_shape_dtype_or_memory_is_refused():
    given = [to_torch(array) for array in inputs(*SHAPES)]
    with pytest.raises(regard.ShapeError, match="out has shape"):
        regard.attention(*given, out=torch.zeros(5, 4))
    with pytest.raises(regard.DtypeError, match="out has dtype float64"):
        regard.attention(*given, out=torch.zeros(2, 3, 5, 4, dtype=torch.float64))
    with pytest.raises(
        regard.OptionError,
        match="elements that share memory; pass one without overlaps",
    ):
        regard.attention(*given, out=torch.zeros(2, 3, 1, 4).expand(2, 3, 5, 4))
    with pytest.raises(regard.DtypeError, match=r"out is a Tensor on meta.*no numbers"):
        regard.attention(*given, out=torch.zeros(2, 3, 5, 4, device="meta"))


@pytest.mark.needs("jax")
def test_out_cannot_be_an_array_of_jax_which_nothing_may_write():
    given = [jnp.asarray(array) for array in inputs(*SHAPES)]
    with pytest.raises(regard.OptionError, match="out is read-only"):
        regard.attention(*given, out=jnp.zeros((2, 3, 5, 4)))


def test_out_that_numpy_could_only_have_a_copy_of_is_refused_and_not_filled_in_vain():
    class Copied(Lent):
        def __dlpack__(self, **options):
            raise BufferError("no")

        def __array__(self, dtype=None, copy=None):
            return self.array.copy()

    given = inputs(*SHAPES)
    with pytest.raises(regard.DtypeError, match="out is a Copied that NumPy cannot write into: no"):
        regard.attention(*given, out=Copied(np.zeros((2, 3, 5, 4), np.float32)))
    assert regard.attention(*map(Copied, given), out=np.zeros((2, 3, 5, 4), np.float32)).any()


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [(2, 0), (8, 1), (10, 0)])
def test_an_array_on_another_device_is_refused_with_the_way_to_bring_it(place):
    q, k, v = inputs(*SHAPES)
    with pytest.raises(regard.DtypeError, match=r"key is a Lent on .*\.cpu\(\)"):
        regard.attention(q, Lent(k, place), v)


EVERY_TENSOR = ["query", "key", "value", "mask", "bias", "sink"]


def every_tensor():
    given = dict(zip(("query", "key", "value"), map(to_torch, inputs(*SHAPES)), strict=True))
    return given | {"mask": torch.ones(5, 6) > 0, "bias": torch.ones(5, 6), "sink": torch.ones(3)}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_a_tensor_without_numbers_is_refused_by_name(name):
    given = every_tensor()
    given[name] = given[name].to("meta")
    with pytest.raises(regard.DtypeError, match=rf"{name} is a Tensor on meta.*no numbers"):
        regard.attention(**given)
    fake = torch._subclasses.FakeTensorMode()
    given[name] = fake.from_tensor(every_tensor()[name])
    with pytest.raises(regard.DtypeError, match=rf"{name} is a FakeTensor.*no numbers"):
        regard.attention(**given)
    if name == "query":
        with fake, pytest.raises(regard.DtypeError, match="query is a FakeTensor"):
            regard.attention(**every_tensor())


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sink", "out"])
def test_a_tensor_that_requires_a_gradient_is_refused_unless_none_is_followed(name):
    given = dict(zip(("query", "key", "value"), map(to_torch, inputs(*SHAPES)), strict=True))
    given |= {"bias": torch.ones(5, 6), "sink": torch.ones(3), "out": torch.ones(2, 3, 5, 4)}
    given[name] = given[name].requires_grad_()
    with pytest.raises(regard.DtypeError, match=rf"{name} requires a gradient.*interop.*detach"):
        regard.attention(**given)
    with torch.no_grad():
        assert regard.attention(**given).shape == (2, 3, 5, 4)
    with torch.inference_mode():
        assert regard.attention(**given).shape == (2, 3, 5, 4)


# What becomes of a tensor of float32, and what to do then.
UNREADABLE = {
    "sparse": (lambda t: t.to_sparse(), r"layout torch.sparse_coo; pass query\.to_dense\(\)"),
    "mkldnn": (lambda t: t.to_mkldnn(), r"layout torch._mkldnn; pass query\.to_dense\(\)"),
    "quantised": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        r"quantised, torch.qint8; pass query\.dequantize\(\)",
    ),
    "nested": (
        lambda t: torch.nested.nested_tensor([t[0], t[1, :, :3]]),
        r"a nested tensor; pass its parts, query\.unbind\(\)",
    ),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t[0], t[1, :2]], layout=torch.jagged),
        r"a nested tensor; pass its parts, query\.unbind\(\)",
    ),
    "masked": (lambda t: torch.masked.masked_tensor(t, t > 0), "a MaskedTensor.*plain tensor"),
    "narrow": (lambda t: t.to(torch.float8_e4m3fn), r"float8_e4m3fn.*pass query\.float\(\)"),
    "complex": (lambda t: t.to(torch.complex64), "complex64, which is not supported"),
}


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore")  # prototypes, and what is deprecated
@pytest.mark.parametrize("case", UNREADABLE)
def test_a_tensor_that_numpy_cannot_read_is_refused_with_what_to_pass_instead(case):
    change, words = UNREADABLE[case]
    q, k, v = map(to_torch, inputs(*SHAPES))
    with pytest.raises(regard.DtypeError, match=f"query (is|has).*{words}"):
        regard.attention(change(q), k, v)


@pytest.mark.needs("torch")
def test_other_reasons_are_given_in_the_words_of_the_library(monkeypatch):
    q, k, v = map(to_torch, inputs(*SHAPES))
    out = torch.complex(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 4)).conj().imag
    with pytest.raises(
        regard.DtypeError, match=r"out is a Tensor that NumPy cannot write.*negative"
    ):
        regard.attention(q, k, v, out=out)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(regard.DtypeError, match=r"query is bfloat16.*regard\[bfloat16\]"):
        regard.attention(q.bfloat16(), k, v)


@pytest.mark.needs("torch")
def test_a_class_of_tensors_is_read_as_a_plain_tensor_and_comes_back_as_one():
    class Mine(torch.Tensor):
        pass

    given = [to_torch(array) for array in inputs(*SHAPES)]
    for kind in (lambda t: t.as_subclass(Mine), lambda t: torch.nn.Parameter(t, False)):
        output = regard.attention(*map(kind, given))
        assert type(output) is torch.Tensor
        assert torch.equal(output, regard.attention(*given))


# How PyTorch makes something of a function of one tensor, and what regard says within it.
TRACES = {
    "trace": (
        lambda f: torch.jit.trace(f, torch.ones(2, 3, 4)),
        "query is being traced.*constant.*torch.compile",
    ),
    "make_fx": (
        lambda f: torch.fx.experimental.proxy_tensor.make_fx(f)(torch.ones(2, 3, 4)),
        "query is being traced.*constant.*torch.compile",
    ),
    "make_fx_before_dispatch": (
        lambda f: torch.fx.experimental.proxy_tensor.make_fx(f, pre_dispatch=True)(
            torch.ones(2, 3, 4)
        ),
        "query is being traced.*constant.*torch.compile",
    ),
    "symbolic_trace": (lambda f: torch.fx.symbolic_trace(f), r"query is a torch\.fx Proxy.*wrap"),
    "vmap": (
        lambda f: torch.func.vmap(f)(torch.ones(2, 3, 4)),
        r"query is mapped by torch.vmap; call regard\.interop\.torch\..*pass the whole tensors",
    ),
    "grad": (
        lambda f: torch.func.grad(lambda t: f(t).sum())(torch.ones(2, 3, 4)),
        r"query is followed by torch\.func.*call regard\.interop\.torch",
    ),
    "grad_detached": (
        lambda f: torch.func.grad(lambda t: f(t.detach()).sum())(torch.ones(2, 3, 4)),
        r"query is followed by torch\.func.*call regard\.interop\.torch",
    ),
    "jvp": (
        lambda f: torch.func.jvp(f, (torch.ones(2, 3, 4),), (torch.ones(2, 3, 4),)),
        "query carries a tangent",
    ),
    "functionalize": (
        lambda f: torch.func.functionalize(f)(torch.ones(2, 3, 4)),
        r"query is followed by torch\.func\.functionalize.*outside",
    ),
    "functional": (
        lambda f: f(torch._to_functional_tensor(torch.ones(2, 3, 4))),
        r"query is followed by torch\.func\.functionalize.*outside",
    ),
}


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
@pytest.mark.parametrize("way", TRACES)
def test_what_torch_traces_or_transforms_is_refused_with_what_to_do(way):
    transform, words = TRACES[way]
    with pytest.raises(regard.DtypeError, match=words):
        transform(lambda t: regard.attention(t, t, t))


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore")  # what torch.compile warns of by itself
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offset": 0, "causal": True},
        {"mask": np.tri(5, dtype=bool)},
        {"return_lse": True},
        {"kernel": "reference"},
    ],
    ids=lambda options: "_".join(options) or "plain",
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_compile_calls_regard_each_time(options, name):
    def attend(t):
        result = regard.attention(t * 2, t, t, **options)
        return result[0] + 1 if options.get("return_lse") else result + 1

    compiled = torch.compile(attend, backend="eager")
    for seed in range(3):
        given = to_torch(inputs((2, 5, 4), seed=seed)[0]).to(getattr(torch, name))
        output = compiled(given)
        assert type(output) is torch.Tensor
        assert torch.equal(output, attend(given))


@pytest.mark.needs("torch")
def test_a_sign_that_torch_has_put_off_is_not_lost():
    q = torch.complex(torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4)).conj().imag
    assert q.is_neg()
    assert torch.equal(regard.attention(q, q, q), regard.attention(*[q.resolve_neg()] * 3))


@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sink", "scale"])
def test_an_array_that_jax_traces_is_refused_with_what_to_call(name):
    import jax

    given = {name: jnp.ones((3, 4)) for name in ("query", "key", "value")}
    given |= {"bias": jnp.ones((3, 3)), "sink": jnp.ones(1), "scale": jnp.ones(())}

    def attend(array):
        return regard.attention(**(given | {name: array})).sum()

    words = rf"{name} is traced by JAX.*jax\.grad call regard\.interop\.jax\.dot_product_attention"
    for transform in (jax.jit, jax.grad, lambda f: jax.vmap(f)):
        array = given[name][None] if transform not in (jax.jit, jax.grad) else given[name]
        with pytest.raises(regard.DtypeError, match=words):
            transform(attend)(array)

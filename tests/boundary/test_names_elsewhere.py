"""A call with another library's arguments is answered with the argument that does it here."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import masks
from regard.boundary import answering
from regard.boundary.elsewhere import ELSEWHERE, TRIED

X = np.eye(3)
FLAGS = np.ones((3, 3), bool)
LAYER = regard.MultiHeadAttention(X, X, X)
TOLD = regard.explain(X, X, X)


def refusal(call) -> str:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"is_causal": True}, "is_causal: pass causal=True, with offset=0 where L ≠ S"),
        ({"dropout_p": 0.0}, "dropout_p: leave it out: there is no dropout"),
        ({"need_weights": True}, "need_weights: pass return_weights=True"),
        ({"softmax_scale": 0.5}, "softmax_scale: pass scale=0.5"),
        ({"window_size": (-1, 0)}, "window_size: pass window=(None, 0), None instead of -1"),
        ({"local_window_size": 4}, "pass window=(4, 4); a single n is window=(n, n)"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap: pass softcap=30.0"),
        ({"key_value_seq_lengths": X}, "pass mask=regard.masks.Lengths(key_value_seq_lengths)"),
        (
            {"window_left": 3},
            'window_left: pass window=(3, None), None instead of -1, with offset="end"',
        ),
        (
            {"cu_seqlens_q": X},
            "cu_seqlens_q: pass mask=regard.masks.Segments.from_lengths(np.diff(cu_seqlens_q), "
            'np.diff(cu_seqlens_k)); with causal, a window or ALiBi also offset="end"',
        ),
        (
            {"cache_seqlens": X},
            "cache_seqlens: pass mask=regard.masks.Lengths(cache_seqlens), the lengths after "
            'appending; with causal, a window or ALiBi also offset="end"',
        ),
        ({"enable_gqa": True}, "enable_gqa: leave it out: H query heads read G key heads"),
        ({"num_heads": 2}, "num_heads: leave it out: heads are an axis"),
        ({"key_padding_mask": X}, "pass mask=~key_padding_mask, because True"),
        ({"key_padding_mask": None}, "key_padding_mask: leave it out"),
        ({"attn_mask": None}, "attn_mask: leave it out"),
        ({"dim": -1}, "dim: for regard.softmax pass axis=-1"),
        ({"capacity": 3}, "capacity: it is an argument of regard.KVCache"),
        ({"head": 1}, "head: leave it out: every head is computed; why and the views take head"),
        ({"position_ids": X}, "Rotary(query_positions=position_ids, key_positions=position_ids)"),
        ({"segment_ids": X}, "segment_ids: pass mask=regard.masks.Segments(segment_ids)"),
        ({"query_seq_offsets": 3}, "query_seq_offsets: pass offset=3, the position"),
        ({"rotary_cos": X, "rotary_sin": X}, "rotary_cos and rotary_sin: pass positions=regard"),
        ({"attention_axes": 1}, "attention_axes: leave it out: rows are the last axis but one"),
        ({"casual": True}, "casual: did you mean causal=True?"),
        ({"Mask": FLAGS}, "Mask: did you mean mask=?"),
        ({"dropout_pp": 0.1}, "what others call dropout_p, leave it out: there is no dropout"),
        ({"colour": "red"}, "colour: it takes query, key, value, mask, bias, causal, window"),
        ({"x\x1b": 1}, "x\\x1b: it takes query"),
    ],
)
def test_an_argument_of_another_library_is_answered_with_the_one_that_does_it_here(given, answer):
    message = refusal(lambda: regard.attention(X, X, X, **given))
    assert message.startswith("attention() has no argument ")
    assert answer in message


def test_libraries_that_mean_different_things_by_one_name_are_told_apart():
    message = refusal(lambda: regard.attention(X, X, X, attn_mask=FLAGS))
    assert (
        "coming from torch.nn.functional.scaled_dot_product_attention, pass mask=attn_mask if"
    ) in message
    assert "coming from torch.nn.MultiheadAttention, pass mask=~attn_mask if" in message


def test_all_arguments_that_a_call_does_not_have_are_answered_at_once():
    message = refusal(lambda: regard.attention(X, X, X, is_causal=True, dropout_p=0.1))
    assert message == (
        "attention() has no argument is_causal: pass causal=True, with offset=0 where L ≠ S; "
        "nor dropout_p: leave it out: there is no dropout"
    )


@pytest.mark.parametrize(
    ("call", "begins"),
    [
        (
            lambda: regard.explain(X, X, X, foo=1, bar=2, baz=3),
            "foo, bar and baz: it takes query, ",
        ),
        (lambda: regard.explain(X, W_q=X, foo=1, bar=2), "foo and bar: it takes query, key"),
        (lambda: regard.Problem(foo=1, bar=2), "foo and bar: it takes title, note, "),
        (
            lambda: regard.attention(X, X, X, foo=1, is_causal=True, bar=2),
            "foo and bar: it takes q",
        ),
        (
            lambda: regard.attention(X, X, X, foo=1, dim=-1, capacity=3),
            "foo; nor dim: for regard.softmax pass axis=-1; nor capacity: it is an argument of "
            "regard.KVCache; it takes query, ",
        ),
        (lambda: masks.Causal(foo=1, offset=2), "foo; nor offset: it is an argument of "),
        (lambda: regard.attention(X, X, X, foo=1, x=2, dropout=0, dropout_p=0), "foo; nor x: for "),
    ],
)
def test_what_a_call_takes_is_said_once_however_many_arguments_it_does_not_have(call, begins):
    message = refusal(call)
    assert message.partition(" has no argument ")[2].startswith(begins)
    assert message.count("it takes") == 1
    assert message.count("there is no dropout") <= 1


@pytest.mark.parametrize(
    ("shape", "index"),
    [((3, 4), ""), ((2, 3, 4), "[:, None, :]"), ((2, 1, 3, 4), "[:, None, None, :]")],
)
def test_a_mask_of_keys_is_answered_with_the_axes_that_the_query_has(shape, index):
    x, key_padding_mask = np.ones(shape), np.zeros((2, 3), bool)[: len(shape) - 1]
    message = refusal(lambda: regard.attention(x, x, x, key_padding_mask=key_padding_mask))
    expression = f"~key_padding_mask{index}"
    assert f"pass mask={expression}, because" in message
    mask = eval(expression, {"key_padding_mask": key_padding_mask})
    np.testing.assert_array_equal(regard.attention(x, x, x, mask=mask), x)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda: regard.attention(Q=X, K=X, V=X),
            "Q: pass query=Q; nor K: pass key=K; nor V: pass",
        ),
        (lambda: regard.attention(X, keys=X, value=X), "keys: did you mean key=?"),
        (lambda: regard.attention(X), "attention() needs key and value too"),
        (lambda: regard.attention(key=X, value=X), "attention() needs query too"),
        (lambda: regard.attention(X, X, normalize="softmax"), "attention() needs value too"),
        (lambda: regard.explain(q=X, k=X, v=X), "explain() has no argument q: pass query=q"),
        (lambda: regard.explain(X, X, X, head=1), "explain() has no argument head: leave it out"),
        (
            lambda: regard.KVCache().attend(X, X, X),
            "give keys and values to append(key, value) first",
        ),
        (
            lambda: regard.MultiHeadAttention(8, 2),
            "needs W_v too: MultiHeadAttention(W_q, W_k, W_v), the arrays of weights",
        ),
        (
            lambda: regard.attention(X, X, X, mask=[masks.Causal(), masks.Window(1, 0)]),
            "first & second",
        ),
        (lambda: regard.weights(X, X, X[0], sm_scale=0.5), "sm_scale: pass scale=0.5"),
        (lambda: regard.explain(X, X, X, is_causal=True), "is_causal: pass causal=True"),
        (lambda: regard.explain(X, X, X, tokens="abc"), "tokens: pass labels='abc'"),
        (lambda: regard.explain(X, X, X, query_tokens="abc"), "pass query_labels='abc'"),
        (lambda: regard.explain(X, X, X, labelz="abc"), "labelz: did you mean labels='abc'?"),
        (lambda: regard.attention(X, X, X, labels="abc"), "for regard.explain pass labels='abc'"),
        (lambda: regard.diagnose(len, num_heads=2), "num_heads: pass heads=2"),
        (lambda: regard.softmax(X, dim=-1), "dim: pass axis=-1"),
        (lambda: regard.set_threads(n_threads=2), "did you mean threads=2?"),
        (lambda: regard.KVCache(max_length=9), "max_length: pass capacity=9"),
        (lambda: regard.KVCache().attend(X, is_causal=True), "is_causal: pass causal=True"),
        (lambda: regard.KVCache().append(X, X, layer_idx=0), "a regard.KVCache of its own"),
        (lambda: LAYER(X, average_attn_weights=True), "their mean is .weights.mean(axis=-3)"),
        (lambda: regard.MultiHeadAttention(X, X, X, num_heads=3), "num_heads: pass heads=3"),
        (lambda: masks.Causal(offset=2), "it is an argument of regard.attention; it takes none"),
        (lambda: masks.Window(128), "Window() needs right too: Window(left, right)"),
        (lambda: masks.Lengths(size=2), "Lengths() has no argument size: it takes lengths"),
        (lambda: regard.weights(X, X), "weights() needs lse too: weights(query, key, lse)"),
        (lambda: regard.merge([X], [X[0]], lses=[X[0]]), "was given lses twice"),
        (lambda: TOLD.why("output", 0, 0, heads=0), "Explanation.why() has no argument heads"),
        (lambda: TOLD.why("output", 0, 0, heads=0), "did you mean head=0?"),
        (lambda: TOLD.why("weights", 0, 0, step="scores"), "was given step twice"),
        (lambda: TOLD.to_html(digit=3), "did you mean digits=3?"),
        (lambda: TOLD["weights"].table(heads=1), "did you mean head=1?"),
        (lambda: regard.Problem(embedding=X), "Problem() has no argument embedding: did you mean"),
    ],
)
def test_the_other_functions_answer_too(call, answer):
    assert answer in refusal(call)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda: regard.attention(X, X, X, FLAGS),
            "only query, key and value by position; pass the next as mask=",
        ),
        (lambda: regard.attention(X, X, X, X), "only query, key and value by position"),
        (lambda: regard.attention(X, X, X, X), "pass the next as bias="),
        (
            lambda: regard.attention(X, X, X, None, 0.0, True),
            "pass the next as mask=, bias=, causal=",
        ),
        (lambda: regard.attention(X, X, X, True), "pass the next as causal="),
        (lambda: regard.explain(X, X, X, ["a", "b", "c"]), "pass the next as query_labels="),
        (lambda: regard.KVCache(100), "takes nothing by position"),
        (lambda: regard.KVCache(100), "pass the next as capacity=, window=, dtype= or positions="),
        (lambda: LAYER(X, X, X), "takes only x and context by position"),
        (lambda: regard.set_threads(1, 2), "takes only threads by position"),
    ],
)
def test_arguments_without_a_name_are_answered_with_the_name_to_give_them(call, answer):
    assert answer in refusal(call)


def test_an_error_of_the_function_itself_comes_through_unchanged():
    with pytest.raises(regard.DtypeError, match="lengths must be integers"):
        masks.Lengths(0.5)

    @answering
    def adds(first, second=0):
        return first + second

    with pytest.raises(TypeError, match="unsupported operand"):
        adds(1, None)
    assert adds(1, second=2) == 3


def test_signatures_are_shown_without_what_is_refused():
    for function in (regard.attention, regard.weights, regard.KVCache.attend, masks.Window):
        kinds = {one.kind for one in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert pickle.loads(pickle.dumps(regard.weights)) is regard.weights


def test_a_function_of_another_library_is_answered_with_the_one_of_regard():
    with pytest.raises(AttributeError, match=r"use regard\.attention, or regard\.interop\.torch"):
        _ = regard.scaled_dot_product_attention
    with pytest.raises(AttributeError, match="did you mean attention"):
        _ = regard.atention
    with pytest.raises(AttributeError, match=r"use regard\.interop\.torch$"):
        _ = regard.torch
    with pytest.raises(AttributeError, match=r"has no attribute 'numbers'$"):
        _ = regard.numbers
    with pytest.raises(AttributeError, match=r"use regard\.attention$"):
        _ = regard.sdpa
    with pytest.raises(AttributeError, match=r"use regard\.gradients\(…\)\.query$"):
        _ = regard.grad_query
    assert not hasattr(regard, "__wrapped__")


@pytest.mark.parametrize(
    ("owner", "name", "answer"),
    [
        (
            regard.KVCache(),
            "update",
            "KVCache has no attribute update; use append(key, value), then",
        ),
        (regard.KVCache(), "atend", "KVCache has no attribute atend; did you mean attend?"),
        (TOLD, "save", "Explanation has no attribute save; use to_html(path), to_npz(path) or"),
        (TOLD, "to_dict", "use {name: explanation[name].value for name in explanation.steps}"),
        (TOLD, "to_csv", "use to_dataframe(step).to_csv(path)"),
        (TOLD["weights"], "values", "ExplainedStep has no attribute values; use value, the array"),
        (TOLD["weights"], "to_pandas", "use to_dataframe()"),
        (regard.KVCache(), "_atend", "KVCache has no attribute _atend"),
    ],
)
def test_an_attribute_that_is_not_there_is_answered_with_the_one_that_is(owner, name, answer):
    with pytest.raises(AttributeError, match=re.escape(answer)):
        getattr(owner, name)


def test_a_step_by_index_is_answered_with_its_array_and_with_why():
    with pytest.raises(TypeError, match=r'step\.value\[…\] .* explanation\.why\("weights", …\)'):
        TOLD["weights"]["she", "coffee"]


def test_an_explanation_is_no_problem_that_can_be_saved(tmp_path):
    told = regard.explain(regard.load_problem("the-cat-sat"))
    with pytest.raises(regard.DtypeError, match=r"not Explanation; pass its \.problem$"):
        regard.save_problem(told, tmp_path / "x.toml")
    with pytest.raises(regard.DtypeError, match=r"not Explanation; make one: regard\.Problem"):
        regard.save_problem(TOLD, tmp_path / "x.toml")


@pytest.mark.needs("onnx")
def test_the_modules_of_other_libraries_are_reached_as_the_hints_spell_them():
    program = """
import sys, regard
assert not [name for name in sys.modules if name.startswith("regard.interop")]
assert regard.interop.onnx is sys.modules["regard.interop.onnx"]
assert not {"torch", "jax"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match=r"regard\.interop' has no attribute 'tensorflow'"):
        _ = regard.interop.tensorflow


PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text("utf-8")


@pytest.mark.parametrize("library", ELSEWHERE)
def test_the_page_has_each_library_s_names_in_the_words_of_the_messages(library):
    rows = []
    for name, texts in ELSEWHERE[library].items():
        first, *others = [texts] if isinstance(texts, str) else texts
        # One that lacks the offset alone is not repeated.
        others = [one for one in others if not first.startswith(f"{one}, with `offset=")]
        here = "; elsewhere ".join([first, *others])
        rows.append(f"| `{name}` | {here.replace('{pair}', name).replace('{}', name)} |")
    section = PAGE.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `.*\|$", section, re.MULTILINE) == rows


def test_the_page_has_no_library_that_the_messages_do_not_know():
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == [*ELSEWHERE]


def named_by(library: str) -> set[str]:
    return {*ELSEWHERE[library], "self", "query", "key", "value"}


@pytest.mark.needs("torch")
def test_all_arguments_of_pytorch_are_known():
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    function = torch.nn.functional.scaled_dot_product_attention
    declared = re.findall(r"\b[a-z]\w+(?=[=,)])", function.__doc__.partition(" -> ")[0])
    assert "enable_gqa" in declared
    assert {*declared} <= named_by(f"torch.nn.functional.{function.__name__}")
    layer = torch.nn.MultiheadAttention
    for call in (layer.__init__, layer.forward):
        assert inspect.signature(call).parameters.keys() <= named_by("torch.nn.MultiheadAttention")
    flex = inspect.signature(flex_attention).parameters.keys()
    assert flex <= named_by("torch.nn.attention.flex_attention")


@pytest.mark.needs("jax")
def test_all_arguments_of_jax_are_known():
    import jax

    declared = inspect.signature(jax.nn.dot_product_attention).parameters.keys()
    assert declared <= named_by("jax.nn.dot_product_attention")


@pytest.mark.needs("onnx")
def test_all_inputs_and_attributes_of_onnx_are_known():
    import onnx

    schema = onnx.defs.get_schema("Attention")
    assert {*schema.attributes, *(one.name for one in schema.inputs)} <= named_by("ONNX Attention")


def test_every_argument_of_regard_that_the_table_names_exists():
    functions = (regard.attention, regard.softmax, regard.KVCache, regard.MultiHeadAttention)
    functions += (regard.explain,)
    taken = {name for one in functions for name in inspect.signature(one).parameters}
    texts = []
    for names in (TRIED, *ELSEWHERE.values()):
        texts += [
            text for one in names.values() for text in ([one] if isinstance(one, str) else one)
        ]
    assert {name for text in texts for name in re.findall(r"`(\w+)=", text)} <= taken

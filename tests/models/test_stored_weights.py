"""Language models whose weights are kept in fewer bytes: what is computed, and what is copied."""

from __future__ import annotations

import math

import numpy as np
import pytest

import regard
import tiny_decoder
from products import exact
from regard import ProblemError
from regard.compute import native
from regard.compute.stored import Stored, rounded

pytestmark = [pytest.mark.needs("safetensors"), pytest.mark.needs("tokenizers")]

TEXT = "the cat sat"
# As in test_language.py, in float32.
TOLERANCE = 2 * 10 * 48 * 2.0**-24 * 16
WIDE = {**tiny_decoder.LLAMA, "hidden_size": 32, "intermediate_size": 64, "head_dim": 32}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def config(request):
    return tiny_decoder.CONFIGS[request.param]


def rounded_before(config, kind):
    """The weights of a decoder; those of products are rounded to a kind."""
    found = tiny_decoder.tensors(config)
    for name, array in found.items():
        if array.ndim == 2 and "wpe" not in name:
            turned = ".c_" in name  # (in, out)
            rows = exact(rounded(array.T if turned else array, kind)).astype(np.float32)
            found[name] = np.ascontiguousarray(rows.T if turned else rows)
    return found


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_model_computes_with_rounded_weights_and_rounds_nothing_else(tmp_path, config, kind):
    same = tiny_decoder.write(tmp_path / "same", config, weights=rounded_before(config, kind))
    plain = tiny_decoder.write(tmp_path / "plain", config)
    model = regard.models.load(plain, dtype=kind)
    run = model.run(TEXT)
    expected = regard.models.load(same, dtype="float64").logits(TEXT, None)
    np.testing.assert_allclose(run.logits(None), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(regard.models.load(plain).logits(TEXT, None) - expected).max() > 10 * TOLERANCE
    np.testing.assert_allclose(run.explain()["logits"].value, expected, rtol=0, atol=TOLERANCE)
    alone = run.explain(1)
    whole = run.explain()["1.projected_output"].value
    np.testing.assert_allclose(alone.output, whole, rtol=0, atol=TOLERANCE)
    assert repr(model).endswith(f"{kind})")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_many_tokens_at_once_and_one_by_one_are_the_same(tmp_path, config, kind):
    model = regard.models.load(tiny_decoder.write(tmp_path, config), dtype=kind)
    whole = model.run("the cat sat the cat!")  # 9 tokens and more are another product's
    assert len(whole.tokens) > 8
    run = model.run(whole.tokens.ids[:1])
    for number in whole.tokens.ids[1:]:
        run = model.run(np.array([number]), after=run)
    np.testing.assert_allclose(run.logits(None), whole.logits(None), rtol=0, atol=TOLERANCE)


@pytest.mark.needs("fused")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_a_token_is_written_by_native_products(tmp_path, monkeypatch, kind):
    model = regard.models.load(tiny_decoder.write(tmp_path), dtype=kind)
    answers, module = [], native.module

    class Noted:
        def __getattr__(self, name):
            return getattr(module, name)

        def product(self, *arguments):
            answers.append(module.product(*arguments))
            return answers[-1]

    run = model.run(TEXT)
    monkeypatch.setattr(native, "module", Noted())
    model.generate(run, max_new_tokens=3, stop_at_eos=False)
    # Q, K and V together, the output, gate and up together, down: in two layers; and the logits.
    assert answers == [True] * (2 * (2 * 4 + 1) + 1)


@pytest.mark.needs("fused")
@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_half_weights_stay_in_their_file_where_they_need_no_more_room(tmp_path, kind, dtype):
    weights = tiny_decoder.tensors()
    if kind == "F16":
        halves = {name: one.astype(np.float16) for name, one in weights.items()}
        exactly = {name: one.astype(np.float32) for name, one in halves.items()}
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        halves = {name: one.astype(ml_dtypes.bfloat16) for name, one in weights.items()}
        exactly = {name: one.astype(np.float32) for name, one in halves.items()}
    model = regard.models.load(tiny_decoder.write(tmp_path, weights=halves), dtype=dtype)
    one = model.stack.layers[1].given["W_down"]
    stays = dtype in ("float32", "bfloat16")
    assert isinstance(one, Stored) == (dtype != "float64")
    if isinstance(one, Stored):
        assert (one.rows.dtype.kind in "fu") == stays
        assert one.rows.flags.writeable != stays
        assert not (stays and one.rows.flags.owndata)
    if dtype != "int8":
        np.testing.assert_array_equal(one, exactly["model.layers.1.mlp.down_proj.weight"].T)


@pytest.mark.needs("fused")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_groups_of_int8_in_a_gguf_file_stay_there(tmp_path, dtype):
    arrays = tiny_decoder.converted(WIDE, tiny_decoder.tensors(WIDE))
    kinds = {
        name: (8, one.shape, rounded(one, "int8").rows.tobytes())
        for name, one in arrays.items()
        if one.ndim == 2
    }
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_decoder.gguf(tiny_decoder.metadata(WIDE), arrays, kinds))
    model = regard.models.load(path, dtype=dtype)
    for name in ("W_q", "W_down"):
        one = model.stack.layers[1].given[name]
        assert one.rows.dtype == np.int8
        assert not one.rows.flags.owndata
        assert not one.rows.flags.writeable
    expected = regard.models.load(path, dtype="float64").logits(TEXT, None)
    np.testing.assert_allclose(model.logits(TEXT, None), expected, rtol=0, atol=TOLERANCE)


def test_weights_that_int8_cannot_have_are_refused_by_name(tmp_path):
    weights = tiny_decoder.tensors()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e9
    folder = tiny_decoder.write(tmp_path, weights=weights)
    with pytest.raises(ProblemError, match=r"up_proj\.weight has numbers beyond the range of int8"):
        regard.models.load(folder, dtype="int8")
    regard.models.load(folder, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_stored_weights_that_are_no_numbers_are_refused_by_name(tmp_path, kind):
    arrays = tiny_decoder.converted(WIDE, tiny_decoder.tensors(WIDE))
    name, number = "blk.1.ffn_up.weight", {"F16": 1, "BF16": 30, "Q8_0": 8}[kind]
    bad = bytearray(math.prod(arrays[name].shape) * (34 if kind == "Q8_0" else 64) // 32)
    bad[34:36] = b"\xff\xff"  # NaN as float16 and as bfloat16: a number, or a scale
    kinds = {name: (number, arrays[name].shape, bytes(bad))}
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_decoder.gguf(tiny_decoder.metadata(WIDE), arrays, kinds))
    with pytest.raises(ProblemError, match=r"ffn_up\.weight has numbers that are NaN"):
        regard.models.load(path)

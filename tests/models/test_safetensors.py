"""Weights on disk: what is read is what was written, and files made to do harm are refused."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import unicodedata

import numpy as np
import pytest

import tiny_bert
from regard.errors import ProblemError
from regard.models.files.safetensors import MAX_HEADER_BYTES, find_tensors
from regard.models.files.tensors import read_tensor

# Far more than any of these files needs, far less than any of them asks for.
ENOUGH_BYTES = 20 * 2**20
ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def read_all(folder, dtype=np.float32):
    _, tensors = find_tensors(str(folder))
    return {name: read_tensor(one, np.dtype(dtype)) for name, one in tensors.items()}


def refused(folder, *says):
    """The one line that refuses what is in a directory, in bounded memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ProblemError) as caught:
            read_all(folder)
        assert tracemalloc.get_traced_memory()[1] < ENOUGH_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert not {"Cc", "Cf", "Zl", "Zp"} & {unicodedata.category(letter) for letter in message}
    assert message.startswith(str(folder))
    assert len(message) < 1000
    for said in says:
        assert said in message
    return message


@pytest.mark.needs("safetensors")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_tensors_come_back_as_the_library_wrote_them(tmp_path, dtype):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    written = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5), "c": np.zeros((0, 2))}
    written = {name: array.astype(dtype) for name, array in written.items()}
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "np"})
    for working in (np.float32, np.float64):
        read = read_all(tmp_path, working)
        assert read.keys() == written.keys()
        for name, array in written.items():
            assert read[name].dtype == working
            np.testing.assert_array_equal(read[name], array.astype(working))


@pytest.mark.needs("ml_dtypes")
def test_bfloat16_is_read_bit_by_bit(tmp_path):
    from ml_dtypes import bfloat16

    every = np.arange(2**16, dtype="<u2")
    header = {"a": entry("BF16", [2**16], 0, 2**17)}
    (tmp_path / "model.safetensors").write_bytes(tiny_bert.packed(header, every.tobytes()))
    np.testing.assert_array_equal(read_all(tmp_path)["a"], every.view(bfloat16).astype(np.float32))


def test_integers_may_stand_beside_weights_but_are_none(tmp_path):
    header = {"a": entry("I64", [1]), "b": entry("F32", [2], 8, 16)}
    (tmp_path / "model.safetensors").write_bytes(tiny_bert.packed(header, bytes(16)))
    _, tensors = find_tensors(str(tmp_path))
    np.testing.assert_array_equal(read_tensor(tensors["b"], np.dtype(np.float64)), [0, 0])
    refused(tmp_path, "a has the dtype I64", "F16, BF16, F32, F64")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 bytes"),
        (b"\x10\0\0", "has 3 bytes"),
        (tiny_bert.packed({}, length=2**63), "announce a header of 9223372036854775808"),
        (tiny_bert.packed({}, length=2**64 - 1), "announce a header of"),
        (tiny_bert.packed(ONE, bytes(8), length=10**6), "announce a header of 1000000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        (tiny_bert.packed(b"[1, 2]"), "not a JSON object"),
        (tiny_bert.packed(b""), "not a JSON object"),
        (tiny_bert.packed(b'{"a": '), "header is not valid JSON"),
        (tiny_bert.packed(b'{"a": "\xff"}'), "not UTF-8"),
        (tiny_bert.packed(b'{"a":' * 100_000), "nested too deeply"),
        (tiny_bert.packed({"__metadata__": 3}), "__metadata__ must be a table"),
        (tiny_bert.packed({"a": 3}), "a must have exactly dtype, shape and data_offsets"),
        (
            tiny_bert.packed({"a": {**ONE["a"], "more": 1}}, bytes(8)),
            "exactly dtype, shape and data_offsets",
        ),
        (tiny_bert.packed({"a": entry("F33")}, bytes(8)), 'dtype "F33"; known are BOOL'),
        (tiny_bert.packed({"a": entry(7)}, bytes(8)), "dtype 7"),
        (tiny_bert.packed({"a": entry(shape=[3])}, bytes(8)), "(3,) of F32, 12 bytes, but its"),
        (tiny_bert.packed({"a": entry(shape=[2**32, 2**32])}, bytes(8)), "offsets span 8"),
        (tiny_bert.packed({"a": entry(shape=[2**61, 8])}, bytes(8)), "offsets span 8"),
        (tiny_bert.packed({"a": entry(shape=[-1, -2])}, bytes(8)), "shape of a is not a list"),
        (tiny_bert.packed({"a": entry(shape=[True, 2])}, bytes(8)), "shape of a is not a list"),
        (tiny_bert.packed({"a": entry(shape=[2.0])}, bytes(8)), "shape of a is not a list"),
        (tiny_bert.packed({"a": {**ONE["a"], "shape": "2"}}, bytes(8)), "not a list of whole"),
        (tiny_bert.packed({"a": entry(shape=[1] * 99)}, bytes(8)), "99 axes"),
        (tiny_bert.packed({"a": entry(begin=8, end=0)}, bytes(8)), "data_offsets [8, 0]"),
        (tiny_bert.packed({"a": {**ONE["a"], "data_offsets": [0]}}, bytes(8)), "[0]; they must"),
        (tiny_bert.packed(ONE, bytes(7)), "ends at byte 8 of the data, but only 7 bytes are there"),
        (tiny_bert.packed(ONE, bytes(9)), "1 bytes at the end belong to no tensor"),
        (tiny_bert.packed({"a": entry(), "b": entry()}, bytes(8)), "b begins at byte 0"),
        (
            tiny_bert.packed({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
            "b begins at byte 4 of the data and overlaps a, which ends at 8",
        ),
        (
            tiny_bert.packed({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)),
            "leaves a gap after a",
        ),
        (
            tiny_bert.packed(b'{"a":%b,"a":%b}' % ((json.dumps(ONE["a"]).encode(),) * 2), bytes(8)),
            'the key "a" appears twice',
        ),
        (tiny_bert.packed({"\x1b[31m\u202e": 3}), "\\x1b[31m\\u202e must have"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_in_one_line(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors: ", says)


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    refused(tmp_path, f"at most {MAX_HEADER_BYTES} are read")


def test_a_file_that_shrank_after_it_was_checked_is_cut_off(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(tiny_bert.packed(ONE, bytes(8)))
    _, tensors = find_tensors(str(tmp_path))
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(ProblemError, match="a is cut off: 5 bytes of 8 are there"):
        read_tensor(tensors["a"], np.dtype(np.float32))


# --- directories ---------------------------------------------------------------------------------


def shards(folder, places, index=None):
    for file in set(places.values()):
        names = [name for name, place in places.items() if place == file]
        header = {name: entry(begin=8 * at, end=8 * at + 8) for at, name in enumerate(names)}
        data = np.arange(2 * len(names), dtype="<f4").tobytes()
        (folder / file).write_bytes(tiny_bert.packed(header, data))
    content = {"metadata": {}, "weight_map": places} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards_are_read_as_one(tmp_path):
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    shards(tmp_path, places)
    read = read_all(tmp_path)
    np.testing.assert_array_equal(read["a"], [0, 1])
    np.testing.assert_array_equal(read["b"], [0, 1])
    np.testing.assert_array_equal(read["c"], [2, 3])


@pytest.mark.parametrize(
    "place",
    [
        "../model.safetensors",
        "/etc/passwd.safetensors",
        "below/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        ".safetensors",
        "model.bin",
        "",
        "a\0.safetensors",
        "x" * 300 + ".safetensors",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_may_not_point_outside_its_directory(tmp_path, place):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "model.safetensors").write_bytes(tiny_bert.packed(ONE, bytes(8)))
    shards(inside, {}, {"weight_map": {"a": place}})
    refused(inside, "index.json: weight_map has a in", "beside the index")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    shards(tmp_path, {}, index)
    refused(tmp_path, "weight_map must be a table")


@pytest.mark.parametrize("index", [[], "a"])
def test_an_index_that_is_not_a_table_is_refused(tmp_path, index):
    shards(tmp_path, {}, index)
    refused(tmp_path, "index.json: must be a table, not")


def test_a_shard_without_the_tensor_and_one_that_is_missing(tmp_path):
    shards(tmp_path, {"a": "one.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    refused(tmp_path, "one.safetensors has no b, but weight_map says so")
    index.write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    refused(tmp_path, "two.safetensors: cannot be read: No such file")


def test_pickled_weights_are_never_read_and_the_way_out_is_said(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, "pytorch_model.bin", "never read", "save_pretrained")


def test_a_directory_without_weights_says_what_is_missing(tmp_path):
    refused(tmp_path, "there is neither model.safetensors nor model.safetensors.index.json")
    refused(tmp_path / "nowhere", "cannot be read: No such file or directory")


@pytest.mark.skipif(os.name != "posix", reason="FIFOs are POSIX")
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_or_a_directory_in_place_of_a_file_is_refused_at_once(tmp_path, name):
    (tmp_path / name).mkdir()
    refused(tmp_path, f"{name}: is a directory")
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name}: is a named pipe")


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path):
    header = {"a": entry(), "b": entry("F16", [2, 3], 8, 20), "__metadata__": {"format": "pt"}}
    whole = tiny_bert.packed(header, bytes(20))
    path, numbers = tmp_path / "model.safetensors", random.Random(0)
    refusals = []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(numbers.choice([1, 1, 2, 5])):
            damaged[numbers.randrange(len(whole))] = numbers.randrange(256)
        path.write_bytes(damaged[: numbers.choice([len(whole)] * 4 + [numbers.randrange(200)])])
        try:
            read_all(tmp_path)
        except ProblemError as error:
            refusals.append(str(error))
    assert 200 < len(refusals) < 400
    assert all(one.startswith(f"{path}: ") for one in refusals)

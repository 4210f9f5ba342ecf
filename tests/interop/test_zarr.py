"""regard.interop.zarr: the bytes of one call, block by block, stopped and taken up again or not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from concurrent.futures import Executor, Future
from pathlib import Path

import numpy as np
import pytest

import regard

zarr = pytest.importorskip("zarr")
pytestmark = [pytest.mark.needs("zarr", "fused")]

CHUNKS = (2, 100, 512)  # 16 blocks, with 2 parts of the keys each


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def drawn(dtype=np.float32, heads=4, groups=2, rows=400, keys=900, width=16, batch=(2,)):
    rng = np.random.default_rng(0)
    shapes = ((*batch, heads, rows), (*batch, groups, keys), (groups, keys))
    return [rng.normal(size=(*shape, width)).astype(dtype) for shape in shapes]


def put(name, array, chunks=None, **options):
    """Store an array in a folder of that name."""
    chunks = chunks or (*(1 for _ in array.shape[:-3]), *array.shape[-3:-2], 300, array.shape[-1])
    made = zarr.create_array(
        name, shape=array.shape, chunks=chunks, dtype=array.dtype, overwrite=True, **options
    )
    made[...] = array
    return name


def stored(arrays):
    return [put(name, array) for name, array in zip("qkv", arrays, strict=True)]


def numbers(name):
    return zarr.open_array(name, mode="r")[...]


def attend(*names, **options):
    from regard.interop.zarr import attention

    return attention(*names, **options)


class Stop(Exception):
    pass


def after(blocks):
    def watch(at):
        if at.blocks == blocks:
            raise Stop

    return watch


def stopped(names, blocks=5, **options):
    """An output of which some blocks were made."""
    with pytest.raises(Stop):
        attend(*names, "o", chunks=CHUNKS, watch=after(blocks), **options)
    assert not os.path.lexists("o")


def written(folder="o.part"):
    return sorted(str(path) for path in Path(folder, "c").rglob("*") if path.is_file())


RNG = np.random.default_rng(1)
CASES = {
    "plain": {},
    "causal": {"causal": True, "offset": "end"},
    "window": {"window": (130, 40), "offset": [150, 20]},
    "numbers": {"softcap": 3.0, "sink": 0.5, "scale": -0.4},
    "cells": {"mask": RNG.random((400, 900)) < 0.5, "causal": True, "offset": 200},
    "columns": {"mask": RNG.random((2, 1, 1, 900)) < 0.5},
    "bias": {"bias": RNG.normal(size=(4, 400, 900)).astype("f4")},
    "of_keys": {"bias": RNG.normal(size=(4, 1, 900)).astype("f4")},
    "exact": {"precision": "exact"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_call(case):
    arrays, options = drawn(), CASES[case]
    one = regard.attention(*arrays, return_lse=True, **options)
    extras = {name: put(name, options[name]) for name in ("mask", "bias") if name in options}
    for chunks in (None, (2, 333, 300)):
        options = {**options, **extras, "chunks": chunks, "lse": "lse", "force": True}
        end = attend(*stored(arrays), "o", **options)
        assert (end.blocks, end.kept) == (end.of, 0)
        np.testing.assert_array_equal(numbers("o"), one.output)
        np.testing.assert_array_equal(numbers("lse"), one.lse)


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", "<i4"])
def test_in_every_dtype_that_zarr_has(dtype):
    arrays = [(3 * array).astype(dtype) for array in drawn()]
    attend(*stored(arrays), "o", chunks=CHUNKS)
    made, one = numbers("o"), regard.attention(*arrays)
    assert made.dtype == one.dtype
    np.testing.assert_array_equal(made, one)


@pytest.mark.parametrize(
    "options",
    [
        {"zarr_format": 2},
        {"shards": (2, 2, 400, 16), "compressors": zarr.codecs.BloscCodec()},
        {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]},
    ],
)
def test_in_every_layout_that_zarr_has(options):
    arrays = drawn()
    put("q", arrays[0], (1, 2, 200, 16), **options)
    attend("q", *stored(arrays)[1:], "o", chunks=CHUNKS)
    np.testing.assert_array_equal(numbers("o"), regard.attention(*arrays))


@pytest.mark.parametrize("axis", [-3, -2])
def test_sizes_of_zero(axis):
    arrays = drawn(**{"heads": 0, "groups": 0} if axis == -3 else {"rows": 0})
    chunks = [(1, 1, 500, 16), (1, 1, 500, 16), (1, 500, 16)]
    names = [put(name, *one) for name, *one in zip("qkv", arrays, chunks, strict=True)]
    attend(*names, "o")
    assert numbers("o").shape == regard.attention(*arrays).shape
    q, k, v = drawn(keys=0)
    attend(put("q", q), put("k", k, (1, 1, 1, 16)), put("v", v, (1, 1, 16)), "none")
    np.testing.assert_array_equal(numbers("none"), np.zeros_like(q))


def test_rows_that_leave_their_range_are_made_again():
    q, k, v = drawn()
    k[0, 0, 700] *= np.float32(1e20)
    k[1, 1, 3] = np.inf
    v[1, 5] = np.nan
    q[0, 1, 2] *= np.float32(1e20)
    attend(*stored((q, k, v)), "o", chunks=CHUNKS)
    np.testing.assert_array_equal(numbers("o"), regard.attention(q, k, v))


# --- stopped and taken up again --------------------------------------------------------------


def test_what_was_stopped_goes_on_and_ends_with_the_same_bytes():
    names, one = stored(drawn()), regard.attention(*drawn(), causal=True, offset=200)
    options = {"causal": True, "offset": 200}
    stopped(names, **options)
    assert len(written()) == 5
    before = {path: os.stat(path).st_mtime_ns for path in written()}
    stopped(names, blocks=9, **options)
    assert {path: os.stat(path).st_mtime_ns for path in before} == before
    end = attend(*names, "o", **options)  # with the rows that it was begun with
    assert (end.blocks, end.of, end.kept) == (16, 16, 9)
    np.testing.assert_array_equal(numbers("o"), one)
    assert not os.path.lexists("o.part")


def change_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a byte changed": change_a_byte,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "only zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("rows", [400, 399])  # the last chunks are whole, or cut by the end
def test_damaged_chunks_are_made_again(rows):
    arrays = drawn(rows=rows)
    names = stored(arrays)
    stopped(names, blocks=15)
    paths = [path for path in written() if path[-3] in "23"]  # of the last rows
    assert len(paths) > len(DAMAGE)
    for path, damage in zip(paths, DAMAGE.values(), strict=False):
        damage(Path(path))
    assert attend(*names, "o", chunks=CHUNKS).kept == 15 - len(DAMAGE)
    np.testing.assert_array_equal(numbers("o"), regard.attention(*arrays))


def test_a_block_is_whole_only_with_all_its_outputs():
    arrays = drawn()
    names, one = stored(arrays), regard.attention(*arrays, return_lse=True)
    stopped(names)
    stopped(names, lse="lse", blocks=7)  # of the lse none was there
    os.unlink(written("lse.part")[0])
    assert attend(*names, "o", lse="lse", chunks=CHUNKS).kept == 6
    np.testing.assert_array_equal(numbers("o"), one.output)
    np.testing.assert_array_equal(numbers("lse"), one.lse)


def test_a_block_of_zeros_counts_like_any_other():
    q, k, v = drawn()
    names = stored((q, k, np.zeros_like(v)))
    stopped(names, blocks=15)
    assert attend(*names, "o", chunks=CHUNKS).kept == 15
    assert not numbers("o").any()
    assert len(written("o")) == 16


def test_a_full_disk_is_one_error_and_what_is_whole_is_kept(monkeypatch):
    from zarr.storage import LocalStore

    names, real, calls = stored(drawn()), LocalStore.set, []

    async def is_full(self, key, value):
        if "c/" in key:
            calls.append(key)
            if len(calls) > 5:
                raise OSError(errno.ENOSPC, "No space left on device")
        await real(self, key, value)

    words = r"o: is not finished: No space left on device; 5 of 16 blocks are in o\.part"
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "set", is_full)
        with pytest.raises(regard.ProblemError, match=words):
            attend(*names, "o", chunks=CHUNKS)
    assert not os.path.lexists("o")
    assert attend(*names, "o").kept == 5
    np.testing.assert_array_equal(numbers("o"), regard.attention(*drawn()))


class Hesitant(Executor):
    """Makes so many blocks when they are submitted; the others wait for ever."""

    def __init__(self, blocks):
        self.blocks, self.waiting = blocks, []

    def submit(self, task, /, *given):
        future = Future()
        if self.blocks:
            self.blocks -= 1
            future.set_result(task(*given))
        else:
            self.waiting.append(future)
        return future


def test_a_call_that_is_stopped_gives_up_every_block_that_has_not_begun():
    names, executor = stored(drawn()), Hesitant(6)
    stopped(names, blocks=6, executor=executor, workers=3)
    assert executor.waiting
    assert all(one.cancelled() for one in executor.waiting)
    assert attend(*names, "o", chunks=CHUNKS).kept == 6
    np.testing.assert_array_equal(numbers("o"), regard.attention(*drawn()))


def test_threads_of_an_executor_give_the_same_bytes_and_its_error_ends_the_call():
    from concurrent.futures import ThreadPoolExecutor

    names = stored(drawn())
    with ThreadPoolExecutor(3) as executor:
        stopped(names, blocks=6, executor=executor, workers=3)
        end = attend(*names, "o", chunks=CHUNKS, executor=executor, workers=3)
        assert end.kept >= 6  # what had begun ends, too
        change_a_byte(
            Path(put("k", drawn()[1], compressors=zarr.codecs.Crc32cCodec()), "c/0/0/2/0")
        )
        with pytest.raises(regard.ProblemError, match=r"k: cannot be read at .* checksum"):
            attend(*names, "other", chunks=CHUNKS, executor=executor, workers=3)
    np.testing.assert_array_equal(numbers("o"), regard.attention(*drawn()))


OTHERS = [
    ({"causal": True, "offset": 0}, "no causal, not with causal true"),
    ({"sink": 0.0}, "no sink, not with sink 0.0"),
    ({"chunks": (2, 200, 512)}, r"blocks \[1, 2, 100\], not with blocks \[1, 2, 200\]"),
    ({"mask": "mask"}, "no mask, not with mask {"),
    ({"key": "v2"}, "another key, or v2 has changed"),
]


def test_other_settings_are_refused_and_begin_again_if_forced():
    arrays = drawn()
    put("mask", np.ones((1, 900), bool))
    put("v2", np.ones_like(arrays[1]))
    names = stored(arrays)
    stopped(names)
    before = written()
    plain = {**dict(zip(("query", "key", "value"), names, strict=True)), "chunks": CHUNKS}
    for change, words in OTHERS:
        with pytest.raises(regard.ProblemError, match=r"o\.part: was begun with " + words) as error:
            attend(output="o", **plain | change)
        assert error.value.hint == (("force", True),)
    assert written() == before
    assert attend(output="o", force=True, **plain | OTHERS[0][0]).kept == 0
    np.testing.assert_array_equal(numbers("o"), regard.attention(*arrays, causal=True, offset=0))


CHANGES = {
    "chunks": lambda said: said["chunk_grid"]["configuration"].update(chunk_shape=[1, 2, 50, 16]),
    "no checksum": lambda said: said["codecs"].pop(),
    "another codec": lambda said: said["codecs"].insert(1, {"name": "numcodecs.pickle"}),
    "shape": lambda said: said.update(shape=[2, 4, 300, 16]),
    "blocks": lambda said: said["attributes"]["regard"].update(blocks="abc"),
    "no blocks": lambda said: said["attributes"]["regard"].update(blocks=[0, 0, 0]),
    "no settings": lambda said: said.update(attributes=[]),
}


def test_an_unfinished_output_that_was_changed_is_refused():
    names = stored(drawn())
    stopped(names)
    path = Path("o.part/zarr.json")
    text = path.read_text()
    for change in CHANGES.values():
        said = json.loads(text)
        change(said)
        path.write_text(json.dumps(said))
        with pytest.raises(regard.ProblemError, match=r"^o\.part: "):
            attend(*names, "o")
    path.write_text(text)
    assert attend(*names, "o").kept == 5


def test_an_input_that_changed_is_noticed():
    arrays = drawn()
    names = stored(arrays)
    stopped(names)
    zarr.open_array("k", mode="r+")[0, 0, 0] = 7
    with pytest.raises(regard.ProblemError, match="another key, or k has changed"):
        attend(*names, "o", chunks=CHUNKS)


def test_any_keys_of_a_part_go_on_with_the_same_bytes():
    names = stored(drawn())
    stopped(names)
    assert attend(*names, "o", chunks=(2, 100, 256)).kept == 5
    np.testing.assert_array_equal(numbers("o"), regard.attention(*drawn()))


# --- what is refused -------------------------------------------------------------------------


def test_nothing_is_replaced_but_an_array_and_only_if_forced():
    names = stored(drawn())
    Path("folder").mkdir()
    Path("folder", "kept").write_text("")
    for name, force, words in [
        ("o", False, "o: already exists"),
        ("folder", True, "folder: is not a Zarr array"),
        ("q", True, "would replace the input q"),
        ("q/inside", True, "would replace the input q"),
        ("./k", True, "would replace the input k"),
    ]:
        if name == "o":
            attend(*names, "o", chunks=CHUNKS)
        with pytest.raises(regard.ProblemError, match=words):
            attend(*names, name, force=force)
    Path("p.part").mkdir()
    Path("p.part", "zarr.json").write_text('{"attributes": {}}')
    with pytest.raises(regard.ProblemError, match=r"p\.part: is not an unfinished output"):
        attend(*names, "p", force=True)
    os.makedirs("group/inside")
    shutil.copytree("q", "group/q")
    with pytest.raises(regard.ProblemError, match="would replace the input group/q"):
        attend("group/q", *names[1:], "group", force=True)
    assert Path("folder", "kept").exists()
    np.testing.assert_array_equal(numbers("q"), drawn()[0])


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def test_a_codec_that_unpickles_is_never_used():
    import pickle

    arrays = drawn()
    names = stored(arrays)
    for where in ("filters", "compressor"):
        put("k", arrays[1], zarr_format=2)
        described = json.loads(Path("k/.zarray").read_text())
        described[where] = {"id": "pickle", "protocol": 5}
        if where == "filters":
            described[where] = [described[where]]
        Path("k/.zarray").write_text(json.dumps(described))
        for path in Path("k").glob("[0-9]*"):
            path.write_bytes(pickle.dumps(Trap()))
        with pytest.raises(regard.ProblemError, match="k: has chunks in pickle"):
            attend(*names, "o")
    assert not os.path.lexists("trapped")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: "nowhere", "nowhere: is not a Zarr array"),
        (lambda: os.mkdir("empty") or "empty", "empty: is not a Zarr array"),
        (lambda: damaged("{"), "k: is not a Zarr array"),
        (lambda: damaged("[" * 100000), "k: is not a Zarr array"),
        (lambda: damaged('{"zarr_format": 3, "node_type": "group"}'), "k: is not a Zarr array"),
        (lambda: put("k", np.ones((5, 16))), "key has 2 axes"),
        (lambda: put("k", np.ones((2, 900, 8))), "wide"),
        (lambda: put("k", np.ones((2, 900, 16)).astype("c8")), "complex64"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(make, words):
    q, _, v = stored(drawn())
    with pytest.raises((regard.ProblemError, regard.ShapeError, regard.DtypeError), match=words):
        attend(q, make(), v, "o")
    assert not os.path.lexists("o.part")


def damaged(text):
    shutil.rmtree("k")
    os.mkdir("k")
    Path("k/zarr.json").write_text(text)
    return "k"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunks": (1, 100, 100)}, "share a key head"),
        ({"chunks": (2, 100)}, "three numbers"),
        ({"chunks": (2, 0, 256)}, "chunks"),
        ({"memory": 1000}, "memory is"),
        ({"sink": np.ones(4)}, "which are kept with the output"),
        ({"causal": True}, "pass offset"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(options, words):
    names = stored(drawn())
    with pytest.raises((regard.OptionError, regard.ShapeError), match=words):
        attend(*names, "o", **options)
    assert not os.path.lexists("o.part")

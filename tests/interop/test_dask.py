"""regard.interop.dask: the bytes of one call, whatever the chunks, the order and the workers."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

import regard
from regard.masks import Causal, Lengths, Segments, Window
from regard.positions import Alibi, RelativeBias, Rotary
from regard.scores import Cosine, Distance, General

da = pytest.importorskip("dask.array")
pytestmark = [pytest.mark.needs("dask", "fused")]


def lazily(*arrays, options=None, scheduler="sync", order="fold", **chunks):
    import dask

    import regard.interop.dask as over_dask

    made = over_dask.attention(*arrays, order=order, **(options or {}))
    if isinstance(made, tuple):
        return dask.compute(*made, scheduler=scheduler)
    return (made.compute(scheduler=scheduler),)


def drawn(dtype=np.float32, heads=4, groups=2, rows=300, keys=1000, width=16, batch=(2,)):
    rng = np.random.default_rng(0)
    shapes = ((heads, rows), (groups, keys), (groups, keys))
    return [rng.normal(size=(*batch, *shape, width)).astype(dtype) for shape in shapes]


def cut(arrays, seed):
    rng = np.random.default_rng(seed)
    q, k, _ = arrays

    def sizes(total, least=1):
        cuts = np.unique(rng.integers(least, max(total, 2), size=2))
        ends = [0, *cuts[cuts < total].tolist(), total]
        return tuple(np.diff(ends).tolist())

    shared = q.shape[-3] // k.shape[-3]
    groups = sizes(k.shape[-3])
    heads = tuple(shared * n for n in groups)
    batch = tuple(sizes(n) for n in q.shape[:-3])
    chunks = [(*batch, heads, sizes(q.shape[-2]), -1)]
    chunks += [(*batch, groups, sizes(k.shape[-2]), -1)] * 2
    return [da.from_array(a, chunks=c) for a, c in zip(arrays, chunks, strict=True)]


CASES = {
    "plain": {},
    "causal": {"causal": True, "offset": 700},
    "window": {"window": (130, 40), "offset": [650, 20]},
    "lengths": {"mask": Lengths([900, 0])},
    "segments": {"mask": Segments(np.arange(300) // 90, np.arange(1000) // 300)},
    "program": {"mask": Causal() | ~Window(300, 0) & Lengths([500, 1000]), "offset": 700},
    "cells": {"mask": np.random.default_rng(1).random((300, 1000)) < 0.5},
    "bias": {"bias": np.random.default_rng(2).normal(size=(4, 300, 1000)).astype("f4")},
    "numbers": {"softcap": 3.0, "sink": 0.5, "scale": -0.4},
    "rotary": {"positions": Rotary(), "causal": True, "offset": 700},
    "dynamic": {
        "positions": Rotary(
            scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 99}
        ),
        "offset": [7, 700],
    },
    "alibi": {"positions": Alibi(), "causal": True, "offset": 700},
    "relative": {
        "positions": RelativeBias(np.random.default_rng(3).normal(size=(4, 32))),
        "offset": 0,
    },
    "exact": {"precision": "exact"},
    "general": {"score": General(np.random.default_rng(4).normal(size=(16, 16)))},
    "cosine": {"score": Cosine(0.3), "softcap": 2.0, "causal": True, "offset": 700},
    "sigmoid": {"normalize": regard.normalizers.Sigmoid(bias=-3.0)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_call(case):
    arrays, options = drawn(), CASES[case]
    both = {**options, **({} if "normalize" in options else {"return_lse": True})}
    one = regard.attention(*arrays, **both)
    one = tuple(one) if isinstance(one, tuple) else (one,)
    for seed in range(2):
        made = lazily(*cut(arrays, seed), options=both, scheduler=("sync", "threads")[seed])
        for mine, theirs in zip(made, one, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 300])
def test_in_every_dtype_and_for_few_queries(dtype, rows):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    arrays = drawn(np.dtype(dtype), rows=rows)
    (made,) = lazily(*cut(arrays, 3))
    np.testing.assert_array_equal(made, regard.attention(*arrays))


@pytest.mark.parametrize("rows", [5, 300])
def test_rows_that_leave_their_range_are_made_again(rows):
    q, k, v = drawn(rows=rows)
    k[0, 0, 700] *= np.float32(1e20)
    k[1, 1, 3] = np.inf
    v[0, 1, 5] = np.nan
    q[0, 1, 2] *= np.float32(1e20)
    one = regard.attention(q, k, v, return_lse=True)
    made = lazily(*cut((q, k, v), 4), options={"return_lse": True})
    for mine, theirs in zip(made, one, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("rows", [5, 300])
def test_small_values_are_those_of_one_call(rows):
    q, k, v = drawn(rows=rows)
    v[0] *= np.float32(1e-38)
    v[1, :, :, 3] = 0
    v[1, 0, :, 2] = np.float32(1e-40)
    one = regard.attention(q, k, v)
    (made,) = lazily(*cut((q, k, v), 4))
    np.testing.assert_array_equal(made, one)
    no_values = np.repeat((v == 0).all(axis=-2), q.shape[1] // v.shape[1], axis=1)
    np.testing.assert_array_equal((one == 0).all(axis=-2), no_values)


def test_a_tree_is_near_and_does_not_depend_on_the_scheduler():
    arrays = drawn(keys=5000)
    lazy = [da.from_array(a, chunks=(1, 2, 256, 16)) for a in arrays]
    (one,), (other,) = (lazily(*lazy, order="tree", scheduler=s) for s in ("sync", "threads"))
    np.testing.assert_array_equal(one, other)
    # 20 merges of a fold against 2 levels of 8: each rounds output and sum once.
    np.testing.assert_allclose(one, regard.attention(*arrays), rtol=0, atol=40 * 2.0**-24 * 4)


def test_hidden_parts_are_no_tasks(monkeypatch):
    import regard.interop.dask as over_dask
    from regard.compute import tiles as parts

    x = da.zeros((1, 4096, 16), chunks=(1, 512, 16), dtype="f4")
    real, carried = parts.carry, []

    def counting(request, *words, **options):
        carried.append(request.shape)
        return real(request, *words, **options)

    monkeypatch.setattr(parts, "carry", counting)

    def number(**options):
        carried.clear()
        made = over_dask.attention(x, x, x, **options)
        made.compute(scheduler="sync")
        own = [key for key in made.__dask_graph__() if made.name in key[0]]
        assert len(own) <= 1.2 * len(carried)
        return len(carried)

    assert number() == 64
    assert number(causal=True) == 36
    assert number(window=(0, 0)) == 8
    assert number(mask=Lengths(512)) == 8


def test_a_graph_takes_no_memory_for_its_arrays():
    import tracemalloc

    import regard.interop.dask as over_dask

    x = da.zeros((8, 10**6, 64), chunks=(8, 2**18, 64), dtype="f4")  # 2 GB
    tracemalloc.start()
    try:
        lse = over_dask.attention(x, x, x, causal=True, return_lse=True).lse
        over_dask.weights(x, x, lse, rows=[5, 10**5], causal=True)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[q[:, 0, 0, 0] > 0], k, v), "unknown size"),
        (lambda q, k, v: (q.rechunk((2, 1, 300, 16)), k, v), "share a key head"),
        (lambda q, k, v: (q, k[..., :8], v), "wide"),
    ],
)
def test_bad_input_is_refused_before_a_task_runs(change, words):
    import regard.interop.dask as over_dask

    arrays = change(*(da.from_array(a, chunks=-1) for a in drawn()))
    with pytest.raises(regard.ShapeError, match=words):
        over_dask.attention(*arrays)


def test_what_has_no_states_is_refused():
    import regard.interop.dask as over_dask

    x = da.zeros((1, 8, 4))
    with pytest.raises(regard.OptionError, match="fused kernel"):
        over_dask.attention(x, x, x, score=Distance())
    with pytest.raises(regard.OptionError, match="fold"):
        over_dask.attention(x, x, x, order="ring")


@contextmanager
def cluster_of(workers):
    """Worker processes of one thread that hear this machine only: the client, and the cluster."""
    distributed = pytest.importorskip("distributed")
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with (
        distributed.LocalCluster(n_workers=workers, threads_per_worker=1, **here) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client, cluster


NAMES_ROWS = ("segments", "cells", "bias")  # cases with a number for each of 300 rows


def calls(number):
    """Calls of every rule, each in its own chunks; in half of them rows leave their range."""
    names = [name for name in CASES if name not in ("exact", "sigmoid")]
    for seed in range(number):
        rng = np.random.default_rng(seed)
        name = names[seed % len(names)]
        arrays = drawn(rows=5 if name not in NAMES_ROWS and rng.random() < 0.25 else 300)
        if rng.random() < 0.5:
            arrays[1][..., rng.integers(1000, size=3), :] *= np.float32(1e20)
        yield arrays, cut(arrays, seed), {**CASES[name], "return_lse": True}


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_on_worker_processes_the_bytes_are_those_of_one_call(workers):
    with cluster_of(workers) as (client, _):
        for arrays, lazy, options in calls(30):
            made = lazily(*lazy, options=options, scheduler=client)
            for mine, theirs in zip(made, regard.attention(*arrays, **options), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def slow_blocks(array, seconds):
    """The array as blocks that take some time to make, on whichever worker makes them."""

    def late(block):
        import time

        time.sleep(seconds)
        return block

    return array.map_blocks(late, dtype=array.dtype, meta=np.empty((0,) * array.ndim, array.dtype))


def kill_one(client, cluster):
    import os
    import signal

    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)


def pause_one(client, cluster):
    import os
    import signal
    import time

    number = next(iter(client.run(os.getpid).values()))
    os.kill(number, signal.SIGSTOP)
    time.sleep(10)
    os.kill(number, signal.SIGCONT)


def add_one(client, cluster):
    cluster.scale(3)


@pytest.mark.full
@pytest.mark.parametrize("faults", [(kill_one, kill_one), (pause_one,), (add_one,)])
def test_a_worker_that_dies_stops_or_comes_late_changes_no_byte(faults):
    import time

    import regard.interop.dask as over_dask

    arrays = drawn(rows=512, keys=4096)
    one = regard.attention(*arrays)
    lazy = [
        slow_blocks(da.from_array(a, chunks=(1, *heads, 128, -1)), 0.2)
        for a, heads in zip(arrays, [(2,), (1,), (1,)], strict=True)
    ]
    with cluster_of(2) as (client, cluster):
        future = client.compute(over_dask.attention(*lazy))
        for fault in faults:
            time.sleep(2)
            assert not future.done()
            fault(client, cluster)
        np.testing.assert_array_equal(future.result(timeout=120), one)


@pytest.mark.needs("zarr")
def test_zarr_is_read_in_pieces(tmp_path):
    import zarr

    arrays = drawn()
    stored = []
    for name, array in zip("qkv", arrays, strict=True):
        one = zarr.create_array(
            str(tmp_path / name), shape=array.shape, dtype=array.dtype, chunks=(1, 2, 200, 16)
        )
        one[...] = array
        stored.append(one)
    (made,) = lazily(*stored, options={"causal": True, "offset": 700})
    np.testing.assert_array_equal(made, regard.attention(*arrays, causal=True, offset=700))


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [None, 7, slice(20, 200, 3), [299, 3, 4, 5, -1], []])
@pytest.mark.parametrize(
    "case",
    ["causal", "window", "program", "cells", "bias", "numbers", "rotary", "alibi", "general"],
)
def test_weights_of_some_rows_are_those_of_one_call(case, rows):
    import regard.interop.dask as over_dask

    q, k, v = drawn()
    options = CASES[case]
    lse = regard.attention(q, k, v, return_lse=True, **options).lse
    one = regard.weights(q, k, lse, rows=rows, **options)
    lazy_q, lazy_k, _ = cut((q, k, v), 5)
    made = over_dask.weights(lazy_q, lazy_k, da.from_array(lse, chunks=77), rows=rows, **options)
    assert (made.shape, made.dtype) == (one.shape, one.dtype)
    np.testing.assert_array_equal(made.compute(scheduler="sync"), one)


def test_weights_of_no_heads_and_of_an_lse_that_is_lazy():
    import regard.interop.dask as over_dask

    q, k, v = (array[0, 0] for array in drawn())
    lazy = [da.from_array(array, chunks=(100, -1)) for array in (q, k, v)]
    lse = over_dask.attention(*lazy, return_lse=True).lse
    made = over_dask.weights(*lazy[:2], lse, rows=[5, 250])
    one = regard.weights(q, k, regard.attention(q, k, v, return_lse=True).lse, rows=[5, 250])
    np.testing.assert_array_equal(made.compute(scheduler="sync"), one)


def test_bad_input_of_weights_is_refused_before_a_task_runs():
    import regard.interop.dask as over_dask

    x, lse = da.zeros((2, 8, 4)), da.zeros((2, 8))
    for change, words in [
        ({"lse": lse[:, :7]}, "lse has shape"),
        ({"rows": 8}, "names row 8"),
        ({"score": Distance()}, "dot products"),
        ({"threads": 0}, "threads is 0"),
        ({"key": x[..., :3]}, "wide"),
    ]:
        with pytest.raises((regard.ShapeError, regard.OptionError), match=words):
            over_dask.weights(**{"query": x, "key": x, "lse": lse} | change)

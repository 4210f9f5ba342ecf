"""Keys and values larger than any worker's memory, from Zarr: time beside that of disk and kernel.

    python benchmarks/from_zarr.py           # 4 million keys, 8 heads, 64 wide: 16 GB
    python benchmarks/from_zarr.py 1000000

Two worker processes of one thread, limited to 2 GB each, compute 4096 queries. Before it the disk
alone reads all keys and values (the page cache is emptied first where that is allowed), and two
processes compute a part of them from memory. Prints seconds, ratios and each worker's memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dask
import numpy as np
import zarr
from distributed import Client, LocalCluster

import regard
import regard.interop.zarr
from regard.cli.on_zarr import UNMEASURED

HEADS, ROWS, WIDTH, CHUNK = 8, 4096, 64, 2**16
SAMPLE = 2**18  # keys of what the kernel computes alone


def main(keys: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        paths = [str(Path(folder, name + ".zarr")) for name in ("q", "k", "v", "o")]
        for path, rows in zip(paths, (ROWS, keys, keys), strict=False):
            fill(path, rows)
        with ProcessPoolExecutor(2, get_context("spawn")) as processes:
            list(processes.map(kernel, [256, 256]))  # imports
            alone = [*processes.map(kernel, [ROWS, ROWS])]
        times = keys / SAMPLE * HEADS
        kernel_takes = max(seconds for seconds, _ in alone) * times / 2
        empty_the_cache()
        disk_takes = timed(lambda: read(paths[1:3]))
        empty_the_cache()
        with (
            dask.config.set(UNMEASURED),
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                memory_limit="2GB",
                dashboard_address="127.0.0.1:0",
            ) as cluster,
            Client(cluster) as client,
        ):
            client.run(__import__, "regard.interop.zarr")
            before = sum(client.run(time.process_time).values())
            begin = time.perf_counter()
            end = regard.interop.zarr.attention(*paths, executor=client, workers=2)
            took = time.perf_counter() - begin
            used = sum(client.run(time.process_time).values()) - before
            memory = client.run(peak)
        check(paths)
    slower = max(kernel_takes, disk_takes)
    print(
        f"{keys} keys, {ROWS} rows: disk {disk_takes:.1f} s, kernel {kernel_takes:.1f} s, "
        f"workers {took:.1f} s, {slower / took:.2f} of the speed of the slower; CPU time: kernel "
        f"{times * sum(own for _, own in alone) / 2:.1f} s, workers {used:.1f} s; "
        f"{end.of} blocks, {end.bytes / took / 1e9:.2f} GB/s, peak of each worker "
        f"{', '.join(f'{own:.0f} MiB' for own in memory.values())}"
    )


def fill(path: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    shape = (1, HEADS, rows, WIDTH)
    array = zarr.create_array(
        path, shape=shape, chunks=(1, 1, CHUNK, WIDTH), dtype="f4", compressors=None
    )
    for head in range(HEADS):
        for at in range(0, rows, CHUNK):
            size = min(CHUNK, rows - at)
            array[0, head, at : at + size] = rng.standard_normal((size, WIDTH), dtype="f4")


def kernel(rows: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of one head and a part of its keys on one thread."""
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, length, WIDTH), dtype="f4") for length in (rows, SAMPLE, SAMPLE)
    )
    before = time.process_time()
    seconds = timed(lambda: regard.attention(q, k, v, threads=1))
    return seconds, time.process_time() - before


def read(paths: list[str]) -> None:
    """Every chunk of these arrays, on two threads."""
    with ThreadPoolExecutor(2) as threads:
        for path in paths:
            array = zarr.open_array(path, mode="r")
            places = [(h, at) for h in range(HEADS) for at in range(0, array.shape[2], CHUNK)]
            list(threads.map(lambda p, a=array: a[0, p[0], p[1] : p[1] + CHUNK].sum(), places))


def check(paths: list[str]) -> None:
    """Some rows of the result have the bytes of one call on arrays in memory."""
    q, k, v, o = (zarr.open_array(path, mode="r") for path in paths)
    head, rows = 3, slice(100, 104)
    whole = regard.attention(q[:, head, rows], k[:, head], v[:, head])
    np.testing.assert_array_equal(o[:, head, rows], whole)


def empty_the_cache() -> None:
    import os

    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("the page cache stays: only root may empty it")


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def peak() -> float:
    # Not ru_maxrss, which a worker inherits from the process that started it.
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main(*(int(one) for one in sys.argv[1:2] or ["4000000"]))

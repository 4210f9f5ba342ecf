"""Two Dask workers of one thread each beside one process of two threads, on the same arrays.

    python benchmarks/cluster.py            # 32 768 queries and keys, 8 heads, 64 wide
    python benchmarks/cluster.py 8192

The arrays are in Zarr, in the chunks that `regard.interop.dask.plan` chooses; both sides read them,
and the bytes of both results are compared. dask's own measurements are off, as docs/scale.md
advises. Prints seconds, their ratio and each worker's memory.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import zarr
from distributed import Client, LocalCluster, wait

import regard
from regard.cli.on_zarr import UNMEASURED
from regard.interop.dask import attention, plan


def main(rows: int, rounds: int = 3) -> None:
    shape = (1, 8, rows, 64)
    chosen = plan(shape, shape, shape, memory=2**30, workers=2)
    print(chosen)
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for number, (name, size) in enumerate(
            (("query", chosen.rows), ("key", chosen.keys), ("value", chosen.keys))
        ):
            paths[name] = str(Path(folder, name + ".zarr"))
            numbers = np.random.default_rng(number).normal(size=shape).astype(np.float32)
            stored = zarr.create_array(
                paths[name], shape=shape, chunks=(1, chosen.heads, size, 64), dtype="f4"
            )
            stored[:] = numbers
        with (
            dask.config.set(UNMEASURED),
            LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster) as client,
        ):
            warm = da.zeros((2, 512, 64), chunks=(1, 256, 64), dtype="f4")
            attention(warm, warm, warm).compute()  # every worker has imported what it needs
            for causal in (False, True):
                compare(client, paths, causal, rounds)


def compare(client: Client, paths: dict[str, str], causal: bool, rounds: int) -> None:
    one, two = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        arrays = [np.asarray(zarr.open_array(path, mode="r")) for path in paths.values()]
        expected = regard.attention(*arrays, causal=causal, threads=2)
        one.append(time.perf_counter() - begin)
        del arrays
        begin = time.perf_counter()
        lazy = attention(*(da.from_zarr(path) for path in paths.values()), causal=causal)
        found = lazy.persist()
        wait(found)
        two.append(time.perf_counter() - begin)
        tasks = len(lazy.__dask_graph__())
        same = found.compute().tobytes() == expected.tobytes()
        client.cancel(found)
        del found
    times = [statistics.median(each) for each in (one, two)]
    memory = client.run(peak)
    print(
        f"{'causal' if causal else 'full'}: one process {times[0]:.2f} s, two workers "
        f"{times[1]:.2f} s, {times[0] / times[1]:.2f} of its speed, {tasks} tasks, "
        f"{'the same bytes' if same else 'OTHER BYTES'}, peak of each worker "
        f"{', '.join(f'{own:.0f} MiB' for own in memory.values())}"
    )


def peak() -> float:
    # Not ru_maxrss, which a worker inherits from the process that started it.
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main(*(int(one) for one in sys.argv[1:2] or ["32768"]))

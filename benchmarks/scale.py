"""How long a call over dask or Zarr takes on 1 to 1000 workers, by a simulation of its tasks.

    python benchmarks/scale.py            # measure here, check the simulation, then predict
    python benchmarks/scale.py --predict  # with the costs in COSTS

A graph of the tasks that `regard.interop.dask` or `regard.interop.zarr` makes is played through,
event by event: a scheduler that takes some time for every task, one after the other, and workers
that fetch what they lack, compute, and report. Costs are measured with 1 and 2 worker processes of
this machine, which must have nothing else to do. The check is calls of other sizes, chunks, heads
and rules than those that were measured.
"""

from __future__ import annotations

import heapq
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WIDTH = 64


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes a second; one worker is one thread."""

    cell: float = 64 * 4 / 110e9  # of a query and a key, 64 wide: 4 flop for each number
    scheduler: float = 2.0e-3  # of a task, one after the other
    task: float = 5e-3  # of a task in its worker, besides what it computes
    transfer: float = 10e-3  # of fetching one result from another worker, besides its bytes
    network: float = 1.25e9  # of a worker: 10 Gbit/s
    disk: float = 1.0e9  # of a worker, from Zarr
    storage: float = 20e9  # of all workers together


COSTS = Costs()


class Task(NamedTuple):
    """What is known of a task before it runs."""

    needs: tuple[int, ...]
    seconds: float
    bytes: float  # of its result
    read: float = 0.0  # bytes from the store


class Outcome(NamedTuple):
    """What a simulation found; shares are of the time of all workers, or of the scheduler."""

    seconds: float
    computing: float
    data: float
    tasks: float
    scheduler: float

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        shares = {name: getattr(self, name) for name in self._fields[1:]}
        most = max(shares, key=lambda name: shares[name])
        return most if shares[most] >= 0.4 else "idle"


# --- graphs --------------------------------------------------------------------------------------


def fold(heads: int, rows: Sequence[int], keys: Sequence[int], costs: Costs, causal: bool = False):
    """As `order="fold"`: a chain of parts of the keys for each block of rows; the last ends it."""
    tasks: list[Task] = []
    starts = np.concatenate([[0], np.cumsum(keys)])
    for _ in range(heads):
        blocks = {}
        end = 0
        for length in rows:
            end += length
            query, before = len(tasks), ()
            tasks.append(Task((), 0.0, 4 * WIDTH * length, 4 * WIDTH * length))
            seen = [j for j in range(len(keys)) if not causal or starts[j] < end]
            for j in seen:
                size = keys[j]
                if j not in blocks:  # a key and a value are two tasks
                    blocks[j] = (len(tasks), len(tasks) + 1)
                    tasks += [Task((), 0.0, 4 * WIDTH * size, 4 * WIDTH * size)] * 2
                share = visible(length, size, end - length - int(starts[j])) if causal else 1.0
                result = 4 * length * (WIDTH + (3 if j != seen[-1] else 0))
                seconds = costs.cell * length * size * share
                tasks.append(Task((*before, *blocks[j], query), seconds, result))
                before = (len(tasks) - 1,)
    return tasks


def visible(rows: int, keys: int, offset: int) -> float:
    """Which share of a part a causal rule leaves."""
    seen = np.clip(np.arange(rows) + offset + 1, 0, keys)
    return float(seen.sum()) / (rows * keys)


def few(rows: int, keys: Sequence[int], costs: Costs, tree: bool):
    """Up to 64 rows of a head: parts at the same time, then one merge, or a tree of them."""
    tasks = [Task((), 0.0, 4 * WIDTH * rows, 4 * WIDTH * rows)]
    state = 4 * rows * (WIDTH + 3)
    left = []
    for size in keys:
        at, number = len(tasks), 1 if tree else size // 256
        tasks += [Task((), 0.0, 4 * WIDTH * size, 4 * WIDTH * size)] * 2
        tasks.append(Task((at, at + 1, 0), costs.cell * rows * size, state * number))
        left.append(at + 2)
    while tree and len(left) > 8:
        merged = []
        for at in range(0, len(left), 8):
            tasks.append(Task((*left[at : at + 8], 0), 0.0, state))
            merged.append(len(tasks) - 1)
        left = merged
    tasks.append(Task((*left, 0), 0.0, 4 * rows * WIDTH))
    return tasks


def alone(heads: int, rows: Sequence[int], keys: int, costs: Costs):
    """As the command over Zarr: a block of rows reads all its keys, the next while it computes."""
    tasks = []
    for _ in range(heads):
        for length in rows:
            read, seconds = 8 * WIDTH * keys, costs.cell * length * keys
            hidden = min(read, seconds * costs.disk)  # read while it computes
            tasks.append(Task((), seconds, 0.0, read - hidden))
    return tasks


# --- events --------------------------------------------------------------------------------------


def simulate(tasks: Sequence[Task], workers: int, costs: Costs) -> Outcome:
    """Play a graph through; tasks that are ready go in their order to idle workers."""
    dependents: list[list[int]] = [[] for _ in tasks]
    missing = [len(task.needs) for task in tasks]
    for number, task in enumerate(tasks):
        for one in task.needs:
            dependents[one].append(number)
    unused = [len(each) for each in dependents]
    copies: dict[int, set[int]] = {}  # the workers that have a result
    ready = [number for number, count in enumerate(missing) if not count]
    idle = set(range(workers))
    events: list[tuple[float, int, int]] = []
    free_at = end = computing = fetching = 0.0  # when the scheduler is free
    readers: set[int] = set()

    def start(now: float) -> None:
        nonlocal computing, fetching
        while ready and idle:
            number = heapq.heappop(ready)
            task = tasks[number]
            near = [w for one in task.needs[:2] for w in copies[one] if w in idle]
            worker = near[0] if near else next(iter(idle))
            idle.discard(worker)
            absent = [one for one in task.needs if worker not in copies[one]]
            if task.read:
                readers.add(number)
            disk = min(costs.disk, costs.storage / max(len(readers), 1))
            moved = sum(tasks[one].bytes for one in absent)
            fetch = moved / costs.network + (costs.transfer if absent else 0) + task.read / disk
            for one in absent:
                copies[one].add(worker)
            computing += task.seconds
            fetching += fetch
            done = now + fetch + costs.task + task.seconds
            heapq.heappush(events, (done, number, worker))

    start(0.0)
    while events:
        now, number, worker = heapq.heappop(events)
        free_at = max(free_at, now) + costs.scheduler
        end = free_at
        copies[number] = {worker}
        readers.discard(number)
        for one in tasks[number].needs:
            unused[one] -= 1
            if not unused[one]:
                del copies[one]
        for one in dependents[number]:
            missing[one] -= 1
            if not missing[one]:
                heapq.heappush(ready, one)
        idle.add(worker)
        start(free_at)
    whole = workers * end
    count = len(tasks)
    shares = (computing, fetching, count * costs.task)
    return Outcome(end, *(one / whole for one in shares), count * costs.scheduler / end)


# --- predictions ---------------------------------------------------------------------------------


def cut(whole: int, size: int) -> list[int]:
    return [min(size, whole - at) for at in range(0, whole, size)]


def predict(costs: Costs) -> None:
    """A table: seconds, the share of the workers' time that computes, and what takes the most."""
    many = (1, 10, 100, 1000)
    print(f"{'tokens':>9} {'graph':<30}{'tasks':>7}", *(f"{n:>25}" for n in many))
    for tokens in (10**6, 10**7):
        graphs = {
            f"fold, {rows} x {keys}": fold(8, cut(tokens, rows), cut(tokens, keys), costs)
            for rows, keys in ((4096, 2**16), (4096, 2**19), (16384, 2**19))
            if tokens // rows * tokens // keys < 10**5
        }
        graphs["Zarr, 4096 rows"] = alone(8, cut(tokens, 4096), tokens, costs)
        for order, keys in itertools.product(("fold", "tree"), (2**14, 2**17)):
            tasks = few(64, cut(tokens, keys), costs, tree=order == "tree")
            graphs[f"{order}, 64 rows x {keys}"] = tasks
        for name, tasks in graphs.items():
            found = [simulate(tasks, workers, costs) for workers in many]
            shown = (f"{one.seconds:.4g} s {one.computing:.2f} {one.binds}" for one in found)
            print(f"{tokens:>9} {name:<30}{len(tasks):>7}", *(f"{one:>25}" for one in shown))


# --- measurements --------------------------------------------------------------------------------


def measure() -> Costs:
    """Costs of this machine, by 1 and 2 worker processes."""
    with cluster(2) as client:  # both compute: they share what the machine has
        seconds = client.gather([client.submit(part, 2048, 2**15, n) for n in range(8)])
        cell = statistics.median(seconds) / (2048 * 2**15)
        scheduler = min(trivial(client, 1000) for _ in range(3))
        small, large = (min(moving(client, size) for _ in range(5)) for size in (8, 2**27))
        network = 2**27 / max(large - small, 1e-3)
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    costs = Costs(cell, scheduler, 0.0, small, network, 2e9, 2e9)
    # What a task costs its worker is the rest of a call that has many of them.
    took = run(1, 2, 4096, 512, 1024, causal=False)
    tasks = fold(2, cut(4096, 512), cut(4096, 1024), costs)
    rest = took - simulate(tasks, 1, costs).seconds
    return replace(costs, task=max(rest, 0.0) / len(tasks))


def cluster(workers: int) -> Any:
    from distributed import Client, LocalCluster

    made = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")

    class Both(Client):
        def close(self, *words: Any, **options: Any) -> Any:
            super().close(*words, **options)
            made.close()

    return Both(made)


def part(rows: int, keys: int, seed: int) -> float:
    """Seconds of the kernel."""
    import regard

    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(n, WIDTH)).astype("f4") for n in (rows, keys, keys))
    begin = time.perf_counter()
    regard.attention(q, k, v, threads=1)
    return time.perf_counter() - begin


def trivial(client: Any, number: int) -> float:
    begin = time.perf_counter()
    client.gather(client.map(lambda n: None, range(number), pure=False))
    return (time.perf_counter() - begin) / number


def moving(client: Any, size: int) -> float:
    """Seconds until a result of one worker is at the other."""
    one, other = client.scheduler_info()["workers"]
    array = client.submit(np.zeros, size, "u1", workers=[one], pure=False)
    array.result()
    begin = time.perf_counter()
    client.submit(len, array, workers=[other], pure=False).result()
    return time.perf_counter() - begin


def run(workers: int, heads: int, tokens: int, rows: int, keys: int, *, causal: bool) -> float:
    """Seconds of a real call over dask arrays from Zarr; the median of three."""
    import dask.array as da
    import zarr
    from distributed import wait

    from regard.interop.dask import attention

    with tempfile.TemporaryDirectory() as folder, cluster(workers) as client:
        for name, size in (("q", rows), ("k", keys), ("v", keys)):
            numbers = np.random.default_rng(0).normal(size=(heads, tokens, WIDTH)).astype("f4")
            zarr.create_array(
                str(Path(folder, name)), shape=numbers.shape, chunks=(1, size, WIDTH), dtype="f4"
            )[:] = numbers
        client.run(__import__, "regard.interop.dask")

        def once() -> None:
            lazy = attention(*(da.from_zarr(str(Path(folder, n))) for n in "qkv"), causal=causal)
            wait(lazy.persist())

        return statistics.median(timed(once) for _ in range(3))


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    costs = COSTS
    if "--predict" not in sys.argv:
        costs = measure()
        print(costs)
        for workers, heads, tokens, rows, keys, causal in (
            (2, 4, 16384, 2048, 4096, False),
            (2, 4, 16384, 2048, 4096, True),
            (2, 2, 8192, 256, 1024, False),
        ):
            took = run(workers, heads, tokens, rows, keys, causal=causal)
            tasks = fold(heads, cut(tokens, rows), cut(tokens, keys), costs, causal)
            expected = simulate(tasks, workers, costs).seconds
            print(
                f"{workers} workers, {heads} heads, {tokens} tokens in {rows} x {keys}, "
                f"{'causal' if causal else 'full'}, {len(tasks)} tasks: {took:.2f} s, "
                f"simulated {expected:.2f} s"
            )
        costs = replace(costs, network=COSTS.network, disk=COSTS.disk, storage=COSTS.storage)
    predict(costs)


if __name__ == "__main__":
    main()

"""What a call on tensors of torch costs beside the same call on arrays, and beside torch's own.

    python benchmarks/tensors.py [threads]

8 heads, D = 64, float32, 64 and 512 keys, and one call so small that only its cost remains. All
sides take turns in one process; the least time of each counts.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import numpy as np
import torch

import regard
from regard.bench.timing import Budget, InThisProcess, time_in_rotation

SHAPES = ((1, 1, 3, 4), (1, 8, 64, 64), (1, 8, 512, 64))
BUDGET = Budget(seconds=2.0, rounds=20)


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print(f"{threads} threads, torch {torch.__version__}; in µs")
    print("\n| B,H,L,D | arrays | tensors | torch | tensors more | tensors × torch |")
    print("|---|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        arrays = np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32)
        tensors = torch.from_numpy(arrays.copy()).unbind()
        own = torch.nn.functional.scaled_dot_product_attention
        sides = {
            "arrays": partial(regard.attention, *arrays, threads=threads),
            "tensors": partial(regard.attention, *tensors, threads=threads),
            "torch": partial(own, *tensors),
        }
        taken = time_in_rotation({name: InThisProcess(one) for name, one in sides.items()}, BUDGET)
        least = {name: 1e6 * min(one.seconds) for name, one in taken.items()}
        more = least["tensors"] - least["arrays"]
        figures = [*least.values(), more, least["torch"] / least["tensors"]]
        print(f"| {','.join(map(str, shape))} | " + " | ".join(f"{n:.3g}" for n in figures) + " |")


if __name__ == "__main__":
    main()

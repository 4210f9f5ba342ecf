"""One token after the other: tokens per second against the number of cached keys, by type.

    python benchmarks/decoding.py [--json FILE] [--plot FILE] [--heads 32/8] [--width 128]
                                  [--keys 1024,…,65536] [--types float32,…] [--threads N]

A token is one query for each of 32 heads, which share 8 key heads, against a `KVCache` of float32,
bfloat16, float16 or int8: one layer, so a model of 32 layers makes a 32nd of it. The query has the
type of the cache, and bfloat16 for int8. GB/s are the bytes
of keys and values, each read once. There are as many caches of a type as exceed 128 MB, and calls
take them in turns, so that none is left in the CPU's own caches. Every answer is compared with
that of float32 before any is timed. The types take turns in five rounds, three where a call takes
long; a figure is the median of the best round, because other programs only slow a call down.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

import regard
from regard.bench import machine
from regard.bench.timing import Budget, InThisProcess, time_in_rotation
from regard.compute import native

# How far an answer may be from float32's, in units of its largest number.
CLOSE = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.003, "int8": 0.05}
COLOURS = {"float32": "#666666", "bfloat16": "#0072b2", "float16": "#d55e00", "int8": "#009e73"}
MARKS = {"float32": "v", "bfloat16": "o", "float16": "s", "int8": "^"}
BEYOND_CACHES = 128e6  # bytes
BUDGET = Budget(seconds=1.0)
SCALES = 4  # bytes of each row's scale in int8


def main() -> None:
    options = parsed()
    heads, key_heads = (int(word) for word in options.heads.split("/"))
    threads = options.threads or native.default_threads()
    regard.set_threads(threads)
    names = options.types.split(",")
    rows = [
        measured(names, heads, key_heads, options.width, int(keys))
        for keys in options.keys.split(",")
    ]
    about = machine.description(threads)
    report = {"machine": about, "heads": options.heads, "width": options.width, "rows": rows}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    if options.plot:
        draw(report).savefig(options.plot, dpi=150)
    print(f"{about['cpu']}, target {native.target}, {threads} threads;", end=" ")
    print(f"{options.heads} heads, D = {options.width}\n")
    print("| keys | " + " | ".join(f"{name}, tokens/s | GB/s" for name in names) + " |")
    print("|---:" * (1 + 2 * len(names)) + "|")
    for row in rows:
        cells = (f"{row[name]['tokens']:,.0f} | {row[name]['gigabytes']:.1f}" for name in names)
        print(f"| {row['keys']:,} | " + " | ".join(cells) + " |")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures in FILE", metavar="FILE")
    parser.add_argument("--plot", help="save a plot in FILE", metavar="FILE")
    parser.add_argument("--heads", default="32/8", help="heads of queries and of keys")
    parser.add_argument("--width", type=int, default=128, help="numbers of a key and of a value")
    parser.add_argument("--keys", default="1024,2048,4096,8192,16384,32768,65536")
    parser.add_argument(
        "--types", default=",".join(CLOSE), help="of the cache, with commas between"
    )
    parser.add_argument("--threads", type=int, help="default: the CPUs of this process")
    return parser.parse_args()


def measured(names: list[str], heads: int, key_heads: int, width: int, keys: int) -> dict[str, Any]:
    """Tokens and bytes per second, by type."""
    rng = np.random.default_rng(keys)
    key, value = (rng.standard_normal((1, key_heads, keys, width), np.float32) for _ in "kv")
    query = rng.standard_normal((1, heads, 1, width), np.float32)
    calls: dict[str, InThisProcess] = {}
    sizes = {}
    for name in names:
        sizes[name] = bytes_of(name, key_heads, keys, width)
        caches = []
        for _ in range(1 + int(BEYOND_CACHES / sizes[name])):
            cache = regard.KVCache(capacity=keys, dtype=None if name == "float32" else name)
            cache.append(key, value)
            caches.append(cache)
        own = query.astype(dtype_of("bfloat16" if name == "int8" else name))
        answer = np.asarray(caches[0].attend(own), np.float32)
        right = regard.attention(query, key, value)
        off = np.abs(answer - right).max() / np.abs(right).max()
        assert off <= CLOSE[name], f"{name}, {keys} keys: its error is {off:.1e}"
        calls[name] = InThisProcess(in_turns([cache.attend for cache in caches], own))
    taken = time_in_rotation(calls, BUDGET)
    found: dict[str, Any] = {"keys": keys}
    for name, samples in taken.items():
        seconds = min(samples.medians)
        found[name] = {"tokens": 1 / seconds, "gigabytes": sizes[name] / seconds / 1e9}
    return found


def in_turns(calls: list[Callable[[Any], Any]], query: Any) -> Callable[[], Any]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)(query)


def bytes_of(name: str, key_heads: int, keys: int, width: int) -> int:
    """Bytes of all keys and values."""
    row = width + SCALES if name == "int8" else width * dtype_of(name).itemsize
    return 2 * key_heads * keys * row


def dtype_of(name: str) -> np.dtype[Any]:
    import ml_dtypes  # makes NumPy know bfloat16

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw(report: dict[str, Any]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    keys = [row["keys"] for row in report["rows"]]
    for name in [name for name in COLOURS if name in report["rows"][0]]:
        tokens = [row[name]["tokens"] for row in report["rows"]]
        axes.plot(keys, tokens, marker=MARKS[name], color=COLOURS[name], markersize=5, label=name)
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10**n for n in range(7) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xticks(keys, [f"{n:,}" for n in keys])
    axes.minorticks_off()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("keys in the cache")
    axes.set_ylabel("tokens per second, one layer")
    about = report["machine"]
    axes.set_title(
        f"{about['cpu']}, {about['threads']} threads; {report['heads']} heads, "
        f"D = {report['width']}",
        fontsize=9,
    )
    return figure


if __name__ == "__main__":
    main()

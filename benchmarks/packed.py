"""Sequences of unequal lengths: packed into one flat batch, padded to the longest, one call each.

    python benchmarks/packed.py [sequences [longest]]

The sequences have from a sixteenth of the longest up to all of it (16 of 64 to 1024 tokens), with
8 heads and D = 64, float32. Packed, one call has all tokens in a row and `Segments` as its mask.
Every way is compared with the loop, output and gradients, before any is timed; the ways of a
library take turns, each library in a process of its own. `pairs` is the share of query-key pairs
that are visible where all are computed: what is skipped saves the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import regard
from regard.bench.timing import Budget, InThisProcess, time_in_rotation
from regard.compute import native
from regard.masks import Lengths, Segments

Array = np.ndarray[Any, Any]
HEADS, WIDTH = 8, 64
BUDGET = Budget(seconds=1.0)
CLOSE = 2e-5  # of the largest number: float32, sums over 1024 keys


class Batch:
    """The sequences side by side (1, H, tokens, D), and padded (sequences, H, longest, D)."""

    def __init__(self, count: int, longest: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.linspace(longest // 16, longest, count).astype(int)
        rng.shuffle(self.lengths)
        self.ends = np.cumsum(self.lengths)
        tokens = int(self.ends[-1])
        self.flat = [rng.standard_normal((1, HEADS, tokens, WIDTH), np.float32) for _ in "qkvg"]
        self.padded = [np.zeros((count, HEADS, longest, WIDTH), np.float32) for _ in "qkvg"]
        for flat, padded in zip(self.flat, self.padded, strict=True):
            for number, one in enumerate(self.cut(flat)):
                padded[number, :, : one.shape[2]] = one[0]
        self.segments = np.repeat(np.arange(count), self.lengths)

    def cut(self, flat: Any) -> list[Any]:
        """Each sequence alone."""
        starts = self.ends - self.lengths
        return [flat[:, :, a:b] for a, b in zip(starts, self.ends, strict=True)]

    def from_padded(self, padded: Array) -> Array:
        rows = zip(padded, self.lengths, strict=True)
        return np.concatenate([one[None, :, :n] for one, n in rows], axis=2)


Ways = dict[str, tuple[Callable[[], Any], Callable[[Any], Array]]]


def with_regard(batch: Batch, causal: bool) -> dict[str, Ways]:
    """Direction -> way -> the call, and what makes its answer (arrays, 1, H, tokens, D)."""
    regard.set_threads(native.default_threads())
    every = [np.ascontiguousarray(one) for flat in batch.flat for one in batch.cut(flat)]
    count = len(batch.lengths)
    alone = [every[n::count] for n in range(count)]
    flat, padded = batch.flat, batch.padded
    packed = {"mask": Segments(batch.segments), "causal": causal}
    lengths = {"mask": Lengths(batch.lengths), "causal": causal}

    def forward(arrays: list[Array], options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: [regard.attention(*arrays[:3], **options)]

    def backward(arrays: list[Array], options: dict[str, Any]) -> Callable[[], Any]:
        output, lse = regard.attention(*arrays[:3], return_lse=True, **options)
        return lambda: list(regard.gradients(*arrays, output=output, lse=lse, **options)[:3])

    found = {}
    for direction, make in (("forward", forward), ("backward", backward)):
        each = [make(one, {"causal": causal}) for one in alone]
        found[direction] = {
            "packed": (make(flat, packed), np.stack),
            "padded": (make(padded, lengths), unpad(batch)),
            "loop": (lambda each=each: [call() for call in each], join),
        }
        if not causal:
            found[direction]["all pairs"] = (make(flat, {}), np.stack)
    return found


def with_torch(batch: Batch, causal: bool) -> dict[str, Ways]:
    import torch

    torch.set_num_threads(native.default_threads())
    sdpa = torch.nn.functional.scaled_dot_product_attention
    visible = np.arange(batch.padded[0].shape[2]) < batch.lengths[:, None, None, None]
    if causal:
        visible = visible & np.tri(visible.shape[-1], dtype=bool)
    mask = torch.from_numpy(visible)

    def calls(arrays: list[Any], **options: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        *inputs, grad = [torch.from_numpy(np.ascontiguousarray(one)) for one in arrays]
        for one in inputs:
            one.requires_grad_()
        output = sdpa(*inputs, **options)
        plain = [one.detach() for one in inputs]
        return (
            lambda: [sdpa(*plain, **options)],
            lambda: list(torch.autograd.grad(output, inputs, grad, retain_graph=True)),
        )

    parts = [
        calls(list(one), is_causal=causal) for one in zip(*map(batch.cut, batch.flat), strict=True)
    ]
    whole = calls(batch.padded, attn_mask=mask)

    def arrays(answer: Any) -> list[Array]:
        return [one.numpy() for one in answer]

    found = {}
    for place, direction in enumerate(("forward", "backward")):
        each = [pair[place] for pair in parts]
        found[direction] = {
            "padded": (whole[place], lambda answer: unpad(batch)(arrays(answer))),
            "loop": (
                lambda each=each: [call() for call in each],
                lambda answer: join([arrays(one) for one in answer]),
            ),
        }
    return found


def unpad(batch: Batch) -> Callable[[Any], Array]:
    return lambda answer: np.stack([batch.from_padded(one) for one in answer])


def join(answers: Any) -> Array:
    return np.stack([np.concatenate(parts, axis=2) for parts in zip(*answers, strict=True)])


SIDES = {"regard": with_regard, "torch": with_torch}


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        _, _, side, count, longest = sys.argv
        print(json.dumps(measured(side, int(count), int(longest))))
        return
    count, longest = (int(word) for word in (*sys.argv[1:], *("16", "1024")[len(sys.argv) - 1 :]))
    found: dict[str, dict[str, float]] = {}
    for side in SIDES:
        found |= in_a_process(side, count, longest)
    batch = Batch(count, longest)
    tokens, lengths = int(batch.ends[-1]), batch.lengths.astype(float)
    print(
        f"{count} sequences of {batch.lengths.min()} to {batch.lengths.max()} tokens, {tokens} "
        f"together; {HEADS} heads, D = {WIDTH}, float32, {native.default_threads()} threads"
    )
    pairs = float((lengths**2).sum()) / np.array([tokens**2, count * longest**2])
    print(f"visible pairs: {pairs[0]:.3f} of a flat batch, {pairs[1]:.3f} of a padded one\n")
    print("| | " + " | ".join(found) + " |\n|---" + "|---:" * len(found) + "|")
    ways = dict.fromkeys(way for times in found.values() for way in times)
    for way in ways:
        cells = [f"{times[way] * 1e3:.1f} ms" if way in times else "–" for times in found.values()]
        print(f"| {way} | " + " | ".join(cells) + " |")
    for name, times in found.items():
        if "packed" in times:
            print(
                f"\n{name}: packed takes {times['packed'] / times['loop']:.2f} of the loop's time"
            )
            print(f"and {times['packed'] / times['padded']:.2f} of the padded call's", end="")
            if "all pairs" in times:
                skipped = times["packed"] / times["all pairs"]
                print(f", {skipped:.3f} of that for all pairs", end="")
            print(".")


def in_a_process(side: str, count: int, longest: int) -> dict[str, dict[str, float]]:
    words = [sys.executable, __file__, "--side", side, str(count), str(longest)]
    threads = {"OMP_NUM_THREADS": str(native.default_threads())}
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, env={**os.environ, **threads})
    times: dict[str, dict[str, float]] = json.loads(done.stdout)
    return times


def measured(side: str, count: int, longest: int) -> dict[str, dict[str, float]]:
    """Seconds per call, by direction and way."""
    batch = Batch(count, longest)
    found = {}
    for causal in (False, True):
        for direction, ways in SIDES[side](batch, causal).items():
            right = ways["loop"][1](ways["loop"][0]())
            for name, (call, read) in ways.items():
                if name != "all pairs":
                    off = np.abs(read(call()) - right).max() / np.abs(right).max()
                    assert off <= CLOSE, f"{side}, {name}: its error is {off:.1e}"
            calls = {name: InThisProcess(call) for name, (call, _) in ways.items()}
            taken = time_in_rotation(calls, BUDGET)
            column = f"{side}, {'causal ' if causal else ''}{direction}"
            found[column] = {name: samples.median for name, samples in taken.items()}
    return found


if __name__ == "__main__":
    main()

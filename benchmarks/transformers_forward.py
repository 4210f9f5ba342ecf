"""Time of a model's forward pass on the CPU, attending with regard and with `sdpa`, in one run.

`python benchmarks/transformers_forward.py [--threads N] [--rounds N]` needs transformers and torch.
Each case is verified before it is timed: against the same model in float64, regard may be off by no
more than twice what `sdpa` is off by. The two take turns, so that a disturbance meets both; shown
are medians. Most of a forward pass is not attention.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import regard
from regard.interop.transformers import register

SIDES = ("regard", "sdpa")
TIMES_SDPA = 2


@dataclass(frozen=True)
class Case:
    """A model with random weights, the length of its input, and what is hidden or cached."""

    title: str
    model: str
    config: Any
    rows: int
    length: int
    padded: int = 0  # of every second row
    cached: int = 0  # tokens that a cache holds already


def cases() -> list[Case]:
    bert = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
        vocab_size=1000,
    )  # fmt: skip
    llama = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1408, vocab_size=1000, max_position_embeddings=8192,
    )  # fmt: skip
    mistral = transformers.MistralConfig(**{**llama.to_dict(), "sliding_window": 256})
    return [
        Case("encoder, 8 × 128", "BertModel", bert, 8, 128),
        Case("encoder, 8 × 128, padded", "BertModel", bert, 8, 128, padded=48),
        Case("encoder, 1 × 512", "BertModel", bert, 1, 512),
        Case("decoder, prefill of 512", "LlamaForCausalLM", llama, 1, 512),
        Case("decoder, prefill of 2048", "LlamaForCausalLM", llama, 1, 2048),
        Case("decoder, 4 × 512, padded", "LlamaForCausalLM", llama, 4, 512, padded=200),
        Case("decoder, window 256 of 2048", "MistralForCausalLM", mistral, 1, 2048),
        Case("decoder, 1 token after 2048", "LlamaForCausalLM", llama, 1, 1, cached=2048),
    ]


def build(case: Case, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, case.model)._from_config(case.config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # as sharp as trained models: a wrong mask would show
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def forward(case: Case, model: Any, side: str) -> Callable[[], Any]:
    """One forward pass, ready to be repeated."""
    model.set_attn_implementation(side)
    generator = torch.Generator().manual_seed(1)
    total = case.cached + case.length
    tokens = torch.randint(1000, (case.rows, total), generator=generator)
    present = torch.ones(case.rows, total, dtype=torch.long)
    present[1::2, total - case.padded :] = 0
    counts = present[:, case.cached :].bool()
    if not case.cached:
        mask = present if case.padded else None
        return lambda: first(model(tokens, attention_mask=mask, use_cache=False))[counts]
    cache = model(tokens[:, : case.cached], use_cache=True).past_key_values

    def step() -> Any:
        output = first(model(tokens[:, case.cached :], past_key_values=cache))
        cache.crop(-case.length)
        return output[counts]

    return step


def first(outputs: Any) -> Any:
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def verify(case: Case) -> tuple[float, float]:
    """The largest differences of regard and of `sdpa` from `sdpa` in float64."""
    exact = forward(case, build(case, torch.float64), "sdpa")()
    ours, theirs = (
        float((forward(case, build(case, torch.float32), side)().double() - exact).abs().max())
        for side in SIDES
    )
    if not ours <= TIMES_SDPA * theirs:
        raise SystemExit(f"{case.title}: regard is off by {ours:.1e}, sdpa by {theirs:.1e}")
    return ours, theirs


def measure(case: Case, rounds: int) -> dict[str, float]:
    """The median of each side in milliseconds."""
    steps = {side: forward(case, build(case, torch.float32), side) for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else SIDES[::-1]:
            begin = time.perf_counter()
            steps[side]()
            if number:  # the first round warms up
                times[side].append(1e3 * (time.perf_counter() - begin))
    return {side: statistics.median(own) for side, own in times.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    register()
    torch.set_num_threads(arguments.threads)
    regard.set_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{platform.machine()}, {arguments.threads} threads each, "
        f"medians of {arguments.rounds} in ms"
    )
    print(f"{'':30}{'regard':>9}{'sdpa':>9}{'ratio':>8}   largest error: regard, sdpa")
    for case in cases():
        errors = verify(case)
        median = measure(case, arguments.rounds)
        ratio = median["sdpa"] / median["regard"]
        print(
            f"{case.title:30}{median['regard']:9.1f}{median['sdpa']:9.1f}{ratio:7.2f}×"
            f"   {errors[0]:.1e}, {errors[1]:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""A language model by regard and by transformers, from the same weights: verified, then timed.

    python benchmarks/generation.py MODEL.gguf [--threads 2] [--rounds 7] [--tokens 32]

MODEL.gguf is of the Llama family, such as SmolLM2-135M-Instruct. Each side is a process of its own
with the same number of threads: regard with weights as float32, bfloat16 and int8, and transformers
in float32 and bfloat16. They take turns, and wait for their next turn without computing. Timed are
greedy tokens after a short text, the reading of 512 tokens, and from the start of a process to its
first token. Shown are medians and, because other programs only slow a call down, minima; CPU time
is that of all threads. A token reads the weights of all products: their share is that of the
machine's read bandwidth, which is measured between rounds. The tokens of transformers' float32 have
to be regard's, and its logits too, up to 1e-4 of the largest. What bfloat16 and int8 cost is shown:
the perplexity of a text, and how far logits are from those of float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = "The Eiffel Tower is in the city of"
OURS = ("regard", "regard bfloat16", "regard int8")
THEIRS = ("float32", "bfloat16")
SIDES = (*OURS, *THEIRS)
READ = 512
LOADS = 3
MOST_DISTANCE = 1e-4  # of logits, as a share of the largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        work(asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        ids = written(asked.model, folder)
        compare(asked, folder, ids)


# --- the sides, each in its process ---------------------------------------------------------------


def work(asked: argparse.Namespace) -> None:
    """Answer one line with one line: what to do and its tokens, the seconds and what came out."""
    calls = by_regard(asked) if asked.side in OURS else by_transformers(asked)
    for line in sys.stdin:
        what, ids = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        found = calls[what](ids)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps([wall, cpu, found]), flush=True)


def by_regard(asked: argparse.Namespace) -> dict[str, Callable[[list[int]], list[float]]]:
    import regard

    kept = asked.side.partition(" ")[2] or "float32"
    model = regard.models.load(asked.model, dtype=kept)

    def write(ids: list[int], count: int = asked.tokens) -> list[float]:
        tokens = model.tokenizer.of_ids(as_array(ids))
        return list(model.generate(tokens, max_new_tokens=count, stop_at_eos=False).tokens)

    return {
        "write": write,
        "first": lambda ids: write(ids, 1),
        "read": lambda ids: model.logits(model.tokenizer.of_ids(as_array(ids))).tolist(),
        "perplexity": lambda ids: [perplexity(model, ids)],
        "bandwidth": lambda ids: [bandwidth(asked.threads)],
        "bytes": lambda ids: [float(weights(model.stack))],
    }


def perplexity(model: Any, ids: list[int]) -> float:
    """How many tokens each one of a text was as unlikely as one of, on average."""
    import numpy as np

    logits = model.logits(as_array(ids), None)[:-1].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    said = logits[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp(np.mean(np.log(np.exp(logits).sum(axis=-1)) - said)))


def bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read at most."""
    import numpy as np

    from regard.compute import native

    data = np.ones(2**26, np.float32)  # more than the caches hold
    return float(native.module.read_bandwidth(data, threads, 0.5, native.target))


def weights(stack: Any) -> int:
    """Bytes of all matrices that a token is multiplied by."""
    from regard.compute.stored import Stored

    found = [one for layer in stack.layers for name, one in layer.given.items() if "W_" in name]
    found.append(stack.tables["unembedding"])
    return sum(one.rows.nbytes if isinstance(one, Stored) else one.nbytes for one in found)


def by_transformers(asked: argparse.Namespace) -> dict[str, Callable[[list[int]], list[float]]]:
    import torch
    import transformers

    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, asked.side)
    model = transformers.AutoModelForCausalLM.from_pretrained(asked.folder, dtype=dtype).eval()

    def write(ids: list[int], count: int = asked.tokens) -> list[float]:
        given = torch.tensor([ids])
        with torch.inference_mode():
            made = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return made[0, len(ids) :].tolist()

    def read(ids: list[int]) -> list[float]:
        with torch.inference_mode():
            return model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].tolist()

    return {"write": write, "first": lambda ids: write(ids, 1), "read": read}


def as_array(ids: list[int]) -> Any:
    import numpy as np

    return np.array(ids, np.int64)


def written(model: str, folder: str) -> dict[str, list[int]]:
    """Write the weights as a directory of transformers; tokens to write after, and to read."""
    import numpy as np
    import torch
    import transformers

    import regard
    from regard.models.files.gguf import read_gguf
    from regard.models.files.tensors import read_tensor

    transformers.logging.disable_progress_bar()
    ours = regard.models.load(model)
    config, (_, tensors) = ours.config, read_gguf(model)
    numbers = {name: read_tensor(one, ours.dtype) for name, one in tensors.items()}
    names = {
        **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
        **{"attn_output": "self_attn.o_proj"},
        **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    }
    state = {}
    for name, array in numbers.items():
        own, ending = name.rsplit(".", 1)
        *layer, own = own.split(".", 2)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        if own in ("attn_q", "attn_k"):  # pairs of a rotation are side by side
            pairs = array.reshape(-1, config.head_width // 2, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        state[f"{prefix}{names[own]}.{ending}"] = torch.from_numpy(np.array(array))
    if config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.inner,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            head_dim=config.head_width,
            max_position_embeddings=config.longest,
            rms_norm_eps=config.epsilon,
            rope_theta=config.rotary[0].base,
            tie_word_embeddings=config.tied,
        )
    )
    theirs.load_state_dict(state)
    theirs.save_pretrained(folder)
    drawn = np.random.default_rng(0).integers(0, config.vocabulary, READ)
    said = (Path(__file__).parent / "reading.txt").read_text("utf-8")
    return {
        "write": ours.tokens(TEXT).ids.tolist(),
        "read": drawn.tolist(),
        "perplexity": ours.tokens(said, truncate=True).ids[: 2 * READ].tolist(),
    }


# --- their turns ---------------------------------------------------------------------------------


class Side:
    """A process that answers."""

    def __init__(self, name: str, asked: argparse.Namespace, folder: str) -> None:
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "REGARD_NUM_THREADS")
        env = {**os.environ, **dict.fromkeys(threads, str(asked.threads)), "HF_HUB_OFFLINE": "1"}
        own = ["--threads", str(asked.threads), "--tokens", str(asked.tokens)]
        command = [sys.executable, __file__, asked.model, "--side", name, "--folder", folder, *own]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipe, env=env)

    def __call__(self, what: str, ids: list[int]) -> tuple[float, float, list[float]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, ids]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a side ended before it answered")
        wall, cpu, found = json.loads(answer)
        return wall, cpu, found

    def end(self) -> float:
        """Close it; the most memory that it had, in MB."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        self.process.communicate()
        return peak[0] * 1024 / 1e6 if peak else float("nan")


def compare(asked: argparse.Namespace, folder: str, ids: dict[str, list[int]]) -> None:
    walls: dict[tuple[str, str], list[float]] = {}
    cpus: dict[tuple[str, str], list[float]] = {}
    for _ in range(LOADS):
        for name in SIDES:
            begin = time.perf_counter()
            side = Side(name, asked, folder)
            side("first", ids["write"])
            walls.setdefault((name, "first"), []).append(time.perf_counter() - begin)
            side.end()
    sides = {name: Side(name, asked, folder) for name in SIDES}
    said = ids.pop("perplexity")
    found = {name: {what: side(what, own)[2] for what, own in ids.items()}
             for name, side in sides.items()}  # fmt: skip
    verify(found)
    for name in OURS:
        off = rms(found[name]["read"], found["regard"]["read"])
        unlike = sides[name]("perplexity", said)[2][0]
        print(f"{name:<18} perplexity {unlike:.4f}, logits {off:.1e} of their size from float32's")
    sizes = {name: sides[name]("bytes", [])[2][0] for name in OURS}
    speeds: list[float] = []
    for number in range(asked.rounds):
        for name in SIDES if number % 2 else SIDES[::-1]:
            for what, own in ids.items():
                wall, cpu, _ = sides[name](what, own)
                walls.setdefault((name, what), []).append(wall)
                cpus.setdefault((name, what), []).append(cpu)
        speeds.append(sides["regard"]("bandwidth", [])[2][0])
    memory = {name: side.end() for name, side in sides.items()}
    print(f"{asked.threads} threads, medians (minima) of {asked.rounds}; peaks of memory in MB")
    print(f"{'':<22}", *(f"{name:>20}" for name in SIDES))
    for what, of in (("write", asked.tokens), ("read", READ)):
        for title, times in ((f"{what}, tokens/s", walls), (f"{what}, CPU ms a token", cpus)):
            cells = []
            for name in SIDES:
                two = statistics.median(times[name, what]), min(times[name, what])
                two = [of / x if times is walls else 1e3 * x / of for x in two]
                cells.append(f"{two[0]:>9.1f} ({two[1]:>8.1f})")
            print(f"{title:<22}", *cells)
        for one, other in (
            *((OURS[0], name) for name in THEIRS),
            *((name, OURS[0]) for name in OURS),
        ):
            ours, theirs = walls[one, what], walls[other, what]
            middle = statistics.median(theirs) / statistics.median(ours)
            print(f"  {one}: {middle:.2f} ({min(theirs) / min(ours):.2f}) × {other}")
    fastest = max(speeds)
    print(f"read bandwidth, GB/s: {', '.join(f'{one / 1e9:.1f}' for one in speeds)}")
    for name in OURS:
        least = sizes[name] / fastest * asked.tokens
        shares = [least / one for one in (statistics.median(walls[name, "write"]),
                                          min(walls[name, "write"]))]  # fmt: skip
        print(
            f"  {name}: {sizes[name] / 1e6:.0f} MB a token, {shares[0]:.0%} ({shares[1]:.0%}) of it"
        )
    times = [walls[name, "first"] for name in SIDES]
    cells = [f"{statistics.median(one):>9.2f} ({min(one):>8.2f})" for one in times]
    print(f"{'first token after, s':<22}", *cells)
    print(f"{'peak, MB':<22}", *(f"{memory[name]:>20.0f}" for name in SIDES))


def rms(one: list[float], other: list[float]) -> float:
    """How far numbers are from others, by the root of mean squares about their mean."""
    middle = statistics.fmean(other)
    away = statistics.fmean((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return (away / statistics.fmean((b - middle) ** 2 for b in other)) ** 0.5


def verify(found: dict[str, dict[str, list[float]]]) -> None:
    """Check regard's tokens and logits by those of transformers' float32."""
    ours, theirs = found["regard"], found["float32"]
    if ours["write"] != theirs["write"]:
        sys.exit(f"other tokens: {ours['write']}, and by transformers {theirs['write']}")
    pairs = zip(ours["read"], theirs["read"], strict=True)
    away = max(abs(a - b) for a, b in pairs) / max(map(abs, theirs["read"]))
    if away > MOST_DISTANCE:
        sys.exit(f"logits are {away:.1e} of the largest from those of transformers")
    same = sum(a == b for a, b in zip(ours["write"], found["bfloat16"]["write"], strict=True))
    print(f"logits within {away:.1e} of the largest; bfloat16 has {same} of the same tokens")


if __name__ == "__main__":
    main()

"""Sentence embeddings by regard and by transformers, from the same files: checked, then timed.

    python benchmarks/minilm.py DIRECTORY [--threads 2] [--rounds 9]

DIRECTORY is a BERT-type sentence encoder whose sentences are normalised means of their tokens, such
as all-MiniLM-L6-v2. Both sides get the same texts in the same batches, sorted by length, in one
process with the same number of threads, turn by turn; times are medians over the rounds, tokenising
included. The distance is the largest one of any number of an embedding from the same model run by
transformers in float64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

WORDS = """the cat sat on a mat because it was tired and nobody in that large house had the heart to
wake it before dinner although coffee was ready attention matters when sentences are long"""
BATCH = 32
# What rounding an embedding in float32 may cost, beside what it costs transformers itself.
MOST_TIMES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "REGARD_NUM_THREADS"):
        os.environ[name] = str(asked.threads)  # read by the libraries when they are imported
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    import numpy as np
    import torch
    import transformers

    import regard

    torch.set_num_threads(asked.threads)
    transformers.logging.disable_progress_bar()
    rng = np.random.default_rng(0)
    words = WORDS.split()
    texts = [" ".join(rng.choice(words, size=size)) for size in rng.integers(3, 60, size=64)]
    library = transformers.AutoTokenizer.from_pretrained(asked.directory)
    ours = regard.models.load(asked.directory)

    def theirs(attention: str, dtype: torch.dtype):
        model = transformers.AutoModel.from_pretrained(
            asked.directory, attn_implementation=attention
        )
        model = model.to(dtype).eval()

        def encode(texts: list[str]) -> np.ndarray:
            order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
            vectors = np.empty((len(texts), model.config.hidden_size), np.float64)
            for start in range(0, len(order), BATCH):
                own = order[start : start + BATCH]
                batch = library([texts[k] for k in own], padding=True, return_tensors="pt")
                with torch.inference_mode():
                    hidden = model(**batch).last_hidden_state
                    real = batch["attention_mask"][..., None].to(dtype)
                    mean = (hidden * real).sum(1) / real.sum(1)
                    vectors[own] = torch.nn.functional.normalize(mean).numpy()
            return vectors

        return encode

    sides = {
        "regard": lambda texts: ours.encode(texts, batch_size=BATCH),
        "transformers, sdpa": theirs("sdpa", torch.float32),
        "transformers, eager": theirs("eager", torch.float32),
    }
    exact = theirs("eager", torch.float64)(texts)
    away = {name: float(np.abs(encode(texts) - exact).max()) for name, encode in sides.items()}
    if away["regard"] > MOST_TIMES * away["transformers, eager"]:
        sys.exit(f"regard is {away['regard']:.2e} from float64, more than {MOST_TIMES} × eager's")

    cases = {"one sentence": texts[:1], f"{len(texts)} sentences": texts}
    print(f"{asked.threads} threads, numpy {np.__version__}, torch {torch.__version__}")
    print(f"{'':<22}{'distance':>10}", *(f"{case:>16}" for case in cases))
    times: dict[tuple[str, str], list[float]] = {}
    for case, own in cases.items():
        for _ in range(asked.rounds * (10 if len(own) == 1 else 1)):
            for name, encode in sides.items():
                begin = time.perf_counter()
                encode(own)
                times.setdefault((name, case), []).append(time.perf_counter() - begin)
    for name in sides:
        columns = (f"{statistics.median(times[name, case]) * 1e3:>13.2f} ms" for case in cases)
        print(f"{name:<22}{away[name]:>10.1e}", *columns)


if __name__ == "__main__":
    main()

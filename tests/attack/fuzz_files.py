"""Damaged files of every kind, steered by the lines that they reach, for as long as asked.

`python tests/attack/fuzz_files.py --seconds 3600 --seed 1` shares the time out among the readers of
`attack_files`, one process for each. A file that a reader takes badly is made smaller and printed
as a line for `corpus_files.jsonl`, which the default tests replay. Needs atheris.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

MOST_LENGTH = 2**16  # bytes of a file
STRUCTURED = 0.85  # of the mutations; libFuzzer makes the others
FOUND = "found.jsonl"
# Seconds on the clock, on a machine that may be busy with other work: for one file, which has its
# limit of computing beside; for a worker beside the time to attack, to begin and to end.
LONGEST_FILE = 120
LONGEST_END = 600


def line(reader: str, wrong: str, data: bytes) -> str:
    """A file as a line of the corpus."""
    return json.dumps({"reader": reader, "wrong": wrong, "data": base64.b64encode(data).decode()})


def work(reader: str, seconds: int, seed: int, folder: Path) -> None:
    """Attack one reader in this process; ends it."""
    import atheris

    from attack_mutations import mutated

    beside, corpus = folder / "beside", folder / "corpus"
    beside.mkdir()
    corpus.mkdir()
    with atheris.instrument_imports(include=["regard", "tomllib"]):
        import attack_files

        for number, data in enumerate(attack_files.prepare(reader, beside)):
            (corpus / str(number)).write_bytes(data)
            attack_files.verdict(reader, data, beside)  # loads what is loaded once
    kind, faults = attack_files.READERS[reader].kind, set()

    def check(data: bytes) -> None:
        wrong = attack_files.verdict(reader, data, beside)
        if wrong and attack_files.fault(wrong) not in faults:
            faults.add(attack_files.fault(wrong))
            with open(folder / FOUND, "a", encoding="ascii") as file:
                print(line(reader, wrong, data), file=file)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        dice = random.Random(number)
        if dice.random() < STRUCTURED:
            return mutated(kind, data, dice)[:most]
        return bytes(atheris.Mutate(data, most))

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + attack_files.MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "timeout": LONGEST_FILE,
        "max_len": MOST_LENGTH,
        "artifact_prefix": f"{folder}/",
        "print_final_stats": 1,
    }
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], str(corpus), *words], check, custom_mutator=mutate)
    atheris.Fuzz()


def attack(reader: str, seconds: int, seed: int) -> tuple[int, list[tuple[str, bytes]]]:
    """How many files one reader was given, and those that it took badly."""
    with tempfile.TemporaryDirectory(prefix="regard-files-") as place:
        folder = Path(place)
        given = ["--worker", reader, "--folder", place, "--seconds", str(seconds)]
        program = [sys.executable, __file__, *given, "--seed", str(seed)]
        try:
            most = seconds + LONGEST_END
            quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
            done = subprocess.run(program, stdout=quiet, stderr=pipe, timeout=most)
            ended, said = f"ended: {done.returncode}", done.stderr.decode(errors="replace")
        except subprocess.TimeoutExpired as late:
            ended, said = "no end", (late.stderr or b"").decode(errors="replace")
        found = []
        if (folder / FOUND).exists():
            for one in map(json.loads, (folder / FOUND).read_text().splitlines()):
                found.append((one["wrong"], base64.b64decode(one["data"])))
        for path in folder.glob("*-*"):  # libFuzzer's: what ended the process
            found.append((f"{path.name.partition('-')[0]}: ends the process", path.read_bytes()))
        files = re.search(r"number_of_executed_units: ([0-9]+)", said)
        reached = re.findall(r"cov: ([0-9]+)", said)
        # With its figures told a worker is done; libFuzzer may then wait for ever for a lock.
        if not found and (not files or ended not in ("ended: 0", "no end")):
            found.append((f"{ended} {said[-1500:]}", b""))
        count = int(files[1]) if files else 0
        print(
            f"{reader:<13}{count:>9} files  {reached[-1] if reached else '?':>6} branches reached  "
            f"{len(found)} taken badly",
            flush=True,
        )
        return count, found


def shown(reader: str, wrong: str, data: bytes) -> str:
    """What is wrong and the line for the corpus, of a file made as small as it gets."""
    import attack_files
    from attack_mutations import smaller

    if "ends the process" in wrong or not data:
        return f"\n{wrong}\n{line(reader, wrong, data)}"
    with tempfile.TemporaryDirectory(prefix="regard-files-") as place:
        attack_files.prepare(reader, Path(place))

        def fails(less: bytes) -> bool:
            again = attack_files.verdict(reader, less, Path(place))
            return attack_files.fault(again) == attack_files.fault(wrong)

        data = smaller(data, fails) if fails(data) else data
    return f"\n{reader}: {wrong}\n{line(reader, wrong, data)}"


def main() -> int:
    """Attack every reader; 1 if a file was taken badly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3600, help="for all readers together")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**31)
    parser.add_argument("--readers", nargs="+", help="only these")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.seconds, asked.seed, asked.folder)
    from attack_files import READERS

    readers = asked.readers or list(READERS)
    each = max(1, asked.seconds // len(readers))
    print(f"seed {asked.seed}; {each} s for each of {len(readers)} readers", flush=True)
    total, bad = 0, []
    for reader in readers:
        count, found = attack(reader, each, asked.seed)
        total += count
        bad += [(reader, *one) for one in found]
    for one in bad:
        print(shown(*one))
    print(f"{total} files; {len(bad)} taken badly")
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main())

"""How well diagnosis judges the corpus, as a table.

    python tests/corpus/run.py                        # every case, with its adapter
    python tests/corpus/run.py --without-adapters     # only told what is stated
    python tests/corpus/run.py --only NAME --each     # one case, and what was said of it
    python tests/corpus/run.py --folder PATH          # cases that are elsewhere
    python tests/corpus/run.py --mutations 7          # right ones, tokens changed by a seed
    python tests/corpus/run.py --record               # keep the verdicts in recorded.json
    python tests/corpus/run.py --write-docs           # the tables of what is recorded

Owns the processes, the marks and the tables. What judges is in `judges.py`. Each case is judged in
a process of its own, which may use so many seconds of a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from attention_corpus import CORPUS, Case, cases
from consuming_lines import consuming_lines
from corpus.judges import Judge, Judged, by_diagnose
from corpus.mutations import mutations_of
from places import ROOT

RECORDED = CORPUS / "recorded.json"
PAGE = ROOT / "docs" / "diagnose.md"
BEGIN, END = "<!-- table of the corpus -->", "<!-- end of the table of the corpus -->"
CHANGED_WAY = "seed"
CPU_SECONDS = 120
WAITED = 10  # times as many seconds, for code that sleeps
LINGERS = 5  # seconds, for what the code has left running
LOADED = ("numpy", "torch", "jax", "regard")  # once, in the process that all others are made of


# --- judging --------------------------------------------------------------------------------------


def judged(
    case: Case, adapter: bool, judge: Judge = by_diagnose, seconds: int = CPU_SECONDS
) -> Judged:
    """The verdict on one case, from a process of its own; "stopped" beyond its CPU time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LOADED, "corpus.judges"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, judge, case, adapter, seconds))
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAITED * seconds):
            process.kill()
        return ours.recv()
    except EOFError:  # it was ended, by a limit or by what it ran
        return Judged("stopped")
    finally:
        ours.close()
        process.join(LINGERS)
        process.kill()
        process.join()


def _answer(out: Connection, judge: Judge, case: Case, adapter: bool, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        found = judge(case, adapter)
    except Exception as error:  # a tool that fails is a result as well
        found = Judged(f"raised {type(error).__name__}: {error}")
    out.send(found)


def all_judged(
    some: Sequence[Case], adapter: bool, jobs: int = 1, judge: Judge = by_diagnose
) -> Iterator[tuple[Case, Judged]]:
    """Every case with its verdict, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(some, pool.map(lambda one: judged(one, adapter, judge), some), strict=True)


# --- marks ----------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """What a verdict is worth."""

    verdict: str  # called right, accused (right code), wrong (wrong code), unknown, not callable
    place: str = ""  # line, consuming, another
    name: str = ""  # named, near, misnamed


VERDICTS = {"right": "called right", "fragile": "called right", "not_callable": "not callable"}


def marks(case: Case, found: Judged) -> Marks:
    """The marks of one verdict; one of right code that is no accusation has the verdict alone."""
    verdict = VERDICTS.get(found.verdict, found.verdict if found.verdict == "wrong" else "unknown")
    if not case.wrong:
        return Marks("accused" if verdict == "wrong" else verdict)
    name = ""
    if found.names and case.names is not None:
        named, near = ({*found.names} & {*some} for some in (case.names, case.near))
        name = "named" if named else "near" if near else "misnamed"
    if verdict == "called right" and found.verdict == "fragile" and name == "named":
        verdict = "wrong"  # it is said, as what fails at the edge
    if verdict != "wrong":
        return Marks(verdict)
    place = ""
    if found.line:
        consumed = found.line in consuming_lines(case.code, case.line)
        place = "line" if found.line == case.line else "consuming" if consumed else "another"
    return Marks(verdict, place, name)


def told(case: Case, found: Judged) -> str:
    """One line on one case."""
    mark = marks(case, found)
    words = [word for word in mark if word]
    said = ", ".join([*found.names, *[f"line {found.line} for {case.line}"] * bool(found.line)])
    failed = "" if found.verdict in ("wrong", "right") else f" [{found.verdict[:80]}]"
    return (
        f"{'wrong' if case.wrong else 'right'}  {case.name:36} {', '.join(words):32} {said}{failed}"
    )


# --- tables ---------------------------------------------------------------------------------------

Found = dict[str, tuple[Judged, Marks]]  # by the name of a case
Column = tuple[str, Callable[[Marks], bool]]
CALLED_RIGHT: Column = ("called right", lambda mark: mark.verdict == "called right")
UNKNOWN: Column = ("unknown", lambda mark: mark.verdict == "unknown")
NOT_CALLABLE: Column = ("not callable", lambda mark: mark.verdict == "not callable")
PLACES: tuple[Column, ...] = (
    ("on the line", lambda mark: mark.place == "line"),
    ("on a consuming line", lambda mark: mark.place == "consuming"),
    ("on another line", lambda mark: mark.place == "another"),
)
NAMES: tuple[Column, ...] = (
    ("named", lambda mark: mark.name in ("named", "near")),
    ("misnamed", lambda mark: mark.name == "misnamed"),
)
ACCUSED: Column = ("accused", lambda mark: mark.verdict == "accused")
WRONG = (*PLACES, *NAMES, CALLED_RIGHT, UNKNOWN, NOT_CALLABLE)
RIGHT = (CALLED_RIGHT, ACCUSED, UNKNOWN, NOT_CALLABLE)
CHANGED = (*PLACES, CALLED_RIGHT, UNKNOWN, NOT_CALLABLE)


def table(title: str, columns: Sequence[Column], rows: Mapping[str, Sequence[Marks]]) -> str:
    """The counts of some marks, a row for each way to judge, in Markdown."""
    lines = [
        f"| {title} | cases | {' | '.join(name for name, _ in columns)} |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for way, every in rows.items():
        counts = [str(sum(map(counted, every))) for _, counted in columns]
        lines.append(f"| {way} | {len(every)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def tables(found: Mapping[str, Found], wrong: Callable[[str], bool]) -> str:
    """The tables of wrong, right and changed ones; the keys say how they were judged."""
    of_cases = {way: every for way, every in found.items() if not way.startswith(CHANGED_WAY)}
    parts = []
    for title, columns, wanted in (("wrong ones", WRONG, True), ("right ones", RIGHT, False)):
        rows = {
            way: [marks for name, (_, marks) in every.items() if wrong(name) == wanted]
            for way, every in of_cases.items()
        }
        if any(rows.values()):
            parts.append(table(title, columns, rows))
    rows = {
        way: [marks for _, marks in every.values()]
        for way, every in found.items()
        if way not in of_cases
    }
    if rows:
        parts.append(table("right ones, one token of each changed", CHANGED, rows))
    return "\n\n".join(parts)


# --- what is recorded -----------------------------------------------------------------------------


def record(way: str, found: Found, path: Path = RECORDED) -> None:
    """Keep the verdicts of one way to judge beside those of others."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept[way] = {name: [one, marks] for name, (one, marks) in found.items()}
    parts = []
    for name, verdicts in sorted(kept.items()):
        rows = (
            f"  {json.dumps(case, ensure_ascii=False)}: {json.dumps(one)}"
            for case, one in sorted(verdicts.items())
        )
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


def recorded(path: Path = RECORDED) -> dict[str, Found]:
    """What is recorded, by the way to judge."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {
        way: {
            name: (Judged(one[0], tuple(one[1]), one[2]), Marks(*mark))
            for name, (one, mark) in verdicts.items()
        }
        for way, verdicts in kept.items()
    }


def recorded_tables() -> str:
    """The tables of what is recorded, as the documentation has them."""
    of_wrong = {case.name for case in cases() if case.wrong}
    return tables(recorded(), of_wrong.__contains__)


def changed(seed: int, folder: Path = CORPUS) -> list[Case]:
    """The right cases with one token changed."""
    return [one for case in cases(folder) if not case.wrong for one in mutations_of(case, seed)]


def page_with(text: str, page: str) -> str:
    """A page with a text between the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} or no {END}")
    between = f"\n\n{text}\n\n" if text else "\n"
    return f"{before}{BEGIN}{between}{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--without-adapters", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    parser.add_argument("--folder", type=Path, default=CORPUS)
    parser.add_argument("--mutations", type=int, metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="print every case as it is judged")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(arguments)
    if options.write_docs:
        PAGE.write_text(page_with(recorded_tables(), PAGE.read_text("utf-8")), "utf-8")
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seed = options.mutations
    some = list(cases(options.folder)) if seed is None else changed(seed, options.folder)
    some = [case for case in some if not options.only or case.name in options.only]
    way = "without adapters" if options.without_adapters else "with adapters"
    way = way if seed is None else f"{CHANGED_WAY} {seed}, {way}"
    found: Found = {}
    for case, one in all_judged(some, not options.without_adapters, options.jobs):
        found[case.name] = one, marks(case, one)
        if options.each:
            print(told(case, one), flush=True)
    print(tables({way: found}, {case.name for case in some if case.wrong}.__contains__))
    if options.record:
        record(way, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

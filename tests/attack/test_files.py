"""Files that were taken badly, replayed, and some damaged ones; a planted fault is found."""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path

import pytest

import regard
from attack import fuzz_files
from attack_files import READERS, fault, prepare, verdict
from attack_mutations import mutated, smaller

CORPUS = Path(__file__).parent / "corpus_files.jsonl"
TRIES = 8  # damaged files for each reader

pytestmark = [pytest.mark.needs("tokenizers"), pytest.mark.needs("safetensors")]


@pytest.mark.parametrize("name", READERS)
def test_valid_and_damaged_files_are_read_or_refused_in_one_line(name, tmp_path):
    seeds, dice = prepare(name, tmp_path), random.Random(0)
    READERS[name].read(_written(tmp_path / READERS[name].file, seeds[-1]))
    damaged = [mutated(READERS[name].kind, dice.choice(seeds), dice) for _ in range(TRIES)]
    for data in (*seeds[:2], *damaged):
        assert verdict(name, data, tmp_path) == "", data[:2000]


def _written(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "line", CORPUS.read_text(encoding="ascii").splitlines(), ids=lambda line: line[12:22]
)
def test_a_file_that_was_taken_badly_no_longer_is(line, tmp_path):
    found = json.loads(line)
    if found["reader"] not in READERS:
        pytest.skip(f"the library for {found['reader']} is not here")
    prepare(found["reader"], tmp_path)
    assert verdict(found["reader"], base64.b64decode(found["data"]), tmp_path) == ""


PLANTED = [
    ("KeyError", lambda path: {}["a"]),
    ("does what no reader may", lambda path: Path("/etc/hostname").read_bytes()),
    ("does what no reader may", lambda path: (path.parent / "left").write_bytes(b"")),
    ("a message that names no file", lambda path: _refuse("is damaged")),
    ("a message that is not one short line", lambda path: _refuse(f"{path}:\nis damaged")),
]


def _refuse(text):
    raise regard.ProblemError(text)


@pytest.mark.parametrize(("said", "planted"), PLANTED)
def test_a_planted_fault_is_found_and_its_file_made_small(said, planted, monkeypatch, tmp_path):
    right = READERS["problem_json"].read

    def wrong(path):
        if b"values" in path.read_bytes():
            planted(path)
        right(path)

    seeds = prepare("problem_json", tmp_path)
    monkeypatch.setitem(READERS, "problem_json", READERS["problem_json"]._replace(read=wrong))
    first = verdict("problem_json", seeds[0], tmp_path)
    assert first.startswith(said)

    def fails(data):
        return fault(verdict("problem_json", data, tmp_path)) == fault(first)

    assert smaller(seeds[0], fails) == b"values"


@pytest.mark.skipif(sys.platform == "win32", reason="the worker is a program of a shell")
@pytest.mark.parametrize(("told", "bad"), [("number_of_executed_units: 7", 0), ("#7 INITED", 1)])
def test_a_worker_without_an_end_is_ended_and_counts_if_it_told_its_figures(
    told, bad, tmp_path, monkeypatch
):
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\necho '{told}' >&2\nexec sleep 60\n")
    worker.chmod(0o700)
    monkeypatch.setattr(fuzz_files, "LONGEST_END", 0.3)
    monkeypatch.setattr(fuzz_files.sys, "executable", str(worker))
    count, found = fuzz_files.attack("config", 0, 1)
    assert (count, len(found)) == (0 if bad else 7, bad)

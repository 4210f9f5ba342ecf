"""What the files around the code say agrees with the code."""

from __future__ import annotations

import re
import tomllib

import numpy as np
import pytest

from places import ROOT
from regard.cli.on_disk import MAX_NPY_HEADER
from regard.models.safetensors import MAX_FILE_BYTES, MAX_HEADER_BYTES, MAX_SHARDS
from regard.models.tokenizer import MAX_TOKENIZER_BYTES
from regard.problems.npz import MAX_BYTES, MAX_MEMBERS, MAX_RATIO
from regard.problems.parts import MAX_NUMBERS
from regard.problems.schema import MAX_DEPTH
from regard.problems.toml_json import MAX_KEYS, MAX_TEXT_BYTES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MI, GI = 2**20, 2**30

pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="needs the repository")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_citation_has_the_version_and_the_license_of_the_package():
    found = dict(re.findall(r"^(\w+): (\S+)$", text("CITATION.cff"), re.MULTILINE))
    np.testing.assert_equal(found["version"], PROJECT["version"])
    np.testing.assert_equal(found["license"], PROJECT["license"])


def test_the_workflow_runs_the_commands_of_the_readme():
    patterns = re.findall(r"grep -xE '([^']+)' README\.md", text(".github/workflows/test.yml"))
    lines = [
        [one for one in text("README.md").splitlines() if re.fullmatch(p, one)] for p in patterns
    ]
    np.testing.assert_equal([len(found) for found in lines], [1, 1])


def test_the_workflow_has_every_python_that_the_package_names():
    (listed,) = re.findall(r"python: \[(.*)\]", text(".github/workflows/test.yml"))
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if ":: 3." in one]
    np.testing.assert_equal(re.findall(r'"([^"]+)"', listed), named)


def test_the_limits_on_files_are_those_that_are_kept():
    rows = re.findall(r"^  \| (?!file|-)(.+) \|$", text("SECURITY.md"), re.MULTILINE)
    found = [re.findall(r"\d[\d ]*", row.partition("|")[2]) for row in rows]
    limits = [
        [MAX_TEXT_BYTES // MI, MAX_KEYS, MAX_DEPTH, MAX_NUMBERS],
        [MAX_MEMBERS, MAX_BYTES // GI, MAX_RATIO],
        [MAX_NPY_HEADER],
        [MAX_TEXT_BYTES // MI],
        [MAX_FILE_BYTES // GI, MAX_HEADER_BYTES // MI, MAX_SHARDS],
        [MAX_TOKENIZER_BYTES // MI],
        [MAX_TEXT_BYTES // MI],
    ]
    np.testing.assert_equal([[int(one.replace(" ", "")) for one in row] for row in found], limits)

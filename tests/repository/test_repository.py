"""What the files around the code say agrees with the code."""

from __future__ import annotations

import json
import re
import runpy
import tomllib

import numpy as np
import pytest

from places import ROOT
from regard.boundary.npz import MAX_BYTES, MAX_MEMBERS, MAX_RATIO
from regard.boundary.parse import MAX_DEPTH, MAX_NUMBERS
from regard.boundary.toml_json import MAX_KEYS, MAX_TEXT_BYTES
from regard.cli.on_disk import MAX_NPY_HEADER
from regard.models.files.safetensors import MAX_HEADER_BYTES, MAX_SHARDS
from regard.models.files.tensors import MAX_FILE_BYTES
from regard.models.text.tokenizer import MAX_TOKENIZER_BYTES

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
MI, GI = 2**20, 2**30

pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="needs the repository")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_the_citation_has_the_license_of_the_package():
    found = dict(re.findall(r"^(\w+): (\S+)$", text("CITATION.cff"), re.MULTILINE))
    np.testing.assert_equal(found["license"], PROJECT["license"])


# --- releases ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notes():
    return runpy.run_path(str(ROOT / ".ci/release_notes.py"))["notes"]


CHANGES = "# Changes\n\n## 1.2.0 (2030-01-02)\n\n- New.\n\n## 1.2\n\n- Old.\n\n## 1.3\n"


def test_the_notes_of_a_release_are_its_section_of_the_changes(notes):
    assert notes("v1.2.0", CHANGES, "cff-version: 1.2\nversion: 1.2.0\n") == "- New."
    assert notes("v1.2", CHANGES, "version: 1.2\n") == "- Old."


@pytest.mark.parametrize(
    ("tag", "cited", "why"),
    [
        ("v1.2.0", "1.1.0", "CITATION.cff has version 1.1.0"),
        ("v1.4", "1.4", "0 sections"),
        ("v1.3", "1.3", "must have one"),
        ("1.2.0", "1.2.0", "no tag of a release"),
        ("v1.2.0.dev3", "1.2.0.dev3", "no tag of a release"),
    ],
)
def test_a_release_without_notes_or_with_another_citation_is_refused(notes, tag, cited, why):
    with pytest.raises(SystemExit, match=why):
        notes(tag, CHANGES, f"version: {cited}\n")


def test_the_bill_of_materials_names_only_what_it_lists():
    bom = json.loads(text("src/regard/compute/kernels/cpp/sbom.cdx.json.in"))
    listed = [bom["metadata"]["component"], *bom["components"]]
    names = {one["bom-ref"] for one in listed}
    used = {name for one in bom["dependencies"] for name in (one["ref"], *one["dependsOn"])}
    assert used == names
    assert all(one["licenses"] and one["version"].startswith("${") for one in listed)


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
    released = re.findall(r"^ +(3\.\d+)$", text(".github/workflows/release.yml"), re.MULTILINE)
    np.testing.assert_equal(released[::-1], named)


def test_the_workflow_of_a_release_calls_what_there_is():
    workflow = text(".github/workflows/release.yml")
    called = [s for line in re.findall(r"nox -s (.+)", workflow) for s in line.split()]
    there = re.findall(r"^def (\w+)\(session: ", text("noxfile.py"), re.MULTILINE)
    assert called
    assert set(called) <= set(there)
    scripts = re.findall(r"\.ci/\w+\.py", workflow + text("noxfile.py"))
    assert scripts
    assert all((ROOT / name).is_file() for name in scripts)


def test_the_conda_recipe_has_the_dependencies_of_the_package():
    listed = re.findall(
        r"^    - ([\w-]+) ?(>=[\d.]+)?$", text(".ci/conda/recipe.yaml"), re.MULTILINE
    )
    found = {name + version for name, version in listed} - {"python", "pip", "cmake>=3.19", "ninja"}
    assert found == {*PROJECT["dependencies"], *BUILD["requires"]}


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

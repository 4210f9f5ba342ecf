"""What `pip install .` puts on a machine: the package, its examples and its command, no more."""

from __future__ import annotations

import tomllib
from importlib.metadata import Distribution, distribution
from importlib.resources import files

import pytest

from places import ROOT

pytestmark = pytest.mark.needs("distribution")


@pytest.fixture
def installed() -> Distribution:
    return distribution("regard")


def test_every_file_of_the_package_is_installed(installed):
    sources = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    expected = {
        path.relative_to(ROOT / "src").as_posix()
        for path in sources
        if not {"__pycache__", "cpp"} & set(path.parts) and path.suffix != ".so"
    }
    assert "regard/py.typed" in expected
    assert expected <= {file.as_posix() for file in installed.files}


def test_the_examples_are_installed_beside_the_package():
    expected = {path.name: path.read_bytes() for path in (ROOT / "examples").glob("*.toml")}
    assert len(expected) >= 6
    found = (files("regard") / "examples").iterdir()
    assert {file.name: file.read_bytes() for file in found} == expected


@pytest.mark.needs("fused")
def test_the_native_module_is_installed_and_its_sources_are_not(installed):
    names = [file.as_posix() for file in installed.files]
    assert any(name.startswith("regard/_fused.") and name.endswith(".so") for name in names)
    assert not [name for name in names if "/cpp/" in name]


def test_nothing_but_the_package_is_installed(installed):
    tops = {file.parts[0] for file in installed.files if file.parts[0] != ".."}
    assert tops == {"regard", f"regard-{installed.version}.dist-info"}


def test_the_command_resolves(installed):
    (command,) = installed.entry_points.select(group="console_scripts")
    assert command.name == "regard"
    assert callable(command.load())


def test_the_version_at_run_time_is_the_one_in_pyproject(installed):
    import regard

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert regard.__version__ == installed.version == project["version"]

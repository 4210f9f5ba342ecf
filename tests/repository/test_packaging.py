"""What `pip install .` puts on a machine: the package, its examples and its command, no more."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
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


def test_the_version_at_run_time_is_that_of_the_installation(installed):
    import regard

    assert regard.__version__ == installed.version
    assert re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.dev\d+)?(\+[\w.]+)?", installed.version)


@pytest.mark.needs("fused")
def test_what_is_compiled_in_from_elsewhere_is_listed_with_its_license(installed):
    (path,) = [file for file in installed.files if file.as_posix().endswith(".cdx.json")]
    assert path.parent.name == "sboms"
    bom = json.loads(path.locate().read_text("utf-8"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["version"] == installed.version
    listed = {one["bom-ref"]: one["version"] for one in bom["components"]}
    assert {"nanobind", "numpy-headers", "robin-map"} <= set(listed)
    assert all(re.match(r"\d+\.\d+", version) for version in listed.values())
    texts = {file.parent.name for file in installed.files if "licenses" in file.parts}
    assert texts == {"licenses", "nanobind", "robin-map"}


@pytest.mark.needs("fused")
def test_from_python_3_12_on_the_native_module_is_for_the_stable_abi(installed):
    names = [file.name for file in installed.files if file.name.startswith("_fused.")]
    (name,) = [name for name in names if name.endswith(".so")]
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    assert (name == "_fused.abi3.so") == (sys.version_info >= (3, 12) and not free_threaded)

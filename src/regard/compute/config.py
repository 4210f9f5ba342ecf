"""What this installation of regard is: versions, kernels, threads, extras.

Must not import anything heavy: extras are looked up, not loaded.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np

from regard.compute import dispatch, native
from regard.errors import OptionError

# Extra name -> the distribution that it brings.
EXTRAS = {
    "bfloat16": "ml_dtypes",
    "jax": "jax",
    "models": "tokenizers",
    "onnx": "onnx",
    "plot": "matplotlib",
    "torch": "torch",
    "transformers": "transformers",
}


def show_config(mode: Literal["print", "dict"] = "print") -> dict[str, Any] | None:
    """Print what is installed, which kernels can answer and how many threads may run.

    Parameters
    ----------
    mode : {"print", "dict"}
        "dict" returns the same as plain data and prints nothing. Where `REGARD_TARGET` or
        `REGARD_NUM_THREADS` has a value that cannot be used, it says so.

    Examples
    --------
    >>> show_config("dict")["kernels"]["reference"]
    'usable'
    """
    if mode not in ("print", "dict"):
        raise ValueError(f'mode must be "print" or "dict", not {mode!r}')
    config = {
        "regard": _version("regard") or "not installed",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "kernels": dispatch.status(),
        "cpus": _usable_cpus(),
        "threads": _threads(),
        "extras": {extra: _version(name) or "not installed" for extra, name in EXTRAS.items()},
    }
    if mode == "dict":
        return config
    for key, value in config.items():
        if isinstance(value, dict):
            print(key)
            for name, state in value.items():
                print(f"  {name:<14}{state}")
        else:
            print(f"{key:<16}{value}")
    return None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _threads() -> int | str:
    """How many a call uses, or what is wrong with REGARD_NUM_THREADS."""
    try:
        return native.default_threads()
    except OptionError as error:
        return str(error)


def _usable_cpus() -> int:
    """Those that this process may run on, not those that the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

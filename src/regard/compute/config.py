"""Versions, kernels, threads and extras of this installation. Extras are not imported."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, overload

import numpy as np

from regard import normalizers, scores
from regard.boundary import answering
from regard.compute import dispatch, native
from regard.compute.request import check_threads
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


@answering
def set_threads(threads: int | None) -> None:
    """Set the default number of threads.

    Parameters
    ----------
    threads : int or None
        None: `REGARD_NUM_THREADS` at import time, else all CPUs of the process, within its
        affinity and the quota of its cgroup.

    Raises
    ------
    OptionError, DtypeError
        If it is less than 1 or not an int.

    Examples
    --------
    >>> set_threads(1)
    >>> set_threads(None)
    """
    native.set_default_threads(check_threads(threads))


@overload
def show_config(mode: Literal["print"] = "print") -> None: ...
@overload
def show_config(mode: Literal["dict"]) -> dict[str, Any]: ...
def show_config(mode: Literal["print", "dict"] = "print") -> dict[str, Any] | None:
    """Print versions, available kernels, the number of threads and installed extras.

    Parameters
    ----------
    mode : {"print", "dict"}
        "dict" returns the same as plain data and prints nothing. Both report a value of
        `REGARD_TARGET` or `REGARD_NUM_THREADS` that cannot be used.

    Examples
    --------
    >>> show_config("dict")["kernels"]["reference"]
    'usable'
    """
    if mode not in ("print", "dict"):
        raise ValueError(f'mode must be "print" or "dict", not {mode!r}')
    affinity = getattr(os, "sched_getaffinity", None)  # not the CPUs of the whole machine
    config = {
        "regard": _version("regard"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "kernels": {kernel.name: kernel.status() for kernel in dispatch.kernels()},
        "scores": _known_by(("dot", *scores.KNOWN)),
        "normalizers": _known_by(("softmax", *normalizers.KNOWN)),
        "cpus": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "threads": _threads(),
        "extras": {extra: _version(name) for extra, name in EXTRAS.items()},
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


def _known_by(names: Iterable[str]) -> dict[str, str]:
    """The kernels that know each score or normalisation."""
    every = [*dispatch.kernels()]
    return {name: ", ".join(k.name for k in every if k.knows(name)) for name in names}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _threads() -> int | str:
    """The default number of threads, or what is wrong with REGARD_NUM_THREADS."""
    try:
        return native.default_threads()
    except OptionError as error:
        return str(error)

"""The native module: whether it was built, for which CPU targets, how many threads it uses.

Its only importer, and light: the fast path needs no more than this. Must not know requests.
"""

from __future__ import annotations

import os
from typing import Any

from regard.errors import OptionError, safe_text

REBUILD = "pip install --no-cache-dir --force-reinstall ."

try:
    import regard._fused as _fused

    module: Any = _fused
    BUILT = True
except ImportError:
    # Installed without a compiler. pip may cache that wheel, hence the options of REBUILD.
    BUILT = False
    if os.environ.get("REGARD_REQUIRE_FUSED", "") not in ("", "0"):
        raise ImportError(
            "REGARD_REQUIRE_FUSED is set but the native kernel is not built; "
            f"where there is a C++ compiler, run: {REBUILD}"
        ) from None

MOST_THREADS = 256
MOST_SPIN, SPIN = 1000, 200  # µs that a thread waits for the next call before it sleeps
OF_THREADS = {"REGARD_NUM_THREADS", "REGARD_SPIN_US"}


def targets() -> dict[str, bool]:
    """The CPU targets that were built, best first, and whether this machine can run them."""
    return dict(module.targets()) if BUILT else {}


# The environment is read once, at import; a value that makes no sense is refused when it is needed.
refused: dict[str, str] = {}


def _target_of_environment() -> str:
    """REGARD_TARGET, or the best usable target; "" if there is none."""
    usable = [target for target, runs in targets().items() if runs]
    wanted = os.environ.get("REGARD_TARGET", "")
    if not wanted or not usable:
        return usable[0] if usable else ""
    if wanted in usable:
        return wanted
    refused["REGARD_TARGET"] = (
        f"REGARD_TARGET is {safe_text(repr(wanted), 60)}, which cannot be used here; "
        f"usable are {', '.join(usable)}"
    )
    return ""


def _number_of_environment(name: str, least: int, most: int) -> int | None:
    """A whole number, at most the largest one; None if it is not set, or refused."""
    stated = os.environ.get(name, "")
    if stated.isascii() and stated.isdecimal():
        number = int(stated.lstrip("0")[:9] or "0")
        if number >= least:
            return min(number, most)
    if stated:
        refused[name] = (
            f"{name} is {safe_text(repr(stated), 60)}; it must be a whole number, "
            f"{least} or more, in the digits 0 to 9 alone"
        )
    return None


target = _target_of_environment()
_stated = _number_of_environment("REGARD_NUM_THREADS", 1, MOST_THREADS)
_waiting = _number_of_environment("REGARD_SPIN_US", 0, MOST_SPIN)
spin = SPIN if _waiting is None else _waiting
_threads: int | None = None


def check_environment() -> None:
    """Raise an OptionError if a variable of the environment has a value that was refused."""
    for message in refused.values():
        raise OptionError(message)


def usable_target() -> str:
    """The CPU target in use; an OptionError if REGARD_TARGET names one that is not usable."""
    if not target:
        raise OptionError(refused["REGARD_TARGET"])
    return target


def use_target(name: str) -> None:
    """Use another CPU target from now on."""
    global target
    if name not in [one for one, runs in targets().items() if runs]:
        raise OptionError(f"target {safe_text(repr(name), 60)} cannot be used here")
    target = name
    _tell()


# Takes all arguments of regard.attention by position, and what positions are to it
# (compute/positioned.py). Returns the output of a call with default
# options, and None for any other call.
fast_path = module.fast_path if BUILT else lambda *_: None
# The same, for a query of float32 or a half type and the rows of an int8 cache.
fast_path_of_bytes = module.fast_path_of_bytes if BUILT else lambda *_: None


def default_threads() -> int:
    """Threads of a call without `threads`: set, or REGARD_NUM_THREADS, or all usable CPUs."""
    if _threads is not None:
        return _threads
    for name in OF_THREADS & refused.keys():
        raise OptionError(refused[name])
    return _stated or usable_cpus()


def usable_cpus() -> int:
    """How many CPUs this process may use: its affinity, limited by its cgroup's quota."""
    return int(module.usable_cpus()) if BUILT else 1


def set_default_threads(threads: int | None) -> None:
    """Set the default number of threads; None restores the one at import."""
    global _threads
    _threads = threads
    _tell()


def _tell() -> None:
    """Tell the fast path its threads (0: all CPUs) and target (without one, it never answers)."""
    if BUILT:
        known = _threads is not None or not OF_THREADS & refused.keys()
        module.use(target if known else "", _threads or _stated or 0, spin)


set_default_threads(None)

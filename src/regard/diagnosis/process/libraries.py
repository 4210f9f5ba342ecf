"""Which library a function works with: NumPy, torch or JAX."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

LIBRARIES = ("numpy", "torch", "jax")


def framework_of(function: Any) -> str:
    """The library whose arrays a function works on: the one that its code uses."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "__func__", inner)  # of a method
    if not inspect.isfunction(inner):
        home = str(getattr(inner, "__module__", None) or type(inner).__module__)
        if home.partition(".")[0] in ("torch", "jax", "jaxlib"):
            return home.partition(".")[0].removesuffix("lib")
        inner = inspect.getattr_static(type(inner), "__call__", None)
    if not inspect.isfunction(inner):
        return "numpy"
    if (inner.__module__ or "").partition(".")[0] in ("torch", "jax"):
        return inner.__module__.partition(".")[0]
    used = inspect.getclosurevars(inner)
    of_code = _libraries([*used.nonlocals.values(), *used.globals.values()])
    of_module = _libraries(inner.__globals__.values())
    for libraries in (of_code, of_module):
        for framework in ("torch", "jax"):
            if framework in libraries and "numpy" not in libraries:
                return framework
    return next((name for name in ("torch", "jax") if name in of_code), "numpy")


def _libraries(things: Iterable[Any]) -> set[str]:
    """The packages that modules, functions and classes come from."""
    homes = (
        thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
        for thing in things
    )
    return {str(home).partition(".")[0] for home in homes}

"""A plugin of pytest for a module that counts subnormal numbers: `pytest -p subnormal_counts`.

After each call of the kernel it asks in which passes one was met, or made and kept. A test fails
if a call had some whose inputs have none. Those are numbers that are subnormal in the type that is
computed in: halves are not in float32. What is computed in float64 keeps its subnormal numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, NamedTuple

import numpy as np
import pytest

Counts = dict[str, int]


class Door(NamedTuple):
    """Where a function of the module is given what it reads: arrays, and perhaps options."""

    arrays: tuple[int, ...]
    scales: tuple[int, ...]  # the scale, and the softcap
    wide: int | None = None  # whether it computes in float64; else so does a query of float64


DOORS = {
    "run": Door((0, 1, 2, 6, 8), (14, 15), 17),
    "run_part": Door((0, 1, 2, 3, 8, 10), (16, 17), 19),
    "run_backward": Door((0, 1, 2, 3, 4, 18, 20), (26, 27), 29),
    "fast_path": Door((0, 1, 2), (8,)),
    "fast_path_of_bytes": Door((0, 1, 2), (8,)),
}
met: list[str] = []  # what calls did that must not
excused: list[str] = []


def counting_module() -> Any:
    """The native module, before anything imports the package, with its functions watched."""
    package = find_spec("regard")
    assert package is not None
    spec = PathFinder.find_spec("regard._fused", package.submodule_search_locations)
    assert spec is not None, "there is no native module"
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "subnormals"):
        raise pytest.UsageError(
            f"{spec.origin} does not count; build it with -DREGARD_COUNT_SUBNORMALS=ON"
        )
    for name, door in DOORS.items():
        setattr(module, name, watched(getattr(module, name), door, module.subnormals))
    return module


def watched(call: Callable[..., Any], door: Door, take: Callable[[], Counts]) -> Callable[..., Any]:
    @functools.wraps(call)
    def asked(*given: Any) -> Any:
        take()
        found = excused if may_have_some(given, door) else met
        try:
            return call(*given)
        finally:
            passes = {name: count for name, count in take().items() if count}
            if passes:
                shapes = [getattr(given[place], "shape", None) for place in door.arrays[:3]]
                found.append(f"{call.__name__} of {shapes}: {passes}")

    return asked


def may_have_some(given: tuple[Any, ...], door: Door) -> bool:
    """Whether a call computes in float64, or was given subnormal numbers."""
    try:
        query = given[0]
        if door.wide is None:
            wide = getattr(query, "dtype", None) == np.float64
        else:
            wide = given[door.wide]
        places = (*door.arrays, *door.scales)
        return wide or any(has_subnormal(given[place]) for place in places)
    except (TypeError, ValueError, LookupError, ArithmeticError, Warning):
        return True  # it is no call that computes: the module says so


def has_subnormal(given: Any) -> bool:
    """Whether a number is subnormal in float32; of int8 rows, the scale at the end of one.

    A float16 that is subnormal counts too, because the baseline's conversion meets it; and a NaN,
    whose row is computed again, because its exponential may be anything.
    """
    if given is None:
        return False
    array = np.asarray(given)
    if array.dtype == np.int8:
        array = np.ascontiguousarray(array[..., -4:]).view(np.float32)
    with np.errstate(all="ignore"):
        size = np.abs(array.astype(np.float64))
    least = 2.0**-14 if array.dtype == np.float16 else 2.0**-126
    return bool(((size != 0) & ~(size >= least)).any())


# Tests that count what a call enters or holds, to which the watching adds.
COUNTING = "test_a_call_with_a_mask_enters_few", "test_memory_of_inputs_that_broadcast"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [one for one in items if not one.name.startswith(COUNTING)]


def pytest_configure() -> None:
    """A subnormal value must be counted, or nothing is said by counting none."""
    import regard

    one = np.ones((1, 20, 8), np.float32)
    regard.attention(one, one, np.float32(1e-40) * one)
    if not excused:
        raise pytest.UsageError("a planted subnormal number was not counted")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    met.clear()
    yield
    if met:
        pytest.fail(f"subnormal numbers, though no input is one: {'; '.join(met[:5])}", False)


sys.modules["regard._fused"] = counting_module()

"""A source traced on one small problem, for tests of where it departs from the textbook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np

from regard.diagnosis.gradient_probe import GradientProbe
from regard.diagnosis.probe import Probe
from regard.diagnosis.trace.depart import Departure, trace
from regard.diagnosis.trace.rewrite import Code, rewritten
from regard.diagnosis.trace.traced import Traced


@dataclass(frozen=True)
class Asked:
    """A probe as a problem whose every row counts."""

    probe: Probe
    expected: Mapping[str, Any]
    compared: None = None


def asked(probe: Probe, *gradients: str) -> Asked:
    """What a probe asks: its output, or the gradients of some inputs."""
    right = probe.right
    if gradients:
        return Asked(probe, {name: right[f"d_{name}"] for name in gradients})
    return Asked(probe, {"output": right[probe.result_step]})


def drawn(heads: int = 3, rows: int = 5, keys: int = 5, **more: Any) -> Probe:
    """Queries, keys and values without two equal numbers, 6 wide."""
    rng = np.random.default_rng(1)
    shapes = {"queries": rows, "keys": keys, "values": keys}
    inputs = {name: rng.normal(size=(2, heads, n, 6)) for name, n in shapes.items()}
    return Probe("drawn", inputs, **more)


def with_gradients(probe: Probe) -> GradientProbe:
    """The same problem with a gradient of its output, and those of its inputs as the results."""
    up = np.random.default_rng(2).normal(size=probe.right[probe.result_step].shape)
    inputs = {**probe.inputs, f"d_{probe.result_step}": up}
    return GradientProbe(probe.name, inputs, forward=probe, wanted=(*probe.inputs,))


def run(
    source: str, problem: Asked, call: Callable[[ModuleType, Mapping[str, Any]], Any]
) -> tuple[Code, Traced, Departure | None]:
    """A source that `call` calls with the inputs of a problem, traced."""
    code = rewritten(dedent(source).lstrip("\n"), "users.py")
    module = code.module("users")

    def ask() -> Mapping[str, Any]:
        given = {name: np.array(one) for name, one in problem.probe.inputs.items()}
        result = call(module, given)
        return result if isinstance(result, dict) else {"output": np.asarray(result)}

    return code, *trace(ask, code, module, problem)

"""A probe whose results are gradients: the textbook's backward steps run on a small problem.

Must not know mistakes, nor how a function is called.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.probe import SMALLEST_HALF, Probe
from regard.textbook.gradients import backward
from regard.textbook.steps import Step

WEIGHTS = tuple(f"{kind}_{part}" for part in "qkvo" for kind in "Wb")
# The inputs that have a gradient.
INPUTS = ("queries", "keys", "values", "embeddings", "context", "sink")
# Those that all texts share, each of which adds to their gradients.
OF_ALL_TEXTS = (*WEIGHTS, "sink")


@dataclass(frozen=True, eq=False)
class GradientProbe(Probe):
    """A probe with the gradient of its output given, under the name of that gradient's step."""

    forward: Probe | None = None  # the probe that it was made of
    wanted: tuple[str, ...] = ()  # the inputs whose gradients are the results

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The forward steps, and the backward steps to every input."""
        assert self.forward is not None
        steps, result = self.forward.steps, self.forward.result_step
        own = {step.name for step in steps if step.name in INPUTS and step.op == "given"}
        own |= {name for name in self.wanted if name in self.inputs}
        return (*steps, *backward(steps, own, {result}))

    @property
    def results(self) -> tuple[str, ...]:
        """The gradients of what is wanted."""
        return tuple(f"d_{name}" for name in self.wanted)

    def tolerance(self, unit: float) -> float:
        """How far two right computations that round to `unit` may differ.

        A weight is off by t = 2 (D + 2) Σ|q||k|·scale + S + 8 units, relative; dP and δ are off by
        less than E + S + 2 units of what their terms add up to without signs. So every gradient is
        off by less than t + E + S + 2 units of what its own terms add up to without signs.
        """
        if unit > SMALLEST_HALF:
            return self.practical_tolerance(unit)
        size = self.sizes
        inner = max(array.shape[-1] for array in self.inputs.values() if array.ndim)
        terms = 2 * (inner + 2) * self.magnitude + 2 * size["S"] + size["E"] + 10
        return float(2 * unit * terms * self._largest)

    @cached_property
    def _largest(self) -> float:
        """The most that the terms of one gradient add up to without their signs."""
        shared = self.sizes["H"] // self.sizes["G"]
        up, weights, queries = (self._positive(n) for n in ("d_output", "weights", "queries"))
        keys, values = (self._positive(name).repeat(shared, 1) for name in ("keys", "values"))
        through = up @ values.swapaxes(-1, -2)
        through = weights * (through + (weights * through).sum(-1, keepdims=True))
        through = through * self._positive("scale") if "scale" in self.right else through
        turned = through.swapaxes(-1, -2) @ queries, weights.swapaxes(-1, -2) @ up
        terms = [through @ keys, *(shared * one for one in turned)]
        # Projections come before and after.
        packed = [self._positive(name) for name in self.inputs if name[:2] == "W_"]
        wider = max((max(one.shape) * float(one.max()) for one in packed), default=1.0)
        if {*self.wanted} & {*WEIGHTS}:  # each meets a number of every token
            sizes = self.sizes
            wider *= sizes["B"] * max(sizes["L"], sizes["S"])
            wider *= max(1.0, float(self._positive("embeddings").max()))
        return max(1.0, wider * wider * max(float(one.max(initial=0)) for one in terms))

    def _positive(self, name: str) -> Array:
        """The absolute values of a step, 0 for what is not finite."""
        return np.asarray(np.abs(np.nan_to_num(self.right[name], posinf=0, neginf=0)))

"""Declared steps as calls on whole arrays, for answers without intermediates.

The steps are the textbook's; products are those of `stored`, so for many rows bytes depend on BLAS,
on threads and on the batch. `evaluation` computes the same steps block by block, and keeps them.
Must not know any formula.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.stored import Matrix, product
from regard.textbook.operations import OPERATIONS
from regard.textbook.steps import Ref, Step

Values = dict[str, Array]
_Call = Callable[[Values], Array]


class Program:
    """Steps that lead from some to others, on arrays with leading axes, such as (B, L, M).

    `given` has the weights of the steps. `known` are the steps that a call is given.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        given: Mapping[str, Matrix],
        heads: Mapping[str, int],
        dtype: np.dtype[Any],
        *,
        known: Collection[str],
        wanted: Collection[str],
    ) -> None:
        self.steps = {step.name: step for step in steps}
        self.given, self.heads, self.dtype = given, heads, dtype
        needed = set(wanted)
        for step in reversed(steps):
            if step.name in needed and step.name not in known:
                needed |= {ref.step for ref in step.operands}
        needed -= {step.name for step in steps if step.op == "given"} | {*known}
        self.calls = [*self._calls(step for step in steps if step.name in needed)]

    def __call__(self, values: Values) -> Values:
        """Add the value of each step to those that are known."""
        for name, call in self.calls:
            values[name] = call(values)
        return values

    def _calls(self, steps: Iterable[Step]) -> Iterator[tuple[str, _Call]]:
        """Names and calls. Products of the same rows with several matrices are one product."""
        listed = [*steps]
        of_rows: dict[str, list[Step]] = {}
        for step in listed:
            if step.op == "dot":
                of_rows.setdefault(step.operands[0].step, []).append(step)
        for step in listed:
            if step.op != "dot":
                yield step.name, self._call(step)
                continue
            rows = step.operands[0].step
            together = of_rows[rows]
            matrices = [self._matrix(one) for one in together]
            whole = " ".join(one.name for one in together)
            if step is together[0]:
                yield whole, _product(rows, matrices, self.dtype)
            if len(together) > 1:
                before = matrices[: together.index(step)]
                start = sum(one.shape[1] for one in before)
                yield step.name, _columns(whole, start, start + matrices[len(before)].shape[1])

    def _call(self, step: Step) -> _Call:
        first = step.operands[0].step
        match step.op:
            case "row_dot":
                second = step.operands[1].step
                return lambda values: np.vecdot(values[first], values[second])
            case "sum":
                return lambda values: np.add.reduce(values[first], axis=-1)
            case "same":
                return lambda values: values[first]
            case "split":
                count = self.heads[step.axes[0]]
                return lambda values: _split(values[first], count)
            case "merge":
                return lambda values: _merged(values[first])
        return self._pointwise(step)

    def _matrix(self, step: Step) -> Matrix:
        """The weights of a product, (K, N)."""
        columns = step.operands[1]
        weight = self.given[columns.step]
        return weight if columns.index[0] == step.running else weight.T

    def _pointwise(self, step: Step) -> _Call:
        """An operation number by number; what is decided once is decided here, not in the call."""
        value: Any = OPERATIONS[step.op].value
        divisor = self.given.get(step.operands[1].step, np.zeros(1)) if step.op == "divide" else 0
        if np.all(np.asarray(divisor)):
            value = np.divide  # without a look for 0 / 0
        elif step.op == "add" and len(step.operands) == 2:
            value = np.add
        dtype, compute = self.dtype, value
        if not isinstance(value, np.ufunc):  # it may have computed in float64

            def compute(*operands: Array) -> Array:
                made: Array = value(*operands)
                return made if made.dtype == dtype else made.astype(dtype)

        takes = [self._operand(ref, step) for ref in step.operands]
        left = step.operands[0].step
        if len(takes) == 2 and left not in self.given and not _spread(step.operands[0], step):
            right, other = takes[1], step.operands[1].step
            if other in self.given:
                fixed = right({})
                return lambda values: compute(values[left], fixed)
            return lambda values: compute(values[left], right(values))
        return lambda values: compute(*(take(values) for take in takes))

    def _operand(self, ref: Ref, step: Step) -> _Call:
        """An operand with axes that broadcast against those of the step."""
        name, given, spread = ref.step, self.given.get(ref.step), _spread(ref, step)
        if given is not None:
            fixed = np.asarray(given, self.dtype)
            fixed = fixed[..., None] if spread else fixed if fixed.ndim else fixed[()]
            return lambda values: fixed
        if spread:
            return lambda values: values[name][..., None]
        return lambda values: values[name]


def _product(name: str, matrices: Sequence[Matrix], dtype: np.dtype[Any]) -> _Call:
    multiply = product(matrices, dtype)
    return lambda values: multiply(values[name])


def _columns(name: str, start: int, end: int) -> _Call:
    return lambda values: values[name][..., start:end]


def _spread(ref: Ref, step: Step) -> bool:
    """Whether an operand has one number for all columns of a row, where others have one each."""
    alone = step.axes[-1:] == ("L",) or not step.axes
    return bool(ref.index) and not alone and ref.index[-1] != step.index[-1]


def _split(packed: Array, count: int) -> Array:
    """(…, L, H·D) as (…, H, L, D)."""
    return packed.reshape(*packed.shape[:-1], count, -1).swapaxes(-2, -3)


def _merged(output: Array) -> Array:
    """(…, H, L, E) as (…, L, H·E)."""
    turned = output.swapaxes(-2, -3)
    return turned.reshape(*turned.shape[:-2], -1)

"""Whether a function that turns queries and keys counts its positions in the dtype of its input.

In bfloat16 there are no odd numbers above 256, so that tokens beyond get the angles of others. Must
not know mistakes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.convention import Convention, Look, Question
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.construction import twin_in_half

# Code that gives numbers the dtype of other numbers.
CASTS = re.compile(r"\.(to|astype|type_as)\(|dtype *= *\w+\.dtype|, *dtype\b")
# Code that is written for half precision, or counts in the dtype of other numbers.
OF_HALF = re.compile(
    r"b?float16|\bb?fp?16\b|\bhalf\(|any d?type|"
    r"arange\([^()\n]*(dtype *= *(?!\w+\.(float|int|long))|\)\.(to|astype|type_as)\()|"
    r"\bpos\w*\.(to|astype|type_as)\("
)
WHOLE = 256  # up to here bfloat16 has all numbers
MORE = 48
LOOKS: tuple[Look, Look] = ("", "half")
APART = 3.0  # how much larger errors are beyond, where rounding alone makes them smaller
LEAST = 0.02  # of the largest number


class InHalf:
    """A function that gets its numbers as bfloat16. `__wrapped__` is the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the function returns for numbers of half precision."""
        own = {name: _halved(one) for name, one in named.items()}
        with _halved_module(self.__wrapped__):
            return self.__wrapped__(*map(_halved, given), **own)


@contextlib.contextmanager
def _halved_module(function: Any) -> Iterator[None]:
    """Let a torch module have its weights in bfloat16 for the time of the block.

    One that was made here, by a class that asks for a dtype, is as if made with bfloat16. Buffers
    stay as they are made: nothing says that code which uses the module casts them.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    module = getattr(function, "__self__", function)
    if not (hasattr(module, "named_parameters") and hasattr(module, "state_dict")):
        yield
        return
    twin, before = twin_in_half(module), dict(vars(module))
    weights = {name: one.data for name, one in module.named_parameters()}
    try:
        if twin is not None:
            vars(module).update(vars(twin))
        for name, one in module.named_parameters():
            one.data = weights[name].bfloat16()
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)
        for name, one in module.named_parameters():
            one.data = weights[name]


def _halved(value: Any) -> Any:
    if hasattr(value, "bfloat16"):
        return value.bfloat16() if value.is_floating_point() else value
    if hasattr(value, "at") and value.dtype.kind == "f":
        import jax.numpy as jnp

        return value.astype(jnp.bfloat16)
    return value


def is_for_half(tested: FunctionUnderTest) -> bool:
    """Whether the code is written for half precision, or itself makes positions of it."""
    return any(OF_HALF.search(text) for _, text in tested.callee.blocks)


def counts_in_half(tested: FunctionUnderTest, convention: Convention, positions: str) -> bool:
    """Whether it turns queries and keys by positions that half precision rounds."""
    return positions[:6] == "rotary" and _rounds_positions(tested, convention)


def _rounds_positions(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether rows beyond position 256 are further from those of float32 than rows before it.

    All queries are the same, and all keys, so that their scores depend on positions alone; of a
    function of embeddings these are drawn.
    """
    callee = tested.callee
    code = "\n".join(text for _, text in callee.blocks)
    if callee.framework not in ("torch", "jax") or not CASTS.search(code) or convention.one_query:
        return False
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or probe.chunks or callee.steps or "context" in probe.inputs:
        return False
    rng, inputs = np.random.default_rng(11), dict(probe.inputs)
    for name in ("queries", "keys", "values", "embeddings"):
        if name not in inputs:
            continue
        axes = (*inputs[name].shape[:-2], WHOLE + MORE, inputs[name].shape[-1])
        same = name in ("queries", "keys")
        drawn = rng.normal(size=(1, 1, 1, axes[-1]) if same else axes)
        inputs[name] = _of_half(np.broadcast_to(drawn, axes))
    longer = replace(probe, inputs=inputs, name="positions beyond 256")
    own = convention if callee.weights else replace(convention, dtype="float32")
    try:
        given = arguments_for(callee, own, longer)
    except NotOfferedError:
        return False
    whole, half = (_rows(tested, convention, given, looks) for looks in LOOKS)
    if whole is None or half is None or whole.shape != half.shape:
        return False
    apart = np.abs(whole - half).max(1)
    near, far = apart[WHOLE // 4 : WHOLE].max(), apart[WHOLE:].max()
    return bool(far > APART * near and far > LEAST * np.abs(whole).max())


def _rows(
    tested: FunctionUnderTest, convention: Convention, given: dict[str, Any], looks: Look
) -> Array | None:
    """The output with one row for each token, or None."""
    question = Question("positions beyond 256", (given,), reading=tested.callee.number, looks=looks)
    result = tested.put(question)[-1]
    output = None if result.problem else result.arrays[convention.output_at or 0].numbers
    if output is None or output.ndim != len(convention.layout) or convention.turned_output:
        return None
    return np.moveaxis(output, convention.token_axis, 0).reshape(WHOLE + MORE, -1)


def _of_half(numbers: Array) -> Array:
    """Numbers that bfloat16 has."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32) & 0xFFFF0000
    return np.asarray(bits.view(np.float32).astype(float))

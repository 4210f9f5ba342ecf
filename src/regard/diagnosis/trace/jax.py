"""JAX run one operation after the other, so that every value has numbers; attention opened.

Owns how compilation is turned off while values are noted: NumPy computes what JAX would compile
for each operation and shape, a hundred times as long as it takes. Must not know what is looked for.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regard.diagnosis.process.jax_traces import OPERATIONS
from regard.diagnosis.trace.notes import Notes
from regard.diagnosis.trace.torch import line_within, module_of


@contextlib.contextmanager
def opened(notes: Notes, thing: Any) -> Iterator[None]:
    """While this lasts nothing is compiled, and JAX's attention tells its steps."""
    if "jax" not in sys.modules:
        yield
        return
    import jax

    own = jax.nn.dot_product_attention
    told = _told(own, notes)
    places: list[tuple[Any, str]] = [(jax.nn, "dot_product_attention")]
    module = module_of(thing)
    places += [(module, name) for name, one in vars(module).items() if one is own]
    try:
        for place, name in places:
            setattr(place, name, told)
        with jax.disable_jit(), by_numpy():
            yield
    finally:
        for place, name in places:
            setattr(place, name, own)


@contextlib.contextmanager
def by_numpy() -> Iterator[None]:
    """While this lasts NumPy computes single operations, where it knows them."""
    if "jax" not in sys.modules:
        yield
        return
    from jax.extend.core import primitives

    every = [one for name, one in vars(primitives).items() if name.endswith("_p")]
    known = [one for one in every if one.name in OPERATIONS]
    before = [one.impl for one in known]
    try:
        for one, own in zip(known, before, strict=True):
            one.impl = _computed(one, own)
        yield
    finally:
        for one, own in zip(known, before, strict=True):
            one.impl = own


def _computed(primitive: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    operation = OPERATIONS[primitive.name]

    def compute(*operands: Any, **parameters: Any) -> Any:
        import jax

        try:
            parts = [np.asarray(one) for one in operands]
            if any(one.dtype.kind not in "fiub" for one in parts):
                return own(*operands, **parameters)
            with np.errstate(all="ignore"):
                made = operation(parameters, *parts)
            avals = [jax.typeof(one) for one in operands]
            wanted, _ = primitive.abstract_eval(*avals, **parameters)
        except Exception:  # what is not known here is JAX's own
            return own(*operands, **parameters)
        if primitive.multiple_results:
            pairs = zip(made, wanted, strict=True)
            return [jax.device_put(one.astype(aval.dtype)) for one, aval in pairs]
        made = np.asarray(made)
        if made.shape != wanted.shape:
            return own(*operands, **parameters)
        return jax.device_put(made.astype(wanted.dtype, copy=False))

    return compute


def _told(function: Callable[..., Any], notes: Notes) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*own: Any, **options: Any) -> Any:
        result = function(*own, **options)
        line = line_within(notes.code.file) if notes.listening else 0
        if line:
            with contextlib.suppress(Exception):  # it has more options than are opened here
                notes.within(line, "attention", result, _attention(notes, line, *own, **options))
        return result

    return told


def _attention(
    notes: Notes,
    line: int,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """Tell the steps of JAX's attention, of (B, T, N, H); what its result is made of."""
    import jax
    import jax.numpy as jnp

    def told(name: str, made: Any, *of: Any) -> Any:
        notes.within(line, name, made, of)
        return made

    shared = query.shape[-2] // key.shape[-2]
    if shared > 1:
        key, value = (told("repeated", jnp.repeat(one, shared, -2), one) for one in (key, value))
    scores = told("scores", jnp.einsum("...tnh,...snh->...nts", query, key), query, key)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    last = told("scaled", scores * factor, scores)
    if bias is not None:
        last = told("biased", last + bias, last, bias)
    if is_causal:
        own = jnp.tril(jnp.ones(last.shape[-2:], bool))
        mask = own if mask is None else own & mask
    if mask is not None:
        last = told("masked", jnp.where(mask, last, -jnp.inf), last, mask)
    return told("weights", jax.nn.softmax(last, -1), last), value

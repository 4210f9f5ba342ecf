"""One question to an attention: its arguments under one convention, and its answer.

Whatever happens in a call is said in the answer. Must not know mistakes, nor in which process the
function is.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import (
    RANKS,
    ROWS_FIRST,
    Answer,
    Ask,
    Convention,
    Part,
    Question,
    Returned,
)
from regard.diagnosis.probe import Probe
from regard.diagnosis.reading import read_result
from regard.diagnosis.signature import Subject
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def call(subject: Subject, way: Convention, probe: Probe, ask: Ask) -> Answer:
    """One question and its answer. Whatever goes wrong in it comes back as an answer."""
    try:
        arguments = _arguments(subject, way, probe)
    except _CannotSay as error:
        return Answer(problem=str(error), kind="refused")
    if probe.chunks:
        cache = subject.roles["cache"].name
        question = Question(probe.name, _in_chunks(subject, way, probe, arguments), cache)
    else:
        question = Question(probe.name, (arguments,))
    begin = time.perf_counter()
    returned = _put_together(way, ask(question))
    return read_result(returned, way, probe, time.perf_counter() - begin)


class _CannotSay(Exception):
    """The function has no parameter for what a probe needs."""


def _arguments(subject: Subject, way: Convention, probe: Probe) -> dict[str, Any]:
    """The arguments by the names of the parameters, as NumPy arrays."""
    roles = subject.roles
    by_role: dict[str, Any] = {}
    dtype = np.dtype(way.dtype)
    if "queries" in probe.inputs:
        q, k, v = (probe.inputs[name].astype(dtype) for name in ("queries", "keys", "values"))
        by_role |= {
            "query": _laid_out(q, way.layout),
            "key": _laid_out(k, "LD" if way.layout == "D" else way.layout),
            "value": _laid_out(v, "LD" if way.layout == "D" else way.layout),
            "x": _laid_out(q, way.layout),
        }
    else:
        by_role |= _projected_arguments(subject, way, probe)
    if probe.keep is not None:
        role = mask_role(subject, keys=probe.ability == "key mask")
        if role is None:
            raise _CannotSay("it takes no mask")
        by_role[role] = _mask(probe, way, dtype)
    if probe.causal and "causal" not in roles and not way.causal_always and not probe.chunks:
        raise _CannotSay("it has no causal flag")
    if "causal" in roles:
        by_role["causal"] = probe.causal
    if probe.window is not None:
        if "window" not in roles:
            raise _CannotSay("it takes no window")
        by_role["window"] = probe.window - way.window_extra
    if probe.chunks:
        if "cache" not in roles:
            raise _CannotSay("it takes no cache")
        by_role["cache"] = None
    if probe.scale is not None:
        if "scale" not in roles:
            raise _CannotSay("it takes no scale")
        by_role["scale"] = 1 / probe.scale if way.scale_divides else probe.scale
    size = probe.sizes
    by_role |= {"heads": size["H"], "width": size["D"]}
    if "grouped" in roles:
        by_role["grouped"] = size["G"] < size["H"]
    arguments: dict[str, Any] = {}
    for parameter in subject.parameters:
        if parameter.role == "no":  # dropout=None stays None: it may be meant to be a layer
            if parameter.required or parameter.default is not None:
                arguments[parameter.name] = False if parameter.default is True else 0.0
        elif parameter.role == "yes":
            if parameter.required:
                arguments[parameter.name] = True
        elif parameter.role in by_role:
            arguments[parameter.name] = by_role[parameter.role]
        elif parameter.required:
            wide = parameter.role == "window"  # wider than any probe
            arguments[parameter.name] = 10**6 if wide else None
    return arguments


def mask_role(subject: Subject, *, keys: bool = False) -> str | None:
    """The role of the parameter that takes a mask: of padded keys, or of any cells."""
    order: tuple[str, ...] = ("mask", "key_mask", "keep", "hide", "bias")
    order = ("key_mask", *order) if keys else order
    return next((role for role in order if role in subject.roles), None)


def _laid_out(array: Array, layout: str) -> Array:
    """(B, H, L, D) as the function wants it, a copy of its own."""
    whole = array.swapaxes(1, 2) if layout in ROWS_FIRST else array
    return np.array(whole[(0,) * (4 - RANKS[layout])], order="C")


def _projected_arguments(subject: Subject, way: Convention, probe: Probe) -> dict[str, Any]:
    dtype = np.dtype(way.dtype)
    x = probe.inputs["embeddings"].astype(dtype)
    context = probe.inputs.get("context", probe.inputs["embeddings"]).astype(dtype)
    if RANKS[way.layout] == 2:
        x, context = x[0], context[0]
    elif way.layout == "LBM":
        x, context = (np.array(array.swapaxes(0, 1), order="C") for array in (x, context))
    by_role: dict[str, Any] = {"x": x, "query": x}
    if subject.kind == "packed":
        width = probe.inputs["W_k"].shape[1]
        by_role |= {"key": context[..., :width].copy(), "value": context[..., width:].copy()}
        return by_role
    by_role |= {"key": context, "value": context}
    if "context" in probe.inputs:
        if not {"context", "key"} & subject.roles.keys():
            raise _CannotSay("it takes no second array of embeddings")
        by_role["context"] = context
    if not subject.weights:
        for name, array in probe.inputs.items():
            if name[:2] in ("W_", "b_"):
                turned = way.turned and array.ndim == 2
                by_role[name] = np.array(array.T if turned else array, dtype, order="C")
    return by_role


def _mask(probe: Probe, way: Convention, dtype: np.dtype[Any]) -> Array:
    size, keep = probe.sizes, probe.keep
    assert keep is not None
    shapes = {
        "full": (size["B"], size["H"], size["L"], size["S"]),
        "cells": (size["L"], size["S"]),
        "batch cells": (size["B"], size["L"], size["S"]),
        "batch keys": (size["B"], size["S"]),
        "batch 1 1 keys": (size["B"], 1, 1, size["S"]),
        "keys": (size["S"],),
    }
    shape = shapes[way.mask_shape]
    if keep.ndim == 4 and size["B"] > 1 and way.mask_shape in ("keys", "cells"):
        raise _CannotSay("one mask for all texts")
    if way.mask_shape in ("keys", "batch keys"):
        if keep.ndim == 2:
            raise _CannotSay("its mask is one of keys")
        kept = np.broadcast_to(keep, (size["B"], 1, 1, size["S"])).reshape(size["B"], size["S"])
        kept = kept if way.mask_shape == "batch keys" else kept[0]
    elif way.mask_shape == "batch 1 1 keys":
        if keep.ndim == 2:
            raise _CannotSay("its mask is one of keys")
        kept = np.broadcast_to(keep, shape)
    else:
        whole = np.broadcast_to(keep, shapes["full"])
        if way.mask_shape == "cells":
            kept = whole[0, 0]
        elif way.mask_shape == "batch cells":
            kept = whole[:, 0]
        else:
            kept = {1: whole[0, 0, 0], 2: whole[0, 0], 3: whole[0]}.get(RANKS[way.layout], whole)
            if "queries" not in probe.inputs and RANKS[way.layout] == 3:
                kept = whole[:, 0]
    kept = np.array(kept, bool, order="C")
    match way.mask:
        case "keep":
            return kept
        case "hide":
            return ~kept
        case "keep01":
            return kept.astype(dtype)
        case "hide01":
            return (~kept).astype(dtype)
    return np.where(kept, 0, -np.inf).astype(dtype)


def _in_chunks(
    subject: Subject, way: Convention, probe: Probe, arguments: dict[str, Any]
) -> tuple[dict[str, Any], ...]:
    """The arguments of a call for some tokens at a time."""
    parts = []
    start = 0
    for length in probe.chunks:
        part = dict(arguments)
        for role in ("query", "key", "value", "x"):
            if role in subject.roles and (name := subject.roles[role].name) in part:
                rows = range(start, start + length)
                part[name] = np.take(part[name], rows, axis=_token_axis(way))
        parts.append(part)
        start += length
    return tuple(parts)


def _token_axis(way: Convention) -> int:
    return -3 if way.layout in ROWS_FIRST else -2


def _put_together(way: Convention, several: list[Returned]) -> Returned:
    """The outputs of all calls with a cache as one, or the first problem among them."""
    last = several[-1]
    if last.problem or len(several) == 1:
        return last
    outputs = [one.parts[0] for one in several]
    try:
        if any(part.numbers is None for part in outputs):
            raise ValueError
        numbers = [part.numbers for part in outputs if part.numbers is not None]
        whole = np.concatenate(numbers, axis=_token_axis(way))
    except ValueError:
        shapes = safe_text(", ".join(str(part.shape) for part in outputs), 200)
        return Returned(problem=f"with a cache it returned shapes {shapes}", kind="shape")
    return replace(last, parts=(Part(whole.shape, last.parts[0].dtype, whole),))

"""One call of somebody's attention: its arguments, its time limit, and what goes wrong in it.

Whatever happens in a call is said in the answer; nothing ends the
diagnosis. Must not know mistakes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import RANKS, ROWS_FIRST, Answer, Convention
from regard.diagnosis.probes import Probe
from regard.diagnosis.reading import as_numpy, read_result
from regard.diagnosis.signature import Subject
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class TookTooLong(BaseException):
    """Raised inside the function when its time is up; no `except Exception` of its own stops it."""


def call(subject: Subject, way: Convention, probe: Probe, limit: float = 10.0) -> Answer:
    """One call. Whatever happens in it comes back as an answer."""
    try:
        arguments = _arguments(subject, way, probe)
    except _CannotSay as error:
        return Answer(problem=str(error), kind="refused")
    if probe.chunks:
        return _call_with_cache(subject, way, probe, arguments, limit)
    result, answer = _guarded(subject, arguments, limit)
    return answer if answer.problem else read_result(result, way, probe, answer)


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


def _guarded(subject: Subject, arguments: Mapping[str, Any], limit: float) -> tuple[Any, Answer]:
    """The call itself: caught, timed, with its printing and its changes to the inputs noted."""
    handed = {name: _handed(value, subject.framework) for name, value in arguments.items()}
    printed = io.StringIO()
    begin = time.perf_counter()
    result, problem, kind = None, "", ""
    positional, keyword = [], {}
    for parameter in subject.parameters:
        if parameter.name in handed:
            if parameter.keyword:
                keyword[parameter.name] = handed[parameter.name]
            else:
                positional.append(handed[parameter.name])
    try:
        with (
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _quietly(subject.framework),
            _time_limit(limit),
        ):
            warnings.simplefilter("ignore")
            result = subject.function(*positional, **keyword)
        if inspect.iscoroutine(result):
            result.close()
            problem, kind = "it is asynchronous: it returned a coroutine", "type"
    except TookTooLong:
        problem, kind = f"it did not come back within {limit:g} s", "hung"
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:
        said = safe_text(str(error).strip().split("\n")[0] if str(error).strip() else "", 120)
        problem, kind = f"{type(error).__name__}: {said}".rstrip(": "), "raised"
    seconds = time.perf_counter() - begin
    changed = tuple(
        name
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and not _same(value, as_numpy(handed[name]))
    )
    text = safe_text(printed.getvalue().strip(), 200)
    answer = Answer(problem=problem, kind=kind, printed=text, changed=changed, seconds=seconds)
    return result, answer


def _handed(value: Any, framework: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if framework == "torch":
        import torch

        return torch.from_numpy(value.copy())
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(value)
    return value.copy()


def _same(first: Array, second: Any) -> bool:
    if first.shape != second.shape:
        return False
    if first.dtype == bool or second.dtype == bool:
        return bool((first == second).all())
    unit = np.finfo(np.float32).eps if second.dtype == np.float32 else 0.0
    with np.errstate(all="ignore"):
        near = (first == second) | (np.abs(first - second) <= unit * np.abs(first))
    return bool((near | (np.isnan(first) & np.isnan(second))).all())


@contextlib.contextmanager
def _quietly(framework: str) -> Iterator[None]:
    """Without gradients, and on one thread: waking others takes longer than a probe."""
    if framework != "torch":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code that takes longer; only the main thread of a Unix can be."""
    usable = hasattr(signal, "setitimer")
    if not usable or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _call_with_cache(
    subject: Subject, way: Convention, probe: Probe, arguments: dict[str, Any], limit: float
) -> Answer:
    """Some tokens at a time; what comes back beside the output is handed in again."""
    roles = subject.roles
    pieces = []
    cache: Any = None
    start = 0
    axis = -3 if way.layout in ROWS_FIRST else -2
    answer = Answer()
    for length in probe.chunks:
        part = dict(arguments)
        for role in ("query", "key", "value", "x"):
            if role in roles and roles[role].name in part:
                whole = part[roles[role].name]
                part[roles[role].name] = np.take(whole, range(start, start + length), axis=axis)
        part[roles["cache"].name] = cache
        result, answer = _guarded(subject, part, limit)
        if answer.problem:
            return answer
        if not isinstance(result, tuple | list) or len(result) < 2:
            return Answer(problem="it takes a cache but returns none", kind="type")
        output, cache = result[0], result[1] if len(result) == 2 else result[1:]
        pieces.append(as_numpy(output))
        start += length
    try:
        whole = np.concatenate(pieces, axis=axis)
    except ValueError:
        shapes = ", ".join(str(piece.shape) for piece in pieces)
        return Answer(problem=f"with a cache it returned shapes {shapes}", kind="shape")
    return read_result(whole, way, probe, answer)

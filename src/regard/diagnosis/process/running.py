"""Calls the function in this process; catches its exceptions, output, and calls without end.

Owns the limits on one call, and how much of a result is read. Must not know probes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import UPSTREAM, CallResult, Question, ReturnedArray, agrees
from regard.diagnosis.forms.caches import Remembering
from regard.diagnosis.forms.differentiation import (
    NoGradientError,
    Pair,
    by_jax,
    by_torch,
    gradient_of,
)
from regard.diagnosis.forms.given_arrays import with_value_rows
from regard.diagnosis.forms.norms import doubled_norms
from regard.diagnosis.process.changed_code import ChangedCode
from regard.diagnosis.process.dropout import without_dropout
from regard.diagnosis.process.fused_calls import noting_fused
from regard.diagnosis.process.half_positions import InHalf
from regard.diagnosis.process.integers import steps_of
from regard.diagnosis.process.jax_traces import Traces, Untraceable
from regard.diagnosis.process.sublayers import outputs_of_parts
from regard.diagnosis.reading.signature import Callee
from regard.errors import safe_text

# How much of a result is read: the output of a probe has some kilobytes.
MAX_ARRAYS = 16
MAX_BYTES = 2**24
CHANGED_SECONDS = 1.0  # that a call of changed code may take, which may be without end
# Characters that one call may print, and how many of them are kept.
MAX_PRINTED = 2**22
KEPT_PRINTED = 200


class _OneAtATime:
    """What is redirected belongs to the whole process, so one thread at a time calls a function."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):  # a child has no thread that would release it
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


one_at_a_time = _OneAtATime()


class LimitExceeded(BaseException):
    """Raised inside the function, which cannot catch it with `except Exception`."""


Reading = tuple[Callable[..., Any], Callee]  # what to call, and what is known of it


def answer_question(
    readings: Sequence[Reading],
    question: Question,
    limit: float,
    traces: dict[int, Traces],
    code: ChangedCode,
) -> list[CallResult]:
    """All calls of one question, up to the first that has a problem.

    `traces` are those of the readings whose functions are of JAX, by their numbers. A question may
    change the `code` that is called.
    """
    if question.change is not None:
        own = traces.get(question.reading, Traces())
        changed = {question.reading: Traces(checked=True)} if own.usable and own.known else {}
        with one_at_a_time.lock, code.with_change(question.change):
            return _answers(readings, question, min(limit, CHANGED_SECONDS), changed)
    if question.looks == "doubled":
        with one_at_a_time.lock, doubled_norms(readings[question.reading][0]):
            return _answers(readings, question, limit, {})
    if question.looks == "defaults":
        readings = [(getattr(own, "__wrapped__", own), callee) for own, callee in readings]
        with one_at_a_time.lock, code.with_first_defaults():
            return _answers(readings, question, limit, {})
    if question.looks == "half":
        halved = [(InHalf(own), callee) for own, callee in readings]
        untraced = {question.reading: Traces(usable=False)}  # NumPy has no such numbers
        with one_at_a_time.lock:
            return _answers(halved, question, limit, untraced)
    if question.looks == "values":
        with one_at_a_time.lock, with_value_rows(readings[question.reading][0]):
            return _answers(readings, question, limit, {})
    if question.looks == "parts":
        silenced = [(partial(outputs_of_parts, own), callee) for own, callee in readings]
        return _answers(silenced, question, limit, {})
    if question.looks == "tables":
        return [_tables(readings[question.reading][0])]
    if question.looks == "lines":
        lines = np.array(sorted(code.lines.found), float)
        return [CallResult((ReturnedArray(lines.shape, "float64", lines),))]
    if question.looks:
        seen = _inside(readings, question, limit, code)
        return [seen] if seen.problem else [*[seen] * len(question.calls)]
    with one_at_a_time.lock, code.lines.watched():
        return _answers(readings, question, limit, traces)


def _inside(
    readings: Sequence[Reading], question: Question, limit: float, code: ChangedCode
) -> CallResult:
    """What the values of the code show of the calls of one question, as if it returned that."""
    of_integers = question.looks == "integers"
    library = readings[question.reading][1].framework
    untraced = {question.reading: Traces(usable=False)}
    own = replace(question, calls=question.calls[:-1] if of_integers else question.calls)
    lock = one_at_a_time.lock
    with lock, code.noted() as notes, noting_fused(notes, library), _without_jit(library):
        result = _answers(readings, own, limit, untraced)[-1]
    if result.problem:
        return result
    if of_integers:
        integers = notes.integers()
        arrays = (array for array in question.calls[-1].values())
        found = [steps_of(array, integers) for array in arrays]
        return CallResult(tuple(ReturnedArray(one.shape, "float64", one) for one in found))
    found = notes.softmaxes()
    if not found:
        return CallResult(problem="no softmax along the last axis was seen", kind="nothing")
    if question.looks == "factors":
        factors = (notes.factor_of(one) for one in found)
        found = [np.array([one]) for one in factors if one is not None]
    if not found:
        return CallResult(problem="no product of queries and keys was seen", kind="nothing")
    return CallResult(tuple(ReturnedArray(one.shape, "float64", one) for one in found))


def _tables(function: Any) -> CallResult:
    """The arrays of numbers with two axes that an object or its parts have, as if it returned them.

    Of a torch module these are its parameters and buffers.
    """
    own, given = function, list[Any]()
    while hasattr(own, "__wrapped__"):
        given += getattr(own, "arrays", {}).values()
        own = own.__wrapped__
    own = getattr(own, "__self__", own)
    if hasattr(own, "named_parameters"):
        every = [*own.parameters(), *own.buffers()]
    else:
        parts = [own, *getattr(own, "__dict__", {}).values()]
        every = [one for part in parts for one in getattr(part, "__dict__", {}).values()]
    found = [as_numpy(one) for one in (*given, *every) if getattr(one, "ndim", 0) == 2]
    real = [one.astype(float) for one in found if one.dtype.kind in "fi"][:MAX_ARRAYS]
    shown = tuple(ReturnedArray(one.shape, "float64", one) for one in real)
    return CallResult(shown) if shown else CallResult(problem="it has none", kind="nothing")


@contextlib.contextmanager
def _without_jit(framework: str) -> Iterator[None]:
    if framework != "jax":
        yield
        return
    import jax

    with jax.disable_jit():
        yield


def _answers(
    readings: Sequence[Reading], question: Question, limit: float, traces: dict[int, Traces]
) -> list[CallResult]:
    function, callee = readings[question.reading]
    results = []
    cache: Any = None
    if isinstance(function, Remembering):
        function.begin()
    for call in question.calls:
        arguments = {**call, question.cache: cache} if question.cache else call
        own = None
        if callee.framework == "jax" and (
            not isinstance(function, Remembering) or function.is_pure
        ):
            own = traces.setdefault(question.reading, Traces())
        returned, result = _guarded(function, callee, arguments, question, limit, own)
        if question.cache and not result.problem:
            if isinstance(returned, tuple | list) and len(returned) > 1:
                cache = returned[1] if len(returned) == 2 else returned[1:]
            elif isinstance(function, Remembering) and function.in_place:
                cache = function.given
            else:
                result = CallResult(problem="it takes a cache but returns none", kind="type")
        results.append(result)
        if result.problem:
            break
    return results


def _guarded(
    function: Callable[..., Any],
    callee: Callee,
    arguments: Mapping[str, Any],
    question: Question,
    limit: float,
    traces: Traces | None,
) -> tuple[Any, CallResult]:
    """What one call returned, and what is known of that."""
    passed = {name: _converted(value, callee.framework) for name, value in arguments.items()}
    known = [parameter for parameter in callee.parameters if parameter.name in passed]
    for one in known:
        if one.role == "layer":
            passed[one.name] = layer_of(arguments[one.name])
            without_sinks = np.full(passed[one.name].num_heads, -np.inf, np.float32)
            passed[one.name].sinks = _converted(without_sinks, callee.framework)

    def call(own: Mapping[str, Any], made: Callable[..., Any] = function) -> Any:
        positional = [own[parameter.name] for parameter in known if not parameter.keyword]
        return made(*positional, **{one.name: own[one.name] for one in known if one.keyword})

    def result_of(own: Mapping[str, Any]) -> Any:
        if not question.wrt:
            return call(own)
        if isinstance(function, Pair):
            return call(own, partial(function.gradients, own[UPSTREAM]))
        derive = by_torch if callee.framework == "torch" else by_jax
        return derive(call, own, question.wrt, own[UPSTREAM], question.place)

    printed = Printed()
    returned, result, dropped = None, CallResult(), list[str]()
    try:
        with (
            one_at_a_time.lock,
            warnings.catch_warnings(),
            np.errstate(all="ignore"),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _without_gradients(callee.framework),
            without_dropout(callee.framework) as dropped,
            _time_limit(limit),
        ):
            warnings.simplefilter("ignore")
            try:
                try:
                    if traces is None:
                        raise Untraceable
                    name = (question.name, question.wrt, question.place)
                    returned = traces.run(name, result_of, arguments)
                except Untraceable:
                    returned = result_of(passed)
                # What is returned may run code of its own.
                result = _read(_side_by_side(returned) if callee.is_backward else returned)
            except (LimitExceeded, KeyboardInterrupt):
                raise
            except NoGradientError as error:
                result = CallResult(problem=str(error), kind="detached")
            except BaseException as error:
                result = CallResult(problem=describe_error(error), kind="raised")
    except LimitExceeded as error:
        result = CallResult(problem=error.args[1], kind=error.args[0])
    changed = tuple(
        name
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and not _same(value, as_numpy(passed[name]))
    )
    return returned, replace(result, printed=printed.kept(), changed=changed, dropped=bool(dropped))


def layer_of(sizes: str) -> SimpleNamespace:
    """The settings that a function reads from its layer, not trained: of H, G and D."""
    heads, groups, width = map(int, sizes.split())
    return SimpleNamespace(
        training=False,
        num_heads=heads,
        num_key_value_groups=heads // max(groups, 1),
        head_dim=width,
        scaling=width**-0.5,
        is_causal=False,
        attention_dropout=0.0,
    )


def describe_error(error: BaseException) -> str:
    """An exception in one short line, whatever its own `__str__` does."""
    try:
        text = str(error).strip().split("\n")[0]
    except BaseException:
        text = ""
    return safe_text(f"{type(error).__name__}: {text}".rstrip(": "), 160)


class Printed(io.StringIO):
    """Keeps the beginning of what is printed, and ends a call that prints too much."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def write(self, text: str) -> int:
        if self.length < KEPT_PRINTED:
            super().write(text[:KEPT_PRINTED])
        self.length += len(text)
        if self.length > MAX_PRINTED:
            text = f"it printed more than {MAX_PRINTED} characters in one call"
            raise LimitExceeded("prints", text)
        return len(text)

    def kept(self) -> str:
        """The beginning on one line, even if the function has closed this."""
        return "" if self.closed else safe_text(self.getvalue().strip(), KEPT_PRINTED)


def _converted(value: Any, framework: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if framework == "torch":
        import torch

        return torch.from_numpy(value.copy())
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(value)
    return value.copy()


def _same(first: Array, second: Array) -> bool:
    if first.tobytes() == second.tobytes():
        return True
    unit = np.finfo(np.float32).eps if second.dtype == np.float32 else 0.0
    first, second = first.astype(float), second.astype(float)
    return agrees(second, first, unit * np.abs(np.nan_to_num(first)))


@contextlib.contextmanager
def _without_gradients(framework: str) -> Iterator[None]:
    """Switch off torch's gradients and threads: starting threads takes longer than a probe."""
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
    """Interrupt Python code that takes longer: in the main thread on Unix, else not at all."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise LimitExceeded("hung", f"it did not return within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- what it returned ----------------------------------------------------------------------------


def _read(result: Any) -> CallResult:
    if inspect.iscoroutine(result):
        result.close()
        return CallResult(problem="it is asynchronous: it returned a coroutine", kind="type")
    if result is None:
        return CallResult(problem="it returned nothing (None)", kind="nothing")
    room, found, names = MAX_BYTES, list[ReturnedArray](), list[str]()
    if isinstance(result, Mapping):
        values = list(result.values())
        keys = itertools.islice(result, len(values))
        named_values = zip(keys, values, strict=False)
        names = [safe_text(name, 80) for name, one in named_values if hasattr(one, "shape")]
    for array, dtype in itertools.islice(_arrays(result), MAX_ARRAYS):
        numbers = array.astype(np.float64) if array.size * 8 <= room else None
        room -= 0 if numbers is None else numbers.nbytes
        found.append(ReturnedArray(array.shape, safe_text(dtype, 40), numbers))
    if found:
        named = tuple(names) if len(names) == len(found) else ()
        return CallResult(tuple(found), named, isinstance(result, list))
    if hasattr(result, "dtype"):
        text = f"it returned an array of {safe_text(result.dtype, 40)}, not of real numbers"
    else:
        text = f"it returned {safe_text(type(result).__name__, 40)}, which holds no array"
    return CallResult(problem=text, kind="type")


def _side_by_side(result: Any) -> Any:
    """The arrays of tuples in a tuple: out, (dx, dw)."""
    if not isinstance(result, tuple):
        return result
    return tuple(itertools.chain(*(one if isinstance(one, tuple) else (one,) for one in result)))


def _arrays(result: Any) -> Iterator[tuple[Array, str]]:
    """Every array of numbers in a result, and the name of its dtype."""
    if is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list) and result and isinstance(result[0], list | float | int):
        with contextlib.suppress(ValueError, TypeError):
            yield np.asarray(result, float), "float64"
        return
    several = result if isinstance(result, tuple | list) else [result]
    for one in several:
        if isinstance(one, Mapping) and all(gradient_of(f"d_{name}") for name in one):
            yield from _arrays(one)
        elif hasattr(one, "shape") or isinstance(one, list):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                array = as_numpy(one)
                name = str(getattr(one, "dtype", array.dtype)).removeprefix("torch.")
                if name == "bfloat16":
                    array = array.astype(np.float32)
                if array.dtype.kind in "fiu":
                    yield array, name


def as_numpy(value: Any) -> Array:
    """An array of any framework as a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)

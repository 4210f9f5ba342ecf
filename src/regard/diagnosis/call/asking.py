"""One call of a function with its adapter: what it read, and what it returned.

Owns the limits of a call and the arrays of each library. What is asked and what is answered is
small data, so that the call may be made in another process. Must not know the textbook.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.given import FIELDS, GRADIENTS, Given
from regard.diagnosis.probe import UNITS
from regard.diagnosis.process.jax_traces import Traces, Untraceable
from regard.diagnosis.process.running import (
    LimitExceeded,
    Printed,
    as_numpy,
    describe_error,
    one_at_a_time,
)
from regard.diagnosis.view import TaskView, changed_in, field_of, reads_of

CPU_SECONDS = 5.0  # that one call may take
MOST_PARTS = 8  # of what a function returns


@dataclass(frozen=True)
class Answer:
    """What one call read and returned: its "output", or gradients by fields; or why not."""

    reads: frozenset[str] = frozenset()
    arrays: Mapping[str, Array] = field(default_factory=dict)
    dtype: str = "float64"  # the coarsest of them
    problem: str = ""
    of_adapter: int = 0  # the line of the adapter that raised an error itself
    changed: tuple[str, ...] = ()  # the fields whose arrays the function changed
    printed: str = ""
    ended: bool = False  # whether a limit ended the call


Ask = Callable[[Given], Answer]


def asking(function: Any, adapter: Adapter, library: str, *, checked: bool = False) -> Ask:
    """What answers for a function that is called in this process.

    What JAX traces is compared with JAX's own result once, if it is not `checked`.
    """
    return partial(_ask, function, adapter, library, Traces(checked=checked))


def _ask(function: Any, adapter: Adapter, library: str, traces: Traces, given: Given) -> Answer:
    view, reads = TaskView(given, CONVERT[library]), set[str]()

    def call() -> tuple[dict[str, Array], str]:
        if library == "jax":
            return _read(_traced(function, adapter, given, traces, reads))
        depth = sys.getrecursionlimit()
        try:
            found = adapter.call(function, view)
        finally:
            sys.setrecursionlimit(depth)
        return _read(found)

    result = guarded(call, library)
    arrays, dtype = ({}, "float64") if result.problem else result.value
    return Answer(
        reads_of(view) or frozenset(reads or given.fields),
        arrays,
        dtype,
        result.problem,
        _line_of(adapter, result.error),
        () if result.problem else changed_in(view, as_numpy),
        result.printed,
        result.ended,
    )


def running(
    function: Any, adapter: Adapter, library: str, given: Given
) -> Callable[[], dict[str, Array]]:
    """What makes the same call without any guard: results by name, errors as they come.

    It is run where `guarded` is around it.
    """

    def run() -> dict[str, Array]:
        return _read(adapter.call(function, TaskView(given, CONVERT[library])))[0]

    return run


@dataclass(frozen=True, eq=False)
class Guarded:
    """What one call of foreign code returned, or the error that ended it."""

    value: Any = None
    problem: str = ""
    error: BaseException | None = None
    ended: bool = False
    printed: str = ""


def guarded(call: Callable[[], Any], library: str, seconds: float = 0.0) -> Guarded:
    """The result of foreign code, that may print, raise, or compute without end.

    It may compute for so many seconds, if not for the usual ones.
    """
    printed, found = Printed(), Guarded()
    with (
        one_at_a_time.lock,
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        _as_usual(library),
    ):
        warnings.simplefilter("ignore")
        try:
            with _cpu_limit(seconds or CPU_SECONDS):
                found = Guarded(call())
        except LimitExceeded as error:
            found = Guarded(problem=error.args[1], error=error, ended=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found = Guarded(problem=describe_error(error), error=error)
    return replace(found, printed=printed.kept())


def unfit(given: Given, answer: Answer) -> str:
    """Why an answer has not the form that is expected, or ""."""
    if answer.of_adapter:
        return f"line {answer.of_adapter} of the adapter: {answer.problem}"
    if answer.problem:
        return answer.problem
    for name, array in answer.arrays.items():
        if name != "output" and name not in GRADIENTS:
            return f"it returned a gradient named {name!r}; names are {', '.join(GRADIENTS)}"
        shape = given.result_shape if name == "output" else given.array(name).shape
        if array.shape != shape:
            return f"{name} has shape {array.shape}, but {shape} is expected"
    return "" if answer.arrays else "it returned no array"


def shapes_of(function: Any, adapter: Adapter, library: str, given: Given) -> tuple[list[str], str]:
    """Where arrays are in what an adapter returns, as code such as "[0]"; or why it fails."""

    def call() -> list[str]:
        view = TaskView(given, CONVERT[library])
        if library == "jax":  # shapes alone take no compiler
            import jax

            with contextlib.suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                return _places(jax.eval_shape(lambda: adapter.call(function, view)))
        return _places(adapter.call(function, view))

    found = guarded(call, library)
    return found.value or [], found.problem


def _places(value: Any, path: str = "") -> list[str]:
    if getattr(value, "ndim", 0):
        return [path]
    if isinstance(value, Mapping):
        parts = [(f"[{name!r}]", one) for name, one in value.items() if type(name) is str]
    elif isinstance(value, tuple | list) and len(value) <= MOST_PARTS:
        parts = [(f"[{place}]", one) for place, one in enumerate(value)]
    elif is_dataclass(value):
        parts = [(f".{one.name}", getattr(value, one.name)) for one in fields(value)]
    else:
        return []
    return [place for own, one in parts for place in _places(one, path + own)]


def _traced(function: Any, adapter: Adapter, given: Given, traces: Traces, reads: set[str]) -> Any:
    """What a function of JAX returns, without compiling it for each problem."""

    def call(own: Mapping[str, Any]) -> Any:
        view = TaskView(given, _jax, own)
        try:
            return adapter.call(function, view)
        finally:
            reads.update(reads_of(view))

    own = {name: field_of(given, name) for name in FIELDS if name in given.fields}
    arrays = {name: one for name, one in own.items() if _is_array(one)}
    try:
        return traces.run((given.asks, given.sizes), call, arrays)
    except Untraceable:
        return call({})


def _is_array(value: Any) -> bool:
    parts = value if type(value) is tuple else (value,)
    return all(isinstance(one, np.ndarray) for one in parts)


def _read(result: Any) -> tuple[dict[str, Array], str]:
    """The arrays of a result, in float64, and the name of their coarsest dtype."""
    named = dict(result) if isinstance(result, Mapping) else {"output": result}
    arrays, names = {}, []
    for name, one in named.items():
        array = np.asarray(None)
        with contextlib.suppress(ValueError):  # lists of unequal or endless depth
            array = as_numpy(one)
        if array.dtype.kind not in "fiub":
            kind = type(one).__name__ if array.dtype.kind == "O" else f"an array of {array.dtype}"
            raise TypeError(f"the adapter returned {kind}; return an array, or a dict of gradients")
        arrays[str(name)] = array.astype(np.float64)
        names.append(str(getattr(one, "dtype", array.dtype)).removeprefix("torch."))
    return arrays, max(names, key=lambda name: UNITS.get(name, 0.0), default="float64")


def _line_of(adapter: Adapter, error: BaseException | None) -> int:
    """The line of the adapter that raised an error, 0 where it was raised below it."""
    if error is None:
        return 0
    raised = list(traceback.walk_tb(error.__traceback__))
    code = getattr(adapter.call, "__code__", None)
    return raised[-1][1] if raised and raised[-1][0].f_code is code else 0


def _torch(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


def _jax(array: Array) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


CONVERT: Mapping[str, Callable[[Array], Any]] = {
    "numpy": np.array,
    "torch": _torch,
    "jax": _jax,
}


@contextlib.contextmanager
def _as_usual(library: str) -> Iterator[None]:
    """One thread for torch, whose start takes longer than a call; float64 for JAX."""
    if library == "torch":
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
    elif library == "jax":
        import jax

        home = jax if hasattr(jax, "enable_x64") else jax.experimental
        jax.config.update("jax_traceback_filtering", "off")  # it takes longer than a call
        with home.enable_x64(True):
            jax.numpy.zeros(1)  # what JAX does once is not the function's
            yield
    else:
        yield


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code that computes longer: in the main thread on Unix, else not at all."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise LimitExceeded("stopped", f"it was stopped after {seconds:g} s of computing")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

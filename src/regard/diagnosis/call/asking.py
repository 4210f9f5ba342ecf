"""One call of a function with its adapter: what it read, and what it returned.

Owns the limits of a call and the arrays of each library. What is asked and what is answered is
small data, so that the call may be made in another process. Must not know the textbook.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.calls.probe import UNITS
from regard.diagnosis.process.jax_traces import Traces, Untraceable
from regard.diagnosis.process.running import (
    LimitExceeded,
    Printed,
    as_numpy,
    describe_error,
    one_at_a_time,
)
from regard.diagnosis.task import FIELDS, Given, TaskView, changed_in, field_of, reads_of

CPU_SECONDS = 5.0  # that one call may take


@dataclass(frozen=True)
class Answer:
    """What one call read and returned: its "output", or gradients by fields; or why not."""

    reads: frozenset[str] = frozenset()
    arrays: Mapping[str, Array] = field(default_factory=dict)
    dtype: str = "float64"  # the coarsest of them
    problem: str = ""
    of_adapter: bool = False  # whether the adapter itself raised an error
    changed: tuple[str, ...] = ()  # the fields whose arrays the function changed
    printed: str = ""
    ended: bool = False  # whether a limit ended the call


Ask = Callable[[Given], Answer]


def asking(function: Any, adapter: Adapter, library: str) -> Ask:
    """What answers for a function that is called in this process."""
    return partial(_ask, function, adapter, library, Traces())


def _ask(function: Any, adapter: Adapter, library: str, traces: Traces, given: Given) -> Answer:
    view, reads = TaskView(given, _CONVERT[library]), set[str]()
    printed, problem, ended, of_adapter = Printed(), "", False, False
    arrays: dict[str, Array] = {}
    dtype = "float64"
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
            with _cpu_limit(CPU_SECONDS):
                if library == "jax":
                    returned = _traced(function, adapter, given, traces, reads)
                else:
                    returned = adapter.call(function, view)
                arrays, dtype = _read(returned)
        except LimitExceeded as error:
            problem, ended = error.args[1], True
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problem = describe_error(error)
            of_adapter = _is_of_adapter(error.__traceback__, adapter)
    return Answer(
        reads_of(view) or frozenset(reads or given.fields),
        arrays,
        dtype,
        problem,
        of_adapter,
        () if problem else changed_in(view, as_numpy),
        printed.kept(),
        ended,
    )


def _traced(function: Any, adapter: Adapter, given: Given, traces: Traces, reads: set[str]) -> Any:
    """What a function of JAX returns, without compiling it for each problem."""

    def call(own: Mapping[str, Any]) -> Any:
        view = TaskView(given, _jax, own)
        try:
            return adapter.call(function, view)
        finally:
            reads.update(reads_of(view))

    fields = {name: field_of(given, name) for name in FIELDS if name in given.fields}
    arrays = {name: one for name, one in fields.items() if _is_array(one)}
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
        array = as_numpy(one)
        if array.dtype.kind not in "fiub":
            kind = type(one).__name__ if array.dtype.kind == "O" else f"an array of {array.dtype}"
            raise TypeError(f"the adapter returned {kind}; return an array, or a dict of gradients")
        arrays[str(name)] = array.astype(np.float64)
        names.append(str(getattr(one, "dtype", array.dtype)).removeprefix("torch."))
    return arrays, max(names, key=lambda name: UNITS.get(name, 0.0), default="float64")


def _is_of_adapter(where: TracebackType | None, adapter: Adapter) -> bool:
    """Whether an error was raised by a line of the adapter, not below it."""
    frames = traceback.walk_tb(where)
    return [frame.f_code for frame, _ in frames][-1:] == [adapter.call.__code__]


def _torch(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.array(array))


def _jax(array: Array) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


_CONVERT: Mapping[str, Callable[[Array], Any]] = {
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
        with home.enable_x64(True):
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

"""The calls themselves, in the process that has the function: caught, timed, their printing kept.

Owns the limits on one call and what of a result is read. Must not know probes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import Part, Question, Returned
from regard.diagnosis.signature import Subject
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# What is read of one result: a probe's output has some kilobytes, so more is not looked at.
MAX_PARTS = 16
MAX_BYTES = 2**24
# Characters that one call may print, and how many of them are kept.
MAX_PRINTED = 2**22
KEPT_PRINTED = 200


class TookTooLong(BaseException):
    """Raised inside the function when its time is up; no `except Exception` of its own stops it."""


class PrintedTooMuch(BaseException):
    """Raised inside the function when it has printed too much."""


def run(
    function: Callable[..., Any], subject: Subject, question: Question, limit: float
) -> list[Returned]:
    """All calls of one question, up to the first that has a problem."""
    returned = []
    cache: Any = None
    for call in question.calls:
        arguments = {**call, question.cache: cache} if question.cache else call
        result, one = _guarded(function, subject, arguments, limit)
        if question.cache and not one.problem:
            if isinstance(result, tuple | list) and len(result) > 1:
                cache = result[1] if len(result) == 2 else result[1:]
            else:
                one = replace(one, problem="it takes a cache but returns none", kind="type")
        returned.append(one)
        if one.problem:
            break
    return returned


def _guarded(
    function: Callable[..., Any], subject: Subject, arguments: Mapping[str, Any], limit: float
) -> tuple[Any, Returned]:
    """One call, with its printing and its changes to the inputs noted."""
    handed = {name: _handed(value, subject.framework) for name, value in arguments.items()}
    positional, keyword = [], {}
    for parameter in subject.parameters:
        if parameter.name in handed:
            if parameter.keyword:
                keyword[parameter.name] = handed[parameter.name]
            else:
                positional.append(handed[parameter.name])
    printed = _Printed()
    result, returned = None, Returned()
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
            try:
                result = function(*positional, **keyword)
                returned = _read(result)  # what is returned may run code of its own
            except (TookTooLong, PrintedTooMuch, KeyboardInterrupt):
                raise
            except BaseException as error:
                returned = Returned(problem=say(error), kind="raised")
    except TookTooLong:
        returned = Returned(problem=f"it did not come back within {limit:g} s", kind="hung")
    except PrintedTooMuch:
        said = f"it printed more than {MAX_PRINTED} characters in one call"
        returned = Returned(problem=said, kind="prints")
    changed = tuple(
        name
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and not _same(value, as_numpy(handed[name]))
    )
    return result, replace(returned, printed=printed.kept(), changed=changed)


def say(error: BaseException) -> str:
    """An exception in one short line, whatever its own `__str__` does."""
    try:
        said = str(error).strip().split("\n")[0]
    except BaseException:
        said = ""
    return safe_text(f"{type(error).__name__}: {said}".rstrip(": "), 160)


class _Printed(io.StringIO):
    """Keeps the beginning of what is printed, and ends a call that prints without end."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def write(self, text: str) -> int:
        if self.length < KEPT_PRINTED:
            super().write(text[:KEPT_PRINTED])
        self.length += len(text)
        if self.length > MAX_PRINTED:
            raise PrintedTooMuch
        return len(text)

    def kept(self) -> str:
        """The beginning on one line, even if the function has closed this."""
        return "" if self.closed else safe_text(self.getvalue().strip(), KEPT_PRINTED)


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
    if first.dtype == second.dtype and first.tobytes() == second.tobytes():
        return True
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


# --- what came back ------------------------------------------------------------------------------


def _read(result: Any) -> Returned:
    if inspect.iscoroutine(result):
        result.close()
        return Returned(problem="it is asynchronous: it returned a coroutine", kind="type")
    if result is None:
        return Returned(problem="it returned nothing (None)", kind="nothing")
    room, parts = MAX_BYTES, []
    for array, dtype in itertools.islice(_arrays(result), MAX_PARTS):
        numbers = array.astype(np.float64) if array.size * 8 <= room else None
        room -= 0 if numbers is None else numbers.nbytes
        parts.append(Part(array.shape, safe_text(dtype, 40), numbers))
    if parts:
        return Returned(tuple(parts), a_list=isinstance(result, list))
    if hasattr(result, "dtype"):
        said = f"it returned an array of {safe_text(result.dtype, 40)}, not of real numbers"
    else:
        said = f"it returned {safe_text(type(result).__name__, 40)}, which holds no array"
    return Returned(problem=said, kind="type")


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
        if hasattr(one, "shape") or isinstance(one, list):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                array = as_numpy(one)
                name = str(getattr(one, "dtype", array.dtype)).removeprefix("torch.")
                if name == "bfloat16":
                    array = array.astype(np.float32)
                if array.dtype.kind in "fiu":
                    yield array, name


def as_numpy(value: Any) -> Array:
    """An array of any framework as NumPy's."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)

"""The process in which the function is loaded and called. It answers questions, without probes.

While the function runs, only the null device is open here: each message is read from, and written
to, files of the supervisor that are opened for that message alone. Must not know the textbook.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from regard.diagnosis.process import protocol
from regard.diagnosis.process.running import describe_error
from regard.errors import OptionError, ProblemError, safe_text

Respond = Callable[[protocol.Message], bytes]  # the frame that answers a message


def serve_messages(
    key: bytes, memory: int, begin: Callable[[bytes, protocol.Message], tuple[bytes, Respond]]
) -> None:
    """Answer messages without end: the first one by `begin`, the others by what that returns."""
    inbox, outbox = _channels()
    _no_core_files()
    # Some probes fail, and JAX would take longer to shorten their tracebacks than to trace them.
    os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

    def next_message() -> protocol.Message:
        with _opened(inbox, os.O_RDONLY) as file:
            return protocol.receive(lambda count: os.read(file, count), key, 2**62)

    def answer(message: bytes) -> None:
        with _opened(outbox, os.O_WRONLY) as file:
            while message:
                message = message[os.write(file, message) :]

    message = next_message()
    try:
        reply, respond = begin(key, message)
    except BaseException as error:
        kind = "OptionError" if isinstance(error, OptionError) else "ProblemError"
        why = _why(error, protocol.as_request(message)["target"])
        answer(protocol.error_frame(key, message.number, kind, why))
        return
    _limit_memory(memory)
    answer(reply)
    while True:
        answer(respond(next_message()))


def _why(error: BaseException, target: str) -> str:
    if isinstance(error, OptionError):
        return str(error)
    if isinstance(error, ProblemError | OSError):
        return safe_text(error, 1000)
    return f"{safe_text(target, 100)} cannot be read: {describe_error(error)}"


Channel = str | int


def _channels() -> tuple[Channel, Channel]:
    """Where messages come in and go out; 0, 1 and 2 become the null device.

    On Linux these are names of files of the supervisor. Elsewhere they are open all the time.
    """
    inbox: Channel = f"/proc/{os.getppid()}/fd/0"
    outbox: Channel = f"/proc/{os.getppid()}/fd/1"
    try:
        with _opened(inbox, os.O_RDONLY), _opened(outbox, os.O_WRONLY):
            pass
    except OSError:
        inbox, outbox = os.dup(0), os.dup(1)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: os.closerange(inbox, outbox + 1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    return inbox, outbox


@contextlib.contextmanager
def _opened(channel: Channel, how: int) -> Iterator[int]:
    if isinstance(channel, int):
        yield channel
        return
    file = os.open(channel, how)
    try:
        yield file
    finally:
        os.close(file)


def _no_core_files() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory(more: int) -> None:
    """Allow as much as there is now and so much more; the supervisor counts all processes.

    Private data is limited, not addresses: libraries reserve many of those without using them.
    """
    with contextlib.suppress(ImportError, OSError, ValueError), open("/proc/self/statm") as file:
        import resource

        now = int(file.read().split()[5]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = now + more
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

"""The process in which the function is loaded and called: it answers questions, and knows no probe.

While the function runs, no file is open here but the null device: a message is read from, and
written to, files of the keeper, opened for that message alone. Must not know the textbook.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from regard.diagnosis import protocol
from regard.diagnosis.convention import Returned
from regard.diagnosis.running import run, say
from regard.diagnosis.signature import read
from regard.diagnosis.target import load
from regard.errors import OptionError, ProblemError, safe_text

MAX_MEMORY = 2**30


def serve(key: bytes) -> None:
    """Load what the first message names, then answer one question after the other, without end."""
    inbox, outbox = _doors()
    _no_core_files()

    def next_message() -> protocol.Message:
        with _opened(inbox, os.O_RDONLY) as file:
            return protocol.receive(lambda count: os.read(file, count), key, 2**62)

    def answer(message: bytes) -> None:
        with _opened(outbox, os.O_WRONLY) as file:
            while message:
                message = message[os.write(file, message) :]

    message = next_message()
    request = protocol.as_request(message)
    try:
        function, subject = read(load(request["target"]), request["signature"], request["heads"])
        told = protocol.subject_frame(key, message.number, subject)
    except OptionError as error:
        answer(protocol.error_frame(key, message.number, "OptionError", str(error)))
        return
    except BaseException as error:
        answer(
            protocol.error_frame(
                key, message.number, "ProblemError", _why(error, request["target"])
            )
        )
        return
    _limit_memory()
    answer(told)
    while True:
        message = next_message()
        question = protocol.as_question(message)
        try:
            returned = run(function, subject, question, request["limit"])
        except KeyboardInterrupt as error:  # nobody interrupts this process: the function's own
            returned = [Returned(problem=say(error), kind="raised")]
        except BaseException as error:
            said = f"its answer could not be read: {say(error)}"
            returned = [Returned(problem=said, kind="raised")]
        answer(protocol.returned_frame(key, message.number, returned))


def _why(error: BaseException, target: str) -> str:
    if isinstance(error, ProblemError | OSError):
        return safe_text(error, 1000)
    return f"{safe_text(target, 100)} cannot be read: {say(error)}"


Door = str | int


def _doors() -> tuple[Door, Door]:
    """Where messages come in and go out; 0, 1 and 2 become the null device.

    On Linux these are names of files of the supervisor. Elsewhere they are open all the time.
    """
    inbox: Door = f"/proc/{os.getppid()}/fd/0"
    outbox: Door = f"/proc/{os.getppid()}/fd/1"
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
def _opened(door: Door, how: int) -> Iterator[int]:
    if isinstance(door, int):
        yield door
        return
    file = os.open(door, how)
    try:
        yield file
    finally:
        os.close(file)


def _no_core_files() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_memory() -> None:
    """Allow as much as there is now and MAX_MEMORY more; the keeper holds all processes to it.

    Private data is limited, not addresses: libraries reserve many of those without using them.
    """
    with contextlib.suppress(ImportError, OSError, ValueError), open("/proc/self/statm") as file:
        import resource

        now = int(file.read().split()[5]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        limit = now + MAX_MEMORY
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

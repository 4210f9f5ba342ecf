"""The process in which a function is called with adapters. It answers problems, and judges nothing.

Must not know the textbook.
"""

from __future__ import annotations

from regard.compute.spelling import READ
from regard.diagnosis.call.remote import Caller
from regard.diagnosis.door import library_of, ways_of
from regard.diagnosis.process import protocol
from regard.diagnosis.process.target import load
from regard.diagnosis.process.worker import Respond, serve_messages
from regard.diagnosis.statements import Stated


def serve(key: bytes, memory: int) -> None:
    """Load what the first message names, then answer one problem after the other, without end.

    `memory`: bytes that the function may take.
    """
    serve_messages(key, memory, _begin)


def _begin(key: bytes, message: protocol.Message) -> tuple[bytes, Respond]:
    request = protocol.as_request(message)
    function, own = load(request["target"]), request["stated"]
    parts = {name: READ[name](name, own[name]) for name in ("score", "normalize")}
    plain = {"score": "dot", "normalize": "softmax"}
    stated = Stated(**own | {name: parts[name] or plain[name] for name in parts})
    call = None if request["call"] is None else load(request["call"])
    library = library_of(function, stated)
    caller = Caller(function, library, ways_of(function, call, library, stated), stated)
    return protocol.frame(key, message.number, {}), lambda one: caller.answer(one, key)

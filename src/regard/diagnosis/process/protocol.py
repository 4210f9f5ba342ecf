"""The messages between the process that diagnoses and the one in which the function runs.

A message is one frame: a keyed digest, a number, two lengths, JSON and the bytes of arrays. What
comes from the function's process is hostile until it is checked here. Must not know how processes
are started.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from hashlib import blake2b
from json import JSONDecoder, JSONEncoder
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from regard.boundary.arrays import Array
from regard.errors import safe_text

T = TypeVar("T")
P = ParamSpec("P")

MAX_TEXT = 2**18  # bytes of JSON
MAX_WORDS = 4000  # characters of one text in it
HEAD = struct.Struct("<16sIIQ")

# Bound here, so that a function that replaces them in their modules changes nothing.
_encode, _decode = JSONEncoder().encode, JSONDecoder().decode
_pack, _unpack = HEAD.pack, HEAD.unpack


class InvalidMessage(Exception):
    """What arrived is not a message, or not the expected one."""


class Message(NamedTuple):
    """What one frame holds: its number, its JSON, and the bytes of its arrays."""

    number: int
    text: bytes
    data: bytes


def frame(
    key: bytes, number: int, content: Mapping[str, Any], arrays: Iterable[Array] = ()
) -> bytes:
    """One message as bytes."""
    data = b"".join(array.tobytes() for array in arrays)
    text = _encode(content).encode()
    lengths = _pack(b"", number, len(text), len(data))[16:]
    rest = lengths + text + data
    return _digest(key, rest) + rest


def receive(read: Callable[[int], bytes], key: bytes, most: int) -> Message:
    """The next message from `read`, which returns at most so many bytes, and none at the end.

    An InvalidMessage is raised for a frame with another key or more than `most` bytes of arrays,
    an EOFError if the other process has ended.
    """
    head = _exactly(read, HEAD.size)
    digest, number, text_length, data_length = _unpack(head)
    if text_length > MAX_TEXT or data_length > most:
        raise InvalidMessage
    rest = _exactly(read, text_length + data_length)
    if digest != _digest(key, head[16:] + rest):
        raise InvalidMessage
    return Message(number, rest[:text_length], rest[text_length:])


def _digest(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=16).digest()


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    out = bytearray()
    while len(out) < count:
        some = read(min(count - len(out), 2**20))
        if not some:
            raise EOFError
        out += some
    return bytes(out)


def as_request(message: Message) -> dict[str, Any]:
    """The JSON of a trusted message."""
    content = _decode(message.text.decode())
    assert isinstance(content, dict)
    return content


# --- from the function ----------------------------------------------------------------------------


def checked(
    reader: Callable[Concatenate[dict[str, Any], bytes, P], T],
) -> Callable[Concatenate[Message, P], T]:
    """A reader of messages from one of JSON and bytes; any error in it makes a message invalid."""

    @wraps(reader)
    def read(message: Message, /, *arguments: P.args, **more: P.kwargs) -> T:
        try:
            content = _decode(message.text.decode())
            need(type(content) is dict)
            return reader(content, message.data, *arguments, **more)
        except Exception as error:
            raise InvalidMessage from error

    return read


def error_frame(key: bytes, number: int, kind: str, text: str) -> bytes:
    """Why a function could not be loaded or inspected, as bytes."""
    return frame(key, number, {"kind": kind, "error": text})


@checked
def as_error(content: dict[str, Any], data: bytes) -> tuple[str, str] | None:
    """What `error_frame` wrote, checked: kind and text. None if it is another message."""
    if "error" not in content:
        return None
    need(content.keys() == {"kind", "error"} and not data)
    need(content["kind"] in ("OptionError", "ProblemError"))
    return content["kind"], _text(content["error"])


def need(condition: bool) -> None:
    """Refuse a message of which this does not hold."""
    if not condition:
        raise InvalidMessage


def _text(text: Any) -> str:
    need(type(text) is str and len(text) <= MAX_WORDS)
    return safe_text(text)

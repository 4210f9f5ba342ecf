"""The messages between the process that diagnoses and the one in which the function runs.

A message is a frame: a keyed digest, its number, two lengths, then some JSON and the bytes of
arrays. Owns what a valid message is; all that comes from the function's process is hostile until
it has been checked here. Must not know how processes are started.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from json import JSONDecoder, JSONEncoder
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from regard.diagnosis.convention import PROBLEMS, Part, Question, Returned
from regard.diagnosis.running import MAX_PARTS
from regard.diagnosis.signature import NAMES, Parameter, Subject
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

T = TypeVar("T")

MAX_TEXT = 2**18  # bytes of JSON
MAX_WORDS = 4000  # characters of one text in it
MAX_WEIGHTS = 2**30  # bytes of the weights that an object carries
MAX_HEADS = 1024
MAX_PARAMETERS = 256
HEAD = struct.Struct("<16sIIQ")
ROLES = {*NAMES, "keep01", "hide01", "add"}

# Taken here, so that it does not matter what the function puts in their place.
_encode, _decode = JSONEncoder().encode, JSONDecoder().decode
_pack, _unpack = HEAD.pack, HEAD.unpack


class Junk(Exception):
    """What arrived is no message, or not the one that was due."""


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
    """The next message from `read`, which gives some bytes up to a number, and none at the end.

    Raises
    ------
    Junk
        If no frame with this key comes, or one with more than `most` bytes of arrays.
    EOFError
        If the other side has gone.
    """
    head = _exactly(read, HEAD.size)
    digest, number, text_length, data_length = _unpack(head)
    if text_length > MAX_TEXT or data_length > most:
        raise Junk
    rest = _exactly(read, text_length + data_length)
    if digest != _digest(key, head[16:] + rest):
        raise Junk
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


# --- to the function ------------------------------------------------------------------------------


def question_frame(key: bytes, number: int, question: Question) -> bytes:
    """A question as bytes: scalars in the JSON, arrays by their type and shape."""
    arrays: list[Array] = []
    calls = []
    for call in question.calls:
        named: dict[str, Any] = {}
        for name, value in call.items():
            if isinstance(value, np.ndarray):
                arrays.append(value)
                named[name] = [value.dtype.str, value.shape]
            else:
                named[name] = value
        calls.append(named)
    content = {"name": question.name, "calls": calls, "cache": question.cache}
    return frame(key, number, content, arrays)


def as_question(message: Message) -> Question:
    """What `question_frame` wrote; the side that asks is trusted."""
    content, start = _decode(message.text.decode()), 0
    calls = []
    for named in content["calls"]:
        call = {}
        for name, value in named.items():
            if isinstance(value, list):
                dtype, count = np.dtype(value[0]), math.prod(value[1])
                flat = np.frombuffer(message.data, dtype, count, start)
                call[name] = flat.reshape(value[1])
                start += flat.nbytes
            else:
                call[name] = value
        calls.append(call)
    return Question(content["name"], tuple(calls), content["cache"])


def as_request(message: Message) -> dict[str, Any]:
    """The JSON of a trusted message."""
    content = _decode(message.text.decode())
    assert isinstance(content, dict)
    return content


# --- from the function ----------------------------------------------------------------------------


def subject_frame(key: bytes, number: int, subject: Subject) -> bytes:
    """What was read off a function, as bytes."""
    weights = {name: _wide(array) for name, array in subject.weights.items()}
    content = {
        "name": subject.name,
        "framework": subject.framework,
        "heads": subject.heads,
        "parameters": [
            [one.name, one.role, one.required, one.keyword, _kind_of_default(one.default)]
            for one in subject.parameters
        ],
        "weights": {name: array.shape for name, array in weights.items()},
    }
    return frame(key, number, content, weights.values())


def _wide(array: Array) -> Array:
    return np.ascontiguousarray(array, "<f8")


def _kind_of_default(default: Any) -> bool | int | None:
    """All that a call asks of a default: whether it is None, True, or anything else."""
    return None if default is None else True if default is True else 0


def as_subject(message: Message) -> Subject:
    """What `subject_frame` wrote, checked."""
    return _checked(_subject, message)


def _subject(content: dict[str, Any], data: bytes) -> Subject:
    _need(content.keys() == {"name", "framework", "heads", "parameters", "weights"})
    heads = content["heads"]
    _need(heads is None or (type(heads) is int and 0 < heads <= MAX_HEADS))
    _need(content["framework"] in ("numpy", "torch", "jax"))
    _need(type(content["parameters"]) is list and len(content["parameters"]) <= MAX_PARAMETERS)
    parameters = []
    for name, role, required, keyword, default in content["parameters"]:
        _need(type(name) is str and name.isidentifier() and len(name) <= 200)
        _need(role is None or (type(role) is str and role in ROLES))
        _need(type(required) is bool and type(keyword) is bool)
        _need(default is None or default is True or (type(default) is int and default == 0))
        parameters.append(Parameter(name, role, required, keyword, default))
    roles = {one.role for one in parameters}
    _need(bool(roles & {"x", "query"}))
    _need(len({one.name for one in parameters}) == len(parameters))
    _need(type(content["weights"]) is dict)
    weights, start = {}, 0
    for role, shape in content["weights"].items():
        _need(role in ROLES and role[:2] in ("W_", "b_"))
        weights[role], start = _numbers(data, start, _shape(shape))
    _need(start == len(data) and (not weights or {"W_q", "W_k", "W_v"} <= weights.keys()))
    name = _text(content["name"])
    return Subject(name, tuple(parameters), content["framework"], weights, heads)


def returned_frame(key: bytes, number: int, returned: list[Returned]) -> bytes:
    """What came of the calls of one question, as bytes."""
    content = [
        {
            "parts": [[one.shape, one.dtype, one.numbers is not None] for one in call.parts],
            "a_list": call.a_list,
            "problem": call.problem,
            "kind": call.kind,
            "printed": call.printed,
            "changed": call.changed,
        }
        for call in returned
    ]
    parts = (part.numbers for call in returned for part in call.parts)
    return frame(key, number, {"calls": content}, (_wide(one) for one in parts if one is not None))


def as_returned(message: Message, question: Question) -> list[Returned]:
    """What `returned_frame` wrote, checked."""
    return _checked(lambda content, data: _returned(content, data, question), message)


def _returned(content: dict[str, Any], data: bytes, question: Question) -> list[Returned]:
    _need(content.keys() == {"calls"} and type(content["calls"]) is list)
    calls: list[Returned] = []
    start = 0
    for call in content["calls"]:
        _need(call.keys() == {"parts", "a_list", "problem", "kind", "printed", "changed"})
        _need(type(call["a_list"]) is bool and type(call["parts"]) is list)
        _need(len(call["parts"]) <= MAX_PARTS)
        parts = []
        for shape, dtype, sent in call["parts"]:
            own, numbers = _shape(shape), None
            if sent:
                numbers, start = _numbers(data, start, own)
            parts.append(Part(own, _text(dtype), numbers))
        problem = _text(call["problem"])
        # A call has arrays or a problem, and only the last one of them has a problem.
        _need(bool(parts) is not bool(problem))
        _need(call["kind"] in PROBLEMS if problem else call["kind"] == "")
        printed = _text(call["printed"])
        _need(type(call["changed"]) is list)
        _need(all(type(one) is str and one in question.calls[0] for one in call["changed"]))
        _need(not calls or not calls[-1].problem)
        changed = tuple(call["changed"])
        calls.append(
            Returned(tuple(parts), call["a_list"], problem, call["kind"], printed, changed)
        )
    _need(start == len(data) and bool(calls))
    _need(len(calls) == len(question.calls) or bool(calls[-1].problem))
    _need(len(calls) <= len(question.calls))
    return calls


def error_frame(key: bytes, number: int, kind: str, text: str) -> bytes:
    """Why a function could not be loaded or read, as bytes."""
    return frame(key, number, {"kind": kind, "error": text})


def as_error(message: Message) -> tuple[str, str] | None:
    """What `error_frame` wrote, checked: the kind and the text. None if it is another message."""
    return _checked(_error, message)


def _error(content: dict[str, Any], data: bytes) -> tuple[str, str] | None:
    if "error" not in content:
        return None
    _need(content.keys() == {"kind", "error"} and not data)
    _need(content["kind"] in ("OptionError", "ProblemError"))
    return content["kind"], _text(content["error"])


def _checked(reader: Callable[[dict[str, Any], bytes], T], message: Message) -> T:
    """What `reader` makes of a message; whatever goes wrong in that makes it junk."""
    try:
        content = _decode(message.text.decode())
        _need(type(content) is dict)
        return reader(content, message.data)
    except Exception as error:
        raise Junk from error


def _need(condition: bool) -> None:
    if not condition:
        raise Junk


def _text(text: Any) -> str:
    _need(type(text) is str and len(text) <= MAX_WORDS)
    return safe_text(text)


def _shape(shape: Any) -> tuple[int, ...]:
    _need(type(shape) is list and len(shape) <= 64)
    _need(all(type(size) is int and 0 <= size < 2**63 for size in shape))
    return tuple(shape)


def _numbers(data: bytes, start: int, shape: tuple[int, ...]) -> tuple[Array, int]:
    """The array of float64 that begins at a byte, and where the next one begins."""
    stop = start + 8 * math.prod(shape)
    _need(stop <= len(data))
    return np.frombuffer(data[start:stop], "<f8").reshape(shape), stop

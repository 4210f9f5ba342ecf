"""The messages between the process that diagnoses and the one in which the function runs.

A message is one frame: a keyed digest, a number, two lengths, JSON and the bytes of arrays. What
comes from the function's process is hostile until it is checked here. Must not know how processes
are started.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import wraps
from hashlib import blake2b
from json import JSONDecoder, JSONEncoder
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import PROBLEMS, CallResult, Question, ReturnedArray
from regard.diagnosis.forms.tables import FORMS
from regard.diagnosis.process.running import MAX_ARRAYS
from regard.diagnosis.reading.changed_text import MOST_CHARACTERS, Change
from regard.diagnosis.reading.signature import (
    LATENTS,
    MOST_READINGS,
    PAIRS,
    PROJECTIONS,
    ROLES,
    ROLES_GIVEN,
    STEPS,
    Callee,
    Parameter,
)
from regard.diagnosis.reading.surroundings import Surroundings
from regard.errors import safe_text

T = TypeVar("T")
P = ParamSpec("P")

MAX_TEXT = 2**18  # bytes of JSON
MAX_WORDS = 4000  # characters of one text in it
MAX_WEIGHTS = 2**30  # bytes of the weights that an object carries
MAX_HEADS = 1024
MAX_PARAMETERS = 256
MAX_COUNT = 10**6  # a default that may be passed on: the size of a window or a block
HEAD = struct.Struct("<16sIIQ")
CALLEE_FIELDS = {one.name for one in fields(Callee)} - {"number", "blocks"}
CALL_FIELDS = {one.name for one in fields(CallResult)}

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


# --- to the function ------------------------------------------------------------------------------


def question_frame(key: bytes, number: int, question: Question) -> bytes:
    """A question as bytes: scalars in the JSON, arrays by their type and shape."""

    def described(value: Any) -> Any:
        value = value.item() if isinstance(value, np.generic) else value
        return [value.dtype.str, value.shape] if isinstance(value, np.ndarray) else value

    calls = [{name: described(value) for name, value in call.items()} for call in question.calls]
    values = (value for call in question.calls for value in call.values())
    content: dict[str, Any] = {
        "name": question.name,
        "calls": calls,
        "cache": question.cache,
        "reading": question.reading,
        "wrt": question.wrt,
        "place": question.place,
        "change": None if question.change is None else astuple(question.change),
        "looks": question.looks,
    }
    return frame(key, number, content, (one for one in values if isinstance(one, np.ndarray)))


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
    wrt = tuple(content["wrt"])
    change = None if content["change"] is None else Change(*content["change"])
    asked = content["cache"], content["reading"], wrt, content["place"], change, content["looks"]
    return Question(content["name"], tuple(calls), *asked)


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


def callees_frame(key: bytes, number: int, callees: Sequence[Callee]) -> bytes:
    """What is known of every reading of a function, as bytes; the weights of all in order."""
    content: list[dict[str, Any]] = []
    arrays: list[Array] = []
    for callee in callees:
        weights = {name: _wide(array) for name, array in callee.weights.items()}
        arrays += weights.values()
        content.append(
            {
                "name": callee.name,
                "framework": callee.framework,
                "heads": callee.heads,
                "steps": callee.steps,
                "remembers": callee.remembers,
                "rows_first": callee.rows_first,
                "batched": callee.batched,
                "adapted": callee.adapted,
                "mask_means": callee.mask_means,
                "key_mask_means": callee.key_mask_means,
                "window_means": callee.window_means,
                "causal_aligns": callee.causal_aligns,
                "says_pieces": callee.says_pieces,
                "says_single": callee.says_single,
                "said_scale": callee.said_scale,
                "sharpness": callee.sharpness,
                "norm_place": callee.norm_place,
                "around": None if callee.around is None else astuple(callee.around),
                "columns_said": callee.columns_said,
                "by_head": callee.by_head,
                "says_causal": callee.says_causal,
                "says_added": callee.says_added,
                "says_cosine": callee.says_cosine,
                "says_transposed": callee.says_transposed,
                "tables": callee.tables,
                "layout": callee.layout,
                "opaque": callee.opaque,
                "widths": callee.widths,
                "caps": callee.caps,
                "meant": callee.meant,
                "axes": dict(callee.axes),
                "narrow": callee.narrow,
                "packs": callee.packs,
                "inverts_mask": callee.inverts_mask,
                "mask_of_keys": callee.mask_of_keys,
                "has_positions": callee.has_positions,
                "without": callee.without,
                "unused": callee.unused,
                "says_linear": callee.says_linear,
                "parameters": [
                    [*plain, _kind_of_default(one.default), one.guessed]
                    for one in callee.parameters
                    for plain in [(one.name, one.role, one.required, one.keyword)]
                ],
                "weights": {name: array.shape for name, array in weights.items()},
                "returns": callee.returns,
                "paired": callee.paired,
                "reads_one_length": callee.reads_one_length,
                "made": callee.made,
                "pools": callee.pools,
                "fault": callee.fault,
                "option": callee.option,
            }
        )
    blocks = callees[0].blocks  # the same in all of them
    return frame(key, number, {"readings": content, "blocks": blocks}, arrays)


def _wide(array: Array) -> Array:
    return np.ascontiguousarray(array, "<f8")


def _kind_of_default(default: Any) -> bool | int | None:
    """None, True, a count, or 0 for anything else: a call depends on no more."""
    if default is None or default is True:
        return default
    return default if type(default) is int and 0 < default <= MAX_COUNT else 0


@checked
def as_callees(content: dict[str, Any], data: bytes) -> list[Callee]:
    """What `callees_frame` wrote, checked."""
    need(content.keys() == {"readings", "blocks"} and type(content["readings"]) is list)
    blocks = tuple((first, text) for first, text in content["blocks"])
    need(all(type(first) is int and type(text) is str for first, text in blocks))
    need(sum(len(text) for _, text in blocks) <= MOST_CHARACTERS)
    need(0 < len(content["readings"]) <= MOST_READINGS)
    callees, start = [], 0
    for number, one in enumerate(content["readings"]):
        callee, start = _as_callee(one, data, start)
        callees.append(replace(callee, number=number, blocks=blocks))
    need(start == len(data))
    return callees


def _as_callee(content: dict[str, Any], data: bytes, start: int) -> tuple[Callee, int]:
    need(content.keys() == CALLEE_FIELDS)
    need(content["steps"] in ("", *STEPS))
    need(content["tables"] in ("", "batch", *FORMS))
    need(set(_text(content["layout"])) <= set("BHLD"))
    need(type(content["caps"]) is list and all(type(one) is float for one in content["caps"]))
    need(type(content["widths"]) is list and len(content["widths"]) <= MAX_ARRAYS)
    need(all(type(one) is int and 0 < one <= MAX_COUNT for one in content["widths"]))
    for name in ("meant", "without", "unused"):
        need(type(content[name]) is list and len(content[name]) <= MAX_ARRAYS)
    need(all(content[one] in ("", "keep", "hide") for one in ("mask_means", "key_mask_means")))
    need(content["window_means"] in ("", "inclusive", "exclusive"))
    need(content["causal_aligns"] in ("", "end", "start"))
    need(content["sharpness"] is None or type(content["sharpness"]) is float)
    need(content["by_head"] in (None, True, False))
    need(content["columns_said"] in ("", "heads", "parts"))
    need(content["norm_place"] in ("", "first", "last"))
    need(content["said_scale"] in ("", "none", "width", "model"))
    around = content["around"] and Surroundings.checked(content["around"])
    kinds = ("paired", "remembers", "rows_first", "batched", "adapted")
    flags = (
        *kinds,
        "says_causal",
        "says_added",
        "says_pieces",
        "says_single",
        "says_cosine",
        "says_linear",
        "says_transposed",
        "narrow",
        "packs",
        "inverts_mask",
        "mask_of_keys",
        "reads_one_length",
        "has_positions",
        "pools",
    )
    need(all(type(content[name]) is bool for name in flags))
    heads = content["heads"]
    need(heads is None or (type(heads) is int and 0 < heads <= MAX_HEADS))
    need(content["framework"] in ("numpy", "torch", "jax"))
    need(type(content["parameters"]) is list and len(content["parameters"]) <= MAX_PARAMETERS)
    parameters = []
    for name, role, required, keyword, default, guessed in content["parameters"]:
        need(type(name) is str and name.isidentifier() and len(name) <= 200)
        need(role is None or (type(role) is str and role in ROLES_GIVEN))
        need(all(type(one) is bool for one in (required, keyword, guessed)))
        count = type(default) is int and 0 <= default <= MAX_COUNT
        need(default is None or default is True or count)
        told = Parameter(name, role, required, keyword, default, guessed=guessed)
        parameters.append(told)
    need(any(one.role in ("x", "query") for one in parameters))
    need(len({one.name for one in parameters}) == len(parameters))
    need(type(content["weights"]) is dict)
    weights = {}
    for role, shape in content["weights"].items():
        need((role in ROLES and role[:2] in ("W_", "b_")) or role in (LATENTS, PAIRS, "sink"))
        weights[role], start = _numbers(data, start, _shape(shape))
    need(not weights or set(PROJECTIONS) <= weights.keys())
    name = _text(content["name"])
    need(type(content["returns"]) is list and len(content["returns"]) <= MAX_ARRAYS)
    texts = (
        "steps",
        "tables",
        "mask_means",
        "key_mask_means",
        "window_means",
        "causal_aligns",
        "norm_place",
        "columns_said",
        "by_head",
        "said_scale",
        "sharpness",
    )
    how = {name: content[name] for name in (*texts, *flags)}
    own: dict[str, Any] = {"returns": tuple(map(_text, content["returns"])), **how}
    own |= {"weights": weights, "heads": heads, "around": around}
    own |= {"opaque": _text(content["opaque"]), "widths": tuple(content["widths"])}
    own |= {"layout": content["layout"], "caps": tuple(content["caps"])}
    own |= {name: _text(content[name]) for name in ("made", "fault", "option")}
    own |= {name: tuple(map(_text, content[name])) for name in ("meant", "without", "unused")}
    need(type(content["axes"]) is dict and len(content["axes"]) <= MAX_ARRAYS)
    own |= {"axes": {_text(name): _text(axes) for name, axes in content["axes"].items()}}
    return Callee(name, tuple(parameters), content["framework"], **own), start


def results_frame(key: bytes, number: int, results: list[CallResult]) -> bytes:
    """The results of the calls of one question, as bytes."""
    content = [
        {
            **{name: getattr(call, name) for name in CALL_FIELDS},
            "arrays": [[one.shape, one.dtype, one.numbers is not None] for one in call.arrays],
        }
        for call in results
    ]
    arrays = (array.numbers for call in results for array in call.arrays)
    return frame(key, number, {"calls": content}, (_wide(one) for one in arrays if one is not None))


@checked
def as_results(content: dict[str, Any], data: bytes, question: Question) -> list[CallResult]:
    """What `results_frame` wrote, checked."""
    need(content.keys() == {"calls"} and type(content["calls"]) is list)
    results: list[CallResult] = []
    start = 0
    for call in content["calls"]:
        need(call.keys() == CALL_FIELDS and type(call["a_list"]) is type(call["dropped"]) is bool)
        need(type(call["arrays"]) is list and len(call["arrays"]) <= MAX_ARRAYS)
        names = call["names"]
        need(type(names) is list and len(names) in (0, len(call["arrays"])))
        arrays = []
        for shape, dtype, sent in call["arrays"]:
            own, numbers = _shape(shape), None
            if sent:
                numbers, start = _numbers(data, start, own)
            arrays.append(ReturnedArray(own, _text(dtype), numbers))
        problem = _text(call["problem"])
        # A call has arrays or a problem, and only the last one of them has a problem.
        need(bool(arrays) is not bool(problem))
        need(call["kind"] in PROBLEMS if problem else call["kind"] == "")
        need(not results or not results[-1].problem)
        changed = call["changed"]
        need(type(changed) is list)
        need(all(type(one) is str and one in question.calls[0] for one in changed))
        given = call | {"arrays": tuple(arrays), "problem": problem, "changed": tuple(changed)}
        given |= {"names": tuple(map(_text, names))}
        results.append(CallResult(**given | {"printed": _text(call["printed"])}))
    need(start == len(data) and 0 < len(results) <= len(question.calls))
    need(len(results) == len(question.calls) or bool(results[-1].problem))
    return results


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


def _shape(shape: Any) -> tuple[int, ...]:
    need(type(shape) is list and len(shape) <= 64)
    need(all(type(size) is int and 0 <= size < 2**63 for size in shape))
    return tuple(shape)


def _numbers(data: bytes, start: int, shape: tuple[int, ...]) -> tuple[Array, int]:
    """The array of float64 that begins at a byte, and where the next one begins."""
    stop = start + 8 * math.prod(shape)
    need(stop <= len(data))
    return np.frombuffer(data[start:stop], "<f8").reshape(shape), stop

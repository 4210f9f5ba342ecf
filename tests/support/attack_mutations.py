"""Files that are damaged where their format has structure, and what is left of one made small.

A mutation takes bytes of a valid file apart (JSON, TOML, ZIP, NPY, safetensors), changes some part,
and puts them together again with lengths and checksums right. Must not know who reads a file.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

Dice = random.Random

NUMBERS = [0, 1, -1, 2, 3, 63, 64, 255, 2**16, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 10**30]
NUMBERS += [-(2**63), 0.5, -0.0, 1e-320, 1e308, 2.0**53 + 2, 1e400]
TEXTS = ["", "a", "nan", "inf", "-inf", "\x00", "\x1b[31m", "\u202e", "\ud800", "../../etc/passwd"]
TEXTS += ["/dev/zero", "CON", "a" * 5000, "é" * 300, "__class__", "1", "null", "\n", "[PAD]"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [{}], {"": None}]
WORDS = re.compile(rb"[A-Za-z_][A-Za-z0-9_.-]*|-?[0-9][0-9.e+-]*|\S")
DTYPES = [
    "<f8",
    ">f4",
    "|b1",
    "<i8",
    "<U3",
    "<f2",
    "|O",
    "<c16",
    "|V8",
    "<M8[s]",
    "|u1",
    "<U99999999",
]


def mutated(kind: str, data: bytes, dice: Dice) -> bytes:
    """The bytes of a file with one to four changes."""
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        changes = [_bytes, *KINDS.get(kind, [_tokens])] + KINDS.get(kind, [_tokens]) * 3
        try:
            data = dice.choice(changes)(data, dice)
        except Exception:  # it is damaged already, so that it cannot be taken apart
            data = _bytes(data, dice)
    return data


# --- text ----------------------------------------------------------------------------------------


def _bytes(data: bytes, dice: Dice) -> bytes:
    """Some bytes changed, cut out, doubled or put in."""
    begin = dice.randint(0, len(data))
    end = min(len(data), begin + dice.choice([0, 1, 1, 2, 8, 64]))
    middle = dice.choice([b"", data[begin:end] * 2, dice.randbytes(end - begin), dice.randbytes(4)])
    return data[:begin] + middle + data[end:]


def _tokens(data: bytes, dice: Dice) -> bytes:
    """A word, a number or a sign replaced by another, or by one that is rarely there."""
    words = list(WORDS.finditer(data))
    one, other = dice.choice(words), dice.choice(words)[0]
    rare = dice.choice([str(dice.choice(NUMBERS)), json.dumps(dice.choice(TEXTS)), "[", "]", "{}"])
    rare = dice.choice([rare, "\n", "=", ".", "#", '"""', "'", "[[a]]\n", "nan", "1979-05-27"])
    chosen = dice.choice([other, rare.encode(), one[0] * 2, b""])
    return data[: one.start()] + chosen + data[one.end() :]


def _value(dice: Dice, old: Any) -> Any:
    """Another value in place of one."""
    near: list[Any] = [
        dice.choice(NUMBERS),
        dice.choice(TEXTS),
        dice.choice(OTHERS),
        [old],
        {"a": old},
    ]
    if isinstance(old, list) and old:
        near += [old[:-1], old + old[-1:], old[::-1], old * dice.choice([2, 40])]
    if isinstance(old, bool):
        near.append(not old)
    elif isinstance(old, (int, float)):
        near += [old + 1, old - 1, -old, old * 2, float(old), str(old)]
    if isinstance(old, str):
        near += [old + "x", old[:-1], old.upper(), [old, old]]
    return dice.choice(near)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    pairs: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = enumerate(value[:50])
    for key, inner in pairs:
        found += _places(inner, (*path, key))
    return found


def _changed(value: Any, dice: Dice) -> Any:
    """A value in JSON with one part replaced, left out, renamed or put somewhere else."""
    places = _places(value)
    if not places:
        return _value(dice, value)
    *path, key = dice.choice(places)
    at = value
    for one in path:
        at = at[one]
    what = dice.randrange(8)
    if what == 0:
        del at[key]
    elif what == 1 and isinstance(at, dict):
        at[dice.choice([*TEXTS, f"{key}s", str(key)[:-1]])] = at[key]
    elif what == 2 and isinstance(at, dict):
        at[str(dice.choice(places)[-1])] = at[key]
    elif what == 3:
        deep: Any = at[key]
        for _ in range(dice.choice([3, 40, 300])):
            deep = [deep]
        at[key] = deep
    else:
        at[key] = _value(dice, at[key])
    return value


def _json(data: bytes, dice: Dice) -> bytes:
    value = _changed(json.loads(data), dice)
    text = json.dumps(value)
    if dice.random() < 0.05:  # a key that comes twice
        text = re.sub(r'("[^"]*": )', r"\1 0, \1", text, count=1)
    return text.encode()


# --- archives and arrays -------------------------------------------------------------------------


def _npy(data: bytes, dice: Dice) -> bytes:
    """An array with another header, or other numbers."""
    (length,) = struct.unpack("<H", data[8:10])
    header, rest = data[10 : 10 + length], data[10 + length :]
    what = dice.randrange(6)
    if what == 0:
        header = re.sub(rb"'descr': '[^']*'", f"'descr': '{dice.choice(DTYPES)}'".encode(), header)
    elif what == 1:
        size = tuple(
            abs(int(min(dice.choice(NUMBERS), 2**70))) for _ in range(dice.choice([0, 1, 2, 5]))
        )
        header = re.sub(rb"\([0-9, ]*\)", str(size).encode(), header)
    elif what == 2:
        header = re.sub(rb"False|True", lambda m: b"True" if m[0] == b"False" else b"1", header)
    elif what == 3:
        header = _tokens(header, dice)
    elif what == 4 and rest:
        at = dice.randrange(len(rest))
        special = dice.choice(
            [dice.randbytes(8), b"\xff" * 8, b"\x00" * 8, struct.pack("<d", 1e308)]
        )
        rest = rest[:at] + special + rest[at + 8 :]
    else:
        rest = dice.choice([rest[:-1], rest + b"\x00", rest * 2, b""])
    return data[:8] + struct.pack("<H", len(header) & 0xFFFF) + header + rest


def _text_array(data: bytes, dice: Dice) -> bytes:
    """The array of text in which NPZ keeps JSON, with another JSON."""
    (length,) = struct.unpack("<H", data[8:10])
    text = _json(data[10 + length :].decode("utf-32-le").encode(), dice).decode()
    points = text.encode("utf-32-le", "surrogatepass")
    header = f"{{'descr': '<U{len(text)}', 'fortran_order': False, 'shape': (), }}\n".encode()
    return data[:8] + struct.pack("<H", len(header)) + header + points


def _npz(data: bytes, dice: Dice) -> bytes:
    """An archive with a member changed, renamed, doubled, left out, or packed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = dice.randrange(len(members))
    name, content = members[at]
    what = dice.randrange(10)
    if what == 0:
        del members[at]
    elif what == 1:
        other = dice.choice(
            [*TEXTS[4:], "problem", "a.b", "problem.a", dice.choice(members)[0][:-4]]
        )
        members[at] = (f"{other}.npy", content)
    elif what == 2:
        members[at] = (name, dice.choice(members)[1])
    elif what == 3:
        members.insert(0, members.pop(at))
    elif what < 7 and b"<U" in content[:60]:
        members[at] = (name, _text_array(content, dice))
    else:
        members[at] = (name, _npy(content, dice))
    packed = zipfile.ZIP_DEFLATED if dice.random() < 0.2 else zipfile.ZIP_STORED
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", packed) as archive:
        warnings.simplefilter("ignore")  # a name comes twice: so it should
        for one, inside in members:
            archive.writestr(zipfile.ZipInfo(one), inside, packed)
    return file.getvalue()


def _safetensors(data: bytes, dice: Dice) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    if dice.random() < 0.85:
        header = _json(header, dice)
    else:
        rest = _bytes(rest, dice)
    claimed = dice.choice([len(header)] * 12 + [0, 1, 2**63, len(header) + 1])
    return struct.pack("<Q", claimed) + header + rest


def _gguf(data: bytes, dice: Dice) -> bytes:
    """Other counts, lengths and types in the header, or other bytes anywhere."""
    if dice.random() < 0.3:
        return _bytes(data, dice)
    at = dice.randrange(min(len(data), 12_000))
    size = dice.choice(["<I", "<Q"])
    number = dice.choice([0, 1, 2, 3, 2**31, len(data), dice.randrange(2**32)])
    number = dice.choice([number, number, 2**62, 2**64 - 1]) if size == "<Q" else number
    return data[:at] + struct.pack(size, number) + data[at + struct.calcsize(size) :]


KINDS: dict[str, list[Callable[[bytes, Dice], bytes]]] = {
    "json": [_json, _json, _tokens],
    "toml": [_tokens],
    "npz": [_npz],
    "npy": [_npy],
    "safetensors": [_safetensors],
    "gguf": [_gguf],
    "text": [_tokens],
}


# --- making small --------------------------------------------------------------------------------


def smaller(data: bytes, fails: Callable[[bytes], bool], tries: int = 400) -> bytes:
    """A shorter file that still fails: parts are left out, half of it first."""
    size = len(data) // 2
    while size and tries:
        begin = 0
        while begin < len(data) and tries:
            tries -= 1
            shorter = data[:begin] + data[begin + size :]
            if fails(shorter):
                data = shorter
            else:
                begin += size
        size //= 2
    return data

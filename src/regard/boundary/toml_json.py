"""TOML and JSON: text to mapping and back, one matrix row to a line.

Owns the spelling only; must not know the keys. Reading is bounded before and after the parser of
the standard library, whose every failure becomes one line. Writing escapes what a terminal or an
editor could act on, and has every digit of a float.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.boundary.files import MAX_TEXT_BYTES
from regard.boundary.parse import MAX_DEPTH, MAX_NUMBERS, shown
from regard.boundary.toml_hints import hint
from regard.errors import ProblemError, safe_text

# A parser spends microseconds and up to a kilobyte on each: a few bytes of text.
MAX_KEYS = 2**17

Kind = Literal["toml", "json"]


def parse(text: str, kind: Kind, name: str = "text") -> Any:
    """The mapping that a text spells; `name` is what errors call the text."""
    # Every character is at least a byte; only text that comes near the limit is encoded to count.
    if len(text) > MAX_TEXT_BYTES or (
        len(text) > MAX_TEXT_BYTES // 4
        and len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES
    ):
        raise ProblemError(f"{name} has more than {MAX_TEXT_BYTES} bytes, the most that are read")
    text = text.removeprefix("\ufeff")
    try:
        if kind == "toml":
            _check_words(text)
            return tomllib.loads(text, parse_float=_parse_float)
        _check_keys(text)
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_integer,
        )
    except ProblemError:
        raise
    except RecursionError:
        raise ProblemError(
            f"{name} is nested too deeply; at most {MAX_DEPTH} levels are read"
        ) from None
    except ValueError as error:
        mend = hint(text, str(error)) if kind == "toml" else ""
        said = f"{safe_text(error, 160)}{'; ' if mend else ''}{mend}"
        raise ProblemError(f"{name} is not valid {kind.upper()}: {said}") from None


def spell(data: Mapping[str, Any], kind: Kind) -> str:
    """The text of a mapping whose matrices are arrays."""
    count = sum(array.size for array in _arrays(data))
    if count > MAX_NUMBERS:
        raise ProblemError(f"problem has {count} numbers; text holds {MAX_NUMBERS}, .npz more")
    if _count_keys(data) > MAX_KEYS:
        raise ProblemError(
            f"problem has {_count_keys(data)} keys and tables; text holds {MAX_KEYS}, "
            "and lists of rows need none"
        )
    lines = _toml(data) if kind == "toml" else _entry("", data, "json", "")
    text = "\n".join(lines) + "\n"
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise ProblemError(
            f"problem takes {size} bytes of text; at most {MAX_TEXT_BYTES} could be read again; "
            "save it as .npz"
        )
    return text


# --- reading -------------------------------------------------------------------------------------

_MAX_WORD = 1024  # the regular expressions of tomllib take memory for every digit of a number
_WORD = r"[A-Za-z0-9_-]"
_QUOTED = r""" "(?:[^"\\\n]|\\[^\n])*+"? | '[^'\n]*+'? """
_PART = rf"(?: {_WORD}{{1,{_MAX_WORD}}}+ (?!{_WORD}) | {_QUOTED} )"
_NEXT = rf"(?: [ \t]*+ \. [ \t]*+ {_PART} )"
# After a header the line ends; after a row of a matrix that looks like one, the matrix goes on.
_NO_ROW = r"(?= [ \t\r]*+ (?: \# | \Z | \n \s*+ [^],\s] | \n \s*+ \Z ) )"
# Strings and comments are stepped over whole, closed or not; what is left are words and dots.
_TOKEN = re.compile(
    rf'''
    """ (?: [^"\\] | \\. | "(?!"") )*+ (?: """ | \\? \Z )
    | \'\'\' (?: [^'] | '(?!'') )*+ (?: \'\'\' | \Z )
    | \# [^\n]*+
    | (?P<long> {_WORD}{{{_MAX_WORD + 1}}} )
    | (?P<deep> {_PART} {_NEXT}{{{MAX_DEPTH}}} )
    | ^ [ \t]*+ \[{{1,2}} [ \t]*+ (?P<header> {_PART} {_NEXT}{{0,{MAX_DEPTH - 1}}}+ )
        [ \t]*+ \]{{1,2}} {_NO_ROW}
    | {_PART} {_NEXT}*+ (?P<key> (?= [ \t]*+ = ) )?
    | (?P<table> \{{ \s*+ \}} )
    ''',
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ONE_PART = re.compile(_PART, re.VERBOSE)


def _check_words(text: str) -> None:
    """Refuse what tomllib would spend much memory or (on a dotted key) quadratic time on."""
    keys = 0
    for match in _TOKEN.finditer(text):
        what = ""
        match match.lastgroup:
            case None:
                continue
            case "deep":
                what = f"a dotted key of more than {MAX_DEPTH} parts in"
            case "long":
                what = f"a word or number of more than {_MAX_WORD} characters without quotes in"
            case "header" | "key":
                keys += len(_ONE_PART.findall(match["header"] or match[0]))
            case _:
                keys += 1
        if keys > MAX_KEYS:
            what = f"more than {MAX_KEYS} keys and empty tables up to"
        if what:
            raise ProblemError(f"text has {what} line {_line(text, match)}")


_JSON_TOKEN = re.compile(
    r"""
    " (?: [^"\\]++ | \\. )*+ (?: " | \\?\Z ) (?P<key> \s*+ : )?
    | (?P<table> \{ \s*+ \} )
    """,
    re.VERBOSE | re.DOTALL,
)


def _check_keys(text: str) -> None:
    """Refuse what json would make hundreds of megabytes of; a colon is rarely anything else."""
    if text.count(":") + text.count("{") <= MAX_KEYS:
        return
    keys = 0
    for match in _JSON_TOKEN.finditer(text):
        keys += match.lastgroup is not None
        if keys > MAX_KEYS:
            line = _line(text, match)
            raise ProblemError(
                f"text has more than {MAX_KEYS} keys and empty objects up to line {line}"
            )


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number) and "inf" not in digits:
        raise ValueError(f"the number {safe_text(digits, 30)} is too large for a 64-bit float")
    return number


def _parse_integer(digits: str) -> int:
    if len(digits) > 400:  # the largest float has 309 digits
        raise ValueError(f"the number {safe_text(digits, 30)} has {len(digits)} digits")
    return int(digits)


def _refuse_constant(word: str) -> float:
    as_string = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[word]
    raise ValueError(f'JSON has no number {word}; write "{as_string}" as a string')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} appears twice in one object")
    return table


# --- writing -------------------------------------------------------------------------------------


def _arrays(data: Any) -> Iterator[NDArray[Any]]:
    if isinstance(data, np.ndarray):
        yield data
    elif isinstance(data, (Mapping, list)):
        for inner in data.values() if isinstance(data, Mapping) else data:
            yield from _arrays(inner)


def _count_keys(data: Any, depth: int = 0) -> int:
    """As many as reading counts, or a few more: keys, parts of headers, empty tables."""
    if isinstance(data, Mapping):
        inner = data.values()
        return depth + 1 + len(data) + sum(_count_keys(one, depth + 1) for one in inner)
    return sum(_count_keys(one, depth) for one in data) if isinstance(data, list) else 0


def _toml(data: Mapping[str, Any], path: str = "", header: str = "") -> list[str]:
    """A table: its own keys, then each table with matrices in it under a header of its own."""
    own: list[str] = []
    tables: list[str] = []
    for key, value in data.items():
        name = _toml_key(key)
        below = f"{path}.{name}" if path else name
        big = (Mapping, np.ndarray)
        if _is_table(value) and (
            not path or any(isinstance(inner, big) for inner in value.values())
        ):
            tables += _toml(value, below, f"[{below}]")
        elif isinstance(value, list) and any(map(_is_table, value)):
            for entry in value:
                tables += _toml(entry, below, f"[[{below}]]")
        else:
            own += _entry(f"{name} = ", value, "toml", "")
    # A table that holds only other tables needs no header.
    return [*(["", header] if header and (own or not tables) else []), *own, *tables]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _entry(start: str, value: Any, kind: Kind, indent: str) -> list[str]:
    """One key and its value; a matrix takes a line for each row."""
    start, below = indent + start, indent + "  "
    if isinstance(value, Mapping) and kind == "json":
        pairs = value.items()
        entries = [_entry(f"{_string(key, kind)}: ", inner, kind, below) for key, inner in pairs]
        return _between(f"{start}{{", entries, f"{indent}}}", comma_at_end=False)
    matrix = isinstance(value, np.ndarray) and value.ndim > 1
    tables = isinstance(value, list) and any(map(_is_table, value))
    if not (matrix or tables):
        line = f"{start}{_inline(value, kind)}"
        if not isinstance(value, list) or len(line) <= 100:
            return [line]
    entries = [_entry("", inner, kind, below) for inner in value]
    return _between(f"{start}[", entries, f"{indent}]", comma_at_end=kind == "toml")


def _between(start: str, entries: list[list[str]], end: str, *, comma_at_end: bool) -> list[str]:
    if not entries:
        return [start + end.lstrip()]
    lines = [start]
    for position, entry in enumerate(entries):
        comma = "," if comma_at_end or position < len(entries) - 1 else ""
        lines.extend([*entry[:-1], entry[-1] + comma])
    return [*lines, end]


def _inline(value: Any, kind: Kind) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        plain = repr(value)  # the shortest digits that give the same float again
        return plain if kind == "toml" or math.isfinite(value) else f'"{plain}"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value, kind)
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {_inline(inner, kind)}" for key, inner in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return f"[{', '.join(_inline(inner, kind) for inner in value)}]"


def _toml_key(key: str) -> str:
    # A label that looks like a number would do without quotes, but then it looks like a number.
    return key if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,99}", key) else _string(key, "toml")


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
# All that is not plain printable ASCII; only some of it needs an escape.
_SUSPICIOUS = re.compile(r"[^ !#-\[\]-~]")


def _string(text: str, kind: Kind) -> str:
    """A quoted string: letters of every script stay, what has no shape is escaped."""
    return f'"{_SUSPICIOUS.sub(lambda match: _escape(match[0], kind), text)}"'


def _escape(character: str, kind: Kind) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if unicodedata.category(character) not in {"Cc", "Cf", "Co", "Cn", "Zl", "Zp"}:
        return character
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    if kind == "toml":
        return f"\\U{code:08x}"
    high, low = divmod(code - 0x10000, 0x400)  # JSON has 16 bits to an escape
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"

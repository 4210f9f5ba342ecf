"""The JSON Schema of problem files: what an editor needs to complete keys and to mark mistakes.

Keys are those that the library reads, and their words those of docs/problem-files.md. A key without
a shape here ends the build. Must not repeat what only a reader of numbers can check, such as sizes.
"""

from __future__ import annotations

import json
import re
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from regard import normalizers, positions, scores
from regard.problems.parts import backward_axes, step_axes
from regard.problems.schema import FORMAT, KEYS, LONE_KEYS

Schema = dict[str, Any]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "problem-files.md"


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _any(*choices: Schema) -> Schema:
    return {"anyOf": list(choices)}


def _list(of: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": of, **more}


def _table(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


TEXT, FLAG, WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
NUMBER, VECTOR, MATRIX = _ref("number"), _ref("vector"), _ref("matrix")
DEFINITIONS = {
    "number": _any({"type": "number"}, {"enum": ["inf", "-inf", "nan"]}),
    "vector": _list(NUMBER, minItems=1),
    "matrix": _list(VECTOR, minItems=1),
    "vectors": _any(MATRIX, _table(VECTOR)),
    "heads": _any(VECTOR, MATRIX, _list(MATRIX, minItems=1), _table(VECTOR)),
    "numbers": _any(NUMBER, VECTOR, MATRIX, _list(MATRIX, minItems=1)),
    "labels": _list(TEXT),
    "side": _any({"type": "integer", "minimum": 0}, {"const": "unbounded"}),
    "expectation": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "value": _ref("numbers"),
            "at": _list(_any(TEXT, {"type": "integer", "minimum": 0})),
            "variance": NUMBER,
            "head": {"type": "integer", "minimum": 0},
            "within": NUMBER,
            "relative": NUMBER,
        },
    },
    "expected": _any(_ref("expectation"), _list(_ref("expectation"))),
}
COUNT = {"type": "integer", "minimum": 1}
MASK = _any(FLAG, _list(FLAG), _list(_list(FLAG)), _list(_list(_list(FLAG))))
PROJECTIONS = [f"weights.{kind}_{part}" for part in "qkvo" for kind in "Wb"]
DRAWN = {
    "generator": {"enum": ["legacy", "default_rng"]},
    "seed": {"type": "integer", "minimum": 0},
}
DRAWN |= {"distribution": {"enum": ["uniform", "normal"]}, "draw": _ref("labels")}
DRAWN |= {"shapes": _table(_list(COUNT))}


def problem_schema() -> str:
    """The schema as JSON."""
    shapes = _shapes()
    paths = [key.path for key in KEYS] + list(LONE_KEYS)
    if set(paths) != set(shapes):
        raise ValueError(f"shapes for other keys than those read: {set(paths) ^ set(shapes)}")
    words = _words()
    made: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A problem of regard",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
        "$defs": DEFINITIONS,
    }
    for path in paths:
        table, *names = made, *path.split(".")
        for name in names[:-1]:
            new = {"type": "object", "additionalProperties": False, "properties": {}}
            table = table["properties"].setdefault(name, new)
        said = {"description": words[path]} if path in words else {}
        table["properties"][names[-1]] = {**said, **shapes[path]}
    return json.dumps(made, ensure_ascii=False, indent=1) + "\n"


def _shapes() -> dict[str, Schema]:
    """What may be under each key."""
    shapes: dict[str, Schema] = {"format": {"const": FORMAT}}
    shapes |= dict.fromkeys(("title", "note", "query_label"), TEXT)
    shapes |= dict.fromkeys(("tokens", "context_tokens"), _ref("labels"))
    shapes |= dict.fromkeys(("heads", "key_heads"), COUNT)
    shapes |= dict.fromkeys(("embeddings", "context"), _ref("vectors"))
    shapes |= dict.fromkeys(("queries", "keys", "values", "target", "grad_output"), _ref("heads"))
    shapes |= {name: MATRIX if name[8] == "W" else VECTOR for name in PROJECTIONS}
    named = ("embeddings", "context", "keys", "values", "output")
    shapes |= {f"features.{name}": _ref("labels") for name in named}
    shapes["row_notes"] = _table(_ref("labels"))
    shapes["random"] = {"type": "object", "additionalProperties": False, "properties": DRAWN}
    shapes["expect"] = _expectations()
    options = {
        "causal": FLAG,
        "window": _list(_ref("side"), minItems=2, maxItems=2),
        "offset": _any(WHOLE, {"const": "end"}),
        "scale": NUMBER,
        "softcap": NUMBER,
        "sink": _ref("numbers"),
        "bias": _ref("numbers"),
        "mask": MASK,
        "lengths": _any(WHOLE, _list(WHOLE)),
        "segments.queries": _list(WHOLE),
        "segments.keys": _list(WHOLE),
        "softmax": {"enum": ["shifted", "unshifted"]},
        "score": _part("dot", scores.KNOWN),
        "normalize": _part("softmax", normalizers.KNOWN),
        "positions": _part("none", positions.KNOWN),
    }
    return shapes | {f"options.{name}": shape for name, shape in options.items()}


def _part(plain: str, known: dict[str, Any]) -> Schema:
    """The name of a kind alone, or a table with its kind and what it is given."""
    alone, tables = [plain], []
    for name, kind in known.items():
        takes = signature(kind).parameters
        needed = [key for key, one in takes.items() if one.default is Parameter.empty]
        if not needed:
            alone.append(name.lower())
        own = {"kind": {"const": name.lower()}} | {key: {} for key in takes}
        common = {"type": "object", "additionalProperties": False}
        tables.append({**common, "properties": own, "required": ["kind", *needed]})
    return _any({"enum": alone}, *tables)


def _expectations() -> Schema:
    """Every step by its name, those of the way back too."""
    names = sorted({*step_axes(), *backward_axes()})
    steps = dict.fromkeys(names, _ref("expected"))
    return {"type": "object", "additionalProperties": False, "properties": steps}


def _words() -> dict[str, str]:
    """What the page says of each key, as plain text."""
    found: dict[str, str] = {}
    rows = re.compile(r"^\| (`.+?`) \| (.+) \|$", re.MULTILINE)
    for keys, words in rows.findall(PAGE.read_text("utf-8")):
        plain = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", words).replace("`", "").replace("\\|", "|")
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", keys), plain)
    return found

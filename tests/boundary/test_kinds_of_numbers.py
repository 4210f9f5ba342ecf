"""Every public function answers numbers of another kind as its own kind, or refuses them by name.

One rule for all rows of one table (`public_calls.ROWS`): integers, booleans, lists and the like
give the answer of the same call on float64, in its dtype, or an error of regard whose message names
the argument. A function, or an argument, that is in no row fails too.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import regard
from public_calls import BESIDE, IN_OPTIONS, NO_ARRAYS, ROWS, Row
from regard.errors import RegardError

# Integers are exact in float64, so only the order of a few dozen sums may differ.
TOLERANCE = 64 * np.finfo(np.float64).eps

# Each with the library that it needs.
ROOMS: dict[str, tuple[str, ...]] = {
    "regard": (),
    **{f"regard.{one}": () for one in regard.__all__ if inspect.ismodule(getattr(regard, one))},
    **{
        f"regard.interop.{one.name}": (one.name,)
        for one in pkgutil.iter_modules(regard.interop.__path__)
        if "_" not in one.name
    },
}


def whole(array: np.ndarray) -> np.ndarray:
    return np.ceil(array).astype(np.int64)


LIGHT = {"onnx", "safetensors", "tokenizers"}  # libraries that are here in every run

# What an argument is given, made of numbers of its own kind.
KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "int64": whole,
    "int32": lambda array: whole(array).astype(np.int32),
    "uint8": lambda array: whole(array).astype(np.uint8),
    "bool": lambda array: array > 1,
    "list of ints": lambda array: whole(array).tolist() if array.ndim else [int(whole(array))],
    "list of floats": lambda array: (array.astype(np.float64) + 0.5).tolist(),
    "no axes": lambda array: np.array(whole(array).flat[0]),
    "other byte order": lambda array: array.astype(array.dtype.newbyteorder("S")),
    "int64 in the other byte order": lambda array: whole(array).astype(
        np.dtype(np.int64).newbyteorder("S")
    ),
    "longdouble": lambda array: array.astype(np.longdouble),
    "empty": lambda array: np.empty((*array.shape[:-1], 0), array.dtype),
    "empty int64": lambda array: np.empty((0, *array.shape[1:]), np.int64),
    "empty list": lambda array: [],
    "object": lambda array: array.astype(object),
    "complex": lambda array: array.astype(np.complex128),
}
with suppress(ImportError):
    from ml_dtypes import float8_e4m3fn

    KINDS["float8"] = lambda array: array.astype(float8_e4m3fn)

# Where another kind means something else, and why.
EXCEPTIONS = {
    ("regard.interop.onnx.attention", "attn_mask", "bool"): "ONNX has masks of booleans too",
    ("regard.interop.torch.scaled_dot_product_attention", "attn_mask", "bool"): "so has PyTorch",
    ("regard.interop.transformers.attend", "attention_mask", "bool"): "so has transformers",
    **{
        ("regard.interop.zarr.attention", name, kind): "Zarr stores none"
        for name in ("query", "key", "value", "mask", "bias")
        for kind in ("longdouble", "object", "float8")
    },
}


def cells() -> list[Any]:
    made = []
    for row in ROWS:
        marks = [pytest.mark.needs(name) for name in row.needs]
        if {*row.needs} - LIGHT:
            marks.append(pytest.mark.full)
        made.append(pytest.param(row, id=row.name, marks=marks))
    return made


@pytest.mark.parametrize("row", cells())
def test_numbers_of_another_kind_give_the_answer_of_float64_or_are_refused_by_name(row):
    """Each argument by itself, and all arrays of floats together, of each kind."""
    faults, answers = {}, {}
    usual = answer_of(row, {name: scalar(array) for name, array in row.given.items()})
    assert not isinstance(usual, str), usual
    for kind, made in KINDS.items():
        names = [name for name in row.given if (row.of, name, kind) not in EXCEPTIONS]
        floats = [n for n in names if row.given[n].dtype == np.float64 and row.given[n].ndim]
        for changed in (*([name] for name in names), *([floats] if len(floats) > 1 else [])):
            given = {name: made(row.given[name]) for name in changed}
            fault = fault_of(row, given, answers)
            if fault is not None:
                faults[kind, *changed] = fault
    assert faults == {}


def fault_of(row: Row, given: Mapping[str, Any], answers: dict[Any, Any]) -> str | None:
    """What is wrong with a call that is given some numbers of another kind; None for nothing.

    `answers` are those to the same numbers of their own kind, by these numbers.
    """
    own = {name: scalar(array) for name, array in row.given.items()}
    answer = answer_of(row, {**own, **given})
    if isinstance(answer, str):
        if answer.startswith(RAW):
            return answer
        said = {*given, *(row.said[name] for name in given if name in row.said)}
        if any(re.search(rf"\b{re.escape(name)}\b", answer) for name in said):
            return None
    known = {name: in_own_kind(one, row.given[name]) for name, one in given.items()}
    if any(array is None for array in known.values()):
        return f"names no argument: {answer}" if isinstance(answer, str) else "answers"
    key = tuple((name, one.shape, one.tobytes()) for name, one in known.items())
    if key not in answers:
        answers[key] = answer_of(row, {**own, **known})
    wanted = answers[key]
    if isinstance(answer, str) or isinstance(wanted, str):
        return None if answer == wanted else f"{answer}; its own kind gives {wanted}"
    return difference(answer, wanted)


RAW = "raises "


def answer_of(row: Row, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """The arrays of an answer, or the refusal without the shapes of the call."""
    try:
        return dict(parts_of(row.call(**given)))
    except RegardError as error:
        return re.sub(r" \((\w+ \([\d, ]*\)(, )?)+\)$", "", str(error))
    except Exception as error:
        return f"{RAW}{type(error).__name__}: {error}"


def scalar(array: Any) -> Any:
    """A number without axes as one; other arrays as they are."""
    return array if array.ndim else array[()]


def in_own_kind(given: Any, usual: np.ndarray) -> Any:
    """The same numbers in the argument's own dtype; None if it does not have them."""
    array = np.asarray(given)
    if array.dtype.kind == "c":
        return None
    own = array.astype(usual.dtype)
    if usual.dtype != np.float64 and not np.array_equal(own, array):
        return None
    return own if usual.ndim else scalar(own)


def parts_of(result: Any, name: str = "result") -> Iterator[tuple[str, Any]]:
    """The arrays of an answer, each with its name."""
    if hasattr(result, "steps") and hasattr(result, "derive"):
        *others, last = result.steps.values()
        steps = [step for step in others if step.declared.op == "given"]
        result = {step.name: step.value for step in (*steps, last, result["output"])}
    if isinstance(result, Mapping):
        for key, one in result.items():
            yield from parts_of(one, f"{name}.{key}")
    elif isinstance(result, (tuple, list)):
        for number, one in enumerate(result):
            yield from parts_of(one, f"{name}[{number}]")
    elif result is not None:
        yield name, np.asarray(result)


def difference(answer: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    if answer.keys() != wanted.keys():
        return f"returns {', '.join(answer)} instead of {', '.join(wanted)}"
    for name, array in wanted.items():
        if answer[name].dtype.newbyteorder("=") != array.dtype:
            return f"{name} is {answer[name].dtype} instead of {array.dtype}"
        if answer[name].shape != array.shape:
            return f"{name} has shape {answer[name].shape} instead of {array.shape}"
        if array.dtype.kind in "US":
            if (answer[name] != array).any():
                return f"{name} is {answer[name]} instead of {array}"
        elif not np.allclose(answer[name], array, rtol=TOLERANCE, atol=0, equal_nan=True):
            few, own = answer[name].ravel()[:4], array.ravel()[:4]
            return f"{name} has other numbers: {few} instead of {own}"
    return None


# --- no function without a row -------------------------------------------------------------------

# What the library makes and hands out: nobody calls these classes with numbers of their own.
MADE = {
    *("Derivation", "Diagnosis", "Explanation", "Gradients", "LayerGradients", "OutputLse"),
    *("OutputWeights", "OutputWeightsLse", "Verdict", "Encoder", "Overview", "Tokens"),
    *("AttentionOutputs", "Attention", "RotaryEmbedding", "PreparedModel", "AttentionCall"),
    *("Calls", "Plan", "Progress", "LanguageModel", "Run", "Generation", "Candidate", "Step"),
}
# Methods of masks, scores and positions that the library calls, with what it has checked.
ASKED = {"block", "buckets", "check", "fits", "frequencies_of", "given", "natural_shape", "of_rows"}
ASKED |= {"parameters", "slopes_of", "turned", "verdict"}


def public_of(room: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a room, the classes that are made by calling them, and their methods."""
    module = import_module(room)
    for name in module.__all__:
        one = getattr(module, name)
        if inspect.isfunction(one):
            yield f"{room}.{name}", one
        if not inspect.isclass(one) or issubclass(one, RegardError):
            continue
        if name not in MADE:
            yield f"{room}.{name}()", one
        for own, method in inspect.getmembers(one, callable):
            ours = (getattr(method, "__module__", None) or "").startswith("regard")
            if ours and own not in ASKED and (own == "__call__" or not own.startswith("_")):
                yield f"{room}.{name}.{own}", method


def unlisted(room: str) -> list[str]:
    """The parameters of a room that are in no row, and may take numbers."""
    found = []
    for of, one in public_of(room):
        listed = {name for row in ROWS if row.of == of for name in row.given}
        for name, parameter in inspect.signature(one).parameters.items():
            names = {name}
            if parameter.kind is parameter.VAR_KEYWORD and name == "options":
                names = IN_OPTIONS
            missing = names - listed - NO_ARRAYS - {own for at, own in BESIDE if at == of}
            found += [f"{of}: {own}" for own in sorted(missing)]
    return found


@pytest.mark.parametrize(
    "room",
    [
        pytest.param(room, marks=[pytest.mark.needs(*needs), *heavy])
        for room, needs in ROOMS.items()
        for heavy in ([pytest.mark.full] if {*needs} - LIGHT else [],)
    ],
)
def test_every_argument_of_every_public_function_is_in_a_row_or_takes_no_array(room):
    assert unlisted(room) == []


def test_a_function_without_a_row_is_found(monkeypatch):
    monkeypatch.setattr(import_module("regard.masks"), "__all__", ["own"])
    monkeypatch.setattr(import_module("regard.masks"), "own", lambda cells, name: 0, raising=False)
    assert unlisted("regard.masks") == ["regard.masks.own: cells"]


def test_every_row_is_of_a_public_function():
    rooms = [room for room, needs in ROOMS.items() if not {*needs} - LIGHT]
    known = {of for room in rooms for of, _ in public_of(room)}
    light = {row.of for row in ROWS if not {*row.needs} - LIGHT}
    assert light <= known

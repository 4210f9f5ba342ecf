"""Objects and classes: how one is made, and its weights filled, by names of the table.

An attribute that holds numbers and is not in the table may do anything with them, so such an object
needs an adapter. Must not know problems.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from regard.diagnosis.call import table
from regard.diagnosis.call.adapter import SHORT, called
from regard.diagnosis.call.asking import CONVERT, guarded
from regard.diagnosis.call.search import Subject
from regard.diagnosis.given import Given
from regard.diagnosis.result import Assumption
from regard.diagnosis.view import TaskView

# What the sizes of a constructor are, for a layer and for an object without weights.
_EMBEDDED = {
    "model": "t.embeddings.shape[-1]",
    "width": "t.W_q.shape[1] // t.heads",
    "value_width": "t.W_v.shape[1] // t.heads",
    "heads": "t.heads",
    "key_heads": "t.key_heads",
    "causal": "t.causal",
}
_READY = _EMBEDDED | {
    "model": "t.query.shape[1] * t.query.shape[-1]",
    "width": "t.query.shape[-1]",
    "value_width": "t.value.shape[-1]",
}
_WEIGHTS = {f"t.{kind}_{part}" for kind in "Wb" for part in "qkvo"}
UNKNOWN = "..."  # what is to be filled in, or checked


def subjects_of(given: Any, library: str) -> Iterator[Subject]:
    """An object or a class as what is called, once it has the weights of a problem.

    There are two where matrices may be transposed. What is not known of it is named.
    """
    is_class = inspect.isclass(given)
    arguments = _constructor(given) if is_class else {}
    unknown = [name for name, code in arguments.items() if code == UNKNOWN]
    sample = given
    if is_class:
        code = called("f", [(name, one.format(**_EMBEDDED)) for name, one in arguments.items()])
        t = TaskView(Given("a sample"), CONVERT[library])
        sample = guarded(lambda: eval(code, {"f": given, "t": t}), library).value
    module = hasattr(sample, "named_parameters")
    arrays = [*(sample.named_parameters() if module else _arrays(sample))]
    weighted = any(code in _WEIGHTS for code in arguments.values())  # it is made with them
    filled = {} if weighted else _filled(sample, arrays, library)
    unknown += [name for name, line in filled.items() if UNKNOWN in line]
    places = _EMBEDDED if arrays or weighted else _READY
    made = called("f", [(name, one.format(**places)) for name, one in arguments.items()])
    make = [f"m = {made if is_class else 'copy.deepcopy(f)'}{'.double().eval()' * module}"]
    if not is_class:
        make.insert(0, "import copy")
    method = next((name for name in table.METHODS if _has(sample, name)), "__call__")
    callee = getattr(sample, "forward" if module else method, None)
    lost = sample is None and hasattr(given, "forward")
    if sample is None:
        unknown.append("its constructor")
    for turned in (False, True):
        lines = [one.format(".T" * turned) for one in filled.values()]
        if turned and lines == [one.format("") for one in filled.values()]:
            return
        if module and lines:
            lines = [f"with {SHORT[library]}.no_grad():", *(f"    {line}" for line in lines)]
        text = "weights of a layer are (columns, rows), for x @ W.T"
        yield Subject(
            "m" if method == "__call__" else f"m.{method}",
            _parameters(given.forward, 1) if lost else _parameters(callee),
            "\n".join([*make, *lines]),
            bool(arrays) or weighted,
            None if is_class else _whole(sample, table.HEADS),
            None if is_class else _model(arrays),
            (Assumption("weights", text),) * turned,
            tuple(unknown),
        )


def _constructor(given: Any) -> dict[str, str]:
    """What a class is made with, by names."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return {}
    found = {}
    for one in parameters:
        name = one.name.lower()
        role = table.PARAMETERS[name].role if name in table.PARAMETERS else ""
        code = f"t.{role}" if f"t.{role}" in _WEIGHTS else table.CONSTRUCTOR.get(name, UNKNOWN)
        needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if needed or (code != UNKNOWN and one.default is not None):
            found[one.name] = code
    return found


def _parameters(callee: Any, without: int = 0) -> tuple[inspect.Parameter, ...]:
    """The parameters of a method, without the object where it belongs to a class."""
    try:
        return tuple(inspect.signature(callee).parameters.values())[without:]
    except (TypeError, ValueError):
        return ()


def _has(sample: Any, method: str) -> bool:
    return callable(sample) if method == "__call__" else callable(getattr(sample, method, None))


def _arrays(sample: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of numbers of an object of no library."""
    for name, one in getattr(sample, "__dict__", {}).items():
        if getattr(one, "ndim", 0) and getattr(one, "shape", None):
            yield name, one


def _filled(sample: Any, arrays: list[tuple[str, Any]], library: str) -> dict[str, str]:
    """The code that fills each array of `m`, "{}" where a matrix may be transposed.

    What the table does not know is in the usual order, as something to check.
    """
    found, others = {}, iter("qkvo")
    letters: dict[str, str] = {}
    for name, array in arrays:
        *owners, leaf = name.split(".")
        part = leaf in ("weight", "bias") and owners
        word = next((one for one in reversed(owners) if not one.isdigit()), "") if part else leaf
        role = table.ATTRIBUTES.get(word.lower(), "")
        of = role.removeprefix("b_") or letters.get(".".join(owners)) or next(others, "")
        letters[".".join(owners)] = of
        is_bias = leaf == "bias" or role.startswith("b_")
        parts = [f"t.{'b' if is_bias else 'W'}_{one}" for one in of]
        value = UNKNOWN if not of else parts[0]
        if len(parts) > 1:
            value = f"{SHORT[library]}.concatenate([{', '.join(parts)}], -1)"
        if of and not is_bias:
            value = _turned(value, _owner(sample, owners), tuple(array.shape))
        place = "m" + "".join(f"[{x}]" if x.isdigit() else f".{x}" for x in name.split("."))
        module = hasattr(sample, "named_parameters")
        line = f"{place}.copy_({value})" if module else f"{place} = {value}"
        found[name] = line if role else f"{line}  # {UNKNOWN}"
    return found


def _owner(sample: Any, owners: list[str]) -> Any:
    for one in owners:
        sample = sample[int(one)] if one.isdigit() else getattr(sample, one)
    return sample


def _turned(value: str, owner: Any, shape: tuple[int, ...]) -> str:
    """The code of a matrix for x @ W as a layer has it, by its kind and shape."""
    if hasattr(owner, "in_features") or (len(shape) == 2 and shape[0] > shape[1]):
        return f"{value}.T"
    if len(shape) == 3:
        return table.WEIGHTS[2].format(value)
    return value + "{}" * (len(shape) == 2 and shape[0] == shape[1])


def _whole(sample: Any, names: Any) -> int | None:
    """The first of these attributes that is a whole number."""
    return next((one for name in names if type(one := getattr(sample, name, None)) is int), None)


def _model(arrays: list[tuple[str, Any]]) -> int | None:
    """The width of what a layer takes, from its first matrix."""
    return next((int(min(one.shape)) for _, one in arrays if one.ndim == 2), None)


def is_object(given: Any) -> bool:
    """Whether something is an object or a class, not a function."""
    return inspect.isclass(given) or not (
        inspect.isroutine(given) or inspect.isfunction(getattr(given, "__wrapped__", given))
    )

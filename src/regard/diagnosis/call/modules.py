"""Objects and classes: how one is made, and its weights filled, by names of the table.

An attribute that holds numbers and is not in the table may do anything with them, so such an object
needs an adapter. Must not know problems.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from regard.diagnosis.call import table
from regard.diagnosis.call.adapter import SHORT, Assumption, called
from regard.diagnosis.call.asking import guarded
from regard.diagnosis.call.search import Subject

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
_SAMPLE = {"model": "12", "width": "4", "value_width": "4", "heads": "3", "key_heads": "3"}
_SAMPLE["causal"] = "False"


def subjects_of(given: Any, library: str) -> Iterator[Subject]:
    """An object or a class as what is called, once it has the weights of a problem."""
    is_class = inspect.isclass(given)
    arguments = _constructor(given) if is_class else []
    if arguments is None:
        return
    sample = given
    if is_class:
        code = called("f", [(name, one.format(**_SAMPLE)) for name, one in arguments])
        sample = guarded(lambda: eval(code, {"f": given}), library).value
    method = next((name for name in table.METHODS if _has(sample, name)), None)
    if sample is None or method is None:
        return
    module = hasattr(sample, "named_parameters")
    arrays = [*(sample.named_parameters() if module else _arrays(sample))]
    filled = [_filled(sample, name, array, library) for name, array in arrays]
    if any(one is None for one in filled):
        return
    places = _EMBEDDED if arrays else _READY
    made = called("f", [(name, one.format(**places)) for name, one in arguments])
    if not is_class:
        made = "copy.deepcopy(f)"
    make = [f"m = {made}{'.double().eval()' * module}"]
    if not is_class:
        make.insert(0, "import copy")
    known = None if is_class else _whole(sample, table.HEADS)
    model = None if is_class or not arrays else _model(arrays)
    callee = sample if method == "__call__" else getattr(sample, method)
    callee = sample.forward if module else callee
    for turned in (False, True):
        lines = [str(one).format(".T" * turned) for one in filled]
        if turned and lines == [str(one).format("") for one in filled]:
            return
        if module and lines:
            lines = [f"with {SHORT[library]}.no_grad():", *(f"    {line}" for line in lines)]
        text = "weights of a layer are (columns, rows), for x @ W.T"
        yield Subject(
            "m" if method == "__call__" or module else f"m.{method}",
            tuple(inspect.signature(callee).parameters.values()),
            "\n".join([*make, *lines]),
            bool(arrays),
            known,
            model,
            (Assumption("weights", text),) * turned,
        )


def _constructor(given: Any) -> list[tuple[str, str]] | None:
    """What a class is made with, by names; None where the table lacks one."""
    try:
        parameters = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return None
    found = []
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        code = table.CONSTRUCTOR.get(one.name.lower())
        if code is None and one.default is one.empty:
            return None
        if code is not None and one.default is not None:
            found.append((one.name, code))
    return found


def _has(sample: Any, method: str) -> bool:
    return callable(sample) if method == "__call__" else callable(getattr(sample, method, None))


def _arrays(sample: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of numbers of an object of no library."""
    for name, one in getattr(sample, "__dict__", {}).items():
        if getattr(one, "ndim", 0) and getattr(one, "shape", None):
            yield name, one


def _filled(sample: Any, name: str, array: Any, library: str) -> str | None:
    """The code that fills one array of `m`, "{}" where a matrix may be transposed; or None."""
    *owners, leaf = name.split(".")
    of_part = leaf in ("weight", "bias") and owners
    known = next((one for one in reversed(owners) if not one.isdigit()), "") if of_part else leaf
    role = table.ATTRIBUTES.get(known.lower())
    if role is None:
        return None
    is_bias = leaf == "bias" or role.startswith("b_")
    letters = role.removeprefix("b_")
    kind = "b" if is_bias else "W"
    parts = [f"t.{kind}_{one}" for one in letters]
    short = SHORT[library]
    value = f"{short}.concatenate([{', '.join(parts)}], -1)" if len(parts) > 1 else parts[0]
    shape = tuple(array.shape)
    if not is_bias:
        owner = sample
        for one in owners:
            owner = owner[int(one)] if one.isdigit() else getattr(owner, one)
        if hasattr(owner, "in_features") or (len(shape) == 2 and shape[0] > shape[1]):
            value += ".T"
        elif len(shape) == 3:
            value = table.WEIGHTS[2].format(value)
        elif len(shape) == 2 and shape[0] == shape[1]:
            value += "{}"
    place = "m" + "".join(f"[{one}]" if one.isdigit() else f".{one}" for one in name.split("."))
    if hasattr(sample, "named_parameters"):
        return f"{place}.copy_({value})"
    return f"{place} = {value}"


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

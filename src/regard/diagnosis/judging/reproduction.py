"""A few lines of Python that show a wrong number beside the right one.

Owns what a user can run: where the function is found, the arrays, its call and regard's. Must not
know mistakes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import arguments_for
from regard.diagnosis.calls.convention import Answer, Convention
from regard.diagnosis.calls.gradient_probe import GradientProbe, with_gradients
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.differentiation import gradient_of
from regard.diagnosis.process.running import layer_of
from regard.diagnosis.reading.target import is_file

# The layouts in which regard takes arrays as they are, by their number of axes.
_LAYOUTS = ("LD", "HLD", "BHLD", "LM", "BLM")
_INPUTS = {"query": "queries", "key": "keys", "value": "values", "x": "embeddings"}
# What a backward pass gets besides, from regard's result `kept` and the gradient `up`.
_KEPT = {
    "d_output": "up",
    "output": "kept.output",
    "lse": "kept.lse",
    "weights": "kept.weights",
    "delta": "(up * kept.output).sum(-1)",
}


def origin(function: Any) -> tuple[str, ...]:
    """The name of a function, or of a target such as file.py:name, and the lines that import it."""
    if isinstance(function, str):
        place, _, name = function.rpartition(":")
        if place.endswith(".ipynb"):
            return name.rpartition(".")[2], f"# in {place}, where {name} is defined"
        if not is_file(place):
            return _imported(place, name, "")
        stem = os.path.splitext(os.path.basename(place))[0]
        return _imported(stem, name, os.path.dirname(os.path.abspath(place)))
    kind = function if hasattr(function, "__qualname__") else type(function)
    module = sys.modules.get(str(getattr(kind, "__module__", "")))
    names = [name for name, one in vars(module).items() if one is function] if module else []
    if module is None or not names or module.__name__ == "__main__":
        own = str(getattr(function, "__name__", "function"))
        name = own if own.isidentifier() else "function"
        return name, f"# {name} is what was diagnosed"
    folder = ""
    if path := getattr(module, "__file__", None):
        folder = os.path.dirname(os.path.abspath(path))
        for _ in module.__name__.split(".")[1:]:
            folder = os.path.dirname(folder)
    return _imported(module.__name__, names[0], folder)


def _imported(module: str, name: str, folder: str) -> tuple[str, ...]:
    outer, _, rest = name.partition(".")
    lines = [f"import sys; sys.path.insert(0, {folder!r})"] if folder else []
    if all(part.isidentifier() for part in module.split(".")):
        lines.append(f"from {module} import {outer}")
    else:
        lines.append(f"import importlib; {outer} = importlib.import_module({module!r}).{outer}")
    last = name.rpartition(".")[2]
    return (last, *lines, *([f"{last} = {name}"] if rest else []))


def script(tested: FunctionUnderTest, convention: Convention, wrong: Sequence[Probe]) -> str:
    """Lines that call the function where it is wrong, and regard; empty if none can be written.

    `wrong` are the probes on which it is, `convention` is how it was called.
    """
    callee = tested.callee
    if callee.paired or callee.adapted or callee.steps or callee.remembers or convention.shared:
        return ""
    if {"key_t", "cache_k"} & callee.roles.keys():
        return ""
    if not tested.origin or convention.layout not in _LAYOUTS:
        return ""
    size = {probe: sum(array.size for array in probe.inputs.values()) for probe in wrong}
    for probe in sorted(wrong, key=lambda one: (one.has_rules, size[one])):
        plain = probe.forward if isinstance(probe, GradientProbe) else probe
        if isinstance(probe, GradientProbe) and (probe.wanted or "queries" not in probe.inputs):
            continue
        if plain is None or plain.rank != len(convention.layout) or not _is_simple(plain):
            continue
        drawn = _drawn(plain)
        own = with_gradients(drawn, probe.wanted) if isinstance(probe, GradientProbe) else drawn
        answer = tested.ask(convention, own)
        if answer.output is not None and not tested.is_right(convention, own):
            return "\n".join(_lines(tested, convention, own, answer))
    return ""


def _is_simple(probe: Probe) -> bool:
    """Whether regard's own functions take the same arguments, with the same meaning."""
    more = {"context", "sink", "softcap"} & probe.inputs.keys()
    square = probe.sizes["L"] == probe.sizes["S"]
    return probe.is_plain and not (
        more or probe.chunks or probe.window is not None or (probe.causal and not square)
    )


def _drawn(probe: Probe) -> Probe:
    """The same problem with the arrays that the lines draw."""
    rng, inputs = np.random.default_rng(0), dict(probe.inputs)
    drawn: dict[int, Array] = {}
    for name in _INPUTS.values():
        if name in inputs and id(probe.inputs[name]) not in drawn:
            shape = inputs[name].shape
            drawn[id(probe.inputs[name])] = rng.normal(size=shape).round(2)
    own = {name: drawn.get(id(array), array) for name, array in inputs.items()}
    return replace(probe, inputs=own)


def _lines(
    tested: FunctionUnderTest, convention: Convention, probe: Probe, answer: Answer
) -> list[str]:
    callee = tested.callee
    arguments = arguments_for(callee, convention, probe)
    given = {p.name: p.role for p in callee.parameters if p.name in arguments}
    names = {role: name for name, role in given.items() if role in _INPUTS}
    imports = {"numpy": [], "torch": ["import torch"], "jax": ["import jax.numpy as jnp"]}
    function, *found = tested.origin
    layer = ["from types import SimpleNamespace"] if "layer" in given.values() else []
    lines = [*layer, "import numpy as np", "import regard", *imports[callee.framework], *found, ""]
    if callee.made:
        lines.append(f"model = {function}({callee.made})")
        function = "model"
    if callee.weights and callee.framework == "torch":
        lines += [
            f"{function} = {function}.double().eval()",
            "generator = torch.Generator().manual_seed(0)",
            f"for parameter in {function}.parameters():",
            "    parameter.data.uniform_(-0.9, 0.9, generator=generator)",
        ]
    lines.append("rng = np.random.default_rng(0)")
    shapes = {names[role]: arguments[names[role]].shape for role in _INPUTS if role in names}
    lines += [f"{name} = rng.normal(size={shape}).round(2)" for name, shape in shapes.items()]
    of_regard = _of_regard(probe, convention, names)
    if isinstance(probe, GradientProbe):
        lines += _upstream(probe, arguments, given, of_regard)
    texts = {name: _written(name, role, arguments[name]) for name, role in given.items()}
    wrap = {"numpy": "{}", "torch": "torch.tensor({})", "jax": "jnp.asarray({})"}[callee.framework]
    arrays = [name for name in given if isinstance(arguments[name], np.ndarray)]
    texts |= {name: wrap.format(texts[name]) for name in arrays}
    if isinstance(probe, GradientProbe):
        forward = answer
        if tested.forward is not None:
            forward = tested.forward.ask(convention, probe.forward or probe)
        several = f"[{forward.position}]" if ", " in forward.returned else ""
        rest = texts, names, function, of_regard, several
        return [*lines, *_gradient_lines(tested, probe, answer, *rest)]
    assert answer.output is not None
    call = f"{function}({_call(tested, texts)})"
    several = f"[{answer.position}]" if ", " in answer.returned else ""
    lines.append(f"wrong = np.asarray({call}{several}{_detached(tested)})")
    at = _largest(answer.output, probe.result(probe.right))
    right = probe.result(probe.right)[at]
    index = _index(convention, at)
    if of_regard:
        lines.append(f"right = {of_regard.format('attention', '')}")
        return [*lines, f'print("wrong", wrong{index}, " right", right{index})']
    return [*lines, f'print("wrong", wrong{index}, " right", {float(right)!r})']


def _of_regard(probe: Probe, convention: Convention, names: Mapping[str, str]) -> str:
    """The call of regard, with room for its name and more options; "" for projected arrays."""
    if "queries" not in probe.inputs:
        return ""
    own = names.get("x")
    if own is None and not {"query", "key", "value"} <= names.keys():
        return ""
    arrays = ", ".join(own or names[role] for role in ("query", "key", "value"))
    options = ", causal=True" if probe.causal else ""
    if probe.keep is not None:
        options += f", mask={_literal(probe.keep[_unit_axes(probe.keep, convention)])}"
    options += f", scale={probe.scale}" if probe.scale is not None else ""
    return f"regard.{{}}({arrays}{options}{{}})"


def _unit_axes(keep: Array, convention: Convention) -> tuple[int, ...]:
    """The place of the axes that the arrays do not have."""
    return (0,) * max(0, keep.ndim - len(convention.layout))


def _upstream(
    probe: GradientProbe, arguments: Mapping[str, Any], given: Mapping[str, Any], of_regard: str
) -> list[str]:
    """The gradient of the output, and what a backward pass gets besides."""
    assert probe.forward is not None
    whole = probe.inputs[f"d_{probe.forward.result_step}"].shape
    layout = tuple(size for size in whole)
    shape = next((arguments[n].shape for n, role in given.items() if role == "d_output"), layout)
    seed = [len(probe.name), *whole]
    lines = [f"up = np.random.default_rng({seed}).normal(size={shape}).round(2)"]
    if set(given.values()) & (_KEPT.keys() - {"d_output"}):
        more = ", return_weights=True, return_lse=True"
        lines.append(f"kept = {of_regard.format('attention', more)}")
    return lines


def _gradient_lines(
    tested: FunctionUnderTest,
    probe: GradientProbe,
    answer: Answer,
    texts: Mapping[str, str],
    names: Mapping[str, str],
    function: str,
    of_regard: str,
    several: str,
) -> list[str]:
    assert answer.output is not None
    callee, right = tested.callee, probe.result(probe.right)
    (at,) = _largest(answer.output, right)
    part = next(name for name, place in probe.places.items() if place.start <= at < place.stop)
    role = next(role for role, name in _INPUTS.items() if name == part)
    shape = probe.inputs[part].shape
    cell = np.unravel_index(at - probe.places[part].start, shape)
    index = _index_of([int(n) for n in cell], probe.rank)
    order = list(names)
    if callee.is_backward:
        roles = [gradient_of(name) for name in callee.returns]
        place = roles.index(role) if role in roles else [*_INPUTS].index(role)
        wrong = [f"wrong = np.asarray({function}({_call(tested, texts)})[{place}])"]
    elif callee.framework == "torch":
        wrong = [f"t{name} = {texts[name]}.requires_grad_()" for name in names.values()]
        own = ", ".join(f"t{name}" for name in names.values())
        call = _call(tested, {**texts, **{name: f"t{name}" for name in names.values()}})
        wrong += [
            f"out = {function}({call}){several}",
            f"found = torch.autograd.grad(out, [{own}], torch.tensor(up), materialize_grads=True)",
            f"wrong = found[{order.index(role)}].numpy()",
        ]
    else:
        own = ", ".join(names.values())
        inner = _call(tested, {**texts, **{name: name for name in names.values()}})
        arrays = ", ".join(texts[name] for name in names.values())
        wrong = [
            "import jax",
            f"back = jax.vjp(lambda {own}: {function}({inner}){several}, {arrays})[1]",
            f"wrong = back(jnp.asarray(up))[{order.index(role)}]",
        ]
    expected = f"right = {of_regard.format('gradients', ', grad_output=up')}.{role}"
    return [*wrong, expected, f'print("wrong", wrong{index}, " right", right{index})']


def _call(tested: FunctionUnderTest, texts: Mapping[str, str]) -> str:
    """The arguments as they are written in a call."""
    known = [one for one in tested.callee.parameters if one.name in texts]
    positional = [texts[one.name] for one in known if not one.keyword]
    return ", ".join(positional + [f"{one.name}={texts[one.name]}" for one in known if one.keyword])


def _written(name: str, role: Any, value: Any) -> str:
    if role in _INPUTS:
        return name
    if role in _KEPT:
        return _KEPT[role]
    if role == "layer":
        heads = value.split()[0]
        sinks = f", sinks=torch.full(({heads},), -torch.inf))"
        return "SimpleNamespace" + repr(layer_of(value)).removeprefix("namespace")[:-1] + sinks
    return _literal(value) if isinstance(value, np.ndarray) else repr(value)


def _literal(array: Array) -> str:
    """An array of a mask, or of a few numbers."""
    if array.dtype == bool:
        return f"np.array({array.astype(int).tolist()}, bool)"
    if np.isneginf(array).any():
        return f"np.where({_literal(array == 0)}, 0, -np.inf)"
    return f"np.array({array.tolist()})"


def _detached(tested: FunctionUnderTest) -> str:
    return ".detach()" if tested.callee.framework == "torch" else ""


def _largest(got: Array, right: Array) -> tuple[int, ...]:
    """Where two arrays differ most."""
    with np.errstate(all="ignore"):
        apart = np.where(np.isfinite(got), np.abs(got - right), np.inf)
    return tuple(int(n) for n in np.unravel_index(int(apart.argmax()), apart.shape))


def _index(convention: Convention, at: tuple[int, ...]) -> str:
    return _index_of(at, len(convention.layout))


def _index_of(at: Sequence[int], rank: int) -> str:
    """The place of a cell in an array of this rank."""
    return str(list(at[len(at) - rank :]))

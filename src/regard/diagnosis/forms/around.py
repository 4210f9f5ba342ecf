"""Layers around attention, called as attention: over images, or with their input added.

Every pixel of an image is a token. Must not know any probe.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.construction import (
    BY_PLACE,
    SHIFT,
    made_with,
    tables_of,
    without_tables,
)
from regard.diagnosis.forms.images import Form, forms_of, is_of_images, sides_of
from regard.diagnosis.forms.norm_functions import without_norm_functions
from regard.diagnosis.forms.packing import Packing
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import WITH_TABLES, Parameter

_INPUTS = (
    "(x|input_tensor|src|tgt|inputs?|input_|identity|residual|shortcut|skip|hidden_states|latents)"
)
RESIDUAL = re.compile(
    rf"\+ *{_INPUTS}\b(?!\[)|\b{_INPUTS} *\+(?!=? *(pos|1))|"
    r"[\w\])] *\+=? *self\.\w*(drop|att|mha)\w*\("
)

OPTIONAL = re.compile(r"\b(\w+)(?:: [^,=\n]+?)? *= *None\b")
# Axes of the tokens of several frames, as (b, m, n, dim) beside a name.
FRAMES = r"(?i:[^\n(]{0,24}\(\s*b\w*\s*,\s*[mtf]\w*\s*,\s*(?![hgw])[a-z]\w*\s*,\s*[dc]\w*\s*\))"
SIDE = 2  # of a window, so that a small image has several


class OfImages:
    """A function of images as one of tokens. `__wrapped__` is the function.

    It gets small windows, and no biases by place.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        form: Form,
        fixed: Mapping[str, Any],
        option: str = "",
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self.option = option
        self._name, self._form, self.fault, self._fixed = name, form, form.fault, fixed
        self.left_out = tuple(name for name, value in fixed.items() if value is None)

    def __call__(self, **given: Any) -> Any:
        """The output of each token."""
        tokens = given[self._name]
        batch, length, _ = tokens.shape
        image = self._form.image_of(tokens, sides_of(length))
        heads = next((one for name, one in given.items() if role_of(name) == "heads"), 1)
        rows = next((2 * one - 1 for one in self._fixed.values() if one), 1) ** 2
        table = 0 * tokens[0].T[:1, :1] + 0 * tokens.reshape(-1)[: rows * heads].reshape(
            rows, heads
        )
        own = {n: table if one is None else one for n, one in self._fixed.items()}
        result = self.__wrapped__(**given | own | {self._name: image})
        out, *more = result if isinstance(result, tuple) else (result,)
        out = self._form.tokens_of(out, batch, length)
        return (out, *more) if more else out


def of_images(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> list[tuple[Callable[..., Any], list[Parameter]]]:
    """A function of images and weights as functions of tokens, if its text says so."""
    x = next((one for one in parameters if one.required), None)
    if x is None or x.role not in (None, "x") or role_of(x.name) not in (None, "x"):
        return []
    axes = is_of_images(documented_axes(text, [x.name]).get(x.name, ()))
    forms = [one for one in forms_of(text) if one.axes == axes]
    if not forms:
        return []
    fixed: dict[str, Any] = {}
    for one in parameters:
        if role_of(one.name) == "window" and (one.required or one.default):
            fixed[one.name] = SIDE
        elif SHIFT.fullmatch(one.name) and (one.required or one.default):
            fixed[one.name] = SIDE // 2
        elif BY_PLACE.search(one.name) and one.required:
            fixed[one.name] = None
    rest = [one for one in parameters if one.name not in fixed]
    rest = [one for one in rest if one.required or not BY_PLACE.search(one.name)]
    known = [replace(one, keyword=True, role="x" if one is x else one.role) for one in rest]
    function = without_norm_functions(function, function)
    found: list[tuple[Callable[..., Any], list[Parameter]]] = [
        (OfImages(function, x.name, form, fixed), known) for form in forms
    ]
    for shift in (n for n in rest if SHIFT.fullmatch(n.name)):  # 0 by default
        option = f"{shift.name}={SIDE // 2}"
        own = [one for one in known if one.name != shift.name]
        shifted = {**fixed, shift.name: SIDE // 2}
        found += [(OfImages(function, x.name, form, shifted, option), own) for form in forms]
    return found


KERNEL = re.compile("(k|kernel|kernel_?size|window|window_?size|ws|size)")
LEAST_SIDE = 3  # of a map that has neighbourhoods


def of_maps(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """A function of maps (…, H, W, D) of queries, keys and values as one of rows (…, L, D)."""
    roles = {one.name: role_of(one.name) for one in parameters}
    names = [n for n, role in roles.items() if role in ("query", "key", "value")]
    axes = documented_axes(text, names)
    if len(names) != 3 or any(not _are_of_maps(axes.get(name, ())) for name in names):
        return None
    others = [one for one in parameters if one.name not in names]
    asked = {n.name: LEAST_SIDE for n in others if n.required and KERNEL.fullmatch(n.name)}
    left_out = [one.name for one in others if not one.required and BY_PLACE.search(one.name)]
    rest = [one for one in parameters if one.name not in (*asked, *left_out)]

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        sides = sides_of(given[names[0]].shape[-2])
        if min(sides) < LEAST_SIDE:
            raise ValueError("its length is not divisible into rows and columns")
        maps = {n: given[n].reshape(*given[n].shape[:-2], *sides, -1) for n in names}
        return {**given, **asked, **maps}

    def unpack(result: Any) -> Any:
        out, *more = result if isinstance(result, tuple) else (result,)
        out = out.reshape(*out.shape[:-3], -1, out.shape[-1])
        return (out, *more) if more else out

    made = Packing(function, pack, unpack)
    made.left_out = tuple(left_out)
    return made, [replace(one, keyword=True) for one in rest]


def _are_of_maps(words: Sequence[str]) -> bool:
    return [one.lower()[0] for one in words[-3:-1]] == ["h", "w"]


class OfFrames:
    """A layer of (batch, frames, tokens, width) as one of (frames, tokens, width).

    `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, names: Sequence[str]) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._names = names

    def __call__(self, **given: Any) -> Any:
        """The output of each frame of a batch of one."""
        result = self.__wrapped__(**given | {n: given[n][None] for n in self._names if n in given})
        out, *more = result if isinstance(result, tuple) else (result,)
        return (out[0], *more) if more else out[0]


def of_frames(
    layer: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """A layer whose arrays all have an axis of frames, as its text says, as one without it."""
    names = [one.name for one in parameters if one.required]
    if not names or not all(re.search(rf"\b{re.escape(n)}\b{FRAMES}", text) for n in names):
        return None
    return OfFrames(layer, names), [replace(one, keyword=True) for one in parameters]


# Tokens as columns (B, C, L), and as a mistake has them; and the arguments that are tokens.
COLUMNS, COLUMNS_RESHAPED = Form("BCL"), Form("BCL", reshaped="both")
OF_COLUMNS = re.compile(
    r"\(\s*(b|n|bs|batch\w*)\s*[,x]\s*(c|ch|channels?|features)\s*[,x]\s*"
    r"(n|m|t|l|len\w*|time\w*|points?|tokens?|seq\w*|frames)\s*\)",
    re.IGNORECASE,
)
TOKENS = ("x", "query", "key", "value", "context", "key_value")


class AroundAttention:
    """A layer as attention over tokens (B, L, M), without the input that it may add.

    It gets images in a form, or tokens if there is none. `__wrapped__` is the layer.
    """

    left_out: tuple[str, ...] = ()
    option = ""  # which of its readings are judged apart

    def __init__(self, layer: Any, form: Form | None, *, adds: bool) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._call = layer if callable(layer) else layer.forward
        self._form, self.adds = form, adds
        self.fault = "" if form is None else form.fault
        pairs = re.findall(r"=\((\d+), (\d+)\)", made_with(layer))
        self._image = next(((int(rows), int(columns)) for rows, columns in pairs), (0, 0))

    def __call__(self, x: Any, **given: Any) -> Any:
        """The output of each token, without the input if that is added."""
        if self._form is None:
            result = self._call(x, **given)
            out, *more = result if isinstance(result, tuple) else (result,)
            return (out - x, *more)
        batch, length, _ = x.shape
        if self._form.axes == COLUMNS.axes:
            tokens = (n for n, one in given.items() if role_of(n) in TOKENS and one is not None)
            given |= {n: self._form.image_of(given[n], (0, 0)) for n in tokens}
        sides = self._image if math.prod(self._image) == length else sides_of(length)
        image = self._form.image_of(x, sides)
        result = self._call(image, **given)
        out, *more = result if isinstance(result, tuple) else (result,)
        out = self._form.tokens_of(out - image if self.adds else out, batch, length)
        return (out, *more) if more and self._form.axes == COLUMNS.axes else out


def around_attention(
    layer: Any, text: str, helpers: str, *, with_tables: bool = False
) -> Iterator[AroundAttention]:
    """The ways in which a layer may have more around attention, as its code says.

    `helpers` is the code of the classes that it calls, one of which may add the input. With
    `with_tables` only the ways to call a layer over images that has tables of biases by place.
    """
    begin = max(text.find("def forward"), text.find("def __call__"), 0)
    called = text[begin:]  # the constructor adds other things
    first = re.match(r"def \w+\(\s*self,\s*(\w+)", called)
    x = re.escape(first[1]) if first else "x"
    normalised = re.findall(rf"\b(\w+) *= *self\.\w*(?:norm|ln)\w*\( *{x} *\)", called)
    kept = re.findall(rf"^\s*(\w+) *= *{x}\s*(?:#.*)?$", called, re.MULTILINE)
    x = "|".join(dict.fromkeys((x, *normalised, *kept)))
    own = OPTIONAL.findall(called)  # another one is added only if it is given
    found = (next(filter(None, one.groups()), "") for one in RESIDUAL.finditer(called))
    adds = any(name not in own for name in found) or "+ input_tensor" in helpers
    adds |= (
        re.search(rf"return ({x}) \+ |\b({x}) \+ self\.|\+ ({x})\s*$", called, re.MULTILINE)
        is not None
    )
    parts = layer.modules() if hasattr(layer, "modules") else ()
    kinds = {type(part).__name__ for part in parts}
    forms = [*forms_of(text, convolved="Conv2d" in kinds)]
    columns = "Conv1d" in kinds or OF_COLUMNS.search(text) is not None
    if columns and not forms and not with_tables:
        for form, added in itertools.product(
            (COLUMNS, COLUMNS_RESHAPED), (True, False)[not adds :]
        ):
            yield AroundAttention(layer, form, adds=added)
    if with_tables:
        for form in forms if tables_of(layer) else ():
            if not form.fault:
                made = AroundAttention(layer, form, adds=adds)
                made.option = WITH_TABLES
                yield made
        return
    bare = copy.deepcopy(layer) if forms else layer
    left_out = tuple(without_tables(bare)) if forms else ()
    for form, added in itertools.product(forms, (True, False)[not adds :]):
        made = AroundAttention(bare, form, adds=added)
        made.left_out = left_out
        yield made
    if adds and not forms:
        yield AroundAttention(layer, None, adds=True)


# A layer whose result is added behind an activation, and what attention is added to in each head.
BEHIND = re.compile(r"(\w+) *\+ *(?:\w+\.)*(?:relu|gelu|silu|elu)\( *self\.(\w+)\( *\1 *\) *\)")
TO_HEADS = re.compile(r"\b\w*[qQ]\w* *\+ *[\w.]+(?:\.(?:bmm|matmul|einsum)\(| *@ )")


class WithoutTheRest:
    """A layer as attention alone: what it gives with values that are zeros is taken away.

    `__wrapped__` is the layer, whose layers behind attention add nothing.
    """

    adds = True

    def __init__(self, layer: Any, values: str, behind: str) -> None:
        self.__wrapped__ = copy.deepcopy(layer)
        self.__name__ = type(layer).__name__
        parts = dict(self.__wrapped__.named_modules())
        for name, part in parts.items():
            if behind and name.rpartition(".")[2] == behind:
                for own in part.parameters():
                    own.data.zero_()
        self._zeros = {f"{values}.{n}": 0 * p for n, p in parts[values].named_parameters()}

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The output of attention, before the last layer where that comes with the rest."""
        import torch

        whole = self.__wrapped__(*given, **named)
        rest = torch.func.functional_call(self.__wrapped__, self._zeros, given, named)
        return whole - rest


def without_the_rest(layer: Any, text: str) -> WithoutTheRest | None:
    """A layer that adds attention to the projected queries, and a layer of that sum, if it does."""
    behind = BEHIND.search(text)
    if behind is None or TO_HEADS.search(text) is None or not hasattr(layer, "named_modules"):
        return None
    names = [name for name, part in layer.named_modules() if hasattr(part, "in_features")]
    values = [one for one in names if role_of(one.rpartition(".")[2]) == "W_v"]
    return WithoutTheRest(layer, values[0], behind[2]) if len(values) == 1 else None

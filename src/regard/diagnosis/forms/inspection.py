"""Functions and objects: what is called, in which library, and with which weights.

Each way to read a function is one reading. Must not call the function, nor know any probe.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.any_width import of_any_width
from regard.diagnosis.forms.class_of_weights import as_function_of_weights, method_of_weights
from regard.diagnosis.forms.construction import constructed, fresh_weights
from regard.diagnosis.forms.differentiation import (
    Applied,
    Pair,
    is_autograd_function,
    pair_of,
    returned_gradients,
)
from regard.diagnosis.forms.function_readings import Reading, readings_of_function
from regard.diagnosis.forms.object_readings import (
    method_called,
    of_an_object,
    readings_of_object,
)
from regard.diagnosis.forms.source import (
    always_turns,
    code_called,
    code_of,
    code_of_file,
    documentation_of_file,
    is_function,
    may_be_batched,
    prose_of,
    said_of_arguments,
    turns_rows,
    unused_layers,
    without_words,
    words_of,
    words_of_options,
)
from regard.diagnosis.forms.surroundings_read import surroundings_of
from regard.diagnosis.forms.weights import (
    readings_of_weights,
    widths_of,
)
from regard.diagnosis.reading.constructor_arguments import is_module
from regard.diagnosis.reading.documented import (
    axes_of_all,
    documented_axes,
    length_of_any,
    letters_of,
)
from regard.diagnosis.reading.layouts import is_of_keys, layout_said
from regard.diagnosis.reading.libraries import framework_of
from regard.diagnosis.reading.mask_words import what_true_means
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.rule_words import (
    says_one_token,
    says_pieces,
    says_single,
    what_window_means,
    where_causal_aligns,
)
from regard.diagnosis.reading.signature import (
    MASKS,
    MOST_READINGS,
    OF_KEYS,
    Callee,
    Parameter,
    given_windows,
    parameters_of,
)
from regard.diagnosis.reading.wording import (
    CAUSAL,
    COSINE,
    LINEAR,
    caps_in,
    columns_said,
    inverts_mask,
    meant_in,
    place_of_norm,
    said_scale,
    says_added,
    taken_from_one,
)
from regard.errors import OptionError, safe_text

# Code that makes the opposite of a mask.
INVERTS = (
    r"~ *{0}\b|\b{0}\b *(==|!=|<|>)|1(\.0?)? *- *{0}\b|\bnot {0}\b|logical_not\( *{0}\b|"
    r"\b{0}\.logical_not"
)
# Arguments that tell positions.
WHERE = {"pos", "positions", "cos", "sin"}
# Code whose weights are (out, in): torch's names for them, or W_q @ x of a single token.
TURNED = re.compile(
    r"(in|out)_proj_weight|\b\w*_?[qkvo]\d?(?:[\"']\])? @ x(?:_\w+)?\b|\(out\w*, *in\w*\)|"
    r"\(3 ?\*? ?(\w+), *\2\)|= w @ x\b|"
    # An einsum of a weight that is (out, in).
    r"[\"'](\w)(\w) *, *\w*\4 *-> *\w*\3[\"'], *\w*w",
    re.IGNORECASE,
)

# A mask of something: encoder_attention_mask, media_mask.
NAMED_MASK = re.compile("(?<!head)(?<!heads)_mask$|^(?!head).*[a-z]Mask$")


def inspect_function(
    function: Any, roles: Mapping[str, str] | None, heads: int | None, library: str | None
) -> list[Reading]:
    """What to call, and what is known of it before the first call, or an OptionError.

    Every reading of the function, the likeliest first.
    """
    function, method = of_an_object(function, heads)
    kind = function
    if (pair := pair_of(function)) is not None:
        function = pair
    elif is_autograd_function(function):
        function = Applied(function)
    named = function.func if isinstance(function, functools.partial) else function
    name = safe_text(getattr(named, "__name__", type(named).__name__), 60)
    if isinstance(function, Pair):
        name = safe_text(function.name, 60)
        found = readings_of_function(function, function.forward, roles, heads, library, name)
        if weighed := readings_of_weights(function.holder, heads):
            found = [
                (one, replace(callee, weights=weights, heads=count))
                for weights, count, _ in weighed
                for one, callee in found
            ]
        elif inspect.isclass(kind):
            sized = of_any_width(kind, "forward", found[0][1].parameters, heads)
            if sized is not None:
                pair = replace(function, of_width=sized.of)
                found = [(pair if one is function else one, callee) for one, callee in found]
    elif isinstance(function, Applied):
        found = readings_of_function(function, function, roles, heads, "torch", name)
    else:
        is_object = inspect.isclass(function) or not is_function(function)
        try:
            of_weights = as_function_of_weights(function, method)
            if is_object and of_weights is None:
                of_weights = method_of_weights(function, method, heads)
            if of_weights is not None:
                found = readings_of_function(of_weights, of_weights, roles, heads, library, name)
            elif is_object:
                found = readings_of_object(function, roles, heads, library, name, method)
                opaque = found[0][1].opaque
                names = [one.name for one in found[0][1].parameters]
                if opaque and not any(role_of(one) in ("x", "query") for one in names):
                    with contextlib.suppress(OptionError):
                        found = _by_axes(function, heads, library, name, OptionError(opaque))
            else:
                found = readings_of_function(function, function, roles, heads, library, name)
        except OptionError as error:  # what its arguments are may be written beside it
            found = _by_axes(function, heads, library, name, error)
    text, helpers = code_of(function), code_called(function)
    code = without_words(text)
    queries = next((one.name for one in found[0][1].parameters if one.role == "query"), "")
    prose = prose_of(text)
    of_all = f"{prose}\n\n{prose_of(helpers)}"
    of_arguments = prose_of(text, of_arguments=True)
    of_keys = [one for one in found[0][1].parameters if one.role in ("key_mask", *OF_KEYS)]
    masks = [one.name for one in found[0][1].parameters if one.role in (*MASKS, "key_mask")]
    of_ones = taken_from_one(text, masks)
    inverts = any(re.search(INVERTS.format(re.escape(one)), text) for one in masks)
    passed_on = "" if inverts or not masks else prose_of(helpers, of_arguments=True)
    made = found[0][1].made
    of_file = documentation_of_file(function)
    options = words_of_options(named)
    said = f"{name}\n{text}\n{of_file}"
    axes = documented_axes(text, [one.name for one in found[0][1].parameters])
    own_roles = found[0][1].roles
    arrays = [own_roles[one].name for one in ("query", "key", "value") if one in own_roles]
    if (alike := axes_of_all(helpers)) and all(axes.get(n, alike) == alike for n in arrays):
        axes = dict.fromkeys(arrays, alike) | axes
    own: dict[str, Any] = {
        "layout": layout_said(text, queries) if queries else "",
        "mask_of_keys": any(
            is_of_keys(f"{text}\n{helpers}", one.name)
            for one in found[0][1].parameters
            if one.role == "mask"
        ),
        "inverts_mask": inverts_mask(text, [one.name for one in found[0][1].parameters]),
        "caps": tuple(
            dict.fromkeys(
                (
                    *_caps_by_default(found[0][1]),
                    *caps_in(made),
                    *caps_in(code_of_file(function)),
                )
            )
        ),
        "batched": may_be_batched(function, text),
        "window_means": what_window_means(of_all, [*found[0][1].parameters, *given_windows(made)]),
        "causal_aligns": where_causal_aligns(of_all),
        "says_pieces": says_pieces(prose),
        "says_single": says_single(prose) and not says_pieces(prose),
        "says_linear": LINEAR.search(f"{name}\n{text}") is not None,
        "says_transposed": TURNED.search(text) is not None,
        "columns_said": columns_said(text, code_of_file(function)),
        "norm_place": place_of_norm(f"{said}\n{helpers}"),
        "says_causal": CAUSAL.search(f"{code}\n{without_words(helpers)}") is not None,
        "says_cosine": COSINE.search(f"{name}\n{text}{helpers}") is not None,
        "axes": letters_of(axes) or {},
        "meant": meant_in(f"{name}\n{text}", f"{name}\n{code}", helpers, f"{of_all}\n{of_file}"),
        "says_added": says_added(said_of_arguments(text)) and not of_ones,
        "said_scale": said_scale(f"{name}\n{words_of(text)}\n{options}\n{of_file}"),
        "key_mask_means": what_true_means(of_arguments, of_keys),
    }
    found = [(called, _with_named_mask(one, own["axes"])) for called, one in found]
    found = _by_their_axes(found, own["axes"])
    if says_one_token(text, [one.name for one in found[0][1].parameters if one.role == "x"]):
        found = [
            (called, one if "cache" not in one.roles else replace(one, steps=one.steps or "kept"))
            for called, one in found
        ]
    turns, unused = turns_rows(text), unused_layers(function)
    always = always_turns(function) and not WHERE & found[0][1].roles.keys()
    found = [
        (
            called,
            replace(
                one,
                has_positions=one.has_positions
                or any(_of_wrappers(called, "has_table"))
                or (turns and _keeps_rows(one))
                or always,
                by_head=getattr(called, "by_head", one.by_head),
                without=(*one.without, *itertools.chain(*_of_wrappers(called, "left_out"))),
                unused=(*unused, *itertools.chain(*_of_wrappers(called, "unread"))),
            ),
        )
        for called, one in found
    ]
    found = [*_with_surroundings(function, found), *found]
    if "finfo(" in code_of_file(function) and is_function(
        function
    ):  # -1.8e308 times a mask is infinite or NaN
        of_torch = [one for one in found if one[1].framework == "torch"]
        found += [(called, replace(one, narrow=True)) for called, one in of_torch]
    paired = isinstance(function, Pair)
    if paired or found[0][1].is_backward:
        written = function.backward if isinstance(function, Pair) else function
        own |= {"returns": returned_gradients(written), "paired": paired}
        own["reads_one_length"] = bool(arrays) and _reads_one_length(code_of(written), arrays)
    lengths = {length_of_any(text, one) for one in arrays[:2]}
    if len(arrays) > 1 and len(lengths) == 1 and lengths != {""}:
        own["reads_one_length"] = True
    return [
        (
            called,
            replace(
                callee,
                number=number,
                mask_means=what_true_means(
                    of_arguments, _by_names(callee.parameters), of_ones=of_ones
                )
                or what_true_means(passed_on, _by_names(callee.parameters))
                or what_true_means(of_file, _by_names(callee.parameters)),
                **own,
            ),
        )
        for number, (called, callee) in enumerate(found[:MOST_READINGS])
    ]


def _with_surroundings(function: Any, found: list[Reading]) -> Iterator[Reading]:
    """The readings of a function of weights with what its code computes around attention."""
    if not is_function(function) or found[0][1].is_backward:
        return
    for called, callee in found:
        first = next((p for p in callee.parameters if p.role in ("x", "query")), None)
        if callee.kind == "projected" and first is not None:
            around = surroundings_of(function, first.name)
            yield from [(called, replace(callee, around=around))] if around else []


def _of_wrappers(called: Any, name: str) -> Iterator[Any]:
    """What the wrappers of a function, one around the other, say by an attribute."""
    while hasattr(called, "__wrapped__"):
        yield getattr(called, name, ())
        called = called.__wrapped__


def _reads_one_length(text: str, arrays: Sequence[str]) -> bool:
    """Whether code reads the lengths of the first array alone: others are as long."""

    def reads(name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\.(shape|size)\b|\blen\({name}\)", text) is not None

    return reads(arrays[0]) and not any(map(reads, arrays[1:]))


def _keeps_rows(callee: Callee) -> bool:
    """Whether keys are kept between calls, and nothing says the positions of new ones."""
    return not WHERE & callee.roles.keys() and (bool(callee.steps) or "cache" in callee.roles)


def _caps_by_default(callee: Callee) -> Iterator[float]:
    """The limit that a function has unless it is told another one."""
    own = callee.roles.get("softcap")
    if own is not None and type(own.default) in (int, float) and own.default > 0:
        yield float(own.default)


def _by_their_axes(found: list[Reading], axes: Mapping[str, str]) -> list[Reading]:
    """The same where a guess has the axes of rows of vectors, those of distances, or is a count.

    Vectors of distances are e: (L, D), and the lengths of texts n: (B,).
    """
    queries = next((one.name for one in found[0][1].parameters if one.role == "query"), "")
    whole = axes.get(queries, "")
    alike = {n for n, own in axes.items() if len(own) > 1 and own[-1] == whole[-1:]}
    taken, seen = list[Reading](), set[tuple[str | None, ...]]()
    for called, callee in found:
        own = tuple(
            replace(one, role="distances", guessed=False)
            if one.guessed and one.name in alike and set(axes[one.name]) <= set(whole)
            else replace(one, role="lengths", guessed=False)
            if axes.get(one.name) == "B" and (one.guessed or _counts_tokens(one))
            else one
            for one in callee.parameters
        )
        roles = tuple(one.role for one in own)  # a default may be anything
        if roles == tuple(one.role for one in callee.parameters) or roles not in seen:
            taken.append((called, replace(callee, parameters=own)))
        seen.add(roles)
    return taken


def _with_named_mask(callee: Callee, axes: Mapping[str, str]) -> Callee:
    """The same with its only mask as one, whatever it is a mask of by its name: media_mask.

    It may be left out, and is one of keys where its axes are those of texts and tokens.
    """
    if {*MASKS, "key_mask"} & callee.roles.keys():
        return callee
    named = [one for one in callee.parameters if NAMED_MASK.search(one.name) and not one.role]
    if len(named) != 1 or named[0].required or named[0].default is not None or named[0].kind:
        return callee
    role = "key_mask" if re.fullmatch("B[^B1]", axes.get(named[0].name, "")) else "mask"
    own = (replace(one, role=role) if one is named[0] else one for one in callee.parameters)
    return replace(callee, parameters=tuple(own))


def _role_of_mask(one: Parameter) -> str | None:
    role = role_of(one.name)
    return role if role in (*MASKS, "key_mask") else None


def _by_names(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Parameters with the roles that their names have, where axes alone say how they are called."""
    return [replace(one, role=one.role or role_of(one.name)) for one in parameters]


def _counts_tokens(one: Parameter) -> bool:
    """Whether an argument that may be left out says how many tokens a text has, by its name."""
    return one.role is None and re.search("len(gth)?s?$", one.name) is not None


def _by_axes(
    function: Any, heads: int | None, library: str | None, name: str, error: OptionError
) -> list[Reading]:
    """A function of arguments without known roles, if its code or documentation has their axes."""
    text, called = code_of(function), function
    if inspect.isclass(function) or not is_function(function):
        made = constructed(function, heads)[0] if inspect.isclass(function) else function
        method = method_called(type(made))
        called = fresh_weights(made) if is_module(type(made)) else getattr(made, method, None)
        if called is None:
            raise error
    described = called.forward if hasattr(called, "state_dict") else called
    parameters = parameters_of(described)
    axes = letters_of(documented_axes(text, [one.name for one in parameters])) or {}
    first = next((one for one in parameters if "T" in axes.get(one.name, "")), None)
    if first is None or any(one.required and one.name not in axes for one in parameters):
        raise error
    known = tuple(
        replace(one, role="x" if one is first else None if one.required else _role_of_mask(one))
        for one in parameters
    )
    framework = "torch" if hasattr(called, "state_dict") else framework_of(described)
    callee = Callee(name, known, library or framework, opaque=str(error))
    if called is not function:
        callee = replace(callee, widths=widths_of(getattr(called, "__self__", called)))
    return [(called, callee)]

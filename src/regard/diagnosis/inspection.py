"""Functions and objects: what is called, in which library, and with which weights.

Each way to read a function is one reading. Must not call the function, nor know any probe.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.boundary.arrays import Array
from regard.diagnosis.adapting import (
    as_used,
    from_dictionary,
    keeps_state,
    with_configuration,
)
from regard.diagnosis.around import around_attention, of_images
from regard.diagnosis.cache_objects import with_cache_object
from regard.diagnosis.caches import Remembering
from regard.diagnosis.construction import (
    as_written,
    constructed,
    fresh_weights,
    heads_made_with,
    is_module,
    made_with,
    without,
)
from regard.diagnosis.differentiation import (
    Applied,
    Pair,
    is_autograd_function,
    pair_of,
    returned_gradients,
)
from regard.diagnosis.documented import documented_axes, letters_of
from regard.diagnosis.fused_weights import with_fused_weights
from regard.diagnosis.layouts import is_of_keys, layout_said
from regard.diagnosis.mask_words import what_true_means
from regard.diagnosis.packing import (
    unpacked,
    with_borders,
    with_one_window,
    with_texts_of_both,
)
from regard.diagnosis.rule_words import says_pieces, what_window_means, where_causal_aligns
from regard.diagnosis.signature import (
    MOST_READINGS,
    OF_KEYS,
    STEPS,
    Callee,
    Parameter,
    given_windows,
    heads_bound,
    parameters_of,
    role_of,
    text_of,
    with_roles,
    without_weights,
)
from regard.diagnosis.source import (
    code_called,
    code_of,
    code_of_file,
    documentation_of_file,
    is_function,
    may_be_batched,
    prose_of,
    turns_rows,
    unused_layers,
    words_of,
)
from regard.diagnosis.tables import from_tables, with_forms
from regard.diagnosis.trees import HEADS, Weighed, with_weights
from regard.diagnosis.weights import (
    Read,
    has_positions,
    head_count,
    key_heads,
    readings_of_weights,
    widths_of,
)
from regard.diagnosis.wording import (
    CAUSAL,
    COSINE,
    LINEAR,
    caps_in,
    inverts_mask,
    is_unscaled,
    meant_in,
    says_added,
)
from regard.errors import OptionError, safe_text

LIBRARIES = ("numpy", "torch", "jax")
# Methods that are called if an object has no __call__, in this order.
METHODS = ("__call__", "forward", "attend", "attention", "apply", "call", "step", "decode")
# The length before the batch: L, B, E = x.shape; (seq_len, batch, dim); tgt_len, bsz; time-major.
ROWS_FIRST = re.compile(
    r"\b(l|t|s|n|seq\w*|\w*len\w*|time)\s*,\s*(b|n|bs|bsz|batch\w*)\s*,|"
    r"(seq\w*|time|length|rows)[- _](first|major)|batch_first=False|\b[lts] b [dcemh]\b",
    re.IGNORECASE,
)
Reading = tuple[Callable[..., Any], Callee]


def inspect_function(
    function: Any, roles: Mapping[str, str] | None, heads: int | None, library: str | None
) -> list[Reading]:
    """What to call, and what is known of it before the first call, or an OptionError.

    Every reading of the function, the likeliest first.
    """
    if (pair := pair_of(function)) is not None:
        function = pair
    elif is_autograd_function(function):
        function = Applied(function)
    named = function.func if isinstance(function, functools.partial) else function
    name = safe_text(getattr(named, "__name__", type(named).__name__), 60)
    if isinstance(function, Pair):
        name = safe_text(function.name, 60)
        found = _readings_in(function, function.forward, roles, heads, library, name)
        if weighed := readings_of_weights(function.holder, heads):
            weights, count = weighed[0]
            found = [(one, replace(callee, weights=weights, heads=count)) for one, callee in found]
    elif isinstance(function, Applied):
        found = _readings_in(function, function, roles, heads, "torch", name)
    else:
        is_object = inspect.isclass(function) or not is_function(function)
        try:
            if is_object:
                found = _object_readings(function, roles, heads, library, name)
                opaque = found[0][1].opaque
                names = [one.name for one in found[0][1].parameters]
                if opaque and not any(role_of(one) in ("x", "query") for one in names):
                    with contextlib.suppress(OptionError):
                        found = _by_axes(function, heads, library, name, OptionError(opaque))
            else:
                found = _readings_in(function, function, roles, heads, library, name)
        except OptionError as error:  # what its arguments are may be written beside it
            found = _by_axes(function, heads, library, name, error)
    text, helpers = code_of(function), code_called(function)
    queries = next((one.name for one in found[0][1].parameters if one.role == "query"), "")
    prose = prose_of(text)
    of_all = f"{prose}\n\n{prose_of(helpers)}"
    of_arguments = prose_of(text, of_arguments=True)
    of_keys = [one for one in found[0][1].parameters if one.role in ("key_mask", *OF_KEYS)]
    made = found[0][1].made
    own: dict[str, Any] = {
        "layout": layout_said(text, queries) if queries else "",
        "mask_of_keys": any(
            is_of_keys(text, one.name) for one in found[0][1].parameters if one.role == "mask"
        ),
        "inverts_mask": inverts_mask(text, [one.name for one in found[0][1].parameters]),
        "caps": caps_in(code_of_file(function)),
        "batched": may_be_batched(function, text),
        "window_means": what_window_means(of_all, [*found[0][1].parameters, *given_windows(made)]),
        "causal_aligns": where_causal_aligns(of_all),
        "says_pieces": says_pieces(prose),
        "unused": unused_layers(function),
        "says_linear": LINEAR.search(f"{name}\n{text}") is not None,
        "says_transposed": "in_proj_weight" in text or "out_proj_weight" in text,
        "says_causal": CAUSAL.search(text + helpers) is not None,
        "says_cosine": COSINE.search(f"{name}\n{text}{helpers}") is not None,
        "axes": letters_of(documented_axes(text, [one.name for one in found[0][1].parameters]))
        or {},
        "meant": meant_in(f"{name}\n{text}", helpers),
        "says_added": says_added(words_of(text)),
        "unscaled": is_unscaled(f"{name}\n{words_of(text)}\n{documentation_of_file(function)}"),
        "key_mask_means": what_true_means(of_arguments, of_keys),
    }
    found = _by_their_axes(found, own["axes"])
    paired = isinstance(function, Pair)
    if paired or found[0][1].is_backward:
        written = function.backward if isinstance(function, Pair) else function
        own |= {"returns": returned_gradients(written), "paired": paired}
    return [
        (
            called,
            replace(
                callee,
                number=number,
                mask_means=what_true_means(of_arguments, callee.parameters),
                **own,
            ),
        )
        for number, (called, callee) in enumerate(found[:MOST_READINGS])
    ]


def _by_their_axes(found: list[Reading], axes: Mapping[str, str]) -> list[Reading]:
    """The same where a guess has the axes of rows of vectors, those of distances, or is a count.

    Vectors of distances are e: (L, D), and the lengths of texts n: (B,).
    """
    queries = next((one.name for one in found[0][1].parameters if one.role == "query"), "")
    whole = axes.get(queries, "")
    alike = {n for n, own in axes.items() if len(own) > 1 and own[-1] == whole[-1:]}
    taken, seen = list[Reading](), set[tuple[Parameter, ...]]()
    for called, callee in found:
        own = tuple(
            replace(one, role="distances", guessed=False)
            if one.guessed and one.name in alike and set(axes[one.name]) <= set(whole)
            else replace(one, role="lengths", guessed=False)
            if one.guessed and axes.get(one.name) == "B"
            else one
            for one in callee.parameters
        )
        if own == callee.parameters or own not in seen:
            taken.append((called, replace(callee, parameters=own)))
        seen.add(own)
    return taken


def _by_axes(
    function: Any, heads: int | None, library: str | None, name: str, error: OptionError
) -> list[Reading]:
    """A function of arguments without known roles, if its code or documentation has their axes."""
    text, called = code_of(function), function
    if inspect.isclass(function) or not is_function(function):
        made = constructed(function, heads)[0] if inspect.isclass(function) else function
        method = next((one for one in METHODS if _own_method(type(made), one)), "")
        called = fresh_weights(made) if is_module(type(made)) else getattr(made, method, None)
        if called is None:
            raise error
    described = called.forward if hasattr(called, "state_dict") else called
    parameters = parameters_of(described)
    axes = letters_of(documented_axes(text, [one.name for one in parameters])) or {}
    first = next((one for one in parameters if "T" in axes.get(one.name, "")), None)
    if first is None or any(one.required and one.name not in axes for one in parameters):
        raise error
    known = tuple(replace(one, role="x" if one is first else None) for one in parameters)
    callee = Callee(name, known, library or _framework_of(described), opaque=str(error))
    if called is not function:
        callee = replace(callee, widths=widths_of(getattr(called, "__self__", called)))
    return [(called, callee)]


def _readings_in(
    function: Callable[..., Any],
    described: Callable[..., Any],
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    name: str,
) -> list[Reading]:
    """The readings in the library that the code uses, then in others; `described` has its names."""
    framework = library or _framework_of(described)
    others = [] if library else [x for x in LIBRARIES if x != framework and x in sys.modules]
    found = []
    for one in (framework, *others):
        found += _function_readings(function, parameters_of(described), roles, heads, one, name)
    return found


def _function_readings(
    function: Callable[..., Any],
    known: Sequence[Parameter],
    roles: Mapping[str, str] | None,
    heads: int | None,
    framework: str,
    name: str,
) -> list[Reading]:
    """The readings of a function of arrays, or of a dictionary or a tree of weights."""
    called, parameters = function, as_used(known, code_of(function))
    if not roles and (adapted := from_dictionary(called, parameters)) is not None:
        called, parameters = adapted
    for simpler in () if roles else (with_borders, with_one_window, with_texts_of_both):
        if (simple := simpler(called, parameters)) is not None:
            called, parameters = simple
    parameters = [_as_block(one, code_of(function)) for one in parameters]
    heads = heads or heads_bound(function)
    if not roles and (sized := with_configuration(called, parameters, heads or HEADS)) is not None:
        (called, parameters), heads = sized, heads or HEADS
    if not roles and (kept := with_cache_object(called, called, parameters, heads)) is not None:
        return _keeping_readings(*kept, framework, heads, name)
    trees = [] if roles else with_weights(called, parameters, framework)
    plain_one: list[Weighed] = [(called, parameters, {}, None)]
    found: list[Reading] = []
    images: list[Reading] = []
    text = code_of(function)
    for own, taken, weights, count in trees or plain_one:
        for image, known in of_images(own, taken, text) if weights else ():
            images += _readings_of(
                image, known, weights, roles, heads or count, framework, name, function
            )
        found += _readings_of(own, taken, weights, roles, heads or count, framework, name, function)
    more = (one for own, callee in found for one in _with_blocks_of_one(own, callee))
    return [*found, *images, *more, *_with_own_window(found, text)]


def _as_block(one: Parameter, text: str) -> Parameter:
    """A window that is said to be the size of blocks, in which all is seen: one block holds all."""
    name = re.escape(one.name)
    is_block = rf"(blocks|chunks|pieces|cut into [^.]{{0,20}}) of (size |length )?`*{name}\b"
    if role_of(one.name) == "window" and re.search(is_block, text) is not None:
        return replace(one, role="longest")
    return one


def _keeping_readings(
    called: Callable[..., Any],
    parameters: list[Parameter],
    framework: str,
    heads: int | None,
    name: str,
) -> list[Reading]:
    """The readings of a function that keeps keys and values in an object that it gets."""
    found = []
    for own in with_roles(parameters, {}):
        callee = Callee(
            name, without_weights(own), framework, {}, heads, adapted=True, remembers=True
        )
        found += [(called, callee), *((called, replace(callee, steps=one)) for one in STEPS)]
    return found


def _readings_of(
    called: Callable[..., Any],
    parameters: list[Parameter],
    weights: Mapping[str, Array],
    roles: Mapping[str, str] | None,
    heads: int | None,
    framework: str,
    name: str,
    function: Callable[..., Any],
) -> list[Reading]:
    """The readings of a function of arrays with each reading of its parameters."""
    counts: list[int | None] = [heads]
    if weights and heads is None:
        has_flag = any(role_of(one.name) == "heads" for one in parameters)
        counts = [4] if has_flag else [1, 2, 3, 4]
    found: list[Reading] = []
    steps_only = any(one.required and role_of(one.name) == "cache" for one in parameters)
    packed = [] if roles or weights or steps_only else unpacked(called, parameters)
    for other, taken in packed:
        for own in with_roles(taken, {}):
            own = without_weights(own)
            found.append((other, Callee(name, own, framework, {}, heads, adapted=True)))
    if packed:
        return found
    if not roles and (tabled := from_tables(called, parameters)) is not None:
        called, parameters = tabled
    fused = [] if roles or weights else with_fused_weights(called, parameters)
    for other, taken in fused:
        found += _readings_of(other, taken, {}, {}, heads, framework, name, function)
    if fused:
        return found
    for own, count in itertools.product(with_roles(parameters, dict(roles or {})), counts):
        own = own if weights else without_weights(own)
        whole = Callee(name, own, framework, weights, count, adapted=called is not function)
        for callee in with_forms(whole):
            if "cache" not in callee.roles:
                found.append((called, callee))
                if heads and not roles and not weights and callee.kind == "arrays":
                    found.append((called, replace(callee, packs=True)))
                continue
            cache = callee.roles["cache"]
            value = next((one.name for one in own if one.role in ("value", "x")), "")
            stepping = Remembering(called, "", cache.name, value, count)
            keyed = tuple(replace(one, keyword=True) for one in own)
            steps = [(stepping, replace(callee, parameters=keyed, steps=one)) for one in STEPS]
            found += steps if cache.required else [(called, callee), *steps]
    return found


def _with_own_window(found: Sequence[Reading], text: str) -> Iterator[Reading]:
    """The same with the window that is the default, where lengths have to be multiples of it."""
    for called, callee in found:
        one = callee.roles.get("window")
        if one is not None and not one.required and re.search(rf"%\s*{one.name}\b", text):
            own = tuple(replace(p, role=None) if p is one else p for p in callee.parameters)
            yield called, replace(callee, parameters=own)


def _with_blocks_of_one(called: Callable[..., Any], callee: Callee) -> Iterator[Reading]:
    """The same with blocks of one token, for a function whose default refuses other lengths."""
    if any(one.role == "block" and not one.required for one in callee.parameters):
        own = (replace(p, required=p.required or p.role == "block") for p in callee.parameters)
        yield called, replace(callee, parameters=tuple(own))


def _object_readings(
    thing: Any,
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    name: str,
) -> list[Reading]:
    """The readings of an object with its weights, or of objects made of a class."""
    kind = thing if inspect.isclass(thing) else type(thing)
    method = next((one for one in METHODS if _own_method(kind, one)), "")
    if is_module(kind):
        method = "forward"
    if not method:
        raise OptionError(
            f"diagnose needs a function, or an object that can be called, not "
            f"{safe_text(repr(thing), 60)}"
        )
    found: list[Reading] = []
    made = constructed(thing, heads) if inspect.isclass(thing) else [thing]
    objects = [fresh_weights(one) for one in made]
    if not inspect.isclass(thing) and not is_module(kind):
        objects.append(thing)  # its weights may have to agree with something else in it
    if is_module(kind):  # some compute with constants that only float32 has
        objects += [fresh_weights(one, narrow=True) for one in made]
    left_out = tuple(without(made[0])[:4])
    for number, own in enumerate(objects):
        called = getattr(own, method)
        framework = library or ("torch" if is_module(kind) else _framework_of(called))
        weighed, opaque = _weights_of(own, heads or head_count(own) or heads_made_with(own), name)
        if not weighed:
            weighed = [({}, heads or head_count(own))]
        known = parameters_of(called)
        remembers, rows_first = keeps_state(called), _may_have_rows_first(kind)
        target: Callable[..., Any] = Remembering(own, method) if remembers else own
        if not callable(target):
            target = called
        if not roles and (adapted := from_dictionary(called, known)) is not None:
            target, known = adapted
        elif not roles and (
            kept := with_cache_object(own if callable(own) else called, called, known, heads)
        ):
            (target, known), remembers = kept, True
        if around := [*around_attention(own, code_of(thing))]:
            role = "x" if sum(one.required for one in known) == 1 else known[0].role
            known = [replace(known[0], role=role), *(replace(o, keyword=True) for o in known[1:])]
        if not roles and (tabled := from_tables(target, known)) is not None:
            target, known = tabled
        targets: list[Callable[..., Any]] = [*around, target]
        for target, (weights, count) in itertools.product(targets, weighed):
            for parameters in with_roles(known, dict(roles or {})):
                whole = replace(
                    Callee(name, parameters, framework, weights, count, made=made_with(own)),
                    without=left_out + ("residual",) * getattr(target, "adds", False),
                    opaque=opaque,
                    widths=widths_of(own),
                    has_positions=has_positions(own) or (remembers and turns_rows(code_of(thing))),
                    narrow=is_module(kind) and number >= len(made),
                    remembers=remembers,
                    rows_first=rows_first,
                    adapted=target not in (own, called) or not as_written(own, thing),
                )
                for callee in with_forms(whole):
                    steps = [(target, replace(callee, steps=one)) for one in STEPS if remembers]
                    plain_one = [(target, callee)]
                    is_step = method in ("step", "decode")
                    found += steps if is_step and remembers else [*plain_one, *steps]
    return found


def _weights_of(own: Any, count: int | None, name: str) -> tuple[list[Read], str]:
    """The readings of an object's weights; or none, and why they cannot be used."""
    try:
        weighed = readings_of_weights(own, count)
        for weights, heads in weighed[:1]:
            if weights:
                key_heads(weights, heads or 1)
    except OptionError as error:
        return [], str(error)
    except ValueError:
        weighed = []
    if weighed or not _has_matrices(own):
        return weighed, ""
    return [], (
        f"the weights of {name} cannot be recognised; call the layers W_q, W_k, W_v (or "
        "query, q_proj, to_q, qkv, …) and W_o, or give a function of embeddings and weights"
    )


def _may_have_rows_first(kind: type) -> bool:
    """Whether (L, B, M) may be meant: torch's own layers do, others if their code mentions it."""
    if not is_module(kind) or kind.__module__.startswith("torch."):
        return True
    text = text_of(kind)
    return not text or ROWS_FIRST.search(text) is not None


def _own_method(kind: Any, name: str) -> bool:
    return inspect.isfunction(getattr(kind, name, None)) or (
        name == "__call__"
        and "__call__" in dir(kind)
        and kind.__call__ is not type.__call__
        and not isinstance(kind.__call__, type(object().__str__))
    )


def _has_matrices(thing: Any) -> bool:
    """Whether a torch module has weights with rows and columns."""
    own = thing.parameters() if hasattr(thing, "state_dict") else ()
    return any(parameter.ndim > 1 for parameter in own)


def _framework_of(function: Any) -> str:
    """The library whose arrays a function works on: the one that its code uses."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "__func__", inner)  # of a method
    if not inspect.isfunction(inner):
        home = str(getattr(inner, "__module__", None) or type(inner).__module__)
        if home.partition(".")[0] in ("torch", "jax", "jaxlib"):
            return home.partition(".")[0].removesuffix("lib")
        inner = inspect.getattr_static(type(inner), "__call__", None)
    if not inspect.isfunction(inner):
        return "numpy"
    if (inner.__module__ or "").partition(".")[0] in ("torch", "jax"):
        return inner.__module__.partition(".")[0]
    used = inspect.getclosurevars(inner)
    of_code = _libraries([*used.nonlocals.values(), *used.globals.values()])
    of_module = _libraries(inner.__globals__.values())
    for libraries in (of_code, of_module):
        for framework in ("torch", "jax"):
            if framework in libraries and "numpy" not in libraries:
                return framework
    return next((name for name in ("torch", "jax") if name in of_code), "numpy")


def _libraries(things: Iterable[Any]) -> set[str]:
    """The packages that modules, functions and classes come from."""
    homes = (
        thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
        for thing in things
    )
    return {str(home).partition(".")[0] for home in homes}

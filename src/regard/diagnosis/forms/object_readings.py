"""The ways to read an object: which of its methods is called, and with which weights.

Must not call the function, nor know any probe.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import (
    as_self_attention,
    from_dictionary,
    keeps_state,
    with_sink,
)
from regard.diagnosis.forms.any_width import of_any_width
from regard.diagnosis.forms.around import (
    AroundAttention,
    around_attention,
    of_frames,
    without_the_rest,
)
from regard.diagnosis.forms.cache_objects import with_cache_object
from regard.diagnosis.forms.caches import Remembering, with_one_text
from regard.diagnosis.forms.channels import of_channels
from regard.diagnosis.forms.construction import (
    as_one_window,
    as_written,
    constructed,
    fresh_weights,
    heads_made_with,
    learned_log,
    made_with,
    tables_of,
    without,
)
from regard.diagnosis.forms.first_asks import first_asks
from regard.diagnosis.forms.function_readings import Reading, with_packed_heads
from regard.diagnosis.forms.graphs import of_graph
from regard.diagnosis.forms.joint_streams import (
    names_of_streams,
    of_joint_streams,
    with_equal_weights,
)
from regard.diagnosis.forms.kept_arrays import with_arrays_in_one
from regard.diagnosis.forms.media import of_one_image
from regard.diagnosis.forms.neutral_arguments import with_neutral
from regard.diagnosis.forms.norm_functions import without_norm_functions
from regard.diagnosis.forms.packing import with_ids
from regard.diagnosis.forms.pairs import (
    TRIANGLE,
    are_pairs,
    called_as_rows,
    matrix_of_pairs,
    options_of,
    orientation,
)
from regard.diagnosis.forms.pooled_maps import PooledMap, pooled_maps
from regard.diagnosis.forms.precomputed import from_precomputed
from regard.diagnosis.forms.reduced_maps import OF_MAPS, reduced_maps
from regard.diagnosis.forms.source import (
    code_called,
    code_of,
    documentation_of_file,
    turns_rows,
)
from regard.diagnosis.forms.tables import from_tables, with_forms
from regard.diagnosis.forms.weights import (
    Read,
    has_positions,
    head_count,
    key_heads,
    readings_of_weights,
    widths_of,
)
from regard.diagnosis.reading.constructor_arguments import is_module
from regard.diagnosis.reading.libraries import framework_of
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import (
    STEPS,
    Callee,
    parameters_of,
    text_of,
    with_roles,
    without_weights,
)
from regard.errors import OptionError, safe_text

# Methods that are called if an object has no __call__, in this order.
METHODS = ("__call__", "forward", "attend", "attention", "apply", "call", "step", "decode", "run")
# The length before the batch: L, B, E = x.shape; (seq_len, batch, dim); tgt_len, bsz; time-major.
ROWS_FIRST = re.compile(
    r"\b(l|t|s|n|h ?\*? ?w|seq\w*|\w*len\w*|time)\s*,\s*(b|n|bs|bsz|batch\w*)\s*,|"
    r"(seq\w*|time|length|rows)[- _](first|major)|batch_first=False|\b[lts] b [dcemh]\b",
    re.IGNORECASE,
)


def of_an_object(function: Any, heads: int | None) -> tuple[Any, str]:
    """A method that was named with its class: that of an object made here, or the class.

    A method of an object with weights is called with these. The class where it is one of the usual
    methods, where it depends on the object's state or weights, or where it is a backward pass of
    what forward has kept; and which of its methods.
    """
    if inspect.ismethod(function) and readings_of_weights(function.__self__, heads):
        return function.__self__, function.__name__
    own, _, name = getattr(function, "__qualname__", "").partition(".")
    written = inspect.unwrap(function) if callable(function) else function  # by a decorator
    kind = getattr(written, "__globals__", {}).get(own)
    if not inspect.isfunction(function) or not inspect.isclass(kind) or name not in vars(kind):
        return function, ""
    first, *others = [*inspect.signature(function).parameters, ""]
    if first != "self":
        return function, ""
    if name in METHODS:
        return kind, name
    if name == "backward" and not any(role_of(one) == "query" for one in others):
        return kind, ""
    made = constructed(kind, heads)[0]
    bound = getattr(made, name)
    required = [one for one in parameters_of(bound) if one.required]
    has_weights = len(required) == 1 and bool(readings_of_weights(made, heads))
    return (kind, name) if has_weights or keeps_state(bound) else (bound, "")


def readings_of_object(
    thing: Any,
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    name: str,
    method: str = "",
) -> list[Reading]:
    """The readings of an object with its weights, or of objects made of a class.

    It is called by its `method`, or else by the first of the usual ones that it has.
    """
    kind = thing if inspect.isclass(thing) else type(thing)
    named = method not in ("", "forward", "__call__")
    method = method or method_called(kind)
    if is_module(kind) and not named:
        method = "forward"
    if not method:
        raise OptionError(
            f"diagnose needs a function, or an object that can be called, not "
            f"{safe_text(repr(thing), 60)}"
        )
    of_pairs = not roles and TRIANGLE.search(text_of(kind))
    if of_pairs and (own := _readings_of_pairs(thing, heads, library, name, method)):
        return own
    if not roles and (own := _readings_of_streams(thing, heads, library, name, method)):
        return own
    found: list[Reading] = []
    made = constructed(thing, heads) if inspect.isclass(thing) else [thing]
    objects = [fresh_weights(one) for one in made]
    if not inspect.isclass(thing) and not is_module(kind):
        objects.append(thing)  # its weights may have to agree with something else in it
    if is_module(kind):  # some compute with constants that only float32 has
        objects += [fresh_weights(one, narrow=True) for one in made]
    left_out = tuple(without(made[0])[:4])
    one_window = as_one_window(thing, heads) if inspect.isclass(thing) else None
    apart = [fresh_weights(one or made[0]) for one in [one_window] if tables_of(made[0])]
    for number, own in enumerate([*objects, *apart]):
        called = getattr(own, method)
        framework = library or ("torch" if is_module(kind) else framework_of(called))
        weighed, opaque = _weights_of(own, heads or head_count(own) or heads_made_with(own), name)
        if not weighed:
            weighed = [Read({}, heads or head_count(own))]
        known = parameters_of(called)
        known = known if roles else as_self_attention(own, method, known)
        reduced = [] if roles else reduced_maps(own, known)
        for smaller, read in itertools.product(reduced, weighed):
            callee = Callee(
                name, OF_MAPS, framework, read.weights, read.heads, by_head=read.by_head
            )
            callee = replace(callee, made=made_with(own), without=left_out, fault=smaller.fault)
            found.append((smaller, replace(callee, adapted=True, rows_first=False)))
        if reduced:
            continue
        remembers, rows_first = keeps_state(called), _may_have_rows_first(kind)
        target: Callable[..., Any] = Remembering(own, method) if remembers else own
        if not remembers and (named or not callable(own)):
            target = called
        if not roles and (adapted := from_dictionary(called, known)) is not None:
            target, known = adapted
        elif not roles and not weighed[0][0] and (given := with_sink(target, known)) is not None:
            target, known = given
        elif not roles and (
            kept := with_cache_object(own if callable(own) else called, called, known, heads)
        ):
            (target, known), remembers = kept, True
        elif not roles and (in_one := with_arrays_in_one(target, known)) is not None:
            target, known = in_one
        if not roles and (of_ids := with_ids(target, known)) is not None:
            target, known = of_ids
        if not roles and (made_of := from_precomputed(own, target, known)) is not None:
            target, known = made_of
        channels = [] if roles else of_channels(own, known)
        for target, known in channels:
            callee = Callee(name, tuple(known), framework, made=made_with(own), adapted=True)
            found.append((target, callee))
        if channels:
            continue
        if not roles and (graph := of_graph(target, known, code_of(thing))) is not None:
            target, known = graph
        if not roles and (neutral := with_neutral(target, known)) is not None:
            target, known = neutral
        framed = of_frames(target, known, code_of(thing)) if weighed[0][0] else None
        target, known = framed or (target, known)
        text = f"{code_of(thing)}\n{code_called(thing)}"
        said = f"{text}\n{documentation_of_file(thing)}"
        media = of_one_image(known, said) if weighed[0][0] and not roles else None
        known = media[1] if media else known
        pooled = _pooled(own, code_of(thing), weighed[0][0])
        tabled = own in apart
        around: list[Any] = [*pooled] or [
            *around_attention(own, code_of(thing), code_called(thing), with_tables=tabled)
        ]
        if tabled and (pooled or not around):
            continue
        if around:
            role = "x" if sum(one.required for one in known) == 1 else known[0].role
            known = [replace(known[0], role=role), *(replace(o, keyword=True) for o in known[1:])]
        if inspect.isclass(thing) and target is own and not weighed[0][0] and not opaque:
            named_roles = with_roles(known, dict(roles or {}))[0]
            target = of_any_width(kind, method, named_roles, heads) or target
        if not roles and (told := from_tables(target, known)) is not None:
            target, known = told
        targets: list[Callable[..., Any]] = [*around, *[target][tabled:]]
        if weighed[0][0] and [one.role or role_of(one.name) for one in known] == ["x"]:
            targets += first_asks(target, code_of(thing))
        if (alone := without_the_rest(own, f"{code_of(thing)}\n{code_called(thing)}")) is not None:
            targets = [alone]
            weighed = [
                one._replace(weights={r: a for r, a in one.weights.items() if r[1:] != "_o"})
                for one in weighed
            ]
        if not remembers and weighed[0][0]:
            targets = [without_norm_functions(own, one) for one in targets]
        if media is not None:
            targets = [of_one for one in targets for of_one in media[0](one)]
        if not roles and (single := with_one_text(target, known, code_of(thing))) is not None:
            targets.insert(0, single)
        for target, (weights, count, by_head) in itertools.product(targets, weighed):
            for parameters in with_roles(known, dict(roles or {})):
                parameters = parameters if weights or opaque else without_weights(parameters)
                whole = replace(
                    Callee(name, parameters, framework, weights, count, made=made_with(own)),
                    without=left_out + ("residual",) * getattr(target, "adds", False),
                    opaque=opaque,
                    sharpness=learned_log(own, code_of(thing)),
                    widths=widths_of(own),
                    has_positions=not (pooled or _is_without_tables(target))
                    and (has_positions(own) or (remembers and turns_rows(code_of(thing)))),
                    pools=bool(getattr(target, "pools", False)),
                    fault=getattr(target, "fault", ""),
                    option=getattr(target, "option", ""),
                    narrow=is_module(kind) and len(made) <= number < len(objects),
                    remembers=remembers,
                    rows_first=rows_first,
                    by_head=by_head,
                    adapted=target not in (own, called) or not as_written(own, thing),
                )
                for callee in with_forms(whole):
                    steps = [(target, replace(callee, steps=one)) for one in STEPS if remembers]
                    text = code_of(thing) if count and not roles else ""
                    plain_one = with_packed_heads(target, callee, text)
                    loops = re.search(r"^ +for ", text_of(getattr(kind, method)), re.MULTILINE)
                    is_step = method == "step" or (method == "decode" and not loops)
                    found += steps if is_step and remembers else [*plain_one, *steps]
    return sorted(found, key=lambda one: (one[1].narrow, bool(one[1].fault)))


def _is_without_tables(target: Any) -> bool:
    """Whether what is called has no table of numbers by place, or only zeros in it."""
    inner = getattr(target, "__wrapped__", None)
    return any(isinstance(one, AroundAttention) and one.left_out for one in (target, inner))


def _readings_of_pairs(
    thing: Any, heads: int | None, library: str | None, name: str, method: str
) -> list[Reading]:
    """The readings of a layer over pairs, of a class with each value of its option; or none."""
    is_class, text = inspect.isclass(thing), code_of(thing)
    kind, found = thing if is_class else type(thing), list[Reading]()
    for number, fixed in enumerate(options_of(kind, text) if is_class else [{}]):
        said = ", ".join(f"{n}={v!r}" for n, v in fixed.items() if number)
        for made in constructed(kind, heads, fixed) if is_class else [thing]:
            own = fresh_weights(made)
            told = fixed or {n: one for n, one in vars(own).items() if isinstance(one, bool | str)}
            known_ones = (orientation(*one) for one in told.items() if one[0] != "training")
            which = next(filter(None, known_ones), orientation(name, True))
            count = heads or head_count(own) or heads_made_with(own)
            weighed, opaque = _weights_of(own, count, name)
            known = parameters_of(getattr(own, method))
            if opaque or not weighed or not are_pairs(text, known):
                return []
            weights, count, _ = weighed[0]
            weights = matrix_of_pairs(own, weights, count or 1)
            framework = library or ("torch" if is_module(kind) else framework_of(made))
            for called, parameters in called_as_rows(own, known, text, which, said):
                for taken in with_roles(parameters, {}):
                    callee = Callee(name, taken, framework, weights, count, made=made_with(own))
                    left_out = tuple(without(made)[:4])
                    callee = replace(
                        callee,
                        without=left_out,
                        fault=called.fault,
                        option=called.option,
                        adapted=True,
                        rows_first=False,
                    )
                    found.append((called, callee))
    return sorted(found, key=lambda one: (one[1].option, bool(one[1].fault)))


def _readings_of_streams(
    thing: Any, heads: int | None, library: str | None, name: str, method: str
) -> list[Reading]:
    """The readings of an object that puts two streams together; or none."""
    text = f"{code_of(thing)}\n{code_called(thing)}"
    kind, found = thing if inspect.isclass(thing) else type(thing), list[Reading]()
    if names_of_streams(parameters_of(getattr(kind, method))[1:], text) is None:
        return []
    for made in constructed(thing, heads) if inspect.isclass(thing) else [thing]:
        own = fresh_weights(made)
        count = heads or head_count(own) or heads_made_with(own)
        weights_of_one = with_equal_weights(own)
        if weights_of_one is None:
            return []
        target = without_norm_functions(own, own if callable(own) else getattr(own, method))
        known = parameters_of(getattr(own, method))
        framework = library or ("torch" if is_module(kind) else framework_of(getattr(own, method)))
        for called, parameters in of_joint_streams(target, known, text):
            for read in readings_of_weights(weights_of_one, count):
                for taken in with_roles(parameters, {}):
                    callee = Callee(name, taken, framework, read.weights, read.heads)
                    callee = replace(
                        callee,
                        made=made_with(own),
                        without=tuple(without(made)[:4]),
                        fault=called.fault,
                        adapted=True,
                        rows_first=False,
                        by_head=read.by_head,
                    )
                    found.append((called, callee))
    return sorted(found, key=lambda one: bool(one[1].fault))


def _pooled(own: Any, text: str, weights: Mapping[str, Array]) -> list[PooledMap]:
    """The ways to call an object that pools a map, if it does."""
    return [*pooled_maps(own, text, len(weights["W_q"]))] if "W_q" in weights else []


def _weights_of(own: Any, count: int | None, name: str) -> tuple[list[Read], str]:
    """The readings of an object's weights; or none, and why they cannot be used."""
    try:
        weighed = readings_of_weights(own, count)
        for one in weighed[:1]:
            if one.weights:
                key_heads(one.weights, one.heads or 1)
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
    return not text or ROWS_FIRST.search(f"{text}\n{documentation_of_file(kind)}") is not None


def method_called(kind: Any) -> str:
    """The first of the usual methods that a class has, and that says what it takes; or nothing."""
    own = [one for one in METHODS if own_method(kind, one)]
    passes_on = [one for one in own if not _says_arguments(getattr(kind, one))]
    return next((one for one in own if one not in passes_on), "".join(passes_on[:1]))


def _says_arguments(method: Any) -> bool:
    """Whether a method has parameters of its own besides `self`, not only *args and **kwargs."""
    try:
        _, *rest = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return True
    return not rest or any(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in rest)


def own_method(kind: Any, name: str) -> bool:
    """Whether a class has a method of its own by this name."""
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

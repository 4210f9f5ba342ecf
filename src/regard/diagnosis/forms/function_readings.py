"""The ways to read a function: of arrays, of embeddings and weights, or with a cache.

Must not call the function, nor know any probe.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.boundary.arrays import Array
from regard.diagnosis.forms.adapting import (
    as_used,
    from_dictionary,
    with_configuration,
)
from regard.diagnosis.forms.after_attention import with_projection_after
from regard.diagnosis.forms.around import of_images, of_maps
from regard.diagnosis.forms.beside_weights import HEADS
from regard.diagnosis.forms.cache_objects import with_cache_object
from regard.diagnosis.forms.caches import Remembering
from regard.diagnosis.forms.channels import of_channels
from regard.diagnosis.forms.decays import with_decays
from regard.diagnosis.forms.first_asks import first_asks
from regard.diagnosis.forms.flat_tokens import with_flat_token
from regard.diagnosis.forms.fused_weights import with_fused_weights
from regard.diagnosis.forms.given_arrays import with_given
from regard.diagnosis.forms.global_tokens import with_global_tokens
from regard.diagnosis.forms.graphs import of_graph
from regard.diagnosis.forms.joined_outputs import with_joined_output
from regard.diagnosis.forms.joint_streams import with_joint_streams
from regard.diagnosis.forms.kept_arrays import with_arrays_in_one, with_kept_arrays
from regard.diagnosis.forms.neutral_arguments import with_neutral
from regard.diagnosis.forms.norm_functions import without_input, without_norm_functions
from regard.diagnosis.forms.numbered_heads import with_numbered_heads
from regard.diagnosis.forms.packing import (
    QKV,
    Alternative,
    unpacked,
    with_borders,
    with_half_windows,
    with_ids,
    with_one_window,
    with_texts_of_both,
    with_two_sides,
)
from regard.diagnosis.forms.pairs import are_pairs, called_as_rows, matrix_in_a_tree, orientation
from regard.diagnosis.forms.pooled_maps import pooling_functions
from regard.diagnosis.forms.prompts import with_prompt
from regard.diagnosis.forms.quantised_arguments import with_quantised
from regard.diagnosis.forms.source import code_called, code_of, code_of_file, documentation_of_file
from regard.diagnosis.forms.surroundings_read import surroundings_of
from regard.diagnosis.forms.tables import from_tables, with_forms
from regard.diagnosis.forms.tree_code import projection
from regard.diagnosis.forms.trees import Weighed, with_weights
from regard.diagnosis.forms.weights import head_count
from regard.diagnosis.forms.window_tables import with_window_table
from regard.diagnosis.reading.libraries import LIBRARIES, framework_of
from regard.diagnosis.reading.parameter_names import fused_order, plain, role_of
from regard.diagnosis.reading.signature import (
    MASKS,
    PROJECTIONS,
    STEPS,
    Callee,
    Parameter,
    heads_bound,
    parameters_of,
    with_roles,
    without_weights,
)

# Text that says that tokens see those of their own block alone, and code that merges blocks.
WITHIN = re.compile(
    r"(attention|attends?|sees?|causal|visible)\b[^.\n]{0,40}\b(inside|within|in) "
    r"(each|every|one|the same|(its|their) own) (chunk|block|piece|segment)\b|"
    r"\bnothing crosses|\bacross (chunk|block)s? (border|boundar)",
    re.IGNORECASE,
)
# Text of chunks in which a token sees those before its own, as far as they reach.
OWN_AND_BEFORE = re.compile(
    r"\bown (chunk|block|window|bucket|segment)\b[^.]{0,60}"
    r"\b((previous|preceding|last) (one\b|chunk|block|window|bucket|segment)|"
    r"(chunks?|blocks?|windows?|buckets?|segments?)\W{1,3}before)",
    re.IGNORECASE,
)
MERGES = re.compile(
    r"online|flash|(?<!e)lse|log_?sum|rescal|running|accum|new_?max|m_new|corr", re.IGNORECASE
)
# Code that makes an axis of heads.
SPLITS = re.compile(
    r"(reshape|view|unflatten|rearrange)\([^\n]*\b(n_?heads?|num_heads|heads|h|nh)\b"
)
# What is called, and what is known of it.
Reading = tuple[Callable[..., Any], Callee]


def readings_of_function(
    function: Callable[..., Any],
    described: Callable[..., Any],
    roles: Mapping[str, str] | None,
    heads: int | None,
    library: str | None,
    name: str,
) -> list[Reading]:
    """The readings in the library that the code uses, then in others; `described` has its names."""
    framework = library or framework_of(described)
    others = [] if library else [x for x in LIBRARIES if x != framework and x in sys.modules]
    known = parameters_of(described)
    joint = [] if roles else with_joint_streams(function, known)
    found = []
    for one in (framework, *others):
        for called, parameters in joint or [(function, known)]:
            own = _function_readings(called, parameters, roles, heads, one, name)
            fault = getattr(called, "fault", "")  # whatever is put around it
            found += [(other, replace(o, fault=fault or o.fault)) for other, o in own]
    tried = {one: place for place, one in enumerate((framework, *others))}
    by_library = sorted(found, key=lambda one: (tried[one[1].framework], bool(one[1].fault)))
    return by_library if joint else found


# Each makes one argument of several, or of an argument with parts.
ONE_OF_SEVERAL = (
    with_arrays_in_one,
    with_decays,
    of_graph,
    with_borders,
    with_one_window,
    with_two_sides,
    with_half_windows,
    with_texts_of_both,
    with_ids,
    with_prompt,
    with_quantised,
    with_projection_after,
    with_joined_output,
    with_window_table,
    with_given,
    with_neutral,
    with_global_tokens,
    with_flat_token,
)


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
    if not roles and (numbered := with_numbered_heads(called, parameters)) is not None:
        (called, parameters), heads = numbered
    for simpler in () if roles else ONE_OF_SEVERAL:
        if (simple := simpler(called, parameters)) is not None:
            called, parameters = simple
    if not roles and (maps := of_maps(called, parameters, code_of(function))) is not None:
        called, parameters = maps
    said = f"{code_of(function)}\n{code_called(function)}"
    parameters = [_as_block(one, said) for one in parameters]
    heads = heads or heads_bound(function) or _heads_of_own(function)
    if not roles and (sized := with_configuration(called, parameters, heads or HEADS)) is not None:
        (called, parameters), heads = sized, heads or HEADS
    if not roles and (kept := with_cache_object(called, called, parameters, heads)) is not None:
        return _keeping_readings(*kept, framework, heads, name)
    if not roles and (arrays := with_kept_arrays(called, parameters)) is not None:
        return _keeping_readings(*arrays, framework, heads, name)[1:]  # token by token
    trees = [] if roles else with_weights(called, parameters, framework)
    plain_one: list[Weighed] = [(called, parameters, {}, None)]
    found: list[Reading] = []
    images: list[Reading] = []
    text = code_of(function)
    for own, taken, weights, count in trees or plain_one:
        if weights and are_pairs(text + documentation_of_file(function), taken):
            weights = matrix_in_a_tree(own, weights, count or HEADS)
            for pairs, known in called_as_rows(own, taken, text, orientation(name, True)):
                found += _readings_of(
                    pairs, known, weights, roles, heads or count, framework, name, function
                )
            continue
        pooled = [] if roles else [*pooling_functions(own, taken, text)]
        for pools, known in pooled:
            found += _readings_of(
                pools, known, weights, roles, heads or count, framework, name, function
            )
        if pooled:
            continue
        weighs = weights or any(map(_is_projection, taken))
        projects = weighs and surroundings_of(function, _first_of(taken)) is None
        own = without_norm_functions(function, own) if projects else own
        for image, known in of_images(own, taken, text) if weighs and not roles else ():
            images += _readings_of(
                image, known, weights, roles, heads or count, framework, name, function
            )
        around = without_input(own, taken, text) if projects and not roles else []
        each: list[Alternative] = [*around, (own, [*taken])]
        if projects and not roles and not _reads_two(taken):
            each += [(alone, [*taken]) for alone in first_asks(own, text)]
        for one, known in each:
            rest = (weights, roles, heads or count, framework, name, function)
            found += _readings_of(one, known, *rest)
    more = (one for own, callee in found for one in _with_blocks_of_one(own, callee))
    found = [*found, *images, *more, *_with_own_window(found, text)]
    return sorted(found, key=lambda one: bool(one[1].fault))


def _is_projection(one: Parameter) -> bool:
    return (projection(one.name) or fused_order(one.name)) != ""


def _heads_of_own(function: Callable[..., Any]) -> int | None:
    """The number of heads of the object that a method, or a pair of them, belongs to."""
    own = getattr(function, "__self__", getattr(function, "holder", None))
    return None if own is None or isinstance(own, type) else head_count(own)


def _reads_two(parameters: Sequence[Parameter]) -> bool:
    """Whether tokens come in several arguments, or a mask with them."""
    rest = {role_of(one.name) for one in parameters[1:]}
    return bool(rest & {"x", "query", "key", "value", "context", "cache", *MASKS, "key_mask"})


def _first_of(parameters: Sequence[Parameter]) -> str:
    """The name of the argument of tokens: the first that a function needs."""
    return next((one.name for one in parameters if one.required), "")


def _as_block(one: Parameter, text: str) -> Parameter:
    """A size with the role that the text gives it: of a window, or of blocks that are apart.

    One holds all where everything is seen through blocks, or each reaches into the one before.
    """
    name = re.escape(one.name)
    is_block = rf"(blocks|chunks|pieces|cut into [^.]{{0,20}}) of (size |length )?`*{name}\b"
    of_chunks = re.search(is_block, text) or OWN_AND_BEFORE.search(text)
    if role_of(one.name) == "window" and of_chunks is not None:
        return replace(one, role="longest")
    on_sides = (
        rf"\b{name}\b (neighbou?rs|tokens|keys|positions)[^.\n]{{0,20}}(each|either|both) sides?\b"
    )
    if type(one.default) is int and role_of(one.name) is None and re.search(on_sides, text, re.I):
        return replace(one, role="window")
    if role_of(one.name) == "block" and WITHIN.search(text) and not MERGES.search(text):
        return replace(one, role="longest", required=True)
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
    packed = []
    fused = [] if roles or weights else with_fused_weights(called, parameters)
    in_weights = fused or any(one.role in PROJECTIONS for one in parameters)
    in_weights = in_weights and not any(QKV.match(plain(one.name)) for one in parameters)
    if not (roles or weights or steps_only or in_weights):
        packed = of_channels(called, parameters) or unpacked(called, parameters)
    for other, taken in packed:
        for own in with_roles(taken, {}):
            own = without_weights(own)
            found.append((other, Callee(name, own, framework, {}, heads, adapted=True)))
    if packed:
        return found
    if not roles and (tabled := from_tables(called, parameters)) is not None:
        called, parameters = tabled
        fused = [] if weights else with_fused_weights(called, parameters)
    for other, taken in fused:
        found += _readings_of(other, taken, {}, {}, heads, framework, name, function)
    if fused:
        return found
    for own, count in itertools.product(with_roles(parameters, dict(roles or {})), counts):
        own = own if weights else without_weights(own)
        whole = Callee(name, own, framework, weights, count, adapted=called is not function)
        whole = replace(
            whole,
            fault=getattr(called, "fault", ""),
            option=getattr(called, "option", ""),
            pools=getattr(called, "pools", False),
        )
        for callee in with_forms(whole):
            if "cache" not in callee.roles:
                text = code_of_file(function)
                found += with_packed_heads(called, callee, text if heads and not roles else "")
                continue
            cache = callee.roles["cache"]
            value = next((one.name for one in own if one.role in ("value", "x")), "")
            keyed = tuple(replace(one, keyword=True) for one in own)
            steps = [
                (
                    Remembering(called, "", cache.name, value, count),
                    replace(callee, parameters=keyed, steps=one),
                )
                for one in STEPS
            ]
            found += steps if cache.required else [(called, callee), *steps]
    return found


def with_packed_heads(called: Callable[..., Any], callee: Callee, text: str) -> list[Reading]:
    """And with heads side by side in its arrays, first if its code takes them apart."""
    if not text or callee.weights or callee.kind != "arrays":
        return [(called, callee)]
    both = [(called, callee), (called, replace(callee, packs=True))]
    return both[::-1] if SPLITS.search(text) else both


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

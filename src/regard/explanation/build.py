"""From arrays or a problem to an explanation.

Owns how a call becomes a run of the textbook in float64 with labels on its axes, and how the
library's own kernel is asked for the same numbers. Must not know views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from regard.boundary.arguments import as_array
from regard.boundary.arrays import Array
from regard.boundary.elsewhere import no_such_argument
from regard.compute import dispatch
from regard.compute.evaluation import Run, mechanism_of
from regard.compute.loss import LOSS, check_loss
from regard.compute.options import BY_POSITION, Options
from regard.compute.request import Request, make_request
from regard.errors import DtypeError, OptionError, ShapeError, naming_shapes, safe_text
from regard.explanation.trace import KernelCheck, Trace
from regard.masks import Lengths, Segments
from regard.positions import Absolute
from regard.problems.parts import NAMED_AXES, READY, all_labels, check_shared
from regard.problems.problem import Problem
from regard.rules.visibility import Boolean, Mask, all_of, as_mask
from regard.textbook.loss import continued
from regard.textbook.steps import PROJECTED, projecting, result_of

Softmax = Literal["shifted", "unshifted"]

_FLOAT64 = np.dtype(np.float64)
# Those of the record that say which attention is explained: its rules and numbers, and its parts.
OPTIONS = Options._fields[: Options._fields.index("precision")]
PARTS = Options._fields[BY_POSITION:]
# What replaces a problem's own when it is explained.
OVERRIDES = (*OPTIONS, *PARTS, *LOSS, "softmax", "title")


def explain_call(
    query: Any,
    key: Any,
    value: Any,
    names: Mapping[str, Sequence[str] | None],
    options: Mapping[str, Any],
) -> Trace:
    """Explain what `regard.explain` was given: a problem, its parts, or arrays and `names`."""
    if isinstance(query, Problem):
        for name, argument in {"key": key, "value": value, **names}.items():
            if argument is not None:
                raise OptionError(
                    f"{name} comes from the problem; use problem.replace to change it"
                )
        return explain_problem(query, **options)
    arrays = {"query": query, "key": key, "value": value}
    takes = (*arrays, *OVERRIDES, *names)
    more = tuple(each.name for each in fields(Problem) if each.name not in takes)
    other = options.keys() - takes
    alone = query is not None and key is None and value is None
    of_problem = not other.isdisjoint(more) or (alone and bool(other))
    takes += more if of_problem else ()
    if unknown := {name: x for name, x in options.items() if name not in takes}:
        raise no_such_argument("explain()", unknown, takes, query)
    given = {name: labels for name, labels in names.items() if labels is not None}
    if of_problem:
        return _explain_parts(query, key, value, {**given, **options})
    if query is None or key is None or value is None:
        raise OptionError(
            "explain needs query, key and value, or a Problem alone, or embeddings with W_q, W_k "
            "and W_v"
        )
    labelled = all_labels(given, {"queries": query, "keys": key, "values": value})
    with naming_shapes(**arrays):
        return explain_arrays(query, key, value, names=labelled, **options)


def _explain_parts(query: Any, key: Any, value: Any, given: dict[str, Any]) -> Trace:
    """Explain the problem that has these parts; a first array alone is its embeddings."""
    first = "embeddings" if key is None and value is None else "queries"
    for name, array in ((first, query), ("keys", key), ("values", value)):
        if array is not None and given.get(name) is not None:
            raise OptionError(f"{name} is given twice, by position and by name; keep one of them")
        if array is not None:
            given[name] = array
    overrides = {name: given.pop(name) for name in OVERRIDES if name in given}
    return explain_problem(Problem(**given), **overrides)


def explain_arrays(
    query: Any,
    key: Any,
    value: Any,
    *,
    target: Any = None,
    grad_output: Any = None,
    softmax: Softmax = "shifted",
    names: Mapping[str, Sequence[str] | None],
    title: str = "",
    **options: Any,
) -> Trace:
    """Explain one call of attention on ready queries, keys and values.

    `names` has labels and features under the names that `regard.explain` gives them.
    """
    _check_softmax(softmax)
    if not isinstance(title, str):
        raise DtypeError(f"title must be a string, not {safe_text(repr(title), 60)}")
    # Copies: the steps are computed later, when asked for.
    query, key, value = (
        np.array(as_array(name, array))
        for name, array in (("query", query), ("key", key), ("value", value))
    )
    for name in ("bias", "sink"):
        if options.get(name) is not None:
            options[name] = np.array(as_array(name, options[name]))
    if options.get("mask") is not None:
        options["mask"] = deepcopy(as_mask(options["mask"]))
    request = make_request(query, key, value, **options)
    loss = {
        name: np.array(as_array(name, array))
        for name, array in (("target", target), ("grad_output", grad_output))
        if array is not None
    }
    named = _checked_labels(names, request)
    if "D" in named:
        named["K"] = named["D"]  # a general score turns queries into keys' features
    return _traced(request, None, {}, softmax, loss, title=title, labels=named)


def _traced(
    request: Request,
    given: Mapping[str, Array] | None,
    heads: Mapping[str, int],
    softmax: Softmax,
    loss: Mapping[str, Array],
    rule: Mask | None = None,
    *,
    projected: Run | None = None,
    **described: Any,
) -> Trace:
    """The steps of a call, with one more rule if there is one, and those back from its loss.

    Queries, keys and values were `projected` already, if they are made of embeddings.
    """
    if rule is not None:
        mask = request.options.mask
        request = request.with_options(mask=rule if mask is None else mask & rule)
    score = request.options.score.kind if request.options.score else "dot"
    alone = bool(loss) and not request.has_rows and score in ("additive", "distance")
    if alone:  # their gradients are sums over rows
        request = replace(request, has_rows=True)
    run = Run.of_request(request, _FLOAT64, given, heads, natural=True, softmax=softmax)
    if loss:
        shape = run.shape(result_of(run.steps))
        flat = (*shape[:-2], *shape[-1:]) if alone else None  # its target is still (E,)
        loss = {name: x.reshape(shape) if x.shape == flat else x for name, x in loss.items()}
        run = _continued(run, loss)
    run = run.knowing(projected)
    again = partial(_traced, request, given, heads, softmax, loss, projected=projected)
    return Trace(
        run,
        mechanism=mechanism_of(request),
        rebuild=partial(again, **described),
        # The reference alone knows the others, and the explanation is made of its steps.
        check_kernel=None if request.parts else partial(_check_kernel, request, run),
        **described,
    )


def _continued(run: Run, loss: Mapping[str, Array]) -> Run:
    """The run with its loss and the steps back from it."""
    steps, last = tuple(run.steps.values()), result_of(run.steps)
    check_loss(loss, run.shape(last))
    sizes = run.sizes
    back = continued(steps, target="target" in loss, grouped=sizes.get("H") != sizes.get("G"))
    names = {"target": "target", "grad_output": f"d_{last}"}
    return run.continued(back, {names[name]: array for name, array in loss.items()})


def explain_problem(problem: Problem, **overrides: Any) -> Trace:
    """Explain a problem; `overrides` replace its fields, and `mask` may be a mask object too."""
    unknown = [name for name in overrides if name not in OVERRIDES]
    if unknown:
        raise OptionError(
            f"{safe_text(unknown[0], 60)} cannot be overridden when a problem is explained; "
            f"only {', '.join(OVERRIDES)} can"
        )
    rule = None
    if overrides.get("mask") is not None:
        mask = as_mask(overrides["mask"])
        # A problem holds an array of booleans; any other rule is kept apart.
        if type(mask) is Boolean and mask is not overrides["mask"]:
            overrides["mask"] = mask.array
        else:
            overrides["mask"], rule = None, deepcopy(mask)
    if overrides:
        problem = problem.replace(**overrides)
    inputs = {name: getattr(problem, name) for name in PROJECTED}
    given = {name: array for name, array in inputs.items() if array is not None}
    heads = {}
    if given and problem.heads is not None:
        heads = {"H": problem.heads, "G": problem.key_heads or problem.heads}
    options = {name: getattr(problem, name) for name in (*OPTIONS, *PARTS) if name != "mask"}
    if problem.embeddings is not None and isinstance(problem.positions, Absolute):
        given |= problem.positions.given(*problem.embeddings.shape)
        options["positions"] = None
    projected, (queries, keys, values) = None, (getattr(problem, name) for name in READY)
    if problem.embeddings is not None:
        projected = Run(projecting(set(given), heads=bool(heads)), given, heads, dtype=_FLOAT64)
        queries, keys, values = (projected.value(name) for name in READY)
    request = make_request(queries, keys, values, mask=_problem_rules(problem, rule), **options)
    labels = {axis: getattr(problem, field) for field, axis in NAMED_AXES.items()}
    return _traced(
        request,
        given,
        heads,
        problem.softmax,
        {name: array for name in LOSS if (array := getattr(problem, name)) is not None},
        title=problem.title,
        note=problem.note,
        labels={axis: names for axis, names in labels.items() if names is not None},
        row_notes=dict(problem.row_notes),
        problem=problem,
        projected=projected,
    )


def _problem_rules(problem: Problem, extra: Mask | None) -> Mask | None:
    rules = [] if extra is None else [extra]
    if problem.query_segments is not None:
        rules.insert(0, Segments(problem.query_segments, problem.key_segments))
    if problem.lengths is not None:
        rules.insert(0, Lengths(problem.lengths))
    if problem.mask is not None:
        rules.insert(0, Boolean(problem.mask))
    return all_of(rules)


def _check_softmax(softmax: Any) -> None:
    """The two ways of taking exp that an explanation can show."""
    if not isinstance(softmax, str) or softmax not in ("shifted", "unshifted"):
        raise OptionError(
            f'softmax must be "shifted" or "unshifted", not {safe_text(repr(softmax), 60)}'
        )


def string_labels(name: str, labels: Any) -> tuple[str, ...]:
    """A sequence of strings; one string is none, although it could be taken apart."""
    try:
        strings = None if isinstance(labels, str) else tuple(labels)
    except TypeError:
        strings = None
    if strings is None or not all(isinstance(label, str) for label in strings):
        raise DtypeError(f"{name} must be a sequence of strings")
    return strings


def _checked_labels(
    names: Mapping[str, Sequence[str] | None], request: Request
) -> dict[str, tuple[str, ...]]:
    """The names along each axis, by its letter."""
    queries, keys = request.query.shape[-2], request.key.shape[-2]
    check_shared(names, (queries, f"query has {queries} rows"), (keys, f"key has {keys} rows"))
    arguments = {
        "labels": ("LS", "query", "rows", queries),
        "query_labels": ("L", "query", "rows", queries),
        "key_labels": ("S", "key", "rows", keys),
        "key_features": ("D", "key", "columns", request.key.shape[-1]),
        "value_features": ("E", "value", "columns", request.value.shape[-1]),
    }
    checked: dict[str, tuple[str, ...]] = {}
    for argument, given in names.items():
        if given is None:
            continue
        axes, array, what, size = arguments[argument]
        labels = string_labels(argument, given)
        if len(labels) != size:
            raise ShapeError(
                f"{argument} has {len(labels)} names but {array} has {size} {what}; each needs one"
            )
        checked |= dict.fromkeys(axes, labels)
    return checked


# --- the library's own kernel beside the explanation -------------------------------------------

_MANTISSA = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126)}


def _check_kernel(request: Request, run: Run) -> KernelCheck:
    """What the best kernel answers to the same request, and how far it is from float64."""
    kernel = dispatch.choose(request)
    result = kernel.run(dispatch.without_positions(request.with_options(return_lse=True)))
    exact = run.value("output")
    bits, least = _MANTISSA.get(request.dtype.name, (52, -1022))
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(exact)
        ulp = np.ldexp(1.0, np.maximum(exponent - 1, least) - bits)
        output = result.output.astype(np.float64)
        difference = np.abs(output - exact) / ulp
    # NaN in both, and the same infinity in both, is agreement; in one of them it is none at all.
    alike = (output == exact) | (np.isnan(output) & np.isnan(exact))
    distance = np.where(alike, 0, np.where(np.isfinite(difference), difference, np.inf))
    assert result.lse is not None
    largest = float(distance.max(initial=0))
    return KernelCheck(kernel.name, result.output, result.lse, largest)

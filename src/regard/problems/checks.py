"""The checks of a problem: that its parts fit together, and each field in its exact form.

Options and ready arrays pass the checks of a call of attention (`compute/request.py`); here are
those of what a call does not have: weights, heads side by side, names, expectations. Must not know
files, kernels or views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from regard.boundary.parse import (
    as_booleans,
    as_integer,
    as_labels,
    as_number,
    as_number_or_numbers,
    as_numbers,
    check_choice,
    check_text,
    either,
    shown,
)
from regard.compute.loss import LOSS, check_loss
from regard.compute.options import Options
from regard.compute.request import check_arrays, check_options
from regard.errors import DtypeError, OptionError, ProblemError, ShapeError
from regard.masks import Lengths, Segments, Window
from regard.positions import Absolute
from regard.problems.parts import (
    NAMED_AXES,
    READY,
    SHARED,
    Expectation,
    RandomMatrices,
    all_labels,
    backward_axes,
    check_shared,
    check_step,
    step_axes,
)
from regard.textbook.steps import PROJECTED

# The size of each axis of the textbook, and what of the problem says so: "keys has 4 rows".
Sizes = dict[str, tuple[int, str]]


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem in their exact form, or a ProblemError that names the wrong one.

    `labels` is no field, but the names of queries and keys where they are the same rows.
    """
    given = dict(fields)
    given |= all_labels({name: given[name] for name in ("labels", *NAMED_AXES)}, given)
    check_text("title", given["title"])
    check_text("note", given["note"])
    _draw(given)
    for name in (*PROJECTED, *READY, *LOSS):
        if given[name] is not None:
            given[name] = as_numbers(name, given[name])
    _check_presence(given)
    sizes = _projected_sizes(given) if given["embeddings"] is not None else _ready_sizes(given)
    _check_options(given, sizes)
    _check_loss(given, sizes)
    _check_names(given, sizes)
    _check_expectations(given)
    return given


def _draw(given: dict[str, Any]) -> None:
    """Fill in what the recipe draws."""
    recipe = given["random"]
    if recipe is None:
        return
    if not isinstance(recipe, RandomMatrices):
        raise ProblemError.of("random", f"must be a RandomMatrices, not {shown(recipe)}")
    for name, drawn in recipe.matrices().items():
        if given[name] is not None and not np.array_equal(as_numbers(name, given[name]), drawn):
            raise ProblemError.of(
                name, "is given and also drawn by random, with other numbers; keep one of the two"
            )
        given[name] = drawn


def _check_presence(given: Mapping[str, Any]) -> None:
    projected = [name for name in PROJECTED if given[name] is not None]
    ready = [name for name in READY if given[name] is not None]
    if projected and ready:
        raise ProblemError.of(
            ready[0],
            f"and {projected[0]} are both given; a problem starts either from embeddings and "
            "weights or from ready queries, keys and values",
        )
    if not (projected or ready):
        raise ProblemError(
            "embeddings, W_q, W_k and W_v are needed, or queries, keys and values; "
            "none of them is given"
        )
    matrices = ("embeddings", "W_q", "W_k", "W_v")
    needed, other = (READY, matrices) if ready else (matrices, READY)
    missing = [name for name in needed if given[name] is None]
    if missing:
        first, *more = missing
        too = f", which needs {', '.join(more)} too" if more else ""
        raise ProblemError.of(
            first,
            f"is missing; {(ready or projected)[0]} is given{too}; "
            f"{', '.join(other)} may be given instead",
        )


# --- sizes ---------------------------------------------------------------------------------------


def _projected_sizes(given: dict[str, Any]) -> Sizes:
    """The sizes that embeddings and weights have."""
    _heads(given)
    # Without a context, keys and values come from the embeddings.
    sizes = weight_sizes(given, {"N": "M"} if given["context"] is None else {})
    sizes.setdefault("F", (sizes["E"][0], f"output has {sizes['E'][0]} columns"))
    sizes.setdefault("S", sizes["L"])
    sizes.setdefault("N", sizes["M"])
    return sizes


def weight_sizes(given: Mapping[str, Any], shared: Mapping[str, str]) -> Sizes:
    """The sizes of the axes of embeddings, weights and biases, or a ProblemError if they differ.

    `heads` and `key_heads` are checked already; heads are side by side in the columns. `shared`
    maps an axis to one that must have the same size.
    """
    heads, groups = given["heads"] or 1, given["key_heads"] or 1
    sizes: Sizes = {}
    for name in ("embeddings", "context", *(f"{kind}_{one}" for one in "qkvo" for kind in "Wb")):
        if given.get(name) is None:
            continue
        if name == "b_o" and given.get("W_o") is None:
            raise ProblemError.of(name, "is given without W_o; give both or neither")
        axes = step_axes()[name]
        shape = _shape(given, name, f"({', '.join(axes)})", len(axes))
        for axis, size, what in zip(axes, shape, _WORDS[len(axes)], strict=True):
            known, reason = sizes.setdefault(
                shared.get(axis, axis), (size, f"{name} has {size} {what}")
            )
            if size != known:
                raise ProblemError.of(name, f"has {size} {what} but needs {known}: {reason}")
        if name in ("W_q", "W_v"):  # then the widths of other weights follow
            count, title = (heads, "heads") if name == "W_q" else (groups, "key_heads")
            if shape[1] % count:
                raise ProblemError.of(
                    name,
                    f"has {shape[1]} columns but {title} is {count}; heads are side by side in "
                    "the columns, so the first must be a multiple of the second",
                )
            width = shape[1] // count
        if name == "W_q":
            split = f" (heads {heads}, key_heads {groups}, each {width} wide)"
            reason = sizes["HD"][1] + (split if given["heads"] else "")
            sizes |= {"D": (width, f"keys has {width} columns"), "GD": (width * groups, reason)}
        if name == "W_v":
            split = f" ({heads} heads of {width})" if given["heads"] else ""
            whole = (width * heads, f"the output is {width * heads} wide{split}")
            sizes |= {"E": (width, f"values has {width} columns"), "HE": whole}
    return sizes


_WORDS = {1: ("numbers",), 2: ("rows", "columns")}


def _ready_sizes(given: dict[str, Any]) -> Sizes:
    """The sizes that ready queries, keys and values have."""
    queries = _shape(given, "queries", "(D,), (L, D) or (H, L, D)", 1, 2, 3)
    axes = max(2, len(queries))
    for name in ("keys", "values"):
        _shape(given, name, "as queries: two, or three with heads", axes)
    arrays = {name: given[name] for name in READY}
    try:
        check_arrays(arrays)
    except ShapeError as error:
        raise ProblemError(*error.args) from None
    for name, array in (("heads", "queries"), ("key_heads", "keys")):
        count, found = given[name], arrays[array].shape[0] if axes == 3 else None
        if count is not None and as_integer(name, count) != found:
            has = f"{len(arrays[array].shape)} axes, (rows, columns)" if found is None else found
            raise ProblemError.of(name, f"is {shown(count)} but {array} has {has}")
        given[name] = found
    sizes: Sizes = {}
    for name, letters in (("queries", "LD"), ("keys", "SD"), ("values", "SE")):
        shape = arrays[name].shape
        for axis, size, what in zip(letters[::-1], shape[::-1], ("columns", "rows"), strict=False):
            sizes.setdefault(axis, (size, f"{name} has {size} {what}"))
    return {"L": (1, "queries is one vector"), "F": sizes["E"], **sizes}


def _shape(given: Mapping[str, Any], name: str, wanted: str, *counts: int) -> tuple[int, ...]:
    """The shape of a field, which must have one of these numbers of axes, and no empty one."""
    shape: tuple[int, ...] = given[name].shape
    if len(shape) not in counts:
        raise ProblemError.of(
            name, f"has {len(shape)} axes, shape {shape}, but needs {either(counts)}: {wanted}"
        )
    if 0 in shape:
        raise ProblemError.of(
            name, f"is empty, shape {shape}; it needs at least one row and one column"
        )
    return shape


def _heads(given: dict[str, Any]) -> None:
    """How many query heads and key heads; none without an axis of heads."""
    if given["heads"] is None:
        if given["key_heads"] is not None:
            raise ProblemError.of(
                "key_heads", f"is {shown(given['key_heads'])} but heads is not given"
            )
        return
    for name in ("heads", "key_heads"):
        count = given["heads"] if given[name] is None else as_integer(name, given[name])
        if count < 1:
            raise ProblemError.of(name, f"is {shown(count)}; it must be 1 or more")
        given[name] = count
    if given["heads"] % given["key_heads"]:
        raise ProblemError.of(
            "heads",
            f"is {shown(given['heads'])} but key_heads is {shown(given['key_heads'])}; "
            "the first must be a multiple of the second",
        )


# --- options -------------------------------------------------------------------------------------


def _check_options(given: dict[str, Any], sizes: Sizes) -> None:
    """Each option in its exact form, as the checks of a call have it."""
    single = given["queries"] is not None and given["queries"].ndim == 1
    shape = (given["heads"] or 1, sizes["L"][0], sizes["S"][0])
    axes = 3 if given["heads"] else 1 if single else 2

    def check(field: str, **options: Any) -> None:
        try:
            check_options(shape, axes, Options(**options))
        except (ShapeError, OptionError, DtypeError) as error:
            raise ProblemError(*error.args, field=field) from None

    for name, exact in (
        ("mask", as_booleans),
        ("bias", as_number_or_numbers),
        ("sink", as_number_or_numbers),
        ("scale", as_number),
        ("softcap", as_number),
    ):
        if given[name] is not None:
            given[name] = exact(name, given[name])
            check(name, **{name: given[name]})
    if np.shape(given["sink"]) not in ((), (given["heads"],)):
        wanted = f"one number or {given['heads']}" if given["heads"] else "one number"
        raise ProblemError.of("sink", f"has shape {np.shape(given['sink'])} but needs {wanted}")
    check("causal", causal=given["causal"], offset=0)
    given["causal"] = bool(given["causal"])
    if given["window"] is not None:
        check("window", window=given["window"], offset=0)
        rule = Window(*given["window"])
        given["window"] = (rule.left, rule.right)
    if given["offset"] is not None and not isinstance(given["offset"], str):
        given["offset"] = as_integer("offset", given["offset"])
    check("offset", **{name: given[name] for name in ("causal", "window", "offset")})
    if given["lengths"] is not None:
        given["lengths"] = as_integer("lengths", given["lengths"])
        check("lengths", mask=Lengths(given["lengths"]))
    for name in ("query_segments", "key_segments"):
        if given[name] is not None:
            given[name] = _segments(name, given[name])
    if given["query_segments"] is not None:
        placed = {name: given[name] for name in ("causal", "window", "offset")}
        texts = Segments(given["query_segments"], given["key_segments"])
        check("query_segments", mask=texts, **placed)
    elif given["key_segments"] is not None:
        raise ProblemError.of("query_segments", "is missing; key_segments is given")
    check_choice("softmax", given["softmax"], ("shifted", "unshifted"))
    _check_parts(given, sizes, shape, check)


def _check_parts(
    given: dict[str, Any], sizes: Sizes, shape: tuple[int, ...], check: Callable[..., None]
) -> None:
    """Score, normalisation, positions: that each fits, and goes with the other options."""
    for name in ("score", "normalize"):
        if given[name] in ("dot", "softmax"):
            given[name] = None
    names = ("score", "normalize", "bias", "scale", "softcap", "sink")
    for name in ("score", "normalize"):
        if given[name] is not None:
            check(name, **{one: given[one] for one in names})
    if given["score"] is not None:
        try:
            given["score"].check(sizes["D"][0])
        except ShapeError as error:
            raise ProblemError(*error.args, field="score") from None
    if given["positions"] is not None:
        check("positions", positions=given["positions"], offset=given["offset"])
        try:
            if given["embeddings"] is not None and isinstance(given["positions"], Absolute):
                given["positions"].given(*given["embeddings"].shape)
            else:
                given["positions"].fits(sizes["D"][0], shape)
        except (ShapeError, OptionError) as error:
            raise ProblemError(*error.args, field="positions") from None


def _segments(name: str, value: Any) -> tuple[int, ...]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, (tuple, list)):
        raise ProblemError.of(name, f"must be a list of whole numbers, not {shown(value)}")
    segments = tuple(as_integer(name, one) for one in value)
    if min(segments, default=0) < 0:
        raise ProblemError.of(name, f"has {min(segments)}; segments are numbered from 0")
    return segments


def _check_loss(given: Mapping[str, Any], sizes: Sizes) -> None:
    """A target, or a gradient, for every number of the result."""
    if given["embeddings"] is None:
        shape = (*given["queries"].shape[:-1], sizes["E"][0])
    else:
        shape = (sizes["L"][0], sizes["F" if given["W_o"] is not None else "HE"][0])
    loss = {name: given[name] for name in LOSS if given[name] is not None}
    try:
        check_loss(loss, shape)
    except (ShapeError, OptionError) as error:
        raise ProblemError(*error.args, field=next(iter(loss))) from None


# --- names and expectations ----------------------------------------------------------------------

# The axes of the textbook that run down a matrix; the rows of W_o are the packed heads.
_ROWS = ("L", "S", "M", "N", "HE")


def _check_names(given: dict[str, Any], sizes: Sizes) -> None:
    """Labels, features and notes: one for each row or column."""
    try:
        check_shared(given, sizes["L"], sizes["S"], given["context"] is not None)
    except (ShapeError, OptionError) as error:
        raise ProblemError(*error.args) from None
    if given["embeddings"] is not None and given["context"] is None:
        _share_labels(given)
    for name, axis in {"labels": "L", **NAMED_AXES}.items():
        if given[name] is None:
            continue
        given[name] = labels = as_labels(name, given[name])
        if axis not in sizes:
            raise ProblemError.of(name, f"is given but {name.partition('_')[0]}s is not")
        size, reason = sizes[axis]
        if len(labels) != size:
            raise ProblemError.of(name, f"has {len(labels)} names but {reason}; each needs one")
        if name == "labels":
            given |= dict.fromkeys(SHARED, labels)
    del given["labels"]
    if not isinstance(given["row_notes"], Mapping):
        raise ProblemError.of("row_notes", f"must be a table, not {shown(given['row_notes'])}")
    notes = {}
    for step, remarks in given["row_notes"].items():
        check_step("row_notes", step)
        notes[step] = remarks = as_labels(f"row_notes.{step}", remarks)
        rows = next((a for a in step_axes()[step] if a in _ROWS and a in sizes), None)
        if rows is None or (step.startswith(("W_", "b_")) and given[step] is None):
            raise ProblemError(f"row_notes.{step} is given but {step} has no rows here")
        if len(remarks) != sizes[rows][0]:
            raise ProblemError(
                f"row_notes.{step} has {len(remarks)} notes but {step} has {sizes[rows][0]} rows; "
                "each needs one"
            )
    given["row_notes"] = MappingProxyType(notes)


def _share_labels(given: dict[str, Any]) -> None:
    """In self-attention the rows of keys are those of the queries."""
    if given["context_features"] is not None:
        raise ProblemError.of("context_features", "is given but context is not")
    queries, keys = given["query_labels"], given["key_labels"]
    if keys is not None and (
        queries is None or as_labels("key_labels", keys) != as_labels("query_labels", queries)
    ):
        raise ProblemError.of(
            "key_labels",
            "must be the same as query_labels, because there is no context; leave it out",
        )
    given["key_labels"] = queries


def _check_expectations(given: dict[str, Any]) -> None:
    expect = given["expect"]
    if isinstance(expect, (str, Mapping)) or not isinstance(expect, Iterable):
        raise ProblemError.of("expect", f"must be a tuple of Expectation, not {shown(expect)}")
    expect = tuple(expect)
    single = given["queries"] is not None and given["queries"].ndim == 1
    for one in expect:
        if not isinstance(one, Expectation):
            raise ProblemError.of("expect", f"must hold Expectation, not {shown(one)}")
        name = f"expect.{one.step}"
        if one.head is not None and one.head >= (given["heads"] or 0):
            have = "no head axis" if given["heads"] is None else f"{given['heads']} heads"
            raise ProblemError(
                f"{name}.head is {shown(one.head)} but the problem has {have}; heads count from 0"
            )
        own = (step_axes() if one.step in step_axes() else backward_axes())[one.step]
        axes = [a for a in own if a not in ("HGL" if single else "HG")]
        if one.at is not None and len(one.at) != len(axes):
            raise ProblemError(
                f"{name}.at has {len(one.at)} entries but {one.step} has {len(axes)} axes here "
                f"({', '.join(axes)}); each needs one label or position"
            )
    # A file groups them by step, so a problem does too: then both have them in the same order.
    order = list(step_axes())
    if any(one.step not in order for one in expect):
        order += backward_axes()
    given["expect"] = tuple(sorted(expect, key=lambda one: order.index(one.step)))

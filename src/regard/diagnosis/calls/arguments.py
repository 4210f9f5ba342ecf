"""The arguments for one probe under one calling convention.

Must not call the function, nor know mistakes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import EMBEDDED, READY, Convention, to_layout
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.calls.probe import Probe, labels_of
from regard.diagnosis.calls.probes import ROUND
from regard.diagnosis.forms.tables import BASE, LONG, table
from regard.diagnosis.reading.parameter_names import plain
from regard.diagnosis.reading.signature import MASKS, OF_KEYS, OF_TEXTS, Callee, Parameter

ALL = slice(None)
# Which part of a mask (B, H, L, S) is handed over; "full" depends on the layout.
MASK_PARTS = {
    "cells": (0, 0),
    "batch cells": (ALL, 0),
    "head cells": (0,),
    "1 head cells": (slice(1),),
    "batch 1 cells": (ALL, slice(1)),
    "batch 1 1 keys": (ALL, slice(1), slice(1)),
    "batch 1 keys": (ALL, 0, slice(1)),
    "batch keys": (ALL, 0, 0),
    "keys": (0, 0, 0),
}
# Code that writes into a cache, which has room for what follows.
WRITTEN = re.compile(r"update_slice|\.at\[|cache\w*\[[^\]\n]*\] *=|index_copy_|scatter")
# Names of how many blocks there are, and not how long they are.
COUNTS = re.compile("^(n|num)_?(blocks|chunks|splits)|splits$", re.IGNORECASE)
ROOM = 2
KEYS_ONLY = ("batch 1 1 keys", "batch keys", "keys", "batch 1 keys")
WIDER_THAN_ANY_PROBE = 1024  # and not so wide that each query takes long
DROPOUT = 0.1
SHARP = 0.4


TURNED = ("turned", "turned_share")  # by rotary positions: a number of features, or a share


class NotOfferedError(Exception):
    """The function has no parameter for what a probe needs."""


def arguments_for(callee: Callee, convention: Convention, probe: Probe) -> dict[str, Any]:
    """The arguments by the names of the parameters, as NumPy arrays, or a NotOfferedError."""
    if callee.steps:
        rules = probe.window is not None or probe.scale is not None
        rules |= probe.keep is not None and not probe.chunks
        rules |= probe.ability == "long"  # each token is a call
        if rules or not probe.causal or probe.sizes["L"] != probe.sizes["S"] or probe.rank == 1:
            raise NotOfferedError("it takes one token at a time")
    by_role = _inputs(callee, convention, probe) | _options(callee, convention, probe)
    arguments: dict[str, Any] = {}
    # Where a flag says that nothing is trained, dropout has to be ignored.
    share = DROPOUT if any(map(_is_flag, callee.parameters)) else 0.0
    for parameter in callee.parameters:
        if parameter.role == "no":  # dropout=None stays None: it may be meant to be a layer
            if parameter.required or parameter.default is not None:
                arguments[parameter.name] = False if _is_flag(parameter) else share
        elif parameter.role == "yes":
            if parameter.required:
                arguments[parameter.name] = True
        elif parameter.role == "between":  # as if there were none
            arguments[parameter.name] = np.eye(probe.sizes["D"], dtype=convention.dtype)
        elif parameter.role == "keeps":
            arguments[parameter.name] = bool(probe.chunks or callee.steps)
        elif parameter.role in by_role:
            arguments[parameter.name] = by_role[parameter.role]
        elif parameter.required or parameter.role in TURNED or _places(parameter, callee, probe):
            arguments[parameter.name] = _neutral(parameter.role, callee, convention, probe)
        elif parameter.role == "window" and type(parameter.default) is int and parameter.default:
            # Its default hides keys.
            arguments[parameter.name] = _neutral("window", callee, convention, probe)
        elif parameter.role == "longest" and type(parameter.default) is int:
            longest = max(probe.sizes["L"], probe.sizes["S"])  # its default may be shorter
            arguments[parameter.name] = max(parameter.default, longest)
    counts = arguments.get(callee.roles["lengths"].name) if "lengths" in callee.roles else None
    if counts is not None and callee.has_past and convention.one_query:
        if (counts < probe.sizes["S"]).any():
            raise NotOfferedError("its new token comes after all that count")
        counts -= 1  # so many came before
    return arguments


def _is_flag(parameter: Parameter) -> bool:
    """Whether a parameter says that a function is trained, and dropout is on."""
    return parameter.role == "no" and (parameter.default is True or "train" in parameter.name)


def _places(parameter: Parameter, callee: Callee, probe: Probe) -> bool:
    """Whether an optional argument has to tell where new tokens are: one number for each."""
    named = plain(parameter.name) in ("inputpos", "cacheposition")
    alone = named or len(callee.axes.get(parameter.name, "")) == 1
    return parameter.role == "positions" and alone and bool(probe.chunks or callee.steps)


def _neutral(role: str | None, callee: Callee, convention: Convention, probe: Probe) -> Any:
    """What changes nothing, for a required parameter that a probe does not use."""
    sizes, dtype = probe.sizes, np.dtype(convention.dtype)
    match role:
        case "window":  # lengths may have to be multiples of it
            is_round = sizes["L"] == sizes["S"] == ROUND
            return ROUND if is_round else WIDER_THAN_ANY_PROBE
        case "scale":
            return sizes["D"] ** (0.5 if convention.scale_divides else -0.5)
        case "block" if COUNTS.search(callee.roles["block"].name):  # as few as divide the keys
            return next((n for n in range(2, sizes["S"]) if sizes["S"] % n == 0), sizes["S"])
        case "block":
            return 1
        case "pos" if callee.has_past:
            return sizes["S"] - sizes["L"]
        case "pos" | "layer_number":
            return 0
        case "sharpness":  # the logarithm of a factor of cosines, the same for all heads
            axes = callee.axes.get(callee.roles["sharpness"].name, "")
            return np.full(sizes["H"], SHARP, dtype) if len(axes) == 1 else dtype.type(SHARP)
        case "prefix":  # that all tokens see: none
            is_of_texts = callee.axes.get(callee.roles["prefix"].name) == "B"
            return np.zeros(sizes["B"], int) if is_of_texts else 0
        case "model":
            return sizes["D"] * sizes["H"]
        case "softcap":
            return 1e9
        case "turned_share":  # of the features: all
            return 1.0
        case "turned":  # how many features rotary positions turn
            return sizes["D"]
        case "layer":  # of these sizes; running.py makes it
            return f"{sizes['H']} {sizes['G']} {sizes['D']}"
        case "cos" | "sin":
            rows = LONG if {"pos", "positions"} & callee.roles.keys() else sizes["S"]
            of = np.cos if role == "cos" else np.sin
            return table(of, callee.tables, rows, sizes["D"]).astype(dtype)
        case "distances" if lengths := _as_documented(callee, convention, probe):
            return np.random.default_rng(8).normal(size=lengths).astype(dtype)
        case "distances":  # T − 1 … −(T − 1), each by its sines and its cosines
            far = np.arange(sizes["L"] - 1, -sizes["L"], -1.0)
            width = probe.inputs["embeddings"].shape[-1] if "embeddings" in probe.inputs else 6
            angles = far[:, None] * BASE ** (-np.arange(0, width, 2) / width)
            return np.concatenate([np.sin(angles), np.cos(angles)], -1)[None].astype(dtype)
        case "positions":
            numbers = np.arange(sizes["L"])
            return numbers[None] if callee.tables.startswith("batch") else numbers
        case "sink":
            return np.full(sizes["H"], -np.inf, dtype if dtype.kind == "f" else np.float64)
    if role == "longest":
        return max(sizes["L"], sizes["S"])
    if role in ("key_borders", "key_segments", *OF_TEXTS):
        if sizes["L"] != sizes["S"] and not any(f"key_{x}" in callee.roles for x in OF_TEXTS):
            raise NotOfferedError("its texts have as many keys as queries")
        labels = np.zeros(sizes["S" if role and role[:4] == "key_" else "L"], int)
        return _of_texts(labels, (role or "").removeprefix("key_"), convention, sizes)
    if role in MASKS:
        everything = replace(probe, keep=np.ones((sizes["B"], 1, 1, sizes["S"]), bool))
        if role != mask_role(callee):  # a second mask: of keys beside one of cells
            kind = {"key_hide": "hide", "lengths": "lengths"}.get(role or "", "keep")
            convention = replace(convention, mask=kind, mask_shape="batch keys")
        return _mask(everything, convention)
    return None


def _as_documented(callee: Callee, convention: Convention, probe: Probe) -> list[int]:
    """The lengths of vectors of distances whose axes are documented as axes of the queries."""
    roles = callee.roles
    if "query" not in roles:
        return []
    whole, own = (callee.axes.get(roles[one].name, "") for one in ("query", "distances"))
    if not own or len(whole) != len(convention.layout):
        return []
    letters = dict(zip(whole, convention.layout, strict=True))
    axes = [letters.get(one, "") for one in own]
    return [probe.sizes[one] for one in axes] if {*axes} <= probe.sizes.keys() else []


def mask_role(callee: Callee, *, keys: bool = False) -> str | None:
    """The role of the parameter that takes a mask; with `keys`, one of padded keys."""
    order = (*OF_KEYS, *MASKS) if keys else MASKS
    return next((role for role in order if role in callee.roles), None)


def _inputs(callee: Callee, convention: Convention, probe: Probe) -> dict[str, Any]:
    layout, dtype = convention.layout, np.dtype(convention.dtype)
    if "queries" in probe.inputs:
        q, k, v = (probe.inputs[name].astype(dtype) for name in ("queries", "keys", "values"))
        query, of_keys = to_layout(q, READY, layout), convention.keys or layout
        sink = {"sink": probe.inputs["sink"].astype(dtype)} if "sink" in probe.inputs else {}
        if convention.shared:
            of_keys = of_keys.replace("H", "")
        key, value = to_layout(k, READY, of_keys), to_layout(v, READY, of_keys)
        found = sink | _of_backward(callee, convention, probe)
        found |= {
            "query": query,
            "key": key,
            "key_t": key.swapaxes(-1, -2).copy(),
            "value": value,
            "key_value": key,
            "x": query.copy(),
        }
        if {"cache_k", "cache_v"} <= callee.roles.keys():
            found |= _with_past(callee, convention, probe, key, value)
        return found
    embeddings = probe.inputs["embeddings"]
    context = probe.inputs.get("context", embeddings)
    if convention.joined:
        context = context[:, : context.shape[1] - embeddings.shape[1]]
    if probe.around is not None:
        embeddings = probe.around.factor * embeddings
    if callee.reads_for_itself:  # what it gets is read by queries of its own
        embeddings = context
    x, context = (to_layout(a.astype(dtype), EMBEDDED, layout) for a in (embeddings, context))
    by_role: dict[str, Any] = {"x": x, "query": x} | _of_embedded_backward(convention, probe)
    if callee.kind == "packed":
        width = probe.inputs["W_k"].shape[1]
        return by_role | {"key": context[..., :width].copy(), "value": context[..., width:].copy()}
    half = probe.inputs["W_k"].shape[0] // 2
    if callee.weights and half == len(callee.weights["W_k"]):  # keys and values come apart
        context, by_role["value"] = context[..., :half].copy(), context[..., half:].copy()
    by_role = {"value": context, **by_role, "key": context}
    if isinstance(probe, GradientProbe) and probe.forward is not None:
        upstream = probe.inputs[f"d_{probe.forward.result_step}"]
        by_role["d_output"] = to_layout(upstream.astype(dtype), EMBEDDED, layout)
    has_context, own = "context" in probe.inputs, callee.roles
    has_context &= not callee.reads_for_itself
    if has_context and not {"context", "key"} & own.keys():
        raise NotOfferedError("it takes no second array of embeddings")
    if has_context or ("context" in own and own["context"].required):
        by_role["context"] = context
    if not callee.weights:
        for name, array in probe.inputs.items():
            if name[:2] == "b_" and layout.endswith("ML"):  # a column for tokens that are columns
                array = array[None]
            if name[:2] in ("W_", "b_"):
                by_role[name] = np.array(
                    array.T if convention.transposed else array, dtype, order="C"
                )
    return by_role


def _of_backward(callee: Callee, convention: Convention, probe: Probe) -> dict[str, Any]:
    """What a backward pass takes besides: the gradient of the output, and what forward has kept."""
    if not isinstance(probe, GradientProbe):
        return {}
    layout, dtype = convention.layout, np.dtype(convention.dtype)
    right = {name: one.astype(dtype) for name, one in probe.right.items()}
    in_rows = "".join(axis for axis in READY if axis in layout)
    rows = _rows_as_documented(callee, layout) or in_rows.removesuffix("D")
    lse, delta = (
        to_layout(one, READY[:-1], rows)
        for one in (right["lse"], (right["d_output"] * right["output"]).sum(-1))
    )
    if convention.keeps_axis:
        lse, delta = lse[..., None], delta[..., None]
    return {
        "d_output": to_layout(right["d_output"], READY, layout),
        "output": to_layout(right["output"], READY, layout),
        "weights": to_layout(right["weights"], READY, in_rows),
        "lse": lse,
        "delta": delta,
    }


def _of_embedded_backward(convention: Convention, probe: Probe) -> dict[str, Any]:
    """The same of a backward pass of embeddings, or of heads side by side."""
    if not isinstance(probe, GradientProbe):
        return {}
    right = {name: one.astype(convention.dtype) for name, one in probe.right.items()}
    whole = {"d_output": f"d_{probe.result_step}", "output": probe.result_step}
    found = {role: to_layout(right[n], EMBEDDED, convention.layout) for role, n in whole.items()}
    batch = slice(None) if "B" in convention.layout else 0
    return found | {role: right[role][batch].copy() for role in ("weights", "lse")}


def _rows_as_documented(callee: Callee, layout: str) -> str:
    """The axes of lse as its documentation gives them; nothing if it gives none."""
    roles = callee.roles
    axes = [callee.axes.get(roles[one].name, "") for one in ("query", "lse") if one in roles]
    if len(axes) < 2 or len(axes[0]) != len(layout) or not {*axes[1]} < {*axes[0]}:
        return ""
    known = dict(zip(axes[0], layout, strict=True))
    found = "".join(known[one] for one in axes[1])
    return found if {*found} == {*layout} - {"D"} else ""


def _with_past(
    callee: Callee, convention: Convention, probe: Probe, key: Array, value: Array
) -> dict[str, Any]:
    """The keys before those of the queries as the past, for a function that takes both apart."""
    past = probe.sizes["S"] - probe.sizes["L"]
    axis = convention.key_token_axis
    if past == 0 and not callee.roles["cache_k"].required:
        return {}
    (old_k, new_k), (old_v, new_v) = (np.split(one, [past], axis=axis) for one in (key, value))
    if convention.one_query:
        new_k, new_v = (one.squeeze(axis) for one in (new_k, new_v))
    if any(WRITTEN.search(text) for _, text in callee.blocks):
        old_k, old_v = (_with_room(one, axis) for one in (old_k, old_v))
    return {"key": new_k, "value": new_v, "cache_k": old_k, "cache_v": old_v}


def _with_room(rows: Array, axis: int) -> Array:
    """A cache with places that are not filled, whose numbers nothing may read."""
    shape = [ROOM if n == axis % rows.ndim else size for n, size in enumerate(rows.shape)]
    return np.concatenate([rows, np.full(shape, 0.5, rows.dtype)], axis)


def _options(callee: Callee, convention: Convention, probe: Probe) -> dict[str, Any]:
    """Everything but the inputs: the mask, flags, sizes and the scale."""
    sizes = probe.sizes
    options: dict[str, Any] = {
        "heads": sizes["H"],
        "width": sizes["D"],
        "key_heads": sizes["G"],
        "causal": probe.causal,
        "grouped": sizes["G"] < sizes["H"],
    }
    if probe.keep is not None:
        if probe.chunks and convention.mask_of_new is None:
            raise NotOfferedError("which keys its mask is of is not known")
        role = mask_role(callee, keys=probe.ability == "key mask")
        if role is None:
            raise NotOfferedError("it takes no mask")
        options[role] = _mask(probe, convention)
        if f"key_{role}" in callee.roles and role in OF_TEXTS:
            options[f"key_{role}"] = _mask(probe, convention, of_keys=True)
    if "bias" in probe.inputs and "pair_bias" not in probe.inputs:
        role = mask_role(callee)
        if role is None or convention.mask != "add" or convention.mask_shape in KEYS_ONLY:
            raise NotOfferedError("it takes no bias")
        bias = np.broadcast_to(probe.inputs["bias"], [sizes[axis] for axis in "BHLS"])
        options[role] = _part_of(bias, convention).astype(convention.dtype)
    if probe.window is not None:
        options["window"] = probe.window - convention.window_extra
    if probe.chunks:
        options["cache"] = None
    if "softcap" in probe.inputs:
        options["softcap"] = float(probe.inputs["softcap"])
    if probe.scale is not None:
        options["scale"] = 1 / probe.scale if convention.scale_divides else probe.scale
    one_by_one = bool(probe.chunks or callee.steps)
    causal = probe.causal and not convention.causal_always and not one_by_one
    for role, needed, text in (
        ("causal", causal, "it has no causal flag"),
        ("window", "window" in options, "it takes no window"),
        ("cache", "cache" in options and not callee.remembers, "it takes no cache"),
        ("scale", "scale" in options, "it takes no scale"),
    ):
        if needed and role not in callee.roles:
            raise NotOfferedError(text)
    return options


def _mask(probe: Probe, convention: Convention, *, of_keys: bool = False) -> Array:
    """The mask of a probe in the shape and kind of one convention; of texts, for the keys."""
    keep, shape, dtype = probe.keep, convention.mask_shape, np.dtype(convention.dtype)
    assert keep is not None
    is_padding = keep.ndim == 4
    if is_padding and probe.sizes["B"] > 1 and shape in ("keys", "cells") and not keep.all():
        raise NotOfferedError("its mask is the same for every batch element")
    if not is_padding and (shape in KEYS_ONLY or convention.mask == "lengths"):
        raise NotOfferedError("its mask hides keys for all queries alike")
    if keep.ndim == 3 and shape not in ("full", "head cells", "1 head cells"):
        raise NotOfferedError("its mask is the same for every head")
    kept = _part_of(probe.rule("mask"), convention)
    kind = convention.mask
    if kind in OF_TEXTS:
        labels = labels_of(keep)
        if labels is None:
            raise NotOfferedError("its mask is that of texts one after the other")
        return _of_texts(labels[of_keys], kind, convention, probe.sizes)
    if kind == "lengths":
        if (np.diff(kept.astype(int)) > 0).any():
            raise NotOfferedError("its padding comes after the text")
        return np.asarray(kept.sum(-1))
    if kind == "add":
        return np.where(kept, 0, -np.inf).astype(dtype)
    kept = ~kept if kind in ("hide", "hide01") else kept
    return kept.astype(dtype) if kind in ("keep01", "hide01") else kept


def _of_texts(labels: Array, kind: str, convention: Convention, sizes: dict[str, int]) -> Array:
    """Texts one after the other: the number of each token's, or where each begins and ends."""
    if kind == "borders":
        return np.concatenate([np.flatnonzero(np.diff(labels, prepend=-1)), [len(labels)]])
    labels = labels + 1  # in some code 0 is padding
    whole = "B" in convention.layout and convention.mask_shape != "cells"
    return np.tile(labels, (sizes["B"], 1)) if whole else labels


def _part_of(cells: Array, convention: Convention) -> Array:
    """A copy of the part of (B, H, L, S) that a mask of this shape has."""
    full = tuple(ALL if axis in convention.layout else 0 for axis in "BHL")
    return np.array(cells[MASK_PARTS.get(convention.mask_shape, full)], order="C")

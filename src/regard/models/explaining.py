"""Explanations of a run: one layer's attention, or every step of the whole model.

Owns which arrays the declared steps are given. Must not know how steps are explained or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.evaluation import Run as Evaluation
from regard.compute.positioned import Rotation
from regard.compute.stored import Matrix, rows_of
from regard.errors import LabelError, OptionError
from regard.explanation.build import explain_problem
from regard.explanation.labels import as_index
from regard.explanation.trace import Trace
from regard.faces import Explanation
from regard.masks import Causal
from regard.models.layers import Stack
from regard.models.text.tokenizer import Tokens
from regard.problems.problem import Problem
from regard.textbook.block import model

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Read:
    """A text that a model has read: its tokens, and how the vocabulary spells one."""

    stack: Stack
    text: str
    tokens: Tokens
    names: Callable[[int], str]


def one_layer(
    read: Read, states: Array, layer: int, head: int | None, options: dict[str, Any]
) -> Explanation:
    """Every step of the attention of one layer, whose input is `states` (L, M)."""
    config, labels = read.stack.config, read.tokens.labels
    own = read.stack.layers[layer]
    values = own.before({"embeddings": states[None]})
    one, group = 0, config.heads // config.key_heads
    which = f"layer {layer} of {config.layers}, counted from 0"
    if head is not None:
        one = counted("head", head, config.heads)
        which = f"layer {layer} of {config.layers}, head {one} of {config.heads}, from 0"
    if own.names[:2] == ("queries", "keys"):
        parts: dict[str, Any] = {
            name: np.asarray(own.given[name])
            for name in (f"{kind}_{letter}" for letter in "qkvo" for kind in "Wb")
            if name in own.given and (head is None or not name.endswith("o"))
        }
        if head is None:
            parts |= {"heads": config.heads, "key_heads": config.key_heads}
        else:
            for name, array in parts.items():
                start = config.head_width * (one if name.endswith("q") else one // group)
                parts[name] = array[..., start : start + config.head_width]
        normed = "attention_input" in values
        parts["embeddings"] = values["attention_input"][0] if normed else states
        said = "embeddings are " + ("what the layer's norm made" if normed else "the layer's input")
    else:  # the steps of a problem have no norm between projections and scores
        said, parts = "queries and keys are normed ones", {"key_labels": labels}
        for name, key in zip(("queries", "keys", "values"), own.names, strict=True):
            at = slice(None) if head is None else one if name == "queries" else one // group
            parts[name] = values[key][0][at]
    if "sink" in own.given:
        sink = np.asarray(own.given["sink"])
        parts["sink"] = sink if head is None else sink[one]
    if (left := config.windows[layer]) is not None:
        parts["window"] = (left, 0)
    problem = Problem(
        title=read.text,
        note=f"A {config.kind} model: {which}. The {said}.",
        query_labels=labels,
        positions=config.rotary[layer],
        scale=config.scale,
        softcap=config.softcap,
        causal=config.family.causal,
        **parts,
    )
    return Explanation.of(explain_problem(problem, **options))


def whole(read: Read) -> Explanation:
    """Every step from the tokens to the logits, by the textbook, in float64."""
    stack, config, ids = read.stack, read.stack.config, read.tokens.ids
    if any(left is not None and left + 1 < len(ids) for left in config.windows):
        raise OptionError(
            f"text has {len(ids)} tokens, but some layers have a window of fewer; the steps of a "
            "whole model have one mask for all layers: explain a shorter text, or one layer"
        )
    form, given = stack.norms["final"][0], _outside(stack, ids)
    names, forms, sizes = frozenset(given), [], {"H": config.heads, "G": config.key_heads}
    for number, one in enumerate(stack.layers):
        weights: dict[str, Matrix] = dict(one.given)
        shared = {"softcap", "scale"}
        if (turn := config.rotary[number]) is not None:
            turned, more = Rotation(turn, {"query": range(len(ids))}, config.head_width).given()
            weights.update(turned)
            sizes |= more
            shared |= {"query_positions", "key_positions"}
        forms.append(replace(one.form, given=frozenset(weights) | (names & shared)))
        given |= {f"{number}.{name}": array for name, array in weights.items()}
    steps = model(tuple(forms), names, form)
    inputs = {step.name: np.asarray(given[step.name]) for step in steps if step.op == "given"}
    evaluation = Evaluation(steps, inputs, sizes, dtype=np.dtype(np.float64), rules=Causal())
    labels = dict.fromkeys("LS", read.tokens.labels)
    labels["X"] = tuple(read.names(int(number)) for number in np.asarray(given["token_numbers"]))
    labels["V"] = tuple(read.names(number) for number in range(config.vocabulary))
    note = f"A {config.kind} model of {config.layers} layers, every step from tokens to logits."
    return Explanation.of(Trace(evaluation, read.text, note, labels))


def _outside(stack: Stack, ids: NDArray[np.int64]) -> dict[str, Matrix]:
    """What the steps outside the layers are given, and what all layers share."""
    config, tables, numbers = stack.config, stack.tables, np.unique(ids)
    given: dict[str, Matrix] = {
        "tokens": ids,
        "token_numbers": numbers,
        "token_table": rows_of(tables["token_table"], numbers),
        "unembedding": tables["unembedding"],
        "query_positions": np.arange(len(ids)),
        "key_positions": np.arange(len(ids)),
        **stack.norms["final"][1],
    }
    if "positions_table" in tables:
        given["positions_vectors"] = rows_of(tables["positions_table"], np.arange(len(ids)))
    for name in ("embedding_scale", "logits_softcap", "softcap", "scale"):
        if (value := getattr(config, name)) is not None:
            given[name] = np.asarray(float(value))
    return given


def counted(what: str, number: Any, count: int) -> int:
    """A layer or a head by its number, checked."""
    at = as_index(what, number)
    if not 0 <= at < count:
        raise LabelError(f"{what} is {at}; it must be 0 to {count - 1}")
    return at

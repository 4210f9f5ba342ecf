"""Explanations of a run: one layer's attention, or every step of the whole model.

Owns which arrays the declared steps are given. Must not know how steps are explained or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.evaluation import Run as Evaluation
from regard.compute.positioned import Rotation
from regard.errors import LabelError, OptionError
from regard.explanation.build import explain_problem
from regard.explanation.labels import as_index
from regard.explanation.trace import Trace
from regard.faces import Explanation
from regard.masks import Causal
from regard.models.layers import Stack
from regard.models.text.tokenizer import Tokens
from regard.problems.problem import Problem
from regard.textbook.block import Layer, model


@dataclass(frozen=True, eq=False)
class Read:
    """A text that a model has read: its tokens, and the input of each layer if it was kept."""

    stack: Stack
    text: str
    tokens: Tokens
    names: Callable[[int], str]  # how the vocabulary spells a token
    states: tuple[Array, ...]


def one_layer(read: Read, layer: int, head: int | None, options: dict[str, Any]) -> Explanation:
    """Every step of the attention of one layer, from the rows that its norm makes."""
    config = read.stack.config
    number = counted("layer", layer, config.layers)
    if not read.states:
        raise OptionError("the states of this run were not kept; run a shorter text, as a whole")
    own = read.stack.layers[number]
    values = own.before({"embeddings": read.states[number][None]})
    rows = values["attention_input" if "attention_input" in values else "embeddings"][0]
    parts: dict[str, Any] = {
        name: own.given[name]
        for name in (f"{kind}_{letter}" for letter in "qkvo" for kind in "Wb")
        if name in own.given
    }
    which = f"layer {number} of {config.layers}, counted from 0"
    if head is None:
        parts |= {"heads": config.heads, "key_heads": config.key_heads}
    else:
        one, group = counted("head", head, config.heads), config.heads // config.key_heads
        which = f"layer {number} of {config.layers}, head {one} of {config.heads}, from 0"
        for name in parts.keys() & {"W_o", "b_o"}:
            del parts[name]
        for name, array in parts.items():
            start = config.head_width * (one if name.endswith("q") else one // group)
            parts[name] = array[..., start : start + config.head_width]
    parts |= {"scale": config.scale, "softcap": config.softcap, "causal": config.family.causal}
    if (left := config.windows[number]) is not None:
        parts["window"] = (left, 0)
    problem = Problem(
        title=read.text,
        note=f"A {config.kind} model: {which}. The embeddings are what the layer's norm made.",
        embeddings=rows,
        query_labels=read.tokens.labels,
        positions=config.rotary[number],
        **parts,
    )
    return Explanation.of(explain_problem(problem, **options))


def whole(read: Read) -> Explanation:
    """Every step from the tokens to the logits, by the textbook, in float64."""
    stack, config = read.stack, read.stack.config
    ids, names = read.tokens.ids, read.names
    numbers = np.unique(ids)
    table = stack.tables["token_table"]
    given: dict[str, Array] = {
        "tokens": ids,
        "token_numbers": numbers,
        "token_table": table[numbers],
        "unembedding": stack.tables["unembedding"],
        "query_positions": np.arange(len(ids)),
        "key_positions": np.arange(len(ids)),
    }
    extra: set[str] = set()
    if "positions_table" in stack.tables:
        given["positions_vectors"] = stack.tables["positions_table"][: len(ids)]
        extra.add("positions_vectors")
    for name in ("embedding_scale", "logits_softcap", "softcap", "scale"):
        value = getattr(config, name)
        if value is not None:
            given[name] = np.asarray(float(value))
            extra |= {name} & {"embedding_scale", "logits_softcap"}
    sizes = {"H": config.heads, "G": config.key_heads}
    forms = []
    for number, one in enumerate(stack.layers):
        weights, turn = dict(one.given), config.rotary[number]
        if turn is not None:
            turned, more = Rotation(turn, {"query": range(len(ids))}, config.head_width).given()
            weights |= {**turned, **dict.fromkeys(("query_positions", "key_positions"), ids)}
            sizes |= more
        own = frozenset(weights) | ({"softcap"} & given.keys()) | ({"scale"} & given.keys())
        forms.append(Layer(own, *_rest(one.form)))
        given |= {f"{number}.{name}": array for name, array in weights.items()}
    final = stack.norms.get("final")
    form = Layer(frozenset(final[1]), *_rest(final[0])) if final else forms[-1]
    extra |= {name for name in form.given if name.startswith("final_")}
    given |= {**stack.layers[0].given, **(final[1] if final else {}), **given}
    steps = model(tuple(forms), frozenset(extra), form)
    inputs = {step.name: np.asarray(given[step.name]) for step in steps if step.op == "given"}
    evaluation = Evaluation(steps, inputs, sizes, dtype=np.dtype(np.float64), rules=Causal())
    labels = dict.fromkeys("LS", read.tokens.labels)
    labels["X"] = tuple(names(int(number)) for number in numbers)
    labels["V"] = tuple(names(number) for number in range(config.vocabulary))
    note = f"A {config.kind} model of {config.layers} layers, every step from tokens to logits."
    return Explanation.of(Trace(evaluation, read.text, note, labels))


def _rest(form: Layer) -> tuple[Any, ...]:
    return form.norm, form.place, form.activation, form.masked, form.default_scale


def counted(what: str, number: Any, count: int) -> int:
    """A layer or a head by its number, checked."""
    at = as_index(what, number)
    if not 0 <= at < count:
        raise LabelError(f"{what} is {at}; it must be 0 to {count - 1}")
    return at

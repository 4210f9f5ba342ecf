"""Which steps are shown by default, in which order, and what is said of the whole attention.

Must not know how anything is drawn; `step_words` has the sentences for one step.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import safe_text
from regard.explanation import questions
from regard.explanation.derivation import Derivation
from regard.explanation.notation import format_number
from regard.explanation.trace import Trace
from regard.textbook.steps import Step
from regard.views.all_steps import PROJECTIONS, places
from regard.views.step_words import constant_bias, count

# Heads were cut out of these, number by number.
PACKED = tuple(f"projected_{name}" for name in PROJECTIONS)

# Each section goes on to this step of the textbook.
SECTIONS = {
    "Where the numbers start": "context",
    "Projections": "values",
    "Scores": "masked",
    "Softmax": "weights",
    "Output": "lse",
}

# What comes after the output, where there is a loss.
HEADINGS = {"loss": "Loss", "backward": "Gradients"}

# What a reader may switch, and what that does. The last two are mistakes that people make.
WHAT_IF = {
    "scale": {
        "label": "without the scale",
        "words": "The scores are not divided by √D. They lie further apart, so softmax puts more "
        "of the weight on one key.",
    },
    "mask": {
        "label": "without the mask",
        "words": "No key is hidden from any query. A bias of −∞ counts as 0.",
    },
    "causal": {
        "label": "causal",
        "words": "No query sees a key after its own position.",
    },
    "window": {
        "label": "window",
        "words": "A query sees the keys next to it and its own, and none that is further away.",
    },
    "softcap": {
        "label": "softcap",
        "words": "Each score is bent into the range from −1 to 1; the number can be changed in the "
        "steps to the weights.",
    },
    "sink": {
        "label": "sink",
        "words": "A score of 0 that belongs to no key takes part in softmax: what it gets of the "
        "weight is put on nothing.",
    },
    "axis": {
        "label": "softmax over the wrong axis",
        "words": "A mistake: softmax runs down the columns. Now the weights of each key add up to "
        "1, and those of a query need not.",
    },
    "swap": {
        "label": "Q and K swapped",
        "words": "A mistake: keys ask and queries answer. The table of scores is turned over, rows "
        "for columns.",
    },
}


def opening(explanation: Trace) -> tuple[str, ...]:
    """What kind of attention this is, and where its numbers come from."""
    sizes = explanation.source.sizes
    queries, keys = sizes.get("L", 1), sizes["S"]
    asking = count(queries, "query", "queries")
    verb = "looks" if queries == 1 else "look"
    problem = explanation.problem
    if problem is None or problem.embeddings is None:
        words = [f"Attention: {asking} {verb} at {count(keys, 'key')}."]
    elif problem.context is None:
        words = [f"Self-attention: {count(queries, 'token')} look at each other."]
        if queries == 1:
            words = ["Self-attention over one token, which can only look at itself."]
    else:
        words = [f"Cross-attention: {asking} {verb} at {count(keys, 'key')} of another sequence."]
    words += drawn(explanation)
    heads, groups = sizes.get("H", 1), sizes.get("G", 1)
    if heads > 1:
        words.append(
            f"{heads} heads work side by side, each with queries, keys and values of its own."
            if heads == groups
            else f"{heads} heads ask, and {count(groups, 'key head')} answer: "
            f"{heads // groups} neighbouring heads share their keys and values."
        )
    return tuple(words)


def drawn(explanation: Trace) -> tuple[str, ...]:
    """That numbers are random, where they are; nothing is shown in a terminal without it."""
    recipe = explanation.problem.random if explanation.problem is not None else None
    if recipe is None:
        return ()
    return (
        f"Random, not learned: {in_words(recipe.fields)} (generator {recipe.generator}, seed "
        f"{recipe.seed}, {recipe.distribution}). The arithmetic is real; what looks at what means "
        "nothing.",
    )


def outline(explanation: Trace) -> dict[str, tuple[str, ...]]:
    """The names of the steps that are shown by default, by heading."""
    hidden = by_products(explanation)
    sections: dict[str, tuple[str, ...]] = {}
    for name, step in explanation.steps.items():
        if name in hidden:
            continue
        title = HEADINGS.get(step.phase)
        if title is None:
            # Ready queries, keys and values are where the numbers start.
            start = name in PROJECTIONS and step.given
            title = next(
                title
                for title, last in SECTIONS.items()
                if start or places().get(name, places()["scores"]) <= places()[last]
            )
            if title == "Softmax" and explanation.mechanism[1] != "softmax":
                title = "Weights"
        sections[title] = (*sections.get(title, ()), name)
    return sections


def by_products(explanation: Trace) -> tuple[str, ...]:
    """The steps that are shown only on request, because other steps say the same or more."""
    names = {"width", "scale", "softcap", "visible", "sink_shifted", "log_sums", "lse", *PACKED}
    names |= {"key_numbers", "score_temperature", "normalize_bias"}
    if explanation.heads is None:
        names -= set(PACKED)
    if constant_bias(explanation) is not None:
        names.add("bias")
    names |= {name for name, step in explanation.steps.items() if _is_part(step.declared)}
    return tuple(name for name in explanation.steps if name in names)


def _is_part(step: Step) -> bool:
    """Whether a step of the loss or of a gradient only leads to another one."""
    if step.phase == "backward":
        copied = step.of in PACKED or step.of.endswith("_products")
        return copied or not (step.of or step.name == "delta")
    return step.name == "head_losses"


def nonfinite(explanation: Trace) -> tuple[str, Derivation] | None:
    """Where the first NaN or infinity starts that does not say "absent"."""
    first = questions.first_nonfinite(explanation)
    if first is None:
        return None
    number = format_number(first.value)
    return (
        f"Not every number is finite. In the order of the steps, the first is "
        f"{safe_text(first.name, 80)} = {number}, in {first.step}.",
        first,
    )


def in_words(names: Sequence[str]) -> str:
    """Such as "she, likes and coffee"."""
    return " and ".join(", ".join(names).rsplit(", ", 1))

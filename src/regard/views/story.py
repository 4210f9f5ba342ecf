"""The words: what each step means, which steps are shown by default, and in which order.

The only place with prose about attention. Sentences that depend on the numbers are chosen here
too, and so is the way from one number back to the given ones. Must not know how anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np

from regard.errors import safe_text
from regard.explanation import questions
from regard.explanation.derivation import Derivation, verdict
from regard.explanation.notation import format_number
from regard.explanation.questions import Statistics
from regard.explanation.trace import READING_NOTE, Trace
from regard.textbook.steps import Step, textbook
from regard.views.head_view import Head, heads

__all__ = [
    "READING_NOTE",
    "SPREAD",
    "WHAT_IF",
    "Passage",
    "Section",
    "Stop",
    "beside",
    "by_products",
    "declared",
    "lane",
    "nonfinite",
    "opening",
    "outline",
    "passage",
    "significant",
    "step_names",
    "tell",
    "the_way",
    "walk",
    "why_the_scale",
]

# exp of anything larger is infinite in float64.
EXP_LIMIT = 709.78
# exp of anything smaller is 0.
EXP_LEAST = -745.13
# A key with more of a row's weight than this has nearly all of it.
NEARLY_ALL = 0.9

PROJECTIONS = ("queries", "keys", "values")
# Heads were cut out of these, number by number.
PACKED = tuple(f"projected_{name}" for name in PROJECTIONS)

# The steps that lead to each of the three.
_LANES = {
    name: (f"W_{short}", f"b_{short}", f"{one}_products", f"projected_{name}", name)
    for name, short, one in (
        ("queries", "q", "query"),
        ("keys", "k", "key"),
        ("values", "v", "value"),
    )
}

# Each section goes on to this step of the textbook.
SECTIONS = {
    "Where the numbers start": "context",
    "Projections": "values",
    "Scores": "masked",
    "Softmax": "weights",
    "Output": "lse",
}

# What each rule that hides keys means; a rule with a name of its own speaks for itself.
RULES = {
    "causal": "a query sees the keys up to its own position and none after it",
    "window": "a query sees only the keys near its own position",
    "lengths": "the keys after the real ones are padding",
    "segments": "a query sees only the keys of its own segment",
    "mask": "it was given as a table of yes and no",
    "bias −inf": "the bias is −∞ there",
}

# What the statistics of a row of weights mean.
SPREAD = (
    "Entropy is in nats. Effective keys: as many keys with equal weights would spread the weight "
    "as far (exp of the entropy)."
)

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


@dataclass(frozen=True)
class Passage:
    """One step and the sentences that go with it."""

    step: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Some steps under one heading."""

    title: str
    passages: tuple[Passage, ...]


# --- the whole story -----------------------------------------------------------------------------


def opening(explanation: Trace) -> tuple[str, ...]:
    """What kind of attention this is, and where its numbers come from."""
    sizes = explanation.source.sizes
    queries, keys = sizes.get("L", 1), sizes["S"]
    asking = _count(queries, "query", "queries")
    verb = "looks" if queries == 1 else "look"
    problem = explanation.problem
    if problem is None or problem.embeddings is None:
        words = [f"Attention: {asking} {verb} at {_count(keys, 'key')}."]
    elif problem.context is None:
        words = [f"Self-attention: {_count(queries, 'token')} look at each other."]
        if queries == 1:
            words = ["Self-attention over one token, which can only look at itself."]
    else:
        words = [f"Cross-attention: {asking} {verb} at {_count(keys, 'key')} of another sequence."]
    if problem is not None and problem.random is not None:
        drawn = _listed(problem.random.fields)
        recipe = problem.random
        words.append(
            f"Random, not learned: {drawn} (generator {recipe.generator}, seed {recipe.seed}, "
            f"{recipe.distribution}). The arithmetic is real; what looks at what means nothing."
        )
    heads, groups = sizes.get("H", 1), sizes.get("G", 1)
    if heads > 1:
        words.append(
            f"{heads} heads work side by side, each with queries, keys and values of its own."
            if heads == groups
            else f"{heads} heads ask, and {_count(groups, 'key head')} answer: "
            f"{heads // groups} neighbouring heads share their keys and values."
        )
    return tuple(words)


def tell(
    explanation: Trace, *, head: int | None = None, batch: tuple[int, ...] | None = None
) -> tuple[Section, ...]:
    """The steps that are shown by default, in order, under their headings."""
    return tuple(
        Section(title, tuple(passage(explanation, name, head=head, batch=batch) for name in steps))
        for title, steps in outline(explanation).items()
    )


def outline(explanation: Trace) -> dict[str, tuple[str, ...]]:
    """The names of the steps that are shown by default, by the heading that they stand under."""
    hidden = by_products(explanation)
    sections: dict[str, tuple[str, ...]] = {}
    for name, step in explanation.steps.items():
        if name not in hidden:
            # Ready queries, keys and values are where the numbers start.
            start = name in PROJECTIONS and step.given
            title = next(
                title
                for title, last in SECTIONS.items()
                if start or _order()[name] <= _order()[last]
            )
            sections[title] = (*sections.get(title, ()), name)
    return sections


def lane(step: str) -> str:
    """Which of queries, keys and values a step leads to: the three are made side by side."""
    return next((name for name in PROJECTIONS if step in _LANES[name]), "")


def by_products(explanation: Trace) -> tuple[str, ...]:
    """The steps that are shown only on request: their numbers stand elsewhere too, or aside."""
    names = {"width", "scale", "softcap", "visible", "sink_shifted", "log_sums", "lse", *PACKED}
    if explanation.heads is None:
        names -= set(PACKED)
    if _constant_bias(explanation) is not None:
        names.add("bias")
    return tuple(name for name in explanation.steps if name in names)


def nonfinite(explanation: Trace) -> tuple[str, Derivation] | None:
    """Where the first NaN or infinity starts that does not say "absent"."""
    first = questions.first_nonfinite(explanation) if _may_be_nonfinite(explanation) else None
    if first is None:
        return None
    number = format_number(first.value)
    return (
        f"Not every number is finite. In the order of the steps, the first is "
        f"{safe_text(first.name, 80)} = {number}, in {first.step}.",
        first,
    )


def _may_be_nonfinite(explanation: Trace) -> bool:
    """Whether a search is worth its time: block after block, so that nothing is computed twice."""
    absent = {"bias", "biased", "row_maximum", "log_sums", "lse"}
    names = [name for name in explanation.steps if name != "visible"]
    for head in heads(explanation):
        for parts in zip_longest(*(head.blocks(name) for name in names)):
            for name, part in zip(names, parts, strict=True):
                if part is not None:
                    _, numbers, hidden = part
                    fine = np.isfinite(numbers) | hidden
                    if not (fine | (numbers == -np.inf) if name in absent else fine).all():
                        return True
    return False


# --- one step ------------------------------------------------------------------------------------


def passage(
    explanation: Trace,
    step: str,
    *,
    head: int | None = None,
    batch: tuple[int, ...] | None = None,
) -> Passage:
    """The words for one step of one head."""
    explanation.steps[step]  # a step that is not there says why
    return Passage(step, tuple(_sentences(explanation, step, Head(explanation, head, batch))))


def _sentences(explanation: Trace, step: str, own: Head) -> Iterator[str]:
    steps, sizes = explanation.steps, explanation.source.sizes
    match step:
        case "embeddings":
            yield "Each token is a row of numbers, its embedding. All else is computed from these."
        case "context":
            yield "The rows that are looked at: keys and values come from here."
        case "W_q" | "W_k" | "W_v":
            made = {"W_q": "query", "W_k": "key", "W_v": "value"}[step]
            learned = "" if _is_random(explanation, step) else "; in a model it is learned"
            yield f"Turns a row into its {made}, one column for each number of it{learned}."
        case "b_q" | "b_k" | "b_v" | "b_o":
            yield "One number per column, added to every row of the product."
        case "query_products" | "key_products" | "value_products" | "output_products":
            yield "The product alone, before the constant row is added."
        case "projected_queries" | "projected_keys" | "projected_values":
            yield "All heads side by side, as the product makes them."
        case "queries" | "keys" | "values":
            meaning = {
                "queries": "A query says what a row looks for",
                "keys": "A key says what a row can be found by",
                "values": "A value is what a row hands over when it is looked at",
            }[step]
            yield meaning + _projection_words(explanation, step, own.number)
        case "scores":
            yield (
                "How well each query (row) matches each key (column): the two are multiplied "
                "number by number and added up. A larger score is a better match."
            )
            if _symmetric(explanation):
                yield "The table is symmetric only because W_q and W_k are the same here."
        case "width":
            yield "How many numbers a key has, and a query too."
        case "scale":
            yield "What every score is multiplied by."
        case "scaled":
            yield from _scaled_words(explanation)
        case "softcap":
            yield "The bound below which the softcap keeps every score."
        case "capped":
            cap = format_number(float(steps["softcap"].value))
            yield f"The softcap bends scores so that they stay between −{cap} and {cap}."
        case "bias":
            yield "A number for each score, given from outside; −∞ hides a key."
        case "biased":
            yield from _bias_words(explanation, own)
        case "visible":
            yield "1 where a query may see a key, 0 where the key is hidden from it."
        case "masked":
            yield from _mask_words(own)
        case "sink":
            yield (
                "A score that takes part in softmax but belongs to no key: weight that goes to it "
                "is put on nothing."
            )
        case "row_maximum":
            sink = ", or the sink if that is larger" if "sink" in steps else ""
            yield f"The largest score of each row{sink}."
        case "shifted":
            yield (
                "The row's maximum is subtracted, so that the largest number is 0 and exp cannot "
                "overflow. The weights stay the same: the factor that this takes out of every "
                "exponential of a row cancels in the division."
            )
        case "sink_shifted":
            yield "The row's maximum is subtracted from the sink as well."
        case "exponentials":
            yield (
                "exp makes every number positive and turns differences into ratios: a score that "
                "is 1 larger counts 2.72 times as much."
            )
            yield from _range_words(own)
        case "sink_exponential":
            yield "The same for the sink."
        case "row_sums":
            sink = ", with that of the sink" if "sink" in steps else ""
            yield f"The exponentials of each row, added up{sink}."
        case "weights":
            yield from _weight_words(own)
        case "output":
            yield (
                "Each row is a blend of the rows of V: weight times value, added up over the keys."
            )
        case "merged":
            several = sizes.get("H", 1) > 1
            yield f"The outputs of {'all heads' if several else 'the head'}, side by side."
        case "W_o":
            yield "Mixes what the heads have found."
        case "projected_output":
            yield "The final result, one row per query."
        case "log_sums":
            yield "The natural logarithm of each row's sum."
        case "lse":
            yield (
                "The logarithm of the sum of exp of the row's scores. With it, results over parts "
                "of the keys can be merged exactly."
            )


def _projection_words(explanation: Trace, step: str, head: int) -> str:
    """How the vectors come about, and which part of the product belongs to this head."""
    declared, sizes = explanation.steps[step].declared, explanation.source.sizes
    if declared.op == "given":
        return "."
    weights = f"W_{step[0]}"
    source = "X" if step == "queries" or "context" not in explanation.steps else "C"
    plus = f", plus b_{step[0]}" if f"b_{step[0]}" in explanation.steps else ""
    made = f": a row of {source} times each column of {weights}, added up{plus}."
    if declared.op != "split" or sizes[declared.axes[0]] == 1:
        return made
    axis, width = declared.axes[0], sizes[declared.axes[-1]]
    own = head // (sizes["H"] // sizes[axis])
    first, last = own * width, own * width + width - 1
    columns = f"column {first}" if width == 1 else f"columns {first} to {last}"
    which = "Head" if sizes[axis] == sizes["H"] else "Key head"
    return f"{made} {which} {own} has the {columns} of {weights}."


def _scaled_words(explanation: Trace) -> Iterator[str]:
    scale = float(explanation.steps["scale"].value)
    width = explanation.source.sizes["D"]
    if explanation.steps["scale"].formula.endswith("√D"):
        yield (
            f"Divided by √D, here √{width}, that is times {format_number(scale)}. A score adds up "
            "D products: the wider the keys, the further apart the scores. Without the division, "
            "softmax over wide keys would put nearly all weight on one of them."
        )
    else:
        yield (
            f"Times the given scale, {format_number(scale)}. The usual one is 1/√D, "
            f"here 1/√{width}."
        )


def _constant_bias(explanation: Trace) -> float | None:
    """The one number that the bias adds to every score, if it is one."""
    if "bias" not in explanation.steps:
        return None
    found: set[float] = set()
    for head in heads(explanation):
        for _, bias, _ in head.blocks("bias"):
            if bias.size:
                found |= {float(bias.min()), float(bias.max())}
            if len(found) > 1:
                return None
    # −∞ hides: then the bias is needed to see what.
    return next((number for number in found if np.isfinite(number)), None)


def _bias_words(explanation: Trace, own: Head) -> Iterator[str]:
    constant = _constant_bias(explanation)
    same = "every exponential of the row grows by the same factor."
    if constant is not None:
        yield f"The bias is {format_number(constant)} everywhere."
        if "sink" in explanation.steps:
            yield "It is not added to the sink, so it moves weight between the keys and the sink."
        else:
            yield f"Adding the same number to a whole row changes nothing after softmax: {same}"
        return
    masked = "masked" in explanation.steps
    even, seen = "sink" not in explanation.steps, False
    for (_, bias, _), (_, _, hidden) in zip(
        own.blocks("bias"), own.blocks("masked" if masked else "bias"), strict=True
    ):
        visible = np.ma.masked_array(bias, hidden | np.isneginf(bias))
        even = even and bool((visible.min(axis=1) == visible.max(axis=1)).all())
        seen = seen or bool(visible.count())
    if even and seen:
        yield (
            "The bias is added. Within each row it is the same number for every visible key, and "
            f"that changes nothing after softmax: {same}"
        )
    else:
        yield "The bias is added: it draws attention to some keys and away from others."


def _mask_words(own: Head) -> Iterator[str]:
    first = next(
        (
            (start + int(row), int(column))
            for start, _, hidden in own.blocks("masked")
            for row, column in np.argwhere(hidden)[:1]
        ),
        None,
    )
    if first is None:
        yield "No key is hidden from any query here, so nothing changes."
        return
    yield (
        "A key that a query may not see is taken out: its score becomes −∞, and exp of that is 0. "
        "Each hidden cell names the rule that hides it."
    )
    cell = verdict(own.source, own.batch, own.number, *first)
    rules = [leaf.rule for leaf in cell.leaves()]
    if "bias" in own.source.steps and not any(
        np.isneginf(bias).any() for _, bias, _ in own.blocks("bias")
    ):
        rules = [rule for rule in rules if rule != "bias −inf"]
    meant = [f"{rule}: {RULES[rule]}" for rule in dict.fromkeys(rules) if rule in RULES]
    if meant:
        text = "; ".join(meant)
        yield f"{text[0].upper()}{text[1:]}."


def _range_words(own: Head) -> Iterator[str]:
    """Where exp is taken of the scores as they are: whether it left the range of float64."""
    steps = own.source.steps
    if "shifted" in steps:
        return
    scores = steps["exponentials"].operands[0].step
    finite = [block[np.isfinite(block)] for _, block, _ in own.blocks(scores)]
    largest = max((float(block.max()) for block in finite if block.size), default=None)
    if largest is None:
        return
    number = format_number(largest)
    if largest > EXP_LIMIT:
        yield (
            f"Here it is taken of the scores as they are, and the largest, {number}, is beyond "
            f"{EXP_LIMIT}: exp overflows to ∞ and the weights break. Subtracting each row's "
            'maximum first (softmax = "shifted") prevents that.'
        )
        return
    start = (
        "Here it is taken of the scores as they are. That works up to a score of "
        f"{EXP_LIMIT}, where exp overflows; the largest here is {number}. "
    )
    lost = sum(
        int(((block == 0) | hidden).all(axis=1).sum() - hidden.all(axis=1).sum())
        for _, block, hidden in own.blocks("exponentials")
        if block.size
    )
    if lost:
        yield (
            f"{start}Below {format_number(EXP_LEAST)} it underflows to 0, and in "
            f"{_count(lost, 'row')} every exponential did: the weights come out as 0 whatever the "
            'scores. Subtracting the row\'s maximum first (softmax = "shifted") prevents that.'
        )
    else:
        yield (
            f"{start}Libraries first subtract the maximum of the row, which leaves the weights "
            "as they are."
        )


def _weight_words(own: Head) -> Iterator[str]:
    share = "Each exponential divided by the sum of its row: the share of each key in the answer. "
    rows, keys = own.shape("weights")
    sums, blind = np.zeros(rows), np.zeros(rows, np.bool_)
    best, best_key = np.zeros(rows), np.zeros(rows, np.int64)
    for start, weights, hidden in own.blocks("weights") if keys else ():
        here = slice(start, start + len(weights))
        seen = keys - np.broadcast_to(hidden, weights.shape).sum(axis=1)
        sums[here], blind[here] = weights.sum(axis=1), seen == 0
        best[here] = np.where(np.isfinite(weights).all(axis=1) & (seen > 1), weights.max(axis=1), 0)
        best_key[here] = weights.argmax(axis=1)
    if "sink" in own.source.steps:
        with np.errstate(all="ignore"):
            sink = own.rows("sink_exponential", range(rows)) / own.rows("row_sums", range(rows))
        sums += sink[:, 0]
    blind |= not keys
    # What rounding may do to a sum of so many numbers of at most 1.
    even = abs(sums - 1) <= (keys + 2) * np.finfo(np.float64).eps
    one = "1 with the sink's share" if "sink" in own.source.steps else "1"
    if even.all():
        yield share + f"Every row adds up to {one}; the columns need not."
    elif (even | blind).all():
        yield share + f"Every row that sees a key adds up to {one}; the columns need not."
    else:
        lost = int((~even & ~blind).sum())
        yield (
            f"{share}A row should add up to {one}, but {lost} of {_count(rows, 'row')} "
            f"{'does' if lost == 1 else 'do'} not: exp was out of range, or a number not finite."
        )
    if blind.any():
        yield "A row that sees no key at all has weights of 0, and its output is 0."
    row = int(best.argmax()) if rows else 0
    if rows and best[row] > 0.99:
        step = own.explanation.steps["weights"]
        key = safe_text(step.column_labels[int(best_key[row])], 40)
        who = safe_text(step.row_labels[row], 40) if step.row_labels else "the query"
        yield (
            f"Nearly all of the weight of {who} is on {key}, so its output is nearly a copy of "
            "that value."
        )


def _symmetric(explanation: Trace) -> bool:
    problem = explanation.problem
    return (
        problem is not None
        and problem.context is None
        and problem.W_q is not None
        and problem.W_k is not None
        and np.array_equal(problem.W_q, problem.W_k)
        and problem.b_q is None
        and problem.b_k is None
    )


def _is_random(explanation: Trace, step: str) -> bool:
    recipe = explanation.problem.random if explanation.problem else None
    return recipe is not None and step in recipe.fields


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))


# --- statistics ----------------------------------------------------------------------------------


def significant(value: float, digits: int = 8) -> str:
    """A number with so many significant digits.

    >>> significant(2.443300481459231), significant(-1.5e-12), significant(3)
    ('2.4433005', '−1.5e-12', '3')
    """
    if not math.isfinite(value):
        return format_number(value)
    return f"{value + 0.0:.{digits}g}".replace("-", "−", int(value < 0))


def why_the_scale(explanation: Trace, statistics: Statistics) -> str:
    """What the scale does to the variance of the scores, in this call's own numbers."""
    before, after = (statistics.steps.get(name) for name in ("scores", "scaled"))
    if before is None or after is None or before.cells < 2 or not before.variance > 0:
        return ""
    width, scale = explanation.source.sizes["D"], float(explanation.steps["scale"].value)
    start = (
        f"A score q·k adds up D = {width} products, so its variance grows with D; "
        f"here it is {significant(before.variance)}."
    )
    end = f"{significant(after.variance)}. {_spread(explanation, statistics)}".rstrip()
    if explanation.steps["scale"].formula.endswith("√D"):
        return f"{start} Dividing by √{width} brings it to {end}"
    return f"{start} The given scale {format_number(scale)} brings it to {end}"


def _spread(explanation: Trace, statistics: Statistics) -> str:
    """Whether one key gets nearly all the weight of a row, over the rows that have a choice."""
    choices = [
        (~np.broadcast_to(hidden, numbers.shape)).sum(axis=1)
        for head in heads(explanation)
        for _, numbers, hidden in head.blocks("weights")
    ]
    largest = statistics.rows.largest_weight.ravel()
    largest = largest[(np.concatenate([[], *choices]) > 1) & np.isfinite(largest)]
    if not largest.size:
        return ""
    count = int((largest > NEARLY_ALL).sum())
    if not count:
        most = significant(float(largest.max()), 3)
        return f"Softmax does not saturate: no key gets more than {most} of the weight of a row."
    rows = f"{count} of {_count(largest.size, 'row')}" if count < largest.size else "every row"
    return f"Softmax saturates: in {rows} one key gets more than {NEARLY_ALL} of the weight."


# --- from one number back to the given ones ------------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """One derivation on the way, and which of its terms the way follows."""

    derivation: Derivation
    followed: int | None = None  # a position in derivation.terms


def walk(derivation: Derivation) -> tuple[Stop, ...]:
    """From one number back to the given ones: every cell on the way once, results first.

    A sum has many terms; both factors of the largest one are followed.
    """
    waiting = {(derivation.step, derivation.index): derivation}
    found: dict[tuple[str, tuple[int, ...]], Stop] = {}
    while waiting:
        # Always the latest step: everything that uses it has been seen by then.
        at = max(waiting, key=lambda place: _order()[place[0]])
        here = waiting.pop(at)
        followed = largest_term(here)
        if here.op in ("sum", "max") and here is not derivation:
            # One of the row's own numbers is followed already, as a rule.
            source = here.operands[0].step if here.operands else ""
            if any(step == source for step, _ in (*waiting, *found)):
                followed = None
        opened = [here.open(number) for number in _opened(here, followed)]
        opened = [inner for inner in opened if inner.op not in ("given", "visible")]
        found[at] = Stop(here, followed if opened else None)
        for inner in opened:
            waiting.setdefault((inner.step, inner.index), inner)
    return tuple(found.values())


def largest_term(derivation: Derivation) -> int | None:
    """Which term counts most: a NaN before all, then by size."""

    def weight(number: int) -> tuple[bool, float]:
        value = derivation.terms[number].value
        return math.isnan(value), 0.0 if math.isnan(value) else size(value)

    size = float if derivation.op == "max" else abs
    return max(range(len(derivation.terms)), key=weight, default=None)


def the_way() -> str:
    """What the marks in a walk mean."""
    return "In each sum the largest term (▸) is followed, down to the given numbers."


def beside(stops: tuple[Stop, ...]) -> Derivation | None:
    """A number that the way does not pass through, though one on the way is made of it."""
    passed = {(stop.derivation.step, stop.derivation.index) for stop in stops}
    for stop in stops:
        for term in stop.derivation.terms:
            for number in term.operands:
                operand = stop.derivation.operands[number]
                if (operand.step, operand.index) not in passed:
                    other = stop.derivation.open(number)
                    if other.op != "given":
                        return other
    return None


def _opened(derivation: Derivation, followed: int | None) -> tuple[int, ...]:
    if derivation.hidden:
        return ()
    if derivation.terms:
        return derivation.terms[followed].operands if followed is not None else ()
    return tuple(range(len(derivation.operands)))


def step_names() -> tuple[str, ...]:
    """The names of all steps that any call may have, in the order of the textbook."""
    return tuple(declared())


@cache
def _order() -> dict[str, int]:
    """The place of every step in the textbook, those of any call."""
    return {name: place for place, name in enumerate(declared())}


@cache
def declared() -> dict[str, Step]:
    """Every step that any call may have, by its name, in the order of the textbook."""
    weights = {f"{letter}_{short}" for letter in "Wb" for short in "qkvo"}
    every = {"embeddings", "context", "bias", "softcap", "sink", *weights}
    steps: dict[str, Step] = {}
    for step in (*textbook(every, masked=True), *textbook({*PROJECTIONS})):
        steps.setdefault(step.name, step)
    return steps

"""What each step means, and what its statistics say; some sentences are chosen by the numbers.

Must not know which steps are shown, nor how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from regard.errors import safe_text
from regard.explanation.derivation import verdict
from regard.explanation.notation import format_number
from regard.explanation.questions import Statistics
from regard.explanation.trace import Trace
from regard.views import block_words, gradient_words, mechanism_words
from regard.views.head_view import Head, heads

# exp of anything larger is infinite in float64.
EXP_LIMIT = 709.78
# exp of anything smaller is 0.
EXP_LEAST = -745.13
# A key with more of a row's weight than this has nearly all of it.
NEARLY_ALL = 0.9

# What the statistics of a row of weights mean.
EFFECTIVE_KEYS = (
    "Effective keys: as many keys with equal weights would spread the weight as far (exp of the "
    "entropy)."
)
SPREAD = f"Entropy is in nats. {EFFECTIVE_KEYS}"

# What each rule that hides keys means; a rule with a name of its own speaks for itself.
RULES = {
    "causal": "a query sees the keys up to its own position and none after it",
    "window": "a query sees only the keys near its own position",
    "lengths": "the keys after the real ones are padding",
    "segments": "a query sees only the keys of its own segment",
    "mask": "it was given as a table of yes and no",
    "bias −inf": "the bias is −∞ there",
}

# Steps whose meaning is the same in every call.
MEANINGS = {
    "embeddings": "Each token is a row of numbers, its embedding. All else is computed from these.",
    "context": "The rows that are looked at: keys and values come from here.",
    **dict.fromkeys(
        ("b_q", "b_k", "b_v", "b_o"), "One number per column, added to every row of the product."
    ),
    **dict.fromkeys(
        ("query_products", "key_products", "value_products", "output_products"),
        "The product alone, before the constant row is added.",
    ),
    **dict.fromkeys(
        ("projected_queries", "projected_keys", "projected_values"),
        "All heads side by side, as the product makes them.",
    ),
    "width": "How many numbers a key has, and a query too.",
    "scale": "What every score is multiplied by.",
    "softcap": "The bound below which the softcap keeps every score.",
    "bias": "A number for each score, given from outside; −∞ hides a key.",
    "visible": "1 where a query may see a key, 0 where the key is hidden from it.",
    "sink": "A score that takes part in softmax but belongs to no key: weight that goes to it is "
    "put on nothing.",
    "shifted": "The row's maximum is subtracted, so that the largest number is 0 and exp cannot "
    "overflow. The weights stay the same: the factor that this takes out of every exponential of a "
    "row cancels in the division.",
    "sink_shifted": "The row's maximum is subtracted from the sink as well.",
    "sink_exponential": "The same for the sink.",
    "output": "Each row is a blend of the rows of V: weight times value, added up over the keys.",
    "W_o": "Mixes what the heads have found.",
    "projected_output": "The final result, one row per query.",
    "log_sums": "The natural logarithm of each row's sum.",
    "lse": "The logarithm of the sum of exp of the row's scores. With it, results over parts of "
    "the keys can be merged exactly.",
}


def words_of_model(step: str) -> str | None:
    """The words for a step of a model: of its block, or those that attention has for it."""
    if step in _WORDS:
        return None
    plain = step.rpartition(".")[2]
    parts = ("dot", "softmax")
    words = block_words.sentence(step) or MEANINGS.get(plain)
    return words or mechanism_words.sentence(parts, plain)


def sentences(own: Head, step: str) -> tuple[str, ...]:
    """The words for one step of one head."""
    declared = own.source.steps[step]
    if declared.phase != "forward":
        return gradient_words.sentences(declared, own.source.steps)
    words = mechanism_words.sentence(own.explanation.mechanism, step) or MEANINGS.get(step)
    words = words or words_of_model(step)
    if words:
        return (words,)
    return tuple(_WORDS[step](own, step))


def _weight_matrix(own: Head, step: str) -> Iterator[str]:
    made = {"W_q": "query", "W_k": "key", "W_v": "value"}[step]
    recipe = own.explanation.problem.random if own.explanation.problem else None
    learned = "" if recipe and step in recipe.fields else "; in a model it is learned"
    yield f"Turns a row into its {made}, one column for each number of it{learned}."


def _projected(own: Head, step: str) -> Iterator[str]:
    """How the vectors come about, and which part of the product belongs to this head."""
    meaning = {
        "queries": "A query says what a row looks for",
        "keys": "A key says what a row can be found by",
        "values": "A value is what a row hands over when it is looked at",
    }[step]
    steps, sizes = own.source.steps, own.source.sizes
    declared = steps[step]
    if declared.op == "given":
        yield f"{meaning}."
        return
    weights = f"W_{step[0]}"
    source = "X" if step == "queries" or "context" not in steps else "C"
    plus = f", plus b_{step[0]}" if f"b_{step[0]}" in steps else ""
    made = f"{meaning}: a row of {source} times each column of {weights}, added up{plus}."
    if declared.op == "split" and sizes[declared.axes[0]] > 1:
        axis, width = declared.axes[0], sizes[declared.axes[-1]]
        part = own.number // (sizes["H"] // sizes[axis])
        first, last = part * width, part * width + width - 1
        columns = f"column {first}" if width == 1 else f"columns {first} to {last}"
        which = "Head" if sizes[axis] == sizes["H"] else "Key head"
        made += f" {which} {part} has the {columns} of {weights}."
    yield made


def _scores(own: Head, step: str) -> Iterator[str]:
    yield (
        "How well each query (row) matches each key (column): the two are multiplied "
        "number by number and added up. A larger score is a better match."
    )
    problem = own.explanation.problem
    if (
        problem is not None
        and problem.context is None
        and problem.W_q is not None
        and problem.W_k is not None
        and np.array_equal(problem.W_q, problem.W_k)
        and problem.b_q is None
        and problem.b_k is None
    ):
        yield "The table is symmetric only because W_q and W_k are the same here."


def _scaled(own: Head, step: str) -> Iterator[str]:
    scale, width = own.explanation.steps["scale"], own.source.sizes["D"]
    number = format_number(float(scale.value))
    if scale.given:
        usual = f" The usual one is 1/√D, here 1/√{width}."
        yield f"Times the given scale, {number}.{usual if _is_dot(own.explanation) else ''}"
    else:
        yield (
            f"Divided by √D, here √{width}, that is times {number}. A score adds up D products: "
            "the wider the keys, the further apart the scores. Without the division, softmax over "
            "wide keys would put nearly all weight on one of them."
        )


def _is_dot(explanation: Trace) -> bool:
    return explanation.mechanism[0] == "dot"


def _is_softmax(explanation: Trace) -> bool:
    return explanation.mechanism[1] == "softmax"


def _capped(own: Head, step: str) -> Iterator[str]:
    softcap = format_number(float(own.explanation.steps["softcap"].value))
    yield f"The softcap keeps scores between −{softcap} and {softcap}."


def _row_maximum(own: Head, step: str) -> Iterator[str]:
    sink = ", or the sink if that is larger" if "sink" in own.source.steps else ""
    yield f"The largest score of each row{sink}."


def _row_sums(own: Head, step: str) -> Iterator[str]:
    sink = ", with that of the sink" if "sink" in own.source.steps else ""
    yield f"The exponentials of each row, added up{sink}."


def _merged(own: Head, step: str) -> Iterator[str]:
    several = own.source.sizes.get("H", 1) > 1
    yield f"The outputs of {'all heads' if several else 'the head'}, side by side."


def constant_bias(explanation: Trace) -> float | None:
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


def _biased(own: Head, step: str) -> Iterator[str]:
    constant = constant_bias(own.explanation)
    same = "every exponential of the row grows by the same factor."
    if constant is not None:
        yield f"The bias is {format_number(constant)} everywhere."
        if not _is_softmax(own.explanation):
            return
        if "sink" in own.source.steps:
            yield "It is not added to the sink, so it moves weight between the keys and the sink."
        else:
            yield f"Adding the same number to a whole row changes nothing after softmax: {same}"
        return
    masked = "masked" in own.source.steps
    even, seen = "sink" not in own.source.steps and _is_softmax(own.explanation), False
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


def _masked(own: Head, step: str) -> Iterator[str]:
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
    becomes = mechanism_words.HIDDEN[own.explanation.mechanism[1]]
    yield (
        f"A key that a query may not see is taken out: {becomes}. "
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


def _exponentials(own: Head, step: str) -> Iterator[str]:
    """What exp does; where no maximum was subtracted, whether it left the range of float64."""
    yield (
        "exp makes every number positive and turns differences into ratios: a score that "
        "is 1 larger counts 2.72 times as much."
    )
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
            "Here it is taken without subtracting the row maximum, and the largest score, "
            f"{number}, is beyond {EXP_LIMIT}: exp overflows to ∞ and the weights break. "
            'Subtracting the maximum first (softmax = "shifted") prevents that.'
        )
        return
    start = (
        "Here it is taken without subtracting the row maximum. That works up to a score of "
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
            f"{count(lost, 'row')} every exponential did: the weights come out as 0 whatever the "
            'scores. Subtracting the row\'s maximum first (softmax = "shifted") prevents that.'
        )
    else:
        yield f"{start}Libraries subtract it first, which does not change the weights."


def _weights(own: Head, step: str) -> Iterator[str]:
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
            f"{share}A row should add up to {one}, but {lost} of {count(rows, 'row')} "
            f"{'does' if lost == 1 else 'do'} not: exp was out of range, or a number not finite."
        )
    if blind.any():
        yield "A row that sees no key at all has weights of 0, and its output is 0."
    row = int(best.argmax()) if rows else 0
    if rows and best[row] > 0.99:
        explained = own.explanation.steps["weights"]
        key = safe_text(explained.column_labels[int(best_key[row])], 40)
        who = safe_text(explained.row_labels[row], 40) if explained.row_labels else ""
        asking = f'"{who}"' if who else "the query"
        yield (
            f'Nearly all of the weight of {asking} is on "{key}", so its output is nearly a copy '
            "of that value."
        )


_WORDS: dict[str, Callable[[Head, str], Iterator[str]]] = {
    **dict.fromkeys(("W_q", "W_k", "W_v"), _weight_matrix),
    **dict.fromkeys(("queries", "keys", "values"), _projected),
    "scores": _scores,
    "scaled": _scaled,
    "capped": _capped,
    "biased": _biased,
    "masked": _masked,
    "row_maximum": _row_maximum,
    "exponentials": _exponentials,
    "row_sums": _row_sums,
    "weights": _weights,
    "merged": _merged,
}


def count(number: int, one: str, several: str = "") -> str:
    """A number and its noun, in the singular or the plural."""
    return f"{number} {one if number == 1 else several or one + 's'}"


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
    if not (_is_dot(explanation) and _is_softmax(explanation)):
        return ""
    if before is None or after is None or before.cells < 2 or not before.variance > 0:
        return ""
    width, scale = explanation.source.sizes["D"], float(explanation.steps["scale"].value)
    start = (
        f"A score q·k adds up D = {width} products, so its variance grows with D; "
        f"here it is {significant(before.variance)}."
    )
    end = f"{significant(after.variance)}. {_spread(explanation, statistics)}".rstrip()
    if explanation.steps["scale"].given:
        return f"{start} The given scale {format_number(scale)} brings it to {end}"
    return f"{start} Dividing by √{width} brings it to {end}"


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
    saturated = int((largest > NEARLY_ALL).sum())
    if not saturated:
        most = significant(float(largest.max()), 3)
        return f"Softmax does not saturate: no key gets more than {most} of the weight of a row."
    rows = (
        f"{saturated} of {count(largest.size, 'row')}" if saturated < largest.size else "every row"
    )
    return f"Softmax saturates: in {rows} one key gets more than {NEARLY_ALL} of the weight."

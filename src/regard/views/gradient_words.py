"""What the loss and each gradient mean.

Must not know which steps are shown, nor how.
"""

from __future__ import annotations

from collections.abc import Mapping

from regard.textbook.steps import Step

_LOSS = {
    "target": "What the output should be.",
    "cell_losses": "Half the square of how far each number of the output is from its target.",
    "row_losses": "Added up for each row.",
    "head_losses": "Added up for each head.",
    "loss": "All of it added up: 0 where the output is the target. Each gradient says how this "
    "number changes with the number it belongs to.",
}

# What is added to the meaning of a gradient, by the step that it belongs to.
_OF = {
    "weights": "Where it is negative, more weight on that key would bring the loss down.",
    "values": "A value is pulled by every query that reads it, as strongly as its weight is large.",
    "queries": "A query is pulled towards the keys that should have more weight.",
    "keys": "A key is pulled towards the queries that should read more from it.",
    "embeddings": "Everything that a token is used for adds to it.",
}
_OF_OPERATION = {
    "subtract": "The slope of half a square is the difference itself.",
    "softmax_gradient": "The weights of a row add up to 1, so what one score gains others lose: "
    "what counts is dP less its row's average, δ. Every row adds up to 0.",
    "sparsemax": "Among the keys that have weight, what one gains others lose: what counts is dP "
    "less its mean there, δ. The other keys have 0.",
    "zero": "A small change of a logit chooses no other key: 0.",
    "keep": "A hidden key has no part in the loss: 0.",
}

# Steps that are no gradient themselves.
_PARTS = {
    "delta": "The average of each row of dP, weighted by P. The sum of dO·O is the same number.",
    "sink_weights": "The share of each row's weight that goes to the sink.",
    "d_sink_products": "The sink's share pulls as a weight on a value of 0 would.",
    "support": "1 for each key that has weight, 0 for the others.",
    "support_sizes": "How many keys have weight.",
    "support_sums": "dP of the keys that have weight, added up.",
    "capped_slope": "The slope of the softcap at each score: 1 in the middle, 0 far outside.",
}


def sentences(step: Step, forward: Mapping[str, Step]) -> tuple[str, ...]:
    """The words for one step of the loss, or of the way back from it."""
    if step.phase == "loss":
        return (_LOSS[step.name],)
    if step.of:
        symbol = forward[step.of].symbol
        rises = f"How much the loss rises as a number of {symbol} rises by 1"
        if step.op == "given":
            return (f"{rises}: given.",)
        learned = f"A step of learning takes a little of it away from {symbol}."
        about = learned if step.of.startswith(("W_", "b_")) else _OF.get(step.of, "")
        op = "sparsemax" if step.operands and step.operands[0].step == "support" else step.op
        more = (_OF_OPERATION.get(op, ""), about)
        return (f"{rises}, for small changes.", *filter(None, more))
    if step.name == "delta" and step.op == "divide":
        return ("The mean of dP over the keys that have weight.",)
    if step.name in _PARTS:
        return (_PARTS[step.name],)
    name, via, source = step.name.removeprefix("d_").partition("_from_")
    if via:
        return (f"The part of d_{name} that comes through {source}.",)
    name, by, each = name.rpartition("_by_")
    if not by:
        return ("A number on the way to a gradient.",)
    return (f"The part of d_{name} from each {each}, before they are added up.",)

"""What the steps of other scores and normalisations than the plain ones mean.

Must not know which steps are shown, nor how.
"""

from __future__ import annotations

from regard.errors import safe_text
from regard.textbook.mechanisms import Declared

_MEANINGS = {
    "score_W": "The matrix of the score: how much each feature of a query counts for each feature "
    "of a key. In a model it is learned.",
    "transformed_queries": "Each query as the matrix turns it, so that a plain product with the "
    "keys is left to do.",
    "score_W_q": "Turns a query into its part of the hidden features; in a model it is learned.",
    "score_W_k": "Turns a key into its part of the hidden features; in a model it is learned.",
    "score_v": "What each hidden feature counts; in a model it is learned.",
    "query_parts": "The part of each hidden feature that comes from the query.",
    "key_parts": "The part of each hidden feature that comes from the key.",
    "query_lengths": "How long each query is, as a vector.",
    "key_lengths": "How long each key is, as a vector.",
    "unit_queries": "The direction of each query: the same vector, of length 1. A vector of zeros "
    "has none and stays.",
    "unit_keys": "The direction of each key: the same vector, of length 1. A vector of zeros has "
    "none and stays.",
    "cosines": "The cosine of the angle between each query and each key: 1 for the same direction, "
    "0 at a right angle, −1 for opposite ones.",
    "score_temperature": "What the cosines are divided by: the smaller, the more of the weight is "
    "on the best key.",
    "distances": "The square of how far each key is from each query.",
    "query_features": "Each query in numbers that are never negative.",
    "key_features": "Each key in numbers that are never negative.",
    "normalize_bias": "What is added to every logit before the sigmoid.",
    "with_bias": "The logits with the bias of the sigmoid. Unlike in a softmax it matters: no row "
    "is divided by its sum.",
    "key_numbers": "The number of each key, from 0.",
    "chosen": "The number of the key with the largest logit; of several, the first. A row that "
    "sees no key has none: ∞.",
    "threshold": "The number that is taken away from each row so that what is left above 0 adds "
    "up to 1. A row that sees no key has none: −∞.",
    "query_positions": "Where each query is in the text.",
    "key_positions": "Where each key is in the text.",
    "frequencies": "By how much each feature is turned from one position to the next, in radians; "
    "the two features of a pair have opposite signs. A feature with 0 is not turned.",
    "rotary_factors": "What cosines and sines are multiplied by; a longer context asks for more.",
    "embedding_positions": "Where each token is in the text.",
    "wave_frequencies": "How fast the wave of each feature is, in radians from one position to the "
    "next: the later the feature, the slower.",
    "wave_starts": "Where each wave begins, in radians: the sine of π / 2 more is a cosine.",
    "wave_angles": "How far each wave has come at each position, in radians.",
    "wave_phases": "The same from where each wave begins.",
    "waves": "What is added to each embedding: for each position a pattern of its own.",
    "positions_vectors": "What is added to the embedding at each position; in a model it is "
    "learned.",
    "placed_embeddings": "Each embedding with the vector of its position added, so that the same "
    "word at two places is two vectors.",
    "positions_slopes": "How much a logit is lowered for each position between query and key: one "
    "number for each head.",
    "apart": "How many positions lie between each query and each key.",
    "penalties": "What is taken away from each logit: the further apart, the more.",
    "positions_table": "The number for each bucket of distances; in a model it is learned.",
    "bucket_numbers": "The number of each bucket, from 0.",
    "buckets": "The bucket of each query and key: what their distance is, for far ones about.",
    "relative_bias": "The number from the table for each query and key.",
    "positioned": "The logits with what the distance of query and key does to them.",
}
for _one, _plural in (("query", "queries"), ("key", "keys")):
    _MEANINGS |= {
        f"{_one}_angles": f"The angle by which each feature of a {_one} is turned, in radians.",
        f"{_one}_cosines": "The cosine of each angle.",
        f"{_one}_sines": "The sine of each angle.",
        f"scaled_{_one}_cosines": "The cosines, times the factor.",
        f"scaled_{_one}_sines": "The sines, times the factor.",
        f"rotated_{_plural}": f"Each {_one} with its pairs of features turned by the angles of its "
        "position; ⊥ is the other feature of a pair. A score of two turned vectors depends on how "
        "far apart they are.",
    }

_SCORES = {
    "general": "How well each query (row) matches each key (column), with the matrix between them.",
    "additive": "How well each query (row) matches each key (column): the two parts of each hidden "
    "feature are added, tanh keeps the sum between −1 and 1, and v says what it counts.",
    "cosine": "How well each query (row) matches each key (column), whatever their lengths.",
    "distance": "How well each query (row) matches each key (column): the nearer, the higher.",
    "features": "How well each query (row) matches each key (column); no score is negative.",
}

_HARD = "All weight of a row is on the chosen key, so the output is that value."
_WEIGHTS = {
    "sigmoid": "Each weight is made from its own logit alone, between 0 and 1. A row need not add "
    "up to 1.",
    "hard": f"{_HARD} A small change of a logit changes no weight: its gradient is 0.",
    "hard, straight-through": f"{_HARD} The gradient goes through as if weights were logits.",
    "sparsemax": "What is left of each logit above the threshold. Keys below it have no weight at "
    "all, and a row that sees a key adds up to 1.",
    "proportional": "Each score's share of its row's sum, without exp: a row that sees a key adds "
    "up to 1.",
}

# What becomes of a key that may not be seen.
HIDDEN = {
    "softmax": "its score becomes −∞, and exp of that is 0",
    "sigmoid": "its score becomes −∞, and the sigmoid of that is 0",
    "hard": "its score becomes −∞, which is never the largest",
    "hard, straight-through": "its score becomes −∞, which is never the largest",
    "sparsemax": "its score becomes −∞, which is below any threshold",
    "proportional": "its score becomes 0, and so does its share",
}


def sentence(mechanism: tuple[str | Declared, str], step: str) -> str:
    """The words for one step; "" where those of the plain mechanism hold."""
    score, normalize = mechanism
    if isinstance(score, Declared):
        if step in {own[0] for own in score.steps}:
            return f"A step of the score “{safe_text(score.name, 60)}”."
        score = ""
    own = {"scores": _SCORES.get(score, ""), "weights": _WEIGHTS.get(normalize, "")}
    if normalize == "proportional":
        own["row_sums"] = "The scores of each row, added up."
    return own.get(step) or _MEANINGS.get(step, "")

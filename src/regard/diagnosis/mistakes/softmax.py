"""Mistakes between the scores and the weights: the axis of softmax, and what is used instead."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

SOFTMAX = (
    "e = np.exp(s - s.max(axis=-1, keepdims=True)); P = by_sum(exps(logits), axis=-1)",
    "weights = torch.softmax(scores, dim=-1)",
)
ROUNDED = ("print(weights.round(3))  # round what is shown, not what is used",) * 2
DIGITS = (3, 1, 2, 4)  # more are lost in float32 anyway

WEIGHTS = {
    "softmax_over_queries": (
        "softmax runs over the queries instead of the keys",
        "Columns add up to 1, rows do not: queries compete for each key.",
        "weights = softmax(logits, -2)",
    ),
    "softmax_over_heads": (
        "softmax runs over the heads instead of the keys",
        "Heads compete with each other; with one head every weight is 1.",
        "weights = softmax(logits, 1)",
    ),
    "softmax_over_batch": (
        "softmax runs over the batch instead of the keys",
        "Texts compete with each other; in a batch of one, every weight is 1.",
        "weights = softmax(logits, 0)",
    ),
    "denominator_over_axis_1": (
        "the sum of the exponentials runs over axis 1, that of the heads",
        "The keys are on the last axis.",
        "weights = by_sum(exps(logits), 1)",
    ),
    "softmax_over_everything": (
        "softmax runs over the whole matrix of scores",
        "All weights of a head together add up to 1, and each row to a part of it.",
        "weights = softmax(logits, (-2, -1))",
        "weights = softmax(logits, (1, 2, 3))",
        "weights = softmax(logits, (0, 1, 2, 3))",
        "weights = by_sum(exps(logits), (-2, -1))",
        "weights = by_sum(exps(logits), (1, 2, 3))",
        "weights = exps(logits) / exps(logits).sum()",
    ),
    "softmax_over_heads_and_keys": (
        "softmax runs over heads and keys together",
        "The weights of all heads together add up to 1; one head with high scores takes most.",
        "weights = softmax(logits, (1, 3))",
    ),
    "denominator_over_queries": (
        "the exponentials are divided by the sums of their columns",
        "exp and the maximum follow the row, the sum the column; rows do not add up to 1.",
        "weights = by_sum(exps(logits), -2)",
    ),
    "keepdims_lost": (
        "the row sums lost their axis (no keepdims): column j is divided by the sum of row j",
        "On a square matrix NumPy broadcasts the sums along the wrong axis without an error.",
        "weights = exps(logits) / exps(logits).sum(-1)[..., None, :]",
        "weights = np.exp(logits) / np.exp(logits).sum(-1)[..., None, :]",
    ),
    "maximum_over_queries": (
        "the maximum of each column is subtracted instead of that of each row",
        "Only a constant along the row cancels; a constant along the column changes weights.",
        "weights = softmax(logits - logits.max(-2, keepdims=True))",
        "weights = softmax(logits - logits.max(-1)[..., None, :])",
    ),
    "no_softmax": (
        "there is no softmax",
        "Scores are used as weights: they may be negative and do not add up to 1.",
        "weights = logits",
        "weights = np.where(np.isneginf(logits), 0, logits)",
    ),
    "softmax_twice": (
        "softmax is applied twice",
        "The second one gets numbers between 0 and 1, so its weights are almost equal.",
        "weights = softmax(softmax(logits))",
    ),
    "exp_missing": (
        "scores are divided by their sum without exp",
        "Negative scores give negative weights, and a sum near 0 makes them huge.",
        "weights = logits / logits.sum(-1, keepdims=True)",
        "weights = by_sum(np.where(np.isneginf(logits), 0, logits))",
    ),
    "power_of_two": (
        "2 is raised to the scores instead of e",
        "Scores count ln 2 = 0.69 times as much as they should.",
        "weights = by_sum(2.0**logits)",
    ),
    "log_softmax": (
        "log_softmax is used instead of softmax",
        "The weights are logarithms: all negative, and they do not add up to 1.",
        "weights = np.log(softmax(logits))",
    ),
    "unnormalised": (
        "the exponentials are not divided by their sum",
        "Rows do not add up to 1, so the output grows with the number of keys.",
        "weights = exps(logits)",
        "weights = np.exp(logits)",
    ),
    "sigmoid": (
        "a sigmoid is used instead of softmax",
        "Each weight depends on its own score alone, and rows do not add up to 1.",
        "weights = 1 / (1 + np.exp(-logits))",
    ),
    "hard_maximum": (
        "the key with the highest score gets all weight",
        "Attention blends values; a maximum has no gradient and ignores the other keys.",
        "weights = 1.0 * (logits == logits.max(-1, keepdims=True))",
    ),
    "weights_all_equal": (
        "every token gets the same weight",
        "Scores have no effect: the softmax gets the same number for every key, as where all are "
        "hidden by a finite one, or it runs over an axis of length 1.",
        "weights = np.full_like(logits, 1 / S)",
        "weights = softmax(np.where(np.isneginf(logits), logits, 0))",
        (
            "weights = softmax(scores, axis=1)  # (batch, tokens)",
            "weights = scores.softmax(dim=1)  # (batch, tokens)",
        ),
    ),
    "one_in_the_denominator": (
        "1 is added to the sum of the exponentials",
        "Rows add up to less than 1. As a sink that is a choice (softmax1), but if the maximum "
        "m was subtracted, the 1 has to be exp(0 − m).",
        "weights = exps(logits) / (1 + exps(logits).sum(-1, keepdims=True))",
        "weights = np.exp(logits) / (1 + np.exp(logits).sum(-1, keepdims=True))",
    ),
    "scores_clipped": (
        "scores are clipped before exp",
        "Large scores become equal, and a clear choice becomes a blend.",
        *(f"weights = softmax(np.clip(logits, -{limit}, {limit}))" for limit in (1, 2)),
    ),
    "epsilon_in_the_denominator": (
        "a small number is added to the sum of the exponentials",
        "Once the maximum is subtracted, the sum is at least 1; the number only lowers weights.",
        # Smaller ones change no digit of float32.
        *(
            f"weights = exps(logits) / (exps(logits).sum(-1, keepdims=True) + 1e-{n})"
            for n in (3, 1, 2, 4)
        ),
        *(
            f"weights = np.exp(logits) / (np.exp(logits).sum(-1, keepdims=True) + 1e-{n})"
            for n in (3, 1, 2, 4)
        ),
    ),
    "rounded": (
        "numbers are rounded on the way",
        "round() is for printing; digits that it removes are lost for everything after it.",
        *(f"weights = softmax(logits).round({n})" for n in DIGITS),
        *(f"output = (weights @ v).round({n})" for n in DIGITS),
        *(f"scaled = (scores / np.sqrt(D)).round({n})" for n in DIGITS),
        *(f"scaled = scores.round({n}) / np.sqrt(D)" for n in DIGITS),
        ROUNDED,
    ),
}
MISTAKES = written("one head", SOFTMAX, WEIGHTS)

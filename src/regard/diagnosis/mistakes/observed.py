"""What several calls show, or the digits of a result: mistakes that replace no step.

Owns their words. How each is asked is in `properties.py`.
"""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

DTYPE = (
    "np.asarray(x, dtype=query.dtype)  # every constant and buffer in the dtype of the inputs",
    "torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)  # wide inside, own dtype out",
)
OBSERVED = {
    "dropout_left_on": (
        "dropout is on although nothing is trained",
        "Each answer is another one; F.dropout is on unless it gets training=self.training, and "
        "dropout_p of scaled_dot_product_attention knows no evaluation mode.",
        (
            "weights = weights if not training else drop(weights)",
            "weights = F.dropout(weights, p, training=self.training)",
        ),
    ),
    "state_kept": (
        "what is left of one call changes the next",
        "A default such as cache=[] is made once and shared by every call; keys and values that "
        "are kept are those of an earlier context.",
        (
            "def attend(x, cache=None): cache = [] if cache is None else cache",
            "k = self.k_proj(context)  # of the context of this call",
        ),
    ),
    "argument_changed": (
        "an array that it is given is changed in place",
        "The caller's own numbers are other ones afterwards.",
        (
            "scores = scores * scale  # not scores *= scale",
            "scores = scores.masked_fill(~keep, -torch.inf)",
        ),
    ),
    "batch_elements_mixed": (
        "batch elements are mixed: one text changes the result of another",
        "A softmax, a sum or a reshape runs over the axis of the batch.",
        (
            "weights = softmax(scores, axis=-1)  # of each text by itself",
            "weights = scores.softmax(-1)  # nn.MultiheadAttention(…, batch_first=True)",
        ),
    ),
    "heads_mixed": (
        "heads are mixed: keys and values of one change the output of another",
        "A softmax or a norm runs over the axis of the heads. F.normalize takes axis 1 unless it "
        "gets dim=-1, and a reshape needs a transpose before it.",
        (
            "unit = q / np.linalg.norm(q, axis=-1, keepdims=True)  # and softmax(scores, axis=-1)",
            "unit = F.normalize(q, dim=-1)  # and scores.softmax(dim=-1)",
        ),
    ),
    "computed_in_half_precision": (
        "something between has only the digits of a half-precision type",
        "Three digits are left. Keep the scores and softmax in float32, and round the result once.",
        DTYPE,
    ),
}
FRAGILE = {
    "no_maximum_subtracted": (
        "exp is taken without subtracting the row maximum",
        "exp overflows above 709.8 (float64) or 88.7 (float32): ∞/∞ is NaN. Far below it is 0/0.",
        (
            "e = np.exp(s - s.max(axis=-1, keepdims=True)); P = e / e.sum(axis=-1, keepdims=True)",
            "weights = torch.softmax(scores, dim=-1)",
        ),
    ),
}
MISTAKES = (
    *written("numerics", DTYPE, OBSERVED),
    *written("numerics", DTYPE, FRAGILE, severity="fragile"),
)

"""What the steps of the block around attention mean, and those of a whole model.

Must not know which steps are shown, nor how.
"""

from __future__ import annotations

# The parts of a norm, after its name.
_OF_A_NORM = {
    "sums": "All numbers of a row, added up.",
    "means": "The mean of each row.",
    "centered": "Each row without its mean.",
    "squares": "The squares of a row's numbers, added up.",
    "mean_squares": "The mean of the squares: how large the numbers of a row are.",
    "factors": "What a row is multiplied by, so that the mean of its squares becomes 1.",
    "units": "Rows of one size: none is large only because much was added to it.",
    "scaled": "Each column times a number that was learned for it.",
    "scale": "One learned number for each column, by which it is multiplied.",
    "shift": "One learned number for each column, which is added.",
}
_WORDS = {
    "tokens": "The numbers of the text's tokens in the vocabulary.",
    "token_numbers": "The different tokens of the text.",
    "token_table": "A learned row for each token.",
    "embedding_scale": "What embeddings are multiplied by.",
    "scaled_embeddings": "The embeddings, all multiplied by one number.",
    "positions_vectors": "A learned row for each place of the text.",
    "placed_embeddings": "The row of a token plus the row of its place.",
    "model_width": "How many numbers a row has between the layers.",
    "epsilon": "A small number that keeps a row of zeros from being divided by 0.",
    "after_attention": "What the layer got, plus what its attention found.",
    "attention_sum": "What the layer got, plus what its attention found.",
    "mlp_sum": "What was there before, plus what the MLP made.",
    "hidden": "What the layer gives to the next one: its input, and what both of its parts added.",
    "up": "Each row in a wider space, where single columns can answer to single features.",
    "gate": "How far each column of the wider space is opened.",
    "activated": "A bend in the line: without it, two products in a row would be one.",
    "gated": "Each column times its gate.",
    "down": "The wider rows back in the width of the model.",
    "unembedding": "A learned row for each token, with which the last rows are compared.",
    "logits": "How likely each token is to come next: the larger, the likelier.",
    "uncapped_logits": "The logits before they are bounded.",
    "logits_softcap": "The bound below which every logit is kept.",
    "queries": "What each row looks for, one head beside the other.",
    "keys": "What each row can be found by.",
    "values": "What each row hands over when it is looked at.",
    "scores": "How well each query (row) matches each key (column).",
    "scaled": "Scores that do not grow with the width of the head.",
    "capped": "Scores below a bound.",
    "masked": "Scores of the keys that a query may see.",
    "row_maximum": "The largest score of each row.",
    "exponentials": "exp of each score: none is negative, and differences become ratios.",
    "row_sums": "The exponentials of a row, added up.",
    "weights": "The share of each key in a query's answer.",
    "merged": "The heads side by side.",
}


def sentence(name: str) -> str | None:
    """The words for a step of a model, such as `2.mlp_input_factors`; None if it has none here."""
    plain = name.rpartition(".")[2]
    if plain in _WORDS:
        return _WORDS[plain] if plain != name or plain not in _OF_ATTENTION else None
    if plain.endswith("_products"):
        return "The product alone, before the constant row is added."
    if plain.startswith(("W_", "b_")):
        return "A learned matrix." if plain[0] == "W" else "A learned number for each column."
    for part, words in _OF_A_NORM.items():
        if plain.endswith(f"_{part}"):
            return words
    if plain in _NORMS:
        return "Rows of one size, each column in its own scale."
    return None


# In an explanation of attention alone, these have words that are chosen by the numbers.
_OF_ATTENTION = {
    *("queries", "keys", "values", "scores", "scaled", "capped", "masked", "row_maximum"),
    *("exponentials", "row_sums", "weights", "merged", "positions_vectors", "placed_embeddings"),
}
_NORMS = {
    *("attention_input", "mlp_input", "attention_result", "mlp_result", "final"),
    *("normed_embeddings", "normed_queries", "normed_keys"),
}

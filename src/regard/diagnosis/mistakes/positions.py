"""Mistakes with what is added to the scores or turns their rows: positions, a bias, a softcap."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import Family, written

TURNED = (
    "Q, K = turn(Q, positions), turn(K, positions)  # before the scores; V is not turned",
    "q, k = apply_rotary_pos_emb(q, k, cos, sin)  # v is not turned",
)
HALVES = (
    "angles = np.outer(positions, base ** (-np.arange(0, D, 2) / D)); "
    "angles = np.concatenate([angles, angles], -1)  # with rotate_half",
    "emb = torch.cat((angles, angles), dim=-1)  # with rotate_half; repeat_interleave with pairs",
)
FREQUENCIES = (
    "frequencies = base ** (-np.arange(0, D, 2) / D)",
    "inv_freq = 1.0 / base ** (torch.arange(0, D, 2).float() / D)",
)
PLACES = (
    "Q = turn(Q, past + np.arange(L)); K = turn(K, np.arange(S))",
    "position_ids = torch.arange(past, past + L)  # for the queries and for the new keys",
)
BIAS = (
    "scores = Q @ K.swapaxes(-1, -2) / np.sqrt(D) - slopes[:, None, None] * np.abs(i - j)",
    "scores = q @ k.transpose(-1, -2) / math.sqrt(D) - slopes[:, None, None] * (i - j).abs()",
)
SLOPES = (
    "slopes = 2.0 ** (-8 * np.arange(1, H + 1) / H)",
    "slopes = 2.0 ** (-8 * torch.arange(1, H + 1) / H)",
)
CAP = (
    "scores = cap * np.tanh(scores / cap)  # after the scale, before the mask",
    "scores = cap * torch.tanh(scores / cap)  # after the scale, before the mask",
)
SINK = (
    "m = np.maximum(scores.max(-1), sink); e = np.exp(scores - m[..., None]); "
    "P = e / (e.sum(-1) + np.exp(sink - m))[..., None]",
    "P = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]",
)
ADDED = (
    "logits = q @ k.swapaxes(-1, -2) / np.sqrt(D) + bias  # (H, L, S)",
    "logits = q @ k.transpose(-1, -2) / math.sqrt(D) + bias  # (H, L, S)",
)

ROTARY = {
    "rotary_from_zero_in_each_call": (
        "with a cache, new tokens are turned as if they were at position 0",
        "Position i of a call is position past + i of the text.",
        "new_queries = turn(queries, query_positions - past, frequencies); "
        "new_keys = turn(keys, new_positions - past, frequencies)",
        PLACES,
    ),
    "rotary_in_each_call": (
        "keys in the cache are turned again in each call",
        "A cache of turned keys must not be turned again: turn only the new ones.",
        "all_keys = turn(np.concatenate([old_keys, keys], -2), np.arange(S), frequencies)",
        PLACES,
    ),
    "rotary_on_queries_only": (
        "rotary positions turn the queries but not the keys",
        "A score then depends on the position of the query, not on how far apart the two are.",
        "rotated_keys = keys",
    ),
    "rotary_on_keys_only": (
        "rotary positions turn the keys but not the queries",
        "A score then depends on the position of the key, not on how far apart the two are.",
        "rotated_queries = queries",
    ),
    "rotary_on_values_too": (
        "rotary positions turn the values too",
        "Only scores need positions; a turned value is another value.",
        "values = turn(values, key_positions, frequencies)",
    ),
    "rotary_on_values_and_keys": (
        "rotary positions turn keys and values instead of queries and keys",
        "Queries are not turned, and a turned value is another value.",
        "rotated_queries = queries; values = turn(values, key_positions, frequencies)",
    ),
    "rotary_on_values_and_queries": (
        "rotary positions turn queries and values instead of queries and keys",
        "Keys are not turned, and a turned value is another value.",
        "rotated_keys = keys; values = turn(values, key_positions, frequencies)",
    ),
    "rotary_twice": (
        "rotary positions are applied twice",
        "Rows are turned by twice the angle: a distance counts as twice as far.",
        "rotated_queries = turn(queries, 2 * query_positions, frequencies); "
        "rotated_keys = turn(keys, 2 * key_positions, frequencies)",
    ),
    "rotary_twice_on_keys": (
        "the keys are turned twice",
        "A cache of turned keys must not be turned again.",
        "rotated_keys = turn(keys, 2 * key_positions, frequencies)",
    ),
    "rotary_twice_on_queries": (
        "the queries are turned twice",
        "A score then depends on the position of the query too.",
        "rotated_queries = turn(queries, 2 * query_positions, frequencies)",
    ),
    "rotary_conventions_mixed": (
        "rotary angles are laid out for one convention and rows turned by the other",
        "With halves (rotate_half) feature p and p + D/2 have one angle; with interleaved pairs "
        "features 2p and 2p + 1 do.",
        "frequencies = np.repeat(f, 2) * np.repeat([-1, 1], D // 2)",
        "frequencies = np.tile(f, 2) * np.tile([-1, 1], D // 2)",
        HALVES,
    ),
    "rotary_opposite_directions": (
        "queries and keys are turned in opposite directions",
        "A score then depends on the sum of two positions instead of their difference.",
        "rotated_keys = turn(keys, -key_positions, frequencies)",
        "rotated_queries = turn(queries, -query_positions, frequencies)",
    ),
    "rotary_sign_lost": (
        "the minus of the rotation is missing",
        "A pair (x, y) becomes (x·cos − y·sin, y·cos + x·sin): one of the two sines is negative.",
        "frequencies = np.abs(signed(f))",
        "frequencies = -np.abs(signed(f))",
    ),
    "rotary_position_of_query": (
        "with more keys than queries, the first query is turned as if it were at position 0",
        "With a cache, position i of a call is position past + i of the text.",
        "rotated_queries = turn(queries, query_positions - past, frequencies)",
        PLACES,
    ),
    "rotary_off_by_one": (
        "queries and keys are turned at positions that differ by one",
        "The first query and the first key have the same position.",
        "rotated_queries = turn(queries, query_positions + 1, frequencies)",
        "rotated_keys = turn(keys, key_positions + 1, frequencies)",
        PLACES,
    ),
    "rotary_reversed": (
        "positions of the keys are counted from the end",
        "Key 0 is at position 0, like query 0.",
        "rotated_keys = turn(keys, key_positions[..., ::-1], frequencies)",
        PLACES,
    ),
    "rotary_frequencies_wrong": (
        "the frequencies of rotary positions have another exponent",
        "Pair p turns by base^(−2p/D) radians for each position.",
        "frequencies = signed(f**0.5)",
        "frequencies = signed(f**2)",
        FREQUENCIES,
    ),
    "rotary_frequencies_inverted": (
        "the frequencies of rotary positions are inverted",
        "Pair p turns by base^(−2p/D) radians for each position, not base^(2p/D).",
        "frequencies = signed(1 / f)",
        FREQUENCIES,
    ),
    "rotary_one_frequency": (
        "every pair of features turns at the same speed",
        "Pair p turns by base^(−2p/D) radians for each position.",
        "frequencies = signed(f**0)",
        FREQUENCIES,
    ),
    "rotary_frequencies_reversed": (
        "the frequencies of rotary positions are in reverse order",
        "Pair 0 turns fastest, by 1 radian for each position.",
        "frequencies = signed(f[::-1])",
        FREQUENCIES,
    ),
    "rotary_in_degrees": (
        "angles are taken as degrees",
        "Sines and cosines take radians.",
        "frequencies = np.deg2rad(signed(f))",
        "frequencies = np.rad2deg(signed(f))",
        FREQUENCIES,
    ),
}
ALIBI = {
    "alibi_sign": (
        "ALiBi is added with the wrong sign: far keys are favoured",
        "slope·|i − j| is a penalty: it is subtracted.",
        "positioned = scaled + slopes * np.abs(i - j)",
    ),
    "alibi_position_of_query": (
        "with more keys than queries, ALiBi takes the first query for the first token",
        "With a cache, query i is at position past + i: the oldest keys are favoured otherwise.",
        "positioned = scaled - slopes * np.abs(row - j)",
        PLACES,
    ),
    "alibi_not_absolute": (
        "ALiBi grows with j − i instead of falling with |i − j|",
        "Keys after the query are then favoured the more, the further away they are.",
        "positioned = scaled - slopes * (i - j)",
        "positioned = scaled - slopes * (j - i)",
    ),
    "alibi_slopes_of_eight": (
        "the slopes of ALiBi are 2^−1, 2^−2, … whatever the number of heads",
        "That is right for 8 heads alone; with H heads slope n is 2^(−8n/H).",
        "positions_slopes = 2.0**-h",
        SLOPES,
    ),
    "alibi_slopes_from_zero": (
        "the slopes of ALiBi are counted from 0: the first one is 1",
        "Slope n of H is 2^(−8n/H) for n = 1 … H.",
        "positions_slopes = 2.0 ** (-8 * (h - 1) / H)",
        "positions_slopes = 2.0 ** (1 - h)",
        SLOPES,
    ),
    "alibi_slopes_reversed": (
        "the slopes of ALiBi are in reverse order",
        "The first head has the steepest slope.",
        "positions_slopes = 2.0 ** (-8 * h[::-1] / H)",
        SLOPES,
    ),
    "alibi_one_slope": (
        "every head has the same slope of ALiBi",
        "Heads look near or far because their slopes differ.",
        "positions_slopes = np.full(H, 0.5)",
        *(f"positions_slopes = np.full(H, {n})" for n in (1.0, 0.25, 0.1)),
        "positions_slopes = np.full(H, 2.0 ** (-8 / H))",
        "positions_slopes = np.full(H, 2.0**-8)",
        SLOPES,
    ),
    "alibi_slopes_linear": (
        "the slopes of ALiBi are not powers of two",
        "Slope n of H is 2^(−8n/H).",
        "positions_slopes = h / H",
        "positions_slopes = 1 / h",
        "positions_slopes = np.exp(-8 * h / H)",
        "positions_slopes = np.exp(-h)",
        SLOPES,
    ),
    "alibi_scaled": (
        "ALiBi is divided by √D like the scores",
        "It is added after the scale.",
        "positioned = (scores - slopes * np.abs(i - j)) / np.sqrt(D)",
    ),
    "alibi_twice": (
        "ALiBi is subtracted twice",
        "slope·|i − j| is subtracted once.",
        "positioned = scaled - slopes * 2 * np.abs(i - j)",
    ),
    "alibi_multiplied": (
        "the scores are multiplied by the distances instead of lowered by them",
        "slope·|i − j| is subtracted from each score.",
        "positioned = scaled * slopes * np.abs(i - j)",
    ),
    "alibi_squared": (
        "ALiBi grows with the square of the distance",
        "The penalty is slope·|i − j|.",
        "positioned = scaled - slopes * (i - j) ** 2",
    ),
}
SOFTCAP = {
    "softcap_not_multiplied_back": (
        "tanh(scores / cap) is not multiplied by the cap",
        "Scores then lie between −1 and 1, and weights are almost equal.",
        "capped = np.tanh(scaled / cap)",
    ),
    "softcap_not_divided": (
        "the scores are not divided by the cap before tanh",
        "tanh saturates above 2: all larger scores become the cap.",
        "capped = cap * np.tanh(scaled)",
    ),
    "softcap_before_scale": (
        "the softcap comes before the scale",
        "Unscaled scores are √D times as large, so they are capped too early.",
        "capped = cap * np.tanh(scores / cap) / np.sqrt(D)",
    ),
    "softcap_inverted": (
        "the cap multiplies before tanh and divides after it",
        "A softcap is cap·tanh(scores / cap), not tanh(scores · cap) / cap.",
        "capped = np.tanh(scaled * cap) / cap",
    ),
}
AFTER_MASK = {
    "softcap_after_mask": (
        "the softcap comes after the mask: hidden keys get a score of −cap",
        "−cap is an ordinary score, so hidden keys keep some weight.",
        "masked = cap * np.tanh(np.where(keep, scaled, -1e9) / cap)",
        "masked = cap * np.tanh(np.where(keep, scaled, -np.inf) / cap)",
    ),
}
BIASES = {
    "pair_bias_transposed": (
        "the bias is transposed: query and key are exchanged in it",
        "Rows are queries, columns are keys; a square bias fits both ways.",
        "biased = scaled + T(bias)",
    ),
    "pair_bias_lost": (
        "the bias is not added to the scores",
        "What it says of places or pairs then has no effect.",
        "biased = scaled",
    ),
    "pair_bias_scaled": (
        "the bias is divided by the root of D too",
        "Scores are scaled first, and the bias is added to them.",
        "biased = (scores + bias) / np.sqrt(D)",
    ),
    "pair_bias_subtracted": (
        "the bias is subtracted from the scores",
        "It is added: a large bias means that a key counts more.",
        "biased = scaled - bias",
    ),
}
SINKS = {
    "sink_without_effect": (
        "the sink has no effect: the weights are divided by their sum without it",
        "The share that the sink takes must be missing from the row.",
        "sunk = by_sum(e)",
    ),
    "sink_not_shifted": (
        "the sink's exponential is not shifted by the row maximum",
        "The others are exp(score − m), so the sink's is exp(sink − m).",
        "sunk = e / (e.sum(-1, keepdims=True) + np.exp(sink))",
        "sunk = exps(logits) / (exps(logits).sum(-1, keepdims=True) + np.exp(sink))",
    ),
    "sink_added_unexponentiated": (
        "the sink itself is added to the sum instead of its exponential",
        "A sink is a logit: exp(sink − m) belongs into the sum.",
        "sunk = e / (e.sum(-1, keepdims=True) + sink)",
    ),
    "sink_has_a_value": (
        "the share of the sink goes to a value",
        "A sink takes weight and gives nothing.",
        "output = weights @ v + (1 - weights.sum(-1, keepdims=True)) * v[..., :1, :]",
        "output = weights @ v + (1 - weights.sum(-1, keepdims=True)) * v[..., -1:, :]",
        "output = weights @ v + (1 - weights.sum(-1, keepdims=True)) * v.mean(-2, keepdims=True)",
        "output = weights @ v + (1 - weights.sum(-1, keepdims=True)) * 1.0",
    ),
    "sink_left_at_the_other_end": (
        "the column of a key is left out instead of the sink's: weights are shifted by one key",
        "Where the sink was joined on the right, [..., :-1] leaves it out; on the left, [..., 1:].",
        "output = np.concatenate([weights[..., 1:], 1 - weights.sum(-1, keepdims=True)], -1) @ v",
        "output = np.concatenate([1 - weights.sum(-1, keepdims=True), weights[..., :-1]], -1) @ v",
    ),
    "sink_scaled": (
        "the sink is divided by √D like the scores",
        "A sink is a logit of its own, which is learned without a scale.",
        "sunk = e / (e.sum(-1, keepdims=True) + np.exp(sink / np.sqrt(D) - m))",
    ),
    "sink_of_another_head": (
        "every head has the sink of the first one",
        "There is one sink for each query head.",
        "sunk = e / (e.sum(-1, keepdims=True) + np.exp(sink[:1] - m))",
    ),
}
FAMILY: Family = "positions, softcap and sinks"
MISTAKES = (
    *written(FAMILY, TURNED, ROTARY),
    *written(FAMILY, BIAS, ALIBI),
    *written(FAMILY, CAP, SOFTCAP),
    *written(FAMILY, CAP, AFTER_MASK, "softcap and mask"),
    *written(FAMILY, ADDED, BIASES),
    *written(FAMILY, SINK, SINKS, "sink"),
)

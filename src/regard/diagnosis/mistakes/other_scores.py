"""Mistakes of attention that is meant to have another score, or another normalization."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import Family, written

COSINE = (
    "scores = unit(Q) @ unit(K).swapaxes(-1, -2) / temperature  # unit: rows of length 1",
    "scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) / temperature",
)
ADDITIVE = (
    "scores = np.tanh((Q @ W_q)[..., :, None, :] + (K @ W_k)[..., None, :, :]) @ v",
    "scores = torch.tanh((q @ W_q).unsqueeze(-2) + (k @ W_k).unsqueeze(-3)) @ v",
)
GENERAL = ("scores = Q @ W @ K.swapaxes(-1, -2)", "scores = q @ W @ k.transpose(-1, -2)")
DISTANCE = (
    "scores = -np.square(Q[..., :, None, :] - K[..., None, :, :]).sum(-1)",
    "scores = -torch.cdist(q, k).square()",
)
LINEAR = (
    "out = phi(q) @ (phi(k).T @ v) / (phi(q) @ phi(k).sum(0))[:, None]",
    "out = phi(q) @ (phi(k).mT @ v) / (phi(q) @ phi(k).sum(-2, keepdim=True).mT)",
)
SIGMOID = (
    "weights = 1 / (1 + np.exp(-(scores + bias)))",
    "weights = torch.sigmoid(scores + bias)",
)

COSINES = {
    "temperature_multiplied": (
        "the scores are multiplied by temperature instead of divided by it",
        "A temperature below 1 must make weights sharper, not flatter.",
        "scores = cosines * temperature",
    ),
    "cosine_scaled": (
        "cosines are divided by √D too",
        "Only a dot product grows with the width; a cosine is at most 1.",
        "scores = cosines / temperature / np.sqrt(D)",
    ),
    "lengths_left_out": (
        "neither queries nor keys are normalised",
        "A dot product prefers long vectors; a cosine knows directions alone.",
        "unit_queries = queries; unit_keys = keys",
    ),
    "keys_not_normalised": (
        "the keys are not normalised",
        "Long keys then score higher; a cosine knows directions alone.",
        "unit_keys = keys",
        "unit_queries = queries",
    ),
    "columns_normalised": (
        "the columns of queries and keys are normalised instead of the rows",
        "The length of a vector is a sum over its features, the last axis.",
        "unit_queries = queries / np.linalg.norm(queries, axis=-2, keepdims=True); "
        "unit_keys = keys / np.linalg.norm(keys, axis=-2, keepdims=True)",
    ),
    "heads_normalised": (
        "queries and keys are normalised over the heads instead of their features",
        "F.normalize takes axis 1 unless it gets dim=-1.",
        "unit_queries = queries / np.linalg.norm(queries, axis=1, keepdims=True); "
        "unit_keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)",
    ),
    "squares_for_lengths": (
        "vectors are divided by the squares of their lengths",
        "The root of the sum of squares is missing.",
        "unit_queries = queries / lengths_of(queries) ** 2; "
        "unit_keys = keys / lengths_of(keys) ** 2",
    ),
}
ADDITIVES = {
    "no_tanh": (
        "there is no tanh",
        "The query then adds the same to the score of every key, which cancels in softmax.",
        "scores = hidden @ u",
    ),
    "tanh_after_v": (
        "tanh is taken of the sum instead of its terms",
        "Each hidden feature has a tanh of its own, before v adds them up.",
        "scores = np.tanh(hidden @ u)",
    ),
    "relu_for_tanh": (
        "a ReLU is used instead of tanh",
        "Negative hidden features then count nothing.",
        "scores = np.maximum(hidden, 0) @ u",
    ),
    "v_left_out": (
        "the hidden features are added up without v",
        "v says how much each hidden feature counts.",
        "scores = np.tanh(hidden).sum(-1)",
    ),
    "hidden_multiplied": (
        "the parts of query and key are multiplied instead of added",
        "Additive attention adds them; a product is another score.",
        "scores = np.tanh(query_parts[..., :, None, :] * key_parts[..., None, :, :]) @ u",
    ),
    "additive_scaled": (
        "the additive scores are divided by √D",
        "Only a dot product grows with the width; this score is not scaled.",
        "scores = np.tanh(hidden) @ u / np.sqrt(D)",
        "scores = np.tanh(hidden) @ u / np.sqrt(len(u))",
    ),
}
GENERALS = {
    "W_transposed": (
        "W is transposed: the scores are q·Wᵀ·k",
        "Rows of the matrix belong to the features that come in. It runs if it is square.",
        "transformed_queries = queries @ W.T",
    ),
    "W_left_out": (
        "W is left out: the scores are q·k",
        "The query is multiplied by W before it meets a key.",
        "transformed_queries = queries",
    ),
    "general_scaled": (
        "the scores q·W·k are divided by √D too",
        "W has its own size, which is learned: this score is not scaled.",
        "scores = transformed_queries @ T(k) / np.sqrt(D)",
    ),
}
DISTANCES = {
    "distance_averaged": (
        "the squared differences are averaged instead of added up",
        "The score is D times too small.",
        "scores = -(apart(q, k) ** 2) / D",
    ),
    "distance_not_squared": (
        "the distances are not squared",
        "A Gaussian kernel has the square; without it far keys keep more weight.",
        "scores = -apart(q, k)",
    ),
    "distance_halved": (
        "the squared distances are halved",
        "This score has no factor.",
        "scores = -(apart(q, k) ** 2) / 2",
    ),
    "distance_positive": (
        "the squared distances have the wrong sign",
        "The farthest keys then get the most weight.",
        "scores = apart(q, k) ** 2",
    ),
    "distance_of_axes": (
        "the distances are sums of absolute differences",
        "The score is the squared Euclidean distance.",
        "scores = -np.abs(q[..., :, None, :] - k[..., None, :, :]).sum(-1)",
    ),
}
LINEARS = {
    "linear_map_without_one": (
        "the feature map is elu(x) without the 1 that is added",
        "Features below 0 make negative weights; elu(x) + 1 is x + 1 above 0, and exp(x) below.",
        "query_features = phi(queries) - 1; key_features = phi(keys) - 1",
    ),
    "linear_map_of_queries_alone": (
        "the feature map is applied to the queries and not to the keys",
        "Products of the two may be negative, and their sum near 0.",
        "key_features = keys",
    ),
    "linear_map_of_keys_alone": (
        "the feature map is applied to the keys and not to the queries",
        "Products of the two may be negative, and their sum near 0.",
        "query_features = queries",
    ),
    "linear_exp_features": (
        "the features are exponentials",
        "The map is exp(x) below 0 only, and x + 1 above.",
        "query_features = np.exp(queries); key_features = np.exp(keys)",
    ),
    "linear_unnormalised": (
        "linear attention is not divided by φ(q)·Σ φ(k)",
        "Rows of weights do not add up to 1, so the output grows with the number of keys.",
        "weights = scores",
    ),
    "linear_divided_by_keys": (
        "linear attention is divided by the number of keys instead of φ(q)·Σ φ(k)",
        "The sizes of φ stay in the output.",
        "weights = scores / S",
    ),
    "linear_divided_by_sum_of_keys": (
        "linear attention is divided by Σ φ(k) without φ(q)",
        "The sum that divides a row is the product of its own φ(q) with Σ φ(k).",
        "weights = scores / key_features.sum((-1, -2), keepdims=True)",
    ),
}
SIGMOIDS = {
    "bias_subtracted": (
        "the bias is subtracted instead of added",
        "A negative bias makes weights small where there are many keys.",
        "with_bias = logits - shift",
    ),
    "sigmoid_normalised": (
        "the sigmoids are divided by their sum",
        "Each weight is for itself: rows need not add up to 1.",
        "weights = by_sum(1 / (1 + np.exp(-with_bias)))",
    ),
}
FAMILY: Family = "other scores"
MISTAKES = (
    *written(FAMILY, COSINE, COSINES, "cosines"),
    *written(FAMILY, ADDITIVE, ADDITIVES, "additive score"),
    *written(FAMILY, GENERAL, GENERALS, "general score"),
    *written(FAMILY, DISTANCE, DISTANCES, "distances"),
    *written(FAMILY, LINEAR, LINEARS, "linear attention"),
    *written(FAMILY, SIGMOID, SIGMOIDS, "sigmoid"),
)

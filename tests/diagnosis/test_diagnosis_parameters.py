"""Functions of many parameters: trees with norms, latents, residuals, gradients of weights."""

from typing import NamedTuple

import numpy as np
import pytest

import regard
from regard.diagnosis.forms.assigned import columns_assigned
from regard.diagnosis.surroundings import Surroundings


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def split(rows, heads):
    return rows.reshape(*rows.shape[:-1], heads, -1).swapaxes(-2, -3)


def merged(rows):
    rows = rows.swapaxes(-2, -3)
    return rows.reshape(*rows.shape[:-2], -1)


def attend(q, k, v, causal=False, scale=None):
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = np.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else True
    return softmax(np.where(seen, scores, -np.inf)) @ v


def layer_norm(x, g, b, eps=1e-5):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return g * (x - mean) / np.sqrt(variance + eps) + b


def rms_norm(x, gain, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def names_of(function):
    found = regard.diagnose(function)
    return ("right",) if found.ok else found.names or (found.verdict,)


# --- normalisations and residuals -----------------------------------------------------------------


def fused_attention(h, params, heads, scale=None):
    qkv = h @ params["c_attn_w"] + params["c_attn_b"]
    q, k, v = (split(one, heads) for one in np.split(qkv, 3, axis=-1))
    out = merged(attend(q, k, v, causal=True, scale=scale))
    return out @ params["c_proj_w"] + params["c_proj_b"]


def pre_norm(x, params, heads=4):
    """A pre-norm block: x + attention(norm(x)). x: (B, T, d)"""
    return x + fused_attention(layer_norm(x, params["ln_g"], params["ln_b"]), params, heads)


def pre_norm_wide(x, params, heads=4):
    """A pre-norm block: x + attention(norm(x)). x: (B, T, d)"""
    h = layer_norm(x, params["ln_g"], params["ln_b"])
    return x + fused_attention(h, params, heads, scale=1 / (x.shape[-1] // heads))


def normed_added(x, params, heads=4):
    """A pre-norm block: x + attention(norm(x)). x: (B, T, d)"""
    x = layer_norm(x, params["ln_g"], params["ln_b"])
    return x + fused_attention(x, params, heads)


def of_values_too(x, w, n_heads=4):
    """A pre-norm block with RMSNorm. x: (B, T, d)"""
    h = rms_norm(x, w["attn_norm"])
    q, k, v = split(h @ w["wq"], n_heads), split(h @ w["wk"], n_heads), split(h @ w["wv"], n_heads)
    return x + merged(attend(q, k, v)) @ w["wo"]


def not_of_values(x, w, n_heads=4):
    """A pre-norm block with RMSNorm. x: (B, T, d)"""
    h = rms_norm(x, w["attn_norm"])
    q, k, v = split(h @ w["wq"], n_heads), split(h @ w["wk"], n_heads), split(x @ w["wv"], n_heads)
    return x + merged(attend(q, k, v)) @ w["wo"]


class Layer(NamedTuple):
    w_in: np.ndarray  # (d, 3 * d)
    w_out: np.ndarray  # (d, d)
    gamma: np.ndarray
    beta: np.ndarray


def post_norm(p: Layer, x, heads=4):
    """Post-norm: LayerNorm(x + attention(x))."""
    q, k, v = np.split(x @ p.w_in, 3, axis=-1)
    out = merged(attend(split(q, heads), split(k, heads), split(v, heads))) @ p.w_out
    total = x + out
    mu = total.mean(-1, keepdims=True)
    return (total - mu) / np.sqrt(total.var(-1, keepdims=True) + 1e-5) * p.gamma + p.beta


def post_norm_by_width(p: Layer, x, heads=4):
    """Post-norm: LayerNorm(x + attention(x))."""
    q, k, v = np.split(x @ p.w_in, 3, axis=-1)
    q, k, v = split(q, heads), split(k, heads), split(v, heads)
    out = merged(attend(q, k, v, scale=1 / q.shape[-1])) @ p.w_out
    return layer_norm(x + out, p.gamma, p.beta)


def norm_then_sum(p: Layer, x, heads=4):
    """Post-norm: LayerNorm(x + attention(x))."""
    q, k, v = np.split(x @ p.w_in, 3, axis=-1)
    out = merged(attend(split(q, heads), split(k, heads), split(v, heads))) @ p.w_out
    return x + layer_norm(out, p.gamma, p.beta)


def from_torch(sd, x, prefix="layers.0.", heads=4):
    """sd: a state_dict as arrays; torch keeps weights (out, in)."""
    own = prefix + "self_attn."
    qkv = x @ sd[own + "in_proj_weight"].T + sd[own + "in_proj_bias"]
    q, k, v = (split(one, heads) for one in np.split(qkv, 3, axis=-1))
    out = merged(attend(q, k, v)) @ sd[own + "out_proj.weight"].T + sd[own + "out_proj.bias"]
    return layer_norm(x + out, sd[prefix + "norm1.weight"], sd[prefix + "norm1.bias"])


def from_torch_not_turned(sd, x, prefix="layers.0.", heads=4):
    """sd: a state_dict as arrays; torch keeps weights (out, in)."""
    own = prefix + "self_attn."
    qkv = x @ sd[own + "in_proj_weight"].T + sd[own + "in_proj_bias"]
    q, k, v = (split(one, heads) for one in np.split(qkv, 3, axis=-1))
    out = merged(attend(q, k, v)) @ sd[own + "out_proj.weight"] + sd[own + "out_proj.bias"]
    return layer_norm(x + out, sd[prefix + "norm1.weight"], sd[prefix + "norm1.bias"])


def flat(x, gamma, beta, w_q, w_k, w_v, w_o, heads):
    """x + attention(LayerNorm(x)), x: (T, d)"""
    h = layer_norm(x, gamma, beta)
    return (
        x
        + merged(attend(split(h @ w_q, heads), split(h @ w_k, heads), split(h @ w_v, heads))) @ w_o
    )


def linear(x, w, b):
    return x @ w + b


def feed_forward(x, c_fc, c_proj):
    return linear(np.maximum(linear(x, **c_fc), 0), **c_proj)


def of_dictionaries(x, c_attn, c_proj, n_head):
    q, k, v = (split(one, n_head) for one in np.split(linear(x, **c_attn), 3, axis=-1))
    return linear(merged(attend(q, k, v, causal=True)), **c_proj)


def whole_block(x, mlp, attn, ln_1, ln_2, n_head):
    """x: (T, d)"""
    x = x + of_dictionaries(layer_norm(x, **ln_1), **attn, n_head=n_head)
    return x + feed_forward(layer_norm(x, **ln_2), **mlp)


def normed_heads(p, x, heads=4):
    """x (B, T, D); queries and keys are normalised in each head."""
    h = rms_norm(x, p["input_layernorm"])
    q, k = (split(h @ p[n + "_proj"], heads) for n in "qk")
    q, k = rms_norm(q, p["q_norm"]), rms_norm(k, p["k_norm"])
    return x + merged(attend(q, k, split(h @ p["v_proj"], heads), causal=True)) @ p["o_proj"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (pre_norm, "right"),
        (whole_block, "right"),
        (normed_heads, "right"),
        (pre_norm_wide, "scale_by_width"),
        (normed_added, "normalised_input_added"),
        (of_values_too, "right"),
        (not_of_values, "norm_misses_a_part"),
        (post_norm, "right"),
        (post_norm_by_width, "scale_by_width"),
        (norm_then_sum, "norm_before_the_sum"),
        (from_torch, "right"),
        (from_torch_not_turned, "W_o_not_transposed"),
        (flat, "right"),
    ],
)
def test_what_is_around_attention_in_a_function_is_judged_with_it(function, name):
    assert names_of(function) == (name,)


@pytest.mark.parametrize("kind", [{}, {"centred": False}, {"outside": True}, {"unbiased": True}])
def test_rows_of_surroundings_are_what_their_normalisation_makes_of_them(kind):
    around = Surroundings(before=True, last="sum", epsilon=1e-3, **kind)
    rows = around.rows(np.random.default_rng(0).normal(size=(2, 5, 24)))
    np.testing.assert_allclose(around.finish(rows, rows), rows, rtol=1e-12)


# --- weights side by side, and their order --------------------------------------------------------


class Parallel(NamedTuple):
    gamma: np.ndarray  # (dim,)
    wi: np.ndarray  # (dim, heads*dim_head + 2*dim_head + 2*ff)
    attn_wo: np.ndarray  # (heads*dim_head, dim)
    ff_wo: np.ndarray  # (ff, dim)


def parallel(p: Parallel, x, heads=4, dim_head=8):
    """x + attention(norm(x)) + feed_forward(norm(x)); multi-query. x: (n, dim)"""
    h = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p.gamma
    inner = heads * dim_head
    sizes = [inner, inner + dim_head, inner + 2 * dim_head, inner + 2 * dim_head + len(p.ff_wo)]
    q, k, v, ff, gate = np.split(h @ p.wi, sizes, axis=-1)
    out = merged(attend(split(q, heads), k[None], v[None]))
    return x + out @ p.attn_wo + (ff / (1 + np.exp(-gate))) @ p.ff_wo


def test_columns_of_a_feed_forward_layer_may_follow_those_of_attention():
    assert columns_assigned(parallel)["wi"] == "qkv.."
    assert names_of(parallel) == ("right",)


# --- latent attention -----------------------------------------------------------------------------


def latent(x, w_q, w_dkv, w_uk, w_uv, w_o, heads=4):
    """x (B, T, d), w_dkv (d, r), w_uk, w_uv (r, h * e), causal."""
    c = x @ w_dkv
    q, k, v = split(x @ w_q, heads), split(c @ w_uk, heads), split(c @ w_uv, heads)
    return merged(attend(q, k, v, causal=True)) @ w_o


def latent_by_rank(x, w_q, w_dkv, w_uk, w_uv, w_o, heads=4):
    """x (B, T, d), w_dkv (d, r), w_uk, w_uv (r, h * e), causal."""
    c = x @ w_dkv
    q, k, v = split(x @ w_q, heads), split(c @ w_uk, heads), split(c @ w_uv, heads)
    return merged(attend(q, k, v, causal=True, scale=c.shape[-1] ** -0.5)) @ w_o


def latent_by_head(params, x, heads=4):
    q = split(x @ params["W_DQ"] @ params["W_UQ"], heads)
    k, v = np.split(split(x @ params["W_DKV"] @ params["W_UKV"], heads), 2, axis=-1)
    return merged(attend(q, k, v)) @ params["W_O"]


class Absorbed(NamedTuple):
    w_q: np.ndarray  # (d, h, e)
    w_dkv: np.ndarray  # (d, r)
    w_uk: np.ndarray  # (r, h, e)
    w_uv: np.ndarray  # (r, h, e)
    w_o: np.ndarray  # (h, e, d)


def absorbed(p: Absorbed, x):
    """x (t, d)"""
    c = x @ p.w_dkv
    q = np.einsum("td,dhe,rhe->thr", x, p.w_q, p.w_uk)
    weights = softmax(np.einsum("thr,sr->ths", q, c) * p.w_q.shape[-1] ** -0.5)
    return np.einsum("thr,rhe,hed->td", np.einsum("ths,sr->thr", weights, c), p.w_uv, p.w_o)


def test_keys_and_values_may_be_made_of_latents():
    assert names_of(latent) == ("right",)
    assert names_of(latent_by_rank) == ("scale_of_another_size",)
    assert names_of(latent_by_head) == ("right",)
    assert names_of(absorbed) == ("right",)


# --- a projection and a residual as arguments -----------------------------------------------------


def with_dense(fused_qkv, residual, dense_w, dense_b, num_heads=4, whole=False):
    """fused_qkv: (B, T, 3 * C), for each head its q, k and v side by side; dense_w (out, in)."""
    parts = fused_qkv.reshape(*fused_qkv.shape[:2], num_heads, 3, -1)
    q, k, v = (parts[..., n, :].swapaxes(1, 2) for n in range(3))
    width = fused_qkv.shape[-1] // 3 if whole else q.shape[-1]
    return residual + merged(attend(q, k, v, scale=width**-0.5)) @ dense_w.T + dense_b


def with_dense_wrong(fused_qkv, residual, dense_w, dense_b, num_heads=4):
    """fused_qkv: (B, T, 3 * C), for each head its q, k and v side by side; dense_w (out, in)."""
    return with_dense(fused_qkv, residual, dense_w, dense_b, num_heads, whole=True)


def test_what_comes_after_attention_may_be_arguments():
    assert names_of(with_dense) == ("right",)
    assert names_of(with_dense_wrong) == ("scale_by_model_width",)


# --- gradients of weights -------------------------------------------------------------------------


def backward(x, Wq, Wk, Wv, Wo, dy, of_keys):
    q, k, v = x @ Wq, x @ Wk, x @ Wv
    scale, turned = q.shape[-1] ** -0.5, lambda rows: rows.swapaxes(-1, -2)
    p = softmax(q @ turned(k) * scale)
    do = dy @ Wo.T
    dp = do @ turned(v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk, dv = ds @ k * scale, turned(ds) @ q * of_keys(scale), turned(p) @ do
    dx = dq @ Wq.T + dk @ Wk.T + dv @ Wv.T
    dWq, dWk, dWv = ((turned(x) @ one).sum(0) for one in (dq, dk, dv))
    return dx, dWq, dWk, dWv, (turned(p @ v) @ dy).sum(0)


def gradients(x, Wq, Wk, Wv, Wo, dy):
    """x, dy: (B, T, D), weights (D, D). Returns dx, dWq, dWk, dWv, dWo."""
    dx, dWq, dWk, dWv, dWo = backward(x, Wq, Wk, Wv, Wo, dy, lambda scale: scale)
    return dx, dWq, dWk, dWv, dWo


def gradients_of_keys(x, Wq, Wk, Wv, Wo, dy):
    """x, dy: (B, T, D), weights (D, D). Returns dx, dWq, dWk, dWv, dWo."""
    dx, dWq, dWk, dWv, dWo = backward(x, Wq, Wk, Wv, Wo, dy, lambda scale: 1.0)
    return dx, dWq, dWk, dWv, dWo


def test_gradients_of_weights_are_judged_with_those_of_embeddings():
    found = regard.diagnose(gradients)
    assert (found.verdict, len(found.gradients)) == ("right", 5)
    found = regard.diagnose(gradients_of_keys)
    assert found.names == ("gradient_of_keys_not_scaled",)
    states = {one.name: one.state for one in found.gradients}
    assert (states["W_q"], states["W_k"]) == ("right", "wrong")


# --- names ----------------------------------------------------------------------------------------


def in_columns(X, omega_v, omega_q, omega_k):
    """X: (D, N), tokens are columns; omega_* are D x D."""
    q, k, v = omega_q @ X, omega_k @ X, omega_v @ X
    return v @ softmax(q.T @ k / np.sqrt(len(X))).T


def pairs(x, weights, heads=4):
    """weights: pairs of a kernel and a bias, "q", "k", "v" and "o"."""
    q, k, v = (x @ weights["q"][0] + weights["q"][1], x @ weights["k"][0] + weights["k"][1], 0)
    v = x @ weights["v"][0] + weights["v"][1]
    out = merged(attend(split(q, heads), split(k, heads), split(v, heads)))
    return out @ weights["o"][0] + weights["o"][1]


def test_other_names_and_shapes_of_weights():
    assert names_of(in_columns) == ("right",)
    assert names_of(pairs) == ("right",)

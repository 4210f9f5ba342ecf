"""Ways of writing attention that say little of what is what: right, and with one mistake each."""

from __future__ import annotations

import numpy as np
import pytest

import regard


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def names_of(thing):
    found = regard.diagnose(thing)
    assert found.verdict in ("right", "fragile", "mistaken"), found.summary
    return found.names


class PassingOn:
    """attend(queries, keys, values): (N, L, H, E) each, and key_padding (N, S), 1 for tokens."""

    WRONG = False

    def attend(self, queries, keys, values, key_padding=None):
        def phi(x):
            return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

        keep = 1.0 if key_padding is None else key_padding[:, :, None, None]
        Q, K = phi(queries), (phi(keys * keep) if self.WRONG else phi(keys) * keep)
        KV = np.einsum("nshe,nshd->nhed", K, values * keep)
        Z = np.einsum("nlhe,nhe->nlh", Q, K.sum(axis=1))
        return np.einsum("nlhe,nhed->nlhd", Q, KV) / Z[..., None]

    def __call__(self, *args, **kwargs):
        return self.attend(*args, **kwargs)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_call_that_passes_its_arguments_on_is_the_method_that_takes_them(wrong):
    class Linear(PassingOn):
        WRONG = wrong

    assert names_of(Linear) == ("linear_map_of_hidden_keys",) * wrong


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.needs("torch")
def test_a_method_that_a_decorator_wraps_is_one_of_its_class(wrong):
    import torch

    DECORATED["wrong"] = wrong
    assert names_of(step_of(torch)) == ("empty_slots_attended",) * wrong


DECORATED = {"wrong": False}


def step_of(torch):
    """The method of a class that its own module has, as one in a file of its own."""

    class Static(torch.nn.Module):
        """step(x, pos): x is (B, 1, dim), the token at position pos (0, 1, 2, …), in order."""

        def __init__(self, dim=32, n_head=4, max_batch=2, max_seq=16):
            super().__init__()
            self.n_head, self.head_dim = n_head, dim // n_head
            self.wqkv = torch.nn.Linear(dim, 3 * dim, bias=False)
            self.wo = torch.nn.Linear(dim, dim, bias=False)
            shape = (max_batch, n_head, max_seq, self.head_dim)
            self.register_buffer("k_cache", torch.zeros(shape))
            self.register_buffer("v_cache", torch.zeros(shape))

        @torch.no_grad()
        def step(self, x, pos: int):
            B = x.shape[0]
            qkv = self.wqkv(x).view(B, 1, 3, self.n_head, self.head_dim)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            self.k_cache[:B, :, pos] = k[:, :, 0]
            self.v_cache[:B, :, pos] = v[:, :, 0]
            end = None if DECORATED["wrong"] else pos + 1
            keys, values = self.k_cache[:B, :, :end], self.v_cache[:B, :, :end]
            att = (q @ keys.transpose(-2, -1) / self.head_dim**0.5).softmax(-1)
            return self.wo((att @ values).transpose(1, 2).reshape(B, 1, -1))

    Static.__qualname__ = "Static"
    Static.step.__qualname__ = "Static.step"
    globals()["Static"] = Static
    return Static.step


@pytest.mark.parametrize("wrong", [False, True])
def test_a_vector_that_pools_tokens_says_how_wide_they_are(wrong):
    class Pooling:
        """h (batch, steps, dim), mask (batch, steps): 1 for a token, 0 for padding."""

        def __init__(self, dim=16):
            self.w = np.random.default_rng(3).standard_normal(dim)

        def __call__(self, h, mask=None):
            e = h @ self.w / np.sqrt(h.shape[-1])
            if mask is not None and not wrong:
                e = np.where(mask == 1, e, -1e30)
            a = softmax(e, 1)
            return np.einsum("bt,btd->bd", a if mask is None else a * mask, h)

    found = regard.diagnose(Pooling)
    assert (found.verdict == "mistaken") == wrong, found.summary


@pytest.mark.parametrize("wrong", [False, True])
def test_parts_that_a_constructor_puts_side_by_side_are_read_as_they_lie_there(wrong):
    class Fused:
        """W_qkv = [W_q | W_k | W_v]; x (N, T, d_model)."""

        def __init__(self, d_model=16, n_heads=4, seed=0):
            rng = np.random.default_rng(seed)
            self.n_heads, self.d_head = n_heads, d_model // n_heads
            self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(size=(4, d_model, d_model)) / 4
            self.W_qkv = np.concatenate([self.W_q, self.W_k, self.W_v], axis=1)

        def __call__(self, x):
            N, T, M = x.shape
            axes = (self.n_heads, 3) if wrong else (3, self.n_heads)
            qkv = (x @ self.W_qkv).reshape(N, T, *axes, self.d_head)
            q, k, v = qkv.transpose((3, 0, 2, 1, 4) if wrong else (2, 0, 3, 1, 4))
            w = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.d_head))
            return (w @ v).transpose(0, 2, 1, 3).reshape(N, T, M) @ self.W_o

    assert names_of(Fused) == ("fused_columns_misread",) * wrong


def test_parts_that_lie_side_by_side_in_each_head_are_not_those_of_all_heads():
    class ByHead:
        """Columns of W_qkv are (head, [q | k | v], width). x (N, T, d_model)."""

        def __init__(self, d_model=16, n_heads=4):
            rng = np.random.default_rng(0)
            self.n_heads, self.d_head = n_heads, d_model // n_heads
            self.W_qkv = rng.normal(size=(d_model, 3 * d_model)) / 4
            self.W_o = rng.normal(size=(d_model, d_model)) / 4

        def __call__(self, x):
            N, T, M = x.shape
            qkv = (x @ self.W_qkv).reshape(N, T, self.n_heads, 3 * self.d_head)
            q, k, v = (one.swapaxes(1, 2) for one in np.split(qkv, 3, -1))
            w = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.d_head))
            return (w @ v).swapaxes(1, 2).reshape(N, T, M) @ self.W_o

    assert names_of(ByHead) == ()


@pytest.mark.parametrize("wrong", [False, True])
def test_the_bias_of_the_output_is_added_once_and_not_for_each_head(wrong):
    class Looped:
        """W_Q, W_K, W_V (heads, d_model, d_head), W_O (heads, d_head, d_model), b_O (d_model,)."""

        def __init__(self, d_model=32, n_heads=4, d_head=8):
            rng = np.random.default_rng(0)
            self.n_heads, self.d_head = n_heads, d_head
            self.W_Q, self.W_K, self.W_V = rng.normal(size=(3, n_heads, d_model, d_head)) / 4
            self.W_O = rng.normal(size=(n_heads, d_head, d_model)) / 4
            self.b_O = rng.normal(size=d_model)

        def __call__(self, x):
            out = np.zeros_like(x) if wrong else self.b_O
            for h in range(self.n_heads):
                q, k, v = x @ self.W_Q[h], x @ self.W_K[h], x @ self.W_V[h]
                w = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.d_head))
                out = out + w @ v @ self.W_O[h] + (self.b_O if wrong else 0)
            return out

    assert names_of(Looped) == ("b_o_twice",) * wrong


@pytest.mark.parametrize("wrong", [False, True])
def test_heads_of_a_group_have_an_axis_of_their_own(wrong):
    def with_sink(Q, K, V, S, sm_scale):
        """Q (n, kv_heads, group, d), K (n, kv_heads, d), V (n, kv_heads, d), S (kv_heads * group,).

        Causal; the sink is one more logit, without a value. Returns (n, kv_heads * group * d).
        """
        n, n_kv, group, _ = Q.shape
        scores = np.einsum("qhmd,khd->hmqk", Q, K) * sm_scale
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        sink = np.broadcast_to(S.reshape(n_kv, group, 1, 1), (n_kv, group, n, 1))
        weights = softmax(np.concatenate([scores, sink], -1))
        weights = weights[..., 1:] if wrong else weights[..., :-1]
        return np.einsum("hmqk,khd->qhmd", weights, V).reshape(n, -1)

    assert names_of(with_sink) == ("sink_left_at_the_other_end",) * wrong


@pytest.mark.parametrize("wrong", [False, True])
def test_a_default_that_is_the_scale_of_some_width_is_given_for_each_width(wrong):
    def capped(q, k, v, scale=0.125, cap=4.0):
        s = q @ k.swapaxes(-1, -2)
        s = cap * np.tanh(s / cap) * scale if wrong else cap * np.tanh(s * scale / cap)
        return softmax(s) @ v

    assert names_of(capped) == ("softcap_before_scale",) * wrong


@pytest.mark.parametrize("name", ["", "distance_rows_out_of_order", "relative_term_unscaled"])
def test_rows_for_distances_are_as_many_as_their_sum_says(name):
    def shaw(x, Wq, Wk, Wv, aK):
        """x (n, D); W* (D, d); aK (2K + 1, d): row 0 for distance -K, row K for 0, row 2K for K."""
        q, k, v = x @ Wq, x @ Wk, x @ Wv
        n, d = q.shape
        K = len(aK) // 2
        distance = np.arange(n)[None, :] - np.arange(n)[:, None]
        late = name == "distance_rows_out_of_order"
        rows = np.clip(distance + K, -K, K) if late else np.clip(distance, -K, K) + K
        relative = np.einsum("id,ijd->ij", q, aK[rows])
        if name == "relative_term_unscaled":
            return softmax(q @ k.T / np.sqrt(d) + relative) @ v
        return softmax((q @ k.T + relative) / np.sqrt(d)) @ v

    assert names_of(shaw) == ((name,) if name else ())


@pytest.mark.parametrize("scale", ["head", "part"])
def test_the_scale_of_heads_is_seen_where_keys_are_absorbed(scale):
    class Latent:
        """Causal; heads are [nope | rope], and the latent is one for all of them. x (T, dim)."""

        def __init__(self, dim=32, n_heads=4, rank=12, nope=8, rope=4, v_dim=8):
            rng = np.random.default_rng(0)
            self.n_heads, self.rank, self.nope = n_heads, rank, nope
            self.wq = rng.normal(size=(dim, n_heads * (nope + rope))) / 6
            self.wkv_a = rng.normal(size=(dim, rank + rope)) / 6
            self.wk_b = rng.normal(size=(rank, n_heads, nope)) / 4
            self.wv_b = rng.normal(size=(rank, n_heads, v_dim)) / 4
            self.wo = rng.normal(size=(n_heads * v_dim, dim)) / 6
            self.scale = (nope + rope if scale == "head" else nope) ** -0.5

        def __call__(self, x):
            T = len(x)
            q = (x @ self.wq).reshape(T, self.n_heads, -1)
            q_nope, q_pe = q[..., : self.nope], q[..., self.nope :]
            kv = x @ self.wkv_a
            latent, k_pe = kv[:, : self.rank], kv[:, self.rank :]
            q_latent = np.einsum("thn,rhn->thr", q_nope, self.wk_b)
            scores = np.einsum("thr,sr->hts", q_latent, latent)
            scores = (scores + np.einsum("thp,sp->hts", q_pe, k_pe)) * self.scale
            w = softmax(np.where(np.tri(T, dtype=bool), scores, -np.inf))
            out = np.einsum("thr,rhv->thv", np.einsum("hts,sr->thr", w, latent), self.wv_b)
            return out.reshape(T, -1) @ self.wo

    found = regard.diagnose(Latent)
    assert found.names == ("scale_of_a_part",) * (scale == "part"), found.summary
    assert scale == "part" or "scale_of_a_part" in [one.name for one in found.properties]


@pytest.mark.needs("torch")
def test_sinks_that_a_module_keeps_have_no_gradient_among_those_of_its_inputs():
    import torch

    class WithSinks(torch.nn.Module):
        """One more logit for each head, which takes part in the softmax without a value."""

        def __init__(self, dim=32, n_heads=4):
            super().__init__()
            self.n_heads = n_heads
            self.sinks = torch.nn.Parameter(torch.randn(n_heads))
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                torch.nn.Linear(dim, dim) for _ in range(4)
            )

        def forward(self, x):
            B, L, _ = x.shape
            parts = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (p(x).view(B, L, self.n_heads, -1).transpose(1, 2) for p in parts)
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            sinks = self.sinks[None, :, None, None].expand(B, -1, L, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            return self.o_proj((weights @ v).transpose(1, 2).flatten(2))

    assert names_of(WithSinks) == ()

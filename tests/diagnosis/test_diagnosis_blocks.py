"""Blocks of several layers in torch, positions in half precision, additive scores, channels."""

import pytest

import regard

torch = pytest.importorskip("torch")


def names_of(function):
    found = regard.diagnose(function)
    return ("right",) if found.ok else found.names or (found.verdict,)


# --- blocks of several layers ---------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory, causal=False):
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Decoder(torch.nn.Module):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(d_model), torch.nn.LayerNorm(d_model)
        self.own, self.cross = Layer(d_model, n_heads), Layer(d_model, n_heads)

    def forward(self, y, memory):
        h = self.norm1(y)
        z = y + self.own(h, h, causal=True)
        return z + self.cross(self.norm2(z), memory)


class Forgetful(Decoder):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def forward(self, y, memory):
        h = self.norm1(y)
        z = y + self.own(h, h, causal=True)
        return y + self.cross(self.norm2(z), memory)


class Normalised(Decoder):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def forward(self, y, memory):
        h = self.norm1(y)
        z = self.norm2(y + self.own(h, h, causal=True))
        return z + self.cross(z, memory)


class Detector(torch.nn.Module):
    """Positions are added to queries and keys. tgt: (Q, B, C), memory: (S, B, C), pos: (S, B, C)"""

    def __init__(self, d_model=32, n_heads=4, wrong=False):
        super().__init__()
        self.own = torch.nn.MultiheadAttention(d_model, n_heads)
        self.cross = torch.nn.MultiheadAttention(d_model, n_heads)
        self.norm1, self.norm2 = torch.nn.LayerNorm(d_model), torch.nn.LayerNorm(d_model)
        self.wrong = wrong

    def forward(self, tgt, memory, pos=None):
        tgt = self.norm1(tgt + self.own(tgt, tgt, tgt)[0])
        keys = memory if pos is None else memory + pos
        values = keys if self.wrong else memory
        return self.norm2(tgt + self.cross(tgt, keys, values)[0])


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (Decoder, "unknown"),
        (Forgetful, "sublayer_lost"),
        (Normalised, "normalised_input_added"),
        (Detector, "unknown"),
        (Detector(wrong=True), "positions_in_values"),
    ],
)
def test_what_the_layers_of_a_block_compute_is_added(block, name):
    assert names_of(block) == (name,)


# --- positions in half precision ------------------------------------------------------------------


def turned(x, positions, base):
    angles = torch.outer(positions, base ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    cos, sin = (torch.cat([one, one], -1).to(x.dtype) for one in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def with_positions(q, k, v, positions, upcast):
    q, k = turned(q, positions, 10000.0), turned(k, positions, 10000.0)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.float() if upcast else scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v


def in_float32(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(torch.float32), True)


def in_float32_with_scores_in_half(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(torch.float32), False)


def in_the_dtype_of_queries(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(q.dtype).float(), True)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_float32, "right"),
        (in_float32_with_scores_in_half, "right"),
        (in_the_dtype_of_queries, "positions_rounded"),
    ],
)
def test_positions_beyond_256_are_not_rounded(function, name):
    assert names_of(function) == (name,)


# --- additive scores, and channels before time ----------------------------------------------------


class Additive(torch.nn.Module):
    """score = v · tanh(W s + U h). query: (B, 1, d), keys: (B, T, d)"""

    def __init__(self, hidden=16, apart=False):
        super().__init__()
        self.Wa, self.Ua = torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, hidden)
        self.Va, self.apart = torch.nn.Linear(hidden, 1), apart

    def forward(self, query, keys):
        parts = self.Wa(query), self.Ua(keys)
        mixed = sum(map(torch.tanh, parts)) if self.apart else torch.tanh(sum(parts))
        weights = self.Va(mixed).transpose(1, 2).softmax(-1)
        return weights @ keys, weights


def test_a_query_changes_what_is_read():
    assert names_of(Additive) == ("unknown",)
    assert names_of(Additive(apart=True)) == ("queries_without_effect",)


class OfChannels(torch.nn.Module):
    """qkv: (N, H * 3 * C, T), one head after the other."""

    def __init__(self, n_heads=2, power=-0.25):
        super().__init__()
        self.n_heads, self.power = n_heads, power

    def forward(self, qkv):
        batch, width, length = qkv.shape
        ch = width // (3 * self.n_heads)
        q, k, v = qkv.reshape(batch * self.n_heads, 3 * ch, length).split(ch, 1)
        weights = (torch.einsum("bct,bcs->bts", q, k) * ch ** (2 * self.power)).softmax(-1)
        return torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, length)


def test_channels_may_come_before_time():
    assert names_of(OfChannels) == ("right",)
    assert names_of(OfChannels(power=-0.5)) == ("scale_by_width",)

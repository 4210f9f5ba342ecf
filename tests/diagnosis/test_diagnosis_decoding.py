"""Caches, decoding token by token, and numbers that are kept as integers."""

import numpy as np
import pytest

import regard


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def names_of(function):
    found = regard.diagnose(function)
    return ("right",) if found.ok else found.names or (found.verdict,)


# --- integers -------------------------------------------------------------------------------------


def quantize(x, largest=127.0):
    """int8, one scale for each row"""
    scale = np.abs(x).max(-1, keepdims=True) / largest + 1e-12
    return np.round(x / scale).astype(np.int32).astype(np.int8), scale


def quantize_4bit(x):
    low = x.min(-1, keepdims=True)
    scale = np.maximum(x.max(-1, keepdims=True) - low, 1e-8) / 15
    codes = np.clip(np.rint((x - low) / scale), 0, 15).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, low


def read_4bit(packed, scale, low, order=(0, 1)):
    parts = packed & 15, packed >> 4
    codes = np.stack([parts[n] for n in order], -1).reshape(*packed.shape[:-1], -1)
    return codes * scale + low


def attended(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def one_by_one(q, k, v, read):
    """Each token sees what is read of those up to it; (H, T, D)."""
    rows = [
        attended(q[:, t : t + 1], *read(k[:, : t + 1], v[:, : t + 1])) for t in range(q.shape[1])
    ]
    return np.concatenate(rows, 1)


def in_8_bits(q, k, v):
    """q, k, v: (H, T, D), through int8"""
    return one_by_one(q, k, v, lambda *both: [np.multiply(*quantize(x)) for x in both])


def in_8_bits_wrapped(q, k, v):
    """q, k, v: (H, T, D), through int8"""
    return one_by_one(q, k, v, lambda *both: [np.multiply(*quantize(x, 128.0)) for x in both])


def in_8_bits_last_scale(q, k, v):
    """q, k, v: (H, T, D), through int8"""

    def read(x):
        codes, scale = quantize(x)
        return codes * scale[:, -1:]

    return one_by_one(q, k, v, lambda *both: [read(x) for x in both])


def in_4_bits(q, k, v):
    """q, k, v: (H, T, D), quantized to 4 bits"""
    return one_by_one(q, k, v, lambda *both: [read_4bit(*quantize_4bit(x)) for x in both])


def in_4_bits_exchanged(q, k, v):
    """q, k, v: (H, T, D), quantized to 4 bits"""
    return one_by_one(q, k, v, lambda *both: [read_4bit(*quantize_4bit(x), (1, 0)) for x in both])


def smoothed(q, k, v):
    """q, k, v: (H, T, D); keys less their mean, and queries, as int8"""
    (k, k_scale), (q, q_scale) = quantize(k - k.mean(1, keepdims=True)), quantize(q)
    scores = q.astype(int) @ k.astype(int).swapaxes(-1, -2) * q_scale * k_scale.swapaxes(-1, -2)
    return softmax(scores / np.sqrt(q.shape[-1])) @ v


def of_one_query(q, k, v):
    weights = softmax(np.einsum("hd,htd->ht", q, k) / np.sqrt(q.shape[-1]))
    return np.einsum("ht,htd->hd", weights, v)


def of_parts(q, k_codes, k_scale, v_codes, v_scale):
    """q: (H, D); k_codes, v_codes: (H, T, D) int8; k_scale, v_scale: (H, T, 1)"""
    return of_one_query(q, k_codes * k_scale, v_codes * v_scale)


def of_parts_exchanged(q, k_codes, k_scale, v_codes, v_scale):
    """q: (H, D); k_codes, v_codes: (H, T, D) int8; k_scale, v_scale: (H, T, 1)"""
    return of_one_query(q, k_codes * k_scale, v_codes * k_scale)


def of_tuples(q, k_cache, v_cache):
    """q: (H, D); k_cache, v_cache: what quantize_4bit returns for (H, T, D)"""
    return of_one_query(q, read_4bit(*k_cache), read_4bit(*v_cache))


@pytest.mark.parametrize("function", [in_8_bits, in_4_bits, smoothed, of_parts])
def test_numbers_that_are_read_back_from_integers_as_they_were_are_right(function):
    assert names_of(function) == ("right",)


def test_nothing_is_wrong_with_caches_of_integers_that_the_file_makes():
    found = regard.diagnose(of_tuples)
    assert not found.mistakes
    assert found.verdict in ("right", "unknown")


@pytest.mark.parametrize("function", [in_8_bits_wrapped, in_4_bits_exchanged])
def test_integers_that_are_read_back_as_other_numbers_are_named(function):
    found = regard.diagnose(function)
    assert found.names == ("quantized_numbers_misread",)
    assert "steps of the integers" in found.mistakes[0].why


@pytest.mark.parametrize("function", [in_8_bits_last_scale, of_parts_exchanged])
def test_integers_that_are_read_with_another_scale_are_named_or_the_line_is(function):
    assert names_of(function)[0] in ("one_change", "quantized_numbers_misread")


def test_no_coarser_rounding_is_offered_for_one_that_wraps():
    assert "one_change" not in names_of(in_8_bits_wrapped)


# --- buffers --------------------------------------------------------------------------------------


class Buffer:
    """Causal attention, with keys and values in a buffer that is made once."""

    def __init__(self, d_model=16, n_heads=2, max_len=40, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.width = n_heads, d_model // n_heads
        self.wq, self.wk, self.wv, self.wo = rng.normal(size=(4, d_model, d_model)) / 4
        self.keys = np.zeros((max_len, n_heads, self.width))
        self.values = np.zeros((max_len, n_heads, self.width))
        self.count = 0

    def visible(self):
        return np.arange(len(self.keys)) < self.count

    def step(self, x):
        q, k, v = (x @ w for w in (self.wq, self.wk, self.wv))
        self.keys[self.count] = k.reshape(self.heads, self.width)
        self.values[self.count] = v.reshape(self.heads, self.width)
        self.count += 1
        q = q.reshape(self.heads, self.width)
        scores = np.einsum("hd,thd->ht", q, self.keys) / np.sqrt(self.width)
        weights = softmax(np.where(self.visible(), scores, -1e9))
        return np.einsum("ht,thd->hd", weights, self.values).reshape(-1) @ self.wo

    def go_through(self, xs):
        return np.stack([self.step(x) for x in xs])


class BufferAll(Buffer):
    def visible(self):
        return np.ones(len(self.keys), bool)

    def go_through(self, xs):
        return np.stack([self.step(x) for x in xs])


class BufferLate(Buffer):
    def visible(self):
        return np.arange(len(self.keys)) < self.count - 1

    def go_through(self, xs):
        return np.stack([self.step(x) for x in xs])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Buffer, "right"),
        (Buffer.go_through, "right"),
        (BufferAll.go_through, "empty_slots_attended"),
        (BufferLate.go_through, "newest_slot_not_attended"),
    ],
)
def test_slots_of_a_buffer_that_are_seen_or_not(function, name):
    assert names_of(function) == (name,)


class Ring:
    """The last `window` tokens, each in slot position % window; the own one counts."""

    def __init__(self, window=4, heads=2, head_dim=8):
        self.window = window
        self.keys = np.zeros((window, heads, head_dim))
        self.values = np.zeros((window, heads, head_dim))
        self.slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        self.position = 0

    def distances(self, filled):
        return (self.position - np.arange(filled)) % self.window

    def step(self, q, k, v):
        slot = self.position % self.window
        self.keys[slot], self.values[slot] = k, v
        filled = min(self.position + 1, self.window)
        scores = np.einsum("hd,thd->ht", q, self.keys[:filled]) / np.sqrt(q.shape[-1])
        scores = scores - self.slopes[:, None] * self.distances(filled)  # ALiBi
        self.position += 1
        return np.einsum("ht,thd->hd", softmax(scores), self.values[:filled])


class RingOfSlots(Ring):
    def distances(self, filled):
        return filled - 1 - np.arange(filled)


@pytest.mark.parametrize(("kind", "name"), [(Ring, "right"), (RingOfSlots, "positions_of_slots")])
def test_distances_in_a_ring_buffer(kind, name):
    assert names_of(kind) == (name,)


# --- prompts, beams, arrays that are kept ---------------------------------------------------------


def after_prompt(q, k, v, prompt_len, window, first):
    keys, values = np.zeros((2, window, *k.shape[1:]))
    for t in range(max(0, prompt_len - window), prompt_len):
        slot = first(t, max(0, prompt_len - window)) % window
        keys[slot], values[slot] = k[t], v[t]
    rows = []
    for t in range(prompt_len, len(q)):
        keys[t % window], values[t % window] = k[t], v[t]
        seen = slice(0, min(t + 1, window))
        scores = np.einsum("hd,thd->ht", q[t], keys[seen]) / np.sqrt(q.shape[-1])
        rows.append(np.einsum("ht,thd->hd", softmax(scores), values[seen]))
    return np.stack(rows)


def with_prompt(q, k, v, prompt_len, window=4):
    """(T, heads, dim): token t sees t - window + 1 .. t. The rows after the prompt."""
    return after_prompt(q, k, v, prompt_len, window, lambda t, begin: t)


def with_prompt_misplaced(q, k, v, prompt_len, window=4):
    """(T, heads, dim): token t sees t - window + 1 .. t. The rows after the prompt."""
    return after_prompt(q, k, v, prompt_len, window, lambda t, begin: t - begin)


@pytest.mark.parametrize(
    ("function", "name"),
    [(with_prompt, "right"), (with_prompt_misplaced, "tokens_misplaced_in_a_cache")],
)
def test_a_prompt_that_is_longer_than_the_window(function, name):
    assert names_of(function) == (name,)


class Beams:
    """x: (beams, 1, dim), one new token; beam_idx: which old beam each new one continues."""

    parts = 2

    def __init__(self, dim=12):
        rng = np.random.default_rng(0)
        self.w_q, self.w_k, self.w_v = rng.normal(size=(3, dim, dim)) / 3

    def __call__(self, x, past=None, beam_idx=None):
        """x: (beams, 1, dim); returns the output and the past."""
        k, v = x @ self.w_k, x @ self.w_v
        if past is not None:
            if beam_idx is not None:
                past = [one[beam_idx] if n < self.parts else one for n, one in enumerate(past)]
            k, v = (np.concatenate(pair, 1) for pair in zip(past, (k, v), strict=True))
        return attended(x @ self.w_q, k, v), (k, v)


class BeamsOfKeys(Beams):
    """x: (beams, 1, dim), one new token; beam_idx: which old beam each new one continues."""

    parts = 1

    def __call__(self, x, past=None, beam_idx=None):
        """x: (beams, 1, dim); returns the output and the past."""
        return super().__call__(x, past, beam_idx)


@pytest.mark.parametrize(
    ("kind", "name"), [(Beams, "right"), (BeamsOfKeys, "beams_misplaced_in_a_cache")]
)
def test_beams_that_are_reordered(kind, name):
    assert names_of(kind) == (name,)


def in_place(x, wq, wk, wv, wo, k_cache, v_cache, pos, n_heads):
    """x: (dim,); k_cache, v_cache: (max_len, n_heads, head_dim), filled in place."""
    q, k, v = ((x @ w).reshape(n_heads, -1) for w in (wq, wk, wv))
    k_cache[pos], v_cache[pos] = k, v
    scores = np.einsum("hd,thd->ht", q, k_cache[: pos + 1]) / np.sqrt(q.shape[-1])
    return np.einsum("ht,thd->hd", softmax(scores), v_cache[: pos + 1]).reshape(-1) @ wo


def longer(x, wq, wk, wv, k_past, v_past):
    """x: (1, dim); k_past, v_past: (t, dim). The output, and both with the new token."""
    k, v = np.concatenate([k_past, x @ wk]), np.concatenate([v_past, x @ wv])
    return attended(x @ wq, k, v), k, v


def longer_without_root(x, wq, wk, wv, k_past, v_past):
    """x: (1, dim); k_past, v_past: (t, dim). The output, and both with the new token."""
    k, v = np.concatenate([k_past, x @ wk]), np.concatenate([v_past, x @ wv])
    return softmax(x @ wq @ k.T) @ v, k, v


def in_dictionary(x, wq, wk, wv, cache):
    """x: (1, dim); cache: keys and values, each None at first."""
    k, v = x @ wk, x @ wv
    if cache["k"] is not None:
        k, v = np.concatenate([cache["k"], k]), np.concatenate([cache["v"], v])
    cache["k"], cache["v"] = k, v
    return attended(x @ wq, k, v)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_place, "right"),
        (longer, "right"),
        (longer_without_root, "no_scale"),
        (in_dictionary, "right"),
    ],
)
def test_caches_that_a_function_fills_or_makes_longer(function, name):
    assert names_of(function) == (name,)


class Lists:
    """decode(xs) begins with an empty past each time."""

    def __init__(self, d_model=16, seed=0):
        self.wq, self.wk, self.wv = (
            np.random.default_rng(seed).normal(size=(3, d_model, d_model)) / 4
        )
        self.past = []

    def one(self, x):
        self.past.append((x @ self.wk, x @ self.wv))
        k, v = (np.stack(rows) for rows in zip(*self.past, strict=True))
        return attended((x @ self.wq)[None], k, v)[0]

    def decode(self, xs):
        """xs: (T, d_model)"""
        self.past = []
        return np.stack([self.one(x) for x in xs])


def test_a_method_that_begins_anew_goes_through_a_whole_text():
    assert names_of(Lists.decode) == ("right",)


PAGE = 4


def of_one_text(query, key_pages, value_pages, block_table, seq_len, full=False):
    """query: (heads, d); key_pages, value_pages: (pages, PAGE, heads, d); seq_len: tokens."""
    k, v = (
        np.concatenate([pages[n] for n in block_table])[: None if full else int(seq_len)]
        for pages in (key_pages, value_pages)
    )
    return attended(query[:, None], k.swapaxes(0, 1), v.swapaxes(0, 1))[:, 0]


def of_whole_pages(query, key_pages, value_pages, block_table, seq_len):
    """query: (heads, d); key_pages, value_pages: (pages, PAGE, heads, d); seq_len: tokens."""
    return of_one_text(query, key_pages, value_pages, block_table, seq_len, full=True)


def test_the_last_page_of_a_text_need_not_be_full():
    assert names_of(of_one_text) == ("right",)
    assert names_of(of_whole_pages) != ("right",)


def rotated(x, places):
    angles = places[:, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    cos, sin = np.cos(angles), np.sin(angles)
    one, two = np.split(x, 2, -1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


class Rotary:
    """Keys are turned before they are kept."""

    def __init__(self, heads=2, head_dim=8):
        self.keys, self.values = [], []

    def place(self):
        return len(self.keys) - 1

    def step(self, q, k, v):
        """q, k, v: (heads, head_dim) of the newest token"""
        self.keys.append(rotated(k, np.array([float(len(self.keys))])))
        self.values.append(v)
        q = rotated(q, np.array([float(self.place())]))
        return of_one_query(q, np.stack(self.keys, 1), np.stack(self.values, 1))


class RotaryFromZero(Rotary):
    def place(self):
        return 0


@pytest.mark.parametrize(
    ("kind", "name"), [(Rotary, "right"), (RotaryFromZero, "rotary_from_zero_in_each_call")]
)
def test_a_cache_of_keys_that_are_turned(kind, name):
    assert names_of(kind) == (name,)

"""What code says of itself decides where its answers alone do not."""

from __future__ import annotations

import re

import numpy as np
import pytest

import regard
from regard.diagnosis.forms.source import prose_of
from regard.diagnosis.reading.mask_words import what_true_means
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.rule_words import says_pieces, what_window_means, where_causal_aligns
from regard.diagnosis.reading.signature import MASKS, Parameter


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turned(x):
    return x.swapaxes(-1, -2)


class Heads:
    """Self-attention of (B, L, M) with two heads; its causal rule is written here."""

    hides, rule = -np.inf, "causal"

    def __init__(self, width=8, heads=2):
        rng = np.random.default_rng(3)
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(0, 0.6, (4, width, width))
        self.heads = heads

    def split(self, x, weight):
        batch, length, _ = x.shape
        return (x @ weight).reshape(batch, length, self.heads, -1).swapaxes(1, 2)

    def __call__(self, x):
        q, k, v = (self.split(x, weight) for weight in (self.W_q, self.W_k, self.W_v))
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        mask = np.triu(np.ones(scores.shape[-2:]), 1)
        scores = np.where(mask == 1, scores + self.hides, scores)
        out = softmax(scores) @ v
        return out.swapaxes(1, 2).reshape(x.shape) @ self.W_o


class TooSmall(Heads):
    hides = -1e-9

    def __call__(self, x):
        """The causal rule of the other class, with np.triu."""
        return Heads.__call__(self, x)


def test_code_with_a_causal_rule_that_hides_nothing_is_not_right():
    assert regard.diagnose(Heads()).verdict != "mistaken"
    found = regard.diagnose(TooSmall())
    assert found.names == ("later_tokens_seen",), found


def test_words_beside_code_accuse_no_code_of_seeing_later_tokens():
    def whole(q, k, v):
        """Causal attention, with an autoregressive triangle: np.tril."""
        weights = softmax(q @ turned(k) / np.sqrt(q.shape[-1]))  # a causal mask comes here
        return weights @ v

    assert regard.diagnose(whole).verdict == "right"


class Layer:
    """A layer of a decoder, causal."""

    def __init__(self):
        self.W_q, self.W_k, self.W_v = np.random.default_rng(4).normal(0, 0.6, (3, 8, 8))

    def __call__(self, x):
        """Attention of (L, M) with a causal mask."""
        q, k, v = x @ self.W_q, x @ self.W_k, x @ self.W_v
        return softmax(q @ turned(k) / np.sqrt(q.shape[-1])) @ v  # later tokens: np.tril


def test_words_in_a_layer_accuse_it_as_little():
    assert regard.diagnose(Layer()).verdict == "right"


@pytest.mark.full
def test_a_layer_that_may_be_causal_and_is_not_is_right():
    class Either(Heads):
        def __call__(self, x, causal_rule=None):
            if causal_rule is not None:
                raise NotImplementedError
            q, k, v = (self.split(x, weight) for weight in (self.W_q, self.W_k, self.W_v))
            out = softmax(q @ turned(k) / np.sqrt(q.shape[-1])) @ v
            return out.swapaxes(1, 2).reshape(x.shape) @ self.W_o

    assert regard.diagnose(Either()).ok


class Decoder:
    """One token a call: x (M,); rotary positions, and a cache of its own."""

    first = True

    def __init__(self, width=8):
        rng = np.random.default_rng(4)
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(0, 0.6, (4, width, width))
        self.reset()

    def reset(self):
        self.keys, self.values = [], []

    def __call__(self, x):
        place = 0 if self.first else len(self.keys)
        q, k = rotary(x @ self.W_q, place), rotary(x @ self.W_k, place)
        self.keys.append(k)
        self.values.append(x @ self.W_v)
        keys, values = np.stack(self.keys), np.stack(self.values)
        return softmax(keys @ q / np.sqrt(len(q))) @ values @ self.W_o


def rotary(row, place):
    angle = place * 10000.0 ** (-np.arange(0, len(row), 2) / len(row))
    even, odd = row[::2], row[1::2]
    out = np.empty_like(row)
    out[::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


class Counting(Decoder):
    first = False

    def __call__(self, x):
        q, k = rotary(x @ self.W_q, len(self.keys)), rotary(x @ self.W_k, len(self.keys))
        self.keys.append(k)
        self.values.append(x @ self.W_v)
        keys, values = np.stack(self.keys), np.stack(self.values)
        return softmax(keys @ q / np.sqrt(len(q))) @ values @ self.W_o


def test_rotary_positions_that_begin_at_0_in_every_call_have_no_effect():
    assert regard.diagnose(Decoder()).names == ("positions_unused",)
    assert regard.diagnose(Counting()).verdict != "mistaken"


def test_a_mask_of_1_and_0_that_is_added_is_not_taken_for_an_additive_one():
    def attention(q, k, v, mask=None):
        """mask (batch, keys): 1 for real tokens, 0 for the rest."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask[:, None, None, :].astype(scores.dtype)
        return softmax(scores) @ v

    def added(q, k, v, mask=None):
        """mask (batch, keys): additive, 0 for real tokens (those of ones), -inf for the rest."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask[:, None, None, :]
        return softmax(scores) @ v

    assert regard.diagnose(attention).names == ("mask_added_as_ones",)
    assert regard.diagnose(added).verdict != "mistaken"


def capped(after_mask):
    def attention(q, k, v, mask=None, softcap=None):
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None and after_mask:
            scores = scores + mask
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None and not after_mask:
            scores = scores + mask
        return softmax(scores) @ v

    return attention


def test_a_softcap_that_is_off_by_default_is_tried_too():
    right = regard.diagnose(capped(after_mask=False), mask="add")
    assert right.verdict != "mistaken", right
    assert "softcap" in [one.name for one in right.abilities]
    wrong = regard.diagnose(capped(after_mask=True), mask="add")
    assert wrong.names == ("softcap_after_mask",), wrong


def seen_by(length, window):
    """True where attention is allowed: `window` keys of each query, including its own."""
    apart = np.arange(length)[:, None] - np.arange(length)
    return (apart >= 0) & (apart <= window)


def local(q, k, v, window=3):
    """q, k, v: (B, H, L, D); see seen_by."""
    scores = q @ turned(k) / np.sqrt(q.shape[-1])
    return softmax(np.where(seen_by(q.shape[-2], window), scores, -np.inf)) @ v


def test_what_a_window_means_may_be_written_at_the_function_that_makes_its_mask():
    assert regard.diagnose(local).names == ("window_one_long",)


def backward(q, k, v, d_output):
    """All arrays (B, H, T, D); the causal rule hides later keys."""
    length = q.shape[2]
    scores = q @ turned(k) / np.sqrt(q.shape[-1])
    later = np.triu_indices(length, 1)
    scores[:, :, later[0], later[1]] = -np.inf
    weights = softmax(scores)
    d_weights = d_output @ turned(v)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    d_scores /= np.sqrt(q.shape[-1])
    return d_scores @ k, turned(d_scores) @ q, turned(weights) @ d_output


def test_lengths_that_documentation_rules_out_are_not_held_against_a_function():
    assert regard.diagnose(backward).ok


def test_a_mask_under_which_all_is_nan_says_nothing():
    def counted(query, key, value, attention_mask):
        """attention_mask (batch, keys): 1 = token; positions are counted from it."""
        places = attention_mask.cumsum(-1) * attention_mask
        scores = query @ turned(key) / np.sqrt(query.shape[-1]) + 0.0 * places[:, None, None, :]
        hidden = attention_mask[:, None, None, :] == 0
        return softmax(np.where(hidden, -1e30, scores)) @ value

    assert regard.diagnose(counted).verdict != "mistaken"


def test_a_diagnosis_asks_the_same_after_others():
    def attention(q, k, v, mask=None, softcap=None):
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        return softmax(scores if mask is None else np.where(mask, scores, -np.inf)) @ v

    def plain(q, k, v):
        return softmax(q @ turned(k) / np.sqrt(q.shape[-1])) @ v

    before = regard.diagnose(plain).calls
    regard.diagnose(attention)
    assert regard.diagnose(plain).calls == before


class OverGraphs:
    """h: (batch, n, width); adj: (batch, n, n), 1 between neighbours and 0 elsewhere."""

    multiplies = True

    def __init__(self, width=6):
        rng = np.random.default_rng(5)
        self.W = rng.normal(size=(width, width))
        self.a = rng.normal(size=(2, width))

    def __call__(self, h, adj):
        """h: (batch, n, width); adj: (batch, n, n), 1 between neighbours and 0 elsewhere."""
        x = h @ self.W
        scores = np.tanh((x @ self.a[0])[..., None] + (x @ self.a[1])[..., None, :])
        scores = scores * adj if self.multiplies else np.where(adj > 0, scores, -np.inf)
        return softmax(scores) @ x


def test_graphs_in_a_batch_have_neighbours_each():
    found = regard.diagnose(OverGraphs())
    assert found.names == ("padding_changes_the_output",), found
    right = OverGraphs()
    right.multiplies = False
    assert regard.diagnose(right).verdict != "mistaken"


MASKS_SAID = {
    "keep": (
        "mask (batch, 1, seq, seq) is 0 at padded items, which leaves some item to look at",
        "pad: (batch, T), True for real tokens (at least one)",
        "mask: 1 marks the positions to attend to, 0 the ones to leave out",
        "attention_mask (FloatTensor of shape `(batch, seq)`, *optional*):\n"
        "    Mask values selected in `[0, 1]`:\n\n"
        "    - 1 for tokens that are **not masked**,\n    - 0 for tokens that are **masked**.",
        "mask: (B, T), zeros at padding",
        "pad_mask: False for padded frames",
        "`mask` -- 0/1 array, 0 = pad",
        "mask: zero entries are not attended to",
        "mask: which keys are real (True) and which fill up the batch (False)",
        "Positions with mask == 0 are excluded from the softmax.",
        "x: (B, T, C); mask: (B, T), 1.0 for real tokens and 0.0 for padding",
        "padding: bool (B, S), True for the frames that are not padding",
        "mask: True unless the key is padding",
    ),
    "hide": (
        "mask: padding positions are 1, everything else is 0",
        "padding_mask: BoolTensor, where padding elements are indicated by 1s.",
        "mask: True if padded. Padded queries return garbage that is thrown away.",
        "src_mask: set to True where the source is <pad>",
        "True entries of `mask` are blanked out before the softmax",
        "attn_mask: positions with ``True`` are not allowed to attend, ``False`` ones are",
        "a mask of ones and zeros; the ones are what the softmax should skip",
        "mask[i, j] = 1 means that i cannot attend to j",
    ),
    "": (
        "mask: additive, 0 for visible keys and -inf for hidden ones",
        "mask: 0 / -10000, summed with the scores",
        "mask: broadcastable. Returns the output, where padded rows are set to 0.",
        "mask: boolean. With causal=True later keys are hidden as well.",
        "mask: if it is not given, 1 token is attended at a time",
        "mask: True for padding in the encoder. mask: True for real tokens in the decoder.",
        "mask (B, S). need_weights: True to return the weights of real tokens.",
        "mask: bool tensor. At least 1 key must be visible. Masked keys get weight 0.",
        "causal_mask: True on later keys. mask: of shape (B, 1, 1, S)",
    ),
}


@pytest.mark.parametrize("means", MASKS_SAID)
def test_what_true_means_is_said_in_many_ways(means):
    for text in MASKS_SAID[means]:
        first = re.match(r"\W*(\w+)", text)
        name = first[1] if first is not None and role_of(first[1]) in MASKS else "mask"
        found = what_true_means(text, [Parameter("q", "query"), Parameter(name, role_of(name))])
        assert found == means, text


@pytest.mark.parametrize(
    ("means", "texts"),
    [
        (
            "inclusive",
            (
                "a token attends to itself and to the window - 1 tokens before it",
                "With `window` = w a token sees itself and the w - 1 preceding tokens",
                "query i attends to keys max(0, i - window + 1) ... i",
                "visible if 0 <= i - j < window",
                "token t attends to (t - window, t]",
                "each position sees the last `window` positions, its own one among them",
                "a window of 1 means that every token sees only itself",
                "attention over the last `window` frames, the current frame being one of them",
            ),
        ),
        (
            "exclusive",
            (
                "each query attends to itself and the `window` tokens before it",
                "each token sees the `window` previous tokens and itself",
                "keys j with i - window <= j <= i are visible",
                "window tokens to the left and window tokens to the right",
            ),
        ),
        (
            "",
            (
                "sliding window attention with `window` keys per query",
                "window: how far back a query can look; None for full attention",
                "a query sees its own bucket and the one before; window is the size of a bucket",
            ),
        ),
    ],
)
def test_whether_a_window_counts_the_own_key_is_said_in_many_ways(means, texts):
    for text in texts:
        assert what_window_means(text, [Parameter("window", "window")]) == means, text


@pytest.mark.parametrize(
    ("where", "texts"),
    [
        (
            "end",
            (
                "aligned to the\n    bottom right corner: the last query sees all keys",
                "When causal, the mask is lower right aligned, unlike torch's upper left alignment",
                "the queries are the last L of the S positions",
                "x holds the tokens that come after those already cached",
                "query i has the absolute position i + (S - L)",
            ),
        ),
        (
            "start",
            (
                "causal: aligned to the upper left corner, like torch's is_causal",
                "query i sees keys 0..i, also when there are more keys than queries",
            ),
        ),
        (
            "",
            (
                "returns the attention of the last query over all keys",
                "the top left cell of the weights is always 1 under a causal mask",
                "causal: hide later keys",
            ),
        ),
    ],
)
def test_where_causal_begins_is_said_in_many_ways(where, texts):
    for text in texts:
        assert where_causal_aligns(text) == where, text


def test_comments_beside_an_argument_are_about_it_and_those_of_another_mask_are_not():
    code = """
    def f(
        q,
        mask=None,  # True = hidden
    ):
        # mask is True where a key is visible
        mask = ~mask
        return mask  # see above
    """
    said = prose_of(code, of_arguments=True)
    assert said == "mask: True = hidden\n\nsee above"
    assert "visible" in prose_of(code)


def test_a_window_that_its_text_says_is_shorter_is_too_long():
    def attention(q, k, v, window=None):
        """With `window` = w a token attends to itself and to the w - 1 tokens before it."""
        apart = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])
        seen = (apart >= 0) & (apart <= (np.inf if window is None else window))
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        return softmax(np.where(seen, scores, -np.inf)) @ v

    assert regard.diagnose(attention).names == ("window_one_long",)

    def previous(q, k, v, window=None):
        """A token attends to itself and to the `window` tokens before it."""
        return attention(q, k, v, window)

    found = regard.diagnose(previous)
    assert found.ok
    assert "the window does not count" not in found.summary


def projected(x, W_q, W_k, W_v, W_o, window):
    """Causal; each token attends to itself and the window - 1 tokens before it."""
    apart = np.arange(len(x))[:, None] - np.arange(len(x))
    scores = (x @ W_q) @ (x @ W_k).T / np.sqrt(W_q.shape[1])
    seen = (apart >= 0) & (apart <= window)
    return softmax(np.where(seen, scores, -np.inf)) @ (x @ W_v) @ W_o


def test_a_function_of_embeddings_is_asked_for_its_window_too():
    assert regard.diagnose(projected).names == ("window_one_long",)


def test_causal_code_is_aligned_as_its_text_says():
    def attention(q, k, v, causal=False):
        """If causal, the mask is aligned to the bottom right: the last query sees all keys."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        seen = np.tril(np.ones(scores.shape[-2:], bool)) if causal else True
        return softmax(np.where(seen, scores, -np.inf)) @ v

    assert regard.diagnose(attention).names == ("causal_aligned_at_start",)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_the_text_says_of_a_mask_outranks_its_name(sign):
    def attention(q, k, v, pad=None):
        """pad: (batch, keys), True for real tokens."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if pad is not None:
            scores = np.where((pad if sign > 0 else ~pad)[:, None, None], scores, -np.inf)
        return softmax(scores) @ v

    found = regard.diagnose(attention)
    assert found.names == (() if sign > 0 else ("mask_inverted",)), found


class Growing:
    def __init__(self):
        self.k, self.v = None, None

    def update(self, k, v):
        self.k = k if self.k is None else np.concatenate([self.k, k], -2)
        self.v = v if self.v is None else np.concatenate([self.v, v], -2)
        return self.k, self.v


class InPieces(Heads):
    """With a cache, x holds the tokens that come after those already cached."""

    offset = 0

    def __call__(self, x, cache=None):
        q, k, v = (self.split(x, weight) for weight in (self.W_q, self.W_k, self.W_v))
        if cache is not None:
            k, v = cache.update(k, v)
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        rows, keys = scores.shape[-2:]
        first = (keys - rows) * (self.offset or rows == 1)
        seen = np.arange(keys) <= np.arange(rows)[:, None] + first
        out = softmax(np.where(seen, scores, -np.inf)) @ v
        return out.swapaxes(1, 2).reshape(x.shape) @ self.W_o


def test_a_cache_that_may_get_several_tokens_gets_them():
    assert says_pieces(InPieces.__doc__)
    assert not says_pieces("feed it token by token")
    assert regard.diagnose(InPieces()).names == ("cache_offset_ignored",)
    right = InPieces()
    right.offset = 1
    assert regard.diagnose(right).verdict != "mistaken"


def test_a_parameter_that_nothing_was_tried_for_is_listed():
    def attention(q, k, v, layer_state_table=None, dtype=None):
        """(L, D)"""
        if layer_state_table is not None:
            v = v + layer_state_table
        return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v

    found = regard.diagnose(attention)
    assert found.verdict == "right"
    (one,) = (one.text for one in found.findings if one.name == "not_tried")
    assert one == "attention is not judged with layer_state_table: nothing was tried for it"


def in_pieces_of_queries(last_is_shorter):
    def attention(q, k, v, chunk=128):
        """(L, D), in pieces of queries"""
        out = np.empty((len(q), v.shape[-1]))
        for start in range(0, len(q), chunk):
            begin = start if last_is_shorter else min(start, max(0, len(q) - chunk))
            rows = softmax(q[begin : begin + chunk] @ k.T / np.sqrt(q.shape[-1])) @ v
            out[start : start + chunk] = rows[: len(q) - start]
        return out

    return attention


def test_the_size_of_blocks_may_not_change_a_result():
    assert regard.diagnose(in_pieces_of_queries(True)).verdict == "right"
    assert regard.diagnose(in_pieces_of_queries(False)).names == ("blocks_change_the_output",)


def test_a_mask_of_keys_beside_another_mask_is_what_its_text_says():
    def attention(hides):
        def f(q, k, v, key_padding_mask=None, attn_mask=None):
            """q, k, v: (B, H, L, D)

            key_padding_mask: (B, S) bool, True for the keys to be ignored
            attn_mask: (L, S), added to the scores
            """
            s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            if attn_mask is not None:
                s = s + attn_mask
            if key_padding_mask is not None:
                s = np.where(key_padding_mask[:, None, None] == hides, -np.inf, s)
            return softmax(s) @ v

        return f

    assert regard.diagnose(attention(True)).verdict == "right"
    assert regard.diagnose(attention(False)).names == ("mask_inverted",)


def test_key_heads_that_a_text_means_to_share_are_no_accident():
    def gqa(q, k, v):
        """q: (B, T, N, H); k, v: (B, S, K, H): query heads share kv heads."""
        each = q.shape[2] // k.shape[2]
        k, v = np.tile(k, (1, 1, each, 1)), np.repeat(v, each, 2)
        s = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        return np.einsum("bnts,bsnh->btnh", softmax(s), v)

    assert regard.diagnose(gqa).names == ("key_heads_tiled",)


def test_a_window_that_is_the_size_of_blocks_is_none():
    def local(q, k, v, window_size):
        """q, k, v: (L, D); the rows are cut into blocks of ``window_size``, causal in each."""
        i = np.arange(len(q))
        seen = (i[:, None] // window_size == i // window_size) & (i <= i[:, None])
        return softmax(np.where(seen, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)) @ v

    assert regard.diagnose(local).verdict == "right"


class Window:
    """Every token sees itself and the ``sliding_window - 1`` tokens before it."""

    more = 0

    def __init__(self, dim, sliding_window):
        self.W_q, self.W_k, self.W_v = np.random.default_rng(0).normal(size=(3, dim, dim))
        self.sliding_window = sliding_window

    def __call__(self, x):
        q, k, v = (x @ one for one in (self.W_q, self.W_k, self.W_v))
        apart = np.arange(x.shape[-2])[:, None] - np.arange(x.shape[-2])
        seen = (apart >= 0) & (apart < self.sliding_window + self.more)
        s = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
        return softmax(s) @ v


class LongWindow(Window):
    """Every token sees itself and the ``sliding_window - 1`` tokens before it."""

    more = 1


def test_the_window_of_a_constructor_is_as_long_as_its_text_says():
    assert regard.diagnose(Window).verdict == "right"
    assert regard.diagnose(LongWindow).names == ("window_one_long",)


def test_an_offset_of_the_wrong_sign_is_named():
    def attention(sign):
        def f(q, k, v, causal=False):
            """(B, H, L, D); the last query is aligned with the last key"""
            s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            late = sign * (s.shape[-1] - s.shape[-2])
            if causal:
                s = np.where(np.tri(*s.shape[-2:], late, dtype=bool), s, -1e30)
            return softmax(s) @ v

        return f

    assert regard.diagnose(attention(1)).verdict == "right"
    assert regard.diagnose(attention(-1)).names == ("causal_offset_reversed",)


def test_a_mask_may_take_the_place_of_a_causal_rule():
    def attention(q, k, v, mask=None):
        """(B, H, L, D), mask: added to the scores; causal without one"""
        n = q.shape[-2]
        mask = np.triu(np.full((n, n), -np.inf), 1) if mask is None else mask
        return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask) @ v

    found = regard.diagnose(attention)
    assert (found.verdict, "causal if there is no mask" in str(found)) == ("right", True)

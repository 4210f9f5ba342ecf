"""Mistakes that no single answer shows: several calls do, or what the code and its text say."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import Entries, mistakes

NO_DROPOUT = (
    "weights = weights if not training else drop(weights)",
    "weights = F.dropout(weights, p, training=self.training)",
)
CALLS: Entries = {
    "batch_elements_mixed": (
        "batch elements are mixed: one text changes the result of another",
        "A softmax, a sum or a reshape runs over the axis of the batch.",
        (),
        (
            "weights = softmax(scores, axis=-1)  # of each text by itself",
            "weights = scores.softmax(-1)  # nn.MultiheadAttention(…, batch_first=True)",
        ),
    ),
    "heads_mixed": (
        "heads are mixed: keys and values of one change the output of another",
        "A softmax or a norm runs over the axis of the heads. F.normalize takes axis 1 unless it "
        "gets dim=-1, and a reshape needs a transpose before it.",
        (),
        (
            "unit = q / np.linalg.norm(q, axis=-1, keepdims=True)  # and softmax(scores, axis=-1)",
            "unit = F.normalize(q, dim=-1)  # and scores.softmax(dim=-1)",
        ),
    ),
    "queries_mixed": (
        "queries change the outputs of others",
        "A softmax, a maximum or a norm runs along the queries: each is on its own.",
        (),
        ("weights = softmax(scores, axis=-1)", "weights = scores.softmax(dim=-1)"),
    ),
    "keys_never_seen": (
        "some keys get no weight from any query",
        "A loop, a slice or a mask leaves them out.",
        (),
        ("keep = j <= i  # a query sees its own key", "keep = j <= i  # a query sees its own key"),
    ),
    "window_wraps_around": (
        "a window wraps around: the first query sees the last keys",
        "np.roll and torch.roll put the last block in front of the first one; it has to be hidden.",
        (),
        (
            "before = np.concatenate([0 * K[:1], K[:-1]])  # hidden for the first block",
            "before = F.pad(k, (0, 0, 0, 0, 1, -1))  # hidden for the first block",
        ),
    ),
    "global_queries_see_a_window": (
        "global tokens are seen by all, and see no more than a window",
        "Both directions are meant: a global token reads the whole text too.",
        (),
        (
            "keep = band | is_global[:, None] | is_global[None, :]",
            "allowed = band | is_global[:, :, None] | is_global[:, None, :]",
        ),
    ),
    "global_keys_not_seen": (
        "global tokens see all, and are not seen by all",
        "Both directions are meant: every token reads the global ones too.",
        (),
        (
            "keep = band | is_global[:, None] | is_global[None, :]",
            "allowed = band | is_global[:, :, None] | is_global[:, None, :]",
        ),
    ),
    "keys_counted_twice": (
        "a key that a query sees for two reasons is counted twice",
        "In a list of blocks or keys each may be once alone: its exponential is added twice else.",
        (),
        (
            "blocks = np.unique([0, i - 1, i, i + 1, last])",
            "blocks = torch.unique(torch.tensor([0, i - 1, i, i + 1, last]))",
        ),
    ),
    "random_features_weigh_keys": (
        "random features give a long key another weight than a short one",
        "φ(x) = exp(Wx − |x|²/2) of the scaled x has the softmax as its mean. The norm of another "
        "x, or a maximum of each key that is subtracted, stays in the weights: one maximum serves "
        "all keys.",
        (),
        (
            "phi = np.exp(k @ W.T - (k**2).sum(-1, keepdims=True) / 2 - whole_maximum)",
            "phi = (k @ W.T - k.square().sum(-1, keepdim=True) / 2 - whole_maximum).exp()",
        ),
    ),
    "later_tokens_seen": (
        "later tokens are seen although the code means to be causal",
        "True is the wrong way round in a mask, or the mask does not reach the scores.",
        (),
        (
            "scores = np.where(j <= i, scores, -np.inf)",
            "scores = scores.masked_fill(j > i, -torch.inf)  # True hides",
        ),
    ),
    "padding_changes_the_output": (
        "padded tokens change the result",
        "What is hidden must get no weight at all: −inf before the softmax, for keys.",
        (),
        (
            "scores = np.where(real[:, None, None, :], scores, -np.inf)",
            "scores = scores.masked_fill(~real[:, None, None, :], -torch.inf)",
        ),
    ),
    "weights_do_not_add_up": (
        "weights do not add up to 1",
        "The mask comes after the softmax, or what is no key takes a share: hide it before the "
        "softmax, and divide by the sum of the rest.",
        (),
        (
            "weights = softmax(np.where(keep, scores, -np.inf))",
            "weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)",
        ),
    ),
    "masks_of_windows_misplaced": (
        "with several images the masks of their windows go to the wrong ones",
        "Window w of each image has mask w: the axis of images comes before that of windows.",
        (),
        (
            "scores = scores.reshape(-1, len(mask), H, L, L) + mask[None, :, None]",
            "attn = attn.view(-1, mask.shape[0], H, L, L) + mask[None, :, None]",
        ),
    ),
    "integer_mask_inverted": (
        "a mask of integers is inverted bit by bit",
        "~1 is −2 and ~0 is −1: both count as true, so that every key is hidden, or none.",
        (),
        (
            "hidden = mask == 0  # or ~mask.astype(bool)",
            "hidden = mask == 0  # or ~mask.bool()",
        ),
    ),
    "stale_context": (
        "keys and values of an earlier context are used again",
        "They are kept between calls, and another context of the same shape does not renew them.",
        (),
        (
            "keys = context @ W_k  # of the context of this call",
            "k = self.k_proj(context)  # of the context of this call",
        ),
    ),
    "default_kept": (
        "a default is changed by each call: the next one begins with what is left in it",
        "Python makes a default once, when it reads the definition, and every call shares it.",
        (),
        (
            "def attend(x, cache=None): cache = [] if cache is None else cache",
            "def attend(x, cache=None): cache = {} if cache is None else cache",
        ),
    ),
    "pairs_not_exchanged_back": (
        "rows and columns of the pairs are exchanged before attention, and not exchanged back",
        "Around the ending node columns attend: the output for z[i, j] comes out at [j, i].",
        (),
        (
            "z = z.swapaxes(0, 1) if ending else z  # before; and the same with the output",
            "x = x.transpose(-2, -3)  # before, and after attention once more",
        ),
    ),
    "pairs_of_the_other_node": (
        "attention runs within the columns of the pairs where rows are meant, or the reverse",
        "Around the starting node rows attend, around the ending node columns do.",
        (),
        (
            "z = z.swapaxes(0, 1) if ending else z  # before; and the same with the output",
            "x = x.transpose(-2, -3)  # before, and after attention once more",
        ),
    ),
    "pixels_misplaced": (
        "what pixels get is put at other pixels",
        "A map that was rolled by −s is rolled back by s, and windows are put together in the "
        "order in which they were cut.",
        (),
        (
            "out = np.roll(out, (shift, shift), axis=(1, 2))  # after np.roll(x, (-shift, -shift))",
            "x = torch.roll(x, shifts=(s, s), dims=(1, 2))  # after a roll by (-s, -s)",
        ),
    ),
    "map_reshaped": (
        "the axes of a map are taken for others by a reshape: pixels and channels are mixed",
        "(B, C, H, W) as (B, H · W, C) needs the axes exchanged: a reshape alone gives each token "
        "numbers of several pixels.",
        (),
        (
            "tokens = x.reshape(B, C, H * W).transpose(0, 2, 1)  # and back in this order",
            "tokens = x.flatten(2).transpose(1, 2)  # and back in this order",
        ),
    ),
    "relative_bias_misplaced": (
        "what is added for a distance is not the same for all keys at that distance",
        "The index into the table of distances, or the order of axes in which its rows are laid "
        "out, is another one than its reader takes.",
        (),
        (
            "bias = table[index].transpose(2, 0, 1)  # (L, S, heads) to (heads, L, S)",
            "bias = table[index.view(-1)].view(L, S, -1).permute(2, 0, 1)",
        ),
    ),
    "relative_bias_reversed": (
        "what is added for a distance is what the table has for the opposite one",
        "Query and key changed places: the sign of their distance, or two axes of the table.",
        (),
        (
            "bias = table[index].transpose(2, 0, 1)  # (L, S, heads) to (heads, L, S)",
            "bias = table[key_places[None, :] - query_places[:, None] + offset]",
        ),
    ),
    "distances_counted_from_the_end": (
        "what is added for a distance changes with the length of the text",
        "The rows of relative positions are in the opposite order: a shift that lines them up "
        "takes the farthest distance first, and 0 last.",
        (),
        (
            "places = np.arange(S - 1, -1, -1)  # S − 1 … 0, and not 0 … S − 1",
            "pos_seq = torch.arange(klen - 1, -1, -1.0)  # and not torch.arange(klen)",
        ),
    ),
    "distance_rows_out_of_order": (
        "distances that grow do not read the rows of their table one after the other",
        "A distance below 0 counts from the end of the table: add the largest one to it first.",
        (),
        (
            "row = table[np.clip(key - query, -far, far) + far]  # 2 · far + 1 rows",
            "row = self.table(torch.clamp(key - query, -far, far) + far)  # 2 · far + 1 rows",
        ),
    ),
    "relative_term_transposed": (
        "a term of relative positions meets the key of the query's place, not of the key's",
        "Its rows are keys and its columns queries: it has to be transposed before it is added.",
        (),
        (
            "scores = scores + of_keys.swapaxes(-1, -2)  # (S, L) to (L, S)",
            "scores = scores + p2c.transpose(-1, -2)  # (S, L) to (L, S)",
        ),
    ),
    "relative_term_unscaled": (
        "the term of relative positions is not divided by √D as q·k is",
        "It is a dot product of as many features: both belong in the brackets that are divided.",
        (),
        (
            "scores = (q @ k.T + relative) / np.sqrt(D)",
            "scores = (q @ k.transpose(-1, -2) + relative) / math.sqrt(d)",
        ),
    ),
    "relative_shift_misplaced": (
        "the shift that lines up relative positions puts a query's scores into another row",
        "The score of a query and a key then depends on a third token. Pad a column on the left, "
        "reshape to (S + 1, L), and drop the first row, not the last one.",
        (),
        (
            "rows = np.pad(rows, ((0, 0), (1, 0))).reshape(S + 1, L)[1:].reshape(L, S)",
            "bd = F.pad(bd, (1, 0)).view(B, H, S + 1, L)[:, :, 1:].view_as(bd)",
        ),
    ),
    "distance_zero_not_read": (
        "relative positions are one place off: nothing is added at distance 0",
        "The shift that lines up distances drops the column of another one. It begins with a "
        "column of padding on the left: pad, reshape to (S + 1, L), and drop the first row.",
        (),
        (
            "rel = np.pad(rel, ((0, 0), (0, 0), (1, 0))).reshape(H, S + 1, L)[:, 1:]",
            "rel = F.pad(rel, (1, 0)).reshape(b, h, s + 1, l)[:, :, 1:]",
        ),
    ),
    "alibi_slopes_of_heads": (
        "the slopes of ALiBi are not those for this number of heads",
        "For H heads that are no power of two: the slopes for the next lower power of two, and "
        "then every other one, from the first, of those for twice as many heads.",
        (),
        (
            "slopes = np.concatenate([of(p), of(2 * p)[0::2][: H - p]])  # of(n): 2^(−8·i/n)",
            "slopes = torch.cat([of(p), of(2 * p)[0::2][: h - p]])  # of(n): 2^(−8·i/n)",
        ),
    ),
    "tokens_misplaced_in_a_cache": (
        "with a cache that gets several tokens in a call, later tokens are wrong",
        "Without earlier tokens every number is right: new keys are written to another place than "
        "where they are read, or counted as one.",
        (),
        (
            "K[n : n + T], V[n : n + T] = k, v; n += T; keys, values = K[:n], V[:n]",
            "K[:, n : n + T] = k; V[:, n : n + T] = v; n += T; keys, values = K[:, :n], V[:, :n]",
        ),
    ),
    "positions_restart": (
        "with a cache, positions begin at 0 again in each call",
        "The position of the first new token is the number of tokens in the cache.",
        (),
        (
            "places = cached + np.arange(L)  # and not np.arange(L)",
            "places = past + torch.arange(L)  # and not torch.arange(L)",
        ),
    ),
    "positions_unused": (
        "its positions have no effect",
        "The result is that without them: a learned table is never added, or is the same for every "
        "key that a query sees; or rotary angles are those of heads instead of tokens, or begin at "
        "0 in every call of a single token.",
        (),
        (
            "x = x + positions[: len(x)]; angles = np.outer(cached + np.arange(L), frequencies)",
            "x = x + self.pos[:, : x.size(1)]; angles = torch.outer(past + torch.arange(L), freqs)",
        ),
    ),
    "value_rows_reversed": (
        "values get the rows of the opposite distances",
        "Its text says which row belongs to which distance; for the keys they are read so.",
        (),
        (
            "output = weights @ V + np.einsum('ij,ijd->id', weights, rows_of_values[index])",
            "out = weights @ v + torch.einsum('ij,ijd->id', weights, rel_v[index])",
        ),
    ),
    "positions_rounded": (
        "positions are counted in half precision",
        "bfloat16 has no odd numbers above 256, and float16 none above 2048: tokens beyond get the "
        "angles of others.",
        (),
        (
            "angles = np.outer(np.arange(L, dtype=np.float32), frequencies)",
            "angles = torch.outer(torch.arange(L).float(), freqs); cos = angles.cos().to(x.dtype)",
        ),
    ),
    "blocks_change_the_output": (
        "the size of the blocks changes the result",
        "Right code gives the same for every size, also where the last block is not full.",
        (),
        (
            "block = Q[start : min(start + size, len(Q))]  # the last one may be shorter",
            "block = q[:, start : start + size]  # the last one may be shorter",
        ),
    ),
    "queries_without_effect": (
        "queries have no effect: all get the same",
        "What a query adds is the same for every key, and a softmax takes that out again.",
        (),
        (
            "scores = np.tanh(s @ W + h @ U) @ v  # one tanh of their sum",
            "scores = self.v(torch.tanh(self.W(s) + self.U(h)))  # one tanh of their sum",
        ),
    ),
    "beams_misplaced_in_a_cache": (
        "beams in another order do not get what was kept of them",
        "Keys and values of every layer, and all else that is kept, go in the same order.",
        (),
        (
            "keys, values = keys[beams], values[beams]",
            "k, v = k.index_select(0, beam_idx), v.index_select(0, beam_idx)",
        ),
    ),
    "quantized_numbers_misread": (
        "keys or values that pass through integers are read back as other numbers",
        "What was stored is (integer − zero point) · scale, with the scale and the zero point of "
        "its own row, in a type that holds all of the integers and their differences.",
        (),
        (
            "keys = (codes.astype(np.float32) - zero) * scale  # of each row its own",
            "keys = (codes.float() - zero) * scale  # of each row its own",
        ),
    ),
    "queries_from_context": (
        "queries are made of the context: the output has a row for each of its tokens",
        "The two are exchanged: a query asks, and what it reads is the context.",
        (),
        (
            "Q, K, V = x @ W_q, context @ W_k, context @ W_v",
            "q, k = self.W_q(x), self.W_k(context)",
        ),
    ),
    "scale_of_a_part": (
        "the scores are divided by the root of a part of their width",
        "Queries and keys have more features than that part, such as those that carry positions.",
        (),
        (
            "scores = Q @ K.T / np.sqrt(Q.shape[-1])  # all of their features",
            "scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # all of their features",
        ),
    ),
    "positions_in_values": (
        "positions are added to what the values are made of",
        "Its text says that they belong to queries and keys; values carry the tokens alone.",
        (),
        ("queries = keys = x + positions; values = x", "q = k = x + pos; v = x"),
    ),
    "normalised_input_added": (
        "the input is added after its normalisation",
        "A layer that normalises first adds the input that it got, so that this passes unchanged.",
        (),
        ("x = x + attention(norm(x))", "x = x + self.attention(self.norm(x))"),
    ),
    "norm_misses_a_part": (
        "queries, keys and values are not all made of the normalised input",
        "One of them is computed from the input that the layer got, whose rows have any length.",
        (),
        ("h = norm(x); x = x + attention(h, h, h)", "h = self.norm(x); x = x + self.attn(h, h, h)"),
    ),
    "fused_columns_misread": (
        "the columns of a fused projection are taken apart in another order than is said",
        "(3, heads, D) has all queries first, (heads, 3, D) one head after the other.",
        (),
        (
            "q, k, v = np.moveaxis(qkv.reshape(B, L, 3, heads, D), 2, 0)",
            "q, k, v = qkv.view(B, L, 3, heads, D).unbind(2)",
        ),
    ),
    "norm_before_the_sum": (
        "what attention returns is normalised, and the input is added after that",
        "A layer that normalises last does so with the sum, so that its rows have one length.",
        (),
        ("x = norm(x + attention(x))", "x = self.norm(x + self.attention(x))"),
    ),
    "layer_unused": (
        "a layer or a parameter is made and never read",
        "What it was made for is missing, or another one is used twice.",
        (),
        ("output = merged @ W_o  # every weight of the layer is used", "return self.out(merged)"),
    ),
    "sublayer_lost": (
        "what one of its layers computes is lost",
        "The next layer adds its result to what came before, and not to that.",
        (),
        (
            "y = y + self_attention(norm(y)); y = y + cross_attention(norm(y), memory)",
            "y = y + self.attn(self.ln1(y)); y = y + self.cross(self.ln2(y), memory)",
        ),
    ),
    "dropout_left_on": (
        "dropout is on although nothing is trained",
        "Each answer is another one; F.dropout is on unless it gets training=self.training, and "
        "dropout_p of scaled_dot_product_attention knows no evaluation mode.",
        (),
    ),
}

OF_CALLS = mistakes("numerics", NO_DROPOUT, CALLS)

_BY_NAME = {one.name: one for one in OF_CALLS}
MASKS_OF_WINDOWS = _BY_NAME["masks_of_windows_misplaced"]
INTEGER_MASK = _BY_NAME["integer_mask_inverted"]
DEFAULT_KEPT = _BY_NAME["default_kept"]
COLUMNS_MISREAD = _BY_NAME["fused_columns_misread"]
STALE_CONTEXT = _BY_NAME["stale_context"]
BEAMS_MISPLACED = _BY_NAME["beams_misplaced_in_a_cache"]
MISREAD = _BY_NAME["quantized_numbers_misread"]
BLOCKS_MATTER = _BY_NAME["blocks_change_the_output"]
QUERIES_FROM_CONTEXT = _BY_NAME["queries_from_context"]
POSITIONS_IN_VALUES = _BY_NAME["positions_in_values"]
OF_NORMS = {"added": _BY_NAME["normalised_input_added"], "part": _BY_NAME["norm_misses_a_part"]}
OF_NORMS["sum"] = _BY_NAME["norm_before_the_sum"]
LAYER_UNUSED = _BY_NAME["layer_unused"]
POSITIONS_ROUNDED = _BY_NAME["positions_rounded"]
VALUE_ROWS_REVERSED = _BY_NAME["value_rows_reversed"]
POSITIONS_UNUSED = _BY_NAME["positions_unused"]
TOKENS_MISPLACED = _BY_NAME["tokens_misplaced_in_a_cache"]
POSITIONS_RESTART = _BY_NAME["positions_restart"]
DROPOUT_LEFT_ON = _BY_NAME["dropout_left_on"]
LATER_TOKENS = _BY_NAME["later_tokens_seen"]

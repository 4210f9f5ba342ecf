"""What the text of a function says about it: its names, comments and documentation.

Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINEAR = re.compile(
    r"linear_?\s?att|linear_?transf|feature_?map|kernel_?\s?feature|kernel(ized)?_?\s?att|"
    r"\bphi\b|\belu\b|performer|favor|efficient_?\s?att|\bxc(a|it)\b|cross_?-?covariance|"
    r"channel_?\s?att|channels\b[^.\n]{0,20}\battend|between (the )?channels|\bmdta\b|"
    r"transposed_?\s?att|\bretention|_retention|retnet",
    re.IGNORECASE,
)
_UNSCALED = re.compile(
    r"non_?-?local|\bsagan\b|(?<![a-z])t5|unscaled|luong|no[_ ]scal|not[_ ]scaled|not\W+divided by|"
    r"without[_ ](?:a[_ ]|the[_ ]|any[_ ])?(?:scal|factor|1 ?/ ?(?:sqrt|√))|"
    r"\b(?:scores|logits) (?:are )?(?:plain|raw|bare) dot[- ]products?\b|"
    r"scal(?:e|ing) (?:is )?(?:folded|absorbed|left)|dot[_ ]?score\b|"
    r"\b(?:attention|logits|scores)(?: itself)? (?:does|do|are|is) not (?:divided?|scaled?)|"
    r"\b(?:kernel|function|it|layer|module) (?:does not|doesn't|never) (?:scales?|divides?)\b|"
    r"1 ?/ ?(?:sqrt|√)[^.\n]{0,30} (?:goes|is (?:put|baked|folded|absorbed)) in|"
    r"\bno (?:factor|temperature|1 ?/ ?sqrt|division by)|\bnothing is (?:scaled|divided)|"
    r"\b(?:q|queries) (?:is|are|comes?)? ?already (?:scaled|divided|multiplied)",
    re.IGNORECASE,
)
_BY_WIDTH = re.compile(
    r"(?<![a-z])(?:mup|µp|μp|maximal update)(?![a-z])|"
    r"\b1 ?/ ?(?:d|d_?k|d_?head|head_?dim|width)\b(?! ?\*\* ?-?0?\.5)[^\n]{0,20}"
    r"(?:instead of|rather than|and not|not)[^\n]{0,20}(?:sqrt|√|root)",
    re.IGNORECASE,
)
_BY_ALL_HEADS = re.compile(
    r"set[_ -]?transformer|\bmab\b|"
    r"(?:scale|temperature|scores?|divided)\b[^.;]{0,60}(?:sqrt|√|root)[^.;]{0,30}"
    r"\b(?:full|whole|total|model(?:'s)?) width|"
    r"(?:sqrt|√|root)[^.;]{0,40},? (?:and )?not (?:that|the width) of (?:one|a|each|the) head\b|"
    r"\bwidth of all heads\b",
    re.IGNORECASE,
)
_BY_ONE_HEAD = re.compile(
    r"(?:sqrt|√|root)[^.;,]{0,24}\b"
    r"(?:d_?k|d_?h(?:ead)?|head_?(?:dim|width|size)|dim_?head|own width)\b",
    re.IGNORECASE,
)
CAUSAL = re.compile(
    r"causal|tri[lu]\b|np\.tri\b|look_?ahead|future|autoregressive|subsequent|decoder",
    re.IGNORECASE,
)
COSINE = re.compile(
    r"cosine|cos_?sim|\bnormalize\(|l2_?norm|unit_?(vector|norm|length)|linalg\.(vector_)?norm|"
    r"\.norm\(|qk[-_ ]?norm|\brms|rsqrt",
    re.IGNORECASE,
)
# What a layer's text says where its input is normalised before attention, and where their sum is.
_NORM_FIRST = re.compile(
    r"\bpre[- _]?(layer)?(norm|ln)|norm[_ ]?first|"
    r"\b\w+ \+ ([\w.]+ *\( *|[\w.()]+ *\* *)+(ln|layer_?norm|rms_?norm|norm)",
    re.IGNORECASE,
)
_NORM_LAST = re.compile(
    r"\bpost[- _]?(layer)?(norm|ln)\b|normali[sz]es? the(ir)? sum|add (&|and) norm", re.IGNORECASE
)
# What says that a fused projection has the columns of one head after the other, or all of one part.
_BY_HEAD = re.compile(
    r"columns (of \w+ )?(are )?(grouped|ordered|stored|interleaved) (by|per) head|"
    r"head 0\b[^.]{0,90}\bhead 1\b|per[- ]head \[ *q|\[ ?q_?0 ?, ?k_?0 ?, ?v_?0\b",
    re.IGNORECASE,
)
_BY_PARTS = re.compile(
    r"\[ ?w?_?q ?[|,;] ?w?_?k ?[|,;] ?w?_?v ?\]|"
    r"\ball (?:the )?(?:rows |columns )?(?:of )?q\b[^.]{0,20}"
    r"\ball (?:the )?(?:rows |columns )?(?:of )?k\b|"
    r"in_proj_(weight|bias)|\bq, k(,| and) v (lie )?side by side|"
    r"\b(loads?|takes?|from) (the )?gpt-?2'?s?\b[^.\n]{0,20}(checkpoint|weight|state)|"
    r"\b(timm|gpt-?2|(nano|min|mini)gpt|nn\.MultiheadAttention)\b'?s? (layout|order|format)|"
    r"\b(first|all)\b[^.\n]{0,30}\b(q|quer(?:y|ies))\b[^.]{0,40}"
    r"\b(next|then|second|all|last)\b[^.]{0,30}\b(k|keys?)\b",
    re.IGNORECASE,
)
# The order of heads inside each of the parts.
_HEADS_OF_PARTS = re.compile(
    r"\b(inside|within|in) (each|every|all)( (of \w+|part|block|third|one))?\W+"
    r"((the )?(columns (of )?)?heads? 0\b[^.]{0,90}\bhead 1\b|head by head|"
    r"heads? \w+ (owns?|has|have|holds?|takes?)\b)",
    re.IGNORECASE,
)
# Text by which [q | k | v] may be the columns of each head.
_BY_HEAD_TOO = re.compile(
    r"head by head|(per|each|every|one)[- ]heads?\b|interleav|\bnot \(?\[? ?q\b|"
    r"\[?\b(h|n?_?heads?\w*)\]?,? ?\[ ?w?_?q",
    re.IGNORECASE,
)
# What says that query head h reads key head h % G, which is another order than is usual.
_HEADS_IN_TURN = re.compile(
    r"\bhead\b[^.;]{0,60}\b\w+ ?(?:%|\bmod(?:ulo)?\b) ?\w+|\b(?:strided|tiled|cyclic|round.?robin)"
    r"(?: head)? (?:order|grouping|heads|layout)",
    re.IGNORECASE,
)
# What says that slopes are scaled like scores.
_ALIBI_SCALED = re.compile(
    r"\b(alibi|bias|slopes?)\b[^.;]{0,60}\bbefore\W{1,3}(the )?scal|\balibi\) */|"
    r"\b(alibi|bias|slopes?)\b[^.;]{0,40}\b(also|too) (scaled|divided)",
    re.IGNORECASE,
)
_RULE = re.compile(r"causal|tri[lu]_?\(|np\.tri\(|autoregressive|look_?ahead", re.IGNORECASE)
_SHARES = re.compile(r"softmax|exp2?\(|exp\b|logsumexp", re.IGNORECASE)

# What the code of an attention says that has such a property by design, by the mistake's name.
_MEANT = {
    "heads_mixed": re.compile("talking|mix", re.IGNORECASE),
    "weights_do_not_add_up": re.compile(
        r"sigmoid|sinks?\b|relu|\belu|retention|decay|off.by.one|"
        r"linear[ _-]?(att|transf|kernel|time|compl|cost)|lineari[sz]ed|performer|favor|"
        r"latents?\b|prompts?\b|prefix|\bcls|class_?token|"
        r"softmax_?(1|one|plus)|quiet|entmax|\bgate|register|null|persistent|bias_kv|zero_attn|"
        r"\bmem(ory)?_?(k|v|kv|keys?|values?)\b|"
        r"(exp|sum)\([^\n]*\)+ *\+ *1|\b1\.? *\+[^\n]*(exp|sum)\(",
        re.IGNORECASE,
    ),
    "later_tokens_seen": re.compile(
        r"def __init__\([^)]*\b(?P<o>\w*mask\w*|autoregressive)\b(: *bool)? *= *False\b[\s\S]*"
        r"\bif self\.(?P=o)\b|"
        r"\bnot[ \w]{0,12} causal|causal\w*\W[^\n]*\bFalse|\bif\b[^\n]*causal|bidirectional|"
        r"non.?causal|prefix|encoder",
        re.IGNORECASE,
    ),
}


def caps_in(text: str) -> tuple[float, ...]:
    """The numbers that code gives to caps and to the bases of rotary positions.

    >>> caps_in("SOFTCAP = 3.0 ; y = softcapped(x, cap=5, theta=1e6)")
    (3.0, 5.0, 1000000.0)
    """
    named = r"(?:cap|theta|base)\w*(?:\s*:\s*(?:float|int))?\s*=\s*(\d[\d_]*\.?\d*(?:e\d+)?)"
    found = re.findall(named, text, re.IGNORECASE)
    return tuple(dict.fromkeys(map(float, found)))[:8]


def meant_in(text: str, code: str = "", called: str = "", prose: str = "") -> tuple[str, ...]:
    """Names of mistakes that a text says are none, because it means to compute just that.

    `code` is the text without what is said beside code, `called` the code of what it calls, and
    `prose` what is said. Words alone do not say that code hides later tokens.

    >>> meant_in("softmax(s)", prose="ALiBi is added before scaling: (scores + alibi) / sqrt(d)")
    ('later_tokens_seen', 'alibi_scaled')
    >>> meant_in("talking heads: a softmax whose weights are mixed, causal")
    ('heads_mixed', 'later_tokens_seen')
    >>> meant_in("softmax(s + causal_mask)", "softmax(s + causal_mask)")
    ()
    """
    found = [name for name, words in _MEANT.items() if words.search(text)]
    # A decoder or a word about the future alone does not say that later tokens are hidden.
    found += ["later_tokens_seen"] * (_RULE.search(code) is None)
    found += ["weights_do_not_add_up"] * (_SHARES.search(text + called) is None)
    found += ["key_heads_tiled"] * (_HEADS_IN_TURN.search(prose) is not None)
    found += ["alibi_scaled"] * (_ALIBI_SCALED.search(prose) is not None)
    return tuple(dict.fromkeys(found))


def place_of_norm(text: str) -> str:
    """Whether a layer normalises its input first, or last the sum with it; nothing if not said.

    >>> place_of_norm("x + drop(attention(LayerNorm(x)))"), place_of_norm("post-LN, as usual")
    ('first', 'last')
    """
    if _NORM_FIRST.search(text):
        return "first"
    return "last" if _NORM_LAST.search(text) else ""


def columns_said(*texts: str) -> str:
    """The order of a fused projection's columns: heads one by one, or whole parts; or nothing.

    The first of the texts that says anything of them counts.

    >>> columns_said("columns [Q | K | V]"), columns_said("columns are grouped by head")
    ('parts', 'heads')
    >>> columns_said("[Wq | Wk | Wv]; inside each, head 0 first, then head 1")
    'parts'
    >>> columns_said("first all rows of q, then all of k, then all of v; in each, head by head")
    'parts'
    >>> columns_said("c_attn: columns all q, then all k, then all v")
    'parts'
    >>> columns_said("the first C rows give the queries of all heads, the next C the keys")
    'parts'
    >>> columns_said("rows go head by head: [q_0, k_0, v_0, q_1, k_1, v_1, ...]")
    'heads'
    >>> columns_said("rows of qkv are (head, [q | k | v], width)", "[q | k | v] lie side by side")
    ''
    """
    for text in (_HEADS_OF_PARTS.sub(" ", one) for one in texts):
        if _BY_HEAD.search(text):
            return "heads"
        if (found := _BY_PARTS.search(text)) is not None:
            around = text[max(0, found.start() - 120) : found.end() + 60]
            return "" if _BY_HEAD_TOO.search(around) else "parts"
    return ""


def inverts_mask(text: str, names: Sequence[str]) -> bool:
    """Whether code inverts by ~ a mask that it says is 1 and 0.

    >>> inverts_mask("mask: 1 real / 0 padding; np.where(~mask[:, None], -1e9, s)", ["mask"])
    True
    """
    said = re.search(r"\b1s?\b[^\n]{0,40}(/|,|and|else|,? *0)[^\n]{0,12}\b0s?\b|int64", text)
    inverted = {one[1] for one in re.finditer(r"~ *(\w+)\b", text)}
    made = re.compile(rf"\b({'|'.join(map(re.escape, inverted or ['0']))}) *=[^\n]*\bint(64|32)?\)")
    return said is not None and bool({*names} & inverted or made.search(text))


def says_added(words: str) -> bool:
    """Whether words say that a mask is added to the scores.

    >>> says_added("mask: 0 where allowed, -inf elsewhere"), says_added("mask: 1 for real tokens")
    (True, False)
    """
    return re.search(r"additive|\badded\b|[-−]\s?(?:inf|∞|1e\d|10\^)|finfo", words) is not None


def taken_from_one(code: str, names: Sequence[str]) -> bool:
    """Whether code makes numbers to be added of a mask of 1 and 0, by its difference from 1.

    >>> taken_from_one("(1.0 - attention_mask[:, None]) * -10000", ["attention_mask"])
    True
    """
    known = "|".join(map(re.escape, names)) or "0"
    taken = (
        rf"\b1(\.0?)? *- *({known})\b[^\n]*\)[^\n]*\*|\(({known})\b[^-\n=]{{0,60}}- *1(\.0?)?\) *\*"
    )
    return re.search(taken, code) is not None


def said_scale(text: str) -> str:
    """What a text says of the scale: none, 1 over the width, or by the width of all heads.

    >>> said_scale("T5 folds the scale into its weights"), said_scale("scaled dot product")
    ('none', '')
    >>> said_scale("muP: 1/d instead of 1/sqrt(d)")
    'width'
    >>> said_scale("divided by sqrt(dim_V), the full width")
    'model'
    """
    if _BY_ALL_HEADS.search(words := " ".join(text.split())) and not _BY_ONE_HEAD.search(words):
        return "model"
    if _BY_WIDTH.search(text):
        return "width"
    return "none" if _UNSCALED.search(words.replace("*", "")) else ""  # *no* division by

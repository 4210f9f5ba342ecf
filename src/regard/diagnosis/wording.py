"""What the text of a function says about it: its names, comments and documentation.

Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from regard.diagnosis.signature import Parameter

# What True means in a mask: roles that say so, and words that people write after "True" or "1".
_MEANS = {"keep": "keep", "key_keep": "keep", "hide": "hide", "key_hide": "hide"}
_TRUE = r"(?:true|non-?zero|ones?|1s?)"
_WORD = re.compile(
    r"(?P<no>\b(?:not|never|cannot|can't|may not|no)\b[^.;,]{0,24}?)?\b(?:"
    r"(?P<keep>attend(?:s|ed)?|visible|allow(?:s|ed)?|keeps?|kept|real|valid|may|can|sees?|seen|"
    r"unmasked|takes? part|tokens?(?! to| that| which| is| are))|"
    r"(?P<hide>hides?|hidden|masked|mask(?:s|ed)? out|pad|pads|padding|padded|ignored?|blocked|"
    r"forbidden|excluded?|disallowed|invisible|dropped))\b"
)


LINEAR = re.compile(
    r"linear_?\s?att|linear_?transf|feature_?map|kernel_?\s?feature|kernel(ized)?_?\s?att|"
    r"\bphi\b|\belu\b|performer|favor|efficient_?\s?att",
    re.IGNORECASE,
)
_UNSCALED = re.compile(
    r"(?<![a-z])t5|unscaled|luong|no[_ ]scal|not[_ ]scaled|"
    r"without[_ ](?:a[_ ]|the[_ ]|any[_ ])?scal|"
    r"scal(?:e|ing) (?:is )?(?:folded|absorbed|left)|dot[_ ]?score\b",
    re.IGNORECASE,
)
CAUSAL = re.compile(
    r"causal|tri[lu]\b|look_?ahead|future|autoregressive|subsequent|decoder", re.IGNORECASE
)
COSINE = re.compile(
    r"cosine|cos_?sim|\bnormalize\(|l2_?norm|unit_?(vector|norm|length)|linalg\.(vector_)?norm|"
    r"\.norm\(|qk_?norm",
    re.IGNORECASE,
)
_INCLUSIVE = re.compile(
    r"(?:including|includes) (?:it|the (?:query|current|own|present)|self|its own)|inclusive of|"
    r"\b(?:it)?self (?:included|counts|counted)|counts itself|"
    r"(?:own|current) \w+ (?:included|counts)",
    re.IGNORECASE,
)
_RULE = re.compile(r"causal|tri[lu]_?\(|autoregressive|look_?ahead", re.IGNORECASE)
_SHARES = re.compile(r"softmax|exp2?\(|exp\b|logsumexp", re.IGNORECASE)

# What the code of an attention says that has such a property by design, by the mistake's name.
_MEANT = {
    "heads_mixed": re.compile("talking|mix", re.IGNORECASE),
    "weights_do_not_add_up": re.compile(
        r"sigmoid|sinks?\b|relu|\belu|linear|retention|decay|off.by.one|softmax_?(1|one|plus)|quiet|"
        r"entmax|\bgate|register|(exp|sum)\([^\n]*\)+ *\+ *1|\b1\.? *\+[^\n]*(exp|sum)\(",
        re.IGNORECASE,
    ),
    "later_tokens_seen": re.compile(
        r"causal\w*\W[^\n]*\bFalse|\bif\b[^\n]*causal|bidirectional|non.?causal|prefix|encoder",
        re.IGNORECASE,
    ),
}

# So many keys before the own one, and that one too.
_BESIDES = re.compile(r"previous|before|preceding|plus|back|besides|addition", re.IGNORECASE)


def caps_in(text: str) -> tuple[float, ...]:
    """The numbers that code gives to caps and to the bases of rotary positions.

    >>> caps_in("SOFTCAP = 3.0 ; y = softcapped(x, cap=5, theta=1e6)")
    (3.0, 5.0, 1000000.0)
    """
    named = r"(?:cap|theta|base)\w*(?:\s*:\s*(?:float|int))?\s*=\s*(\d[\d_]*\.?\d*(?:e\d+)?)"
    found = re.findall(named, text, re.IGNORECASE)
    return tuple(dict.fromkeys(map(float, found)))[:8]


def meant_in(text: str, called: str = "") -> tuple[str, ...]:
    """Names of mistakes that a text says are none, because it means to compute just that.

    `called` is the code of what it calls.

    >>> meant_in("talking heads: a softmax whose weights are mixed, causal")
    ('heads_mixed',)
    """
    found = [name for name, words in _MEANT.items() if words.search(text)]
    # A decoder or a word about the future alone does not say that later tokens are hidden.
    found += ["later_tokens_seen"] * (_RULE.search(text) is None)
    found += ["weights_do_not_add_up"] * (_SHARES.search(text + called) is None)
    return tuple(dict.fromkeys(found))


def inverts_mask(text: str, names: Sequence[str]) -> bool:
    """Whether code inverts by ~ a mask that it says is 1 and 0.

    >>> inverts_mask("mask: 1 real / 0 padding; np.where(~mask[:, None], -1e9, s)", ["mask"])
    True
    """
    said = re.search(r"\b1s?\b[^\n]{0,40}(/|,|and|else|,? *0)[^\n]{0,12}\b0s?\b|int64", text)
    return said is not None and any(re.search(rf"~ *{re.escape(one)}\b", text) for one in names)


def says_added(words: str) -> bool:
    """Whether words say that a mask is added to the scores.

    >>> says_added("mask: 0 where allowed, -inf elsewhere"), says_added("mask: 1 for real tokens")
    (True, False)
    """
    return re.search(r"additive|\badded\b|[-−]\s?(?:inf|∞|1e\d|10\^)|finfo", words) is not None


def is_unscaled(text: str) -> bool:
    """Whether a text says that scores are meant to have no scale.

    >>> is_unscaled("T5 folds the scale into its weights"), is_unscaled("scaled dot product")
    (True, False)
    """
    return _UNSCALED.search(text) is not None


def what_window_means(text: str) -> str:
    """The kind of window that a text names: inclusive, or nothing.

    >>> what_window_means("each query sees `window` keys, including itself")
    'inclusive'
    >>> what_window_means("`window` previous keys, and including itself one more")
    ''
    """
    lines = (line for line in text.splitlines() if _BESIDES.search(line) is None)
    return "inclusive" if any(map(_INCLUSIVE.search, lines)) else ""


def what_true_means(text: str, parameters: Sequence[Parameter]) -> str:
    """What True is, keep or hide, if a mask's name or the text of the code says so; else nothing.

    >>> what_true_means("mask: True where attention is NOT allowed", [Parameter("mask", "mask")])
    'hide'
    """
    for one in parameters:
        if one.role in _MEANS:
            return _MEANS[one.role]
    found = set()
    for one in parameters:
        if one.role not in ("mask", "key_mask"):
            continue
        words = one.name.lower().split("_")  # batch_mask may be the entry "mask" of batch
        name = "|".join(re.escape("_".join(words[start:])) for start in range(len(words)))
        said = rf"\b(?:{name})\b[^\n]{{0,60}}?\b{_TRUE}\b(?P<rest>[^\n.;]{{0,60}})"
        for match in re.finditer(said, text.lower()):
            if (word := _WORD.search(match["rest"])) is not None:
                keeps = (word["keep"] is not None) == (word["no"] is None)
                found.add("keep" if keeps else "hide")
    return found.pop() if len(found) == 1 else ""

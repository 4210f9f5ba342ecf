"""What the text of a function says about it: its names, comments and documentation.

Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LINEAR = re.compile(
    r"linear_?\s?att|linear_?transf|feature_?map|kernel_?\s?feature|kernel(ized)?_?\s?att|"
    r"\bphi\b|\belu\b|performer|favor|efficient_?\s?att",
    re.IGNORECASE,
)
_UNSCALED = re.compile(
    r"non_?-?local|(?<![a-z])t5|unscaled|luong|no[_ ]scal|not[_ ]scaled|not\W+divided by|"
    r"without[_ ](?:a[_ ]|the[_ ]|any[_ ])?scal|"
    r"scal(?:e|ing) (?:is )?(?:folded|absorbed|left)|dot[_ ]?score\b",
    re.IGNORECASE,
)
CAUSAL = re.compile(
    r"causal|tri[lu]\b|look_?ahead|future|autoregressive|subsequent|decoder", re.IGNORECASE
)
COSINE = re.compile(
    r"cosine|cos_?sim|\bnormalize\(|l2_?norm|unit_?(vector|norm|length)|linalg\.(vector_)?norm|"
    r"\.norm\(|qk[-_ ]?norm|\brms|rsqrt",
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

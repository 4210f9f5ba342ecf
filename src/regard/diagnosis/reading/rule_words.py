"""What a text says of rules: whether a window counts the own key, and where causal begins.

Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from regard.diagnosis.reading.signature import Parameter

# The size of a window, once its names are replaced, and words for what it holds.
_W = "W"  # all else is in lower case
_KEYS = (
    r"(?:[a-z]+[- ]){0,2}?"
    r"(?:tokens?|keys?|positions?|entries|elements|steps?|ones|frames?|words|neighbou?rs?)"
)
_EARLIER = r"(?:before|previous|preceding|earlier|prior|past|back|to the left)"
_SELF = (
    r"(?:itself|its own|(?:the )?(?:own|current|present|query|newest)"
    r"(?: (?:one|token|key|position|query|step|frame))?)"
)
_AND = r"(?:,? and(?: to)?|,? plus|,? besides|,? as well as|,? in addition to)"
_OWN_KEY = rf"(?:{_SELF}|it\b|self)"
_INCLUSIVE = (
    # itself and the w - 1 tokens before it
    rf"{_W} ?- ?1\)? {_KEYS}\W+(?:\w+\W+){{0,3}}?{_EARLIER}",
    rf"{_W} ?- ?1\)? {_EARLIER} |\b(?:last|{_EARLIER}) \(?{_W} ?- ?1\b",
    rf"{_W} {_KEYS}\W+(?:{_SELF}|the (?:query|token)) and (?:the|its) {_W} ?- ?1\b",
    # w tokens, its own among them
    rf"{_W}\b[^.;]*?\b(?:including|includes?|included|counting|inclusive of|counts|with) "
    rf"{_OWN_KEY}",
    rf"{_W}[^.;]*?(?:{_SELF}|\bself\b)\W+(?:one |token |key |position )?"
    r"(?:is )?(?:included|counted|counts|among them|inclusive)",
    rf"{_W}[^.;]*?{_SELF}\W+(?:being|is|as|are) (?:one|part) of (?:them|it|these|those)",
    rf"(?:fewer|less) than {_W} {_KEYS} (?:back|away|apart|before|ago)",
    rf"{_W} (?:most recent |latest |last |nearest )?{_KEYS} up to and including\b",
    # max(0, i - w + 1) … i, (i - w, i], 0 <= i - j < w
    rf"\b\w+ ?- ?\(?{_W} ?- ?1\)|\b\w+ ?- ?{_W} ?\+ ?1\b(?! ?\))|\b\w+ ?\+ ?1 ?- ?{_W}",
    rf"\( ?\w+ ?- ?{_W} ?, ?\w+ ?\]|\b\w+ ?> ?\w+ ?- ?{_W}(?! ?[-+])|\b\w+ ?- ?{_W} ?<(?! ?=)",
    rf"\b\w+ ?- ?\w+\)?\|? ?<(?! ?=) ?{_W}(?! ?[-+])|{_W} ?>(?! ?=) ?\|?\(?\w+ ?- ?\w+",
    rf"\b\w+ ?- ?\w+\)?\|? ?<= ?{_W} ?- ?1\b|max\( ?0 ?, ?\w+ ?- ?{_W} ?\+ ?1 ?\)",
    # a window of 1 is the token alone
    rf"{_W} ?(?:=|of|is|equal to)? ?1\b[^.;]*?\b(?:only|just|nothing but) {_SELF}",
    rf"{_W} ?(?:=|of|is) ?1\b[^.;]*?{_SELF} (?:only|alone)",
)
_EXCLUSIVE = (
    # itself and the w tokens before it
    rf"{_SELF}{_AND} (?:up to )?(?:the |its )?(?:at most )?(?:(?:last|{_EARLIER}) )?"
    rf"{_W} (?:(?:last|{_EARLIER})\b|{_KEYS} (?:\w+ )?{_EARLIER})",
    rf"{_SELF}{_AND} (?:the |its )?{_EARLIER} {_W}\b(?! ?-)",
    rf"{_W} (?:{_EARLIER} {_KEYS}|{_KEYS} (?:\w+ )?{_EARLIER}"
    rf"(?: it\b| the query| its own| the current one)?){_AND} (?:also )?{_SELF}",
    rf"{_W} ?\+ ?1 {_KEYS}|{_W} {_KEYS} (?:on|to) (?:each|either|both|every) sides?",
    rf"(?:up to|at most|no (?:more|further) than) {_W} {_KEYS} (?:back|away|apart|ago)",
    rf"{_W} (?:{_KEYS} )?(?:to|on) the left and {_W} (?:{_KEYS} )?(?:to|on) the right",
    # i - w to i inclusive, i - w <= j, i - j <= w
    rf"\b\w+ ?- ?{_W} (?:to|through|up to|\.\.+|…) \w+,? \(?(?:inclusive|included)",
    rf"\[ ?\w+ ?- ?{_W} ?, ?\w+ ?\]|\b\w+ ?- ?{_W} ?<= ?\w+|\b\w+ ?>= ?\w+ ?- ?{_W}(?! ?[-+])",
    rf"\b\w+ ?- ?\w+\)?\|? ?<= ?{_W}(?! ?[-+])|{_W} ?>= ?\|?\(?\w+ ?- ?\w+",
    rf"{_W} ?(?:=|of|is) ?0\b[^.;]*?\b(?:only|just|nothing but) {_SELF}",
)
# So many keys before the own one, and that one too; or that one not at all.
_DOUBTFUL = re.compile(
    rf"{_SELF} one more\b|\bexcluding\b|\bwithout (?:{_SELF}|it\b)|\bnot (?:{_SELF}|it\b)"
)

_MANY = r"(?:fewer|less) queries than keys|more keys|\b(?:s|lk|sk|m|t_k|n_k) ?> ?\w+"
_LAST = r"(?:last|final|newest|most recent|latest)"
_SEES = (
    r"(?:sees?|attends? to|reads?|looks? at|(?:may|can|to) (?:see|attend to|look at|read)|"
    r"has access to)"
)
_ALIGNS = (
    r"(?:is |are )?(?:aligned|aligns?|lines? up|matched|match(?:es)?|belongs?|corresponds?|"
    r"coincides?|sits?|meets?)"
)
_FIXED = r"(?:aligned?|anchored|flush|pinned)"
_BOTTOM, _TOP = r"(?:bottom|lower)[- ]right", r"(?:top|upper)[- ]left"
_MORE = r"(?:s|sk|lk|kv|m|tk|t_k|n_k|s_k|l_k|kv_len|len_k|seqlen_k|k_len|num_keys|n_keys|src_len)"
_UP_TO_I = r"(?:(?:\b0 ?(?:\.\.+|…|to|through)|\bkeys up to) ?i\b|j ?<= ?i\b)"
_END = (
    rf"\b{_FIXED} (?:\w+ ){{0,3}}?{_BOTTOM}|\b{_BOTTOM}[- ](?:\w+ )?(?:align\w*|causal|mask)",
    rf"\b(?:causal|mask\w*)\b[^.;]*\b{_BOTTOM} corner|\bends? (?:in|at) the {_BOTTOM}",
    rf"\b{_LAST} (?:query|row|token|position)(?: \w+)? {_SEES} "
    r"(?:all|every|the (?:whole|full|entire))",
    rf"\b{_LAST} (?:query|row|token)(?: \w+)? {_ALIGNS} (?:\w+ ){{0,2}}?(?:the )?{_LAST} key",
    rf"\baligns? the {_LAST} query (?:to|with) the {_LAST} key",
    rf"\bqueries {_ALIGNS} (?:to|with) the {_LAST} |\bqueries match the {_LAST} ",
    # where the queries are among the keys
    r"\b(?:queries|q|query) (?:are|is|holds?|belongs? to|contains?) (?:only )?"
    rf"(?:the |for the |at the )?(?:\w+ )?(?:{_LAST}|end)\b(?! (?:dim|axis|layer))",
    r"\b(?:queries|q|tokens) (?:that )?(?:come|follow|start|begin|are placed|sit)s? (?:\w+ )?"
    r"after (?:\W?\w+\W+){0,4}?(?:those |that )?(?:\w+ )?(?:cache[ds]?|past|prefix)",
    r"\bnew (?:tokens|queries) (?:are|sit|come) at the end",
    # the queries may be fewer; they are then the last ones of the sequence
    rf"\b(?:they|these) are (?:\w+ )?the {_LAST} (?:ones |tokens |rows |positions )?of the "
    r"(?:whole )?(?:sequence|text|keys)",
    r"\b(?:queries|q)\b[^.;]{0,30} at the end of (?:the )?(?:k\b|keys?|caches?|sequence)",
    r"\b(?:queries|q) (?:are|is|holds?|contains?) (?:only |just )?the new "
    r"(?:tokens|positions|ones|rows)",
    rf"\b(?:query|row|position|i|j)\b[^.;]*\b\w+ ?\+ ?\(?{_MORE} ?- ?\(?\w+\)?",
    rf"\bposition \(?{_MORE} ?- ?\w+\)? ?\+ ?i\b",
    r"\b(?:k and v|keys and values|k/v|k, v) (?:also )?(?:include|contain|hold)s? (?:\w+ )*?"
    r"(?:past|cached|earlier|previous)",
)
_START = (
    rf"\b{_FIXED} (?:\w+ ){{0,3}}?{_TOP}|\b{_TOP}[- ](?:\w+ )?align\w*",
    rf"\b(?:starts?|begins?) (?:in|at) the {_TOP}",
    r"\baligns? the first query (?:to|with) the first key",
    rf"\bfirst query (?:\w+ )?{_ALIGNS} (?:\w+ ){{0,2}}?(?:the )?first key",
    rf"\b(?:query|row) (?:i|0)\b[^.;]*(?:{_UP_TO_I}|\bonly key 0\b)[^.;]*(?:{_MANY})",
    rf"(?:{_MANY})[^.;]*\b(?:query|row) (?:i|0)\b[^.;]*{_UP_TO_I}",
)
_NOT_SO = re.compile(
    r"\b(?:rather than|instead of|as opposed to|unlike|not|never|in contrast to|differs from|"
    r"whereas|while)\b[^.;]*"
)
_PIECES = re.compile(
    r"\b(?:in|as) (?:one or )?(?:several|many|multiple|some|small|any) "
    r"(?:pieces|parts|chunks|calls|steps|segments)|\bpiece by piece|"
    r"\bchunk(?:ed|s|wise)? (?:prefill|at a time|by chunk|of tokens)|"
    r"\b(?:any|arbitrary) (?:number|length|count) of (?:new |further )?tokens|"
    r"\b(?:some|several|many|a few|multiple|one or more) (?:new |further )?tokens at a time|"
    r"\bone or (?:more|several|many) (?:new |further )?(?:tokens|at a time)|"
    r"\b(?:pieces|parts|chunks|segments) of any (?:size|length)|"
    r"\bthe next (?:\w|few|some|several) tokens\b|"
    r"\btokens (?:that )?(?:come|follow)s? (?:\w+ )?after (?:those|the ones|the tokens|all|what)"
)
_SINGLE = re.compile(
    r"\b(?:later|following|further|next|afterwards|after that|then|decoding)\b[^.;]{0,60}"
    r"\b(?:(?:one|1|a single)(?: new| more| further)?|the (?:new|next|newest)) token\b|"
    r"\b(?:one|1|a single)(?: new| more| further)? token (?:per|in each|in every) (?:call|step)\b|"
    r"\btokens (?:are |is )?(?:then )?(?:fed|come|follow|given|passed)[^.]{0,20} one "
    r"(?:at a time|by one)\b"
)
_LONGEST = 1000  # characters of a sentence


def what_window_means(text: str, parameters: Sequence[Parameter] = ()) -> str:
    """Whether so many keys are the own one and earlier ones, inclusive, or earlier ones, exclusive.

    >>> what_window_means("each query sees `window` keys, including itself")
    'inclusive'
    >>> what_window_means("a token sees itself and the window tokens before it")
    'exclusive'
    >>> what_window_means("the `window` most recent tokens up to and including i")
    'inclusive'
    >>> what_window_means("`window` previous keys, and including itself one more")
    ''
    """
    names = [one.name.lower() for one in parameters if one.role == "window"]
    found = set()
    for sentence in _sentences(text):
        if _DOUBTFUL.search(sentence):
            continue
        plain = _with_sign(sentence, names)
        for meaning, patterns in (("inclusive", _INCLUSIVE), ("exclusive", _EXCLUSIVE)):
            if any(re.search(one, plain) for one in patterns):
                found.add(meaning)
    return found.pop() if len(found) == 1 else ""


def where_causal_aligns(text: str) -> str:
    """Which queries and keys meet where there are more keys: the last, end, the first, start.

    >>> where_causal_aligns("the mask is aligned to the bottom right: the last query sees all keys")
    'end'
    >>> where_causal_aligns("the first query is aligned with the first key")
    'start'
    """
    found = set()
    for sentence in _sentences(text):
        said = _NOT_SO.sub("", sentence)
        for meaning, patterns in (("end", _END), ("start", _START)):
            if any(re.search(one, said) for one in patterns):
                found.add(meaning)
    return found.pop() if len(found) == 1 else ""


def says_one_token(text: str, names: Sequence[str]) -> bool:
    """Whether arrays with one of these names are said to have one token: x: (batch, 1, dim)."""
    return any(
        re.search(rf"\b{re.escape(name)}\b:? *\([a-z_A-Z]+, *1, *\w+\)", text) for name in names
    )


def says_pieces(text: str) -> bool:
    """Whether several tokens may follow those in a cache in one call.

    >>> says_pieces("feed the next T tokens, in several pieces"), says_pieces("token by token")
    (True, False)
    """
    return any(_PIECES.search(sentence) for sentence in _sentences(text))


def says_single(text: str) -> bool:
    """Whether one token alone follows those in a cache in each call.

    >>> says_single("Later calls: the new token alone")
    True
    >>> says_single("the whole prompt first, then one token per call"), says_single("a few tokens")
    (True, False)
    >>> says_single("Afterwards tokens are fed one at a time with the cache")
    True
    """
    return any(_SINGLE.search(sentence) for sentence in _sentences(text))


def _sentences(text: str) -> Iterator[str]:
    """The sentences of documentation, in lower case, without marks around names."""
    plain = re.sub(
        r"[`*\"]|(?<!\w)'|'(?!\w)", "", text.lower().replace("−", "-").replace("≤", "<=")
    )
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[a-z_]\w*(?:, ?\w+)*\s*:)", plain):
        for one in re.split(r"(?<![.\s])\.(?=\s|$)|;", " ".join(paragraph.split())):
            if one.strip() and len(one) <= _LONGEST:
                yield one.strip()


def _with_sign(sentence: str, names: Sequence[str]) -> str:
    """The sentence with one sign for the size of a window, whatever it is called."""
    called = "|".join([*map(re.escape, names), r"window[_ ]?(?:size|length|width)", "window", "w"])
    plain = re.sub(rf"\b(?:{called})\b", _W, sentence)
    if (alias := re.search(rf"\b{_W} (?:= |of )?([a-z])\b(?! )", plain)) is not None:
        plain = re.sub(rf"\b{alias[1]}\b", _W, plain)
    return plain

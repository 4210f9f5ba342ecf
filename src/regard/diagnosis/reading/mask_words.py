"""What a text says of True and False, or of 1 and 0, in a mask.

Reads documentation and comments piece by piece: a piece counts that has one value and words of one
meaning. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from regard.diagnosis.reading.signature import MASKS, Parameter

# What True means in a mask whose name says it.
_BY_NAME = {"keep": "keep", "key_keep": "keep", "hide": "hide", "key_hide": "hide"}
# Signs for True and 1, False and 0, and −inf in plain words.
_YES, _NO, _FAR = "⊤①", "⊥⓪", "⊖"
_VALUE = f"[{_YES}{_NO}]"

_KEEPS = (
    r"(?:allowed|permitted|able) to \w+|attend(?:s|ed|able|ing)?|visible|allow(?:s|ed|able)?|"
    r"permit(?:s|ted)?|keep(?:s|ing)?|kept|"
    r"unmasked|unpadded|exists?|existing|present|real(?![- ](?:valued|number))|valid|sees|seen|"
    r"(?:can|may|to|must|not) see|see(?= (?:the )?(?:key|token)s?\b)|"
    r"look(?:s|ed)?(?![- ]?ahead)|tak(?:es?|ing) part|participat\w+|"
    r"includes?|included|active|legal|available|us(?:es?|ed|able)(?! (?:for|as|to|in|by|with|when))"
    r"|actual|observed|reads?|readable|contribut\w+|retain(?:s|ed)?|preserves?|preserved|"
    r"pass(?:es)? through|let through|influences?|genuine|legitimate|accessible|reachable|live|"
    r"selected|meaningful|connected|neighbou?rs?"
)
_HIDES = (
    r"hid(?:es?|ing)|hidden(?! (?:state|size|dim|unit|layer))|masks|mask(?:s|ed|ing)? out|"
    r"to mask|masked(?![- _](?:self|attention|softmax|language|multi|fill))|pads?|padding|padded|"
    r"ignor(?:es?|ed|ing)|blocks|blocked|to block|forbidden|exclud(?:es?|ed|ing)|disallowed|"
    r"invisible|drop(?:s|ped)?|leav(?:es?|ing) out|left out|skip(?:s|ped)?|remov(?:es?|ed)|"
    r"blank(?:s|ed)? out|off[- ]limits|invalid|suppress(?:es|ed)?|prohibited|disabled|banned|"
    r"fill(?:er|ing)|missing|absent|empty|dummy|discard(?:s|ed)?|illegal|zeroed|unavailable|"
    rf"unseen|unattended|inaccessible|future|cut off|silenced|wiped|erased|"
    rf"(?:beyond|past|after) (?:the|its|their|each) (?:\w+ )?(?:length|end)|weightless|{_FAR}"
)
_MEANING = re.compile(
    r"(?:\b(?P<no>not|never|no|nobody|no one|non|nor|neither|unless|except|apart from|"
    r"(?:all|everything) but)\b[^.;]{0,28}?)?"
    r"(?:\b(?P<stops>prevent\w*|avoid\w*|forbids?|stops?|disallows?)\b[^.;]{0,28}?)?"
    rf"(?<!\w)(?:(?P<keep>{_KEEPS})|(?P<hide>{_HIDES}))(?!\w)"
)
_TOKEN = re.compile(
    rf"{_VALUE}\W*(?:(?:for|is|are|at|on|over|in|means?|marks?|indicates?|an?|the|every) )*"
    r"(?:tokens?|text|words?|data|attention)\W*$"
)

# What is beside a value.
_LINK = (
    r"(?:where|wherever|if|when|for|at|on|over|in|marks?|means?|indicates?|denotes?|signals?|=|:)"
)
_BEFORE = (
    r"((?:^|[.,:=(]|\b(?:is|are|be|being|equals?|has|have|having|to|as|with|by|of|the|and))\s*)"
)
_RESULT = (
    r"(?:outputs?|results?|return(?:s|ed)?|weights?|scores?|logits?|probability|probabilities|"
    r"gradients?|loss)"
)
_AXIS = r"\*?[\w.#…]*(?:\s*[*+/-]\s*\w+)*"
_ZERO = r"(?:0(?:\.0*)?(?![\w.])|zero\b|false\b)"
# Each in turn is replaced, until only values are left of numbers.
_PLAINER = [
    (re.compile(pattern), sign)
    for pattern, sign in (
        (r"(?<=\w)=none\b", " "),  # a default
        (r"[<\[](pad)(?:ding)?[>\]]", r" \1 "),
        (rf"[(\[{{]\s*{_AXIS}(?:\s*,\s*{_AXIS})+\s*[)\]}}]|\[[\w\s,:.]*\]", " "),  # a shape
        (
            r"\bas (?:the |an? )?[\w']+(?: \w+)? (?:returns?|gives?|makes?|outputs?)"
            r"(?: (?:it|them))?\b|"
            r"\b(?:as )?(?:returned|given|made|output) by (?:the |an? )?[\w']+\b",
            " ",
        ),
        (r"can(?:not|'t)", "can not"),
        (r"n't\b", " not"),
        (r"\bnon-?(?!zero|e\b)(?=[a-z])", "non "),  # and not none
        (r"\b(e\.g|i\.e|etc|resp|incl)\.", r"\1 "),
        (r"--+|[—–]|=>|->|→|⇒", " : "),
        (r"[-−]\s?(?:np\.|math\.|torch\.)?(?:inf\w*|∞|1(?:\.0*)?e\d+|10\s?\^\s?\d+|10000)", _FAR),
        (r"(?:large |very |big )+negative|(?:minus|negative) infinity", _FAR),
        (
            r"\b(?:no|zero|0(?:\.0*)?) (?:weights?|probability|attention)\b|"
            r"\b(?:weights?|probability) (?:of )?(?:zero|0(?:\.0*)?)\b",
            "weightless",
        ),
        (r"\bzero[- ](?:pad\w*|out)\b", "zeroed"),
        (
            r"\b(?:gives?|returns?|yields?|produces?|outputs?) (?:all |a row of )?zeros?\b|"
            r"\bzeros? (?:instead of|and not|not) nan\b",
            " ",
        ),
        (r"(?<![\w.])([01])\s+-\s+(?=[a-z]{3})(?!\w*mask)", r"\1 = "),
        (
            rf"(?:!=|≠|>|\bnot(?: equal to)?|\b(?:greater|other) than)\s*{_ZERO}|\bnon-?zeros?\b",
            "⊤",
        ),
        (r"(?:!=|≠|\bnot(?: equal to)?|\bother than)\s*(?:1(?![\w.])|true\b)", "⊥"),
        # Places and amounts, arithmetic and ranges.
        (
            r"\b(?:at least|at most|exactly|only|(?:more|less|fewer) than|up to|from|axis|dim\w*|"
            r"index|row|column|position|step|layer|adds? up to|sums? to|batch|length|size|width|"
            r"weights?|probability|rank)(?: of)? (?:1(?:\.0*)?|0(?:\.0*)?|one|zero)\b",
            " ",
        ),
        (
            r"\b(?:1|0|one|zero)[- ](?:token|key|query|head|row|position|step|element|word|time|"
            r"batch|block|layer|entry|value|frame|item|of|or more|more|by|per|such|another|other|"
            r"hot|based|indexed|d)\b|[<>]=? ?[01]\b|\bone (?:for|per) (?:each|every)\b",
            " ",
        ),
        (
            r"(?<![\w.])[01](?:\.0*)?\s*[-+*^×·]+|[-+*^×·]\s*[01](?:\.0*)?(?![\w.])|\.\.\s*[01]|"
            r"(?<![\w.])1\s*/\s*(?![01])|\b[01]\s*/\s*[01]\b(?!\.)|\b[01]\s*(?:\.\.|…)",
            " ",
        ),
        (r"(?<![\w.])true\b", "⊤"),
        (r"(?<![\w.])false\b", "⊥"),
        (r"(?<![\w.])1(?:\.0*(?!\w))?'?s?(?![\w]|\.\d)", "①"),
        (r"(?<![\w.])0(?:\.0*(?!\w))?'?s?(?![\w]|\.\d)", "⓪"),
        (r"\bthe ones(?= (?:to|that|which|who|with|before|after|in|of|we|you)\b)", "those"),
        (rf"{_BEFORE}(?:ones\b|one(?= {_LINK}(?!\w)))", r"\1①"),
        (
            rf"\bzeros?\b(?:(?<=s)|(?= (?:{_LINK}(?!\w)|entries|elements|values|positions|cells)))",
            "⓪",
        ),
        (r"\(\s*([⊤⊥])\s*\)", r" \1 "),
        (rf"({_VALUE})\s*(?:,|/|and|or|and/or)\s*({_VALUE})(?!\s*{_LINK}(?!\w))", " "),
    )
]
# A mask of numbers to be added: 0 then is a key that is seen.
_ADDED = re.compile(
    rf"additive|\badded\b|\bsummed\b|{_FAR}\s*(?:{_LINK}(?!\w)|elsewhere|otherwise|to )|"
    rf"{_FAR}\s*(?:,|/|and|or)\s*{_VALUE}|{_VALUE}\s*(?:,|/|and|or)\s*{_FAR}"
)
_BREAK = re.compile(r",|\(|\)|/|\b(?:and|or|while|whereas|but(?! not)|else|otherwise|so that)\b")
_LONGEST = 1000  # characters of a sentence
_INSTEAD = re.compile(r"\b(?:rather than|instead of|as opposed to|unlike|in contrast|contrary)\b.*")
# A name with which what is said of another argument begins: `name:`, `name (bool):`, `name --`.
_HEAD = re.compile(
    r"\s*(?P<names>[a-z_]\w*(?:\s*(?:,|/|and)\s*[a-z_]\w*)*)\s*"
    r"(?:\((?:[^()\n]|\([^()\n]*\))*\)|of shape [^:\n]{1,40})?\s*(?::(?![:=])|--|—)"
)
_NEXT = re.compile(r"(?<=[.;,])\s+(?=[a-z_]\w*\s*(?:\([^()\n]*\))?\s*(?::|--|—))")
_NO_NAME = re.compile(
    rf"true|false|ones?|zeros?|nonzero|note|shape|type|dtype|default|where|here|{_KEEPS}|{_HIDES}"
)

# What may be said to be True.
_BEARS = re.compile(
    r"it|values?|entry|element|cell|bit|flag|that|which|this|there|positions?|tokens?|keys?|"
    rf"{_KEEPS}|{_HIDES}"
)


def what_true_means(text: str, parameters: Sequence[Parameter], *, of_ones: bool = False) -> str:
    """What True is in a mask, keep or hide: as the text says it, or else its name; or nothing.

    `of_ones`: it holds 1 and 0, also where the text says that numbers made of it are added.

    >>> what_true_means("mask: True where attention is NOT allowed", [Parameter("mask", "mask")])
    'hide'
    >>> what_true_means("key_mask=None (B, L) True = pad", [Parameter("key_mask", "key_mask")])
    'hide'
    >>> what_true_means("mask: True marks what nobody attends to", [Parameter("mask", "mask")])
    'hide'
    >>> what_true_means("valid: bool or None: True = real", [Parameter("valid", "key_keep")])
    'keep'
    >>> what_true_means("pad (B, L) is 0 at padded items", [Parameter("pad", "key_hide")])
    'keep'
    """
    roles = [role for role in MASKS if role in ("mask", "key_mask", *_BY_NAME)]
    masks = [one for role in roles for one in parameters if one.role == role]
    if not masks:
        return ""
    found = set(_said(text.lower(), masks, {one.name.lower() for one in parameters}, of_ones))
    if not found:
        return _BY_NAME.get(masks[0].role or "", "")
    return found.pop() if len(found) == 1 else ""


def _said(
    text: str, masks: Sequence[Parameter], parameters: set[str], of_ones: bool
) -> Iterator[str]:
    """What each piece of a text says of the first mask."""
    name = masks[0].name.lower()
    names = {name}
    if len(masks) == 1:
        words = name.split("_")  # batch_mask may be the entry "mask" of batch
        names |= {"mask", *("_".join(words[start:]) for start in range(len(words)))}
    alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    subject = re.compile(
        r"(?<!causal[ -])(?<!ahead[ -])(?<!triangular[ -])(?<!window[ -])(?<!loss[ -])"
        rf"(?<![\w.-])(?:{alternatives})(?![\w-])"
    )
    for about, entry in _entries(text, names, parameters):
        mentioned, is_added = about, not of_ones and _ADDED.search(entry) is not None
        for sentence in re.split(r"[.;](?=\s|$)", entry):
            if len(sentence) > _LONGEST:
                continue
            own = subject.search(sentence)
            begins = mentioned and re.match(rf"\W*(?:the |it \w+ (?:an? )?)?{_VALUE}", sentence)
            if about or own or begins:
                found = _of_sentence(sentence, subject, parameters - names)
                yield from (means for sign, means in found if sign in "⊤⊥" or not is_added)
            mentioned = about or own is not None


def _entries(text: str, names: set[str], parameters: set[str]) -> Iterator[tuple[bool, str]]:
    """The parts of a text in plain words, and whether each begins with a name of the mask."""
    about, indent, blank, parts = False, 0, False, list[str]()
    of_another = False  # whether another mask is what is described
    for line in text.splitlines():
        if not line.strip():
            blank = True
            continue
        depth = len(line) - len(line.lstrip())
        if blank and depth <= indent:  # deeper lines still belong to the name above them
            yield about, _plain(parts)
            about, of_another, indent, parts = False, False, depth, []
        blank = False
        bare = re.sub(r"^\s*[:@]param\s+(?:\w+\s+(?=\w))?", "", line.strip())
        is_item = re.match(r"[-*•]\s", bare) is not None
        bare = re.sub(r"[`\"]|\*\*|(?<!\w)'|'(?!\w)", "", re.sub(r"^[-*•]\s+", "", bare))
        for number, part in enumerate(_NEXT.split(bare)):
            head = _HEAD.match(part)
            told = set(re.findall(r"[a-z_]\w*", head["names"])) - {"and"} if head else set()
            if head is not None and not any(map(_NO_NAME.fullmatch, told - parameters)):
                yield about, _plain(parts)
                about, parts = bool(told & names), []
                of_another = not about and any(re.search("mask|pad", one) for one in told)
                indent = indent if number else depth
                part = part[head.end() :] if about else part
            if not of_another:
                parts.append(f". {part}" if is_item and number == 0 else part)
    yield about, _plain(parts)


def _plain(parts: Sequence[str]) -> str:
    """A text with signs for True, False and −inf, without shapes, counts and arithmetic."""
    text = " ".join(parts)
    for pattern, sign in _PLAINER:
        text = pattern.sub(sign, text)
    return text


def _of_sentence(
    sentence: str, subject: re.Pattern[str], others: set[str]
) -> Iterator[tuple[str, str]]:
    """The values in the pieces of one sentence, and what True then means."""
    # "Keeps the convention: mask is True …" says nothing of the mask before its name.
    heading = rf"^.*\b(?!(?:{_KEEPS}|{_HIDES})\b)\w+ ?:\s*(?={subject.pattern})"
    pieces = _BREAK.split(_INSTEAD.sub("", re.sub(heading, "", sentence)))
    for number, piece in enumerate(pieces):
        earlier = " ".join(pieces[:number])
        for part in _of_one_value(piece):
            sign = re.search(_VALUE, part)
            if sign is None or _is_of_another(f"{earlier} {part}", subject, others):
                continue
            meanings = _meanings(part)
            link = re.search(rf"{_VALUE}.*?{_LINK}(?!\w)|{_VALUE}\s*$", part)
            for rest in pieces[number + 1 : number + 3] if link else ():
                if meanings or re.search(_VALUE, rest):
                    break
                meanings = _meanings(rest)
            if len(meanings) == 1:
                keeps = meanings == {"keep"}
                yield sign[0], "keep" if keeps == (sign[0] in _YES) else "hide"


def _of_one_value(piece: str) -> list[str]:
    """The piece, or its parts if it says first 1 and then 0 without a comma; or nothing."""
    if len(set(re.findall(_VALUE, piece))) < 2:
        return [piece]
    parts = [one for one in re.split(f"(?={_VALUE})", piece) if one.strip()]
    return parts if all(re.match(_VALUE, one) for one in parts) else []


def _is_of_another(part: str, subject: re.Pattern[str], others: set[str]) -> bool:
    """Whether a value is that of another name, or of what is computed."""
    before, _, after = re.split(f"({_VALUE})(?!.*{_VALUE})", part, maxsplit=1)
    if re.search(rf"{subject.pattern}\W*(?:(?:is|are|has|values?|of|set|to|a|the) ?)*\W*$", before):
        return False
    given = re.search(r"(\w+)\s*(?:={1,2}|\bis\b)\s*$", before)
    if given is not None and (given[1] in others or not _BEARS.fullmatch(given[1])):
        return True
    if re.match(rf"\s*(?:to (?:return|also|use|apply|enable)|{_RESULT})\b", after):
        return True
    return re.search(rf"\b{_RESULT}\b", before) is not None


def _meanings(part: str) -> set[str]:
    """What words say happens to a key: keep, hide, or both."""
    found = set()
    for one in _MEANING.finditer(part):
        stopped = one["stops"] is not None and one["keep"] is not None
        keeps = (one["keep"] is not None) == (one["no"] is None)
        found.add("keep" if keeps != stopped else "hide")
    return found or ({"keep"} if _TOKEN.search(part) else set())

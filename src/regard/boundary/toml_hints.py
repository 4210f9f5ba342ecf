"""How to mend a line that is not valid TOML: what people write there, and what TOML has instead.

Owns the mistakes that are recognised, by what the parser says and by the text around the place
that it names. Must not know the keys of a file.
"""

from __future__ import annotations

import re
from bisect import bisect_left

from regard.errors import safe_text

_MOST = 400  # characters of a line that are looked at, to either side of the place

_KEY = r"""[ \t]*(?:[\w.-]+|"[^"]*"|'[^']*')[ \t]*"""
_HEADER = r"""\[+[ \t]*[A-Za-z_"'][^\],]*\]+[ \t]*(?:\#|$)"""
_NOT_CLOSED = (rf"^\s*\0(?:{_KEY}=|{_HEADER})", "the list above is not closed: a ] is missing")
_CALL = "TOML has numbers, not expressions; write the result"
_NAME = 'put the name between quotes: "{0}" ='
_POINT = (r"(\d+)\0\.(?!\d)", "write {0}.0")
_ZERO = (r"[=\[,]\s*[-+]?0\0(\d+)", "a number does not begin with 0; write {0}")

# Beginning of the parser's message -> what the line looks like, \0 at the place, and how to mend
# it, with the groups of the pattern filled in. The first that is found counts.
_RULES = {
    "Invalid value": (
        _NOT_CLOSED,
        (r"\0(?:True|TRUE|False|FALSE)\b", "write true and false in lower case"),
        (r"\0(?i:yes|no|on|off)\b", "write true or false"),
        (r"\0(?i:(none|null|nil))\b", "TOML has no {0}; leave the key out"),
        (r"\0[-+]?(?i:nan|inf|infinity)\b", "write nan, inf or -inf"),
        (r"\0[“”„«»‘’‚`]", 'text goes between straight quotes: "…"'),
        (r"\0[−–]", "a minus sign is written -"),
        (r"\0\(", "a list goes between [ and ]"),
        (r"\0([-+]?)(\.\d+)", "write {0}0{1}"),
        (r"\0(?:\.\.\.|…)", "write every number"),
        (r"\0=", "write one ="),
        (r"\0,", "there is one comma too many"),
        (r"\0[\w.]+\s*\(", _CALL),
        (r"=\s*\0\s*(?:\#|$)", "a value begins on the line of its key"),
        (r"=\s*\0([^\W\d][^#]*?)\s*(?:\#|$)", 'text needs quotes: "{0}"'),
        (r"\0([^\W\d][^#,\]}]*)", 'text needs quotes: "{0}"'),
    ),
    "Expected newline": (
        (r"\0\s*;", "a line ends without ;"),
        (r"\0\s*//", "a comment begins with #"),
        (r"\0\s*,\s*(?:\#|$)", "a line ends without a comma"),
        (r"\0\s*,", "several values go between [ and ]"),
        (r"\0\s*\]", "there is one ] too many"),
        _POINT,
        _ZERO,
        (r"\0\s*[-+*/^%(]", _CALL),
        (rf"\0{_KEY}=", "each key begins a line of its own"),
        (r"'\0", "text with ' in it goes between double quotes"),
        (r'"\0', 'within text, " is written \\"'),
        (r"\0", "a key has one value; several go between [ and ], with commas"),
    ),
    "Unclosed array": (
        _NOT_CLOSED,
        (r"\0[^\]]*;", "each row is a list of its own, as in [[1, 0], [0, 2]]"),
        _POINT,
        _ZERO,
        (r"\0[*/^%(]", _CALL),
        (r"\0$", "a list is not closed: a ] is missing"),
        (r"\0\[", "a comma is missing between two rows"),
        (r"\0([^\s,\]]+)", "a comma is missing before {0}"),
    ),
    "Expected '=' after a key": (
        (r"^\s*(\S+?)\s*\0\s*:\s*(?:\#|$)", "a table begins with [{0}]"),
        (r"\0\s*:", "write = and not :"),
        (r"^\s*-\s", "a list goes between [ and ]"),
        (r"^\s*([^={]*?\0[^=]*?)\s*=", _NAME),
        (r"^\s*(\S+)\s*\0(\S+)\s*$", "write {0} = {1}"),
        (r"\0", "a line is key = value, or [table]"),
    ),
    "Expected ']": (
        (r"\0\s*,", "a list needs a key before it, as in queries = [[1, 0], [0, 2]]"),
        (r"\0", "a ] is missing after the name of the table"),
    ),
    "Invalid statement": (
        (r"\0(?://|;|%|--|/\*)", "a comment begins with #"),
        (r"\0\{", "this is JSON, whose files end in .json"),
        (r"\0\]", "there is one ] too many"),
        (r"\0([^=]+?)\s*=", _NAME),
        (r"\0", "a line is key = value, or [table]"),
    ),
    "Invalid initial character for a key part": (
        (r",\s*\0\s*\}", "a table between {{ and }} ends without a comma"),
        (
            r"[{,]\s*\0\s*(?:\#|$)",
            "a table between {{ and }} is on one line; over several lines, begin it with [name]",
        ),
        (r"(?:[.[{,]|^)\s*\0([^={]*?)\s*[=\]]", 'put the name between quotes: "{0}"'),
    ),
    "Unclosed inline table": ((r"\0", "a comma or a }} is missing"),),
    "Illegal character '\\n'": ((r"\0", "the quotes are not closed on their line"),),
    "Unterminated string": ((r"\0", "the quotes are not closed"),),
    "Expected \"'": ((r"\0", "the quotes are not closed"),),
    "Unescaped '\\'": ((r"\0", "write \\\\ for a backslash, or put the text between ' and '"),),
    "Cannot overwrite a value": ((r"^\s*([^=]*?)\s*=", "{0} is given twice; keep one of the two"),),
    "Cannot declare": (
        (r"^\s*\[+\s*([^\]]*?)\s*\0?\]", "{0} is given twice; put all of it below one [{0}]"),
    ),
}
_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)|\(at end of document\)")


def hint(text: str, message: str) -> str:
    r"""How to mend what the parser of TOML says about a text; empty if that is not known.

    >>> hint("causal = True", "Invalid value (at line 1, column 10)")
    'write true and false in lower case'
    """
    place = _PLACE.search(message)
    if place is None:
        return ""
    text = text.replace("\r\n", "\n")
    at = len(text)
    if place[1] is not None:
        lines_before = int(place[1]) - 1
        start = bisect_left(range(at), lines_before, key=lambda end: text.count("\n", 0, end))
        at = start + int(place[2]) - 1
    before = text[max(at - _MOST, 0) : at].rpartition("\n")[2]
    after = text[at : at + _MOST].partition("\n")[0]
    for kind, rules in _RULES.items():
        if message.startswith(kind):
            for pattern, mend in rules:
                if found := re.search(pattern, f"{before}\0{after}"):
                    groups = (
                        safe_text((one or "").replace("\0", ""), 40) for one in found.groups()
                    )
                    return mend.format(*groups)
    return ""

"""The layout of a function's arrays, where its code or its documentation says it.

Must not know any probe.
"""

from __future__ import annotations

import re

_AXES = (
    ("H", re.compile(r"(h|nh|n_?h|hq|hn|num_?heads?|n_?heads?|heads?|\w*_heads|q_?heads?)$")),
    (
        "D",
        re.compile(
            r"(d|dk|dh|hd|e|c|f|k?d_?\w{0,5}|\w*dim\w*|head_?size|width|\w*features?|chan\w*)$"
        ),
    ),
    ("B", re.compile(r"(b|bs|bsz|nb|batch\w*|\w*batch|bsize)$")),
    (
        "L",
        re.compile(
            r"(1|l|t|n|s|q|i|m|lq|tq|sq|nq|total\w*|nnz|len\w*|\w*len\w*|seq\w*|\w*tok\w*|time|rows|n_?q|"
            r"(num_?|n_?)?nodes|frames|patches|pixels|items|steps)$"
        ),
    ),
)
_TOKEN = r"(?:[A-Za-z_]\w*|1\b)"  # a single token is one of length 1
_LIST = rf"{_TOKEN}(?:\s*(?:,|\bx\b|\*)\s*{_TOKEN}){{1,3}}"


def axes_of(words: list[str]) -> str:
    """The axes that words name, such as BHLD; nothing if one is unclear or named twice.

    >>> axes_of(["batch", "seqlen", "n_heads", "head_dim"]), axes_of(["b", "x"])
    ('BLHD', '')
    >>> axes_of(["batch", "1", "heads", "dim"]), axes_of(["n", "heads", "d"])
    ('BLHD', 'LHD')
    >>> axes_of(["sq", "b", "np", "hn"])
    'LBHD'
    """
    if [word.lower() for word in words[-3:]] in (["t", "n", "h"], ["s", "n", "h"]):
        words = [*words[:-3], "t", "heads", "dim"]  # as JAX's functions name them
    if [word.lower().strip("_") for word in words[-2:]] == ["np", "hn"]:
        words = [*words[:-2], "heads", "dim"]  # as Megatron's do: heads of a partition
    found = ""
    for number, word in enumerate(words):
        word = word.lower()
        kind = next((axis for axis, pattern in _AXES if pattern.match(word)), "")
        if (
            word == "n"
            and number == 0
            and any(_AXES[-1][1].match(one.lower()) for one in words[1:])
        ):
            kind = "B"
        found += kind or "?"
    unclear = found.count("?") + (len(found) - len(set(found)))
    return "" if unclear or "D" not in found or "L" not in found else found


def layout_said(text: str, name: str) -> str:
    """The axes of an argument: as its shape is taken apart, or as a comment gives it.

    >>> layout_said("b, t, h, d = q.shape", "q"), layout_said("q, k: (batch, heads, seq, dim)", "q")
    ('BLHD', 'BHLD')
    >>> layout_said("(batch, n, heads, d) in and out", "q"), layout_said("N x L x H x D layout", "")
    ('BLHD', 'BLHD')
    """
    one = re.escape(name)
    unpacked = rf"^\s*({_LIST})\s*=\s*{one}\.(?:shape|size\(\))\s*(?:#.*)?$"
    said = (
        rf"(?<![\w.]){one}\b(?:\s*:\s*[\w.]+,?\s*\#)?[\w ,/&`]{{0,30}}?"
        rf"\s*(?::|=|-|\bis\b|\bare\b)?\s*(?:\w+ ){{0,4}}"
        rf"[(\[]\s*({_LIST})\s*[)\]]"
    )
    spaced = rf"(?<![\w.]){one}\b[\w ,]{{0,20}}:\s*((?:[a-z]\s+){{2,3}}[a-z])\s*$"
    of_both = rf"[(\[]\s*({_LIST})\s*[)\]],?\s*(?:in and out|each\b|everywhere|throughout)"
    of_times = r"\b((?:[A-Za-z]\w* x ){2,3}[A-Za-z]\w*) layout"
    for pattern in (unpacked, said, spaced, of_both, of_times):
        for match in re.finditer(pattern, text, re.MULTILINE):
            words = [
                word for word in re.findall(_TOKEN, match[1]) if word != "x" or "," in match[1]
            ]
            if axes := axes_of(words):
                return axes
    return ""


def is_of_keys(text: str, mask: str) -> bool:
    r"""Whether the code gives a mask (B, S) axes of heads and queries, or says that it has none.

    >>> is_of_keys("m = mask[:, None, None, :]", "mask"), is_of_keys("mask: (b, t, s)", "mask")
    (True, False)
    >>> is_of_keys("mask: (windows, M * M, M * M)\nmask[:, None, None]", "mask")
    False
    """
    one = re.escape(mask)
    widened = rf"\b{one}\[:, *None, *None\b|\b{one}\.unsqueeze\(1\)\.unsqueeze\(2\)"
    of_cells = (
        rf"(?<![\w.]){one}\b *:?[^\n]{{0,60}}?[(\[]\s*[\w *]+,\s*(\w[\w *]*?)\s*,\s*\1\s*[)\]]"
    )
    if re.search(of_cells, text):
        return False
    said = rf"(?<![\w.]){one}\b[^\n()\[\]]{{0,40}}[(\[]\s*(b|bs|bsz|n|batch\w*)\s*,\s*\w+\s*[)\]]"
    return re.search(f"{widened}|{said}", text, re.IGNORECASE) is not None

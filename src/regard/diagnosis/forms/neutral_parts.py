"""Learned parts beside attention, set so that they change nothing or what is known.

Keys and values of no token get zeros: each counts as a logit of 0 without a value. Matrices that
mix heads become the identity; one before the softmax its negative, which is undone in the queries,
so that scores which were hidden before do not stay hidden. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.reading.parameter_names import role_of

# Learned keys and values before those of the tokens.
OF_NO_TOKEN = re.compile(
    r"(^|[._])(null|mem(ory)?|persist\w*|extra|global|dummy|learned)_?(k|v|kv|keys?|values?)s?$|"
    r"(^|[._])(k|v|kv|keys?|values?)_?(null|mem(ory)?|persist\w*)s?$",
    re.IGNORECASE,
)
# Names of what mixes heads before and after the softmax.
OF_HEADS = re.compile(
    r"mix|talk|(pre|post)_?(soft|attn|w|l\b)|proj_[lw]\b|re_?att|theta|head_?proj|logits?_(proj|w)|"
    r"weights?_(proj|w)|th_|\bP_[lw]",
    re.IGNORECASE,
)

BEFORE = re.compile(r"pre|before|logit|score|dots|_l\b", re.IGNORECASE)


def neutral_parts(thing: Any) -> Iterator[str]:
    """The names of the learned arrays of an object that are set so that they change nothing."""
    count = _heads(thing)
    for name, value in _arrays(thing):
        if value.size > 1 and (OF_NO_TOKEN.search(name) or _mixes(name, value, count)):
            yield name


def made_neutral(thing: Any) -> None:
    """Set the parts of an object beside attention; those of a torch module in place."""
    count = _heads(thing)
    found = dict(_arrays(thing))
    own = dict(thing.named_parameters()) if hasattr(thing, "named_parameters") else vars(thing)
    for name in [*neutral_parts(thing)]:
        array = found[name]
        if not OF_NO_TOKEN.search(name) and array.ndim > 1:
            sign = -1 if name in _mixed_before(thing, count) else 1
            numbers = sign * np.eye(count).reshape(array.shape)
        else:
            numbers = np.zeros(array.shape)
        if hasattr(own[name], "copy_"):
            import torch

            with torch.no_grad():
                own[name].copy_(torch.from_numpy(numbers))
        else:
            setattr(thing, name, own[name] * 0 + numbers.astype(array.dtype))


def mixes_before(thing: Any) -> bool:
    """Whether an object's scores are multiplied by -1 where heads are mixed."""
    return any(_mixed_before(thing, _heads(thing)))


def _mixed_before(thing: Any, count: int) -> list[str]:
    """The matrix that mixes heads before the softmax: named so, or the first one of two."""
    names = [n for n, one in _arrays(thing) if one.ndim > 1 and _mixes(n, one, count)]
    return [n for n in names if BEFORE.search(n)][:1] or names[:1] * (len(names) == 2)


def logit_of_no_token(thing: Any, columns: int) -> float | None:
    """The logarithm of how many keys of no token an object has, of so many columns; or None."""
    for name, value in _arrays(thing):
        if OF_NO_TOKEN.search(name) and re.search(r"k(v|eys?)?s?$|(^|[._])k", name, re.IGNORECASE):
            both = 2 if re.search("kv", name, re.IGNORECASE) else 1
            return float(np.log(max(1, value.size // (both * columns))))
    return None


def _mixes(name: str, value: Array, count: int) -> bool:
    """Whether an array mixes heads, or is what is added to them then."""
    held = name.rpartition(".")[0] or name
    if count < 2 or not OF_HEADS.search(held):
        return False
    is_matrix = value.size == count**2 and value.shape[:2] == (count, count)
    return is_matrix or (value.shape == (count,) and name.endswith("bias"))


def _heads(thing: Any) -> int:
    """How many heads an object says that it has."""
    own = vars(thing).items() if hasattr(thing, "__dict__") else ()
    return next((v for n, v in own if role_of(n) == "heads" and type(v) is int), 0)


def _arrays(thing: Any) -> Iterator[tuple[str, Array]]:
    """The learned arrays of a torch module, or the arrays that are attributes of an object."""
    if hasattr(thing, "named_parameters"):
        yield from ((n, one.detach().numpy()) for n, one in thing.named_parameters())
        return
    for name, value in getattr(thing, "__dict__", {}).items():
        if str(getattr(value, "dtype", ""))[:5] == "float" and hasattr(value, "reshape"):
            yield name, np.asarray(value)

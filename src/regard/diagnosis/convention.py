"""What the signature of an attention leaves open, what a question to it holds, and its answer.

Owns the layouts and the kinds of masks. Must not know how any of them is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# How a mask argument is written. keep: True = attend. hide: True = do not. add: 0 and −inf, added.
MASK_KINDS = {
    "keep": "True = attend",
    "hide": "True = hide",
    "add": "0 and −inf, to be added",
    "keep01": "1 = attend",
    "hide01": "1 = hide",
}
LAYOUTS = {
    "D": "(D,)",
    "LD": "(L, D)",
    "HLD": "(H, L, D)",
    "LHD": "(L, H, D)",
    "BHLD": "(B, H, L, D)",
    "BLHD": "(B, L, H, D)",
    "LM": "(L, M)",
    "BLM": "(B, L, M)",
    "LBM": "(L, B, M)",
}
# With the rows before the heads, and what they are otherwise.
ROWS_FIRST = {"LHD": "HLD", "BLHD": "BHLD"}
RANKS = {"D": 1, "LD": 2, "HLD": 3, "LHD": 3, "BHLD": 4, "BLHD": 4, "LM": 2, "BLM": 3, "LBM": 3}


@dataclass(frozen=True)
class Convention:
    """One way of calling: everything that the signature leaves open."""

    layout: str = "LD"
    dtype: str = "float64"
    mask: str = "keep"
    mask_shape: str = "full"  # cells (L, S), full (all axes), keys (S,) or (B, S), or (B, 1, 1, S)
    causal_always: bool = False
    aligned: str = "end"  # which query meets which key where there are more keys
    window_extra: int = 0  # subtracted where the window does not count the own key
    scale_divides: bool = False
    turned: bool = False  # weights stored as (out, in)
    output_at: int | None = (
        None  # which of several results is the output; None: the first that fits
    )


@dataclass(frozen=True, eq=False)
class Question:
    """One question to the function: the arguments of its calls, by the names of its parameters."""

    name: str  # of the probe, for messages
    calls: tuple[Mapping[str, Any], ...]  # NumPy arrays, numbers, True, False and None
    cache: str = ""  # the parameter that takes what an earlier call returned beside the output


@dataclass(frozen=True, eq=False)
class Part:
    """One array among the results of a call; `numbers` is None where it is far too large."""

    shape: tuple[int, ...]
    dtype: str
    numbers: Array | None  # float64


@dataclass(frozen=True, eq=False)
class Returned:
    """What came of one call in the process that has the function, or what went wrong, in words."""

    parts: tuple[Part, ...] = ()
    a_list: bool = False
    problem: str = ""
    kind: str = ""  # one of PROBLEMS
    printed: str = ""
    changed: tuple[str, ...] = ()


# Puts a question to the function, in this process or in another: one answer for each call, up to
# the first that has a problem.
Ask = Callable[[Question], "list[Returned]"]
PROBLEMS = ("raised", "hung", "prints", "nothing", "type")


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back: an output with the probe's axes, or what went wrong, in words."""

    output: Array | None = None
    weights: Array | None = None
    problem: str = ""
    kind: str = ""  # one of PROBLEMS, shape, or refused
    returned: str = ""
    position: int = 0  # of the output among what was returned
    dtype: str = ""
    printed: str = ""
    changed: tuple[str, ...] = ()
    seconds: float = 0.0

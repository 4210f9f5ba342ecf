"""What the signature of somebody's attention leaves open, and what one call of it gives.

Owns the layouts and the kinds of masks. Must not know how any of them is found out.
"""

from __future__ import annotations

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
class Answer:
    """What came back: an output with the probe's axes, or what went wrong, in words."""

    output: Array | None = None
    weights: Array | None = None
    problem: str = ""
    kind: str = ""  # raised, hung, shape, nothing, type
    returned: str = ""
    position: int = 0  # of the output among what was returned
    dtype: str = ""
    printed: str = ""
    changed: tuple[str, ...] = ()
    seconds: float = 0.0

"""The options of a call of attention: one record, from the door to the kernel.

Owns which options there are, their order, in `regard.attention` and in native code alike, and what
they are if not given. Must not know what they mean: `compute.request` checks them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from regard.boundary.arrays import Array
    from regard.normalizers import Normalizer
    from regard.positions import Positions
    from regard.rules.visibility import Mask
    from regard.scores import Score

# As signatures show the plain ones; a checked record has None.
DOT: Any = "dot"
SOFTMAX: Any = "softmax"


class Options(NamedTuple):
    """What a call says besides its arrays: as the caller gave it, until a `Request` checks it."""

    mask: Mask | None = None
    bias: Array | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: Any = None
    scale: float | None = None  # None: 1/√D
    softcap: float | None = None
    sink: Array | None = None
    precision: Literal["working", "high", "exact"] = "working"
    return_weights: bool = False
    return_lse: bool = False
    out: Array | None = None
    kernel: str | None = None
    threads: int | None = None
    # The fast path takes those above by position, and of these the last alone.
    score: Score | None = DOT
    normalize: Normalizer | None = SOFTMAX
    positions: Positions | None = None


DEFAULTS = Options._field_defaults
# How many of them the fast path takes.
BY_POSITION = Options._fields.index("score")
# What a call for weights alone has no use for.
NOT_OF_WEIGHTS = ("precision", "return_weights", "return_lse", "out", "normalize")

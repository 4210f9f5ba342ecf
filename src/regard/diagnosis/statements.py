"""What the author of a function states of it, because values cannot tell.

Must not know any function, nor any problem.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from regard.boundary.cached import cached_property
from regard.diagnosis.mechanism import Mechanism, as_mechanism
from regard.errors import OptionError, safe_text

_ALLOWED = {
    "causal": (None, True, False, "start", "end"),
    "mask": (None, "attend", "hide", "add"),
    "window": (None, "inclusive", "exclusive"),
    "library": (None, "numpy", "torch", "jax"),
}


@dataclass(frozen=True)
class Stated:
    """What is stated; None where nothing is.

    `causal` may say which tokens are aligned where there are fewer queries than keys; `mask` and
    `window` are about arguments of the function; a `scale` of "none" is 1.
    """

    causal: bool | Literal["start", "end"] | None = None
    mask: Literal["attend", "hide", "add"] | None = None
    window: Literal["inclusive", "exclusive"] | None = None
    scale: float | Literal["none"] | None = None
    heads: int | None = None
    library: Literal["numpy", "torch", "jax"] | None = None
    score: Any = "dot"
    normalize: Any = "softmax"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not any(value is one or (type(value) is str and value == one) for one in allowed):
                raise OptionError(
                    f"{name} is {_shown(value)}; it must be one of {', '.join(map(repr, allowed))}"
                )
        if self.heads is not None and (type(self.heads) is not int or self.heads < 1):
            raise OptionError(f"heads is {_shown(self.heads)}; it must be an integer of 1 or more")
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if self.scale not in (None, "none") and not (number and isfinite(float(self.scale))):
            raise OptionError(
                f"scale is {_shown(self.scale)}; it must be a number, or 'none' for 1"
            )
        if self.scale is not None and self.mechanism and self.mechanism.score:
            raise OptionError("scale is for dot products; a score has what it is divided by itself")

    @cached_property
    def mechanism(self) -> Mechanism | None:
        """The score and the normalization that are meant; None for the plain ones."""
        return as_mechanism(self.score, self.normalize)

    @property
    def width(self) -> int | None:
        """The width of queries and keys that a stated score has."""
        return None if self.mechanism is None else self.mechanism.width

    @property
    def factor(self) -> float | None:
        """What multiplies the scores, as stated."""
        return 1.0 if self.scale == "none" else self.scale

    def check_adapter(self, reads: Iterable[str]) -> None:
        """Refuse what says nothing beside an adapter that reads these fields."""
        if self.mask:
            raise OptionError(
                f"mask={self.mask!r} is about a mask argument, but the adapter passes the mask; "
                "leave it out, and let the adapter invert t.mask where True hides"
            )
        if self.window:
            raise OptionError(
                f"window={self.window!r} is about a window argument, but the adapter passes the "
                "window; leave it out, and let the adapter add 1 where it counts the query's own"
            )
        for name in {"causal", "scale"} & {*reads}:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise OptionError(
                    f"{name}={value} is stated, but the adapter passes t.{name}, which takes "
                    "several values; leave out one of them"
                )


def _shown(value: Any) -> str:
    return safe_text(repr(value), 40)

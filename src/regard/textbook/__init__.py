"""The steps of attention, declared once. Knows no array's origin, no label and no view.

`Mechanism` declares a score of your own with its operations.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.textbook.mechanism import Mechanism

__all__ = ["Mechanism"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "Mechanism":
            raise AttributeError(f"module 'regard.textbook' has no attribute {name!r}")
        from regard.textbook.mechanism import Mechanism

        return Mechanism

"""Which mistake is in an attention: probe it, and match the answers with a catalogue."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.diagnosis.result import Diagnosis
    from regard.diagnosis.verdict import diagnose

__all__ = ["Diagnosis", "diagnose"]


def __getattr__(name: str) -> Any:
    """Load the catalogue where a verdict is made, and not where the function runs."""
    if name == "Diagnosis":
        from regard.diagnosis.result import Diagnosis

        return Diagnosis
    if name == "diagnose":
        from regard.diagnosis.verdict import diagnose

        return diagnose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

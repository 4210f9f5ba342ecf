"""Which mistake is in somebody's attention: probe it, and match the answers with a catalogue."""

from regard.diagnosis.result import Diagnosis
from regard.diagnosis.verdict import diagnose

__all__ = ["Diagnosis", "diagnose"]

"""Which mistake is in an attention: probe it, and match the answers with a catalogue."""

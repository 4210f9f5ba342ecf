"""Everything that explains: steps with labels, derivations and questions."""

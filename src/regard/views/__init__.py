"""Explanations as something to look at. Views know no kernel and compute no attention."""

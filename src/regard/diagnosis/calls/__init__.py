"""Probes, the arguments made for them, and how a function is called with them."""

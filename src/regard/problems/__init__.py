"""Labelled problems and their files."""

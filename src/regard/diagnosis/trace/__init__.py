"""Where code departs from the textbook: its values are noted with their lines, and compared.

Knows no adapter and no library's layout: a run is a callable that gives the result in the standard
one. Must not read names, comments or docstrings of what it runs.
"""

"""`regard bench`: every installed peer beside regard, checked first and then timed, in one run.

`run` is the whole of it: cases, sides, a check of every answer against float64, times in rotation.
Must not be imported by anything that computes attention.
"""

"""`regard bench`: regard and every installed peer, checked against float64, then timed in rotation.

Must not be imported by anything that computes attention.
"""

"""Regard among its neighbours: one module for each, imported only when asked for by name.

A module here converts conventions at the border (shapes, polarity, alignment) and nothing else:
checks are `request`'s, numbers come from the kernels. Must not hold a formula of attention.
"""

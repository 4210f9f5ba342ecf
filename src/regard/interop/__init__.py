"""The attention calls of other libraries, one module each, imported only by name.

A module converts conventions (shapes, mask polarity, alignment) to `regard.attention`'s. Must not
contain a formula of attention.
"""

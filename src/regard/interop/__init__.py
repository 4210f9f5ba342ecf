"""The attention calls of other libraries, computed by regard, in one module for each library.

`regard.interop.torch`, `.jax`, `.onnx` and `.transformers` are imported by name; each needs its
library. `regard.attention` itself takes the arrays of these libraries without them.
"""

# A module converts conventions (shapes, mask polarity, alignment) to `regard.attention`'s. Must not
# contain a formula of attention.

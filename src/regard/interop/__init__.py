"""The attention calls of other libraries, computed by regard, in one module for each library.

`regard.interop.dask`, `.torch`, `.jax`, `.onnx`, `.transformers` and `.xarray` are loaded
when first used; each needs its library. `regard.attention` itself takes the arrays of these
libraries without them.
"""

# A module converts conventions (shapes, mask polarity, alignment) to `regard.attention`'s. Must not
# contain a formula of attention.

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:  # a checker wants each module imported by name

    def __getattr__(name: str) -> Any:
        if name not in ("dask", "jax", "onnx", "torch", "transformers", "xarray"):
            raise AttributeError(f"module 'regard.interop' has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"regard.interop.{name}")

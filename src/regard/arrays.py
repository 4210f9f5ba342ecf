"""Arrays of other libraries: read where they lie, and results given back as theirs.

Owns what crosses between NumPy and whoever speaks DLPack, and which arrays may meet in one call.
Must not know what arrays are for, and imports no library: whoever hands one over has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import DtypeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Results, an array or a named tuple of arrays, as those of a library.
Home = Callable[[Any], Any]

# DLPack's numbers for memory that the CPU reads: its own, and what CUDA and ROCm share with it.
READABLE_DEVICES = {1, 3, 11, 13}


def home_of(**arrays: Any) -> Home | None:
    """How results go back to the library that these arrays come from; None: they stay NumPy's.

    What is no array of another library (NumPy's arrays, lists, numbers, None) goes with any one.
    """
    owner, owned = None, ""
    for name, array in arrays.items():
        library = _library(array)
        if library is None or library is owner:
            continue
        if owner is not None:
            raise DtypeError(
                f"{owned} is an array of {_name(owner)} but {name} one of {_name(library)}; "
                "NumPy arrays go with either, but these do not go together: bring them to one"
            )
        owner, owned = library, name
    return None if owner is None else partial(_brought_home, owner)


def as_numpy(name: str, value: Any) -> Array:
    """What NumPy makes of a value, the same memory wherever there is one.

    An array of another library that cannot be read is a DtypeError; other errors as they come.
    """
    return np.asarray(lent(name, value))


def lent(name: str, value: Any, *, in_place: bool = False) -> Any:
    """An array of another library as NumPy's, on the same memory; anything else as it is.

    `in_place`: to be written into, so what NumPy could only have a copy of is refused.
    """
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return value
    try:
        return (_of_torch if _is_torch(value) else _of_dlpack)(name, value, in_place)
    except (MemoryError, DtypeError):
        raise
    except Exception as error:
        verb = "write into" if in_place else "read"
        reason = safe_text(str(error).partition("\n")[0], 120)
        traced = type(value).__module__.startswith("jax")
        hint = "; within jit and vmap: regard.interop.jax" if traced else ""
        raise DtypeError(
            f"{name} is a {type(value).__name__} that NumPy cannot {verb}: {reason}{hint}"
        ) from None


def _of_dlpack(name: str, value: Any, in_place: bool) -> Array:
    try:
        device, _ = value.__dlpack_device__()
    except Exception:  # in several pieces, or nowhere yet: NumPy may know how
        device = min(READABLE_DEVICES)
    if device not in READABLE_DEVICES:
        where = safe_text(getattr(value, "device", f"DLPack device {device}"), 60)
        raise _elsewhere(name, value, where)
    try:
        return np.from_dlpack(value)
    except Exception:  # NumPy takes fewer dtypes by DLPack than it has
        if in_place:
            raise
        return np.asarray(value)


def _library(array: Any) -> Any:
    """The module that an array of another library belongs to."""
    if array is None or isinstance(array, np.ndarray):
        return None
    if _is_torch(array):
        return sys.modules["torch"]
    speaks = hasattr(array, "__dlpack__") and hasattr(array, "__array_namespace__")
    return array.__array_namespace__() if speaks else None


def _name(library: Any) -> str:
    return safe_text(getattr(library, "__name__", library), 60)


def _brought_home(library: Any, result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)(*(_brought_home(library, array) for array in result))
    if library is sys.modules.get("torch"):
        return _to_torch(result)
    try:
        return library.from_dlpack(result)
    except (BufferError, TypeError, ValueError):  # bfloat16, which NumPy does not hand over
        return library.asarray(result)


def _elsewhere(name: str, value: Any, where: str) -> DtypeError:
    return DtypeError(
        f"{name} is a {type(value).__name__} on {where}, and regard computes on the CPU; "
        "bring it there first, in PyTorch with .cpu(), in JAX with jax.device_put"
    )


# --- PyTorch: its tensors have no __array_namespace__, and bfloat16 needs its own methods ---------


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, getattr(torch, "Tensor", ()))  # absent, or only just being imported


def _of_torch(name: str, tensor: Any, in_place: bool) -> Array:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise _elsewhere(name, tensor, str(tensor.device))
    if tensor.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            f"{name} requires a gradient, which regard does not compute; pass {name}.detach(), or "
            "call within torch.no_grad()"
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise DtypeError(
            f"{name} carries a tangent, which regard does not follow; pass its primal alone"
        )
    tensor = tensor.detach()
    if not in_place:
        tensor = tensor.resolve_neg()  # a sign that torch has put off; else the tensor itself
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(_bfloat16(name))
    array: Array = tensor.numpy()
    return array


def _bfloat16(name: str) -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise DtypeError(
            f"{name} is bfloat16, which NumPy knows only with ml_dtypes; run: "
            'pip install "regard[bfloat16]"'
        ) from None
    return bfloat16


def _to_torch(array: Array) -> Any:
    torch = sys.modules["torch"]
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)

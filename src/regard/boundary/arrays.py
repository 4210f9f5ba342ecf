"""Arrays of other libraries: read without a copy, and results returned as arrays of that library.

Owns the exchange with libraries that support DLPack, and which arrays may meet in one call. Must
not know what arrays are for. Imports no library: a caller who passes a tensor has imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from regard.errors import DtypeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    Array = np.ndarray

T = TypeVar("T")


class GiveBack(Protocol):
    """Converts a result, an array or a named tuple of arrays, to arrays of the caller's library."""

    def __call__(self, result: T, /) -> T:
        """The result, or what replaces it."""


# DLPack's numbers for memory that the CPU reads: its own, and what CUDA and ROCm share with it.
READABLE_DEVICES = {1, 3, 11, 13}


def lend(**arrays: Any) -> tuple[list[Any], GiveBack]:
    """The arrays of a call for NumPy, and the function that converts its result back.

    An array of another library comes as a NumPy array on the same memory, anything else unchanged.
    The one named `out` is to be written into; it replaces the output in the result.
    """
    given = _plain_tensors(arrays) if "torch" in sys.modules else None
    home = home_of(arrays) if given is None else _home_in_torch
    if home is None:
        return [*arrays.values()], unchanged
    if given is None:
        given = [lent(name, array, in_place=name == "out") for name, array in arrays.items()]
    out = arrays.get("out")
    return given, home if out is None else partial(_returned, home, out)


def unchanged(result: T, /) -> T:
    """The result itself: nothing had to be lent."""
    return result


def _returned(home: Callable[[Any], Any], out: Any, result: Any, /) -> Any:
    return home(result)._replace(output=out) if isinstance(result, tuple) else out


def home_of(arrays: Mapping[str, Any]) -> GiveBack | None:
    """The function that converts a result for the library of these arrays; None for NumPy.

    Arrays of one other library may be mixed with NumPy arrays, lists, numbers and None.
    """
    owner, owned = None, ""
    for name, array in arrays.items():
        if array is None or isinstance(array, np.ndarray):
            continue
        library = _library(array)
        if library is None or library is owner:
            continue
        if owner is not None:
            raise DtypeError(
                f"{owned} is an array of {_name(owner)} but {name} one of {_name(library)}; "
                "NumPy arrays go with either, but these do not go together: bring them to one"
            )
        owner, owned = library, name
    if owner is None:
        return None
    torch = owner is sys.modules.get("torch")
    return _home_in_torch if torch else partial(_brought_home, partial(_to, owner))


def as_numpy(name: str, value: Any) -> Array:
    """A value as a NumPy array, without a copy where possible.

    An array of another library that cannot be read is a DtypeError; other errors are NumPy's.
    """
    return np.asarray(lent(name, value))


def lent(name: str, value: Any, *, in_place: bool = False) -> Any:
    """An array of another library as a NumPy array on the same memory; anything else unchanged.

    With `in_place` it is to be written into: an array that NumPy can only copy is refused.
    """
    if isinstance(value, np.ndarray) or type(value).__module__ == "builtins":
        return value
    tensor = _is_torch(value)
    if not tensor:
        _check_that_it_is_here(name, value)
        if not hasattr(type(value), "__dlpack__"):
            return value
    try:
        return (_of_torch if tensor else _of_dlpack)(name, value, in_place)
    except (MemoryError, DtypeError):
        raise
    except Exception as error:
        verb = "write into" if in_place else "read"
        reason = safe_text(str(error).partition("\n")[0], 120)
        raise DtypeError(
            f"{name} is a {type(value).__name__} that NumPy cannot {verb}: {reason}"
        ) from None


def untraced(function: Callable[..., T]) -> Callable[..., T]:
    """The function, wrapped so that torch.compile calls it without tracing it."""
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _hidden:
        _hidden[function] = sys.modules["torch"].compiler.disable(function)
    hidden: Callable[..., T] = _hidden[function]
    return hidden


_hidden: dict[Callable[..., Any], Callable[..., Any]] = {}


# --- arrays whose numbers are not in this memory, or not yet --------------------------------------

# Arrays that NumPy would load, compute or copy as a whole, or could not read: the package of the
# class, where the numbers are, and what to pass instead.
ELSEWHERE = {
    "dask": ("not computed yet", "{}.compute()"),
    "zarr": ("in a store", "{}[...]"),
    "h5py": ("in a file", "{}[...]"),
    "sparse": ("kept without the zeros", "{}.todense()"),
    "cupy": ("in the memory of a GPU", "{}.get()"),
    "torch.fx": ("not known while it records", "it to a function that torch.fx.wrap keeps whole"),
}


def _check_that_it_is_here(name: str, value: Any) -> None:
    """Refuse lazy, remote and traced arrays, and say how to get their numbers."""
    jax = sys.modules.get("jax")
    if isinstance(value, getattr(getattr(jax, "core", None), "Tracer", ())):
        raise DtypeError(
            f"{name} is traced by JAX and has no numbers yet: within jax.jit, jax.vmap and "
            "jax.grad call regard.interop.jax.dot_product_attention, whose rows come before heads"
        )
    for package, (where, instead) in ELSEWHERE.items():
        if belongs_to(package, value):
            raise DtypeError(
                f"{name} is a {package} {type(value).__name__}, whose numbers are {where}; "
                f"pass {instead.format(name)}"
            )
    variable = getattr(value, "variable", value) if belongs_to("xarray", value) else None
    if not getattr(variable, "_in_memory", True):
        inner = getattr(variable, "_data", None)
        _check_that_it_is_here(f"{name}.data", inner)
        if belongs_to("xarray", inner):
            raise DtypeError(
                f"{name} is an xarray {type(value).__name__}, whose numbers are not loaded yet; "
                f"pass {name}.load()"
            )


def belongs_to(package: str, value: Any) -> bool:
    """Whether the class of a value, or one that it inherits from, is of that package."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(value).__mro__)


def _of_dlpack(name: str, value: Any, in_place: bool) -> Array:
    try:
        device, _ = value.__dlpack_device__()
    except Exception:  # in several pieces, or nowhere yet: NumPy may know how
        device = min(READABLE_DEVICES)
    if device not in READABLE_DEVICES:
        where = safe_text(getattr(value, "device", f"DLPack device {device}"), 60)
        raise DtypeError(_elsewhere(name, value, where))
    try:
        return np.from_dlpack(value)
    except Exception:  # NumPy takes fewer dtypes by DLPack than it has
        if in_place:
            raise
        return np.asarray(value)


def _library(array: Any) -> Any:
    """The module that an array of another library belongs to."""
    if _is_torch(array):
        return sys.modules["torch"]
    kind = type(array)  # not the array: some answer to every name
    speaks = hasattr(kind, "__dlpack__") and hasattr(kind, "__array_namespace__")
    return array.__array_namespace__() if speaks else None


def _name(library: Any) -> str:
    return safe_text(getattr(library, "__name__", library), 60)


def _brought_home(convert: Callable[[Array], Any], result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)(*(_brought_home(convert, array) for array in result))
    if isinstance(result, dict):
        return {name: _brought_home(convert, array) for name, array in result.items()}
    return result if result is None or isinstance(result, float) else convert(result)


def _to(library: Any, result: Array) -> Any:
    try:
        return library.from_dlpack(result)
    except (BufferError, TypeError, ValueError):  # bfloat16, which NumPy does not hand over
        return library.asarray(result)


def _elsewhere(name: str, value: Any, where: str) -> str:
    return (
        f"{name} is a {type(value).__name__} on {where}, and regard computes on the CPU; "
        "bring it there first, in PyTorch with .cpu(), in JAX with jax.device_put"
    )


# --- PyTorch: its tensors have no __array_namespace__, and bfloat16 needs its own methods ---------


DIFFERENTIABLE = "regard.interop.torch.scaled_dot_product_attention"


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, getattr(torch, "Tensor", ()))  # absent, or only just being imported


def _plain_tensors(arrays: Mapping[str, Any]) -> list[Any] | None:
    """Tensors of a call as arrays on the same memory, if `_of_torch` has nothing to object to any.

    None where it has to look closer, and where there is no tensor.
    """
    torch = sys.modules["torch"]
    try:
        tensor_kind, functional = torch.Tensor, torch._is_functional_tensor
        if tensor_kind not in map(type, arrays.values()):
            return None
        if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_usual_keys():
            return None
        if torch.autograd.forward_ad._current_level >= 0:
            return None
        made = []
        for name, array in arrays.items():
            if type(array) is tensor_kind:
                if array.requires_grad or functional(array):
                    return None
                # either way refuses other devices and layouts, wrappers, and a sign put off
                half = array.dtype is torch.bfloat16
                array = _of_bfloat16(name, array) if half else array.numpy()
            elif array is not None and type(array) is not np.ndarray:
                return None
            made.append(array)
        return made
    except (AttributeError, RuntimeError, TypeError):  # AttributeError: another version of torch
        return None


@cache
def _usual_keys() -> int:
    """What any operation goes through in a thread where no trace, mode or transform is open.

    As bits, one for each; see PyTorch's `DispatchKeySet`.
    """
    torch = sys.modules["torch"]
    key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
    return int((keys(key.BackendSelect) | keys(key.ADInplaceOrView)).raw_repr())


def _of_torch(name: str, tensor: Any, in_place: bool) -> Array:
    torch = sys.modules["torch"]
    # make_fx passes real tensors while it records
    recorder = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if torch.jit.is_tracing() or (recorder is not None and recorder.get_proxy_mode() is not None):
        raise DtypeError(
            f"{name} is being traced, which would keep the result as a constant; trace "
            "what comes before and after it, or use torch.compile, which calls regard each time"
        )
    if torch._is_functional_tensor(tensor):  # NumPy could read it, but perhaps what it was before
        raise DtypeError(_followed(torch, name, tensor))
    if tensor.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            _followed(torch, name, tensor)
            or f"{name} requires a gradient, which is lost in NumPy; call {DIFFERENTIABLE}, or "
            f"pass {name}.detach(), or call within torch.no_grad()"
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise DtypeError(
            f"{name} carries a tangent, which regard does not follow; pass its primal alone"
        )
    try:
        return _numbers_of(name, tensor, in_place)
    except DtypeError:
        raise
    except (RuntimeError, TypeError) as error:
        reason = _followed(torch, name, tensor) or _unreadable(torch, name, tensor.detach())
        raise (error if reason is None else DtypeError(reason)) from None


def _numbers_of(name: str, tensor: Any, in_place: bool) -> Array:
    tensor = tensor.detach()
    if not in_place:
        tensor = tensor.resolve_neg()  # a sign that torch has put off; else the tensor itself
    if tensor.dtype == sys.modules["torch"].bfloat16:
        return _of_bfloat16(name, tensor)
    array: Array = tensor.numpy()
    return array


def _of_bfloat16(name: str, tensor: Any) -> Array:
    bits: Array = tensor.view(sys.modules["torch"].int16).numpy()
    return bits.view(bfloat16(name))


def _followed(torch: Any, name: str, tensor: Any) -> str | None:
    """Why a tensor inside a transform of torch.func cannot be read."""
    transforms = torch._C._functorch
    if transforms.is_batchedtensor(tensor):
        return (
            f"{name} is mapped by torch.vmap; call {DIFFERENTIABLE}, or pass the whole tensors "
            "without it, because regard broadcasts leading axes by itself"
        )
    if torch._is_functional_tensor(tensor):
        return f"{name} is followed by torch.func.functionalize; call regard outside of it"
    if transforms.is_functorch_wrapped_tensor(tensor):
        return (
            f"{name} is followed by torch.func (grad, vjp, jvp); call {DIFFERENTIABLE}, which grad "
            "and vjp go through"
        )
    return None


def _unreadable(torch: Any, name: str, tensor: Any) -> str | None:
    """Why NumPy cannot read a tensor, and what to pass instead."""
    kind = type(tensor)
    if kind.__name__ == "FakeTensor" or tensor.is_meta:
        what = "FakeTensor" if kind.__name__ == "FakeTensor" else f"{kind.__name__} on meta"
        return (
            f"{name} is a {what}, which has a shape and no numbers; call regard on real tensors, "
            "outside of torch.export and FakeTensorMode"
        )
    if tensor.is_nested:
        return f"{name} is a nested tensor; pass its parts, {name}.unbind(), singly"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"{name} is a {kind.__name__}, a class that keeps its numbers in its own way; pass "
            "a plain tensor"
        )
    if tensor.device.type != "cpu":
        return _elsewhere(name, tensor, str(tensor.device))
    if tensor.layout != torch.strided:
        return f"{name} has the layout {tensor.layout}; pass {name}.to_dense()"
    if tensor.is_quantized:
        return f"{name} is quantised, {tensor.dtype}; pass {name}.dequantize()"
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return f"{name} has dtype {tensor.dtype}, which NumPy does not know; pass {name}.float()"
    return None


def bfloat16(name: str) -> Any:
    """NumPy's bfloat16, for an array or an argument of this name."""
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
    if array.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_home_in_torch: GiveBack = partial(_brought_home, _to_torch)

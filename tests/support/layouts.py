"""The same numbers in every memory layout that NumPy can describe.

Owns `layouts`, which tests run each array argument through. Must not know the library under test.
Whatever lies between the numbers is poison, so that reading past a stride is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

STRIDE_OF_NOTHING = 10**9  # for axes of length 1, whose stride no correct code ever uses


def layouts(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs (name, array): each array equals `x`, and each lies in memory in another way."""
    x = np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x)
    yield "contiguous", x.copy()
    yield "read-only", read_only(x.copy())
    yield "unaligned", unaligned(x)
    yield "field of a packed struct", packed_field(x)
    if x.dtype.kind in "iuf" and x.dtype.itemsize > 1:
        yield "the other byte order", x.astype(x.dtype.newbyteorder("S"))
    if x.ndim == 0:
        return
    yield "Fortran", np.asfortranarray(x)
    backwards = (slice(None, None, -1),) * x.ndim
    yield "negative strides", np.ascontiguousarray(x[backwards])[backwards]
    yield "every second number", spread(x, 2)
    yield "a window in a larger array", framed(x)
    if x.ndim >= 2:
        yield "last axes transposed", np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if x.ndim >= 3:
        yield "heads after rows", np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
        inwards = np.ascontiguousarray(np.moveaxis(x, 0, -1))
        yield "first axis innermost", np.moveaxis(inwards, -1, 0)
    if 1 in x.shape:
        yield "absurd strides where they do not matter", absurd(x)
    for axis in range(x.ndim):
        first = x[(slice(None),) * axis + (slice(0, 1),)]
        same = np.broadcast_to(first, x.shape)
        if x.shape[axis] > 1 and same.tobytes() == x.tobytes():
            yield f"zero stride in axis {axis}", same


def alike(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """`x` made constant along some axes, so that `layouts` can give these a stride of zero."""
    index = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))
    return np.broadcast_to(x[index], x.shape).copy()


def read_only(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1 : 1 + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def packed_field(x: np.ndarray) -> np.ndarray:
    """Numbers whose distance is no multiple of their size."""
    memory = np.full(x.size * (x.dtype.itemsize + 1), 0xFF, np.uint8)
    struct = np.dtype({"names": ["x"], "formats": [x.dtype], "offsets": [1]}, align=False)
    field = memory.view(struct)["x"].reshape(x.shape)
    field[...] = x
    return field


def spread(x: np.ndarray, step: int) -> np.ndarray:
    memory = poison(tuple(n * step for n in x.shape), x.dtype)
    view = memory[(slice(None, None, step),) * x.ndim]
    view[...] = x
    return view


def framed(x: np.ndarray) -> np.ndarray:
    memory = poison(tuple(n + 3 for n in x.shape), x.dtype)
    view = memory[tuple(slice(1, 1 + n) for n in x.shape)]
    view[...] = x
    return view


def absurd(x: np.ndarray) -> np.ndarray:
    strides = [
        stride if n > 1 else STRIDE_OF_NOTHING
        for n, stride in zip(x.shape, x.copy().strides, strict=True)
    ]
    return np.lib.stride_tricks.as_strided(x.copy(), x.shape, strides)


def poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose every byte is 0xFF: NaN, True or -1."""
    memory = np.full((int(np.prod(shape)) * dtype.itemsize,), 0xFF, np.uint8)
    if dtype == np.bool_:
        memory[:] = 1
    return memory.view(dtype).reshape(shape)

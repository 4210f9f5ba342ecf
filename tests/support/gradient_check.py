"""One call of `regard.gradients` compared with the independent chain rule, number by number."""

from __future__ import annotations

from typing import Any

import numpy as np

import regard
from backward_oracle import differentiate
from bounds import precision_of
from calls import on_path

ALL = ("query", "key", "value", "scale")
NOT_THE_ORACLES = ("output", "lse", "threads", "precision")


def check_gradients(
    arrays: tuple[np.ndarray, ...],
    path: str,
    wrt: tuple[str, ...] = ALL,
    oracle: dict[str, Any] | None = None,
    **options: Any,
) -> regard.Gradients[np.ndarray]:
    """One call, every number within its bound; `oracle` are its options where they differ."""
    dtype = arrays[0].dtype
    exact = options.get("precision") == "exact"
    unit = precision_of(np.float64 if exact or dtype == np.float64 else np.float32).unit
    with on_path(path) as kernel:
        result = regard.gradients(*arrays, wrt=wrt, kernel=kernel, **options)
    named = {**options, **(oracle or {})}
    named = {name: x for name, x in named.items() if name not in NOT_THE_ORACLES}
    exact, error = differentiate(*arrays, unit, **named)
    for name in wrt:
        compare(name, getattr(result, name), getattr(exact, name), getattr(error, name), options)
    return result


def compare(
    name: str, got: Any, exact: np.ndarray, error: np.ndarray, options: dict[str, Any]
) -> None:
    given = options.get(name)
    if name in ("bias", "sink") and exact.shape != np.shape(given):
        shape = (1,) * (exact.ndim - np.ndim(given)) + np.shape(given)
        axes = tuple(n for n, size in enumerate(shape) if size < exact.shape[n])
        exact, error = (x.sum(axis=axes).reshape(np.shape(given)) for x in (exact, error))
    got = np.asarray(got)
    if name != "scale":
        rounding = precision_of(got.dtype)
        error = error + rounding.unit * np.abs(exact) + 4 * rounding.floor
    off = np.abs(got.astype(np.longdouble) - exact)
    assert got.shape == exact.shape
    assert (off <= error + 1e-300).all(), f"{name}: {float((off / (error + 1e-300)).max())} bounds"

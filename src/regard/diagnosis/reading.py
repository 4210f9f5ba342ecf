"""Which of the things that came back from a call is the output, and which the weights.

Must not know how the call was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import RANKS, ROWS_FIRST, Answer, Convention
from regard.diagnosis.probes import Probe
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def read_result(result: Any, way: Convention, probe: Probe, call: Answer) -> Answer:
    """The answer of a call that came back with `result`."""
    if result is None:
        return replace(call, problem="it returned nothing (None)", kind="nothing")
    parts = list(_parts(result))
    if not parts:
        what = safe_text(type(result).__name__, 40)
        if hasattr(result, "dtype"):
            said = f"it returned an array of {safe_text(result.dtype, 40)}, not of real numbers"
        else:
            said = f"it returned {what}, which holds no array"
        return replace(call, problem=said, kind="type")
    fitting = [_as_output(part, way, probe) for part, _ in parts]
    places = [n for n, fit in enumerate(fitting) if fit is not None]
    if not places:
        shapes = " and ".join(str(part.shape) for part, _ in parts[:3])
        expected = _laid_out_shape(way, probe)
        said = f"it returned shape {shapes}; the output should be {expected}"
        return replace(call, problem=said, kind="shape")
    place = way.output_at if way.output_at in places else places[0]
    weights = None
    order = ["output" if n == place else "more" for n in range(len(parts))]
    for n, (part, _) in enumerate(parts):
        if n != place and weights is None and (own := _as_weights(part, probe)) is not None:
            weights, order[n] = own, "weights"
    a_list = "a list: " if isinstance(result, list) else ""
    return replace(
        call,
        output=fitting[place],
        weights=weights,
        returned=a_list + ", ".join(order),
        position=place,
        dtype=parts[place][1],
    )


def _parts(result: Any) -> Iterator[tuple[Array, str]]:
    """Every array of numbers in a result, and the name of its dtype."""
    if is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list) and result and isinstance(result[0], list | float | int):
        with contextlib.suppress(ValueError, TypeError):
            yield np.asarray(result, float), "float64"
        return
    several = result if isinstance(result, tuple | list) else [result]
    for one in several:
        if hasattr(one, "shape") or isinstance(one, list):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):
                array = as_numpy(one)
                name = str(getattr(one, "dtype", array.dtype)).removeprefix("torch.")
                if name == "bfloat16":
                    array = array.astype(np.float32)
                if array.dtype.kind in "fiu":
                    yield array, name


def _laid_out_shape(way: Convention, probe: Probe) -> tuple[int, ...]:
    size = probe.sizes
    if "queries" not in probe.inputs:
        last = probe.result(probe.right).shape[-1]
        whole = (size["B"], size["L"], last)
        if way.layout == "LBM":
            return (size["L"], size["B"], last)
        return whole[1:] if RANKS[way.layout] == 2 else whole
    whole4 = (size["B"], size["H"], size["L"], size["E"])
    return {
        "D": whole4[3:],
        "LD": whole4[2:],
        "HLD": whole4[1:],
        "LHD": (size["L"], size["H"], size["E"]),
        "BHLD": whole4,
        "BLHD": (size["B"], size["L"], size["H"], size["E"]),
    }[way.layout]


def _as_output(part: Array, way: Convention, probe: Probe) -> Array | None:
    """With the probe's axes, or None where the shape is another one."""
    wanted, size = _laid_out_shape(way, probe), probe.sizes
    whole = probe.result(probe.right).shape
    if part.shape == wanted:
        if way.layout in ROWS_FIRST and len(whole) == 4:
            return part.swapaxes(-2, -3).reshape(whole)
        if way.layout == "LBM":
            return part.swapaxes(0, 1)
        return part.reshape(whole)
    if "queries" not in probe.inputs or len(wanted) != 4:
        return None
    # Heads go in by themselves and come out side by side, or rows before heads.
    if part.shape == (size["B"], size["L"], size["H"] * size["E"]):
        return part.reshape(size["B"], size["L"], size["H"], size["E"]).swapaxes(1, 2)
    if way.layout == "BHLD" and part.shape == (size["B"], size["L"], size["H"], size["E"]):
        return part.swapaxes(1, 2)
    return None


def _as_weights(part: Array, probe: Probe) -> Array | None:
    size = probe.sizes
    whole = (size["B"], size["H"], size["L"], size["S"])
    fits = part.shape[-1:] == (size["S"],) and part.size == int(np.prod(whole))
    return part.reshape(whole) if fits else None


def as_numpy(value: Any) -> Array:
    """An array of any framework as NumPy's."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)

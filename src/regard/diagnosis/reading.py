"""Which of the things that came back from a call is the output, and which the weights.

Must not know how the call was made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import RANKS, ROWS_FIRST, Answer, Convention, Part, Returned
from regard.diagnosis.probe import Probe
from regard.errors import safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def read_result(returned: Returned, way: Convention, probe: Probe, seconds: float) -> Answer:
    """The answer of a call that returned arrays."""
    answer = Answer(printed=returned.printed, changed=returned.changed, seconds=seconds)
    if returned.problem:
        return replace(answer, problem=returned.problem, kind=returned.kind)
    parts = returned.parts
    fitting = [_as_output(part, way, probe) for part in parts]
    places = [n for n, fit in enumerate(fitting) if fit is not None]
    if not places:
        shapes = " and ".join(safe_text(part.shape, 100) for part in parts[:3])
        expected = _laid_out_shape(way, probe)
        said = f"it returned shape {shapes}; the output should be {expected}"
        return replace(answer, problem=said, kind="shape")
    place = way.output_at if way.output_at in places else places[0]
    weights = None
    order = ["output" if n == place else "more" for n in range(len(parts))]
    for n, part in enumerate(parts):
        if n != place and weights is None and (own := _as_weights(part, probe)) is not None:
            weights, order[n] = own, "weights"
    a_list = "a list: " if returned.a_list else ""
    return replace(
        answer,
        output=fitting[place],
        weights=weights,
        returned=a_list + ", ".join(order),
        position=place,
        dtype=parts[place].dtype,
    )


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


def _as_output(found: Part, way: Convention, probe: Probe) -> Array | None:
    """With the probe's axes, or None where the shape is another one."""
    if (part := found.numbers) is None:
        return None
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


def _as_weights(found: Part, probe: Probe) -> Array | None:
    if (part := found.numbers) is None:
        return None
    size = probe.sizes
    whole = (size["B"], size["H"], size["L"], size["S"])
    fits = part.shape[-1:] == (size["S"],) and part.size == int(np.prod(whole))
    return part.reshape(whole) if fits else None

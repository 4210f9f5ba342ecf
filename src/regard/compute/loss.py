"""What a loss of a result is made of, and whether it fits the result.

Must not know how the result, the loss or its gradients are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from regard.boundary.arrays import Array
from regard.errors import DtypeError, OptionError, ShapeError

# The target of the result, or the loss's gradient there.
LOSS = ("target", "grad_output")


def check_loss(given: Mapping[str, Array], shape: tuple[int, ...]) -> None:
    """A target for a result of this shape, or the gradient of a loss with respect to it."""
    if len(given) > 1:
        raise OptionError(
            "target and grad_output are both given; a target says what the loss is, grad_output "
            "what its gradient is: keep one of them (target=None takes away what a problem states)"
        )
    for name, array in given.items():
        if array.dtype == np.bool_:
            raise DtypeError(
                f"{name} has booleans, as a mask has; it must be numbers, one for each number of "
                "the output"
            )
        if array.shape != shape:
            raise ShapeError(
                f"{name} has shape {array.shape} but the output has {shape}; they must match"
            )
    if "target" not in given:
        return
    target = given["target"].astype(np.float64)
    if not np.isfinite(target).all():
        at = tuple(int(one[0]) for one in np.nonzero(~np.isfinite(target)))
        raise OptionError(
            f"target is {target[at]} at {at}; every number must be finite. To leave a number of "
            "the output alone, pass grad_output with a 0 there"
        )
    with np.errstate(over="ignore"):
        if not np.isfinite(np.square(target).sum()):
            raise OptionError(
                f"the loss overflows: target has numbers as large as {np.abs(target).max():.3g}, "
                "whose squares are beyond the largest 64-bit float, 1.8e308; scale target and "
                "value down, or pass grad_output"
            )

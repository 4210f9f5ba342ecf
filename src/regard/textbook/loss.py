"""The loss of one call, and the steps from it back to every given number.

The loss is half the squared distance of the result to a target, so that its gradient is the
difference. Without a target the gradient of the result is given, and there is no loss. Must not
know arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regard.textbook.gradients import backward
from regard.textbook.positions import SETTINGS
from regard.textbook.steps import LETTERS, Step, result_of

# Settings that are given but have no gradient.
_SETTINGS = {"width", "softcap", "key_numbers", *SETTINGS}
# What never has one, and why.
WITHOUT_GRADIENT = {
    **dict.fromkeys(
        ("visible", "mask", "causal", "window", "lengths", "segments"),
        "a key is visible or not, with nothing in between; a bias has a gradient",
    ),
    **dict.fromkeys(
        ("labels", "tokens", "query_labels", "key_labels", "title"),
        "names are no numbers; the vectors that they name have gradients",
    ),
    **dict.fromkeys(("offset", *sorted(_SETTINGS)), "it is a setting, not an input"),
    **dict.fromkeys(
        ("log_sums", "lse"), "the output is made of the weights, so the loss does not depend on it"
    ),
}


def continued(
    steps: Sequence[Step], *, target: bool = True, grouped: bool = True
) -> tuple[Step, ...]:
    """The loss and the backward steps of a call, after its own steps, in order.

    Parameters
    ----------
    steps : sequence of Step
        The steps of the call.
    target : bool
        Whether a target is given. Else the gradient of the result is, under its name, such as
        `d_output`.
    grouped : bool
        Whether several query heads share a key head.

    Examples
    --------
    >>> from regard.textbook.steps import textbook
    >>> forward = textbook({"queries", "keys", "values"}, heads=False)
    >>> for step in continued(forward)[:5]:
    ...     print(step.formula)
    target is given
    ℓ = ½·(O − target)²
    ℓ_i = Σ_e ℓ
    L = Σ_i ℓ_i
    dO = O − target
    """
    own = {step.name: step for step in steps}
    last = own[result_of(own)]
    wanted = {step.name for step in steps if step.op == "given"} - _SETTINGS
    back = backward(steps, wanted, (last.name,), grouped=grouped)
    if not target:
        return back
    loss = _loss(last)
    pair = (last.own, loss[0].own)
    difference = [
        replace(step, op="subtract", operands=pair) if step.name == f"d_{last.name}" else step
        for step in back
    ]
    return *loss, *difference


def _loss(last: Step) -> list[Step]:
    """Half the square of each difference to the target, added up axis by axis."""
    target = Step("target", "target", r"\mathrm{target}", last.axes, "given", phase="loss")
    pair = (last.own, target.own)
    steps = [
        target,
        Step("cell_losses", "ℓ", r"\ell", last.axes, "half_square", pair, phase="loss"),
    ]
    axes = last.axes
    while axes:
        axes = axes[:-1]
        name, symbols = "loss", ("L", "L")
        if axes:
            name = {"L": "row_losses", "H": "head_losses"}[axes[-1]]
            letters = [LETTERS[axis] for axis in axes]
            symbols = f"ℓ_{''.join(letters)}", rf"\ell_{{{' '.join(letters)}}}"
        steps.append(Step(name, *symbols, axes, "sum", (steps[-1].own,), phase="loss"))
    return steps

"""The catalogue as something to read: every mistake with the first example that shows it.

`regard mistakes` and the site show the same. Must not know any function of a user's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from regard.diagnosis.judging.built_in import PLAIN, BuiltIn
from regard.diagnosis.judging.examples import smallest_example, usual_check, without_example
from regard.diagnosis.mistakes import GRADIENTS, OF_INPUT, all_mistakes, linear
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.result import Outcome
from regard.errors import OptionError, safe_text

SEVERITIES = {
    "wrong": "ordinary inputs give wrong numbers",
    "fragile": "ordinary inputs give right numbers, and some inputs do not",
    "note": "a choice that others make differently, or a habit worth knowing",
}
# What a function computes besides, where a mistake is about that.
BESIDES: Mapping[str, tuple[BuiltIn, ...]] = {
    "frequencies": (BuiltIn("rotary, halves"), BuiltIn("rotary, pairs")),
    "positions_slopes": (BuiltIn("ALiBi"),),
    "softcap": (BuiltIn(softcap=5.0), BuiltIn(softcap=2.0)),
}


def families() -> dict[str, list[Mistake]]:
    """Every mistake that a diagnosis can name, by its family."""
    found: dict[str, list[Mistake]] = {}
    for mistake in all_mistakes().values():
        found.setdefault(mistake.family, []).append(mistake)
    return found


def described(name: str) -> Outcome:
    """What a diagnosis says of a function that has just this mistake.

    Raises
    ------
    OptionError
        If no mistake has this name.

    Examples
    --------
    >>> described("scale_by_width").mistakes[0].step
    'scaled'
    """
    known = all_mistakes()
    if name not in known:
        near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"{safe_text(name, 100)}: there is no mistake of this name; {hint}"
            "regard mistakes lists all"
        )
    mistake = known[name]
    own = next((key for key, mistakes in OF_INPUT.items() if mistake in mistakes), "")
    plain = BuiltIn(linear="elu(x) + 1") if mistake in linear.MISTAKES else PLAIN
    made = product(BESIDES.get(own, (plain,)), ("ready", "projected"), (False, True))
    backward = mistake in GRADIENTS
    named = without_example(mistake)
    with np.errstate(all="ignore"):  # some mistakes divide by zero; that is shown
        for (besides, kind, always), variant in product(made, mistake.variants):
            example, step = smallest_example(variant, kind, always, besides, gradients=backward)
            if example is not None:
                check = usual_check(variant, causal=always, besides=besides, gradients=backward)
                named = replace(named, example=example, step=step, usual_check=check)
                break
    title = mistake.title[:1].upper() + mistake.title[1:]
    return Outcome("", "mistaken", title, "", mistakes=(named,))

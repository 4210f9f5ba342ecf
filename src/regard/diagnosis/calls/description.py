"""How a function was called, and what was taken for granted for that, in words.

Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.diagnosis.calls.arguments import mask_role
from regard.diagnosis.calls.convention import MASK_KINDS, Answer, Convention, spell
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.normalizers import Normalizer
from regard.scores import Score


def _parts(tested: FunctionUnderTest) -> list[Score | Normalizer]:
    """The score and the normalization that it is compared with, where they are not plain."""
    own = tested.stated.mechanism
    return [] if own is None else [x for x in (own.score, own.normalize) if x is not None]


def describe_call(
    tested: FunctionUnderTest, conventions: Sequence[Convention], answer: Answer | None
) -> str:
    """How the function was called, in words."""
    callee, one = tested.callee, conventions[0]
    names = [p.name for p in callee.parameters if p.role not in (None, "yes")]
    library = {"numpy": "NumPy", "torch": "torch", "jax": "JAX"}[callee.framework]
    shapes = ", ".join(spell(own.layout) for own in conventions)
    role, roles, heads = mask_role(callee), callee.roles, callee.heads or 1
    weights = f"weights {', '.join(sorted(callee.weights))} read from it, {heads} head"
    at_start = one.aligned == "start" and (one.causal_always or "causal" in roles)
    counts = "does not count" if one.window_extra else "counts"
    parts = [
        (True, f"{callee.name}({', '.join(names)}) with {library} {one.dtype} arrays {shapes}"),
        *((True, f"{part.option}={part}") for part in _parts(tested)),
        (role is not None, f"{role and roles[role].name}: {MASK_KINDS[one.mask]}"),
        (one.causal_always and not one.mask_instead, "always causal"),
        (one.mask_instead, "causal if there is no mask"),
        (at_start, "causal aligns the first query with the first key"),
        ("window" in roles, f"the window {counts} the query's own key"),
        (one.scale_divides, "scores are divided by the scale"),
        (one.transposed, "weights stored as (out, in)"),
        (bool(callee.weights), weights + "s" * (heads > 1)),
        (bool(answer and answer.returned), f"returns {answer and answer.returned}"),
    ]
    return "; ".join(text for holds, text in parts if holds)


def assumptions(tested: FunctionUnderTest, convention: Convention) -> list[str]:
    """What was taken for granted to find a function right, where it is not the usual convention.

    Usual are True for a key that is seen, but for padding in a mask of padding; the last query
    at the last key; and a window that counts the query's own key. Nothing that is stated, or
    written in the code, is listed.
    """
    callee, stated = tested.callee, tested.stated
    role, roles = mask_role(callee), callee.roles
    found = []
    if role in ("mask", "key_mask") and stated.mask is None and not callee.mask_means:
        name = roles[role].name
        usual = "hide" if "pad" in name.lower() else "keep"
        if convention.mask.startswith(("keep", "hide")) and not convention.mask.startswith(usual):
            true, _, meaning = MASK_KINDS[convention.mask].partition(" = ")
            found.append(f"{true} in {name} means {meaning}")
    causal = convention.causal_always or "causal" in roles
    told = stated.causal in ("start", "end") or callee.causal_aligns
    if convention.aligned == "start" and causal and not told:
        found.append("causal aligns the first query with the first key")
    if callee.by_head and not callee.columns_said:
        found.append("a fused projection has the columns of one head after the other")
    told = stated.window is not None or callee.window_means
    if convention.window_extra and "window" in roles and not told:
        found.append("the window does not count the query's own key")
    return found

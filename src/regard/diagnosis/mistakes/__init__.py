"""The catalogue: wrong ways of computing attention, and those that only look wrong.

Owns the order in which they are tried. Must not know how a function is called or matched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from regard.diagnosis.gradient_probe import GradientProbe
from regard.diagnosis.probe import Probe
from regard.diagnosis.mistakes import (
    blocks,
    calls,
    caps,
    gradients,
    heads,
    hiding,
    linear,
    maps,
    numerics,
    positions,
    projections,
    scores,
    softmax,
    windows,
)
from regard.diagnosis.mistakes.entry import Equivalent, Mistake
from regard.diagnosis.mistakes.mechanisms import of_mechanism

# Ordinary inputs show these. The first that fits is named.
CATALOGUE: tuple[Mistake, ...] = (
    *scores.MISTAKES,
    *softmax.MISTAKES,
    *hiding.MISTAKES,
    *heads.MISTAKES,
    *projections.MISTAKES,
    *windows.MISTAKES,
    *numerics.MISTAKES,
    *blocks.MISTAKES,
)
# By the input of a probe that says what is computed besides.
OF_INPUT: Mapping[str, tuple[Mistake, ...]] = {
    "frequencies": positions.ROTARY_MISTAKES,
    "positions_slopes": positions.ALIBI_MISTAKES,
    "softcap": caps.SOFTCAP_MISTAKES,
    "sink": caps.SINK_MISTAKES,
    "pooled": maps.POOLED_MISTAKES,
    "pair_bias": maps.PAIR_MISTAKES,
}
# Only inputs at the edge show these, or how many digits come out.
FRAGILE: tuple[Mistake, ...] = (*numerics.FRAGILE, *hiding.FRAGILE)
# Backward passes have these, and those above in the weights that they compute again.
GRADIENTS: tuple[Mistake, ...] = gradients.MISTAKES
BY_DIGITS = (
    numerics.COMPUTED_IN_FLOAT32,
    numerics.COMPUTED_IN_HALF,
    *calls.OF_CALLS,
    *windows.OF_BUFFERS,
    *maps.OF_STREAMS,
)
BY_KIND = (numerics.INTEGERS_TRUNCATED, numerics.HALF_CONSTANT, *caps.SINK_GRADIENTS)
EQUIVALENTS: tuple[Equivalent, ...] = (
    *hiding.EQUIVALENTS,
    *numerics.EQUIVALENTS,
    *projections.EQUIVALENTS,
    *windows.EQUIVALENTS,
)


def catalogue_of(probe: Probe) -> Sequence[Mistake]:
    """The mistakes of what a probe's function is meant to compute; those of its own score first."""
    if isinstance(probe, GradientProbe):
        of_sink = caps.SINK_GRADIENTS if "sink" in probe.inputs else ()
        return (*GRADIENTS, *of_sink, *mistakes_of_built_in(probe), *CATALOGUE)
    if probe.is_plain:
        return (*mistakes_of_built_in(probe), *CATALOGUE)
    own = of_mechanism(
        replace(probe, keep=None, causal=False, window=None).steps, probe.score, probe.normalize
    )
    return (*own, *CATALOGUE)


def mistakes_of_built_in(probe: Probe) -> tuple[Mistake, ...]:
    """The mistakes of what a function computes besides: positions, softcap, sink, window."""
    own = [one for name, one in OF_INPUT.items() if name in probe.inputs]
    own += [windows.MISTAKES] * (probe.window is not None)
    return tuple(mistake for mistakes in own for mistake in mistakes)


def all_mistakes() -> dict[str, Mistake]:
    """Every mistake by its name.

    >>> all_mistakes()["scale_by_model_width"].title
    'the scores are divided by √d_model instead of √d_k'
    """
    of_built_in = (one for mistakes in OF_INPUT.values() for one in mistakes)
    every = (*linear.MISTAKES, *CATALOGUE, *of_built_in, *GRADIENTS, *FRAGILE, *BY_DIGITS, *BY_KIND)
    return {mistake.name: mistake for mistake in every}


def every_mistake() -> tuple[Mistake, ...]:
    """Those that replace a step, in the order in which they are tried."""
    return tuple(one for one in all_mistakes().values() if one.code)


def named(name: str) -> Mistake:
    """The mistake of this name."""
    return all_mistakes()[name]

"""Mistakes in backward passes: the textbook's backward steps with some of them replaced.

The weights that a backward pass computes again may have every mistake of the forward pass too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes import gradient_sums
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    both,
    heads_of,
    logits,
    mistakes,
    raw_scores,
    replacing,
    transposed,
)
from regard.diagnosis.mistakes.gradient_sums import over_query_heads

SCALE = (
    "dQ = scale * dS @ K; dK = scale * dS.swapaxes(-1, -2) @ Q",
    "dq = scale * ds @ k; dk = scale * ds.transpose(-1, -2) @ q",
)
SOFTMAX = (
    "dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True))",
    "ds = p * (dp - (p * dp).sum(-1, keepdim=True))",
)
VALUES = ("dV = P.swapaxes(-1, -2) @ dO", "dv = p.transpose(-1, -2) @ do")
BLOCKS = (2, 3, 4, 8, 16, 32, 64)  # of keys: a default size, or one that divides a probe's keys
WEIGHTS = ("dP = dO @ V.swapaxes(-1, -2)", "dp = do @ v.transpose(-1, -2)")


def _softmax(*ways: Callable[..., Any]) -> Variants:
    """Another gradient of the logits, made of P, dP and δ with its axis.

    Where keys are hidden, what it is there is 0, or used as it comes out.
    """

    def variant(way: Callable[..., Any], uses_hidden: bool) -> Variant:
        def replaced(name: str) -> Replacement:
            def logits(values: Values, probe: Probe) -> Any:
                own = next(step for step in probe.steps if step.op == "softmax_gradient")
                if own.name == name:
                    delta = values["delta"][..., None]
                    return way(values["weights"], values["d_weights"], delta)
                return values[own.name] if uses_hidden and own.name == "d_masked" else None

            return logits

        names = ("d_masked", "d_capped", "d_scaled")
        return Variant({name: replaced(name) for name in names}, absent=not uses_hidden)

    return tuple(variant(way, using) for way in ways for using in (False, True))


def _less_delta_of_block(size: int, p: Array, dp: Array, delta: Array) -> Array:
    """P·(dP − δ) with a δ for each block of so many keys."""
    starts = np.arange(0, p.shape[-1], size)
    sums = np.add.reduceat(p * dp, starts, axis=-1)
    return np.asarray(p * (dp - np.repeat(sums, size, axis=-1)[..., : p.shape[-1]]))


def _lse(values: Values) -> Array:
    return np.asarray((values["row_maximum"] + np.log(values["row_sums"]))[..., None])


def _weights_again(weights: Callable[[Values], Any]) -> Variants:
    """Other weights in a backward pass that gets the output and the lse of the forward one."""
    again: dict[str, Any] = {"weights": lambda values, probe: weights(values)}
    saved: dict[str, Any] = again | {"output": lambda values, probe: probe.right["output"]}
    hidden: dict[str, Any] = {"d_scaled": lambda values, probe: values.get("d_masked")}
    return (*both(**saved), Variant(saved | hidden, absent=False), *both(**again))


def _of_values(values: Values) -> Any:
    """Row sums of dO ∘ V, where there is a row of V for each query."""
    rows, others = values["d_output"], values["values"]
    return (rows * others).sum(-1) if rows.shape == others.shape else np.nan * rows.sum(-1)


def _delta(delta: Callable[[Values], Any]) -> Variants:
    """Another δ, without its axis of length 1."""
    return both(delta=lambda values, probe: delta(values))


def _without_slope(values: Values, probe: Probe) -> Any:
    """The gradient of the capped scores as that of the scaled ones, where there is a softcap."""
    return values.get("d_capped")


def _with_slope(slope: Callable[[Array, Array, Array], Any]) -> Variant:
    """Another slope of the softcap, made of the scores before it, those after it, and the cap."""

    def replaced(values: Values, probe: Probe) -> Any:
        if "d_capped" not in values:
            return None
        return values["d_capped"] * slope(values["scaled"], values["capped"], values["softcap"])

    return replacing(d_scaled=replaced)


# Instead of 1 − tanh²(s / cap).
WRONG_SLOPES = (
    lambda s, capped, cap: (1 - capped / cap) ** 2,
    lambda s, capped, cap: 1 - (s / cap) ** 2,
    lambda s, capped, cap: 1 - capped**2,
    lambda s, capped, cap: 1 - np.tanh(s) ** 2,
    lambda s, capped, cap: 1 - np.tanh(capped / cap) ** 2,
    lambda s, capped, cap: 1 - capped / cap,
    lambda s, capped, cap: (1 - (capped / cap) ** 2) / cap,
    lambda s, capped, cap: (1 - (capped / cap) ** 2) * cap,
)


def _queries(gradient: Callable[..., Any]) -> Variant:
    """Another gradient of the queries, made of dS, scaled and not, queries, keys and values."""
    return replacing(d_queries=lambda values, probe: gradient(*_factors(values)))


def _keys(gradient: Callable[..., Any]) -> Variant:
    return replacing(d_keys_by_head=lambda values, probe: gradient(*_factors(values)))


def _values(gradient: Callable[[Values], Any]) -> Variants:
    def replaced(values: Values, probe: Probe) -> Array:
        return over_query_heads(np.asarray(gradient(values)), probe)

    return both(d_values=replaced)


def _factors(values: Values) -> tuple[Array, ...]:
    return values["d_scores"], values["d_scaled"], *heads_of(values)


def _scores(change: Callable[[Array, Array], Any]) -> Variants:
    """Another gradient of the scores, made of that of the scaled ones and the scale."""
    return (replacing(d_scores=lambda values, probe: change(values["d_scaled"], values["scale"])),)


def _scale(scale: Callable[[Probe], float]) -> Variants:
    """Another scale, in the scores and in their gradient."""

    def replaced(values: Values, probe: Probe) -> Any:
        return None if probe.scale is not None else scale(probe)

    return (replacing(scale=replaced),)


SCALES: Entries = {
    "gradient_not_scaled": (
        "dQ and dK are not multiplied by the scale",
        "The scores were scaled after Q·Kᵀ, so their gradient is scaled on its way back.",
        _scores(lambda scaled, scale: scaled),
    ),
    "gradient_of_queries_not_scaled": (
        "dQ is not multiplied by the scale",
        "dK is; the gradient of the scores needs the scale before it meets K and Q.",
        (_queries(lambda s, scaled, q, k, v: scaled @ k),),
    ),
    "gradient_of_keys_not_scaled": (
        "dK is not multiplied by the scale",
        "dQ is; the gradient of the scores needs the scale before it meets K and Q.",
        (_keys(lambda s, scaled, q, k, v: transposed(scaled) @ q),),
    ),
    "gradient_scaled_twice": (
        "dQ and dK are multiplied by the scale twice",
        "The scores were scaled once; if Q is scaled already, dK needs no further factor.",
        _scores(lambda scaled, scale: scaled * scale**2),
    ),
    "gradient_of_queries_scaled_twice": (
        "dQ is multiplied by the scale twice",
        "dK is scaled once, as it should be.",
        (replacing(d_queries=lambda v, p: v["scale"] * v["d_scores"] @ heads_of(v)[1]),),
    ),
    "gradient_of_keys_scaled_twice": (
        "dK is multiplied by the scale twice",
        "If Q is scaled before it meets K, dSᵀ·Q has the scale already.",
        (
            replacing(
                d_keys_by_head=lambda v, p: v["scale"] * transposed(v["d_scores"]) @ v["queries"]
            ),
        ),
    ),
    "gradient_divided_by_scale": (
        "dQ and dK are divided by the scale",
        "Dividing by 1/√D makes them D times too large.",
        _scores(lambda scaled, scale: scaled / scale),
    ),
    "gradient_of_values_scaled": (
        "dV is multiplied by the scale",
        "The scale belongs to the scores; the output is P·V without it.",
        _values(lambda v: v["scale"] * transposed(v["weights"]) @ v["d_output"]),
    ),
    "backward_without_scale": (
        "the scores are not scaled, neither forward nor backward",
        "The forward pass divides by √D, so the backward pass has to in both places.",
        _scale(lambda probe: 1.0),
    ),
    "backward_scaled_by_width": (
        "the scale is 1/D instead of 1/√D, in the scores and in their gradient",
        "Scores are √D times too small, and so are the gradients.",
        _scale(lambda probe: 1 / probe.sizes["D"]),
    ),
}
SOFTMAXES: Entries = {
    "delta_forgotten": (
        "δ is not subtracted: dS = P·dP",
        "The weights of a row add up to 1: raising one lowers the others, which δ = Σ_j P·dP says.",
        _softmax(lambda p, dp, delta: p * dp),
    ),
    "softmax_elementwise": (
        "softmax is differentiated cell by cell: dS = dP·P·(1 − P)",
        "That is the diagonal of its Jacobian alone; every weight depends on every score of its "
        "row. With two keys the rows that are equal hide it.",
        _softmax(lambda p, dp, delta: dp * p * (1 - p)),
    ),
    "delta_of_weights": (
        "δ is Σ P·P instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        _delta(lambda v: (v["weights"] ** 2).sum(-1)),
    ),
    "delta_unweighted": (
        "δ is Σ dP instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        _delta(lambda v: v["d_weights"].sum(-1)),
    ),
    "delta_mean": (
        "δ is the plain mean of dP instead of Σ P·dP",
        "δ is the mean of dP with weights P.",
        _delta(lambda v: v["d_weights"].mean(-1)),
    ),
    "delta_of_outputs": (
        "δ is Σ O·O instead of Σ dO·O",
        "One of the two factors is the gradient of the output.",
        _delta(lambda v: (v["output"] ** 2).sum(-1)),
    ),
    "delta_of_values": (
        "δ is Σ dO·V instead of Σ dO·O",
        "Row i of V is of key i, and has nothing to do with what query i gets.",
        _delta(_of_values),
    ),
    "delta_of_gradients": (
        "δ is Σ dO·dO instead of Σ dO·O",
        "One of the two factors is the output itself.",
        _delta(lambda v: (v["d_output"] ** 2).sum(-1)),
    ),
    "delta_without_output": (
        "δ is Σ dO instead of Σ dO·O",
        "The output is missing: each number of dO has to be multiplied by that of O.",
        _delta(lambda v: v["d_output"].sum(-1)),
    ),
    "delta_over_queries": (
        "δ is summed over the queries instead of the keys",
        "Softmax runs along each row, and so does the sum that its gradient subtracts.",
        _softmax(lambda p, dp, delta: p * (dp - (p * dp).sum(-2, keepdims=True))),
    ),
    "delta_over_everything": (
        "δ is summed over queries and keys",
        "Softmax runs along each row, and so does the sum that its gradient subtracts.",
        _softmax(lambda p, dp, delta: p * (dp - delta.sum(-2, keepdims=True))),
    ),
    "delta_of_one_block": (
        "δ is summed over one block of keys instead of the whole row",
        "δ belongs to the row: Σ P·dP over all keys, which is Σ dO·O, known before any block.",
        _softmax(*(partial(_less_delta_of_block, size) for size in BLOCKS)),
        (
            "delta = (dO * O).sum(axis=-1, keepdims=True)  # before the loop over blocks",
            "delta = (do * o).sum(-1, keepdim=True)  # before the loop over blocks",
        ),
    ),
    "delta_lost_its_axis": (
        "δ lost its axis (no keepdims): column j gets the δ of row j",
        "On a square matrix NumPy broadcasts it along the wrong axis without an error.",
        _softmax(lambda p, dp, delta: p * (dp - transposed(delta))),
    ),
    "delta_added": (
        "δ is added instead of subtracted",
        "dS = P·(dP − δ): its rows add up to 0.",
        _softmax(lambda p, dp, delta: p * (dp + delta)),
    ),
    "delta_outside": (
        "δ is subtracted without the factor P: dS = P·dP − δ",
        "P multiplies both: dS = P·(dP − δ).",
        _softmax(lambda p, dp, delta: p * dp - delta),
    ),
    "weights_lost_in_softmax": (
        "dS is dP − δ without the factor P",
        "P multiplies both: dS = P·(dP − δ).",
        _softmax(lambda p, dp, delta: dp - delta),
    ),
    "softmax_skipped_backward": (
        "softmax is left out of the backward pass: dS = dP",
        "The gradient of the weights is used as that of the scores.",
        _softmax(lambda p, dp, delta: dp),
    ),
    "softmax_negated": (
        "dS has the wrong sign: P·(δ − dP)",
        "dQ and dK then point away from where they should.",
        _softmax(lambda p, dp, delta: p * (delta - dp)),
    ),
    "weights_for_their_gradient": (
        "P is used where dP is needed",
        "dS = P·(dP − δ) with dP = dO·Vᵀ.",
        _softmax(
            lambda p, dp, delta: p * (p - (p * p).sum(-1, keepdims=True)),
            lambda p, dp, delta: p * (p - delta),
        ),
    ),
    "gradient_for_weights": (
        "dP is used where P is needed",
        "dS = P·(dP − δ) with the weights P outside.",
        _softmax(
            lambda p, dp, delta: dp * (dp - (dp * dp).sum(-1, keepdims=True)),
            lambda p, dp, delta: dp * (dp - delta),
        ),
    ),
    "log_softmax_backward": (
        "dS is the gradient of log_softmax: dP − P·Σ dP",
        "The forward pass has softmax, not its logarithm.",
        _softmax(lambda p, dp, delta: dp - p * dp.sum(-1, keepdims=True)),
    ),
    "exponentials_for_weights": (
        "dS is made of exponentials that are not divided by their sum",
        "dS = P·(dP − δ) with weights P that add up to 1.",
        (
            replacing(d_scores=lambda v, p: v["d_scaled"] * v["scale"] * v["row_sums"][..., None]),
            replacing(
                d_scores=lambda v, p: (
                    v["d_scaled"] * v["scale"] * np.exp(np.nan_to_num(v["lse"]))[..., None]
                )
            ),
        ),
    ),
    "softcap_slope_lost": (
        "the slope of the softcap is left out or wrong: 1 − tanh²",
        "The scores went through cap·tanh(s / cap), so their gradient is multiplied by its slope.",
        (replacing(d_scaled=_without_slope), *map(_with_slope, WRONG_SLOPES)),
        (
            "dS = dS * (1 - np.tanh(s / cap) ** 2)",
            "ds = ds * (1 - torch.tanh(s / cap) ** 2)",
        ),
    ),
    "squared_weights": (
        "dS = P·P·(dP − δ): the weights count twice",
        "P multiplies dP − δ once.",
        _softmax(lambda p, dp, delta: p * p * (dp - delta)),
    ),
}
OF_WEIGHTS: Entries = {
    "mask_forgotten_backward": (
        "hidden keys get weight again in the backward pass",
        "The weights that are made again from the saved log-sum-exp need the mask as well.",
        _weights_again(lambda v: np.exp(raw_scores(v) - _lse(v))),
        ("P = np.where(keep, np.exp(S - lse), 0)", "p = (s - lse).exp().masked_fill(~keep, 0)"),
    ),
    "lse_of_another_base": (
        "the saved log-sum-exp is of another base than the exponentials of the backward pass",
        "exp2 needs a log-sum-exp of base 2, and exp one of base e: 1.4427 lies between them.",
        _weights_again(lambda v: np.exp(logits(v) - _lse(v) / np.log(2)))
        + _weights_again(lambda v: np.exp(logits(v) - _lse(v) * np.log(2)))
        + _weights_again(lambda v: np.exp2(logits(v) - _lse(v)))
        + _weights_again(lambda v: np.exp2(logits(v) / np.log(2) - _lse(v))),
        ("P = np.exp(S - lse)  # both of base e", "p = (s - lse).exp()  # both of base e"),
    ),
    "keys_for_values_backward": (
        "dP is dO·Kᵀ: keys are used instead of values",
        "The weights met the values, so their gradient does.",
        both(d_weights=lambda v, p: v["d_output"] @ transposed(heads_of(v)[1])),
    ),
    "gradient_of_weights_transposed": (
        "dP is V·dOᵀ, transposed",
        "Rows of dP belong to queries, columns to keys.",
        both(d_weights=lambda v, p: heads_of(v)[2] @ transposed(v["d_output"])),
    ),
    "output_for_its_gradient": (
        "dP is O·Vᵀ: the output is used instead of its gradient",
        "A backward pass starts from dO.",
        both(d_weights=lambda v, p: v["output"] @ transposed(heads_of(v)[2])),
    ),
}
OF_VALUES: Entries = {
    "weights_not_transposed_backward": (
        "dV is P·dO instead of Pᵀ·dO",
        "With as many queries as keys no shape shows it. Row j of dV belongs to key j.",
        _values(lambda v: v["weights"] @ v["d_output"]),
    ),
    "gradient_of_values_from_scores": (
        "dV is dSᵀ·dO: the gradient of the scores is used instead of the weights",
        "The output is P·V, so dV = Pᵀ·dO.",
        (
            *_values(lambda v: transposed(v["d_scores"]) @ v["d_output"]),
            *_values(lambda v: transposed(v["d_scaled"]) @ v["d_output"]),
        ),
    ),
    "gradient_of_values_from_gradient": (
        "dV is dPᵀ·dO: the gradient of the weights is used instead of the weights",
        "The output is P·V, so dV = Pᵀ·dO.",
        _values(lambda v: transposed(v["d_weights"]) @ v["d_output"]),
    ),
    "gradient_of_values_unnormalised": (
        "dV uses exponentials that are not divided by their sum",
        "The output is P·V with weights that add up to 1.",
        (
            *_values(lambda v: transposed(v["exponentials"]) @ v["d_output"]),
            *_values(
                lambda v: (
                    transposed(v["exponentials"] * np.exp(v["row_maximum"])[..., None])
                    @ v["d_output"]
                )
            ),
        ),
    ),
    "gradient_of_values_from_output": (
        "dV is Pᵀ·O: the output is used instead of its gradient",
        "A backward pass starts from dO.",
        _values(lambda v: transposed(v["weights"]) @ v["output"]),
    ),
}
OF_SCORES: Entries = {
    "gradient_of_keys_not_transposed": (
        "dK is dS·Q instead of dSᵀ·Q",
        "With as many queries as keys no shape shows it. Row j of dK belongs to key j.",
        (_keys(lambda s, scaled, q, k, v: s @ q),),
    ),
    "gradient_of_queries_transposed": (
        "dQ is dSᵀ·K instead of dS·K",
        "With as many queries as keys no shape shows it. Row i of dQ belongs to query i.",
        (_queries(lambda s, scaled, q, k, v: transposed(s) @ k),),
    ),
    "queries_for_keys_backward": (
        "dQ is dS·Q: queries are used instead of keys",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        (_queries(lambda s, scaled, q, k, v: s @ q),),
    ),
    "keys_for_queries_backward": (
        "dK is dSᵀ·K: keys are used instead of queries",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        (_keys(lambda s, scaled, q, k, v: transposed(s) @ k),),
    ),
    "values_for_keys_backward": (
        "dQ is dS·V: values are used instead of keys",
        "The scores are Q·Kᵀ, so the gradient of one meets the other.",
        (_queries(lambda s, scaled, q, k, v: s @ v),),
    ),
    "weights_for_scores_backward": (
        "dQ and dK use the weights P instead of the gradient of the scores",
        "dQ = scale·dS·K and dK = scale·dSᵀ·Q.",
        (
            replacing(d_scores=lambda v, p: v["weights"] * v["scale"]),
            replacing(d_scores=lambda v, p: v["weights"]),
        ),
    ),
}
MISTAKES = (
    *mistakes("gradients", SCALE, SCALES),
    *mistakes("gradients", SOFTMAX, SOFTMAXES),
    *mistakes("gradients", WEIGHTS, OF_WEIGHTS),
    *mistakes("gradients", VALUES, OF_VALUES),
    *mistakes("gradients", SCALE, OF_SCORES),
    *gradient_sums.MISTAKES,
)

"""Mistakes with a softcap on the scores, and with a sink among the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Family,
    Replacement,
    Variants,
    blend,
    both,
    mistakes,
    raw_scores,
    replacing,
)

CAP = (
    "scores = cap * np.tanh(scores / cap)  # after the scale, before the mask",
    "scores = cap * torch.tanh(scores / cap)  # after the scale, before the mask",
)
SINK = (
    "m = np.maximum(scores.max(-1), sink); e = np.exp(scores - m[..., None]); "
    "P = e / (e.sum(-1) + np.exp(sink - m))[..., None]",
    "P = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]",
)


def _capped(capped: Callable[[Array, Array], Array]) -> Variants:
    """The scaled scores and the cap give something else than a softcap."""
    return (
        replacing(
            capped=lambda values, probe: np.asarray(capped(values["scaled"], values["softcap"]))
        ),
    )


def _before_scale(values: Values, probe: Probe) -> Array:
    cap = values["softcap"]
    return np.asarray(cap * np.tanh(values["scores"] / cap) * values["scale"])


def _after_mask(hidden: float) -> Variant:
    """The softcap is taken of scores with the mask, which hides keys by a finite number or −∞."""

    def capped(scores: Array, values: Values) -> Array:
        scores = scores + values["bias"] if "bias" in values else scores
        return np.asarray(values["softcap"] * np.tanh(scores / values["softcap"]))

    def masked(values: Values, probe: Probe) -> Array:
        if "softcap" not in values:  # the step is then the textbook's
            return None  # type: ignore[return-value]
        return capped(np.where(values["visible"], values["scaled"], hidden), values)

    def biased(values: Values, probe: Probe) -> Array:
        if "softcap" not in values:
            return None  # type: ignore[return-value]
        return capped(values["scaled"], values)

    return Variant({"masked": masked, "biased": biased}, absent=False)


SOFTCAP: Entries = {
    "softcap_not_multiplied_back": (
        "tanh(scores / cap) is not multiplied by the cap",
        "Scores then lie between −1 and 1, and weights are almost equal.",
        _capped(lambda scores, cap: np.tanh(scores / cap)),
    ),
    "softcap_not_divided": (
        "the scores are not divided by the cap before tanh",
        "tanh saturates above 2: all larger scores become the cap.",
        _capped(lambda scores, cap: cap * np.tanh(scores)),
    ),
    "softcap_before_scale": (
        "the softcap comes before the scale",
        "Unscaled scores are √D times as large, so they are capped too early.",
        (replacing(capped=_before_scale),),
    ),
    "softcap_after_mask": (
        "the softcap comes after the mask: hidden keys get a score of −cap",
        "−cap is an ordinary score, so hidden keys keep some weight.",
        (_after_mask(-1e9), _after_mask(-np.inf)),
    ),
    "softcap_inverted": (
        "the cap multiplies before tanh and divides after it",
        "A softcap is cap·tanh(scores / cap), not tanh(scores · cap) / cap.",
        _capped(lambda scores, cap: np.tanh(scores * cap) / cap),
    ),
}


def _sink(values: Values) -> Array:
    return np.asarray(values["sink"][:, None])


def _exponentials(values: Values) -> Array:
    return (
        np.where(values["visible"], values["exponentials"], 0)
        if ("visible" in values)
        else values["exponentials"]
    )


def _highest(values: Values) -> Array:
    """The maximum of each row without the sink."""
    scores = values["masked"] if "masked" in values else raw_scores(values)
    return np.asarray(scores.max(-1))


def _gradient_of_sink(factor: float, values: Values, probe: Probe) -> Array:
    """The gradient of the sink times a factor."""
    return np.asarray(-factor * (values["sink_weights"] * values["delta"]).sum(-1))


def _of_exponentials(values: Values) -> Array:
    """The sum of δ times the sink's exponential, which is not divided by the row's sum."""
    return np.asarray((values["sink_exponential"] * values["delta"]).sum(-1))


def _without_sink(values: Values, probe: Probe) -> Array:
    e = _exponentials(values)
    return np.asarray(e / e.sum(-1, keepdims=True))


def _not_shifted(values: Values, probe: Probe) -> Array:
    """exp(sink) is added where exp(sink − maximum) is needed; the maximum is that of the scores."""
    shift = np.exp(values["row_maximum"] - _highest(values))[..., None]
    e = _exponentials(values) * shift
    return np.asarray(e / (e.sum(-1, keepdims=True) + np.exp(_sink(values))[..., None]))


def _not_shifted_with_sink(values: Values, probe: Probe) -> Array:
    e = _exponentials(values)
    return np.asarray(e / (e.sum(-1, keepdims=True) + np.exp(_sink(values))[..., None]))


def _share(values: Values) -> Array:
    """The weight that the sink takes."""
    return np.asarray(1 - values["weights"].sum(-1, keepdims=True))


def _as_value(which: Callable[[Array], Array]) -> Replacement:
    """The sink's share goes to a value."""
    return lambda values, probe: (
        blend(values["weights"], values["values"])
        + _share(values) * which(_repeated(values, probe))
    )


def _repeated(values: Values, probe: Probe) -> Array:
    heads = probe.sizes["H"]
    return np.repeat(values["values"], heads // values["values"].shape[1], axis=1)


def _shifted(columns: Callable[[Array, Array], list[Array]]) -> Replacement:
    """The sink's weight meets the value of a key, and a key's weight is lost."""

    def output(values: Values, probe: Probe) -> Array:
        own = columns(values["weights"], _share(values))
        return np.asarray(np.concatenate(own, -1) @ _repeated(values, probe))

    return output


SINKS: Entries = {
    "sink_without_effect": (
        "the sink has no effect: the weights are divided by their sum without it",
        "The share that the sink takes must be missing from the row.",
        both(weights=_without_sink),
    ),
    "sink_not_shifted": (
        "the sink's exponential is not shifted by the row maximum",
        "The others are exp(score − m), so the sink's is exp(sink − m).",
        both(weights=_not_shifted) + both(weights=_not_shifted_with_sink),
    ),
    "sink_added_unexponentiated": (
        "the sink itself is added to the sum instead of its exponential",
        "A sink is a logit: exp(sink − m) belongs into the sum.",
        both(
            weights=lambda values, probe: (
                _exponentials(values)
                / (_exponentials(values).sum(-1, keepdims=True) + _sink(values)[..., None])
            )
        ),
    ),
    "sink_has_a_value": (
        "the share of the sink goes to a value",
        "A sink takes weight and gives nothing.",
        (
            replacing(output=_as_value(lambda v: v[..., :1, :])),
            replacing(output=_as_value(lambda v: v[..., -1:, :])),
            replacing(output=_as_value(lambda v: v.mean(-2, keepdims=True))),
            replacing(output=_as_value(lambda v: np.ones_like(v[..., :1, :]))),
        ),
    ),
    "sink_left_at_the_other_end": (
        "the column of a key is left out instead of the sink's: weights are shifted by one key",
        "Where the sink was joined on the right, [..., :-1] leaves it out; on the left, [..., 1:].",
        (
            Variant({"output": _shifted(lambda weights, sink: [weights[..., 1:], sink])}),
            Variant({"output": _shifted(lambda weights, sink: [sink, weights[..., :-1]])}),
        ),
    ),
    "sink_scaled": (
        "the sink is divided by √D like the scores",
        "A sink is a logit of its own, which is learned without a scale.",
        both(
            weights=lambda values, probe: (
                _exponentials(values)
                / (
                    _exponentials(values).sum(-1, keepdims=True)
                    + np.exp(_sink(values) / probe.sizes["D"] ** 0.5 - values["row_maximum"])[
                        ..., None
                    ]
                )
            )
        ),
    ),
    "sink_of_another_head": (
        "every head has the sink of the first one",
        "There is one sink for each query head.",
        both(
            weights=lambda values, probe: (
                _exponentials(values)
                / (
                    _exponentials(values).sum(-1, keepdims=True)
                    + np.exp(_sink(values)[:1] - values["row_maximum"])[..., None]
                )
            )
        ),
    ),
}
FAMILY: Family = "positions, softcap and sinks"
SOFTCAP_MISTAKES = mistakes(FAMILY, CAP, SOFTCAP)
SINK_MISTAKES = mistakes(FAMILY, SINK, SINKS)

# Backward passes that return the gradient of a sink have these.
SINK_GRADIENTS = mistakes(
    "gradients",
    SINK,
    {
        "gradient_of_sink": (
            "the gradient of the sink is not −Σ p·δ over the rows of its head",
            "The sink has no value, so its dP is 0; its weight p is that of softmax, δ = Σ P·dP.",
            (
                *(replacing(d_sink=partial(_gradient_of_sink, factor)) for factor in (-1.0, 0.0)),
                replacing(d_sink=lambda v, p: -v["delta"].sum(-1)),
                replacing(d_sink=lambda v, p: -v["sink_weights"].sum(-1)),
                replacing(d_sink=lambda v, p: -(v["sink_weights"] * v["delta"]).mean(-1)),
                replacing(d_sink=lambda v, p: v["sink_weights"].sum(-1)),
                replacing(d_sink=lambda v, p: -_of_exponentials(v)),
                replacing(
                    d_sink=lambda v, p: -(v["sink_weights"] * v["d_weights"].sum(-1)).sum(-1)
                ),
                replacing(
                    d_sink=lambda v, p: (
                        -(v["sink_weights"] * (1 - v["sink_weights"]) * v["delta"]).sum(-1)
                    )
                ),
            ),
            (
                "dsink = -(p_sink * delta).sum(axis=-1)  # p_sink = exp(sink - lse)",
                "dsink = -(p_sink * delta).sum(-1)  # p_sink = exp(sink - lse)",
            ),
        ),
    },
)

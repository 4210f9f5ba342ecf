"""How logits become weights: normalisations for `attention(normalize=…)` besides the softmax.

`Sigmoid`, `Hard`, `Sparsemax` and `Proportional`. Each is computed, explained and differentiated by
the reference kernel, from the steps that the textbook declares for it, in float64 and rounded once;
the fused kernel knows `Sigmoid`. They have no log-sum-exp and no sink; a row that sees no key has
weights of 0, as always.

>>> import numpy as np, regard
>>> x = np.array([[1.0, 0.0], [3.0, 4.0]])
>>> regard.attention(x, x, x, normalize=Sparsemax(), return_weights=True).weights.round(3)
array([[0., 1.],
       [0., 1.]])
"""

from __future__ import annotations

from typing import Any

from regard.boundary import answering
from regard.boundary.arguments import as_flag
from regard.rules.part import Part, as_part, own_number

__all__ = ["Hard", "Normalizer", "Proportional", "Sigmoid", "Sparsemax"]


def __dir__() -> list[str]:
    return __all__


class Normalizer(Part):
    """The base of all normalisations."""

    option = "normalize"


@answering
class Sigmoid(Normalizer):
    """1 / (1 + exp(−(x + bias))): each weight for itself, so that rows need not add up to 1.

    Parameters
    ----------
    bias : float
        Added to every logit. −ln S makes a row of S equal keys begin near a sum of 1.

    References
    ----------
    Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (2024).

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.eye(2)
    >>> regard.attention(x, x, x, normalize=Sigmoid(-np.log(2))).round(3)
    array([[0.503, 0.333],
           [0.333, 0.503]])
    """

    def __init__(self, bias: float = 0.0) -> None:
        self.bias = own_number("normalize.bias", bias)


@answering
class Hard(Normalizer):
    """All weight on the key with the largest logit; of several, on the first.

    Parameters
    ----------
    straight_through : bool
        The gradient of the logits: 0, because a small change chooses no other key; or with True
        that of the weights, as if they were the logits.

    References
    ----------
    Xu et al., "Show, Attend and Tell" (2015), section 4.1; Bengio, Léonard, Courville, "Estimating
    or Propagating Gradients Through Stochastic Neurons" (2013), for the straight-through gradient.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> regard.attention(x, x, np.eye(3), normalize=Hard())
    array([[1., 0., 0.],
           [1., 0., 0.],
           [0., 0., 1.]])
    """

    def __init__(self, straight_through: bool = False) -> None:
        self.straight_through = as_flag("normalize.straight_through", straight_through)

    @property
    def kind(self) -> str:
        return "hard, straight-through" if self.straight_through else "hard"


@answering
class Sparsemax(Normalizer):
    """max(x − τ, 0), with the τ of each row that makes it add up to 1: far keys get exactly 0.

    References
    ----------
    Martins, Astudillo, "From Softmax to Sparsemax" (2016), section 2.

    Examples
    --------
    >>> import numpy as np, regard
    >>> keys = np.array([[1.0], [0.5], [-1.0]])
    >>> regard.attention(np.array([1.0]), keys, np.eye(3), normalize=Sparsemax())
    array([0.75, 0.25, 0.  ])
    """


@answering
class Proportional(Normalizer):
    """Each score's share of the sum of its row; for the scores of `Features`, never negative.

    Examples
    --------
    >>> import numpy as np, regard
    >>> from regard.scores import Features
    >>> keys = np.array([[0.0], [2.0]])
    >>> call = {"score": Features(), "normalize": Proportional()}
    >>> regard.attention(np.array([0.0]), keys, np.eye(2), **call)
    array([0.25, 0.75])
    """


# By name; `regard info` says which kernels know them.
KNOWN = {one.__name__: one for one in (Sigmoid, Hard, Sparsemax, Proportional)}


def as_normalizer(value: Any) -> Normalizer | None:
    """What `normalize=` was given; None for the softmax."""
    normalizer: Normalizer | None = as_part("normalize", "softmax", value, Normalizer, KNOWN)
    return normalizer

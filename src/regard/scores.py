"""How a query and a key are compared: scores for `attention(score=…)` besides the dot product.

`General`, `Additive`, `Cosine`, `Distance` and `Features`. Each is computed, explained and
differentiated from the steps that the textbook declares for it. To the fused kernel, `General`,
`Cosine` and `Features` are dot products of rows that are made first; the others are computed by the
reference, in float64 and rounded once. None of them divides by √D; a `scale` multiplies the scores
if one is given.

>>> import numpy as np, regard
>>> x = np.array([[1.0, 0.0], [3.0, 4.0]])
>>> regard.attention(x, x, x, score=Cosine(temperature=0.5), return_weights=True).weights.round(3)
array([[0.69, 0.31],
       [0.31, 0.69]])
"""

from __future__ import annotations

from typing import Any

from regard.boundary import answering
from regard.errors import OptionError, ShapeError, safe_text
from regard.rules.part import Part, as_part, own_array, own_number

__all__ = ["Additive", "Cosine", "Distance", "Features", "General", "Score"]


def __dir__() -> list[str]:
    return __all__


class Score(Part):
    """The base of all scores."""

    option = "score"


@answering
class General(Score):
    """q·W·k, a product through a matrix, which all heads share.

    Parameters
    ----------
    W : array_like, (D, D)
        Row d belongs to feature d of a query, column k to feature k of a key.

    References
    ----------
    Luong, Pham, Manning, "Effective Approaches to Attention-based Neural Machine Translation"
    (2015), section 3.1.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.eye(2)
    >>> regard.attention(x, x, x, score=General([[0.0, 1.0], [1.0, 0.0]])).round(3)
    array([[0.269, 0.731],
           [0.731, 0.269]])
    """

    def __init__(self, W: Any) -> None:
        self.W = own_array("score.W", W, 2, "a matrix (D, D), for queries and keys D wide")

    def check(self, width: int) -> None:
        if self.W.shape != (width, width):
            raise ShapeError(
                f"score.W has shape {self.W.shape} but queries and keys are {width} wide; "
                f"it must be {(width, width)}"
            )


@answering
class Additive(Score):
    """v·tanh(q·W_q + k·W_k), a network with one hidden layer, which all heads share.

    Luong's concatenation is the same: the two matrices are the two halves of his.

    Parameters
    ----------
    W_q, W_k : array_like, (D, U)
        From the features of a query, and of a key, to the hidden ones.
    v : array_like, (U,)
        The weight of each hidden feature.

    Notes
    -----
    The values of tanh, one for each query, key and hidden feature, are added up as they are made:
    at most 2^18 of them are there at once, however long the call is.

    References
    ----------
    Bahdanau, Cho, Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate"
    (2014), section 3.1.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.eye(2)
    >>> score = Additive(W_q=[[2.0], [0.0]], W_k=[[1.0], [-1.0]], v=[1.0])
    >>> regard.attention(x, x, x, score=score, return_weights=True).weights.round(3)
    array([[0.558, 0.442],
           [0.821, 0.179]])
    """

    def __init__(self, W_q: Any, W_k: Any, v: Any) -> None:
        self.W_q = own_array("score.W_q", W_q, 2, "a matrix (D, U), for queries D wide")
        self.W_k = own_array("score.W_k", W_k, 2, "a matrix (D, U), for keys D wide")
        self.v = own_array("score.v", v, 1, "a vector (U,)")
        hidden = {"score.W_q": self.W_q.shape[1], "score.W_k": self.W_k.shape[1]}
        for name, columns in hidden.items():
            if columns != len(self.v):
                raise ShapeError(
                    f"{name} has {columns} columns but score.v has {len(self.v)} numbers; "
                    "both are the hidden width U"
                )

    def check(self, width: int) -> None:
        for name, rows in (("score.W_q", len(self.W_q)), ("score.W_k", len(self.W_k))):
            if rows != width:
                raise ShapeError(
                    f"{name} has {rows} rows but queries and keys are {width} wide; "
                    "it must have one row for each feature"
                )


@answering
class Cosine(Score):
    """cos(q, k) / temperature: directions alone, whatever the lengths; a vector of zeros scores 0.

    Parameters
    ----------
    temperature : float
        The smaller, the more of the weight is on the best key. Its reciprocal is the "logit scale"
        of other libraries.

    References
    ----------
    Liu et al., "Swin Transformer V2" (2022), section 3.2.

    Examples
    --------
    >>> import numpy as np, regard
    >>> query, keys = np.array([2.0, 0.0]), np.array([[5.0, 0.0], [0.0, 0.0]])
    >>> regard.attention(query, keys, np.eye(2), score=Cosine()).round(3)
    array([0.731, 0.269])
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = own_number("score.temperature", temperature)
        if self.temperature <= 0:
            raise OptionError(f"score.temperature is {self.temperature}; it must be above 0")


@answering
class Distance(Score):
    """−‖q − k‖²: the nearest key scores highest, and at most 0.

    With a softmax, the weights are those of a Gaussian kernel; ``scale=1 / (2 * sigma**2)`` sets
    its width.

    Examples
    --------
    >>> import numpy as np, regard
    >>> query, keys = np.array([0.0]), np.array([[0.0], [1.0], [2.0]])
    >>> regard.attention(query, keys, np.eye(3), score=Distance()).round(3)
    array([0.721, 0.265, 0.013])
    """


@answering
class Features(Score):
    """φ(q)·φ(k), which is never negative: the score of linear attention.

    With ``normalize=regard.normalizers.Proportional()`` the output is that of
    `regard.linear_attention`, which needs no table of scores.

    Parameters
    ----------
    map : {"elu+1"}
        φ(x) = x + 1 above 0, else exp(x), for each feature.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), section 3.2.

    Examples
    --------
    >>> import numpy as np, regard
    >>> from regard.normalizers import Proportional
    >>> x = np.eye(2)
    >>> regard.attention(x, x, x, score=Features(), normalize=Proportional()).round(3)
    array([[0.556, 0.444],
           [0.444, 0.556]])
    """

    def __init__(self, map: str = "elu+1") -> None:
        check_map("score.map", map)
        self.map = map


def check_map(name: str, given: Any) -> None:
    """Raise unless it is a known feature map."""
    if not (isinstance(given, str) and given == "elu+1"):
        raise OptionError(f'{name} is {safe_text(repr(given), 60)}; it must be "elu+1"')


# By name; `regard info` says which kernels know them.
KNOWN = {one.__name__: one for one in (General, Additive, Cosine, Distance, Features)}


def as_score(value: Any) -> Score | None:
    """What `score=` was given; None for the dot product."""
    score: Score | None = as_part("score", "dot", value, Score, KNOWN)
    return score

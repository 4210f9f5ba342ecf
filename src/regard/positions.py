"""Where a query and a key are: positions for `attention(positions=…)`.

`Rotary` turns queries and keys, `Alibi` and `RelativeBias` add a number to each logit, `Learned`
and `Sinusoidal` a vector to each embedding. Query i is at position i + offset, key j at position j.
Angles are computed in float64, and each number of a turned row is rounded once, to the dtype of its
array.

>>> import numpy as np, regard
>>> x = np.ones((3, 2))
>>> regard.attention(x, x, x, positions=Alibi(slopes=1.0), return_weights=True).weights.round(3)
array([[0.665, 0.245, 0.09 ],
       [0.212, 0.576, 0.212],
       [0.09 , 0.245, 0.665]])
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary import answering
from regard.boundary.arguments import as_flag, as_int
from regard.boundary.arrays import Array
from regard.errors import OptionError, ShapeError
from regard.rules import distances, rotary, rotary_config
from regard.rules.part import Part, as_part, own_array, own_finite, own_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Alibi", "Learned", "Positions", "RelativeBias", "Rotary", "Sinusoidal"]


def __dir__() -> list[str]:
    return __all__


class Positions(Part):
    """The base of all positions."""

    option = "positions"
    query_positions: Array | None = None
    key_positions: Array | None = None

    def fits(self, width: int, shape: tuple[int, ...]) -> None:
        """Raise unless it fits queries and keys of this width, and scores (…, H, L, S)."""


@answering
class Rotary(Positions):
    """Each pair of features of a query and of a key is turned by an angle that grows with position.

    With θ_p = base^(−2p / width), pair (x, y) number p of a row at position m becomes
    (x·cos mθ_p − y·sin mθ_p, y·cos mθ_p + x·sin mθ_p), so that a score depends on the difference of
    two positions. A model with two bases has two of these objects: `from_config` makes them.

    Parameters
    ----------
    base : float
        The larger, the slower the last pairs turn. A model's ``rope_theta``.
    width : int, optional
        How many features are turned, an even number; those after them stay. None: all.
    interleaved : bool
        False: feature p makes a pair with feature p + width / 2, as in Llama and GPT-NeoX.
        True: feature 2p makes one with feature 2p + 1, as in GPT-J and the paper.
    scaling : mapping, optional
        One entry of a model's rope parameters: "rope_type" is "default", "linear", "ntk",
        "dynamic", "yarn", "longrope" or "llama3", with the further names of that type. For a whole
        configuration there is `from_config`. A "rope_theta" is the base, and a
        "partial_rotary_factor" the part of the features that is turned. "dynamic" and "longrope"
        look at the length of the text, which is the largest position of a call, plus 1.
    frequencies : array_like, (width / 2,), optional
        Radians per position for each pair, instead of base and scaling.
    attention_factor : float, optional
        Multiplies cosines and sines. None: what the scaling says, or 1.
    query_positions, key_positions : array_like, (…, L) and (…, S), optional
        Where rows are, if not at i + offset and j: integers or fractions. Masks do not look here.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.2.
    Peng et al., "YaRN" (2023); Ding et al., "LongRoPE" (2024), for two of the scalings.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    >>> call = {"positions": Rotary(), "scale": 1.0}
    >>> regard.attention(x, x, x, return_weights=True, **call).weights.round(3)
    array([[0.534, 0.337, 0.129],
           [0.279, 0.442, 0.279],
           [0.129, 0.337, 0.534]])
    """

    def __init__(
        self,
        base: float = 10000.0,
        width: int | None = None,
        interleaved: bool = False,
        scaling: Any = None,
        frequencies: Any = None,
        attention_factor: float | None = None,
        query_positions: Any = None,
        key_positions: Any = None,
    ) -> None:
        self.base = own_number("positions.base", base)
        self.width = None if width is None else as_int("positions.width", width, 2)
        self.interleaved = as_flag("positions.interleaved", interleaved)
        self.scaling = None if scaling is None else dict(rotary.read_scaling(scaling))
        self.frequencies = None
        if frequencies is not None:
            self.frequencies = own_finite("positions.frequencies", frequencies)
            if self.frequencies.ndim != 1:
                raise ShapeError(
                    f"positions.frequencies has shape {self.frequencies.shape} but must be "
                    "(width / 2,), one for each pair of features"
                )
        self.attention_factor = None
        if attention_factor is not None:
            self.attention_factor = own_number("positions.attention_factor", attention_factor)
        places = {"query_positions": query_positions, "key_positions": key_positions}
        for name, given in places.items():
            found = None if given is None else own_finite(f"positions.{name}", given)
            if found is not None and not found.ndim:
                raise ShapeError(f"positions.{name} is one number; it must have one for each row")
            setattr(self, name, found)
        self._entries: rotary.Scaling = tuple((self.scaling or {"rope_type": "default"}).items())
        # What cosines and sines are multiplied by.
        self.factor = rotary.attention_factor(self._entries)
        if self.attention_factor is not None:
            self.factor = self.attention_factor
        # Whether a longer text turns its first rows by other angles too.
        self.depends_on_length = rotary.depends_on_length(self._entries)
        self._check()

    @classmethod
    def from_config(cls, config: Any, layer: int | None = None) -> Rotary | None:
        """What a model's configuration says of one layer; None if that layer is not turned.

        Parameters
        ----------
        config : object or mapping
            The whole configuration of a model: transformers' object, any object with its fields, or
            a dict as json.load gives it. What is not known to be turned as here is refused.
        layer : int, optional
            The number of the layer, from 0. It may be left out if all layers are turned alike.

        Examples
        --------
        >>> config = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 500000.0}
        >>> Rotary.from_config(config).base
        500000.0
        """
        given = rotary_config.arguments(config, layer)
        return None if given is None else cls(**given)

    def _check(self) -> None:
        entries = dict(self._entries)
        theta = entries.get("rope_theta")
        if theta is not None:
            if self.base not in (10000.0, theta):
                raise OptionError(
                    f"positions.base is {self.base:g} but scaling has rope_theta {theta:g}; they "
                    "are the same: pass one of them"
                )
            self.base = theta
        if self.base <= 0:
            raise OptionError(f"positions.base is {self.base}; it must be above 0")
        if self.width is not None and self.width % 2:
            raise OptionError(_odd("positions.width", self.width))
        if self.frequencies is None:
            return
        if entries["rope_type"] != "default" or self.base != 10000.0:
            raise OptionError(
                "positions.frequencies is given with base or scaling, from which frequencies would "
                "follow; keep one of them"
            )
        if self.width is not None and self.width != 2 * self.frequencies.size:
            raise ShapeError(
                f"positions.frequencies has {self.frequencies.size} numbers but width is "
                f"{self.width}; there must be one for each of its {self.width // 2} pairs"
            )

    def parameters(self) -> dict[str, Array]:
        """None: angles are not differentiated."""
        return {}

    def fits(self, width: int, shape: tuple[int, ...]) -> None:
        turned = self.turned(width)
        if turned > width:
            raise ShapeError(
                f"positions turn {turned} features but queries and keys are {width} wide"
            )
        if turned % 2:
            raise ShapeError(_odd("the width of queries and keys", turned))
        *lead, _, queries, keys = shape
        for name, rows, what in (
            ("query_positions", queries, "queries"),
            ("key_positions", keys, "keys"),
        ):
            given = getattr(self, name)
            if given is None:
                continue
            if given.shape[-1] != rows:
                raise ShapeError(
                    f"positions.{name} has {given.shape[-1]} numbers in a row but there are "
                    f"{rows} {what}; there must be one for each"
                )
            try:
                np.broadcast_to(given, (*lead, rows))
            except ValueError:
                raise ShapeError(
                    f"positions.{name} has shape {given.shape}, which does not broadcast to "
                    f"{(*lead, rows)}, the leading axes and the rows"
                ) from None

    def turned(self, width: int) -> int:
        """How many features of a row of this width are turned."""
        if self.frequencies is not None:
            return 2 * self.frequencies.size
        if self.width is not None:
            return self.width
        return int(width * dict(self._entries).get("partial_rotary_factor", 1.0))

    def frequencies_of(self, width: int, length: int) -> NDArray[np.float64]:
        """Radians per position of each pair, in rows of this width of a text of this length."""
        if self.frequencies is not None:
            return self.frequencies.astype(np.float64)
        # Only two kinds of scaling look at the length; for the others one entry is kept.
        length = length if self.depends_on_length else 0
        return rotary.frequencies(self.base, self.turned(width), self._entries, length)

    def _stated(self) -> dict[str, Any]:
        usual = {"base": 10000.0, "interleaved": False}
        names = list(signature(Rotary).parameters)
        own = {name: x for name in names if (x := getattr(self, name)) is not None}
        return {name: x for name, x in own.items() if name not in usual or x != usual[name]}


def _odd(name: str, width: int) -> str:
    return (
        f"{name} is {width}, but features are turned in pairs; pass an even "
        f"positions.width, such as {width - 1}"
    )


@answering
class Alibi(Positions):
    """Each logit is lowered by ``slope·|i − j|``, where i and j are the positions of query and key.

    Parameters
    ----------
    slopes : float or array_like (H,), optional
        One for each query head. None: 2^(−8n / H) for n = 1 … H if H is a power of two; if not,
        those of the next smaller power of two, then every second one of twice as many heads.

    References
    ----------
    Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation" (2021).

    Examples
    --------
    >>> import numpy as np, regard
    >>> x = np.ones((2, 3, 4))  # two heads
    >>> call = {"positions": Alibi(), "causal": True}
    >>> regard.attention(x, x, x, return_weights=True, **call).weights[:, 2].round(3)
    array([[0.313, 0.333, 0.354],
           [0.332, 0.333, 0.335]])
    """

    def __init__(self, slopes: Any = None) -> None:
        self.slopes = None
        if slopes is not None:
            self.slopes = own_finite("positions.slopes", slopes)
            if self.slopes.ndim > 1:
                raise ShapeError(
                    f"positions.slopes has shape {self.slopes.shape} but must be (H,), one for "
                    "each query head"
                )

    def parameters(self) -> dict[str, Array]:
        """The slopes, if they were given."""
        return {} if self.slopes is None else {"slopes": self.slopes}

    def fits(self, width: int, shape: tuple[int, ...]) -> None:
        if self.slopes is not None and self.slopes.size not in (1, shape[-3]):
            raise ShapeError(
                f"positions.slopes has {self.slopes.size} numbers but there are {shape[-3]} query "
                "heads; there must be one for each"
            )

    def slopes_of(self, heads: int) -> Array:
        """The slope of each query head, (H,)."""
        return np.broadcast_to(
            distances.slopes(heads) if self.slopes is None else self.slopes, (heads,)
        )


@answering
class RelativeBias(Positions):
    """Each logit is raised by a number from a table: one for each head and bucket of distances.

    Small distances have a bucket each; from half of the buckets on, buckets grow with the logarithm
    of the distance, and the last one is of all distances from `max_distance` on.

    Parameters
    ----------
    table : array_like, (H, buckets)
        Learned. T5's ``relative_attention_bias.weight``, transposed.
    bidirectional : bool
        True, as in an encoder: the second half of the buckets is for keys after the query. False,
        as in a decoder: all keys after the query are in bucket 0.
    max_distance : int

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2019), section 2.1.

    Examples
    --------
    >>> import numpy as np, regard
    >>> x, table = np.ones((3, 2)), np.array([[0.0, 1.0, 2.0, 3.0]])
    >>> bias = RelativeBias(table, bidirectional=False)
    >>> regard.attention(x, x, x, positions=bias, return_weights=True).weights.round(3)
    array([[0.333, 0.333, 0.333],
           [0.576, 0.212, 0.212],
           [0.665, 0.245, 0.09 ]])
    """

    def __init__(self, table: Any, bidirectional: bool = True, max_distance: int = 128) -> None:
        table = own_finite("positions.table", table)
        self.table = own_array("positions.table", table, 2, "(H, buckets), a row for each head")
        self.bidirectional = as_flag("positions.bidirectional", bidirectional)
        least = 4 if self.bidirectional else 2
        buckets = self.table.shape[1]
        if buckets < least or buckets % 2:
            raise ShapeError(
                f"positions.table has {buckets} columns, one for each bucket; there must be an "
                f"even number of them, {least} or more"
            )
        exact = buckets // least
        self.max_distance = as_int("positions.max_distance", max_distance, exact + 1)

    def parameters(self) -> dict[str, Array]:
        """The table."""
        return {"table": self.table}

    def fits(self, width: int, shape: tuple[int, ...]) -> None:
        if len(self.table) != shape[-3]:
            turned = self.table.shape[1] == shape[-3]
            raise ShapeError(
                f"positions.table has {len(self.table)} rows but there are {shape[-3]} query heads;"
                f" there must be one for each{'; pass table.T' if turned else ''}"
            )

    def buckets(self, ahead: Array) -> NDArray[np.int64]:
        """The bucket of each difference between the position of a key and that of a query."""
        return distances.buckets(ahead, self.table.shape[1], self.bidirectional, self.max_distance)


class Absolute(Positions):
    """The base of positions that are added to embeddings: the vector of place i to row i."""

    def fits(self, width: int, shape: tuple[int, ...]) -> None:
        raise OptionError(
            f"positions={type(self).__name__} adds vectors to embeddings, which are not here; pass "
            "it to MultiHeadAttention or to a Problem with embeddings"
        )

    def given(self, rows: int, width: int) -> dict[str, Array]:
        """What their declared steps are given, for embeddings of this shape."""
        raise NotImplementedError


@answering
class Learned(Absolute):
    """A learned vector is added to the embedding of each token, before any projection.

    For `MultiHeadAttention` and problems with embeddings; a context is left alone.

    Parameters
    ----------
    vectors : array_like, (L, M)
        One for each token, as wide as embeddings; pass the first L rows of a longer table.

    References
    ----------
    Gehring et al., "Convolutional Sequence to Sequence Learning" (2017); Radford et al., GPT-2.

    Examples
    --------
    >>> import numpy as np, regard
    >>> layer = regard.MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
    >>> layer(np.zeros((2, 2)), positions=Learned([[0.0, 1.0], [2.0, 3.0]]), causal=True).round(3)
    array([[0.   , 1.   ],
           [1.998, 2.998]])
    """

    def __init__(self, vectors: Any) -> None:
        vectors = own_finite("positions.vectors", vectors)
        self.vectors = own_array("positions.vectors", vectors, 2, "(L, M), a row for each token")

    def given(self, rows: int, width: int) -> dict[str, Array]:
        if self.vectors.shape != (rows, width):
            longer = len(self.vectors) > rows and self.vectors.shape[1] == width
            raise ShapeError(
                f"positions.vectors has shape {self.vectors.shape} but embeddings have "
                f"{(rows, width)}; they must match{f': pass vectors[:{rows}]' if longer else ''}"
            )
        return {"positions_vectors": self.vectors}


@answering
class Sinusoidal(Absolute):
    """Waves of the position are added to embeddings: sin(i·f) to even features, cos(i·f) to odd.

    Features 2p and 2p + 1 of embeddings that are M wide have f = base^(−2p / M); `base` is a float.
    Accepted wherever `Learned` is.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.5.

    Examples
    --------
    >>> import numpy as np, regard
    >>> layer = regard.MultiHeadAttention(np.eye(2), np.eye(2), np.eye(2))
    >>> layer(np.zeros((2, 2)), positions=Sinusoidal(), causal=True).round(3)
    array([[0.   , 1.   ],
           [0.489, 0.733]])
    """

    def __init__(self, base: float = 10000.0) -> None:
        self.base = own_number("positions.base", base)
        if self.base <= 0:
            raise OptionError(f"positions.base is {self.base}; it must be above 0")

    def parameters(self) -> dict[str, Array]:
        """None: waves are not differentiated."""
        return {}

    def given(self, rows: int, width: int) -> dict[str, Array]:
        features = np.arange(width)
        return {
            "embedding_positions": np.arange(float(rows)),
            "wave_frequencies": self.base ** (-(features // 2 * 2) / width),
            "wave_starts": np.where(features % 2, np.pi / 2, 0.0),  # a cosine is ahead of a sine
        }


# By name.
KNOWN = {one.__name__: one for one in (Rotary, Alibi, RelativeBias, Learned, Sinusoidal)}


def as_positions(value: Any) -> Positions | None:
    """What `positions=` was given; None for none."""
    positions: Positions | None = as_part("positions", "none", value, Positions, KNOWN)
    return positions

"""Small random problems for the adapters of the corpus, and their right results in plain loops.

Owns which fields a problem has, how their sizes are drawn, and how far an answer is from the right
one. What an adapter reads says what its code is meant to do; what values cannot tell, such as which
columns are turned together, is a `Reading`. Results come from `oracle` and `backward_oracle`;
nothing here knows the library under test.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backward_oracle import differentiate
from oracle import attend

# Code in float32 is right, and one in half precision, of which a step is off by 1e-3, is not.
SAME, OTHER = 2e-5, 1e-4
PAST = 3


class Reading(NamedTuple):
    """What code does with positions without being handed anything."""

    rotary: str = ""  # "halves" or "pairs": which columns are turned together
    alibi: bool = False


PLAIN, TURNED = Reading(), (Reading("halves"), Reading("pairs"))


class Sizes(NamedTuple):
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    value_width: int
    model: int | None = None  # None: as wide as all heads together


# The first fits every code; code may refuse any other.
SIZES = (
    Sizes(2, 2, 2, 5, 5, 4, 4),
    Sizes(1, 3, 3, 4, 7, 4, 4),
    Sizes(1, 4, 2, 5, 5, 4, 4),
    Sizes(2, 2, 2, 3, 6, 6, 3),
    Sizes(2, 1, 1, 6, 4, 2, 2),
    Sizes(1, 4, 2, 4, 6, 2, 2, 6),
    Sizes(2, 3, 3, 9, 9, 2, 2),
)
FEWER = 3  # with JAX, which compiles every operation for every shape


class Task:
    """One problem. A field is made when it is read, always the same, and `asked` remembers it."""

    def __init__(self, seed: int, library: str, stated: Mapping[str, Any], known: set[str]) -> None:
        self.seed, self.library, self.stated = seed, library, stated
        self.asked: set[str] = set()
        sizes = SIZES[seed % len(SIZES)]
        if heads := stated.get("heads"):
            sizes = sizes._replace(heads=heads, groups=heads)
        of_tokens = "embeddings" in known and "context" not in known
        causal = stated.get("causal") is True and "offset" not in known
        if of_tokens or causal or not known.isdisjoint({"rotary", "positions", "past"}):
            sizes = sizes._replace(keys=sizes.queries)
        elif known & {"window", "causal"} or "causal" in stated:  # no query sees nothing
            sizes = sizes._replace(queries=min(sizes.queries, sizes.keys))
        self.sizes = sizes
        self.known = known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.asked.add(name)
        return given(self.made(name), self.library)

    def made(self, name: str) -> Any:
        """A field as NumPy's array, or as a number; drawn from its own name and the seed."""
        B, H, G, L, S, D, E, M = self.sizes
        M = M or H * D
        rng = np.random.default_rng([self.seed, *name.encode()])
        columns = {"q": H * D, "k": G * D, "v": G * E, "o": M}
        keys = S + PAST * ("past" in self.known)
        shapes = {
            "query": (B, H, L, D),
            "key": (B, G, S, D),
            "value": (B, G, S, E),
            "bias": (B, H, L, keys),
            "embeddings": (B, L, M),
            "context": (B, S, M),
            "grad_output": (B, H, L, E),
        }
        if name in shapes:
            return rng.normal(size=shapes[name])
        if name.startswith("W_"):
            rows = H * E if name == "W_o" else M
            return rng.normal(size=(rows, columns[name[-1]])) * 1.5 / np.sqrt(rows)
        if name.startswith("b_"):
            return rng.normal(size=columns[name[-1]])
        if name == "past":
            return rng.normal(size=(B, G, PAST, D)), rng.normal(size=(B, G, PAST, E))
        if name == "lengths":
            return rng.integers(max(1, S - 2), S + 1, B)
        if name == "key_mask":
            return np.arange(S) < self.made("lengths")[:, None]
        if name == "mask":
            seen = rng.random((B, 1, L, keys)) < 0.6
            i = np.arange(L)
            seen[..., i, np.minimum(i, keys - 1)] = seen[..., 0] = True
            return seen
        if name == "rotary":
            angles = angles_of(L, D, keys - S)
            return np.cos(angles), np.sin(angles)
        if name == "positions":
            return np.tile(np.arange(L) + keys - S, (B, 1))
        numbers = {
            "heads": H,
            "key_heads": G,
            "causal": self.seed % 3 != 0,
            "window": ((1, 1), (2, 2), (0, 0))[self.seed % 3],
            "offset": (0, max(0, S - L))[self.seed % 2],
            "scale": round(0.3 + rng.random(), 2),
            "softcap": round(1 + rng.random(), 2),
        }
        if name not in numbers:
            raise AttributeError(f"a task has no {name}")
        return numbers[name]


def given(value: Any, library: str) -> Any:
    """NumPy's arrays as those of a library."""
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(given(one, library) for one in value)
    if not isinstance(value, np.ndarray) or library == "numpy":
        return value
    module = importlib.import_module("torch" if library == "torch" else "jax.numpy")
    return module.asarray(value)


def expected(task: Task, reading: Reading = PLAIN) -> dict[str, np.ndarray]:
    """What code that reads these fields should return: an output, or gradients by their names."""
    asked, made = task.asked, task.made
    H, G = task.sizes.heads, task.sizes.groups

    def projected(tokens: str, letter: str, heads: int) -> np.ndarray:
        columns = made(tokens) @ made(f"W_{letter}")
        if f"b_{letter}" in asked:
            columns = columns + made(f"b_{letter}")
        return np.stack(np.split(columns, heads, axis=-1), axis=1)

    if "embeddings" in asked:
        other = "context" if "context" in asked else "embeddings"
        query = projected("embeddings", "q", H)
        key, value = projected(other, "k", G), projected(other, "v", G)
    else:
        query, key, value = made("query"), made("key"), made("value")
    if reading.rotary:
        start = PAST * ("past" in asked)
        query, key = (rotated(x, start, reading.rotary) for x in (query, key))
    if "past" in asked:  # its keys are turned already
        old_keys, old_values = made("past")
        key = np.concatenate([old_keys, key], axis=-2)
        value = np.concatenate([old_values, value], axis=-2)

    length, size = query.shape[-2], key.shape[-2]
    options = rules(task, length, size)
    if reading.alibi:
        apart = np.abs(
            np.subtract.outer(np.arange(length) + options.get("offset", 0), np.arange(size))
        )
        slopes = 2.0 ** (-8.0 * np.arange(1, H + 1) / H)
        options["bias"] = options.get("bias", 0) - slopes[:, None, None] * apart
    if "grad_output" in asked:
        unit = float(np.finfo(np.float64).eps)
        exact, _ = differentiate(query, key, value, made("grad_output"), unit, **options)
        return {name: getattr(exact, name).astype(float) for name in ("query", "key", "value")}
    output = attend(query, key, value, **options).output
    if "embeddings" in asked:
        output = np.concatenate(list(np.moveaxis(output, 1, 0)), axis=-1)
    if "W_o" in asked:
        output = output @ made("W_o")
        output = output + made("b_o") if "b_o" in asked else output
    return {"output": output}


def rules(task: Task, length: int, size: int) -> dict[str, Any]:
    """Who sees whom, and what scores become, as options of the oracle."""
    asked, made, stated = task.asked, task.made, task.stated
    options: dict[str, Any] = {}
    seen = np.ones((task.sizes.batch, 1, length, size), bool)
    if "mask" in asked:
        seen &= made("mask")
    if "key_mask" in asked:
        seen &= made("key_mask")[:, None, None, :]
    options["mask"] = seen
    if "lengths" in asked:
        options["lengths"] = made("lengths")
    if "bias" in asked:
        options["bias"] = made("bias")
    if "softcap" in asked:
        options["softcap"] = made("softcap")
    if "window" in asked:
        options["window"] = made("window")
    meant = stated.get("scale")
    if "scale" in asked:
        options["scale"] = made("scale")
    elif meant is not None:
        options["scale"] = 1.0 if meant == "none" else meant
    options["causal"] = made("causal") if "causal" in asked else bool(stated.get("causal"))
    if "offset" in asked:
        options["offset"] = made("offset")
    elif stated.get("causal") == "end" or "past" in asked:
        options["offset"] = size - length
    return options


def angles_of(tokens: int, width: int, start: int) -> np.ndarray:
    """By how much each token turns each pair of columns."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / width)
    return (start + np.arange(tokens))[:, None] * frequencies


def rotated(x: np.ndarray, start: int, pairs: str) -> np.ndarray:
    """Pairs of columns, neighbours or half the width apart, turned by the angle of their row."""
    out, half = np.empty_like(x), x.shape[-1] // 2
    for pair, angle in enumerate(angles_of(x.shape[-2], x.shape[-1], start).T):
        one, two = (2 * pair, 2 * pair + 1) if pairs == "pairs" else (pair, pair + half)
        a, b, c, s = x[..., one], x[..., two], np.cos(angle), np.sin(angle)
        out[..., one], out[..., two] = a * c - b * s, b * c + a * s
    return out


class Answer(NamedTuple):
    """A problem, and what an adapter returned for it, or the text of an error."""

    task: Task
    found: Any
    error: str = ""


def answers(
    function: Any,
    call: Callable[..., Any],
    library: str,
    stated: Mapping[str, Any],
    many: int = len(SIZES),
) -> list[Answer]:
    """What the code answers to each problem; sizes follow from the fields that it reads."""

    def answer(seed: int, known: set[str]) -> Answer:
        task = Task(seed, library, stated, known)
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings(), ways_of(library):
                warnings.simplefilter("ignore")
                return Answer(task, call(function, task))
        except Exception as error:  # the code of a case may raise anything
            return Answer(task, None, f"{type(error).__name__}: {error}")

    known = answer(0, set()).task.asked
    return [answer(seed, known) for seed in range(min(many, FEWER) if library == "jax" else many)]


@contextlib.contextmanager
def ways_of(library: str) -> Iterator[None]:
    """JAX with float64, and nothing compiled: each problem has other shapes."""
    if library != "jax":
        yield
        return
    jax = importlib.import_module("jax")
    with jax.enable_x64(True), jax.disable_jit():
        yield


def reading_of(found: Sequence[Answer]) -> Reading:
    """The reading under which the most problems are right."""
    asked = set().union(*(one.task.asked for one in found))
    tried = TURNED if "rotary" in asked else (PLAIN, *TURNED, Reading(alibi=True))
    best, fewest = PLAIN, len(found) + 1
    for reading in tried:
        wrong = sum(far > SAME for far in distances(found, reading))
        if wrong < fewest:
            best, fewest = reading, wrong
        if not wrong:
            break
    return best


def distances(found: Sequence[Answer], reading: Reading) -> list[float]:
    """How far each answer is from the right one; NaN where the code raised."""
    return [np.nan if one.error else distance(one, expected(one.task, reading)) for one in found]


def distance(answer: Answer, right: Mapping[str, np.ndarray]) -> float:
    """The largest difference of any number; infinite for another shape, or what is no number.

    A text that attends to itself may have anything in the rows of its padding.
    """
    task, largest = answer.task, 0.0
    parts = answer.found if isinstance(answer.found, dict) else {"output": answer.found}
    for name, one in right.items():
        if name not in parts:
            continue
        got = parts[name]
        got = np.asarray(got.detach() if hasattr(got, "detach") else got, float)
        if got.shape != one.shape or not np.isfinite(got).all():
            return np.inf
        apart = np.abs(got - one)
        if task.asked & {"key_mask", "lengths"} and task.sizes.queries == task.sizes.keys:
            real = np.arange(task.sizes.queries) < task.made("lengths")[:, None]
            apart = apart * (real[..., None] if apart.ndim == 3 else real[:, None, :, None])
        largest = max(largest, float(apart.max(initial=0)))
    return largest


def is_right(found: Sequence[Answer], reading: Reading) -> bool:
    """Whether the simplest problem, and every other that the code takes, is right."""
    far = distances(found, reading)
    return far[0] <= SAME and all(one <= SAME or np.isnan(one) for one in far)


def differs(found: Sequence[Answer], right: Sequence[Answer], reading: Reading) -> bool:
    """Whether an answer is clearly not the right one, where right code has an answer."""
    return any(
        bool(one.error) or far > OTHER
        for one, far, other in zip(found, distances(found, reading), right, strict=True)
        if not other.error
    )

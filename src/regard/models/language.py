"""A language model: text in; logits, the next tokens and explanations out.

Owns the public methods, the caches of keys and values, and the loop that generates. `text` makes
tokens, `layers` computes, `generation` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np

from regard.boundary.arguments import as_int, as_integers
from regard.boundary.arrays import Array
from regard.compute.kv_cache import KVCache
from regard.compute.kv_step import step
from regard.errors import DtypeError, OptionError, safe_text
from regard.explanation.labels import as_index
from regard.models.architecture import Architecture
from regard.models.explaining import Read, counted, one_layer, whole
from regard.models.generation import (
    MOST_CANDIDATES,
    Candidate,
    Generation,
    Sampling,
    Step,
    candidates,
    ended_by,
    held_back,
    padded,
    step_of,
)
from regard.models.layers import Stack
from regard.models.text.chat import Template
from regard.models.text.tokenizer import Tokenizer, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.compute.option_types import ProblemOptions
    from regard.faces import Explanation

    Messages = Sequence[Mapping[str, str]]

    class Writing(TypedDict, total=False):
        """The options of `generate`."""

        max_new_tokens: int
        temperature: float
        top_k: int | None
        top_p: float | None
        seed: int
        stop: str | Sequence[str]
        stop_at_eos: bool
        stream: Callable[[str], Any] | None


# Hidden states of all layers that a run keeps for its explanations.
KEPT_STATES = 2**28
_CONTEXT = "max_position_embeddings"


@dataclass(frozen=True, eq=False)
class Memory:
    """The keys and values of texts so far, of every layer."""

    stack: Stack
    caches: tuple[KVCache, ...]

    @classmethod
    def empty(cls, stack: Stack) -> Memory:
        config = stack.config
        caches = (
            KVCache(positions=turn, window=None if left is None else (left, 0))
            for turn, left in zip(config.rotary, config.windows, strict=True)
        )
        return cls(stack, tuple(caches))

    def truncate(self, length: Any) -> None:
        """Forget all but the first tokens."""
        for cache in self.caches:
            cache.truncate(length)

    def attend(
        self, lengths: NDArray[np.int64] | None = None
    ) -> Callable[[int, Array, Array, Array], Array]:
        """Attention of new tokens to all so far; `lengths` of them are real in each text."""
        config = self.stack.config
        common = {"scale": config.scale, "softcap": config.softcap, "lengths": lengths}
        common = {name: one for name, one in common.items() if one is not None}
        options: list[dict[str, Any]] = [
            common | {"sink": one.given["sink"]} if "sink" in one.given else common
            for one in self.stack.layers
        ]

        def attend(number: int, query: Array, key: Array, value: Array) -> Array:
            cache = self.caches[number]
            if lengths is None:
                return step(cache, query, key, value, **options[number])
            cache.append(key, value, lengths=lengths)
            output: Array = cache.attend(query, **options[number])
            return output

        return attend


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A text as a model read it: logits and candidates at each token, and every head explained."""

    model: LanguageModel
    text: str
    tokens: Tokens
    memory: Memory
    last: Array  # states of the last layer (L, M)
    states: tuple[Array, ...] = ()  # the input of each layer (L, M), if they are kept

    def logits(self, position: int | None = -1) -> Array:
        """How likely each token is next: (V,) after the token at `position`; None: (L, V)."""
        if position is None:
            return self.model.stack.logits(self.last)
        return self.model.stack.logits(self.last[self._at(position)])

    def candidates(self, position: int = -1, count: int = MOST_CANDIDATES) -> tuple[Candidate, ...]:
        """The tokens that are most likely after the one at `position`."""
        count = as_int("count", count, 1)
        return candidates(self.logits(position), count, self.model.token)

    @overload
    def explain(self) -> Explanation: ...
    @overload
    def explain(
        self, layer: int, head: int | None = None, **options: Unpack[ProblemOptions]
    ) -> Explanation: ...
    def explain(
        self, layer: int | None = None, head: int | None = None, **options: Any
    ) -> Explanation:
        """Every step of one layer's attention; without a layer, of the whole model.

        The steps of layer 2 are then called `2.scores` and so on, from `embeddings` to `logits`;
        all are computed in float64 when they are asked for.
        """
        stack = self.model.stack
        read = Read(stack, self.text, self.tokens, self.model.tokenizer.name)
        if layer is None:
            return whole(read)
        number = counted("layer", layer, stack.config.layers)
        if not self.states:
            raise OptionError("the states of this run were not kept; run the whole text at once")
        return one_layer(read, self.states[number], number, head, options)

    def _at(self, position: int) -> int:
        at = as_index("position", position)
        if not -len(self.tokens) <= at < len(self.tokens):
            raise OptionError(f"position is {at}, but the text has {len(self.tokens)} tokens")
        return at

    def __repr__(self) -> str:
        return f"Run({safe_text(repr(self.text), 80)}: {len(self.tokens)} tokens, {self.model!r})"


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A decoder of one of the families, in NumPy; see `regard.models.load`."""

    path: str
    config: Architecture
    stack: Stack
    tokenizer: Tokenizer
    ends: tuple[int, ...] = ()  # tokens that end a text
    template: Template | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of all numbers that are computed."""
        return self.stack.dtype

    def tokens(self, text: str, *, truncate: bool = False) -> Tokens:
        """The tokens of a text with their ids."""
        return self.tokenizer([_text(text)], self.config.longest, _CONTEXT, truncate=truncate)[0]

    def token(self, number: int) -> str:
        """The text of a token, or its name if it has none."""
        return self.tokenizer.text([number]) or self.tokenizer.name(number)

    def run(self, text: str | Tokens, *, after: Run | None = None, truncate: bool = False) -> Run:
        """Read a text, from the beginning or after what an earlier run has read.

        Parameters
        ----------
        text : str, or Tokens
        after : Run, optional
            Its keys and values are kept, not computed again.
        truncate : bool
            Cut a text that is too long; otherwise it is an error.

        Returns
        -------
        Run
            With `logits`, `candidates` and `explain`.

        Raises
        ------
        OptionError
            If the text has more tokens than the model takes.
        """
        tokens, said = self._tokens(text, truncate), text if isinstance(text, str) else ""
        start = 0 if after is None else len(after.tokens)
        self._check_length(start + len(tokens))
        memory = Memory.empty(self.stack) if after is None else after.memory
        if after is not None:
            memory.truncate(start)
        x = self.stack.embed(tokens.ids[None], start + np.arange(len(tokens)))
        kept = x.nbytes * (self.config.layers + 1) <= KEPT_STATES and after is None
        states: list[Array] = []
        for state in self.stack.states(x, memory.attend()):
            states = [*states, state[0]] if kept else [state[0]]
        last = states[-1]
        if after is not None:
            tokens, said = _joined(after.tokens, tokens), after.text + said
            last = np.concatenate([after.last, last])
        return Run(self, said, tokens, memory, last, tuple(states[:-1]))

    def logits(self, text: str | Tokens, position: int | None = -1) -> Array:
        """How likely each token is after the one at `position`: (V,); None: of all, (L, V)."""
        return self.run(text).logits(position)

    def explain(
        self,
        text: str,
        layer: int,
        head: int | None = None,
        *,
        truncate: bool = False,
        **options: Unpack[ProblemOptions],
    ) -> Explanation:
        """Every step of the attention of one layer, for one text; see `Run.explain`."""
        return self.run(text, truncate=truncate).explain(layer, head, **options)

    @overload
    def generate(self, text: str | Run | Tokens, **options: Unpack[Writing]) -> Generation: ...
    @overload
    def generate(
        self, text: list[str | Tokens] | tuple[str | Tokens, ...], **options: Unpack[Writing]
    ) -> list[Generation]: ...
    def generate(
        self,
        text: Any,
        *,
        max_new_tokens: int = 50,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_at_eos: bool = True,
        stream: Callable[[str], Any] | None = None,
    ) -> Any:
        """Write on after a text, token by token.

        Parameters
        ----------
        text : str, or Run, or a sequence of str
            The keys and values of a run are used, not computed again. Several texts are computed
            together, each as if it were alone.
        max_new_tokens : int
        temperature : float
            0: always the most likely token, the first of equal ones. Else logits are divided by it,
            and a token is drawn.
        top_k, top_p : int and float, optional
            Draw only from the k most likely tokens, or from the fewest that have together p.
        seed : int
            The same seed draws the same tokens.
        stop : str or sequence of str
            Texts that end it; they are left out.
        stop_at_eos : bool
            Whether the model's token for the end ends it.
        stream : callable, optional
            Is given the text in pieces, as soon as they are complete. For one text.

        Returns
        -------
        Generation, or a list of them
            `text`, `tokens`, `steps` with candidates and probabilities, and `reason`.

        Raises
        ------
        OptionError, DtypeError
            If a text is too long, or an option makes no sense.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        stop = _stops(stop)
        most = as_int("max_new_tokens", max_new_tokens, 1)
        if isinstance(text, (str, Run, Tokens)):
            if isinstance(text, Run):
                memory, last = text.memory, text.last[-1:]
                memory.truncate(len(text.tokens))
                start = np.array([len(text.tokens)])
            else:
                memory, last, start = self._prompts([self._tokens(text)])
            writers = [_Writer(self, sampling, stop, stop_at_eos, stream, 0)]
            return self._written(memory, last, start, writers, most)[0]
        if not isinstance(text, Sequence) or not text:
            raise DtypeError(f"text must be a string or several, not {safe_text(repr(text), 60)}")
        if stream is not None:
            raise OptionError("stream is for one text; generate several without it")
        memory, last, start = self._prompts([self._tokens(one) for one in text])
        writers = [
            _Writer(self, sampling, stop, stop_at_eos, None, number) for number in range(len(text))
        ]
        return self._written(memory, last, start, writers, most)

    def chat(self, messages: Messages, **options: Unpack[Writing]) -> Generation:
        """Answer a conversation: messages with "role" and "content", by the model's own template.

        Options are those of `generate`.
        """
        return self.generate(self.prompt(messages), **options)

    def prompt(self, messages: Messages) -> Tokens:
        """The tokens of a conversation as the model was trained to read it."""
        if self.template is None:
            raise OptionError(f"{safe_text(self.path, 200)} has no chat template; use generate")
        return self.tokenizer.plain(self.template(messages))

    # --- inside --------------------------------------------------------------------------------

    def _tokens(self, text: Any, truncate: bool = False) -> Tokens:
        if isinstance(text, Tokens):
            tokens = self.tokenizer.of_ids(text.ids)
            return replace(tokens, labels=text.labels)
        if isinstance(text, str):
            return self.tokens(text, truncate=truncate)
        return self.tokenizer.of_ids(as_integers("text", text, "a string, or ids of tokens"))

    def _check_length(self, length: int) -> None:
        if length > self.config.longest:
            raise OptionError(
                f"text has {length} tokens, but the model takes {self.config.longest} ({_CONTEXT})"
            )

    def _prompts(self, texts: Sequence[Tokens]) -> tuple[Memory, Array, NDArray[np.int64]]:
        """Memory of some texts, the states of their last tokens (B, M), and their lengths."""
        memory = Memory.empty(self.stack)
        ids, lengths = padded([one.ids for one in texts])
        for length in lengths:
            self._check_length(int(length))
        ragged = lengths if lengths.min() < ids.shape[1] else None
        x = self.stack.embed(ids, np.arange(ids.shape[1]))
        x = self.stack.run(x, memory.attend(ragged))
        return memory, x[np.arange(len(texts)), lengths - 1], lengths

    def _written(
        self,
        memory: Memory,
        last: Array,
        lengths: NDArray[np.int64],
        writers: list[_Writer],
        most: int,
    ) -> list[Generation]:
        attend = memory.attend()
        for number in count(1):
            logits = self.stack.logits(last)
            room = lengths < self.config.longest
            chosen = [
                writer.take(row, "length" if number == most else "" if free else "context")
                for writer, row, free in zip(writers, logits, room, strict=True)
            ]
            if all(writer.reason for writer in writers):
                return [writer.generation() for writer in writers]
            # What goes on beyond the end of a text is unused.
            at = np.minimum(lengths, self.config.longest - 1)
            x = self.stack.embed(np.array(chosen)[:, None], at[:, None])
            last = self.stack.run(x, attend)[:, 0]
            lengths = lengths + 1
        raise AssertionError

    def __repr__(self) -> str:
        config = self.config
        return (
            f"LanguageModel({safe_text(self.path, 200)}: {config.kind}, {config.layers} layers × "
            f"{config.heads} heads, {config.width} wide, {self.stack.kept})"
        )


class _Writer:
    """What is written after one text, token by token."""

    def __init__(
        self,
        model: LanguageModel,
        sampling: Sampling,
        stop: tuple[str, ...],
        stop_at_eos: bool,
        stream: Callable[[str], Any] | None,
        number: int,
    ) -> None:
        self.model, self.sampling, self.stop, self.stream = model, sampling, stop, stream
        self.ends = model.ends if stop_at_eos else ()
        self.random = sampling.generator(number)
        self.take_text = model.tokenizer.stream()
        self.ids: list[int] = []
        self.steps: list[Step] = []
        self.text = self.reason = ""
        self.told = 0  # characters that were streamed

    def take(self, logits: Array, reason: str) -> int:
        """Choose a token; `reason` says why it is the last, if it is."""
        if self.reason:
            return self.ids[-1]
        chosen = self.sampling.choose(logits, self.random)
        self.ids.append(chosen)
        self.steps.append(step_of(logits, chosen, self.model.token))
        self.text += self.take_text(chosen)
        self.reason = reason
        if chosen in self.ends:
            self.reason = "end"
        if self.reason:  # bytes of a character that will not be complete
            self.text = self.model.tokenizer.text(self.ids)
        if (place := ended_by(self.text, self.stop)) is not None:
            self.text, self.reason = self.text[:place], "stop"
        if self.stream is not None:
            until = len(self.text)
            until -= 0 if self.reason else held_back(self.text, self.stop)
            if until > self.told:
                self.stream(self.text[self.told : until])
                self.told = until
        return chosen

    def generation(self) -> Generation:
        return Generation(self.text, tuple(self.ids), tuple(self.steps), self.reason)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise DtypeError(f"text must be a string, not {safe_text(repr(text), 60)}")
    return text


def _stops(stop: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in found):
        raise DtypeError("stop must be texts, none of them empty")
    return found


def _joined(first: Tokens, second: Tokens) -> Tokens:
    pairs = ((getattr(first, name), getattr(second, name)) for name in ("ids", "types", "special"))
    return Tokens(first.labels + second.labels, *(np.concatenate(pair) for pair in pairs))

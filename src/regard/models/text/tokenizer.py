"""Text to tokens and back: a tokenizer of a directory or a GGUF file, run by `tokenizers`.

Owns which file is read and the check that token ids fit the embeddings. Must not know what is
computed from tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from regard.boundary.files import about, decode, read_file
from regard.boundary.parse import check_text
from regard.errors import OptionError, ProblemError, Setting, safe_text
from regard.models.files.safetensors import read_table

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Library


READY, VOCABULARY, SETTINGS = "tokenizer.json", "vocab.txt", "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 64 * 2**20
SPECIAL = ("[UNK]", "[CLS]", "[SEP]")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one text."""

    labels: tuple[str, ...]
    ids: NDArray[np.int64]  # (L,)
    types: NDArray[np.int64]  # (L,)
    special: NDArray[np.bool_]  # (L,): added by the model, such as [CLS]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def separators(self) -> NDArray[np.bool_]:
        """The special tokens after the first token."""
        return self.special & (np.arange(len(self)) > 0)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer for a model with `rows` word embeddings and `types` type embeddings."""

    path: str
    library: Library
    rows: int
    types: int
    whole_words: bool  # tokens are readable, unlike Ġcat or ▁cat

    def __call__(
        self, texts: Sequence[str], longest: int, limit: str, *, truncate: bool = False
    ) -> list[Tokens]:
        """The tokens of each text, at most `longest`; `limit` is the file with that limit."""
        for text in texts:
            check_text("text", text)
        with about(self.path), _plain_errors():
            encodings = self.library.encode_batch(list(texts))
        return [
            self._checked(text, self._cut(text, encoding, longest, limit, truncate))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def plain(self, text: str) -> Tokens:
        """The tokens of a text that has its special tokens already, such as a conversation."""
        check_text("text", text)
        with about(self.path), _plain_errors():
            encoding = self.library.encode(text, add_special_tokens=False)
        return self._checked(text, encoding)

    def of_ids(self, ids: NDArray[np.int64]) -> Tokens:
        """Tokens by their numbers, which are checked."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.rows:
            wrong = ids[(ids < 0) | (ids >= self.rows)][0]
            raise OptionError(
                f"id {wrong} is outside the vocabulary, which has 0 to {self.rows - 1}"
            )
        labels = tuple(
            self.text(ids[k : k + 1]).strip() or self.name(int(ids[k])) for k in range(len(ids))
        )
        return Tokens(labels, ids, np.zeros_like(ids), np.zeros(len(ids), np.bool_))

    def name(self, number: int) -> str:
        """A token as the vocabulary spells it; `#5` if there is none of that number."""
        return self.library.id_to_token(number) or f"#{number}"

    def text(self, ids: Sequence[int] | NDArray[np.int64]) -> str:
        """The text of tokens, without special ones; bytes that make no character are U+FFFD."""
        with about(self.path), _plain_errors():
            return str(self.library.decode([int(one) for one in ids], skip_special_tokens=True))

    def stream(self) -> Callable[[int], str]:
        """A function that takes one token after the other and gives the text that is complete."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def take(number: int) -> str:
            with about(self.path), _plain_errors():
                return stream.step(self.library, number) or ""

        return take

    def _cut(
        self, text: str, encoding: Encoding, longest: int, limit: str, truncate: bool
    ) -> Encoding:
        """The encoding, cut to the longest text: its first tokens and the special ones."""
        if len(encoding) <= longest:
            return encoding
        if not truncate:
            raise OptionError(
                f'text has {len(encoding)} tokens, but the model takes {longest} ({limit}): "'
                f'{safe_text(text, 40)}"; shorten it, or pass ',
                Setting("truncate", True),
                " to leave out the rest",
            )
        with about(self.path), _plain_errors():
            room = longest - self.library.num_special_tokens_to_add(False)
            if room < 0:
                raise ProblemError(f"adds special tokens that alone are more than {longest}")
            plain = self.library.encode(text, add_special_tokens=False)
            plain.truncate(room)
            return self.library.post_process(plain, None, True)

    def _checked(self, text: str, encoding: Encoding) -> Tokens:
        labels = tuple(encoding.tokens)
        special = np.array(encoding.special_tokens_mask, dtype=np.bool_)
        if not self.whole_words:  # label tokens by their text
            spans = zip(labels, encoding.offsets, special, strict=True)
            labels = tuple(
                label if own else text[start:end].strip() or label
                for label, (start, end), own in spans
            )
        ids, types = (np.array(own, np.int64) for own in (encoding.ids, encoding.type_ids))
        tokens = Tokens(labels, ids, types, special)
        with about(self.path):
            if not len(tokens):
                raise ProblemError("makes no tokens from a text, not even special ones")
            _check_rows("id", int(tokens.ids.max()), "word", self.rows)
            if self.types:
                _check_rows("type", int(tokens.types.max()), "type", self.types)
        return tokens


def read_tokenizer(folder: str, rows: int, types: int) -> Tokenizer:
    """The tokenizer of a directory, checked against the number of embeddings."""
    ready, vocabulary = os.path.join(folder, READY), os.path.join(folder, VOCABULARY)
    path = ready if os.path.lexists(ready) else vocabulary
    if not os.path.lexists(path):
        with about(folder):
            raise ProblemError(f"there is neither {READY} nor {VOCABULARY}")
    tokenizers = _library(path)
    with about(path):
        text = decode(read_file(path, MAX_TOKENIZER_BYTES))
    settings = {} if path == ready else _settings(folder)
    with about(path):
        with _plain_errors():
            if path == ready:
                library = tokenizers.Tokenizer.from_str(text)
            else:
                library = _from_vocabulary(text, settings)
            library.no_padding()
            library.no_truncation()
            ids = library.get_vocab(with_added_tokens=True).values()
            whole_words = isinstance(library.model, tokenizers.models.WordPiece)
        _check_rows("id", max(ids, default=0), "word", rows)
    return Tokenizer(path, library, rows, types, whole_words)


# How a GGUF file's `pre` cuts a text before its bytes are paired; None: as GPT-2.
_CUTS = {
    "gpt-2": None,
    "smollm": r"\p{N}",
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def tokenizer_of_gguf(path: str, said: Mapping[str, Any], rows: int) -> Tokenizer:
    """The tokenizer that a GGUF file has; one that is not known is refused by name."""
    tokenizers = _library(path)
    with about(path):
        kind, cut = (said.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if kind is None:
            raise ProblemError("has no tokenizer: tokenizer.ggml.model is missing")
        if kind != "gpt2" or cut not in _CUTS:
            raise ProblemError(
                f"has a tokenizer with tokenizer.ggml.model {safe_text(repr(kind), 40)} and "
                f"tokenizer.ggml.pre {safe_text(repr(cut), 40)}; supported is gpt2 with "
                f"{', '.join(_CUTS)}"
            )
        tokens, merges, kinds = (
            said.get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges", "token_type")
        )
        if not (_texts(tokens) and _texts(merges)):
            raise ProblemError("tokenizer.ggml.tokens and .merges are not two lists of texts")
        if not isinstance(kinds, list) or len(kinds) != len(tokens):
            raise ProblemError(
                "tokenizer.ggml.token_type does not have one number for each of "
                f"{len(tokens)} tokens"
            )
        _check_rows("id", len(tokens) - 1, "word", rows)
        with _plain_errors():
            library = _byte_pairs(tokens, merges, kinds, str(cut), tokenizers)
            start = said.get("tokenizer.ggml.bos_token_id")
            if said.get("tokenizer.ggml.add_bos_token") and isinstance(start, int):
                first = tokens[start]
                library.post_processor = tokenizers.processors.TemplateProcessing(
                    single=f"{first} $A", special_tokens=[(first, start)]
                )
    return Tokenizer(path, library, rows, 0, False)


def _texts(found: Any) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


def _byte_pairs(
    tokens: list[str], merges: list[str], kinds: list[int], cut: str, tokenizers: Any
) -> Library:
    """Pairs of bytes, joined in the order of the merges."""
    pairs = [tuple(one.split(" ", 1)) for one in merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    library: Library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    before, pattern = tokenizers.pre_tokenizers, _CUTS[cut]
    bytes_of = before.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, r"\p{N}"))
    steps = [bytes_of]
    if pattern is not None:
        steps.insert(0, before.Split(tokenizers.Regex(pattern), behavior="isolated"))
    library.pre_tokenizer = before.Sequence(steps)
    library.decoder = tokenizers.decoders.ByteLevel()
    # 3: control tokens, which are never text; 4: tokens of their own, which are.
    for kind, special in ((3, True), (4, False)):
        own = [t for t, one in zip(tokens, kinds, strict=True) if one == kind]
        library.add_tokens(
            [tokenizers.AddedToken(t, normalized=False, special=special) for t in own]
        )
    return library


def _library(path: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ProblemError(
            f"{safe_text(path, 200)}: reading it needs the library tokenizers; "
            'pip install "regard[models]"'
        ) from None
    return tokenizers


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn every error of the library into a ProblemError."""
    try:
        yield
    except (ProblemError, MemoryError):
        raise
    except BaseException as error:
        # A Rust panic is a BaseException.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ProblemError(f"is not a working tokenizer: {safe_text(error, 120)}") from None
        raise


def _from_vocabulary(text: str, settings: dict[str, Any]) -> Library:
    """BERT's WordPiece from a vocabulary with one token per line."""
    from tokenizers import BertWordPieceTokenizer

    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(lines)}
    for token in SPECIAL:
        if token not in vocabulary:
            raise ProblemError(f"has no line {token}, which every sentence needs")
    made = BertWordPieceTokenizer(
        vocab=vocabulary,
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    library: Library = made._tokenizer
    return library


def _settings(folder: str) -> dict[str, Any]:
    path, table = read_table(folder, SETTINGS, needed=False)
    with about(path):
        for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
            if not isinstance(table.get(key), bool | None):
                raise ProblemError(f"{key} must be true or false")
        return {key: value for key, value in table.items() if value is not None}


def _check_rows(what: str, largest: int, kind: str, rows: int) -> None:
    if largest >= rows:
        raise ProblemError(
            f"has a token with the {what} {largest}, but there are {rows} {kind} embeddings; the "
            "tokenizer and the weights do not belong together"
        )

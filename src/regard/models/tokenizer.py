"""Text to tokens: the tokenizer of a model directory, run by the library `tokenizers`.

Owns which file is read and the check that token ids fit the embeddings. Must not know what is
computed from tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.files import about, decode, read_file
from regard.boundary.parse import check_text
from regard.errors import OptionError, ProblemError, Setting, safe_text
from regard.models.safetensors import read_table

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
    try:
        import tokenizers
    except ImportError:
        raise ProblemError(
            f"{safe_text(path, 200)}: reading it needs the library tokenizers; "
            'pip install "regard[models]"'
        ) from None
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

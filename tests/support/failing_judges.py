"""Two judges that do not answer. Processes import them by name, so they are no part of a test."""

from __future__ import annotations

from attention_corpus import Case
from corpus.judges import Judged


def endless(case: Case, adapter: bool) -> Judged:
    """A judge that computes until its process is ended."""
    while True:
        pass


def raising(case: Case, adapter: bool) -> Judged:
    """A judge that fails with the name of the case."""
    raise KeyError(case.name)

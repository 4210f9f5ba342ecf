"""A teacher shows every step of attention over three words, and checks what students hand in."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import regard
from regard import masks

Vectors = NDArray[np.float64]

WORDS = ["she", "likes", "coffee"]


def lesson(vectors: Vectors) -> regard.Explanation:
    return regard.explain(
        vectors,
        vectors,
        vectors,
        mask=masks.Causal(),
        scale=0.5,
        softmax="unshifted",
        query_labels=WORDS,
        key_labels=WORDS,
        title="Who reads whom",
    )


def grade(homework: Callable[[Vectors, Vectors, Vectors], Vectors]) -> str:
    diagnosis = regard.diagnose(homework, causal=True)
    return f"{diagnosis.verdict}: {diagnosis.summary}"


def homework(q: Vectors, k: Vectors, v: Vectors) -> Vectors:
    output: Vectors = regard.softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v
    return output


vectors = np.random.default_rng(0).normal(size=(3, 4))
explanation = lesson(vectors)
shares: NDArray[np.floating] = explanation.steps["weights"].value
why: regard.Derivation = explanation.why("weights", "coffee", "she")
print(shares.round(2), why, why.numpy(), explanation.to_markdown("scores"), sep="\n")
print(explanation.without("she").steps["output"].value.shape, grade(homework))

learned = regard.explain(
    vectors, W_q=np.eye(4), W_k=np.eye(4), W_v=np.eye(4), heads=2, mask=masks.Causal()
)
print(learned["weights"].value.round(2))

small = regard.explain([[1.0, 0.0]], [[1.0, 0.0]], [[2.0]])
print(small.steps["output"].value.item())

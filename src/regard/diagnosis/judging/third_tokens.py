"""Whether the score of two tokens depends on a third one, by looking at what a softmax gets.

Must not know mistakes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.judging.added_scores import LOW, plain_probe, scores_inside

NEAR = 1e-5


def reads_third_tokens(tested: FunctionUnderTest, convention: Convention) -> bool | None:
    """Whether a token changes visible scores of others among themselves; None if none are seen."""
    probe = plain_probe(tested, convention)
    if probe is None or "embeddings" not in probe.inputs or "context" in probe.inputs:
        return None
    before = scores_inside(tested, convention, probe)
    rows = probe.inputs["embeddings"].copy()
    token = rows.shape[1] // 2
    rows[:, token] += np.random.default_rng(11).normal(size=rows[:, token].shape)
    other = replace(probe, inputs={**probe.inputs, "embeddings": rows}, name="a third token")
    after = None if before is None else scores_inside(tested, convention, other)
    if before is None or after is None or before.shape != after.shape:
        return None
    places = np.arange(before.shape[-1]) != token
    seen = (before > LOW) & (after > LOW) & places & places[: before.shape[-2], None]
    size = max(1.0, float(np.abs(before[seen]).max(initial=0)))
    return bool(np.abs(after - before)[seen].max(initial=0) > NEAR * size)

"""An attention with a fault that its author has not found; docs/diagnose.md diagnoses it."""

import numpy as np


def attention(q, k, v, mask=None):
    """Attention over (…, L, D) arrays, True in the mask = attend."""
    width = k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(width)
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True) @ v


def fixed(q, k, v, mask=None):
    """The same with the width read from the last axis."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True) @ v

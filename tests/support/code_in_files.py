"""Attention as code in a file of its own, which is read from there and judged."""

from __future__ import annotations

from pathlib import Path

import regard
from regard.diagnosis.process.target import load

BEGIN = """
import numpy as np


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads_of(x, n):
    return x.reshape(*x.shape[:-1], n, -1).swapaxes(-3, -2)


def merged(x):
    return x.swapaxes(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


def layer_norm(x, g=1.0, b=0.0, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * g + b


def rope(x, places, other=False):
    d = x.shape[-1]
    f = 10000.0 ** (-np.arange(0, d, 2) / d)
    f = np.tile(f, 2) if other else np.repeat(f, 2)
    a = np.asarray(places)[:, None] * f
    partner = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * np.cos(a) + partner * np.sin(a)
"""


def diagnosis_of(folder: Path, text: str, *changes: tuple[str, str]) -> regard.Diagnosis:
    """The verdict on the last function or class of some code, with other text in it.

    A method of it where the text ends with a comment: `# of Layer.generate`. Code that begins with
    documentation, which is that of the file, has none of the functions above.
    """
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path := folder / "attends.py").write_text(text if text.startswith('"') else BEGIN + text)
    last = [line for line in text.splitlines() if line.startswith(("def ", "class ", "# of "))][-1]
    name = last.split("(")[0].split(":")[0].split()[-1]
    return regard.diagnose(load(f"{path}:{name}"))

"""`regard info --verify`: every promise is checked, and a broken one is told."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from regard.testing import self_test as verification
from regard.testing.self_test import CHECKS, verify


def test_every_promise_is_kept_here():
    assert [check for check in verify() if not check.kept] == []
    assert list(CHECKS) == [*(f"G{number}" for number in range(1, 16)), "gradients"]


def changed(way):
    """Attention with something broken in it."""
    real = verification.attention

    def attention(query, key, value, **options):
        return way(real, query, key, value, options)

    return attention


def noisy(real, query, key, value, options):
    got = real(query, key, value, **options)
    if not isinstance(got, np.ndarray):
        return got
    return got * (1 + 1e-3 * np.random.default_rng().random(got.shape)).astype(got.dtype)


def leaking(real, query, key, value, options):
    mask = options.pop("mask", None)
    if mask is None:
        return real(query, key, value, **options)
    bias = np.where(mask, 0.0, -30.0)
    return real(query, key, value, bias=bias, **options)


def writing(real, query, key, value, options):
    if query.flags.writeable:
        query *= 1.0
    else:
        query.setflags(write=True)
        query += 1
    return real(query, key, value, **options)


def deaf(real, query, key, value, options):
    for name in ("scale", "softcap", "sink", "bias"):
        options.pop(name, None)
    return real(query, key, value, **options)


def forgiving(real, query, key, value, options):
    try:
        return real(query, key, value, **options)
    except (ValueError, TypeError):
        return value


def narrow(real, query, key, value, options):
    if query.dtype != np.float64:
        return real(query, key, value, **options)
    own = (one.astype(np.float32) for one in (query, key, value))
    got = real(*own, **options)
    return got.astype(query.dtype) if isinstance(got, np.ndarray) else got


def greedy(real, query, key, value, options):
    matrix = query @ key.swapaxes(-1, -2) if query.ndim == 3 and query.shape[1] > 999 else None
    got = real(query, key, value, **options)
    del matrix
    return got


def outside(real, query, key, value, options):
    got = real(query, key, value, **options)
    far = np.abs(query).max() > 1e9
    return got + 2 * np.abs(value).max() if far else got


def spilling(real, query, key, value, options):
    got = real(query, key, value, **options)
    return np.where(np.isnan(got).any(-1, keepdims=True), np.nan, got)


def careless(real, query, key, value, options):
    options.pop("precision", None)
    return real(query, key, value, **options)


def wide(real, query, key, value, options):
    if "out" in options:
        options["out"].base[:, -1] = 0
    return real(query, key, value, **options)


def quiet(real, query, key, value, options):
    np.seterr(all="ignore")
    return real(query, key, value, **options)


def test_a_wrong_gradient_is_found(monkeypatch):
    real = verification.gradients

    def wrong(*arrays, **options):
        got = real(*arrays, **options)
        return got._replace(key=got.key * 1.001)

    monkeypatch.setattr(verification, "gradients", wrong)
    assert [check.number for check in verify() if not check.kept] == ["gradients"]


def test_a_label_that_is_code_and_a_file_that_is_taken_are_found(monkeypatch):
    class Page:
        def to_html(self):
            return "<script>alert(1)</script>"

    monkeypatch.setattr(verification, "explain", lambda problem: Page())
    assert "G15" in {check.number for check in verify() if not check.kept}
    monkeypatch.undo()
    monkeypatch.setattr(verification.npz, "read", lambda file: {})
    assert "G15" in {check.number for check in verify() if not check.kept}


@pytest.mark.parametrize(
    ("way", "numbers"),
    [
        (noisy, {"G5", "G6", "G8"}),
        (leaking, {"G1", "G2"}),
        (outside, {"G3"}),
        (spilling, {"G4"}),
        (careless, {"G7"}),
        (writing, {"G12"}),
        (deaf, {"G9"}),
        (forgiving, {"G10"}),
        (wide, {"G11"}),
        (quiet, {"G13"}),
        (narrow, {"G6"}),
        (greedy, {"G14"}),
    ],
)
def test_a_broken_promise_is_found(monkeypatch, way, numbers):
    monkeypatch.setattr(verification, "attention", changed(way))
    asked = {number: CHECKS[number] for number in sorted(numbers)}
    monkeypatch.setattr(verification, "CHECKS", asked)
    with np.errstate():
        broken = {check.number for check in verify() if not check.kept}
    assert broken == numbers


def test_the_command_says_that_every_promise_is_kept_here():
    done = subprocess.run(
        [sys.executable, "-m", "regard", "info", "--verify"],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "Every promise is kept here." in done.stdout

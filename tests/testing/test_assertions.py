"""The assertions for other test suites, and the plugin that lists what they found."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import regard
import wrong_gradients as wrong
from regard.testing import assert_attention_correct, assert_gradients_correct

SUITE = """
import regard
from regard.testing import assert_attention_correct

def test_ours():
    assert_attention_correct(regard.attention)

def test_unscaled():
    assert_attention_correct(lambda q, k, v: regard.attention(q, k, v, scale=1.0))
"""


def test_right_gradients_pass_and_a_wrong_one_is_told_with_its_line():
    assert assert_gradients_correct(wrong.backward()).compared == ("query", "key", "value")
    with pytest.raises(AssertionError, match="is wrong at line"):
        assert_gradients_correct(wrong.backward("gradient_of_keys_not_scaled"))


def test_a_function_without_gradients_has_none_that_are_correct():
    with pytest.raises(AssertionError, match="attention has no gradients that were tried"):
        assert_gradients_correct(regard.attention)


def test_an_adapter_says_how_a_function_is_called():
    def attend(x, y, z):
        return regard.attention(x, y, z)

    found = assert_attention_correct(attend, call=lambda f, t: f(t.query, t.key, t.value))
    assert found.verdict == "right"
    with pytest.raises(AssertionError, match="could not be called"):
        assert_attention_correct(attend)


def test_a_wrong_attention_fails_and_a_kernel_that_moves_its_arrays_itself_is_called():
    def on_device(q, k, v):
        moved = [np.array(one, order="F") for one in (q, k, v)]
        return np.ascontiguousarray(regard.attention(*moved))

    assert assert_attention_correct(on_device).verdict == "right"
    with pytest.raises(AssertionError, match="is wrong"):
        assert_attention_correct(lambda q, k, v: regard.attention(q, k, v, scale=1.0))


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "1"), id="xdist", marks=pytest.mark.full),
    ],
)
def test_the_plugin_lists_every_finding_of_a_run(tmp_path, workers):
    if workers:
        pytest.importorskip("xdist")
    (tmp_path / "test_suite.py").write_text(SUITE)
    more = ["-p", "regard.testing.plugin", "-p", "no:cacheprovider", "--regard-findings", *workers]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *more, "test_suite.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    listed = done.stdout.partition("= regard =")[2]
    assert "attention is right" in listed
    assert "<lambda> is wrong" in listed

"""What an installation says of itself."""

from __future__ import annotations

import platform

import numpy as np
import pytest

import regard
from regard.compute import dispatch, native


def test_the_configuration_names_versions_and_every_kernel():
    config = regard.show_config("dict")
    assert config["python"] == platform.python_version()
    assert config["numpy"] == np.__version__
    assert tuple(config["kernels"]) == dispatch.kernel_names()
    assert config["kernels"]["reference"] == "usable"
    assert config["scores"]["dot"] == config["normalizers"]["softmax"] == "fused, reference"
    fused = {name for name, known in config["scores"].items() if known == "fused, reference"}
    assert fused == {"dot", "General", "Cosine", "Features"}
    others = [known for name, known in config["scores"].items() if name not in fused]
    assert config["normalizers"].pop("softmax") == config["normalizers"].pop("Sigmoid")
    assert {*others, *config["normalizers"].values()} == {"reference"}
    assert config["cpus"] >= 1
    assert config["threads"] == native.default_threads()


def test_the_configuration_is_printed_one_thing_a_line(capsys):
    assert regard.show_config() is None
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["numpy", np.__version__] for line in lines)
    assert any(line.split()[:2] == ["reference", "usable"] for line in lines)


def test_every_name_stands_apart_from_what_is_said_of_it(capsys):
    regard.show_config()
    lines = capsys.readouterr().out.splitlines()
    config = regard.show_config("dict")
    for name, state in {**config["kernels"], **config["extras"]}.items():
        assert any(line.split(maxsplit=1) == [name, state] for line in lines), name


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode"):
        regard.show_config("xml")


def test_names_that_are_not_there_are_attribute_errors_and_names_that_are_are_listed():
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        regard.attend  # noqa: B018
    assert dir(regard) == sorted(regard.__all__)
    for name in regard.__all__:
        assert getattr(regard, name) is not None


@pytest.mark.needs("fused")
def test_threads_are_set_for_calls_that_do_not_say():
    from regard.compute import native

    try:
        regard.set_threads(3)
        assert native.default_threads() == 3
        regard.set_threads(None)
        assert native.default_threads() >= 1
    finally:
        regard.set_threads(None)


@pytest.mark.parametrize(
    ("threads", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_number_of_threads_that_makes_no_sense_is_refused(threads, error):
    with pytest.raises(error, match="threads"):
        regard.set_threads(threads)

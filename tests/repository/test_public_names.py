"""What a user finds by looking around: names, and what they say of themselves."""

from __future__ import annotations

from importlib import import_module

import pytest

MODULES = [
    *("regard", "regard.masks", "regard.models", "regard.testing"),
    *("regard.scores", "regard.normalizers", "regard.textbook"),
    *(
        pytest.param(f"regard.interop.{library}", marks=pytest.mark.needs(library))
        for library in ("jax", "onnx", "torch", "transformers")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_looking_into_a_module_shows_what_users_need_and_nothing_else(name: str) -> None:
    module = import_module(name)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_is(name: str) -> None:
    module = import_module(name)
    documented = [getattr(module, each) for each in module.__all__]
    documented = [each for each in documented if callable(each) or hasattr(each, "__path__")]
    assert [each for each in (module, *documented) if not each.__doc__] == []

"""One more token in one go: the bytes, and the cache, of `append` and `attend`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import regard
from calls import assert_same_bytes, every_float, every_target, numbers, on_path
from regard import KVCache, ShapeError
from regard.compute import kv_step
from regard.compute.kv_step import step
from regard.positions import Alibi, Rotary

pytestmark = [pytest.mark.needs("fused")]

H, G, D = 4, 2, 8
CACHES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "rotary": {"positions": Rotary()},
    "pairs side by side": {"positions": Rotary(500.0, interleaved=True)},
    "alibi": {"positions": Alibi()},
    "window": {"window": (3, 0)},
    "int8": {"dtype": "int8"},
    "wider": {"dtype": "float64"},
    "room": {"capacity": 12},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "scale": {"scale": 0.3},
    "sink": {"sink": numbers((H,), seed=3), "scale": 0.5},
}
# Caches and options that the general calls answer.
GENERAL = {"alibi", "window", "int8", "wider", "sink"}


def drawn(tokens: int, seed: int, dtype: Any = np.float32, batch: int = 2) -> list[np.ndarray]:
    shapes = (batch, H, tokens, D), (batch, G, tokens, D), (batch, G, tokens, D)
    # Heads are split from rows that have all, as in a model.
    return [
        numbers((s[0], s[2], s[1], s[3]), dtype, seed=10 * seed + n).swapaxes(1, 2)
        for n, s in enumerate(shapes)
    ]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", CACHES)
def test_a_step_has_the_bytes_of_append_and_attend(kind, options, monkeypatch):
    plain = []
    choose = kv_step._plain

    def noted(*arguments: Any) -> Any:
        plain.append(choose(*arguments))
        return plain[-1]

    monkeypatch.setattr(kv_step, "_plain", noted)
    one, other = KVCache(**CACHES[kind]), KVCache(**CACHES[kind])
    for number, tokens in enumerate((1, 5, 1, 1, 1, 3)):
        query, key, value = drawn(tokens, number)
        found = step(one, query, key, value, **OPTIONS[options])
        other.append(key, value)
        assert_same_bytes(found, other.attend(query, **OPTIONS[options]))
        assert len(one) == len(other)
        assert_same_bytes(one.keys, other.keys)
        assert_same_bytes(one.values, other.values)
    assert any(one is not None for one in plain) == (not {kind, options} & GENERAL)


@every_target
@every_float
def test_every_target_and_type_has_the_same_bytes(target, dtype):
    one = KVCache(positions=Rotary())
    with on_path(f"fused:{target}"):
        step(one, *drawn(300, 0, dtype))
        for number in range(1, 4):
            other = copy.copy(one)
            query, key, value = drawn(1, number, dtype)
            other.append(key, value)
            assert_same_bytes(step(one, query, key, value), other.attend(query))


def test_a_step_that_is_refused_leaves_the_cache_as_it_was():
    cache = KVCache(positions=Rotary())
    step(cache, *drawn(3, 0))
    before = cache.keys.copy(), cache.values.copy()
    query, key, value = drawn(1, 1)
    with pytest.raises(ShapeError):
        step(cache, query, key[..., :4], value)
    with pytest.raises(ShapeError):
        step(cache, query, key[:, :1], value)
    assert len(cache) == 3
    assert_same_bytes(cache.keys, before[0])
    assert_same_bytes(cache.values, before[1])
    full = KVCache(capacity=3)
    step(full, *drawn(3, 0))
    with pytest.raises(regard.OptionError, match="capacity"):
        step(full, query, key, value)
    assert len(full) == 3

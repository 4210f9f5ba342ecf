"""`KVCache.save` and `KVCache.load`: a cache goes on from its file, and no other file makes one."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest

from calls import assert_same_bytes, every_float, inputs, numbers
from regard import KVCache, OptionError, ProblemError
from regard.boundary import npz

B, H, G, D, E = 2, 4, 2, 8, 6


def attended(cache: KVCache) -> Any:
    """A step after the content of a cache; the keys of its token are appended to a copy."""
    query, key, value = inputs((B, H, 1, D), (B, G, 1, D), (B, G, 1, E), dtype=np.float32, seed=9)
    dtypes = cache.keys.dtype, cache.values.dtype
    other = cache.__copy__()
    other.append(key.astype(dtypes[0]), value.astype(dtypes[1]))
    return other.attend(query)


def saved(cache: KVCache, folder: Any, name: str = "text.npz") -> Any:
    path = folder / name
    cache.save(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (40, 0), "capacity": 600},
        {"window": (None, 2)},
        {"dtype": "int8", "window": (300, None)},
        {"dtype": "float16", "capacity": 900},
    ],
    ids=str,
)
@every_float
def test_a_cache_goes_on_from_its_file(dtype, options, tmp_path):
    cache = KVCache(**options)
    _, key, value = inputs((1,), (B, G, 130, D), (B, G, 130, E), dtype=dtype)
    for lengths in ([130, 130], [130, 7], [1, 0], [120, 130], [2, 3], [99, 100]):
        cache.append(key, value, lengths=lengths)
    again = KVCache.load(saved(cache, tmp_path))
    for name in ("keys", "values", "lengths", "start"):
        held = getattr(again, name)
        for b, end in enumerate(cache.lengths - cache.start):
            here = (b, slice(None), slice(end)) if name in ("keys", "values") else b
            assert_same_bytes(held[here], getattr(cache, name)[here], name)
    assert_same_bytes(attended(again), attended(cache))
    whole, other = (
        saved(one, tmp_path, f"{n}.npz").read_bytes() for n, one in enumerate((cache, again))
    )
    assert other == whole  # what the cache was made with is in it too


def test_a_file_is_replaced_only_on_request_and_only_as_a_whole(tmp_path, monkeypatch):
    cache = KVCache()
    with pytest.raises(OptionError, match="there is nothing to save"):
        cache.save(tmp_path / "none.npz")
    cache.append(numbers((3, D)), numbers((3, E)))
    path = saved(cache, tmp_path)
    before = path.read_bytes()
    with pytest.raises(ProblemError, match="already exists; pass force=True to replace it"):
        cache.save(path)

    def fail(*given, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(ProblemError, match=r"text.npz: cannot be written: No space left"):
        cache.save(path, force=True)
    monkeypatch.undo()
    np.testing.assert_equal((os.listdir(tmp_path), path.read_bytes()), (["text.npz"], before))
    cache.append(numbers((3, D)), numbers((3, E)))
    cache.save(path, force=True)
    np.testing.assert_equal(len(KVCache.load(path)), 6)


def test_a_file_that_is_cut_off_or_damaged_is_refused_or_has_the_same_content(tmp_path):
    cache = KVCache(dtype="int8", window=(300, 0))
    cache.append(numbers((G, 5, D)), numbers((G, 5, E)))
    whole = saved(cache, tmp_path).read_bytes()
    keys, rng = cache.keys.tobytes(), np.random.default_rng(0)
    path = tmp_path / "other.npz"
    cuts = [whole[:n] for n in rng.integers(0, len(whole), 40)]
    flips = []
    for n in rng.integers(0, len(whole), 100):
        flips.append(bytearray(whole))
        flips[-1][n] ^= 1 << int(rng.integers(8))
    refused = 0
    for content in (*cuts, *flips):
        path.write_bytes(content)
        try:
            again = KVCache.load(path)
        except ProblemError:
            refused += 1
        else:
            np.testing.assert_equal((again.keys.tobytes(), len(again)), (keys, 5))
    assert refused > len(cuts) + len(flips) // 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": np.array("other")}, "is not the file of a KVCache"),
        ({"format": None}, "format is missing"),
        ({"format": np.array(3)}, "format must be text"),
        ({"version": np.array(2)}, "has version 2 of the format; this regard reads version 1"),
        ({"dtype": np.array("float16")}, "dtype is float16 but key has int8"),
        ({"dtype": np.array("int4")}, "dtype is .int4"),
        ({"capacity": np.array(2)}, "capacity is 2 but there are 5 keys"),
        ({"capacity": np.array(1.5)}, "capacity must be integers"),
        ({"window": np.array([1, 2, 3])}, r"window must be integers of shape \(2,\)"),
        ({"window": np.array([-2, 0])}, "not a number of tokens"),
        ({"key": np.zeros((G, 5, D), np.float32)}, "key is an array of float32, said to be .int8"),
        ({"key_dtype": np.array("object")}, "key is an array of int8, said to be .object"),
        ({"key_scale": np.zeros((G, 4, 1), np.float32)}, "key_scale must be float32, one for each"),
        ({"value_scale": np.zeros((G, 5, 1))}, "value_scale must be float32"),
        ({"value_dtype": np.array("float32"), "value": np.zeros((G, 4, E), "f4")}, "and value"),
        ({"start": np.array(1)}, "start, needed and end do not fit"),
        ({"start": np.array(256), "needed": np.array(256)}, "do not fit"),
        ({"end": np.array(6)}, "do not fit"),
        ({"needed": np.array(6)}, "do not fit"),
        ({"end": np.array([5, 5])}, r"end must be integers of shape \(\)"),
        ({"end": np.array(2**63, np.uint64)}, "not a number of tokens"),
        ({"more": np.array(1)}, ".more. has no place in it"),
        ({"positions": np.array("[]")}, "positions is not a JSON object that holds positions only"),
        ({"positions": np.array('{"positions": "rope"}')}, "positions is .rope.; the kinds are"),
        (
            {"positions": np.array('{"positions": {"kind": "rotary", "key_positions": [1]}}')},
            "a cache counts its tokens",
        ),
    ],
)  # fmt: skip
def test_what_a_file_says_must_fit_together(change, words, tmp_path):
    cache = KVCache(dtype="int8", window=(300, 0))
    cache.append(numbers((G, 5, D)), numbers((G, 5, E)))
    arrays = npz.read_arrays(io.BytesIO(saved(cache, tmp_path).read_bytes()), 2**20, 2**20)
    changed = {name: x for name, x in {**arrays, **change}.items() if x is not None}
    with open(tmp_path / "changed.npz", "wb") as file:
        npz.write_arrays(file, changed)
    with pytest.raises(ProblemError, match=words):
        KVCache.load(tmp_path / "changed.npz")


def test_another_file_is_refused(tmp_path):
    with pytest.raises(ProblemError, match="cannot be read: No such file"):
        KVCache.load(tmp_path / "none.npz")
    with pytest.raises(ProblemError, match="path must be a file name"):
        KVCache.load(3)
    np.savez(tmp_path / "arrays.npz", key=np.ones(3))
    with pytest.raises(ProblemError, match="format is missing"):
        KVCache.load(tmp_path / "arrays.npz")
